"""Flows: one stream split by where its records come from, and merged again.

A record names its data source by a key, a hash of the flow's name. `SplitFlow` sorts
records into one bounded queue per flow, for consumers of their own; `MergeFlow` takes in
turn from every flow that has something, says in each record where it came from, and is
itself a source with a position.

Back-pressure: nothing is read while the queue that the next record belongs to is full.
So a flow without a consumer stops all flows, once its queue is full. `MergeFlow`
takes from all of them and cannot be stopped that way; it waits, though, until one queue
is full or the stream ends, so that its order depends on the records alone. Consumers of
single flows must each have a thread.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import numpy as np
import torch

from monolith import concurrency
from monolith.data.records import Records, concat
from monolith.data.source import Position, Shard, Source, as_stream
from monolith.data.transforms.columns import (
    DATA_SOURCE_KEY,
    DATA_SOURCE_NAME,
    first_values,
    read_column,
    text_column,
)
from monolith.data.transforms.transform import NUMBER, Stateful, Transform, numbered
from monolith.errors import ConfigError, DataError, RestoreError

QUEUE_RECORDS = 1024
"""The capacity of a flow's queue, in records."""


def flow_key(name: str) -> int:
    """Return the key of a flow: the hash a Java string of its name has, shifted left by 8, in 32 bits."""
    units = name.encode("utf-16-be", "surrogatepass")
    value = 0
    for high, low in zip(units[::2], units[1::2], strict=True):
        value = (31 * value + (high << 8 | low)) & 0xFFFF_FFFF
    return value << 8 & 0xFFFF_FFFF


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitConfig:
    """Which flows a stream is split into."""

    flows: tuple[str, ...]
    capacity: int = QUEUE_RECORDS
    """The most records in a queue."""
    unknown: Literal["error", "drop"] = "error"
    """What to do with a record of no flow listed, or without a key; dropped ones are counted."""

    def __post_init__(self) -> None:
        if not self.flows:
            raise ConfigError("split flow: flows must name at least one")
        if self.capacity < 1:
            raise ConfigError(f"split flow: capacity must be at least 1, got {self.capacity}")
        keys: dict[int, str] = {}
        for name in self.flows:
            key = flow_key(name)
            if key in keys:
                raise ConfigError(
                    f"split flow: flows {keys[key]!r} and {name!r} have the same key {key:#x}; rename one"
                )
            keys[key] = name


