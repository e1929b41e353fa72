"""The demo's live stream: nobody reads what has not happened, and what is staged happens when it should."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import torch

from monolith.data import DriftingStream
from monolith.data.synthetic.drift import TIME
from monolith_bench.examples.demo.live_stream import NEW_ITEM, Cues, CueSheet, LiveClicks, LiveScript

SCRIPT = LiveScript(began=1_700_000_000, rate=200, batch=10)
SECOND = SCRIPT.rate
CUES = Cues(new_item=2 * SECOND, poison=4 * SECOND, cured=5 * SECOND)


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
    return LiveClicks(SCRIPT, lambda: CUES, clock=clock, sleep=clock.sleep)


def anywhere() -> LiveClicks:
    return live(Clock(0.0))


def drifting() -> DriftingStream:
    return DriftingStream(SCRIPT.drift())


def ids(stream: LiveClicks | DriftingStream, name: str, first: int, size: int = SECOND) -> torch.Tensor:
    return stream.batch(first, size).ids[name].flat_values


def labels(stream: LiveClicks | DriftingStream, first: int, size: int = SECOND) -> torch.Tensor:
    return stream.batch(first, size).label


def test_no_record_is_read_before_it_happened() -> None:
    clock = Clock(SCRIPT.began)
    for number, records in enumerate(islice(live(clock), 30), start=1):
        assert clock.now >= SCRIPT.time_of(number * len(records)) - 1e-6
        newest = int(records[TIME].flat_values[-1])
        assert newest <= clock.now
    assert clock.slept == 30


def test_a_reader_that_is_behind_does_not_wait() -> None:
    clock = Clock(SCRIPT.began + 1_000)
    list(islice(live(clock), 30))
    assert clock.slept == 0


def test_before_anything_is_staged_it_is_the_drifting_stream() -> None:
    for name in ("user", "item", "context"):
        assert torch.equal(ids(anywhere(), name, 0, 2 * SECOND), ids(drifting(), name, 0, 2 * SECOND))
    assert torch.equal(labels(anywhere(), 0, 2 * SECOND), labels(drifting(), 0, 2 * SECOND))


def test_the_new_item_is_never_seen_before_its_second_and_often_after() -> None:
    assert NEW_ITEM not in ids(anywhere(), "item", 0, 2 * SECOND)
    later = ids(anywhere(), "item", 2 * SECOND)
    assert later[0] == NEW_ITEM
    assert (later == NEW_ITEM).sum() == 2


def test_simulated_users_who_see_the_new_item_click_it() -> None:
    seen = ids(anywhere(), "item", 2 * SECOND) == NEW_ITEM
    assert labels(anywhere(), 2 * SECOND)[seen].eq(1).all()


def test_poisoned_labels_are_turned_around_until_they_are_cured() -> None:
    first, end = 4 * SECOND, 5 * SECOND
    usual = ids(anywhere(), "item", first) != NEW_ITEM
    assert torch.equal(labels(anywhere(), first)[usual], 1 - labels(drifting(), first)[usual])
    cured = ids(anywhere(), "item", end) != NEW_ITEM
    assert torch.equal(labels(anywhere(), end)[cured], labels(drifting(), end)[cured])


def test_a_cue_that_is_given_later_reaches_readers_that_are_further_on(tmp_path: Path) -> None:
    given, read = CueSheet(tmp_path / "cues.json"), CueSheet(tmp_path / "cues.json")
    stream = LiveClicks(SCRIPT, read.read, clock=lambda: 0.0, sleep=lambda _: None)
    assert NEW_ITEM not in ids(stream, "item", 2 * SECOND)
    given.write(Cues(new_item=2 * SECOND))
    assert NEW_ITEM in ids(stream, "item", 2 * SECOND)
    given.write(CUES)
    assert read.read() == CUES


def test_a_record_is_found_by_its_time() -> None:
    assert SCRIPT.record_at(SCRIPT.began - 5) == 0
    assert SCRIPT.record_at(SCRIPT.time_of(1234)) == 1234


def test_a_reader_that_resumes_from_a_position_reads_the_same_records_again() -> None:
    late = Clock(SCRIPT.began + 1_000)
    first, again = live(late), live(late)
    list(islice(first, 45))
    again.restore(first.position())
    for one, other in zip(islice(first, 50), islice(again, 50), strict=True):
        for name in ("user", "item", "label"):
            assert torch.equal(one[name].flat_values, other[name].flat_values)
