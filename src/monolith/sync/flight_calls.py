"""What is asked of a delta port over Flight, and how an answer carries frames."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from monolith.errors import (
    ConfigError,
    CorruptMessageError,
    LostStateError,
    OverloadedError,
    UnavailableError,
)
from monolith.sync.messages import BUCKETS, LogPlace
from monolith.wire.bulk import BulkMessages
from monolith.wire.flight import Service
from monolith.wire.messages import Bounds, Count, Name, Seconds, Text

SERVICE = Service(
    name="delta channel",
    peers="publishers and subscribers",
    failure=UnavailableError,
    told=(ConfigError, LostStateError, OverloadedError, UnavailableError),
    unreachable=UnavailableError,
    late=UnavailableError,
    token_hint=(
        " A run that was given none has one in MODEL_DIR/run_token: follow it with --token-file "
        "MODEL_DIR/run_token, or with --follow-token-file and what `monolith config token --role follow "
        "--model-dir MODEL_DIR` prints."
    ),
)

_ABOUT = b"monolith.delta"


@dataclass(frozen=True, slots=True)
class SharesBody:
    """Asks which shares of a model are published."""

    reader: Name
    model: Text


@dataclass(frozen=True, slots=True)
class LeaveBody:
    """Says that a reader asks no more; or only that it does not want the rest of a snapshot."""

    reader: Name
    stream: Text = ""


@dataclass(frozen=True, slots=True)
class DeltasBody:
    """Asks for what comes after a place."""

    reader: Name
    model: Text
    share: Count
    after: LogPlace | None
    state: int
    """The number of the publish state that the reader knows; -1: none."""
    wait: Seconds


@dataclass(frozen=True, slots=True)
class SnapshotBody:
    """Asks for a chunk of a snapshot."""

    reader: Name
    model: Text
    share: Count
    stream: Text
    """Names the snapshot; empty to begin one."""
    chunk: Count
    buckets: Annotated[list[Annotated[int, Bounds(0, BUCKETS - 1)]], Bounds(0, BUCKETS)] | None


@dataclass(frozen=True, slots=True)
class AnswerAbout:
    """Stands beside the frames of an answer."""

    behind: bool = False
    """The place that was asked for is not kept: take a snapshot."""
    stream: str = ""
    """Names the snapshot that goes on after this chunk; empty where this was the last."""


def pack_answer(wire: BulkMessages, about: AnswerAbout, frames: Sequence[bytes]) -> Any:
    """Return frames as the record batch that a `Fetch` answers with."""
    said = json.dumps({"behind": about.behind, "stream": about.stream})
    return wire.batch(b"".join(frames)).replace_schema_metadata({_ABOUT: said})


def unpack_answer(batch: Any) -> tuple[AnswerAbout, memoryview]:
    """Return what `pack_answer` made a batch of; the bytes are the caller's own.

    Raises:
        CorruptMessageError: It is something else.
    """
    try:
        said = json.loads((batch.schema.metadata or {})[_ABOUT])
        held = batch.column(0).buffers()[1]
        frames = np.empty(0, np.uint8) if held is None else np.frombuffer(held, np.uint8).copy()
        return AnswerAbout(bool(said["behind"]), str(said["stream"])), frames[: batch.num_rows].data
    except (KeyError, TypeError, ValueError, IndexError) as cause:
        raise CorruptMessageError("a delta channel was answered by something else") from cause
