"""How new an answer is, also when the clocks of publisher and server differ."""

from __future__ import annotations

import pytest

from monolith.observe import Metrics
from monolith.serve.following.freshness import FollowMetrics, ServedUpTo
from monolith.sync.messages import LearnedUpTo

DAY = 86_400.0
BEGAN = 1_700_000_000.0


def served(*, ahead: float, offset: float | None) -> ServedUpTo:
    """An event of second 0, published at 3 and received at 4; the publisher's clock is `ahead`."""
    event, read, trained, published = (BEGAN + ahead + second for second in range(4))
    learned = LearnedUpTo(step=7, event_at=event, read_at=read, trained_at=trained, published_at=published)
    return ServedUpTo(learned, received_at=BEGAN + 4, applied_at=BEGAN + 5, clock_offset=offset)


def test_clocks_that_agree_are_not_mentioned() -> None:
    said = served(ahead=0, offset=0.2).claim(None).said(now=BEGAN + 10)
    assert said["staleness"] == 7
    assert "clock_differs_by" not in said


@pytest.mark.parametrize("ahead", [DAY, -DAY])
def test_a_measured_difference_of_clocks_is_taken_into_account_and_named(ahead: float) -> None:
    found = served(ahead=ahead, offset=ahead)
    said = found.claim(None).said(now=BEGAN + 10)
    assert said["staleness"] == 7
    assert said["clock_differs_by"] == ahead
    assert found.stages() == {"read": 1, "train": 1, "publish": 1, "wire": 1, "apply": 1}


def test_a_message_from_the_future_is_as_old_as_its_arrival_and_says_that_clocks_differ() -> None:
    said = served(ahead=DAY, offset=None).claim(None).said(now=BEGAN + 10)
    assert said["staleness"] == 6  # since it came: 0 would claim more than is known
    assert said["clock_differs_by"] == DAY - 1


def test_the_difference_of_clocks_is_a_metric() -> None:
    metrics = Metrics()
    FollowMetrics(metrics, "clicks").stands(6.0, 0, 0, DAY)
    assert 'serve_follow_clock_offset_seconds{model="clicks"} 86400.0' in metrics.render().decode()
