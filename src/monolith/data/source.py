"""The source seam: a stream of records with a position that can be saved and restored.

A trainer that is killed must resume with the first record that it has not trained on. So a source can report
its position at any time, and a new source of the same kind and settings, restored to that position, yields
exactly the remaining records, whatever the number of threads or the size of buffers.

    ┌── open ──read_shard(), read_epochs()──► open ──first read, position() or restore()──► settled ──┐
    │   a constructor opens no file, broker or queue                  too late for the other two      │
    └──────────────────────────────────────────────────────────────────────────────────────close()────┘

Workers that train together must not read the same records. A task does not know about that: it makes its
stream as if it were the only worker, and the run assigns each worker a `Shard` before the first read:

    stream = task.dataset(Mode.TRAIN)
    stream.read_shard(Shard(1, 4))      # its FileSource reads every fourth file

Derive a source of your own from `Source` and implement `__iter__`, `position` and `restore`. All other
methods are optional abilities with a default: a source that does not override `read_shard`, for example,
cannot be split among several workers, and the run says so. An object that is not derived from `Source` is
wrapped once, by `as_stream`, when it enters a pipeline or a run. Every implementation passes
`tests/contracts/test_source.py`.

    class Squares(Source):
        def __init__(self):
            self._next = 0

        def __iter__(self):
            while self._next < 1000:
                self._next += 10
                yield to_records({"n": [n * n for n in range(self._next - 10, self._next)]})

        def position(self):
            return {"next": self._next}

        def restore(self, position):
            self._next = position["next"]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from monolith.concurrency import Event
from monolith.data.format import BadRecord
from monolith.data.records import BatchSpec, Records, checked_mask
from monolith.data.shuffling import Epochs
from monolith.errors import ConfigError, NotRepeatableError, NotShareableError, RestoreError
from monolith.feature import FeatureSpec

T = TypeVar("T")
Item_co = TypeVar("Item_co", covariant=True)
In = TypeVar("In")

Position = dict[str, Any]
"""A place between two records, as plain values that survive JSON. A source of the same kind resumes there.

