"""`monolith bench table --device cuda`: what it reports, on an emulated device where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from services.emulated_cuda import device_named, device_names

from monolith.cli.main import main
from monolith.errors import ConfigError
from monolith_bench.device_table import LOADS, DeviceTablePlan, measure, need_memory
from monolith_bench.options import BenchTableOptions
from monolith_bench.report import Result


@pytest.fixture(scope="module", params=device_names())
def results(request: pytest.FixtureRequest) -> list[Result]:
    plan = DeviceTablePlan.settle(BenchTableOptions(device="cuda", quick=True, dim=4))
    return measure(plan, device_named(request.param, mixes=True)).results


def found(results: list[Result], case: str, metric: str) -> list[Result]:
    return [result for result in results if (result.case, result.metric) == (case, metric)]


@pytest.mark.parametrize("load", LOADS)
def test_lookups_and_steps_are_compared_with_torch_at_every_load(results: list[Result], load: float) -> None:
    lookups = found(results, f"lookup, load {load}", "rows_per_s")
    assert {result.baseline for result in lookups} == {"torch index_select", "copy"}
    (step,) = found(results, f"lookup and adagrad step, load {load}", "rows_per_s")
    assert step.baseline == "torch sparse adagrad step"
    for result in (*lookups, step):
        (other,) = found(results, str(result.baseline), "rows_per_s")
        assert result.value is not None
        assert other.value is not None
        assert result.ratio == pytest.approx(result.value / other.value)


@pytest.mark.parametrize(
    "case, metric",
    [
        ("lookup, load 0.3 to 0.75", "slowest_over_fastest"),
        ("lookup and adagrad step, load 0.5", "time"),
        ("torch sparse adagrad step", "time"),
        ("adam, 128 floats, forward", "time"),
        ("adam, 128 floats, backward", "time"),
        ("adam, 128 floats, forward and backward", "time"),
        ("lookup, float32, 4 floats, sgd", "rows_per_s"),
        ("bytes of a place, float32, 4 floats, adagrad", "bytes_per_row"),
        ("growing, longest call", "longest_pause"),
        ("growing, median call", "time"),
    ],
)
def test_all_that_is_promised_is_there(results: list[Result], case: str, metric: str) -> None:
    (result,) = found(results, case, metric)
    assert result.value is not None
    assert result.value > 0


@pytest.mark.parametrize("dtype, values", [("bfloat16", 8), ("float16", 8), ("int8", 4 + 4)])
def test_narrow_embeddings_are_compared_with_float32(results: list[Result], dtype: str, values: int) -> None:
    for name, state in (("adagrad", 16), ("sgd", 0)):
        (place,) = found(results, f"bytes of a place, {dtype}, 4 floats, {name}", "bytes_per_row")
        assert place.baseline == f"bytes of a place, float32, 4 floats, {name}"
        assert place.ratio == (values + state) / (16 + state)
        for work in ("lookup", "update"):
            (rate,) = found(results, f"{work}, {dtype}, 4 floats, {name}", "rows_per_s")
            assert rate.baseline == f"{work}, float32, 4 floats, {name}"


def test_the_table_has_grown_when_growth_was_measured(results: list[Result]) -> None:
    (growth,) = found(results, "growing, longest call", "longest_pause")
    assert float(str(growth.note).partition(" times the memory")[0]) > 1


def test_without_options_it_measures_what_is_published() -> None:
    plan = DeviceTablePlan.settle(BenchTableOptions(device="cuda"))
    assert (plan.rows, plan.dim, plan.batch) == (50_000_000, 64, 1_050_000)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_it_says_what_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "table", "--device", "cuda", "--quick"]) != 0
    said = " ".join(capsys.readouterr().err.split())
    assert "NVIDIA GPU" in said
    assert "without --device" in said


@pytest.mark.parametrize("flag", ["--scaling", "--busy"])
def test_what_is_about_cores_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "table", "--device", "cuda", flag]) == 2
    assert flag in capsys.readouterr().err


def test_more_rows_than_memory_are_refused_before_it_starts() -> None:
    with pytest.raises(ConfigError, match="fewer --rows"):
        need_memory(device_named("emulated"), 2.0**40)
