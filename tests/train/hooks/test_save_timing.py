"""When a save is due."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from train.runs import At, FakeClock, FakeRun, train

from monolith.errors import ConfigError
from monolith.train.hooks import (
    AfterSaveListener,
    BeforeSaveListener,
    DailyHours,
    ForceDumpHook,
    OnlineFileHook,
    RequestTimeHook,
    SaveListener,
    SaveMemory,
    SaveTimer,
)


def clock_at(hour: int) -> FakeClock:
    return FakeClock(datetime(2024, 5, 17, hour, tzinfo=UTC).timestamp())


@pytest.mark.parametrize("intervals", [{}, {"every_secs": 10, "every_steps": 10}])
def test_exactly_one_interval_must_be_given(intervals):
    with pytest.raises(ValueError, match="exactly one of every_secs and every_steps"):
        SaveTimer(**intervals)


@pytest.mark.parametrize("name", ["every_secs", "every_steps"])
def test_an_interval_is_above_0(name):
    with pytest.raises(ConfigError, match=name):
        SaveTimer(**{name: 0})


def test_the_first_save_is_due_at_once():
    assert SaveTimer(every_steps=100).should_trigger(7)


def test_a_step_is_due_once_only():
    clock = FakeClock()
    timer = SaveTimer(every_secs=10, clock=clock, timer=clock)
    timer.stamp(7)
    clock.now += 100
    assert not timer.should_trigger(7)
    assert timer.should_trigger(8)


def test_by_seconds():
    clock = FakeClock()
    timer = SaveTimer(every_secs=10, clock=clock, timer=clock)
    timer.stamp(1)
    clock.now += 5
    assert not timer.should_trigger(2)
    clock.now += 10
    assert timer.should_trigger(2)


def test_by_steps():
    timer = SaveTimer(every_steps=10, clock=FakeClock())
    timer.stamp(5)
    assert not timer.should_trigger(14)
    assert timer.should_trigger(15)


def test_inside_the_hours_the_usual_interval_holds():
    clock = clock_at(2)
    timer = SaveTimer(
        every_secs=10, hours=DailyHours(1, 0, 3, 0), secs_outside_hours=5, clock=clock, timer=clock
    )
    timer.stamp(1)
    clock.now += 5
    assert not timer.should_trigger(2)
    clock.now += 10
    assert timer.should_trigger(2)


def test_outside_the_hours_its_own_interval_holds():
    clock = clock_at(4)
    timer = SaveTimer(
        every_secs=10, hours=DailyHours(1, 0, 3, 0), secs_outside_hours=5, clock=clock, timer=clock
    )
    timer.stamp(1)
    clock.now += 2
    assert not timer.should_trigger(2)
    clock.now += 7
    assert timer.should_trigger(2)


def test_outside_the_tide_steps_do_not_count():
    timer = SaveTimer(every_steps=1, hours=DailyHours(1, 0, 3, 0), secs_outside_hours=5, clock=clock_at(4))
    timer.stamp(1)
    assert not timer.should_trigger(100)


def test_without_an_interval_for_it_the_tide_changes_nothing():
    timer = SaveTimer(every_steps=1, hours=DailyHours(1, 0, 3, 0), clock=clock_at(4))
    timer.stamp(1)
    assert timer.should_trigger(2)


def test_a_disabled_timer_is_never_due():
    timer = SaveTimer(every_steps=1)
    timer.enabled = False
    assert not timer.should_trigger(7)
    timer.enabled = True
    assert timer.should_trigger(7)


def test_after_a_reset_a_save_is_due_at_once():
    timer = SaveTimer(every_steps=100)
    timer.stamp(7)
    timer.reset()
    assert timer.last_step is None
    assert timer.should_trigger(7)


def test_a_stamp_says_what_passed_since_the_last():
    clock = FakeClock()
    timer = SaveTimer(every_steps=100, clock=clock, timer=clock)
    assert timer.stamp(5) is None
    clock.now += 3
    assert timer.stamp(12) == (3, 7)
    assert timer.last_step == 12


def test_a_rearmed_timer_is_due_after_the_back_off():
    clock = FakeClock()
    timer = SaveTimer(every_secs=600, clock=clock, timer=clock)
    timer.stamp(1)
    timer.rearm(30)
    clock.now += 29
    assert not timer.should_trigger(2)
    clock.now += 1
    assert timer.should_trigger(2)
    timer.stamp(2)
    clock.now += 100
    assert not timer.should_trigger(3)


def test_a_back_off_does_not_delay_what_is_due_sooner():
    clock = FakeClock()
    timer = SaveTimer(every_secs=10, clock=clock, timer=clock)
    timer.stamp(1)
    timer.rearm(30)
    clock.now += 10
    assert timer.should_trigger(2)


def test_a_wall_clock_that_jumps_changes_no_interval():
    wall, timer = FakeClock(), FakeClock(0.0)
    due = SaveTimer(every_secs=10, clock=wall, timer=timer)
    due.stamp(1)
    for step, jump in enumerate((86_400, -86_400, -86_400), 2):
        wall.now += jump
        timer.now += 9
        assert not due.should_trigger(step)
        timer.now += 1
        assert due.should_trigger(step)
        due.stamp(step)


def test_a_back_off_that_is_not_to_be_cut_short_delays_what_is_due_sooner():
    clock = FakeClock()
    timer = SaveTimer(every_secs=10, timer=clock)
    timer.stamp(1)
    timer.rearm(30, not_sooner=True)
    clock.now += 29
    assert timer.backs_off
    assert not timer.should_trigger(2)
    clock.now += 1
    assert timer.retry_due
    assert timer.should_trigger(2)


def test_a_save_that_failed_is_due_again_although_no_step_was_taken():
    clock = FakeClock()
    timer = SaveTimer(every_secs=10, timer=clock)
    timer.stamp(1)
    timer.rearm(30)
    clock.now += 30
    assert timer.should_trigger(1)


# Listeners that hear half of a save.


class Ear(SaveListener):
    def __init__(self, stop: bool | None = None) -> None:
        self.heard: list[str] = []
        self.stop = stop

    def begin(self) -> None:
        self.heard.append("begin")

    def before_save(self, step: int) -> None:
        self.heard.append(f"before {step}")

    def after_save(self, step: int) -> bool | None:
        self.heard.append(f"after {step}")
        return self.stop

    def end(self) -> None:
        self.heard.append("end")


def hear_all(listener: SaveListener) -> bool | None:
    listener.begin()
    listener.before_save(7)
    stop = listener.after_save(7)
    listener.end()
    return stop


def test_a_listener_that_overrides_nothing_does_nothing():
    assert hear_all(SaveListener()) is None


def test_the_half_before_a_save():
    ear = Ear(stop=True)
    assert hear_all(BeforeSaveListener(ear)) is None
    assert ear.heard == ["begin", "before 7", "end"]


@pytest.mark.parametrize("stop", [True, False, None])
def test_the_half_after_a_save_and_its_wish_to_stop(stop):
    ear = Ear(stop=stop)
    assert hear_all(AfterSaveListener(ear)) is stop
    assert ear.heard == ["begin", "after 7", "end"]


# What save hooks of one folder share.


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


# A run that ends at a moment of its data.


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


# Files that steer saving.


def at(hour: int, minute: int = 0) -> FakeClock:
    return FakeClock(datetime(2024, 5, 17, hour, minute, tzinfo=UTC).timestamp())


@pytest.fixture
def fresh() -> SaveTimer:
    fresh = SaveTimer(every_steps=10**9)
    fresh.stamp(0)
    return fresh


def test_a_dump_file_makes_a_save_due_at_its_step(fresh, tmp_path):
    (tmp_path / "dump_200").touch()
    due = []
    hooks = [
        ForceDumpHook(fresh, clock=at(12)),
        *(At(step, lambda: due.append(fresh.should_trigger(200))) for step in (100, 200)),
    ]
    assert train(hooks, 250, run=FakeRun(tmp_path)).step == 250
    assert due == [False, True]


def test_a_stop_file_makes_a_save_due_and_ends_the_run(fresh, tmp_path):
    (tmp_path / "stop_200").touch()
    run = train([ForceDumpHook(fresh, clock=at(12))], 1000, run=FakeRun(tmp_path))
    assert run.step == 200
    assert run.stop_reason == "there is a file stop_200"
    assert fresh.should_trigger(200)


def test_steps_between_are_not_looked_at(fresh, tmp_path):
    (tmp_path / "stop_150").touch()
    assert train([ForceDumpHook(fresh, clock=at(12))], 300, run=FakeRun(tmp_path)).step == 300
    assert (
        train([ForceDumpHook(fresh, clock=at(12), step_interval=50)], 300, run=FakeRun(tmp_path)).step == 150
    )


@pytest.mark.parametrize(
    "clock, enabled", [(at(17, 59), False), (at(18), True), (at(20, 59), True), (at(21), False)]
)
def test_the_timer_is_enabled_in_the_evening(fresh, tmp_path, clock, enabled):
    train([ForceDumpHook(fresh, clock=clock)], 100, run=FakeRun(tmp_path))
    assert fresh.enabled is enabled


def test_the_timer_is_left_alone_without_a_window(fresh, tmp_path):
    train([ForceDumpHook(fresh, window=None)], 100, run=FakeRun(tmp_path))
    assert fresh.enabled


def test_a_timer_is_enabled_while_the_model_is_online(fresh, tmp_path):
    online = tmp_path / "ONLINE"
    seen = []
    look = lambda: seen.append(fresh.enabled)  # noqa: E731
    hooks = [
        *(At(150, online.touch), At(250, online.unlink), OnlineFileHook(fresh)),
        *(At(step, look) for step in (50, 100, 199, 200, 299, 300)),
    ]
    train(hooks, 300, run=FakeRun(tmp_path))
    assert seen == [False, False, False, True, True, False]


@pytest.mark.parametrize("kind", [ForceDumpHook, OnlineFileHook])
def test_a_run_without_a_folder_is_left_alone(fresh, kind):
    train([kind(fresh, step_interval=1)], 3)
    assert fresh.enabled


@pytest.mark.parametrize("kind", [ForceDumpHook, OnlineFileHook])
def test_an_interval_of_nothing_is_refused_by_a_file_hook(fresh, kind):
    with pytest.raises(ConfigError, match="step_interval"):
        kind(fresh, step_interval=0)


def by_three(run: FakeRun) -> None:
    """What a chief sees whose fleet has three workers."""
    run.step += 2


def test_files_of_steps_that_were_jumped_over_are_obeyed(fresh, tmp_path):
    (tmp_path / "stop_100").touch()
    run = train([ForceDumpHook(fresh, clock=at(12))], 200, run=FakeRun(tmp_path), on_step=by_three)
    assert (run.step, run.stop_reason) == (102, "there is a file stop_100")
    assert fresh.should_trigger(102)


def test_a_dump_file_that_was_jumped_over_is_obeyed(fresh, tmp_path):
    (tmp_path / "dump_100").touch()
    due = []
    hooks = [
        ForceDumpHook(fresh, window=None),
        At(102, lambda: due.append(fresh.should_trigger(102))),
    ]
    train(hooks, 50, run=FakeRun(tmp_path), on_step=by_three)
    assert due == [True]


def test_the_online_file_is_looked_for_though_steps_jump(fresh, tmp_path):
    train([OnlineFileHook(fresh)], 40, run=FakeRun(tmp_path), on_step=by_three)
    assert not fresh.enabled
