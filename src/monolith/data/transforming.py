"""Transforms as a stage of a pipeline: records have numbers, and the state of transforms is in the position.

A position must contain more, the more a transform depends on:

    the values of a record     nothing: the position is that of the source
    the number of a record     the number of the next record
    earlier records            also its state: a snapshot now and then, and how many records came since

A snapshot of a pool of items may be large, and a position is asked for after every batch. So the stage
takes one every so many records, all positions until the next one share it, and restoring transforms the
records since then once more, without yielding the results.

    snapshot ──records that were delivered: transformed again, and dropped──► position ──► the remaining
    records

If these might come in another order, as those of several partitions do, each batch has its snapshot.
"""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from monolith.data.records import Records
from monolith.data.source import Position, Predicate, Stage, Stream, WorkQueueSource, closed_after
from monolith.data.transforms.transform import Compose, Filter, Rewrite, Stateful, Transform
from monolith.errors import ConfigError, DataError, RestoreError

SNAPSHOT_EVERY = 65_536
"""Records between two snapshots of the state of a transform."""

KIND = "transform"
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """All that is needed to resume between two batches of the source."""

    source: Position
    number: int
    """Of the next record, in the stream of this stage."""
    state: dict[str, Any] | None = None
    """What the transform remembers; None for one that remembers nothing."""


class TransformedByContent(Stage[Records, Records]):
    """Transforms that depend only on the values of a record."""

    def __init__(self, source: Stream[Records], transforms: Sequence[Transform]) -> None:
        super().__init__(source)
        self.transforms = tuple(transforms)
        self._steps: Sequence[Transform] | None = None

    def ask_ahead(self, predicate: Predicate) -> Predicate:
        unchanged = all(isinstance(one, Filter) for one in self.transforms)
        return self._source.ask_ahead(predicate) if unchanged else predicate

    def _asked(self) -> Sequence[Transform]:
        """Return the transforms; the filters before the first of another kind as they are asked ahead."""
        if self._steps is None:
            ahead: list[Transform] = []
            for one in self.transforms:
                if not (isinstance(one, Filter) and one.any_thread):
                    break
                ahead.append(_FilteredAhead(self._source.ask_ahead(one.mask)))
            self._steps = [*ahead, *self.transforms[len(ahead) :]]
        return self._steps

    def __iter__(self) -> Iterator[Records]:
        steps = self._asked()
        with closed_after(self._source) as batches:
            for records in batches:
                made = records
                for transform in steps:
                    made = transform(made, first=0)  # which none of them looks at
                if len(made):
                    yield made


class _FilteredAhead:
    def __init__(self, asked: Predicate) -> None:
        self._asked = asked

    def __call__(self, records: Records, *, first: int) -> Records:  # noqa: ARG002
        return records.keep(self._asked(records.glance()))


