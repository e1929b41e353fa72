"""TwoTower: retrieval by a dense network for the user and one for the item.

It learns by picking the item that was wanted out of a sample: the items of the batch, with those that
negative sampling put there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Unpack, get_args

import torch
from torch import Tensor, nn

from monolith.errors import ConfigError
from monolith.feature import CONCAT, Batch, FeatureSpec, Layout
from monolith.model.features import Feature, FeatureSet
from monolith.model.ready import (
    FloatFeatures,
    InputAxes,
    ModelInput,
    ModelInputs,
    ModelOptions,
    along,
    check_combined,
    tower,
)
from monolith.model.retrieval import (
    Negatives,
    PickedItems,
    RetrievalModel,
    Similarity,
    negatives_among,
    positive_examples,
)
from monolith.nn import ItemFrequency, accidental_hits, sampled_softmax_loss

USER, ITEM = "user", "item"


class TwoTower(RetrievalModel):
    """A tower for users and one for items, and the softmax that trains them.

    Shapes: n examples in; vectors float32 of shape (n, out) of users and of items, scores of shape (n,).

    Args:
        features: Inputs of ids; a plain name is a `Feature` of that name. Or a `FeatureSpec`, which says
            all of them, and the numbers, too.
        item: The features of the item tower, of ids and of numbers.
        user: Those of the user tower; by default all others.
        item_id: The feature of ids that says which item an example is about; by default the first of `item`.
        user_id: The feature of ids that says whose example it is: what a user wanted elsewhere in a batch is
            then no negative of theirs. By default the group of a feature spec, if it has one.
        dim: Width of each feature's vector.
        hidden: Widths of the hidden layers of each tower.
        out: Width of the vector of a user, and of an item.
        similarity: "dot" is the dot product; "cosine" that of vectors of length 1, which are then also
            what is written out.
        temperature: By what scores are divided; by default 1 for "dot" and 0.1 for "cosine".
        negatives: What a positive is compared with: the items of the other positives of its batch, the items
            of examples that are not positive, such as `NegativeGeneration` makes, or both.
        correction: Whether scores are corrected by how often each item is in a batch; see `ItemFrequency`.
        frequency_buckets: Of that estimate, a power of two: some per item that is seen often.
        options: See `ModelOptions`.

    Examples:
        >>> import torch
        >>> from monolith import TwoTower
        >>> model = TwoTower(["user", "item"], item=("item",), dim=8, hidden=(16,), out=4)
        >>> ids = {"user": torch.tensor([17, 18]), "item": torch.tensor([7, 8])}
        >>> model.users(ids).shape, model.items(ids).shape  # vectors of users and of items
        (torch.Size([2, 4]), torch.Size([2, 4]))
        >>> model(ids).shape  # the score of each user with the item of its example
        torch.Size([2])
    """

    def __init__(  # noqa: PLR0913  keywords that users write; see decision 0065
        self,
        features: Sequence[Feature | str] | FeatureSpec,
        *,
        item: Sequence[str],
        user: Sequence[str] | None = None,
        item_id: str | None = None,
        user_id: str | None = None,
        dim: int = 16,
        hidden: Sequence[int] = (64,),
        out: int = 32,
        similarity: Similarity = "dot",
        temperature: float | None = None,
        negatives: Negatives = "both",
        correction: bool = True,
        frequency_buckets: int = 1 << 16,
        **options: Unpack[ModelOptions],
    ) -> None:
        inputs = ModelInputs("TwoTower", features, options)
        chosen, numbers = inputs.features, inputs.floats.widths
        if temperature is None:
            temperature = 1.0 if similarity == "dot" else 0.1
        super().__init__(chosen.spec, similarity, temperature)
        if negatives not in get_args(Negatives):
            known = ", ".join(get_args(Negatives))
            raise ConfigError(f"TwoTower: negatives must be one of {known}, got {negatives!r}")
        if out < 1:
            raise ConfigError(f"TwoTower: out must be at least 1, got {out}")
        sides = _sides(list(chosen.names), list(numbers), user, item)
        self.item_features, self.user_features = sides[ITEM], sides[USER]
        self.item_id = _id_feature(chosen, "item_id", item_id, sides[ITEM])
        if user_id is None and self.spec is not None:
            user_id = self.spec.group
        self.user_id = user_id
        """The feature that says whose example it is; None if nothing does."""
        self.out = out
        self.negatives = negatives
        layouts, widths = [], chosen.widths(dim)
        towers: dict[str, nn.Module] = {}
        self._numbers: dict[str, FloatFeatures] = {}
        with inputs.seeded():
            for side, names in sides.items():
                ids = [name for name in names if name in chosen.names]
                check_combined(f"TwoTower: the {side} tower", chosen, ids)
                slices = [use for name in ids for use in chosen.slices([name], "vector", widths[name])]
                layouts.append(Layout(side, CONCAT, slices))
                own = FloatFeatures({name: numbers[name] for name in names if name in numbers})
                self._numbers[side] = own
                width = sum(widths[name] for name in ids) + own.width
                towers[side] = tower(width, hidden, out, **inputs.tower)
        self.user_tower, self.item_tower = towers[USER], towers[ITEM]
        self.embeddings = inputs.embeddings(layouts)
        self._segments = {
            side: {name: widths[name] for name in names if name in chosen.names} | self._numbers[side].widths
            for side, names in sides.items()
        }
        self.frequency = ItemFrequency(frequency_buckets) if correction else None
        self.to(self.embeddings.device)

    @property
    def input_axes(self) -> InputAxes:
        """The inputs along the axes of weights, by which a changed model finds its part of a checkpoint."""
        return {
            "user_tower.0.kernel.weight": {"0": along(self._segments[USER])},
            "item_tower.0.kernel.weight": {"0": along(self._segments[ITEM])},
        }

    def forward(self, batch: ModelInput, floats: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the score of each user with the item of its own example, of shape (examples,).

        Args:
            floats: The float features by name, where `batch` is not a `Batch`, which holds them itself.
        """
        read = self.embeddings(batch)
        users, items = (self._vectors(side, read, batch, floats) for side in (USER, ITEM))
        return self.score(users, items)

    def users(self, batch: ModelInput, floats: Mapping[str, Tensor] | None = None) -> Tensor:
        return self._vectors(USER, self.embeddings(batch), batch, floats)

    def items(self, batch: ModelInput, floats: Mapping[str, Tensor] | None = None) -> Tensor:
        return self._vectors(ITEM, self.embeddings(batch), batch, floats)

    def pick(self, batch: Batch) -> PickedItems:
        """Return how badly the users of positive examples pick their items out of the batch's.

        Examples with a label above 0 are positive, and all are where there are no labels. In training, with
        the correction, the batch is also taken into how often each item is seen.
        """
        read = self.embeddings(batch)
        users, items = self._vectors(USER, read, batch, None), self._vectors(ITEM, read, batch, None)
        device = users.device
        positive = positive_examples(batch, device)
        own = positive.nonzero().flatten()
        # Where only drawn ones are negatives, other positives are no candidates of a query.
        ids = batch.ids.first(self.item_id).to(device)
        offered = negatives_among(positive, self.negatives)
        log_q = None
        if self.frequency is not None:
            if self.training and torch.is_grad_enabled():
                self.frequency.observe(ids[offered])
            log_q = self.frequency(ids)
        whose = None if self.user_id is None else batch.ids.first(self.user_id).to(device)[own]
        hits = accidental_hits(ids[own], ids, whose) | ~offered
        scores = users[own] @ items.t() / self.temperature
        loss = sampled_softmax_loss(scores, own, log_q=log_q, hits=hits)
        return PickedItems(loss, self.score(users, items))

    def _vectors(
        self, side: str, read: Mapping[str, Tensor], batch: ModelInput, floats: Mapping[str, Tensor] | None
    ) -> Tensor:
        numbers = self._numbers[side].read(batch, floats, self.embeddings.device)
        x = read[side] if numbers is None else torch.cat([read[side], numbers], 1)
        made: Tensor = (self.user_tower if side == USER else self.item_tower)(x)
        return self.compared(made)


def _sides(
    ids: Sequence[str], numbers: Sequence[str], user: Sequence[str] | None, item: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Return the features of each tower, in the order in which the model has them.

    Raises:
        ConfigError: A name is none of a feature, or in both towers.
    """
    known = [*ids, *numbers]
    for side, names in ((USER, user or ()), (ITEM, item)):
        for name in names:
            if name not in known:
                near = get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
                raise ConfigError(f"TwoTower: {side}: there is no feature {name!r}; {hint}")
            if side == ITEM and name in (user or ()):
                raise ConfigError(f"TwoTower: feature {name!r} is in both towers; leave it in one of them")
    users = [name for name in known if name not in item] if user is None else user
    return {USER: tuple(users), ITEM: tuple(dict.fromkeys(item))}


def _id_feature(features: FeatureSet, where: str, given: str | None, names: Sequence[str]) -> str:
    """Return the feature of ids that names an item: the one given, or the first of a tower."""
    ids = [name for name in names if name in features.names]
    if given is None and ids:
        return ids[0]
    if given not in features.names:
        raise ConfigError(
            f"TwoTower: {where}: {given!r} is no feature of ids; there are {', '.join(features.names)}"
        )
    assert given is not None
    return given
