"""Interactions: layers that let the features of one row act on each other.

Unless said otherwise a layer takes the embeddings of a row stacked, (batch, n, dim),
and `merge_tensor_list` makes that from a list, or a list from what comes out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from monolith.nn.layers.activations import Activation, make_activation
from monolith.nn.layers.arguments import check_last_axis, check_positive, check_shape, check_widths
from monolith.nn.layers.dense import MLP
from monolith.nn.layers.kernels import WeightInit, glorot_uniform


class AllInt(nn.Module):
    """All pairs, compressed: `X (X^T C + b)`, which is (X X^T) C without the n x n products.

    Args:
        num_features: The n features of a row.
        cmp_dim: Columns of the compression matrix C, of shape (n, cmp_dim).
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        num_features: int,
        cmp_dim: int,
        *,
        use_bias: bool = True,
        kernel_init: WeightInit = glorot_uniform,
    ) -> None:
        super().__init__()
        check_positive("AllInt", num_features=num_features, cmp_dim=cmp_dim)
        self.kernel = nn.Parameter(torch.empty(num_features, cmp_dim))
        kernel_init(self.kernel)
        self.register_parameter("bias", nn.Parameter(torch.zeros(cmp_dim)) if use_bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, n, dim) to (batch, n, cmp_dim)."""
        check_shape("AllInt", "x", x, None, self.kernel.shape[0], None)
        return x @ functional.linear(x.transpose(1, 2), self.kernel.t(), self.bias)


class CDot(nn.Module):
    """Compressed dot: features meet a few learned combinations of themselves.

    The n features are projected to `project_dim` combinations, an MLP bends these, and
    each feature's dot products with the result go out beside the result itself.

    Args:
        dim: Width of every feature.
        compress_units: Widths of the MLP before its last layer, which is `dim * project_dim` wide.
    """

    def __init__(
        self,
        num_features: int,
        dim: int,
        project_dim: int,
        compress_units: Sequence[int],
        *,
        activations: Activation | Sequence[Activation] = None,
        kernel_init: WeightInit = glorot_uniform,
    ) -> None:
        super().__init__()
        check_positive("CDot", num_features=num_features, dim=dim, project_dim=project_dim)
        self.dim = dim
        self.project = nn.Parameter(torch.empty(num_features, project_dim))
        kernel_init(self.project)
        width = dim * project_dim
        self.compress = MLP(width, (*compress_units, width), activations=activations, kernel_init=kernel_init)
        self.out_features = num_features * project_dim + width

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, n, dim) to (batch, (n + dim) * project_dim): crosses, then the compressed."""
        features, project_dim = self.project.shape
        check_shape("CDot", "x", x, None, features, self.dim)
        projected = x.transpose(1, 2) @ self.project
        compressed: Tensor = self.compress(projected.flatten(1))
        crossed = x @ torch.unflatten(compressed, 1, (self.dim, project_dim))
        return torch.cat([crossed.flatten(1), compressed], 1)


class CAN(nn.Module):
    """Co-action: an item's embedding is a small network, and the user's goes through it.

    Each user-item pair so has its own interaction without a row of its own.

    Args:
        user_dim: Width u of the user's embeddings.
        layer_num: Layers of the small network; each takes u * u weights (input by output,
            row by row) and then u biases from the item's embedding.
    """

    def __init__(self, user_dim: int, *, layer_num: int = 2, activation: Activation = "relu") -> None:
        super().__init__()
        check_positive("CAN", user_dim=user_dim, layer_num=layer_num)
        self.user_dim = user_dim
        self.layer_num = layer_num
        self.activations = nn.ModuleList(make_activation(activation, user_dim) for _ in range(layer_num))

    @property
    def item_dim(self) -> int:
        """How wide the item's embedding must be: `layer_num * u * (u + 1)`."""
        return self.layer_num * self.user_dim * (self.user_dim + 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """Send the user's embeddings through the item.

        Args:
            user: float of shape (batch, u), or (batch, n, u) for several features or a sequence.
            item: float of shape (batch, item_dim).

        Returns:
            float of the shape of `user`.
        """
        if user.ndim != 3:
            check_shape("CAN", "user", user, None, self.user_dim)
        check_shape("CAN", "item", item, user.shape[0], self.item_dim)
        check_last_axis("CAN", "user", user, self.user_dim)
        u = self.user_dim
        x = user if user.ndim == 3 else user.unsqueeze(1)
        for activation, layer in zip(self.activations, item.chunk(self.layer_num, 1), strict=True):
            weight, bias = torch.unflatten(layer[:, : u * u], 1, (u, u)), layer[:, u * u :].unsqueeze(1)
            x = activation(torch.baddbmm(bias, x, weight))
        return x if user.ndim == 3 else x.squeeze(1)


class CIN(nn.Module):
    """Compressed interaction network (xDeepFM): explicit crosses, one order higher per layer.

    A layer multiplies each of its feature maps with each original field, elementwise, and
    compresses the products with a 1x1 convolution. Every layer but the last has an activation.

    Args:
        num_fields: The n fields of a row.
        hidden_units: Feature maps of each layer.
    """

    def __init__(
        self,
        num_fields: int,
        hidden_units: Sequence[int],
        *,
        activation: Activation = "relu",
        kernel_init: WeightInit = glorot_uniform,
    ) -> None:
        super().__init__()
        check_positive("CIN", num_fields=num_fields)
        units = check_widths("CIN", "hidden_units", hidden_units)
        self.num_fields = num_fields
        self.out_features = sum(units)
        self.kernels = nn.ParameterList()
        self.biases = nn.ParameterList()
        self.activations = nn.ModuleList()
        for position, width in enumerate(units):
            kernel = nn.Parameter(torch.empty((num_fields, *units)[position] * num_fields, width))
            kernel_init(kernel)
            self.kernels.append(kernel)
            self.biases.append(nn.Parameter(torch.zeros(width, 1)))
            # The maps lie before the embedding axis, so an activation with parameters has one for all.
            last = position == len(units) - 1
            self.activations.append(make_activation(None if last else activation, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, n, dim) to (batch, sum of hidden_units): each map summed over dim."""
        check_shape("CIN", "x", x, None, self.num_fields, None)
        maps, sums = x, []
        for kernel, bias, activation in zip(self.kernels, self.biases, self.activations, strict=True):
            crossed = (maps.unsqueeze(2) * x.unsqueeze(1)).flatten(1, 2)
            maps = activation(kernel.t() @ crossed + bias)
            sums.append(maps.sum(-1))
        return torch.cat(sums, 1)


class AutoInt(nn.Module):
    """Self-attention between features without weights: `softmax(X X^T) X`, `layer_num` times."""

    def __init__(self, layer_num: int = 1) -> None:
        super().__init__()
        check_positive("AutoInt", layer_num=layer_num)
        self.layer_num = layer_num

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, n, dim) to the same shape."""
        check_shape("AutoInt", "x", x, None, None, None)
        for _ in range(self.layer_num):
            x = functional.scaled_dot_product_attention(x, x, x, scale=1.0)
        return x
