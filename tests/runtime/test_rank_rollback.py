"""After an alert all ranks go back to one checkpoint, and on from it as if nothing had been."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.fleets import read_model
from runtime.rank_data import Given, batch_of
from runtime.rank_runs import quiet, train_ranks
from torch import Tensor

from monolith.errors import MonolithError, UnavailableError
from monolith.feature import Batch
from monolith.model import UpdateConfig
from monolith.runtime import LocalRun, lockstep
from monolith.train import AlertConfig, Hook, SaveConfig, StepResult, TrainConfig, TrainingRun

STEPS = 9
GOING_BACK = AlertConfig(action="rollback", every_steps=1, warmup_checks=1, max_rollbacks=1)


class Bad:
    """A loss that is bad on one rank, for its sixth batch, for so many times."""

    def __init__(self, factor: float, times: int = 1) -> None:
        self._factor = factor
        self._left = times

    def __call__(self, model: Any, vectors: Tensor, batch: Batch) -> Tensor:
        loss: Tensor = (model.top(vectors).squeeze(1) - batch.labels["y"]).square().mean()
        if batch.labels["y"].eq(6).any() and self._left:
            self._left -= 1
            return loss * self._factor
        return loss


def tasks(bad: list[Bad]) -> list[Given]:
    return [
        Given(
            dense=True,
            update=UpdateConfig(),
            loss=one,
            batches=[
                batch_of([rank, 7], [step], labels={"y": torch.tensor([1.0, float(step)])})
                for step in range(1, STEPS + 1)
            ],
        )
        for rank, one in enumerate(bad)
    ]


class Steps(Hook):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        self.seen.append(run.step)


def settings(model_dir: Path, **options: Any) -> TrainConfig:
    options = {"prefetch": 0, "alert": GOING_BACK, "save": SaveConfig(steps=3), **options}
    return quiet(TrainConfig(model_dir=str(model_dir), async_push=options["prefetch"] > 0), **options)


NAN, HUGE = float("nan"), 1e6


@pytest.mark.parametrize(
    ("bad", "prefetch", "num_ps"),
    [
        ((HUGE, 1), 0, 0),
        ((HUGE, 1), 2, 0),
        ((1, NAN), 0, 0),
        ((1, NAN), 2, 0),
        ((1, 1, NAN), 1, 0),
        ((HUGE, 1), 1, 2),
        ((1, NAN), 0, 1),
    ],
)
def test_all_go_back_together_and_learn_what_they_would_have_learned(
    bad: tuple[float, ...], prefetch: int, num_ps: int, tmp_path: Path
) -> None:
    """Whichever rank it came from: a loss that exploded on the one that leads, or is NaN on any."""
    seen = [Steps() for _ in bad]

    def hooks(rank: int, run: LocalRun) -> list[Hook]:  # noqa: ARG001
        return [seen[rank]]

    config = settings(tmp_path / "bad", prefetch=prefetch)
    reports = train_ranks(tasks([Bad(factor) for factor in bad]), config, hooks=hooks, num_ps=num_ps)
    well = train_ranks(tasks([Bad(1) for _ in bad]), replace(config, model_dir=str(tmp_path / "well")))
    assert [report.step for report in reports] == [report.step for report in well] == [STEPS] * len(bad)
    assert reports[0].examples == well[0].examples, "what was trained twice counts once"
    assert all(one.seen[-6:] == [4, 5, 6, 7, 8, 9] for one in seen)
    assert all(len(one.seen) > STEPS for one in seen)
    found, wanted = (read_model(Given(dense=True), tmp_path / name) for name in ("bad", "well"))
    assert (found.rows, found.weights) == (wanted.rows, wanted.weights)


def test_where_no_rank_can_take_a_step_any_more_all_go_back(tmp_path: Path) -> None:
    config = settings(tmp_path, max_skipped_in_a_row=0)
    reports = train_ranks(tasks([Bad(1), Bad(NAN)]), config)
    assert [report.step for report in reports] == [STEPS] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_data_hangs_loses_no_record_by_going_back(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All begin again from the same checkpoint instead, with data that is opened anew."""
    monkeypatch.setattr(lockstep, "CLOSE_WITHIN", 0.1)
    ends = threading.Event()
    given = tasks([Bad(HUGE), Bad(1)])
    # Each has read the seventh ahead, or tries to, when the sixth turns out bad.
    given[rank] = replace(given[rank], wait=lambda number: ends.wait(60) if number == 6 else None)
    try:
        with pytest.raises(
            UnavailableError, match=f"rank {rank} cannot roll back: its data is still being read"
        ):
            train_ranks(given, settings(tmp_path))
    finally:
        ends.set()


def test_one_rollback_too_many_ends_all(tmp_path: Path) -> None:
    with pytest.raises(MonolithError, match="again after 1 rollbacks"):
        train_ranks(tasks([Bad(HUGE, times=2), Bad(1)]), settings(tmp_path))
