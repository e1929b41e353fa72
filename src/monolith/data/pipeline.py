"""Pipelines: what happens to records between a source and the model.

    batches = (
        Pipeline(source)
        .map(add_label)
        .filter(has_label)
        .shuffle(ShuffleConfig(seed=7))
        .rebatch(512)
        .with_progress()
        .to_batches(spec)
        .prefetch(4)
    )
    for batch in batches: ...
    saved = batches.position()

Each stage is a source again, and its position as exact as that of the source below. A stage
that holds records back saves the position from before the oldest of them and how many of
what follows were delivered; restoring reads these once more and passes over them. So a
function must make the same of the same record each time. It may see them in other batches.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, Protocol, TextIO, TypeVar

from torch import Tensor

from monolith.data.bad_values import BadValues
from monolith.data.blocks import Batcher, Block, Shuffler, Stretch
from monolith.data.format import BadRecord
from monolith.data.iteration import closed_after
from monolith.data.records import LINE_ID, BatchMaker, BatchSpec, Records
from monolith.data.share import Share, share_out
from monolith.data.shuffling import ShuffleConfig, permutation
from monolith.data.source import Position, Source, commit_to
from monolith.errors import ConfigError, DataError, RestoreError
from monolith.feature import Batch
from monolith.observe.progress import describe_amount, describe_rate, describe_seconds
from monolith.tensors import Prefetched, prefetch

Item = TypeVar("Item")
Item_co = TypeVar("Item_co", covariant=True)

Map = Callable[[Records], Records]
Predicate = Callable[[Records], Tensor]
"""Returns a bool per record: whether to keep it."""


class Stream(Protocol[Item_co]):
    """A source of anything: what a stage may stand on."""

    def __iter__(self) -> Iterator[Item_co]: ...
    def position(self) -> Position: ...
    def restore(self, position: Position) -> None: ...
    def commit(self, position: Position) -> None: ...
    def close(self) -> None: ...


class Pipeline:
    """A source, and the stages on top of it. Adding a stage returns a new pipeline over the same source."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def map(self, function: Map) -> Pipeline:
        """Replace records by what the function makes of them: as many, fewer or more."""
        return Pipeline(_Mapped(self._source, function))

    def filter(self, predicate: Predicate) -> Pipeline:
        """Keep the records for which the predicate returns True."""
        return self.map(lambda records: records.keep(predicate(records)))

    def rebatch(self, size: int, *, drop_remainder: bool = False) -> Pipeline:
        """Yield batches of exactly `size` records; only the last is shorter, unless it is dropped."""
        return Pipeline(_Rebatched(self._source, size, drop_remainder))

    def shuffle(self, config: ShuffleConfig) -> Pipeline:
        """Mix `config.buffer` records at a time, and yield them together."""
        return Pipeline(_Shuffled(self._source, config))

    def take(self, records: int) -> Pipeline:
        """End after so many records."""
        return Pipeline(_Taken(self._source, records))

    def with_progress(
        self,
        label: str = "Reading",
        *,
        every: timedelta = timedelta(seconds=30),
        clock: Callable[[], float] = time.time,
        event_time: str = LINE_ID + "req_time",
        stream: TextIO | None = None,
    ) -> Pipeline:
        """Print a line now and then: how many records, how fast, and how far behind the clock they are.

        Args:
            clock: Unix seconds.
            event_time: A column of Unix seconds; without it, the lag is left out.
            stream: Standard error by default.
        """
        line = ProgressLine(label, every=every, clock=clock, stream=sys.stderr if stream is None else stream)
        return Pipeline(_Watched(self._source, line, event_time))

    def prefetch(self, batches: int) -> Pipeline:
        """Read up to so many batches ahead in a thread of its own; 0 for none."""
        return Pipeline(_Ahead(self._source, batches))

    def to_batches(self, spec: BatchSpec) -> Batches:
        """Turn records into what a model reads.

        Records whose event time is out of range, or one of whose labels is NaN or infinite, are left out,
        counted and put where the source puts malformed ones; see `BatchSpec.max_bad`. Reading raises a
        DataError where the data has no column of that name; see `BatchSpec.optional`.
        """
        return Batches(_Batched(self._source, spec))

    def __iter__(self) -> Iterator[Records]:
        return iter(self._source)

    def read_share(self, share: Share) -> None:
        """Have the source read one share of its data; see `SharedSource`."""
        share_out(self._source, share)

    def position(self) -> Position:
        return self._source.position()

    def restore(self, position: Position) -> None:
        self._source.restore(position)

    def commit(self, position: Position) -> None:
        """Tell the source that all before a position counts.

        Where a stage held records back, the source hears of the place before the oldest of them.
        """
        commit_to(self._source, position)

    def set_aside(self, bad: Sequence[BadRecord]) -> None:
        """Hand bad records to the source, if it keeps them; see `FileSource.set_aside`."""
        _set_aside(self._source, bad)

    def close(self) -> None:
        self._source.close()


