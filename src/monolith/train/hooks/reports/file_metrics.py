"""Messages of a training run in files, by day, for whoever reads them tomorrow.

    <base>/<model>/<date>/worker_<i>/part_000000.txt

The date is that of the request, in UTC. A line is `req_time;gid;uid;<json predict>;<json label>`.
Lines are written in batches, and a part that is full is followed by the next; a run that
goes on begins a new part beside those it finds.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from monolith.errors import ConfigError
from monolith.filesystem.paths import is_url
from monolith.train.hook import Hook, Run
from monolith.train.hooks.reports.metric_sinks import MessageCounts, MessageQueue

_log = logging.getLogger(__name__)

DEFAULT_BASE = "deep_insight"
_PART = re.compile(r"part_(\d{6,})\.txt")

Layout = Callable[[str], tuple[str, str]]
"""Turns a message into the day it belongs to and the line to write; any exception marks it as bad."""


def insight_line(message: str) -> tuple[str, str]:
    """Return the day and the line of a deep-insight message, of either version."""
    found = json.loads(message)
    req_time = int(found["req_time"])
    if "targets" in found:
        preds = dict(zip(found["targets"], found["preds"], strict=True))
        labels = dict(zip(found["targets"], found["labels"], strict=True))
    else:
        preds, labels = {found["target"]: found["pred"]}, {found["target"]: found["label"]}
    gid = found.get("extra_int", {}).get("gid", "")
    day = datetime.fromtimestamp(req_time, UTC).strftime("%Y%m%d")
    return day, f"{req_time};{gid};{found['uid']};{json.dumps(preds)};{json.dumps(labels)}"


@dataclass(slots=True)
class _Day:
    """A day that is being written to."""

    folder: Path
    part: int
    in_part: int = 0
    used_at: float = 0.0
    lines: list[str] = field(default_factory=list)


class DayFiles:
    """Appends lines to the files of their days. One thread uses it.

    No file is held open between batches, so that a kill loses at most the batch in memory.

    Args:
        clock: Seconds that never run backwards.
    """

    def __init__(
        self,
        base: str,
        model: str,
        worker: int,
        *,
        batch_lines: int,
        part_lines: int,
        clock: Callable[[], float],
    ) -> None:
        if batch_lines < 1 or part_lines < 1:
            raise ConfigError(
                "file metrics: batch_lines and part_lines must be at least 1, "
                f"got {batch_lines} and {part_lines}"
            )
        if is_url(base):
            raise ConfigError(f"file metrics: appending to files needs a local folder; got {base!r}")
        if not model or "/" in model or model in (".", ".."):
            raise ConfigError(f"file metrics: {model!r} is not a valid folder name")
        self._root = Path(base) / model
        self._worker = worker
        self._batch = batch_lines
        self._most = part_lines
        self._clock = clock
        self._days: dict[str, _Day] = {}
        self.written = 0
        self.lost = 0
        """Lines that a disk would not take."""

    def add(self, day: str, line: str) -> None:
        """Append a line, which is on disk when its batch is full."""
        if "\n" in line:
            raise ConfigError("file metrics: a line has a line break in it")
        entry = self._days.get(day) or self._open(day)
        entry.used_at = self._clock()
        entry.lines.append(line)
        if len(entry.lines) >= self._batch or entry.in_part + len(entry.lines) >= self._most:
            self._write(entry)

    def flush(self) -> None:
        """Write all lines, of full batches or not."""
        for entry in self._days.values():
            self._write(entry)

    def close_idle(self, idle: timedelta) -> None:
        """Write all lines, and forget days that got none for this long."""
        self.flush()
        limit = self._clock() - idle.total_seconds()
        self._days = {day: entry for day, entry in self._days.items() if entry.used_at > limit}

    @property
    def days(self) -> list[str]:
        """Those being written to."""
        return sorted(self._days)

    def _open(self, day: str) -> _Day:
        folder = self._root / day / f"worker_{self._worker}"
        names = (path.name for path in folder.iterdir()) if folder.is_dir() else iter(())
        found = [int(match[1]) for name in names if (match := _PART.fullmatch(name))]
        self._days[day] = _Day(folder, max(found, default=-1) + 1)
        return self._days[day]

    def _write(self, entry: _Day) -> None:
        lines, entry.lines = entry.lines, []
        if not lines:
            return
        try:
            entry.folder.mkdir(parents=True, exist_ok=True)
            with (entry.folder / f"part_{entry.part:06d}.txt").open("a", encoding="utf-8") as file:
                file.writelines(line + "\n" for line in lines)
        except OSError as error:
            if not self.lost:  # the queue behind this must not fill up, so these lines are gone
                _log.error("file metrics: cannot write to %s: %s", entry.folder, error)
            self.lost += len(lines)
            return
        self.written += len(lines)
        entry.in_part += len(lines)
        if entry.in_part >= self._most:
            entry.part, entry.in_part = entry.part + 1, 0


class FileMetricHook(Hook):
    """Writes messages to files of their day while a run lasts, from a thread of its own.

    A message that cannot be laid out as a line is counted as failed and stops nobody.

    Args:
        layout: Of messages; by default that of deep insight.
        idle: How long a day may go without a line before it is forgotten.
        sweep: How often lines of unfinished batches are written and idle days are looked for.
        clock: Seconds that never run backwards.
    """

    def __init__(
        self,
        *,
        base: str = DEFAULT_BASE,
        model_name: str,
        worker: int = 0,
        batch_lines: int = 1024,
        part_lines: int = 1_000_000,
        layout: Layout = insight_line,
        idle: timedelta = timedelta(hours=24),
        sweep: timedelta = timedelta(seconds=600),
        capacity: int = 100_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = DayFiles(
            base, model_name, worker, batch_lines=batch_lines, part_lines=part_lines, clock=clock
        )
        self._layout = layout
        self._queue = MessageQueue(
            "file-metrics",
            self._handle,
            capacity=capacity,
            tick=lambda: self._files.close_idle(idle),
            tick_secs=sweep.total_seconds(),
            clock=clock,
        )

    @property
    def counts(self) -> MessageCounts:
        """What became of the messages; those in an unfinished batch are in `total` only."""
        handled = self._queue.counts
        return MessageCounts(
            total=handled.total,
            success=self._files.written,
            failed=handled.failed + self._files.lost,
            dropped=handled.dropped,
        )

    def put(self, messages: Sequence[str]) -> None:
        self._queue.put(messages)

    def begin(self, run: Run) -> None:  # noqa: ARG002
        self._queue.start()

    def end(self, run: Run) -> None:  # noqa: ARG002
        self.close()

    def close(self) -> None:
        self._queue.finish()
        self._files.flush()

    def _handle(self, message: str) -> bool:
        self._files.add(*self._layout(message))
        return False
