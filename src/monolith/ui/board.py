"""The board: the state of all sources, read while the page is open and sent to browsers as it changes.

Each source has its own thread, so that one that hangs does not block other sources. A source that cannot
be read is shown as down, with the reason and its last values, and is retried.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from monolith.errors import ConfigError, MonolithError
from monolith.ui.figures import CurvePoint, PageReading, ThinnedCurve, plain
from monolith.ui.publishing import RunPublishing

_log = logging.getLogger(__name__)

EVERY = 1.0
"""Seconds between two reads of a source."""
SILENT_SECONDS = 20.0
"""A source whose read has not ended for so long is down."""
MOST_CURVES = 200
"""Curves of all sources together."""


SetSplit = Callable[[str, str], None]
"""Takes a name and its targets; see `Inference.set_split`."""


class PageSource(Protocol):
    """Reports the state of a run, a server or this process. One thread reads; another may close."""

    @property
    def name(self) -> str:
        """Name of the source on the page."""

    def read(self) -> PageReading:
        """Return the current state.

        Raises:
            MonolithError: The state is unknown; gives the reason. The read is retried.
        """

    @property
    def publishing(self) -> RunPublishing | None:
        """The publishing that the page's buttons control; None if there is none to control."""

    @property
    def set_split(self) -> SetSplit | None:
        """What divides the requests for a name in another way; None if the source is no server."""

    def close(self) -> None: ...


_Key = tuple[str, str, str]
"""Chart, source, label."""


@dataclass(slots=True)
class _SourceStatus:
    """The last known state of one source."""

    name: str
    reading: PageReading | None = None
    error: str | None = "not read yet"
    since: float = 0.0
    """When it changed to up, or down."""
    read_at: float = 0.0
    """When it was last read."""
    asked: float | None = None
    """When the running read started; None if none runs."""

    def to_json(self, now: float) -> dict[str, Any]:
        error = self.error
        if error is None and self.asked is not None and now - self.asked > SILENT_SECONDS:
            error = f"it has not answered for {now - self.asked:.0f} s"
        said = {} if self.reading is None else plain(self.reading)
        said.pop("points", None)
        return {
            "name": self.name,
            "up": error is None,
            "error": error,
            "since": self.since,
            "read_at": self.read_at,
            **said,
        }


@dataclass(slots=True)
class Seen:
    """What one browser has received: of each curve its generation, and how many points."""

    version: int = -1
    curves: dict[_Key, tuple[int, int]] = field(default_factory=dict)


class Board:
    """Asks sources from `start` to `close`. Thread-safe.

    Args:
        every: Seconds between two reads of a source.
        controls: By the name of a source, what its buttons do.
        clock: Unix seconds.

    Raises:
        ConfigError: Two sources have one name.
    """

    def __init__(
        self,
        sources: Iterable[PageSource],
        *,
        every: float = EVERY,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._sources = named_once(sources)
        self._every = every
        self._clock = clock
        self._lock = threading.Lock()  # guards what follows
        self._statuses = {one.name: _SourceStatus(one.name, since=clock()) for one in self._sources}
        self._curves: dict[_Key, ThinnedCurve] = {}
        self._version = 0
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        for source in self._sources:
            thread = threading.Thread(
                target=self._poll, args=(source,), name=f"page-{source.name}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Ask no more; a source that hangs is not waited for."""
        self._stop.set()
        for thread in self._threads:
            thread.join(1.0)
        for source in self._sources:
            source.close()

    def look(self, source: PageSource) -> None:
        """Read a source once; an error becomes its state."""
        status = self._statuses[source.name]
        status.asked = self._clock()
        reading, error = None, None
        try:
            reading = source.read()
        except MonolithError as problem:
            error = str(problem)
        except Exception as problem:  # a source must not take the page down with it
            _log.exception("the page cannot read %s", source.name)
            error = f"the page cannot read it: {type(problem).__name__} (its log says more)"
        with self._lock:
            now = self._clock()
            if (error is None) != (status.error is None):
                status.since = now
            status.error, status.asked = error, None
            if reading is not None:
                status.reading, status.read_at = reading, now
                self._draw(source.name, reading.points)
            self._version += 1

    def news(self, seen: Seen) -> dict[str, Any] | None:
        """Return the changes since a browser was last sent some, and note them in `seen`; None without
        changes."""
        with self._lock:
            if seen.version == self._version:
                return None
            now = self._clock()
            curves = [self._curve(key, curve, seen) for key, curve in self._curves.items()]
            seen.version = self._version
            return {
                "time": now,
                "sources": [status.to_json(now) for status in self._statuses.values()],
                "curves": [one for one in curves if one is not None],
            }

    def control(self, name: str) -> RunPublishing:
        """Return the publishing control of a source.

        Raises:
            ConfigError: There is no such source, or nothing to control about it.
        """
        publishing = self._source(name).publishing
        if publishing is None:
            raise ConfigError(f"{name} has no publishing that this page can control")
        return publishing

    def set_split(self, source: str, name: str, targets: str) -> None:
        """Have a server divide the requests for a name in another way.

        Raises:
            ConfigError: There is no such source, or it is no server.
            RequestError: The server refuses; gives its reason.
            UnavailableError: The server cannot be reached.
        """
        set_split = self._source(source).set_split
        if set_split is None:
            raise ConfigError(f"{source} is no server, so it splits no requests")
        set_split(name, targets)

    def _source(self, name: str) -> PageSource:
        for source in self._sources:
            if source.name == name:
                return source
        raise ConfigError(f"there is no source {name[:100]!r}")

    def _curve(self, key: _Key, curve: ThinnedCurve, seen: Seen) -> Mapping[str, Any] | None:
        generation, count = seen.curves.get(key, (-1, 0))
        whole = generation != curve.generation
        points = curve.since(0 if whole else count)
        seen.curves[key] = (curve.generation, len(curve))
        if not points and not whole:
            return None
        chart, source, label = key
        return {
            "chart": chart,
            "source": source,
            "label": label,
            "whole": whole,
            "points": [[round(x, 3), float(f"{y:.6g}")] for x, y in points],
            "newest": curve.newest,
        }

    def _draw(self, source: str, points: Iterable[CurvePoint]) -> None:
        for point in points:
            key = (point.chart, source, point.label)
            curve = self._curves.get(key)
            if curve is None:
                if len(self._curves) >= MOST_CURVES:
                    continue
                curve = self._curves[key] = ThinnedCurve()
            curve.add(point.x, point.y)

    def _poll(self, source: PageSource) -> None:
        while not self._stop.is_set():
            self.look(source)
            self._stop.wait(self._every)


def named_once(sources: Iterable[PageSource]) -> Sequence[PageSource]:
    """Return sources as they are.

    Raises:
        ConfigError: Two of them have one name, by which the page would not tell them apart.
    """
    found = list(sources)
    names: list[Any] = [one.name for one in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"ui: two sources are called {twice[0]!r}; write NAME=PLACE to choose their names")
    return found
