"""`monolith bench train`: what it prints, and that all its contenders train the same model."""

from __future__ import annotations

import json
from typing import Any, Literal

import numpy as np
import pytest
import torch
from services import warm
from services.emulated_cuda import device_named, device_names
from torch.testing import assert_close

from monolith.cli.main import main
from monolith_bench import rivals, train, trainers
from monolith_bench.options import BenchTrainOptions
from monolith_bench.report import Report, Result, cores

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
def test_training_is_compared_with_torch(report: dict[str, Any], ids: str) -> None:
    rates = {result["case"]: result["value"] for result in report["results"]}
    found = [result for result in report["results"] if result["case"] == f"DeepFM, {ids}, {THREADS}"]
    baselines = {result["baseline"]: result["ratio"] for result in found}
    for rival in ("nn.EmbeddingBag", "one nn.EmbeddingBag for all"):
        name = f"{rival}, {ids}, {THREADS}"
        assert baselines[name] == pytest.approx(found[0]["value"] / rates[name])
    assert all(result["unit"] == "examples/s" and result["value"] > 0 for result in found)


def test_the_time_in_python_is_compared_with_a_whole_step(report: dict[str, Any]) -> None:
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
        labels = torch.randint(0, 2, (16,), generator=draw).float().to(next(half.parameters()).device)
        losses.append(trainer.step(positions, labels).item())
    return losses


def test_all_contenders_train_the_same_model() -> None:
    ours = trainers.OurTrainer(*SHAPE, 1)
    losses = trained(ours, ours.model)
    assert losses[0] != losses[1]
    others: list[Any] = [trainers.TorchTrainer(*SHAPE, 16), trainers.FusedTorchTrainer(*SHAPE, 16)]
    for other in others:
        assert_close(trained(other, other._half), losses, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", device_names())
@pytest.mark.parametrize("embedding_device, hot", [("host", None), ("device", None), ("device", 12)])
def test_on_a_device_ours_trains_the_same_model_wherever_its_rows_are(
    name: str, embedding_device: Literal["host", "device"], hot: int | None
) -> None:
    device = device_named(name)
    here = trainers.OurTrainer(*SHAPE, 1)
    there = trainers.OurTrainer(*SHAPE, 1, device=device, embedding_device=embedding_device, hot_rows=hot)
    assert_close(trained(there, there.model), trained(here, here.model), rtol=1e-4, atol=1e-4)
    ids = torch.arange(50)
    assert_close(there.store.table("f001").lookup(ids), here.store.table("f001").lookup(ids))


@pytest.mark.skipif(bool(rivals.why_no_fbgemm()), reason=f"FBGEMM: {rivals.why_no_fbgemm()}")
def test_fbgemm_trains_it_too() -> None:
    """Its accumulators begin at 0 and ours at 0.1, so only the first loss is the same."""
    ours, other = trainers.OurTrainer(*SHAPE, 1), trainers.FbgemmTrainer(*SHAPE, 16)
    found = trained(other, other._half)
    assert found[0] == pytest.approx(trained(ours, ours.model)[0], rel=1e-4)
    assert found[0] != found[1]


def test_every_feature_of_a_batch_is_drawn_alike() -> None:
    plan = train.TrainPlan.settle(BenchTrainOptions(quick=True, features=4))
    batches = train.make_batches("uniform", plan, 256)
    assert batches[0].shape == (256, 4)
    drawn = torch.cat(batches).numpy()
    assert drawn.max() < plan.rows
    assert np.allclose(drawn.mean(0), plan.rows / 2, rtol=0.05)


@pytest.mark.parametrize("flag", ["ids", "features", "dim", "batch", "threads", "repeats"])
def test_nothing_to_measure_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "train", f"--{flag}", "0"]) == 2
    assert f"--{flag} must be at least 1" in capsys.readouterr().err


# On a GPU


@pytest.fixture(scope="module", params=device_names())
def on_device(request: pytest.FixtureRequest) -> list[Result]:
    options = BenchTrainOptions(
        device="cuda", quick=True, features=3, ids=300, dim=4, hidden=(8,), batch=(4, 8), threads=1
    )
    report = Report("train")
    train.measure_on(device_named(request.param, mixes=True), train.TrainPlan.settle(options), report)
    return report.results


@pytest.mark.parametrize("case", ["uniform, batches of 4", "uniform, batches of 8", "zipf, batches of 8"])
@pytest.mark.parametrize("rows", ["rows on the device", "rows in host memory", train.HOT])
def test_on_a_gpu_device_rows_and_host_rows_are_compared_with_torch(
    on_device: list[Result], case: str, rows: str
) -> None:
    found = {(one.case, one.metric): one for one in on_device}
    rate, step = (found[f"{rows}, {case}", metric] for metric in ("examples_per_s", "ms_per_step"))
    torchs = found[f"one nn.EmbeddingBag for all, {case}", "examples_per_s"]
    assert rate.value is not None
    assert torchs.value is not None
    assert (rate.baseline, rate.ratio) == (torchs.case, pytest.approx(rate.value / torchs.value))
    assert step.value == pytest.approx(int(case[-1]) / rate.value * 1e3)


def test_the_cache_of_hot_rows_is_too_small_for_all_and_says_how_many_ids_it_has(
    on_device: list[Result],
) -> None:
    for case in ("uniform, batches of 4", "zipf, batches of 8"):
        (found,) = [one for one in on_device if one.case == f"ids whose row was there, {train.HOT}, {case}"]
        assert found.value is not None
        assert 0 < found.value < 1


def test_a_step_on_rows_on_the_device_says_what_it_is_made_of(on_device: list[Result]) -> None:
    case = "rows on the device, uniform, batches of 4"
    values = {one.case: one.value for one in on_device if one.metric == "ms_per_step"}
    for phase in ("launching", "lookup", "forward", "backward", "update"):
        assert (values[f"{phase} of a step, {case}"] or 0) > 0


def test_a_step_on_host_rows_is_compared_with_the_larger_of_host_and_device_work(
    on_device: list[Result],
) -> None:
    case = "uniform, batches of 4"
    values = {one.case: one.value for one in on_device if one.metric == "ms_per_step"}
    (found,) = [one for one in on_device if one.case == f"step, rows in host memory, {case}"]
    larger = max(values[f"{half} work of a step, {case}"] or 0 for half in ("host", "device"))
    assert values[f"larger half, {case}"] == pytest.approx(larger)
    assert found.value == values[f"rows in host memory, {case}"]
    assert (found.baseline, found.ratio) == (
        f"larger half, {case}",
        pytest.approx((found.value or 0) / larger),
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_it_says_so_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "train", "--device", "cuda", "--quick"]) != 0
    said = capsys.readouterr().err
    assert "needs a machine with an NVIDIA GPU" in said
    assert "Leave --device out" in said


def test_a_gpu_has_three_sizes_of_batches_and_all_cores_by_default() -> None:
    plan = train.TrainPlan.settle(BenchTrainOptions(device="cuda"))
    assert (plan.batches, plan.threads) == ((2048, 8192, 65536), cores())
    assert train.TrainPlan.settle(BenchTrainOptions()).batches == (2048,)
