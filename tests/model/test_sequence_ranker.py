"""SequenceRanker: the item that is asked about is the last step of the history."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from monolith import Adam, Batch, Each, EmbeddingOptimizer, Feature, RaggedTensor, Sgd
from monolith.errors import ConfigError
from monolith.feature import FeatureIds
from monolith.model import SequenceRanker
from monolith.model.sequence_ranker import appended
from monolith.nn import HSTUEncoder

HISTORY = Feature(name="history", shares="item", combiner=Each())
FEATURES = ["user", "item", HISTORY]
ENCODERS = ["hstu", "sasrec", "gru"]
ITEMS = 6


def ragged(*rows: list[int]) -> RaggedTensor:
    return RaggedTensor.from_list(list(rows), dtype=torch.int64, ragged_rank=1)


def batch_of(
    *histories: list[int],
    items: list[int],
    times: RaggedTensor | None = None,
    event_times: Tensor | None = None,
) -> Batch:
    features: dict[str, Any] = {"item": torch.tensor(items), "history": ragged(*histories)}
    features["user"] = torch.zeros(len(items), dtype=torch.int64)
    if times is not None:
        features["history.time"] = times
    return Batch(FeatureIds.pack(features, event_times=event_times))


def make(features: Any = FEATURES, **settings: Any) -> SequenceRanker:
    """Return a model whose first IDs have rows: until they are trained, they read as zeros."""
    model = SequenceRanker(features, dim=8, hidden=(8,), optimizer=Sgd(learning_rate=1e-9), **settings)
    rows, first = EmbeddingOptimizer([model.embeddings]), list(range(10))
    model(batch_of(first, items=[0])).sum().backward()
    rows.step()
    return model.eval()


def test_one_value_is_appended_to_each_row() -> None:
    values, row_splits, places = appended(ragged([1, 2], [], [3]), torch.tensor([7, 8, 9]))
    assert values.tolist() == [1, 2, 7, 8, 3, 9]
    assert row_splits.tolist() == [0, 3, 4, 6]
    assert places.tolist() == [2, 3, 5]


@pytest.mark.parametrize("encoder", ENCODERS)
def test_examples_do_not_see_each_other_and_the_order_of_steps_counts(encoder: Any) -> None:
    model = make(encoder=encoder, layers=1)
    together = model(batch_of([1, 2, 3], [], [4], items=[5, 6, 5]))
    assert together.shape == (3,)
    for row, (history, item) in enumerate((([1, 2, 3], 5), ([], 6), ([4], 5))):
        assert_close(together[row], model(batch_of(history, items=[item]))[0])
    assert model(batch_of([2, 1, 3], items=[5]))[0] != together[0]


@pytest.mark.parametrize("encoder", ENCODERS)
def test_it_learns_from_the_last_step(encoder: Any) -> None:
    torch.manual_seed(0)
    optimizer = Adam(learning_rate=0.02)
    model = SequenceRanker(
        ["item", HISTORY], encoder=encoder, dim=16, layers=1, hidden=(32,), optimizer=optimizer, max_length=8
    )
    rows, weights = EmbeddingOptimizer([model.embeddings]), torch.optim.Adam(model.parameters(), 0.01)

    def drawn(seed: int) -> tuple[Batch, Tensor]:
        random = torch.Generator().manual_seed(seed)
        history = torch.randint(0, ITEMS, (128, 3), generator=random)
        item = torch.randint(0, ITEMS, (128,), generator=random)
        return batch_of(*history.tolist(), items=item.tolist()), (history[:, -1] < ITEMS // 2).float()

    for seed in range(60):
        batch, label = drawn(seed)
        weights.zero_grad()
        functional.binary_cross_entropy_with_logits(model(batch), label).backward()
        weights.step()
        rows.step()
    batch, label = drawn(1000)
    right = (model.eval()(batch) > 0) == (label > 0)
    assert right.float().mean() > 0.95


@pytest.mark.parametrize("encoder", ENCODERS)
def test_one_history_may_be_shared_by_all_examples(encoder: Any) -> None:
    model, items = make(encoder=encoder), torch.tensor([5, 6, 7])
    shared = FeatureIds.pack({"item": items, "history": ragged([1, 2])}, shared=["history"])
    again = FeatureIds.pack({"item": items, "history": ragged([1, 2], [1, 2], [1, 2])})
    assert_close(model(shared), model(again))


def test_time_counts_up_to_the_event_time() -> None:
    model = make(encoder="hstu")
    early, late = (
        batch_of([1, 2], items=[3], times=ragged([10, 20]), event_times=torch.tensor([now]))
        for now in (30, 1_000_000)
    )
    assert model(early) != model(late)
    unknown = batch_of([1, 2], items=[3], times=ragged([10, 20]))  # as if it were asked at the last step
    assert_close(
        model(unknown),
        model(batch_of([1, 2], items=[3], times=ragged([10, 20]), event_times=torch.tensor([20]))),
    )


@pytest.mark.parametrize(
    ("features", "settings", "message"),
    [
        (["user", "item"], {}, "SequenceRanker: needs a history"),
        (FEATURES, {"encoder": "lstm"}, "encoder must be one of hstu, sasrec, gru"),
        (FEATURES, {"hidden": ()}, "hidden must have at least one width"),
        (["user", Feature(name="item", dim=4), HISTORY], {}, "'item' has dim 4"),
    ],
)
def test_what_makes_no_sense_is_refused(features: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SequenceRanker(features, **settings)


def test_an_untrained_hstu_changes_a_step_less_than_its_encoder_alone_would() -> None:
    small = make(layers=1).dense.encoder.layers[0].output.weight
    own = HSTUEncoder(8, 201, layers=1).layers[0].output.weight
    assert 0 < small.abs().mean() < 0.2 * own.abs().mean()