class Batches:
    """Batches for a model, with the position of the records they were made of."""

    def __init__(self, batches: Stream[Batch]) -> None:
        self._batches = batches

    def prefetch(self, batches: int) -> Batches:
        """Prepare up to so many batches ahead in a thread of its own; 0 for none."""
        return Batches(_Ahead(self._batches, batches))

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)

    def read_share(self, share: Share) -> None:
        """Have the source read one share of its data; see `SharedSource`."""
        share_out(self._batches, share)

    def position(self) -> Position:
        return self._batches.position()

    def restore(self, position: Position) -> None:
        self._batches.restore(position)

    def commit(self, position: Position) -> None:
        """Tell the source that all before a position counts."""
        commit_to(self._batches, position)

    def close(self) -> None:
        self._batches.close()


class _Passing:
    """A stage that holds nothing back: it stands where its source stands, and adds nothing to a position."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def read_share(self, share: Share) -> None:
        share_out(self._source, share)

    def position(self) -> Position:
        return self._source.position()

    def restore(self, position: Position) -> None:
        self._source.restore(position)

    def commit(self, position: Position) -> None:
        commit_to(self._source, position)

    def set_aside(self, bad: Sequence[BadRecord]) -> None:
        _set_aside(self._source, bad)

    def close(self) -> None:
        self._source.close()


class _Mapped(_Passing):
    def __init__(self, source: Source, function: Map) -> None:
        super().__init__(source)
        self._function = function

    def __iter__(self) -> Iterator[Records]:
        with closed_after(self._source) as batches:
            for records in batches:
                made = self._function(records)
                if not isinstance(made, Records):
                    raise DataError(f"pipeline: map must return Records, got {type(made).__name__}")
                if len(made):
                    yield made


class _Batched(_Passing):
    def __init__(self, source: Source, spec: BatchSpec) -> None:
        super().__init__(source)
        self._spec = spec
        self._make = BatchMaker(spec)

    def __iter__(self) -> Iterator[Batch]:
        bad = BadValues(self._spec, self.set_aside)
        with closed_after(self._source) as batches:
            for records in batches:
                fine = bad.left_out(records)
                if len(fine) or not len(records):
                    yield self._make(fine)
        bad.judge(at_end=True)
        self._make.end()

    def restore(self, position: Position) -> None:
        super().restore(position)
        self._make = BatchMaker(self._spec, resumed=True)


class _Watched(_Passing):
    def __init__(self, source: Source, line: ProgressLine, event_time: str) -> None:
        super().__init__(source)
        self._line = line
        self._event_time = event_time

    def __iter__(self) -> Iterator[Records]:
        with closed_after(self._source) as batches:
            for records in batches:
                column = records.columns.get(self._event_time)
                times = () if column is None else column.flat_values.tolist()
                self._line.advance(len(records), max(times, default=None))
                yield records
        self._line.finish()


class ProgressLine:
    """Prints a line whenever `every` has passed: records, records per second, and the lag of event time.

    The rate is that of the time since the last line, so that a stall shows.
    """

    def __init__(self, label: str, *, every: timedelta, clock: Callable[[], float], stream: TextIO) -> None:
        self._label = label
        self._every = every.total_seconds()
        self._clock = clock
        self._stream = stream
        self._began = self._printed = clock()
        self._total = self._since = 0
        self._newest: int | None = None

    def advance(self, records: int, event_time: int | None = None) -> None:
        """Count records, the newest of which happened at `event_time`, in Unix seconds."""
        self._total += records
        self._since += records
        if event_time is not None:
            self._newest = event_time
        now = self._clock()
        if now - self._printed >= self._every:
            self._print(self._since / max(now - self._printed, 1e-9), now)
            self._printed, self._since = now, 0

    def finish(self) -> None:
        """Print the sum, if there was a line before."""
        now = self._clock()
        if self._printed > self._began:
            self._print(self._total / max(now - self._began, 1e-9), now, "done")

    def _print(self, rate: float, now: float, ending: str = "") -> None:
        parts = [describe_amount(self._total, None, "records"), describe_rate(rate, "records")]
        if self._newest is not None:
            parts.append(f"{describe_seconds(max(now - self._newest, 0))} behind")
        if ending:
            parts.append(ending)
        print(f"{self._label}: {', '.join(parts)}", file=self._stream, flush=True)


# Stages that hold records back


@dataclass(frozen=True, slots=True)
class _Mark:
    """A place between two records: so many after a position of the source."""

    source: Position
    skip: int = 0

    def saved(self) -> Position:
        return {"source": self.source, "skip": self.skip}


class _Holding:
    """A stage whose source has come further than its consumer."""

    kind = ""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._mark: _Mark | None = None  # None: where the source stands

    def read_share(self, share: Share) -> None:
        share_out(self._source, share)

    def position(self) -> Position:
        return {"stage": self.kind, **self._stand().saved(), **self._numbers()}

    def restore(self, position: Position) -> None:
        names = ("skip", *self._numbers())
        if not isinstance(position, Mapping) or position.get("stage") != self.kind:
            raise RestoreError(
                f"cannot restore a pipeline: {position!r:.200} is not a position of its stage {self.kind!r}"
            )
        numbers = {name: position.get(name) for name in names}
        if not all(isinstance(number, int) and number >= 0 for number in numbers.values()):
            raise RestoreError(f"cannot restore a pipeline: stage {self.kind!r} finds {numbers}")
        self._check(numbers)
        below: Any = position.get("source")
        self._source.restore(below)
        self._mark = _Mark(below, int(position["skip"]))
        self._set_numbers(numbers)

    def commit(self, position: Position) -> None:
        commit_to(self._source, position["source"])

    def set_aside(self, bad: Sequence[BadRecord]) -> None:
        _set_aside(self._source, bad)

    def close(self) -> None:
        self._source.close()

    def _numbers(self) -> dict[str, int]:
        """Return what else belongs to a position."""
        return {}

    def _check(self, numbers: Mapping[str, Any]) -> None:
        """Refuse numbers that make no sense."""

    def _set_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Go on from these."""

    def _stand(self) -> _Mark:
        return _Mark(self._source.position()) if self._mark is None else self._mark

    def _blocks(self, *, length: int = 0, taken: int = 0) -> Iterator[Block[_Mark]]:
        """Yield what the source has from where this stage stands.

        Args:
            length, taken: Of the stretch that begins there, where one was begun.
        """
        stand = self._stand()
        if self._source.position() != stand.source:
            self._source.restore(stand.source)  # it was read further than what was delivered
        before, skip, passed = stand.source, stand.skip, 0
        with closed_after(self._source) as batches:
            for records in batches:
                first = max(skip - passed, 0)
                if first < len(records):
                    yield Block(records, self._places(before, passed, len(records)), first, length, taken)
                    length = taken = 0
                passed += len(records)
                if passed >= skip:
                    before, skip, passed = self._source.position(), 0, 0
        if skip:
            raise DataError(
                f"pipeline: {skip - passed} records fewer than when the position was saved; "
                "the data has changed"
            )

    def _places(self, before: Position, passed: int, size: int) -> Callable[[int], _Mark]:
        """Return the places in a batch that begins so many records after a position."""

        def place(number: int) -> _Mark:
            return _Mark(self._source.position()) if number == size else _Mark(before, passed + number)

        return place


