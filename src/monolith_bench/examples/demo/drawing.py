"""How the demo looks: a table that grows on a terminal, plain lines elsewhere, and what it came to."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table

from monolith.cli.doctor import size
from monolith_bench.examples.demo.ledger import Ledger, Resume
from monolith_bench.examples.demo.rival import Point
from monolith_bench.examples.demo.story import Claim
from monolith_bench.examples.tour import facts

WIDTH = 96


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class Screen:
    """Shows the demo while it runs: lines of numbers, and a note when something happens."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._table: Table | None = None
        self._points: list[Point] = []

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def line(self, points: Sequence[Point], ledger: Ledger) -> None:
        """Show what happened since the last line."""
        self._points += points
        cells = _cells(points, ledger)
        if self._live is None:
            named = "  ".join(f"{name} {text}" for name, text in cells.items() if text)
            self._console.print(named, highlight=False, soft_wrap=True)
            return
        if self._table is None:
            self._table = Table(box=box.SIMPLE_HEAD)
            for heading in cells:
                self._table.add_column(heading, justify="right", min_width=max(map(len, heading.split())))
        self._table.add_row(*cells.values())
        self._live.update(Group(self._table, _curves(self._points)), refresh=True)

    def note(self, text: str) -> None:
        """Say what just happened; on a terminal the lines before it are then drawn for good."""
        if self._table is not None:
            self._console.print(self._table)
            self._table = None
        self._console.print(text, highlight=False, soft_wrap=True)
        if self._live is not None:
            self._live.update(_curves(self._points), refresh=True)


def _cells(points: Sequence[Point], ledger: Ledger) -> dict[str, str]:
    """Return the numbers of a line by their names; AUCs are means over the windows since the last line."""
    last = points[-1]
    frozen = [point.frozen for point in points if point.frozen is not None]
    return {
        "event time": f"{last.seconds:.0f} s",
        "examples": f"{last.window.end:,}",
        "examples/s": f"{ledger.speed:,.0f}",
        "AUC online": f"{mean([point.online for point in points]):.3f}",
        "batch-trained": f"{mean(frozen):.3f}" if frozen else "",
        "best possible": f"{mean([point.best for point in points]):.3f}",
        "rows": f"{last.window.rows:,}",
    }


def _curves(points: Sequence[Point]) -> RenderableType:
    """Draw both AUCs, one below the other and at the same scale."""
    if len(points) < 2:
        return ""
    online: list[float | None] = [point.online for point in points]
    frozen = [point.frozen for point in points]
    known = [value for value in (*online, *frozen) if value is not None]
    scale = min(known), max(known)
    return facts(
        {
            "online": f"[cyan]{curve(online, *scale)}[/] {points[-1].online:.3f}",
            "batch-trained": f"[magenta]{curve(frozen, *scale)}[/] "
            + ("" if points[-1].frozen is None else f"{points[-1].frozen:.3f}"),
        }
    )


def curve(values: Sequence[float | None], low: float, high: float, *, width: int = 60) -> str:
    """Draw a curve in one line of text, blank where there is nothing."""
    drawn = ""
    many = min(width, len(values))
    for place in range(many):
        part = values[place * len(values) // many : (place + 1) * len(values) // many]
        known = [value for value in part if value is not None]
        level = (mean(known) - low) / ((high - low) or 1) if known else 0
        drawn += "▁▂▃▄▅▆▇█"[round(7 * level)] if known else " "
    return drawn


def intro(seconds: float, folder: str) -> str:
    return (
        f"A DeepFM learns from a stream of clicks as they happen, for {seconds:.0f} s, and publishes what "
        "it learns; a server follows. Users and items come and go, and what users want turns into something "
        "else. Every batch is predicted first and trained on afterwards. On the way a copy stops learning, "
        "an item appears that is new to the model, the training process is killed with -9 and resumes, and "
        "labels are wrong for a while.\n"
        f"All of it is kept in {folder}\n"
    )


def resumed_text(resume: Resume) -> str:
    """Say at which record a process resumed after the kill."""
    right = resume.next_record == resume.expected_record
    found = "the one after that step" if right else f"[red]not {resume.expected_record:,}[/]"
    return (
        f"[green]resumed[/] after {resume.seconds:.1f} s from step {resume.step:,}: "
        f"the next record is number {resume.next_record:,}, {found}"
    )


def compared_text(resume: Resume) -> str:
    """Say whether the second process did again what the first had done."""
    return (
        f"[green]compared[/]: of {resume.again:,} steps that both processes took, "
        f"{resume.same:,} have the same records and the same loss to the last bit"
    )


def summary(
    points: Sequence[Point],
    ledger: Ledger,
    resume: Resume,
    told: Sequence[Claim],
    *,
    checkpoint_bytes: int,
    good: bool,
) -> Panel:
    """Return what the demo came to.

    Args:
        points: Those that both models are compared on.
        told: What the answers of the server show.
    """
    judged = [point for point in points if point.frozen is not None]
    last = judged[-max(1, len(judged) // 5) :]
    scores = Table(box=box.SIMPLE_HEAD)
    for heading in ("AUC", "online", "batch-trained", "perfect then", "best possible"):
        scores.add_column(heading, justify="left" if heading == "AUC" else "right")
    for name, some in (
        ("since the copy stopped", judged),
        ("at the end", last),
    ):
        scores.add_row(
            name,
            f"[bold]{mean([point.online for point in some]):.3f}[/]",
            f"{mean([point.frozen for point in some if point.frozen is not None]):.3f}",
            f"{mean([point.best_frozen for point in some if point.best_frozen is not None]):.3f}",
            f"{mean([point.best for point in some]):.3f}",
        )
    newest = points[-1].window
    once = "each once" if ledger.gapless() else "[bold red]with gaps or repeats[/]"
    lines = {
        **{one.name: one.said if one.true else f"[bold red]no:[/] {one.said}" for one in told},
        "trained on": f"records 0 to {ledger.next_record - 1:,}, {once}",
        "speed": f"{ledger.speed:,.0f} examples/s over {ledger.seconds:.0f} s, repeated steps included",
        "rows": f"{newest.rows:,} in {size(newest.bytes)}",
        "checkpoint": f"{size(checkpoint_bytes)}, written while training continues",
        "resume": f"killed at record {resume.killed_record:,}; resumed at {resume.next_record:,}, "
        + ("exactly" if resume.exact else "[bold red]not exactly[/]"),
        "from kill to first step": f"{resume.seconds:.1f} s, of which most is Python's start",
    }
    grid = Group(scores, facts(lines))
    title = "[bold green]As promised[/]" if good else "[bold red]Not as promised[/]"
    return Panel(grid, title=title, title_align="left", padding=(0, 2), width=WIDTH)
