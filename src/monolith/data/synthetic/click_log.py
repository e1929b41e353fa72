"""A synthetic click log, whose true probabilities are known.

Users see items in contexts and click or not. How much a user likes an item is decided
by hidden vectors, drawn from a seed; the label is a coin thrown with that probability.
So the best score any model can reach is known: that of the probabilities themselves.

Nothing is stored. An example is a function of its number, and a hidden vector of the
id, both through the one hash of the system. There may be any number of users, any
range of the log can be read without the examples before it, and batches of different
sizes contain the same examples.

    log = ClickLog(ClickLogConfig(users=1_000_000))
    for batch in log.batches(1000, 1024): ...          # train
    test = log.batch(1_024_000, 50_000)                # what comes after
    log.best_auc(50_000, first=1_024_000)              # what one can hope for

Draws need no state: a draw is a hash of the seed, of its purpose and of its subject. So it is the same
whenever it is made, and any part of a synthetic log can be read without the parts before it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith.errors import ConfigError, FeatureError
from monolith.feature import Batch, FeatureIds
from monolith.nn import auc
from monolith.table.hashing import mix, mix_one

_GOLDEN, _ALL_BITS = 0x9E3779B97F4A7C15, 0xFFFF_FFFF_FFFF_FFFF

Numbers = NDArray[np.uint64] | NDArray[np.int64]


class Draws:
    """Draws of one seed. Each is about numbers (of examples, of ids) and has a purpose, itself a number."""

    def __init__(self, seed: int) -> None:
        self._key = mix_one(seed)

    def hash(self, of: Numbers, purpose: int) -> NDArray[np.uint64]:
        """Return 64 bits for each; no two of one purpose are the same."""
        # The golden ratio keeps the numbers of different purposes far apart.
        return mix(of.view(np.uint64) + np.uint64(self._key + _GOLDEN * purpose & _ALL_BITS))

    def uniform(self, of: Numbers, purpose: int) -> NDArray[np.float64]:
        """Return draws from [0, 1), with all the bits that a double has."""
        return (self.hash(of, purpose) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def even(self, of: Numbers, purpose: int) -> NDArray[np.float64]:
        """Return draws of mean 0 and variance 1, spread evenly."""
        return (self.uniform(of, purpose) - 0.5) * math.sqrt(12)

    def vectors(self, of: Numbers, purpose: int, dim: int) -> NDArray[np.float32]:
        """Return hidden vectors of shape (dim, n). Two of them have a dot product of variance 1."""
        # A hash gives 64 bits, enough for four columns: sixteen bits are plenty for a hidden taste.
        columns = np.empty((dim, len(of)), dtype=np.float32)
        scale = np.float32(math.sqrt(12 / math.sqrt(dim)) / (1 << 16))
        for column in range(dim):
            if column % 4 == 0:
                bits = self.hash(of, purpose + column)
            columns[column] = (bits >> np.uint64(16 * (column % 4))).astype(np.uint16)
        columns -= np.float32((1 << 16) - 1) / 2
        columns *= scale
        return columns


def ranks(draws: NDArray[np.float64], many: int, skew: float) -> NDArray[np.int64]:
    """Turn draws from [0, 1) into ranks from 1 to `many`: the k-th comes in proportion to k^-skew."""
    # The area under x^-skew from 1 to many + 1, turned round: exact enough, and no table of ranks.
    if skew == 1:
        found = np.exp(draws * math.log(many + 1))
    else:
        power = 1 - skew
        found = (1 + draws * ((many + 1) ** power - 1)) ** (1 / power)
    return np.minimum(found.astype(np.int64), many)


def sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return probabilities."""
    return 1 / (1 + np.exp(-logits))


FEATURES = ("user", "item", "context", "history")
"""Of every batch, in this order."""

_AT_A_TIME = 1 << 14

# What a draw is for. Numbers of their own, so that no two draws are of the same thing.
_RANK_OF = {"user": 1, "item": 2, "context": 3}
_LENGTH, _NUMBER, _CLICK, _LIKE = 4, 5, 6, 7
_HISTORY = 1 << 10
_ID_OF = {"user": 1 << 20, "item": 2 << 20, "context": 3 << 20}
_BIAS, _CLICK_VECTOR, _LIKE_VECTOR = 1 << 24, 2 << 24, 3 << 24


