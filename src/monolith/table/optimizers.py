"""Sparse optimizers: the settings of the rule by which a row learns from its gradient.

An optimizer here is a description. The rules are in `update_rules.py` (the reference in numpy) and, compiled,
in `native/include/update_rules.h`. Each segment of a row has its own optimizer, whose state follows the
embedding in the same row; `STATE_FIELDS` lists the fields of that state in order.

Defaults are those of the original system, some of them unusual (Adam's epsilon of 0.01), except for the rate
of Adagrad, which is 0.001 there. Ready models, slots made by hand and a plain `Adagrad()` all start with the
same rate and the same initial accumulator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from monolith.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def label(kind: str, settings: DataclassInstance) -> str:
    """Return `kind` and the settings by name, such as `sgd(learning_rate=0.01, warmup_steps=0)`."""
    names = sorted(field.name for field in fields(settings))
    return f"{kind}({', '.join(f'{name}={getattr(settings, name)}' for name in names)})"


@dataclass(frozen=True, slots=True)
class StateField:
    """One named piece of a segment's optimizer state."""

    name: str
    shape: Literal["vector", "scalar", "counter"] = "vector"
    """One float per value; one float; or an int64 whose bits fill two floats."""
    initial: str = ""
    """The optimizer's attribute that a new row starts from; empty for 0."""

    def size(self, dim: int) -> int:
        """Return the floats it takes in a segment of `dim` values."""
        return {"vector": dim, "scalar": 1, "counter": 2}[self.shape]


_POWERS = (StateField("beta1_power", "scalar", "beta1"), StateField("beta2_power", "scalar", "beta2"))
_NORM = StateField("norm", initial="initial_accumulator_value")

STATE_FIELDS: dict[str, tuple[StateField, ...]] = {
    "sgd": (),
    "adagrad": (_NORM,),
    "dynamic_wd_adagrad": (_NORM, StateField("last_step", "counter")),
    "adadelta": (StateField("accum"), StateField("accum_update")),
    "adam": (StateField("m"), StateField("v"), *_POWERS),
    "amsgrad": (StateField("m"), StateField("v"), StateField("vhat"), *_POWERS),
    "batch_softmax": (StateField("last_step", "counter"),),
    "ftrl": (_NORM, StateField("zero")),
    "group_ftrl": (_NORM, StateField("zero")),
    "group_adagrad": (StateField("grad_square_sum", "scalar", "initial_accumulator_value"),),
    "momentum": (StateField("n"),),
    "moving_average": (),
    "rmsprop": (StateField("n"),),
    "rmspropv2": (StateField("n"),),
    "rowwise_adagrad": (StateField("norm", "scalar", "initial_accumulator_value"),),
}
"""Kind to state, in the order of a row."""

