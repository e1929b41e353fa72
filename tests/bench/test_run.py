"""`monolith bench run`: what it prints, and how it tells a steady speed from the lines of a run."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from services import warm

from monolith.errors import ConfigError, UnavailableError
from monolith_bench import run
from monolith_bench.options import BenchRunOptions

pytest.importorskip("pyarrow")

LOG = """\
2026-01-01 00:00:01,000 INFO monolith.train.hooks.live_line: step 1: speed 10 examples/s, loss 0.69
2026-01-01 00:00:01,500 INFO monolith.train.hooks.summaries: step 1: table f00: 5 rows, 480 bytes
2026-01-01 00:00:06,000 INFO monolith.train.hooks.live_line: step 11/2,000 (1%): speed 10 examples/s
2026-01-01 00:00:11,000 INFO monolith.train.hooks.live_line: step 1,011: speed 10 examples/s, loss 0.69
2026-01-01 00:00:11,500 INFO monolith.runtime.trainer: stopping: max_time of 0:00:10 was reached
2026-01-01 00:00:19,000 INFO monolith.train.hooks.live_line: step 1,020: speed 10 examples/s, loss 0.69
"""


def test_the_report_compares_runs_with_loop_reading_and_torch() -> None:
    command = ["-m", "monolith", "bench", "run", "--quick", "--features", "3", "--json"]
    command += ["--set", "data.threads=1", "train.keep.max_to_keep=1"]
    report: dict[str, Any] = json.loads(warm.run(command, check=True).stdout)
    assert report["bench"] == "run"
    values = {result["case"]: result["value"] for result in report["results"]}
    for kind in ("csv", "parquet"):
        found = [one for one in report["results"] if one["case"] == f"monolith train, {kind}"]
        assert [one["baseline"] for one in found] == [
            "training loop alone",
            f"reading alone, {kind}",
            "torch, parquet",
        ]
        for one in found:
            assert one["ratio"] == pytest.approx(one["value"] / values[one["baseline"]])
    assert values["start, imports"] > 0
    assert values["start to the end of the first step"] > values["start, model, kernels and first batch"]


def test_the_speed_is_that_of_the_second_half_before_the_run_stops() -> None:
    lines = run.progress_lines(LOG)
    assert [step for _, step in lines] == [1, 11, 1011]
    assert run.steady_pace(lines, first_pass=5) == pytest.approx(200)


def test_the_first_pass_over_the_file_has_a_speed_of_its_own() -> None:
    lines = [(0.0, 1), (2.0, 21), (4.0, 41), (5.0, 61), (6.0, 161), (8.0, 361)]
    assert run.first_pace(lines, first_pass=50) == pytest.approx(10)
    assert run.steady_pace(lines, first_pass=50) == pytest.approx(100)
    assert run.first_pace(lines, first_pass=10) is None


def test_a_run_within_its_first_pass_has_the_speed_of_its_second_half() -> None:
    assert run.steady_pace([(0.0, 1), (2.0, 21), (4.0, 61)], first_pass=1000) == pytest.approx(20)


def test_too_few_lines_tell_no_speed() -> None:
    with pytest.raises(UnavailableError, match="too few"):
        run.steady_pace(run.progress_lines(LOG)[:2], first_pass=5)


def test_a_worker_whose_row_group_is_smaller_than_a_batch_yields_batches(tmp_path: Any) -> None:
    """It once looked for a whole batch in it for ever, and the loader waited for the worker."""
    import pyarrow as pa
    from pyarrow import parquet

    ids = list(range(70))
    table = pa.table({"a": ids, "b": ids, "label": [one % 2 for one in ids]})
    parquet.write_table(table, tmp_path / "records.parquet", row_group_size=30)
    dataset = run.ParquetBatches(str(tmp_path / "records.parquet"), 2, 100, 16)
    for worker, own in ((0, range(30)), (2, range(60, 70)), (3, range(30))):  # the last shares a row group
        seen = []
        for positions, labels in itertools.islice(dataset.batches(worker, 8), 15):
            assert positions.shape == (16, 2)
            assert labels.tolist() == [one % 2 for one in positions[:, 0].tolist()]
            seen += positions[:, 1].tolist()
        assert {seen.count(one) for one in own} <= {16 * 15 // len(own), 16 * 15 // len(own) + 1}
        assert set(seen) == set(own)


def test_both_files_hold_the_same_records(tmp_path: Any) -> None:
    from pyarrow import csv, parquet

    plan = run.RunPlan.settle(BenchRunOptions(quick=True, features=2, strings=True))
    files = run.write_files(plan, tmp_path)
    rows = csv.read_csv(files["csv"])
    assert rows.equals(parquet.read_table(files["parquet"]))
    assert rows.column_names == ["f00", "f01", "label"]


def test_processes_find_byte_code_as_those_of_users_do(tmp_path: Any) -> None:
    assert run.as_installed({"A": "1"}, tmp_path) == {"A": "1"}
    kept = str(tmp_path / "bytecode")
    assert run.as_installed({"PYTHONDONTWRITEBYTECODE": "1"}, tmp_path) == {"PYTHONPYCACHEPREFIX": kept}


def test_counts_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="--batch must be at least 1"):
        run.RunPlan.settle(BenchRunOptions(batch=0))
