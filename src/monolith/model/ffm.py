"""FFM: field-aware pairs, a vector of its own for each pair that a feature takes part in.

Also the sample that upstream trains and tests with: six features of five ids each, five
pairs, four biases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import numpy as np
import torch
from torch import Tensor, nn

from monolith.errors import ConfigError
from monolith.feature import (
    ADDN,
    BIAS_OPTIMIZER,
    CONCAT,
    ROW_OPTIMIZER,
    Batch,
    FeatureIds,
    FeatureSpec,
    Layout,
)
from monolith.model.features import Feature
from monolith.model.ready import LogitModel, ModelInputs, PlacementOptions, check_combined
from monolith.table import Ftrl, Initializer, Optimizer, Sgd
from monolith.tensors import RaggedTensor

VOCAB_SIZES = (5, 5, 5, 5, 5, 5)
"""Of the sample: how many ids each of its features has."""
NUM_SLOTS = len(VOCAB_SIZES)
NUM_EXAMPLES = 64
FFM_PAIRS = ((0, 3, 16), (0, 4, 16), (1, 5, 16), (2, 3, 16), (2, 5, 16))
"""Of the sample: slot, slot, and the width in which they meet."""
FFM_BIASES = (0, 1, 2, 3)
"""Of the sample: the slots whose rows begin with a bias."""

FFM_OPTIMIZER = Sgd(learning_rate=0.1)
"""Of the sample, as upstream trains it."""
FFM_BIAS_OPTIMIZER = Ftrl(
    learning_rate=0.1,
    initial_accumulator_value=BIAS_OPTIMIZER.initial_accumulator_value,
    beta=BIAS_OPTIMIZER.beta,
)

SMALLEST_PREDICTION = 1e-7


class FFMDense(nn.Module):
    """The dense half of `FFM`, which has no weights: dot products, and biases."""

    def forward(self, left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return logits of shape (examples,).

        Args:
            left, right: float of shape (examples, widths of all pairs). Pairs lie side by side, so that
                one dot product of both sums those of all pairs.
            bias: float of shape (examples, 1), or None.
        """
        dots: Tensor = torch.linalg.vecdot(left, right)
        return dots if bias is None else dots + bias.squeeze(1)


class FFM(LogitModel):
    """Dot products of chosen pairs of features, and biases. `ffm_sample` makes upstream's.

    Shapes: n examples in, logits float32 of shape (n,) out.

    Args:
        features: Inputs of ids; a plain name is a `Feature` of that name. Or a `FeatureSpec`, which says
            all of them, and the numbers, too.
        pairs: Feature, feature, width. Each pair adds a slice to the rows of both.
        biases: Features whose biases count; all by default.
        optimizer, bias_optimizer: Of rows, where a feature does not say.
        initializer: Of vectors; by default even within 0.05 of 0.
        options: See `PlacementOptions`.

    Examples:
        >>> import torch
        >>> from monolith import FFM
        >>> model = FFM(["user", "item", "hour"], pairs=[("user", "item", 8), ("item", "hour", 2)])
        >>> user, item, hour = torch.tensor([17, 18]), torch.tensor([7, 8]), torch.tensor([9, 23])
        >>> model({"user": user, "item": item, "hour": hour}).shape  # logits
        torch.Size([2])
    """

    def __init__(
        self,
        features: Sequence[Feature | str] | FeatureSpec,
        pairs: Sequence[tuple[str, str, int]],
        *,
        biases: Sequence[str] | None = None,
        optimizer: Optimizer = ROW_OPTIMIZER,
        bias_optimizer: Optimizer = FFM_BIAS_OPTIMIZER,
        initializer: Initializer | None = None,
        **options: Unpack[PlacementOptions],
    ) -> None:
        inputs = ModelInputs(
            "FFM",
            features,
            {"optimizer": optimizer, "initializer": initializer, **options},  # type: ignore[typeddict-item]
            bias=True if biases is None else biases,
            bias_optimizer=bias_optimizer,
            reads_floats=False,
        )
        chosen = inputs.features
        check_combined("FFM", chosen)
        if not pairs:
            raise ConfigError("FFM: needs at least one pair of features")
        left, right = [], []
        for number, (one, other, dim) in enumerate(pairs):
            # Two names, so that features of one pair that share rows still have a vector each.
            left += chosen.slices([one], f"pair {number} left", dim)
            right += chosen.slices([other], f"pair {number} right", dim)
        layouts = [Layout("left", CONCAT, left), Layout("right", CONCAT, right)]
        if biased := chosen.names if biases is None else tuple(biases):
            layouts.append(Layout("bias", ADDN, chosen.bias(biased)))
        super().__init__(inputs, layouts, FFMDense())


def ffm_sample(**options: Unpack[PlacementOptions]) -> FFM:
    """Return upstream's sample model: slots "0" to "5", read by features `feature_0` to `feature_5`."""
    names = [f"feature_{slot}" for slot in range(NUM_SLOTS)]
    return FFM(
        [Feature(name=name, slot=str(slot)) for slot, name in enumerate(names)],
        [(names[one], names[other], dim) for one, other, dim in FFM_PAIRS],
        biases=[names[slot] for slot in FFM_BIASES],
        optimizer=FFM_OPTIMIZER,
        **options,
    )


def ffm_examples(
    count: int = NUM_EXAMPLES,
    *,
    vocab_sizes: Sequence[int] = VOCAB_SIZES,
    most_ids: int = 5,
    seed: int = 0,
) -> Batch:
    """Return examples for the sample model: random ids with random labels, the same for the same seed.

    Each feature has one to `most_ids` of its own ids, which follow those of the feature before. Labels are 0
    or 1 with even chance; upstream's bound left out the 1, so there every label was 0.
    """
    random = np.random.RandomState(seed)
    labels = np.empty(count, dtype=np.float32)
    cells: list[list[list[int]]] = [[] for _ in vocab_sizes]
    for example in range(count):
        labels[example] = random.randint(0, 2)
        first = 0
        for feature, size in enumerate(vocab_sizes):
            many = random.randint(1, most_ids + 1)
            cells[feature].append(random.randint(first, first + size, size=many).tolist())
            first += size
    ids = {f"feature_{feature}": RaggedTensor.from_list(rows) for feature, rows in enumerate(cells)}
    return Batch(FeatureIds.pack(ids), labels={"label": torch.from_numpy(labels)})


def ffm_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean binary cross entropy, with predictions kept 1e-7 from 0 and 1, as upstream does."""
    pred = torch.sigmoid(logits).clamp(SMALLEST_PREDICTION, 1 - SMALLEST_PREDICTION)
    return nn.functional.binary_cross_entropy(pred, labels)