class SplitFlow:
    """Sorts the records of a source into one queue per flow. Thread-safe."""

    def __init__(
        self, config: SplitConfig, source: Iterable[Records], *, patience: timedelta = timedelta(minutes=10)
    ) -> None:
        """
        Args:
            source: Owned from here on.
            patience: How long a flow waits for another one to be taken from before it gives up.
        """
        self.config = config
        self._keys = torch.tensor([flow_key(name) for name in config.flows], dtype=torch.int64)
        self._patience = patience.total_seconds()
        self._changed = concurrency.Condition()  # guards all below, but for the source while `_reading`
        self._reader = _Reader(source)
        self._queues: dict[str, deque[Records]] = {name: deque() for name in config.flows}
        self._unknown: Counter[int | None] = Counter()
        self._reading = False
        self._ended = False
        self._error: BaseException | None = None

    @property
    def unknown(self) -> dict[int | None, int]:
        """How many records were dropped, by their key; None for those that had no key."""
        with self._changed:
            return dict(self._unknown)

    def flow(self, name: str) -> Iterator[Records]:
        """Yield the records of one flow, in order, to the end. Other flows need threads of their own.

        Raises:
            DataError: A record is of an unknown flow, or another flow was not taken from for too long.
        """
        if name not in self._queues:
            raise ConfigError(f"there is no flow {name!r}; there are {', '.join(self._queues)}")
        while (part := self._take(name)) is not None:
            yield part

    def window(self) -> dict[str, Records]:
        """Read until a queue is full or the stream ends; return the records of each flow, and empty its
        queue.

        Flows without records are left out; when there are none, the stream has ended. Asking again
        then looks whether it has grown.
        """
        with self._changed:
            while self._reader.unused is not None or self._reader.read():
                if not self._route():
                    break
            found = {name: _drained(queue) for name, queue in self._queues.items() if queue}
            if not found:
                self._reader.resume()
            self._changed.notify_all()
            return found

    def read_until(self, stop: concurrency.Event) -> None:
        """Have the source stop waiting once an event is set; see `Stream.read_until`."""
        self._reader.source.read_until(stop)

    def read_for(self, run: str) -> None:
        """Tell the source which run reads; see `Stream.read_for`."""
        self._reader.source.read_for(run)

    def read_shard(self, shard: Shard) -> None:
        """Have the source read one shard of its data."""
        self._reader.source.read_shard(shard)

    def position(self) -> Position:
        """Return the place before the first record that is in no queue yet.

        Raises:
            DataError: Queues have records, which a position does not contain.
        """
        with self._changed:
            if full := [name for name, queue in self._queues.items() if queue]:
                raise DataError(f"split flow: flows {full} hold records that were not taken; take them first")
            return self._reader.position()

    def restore(self, position: Position) -> None:
        with self._changed:
            self._reader.restore(position)
            self._ended, self._error = False, None
            for queue in self._queues.values():
                queue.clear()

    def commit(self, position: Position) -> None:
        """Tell the source that all before a position counts."""
        self._reader.commit(position)

    def close(self) -> None:
        self._reader.source.close()

    def _take(self, name: str) -> Records | None:
        queue = self._queues[name]
        with self._changed:
            while not queue:
                if self._error is not None:
                    raise self._error
                if self._ended:
                    return None
                if not self._reading and self._reader.unused is None:
                    self._read_unlocked()
                elif not self._reading and self._route():
                    self._changed.notify_all()
                elif not self._changed.wait(self._patience) and not self._reading:
                    full = [other for other, queued in self._queues.items() if queued]
                    raise DataError(
                        f"flow {name!r} got nothing for {self._patience} s: flows {full} are full and have "
                        "no consumer. Give each flow a thread, or merge them."
                    )
            part = _drained(queue)
            self._changed.notify_all()
            return part

    def _read_unlocked(self) -> None:
        """Read a batch while other threads take records from their queues."""
        # `_reading` keeps other threads from the source while the lock is released: they wait, or take
        # records that are in their queues.
        self._reading = True
        self._changed.release()
        error: BaseException | None = None
        ended = False
        try:
            ended = not self._reader.read()
        except BaseException as cause:
            error = cause
        finally:
            self._changed.acquire()
            self._reading = False
            self._ended, self._error = ended, error
            self._changed.notify_all()

    def _route(self) -> bool:
        """Move unused records to their queues, up to the first whose queue is full; return whether any
        moved."""
        unused = self._reader.unused
        assert unused is not None
        try:
            which = self._flows_of(unused)
        except DataError as error:
            self._error = error
            self._changed.notify_all()
            raise
        places = {name: (which == index).nonzero().squeeze(1) for index, name in enumerate(self.config.flows)}
        end = len(unused)
        for name, rows in places.items():
            free = self.config.capacity - sum(map(len, self._queues[name]))
            if len(rows) > free:
                end = min(end, int(rows[free]))
        for name, rows in places.items():
            if len(rows := rows[rows < end]):
                self._queues[name].append(unused.take(rows))
        if bool((lost := which[:end] < 0).any()):
            self._count_unknown(unused.slice(0, end).keep(lost))
        self._reader.advance(end)
        return end > 0

    def _flows_of(self, records: Records) -> torch.Tensor:
        """Return the number of each record's flow; -1 for an unknown one."""
        column = read_column(records, DATA_SOURCE_KEY, torch.int64)
        same = first_values(column, -1)[:, None] == self._keys
        which = torch.where(same.any(1), same.to(torch.int64).argmax(1), -1)
        if self.config.unknown == "error" and bool((which < 0).any()):
            row = int((which < 0).nonzero()[0])
            key = column.to_list()[row]
            raise DataError(
                f"split flow: record {int(records[NUMBER].flat_values[row])} has the key "
                f"{f'{key[0]:#x}' if key else 'none'}, which is of none of the flows "
                f"{', '.join(self.config.flows)}. List its flow, or set unknown = 'drop'."
            )
        return which

    def _count_unknown(self, records: Records) -> None:
        keys = read_column(records, DATA_SOURCE_KEY, torch.int64)
        known, counts = np.unique(first_values(keys, 0)[keys.row_lengths() > 0].numpy(), return_counts=True)
        self._unknown.update(dict(zip(known.tolist(), counts.tolist(), strict=True)))
        if nameless := int((keys.row_lengths() == 0).sum()):
            self._unknown[None] += nameless


