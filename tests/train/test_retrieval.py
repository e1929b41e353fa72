"""RetrievalTask: trained on its batches, measured among all candidates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from monolith.data import Batches, MemorySource, Pipeline
from monolith.errors import ConfigError
from monolith.feature import Batch, FeatureSpec, IdFeature
from monolith.model import DeepFM, TwoTower
from monolith.runtime import Trainer
from monolith.table import Adagrad
from monolith.train import EvaluateConfig, Mode, RetrievalTask, TrainConfig

SPEC = FeatureSpec(features={"user": IdFeature(), "item": IdFeature()}, optional=("label",), group="user")


class Likes(RetrievalTask):
    """Users and items are alike where they have the same last digit."""

    ks = (5,)

    def dataset(self, mode: Mode) -> Batches:
        users = [n * 7 % 40 for n in range(1600 if mode is Mode.TRAIN else 40)]
        items = [user % 10 + 10 * (n // 40 % 5) for n, user in enumerate(users)]
        return Pipeline(MemorySource({"user": users, "item": items}, batch_size=32)).to_batches(SPEC)

    def candidates(self) -> Batches:
        return Pipeline(MemorySource({"item": list(range(50))}, batch_size=32)).to_batches(
            self.model().item_spec
        )

    def model(self) -> TwoTower:
        return TwoTower(SPEC, item=("item",), dim=8, hidden=(), out=8, optimizer=Adagrad(learning_rate=0.5))

    def dense_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.02)


def test_an_evaluation_ranks_what_was_wanted_among_all_candidates(tmp_path: Path) -> None:
    trainer = Trainer(Likes(), TrainConfig(model_dir=str(tmp_path)))
    assert trainer.train().step == 50
    found = trainer.evaluate()
    assert found["examples"] == 40
    assert found["recall@5"] == found["hit_rate@5"] > 0.7  # 0.9; by chance 0.1
    assert 1 / 5 < found["mrr"] <= 1
    assert found["loss"] > 0


def test_a_run_is_evaluated_by_it_and_keeps_the_best(tmp_path: Path) -> None:
    evaluate = EvaluateConfig(every_steps=25, metric="recall@5")
    report = Trainer(Likes(), TrainConfig(model_dir=str(tmp_path), evaluate=evaluate)).train()
    assert report.evaluations == 2
    assert report.best is not None
    assert report.best.metric == "recall@5"
    assert report.best.value > 0.5


def test_a_metric_that_it_does_not_have_is_refused_before_training() -> None:
    config = TrainConfig(evaluate=EvaluateConfig(every_steps=25, metric="recall@7"))
    with pytest.raises(ConfigError, match=r"no metric 'recall@7'.*recall@5"):
        Trainer(Likes(), config).train()


def test_examples_that_are_not_positive_want_nothing() -> None:
    task, model = Likes(), Likes().model().eval()
    with task.reading(model, Mode.EVALUATE):
        batch = next(iter(task.dataset(Mode.EVALUATE)))
        labels = (torch.arange(32) < 8).float()
        found = task.outputs(model, Batch(batch.ids, {}, {"label": labels})).measures["mrr"]
    assert found.isnan().tolist() == (labels == 0).tolist()
    assert not task.outputs(model, batch).measures  # candidates are gone with the reading


def test_another_model_is_refused() -> None:
    class Wrong(Likes):
        def model(self) -> DeepFM:  # type: ignore[override]
            return DeepFM(SPEC)

    with pytest.raises(ConfigError, match="such as TwoTower or HSTU; its model is a DeepFM"):
        Wrong().outputs(Wrong().model(), next(iter(Likes().dataset(Mode.TRAIN))))
