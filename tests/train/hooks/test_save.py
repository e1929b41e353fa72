"""When checkpoints are saved, what is told to whom, and what an error means."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from train.runs import At, FakeClock, FakeRun, result, train

from monolith.concurrency import Clocks
from monolith.errors import ConfigError, TrainingError, TransientFilesystemError
from monolith.observe import Metrics, Resting
from monolith.train.hook import Hook
from monolith.train.hooks import (
    BarrierHook,
    BarrierSaveListener,
    DailyHours,
    LocalBarrier,
    SaveConfig,
    SaveHook,
    SaveListener,
    SaveMemory,
)
from monolith.train.hooks.save import FILES_PAUSE, SavePlan

SECONDS = 60.0
"""The most that a test waits for a thread; none should."""


class Checkpoints:
    """A checkpointer that keeps steps in a list."""

    def __init__(self, log: list[str] | None = None) -> None:
        self.log = log if log is not None else []
        self.steps: list[int] = []
        self.closed: list[tuple[int, bool]] = []
        self.fail_cuts = 0
        self.fail_writes = 0
        self.error: BaseException = OSError("disk full")
        self.writes = 0
        self.threads: list[str] = []
        self.may_write = threading.Event()
        self.may_write.set()
        self.wrote = threading.Event()

    def snapshot(self, step: int) -> Moment:
        self.log.append(f"cut {step}")
        if self.fail_cuts:
            self.fail_cuts -= 1
            raise self.error
        return Moment(self, step)


class Moment:
    kind = "incremental"

    def __init__(self, owner: Checkpoints, step: int) -> None:
        self.owner = owner
        self.step = step

    def write(self) -> str:
        assert self.owner.may_write.wait(SECONDS)
        self.owner.writes += 1
        self.owner.threads.append(threading.current_thread().name)
        if self.owner.fail_writes:
            self.owner.fail_writes -= 1
            raise self.owner.error
        self.owner.log.append(f"write {self.step}")
        self.owner.steps.append(self.step)
        return f"model.ckpt-{self.step}"

    def close(self, *, saved: bool) -> None:
        self.owner.closed.append((self.step, saved))
        self.owner.wrote.set()


class Listener(SaveListener):
    """Logs what it hears; `fails` names the calls that raise."""

    def __init__(self, name: str, log: list[str], *, fails: tuple[str, ...] = (), stop: bool = False) -> None:
        self.name, self.log, self.fails, self.stop = name, log, fails, stop

    def hear(self, what: str) -> None:
        self.log.append(f"{self.name} {what}")
        if what.split(maxsplit=1)[0] in self.fails:
            raise KeyError(what)

    def begin(self) -> None:
        self.hear("begin")

    def before_save(self, step: int) -> None:
        self.hear(f"before {step}")

    def after_save(self, step: int) -> bool:
        self.hear(f"after {step}")
        return self.stop

    def end(self) -> None:
        self.hear("end")


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert [thread for thread in threading.enumerate() if thread.name == "save-checkpoint"] == []


@pytest.fixture
def checkpoints() -> Checkpoints:
    return Checkpoints()


def by_steps(steps: int, **options: object) -> SaveConfig:
    return SaveConfig(steps=steps, **options)


# When


def test_one_step_then_the_end_saves_that_step_and_not_the_first(checkpoints):
    train([SaveHook(checkpoints)], 1)
    assert checkpoints.steps == [1]


def test_the_log_says_whether_all_was_written_or_what_changed(checkpoints, caplog):
    caplog.set_level("INFO")
    train([SaveHook(checkpoints, SaveConfig(steps=100))], 1)
    train([SaveHook(checkpoints, SaveConfig(steps=1), plan=SavePlan(dense_only=True))], 1)
    assert "saved step 1 (incremental)" in caplog.text
    assert "saved step 1 (dense_only)" in caplog.text


def test_the_first_state_is_saved_where_that_is_asked_for(checkpoints):
    train([SaveHook(checkpoints, plan=SavePlan(no_first_save=False))], 1)
    assert checkpoints.steps == [0, 1]


def test_every_so_many_steps_and_at_the_end(checkpoints):
    train([SaveHook(checkpoints, by_steps(2))], 5)
    assert checkpoints.steps == [2, 4, 5]


def test_the_end_is_not_saved_twice(checkpoints):
    train([SaveHook(checkpoints, by_steps(2))], 4)
    assert checkpoints.steps == [2, 4]


def test_a_run_without_steps_saves_nothing(checkpoints):
    train([SaveHook(checkpoints)], 0, run=FakeRun(step=100))
    assert checkpoints.steps == []


def test_every_so_many_seconds(checkpoints):
    clock = FakeClock()
    train(
        [SaveHook(checkpoints, SaveConfig(secs=10), clocks=Clocks(wall=clock, timer=clock))],
        30,
        on_step=lambda _: clock.sleep(1),
    )
    assert checkpoints.steps == [10, 20, 30]


def test_intervals_count_from_the_restored_step(checkpoints):
    train([SaveHook(checkpoints, by_steps(10))], 10, run=FakeRun(step=95))
    assert checkpoints.steps == [105]


def test_both_intervals_are_refused():
    with pytest.raises(ValueError) as refused:
        SaveConfig(secs=1, steps=1)
    assert str(refused.value) == "Can not provide both save_checkpoints_secs and save_checkpoints_steps."


@pytest.mark.parametrize("name", ["secs", "steps", "secs_outside_hours", "retry_secs"])
def test_an_interval_of_nothing_is_refused(name):
    with pytest.raises(ConfigError, match=name):
        SaveConfig(**{name: 0})


def test_without_an_interval_a_save_is_due_every_hundred_million_steps():
    timer = SaveConfig().timer(FakeClock())
    timer.stamp(0)
    assert not timer.should_trigger(99_999_999)
    assert timer.should_trigger(100_000_000)


def test_the_tide_has_its_own_interval(checkpoints):
    clock = FakeClock(0.0)  # midnight
    config = SaveConfig(secs=1000, hours=DailyHours(1, 0, 3, 0), secs_outside_hours=5)
    train(
        [SaveHook(checkpoints, config, clocks=Clocks(wall=clock, timer=clock))],
        12,
        on_step=lambda _: clock.sleep(1),
    )
    assert checkpoints.steps == [5, 10, 12]


def test_a_run_that_dies_is_not_saved(checkpoints):
    def die() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train([SaveHook(checkpoints), At(2, die)], 3)
    assert checkpoints.steps == []


def test_a_disabled_timer_saves_the_end_only(checkpoints):
    hook = SaveHook(checkpoints, by_steps(1))
    hook.timer.enabled = False
    train([hook], 3)
    assert checkpoints.steps == [3]


def test_a_run_taken_back_is_saved_again(checkpoints):
    run = FakeRun()

    def back() -> None:
        if len(checkpoints.steps) == 1:
            run.step = 1

    train([SaveHook(checkpoints, by_steps(4)), At(5, back)], 8, run=run)
    assert checkpoints.steps == [4, 4]


# Whom it tells


def test_guards_surround_listeners_which_surround_the_write():
    log: list[str] = []
    listeners = [Listener("a", log), Listener("b", log)]
    guards = [Listener("g", log), Listener("h", log)]
    train([SaveHook(Checkpoints(log), listeners=listeners, guards=guards)], 1)
    assert log == [
        *("g begin", "h begin", "a begin", "b begin"),
        *("g before 1", "h before 1", "a before 1", "b before 1"),
        *("cut 1", "write 1"),
        *("a after 1", "b after 1", "h after 1", "g after 1"),
        *("g end", "h end", "a end", "b end"),
    ]


def test_errors_of_guards_change_nothing(caplog):
    log: list[str] = []
    guards = [Listener("g", log, fails=("before", "after")), Listener("h", log)]
    checkpoints = Checkpoints()
    train([SaveHook(checkpoints, guards=guards)], 1)
    assert checkpoints.steps == [1]
    assert log == [
        "g begin",
        "h begin",
        "g before 1",
        "h before 1",
        "h after 1",
        "g after 1",
        "g end",
        "h end",
    ]
    assert "Listener failed before the save at step 1" in caplog.text


def test_a_listener_may_ask_to_stop(checkpoints):
    run = train([SaveHook(checkpoints, by_steps(2), listeners=[Listener("a", [], stop=True)])], 10)
    assert run.step == 2
    assert run.stop_reason == "Listener asked to stop after saving step 2"


def test_the_state_file_is_told_where_the_checkpoint_is(checkpoints):
    told = []
    train([SaveHook(checkpoints, by_steps(2), plan=SavePlan(on_saved=lambda *saved: told.append(saved)))], 3)
    assert told == [(2, "model.ckpt-2"), (3, "model.ckpt-3")]


def test_a_state_file_that_cannot_be_written_does_not_undo_the_checkpoint(checkpoints, caplog):
    def fail(step: int, prefix: str | None) -> None:
        raise OSError(f"cannot note {step} {prefix}")

    train([SaveHook(checkpoints, by_steps(1), plan=SavePlan(on_saved=fail))], 2)
    assert checkpoints.steps == [1, 2]
    assert "cannot note 2 model.ckpt-2" in caplog.text


def test_saves_and_failures_are_counted_by_mode(checkpoints):
    metrics, clock = Metrics(prefix=""), FakeClock()
    checkpoints.fail_writes = 1
    train([SaveHook(checkpoints, by_steps(1), clocks=Clocks(wall=clock, timer=clock), metrics=metrics)], 2)
    train(
        [
            SaveHook(
                checkpoints,
                by_steps(1),
                plan=SavePlan(dense_only=True),
                clocks=Clocks(wall=clock, timer=clock),
                metrics=metrics,
            )
        ],
        2,
    )
    text = metrics.render().decode()
    assert 'save_checkpoint_total{mode="full"} 2.0' in text
    assert 'save_checkpoint_failed_total{mode="full"} 1.0' in text
    assert 'save_checkpoint_total{mode="dense_only"} 2.0' in text
    assert 'save_checkpoint_time_count{mode="full"} 2.0' in text


# Errors


def test_a_write_that_fails_is_tried_once_more(checkpoints):
    checkpoints.fail_writes = 1
    train([SaveHook(checkpoints)], 1)
    assert checkpoints.steps == [1]
    assert checkpoints.writes == 2
    assert checkpoints.closed == [(1, True)]


def test_a_cut_that_fails_is_tried_once_more(checkpoints):
    checkpoints.fail_cuts = 1
    train([SaveHook(checkpoints)], 1)
    assert checkpoints.log == ["cut 1", "cut 1", "write 1"]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyError("bug"), ZeroDivisionError()])
def test_after_two_failures_the_error_ends_the_run(checkpoints, error):
    log: list[str] = []
    checkpoints.fail_writes, checkpoints.error = 2, error
    with pytest.raises(type(error)):
        train([SaveHook(checkpoints, by_steps(2), guards=[Listener("g", log)])], 5)
    assert checkpoints.writes == 2
    assert checkpoints.closed == [(2, False)]
    assert log == ["g begin", "g before 2", "g after 2"]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyError("bug"), ZeroDivisionError()])
def test_an_ignored_error_lets_training_continue_whatever_its_type(checkpoints, error):
    checkpoints.fail_writes, checkpoints.error = 2, error
    run = train([SaveHook(checkpoints, by_steps(2, ignore_errors=True))], 5)
    assert run.step == 5
    assert checkpoints.steps == [4, 5]


def test_a_listener_that_fails_before_the_save_is_ignored_and_guards_are_undone():
    log: list[str] = []
    checkpoints = Checkpoints()
    hook = SaveHook(
        checkpoints,
        by_steps(2, ignore_errors=True),
        listeners=[Listener("a", log, fails=("before",))],
        guards=[Listener("g", log)],
    )
    assert train([hook], 3).step == 3
    assert checkpoints.steps == []
    assert log[2:6] == ["g before 2", "a before 2", "a before 2", "g after 2"]


def test_a_listener_that_fails_afterwards_is_told_again_and_nothing_is_written_again():
    log: list[str] = []
    checkpoints = Checkpoints(log)
    hook = SaveHook(
        checkpoints,
        by_steps(2),
        listeners=[Listener("a", log), Listener("b", log, fails=("after",))],
    )
    with pytest.raises(KeyError):
        train([hook], 3)
    assert log[-4:] == ["write 2", "a after 2", "b after 2", "b after 2"]


def test_after_an_ignored_failure_the_next_attempt_is_soon(checkpoints):
    clock = FakeClock()
    checkpoints.fail_writes = 2
    config = SaveConfig(secs=600, retry_secs=30, ignore_errors=True)
    train(
        [SaveHook(checkpoints, config, clocks=Clocks(wall=clock, timer=clock))],
        640,
        on_step=lambda _: clock.sleep(1),
    )
    assert checkpoints.steps == [630, 640]


def test_a_final_save_that_fails_is_tried_again_and_raised_but_listeners_are_ended():
    log: list[str] = []
    checkpoints = Checkpoints(log)
    checkpoints.fail_writes = 2
    with pytest.raises(OSError, match="disk full"):
        train([SaveHook(checkpoints, listeners=[Listener("a", log)], guards=[Listener("g", log)])], 1)
    assert log == ["g begin", "a begin", "g before 1", "a before 1", "cut 1", "g after 1", "g end", "a end"]


def test_an_interrupt_closes_the_moment_and_passes(checkpoints):
    checkpoints.fail_writes, checkpoints.error = 1, KeyboardInterrupt()
    hook = SaveHook(checkpoints, by_steps(1, ignore_errors=True))
    with pytest.raises(KeyboardInterrupt):
        train([hook], 2)
    assert checkpoints.closed == [(1, False)]


# On demand


def test_a_save_on_demand_is_on_disk_when_the_call_returns(checkpoints):
    hook = SaveHook(checkpoints, by_steps(100))
    seen = []
    train([hook, At(3, lambda: seen.append((hook.trigger_save().result(0), list(checkpoints.steps))))], 5)
    assert seen == [("model.ckpt-3", [3])]
    assert checkpoints.steps == [3, 5]


def test_a_save_on_demand_does_not_ask_whether_the_timer_is_enabled(checkpoints):
    hook = SaveHook(checkpoints, by_steps(1))
    hook.timer.enabled = False
    train([hook, At(3, hook.trigger_save)], 5)
    assert checkpoints.steps == [3, 5]


def test_the_interval_counts_from_a_save_on_demand(checkpoints):
    hook = SaveHook(checkpoints, by_steps(4))
    train([hook, At(3, hook.trigger_save)], 7)
    assert checkpoints.steps == [3, 7]


def test_a_step_on_disk_is_not_written_again(checkpoints):
    hook = SaveHook(checkpoints, by_steps(2))
    answers = []
    train([hook, At(2, lambda: answers.append(hook.trigger_save().result(0)))], 2)
    assert checkpoints.steps == [2]
    assert answers == ["model.ckpt-2"]


def test_an_error_on_demand_is_raised_though_the_hook_ignores_errors(checkpoints):
    checkpoints.fail_writes = 2
    hook = SaveHook(checkpoints, SaveConfig(ignore_errors=True))
    with pytest.raises(OSError, match="disk full"):
        train([hook, At(3, hook.trigger_save)], 5)


def test_an_error_on_demand_is_ignored_on_demand(checkpoints):
    checkpoints.fail_writes = 2
    hook = SaveHook(checkpoints)
    answers = []
    train([hook, At(3, lambda: answers.append(hook.trigger_save(ignore_save_errors=True).result(0)))], 5)
    assert answers == [None]
    assert checkpoints.steps == [5]


def in_thread(call: Callable[[], object]) -> object:
    """Call it from another thread, and return what it returned."""
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()
    thread.join(SECONDS)
    return answers[0]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_another_thread_asks_for_is_saved_before_the_next_step(checkpoints, asynchronous):
    hook = SaveHook(checkpoints, SaveConfig(asynchronous=asynchronous))
    futures = []
    train([hook, At(3, lambda: futures.append(in_thread(hook.trigger_save)))], 5)
    assert futures[0].result(SECONDS) == "model.ckpt-3"
    assert checkpoints.steps == [3, 5]


def test_two_requests_get_one_save(checkpoints):
    hook = SaveHook(checkpoints)
    futures = []
    train([hook, At(3, lambda: futures.extend(in_thread(hook.trigger_save) for _ in range(2)))], 5)
    assert [future.result(0) for future in futures] == ["model.ckpt-3"] * 2
    assert checkpoints.steps == [3, 5]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_error_of_what_another_thread_asked_for_is_its_own(checkpoints, asynchronous):
    checkpoints.fail_writes = 2
    hook = SaveHook(checkpoints, SaveConfig(asynchronous=asynchronous))
    futures = []
    run = train([hook, At(3, lambda: futures.append(in_thread(hook.trigger_save)))], 5)
    assert run.step == 5
    with pytest.raises(OSError, match="disk full"):
        futures[0].result(0)


def test_what_is_asked_for_during_the_last_step_is_saved_by_the_end(checkpoints):
    hook = SaveHook(checkpoints)
    futures = []
    train([hook, At(5, lambda: futures.append(in_thread(hook.trigger_save)))], 5)
    assert futures[0].result(0) == "model.ckpt-5"
    assert checkpoints.steps == [5]


def test_a_run_that_dies_says_so_to_waiting_callers(checkpoints):
    hook = SaveHook(checkpoints)
    futures = []

    def ask_and_die() -> None:
        futures.append(in_thread(hook.trigger_save))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train([hook, At(2, ask_and_die)], 5)
    with pytest.raises(TrainingError, match="the run ended before"):
        futures[0].result(0)
    with pytest.raises(TrainingError, match="has ended"):
        hook.trigger_save()


def test_a_listener_that_asks_for_a_save_gets_it_before_the_next_step(checkpoints):
    class Greedy(SaveListener):
        def after_save(self, step: int) -> None:
            if step == 2:
                hook.trigger_save()

    hook = SaveHook(checkpoints, by_steps(2), listeners=[Greedy()])
    train([hook], 3)
    assert checkpoints.steps == [2, 3]


def test_a_caller_that_no_longer_waits_does_no_harm(checkpoints):
    hook = SaveHook(checkpoints)
    train([hook, At(3, lambda: in_thread(lambda: hook.trigger_save().cancel()))], 5)
    assert checkpoints.steps == [3, 5]


# Dense only


def test_a_dense_only_save_is_left_out_where_a_full_one_of_the_step_exists():
    full, dense, memory = Checkpoints(), Checkpoints(), SaveMemory()
    train(
        [
            SaveHook(full, by_steps(4), memory=memory),
            SaveHook(dense, by_steps(2), plan=SavePlan(dense_only=True), memory=memory),
        ],
        8,
    )
    assert full.steps == [4, 8]
    assert dense.steps == [2, 6]


def test_a_dense_only_save_is_left_out_where_a_full_one_of_the_step_is_being_written():
    full, dense, memory = Checkpoints(), Checkpoints(), SaveMemory()
    full.may_write.clear()
    seen = []

    class Look(Hook):
        def after_step(self, run, result):  # noqa: ARG002
            seen.append(list(dense.steps))
            if run.step == 5:
                full.may_write.set()

    train(
        [
            SaveHook(full, SaveConfig(steps=4, asynchronous=True), memory=memory),
            SaveHook(dense, by_steps(2), plan=SavePlan(dense_only=True), memory=memory),
            Look(),
        ],
        6,
    )
    assert seen == [[], [2], [2], [2], [2], [2, 6]]
    assert full.steps == [4, 6]


def test_a_full_save_that_failed_leaves_room_for_a_dense_only_one():
    full, dense, memory = Checkpoints(), Checkpoints(), SaveMemory()
    full.fail_writes = 99
    hooks = [
        SaveHook(full, SaveConfig(steps=4, ignore_errors=True), memory=memory),
        SaveHook(dense, by_steps(4), plan=SavePlan(dense_only=True), memory=memory),
    ]
    train(hooks, 4)
    assert dense.steps == [4]


def test_a_full_checkpoint_from_before_a_run_was_taken_back_does_not_count():
    full, dense, memory, run = Checkpoints(), Checkpoints(), SaveMemory(), FakeRun()
    dense_hook = SaveHook(dense, plan=SavePlan(dense_only=True), memory=memory)
    seen = []
    ask = At(4, lambda: (dense_hook.trigger_save(), seen.append(list(dense.steps))))
    back = At(5, lambda: setattr(run, "step", 1))
    train([SaveHook(full, by_steps(4), memory=memory), dense_hook, ask, back], 8, run=run)
    assert seen == [[], [4]]


def test_a_dense_only_hook_saves_nothing_at_the_end_but_ends_its_listeners(checkpoints):
    log: list[str] = []
    train([SaveHook(checkpoints, plan=SavePlan(dense_only=True), listeners=[Listener("a", log)])], 3)
    assert checkpoints.steps == []
    assert log == ["a begin", "a end"]


@pytest.mark.parametrize("reason", ["dense-only hook", "asked for"])
def test_a_run_without_steps_may_still_have_to_end_with_a_full_checkpoint(checkpoints, reason):
    memory = SaveMemory()
    hooks = [SaveHook(checkpoints, plan=SavePlan(always_final=reason == "asked for"), memory=memory)]
    if reason == "dense-only hook":
        hooks.append(SaveHook(Checkpoints(), plan=SavePlan(dense_only=True), memory=memory))
    train(hooks, 0, run=FakeRun(step=7))
    assert checkpoints.steps == [7]


# With a barrier


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority of its own")
def test_a_save_in_the_background_rests_until_the_end_waits_for_it(checkpoints):
    ticks, rested = itertools.count(), threading.Event()
    resting = Resting(0.5, clock=lambda: float(next(ticks)), sleep=lambda _: rested.set())

    def write(self: Moment) -> str:
        resting.advance()
        give_up = time.monotonic() + SECONDS
        while time.monotonic() < give_up:
            rested.clear()
            resting.advance()
            if not rested.is_set():
                return f"model.ckpt-{self.step}"
        raise AssertionError("it rested although the run waited for it")

    moment = type("Rests", (Moment,), {"write": write})
    checkpoints.snapshot = lambda step: moment(checkpoints, step)
    memory = SaveMemory(writer=resting)
    hook = SaveHook(checkpoints, SaveConfig(steps=2, asynchronous=True), memory=memory)
    seen = []
    train([hook], 3, on_step=lambda run: seen.append(run.step == 3 and rested.wait(SECONDS)))
    assert seen[-1]
    assert hook.has_saved(3)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_state_is_cut_when_the_workers_wait_at_the_barrier(asynchronous):
    log: list[str] = []
    barrier = LocalBarrier(2, callbacks=[lambda action: log.append(f"barrier {action}")])
    clock = FakeClock()
    blocked = threading.Event()

    def wait_as_worker() -> None:
        barrier.wait_until_removed(1, keep_waiting=lambda _: not blocked.set(), poll=0.01)

    worker = threading.Thread(target=wait_as_worker)

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        log.append("waited")
        if len(clock.sleeps) == 3:
            worker.start()
            assert blocked.wait(SECONDS)

    guard = BarrierSaveListener(barrier, clock=clock, sleep=sleep)
    config = by_steps(1, asynchronous=asynchronous)
    train([SaveHook(Checkpoints(log), config, listeners=[Listener("a", log)], guards=[guard])], 1)
    worker.join(SECONDS)
    assert [one for one in log if one != "barrier Save"] == [
        *("a begin", "waited", "waited", "waited"),
        *("a before 1", "cut 1", "write 1", "a after 1", "a end"),
    ]
    assert log.count("barrier Save") == 2
    assert barrier.placement() is None


# Beside the training


def behind(steps: int = 1, **options: object) -> SaveConfig:
    return SaveConfig(steps=steps, asynchronous=True, **options)


def settle(checkpoints: Checkpoints) -> None:
    """Wait until the save under way is written and its thread is gone."""
    assert checkpoints.wrote.wait(SECONDS)
    for thread in threading.enumerate():
        if thread.name == "save-checkpoint":
            thread.join(SECONDS)


def test_training_continues_while_a_checkpoint_is_written(checkpoints):
    checkpoints.may_write.clear()
    seen = []

    def look() -> None:
        seen.extend(checkpoints.steps)
        checkpoints.may_write.set()

    train([SaveHook(checkpoints, behind(2)), At(3, look)], 3)
    assert seen == []
    assert checkpoints.steps == [2, 3]
    assert checkpoints.threads == ["save-checkpoint", threading.current_thread().name]


def test_guards_are_released_after_the_cut_and_listeners_told_after_the_write():
    log: list[str] = []
    checkpoints = Checkpoints(log)
    checkpoints.may_write.clear()
    hook = SaveHook(checkpoints, behind(2), listeners=[Listener("a", log)], guards=[Listener("g", log)])
    train(
        [hook, At(2, lambda: (log.append("training"), checkpoints.may_write.set(), settle(checkpoints)))], 2
    )
    assert log[2:] == [
        *("g before 2", "a before 2", "cut 2", "g after 2", "training"),
        *("write 2", "a after 2", "g end", "a end"),
    ]


def test_a_save_due_while_another_is_written_is_postponed(checkpoints, caplog):
    metrics, clock = Metrics(prefix=""), FakeClock()
    checkpoints.may_write.clear()
    hook = SaveHook(
        checkpoints, behind(10, retry_secs=3), clocks=Clocks(wall=clock, timer=clock), metrics=metrics
    )

    def write() -> None:
        checkpoints.may_write.set()
        settle(checkpoints)

    with caplog.at_level(logging.WARNING):
        train([hook, At(21, write)], 30, on_step=lambda _: clock.sleep(1))
    assert checkpoints.steps == [10, 23, 30]  # due at 20, tried again three seconds later
    assert 'save_checkpoint_postponed_total{mode="full"} 1.0' in metrics.render().decode()
    assert "the save due at step 20 waits: the checkpoint of step 10 is still being written" in caplog.text


def test_a_background_write_is_tried_twice(checkpoints):
    checkpoints.fail_writes = 1
    train([SaveHook(checkpoints, behind(2)), At(2, lambda: settle(checkpoints))], 2)
    assert checkpoints.steps == [2]
    assert checkpoints.closed == [(2, True)]


def test_a_background_error_ends_the_run_at_the_next_step(checkpoints):
    checkpoints.fail_writes = 2
    run = FakeRun()
    with pytest.raises(OSError, match="disk full"):
        train([SaveHook(checkpoints, behind(2)), At(2, lambda: settle(checkpoints))], 9, run=run)
    assert run.step == 3
    assert checkpoints.closed == [(2, False)]


def test_a_background_error_is_ignored_and_counted(checkpoints):
    checkpoints.fail_writes = 2
    metrics = Metrics(prefix="")
    hook = SaveHook(checkpoints, behind(2, ignore_errors=True), metrics=metrics)
    run = train([hook, At(2, lambda: settle(checkpoints))], 3)
    assert run.step == 3
    assert checkpoints.steps == [3]
    assert 'save_checkpoint_failed_total{mode="full"} 2.0' in metrics.render().decode()


def test_an_ignored_background_error_is_mended_soon(checkpoints):
    clock = FakeClock()
    checkpoints.fail_writes = 2
    hook = SaveHook(
        checkpoints, behind(100, ignore_errors=True, retry_secs=5), clocks=Clocks(wall=clock, timer=clock)
    )
    hooks = [hook, At(100, lambda: settle(checkpoints)), At(106, lambda: settle(checkpoints))]
    train(hooks, 110, on_step=lambda _: clock.sleep(1))
    assert checkpoints.steps == [106, 110]


def test_the_end_mends_a_background_save_that_failed(checkpoints):
    checkpoints.fail_writes = 2
    train([SaveHook(checkpoints, behind(2)), At(2, lambda: settle(checkpoints))], 2)
    assert checkpoints.steps == [2]
    assert checkpoints.closed == [(2, False), (2, True)]


def test_a_listener_may_ask_to_stop_from_the_background(checkpoints):
    hook = SaveHook(checkpoints, behind(2), listeners=[Listener("a", [], stop=True)])
    run = train([hook, At(2, lambda: settle(checkpoints))], 9)
    assert run.step == 2
    assert "asked to stop" in run.stop_reason


def test_a_cut_that_fails_is_raised_at_once(checkpoints):
    checkpoints.fail_cuts = 2
    run = FakeRun()
    with pytest.raises(OSError):
        train([SaveHook(checkpoints, behind(2))], 9, run=run)
    assert run.step == 2


def test_on_demand_waits_for_the_save_being_written_and_for_its_own(checkpoints):
    checkpoints.may_write.clear()
    hook = SaveHook(checkpoints, behind(2))
    seen = []

    def ask() -> None:
        threading.Timer(0.01, checkpoints.may_write.set).start()
        hook.trigger_save()
        seen.extend(checkpoints.steps)

    train([hook, At(3, ask)], 3)
    assert seen == [2, 3]


def test_what_another_thread_asks_for_waits_for_the_save_being_written(checkpoints):
    checkpoints.may_write.clear()
    hook = SaveHook(checkpoints, behind(100))
    futures = []

    def write() -> None:
        checkpoints.may_write.set()
        settle(checkpoints)

    ask = lambda: futures.append(in_thread(hook.trigger_save))  # noqa: E731
    train([hook, At(3, ask), At(5, ask), At(7, write)], 9)
    assert [future.result(SECONDS) for future in futures] == ["model.ckpt-3", "model.ckpt-7"]
    assert checkpoints.steps == [3, 7, 9]


def test_a_run_can_wait_for_the_save_being_written(checkpoints):
    checkpoints.may_write.clear()
    hook = SaveHook(checkpoints, behind(2))
    seen = []

    def wait() -> None:
        threading.Timer(0.01, checkpoints.may_write.set).start()
        hook.wait()
        seen.extend(checkpoints.steps)

    train([hook, At(3, wait)], 3)
    assert seen == [2]


def test_a_run_that_dies_waits_for_the_save_being_written(checkpoints):
    checkpoints.may_write.clear()

    def die() -> None:
        threading.Timer(0.01, checkpoints.may_write.set).start()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train([SaveHook(checkpoints, behind(2)), At(2, die)], 9)
    assert checkpoints.steps == [2]


def test_a_save_that_hangs_is_given_up_when_the_run_dies(checkpoints, caplog):
    checkpoints.may_write.clear()

    def die() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train([SaveHook(checkpoints, behind(2, close_secs=0.01)), At(2, die)], 9)
    assert "gave up on the checkpoint of step 2" in caplog.text
    checkpoints.may_write.set()
    settle(checkpoints)


def test_a_halted_run_can_be_saved_from_another_thread(checkpoints):
    barrier = LocalBarrier(1)
    save = SaveHook(checkpoints)
    answers = []

    def operate() -> None:
        while save._run is None:
            time.sleep(0.001)
        answers.append(save.trigger_save().result(SECONDS))
        barrier.remove()

    barrier.place()
    operator = threading.Thread(target=operate)
    operator.start()
    halt: Hook = BarrierHook(barrier, idle=[save.before_step], poll=0.001)
    train([save, halt], 2)
    operator.join(SECONDS)
    assert answers == ["model.ckpt-0"]
    assert checkpoints.steps == [0, 2]


def test_several_threads_may_step(checkpoints):
    run = FakeRun()
    hook = SaveHook(checkpoints, by_steps(1))
    hook.begin(run)
    hook.after_create(run)
    run.step = 1
    threads = [threading.Thread(target=hook.after_step, args=(run, result(1))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert checkpoints.steps == [1]


# A disk that is full for a while


FULL = TransientFilesystemError("cannot write model.ckpt: No space left on device. The disk is full.")


def failing(checkpoints: Checkpoints, writes: int) -> FakeClock:
    checkpoints.error, checkpoints.fail_writes = FULL, writes
    return FakeClock()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_training_continues_while_saves_fail_for_a_reason_that_may_pass(
    checkpoints, asynchronous, caplog, tmp_path
):
    clock, metrics, seen = failing(checkpoints, 3), Metrics(prefix=""), {}
    config = SaveConfig(steps=10, retry_secs=10, asynchronous=asynchronous)
    hook = SaveHook(checkpoints, config, clocks=Clocks(wall=clock, timer=clock), metrics=metrics)

    def step(run: FakeRun) -> None:
        clock.sleep(1)
        hook.wait()
        seen[run.step] = hook.trouble, metrics.render().decode()

    with caplog.at_level(logging.WARNING):
        train([hook], 100, run=FakeRun(tmp_path), on_step=step)
    # Due at step 10, then after pauses of 10, 20 and 40 s, whatever the interval says.
    assert checkpoints.steps[0] == pytest.approx(81, abs=3)
    assert checkpoints.steps[-1] == 100
    trouble, shown = seen[76]
    assert "attempt 3 of 10" in trouble
    assert "The disk is full" in trouble
    assert " free" in trouble
    assert 'save_checkpoint_failures_in_a_row{mode="full"} 3.0' in shown
    assert 'save_checkpoint_failed_total{mode="full"} 3.0' in shown
    assert float(shown.split('save_checkpoint_age_seconds{mode="full"} ')[1].split()[0]) > 70
    trouble, shown = seen[90]
    assert trouble == ""
    assert 'save_checkpoint_failures_in_a_row{mode="full"} 0.0' in shown
    assert caplog.text.count("Training continues") == 3
    assert caplog.text.count("saving works again") == 1
    assert str(tmp_path) in caplog.text


def test_so_many_failures_in_a_row_end_the_run_and_say_what_to_do(checkpoints, tmp_path):
    clock = failing(checkpoints, 100)
    hook = SaveHook(
        checkpoints, SaveConfig(steps=10, retry_secs=1, max_failures=3), clocks=Clocks(timer=clock)
    )
    with pytest.raises(TransientFilesystemError, match=r"3 times in a row .*save.max_failures.*beginning"):
        train([hook], 100, run=FakeRun(tmp_path), on_step=lambda _: clock.sleep(1))
    assert checkpoints.writes == 3


def test_without_failures_allowed_the_first_ends_the_run(checkpoints):
    clock = failing(checkpoints, 100)
    hook = SaveHook(checkpoints, SaveConfig(steps=10, max_failures=0), clocks=Clocks(timer=clock))
    with pytest.raises(TransientFilesystemError, match="No space left"):
        train([hook], 100)
    assert checkpoints.writes == 1


def test_a_save_between_them_that_succeeds_resets_the_count_of_failures(checkpoints):
    clock = failing(checkpoints, 0)

    def step(run: FakeRun) -> None:
        clock.sleep(1)
        checkpoints.fail_writes = 1 if run.step % 20 < 10 else 0

    hook = SaveHook(
        checkpoints, SaveConfig(steps=5, retry_secs=1, max_failures=5), clocks=Clocks(timer=clock)
    )
    train([hook], 211, on_step=step)
    assert checkpoints.steps[-1] == 211


def test_waiting_for_a_save_does_not_shorten_the_pause(checkpoints):
    clock = failing(checkpoints, 1)
    hook = SaveHook(checkpoints, SaveConfig(steps=10, retry_secs=20), clocks=Clocks(timer=clock))

    class Wants(Hook):
        def before_step(self, run: FakeRun) -> None:
            hook.look(run, wanted=run.step >= 10)

    train([hook, Wants()], 40, on_step=lambda _: clock.sleep(1))
    assert checkpoints.writes - len(checkpoints.steps) == 1
    assert checkpoints.steps[0] >= 29


def test_the_last_save_of_a_run_is_retried_within_a_bound(checkpoints):
    clock = failing(checkpoints, 3)
    hook = SaveHook(checkpoints, SaveConfig(last_secs=20), clocks=Clocks(timer=clock, sleep=clock.sleep))
    train([hook], 5)
    assert checkpoints.steps == [5]
    assert clock.sleeps == [0.5, 1, 2]


def test_a_last_save_that_keeps_failing_is_an_error_that_says_what_is_lost(checkpoints, tmp_path):
    clock = failing(checkpoints, 1000)
    hook = SaveHook(
        checkpoints, SaveConfig(steps=10, last_secs=20), clocks=Clocks(timer=clock, sleep=clock.sleep)
    )
    with pytest.raises(
        TransientFilesystemError, match=r"step 5 without a checkpoint of it.* for 20 s"
    ) as caught:
        train([hook], 5, run=FakeRun(tmp_path))
    assert sum(clock.sleeps) == 20
    assert "No checkpoint was saved yet." in str(caught.value)
    assert str(caught.value).endswith("start the run again: it starts from the beginning.")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_save_that_finds_no_free_descriptor_is_retried_at_once_and_is_no_failed_save(checkpoints, number):
    clock = failing(checkpoints, 4)
    checkpoints.error = TransientFilesystemError(number, "no free descriptor")
    hook = SaveHook(checkpoints, SaveConfig(steps=10), clocks=Clocks(timer=clock, sleep=clock.sleep))
    train([hook], 10)
    assert checkpoints.steps == [10]
    assert clock.sleeps == [FILES_PAUSE] * 3
    checkpoints.fail_writes = 1000
    bounded = SaveHook(
        checkpoints, SaveConfig(steps=10, max_failures=1), clocks=Clocks(timer=clock, sleep=clock.sleep)
    )
    with pytest.raises(TransientFilesystemError, match=r"1 times in a row"):
        train([bounded], 10)


def test_a_save_has_descriptors_in_reserve_when_connections_have_taken_all_others(tmp_path):
    class OpensFiles(Checkpoints):
        def snapshot(self, step: int) -> Moment:
            for number in range(60):  # as the shards of tables and dense weights are written side by side
                stack.enter_context((tmp_path / f"{step}-{number}").open("wb"))
            return super().snapshot(step)

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    checkpoints, clock = OpensFiles(), FakeClock()
    with ExitStack() as stack:
        # Earlier tests may have left gaps below it.
        highest = max(int(one.name) for one in Path("/proc/self/fd").iterdir())
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 200, hard))

        def step(run: FakeRun) -> None:
            if run.step != 9:
                return
            with suppress(OSError):
                while True:
                    stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            with pytest.raises(OSError, match="Too many open files"):
                (tmp_path / "one more").open("wb")

        train(
            [SaveHook(checkpoints, SaveConfig(steps=10), clocks=Clocks(timer=clock, sleep=clock.sleep))],
            10,
            on_step=step,
        )
        assert checkpoints.steps == [10]
    assert clock.sleeps == []


def test_what_a_listener_could_not_do_after_the_last_save_is_retried_within_the_same_bound(checkpoints):
    class Exports(SaveListener):
        trouble, fails = "", 3

        def after_save(self, step: int) -> None:
            self.trouble = f"step {step} is not exported" if self.fails else ""
            self.fails -= 1

        def retry(self) -> None:
            self.after_save(5)

    clock, exports = FakeClock(), Exports()
    hook = SaveHook(checkpoints, clocks=Clocks(timer=clock, sleep=clock.sleep), listeners=[exports])
    train([hook], 5)
    assert (checkpoints.steps, clock.sleeps, hook.trouble) == ([5], [0.5, 1, 2], "")
    clock, exports = FakeClock(), Exports()
    exports.fails = 1000
    hook = SaveHook(
        checkpoints, SaveConfig(), clocks=Clocks(timer=clock, sleep=clock.sleep), listeners=[exports]
    )
    train([hook], 5)
    assert sum(clock.sleeps) == SaveConfig().last_secs == 5
    assert hook.trouble == "step 5 is not exported"


def test_a_wall_clock_that_jumps_a_day_ahead_and_back_stops_no_save_by_seconds(checkpoints):
    wall, timer = FakeClock(), FakeClock(0.0)

    def step(run: FakeRun) -> None:
        timer.sleep(1)
        wall.now += {10: 86_400, 30: -86_400}.get(run.step, 1)

    train(
        [SaveHook(checkpoints, SaveConfig(secs=10), clocks=Clocks(wall=wall, timer=timer))], 60, on_step=step
    )
    assert checkpoints.steps == [10, 20, 30, 40, 50, 60]
