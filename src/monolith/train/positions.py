"""Where the data goes on: one position, or one for each worker that reads a share."""

from __future__ import annotations

from collections.abc import Sequence

from monolith.data.redistribution import redistributed
from monolith.data.source import Position
from monolith.errors import RestoreError

WORKERS = "workers"
"""The key of positions that are one per worker."""


def joined_positions(positions: Sequence[Position]) -> Position:
    """Return one position for all workers; that of a single one is as if it were alone."""
    return positions[0] if len(positions) == 1 else {WORKERS: list(positions)}


def positions_of(position: Position) -> list[Position]:
    """Return the positions of all workers that saved one."""
    return list(position[WORKERS]) if set(position) == {WORKERS} else [position]


def split_position(
    position: Position, workers: int, data: object, *, resumed: bool = False
) -> list[Position]:
    """Return the position of each worker.

    Args:
        data: The stream of one of them. It redistributes positions of another number of workers, and is to
            be restored afterwards.
        resumed: Whether the others read on: what they have cannot be redistributed.

    Raises:
        RestoreError: They are of another number of workers, and the data cannot be redistributed.
    """
    found = positions_of(position)
    if len(found) == workers:
        return found
    if resumed:
        raise RestoreError(
            f"cannot come back to a run of {workers} workers that goes on: nothing was saved since it began "
            f"from the checkpoint of {len(found)}, whose positions were redistributed then. Restart all "
            "of its workers together."
        )
    try:
        return redistributed(data, found, workers)
    except RestoreError as cause:
        raise RestoreError(
            f"cannot resume the data: the checkpoint was saved by {len(found)} workers, each with its own "
            f"position, and this run has {workers}: {cause}. Train with {len(found)} workers; or, to read "
            "the data from its start, start a new model_dir from this one with restore.dir and "
            "restore.restart_data."
        ) from cause
