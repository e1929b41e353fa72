"""`monolith bench tiers`: what it prints, and what its baselines are."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from services import warm

from monolith.cli.main import main
from monolith_bench.options import BenchTiersOptions
from monolith_bench.tiers import WORKS, RocksRows, TiersPlan, distinct_batches


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    options = ["--quick", "--memory", "8MiB", "--memory-rows", "50000", "--tables", "2"]
    options += ["--folder", str(folder), "--json"]
    done = warm.run(["-m", "monolith", "bench", "tiers", *options], check=True, timeout=300)
    assert "100,000 rows of 16 floats" in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_report_has_the_agreed_shape(report: dict[str, Any]) -> None:
    assert list(report) == ["bench", "machine", "results"]
    assert (report["bench"], report["machine"]["memory_limit"]) == ("tiers", 8 << 20)
    assert report["machine"]["rows_in_memory"] == 50_000
    for result in report["results"]:
        assert set(result) - {"note"} == {"case", "metric", "value", "unit", "baseline", "ratio"}
        assert result["value"] is not None or result["note"]


@pytest.mark.parametrize("ids", ["zipf", "uniform"])
@pytest.mark.parametrize("work", WORKS)
def test_a_tiered_table_is_compared_with_memory_and_with_the_disk(
    report: dict[str, Any], work: str, ids: str
) -> None:
    rates = {r["case"]: r["value"] for r in report["results"] if r["metric"] == "rows_per_s"}
    ratios = {r["baseline"]: r["ratio"] for r in report["results"] if r["case"] == f"{work}, {ids}"}
    assert f"{work} in memory" in ratios
    if f"raw reads, {ids}" not in rates:  # a disk whose reads cannot be direct
        assert "not measured" in next(r["note"] for r in report["results"] if r["case"] == "raw reads")
    for baseline, ratio in ratios.items():
        assert ratio == pytest.approx(rates[f"{work}, {ids}"] / rates[f"{baseline}, {ids}"])


@pytest.mark.parametrize("ids", ["zipf", "uniform"])
def test_hits_and_bytes_of_a_step_are_told(report: dict[str, Any], ids: str) -> None:
    found = {r["metric"]: r["value"] for r in report["results"] if r["case"].endswith(f", {ids}")}
    # Rows of a small table with Zipf IDs may all be hot by then.
    assert 0 < found["hit_rate"] <= 1
    assert (found["bytes_read_per_step"] > 0) == (found["hit_rate"] < 1)
    assert found["bytes_written_per_step"] >= 0


@pytest.mark.parametrize("case", ["step, zipf", "step, uniform", "step while rows expire, zipf"])
def test_how_long_steps_take_is_told(report: dict[str, Any], case: str) -> None:
    found = {r["metric"]: r for r in report["results"] if r["case"] == case}
    times = [found[metric]["value"] for metric in ("p50_step", "p99_step", "longest_step")]
    assert 0 < times[0] <= times[1] <= times[2]
    said = "files compacted meanwhile" if case.startswith("step,") else r"[1-9][\d,]* rows expired in"
    assert re.search(said, found["longest_step"]["note"])


@pytest.mark.parametrize("ids", ["zipf", "uniform"])
def test_tables_side_by_side_are_compared_with_one_after_the_other(report: dict[str, Any], ids: str) -> None:
    found = {r["case"]: r for r in report["results"]}
    several, other = found[f"lookup and update of 2 tables, {ids}"], "one table after the other"
    assert several["baseline"] == other
    assert several["ratio"] == pytest.approx(several["value"] / found[f"{other}, {ids}"]["value"])


def test_most_rows_are_in_files_and_the_memory_is_told(report: dict[str, Any]) -> None:
    found = {r["case"]: r["value"] for r in report["results"]}
    assert found["rows in memory"] < 0.5
    assert found["tiered table"] < found["table in memory"]
    assert found["files of the tiered table"] > 0


@pytest.mark.usefixtures("report")
def test_no_file_is_left(folder: Path) -> None:
    assert list(folder.iterdir()) == []


def test_rocksdb_is_measured_if_it_is_installed_and_said_to_be_missing_otherwise(
    report: dict[str, Any],
) -> None:
    found = [r for r in report["results"] if "RocksDB" in r["case"]]
    if find_spec("rocksdict") is None:
        assert "rocksdict is not installed" in found[0]["note"]
    else:
        assert {r["case"] for r in found} >= {"lookup in RocksDB, zipf", "lookup and update in RocksDB, zipf"}


def test_rows_in_rocksdb_learn_by_adagrad(tmp_path: Path) -> None:
    pytest.importorskip("rocksdict")
    rocks = RocksRows(tmp_path, 2, 8 << 20)
    ids = torch.tensor([7, -3])
    rocks.write(ids, torch.tensor([[1.0, 1.0, 3.0, 0.0], [0.0, 0.0, 1.0, 1.0]]).numpy())
    rocks.step(ids[:1], torch.tensor([[1.0, 2.0]]).numpy())
    rows = rocks.read(ids)
    assert rows[0, 2:].tolist() == [4.0, 4.0]
    assert 0 < 1 - rows[0, 0] < 1 - rows[0, 1]
    assert rows[1].tolist() == [0.0, 0.0, 1.0, 1.0]
    rocks.close()


def test_batches_have_distinct_ids_and_one_length() -> None:
    plan = TiersPlan.settle(BenchTiersOptions(quick=True))
    requests = distinct_batches("zipf", plan, plan.rows)
    assert {len(ids.unique()) for ids in requests.ids} == {len(requests.ids[0])}
    assert len(requests) == plan.batches
    again = distinct_batches("zipf", plan, plan.rows)
    assert all(torch.equal(one, other) for one, other in zip(requests.ids, again.ids, strict=True))


@pytest.mark.parametrize(
    "options, message",
    [
        (["--rows", "0"], "--rows must be at least 1, got 0"),
        (
            ["--memory-rows", "5", "--rows", "4"],
            "--memory-rows must be from 1 to the number of rows, 4, got 5",
        ),
        (["--memory", "1MB"], "--memory must be at least 4MiB, got 1MB"),
        (["--tables", "0"], "--tables must be at least 1, got 0"),
        (
            ["--tables", "3", "--memory", "9MB"],
            "--memory must be at least 4MiB for each of 3 tables, got 9MB",
        ),
        (["--memory", "much"], "'much' is not a size"),
        (["--folder", "/no/such/folder"], "--folder /no/such/folder is not a folder"),
    ],
)
def test_options_out_of_range_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "tiers", *options]) != 0
    assert message in capsys.readouterr().err
