"""Lazy decay, caught up on: values of saved rows as they are after all steps, and not only after their own.

A row that decays lazily keeps the step of its last update, and a table that is read shows it decayed by the
steps since. Who reads rows out of a checkpoint, to export them, does the same here: the newest step of all
rows is that of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from monolith.table.config import TableConfig
from monolith.table.table import Rows
from monolith.table.update_rules import Floats, kept_after, last_steps


def decays_lazily(config: TableConfig) -> bool:
    """Whether rows of a table decay by steps that they are not in."""
    return any(segment.optimizer.decays_lazily for segment in config.segments)


def caught_up(config: TableConfig, saved: Iterable[Rows]) -> Callable[[Rows], Floats]:
    """Return what gives the values of rows after the newest step.

    Args:
        saved: All rows, with the state of this table, to find that step.
    """
    pieces = [piece for piece in _pieces(config) if config.segments[piece[0]].optimizer.decays_lazily]
    newest = 0
    for rows in saved:
        newest = max(newest, newest_step(config, rows))

    def values_of(rows: Rows) -> Floats:
        values = np.array(rows.values.numpy(), dtype=np.float32)
        for number, columns, state in pieces:
            segment = config.segments[number]
            seen = last_steps(rows.state.numpy()[:, state], segment.dim)
            missed = np.where(seen == 0, 0, newest - seen)
            decay = np.float32(segment.decay_rate) * np.float32(segment.optimizer.rule.weight_decay)  # type: ignore[attr-defined]
            steps, which = np.unique(missed, return_inverse=True)
            kept = np.array([kept_after(float(decay), int(one)) for one in steps], dtype=np.float32)
            values[:, columns] *= kept[which][:, None]
        return values

    return values_of


def newest_step(config: TableConfig, rows: Rows) -> int:
    """Return the step after the last of any of these rows, 0 where none was in one."""
    newest = 0
    for number, _, state in _pieces(config):
        segment = config.segments[number]
        if segment.optimizer.decays_lazily:
            newest = max(newest, int(last_steps(rows.state.numpy()[:, state], segment.dim).max(initial=0)))
    return newest


def _pieces(config: TableConfig) -> Iterable[tuple[int, slice, slice]]:
    """Yield each segment's number, and where its values and its state lie."""
    column = state = 0
    for number, segment in enumerate(config.segments):
        yield number, slice(column, column + segment.dim), slice(state, state + segment.state_dim)
        column, state = column + segment.dim, state + segment.state_dim