@dataclass(frozen=True, kw_only=True, slots=True)
class ClickLogConfig:
    """The sizes of a `ClickLog`, and the probability of a click.

    With u, i and c for user, item and context, h for the items of the history and x for the numbers:

        logit(click) = bias + bias_scale (b_u + b_i + b_c) + vector_scale (v_u . v_i + v_c . v_i
                       + mean(v_h) . v_i) + number_scale (w . x)

    Biases are drawn with variance 1, and so are the dot products.

    Examples:
        >>> from monolith import ClickLogConfig
        >>> config = ClickLogConfig(users=1_000_000, items=10_000, likes=True, seed=7)
        >>> config.history  # the most items in a history
        8
    """

    users: int = 100_000
    items: int = 10_000
    contexts: int = 100
    user_skew: float = 0.6
    """The k-th most frequent user is seen in proportion to k^-user_skew; 0 sees all alike."""
    item_skew: float = 0.9
    context_skew: float = 0.5
    history: int = 8
    """The most items a history has; it has any number from 0 on, evenly."""
    numbers: int = 0
    """Width of the float feature `numbers`; 0 for none."""
    likes: bool = False
    """Whether there is a second task, `like`: of the same users and items with other, related vectors."""
    dim: int = 4
    """Width of the hidden vectors."""
    bias: float = -1.0
    bias_scale: float = 0.5
    vector_scale: float = 1.0
    number_scale: float = 0.5
    start_time: int = 1_700_000_000
    """Unix seconds of the first example."""
    examples_per_second: int = 10_000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("users", "items", "contexts", "dim", "examples_per_second"):
            if getattr(self, name) < 1:
                raise ConfigError(f"click log: {name} must be at least 1, got {getattr(self, name)}")
        for name in ("history", "numbers", "start_time"):
            if getattr(self, name) < 0:
                raise ConfigError(f"click log: {name} must be 0 or more, got {getattr(self, name)}")
        for name in ("users", "items", "contexts"):
            if getattr(self, name) > 1 << 48:
                raise ConfigError(f"click log: {name} must be at most 2^48, got {getattr(self, name)}")
        for name in ("user_skew", "item_skew", "context_skew", "bias_scale", "vector_scale", "number_scale"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"click log: {name} must be 0 or more and finite, got {getattr(self, name)}"
                )
        if not math.isfinite(self.bias):
            raise ConfigError(f"click log: bias must be finite, got {self.bias}")
        if self.history >= 1 << 10:
            raise ConfigError(f"click log: history must be below 1024, got {self.history}")
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"click log: seed must be from 0 to 2^64 - 1, got {self.seed}")


class _Examples(NamedTuple):
    """A range of the log, before it is packed."""

    numbers: NDArray[np.uint64]
    """Of the examples."""
    ids: dict[str, NDArray[np.int64]]
    """One per example, and for the history one per cell."""
    history_splits: NDArray[np.int64]
    floats: NDArray[np.float32]

    def slice(self, begin: int, end: int) -> _Examples:
        """Return examples [begin, end) of these."""
        splits = self.history_splits[begin : end + 1]
        spans = dict.fromkeys(self.ids, slice(begin, end)) | {"history": slice(splits[0], splits[-1])}
        return _Examples(
            self.numbers[begin:end],
            {name: self.ids[name][span] for name, span in spans.items()},
            splits - splits[0],
            self.floats[begin:end],
        )


