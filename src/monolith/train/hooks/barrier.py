"""The barrier: a place where workers wait between steps while it is placed.

The chief, index 0, places it with an action that says why: "Save" while a state is cut, "Stop"
before all processes end, or "" because an operator wants silence. Workers, from 1 on, meet it
before their next step and are blocked until it is removed. Action and flag are one
value with a generation, so that a slow worker never reads the action of a later barrier.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from monolith import concurrency
from monolith.errors import BarrierAlreadyPlacedError, ConfigError
from monolith.observe import memory_use
from monolith.train.hook import Hook, TrainingRun
from monolith.train.hooks.save_timing import SaveListener
from monolith.wire.machine_health_pb2 import MachineHealthResult

_log = logging.getLogger(__name__)

SAVE = "Save"
STOP = "Stop"

Callback = Callable[[str], None]
"""Told the action of a barrier."""


@dataclass(frozen=True, slots=True, eq=False)
class PlacedBarrier:
    """A barrier that is in place."""

    action: str
    generation: int
    """Grows with each barrier, from 1."""


KeepWaiting = Callable[[PlacedBarrier], bool]


class Barrier(Protocol):
    """Holds workers back. Thread-safe. Every implementation passes `tests/contracts/test_barrier.py`.

    How workers pause is not part of it: those of a fleet do so where they meet between steps, the threads of
    a process by `LocalBarrier.wait_until_removed`.
    """

    @property
    def capacity(self) -> int:
        """How many there are, the chief included."""

    def place(self, action: str = "") -> PlacedBarrier:
        """Block all workers before their next step.

        Raises:
            BarrierAlreadyPlacedError: There is one already.
        """

    def remove(self) -> None:
        """Unblock all workers, whichever process placed it; without a barrier nothing happens."""

    def placement(self) -> PlacedBarrier | None:
        """The barrier that is in place, if one is."""

    def blocked_indices(self) -> list[int]:
        """Who is blocked, in order. The chief counts as blocked while a barrier is placed."""


def unblocked_indices(barrier: Barrier) -> list[int]:
    blocked = set(barrier.blocked_indices())
    return [index for index in range(barrier.capacity) if index not in blocked]


class LocalBarrier:
    """A barrier for the threads of one process.

    Args:
        callbacks: Called with the action by the thread that places the barrier, and once for each barrier by
            every worker that meets it.
    """

    def __init__(self, capacity: int, callbacks: Sequence[Callback] = ()) -> None:
        if capacity < 1:
            raise ConfigError(f"barrier: capacity must be at least 1, got {capacity}")
        self._capacity = capacity
        self._callbacks = tuple(callbacks)
        self._changed = concurrency.Condition()  # guards what is below
        self._placed: PlacedBarrier | None = None
        self._generation = 0
        self._blocked: set[int] = set()

    @property
    def capacity(self) -> int:
        return self._capacity

    def place(self, action: str = "") -> PlacedBarrier:
        with self._changed:
            if self._placed is not None:
                raise BarrierAlreadyPlacedError(
                    f"cannot place a barrier (action {action!r}): one is in place (action "
                    f"{self._placed.action!r}). Wait until it is removed, or remove it."
                )
            self._generation += 1
            self._placed = placed = PlacedBarrier(action, self._generation)
        for callback in self._callbacks:
            callback(action)
        return placed

    def remove(self) -> None:
        with self._changed:
            self._placed = None
            self._changed.notify_all()

    def placement(self) -> PlacedBarrier | None:
        with self._changed:
            return self._placed

    def wait_until_removed(
        self, index: int, *, keep_waiting: KeepWaiting | None = None, poll: float = 1.0
    ) -> None:
        """Be blocked as worker `index` while a barrier is placed.

        Args:
            keep_waiting: Called with the barrier at once and then every `poll` seconds; False gives up.

        Raises:
            ConfigError: `index` is not from 1 to capacity - 1.
        """
        check_index(self, index)
        with self._changed:
            placed = self._placed
            if placed is None:
                return
            self._blocked.add(index)
        try:
            for callback in self._callbacks:
                callback(placed.action)
            while keep_waiting is None or keep_waiting(placed):
                with self._changed:
                    # Another may be placed the instant this one goes; this one is what is waited for.
                    if self._changed.wait_for(lambda: self._placed is not placed, poll):
                        return
        finally:
            with self._changed:
                self._blocked.discard(index)

    def blocked_indices(self) -> list[int]:
        with self._changed:
            chief = set() if self._placed is None else {0}
            return sorted(self._blocked | chief)


class BarrierHook(Hook):
    """Lets the chief wait before its step while a barrier is placed, so that a run of one process can be
    halted; and stop when the barrier says "Stop".

    Args:
        idle: Called again and again while waiting, with the run; `SaveHook.before_step` belongs here, since
            nothing else can save while the training thread waits.
        poll: How long to wait between looks at the run and calls of `idle`, in seconds.
    """

    def __init__(
        self,
        barrier: Barrier,
        *,
        idle: Sequence[Callable[[TrainingRun], None]] = (),
        poll: float = 1.0,
        sleep: Callable[[float], None] = concurrency.sleep,
    ) -> None:
        self._barrier = barrier
        self._idle = tuple(idle)
        self._poll = poll
        self._sleep = sleep

    def before_step(self, run: TrainingRun) -> None:
        while (placed := self._barrier.placement()) is not None and self._keep_waiting(run, placed):
            self._sleep(self._poll)

    def _keep_waiting(self, run: TrainingRun, placed: PlacedBarrier) -> bool:
        if placed.action == STOP:
            _stop(run)
            return False
        for call in self._idle:
            call(run)
        return run.stop_reason is None


class WorkerBarrierHook(Hook):
    """Lets a worker wait before its step while a barrier is placed, and stop when that says "Stop".

    Args:
        index: Of this worker, from 1.
        poll: How long to wait between looks at the run, in seconds.
    """

    def __init__(self, barrier: LocalBarrier, index: int, *, poll: float = 1.0) -> None:
        check_index(barrier, index)
        self._barrier = barrier
        self._index = index
        self._poll = poll

    def before_step(self, run: TrainingRun) -> None:
        def keep_waiting(placed: PlacedBarrier) -> bool:
            if placed.action == STOP:
                _stop(run)
                return True  # the chief wants to see its workers blocked
            return run.stop_reason is None

        self._barrier.wait_until_removed(self._index, keep_waiting=keep_waiting, poll=self._poll)


def check_index(barrier: Barrier, index: int) -> None:
    """Refuse what is no worker; the chief, 0, does not wait as one."""
    if not 0 < index < barrier.capacity:
        raise ConfigError(f"barrier: a worker's index must be from 1 to {barrier.capacity - 1}, got {index}")


def _stop(run: TrainingRun) -> None:
    run.request_stop("the chief stopped all workers")


class BarrierSaveListener(SaveListener):
    """A guard that holds the workers back while a state is cut, so that they do not change it meanwhile.

    Args:
        announce: Told the step before the barrier is placed, so that workers save their own part for it.
        wait_seconds: Between looks at who is blocked.
        max_pending_seconds: After this the state is cut even if a worker still trains.
    """

    def __init__(
        self,
        barrier: Barrier,
        *,
        wait_seconds: float = 1.0,
        max_pending_seconds: float = 30.0,
        announce: Callable[[int], None] | None = None,
        clock: Callable[[], float] = concurrency.monotonic,
        sleep: Callable[[float], None] = concurrency.sleep,
    ) -> None:
        self._barrier = barrier
        self._wait_seconds = wait_seconds
        self._max_pending_seconds = max_pending_seconds
        self._announce = announce
        self._clock = clock
        self._sleep = sleep
        self._own = False

    def before_save(self, step: int) -> None:
        if self._announce is not None:
            self._announce(step)
        self._own = try_place(self._barrier, SAVE)
        wait_until_blocked(
            self._barrier, self._max_pending_seconds, self._wait_seconds, clock=self._clock, sleep=self._sleep
        )

    def after_save(self, step: int) -> None:  # noqa: ARG002
        if self._own:
            self._own = False
            self._barrier.remove()


def try_place(barrier: Barrier, action: str) -> bool:
    """Place a barrier; return False where there is one already, which holds workers back as well."""
    try:
        barrier.place(action)
    except BarrierAlreadyPlacedError as error:
        _log.info("%s", error)
        return False
    return True


def wait_until_blocked(
    barrier: Barrier,
    at_most: float,
    poll: float,
    *,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> bool:
    """Wait until every worker is blocked; return False, and say who is not, when that takes too long."""
    limit = clock() + at_most
    while missing := unblocked_indices(barrier):
        if clock() >= limit:
            _log.warning("waited %.0f s for workers %s to pause; continuing without them", at_most, missing)
            return False
        sleep(poll)
    return True


# The health of processes with rows: training halts before one of them runs out of memory.
#
# A server that the kernel kills takes its rows along. Halted in time, the run can be stopped, which
# saves it, and started again with more memory or more servers.


NO_LIMIT_BYTES = 2**62


class HealthStatus(IntEnum):
    OK = 0
    OUT_OF_MEMORY = 1


@dataclass(frozen=True, slots=True)
class MachineHealth:
    """Whether a process has what it needs."""

    status: HealthStatus = HealthStatus.OK
    message: str = ""

    def encode(self) -> bytes:
        """Return a MachineHealthResult; nothing at all for a machine that is well."""
        if self.status is HealthStatus.OK:
            return b""
        result = MachineHealthResult(status=self.status.name, message=self.message)
        return bytes(result.SerializeToString())

    @classmethod
    def decode(cls, data: bytes) -> MachineHealth:
        result = MachineHealthResult.FromString(data)
        return cls(HealthStatus(result.status), result.message)


def memory_health(
    limit_bytes: int = NO_LIMIT_BYTES, used_bytes: Callable[[], int] | None = None
) -> MachineHealth:
    """Return the health of this process by the memory it uses: by default its resident size."""
    used = (used_bytes or _resident_bytes)()
    if used <= limit_bytes:
        return MachineHealth()
    return MachineHealth(
        HealthStatus.OUT_OF_MEMORY, f"uses {used:,} bytes of memory, more than its limit of {limit_bytes:,}"
    )


class PsHealthHook(Hook):
    """Checks the health of every parameter server; halts training and reports, once, if one is unhealthy.

    Training stays halted until the run is stopped. A server that does not answer does not count as
    unhealthy: whether it is gone, others find out.

    Args:
        checks: One per server, by index; called on a thread of this hook.
        report: Told which servers are unhealthy.
        name: Names a server in the log, by its index.
        interval: Seconds between rounds.
    """

    def __init__(
        self,
        checks: Sequence[Callable[[], MachineHealth]],
        barrier: Barrier,
        report: Callable[[Mapping[int, MachineHealth]], None],
        *,
        name: Callable[[int], str] = "parameter server {}".format,
        interval: float = 30.0,
    ) -> None:
        self._checks = tuple(checks)
        self._barrier = barrier
        self._report = report
        self._name = name
        self._interval = interval
        self._placed = False
        self._closed = concurrency.Event()
        self._thread: concurrency.Thread | None = None

    def after_create(self, run: TrainingRun) -> None:  # noqa: ARG002
        if self._thread is None:
            # A daemon: a start that fails elsewhere must not be kept alive by this.
            self._thread = concurrency.Thread(target=self._watch, name="ps-health", daemon=True)
            self._thread.start()

    def end(self, run: TrainingRun) -> None:  # noqa: ARG002
        """Unblock the halted workers, so that they learn that the run ends."""
        if self._placed:
            self._barrier.remove()

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join(self._interval)  # a check may hang
            self._thread = None

    def check(self) -> dict[int, MachineHealth]:
        """Ask each server once; return the unhealthy ones by index."""
        unhealthy = {}
        for index, ask in enumerate(self._checks):
            try:
                health = ask()
            except Exception:
                _log.warning("cannot check the health of %s", self._name(index), exc_info=True)
                continue
            if health.status is not HealthStatus.OK:
                unhealthy[index] = health
        return unhealthy

    def _watch(self) -> None:
        while True:
            if unhealthy := self.check():
                break
            if self._closed.wait(self._interval):
                return
        _log.error(
            "halting training: %s. Stop the run, which saves it, and start it again with more memory or more "
            "parameter servers.",
            "; ".join(f"{self._name(index)} {health.message}" for index, health in unhealthy.items()),
        )
        try:
            self._report(unhealthy)
        except Exception:
            _log.exception("reporting unhealthy parameter servers failed")
        self._placed = try_place(self._barrier, "")


def _resident_bytes() -> int:
    use = memory_use()
    return 0 if use is None else use.own
