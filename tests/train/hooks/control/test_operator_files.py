"""Files that steer saving."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from train.runs import At, FakeClock, FakeRun, train

from monolith.errors import ConfigError
from monolith.train.hooks import ForceDumpHook, OnlineFileHook, SaveTimer


def at(hour: int, minute: int = 0) -> FakeClock:
    return FakeClock(datetime(2024, 5, 17, hour, minute, tzinfo=UTC).timestamp())


@pytest.fixture
def timer() -> SaveTimer:
    timer = SaveTimer(every_steps=10**9)
    timer.stamp(0)
    return timer


def test_a_dump_file_makes_a_save_due_at_its_step(timer, tmp_path):
    (tmp_path / "dump_200").touch()
    due = []
    hooks = [
        ForceDumpHook(timer, clock=at(12)),
        *(At(step, lambda: due.append(timer.should_trigger(200))) for step in (100, 200)),
    ]
    assert train(hooks, 250, run=FakeRun(tmp_path)).step == 250
    assert due == [False, True]


def test_a_stop_file_makes_a_save_due_and_ends_the_run(timer, tmp_path):
    (tmp_path / "stop_200").touch()
    run = train([ForceDumpHook(timer, clock=at(12))], 1000, run=FakeRun(tmp_path))
    assert run.step == 200
    assert run.stop_reason == "there is a file stop_200"
    assert timer.should_trigger(200)


def test_steps_between_are_not_looked_at(timer, tmp_path):
    (tmp_path / "stop_150").touch()
    assert train([ForceDumpHook(timer, clock=at(12))], 300, run=FakeRun(tmp_path)).step == 300
    assert (
        train([ForceDumpHook(timer, clock=at(12), step_interval=50)], 300, run=FakeRun(tmp_path)).step == 150
    )


@pytest.mark.parametrize(
    "clock, enabled", [(at(17, 59), False), (at(18), True), (at(20, 59), True), (at(21), False)]
)
def test_the_timer_is_enabled_in_the_evening(timer, tmp_path, clock, enabled):
    train([ForceDumpHook(timer, clock=clock)], 100, run=FakeRun(tmp_path))
    assert timer.enabled is enabled


def test_the_timer_is_left_alone_without_a_window(timer, tmp_path):
    train([ForceDumpHook(timer, window=None)], 100, run=FakeRun(tmp_path))
    assert timer.enabled


def test_a_timer_is_enabled_while_the_model_is_online(timer, tmp_path):
    online = tmp_path / "ONLINE"
    seen = []
    look = lambda: seen.append(timer.enabled)  # noqa: E731
    hooks = [
        *(At(150, online.touch), At(250, online.unlink), OnlineFileHook(timer)),
        *(At(step, look) for step in (50, 100, 199, 200, 299, 300)),
    ]
    train(hooks, 300, run=FakeRun(tmp_path))
    assert seen == [False, False, False, True, True, False]


@pytest.mark.parametrize("kind", [ForceDumpHook, OnlineFileHook])
def test_a_run_without_a_folder_is_left_alone(timer, kind):
    train([kind(timer, step_interval=1)], 3)
    assert timer.enabled


@pytest.mark.parametrize("kind", [ForceDumpHook, OnlineFileHook])
def test_an_interval_of_nothing_is_refused(timer, kind):
    with pytest.raises(ConfigError, match="step_interval"):
        kind(timer, step_interval=0)


def by_three(run: FakeRun) -> None:
    """What a chief sees whose fleet has three workers."""
    run.step += 2


def test_files_of_steps_that_were_jumped_over_are_obeyed(timer, tmp_path):
    (tmp_path / "stop_100").touch()
    run = train([ForceDumpHook(timer, clock=at(12))], 200, run=FakeRun(tmp_path), on_step=by_three)
    assert (run.step, run.stop_reason) == (102, "there is a file stop_100")
    assert timer.should_trigger(102)


def test_a_dump_file_that_was_jumped_over_is_obeyed(timer, tmp_path):
    (tmp_path / "dump_100").touch()
    due = []
    hooks = [ForceDumpHook(timer, window=None), At(102, lambda: due.append(timer.should_trigger(102)))]
    train(hooks, 50, run=FakeRun(tmp_path), on_step=by_three)
    assert due == [True]


def test_the_online_file_is_looked_for_though_steps_jump(timer, tmp_path):
    train([OnlineFileHook(timer)], 40, run=FakeRun(tmp_path), on_step=by_three)
    assert not timer.enabled
