"""How a process of a run stands, from what it does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runtime.test_publish_supervisor import STANDING
from train.hooks.test_live_line import stats

from monolith.cli import train as command
from monolith.cli.main import parse_options
from monolith.cluster.status import JobStatus, StatusBoard, TierStatus, describe_tiers
from monolith.runtime.config_loading import load_run_config
from monolith.runtime.coordinator import CoordinatorStatus
from monolith.runtime.parameter_server import ShardFigures
from monolith.runtime.status import OwnStatus
from monolith.store import LocalStore, ParameterServer, ParameterServerStore, ServerGroup, TableIds
from monolith.store.store import add_tiered
from monolith.table import Segment, TableConfig
from monolith.train import TrainConfig
from monolith.train.hooks.barrier import LocalBarrier
from monolith.wire.bulk import Traffic


class Clocks:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def own(clock: Clocks | None = None, **settings: Any) -> OwnStatus:
    clock = clock or Clocks()
    return OwnStatus(load_run_config(code=settings), clock=clock, timer=clock)


def trained(
    *,
    rows: int = 7,
    traffic: Traffic | None = None,
    max_steps: int | None = None,
    read: Iterator[float] | None = None,
    standbys: str = "",
    live: bool = True,
) -> Any:
    """A run in this process, as far as it is looked at."""
    told = SimpleNamespace(traffic=traffic, tables={"item": stats(rows, bytes_total=70)})
    return SimpleNamespace(
        told=told,
        session=SimpleNamespace(
            model=SimpleNamespace(stats=lambda: told.tables),
            coordinator=SimpleNamespace(
                status=lambda: CoordinatorStatus(traffic=told.traffic, standbys=standbys)
            ),
            config=TrainConfig(max_steps=max_steps),
            batches=SimpleNamespace(live=live, stream=SimpleNamespace(trouble="the queue cannot be written")),
            progress=SimpleNamespace(expiry=SimpleNamespace(trouble="rows have expired")),
            fraction_read=lambda: None if read is None else next(read),
        ),
        barrier=LocalBarrier(1),
        save=SimpleNamespace(saved_at=999_990.0, trouble="the disk is full"),
        publish=None,
    )


def step(hook: Any, number: int, *, examples: int = 10, event_time: int = 0) -> None:
    ids = SimpleNamespace(event_time=event_time)
    hook.after_step(None, SimpleNamespace(step=number, examples=examples, batch=SimpleNamespace(ids=ids)))


def test_the_leading_worker_reports_the_state_of_publishing() -> None:
    status, watched = own(), trained()
    status.watch_worker(watched)
    assert status.status().publishing == ""
    held = replace(STANDING, held=True, reason="a bad upstream", since=5.0)
    watched.publish = SimpleNamespace(statuses=[held])
    assert status.status().publishing == "publishing paused since 1970-01-01 00:00:05 UTC: a bad upstream"


FLEET = {"cluster.num_ps": 2, "cluster.num_workers": 3, "train.model_dir": "m"}


def test_the_chief_says_which_shards_lack_a_standby() -> None:
    status = own()
    status.watch_worker(trained(standbys="shards that lack a standby: 1 (0 of 1 for 12 s)"))
    assert status.status().standbys == "shards that lack a standby: 1 (0 of 1 for 12 s)"


def test_a_worker_says_how_much_of_its_data_is_done_and_how_long_the_rest_takes() -> None:
    clock = Clocks()
    status = own(clock)
    hook = status.watch_worker(trained(read=iter([0.2, 0.3])))
    hook.after_create(SimpleNamespace(step=5))
    assert (status.status().data_read, status.status().seconds_left) == (None, None)  # no step yet
    step(hook, 6)
    assert (first := status.status()).data_read == 0.2
    assert first.seconds_left is None  # of one look nobody knows how fast it goes
    clock.now += 10
    assert status.status().seconds_left == pytest.approx(70.0)


def test_a_process_that_does_nothing_yet_is_starting() -> None:
    status = own(**FLEET, **{"cluster.index": 1, "job.name": "clicks"}).status()
    assert (status.name, status.state, status.job) == ("worker 1", "starting", "clicks")
    assert (status.num_ps, status.num_workers, status.time) == (2, 3, Clocks.now)
    assert status.pid > 0


def test_a_process_says_where_its_metrics_are() -> None:
    status = own()
    assert status.status().metrics == ""
    status.metrics_url = "http://127.0.0.1:9090/metrics"
    assert status.status().metrics == "http://127.0.0.1:9090/metrics"


def test_a_worker_s_speed_lag_rows_and_checkpoint_are_known() -> None:
    clock = Clocks()
    status = own(clock)
    hook = status.watch_worker(trained())
    hook.after_create(SimpleNamespace(step=100))  # type: ignore[arg-type]
    assert status.status().examples_per_s is None
    for number in range(20):
        step(hook, 101 + number, event_time=999_975)
    clock.now += 5
    found = status.status()
    assert (found.state, found.step) == ("training", 120)
    assert (found.steps_per_s, found.examples_per_s) == (4.0, 40.0)
    assert (found.lag_seconds, found.rows, found.bytes) == (30.0, 7, 70)
    assert found.saved_at == 999_990.0
    assert found.save_trouble == "the disk is full; the queue cannot be written; rows have expired"
    assert found.staleness is None  # there are no others


def test_files_of_long_ago_are_not_behind() -> None:
    status = own()
    hook = status.watch_worker(trained(live=False))
    hook.after_create(SimpleNamespace(step=100))
    step(hook, 101, event_time=999_975)
    assert status.status().lag_seconds is None


def test_steps_of_others_between_two_of_this_worker_are_its_staleness() -> None:
    clock = Clocks()
    status = own(clock, **FLEET)
    hook = status.watch_worker(trained())
    hook.after_create(SimpleNamespace(step=0))  # type: ignore[arg-type]
    status.status()
    for number in (3, 6, 9, 12):
        step(hook, number)
    clock.now += 1
    assert status.status().staleness == 2.0
    assert status.status().rows is None  # the servers have them


def test_a_worker_that_is_paused_says_so() -> None:
    clock, local = Clocks(), trained()
    status = own(clock)
    hook = status.watch_worker(local)
    hook.after_create(SimpleNamespace(step=0))  # type: ignore[arg-type]
    clock.now += 14
    assert status.status().state == "training"
    clock.now += 6
    assert status.status().state == "no step for 20 s"
    step(hook, 1)
    assert status.status().state == "training"
    local.barrier.place()
    assert status.status().state == "halted"


def test_a_worker_that_lost_others_says_so_and_counts() -> None:
    status = own(**FLEET)
    status.watch_worker(trained())
    status.lost_others()
    assert (status.status().state, status.status().failovers) == ("rejoining", 1)
    status.watch_worker(trained())
    assert (status.status().state, status.status().failovers) == ("starting", 1)


def test_a_server_says_what_it_holds_and_where_it_listens() -> None:
    status = own(**FLEET, **{"cluster.role": "ps"})
    share = SimpleNamespace(figures=lambda: ShardFigures("saving", step=4, rows=5, bytes=6))
    status.watch_server(share, "10.0.0.1:4000")  # type: ignore[arg-type]
    found = status.status()
    assert (found.name, found.state, found.address) == ("ps 0", "saving", "10.0.0.1:4000")
    assert (found.step, found.rows, found.bytes) == (4, 5, 6)


def test_a_worker_says_how_many_bytes_come_and_go() -> None:
    clock, local = Clocks(), trained(traffic=Traffic(100, 10))
    status = own(clock, **FLEET)
    status.watch_worker(local)
    assert status.status().received_per_s is None
    clock.now += 2
    local.told.traffic = Traffic(received=900, sent=50)
    assert (status.status().received_per_s, status.status().sent_per_s) == (400.0, 20.0)


def test_a_server_says_how_many_bytes_come_and_go() -> None:
    clock = Clocks()
    status = own(clock, **FLEET, **{"cluster.role": "ps"})
    tables = {"item": TableConfig(name="item", segments=(Segment(dim=4),))}
    store = LocalStore.from_configs(tables, threads=1)
    with ParameterServer([store], shard=(0, 1)) as server:
        share = SimpleNamespace(
            figures=lambda: ShardFigures("serving", step=0, rows=0, bytes=0, traffic=server.traffic)
        )
        status.watch_server(share, server.address)  # type: ignore[arg-type]
        status.status()
        group = ServerGroup([server.address])
        before = group.traffic
        remote = ParameterServerStore(group, 0, tables)
        remote.lookup(TableIds(torch.arange(1000), torch.tensor([1000])))
        group.close()
        clock.now += 1
        found = status.status()
    assert before == Traffic()
    assert 8000 < (found.received_per_s or 0) < 9000  # ids of 8 bytes
    assert 16_000 < (found.sent_per_s or 0) < 17_000  # rows of 4 floats
    assert group.traffic == (found.sent_per_s, found.received_per_s)  # what one sends the other receives
    store.close()


COLD = {
    "bytes_total": 30,
    "cold_rows": 60,
    "cold_bytes": 6000,
    "tiered_ids": 1000,
    "cold_found": 500,
    "cold_found_in_memory": 400,
    "cold_reads": 1,
    "cold_bytes_read": 4096,
    "cold_bytes_written": 8192,
}
LATER = COLD | {
    "cold_rows": 70,
    "tiered_ids": 3000,
    "cold_found": 700,
    "cold_found_in_memory": 560,
    "cold_reads": 7,
    "cold_bytes_read": 12_288,
    "cold_bytes_written": 8192,
    "compactions": 2,
}


def test_a_worker_says_what_its_tiered_tables_have_in_files_and_how_often_they_read() -> None:
    clock, local = Clocks(), trained()
    status = own(clock)
    status.watch_worker(local)
    assert status.status().tiers is None  # all rows are in memory
    local.told.tables = {"item": stats(90, **COLD), "user": stats(5)}
    assert status.status().tiers == TierStatus(
        rows=90, hot_rows=30, memory_bytes=30, file_bytes=6000, compactions=0
    )
    clock.now += 2
    local.told.tables = {"item": stats(90, **LATER), "user": stats(5)}
    found = status.status()
    assert (found.rows, found.bytes) == (95, 530)
    assert found.tiers == TierStatus(
        rows=90,
        hot_rows=20,
        memory_bytes=30,
        file_bytes=6000,
        compactions=2,
        ids_per_s=1000.0,
        ids_read_per_s=20.0,
        reads_per_s=3.0,
        read_per_s=4096.0,
        written_per_s=0.0,
    )
    assert JobStatus.from_json(status.page()).processes[0].tiers is not None
    local.told.tables = {"item": stats(90, device_rows=10, device_bytes=20, **LATER)}
    line = describe_tiers([status.status().tiers])
    assert line.startswith(
        "90 rows: 10 on the device (20 B), 10 in host memory (10 B), 70 in files (5.859 KiB)"
    )


def test_a_server_says_what_its_tiered_tables_have_in_files() -> None:
    status = own(**FLEET, **{"cluster.role": "ps"})
    tiered = add_tiered([stats(3), stats(90, **COLD)])
    figures = ShardFigures("serving", step=0, rows=93, bytes=330, tiered=tiered)
    status.watch_server(SimpleNamespace(figures=lambda: figures), "10.0.0.1:4000")  # type: ignore[arg-type]
    assert status.status().tiers == TierStatus(
        rows=90, hot_rows=30, memory_bytes=30, file_bytes=6000, compactions=0
    )


def test_a_run_without_a_model_dir_shows_its_status_on_request() -> None:
    (found,) = JobStatus.from_json(own().page()).processes
    assert found.name == "worker 0"


def test_a_process_is_seen_in_its_model_dir_unless_told_not_to(tmp_path: Path) -> None:
    board = StatusBoard(str(tmp_path))
    with own(**{"train.model_dir": str(tmp_path), "metrics.status_every": "0s"}).written():
        assert board.read().processes == ()
    status = own(**{"train.model_dir": str(tmp_path)})
    with pytest.raises(ValueError, match="a bug"), status.written():
        raise ValueError("a bug")
    assert [one.state for one in board.read().processes] == ["failed"]


def test_a_run_in_one_process_leaves_no_status_when_it_is_over(tmp_path: Path) -> None:
    flags = [
        "train.tasks:Clicks",
        "--model-dir",
        str(tmp_path),
        "--set",
        "batches=3",
        "--no-summaries",
        "--quiet",
    ]
    assert command.run(parse_options("train", flags), {}) == 0
    assert not Path(StatusBoard(str(tmp_path)).folder).exists()
