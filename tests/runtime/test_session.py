"""A session does what its coordinator decides, and does not know which one it has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from train.tasks import Clicks

from monolith.checkpoint.folder.manifest import read_manifest
from monolith.errors import UnavailableError
from monolith.feature import Batch
from monolith.runtime import LocalCoordinator, Trainer
from monolith.runtime.coordinator import (
    Continue,
    Decision,
    Membership,
    Outcome,
    Quiesced,
    Start,
    Stop,
    WorkerProgress,
    WorkerState,
)
from monolith.runtime.local import LocalPlacement
from monolith.train import Hook, Outputs, SaveConfig, TrainConfig, TrainingRun
from monolith.train.hook import StepResult

OTHER = WorkerState(position={"next": 5}, examples=100, skipped=2, event_time=None)


class Steps(Hook):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def after_step(self, run: Any, result: StepResult) -> None:  # noqa: ARG002
        self.steps.append(result.step)


def train(coordinator: LocalCoordinator, **config: Any) -> tuple[list[int], Any]:
    watch = Steps()
    settings = TrainConfig(**{"deterministic": True, "summary_every_steps": None, **config})
    return watch.steps, Trainer(Clicks(), settings, hooks=[watch], coordinator=coordinator).train()


class Busy(LocalCoordinator):
    """Other workers take two steps for each of this process."""

    class BusyPlacement(LocalPlacement):
        def count_step(self, step: int) -> int:
            return step + 3

    placement = BusyPlacement()  # type: ignore[assignment]


def test_the_step_is_what_its_placement_counts() -> None:
    steps, report = train(Busy(), max_steps=10)
    assert steps == [3, 6, 9, 12]
    assert (report.step, report.stop_reason) == (12, "max_steps of 10 was reached")


class Following(LocalCoordinator):
    """The coordinator of the second of two workers, whose chief is at step 40."""

    membership = Membership(index=1, size=2)

    def join(self, restore: Callable[[bool], Start], **_: Any) -> Start | None:  # noqa: ARG002
        return Start(step=40)


def test_under_another_leader_it_resumes_from_its_step_and_keeps_no_files(tmp_path: Path) -> None:
    steps, report = train(Following(), steps=3, model_dir=str(tmp_path / "model"))
    assert steps == [41, 42, 43]
    assert report.checkpoint is None
    assert not (tmp_path / "model").exists()


def test_each_reads_its_share() -> None:
    seen: list[int] = []

    class Look(Hook):
        def after_step(self, run: Any, result: StepResult) -> None:  # noqa: ARG002
            seen.append(result.batch.ids.event_time)

    def times(coordinator: LocalCoordinator) -> list[int]:
        seen.clear()
        Trainer(Clicks(), TrainConfig(steps=4), hooks=[Look()], coordinator=coordinator).train()
        return list(seen)

    assert times(Following())[:2] == times(LocalCoordinator())[1::2]


class Over(LocalCoordinator):
    """A run that is over when this process joins."""

    def join(self, restore: Callable[[bool], Start], **_: Any) -> Start | None:  # noqa: ARG002
        return None


def test_a_run_that_is_over_takes_no_steps() -> None:
    steps, report = train(Over())
    assert (steps, report.stop_reason) == ([], "the run is over")


class Stopping(LocalCoordinator):
    def at_step(self, progress: WorkerProgress) -> Decision:
        return Stop(reason="the others stop") if progress.step == 2 else Continue()


def test_it_stops_when_its_coordinator_says_so() -> None:
    steps, report = train(Stopping())
    assert (steps, report.stop_reason) == ([1, 2, 3], "the others stop")


class Together(LocalCoordinator):
    """One other worker, which reports a state whenever all are quiesced."""

    def quiesce(
        self,
        progress: WorkerProgress,
        drain: Callable[[], None],  # noqa: ARG002
    ) -> AbstractContextManager[Quiesced | None]:
        return nullcontext(Quiesced(step=max(progress.step, 14), others=(OTHER,)))

    def finish(self, outcome: Outcome, progress: WorkerProgress, idle: Callable[[], None]) -> Quiesced | None:  # noqa: ARG002
        idle()
        return Quiesced(step=progress.step, others=(OTHER,))


def test_the_work_of_other_processes_counts(tmp_path: Path) -> None:
    steps, report = train(Together(), steps=4, model_dir=str(tmp_path), save=SaveConfig(steps=4))
    assert steps == [1, 2, 3, 4]
    assert (report.examples, report.skipped) == (4 * 64 + 100, 2)
    assert report.step == 14, "the last save found the model there"


def test_a_checkpoint_holds_the_position_of_each(tmp_path: Path) -> None:
    _, report = train(Together(), steps=4, model_dir=str(tmp_path))
    position = read_manifest(report.checkpoint).manifest.parts["position"]
    assert [one["next"] for one in position["value"]["workers"]] == [4 * 64, 5]


class Losing(LocalCoordinator):
    """A run that loses a worker after the third step."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[BaseException | None] = []

    def at_step(self, progress: WorkerProgress) -> Decision:
        if progress.step == 3:
            raise UnavailableError("worker 1 was lost")
        return super().at_step(progress)

    def leave(self, outcome: Outcome, state: WorkerState | None = None) -> bool:  # noqa: ARG002
        if outcome.failed:
            self.failures.append(outcome.error)
        return False


def test_when_one_is_lost_the_run_fails_and_says_so() -> None:
    coordinator = Losing()
    with pytest.raises(UnavailableError, match="worker 1 was lost"):
        train(coordinator)
    assert [str(error) for error in coordinator.failures] == ["worker 1 was lost"]


def test_a_clean_end_is_not_a_failure() -> None:
    coordinator = Losing()
    train(coordinator, steps=2)
    assert coordinator.failures == []


# Predictions for metrics


class Counted(Clicks):
    """Remembers in which mode its model was run, and what it said."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        object.__setattr__(self, "modes", [])
        object.__setattr__(self, "said", [])

    modes: list[bool]
    said: list[list[float]]

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        found = super().outputs(model, batch)
        self.modes.append(model.training)
        if not model.training:
            self.said.append(found.predictions["click"].tolist())
        return found


def predicted(task: Counted, **config: Any) -> list[list[float]]:
    """Train for three steps; return the predictions that hooks and metrics are given."""

    class Note(Hook):
        def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
            seen.append(result.predictions["click"].tolist())

    seen: list[list[float]] = []
    Trainer(task, TrainConfig(steps=3, **config), hooks=[Note()]).train()
    return seen


def test_metrics_see_what_a_model_with_dropout_says_in_eval_mode() -> None:
    task = Counted(dropout=0.5, batch_size=16)
    assert predicted(task) == task.said
    assert task.modes == [False, True] * 3


def test_a_model_that_says_the_same_in_both_modes_is_run_once() -> None:
    task = Counted(batch_size=16)
    once = predicted(task)
    assert task.modes == [True] * 3
    assert predicted(Counted(batch_size=16), eval_predictions="always") == once


def test_the_second_pass_can_be_left_out_and_changes_nothing_that_is_trained() -> None:
    losses: dict[str, list[float]] = {}
    for asked in ("auto", "never"):
        task = Counted(dropout=0.5, batch_size=16)

        class Note(Hook):
            def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
                losses.setdefault(asked, []).append(float(result.loss))  # noqa: B023

        Trainer(task, TrainConfig(steps=3, eval_predictions=asked, seed=3), hooks=[Note()]).train()
    assert losses["auto"] == losses["never"]
    assert task.modes == [True] * 3