# A name means the same in every optimizer, so its range is said once: (least, greatest, greatest allowed?).
_RANGES: dict[str, tuple[float, float, bool]] = {
    "learning_rate": (0, math.inf, False),
    "initial_accumulator_value": (0, math.inf, False),
    "weight_decay": (0, math.inf, False),
    "beta": (0, math.inf, False),
    "beta1": (0, 1, False),
    "beta2": (0, 1, False),
    "epsilon": (0, math.inf, False),
    "rho": (0, 1, True),
    "momentum": (0, 1, True),
    "l1": (0, math.inf, False),
    "l2": (0, math.inf, False),
    "warmup_steps": (0, math.inf, False),
}


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What all sparse optimizers share. Equal settings compare equal and print the same."""

    kind: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in _RANGES:
                continue
            least, greatest, closed = _RANGES[field.name]
            if not (least <= value < greatest or (closed and value == greatest)):
                raise ConfigError(
                    f"{self.kind}: {field.name} must be from {least:g} to "
                    f"{'' if closed else 'below '}{greatest:g}, got {value!r}"
                )
            if field.name == "warmup_steps" and value != int(value):
                raise ConfigError(f"{self.kind}: warmup_steps must be a whole number, got {value!r}")

    @property
    def learning_rate(self) -> float:
        """The rate of a segment that is given none; 0 where the rule uses no rate."""
        return 0.0

    @property
    def warmup_steps(self) -> int:
        """Steps over which that rate grows from 0; 0 for no warm-up."""
        return 0

    @property
    def rule(self) -> Optimizer:
        """The optimizer itself, without decorators."""
        return self

    @property
    def delay_compensation(self) -> float | None:
        """The lambda of `DelayCompensated`, None without it."""
        return None

    @property
    def stochastic_rounding(self) -> bool:
        """Whether `StochasticRounding` applies."""
        return False

    @property
    def decays_lazily(self) -> bool:
        """Whether rows decay by steps that they are not in."""
        return bool(getattr(self.rule, "lazy_decay", False))

    @property
    def state_fields(self) -> tuple[StateField, ...]:
        return STATE_FIELDS[self.rule.kind]

    def state_dim(self, dim: int) -> int:
        """Return the floats of state for a segment of `dim` values."""
        return sum(field.size(dim) for field in self.state_fields)

    def initial_state(self, dim: int) -> NDArray[np.float32]:
        """Return the state of a new row, float32 of shape (state_dim(dim),)."""
        rule = self.rule
        starts = [
            np.full(field.size(dim), getattr(rule, field.initial) if field.initial else 0.0, dtype=np.float32)
            for field in self.state_fields
        ]
        return np.concatenate(starts) if starts else np.empty(0, dtype=np.float32)

    @property
    def label(self) -> str:
        """Kind and settings in name order, such as `sgd(learning_rate=0.01, warmup_steps=0)`."""
        return label(self.kind, self)

    def __str__(self) -> str:
        return self.label


@dataclass(frozen=True, kw_only=True, slots=True)
class Sgd(Optimizer):
    """Stochastic gradient descent: `w -= lr * g`.

    Examples:
        >>> import torch
        >>> from monolith import NativeTable, Segment, Sgd, TableConfig
        >>> segment = Segment(dim=1, optimizer=Sgd(learning_rate=0.1))
        >>> table = NativeTable(TableConfig(name="item", segments=(segment,)))
        >>> table.apply_gradients(torch.tensor([7]), torch.tensor([[2.0]]), step=1)
        >>> table.lookup(torch.tensor([7]))
        tensor([[-0.2000]])
    """

    kind: ClassVar[str] = "sgd"
    learning_rate: float = 0.01
    warmup_steps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Adagrad(Optimizer):
    """Adagrad: each value has its own rate, which shrinks with the gradients that the value has seen.

    Examples:
        >>> import torch
        >>> from monolith import Adagrad, NativeTable, Segment, TableConfig
        >>> optimizer = Adagrad(learning_rate=0.1, initial_accumulator_value=0.0)
        >>> table = NativeTable(TableConfig(name="item", segments=(Segment(dim=1, optimizer=optimizer),)))
        >>> for step in (1, 2):
        ...     table.apply_gradients(torch.tensor([7]), torch.ones(1, 1), step=step)
        ...     print(table.lookup(torch.tensor([7])))  # steps of 0.1 / sqrt(1) and 0.1 / sqrt(2)
        tensor([[-0.1000]])
        tensor([[-0.1707]])
    """

    kind: ClassVar[str] = "adagrad"
    learning_rate: float = 0.05
    initial_accumulator_value: float = 0.1
    weight_decay: float = 0.0
    """L2: `weight_decay * w` is added to the gradient of a row once in each step that the row is in, whatever
    the number of its examples. `EmbeddingOptimizer` sums gradients over the batch, so that the same decay
    counts for less the larger the batch is; see docs/guides/tuning.md."""
    warmup_steps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RowwiseAdagrad(Optimizer):
    """Adagrad with one rate for all values of a row: it keeps one float, and not one for each value.

    The accumulator grows by the mean of the squared gradients of the values. A row of 32 values and its state
    take 132 bytes in place of 256.

    Examples:
        >>> import torch
        >>> from monolith import NativeTable, Segment, TableConfig
        >>> from monolith.table import RowwiseAdagrad
        >>> optimizer = RowwiseAdagrad(learning_rate=0.1, initial_accumulator_value=0.0)
        >>> table = NativeTable(TableConfig(name="item", segments=(Segment(dim=2, optimizer=optimizer),)))
        >>> table.apply_gradients(torch.tensor([7]), torch.tensor([[1.0, 7.0]]), step=1)
        >>> table.lookup(torch.tensor([7]))  # the mean of 1 and 49 is 25: a rate of 0.1 / 5 for both
        tensor([[-0.0200, -0.1400]])
    """

    kind: ClassVar[str] = "rowwise_adagrad"
    learning_rate: float = 0.05
    initial_accumulator_value: float = 0.1
    weight_decay: float = 0.0
    """As in `Adagrad`."""
    warmup_steps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicWdAdagrad(Optimizer):
    """Adagrad whose weight decay may be kept out of the accumulator.

    Upstream's Python class switches dynamic decay on by default, but its rule was
    never published and upstream itself raises. Here it is off by default, and
    asking for it is an error rather than a different rule under the same name.
    """

    kind: ClassVar[str] = "dynamic_wd_adagrad"
    learning_rate: float = 0.05
    initial_accumulator_value: float = 0.1
    weight_decay: float = 0.0
    decouple_weight_decay: bool = True
    """True takes `lr * weight_decay * w` off the value; False adds to the gradient, as Adagrad does."""
    lazy_decay: bool = False
    """Whether a row also decays by the steps that it is not in, as if decay had been applied to all rows in
    each step since the row's first. What the missed steps would have taken is taken off when it is read or
    trained next, at the rate of the newest step."""
    enable_dynamic_wd: bool = False
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        Optimizer.__post_init__(self)
        if self.enable_dynamic_wd:
            raise ConfigError(
                "dynamic_wd_adagrad: enable_dynamic_wd has no published rule; "
                "leave it False and choose with decouple_weight_decay"
            )
        if self.lazy_decay and not self.decouple_weight_decay:
            raise ConfigError(
                "dynamic_wd_adagrad: lazy_decay takes decay off the value; it needs decouple_weight_decay"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Adadelta(Optimizer):
    """Steps scaled by the ratio of past updates to past gradients."""

    kind: ClassVar[str] = "adadelta"
    learning_rate: float = 0.01
    weight_decay: float = 0.0
    rho: float = 0.9
    epsilon: float = 0.01
    warmup_steps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam(Optimizer):
    """Adam: running means of the gradient and of its square, corrected for their start at 0, counted per row.

    Examples:
        >>> from monolith import Adam, Segment
        >>> Segment(dim=8, optimizer=Adam(learning_rate=0.001)).state_dim  # floats per row
        18
    """

    kind: ClassVar[str] = "adam"
    learning_rate: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    use_nesterov: bool = False
    epsilon: float = 0.01
    warmup_steps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Amsgrad(Optimizer):
    """Adam that divides by the largest mean square so far."""

    kind: ClassVar[str] = "amsgrad"
    learning_rate: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    use_nesterov: bool = False
    epsilon: float = 0.01
    warmup_steps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSoftmax(Optimizer):
    """Learns the mean number of steps between sightings of an id; the gradient is ignored. One value only."""

    kind: ClassVar[str] = "batch_softmax"
    learning_rate: float = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Ftrl(Optimizer):
    """FTRL (follow the regularized leader), value by value: `l1` makes small values exactly 0.

    Examples:
        >>> import torch
        >>> from monolith import Ftrl, NativeTable, Segment, TableConfig
        >>> optimizer = Ftrl(learning_rate=0.1, l1=1.0)
        >>> table = NativeTable(TableConfig(name="item", segments=(Segment(dim=2, optimizer=optimizer),)))
        >>> table.apply_gradients(torch.tensor([7]), torch.tensor([[0.5, 2.0]]), step=1)
        >>> table.lookup(torch.tensor([7]))  # the small gradient leaves an exact 0
        tensor([[ 0.0000, -0.0494]])
    """

    kind: ClassVar[str] = "ftrl"
    learning_rate: float = 0.01
    initial_accumulator_value: float = 0.1
    beta: float = 0.0
    l1: float = 0.0
    l2: float = 0.0
    warmup_steps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFtrl(Optimizer):
    """Ftrl that zeroes whole segments: upstream's FTRLWithGroupSparsity.

    Its beta of 1 and accumulator of 0 differ from Ftrl's, as they do upstream.
    """

    kind: ClassVar[str] = "group_ftrl"
    learning_rate: float = 0.01
    initial_accumulator_value: float = 0.0
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    warmup_steps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupAdagrad(Optimizer):
    """One accumulator for the whole segment, zeroed as a whole by `l2`: upstream's AdaGradWithGroupLasso."""

    kind: ClassVar[str] = "group_adagrad"
    learning_rate: float = 0.01
    initial_accumulator_value: float = 0.1
    beta: float = 0.0
    l2: float = 0.0
    weight_decay: float = 0.0
    warmup_steps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Momentum(Optimizer):
    """SGD with momentum: a velocity that keeps `momentum` of itself at each step.

    Examples:
        >>> import torch
        >>> from monolith import Momentum, NativeTable, Segment, TableConfig
        >>> optimizer = Momentum(learning_rate=0.1, momentum=0.5)
        >>> table = NativeTable(TableConfig(name="item", segments=(Segment(dim=1, optimizer=optimizer),)))
        >>> for step in (1, 2):
        ...     table.apply_gradients(torch.tensor([7]), torch.ones(1, 1), step=step)
        ...     print(table.lookup(torch.tensor([7])))  # steps of 0.1 and 0.15
        tensor([[-0.1000]])
        tensor([[-0.2500]])
    """

    kind: ClassVar[str] = "momentum"
    learning_rate: float = 0.01
    weight_decay: float = 0.0
    use_nesterov: bool = False
    momentum: float = 0.9
    warmup_steps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MovingAverage(Optimizer):
    """`w = momentum * w + (1 - momentum) * g`. It has no learning rate; one that is passed is ignored."""

    kind: ClassVar[str] = "moving_average"
    momentum: float = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Rmsprop(Optimizer):
    """RMSprop: steps divided by 1 plus the root of a running mean square.

    Examples:
        >>> import torch
        >>> from monolith import NativeTable, Rmsprop, Segment, TableConfig
        >>> optimizer = Rmsprop(learning_rate=0.1)
        >>> table = NativeTable(TableConfig(name="item", segments=(Segment(dim=1, optimizer=optimizer),)))
        >>> table.apply_gradients(torch.tensor([7]), torch.ones(1, 1), step=1)
        >>> table.lookup(torch.tensor([7]))
        tensor([[-0.0760]])
    """

    kind: ClassVar[str] = "rmsprop"
    learning_rate: float = 0.01
    weight_decay: float = 0.0
    momentum: float = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class RmspropV2(Optimizer):
    """Rmsprop whose mean square is a decaying sum: new squares count in full."""

    kind: ClassVar[str] = "rmspropv2"
    learning_rate: float = 0.01
    weight_decay: float = 0.0
    momentum: float = 0.9


