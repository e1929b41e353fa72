"""Labels that are partly empty, as a user of `monolith train | evaluate | predict` meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from monolith.cli.main import main

CONFIG = """
[model]
type = "deepfm"
dim = 2
hidden = [4]

[features.user]
kind = "string"

[labels.click]

[examples]
max_bad = {max_bad}

[task]
batch_size = 16

[data]
train = "train.csv"
evaluate = "held.csv"
"""


def rows(count: int, empty: set[int]) -> str:
    lines = [f"u{number % 7},{'' if number in empty else number % 2}" for number in range(count)]
    return "\n".join(["user,click", *lines]) + "\n"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(max_bad=0.2))
    (tmp_path / "train.csv").write_text(rows(64, {5, 20, 40}))
    (tmp_path / "held.csv").write_text(rows(40, {3}))
    return path


def train(config: Path, *flags: str) -> int:
    words = ["train", "--config", str(config), "--model-dir", "model", "--quiet", "--no-summaries"]
    return main([*words, *flags])


def test_the_other_records_of_a_batch_are_trained_and_the_report_says_which_were_not(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(config, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["steps"], report["examples"], report["skipped_batches"]) == (4, 61, 0)
    ((why, count),) = report["bad_records"].items()
    assert count == 3
    assert why.startswith("label 'click' is empty (the first: line 7 of ")
    assert why.endswith("train.csv)")

    assert main(["evaluate", "--config", str(config), "--model-dir", "model", "--quiet", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["examples"] == 39
    assert found["metrics"]["loss"] is not None
    assert ["line 5 of" in why for why in found["bad_records"]] == [True]

    words = ["predict", "--config", str(config), "--model-dir", "model", "--quiet", "--to", "all.csv"]
    assert main(words) == 0
    assert len(Path("all.csv").read_text().splitlines()) == 41  # what has no label is predicted, too


def test_a_person_reads_it_in_the_report(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(config) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "bad records 3 left out: label 'click' is empty (the first: line 7 of" in said


def test_more_than_is_allowed_end_the_run_with_the_key_to_change(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(config, "--examples.max-bad", "0.01") == 2
    said = capsys.readouterr().err
    assert "3 of 64 records cannot be read as the features say" in said
    assert "label 'click' is empty (the first: line 7 of" in said
    assert "examples.max_bad" in said


def test_a_run_that_could_train_on_nothing_fails(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.csv").write_text(rows(64, set(range(64))))
    assert train(config, "--examples.max-bad", "1") == 2
    said = capsys.readouterr().err
    assert "the run took no step: all of its data was skipped. 64 records were left out" in said
    assert "line 2 of" in said
    assert not list(Path("model").glob("*.ckpt-*"))


def test_a_run_whose_batches_were_all_skipped_fails(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.csv").write_text(rows(64, set(range(64))))
    config.write_text(config.read_text().replace("[examples]", '[examples]\noptional = ["click"]'))
    assert train(config) == 2
    said = capsys.readouterr().err
    assert "the run took no step: all of its data was skipped. 4 batches were skipped" in said
