"""Handing out: sources that give work to whoever asks, so that workers may come and go.

A queue of files and the data service know what each worker has. What one of them has not done, when it leaves
or is lost, is given back, and others get it. So a worker's position is of use to nobody but that worker: when
its work was given back there is none, and who comes later begins with nothing.

    with work ──position saved──► safe ──give_back(position)──► with nothing: the rest is anybody's

Whoever leads a run gives back, since it knows what was saved. A worker lets go of nothing by itself.

Partitions of a topic are in nobody's hands but the workers'. Whoever leads deals them out: everybody stands
still, says where it stands, and goes on with what it is dealt then.

    one has all ──somebody comes, leaves or is lost──► deal(positions, workers) ──► each has a part
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from monolith.data.source import Position


class HandsOut(Protocol):
    """A source, as `handing` finds it, whose work may go from one worker to others while they read."""

    def give_back(self, position: Position) -> Position:
        """Let others have what a worker has not done; whoever was that worker has lost it from now on.

        From any thread, while this source is read.

        Args:
            position: Of any worker, saved: what comes before it is done.

        Returns:
            Where another worker in its place begins: with nothing.
        """

    def entrust(self) -> None:
        """Keep what this worker has when it is closed: somebody else gives it back, or it is fetched by a
        worker of its name."""

    def interrupt(self) -> None:
        """Ask for no more work, and wait for none: whoever reads comes to an end. From any thread."""


@runtime_checkable
class DealsOut(HandsOut, Protocol):
    """A source that hands out nothing by itself: its parts are dealt by whoever leads.

    From `entrust` on it reads nothing but what the position names to which it is restored; `interrupt` holds
    until it is restored again.
    """

    def collect(self, positions: Sequence[Position]) -> Position:
        """Return everything there is left to read, as the position of one worker who has all of it.

        Args:
            positions: Saved together, of all workers there were; none where all data begins.

        Raises:
            RestoreError: They are of other data, or something is missing.
        """

    def deal(self, positions: Sequence[Position], workers: int) -> list[Position]:
        """Return what is left at these positions as those of so many workers, one of whom may have nothing.

        From any thread, while this source is read: it stays where it is.
        """


def handing(source: object) -> HandsOut | None:
    """Return what gives back the work of a source, or of a stage on top of one that holds nothing back; None
    where a share belongs to its worker."""
    found: HandsOut | None = getattr(source, "hands_out", None)
    return found
