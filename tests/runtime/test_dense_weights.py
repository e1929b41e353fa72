"""Dense weights of a whole fleet: rates that move, and what is fetched and pushed beside the steps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.fleets import SOON, Model, Tallied, read_model, run_fleet
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from monolith.checkpoint import Checkpointer, Saver
from monolith.errors import ConfigError
from monolith.nn import Adamom, RateSchedule
from monolith.nn.optimizers import EagerAdam
from monolith.runtime import Trainer
from monolith.runtime.checkpoints import newest_checkpoint
from monolith.store.dense_config import DenseConfig
from monolith.table import PolynomialDecay
from monolith.train import Hook, Mode, SaveConfig, StepResult, TrainConfig, TrainingRun
from monolith.train.model import Model as TrainedModel

EXACT: dict[str, Any] = {"deterministic": True, "save": SaveConfig(steps=4), "summary_every_steps": None}
BOTH = DenseConfig(prefetch=True, postpush=True)
MODES = {
    "prefetch": DenseConfig(prefetch=True),
    "postpush": DenseConfig(postpush=True),
    "both": BOTH,
    "both, 3 steps": DenseConfig(prefetch=True, postpush=True, max_staleness=3),
}


def in_one_process(task: Tallied, model_dir: Path, **how: Any) -> Model:
    # Rows of servers are looked up a batch ahead, and so are these.
    Trainer(task, TrainConfig(model_dir=str(model_dir), fresh_rows=False, **EXACT, **how)).train()
    return read_model(task, model_dir)


def on_servers(task: Tallied, model_dir: Path, **how: Any) -> Model:
    run_fleet(task, model_dir, num_ps=2, num_workers=1, **EXACT, **how)
    return read_model(task, model_dir)


# Rates that move

Schedule = Callable[[torch.optim.Optimizer], LRScheduler]
SCHEDULES: dict[str, Schedule] = {
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.7),
    "warm up, then cosine": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 9)],
        milestones=[3],
    ),
    "polynomial": lambda optimizer: RateSchedule(
        optimizer, PolynomialDecay(initial_learning_rate=0.1, decay_steps=9, end_learning_rate=0.001)
    ),
}


@dataclass(frozen=True)
class Scheduled(Tallied):
    batches: int = 10
    schedule: str = "exponential"

    def dense_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return EagerAdam(model.parameters(), lr=0.1)

    def dense_schedule(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        return SCHEDULES[self.schedule](optimizer)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_trains_the_same_bits_on_servers_as_in_one_process(tmp_path: Path, name: str) -> None:
    task = Scheduled(schedule=name)
    alone = in_one_process(task, tmp_path / "alone")
    assert on_servers(task, tmp_path / "fleet").weights == alone.weights
    unmoved = in_one_process(Tallied(batches=10), tmp_path / "unmoved")
    assert alone.weights != unmoved.weights


def test_a_schedule_resumes_where_it_was_saved_there_and_back(tmp_path: Path) -> None:
    task = Scheduled(schedule="warm up, then cosine")
    whole = in_one_process(task, tmp_path / "whole")
    on_servers(task, tmp_path / "parts", max_steps=4)
    in_one_process(task, tmp_path / "parts", max_steps=8)
    assert on_servers(task, tmp_path / "parts").weights == whole.weights


def test_a_schedule_counts_the_steps_of_all_workers(tmp_path: Path) -> None:
    task = Scheduled(schedule="exponential")
    run_fleet(task, tmp_path, num_ps=2, num_workers=2)
    rates = restored(task, tmp_path).param_groups[0]["lr"]
    assert rates == pytest.approx(0.1 * 0.7**task.batches)


def restored(task: Tallied, model_dir: Path) -> torch.optim.Optimizer:
    """Return the optimizer of a run's last checkpoint."""
    prefix = newest_checkpoint(TrainConfig(model_dir=str(model_dir)), "train")
    assert prefix is not None
    with contextlib.closing(TrainedModel(task, Mode.TRAIN, seed=0)) as model:
        Checkpointer(Saver(str(model_dir)), model.parts()).restore(prefix)
        assert model.dense is not None
        return model.dense


@dataclass(frozen=True)
class RateOfTheStep(Tallied):
    batches: int = 8

    def dense_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Adamom(model.parameters(), lr=lambda step: 0.1 / (1 + step))


def test_a_rate_that_is_a_function_of_the_step_trains_the_same_bits(tmp_path: Path) -> None:
    task = RateOfTheStep()
    assert on_servers(task, tmp_path / "a").weights == in_one_process(task, tmp_path / "b").weights


@dataclass(frozen=True)
class MovedByAHook(Tallied):
    """Has a scheduler of its own, as a loop of torch would."""

    batches: int = 8

    def hooks(self, mode: Mode) -> list[Hook]:  # noqa: ARG002
        return [StepsItsSchedule(self.made[-1])]

    @property
    def made(self) -> list[torch.optim.Optimizer]:
        made: list[torch.optim.Optimizer] = MADE.setdefault(threading.current_thread().name, [])
        return made

    def dense_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.made.append(EagerAdam(model.parameters(), lr=0.1))
        return self.made[-1]


MADE: dict[str, list[torch.optim.Optimizer]] = {}


class StepsItsSchedule(Hook):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._schedule = lr_scheduler.ExponentialLR(optimizer, 0.5)

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        self._schedule.step()


def test_a_scheduler_that_a_hook_steps_trains_the_same_bits(tmp_path: Path) -> None:
    task = MovedByAHook()
    alone = in_one_process(task, tmp_path / "b")
    assert on_servers(task, tmp_path / "a").weights == alone.weights


@dataclass(frozen=True)
class OnPlateau(Tallied):
    def dense_schedule(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        return lr_scheduler.ReduceLROnPlateau(optimizer)


def test_a_schedule_that_follows_a_metric_is_refused() -> None:
    with pytest.raises(ConfigError, match="follows a metric"):
        TrainedModel(OnPlateau(), Mode.TRAIN, seed=0)


# Beside the steps


@pytest.mark.parametrize("mode", MODES)
def test_whatever_is_on_its_way_every_record_is_trained_once_and_saved(tmp_path: Path, mode: str) -> None:
    task = Tallied(batches=14)
    outcome = run_fleet(task, tmp_path, dense=MODES[mode], save=SaveConfig(steps=4))
    assert (outcome.chief.step, outcome.chief.examples) == (task.batches, task.records)
    model = read_model(task, tmp_path)
    assert model.step == task.batches
    assert model.tally == dict.fromkeys(range(task.records), 1.0)
    assert outcome.chief.dense_staleness is not None
    assert outcome.chief.dense_staleness >= 1, "it says how old weights were"


@pytest.mark.parametrize("dense", [DenseConfig(prefetch=True), BOTH])
def test_a_run_that_is_restarted_learns_the_same_bits(tmp_path: Path, dense: DenseConfig) -> None:
    task = Scheduled(batches=12)
    whole = on_servers(task, tmp_path / "whole", dense=dense)
    on_servers(task, tmp_path / "parts", dense=dense, max_steps=8)
    assert on_servers(task, tmp_path / "parts", dense=dense) == whole
    assert whole.weights != on_servers(task, tmp_path / "exact").weights, "they are a step old"


def test_a_deterministic_run_refuses_weights_that_depend_on_time(tmp_path: Path) -> None:
    outcome = run_fleet(
        Tallied(), tmp_path, num_workers=1, **EXACT, dense=DenseConfig(postpush=True), abandoned_after=SOON
    )
    assert isinstance(outcome.workers[0], ConfigError)
    assert "dense.max_staleness" in str(outcome.workers[0])
