"""What is said about publishing from one process to another: orders, where shares stand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from monolith.errors import RequestError
from monolith.wire.messages import Bounds, Count, Name, Seconds, read_message

Reason = Annotated[str, Bounds(0, 4096)]
"""In words for a person."""
Action = Literal["status", "hold", "resume", "rollback", "release"]
LONGEST_VERSION = 255


@dataclass(frozen=True, slots=True)
class PublishOrder:
    """What a holder of rows is to do with its publishing; it answers with where it stands then."""

    action: Action
    reason: Reason = ""
    """Why it is to be held."""
    version: Name | None = None
    """The exported version that servers go back to."""
    by_guard: bool = False
    """Whether a guard holds it, and not a person."""
    first_bad_step: Count | None = None
    """The first step whose rows are not trusted; None if a share decides by what it has published."""


def person_order(action: str, *, reason: str = "", version: str = "") -> PublishOrder:
    """Return what somebody asks for from outside, if it makes sense.

    Raises:
        RequestError: It does not; says why.
    """
    if action not in get_args(Action):
        raise RequestError(f"publish: {action[:60]!r} is none of {', '.join(get_args(Action))}")
    body = {"action": action, "reason": reason, "version": version or None}
    return sound(read_message(PublishOrder, body))


def sound(order: PublishOrder) -> PublishOrder:
    """Return an order that came from elsewhere, if it makes sense.

    Raises:
        RequestError: It does not; says why.
    """
    version = order.version
    if (order.action == "rollback") != (version is not None):
        raise RequestError("publish: a rollback, and nothing else, names the exported version to go back to")
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
class ShareStanding:
    """Where the publishing of one share stands."""

    share: Count
    shares: Count
    held: bool
    reason: Reason
    since: Seconds
    """Unix seconds since when it is held, or goes on."""
    version: Name | None
    """The exported version that servers were taken back to."""
    epoch: Annotated[str, Bounds(0, 1024)]
    sequence: Count
    """Of the newest delta in that epoch."""
    step: Count
    """That the newest delta has learned up to."""
    watermark: Count
    """Event time that nearly all events trained on had reached."""
    published_at: Seconds
    """Unix seconds of the newest delta; 0 before the first."""
    deltas: Count
    rows: Count
    """Published so far, removed ones included."""
    bytes: Count
    errors: Count
    """Deltas that could not be handed over, and were tried again."""
    resyncs: Count
    """Epochs after the first: each has subscribers take a snapshot, or the difference to it."""
    by_guard: bool = False
    """Whether a guard holds it, and not a person."""
    recovered: bool = False
    """Whether what the guard held back is within bounds again."""
    first_bad_step: Count | None = None
    """While publishing is paused, the first step whose rows are not trusted."""
    trouble: Reason = ""
    """Why deltas cannot be handed over now; they are kept and retried."""


@dataclass(frozen=True, slots=True)
class PublishedShares:
    """Where the publishing of a run stands."""

    shares: tuple[ShareStanding, ...]
    """In order; empty where the run publishes nothing."""


@dataclass(frozen=True, slots=True)
class HoldersTold:
    """Tells a server, again and again, how far the run is: what it does not see by itself."""

    run: Name
    step: Count
    watermark: Count


@dataclass(frozen=True, slots=True)
class WeightsTold:
    """Tells the server of share 0 all dense weights, whose bytes come beside it, in its model's order."""

    run: Name
    weights: Count
    """How many there are."""
    incarnation: Name | None = None
    """Names what the caller takes the server to hold."""
