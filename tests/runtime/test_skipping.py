"""A batch whose loss or gradient is not finite is skipped and counted, and too many end the run."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.fleets import Tallied, read_model, run_fleet
from torch import Tensor, nn
from train.tasks import Clicks, rows_of

from monolith.checkpoint import read_checkpoint_state
from monolith.errors import ConfigError, DivergedError, NonFiniteError
from monolith.feature import Batch
from monolith.model import DeepFM
from monolith.runtime import Trainer
from monolith.runtime.progress import Skipping
from monolith.train import (
    AlertConfig,
    Hook,
    Mode,
    Outputs,
    SaveConfig,
    StepResult,
    Task,
    TrainConfig,
    TrainingRun,
)


class Watch(Hook):
    """Remembers the losses, and the model as it was at the end."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.position: Any = None
        self.state: Any = None

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        self.losses.append(float(result.loss))

    def end(self, run: Any) -> None:
        run.session.drain()
        self.position = run.session.batches.position
        module = run.session.model.module
        weights = {name: weight.tolist() for name, weight in module.state_dict().items()}
        self.state = (rows_of(module), weights) if hasattr(module, "embeddings") else weights


def train(task: Task, **config: Any) -> tuple[Watch, Any]:
    watch = Watch()
    return watch, Trainer(task, TrainConfig(deterministic=True, **config), hooks=[watch]).train()


def times(task: Task, *numbers: int) -> tuple[int, ...]:
    """Return by what event time the batches of these numbers are known."""
    batches = list(task.dataset(Mode.TRAIN))
    return tuple(int(batches[number].ids.event_time) for number in numbers)


@dataclass(frozen=True)
class Spoiled(Clicks):
    """Some of its batches have a loss, or only a gradient, that is not finite."""

    bad: tuple[int, ...] = ()
    how: str = "loss"

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        outputs = super().outputs(model, batch)
        if batch.ids.event_time not in self.bad:
            return outputs
        if self.how == "loss":
            return Outputs(outputs.loss * math.inf, outputs.predictions)
        if self.how == "dense gradient":
            weight = next(iter(model.parameters()))
            return Outputs(outputs.loss + _finite_with_nan_gradient(weight), outputs.predictions)
        assert isinstance(model, DeepFM)
        read = model.embeddings(batch)
        rows = next(iter(read.values()))
        return Outputs(outputs.loss + _finite_with_nan_gradient(rows), outputs.predictions)


def _finite_with_nan_gradient(weight: Tensor) -> Tensor:
    """Return 0, whose gradient is 0 times infinity: the root of 0 has no slope."""
    return (weight.flatten()[0] * 0).sqrt()


@dataclass(frozen=True)
class Without(Clicks):
    """The same data without some batches."""

    bad: tuple[int, ...] = ()

    def dataset(self, mode: Mode) -> Any:
        return _Leaving(super().dataset(mode), self.bad)


class _Leaving:
    def __init__(self, data: Any, bad: tuple[int, ...]) -> None:
        self._data, self._bad = data, bad

    def __iter__(self) -> Any:
        return (batch for batch in self._data if batch.ids.event_time not in self._bad)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)


@pytest.mark.parametrize("how", ["loss", "dense gradient", "row gradient"])
def test_a_bad_batch_leaves_no_trace_but_a_count(how: str, caplog: pytest.LogCaptureFixture) -> None:
    bad = times(Clicks(), 4, 5, 11)
    with caplog.at_level(logging.WARNING):
        watch, report = train(Spoiled(bad=bad, how=how), prefetch=0)  # or rows are fresher after a pause
    wanted, _ = train(Without(bad=bad), prefetch=0)
    assert watch.losses == wanted.losses
    assert watch.state == wanted.state
    assert (report.step, report.examples, report.skipped) == (17, 17 * 64, 3)
    assert caplog.text.count("skipped a batch") == 3
    assert how.removesuffix(" gradient").replace("row", "rows") in caplog.text


def test_a_batch_skipped_for_want_of_labels_names_the_label(caplog: pytest.LogCaptureFixture) -> None:
    batch = next(iter(Clicks().dataset(Mode.TRAIN)))
    labels = {
        "click": torch.tensor([math.nan] * 3 + [1.0] * (len(batch) - 3)),
        "like": torch.ones(len(batch)),
    }
    Skipping(1).note(NonFiniteError("the loss is nan"), 7, replace(batch, labels=labels))
    assert "the loss is nan (of its 64 examples, 3 have no label 'click': leave" in caplog.text
    assert "like" not in caplog.text


def test_a_nan_in_one_float_of_one_record_spoils_nothing(tmp_path: Path) -> None:
    """The whole way, as a user meets it: the model reads a float, and one record's is NaN."""

    class Floats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.clicks = DeepFM(["user", "item"], dim=4, hidden=(8,), threads=1)
            self.embeddings = self.clicks.embeddings
            self.weight = nn.Linear(1, 1)
            self.norm = nn.BatchNorm1d(1)

        def forward(self, batch: Batch) -> Tensor:
            logits: Tensor = self.clicks(batch) + self.weight(self.norm(batch.floats["price"])).squeeze(1)
            return logits

    class Priced(Clicks):
        def model(self) -> nn.Module:
            return Floats()

        def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
            price = torch.ones(len(batch), 1)
            if batch.ids.event_time in bad:
                price[3] = math.nan
            return super().outputs(model, replace(batch, floats={"price": price}))

    bad = times(Clicks(), 7)
    watch, report = train(Priced(), model_dir=str(tmp_path), save=SaveConfig(steps=5))
    rows, weights = watch.state
    assert report.skipped == 1
    assert all(math.isfinite(x) for table in rows.values() for row in table.values() for x in row[1])
    assert all(torch.isfinite(torch.tensor(weight)).all() for weight in weights.values())
    found = Trainer(Priced(), TrainConfig(model_dir=str(tmp_path))).evaluate(steps=3)
    assert math.isfinite(found["loss"])
    assert "left_out" not in found


