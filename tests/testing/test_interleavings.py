"""Schedules change threads between single instructions, find races, and can be repeated."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from monolith import concurrency
from monolith.testing.interleavings import (
    Preemptions,
    Priorities,
    Strategy,
    explore,
    run_threads,
    schedules_until_failure,
)
from monolith.testing.scheduler import DeadlockError, SimulationError

HERE = [sys.modules[__name__]]


class Account:
    """Deliberately careless if it has no lock."""

    def __init__(self, locked: bool) -> None:
        self.balance = 100
        self.lock = concurrency.Lock() if locked else None

    def pay(self, amount: int) -> None:
        if self.lock is None:
            self._pay(amount)
        else:
            with self.lock:
                self._pay(amount)

    def _pay(self, amount: int) -> None:
        if self.balance >= amount:
            self.balance = self.balance - amount


def overdrawn(locked: bool) -> Callable[[], None]:
    def scenario() -> None:
        account = Account(locked)
        run_threads(lambda: account.pay(80), lambda: account.pay(60))
        assert account.balance in (20, 40)

    return scenario


@pytest.mark.parametrize("strategy", [Priorities(2), Priorities(3), Preemptions(0.1)])
def test_a_check_that_is_outdated_when_it_is_acted_upon_is_found(strategy: Strategy) -> None:
    with pytest.raises(SimulationError, match=r"schedule \d+"):
        explore(overdrawn(locked=False), HERE, schedules=200, strategies=[strategy])


def test_with_a_lock_no_schedule_fails() -> None:
    explored = explore(overdrawn(locked=True), HERE, schedules=200)
    assert explored.schedules == 200
    assert explored.distinct > 20


def test_a_module_that_is_not_named_runs_as_one_step() -> None:
    explore(overdrawn(locked=False), [], schedules=100)


def test_a_failing_schedule_is_repeated_by_its_number_and_names_the_lines() -> None:
    number = schedules_until_failure(overdrawn(locked=False), HERE, most=200)
    assert number is not None
    told = []
    for _ in range(2):
        with pytest.raises(SimulationError) as failed:
            explore(overdrawn(locked=False), HERE, first=number - 1, schedules=1)
        assert f"schedule {number - 1}" in str(failed.value)
        told.append([line for line in str(failed.value).splitlines() if " at test_interleavings.py:" in line])
    assert told[0] == told[1]
    assert any("is stopped at" in line and "self.balance" in line for line in told[0])


def test_two_locks_that_are_taken_in_two_orders_are_a_deadlock() -> None:
    def scenario() -> None:
        first, second = concurrency.Lock(), concurrency.Lock()

        def take(one: concurrency.Lock, other: concurrency.Lock) -> None:
            with one, other:
                pass

        run_threads(lambda: take(first, second), lambda: take(second, first))

    with pytest.raises(DeadlockError, match="every thread waits"):
        explore(scenario, HERE, schedules=200)


def test_a_timeout_may_pass_while_other_threads_run() -> None:
    """Were it to pass only when all wait, no schedule would see it before the event is set."""

    def scenario() -> None:
        done = concurrency.Event()
        work = [0]

        def compute() -> None:
            for _ in range(5):
                work[0] += 1
            done.set()

        def hurry() -> None:
            if not done.wait(0.001):
                assert work[0] in (0, 5), "stopped in the middle"

        run_threads(compute, hurry)

    with pytest.raises(SimulationError, match="stopped in the middle"):
        explore(scenario, HERE, schedules=300)


def test_a_thread_is_not_stopped_for_long() -> None:
    """So a wait of half a minute for another thread ends in time, however the two are scheduled."""

    def scenario() -> None:
        first, second = concurrency.Event(), concurrency.Event()
        thread = concurrency.Thread(target=lambda: [first.set(), second.wait(0.1)])
        thread.start()
        first.wait(0.1)
        thread.join(30)
        assert not thread.is_alive()

    explore(scenario, HERE, schedules=300)


def test_an_error_of_any_thread_fails_the_schedule() -> None:
    def scenario() -> None:
        run_threads(lambda: None, lambda: int("seven"))

    with pytest.raises(SimulationError, match="invalid literal"):
        explore(scenario, HERE, schedules=1)


def test_a_bug_of_depth_two_is_found_as_often_as_the_theory_says() -> None:
    """Thread 0 must pass 1 of its steps after a step of thread 1: at least 1 / (n k) of all schedules."""

    def scenario() -> None:
        seen: list[str] = []

        def early() -> None:
            seen.append("early")

        def late() -> None:
            for _ in range(10):
                seen.append("late")

        run_threads(early, late)
        place = seen.index("early")
        assert place != 5, "exactly in the middle"

    failed = 0
    for number in range(400):
        try:
            steps = explore(scenario, HERE, first=number, schedules=1, strategies=[Priorities(2)]).steps
        except SimulationError:
            failed += 1
    # With threads 0, 1 and the one that starts them. The factor 2 is for timeouts, of which there are none.
    assert failed >= 400 / (3 * steps), f"{failed} of 400, with {steps} steps"


def test_nothing_is_traced_when_it_is_over() -> None:
    before = sys.gettrace()
    explore(overdrawn(locked=True), HERE, schedules=5)
    assert sys.gettrace() is before
