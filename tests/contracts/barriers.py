"""Every implementation of the barrier seam, for three workers that can be made to stand still."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import NamedTuple

from contracts.coordinators import CREWS
from runtime.fleets import PATIENT, begun_fleets, worker_state

from monolith.errors import RetryableError
from monolith.runtime.coordinator import Start
from monolith.runtime.fleet_coordinator import FleetBarrier
from monolith.train.hooks import Barrier, LocalBarrier

WORKERS = 3


class Held(NamedTuple):
    """A barrier, and what lets one of its workers meet it on a thread that ends when it may go on."""

    barrier: Barrier
    meet: Callable[[int], threading.Thread]


@contextmanager
def _local() -> Iterator[Held]:
    barrier = LocalBarrier(WORKERS)

    def meet(worker: int) -> threading.Thread:
        return _start(lambda: barrier.wait_until_removed(worker, poll=0.01))

    yield Held(barrier, meet)


@contextmanager
def _fleet() -> Iterator[Held]:
    with begun_fleets(WORKERS) as fleets:

        def meet(worker: int) -> threading.Thread:
            fleet = fleets[worker]

            def stand_still() -> None:
                while not fleet.wait_at_halt(worker_state(worker)):
                    time.sleep(0.005)  # news of the barrier is on its way

            return _start(stand_still)

        yield Held(FleetBarrier(fleets[0]), meet)


@contextmanager
def _ranks() -> Iterator[Held]:
    over = threading.Event()
    with CREWS["three ranks"]() as crew:
        threads = [_start(lambda one=one: one.join(Start(step=0))) for one in crew]  # type: ignore[misc]
        assert all(joined(thread) for thread in threads)
        leader, barrier = crew[0], crew[0].coordinator.barrier

        def lead() -> None:
            """Do as rank 0 does: a barrier keeps it from its next step, to which it comes afterwards."""
            with suppress(RetryableError):  # the others are gone when the test ends
                while not over.wait(0.005):
                    if barrier.placement() is None:
                        continue
                    while barrier.placement() is not None and not over.wait(0.005):
                        pass
                    leader.at_step()

        def meet(worker: int) -> threading.Thread:
            return _start(crew[worker].at_step)

        _start(lead)
        yield Held(barrier, meet)
        over.set()


def _start(run: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def joined(thread: threading.Thread) -> bool:
    thread.join(PATIENT)
    return not thread.is_alive()


BARRIERS: dict[str, Callable[[], AbstractContextManager[Held]]] = {
    "threads of one process": _local,
    "workers of a fleet": _fleet,
    "ranks": _ranks,
}
"""By name. Whoever adds a barrier adds a line here."""
