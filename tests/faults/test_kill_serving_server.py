"""kill -9 of a serving server under load: no wrong answer, and answers again as soon as there is one."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from serve.shards.shard_folders import table_ids, wanted, write_shards
from services import warm

from monolith.errors import DeadlineExceededError, UnavailableError
from monolith.serve.shards import RemoteRows, ShardsConfig, open_remote_rows

SOON = 120.0
CALLERS = 3

SERVER = """
import sys
from monolith.cluster import FilesConfig, FilesDiscovery
from monolith.serve.shards import ServingServer, ServingServerConfig
folder, registry, shard, replica = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
discovery = FilesDiscovery(FilesConfig(folder=registry))
server = ServingServer(folder, shard, ServingServerConfig(replica=replica, threads=1), discovery=discovery)
server.start()
print("ready", flush=True)
server.serve()
"""


@dataclass
class Load:
    """Callers that ask without a pause, and what they heard."""

    rows: RemoteRows
    right: int = 0
    wrong: int = 0
    failed: list[float] = field(default_factory=list)
    """When."""
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, seed: int) -> None:
        order = torch.Generator().manual_seed(seed)
        while not self.stop.is_set():
            item, user = (torch.randint(-600, 600, (40,), generator=order) for _ in range(2))
            try:
                found = self.rows.lookup(table_ids(item, user))
            except (UnavailableError, DeadlineExceededError):
                with self.lock:
                    self.failed.append(time.monotonic())
                self.stop.wait(0.01)
                continue
            right = found.missing == () and torch.equal(found.rows, wanted(item, user))
            with self.lock:
                self.right += right
                self.wrong += not right

    def go_on(self, answers: int) -> None:
        """Wait until so many more answers have come."""
        until, goal = time.monotonic() + SOON, self.right + answers
        while self.right < goal:
            assert time.monotonic() < until, "there are no answers any more"
            time.sleep(0.01)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "export"


@pytest.fixture
def started() -> Iterator[dict[tuple[int, int], warm.Popen]]:
    servers: dict[tuple[int, int], warm.Popen] = {}
    yield servers
    for server in servers.values():
        server.kill()
        server.wait(SOON)


def start(servers: dict[tuple[int, int], warm.Popen], tmp_path: Path, shard: int, replica: int) -> None:
    words = ["-c", SERVER, f"{tmp_path}/export", f"{tmp_path}/registry", str(shard), str(replica)]
    servers[shard, replica] = server = warm.Popen(words, stdout=warm.PIPE)
    assert server.stdout.readline() == "ready\n"


@contextlib.contextmanager
def under_load(rows: RemoteRows) -> Iterator[Load]:
    load = Load(rows)
    callers = [threading.Thread(target=load.ask, args=(seed,)) for seed in range(CALLERS)]
    for caller in callers:
        caller.start()
    try:
        load.go_on(20)
        yield load
    finally:
        load.stop.set()
        for caller in callers:
            caller.join(SOON)


def test_a_replica_that_is_killed_under_load_costs_no_answer(
    tmp_path: Path, folder: Path, started: dict[tuple[int, int], warm.Popen]
) -> None:
    servable = write_shards(folder, shards=2)
    for shard, replica in ((0, 0), (0, 1), (1, 0)):
        start(started, tmp_path, shard, replica)
    config = ShardsConfig(discovery=f"files://{tmp_path}/registry", deadline=timedelta(seconds=SOON))
    with open_remote_rows(servable, config) as rows, under_load(rows) as load:
        started[0, 1].kill()
        load.go_on(60)
        start(started, tmp_path, 0, 1)
        load.go_on(20)
    assert (load.wrong, load.failed) == (0, [])
    assert load.right >= 100


def test_the_only_server_of_a_shard_that_is_killed_is_missed_until_it_is_back(
    tmp_path: Path, folder: Path, started: dict[tuple[int, int], warm.Popen]
) -> None:
    servable = write_shards(folder, shards=2)
    for shard in range(2):
        start(started, tmp_path, shard, 0)
    config = ShardsConfig(discovery=f"files://{tmp_path}/registry", deadline=timedelta(seconds=SOON))
    with open_remote_rows(servable, config) as rows, under_load(rows) as load:
        started[1, 0].kill()
        started[1, 0].wait(SOON)
        until = time.monotonic() + SOON
        while not load.failed:
            assert time.monotonic() < until
            time.sleep(0.01)
        start(started, tmp_path, 1, 0)
        load.go_on(60)
        last = load.failed[-1]
        load.go_on(20)
    assert load.wrong == 0
    assert load.failed[-1] == last, "once it is back, there are no more failures"


@pytest.mark.soak
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_replica_that_dies_or_stops_is_routed_around_within_a_second(
    tmp_path: Path, folder: Path, started: dict[tuple[int, int], warm.Popen], blow: signal.Signals
) -> None:
    """With the usual deadline; ten times in a row, since it is a matter of moments."""
    servable = write_shards(folder, shards=2)
    for shard, replica in ((0, 0), (0, 1), (1, 0), (1, 1)):
        start(started, tmp_path, shard, replica)
    config = ShardsConfig(discovery=f"files://{tmp_path}/registry")
    with open_remote_rows(servable, config) as rows, under_load(rows) as load:
        for turn in range(10):
            victim = started[turn % 2, 1]
            struck = time.monotonic()
            victim.send_signal(blow)
            load.go_on(200)
            assert [when for when in load.failed if when > struck + 1.0] == []
            victim.kill()
            victim.wait(SOON)
            start(started, tmp_path, turn % 2, 1)
            load.go_on(200)
    assert load.wrong == 0
    assert len(load.failed) <= 10 * CALLERS, "only what was under way may fail"
