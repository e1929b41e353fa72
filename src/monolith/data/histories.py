"""Histories: the last events of each user, built from the stream itself.

A model that reads what a user did before needs lists that the data seldom has. This stage makes them: each
record gets the values of the earlier events of its user, oldest first, and then becomes one of those events.

    time  user  item     history    history.time
      10     7     a     []         []
      20     7     b     [a]        [10]
      15     7     c     [a]        [10]             came late: it sees nothing that was after it
      30     7     d     [a c b]    [10 15 20]

Only events that were read before a record, and whose time is not after its own, are in its history. So a
model never sees the future, neither in a replay nor in data that is out of order. Times count in whole
seconds, as in batches and in positions: events of one second are in the order in which they are read,
whatever their fractions say. (`last_of` of a split compares numbers as they are stored.)

Data to evaluate on may be in files of its own. Its users did something before, in the data that was trained
on: this earlier data is then read first, for its events alone. One of them counts if it was before a record,
and not at the same second: then it could be the record itself, in files that overlap.

The state is bounded and lives in the core (`native.Histories`). It is part of the position, which a trainer
asks for after every batch. So a position does not copy it: it has a dump of some moment and the events since
then, as texts that all positions share. Texts of 16 batches become one, of 16 of these one again; a new dump
is made once the events since are as large as the last one. So an event is written a few times in all.

    base: a dump ──events of 256 batches──events of 16 batches──...──events of a batch──► position
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from monolith import native
from monolith.data.buffering import Shuffled
from monolith.data.join.store import Arrays, pack, unpack
from monolith.data.records import (
    ColumnCheck,
    Records,
    column_from_arrays,
    empty_rows,
)
from monolith.data.row_gathering import RowBlock
from monolith.data.shuffling import Epochs
from monolith.data.source import Position, Shard, Stage, Stream, WorkQueueSource, as_stream, closed_after
from monolith.errors import ConfigError, CorruptFileError, DataError, RestoreError
from monolith.feature import FeatureSpec
from monolith.feature.spec import HistoryFeature
from monolith.feature.spec.times import TimeUnit, read_times
from monolith.observe import Doublings
from monolith.observe.progress import counted
from monolith.table.arguments import MAX_EVENT_TIME
from monolith.tensors import RaggedTensor

_log = logging.getLogger(__name__)

KIND = "history"
MAX_USERS = 1_000_000
"""The default of `HistoryConfig.max_users`."""

_SEES, _ENTERS = 1, 2
_MERGED = 16  # Texts of events of one level that become one of the next.
_LEAST_BASE = 1 << 20  # Characters of events before a first dump: a small state is not worth one.
_TYPES = {
    torch.int64: native.ColumnType.INT64,
    torch.float32: native.ColumnType.FLOAT,
    torch.uint8: native.ColumnType.BYTES,
}
_NAMES = {torch.int64: "whole numbers", torch.float32: "numbers", torch.uint8: "texts"}
"""Types of columns, in positions and messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryConfig:
    """Which events make up the history of a user, and how many are kept.

    Examples:
        >>> from monolith import HistoryConfig, MemorySource, Pipeline
        >>> events = {"time": [10, 20, 15], "user": [7, 7, 7], "item": [1, 2, 3]}
        >>> config = HistoryConfig(by="user", of="item", max=50, time="time", companions={"time": "time"})
        >>> [records] = Pipeline(MemorySource(events, batch_size=3)).history(config)
        >>> records["history"].to_list(), records["history.time"].to_list()
        ([[], [1], [1]], [[], [10], [10]])
    """

    by: str
    """The column of the user, or of whatever has a history."""
    of: str
    """The column whose values the history lists."""
    max: int
    """The most events that are kept of a user; the oldest leaves."""
    time: str
    """The column of event times."""
    time_unit: TimeUnit = "auto"
    """The unit of event times; see `FeatureSpec.event_time_unit`."""
    companions: Mapping[str, str] = field(default_factory=dict)
    """What is kept of each event in addition: name -> column. Each becomes a list column `NAME.companion`."""
    only: str | None = None
    """A column of numbers: an event enters the history if it is above 0 there, such as clicks among
    impressions. None: every event enters."""
    name: str = "history"
    """The column that is made."""
    max_users: int = MAX_USERS
    """The most users that are kept; the one whose last event is the oldest leaves."""

    def __post_init__(self) -> None:
        for limit in ("max", "max_users"):
            if (value := getattr(self, limit)) < 1:
                raise ConfigError(f"history {self.name!r}: {limit} must be at least 1, got {value}")
        if clash := self.columns.keys() & {self.by, self.time, self.only, *self.columns.values()}:
            raise ConfigError(
                f"history {self.name!r}: it would replace the column {min(clash)!r} that it is made of; "
                "choose another name"
            )

    @classmethod
    def from_spec(cls, spec: FeatureSpec, *, max_users: int = MAX_USERS) -> list[HistoryConfig]:
        """Return the histories that a feature spec leaves to the pipeline: those with `by`.

        Examples:
            >>> from monolith import FeatureSpec, HistoryConfig, HistoryFeature, IdFeature
            >>> features = {
            ...     "user": IdFeature(column="uid"),
            ...     "item": IdFeature(),
            ...     "history": HistoryFeature(of="item", max=50, by="user"),
            ... }
            >>> spec = FeatureSpec(features=features, labels={}, event_time="time")
            >>> HistoryConfig.from_spec(spec)[0].by  # the column
            'uid'
        """
        made = []
        for name, lists in spec.histories.items():
            feature = spec.features[name]
            assert isinstance(feature, HistoryFeature)
            if feature.by is None:
                continue
            assert spec.event_time is not None  # which the spec has checked
            listed = {
                one.column: spec.event_time if one.feature is None else _column_of(spec, one.feature)
                for one in lists
            }
            (column, of), *others = listed.items()
            label = None if feature.only is None else spec.labels.get(feature.only)
            made.append(
                cls(
                    by=_column_of(spec, feature.by),
                    of=of,
                    max=feature.max,
                    time=spec.event_time,
                    time_unit=spec.event_time_unit,
                    companions={each.removeprefix(f"{column}."): listed for each, listed in others},
                    only=feature.only if label is None else label.column or feature.only,
                    name=column,
                    max_users=max_users,
                )
            )
        return made

    @property
    def columns(self) -> dict[str, str]:
        """The columns that are made -> the column that each lists the values of."""
        return {self.name: self.of} | {f"{self.name}.{name}": of for name, of in self.companions.items()}

    @property
    def inputs(self) -> tuple[str, ...]:
        """The columns that the history is made of, each once."""
        only = () if self.only is None else (self.only,)
        return tuple(dict.fromkeys((self.by, self.time, *self.columns.values(), *only)))

    def meaning(self) -> dict[str, Any]:
        """Return the settings that decide what a saved state contains; another `max` may read it, too."""
        companions = dict(self.companions)
        return {"by": self.by, "time": self.time, "columns": [self.of, companions], "only": self.only}


