"""The machine under a process: its hardware, the memory that is left, its wall clock and its processor time.

The limit that ends a process is that of its container, if there is one, and otherwise the memory of the
machine. Both are read from Linux; other systems do not report them.

Intervals and timeouts use the monotonic clock, which cannot be set. The wall clock is for stamps: event
times, names, ages of files between machines. When it jumps, stamps from before and after do not fit
together, so each jump is logged once, with its size; and signs of life of other processes are timed from
when they changed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Self

from monolith import concurrency
from monolith.observe.metrics import Metrics
from monolith.observe.progress import describe_bytes

HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/enabled"
ARM_PARTS = {
    "0xd0c": "Neoverse N1",
    "0xd40": "Neoverse V1",
    "0xd49": "Neoverse N2",
    "0xd4f": "Neoverse V2",
    "0xd84": "Neoverse V3",
    "0xd8e": "Neoverse N3",
}


def cpu_name(info: Mapping[str, str]) -> str:
    """Return the name of the processor that /proc/cpuinfo describes."""
    part = info.get("CPU part")
    arm = ARM_PARTS.get(part, f"ARM part {part}") if part else None
    return info.get("model name") or arm or platform.processor() or platform.machine()


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def huge_pages(root: Path) -> str | None:
    """Return the setting of transparent huge pages: always, madvise or never; None if there is none."""
    path = root / HUGE_PAGES
    return path.read_text().partition("[")[2].partition("]")[0] if path.is_file() else None


def read_fields(path: Path) -> dict[str, str]:
    """Return the `name: value` lines of a /proc file, the first of each name; none without the file."""
    fields: dict[str, str] = {}
    if path.is_file():
        for line in path.read_text().splitlines():
            name, colon, value = line.partition(":")
            if colon:
                fields.setdefault(name.strip(), value.strip())
    return fields


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
    """Return the use of memory; None if the system does not report it."""
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
            most = int((cgroup / limit).read_text())  # "max" means no limit
            in_use = int((cgroup / used).read_text()) - _fields(cgroup / stat).get(idle, 0)
        except (OSError, ValueError):
            continue
        if 0 < most < min(total, _NO_LIMIT):
            uses.append(MemoryUse(own, max(in_use, own), most))
    return max(uses, key=lambda use: use.share)


class MemoryWatch:
    """Warns when memory runs short. Thread-safe; asking often costs next to nothing.

    Args:
        read: Returns the use of memory.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        read: Callable[[], MemoryUse | None] = memory_use,
        *,
        clock: Callable[[], float] = concurrency.monotonic,
    ) -> None:
        self._read = read
        self._clock = clock
        self._next_look = clock()
        self._next_warning = clock()
        self._last: MemoryUse | None = None
        self._looking = concurrency.Lock()
        self.warnings = 0
        """How many were given."""

    def look(self, what: Callable[[], str]) -> None:
        """Look, if it is time to.

        Args:
            what: Says what this process keeps in memory; called only for a warning.
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


JUMP_SECONDS = 5.0
"""A smaller step is none: NTP corrects a clock by less, and slowly."""
_READ_WITHIN_SECONDS = 0.1
"""Two clocks that were read further apart than this, since the process was stopped, say nothing."""


class ClockWatch:
    """Compares the wall clock with the monotonic one, from a thread of its own while a block lasts.

    Args:
        metrics: Counts `clock_jumps`.
        every: Seconds between two looks.
        clock: Unix seconds.
        timer: Seconds that only grow.
    """

    def __init__(
        self,
        metrics: Metrics | None = None,
        *,
        every: float = 2.0,
        clock: Callable[[], float] = concurrency.time,
        timer: Callable[[], float] = concurrency.monotonic,
    ) -> None:
        self._every = every
        self._clock, self._timer = clock, timer
        metrics = Metrics() if metrics is None else metrics
        self._count = metrics.counter("clock_jumps", "Times that the wall clock of this machine was set")
        self._drift = self._look_at_both()
        self._stop = concurrency.Event()
        self._thread = concurrency.Thread(target=self._watch, name="clock-watch", daemon=True)

    def look(self) -> float | None:
        """Return by how many seconds the wall clock jumped since the last look, and warn; None if not."""
        drift = self._look_at_both()
        if drift is None:
            return None
        before, self._drift = self._drift, drift
        if before is None or abs(drift - before) < JUMP_SECONDS:
            return None
        jump = drift - before
        self._count.inc()
        _log.warning(
            "the wall clock of this machine jumped %s by %.0f s: it was set, or the machine was suspended. "
            "Saving, publishing and timeouts continue as before; stamps from before and after the jump "
            "do not fit together.",
            *("ahead" if jump > 0 else "back", abs(jump)),
        )
        return jump

    def _look_at_both(self) -> float | None:
        """Return how far the wall clock is ahead of the monotonic one; None if that cannot be told now."""
        before, wall, after = self._timer(), self._clock(), self._timer()
        return None if after - before > _READ_WITHIN_SECONDS else wall - after

    def _watch(self) -> None:
        while not self._stop.wait(self._every):
            self.look()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


class Sightings:
    """How long ago other processes gave a sign of life, timed by our own clock. For one caller at a time.

    A sign of life is a stamp that its process renews. Its own clock and ours may be set, each by its own, so
    only a change of the stamp counts, and when we saw it. What the wall clocks say counts once: when a
    stamp is first seen, within bounds, and not if ours was set since we began to look.

    Args:
        clock: Unix seconds.
        timer: Seconds that only grow.
    """

    def __init__(
        self,
        clock: Callable[[], float] = concurrency.time,
        timer: Callable[[], float] = concurrency.monotonic,
    ) -> None:
        self._clock, self._timer = clock, timer
        self._drift = clock() - timer()
        self._seen: dict[Hashable, tuple[float, float]] = {}

    def age(self, who: Hashable, stamp: float, *, renewed_at: float, most: float) -> float:
        """Return the seconds since a stamp was renewed.

        Args:
            renewed_at: When that was by the wall clock of its process, for a stamp that is first seen.
            most: Its age counts as no more than this then.
        """
        now, seen = self._timer(), self._seen.get(who)
        if seen is None:
            wall = self._clock()
            was_set = abs(wall - now - self._drift) > JUMP_SECONDS
            by_wall = 0.0 if was_set else min(max(wall - renewed_at, 0.0), most)
            self._seen[who] = seen = stamp, now - by_wall
        elif seen[0] != stamp:
            self._seen[who] = seen = stamp, now
        return now - seen[1]

    def keep(self, known: Collection[Hashable]) -> None:
        """Forget all others."""
        self._seen = {who: seen for who, seen in self._seen.items() if who in known}


_LOW = 10


def yield_to_others() -> None:
    """Let this thread, and those it starts, have the processor only where others leave it idle.

    For background work such as writing a checkpoint. Does nothing if the system gives priorities to
    processes only.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW)


