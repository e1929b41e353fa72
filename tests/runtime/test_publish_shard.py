"""When a share publishes: as soon as a step changed rows, and at most once per interval."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
from store.fleets import wait_until

from monolith.runtime.publish_shard import PublishPlan, ShardPublisher, seconds_between
from monolith.sync import LearnedUpTo, MemoryChannel
from monolith.sync.publish_config import PublishConfig
from monolith.table import NativeTable, Segment, Sgd, TableConfig

INTERVAL = 1.0


@pytest.fixture
def learn() -> Iterator[Callable[[int], float]]:
    """Returns what changes a row and says so, and returns how many seconds that took to be published."""
    table = NativeTable(TableConfig(name="item", segments=(Segment(dim=2, optimizer=Sgd()),)))
    channel = MemoryChannel()
    config = PublishConfig(
        to="memory", interval=timedelta(seconds=INTERVAL), dense_interval=timedelta(hours=1)
    )
    share = ShardPublisher(
        {"item": table},
        (0, 1),
        PublishPlan(config=config, run="run", open_writer=lambda _: channel.writer()),
    )
    share.start()

    def learned(step: int) -> float:
        before = share.place
        table.assign(torch.tensor([step]), torch.ones(1, 2))
        share.learning.note(LearnedUpTo(step=step))
        at = time.monotonic()
        assert wait_until(lambda: share.place != before, 60)
        return time.monotonic() - at

    yield learned
    share.close()


def test_rows_are_published_when_a_step_changed_them_and_at_most_once_per_interval(
    learn: Callable[[int], float],
) -> None:
    learn(1)
    time.sleep(1.2 * INTERVAL)  # a clock that looks every interval has just looked, and found nothing
    assert learn(2) < 0.5 * INTERVAL
    assert learn(3) > 0.5 * INTERVAL  # so that a fast run does not publish every step


@pytest.mark.parametrize(
    ("took", "interval", "expected"),
    [(0.002, 0.05, 0.05), (0.01, 0.05, 0.2), (0.1, 0.05, 0.25), (0.1, 1.0, 1.0)],
)
def test_publishing_takes_a_twentieth_of_the_time_at_most_unless_rows_would_be_old(
    took: float, interval: float, expected: float
) -> None:
    assert seconds_between(took, interval) == pytest.approx(expected)