class _Rebatched(_Holding):
    kind = "rebatch"

    def __init__(self, source: Source, size: int, drop_remainder: bool) -> None:
        super().__init__(source)
        if size < 1:
            raise ConfigError(f"pipeline: a batch needs a record at least, got {size}")
        self._size = size
        self._drop_remainder = drop_remainder

    def __iter__(self) -> Iterator[Records]:
        batcher: Batcher[_Mark] = Batcher(self._size)
        with closed_after(self._blocks()) as blocks:
            for block in blocks:
                for batch, self._mark in batcher.add(block):
                    yield batch
        self._mark = None
        if (rest := batcher.rest()) is not None and not self._drop_remainder:
            yield rest


class _Shuffled(_Holding):
    """Stretches of `buffer` records, each in an order that follows from the seed and its number."""

    kind = "shuffle"

    def __init__(self, source: Source, config: ShuffleConfig) -> None:
        super().__init__(source)
        self._config = config
        self._number = self._taken = self._length = 0

    def __iter__(self) -> Iterator[Records]:
        shuffler: Shuffler[_Mark] = Shuffler(
            self._config.buffer,
            lambda _, size: permutation(size, self._config.seed, self._number),
            lambda _: "pipeline: the source",
        )
        step = 1
        with closed_after(self._blocks(length=self._length, taken=self._taken)) as blocks:
            for block in blocks:
                step = max(step, len(block.records) - block.first)
                for stretch in shuffler.add(block):
                    yield from self._in_batches(stretch, step)
        last = shuffler.end(_Mark(self._source.position()))
        if last is not None:
            yield from self._in_batches(last, step)
        self._mark = None

    def _in_batches(self, stretch: Stretch[_Mark], step: int) -> Iterator[Records]:
        """Yield a stretch in batches as large as they came in."""
        size = len(stretch.records)
        for first in range(stretch.first, size, step):
            last = min(first + step, size)
            if last < size:
                self._mark, self._taken, self._length = stretch.begin, last, size
            else:
                self._mark, self._taken, self._length = stretch.end, 0, 0
                self._number += 1
            yield stretch.records.slice(first, last)

    def _numbers(self) -> dict[str, int]:
        seed = self._config.seed
        return {"number": self._number, "taken": self._taken, "length": self._length, "seed": seed}

    def _check(self, numbers: Mapping[str, Any]) -> None:
        if numbers["seed"] != self._config.seed:
            raise RestoreError(
                f"cannot restore a pipeline: it was shuffled with seed {numbers['seed']}, "
                f"this one has {self._config.seed}"
            )

    def _set_numbers(self, numbers: Mapping[str, Any]) -> None:
        self._number, self._taken, self._length = numbers["number"], numbers["taken"], numbers["length"]


