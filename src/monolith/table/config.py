"""The configuration of a table: what a row is made of, and which slots share a table.

    TableConfig            one table: its segments, expiry, memory budget
      Segment              part of a row: dim, initializer, optimizer, compressor, learning rate
    AdmissionConfig        how often an id must be seen before it gets a row
    merge(configs)         one table for all slots with equal configs

Every setting compares and prints by its fields: two tables may be merged when their configs print the same.
Nothing here needs torch, so that a run's config can be read without it.
"""

from __future__ import annotations

import hashlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from monolith.errors import ConfigError
from monolith.table.compressors import Compressor, Fp32, narrow_bytes
from monolith.table.expiry import Expiry
from monolith.table.hashing import draws
from monolith.table.optimizers import Optimizer, Sgd, label


@dataclass(frozen=True, slots=True)
class Initializer(ABC):
    """The first values of one segment. Equal settings compare equal and print the same."""

    kind: ClassVar[str] = ""

    @abstractmethod
    def values(self, ids: NDArray[np.int64], columns: range, seed: int) -> NDArray[np.float32]:
        """Return float32 of shape (len(ids), len(columns)); `columns` counts over the whole entry."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Between what values are drawn; the two are equal where they are not random."""
        constant = float(self.values(np.zeros(1, np.int64), range(1), 0)[0, 0])
        return constant, constant

    def __str__(self) -> str:
        return label(self.kind, self)


