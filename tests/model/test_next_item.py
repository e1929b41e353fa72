"""Models of sequences: a history, step by step, predicts the next item."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from monolith import HSTU, Adam, Batch, Each, EmbeddingOptimizer, Feature, RaggedTensor, SASRec, Sgd
from monolith.data import HistoryConfig, MemorySource, Pipeline
from monolith.data.sampling import ItemPoolConfig, NegativeGeneration, NegativeGenerationConfig
from monolith.errors import ConfigError, FeatureError
from monolith.feature import FeatureIds, FeatureSpec, HistoryFeature, IdFeature, Label
from monolith.model import GRU4Rec
from monolith.model.histories import step_times
from monolith.model.next_item import NextItem
from monolith.model.retrieval import Negatives

FEATURES = ["item", Feature(name="history", shares="item", combiner=Each())]
WITH_ACTIONS = [*FEATURES, "action", Feature(name="history.action", shares="action", combiner=Each())]
MODELS: list[Any] = [SASRec, HSTU, GRU4Rec]
ITEMS = 30
NO_LABELS = FeatureSpec(
    features={"item": IdFeature(), "history": HistoryFeature(of="item", max=5)}, labels={}
)


def ragged(*rows: list[int]) -> RaggedTensor:
    return RaggedTensor.from_list(list(rows), dtype=torch.int64, ragged_rank=1)


def batch_of(*histories: list[int], items: list[int], **more: RaggedTensor) -> Batch:
    features = {"item": torch.tensor(items), "history": ragged(*histories)}
    return Batch(FeatureIds.pack(features | {name.replace("__", "."): one for name, one in more.items()}))


def make(kind: Any, features: Any = FEATURES, **settings: Any) -> NextItem:
    """Return a model whose first IDs have rows: until they are trained, they read as zeros."""
    how = {"dim": 8, "correction": False, "optimizer": Sgd(learning_rate=1e-9)} | settings
    model: NextItem = kind(features, **how)
    rows, first = EmbeddingOptimizer([model.embeddings]), list(range(10))
    model.pick(batch_of(first, items=[0], history__action=ragged(first))).loss.backward()
    rows.step()
    model.zero_grad()
    return model.eval()


def counted(seed: int, users: int = 64) -> Batch:
    """Users who step from each item to the third after it, from an item that is drawn."""
    random = torch.Generator().manual_seed(seed)
    first = torch.randint(0, ITEMS, (users,), generator=random).tolist()
    lengths = torch.randint(0, 12, (users,), generator=random).tolist()
    steps = [
        [(start + 3 * n) % ITEMS for n in range(length + 1)]
        for start, length in zip(first, lengths, strict=True)
    ]
    return batch_of(*(one[:-1] for one in steps), items=[one[-1] for one in steps])


@pytest.mark.parametrize("kind", MODELS)
def test_it_learns_which_item_comes_next(kind: Any) -> None:
    torch.manual_seed(0)
    model = kind(FEATURES, dim=16, layers=1, negatives=ITEMS, optimizer=Adam(learning_rate=0.03))
    rows, weights = EmbeddingOptimizer([model.embeddings]), torch.optim.Adam(model.parameters(), 0.02)
    for seed in range(100):
        weights.zero_grad()
        model.pick(counted(seed)).loss.backward()
        weights.step()
        rows.step()
    model.eval()
    seen = counted(1000, users=200)
    best = (model.users(seen) @ model.items({"item": torch.arange(ITEMS)}).t()).argmax(1)
    right = (best == seen.ids.first("item"))[seen.ids["history"].row_lengths() > 0]
    assert right.float().mean() > 0.9


@pytest.mark.parametrize("kind", MODELS)
def test_a_user_is_the_last_state_and_histories_do_not_see_each_other(kind: Any) -> None:
    model = make(kind)
    together = model.users(batch_of([1, 2, 3], [], [4], items=[5, 6, 7]))
    assert together.shape == (3, 8)
    for row, history in enumerate(([1, 2, 3], [], [4])):
        assert_close(together[row], model.users(batch_of(history, items=[9]))[0])
    assert_close(together[1], functional.normalize(model.start, dim=0))
    assert not torch.allclose(together[0], model.users(batch_of([2, 1, 3], items=[9]))[0])


@pytest.mark.parametrize("kind", MODELS)
def test_ids_that_are_new_have_gradients_of_the_usual_size(kind: Any) -> None:
    model = kind(FEATURES, dim=8, optimizer=Sgd(learning_rate=1.0))
    rows = EmbeddingOptimizer([model.embeddings])
    for _ in range(3):
        model.pick(batch_of([1, 2], [3], items=[4, 5])).loss.backward()
        rows.step()
    assert model.eval().embeddings({"item": torch.arange(1, 6)})["item"].abs().max() < 100


@pytest.mark.parametrize("kind", MODELS)
def test_scores_are_those_of_the_vectors(kind: Any) -> None:
    model, batch = make(kind), batch_of([1, 2], [3], items=[5, 6])
    expected = (model.users(batch) * model.items(batch)).sum(1) / 0.05
    assert_close(model(batch), expected)
    assert_close(model.pick(batch).scores, expected)


def test_one_history_may_be_shared_by_all_examples() -> None:
    model = make(SASRec)
    items = torch.tensor([5, 6, 7])
    shared = FeatureIds.pack({"item": items, "history": ragged([1, 2])}, shared=["history"])
    repeated = batch_of([1, 2], [1, 2], [1, 2], items=items.tolist())
    assert_close(model(shared), model(repeated))


def softmax_of_all_steps(model: NextItem, batch: Batch, pairs: list[tuple[list[int], int]]) -> Tensor:
    """Return the mean loss of picking each item out of all items of the batch, after the steps before it."""
    known = sorted({*batch.ids["history"].flat_values.tolist(), *batch.ids.first("item").tolist()})
    items = model.items({"item": torch.tensor(known)})
    users = model.users(batch_of(*(before for before, _ in pairs), items=[0] * len(pairs)))
    wanted = torch.tensor([known.index(item) for _, item in pairs])
    return functional.cross_entropy(users @ items.t() / model.temperature, wanted)


@pytest.mark.parametrize("kind", MODELS)
def test_every_step_picks_the_item_of_the_next_one(kind: Any) -> None:
    model, batch = make(kind), batch_of([1, 2, 3], [], [4], items=[5, 6, 1])
    pairs = [([1], 2), ([1, 2], 3), ([1, 2, 3], 5), ([], 6), ([4], 1)]
    assert_close(model.pick(batch).loss, softmax_of_all_steps(model, batch, pairs))
    last = make(kind, steps="last")
    assert_close(last.pick(batch).loss, softmax_of_all_steps(last, batch, pairs[2:]))


def test_an_item_that_was_not_wanted_is_not_picked() -> None:
    model = make(SASRec)
    plain = batch_of([1, 2], [3], items=[5, 6])
    labelled = Batch(plain.ids, labels={"click": torch.tensor([0.0, 1.0])})
    expected = softmax_of_all_steps(model, plain, [([1], 2), ([3], 6)])
    assert_close(model.pick(labelled).loss, expected)


# The loss by hand. Of two examples the second was not wanted; its history trains all the same.


def labelled() -> Batch:
    plain = batch_of([1, 2, 3], [4, 1], items=[5, 6])
    return Batch(plain.ids, labels={"click": torch.tensor([1.0, 0.0])})


PAIRS = [([1], 2), ([1, 2], 3), ([4], 1), ([1, 2, 3], 5)]
"""The steps before, and the item that came next."""
CANDIDATES: dict[Negatives, list[int]] = {
    "batch": [1, 2, 3, 4, 5],
    "sampled": [6],
    "both": [1, 2, 3, 4, 5, 6],
}


def loss_by_hand(model: NextItem, candidates: list[int], expected: dict[int, float]) -> float:
    """Return the mean over the pairs of -log(e^s(wanted) / (e^s(wanted) + the sum of e^s(other))), where
    s(item) = user * item / temperature - log(how often a batch is expected to have the item)."""

    def vectors(found: Tensor) -> Any:
        return found.detach().double().numpy()

    users = vectors(model.users(batch_of(*(before for before, _ in PAIRS), items=[0] * len(PAIRS))))
    items = vectors(model.items({"item": torch.arange(10)}))
    losses = []
    for user, (_, wanted) in zip(users, PAIRS, strict=True):
        shares = {
            item: np.exp(np.dot(user, items[item]) / model.temperature) / expected[item]
            for item in {wanted, *candidates}
        }
        losses.append(-np.log(shares[wanted] / sum(shares.values())))
    return float(np.mean(losses))


EVEN = dict.fromkeys(range(10), 1.0)


@pytest.mark.parametrize("source", CANDIDATES)
@pytest.mark.parametrize("kind", MODELS)
def test_negatives_are_of_the_batch_or_drawn_or_both(kind: Any, source: Negatives) -> None:
    model = make(kind, negatives_from=source)
    assert model.pick(labelled()).loss.item() == pytest.approx(
        loss_by_hand(model, CANDIDATES[source], EVEN), rel=1e-5
    )
    if source == "both":
        assert torch.equal(make(kind).pick(labelled()).loss, model.pick(labelled()).loss)


@pytest.mark.parametrize("source", CANDIDATES)
def test_the_loss_takes_the_log_of_how_often_an_item_is_in_a_batch_from_its_score(source: Negatives) -> None:
    model = make(SASRec, negatives_from=source, correction=True)
    assert model.frequency is not None
    model.frequency = type(model.frequency)()  # `make` has trained a step
    model.train()
    for step, drawn in ((3, 6), (1, 6), (2, 8)):  # the items of a step, and of an example of label 0
        model.pick(Batch(batch_of([step], items=[drawn]).ids, labels={"click": torch.zeros(1)}))
    found = model.pick(labelled()).loss.item()
    # An item that was first in the batch n is expected once in n batches. Of one that is met again, the gap
    # since then counts a 20th. One that was never met counts as if the batch 5 had it first.
    gaps = dict.fromkeys(range(10), 5.0)
    if source != "sampled":
        gaps |= {1: 2.0, 2: 3 + (1 - 3) / 20, 3: 1 + (3 - 1) / 20, 4: 4.0, 5: 4.0}
    if source != "batch":
        gaps |= {6: 1 + (2 - 1) / 20, 8: 3.0}
    expected = {item: 1 / gap for item, gap in gaps.items()}
    assert found == pytest.approx(loss_by_hand(model, CANDIDATES[source], expected), rel=1e-5)
    assert found != pytest.approx(loss_by_hand(model, CANDIDATES[source], EVEN), rel=1e-2)


def test_all_steps_of_a_batch_share_the_negatives_that_are_drawn_for_it() -> None:
    model = make(SASRec, negatives=2)
    of_subset = {some: loss_by_hand(model, list(some), EVEN) for some in combinations(CANDIDATES["both"], 2)}
    torch.manual_seed(0)
    drawn = set()
    for _ in range(60):
        found = model.pick(labelled()).loss.item()
        near = [some for some, loss in of_subset.items() if loss == pytest.approx(found, rel=1e-5)]
        assert len(near) == 1
        drawn |= set(near)
    assert len(drawn) > 10  # of 15: they are drawn anew for each batch


def test_negatives_are_drawn_by_the_pipeline_next_to_the_histories_that_it_builds() -> None:
    """Of each event one negative is made, with the history of its user and the item of an earlier event."""
    events = {"user": [1] * 40, "item": [n % 8 for n in range(40)], "time": list(range(100, 140))}
    spec = FeatureSpec(
        features={
            "user": IdFeature(),
            "item": IdFeature(),
            "history": HistoryFeature(of="item", max=3, by="user"),
        },
        labels={"label": Label()},
        event_time="time",
    )
    pool = ItemPoolConfig(start_num=2)
    drawing = NegativeGenerationConfig(neg_num=1, item_features=("item",), item_id="item", pool=pool)
    (history,) = HistoryConfig.from_spec(spec)
    data = Pipeline(MemorySource(events | {"label": [1.0] * 40}, batch_size=10)).history(history)
    batches = list(data.transform(NegativeGeneration(drawing)).to_batches(spec))
    model = SASRec(spec, dim=8, negatives_from="sampled", optimizer=Sgd(learning_rate=1.0))
    rows = EmbeddingOptimizer([model.embeddings])
    for batch in batches:
        click = batch.labels["label"]
        assert 0 < (click == 0).sum() <= (click > 0).sum()
        model.pick(batch).loss.backward()
        rows.step()
    assert model.pick(batches[-1]).loss > 0
    wanted_alone = replace(batches[-1], labels={"label": torch.ones(len(batches[-1]))})
    assert model.pick(wanted_alone).loss == 0  # nothing was drawn


def test_the_correction_follows_how_often_an_item_is_in_a_batch() -> None:
    model = make(SASRec, correction=True).train()
    for number in range(20):
        model.pick(batch_of([1], items=[2 if number % 2 else 3]))
    assert model.frequency is not None
    assert model.frequency(torch.tensor([1, 2])).diff().item() < -0.3  # 1 is in every batch, 2 in each second


def test_companions_of_steps_are_added() -> None:
    model = make(SASRec, WITH_ACTIONS)
    assert model.user_features == ("history", "history.action")
    one, other = (
        batch_of([1, 2], items=[3], history__action=ragged(actions)) for actions in ([7, 7], [7, 8])
    )
    assert not torch.allclose(model.users(one), model.users(other))
    with pytest.raises(FeatureError, match=r"'history.action' has 1 steps, and 'history' 2"):
        model.users(batch_of([1, 2], items=[3], history__action=ragged([7])))


def test_a_state_is_asked_for_when_the_next_step_happens() -> None:
    times = ragged([10, 20, 50], [], [70])
    ids = FeatureIds.pack(
        {"history": ragged([1, 2, 3], [], [4]), "history.time": times},
        event_times=torch.tensor([90, 91, 92]),
    )
    found, asked = step_times(ids, "history", times.row_splits)
    assert found is not None
    assert asked is not None
    assert found.tolist() == [10, 20, 50, 70]
    assert asked.tolist() == [20, 50, 90, 92]
    unknown = step_times({"history.time": times}, "history", times.row_splits)[1]
    assert unknown is not None
    assert unknown.tolist() == [20, 50, 50, 70]


def test_time_counts_for_hstu_alone() -> None:
    times = [ragged([10, 20]), ragged([10, 9000])]
    one, other = (batch_of([1, 2], items=[3], history__time=one) for one in times)
    assert not torch.allclose(make(HSTU).users(one), make(HSTU).users(other))
    assert torch.equal(make(SASRec).users(one), make(SASRec).users(other))
    assert torch.equal(make(HSTU, time_buckets=0).users(one), make(HSTU, time_buckets=0).users(other))


@pytest.mark.parametrize("kind", MODELS)
def test_every_part_of_a_model_gets_a_gradient(kind: Any) -> None:
    model = kind(WITH_ACTIONS, dim=8)
    batch = batch_of([1, 2, 3], [], items=[3, 4], history__action=ragged([1, 2, 1], []))
    rows = EmbeddingOptimizer([model.embeddings])
    model.pick(batch).loss.backward()
    rows.step()
    assert {name for name, one in model.named_parameters() if one.grad is None} == set()
    stats = model.embeddings.store.stats()
    assert {name: one.rows for name, one in stats.items()} == {"action": 2, "item": 4}


@pytest.mark.parametrize(
    ("features", "settings", "message"),
    [
        (["item"], {}, "SASRec: needs a history"),
        ([*FEATURES, Feature(name="more", shares="item", combiner=Each())], {}, "name one as history"),
        (FEATURES, {"history": "item"}, "'item' is no feature of which each ID is kept; there are history"),
        ([Feature(name="history", combiner=Each())], {}, "must share the rows of the feature"),
        ([Feature(name="item", dim=4), FEATURES[1]], {}, "'item' has dim 4, and a step has 8"),
        (FEATURES, {"steps": "first"}, 'steps must be "all" or "last"'),
        (FEATURES, {"negatives": 0}, "negatives must be at least 1"),
        (
            FEATURES,
            {"negatives_from": "drawn"},
            "negatives_from must be one of batch, sampled, both, got 'drawn'",
        ),
        (NO_LABELS, {"negatives_from": "sampled"}, 'SASRec: negatives_from = "sampled" takes the items'),
        (FEATURES, {"temperature": 0.0}, "temperature must be above 0"),
        (FEATURES, {"similarity": "l2"}, "similarity must be one of dot, cosine"),
    ],
)
def test_what_makes_no_sense_is_refused(features: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(SASRec, features, **settings)
    with pytest.raises(TypeError, match="unexpected keyword argument 'negatvies'"):
        SASRec(FEATURES, negatvies=3)  # type: ignore[call-arg]


def test_models_without_histories_refuse_one() -> None:
    from monolith import DeepFM, DeepInterest

    for kind in (DeepFM, DeepInterest):
        with pytest.raises(ConfigError, match="each ID of feature 'history' is kept"):
            kind(FEATURES)
