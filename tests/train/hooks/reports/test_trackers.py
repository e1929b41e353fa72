"""MLflow and W&B, offline, are told what TensorBoard is told; and a run that goes on goes on there."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from train.tasks import Clicks

from monolith.errors import ConfigError, MissingExtraError
from monolith.runtime import Trainer
from monolith.train import SaveConfig, TrainConfig
from monolith.train.hooks.config import TrackingConfig
from monolith.train.hooks.reports.trackers import MlflowSink, WandbSink, _Tracker, sink_openers


@pytest.fixture(autouse=True)
def own_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own `sys.exit` for the tests that follow: W&B puts another in its place."""
    monkeypatch.setattr(sys, "exit", sys.exit)


def train(folder: Path, steps: int, **tracking: Any) -> None:
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
        train(tmp_path, steps, sinks=("mlflow",), mlflow_uri=uri, project="ads", run_name="first")
    client = MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("ads").experiment_id])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "loss")] == [2, 4, 6]
    assert "rows/user" in run.data.metrics
    assert not (tmp_path / "model" / "summaries").exists()


def test_wandb_writes_an_offline_run_into_the_model_folder(tmp_path: Path) -> None:
    train(tmp_path, 4, sinks=("tensorboard", "wandb"), wandb_offline=True, project="ads")
    number = (tmp_path / "model" / "wandb_run").read_text()
    (history,) = (tmp_path / "model" / "wandb").glob(f"offline-run-*-{number}/run-{number}.wandb")
    assert b"examples_per_s" in history.read_bytes()
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


def test_tensorboard_which_nobody_asked_for_is_left_out_where_it_is_not_installed(
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
        "a tracker does not take numbers, training goes on without: "
        "OSError('no network for 1 numbers of step 0')",
        "a tracker did not take the numbers of 3 steps",
    ]