Positions are saved in checkpoints, so their keys never change their meaning."""


Predicate = Callable[[Records], Tensor]
"""Returns which records to keep: bool of shape (len(records),)."""


class Shard(NamedTuple):
    """One of several equal parts of the data: worker `worker` of `workers`.

    Examples:
        >>> from monolith import MemorySource, Shard
        >>> source = MemorySource({"user": [17, 18, 19, 20]}, batch_size=4)
        >>> source.read_shard(Shard(worker=1, workers=2))  # a run does this, before the first read
        >>> [records["user"].flat_values for records in source]
        [tensor([18, 20])]
    """

    worker: int = 0
    workers: int = 1


class ShardChoice:
    """The shard that one source reads: as its arguments say, otherwise as the run says, otherwise everything.

        open ──choose──► open ──settle, by the first read, position or restore──► settled for good

    Args:
        source: The name of the source in messages.
        worker: The `worker` argument of the source. Without `num_workers`, the run says how many there are.
        num_workers: The `num_workers` argument of the source.

    Raises:
        ConfigError: There is no such worker.
    """

    def __init__(self, source: str, worker: int | None = None, num_workers: int | None = None) -> None:
        self._source = source
        self._worker = worker
        self._chosen = Shard()
        self._settled: Shard | None = None
        self._fixed: Shard | None = None
        if num_workers is not None:
            self._fixed = self._checked(Shard(worker or 0, num_workers))
        elif worker is not None and worker < 0:
            raise ConfigError(f"{source}: there is no worker {worker}; the first is 0")

    @property
    def is_fixed(self) -> bool:
        """Whether the arguments of the source name the shard, so that the run has no choice."""
        return self._fixed is not None

    def choose(self, shard: Shard) -> None:
        """Choose the shard, on behalf of the run.

        Raises:
            ConfigError: There is no such shard, or the choice is settled.
        """
        if self._settled is not None:
            raise ConfigError(
                f"{self._source}: cannot read shard {shard.worker} of {shard.workers} now, it was read or "
                "asked for its position before; call read_shard() first"
            )
        self._chosen = self._checked(shard)

    def settle(self) -> Shard:
        """Return the shard, which stays the same from now on.

        Raises:
            ConfigError: The `worker` of the source is not one of the workers of the run.
        """
        if self._settled is None:
            self._settled = self._choice()
        return self._settled

    def _choice(self) -> Shard:
        if self._fixed is not None:
            return self._fixed
        if self._worker is None:
            return self._chosen
        if self._worker >= self._chosen.workers:
            raise ConfigError(
                f"{self._source}: there is no worker {self._worker} of {self._chosen.workers}; give "
                "num_workers with it"
            )
        return Shard(self._worker, self._chosen.workers)

    def _checked(self, shard: Shard) -> Shard:
        if shard.workers < 1 or not 0 <= shard.worker < shard.workers:
            raise ConfigError(f"{self._source}: there is no worker {shard.worker} of {shard.workers}")
        return shard


class Stream(ABC, Generic[Item_co]):
    """A sequence of items with a position: a source of records, or a stage on top of one.

    One thread reads a stream at a time. `Source` is a stream of `Records`; `to_batches` of a pipeline makes a
    stream of `Batch`.
    """

    @abstractmethod
    def __iter__(self) -> Iterator[Item_co]:
        """Yield items from the current position to the end of the data, if it has one.

        Iterating again continues from there. A consumer that stops early has consumed the yielded items.
        """

    @abstractmethod
    def position(self) -> Position:
        """Return the place before the first record that was not yielded yet.

        The trainer asks after every batch, whether or not it saves a checkpoint there: so this is cheap,
        writes no file and changes nothing. Everything that a restore needs is on disk, or in the position,
        when it is returned.
        """

    @abstractmethod
    def restore(self, position: Position) -> None:
        """Move to a position of a source of the same kind and settings, before or between iterations.

        Raises:
            RestoreError: The position is of another kind, or names data that is missing or not of this
                source. A position may come from another process: a source opens no file that it would not
                have found by itself.
        """

    def commit(self, position: Position) -> None:
        """Note that a checkpoint contains this position, so the records before it are never needed again.

        Only now may a queue finish files, a joiner delete older snapshots, a broker store offsets. Committing
        the same position twice does nothing more. Any thread may call it while another one reads.
        """

    def close(self) -> None:
        """Release files, threads and connections. Closing again does nothing."""

    def read_until(self, stop: Event) -> None:
        """End the iterations from now on, in place of waiting for data, once an event is set.

        Whatever the source waits for then, it stops within a second: new data, a server that does not answer,
        a retry. Iterating again continues from the position. A source that never waits need not do it.

        Other methods wait for no server any more, either: they raise `StoppedWhileWaitingError`.
        """
        del stop

    # For whom, which part of the data, and how often. All are called before the first use, or never.

    def read_for(self, run: str) -> None:
        """Name the run whose worker reads: one that is restarted has the same name, and no other run has it.

        A queue of files returns to a restarted worker what the process before it had leased.
        """
        del run

    def read_shard(self, shard: Shard) -> None:
        """Read one shard from now on: the shards of all workers together are the whole, without overlap.

        Arguments of the source that name a shard take precedence.

        Raises:
            ConfigError: There is no such shard; or the source was read, restored or asked for its position.
            NotShareableError: The data cannot be split among workers.
        """
        del shard
        raise NotShareableError(f"{_name(self)} cannot be split among workers: it has no read_shard()")

    def read_epochs(self, epochs: Epochs) -> None:
        """Read the data several times.

        Raises:
            NotRepeatableError: The data cannot be read again, as a live stream.
            ConfigError: It was read already, or has its own number of epochs.
        """
        del epochs
        raise NotRepeatableError(f"{_name(self)} cannot be read several times: it has no read_epochs()")

    def ask_ahead(self, predicate: Predicate) -> Predicate:
        """Return a predicate that says the same of the records of this stream, if it can be asked ahead.

        A source that parses on threads asks it there, about all records of a chunk at once. What it says
        stays with the records until it is their turn, so order, counts and positions do not change. An error
        comes when it is the turn of the records that it is about.

        Args:
            predicate: Returns a bool per record, which depends on the values of the record alone. Any thread
                may ask it.
        """
        return predicate

    # Facts about the data. All of these may be called from any thread.

    @property
    def live(self) -> bool | None:
        """Whether events arrive as they happen, so that the stream can lag behind the clock and pause.

        True for topics and watched files, False for a list of files or a table, None if unknown.
        """
        return None

    @property
    def batch_threads(self) -> int:
        """How many threads may make batches of its records ahead of their use, if `to_batches` does not say.

        The source is then read by another thread than the one that trains, and further than was trained. 0
        unless a source overrides it: it may count records as done that were read.
        """
        return 0

    @property
    def repeats_order(self) -> bool:
        """Whether a restored source yields the remaining records in exactly the order of before.

        True for lists of files, tables and generators. The partitions of a topic, the files of a queue and
        the splits of a data service keep their order only within each of them.
        """
        return False

    @property
    def sharded_by_key(self) -> bool:
        """Whether all records of one key are in the same shard, if their producer has keyed them.

        True for the partitions of a topic. A file may contain records of any key.
        """
        return False

    @property
    def reads_again(self) -> bool:
        """Whether it was made to read its data several times, so that records come again."""
        return False

    @property
    def spec(self) -> BatchSpec | FeatureSpec | None:
        """What its batches are made of records by; None for records, and for batches of other code."""
        return None

    def size(self) -> int | None:
        """Return the number of records from the beginning to the end; None if unknown or costly to find."""
        return None

    def fraction_read(self, position: Position, records: int = 0) -> float | None:
        """Return the fraction of the input, from 0 to 1, that precedes a position; None if unknown.

        It counts input, not output: a filter may drop any number of records.

        Args:
            position: A recent position of this stream.
            records: Records after the position that were yielded as well.
        """
        del position, records
        return None

    @property
    def trouble(self) -> str:
        """Says which operation fails now and is retried, for an operator; empty if all is well."""
        return ""

    # Bad records

    def reject(self, bad: Sequence[BadRecord]) -> None:
        """Count records that a later stage found bad, and quarantine them if this source has a quarantine.

        Another thread may read the source meanwhile.
        """

    def bad_records(self) -> dict[str, int]:
        """Return the causes for which records were dropped since reading began, each with its count."""
        return {}

    def find_empty_cell(self, column: str) -> str | None:
        """Return where the first empty cell of a column is, such as `line 7 of clicks.csv`; None if unknown.

        May read some files again.
        """
        del column
        return None

    # Options of the stage that makes batches of records

    def keep_columns(self, names: Sequence[str]) -> bool:
        """Make every batch carry these columns of its records in `Batch.raw`; return whether a stage can."""
        del names
        return False

    def allow_missing_labels(self) -> None:
        """Keep records without a label in the batches, as records to predict may have none."""

    # Another number of workers

    def redistribute(self, positions: Sequence[Position], workers: int) -> list[Position]:
        """Return the records that the old workers had left as the positions of another number of workers.

            3 positions of a checkpoint ──redistribute──► 2 positions, each restored like any other

        Exactly the remaining records move, in units that the source can name: files from the place reached,
        partitions. This may read data, and leaves the source anywhere: restore it afterwards.

        Args:
            positions: One of each old worker, in order.
            workers: The new number of workers; this source reads the shard of one of them.

        Raises:
            RestoreError: The positions cannot be redistributed.
        """
        del positions, workers
        raise _cannot_redistribute(self)

    def adopt(self, position: Position, end: Position | None = None) -> Position:
        """Return a position from which this source yields the records that the worker of `position` would.

        A stage that buffers records needs it: the buffered records of an old worker are in the middle of a
        unit, so one of the new workers reads them first, from the shard of the old one.

        Args:
            end: A later position of the same worker. The records between the two come first, in any order.

        Raises:
            RestoreError: The position cannot be adopted.
        """
        del position, end
        raise _cannot_redistribute(self)

    @property
    def work_queue(self) -> WorkQueueSource | None:
        """The source whose work moves between workers while they read; None if shards are fixed.

        A stage that buffers records has none: buffered records cannot be given back.
        """
        return None

    @property
    def upstream(self) -> Stream[Any] | None:
        """The stream that this stage reads; None for a source."""
        return None


Source = Stream[Records]
"""A stream of `Records` with a position that can be saved and restored. Derive your own sources from it.