class HistoryStage(Stage[Records, Records]):
    """Adds the histories of users to their records.

    If the run reads the data several times, each epoch begins without histories: those of the epoch before
    contain the future. The source then keeps its order, which histories need, and records are shuffled here,
    after they have their histories.

    Args:
        earlier: Data whose events histories begin with; it yields no record.
    """

    def __init__(
        self, source: Stream[Records], config: HistoryConfig, *, earlier: Iterable[Records] | None = None
    ) -> None:
        super().__init__(_Built(source, config, None if earlier is None else as_stream(earlier)))

    def __iter__(self) -> Iterator[Records]:
        return iter(self._source)

    def read_epochs(self, epochs: Epochs) -> None:
        super().read_epochs(epochs)
        if epochs.shuffle is not None:
            self._source = Shuffled(self._source, epochs.shuffle)


class _State:
    """The events of all users, and what a position says of them. One thread uses it at a time.

    Args:
        dtypes: Of the user, then of each value.
    """

    def __init__(self, config: HistoryConfig, dtypes: Sequence[torch.dtype]) -> None:
        self.dtypes = tuple(dtypes)
        self.events = native.Histories(config.max, config.max_users, [_TYPES[one] for one in dtypes])
        self._base = ""
        self._since: list[tuple[int, str]] = []  # with its level: how often it was merged
        self._size = 0  # characters of the latter

    def build(
        self, columns: Sequence[RaggedTensor], seconds: NDArray[np.int64], roles: NDArray[np.uint8]
    ) -> tuple[list[RaggedTensor], int]:
        """Return the history of each record, by value, and how many lacked a value to enter."""
        block = _block(len(roles), columns)
        made, entered, left_out = self.events.build(block, seconds, roles)
        if len(entered):
            user, *values = native.gather_rows((block,), None, entered)
            self._note(_pack([user, (seconds[entered], user[1], None), *values]))
        return [column_from_arrays(*one) for one in made], left_out

    def _note(self, text: str) -> None:
        """Add the events of a batch to what positions contain."""
        self._since.append((0, text))
        self._size += len(text)
        if self._size > max(len(self._base), _LEAST_BASE):
            self.rebase()
        # Positions list them all, so equal ones are merged: there are about a dozen of each level.
        level = 0
        while [each for each, _ in self._since[-_MERGED:]] == [level] * _MERGED:
            last, level = self._since[-_MERGED:], level + 1
            merged = _merge([text for _, text in last])
            self._since[-_MERGED:] = [(level, merged)]
            self._size += len(merged) - sum(len(text) for _, text in last)

    def rebase(self) -> None:
        """Make a dump that positions share from now on."""
        self._base = _pack(self.events.dump())
        self._since, self._size = [], 0

    def saved(self) -> dict[str, Any]:
        return {"base": self._base, "since": [list(one) for one in self._since]}

    @classmethod
    def restored(cls, config: HistoryConfig, dtypes: Sequence[torch.dtype], saved: Any) -> _State:
        """Return the state that `saved` returned.

        Raises:
            RestoreError: It is not such a state, or damaged.
        """
        state = cls(config, dtypes)
        try:
            base, since = saved["base"], saved["since"]
            state._since = [(int(level), str(text)) for level, text in since]
            state._size = sum(len(text) for _, text in state._since)
            state._base = str(base)
            texts = [text for text in (state._base, *(text for _, text in state._since)) if text]
            for number, text in enumerate(texts):
                rows, columns = _unpack(text, f"part {number} of its state")
                state.events.enter(_block(rows, columns))
        except (KeyError, TypeError, ValueError, binascii.Error, CorruptFileError, DataError) as cause:
            raise RestoreError(
                f"cannot restore history {config.name!r}: its state in the position is damaged, or not its "
                f"own: {cause}"
            ) from cause
        return state