class Transformed(Stage[Records, Records]):
    """Transforms that depend on the number of a record, or have state. Owns them from now on.

    Args:
        snapshot_every: Records, at least, between two snapshots of the state.
    """

    def __init__(self, source: Stream[Records], transforms: Sequence[Transform], snapshot_every: int) -> None:
        if snapshot_every < 1:
            raise ConfigError(f"pipeline: snapshot_every must be at least 1 record, got {snapshot_every}")
        super().__init__(source)
        self.transforms = tuple(transforms)
        self.snapshot_every = snapshot_every
        self._transform = Compose(transforms)
        self._remembers = [one for one in transforms if isinstance(one, Stateful)]
        self._number = 0
        self._base: _Snapshot | None = None  # None: not asked for yet
        self._since = 0  # records after the base that were transformed and delivered
        self._again = 0  # of these, those that are to be transformed again
        self._torn = False  # a transform failed halfway

    def __iter__(self) -> Iterator[Records]:
        if self._torn:
            self.restore(self.position())
        self._settled_base()
        with closed_after(self._source) as batches:
            for records in batches:
                made = self._transform_batch(records)
                if len(made):
                    yield made
        if self._again:
            raise DataError(
                f"pipeline: {self._again} records fewer than when the position was saved; the data has "
                "changed"
            )
        # The source may have more later; a snapshot at its end makes a restart cheap.
        self._base, self._since = self._snapshot(), 0

    def _transform_batch(self, records: Records) -> Records:
        """Transform a batch of the source; return the results that were not delivered before."""
        again = min(self._again, len(records))
        # If a transform raises halfway, its state includes only some records of this batch. The
        # next iteration then restores the last snapshot, and transforms the records since once more.
        self._torn = True
        if again:
            self._applied(records.slice(0, again))
        rest = records.slice(again, len(records))
        made = self._applied(rest) if len(rest) else rest
        self._torn = False
        self._again -= again
        self._since += len(rest)
        if not self._again and (self._since >= self.snapshot_every or not self._snapshots_are_rare):
            self._base, self._since = self._snapshot(), 0
        return made

    def _applied(self, records: Records) -> Records:
        made = self._transform(records, first=self._number)
        self._number += len(records)
        return made

    @property
    def work_queue(self) -> WorkQueueSource | None:
        return None  # the number of a record, or the state, belongs to this worker

    def fraction_read(self, position: Position, records: int = 0) -> float | None:
        return self._source.fraction_read(position["source"], position["skip"] + records)

    def position(self) -> Position:
        base = self._settled_base()
        found: Position = {"stage": KIND, "source": base.source, "number": base.number, "skip": self._since}
        return found if base.state is None else {**found, "state": base.state}

    def restore(self, position: Position) -> None:
        base, since = self._read(position)
        # Either both are restored or neither. The state is restored first because undoing that is cheap.
        earlier = self._state()
        self._remember(base.state)
        try:
            self._source.restore(base.source)
        except BaseException:
            self._remember(earlier)
            raise
        self._base, self._number, self._since, self._again = base, base.number, since, since
        self._torn = False

    def _read(self, position: Position) -> tuple[_Snapshot, int]:
        if not isinstance(position, Mapping) or position.get("stage") != KIND:
            raise RestoreError(
                f"cannot restore a pipeline: {position!r:.200} is not a position of its stage {KIND!r}"
            )
        number, since, state = position.get("number"), position.get("skip"), position.get("state")
        if not all(isinstance(one, int) and one >= 0 for one in (number, since)):
            raise RestoreError(
                f"cannot restore a pipeline: stage {KIND!r} finds number {number}, skip {since}"
            )
        if not isinstance(state, dict) if self._remembers else "state" in position:
            here = f"{_named(self._remembers)} here remembers" if self._remembers else "none here remembers"
            raise RestoreError(
                f"cannot restore a pipeline: the position has {'a' if 'state' in position else 'no'} state "
                f"of transforms, and {here} what it saw. Use the transforms it was saved with."
            )
        below: Any = position.get("source")
        return _Snapshot(below, number or 0, state), since or 0

    def commit(self, position: Position) -> None:
        self._source.commit(position["source"])

    def redistribute(self, positions: Sequence[Position], workers: int) -> list[Position]:
        if self._remembers:
            raise RestoreError(
                f"{_named(self._remembers)} of a pipeline remembers what its worker saw, so its state "
                "cannot be divided among another number of workers. Resume with "
                f"{len(positions)} workers."
            )
        number = max(
            (one["number"] for one in positions), default=0
        )  # so that no draw comes twice to a worker
        below = self._source.redistribute([one["source"] for one in positions], workers)
        return [{"stage": KIND, "source": one, "number": number, "skip": 0} for one in below]

    def adopt(self, position: Position, end: Position | None = None) -> Position:  # noqa: ARG002
        raise RestoreError(
            f"{_named(self.transforms)} of a pipeline decides by the number of a record, and a stage above "
            "it buffers records: read by another worker they might have other numbers. Resume with as many "
            "workers as before."
        )

    @property
    def _snapshots_are_rare(self) -> bool:
        """Whether snapshots may be far apart: the records since the last one come again in the same order."""
        return bool(self._remembers) and self.repeats_order

    def _settled_base(self) -> _Snapshot:
        if self._base is None:
            self._base = self._snapshot()
        return self._base

    def _snapshot(self) -> _Snapshot:
        return _Snapshot(self._source.position(), self._number, self._state())

    def _state(self) -> dict[str, Any] | None:
        """Return a copy of the state, which later records do not change."""
        if not self._remembers:
            return None
        state = self._transform.state()
        try:
            copy: dict[str, Any] = json.loads(json.dumps(state))
        except (TypeError, ValueError) as cause:
            raise self._not_plain(str(cause)) from cause
        if copy != state:
            raise self._not_plain("keys must be text, and lists are not tuples")
        return copy

    def _not_plain(self, why: str) -> DataError:
        return DataError(
            f"pipeline: what {_named(self._remembers)} remembers cannot be saved exactly: state() must "
            f"return values that survive JSON: {why}"
        )

    def _remember(self, state: dict[str, Any] | None) -> None:
        if state is None:
            return
        try:
            self._transform.restore(json.loads(json.dumps(state)))  # it may keep what it is given
        except (KeyError, TypeError, ValueError, AttributeError) as cause:
            raise RestoreError(
                f"cannot restore a pipeline: {_named(self._remembers)} finds no state of its own: {cause!r}"
            ) from cause


