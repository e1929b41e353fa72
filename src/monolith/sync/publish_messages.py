"""Messages about publishing between processes: orders, and the status of each shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from monolith.errors import RequestError
from monolith.wire.messages import Bounds, Count, Name, Seconds, read_message

Reason = Annotated[str, Bounds(0, 4096)]
"""A sentence for the operator."""
Action = Literal["status", "hold", "resume", "rollback", "release"]
LONGEST_VERSION = 255


@dataclass(frozen=True, slots=True)
class PublishOrder:
    """An order to a process that publishes rows; the process answers with its status."""

    action: Action
    reason: Reason = ""
    """Why it is to be paused."""
    version: Name | None = None
    """The exported version that servers roll back to."""
    by_guard: bool = False
    """Whether a guard paused it, and not an operator."""
    first_bad_step: Count | None = None
    """The first step whose rows are not trusted; None if a shard decides by its published step."""


def operator_order(action: str, *, reason: str = "", version: str = "") -> PublishOrder:
    """Return an operator's order, checked.

    Raises:
        RequestError: The order makes no sense; the message says why.
    """
    if action not in get_args(Action):
        raise RequestError(f"publish: {action[:60]!r} is none of {', '.join(get_args(Action))}")
    body = {"action": action, "reason": reason, "version": version or None}
    return checked_order(read_message(PublishOrder, body))


def checked_order(order: PublishOrder) -> PublishOrder:
    """Return an order from another process, checked.

    Raises:
        RequestError: The order makes no sense; the message says why.
    """
    version = order.version
    if (order.action == "rollback") != (version is not None):
        raise RequestError(
            "publish: a rollback, and nothing else, names the exported version to roll back to"
        )
    if version is not None and not _is_version(version):
        raise RequestError(
            f"publish: {version[:60]!r} is no exported version: those are names of folders, such as 1200"
        )
    return order


def _is_version(text: str) -> bool:
    """Whether this may be the name of one folder, and of nothing above it."""
    plain = all(letter.isascii() and (letter.isalnum() or letter in "._-") for letter in text)
    return plain and len(text) <= LONGEST_VERSION and not text.startswith(".")


@dataclass(frozen=True, slots=True)
class ShardPublishStatus:
    """The publishing status of one shard."""

    share: Count
    shares: Count
    held: bool
    reason: Reason
    since: Seconds
    """Unix seconds since when it is paused, or publishing."""
    version: Name | None
    """The exported version that servers were rolled back to."""
    epoch: Annotated[str, Bounds(0, 1024)]
    sequence: Count
    """The number of the newest delta in that epoch."""
    step: Count
    """The step up to which the newest delta has learned."""
    watermark: Count
    """Event time that nearly all events trained on had reached."""
    published_at: Seconds
    """Unix seconds of the newest delta; 0 before the first."""
    deltas: Count
    rows: Count
    """Published so far, removed ones included."""
    bytes: Count
    errors: Count
    """Failed attempts to write a delta; each is retried."""
    resyncs: Count
    """Epochs after the first: in each, subscribers fetch a snapshot or the difference to it."""
    by_guard: bool = False
    """Whether a guard paused it, and not an operator."""
    recovered: bool = False
    """Whether the metrics for which the guard paused are within bounds again."""
    first_bad_step: Count | None = None
    """While publishing is paused, the first step whose rows are not trusted."""
    trouble: Reason = ""
    """Why deltas cannot be written now; they are retried."""


@dataclass(frozen=True, slots=True)
class PublishStatus:
    """The publishing status of all shards of a run."""

    shares: tuple[ShardPublishStatus, ...]
    """In order; empty if the run publishes nothing."""


@dataclass(frozen=True, slots=True)
class UnpublishedShard:
    """A shard whose last changes are not published at the end of a run."""

    share: Count
    shares: Count
    reason: Reason
    step: Count = 0
    """The step up to which the newest delta has learned."""
    progress: Count = 0
    """A number that grows as long as the channel works on them without a failure."""
    by_readers: bool = False
    """Whether the channel has them, and readers have not fetched them: no reason for the run to fail."""


@dataclass(frozen=True, slots=True)
class Flushed:
    """Answers the order to publish all remaining changes."""

    unpublished: tuple[UnpublishedShard, ...] = ()
    """Shards that could not; the order is repeated."""


@dataclass(frozen=True, slots=True)
class PublishProgress:
    """Tells a parameter server, at intervals, the step and watermark of the run, which it cannot see
    itself."""

    run: Name
    step: Count
    watermark: Count


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """Sends all dense weights to the server of shard 0, whose bytes follow it, in the order of its model."""

    run: Name
    weights: Count
    """How many there are."""
    incarnation: Name | None = None
    """The incarnation of the server that the caller expects."""
