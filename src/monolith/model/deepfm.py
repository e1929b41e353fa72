"""DeepFM: a linear part, all pairs of features, and an MLP, over the same embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from monolith.feature import ADDN, CONCAT, ROW_OPTIMIZER, FeatureSpec, Layout
from monolith.model.features import Feature
from monolith.model.ready import (
    ModelInputs,
    ModelOptions,
    WatchedDense,
    WatchedModel,
    beside,
    check_combined,
    check_one_width,
    tower,
)
from monolith.table import Optimizer


def factorization_machine(vectors: Tensor, features: int) -> Tensor:
    """Return, for each example, the dot products of all pairs of its features, summed.

    By `sum over pairs of v_i . v_j = (|sum of v|^2 - sum of |v|^2) / 2`: linear in the number of features.

    Args:
        vectors: float of shape (examples, features * dim), side by side.

    Returns:
        float of shape (examples,).
    """
    total = torch.unflatten(vectors, 1, (features, -1)).sum(1)
    pairs: Tensor = (torch.linalg.vecdot(total, total) - torch.linalg.vecdot(vectors, vectors)) / 2
    return pairs


class DeepFMDense(WatchedDense):
    """The dense half of `DeepFM`: biases plus pairs plus MLP."""

    def __init__(
        self,
        features: int,
        dim: int,
        floats: int,
        hidden: Sequence[int],
        *,
        dropout: float = 0.0,
        kernel_norm: bool = False,
    ) -> None:
        super().__init__()
        self.features = features
        self.mlp = tower(features * dim + floats, hidden, dropout=dropout, kernel_norm=kernel_norm)

    def forward(self, bias: Tensor, vectors: Tensor, floats: Tensor | None = None) -> Tensor:
        """Return logits of shape (examples,).

        Args:
            bias: float of shape (examples, 1).
            vectors: float of shape (examples, features * dim).
            floats: float of shape (examples, width), or None.
        """
        pairs = factorization_machine(vectors, self.features)
        deep: Tensor = self.mlp(beside(vectors, floats))
        return bias.squeeze(1) + pairs + deep.squeeze(1)


class DeepFM(WatchedModel):
    """Factorization machine and MLP side by side; the usual place to start.

    Shapes: n examples in, logits float32 of shape (n,) out.

    Args:
        features: Inputs of ids; a plain name is a `Feature` of that name. Or a `FeatureSpec`, which says
            all of them, and the numbers, too.
        dim: Width of each feature's vector, in addition to its bias.
        hidden: Widths of the MLP's hidden layers.
        bias_optimizer: The optimizer of biases; by default that of vectors.
        options: See `ModelOptions`.

    Examples:
        >>> import torch
        >>> from monolith import DeepFM, Feature, Mean
        >>> seen = Feature(name="seen", shares="item", combiner=Mean())
        >>> model = DeepFM(["user", "item", seen], dim=8, hidden=(32,))
        >>> model({"user": torch.tensor([17, 18]), "item": torch.tensor([7, 8])}).shape  # logits
        torch.Size([2])
    """

    def __init__(
        self,
        features: Sequence[Feature | str] | FeatureSpec,
        *,
        dim: int = 16,
        hidden: Sequence[int] = (128, 64),
        bias_optimizer: Optimizer = ROW_OPTIMIZER,
        **options: Unpack[ModelOptions],
    ) -> None:
        inputs = ModelInputs("DeepFM", features, options, bias=True, bias_optimizer=bias_optimizer)
        chosen, numbers = inputs.features, inputs.floats
        check_combined("DeepFM", chosen)
        check_one_width("DeepFM", chosen, dim)
        with inputs.seeded():
            dense = DeepFMDense(
                len(chosen),
                dim,
                numbers.width,
                hidden,
                **inputs.tower,
            )
        layouts = [
            Layout("bias", ADDN, chosen.bias()),
            Layout("vectors", CONCAT, chosen.vectors(dim)),
        ]
        segments = dict.fromkeys(chosen.names, dim) | numbers.widths
        super().__init__(inputs, layouts, dense, segments=segments)
