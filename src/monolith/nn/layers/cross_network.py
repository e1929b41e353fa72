"""Cross networks (DCN): a row's features multiplied with themselves, one order more per layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from monolith.errors import LayerArgumentError
from monolith.nn.layers.arguments import check_choice, check_positive, check_shape
from monolith.nn.layers.kernels import Kernel, WeightInit, glorot_uniform

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
        kernel_norm: Normalise the columns of the weights, with trainable norms; see `kernels`.
        use_dropout: In training keep each output of a layer with probability `keep_prob`.
    """

    def __init__(
        self,
        in_features: int,
        layer_num: int = 1,
        *,
        dcn_type: str = "matrix",
        num_experts: int = 4,
        low_rank: int = 32,
        kernel_norm: bool = False,
        use_dropout: bool = False,
        keep_prob: float = 0.95,
        kernel_init: WeightInit = glorot_uniform,
    ) -> None:
        super().__init__()
        check_positive("DCN", in_features=in_features, layer_num=layer_num)
        check_choice("DCN", "dcn_type", dcn_type, DCN_TYPES)
        if not 0 < keep_prob <= 1:
            raise LayerArgumentError(f"DCN: keep_prob must be above 0 and at most 1, got {keep_prob}")
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
