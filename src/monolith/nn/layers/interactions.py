"""Interactions: layers that multiply the features of one row with each other.

`merge_tensor_list` first turns a list of feature embeddings into the tensor that a layer takes. Cross
networks (DCN) raise the order of the products by one per layer; field-aware crosses (GroupInt, FFM) multiply
every embedding of one group with every embedding of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional

from monolith.errors import LayerArgumentError
from monolith.nn.layers.dense import (
    MLP,
    Activation,
    Kernel,
    KernelOptions,
    WeightInit,
    check_choice,
    check_last_axis,
    check_options,
    check_positive,
    check_shape,
    check_widths,
    glorot_uniform,
    make_activation,
)

MERGE_TYPES = ("stack", "concat")


def merge_tensor_list(
    features: Tensor | Sequence[Tensor],
    merge_type: str | None = "concat",
    *,
    axis: int = 1,
    keep_list: bool = False,
) -> Tensor | list[Tensor]:
    """Merge the features of a batch.

    Args:
        features: Tensors of shape (batch, dim), or one of shape (batch, n, dim), which
            counts as n features.
        merge_type: "stack" gives (batch, n, dim) and wants equal dims; "concat" gives
            (batch, sum of dims); None gives the list of features.
        axis: Where to stack or concatenate a list.
        keep_list: Return the merged tensor as a list of one, for callers that expect a list.
    """
    if merge_type is not None:
        check_choice("merge_tensor_list", "merge_type", merge_type, MERGE_TYPES)
    if isinstance(features, Tensor):
        if features.ndim != 3:
            raise LayerArgumentError(
                "merge_tensor_list: give a list, or one tensor of shape (batch, n, dim), "
                f"got shape {tuple(features.shape)}"
            )
        if merge_type is None:
            return list(features.unbind(1))
        merged = features if merge_type == "stack" else features.flatten(1)
        return [merged] if keep_list else merged
    tensors = list(features)
    if not tensors:
        raise LayerArgumentError("merge_tensor_list: there is nothing to merge: the list is empty")
    if merge_type is None:
        return tensors
    if merge_type == "stack" and any(tensor.shape != tensors[0].shape for tensor in tensors):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise LayerArgumentError(f"merge_tensor_list: features of different shapes do not stack: {shapes}")
    merged = torch.stack(tensors, axis) if merge_type == "stack" else torch.cat(tensors, axis)
    return [merged] if keep_list else merged


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
    each feature's dot products with the result are returned with the result itself.

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


DCN_TYPES = ("vector", "matrix", "mixed")


class DCN(nn.Module):
    """Layers that each multiply their input, recombined, with the first input and add it to themselves.

    Args:
        in_features: Width d of a row.
        layer_num: Number of cross layers.
        dcn_type: How a layer recombines its input `x_l`:

            - "vector", `x0 * (x_l w) + b + x_l`: a weight of shape (d, 1).
            - "matrix", `x0 * (x_l W + b) + x_l`: a weight of shape (d, d).
            - "mixed": `num_experts` matrices of rank `low_rank`, with tanh after the first
              and second factor, mixed by a softmax gate over the experts.
        num_experts, low_rank: For "mixed" only.
        use_dropout: In training keep each output of a layer with probability `keep_prob`.
        options: See `KernelOptions`; `kernel_norm` is False by default.
    """

    def __init__(
        self,
        in_features: int,
        layer_num: int = 1,
        *,
        dcn_type: str = "matrix",
        num_experts: int = 4,
        low_rank: int = 32,
        use_dropout: bool = False,
        keep_prob: float = 0.95,
        **options: Unpack[KernelOptions],
    ) -> None:
        super().__init__()
        check_positive("DCN", in_features=in_features, layer_num=layer_num)
        check_choice("DCN", "dcn_type", dcn_type, DCN_TYPES)
        if not 0 < keep_prob <= 1:
            raise LayerArgumentError(f"DCN: keep_prob must be above 0 and at most 1, got {keep_prob}")
        check_options("DCN", options, KernelOptions.__optional_keys__)
        kernel_norm = options.get("kernel_norm", False)
        kernel_init = options.get("kernel_init", glorot_uniform)
        self.in_features = in_features
        self.dcn_type = dcn_type
        self.layers = nn.ModuleList()
        for _ in range(layer_num):
            layer: nn.Module
            if dcn_type == "mixed":
                layer = _MixedCross(in_features, num_experts, low_rank, kernel_norm, kernel_init)
            else:
                layer = _Cross(in_features, dcn_type == "vector", kernel_norm, kernel_init)
            self.layers.append(layer)
        self.dropout = nn.Dropout(1 - keep_prob) if use_dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, d) to the same shape."""
        check_shape("DCN", "x", x, None, self.in_features)
        crossed = x
        for layer in self.layers:
            crossed = self.dropout(layer(x, crossed))
        return crossed


class _Cross(nn.Module):
    """A layer of the vector or the matrix kind."""

    def __init__(self, features: int, vector: bool, kernel_norm: bool, init: WeightInit) -> None:
        super().__init__()
        self.vector = vector
        self.kernel = Kernel(features, 1 if vector else features, norm=kernel_norm, init=init)
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        kernel: Tensor = self.kernel()
        if self.vector:
            return torch.addcmul(x + self.bias, first, x @ kernel)
        return torch.addcmul(x, first, torch.addmm(self.bias, x, kernel))


