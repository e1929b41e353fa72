"""`monolith bench checkpoint`: what it prints, in a run too small to mean anything."""

from __future__ import annotations

import json
from typing import Any

import pytest
from services import warm

from monolith.cli.main import main


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    command = [
        "-m",
        "monolith",
        "bench",
        "checkpoint",
        "--quick",
        "--rows",
        "30000",
        "--threads",
        "1",
        "--json",
    ]
    done = warm.run(command, check=True)
    assert "rows of 16 floats" in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_report_has_the_agreed_shape(report: dict[str, Any]) -> None:
    assert list(report) == ["bench", "machine", "results"]
    assert report["bench"] == "checkpoint"
    for result in report["results"]:
        assert set(result) - {"note"} == {"case", "metric", "value", "unit", "baseline", "ratio"}


def test_saving_and_restoring_are_compared_with_plain_files(report: dict[str, Any]) -> None:
    beside = {
        r["case"]: r["baseline"] for r in report["results"] if r["metric"] == "bytes_per_s" and r["ratio"]
    }
    assert beside == {
        "save": "plain write",
        "restore, cold": "plain read, cold",
        "restore, warm": "plain read, warm",
    }


def test_an_increment_is_about_as_large_as_what_was_touched(report: dict[str, Any]) -> None:
    sizes = {r["case"]: r["ratio"] for r in report["results"] if r["baseline"] == "full checkpoint"}
    assert sizes["increment, 10.0% of the rows touched"] == pytest.approx(0.1, abs=0.02)
    assert sizes["increment, 1.0% of the rows touched"] < 0.03


def test_training_while_saving_is_compared_with_training_alone(report: dict[str, Any]) -> None:
    cases = {(r["case"], r["metric"]) for r in report["results"] if str(r["baseline"]).startswith("alone")}
    for name in ("DeepFM, Zipf ids", "DeepFM, uniform ids", "rows only, uniform ids"):
        assert (f"saving, {name}, 1 thread", "examples_per_s") in cases
        assert (f"saving, {name}, 1 thread", "longest_pause") in cases


@pytest.mark.parametrize("flags", [["--rows", "0"], ["--touched", "2"]])
def test_bad_options_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "checkpoint", *flags]) == 2
    assert "bench checkpoint" in capsys.readouterr().err
