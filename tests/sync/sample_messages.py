"""Messages to put through channels, and how to tell whether two are the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from monolith.checkpoint.saved_tables import IdShard
from monolith.sync import Delta, LearnedUpTo, LogPosition, Message, SnapshotBegin, SnapshotEnd, SnapshotRows
from monolith.table import Rows


def make_rows(ids: Sequence[int], *, dim: int = 2, state_dim: int = 0, value: float = 1.0) -> Rows:
    """Rows whose values follow from their ids and `value`."""
    found = torch.tensor(list(ids), dtype=torch.int64)
    values = (found[:, None] % 1000).float() + torch.arange(dim) + value
    state = (found[:, None] % 10).float() + torch.arange(state_dim)
    return Rows(found, torch.full_like(found, 1_700_000_000), values, state)


def make_delta(
    sequence: int,
    ids: Sequence[int] = (1, 2),
    *,
    epoch: str = "e1",
    shard: IdShard = (0, 1),
    removed: Sequence[int] = (),
    dense: Mapping[str, Tensor] | None = None,
    value: float = 1.0,
) -> Delta:
    return Delta(
        "run",
        shard,
        LogPosition(epoch, sequence),
        LearnedUpTo(step=sequence),
        {"item": make_rows(ids, value=value)},
        {"item": torch.tensor(list(removed), dtype=torch.int64)} if removed else {},
        dense,
    )


def make_snapshot(position: LogPosition, ids: Sequence[int], *, shard: IdShard = (0, 1)) -> list[Message]:
    """All messages of a snapshot of one chunk."""
    return [
        SnapshotBegin("run", shard, position, LearnedUpTo(step=position.sequence)),
        SnapshotRows("item", make_rows(ids)),
        SnapshotEnd(position, position),
    ]


def same(one: Any, other: Any) -> bool:
    """Whether two messages, or parts of them, say the same, bit for bit."""
    if isinstance(one, Tensor):
        if not isinstance(other, Tensor) or one.dtype != other.dtype or one.shape != other.shape:
            return False
        plain, also = one.contiguous().reshape(-1), other.contiguous().reshape(-1)
        return one.numel() == 0 or bool(torch.equal(plain.view(torch.uint8), also.view(torch.uint8)))
    if is_dataclass(one):
        return type(one) is type(other) and all(
            same(getattr(one, field.name), getattr(other, field.name)) for field in fields(one)
        )
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return bool(one == other)
