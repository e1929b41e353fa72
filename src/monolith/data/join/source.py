"""The joined source: impressions and actions from two sources, as one of examples.

The state of a joiner is large, and a consumer asks for the position after every batch. So a
position is a recipe for that state: a snapshot, the positions of both sources at that moment,
and how many records were read from which of them since, in order. Restoring reads these
records once more and joins them in the same order. The order in which two live streams are
read depends on when their records arrived, so it is recorded; the result of joining depends
on nothing else.

    snapshot          taken since                       here
        |  +512 impressions, -40 actions, +512 ...        |
        +-------------------------------------------------+

Every `snapshot_every` batches, and at the end of the data, the reader writes a snapshot and
counts from there. Old snapshots are deleted when a position with a later one is committed.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from monolith import concurrency, filesystem
from monolith.data.join.joiner import NOTHING_JOINED, Joiner, JoinerConfig
from monolith.data.records import Records, concat
from monolith.data.source import Position, Shard, Source, as_stream
from monolith.errors import ConfigError, FilesystemError, NotShareableError, RestoreError
from monolith.observe import Metrics

_IMPRESSIONS, _ACTIONS = "impressions", "actions"
_CLOSED = 0
"""Among the records taken: here all windows were closed, because both sources had ended."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Base:
    """A moment that can be restored: the states of both sources and of the joiner at the same time."""

    sources: dict[str, Position]
    joiner: dict[str, Any]


