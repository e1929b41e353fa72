"""What save hooks of one folder share."""

from __future__ import annotations

from train.runs import FakeClock

from monolith.train.hooks import SaveMemory


def test_the_time_that_training_waits_is_counted_once_however_deep_it_waits() -> None:
    clock = FakeClock(10.0)
    memory = SaveMemory(clock)
    with memory.waiting():
        clock.now += 2
        with memory.waiting():
            clock.now += 3
    clock.now += 50
    with memory.waiting():
        clock.now += 1
    assert memory.waited_seconds == 6
