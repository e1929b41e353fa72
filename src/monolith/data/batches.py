"""Batches: records become the input of a model, and bad ones are dropped.

Two specs describe a batch: a `BatchSpec` names columns of ids and numbers, a `FeatureSpec` reads raw columns.
Either way a record that cannot be used is dropped, counted and rejected to the source (`bad_values`), and the
batch may carry raw columns of its records in addition to its tensors (`Batch.raw`).

    records ──maker──► Batch(ids: ragged int64 per feature, labels: float32 (n,) each, raw: columns kept)
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from monolith.concurrency import Event, Future, ThreadPoolExecutor
from monolith.data.bad_values import BadRecords, BadTally, BadValues
from monolith.data.format import BadRecord
from monolith.data.live_ahead import InWork, LiveAhead
from monolith.data.records import (
    BatchMaker,
    BatchSpec,
    ColumnCheck,
    Records,
    empty_rows,
    known_columns,
)
from monolith.data.source import Position, Stage, Stream, closed_after
from monolith.errors import DataError
from monolith.feature import Batch, FeatureSpec
from monolith.feature.spec.reading import Reading

_CLOSE_S = 5.0
"""How long `close` waits for a thread that reads the source, before it closes that."""


class BatchStage(Stage[Batch, Records]):
    """The stage that makes batches of records; one record batch becomes at most one batch.

    With threads, the work on records that needs no order is done ahead, several batches at a time. What has
    an order (which columns were seen, how many records were bad) is done here, batch by batch, so results do
    not depend on the number of threads:

        upstream ──records──► threads: work ──in order──► bad records dropped, Batch

    The upstream is then ahead of the consumer, so this stage keeps the position of the consumer itself. Data
    that waits for nothing but its own reading (`repeats_order`) is read by the thread that iterates. Other
    data may have nothing for now, while batches are ready: a thread of its own reads it (`LiveAhead`), until
    this stage is restored or closed, or the data ends.

    Args:
        threads: None asks the upstream when reading begins.
    """

    def __init__(self, source: Stream[Records], threads: int | None) -> None:
        super().__init__(source)
        self._threads = threads
        self._position: Position | None = None  # of the consumer; None: that of the upstream
        self._ahead: LiveAhead[Any] | None = None
        self._until = Event()
        """Set to read no more in place of waiting."""
        self._resumed = False
        self._raw: PassThroughColumns | None = None
        self._dropped = BadTally()  # since the last time reading began

    @abstractmethod
    def _maker(self) -> ColumnBatchMaker | SpecBatchMaker:
        """Return the batch maker of one iteration."""

    @abstractmethod
    def _work(self) -> Callable[[Records], Any]:
        """Return what does the work on some records that needs no order, on any thread; the maker takes its
        result. It does not refer to this stage, which can then be forgotten while it is being read."""

    def __iter__(self) -> Iterator[Batch]:
        threads = self._source.batch_threads if self._threads is None else self._threads
        if threads and not self._source.repeats_order:
            yield from self._made_of_live(threads)
            return
        make, until = self._maker(), self._until
        self._dropped = make.tally
        if not threads:
            with closed_after(self._source) as batches:
                for each in batches:
                    made = make(each)
                    if made is not None:
                        yield made
            if not until.is_set():
                make.end()
            return
        with closing(self._pulled(threads)) as started:
            for one in started:
                made = make(one.records, one.work)
                self._position = one.position
                if made is not None:
                    yield made
        if not until.is_set():
            make.end()
        self._position = None

    def _pulled(self, threads: int) -> Generator[InWork[Any]]:
        """Read records in this thread, as far ahead as threads have work."""
        self._return_to_consumer()
        work, started = self._work(), deque[InWork[Any]]()
        pool = ThreadPoolExecutor(threads, "monolith-batch")
        try:
            with closed_after(self._source) as batches:
                self._position = self._source.position()
                ended = False
                while started or not ended:
                    # One more than threads, so that each has work while the oldest is waited for.
                    while not ended and len(started) <= threads:
                        records = next(batches, None)
                        if records is None:
                            ended = True
                        else:
                            reading = pool.submit(work, records)
                            started.append(InWork(records, reading, self._source.position()))
                    if started:
                        yield started.popleft()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _made_of_live(self, threads: int) -> Iterator[Batch]:
        ahead = self._ahead
        if ahead is None or ahead.closed:
            self._return_to_consumer()
            self._position = self._source.position()
            self._ahead = ahead = LiveAhead(self, self._source, self._work(), threads)
        make = self._maker()
        self._dropped = make.tally
        while True:
            try:
                one = ahead.take(self._until)
                if one is None:
                    if self._until.is_set():
                        return  # a later iteration continues with what is read ahead
                    break
                made = make(one.records, one.work)
            except BaseException:
                ahead.close()  # records read ahead are dropped; the next iteration reads them again
                raise
            self._position = one.position
            if made is not None:
                yield made  # a consumer that stops here resumes with the records read ahead
        self._stop()
        make.end()
        self._position = None

    def _return_to_consumer(self) -> None:
        """Move the upstream to the position of the consumer, if it was read further."""
        self._stop()
        if self._position is not None and self._source.position() != self._position:
            self._source.restore(self._position)

    def _stop(self) -> None:
        """Return when no other thread reads the upstream."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return
        ahead.close()
        if ahead.join():
            self._source.read_until(self._until)
        else:
            self._ahead = ahead
            raise DataError(
                "pipeline: the source is still being read by a thread that waits for data, so it cannot be "
                "read from another place; make a new one"
            )

    def read_until(self, stop: Event) -> None:
        self._until = stop
        if self._ahead is None:  # otherwise the source belongs to the thread that reads it
            super().read_until(stop)

    def position(self) -> Position:
        return super().position() if self._position is None else self._position

    def restore(self, position: Position) -> None:
        self._stop()
        super().restore(position)
        self._position = None
        self._resumed = True

    def redistribute(self, positions: Sequence[Position], workers: int) -> list[Position]:
        self._stop()
        self._position = None
        return super().redistribute(positions, workers)

    def close(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()
            ahead.join(_CLOSE_S)
        super().close()

    def keep_columns(self, names: Sequence[str]) -> bool:
        self._raw = PassThroughColumns(names)
        return True

    def bad_records(self) -> dict[str, int]:
        return dict(Counter(super().bad_records()) + Counter(self._dropped.described()))


class ColumnBatches(BatchStage):
    """Batches by a `BatchSpec`."""

    def __init__(self, source: Stream[Records], spec: BatchSpec, threads: int | None = 0) -> None:
        super().__init__(source, threads)
        self._spec = spec
        self._make = BatchMaker(spec)

    @property
    def spec(self) -> BatchSpec:
        return self._spec

    def _work(self) -> Callable[[Records], None]:
        return _move_values

    def _maker(self) -> ColumnBatchMaker:
        bad = BadValues(self._spec, self.reject, first_empty=self._source.find_empty_cell)
        return ColumnBatchMaker(self._make, bad, self._raw)

    def restore(self, position: Position) -> None:
        super().restore(position)
        self._make = BatchMaker(self._spec, resumed=True)

    def allow_missing_labels(self) -> None:
        super().allow_missing_labels()
        labels = (column for column, _ in self._spec.labels.values())
        optional = dict.fromkeys([*self._spec.optional, *labels])
        self._spec = replace(self._spec, optional=tuple(optional))
        self._make = BatchMaker(self._spec, resumed=self._resumed)


class SpecBatches(BatchStage):
    """Batches by a `FeatureSpec`."""

    def __init__(self, source: Stream[Records], spec: FeatureSpec, threads: int | None = 0) -> None:
        super().__init__(source, threads)
        self._spec = spec

    @property
    def spec(self) -> FeatureSpec:
        return self._spec.raw

    def _work(self) -> Callable[[Records], Reading]:
        return self._spec.reader.read

    def _maker(self) -> SpecBatchMaker:
        return SpecBatchMaker(
            self._spec,
            self.reject,
            resumed=self._resumed,
            raw=self._raw,
            first_empty=self._source.find_empty_cell,
        )

    def allow_missing_labels(self) -> None:
        super().allow_missing_labels()
        optional = dict.fromkeys([*self._spec.optional, *self._spec.targets])
        self._spec = replace(self._spec, optional=tuple(optional))


class ColumnBatchMaker:
    """Makes batches by a `BatchSpec`.

    Args:
        make: Keeps which columns it has seen, from one iteration to the next.
    """

    def __init__(self, make: BatchMaker, bad: BadValues, raw: PassThroughColumns | None) -> None:
        self._make, self._bad, self._raw = make, bad, raw

    @property
    def tally(self) -> BadTally:
        return self._bad.tally

    def __call__(self, records: Records, moved: Future[None] | None = None) -> Batch | None:
        """Return a batch of the good records; None if all are bad.

        Args:
            moved: Is done when a thread has moved the values of the records, if one does.
        """
        if moved is not None:
            moved.result()
        good = self._bad.good(records)
        if len(records) and not len(good):
            return None
        batch = self._make(good)
        return batch if self._raw is None else self._raw.attach(batch, good)

    def end(self) -> None:
        self._bad.judge(at_end=True)
        self._make.end()


class PassThroughColumns:
    """Raw columns that batches carry, so that a prediction can name its user or item as the data does."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(dict.fromkeys(names))
        self._kinds: dict[str, torch.dtype] = {}
        """The types of the columns seen so far."""

    def attach(self, batch: Batch, records: Records) -> Batch:
        """Return a batch with the columns of its records; a name that only a feature has is not a column.

        Raises:
            DataError: There is no such column; names the nearest.
        """
        raw, records = {}, records.glance()
        for name in self._names:
            if name in records.columns:
                raw[name] = records[name]
                self._kinds[name] = raw[name].dtype
            elif name in self._kinds and not records.complete:
                raw[name] = empty_rows(self._kinds[name], len(records))
            elif name not in batch.ids.names:
                there = known_columns(name, records.columns, "it has")
                raise DataError(f"the data has no column {name!r} to pass through; {there}")
        kinds = {name: kind for name, kind in records.kinds.items() if name in raw}
        return replace(batch, raw=raw, raw_kinds=kinds)


class SpecBatchMaker:
    """Makes batches of a stream of records; see `ColumnCheck` for columns that the stream does not have.

    A record that cannot be read as the spec says (a word where a number should be, no label, a list of
    another length than its weights) is dropped and counted; see `FeatureSpec.max_bad`.

    Args:
        reject: Given bad records, with their values as JSON.
        resumed: Whether earlier records were read before a restart, so a column may have been in those.
        raw: Attaches raw columns to each batch.
        first_empty: See `BadRecords`.
    """

    def __init__(
        self,
        spec: FeatureSpec,
        reject: Callable[[Sequence[BadRecord]], None],
        *,
        resumed: bool = False,
        raw: PassThroughColumns | None = None,
        first_empty: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        self._spec = spec
        self._raw = raw
        self._resumed = resumed
        self._required = frozenset(spec.required)
        self._check = _check_of(spec)
        self._bad = BadRecords(
            spec.max_bad,
            reject,
            what="cannot be read as the features say",
            advice="Mend the data, change the features, or allow more with examples.max_bad of the config, "
            "which is max_bad of a FeatureSpec. Where a task can do without a label, name its column in "
            "examples.optional.",
            first_empty=first_empty,
            told=spec.reader.told,
        )

    @property
    def tally(self) -> BadTally:
        """Why records were dropped."""
        return self._bad.tally

    def __call__(self, records: Records, started: Future[Reading] | None = None) -> Batch | None:
        """Return a batch of the good records; None if all are bad.

        Args:
            started: What a thread reads of them, if one does.

        Raises:
            DataError: A column is missing, or of another type than the spec says.
            TooManyBadRecordsError: More are bad than are allowed.
        """
        if not records.complete:
            self._check.look(records)
        elif not self._required <= records.columns.keys():  # one file may lack what the one before has
            _check_of(self._spec).look(records)
        self._bad.see(len(records))
        reading = self._spec.reader.read(records) if started is None else started.result()
        if reading.bad:
            records = self._bad.leave_out(records, dict(sorted(reading.bad.items())), reading.no_label)
            if not len(records):
                return None
            reading = self._spec.reader.read(records)
        batch = self._spec.reader.batch(reading)
        return batch if self._raw is None else self._raw.attach(batch, records)

    def end(self) -> None:
        """Check the whole stream, after its last record.

        Raises:
            DataError: None of the records had a column that is not optional.
            TooManyBadRecordsError: Too many of all of them were bad.
        """
        self._bad.judge(at_end=True)
        self._spec.reader.empty.tell()
        if not self._resumed:
            self._check.end()


def _move_values(records: Records) -> None:
    """Move the values of all columns, which happens when the first is asked for."""
    next(iter(records.columns.values()), None)


def _check_of(spec: FeatureSpec) -> ColumnCheck:
    optional = "examples.optional = [{}] in the config, or optional=[{}] of a FeatureSpec"
    return ColumnCheck("features", spec.required, optional)
