"""`monolith bench fleet`: what it prints, and that the halves of a step are what a step does."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from services import warm

from monolith.cli.main import main
from monolith.store import DenseShard, LocalStore, ParameterServer
from monolith.train import Mode
from monolith.train.model import Model
from monolith_bench.fleet_processes import BATCHES, FleetTask, FleetWorker, dense_config

pytest.importorskip("pyarrow")

BEHIND = ", dense.prefetch and dense.postpush"
SMALL = FleetTask(features=2, rows=50, dim=2, hidden=(4,))


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    command = ["-m", "monolith", "bench", "fleet", "--quick", "--features", "2", "--sizes", "1", "--json"]
    done = warm.run(command, check=True, timeout=300)
    assert "DeepFM, 2 features" in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def value(report: dict[str, Any], case: str, metric: str) -> float:
    return next(r["value"] for r in report["results"] if (r["case"], r["metric"]) == (case, metric))


def test_the_report_has_the_agreed_shape(report: dict[str, Any]) -> None:
    assert list(report) == ["bench", "machine", "results"]
    assert report["bench"] == "fleet"
    for result in report["results"]:
        assert set(result) - {"note"} == {"case", "metric", "value", "unit", "baseline", "ratio"}
        assert result["value"] >= 0


@pytest.mark.parametrize("said", ["", BEHIND])
def test_a_step_is_compared_with_the_larger_of_its_halves(report: dict[str, Any], said: str) -> None:
    where = f"1 server, 1 worker{said}"
    (found,) = [r for r in report["results"] if r["case"] == f"step, {where}" and r["baseline"]]
    halves = [value(report, f"{half} alone, {where}", "ms_per_step") for half in ("compute", "wire")]
    assert found["baseline"] == f"the larger of compute and wire alone, {where}"
    assert found["ratio"] == pytest.approx(found["value"] / max(halves))


@pytest.mark.parametrize("said", ["", BEHIND])
def test_servers_and_workers_are_compared_with_one_process(report: dict[str, Any], said: str) -> None:
    case = f"1 server and 1 worker{said}"
    (found,) = [r for r in report["results"] if r["case"] == case]
    assert (found["baseline"], found["unit"]) == ("one process", "examples/s")
    assert found["ratio"] == pytest.approx(found["value"] / value(report, "one process", "examples_per_s"))
    for who in ("worker", "servers"):
        assert value(report, f"{case}, {who}", "processor_ms_per_step") >= 0


def test_computing_alone_sends_nothing_and_the_wire_alone_what_a_step_sends() -> None:
    model = Model(SMALL, Mode.TRAIN, seed=0)
    stores = [store for store in model.stores if isinstance(store, LocalStore)]
    share = DenseShard(model.weights(), model.dense, (0, 1))
    with ParameterServer(stores, share, shard=(0, 1)) as server:
        worker = FleetWorker(SMALL, [server.address], 8, 0, dense_config("default"))
        worker.warm_up()
        before = server.traffic
        for _ in range(BATCHES):
            worker.compute()
        assert server.traffic == before
        for _ in range(BATCHES):
            worker.wire()
        wire = server.traffic.received - before.received, server.traffic.sent - before.sent
        middle = server.traffic
        for _ in range(BATCHES):
            worker.step()
        worker.close()
        step = server.traffic.received - middle.received, server.traffic.sent - middle.sent
    model.close()
    assert wire == pytest.approx(step, rel=0.2)  # beside what was looked up ahead, before and after


def test_one_process_trains_its_own_rows() -> None:
    worker = FleetWorker(SMALL, [], 8, 0)
    before = [weight.detach().clone() for weight in worker._model.weights().values()]
    worker.warm_up()
    assert worker.work("step", 0.0).steps == 1
    after = worker._model.weights().values()
    assert any(not torch.equal(was, now) for was, now in zip(before, after, strict=True))
    assert sum(stats.rows for stats in worker._model.stats().values()) > 0
    worker.close()


@pytest.mark.parametrize("flag", ["ids", "features", "dim", "batch", "sizes", "repeats"])
def test_nothing_to_measure_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "fleet", f"--{flag}", "0"]) == 2
    assert f"--{flag} must be at least 1" in capsys.readouterr().err
