"""How experiments train and judge a model: the parts of a set, recipes, epochs and streams."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from monolith.data import DataConfig
from monolith.model.by_name import ModelConfig
from monolith.runtime.config_task import ConfigTask
from monolith.table import Adagrad
from monolith_bench.collisions import click_log
from monolith_bench.learner import (
    Learner,
    Recipe,
    TwoAucs,
    aucs,
    early_stopped,
    make_model,
    mean_and_error,
    one_id_each,
    parts,
)
from monolith_bench.public_sets import click_examples

SMALL = Recipe(settings={"dim": 4, "hidden": (4,)}, batch=100)


def test_a_random_split_has_every_rating_once_and_another_seed_others() -> None:
    train, valid, test = parts(1_000, "random", seed=0)
    assert [len(train), len(valid), len(test)] == [800, 100, 100]
    assert torch.equal(torch.cat([train, valid, test]).sort().values, torch.arange(1_000))
    assert not torch.equal(parts(1_000, "random", seed=1)[2], test)


def test_a_time_split_trains_on_the_past() -> None:
    train, valid, test = parts(1_000, "time", seed=3)
    assert train.max() < valid.min()
    assert valid.max() < test.min()


def test_scoring_teaches_nothing_and_the_same_seed_gives_the_same_model() -> None:
    ratings = click_log(500)
    some = torch.arange(400, 500)
    one, other = Learner(SMALL, ratings, seed=1), Learner(SMALL, ratings, seed=1)
    one.scores(some)
    for learner in (one, other):
        learner.train(torch.arange(400))
    assert torch.equal(one.scores(some), other.scores(some))


def test_a_stream_predicts_each_batch_before_it_learns_from_it() -> None:
    ratings = click_log(300)
    learner = Learner(SMALL, ratings, seed=0)
    untrained = learner.scores(torch.arange(100))
    found = learner.predict_then_train(torch.arange(300))
    assert torch.equal(found[:100], untrained)
    assert not torch.equal(found[:100], learner.scores(torch.arange(100)))


def test_the_outcome_is_that_of_the_epoch_that_was_best_on_valid() -> None:
    def stopped(most: int) -> TwoAucs:
        return early_stopped(Learner(SMALL, click_log(2_000), 0), "random", 0, most=most, patience=4)

    found = stopped(4)
    assert stopped(found.epoch) == found
    assert 1 <= found.epoch <= 4


def test_training_stops_when_valid_was_no_better_for_a_while() -> None:
    still = replace(Recipe.of_rows(Adagrad(learning_rate=0.0)), dense_rate=0.0).but(dim=4, hidden=(4,))
    learner = Learner(still, click_log(1_000), 0)
    assert early_stopped(learner, "time", 0, most=50, patience=2).epoch == 1


def test_one_pass_gives_both_later_parts() -> None:
    found = aucs("stream", SMALL, click_log(2_000), seed=0)
    assert 0.4 < found.valid < 1
    assert 0.4 < found.test < 1


def test_a_recipe_without_settings_is_what_a_file_without_them_trains() -> None:
    features = one_id_each(("user", "item"))
    read = ConfigTask(features=features, network=ModelConfig(type="deepfm"), data=DataConfig(path="unread"))
    assert (Recipe().batch, Recipe().dense_rate) == (read.batch_size, read.dense_rate)
    torch.manual_seed(7)
    own, files = make_model(Recipe(), features, 7), read.model()
    for one, other in zip(own.parameters(), files.parameters(), strict=True):
        assert torch.equal(one, other)
    tables = [model.embeddings.slot_tables.configs for model in (own, files)]  # type: ignore[union-attr]
    assert tables[0] == tables[1]


def test_settings_that_a_model_does_not_have_are_left_out() -> None:
    recipe = Recipe.of_rows(Adagrad(learning_rate=0.3)).but(dim=4)  # FFM has no dim, DCNv2 no biases
    for kind in ("ffm", "dcnv2"):
        make_model(recipe, one_id_each(("user", "item")), 0, kind=kind)


@pytest.mark.parametrize("kind", ["deepfm", "dcnv2", "dlrm", "ffm", "mmoe", "din", "sequence_ranker"])
def test_every_ready_model_of_clicks_can_be_trained(kind: str) -> None:
    made = click_examples(600).made_for(kind, "random", 0)
    assert made is not None
    learner = Learner(Recipe(), made, 0, kind=kind)
    untrained = learner.scores(torch.arange(10))
    learner.train(torch.arange(10, 600))
    assert not torch.equal(learner.scores(torch.arange(10)), untrained)


def test_the_error_is_that_of_the_mean() -> None:
    assert mean_and_error([1.0, 2.0, 3.0]) == pytest.approx((2.0, 1 / math.sqrt(3)))
    assert math.isnan(mean_and_error([1.0])[1])
