"""Downsampling and reweighting: how often a record is trained on, and with which label.

**Downsampling.** If a negative stays with probability r, a model of what stays learns odds that are too high
by 1/r: for every record, the positive ones too. So each record that stays carries r as its
`line_id.sample_rate`, and the loss uses `logit - log r`, as `nn.LogitCorrection` does. The logit without that
learns the true odds.

**Reweighting.** A record is emitted when its first actions are known, and may come again with more. The
effect of the earlier one cannot be undone, but it can be outweighed: a record that lists the actions emitted
before (`line_id.pre_actions`) comes with as many copies, of the right label, as make up for it. With `pre`
and `cur` the copies that the earlier and the current actions stand for, each with its label:

    no label                                        dropped
    no actions at all, or only unlisted ones        one copy, unchanged
    no earlier actions                              cur copies, current label
    current actions not of higher priority          dropped: nothing new
    another label than before                       pre + cur copies, current label
    the same label, cur >= pre                      cur - pre copies, current label
    the same label, cur < pre                       pre - cur copies, label reversed

The action that comes first in the priorities decides for its list, by its rule. An action that is not listed
ranks below all that are; no action at all ranks last. Copies are the weight of the deciding action, times
that of each unlisted action that has a rule."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from monolith.data.records import LABEL, Records
from monolith.data.transforms.columns import (
    ACTIONS,
    PRE_ACTIONS,
    SAMPLE_RATE,
    first_values,
    has_any,
    parse_integer,
    parse_number,
    rank_of,
    read_column,
    read_labels,
    with_label_at,
)
from monolith.data.transforms.transform import Rewrite, check_seed, draw, one_each, renumbered
from monolith.errors import ConfigError, DataError
from monolith.nn.layers import correct_logits
from monolith.tensors import RaggedTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class NegativeDownsample:
    """Drops negatives at random, and multiplies the sample rate of the remaining records by the kept
    fraction.

    The fraction of a positive record is that of a negative with the same actions.
    """

    drop_rate: float
    """The fraction of negatives to drop."""
    per_action: str = ""
    """`action:drop_rate,...` for records with these actions; of several the first listed decides."""
    label_index: int = 0
    threshold: float = 0.0
    """A record is positive if its label is above this. Without a label it is negative."""
    seed: int = 0

    def __post_init__(self) -> None:
        rates = parse_drop_rates(self.per_action)
        for rate in (self.drop_rate, *rates.values()):
            if not 0.0 <= rate < 1.0:
                raise ConfigError(
                    f"negative downsample: a drop rate must be in [0, 1), got {rate}. "
                    "With no negatives left there are no odds to correct; to drop them all, use a filter."
                )
        if self.label_index < 0:
            raise ConfigError(f"negative downsample: label_index must be 0 or more, got {self.label_index}")
        check_seed("negative downsample", self.seed)

    def __call__(self, records: Records, *, first: int) -> Records:
        per_action = parse_drop_rates(self.per_action)
        deciding = rank_of(read_column(records, ACTIONS, torch.int64), list(per_action))
        dropped = [*per_action.values(), self.drop_rate, self.drop_rate]
        kept = 1.0 - torch.tensor(dropped, dtype=torch.float64)[deciding]
        labels = read_labels(records, "negative downsample").to_padded(self.label_index + 1, float("nan"))
        positive = labels[:, self.label_index] > self.threshold
        luck = torch.from_numpy(draw("negative_downsample", self.seed, records, first))[:, 0]
        rates = (sample_rates(records) * kept).to(torch.float32)
        return records.with_columns({SAMPLE_RATE: one_each(rates)}).keep(positive | (luck < kept))


def parse_drop_rates(text: str) -> dict[int, float]:
    """Read `action:drop_rate,...`; ConfigError if it has another form."""
    rates: dict[int, float] = {}
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        parts = [part.strip() for part in item.split(":")]
        if len(parts) != 2:
            raise ConfigError(f"negative downsample: expected action:drop_rate, got {item!r}")
        action = parse_integer(parts[0])
        if action in rates:
            raise ConfigError(f"negative downsample: action {action} has two drop rates")
        rates[action] = parse_number(parts[1], f"negative downsample: the drop rate of {item!r}")
    return rates


def sample_rates(records: Records) -> Tensor:
    """Return float32 of shape (len(records),): how likely each record was to stay; 1 if it does not say.

    Raises:
        DataError: A rate is not above 0.
    """
    rates = first_values(read_column(records, SAMPLE_RATE, torch.float32), 1.0)
    if not bool((rates > 0).all()):
        raise DataError(f"a sample rate must be above 0, got {float(rates[~(rates > 0)][0])}")
    return rates


@dataclass(frozen=True, kw_only=True, slots=True)
class LogOddsCorrection(Rewrite):
    """Writes what a loss adds to the logit of each record, `-log(sample rate)`, as a feature."""

    into: str = "logit_correction"

    def rewrite(self, records: Records) -> Records:
        rates = sample_rates(records)
        return records.with_columns({self.into: one_each(correct_logits(torch.zeros_like(rates), rates))})


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionRule:
    """What an action means."""

    action: int
    weight: int
    """Copies; 0 drops the record."""
    label: float


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceReweight(Rewrite):
    """Repeats, relabels or drops records by their actions; see the table above.

    Earlier actions of which none is listed stand for the record emitted then: one copy,
    with the label the record has.
    """

    action_priority: tuple[int, ...]
    """Highest first. Each needs a rule."""
    rules: str
    """`action:weight:label`, with commas between rules."""
    label_index: int = 0
    """Which label is read and written."""

    def __post_init__(self) -> None:
        rules = parse_action_rules(self.rules)
        if not self.action_priority or len(set(self.action_priority)) < len(self.action_priority):
            raise ConfigError(
                f"instance reweight: action_priority must list actions, each once, got {self.action_priority}"
            )
        if missing := [action for action in self.action_priority if action not in rules]:
            raise ConfigError(
                f"instance reweight: actions {missing} have a priority but no rule; add one each"
            )
        if self.label_index < 0:
            raise ConfigError(f"instance reweight: label_index must be 0 or more, got {self.label_index}")
        labels = {rules[action].label for action in self.action_priority}
        for side in ({label for label in labels if label > 0}, {label for label in labels if label <= 0}):
            if len(side) > 1:
                raise ConfigError(
                    f"instance reweight: labels {sorted(side)} are of one sign, so it is not clear what the "
                    "others are reversed to. Use one label above 0 and one that is not."
                )

    def rewrite(self, records: Records) -> Records:
        cur = read_column(records, ACTIONS, torch.int64)
        pre = read_column(records, PRE_ACTIONS, torch.int64)
        labels = read_column(records, LABEL, torch.float32)
        own = labels.to_padded(self.label_index + 1)[:, self.label_index]
        listed = len(self.action_priority)
        cur_rank, pre_rank = rank_of(cur, self.action_priority), rank_of(pre, self.action_priority)
        cur_copies, cur_label = self._worth(cur, cur_rank, own)
        pre_copies, pre_label = self._worth(pre, pre_rank, own)

        # The table of the module, for all records at once.
        is_first = pre_rank == listed + 1
        same = cur_label == pre_label
        corrected = torch.where(same, (cur_copies - pre_copies).abs(), cur_copies + pre_copies)
        copies = torch.where(is_first, cur_copies, torch.where(cur_rank < pre_rank, corrected, 0))
        label = torch.where(~is_first & same & (pre_copies > cur_copies), self._reverse(cur_label), cur_label)
        copies[labels.row_lengths() <= self.label_index] = 0

        rows = torch.repeat_interleave(torch.arange(len(records)), copies)
        copy = torch.arange(len(rows)) - (copies.cumsum(0) - copies)[rows]
        decided = torch.ones(len(records), dtype=torch.bool)
        return renumbered(with_label_at(records, self.label_index, label, decided).take(rows), copy)

    def _worth(self, actions: RaggedTensor, rank: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many copies, and of which label, each list of actions stands for."""
        rules = parse_action_rules(self.rules)
        listed = [rules[action] for action in self.action_priority]
        is_listed = rank < len(listed)
        place = rank.clamp(max=len(listed) - 1)
        copies = torch.tensor([rule.weight for rule in listed])[place]
        for action, rule in rules.items():
            if action not in self.action_priority:
                copies = torch.where(has_any(actions, (action,)), copies * rule.weight, copies)
        label = torch.tensor([rule.label for rule in listed], dtype=torch.float32)[place]
        return torch.where(is_listed, copies, 1), torch.where(is_listed, label, own)

    def _reverse(self, label: Tensor) -> Tensor:
        rules = parse_action_rules(self.rules)
        labels = {rules[action].label for action in self.action_priority}
        positive = next((one for one in labels if one > 0), 1.0)
        negative = next((one for one in labels if one <= 0), 0.0)
        return torch.where(label > 0, negative, positive)


def parse_action_rules(text: str) -> dict[int, ActionRule]:
    """Read `action:weight:label,...`; a semicolon will do as well.

    Raises:
        ConfigError: A rule has another form, or an action two rules.
    """
    rules: dict[int, ActionRule] = {}
    for item in filter(None, (piece.strip() for piece in re.split("[,;]", text))):
        parts = [part.strip() for part in item.split(":")]
        if len(parts) != 3:
            raise ConfigError(f"instance reweight: expected action:weight:label, got {item!r}")
        action, weight = parse_integer(parts[0]), parse_integer(parts[1])
        if weight < 0:
            raise ConfigError(f"instance reweight: {item!r}: a weight is a number of copies, 0 or more")
        if action in rules:
            raise ConfigError(f"instance reweight: action {action} has two rules")
        label = parse_number(parts[2], f"instance reweight: the label of {item!r}")
        rules[action] = ActionRule(action=action, weight=weight, label=label)
    return rules
