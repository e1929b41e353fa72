"""What ranks say to each other: frozen dataclasses, written and read at the border by `wire/bodies.py`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

import torch

from monolith.store.rank_groups import Collective
from monolith.wire.messages import Bounds, Count, Json, Name, Text, read_message, write_message

W = TypeVar("W")


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What one rank says between two steps. Most of the time, nothing."""

    stop: Text | None = None
    """Why this rank ends."""
    interrupted: bool = False
    """Whether it does so with more to do."""
    halt: Count = 0
    """Of rank 0: everybody stands still, for the so manieth time; 0 for nobody."""
    saved: Count = 0
    """Of rank 0: the halt whose moment is on disk by now."""
    look: Count = 0
    """Of rank 0, while everybody stands still: it looks rows up in this store, from 1, and they answer; 0 for
    none."""
    back: bool = False
    """Of rank 0, as it lets everybody go: an earlier checkpoint was restored, and they go on from it."""
    over: bool = False
    """Of rank 0: all is saved, and everybody may leave."""


NOTHING = Word()

_CutName = Annotated[str, Bounds(1, 64)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRank:
    """Has a rank hold its tables fast as they are now."""

    cut: _CutName


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseRankCut:
    cut: _CutName
    saved: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRankCut:
    cut: _CutName
    prefix: Name
    full: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRank:
    """Has a rank restore its share of the tables from a chain of checkpoints: prefix and entry of each."""

    chain: tuple[tuple[Name, dict[str, Json]], ...]
    optimizer_state: Literal["keep", "reset", "auto"]
    strict: bool
    changes: Json = None
    """How the model differs from that of the checkpoint, where it may."""


def say_to_all(
    collective: Collective,
    kind: type[W],
    word: W | None,
    waiting: Callable[[], None] | None = None,
) -> Sequence[W | None]:
    """Return what all ranks say, in order; None of one that says nothing. If nobody does, it is one call.

    Args:
        waiting: Called every second for as long as somebody has not come.
    """
    said = b"" if word is None else json.dumps(write_message(word)).encode()
    lengths = collective.all_gather(torch.tensor([len(said)]), waiting).flatten().tolist()
    if not any(lengths):
        return [None] * collective.size
    padded = torch.frombuffer(bytearray(said.ljust(max(lengths), b" ")), dtype=torch.uint8)
    texts = [one.numpy().tobytes().strip() for one in collective.all_gather(padded)]
    return [read_message(kind, json.loads(text)) if text else None for text in texts]


def hear_from_first(collective: Collective, data: bytes) -> bytes:
    """Return the bytes that rank 0 gives, on every rank."""
    length = int(collective.broadcast(torch.tensor([len(data)]))[0])
    given = bytearray(data if len(data) == length else bytes(length)) or bytearray(1)
    sent = torch.frombuffer(given, dtype=torch.uint8)
    return collective.broadcast(sent).numpy().tobytes()[:length]
