"""Stages that hold nothing back: they stand where their source stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from monolith.data.epochs import Epochs, read_epochs
from monolith.data.format import BadRecord
from monolith.data.handing import HandsOut, handing
from monolith.data.redistribution import adopted, redistributed
from monolith.data.share import Share, share_out
from monolith.data.source import Position, Stream, commit_to, repeats_order, set_bad_aside

Below = TypeVar("Below", bound=Stream[Any])


class Passing(Generic[Below]):
    """A stage that adds nothing to a position, on a source or on another stage."""

    def __init__(self, source: Below) -> None:
        self._source = source

    def read_share(self, share: Share) -> None:
        """Have the source read one share of its data; see `SharedSource`."""
        share_out(self._source, share)

    def read_epochs(self, epochs: Epochs) -> None:
        """Have the source read its data several times; see `read_epochs`."""
        read_epochs(self._source, epochs)

    @property
    def below(self) -> Below:
        """What this stands on; see `layers`."""
        return self._source

    def position(self) -> Position:
        return self._source.position()

    def restore(self, position: Position) -> None:
        self._source.restore(position)

    @property
    def repeats(self) -> bool:
        """Whether the source repeats its order; see `repeats_order`."""
        return repeats_order(self._source)

    @property
    def hands_out(self) -> HandsOut | None:
        """What gives back work of the source; see `handing`."""
        return handing(self._source)

    def redistribute(self, positions: Sequence[Position], workers: int) -> list[Position]:
        """Have the source redistribute positions; see `Redistributable`."""
        return redistributed(self._source, positions, workers)

    def adopt(self, position: Position, end: Position | None = None) -> Position:
        """Have the source adopt a position; see `Redistributable`."""
        return adopted(self._source, position, end)

    def commit(self, position: Position) -> None:
        """Tell the source that all before a position counts.

        Where a stage held records back, the source hears of the place before the oldest of them.
        """
        commit_to(self._source, position)

    def set_aside(self, bad: Sequence[BadRecord]) -> None:
        """Hand bad records to the source, if it keeps them; see `FileSource.set_aside`."""
        set_bad_aside(self._source, bad)

    def close(self) -> None:
        self._source.close()
