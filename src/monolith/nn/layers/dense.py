"""Dense layers: argument checks, initial weights, activations, normalization, and stacks of them.

A layer knows its widths from the start, so it refuses a wrong shape where it enters, by the argument's
name, and not three matrix products later. A kernel of shape (in, out) is used as `x @ kernel`. Normalized
kernels keep the scale of each column in a parameter of its own: an optimizer step then changes the scale
only through that parameter, which steadies deep towers on embeddings whose scale drifts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional

from monolith.errors import LayerArgumentError


def check_shape(layer: str, name: str, tensor: Tensor, *shape: int | None) -> None:
    """Refuse a tensor that has not exactly this many axes, of these sizes; None allows any size."""
    fits = tensor.ndim == len(shape) and all(
        want is None or want == found for want, found in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise LayerArgumentError(f"{layer}: {name} must have shape ({wanted}), got {tuple(tensor.shape)}")


def check_last_axis(layer: str, name: str, tensor: Tensor, features: int) -> None:
    """Refuse a tensor whose last axis is not `features` wide; any axes may come before it."""
    if tensor.ndim < 1 or tensor.shape[-1] != features:
        raise LayerArgumentError(
            f"{layer}: {name} must have shape (..., {features}), got {tuple(tensor.shape)}"
        )


def check_positive(layer: str, **numbers: int) -> None:
    """Refuse a width or a count that is not a whole number of at least 1."""
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise LayerArgumentError(f"{layer}: {name} must be a whole number of at least 1, got {number!r}")


def check_widths(layer: str, name: str, widths: Iterable[int]) -> tuple[int, ...]:
    """Return the widths of a stack of layers as a tuple: one or more whole numbers of at least 1."""
    sizes = tuple(widths)
    if not sizes or any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in sizes):
        raise LayerArgumentError(
            f"{layer}: {name} must be one or more whole numbers of at least 1, got {sizes!r}"
        )
    return sizes


def check_options(layer: str, options: Mapping[str, object], known: frozenset[str]) -> None:
    """Refuse a keyword argument that is not among the keys of a layer's options, as Python would."""
    for name in options:
        if name not in known:
            raise TypeError(f"{layer} has no option {name!r}; it has {', '.join(sorted(known))}")


def check_choice(layer: str, name: str, chosen: str, allowed: Iterable[str] | Mapping[str, object]) -> None:
    """Refuse a name that is not in the table; the message says which one is nearest."""
    names = list(allowed)
    if chosen in names:
        return
    near = get_close_matches(str(chosen), names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise LayerArgumentError(f"{layer}: {name} must be one of {', '.join(names)}, got {chosen!r}.{hint}")


WeightInit = Callable[[Tensor], object]
"""Fills a tensor in place; the functions of `torch.nn.init` that end in `_` are such."""

NORM_EPSILON = 1e-6
"""The least squared norm a column is divided by, so that a column of zeros stays zero."""


def glorot_uniform(tensor: Tensor) -> Tensor:
    """Fill with U(-b, b), `b^2 = 6 / (in + out)`; (in, out) are the last two axes, earlier ones a stack."""
    bound = math.sqrt(6 / (tensor.shape[-2] + tensor.shape[-1]))
    return nn.init.uniform_(tensor, -bound, bound)


def normalize_columns(weight: Tensor, epsilon: float = NORM_EPSILON) -> Tensor:
    """Return `weight` of shape (..., in, out) with columns of length 1."""
    return weight * weight.square().sum(-2, keepdim=True).clamp(min=epsilon).rsqrt()


class Kernel(nn.Module):
    """A weight of shape (in, out), or (count, in, out); calling it returns the weight to multiply with.

    Args:
        norm: Normalise the columns.
        norm_trainable: And multiply each by a parameter of its own.
        count: How many to keep in one stack; None for a single one without that axis.
    """

    norm: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        norm: bool = False,
        norm_trainable: bool = True,
        init: WeightInit = glorot_uniform,
        count: int | None = None,
    ) -> None:
        super().__init__()
        check_positive("Kernel", in_features=in_features, out_features=out_features)
        stack = () if count is None else (count,)
        self.weight = nn.Parameter(torch.empty(*stack, in_features, out_features))
        init(self.weight)
        self.normalized = norm
        if norm and norm_trainable:
            self.norm = nn.Parameter(self.weight.detach().norm(dim=-2))
        else:
            self.register_parameter("norm", None)

    def forward(self) -> Tensor:
        if not self.normalized:
            return self.weight
        weight = normalize_columns(self.weight)
        return weight if self.norm is None else weight * self.norm.unsqueeze(-2)

    def extra_repr(self) -> str:
        kind = (
            "" if not self.normalized else ", normalized" + ("" if self.norm is None else ", trainable norm")
        )
        return f"{tuple(self.weight.shape)}{kind}"


