"""The summaries of a run: what a TensorBoard reader finds after it."""

from __future__ import annotations

import itertools
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from train.runs import FakeClock, WithSummaries, train
from train.tasks import Clicks

from monolith.errors import ConfigError, MissingExtraError
from monolith.feature import Batch, FeatureIds
from monolith.observe.summaries import read_summaries
from monolith.runtime import Trainer
from monolith.table import TableStats
from monolith.train import Hook, SaveConfig, StepResult, TrainConfig, drive
from monolith.train.hooks import TableInfoHook
from monolith.train.hooks.config import TrackingConfig
from monolith.train.hooks.summaries import MlflowSink, SummaryHook, WandbSink, _Tracker, sink_openers
from monolith.train.metrics.metric_set import MetricSet


class Training(WithSummaries):
    """A run whose losses are given, on batches of two examples."""

    def __init__(self, model_dir: str, losses: list[float], step: int = 0, by: int = 1) -> None:
        self.step = step
        self.by = by
        self.model_dir = model_dir
        self.stop_reason: str | None = None
        self._losses = iter(losses)
        self.batch = Batch(
            FeatureIds.pack({"user": torch.arange(2)}, event_time=77),
            labels={"click": torch.tensor([0.0, 1.0])},
        )

    def request_stop(self, reason: str) -> None:
        self.stop_reason = self.stop_reason or reason

    def take_step(self) -> StepResult | None:
        loss = next(self._losses, None)
        if loss is None:
            return None
        self.step += self.by
        predictions = {"click": torch.tensor([0.1, 0.9])}
        return StepResult(self.step, self.batch, torch.tensor(loss), predictions)

    def drive(self, *hooks: Hook) -> None:
        with closing(self):
            drive(self, hooks, step=self.take_step)


def ticking(seconds: float) -> Callable[[], float]:
    ticks = itertools.count()
    return lambda: next(ticks) * seconds


