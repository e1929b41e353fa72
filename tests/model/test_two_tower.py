"""TwoTower: a vector for the user, one for the item, and a softmax that trains them."""

from __future__ import annotations

import pytest
import torch

from monolith.errors import ConfigError
from monolith.feature import (
    Batch,
    FeatureIds,
    FeatureSpec,
    FloatFeature,
    IdFeature,
    Label,
    SequenceFeature,
)
from monolith.model import EmbeddingOptimizer, TwoTower
from monolith.nn import accidental_hits, sampled_softmax_loss

SPEC = FeatureSpec(
    features={
        "user": IdFeature(),
        "seen": SequenceFeature(length=3, combiner="mean", shares="item"),
        "item": IdFeature(),
        "price": FloatFeature(),
    },
    labels={"click": Label()},
    group="user",
)


def batch(users: list[int], items: list[int], click: list[float] | None = None) -> Batch:
    ids = FeatureIds.pack({"user": torch.tensor(users), "item": torch.tensor(items)})
    floats = {"price": torch.arange(float(len(items)))[:, None]}
    return Batch(ids, floats, {} if click is None else {"click": torch.tensor(click)})


def model(**settings: object) -> TwoTower:
    made = TwoTower(SPEC, item=("item", "price"), dim=4, hidden=(8,), out=3, **settings)  # type: ignore[arg-type]
    some = torch.Generator().manual_seed(1)
    for table in ("user", "item"):  # ids without a row read as zeros
        rows = torch.randn(400, 4, generator=some)
        made.embeddings.store.table(table).assign(torch.arange(400), rows)  # type: ignore[attr-defined]
    return made


def test_a_score_is_the_product_of_the_vectors_of_user_and_item() -> None:
    towers, some = model(), batch([1, 2], [7, 8])
    users, items = towers.users(some), towers.items(some)
    assert users.shape == items.shape == (2, 3)
    torch.testing.assert_close(towers(some), (users * items).sum(1))


def test_a_cosine_has_vectors_of_length_one_and_a_temperature() -> None:
    towers, some = model(similarity="cosine"), batch([1, 2], [7, 8])
    users, items = towers.users(some), towers.items(some)
    torch.testing.assert_close(items.norm(dim=1), torch.ones(2))
    torch.testing.assert_close(towers(some), (users * items).sum(1) / 0.1)


def test_each_tower_reads_its_own_features_and_the_user_tower_all_others() -> None:
    towers = model()
    assert towers.item_features == ("item", "price")
    assert towers.user_features == ("user", "seen")
    first, second = batch([1, 2], [7, 8]), batch([3, 4], [7, 8])
    torch.testing.assert_close(towers.items(first), towers.items(second))
    assert not torch.equal(towers.users(first), towers.users(second))


def test_items_need_no_user_in_the_batch() -> None:
    towers, whole = model(), batch([1, 2], [7, 8])
    alone = Batch(FeatureIds.pack({"item": torch.tensor([7, 8])}), whole.floats)
    torch.testing.assert_close(towers.items(alone), towers.items(whole))


def test_a_table_of_items_is_read_by_the_item_side_of_the_spec() -> None:
    spec = model().item_spec
    assert list(spec.features) == ["item", "price"]
    assert not spec.labels
    assert list(spec.columns) == ["item", "price"]


def test_the_loss_picks_each_positive_out_of_the_batch() -> None:
    towers, some = model(correction=False), batch([1, 2, 3], [7, 8, 7])
    scores = towers.users(some) @ towers.items(some).t()
    hits = accidental_hits(torch.tensor([7, 8, 7]), torch.tensor([7, 8, 7]))
    picked = towers.pick(some)
    torch.testing.assert_close(picked.loss, sampled_softmax_loss(scores, torch.arange(3), hits=hits))
    torch.testing.assert_close(picked.scores, scores.diagonal())