class MergeFlow(Source):
    """Makes one stream of several flows: a record of each in turn, of those that have one, until all end.

    Each record gets the name of its flow as `line_id.data_source_name`. A source: its
    position is that of its flows, with the state of its transforms.
    """

    def __init__(
        self,
        flows: SplitFlow | Mapping[str, Iterable[Records]],
        *,
        capacity: int = QUEUE_RECORDS,
        transforms: Mapping[str, Transform] | None = None,
    ) -> None:
        """
        Args:
            flows: A split stream, or sources by name. Owned from here on.
            capacity: Records taken from each source at a time; a split stream has its own.
            transforms: What to do with the records of some flows before they are merged.
        """
        self._inputs = flows if isinstance(flows, SplitFlow) else _Sources(flows, capacity)
        self._names = list(flows.config.flows if isinstance(flows, SplitFlow) else flows)
        self._transforms = dict(transforms or {})
        if unknown := self._transforms.keys() - set(self._names):
            raise ConfigError(f"merge flow: transforms for {sorted(unknown)}, but flows are {self._names}")

    def __iter__(self) -> Iterator[Records]:
        while window := self._inputs.window():
            merged = self._merged(window)
            if len(merged):
                yield merged

    def read_until(self, stop: concurrency.Event) -> None:
        self._inputs.read_until(stop)

    def read_for(self, run: str) -> None:
        self._inputs.read_for(run)

    def read_shard(self, shard: Shard) -> None:
        """Have every flow read one shard of its data."""
        self._inputs.read_shard(shard)

    def position(self) -> Position:
        states = {name: transform.state() for name, transform in self._stateful().items()}
        return {"flows": self._inputs.position(), "transforms": states}

    def restore(self, position: Position) -> None:
        whole = position.keys() == {"flows", "transforms"}  # one of before is that of the flows alone
        flows, states = (position["flows"], position["transforms"]) if whole else (position, {})
        stateful = self._stateful()
        if not isinstance(flows, Mapping) or not isinstance(states, Mapping):
            raise RestoreError(f"cannot restore merged flows: {position!r:.200} is not a position of them")
        if states.keys() != stateful.keys():
            raise RestoreError(
                f"cannot restore merged flows: the position has the state of transforms of {sorted(states)}, "
                f"here those of {sorted(stateful)} have one. Use the transforms it was saved with."
            )
        self._inputs.restore(dict(flows))
        for name, transform in stateful.items():
            transform.restore(states[name])

    def commit(self, position: Position) -> None:
        """Tell the sources that all before a position counts."""
        self._inputs.commit(position["flows"])

    def close(self) -> None:
        self._inputs.close()

    def _stateful(self) -> dict[str, Stateful]:
        return {name: one for name, one in self._transforms.items() if isinstance(one, Stateful)}

    def _merged(self, window: Mapping[str, Records]) -> Records:
        parts, flows, turns = [], [], []
        for name, part in window.items():
            transform = self._transforms.get(name)
            # The numbers of the records are in their column, so `first` is not looked at.
            done = transform(part, first=0) if transform is not None else part
            parts.append(done.select(column for column in done.columns if column != NUMBER))
            flows.append(torch.full((len(done),), self._names.index(name)))
            turns.append(torch.arange(len(done)))
        flow, turn = torch.cat(flows), torch.cat(turns)
        # Record k of every flow comes before record k + 1 of any.
        order = torch.argsort(turn * len(self._names) + flow)
        return (
            concat(parts).take(order).with_columns({DATA_SOURCE_NAME: text_column(self._names, flow[order])})
        )