Activation = str | Callable[[Tensor], Tensor] | None
"""A name of `ACTIVATIONS`, any function or module from tensor to tensor, or None for linear."""


class Elementwise(nn.Module):
    """Applies a function without parameters."""

    def __init__(self, function: Callable[[Tensor], Tensor], name: str) -> None:
        super().__init__()
        self._function = function
        self._name = name

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x)

    def extra_repr(self) -> str:
        return self._name


class PReLU(nn.Module):
    """Relu with a trainable slope below zero, one per feature of the last axis, starting at 0."""

    def __init__(self, features: int) -> None:
        super().__init__()
        check_positive("PReLU", features=features)
        self.slope = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        check_last_axis("PReLU", "x", x, len(self.slope))
        return torch.where(x > 0, x, self.slope * x)


class MonitoredReLU(nn.Module):
    """Relu that remembers how often each unit was silent, to find units that died.

    Args:
        features: Width of the last axis.
        decay: How much of the moving average each training batch replaces.
    """

    silent_share: Tensor

    def __init__(self, features: int, decay: float = 0.1) -> None:
        super().__init__()
        check_positive("MonitoredReLU", features=features)
        if not 0 < decay <= 1:
            raise LayerArgumentError(f"MonitoredReLU: decay must be above 0 and at most 1, got {decay}")
        self.decay = decay
        self.register_buffer("silent_share", torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        check_last_axis("MonitoredReLU", "x", x, len(self.silent_share))
        out = functional.relu(x)
        if self.training and x.numel():
            with torch.no_grad():
                silent = (out == 0).reshape(-1, x.shape[-1]).to(self.silent_share.dtype).mean(0)
                self.silent_share.lerp_(silent, self.decay)
        return out

    def dead_units(self, at_least: float = 0.999) -> Tensor:
        """Return the int64 positions of units whose average silence is at least this share."""
        return (self.silent_share >= at_least).nonzero().flatten()


def exponential(x: Tensor) -> Tensor:
    """`e^x`."""
    return x.exp()


def hard_sigmoid(x: Tensor) -> Tensor:
    """`0.2 x + 0.5`, cut to [0, 1]; torch's own rises by 1/6."""
    return (0.2 * x + 0.5).clamp(0, 1)


def sigmoid2(x: Tensor) -> Tensor:
    """`2 sigmoid(x)`: a gate that starts at 1 and may amplify."""
    return 2 * x.sigmoid()


ACTIVATIONS: Mapping[str, Callable[[int], nn.Module]] = {
    "elu": lambda _: nn.ELU(),
    "exponential": lambda _: Elementwise(exponential, "exponential"),
    "gelu": lambda _: nn.GELU(),
    "hardsigmoid": lambda _: Elementwise(hard_sigmoid, "hardsigmoid"),
    "leakyrelu": lambda _: nn.LeakyReLU(0.3),
    "linear": lambda _: nn.Identity(),
    "prelu": PReLU,
    "relu": lambda _: nn.ReLU(),
    "selu": lambda _: nn.SELU(),
    "sigmoid": lambda _: nn.Sigmoid(),
    "sigmoid2": lambda _: Elementwise(sigmoid2, "sigmoid2"),
    "softmax": lambda _: nn.Softmax(dim=-1),
    "softplus": lambda _: nn.Softplus(),
    "softsign": lambda _: nn.Softsign(),
    "swish": lambda _: nn.SiLU(),
    "tanh": lambda _: nn.Tanh(),
    "thresholdedrelu": lambda _: nn.Threshold(1.0, 0.0),
}
"""Lower-case name to a function from the number of features to a module."""


def make_activation(activation: Activation, features: int) -> nn.Module:
    """Return the module for a name in any case, for a function, or for None (linear).

    A module is returned as it is, so one instance given twice shares its parameters.
    """
    if activation is None:
        return nn.Identity()
    if isinstance(activation, str):
        name = activation.lower()
        check_choice("activation", "name", name, ACTIVATIONS)
        return ACTIVATIONS[name](features)
    if isinstance(activation, nn.Module):
        return activation
    if callable(activation):
        return Elementwise(activation, getattr(activation, "__name__", type(activation).__name__))
    raise LayerArgumentError(f"an activation is a name, a function or None, got {activation!r}")


def activations_of_stack(
    layer: str, activations: Activation | Sequence[Activation], depth: int
) -> tuple[Activation, ...]:
    """Return one activation per layer of a stack.

    None means relu. One activation, given or meant, is for all layers but the last,
    which stays linear: the last layer of a stack is usually a logit or an embedding.
    A sequence is taken as it is.
    """
    if activations is None:
        activations = "relu"
    if isinstance(activations, str) or not isinstance(activations, Sequence):
        return (activations,) * (depth - 1) + (None,)
    if len(activations) != depth:
        raise LayerArgumentError(
            f"{layer}: activations must be one per layer, {depth}, got {len(activations)}; "
            "give a single one to use it on every layer but the last"
        )
    return tuple(activations)


class BatchNorm(nn.Module):
    """Normalises each feature over the batch in training, and by moving statistics afterwards.

    The moving statistics are ordinary buffers, updated on each call in training mode.
    A batch of one row has no variance and comes out as `beta`, rather than as an error
    on the last, short batch of an epoch.

    Args:
        features: Width of the last axis; all axes before it count as batch.
        momentum: How much of the moving statistics a batch leaves in place: 0.99 keeps
            99 % of the old. (torch counts the other way round.)
        scale: Multiply by a trainable `gamma`.
        center: Add a trainable `beta`.
        use_global_stats: Normalise by the moving statistics in training too, so that a
            row's output does not depend on its neighbours. They are still updated, after use.
    """

    moving_mean: Tensor
    moving_variance: Tensor
    gamma: nn.Parameter | None
    beta: nn.Parameter | None

    def __init__(
        self,
        features: int,
        *,
        momentum: float = 0.99,
        epsilon: float = 1e-6,
        scale: bool = True,
        center: bool = True,
        use_global_stats: bool = False,
    ) -> None:
        super().__init__()
        check_positive("BatchNorm", features=features)
        if not 0 <= momentum < 1:
            raise LayerArgumentError(f"BatchNorm: momentum must be at least 0 and below 1, got {momentum}")
        if epsilon <= 0:
            raise LayerArgumentError(f"BatchNorm: epsilon must be above 0, got {epsilon}")
        self.features = features
        self.momentum = momentum
        self.epsilon = epsilon
        self.use_global_stats = use_global_stats
        self.register_parameter("gamma", nn.Parameter(torch.ones(features)) if scale else None)
        self.register_parameter("beta", nn.Parameter(torch.zeros(features)) if center else None)
        self.register_buffer("moving_mean", torch.zeros(features))
        self.register_buffer("moving_variance", torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        check_last_axis("BatchNorm", "x", x, self.features)
        if not self.training or x.numel() == 0:
            return self._normalize(x, self.moving_mean, self.moving_variance)
        axes = tuple(range(x.ndim - 1))
        variance, mean = torch.var_mean(x, dim=axes, correction=0)
        if self.use_global_stats:
            # Clones: the update below must not change what backward reads.
            out = self._normalize(x, self.moving_mean.clone(), self.moving_variance.clone())
        else:
            out = self._normalize(x, mean, variance)
        with torch.no_grad():
            self.moving_mean.lerp_(mean.to(self.moving_mean.dtype), 1 - self.momentum)
            self.moving_variance.lerp_(variance.to(self.moving_variance.dtype), 1 - self.momentum)
        return out

    def _normalize(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        scale = (variance + self.epsilon).rsqrt()
        if self.gamma is not None:
            scale = scale * self.gamma
        centered = x - mean
        return centered * scale if self.beta is None else torch.addcmul(self.beta, centered, scale)

    def extra_repr(self) -> str:
        return f"{self.features}, momentum={self.momentum}, epsilon={self.epsilon}"


class LayerNorm(nn.Module):
    """Normalises the last axis of each row by its own mean and variance.

    Args:
        gamma_init: Fills the scale. No default: ones is usual, while zeros lets a
            residual branch start silent, and which is meant should be said.
    """

    def __init__(self, features: int, gamma_init: WeightInit, *, epsilon: float = 1e-6) -> None:
        super().__init__()
        check_positive("LayerNorm", features=features)
        if epsilon <= 0:
            raise LayerArgumentError(f"LayerNorm: epsilon must be above 0, got {epsilon}")
        self.epsilon = epsilon
        self.gamma = nn.Parameter(torch.empty(features))
        gamma_init(self.gamma)
        self.beta = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        check_last_axis("LayerNorm", "x", x, len(self.gamma))
        return functional.layer_norm(x, self.gamma.shape, self.gamma, self.beta, self.epsilon)


class Dense(nn.Module):
    """`activation(x W + b)` over the last axis.

    Shapes: (..., in_features) to (..., out_features).

    Args:
        activation: A name of `ACTIVATIONS`, a function or module, or None for linear.
            `MonitoredReLU(out_features)` also reports units that died.
        kernel_norm: Normalise the columns of W; see `kernels`.
        kernel_norm_trainable: And scale each by a trainable norm.

    Examples:
        >>> import torch
        >>> from monolith import Dense
        >>> layer = Dense(3, 8, activation="relu", kernel_norm=True)
        >>> layer(torch.zeros(4, 3)).shape
        torch.Size([4, 8])
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        activation: Activation = None,
        use_bias: bool = True,
        kernel_norm: bool = False,
        kernel_norm_trainable: bool = True,
        kernel_init: WeightInit = glorot_uniform,
        bias_init: WeightInit = nn.init.zeros_,
    ) -> None:
        super().__init__()
        check_positive("Dense", in_features=in_features, out_features=out_features)
        self.in_features = in_features
        self.out_features = out_features
        self.kernel = Kernel(
            in_features,
            out_features,
            norm=kernel_norm,
            norm_trainable=kernel_norm_trainable,
            init=kernel_init,
        )
        if use_bias:
            self.bias = nn.Parameter(torch.empty(out_features))
            bias_init(self.bias)
        else:
            self.register_parameter("bias", None)
        self.activation = make_activation(activation, out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        check_last_axis("Dense", "x", x, self.in_features)
        kernel: Tensor = self.kernel()
        out: Tensor = self.activation(functional.linear(x, kernel.t(), self.bias))
        return out


class AddBias(nn.Module):
    """Adds a trainable bias to the last axes.

    Args:
        shape: Width of the last axis, or the sizes of the last axes.
    """

    def __init__(self, shape: int | Sequence[int], *, bias_init: WeightInit = nn.init.zeros_) -> None:
        super().__init__()
        sizes = check_widths("AddBias", "shape", (shape,) if isinstance(shape, int) else shape)
        self.bias = nn.Parameter(torch.empty(sizes))
        bias_init(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-self.bias.ndim :] != self.bias.shape:
            raise LayerArgumentError(
                f"AddBias: x must end in {tuple(self.bias.shape)}, got shape {tuple(x.shape)}"
            )
        return x + self.bias


class MLPBlock(nn.Module):
    """One layer of an MLP: linear, then batch norm if wanted, then the activation."""

    def __init__(self, dense: Dense, norm: BatchNorm | None, activation: nn.Module) -> None:
        super().__init__()
        self.dense = dense
        self.norm = norm
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        if self.norm is not None:
            x = self.norm(x)
        out: Tensor = self.activation(x)
        return out


class KernelOptions(TypedDict, total=False):
    """How the kernels of a layer are made."""

    kernel_norm: bool
    """Whether the columns of a kernel are normalised; see `Kernel`."""
    kernel_init: WeightInit
    """Fills new kernels; by default `glorot_uniform`."""


class DenseOptions(KernelOptions, total=False):
    """The options of each `Dense` layer of an `MLP`."""

    use_bias: bool
    """Whether a layer adds a bias; by default True."""
    kernel_norm_trainable: bool
    """Whether normalised columns are scaled by a trainable norm; by default True."""
    bias_init: WeightInit
    """Fills new biases, by default with zeros."""


class MLP(nn.Module):
    """A stack of dense layers, their kernels normalised with trainable norms by default.

    To see the contribution of each feature to the first layer, pass `mlp.first` to `watch_segments`.

    Shapes: (..., in_features) to (..., output_dims[-1]).

    Args:
        output_dims: Width of each layer; the last one is that of the result.
        activations: None uses relu for all layers but the last, which is linear; one activation is used for
            all layers but the last; a sequence has one per layer.
        batch_norm: Whether to normalise the input, and every layer but the last between its linear part and
            its activation.
        options: See `DenseOptions`; `kernel_norm` is True by default.

    Examples:
        >>> import torch
        >>> from monolith import MLP
        >>> mlp = MLP(3, (8, 1))  # a relu after the 8 units of the first layer; the last layer is linear
        >>> mlp(torch.zeros(4, 3)).shape
        torch.Size([4, 1])
    """

    def __init__(
        self,
        in_features: int,
        output_dims: Sequence[int],
        *,
        activations: Activation | Sequence[Activation] = None,
        batch_norm: bool = False,
        batch_norm_momentum: float = 0.99,
        **options: Unpack[DenseOptions],
    ) -> None:
        super().__init__()
        check_positive("MLP", in_features=in_features)
        widths = check_widths("MLP", "output_dims", output_dims)
        chosen = activations_of_stack("MLP", activations, len(widths))
        chosen_options: DenseOptions = {"kernel_norm": True, **options}
        self.in_features = in_features
        self.out_features = widths[-1]
        self.input_norm = BatchNorm(in_features, momentum=batch_norm_momentum) if batch_norm else None
        self.blocks = nn.ModuleList()
        for position, width in enumerate(widths):
            dense = Dense((in_features, *widths)[position], width, **chosen_options)
            inner = batch_norm and position < len(widths) - 1
            norm = BatchNorm(width, momentum=batch_norm_momentum) if inner else None
            self.blocks.append(MLPBlock(dense, norm, make_activation(chosen[position], width)))

    @property
    def first(self) -> Dense:
        """The layer that sees the features."""
        block = self.blocks[0]
        assert isinstance(block, MLPBlock)
        return block.dense

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., output_dims[-1])."""
        check_last_axis("MLP", "x", x, self.in_features)
        if self.input_norm is not None:
            x = self.input_norm(x)
        for block in self.blocks:
            x = block(x)
        return x
