"""FeatureSpec: from raw columns to what a model reads, as one value.

    spec = FeatureSpec(
        features={
            "user": IdFeature(column="user_id", kind="string"),
            "tags": IdFeature(kind="string", separator="|", combiner="mean"),
            "price": FloatFeature(scale="log"),
        },
        labels={"click": Label()},
    )
    batch = spec.make(records)

Training, evaluation and a server all read raw columns by it, so that they cannot read them differently. It
goes to JSON and back without loss: a checkpoint of a model that was made of a spec has it inside.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from monolith import native
from monolith.config import config_from_mapping, to_dict
from monolith.config.fields import check_fields, key_of
from monolith.errors import ConfigError
from monolith.feature.batches import Batch
from monolith.feature.fids import MAX_SLOTS_V2
from monolith.feature.spec.kinds import (
    AnyFeature,
    AnyIdFeature,
    BucketFeature,
    CrossFeature,
    FloatFeature,
    HistoryFeature,
    IdFeature,
    Label,
    RowSettings,
    SequenceFeature,
)
from monolith.feature.spec.times import TIME, TimeUnit

if TYPE_CHECKING:
    from monolith.feature.spec.reading import RawColumns, RawReader

GAP = ".gap"
"""Behind the name of a sequence: the feature of its time gaps."""
STEP_TIME = "time"
"""Behind the name of a history and a dot: the times of its steps, whatever the column of times is called."""

FREE_TO_DIFFER = (
    "occurrence_threshold",
    "admission",
    "compressor",
    "bias_compressor",
    "expire_after",
    "capacity_bytes",
    "when_full",
    "optimizer",
    "stochastic_rounding",
    "delay_compensation",
    "bias_optimizer",
    "initializer",
    "bias_initializer",
    "initial_rows",
    "embedding_dtype",
    "embedding_rounding",
    "learning_rate",
    "bias_learning_rate",
    "missing",
    "most",
    "column",
    "separator",
    "quantiles",
    "by",
    "only",
)
"""Settings of a feature that do not change the meaning of its saved rows; tables compare the row layout."""


class HistoryList(NamedTuple):
    """One of the lists that a history consists of: its items, or what is kept along with them."""

    name: str
    """Its name in a batch."""
    column: str
    """The column that has it."""
    feature: str | None
    """The ID feature as which its values are read, and whose rows it reads; None for times."""


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """How a model reads raw columns: which of them are IDs, floats and labels, and how they are converted.

    Examples:
        >>> from monolith import FeatureSpec, FloatFeature, IdFeature, Label, MemorySource, Pipeline
        >>> spec = FeatureSpec(
        ...     features={"user": IdFeature(kind="string"), "tags": IdFeature(), "price": FloatFeature()},
        ...     labels={"click": Label()},
        ... )
        >>> data = {"user": ["ann", "bob"], "tags": [[3, 9], []], "price": [0.5, 2.0], "click": [1, 0]}
        >>> [batch] = Pipeline(MemorySource(data, batch_size=4)).to_batches(spec)
        >>> batch.ids["tags"].row_lengths(), batch.floats["price"].shape, batch.label
        (tensor([2, 0]), torch.Size([2, 1]), tensor([1., 0.]))
        >>> FeatureSpec.from_json(spec.to_json()) == spec
        True
    """

    TITLE: ClassVar[str] = "the features"
    """What it is called in messages."""

    features: Mapping[str, AnyFeature]
    """The features by name, in the order in which a model reads them."""
    labels: Mapping[str, Label] = field(default_factory=lambda: {"label": Label()})
    """The labels by task."""
    event_time: str | None = None
    """The column of each example's time, by which rows expire and time gaps are measured: texts in ISO 8601,
    which are UTC without a zone, timestamps, dates, or Unix times. An example without one does not move the
    clock."""
    event_time_unit: TimeUnit = "auto"
    """What numbers in columns of times count: seconds, milliseconds, microseconds or nanoseconds; or "iso"
    for texts in ISO 8601 alone. "auto" recognises each by its size or form, and a line of the log says so."""
    group: str | None = None
    """The feature of ids that groups examples for metrics by group, such as the user."""
    fids: bool = False
    """Whether ids carry the slot of their feature in their high bits, as fids of version 2, with 48 bits
    left for the value. Otherwise strings are hashed to all 64 bits, and whole numbers stay as they are."""
    optional: tuple[str, ...] = ()
    """Columns that the data may lack: they then read as empty cells, and a label is not there. A label that
    is not optional must be in every record: one without it is bad."""
    max_bad: float = 0.1
    """The fraction of records that may be bad, 0 to 1: dropped, counted and put where the source puts
    malformed records. More end the run, and with 0 the first does."""

    def __post_init__(self) -> None:
        for name, one in self.features.items():
            if not name or name.endswith(GAP) or not isinstance(one, AnyFeature):
                raise ConfigError(
                    f"features: {name!r} must be a name that does not end in {GAP!r}, with a feature such as "
                    f"IdFeature(), got {type(one).__name__}"
                )
        if not all(isinstance(label, Label) for label in self.labels.values()):
            raise ConfigError(
                f'labels must be labels by task, as in {{"click": Label()}}, got {self.labels!r}'
            )
        check_fields(self)
        if not 0 <= self.max_bad <= 1:
            raise ConfigError(f"max_bad must be from 0 to 1, got {self.max_bad}")
        for name, one in self.features.items():
            self._check(name, one)
        for name in self.histories:
            self._check_history(name)
        if self.group is not None:
            self.id_feature(self.group, "group")
        columns = self.columns  # refuses a column that is read in two ways
        for column in self.optional:
            if column not in columns:
                raise ConfigError(
                    f"optional names {column!r}, which no feature reads; {_near(column, columns)}"
                )
        self.slots  # noqa: B018  refuses slots that two have

    def _check(self, name: str, one: AnyFeature) -> None:
        if isinstance(one, RowSettings) and one.shares is not None:
            path = [name]
            while (shares := self.id_feature(path[-1], path[-1]).shares) is not None:
                self.id_feature(shares, f"features.{path[-1]}.shares")
                if shares in path:
                    raise ConfigError(
                        f"features share rows in a circle, {' -> '.join([*path, shares])}: let one of them "
                        "have rows of its own"
                    )
                path.append(shares)
            owner = self.features[path[-1]]
            if _kind(owner) != _kind(one):
                raise ConfigError(
                    f"features.{name}.shares: its ids are {_kind(one)} and those of {path[-1]!r} "
                    f"{_kind(owner)}, which would never be the same"
                )
        if isinstance(one, CrossFeature):
            for part in one.of:
                if isinstance(self.id_feature(part, f"features.{name}.of"), CrossFeature):
                    raise ConfigError(f"features.{name}.of: {part!r} is a cross itself; name what it is of")
        if isinstance(one, SequenceFeature) and one.times is not None and self.event_time is None:
            raise ConfigError(
                f"features.{name}.times: gaps are measured from the example's event time; set event_time"
            )

    def _check_history(self, name: str) -> None:
        one, where = self.features[name], f"features.{name}"
        assert isinstance(one, HistoryFeature)
        for key, each in [("of", one.of), *(("with", each) for each in one.with_), ("by", one.by)]:
            if each is None or (key == "with" and each == self.event_time and each not in self.features):
                continue
            if key == "with" and each == self.event_time:
                raise ConfigError(
                    f"{where}.with: {each!r} is both a feature and the column of the event time; give the "
                    f"feature another name, and set its column to {each!r}"
                )
            ids = [other for other, kind in self.features.items() if isinstance(kind, IdFeature)]
            found = self.features.get(each)
            if not isinstance(found, IdFeature):
                known = [*ids, *([self.event_time] if key == "with" and self.event_time is not None else [])]
                times = " or the column of the event time (event_time)" if key == "with" else ""
                raise ConfigError(f"{where}.{key}: {each!r} is no IdFeature{times}; {_near(each, known)}")
            if key != "by" and found.separator is not None:
                raise ConfigError(
                    f"{where}.{key}: {each!r} has several values in one text (separator), and a step of a "
                    "history has one"
                )
        if one.by is not None and self.event_time is None:
            raise ConfigError(f"{where}.by: events are in the order of their times; set event_time")
        taken = {*self.features, *(other + GAP for other in self.features)}
        for made in self.histories[name][1:]:
            if made.name in taken:
                raise ConfigError(
                    f"{where}.with: {made.name!r} is the name of another feature or list; rename one of them"
                )
            taken.add(made.name)

    @cached_property
    def histories(self) -> dict[str, tuple[HistoryList, ...]]:
        """Each history -> its lists: first that of its items, then those of `with`, in order."""
        found: dict[str, tuple[HistoryList, ...]] = {}
        for name, one in self.features.items():
            if isinstance(one, HistoryFeature):
                column = one.column or name
                lists = [HistoryList(name, column, one.of)]
                for each in one.with_:
                    feature = None if each == self.event_time else each
                    end = STEP_TIME if feature is None else each
                    lists.append(HistoryList(f"{name}.{end}", f"{column}.{end}", feature))
                found[name] = tuple(lists)
        return found

    def id_feature(self, name: str, where: str) -> AnyIdFeature:
        """Return a feature of ids.

        Args:
            where: What names it, for the message.

        Raises:
            ConfigError: There is none of that name.
        """
        found = self.features.get(name)
        if found is None or isinstance(found, FloatFeature):
            ids = [each for each, one in self.features.items() if not isinstance(one, FloatFeature)]
            raise ConfigError(f"{where}: {name!r} is no feature of ids; {_near(name, ids)}")
        return found

    # What it reads

    @property
    def raw(self) -> FeatureSpec:
        """What makes the same features of raw columns: this, unless it reads a log of served features."""
        return self

    @property
    def read_features(self) -> Mapping[str, AnyFeature]:
        """The features that batches have: all of them, but for those that a spec of `only` just names."""
        return self.features

    @cached_property
    def columns(self) -> dict[str, torch.dtype]:
        """Every column it reads -> its type in the data: int64, float32, or uint8 for texts.

        Whole numbers may be given for float32, and the event time is a `TIME`. Pass it to a
        format that would have to guess, as in `CsvFormat(types=...)`.
        """
        return {**self.inputs, **self.targets}

    @cached_property
    def inputs(self) -> dict[str, torch.dtype]:
        """The columns of features and of the event time -> their types."""
        found: dict[str, torch.dtype] = {}
        for name, one in self.read_features.items():
            for column, dtype in self._columns_of(name, one):
                known = found.setdefault(column, dtype)
                if TIME in (known, dtype):
                    found[column] = dtype if known is TIME else known  # a time may be of any type
                elif torch.int64 in (known, dtype) and torch.float32 in (known, dtype):
                    found[column] = torch.int64  # whole numbers are numbers, too
                elif known is not dtype:
                    raise ConfigError(
                        f"features.{name}: it reads column {column!r} as {_said(dtype)}, and another feature "
                        f"as {_said(found[column])}"
                    )
        if self.event_time is not None:
            found.setdefault(self.event_time, TIME)
        return found

    def _columns_of(self, name: str, one: AnyFeature) -> Iterator[tuple[str, torch.dtype]]:
        if not isinstance(one, HistoryFeature):
            yield from _columns_of(name, one)
            return
        for _, column, feature in self.histories[name]:
            of = None if feature is None else self.features[feature]
            is_text = one.separator is not None or (isinstance(of, IdFeature) and of.kind == "string")
            yield column, torch.uint8 if is_text else TIME if feature is None else torch.int64

    @cached_property
    def targets(self) -> dict[str, torch.dtype]:
        """The columns of labels that nothing else reads -> float32."""
        columns = (label.column or task for task, label in self.labels.items())
        return {column: torch.float32 for column in columns if column not in self.inputs}

    @cached_property
    def source_columns(self) -> dict[str, torch.dtype]:
        """The columns to read from the data -> their types: `columns` without the histories that the pipeline
        makes (`by`), and with those that decide which events enter one (`only`)."""
        found = dict(self.columns)
        for name, lists in self.histories.items():
            one = self.features[name]
            assert isinstance(one, HistoryFeature)
            if one.by is not None:
                for each in lists:
                    found.pop(each.column, None)
                if one.only is not None and one.only not in self.labels:
                    found.setdefault(one.only, torch.float32)
        return found

    @property
    def required(self) -> tuple[str, ...]:
        """The columns that must be there."""
        return tuple(name for name in self.columns if name not in self.optional)

    # What it makes

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """The features of ids in a batch, in order, those of time gaps behind their sequences, and the lists
        of a history behind it. Times of a history have no rows: see `with_rows`."""
        names: list[str] = []
        for name, one in self.read_features.items():
            if isinstance(one, HistoryFeature):
                names += [each.name for each in self.histories[name]]
            elif not isinstance(one, FloatFeature):
                names.append(name)
            if isinstance(one, SequenceFeature) and one.times is not None:
                names.append(name + GAP)
        return tuple(names)

    @cached_property
    def with_rows(self) -> tuple[str, ...]:
        """The features of ids that read rows: all but the times of histories."""
        times = {each.name for lists in self.histories.values() for each in lists if each.feature is None}
        return tuple(name for name in self.ids if name not in times)

    @cached_property
    def floats(self) -> dict[str, int]:
        """The features of numbers in a batch -> their width."""
        return {name: one.width for name, one in self.read_features.items() if isinstance(one, FloatFeature)}

    @cached_property
    def slots(self) -> dict[str, int]:
        """The slot of each feature of ids, if they are fids; empty otherwise.

        Chosen by the hash of the name of its rows, so that it stays when features come and go; the next free
        one where two meet.
        """
        if not self.fids:
            return {}
        owners = {name: self.owner(name) for name in self.with_rows}
        taken: dict[int, str] = {}
        chosen: dict[str, int] = {}
        for name in dict.fromkeys(owners.values()):
            slot = None if name.endswith(GAP) else self._rows_of(name).slot
            if slot is not None:
                if slot in taken:
                    raise ConfigError(
                        f"features.{name}.slot: {slot} is the slot of {taken[slot]!r}; choose another, or "
                        "share its rows"
                    )
                taken[slot] = name
                chosen[name] = slot
        for name in dict.fromkeys(owners.values()):
            if name not in chosen:
                slot = _slot_of(name)
                while slot in taken:
                    slot = slot % (MAX_SLOTS_V2 - 1) + 1
                taken[slot] = name
                chosen[name] = slot
        return {name: chosen[owner] for name, owner in owners.items()}

    def owner(self, name: str) -> str:
        """Return the feature whose rows a feature of ids reads."""
        if name not in self.features:  # a list of a history, or time gaps
            lists = (each for lists in self.histories.values() for each in lists if each.name == name)
            name = next((each.feature for each in lists if each.feature is not None), name)
        while name in self.features and (shares := self.id_feature(name, name).shares) is not None:
            name = shares
        return name

    def rows(self, name: str) -> str:
        """Return the name of the rows of a feature of ids: that of their table."""
        owner = self.owner(name)
        return owner if owner.endswith(GAP) else self._rows_of(owner).rows or owner

    def _rows_of(self, owner: str) -> RowSettings:
        found = self.id_feature(owner, owner)
        assert isinstance(found, RowSettings)  # a history owns none
        return found

    @property
    def to_learn(self) -> tuple[str, ...]:
        """The features with means or boundaries that `fit` has not learned yet."""
        return tuple(name for name, one in self.read_features.items() if _is_to_learn(one))

    def make(self, records: RawColumns) -> Batch:
        """Return what a model reads of some records.

        Raises:
            DataError: A column is missing or of another type, or a record is bad; says which, and why.
                `Pipeline.to_batches` leaves bad records out.
        """
        return self.reader.make(records)

    @cached_property
    def reader(self) -> RawReader:
        """What makes batches."""
        from monolith.feature.spec.reading import RawReader

        return RawReader(self)

    def groups(self, batch: Batch) -> Tensor | None:
        """Return the group of each example, int64, 0 for an example without; None without a `group`."""
        return replace(batch, group=self.group).groups

    def fit(
        self,
        stream: Iterable[RawColumns],
        *,
        show: bool = True,
        fraction: Callable[[], float | None] | None = None,
    ) -> FeatureSpec:
        """Return the same with the means and quantiles that are `to_learn`, learned in one pass over records.

        Args:
            stream: Read once to its end: a source or a `Pipeline`, of which `take` reads only some.
            show: Whether to say on standard error how far it has come.
            fraction: Says which part of the stream is read; without it there is no time left to say.

        Raises:
            DataError: A feature to learn found no number at all.
        """
        from monolith.feature.spec.fitting import fit

        return fit(self, stream, show=show, fraction=fraction)

    def without_labels(self) -> FeatureSpec:
        """Return the same for data that has no labels: what a server reads."""
        return replace(
            self,
            labels={},
            optional=tuple(name for name in self.optional if name in self.inputs),
        )

    def only(self, names: Iterable[str]) -> FeatureSpec:
        """Return what reads these features alone, without labels: one side of a model, such as its items.

        The batches have the same ids. It is for reading: rows stay those of the whole.

        Raises:
            ConfigError: A name is none of a feature, or a cross is to be read without what it is of.
        """
        # A model has names for the lists of histories and for time gaps, which are read with their feature.
        lists = {each.name: name for name, found in self.histories.items() for each in found}
        lists |= {name + GAP: name for name in self.features}
        wanted = {lists.get(name, name) for name in names}
        for name in wanted - self.read_features.keys():
            raise ConfigError(f"there is no feature {name!r}; {_near(name, self.read_features)}")
        listed = {
            each.feature
            for name, found in self.histories.items()
            if name in wanted
            for each in found
            if each.feature is not None
        }
        leads: dict[str, str] = {}  # owner of rows -> the first that is kept and reads them
        kept: dict[str, AnyFeature] = {}
        for name, one in self.features.items():
            if name not in wanted and name not in listed:
                continue
            kept[name] = one
            if isinstance(one, HistoryFeature):
                kept[name] = replace(one, by=None, only=None)
            elif isinstance(one, RowSettings):
                owner = self.owner(name)
                first = owner if owner in wanted | listed else leads.setdefault(owner, name)
                alone = first == name
                slot = self.slots.get(name, one.slot) if alone else None
                kept[name] = replace(one, shares=None if alone else first, slot=slot)
        gapped = any(isinstance(one, SequenceFeature) and one.times is not None for one in kept.values())
        timed = any(isinstance(one, HistoryFeature) and self.event_time in one.with_ for one in kept.values())
        given = {each.name: getattr(self, each.name) for each in fields(FeatureSpec)}
        given |= {
            "features": kept,
            "labels": {},
            "event_time": self.event_time if gapped or timed else None,
            "group": self.group if self.group in wanted else None,
            "optional": (),
        }
        unread = tuple(name for name in kept if name not in wanted)
        narrow = PartialSpec(**given, unread=unread) if unread else FeatureSpec(**given)
        optional = dict.fromkeys(name for name in self.optional if name in narrow.inputs)
        if timed and not gapped and self.event_time is not None:  # a history has times without it
            optional[self.event_time] = None
        return replace(narrow, optional=tuple(optional))

    # As text

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON and TOML can represent."""
        plain = to_dict(self)
        plain["features"] = {name: _without_none(one) for name, one in plain["features"].items()}
        plain["labels"] = {name: _without_none(one) for name, one in plain["labels"].items()}
        return _without_none(plain)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any], source: str = "features") -> FeatureSpec:
        """Return what `to_dict` was called on.

        Raises:
            ConfigError: Lists every unknown key, with the nearest known one, and every wrong value.
        """
        return config_from_mapping(cls, plain, source)

    def to_json(self, indent: int | None = None) -> str:
        """Return it as text that `from_json` reads back without loss."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str, source: str = "features") -> FeatureSpec:
        """Return what `to_json` was called on.

        Raises:
            ConfigError: The text is no JSON, or has unknown keys or wrong values.
        """
        try:
            plain = json.loads(text)
        except ValueError as cause:
            raise ConfigError(f"{source}: not JSON: {cause}") from cause
        if not isinstance(plain, dict):
            raise ConfigError(f"{source}: expected an object, got {type(plain).__name__}")
        return cls.from_dict(plain, source)

    def difference(self, other: FeatureSpec, *, strict: bool = True) -> str | None:
        """Return the first setting that gives saved rows or weights another meaning; None for none. The
        other spec is that of a checkpoint, and is called so.

        Labels, event time, where the data has a value, how rows are trained and how long they live may
        differ: see `FREE_TO_DIFFER`.

        Args:
            strict: Whether a feature that only one of them has is a difference, too.
        """
        if self.fids != other.fids:
            return f"fids is {self.fids} in this model and {other.fids} in the checkpoint"
        both = [name for name in self.features if name in other.features]
        if strict:
            for name in (*self.features, *other.features):
                if name not in both:
                    mine = name in self.features
                    return f"{'the checkpoint' if mine else 'this model'} does not have features.{name}"
        there = [name for name in other.features if name in both]
        if both != there:
            return (
                f"features are in the order {', '.join(both)} in this model and {', '.join(there)} in the "
                "checkpoint"
            )
        for name in both:
            for path, mine, theirs in differences(self.features[name], other.features[name]):
                return f"features.{name}.{path} is {mine!r} in this model and {theirs!r} in the checkpoint"
        for name, slot in self.slots.items():
            if other.slots.get(name, slot) != slot:
                return (
                    f"the slot of {name!r} is {slot} in this model and {other.slots[name]} in the checkpoint"
                )
        return None


@dataclass(frozen=True, kw_only=True)
class PartialSpec(FeatureSpec):
    """A part of a spec, as `only` returns it, with a history and without a feature that the history lists."""

    unread: tuple[str, ...] = ()
    """Features that histories name: no column of theirs is read, and batches do not have them."""

    @property
    def read_features(self) -> Mapping[str, AnyFeature]:
        return {name: one for name, one in self.features.items() if name not in self.unread}


def differences(one: AnyFeature, other: AnyFeature) -> Iterator[tuple[str, Any, Any]]:
    """Yield the settings that give saved rows or weights another meaning, with both values."""
    if type(one) is not type(other):
        yield "type", type(one).__name__, type(other).__name__
        return
    assert is_dataclass(one)
    for each in fields(one):
        mine, theirs = getattr(one, each.name), getattr(other, each.name)
        if each.name not in FREE_TO_DIFFER and mine != theirs:
            yield key_of(each.name), mine, theirs


def _without_none(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table without what is none, where that is the default: all but `missing` of a float."""
    return {key: value for key, value in plain.items() if value is not None or key == "missing"}


