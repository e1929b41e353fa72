"""`monolith bench train`: what it prints, and that all its contenders train the same model."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from services import warm
from torch.testing import assert_close

from monolith.bench import rivals, train, trainers
from monolith.bench.options import BenchTrainOptions
from monolith.bench.report import cores
from monolith.cli.main import main

THREADS = "1 thread" if cores() == 1 else "2 threads"
SHAPE = (3, 50, 4, (8,))


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    command = ["-m", "monolith", "bench", "train", "--quick", "--features", "5", "--json"]
    done = warm.run(command, check=True)
    assert "DeepFM, 5 features" in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_report_has_the_agreed_shape(report: dict[str, Any]) -> None:
    assert list(report) == ["bench", "machine", "results"]
    assert report["bench"] == "train"
    for result in report["results"]:
        assert set(result) - {"note"} == {"case", "metric", "value", "unit", "baseline", "ratio"}
        assert result["value"] is not None or result["note"]


@pytest.mark.parametrize("ids", ["uniform", "zipf"])
def test_training_stands_beside_torch(report: dict[str, Any], ids: str) -> None:
    rates = {result["case"]: result["value"] for result in report["results"]}
    found = [result for result in report["results"] if result["case"] == f"DeepFM, {ids}, {THREADS}"]
    baselines = {result["baseline"]: result["ratio"] for result in found}
    for rival in ("nn.EmbeddingBag", "one nn.EmbeddingBag for all"):
        name = f"{rival}, {ids}, {THREADS}"
        assert baselines[name] == pytest.approx(found[0]["value"] / rates[name])
    assert all(result["unit"] == "examples/s" and result["value"] > 0 for result in found)


def test_the_share_of_python_stands_beside_a_whole_step(report: dict[str, Any]) -> None:
    (found,) = [result for result in report["results"] if result["case"].startswith("step on one example")]
    assert (found["metric"], found["baseline"]) == ("ms_per_step", "step, whole batch")
    assert found["ratio"] > 0


def trained(trainer: trainers.TimedTrainer, half: Any) -> list[float]:
    """Train from the same dense weights on the same batches; return the losses."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in half.parameters():
            weight.copy_(torch.randn(weight.shape, generator=draw) * 0.1)
    losses = []
    for _ in range(5):
        positions = torch.randint(0, 50, (16, 3), generator=draw)
        labels = torch.randint(0, 2, (16,), generator=draw).float()
        losses.append(trainer.step(positions, labels).item())
    return losses


def test_all_contenders_train_the_same_model() -> None:
    ours = trainers.OurTrainer(*SHAPE, 1)
    losses = trained(ours, ours.model)
    assert losses[0] != losses[1]
    others: list[Any] = [trainers.TorchTrainer(*SHAPE, 16), trainers.FusedTorchTrainer(*SHAPE, 16)]
    for other in others:
        assert_close(trained(other, other._half), losses, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(bool(rivals.why_no_fbgemm()), reason=f"FBGEMM: {rivals.why_no_fbgemm()}")
def test_fbgemm_trains_it_too() -> None:
    """Its accumulators begin at 0 and ours at 0.1, so only the first loss is the same."""
    ours, other = trainers.OurTrainer(*SHAPE, 1), trainers.FbgemmTrainer(*SHAPE, 16)
    found = trained(other, other._half)
    assert found[0] == pytest.approx(trained(ours, ours.model)[0], rel=1e-4)
    assert found[0] != found[1]


def test_every_feature_of_a_batch_is_drawn_alike() -> None:
    plan = train.TrainPlan.settle(BenchTrainOptions(quick=True, features=4))
    batches = train.make_batches("uniform", plan)
    assert batches[0].shape == (plan.batch, 4)
    drawn = torch.cat(batches).numpy()
    assert drawn.max() < plan.rows
    assert np.allclose(drawn.mean(0), plan.rows / 2, rtol=0.05)


@pytest.mark.parametrize("flag", ["ids", "features", "dim", "batch", "threads", "repeats"])
def test_nothing_to_measure_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "train", f"--{flag}", "0"]) == 2
    assert f"--{flag} must be at least 1" in capsys.readouterr().err
