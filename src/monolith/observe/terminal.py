"""What is drawn when a person is watching. Imported only then: rich takes a moment to load."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.logging import RichHandler
from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from monolith import concurrency
from monolith.observe.progress import Clock, Fraction, describe_amount, describe_part, describe_rate

ASK_EVERY = 0.1
"""Seconds between asking twice which part is done."""


def log_handler(stream: TextIO) -> logging.Handler:
    """A handler that colours levels and tracebacks on a terminal."""
    handler = RichHandler(console=Console(file=stream), show_path=False, rich_tracebacks=True)
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s", datefmt="[%X]"))
    return handler


def console_on(stream: TextIO) -> Console:
    """Return the console that logs go to, if that is this stream: a log line then appears above what is drawn
    live, and does not tear it."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, RichHandler) and handler.console.file is stream:
            return handler.console
    return Console(file=stream)


class Bar:
    """A live bar with the amount done, the rate and the time left."""

    def __init__(
        self,
        label: str,
        total: float | None,
        unit: str,
        stream: TextIO,
        *,
        clock: Clock,
        fraction: Fraction | None = None,
    ) -> None:
        self._clock = clock
        self._fraction = None if total is not None else fraction
        self._lock = concurrency.Lock()  # guards what follows
        self._done = 0.0
        self._began = self._asked = clock()
        self._rich = RichProgress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            _Amount(unit),
            _Rate(unit),
            TimeRemainingColumn(),
            console=console_on(stream),
            get_time=clock,
        )
        self._task = self._rich.add_task(label, total=total)

    def advance(self, amount: float = 1) -> None:
        if self._fraction is None:
            self._rich.advance(self._task, amount)
            return
        with self._lock:
            self._done += amount
            now = self._clock()
            if now - self._asked < ASK_EVERY:
                return
            self._asked = now
            self._rich.update(self._task, done=self._done, per_second=self._done / (now - self._began))
            if (part := self._fraction()) is not None:
                self._rich.update(self._task, completed=part, total=1.0)

    def __enter__(self) -> Self:
        self._rich.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rich.stop()


class LiveLine:
    """Facts about a running job, redrawn in place, under a bar if the total is known.

    Draws only when `show` is called: the caller knows how often the facts change.
    """

    def __init__(self, label: str, unit: str, stream: TextIO) -> None:
        self._label = label
        self._unit = unit
        self._live = Live(console=console_on(stream), auto_refresh=False)

    def show(
        self,
        facts: Mapping[str, str],
        done: float,
        total: float | None = None,
        part: float | None = None,
    ) -> None:
        """Draw these facts in place of the last ones.

        Args:
            part: The fraction that is done, if the total is unknown.
        """
        head = Table.grid(padding=(0, 1))
        cells: list[ProgressBar | Text] = [Text(self._label, style="bold")]
        if total is not None:
            cells.append(ProgressBar(total=total, completed=done, width=30))
        elif part is not None:
            cells.append(ProgressBar(total=1.0, completed=part, width=30))
        cells.append(Text(describe_amount(done, total, self._unit)))
        head.add_row(*cells)
        body = Text("  ")
        for number, (name, value) in enumerate(facts.items()):
            body.append(" · " if number else "", style="dim")
            body.append(f"{name} ", style="dim")
            body.append(value)
        self._live.update(Group(head, body), refresh=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()


class _Amount(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        done = task.fields.get("done")
        if done is None:
            return Text(describe_amount(task.completed, task.total, self._unit))
        part = "" if task.total is None else f" ({describe_part(task.completed)})"
        return Text(describe_amount(done, None, self._unit) + part)


class _Rate(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        speed = task.fields.get("per_second") or task.finished_speed or task.speed
        return Text("" if speed is None else describe_rate(speed, self._unit))
