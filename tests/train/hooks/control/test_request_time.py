"""A run that ends at a moment of its data."""

from __future__ import annotations

import pytest
from train.runs import FakeRun, train

from monolith.errors import ConfigError
from monolith.train.hooks import RequestTimeHook, SaveTimer


@pytest.fixture
def timer() -> SaveTimer:
    timer = SaveTimer(every_steps=10**9)
    timer.stamp(0)
    timer.enabled = False
    return timer


def steps_until(limit: str | None, timer: SaveTimer, folder, *, interval: int = 1) -> int:
    if limit is not None:
        (folder / "limit_req_time").write_text(limit)
    hook = RequestTimeHook(timer, step_interval=interval)
    return train([hook], 20, run=FakeRun(folder), event_times=lambda step: 1000 + step).step


def test_it_ends_when_the_data_reaches_the_limit_and_makes_a_save_due(timer, tmp_path):
    assert steps_until("1007", timer, tmp_path) == 7
    assert timer.should_trigger(7)


def test_it_looks_only_now_and_then(timer, tmp_path):
    assert steps_until("1007\n", timer, tmp_path, interval=5) == 10


@pytest.mark.parametrize("limit", [None, "0", "-1", "2000"])
def test_without_a_limit_that_is_reached_nothing_happens(timer, tmp_path, limit):
    assert steps_until(limit, timer, tmp_path) == 20
    assert not timer.enabled


def test_a_limit_that_cannot_be_read_is_none_and_said(timer, tmp_path, caplog):
    assert steps_until("tomorrow", timer, tmp_path) == 20
    assert "limit_req_time must contain Unix seconds, got b'tomorrow'" in caplog.text


def test_a_run_without_a_folder_has_no_limit(timer):
    assert train([RequestTimeHook(timer, step_interval=1)], 3).step == 3


def test_an_interval_of_nothing_is_refused(timer):
    with pytest.raises(ConfigError, match="step_interval"):
        RequestTimeHook(timer, step_interval=0)


def test_it_looks_though_steps_jump(timer, tmp_path):
    (tmp_path / "limit_req_time").write_text("1007")

    def by_three(run: FakeRun) -> None:
        run.step += 2

    hook = RequestTimeHook(timer, step_interval=10)
    run = train([hook], 20, run=FakeRun(tmp_path), on_step=by_three, event_times=lambda step: 1000 + step)
    assert run.step == 12
