"""A simulation runs real threads one at a time, in an order of the seed, on virtual time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from monolith import concurrency
from monolith.testing.scheduler import DeadlockError, SimMachine, Simulation, SimulationError


def play(body: Callable[[Simulation], object], seed: int = 0) -> Simulation:
    simulation = Simulation(seed)
    simulation.run(lambda: body(simulation))
    return simulation


def order_of(seed: int) -> list[str]:
    """Three threads that write their names between locks."""
    said: list[str] = []

    def body(_: Simulation) -> None:
        lock = concurrency.Lock()

        def speak(name: str) -> None:
            for _ in range(5):
                with lock:
                    said.append(name)

        threads = [concurrency.Thread(target=speak, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    play(body, seed)
    return said


def test_outside_a_simulation_the_names_are_those_of_the_standard_library() -> None:
    assert isinstance(concurrency.Event(), threading.Event)
    assert isinstance(concurrency.Thread(target=print), threading.Thread)
    assert abs(concurrency.monotonic() - time.monotonic()) < 1
    assert concurrency.machine() is None


def test_the_same_seed_gives_the_same_order_and_another_seed_another() -> None:
    orders = [order_of(seed) for seed in range(20)]
    assert orders == [order_of(seed) for seed in range(20)]
    assert len({tuple(order) for order in orders}) > 10


def test_hours_of_virtual_time_pass_at_once() -> None:
    began = time.monotonic()
    simulation = play(lambda _: concurrency.sleep(10 * 3600))
    assert simulation.now == 10 * 3600
    assert time.monotonic() - began < 10


def test_a_wait_ends_at_its_deadline_or_when_it_is_woken() -> None:
    def body(simulation: Simulation) -> None:
        event = concurrency.Event()
        assert not event.wait(3)
        assert simulation.now == 3
        waker = concurrency.Thread(target=lambda: (concurrency.sleep(1), event.set()))
        waker.start()
        assert event.wait(100)
        assert simulation.now == 4

    play(body)


def test_a_condition_is_waited_for_with_its_lock_released() -> None:
    def body(_: Simulation) -> None:
        changed = concurrency.Condition()
        items: list[int] = []

        def add() -> None:
            with changed:
                items.append(1)
                changed.notify_all()

        with changed:
            concurrency.Thread(target=add).start()
            assert changed.wait_for(lambda: items, timeout=5)

    for seed in range(20):
        play(body, seed)


def test_a_queue_blocks_when_it_is_full_and_when_it_is_empty() -> None:
    def body(_: Simulation) -> None:
        items = concurrency.Queue(1)
        items.put(1)
        with pytest.raises(concurrency.Full):
            items.put(2, timeout=1)
        assert items.get() == 1
        with pytest.raises(concurrency.Empty):
            items.get(timeout=1)

    play(body)


def test_an_executor_runs_its_tasks_and_gives_their_errors() -> None:
    def body(_: Simulation) -> None:
        with concurrency.ThreadPoolExecutor(3, "squares") as pool:
            assert list(pool.map(lambda n: n * n, range(8))) == [n * n for n in range(8)]
            with pytest.raises(ZeroDivisionError):
                pool.submit(lambda: 1 // 0).result(5)
            slow = pool.submit(concurrency.sleep, 7)
            assert concurrency.wait([slow], timeout=1).not_done == {slow}

    play(body)


def test_threads_that_wait_for_each_other_are_reported_with_what_they_wait_for() -> None:
    def body(_: Simulation) -> None:
        one, other = concurrency.Lock(), concurrency.Lock()

        def take(first: concurrency.Lock, second: concurrency.Lock) -> None:
            with first:
                concurrency.sleep(1)
                with second:
                    pass

        threads = [
            concurrency.Thread(target=take, args=args, name=name)
            for name, args in {"a": (one, other), "b": (other, one)}.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with pytest.raises(DeadlockError, match=r"seed 0: every thread waits(.|\n)*play/b: lock"):
        play(body)


def test_a_run_without_an_end_is_reported() -> None:
    def body(_: Simulation) -> None:
        while True:
            concurrency.sleep(60)

    with pytest.raises(SimulationError, match="no end after 86,4"):
        play(body)


def test_an_exception_of_any_thread_fails_the_run() -> None:
    def body(simulation: Simulation) -> None:
        simulation.note("before the fault")
        concurrency.Thread(target=lambda: 1 // 0).start()
        concurrency.sleep(1)

    with pytest.raises(SimulationError, match=r"(.|\n)*before the fault(.|\n)*ZeroDivisionError"):
        play(body)


def test_an_invariant_is_checked_whenever_threads_change() -> None:
    def body(simulation: Simulation) -> None:
        balance = [0]

        def check() -> None:
            assert balance[0] == 0, "the balance is not 0"

        simulation.invariants.append(check)
        concurrency.sleep(1)
        balance[0] = 1
        concurrency.sleep(1)
        balance[0] = 0

    with pytest.raises(SimulationError, match="the balance is not 0"):
        play(body)


# Machines


def test_a_killed_machine_stops_where_it_waits_and_changes_nothing_any_more() -> None:
    done: list[str] = []

    def body(simulation: Simulation) -> None:
        machine = simulation.machine("worker")
        event = simulation.machine("other").event()

        def work() -> None:
            try:
                done.append("began")
                concurrency.sleep(10)
                done.append("finished")
            finally:
                event.set()  # the machine is dead: no other machine may see this

        machine.spawn(work)
        concurrency.sleep(1)
        machine.kill()
        assert not event.wait(100)

    play(body)
    assert done == ["began"]


def test_the_locks_of_a_killed_machine_are_not_those_of_its_successor() -> None:
    def body(simulation: Simulation) -> None:
        def work() -> None:
            lock = concurrency.Lock()
            with lock:
                concurrency.sleep(10)

        first = simulation.machine("worker")
        first.spawn(work)
        concurrency.sleep(1)
        first.kill()
        simulation.machine("worker").spawn(work).join()

    assert play(body).now == 11


def test_clocks_of_machines_drift_and_jump() -> None:
    def body(simulation: Simulation) -> None:
        fast = simulation.machine("fast", rate=2.0, wall_offset=3600.0)
        seen: list[float] = []

        def work() -> None:
            began, wall = concurrency.monotonic(), concurrency.time()
            concurrency.sleep(10)
            seen.extend((concurrency.monotonic() - began, simulation.now, wall))

        here = concurrency.time()
        fast.spawn(work).join()
        assert seen[:2] == [10, 5]
        assert seen[2] == here + 3600

    play(body)


def test_a_paused_machine_runs_later() -> None:
    def body(simulation: Simulation) -> None:
        machine = simulation.machine("worker")
        machine.paused_until = 50.0
        machine.spawn(lambda: None).join()
        assert simulation.now == 50

    play(body)


def test_what_a_thread_starts_belongs_to_its_machine() -> None:
    def body(simulation: Simulation) -> None:
        machine = simulation.machine("worker")
        found: list[object] = []

        def work() -> None:
            thread = concurrency.Thread(target=lambda: found.append(concurrency.machine()))
            thread.start()
            thread.join()

        machine.spawn(work).join()
        assert found == [machine]
        assert isinstance(machine, SimMachine)

    play(body)
