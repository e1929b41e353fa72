"""Downsampling: training on a share of the negatives, and still learning the true odds.

If a negative stays with probability r, a model of what stays learns odds that are too
high by 1/r: for every record, the positive ones too. So each record that stays carries r
as its `line_id.sample_rate`, and the loss sees `logit - log r`, which is what
`nn.LogitCorrection` does with it. The logit without that learns the true odds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from monolith.data.records import Records
from monolith.data.transforms.columns import (
    ACTIONS,
    SAMPLE_RATE,
    first_values,
    parse_integer,
    parse_number,
    rank_of,
    read_column,
    read_labels,
)
from monolith.data.transforms.numbering import check_seed, draw, one_each
from monolith.data.transforms.transform import Rewrite
from monolith.errors import ConfigError, DataError
from monolith.nn.layers import correct_logits


@dataclass(frozen=True, kw_only=True, slots=True)
class NegativeDownsample:
    """Drops negatives at random, and multiplies the sample rate of all that stay by the share that stayed.

    A positive record's share is that of a negative with the same actions.
    """

    drop_rate: float
    """The share of negatives that go."""
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
        shares = [*per_action.values(), self.drop_rate, self.drop_rate]
        kept_share = 1.0 - torch.tensor(shares, dtype=torch.float64)[deciding]
        labels = read_labels(records, "negative downsample").to_padded(self.label_index + 1, float("nan"))
        positive = labels[:, self.label_index] > self.threshold
        luck = torch.from_numpy(draw("negative_downsample", self.seed, records, first))[:, 0]
        rates = (sample_rates(records) * kept_share).to(torch.float32)
        return records.with_columns({SAMPLE_RATE: one_each(rates)}).keep(positive | (luck < kept_share))


def parse_drop_rates(text: str) -> dict[int, float]:
    """Read `action:drop_rate,...`; ConfigError where it has another form."""
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
    """Return float32 of shape (len(records),): how likely each record was to stay; 1 where it does not say.

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
