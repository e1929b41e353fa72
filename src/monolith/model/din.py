"""DeepInterest: a deep interest network, which weights a history by the item that is asked about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor, nn

from monolith.errors import ConfigError
from monolith.feature import CONCAT, FeatureSpec, FirstN, Layout
from monolith.feature.spec import GAP
from monolith.model.features import Feature, FeatureSet
from monolith.model.ready import (
    InputAxes,
    ModelInputs,
    ModelOptions,
    WatchedDense,
    WatchedModel,
    along,
    check_not_jagged,
    tower,
)
from monolith.nn import DIN


@dataclass(frozen=True, slots=True)
class Attention:
    """One sequence of a model, and what it is asked about."""

    sequence: str
    query: str
    start: int
    """Where the vector of the query begins among those of the plain features."""
    width: int
    has_gaps: bool
    """Whether the vectors of time gaps are added to those of the sequence."""


class DeepInterestDense(WatchedDense):
    """The dense half of `DeepInterest`: an attention for each sequence, and an MLP over all."""

    def __init__(
        self,
        plain: int,
        sequences: Sequence[Attention],
        floats: int,
        attention: Sequence[int],
        hidden: Sequence[int],
        *,
        dropout: float = 0.0,
        kernel_norm: bool = False,
    ) -> None:
        super().__init__()
        self.sequences = tuple(sequences)
        activations = [*["relu"] * len(attention), None]
        self.attention = nn.ModuleList(
            DIN(one.width, (*attention, 1), activations=activations) for one in self.sequences
        )
        width = plain + sum(one.width for one in self.sequences) + floats
        self.mlp = tower(width, hidden, dropout=dropout, kernel_norm=kernel_norm)

    def forward(self, vectors: Tensor, *rest: Tensor) -> Tensor:
        """Return logits of shape (examples,).

        Args:
            vectors: float of shape (examples, width of the plain features).
            rest: For each sequence float of shape (examples, length, width), followed by that of its gaps
                if it has some; then float of shape (examples, width) if there are numbers. Behind the last
                id of an example, and for ids without a row, keys are zeros, which add nothing.
        """
        given = iter(rest)
        interests = []
        for one, layer in zip(self.sequences, self.attention, strict=True):
            keys = next(given)
            if one.has_gaps:
                keys = keys + next(given)
            interests.append(layer(vectors[:, one.start : one.start + one.width], keys))
        logits: Tensor = self.mlp(torch.cat([vectors, *interests, *given], 1))
        return logits.squeeze(1)


class DeepInterest(WatchedModel):
    """Plain features next to sequences, whose items are weighted by how they relate to another feature.

    Shapes: n examples in, logits float32 of shape (n,) out.

    A sequence is a feature that keeps its ids: a `HistoryFeature`, a `SequenceFeature` without combiner, or a
    `Feature` with `FirstN`. Where it has time gaps, their vectors are added to those of its items.

    Args:
        features: Inputs of ids; a plain name is a `Feature` of that name. Or a `FeatureSpec`, which says
            all of them, and the numbers, too.
        queries: Sequence to the feature that it is weighted by; by default the one whose rows it shares.
        dim: Width of each feature's vector.
        attention: Widths of the hidden layers of each attention.
        hidden: Widths of the MLP's hidden layers.
        options: See `ModelOptions`.

    Examples:
        >>> import torch
        >>> from monolith import DeepInterest, Feature, FirstN, RaggedTensor
        >>> seen = Feature(name="seen", shares="item", combiner=FirstN(10))
        >>> model = DeepInterest(["user", "item", seen], dim=8, hidden=(32,))  # `item` weights `seen`
        >>> seen_ids = RaggedTensor.from_list([[1, 2, 3], []])
        >>> model({"user": torch.tensor([17, 18]), "item": torch.tensor([7, 8]), "seen": seen_ids}).shape
        torch.Size([2])
    """

    def __init__(
        self,
        features: Sequence[Feature | str] | FeatureSpec,
        *,
        queries: Mapping[str, str] | None = None,
        dim: int = 16,
        attention: Sequence[int] = (32,),
        hidden: Sequence[int] = (128, 64),
        **options: Unpack[ModelOptions],
    ) -> None:
        if not hidden:
            raise ConfigError("DeepInterest: hidden must have at least one width")
        inputs = ModelInputs("DeepInterest", features, options, histories=lambda one: FirstN(one.max))
        chosen, numbers = inputs.features, inputs.floats
        widths = chosen.widths(dim)
        check_not_jagged("DeepInterest", chosen)
        plain = [name for name in chosen.names if not chosen[name].combiner.length]
        sequences = _attentions(chosen, plain, widths, queries or {})
        with inputs.seeded():
            dense = DeepInterestDense(
                sum(widths[name] for name in plain),
                sequences,
                numbers.width,
                attention,
                hidden,
                **inputs.tower,
            )
        vectors = dict(zip(chosen.names, chosen.vectors(dim), strict=True))
        layouts = [Layout("vectors", CONCAT, [vectors[name] for name in plain])]
        for one in sequences:
            names = [one.sequence, one.sequence + GAP] if one.has_gaps else [one.sequence]
            layouts += [Layout(f"sequence {name}", CONCAT, [vectors[name]]) for name in names]
        segments = {name: widths[name] for name in plain}
        segments |= {one.sequence: one.width for one in sequences} | numbers.widths
        super().__init__(inputs, layouts, dense, segments=segments)
        self._attended = tuple(one.width for one in sequences)

    @property
    def input_axes(self) -> InputAxes:
        """As of `ReadyModel`. An attention reads a query, a key, their difference and their product."""
        read = ("query", "key", "difference", "product")
        return dict(super().input_axes) | {
            f"dense.attention.{number}.attention.blocks.0.dense.kernel.weight": {
                "0": along(dict.fromkeys(read, width))
            }
            for number, width in enumerate(self._attended)
        }


def _attentions(
    features: FeatureSet, plain: Sequence[str], widths: Mapping[str, int], queries: Mapping[str, str]
) -> list[Attention]:
    """Return what each sequence is asked about.

    Raises:
        ConfigError: There is no sequence, or one has no query, or one of another width.
    """
    names = [name for name in features.names if name not in plain]
    gaps = {name for name in names if name.removesuffix(GAP) in names and name.endswith(GAP)}
    sequences = [name for name in names if name not in gaps]
    if not sequences:
        raise ConfigError(
            "DeepInterest: needs a sequence: a HistoryFeature, a SequenceFeature without combiner, or a "
            "Feature with FirstN; without any, use DCNv2"
        )
    if unknown := [name for name in queries if name not in sequences]:
        raise ConfigError(
            f"DeepInterest: queries names {unknown[0]!r}, which is no sequence; there are "
            f"{', '.join(sequences)}"
        )
    starts = {name: sum(widths[before] for before in plain[:place]) for place, name in enumerate(plain)}
    found = []
    for name in sequences:
        query = queries.get(name, features[name].shares)
        if query not in starts:
            raise ConfigError(
                f"DeepInterest: nothing says what sequence {name!r} is weighted by: let it share the rows of "
                f"a plain feature, or set queries, as in {{{name!r}: {plain[0] if plain else 'item'!r}}}"
            )
        has_gaps = name + GAP in gaps
        for other in (query, *([name + GAP] if has_gaps else [])):
            if widths[other] != widths[name]:
                raise ConfigError(
                    f"DeepInterest: sequence {name!r} has dim {widths[name]}, and {other!r} {widths[other]}; "
                    "they are multiplied or added, so give them the same"
                )
        found.append(Attention(name, query, starts[query], widths[name], has_gaps))
    return found