class _Sources:
    """Sources by name, read an equal number of records at a time."""

    def __init__(self, sources: Mapping[str, Iterable[Records]], capacity: int) -> None:
        if not sources or capacity < 1:
            raise ConfigError(f"merge flow: needs flows and a capacity from 1 on, got {capacity}")
        self._readers = {name: _Reader(source) for name, source in sources.items()}
        self._capacity = capacity

    def window(self) -> dict[str, Records]:
        found = {name: part for name, reader in self._readers.items() if len(part := self._some(reader))}
        if not found:
            for reader in self._readers.values():
                reader.resume()
        return found

    def _some(self, reader: _Reader) -> Records:
        parts: list[Records] = []
        missing = self._capacity
        while missing and (reader.unused is not None or reader.read()):
            assert reader.unused is not None
            parts.append(reader.unused.slice(0, missing))
            missing -= len(parts[-1])
            reader.advance(len(parts[-1]))
        return concat(parts) if parts else Records(0, {})

    def read_until(self, stop: concurrency.Event) -> None:
        for reader in self._readers.values():
            reader.source.read_until(stop)

    def read_for(self, run: str) -> None:
        for reader in self._readers.values():
            reader.source.read_for(run)

    def read_shard(self, shard: Shard) -> None:
        for reader in self._readers.values():
            reader.source.read_shard(shard)

    def position(self) -> Position:
        return {name: reader.position() for name, reader in self._readers.items()}

    def restore(self, position: Position) -> None:
        if position.keys() != self._readers.keys():
            raise RestoreError(
                f"cannot restore the merged flows {sorted(self._readers)} from {sorted(position)}"
            )
        for name, reader in self._readers.items():
            reader.restore(position[name])

    def commit(self, position: Position) -> None:
        for name, reader in self._readers.items():
            reader.commit(position[name])

    def close(self) -> None:
        for reader in self._readers.values():
            reader.source.close()


def _drained(queue: deque[Records]) -> Records:
    parts = list(queue)
    queue.clear()
    return concat(parts)


class _Reader:
    """Reads a source a batch at a time; its position may be in the middle of one."""

    def __init__(self, source: Iterable[Records]) -> None:
        self.source = as_stream(source)
        self.unused: Records | None = None
        """The records that were read and not used yet, with their numbers; None if there are none."""
        self._iterator: Iterator[Records] | None = None
        self._ended = False
        self._before: Position = {}
        self._used = 0  # records of the batch that began at `_before`
        self._skip = 0  # to be thrown away after a restore
        self._number = 0

    def read(self) -> bool:
        """Read the next batch; return False from the end on."""
        assert self.unused is None
        if self._ended:
            return False
        iterator = self._iterator or iter(self.source)
        self._iterator = iterator
        while True:
            before = self.source.position()
            batch = next(iterator, None)
            if batch is None:
                self._iterator, self._ended = None, True
                return False
            used = min(self._skip, len(batch))
            self._skip -= used
            if used < len(batch):
                self._before, self._used = before, used
                self.unused = numbered(batch.slice(used, len(batch)), self._number)
                return True

    def resume(self) -> None:
        """Look again whether there is more, after the end."""
        self._ended = False

    def advance(self, count: int) -> None:
        """Count the first unused records as used."""
        if self.unused is None or not count:
            return
        self._used += count
        self._number += count
        self.unused = self.unused.slice(count, len(self.unused)) if count < len(self.unused) else None

    def position(self) -> Position:
        if self.unused is not None:
            return {"source": self._before, "used": self._used, "number": self._number}
        return {"source": self.source.position(), "used": self._skip, "number": self._number}

    def restore(self, position: Position) -> None:
        try:
            source, used, number = position["source"], int(position["used"]), int(position["number"])
        except (KeyError, TypeError, ValueError) as cause:
            raise RestoreError(f"cannot restore a flow: {position!r} is not a position of one") from cause
        self.source.restore(source)
        self.unused, self._iterator, self._ended = None, None, False
        self._skip, self._used, self._number = used, 0, number

    def commit(self, position: Position) -> None:
        self.source.commit(position["source"])
