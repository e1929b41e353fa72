"""The health of parameter servers: training halts before one of them runs out of memory.

A server that the kernel kills takes its rows along. Halted in time, the job can be saved, and
given more memory.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

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
    """How a machine is."""

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
    """Return how this process is, by the memory it uses: its resident size where nobody says otherwise."""
    used = (used_bytes or _resident_bytes)()
    if used <= limit_bytes:
        return MachineHealth()
    return MachineHealth(
        HealthStatus.OUT_OF_MEMORY, f"uses {used:,} bytes, which is more than the limit of {limit_bytes:,}"
    )


class PsHealthHook(Hook):
    """Asks every parameter server how it is; halts training and reports, once, if one is unwell.

    A server that does not answer is not unwell: that it is gone, others find out.

    Args:
        checks: One per server, by index; called on a thread of this hook.
        report: Told who is unwell.
        interval: Seconds between rounds.
    """

    def __init__(
        self,
        checks: Sequence[Callable[[], MachineHealth]],
        barrier: Barrier,
        report: Callable[[Mapping[int, MachineHealth]], None],
        *,
        interval: float = 30.0,
    ) -> None:
        self._checks = tuple(checks)
        self._barrier = barrier
        self._report = report
        self._interval = interval
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def after_create(self, run: Run) -> None:  # noqa: ARG002
        if self._thread is None:
            # A daemon: a start that fails elsewhere must not be kept alive by this.
            self._thread = threading.Thread(target=self._watch, name="ps-health", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join(self._interval)  # a check may hang
            self._thread = None

    def check(self) -> dict[int, MachineHealth]:
        """Ask once; return those that are unwell, by index."""
        unwell = {}
        for index, ask in enumerate(self._checks):
            try:
                health = ask()
            except Exception:
                _log.warning("parameter server %d did not say how it is", index, exc_info=True)
                continue
            if health.status is not HealthStatus.OK:
                unwell[index] = health
        return unwell

    def _watch(self) -> None:
        while True:
            if unwell := self.check():
                break
            if self._closed.wait(self._interval):
                return
        _log.error("halting training: parameter servers are unwell: %s", unwell)
        try:
            self._report(unwell)
        except Exception:
            _log.exception("reporting unwell parameter servers failed")
        try_place(self._barrier, "")


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
