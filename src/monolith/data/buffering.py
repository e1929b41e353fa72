"""Stages that buffer records: batches of another size, records in another order, only the first records.

The upstream of such a stage has come further than its consumer. So the position of the stage is one of the
upstream, from before the oldest buffered record, and how many of the records after it were yielded:

    upstream position          stage position                upstream's current position
         |  skip records: yielded  |  buffered, not yielded yet  |
         +-------------------------+-----------------------------+

Restoring reads the `skip` records again and drops them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from monolith.data.records import Records
from monolith.data.shuffling import (
    Batcher,
    Block,
    Epochs,
    ShuffleConfig,
    ShuffledBlock,
    Shuffler,
    permutation,
)
from monolith.data.source import Position, Predicate, Stage, WorkQueueSource, closed_after
from monolith.errors import ConfigError, DataError, NotRepeatableError, RestoreError


@dataclass(frozen=True, slots=True)
class _Cursor:
    """A cursor: so many records after a position of the upstream.

    After the number of workers has changed, a new worker first reads the records that stages of former
    workers had buffered. Each of these is a detour, read from the old worker's position; then the worker's
    own data follows.

        detour ──all its records──► next detour ──...──► `then`: the worker's own position of the upstream
    """

    source: Position
    skip: int = 0
    numbers: Mapping[str, int] = field(default_factory=dict)
    """The numbers of the stage where a detour begins; see `BufferedStage._numbers`."""
    detour: int | None = None
    """Records from the position of the upstream to the end of the detour; None outside of detours."""
    detours: tuple[Position, ...] = ()
    """The detours after this one, as positions of the stage."""
    then: Position | None = None
    """The position of the upstream after all detours."""

    def saved(self) -> Position:
        found: Position = {"source": self.source, "skip": self.skip}
        if self.then is not None:
            found |= {"detour": self.detour, "detours": list(self.detours), "then": self.then}
        return found

    @property
    def detours_left(self) -> int:
        return 0 if self.detour is None else 1 + len(self.detours)

    def after_detour(self) -> _Cursor:
        """Return the cursor after the current detour."""
        assert self.then is not None
        if not self.detours:
            return _Cursor(self.then)
        first, *rest = self.detours
        numbers = {
            name: one for name, one in first.items() if name not in ("stage", "source", "skip", "detour")
        }
        return _Cursor(first["source"], first["skip"], numbers, first["detour"], tuple(rest), self.then)

    def within(self, source: Position, skip: int, passed: int) -> _Cursor:
        """Return a cursor `passed` records further, in the same detour if this is in one."""
        if self.detour is None:
            return _Cursor(source, skip)
        if not passed and skip == self.skip:
            return self  # with the numbers of its beginning
        return replace(self, source=source, skip=skip, numbers={}, detour=self.detour - passed)


class BufferedStage(Stage[Records, Records]):
    """A stage whose upstream has come further than its consumer."""

    kind = ""
    """The name of the stage in positions."""

    def __init__(self, source: Iterable[Records]) -> None:
        super().__init__(source)
        self._here: _Cursor | None = None  # None: nothing is buffered, so it is where the upstream is

    @property
    def work_queue(self) -> WorkQueueSource | None:
        return None  # the buffered records cannot be given back

    def ask_ahead(self, predicate: Predicate) -> Predicate:
        return self._source.ask_ahead(predicate)

    def fraction_read(self, position: Position, records: int = 0) -> float | None:
        return self._source.fraction_read(position["source"], position["skip"] + records)

    def position(self) -> Position:
        return {"stage": self.kind, **self._cursor().saved(), **self._numbers()}

    def restore(self, position: Position) -> None:
        names = ("skip", *self._numbers())
        if not isinstance(position, Mapping) or position.get("stage") != self.kind:
            raise RestoreError(
                f"cannot restore a pipeline: {position!r:.200} is not a position of its stage {self.kind!r}"
            )
        # A position comes from a file: numbers are checked here, the cursor below, before anything changes.
        numbers = {name: position.get(name) for name in names}
        if not all(isinstance(number, int) and number >= 0 for number in numbers.values()):
            raise RestoreError(f"cannot restore a pipeline: stage {self.kind!r} finds {numbers}")
        self._check(numbers)
        cursor = self._read_cursor(position)
        # The upstream first: if it refuses the position, this stage is unchanged.
        self._source.restore(cursor.source)
        self._here = cursor
        self._set_numbers(numbers)

    def _read_cursor(self, position: Position) -> _Cursor:
        below: Any = position.get("source")
        cursor = _Cursor(below, int(position["skip"]))
        if "then" not in position:
            return cursor
        detour, detours = position.get("detour"), position.get("detours")
        if not isinstance(detour, int) or not isinstance(detours, list):
            raise RestoreError(f"cannot restore a pipeline: stage {self.kind!r} finds malformed detours")
        return replace(cursor, detour=detour, detours=tuple(detours), then=position["then"])

    def commit(self, position: Position) -> None:
        # In a detour the position of the upstream is one of an old worker, which has committed it already.
        if "then" not in position:
            self._source.commit(position["source"])

    def redistribute(self, positions: Sequence[Position], workers: int) -> list[Position]:
        """Redistribute the unread data of the upstream; buffered records become detours of new workers."""
        detours: list[Position] = []
        ends: list[Position] = []
        for position in positions:
            *buffered, end = self._split_off_buffered(position)
            detours += buffered
            ends.append(end)
        return [
            self._begin(detours[worker::workers], below)
            for worker, below in enumerate(self._source.redistribute(ends, workers))
        ]

    def adopt(self, position: Position, end: Position | None = None) -> Position:
        if "then" in position:  # its detours were adopted already
            return {**position, "then": self._source.adopt(position["then"])}
        # If records are buffered at the end, the upstream was further on, and it is unknown how far.
        until = None if end is None or end["skip"] or end.get("length") else end["source"]
        return {**position, "source": self._source.adopt(position["source"], until)}

    def _split_off_buffered(self, position: Position) -> list[Position]:
        """Return the records buffered at a position as detours; and last, the upstream position after them.

        To find that last position, the upstream is read from the old worker's position once more.
        """
        if not (position.get("skip") or position.get("length") or "then" in position):
            return [position["source"]]
        self.restore(self.adopt(position))
        cursor = self._cursor()
        if cursor.then is not None:
            first = {
                "stage": self.kind,
                "source": cursor.source,
                "skip": cursor.skip,
                "detour": cursor.detour,
            }
            return [{**first, **self._numbers()}, *cursor.detours, cursor.then]
        # Read on until the buffered records are passed; there the upstream has a position of its own again.
        wanted, passed = cursor.skip + self._numbers().get("length", 0), 0
        with closed_after(self._source) as batches:
            while passed < wanted:
                records = next(batches, None)
                if records is None:
                    raise _changed(wanted - passed)
                passed += len(records)
            end = self._source.position()
        if passed == cursor.skip:
            return [end]
        begin = self._source.adopt(cursor.source, end)
        return [
            {"stage": self.kind, "source": begin, "skip": cursor.skip, "detour": passed, **self._numbers()},
            end,
        ]

    def _begin(self, detours: Sequence[Position], below: Position) -> Position:
        """Return the position of a new worker, whose upstream begins at `below`."""
        fresh: Position = {"stage": self.kind, "source": below, "skip": 0, **self._fresh()}
        if not detours:
            return fresh
        return {**fresh, **detours[0], "detours": list(detours[1:]), "then": below}

    def _fresh(self) -> dict[str, int]:
        """Return the numbers of a position at which nothing is buffered."""
        return {}

    def _numbers(self) -> dict[str, int]:
        """Return the numbers that a position has in addition to `skip`."""
        return {}

    def _check(self, numbers: Mapping[str, Any]) -> None:
        """Refuse numbers that make no sense."""

    def _set_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Resume from these numbers."""

    def _cursor(self) -> _Cursor:
        return _Cursor(self._source.position()) if self._here is None else self._here

    def _blocks(self, *, length: int = 0, taken: int = 0) -> Iterator[Block[_Cursor]]:
        """Yield the blocks of the upstream from the current cursor on.

        Args:
            length, taken: Of the shuffled block that starts there, if one was started before a restart.
        """
        here = self._cursor()
        while here.detour is not None:
            yield from self._blocks_from(here, length, taken)
            here = here.after_detour()
            length, taken = here.numbers.get("length", 0), here.numbers.get("taken", 0)
        yield from self._blocks_from(here, length, taken)

    def _blocks_from(self, here: _Cursor, length: int, taken: int) -> Iterator[Block[_Cursor]]:
        """Yield blocks from a cursor on: to the end of the data, or of the detour if the cursor is in one."""
        # After a restore the upstream is already there; after an iteration that stopped early it is not.
        if self._source.position() != here.source:
            self._source.restore(here.source)  # it was read further than was yielded
        before, passed = here, 0
        with closed_after(self._source) as batches:
            for records in batches:
                # `before` is the last cursor of which the upstream position is known; the batch begins
                # `passed` records after it. The records before `first` were yielded before a restart.
                first = max(before.skip - passed, 0)
                if first < len(records):
                    yield Block(records, self._cursors(before, passed, len(records)), first, length, taken)
                    length = taken = 0
                passed += len(records)
                if before.detour is not None and passed >= before.detour:
                    return
                # The base moves only past the skipped records: until then `skip` counts from it.
                if passed >= before.skip:
                    before, passed = before.within(self._source.position(), 0, passed), 0
        if before.skip or before.detour is not None:
            raise _changed((before.detour or before.skip) - passed)

    def _cursors(self, before: _Cursor, passed: int, size: int) -> Callable[[int], _Cursor]:
        """Return the cursors within a batch that begins `passed` records after another cursor."""

        def cursor(number: int) -> _Cursor:
            if number < size:
                return before.within(before.source, passed + number, 0)
            if before.detour is not None and passed + size >= before.detour:
                return before.after_detour()
            return before.within(self._source.position(), 0, passed + size)

        return cursor


