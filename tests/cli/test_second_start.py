"""What a user of a config file meets next: a second start, flags of evaluate, and errors with their keys."""

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

[task]
batch_size = 16

[data]
train = "train.csv"
evaluate = "held.csv"
"""


def rows(count: int) -> str:
    return "\n".join(["user,click", *(f"u{number % 7},{number % 2}" for number in range(count))]) + "\n"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    (tmp_path / "train.csv").write_text(rows(64))
    (tmp_path / "held.csv").write_text(rows(40))
    (tmp_path / "other.csv").write_text(rows(20))
    return path


def run(command: str, config: Path, *flags: str) -> int:
    return main([command, "--config", str(config), "--model-dir", "model", "--quiet", *flags])


def test_a_second_start_says_that_nothing_is_new_and_what_to_do(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("train", config, "--no-summaries") == 0
    assert "this run was finished" not in capsys.readouterr().out
    assert run("train", config, "--no-summaries") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "this run was finished, and nothing was trained: all of its data was trained on before" in said
    assert "another --model-dir" in said
    assert run("train", config, "--no-summaries", "--max-steps", "2") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "it had come to its limit before (max_steps is 2" in said
    assert "raise the limit" in said

    # flags that say what is read; others are refused with the reason
    assert run("evaluate", config, "--data.evaluate", "other.csv", "--set", "batch_size=7", "--json") == 0
    assert json.loads(capsys.readouterr().out)["examples"] == 20
    assert run("evaluate", config, "--set", "scores=log_loss", "--json") == 0
    assert json.loads(capsys.readouterr().out)["metrics"].keys() == {"click/log_loss", "loss"}
    for flag, why in (
        ("--train.prefetch=2", "how a model is trained"),
        ("--num_ps=2", "one process reads a checkpoint"),
        ("--cluster.num-workers=2", "one process reads a checkpoint"),
    ):
        assert run("evaluate", config, flag) == 2
        said = capsys.readouterr().err
        assert f"{flag.partition('=')[0]} is a flag of monolith train: " in said
        assert why in said


def test_too_many_malformed_lines_name_the_key_that_allows_more(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("train.csv").write_text(rows(63) + "u1,1,2\n")
    assert run("train", config, "--no-summaries") == 2
    said = capsys.readouterr().err
    assert "1 of 64 records could not be read" in said
    assert "data.max_unreadable of the config (--data.max-unreadable 0.01)" in said
    assert run("train", config, "--no-summaries", "--data.max-unreadable", "0.05") == 0


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('kind = "string"', 'kindd = "string"', "None of them has 'kindd'; the nearest known key is 'kind'"),
        ("dim = 2", "dimm = 2", "the nearest known key is model.dim"),
        ("dim = 2", 'dim = "two"', "model.dim (from the config): expected int"),
    ],
)
def test_what_is_wrong_inside_of_the_config_is_said_once_with_its_key(
    config: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, says: str
) -> None:
    config.write_text(CONFIG.replace(old, new, 1))
    assert run("train", config) == 2
    said = capsys.readouterr().err
    assert said.startswith("monolith: cannot read the config: one problem\n  - ")
    assert said.count("problem") == 1
    assert says in said
