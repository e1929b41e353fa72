"""Rows of a table as a chain of checkpoints comes to, whatever pieces they were written in.

Of each share of the ids the history is a list of dumps, one per checkpoint: the piece that
this share is in. So pieces of any number may follow each other, and a share that was
cleared takes nothing from the others. The shares are streams in the order of the hashes
of their ids, which are walked side by side, as `row_streams` walks the dumps of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from monolith.checkpoint.pieces import SavedTable, Share
from monolith.errors import RestoreError
from monolith.table import Rows
from monolith.table.dumps import kept_ids, select
from monolith.table.hashing import mix
from monolith.table.row_streams import HASHES, Beside, describe_dump, newest_rows
from monolith.table.shard_files import Description

History = Sequence[SavedTable]
"""A table in the checkpoints of a chain, oldest first."""


class _Block(NamedTuple):
    """Some rows, in the order of their hashes; never none."""

    hashes: NDArray[np.uint64]
    rows: Rows


def describe_table(history: History) -> Description:
    """Return what the newest dump of a table says of itself; of its pieces, the scales that grew furthest."""
    newest = history[-1]
    found = [describe_dump(basename) for basename in newest.basenames]
    for piece, one in enumerate(found):
        if one.layout != found[0].layout:
            raise RestoreError(
                f"{newest.called(piece)} has {one.layout}, {newest.called(0)} has {found[0].layout}: "
                "they are not of one checkpoint"
            )
    scales = tuple(max(each) for each in zip(*(one.scales for one in found), strict=True))
    return replace(found[0], scales=scales)


def table_rows(history: History, begin: int = 0, end: int = HASHES) -> Iterator[Rows]:
    """Yield the rows after the last checkpoint, in the order of their hashes, as `newest_rows` does.

    Where numbers of pieces differ along the chain, files are read several times.
    """
    for block in _blocks(history, begin, end):
        yield block.rows


def side_by_side(before: History, after: History) -> Iterator[Beside]:
    """Yield what a table holds in two chains, one range of hashes after another."""
    nobody = torch.empty(0, dtype=torch.int64)
    none = Rows(nobody, nobody, torch.empty(0, 0), torch.empty(0, 0))
    for old, new in _windows([_blocks(before, 0, HASHES), _blocks(after, 0, HASHES)]):
        if old is None or new is None:
            yield Beside(0 if old is None else len(old.rows), 0 if new is None else len(new.rows), none, none)
            continue
        _, at_old, at_new = np.intersect1d(old.hashes, new.hashes, assume_unique=True, return_indices=True)
        both = len(at_old)
        yield Beside(
            len(old.rows) - both, len(new.rows) - both, _picked(old.rows, at_old), _picked(new.rows, at_new)
        )


def _blocks(history: History, begin: int, end: int) -> Iterator[_Block]:
    total = math.lcm(*(saved.pieces for saved in history))
    streams = [_of_share(history, (number, total), begin, end) for number in range(total)]
    if total == 1:
        yield from streams[0]
        return
    for window in _windows(streams):
        there = [block for block in window if block is not None]
        if len(there) == 1:
            yield there[0]
            continue
        hashes = np.concatenate([block.hashes for block in there])
        order = np.argsort(hashes)
        yield _Block(hashes[order], _picked(_joined([block.rows for block in there]), order))


def _of_share(history: History, share: Share, begin: int, end: int) -> Iterator[_Block]:
    number, total = share
    in_share = kept_ids(share)
    assert in_share is not None
    steps = [saved.step(number % saved.pieces) for saved in history]
    mixed = any(saved.pieces != total for saved in history)
    for rows in newest_rows(steps, begin, end):
        mine = select(rows, in_share(rows.ids)) if mixed else rows
        if len(mine):
            yield _Block(mix(mine.ids.numpy()), mine)


def _windows(streams: Sequence[Iterator[_Block]]) -> Iterator[list[_Block | None]]:
    """Yield what each stream has in one range of hashes after another, as far as all are read."""
    heads = [next(stream, None) for stream in streams]
    while there := [head for head in heads if head is not None]:
        upto = min(int(head.hashes[-1]) for head in there)
        window: list[_Block | None] = []
        for number, head in enumerate(heads):
            at = 0 if head is None else int(np.searchsorted(head.hashes, np.uint64(upto), side="right"))
            if head is None or at == 0:
                window.append(None)
                continue
            window.append(_part(head, slice(0, at)))
            rest = slice(at, len(head.hashes))
            heads[number] = _part(head, rest) if at < len(head.hashes) else next(streams[number], None)
        yield window


def _part(block: _Block, part: slice) -> _Block:
    rows = block.rows
    return _Block(
        block.hashes[part],
        Rows(rows.ids[part], rows.event_times[part], rows.values[part], rows.state[part]),
    )


def _picked(rows: Rows, places: NDArray[np.int64]) -> Rows:
    at = torch.from_numpy(places)
    return Rows(rows.ids[at], rows.event_times[at], rows.values[at], rows.state[at])


def _joined(parts: Sequence[Rows]) -> Rows:
    return Rows(
        torch.cat([part.ids for part in parts]),
        torch.cat([part.event_times for part in parts]),
        torch.cat([part.values for part in parts]),
        torch.cat([part.state for part in parts]),
    )
