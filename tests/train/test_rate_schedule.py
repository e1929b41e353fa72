"""Learning rates that move with the step, as settings: of dense weights, and of rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from train.tasks import Clicks

from monolith.config import config_from_mapping
from monolith.errors import ConfigError
from monolith.runtime import Trainer
from monolith.train import Hook, SaveConfig, ScheduleConfig, TrainConfig

WARM = ScheduleConfig(kind="warmup", warmup_steps=3)
COSINE = ScheduleConfig(kind="cosine", warmup_steps=1, steps=4, end=0.2)
STEP = ScheduleConfig(kind="step", steps=2, factor=0.1)


@pytest.mark.parametrize(
    "schedule, factors",
    [
        (ScheduleConfig(), [1.0] * 6),
        (WARM, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        (COSINE, [0.5, 1.0, 0.8828, 0.6, 0.3172, 0.2]),
        (STEP, [1.0, 1.0, 0.1, 0.1, 0.01, 0.01]),
    ],
)
def test_a_schedule_is_a_factor_of_the_rate_at_each_step(
    schedule: ScheduleConfig, factors: list[float]
) -> None:
    assert [schedule.at(step) for step in range(6)] == pytest.approx(factors, abs=1e-4)


@pytest.mark.parametrize(
    "settings, problem",
    [
        ({"kind": "warmup"}, "needs warmup_steps"),
        ({"kind": "cosine"}, "needs steps"),
        ({"kind": "step", "steps": 0}, "needs steps"),
        ({"steps": 3}, "steps is for cosine and step"),
        ({"warmup_steps": -1}, "warmup_steps must be 0 or more"),
        ({"kind": "cosine", "steps": 3, "end": 2.0}, "end must be from 0 to 1"),
        ({"kind": "step", "steps": 3, "factor": 0.0}, "factor must be above 0"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ScheduleConfig(**settings)


def test_a_config_file_names_the_kind_and_its_fields() -> None:
    read = config_from_mapping(
        TrainConfig, {"schedule": {"kind": "step", "steps": 2, "factor": 0.1}}, "run.toml"
    )
    assert read.schedule == STEP


@dataclass(frozen=True)
class PlainClicks(Clicks):
    """Trained by plain SGD, so that a rate of 0 moves nothing."""

    def dense_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.5)


class Rates(Hook):
    """The dense rate of each step, and the row rate that the next one would have."""

    def __init__(self) -> None:
        self.dense: list[float] = []
        self.rows: list[float] = []

    def before_step(self, run: Any) -> None:
        run.session.drain()
        model = run.session.model
        self.dense.append(model.dense.param_groups[0]["lr"])
        (store,) = model.stores
        self.rows.append(store.table(next(iter(store.tables))).config.learning_rates(run.step)[0])


def rates(schedule: ScheduleConfig | None, folder: Path | None = None, **how: Any) -> Rates:
    watch = Rates()
    config = TrainConfig(
        schedule=schedule,
        model_dir="" if folder is None else str(folder),
        save=SaveConfig(steps=2),
        prefetch=0,
        **how,
    )
    Trainer(PlainClicks(), config, hooks=[watch]).train()
    return watch


def test_dense_weights_follow_the_schedule_and_rows_where_they_are_to() -> None:
    dense = rates(STEP, max_steps=5)
    assert dense.dense == pytest.approx([0.5, 0.5, 0.05, 0.05, 0.005])
    assert len(set(dense.rows)) == 1
    both = rates(ScheduleConfig(kind="step", steps=2, factor=0.1, rows=True), max_steps=5)
    assert both.rows == pytest.approx([dense.rows[0] * factor for factor in (1, 1, 0.1, 0.1, 0.01)])


def test_a_resumed_run_is_where_its_schedule_was(tmp_path: Path) -> None:
    rates(COSINE, tmp_path, max_steps=3)
    again = rates(COSINE, tmp_path, max_steps=6)
    assert again.dense == pytest.approx([0.5 * COSINE.at(step) for step in (3, 4, 5)])


def test_a_task_with_a_schedule_of_its_own_is_not_given_another() -> None:
    class Own(PlainClicks):
        def dense_schedule(self, optimizer: torch.optim.Optimizer) -> Any:
            return torch.optim.lr_scheduler.ConstantLR(optimizer)

    with pytest.raises(ConfigError, match="both move the rates of dense weights"):
        Trainer(Own(), TrainConfig(schedule=STEP)).train()


def test_rows_of_a_store_that_the_model_has_itself_cannot_follow() -> None:
    class Bound(PlainClicks):
        def model(self) -> nn.Module:
            model = super().model()
            model.embeddings.store  # noqa: B018  makes one
            return model

    with pytest.raises(ConfigError, match="a store that the model brings along"):
        Trainer(
            Bound(), TrainConfig(schedule=ScheduleConfig(kind="warmup", warmup_steps=1, rows=True))
        ).train()
