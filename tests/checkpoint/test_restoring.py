from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from checkpoint.dense.restores import restore_dense

from monolith.checkpoint.dense.custom_restore import CustomRestore
from monolith.checkpoint.dense.state import capture_dense
from monolith.checkpoint.restoring import InitializedShards, RestoreListener, run_restore
from monolith.table import DictTable, Segment, TableConfig, dump, load


class Recorder(RestoreListener):
    def __init__(self, name: str, calls: list[str], fails: str = "") -> None:
        self._name, self._calls, self._fails = name, calls, fails

    def _call(self, what: str) -> None:
        self._calls.append(f"{self._name} {what}")
        if what == self._fails:
            raise RuntimeError(f"{self._name} cannot {what}")

    def begin(self) -> None:
        self._call("begin")

    def before_restore(self) -> None:
        self._call("before")

    def after_restore(self) -> None:
        self._call("after")

    def end(self) -> None:
        self._call("end")


def test_each_event_reaches_all_listeners_in_order_before_the_next() -> None:
    calls: list[str] = []
    run_restore([Recorder("a", calls), Recorder("b", calls)])
    assert calls == [f"{name} {event}" for event in ("begin", "before", "after", "end") for name in "ab"]


def test_a_restore_is_once_per_start_whatever_the_steps() -> None:
    calls: list[str] = []
    run_restore([Recorder("a", calls)])
    for _ in range(2):
        pass  # two steps: a listener has no way to hear of them
    assert calls == ["a begin", "a before", "a after", "a end"]
    assert not any(hasattr(RestoreListener, name) for name in ("before_step", "after_step"))


def test_listeners_do_nothing_unless_told_otherwise() -> None:
    """A listener that cares for one event says nothing of the others, and stops nobody."""
    calls: list[str] = []

    class OnlyAfter(RestoreListener):
        def after_restore(self) -> None:
            calls.append("only after")

    run_restore([RestoreListener(), OnlyAfter(), Recorder("a", calls)])
    assert calls == ["a begin", "a before", "only after", "a after", "a end"]
    assert vars(RestoreListener()) == {}


@pytest.mark.parametrize(
    ("fails", "calls_after"),
    [
        ("begin", ["a begin", "b begin", "a end", "b end"]),
        ("before", ["a begin", "b begin", "c begin", "a before", "b before", "a end", "b end", "c end"]),
    ],
)
def test_a_failure_stops_the_restore_and_ends_the_parts_that_had_begun(
    fails: str, calls_after: list[str]
) -> None:
    calls: list[str] = []
    with pytest.raises(RuntimeError, match=f"b cannot {fails}"):
        run_restore([Recorder("a", calls), Recorder("b", calls, fails), Recorder("c", calls)])
    assert calls == calls_after


def test_the_first_failure_is_raised_and_later_ones_are_notes() -> None:
    calls: list[str] = []

    class TwiceBad(Recorder):
        def end(self) -> None:
            super().end()
            raise ValueError("end too")

    with pytest.raises(RuntimeError, match="a cannot before") as caught:
        run_restore([TwiceBad("a", calls, "before"), Recorder("b", calls)])
    assert calls[-2:] == ["a end", "b end"]
    assert "ValueError: end too" in caught.value.__notes__[0]


# Partial recovery


class FakeServer:
    """A parameter server: a variable, a table of one row, and a flag that dies with it."""

    def __init__(self) -> None:
        self.variable = torch.zeros(2)
        self.table = DictTable(TableConfig(name="t", segments=(Segment(dim=1),)))
        self.table.assign(torch.tensor([1]), torch.zeros(1, 1))
        self.flag = threading.Event()

    def step(self) -> None:
        self.variable += 1
        self.table.assign_add(torch.tensor([1]), torch.ones(1, 1))

    @property
    def state(self) -> tuple[float, float]:
        return self.variable[0].item(), self.table.lookup(torch.tensor([1])).item()


