"""`monolith bench serve`: what it prints."""

from __future__ import annotations

import json
from typing import Any

import pytest
from services import warm

pytest.importorskip("grpc")
pytest.importorskip("uvicorn")

WAYS = ("in-process", "gRPC", "HTTP, JSON", "HTTP, binary")


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    words = ["-m", "monolith", "bench", "serve", "--quick", "--json"]
    done = warm.run(words, check=True, timeout=300)
    assert "Requests of batch 2, 2 connections" in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_report_has_the_agreed_shape(report: dict[str, Any]) -> None:
    assert list(report) == ["bench", "machine", "results"]
    assert report["bench"] == "serve"
    for result in report["results"]:
        assert set(result) == {"case", "metric", "value", "unit", "baseline", "ratio"}  # nothing failed
        assert result["value"] > 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("metric", ["requests_per_s", "p50", "p99"])
def test_each_protocol_is_compared_with_the_bare_predictor(
    report: dict[str, Any], way: str, metric: str
) -> None:
    case = "batch 2, 2 connections"
    found = {(one["case"], one["metric"]): one for one in report["results"] if one["case"].startswith(case)}
    one, bare = found[f"{case}, {way}", metric], found[f"{case}, the bare predictor", metric]
    assert one["baseline"] == f"{case}, the bare predictor"
    assert one["ratio"] == pytest.approx(one["value"] / bare["value"])


def test_the_predictor_is_compared_with_plain_torch(report: dict[str, Any]) -> None:
    case = "predict, batch 2, one caller"
    (one,) = [one for one in report["results"] if one["case"] == case]
    assert one["baseline"] == f"{case}, plain torch, eager"
