"""Stages that hold records back: batches of another size, records in another order, only the first ones.

The source of such a stage has come further than whoever reads from it. So its position is one of the source,
from before the oldest record that is held, and how many of those after it were delivered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from monolith.data.blocks import Batcher, Block, Shuffler, Stretch
from monolith.data.epochs import Epochs, read_epochs
from monolith.data.format import BadRecord
from monolith.data.iteration import closed_after
from monolith.data.layers import fraction_read, known_size
from monolith.data.records import Records
from monolith.data.redistribution import adopted, redistributed
from monolith.data.share import Share, share_out
from monolith.data.shuffling import ShuffleConfig, permutation
from monolith.data.source import Position, Source, commit_to, repeats_order, set_bad_aside
from monolith.errors import ConfigError, DataError, NotRepeatableError, RestoreError


@dataclass(frozen=True, slots=True)
class _Mark:
    """A place between two records: so many after a position of the source.

    Where the number of workers has changed, what a stage of one of the old ones held back comes first:

        detour ──its records are read──► next detour ──...──► `then`, where the source goes on by itself
    """

    source: Position
    skip: int = 0
    numbers: Mapping[str, int] = field(default_factory=dict)
    """What the stage goes on with here, where a detour begins; see `Holding._numbers`."""
    detour: int | None = None
    """Records from the position of the source to the end of a detour; None where this is not in one."""
    detours: tuple[Position, ...] = ()
    """Those that come after this one, as positions of the stage."""
    then: Position | None = None
    """Where the source goes on after all detours."""

    def saved(self) -> Position:
        found: Position = {"source": self.source, "skip": self.skip}
        if self.then is not None:
            found |= {"detour": self.detour, "detours": list(self.detours), "then": self.then}
        return found

    @property
    def detours_left(self) -> int:
        return 0 if self.detour is None else 1 + len(self.detours)

    def after_detour(self) -> _Mark:
        """Return the place after the detour that this is in."""
        assert self.then is not None
        if not self.detours:
            return _Mark(self.then)
        first, *rest = self.detours
        numbers = {
            name: one for name, one in first.items() if name not in ("stage", "source", "skip", "detour")
        }
        return _Mark(first["source"], first["skip"], numbers, first["detour"], tuple(rest), self.then)

    def within(self, source: Position, skip: int, passed: int) -> _Mark:
        """Return a place in the same detour, if this is in one, so many records further on."""
        if self.detour is None:
            return _Mark(source, skip)
        if not passed and skip == self.skip:
            return self  # with the numbers of its beginning
        return replace(self, source=source, skip=skip, numbers={}, detour=self.detour - passed)


class Holding:
    """A stage whose source has come further than its consumer."""

    kind = ""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._mark: _Mark | None = None  # None: where the source stands

    def read_share(self, share: Share) -> None:
        share_out(self._source, share)

    def read_epochs(self, epochs: Epochs) -> None:
        read_epochs(self._source, epochs)

    @property
    def below(self) -> Source:
        return self._source

    @property
    def repeats(self) -> bool:
        return repeats_order(self._source)

    def fraction(self, position: Position, records: int = 0) -> float | None:
        """Return which part of the input is done; see `fraction_read`."""
        return fraction_read(self._source, position["source"], position["skip"] + records)

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
        mark = self._read_mark(position)
        self._source.restore(mark.source)
        self._mark = mark
        self._set_numbers(numbers)

    def _read_mark(self, position: Position) -> _Mark:
        below: Any = position.get("source")
        mark = _Mark(below, int(position["skip"]))
        if "then" not in position:
            return mark
        detour, detours = position.get("detour"), position.get("detours")
        if not isinstance(detour, int) or not isinstance(detours, list):
            raise RestoreError(f"cannot restore a pipeline: stage {self.kind!r} finds malformed detours")
        return replace(mark, detour=detour, detours=tuple(detours), then=position["then"])

    def commit(self, position: Position) -> None:
        if "then" not in position:  # what is left of others was theirs to commit
            commit_to(self._source, position["source"])

    def redistribute(self, positions: Sequence[Position], workers: int) -> list[Position]:
        """Have the source share out what nobody has read, and the new workers what was held back."""
        detours: list[Position] = []
        ends: list[Position] = []
        for position in positions:
            held = self._held(position)
            detours += held[:-1]
            ends.append(held[-1])
        return [
            self._begin(detours[worker::workers], below)
            for worker, below in enumerate(redistributed(self._source, ends, workers))
        ]

    def adopt(self, position: Position, end: Position | None = None) -> Position:
        if "then" in position:  # its detours were adopted already
            return {**position, "then": adopted(self._source, position["then"])}
        # Where records are held at the end, the source had come further, nobody knows how far.
        until = None if end is None or end["skip"] or end.get("length") else end["source"]
        return {**position, "source": adopted(self._source, position["source"], until)}

    def _held(self, position: Position) -> list[Position]:
        """Return what was held back at a position, as detours; and last, that of the source after it."""
        if not (position.get("skip") or position.get("length") or "then" in position):
            return [position["source"]]
        self.restore(adopted(self, position))
        mark = self._stand()
        if mark.then is not None:
            first = {"stage": self.kind, "source": mark.source, "skip": mark.skip, "detour": mark.detour}
            return [{**first, **self._numbers()}, *mark.detours, mark.then]
        wanted, passed = mark.skip + self._numbers().get("length", 0), 0
        with closed_after(self._source) as batches:
            while passed < wanted:
                records = next(batches, None)
                if records is None:
                    raise _changed(wanted - passed)
                passed += len(records)
            end = self._source.position()
        if passed == mark.skip:
            return [end]
        begin = adopted(self._source, mark.source, end)
        return [
            {"stage": self.kind, "source": begin, "skip": mark.skip, "detour": passed, **self._numbers()},
            end,
        ]

    def _begin(self, detours: Sequence[Position], below: Position) -> Position:
        """Return the position of a new worker, whose source begins at `below`."""
        fresh: Position = {"stage": self.kind, "source": below, "skip": 0, **self._fresh()}
        if not detours:
            return fresh
        return {**fresh, **detours[0], "detours": list(detours[1:]), "then": below}

    def _fresh(self) -> dict[str, int]:
        """Return what belongs to a position where nothing is held back."""
        return {}

    def set_aside(self, bad: Sequence[BadRecord]) -> None:
        set_bad_aside(self._source, bad)

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
        while stand.detour is not None:
            yield from self._blocks_from(stand, length, taken)
            stand = stand.after_detour()
            length, taken = stand.numbers.get("length", 0), stand.numbers.get("taken", 0)
        yield from self._blocks_from(stand, length, taken)

    def _blocks_from(self, stand: _Mark, length: int, taken: int) -> Iterator[Block[_Mark]]:
        """Yield what the source has from a place on, to the end of the detour if that is in one."""
        if self._source.position() != stand.source:
            self._source.restore(stand.source)  # it was read further than what was delivered
        before, passed = stand, 0
        with closed_after(self._source) as batches:
            for records in batches:
                first = max(before.skip - passed, 0)
                if first < len(records):
                    yield Block(records, self._places(before, passed, len(records)), first, length, taken)
                    length = taken = 0
                passed += len(records)
                if before.detour is not None and passed >= before.detour:
                    return
                if passed >= before.skip:
                    before, passed = before.within(self._source.position(), 0, passed), 0
        if before.skip or before.detour is not None:
            raise _changed((before.detour or before.skip) - passed)

    def _places(self, before: _Mark, passed: int, size: int) -> Callable[[int], _Mark]:
        """Return the places in a batch that begins so many records after a mark."""

        def place(number: int) -> _Mark:
            if number < size:
                return before.within(before.source, passed + number, 0)
            if before.detour is not None and passed + size >= before.detour:
                return before.after_detour()
            return before.within(self._source.position(), 0, passed + size)

        return place


def _changed(missing: int) -> DataError:
    return DataError(
        f"pipeline: {missing} records fewer than when the position was saved; the data has changed"
    )


class Rebatched(Holding):
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


class Shuffled(Holding):
    """Stretches of `buffer` records, each in an order that follows from the seed and its number."""

    kind = "shuffle"

    def __init__(self, source: Source, config: ShuffleConfig) -> None:
        super().__init__(source)
        self._config = config
        self._number = self._taken = self._length = 0

    def read_epochs(self, epochs: Epochs) -> None:
        read_epochs(self._source, replace(epochs, buffer=0))  # each stretch has an order of its own here

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
                begun, here = shuffler.begin, block.place(block.first)
                if begun is not None and begun.detours_left != here.detours_left:
                    short = shuffler.end(here)  # or it could not be moved with its detour
                    assert short is not None
                    yield from self._in_batches(short, step)
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
                self._mark, numbers = stretch.end, stretch.end.numbers
                self._taken, self._length = numbers.get("taken", 0), numbers.get("length", 0)
                self._number = numbers.get("number", self._number + 1)
            yield stretch.records.slice(first, last)

    def fraction(self, position: Position, records: int = 0) -> float | None:
        return super().fraction(position, position["taken"] + records)

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


class Taken(Holding):
    kind = "take"

    def __init__(self, source: Source, records: int) -> None:
        super().__init__(source)
        if records < 0:
            raise ConfigError(f"pipeline: cannot take {records} records")
        self._records = records
        self._taken = 0

    def size(self) -> int | None:
        below = known_size(self._source)
        return None if below is None else min(below, self._records)

    def fraction(self, position: Position, records: int = 0) -> float | None:
        """Return which part is done: of the records to take, or of the input where that ends first."""
        below = super().fraction(position, records)
        taken = (position["taken"] + records) / self._records if self._records else 1.0
        return taken if below is None else max(taken, below)

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
                end = min(len(block.records), block.first + self._records - self._taken)
                self._taken += end - block.first
                self._mark = None if end == len(block.records) else block.place(end)
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
