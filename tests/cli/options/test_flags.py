"""A wrong value of a flag is answered with the flag, the value and what it takes."""

from __future__ import annotations

import pytest

from monolith.cli.main import main


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["train", "t.py:T", "--steps", "ten"], "train: --steps must be a whole number, got 'ten'"),
        (["train", "t.py:T", "--steps=1.5"], "train: --steps must be a whole number, got '1.5'"),
        (["train", "t.py:T", "--save-secs", "1h"], "train: --save-secs must be a number, got '1h'"),
        (["bench", "table", "--threads", "1", "many"], "--threads must be a whole number, got 'many'"),
        (
            ["train", "t.py:T", "--launch", "locl"],
            "must be one of local, ray, got 'locl'; did you mean 'local'?",
        ),
    ],
)
def test_a_wrong_value_is_told_in_one_line(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("monolith: ")
    assert line.endswith(says)


@pytest.mark.parametrize(
    "more",
    [["--id", "-5"], ["--id", "user-00001"], ["--id", "None"], ["--id=7", "--table", "ten"]],
)
def test_what_a_flag_takes_goes_through(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "inspect", "/no/such/folder", *more]) == 2
    assert "/no/such/folder" in capsys.readouterr().err