Examples:
    >>> from monolith import MemorySource, Source
    >>> class Squares(Source):
    ...     def __init__(self):
    ...         self._next = 0
    ...     def __iter__(self):
    ...         while self._next < 4:
    ...             self._next += 2
    ...             numbers = range(self._next - 2, self._next)
    ...             yield from MemorySource({"n": [n * n for n in numbers]}, batch_size=2)
    ...     def position(self):
    ...         return {"next": self._next}
    ...     def restore(self, position):
    ...         self._next = position["next"]
    >>> source = Squares()
    >>> next(iter(source))["n"].flat_values
    tensor([0, 1])
    >>> resumed = Squares()
    >>> resumed.restore(source.position())  # a checkpoint saves the position
    >>> [records["n"].flat_values for records in resumed]
    [tensor([4, 9])]
"""


class WorkQueueSource(ABC):
    """A source whose work may move from one worker to another while they read.

    A queue of files and the data service know which worker has which piece of work. The unfinished work of a
    worker that leaves or is lost is given back, and other workers get it. So the position of such a worker is
    of no use to a successor, which starts with nothing:

        with work ──position saved──► safe ──give_back(position)──► empty; the rest goes to any worker

    The chief gives work back, because it knows which positions were saved. A worker never does by itself.

    The partitions of a topic are known to no queue: the chief assigns them itself (`chief_assigns`). All
    workers quiesce and report their positions; the chief reassigns the partitions and the workers resume.

        one worker has all ──a worker joins, leaves or is lost──► reassign(positions, 3) ──► each has some
    """

    chief_assigns = False
    """Whether the chief assigns the work, by `collect` and `reassign`, instead of a queue or dispatcher."""

    @abstractmethod
    def give_back(self, position: Position) -> Position:
        """Return the unfinished work of a worker to the queue, from any thread, while this source is read.

        Args:
            position: Saved by any worker: the records before it are done.

        Returns:
            The position of a replacement of that worker: it has no work yet.
        """

    def take_back(self, others: Sequence[Position]) -> bool:
        """Return to the queue what other workers took from it and never trained, as the chief.

        For the end of a run, when every worker has trained all of its work and left. A process of an earlier
        attempt of the run that was cut off may have taken work since, and nothing it trains counts.

        Args:
            others: The last positions of the workers that left, without the chief's own.

        Returns:
            Whether there was any, so that the queue has work again.
        """
        del others
        return False

    @abstractmethod
    def defer_to_chief(self) -> None:
        """Leave it to the chief to give back this worker's work: closing the source keeps its leases.

        A source whose chief assigns the work reads only what its position names from now on.
        """

    @abstractmethod
    def interrupt(self) -> None:
        """Take no more work and wait for none, so that the current iteration ends. From any thread.

        A source whose chief assigns the work can be read again once it is restored.
        """

    def collect(self, positions: Sequence[Position]) -> Position:
        """Return all remaining work as the position of one worker. Only if the chief assigns.

        Args:
            positions: Saved together by all workers; none at the beginning of the data.

        Raises:
            RestoreError: They are of other data, or something is missing.
        """
        del positions
        raise _no_chief(self)

    def reassign(self, positions: Sequence[Position], workers: int) -> list[Position]:
        """Return the remaining work as positions of so many workers, some of which may be empty.

        Only if the chief assigns. From any thread, while this source is read: its own position stays.
        """
        del positions, workers
        raise _no_chief(self)


class AskedAhead:
    """A predicate that is asked by the threads that parse records, and answers from what was found then."""

    def __init__(self, predicate: Predicate) -> None:
        self._predicate = predicate

    def look(self, chunk: Records) -> None:
        """Ask about records that no other thread has yet."""
        with suppress(Exception):  # it comes again when it is the turn of these records
            chunk.mark(self, checked_mask(chunk, self._predicate(chunk.glance())))

    def __call__(self, records: Records) -> Tensor:
        found = records.marks(self)
        return self._predicate(records) if found is None else found


class Stage(Stream[Item_co], Generic[Item_co, In]):
    """A stream that reads another one and has the same position: it buffers nothing.

    Every ability is that of its upstream; a stage overrides those that it changes.
    """

    def __init__(self, source: Iterable[In]) -> None:
        self._source = as_stream(source)

    @property
    def upstream(self) -> Stream[In]:
        return self._source

    def position(self) -> Position:
        return self._source.position()

    def restore(self, position: Position) -> None:
        self._source.restore(position)

    def commit(self, position: Position) -> None:
        self._source.commit(position)

    def close(self) -> None:
        self._source.close()

    def read_until(self, stop: Event) -> None:
        self._source.read_until(stop)

    def read_for(self, run: str) -> None:
        self._source.read_for(run)

    def read_shard(self, shard: Shard) -> None:
        self._source.read_shard(shard)

    def read_epochs(self, epochs: Epochs) -> None:
        self._source.read_epochs(epochs)

    @property
    def live(self) -> bool | None:
        return self._source.live

    @property
    def batch_threads(self) -> int:
        return self._source.batch_threads

    @property
    def repeats_order(self) -> bool:
        return self._source.repeats_order

    @property
    def sharded_by_key(self) -> bool:
        return self._source.sharded_by_key

    @property
    def reads_again(self) -> bool:
        return self._source.reads_again

    @property
    def spec(self) -> BatchSpec | FeatureSpec | None:
        return self._source.spec

    def size(self) -> int | None:
        return self._source.size()

    def fraction_read(self, position: Position, records: int = 0) -> float | None:
        return self._source.fraction_read(position, records)

    @property
    def trouble(self) -> str:
        return self._source.trouble

    def reject(self, bad: Sequence[BadRecord]) -> None:
        self._source.reject(bad)

    def bad_records(self) -> dict[str, int]:
        return self._source.bad_records()

    def find_empty_cell(self, column: str) -> str | None:
        return self._source.find_empty_cell(column)

    def keep_columns(self, names: Sequence[str]) -> bool:
        return self._source.keep_columns(names)

    def allow_missing_labels(self) -> None:
        self._source.allow_missing_labels()

    def redistribute(self, positions: Sequence[Position], workers: int) -> list[Position]:
        return self._source.redistribute(positions, workers)

    def adopt(self, position: Position, end: Position | None = None) -> Position:
        return self._source.adopt(position, end)

    @property
    def work_queue(self) -> WorkQueueSource | None:
        return self._source.work_queue


def as_stream(items: Iterable[T]) -> Stream[T]:
    """Return an iterable as a stream: a `Stream` as it is, anything else wrapped.

    The wrapper uses the methods that the object has, such as `position` and `restore`, and the defaults of
    `Stream` for the rest. A plain iterable has the number of yielded items as its position.
    """
    return items if isinstance(items, Stream) else _Wrapped(items)


class _Wrapped(Stream[T]):
    """An object that is not derived from `Stream`. This is the only place that probes for methods."""

    _METHODS = (
        *("position", "restore", "commit", "close", "read_until", "read_for", "read_shard", "read_epochs"),
        *(
            "size",
            "fraction_read",
            "reject",
            "bad_records",
            "find_empty_cell",
            "keep_columns",
            "redistribute",
            "adopt",
        ),
    )

    def __init__(self, items: Iterable[T]) -> None:
        self._items = items
        self._yielded = self._skip = 0
        for name in self._METHODS:
            if hasattr(items, name):
                setattr(self, name, getattr(items, name))
        if hasattr(items, "read_share"):  # its name in earlier versions
            setattr(self, "read_shard", items.read_share)  # noqa: B010

    def __iter__(self) -> Iterator[T]:
        if hasattr(self._items, "position"):
            yield from self._items
            return
        for number, item in enumerate(self._items):
            if number >= self._skip:
                self._skip = self._yielded = number + 1
                yield item

    def position(self) -> Position:
        return {"source": "items", "next": self._yielded}

    def restore(self, position: Position) -> None:
        number = position.get("next") if position.get("source") == "items" else None
        if not isinstance(number, int) or number < 0:
            raise RestoreError(f"cannot restore {_name(self)}: {position!r:.200} is not a position of it")
        if isinstance(self._items, Iterator) and self._yielded:
            raise RestoreError(f"cannot restore {_name(self)}: an iterator cannot be read again")
        self._skip = self._yielded = number

    @property
    def live(self) -> bool | None:
        return getattr(self._items, "live", None)

    @property
    def repeats_order(self) -> bool:
        return bool(getattr(self._items, "repeats_order", False))


@contextmanager
def closed_after(items: Iterable[T]) -> Iterator[Iterator[T]]:
    """Give an iterator over the items; a generator is closed when the block ends, however it ends.

    Without it, files and threads of a generator stay open until the garbage collector finds it.
    """
    iterator = iter(items)
    try:
        yield iterator
    finally:
        if isinstance(iterator, Generator):
            iterator.close()


def _name(source: object) -> str:
    kind = type(source._items) if isinstance(source, _Wrapped) else type(source)
    return kind.__name__.lstrip("_")


def _no_chief(source: object) -> NotImplementedError:
    # Only a bug calls it: callers check `chief_assigns` first.
    return NotImplementedError(f"a queue assigns the work of {_name(source)}, not the chief")


def _cannot_redistribute(source: object) -> RestoreError:
    return RestoreError(f"{_name(source)} cannot redistribute positions among another number of workers")