@dataclass(frozen=True, slots=True)
class Decorator(Optimizer):
    """Another optimizer's rule and state, with a change before or after its step."""

    base: Optimizer

    @property
    def learning_rate(self) -> float:
        return self.base.learning_rate

    @property
    def warmup_steps(self) -> int:
        return self.base.warmup_steps

    @property
    def rule(self) -> Optimizer:
        return self.base.rule

    @property
    def delay_compensation(self) -> float | None:
        return self.base.delay_compensation

    @property
    def stochastic_rounding(self) -> bool:
        return self.base.stochastic_rounding


@dataclass(frozen=True, slots=True)
class DelayCompensated(Decorator):
    """Corrects a gradient that was computed on an older value, before the step.

    `g + lambda_ * g^2 * (w - latest)`, where `latest` is the value the worker saw,
    handed to `apply_gradients` as `latest_values`.
    """

    kind: ClassVar[str] = "delay_compensated"
    lambda_: float = 0.0

    def __post_init__(self) -> None:
        if self.base.delay_compensation is not None:
            raise ConfigError(f"delay_compensated: its base is delay-compensated already: {self.base}")
        if self.base.decays_lazily:
            raise ConfigError(
                "delay_compensated: with lazy_decay a stored value is older than what a worker saw of it; "
                "use one of the two"
            )
        if not math.isfinite(self.lambda_):
            raise ConfigError(f"delay_compensated: lambda_ must be finite, got {self.lambda_!r}")

    @property
    def delay_compensation(self) -> float | None:
        return self.lambda_


