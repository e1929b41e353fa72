"""Pipelines: the stages that records pass between a source and the model.

    batches = (
        Pipeline(source)
        .map(add_label)
        .filter(has_label)
        .transform(NegativeDownsample(drop_rate=0.5))
        .shuffle(ShuffleConfig(seed=7))
        .rebatch(512)
        .with_progress()
        .to_batches(spec)
    )
    for batch in batches: ...
    saved = batches.position()

Each stage is a source again, with a position as exact as that of its upstream. A stage that buffers records
saves the position before the oldest of them and how many of the following records were yielded; restoring
reads these once more and drops them. So a function must make the same of the same record each time; it may
see records in other batches. A function that draws random numbers, counts or has other state must be a
transform, whose state is part of the position."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TextIO, TypeVar

from monolith import concurrency
from monolith.data.batches import ColumnBatches, SpecBatches
from monolith.data.buffering import Rebatched, Shuffled, Taken
from monolith.data.histories import HistoryConfig, HistoryStage
from monolith.data.records import LINE_ID, BatchSpec, Records
from monolith.data.shuffling import ShuffleConfig
from monolith.data.source import Position, Predicate, Stage, Stream, closed_after
from monolith.data.transforming import SNAPSHOT_EVERY, transformed
from monolith.data.transforms.transform import Transform
from monolith.errors import ConfigError, DataError
from monolith.feature import Batch, FeatureSpec
from monolith.observe.progress import describe_amount, describe_rate, describe_seconds
from monolith.tensors import Prefetched, prefetch

Item = TypeVar("Item")

_BATCHES_AHEAD = 2
"""Batches that are ready when threads make them: more would only be memory."""

Map = Callable[[Records], Records]


class Pipeline(Stage[Records, Records]):
    """A source and the stages on top of it. Adding a stage returns a new pipeline over the same source.

    A pipeline is a source itself: its position includes the records that its stages have buffered. Shapes:
    each item is `Records` of n records; `to_batches` makes each of them a `Batch` of at most n examples.

    Examples:
        >>> from monolith import FeatureSpec, IdFeature, Label, MemorySource, Pipeline
        >>> source = MemorySource({"user": [17, 18, 19], "click": [1, 0, 1]}, batch_size=3)
        >>> pipeline = Pipeline(source).filter(lambda records: records["user"].flat_values != 18).rebatch(1)
        >>> spec = FeatureSpec(features={"user": IdFeature()}, labels={"click": Label()})
        >>> [batch.ids.ids.tolist() for batch in pipeline.to_batches(spec)]
        [[17], [19]]
    """

    def map(self, function: Map) -> Pipeline:
        """Replace records by the result of a function: as many, fewer or more."""
        return Pipeline(_Mapped(self._source, function))

    def filter(self, predicate: Predicate, *, any_thread: bool = False) -> Pipeline:
        """Keep the records for which the predicate returns True.

        Args:
            any_thread: Whether any thread may ask the predicate, and it decides by the values of each record
                alone. Then the threads that parse files ask it, about each chunk at once.
        """
        return Pipeline(_Filtered(self._source, predicate, any_thread))

    def transform(self, transform: Transform, *, snapshot_every: int = SNAPSHOT_EVERY) -> Pipeline:
        """Replace records by the result of a transform of `monolith.data.transforms` or `.sampling`.

        Records are numbered from 0 where the transforms begin, and several one after the other are one
        `Compose`: a record keeps its number. The state of a transform, such as a pool of items or a random
        generator, is part of the position, so a resumed run gets the same records.

        Args:
            transform: Belongs to this pipeline from now on, if it has state.
            snapshot_every: Records between two snapshots of its state; restoring transforms the records since
                the last one once more. If the source may not repeat its order, as Kafka, there is a snapshot
                after every batch.

        Raises:
            ConfigError: It cannot resume exactly after a restart; the message says why.
        """
        return Pipeline(transformed(self._source, transform, snapshot_every))

    def history(self, config: HistoryConfig, *, earlier: Iterable[Records] | None = None) -> Pipeline:
        """Add to each record the last events of its user, as list columns.

        The events come from the stream itself: those that were read before the record, and whose time is not
        after its own. The state is part of the position, so a resumed run gets the same lists; see
        `monolith.data.histories`. Add it before `filter` and `shuffle`, so that it sees every event in order.

        Args:
            config: The columns of the user, of the values and of the time, and the limits.
            earlier: Data whose events histories begin with, such as the training data of what is evaluated.
                It is read first, and its records are not yielded. Of its events a record has those that
                were before it by at least a second.

        Examples:
            >>> from monolith import HistoryConfig, MemorySource, Pipeline
            >>> events = {"time": [10, 20, 30], "user": [7, 8, 7], "item": ["a", "b", "c"]}
            >>> config = HistoryConfig(by="user", of="item", max=50, time="time")
            >>> [records] = Pipeline(MemorySource(events, batch_size=3)).history(config)
            >>> records.strings("history")
            [[], [], [b'a']]
            >>> held = MemorySource({"time": [40], "user": [8], "item": ["d"]}, batch_size=1)
            >>> known = MemorySource(events, batch_size=3)
            >>> [records] = Pipeline(held).history(config, earlier=known)
            >>> records.strings("history")
            [[b'b']]
        """
        return Pipeline(HistoryStage(self._source, config, earlier=earlier))

    def rebatch(self, size: int, *, drop_remainder: bool = False) -> Pipeline:
        """Yield batches of exactly `size` records; only the last is shorter, unless it is dropped."""
        return Pipeline(Rebatched(self._source, size, drop_remainder))

    def shuffle(self, config: ShuffleConfig) -> Pipeline:
        """Mix `config.buffer` records at a time, and yield them together."""
        return Pipeline(Shuffled(self._source, config))

    def take(self, records: int) -> Pipeline:
        """End after so many records."""
        return Pipeline(Taken(self._source, records))

    def with_progress(
        self,
        label: str = "Reading",
        *,
        every: timedelta = timedelta(seconds=30),
        clock: Callable[[], float] = concurrency.time,
        timer: Callable[[], float] = concurrency.monotonic,
        event_time: str = LINE_ID + "req_time",
        stream: TextIO | None = None,
    ) -> Pipeline:
        """Print a line now and then: how many records, how fast, and how far behind the clock they are.

        Args:
            clock: Unix seconds, for the lag.
            timer: Seconds that only grow.
            event_time: A column of Unix seconds; without it, the lag is left out. Data that was there
                already, such as a list of files, has none.
            stream: Standard error by default.
        """
        out = sys.stderr if stream is None else stream
        line = ProgressLine(label, every=every, clock=clock, timer=timer, stream=out)
        return Pipeline(_Watched(self._source, line, event_time))

    def prefetch(self, batches: int) -> Pipeline:
        """Read up to so many batches ahead in a thread of its own; 0 for none."""
        return Pipeline(_Ahead(self._source, batches))

    def to_batches(self, spec: BatchSpec | FeatureSpec, *, threads: int | None = None) -> Batches:
        """Turn records into the input of a model: columns of ids and numbers by a `BatchSpec`, raw ones by a
        `FeatureSpec`.

        Records whose event time is out of range, one of whose labels is NaN or infinite, or that have none of
        their labels, are dropped, counted and rejected to the source; see
        `BatchSpec.max_bad`. By a feature spec, so are those that lack one of their labels, or of which some
        other value cannot be read. Reading raises a DataError if the data has no column of that name; see
        `BatchSpec.optional`.

        Args:
            threads: How many gather, hash and pack batches ahead; the stages before it then run ahead in a
                thread of their own. 0 does all of it when a batch is asked for. None takes what the source
                says: as many as read files, also those of a watch or a queue, or the messages of a run; 0
                for a consumer group and for sources of your own. Batches, their order and positions do not
                depend on it. A batch of data that arrives as it happens never waits for later records.
        """
        if threads is not None and threads < 0:
            raise ConfigError(f"pipeline: threads must be 0 or more, got {threads}")
        if isinstance(spec, FeatureSpec):
            batches = Batches(SpecBatches(self._source, spec, threads))
        else:
            batches = Batches(ColumnBatches(self._source, spec, threads))
        # Ready batches of a live stream would only get older.
        ahead = self._source.repeats_order and (self._source.batch_threads if threads is None else threads)
        return batches.prefetch(_BATCHES_AHEAD) if ahead else batches

    def ask_ahead(self, predicate: Predicate) -> Predicate:
        return self._source.ask_ahead(predicate)

    def __iter__(self) -> Iterator[Records]:
        return iter(self._source)


class Batches(Stage[Batch, Batch]):
    """Batches for a model, with the position of the records they were made of."""

    def prefetch(self, batches: int) -> Batches:
        """Prepare up to so many batches ahead in a thread of its own; 0 for none."""
        return Batches(_Ahead(self._source, batches))

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._source)


class _Mapped(Stage[Records, Records]):
    def __init__(self, source: Stream[Records], function: Map) -> None:
        super().__init__(source)
        self._function = function

    def size(self) -> int | None:
        return None  # a function may make any number of records

    def __iter__(self) -> Iterator[Records]:
        with closed_after(self._source) as batches:
            for records in batches:
                made = self._function(records)
                if not isinstance(made, Records):
                    raise DataError(f"pipeline: map must return Records, got {type(made).__name__}")
                if len(made):
                    yield made


class _Filtered(Stage[Records, Records]):
    def __init__(self, source: Stream[Records], predicate: Predicate, any_thread: bool) -> None:
        super().__init__(source)
        self._predicate = predicate
        self._any_thread = any_thread
        self._asked: Predicate | None = None

    def ask_ahead(self, predicate: Predicate) -> Predicate:
        return self._source.ask_ahead(predicate)

    def size(self) -> int | None:
        return None

    def __iter__(self) -> Iterator[Records]:
        if self._asked is None:
            ahead = self._any_thread
            self._asked = self._source.ask_ahead(self._predicate) if ahead else self._predicate
        with closed_after(self._source) as batches:
            for records in batches:
                kept = records.keep(self._asked(records.glance()))
                if len(kept):
                    yield kept


class _Watched(Stage[Records, Records]):
    def __init__(self, source: Stream[Records], line: ProgressLine, event_time: str) -> None:
        super().__init__(source)
        self._line = line
        self._event_time = event_time

    def ask_ahead(self, predicate: Predicate) -> Predicate:
        return self._source.ask_ahead(predicate)

    def __iter__(self) -> Iterator[Records]:
        with closed_after(self._source) as batches:
            for records in batches:
                column = records.columns.get(self._event_time) if self._source.live is not False else None
                times = () if column is None else column.flat_values.tolist()
                self._line.advance(len(records), max(times, default=None))
                yield records
        self._line.finish()


class ProgressLine:
    """Prints a line whenever `every` has passed: records, records per second, and the lag of event time.

    The rate is that of the time since the last line, so that a stall shows.
    """

    def __init__(
        self,
        label: str,
        *,
        every: timedelta,
        clock: Callable[[], float],
        timer: Callable[[], float],
        stream: TextIO,
    ) -> None:
        self._label = label
        self._every = every.total_seconds()
        self._clock, self._timer = clock, timer
        self._stream = stream
        self._began = self._printed = timer()
        self._total = self._since = 0
        self._newest: int | None = None

    def advance(self, records: int, event_time: int | None = None) -> None:
        """Count records, the newest of which happened at `event_time`, in Unix seconds."""
        self._total += records
        self._since += records
        if event_time is not None:
            self._newest = event_time
        now = self._timer()
        if now - self._printed >= self._every:
            self._print(self._since / max(now - self._printed, 1e-9))
            self._printed, self._since = now, 0

    def finish(self) -> None:
        """Print the sum, if there was a line before."""
        if self._printed > self._began:
            self._print(self._total / max(self._timer() - self._began, 1e-9), "done")

    def _print(self, rate: float, ending: str = "") -> None:
        parts = [describe_amount(self._total, None, "records"), describe_rate(rate, "records")]
        if self._newest is not None:
            parts.append(f"{describe_seconds(max(self._clock() - self._newest, 0))} behind")
        if ending:
            parts.append(ending)
        print(f"{self._label}: {', '.join(parts)}", file=self._stream, flush=True)


class _Ahead(Stage[Item, Item]):
    """Reads ahead in a thread; its position is that of its consumer."""

    def __init__(self, source: Stream[Item], capacity: int) -> None:
        if capacity < 0:
            raise ConfigError(f"pipeline: cannot read {capacity} batches ahead")
        super().__init__(source)
        self._capacity = capacity
        self._running: Prefetched | None = None
        self._position: Position | None = None  # None: that of the source

    def __iter__(self) -> Iterator[Item]:
        if self._running is None:
            # The thread owns the source from here on, so its position is asked for now. From then on the
            # position travels with each item: asking the source would return how far the thread has read.
            self._position = self._source.position()
            self._running = prefetch(_with_positions(self._source), self._capacity)
        while True:
            try:
                # The position after this item, taken by the thread when it read the item.
                item, here = next(self._running)
                self._position = here.position
            except StopIteration:
                break
            except BaseException:
                self._stop()
                raise
            yield item  # a consumer that stops here resumes with the prefetched items
            if self._running is None:
                raise DataError("pipeline: restored or closed while it was being read")
        self._running = None
        self._position = None

    def position(self) -> Position:
        return super().position() if self._position is None else self._position

    def restore(self, position: Position) -> None:
        self._stop()
        super().restore(position)
        self._position = None

    def redistribute(self, positions: Sequence[Position], workers: int) -> list[Position]:
        self._stop()
        return super().redistribute(positions, workers)

    def close(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None
        super().close()

    def _stop(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None
            # The prefetched items are dropped; the next iteration reads them again.
            assert self._position is not None
            self._source.restore(self._position)


class _Here:
    """A position on its way to another thread, which need not look for tensors among its many numbers."""

    __slots__ = ("position",)

    def __init__(self, position: Position) -> None:
        self.position = position


def _with_positions(source: Stream[Item]) -> Iterator[tuple[Item, _Here]]:
    # Not a method: a thread that held the stage would keep it, and so itself, alive for ever.
    with closed_after(source) as items:
        for item in items:
            yield item, _Here(source.position())
