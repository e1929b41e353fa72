"""Which checkpoint a command reads if no one names any: the best, if the run was evaluated."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runtime.config_files import write_project

from monolith.checkpoint import BestCheckpoint, write_best
from monolith.cli.main import main

EARLY, LATE = 4, 8


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run with checkpoints of two steps, of which the earlier one is named as the best."""
    folder = tmp_path_factory.mktemp("run")
    config = str(write_project(folder))
    assert (
        main(["train", "--config", config, "--steps", str(LATE), "--save-steps", str(EARLY), "--quiet"]) == 0
    )
    best = BestCheckpoint(name=f"model.ckpt-{EARLY}", step=EARLY, metric="click/auc", value=0.75)
    write_best(str(folder / "run"), best)
    yield folder
    shutil.rmtree(folder)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--quiet", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_evaluate_predict_and_export_take_the_best_and_say_so(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(trained / "clicks.toml")
    for words in (
        ["evaluate", "--config", config],
        ["predict", "--config", config, "--to", str(tmp_path / "p.csv")],
        ["export", "--config", config, "--to", str(tmp_path / "out")],
    ):
        found = said(capsys, *words)
        assert found["step"] == EARLY
        assert found["chosen"].startswith("the best by click/auc, 0.7500")


def test_latest_is_the_newest_one_whichever_is_the_best(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = said(capsys, "evaluate", "--config", str(trained / "clicks.toml"), "--checkpoint", "latest")
    assert found["step"] == LATE
    assert found["chosen"] == "--checkpoint latest"


def test_the_table_of_an_evaluation_says_which_checkpoint_it_is_of(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", "--config", str(trained / "clicks.toml"), "--quiet"]) == 0
    assert f"step {EARLY} (the best by click/auc, 0.7500" in capsys.readouterr().out


def test_a_warm_start_begins_with_the_best_of_the_other_run(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "train",
        "--config",
        str(trained / "clicks.toml"),
        "--steps",
        "1",
        "--restore-dir",
        str(trained / "run"),
    ]
    found = said(capsys, *words, "--model-dir", str(tmp_path / "one"))
    assert str(found["restored_from"]).endswith(f"model.ckpt-{EARLY}")
    words += ["--restore-checkpoint", "latest"]
    found = said(capsys, *words, "--model-dir", str(tmp_path / "two"))
    assert str(found["restored_from"]).endswith(f"model.ckpt-{LATE}")


def test_a_best_whose_files_are_gone_leaves_the_latest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write_project(tmp_path))
    assert main(["train", "--config", config, "--steps", "2", "--quiet"]) == 0
    best = BestCheckpoint(name="model.ckpt-1", step=1, metric="click/auc", value=0.75)
    write_best(str(tmp_path / "run"), best)
    capsys.readouterr()
    assert said(capsys, "evaluate", "--config", config)["chosen"] == "the latest"
