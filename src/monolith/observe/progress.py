"""Progress of long work: a live bar on a terminal, a line now and then in a log.

    with progress("Saving rows", total=n, unit="rows") as bar:
        for chunk in chunks:
            write(chunk)
            bar.advance(len(chunk))

Goes to standard error, so that standard output stays for results. Work that ends
within `every` leaves a log untouched.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from types import TracebackType
from typing import Protocol, Self, TextIO

from monolith import concurrency
from monolith.observe.logs import only_warnings

Clock = Callable[[], float]
"""Seconds that never run backwards."""

Fraction = Callable[[], float | None]
"""Which part is done, from 0 to 1; None if it is unknown."""


class Progress(Protocol):
    """Counts what is done. Any thread may advance it."""

    def advance(self, amount: float = 1) -> None:
        """Count `amount` more as done."""


def progress(
    label: str,
    total: float | None = None,
    unit: str = "",
    *,
    stream: TextIO | None = None,
    clock: Clock = concurrency.monotonic,
    every: timedelta | None = timedelta(seconds=30),
    fraction: Fraction | None = None,
) -> AbstractContextManager[Progress]:
    """Show how far `label` has come, how fast it runs and how long it will still take.

    Args:
        total: How much there is to do; None if unknown; then the time left is not shown.
        unit: What is counted, in the plural: "rows", "bytes".
        stream: Standard error by default.
        every: Time between two lines where `stream` is not a terminal; None keeps silent there. A process
            that shows warnings alone shows no progress either.
        fraction: Says which part is done where `total` is unknown. Asked now and then, by who advances.
    """
    stream = sys.stderr if stream is None else stream
    if only_warnings():
        return Lines(label, total, unit, stream=stream, clock=clock, every=None)
    if stream.isatty():
        from monolith.observe.terminal import Bar

        return Bar(label, total, unit, stream, clock=clock, fraction=fraction)
    return Lines(label, total, unit, stream=stream, clock=clock, every=every, fraction=fraction)


class Lines:
    """Prints a line whenever `every` has passed, and one at the end if it ever printed."""

    def __init__(
        self,
        label: str,
        total: float | None,
        unit: str,
        *,
        stream: TextIO,
        clock: Clock,
        every: timedelta | None,
        fraction: Fraction | None = None,
    ) -> None:
        self._label = label
        self._total = total
        self._unit = unit
        self._stream = stream
        self._clock = clock
        self._every = every
        self._fraction = fraction
        self._lock = concurrency.Lock()  # guards all below
        self._done = 0.0
        self._began = self._printed = clock()
        self._spoke = False

    def advance(self, amount: float = 1) -> None:
        with self._lock:
            self._done += amount
            if self._every is None or self._clock() - self._printed < self._every.total_seconds():
                return
            self._print("")

    def __enter__(self) -> Self:
        self._began = self._printed = self._clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            if self._spoke:
                self._print("done" if kind is None else "stopped")

    def _print(self, ending: str) -> None:
        now = self._clock()
        elapsed = now - self._began
        part = self._part(ending)
        parts = [describe_amount(self._done, self._total, self._unit)]
        if part is not None and self._total is None:
            parts[0] += f" ({describe_part(part)})"
        if elapsed > 0:
            parts.append(describe_rate(self._done / elapsed, self._unit))
        if ending:
            parts.append(f"{ending} after {describe_seconds(elapsed)}")
        elif part is not None and part > 0:
            parts.append(f"{describe_seconds(max(1 - part, 0) * elapsed / part)} left")
        print(f"{self._label}: {', '.join(parts)}", file=self._stream, flush=True)
        self._printed = now
        self._spoke = True

    def _part(self, ending: str) -> float | None:
        if self._total is not None:
            return self._done / self._total if self._total > 0 else None
        return None if self._fraction is None or ending else self._fraction()


def describe_part(part: float) -> str:
    """`42%`; it says 100% only of what is done."""
    return f"{math.floor(part * 100 + 1e-9)}%"


def describe_amount(done: float, total: float | None, unit: str) -> str:
    """`250/1,000 rows (25%)`, or `250 rows` if the total is unknown."""
    if total is None:
        return f"{done:,.0f} {unit}".rstrip()
    share = f" ({done / total:.0%})" if total > 0 else ""
    return f"{done:,.0f}/{total:,.0f} {unit}".rstrip() + share


def describe_rate(per_second: float, unit: str) -> str:
    """`1,250 rows/s`; slow work keeps two digits."""
    number = f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.2g}"
    return f"{number} {unit}/s" if unit else f"{number}/s"


def describe_count(count: float) -> str:
    """`12,345`, `12.3 M`, `4.56 G`."""
    for unit, size in (("G", 1e9), ("M", 1e6)):
        if count >= 10 * size or (unit == "G" and count >= size):
            return f"{count / size:.4g} {unit}"
    return f"{count:,.0f}"


def counted(count: int, noun: str) -> str:
    """`1 event`, `2,000 events`: the noun is one that takes an s."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def describe_bytes(count: float) -> str:
    """`1.5 KiB`."""
    units = ("B", "KiB", "MiB", "GiB")
    for unit in units:
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def describe_seconds(seconds: float) -> str:
    """`1:02:03`, `2:03` or `3s`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