@dataclass(frozen=True, slots=True)
class StochasticRounding(Decorator):
    """Rounds values to half precision after the step, up or down by chance so that the mean is kept."""

    kind: ClassVar[str] = "stochastic_rounding"

    def __post_init__(self) -> None:
        if self.base.stochastic_rounding:
            raise ConfigError(f"stochastic_rounding: its base is rounded already: {self.base}")

    @property
    def stochastic_rounding(self) -> bool:
        return True


OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": Sgd,
    "adagrad": Adagrad,
    "dynamic_wd_adagrad": DynamicWdAdagrad,
    "adadelta": Adadelta,
    "adam": Adam,
    "amsgrad": Amsgrad,
    "batch_softmax": BatchSoftmax,
    "ftrl": Ftrl,
    "group_ftrl": GroupFtrl,
    "group_adagrad": GroupAdagrad,
    "momentum": Momentum,
    "moving_average": MovingAverage,
    "rmsprop": Rmsprop,
    "rmspropv2": RmspropV2,
    "rowwise_adagrad": RowwiseAdagrad,
}

_UPSTREAM_NAMES = {
    "weight_decay_factor": "weight_decay",
    "averaging_ratio": "rho",
    "l1_regularization_strength": "l1",
    "l2_regularization_strength": "l2",
}
# Upstream reads these nowhere, or only in the dynamic decay that was never published.
_UPSTREAM_UNUSED = {
    "adagrad": {"hessian_compression_times"},
    "dynamic_wd_adagrad": {"hessian_compression_times", "dynamic_wd_temperature", "flip_direction"},
    "adam": {"use_beta1_warmup"},
}
# Where the proto's defaults differ from ours, messages follow the proto.
_UPSTREAM_DEFAULTS: dict[str, dict[str, Any]] = {
    "adagrad": {"learning_rate": 0.001},
    "dynamic_wd_adagrad": {"learning_rate": 0.001, "decouple_weight_decay": False},
}


