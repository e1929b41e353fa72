"""`monolith bench parts`: what it prints, and that the step it takes apart is a step."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from services import warm

from monolith import native
from monolith.cli.main import main
from monolith.errors import ConfigError
from monolith_bench import parts
from monolith_bench.options import BenchPartsOptions


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    command = ["-m", "monolith", "bench", "parts", "--quick", "--features", "3", "--threads", "1", "--json"]
    done = warm.run(command, check=True)
    assert "3 features of 33,333 uniform ids and 16 floats" in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_part_has_its_time_for_every_number_of_threads(report: dict[str, Any]) -> None:
    assert report["bench"] == "parts"
    times = {result["case"]: result["value"] for result in report["results"]}
    assert len(times) == len(report["results"]) == 2 * (len(parts.PARTS) + 2)
    for threads in ("1 thread", "chosen"):
        for part in (*parts.PARTS, "ours", "step"):
            assert times[f"{part}, 256 examples, {threads}"] > 0


def test_the_chosen_thread_count_is_compared_with_one_thread(report: dict[str, Any]) -> None:
    (found,) = [result for result in report["results"] if result["baseline"] is not None]
    assert found["case"] == "ours, 256 examples, chosen"
    assert found["baseline"] == "ours, 256 examples, 1 thread"
    assert found["ratio"] > 0


def test_the_parts_are_a_step_that_trains() -> None:
    plan = parts.PartsPlan.settle(BenchPartsOptions(ids=60, features=3, dim=4, hidden=(8,), threads=(1,)))
    step = parts.TimedStep(plan, native.Workers(2))
    positions = torch.arange(12).view(4, 3)
    before = step.rows("f001", positions[:, 1])
    assert list(step(positions, torch.ones(4))) == list(parts.PARTS)
    assert (step.rows("f001", positions[:, 1]) != before).any(1).all()
    assert torch.equal(step.rows("f001", positions[:, 0]), before)  # of other ids, nothing


def test_threads_are_powers_of_two_up_to_all_cores_unless_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "cores", lambda: 12)
    assert parts.PartsPlan.settle(BenchPartsOptions()).threads == (1, 2, 4, 8, 12)
    assert parts.PartsPlan.settle(BenchPartsOptions(threads=(3, 99))).threads == (3, 12)


def test_senseless_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "parts", "--batches", "0"]) != 0
    assert "--batches must be at least 1" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="one of uniform, zipf, got 'even'"):
        parts.PartsPlan.settle(BenchPartsOptions(distribution="even"))