def _columns_of(name: str, one: AnyFeature) -> Iterator[tuple[str, torch.dtype]]:
    if isinstance(one, CrossFeature | HistoryFeature):
        return
    column = one.column or name
    if isinstance(one, IdFeature | SequenceFeature):
        is_text = one.kind == "string" or one.separator is not None
        yield column, torch.uint8 if is_text else torch.int64
        beside = one.weights if isinstance(one, IdFeature) else one.times
        if beside is not None:
            number = torch.float32 if isinstance(one, IdFeature) else TIME
            yield beside, torch.uint8 if one.separator is not None else number
    else:
        yield column, torch.uint8 if one.separator is not None else torch.float32


def _said(dtype: torch.dtype) -> str:
    return {torch.uint8: "texts", torch.int64: "whole numbers", torch.float32: "numbers", TIME: "times"}[
        dtype
    ]


def _kind(one: AnyFeature) -> str:
    """Return what the ids of a feature are, for features that share its rows."""
    if isinstance(one, IdFeature | SequenceFeature):
        return {"int": "whole numbers", "string": "hashes of strings"}[one.kind]
    return "buckets" if isinstance(one, BucketFeature) else "crosses"


def _is_to_learn(one: AnyFeature) -> bool:
    if isinstance(one, FloatFeature):
        return one.scale == "standard" and one.mean is None
    return isinstance(one, BucketFeature) and one.boundaries is None


def _slot_of(name: str) -> int:
    """Return a slot that follows from a name: 1 to 32767."""
    text = name.encode()

    hashed = int(native.hash_strings(text, np.array([0, len(text)]), 0, 2)[0])
    return hashed % (MAX_SLOTS_V2 - 1) + 1


def _near(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names) or 'none'}"
