"""The joined source: impressions and actions from two sources, as one of examples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from monolith.data.joiner import Joiner, JoinerConfig
from monolith.data.records import Records
from monolith.data.source import Position, Source
from monolith.errors import ConfigError, RestoreError
from monolith.observe import Metrics


class JoinedSource:
    """Two sources as one of joined examples.

    Reads whichever has come less far in event time, so neither runs away from the other;
    one that yields no records for now lets the other go on. A position is that of both and
    a snapshot of the joiner, so after a restart every example still comes exactly once.
    Snapshots are written by `position()`: call it when a checkpoint is saved.

    Args:
        close_at_end: Whether windows close when both sources have ended; if not, what is open
            stays open, in the position too, for when there is more to read.
    """

    def __init__(
        self,
        impressions: Source,
        actions: Source,
        config: JoinerConfig,
        *,
        close_at_end: bool = True,
        metrics: Metrics | None = None,
    ) -> None:
        if config.folder is None:
            raise ConfigError("joined source: its position needs a folder for snapshots; set folder")
        self._sources = {"impressions": impressions, "actions": actions}
        self._close_at_end = close_at_end
        self.joiner = Joiner(config, metrics=metrics)

    def __iter__(self) -> Iterator[Records]:
        push = {"impressions": self.joiner.push_impressions, "actions": self.joiner.push_actions}
        left = {name: iter(source) for name, source in self._sources.items()}
        idle: str | None = None
        while left:
            name = self._behind(left, idle)
            records = next(left[name], None)
            if records is None:
                del left[name]
                continue
            idle = name if not records.size else None
            examples = push[name](records)
            if examples.size:
                yield examples
        if self._close_at_end:
            examples = self.joiner.finish()
            if examples.size:
                yield examples

    def position(self) -> Position:
        return {
            "kind": "joined",
            **{name: source.position() for name, source in self._sources.items()},
            "joiner": self.joiner.state(),
        }

    def restore(self, position: Position) -> None:
        parts = (*self._sources, "joiner")
        if position.get("kind") != "joined" or not all(
            isinstance(position.get(part), dict) for part in parts
        ):
            raise RestoreError(f"cannot restore a joined source: {position!r} is not a position of one")
        for name, source in self._sources.items():
            source.restore(position[name])
        self.joiner.restore(position["joiner"])

    def close(self) -> None:
        for source in self._sources.values():
            source.close()
        self.joiner.close()

    def _behind(self, left: Iterable[str], idle: str | None) -> str:
        """Return the source to read next: the one that is behind, unless it just had nothing."""
        newest = self.joiner.newest
        names = [name for name in left if name != idle] or list(left)
        return min(names, key=lambda name: -np.inf if (time := newest[name]) is None else time)
