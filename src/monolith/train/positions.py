"""Where the data goes on: one position, or one for each worker that reads a share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from monolith.data import Stream
from monolith.data.source import Position
from monolith.errors import RestoreError
from monolith.train.config import TrainConfig

WORKERS = "workers"
"""The key of positions that are one per worker."""


def joined_positions(positions: Sequence[Position]) -> Position:
    """Return one position for all workers; that of a single one is as if it were alone."""
    return positions[0] if len(positions) == 1 else {WORKERS: list(positions)}


def positions_of(position: Position) -> list[Position]:
    """Return the positions of all workers that saved one."""
    return list(position[WORKERS]) if set(position) == {WORKERS} else [position]


def order_of(config: TrainConfig) -> dict[str, Any] | None:
    """Return the settings that the order of the data follows from; None where the task alone says it."""
    if config.epochs is None:
        return None
    return {"train.seed": config.seed, "train.shuffle_buffer": config.shuffle_buffer}


@contextmanager
def same_order(saved: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> Iterator[None]:
    """Say which settings to put back where data cannot go on, since its order was another when it was saved.

    Args:
        saved, now: What `order_of` found. A source with an order of its own goes on whatever they are.

    Raises:
        RestoreError: It cannot go on.
    """
    try:
        yield
    except RestoreError as cause:
        changed = {name: value for name, value in (saved or {}).items() if (now or {}).get(name) != value}
        if not changed:
            raise
        was = " and ".join(f"{name} {value}" for name, value in changed.items())
        here = " and ".join(f"{name} {now[name]}" for name in changed) if now else "no train.epochs"
        raise RestoreError(
            f"cannot resume the data: the checkpoint was trained with {was}, from which the order of its "
            f"epochs follows, and this run has {here}. Set it back to {was} to go on with the record that "
            "comes next; or, to read the data from its start, start a new model_dir from this one with "
            "restore.dir and restore.restart_data."
        ) from cause


def split_position(
    position: Position, workers: int, data: Stream[Any], *, resumed: bool = False
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
        return data.redistribute(found, workers)
    except RestoreError as cause:
        raise RestoreError(
            f"cannot resume the data: the checkpoint was saved by {len(found)} workers, each with its own "
            f"position, and this run has {workers}: {cause}. Train with {len(found)} workers; or, to read "
            "the data from its start, start a new model_dir from this one with restore.dir and "
            "restore.restart_data."
        ) from cause
