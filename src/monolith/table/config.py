"""A table's configuration: what a row is made of, and how rows are born and die."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from monolith.errors import ConfigError
from monolith.table.compressors import Compressor, Fp32
from monolith.table.expiry import Expiry
from monolith.table.initializers import Initializer, Zeros
from monolith.table.learning_rates import ConstantRate, LearningRate, warmup
from monolith.table.optimizers import Optimizer, Sgd


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A stretch of a row that is initialized, trained and compressed in one way."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class TableConfig:
    """One embedding table."""

    name: str
    segments: tuple[Segment, ...]
    """What a row is made of, side by side. Any sequence is taken and kept as a tuple."""
    initial_rows: int = 0
    """Rows to make room for from the start."""
    expiry: Expiry = field(default_factory=Expiry)
    capacity_bytes: int | None = None
    """A ceiling on the memory of the whole table; None for no ceiling."""
    when_full: Literal["refuse", "expire_oldest"] = "refuse"
    """At the ceiling, turn new ids away, or let the oldest row go if it is not newer than the newcomer."""
    seed: int = 0
    """For random initializers and stochastic rounding; 0 to 2^64 - 1."""
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

    def learning_rates(self, step: int) -> list[float]:
        """Return each segment's rate at `step`."""
        return [float(segment.rate(step)) for segment in self.segments]

    def signature(self) -> str:
        """Return everything but the names. Slots with equal signatures can share one table."""
        segments = ", ".join(map(str, self.segments))
        return (
            f"table(segments=[{segments}], initial_rows={self.initial_rows}, expiry={self.expiry}, "
            f"capacity_bytes={self.capacity_bytes}, when_full={self.when_full}, seed={self.seed}, "
            f"serving={self.serving}, skip_zero={self.skip_zero})"
        )
