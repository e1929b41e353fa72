"""A barrier for the workers of one process; what every barrier does is in `contracts`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from train.runs import At, FakeClock, FakeRun, train

from monolith.errors import ConfigError
from monolith.train.hooks import (
    BarrierHook,
    BarrierSaveListener,
    HealthStatus,
    LocalBarrier,
    MachineHealth,
    PsHealthHook,
    WorkerBarrierHook,
    memory_health,
)
from monolith.train.hooks.barrier import STOP

SECONDS = 60.0


class Worker:
    """A thread that waits at a barrier as worker `index`."""

    def __init__(self, barrier: LocalBarrier, index: int) -> None:
        self.blocked = threading.Event()
        self.thread = threading.Thread(target=self._wait, args=(barrier, index))
        self.thread.start()
        assert self.blocked.wait(SECONDS)

    def _wait(self, barrier: LocalBarrier, index: int) -> None:
        barrier.wait_until_removed(index, keep_waiting=lambda _: not self.blocked.set(), poll=0.001)

    def join(self) -> None:
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()


@pytest.mark.parametrize("index", [-1, 0, 2])
def test_only_workers_wait(index):
    with pytest.raises(ValueError, match="index must be from 1 to 1"):
        LocalBarrier(2).wait_until_removed(index)


def test_a_barrier_needs_a_worker():
    with pytest.raises(ConfigError, match="capacity"):
        LocalBarrier(0)


def test_without_a_barrier_no_worker_waits():
    barrier = LocalBarrier(2)
    barrier.wait_until_removed(1)
    assert barrier.blocked_indices() == []


def test_the_worker_that_places_it_and_those_that_meet_it_run_the_action_once():
    heard: list[str] = []
    barrier = LocalBarrier(3, callbacks=[heard.append])
    barrier.place("Save")
    assert heard == ["Save"]
    workers = [Worker(barrier, 1), Worker(barrier, 2)]
    barrier.remove()
    for worker in workers:
        worker.join()
    assert heard == ["Save"] * 3


def test_a_worker_waits_for_the_barrier_it_met_and_not_for_the_next():
    heard: list[tuple[str, str]] = []
    barrier = LocalBarrier(
        2, callbacks=[lambda action: heard.append((threading.current_thread().name, action))]
    )
    barrier.place("first")
    worker = Worker(barrier, 1)
    barrier.remove()
    barrier.place("second")
    worker.join()
    assert (worker.thread.name, "first") in heard
    assert (worker.thread.name, "second") not in heard


def test_a_worker_that_fails_in_a_callback_is_not_blocked():
    def fail(action: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise KeyError(action)

    barrier = LocalBarrier(2, callbacks=[fail])
    barrier.place()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            barrier.wait_until_removed(1)
        except KeyError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(SECONDS)
    assert len(errors) == 1
    assert barrier.blocked_indices() == [0]


# The hook


def run_in_thread(barrier: LocalBarrier, *hooks: At, index: int = 1) -> tuple[FakeRun, Callable[[], None]]:
    run = FakeRun()
    hook = WorkerBarrierHook(barrier, index, poll=0.001) if index else BarrierHook(barrier, poll=0.001)
    thread = threading.Thread(target=train, args=([hook, *hooks], 5), kwargs={"run": run})
    thread.start()

    def join() -> None:
        thread.join(SECONDS)
        assert not thread.is_alive()

    return run, join


def test_a_worker_stops_at_a_barrier_and_continues_when_it_is_removed():
    heard: list[str] = []
    waiting = threading.Event()

    def hear(action: str) -> None:
        heard.append(action)
        if len(heard) == 2:
            waiting.set()

    barrier = LocalBarrier(2, callbacks=[hear])
    run, join = run_in_thread(barrier, At(1, lambda: barrier.place("action")))
    assert waiting.wait(SECONDS)
    assert run.step == 1
    assert heard == ["action", "action"]
    barrier.remove()
    join()
    assert run.step == 5
    assert heard == ["action", "action"]


def test_without_a_barrier_a_worker_runs_through():
    run, join = run_in_thread(LocalBarrier(2))
    join()
    assert run.step == 5


def test_a_barrier_that_says_stop_ends_the_run_once_it_is_removed():
    barrier = LocalBarrier(2)
    run, join = run_in_thread(barrier, At(2, lambda: barrier.place(STOP)))
    while barrier.blocked_indices() != [0, 1]:
        time.sleep(0.001)
    assert run.step == 2
    barrier.remove()
    join()
    assert run.step == 3
    assert run.stop_reason == "the chief stopped all workers"


@pytest.mark.parametrize("index", [0, 1])
def test_a_stop_asked_for_elsewhere_ends_the_wait(index):
    barrier = LocalBarrier(2)
    run, join = run_in_thread(barrier, At(2, barrier.place), index=index)
    while barrier.placement() is None:
        time.sleep(0.001)
    run.request_stop("somebody")
    join()
    assert run.step in {2, 3}  # it may have been asked before it began to wait


def test_the_only_process_of_a_run_waits_as_well_and_is_not_idle():
    barrier = LocalBarrier(1)
    clock = FakeClock()
    steps = []

    def idle(run: FakeRun) -> None:
        steps.append(run.step)
        if len(steps) == 3:
            barrier.remove()

    hook = BarrierHook(barrier, idle=[idle], sleep=clock.sleep)
    run = train([hook, At(2, barrier.place)], 5)
    assert run.step == 5
    assert steps == [2, 2, 2]
    assert clock.sleeps == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("index", [0, 2])
def test_only_a_worker_that_there_is_waits_as_one(index):
    with pytest.raises(ConfigError, match="index must be from 1 to 1"):
        WorkerBarrierHook(LocalBarrier(2), index)


# The guard


def test_the_guard_waits_until_all_workers_are_blocked():
    barrier, clock, told = LocalBarrier(3), FakeClock(), []
    workers: list[Worker] = []

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        workers.append(Worker(barrier, len(workers) + 1))

    guard = BarrierSaveListener(barrier, clock=clock, sleep=sleep, announce=told.append)
    guard.before_save(7)
    assert clock.sleeps == [1.0, 1.0]
    assert told == [7]
    assert barrier.placement().action == "Save"
    guard.after_save(7)
    assert barrier.placement() is None
    for worker in workers:
        worker.join()


def test_the_guard_does_not_wait_for_ever_and_names_the_missing_workers(caplog):
    barrier, clock = LocalBarrier(3), FakeClock()
    guard = BarrierSaveListener(barrier, clock=clock, sleep=clock.sleep)
    guard.before_save(7)
    assert len(clock.sleeps) == 30
    assert "for workers [1, 2] to pause" in caplog.text
    guard.after_save(7)
    assert barrier.placement() is None


def test_the_guard_leaves_a_foreign_barrier():
    barrier = LocalBarrier(1)
    barrier.place("Stop")
    guard = BarrierSaveListener(barrier)
    guard.before_save(7)
    guard.after_save(7)
    assert barrier.placement().action == "Stop"


# Training halts when a parameter server is unhealthy.


HEALTH_SECONDS = 10.0
SICK = MachineHealth(HealthStatus.OUT_OF_MEMORY, "too much")


def test_memory_over_its_limit_is_unhealthy():
    assert memory_health(limit_bytes=0).status is HealthStatus.OUT_OF_MEMORY
    assert memory_health(limit_bytes=100, used_bytes=lambda: 101).message == (
        "uses 101 bytes of memory, more than its limit of 100"
    )


def test_memory_within_its_limit_is_healthy():
    assert memory_health() == MachineHealth()
    assert memory_health(limit_bytes=100, used_bytes=lambda: 100) == MachineHealth()


@pytest.mark.parametrize("health", [MachineHealth(), SICK])
def test_health_travels_as_bytes_and_being_well_is_none(health):
    data = health.encode()
    assert (data == b"") is (health.status is HealthStatus.OK)
    assert MachineHealth.decode(data) == health


def test_an_unhealthy_server_is_reported_once_and_halts_training_until_the_run_ends():
    placed = threading.Event()
    barrier = LocalBarrier(1, callbacks=[lambda _: placed.set()])
    reports = []
    checks = [memory_health, lambda: memory_health(limit_bytes=0)]
    hook = PsHealthHook(checks, barrier, reports.append, interval=0.001)
    held = []

    def on_step(_: object) -> None:
        placed.wait(HEALTH_SECONDS)
        held.append(barrier.placement() is not None)

    train([hook], 3, on_step=on_step)
    assert [list(report) for report in reports] == [[1]]
    assert reports[0][1].status is HealthStatus.OUT_OF_MEMORY
    assert held == [True] * 3
    assert barrier.placement() is None  # or the others would not hear that the run ends


def test_servers_that_are_healthy_are_not_reported():
    asked = threading.Semaphore(0)

    def well() -> MachineHealth:
        asked.release()
        return MachineHealth()

    barrier = LocalBarrier(1)
    reports = []
    hook = PsHealthHook([well], barrier, reports.append, interval=0.001)
    train([hook], 3, on_step=lambda _: asked.acquire(timeout=HEALTH_SECONDS))
    assert reports == []
    assert barrier.placement() is None


def test_one_that_falls_ill_later_is_found():
    answers = iter([MachineHealth(), MachineHealth()])
    placed = threading.Event()
    barrier = LocalBarrier(1, callbacks=[lambda _: placed.set()])
    reports = []
    hook = PsHealthHook([lambda: next(answers, SICK)], barrier, reports.append, interval=0.001)
    train([hook], 1, on_step=lambda _: placed.wait(HEALTH_SECONDS))
    assert reports == [{0: SICK}]


def test_one_that_does_not_answer_is_not_unhealthy(caplog):
    def silent() -> MachineHealth:
        raise ConnectionError

    hook = PsHealthHook([silent, lambda: SICK], LocalBarrier(1), lambda _: None)
    assert hook.check() == {1: SICK}
    assert "cannot check the health of parameter server 0" in caplog.text


def test_training_halts_though_reporting_fails_and_a_barrier_is_placed_already():
    reported = threading.Event()

    def fail(unhealthy: object) -> None:
        reported.set()
        raise KeyError(unhealthy)

    barrier = LocalBarrier(1)
    barrier.place("Save")
    train([PsHealthHook([lambda: SICK], barrier, fail)], 1, on_step=lambda _: reported.wait(HEALTH_SECONDS))
    assert barrier.placement().action == "Save"


def test_errors_of_other_hooks_pass_and_no_thread_is_left():
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train([PsHealthHook([MachineHealth], LocalBarrier(1), lambda _: None), At(1, fail)], 3)
    assert "ps-health" not in [thread.name for thread in threading.enumerate()]
