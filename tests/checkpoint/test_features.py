"""A checkpoint has the feature spec of its model, and is not restored into features of another meaning."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from monolith.checkpoint import FeaturesPart, read_manifest, saved_spec
from monolith.checkpoint.part import SavedPart
from monolith.cli.main import main
from monolith.data import Batches, Pipeline
from monolith.data.formats.memory import MemorySource
from monolith.errors import RestoreError
from monolith.feature import FeatureSpec, FloatFeature, HistoryFeature, IdFeature
from monolith.model import DeepFM
from monolith.runtime import Trainer
from monolith.train import Mode, SaveConfig, Task, TrainConfig

SPEC = FeatureSpec(features={"user": IdFeature(kind="string"), "price": FloatFeature(scale="log")})
ROWS = {"user": ["ann", "bob", "cid", "ann"] * 4, "price": [1.0, 2.0, 3.0, 4.0] * 4, "label": [0, 1] * 8}


@dataclass
class Prices(Task):
    spec: FeatureSpec = SPEC
    by_hand: bool = False

    def dataset(self, mode: Mode) -> Batches:  # noqa: ARG002
        return Pipeline(MemorySource(ROWS, batch_size=4)).to_batches(self.spec)

    def model(self) -> nn.Module:
        if self.by_hand:
            return DeepFM(["user"], floats={"price": 1}, dim=2, hidden=(4,))
        return DeepFM(self.spec, dim=2, hidden=(4,))


def config(folder: Path, **settings: Any) -> TrainConfig:
    return TrainConfig(model_dir=str(folder), save=SaveConfig(steps=2), **settings)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Trainer(Prices(), config(tmp_path)).train()
    return tmp_path


def prefix(folder: Path) -> str:
    return str(folder / "model.ckpt-4")


def changed(name: str, **settings: Any) -> FeatureSpec:
    return replace(SPEC, features={**SPEC.features, name: replace(SPEC.features[name], **settings)})


def test_every_checkpoint_has_the_spec(folder: Path):
    for step in (2, 4):
        entry = read_manifest(str(folder / f"model.ckpt-{step}")).manifest.parts["features"]
        assert saved_spec("there", entry["value"]) == SPEC


def test_it_is_restored_into_the_same_features(folder: Path):
    assert Trainer(Prices(), config(folder)).evaluate()
    slower = changed("user", learning_rate=0.01)
    assert Trainer(Prices(slower), config(folder)).evaluate()


def test_another_meaning_is_refused_by_its_first_difference(folder: Path):
    for spec in (changed("price", scale="raw"), replace(SPEC, fids=True)):
        with pytest.raises(
            RestoreError, match=r"cannot restore .*(price\.scale is 'raw'|fids is True) in this model"
        ):
            Trainer(Prices(spec), config(folder)).train()
    with pytest.raises(RestoreError, match="checkpoint inspect"):
        Trainer(Prices(changed("price", scale="raw")), config(folder)).evaluate()


def test_a_model_made_by_hand_keeps_the_spec_of_its_data(folder: Path, tmp_path: Path):
    assert Trainer(Prices(by_hand=True), config(folder)).evaluate()
    plain = tmp_path / "plain"
    Trainer(Prices(by_hand=True), config(plain)).train()
    assert "features" in read_manifest(prefix(plain)).manifest.parts
    assert Trainer(Prices(), config(plain)).evaluate()


def test_a_spec_that_no_version_reads_is_said(folder: Path):
    with pytest.raises(RestoreError, match="its features cannot be read"):
        saved_spec(prefix(folder), '{"features": {"a": {"type": "Telepathy"}}}')


def test_it_is_printed(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["checkpoint", "inspect", str(folder), "--details"]) == 0
    out = capsys.readouterr().out
    assert "IdFeature" in out
    assert 'scale="log"' in out
    assert main(["checkpoint", "inspect", str(folder), "--json"]) == 0
    assert FeatureSpec.from_json(json.loads(capsys.readouterr().out)["states"]["features"]) == SPEC


def test_a_history_that_lists_something_else_leaves_the_rows_of_both_as_they_are():
    features = {"item": IdFeature(), "other": IdFeature(), "history": HistoryFeature(of="item", max=3)}
    before = FeatureSpec(features=features)
    now = replace(before, features={**features, "history": HistoryFeature(of="other", max=3)})
    changes = FeaturesPart(now).changes([SavedPart("there", {"value": before.to_json()})])
    assert changes.fresh == {}
    assert now.difference(before) == (
        "features.history.of is 'other' in this model and 'item' in the checkpoint"
    )
