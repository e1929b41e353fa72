"""The kinds of features: what is read of the data, and what it becomes.

Plain values, so that a model, a file and a checkpoint say the same of a feature. Its name is the key it
has in a `FeatureSpec`; the column it reads has that name unless another is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from math import inf, isfinite
from typing import Literal

from monolith.config.fields import check_fields
from monolith.errors import ConfigError
from monolith.feature.fids import MAX_SLOTS_V2
from monolith.table import (
    Adadelta,
    Adagrad,
    Adam,
    AdmissionConfig,
    Amsgrad,
    BatchSoftmax,
    BatchSoftmaxInit,
    Constant,
    DynamicWdAdagrad,
    FixedR8,
    Fp16,
    Fp32,
    Ftrl,
    GroupAdagrad,
    GroupFtrl,
    Momentum,
    MovingAverage,
    OneBit,
    Ones,
    PolynomialDecay,
    RandomUniform,
    Rmsprop,
    RmspropV2,
    RowwiseAdagrad,
    Sgd,
    Zeros,
)
from monolith.table.config import EmbeddingDtype, EmbeddingRounding, check_embedding_storage

RowOptimizer = (
    Adagrad
    | Ftrl
    | Sgd
    | Adam
    | Amsgrad
    | Adadelta
    | DynamicWdAdagrad
    | GroupAdagrad
    | GroupFtrl
    | Momentum
    | Rmsprop
    | RmspropV2
    | RowwiseAdagrad
    | MovingAverage
    | BatchSoftmax
)
"""What may train a feature's rows: those that are plain values."""

RowInitializer = RandomUniform | Zeros | Ones | Constant | BatchSoftmaxInit
"""What a feature's rows may begin with: those that are plain values."""

RowCompressor = Fp16 | Fp32 | FixedR8 | OneBit
"""How a server may keep a feature's rows."""

RowRate = float | PolynomialDecay
"""A learning rate: one for all steps, or one that moves with them."""

Pooled = Literal["sum", "mean", "max"]
"""How the embeddings of an example's ids become one."""

