"""A table in a chain of checkpoints: its dumps, as `row_streams` reads them, and what the newest says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from monolith.checkpoint.shares import SavedTable
from monolith.errors import RestoreError
from monolith.table.row_streams import History, describe_dump
from monolith.table.shard_files import Description

SavedHistory = Sequence[SavedTable]
"""A table in the checkpoints of a chain, oldest first."""


def dumps_of(history: SavedHistory) -> History:
    """Return the dumps of a table, of each checkpoint those of all shares."""
    return [[saved.step(share) for share in range(saved.shares)] for saved in history]


def describe_table(history: SavedHistory) -> Description:
    """Return what the newest dump of a table says of itself; of its shares, the scales that grew furthest."""
    newest = history[-1]
    found = [describe_dump(basename) for basename in newest.basenames]
    for share, one in enumerate(found):
        if one.layout != found[0].layout:
            raise RestoreError(
                f"{newest.called(share)} has {one.layout}, {newest.called(0)} has {found[0].layout}: "
                "they are not of one checkpoint"
            )
    scales = tuple(max(each) for each in zip(*(one.scales for one in found), strict=True))
    return replace(found[0], scales=scales)
