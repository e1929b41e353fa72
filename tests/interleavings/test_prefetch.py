"""The prefetch pipeline: rows are touched by one thread at a time, in an order that no schedule changes."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from interleavings.mutants import check_found

from monolith import concurrency
from monolith.runtime import prefetch
from monolith.runtime.prefetch import PrefetchPipeline, WaitForData
from monolith.testing.interleavings import explore, run_threads

MODULES = [prefetch, sys.modules[__name__]]
ITEMS = 3


class CountedRows:
    """Rows that count their updates, and notice two threads at once."""

    def __init__(self) -> None:
        self.updates: list[int] = []
        self._busy = False

    def look_up(self, item: int) -> int:  # noqa: ARG002
        self._touch()
        return len(self.updates)

    def update(self, item: int) -> None:
        self._touch()
        self.updates.append(item)

    def _touch(self) -> None:
        assert not self._busy, "two threads work on rows"
        self._busy = True
        for _ in range(3):  # takes a few steps
            len(self.updates)
        self._busy = False


def train(pipeline: PrefetchPipeline[int, int], rows: CountedRows) -> list[tuple[int, int]]:
    """Take all items, with how many updates the lookup of each had seen."""
    seen = []
    while (found := pipeline.next()) is not None:
        seen.append(found)
        pipeline.push(partial(rows.update, found[0]))
    pipeline.drain()
    return seen


def in_order(ahead: int, behind: bool) -> Callable[[], None]:
    def scenario() -> None:
        rows = CountedRows()
        pipeline = PrefetchPipeline(iter(range(ITEMS)), rows.look_up, ahead=ahead, behind=behind)
        seen = train(pipeline, rows)
        assert seen == [(item, max(0, item - ahead)) for item in range(ITEMS)]
        assert rows.updates == list(range(ITEMS))
        assert pipeline.exhausted
        assert pipeline.close()

    return scenario


def with_silence() -> None:
    """A live source: updates no longer wait for the next item, and `idle` drains in between."""
    rows = CountedRows()
    arrived = concurrency.Queue[int | None]()

    def source() -> Iterator[int]:
        while (item := arrived.get()) is not None:
            yield item

    def arrive() -> None:
        for item in (*range(ITEMS), None):
            concurrency.sleep(0.01)  # as long as the pipeline's patience
            arrived.put(item)

    def idle() -> bool:
        pipeline.drain()
        rows.look_up(-1)  # as a snapshot does
        return False

    waiting = WaitForData(patience=0.01, update_after=0.005, idle=idle)
    pipeline = PrefetchPipeline(source(), rows.look_up, ahead=1, waiting=waiting)
    seen: list[tuple[int, int]] = []
    run_threads(arrive, lambda: seen.extend(train(pipeline, rows)))
    assert [item for item, _ in seen] == list(range(ITEMS))
    assert all(max(0, item - 1) <= updates <= item for item, updates in seen), seen
    assert rows.updates == list(range(ITEMS))
    assert pipeline.close()


def interrupted() -> None:
    """Another thread interrupts: `next` ends early or not, and what was pushed is done."""
    rows = CountedRows()
    over = concurrency.Event()

    def source() -> Iterator[int]:
        yield 0
        yield 1
        over.wait()

    pipeline = PrefetchPipeline(source(), rows.look_up, ahead=1)
    seen: list[tuple[int, int]] = []
    run_threads(pipeline.interrupt, lambda: seen.extend(train(pipeline, rows)))
    assert rows.updates == [item for item, _ in seen]
    over.set()
    assert pipeline.close()


def failing() -> None:
    """The update of item 1 fails: no later update is done, and no later call says that all is well."""
    rows = CountedRows()

    def update(item: int) -> None:
        if item == 1:
            raise ValueError("update 1")
        rows.update(item)

    pipeline = PrefetchPipeline(iter(range(6)), rows.look_up, ahead=1)
    with pytest.raises(ValueError, match="update 1"):  # noqa: PT012  by `next` or by `push`
        while (found := pipeline.next()) is not None:
            pipeline.push(partial(update, found[0]))
    with pytest.raises(ValueError, match="update 1"):
        pipeline.drain()
    assert rows.updates == [0]
    assert pipeline.close()


def interrupted_while_idle() -> None:
    """`idle` waits for another thread, which first interrupts: neither waits for the other."""
    rows = CountedRows()
    over, came = concurrency.Event(), concurrency.Event()

    def source() -> Iterator[int]:
        yield 0
        over.wait()

    def idle() -> bool:
        came.wait()
        return False

    def interrupt() -> None:
        pipeline.interrupt()
        came.set()

    pipeline = PrefetchPipeline(source(), rows.look_up, waiting=WaitForData(patience=0.01, idle=idle))
    seen: list[tuple[int, int]] = []
    run_threads(interrupt, lambda: seen.extend(train(pipeline, rows)))
    assert rows.updates == [item for item, _ in seen]
    over.set()
    assert pipeline.close()


@pytest.mark.parametrize(("ahead", "behind"), [(1, True), (2, True), (1, False)])
def test_a_lookup_sees_the_same_updates_under_every_schedule(
    ahead: int, behind: bool, schedules: int
) -> None:
    explore(in_order(ahead, behind), MODULES, schedules=schedules)


@pytest.mark.parametrize("scenario", [with_silence, interrupted, interrupted_while_idle, failing])
def test_updates_are_done_once_and_in_order(scenario: Callable[[], None], schedules: int) -> None:
    explore(scenario, MODULES, schedules=schedules)


def _entered_although_paused(self: PrefetchPipeline[int, int], phase: prefetch._Phase) -> bool:
    self._phase = phase
    self._changed.notify_all()
    return not self._closed


def _does_not_look(self: PrefetchPipeline[int, int]) -> None:
    for work in [work for work in self._todo if work is not None]:
        work()
    self._todo = deque(work for work in self._todo if work is None)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        pytest.param("_enter", _entered_although_paused, id="a lookup begins although rows are in use"),
        pytest.param("_overtake", _does_not_look, id="updates are overtaken while the thread uses rows"),
    ],
)
def test_a_deliberate_bug_is_found(name: str, wrong: Callable[..., object]) -> None:
    check_found(with_silence, MODULES, PrefetchPipeline, name, wrong)
