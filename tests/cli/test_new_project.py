"""`monolith new`: the commands that it prints work as they stand."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from services import warm

from monolith.cli.main import main

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def test_the_three_commands_and_the_test_run_as_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "my-shop"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("made my-shop: task.py, run.toml, data/clicks.csv, test_task.py\n")
    to, *commands = [line.strip() for line in printed.splitlines() if line.startswith("  ")]
    assert to == "cd my-shop"
    assert [shlex.split(command)[:2] for command in commands] == [
        ["monolith", "train"],
        ["monolith", "evaluate"],
        ["monolith", "predict"],
    ]
    folder = tmp_path / "my-shop"
    for command in commands:
        done = warm.run(["-m", *shlex.split(command)], timeout=300, cwd=folder, env=ENVIRONMENT)
        assert done.returncode == 0, done.stderr
    assert (folder / "predictions.csv").read_text().startswith("prediction.click,label.click,user,item\n0.")
    done = warm.run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider"], timeout=300, cwd=folder, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def test_what_is_there_is_never_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "shop").mkdir()
    assert main(["new", str(tmp_path / "shop")]) == 2
    assert "it exists; choose another name" in capsys.readouterr().err
    assert list((tmp_path / "shop").iterdir()) == []


@pytest.mark.parametrize("name", ["1st", "my shop", "shop.py"])
def test_a_name_that_makes_no_name_of_a_task_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["new", str(tmp_path / name)]) == 2
    assert "use a letter, and then letters, digits, - and _" in capsys.readouterr().err
