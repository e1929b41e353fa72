"""Combiners: how the embeddings of one example's ids become one.

A feature has any number of ids in an example. A combiner adds them up, averages them,
takes the largest of each float, or keeps them apart, for a layer that reads a
sequence: the first n of them, padded with zeros, or each of them, without padding.
An example without ids reads as zeros; if each is kept, it has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from monolith.errors import ConfigError, FeatureError
from monolith.native import Pooling
from monolith.tensors import RaggedTensor, gen_seq_mask


@dataclass(frozen=True, slots=True)
class Combiner:
    """One of the combiners below."""

    pooling: ClassVar[Pooling]
    length: ClassVar[int] = 0
    """Positions of an example, if embeddings stay apart; 0 if they are combined."""


@dataclass(frozen=True, slots=True)
class Sum(Combiner):
    """Adds up the embeddings of an example; each ID gets the whole gradient of the sum.

    Examples:
        >>> import torch
        >>> from monolith import Sum
        >>> from monolith.feature import combine
        >>> splits, vectors = torch.tensor([0, 2, 2]), torch.tensor([[1.0, 5.0], [3.0, 4.0]])
        >>> combine(Sum(), splits, vectors)  # of two examples: one with two IDs, one with none
        tensor([[4., 9.],
                [0., 0.]])
    """

    pooling = Pooling.SUM


@dataclass(frozen=True, slots=True)
class Mean(Combiner):
    """Averages the embeddings of an example, repeats included; each ID gets its part of the gradient.

    Examples:
        >>> import torch
        >>> from monolith import Mean
        >>> from monolith.feature import combine
        >>> splits, vectors = torch.tensor([0, 2, 2]), torch.tensor([[1.0, 5.0], [3.0, 4.0]])
        >>> combine(Mean(), splits, vectors)  # of two examples: one with two IDs, one with none
        tensor([[2.0000, 4.5000],
                [0.0000, 0.0000]])
    """

    pooling = Pooling.MEAN


@dataclass(frozen=True, slots=True)
class Max(Combiner):
    """Takes the largest value of each float of the embeddings; IDs that tie share its gradient evenly.

    Examples:
        >>> import torch
        >>> from monolith import Max
        >>> from monolith.feature import combine
        >>> splits, vectors = torch.tensor([0, 2, 2]), torch.tensor([[1.0, 5.0], [3.0, 4.0]])
        >>> combine(Max(), splits, vectors)  # of two examples: one with two IDs, one with none
        tensor([[3., 5.],
                [0., 0.]])
    """

    pooling = Pooling.MAX


@dataclass(frozen=True, slots=True)
class FirstN(Combiner):
    """Keeps the first `n` embeddings of an example in order, and pads with zeros if there are fewer.

    Examples:
        >>> from monolith import FirstN, RaggedTensor
        >>> seen = FirstN(3)
        >>> seen.mask(RaggedTensor.from_list([[1, 2, 3, 4], [5]]))
        tensor([[1, 1, 1],
                [1, 0, 0]])
    """

    n: int
    pooling = Pooling.FIRST_N

    def __post_init__(self) -> None:
        if not isinstance(self.n, int) or self.n < 1:
            raise ConfigError(f"FirstN: n must be a whole number, 1 or more, got {self.n!r}")

    @property
    def length(self) -> int:  # type: ignore[override]
        return self.n

    def mask(self, ids: RaggedTensor) -> Tensor:
        """Return int64 of shape (examples, n): 1 where the example has an id, 0 behind its last."""
        return gen_seq_mask(ids, self.n)


@dataclass(frozen=True, slots=True)
class Each(Combiner):
    """Keeps the embedding of each ID, in order and without padding: examples may have any number of them.

    A layout of such a feature is a `RaggedTensor` of shape (examples, IDs of each, width). If the feature is
    shared by all examples, it has one row for all of them.

    Examples:
        >>> import torch
        >>> from monolith import Each, EmbeddingCollection, Feature, FeatureSet, RaggedTensor
        >>> from monolith.feature import CONCAT, Layout
        >>> features = FeatureSet([Feature(name="seen", combiner=Each())])
        >>> embeddings = EmbeddingCollection([Layout("seen", CONCAT, features.vectors(4))])
        >>> seen = embeddings({"seen": RaggedTensor.from_list([[7, 8, 7], [], [9]])})["seen"]
        >>> seen.flat_values.shape, seen.row_splits  # 4 IDs of 3 examples
        (torch.Size([4, 4]), tensor([0, 3, 3, 4]))
    """

    pooling = Pooling.EACH


COMBINERS: dict[str, type[Combiner]] = {
    "reduce_sum": Sum,
    "reduce_mean": Mean,
    "reduce_max": Max,
    "first_n": FirstN,
    "each": Each,
}
"""By upstream's names, which has no "each"."""


def make_combiner(kind: str, max_length: int | None = None) -> Combiner:
    """Return the combiner of that name; `first_n` needs `max_length`."""
    if kind not in COMBINERS:
        raise ConfigError(f"no combiner {kind!r}; there are {', '.join(COMBINERS)}")
    if kind == "first_n":
        if max_length is None:
            raise ConfigError("combiner 'first_n' needs max_length: how many ids of an example to keep")
        return FirstN(max_length)
    return COMBINERS[kind]()


def largest(values: Tensor, index: Tensor, zeros: Tensor) -> Tensor:
    """Return the maximum of the values that go to each place of `zeros`; zero where none does.

    Every maximum starts below all numbers: torch would give the initial value a part of the gradient.
    """
    least = torch.full_like(zeros, -torch.inf)
    peaks = least.scatter_reduce(0, index, values, "amax")
    return torch.where(peaks == -torch.inf, zeros, peaks)


def combine(combiner: Combiner, row_splits: Tensor, embeddings: Tensor) -> Tensor:
    """Combine embeddings row by row, by torch operations: on any device, in any float type.

    The layouts of a model do the same for all features at once, in the core; this is for one.

    Args:
        row_splits: int64 of shape (rows + 1,).
        embeddings: Shape (n, dim), one for each id.

    Returns:
        Shape (rows, dim), or (rows, n, dim) for FirstN; for Each the embeddings themselves.
    """
    if isinstance(combiner, Each):
        return embeddings
    ragged = RaggedTensor(embeddings, row_splits)
    rows = ragged.value_rowids
    if isinstance(combiner, FirstN):
        return ragged.to_padded(combiner.n)
    shape = (ragged.nrows, *embeddings.shape[1:])
    if isinstance(combiner, Max):
        index = rows.view(-1, *[1] * (embeddings.ndim - 1)).expand_as(embeddings)
        return largest(embeddings, index, embeddings.new_zeros(shape))
    if not isinstance(combiner, Sum | Mean):
        raise FeatureError(f"cannot combine by {combiner!r}; there are {', '.join(COMBINERS)}")
    total = torch.zeros(shape, dtype=embeddings.dtype, device=embeddings.device).index_add(
        0, rows, embeddings
    )
    if isinstance(combiner, Sum):
        return total
    many = ragged.row_lengths().clamp(min=1).to(embeddings.dtype)
    return total / many.view(-1, *[1] * (embeddings.ndim - 1))
