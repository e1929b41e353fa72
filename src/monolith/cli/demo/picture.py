"""The demo's picture: AUC over event time, with the kill in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from monolith.cli.demo.rival import Point
from monolith.errors import MissingExtraError


def draw_picture(
    path: Path, points: Sequence[Point], *, stopped: float, checkpoint: float, killed: float
) -> None:
    """Draw to a PNG file.

    Args:
        stopped: When the batch-trained model stopped learning, in hours of event time; so are the others.
        checkpoint: Where the second process went on.
        killed: Where the first had been.

    Raises:
        MissingExtraError: There is no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as cause:
        raise MissingExtraError("matplotlib", "plot", "the demo's picture") from cause
    judged = [point for point in points if point.frozen is not None]
    figure = Figure(figsize=(10, 5.5), layout="constrained")
    axis = figure.subplots()
    hours = [point.hours for point in points]
    later = [point.hours for point in judged]
    axis.plot(hours, [point.best for point in points], color="#999999", lw=1, label="best possible")
    axis.plot(
        later,
        [point.best_frozen for point in judged if point.best_frozen is not None],
        color="#c77dba",
        lw=1,
        ls="--",
        label="perfect knowledge of when it stopped",
    )
    axis.plot(
        hours, [point.online for point in points], color="#2a7f9e", lw=2.2, label="online: goes on learning"
    )
    axis.plot(
        later,
        [point.frozen for point in judged if point.frozen is not None],
        color="#a3337f",
        lw=2.2,
        label="batch-trained: stopped learning",
    )
    axis.axvline(stopped, color="#a3337f", lw=1, ls=":")
    axis.axvspan(checkpoint, killed, color="#d1495b", alpha=0.18, lw=0)
    axis.axvline(killed, color="#d1495b", lw=1.2)
    axis.axvline(checkpoint, color="#3a8f4d", lw=1.2)
    low, high = axis.get_ylim()
    for x, text, align, colour in (
        (stopped, "a copy stops learning ", "right", "#a3337f"),
        (checkpoint, "resumes here ", "right", "#3a8f4d"),
        (killed, " kill -9", "left", "#d1495b"),
    ):
        axis.text(x, low + 0.02 * (high - low), text, ha=align, color=colour, fontsize=9)
    axis.set_xlabel("event time, hours")
    axis.set_ylabel("AUC, each example predicted before it is trained on")
    axis.set_title("A DeepFM on a stream that drifts", loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="center right", frameon=False)
    figure.savefig(path, dpi=120)