def test_what_a_user_wanted_elsewhere_in_the_batch_is_no_negative() -> None:
    one = model(correction=False).pick(batch([1, 1], [7, 8]))
    assert one.loss.item() == 0  # nothing is left to be told apart from
    two = model(correction=False).pick(batch([1, 2], [7, 8]))
    assert two.loss.item() > 0


@pytest.mark.parametrize(
    ("negatives", "first", "second"),
    [("batch", [0, 1], [1, 0]), ("sampled", [0, 2], [1, 2]), ("both", [0, 1, 2], [1, 0, 2])],
)
def test_negatives_are_of_the_batch_or_drawn_or_both(
    negatives: str, first: list[int], second: list[int]
) -> None:
    towers = model(correction=False, negatives=negatives)
    some = batch([1, 2, 1], [7, 8, 9], [1, 1, 0])  # the last was drawn
    scores = towers.users(some) @ towers.items(some).t()
    losses = [-scores[0, first].log_softmax(0)[0], -scores[1, second].log_softmax(0)[0]]
    torch.testing.assert_close(towers.pick(some).loss, torch.stack(losses).mean())


def test_with_the_correction_an_item_of_every_batch_is_penalized_less() -> None:
    towers = model()
    optimizer = torch.optim.SGD(towers.parameters(), lr=0.0)  # nothing learns: only counts change
    for step in range(30):
        towers.pick(batch([1, 2, 3], [100, 200 + step, 300 + step])).loss.backward()
        optimizer.step()
    assert towers.frequency is not None
    often, once = towers.frequency(torch.tensor([100, 229])).exp().tolist()
    assert often == pytest.approx(1.0)
    assert once < 0.1
    some = batch([1, 2], [100, 229])
    towers.eval()
    corrected = towers.users(some) @ towers.items(some).t() - torch.tensor([often, once]).log()
    expected = -corrected.log_softmax(1).diagonal().mean()
    torch.testing.assert_close(towers.pick(some).loss, expected)


def test_evaluating_counts_nothing() -> None:
    towers = model().eval()
    towers.pick(batch([1], [7]))
    assert towers.frequency is not None
    assert towers.frequency.step == 0


def test_it_learns_which_users_want_which_items() -> None:
    towers = TwoTower(["user", "item"], item=("item",), dim=8, hidden=(), out=8)
    sparse, dense = EmbeddingOptimizer(towers), torch.optim.Adam(towers.parameters(), lr=0.01)
    draw = torch.Generator().manual_seed(0)
    for _ in range(150):
        users = torch.randint(0, 40, (64,), generator=draw)
        items = users % 10 + 10 * torch.randint(0, 5, (64,), generator=draw)  # who ends in 3 likes 3, 13, ...
        towers.pick(Batch(FeatureIds.pack({"user": users, "item": items}))).loss.backward()
        for optimizer in (sparse, dense):
            optimizer.step()
            optimizer.zero_grad()
    towers.eval()
    everybody = towers.users({"user": torch.arange(40)})
    everything = towers.items({"item": torch.arange(50)})
    best = (everybody @ everything.t()).topk(5).indices
    assert (best % 10 == torch.arange(40)[:, None] % 10).float().mean() > 0.9


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no feature 'itme'; did you mean 'item'"):
        TwoTower(SPEC, item=("itme",))
    with pytest.raises(ConfigError, match="'user' is in both towers"):
        TwoTower(SPEC, user=("user",), item=("item", "user"))
    with pytest.raises(ConfigError, match="user tower: needs at least one feature"):
        TwoTower(["item"], item=("item",))
    with pytest.raises(ConfigError, match="item_id: 'price' is no feature of ids"):
        TwoTower(SPEC, item=("item", "price"), item_id="price")
    with pytest.raises(ConfigError, match="temperature must be above 0"):
        model(temperature=0.0)
    with pytest.raises(ConfigError, match="similarity must be one of dot, cosine, got 'angle'"):
        model(similarity="angle")
    with pytest.raises(ConfigError, match="made of features by hand"):
        TwoTower(["user", "item"], item=("item",)).item_spec  # noqa: B018