def has_yielded() -> bool:
    """Whether this thread, or the one that started it, has yielded to others."""
    if sys.platform != "linux":
        return False
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) >= _LOW


class Resting:
    """A `Progress` that rests: a thread that has yielded to others gets no more than a share of a processor.

    A lower priority is not enough where threads of the training wait busily for each other: whatever one of
    them loses, all of them lose. Work that training waits for does not rest: its thread has not yielded, or
    the wait is in a block of `awaited`.

    Args:
        share: Of one processor, above 0 and up to 1, which never rests.
        clock: Seconds of work of this thread.
        rests: Whether this thread is one that rests.
    """

    def __init__(
        self,
        share: float,
        *,
        clock: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = concurrency.sleep,
        rests: Callable[[], bool] = has_yielded,
    ) -> None:
        self._rest = 1 / share - 1
        self._clock = clock
        self._sleep = sleep
        self._rests = rests
        self._threads = threading.local()
        self._lock = concurrency.Lock()
        self._waiting = 0  # blocks of `awaited` that run; written under the lock

    def advance(self, amount: float = 1) -> None:  # noqa: ARG002
        """Rest in proportion to the work since the last call of this thread."""
        if self._rest == 0 or self._waiting or not self._rests():
            return
        now = self._clock()
        worked = now - getattr(self._threads, "since", now)
        if worked > 0:
            self._sleep(worked * self._rest)
        self._threads.since = self._clock()

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """Let no thread rest while the block runs, which waits for its work."""
        with self._lock:
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1
