"""Pushes, background work, cached weights and grouped tables of a store, under many schedules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from interleavings.mutants import check_found
from torch import nn

from monolith.checkpoint import TablesPart
from monolith.checkpoint import tables as tables_part
from monolith.errors import TableClosedError
from monolith.store import LocalStore, TableIds, dense_cache, pushes
from monolith.store.dense import pack_tensors
from monolith.store.dense_cache import BackgroundQueue, DenseCache
from monolith.store.dense_config import DenseConfig
from monolith.store.pushes import AppliedPushes
from monolith.table import DictTable, Segment, Sgd, TableConfig, dict_table, multi_table
from monolith.testing.interleavings import explore, run_threads

HERE = sys.modules[__name__]


# Pushes at a server


def pushed_again(senders: int | None = None) -> Callable[[], None]:
    """Two connections of a worker bring the same pushes, out of order; another worker pushes meanwhile."""

    def scenario() -> None:
        applied = AppliedPushes(senders)
        count: dict[tuple[str, int], int] = {}

        def push(sender: str, *numbers: int) -> None:
            for number in numbers:

                def apply(number: int = number) -> None:
                    seen = count.get((sender, number), 0)
                    count[sender, number] = seen + 1

                def again(number: int = number) -> None:
                    assert count.get((sender, number)) == 1, "answered before it was applied"

                applied.once(sender, number, apply, again)

        run_threads(lambda: push("a", 1, 2, 3), lambda: push("a", 2, 1, 3), lambda: push("b", 1, 1))
        assert count == {("a", 1): 1, ("a", 2): 1, ("a", 3): 1, ("b", 1): 1}

    return scenario


def copied() -> None:
    """A copy of the rows that is taken at any moment has every push that is known to be applied."""
    applied = AppliedPushes()
    rows: set[int] = set()

    def push() -> None:
        for number in (1, 3, 2):
            applied.once("a", number, lambda number=number: rows.add(number), lambda: None)

    def copy() -> None:
        for _ in range(2):
            known = applied.known().get("a")
            if known is not None:
                missing = {*range(1, known.highest + 1)} - set(known.missing) - rows
                assert not missing, f"{missing} would be lost at a takeover"

    run_threads(push, copy)


def refused() -> None:
    """A push that was refused may be sent again; one that failed halfway is not applied again."""
    applied = AppliedPushes()
    attempts: list[int] = []

    def apply() -> None:
        attempts.append(1)
        if len(attempts) == 1:
            raise TableClosedError("refused")

    def push() -> None:
        try:
            applied.once("a", 1, apply, lambda: None)
        except TableClosedError:
            applied.once("a", 1, apply, lambda: None)

    run_threads(push, push)
    assert len(attempts) == 2


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(pushed_again(), id="again"),
        pytest.param(pushed_again(senders=2), id="as many senders as there may be"),
        copied,
        refused,
    ],
)
def test_each_push_is_applied_once(scenario: Callable[[], None], schedules: int) -> None:
    explore(scenario, [pushes, HERE], schedules=schedules)


def _checked_then_begun(self: AppliedPushes, sender: str, number: int, apply: Any, again: Any) -> Any:
    with self._changed:
        found = self._of(sender, number)
        is_new = self._is_new(found, number)
    if not is_new:
        return again()
    with self._changed:
        self._begin(found, number)
    answer = apply()
    self._end(found, number)
    return answer


def _not_awaited(self: AppliedPushes, sender: str, number: int, apply: Any, again: Any) -> Any:
    with self._changed:
        found = self._of(sender, number)
        is_new = self._is_new(found, number)
        if is_new:
            self._begin(found, number)
    if not is_new:
        return again()
    answer = apply()
    self._end(found, number)
    return answer


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(_checked_then_begun, id="the lock is released between check and note"),
        pytest.param(_not_awaited, id="a repeated push does not wait for the first"),
    ],
)
def test_a_deliberate_bug_in_pushes_is_found(wrong: Callable[..., object]) -> None:
    check_found(pushed_again(), [pushes, HERE], AppliedPushes, "once", wrong)


def test_a_push_under_way_that_counts_as_applied_is_found() -> None:
    def wrong(found: pushes._Sender) -> pushes.KnownPushes:
        return pushes.KnownPushes(found.highest, tuple(sorted(found.missing)))

    check_found(copied, [pushes, HERE], pushes, "_known", wrong)


# Work in the background, and the weights that it fetches


def in_background() -> None:
    """Work is done in order, and `wait` returns when as little is left as it says."""
    queue = BackgroundQueue("test")
    done: list[int] = []
    for number in range(4):
        queue.give(lambda number=number: done.append(number))
        queue.wait(1)
        assert number - 1 <= len(done) <= number + 1
    queue.wait()
    assert done == [0, 1, 2, 3]
    queue.close()


def failing_in_background() -> None:
    """An error is raised by the call after it, and later work is not done."""
    queue = BackgroundQueue("test")
    done: list[int] = []
    queue.give(lambda: done.append(0))
    queue.give(lambda: int("seven"))
    with pytest.raises(ValueError, match="seven"):  # noqa: PT012  by one of the two
        queue.give(lambda: done.append(2))
        queue.wait()
    assert done == [0]
    queue.close()


class CountingServer:
    """One server with one weight, which counts the pushes that it has applied."""

    def __init__(self) -> None:
        self.weight = 0
        self.step = 0

    def __len__(self) -> int:
        return 1

    def push(self, requests: Mapping[int, Any]) -> dict[int, Any]:  # noqa: ARG002
        self.weight += 1
        self.step += 1
        return self._answer()

    def exchange(self, name: str, requests: Mapping[int, Any]) -> dict[int, Any]:  # noqa: ARG002
        assert name == "pull_dense"
        return self._answer()

    def _answer(self) -> dict[int, Any]:
        data = np.array(pack_tensors([torch.tensor([float(self.weight)])]))
        return {0: SimpleNamespace(body={"step": self.step}, data=data)}


def cached(config: DenseConfig) -> Callable[[], None]:
    """A step's weights lack no more of the worker's pushes than `staleness` says, nor than is allowed."""

    def scenario() -> None:
        server = CountingServer()
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        about: list[dict[str, Any]] = [{"weights": {"w": ((1,), "float32")}}]
        cache = DenseCache(server, server.push, {"w": weight}, optimizer, about, config=config)  # type: ignore[arg-type]
        for pushed in range(1, 4):
            weight.grad = torch.ones(1)
            cache.push()
            cache.assign()
            assert weight.item() >= pushed - cache.staleness, "weights lack more than is told"
            assert cache.staleness <= (config.max_staleness if config.in_background else 0)
            assert cache.step == pushed
        cache.refresh()
        assert (weight.item(), cache.staleness) == (3, 0)
        cache.close()

    return scenario


@pytest.mark.parametrize("scenario", [in_background, failing_in_background])
def test_work_in_the_background_is_done_in_order(scenario: Callable[[], None], schedules: int) -> None:
    explore(scenario, [dense_cache, HERE], schedules=schedules)


MODES = [
    pytest.param(DenseConfig(prefetch=True), id="prefetch"),
    pytest.param(DenseConfig(postpush=True), id="postpush"),
    pytest.param(DenseConfig(prefetch=True, postpush=True, max_staleness=2), id="both"),
]


@pytest.mark.parametrize("config", MODES)
def test_cached_weights_lack_no_more_pushes_than_they_say(config: DenseConfig, schedules: int) -> None:
    explore(cached(config), [dense_cache, HERE], schedules=schedules)


def _covers_too_much(self: DenseCache) -> None:
    self._keep(self._group.exchange("pull_dense", {0: ({}, b"")}), self._answered)


def _taken_without_note(self: BackgroundQueue) -> int:
    return len(self._waiting)  # and not the work that is under way


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        pytest.param(
            DenseCache, "fetch", _covers_too_much, id="pushes are counted after the weights are read"
        ),
        pytest.param(BackgroundQueue, "_left", _taken_without_note, id="work under way counts as done"),
    ],
)
def test_a_deliberate_bug_in_the_cache_is_found(owner: type, name: str, wrong: Callable[..., object]) -> None:
    scenario = cached(DenseConfig(prefetch=True, postpush=True, max_staleness=2))
    check_found(scenario, [dense_cache, HERE], owner, name, wrong)


# Tables of one process


def closed_while_read() -> None:
    """A lookup is answered or refused, whenever the store is closed."""
    segment = Segment(dim=1, optimizer=Sgd(), learning_rate=1.0)
    names = ("item", "user")
    store = LocalStore.from_configs({n: TableConfig(name=n, segments=(segment,)) for n in names}, threads=1)
    ids = TableIds(torch.tensor([7, 8]), sizes=torch.tensor([1, 1]))

    def train() -> None:
        try:
            store.apply_gradients(ids, torch.tensor([-1.0, -1.0]))
            assert store.lookup(ids).tolist() == [1.0, 1.0]
        except TableClosedError:
            pass

    run_threads(train, store.close)


def test_a_store_that_is_closed_meanwhile_refuses_calls(schedules: int) -> None:
    explore(closed_while_read, [multi_table, HERE], schedules=schedules)


def snapshots_while_trained() -> None:
    """Checkpoints of two tables are each of one moment, and an incremental one has every change since."""
    config = TableConfig(name="item", segments=(Segment(dim=1, optimizer=Sgd(), learning_rate=1.0),))
    tables = {"item": DictTable(config), "user": DictTable(config)}
    part = TablesPart(tables, incremental=True)
    saved: dict[str, dict[int, float]] = {"item": {}, "user": {}}

    def train() -> None:
        for step in range(1, 4):
            for name in ("item", "user"):  # in this order: users are never ahead
                tables[name].assign(torch.tensor([1, 10 + step]), torch.full((2, 1), float(step)))
            for name in ("user", "item"):
                tables[name].remove(torch.tensor([9 + step]))

    def save() -> None:
        """Do as an incremental checkpoint does: apply what changed to the checkpoint before."""
        snapshot = part.snapshot(0)
        for name, one in snapshot._snapshots.items():
            for gone in one.removed().tolist():
                saved[name].pop(gone, None)
            rows = one.scan(changed_only=True).rows
            saved[name].update(zip(rows.ids.tolist(), rows.values[:, 0].tolist(), strict=True))
            every = one.scan().rows
            assert saved[name] == dict(zip(every.ids.tolist(), every.values[:, 0].tolist(), strict=True))
        snapshot.close(saved=True)
        item, user = (saved[name].get(1, 0.0) for name in ("item", "user"))
        assert item - 1 <= user <= item, f"items of step {item} and users of step {user}"

    run_threads(train, lambda: [save(), save()])
    save()
    assert saved["item"] == saved["user"] == {1: 3.0, 13: 3.0}


def test_snapshots_of_several_tables_are_of_one_moment(schedules: int) -> None:
    explore(snapshots_while_trained, [tables_part, dict_table, HERE], schedules=schedules)


def _not_frozen(self: TablesPart, step: int) -> tables_part.TablesSnapshot:  # noqa: ARG001
    snapshots = {name: table.snapshot() for name, table in self._tables.items()}
    return tables_part.TablesSnapshot(
        snapshots, {}, num_shards=None, workers=1, progress=None, shard=self._shard
    )


def test_tables_that_are_not_frozen_together_are_found() -> None:
    modules = [tables_part, dict_table, HERE]
    check_found(snapshots_while_trained, modules, TablesPart, "snapshot", _not_frozen)
