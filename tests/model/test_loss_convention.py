"""One convention of a loss: a mean over the examples trains the same, however the loop is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from train.tasks import rows_of

from monolith.data import ClickLog, ClickLogConfig, DriftConfig, DriftingStream, Pipeline
from monolith.data.synthetic.drift import SPEC
from monolith.feature import Batch
from monolith.model import DeepFM, EmbeddingOptimizer, UpdateConfig, apply_gradients
from monolith.nn import sigmoid_loss_and_pred
from monolith.table import Adagrad, Sgd
from monolith.train import Hook, Mode, Outputs, StepResult, Task, TrainConfig, Trainer, TrainingRun

SEED = 3


@dataclass(frozen=True)
class Readme(Task):
    """README's model and loss, in a task."""

    size: int = 96

    def dataset(self, mode: Mode) -> Any:  # noqa: ARG002
        stream = DriftingStream(DriftConfig(examples=20 * self.size, batch_size=self.size))
        return Pipeline(stream).to_batches(SPEC)

    def model(self) -> nn.Module:
        return DeepFM(SPEC.ids, dim=8, hidden=(16,), optimizer=Adagrad(learning_rate=0.1), threads=1)

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        loss, click = sigmoid_loss_and_pred(model(batch), batch.label)
        assert loss is not None
        return Outputs(loss, {"click": click})

    def dense_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.002)


class Watch(Hook):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rows: Any = None

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        self.losses.append(float(result.loss))

    def end(self, run: Any) -> None:
        run.session.drain()
        self.rows = rows_of(run.session.model.module)


def own_loop(task: Readme) -> tuple[list[float], Any]:
    torch.manual_seed(SEED)
    model = task.model()
    sparse, dense = EmbeddingOptimizer(model), task.dense_optimizer(model)
    losses = []
    for batch in task.dataset(Mode.TRAIN):
        loss, _ = sigmoid_loss_and_pred(model(batch), batch.label)
        assert loss is not None
        loss.backward()  # type: ignore[no-untyped-call]
        sparse.step(), dense.step()
        sparse.zero_grad(), dense.zero_grad()
        losses.append(loss.item())
    return losses, rows_of(model)


def test_the_readmes_loss_in_a_task_trains_the_same_bits_as_in_a_loop() -> None:
    watch = Watch()
    config = TrainConfig(seed=SEED, prefetch=0, async_push=False, deterministic=True)
    Trainer(Readme(), config, hooks=[watch]).train()
    losses, rows = own_loop(Readme())
    assert watch.losses == losses
    assert watch.rows == rows


def trained_row(loss: Any, examples: int, config: UpdateConfig | None = None, **options: Any) -> float:
    """Return the bias of an id that one example has, after a step of plain descent at a rate of 1."""
    one = Sgd(learning_rate=1.0)
    model = DeepFM(["user"], dim=4, hidden=(), optimizer=one, bias_optimizer=one, threads=1)
    sparse = EmbeddingOptimizer(model, **options)
    logits = model({"user": torch.arange(examples)})
    if config is None:
        loss(logits, torch.ones(examples)).backward()
        sparse.step()
    else:
        apply_gradients(loss(logits, torch.ones(examples)), sparse, None, config)
    store: Any = model.embeddings.store
    return float(store.table("user").lookup(torch.tensor([0]))[0, 0])


def mean_loss(logits: torch.Tensor, label: torch.Tensor) -> Any:
    return sigmoid_loss_and_pred(logits, label).loss


@pytest.mark.parametrize("config", [None, UpdateConfig()])
def test_how_far_a_row_goes_does_not_depend_on_the_size_of_the_batch(config: UpdateConfig | None) -> None:
    assert trained_row(mean_loss, 1, config) == pytest.approx(0.5)
    assert trained_row(mean_loss, 7, config) == pytest.approx(0.5)
    assert trained_row(mean_loss, 64, config) == pytest.approx(0.5)


def test_rows_can_be_trained_by_the_loss_as_it_is() -> None:
    assert trained_row(mean_loss, 64, multiply_rows_by=1) == pytest.approx(0.5 / 64)
    assert trained_row(mean_loss, 64, UpdateConfig(multiply_rows_by=1)) == pytest.approx(0.5 / 64)


def test_each_of_several_passes_counts_its_own_examples() -> None:
    one = Sgd(learning_rate=1.0)
    model = DeepFM(["user"], dim=4, hidden=(), optimizer=one, bias_optimizer=one, threads=1)
    sparse = EmbeddingOptimizer(model)
    for ids in (torch.arange(4), torch.arange(4, 20)):
        mean_loss(model({"user": ids}), torch.ones(len(ids))).backward()
    sparse.step()
    store: Any = model.embeddings.store
    found = store.table("user").lookup(torch.arange(20))[:, 0]
    torch.testing.assert_close(found, torch.full((20,), 0.5))


def test_the_loop_learns() -> None:
    log = ClickLog(ClickLogConfig(users=1000, items=200))
    model = DeepFM(["user", "item", "context"], dim=8, threads=1)
    sparse, dense = EmbeddingOptimizer(model), torch.optim.Adam(model.parameters(), lr=0.002)
    losses = []
    for batch in log.batches(100, 512):
        loss = mean_loss(model(batch), batch.label)
        loss.backward()
        sparse.step(), dense.step()
        sparse.zero_grad(), dense.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-20:]) / 20 < sum(losses[:5]) / 5 - 0.01
