"""`monolith data join` and `data skew`; the guide "Train on served features" runs both as a user would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from monolith.cli.main import main
from monolith.data import format_of


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Rows that were served a minute apart."""
    rows = [
        {"served.key": f"r{n}/0", "line_id.req_time": 1_700_000_000 + 60 * n, "item": n} for n in range(4)
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "log.jsonl"


def actions(folder: Path, *given: tuple[str, int, int]) -> str:
    rows = [
        {"served.key": key, "line_id.req_time": 1_700_000_000 + time, "line_id.actions": [action]}
        for key, time, action in given
    ]
    path = folder / "actions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_served_rows_get_labels_by_the_actions_within_the_window(
    tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = actions(
        tmp_path, ("r0/0", 10, 1), ("r1/0", 70, 2), ("r2/0", 9999, 1), ("r3/0", 190, 7), ("lost/0", 200, 1)
    )
    to = str(tmp_path / "joined.tfrecord")
    words = ["--actions", given, "--positives", "1", "2,7", "--window", "10m", "--to", to]
    assert main(["data", "join", str(log), *words]) == 0
    found = {
        item[0]: label
        for chunk in format_of(to).chunks(to)
        for item, label in zip(chunk.records["item"].to_list(), chunk.records["label"].to_list(), strict=True)
    }
    assert found == {0: [1, 0], 1: [0, 1], 2: [0, 0], 3: [0, 1]}
    said = " ".join(capsys.readouterr().err.split())
    assert "4 examples" in said
    assert "3 of them positive" in said
    assert "2 actions without a served row, or too late" in said


@pytest.mark.parametrize("words", [["--to", "x.tfrecord"], ["--actions", "x", "--positives", "one"]])
def test_a_join_that_lacks_something_says_what(
    log: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "join", str(log), *words]) != 0
    assert "--" in capsys.readouterr().err


def test_skew_of_a_file_that_is_no_log_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "clicks.csv").write_text("user,click\nann,1\n")
    assert main(["data", "skew", str(tmp_path), str(tmp_path / "clicks.csv")]) != 0
    assert "--log-served" in " ".join(capsys.readouterr().err.split())
