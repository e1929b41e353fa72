"""The demo's picture: AUC over event time, with what happened in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from monolith.errors import optional_package
from monolith_bench.examples.demo.rival import Point


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """What happened when, in seconds of event time since the beginning."""

    stopped: float
    """The batch-trained model stopped learning."""
    checkpoint: float
    """The position at which the second process resumed."""
    killed: float
    """The position of the first process when it was killed."""
    appeared: float
    """A new item was seen first."""
    held: float
    """Publishing was paused."""
    released: float
    """Publishing resumed."""


def draw_picture(path: Path, points: Sequence[Point], marks: Marks) -> None:
    """Draw to a PNG file.

    Raises:
        MissingExtraError: There is no matplotlib.
    """
    with optional_package("matplotlib", "plot", "the demo's picture"):
        from matplotlib.figure import Figure
    judged = [point for point in points if point.frozen is not None]
    figure = Figure(figsize=(10, 5.5), layout="constrained")
    axis = figure.subplots()
    seconds = [point.seconds for point in points]
    later = [point.seconds for point in judged]
    axis.plot(seconds, [point.best for point in points], color="#999999", lw=1, label="best possible")
    axis.plot(
        later,
        [point.best_frozen for point in judged if point.best_frozen is not None],
        color="#c77dba",
        lw=1,
        ls="--",
        label="perfect knowledge of when it stopped",
    )
    axis.plot(
        seconds,
        [point.online for point in points],
        color="#2a7f9e",
        lw=2.2,
        label="online: continues to learn",
    )
    axis.plot(
        later,
        [point.frozen for point in judged if point.frozen is not None],
        color="#a3337f",
        lw=2.2,
        label="batch-trained: stopped learning",
    )
    axis.axvline(marks.stopped, color="#a3337f", lw=1, ls=":")
    axis.axvline(marks.appeared, color="#2a7f9e", lw=1, ls=":")
    axis.axvspan(marks.checkpoint, marks.killed, color="#d1495b", alpha=0.18, lw=0)
    axis.axvline(marks.killed, color="#d1495b", lw=1.2)
    axis.axvline(marks.checkpoint, color="#3a8f4d", lw=1.2)
    axis.axvspan(marks.held, marks.released, color="#e0a030", alpha=0.22, lw=0)
    low, high = axis.get_ylim()
    for x, text, align, colour, line in (
        (marks.stopped, " a copy stops learning", "left", "#a3337f", 0),
        (marks.appeared, " a new item", "left", "#2a7f9e", 2),
        (marks.checkpoint, "resumes here ", "right", "#3a8f4d", 1),
        (marks.killed, " kill -9", "left", "#d1495b", 1),
        (marks.released, " wrong labels: publishing was held", "left", "#a87510", 0),
    ):
        axis.text(x, low + (0.02 + 0.05 * line) * (high - low), text, ha=align, color=colour, fontsize=9)
    axis.set_xlabel("event time, seconds")
    axis.set_ylabel("AUC, each example predicted before it is trained on")
    axis.set_title("A DeepFM on a live stream that drifts", loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)
