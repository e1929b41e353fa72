"""`monolith bench store`: what it prints."""

from __future__ import annotations

import json
from typing import Any

import pytest
from services import warm

from monolith.cli.main import main
from monolith_bench import store
from monolith_bench.options import BenchStoreOptions
from monolith_bench.rows import batches_of

pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    command = ["-m", "monolith", "bench", "store", "--quick", "--ids", "100", "--json"]
    done = warm.run(command, check=True, timeout=300)
    assert "Batches of 100 distinct ids, 16 floats each" in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_report_has_the_agreed_shape(report: dict[str, Any]) -> None:
    assert list(report) == ["bench", "machine", "results"]
    assert report["bench"] == "store"
    for result in report["results"]:
        assert set(result) == {"case", "metric", "value", "unit", "baseline", "ratio"}
        assert result["value"] > 0


@pytest.mark.parametrize("call", ["lookup", "apply_gradients"])
@pytest.mark.parametrize("servers", ["1 server", "2 servers"])
def test_servers_are_compared_with_this_process_and_the_wire(
    report: dict[str, Any], call: str, servers: str
) -> None:
    rates = {r["case"]: r["value"] for r in report["results"] if r["metric"] == "rows_per_s"}
    case = f"{call}, 100 ids, {servers}"
    found = {r["baseline"]: r["ratio"] for r in report["results"] if r["case"] == case and r["baseline"]}
    echo, here = (rates[f"{call}, 100 ids, {name}"] for name in ("plain Flight echo", "this process"))
    both = 1 / (1 / echo + 1 / here)
    assert found == {
        f"{call}, 100 ids, {name}": pytest.approx(rates[case] / rate)
        for name, rate in {
            "plain Flight echo and this process, added": both,
            "plain Flight echo": echo,
            "this process": here,
        }.items()
    }
    (cost,) = [r for r in report["results"] if r["case"] == case and r["metric"] == "ms_per_call"]
    assert cost["value"] == pytest.approx(100 / rates[case] * 1e3)


def test_lookups_in_half_floats_are_compared_with_full_floats(report: dict[str, Any]) -> None:
    cases = {r["case"] for r in report["results"] if r["case"].endswith("half floats")}
    assert cases == {"lookup, 100 ids, 2 servers, half floats"}


def test_dense_weights_are_compared_with_the_wire(report: dict[str, Any]) -> None:
    found = [r for r in report["results"] if r["case"] == "dense push and pull, 1 MB, 2 servers"]
    assert {r["baseline"].rpartition(", ")[2] for r in found} == {"plain Flight echo", "this process"}
    assert all((r["metric"], r["unit"]) == ("ms_per_call", "ms") for r in found)


def test_the_ids_of_a_batch_are_distinct() -> None:
    plan = store.StorePlan.settle(BenchStoreOptions(quick=True, ids=(500,)))
    batches = batches_of(500, rows=plan.rows, count=store.BATCHES, seed=plan.seed)
    assert all(len(batch.ids.unique()) == 500 for batch in batches)
    assert batches[0].ids.tolist() != batches[1].ids.tolist()


@pytest.mark.parametrize("flag", ["ids", "rows", "dim", "servers", "repeats"])
def test_nothing_to_measure_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "store", f"--{flag}", "0"]) == 2
    assert f"--{flag} must be at least 1" in capsys.readouterr().err


def test_more_distinct_ids_than_rows_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "store", "--ids", "11", "--rows", "10"]) == 2
    assert "a batch of 11 distinct --ids needs as many --rows, and there are 10" in capsys.readouterr().err
    assert main(["bench", "store", "--dense-bytes", "1"]) == 2
    assert "--dense-bytes must be at least 32" in capsys.readouterr().err
