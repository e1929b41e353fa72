"""`monolith bench serve`: what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from services import warm

from monolith_bench.serve_load import processor_seconds

pytest.importorskip("grpc")
pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")

WAYS = ("in-process", "gRPC", "HTTP, JSON", "HTTP, binary")
CASE = "batch 2, 2 connections"


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    words = ["-m", "monolith", "bench", "serve", "--quick", "--json"]
    done = warm.run(words, check=True, timeout=300)
    assert f"Requests of {CASE}" in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_report_has_the_agreed_shape(report: dict[str, Any]) -> None:
    assert list(report) == ["bench", "machine", "results"]
    assert report["bench"] == "serve"
    for result in report["results"]:
        assert set(result) == {"case", "metric", "value", "unit", "baseline", "ratio"}  # nothing failed
        assert result["value"] > 0 or result["metric"] in ("hit_rate", "compared", "largest_difference")


@pytest.mark.parametrize(
    ("way", "baseline"),
    [
        *((way, "the bare predictor") for way in WAYS),
        ("gRPC", "FastAPI, binary"),
        ("HTTP, binary", "FastAPI, binary"),
        ("HTTP, JSON", "FastAPI, JSON"),
    ],
)
@pytest.mark.parametrize("metric", ["requests_per_s", "p50", "p99"])
def test_each_protocol_is_compared_with_the_bare_predictor_and_with_fastapi(
    report: dict[str, Any], way: str, baseline: str, metric: str
) -> None:
    found = {
        (one["case"], one["metric"], one["baseline"]): one
        for one in report["results"]
        if one["case"].startswith(CASE)
    }
    one = found[f"{CASE}, {way}", metric, f"{CASE}, {baseline}"]
    assert one["ratio"] == pytest.approx(one["value"] / found[f"{CASE}, {baseline}", metric, None]["value"])


def test_the_predictor_is_compared_with_plain_torch_of_many_tables_and_of_one(report: dict[str, Any]) -> None:
    case = "predict, batch 2, one caller"
    baselines = [one["baseline"] for one in report["results"] if one["case"] == case]
    assert baselines == [f"{case}, plain torch, eager", f"{case}, plain torch, eager, one table"]


def test_processor_time_is_reported_next_to_requests_per_second(report: dict[str, Any]) -> None:
    # Of the servers it is zero here, and left out: processes that a warm one starts only stand for others.
    cases = {one["case"] for one in report["results"] if one["metric"] == "processor_time"}
    assert {f"{CASE}, the bare predictor", f"{CASE}, in-process"} <= cases


def test_processor_time_of_the_client_is_reported_apart_from_that_of_the_server(
    report: dict[str, Any],
) -> None:
    cases = {one["case"] for one in report["results"] if one["metric"] == "client_processor_time"}
    assert {f"{CASE}, {way}" for way in WAYS[1:]} <= cases
    assert cases.isdisjoint({f"{CASE}, the bare predictor", f"{CASE}, in-process"})


@pytest.mark.parametrize("what", ["2 runners", "2 processes"])
def test_two_runners_and_two_processes_are_compared_with_one(report: dict[str, Any], what: str) -> None:
    case = f"{CASE}, HTTP, binary"
    found = {one["metric"]: one for one in report["results"] if one["case"] == f"{case}, {what}"}
    assert {"requests_per_s", "p50", "p99"} <= found.keys()
    assert {one["baseline"] for one in found.values()} == {f"{case}, 1 runner"}


@pytest.mark.parametrize("way", ["HTTP, JSON", "gRPC"])
def test_a_two_tower_model_is_asked_for_its_best_items(report: dict[str, Any], way: str) -> None:
    found = {one["metric"] for one in report["results"] if one["case"] == f"top 10 of 500 items, {way}"}
    assert {"requests_per_s", "p50", "p99"} <= found


def test_the_processor_time_of_a_process_includes_its_children() -> None:
    work = "t = __import__('time'); [0 for _ in iter(lambda: t.process_time() < 0.2, False)]"
    parent = f"{work}; import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    child = f"{work}; print(1, flush=True); input()"
    words = [sys.executable, "-c", parent, child]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert processor_seconds(process.pid) >= 0.4


@pytest.mark.parametrize("way", ["HTTP, JSON", "HTTP, binary", "gRPC"])
@pytest.mark.parametrize("baseline", ["whole numbers", "full rows"])
def test_texts_are_compared_with_whole_numbers_and_in_ranking_requests_with_full_rows(
    report: dict[str, Any], way: str, baseline: str
) -> None:
    case = {
        "whole numbers": "texts, batch 2",
        "full rows": "candidates, 18 user and 8 item features of texts",
    }
    compared = [
        one
        for one in report["results"]
        if one["case"].startswith(case[baseline])
        and one["baseline"] is not None
        and one["baseline"].endswith(f"{way}, {baseline}")
    ]
    assert {one["metric"] for one in compared} >= {"requests_per_s", "p50", "p99"}


def test_the_ways_to_run_a_dense_half_are_compared_with_that_of_a_server(report: dict[str, Any]) -> None:
    found = {one["case"]: one["baseline"] for one in report["results"] if one["metric"] == "processor_us"}
    assert found["dense half, batch 2, recorded"] is None
    assert found["dense half, batch 2, by Python"] == "dense half, batch 2, recorded"


def test_answers_with_the_cache_of_histories_are_those_without_it(report: dict[str, Any]) -> None:
    found = [one["value"] for one in report["results"] if one["metric"] == "largest_difference"]
    assert found
    assert max(found) <= 1e-6
    ways = ("in the cache", "encoded once", "full rows")
    cases = {one["case"] for one in report["results"]}
    assert {f"history of 20 steps, 5 items, HTTP, binary, {way}" for way in ways} <= cases
