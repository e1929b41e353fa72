"""DeepInterest: a history counts by what it has to do with the item in question."""

from __future__ import annotations

import pytest
import torch

from monolith.errors import ConfigError
from monolith.feature import Batch, FeatureIds, FirstN
from monolith.model import DeepInterest, EmbeddingOptimizer, Feature
from monolith.store import LocalStore
from monolith.tensors import RaggedTensor

SEEN = Feature(name="seen", shares="item", combiner=FirstN(4))


def batch(items: list[int], seen: list[list[int]]) -> Batch:
    return Batch(
        FeatureIds.pack(
            {"item": RaggedTensor.from_list([[item] for item in items]), "seen": RaggedTensor.from_list(seen)}
        )
    )


def model(**settings: object) -> DeepInterest:
    made = DeepInterest(["item", SEEN], dim=4, attention=(8,), hidden=(16,), **settings)  # type: ignore[arg-type]
    made.embeddings.bind(LocalStore.from_configs)
    return made


def trained(made: DeepInterest, steps: int) -> float:
    """Train on whether an item is among those seen; return how often the last batch was right."""
    rows, dense = EmbeddingOptimizer(made), torch.optim.Adam(made.parameters(), lr=0.01)
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        items = torch.randint(0, 6, (64,), generator=draw)
        seen = torch.randint(0, 6, (64, 3), generator=draw)
        label = (seen == items[:, None]).any(1).float()
        logits = made(batch(items.tolist(), seen.tolist()))
        dense.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(logits, label).backward()
        rows.step()
        dense.step()
    return float(((logits > 0) == (label > 0)).float().mean())


def test_it_learns_whether_the_item_is_among_those_seen() -> None:
    assert trained(model(seed=1), 150) > 0.9


def test_what_is_not_there_adds_nothing() -> None:
    made = model()
    trained(made, 3)
    given = batch([1, 1, 1], [[], [5], [5, 4, 3, 2]])
    beside = made(given)
    assert len(set(beside.tolist())) == 3
    vectors = made.embeddings(given)["vectors"][:1]
    assert bool(vectors.any())
    nothing = made.dense.mlp(torch.cat([vectors, torch.zeros(1, 4)], 1))
    assert beside[0].item() == pytest.approx(nothing.item(), abs=1e-6)


@pytest.mark.parametrize(
    ("features", "settings", "message"),
    [
        (["item"], {}, "needs a sequence"),
        (["item", Feature(name="seen", combiner=FirstN(4))], {}, "nothing says what sequence 'seen'"),
        (["item", SEEN], {"queries": {"sen": "item"}}, "'sen', which is no sequence; there are seen"),
        (["item", SEEN], {"hidden": ()}, "at least one width"),
        (
            [Feature(name="item", dim=8), Feature(name="seen", combiner=FirstN(4))],
            {"queries": {"seen": "item"}},
            "sequence 'seen' has dim 16, and 'item' 8",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    features: list[Feature | str], settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        DeepInterest(features, **settings)  # type: ignore[arg-type]
