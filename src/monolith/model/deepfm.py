"""DeepFM: a linear part, all pairs of features, and an MLP, over the same embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from monolith.feature import ADDN, CONCAT, ROW_OPTIMIZER, FeatureSpec, Layout
from monolith.model.collection import EmbeddingCollection
from monolith.model.features import Feature, FeatureSet
from monolith.model.ready import (
    FloatFeatures,
    WatchedDense,
    WatchedModel,
    beside,
    check_combined,
    check_one_width,
    seeded,
    tower,
)
from monolith.store import Store
from monolith.table import Initializer, Optimizer


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

    Args:
        features: Inputs of ids; a plain name is a `Feature` of that name. Or a `FeatureSpec`, which says
            all of them, and the numbers, too.
        dim: Width of each feature's vector, beside its bias.
        hidden: Widths of the MLP's hidden layers.
        floats: Inputs of numbers: name to width. The MLP reads them, too.
        optimizer, bias_optimizer: Of rows, where a feature does not say; see `ROW_OPTIMIZER` for losses.
        initializer: Of vectors; by default even within 0.05 of 0.
        store, device, threads: See `EmbeddingCollection`.
        seed: For the first values of rows and weights.
        dropout: Of hidden units in training.
        kernel_norm: Normalise the MLP's kernels; see `nn.MLP`.
    """

    def __init__(
        self,
        features: Sequence[Feature | str] | FeatureSpec,
        *,
        dim: int = 16,
        hidden: Sequence[int] = (128, 64),
        floats: Mapping[str, int] | None = None,
        optimizer: Optimizer = ROW_OPTIMIZER,
        bias_optimizer: Optimizer = ROW_OPTIMIZER,
        initializer: Initializer | None = None,
        store: Store | None = None,
        device: torch.device | str = "cpu",
        seed: int = 0,
        threads: int | None = None,
        dropout: float = 0.0,
        kernel_norm: bool = False,
    ) -> None:
        chosen = FeatureSet(
            features, bias=True, optimizer=optimizer, bias_optimizer=bias_optimizer, initializer=initializer
        )
        check_combined("DeepFM", chosen)
        check_one_width("DeepFM", chosen, dim)
        numbers = FloatFeatures(floats, chosen.spec)
        with seeded(seed):
            dense = DeepFMDense(
                len(chosen), dim, numbers.width, hidden, dropout=dropout, kernel_norm=kernel_norm
            )
        layouts = [
            Layout("bias", ADDN, chosen.bias()),
            Layout("vectors", CONCAT, chosen.vectors(dim)),
        ]
        embeddings = EmbeddingCollection(layouts, store=store, device=device, seed=seed, threads=threads)
        segments = dict.fromkeys(chosen.names, dim) | numbers.widths
        super().__init__(embeddings, dense, ("bias", "vectors"), numbers, segments=segments, spec=chosen.spec)