DEFAULT_GAPS = (60.0, 600.0, 3600.0, 21600.0, 86400.0, 259200.0, 604800.0, 2592000.0, 7776000.0)
"""Seconds between which time gaps fall: a minute, ten, an hour, six, a day, three, a week, a month, three."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSettings:
    """How the rows of a feature are born, trained and let go; None is the model's default."""

    dim: int | None = None
    """How many floats the feature's vector has."""
    shares: str | None = None
    """The feature whose rows this one reads, for a shared vocabulary; rows are then set up there."""
    rows: str | None = None
    """The name of its rows, as in checkpoints; by default that of the feature."""
    slot: int | None = None
    """The slot in the high bits of its ids, where the spec makes fids; None has one chosen by the name."""
    optimizer: RowOptimizer | None = None
    """What trains the feature's vectors."""
    stochastic_rounding: bool = False
    """Whether `optimizer`, which must be set, rounds vectors to half precision, up or down by chance."""
    delay_compensation: float | None = None
    """How strongly `optimizer`, which must be set, corrects gradients of older vectors: the lambda of
    `DelayCompensated`. None does not."""
    bias_optimizer: RowOptimizer | None = None
    """What trains the feature's bias, in models that have one."""
    initializer: RowInitializer | None = None
    """What the feature's vectors are before their first gradient."""
    bias_initializer: RowInitializer | None = None
    """What the feature's bias is before its first gradient, in models that have one."""
    compressor: RowCompressor | None = None
    """How a server keeps the feature's vectors, by default in half precision; coarse ones are trained as they
    will be served."""
    bias_compressor: RowCompressor | None = None
    """How a server keeps the feature's bias, by default as it is, in models that have one."""
    learning_rate: RowRate | None = None
    """The rate of its vectors, in place of the optimizer's own: a number, or a PolynomialDecay by steps."""
    bias_learning_rate: RowRate | None = None
    """The rate of its bias, in place of the optimizer's own."""
    occurrence_threshold: int = 0
    """Sightings after which an id is given a row on the next; 0 at once."""
    admission: AdmissionConfig | None = None
    """How sightings are counted, if occurrence_threshold is set; None is the run's."""
    expire_after: timedelta | None = None
    """Time without an update after which a row may go; None keeps it for good."""
    capacity_bytes: int | None = None
    """A ceiling on the memory of the rows; None for no ceiling."""
    when_full: Literal["refuse", "expire_oldest"] | None = None
    """What happens at that ceiling: refuse new rows, or drop the rows that were updated longest ago. None
    refuses."""
    initial_rows: int = 0
    """The initial capacity of the table, in rows; 0 leaves it to the run."""
    embedding_dtype: EmbeddingDtype | None = None
    """How embeddings are stored while they are trained, bias included: in "float32"; in "bfloat16" or
    "float16", which take half the bytes; or in "int8", which takes a quarter and 4 bytes for each of bias and
    vector. Optimizer state stays float32. None is the run's (train.tables)."""
    embedding_rounding: EmbeddingRounding | None = None
    """How steps are rounded to embedding_dtype: "stochastic", or "nearest", which loses small ones. None is
    the run's."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.dim is not None and self.dim < 1:
            raise ConfigError(f"dim must be at least 1, got {self.dim}")
        if self.slot is not None and not 0 <= self.slot < MAX_SLOTS_V2:
            raise ConfigError(f"slot must be from 0 to {MAX_SLOTS_V2 - 1}, got {self.slot}")
        if self.shares is not None:
            set_here = [name for name in OF_ROWS if getattr(self, name) not in (None, 0)]
            if set_here:
                raise ConfigError(
                    f"it shares the rows of {self.shares!r} and sets {', '.join(set_here)}: set it there"
                )
        if self.optimizer is None and (self.stochastic_rounding or self.delay_compensation is not None):
            raise ConfigError(
                "stochastic_rounding and delay_compensation change an optimizer; set optimizer too"
            )
        check_embedding_storage("rows", self.embedding_dtype, self.embedding_rounding)
        if self.occurrence_threshold < 0:
            raise ConfigError(f"occurrence_threshold must be 0 or more, got {self.occurrence_threshold}")
        if self.expire_after is not None and self.expire_after < timedelta(0):
            raise ConfigError(f"expire_after must not be negative, got {self.expire_after}")
        if self.capacity_bytes is not None and self.capacity_bytes < 1:
            raise ConfigError(f"capacity_bytes must be at least 1 or none, got {self.capacity_bytes}")
        if self.initial_rows < 0:
            raise ConfigError(f"initial_rows must be 0 or more, got {self.initial_rows}")


OF_ROWS = (
    "dim",
    "rows",
    "slot",
    "optimizer",
    "stochastic_rounding",
    "delay_compensation",
    "bias_optimizer",
    "initializer",
    "bias_initializer",
    "compressor",
    "bias_compressor",
    "learning_rate",
    "bias_learning_rate",
    "occurrence_threshold",
    "admission",
    "expire_after",
    "capacity_bytes",
    "when_full",
    "initial_rows",
    "embedding_dtype",
    "embedding_rounding",
)
"""Settings of rows, which only their owner has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IdFeature(RowSettings):
    """IDs: whole numbers as they are, or strings by their hash; any number of them in an example.

    A missing value (an empty cell, null, NaN) is no ID.

    Examples:
        >>> from datetime import timedelta
        >>> from monolith import FeatureSpec, IdFeature, MemorySource, Pipeline
        >>> item = IdFeature(column="item_id", dim=8, occurrence_threshold=2, expire_after=timedelta(days=30))
        >>> word = IdFeature(kind="string", separator="|")
        >>> spec = FeatureSpec(features={"item": item, "word": word}, labels={})
        >>> source = MemorySource({"item_id": [7, 8], "word": ["red|shoe", ""]}, batch_size=4)
        >>> [batch] = Pipeline(source).to_batches(spec)
        >>> batch.ids["item"].flat_values, batch.ids["word"].row_lengths()
        (tensor([7, 8]), tensor([2, 0]))
    """

    column: str | None = None
    """The column it reads; by default that of its name."""
    kind: Literal["int", "string"] = "int"
    """Whether ids are whole numbers or strings, which are hashed."""
    separator: str | None = None
    """The separator between the items of a list in one text, such as "|"; columns of lists need none."""
    weights: str | None = None
    """A column with a number for each item, by which its embedding is multiplied; a mean is then weighted.
    One that is missing is 1."""
    combiner: Pooled = "sum"
    """How the embeddings of an example's items become one."""

    def __post_init__(self) -> None:
        RowSettings.__post_init__(self)
        check_separator(self.separator)
        if self.weights is not None and self.combiner == "max":
            raise ConfigError("weights go with the combiners sum and mean, not with max")


