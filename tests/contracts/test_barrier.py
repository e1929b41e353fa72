"""What every barrier does, however its workers come to stand still."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from contracts.barriers import BARRIERS, WORKERS, Held, joined

from monolith.errors import BarrierAlreadyPlacedError
from monolith.train.hooks import Barrier, unblocked_indices

SECONDS = 30.0


@pytest.fixture(params=BARRIERS)
def held(request: pytest.FixtureRequest) -> Iterator[Held]:
    with BARRIERS[request.param]() as held:
        yield held
        held.barrier.remove()


@pytest.fixture
def barrier(held: Held) -> Barrier:
    return held.barrier


def until(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_it_knows_how_many_there_are(barrier: Barrier) -> None:
    assert barrier.capacity == WORKERS


def test_it_is_placed_once(barrier: Barrier) -> None:
    barrier.place("Save")
    with pytest.raises(BarrierAlreadyPlacedError, match="'Save'"):
        barrier.place()
    barrier.remove()
    barrier.place()


def test_removing_what_is_not_there_does_nothing(barrier: Barrier) -> None:
    barrier.remove()
    assert barrier.placement() is None
    assert barrier.blocked_indices() == []


def test_action_and_generation_are_one_value(barrier: Barrier) -> None:
    assert barrier.placement() is None
    first = barrier.place("Save")
    assert barrier.placement() is first
    assert (first.action, first.generation) == ("Save", 1)
    barrier.remove()
    assert barrier.placement() is None
    assert barrier.place("Stop").generation == 2


def test_a_worker_at_the_barrier_waits_until_it_is_removed(held: Held) -> None:
    barrier = held.barrier
    assert (barrier.blocked_indices(), unblocked_indices(barrier)) == ([], [0, 1, 2])
    barrier.place()
    assert (barrier.blocked_indices(), unblocked_indices(barrier)) == ([0], [1, 2])
    workers = [held.meet(2)]
    until(lambda: barrier.blocked_indices() == [0, 2])
    assert unblocked_indices(barrier) == [1]
    workers.append(held.meet(1))
    until(lambda: barrier.blocked_indices() == [0, 1, 2])
    assert all(worker.is_alive() for worker in workers)
    barrier.remove()
    assert all(joined(worker) for worker in workers)
    assert (barrier.blocked_indices(), unblocked_indices(barrier)) == ([], [0, 1, 2])


def test_of_many_that_place_it_at_once_one_does(barrier: Barrier) -> None:
    placed: list[bool] = []
    ready = threading.Barrier(4)

    def place() -> None:
        ready.wait(SECONDS)
        try:
            barrier.place()
        except BarrierAlreadyPlacedError:
            placed.append(False)
        else:
            placed.append(True)

    threads = [threading.Thread(target=place) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert all(joined(thread) for thread in threads)
    assert sorted(placed) == [False, False, False, True]
