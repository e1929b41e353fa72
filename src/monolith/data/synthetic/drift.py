"""A synthetic stream that drifts.

Users and items appear, are seen for a while and fade; what users want turns slowly into
something else. A model that stops learning gets worse by the hour, and by how much is
known: `best_auc` is what the probabilities themselves score, and with `as_of` what they
score to a model that has learned everything there was to know at that time, and nothing
since.

Nothing is stored, as in the click log: an example is a function of its number, and any
range can be read without the examples before it.

    stream = DriftingStream(DriftConfig(examples=1_000_000))
    for batch in stream.batches(): ...                          # train, in the order of event time
    stream.best_auc(50_000, first=900_000)                      # what one can hope for
    stream.best_auc(50_000, first=900_000, as_of=stream.time_of(0))     # without the training
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith.data.records import LABEL, LINE_ID, BatchSpec, Records, make_batch
from monolith.data.source import Position, Shard, ShardChoice, Source
from monolith.data.synthetic.click_log import Draws, ranks, sigmoid
from monolith.errors import ConfigError, FeatureError, RestoreError
from monolith.feature import Batch
from monolith.nn import auc
from monolith.tensors import RaggedTensor

FEATURES = ("user", "item", "context")
"""Of every example, one id each."""
TIME = LINE_ID + "req_time"
SPEC = BatchSpec(ids=FEATURES, labels={"click": (LABEL, 0)}, event_time=TIME)
"""How a model reads the records."""

_AT_A_TIME = 1 << 14

# What a draw is for. Numbers of their own, so that no two draws are of the same thing.
_AGE_OF = {"user": 1, "item": 2}
_RANK_OF = {"user": 3, "item": 4, "context": 5}
_CLICK = 6
_ID_OF = {"user": 1 << 20, "item": 2 << 20, "context": 3 << 20}
_BIAS, _VECTOR, _TURN = 1 << 24, 2 << 24, 3 << 24
_KNOT = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftConfig:
    """How many users and items appear in a `DriftingStream`, how long they stay, and how fast tastes change.

    With u, i and c for user, item and context, and t for the time:

        logit(click) = bias + bias_scale (b_u + b_i(t) + b_c) + vector_scale (v_u(t) + v_c(t)) . v_i

    Biases are drawn with variance 1, and so are the dot products.

    Examples:
        >>> from monolith import DriftConfig
        >>> config = DriftConfig(examples=10_000, batch_size=100, new_users=20, new_items=5)
        >>> config.seed
        0
    """

    examples: int | None = None
    """Where the stream ends; None never ends it."""
    batch_size: int = 1024
    cohort: timedelta = timedelta(minutes=10)
    """New users and items appear together, this far apart."""
    new_users: int = 100
    """New users per cohort."""
    new_items: int = 20
    user_life: timedelta = timedelta(days=2)
    """A cohort is seen less and less, evenly, and after this long no more."""
    item_life: timedelta = timedelta(hours=12)
    contexts: int = 50
    user_skew: float = 0.6
    """The k-th most frequent user of a cohort is seen in proportion to k^-user_skew; 0 sees all alike."""
    item_skew: float = 0.9
    context_skew: float = 0.5
    turn: timedelta | None = timedelta(days=1)
    """How long what a user or a context wants, and how popular an item is, takes to become something
    unrelated, and then something else again. None keeps all as it is."""
    dim: int = 4
    """Width of the hidden vectors."""
    bias: float = -1.0
    bias_scale: float = 0.7
    vector_scale: float = 1.0
    start_time: int = 1_700_000_000
    """Unix seconds of the first example."""
    examples_per_second: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "new_users", "new_items", "contexts", "dim", "examples_per_second"):
            if getattr(self, name) < 1:
                raise ConfigError(f"drift: {name} must be at least 1, got {getattr(self, name)}")
        for name in ("cohort", "user_life", "item_life", "turn"):
            given = getattr(self, name)
            if given is not None and given < timedelta(seconds=1):
                raise ConfigError(f"drift: {name} must be at least a second, got {given}")
        for name in ("new_users", "new_items", "contexts"):
            if getattr(self, name) > 1 << 24:
                raise ConfigError(f"drift: {name} must be at most 2^24, got {getattr(self, name)}")
        for name in ("user_skew", "item_skew", "context_skew", "bias_scale", "vector_scale"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"drift: {name} must be 0 or more and finite, got {getattr(self, name)}")
        if not math.isfinite(self.bias):
            raise ConfigError(f"drift: bias must be finite, got {self.bias}")
        if self.examples is not None and self.examples < 0:
            raise ConfigError(f"drift: examples must be 0 or more, got {self.examples}")
        if self.start_time < 0:
            raise ConfigError(f"drift: start_time must be 0 or more, got {self.start_time}")
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"drift: seed must be from 0 to 2^64 - 1, got {self.seed}")


def fast_drift(*, small: bool = False, batch_size: int = 1024, seed: int = 0) -> DriftConfig:
    """Return a world in which a minute of training shows what drift does, on a slow machine as on a fast one.

    A user comes some 120 times and an item some 600 times, enough to learn them by; a taste has
    become another after 16 hours, which is a million examples.

    Args:
        small: A world of few users that turns faster: one can see it in seconds, on any machine.
    """
    if small:
        return DriftConfig(
            new_users=10,
            user_life=timedelta(hours=4),
            new_items=10,
            item_life=timedelta(hours=2),
            contexts=10,
            turn=timedelta(hours=2),
            batch_size=batch_size,
            seed=seed,
        )
    return DriftConfig(
        new_users=60,
        user_life=timedelta(hours=24),
        new_items=20,
        item_life=timedelta(hours=12),
        turn=timedelta(hours=16),
        batch_size=batch_size,
        seed=seed,
    )


class _Examples(NamedTuple):
    """A range of the stream, before it is packed."""

    numbers: NDArray[np.uint64]
    seconds: NDArray[np.float64]
    """Since the start."""
    ids: dict[str, NDArray[np.int64]]
    born: dict[str, NDArray[np.float64]]
    """When each user and item appeared, in seconds since the start; most of the first ones before it."""


class DriftingStream(Source):
    """A synthetic source of examples, ordered by event time, whose users, items and tastes change over time.

    Its position is the number of the next example. Each of n workers (see `read_shard`) reads every n-th
    batch.

    Examples:
        >>> from monolith import DriftConfig, DriftingStream
        >>> stream = DriftingStream(DriftConfig(examples=200, batch_size=100))
        >>> [len(records) for records in stream]
        [100, 100]
        >>> stream.position()
        {'source': 'drift', 'seed': 0, 'next': 200}
    """

    repeats_order = True
    live = False

    def __init__(self, config: DriftConfig | None = None) -> None:
        self.config = DriftConfig() if config is None else config
        self._draws = Draws(self.config.seed)
        self._choice = ShardChoice("drifting stream")
        self._next: int | None = None
        """None before the first read."""

    # A source

    def read_shard(self, shard: Shard) -> None:
        self._choice.choose(shard)

    def __iter__(self) -> Iterator[Records]:
        size, shard = self.config.batch_size, self._choice.settle()
        if shard.workers > 1:
            yield from self._every(shard.workers * size)
            return
        # Several batches are drawn at a time: numpy's calls cost more than the work of a small one.
        together = max(1, _AT_A_TIME // size) * size
        while True:
            first = self._number()
            many = together if self.config.examples is None else min(together, self.config.examples - first)
            if many <= 0:
                return
            columns = self._columns(first, many)
            for begin in range(0, many, size):
                end = min(begin + size, many)
                self._next = first + end
                yield _pack({name: column[begin:end] for name, column in columns.items()})

    def position(self) -> Position:
        found: Position = {"source": "drift", "seed": self.config.seed, "next": self._number()}
        shard = self._choice.settle()
        if shard.workers > 1:
            found["shard"] = list(shard)
        return found

    def restore(self, position: Position) -> None:
        if not isinstance(position, Mapping) or position.get("source") != "drift":
            raise RestoreError(f"cannot restore a drifting stream from {position!r:.200}: of another kind")
        if position.get("seed") != self.config.seed:
            raise RestoreError(
                f"cannot restore a drifting stream: the position is of seed {position.get('seed')!r}, "
                f"this one has seed {self.config.seed}"
            )
        saved, shard = position.get("shard", [0, 1]), self._choice.settle()
        if saved != list(shard):
            raise RestoreError(
                f"cannot restore a drifting stream: the position is of worker and workers {saved!r}, "
                f"this one has {list(shard)}"
            )
        number = position.get("next")
        if not isinstance(number, int) or number < 0:
            raise RestoreError(
                f"cannot restore a drifting stream: {number!r} is not the number of an example"
            )
        self._next = number

    def commit(self, position: Position) -> None:
        """Do nothing: any range can be generated again."""

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def _every(self, stride: int) -> Iterator[Records]:
        size, end = self.config.batch_size, self.config.examples
        while (many := size if end is None else min(size, end - self._number())) > 0:
            columns = self._columns(self._number(), many)
            self._next = self._number() + stride
            yield _pack(columns)

    def _number(self) -> int:
        """Return the number of the next example."""
        if self._next is None:
            self._next = self._choice.settle().worker * self.config.batch_size
        return self._next

    # Any range of it

    def batches(self) -> Iterator[Batch]:
        """Yield batches from the current position on."""
        return (make_batch(records, SPEC) for records in self)

    def records(self, first: int, size: int) -> Records:
        """Return examples [first, first + size), independent of the position."""
        return _pack(self._columns(first, size))

    def batch(self, first: int, size: int) -> Batch:
        """Return examples [first, first + size) as a model reads them."""
        return make_batch(self.records(first, size), SPEC)

    def time_of(self, number: int) -> int:
        """Return the event time of an example, in Unix seconds."""
        return self.config.start_time + number // self.config.examples_per_second

    def probabilities(self, first: int, size: int, *, as_of: int | None = None) -> Tensor:
        """Return what decided the labels of those examples: float64 of shape (size,).

        Args:
            as_of: Unix seconds. Tastes are taken as they were then, and later users and items are as
                good as unknown: what a model says that was perfect then, and has not learned since.
        """
        return torch.from_numpy(self._probabilities(self._examples(first, size), as_of))

    def best_auc(self, size: int, *, first: int = 0, as_of: int | None = None) -> float:
        """Return the AUC of the probabilities themselves, which no model (of that time) should beat."""
        examples = self._examples(first, size)
        return auc(
            torch.from_numpy(self._probabilities(examples, as_of)), torch.from_numpy(self._labels(examples))
        )

    # Examples

    def _examples(self, first: int, size: int) -> _Examples:
        if first < 0 or size < 1:
            raise FeatureError(f"drift: needs first >= 0 and at least one example, got {first} and {size}")
        config = self.config
        numbers = np.arange(first, first + size, dtype=np.uint64)
        seconds = numbers.astype(np.float64) / config.examples_per_second
        life = {"user": config.user_life, "item": config.item_life}
        many = {"user": config.new_users, "item": config.new_items, "context": config.contexts}
        skew = {"user": config.user_skew, "item": config.item_skew, "context": config.context_skew}
        cohort_s = config.cohort.total_seconds()
        ids: dict[str, NDArray[np.int64]] = {}
        born: dict[str, NDArray[np.float64]] = {}
        for kind in FEATURES:
            entity = ranks(self._draws.uniform(numbers, _RANK_OF[kind]), many[kind], skew[kind]) - 1
            if kind in life:
                # The older, the less seen: ages from a density that falls evenly to nothing.
                draw = self._draws.uniform(numbers, _AGE_OF[kind])
                age_s = life[kind].total_seconds() * (1 - np.sqrt(1 - draw))
                cohort = np.floor((seconds - age_s) / cohort_s)
                born[kind] = cohort * cohort_s
                entity += cohort.astype(np.int64) * many[kind]
            ids[kind] = self._draws.hash(entity, _ID_OF[kind]).view(np.int64)
        return _Examples(numbers, seconds, ids, born)

    def _columns(self, first: int, size: int) -> dict[str, Tensor]:
        examples = self._examples(first, size)
        time = examples.numbers.view(np.int64) // self.config.examples_per_second + self.config.start_time
        columns = {
            **examples.ids,
            LABEL: self._labels(examples),
            TIME: time,
            LINE_ID + "uid": examples.ids["user"],
            LINE_ID + "item_id": examples.ids["item"],
        }
        return {name: torch.from_numpy(column) for name, column in columns.items()}

    def _labels(self, examples: _Examples) -> NDArray[np.float32]:
        draw = self._draws.uniform(examples.numbers, _CLICK)
        return (draw < self._probabilities(examples, None)).astype(np.float32)

    def _probabilities(self, examples: _Examples, as_of: int | None) -> NDArray[np.float64]:
        config, ids, draws = self.config, examples.ids, self._draws
        until = math.inf if as_of is None else float(as_of - config.start_time)
        seconds = np.minimum(examples.seconds, until)
        known = {kind: born <= until for kind, born in examples.born.items()}
        item_bias = self._turning(ids["item"], seconds, _BIAS, 1)[0]
        bias = draws.even(ids["user"], _BIAS) * known["user"] + draws.even(ids["context"], _BIAS)
        wanted = self._turning(ids["user"], seconds, _VECTOR, config.dim) * known["user"]
        wanted += self._turning(ids["context"], seconds, _VECTOR, config.dim)
        taste = (wanted * draws.vectors(ids["item"], _VECTOR, config.dim)).sum(0)
        logits = config.bias + config.bias_scale * bias
        logits += (config.bias_scale * item_bias + config.vector_scale * taste) * known["item"]
        return sigmoid(logits)

    def _turning(
        self, ids: NDArray[np.int64], seconds: NDArray[np.float64], purpose: int, dim: int
    ) -> NDArray[np.float32]:
        """Return hidden vectors of shape (dim, n) that turn with time, at a length that stays the same."""
        if self.config.turn is None:
            return self._draws.vectors(ids, purpose, dim)
        # A vector moves on a quarter circle from one knot to the next. Each has its own time to begin.
        turns = seconds / self.config.turn.total_seconds() + self._draws.uniform(ids, _TURN)
        knot = np.floor(turns)
        angle = ((turns - knot) * (math.pi / 2)).astype(np.float32)
        at = ids.view(np.uint64) + knot.astype(np.int64).view(np.uint64) * _KNOT
        before = self._draws.vectors(at, purpose, dim)
        after = self._draws.vectors(at + _KNOT, purpose, dim)
        before *= np.cos(angle)
        after *= np.sin(angle)
        before += after
        return before


def _pack(columns: Mapping[str, Tensor]) -> Records:
    """Return records of columns that have one value in each of them."""
    size = len(columns[LABEL])
    splits = torch.arange(size + 1)
    return Records(
        size, {name: RaggedTensor(column, splits, validate=False) for name, column in columns.items()}
    )
