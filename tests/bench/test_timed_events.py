"""Events with their times: which second each falls into, and what is learned at rest."""

from __future__ import annotations

import zipfile
from datetime import timedelta
from pathlib import Path

import torch

from monolith_bench.movielens import RATINGS
from monolith_bench.timed_events import BURST, TimedEvents, drift_plan, movielens_plan

TIMES = [10, 10, 11, 14, 14, 14]
EVENTS = TimedEvents(
    ("user", "item"), torch.arange(12).view(6, 2), torch.tensor(TIMES), torch.tensor([1.0, 0, 1, 0, 1, 0])
)


def test_events_of_one_second_come_together_and_empty_seconds_not_at_all() -> None:
    assert list(EVENTS.seconds(0)) == [(10, 0, 2), (11, 2, 3), (14, 3, 6)]


def test_the_first_second_may_have_begun_before() -> None:
    assert list(EVENTS.seconds(4)) == [(14, 4, 6)]


def test_a_batch_has_the_ids_and_labels_of_its_events_and_the_time_of_its_last() -> None:
    batch = EVENTS.batch(torch.tensor([1, 2]))
    assert batch.ids.first("user").tolist() == [2, 4]
    assert batch.ids.first("item").tolist() == [3, 5]
    assert batch.label.tolist() == [0, 1]
    assert batch.ids.event_time == 11


def test_a_drifting_stream_goes_online_after_the_time_at_rest() -> None:
    plan = drift_plan(0, timedelta(minutes=2), timedelta(minutes=1), small=True)
    times = plan.events.times
    assert times[plan.online] - times[0] == 120
    assert [(now - times[0], end - first) for now, first, end in plan.events.seconds(plan.online)] == [
        (120 + BURST * n, 20) for n in range(6)
    ]
    assert plan.best is not None
    assert plan.best > 0.6


def test_ratings_of_movielens_keep_their_times(tmp_path: Path) -> None:
    wheel = tmp_path / "recbole-1.2.1-py3-none-any.whl"
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    lines += [f"{n}\t{n + 1}\t{n % 5 + 1}\t{1000 - n}" for n in range(10)]
    with zipfile.ZipFile(wheel, "w") as writing:
        writing.writestr(RATINGS, "\n".join(lines) + "\n")
    plan = movielens_plan(str(wheel), 0.2)
    assert plan.online == 8
    assert plan.events.times.tolist() == list(range(991, 1001))
    assert plan.events.ids[0].tolist() == [9, 10]
