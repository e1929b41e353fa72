"""What an entry and a serving server say to each other.

Before an entry asks a server for rows it says `hello` with the version that it serves, and is told whose rows
these are; so it never reads those of another model, version or shard. Lookups then go over a stream, in the
messages of `monolith.store.row_requests`, which name the version again. The header of each answer ends with
how new its rows are: a server follows a trainer on its own, and only it knows which rows it has read.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from monolith import errors
from monolith.errors import ClusterError, DeadlineExceededError, UnavailableError
from monolith.serve.rows import UNKNOWN, RowsClaim
from monolith.store.row_requests import ANSWER_BYTES
from monolith.wire.messages import Count, Name, Text
from monolith.wire.transport import Service

SERVICE = Service(
    name="serving server",
    peers="serving servers and entries",
    failure=ClusterError,
    told=(
        errors.ClusterError,
        errors.ConfigError,
        errors.FileMissingError,
        errors.FilesystemError,
        errors.LostStateError,
        errors.TableArgumentError,
        errors.UnavailableError,
    ),
    unreachable=UnavailableError,
    late=DeadlineExceededError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardHello:
    """An entry greets a server."""

    version: Name
    """What it is going to ask for; a server that has it opens it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardAbout:
    """One version of one shard."""

    model: Name
    version: Name
    digest: Text
    shard: Count
    shards: Count
    tables: dict[str, Count]
    """Table to the width of its rows."""
    rows: Count
    bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStatus:
    """A serving server, for people and probes. That it answers says that it is live."""

    ready: bool
    """Whether it may be sent requests: its newest version is open, and it is not ending."""
    shard: Count
    replica: Count
    lookups: Count
    versions: list[ShardAbout]
    withheld: dict[str, Text] = field(default_factory=dict)
    """Versions that are not served since their rows are not trusted, and why."""
    following: Text = ""
    """A warning for the operator about the followed trainer; empty if all is well."""


_TIMES = ("event_at", "read_at", "trained_at", "published_at", "received_at", "applied_at")
_CLAIM = struct.Struct("<3q8dH")
"""Step, newest step or -1, watermark, as of, difference of clocks, times, and the length of the text that
follows: why nothing is known."""
_MOST_TEXT = 1000


def pack_claim(claim: RowsClaim) -> bytes:
    """Return how new the rows of an answer are, for the end of its header."""
    why = claim.unknown.encode()[:_MOST_TEXT]
    newest = -1 if claim.newest_step is None else claim.newest_step
    times = (claim.times.get(name, 0.0) for name in _TIMES)
    return (
        _CLAIM.pack(
            claim.step, newest, claim.watermark, claim.as_of, claim.clock_differs_by, *times, len(why)
        )
        + why
    )


def read_claim(header: bytes) -> RowsClaim:
    """Return how new the rows of an answer are; a server of an earlier release does not say."""
    if len(header) < ANSWER_BYTES + _CLAIM.size:
        return UNKNOWN
    step, newest, watermark, as_of, differs, *times, length = _CLAIM.unpack_from(header, ANSWER_BYTES)
    begin = ANSWER_BYTES + _CLAIM.size
    return RowsClaim(
        step,
        None if newest < 0 else newest,
        as_of,
        watermark,
        dict(zip(_TIMES, times, strict=True)),
        clock_differs_by=differs,
        unknown=bytes(header[begin : begin + length]).decode(errors="replace"),
    )


def shard_part(shard: int) -> str:
    """Return the name of a shard: that of its folder, and how an answer names one that is missing."""
    return f"ps_{shard}"


def shard_role(model: str, shard: int) -> str:
    """Return the role under which the replicas of a shard are registered, each with its number."""
    return f"{model}:{shard_part(shard)}"


def misfit(found: ShardAbout, wanted: Mapping[str, object]) -> str | None:
    """Return what a server says of itself that is not as wanted, by the fields of `ShardAbout`."""
    for name, value in wanted.items():
        if (has := getattr(found, name)) != value:
            return f"it has {name} {has!r}, where the entry has {value!r}"
    return None