def test_the_position_advances_past_a_bad_batch(tmp_path: Path) -> None:
    bad = times(Clicks(), 19)
    spoiled, _ = train(Spoiled(bad=bad), model_dir=str(tmp_path))
    clean, _ = train(Clicks())
    assert spoiled.position == clean.position
    again, report = train(Spoiled(bad=bad), model_dir=str(tmp_path))
    assert (again.losses, report.skipped) == ([], 0)


def test_more_than_a_few_in_a_row_end_the_run_before_it_saves(tmp_path: Path) -> None:
    bad = times(Clicks(), *range(7, 20))
    with pytest.raises(DivergedError, match=r"step 7.*11 batches in a row.*the loss is inf.*learning rate"):
        train(Spoiled(bad=bad), model_dir=str(tmp_path), save=SaveConfig(steps=5))
    state = read_checkpoint_state(str(tmp_path))
    assert state is not None
    assert state.model_checkpoint_path.endswith("-5")


def test_how_many_is_a_setting(tmp_path: Path) -> None:
    bad = times(Clicks(), 3)
    with pytest.raises(DivergedError, match="1 batch in a row"):
        train(Spoiled(bad=bad), max_skipped_in_a_row=0)
    bad = times(Clicks(), *range(3, 18))
    _, report = train(Spoiled(bad=bad), max_skipped_in_a_row=15, model_dir=str(tmp_path))
    assert (report.step, report.skipped) == (5, 15)
    with pytest.raises(ConfigError, match="max_skipped_in_a_row"):
        TrainConfig(max_skipped_in_a_row=-1)


def test_good_batches_between_bad_ones_reset_the_count() -> None:
    bad = times(Clicks(), *range(0, 20, 2))
    _, report = train(Spoiled(bad=bad), max_skipped_in_a_row=1)
    assert (report.step, report.skipped) == (10, 10)


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    """A step whose gradient is finite and whose weights are not, right before a save."""

    class Leaps(Clicks):
        def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
            outputs = super().outputs(model, batch)
            return replace(outputs, loss=outputs.loss * 1e6)

        def dense_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=3e38)

    with pytest.raises(DivergedError, match=r"not saved.*NaN or infinite"):
        train(Leaps(), model_dir=str(tmp_path), save=SaveConfig(steps=1))
    assert read_checkpoint_state(str(tmp_path)) is None


def test_a_rollback_is_tried_before_the_run_ends(tmp_path: Path) -> None:
    class Once(Spoiled):
        """Bad from the eighth batch on, as if its weights were spoiled, until they are restored."""

        left = 11

        def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
            outputs = Clicks.outputs(self, model, batch)
            if batch.ids.event_time in self.bad and Once.left:
                Once.left -= 1
                return Outputs(outputs.loss * math.nan, outputs.predictions)
            return outputs

    bad = times(Clicks(), *range(7, 20))
    _, report = train(
        Once(bad=bad),
        model_dir=str(tmp_path),
        save=SaveConfig(steps=5),
        alert=AlertConfig(action="rollback", every_steps=100),
    )
    assert (report.step, report.stop_reason) == (20, "the data ended")


def test_an_evaluation_says_how_many_batches_it_could_not_measure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(Clicks(), model_dir=str(tmp_path))

    class Blind(Clicks):
        def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
            outputs = super().outputs(model, batch)
            click = outputs.predictions["click"]
            if batch.ids.event_time in bad:
                return Outputs(outputs.loss, {"click": click * math.nan})
            return outputs

    bad = {int(batch.ids.event_time) for batch in list(Clicks().dataset(Mode.EVALUATE))[:2]}
    found = Trainer(Blind(), TrainConfig(model_dir=str(tmp_path))).evaluate(steps=5)
    assert found["left_out"] == 2
    assert "predictions of click are NaN" in caplog.text


# On parameter servers


@dataclass(frozen=True)
class SpoiledTally(Tallied):
    """Batches with a record of these numbers have a loss that is NaN."""

    bad: tuple[int, ...] = ()

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        outputs = super().outputs(model, batch)
        if set(batch.ids["record"].flat_values.tolist()) & set(self.bad):
            return Outputs(outputs.loss * math.nan, outputs.predictions)
        return outputs


def test_a_worker_does_not_push_a_bad_batch(tmp_path: Path) -> None:
    outcome = run_fleet(SpoiledTally(bad=(16, 33)), tmp_path)
    model = read_model(Tallied(), tmp_path)
    spoiled = {*range(16, 24), *range(32, 40)}
    assert model.tally == {record: 1.0 for record in range(160) if record not in spoiled}
    assert (model.step, outcome.chief.step, outcome.chief.skipped) == (18, 18, 2)
    assert all(math.isfinite(x) for rows in model.rows.values() for row in rows.values() for x in row[1])
    assert all(torch.isfinite(torch.tensor(weight)).all() for weight in model.weights.values())


def test_too_many_in_a_row_end_a_run_on_servers_before_it_saves(tmp_path: Path) -> None:
    bad = tuple(range(72, 160))
    outcome = run_fleet(SpoiledTally(bad=bad), tmp_path, num_workers=1, max_skipped_in_a_row=2)
    assert isinstance(outcome.workers[0], DivergedError)
    model = read_model(Tallied(), tmp_path)
    assert (model.step, set(model.tally)) == (6, set(range(48)))
