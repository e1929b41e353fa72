"""Features become slots, columns and slices."""

from __future__ import annotations

import hashlib
from datetime import timedelta

import pytest
import torch

from monolith.errors import ConfigError, DuplicateNameError, FeatureError, UnknownFeatureError
from monolith.feature import CONCAT, FirstN, Layout, Mean, Sum
from monolith.model import ROW_OPTIMIZER, EmbeddingCollection, Feature, FeatureSet
from monolith.table import Adagrad, AdmissionConfig, Constant, Fp32, Ftrl, RandomUniform, Sgd, Zeros


def spans(uses: list) -> list[tuple[int, int]]:
    return [(use.start, use.end) for use in uses]


# A feature


def test_a_feature_is_a_name_and_the_rest_is_the_models_default() -> None:
    slot = FeatureSet(["user"]).column("user").slot
    assert (slot.name, slot.config.optimizer, slot.config.initializer) == (
        "user",
        ROW_OPTIMIZER,
        RandomUniform(),
    )
    assert slot.config.occurrence_threshold == 0
    assert slot.config.expire_after == timedelta(days=36500)


def test_what_a_feature_says_reaches_its_slot() -> None:
    item = Feature(
        name="item",
        combiner=Mean(),
        slot="goods",
        occurrence_threshold=3,
        admission=AdmissionConfig(capacity=1000),
        expire_after=timedelta(days=30),
        slot_id=7,
        optimizer=Sgd(),
        initializer=Constant(0.5),
        learning_rate=0.25,
        capacity_bytes=1 << 20,
    )
    column = FeatureSet([item], optimizer=Adagrad(), initializer=Zeros(), compressor=Fp32()).column("item")
    config = column.slot.config
    assert column.combiner == Mean()
    assert (config.name, config.slot_id, config.occurrence_threshold) == ("goods", 7, 3)
    assert config.admission == AdmissionConfig(capacity=1000)
    assert (config.expire_after, config.capacity_bytes) == (timedelta(days=30), 1 << 20)
    assert (config.optimizer, config.initializer, config.learning_rate) == (Sgd(), Constant(0.5), 0.25)
    assert config.compressor == Fp32()


