"""Generated negatives: the user of a positive record with the item of another.

A log of clicks says little about items that a user would not click. So each positive record
is preceded by a few made of its user side and the item side of an item that was seen lately:
in the same channel, which is hard to tell apart, or in another, which is easy. The seed, the
record's number and the pool, which all earlier records have filled, decide what is drawn. The
pool is saved with the position, so a resumed stream draws the same negatives.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from monolith.data.records import (
    LABEL,
    LINE_ID,
    WEIGHT,
    ColumnCheck,
    Records,
    concat_rows,
    empty_rows,
    take_rows,
)
from monolith.data.sampling.item_pool import Drawn, ItemPool, ItemPoolConfig, encode_channel, restore_channels
from monolith.data.transforms.columns import (
    ACTIONS,
    CHANNEL,
    PRE_ACTIONS,
    first_values,
    has_any,
    rank_of,
    read_column,
    set_rows,
)
from monolith.data.transforms.labels import INVALID_LABEL, is_valid
from monolith.data.transforms.transform import check_seed, draw, one_each, renumbered
from monolith.errors import ConfigError, DataError, RestoreError
from monolith.tensors import RaggedTensor

_LUCKS = 4
"""Drawn per negative: easy or hard, which channel, which item (twice, as one draw has 24 bits)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NegativeGenerationConfig:
    """How many negatives to make of each positive, and how."""

    neg_num: int
    """Negatives per positive: fewer while the pool is small."""
    item_features: tuple[str, ...]
    """The columns that belong to an item; all others belong to the user and the moment."""
    item_id: str = LINE_ID + "item_id"
    """The column that says which item a record is about, int64. Rewritten as well."""
    pool: ItemPoolConfig = field(default_factory=ItemPoolConfig)

    positive_actions: tuple[int, ...] = ()
    """A record is positive if the action that decides is one of these. If none are given, its label says."""
    action_priority: tuple[int, ...] = ()
    """Highest first: which action of a record decides. If none of them is there, any action does."""
    label_index: int = 0
    positive_label: float = 1.0
    """The label that makes a record positive, if no actions are given."""

    negative_label: float = 0.0
    """The label of the negatives made: at every position where the positive has a valid label."""
    negative_action: int | None = None
    """The only action of the negatives made; None for no action."""

    per_channel: bool = False
    """Whether each channel has a queue of its own; otherwise all share one."""
    channel_feature: str = CHANNEL
    """The int64 column that says which channel; records without are in channel 0."""
    easy_hard_ratio: float = 0.0
    """How likely a negative is to come from another channel, the larger the likelier; needs `per_channel`."""

    throw_origin: bool = False
    """Drop the positives themselves."""
    throw_origin_neg: bool = False
    """Drop the records that are not positive."""

    sampled_weight: float = 0.0
    """The instance weight of the negatives made; 0 or less leaves it to `unbiased`."""
    unbiased: bool = False
    """Weigh a negative 1 + neg_num t^decay / s, with t its item's place in the queue (1/size for the oldest,
    1 for the newest) and s how often the item was drawn. Otherwise 1."""
    decay: float = 1.0

    negative_in_pool_rate: float = 0.0
    """How likely the item of a record that is not positive is to enter the pool. Positives always do."""
    cache_negative_actions: tuple[int, ...] = ()
    """Where one of these actions decides, the item of such a record enters in any case."""
    seed: int = 0
    optional: tuple[str, ...] = ()
    """Columns of `item_features` that the data may lack; of another that is missing, negatives would keep the
    positive's."""

    def __post_init__(self) -> None:
        if self.neg_num < 1:
            raise ConfigError(f"negative generation: neg_num must be at least 1, got {self.neg_num}")
        if not self.item_features:
            raise ConfigError("negative generation: item_features must name the columns of an item")
        for name in ("easy_hard_ratio", "negative_in_pool_rate"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(
                    f"negative generation: {name} must be from 0 to 1, got {getattr(self, name)}"
                )
        if self.easy_hard_ratio and not self.per_channel:
            raise ConfigError(
                "negative generation: easy_hard_ratio needs per_channel: there is one channel only"
            )
        if self.label_index < 0:
            raise ConfigError(f"negative generation: label_index must be 0 or more, got {self.label_index}")
        if not self.positive_actions and self.positive_label == self.negative_label:
            raise ConfigError(
                f"negative generation: positive_label and negative_label are both {self.positive_label}"
            )
        if self.negative_action is not None and self.negative_action in self.positive_actions:
            raise ConfigError(
                f"negative generation: negative_action {self.negative_action} is a positive one"
            )
        if both := set(self.positive_actions) & set(self.cache_negative_actions):
            raise ConfigError(f"negative generation: actions {sorted(both)} are positive and negative")
        check_seed("negative generation", self.seed)


class NegativeGeneration:
    """A transform that puts made negatives before each positive. One thread uses it at a time."""

    def __init__(self, config: NegativeGenerationConfig, pool: ItemPool | None = None) -> None:
        """
        Args:
            pool: To draw from and fill; by default a new one, as the config says.
        """
        self.config = config
        self.pool = pool if pool is not None else ItemPool(config.pool)
        judged_by = ACTIONS if config.positive_actions else LABEL
        needed = dict.fromkeys((judged_by, config.item_id, *config.item_features))
        self._check = ColumnCheck(
            "negative generation",
            [name for name in needed if name not in config.optional],
            "NegativeGenerationConfig(optional=({},))",
        )

    def __call__(self, records: Records, *, first: int) -> Records:
        self._check.look(records)
        items = Records(
            len(records),
            {name: records[name] for name in self.config.item_features if name in records.columns},
        )
        first_row = self.pool.store(items)
        source, copies, drawn = self._draw(records, first, first_row)
        rows, copy = torch.tensor(source, dtype=torch.int64), torch.tensor(copies, dtype=torch.int64)
        if drawn:
            rest = records.select(name for name in records.columns if name not in items.columns)
            result = rest.take(rows).with_columns(self._item_columns(items, rows, copy > 0, drawn))
            result = result.with_columns(self._event_columns(result, copy > 0, drawn))
        else:
            result = records if len(rows) == len(records) else records.take(rows)
        self.pool.settle()
        return renumbered(result, copy)

    def state(self) -> dict[str, Any]:
        """Return the pool as text. Large pools are better saved with `save_pool`."""
        channels = self.pool.channels()
        return {"channels": [base64.b64encode(encode_channel(self.pool, one)).decode() for one in channels]}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the pool of another one: from now on both draw the same items.

        Raises:
            RestoreError: It is no state of a pool.
        """
        try:
            payloads = [base64.b64decode(text, validate=True) for text in state["channels"]]
        except (KeyError, TypeError, binascii.Error) as cause:
            raise RestoreError(
                f"cannot restore negative generation: it is not the state of a pool: {cause}"
            ) from cause
        restore_channels(self.pool, payloads)

    def _draw(self, records: Records, first: int, first_row: int) -> tuple[list[int], list[int], list[Drawn]]:
        """Walk through the records, drawing from the pool and filling it.

        Returns:
            For each record of the result, the one it is made of, and its number among those:
            0 for the original. And the drawn item of each generated record.
        """
        config, pool = self.config, self.pool
        positive, enters = self._judge(records, first)
        item_ids = read_column(records, config.item_id, torch.int64)
        known = (item_ids.row_lengths() > 0).tolist()
        items = first_values(item_ids, 0).tolist()
        channels = [0] * len(records)
        if config.per_channel:
            channels = first_values(read_column(records, config.channel_feature, torch.int64), 0).tolist()
        columns = range(1, 1 + _LUCKS * config.neg_num)
        lucks = draw("negative_generation", config.seed, records, first, columns).tolist()
        source: list[int] = []
        copies: list[int] = []
        drawn: list[Drawn] = []
        for i, (channel, is_positive, enter) in enumerate(zip(channels, positive, enters, strict=True)):
            item = items[i] if known[i] else None
            if is_positive:
                for copy in range(config.neg_num):
                    easy, which, high, low = lucks[i][_LUCKS * copy : _LUCKS * (copy + 1)]
                    target: int | None = channel
                    if easy < config.easy_hard_ratio:
                        target = pool.other_channel(channel, which)
                    found = None if target is None else pool.draw(target, high + low * 2.0**-24, item)
                    if found is not None:
                        source.append(i)
                        copies.append(copy + 1)
                        drawn.append(found)
            if enter and item is not None:
                pool.put(channel, item, first_row + i)
            if not (config.throw_origin if is_positive else config.throw_origin_neg):
                source.append(i)
                copies.append(0)
        return source, copies, drawn

    def _judge(self, records: Records, first: int) -> tuple[list[bool], list[bool]]:
        """Return which records are positive, and the items of which enter the pool."""
        config = self.config
        actions = read_column(records, ACTIONS, torch.int64)
        if config.positive_actions:
            positive = self._decides(actions, config.positive_actions)
        else:
            labels = read_column(records, LABEL, torch.float32).to_padded(
                config.label_index + 1, float("nan")
            )
            positive = labels[:, config.label_index] == config.positive_label
        luck = torch.from_numpy(draw("negative_generation", config.seed, records, first))[:, 0]
        enters = positive | (luck < config.negative_in_pool_rate)
        if config.cache_negative_actions:
            enters |= self._decides(actions, config.cache_negative_actions)
        return positive.tolist(), enters.tolist()

    def _decides(self, actions: RaggedTensor, wanted: tuple[int, ...]) -> Tensor:
        """Return a mask of the rows whose deciding action is one of these."""
        priority = self.config.action_priority
        rank = rank_of(actions, priority)
        listed = torch.tensor([action in wanted for action in priority] + [False, False])[rank]
        return torch.where(rank < len(priority), listed, has_any(actions, wanted))

    def _item_columns(
        self, items: Records, rows: Tensor, made: Tensor, drawn: list[Drawn]
    ) -> dict[str, RaggedTensor]:
        """Return the item side of the result: that of its row, or of the drawn item if it is generated."""
        features = self.pool.features(one.row for one in drawn)
        places = rows.clone()
        places[made] = torch.arange(len(items), len(items) + len(drawn))
        columns = ((name, _both(items, features, name)) for name in self.config.item_features)
        return {name: take_rows(column, places) for name, column in columns if column is not None}

    def _event_columns(self, records: Records, made: Tensor, drawn: list[Drawn]) -> dict[str, RaggedTensor]:
        """Return the rewritten columns of the event: its item, and that it got no action."""
        config, size = self.config, len(records)
        which = made.cumsum(0) - 1
        items = torch.tensor([one.item for one in drawn], dtype=torch.int64)[which]
        weights = torch.tensor([self._weight(one) for one in drawn], dtype=torch.float32)[which]
        actions = empty_rows(torch.int64, size)
        if config.negative_action is not None:
            actions = one_each(torch.full((size,), config.negative_action))
        rewritten = {
            config.item_id: one_each(items),
            WEIGHT: one_each(weights),
            LABEL: self._negative_labels(read_column(records, LABEL, torch.float32)),
            ACTIONS: actions,
        }
        if PRE_ACTIONS in records.columns:  # nothing was emitted of it before
            rewritten[PRE_ACTIONS] = empty_rows(torch.int64, size)
        return {
            name: set_rows(read_column(records, name, rows.dtype), rows, made)
            for name, rows in rewritten.items()
        }

    def _negative_labels(self, labels: RaggedTensor) -> RaggedTensor:
        """Return the negative label wherever there is a valid one, and at `label_index` in any case."""
        lengths = labels.row_lengths().clamp(min=self.config.label_index + 1)
        matrix = labels.to_padded(int(lengths.max()), INVALID_LABEL)
        matrix = torch.where(is_valid(matrix), self.config.negative_label, matrix)
        matrix[:, self.config.label_index] = self.config.negative_label
        flat = matrix[torch.arange(matrix.shape[1]) < lengths[:, None]]
        return RaggedTensor.from_row_lengths(flat, lengths, validate=False)

    def _weight(self, drawn: Drawn) -> float:
        config = self.config
        if config.sampled_weight > 0:
            return config.sampled_weight
        if not config.unbiased:
            return 1.0
        age = (drawn.place + 1) / drawn.size
        return 1.0 + config.neg_num * float(age**config.decay) / drawn.times


def _both(items: Records, features: Records, name: str) -> RaggedTensor | None:
    """Return a column's rows here, then those of the drawn items; None if neither has it."""
    parts = [part for part in (items, features) if name in part.columns]
    if not parts:
        return None
    dtypes = {part.columns[name].dtype for part in parts}
    if len(dtypes) > 1:
        raise DataError(f"negative generation: column {name!r} had another type in earlier records: {dtypes}")
    dtype = dtypes.pop()
    return concat_rows([read_column(items, name, dtype), read_column(features, name, dtype)])
