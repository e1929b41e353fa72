"""Logs: one handler on the root logger, formatted for its reader.

A person at a terminal gets colours, a file gets plain lines, a collector gets
one JSON object per line. Rooms only ever write
`logging.getLogger(__name__)`; the command line alone calls `configure_logging`.

A warning is written once for each cause, see `OncePerCause`: files, epochs and evaluations that
find the same thing wrong do not fill the log with it.
"""

from __future__ import annotations

import json as jsonlib
import logging
import os
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TextIO

from monolith import concurrency
from monolith.errors import ConfigError

_PLAIN = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_OURS = "monolith"  # the handler's name, by which a second call finds the first one's
_NAMED = "debug, info, warning, error, critical"
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


_CHATTY = ("httpx",)
"""Libraries that log a line for each request at the level info, which is shown at the level debug alone."""


def configure_logging(level: str | int, json: bool = False, stream: TextIO | None = None) -> None:
    """Send every log record of at least `level` to `stream`, and warnings of Python and torch, too.

    Calling again replaces what the earlier call set up; handlers of others stay. A warning that repeats is
    counted, see `OncePerCause`; `say_repeats` says the counts at the end.

    Args:
        level: A name such as "info", in either case, or a number of `logging`.
        json: One JSON object per line: time, level, logger, message, what was
            passed as `extra`, and the traceback if there is one.
        stream: Standard error by default. Colours only if it is a terminal.

    Raises:
        ConfigError: No level of that name.
    """
    number = _level_number(level)
    handler = _handler(json, sys.stderr if stream is None else stream)
    handler.set_name(_OURS)
    handler.addFilter(OncePerCause())
    logging.captureWarnings(True)
    root = logging.getLogger()
    for old in [h for h in root.handlers if h.get_name() == _OURS]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(number)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(number if number <= logging.DEBUG else max(number, logging.WARNING))


def only_warnings() -> bool:
    """Whether this process shows warnings and errors alone: with --quiet, or a --log-level above info."""
    return bool(_ours()) and logging.getLogger().level > logging.INFO


def say_repeats() -> None:
    """Say in one line how often each warning was repeated: at the end of a command."""
    filters = [one for handler in _ours() for one in handler.filters if isinstance(one, OncePerCause)]
    for text in ("; ".join(one.repeats()) for one in filters):
        if text:
            logging.getLogger(__name__).warning("warnings of one cause are shown once; there were %s", text)


def logs_json() -> bool:
    """Whether logs are JSON: for a machine, so that nothing should be drawn between them."""
    formats = [handler.formatter for handler in logging.getLogger().handlers]
    return any(isinstance(one, JsonFormatter) or (isinstance(one, _Named) and one.is_json) for one in formats)


def name_process(name: str) -> None:
    """Put a name and the process ID before every line from now on, for processes that log to one place."""
    for handler in _ours():
        handler.setFormatter(_Named(name, handler.formatter))


def process_label() -> str:
    """Return what stands before the lines of this process, such as "[worker 3 pid 4711] "; empty where it has
    no name, or its lines are JSON."""
    formats = [handler.formatter for handler in _ours()]
    return next((one.label for one in formats if isinstance(one, _Named) and not one.is_json), "")


def _ours() -> list[logging.Handler]:
    return [handler for handler in logging.getLogger().handlers if handler.get_name() == _OURS]


class _Named(logging.Formatter):
    """What another formatter makes of a record, and whose it is."""

    def __init__(self, name: str, inner: logging.Formatter | None) -> None:
        super().__init__()
        if isinstance(inner, _Named):
            inner = inner.inner
        self.inner: logging.Formatter = inner or logging.Formatter(_PLAIN)
        self._process = {"who": name, "pid": os.getpid()}
        self.is_json = isinstance(self.inner, JsonFormatter)
        self.label = f"[{name} pid {os.getpid()}] "

    def format(self, record: logging.LogRecord) -> str:
        if not self.is_json:
            return self.label + self.inner.format(record)
        return self.inner.format(logging.makeLogRecord({**vars(record), **self._process}))


class OncePerCause(logging.Filter):
    """Passes a warning once per cause and hour, and counts the suppressed ones.

    The cause is the `cause` of the record (`extra={"cause": ...}`), or else its whole text: files, epochs and
    evaluations report one problem with different names and numbers. Errors and lower levels
    always pass. Thread-safe.

    Args:
        clock: Seconds that never run backwards.
    """

    AGAIN_SECONDS = 3600.0
    MOST = 1000
    """Causes that are told apart; warnings beyond them pass, so that texts without end do not fill memory."""

    def __init__(self, clock: Callable[[], float] = concurrency.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = concurrency.Lock()  # guards what follows
        self._seen: dict[tuple[str, str], _Repeats] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        key = (record.name, str(getattr(record, "cause", None) or record.getMessage()))
        with self._lock:
            now, known = self._clock(), self._seen.get(key)
            if known is None:
                if len(self._seen) < self.MOST:
                    self._seen[key] = _Repeats(record.getMessage(), now)
                return True
            known.times, known.text = known.times + 1, record.getMessage()
            if now - known.written < self.AGAIN_SECONDS:
                return False
            known.written = now
            return True

    def repeats(self) -> list[str]:
        """Return how often each warning came that came more than once, with its last text; forget all."""
        with self._lock:
            found = [one for one in self._seen.values() if one.times > 1]
            self._seen.clear()
        return [f"{one.times:,} x {textwrap.shorten(one.text, 100, placeholder=' ...')}" for one in found]


@dataclass(slots=True)
class _Repeats:
    """A warning that may be repeated."""

    text: str
    """Text of the last one, with the newest counts."""
    written: float
    """When it last passed."""
    times: int = 1


class Doublings:
    """Says when a count is worth a line in the log: at first, then whenever it has doubled."""

    def __init__(self) -> None:
        self._next = 1

    def due(self, count: int) -> bool:
        if count < self._next:
            return False
        self._next = 2 * count
        return True


class JsonFormatter(logging.Formatter):
    """One JSON object per record, always on one line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        extra = {k: v for k, v in vars(record).items() if k not in _STANDARD_FIELDS}
        line = {**extra, **line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return jsonlib.dumps(line, default=str, ensure_ascii=False)


def _level_number(level: str | int) -> int:
    if isinstance(level, int):
        return level
    known = logging.getLevelNamesMapping()  # with those that other libraries have added
    if level.upper() not in known:
        raise ConfigError(f"cannot configure logging: there is no level {level!r}; choose one of {_NAMED}")
    return known[level.upper()]


def _handler(json: bool, stream: TextIO) -> logging.Handler:
    if json:
        handler: logging.Handler = logging.StreamHandler(stream)
        handler.setFormatter(JsonFormatter())
    elif stream.isatty():
        from monolith.observe.terminal import log_handler

        handler = log_handler(stream)
    else:
        handler = logging.StreamHandler(stream)
        handler.setFormatter(logging.Formatter(_PLAIN))
    return handler
