"""`monolith bench table`: what it prints, that its ratios are true, and that its ids are what they claim."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from services import warm

from monolith.cli.main import main
from monolith.table.hashing import slot_of
from monolith_bench import rivals
from monolith_bench.ids import IdBatches, id_of, uniform, zipf
from monolith_bench.report import beside, cores, readable
from monolith_bench.table import SCALE, busy_core
from monolith_bench.timing import Contender, race

FIELDS = {"case", "metric", "value", "unit", "baseline", "ratio"}
MOST = "1 thread" if cores() == 1 else "2 threads"


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """One small run of everything, as a user starts it: standard output must be JSON and nothing else."""
    done = warm.run(
        ["-m", "monolith", "bench", "table", "--quick", "--scaling", "--busy", "--json"],
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    assert "Speed, " in done.stderr
    return found


def test_the_report_has_the_agreed_shape(report: dict[str, Any]) -> None:
    assert list(report) == ["bench", "machine", "results"]
    assert report["bench"] == "table"
    assert 0 <= report["machine"]["busy_elsewhere"] <= 1
    assert {"cpu", "cores", "memory_bytes", "huge_pages", "python", "torch"} <= set(report["machine"])
    for result in report["results"]:
        assert set(result) - {"note"} == FIELDS
        assert (result["baseline"] is None) == (result["ratio"] is None)
        assert result["value"] is not None or result["note"]


@pytest.mark.parametrize("threads", sorted({"1 thread", MOST}))
@pytest.mark.parametrize("ids", ["uniform", "zipf"])
def test_speed_is_compared_with_the_limit_and_the_rivals(
    report: dict[str, Any], ids: str, threads: str
) -> None:
    for work, baselines in {
        "lookup": {"raw gather", "torch lookup"},
        "update": {"raw read-modify-write"},
        "lookup and update": {"torch step"},
    }.items():
        found = [result for result in report["results"] if result["case"] == f"{work}, {ids}, {threads}"]
        assert baselines <= {result["baseline"] for result in found}
        assert all(result["metric"] == "rows_per_s" and result["value"] > 0 for result in found)


@pytest.mark.parametrize(
    "case, metric",
    [
        (f"insert, {MOST}", "rows_per_s"),
        (f"lookup, uniform, {MOST}, 64 floats", "rows_per_s"),
        (f"update, uniform, {MOST}, 128 floats", "rows_per_s"),
        ("overhead, 32 floats", "overhead"),
        ("worst overhead on the way, 32 floats", "overhead"),
        ("bytes per row, 16 floats, adagrad", "bytes_per_row"),
        ("bytes per row, bfloat16, 16 floats, adagrad", "bytes_per_row"),
        ("lookup, bfloat16, 16 floats, adagrad", "rows_per_s"),
        ("lookup, float16, 16 floats, sgd", "rows_per_s"),
        ("bytes per row, int8, 16 floats, sgd", "bytes_per_row"),
        ("update with dedup, bfloat16, 16 floats, sgd", "rows_per_s"),
        ("write while growing", "longest_pause"),
        ("write while growing", "p99.9_pause"),
        ("read while growing", "longest_pause"),
        (f"lookup, uniform, {MOST}, one core busy", "rows_per_s"),
        (f"update, uniform, {MOST}, one core busy", "rows_per_s"),
        *((f"lookup, uniform, {MOST}, {1000 * scale:,} rows", "ns_per_row") for scale in SCALE),
        *((f"update, uniform, {MOST}, {1000 * scale:,} rows", "ns_per_row") for scale in SCALE),
    ],
)
def test_all_that_is_promised_is_there(report: dict[str, Any], case: str, metric: str) -> None:
    assert (case, metric) in {(result["case"], result["metric"]) for result in report["results"]}


def test_a_ratio_is_the_value_over_that_of_the_baseline(report: dict[str, Any]) -> None:
    values = {(result["case"], result["metric"]): result["value"] for result in report["results"]}
    compared = [result for result in report["results"] if result["baseline"] is not None]
    assert compared
    for result in compared:
        rest = result["case"].partition(",")[2]
        named = [(name, result["metric"]) for name in (result["baseline"], f"{result['baseline']},{rest}")]
        (other,) = [values[name] for name in named if name in values]
        assert result["ratio"] == pytest.approx(result["value"] / other)


def test_without_fbgemm_it_says_so(report: dict[str, Any]) -> None:
    if rivals.why_no_fbgemm() is None:
        pytest.skip("FBGEMM is installed")
    (result,) = [result for result in report["results"] if result["case"] == "fbgemm"]
    assert result["value"] is None
    assert "pip install" in result["note"]


@pytest.mark.parametrize("flag", ["--rows", "--dim", "--batch", "--repeats", "--threads", "--also-dims"])
def test_a_count_of_nothing_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "table", flag, "0"]) == 2
    assert flag in capsys.readouterr().err


def test_more_rows_than_memory_are_refused_before_it_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "table", "--rows", "4000000000"]) == 2
    assert "fewer --rows" in capsys.readouterr().err


# Ids


def test_ids_are_distinct_and_negative_half_of_the_time() -> None:
    ids = id_of(np.arange(10_000))
    assert len(set(ids.tolist())) == 10_000
    assert 0.45 < (ids < 0).float().mean() < 0.55
    assert len(np.unique(slot_of(ids.numpy()))) > 5_000


def test_uniform_positions_reach_every_row() -> None:
    assert set(uniform(50, 5_000, np.random.default_rng(0)).tolist()) == set(range(50))


def test_zipf_positions_fall_off_as_they_should_and_are_spread_out() -> None:
    counts = Counter(zipf(1000, 200_000, np.random.default_rng(0)).tolist()).most_common(4)
    (first, most), (second, next_most), *_ = counts
    assert most / next_most == pytest.approx(2**1.05, rel=0.05)
    assert abs(first - second) > 10


@pytest.mark.parametrize("rows", [1, 2, 3, 10, 64])
def test_zipf_positions_stay_among_the_rows_and_can_be_any(rows: int) -> None:
    positions = zipf(rows, 20_000, np.random.default_rng(0))
    assert set(positions.tolist()) == set(range(rows))


def test_all_contenders_are_asked_for_the_same_rows() -> None:
    batches = IdBatches.of(np.array([3, 1, 2, 3], np.uint32), 2)
    assert [batch.tolist() for batch in batches.indices] == [[3, 1], [2, 3]]
    assert torch.equal(batches.ids[1], id_of(np.array([2, 3])))


# Timing


def test_contenders_take_turns_and_resume_where_they_stopped() -> None:
    seen: list[tuple[str, int]] = []

    def contender(name: str) -> Contender:
        return Contender(10, lambda batch: seen.append((name, batch)), iter(range(100)))

    rates = race({"a": contender("a"), "b": contender("b")}, repeats=2, window=0.0)
    assert seen == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert all(rate > 0 for rate in rates.values())


def test_a_rate_counts_rows_not_batches() -> None:
    contender = Contender(1000, lambda _: time.sleep(0.01), iter(range(100)))
    assert 1000 < contender.rows_per_s(0.02) <= 100_000


def test_the_process_that_keeps_a_core_busy_ends_with_the_block() -> None:
    with busy_core() as process:
        assert process.poll() is None
    assert process.poll() is not None


# Rivals


def test_torch_trains_what_it_is_asked_to() -> None:
    rival = rivals.TorchEmbedding(10, 2)
    before = rival.lookup(torch.tensor([3, 4]))
    rival.step(torch.tensor([3, 3]), torch.ones(2, 2))
    after = rival.lookup(torch.tensor([3, 4]))
    assert (after[0] < before[0]).all()
    assert torch.equal(after[1], before[1])


# How it is shown


@pytest.mark.parametrize(
    "value, unit, text",
    [(12_345_678.0, "rows/s", "12.3 M/s"), (0.25, "share", "25.0%"), (1.5, "ms", "1.5 ms")],
)
def test_numbers_are_short_for_people(value: float, unit: str, text: str) -> None:
    assert readable(value, unit) == text


def test_a_baseline_is_named_by_how_it_differs() -> None:
    assert beside("lookup, 2 threads, 1,000 rows", "lookup, 2 threads, 5,000 rows") == "1,000 rows"
    assert beside("raw gather", "lookup, 2 threads") == "raw gather"
    assert beside("lookup, 2 threads", "lookup, 2 threads") == "itself"
