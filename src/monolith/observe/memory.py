"""Memory: how near a process is to having none left.

What ends a process is the limit of its container, where there is one, and otherwise the memory of the
machine, which others use as well. Both are read where Linux says them; elsewhere nobody can tell.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from monolith.observe.progress import describe_bytes

NEAR = 0.85
"""The share of memory from which on a warning is due."""
OURS = 0.05
"""The share that must be this process's own: otherwise it is not the one to warn."""
LOOK_EVERY = timedelta(seconds=5)
WARN_EVERY = timedelta(minutes=10)

_NO_LIMIT = 1 << 60
"""Version 1 of cgroups says that there is no limit by one beyond any machine."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Of the memory that this process can get, in bytes."""

    own: int
    """The bytes that this process uses."""
    used: int
    """The bytes that all processes under the limit use, without file caches that can be dropped."""
    limit: int

    @property
    def share(self) -> float:
        return self.used / self.limit


def memory_use(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> MemoryUse | None:
    """Return how memory stands; None where the system does not say."""
    try:
        machine = _fields(proc / "meminfo", 1024)
        own = int((proc / "self" / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        total, available = machine["MemTotal"], machine["MemAvailable"]
    except (OSError, KeyError, IndexError, ValueError):
        return None
    uses = [MemoryUse(own, total - available, total)]
    for limit, used, stat, idle in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        try:
            most = int((cgroup / limit).read_text())  # "max" where there is none
            held = int((cgroup / used).read_text()) - _fields(cgroup / stat).get(idle, 0)
        except (OSError, ValueError):
            continue
        if 0 < most < min(total, _NO_LIMIT):
            uses.append(MemoryUse(own, max(held, own), most))
    return max(uses, key=lambda use: use.share)


class MemoryWatch:
    """Warns when memory runs short. Thread-safe; asking often costs next to nothing.

    Args:
        read: Returns how memory stands.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        read: Callable[[], MemoryUse | None] = memory_use,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._clock = clock
        self._next_look = clock()
        self._next_warning = clock()
        self._last: MemoryUse | None = None
        self._looking = threading.Lock()
        self.warnings = 0
        """How many were given."""

    def look(self, what: Callable[[], str]) -> None:
        """Look, if it is time to.

        Args:
            what: Says what this process keeps in memory; asked only where there is a warning to give.
        """
        if self._clock() < self._next_look or not self._looking.acquire(blocking=False):
            return
        try:
            now = self._clock()
            self._next_look = now + LOOK_EVERY.total_seconds()
            before, self._last = self._last, self._read()
            use = self._last
            if use is None or use.own < OURS * use.limit or now < self._next_warning:
                return
            # As much again as since the last look would have come to the next one.
            growth = 0 if before is None else max(use.used - before.used, 0)
            if use.used + growth < NEAR * use.limit:
                return
            self._next_warning = now + WARN_EVERY.total_seconds()
            self.warnings += 1
            _log.warning(
                "memory is running low: %s of %s are in use, %s of them by this process, which holds %s. "
                "The kernel kills processes when there is none left. Give tables a budget (capacity_bytes), "
                "admit fewer ids (occurrence_threshold), let rows expire, or spread them over more servers.",
                describe_bytes(use.used),
                describe_bytes(use.limit),
                describe_bytes(use.own),
                what(),
            )
        finally:
            self._looking.release()


def _fields(path: Path, unit: int = 1) -> dict[str, int]:
    found = {}
    for line in path.read_text().splitlines():
        name, _, value = line.replace(":", " ").partition(" ")
        found[name] = int(value.split()[0]) * unit
    return found
