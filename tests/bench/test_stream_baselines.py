"""What the ready models are compared with in streams: a DeepFM of plain torch, and classifiers of river."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from monolith.errors import ConfigError
from monolith_bench import stream_baselines
from monolith_bench.learner import StreamLearner, streamed
from monolith_bench.public_sets import Examples, click_examples
from monolith_bench.stream_baselines import BASELINES, PlainDeepFM, RiverLearner, river


class Mean:
    """A classifier as river's: it predicts the share of likes of an input so far."""

    def __init__(self) -> None:
        self.seen: dict[str, list[bool]] = defaultdict(list)
        self.read: list[dict[str, float]] = []

    def predict_proba_one(self, read: dict[str, float]) -> dict[bool, float]:
        past = [liked for name in read for liked in self.seen[name]]
        share = sum(past) / len(past) if past else 0.5
        return {True: share, False: 1 - share}

    def learn_one(self, read: dict[str, float], liked: bool) -> None:
        self.read.append(read)
        for name in read:
            self.seen[name].append(liked)


def mean_learner(monkeypatch: pytest.MonkeyPatch, data: Examples, batch: int) -> tuple[RiverLearner, Mean]:
    model = Mean()
    monkeypatch.setattr(stream_baselines, "river", lambda: None)
    return RiverLearner(data, 0, batch, make=lambda _package, _seed: model), model


def of_torch() -> list[str]:
    return list(BASELINES["torch deepfm"])


def torch_learner(said: str, data: Examples, batch: int = 50) -> StreamLearner:
    return BASELINES["torch deepfm"][said](data, 0, batch)


def with_like(data: Examples, place: int) -> Examples:
    """Return the examples with another label at a place."""
    likes = data.likes.clone()
    likes[place] = 1 - likes[place]
    return replace(data, likes=likes)


@pytest.mark.parametrize("said", of_torch())
def test_torch_predicts_each_batch_before_it_learns_from_it(said: str) -> None:
    data = click_examples(200)
    plain, changed = (
        torch_learner(said, one).predict_then_train(torch.arange(200)) for one in (data, with_like(data, 60))
    )
    assert torch.equal(plain[:100], changed[:100])
    assert not torch.equal(plain[100:], changed[100:])


@pytest.mark.parametrize("said", of_torch())
def test_torch_learns_what_it_has_seen(said: str) -> None:
    data = click_examples(100)
    learner = torch_learner(said, data, batch=100)
    everything = torch.arange(100)

    def loss() -> float:
        logits = learner.predict_then_train(everything)  # trains, too
        return float(torch.nn.functional.binary_cross_entropy_with_logits(logits, data.likes))

    first = loss()
    for _ in range(20):
        last = loss()
    assert last < first


def test_the_plain_deepfm_sums_biases_products_of_pairs_and_an_mlp() -> None:
    model = PlainDeepFM([3, 4], numbers=2, dim=2, hidden=(5,))
    (users, items), (of_user, _) = model.vectors, model.biases
    torch.nn.init.constant_(of_user.weight, 0.25)  # type: ignore[arg-type]
    user, item = users(torch.tensor(2)), items(torch.tensor(1))
    numbers = torch.tensor([[0.5, -1.0]])
    deep = model.mlp(torch.cat([user[None], item[None], numbers], 1)).squeeze()
    found = model(torch.tensor([[2, 1]]), numbers).squeeze()
    torch.testing.assert_close(found, 0.25 + (user * item).sum() + deep)


def test_river_reads_a_name_for_each_id_and_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    data = click_examples(3)
    learner, model = mean_learner(monkeypatch, data, batch=1)
    learner.train(torch.arange(3))
    assert data.numbers is not None
    assert model.read[2] == {
        **{f"{name}_{int(ids[2])}": 1.0 for name, ids in data.ids.items()},
        "number0": float(data.numbers[2, 0]),
        "number1": float(data.numbers[2, 1]),
    }


@pytest.mark.parametrize("batch", [1, 2])
def test_river_learns_after_each_batch(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Examples(ids={"user": torch.tensor([7, 7, 7])}, likes=torch.tensor([1.0, 0.0, 1.0]))
    learner, _ = mean_learner(monkeypatch, data, batch)
    found = learner.predict_then_train(torch.arange(3)).tolist()
    assert found == ([0.5, 1.0, 0.5] if batch == 1 else [0.5, 0.5, 0.5])


def test_a_baseline_is_judged_as_a_ready_model_is() -> None:
    found = streamed(torch_learner("Adam 0.01", click_examples(2_000)), seed=0)
    assert 0.4 < found.valid < 1
    assert not math.isnan(found.test)


def test_without_river_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "river", None)
    with pytest.raises(ConfigError, match="pip install river"):
        river()


@pytest.mark.parametrize("said", [(name, said) for name in BASELINES for said in BASELINES[name]], ids=str)
def test_every_baseline_can_be_made(said: tuple[str, str]) -> None:
    name, settings = said
    if name.startswith("river"):
        pytest.importorskip("river")
    data = click_examples(40)
    assert len(BASELINES[name][settings](data, 0, 8).predict_then_train(torch.arange(40))) == 40
