"""`monolith bench sync`: what it prints, and what it stands beside."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from services import warm

from monolith.cli.main import main
from monolith_bench import torchrec_ranks
from monolith_bench.fleet_processes import FleetTask
from monolith_bench.torchrec_ranks import torchrec_stepping


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
        assert (result["value"] is None) == ("note" in result), "a reason where nothing was measured"
        assert result["value"] is None or result["value"] >= 0


def test_ranks_are_compared_with_one_process_on_the_same_batch(report: dict[str, Any]) -> None:
    found = {r["case"]: r for r in report["results"] if r["metric"] == "examples_per_s"}
    ranks, alone = found["2 ranks in step"], found["one process, one thread"]
    assert ranks["baseline"] == alone["case"]
    assert ranks["ratio"] == pytest.approx(ranks["value"] / alone["value"])


def test_torchrec_has_a_row_with_a_number_or_the_reason_why_not(report: dict[str, Any]) -> None:
    case = "2 ranks of torchrec's DistributedModelParallel"
    (found,) = (r for r in report["results"] if r["case"] == case)
    assert found["metric"] == "examples_per_s"
    if find_spec("torchrec") is None:
        assert found["note"].startswith("torchrec: not installed: pip install")
        assert not [r for r in report["results"] if r["baseline"] == case]


def test_a_torchrec_that_does_not_load_is_a_reason_and_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torchrec").mkdir()
    (tmp_path / "torchrec" / "__init__.py").write_text("raise OSError('undefined symbol: boom')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchrec", raising=False)
    with torchrec_stepping(FleetTask(features=1), 2, 4) as found:
        assert found == (
            f"installed, but does not load next to torch {torch.__version__}: undefined symbol: boom"
        )


def test_a_torchrec_that_fails_is_a_reason_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrec_ranks, "why_no_torchrec", lambda: None)
    monkeypatch.setattr(torchrec_ranks, "TorchRecWorker", _fails)
    with torchrec_stepping(FleetTask(features=1), 2, 4) as found:
        assert found == "installed, but fails: RuntimeError: no kernel for rank 0"


def _fails(task: FleetTask, place: tuple[int, int], examples: int) -> None:  # noqa: ARG001
    raise RuntimeError(f"no kernel for rank {place[0]}")


def test_a_batch_that_ranks_cannot_share_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sync", "--batch", "7"]) != 0
    assert "a batch of 7 cannot be shared by 2 ranks" in capsys.readouterr().err
