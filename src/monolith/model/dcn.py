"""DCNv2: a cross network and an MLP, side by side on the same embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Unpack

import torch
from torch import Tensor

from monolith.errors import ConfigError
from monolith.feature import CONCAT, FeatureSpec, Layout
from monolith.model.features import Feature
from monolith.model.ready import (
    InputAxes,
    ModelInputs,
    ModelOptions,
    WatchedDense,
    WatchedModel,
    along,
    beside,
    check_combined,
    tower,
)
from monolith.nn import DCN, Dense

CROSS_AXES: Mapping[str, tuple[str, ...]] = {
    "bias": ("0",),
    "gate": ("0",),
    "kernel.weight": ("0", "1"),
    "kernel.norm": ("0",),
    "down.weight": ("1",),
    "up.weight": ("2",),
}
"""The axes of the weights of a cross layer that go along the inputs."""


class DCNv2Dense(WatchedDense):
    """The dense half of `DCNv2`: what the crosses and the MLP found, weighed together."""

    def __init__(
        self,
        in_features: int,
        cross_layers: int,
        hidden: Sequence[int],
        *,
        cross: str = "matrix",
        dropout: float = 0.0,
        kernel_norm: bool = False,
    ) -> None:
        super().__init__()
        if not hidden:
            raise ConfigError("DCNv2: hidden must have at least one width")
        self.cross = DCN(in_features, cross_layers, dcn_type=cross, kernel_norm=kernel_norm)
        self.mlp = tower(in_features, hidden, None, dropout=dropout, kernel_norm=kernel_norm)
        self.head = Dense(in_features + hidden[-1], 1)

    def forward(self, vectors: Tensor, floats: Tensor | None = None) -> Tensor:
        """Return logits of shape (examples,).

        Args:
            vectors: float of shape (examples, features * dim).
            floats: float of shape (examples, width), or None.
        """
        x = beside(vectors, floats)
        logits: Tensor = self.head(torch.cat([self.cross(x), self.mlp(x)], 1))
        return logits.squeeze(1)


class DCNv2(WatchedModel):
    """Explicit crosses of ever higher order next to an MLP.

    Shapes: n examples in, logits float32 of shape (n,) out.

    Args:
        features: Inputs of ids; a plain name is a `Feature` of that name. Or a `FeatureSpec`, which says
            all of them, and the numbers, too.
        dim: Width of each feature's vector.
        cross_layers: Each multiplies what it is given with the first input once more.
        cross: "matrix" or, cheaper for wide inputs, "mixed"; see `nn.DCN`.
        hidden: Widths of the MLP's hidden layers.
        options: See `ModelOptions`.

    Examples:
        >>> import torch
        >>> from monolith import DCNv2
        >>> model = DCNv2(["user", "item"], dim=8, cross_layers=3, cross="mixed", hidden=(32,))
        >>> model({"user": torch.tensor([17, 18]), "item": torch.tensor([7, 8])}).shape  # logits
        torch.Size([2])
    """

    def __init__(
        self,
        features: Sequence[Feature | str] | FeatureSpec,
        *,
        dim: int = 16,
        cross_layers: int = 2,
        cross: str = "matrix",
        hidden: Sequence[int] = (128, 64),
        **options: Unpack[ModelOptions],
    ) -> None:
        inputs = ModelInputs("DCNv2", features, options)
        chosen, numbers = inputs.features, inputs.floats
        check_combined("DCNv2", chosen)
        with inputs.seeded():
            dense = DCNv2Dense(
                sum(chosen.widths(dim).values()) + numbers.width,
                cross_layers,
                hidden,
                cross=cross,
                **inputs.tower,
            )
        layout = Layout("vectors", CONCAT, chosen.vectors(dim))
        segments = chosen.widths(dim) | numbers.widths
        super().__init__(inputs, [layout], dense, segments=segments)
        self._hidden = hidden[-1]

    @property
    def input_axes(self) -> InputAxes:
        """As of `ReadyModel`. A cross layer has the inputs along what it reads and along what it writes."""
        inputs = along(self.segments)
        axes = {
            "dense.mlp.0.kernel.weight": {"0": inputs},
            "dense.head.kernel.weight": {"0": [*inputs, ["the last hidden layer", self._hidden]]},
        }
        for name, tensor in self.dense.named_parameters():
            number, _, kind = name.removeprefix("cross.layers.").partition(".")
            found = CROSS_AXES.get(kind, ()) if number.isdigit() else ()
            if kind.startswith("kernel.") and tensor.shape[-1] == 1:  # of a vector, which has one output
                found = found[:-1]
            if found:
                axes[f"dense.{name}"] = dict.fromkeys(found, inputs)
        return axes
