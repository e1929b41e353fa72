"""The demo's live stream: nobody reads what has not happened, and what is staged happens when it should."""

from __future__ import annotations

from itertools import islice

import torch

from monolith.cli.demo.live_stream import NEW_ITEM, LiveClicks, LiveScript
from monolith.data import DriftingStream
from monolith.data.synthetic.drift import TIME

SCRIPT = LiveScript(began=1_700_000_000, rate=200, new_item=2, poison=4, cured=5)
SECOND = SCRIPT.rate


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.slept = 0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += 1


def live(clock: Clock) -> LiveClicks:
    return LiveClicks(SCRIPT, clock=clock, sleep=clock.sleep)


def anywhere() -> LiveClicks:
    return live(Clock(0.0))


def drifting() -> DriftingStream:
    return DriftingStream(SCRIPT.drift())


def column(stream: LiveClicks | DriftingStream, name: str, first: int, size: int = SECOND) -> torch.Tensor:
    return stream.records(first, size)[name].flat_values


def test_no_record_is_read_before_it_happened() -> None:
    clock = Clock(SCRIPT.began)
    for number, records in enumerate(islice(live(clock), 30), start=1):
        assert clock.now >= SCRIPT.time_of(number * len(records)) - 1e-6
        newest = int(records[TIME].flat_values[-1])
        assert newest <= clock.now
    assert clock.slept == 30


def test_who_is_behind_does_not_wait() -> None:
    clock = Clock(SCRIPT.began + 1_000)
    list(islice(live(clock), 30))
    assert clock.slept == 0


def test_before_anything_is_staged_it_is_the_drifting_stream() -> None:
    for name in ("user", "item", "context", "label"):
        assert torch.equal(column(anywhere(), name, 0, 2 * SECOND), column(drifting(), name, 0, 2 * SECOND))


def test_the_new_item_is_never_seen_before_its_second_and_often_after() -> None:
    assert NEW_ITEM not in column(anywhere(), "item", 0, SCRIPT.record_at(SCRIPT.new_item))
    later = column(anywhere(), "item", SCRIPT.record_at(SCRIPT.new_item))
    assert later[0] == NEW_ITEM
    assert (later == NEW_ITEM).float().mean() == 0.05


def test_whoever_sees_the_new_item_clicks_it() -> None:
    first = SCRIPT.record_at(SCRIPT.new_item)
    seen = column(anywhere(), "item", first) == NEW_ITEM
    assert column(anywhere(), "label", first)[seen].eq(1).all()


def test_poisoned_labels_are_turned_around_until_they_are_cured() -> None:
    first, end = SCRIPT.record_at(SCRIPT.poison), SCRIPT.record_at(SCRIPT.cured)
    usual = column(anywhere(), "item", first) != NEW_ITEM
    assert torch.equal(
        column(anywhere(), "label", first)[usual], 1 - column(drifting(), "label", first)[usual]
    )
    cured = column(anywhere(), "item", end) != NEW_ITEM
    assert torch.equal(column(anywhere(), "label", end)[cured], column(drifting(), "label", end)[cured])


def test_who_goes_on_from_a_position_reads_the_same_again() -> None:
    late = Clock(SCRIPT.began + 1_000)
    first, again = live(late), live(late)
    list(islice(first, 45))
    again.restore(first.position())
    for one, other in zip(islice(first, 50), islice(again, 50), strict=True):
        for name in ("user", "item", "label"):
            assert torch.equal(one[name].flat_values, other[name].flat_values)
