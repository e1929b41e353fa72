"""Training halts when a parameter server is unhealthy."""

from __future__ import annotations

import threading

import pytest
from train.runs import At, train

from monolith.train.hooks import HealthStatus, LocalBarrier, MachineHealth, PsHealthHook, memory_health

SECONDS = 10.0
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
        placed.wait(SECONDS)
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
    train([hook], 3, on_step=lambda _: asked.acquire(timeout=SECONDS))
    assert reports == []
    assert barrier.placement() is None


def test_one_that_falls_ill_later_is_found():
    answers = iter([MachineHealth(), MachineHealth()])
    placed = threading.Event()
    barrier = LocalBarrier(1, callbacks=[lambda _: placed.set()])
    reports = []
    hook = PsHealthHook([lambda: next(answers, SICK)], barrier, reports.append, interval=0.001)
    train([hook], 1, on_step=lambda _: placed.wait(SECONDS))
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
    train([PsHealthHook([lambda: SICK], barrier, fail)], 1, on_step=lambda _: reported.wait(SECONDS))
    assert barrier.placement().action == "Save"


def test_errors_of_other_hooks_pass_and_no_thread_is_left():
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train([PsHealthHook([MachineHealth], LocalBarrier(1), lambda _: None), At(1, fail)], 3)
    assert "ps-health" not in [thread.name for thread in threading.enumerate()]
