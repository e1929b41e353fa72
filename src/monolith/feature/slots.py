"""Slots, slices and feature columns: what a feature's rows are made of, and which input reads them.

A slot owns rows: a user's, an item's. A slice is a stretch of the floats of those rows,
for one use: a bias for the linear part, a vector for the interactions. A feature column
is a column of the data that is looked up in a slot and combined; several of them
may share a slot, as a user's last clicks share the rows of items.

    item = FeatureSlot(SlotConfig(name="item", has_bias=True))
    vector = item.add_slice(16)
    clicked = FeatureColumn(item, "clicked_items", Mean())
    Layout("vectors", CONCAT, [clicked.lookup(vector)])
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Literal, NamedTuple

from monolith.errors import ConfigError, DuplicateNameError, EmptySlotError, FeatureError
from monolith.feature.combiners import Combiner, Sum
from monolith.feature.fids import MAX_SLOTS_V2
from monolith.table import (
    Adagrad,
    AdmissionConfig,
    Expiry,
    Fp16,
    Fp32,
    Ftrl,
    LearningRate,
    RandomUniform,
    Segment,
    SlotThresholds,
    TableConfig,
    Zeros,
    merge,
)
from monolith.table.compressors import Compressor
from monolith.table.config import (
    EmbeddingDtype,
    EmbeddingRounding,
    Initializer,
    TableTiers,
    check_embedding_storage,
)
from monolith.table.optimizers import Optimizer

_FOREVER = timedelta(days=36500)

ROW_OPTIMIZER = Adagrad()
"""The default optimizer of rows, of ready models and of slots made by hand. Meant for gradients
that are summed over a batch, as `EmbeddingOptimizer` applies them: their mean over a thousand examples would
be lost next to the first accumulator."""
BIAS_OPTIMIZER = Ftrl(initial_accumulator_value=1e-6, beta=1.0)
"""What trains the bias of a slot that is made by hand, as upstream does it; ready models train theirs by
`ROW_OPTIMIZER`. This is the one default that stays apart: Ftrl keeps other state than Adagrad, so that making
the two one would refuse older checkpoints. A rate or a first accumulator is in no checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotConfig:
    """How the rows of one kind of id are born, trained, compressed and let go."""

    name: str = ""
    """What the slot's table is called; by default the number of the slot."""
    slot_id: int | None = None
    """The slot in the high bits of the ids, when they are fids. Needed only if slots share a table."""
    table: str | None = None
    """A table to share with other slots, whose rows must be of the same layout; None for one of its own.
    Equal ids of slots that share a table share a row; fids of different slots are never equal."""
    has_bias: bool = False
    """Whether rows begin with one number for a model's linear part."""
    bias_initializer: Initializer = field(default_factory=Zeros)
    bias_optimizer: Optimizer = BIAS_OPTIMIZER
    bias_compressor: Compressor = field(default_factory=Fp32)
    bias_learning_rate: float | LearningRate | None = None
    initializer: Initializer = field(default_factory=RandomUniform)
    """The initializer of slices that set none; `optimizer`, `compressor` and `learning_rate` likewise."""
    optimizer: Optimizer = ROW_OPTIMIZER
    compressor: Compressor = field(default_factory=Fp16)
    learning_rate: float | LearningRate | None = None
    """The learning rate of slices that set none; None is the optimizer's own, with its warm-up."""
    occurrence_threshold: int = 0
    """Sightings after which an id is given a row on the next; 0 at once."""
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    """How these sightings are counted."""
    expire_after: timedelta = _FOREVER
    """Time without an update after which a row may go."""
    capacity_bytes: int | None = None
    """A ceiling on the memory of the slot's table; None for no ceiling."""
    when_full: Literal["refuse", "expire_oldest"] = "refuse"
    """What happens at that ceiling; see `TableConfig`."""
    initial_rows: int = 0
    """The initial capacity of the slot's table, in rows; 0 leaves it to the run."""
    embedding_dtype: EmbeddingDtype | None = None
    """How the slot's table stores embeddings while they are trained, bias included; see `TableConfig`. None
    leaves it to the run."""
    embedding_rounding: EmbeddingRounding | None = None
    """How steps are rounded to embedding_dtype; see `TableConfig`. None leaves it to the run."""

    def __post_init__(self) -> None:
        if not self.name:
            if self.slot_id is None:
                raise ConfigError("slot: needs a name, or a slot_id to be named by")
            object.__setattr__(self, "name", str(self.slot_id))
        if self.slot_id is not None and not 0 <= self.slot_id < MAX_SLOTS_V2:
            raise ConfigError(
                f"slot {self.name!r}: slot_id must be from 0 to {MAX_SLOTS_V2 - 1}, got {self.slot_id}"
            )
        check_embedding_storage(f"slot {self.name!r}", self.embedding_dtype, self.embedding_rounding)
        if self.occurrence_threshold < 0:
            raise ConfigError(
                f"slot {self.name!r}: occurrence_threshold must be 0 or more, got {self.occurrence_threshold}"
            )
        if self.initial_rows < 0:
            raise ConfigError(f"slot {self.name!r}: initial_rows must be 0 or more, got {self.initial_rows}")
        if self.expire_after < timedelta(0):
            raise ConfigError(
                f"slot {self.name!r}: expire_after must not be negative, got {self.expire_after}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class FeatureSlice:
    """Floats [start, end) of a slot's rows."""

    slot: FeatureSlot
    start: int
    end: int

    @property
    def dim(self) -> int:
        return self.end - self.start


class FeatureSlot:
    """The rows of one kind of id. Slices are added while a model is built, and are stored in that order."""

    def __init__(self, config: SlotConfig) -> None:
        self.config = config
        self._segments: list[Segment] = []
        self._slices: list[FeatureSlice] = []
        if config.has_bias:
            self._append(
                Segment(
                    dim=1,
                    optimizer=config.bias_optimizer,
                    initializer=config.bias_initializer,
                    compressor=config.bias_compressor,
                    learning_rate=config.bias_learning_rate,
                )
            )

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def dim(self) -> int:
        """Floats per row so far."""
        return sum(segment.dim for segment in self._segments)

    @property
    def slices(self) -> tuple[FeatureSlice, ...]:
        return tuple(self._slices)

    @property
    def bias(self) -> FeatureSlice:
        """The one float that the rows of a slot with a bias begin with."""
        if not self.config.has_bias:
            raise FeatureError(f"slot {self.name!r} has no bias; make it with SlotConfig(has_bias=True)")
        return self._slices[0]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """What a row is made of: neighbouring slices that are trained alike are one segment."""
        merged: list[Segment] = []
        for segment in self._segments:
            alike = merged and str(replace(merged[-1], dim=1)) == str(replace(segment, dim=1))
            if alike and segment.optimizer.rule.kind != "batch_softmax":
                merged[-1] = replace(merged[-1], dim=merged[-1].dim + segment.dim)
            else:
                merged.append(segment)
        return tuple(merged)

    def add_slice(
        self,
        dim: int,
        *,
        initializer: Initializer | None = None,
        optimizer: Optimizer | None = None,
        compressor: Compressor | None = None,
        learning_rate: float | LearningRate | None = None,
    ) -> FeatureSlice:
        """Add `dim` floats to the rows; what is not given is the slot's default. A rate of 0.0 is a rate."""
        config = self.config
        return self._append(
            Segment(
                dim=dim,
                optimizer=config.optimizer if optimizer is None else optimizer,
                initializer=config.initializer if initializer is None else initializer,
                compressor=config.compressor if compressor is None else compressor,
                learning_rate=config.learning_rate if learning_rate is None else learning_rate,
            )
        )

    def _append(self, segment: Segment) -> FeatureSlice:
        added = FeatureSlice(self, self.dim, self.dim + segment.dim)
        self._segments.append(segment)
        self._slices.append(added)
        return added

    def __repr__(self) -> str:
        return f"FeatureSlot({self.name!r}, dim={self.dim})"


@dataclass(frozen=True, slots=True, eq=False)
class FeatureColumn:
    """A column of the data, whose ids are looked up in a slot and combined."""

    slot: FeatureSlot
    feature: str
    combiner: Combiner = field(default_factory=Sum)

    def lookup(self, of: FeatureSlice) -> SliceUse:
        """Return the combined embeddings of one slice, for a layout to place."""
        if of.slot is not self.slot:
            raise FeatureError(
                f"feature {self.feature!r} reads slot {self.slot.name!r}, "
                f"and the slice is of slot {of.slot.name!r}"
            )
        return SliceUse(self, of.start, of.end)

    def bias(self) -> SliceUse:
        """Return the combined bias."""
        return self.lookup(self.slot.bias)

    def floats(self, start: int, end: int) -> SliceUse:
        """Return any stretch of the combined rows, across slices if need be."""
        return SliceUse(self, start, end)


@dataclass(frozen=True, slots=True, eq=False)
class SliceUse:
    """Floats [start, end) of a feature's combined rows."""

    column: FeatureColumn
    start: int
    end: int

    @property
    def dim(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class SlotTables:
    """The tables that slots need, by name in sorted order."""

    configs: dict[str, TableConfig]
    thresholds: dict[str, SlotThresholds]
    """By table: how often its ids must have been seen."""
    table_of: dict[str, str]
    """Slot to table."""


def collect_tables(
    slots: Iterable[FeatureSlot],
    *,
    seed: int = 0,
    merge_equal: bool = False,
    initial_rows: int = 0,
    embedding_dtype: EmbeddingDtype = "float32",
    embedding_rounding: EmbeddingRounding = "stochastic",
    tiers: TableTiers | None = None,
) -> SlotTables:
    """Settle which tables the slots need and what their rows are.

    Args:
        seed: For random initializers. The same in every process of a run.
        merge_equal: Whether slots with equal rows live in one table, whose name follows from theirs. Only
            those whose ids are fids (`slot_id`), since equal ids of two slots would be one row; and neither
            those with a table by name nor those with a ceiling of their own.
        initial_rows: The initial capacity of the table of each slot, in rows, if the slot has none.
        embedding_dtype, embedding_rounding: How tables store embeddings, if the slot does not say.
        tiers: Where the rows of each table are; in memory by default.

    Raises:
        DuplicateNameError: Two slots have one name.
        EmptySlotError: A slot has no slice, so its rows would be empty.
        ConfigError: Slots that share a table have different rows, or limits of their own without a slot_id.
    """
    stored = _Storage(embedding_dtype, embedding_rounding)
    groups: dict[str, list[FeatureSlot]] = {}
    seen: dict[str, FeatureSlot] = {}
    for slot in slots:
        if seen.setdefault(slot.name, slot) is not slot:
            raise DuplicateNameError(f"two slots are named {slot.name!r}; share one, or rename one")
        if not slot.slices:
            raise EmptySlotError(f"slot {slot.name!r} has no slices; add one with add_slice")
        group = groups.setdefault(slot.config.table or slot.name, [])
        if slot not in group:
            group.append(slot)
    merged = _merged(groups, seed, stored) if merge_equal else {}
    for name, config in merged.items():
        groups[name] = [slot for table, _ in config.merged for slot in groups.pop(table)]
    configs: dict[str, TableConfig] = {}
    thresholds: dict[str, SlotThresholds] = {}
    table_of: dict[str, str] = {}
    for name, group in sorted(groups.items()):
        config, thresholds[name] = _table(name, group, seed, stored)
        rows = sum(slot.config.initial_rows or initial_rows for slot in group)
        config = replace(config, initial_rows=rows, **(tiers or TableTiers())._asdict())
        if name in merged:
            known = merged[name]
            config = replace(config, merged=known.merged, extra_restore_names=known.extra_restore_names)
        configs[name] = config
        table_of |= dict.fromkeys((slot.name for slot in group), name)
    return SlotTables(configs, thresholds, table_of)


class _Storage(NamedTuple):
    """How tables store embeddings, unless a slot says otherwise."""

    dtype: EmbeddingDtype
    rounding: EmbeddingRounding

    def of(self, slot: SlotConfig) -> _Storage:
        return _Storage(slot.embedding_dtype or self.dtype, slot.embedding_rounding or self.rounding)


def _merged(groups: Mapping[str, list[FeatureSlot]], seed: int, storage: _Storage) -> dict[str, TableConfig]:
    """Return the tables that several slots with equal rows are merged into, by name."""
    equal: dict[AdmissionConfig, dict[str, TableConfig]] = {}
    numbers: dict[str, int] = {}
    for name, (first, *others) in groups.items():
        config = first.config
        if others or config.slot_id is None or config.table is not None or config.capacity_bytes is not None:
            continue
        numbers[name] = config.slot_id
        # Times to expire and thresholds may differ: a table of several slots has them by slot.
        row = TableConfig(
            name=name,
            segments=first.segments,
            seed=seed,
            embedding_dtype=storage.of(config).dtype,
            embedding_rounding=storage.of(config).rounding,
        )
        equal.setdefault(config.admission, {})[name] = row
    found = [group for configs in equal.values() for group in merge(configs) if len(group.slots) > 1]
    return {
        group.config.name: replace(group.config, merged=tuple((slot, numbers[slot]) for slot in group.slots))
        for group in found
    }


def _table(
    name: str, slots: list[FeatureSlot], seed: int, storage: _Storage
) -> tuple[TableConfig, SlotThresholds]:
    first = slots[0]
    config = TableConfig(
        name=name,
        segments=first.segments,
        seed=seed,
        capacity_bytes=first.config.capacity_bytes,
        when_full=first.config.when_full,
        embedding_dtype=storage.of(first.config).dtype,
        embedding_rounding=storage.of(first.config).rounding,
    )
    if len(slots) == 1:
        # Its ids need not be fids, so whatever their high bits say, they are this slot's.
        expiry = Expiry(default=first.config.expire_after)
        threshold = SlotThresholds(default=first.config.occurrence_threshold, counting=first.config.admission)
        return replace(config, expiry=expiry), threshold
    for slot in slots[1:]:
        if list(map(str, slot.segments)) != list(map(str, first.segments)):
            raise ConfigError(
                f"slots {first.name!r} and {slot.name!r} share table {name!r} and have different rows: "
                f"{_rows(first)} and {_rows(slot)}. Give them the same slices, or tables of their own."
            )
        for shared in (
            "capacity_bytes",
            "when_full",
            "admission",
            "embedding_dtype",
            "embedding_rounding",
        ):
            if getattr(slot.config, shared) != getattr(first.config, shared):
                raise ConfigError(
                    f"slots {first.name!r} and {slot.name!r} share table {name!r}: "
                    f"set the same {shared} on both"
                )
    expire, thresholds = {}, {}
    for slot in slots:
        settings = slot.config
        if settings.slot_id is not None:
            expire[settings.slot_id] = settings.expire_after
            thresholds[settings.slot_id] = settings.occurrence_threshold
        elif settings.occurrence_threshold or settings.expire_after != _FOREVER:
            raise ConfigError(
                f"slot {slot.name!r} shares table {name!r} and has limits of its own: "
                "it needs a slot_id to tell its ids apart"
            )
        else:
            warnings.warn(
                f"slot {slot.name!r} shares table {name!r} and has no slot_id: nothing tells its ids from "
                "those of the other slots",
                stacklevel=4,
            )
    return replace(config, expiry=Expiry(default=_FOREVER, per_slot=expire)), SlotThresholds(
        per_slot=thresholds, counting=first.config.admission
    )


def _rows(slot: FeatureSlot) -> str:
    return "[" + ", ".join(map(str, slot.segments)) + "]"