@dataclass(frozen=True, slots=True)
class Constant(Initializer):
    """Initializes every value to `value`.

    Examples:
        >>> import torch
        >>> from monolith import Constant, NativeTable, Segment, TableConfig
        >>> segment = Segment(dim=2, initializer=Constant(0.5))
        >>> table = NativeTable(TableConfig(name="item", segments=(segment,)))
        >>> table.reinitialize(torch.tensor([7]), now=0)
        tensor([0], dtype=torch.int8)
        >>> table.lookup(torch.tensor([7]))
        tensor([[0.5000, 0.5000]])
    """

    kind: ClassVar[str] = "constant"
    value: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ConfigError(f"constant initializer: value must be finite, got {self.value!r}")

    def values(self, ids: NDArray[np.int64], columns: range, seed: int) -> NDArray[np.float32]:  # noqa: ARG002
        return np.full((len(ids), len(columns)), self.value, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Zeros(Initializer):
    """Initializes every value to 0.

    Examples:
        >>> from monolith import Segment, Zeros
        >>> Segment(dim=8) == Segment(dim=8, initializer=Zeros())  # the default
        True
    """

    kind: ClassVar[str] = "zeros"

    def values(self, ids: NDArray[np.int64], columns: range, seed: int) -> NDArray[np.float32]:
        return Constant(0.0).values(ids, columns, seed)


@dataclass(frozen=True, slots=True)
class Ones(Initializer):
    """Every value is 1."""

    kind: ClassVar[str] = "ones"

    def values(self, ids: NDArray[np.int64], columns: range, seed: int) -> NDArray[np.float32]:
        return Constant(1.0).values(ids, columns, seed)


@dataclass(frozen=True, slots=True)
class BatchSoftmaxInit(Initializer):
    """The interval, in steps, that `BatchSoftmax` assumes for an id it has not seen."""

    kind: ClassVar[str] = "batch_softmax"
    init_step_interval: float

    def __post_init__(self) -> None:
        if not 1 <= self.init_step_interval < math.inf:
            raise ConfigError(
                "batch_softmax initializer: init_step_interval must be at least 1, "
                f"got {self.init_step_interval!r}"
            )

    def values(self, ids: NDArray[np.int64], columns: range, seed: int) -> NDArray[np.float32]:
        return Constant(self.init_step_interval).values(ids, columns, seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomUniform(Initializer):
    """Initializes values to numbers drawn evenly from [low, high), each fixed by (seed, id, column).

    With u from `hashing.draws`, a value is `low + (high - low) * u`, every
    operation and both bounds rounded to float32 and none of them fused. All
    implementations give the same bits.

    Examples:
        >>> import torch
        >>> from monolith import NativeTable, RandomUniform, Segment, TableConfig
        >>> segment = Segment(dim=2, initializer=RandomUniform(low=-0.01, high=0.01))
        >>> tables = [NativeTable(TableConfig(name="item", segments=(segment,), seed=7)) for _ in range(2)]
        >>> _ = [table.reinitialize(torch.tensor([7, 8]), now=0) for table in tables]
        >>> rows = [table.lookup(torch.tensor([7, 8])) for table in tables]
        >>> torch.equal(*rows), bool(rows[0].abs().max() <= 0.01)  # one seed, the same rows
        (True, True)
    """

    kind: ClassVar[str] = "random_uniform"
    low: float = -0.05
    high: float = 0.05

    def __post_init__(self) -> None:
        if not -math.inf < self.low <= self.high < math.inf:
            raise ConfigError(
                f"random_uniform initializer: needs finite low <= high, got {self.low!r} and {self.high!r}"
            )

    @property
    def bounds(self) -> tuple[float, float]:
        return self.low, self.high

    def values(self, ids: NDArray[np.int64], columns: range, seed: int) -> NDArray[np.float32]:
        low, high = np.float32(self.low), np.float32(self.high)
        return low + (high - low) * draws(seed, ids, columns)


INITIALIZERS: dict[str, type[Initializer]] = {
    "zeros": Zeros,
    "ones": Ones,
    "constant": Constant,
    "random_uniform": RandomUniform,
    "batch_softmax": BatchSoftmaxInit,
}


LearningRate: TypeAlias = Callable[[int], float]
"""Gives the learning rate at a global step. `ConstantRate` and `PolynomialDecay` compare by their settings,
so that tables with equal schedules can be merged."""


@dataclass(frozen=True, slots=True)
class ConstantRate:
    """A learning rate that is the same at every step. 0 is allowed: the segment then does not change.

    Examples:
        >>> from monolith import ConstantRate, Segment
        >>> frozen = Segment(dim=8, learning_rate=ConstantRate(0.0))  # or just learning_rate=0.0
        >>> frozen.rate(1000)  # at step 1000
        0.0
    """

    rate: float

    def __post_init__(self) -> None:
        if not 0 <= self.rate < math.inf:
            raise ConfigError(f"constant learning rate: must be at least 0 and finite, got {self.rate!r}")

    def __call__(self, step: int, /) -> float:  # noqa: ARG002
        return self.rate

    def __str__(self) -> str:
        return label(type(self).__name__, self)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolynomialDecay:
    """A learning rate that moves from one value to another over `decay_steps`, up or down, and stays there.

    Examples:
        >>> from monolith import PolynomialDecay
        >>> rate = PolynomialDecay(initial_learning_rate=0.1, decay_steps=100, end_learning_rate=0.02)
        >>> [round(rate(step), 3) for step in (0, 50, 100, 1000)]
        [0.1, 0.06, 0.02, 0.02]
    """

    initial_learning_rate: float
    """The rate of the first step."""
    decay_steps: int
    """The step at which the second rate is reached."""
    end_learning_rate: float = 0.0001
    """The second rate."""
    power: float = 1.0
    """The exponent of the curve between both; 1 is a straight line."""
    cycle: bool = False
    """True starts over, each time for one more `decay_steps`, instead of staying at the end."""

    def __post_init__(self) -> None:
        if self.decay_steps < 1:
            raise ConfigError(f"polynomial decay: decay_steps must be at least 1, got {self.decay_steps!r}")
        for name in ("initial_learning_rate", "end_learning_rate", "power"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"polynomial decay: {name} must be at least 0 and finite, got {getattr(self, name)!r}"
                )

    def __call__(self, step: int, /) -> float:
        if self.cycle:
            decay_steps = self.decay_steps * max(1, -(-step // self.decay_steps))
        else:
            decay_steps = self.decay_steps
            step = min(step, decay_steps)
        span = self.initial_learning_rate - self.end_learning_rate
        return float(span * (1 - step / decay_steps) ** self.power + self.end_learning_rate)

    def __str__(self) -> str:
        return label(type(self).__name__, self)


def warmup(optimizer: Optimizer) -> LearningRate:
    """Return the optimizer's own rate, growing from 0 over its `warmup_steps` where it has some."""
    if optimizer.warmup_steps > 0:
        return PolynomialDecay(
            initial_learning_rate=0.0,
            decay_steps=optimizer.warmup_steps,
            end_learning_rate=optimizer.learning_rate,
        )
    return ConstantRate(optimizer.learning_rate)


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A part of a row that is initialized, trained and compressed in one way.

    Examples:
        >>> from monolith import Adam, Fp16, PolynomialDecay, RandomUniform, Segment
        >>> rate = PolynomialDecay(initial_learning_rate=0.01, decay_steps=1000)
        >>> segment = Segment(
        ...     dim=8, optimizer=Adam(), initializer=RandomUniform(), compressor=Fp16(), learning_rate=rate
        ... )
        >>> segment.state_dim  # two means per float, and two running powers of beta
        18
    """

    dim: int
    """Floats of the embedding in this segment."""
    optimizer: Optimizer = field(default_factory=Sgd)
    initializer: Initializer = field(default_factory=Zeros)
    compressor: Compressor = field(default_factory=Fp32)
    learning_rate: float | LearningRate | None = None
    """A number, 0 included, or a function of the step; None takes the optimizer's own, with its warm-up."""

    def __post_init__(self) -> None:
        if self.dim < 1:
            raise ConfigError(f"segment: dim must be at least 1, got {self.dim}")
        if self.optimizer.rule.kind == "batch_softmax" and self.dim != 1:
            raise ConfigError(f"segment: batch_softmax learns one number, so dim must be 1, got {self.dim}")
        if not (self.learning_rate is None or callable(self.learning_rate)):
            ConstantRate(self.learning_rate)  # refuses a rate out of range

    @property
    def state_dim(self) -> int:
        """Floats of optimizer state behind each row."""
        return self.optimizer.state_dim(self.dim)

    @property
    def rate(self) -> LearningRate:
        """The learning rate with its default settled."""
        if self.learning_rate is None:
            return warmup(self.optimizer)
        return self.learning_rate if callable(self.learning_rate) else ConstantRate(self.learning_rate)

    @property
    def decay_rate(self) -> float:
        """The rate by which rows decay lazily as long as no step has said another, as in a table that is only
        read; where the rate depends on the step, the optimizer's own."""
        rate = self.rate
        return rate(0) if isinstance(rate, ConstantRate) else self.optimizer.learning_rate

    def __str__(self) -> str:
        return (
            f"segment(dim={self.dim}, optimizer={self.optimizer}, initializer={self.initializer}, "
            f"compressor={self.compressor}, learning_rate={self.rate})"
        )


TableStorage: TypeAlias = Literal["memory", "tiered"]

_LEAST_MEMORY_BYTES = 4 << 20  # of a tiered table: below that buffers and an empty index are most of it


class TableTiers(NamedTuple):
    """Where the rows of tables are, as the fields of these names of `TableConfig` say."""

    storage: TableStorage = "memory"
    memory_bytes: int | None = None
    storage_dir: str | None = None


def check_table_storage(owner: str, storage: str, memory_bytes: int | None, storage_dir: str | None) -> None:
    """Refuse an unknown `storage`, and settings that do not go with it."""
    if storage not in ("memory", "tiered"):
        raise ConfigError(f"{owner}: storage must be 'memory' or 'tiered', got {storage!r}")
    if storage == "tiered" and (memory_bytes is None or memory_bytes < _LEAST_MEMORY_BYTES):
        raise ConfigError(
            f"{owner}: storage='tiered' needs memory_bytes, the memory of each table, of at least "
            f"{_LEAST_MEMORY_BYTES:,}; got {memory_bytes}"
        )
    if storage == "memory" and (memory_bytes is not None or storage_dir is not None):
        raise ConfigError(f"{owner}: memory_bytes and storage_dir are for storage='tiered'")


EmbeddingDtype: TypeAlias = Literal["float32", "bfloat16", "float16", "int8"]
EmbeddingRounding: TypeAlias = Literal["nearest", "stochastic"]


def check_embedding_storage(owner: str, dtype: str | None, rounding: str | None) -> None:
    """Refuse an unknown `embedding_dtype` or `embedding_rounding`; None is a default."""
    if dtype not in (None, *get_args(EmbeddingDtype)):
        raise ConfigError(
            f"{owner}: embedding_dtype must be 'float32', 'bfloat16', 'float16' or 'int8', got {dtype!r}"
        )
    if rounding not in (None, "nearest", "stochastic"):
        raise ConfigError(f"{owner}: embedding_rounding must be 'nearest' or 'stochastic', got {rounding!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TableConfig:
    """One embedding table: the segments of a row, its memory budget, and how rows are created and expire.

    Examples:
        >>> from monolith import Adagrad, Ftrl, Segment, TableConfig
        >>> bias, vector = Segment(dim=1, optimizer=Ftrl()), Segment(dim=8, optimizer=Adagrad())
        >>> config = TableConfig(name="item", segments=(bias, vector), capacity_bytes=1 << 30)
        >>> config.dim, config.state_dim  # floats per row: of the embedding, of the optimizers
        (9, 10)
    """

    name: str
    segments: tuple[Segment, ...]
    """What a row is made of, side by side. Any sequence is taken and kept as a tuple."""
    initial_rows: int = 0
    """Rows to allocate memory for from the start."""
    expiry: Expiry = field(default_factory=Expiry)
    capacity_bytes: int | None = None
    """A ceiling on the memory of the whole table; None for no ceiling."""
    when_full: Literal["refuse", "expire_oldest"] = "refuse"
    """At the ceiling, refuse new ids, or expire the oldest rows that are not newer than the new id."""
    seed: int = 0
    """For random initializers and stochastic rounding; 0 to 2^64 - 1."""
    embedding_dtype: EmbeddingDtype = "float32"
    """How a training table stores embeddings. With bfloat16 and float16 they take half the bytes, with int8 a
    quarter and a scale of 4 bytes per segment; callers still read and write float32, steps are computed in
    float32, and optimizer state stays float32."""
    embedding_rounding: EmbeddingRounding = "stochastic"
    """How a step's result is rounded to embedding_dtype: to the nearest, which loses small changes (with
    bfloat16 those of less than 1/512 of a value), or up or down by a chance that makes the mean of many small
    steps right. The chance is a hash of seed, ID, step, column and value, so a run is repeatable. Assigned
    values go to the nearest."""
    storage: TableStorage = "memory"
    """Where rows are: all in memory, or the hot ones in `memory_bytes` of memory and all others in files; see
    `TieredTable`, and `SpillingTable` with a GPU above both."""
    memory_bytes: int | None = None
    """Of a tiered table: bytes of host memory for hot rows, for the index of cold ones (9 to 10 bytes for
    each), and for buffers."""
    storage_dir: str | None = None
    """Of a tiered table: the folder of its files, on a local disk; by default one in the system's folder of
    temporary files. Each table makes a folder of its own in it."""
    serving: bool = False
    """True keeps only compressed values: no gradients, no optimizer state."""
    skip_zero: bool = False
    """True drops a row that is assigned zeros, since an absent row reads as zeros; serving only."""
    extra_restore_names: tuple[str, ...] = ()
    """Names this table had before, tried in order when a checkpoint does not hold its own."""
    merged: tuple[tuple[str, int], ...] = ()
    """The tables that were merged into this one: the name of each, and the slot in the high bits of its ids.
    A checkpoint may have them apart, and the other way round."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "segments", tuple(self.segments))
        object.__setattr__(self, "extra_restore_names", tuple(self.extra_restore_names))
        object.__setattr__(self, "merged", tuple((name, slot) for name, slot in self.merged))
        if not self.name:
            raise ConfigError("table: name must not be empty")
        if not self.segments:
            raise ConfigError(f"table {self.name!r}: needs at least one segment")
        if self.initial_rows < 0:
            raise ConfigError(
                f"table {self.name!r}: initial_rows must be at least 0, got {self.initial_rows}"
            )
        if self.capacity_bytes is not None and self.capacity_bytes < 1:
            raise ConfigError(
                f"table {self.name!r}: capacity_bytes must be at least 1 or None, got {self.capacity_bytes}"
            )
        if self.when_full not in ("refuse", "expire_oldest"):
            raise ConfigError(
                f"table {self.name!r}: when_full must be 'refuse' or 'expire_oldest', got {self.when_full!r}"
            )
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"table {self.name!r}: seed must be from 0 to 2^64 - 1, got {self.seed}")
        check_embedding_storage(f"table {self.name!r}", self.embedding_dtype, self.embedding_rounding)
        check_table_storage(f"table {self.name!r}", self.storage, self.memory_bytes, self.storage_dir)
        if self.storage == "tiered" and self.capacity_bytes is not None:
            raise ConfigError(
                f"table {self.name!r}: capacity_bytes is a ceiling on a table in memory; a tiered table has "
                "memory_bytes, and its files grow. Leave capacity_bytes out, and let rows expire"
            )
        if self.stores_narrow and any(s.optimizer.stochastic_rounding for s in self.segments):
            raise ConfigError(
                f"table {self.name!r}: StochasticRounding makes halves of float32 rows; rows with "
                f"embedding_dtype={self.embedding_dtype!r} are rounded already, as embedding_rounding says"
            )
        if self.skip_zero and not self.serving:
            raise ConfigError(
                f"table {self.name!r}: skip_zero is for serving tables; a training row has state to keep"
            )
        if not all(self.extra_restore_names):
            raise ConfigError(f"table {self.name!r}: extra_restore_names must not be empty strings")

    @property
    def dim(self) -> int:
        """Floats per embedding, all segments together."""
        return sum(segment.dim for segment in self.segments)

    @property
    def state_dim(self) -> int:
        """Floats of optimizer state per row; 0 for a serving table."""
        return 0 if self.serving else sum(segment.state_dim for segment in self.segments)

    @property
    def stores_narrow(self) -> bool:
        """Whether embeddings are stored in fewer bits than float32, as embedding_dtype says; those of a
        serving table are as their compressors say."""
        return self.embedding_dtype != "float32" and not self.serving

    @property
    def embedding_bytes(self) -> int:
        """Bytes of a row's embedding, without padding or optimizer state."""
        if self.serving:
            return sum(segment.dim * segment.compressor.bytes_per_value for segment in self.segments)
        return narrow_bytes(self.embedding_dtype, [segment.dim for segment in self.segments])

    def learning_rates(self, step: int) -> list[float]:
        """Return each segment's rate at `step`."""
        return [float(segment.rate(step)) for segment in self.segments]

    def signature(self) -> str:
        """Return everything but the names. Slots with equal signatures can share one table."""
        segments = ", ".join(map(str, self.segments))
        stored: str = self.embedding_dtype
        if stored != "float32":
            stored += f" {self.embedding_rounding}"
        if self.storage != "memory":
            stored += f", storage={self.storage} {self.memory_bytes} {self.storage_dir}"
        return (
            f"table(segments=[{segments}], initial_rows={self.initial_rows}, expiry={self.expiry}, "
            f"capacity_bytes={self.capacity_bytes}, when_full={self.when_full}, seed={self.seed}, "
            f"embeddings={stored}, serving={self.serving}, skip_zero={self.skip_zero})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionConfig:
    """How sightings of ids without a row are counted, if a feature has an `occurrence_threshold`.

    Examples:
        >>> from monolith import AdmissionConfig, Feature
        >>> rare = AdmissionConfig(capacity=1 << 20)  # 2.4 MB of counters
        >>> Feature(name="item", occurrence_threshold=3, admission=rare).occurrence_threshold
        3
    """

    kind: Literal["sliding_hash_filter", "probabilistic_filter", "no_filter"] = "sliding_hash_filter"
    """The admission filter: count sightings for a while, admit by chance without counting, or admit all."""
    capacity: int = 1 << 22
    """Ids that a table's sliding filter remembers, at least 300; 2.4 bytes each, on the GPU if rows are."""
    split_num: int = 7
    """Parts of a sliding filter, at least 5; the oldest is emptied when the newest is full."""
    equal: bool = False
    """Whether a probabilistic filter gives every sighting the same chance, instead of one that grows with the
    sightings in a batch."""

    def __post_init__(self) -> None:
        for name, least in (("capacity", 300), ("split_num", 5)):
            if getattr(self, name) < least:
                raise ConfigError(f"admission: {name} must be at least {least}, got {getattr(self, name)}")


_FC_SLOT = re.compile(r"fc_slot_[0-9]*")


@dataclass(frozen=True, slots=True)
class MergedTable:
    """One physical table and the slots that live in it, sorted."""

    config: TableConfig
    slots: tuple[str, ...]


def merged_name(slots: Iterable[str]) -> str:
    """Return the name of the table that holds `slots`: the md5 of their sorted names."""
    return _md5(sorted(slots))


def legacy_names(slots: Iterable[str]) -> tuple[str, ...]:
    """Return the name, if any, the table had while `fc_slot_7` was still called `slot_7`."""
    ordered = sorted(slots)
    # In the order of today's names: that is how such tables were written.
    before = _md5([slot.removeprefix("fc_") if _FC_SLOT.fullmatch(slot) else slot for slot in ordered])
    return () if before == _md5(ordered) else (before,)


def merge(configs: Mapping[str, TableConfig]) -> list[MergedTable]:
    """Group slots whose configs have equal signatures, one table per group, by first slot name.

    A merged table can be restored from whatever its slots could be, then from its legacy name.
    The configs given are left as they are.
    """
    groups: dict[str, list[str]] = {}
    for slot in sorted(configs):
        groups.setdefault(configs[slot].signature(), []).append(slot)
    return [_merged(slots, configs) for slots in groups.values()]


def _merged(slots: list[str], configs: Mapping[str, TableConfig]) -> MergedTable:
    old_names = [name for slot in slots for name in configs[slot].extra_restore_names]
    config = replace(
        configs[slots[0]],
        name=merged_name(slots),
        extra_restore_names=tuple(dict.fromkeys([*old_names, *legacy_names(slots)])),
    )
    return MergedTable(config, tuple(slots))


def _md5(names: list[str]) -> str:
    return hashlib.md5(",".join(names).encode(), usedforsecurity=False).hexdigest()
