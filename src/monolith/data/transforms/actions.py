"""Actions: what a user did with an item, as a transform may add to or judge by them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from monolith.data.records import Records
from monolith.data.transforms.columns import (
    ACTIONS,
    SPECIAL_STRATEGIES,
    append_values,
    has_any,
    parse_integer,
    parse_number,
    rank_of,
    read_column,
    with_label_at,
)
from monolith.data.transforms.numbering import check_seed, draw
from monolith.data.transforms.transform import Rewrite
from monolith.data.transforms.values import FilterByValue
from monolith.errors import ConfigError


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
    """The share that is kept."""
    label: float | None = None
    """The first label of those that are kept; None leaves it."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.rate <= 1.0:
            raise ConfigError(f"special strategy {self.strategy}: rate must be from 0 to 1, got {self.rate}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialStrategy:
    """Keeps a share of the records that came about by special strategies, and may set their label.

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
    """Read `strategy:rate[:label],...`; ConfigError where it has another form."""
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
