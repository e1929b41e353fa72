"""Models that are made of a feature spec: its ids, its numbers, its rows, and the spec itself."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from data.lists import records

from monolith.errors import ConfigError
from monolith.feature import (
    CONCAT,
    ROW_OPTIMIZER,
    BucketFeature,
    CrossFeature,
    Each,
    FeatureSpec,
    FirstN,
    FloatFeature,
    HistoryFeature,
    IdFeature,
    Label,
    Layout,
    Mean,
    SequenceFeature,
)
from monolith.model import (
    DLRM,
    FFM,
    DCNv2,
    DeepFM,
    DeepInterest,
    EmbeddingCollection,
    EmbeddingOptimizer,
    Feature,
    FeatureSet,
    MMoE,
    TwoTower,
)
from monolith.table import Adagrad, Ftrl

SPEC = FeatureSpec(
    features={
        "user": IdFeature(kind="string", bias_optimizer=Ftrl(learning_rate=0.3), occurrence_threshold=1),
        "item": IdFeature(learning_rate=0.5, bias_learning_rate=0.25, expire_after=timedelta(days=1)),
        "price": FloatFeature(scale="log"),
        "age": BucketFeature(boundaries=(18.0, 30.0)),
        "both": CrossFeature(of=("user", "item")),
        "clicked": SequenceFeature(length=2, shares="item", combiner="mean", times="at"),
    },
    labels={"click": Label(), "like": Label()},
    event_time="now",
)
SOME = records(
    user=[[b"ann"], [b"bob"]],
    item=[[1], [2]],
    price=[[2.0], [3.0]],
    age=[[17.0], [40.0]],
    clicked=[[2, 1, 2], []],
    at=[[1, 2, 3], []],
    now=[[10], [20]],
    click=[[1.0], [0.0]],
    like=[[0.0], [1.0]],
)
IDS = ("user", "item", "age", "both", "clicked", "clicked.gap")


@pytest.mark.parametrize("make", [DeepFM, DCNv2, DLRM, lambda spec: FFM(spec, [("user", "item", 4)])])
def test_a_ready_model_takes_a_spec_for_features_and_floats(make: Any):
    model = make(SPEC)
    logits = model(SPEC.make(SOME))
    assert logits.shape == (2,)
    assert model.spec is SPEC
    logits.sum().backward()


def test_a_model_of_many_tasks_takes_those_of_the_labels():
    model = MMoE(SPEC)
    assert set(model(SPEC.make(SOME))) == {"click", "like"}
    assert model.embeddings.features == tuple(sorted(IDS))


def test_what_the_spec_says_of_rows_holds():
    chosen = FeatureSet(SPEC, bias=True)
    assert chosen.names == IDS
    user, item = chosen.column("user").slot.config, chosen.column("item").slot.config
    assert (user.bias_optimizer, user.optimizer) == (Ftrl(learning_rate=0.3), ROW_OPTIMIZER)
    assert (item.learning_rate, item.bias_learning_rate) == (0.5, 0.25)
    assert (user.occurrence_threshold, item.expire_after) == (1, timedelta(days=1))
    assert chosen.column("clicked").slot is chosen.column("item").slot
    assert chosen["clicked"].combiner == chosen["clicked.gap"].combiner == Mean()


def test_fids_give_slots_their_numbers():
    spec = FeatureSpec(features={"user": IdFeature(), "item": IdFeature(slot=7)}, labels={}, fids=True)
    chosen = FeatureSet(spec)
    assert chosen["item"].slot_id == 7
    assert chosen["user"].slot_id == spec.slots["user"]


def test_a_sequence_without_a_combiner_keeps_its_places():
    spec = FeatureSpec(features={"seen": SequenceFeature(length=3)}, labels={})
    assert FeatureSet(spec)["seen"].combiner == FirstN(3)
    with pytest.raises(ConfigError, match="keeps its first ids"):
        DeepFM(spec)


HISTORY = FeatureSpec(
    features={
        "product": IdFeature(dim=4),
        "item": IdFeature(shares="product"),
        "action": IdFeature(),
        "history": HistoryFeature(of="item", max=2, with_=("action", "now")),
    },
    labels={"click": Label()},
    optional=("click",),
    event_time="now",
)


def test_the_lists_of_a_history_keep_each_id_and_read_the_rows_of_what_they_list():
    chosen = FeatureSet(HISTORY)
    assert chosen.names == ("product", "item", "action", "history", "history.action")
    assert [chosen[name].combiner for name in chosen.names[3:]] == [Each(), Each()]
    assert chosen.column("history").slot is chosen.column("product").slot
    assert chosen.column("history.action").slot is chosen.column("action").slot
    columns = {"product": [[7], [8]], "item": [[1], [2]], "action": [[3], [4]], "now": [[10], [20]]}
    columns |= {
        "history": [[9, 7, 8], []],
        "history.action": [[5, 3, 4], []],
        "history.time": [[1, 2, 3], []],
    }
    batch = HISTORY.make(records(**columns))
    read = EmbeddingCollection(
        [Layout(name, CONCAT, chosen.slices([name], "vector", 4)) for name in chosen.names]
    )(batch)
    assert read["history"].row_splits.tolist() == [0, 2, 2]
    assert torch.equal(read["history"].flat_values, read["product"])  # items 7 and 8
    assert torch.equal(read["history.action"].flat_values, read["action"])


@pytest.mark.parametrize("make", [DeepFM, DCNv2, MMoE, DeepInterest, partial(TwoTower, item=["item"])])
def test_a_model_of_one_embedding_a_feature_reads_a_history(make: Any):
    columns = {"product": [[7], [8]], "item": [[1], [2]], "action": [[3], [4]], "now": [[10], [20]]}
    columns |= {
        "history": [[9, 7, 8], []],
        "history.action": [[5, 3, 4], []],
        "history.time": [[1, 2, 3], []],
    }
    model = make(HISTORY, dim=4)
    scores = model(HISTORY.make(records(**columns)))
    loss = sum(one.sum() for one in scores.values()) if isinstance(scores, dict) else scores.sum()
    loss.backward()
    assert {"history", "history.action"} <= set(model.embeddings.features)


def test_features_may_differ_in_width_where_nothing_multiplies_them():
    spec = FeatureSpec(features={"user": IdFeature(dim=3), "item": IdFeature()}, labels={})
    batch = spec.make(records(user=[[1]], item=[[2]]))
    model = DCNv2(spec, dim=5)
    assert model.segments == {"user": 3, "item": 5}
    assert model(batch).shape == (1,)
    with pytest.raises(ConfigError, match=r"feature 'user' has dim 3.*16 wide"):
        DeepFM(spec)


def test_floats_are_said_by_the_spec_alone():
    with pytest.raises(ConfigError, match="leave `floats` out"):
        DeepFM(SPEC, floats={"price": 1})


def test_a_feature_sets_its_bias_apart():
    plain = Feature(name="user", bias_optimizer=Adagrad(learning_rate=0.7), bias_learning_rate=0.1)
    model = DeepFM([plain, "item"], dim=2)
    bias, vector = model.embeddings.slot_tables.configs["user"].segments
    assert bias.optimizer == Adagrad(learning_rate=0.7)
    assert bias.learning_rate == 0.1
    assert vector.optimizer == ROW_OPTIMIZER
    with pytest.raises(ConfigError, match="sets bias_optimizer: set it on 'item'"):
        Feature(name="user", shares="item", bias_optimizer=Adagrad())


def test_weights_of_items_reach_the_model():
    spec = FeatureSpec(features={"tags": IdFeature(weights="w")}, labels={})
    model = DCNv2(spec, dim=2, seed=1)
    batch = spec.make(records(tags=[[1], [1]], w=[[2.0], [1.0]]))
    sparse = EmbeddingOptimizer(model)
    model(batch).sum().backward()
    sparse.step()  # a row is born by its first update
    twice, once = model.embeddings(batch)["vectors"]
    torch.testing.assert_close(twice, 2 * once)
    assert bool(once.any())
