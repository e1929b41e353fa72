"""Discovery: which files a pattern matches, now and later.

A pattern is a path with `*`, `?`, `[...]` and `**`, and with ranges in braces:

    {DATE(20240101,20240131)}         every day from the first to the last
    {DATE(2024010100,2024010123)}     every hour
    {INT(0,15)}                       every number; {INT(00,15)} with zeros in front

Both ends belong to a range. Several ranges in one pattern give all combinations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from itertools import product

from monolith import concurrency
from monolith.errors import ConfigError, DataError
from monolith.filesystem import glob, is_temporary, join

_RANGE = re.compile(r"\{(DATE|INT)\(\s*([^(),\s]*)\s*,\s*([^(),\s]*)\s*\)\}")
_APPEARANCE = timedelta(seconds=30)
_GROWTH = timedelta(milliseconds=20)
"""How often a watch lists files, and checks whether they grew. One check costs microseconds."""
_MOST = 1_000_000
"""Patterns that one may expand to; more are taken for a typo."""


def expand(pattern: str) -> list[str]:
    """Return the patterns, without ranges, that a pattern with ranges expands to, in order.

    Raises:
        ConfigError: A range makes no sense: no date, no number, or its end before its beginning.
    """
    pieces = _RANGE.split(pattern)
    texts = pieces[0::4]
    ranges = [
        _values(kind, first, last, pattern)
        for kind, first, last in zip(pieces[1::4], pieces[2::4], pieces[3::4], strict=True)
    ]
    if any(mark in text for text in texts for mark in ("{DATE", "{INT")):
        raise ConfigError(
            f"cannot read the range in {pattern!r}: write {{DATE(20240101,20240131)}} or {{INT(0,15)}}"
        )
    count = 1
    for values in ranges:
        count *= len(values)
        if count > _MOST:
            raise ConfigError(f"{pattern!r} expands to more than {_MOST:,} patterns")
    return [
        texts[0] + "".join(value + text for value, text in zip(values, texts[1:], strict=True))
        for values in product(*ranges)
    ]


def find_files(patterns: str | Sequence[str]) -> list[str]:
    """Return the files that match any of the patterns: sorted, each once, unfinished ones left out.

    Raises:
        DataError: No pattern matches a file; the message lists the patterns.
    """
    given = [patterns] if isinstance(patterns, str) else list(patterns)
    found = matching_files(given)
    if not found:
        tried = [one for pattern in given for one in expand(pattern)]
        more = f" and {len(tried) - 5} more" if len(tried) > 5 else ""
        raise DataError(
            f"no file matches {', '.join(map(repr, given)) or 'an empty list of patterns'}; "
            f"looked for {', '.join(tried[:5]) or 'nothing'}{more}"
        )
    return found


def matching_files(patterns: Sequence[str]) -> list[str]:
    """Return the same as `find_files`, but an empty list if nothing matches."""
    found = {path for pattern in patterns for one in expand(pattern) for path in glob(one)}
    return sorted(path for path in found if not is_temporary(path))


def matching_patterns(patterns: Sequence[str]) -> list[str]:
    """Return the patterns without ranges that match at least one file, in their order.

    A queue of patterns gets these, and expands them into files one at a time.

    Raises:
        DataError: No pattern does; the message lists them.
    """
    expanded = [one for pattern in patterns for one in expand(pattern)]
    matching = [one for one in expanded if matching_files([one])]
    if not matching:
        find_files(patterns)  # raises the error
    return matching


def gen_patterns(
    path: str,
    dates: tuple[str | date, str | date],
    hours: tuple[int, int] = (0, 24),
    is_hourly: bool = False,
    wildcard: str = "*",
) -> list[str]:
    """Return `path/20240131/wildcard` for each day; or, hourly, `path/20240131/23/wildcard`.

    Args:
        dates: First day, and the day after the last: dates, or text such as "20240131" or "2024-01-31".
        hours: First hour of each day, and the hour after the last.
    """
    first, end = (_day(one) for one in dates)
    if not 0 <= hours[0] <= hours[1] <= 24:
        raise ConfigError(f"hours must be from 0 to 24 and in order, got {hours}")
    days = [f"{day:%Y%m%d}" for day in _days(first, end)]
    if not is_hourly:
        return [join(path, day, wildcard) for day in days]
    return [join(path, day, f"{hour:02}", wildcard) for day in days for hour in range(*hours)]


class Watch:
    """Files that match patterns, also those that appear later.

    A file must appear whole, under its final name, unless it `grows`. For one reader at a time.

    Args:
        every: Time between two listings; by default 30 s, and 20 ms if files grow.
        grows: Whether other processes append to the files, which are text: lines are read as they are
            finished, from any file that has some.
        stop_after: How long to wait for a new file before that is the end; None waits for ever.
        clock: Seconds that never run backwards.
        pause: Lets some seconds pass; by default until the reader is told to stop, at most.
    """

    def __init__(
        self,
        patterns: str | Sequence[str],
        *,
        every: timedelta | None = None,
        grows: bool = False,
        stop_after: timedelta | None = None,
        clock: Callable[[], float] = concurrency.monotonic,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        self.patterns = [patterns] if isinstance(patterns, str) else list(patterns)
        for pattern in self.patterns:
            expand(pattern)
        self.grows = grows
        self._every = (_GROWTH if grows else _APPEARANCE) if every is None else every
        self._stop_after = stop_after
        self._clock = clock
        self._pause = pause
        self._since: float | None = None
        """When there was last something to read."""

    def list_files(self) -> list[str]:
        """Return all files that match now, sorted."""
        return matching_files(self.patterns)

    def now(self) -> float:
        """Return seconds that never run backwards."""
        return self._clock()

    def found(self) -> None:
        """Note that there was something to read."""
        self._since = None

    def is_over(self) -> bool:
        """Return whether nothing was found for `stop_after`."""
        now = self._clock()
        if self._since is None:
            self._since = now
        return self._stop_after is not None and now - self._since >= self._stop_after.total_seconds()

    def wait(self, stop: concurrency.Event) -> None:
        """Sleep until the next listing, or an event is set."""
        (self._pause or stop.wait)(self._every.total_seconds())


def _values(kind: str, first: str, last: str, pattern: str) -> list[str]:
    if kind == "INT":
        return _numbers(first, last, pattern)
    lengths = {len(first), len(last)}
    if lengths not in ({8}, {10}) or not (first + last).isdecimal():
        raise ConfigError(f"{pattern!r}: a date has 8 digits and an hour 10, got {first!r} and {last!r}")
    form, step = ("%Y%m%d", timedelta(days=1)) if lengths == {8} else ("%Y%m%d%H", timedelta(hours=1))
    try:
        moment, end = (datetime.strptime(text, form).replace(tzinfo=UTC) for text in (first, last))
    except ValueError as cause:
        raise ConfigError(f"{pattern!r}: {first!r} or {last!r} is not a date: {cause}") from cause
    if end < moment:
        raise ConfigError(f"{pattern!r}: the range ends at {last}, before it begins at {first}")
    count = (end - moment) // step + 1
    if count > _MOST:
        raise ConfigError(f"{pattern!r} expands to more than {_MOST:,} patterns")
    return [(moment + step * number).strftime(form) for number in range(count)]


def _numbers(first: str, last: str, pattern: str) -> list[str]:
    if not (first.isdecimal() and last.isdecimal()):
        raise ConfigError(f"{pattern!r}: a range of numbers needs two of them, got {first!r} and {last!r}")
    begin, end = int(first), int(last)
    if end < begin:
        raise ConfigError(f"{pattern!r}: the range ends at {last}, before it begins at {first}")
    if end - begin >= _MOST:
        raise ConfigError(f"{pattern!r} expands to more than {_MOST:,} patterns")
    width = len(first) if first.startswith("0") else 1
    return [f"{number:0{width}}" for number in range(begin, end + 1)]


def _day(text: str | date) -> date:
    if isinstance(text, datetime):
        return text.date()
    if isinstance(text, date):
        return text
    try:
        return date.fromisoformat(text)
    except ValueError as cause:
        raise ConfigError(f"{text!r} is not a date: write 20240131 or 2024-01-31") from cause


def _days(first: date, end: date) -> Iterator[date]:
    if end < first:
        raise ConfigError(f"the dates end at {end}, before they begin at {first}")
    for number in range((end - first).days):
        yield first + timedelta(days=number)