class Cluster:
    """Two of them, v0 and table0 on the first, v1 and table1 on the second."""

    def __init__(self, *servers: FakeServer) -> None:
        self.servers = servers
        self.shards = InitializedShards({f"ps{i}": server.flag for i, server in enumerate(servers)})

    @property
    def variables(self) -> dict[str, torch.Tensor]:
        return {f"v{i}": server.variable for i, server in enumerate(self.servers)}

    @property
    def state(self) -> list[tuple[float, float]]:
        return [server.state for server in self.servers]

    def save(self, prefix: str) -> None:
        capture_dense(self.variables).write_files(prefix)
        for i, server in enumerate(self.servers):
            dump(server.table, f"{prefix}.assets/table{i}")

    def restore(self, prefix: str, monitored: bool, custom: CustomRestore | None = None) -> None:
        only = self.shards.restorable(lambda name: f"ps{name[-1]}") if monitored else lambda _: True
        restore_dense(prefix, self.variables, custom=custom, model_dir=str(Path(prefix).parent), only=only)
        for i, server in enumerate(self.servers):
            if only(f"table{i}"):
                load(server.table, f"{prefix}.assets/table{i}")
        self.shards.mark_all()

    def step(self) -> None:
        for server in self.servers:
            server.step()


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return f"{tmp_path}/model.ckpt-1"


@pytest.fixture
def ahead(prefix: str) -> Cluster:
    """Saved when all was 1; now all is 2."""
    cluster = Cluster(FakeServer(), FakeServer())
    cluster.shards.mark_all()
    cluster.step()
    cluster.save(prefix)
    cluster.step()
    assert cluster.state == [(2, 2), (2, 2)]
    return cluster


@pytest.mark.usefixtures("ahead")
def test_two_new_servers_load_everything(prefix: str) -> None:
    cluster = Cluster(FakeServer(), FakeServer())
    cluster.restore(prefix, monitored=True)
    assert cluster.state == [(1, 1), (1, 1)]


def test_a_server_that_lives_keeps_what_it_has(prefix: str, ahead: Cluster) -> None:
    cluster = Cluster(ahead.servers[0], FakeServer())
    cluster.restore(prefix, monitored=True)
    assert cluster.state == [(2, 2), (1, 1)]


def test_without_a_monitor_everything_goes_back(prefix: str, ahead: Cluster) -> None:
    ahead.restore(prefix, monitored=False)
    assert ahead.state == [(1, 1), (1, 1)]


def test_a_restored_server_counts_as_live_from_then_on(prefix: str, ahead: Cluster) -> None:
    cluster = Cluster(ahead.servers[0], FakeServer())
    cluster.restore(prefix, monitored=True)
    cluster.step()
    cluster.restore(prefix, monitored=True)
    assert cluster.state == [(3, 3), (2, 2)]


@pytest.mark.parametrize(
    "custom", [CustomRestore(alias_map={"v0": "v1", "v1": "v0"}), CustomRestore(reset_dense=True)]
)
def test_custom_restores_leave_live_servers_alone(prefix: str, ahead: Cluster, custom: CustomRestore) -> None:
    """Upstream's alias map and reset_dense wrote over them."""
    cluster = Cluster(ahead.servers[0], FakeServer())
    cluster.restore(prefix, monitored=True, custom=custom)
    assert cluster.state[0] == (2, 2)
    assert cluster.state[1] == ((0, 1) if custom.reset_dense else (1, 1))


def test_what_is_on_no_shard_is_always_restored() -> None:
    shards = InitializedShards({"ps0": threading.Event()})
    shards.mark_all()
    assert not shards.uninitialised("ps0")
    assert shards.uninitialised("worker0")


def test_a_restore_asks_each_shard_once() -> None:
    class Flag(threading.Event):
        asked = 0

        def is_set(self) -> bool:
            self.asked += 1
            return False

    flag = Flag()
    only = InitializedShards({"ps0": flag}).restorable(lambda _: "ps0")
    assert only("a")
    assert only("b")
    assert flag.asked == 1
