"""Serving servers follow a trainer, each for its own ids, whatever number of processes trains."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from serve.shards.shard_folders import TABLES, all_ids, values_of, write_shards

from monolith.serve.shards import ServingServer, ServingServerConfig
from monolith.sync.channel import MemoryChannel
from monolith.sync.publisher import Publisher, PublisherConfig
from monolith.table import NativeTable, Segment, TableConfig

PATIENCE = 120
ALL_HASHES = (0, (1 << 64) - 1)


def until(condition: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Shares:
    """Trainers of one model, each with a share of its rows."""

    def __init__(self, channel: MemoryChannel, total: int) -> None:
        self.total = total
        self.tables = [
            {
                name: NativeTable(TableConfig(name=name, segments=(Segment(dim=dim),)))
                for name, dim in TABLES.items()
            }
            for _ in range(total)
        ]
        self.put(all_ids(), "1")
        self.publishers = [
            Publisher(tables, channel.writer(), PublisherConfig(run="runs/1", shard=(number, total)))
            for number, tables in enumerate(self.tables)
        ]

    def put(self, ids: torch.Tensor, version: str) -> None:
        for number, tables in enumerate(self.tables):
            mine = ids[torch.from_numpy(ids.numpy().view(np.uint64) % self.total == number)]
            for name, dim in TABLES.items():
                tables[name].assign(mine, values_of(mine, dim, version))

    def remove(self, ids: torch.Tensor) -> None:
        for tables in self.tables:
            for table in tables.values():
                table.remove(ids)

    def publish(self) -> None:
        for one in self.publishers:
            one.publish_now()

    def rows(self, name: str) -> dict[int, list[float]]:
        found: dict[int, list[float]] = {}
        for tables in self.tables:
            rows = tables[name].scan(limit=1 << 20).rows
            found.update(zip(rows.ids.tolist(), rows.values.tolist(), strict=True))
        return found

    def close(self) -> None:
        for one in self.publishers:
            one.close()


@contextmanager
def serving(folder: Path, channel: MemoryChannel, shards: int = 2) -> Iterator[list[ServingServer]]:
    with ExitStack() as opened:
        servers = [
            opened.enter_context(
                ServingServer(str(folder), shard, ServingServerConfig(threads=1), follow=channel.reader)
            )
            for shard in range(shards)
        ]
        for one in servers:
            one.start()
        yield servers


def served(servers: list[ServingServer], name: str) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for number, server in enumerate(servers):
        over = server._newest.over
        assert over is not None
        ids, values = over[0].present(name, *ALL_HASHES)
        assert (ids.numpy().view(np.uint64) % len(servers) == number).all()
        found.update(zip(ids.tolist(), values.tolist(), strict=True))
    return found


def test_three_training_shares_over_two_serving_servers_end_equal(tmp_path: Path) -> None:
    write_shards(tmp_path, shards=2)
    channel = MemoryChannel()
    trainers = Shares(channel, 3)
    with serving(tmp_path, channel) as servers:
        trainers.put(torch.arange(-40, 900), "2")
        trainers.remove(torch.arange(5, 25))
        trainers.publish()
        for name in TABLES:
            until(lambda name=name: served(servers, name) == trainers.rows(name))
    trainers.close()


def test_servers_follow_when_the_number_of_training_shares_changes(tmp_path: Path) -> None:
    write_shards(tmp_path, shards=2)
    channel = MemoryChannel()
    before = Shares(channel, 3)
    with serving(tmp_path, channel) as servers:
        before.put(torch.arange(1, 50), "2")
        before.publish()
        until(lambda: served(servers, "item") == before.rows("item"))
        before.close()
        after = Shares(channel, 2)
        after.put(torch.arange(1, 50), "3")
        after.remove(torch.arange(60, 70))
        after.publish()
        until(lambda: served(servers, "item") == after.rows("item"))
        after.close()


def test_a_server_that_is_sent_back_answers_as_exported(tmp_path: Path) -> None:
    write_shards(tmp_path, shards=1)
    channel = MemoryChannel()
    trainers = Shares(channel, 1)
    with serving(tmp_path, channel, 1) as servers:
        trainers.put(torch.arange(1, 50), "2")
        trainers.publish()
        until(lambda: served(servers, "item") == trainers.rows("item"))
        trainers.publishers[0].rollback("1")
        until(lambda: servers[0]._newest.over is None)
        trainers.publishers[0].resume()
        trainers.publish()
        until(
            lambda: servers[0]._newest.over is not None and served(servers, "item") == trainers.rows("item")
        )
    trainers.close()