class _Taken(_Holding):
    kind = "take"

    def __init__(self, source: Source, records: int) -> None:
        super().__init__(source)
        if records < 0:
            raise ConfigError(f"pipeline: cannot take {records} records")
        self._records = records
        self._taken = 0

    def __iter__(self) -> Iterator[Records]:
        if self._taken >= self._records:
            return
        with closed_after(self._blocks()) as blocks:
            for block in blocks:
                end = min(len(block.records), block.first + self._records - self._taken)
                self._taken += end - block.first
                self._mark = None if end == len(block.records) else block.place(end)
                yield block.records.slice(block.first, end)
                if self._taken == self._records:
                    return

    def _numbers(self) -> dict[str, int]:
        return {"taken": self._taken}

    def _set_numbers(self, numbers: Mapping[str, Any]) -> None:
        self._taken = numbers["taken"]


class _Ahead(Generic[Item]):
    """Reads ahead in a thread, and stands where its consumer stands."""

    def __init__(self, source: Stream[Item], capacity: int) -> None:
        if capacity < 0:
            raise ConfigError(f"pipeline: cannot read {capacity} batches ahead")
        self._source = source
        self._capacity = capacity
        self._running: Prefetched | None = None
        self._position: Position | None = None  # None: where the source stands

    def __iter__(self) -> Iterator[Item]:
        if self._running is None:
            # The thread owns the source from here on, so its position is asked for now.
            self._position = self._source.position()
            self._running = prefetch(_with_positions(self._source), self._capacity)
        while True:
            try:
                item, self._position = next(self._running)
            except StopIteration:
                break
            except BaseException:
                self._stop()
                raise
            yield item  # who stops here finds what was read ahead when coming back
            if self._running is None:
                raise DataError("pipeline: restored or closed while it was being read")
        self._running = None
        self._position = None

    def read_share(self, share: Share) -> None:
        share_out(self._source, share)

    def position(self) -> Position:
        return self._source.position() if self._position is None else self._position

    def restore(self, position: Position) -> None:
        self._stop()
        self._source.restore(position)
        self._position = None

    def commit(self, position: Position) -> None:
        commit_to(self._source, position)

    def set_aside(self, bad: Sequence[BadRecord]) -> None:
        _set_aside(self._source, bad)

    def close(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None
        self._source.close()

    def _stop(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None
            # What was read ahead is dropped, and read again by whoever iterates next.
            assert self._position is not None
            self._source.restore(self._position)


def _with_positions(source: Stream[Item]) -> Iterator[tuple[Item, Position]]:
    # Not a method: a thread that held the stage would keep it, and so itself, alive for ever.
    with closed_after(source) as items:
        for item in items:
            yield item, source.position()


def _set_aside(source: object, bad: Sequence[BadRecord]) -> None:
    set_aside = getattr(source, "set_aside", None)
    if set_aside is not None:
        set_aside(bad)
