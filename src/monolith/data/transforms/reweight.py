"""Reweighting: how often a record is trained on, and with which label, by its actions.

A record is emitted when its first actions are known, and may come again with more. What
the earlier one taught cannot be taken back, but it can be outweighed: a record that says
what was emitted before (`line_id.pre_actions`) comes with as many copies, of the right
label, as make up for it. With `pre` and `cur` the copies that the earlier and the current
actions stand for, each with its label:

    no label                                        dropped
    no actions at all, or only unlisted ones        one copy, unchanged
    no earlier actions                              cur copies, current label
    current actions not of higher priority          dropped: nothing new
    another label than before                       pre + cur copies, current label
    the same label, cur >= pre                      cur - pre copies, current label
    the same label, cur < pre                       pre - cur copies, label reversed

The action that comes first in the priorities decides for its list, by its rule. An action
that is not listed ranks below all that are; no action at all ranks last. Copies are the
weight of the deciding action, times that of each unlisted action that has a rule.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from monolith.data.records import LABEL, Records
from monolith.data.transforms.columns import (
    ACTIONS,
    PRE_ACTIONS,
    has_any,
    parse_integer,
    parse_number,
    rank_of,
    read_column,
    with_label_at,
)
from monolith.data.transforms.numbering import renumbered
from monolith.data.transforms.transform import Rewrite
from monolith.errors import ConfigError
from monolith.tensors import RaggedTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionRule:
    """What an action stands for."""

    action: int
    weight: int
    """Copies; 0 drops the record."""
    label: float


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceReweight(Rewrite):
    """Repeats, relabels or drops records by their actions; see the table above.

    Earlier actions of which none is listed stand for what was emitted then: one copy,
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
