"""The health of processes with rows: training halts before one of them runs out of memory.

A server that the kernel kills takes its rows along. QuiescedFleet in time, the run can be stopped, which
saves it, and started again with more memory or more servers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from monolith.observe import memory_use
from monolith.train.hook import Hook, Run
from monolith.train.hooks.control.barrier import Barrier, try_place
from monolith.wire.machine_health_pb2 import MachineHealthResult

_log = logging.getLogger(__name__)

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
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def after_create(self, run: Run) -> None:  # noqa: ARG002
        if self._thread is None:
            # A daemon: a start that fails elsewhere must not be kept alive by this.
            self._thread = threading.Thread(target=self._watch, name="ps-health", daemon=True)
            self._thread.start()

    def end(self, run: Run) -> None:  # noqa: ARG002
        """Let the others go that were halted, so that they hear that the run ends."""
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