def scalars(model_dir: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    paths = sorted(str(path) for path in (model_dir / "summaries").glob("*tfevents*"))
    for one in read_summaries(paths, "scalars"):
        found.setdefault(one.tag, []).append((one.step, pytest.approx(float(one.data), nan_ok=True)))
    return found


def stats(rows: int, size: int) -> TableStats:
    others: dict[str, Any] = dict.fromkeys(TableStats.__dataclass_fields__, 0)
    return TableStats(**{**others, "rows": rows, "bytes_total": size})


def test_the_loss_is_the_mean_since_the_last_writing_and_the_rest_is_written_at_the_end(
    tmp_path: Path,
) -> None:
    Training(str(tmp_path), [1.0, 3.0, 5.0, 7.0, 100.0]).drive(SummaryHook(every_steps=2))
    assert scalars(tmp_path)["loss"] == [(2, 2.0), (4, 6.0), (5, 100.0)]


def test_speed_is_counted_in_examples(tmp_path: Path) -> None:
    Training(str(tmp_path), [1.0] * 4).drive(SummaryHook(every_steps=2, clock=ticking(0.5)))
    # One tick, half a second, passes between the end of a span and the next writing: 4 examples.
    assert scalars(tmp_path)["examples_per_s"] == [(2, 8.0), (4, 8.0)]


def test_tables_are_shown_by_name(tmp_path: Path) -> None:
    hook = SummaryHook(every_steps=1, stats=lambda: {"user": stats(10, 640), "item": stats(3, 96)})
    Training(str(tmp_path), [1.0]).drive(hook)
    found = scalars(tmp_path)
    assert found["rows/user"] == [(1, 10)]
    assert found["bytes/item"] == [(1, 96)]


def test_metrics_are_shown_when_they_have_something_to_say(tmp_path: Path) -> None:
    metrics = MetricSet.named({"click": ("auc", "gauc")})

    class Measure(Hook):
        def after_step(self, run: object, result: StepResult) -> None:  # noqa: ARG002
            users = result.batch.ids["user"].flat_values
            metrics.update(result.predictions, result.batch.labels, groups=users)

    Training(str(tmp_path), [1.0]).drive(Measure(), SummaryHook(every_steps=1, metrics=metrics))
    found = scalars(tmp_path)
    assert found["metrics/click/auc"] == [(1, 1.0)]
    assert "metrics/click/gauc" not in found  # each user has one example, which ranks nothing


def test_a_loss_that_is_nan_is_shown_as_it_is(tmp_path: Path) -> None:
    Training(str(tmp_path), [math.nan]).drive(SummaryHook(every_steps=1))
    assert scalars(tmp_path)["loss"] == [(1, pytest.approx(math.nan, nan_ok=True))]


def test_a_resumed_run_writes_at_the_same_steps(tmp_path: Path) -> None:
    Training(str(tmp_path), [1.0] * 3, step=7).drive(SummaryHook(every_steps=5))
    assert [step for step, _ in scalars(tmp_path)["loss"]] == [10]


def test_a_run_without_a_folder_writes_nothing(tmp_path: Path) -> None:
    Training("", [1.0] * 3).drive(SummaryHook(every_steps=1))
    assert list(tmp_path.iterdir()) == []


def test_what_was_written_before_a_crash_is_there(tmp_path: Path) -> None:
    class Crash(Hook):
        def after_step(self, run: object, result: StepResult) -> None:  # noqa: ARG002
            if result.step == 3:
                raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        Training(str(tmp_path), [1.0] * 9).drive(SummaryHook(every_steps=2), Crash())
    assert scalars(tmp_path)["loss"] == [(2, 1.0)]


def test_every_steps_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        SummaryHook(every_steps=0)


def test_a_step_that_jumps_over_a_multiple_is_written(tmp_path: Path) -> None:
    Training(str(tmp_path), [1.0] * 8, by=3).drive(SummaryHook(every_steps=10))
    assert [step for step, _ in scalars(tmp_path)["loss"]] == [12, 21, 24]


# MLflow and W&B, offline, are told what TensorBoard is told; and a run that goes on goes on there.


@pytest.fixture(autouse=True)
def own_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own `sys.exit` for the tests that follow: W&B puts another in its place."""
    monkeypatch.setattr(sys, "exit", sys.exit)


def tracked_train(folder: Path, steps: int, **tracking: Any) -> None:
    config = TrainConfig(
        model_dir=str(folder / "model"),
        max_steps=steps,
        save=SaveConfig(steps=100),
        summary_every_steps=2,
        tracking=TrackingConfig(**tracking),
    )
    Trainer(Clicks(), config).train()


def test_mlflow_has_the_loss_of_every_summary_in_one_run_over_a_restart(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path}/runs.db"
    for steps in (4, 6):
        tracked_train(tmp_path, steps, sinks=("mlflow",), mlflow_uri=uri, project="ads", run_name="first")
    client = MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("ads").experiment_id])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "loss")] == [2, 4, 6]
    assert "rows/user" in run.data.metrics
    assert not (tmp_path / "model" / "summaries").exists()


def test_wandb_writes_an_offline_run_into_the_model_folder(tmp_path: Path) -> None:
    tracked_train(tmp_path, 4, sinks=("tensorboard", "wandb"), wandb_offline=True, project="ads")
    number = (tmp_path / "model" / "wandb_run").read_text()
    (history,) = (tmp_path / "model" / "wandb").glob(f"offline-run-*-{number}/run-{number}.wandb")
    limit = time.monotonic() + 60  # a process of wandb writes it
    while b"examples_per_s" not in history.read_bytes():
        assert time.monotonic() < limit, history.read_bytes()
        time.sleep(0.05)
    assert list((tmp_path / "model" / "summaries").glob("events.*"))


@pytest.mark.parametrize(
    "package, make",
    [
        ("mlflow", lambda: MlflowSink(None, "ads", "first")),
        ("wandb", lambda: WandbSink("ads", "first", ".", offline=True)),
    ],
)
def test_a_tracker_that_is_not_installed_names_its_extra(
    package: str, make: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (package, f"{package}.entities"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'monolith-recsys\[{package}\]'"):
        sink_openers(TrackingConfig(sinks=(package,)), "clicks")  # type: ignore[arg-type]
    with pytest.raises(MissingExtraError, match=rf"pip install 'monolith-recsys\[{package}\]'"):
        make()


def test_tensorboard_that_was_not_requested_is_left_out_if_it_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with caplog.at_level(logging.INFO):
        assert sink_openers(TrackingConfig(), "clicks") == []
    assert "monolith-recsys[tensorboard]" in caplog.text


@pytest.mark.parametrize(
    "settings, problem",
    [
        ({"sinks": ("wandb", "wandb")}, "names one twice"),
        ({"mlflow_uri": "http://h:1"}, "needs 'mlflow' among sinks"),
        ({"wandb_offline": True}, "needs 'wandb' among sinks"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        TrackingConfig(**settings)


class Broken(_Tracker):
    name = "a tracker"

    def _send(self, values: Mapping[str, float], step: int) -> None:
        raise OSError(f"no network for {len(values)} numbers of step {step}")

    def _finish(self) -> None: ...


def test_a_tracker_that_fails_is_said_once_and_counted_and_does_not_end_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = Broken()
    for step in range(3):
        broken.scalars({"loss": 1.0}, step)
    broken.close()
    broken.close()
    assert broken.lost == 3
    assert [record.message for record in caplog.records] == [
        "a tracker does not take numbers; training continues without it: "
        "OSError('no network for 1 numbers of step 0')",
        "a tracker did not take the numbers of 3 steps",
    ]


# Sizes of tables in the log.


def table_stats(rows: int) -> TableStats:
    return TableStats(rows, rows * 64, rows * 60, rows * 4, 0.5, rows, 0, 0, 0, 0, 0)


def test_each_table_is_logged_at_most_every_ten_minutes(caplog):
    clock = FakeClock()
    asked = []

    def ask() -> dict[str, TableStats]:
        asked.append(clock.now)
        return {"item": table_stats(100), "user": table_stats(3)}

    with caplog.at_level(logging.INFO):
        train([TableInfoHook(ask, clock=clock)], 1500, on_step=lambda _: clock.sleep(1))
    assert [now - asked[0] for now in asked] == [0, 600, 1200]
    assert "step 601: table item: 100 rows, 6400 bytes" in caplog.text
    assert "step 1: table user: 3 rows, 192 bytes" in caplog.text
    assert "in files" not in caplog.text


def test_rows_and_bytes_in_files_are_logged_and_written_for_tiered_tables(tmp_path, caplog):
    tables = {"item": replace(table_stats(100), cold_rows=60, cold_bytes=4096), "user": table_stats(3)}
    with caplog.at_level(logging.INFO):
        train([TableInfoHook(lambda: tables, clock=FakeClock())], 1)
    assert "step 1: table item: 100 rows, 6400 bytes; 60 rows, 4096 bytes in files" in caplog.text
    Training(str(tmp_path), [1.0]).drive(SummaryHook(every_steps=1, stats=lambda: tables))
    found = scalars(tmp_path)
    assert (found["cold_rows/item"], found["cold_bytes/item"]) == ([(1, 60)], [(1, 4096)])
    assert "cold_rows/user" not in found