class _MixedCross(nn.Module):
    """A layer of the mixed kind: expert e is `x0 * (tanh(tanh(x V_e) C_e) U_e + b)`."""

    def __init__(
        self, features: int, num_experts: int, low_rank: int, kernel_norm: bool, init: WeightInit
    ) -> None:
        super().__init__()
        check_positive("DCN", num_experts=num_experts, low_rank=low_rank)
        self.down = Kernel(features, low_rank, count=num_experts, norm=kernel_norm, init=init)
        self.middle = Kernel(low_rank, low_rank, count=num_experts, norm=kernel_norm, init=init)
        self.up = Kernel(low_rank, features, count=num_experts, norm=kernel_norm, init=init)
        self.gate = nn.Parameter(torch.empty(features, num_experts))
        init(self.gate)
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        gates = (x @ self.gate).softmax(-1)
        # x stands for (1, batch, d) against (experts, d, rank).
        inner = torch.tanh(torch.tanh(x @ self.down()) @ self.middle())
        # Gated before the last product, which then sums over experts and ranks at once: no
        # (experts, batch, d) tensor. The gates of a row sum to 1, so the bias counts once.
        gated = inner * gates.t().unsqueeze(-1)
        up: Tensor = self.up()
        mixed = torch.einsum("ebr,erd->bd", gated, up)
        return torch.addcmul(x, first, mixed + self.bias)


INTERACTIONS = ("multiply", "dot")


def ffm(left: Tensor, right: Tensor, dim_size: int, int_type: str = "multiply") -> Tensor:
    """Cross each of the `nl` embeddings on the left with each of the `nr` on the right.

    Differentiable. The result is the only large tensor that forward makes and nothing of
    its size is kept for backward, which needs one more while it runs; "dot" makes none.

    Args:
        left: float of shape (batch, nl * dim_size): embeddings side by side.
        right: float of shape (batch, nr * dim_size).
        int_type: "multiply" gives the `dim_size` products of each pair, "dot" their sum.

    Returns:
        float of shape (batch, nl * nr * dim_size), or (batch, nl * nr) for "dot": pairs in
        order, the left embedding being the slower index.
    """
    check_choice("ffm", "int_type", int_type, INTERACTIONS)
    check_positive("ffm", dim_size=dim_size)
    check_shape("ffm", "left", left, None, None)
    check_shape("ffm", "right", right, left.shape[0], None)
    for name, group in (("left", left), ("right", right)):
        if group.shape[1] % dim_size:
            raise LayerArgumentError(
                f"ffm: the width of {name} must be a multiple of dim_size, {dim_size}, got {group.shape[1]}"
            )
    lefts = torch.unflatten(left, 1, (left.shape[1] // dim_size, dim_size))
    rights = torch.unflatten(right, 1, (right.shape[1] // dim_size, dim_size))
    if int_type == "dot":
        return torch.bmm(lefts, rights.transpose(1, 2)).flatten(1)
    return (lefts.unsqueeze(2) * rights.unsqueeze(1)).flatten(1)


class GroupInt(nn.Module):
    """The `ffm` crosses of two lists of embeddings, if wanted weighted by attention.

    Args:
        dim_size: Width of every embedding in both groups.
        interaction: "multiply" or "dot"; see `ffm`.
        attention_units: Widths of an MLP that looks at each pair's products and returns
            one weight for the pair, hence the last is 1; "multiply" only. None for no attention.
    """

    attention: MLP | None

    def __init__(
        self,
        dim_size: int,
        *,
        interaction: str = "multiply",
        attention_units: Sequence[int] | None = None,
        attention_activations: Activation | Sequence[Activation] = None,
    ) -> None:
        super().__init__()
        check_positive("GroupInt", dim_size=dim_size)
        check_choice("GroupInt", "interaction", interaction, INTERACTIONS)
        self.dim_size = dim_size
        self.interaction = interaction
        self.attention = None
        if attention_units is not None:
            units = check_widths("GroupInt", "attention_units", attention_units)
            if interaction != "multiply" or units[-1] != 1:
                raise LayerArgumentError(
                    "GroupInt: attention needs interaction='multiply' and 1 as the last of attention_units, "
                    f"got {interaction!r} and {list(units)}"
                )
            self.attention = MLP(dim_size, units, activations=attention_activations)

    def forward(self, left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
        """Cross the groups, each a non-empty list of (batch, dim_size) tensors; see `ffm` for the result."""
        for name, group in (("left", left), ("right", right)):
            if isinstance(group, Tensor) or not group:
                raise LayerArgumentError(f"GroupInt: {name} must be a non-empty list of tensors")
            for tensor in group:
                check_shape("GroupInt", name, tensor, None, self.dim_size)
        crossed = ffm(torch.cat(list(left), 1), torch.cat(list(right), 1), self.dim_size, self.interaction)
        if self.attention is None:
            return crossed
        pairs = torch.unflatten(crossed, 1, (len(left) * len(right), self.dim_size))
        weights: Tensor = self.attention(pairs)
        return (pairs * weights).flatten(1)


FFM = GroupInt
"""The same layer under the name of the model it comes from."""
