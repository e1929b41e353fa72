"""`monolith bench sync`: what it prints, and what it stands beside."""

from __future__ import annotations

import json
from typing import Any

import pytest
from services import warm

from monolith.cli.main import main


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    command = ["-m", "monolith", "bench", "sync", "--quick", "--features", "2", "--batch", "64", "--json"]
    done = warm.run(command, check=True, timeout=300)
    assert "DeepFM, 2 features" in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_report_has_the_agreed_shape(report: dict[str, Any]) -> None:
    assert list(report) == ["bench", "machine", "results"]
    assert report["bench"] == "sync"
    for result in report["results"]:
        assert set(result) - {"note"} == {"case", "metric", "value", "unit", "baseline", "ratio"}
        assert result["value"] >= 0


def test_ranks_stand_beside_one_process_on_the_same_batch(report: dict[str, Any]) -> None:
    found = {r["case"]: r for r in report["results"] if r["metric"] == "examples_per_s"}
    ranks, alone = found["2 ranks in step"], found["one process, one thread"]
    assert ranks["baseline"] == alone["case"]
    assert ranks["ratio"] == pytest.approx(ranks["value"] / alone["value"])


def test_a_batch_that_ranks_cannot_share_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sync", "--batch", "7"]) != 0
    assert "a batch of 7 cannot be shared by 2 ranks" in capsys.readouterr().err
