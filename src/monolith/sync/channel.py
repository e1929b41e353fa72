"""The delta channel: a log of each share's changes that subscribers read from where they are.

A publisher appends; whoever follows asks for what comes after a place. What is no longer kept, or is of
another epoch, is answered by a snapshot and the deltas after it. Nobody who reads slowly holds a publisher
up: what is kept is bounded in bytes. Every implementation passes `tests/contracts/test_delta_channel.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from monolith.checkpoint.shares import IdShare
from monolith.sync.messages import Delta, LogPlace, Message, PublishState


@dataclass(frozen=True, slots=True)
class ShareLog:
    """What a channel knows of the log of one share."""

    run: str
    share: IdShare
    newest: LogPlace
    oldest: int
    """The first sequence that is still kept: a reader at `oldest - 1` or later needs no snapshot."""
    tables: Mapping[str, int]
    """Table to floats per row."""
    clock_offset: float | None = field(default=None, compare=False)
    """Seconds that the publisher's clock is ahead of the reader's; None if the channel cannot measure it."""


class TakeSnapshot(Protocol):
    """Reads the rows of a share: begin, rows in chunks of bounded size, end. From any thread."""

    def __call__(self, buckets: Tensor | None = None) -> Iterator[Message]: ...


class DeltaWriter(Protocol):
    """The publisher's end of one share. For one thread; `snapshot` is called from others."""

    def open(self, log: ShareLog, snapshot: TakeSnapshot) -> None:
        """Begin an epoch. What was kept of another is dropped."""

    def append(self, delta: Delta) -> None:
        """Put a delta at the end of the log. Never waits for a reader.

        Raises:
            UnavailableError: It could not be kept. Nothing is lost: hand the same delta in again, or begin a
                new epoch.
        """

    def say(self, state: PublishState) -> None:
        """Tell all readers of the publish state, those who come later too."""

    def close(self) -> None:
        """Stop. Closing again does nothing."""


class DeltaReader(Protocol):
    """A subscriber's end. For one thread."""

    def shares(self) -> Sequence[ShareLog]:
        """Return what is published now, each share once; empty where nobody publishes yet.

        Raises:
            UnavailableError: The channel cannot be reached.
        """

    def read(self, share: int, after: LogPlace | None, *, wait: float) -> Iterator[Message]:
        """Yield what comes after a place, oldest first, until there is nothing new for `wait` seconds.

        Where `after` is None, of another epoch, or no longer kept, it begins with a snapshot. Messages may be
        lost, repeated or disordered on the way: the subscriber looks at their numbers. The newest publish
        state is yielded at the start and when it changes.

        Raises:
            UnavailableError: The share cannot be reached, or broke off. Ask again from where you are.
            CorruptMessageError: What was read is not a message.
        """

    def read_buckets(self, share: int, buckets: Tensor) -> Iterator[Message]:
        """Yield a snapshot of some buckets, to repair a difference; of all where nothing less can be had."""

    def close(self) -> None:
        """Stop. Closing again does nothing."""


OpenReader = Callable[[], DeltaReader]