def from_upstream(kind: str, config: Mapping[str, Any]) -> Optimizer:
    """Return the optimizer that an upstream `OptimizerConfig` message describes.

    Args:
        kind: The name in the message's oneof, such as `ftrl`. `dc` takes `lambda_` and a `base`,
            either a kind or a mapping with one kind in it.
        config: The message's fields by their proto names; what is absent has its proto default.
            `stochastic_rounding_float16` may be among them.

    Raises:
        ConfigError: The kind or a field is unknown, or a value is out of range.
    """
    given = dict(config)
    rounded = bool(given.pop("stochastic_rounding_float16", False))
    given.pop("dim_size", None)
    optimizer: Optimizer
    if kind == "dc":
        optimizer = _delay_compensated(given)
    elif kind in OPTIMIZERS:
        settings = dict(_UPSTREAM_DEFAULTS.get(kind, {}))
        ours = {field.name for field in fields(OPTIMIZERS[kind])}
        unused = _UPSTREAM_UNUSED.get(kind, set())
        for name, value in given.items():
            setting = _UPSTREAM_NAMES.get(name, name)
            if name in _UPSTREAM_NAMES.values() or (setting not in ours and name not in unused):
                known = sorted({_upstream_name(field) for field in ours} | unused)
                raise ConfigError(f"{kind}: no upstream field {name!r}; it has {', '.join(known)}")
            if setting in ours:
                settings[setting] = value
        optimizer = OPTIMIZERS[kind](**settings)
    else:
        raise ConfigError(f"no optimizer {kind!r}; there are {', '.join(OPTIMIZERS)} and dc")
    return StochasticRounding(optimizer) if rounded else optimizer


def _upstream_name(setting: str) -> str:
    return next((name for name, ours in _UPSTREAM_NAMES.items() if ours == setting), setting)


def _delay_compensated(config: Mapping[str, Any]) -> DelayCompensated:
    if set(config) - {"lambda_", "base"} or "base" not in config:
        raise ConfigError(f"dc: takes lambda_ and base, got {', '.join(sorted(config)) or 'nothing'}")
    base = config["base"]
    kind, settings = (base, {}) if isinstance(base, str) else next(iter(base.items()))
    return DelayCompensated(from_upstream(kind, settings), config.get("lambda_", 0.0))
