"""Files written before the runtime was reorganised still work: a config, checkpoints and a servable.

`before_runtime/` was written by the last commit with `monolith.run` and the config's old field names:
`run.toml`, 30 steps of a local run and of a fleet (two parameter servers, two workers), an export, and in
`expected.json` the results of that commit.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from monolith.cli.main import main
from monolith.serve import Predictor

BEFORE = Path(__file__).parent / "before_runtime"
EXPECTED = json.loads((BEFORE / "expected.json").read_text())


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A writable copy of the files, as the current directory."""
    copy = tmp_path / "shop"
    shutil.copytree(BEFORE, copy)
    monkeypatch.chdir(copy)
    return copy


def evaluated(capsys: pytest.CaptureFixture[str], run: str) -> dict[str, Any]:
    capsys.readouterr()
    flags = ["--config", "run.toml", "--model-dir", run, "--checkpoint", "latest", "--json"]
    assert main(["evaluate", *flags]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return {"step": found["step"], **found["metrics"]}


@pytest.mark.usefixtures("shop")
def test_a_config_file_with_old_names_has_no_problems(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "run.toml"]) == 0
    assert "no problems" in capsys.readouterr().out


@pytest.mark.usefixtures("shop")
def test_a_local_run_resumes_and_ends_with_the_same_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config", "run.toml", "--model-dir", "local", "--deterministic", "--quiet"]) == 0
    expected = EXPECTED["local_finished"]
    # Not to the last bit: processors with other vector units round the dense weights differently.
    assert {name: evaluated(capsys, "local")[name] for name in expected} == pytest.approx(expected, abs=1e-3)


@pytest.mark.usefixtures("shop")
def test_the_checkpoint_of_a_fleet_is_evaluated_and_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    expected = EXPECTED["fleet"]
    assert {name: evaluated(capsys, "fleet")[name] for name in expected} == pytest.approx(expected, abs=1e-5)
    assert main(["train", "--config", "run.toml", "--model-dir", "fleet", "--quiet"]) == 0
    # 4 epochs of 1,000 records in batches of 50; two workers had read their own parts of the first epochs
    assert evaluated(capsys, "fleet")["step"] >= 80


def test_a_servable_answers_as_it_did(shop: Path) -> None:
    predictor = Predictor(str(shop / "local" / "exported_models" / "30"))
    rows = pd.read_csv(shop / "held_out.csv").head(len(EXPECTED["served"]))
    assert predictor.predict(rows).outputs["click"].tolist() == pytest.approx(EXPECTED["served"], abs=1e-5)