def _changed(missing: int) -> DataError:
    return DataError(
        f"pipeline: {missing} records fewer than when the position was saved; the data has changed"
    )


class Rebatched(BufferedStage):
    """Batches of exactly `size` records; only the last is shorter."""

    kind = "rebatch"

    def __init__(self, source: Iterable[Records], size: int, drop_remainder: bool) -> None:
        super().__init__(source)
        if size < 1:
            raise ConfigError(f"pipeline: a batch needs a record at least, got {size}")
        self._size = size
        self._drop_remainder = drop_remainder

    def __iter__(self) -> Iterator[Records]:
        batcher: Batcher[_Cursor] = Batcher(self._size)
        with closed_after(self._blocks()) as blocks:
            for block in blocks:
                for batch, self._here in batcher.add(block):
                    yield batch
        self._here = None
        if (rest := batcher.rest()) is not None and not self._drop_remainder:
            yield rest


class Shuffled(BufferedStage):
    """Blocks of `buffer` records, each permuted by the seed and its number."""

    kind = "shuffle"

    def __init__(self, source: Iterable[Records], config: ShuffleConfig) -> None:
        super().__init__(source)
        self._config = config
        self._number = self._taken = self._length = 0

    def read_epochs(self, epochs: Epochs) -> None:
        super().read_epochs(replace(epochs, buffer=0))  # this stage shuffles, so the source need not

    def __iter__(self) -> Iterator[Records]:
        shuffler: Shuffler[_Cursor] = Shuffler(
            self._config.buffer,
            lambda _, size: permutation(size, self._config.seed, self._number),
            lambda _: "pipeline: the source",
        )
        step = 1
        with closed_after(self._blocks(length=self._length, taken=self._taken)) as blocks:
            for block in blocks:
                step = max(step, len(block.records) - block.first)
                begun, here = shuffler.begin, block.cursor(block.first)
                if begun is not None and begun.detours_left != here.detours_left:
                    # A shuffled block ends with its detour: it could not be moved to another worker
                    # otherwise.
                    short = shuffler.end(here)
                    assert short is not None
                    yield from self._in_batches(short, step)
                for shuffled in shuffler.add(block):
                    yield from self._in_batches(shuffled, step)
        last = shuffler.end(_Cursor(self._source.position()))
        if last is not None:
            yield from self._in_batches(last, step)
        self._here = None

    def _in_batches(self, block: ShuffledBlock[_Cursor], step: int) -> Iterator[Records]:
        """Yield a shuffled block in batches as large as those of the upstream."""
        size = len(block.records)
        for first in range(block.first, size, step):
            last = min(first + step, size)
            # The position is set before the yield: while the consumer has this batch, it is behind it.
            if last < size:
                self._here, self._taken, self._length = block.begin, last, size
            else:
                self._here, numbers = block.end, block.end.numbers
                self._taken, self._length = numbers.get("taken", 0), numbers.get("length", 0)
                self._number = numbers.get("number", self._number + 1)
            yield block.records.slice(first, last)

    def fraction_read(self, position: Position, records: int = 0) -> float | None:
        return super().fraction_read(position, position["taken"] + records)

    def _numbers(self) -> dict[str, int]:
        seed = self._config.seed
        return {"number": self._number, "taken": self._taken, "length": self._length, "seed": seed}

    def _fresh(self) -> dict[str, int]:
        return {"number": 0, "taken": 0, "length": 0, "seed": self._config.seed}

    def _check(self, numbers: Mapping[str, Any]) -> None:
        if numbers["seed"] != self._config.seed:
            raise RestoreError(
                f"cannot restore a pipeline: it was shuffled with seed {numbers['seed']}, "
                f"this one has {self._config.seed}"
            )

    def _set_numbers(self, numbers: Mapping[str, Any]) -> None:
        self._number, self._taken, self._length = numbers["number"], numbers["taken"], numbers["length"]


