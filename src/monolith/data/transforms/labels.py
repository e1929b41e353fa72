"""Actions and labels: actions added and judged; labels made of actions, moved, capped, normalized.

A record has one label per task. A task that says nothing about a record has the lowest float32,
INVALID_LABEL, which a loss ignores; `BlankInvalidLabels` turns it into the NaN that a batch has for a missing
label."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from monolith.data.records import LABEL, Records
from monolith.data.transforms.columns import (
    ACTIONS,
    CHANNEL,
    SAMPLE_RATE,
    SPECIAL_STRATEGIES,
    append_values,
    first_values,
    has_any,
    join_rows,
    parse_integer,
    parse_integer_list,
    parse_number,
    rank_of,
    read_column,
    with_label_at,
)
from monolith.data.transforms.transform import Rewrite, check_seed, draw, one_each
from monolith.data.transforms.values import FilterByValue
from monolith.errors import ConfigError
from monolith.tensors import RaggedTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class AddAction(Rewrite):
    """Adds an action to the records that a filter would keep and that do not have it."""

    where: FilterByValue
    action: int

    def rewrite(self, records: Records) -> Records:
        actions = read_column(records, ACTIONS, torch.int64)
        missing = self.where.mask(records) & ~has_any(actions, (self.action,))
        added = torch.full((len(records),), self.action)
        return records.with_columns({ACTIONS: append_values(actions, added, missing)})


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyRule:
    """What becomes of the records of one strategy."""

    strategy: int
    rate: float
    """The fraction that is kept."""
    label: float | None = None
    """The first label of those that are kept; None leaves it."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.rate <= 1.0:
            raise ConfigError(f"special strategy {self.strategy}: rate must be from 0 to 1, got {self.rate}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialStrategy:
    """Keeps a fraction of the records that special strategies produced, and may set their label.

    Of several strategies the one that comes first in the rules decides. A record whose
    strategies are all unlisted is dropped.
    """

    rules: str
    """`strategy:rate` or `strategy:rate:label`, with commas between rules."""
    keep_empty: bool = True
    """Whether records without a strategy are kept, as they are."""
    seed: int = 0

    def __post_init__(self) -> None:
        parse_strategy_rules(self.rules)
        check_seed("special strategy", self.seed)

    def __call__(self, records: Records, *, first: int) -> Records:
        rules = parse_strategy_rules(self.rules)
        strategies = read_column(records, SPECIAL_STRATEGIES, torch.int64)
        deciding = rank_of(strategies, [rule.strategy for rule in rules])
        luck = torch.from_numpy(draw("special_strategy", self.seed, records, first))[:, 0]
        kept = (strategies.row_lengths() == 0) & self.keep_empty
        for place, rule in enumerate(rules):
            decided = deciding == place
            kept |= decided & (luck < rule.rate)
            if rule.label is not None:
                records = with_label_at(records, 0, torch.full((len(records),), rule.label), decided)
        return records.keep(kept)


def parse_strategy_rules(text: str) -> tuple[StrategyRule, ...]:
    """Read `strategy:rate[:label],...`; ConfigError if it has another form."""
    rules: dict[int, StrategyRule] = {}
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        parts = [part.strip() for part in item.split(":")]
        if len(parts) not in (2, 3):
            raise ConfigError(
                f"special strategy: expected strategy:rate or strategy:rate:label, got {item!r}"
            )
        strategy = parse_integer(parts[0])
        if strategy in rules:
            raise ConfigError(f"special strategy: {strategy} has two rules")
        rules[strategy] = StrategyRule(
            strategy=strategy,
            rate=parse_number(parts[1], f"special strategy: the rate of {item!r}"),
            label=parse_number(parts[2], f"special strategy: the label of {item!r}") if parts[2:] else None,
        )
    if not rules:
        raise ConfigError("special strategy: there must be at least one rule")
    return tuple(rules.values())


INVALID_LABEL = float(np.finfo(np.float32).min)
"""Says that a task has nothing to say about a record."""


def is_valid(labels: Tensor) -> Tensor:
    """Return a mask of labels that are there: neither invalid nor NaN."""
    return (labels != INVALID_LABEL) & ~labels.isnan()


def label_matrix(records: Records, width: int) -> Tensor:
    """Return float32 of shape (len(records), width): all labels, INVALID_LABEL if there is none."""
    return read_column(records, LABEL, torch.float32).to_padded(width, INVALID_LABEL)


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelTask:
    """How the label of one task follows from a record's actions."""

    positive: tuple[int, ...]
    """Any of these makes it 1."""
    negative: tuple[int, ...] = ()
    """Else, any of these makes it negative; where none are named, every record is negative."""
    rate: float = 1.0
    """The fraction of negatives that are kept; the remaining ones become invalid."""

    def __post_init__(self) -> None:
        if not self.positive:
            raise ConfigError("add label: a task must have at least one positive action")
        if both := set(self.positive) & set(self.negative):
            raise ConfigError(f"add label: actions {sorted(both)} are both positive and negative")
        if not 0.0 <= self.rate <= 1.0:
            raise ConfigError(f"add label: a rate must be from 0 to 1, got {self.rate}")


@dataclass(frozen=True, kw_only=True, slots=True)
class AddLabel:
    """Appends one label per task, made of the record's actions.

    1 with a positive action, whatever else is there. Otherwise invalid where the task has
    negative actions and the record none of them; otherwise `negative_value` with the
    task's rate as probability, and invalid without luck.

    A first label that was there before and is not above 0 becomes invalid: it meant
    "none of the actions", which the new labels say better. The record's sample rate
    becomes `new_sample_rate`.
    """

    tasks: str
    """`positives:negatives:rate;...`, with commas between actions: "1,2:3:0.5;4::1"."""
    negative_value: float = 0.0
    new_sample_rate: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        parse_label_tasks(self.tasks)
        check_seed("add label", self.seed)
        if not 0.0 < self.new_sample_rate <= 1.0:
            raise ConfigError(f"add label: new_sample_rate must be in (0, 1], got {self.new_sample_rate}")

    def __call__(self, records: Records, *, first: int) -> Records:
        tasks = parse_label_tasks(self.tasks)
        actions = read_column(records, ACTIONS, torch.int64)
        lucky = torch.from_numpy(draw("add_label", self.seed, records, first, len(tasks)))
        added = torch.full((len(records), len(tasks)), INVALID_LABEL)
        for place, task in enumerate(tasks):
            negative = lucky[:, place] < task.rate
            if task.negative:
                negative &= has_any(actions, task.negative)
            added[negative, place] = self.negative_value
            added[has_any(actions, task.positive), place] = 1.0
        old = read_column(records, LABEL, torch.float32)
        not_above = first_values(old, 1.0) <= 0
        records = with_label_at(
            records.with_columns({LABEL: old}), 0, torch.full((len(records),), INVALID_LABEL), not_above
        )
        rates = torch.full((len(records),), self.new_sample_rate)
        return records.with_columns(
            {LABEL: join_rows(records[LABEL], _ragged(added)), SAMPLE_RATE: one_each(rates)}
        )


def parse_label_tasks(text: str) -> tuple[LabelTask, ...]:
    """Read `positives:negatives:rate;...`.

    Raises:
        ConfigError: A task has another form, or makes no sense.
    """
    tasks = []
    for item in filter(None, (piece.strip() for piece in text.split(";"))):
        parts = item.split(":")
        if len(parts) != 3:
            raise ConfigError(f"add label: expected positives:negatives:rate, got {item!r}")
        tasks.append(
            LabelTask(
                positive=parse_integer_list(parts[0]),
                negative=parse_integer_list(parts[1]),
                rate=parse_number(parts[2], f"add label: the rate of {item!r}"),
            )
        )
    if not tasks:
        raise ConfigError(f"add label: tasks must name at least one, got {text!r}")
    return tuple(tasks)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScatterLabel(Rewrite):
    """Moves the first label to the position of the record's channel; all others become invalid.

    Every record then has as many labels as the highest position needs. In a channel that
    is not listed, or without a label, all of them are invalid.
    """

    positions: str
    """`chnid:index,...`"""

    def __post_init__(self) -> None:
        parse_positions(self.positions)

    def rewrite(self, records: Records) -> Records:
        positions = parse_positions(self.positions)
        channels = read_column(records, CHANNEL, torch.int64)
        channel, known = first_values(channels, 0), channels.row_lengths() > 0
        label = first_values(read_column(records, LABEL, torch.float32), INVALID_LABEL)
        scattered = torch.full((len(records), max(positions.values()) + 1), INVALID_LABEL)
        for chnid, position in positions.items():
            rows = known & (channel == chnid)
            scattered[rows, position] = label[rows]
        return records.with_columns({LABEL: _ragged(scattered)})


def parse_positions(text: str) -> dict[int, int]:
    """Read `chnid:index,...`; ConfigError if it has another form."""
    positions: dict[int, int] = {}
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        parts = item.split(":")
        if len(parts) != 2:
            raise ConfigError(f"scatter label: expected chnid:index, got {item!r}")
        chnid, index = parse_integer(parts[0].strip()), parse_integer(parts[1].strip())
        if chnid in positions or index < 0:
            raise ConfigError(f"scatter label: {item!r}: an index is 0 or more, and a channel is listed once")
        positions[chnid] = index
    if not positions:
        raise ConfigError("scatter label: positions must list at least one chnid:index")
    return positions


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelUpperBound(Rewrite):
    """Caps the label at each position; a record with fewer labels than bounds stays as it is."""

    bounds: tuple[float, ...]

    def rewrite(self, records: Records) -> Records:
        if LABEL not in records.columns:
            return records
        labels = read_column(records, LABEL, torch.float32)
        begins = labels.row_splits[:-1][labels.row_lengths() >= len(self.bounds)]
        flat = labels.flat_values.clone()
        for place, bound in enumerate(self.bounds):
            flat[begins + place] = flat[begins + place].clamp(max=bound)
        return records.with_columns({LABEL: labels.with_values(flat)})


@dataclass(frozen=True, kw_only=True, slots=True)
class NormStep:
    """One step of a normalization, with v the value and y the label.

    log: log(y + v). scale: y v. scale2int: y v without its fraction. pow: y^v. repow: v^y.
    scalelog: log(1 + y v).
    """

    method: Literal["log", "scale", "scale2int", "pow", "repow", "scalelog"]
    value: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ConfigError(f"label normalization: {self.method} needs a finite value, got {self.value}")
        if self.method == "repow" and self.value <= 0:
            raise ConfigError(f"label normalization: repow needs a value above 0, got {self.value}")

    def __call__(self, labels: Tensor) -> Tensor:
        match self.method:
            case "log":
                return torch.log(labels + self.value)
            case "scale":
                return labels * self.value
            case "scale2int":
                return torch.trunc(labels * self.value)
            case "pow":
                return labels**self.value
            case "repow":
                return self.value**labels
            case "scalelog":
                return torch.log1p(labels * self.value)


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelNormalization(Rewrite):
    """Sends every label through some steps, one after the other.

    Invalid labels stay so. A label for which a step has no finite result, such as the
    logarithm of a negative one, becomes invalid.
    """

    steps: tuple[NormStep, ...]
    index: int | None = None
    """The position to normalize; None for all."""

    def __post_init__(self) -> None:
        if not self.steps:
            raise ConfigError("label normalization: there must be at least one step")
        if self.index is not None and self.index < 0:
            raise ConfigError(f"label normalization: index must be 0 or more, got {self.index}")

    def rewrite(self, records: Records) -> Records:
        if LABEL not in records.columns:
            return records
        labels = read_column(records, LABEL, torch.float32)
        # In float64, or a step on a large label overflows before the next one brings it back.
        values = labels.flat_values.to(torch.float64)
        for step in self.steps:
            values = step(values)
        normal = values.to(torch.float32)
        normal = torch.where(normal.isfinite(), normal, INVALID_LABEL)
        chosen = is_valid(labels.flat_values)
        if self.index is not None:
            place = torch.arange(len(normal)) - labels.row_splits[labels.value_rowids]
            chosen &= place == self.index
        return records.with_columns(
            {LABEL: labels.with_values(torch.where(chosen, normal, labels.flat_values))}
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class UseFieldAsLabel(Rewrite):
    """Writes the first value of a column of numbers as a label; records without a value stay as they are.

    Positions before it that a record does not have become invalid.
    """

    column: str
    index: int = 0

    def __post_init__(self) -> None:
        if self.index < 0:
            raise ConfigError(f"use field as label: index must be 0 or more, got {self.index}")

    def rewrite(self, records: Records) -> Records:
        field = read_column(records, self.column, torch.float32)
        where = field.row_lengths() > 0
        labels = read_column(records, LABEL, torch.float32)
        missing = (self.index + 1 - labels.row_lengths()).clamp(min=0) * where
        filling = RaggedTensor.from_row_lengths(
            torch.full((int(missing.sum()),), INVALID_LABEL), missing, validate=False
        )
        records = records.with_columns({LABEL: join_rows(labels, filling)})
        return with_label_at(records, self.index, first_values(field, 0.0), where)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlankInvalidLabels(Rewrite):
    """Turns invalid labels into NaN, which a batch has where a record has no label."""

    value: float = math.nan
    """What to write instead."""

    def rewrite(self, records: Records) -> Records:
        if LABEL not in records.columns:
            return records
        labels = read_column(records, LABEL, torch.float32)
        flat = labels.flat_values
        return records.with_columns(
            {LABEL: labels.with_values(flat.masked_fill(flat == INVALID_LABEL, self.value))}
        )


def _ragged(matrix: Tensor) -> RaggedTensor:
    """Return a column with one row of the matrix per record."""
    rows, width = matrix.shape
    return RaggedTensor(matrix.reshape(-1), torch.arange(rows + 1) * width, validate=False)
