"""The order of lookups and updates, and that no thread's speed can change it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from services.properties import tries

from monolith.runtime.prefetch import SILENT, PrefetchPipeline, Silence, WaitForData


def done(log: list[str], ahead: int, behind: bool, items: int = 5, drain_after: int | None = None) -> None:
    """Train on numbers, logging lookups ("L") and updates ("U")."""

    def look_up(item: int) -> int:
        log.append(f"L{item}")
        return item

    with PrefetchPipeline(iter(range(items)), look_up, ahead=ahead, behind=behind) as lane:
        while (found := lane.next()) is not None:
            item, rows = found
            assert item == rows
            lane.push(partial(log.append, f"U{item}"))
            if item == drain_after:
                lane.drain()
        lane.drain()


def test_a_lookup_sees_every_update_but_the_last() -> None:
    log: list[str] = []
    done(log, ahead=1, behind=True)
    assert log == ["L0", "L1", "U0", "L2", "U1", "L3", "U2", "L4", "U3", "U4"]


def test_further_ahead_is_further_behind() -> None:
    log: list[str] = []
    done(log, ahead=2, behind=True)
    assert log == ["L0", "L1", "L2", "U0", "L3", "U1", "L4", "U2", "U3", "U4"]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_rows_that_are_looked_up_when_asked_for_see_every_update(ahead: int) -> None:
    log: list[str] = []

    def look_up(item: int, made: int) -> int:
        assert made == 10 * item
        log.append(f"L{item}")
        return made + 1

    with PrefetchPipeline(iter(range(4)), lambda item: 10 * item, look_up, ahead=ahead) as lane:
        while (found := lane.next()) is not None:
            item, rows = found
            assert rows == 10 * item + 1
            lane.push(partial(log.append, f"U{item}"))
            if item == 1:
                lane.drain()  # nothing was looked up that could be old
    assert log == ["L0", "U0", "L1", "U1", "L2", "U2", "L3", "U3"]


def test_without_a_thread_everything_happens_in_order() -> None:
    log: list[str] = []
    done(log, ahead=0, behind=True, items=3)
    assert log == ["L0", "U0", "L1", "U1", "L2", "U2"]


def test_updates_that_are_waited_for_keep_the_same_order() -> None:
    behind, waited = [], []
    done(behind, ahead=1, behind=True)
    done(waited, ahead=1, behind=False)
    assert waited == behind


def test_after_a_drain_all_is_as_after_a_restart() -> None:
    log: list[str] = []
    done(log, ahead=1, behind=True, drain_after=1)
    assert log.index("U1") < len(log) - 1 - log[::-1].index("L2")  # 2 is looked up anew, after update 1
    assert log.index("L3") < log.index("U2") < log.index("L4")


@given(
    pauses=st.lists(st.sampled_from(["read", "look", "update", "main"]), max_size=6),
    ahead=st.integers(0, 3),
    drains=st.sets(st.integers(0, 9)),
)
@settings(max_examples=tries(15), deadline=None)
def test_the_numbers_are_the_same_whichever_thread_is_slow(
    pauses: list[str], ahead: int, drains: set[int]
) -> None:
    def train(slow: set[str]) -> list[int]:
        """Each item adds what it read of a common row: the sum tells which updates a lookup saw."""
        row, seen = [0], []

        def wait(who: str) -> None:
            if who in slow:
                time.sleep(0.001)

        def read() -> Iterator[int]:
            for item in range(10):
                wait("read")
                yield item

        def look(item: int) -> int:  # noqa: ARG001
            wait("look")
            return row[0]

        def update(value: int) -> None:
            wait("update")
            row[0] += value

        with PrefetchPipeline(read(), look, ahead=ahead) as lane:
            while (found := lane.next()) is not None:
                item, value = found
                seen.append(value)
                wait("main")
                lane.push(partial(update, value + item + 1))
                if item in drains:
                    lane.drain()
                    seen.append(-row[0])
            lane.drain()
        return [*seen, row[0]]

    assert train(set(pauses)) == train(set())


def test_a_stream_that_pauses_does_not_hold_updates_back() -> None:
    more, updated = threading.Event(), threading.Event()

    def read() -> Iterator[int]:
        yield 0
        yield 1
        assert more.wait(60)
        yield 2

    with PrefetchPipeline(read(), lambda item: item, waiting=WaitForData(patience=0.01)) as lane:
        for item in (0, 1):
            assert lane.next() == (item, item)
            lane.push(updated.set if item == 1 else lambda: None)
        waiter = threading.Thread(target=lambda: (updated.wait(60), more.set()))
        waiter.start()
        assert lane.next() == (2, 2)  # the update of 1 came first, or the stream would still wait
        waiter.join()


@pytest.mark.parametrize("behind", [True, False])
def test_an_update_waits_no_longer_for_the_next_item_than_it_is_told(behind: bool) -> None:
    more, log = threading.Event(), list[str]()

    def read() -> Iterator[int]:
        yield 0
        yield 1
        assert more.wait(60)
        yield 2

    def update(item: int) -> None:
        log.append(f"U{item}")
        if item == 1:
            more.set()

    with PrefetchPipeline(
        read(),
        lambda item: item,
        behind=behind,
        waiting=WaitForData(patience=60, idle=lambda: bool(log.append("idle")), update_after=0.005),
    ) as lane:
        for item in (0, 1, 2):
            assert lane.next() == (item, item)
            lane.push(partial(update, item))
        assert log[:2] == ["U0", "U1"]  # and nobody was idle, for which there is another time


def test_draining_does_not_wait_for_a_stream_that_pauses() -> None:
    more = threading.Event()
    log: list[str] = []

    def read() -> Iterator[int]:
        yield 0
        assert more.wait(60)
        yield 1

    with PrefetchPipeline(read(), lambda item: item) as lane:
        assert lane.next() == (0, 0)
        lane.push(partial(log.append, "U0"))
        lane.drain()
        assert log == ["U0"]
        more.set()
        assert lane.next() == (1, 1)


def test_an_error_of_the_source_comes_after_what_could_be_read() -> None:
    def read() -> Iterator[int]:
        yield 0
        raise OSError("torn")

    with PrefetchPipeline(read(), lambda item: item) as lane:
        assert lane.next() == (0, 0)
        with pytest.raises(OSError, match="torn"):
            lane.next()


def test_an_error_of_an_update_is_raised() -> None:
    def fail() -> None:
        raise ValueError("full")

    def train_on(lane: PrefetchPipeline[int, int]) -> None:
        while lane.next() is not None:
            lane.push(lambda: None)

    with PrefetchPipeline(iter(range(100)), lambda item: item) as lane:
        lane.next()
        lane.push(fail)
        with pytest.raises(ValueError, match="full"):
            train_on(lane)


def test_updates_that_are_given_up_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    hold, entered = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        assert hold.wait(60)

    lane = PrefetchPipeline(iter(range(10)), lambda item: item)
    lane.next()
    lane.push(wait)
    lane.push(lambda: None)
    assert entered.wait(60)
    threading.Timer(0.05, hold.set).start()
    lane.close()
    assert "1 row updates were dropped" in caplog.text


def test_no_thread_is_left_behind() -> None:
    before = threading.active_count()
    log: list[str] = []
    done(log, ahead=1, behind=True)
    assert threading.active_count() == before


def test_an_interrupt_ends_the_wait_for_an_item_and_loses_no_update() -> None:
    log: list[str] = []
    quiet = threading.Event()

    def items() -> Iterator[int]:
        yield 0
        quiet.wait(30)

    with PrefetchPipeline(items(), lambda item: item, ahead=1) as lane:
        assert lane.next() == (0, 0)
        lane.push(partial(log.append, "U0"))
        threading.Timer(0.1, lane.interrupt).start()
        assert lane.next() is None
        lane.drain()
        assert log == ["U0"]
        quiet.set()


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_it_is_exhausted_when_all_items_were_returned_and_no_more_come(ahead: int) -> None:
    with PrefetchPipeline(iter(range(2)), lambda item: item, ahead=ahead) as lane:
        for _ in range(2):
            assert lane.next() is not None
            if not ahead:
                assert not lane.exhausted
        assert lane.next() is None
        assert lane.exhausted


def test_an_interrupted_lane_that_still_has_items_is_not_exhausted() -> None:
    preparing, go = threading.Event(), threading.Event()

    def look_up(item: int) -> int:
        preparing.set()
        assert go.wait(60)
        return item

    with PrefetchPipeline(iter(range(1)), look_up, ahead=1) as lane:
        lane.interrupt()
        assert lane.next() is None
        assert preparing.wait(60)
        go.set()
        deadline = time.monotonic() + 60
        while not lane._ended and time.monotonic() < deadline:
            time.sleep(0.001)
        assert not lane.exhausted


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_waiting_consumer_can_be_interrupted_and_misses_nothing(ahead: int) -> None:
    more, looked_up = threading.Event(), []

    def read() -> Iterator[int]:
        yield 0
        assert more.wait(60)
        yield from (1, 2, 3)

    def look_up(item: int) -> int:
        looked_up.append(item)
        return item

    lane = PrefetchPipeline(
        read(),
        look_up,
        ahead=ahead,
        behind=False,
        waiting=WaitForData(patience=0.01, idle=lambda: not more.is_set(), threaded=True),
    )
    with lane:
        assert lane.next() == (0, 0)
        assert [lane.next() for _ in range(3)] == [None] * 3
        assert not lane.exhausted
        lane.push(more.set)  # which is done although the source keeps the lane waiting
        assert [lane.next() for _ in range(3)] == [(1, 1), (2, 2), (3, 3)]
        assert looked_up == [0, 1, 2, 3]
        assert lane.next() is None
        assert lane.exhausted


# In step with others


def in_step(ahead: int, script: str, drains: set[int], pause: Callable[[str], None]) -> list[str]:
    """Train on a script of items (".") and silences ("-"); return what all ranks would have to do alike."""
    log: list[str] = []

    def items() -> Iterator[int | Silence]:
        number = 0
        for sign in script:
            pause("read")
            if sign == "-":
                yield SILENT
            else:
                yield number
                number += 1

    def look_up(item: int) -> int:
        pause("look up")
        log.append(f"L{item}")
        return item

    def update(item: int) -> None:
        pause("update")
        log.append(f"U{item}")

    with PrefetchPipeline(
        items(),
        look_up,
        ahead=ahead,
        lockstep=True,
        waiting=WaitForData(idle=lambda: bool(log.append("idle"))),
    ) as lane:
        while (found := lane.next()) is not None:
            item, _ = found
            pause("train")
            lane.push(partial(update, item))
            if item in drains:
                lane.drain()
                log.append("drained")
        lane.drain()
    return log


def test_in_step_a_silence_comes_after_all_updates_and_before_what_is_read_then() -> None:
    log = in_step(1, "..-.", set(), lambda _: None)
    assert log == ["L0", "L1", "U0", "U1", "idle", "L2", "U2"]


def test_in_step_a_drain_waits_for_lookups_and_repeats_them_when_they_are_needed() -> None:
    log = in_step(1, "...", {0}, lambda _: None)
    assert log == ["L0", "L1", "U0", "drained", "L1", "L2", "U1", "U2"]


def test_in_step_without_a_thread_a_silence_is_idle_too() -> None:
    assert in_step(0, ".-.", set(), lambda _: None) == ["L0", "U0", "idle", "L1", "U1"]


@settings(max_examples=tries(15))
@given(
    script=st.text("..-", min_size=1, max_size=8),
    ahead=st.integers(0, 2),
    drains=st.sets(st.integers(0, 7), max_size=3),
    slow=st.sets(st.sampled_from(["read", "look up", "update", "train"]), min_size=1),
)
def test_in_step_it_does_not_matter_which_thread_is_slow(
    script: str, ahead: int, drains: set[int], slow: set[str]
) -> None:
    expected = in_step(ahead, script, drains, lambda _: None)
    assert in_step(ahead, script, drains, lambda what: time.sleep(0.002 * (what in slow))) == expected


def test_in_step_an_interrupt_while_silent_reads_no_more() -> None:
    read: list[int] = []

    def items() -> Iterator[int | Silence]:
        yield 0
        read.append(1)
        yield SILENT
        read.append(2)
        yield 1

    lane: PrefetchPipeline[int, int] = PrefetchPipeline(
        items(),
        lambda item: item,
        lockstep=True,
        waiting=WaitForData(idle=lambda: bool(lane.interrupt())),
    )
    with lane:
        assert lane.next() == (0, 0)
        assert lane.next() is None
        lane.drain()
    assert read == [1]