@dataclass(frozen=True, kw_only=True, slots=True)
class FloatFeature:
    """Numbers that a model reads as they are, or scaled.

    Examples:
        >>> from monolith import FeatureSpec, FloatFeature, MemorySource, Pipeline
        >>> spec = FeatureSpec(features={"price": FloatFeature(scale="log")}, labels={})
        >>> source = MemorySource({"price": [0.0, 9.0]}, batch_size=4)
        >>> [batch] = Pipeline(source).to_batches(spec)
        >>> batch.floats["price"]  # log(1 + x), of shape (n, width)
        tensor([[0.0000],
                [2.3026]])
    """

    column: str | None = None
    """The column it reads; by default that of its name."""
    width: int = 1
    """How many numbers an example has. A record with another number of them, but for none, is a bad one."""
    separator: str | None = None
    """The separator between the numbers in one text; columns of lists need none."""
    scale: Literal["raw", "log", "standard"] = "raw"
    """Whether numbers stay as they are, become sign(x) log(1 + |x|), or (x - mean) / std."""
    mean: tuple[float, ...] | None = None
    """The mean of each number, for scale = "standard"; none has `fit` learn it."""
    std: tuple[float, ...] | None = None
    """The standard deviation of each number; none has `fit` learn it. One of 0 counts as 1."""
    missing: float | None = 0.0
    """What a missing number (an empty cell, null, NaN) reads as, after scaling; none makes the record a bad
    one."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_separator(self.separator)
        if self.width < 1:
            raise ConfigError(f"width must be at least 1, got {self.width}")
        for name in ("mean", "std"):
            numbers = getattr(self, name)
            if numbers is None:
                continue
            if self.scale != "standard":
                raise ConfigError(f'{name} goes with scale = "standard", not with {self.scale!r}')
            if len(numbers) != self.width or not all(map(isfinite, numbers)):
                raise ConfigError(f"{name} must be {self.width} finite numbers, got {list(numbers)}")
        if (self.mean is None) != (self.std is None):
            raise ConfigError("mean and std go together: give both, or none of them")
        if self.std is not None and min(self.std) < 0:
            raise ConfigError(f"std must not be negative, got {list(self.std)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketFeature(RowSettings):
    """Numbers that become IDs by their bucket: 0 below the first boundary, 1 from it on, and so forth.

    A missing number is no ID.

    Examples:
        >>> from monolith import BucketFeature, FeatureSpec, MemorySource, Pipeline
        >>> spec = FeatureSpec(features={"age": BucketFeature(boundaries=(18, 25, 35))}, labels={})
        >>> source = MemorySource({"age": [17, 18, 30, 99]}, batch_size=4)
        >>> [batch] = Pipeline(source).to_batches(spec)
        >>> batch.ids["age"].flat_values
        tensor([0, 1, 2, 3])
    """

    column: str | None = None
    """The column it reads; by default that of its name."""
    separator: str | None = None
    """The separator between the numbers in one text; columns of lists need none."""
    boundaries: tuple[float, ...] | None = None
    """Rising; a number that is one of them falls into the bucket above."""
    quantiles: int | None = None
    """How many buckets of about equal size `fit` makes of the data."""
    combiner: Pooled = "sum"
    """How the embeddings of an example's numbers become one."""

    def __post_init__(self) -> None:
        RowSettings.__post_init__(self)
        check_separator(self.separator)
        if self.boundaries is None and self.quantiles is None:
            raise ConfigError("a bucket feature needs boundaries, or quantiles to learn them")
        check_rising("boundaries", self.boundaries or ())
        if self.quantiles is not None and not 2 <= self.quantiles <= 10_000:
            raise ConfigError(f"quantiles must be from 2 to 10,000, got {self.quantiles}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossFeature(RowSettings):
    """A cross of several features: every combination of one ID of each is an ID of its own.

    Examples:
        >>> from monolith import CrossFeature, FeatureSpec, IdFeature, MemorySource, Pipeline
        >>> features = {"user": IdFeature(), "tags": IdFeature(), "both": CrossFeature(of=("user", "tags"))}
        >>> spec = FeatureSpec(features=features, labels={})
        >>> source = MemorySource({"user": [17, 18], "tags": [[3, 9], []]}, batch_size=4)
        >>> [batch] = Pipeline(source).to_batches(spec)
        >>> batch.ids["both"].row_lengths()  # user 17 with tag 3 and with tag 9; user 18 has no tag
        tensor([2, 0])
    """

    of: tuple[str, ...]
    """Features of ids: two or more."""
    most: int = 1000
    """How many ways an example may have; a record with more is a bad one."""
    combiner: Pooled = "sum"
    """How the embeddings of an example's crosses become one."""

    def __post_init__(self) -> None:
        RowSettings.__post_init__(self)
        if len(self.of) < 2:
            raise ConfigError(f"a cross is of two features or more, got {list(self.of)}")
        if self.most < 1:
            raise ConfigError(f"most must be at least 1, got {self.most}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceFeature(RowSettings):
    """IDs in order, of which the first or the last `length` are kept, such as the last actions of a user.

    Examples:
        >>> from monolith import FeatureSpec, IdFeature, MemorySource, Pipeline, SequenceFeature
        >>> seen = SequenceFeature(length=2, keep="last", shares="item")
        >>> spec = FeatureSpec(features={"item": IdFeature(), "seen": seen}, labels={})
        >>> source = MemorySource({"item": [7, 8], "seen": [[1, 2, 3], [4]]}, batch_size=4)
        >>> [batch] = Pipeline(source).to_batches(spec)
        >>> batch.ids["seen"].to_padded(2)
        tensor([[2, 3],
                [4, 0]])
    """

    column: str | None = None
    """The column it reads; by default that of its name."""
    length: int
    """How many ids are kept."""
    keep: Literal["first", "last"] = "last"
    """Which of them; their order stays."""
    kind: Literal["int", "string"] = "int"
    """Whether ids are whole numbers or strings, which are hashed."""
    separator: str | None = None
    """The separator between the items of a list in one text; columns of lists need none."""
    times: str | None = None
    """A column with the time of each item, in any form of an event time. How long before the example's event
    time that was becomes a feature of its own, named with ".gap" behind; without both times there is none."""
    gaps: tuple[float, ...] = DEFAULT_GAPS
    """Seconds, rising, between which these gaps fall."""
    combiner: Pooled | None = None
    """How the embeddings become one; none keeps each in its place, for a layer that reads sequences."""

    def __post_init__(self) -> None:
        RowSettings.__post_init__(self)
        check_separator(self.separator)
        if self.length < 1:
            raise ConfigError(f"length must be at least 1, got {self.length}")
        check_rising("gaps", self.gaps)


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryFeature:
    """The last values of another feature, oldest first, with what was known at each step: a jagged sequence.

    It has as many steps as a record has, up to `max`, and no padding. In a batch of the example below,
    `ids["history"]` has the IDs of items, `ids["history.action"]` those of actions and `ids["history.time"]`
    Unix seconds, all three with the same row splits. They read the rows of `item` and `action`; times have
    none.

    The data has a list for each of them: in the columns `history`, `history.action` and `history.time`, with
    values as in the columns of `item`, `action` and the event time. With `by`, the pipeline makes these
    columns from the events before.

    Examples:
        >>> from monolith import FeatureSpec, HistoryFeature, IdFeature, MemorySource, Pipeline
        >>> history = HistoryFeature(of="item", max=2, with_=("action", "time"))
        >>> ids = {"item": IdFeature(), "action": IdFeature(kind="string")}
        >>> spec = FeatureSpec(features={**ids, "history": history}, labels={}, event_time="time")
        >>> spec.columns["history"], spec.columns["history.action"]  # as the columns of item and action
        (torch.int64, torch.uint8)
    """

    kind: Literal["sequence"] = "sequence"
    """What tells it from other features in a file: always "sequence"."""
    of: str
    """The ID feature whose values it lists, and whose rows it reads."""
    max: int
    """How many steps are kept: the most recent ones."""
    with_: tuple[str, ...] = ()
    """What is kept along with each step, `with` in files: ID features, or the column of the event time."""
    by: str | None = None
    """The ID feature by which the pipeline collects it from the events before, such as the user. None reads
    it from columns."""
    column: str | None = None
    """The column of its items; by default that of its name. Those of `with` have ".NAME" behind."""
    separator: str | None = None
    """The separator between the steps in one text, such as "|"; columns of lists need none."""
    only: str | None = None
    """With `by`: the label, or the column, that must be above 0 for an event to enter the history, such as a
    click. None has every event enter."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_separator(self.separator)
        if self.max < 1:
            raise ConfigError(f"max must be at least 1, got {self.max}")
        twice = [name for name in self.with_ if self.with_.count(name) > 1]
        if twice:
            raise ConfigError(f"with names {twice[0]!r} twice")
        if self.by is None and self.only is not None:
            raise ConfigError(
                f"only = {self.only!r} says which events enter a history that the pipeline makes; set by, too"
            )
        if self.by is not None and self.separator is not None:
            raise ConfigError(
                "separator is for columns of texts, and by has the pipeline make lists; set one"
            )

    @property
    def shares(self) -> str:
        """The feature whose rows it reads, as `RowSettings` have it."""
        return self.of


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """A value that a model learns to predict for each example.

    A missing label (an empty cell, null, NaN) makes the record a bad one, unless its column is optional: the
    example is then not trained on for this label.

    Examples:
        >>> from monolith import FeatureSpec, IdFeature, Label, MemorySource, Pipeline
        >>> labels = {"click": Label(), "long_watch": Label(column="seconds", at_least=30)}
        >>> spec = FeatureSpec(features={"item": IdFeature()}, labels=labels)
        >>> source = MemorySource({"item": [7, 8], "click": [1, 1], "seconds": [12.0, 45.0]}, batch_size=4)
        >>> [batch] = Pipeline(source).to_batches(spec)
        >>> batch.labels
        {'click': tensor([1., 1.]), 'long_watch': tensor([0., 1.])}
    """

    column: str | None = None
    """The column it reads; by default that of its name."""
    position: int = 0
    """Which number of the column."""
    at_least: float | None = None
    """Makes a label of 1 from this number on, and of 0 below it; none takes the number itself."""
    loss: Literal["binary", "mse", "huber", "log"] | None = None
    """What the label is and how the model is trained on it. "binary": a class, 0 or 1 (cross entropy).
    "mse", "huber": a number. "log": a number of 0 or more with a long tail, such as seconds (squared error of
    log(1 + number)). By default "binary"; a two-tower model takes any positive number as a wanted item."""
    weight: float = 1.0
    """What its loss is multiplied by, where a model has several labels."""
    delta: float = 1.0
    """For "huber": errors above it count linearly."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.position < 0:
            raise ConfigError(f"position must be 0 or more, got {self.position}")
        if not 0 <= self.weight < inf:
            raise ConfigError(f"weight must be 0 or more, got {self.weight}")
        if not 0 < self.delta < inf:
            raise ConfigError(f"delta must be more than 0, got {self.delta}")
        if self.at_least is not None and self.loss not in (None, "binary"):
            raise ConfigError(
                f'at_least makes a class of a number, and loss = "{self.loss}" is for numbers; leave one out'
            )


AnyFeature = IdFeature | FloatFeature | BucketFeature | CrossFeature | SequenceFeature | HistoryFeature
AnyIdFeature = IdFeature | BucketFeature | CrossFeature | SequenceFeature | HistoryFeature
"""Features of ids. A history has no rows of its own."""


def check_separator(separator: str | None) -> None:
    if separator is not None and (len(separator) != 1 or not separator.isascii()):
        raise ConfigError(f"separator must be one ASCII character, got {separator!r}")


def check_rising(name: str, numbers: tuple[float, ...]) -> None:
    if not all(map(isfinite, numbers)) or any(a >= b for a, b in pairwise(numbers)):
        raise ConfigError(f"{name} must be finite and rise, got {list(numbers)}")