def transformed(source: Stream[Records], transform: Transform, snapshot_every: int) -> Stream[Records]:
    """Put a transform on top of a source, or after the transforms that are there already: then a record keeps
    its number through all of them; see `Compose`.

    Raises:
        ConfigError: It cannot resume exactly after a restart; the message says why.
    """
    added = list(_parts(transform))
    for one in added:
        _check_exact(one)
    _check_new(source, [one for one in added if isinstance(one, Stateful)])
    below, parts = source, added
    if isinstance(source, TransformedByContent | Transformed):
        below, parts = source.upstream, [*source.transforms, *added]
    if isinstance(source, Transformed):
        snapshot_every = min(source.snapshot_every, snapshot_every)
    if all(isinstance(one, Filter | Rewrite) and not isinstance(one, Stateful) for one in parts):
        return TransformedByContent(below, parts)
    return Transformed(below, parts, snapshot_every)


def _parts(transform: Transform) -> Iterator[Transform]:
    """Yield a transform; of a list of them, each."""
    if isinstance(transform, Compose):
        for one in transform.transforms:
            yield from _parts(one)
    else:
        yield transform


def _check_exact(transform: Transform) -> None:
    """Refuse what would not be the same after a restart."""
    name = _named([transform])
    if isinstance(transform, type):
        raise ConfigError(f"pipeline: {transform.__name__} is a class; transform() takes one made of it")
    if hasattr(transform, "position"):
        raise ConfigError(f"pipeline: {name} is a source, not a transform; say Pipeline({name}(...))")
    if not callable(transform) or not _takes_number(transform):
        raise ConfigError(
            f"pipeline: {name} is not a transform: it must take (records, *, first). A function of the "
            "records alone goes into map()."
        )
    has = [method for method in ("state", "restore") if hasattr(transform, method)]
    if len(has) == 1:
        raise ConfigError(
            f"pipeline: {name} has {has[0]}() alone; to resume exactly after a restart it needs state() and "
            "restore()"
        )
    drawn = [what for what, one in getattr(transform, "__dict__", {}).items() if isinstance(one, _GENERATORS)]
    if drawn and not has:
        raise ConfigError(
            f"pipeline: {name} draws from its {drawn[0]!r}, which would start over after a restart. Give it "
            "state() and restore(), or draw by the number of a record, as "
            "monolith.data.transforms.transform.draw does."
        )


def _check_new(source: Stream[Any], added: Sequence[Stateful]) -> None:
    """Refuse a transform that remembers and is a stage already: the two would see each other's records."""
    below: Stream[Any] | None = source
    while below is not None:
        there: Sequence[object] = below.transforms if isinstance(below, Transformed) else ()
        for one in added:
            if any(other is one for other in there):
                raise ConfigError(
                    f"pipeline: this {_named([one])} is a stage already; what it remembers can be saved for "
                    "one stage only. Make another."
                )
        below = below.upstream


def _takes_number(transform: Transform) -> bool:
    try:
        parameters = inspect.signature(transform).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(one.name == "first" or one.kind is one.VAR_KEYWORD for one in parameters)


def _named(transforms: Sequence[object]) -> str:
    return ", ".join(getattr(one, "__name__", type(one).__name__) for one in transforms) or "a transform"
