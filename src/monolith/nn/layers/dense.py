"""Dense layers: `activation(x W + b)`, alone and stacked.

Parameters keep the layout of the formula: a kernel has shape (in, out).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from monolith.errors import LayerArgumentError
from monolith.nn.layers.activations import Activation, activations_of_stack, make_activation
from monolith.nn.layers.arguments import check_last_axis, check_positive, check_widths
from monolith.nn.layers.kernels import Kernel, WeightInit, glorot_uniform
from monolith.nn.layers.normalization import BatchNorm


class Dense(nn.Module):
    """`activation(x W + b)` over the last axis.

    Args:
        activation: A name of `ACTIVATIONS`, a function or module, or None for linear.
            `MonitoredReLU(out_features)` also reports units that died.
        kernel_norm: Normalise the columns of W; see `kernels`.
        kernel_norm_trainable: And scale each by a trainable norm.
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


class MLP(nn.Module):
    """A stack of dense layers, their kernels normalised with trainable norms unless told otherwise.

    To see what each feature brings to the first layer, give `mlp.first` to `watch_segments`.

    Args:
        output_dims: Width of each layer, the last being that of the result.
        activations: None: relu, and the last layer linear. One: for all layers but the
            last. A sequence: one per layer.
        batch_norm: Normalise the input, and every layer but the last between its linear
            part and its activation.
    """

    def __init__(
        self,
        in_features: int,
        output_dims: Sequence[int],
        *,
        activations: Activation | Sequence[Activation] = None,
        use_bias: bool = True,
        kernel_norm: bool = True,
        kernel_norm_trainable: bool = True,
        batch_norm: bool = False,
        batch_norm_momentum: float = 0.99,
        kernel_init: WeightInit = glorot_uniform,
        bias_init: WeightInit = nn.init.zeros_,
    ) -> None:
        super().__init__()
        check_positive("MLP", in_features=in_features)
        widths = check_widths("MLP", "output_dims", output_dims)
        chosen = activations_of_stack("MLP", activations, len(widths))
        self.in_features = in_features
        self.out_features = widths[-1]
        self.input_norm = BatchNorm(in_features, momentum=batch_norm_momentum) if batch_norm else None
        self.blocks = nn.ModuleList()
        for position, width in enumerate(widths):
            dense = Dense(
                (in_features, *widths)[position],
                width,
                use_bias=use_bias,
                kernel_norm=kernel_norm,
                kernel_norm_trainable=kernel_norm_trainable,
                kernel_init=kernel_init,
                bias_init=bias_init,
            )
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