@pytest.mark.parametrize(
    "settings, problem",
    [
        ({"name": ""}, "name"),
        ({"name": "a", "occurrence_threshold": -1}, "occurrence_threshold"),
        ({"name": "a", "expire_after": timedelta(-1)}, "expire_after"),
        ({"name": "a", "slot_id": 1 << 15}, "slot_id"),
        ({"name": "a", "capacity_bytes": 0}, "capacity_bytes"),
    ],
)
def test_a_feature_checks_itself(settings: dict, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Feature(**settings)


# Sharing


def test_features_that_share_rows_have_one_slot_and_a_combiner_each() -> None:
    features = FeatureSet(["item", Feature(name="clicked", shares="item", combiner=FirstN(5))])
    item, clicked = features.column("item"), features.column("clicked")
    assert clicked.slot is item.slot
    assert (item.combiner, clicked.combiner) == (Sum(), FirstN(5))


def test_sharing_may_go_over_several_steps_and_in_any_order() -> None:
    features = FeatureSet([Feature(name="c", shares="b"), Feature(name="b", shares="a"), "a"])
    assert features.column("c").slot is features.column("a").slot
    assert features.column("c").slot.name == "a"


def test_sharing_with_a_feature_that_is_not_there_is_an_error() -> None:
    with pytest.raises(UnknownFeatureError, match="'clicked' shares the rows of 'itm'"):
        FeatureSet(["item", Feature(name="clicked", shares="itm")])


@pytest.mark.parametrize("circle", [{"a": "a"}, {"a": "b", "b": "a"}, {"a": "b", "b": "c", "c": "a"}])
def test_sharing_in_a_circle_is_an_error(circle: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="circle, a -> "):
        FeatureSet([Feature(name=name, shares=shares) for name, shares in circle.items()])


def test_a_feature_that_shares_rows_cannot_say_how_they_are() -> None:
    with pytest.raises(ConfigError, match="sets expire_after, optimizer: set it on 'item'"):
        Feature(name="clicked", shares="item", optimizer=Sgd(), expire_after=timedelta(days=1))


def test_two_features_of_one_name_are_an_error() -> None:
    with pytest.raises(DuplicateNameError, match="'a'"):
        FeatureSet(["a", Feature(name="a", combiner=Mean())])


# Slices


def test_slices_are_added_side_by_side_on_first_use() -> None:
    features = FeatureSet(["user", "item"])
    assert spans(features.slices(["user", "item"], "vector", 4)) == [(0, 4), (0, 4)]
    assert spans(features.slices(["item"], "other", 2)) == [(4, 6)]
    assert (features.column("user").slot.dim, features.column("item").slot.dim) == (4, 6)


def test_the_same_name_is_the_same_slice() -> None:
    features = FeatureSet(["user"])
    features.slices(["user"], "vector", 4)
    assert spans(features.slices(["user"], "vector", 4)) == [(0, 4)]
    assert features.column("user").slot.dim == 4


def test_features_that_share_rows_share_slices() -> None:
    features = FeatureSet(["item", Feature(name="clicked", shares="item")])
    assert spans(features.slices(["clicked", "item"], "vector", 4)) == [(0, 4), (0, 4)]
    assert features.column("item").slot.dim == 4


def test_a_slice_cannot_have_two_widths() -> None:
    features = FeatureSet(["item", Feature(name="clicked", shares="item")])
    features.slices(["item"], "vector", 4)
    with pytest.raises(FeatureError, match="'clicked': slice 'vector' of slot 'item' has 4 floats, and 8"):
        features.slices(["clicked"], "vector", 8)


def test_a_slice_may_be_trained_in_its_own_way() -> None:
    features = FeatureSet(["item"], optimizer=Adagrad())
    features.slices(["item"], "vector", 4)
    features.slices(["item"], "memory", 2, optimizer=Sgd(), initializer=Zeros(), learning_rate=0.5)
    first, second = features.column("item").slot.segments
    assert (first.optimizer, second.optimizer, second.initializer) == (Adagrad(), Sgd(), Zeros())
    assert second.learning_rate == 0.5


def test_a_feature_that_is_not_there_is_named_with_its_nearest() -> None:
    features = FeatureSet(["user", "item"])
    with pytest.raises(UnknownFeatureError, match="there is no feature 'itm'; did you mean 'item'"):
        features.slices(["itm"], "vector", 4)
    with pytest.raises(UnknownFeatureError, match="there are user, item"):
        features.column("xyz")


# Biases


def test_rows_begin_with_a_bias_where_one_is_wanted() -> None:
    features = FeatureSet(["a", "b"], bias=["a"], bias_optimizer=Ftrl())
    features.slices(["a", "b"], "vector", 4)
    assert spans(features.bias(["a"])) == [(0, 1)]
    assert (features.column("a").slot.dim, features.column("b").slot.dim) == (5, 4)
    assert features.column("a").slot.segments[0].optimizer == Ftrl()
    with pytest.raises(FeatureError, match="slot 'b' has no bias"):
        features.bias()


def test_a_feature_that_shares_rows_has_their_bias() -> None:
    for bias in (True, ["clicked"]):
        features = FeatureSet(["item", Feature(name="clicked", shares="item")], bias=bias)
        assert spans(features.bias()) == [(0, 1), (0, 1)]


# Layouts


def test_a_layout_is_named_by_its_slice_and_a_digest_of_its_features() -> None:
    features = FeatureSet(["b", "a"])
    layout = features.lookup_embedding_slice(["b", "a"], "vector", 4, CONCAT)
    assert layout.name == "vector_" + hashlib.md5(b"a,b").hexdigest()
    assert [use.column.feature for use in layout.slices] == ["b", "a"]  # the order is the caller's
    assert EmbeddingCollection([layout]).shapes == {layout.name: (8,)}


def test_the_features_train_in_a_collection() -> None:
    features = FeatureSet(["item", Feature(name="clicked", shares="item")], initializer=Constant(1.0))
    vectors = features.slices(features.names, "vector", 2)
    embeddings = EmbeddingCollection([Layout("vectors", CONCAT, vectors)])
    embeddings.store.table("item").assign(torch.tensor([7]), torch.tensor([[1.0, 2.0]]))
    read = embeddings({"item": torch.tensor([7]), "clicked": torch.tensor([[7, 7]])})["vectors"]
    assert read.tolist() == [[1.0, 2.0, 2.0, 4.0]]
