"""`monolith bench served-rows`: what it prints, and what its baselines are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from services import warm

from monolith.cli.main import main


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("disk")
    options = ["--quick", "--rows", "60000", "--folder", str(folder), "--json"]
    done = warm.run(["-m", "monolith", "bench", "served-rows", *options], check=True, timeout=300)
    assert "60,000 rows of 16 floats" in done.stderr
    assert list(folder.iterdir()) == []
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("ids", ["zipf", "uniform"])
@pytest.mark.parametrize("metric", ["p50", "p99"])
def test_waiting_is_compared_with_memory_and_with_the_disk(
    report: dict[str, Any], metric: str, ids: str
) -> None:
    values = {r["case"]: r["value"] for r in report["results"] if r["metric"] == metric}
    ratios = {
        r["baseline"]: r["ratio"]
        for r in report["results"]
        if r["metric"] == metric and r["case"] == f"memory for a part, {ids}"
    }
    assert "in memory" in ratios
    for baseline, ratio in ratios.items():
        assert ratio == pytest.approx(values[f"memory for a part, {ids}"] / values[f"{baseline}, {ids}"])


def test_frequent_ids_are_found_in_memory_more_often(report: dict[str, Any]) -> None:
    found = {r["case"]: r["value"] for r in report["results"] if r["metric"] == "hit_rate"}
    assert 0 < found["found in memory, uniform"] < found["found in memory, zipf"] < 1


def test_memory_for_all_rows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "served-rows", "--quick", "--rows", "1000", "--memory", "1GB"]) != 0
    assert "give less --memory" in capsys.readouterr().err
