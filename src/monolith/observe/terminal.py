"""What is drawn when a person is watching. Imported only then: rich takes a moment to load."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from monolith.observe.progress import describe_amount, describe_rate


def log_handler(stream: TextIO) -> logging.Handler:
    """A handler that colours levels and tracebacks on a terminal."""
    handler = RichHandler(console=Console(file=stream), show_path=False, rich_tracebacks=True)
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s", datefmt="[%X]"))
    return handler


class Bar:
    """A live bar with the amount done, the rate and the time left."""

    def __init__(
        self, label: str, total: float | None, unit: str, stream: TextIO, clock: Callable[[], float]
    ) -> None:
        self._rich = RichProgress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            _Amount(unit),
            _Rate(unit),
            TimeRemainingColumn(),
            console=Console(file=stream),
            get_time=clock,
        )
        self._task = self._rich.add_task(label, total=total)

    def advance(self, amount: float = 1) -> None:
        self._rich.advance(self._task, amount)

    def __enter__(self) -> Self:
        self._rich.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rich.stop()


class _Amount(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        return Text(describe_amount(task.completed, task.total, self._unit))


class _Rate(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else describe_rate(speed, self._unit))
