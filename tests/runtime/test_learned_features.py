"""Means and quantiles of a run: learned at its first start, and never again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from runtime.config_files import write_clicks, write_project

from monolith.errors import ConfigError, RestoreError
from monolith.feature import BucketFeature, FeatureSpec, FloatFeature, Label
from monolith.runtime import Trainer
from monolith.runtime.config import RunConfig
from monolith.runtime.config_loading import read_run
from monolith.runtime.config_task import ConfigTask
from monolith.runtime.task_setup import SPEC_FILE, take_learned, with_learned_features
from monolith.train import load_task


def quiet(_: str) -> None: ...


def project(folder: Path, **code: object) -> tuple[ConfigTask, RunConfig]:
    config = folder / "clicks.toml"
    run = read_run(config if config.exists() else write_project(folder, records=300), {}, code=code)
    task = load_task(run.job.task or "", run.task, inputs=run.inputs)
    assert isinstance(task, ConfigTask)
    return task, run


def learned(
    folder: Path, *, trains: bool = True, say: Callable[[str], None] = quiet, **code: object
) -> FeatureSpec:
    task, run = project(folder, **code)
    found = with_learned_features(task, run, trains=trains, say=say)
    assert isinstance(found, ConfigTask)
    return found.features


def test_the_first_start_learns_and_later_ones_take_the_very_same(tmp_path: Path) -> None:
    said: list[str] = []
    first = learned(tmp_path, say=said.append)
    assert not first.to_learn
    assert said == ["learning price, price_level in one pass over the training data"]
    write_clicks(tmp_path / "clicks.csv", 300, seed=8)  # other data, and other means
    assert learned(tmp_path, say=said.append) == first
    assert learned(tmp_path, trains=False) == first
    assert len(said) == 1


def test_only_what_is_trained_on_is_learned_from(tmp_path: Path) -> None:
    task, _ = project(tmp_path)
    everything = replace(task, data=replace(task.data, split=None))
    run = RunConfig()
    specs = [with_learned_features(one, run, trains=True, say=quiet) for one in (task, everything)]
    means = [one.features.features["price"].mean for one in specs]  # type: ignore[attr-defined]
    assert means[0] != means[1]


def test_a_checkpoint_has_them_where_the_file_is_gone(tmp_path: Path) -> None:
    task, run = project(tmp_path)
    task = with_learned_features(task, run, trains=True, say=quiet)  # type: ignore[assignment]
    Trainer(task, replace(run.train, steps=1)).train()
    (tmp_path / "run" / SPEC_FILE).unlink()
    assert learned(tmp_path, trains=False) == task.features
    elsewhere = {"train.model_dir": str(tmp_path / "other"), "train.restore.dir": str(tmp_path / "run")}
    assert learned(tmp_path, **elsewhere) == task.features


def test_features_with_other_settings_are_learned_again(tmp_path: Path) -> None:
    first = learned(tmp_path)
    config = tmp_path / "clicks.toml"
    config.write_text(config.read_text().replace("quantiles = 4", "quantiles = 8"))
    second = learned(tmp_path)
    assert len(second.features["price_level"].boundaries or ()) == 7  # type: ignore[union-attr]
    assert second.features["price"] == first.features["price"]


def test_a_process_that_does_not_train_learns_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"price, price_level: means or quantiles are not known.*Train first"
    ):
        learned(tmp_path, trains=False)


def test_others_wait_for_the_chief(tmp_path: Path) -> None:
    task, run = project(tmp_path, **{"cluster.num_ps": 1, "cluster.role": "ps"})
    chief = replace(run, cluster=replace(run.cluster, role="worker"))
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            with_learned_features(task, chief, trains=True, say=quiet)

    found = with_learned_features(task, run, trains=True, say=quiet, sleep=sleep)
    assert isinstance(found, ConfigTask)
    assert not found.features.to_learn
    assert len(waits) == 3


def test_others_do_not_wait_for_ever(tmp_path: Path) -> None:
    task, run = project(tmp_path, **{"cluster.num_ps": 1, "cluster.role": "ps", "timeouts.start": 10.0})
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds * 10

    with pytest.raises(RestoreError, match="for the chief to learn price, price_level"):
        with_learned_features(task, run, trains=True, say=quiet, clock=lambda: now[0], sleep=sleep)


def test_only_what_was_asked_for_alike_is_taken() -> None:
    labels = {"click": Label()}
    spec = FeatureSpec(
        features={"a": FloatFeature(scale="standard"), "b": BucketFeature(quantiles=4)}, labels=labels
    )
    kept = FeatureSpec(
        features={
            "a": FloatFeature(scale="standard", mean=(1.0,), std=(2.0,)),
            "b": BucketFeature(quantiles=2, boundaries=(3.0,)),
        },
        labels=labels,
    )
    taken = take_learned(spec, kept)
    assert taken.features["a"] == kept.features["a"]
    assert taken.to_learn == ("b",)