class _Built(Stage[Records, Records]):
    """The stage itself: records with their histories, in the order of the source."""

    def __init__(
        self, source: Stream[Records], config: HistoryConfig, earlier: Stream[Records] | None
    ) -> None:
        super().__init__(source)
        if source.reads_again or (earlier is not None and earlier.reads_again):
            raise ConfigError(
                f"history {config.name!r}: the source reads its data several times, and a record would find "
                "itself in its history; make the source with epochs=1, and set train.epochs, with which each "
                "epoch begins without histories"
            )
        self._config = config
        self._earlier = earlier
        self._earlier_start: Position | None = None  # where it is read from
        self._begun = earlier is None  # with its events
        self._newest = -1  # second of an event of that data
        self._too_early, self._said_too_early = 0, Doublings()
        self._values = (config.by, *config.columns.values())
        self._dtypes: dict[str, torch.dtype] = {}  # of columns that had values so far
        self._state: _State | None = None  # None until every column had a value: nothing could enter
        self._here: Position | None = None  # of the source, after the records that are in the state
        self._torn = False  # the source was read further than that
        self._epochs, self._epoch = 1, 0
        self._start: Position | None = None  # of the source, where an epoch begins
        self._left_out, self._said = 0, Doublings()
        self._seen = ColumnCheck(f"history {config.name!r}", config.inputs)

    def __iter__(self) -> Iterator[Records]:
        if self._torn:
            assert self._here is not None
            self._source.restore(self._here)
        while True:
            self._here = self.position()["source"]
            if self._earlier is not None and not self._begun:
                self._read_earlier(self._earlier)
                self._begun = True
            with closed_after(self._source) as batches:
                for records in batches:
                    # A batch that is refused has changed nothing; reading again begins with it.
                    self._torn = True
                    made = self._add(records)
                    self._here, self._torn = self._source.position(), False
                    yield made
            if self._epoch + 1 >= self._epochs:
                return
            assert self._start is not None
            self._source.restore(self._start)
            self._epoch += 1
            self._state, self._here = None, None

    # Building

    def _read_earlier(self, earlier: Stream[Records]) -> None:
        seen = ColumnCheck(f"history {self._config.name!r}, earlier data", self._config.inputs)
        if self._earlier_start is None:
            self._earlier_start = earlier.position()
        else:  # again, after a failure
            earlier.restore(self._earlier_start)
            self._state = None
        with closed_after(earlier) as batches:
            for records in batches:
                seen.look(records)
                columns = self._columns(records)
                seconds, roles = self._roles(records)
                roles &= _ENTERS
                self._newest = max(self._newest, int(seconds.max(initial=-1, where=roles > 0)))
                if self._state is not None:
                    # As if one second later: of records of the same second, none has it.
                    _, left_out = self._state.build(columns, seconds + 1, roles)
                    self._warn(left_out)
        if self._state is not None:
            self._state.rebase()
            events = self._state.events
            _log.info(
                "history %r begins with %d earlier events of %d users",
                self._config.name,
                events.events,
                events.users,
            )

    def _add(self, records: Records) -> Records:
        config = self._config
        if clash := [name for name in config.columns if name in records.columns]:
            raise DataError(
                f"history {config.name!r}: the data has a column {clash[0]!r} already; choose another name "
                "for the history, or leave `by` out to read that column"
            )
        self._seen.look(records)
        columns = self._columns(records)
        if self._state is None:
            made = [empty_rows(one.dtype, len(records)) for one in columns[1:]]
        else:
            seconds, roles = self._roles(records)
            made, left_out = self._state.build(columns, seconds, roles)
            self._warn(left_out)
            self._warn_of_times(seconds[roles > 0])
        return records.with_columns(dict(zip(config.columns, made, strict=True)))

    def _columns(self, records: Records) -> list[RaggedTensor]:
        """Return the user and the values of records; there is a state once each of them had a value."""
        columns = [self._column(records, name) for name in self._values]
        if self._state is None and self._dtypes.keys() == set(self._values):
            self._state = _State(self._config, [one.dtype for one in columns])
        return columns

    def _column(self, records: Records, name: str) -> RaggedTensor:
        """Return a column, of the type that it always has."""
        column = records[name] if name in records.columns else empty_rows(torch.int64, len(records))
        if not len(column.flat_values):
            return empty_rows(self._dtypes.get(name, column.dtype), len(records))
        known = self._dtypes.setdefault(name, column.dtype)
        if known is not column.dtype:
            raise DataError(
                f"history {self._config.name!r}: column {name!r} held {_NAMES[known]} before, and "
                f"holds {_NAMES[column.dtype]} now. Have it read as one type, as with "
                f"CsvFormat(types={{{name!r}: ...}})."
            )
        return column

    def _roles(self, records: Records) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Return the second of each record, and whether it has a history and enters it."""
        config, size = self._config, len(records)
        seconds, roles = np.zeros(size, np.int64), np.zeros(size, np.uint8)
        if config.time in records.columns:
            times = read_times(records[config.time], config.time_unit)
            splits, flat = times.seconds.row_splits.numpy(), times.seconds.flat_values.numpy()
            # A time that no record may have would stay for good, as the newest of its user.
            fine = ~times.wrong.numpy() & (flat >= 0) & (flat <= MAX_EVENT_TIME)
            single = splits[1:] - splits[:-1] == 1
            if single.all():  # as in most data
                seconds = np.where(fine, flat, 0)
                roles[fine] = _SEES | _ENTERS
            else:
                rows = np.flatnonzero(single)
                rows = rows[fine[splits[rows]]]
                seconds[rows] = flat[splits[rows]]
                roles[rows] = _SEES | _ENTERS
        if config.only is not None:
            roles[~self._above_zero(records, config.only)] &= _SEES
        return seconds, roles

    def _above_zero(self, records: Records, name: str) -> NDArray[np.bool_]:
        above = np.zeros(len(records), bool)
        if name not in records.columns:
            return above
        column = records[name]
        if column.dtype is torch.uint8 and len(column.flat_values):
            raise DataError(
                f"history {self._config.name!r}: only = {name!r} names a column of texts, and an event "
                "enters if it is above 0 there. Have it read as numbers."
            )
        rows = np.repeat(np.arange(len(records)), column.row_lengths().numpy())
        above[rows[(column.flat_values > 0).numpy()]] = True
        return above

    def _warn(self, left_out: int) -> None:
        self._left_out += left_out
        if left_out and self._said.due(self._left_out):
            _log.warning(
                "history %r: %s so far did not enter, for want of a single value in %s.",
                self._config.name,
                counted(self._left_out, "event"),
                " or ".join(map(repr, dict.fromkeys(self._values))),
                extra={"cause": f"values for history {self._config.name}"},
            )

    def _warn_of_times(self, seconds: NDArray[np.int64]) -> None:
        early = int(np.count_nonzero(seconds < self._newest))
        self._too_early += early
        if early and self._said_too_early.due(self._too_early):
            _log.warning(
                "history %r: %s so far came before the last of the events that it begins with. Such records "
                "have those that were before them, of the last %d of their users alone: data for evaluation "
                "should come after the data for training.",
                self._config.name,
                counted(self._too_early, "record"),
                self._config.max,
                extra={"cause": f"times of history {self._config.name}"},
            )

    # Positions

    def position(self) -> Position:
        if self._here is None:
            self._here = self._source.position()
        if self._epochs > 1 and self._start is None:
            self._start = self._here
        found: Position = {
            "stage": KIND,
            "source": self._here,
            "name": self._config.name,
            "meaning": self._config.meaning(),
            "types": {name: _NAMES[dtype] for name, dtype in self._dtypes.items()},
            "state": None if self._state is None else self._state.saved(),
        }
        return found if self._epochs == 1 else {**found, "epoch": self._epoch}

    def restore(self, position: Position) -> None:
        if self._epochs > 1:
            self.position()  # notes where an epoch begins
        dtypes, state, epoch = self._read(position)
        below: Any = position.get("source")
        self._source.restore(below)  # refuses what is not its own, before anything changes here
        self._here, self._torn, self._epoch = below, False, epoch
        self._dtypes, self._state = dtypes, state
        self._begun = self._earlier is None or state is not None  # a state has the earlier events, too
        self._seen = ColumnCheck("", ())  # a column may have been in earlier records

    def _read(self, position: Position) -> tuple[dict[str, torch.dtype], _State | None, int]:
        """Return the types of columns, the state and the epoch of a position."""
        if not isinstance(position, Mapping) or position.get("stage") != KIND:
            raise RestoreError(
                f"cannot restore a pipeline: {position!r:.200} is not a position of its stage {KIND!r}"
            )
        config, name, meaning = self._config, position.get("name"), position.get("meaning")
        if name != config.name or not isinstance(meaning, Mapping):
            raise RestoreError(
                f"cannot restore history {config.name!r}: the position is of history {name!r}. Add histories "
                "in the order in which they were added when it was saved."
            )
        for setting, here in config.meaning().items():
            if meaning.get(setting) != here:
                raise RestoreError(
                    f"cannot restore history {name!r}: it was made with {setting} = "
                    f"{meaning.get(setting)!r}, and this one has {here!r}. Set it back, or train from the "
                    "beginning of the data."
                )
        names = {named: dtype for dtype, named in _NAMES.items()}
        epoch: Any = position.get("epoch", 0)
        types: Any = position.get("types")
        fine = isinstance(types, Mapping) and types.keys() <= set(self._values)
        fine = fine and names.keys() >= set(types.values()) and isinstance(epoch, int) and epoch >= 0
        if not fine or "state" not in position:
            raise RestoreError(
                f"cannot restore history {name!r}: it finds epoch {epoch!r}, types {types!r} and "
                f"{'a' if 'state' in position else 'no'} state"
            )
        dtypes = {column: names[named] for column, named in types.items()}
        if position.get("state") is None:
            return dtypes, None, epoch
        if dtypes.keys() != set(self._values):
            raise RestoreError(f"cannot restore history {name!r}: its state has the types of {list(dtypes)}")
        ordered = [dtypes[column] for column in self._values]
        return dtypes, _State.restored(config, ordered, position["state"]), epoch

    def commit(self, position: Position) -> None:
        self._source.commit(position["source"])

    def allow_missing_labels(self) -> None:
        super().allow_missing_labels()
        # What is to be predicted may not say which of its events enter: then none does.
        config = self._config
        self._seen = ColumnCheck(
            f"history {config.name!r}", [one for one in config.inputs if one != config.only]
        )

    def close(self) -> None:
        super().close()
        if self._earlier is not None:
            self._earlier.close()

    # Epochs and workers

    def read_epochs(self, epochs: Epochs) -> None:
        if self._earlier is not None and epochs.count > 1:
            raise ConfigError(
                f"history {self._config.name!r} begins with the events of earlier data, for an evaluation; "
                f"data that is read in {epochs.count} epochs begins without histories"
            )
        # The source reads in its order, once; each epoch is another such reading, from its beginning.
        self._source.read_epochs(replace(epochs, count=1, buffer=0))
        self._epochs = epochs.count

    def size(self) -> int | None:
        size = self._source.size()
        return None if size is None else size * self._epochs

    def fraction_read(self, position: Position, records: int = 0) -> float | None:
        within = self._source.fraction_read(position["source"], records)
        return None if within is None else (position.get("epoch", 0) + within) / self._epochs

    @property
    def work_queue(self) -> WorkQueueSource | None:
        return None  # the state belongs to this worker

    def read_shard(self, shard: Shard) -> None:
        if shard.workers > 1 and not self._source.sharded_by_key:
            raise ConfigError(
                f"history {self._config.name!r}: it is built from the events of each {self._config.by!r} as "
                f"they are read, and each of {shard.workers} workers would read only some of them. Train "
                "with one worker, also with a data service; read a topic whose messages are keyed by "
                f"{self._config.by!r}; or write the lists into the data and leave `by` out."
            )
        if shard.workers > 1 and shard.worker == 0:
            _log.info(
                "history %r: each worker builds it from its own partitions, so messages must be keyed by %r",
                self._config.name,
                self._config.by,
            )
        self._source.read_shard(shard)

    def redistribute(self, positions: Sequence[Position], workers: int) -> list[Position]:
        # Which partition a user is in is not known here. So every new worker gets the events of all users:
        # it reads those of its own, and of the rest nothing more comes.
        refused = f"cannot redistribute history {self._config.name!r} among another number of workers:"
        merged: _State | None = None
        for one in positions:
            _, state, _ = self._read(one)
            if state is None or merged is None:
                merged = merged or state
                continue
            if state.dtypes != merged.dtypes:
                raise RestoreError(f"{refused} the types of its columns differ between workers.")
            users = merged.events.users + state.events.users
            columns = [column_from_arrays(*each) for each in state.events.dump()]
            merged.events.enter(_block(columns[0].nrows, columns))
            if merged.events.users < min(users, self._config.max_users):
                raise RestoreError(
                    f"{refused} two workers have events of the same {self._config.by!r}, so messages are not "
                    f"keyed by it. Resume with {len(positions)} workers."
                )
        types: dict[str, str] = {}
        for one in positions:
            types |= one["types"]
        if merged is not None:
            merged.rebase()
        saved = None if merged is None else merged.saved()
        below = self._source.redistribute([one["source"] for one in positions], workers)
        return [{**positions[0], "source": one, "types": types, "state": saved} for one in below]

    def adopt(self, position: Position, end: Position | None = None) -> Position:  # noqa: ARG002
        raise RestoreError(
            f"history {self._config.name!r} of a pipeline is made of the records of its worker, and a stage "
            "above it buffers records: read by another worker they would have other histories. Resume with "
            "as many workers as before."
        )


# Events as text: users with their events, one event each for those of a batch, many for a dump.


def _pack(columns: Sequence[tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64] | None]]) -> str:
    """Return users, seconds and values as base64; each as (values, splits of rows, splits of texts)."""
    arrays: Arrays = {"events": np.diff(columns[1][1])}
    for number, (values, _, texts) in enumerate(columns):
        arrays[str(number)] = values
        if texts is not None:
            arrays[f"{number}/lengths"] = np.diff(texts)
    return _as_text(arrays)


def _as_text(arrays: Arrays) -> str:
    return base64.b64encode(pack({}, arrays)).decode()


def _arrays(text: str, where: str) -> Arrays:
    return unpack(base64.b64decode(text, validate=True), where)[1]


def _merge(texts: Sequence[str]) -> str:
    """Return what enters the events of several texts, one after the other."""
    parts = [_arrays(text, "events") for text in texts]
    return _as_text({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def _unpack(text: str, where: str) -> tuple[int, list[RaggedTensor]]:
    """Return how many rows there are, and the columns that `_pack` was given."""
    arrays = _arrays(text, where)
    users = len(arrays["events"])
    columns = []
    for number in range(sum("/" not in name for name in arrays) - 1):
        lengths = arrays.get(f"{number}/lengths")
        texts = None if lengths is None else _splits(lengths)
        rows = np.arange(users + 1) if number == 0 else _splits(arrays["events"])
        columns.append(column_from_arrays(arrays[str(number)], rows, texts))
    return users, columns


def _splits(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    splits = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=splits[1:])
    return splits


def _column_of(spec: FeatureSpec, name: str) -> str:
    return getattr(spec.features[name], "column", None) or name


def _named(columns: Sequence[RaggedTensor]) -> dict[str, RaggedTensor]:
    return {str(number): column for number, column in enumerate(columns)}


def _block(rows: int, columns: Sequence[RaggedTensor]) -> native.ColumnBlock:
    block = RowBlock.of(rows, _named(columns))
    if block is None:
        raise DataError("history: columns must be plain tensors in the memory of the CPU")
    return block.columns