class ClickLog:
    """A synthetic click log of unbounded length, whose best possible AUC is known.

    Reading it changes nothing, so any number of threads may. Shapes: n examples of a batch, each with one
    user, item and context ID and up to `history` item IDs; floats of shape (n, numbers).

    Examples:
        >>> from monolith import ClickLog, ClickLogConfig
        >>> log = ClickLog(ClickLogConfig(users=100, items=50, history=4, dim=2))
        >>> batch = log.batch(0, 8)
        >>> batch.ids.names, batch.label.shape
        (('user', 'item', 'context', 'history'), torch.Size([8]))
        >>> 0.5 < log.best_auc(1000) < 1.0  # what a perfect model would reach
        True
    """

    def __init__(self, config: ClickLogConfig | None = None) -> None:
        self.config = ClickLogConfig() if config is None else config
        self._draws = Draws(self.config.seed)
        width = np.arange(self.config.numbers, dtype=np.uint64)
        self._weights = self._draws.even(width, _NUMBER + (1 << 30)) / math.sqrt(max(self.config.numbers, 1))

    @property
    def tasks(self) -> tuple[str, ...]:
        return ("click", "like") if self.config.likes else ("click",)

    def batches(self, count: int, batch_size: int, *, first: int = 0) -> Iterator[Batch]:
        """Yield `count` batches that follow each other, from example `first` on."""
        # Several are drawn at a time: numpy's calls cost more than the work of a small batch.
        together = max(1, _AT_A_TIME // max(batch_size, 1))
        for done in range(0, count, together):
            some = min(together, count - done)
            examples = self._examples(first + done * batch_size, some * batch_size)
            labels = self._labels(examples)
            for begin in range(0, some * batch_size, batch_size):
                end = begin + batch_size
                some_labels = {task: label[begin:end] for task, label in labels.items()}
                yield self._batch(examples.slice(begin, end), some_labels)

    def batch(self, first: int, size: int) -> Batch:
        """Return examples [first, first + size), with a label for each task."""
        examples = self._examples(first, size)
        return self._batch(examples, self._labels(examples))

    def probabilities(self, first: int, size: int) -> dict[str, Tensor]:
        """Return, by task, what decided the labels of those examples: float64 of shape (size,)."""
        return {
            task: torch.from_numpy(probability)
            for task, probability in self._probabilities(self._examples(first, size)).items()
        }

    def best_auc(self, size: int, *, first: int = 0, task: str = "click") -> float:
        """Return the AUC of the probabilities themselves, which no model is expected to beat."""
        if task not in self.tasks:
            raise FeatureError(f"click log: there is no task {task!r}; there are {', '.join(self.tasks)}")
        return auc(self.probabilities(first, size)[task], self.batch(first, size).labels[task])

    # Examples

    def _examples(self, first: int, size: int) -> _Examples:
        if first < 0 or size < 1:
            raise FeatureError(
                f"click log: needs first >= 0 and at least one example, got {first} and {size}"
            )
        config = self.config
        numbers = np.arange(first, first + size, dtype=np.uint64)
        many = {"user": config.users, "item": config.items, "context": config.contexts}
        skew = {"user": config.user_skew, "item": config.item_skew, "context": config.context_skew}
        ids = {
            kind: self._ids(kind, self._draws.uniform(numbers, _RANK_OF[kind]), many[kind], skew[kind])
            for kind in many
        }
        lengths = (self._draws.uniform(numbers, _LENGTH) * (config.history + 1)).astype(np.int64)
        splits = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        place = np.arange(splits[-1]) - np.repeat(splits[:-1], lengths)
        cell = np.repeat(numbers << np.uint64(10), lengths) + place.view(np.uint64)
        ids["history"] = self._ids(
            "item", self._draws.uniform(cell, _HISTORY), config.items, config.item_skew
        )
        floats = np.empty((size, config.numbers), dtype=np.float32)
        for column in range(config.numbers):
            floats[:, column] = self._draws.even(numbers, _NUMBER + (column << 32))
        return _Examples(numbers, ids, splits, floats)

    def _ids(self, kind: str, draws: NDArray[np.float64], many: int, skew: float) -> NDArray[np.int64]:
        """Return ids from all of int64, by how often they are seen: the k-th in proportion to k^-skew."""
        rank = ranks(draws, many, skew)
        # A hash never gives two ranks one id.
        return self._draws.hash(rank, _ID_OF[kind]).view(np.int64)

    def _labels(self, examples: _Examples) -> dict[str, NDArray[np.float32]]:
        draws = {"click": _CLICK, "like": _LIKE}
        return {
            task: (self._draws.uniform(examples.numbers, draws[task]) < probability).astype(np.float32)
            for task, probability in self._probabilities(examples).items()
        }

    def _probabilities(self, examples: _Examples) -> dict[str, NDArray[np.float64]]:
        config, ids = self.config, examples.ids
        common = np.full(len(examples.numbers), config.bias)
        if config.bias_scale:
            for kind in ("user", "item", "context"):
                common += config.bias_scale * self._draws.even(ids[kind], _BIAS)
        if config.numbers:
            common += config.number_scale * (examples.floats @ self._weights)
        taste = self._taste(examples, _CLICK_VECTOR)
        logits = {"click": common + config.vector_scale * taste}
        if config.likes:
            # Half of what decides a like decides a click, too.
            other = (taste + self._taste(examples, _LIKE_VECTOR)) * math.sqrt(0.5)
            logits["like"] = common + config.vector_scale * other
        return {task: sigmoid(logit) for task, logit in logits.items()}

    def _taste(self, examples: _Examples, purpose: int) -> NDArray[np.float64]:
        """Return how well user, context and history go with the item."""
        ids, splits = examples.ids, examples.history_splits
        vectors = {name: self._draws.vectors(ids[name], purpose, self.config.dim) for name in FEATURES}
        liked = vectors["user"] + vectors["context"]
        item, history = vectors["item"], vectors["history"]
        lengths = np.maximum(np.diff(splits), 1)
        taste = np.zeros(len(examples.numbers))
        for column in range(self.config.dim):
            sums = np.concatenate([np.zeros(1), np.cumsum(history[column], dtype=np.float64)])
            mean = (sums[splits[1:]] - sums[splits[:-1]]) / lengths
            taste += (liked[column] + mean) * item[column]
        return taste

    def _batch(self, examples: _Examples, labels: dict[str, NDArray[np.float32]]) -> Batch:
        config, size = self.config, len(examples.numbers)
        single = len(FEATURES) - 1
        splits = np.concatenate([np.arange(single * size), examples.history_splits + single * size])
        ids = FeatureIds(
            names=FEATURES,
            ids=torch.from_numpy(np.concatenate([examples.ids[name] for name in FEATURES])),
            splits=torch.from_numpy(splits),
            batch_size=size,
            event_time=config.start_time + int(examples.numbers[-1]) // config.examples_per_second,
        )
        floats = {"numbers": torch.from_numpy(examples.floats)} if config.numbers else {}
        return Batch(ids, floats, {task: torch.from_numpy(label) for task, label in labels.items()})