class JoinedSource(Source):
    """Two sources as one of joined examples.

    Reads the source that is behind in event time, so neither gets far ahead of the other; while
    one yields no records the other is read. After a restart every example still comes exactly
    once. Records since the last snapshot are read again then, so a queue of files, or the
    partitions of a topic, must belong to this reader alone.

    Args:
        close_at_end: Whether windows close when both sources have ended; if not, they
            stay open, in the position too, for when there is more to read.
    """

    def __init__(
        self,
        impressions: Iterable[Records],
        actions: Iterable[Records],
        config: JoinerConfig,
        *,
        close_at_end: bool = True,
        metrics: Metrics | None = None,
    ) -> None:
        if config.folder is None:
            raise ConfigError("joined source: its position needs a folder for snapshots; set folder")
        self._inputs = {_IMPRESSIONS: _Input(impressions), _ACTIONS: _Input(actions)}
        self._close_at_end = close_at_end
        # Guards the joiner: a commit deletes snapshots, from any thread, while the reader joins and writes
        # one. `_base` and `_taken` belong to the reader alone.
        self._lock = concurrency.Lock()
        self._config = config
        self._metrics = metrics
        self.joiner = Joiner(config, metrics=metrics)
        self._until = concurrency.Event()
        """Set to read no more in place of waiting."""
        self._base: _Base | None = None
        """None before the first read: then the positions of the sources."""
        self._taken: list[int] = []
        """Since the base, in order: so many impressions, less than 0 so many actions."""

    @property
    def live(self) -> bool:
        return any(one.source.live is not False for one in self._inputs.values())

    def read_until(self, stop: concurrency.Event) -> None:
        self._until = stop
        for one in self._inputs.values():
            one.source.read_until(stop)

    def read_for(self, run: str) -> None:
        for one in self._inputs.values():
            one.source.read_for(run)

    def read_shard(self, shard: Shard) -> None:
        """Have both sources read one shard, and join it in its own folder below the given one.

        The impressions and actions of a key must be in the same shard: files that were split alike,
        partitions by key. Actions that cannot be sharded are read whole by every worker."""
        self._inputs[_IMPRESSIONS].source.read_shard(shard)
        with suppress(NotShareableError):
            self._inputs[_ACTIONS].source.read_shard(shard)
        if shard.workers > 1:
            assert self._config.folder is not None
            folder = filesystem.join(self._config.folder, f"worker-{shard.worker}-of-{shard.workers}")
            with self._lock:
                self.joiner.close()
                self.joiner = Joiner(replace(self._config, folder=folder), metrics=self._metrics)

    def __iter__(self) -> Iterator[Records]:
        self._begin()
        until, left = self._until, list(self._inputs)
        idle: str | None = None
        while left:
            name = self._behind(left, idle)
            records = self._inputs[name].next()
            if records is None:
                if until.is_set():
                    return  # the data has not ended, so no window closes
                left.remove(name)
                continue
            idle = (
                name if not records.size else None
            )  # a live source without records: read the other one next
            examples = self._push(name, records)
            if len(self._taken) >= self.joiner.config.snapshot_every:
                self._write_base()
            if examples.size:
                yield examples
        # Write the snapshot before the last examples are yielded: a position taken with them is then at the
        # end.
        closes = self._close_at_end and self.joiner.open
        examples = self._finish() if closes else Records(0, {})
        if self._taken:
            self._write_base()
        if examples.size:
            yield examples

    def position(self) -> Position:
        base = self._begin()
        return {"kind": "joined", **base.sources, "joiner": {**base.joiner, "taken": list(self._taken)}}

    def restore(self, position: Position) -> None:
        parts = (*self._inputs, "joiner")
        if position.get("kind") != "joined" or not all(isinstance(position.get(one), dict) for one in parts):
            raise RestoreError(f"cannot restore a joined source: {position!r:.200} is not a position of one")
        taken = position["joiner"].get("taken", [])  # positions of before know none
        if not isinstance(taken, list) or not all(isinstance(count, int) for count in taken):
            raise RestoreError(f"cannot restore a joined source: it cannot have taken {taken!r:.200}")
        # Order matters: first both sources and the joiner are restored to the snapshot, then the records
        # since are joined again, in their recorded order. The examples that come out were yielded before.
        state = {name: value for name, value in position["joiner"].items() if name != "taken"}
        for name, one in self._inputs.items():
            one.restore(position[name])
        with self._lock:
            self.joiner.restore(state)
            self._base, self._taken = _Base({name: position[name] for name in self._inputs}, state), []
        for count in taken:
            self._take_again(count)

    def commit(self, position: Position) -> None:
        """Commit the positions of both sources, and delete snapshots that no later position needs.

        The sources get their positions at the snapshot: a restart reads again what came since.
        """
        # Positions of the snapshot, not of now: a restart reads the records since the snapshot again, so a
        # queue or broker must not forget them.
        for name, one in self._inputs.items():
            one.source.commit(position[name])
        with self._lock:
            self.joiner.commit(position["joiner"])

    def close(self) -> None:
        for one in self._inputs.values():
            one.close()
        with self._lock:
            self.joiner.close()

    def _begin(self) -> _Base:
        if self._base is None:
            self._base = _Base(
                {name: one.source.position() for name, one in self._inputs.items()}, NOTHING_JOINED
            )
        return self._base

    def _push(self, name: str, records: Records) -> Records:
        with self._lock:
            if name == _IMPRESSIONS:
                examples = self.joiner.push_impressions(records)
            else:
                examples = self.joiner.push_actions(records)
            if records.size:
                self._taken.append(records.size if name == _IMPRESSIONS else -records.size)
            return examples

    def _finish(self) -> Records:
        with self._lock:
            self._taken.append(_CLOSED)
            return self.joiner.finish()

    def _take_again(self, count: int) -> None:
        """Join the same records again; their examples were yielded before."""
        if count == _CLOSED:
            self._finish()
        else:
            name = _IMPRESSIONS if count > 0 else _ACTIONS
            self._push(name, self._inputs[name].take(abs(count)))

    def _write_base(self) -> None:
        """Write a snapshot and count from it. If that fails, the count continues from the last: nothing is
        lost."""
        if any(one.rest is not None for one in self._inputs.values()):
            return  # the sources are ahead of the joiner, just after a restart
        try:
            with self._lock:
                state = self.joiner.state()
                # All records up to these positions are in the joiner: batches are pushed as they are read.
                sources = {name: one.source.position() for name, one in self._inputs.items()}
                self._base, self._taken = _Base(sources, state), []
        except FilesystemError as cause:
            _log.warning("joined source: no snapshot could be written, continuing without: %s", cause)

    def _behind(self, left: Iterable[str], idle: str | None) -> str:
        """Return the source to read next: the one that is behind, unless it just had nothing."""
        newest = self.joiner.newest
        names = [name for name in left if name != idle] or list(left)
        return min(names, key=lambda name: -np.inf if (time := newest[name]) is None else time)


class _Input:
    """A source of which some records may have been read and not yet joined, just after a restore."""

    def __init__(self, source: Iterable[Records]) -> None:
        self.source = as_stream(source)
        self.rest: Records | None = None
        self._reading: Iterator[Records] | None = None

    def next(self) -> Records | None:
        """Return the records left over, or the next ones; None at the end. A later call looks for new
        ones."""
        if self.rest is not None:
            rest, self.rest = self.rest, None
            return rest
        if self._reading is None:
            self._reading = iter(self.source)
        records = next(self._reading, None)
        if records is None:
            self._reading = None
        return records

    def take(self, count: int) -> Records:
        """Return the next `count` records, across batches."""
        parts: list[Records] = []
        while count:
            records = self.next()
            if records is None:
                raise RestoreError(
                    f"cannot restore a joined source: {count} records are missing that were there when "
                    "the position was saved; the data has changed"
                )
            if not records.size:
                continue
            if records.size > count:
                self.rest = records.slice(count, records.size)
            parts.append(records.slice(0, min(count, records.size)))
            count -= parts[-1].size
        return concat(parts)

    def restore(self, position: Position) -> None:
        self._stop()
        self.source.restore(position)

    def close(self) -> None:
        self._stop()
        self.source.close()

    def _stop(self) -> None:
        reading, self._reading, self.rest = self._reading, None, None
        if isinstance(reading, Generator):
            reading.close()
