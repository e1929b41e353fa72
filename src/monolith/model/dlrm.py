"""DLRM: numbers become one more vector, and an MLP reads the dot products of all vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from monolith.errors import ConfigError
from monolith.feature import STACK, FeatureSpec, Layout
from monolith.model.features import Feature
from monolith.model.ready import (
    InputAxes,
    LogitModel,
    ModelInputs,
    ModelOptions,
    along,
    check_combined,
    check_one_width,
    tower,
)


class DLRMDense(nn.Module):
    """The dense half of `DLRM`."""

    pairs: Tensor

    def __init__(
        self,
        features: int,
        dim: int,
        floats: int,
        bottom: Sequence[int],
        top: Sequence[int],
        *,
        dropout: float = 0.0,
        kernel_norm: bool = False,
    ) -> None:
        super().__init__()
        self.bottom = tower(floats, (*bottom, dim), None, kernel_norm=kernel_norm)
        # Which of all products, laid out flat, are of two different vectors; each pair once.
        vectors = features + 1
        left, right = torch.tril_indices(vectors, vectors, -1)
        self.register_buffer("pairs", left * vectors + right, persistent=False)
        self.top = tower(dim + len(left), top, dropout=dropout, kernel_norm=kernel_norm)

    def forward(self, vectors: Tensor, floats: Tensor) -> Tensor:
        """Return logits of shape (examples,).

        Args:
            vectors: float of shape (examples, features, dim).
            floats: float of shape (examples, width).
        """
        numbers: Tensor = self.bottom(floats)
        together = torch.cat([numbers.unsqueeze(1), vectors], 1)
        products = torch.bmm(together, together.transpose(1, 2)).flatten(1)
        logits: Tensor = self.top(torch.cat([numbers, products.index_select(1, self.pairs)], 1))
        return logits.squeeze(1)


class DLRM(LogitModel):
    """Numbers through a bottom MLP, dot products of all pairs, and a top MLP over both.

    Shapes: n examples in, logits float32 of shape (n,) out.

    Args:
        features: Inputs of ids; a plain name is a `Feature` of that name. Or a `FeatureSpec`, which says
            all of them, and the numbers, too.
        dim: Width of each feature's vector, and of what the bottom MLP makes of the numbers.
        bottom: Widths of the bottom MLP's hidden layers, before the last, which has `dim`.
        top: Widths of the top MLP's hidden layers.
        options: See `ModelOptions`.

    Examples:
        >>> from monolith import DLRM, FeatureSpec, FloatFeature, IdFeature, Label, MemorySource, Pipeline
        >>> spec = FeatureSpec(
        ...     features={"user": IdFeature(), "item": IdFeature(), "price": FloatFeature()},
        ...     labels={"click": Label()},
        ... )
        >>> model = DLRM(spec, dim=8, bottom=(16,), top=(32,))
        >>> data = {"user": [17, 18], "item": [7, 8], "price": [0.5, 2.0], "click": [1, 0]}
        >>> [batch] = Pipeline(MemorySource(data, batch_size=2)).to_batches(spec)
        >>> model(batch).shape  # logits
        torch.Size([2])
    """

    def __init__(
        self,
        features: Sequence[Feature | str] | FeatureSpec,
        *,
        dim: int = 16,
        bottom: Sequence[int] = (64,),
        top: Sequence[int] = (128, 64),
        **options: Unpack[ModelOptions],
    ) -> None:
        inputs = ModelInputs("DLRM", features, options)
        chosen, numbers = inputs.features, inputs.floats
        check_combined("DLRM", chosen)
        check_one_width("DLRM", chosen, dim)
        if not numbers.width:
            raise ConfigError("DLRM: needs float features for its bottom MLP; without any, use DeepFM")
        with inputs.seeded():
            dense = DLRMDense(
                len(chosen),
                dim,
                numbers.width,
                bottom,
                top,
                **inputs.tower,
            )
        layout = Layout("vectors", STACK, chosen.vectors(dim))
        super().__init__(inputs, [layout], dense)
        self._names, self._dim = tuple(chosen.names), dim

    @property
    def input_axes(self) -> InputAxes:
        """As of `ReadyModel`. The top reads the output of the bottom, and a product of each pair."""
        vectors = ["the numbers", *self._names]
        pairs = [[f"{one} x {other}", 1] for at, one in enumerate(vectors) for other in vectors[:at]]
        return {
            "dense.bottom.0.kernel.weight": {"0": along(self.floats.widths)},
            "dense.top.0.kernel.weight": {"0": [["the numbers", self._dim], *pairs]},
        }
