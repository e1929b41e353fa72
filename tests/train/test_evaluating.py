"""A run is evaluated while it trains; the best is kept, and one that gets no better stops."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.fleets import Tallied, run_fleet
from torch import nn
from train.tasks import Clicks, rows_of

from monolith.checkpoint import list_checkpoints, named_checkpoint, read_best, roll_back
from monolith.errors import ConfigError, DataError, MonolithError, RestoreError
from monolith.feature import Batch
from monolith.runtime import LocalRun, Trainer, TrainReport
from monolith.runtime.evaluate_hook import EvaluateHook
from monolith.train import (
    EvaluateConfig,
    Hook,
    KeepConfig,
    Mode,
    Outputs,
    SaveConfig,
    StepResult,
    TrainConfig,
    TrainingRun,
)
from monolith.train.evaluating import BestSoFar

TASK = Clicks(batch_size=16)


def train(task: Clicks, folder: Path | str, *hooks: Hook, **config: Any) -> TrainReport:
    settings: dict[str, Any] = {"save": SaveConfig(steps=5), "summary_every_steps": None, **config}
    return Trainer(task, TrainConfig(model_dir=str(folder), **settings), hooks=hooks).train()


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "eval" / "metrics.jsonl").read_text().splitlines()]


class Fail(Hook):
    def __init__(self, step: int) -> None:
        self._step = step

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        if result.step == self._step:
            raise RuntimeError("as if it were killed")


class Note(Hook):
    """Remembers the model as it was at the end."""

    def end(self, run: Any) -> None:
        run.session.drain()
        module = run.session.model.module
        self.seen = (
            rows_of(module),
            {name: weight.tolist() for name, weight in module.state_dict().items()},
            [one.training for one in module.modules()],
        )


class _Tell(Hook):
    def __init__(self, step: list[int]) -> None:
        self._step = step

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        self._step[0] = result.step


@dataclass(frozen=True)
class Scripted(Clicks):
    """Its loss on held data is what a script says of the step."""

    batch_size: int = 8
    script: dict[int, float] = field(default_factory=dict)
    at: list[int] = field(default_factory=lambda: [0])

    def chief_hooks(self, mode: Mode) -> list[Hook]:  # noqa: ARG002
        return [_Tell(self.at)]

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        found = super().outputs(model, batch)
        if model.training:
            return found
        return Outputs(torch.tensor(self.script.get(self.at[0], 9.0)), found.predictions)


BY_LOSS = EvaluateConfig(every_steps=4, metric="loss", at_end=False, steps=1)


# When, and on what


def test_a_run_is_evaluated_every_so_many_steps_on_held_data_as_its_checkpoints_would_be(
    tmp_path: Path,
) -> None:
    report = train(TASK, tmp_path, evaluate=EvaluateConfig(every_steps=5), keep=KeepConfig(max_to_keep=0))
    found = lines(tmp_path)
    assert [line["step"] for line in found] == [5, 10, 15, 20]
    reader = Trainer(TASK, TrainConfig(model_dir=str(tmp_path)))
    for line in found:
        read = reader.evaluate(checkpoint=str(tmp_path / f"model.ckpt-{line['step']}"))
        assert line["examples"] == read.pop("examples") == 1000
        assert line["metrics"] == read
    assert report.evaluations == 4
    assert report.evaluation is not None
    assert dict(report.evaluation.metrics) == found[-1]["metrics"]


def test_what_is_trained_is_the_same_with_and_without_evaluations(tmp_path: Path) -> None:
    task, seen = Clicks(dropout=0.5, threshold=2), []
    for evaluate in (EvaluateConfig(), EvaluateConfig(every_steps=5)):
        note = Note()
        train(task, tmp_path / str(evaluate.enabled), note, evaluate=evaluate, deterministic=True)
        seen.append(note.seen)
    assert seen[0] == seen[1]


def test_a_run_is_evaluated_by_the_clock(tmp_path: Path) -> None:
    now = [0.0]
    made: list[EvaluateHook] = []

    class Tick(Hook):
        def before_step(self, run: TrainingRun) -> None:  # noqa: ARG002
            now[0] += 60

    def hooks(run: LocalRun) -> list[Hook]:
        config = EvaluateConfig(every=timedelta(minutes=5), steps=1, at_end=False)
        made.append(EvaluateHook(run.session, config, BestSoFar(config), clock=lambda: now[0]))
        return [Tick(), *made]

    config = TrainConfig(model_dir=str(tmp_path), summary_every_steps=None, steps=14)
    Trainer(TASK, config, hooks=hooks).train()
    assert made[0].evaluations == 2
    assert made[0].latest is not None
    assert (made[0].latest.step, made[0].latest.examples) == (10, 16)


def test_the_end_is_evaluated_too_unless_the_run_is_interrupted(tmp_path: Path) -> None:
    evaluate = EvaluateConfig(every_steps=8)
    train(TASK, tmp_path / "ended", evaluate=evaluate)
    assert [line["step"] for line in lines(tmp_path / "ended")] == [8, 16, 20]

    class Interrupt(Hook):
        def after_step(self, run: Any, result: StepResult) -> None:
            if result.step == 10:
                run.interrupt("SIGINT")

    train(TASK, tmp_path / "stopped", Interrupt(), evaluate=evaluate)
    assert [line["step"] for line in lines(tmp_path / "stopped")] == [8]


def test_a_run_that_keeps_nothing_is_evaluated_all_the_same() -> None:
    report = Trainer(TASK, TrainConfig(evaluate=EvaluateConfig(every_steps=10))).train()
    assert report.evaluations == 2
    assert report.best is not None


def test_an_evaluation_that_is_interrupted_is_left_unfinished(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Interrupting(Clicks):
        sessions: list[Any] = field(default_factory=list)

        def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
            if not model.training:
                self.sessions[0].interrupt("SIGINT")
            return super().outputs(model, batch)

    class Hand(Hook):
        def begin(self, run: TrainingRun) -> None:
            task.sessions.append(run)

    task = Interrupting()
    report = train(task, tmp_path, Hand(), evaluate=EvaluateConfig(every_steps=8))
    assert (report.step, report.stop_reason, report.finished) == (8, "SIGINT", False)
    assert report.evaluation is None


# What is the best


def compared(config: EvaluateConfig, *values: float, name: str = "loss") -> BestSoFar:
    best = BestSoFar(config)
    for step, value in enumerate(values, 1):
        best.take(step, {"click/auc": 0.5, name: value})
    return best


def test_less_loss_is_better_and_more_auc() -> None:
    assert compared(replace(BY_LOSS), 0.5, 0.3, 0.4).step == 2
    assert compared(EvaluateConfig(every_steps=1), 0.5, 0.7, 0.6, name="click/auc").step == 2
    assert compared(EvaluateConfig(every_steps=1, metric="ne"), 0.5, 0.3, 0.4, name="click/ne").step == 2
    assert compared(replace(BY_LOSS, mode="max"), 0.5, 0.3, 0.4).step == 1


def test_what_is_better_by_less_than_min_delta_is_not_better() -> None:
    best = compared(replace(BY_LOSS, min_delta=0.1), 0.5, 0.45, 0.39, 0.35)
    assert (best.step, best.since) == (3, 1)


def test_a_fall_within_an_epoch_does_not_stop_a_run_of_several() -> None:
    best = BestSoFar(replace(BY_LOSS, patience=2))
    for step, loss in enumerate((0.5, 0.6, 0.7, 0.65), 1):
        best.take(step, {"loss": loss}, passes=0.25)
        assert not best.gives_up
    best.take(5, {"loss": 0.6}, passes=0.25)
    assert best.gives_up  # a whole pass since the best, and none better


def test_how_far_the_best_is_back_survives_a_restart() -> None:
    best, again = BestSoFar(replace(BY_LOSS, patience=1)), BestSoFar(replace(BY_LOSS, patience=1))
    best.take(1, {"loss": 0.5}, passes=0.5)
    best.take(2, {"loss": 0.6}, passes=0.5)
    again.restore(best.state())
    assert not again.gives_up
    again.take(3, {"loss": 0.6}, passes=0.5)
    assert again.gives_up


def test_nan_is_never_the_best() -> None:
    best = compared(BY_LOSS, math.nan, 0.5, math.nan)
    assert (best.step, best.since) == (2, 1)


def test_a_metric_that_no_evaluation_has_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no metric 'click/acu'; .*Did you mean"):
        train(TASK, tmp_path, evaluate=EvaluateConfig(every_steps=5, metric="click/acu", mode="max"))
    assert not (tmp_path / "checkpoint").exists()
    with pytest.raises(ConfigError, match="'other/auc'"):
        BestSoFar(EvaluateConfig(every_steps=1, metric="other/auc")).take(1, {"click/auc": 0.5})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"every_steps": 0}, "every_steps must be at least 1"),
        ({"every": timedelta(0)}, "above 0"),
        ({"every_steps": 1, "every": timedelta(1)}, "give one of them"),
        ({"every_steps": 1, "every_epochs": 1}, "every_steps and every_epochs"),
        ({"patience": 2}, "set every_steps, every_epochs or every"),
        ({"every_steps": 1, "min_delta": -1.0}, "negative"),
        ({"every_steps": 1, "metric": "calibration"}, "set mode"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EvaluateConfig(**wrong)


def test_a_deterministic_run_is_not_evaluated_by_the_clock() -> None:
    with pytest.raises(ConfigError, match=r"set evaluate\.every_steps"):
        TrainConfig(deterministic=True, evaluate=EvaluateConfig(every=timedelta(minutes=1)))


# The best checkpoint


def test_the_best_is_saved_named_and_never_deleted_by_the_number_to_keep(tmp_path: Path) -> None:
    task = Scripted(script={4: 0.5, 8: 0.3, 12: 0.4, 16: 0.6, 20: 0.5})
    report = train(
        task, tmp_path, evaluate=BY_LOSS, save=SaveConfig(steps=3), keep=KeepConfig(max_to_keep=1, every=None)
    )
    found = list_checkpoints(str(tmp_path)).checkpoints
    assert [(one.step, "best" in one.marks) for one in found] == [(8, True), (20, False)]
    assert named_checkpoint(str(tmp_path), "best") == str(tmp_path / "model.ckpt-8")
    assert report.best is not None
    assert (report.best.step, report.best.metric, report.best.value) == (8, "loss", pytest.approx(0.3))
    best = read_best(str(tmp_path))
    assert best is not None
    assert (best.step, best.metric, best.value) == (8, "loss", pytest.approx(0.3))


def test_increments_that_the_best_needs_are_kept_with_it(tmp_path: Path) -> None:
    train(
        Scripted(script={4: 0.5, 8: 0.3}),
        tmp_path,
        evaluate=BY_LOSS,
        save=SaveConfig(steps=2),
        keep=KeepConfig(max_to_keep=1, every=None, full_every=3),
    )
    best = next(one for one in list_checkpoints(str(tmp_path)).checkpoints if "best" in one.marks)
    assert (best.step, best.problem) == (8, None)


def test_a_best_that_is_on_disk_already_is_named_and_not_written_again(tmp_path: Path) -> None:
    task = Scripted(script={20: 0.1})  # of the end, which was saved by its step
    evaluate = EvaluateConfig(every_steps=7, metric="loss")
    report = train(task, tmp_path, evaluate=evaluate)
    assert report.best is not None
    assert report.best.step == 20
    again = train(task, tmp_path, evaluate=evaluate)  # its checkpoint does not know of that evaluation
    assert again.best == report.best
    assert named_checkpoint(str(tmp_path), "best") == str(tmp_path / "model.ckpt-20")


def test_a_run_that_keeps_no_best_saves_as_ever(tmp_path: Path) -> None:
    train(TASK, tmp_path, evaluate=EvaluateConfig(every_steps=4, keep_best=False))
    assert [one.step for one in list_checkpoints(str(tmp_path)).checkpoints] == [5, 10, 15, 20]
    with pytest.raises(RestoreError, match=r"no evaluation has named.*train\.evaluate"):
        named_checkpoint(str(tmp_path), "best")


def test_a_rollback_to_best_is_refused_because_best_changes(tmp_path: Path) -> None:
    train(Scripted(script={4: 0.1}), tmp_path, evaluate=BY_LOSS)
    with pytest.raises(RestoreError, match=r"name model\.ckpt-4 instead"):
        roll_back(str(tmp_path), "best")


# Stopping early


def test_a_run_that_gets_no_better_stops_and_does_not_continue_when_started_again(tmp_path: Path) -> None:
    evaluate = replace(BY_LOSS, patience=2)
    task = Scripted(script={4: 0.5, 8: 0.6, 12: 0.5, 16: 0.1})
    report = train(task, tmp_path, evaluate=evaluate)
    assert (report.step, report.finished) == (12, True)
    assert report.stop_reason == (
        "stopped early: 2 evaluations had no better loss; the best, 0.500000, was at step 4"
    )
    again = train(task, tmp_path, evaluate=evaluate)
    assert (again.steps, again.stop_reason) == (0, report.stop_reason)
    more = train(task, tmp_path, evaluate=replace(evaluate, patience=3))
    assert (more.step, more.best and more.best.step) == (20, 16)


@pytest.mark.parametrize("killed_at", [5, 8, 14])
def test_evaluations_are_the_same_through_a_kill(tmp_path: Path, killed_at: int) -> None:
    script = {4: 0.5, 8: 0.3, 12: 0.4, 16: 0.35, 20: 0.2}
    whole = train(Scripted(script=script), tmp_path / "whole", evaluate=replace(BY_LOSS, patience=2))
    with pytest.raises(RuntimeError, match="killed"):
        train(
            Scripted(script=script),
            tmp_path / "cut",
            Fail(killed_at),
            evaluate=replace(BY_LOSS, patience=2),
            save=SaveConfig(steps=3),
        )
    report = train(Scripted(script=script), tmp_path / "cut", evaluate=replace(BY_LOSS, patience=2))
    assert (report.step, report.best) == (whole.step, whole.best)
    assert report.stop_reason == whole.stop_reason
    assert read_best(str(tmp_path / "cut")) == read_best(str(tmp_path / "whole"))
    assert [line["step"] for line in lines(tmp_path / "cut")] == [4, 8, 12, 16]


def test_a_kill_between_the_save_of_the_best_and_its_name_loses_nothing(tmp_path: Path) -> None:
    task = Scripted(script={4: 0.5, 8: 0.3})
    train(task, tmp_path, evaluate=BY_LOSS, steps=8)
    (tmp_path / "best_checkpoint").unlink()
    train(task, tmp_path, evaluate=BY_LOSS, steps=1)
    assert named_checkpoint(str(tmp_path), "best") == str(tmp_path / "model.ckpt-8")


# Among others


def test_the_chief_of_a_fleet_evaluates_and_saves_the_best_while_its_workers_are_paused(
    tmp_path: Path,
) -> None:
    task = Tallied(batches=24)
    outcome = run_fleet(
        task, tmp_path, evaluate=EvaluateConfig(every_steps=6, steps=2), keep=KeepConfig(max_to_keep=0)
    )
    report = outcome.chief
    assert report.evaluations >= 2
    assert report.best is not None
    assert outcome.report(1).evaluations == 0
    found = lines(tmp_path)
    best = next(line for line in found if line["step"] == report.best.step)
    # What was evaluated is what was saved: nobody took a step in between.
    read = Trainer(task, TrainConfig(model_dir=str(tmp_path))).evaluate(
        steps=2, checkpoint=named_checkpoint(str(tmp_path), "best")
    )
    assert best["metrics"]["loss"] == pytest.approx(read["loss"], rel=1e-5)


@dataclass(frozen=True)
class HeldBack(Clicks):
    """Its evaluation data is what a test wants."""

    held: Any = None

    def dataset(self, mode: Mode) -> Any:
        return super().dataset(mode) if mode is Mode.TRAIN else self.held()


def missing_file() -> Any:
    raise DataError("held.csv is not there")


@pytest.mark.parametrize(
    ("held", "config", "words"),
    [
        (missing_file, {}, "held.csv is not there"),
        (list, {}, r"dataset\(Mode.EVALUATE\) has no examples"),
        (lambda: Clicks().dataset(Mode.EVALUATE), {"metric": "clik/auc"}, "Did you mean 'click/auc'"),
    ],
)
def test_the_evaluation_is_checked_on_its_first_batch_before_anything_is_trained(
    tmp_path: Path, held: Any, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(MonolithError, match=words):
        train(HeldBack(held=held), tmp_path, evaluate=EvaluateConfig(at_end=True, every_steps=100, **config))
    assert not list(tmp_path.glob("model.ckpt-*"))


def test_an_evaluation_that_fails_at_the_end_leaves_the_checkpoint(tmp_path: Path) -> None:
    opened: list[int] = []

    def once() -> Any:
        opened.append(1)
        return Clicks().dataset(Mode.EVALUATE) if len(opened) == 1 else missing_file()

    with pytest.raises(DataError, match="not there"):
        train(HeldBack(held=once), tmp_path, evaluate=EvaluateConfig(at_end=True, every_steps=100))
    assert list(tmp_path.glob("model.ckpt-20.manifest"))
