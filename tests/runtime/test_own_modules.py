"""A module of one's own on batches of a spec: what is trained, saved, exported and asked by raw values."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from monolith.data import MemorySource, Pipeline, Stream
from monolith.data.source import Stage
from monolith.errors import ExportError, FeatureError, RestoreError
from monolith.feature import (
    CONCAT,
    Batch,
    FeatureColumn,
    FeatureSlot,
    FeatureSpec,
    FloatFeature,
    IdFeature,
    Label,
    Layout,
    SlotConfig,
)
from monolith.model import EmbeddingCollection
from monolith.runtime import Trainer
from monolith.runtime.config import ExportConfig
from monolith.runtime.export import how_to_export, task_exporter
from monolith.serve import Predictor
from monolith.train import EvaluateConfig, Mode, Task, TrainConfig

AGE = FloatFeature(scale="log")
SPEC = FeatureSpec(
    features={"user": IdFeature(kind="string"), "spare": IdFeature(), "age_hours": AGE},
    labels={"click": Label()},
)
COLUMNS: dict[str, list[Any]] = {
    "user": [f"u{n % 7}" for n in range(64)],
    "spare": list(range(64)),
    "age_hours": [0.5 + n for n in range(64)],
    "click": [float(n % 2) for n in range(64)],
}


class Own(nn.Module):
    """Knows no spec: it reads one feature of ids and one number of its batches."""

    def __init__(self) -> None:
        super().__init__()
        slot = FeatureSlot(SlotConfig(name="user"))
        vector = slot.add_slice(4)
        self.rows = EmbeddingCollection(
            [Layout("user", CONCAT, [FeatureColumn(slot, "user").lookup(vector)])]
        )
        self.dense = nn.Linear(5, 1)

    def forward(self, batch: Batch) -> Tensor:
        logits: Tensor = self.dense(torch.cat([self.rows(batch)["user"], batch.floats["age_hours"]], 1))
        return logits.squeeze(1)


class Shifted(Stage[Batch, Batch]):
    """A stage of a task's own behind the spec."""

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._source:
            yield replace(batch, floats={name: one + 1 for name, one in batch.floats.items()})


@dataclass(frozen=True)
class Clicks(Task):
    spec: FeatureSpec = SPEC
    held: FeatureSpec | None = None
    wrap: Callable[[Stream[Batch]], Any] = lambda data: data

    def dataset(self, mode: Mode) -> Any:
        spec = self.spec if mode is Mode.TRAIN or self.held is None else self.held
        return self.wrap(Pipeline(MemorySource(COLUMNS, batch_size=16)).to_batches(spec))

    def model(self) -> nn.Module:
        return Own()


def with_age(**age: Any) -> FeatureSpec:
    return replace(SPEC, features={**SPEC.features, "age_hours": FloatFeature(**age)})


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    config = TrainConfig(model_dir=str(tmp_path_factory.mktemp("run")), summary_every_steps=None)
    Trainer(Clicks(), config).train()
    return config


def export(config: TrainConfig, root: Path, task: Task, **how: Any) -> str:
    with task_exporter(task, config, how_to_export(ExportConfig(), config), **how) as exporter:
        return exporter.export(f"{config.model_dir}/model.ckpt-4", str(root)).folder


@pytest.fixture(scope="module")
def servable(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> str:
    return export(config, tmp_path_factory.mktemp("raw"), Clicks())


def test_a_servable_takes_raw_columns_and_scores_them_as_the_trainer_does(
    config: TrainConfig, servable: str
) -> None:
    ((_, expected), *_) = Trainer(Clicks(), config).predict(steps=1)
    raw = {name: COLUMNS[name][:16] for name in ("user", "age_hours", "click")}
    with Predictor(servable, show=False) as predictor:
        torch.testing.assert_close(predictor.predict(raw).outputs["click"], expected["click"])


def test_a_server_warns_once_of_numbers_far_from_those_of_the_training(
    servable: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Predictor(servable, show=False) as predictor, caplog.at_level(logging.WARNING):
        predictor.warm_up()
        rows = {"user": ["u1"]}
        predictor.predict({**rows, "age_hours": [70.0]})
        assert not caplog.records
        for _ in range(3):  # seconds where the data has hours
            predictor.predict({**rows, "age_hours": [44.2 * 3600]})
    (said,) = [record.getMessage() for record in caplog.records if "training had" in record.getMessage()]
    assert "11.9774 for 'age_hours', as the model reads it, and training had 0.405465 to 4.16667" in said


def test_a_ranking_request_is_compared_with_the_training_too(
    servable: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Predictor(servable, show=False) as predictor, caplog.at_level(logging.WARNING):
        predictor.predict({"user": ["u1"], "age_hours": [44.2, 1e6]})
    assert any("'age_hours'" in record.getMessage() for record in caplog.records)


def test_a_changed_spec_is_noticed_when_a_run_resumes_is_evaluated_and_is_exported(
    config: TrainConfig, tmp_path: Path
) -> None:
    changed = Clicks(spec=with_age(scale="raw"))
    words = r"features\.age_hours\.scale is 'raw' in this model and 'log' in the checkpoint"
    with pytest.raises(RestoreError, match=words):
        Trainer(changed, config).train()
    with pytest.raises(RestoreError, match=words):
        Trainer(changed, config).evaluate()
    with pytest.raises(RestoreError, match=words):
        export(config, tmp_path, changed)


def test_a_feature_that_the_module_does_not_read_may_come_and_go(config: TrainConfig) -> None:
    features = {name: one for name, one in SPEC.features.items() if name != "spare"}
    assert Trainer(Clicks(spec=replace(SPEC, features=features)), config).evaluate()["examples"] == 64


def test_data_to_evaluate_by_another_spec_is_refused_before_the_first_step(tmp_path: Path) -> None:
    task = Clicks(held=with_age(scale="raw"))
    config = TrainConfig(model_dir=str(tmp_path), evaluate=EvaluateConfig(at_end=True, every_steps=100))
    with pytest.raises(FeatureError, match=r"features\.age_hours\.scale is 'raw' in the spec of its data"):
        Trainer(task, config).train()


@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (list, r"dataset\(\) returns batches that its own code makes"),
        (Shifted, "'age_hours' of its batches is not what its spec makes of the raw columns"),
    ],
)
def test_a_model_of_batches_that_a_server_cannot_make_is_exported_only_if_that_is_meant(
    config: TrainConfig, tmp_path: Path, wrap: Callable[[Stream[Batch]], Any], words: str
) -> None:
    task = Clicks(wrap=wrap)
    with pytest.raises(ExportError, match=words + ".*--inputs batch"):
        export(config, tmp_path, task)
    with Predictor(export(config, tmp_path, task, inputs="batch"), show=False) as predictor:
        assert [one.datatype for one in predictor.signature.inputs] == ["INT64", "FP32"]


def test_where_the_data_is_not_there_the_spec_of_the_checkpoint_is_exported(
    config: TrainConfig, tmp_path: Path
) -> None:
    def gone(_: Stream[Batch]) -> Any:
        raise ExportError("the data is elsewhere")

    with Predictor(export(config, tmp_path, Clicks(wrap=gone)), show=False) as predictor:
        assert [one.name for one in predictor.signature.inputs] == ["user", "age_hours"]
