"""RetrievalModel: one vector for the user and one for the item, which never meet before the score.

Because they do not meet, the items' vectors can be computed once, written out and searched; what a ranking
model finds by looking at user and item together is the price.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from monolith.errors import ConfigError
from monolith.feature import Batch, FeatureSpec
from monolith.model.collection import EmbeddingCollection
from monolith.model.ready import InputAxes, ModelInput

Similarity = Literal["dot", "cosine"]
Negatives = Literal["batch", "sampled", "both"]
"""What a wanted item is compared with: other items that came next in the batch, those of examples that are
not positive, such as `NegativeGeneration` makes, or both."""


class PickedItems(NamedTuple):
    """What `RetrievalModel.pick` returns."""

    loss: Tensor
    """Scalar: the mean over the items that were to be picked."""
    scores: Tensor
    """float of shape (examples,): of each user with the item of its own example."""


class RetrievalModel(nn.Module):
    """A model that finds items for a user. `TwoTower`, `SASRec` and `HSTU` derive from it.

    Shapes: n examples in; vectors float32 of shape (n, out) of users and of items, scores of shape (n,).

    Args:
        spec: What the features were made of; None if they were given one by one.
        similarity: "dot" is the dot product; "cosine" that of vectors of length 1.
        temperature: By what scores are divided.

    Raises:
        ConfigError: The similarity is unknown, or the temperature is not above 0.
    """

    embeddings: EmbeddingCollection
    item_features: tuple[str, ...]
    """The features that the vector of an item is made of."""
    user_features: tuple[str, ...]
    """The features that the vector of a user is made of."""
    item_id: str
    """The feature that says which item an example is about."""
    out: int
    """Floats of a vector."""

    def __init__(self, spec: FeatureSpec | None, similarity: Similarity, temperature: float) -> None:
        super().__init__()
        name = type(self).__name__
        if similarity not in get_args(Similarity):
            raise ConfigError(
                f"{name}: similarity must be one of {', '.join(get_args(Similarity))}, got {similarity!r}"
            )
        if not temperature > 0:
            raise ConfigError(f"{name}: temperature must be above 0, got {temperature}")
        self.spec = spec
        """What turns raw data into what it reads, and what its checkpoints keep; None if it was made of
        features by hand."""
        self.similarity, self.temperature = similarity, temperature

    @property
    def input_axes(self) -> InputAxes:
        """The inputs along the axes of weights, by which a changed model finds its part of a checkpoint."""
        return {}

    @abstractmethod
    def users(self, batch: ModelInput, floats: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the vector of the user of each example: float of shape (examples, out).

        Args:
            floats: The float features by name, where `batch` is not a `Batch`, which holds them itself.
        """

    @abstractmethod
    def items(self, batch: ModelInput, floats: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the vector of the item of each example: float of shape (examples, out).

        The batch may have the features of items alone.
        """

    @abstractmethod
    def pick(self, batch: Batch) -> PickedItems:
        """Return how badly users pick what they wanted out of a sample of items, for training."""

    @property
    def item_spec(self) -> FeatureSpec:
        """What reads a table of items, one record each: the features of items, without labels.

        Raises:
            ConfigError: The model was made of features by hand.
        """
        if self.spec is None:
            raise ConfigError(
                f"{type(self).__name__}: it was made of features by hand, so nothing says how items are read"
            )
        return self.spec.only(name for name in self.item_features if name in self.spec.features)

    def compared(self, vectors: Tensor) -> Tensor:
        """Return vectors as they are compared and written out: of length 1 for "cosine".

        A vector of zeros stays as it is: an ID that is trained for the first time reads as zeros, and to
        divide by a length near 0 would make its gradient immense.
        """
        if self.similarity != "cosine":
            return vectors
        lengths = vectors.norm(dim=-1, keepdim=True)
        return vectors / torch.where(lengths > 0, lengths, 1.0)

    def score(self, users: Tensor, items: Tensor) -> Tensor:
        """Return the score of each user with the item in the same row."""
        return (users * items).sum(1) / self.temperature


def positive_examples(batch: Batch, device: torch.device) -> Tensor:
    """Return which examples are positive: by any of their labels, and all where there are none."""
    if not batch.labels:
        return torch.ones(len(batch), dtype=torch.bool, device=device)
    return torch.stack([label > 0 for label in batch.labels.values()]).any(0).to(device)


def negatives_among(items: Tensor, negatives: Negatives) -> Tensor:
    """Return which items of a batch are offered as negatives.

    Args:
        items: bool of shape (items,): whether each one came next, as the item of a positive example did.
    """
    return {"batch": items, "sampled": ~items}.get(negatives, torch.ones_like(items))
