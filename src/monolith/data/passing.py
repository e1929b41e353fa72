"""Stages that hold nothing back: they stand where their source stands."""

from __future__ import annotations

from collections.abc import Sequence

from monolith.data.epochs import Epochs, read_epochs
from monolith.data.format import BadRecord
from monolith.data.handing import HandsOut, handing
from monolith.data.redistribution import adopted, redistributed
from monolith.data.share import Share, share_out
from monolith.data.source import Position, Source, commit_to, repeats_order, set_bad_aside


class Passing:
    """A stage that adds nothing to a position."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def read_share(self, share: Share) -> None:
        share_out(self._source, share)

    def read_epochs(self, epochs: Epochs) -> None:
        read_epochs(self._source, epochs)

    @property
    def below(self) -> Source:
        return self._source

    def position(self) -> Position:
        return self._source.position()

    def restore(self, position: Position) -> None:
        self._source.restore(position)

    @property
    def repeats(self) -> bool:
        return repeats_order(self._source)

    @property
    def hands_out(self) -> HandsOut | None:
        return handing(self._source)

    def redistribute(self, positions: Sequence[Position], workers: int) -> list[Position]:
        return redistributed(self._source, positions, workers)

    def adopt(self, position: Position, end: Position | None = None) -> Position:
        return adopted(self._source, position, end)

    def commit(self, position: Position) -> None:
        commit_to(self._source, position)

    def set_aside(self, bad: Sequence[BadRecord]) -> None:
        set_bad_aside(self._source, bad)

    def close(self) -> None:
        self._source.close()
