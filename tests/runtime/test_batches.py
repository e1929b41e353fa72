"""What a step does with its batch: rows are looked up once, and the caller's random numbers stay his."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from train.tasks import Clicks

from monolith.feature import Batch
from monolith.runtime import Trainer
from monolith.train import Hook, Mode, Outputs, StepResult, TrainConfig, TrainingRun


@dataclass(frozen=True)
class Changed(Clicks):
    """Hands its model another batch than it was given."""

    change: Any = None

    def model(self) -> nn.Module:
        model: Any = super().model()
        lookup, model.lookups = model.embeddings.store.lookup, []

        def counted(keys: Any) -> Any:
            model.lookups.append(len(keys.ids))
            return lookup(keys)

        model.embeddings.store.lookup = counted
        return model  # type: ignore[no-any-return]

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        return super().outputs(model, self.change(batch))


class Watch(Hook):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.lookups: list[int] = []

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        self.losses.append(float(result.loss))

    def end(self, run: Any) -> None:
        self.lookups = run.session.model.module.lookups


def watched(change: Any, **config: Any) -> Watch:
    watch = Watch()
    task = Changed(change=change, batches=12)
    Trainer(task, TrainConfig(deterministic=True, **config), hooks=[watch]).train()
    return watch


def relabelled(batch: Batch) -> Batch:
    return replace(batch, labels={name: 1 - label for name, label in batch.labels.items()})


def retimed(batch: Batch) -> Batch:
    return replace(batch, ids=replace(batch.ids, event_time=batch.ids.event_time + 1))


def reidentified(batch: Batch) -> Batch:
    ids = batch.ids
    return replace(batch, ids=replace(ids, ids=torch.where(ids.ids % 2 == 0, ids.ids + 1, ids.ids)))


def overwritten(batch: Batch) -> Batch:
    batch.ids.ids.bitwise_or_(1)
    return batch


@pytest.mark.parametrize("change", [relabelled, retimed])
def test_a_changed_batch_of_the_same_ids_is_looked_up_once_and_gives_the_same_bits(change: Any) -> None:
    runs = [watched(change) for _ in range(3)]
    assert all(run.losses == runs[0].losses for run in runs)
    assert all(len(run.lookups) == 12 for run in runs)


@pytest.mark.parametrize("change", [reidentified, overwritten])
def test_changed_ids_are_looked_up_again_and_give_the_same_bits(
    change: Any, caplog: pytest.LogCaptureFixture
) -> None:
    runs = [watched(change) for _ in range(3)]
    assert all(run.losses == runs[0].losses for run in runs)
    assert len(runs[0].lookups) > 12
    assert "looked up a second time" in caplog.text


def test_changed_ids_do_not_read_the_rows_of_others() -> None:
    """Every step trains ids that no earlier step had: rows of the batch as it was would have been trained."""

    def stranger(batch: Batch) -> Batch:
        fresh = batch.ids.ids + (batch.ids.event_time << 20)
        return replace(batch, ids=replace(batch.ids, ids=fresh))

    rows: list[torch.Tensor] = []

    @dataclass(frozen=True)
    class Strange(Changed):
        def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
            changed = stranger(batch)
            model_: Any = model
            rows.append(model_.embeddings(changed)["bias"].detach())
            return Clicks.outputs(self, model, changed)

    Trainer(Strange(batches=10), TrainConfig()).train()
    assert all(not one.any() for one in rows)


# Random numbers


def test_evaluating_and_predicting_leave_the_callers_random_numbers_alone(tmp_path: Path) -> None:
    class Dicing(Clicks):
        """Draws wherever a task may."""

        def dataset(self, mode: Mode) -> Any:
            torch.rand(3)
            return super().dataset(mode)

        def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
            outputs = super().outputs(model, batch)
            return Outputs(outputs.loss + torch.rand(()) * 0, {"click": outputs.predictions["click"]})

    Trainer(Dicing(), TrainConfig(model_dir=str(tmp_path))).train()
    config = TrainConfig(model_dir=str(tmp_path))
    torch.manual_seed(7)
    wanted = [torch.rand(2).tolist() for _ in range(6)]
    torch.manual_seed(7)
    found = [torch.rand(2).tolist()]
    Trainer(Dicing(), config).evaluate(steps=3)
    found.append(torch.rand(2).tolist())
    for _ in Trainer(Dicing(), config).predict(steps=3):
        found.append(torch.rand(2).tolist())  # between two batches, too
    found.append(torch.rand(2).tolist())
    assert found == wanted


def test_an_evaluation_draws_the_same_numbers_for_every_caller(tmp_path: Path) -> None:
    class Noisy(Clicks):
        def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
            outputs = super().outputs(model, batch)
            return replace(outputs, loss=outputs.loss + torch.rand(()))

    config = TrainConfig(model_dir=str(tmp_path))
    Trainer(Clicks(), config).train()
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        losses.append(Trainer(Noisy(), config).evaluate(steps=4)["loss"])
    assert losses[0] == losses[1]