class Taken(BufferedStage):
    """The first `records` records."""

    kind = "take"

    def __init__(self, source: Iterable[Records], records: int) -> None:
        super().__init__(source)
        if records < 0:
            raise ConfigError(f"pipeline: cannot take {records} records")
        self._records = records
        self._taken = 0

    def size(self) -> int | None:
        below = super().size()
        return None if below is None else min(below, self._records)

    def fraction_read(self, position: Position, records: int = 0) -> float | None:
        """Return the fraction of the records to take, or of the input if that ends first."""
        below = super().fraction_read(position, records)
        taken = (position["taken"] + records) / self._records if self._records else 1.0
        return min(1.0, taken if below is None else max(taken, below))

    def read_epochs(self, epochs: Epochs) -> None:  # noqa: ARG002
        raise NotRepeatableError(
            f"take({self._records}) of a pipeline ends the data after so many records, so it cannot be read "
            "several times"
        )

    def __iter__(self) -> Iterator[Records]:
        if self._taken >= self._records:
            return
        with closed_after(self._blocks()) as blocks:
            for block in blocks:
                # The position moves before the yield, as in every stage.
                end = min(len(block.records), block.first + self._records - self._taken)
                self._taken += end - block.first
                self._here = None if end == len(block.records) else block.cursor(end)
                yield block.records.slice(block.first, end)
                if self._taken == self._records:
                    return

    def redistribute(self, positions: Sequence[Position], workers: int) -> list[Position]:  # noqa: ARG002
        raise RestoreError(
            f"take({self._records}) of a pipeline counts the records of each worker, so another number of "
            "workers would read another number of records"
        )

    def _numbers(self) -> dict[str, int]:
        return {"taken": self._taken}

    def _set_numbers(self, numbers: Mapping[str, Any]) -> None:
        self._taken = numbers["taken"]
