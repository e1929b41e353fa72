"""`monolith bench stream`: what it prints, the FLOPs it counts, and that it finds what a resume changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runtime.test_device_rows import OnDevice
from services import warm
from services.emulated_cuda import device_named, device_names
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from monolith.data import Pipeline
from monolith.errors import ConfigError
from monolith.runtime import Trainer
from monolith_bench import stream
from monolith_bench.listening import TABLES, ListeningDays, ListeningLog, feature_spec
from monolith_bench.options import BenchStreamOptions
from monolith_bench.plain_hstu import PaddedBatch, PlainTrainer
from monolith_bench.report import Report
from monolith_bench.stream import ListenTask, StreamPlan

PLAN = replace(StreamPlan.settle(BenchStreamOptions(quick=True)), batch=8, steps=6, days=1, max_length=10)
LOG = ListeningLog(PLAN.log)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    done = warm.run(["-m", "monolith", "bench", "stream", "--quick", "--json"], check=True)
    assert "histories of up to" in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def values(report: dict[str, Any], case: str) -> dict[str, Any]:
    return {one["metric"]: one["value"] for one in report["results"] if one["case"] == case}


def test_the_report_has_the_agreed_shape(report: dict[str, Any]) -> None:
    assert list(report) == ["bench", "machine", "results"]
    assert report["bench"] == "stream"
    assert report["machine"]["plan"]["days"] == 2
    for result in report["results"]:
        assert set(result) - {"note"} == {"case", "metric", "value", "unit", "baseline", "ratio"}


def test_each_day_is_evaluated_after_the_days_before_it(report: dict[str, Any]) -> None:
    for day in (1, 2):
        assert (
            0 < values(report, f"day {day}")["auc"] < values(report, f"true probabilities, day {day}")["auc"]
        )
        assert values(report, f"day {day}, log loss")["log_loss"] > 0
        assert values(report, f"day {day}, normalized entropy")["ne"] > 0
    assert not values(report, "day 0")


def test_speed_is_compared_with_torch_reading_and_dense_products(report: dict[str, Any]) -> None:
    found = {one["baseline"]: one for one in report["results"] if one["case"] == "training"}
    assert len(found) == 2
    for baseline, one in found.items():
        assert one["ratio"] == pytest.approx(one["value"] / values(report, baseline)["samples_per_s"])
    pace, flops = values(report, "training")["samples_per_s"], values(report, "FLOPs of a sample")["flops"]
    (used,) = [one for one in report["results"] if one["case"] == "training, model FLOPs"]
    assert used["value"] == pytest.approx(pace * flops)
    assert used["ratio"] == pytest.approx(used["value"] / values(report, used["baseline"])["flops_per_s"])


def test_memory_is_that_of_the_process_and_of_its_tables(report: dict[str, Any]) -> None:
    assert values(report, "the process at its largest")["host_bytes"] > 1 << 20
    assert values(report, "all tables")["rows"] > 0
    assert values(report, "all tables")["table_bytes"] > 0


def test_a_run_that_was_stopped_and_resumed_ends_with_the_same_bits(report: dict[str, Any]) -> None:
    (found,) = [one for one in report["results"] if "a stop and a resume" in one["case"]]
    assert found["value"] == 0


def trained_with_a_stop(plan: StreamPlan, folder: Path, *, resumed: StreamPlan) -> list[str]:
    """Train a day without a stop, and with one after which the run may have another plan; compare both."""
    log = ListeningLog(plan.log)
    straight, _ = stream.train_day(plan, log, 0, stream.config_of(plan, folder / "straight"))
    stream.train_day(plan, log, 0, stream.config_of(plan, folder / "stopped", steps=plan.steps // 2))
    again, _ = stream.train_day(
        resumed, ListeningLog(resumed.log), 0, stream.config_of(plan, folder / "stopped")
    )
    assert straight.checkpoint is not None
    assert again.checkpoint is not None
    return stream.differing(straight.checkpoint, again.checkpoint)


def test_the_comparison_finds_events_of_another_seed_after_a_resume(tmp_path: Path) -> None:
    assert not trained_with_a_stop(PLAN, tmp_path / "same", resumed=PLAN)
    found = trained_with_a_stop(PLAN, tmp_path / "other", resumed=replace(PLAN, seed=PLAN.seed + 1))
    assert "table item" in found
    assert any(one.startswith("weight ") for one in found)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """With one thread, a product of matrices rounds in the same way however large it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("name", device_names())
def test_rows_on_a_device_end_with_the_same_bits_after_a_resume(name: str, tmp_path: Path) -> None:
    plan, accelerator = replace(PLAN, batch=4, steps=4, device="cuda"), OnDevice(device_named(name))
    log = ListeningLog(plan.log)
    found = []
    for folder, stops in ((tmp_path / "straight", [None]), (tmp_path / "stopped", [2, None])):
        for steps in stops:
            config = stream.config_of(plan, folder, steps=steps)
            trained = Trainer(ListenTask(plan, log, 0), config, accelerator=accelerator).train()
        assert trained.checkpoint is not None
        found.append(trained.checkpoint)
    assert stream.differing(*found) == []


def test_a_missing_step_is_found(tmp_path: Path) -> None:
    log = ListeningLog(PLAN.log)
    whole, _ = stream.train_day(PLAN, log, 0, stream.config_of(PLAN, tmp_path / "whole"))
    half, _ = stream.train_day(PLAN, log, 0, stream.config_of(PLAN, tmp_path / "half", steps=5))
    assert whole.checkpoint is not None
    assert half.checkpoint is not None
    assert "step 6 and 5" in stream.differing(whole.checkpoint, half.checkpoint)


def test_a_difference_is_printed_and_ends_the_command_with_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert stream.conclude(Report("stream"), [], as_json=False) == 0
    assert stream.conclude(Report("stream"), ["table item"], as_json=True) == 1
    printed = capsys.readouterr()
    assert "not the same after a stop and a resume: table item" in printed.err
    assert json.loads(printed.out)["results"][-1]["value"] == 1


@pytest.mark.parametrize("length", [1, 10])
def test_model_flops_are_those_that_torch_counts(length: int) -> None:
    """Torch counts all pairs of steps; the model's own are those of each step and the ones before it."""
    plan = replace(PLAN, dim=256, heads=2, layers=3)
    log = ListeningLog(plan.log)
    model = stream.plain_model(plan, log)
    records = log.records(40, 44)  # late enough for histories of ten steps
    batch = PaddedBatch.of(records, torch.device("cpu"), length=10)
    batch = PaddedBatch(
        {name: ids[..., -length:] if ids.ndim == 2 else ids for name, ids in batch.ids.items()},
        batch.real[:, -length - 1 :],
        batch.times[:, -length - 1 :],
        batch.labels,
    )
    lengths = np.full(4, length)
    with FlopCounterMode(display=False) as counter:
        logits = model(batch)
    forward = counter.get_total_flops()
    assert stream.forward_flops(plan, lengths, padded=True) == forward
    with FlopCounterMode(display=False) as counter:
        logits.sum().backward()
    assert counter.get_total_flops() == 2 * forward
    steps = length + 1
    unseen = plan.layers * 4 * plan.dim * 4 * (steps * steps - steps * (steps + 1) // 2)
    assert stream.forward_flops(plan, lengths) == forward - unseen
    assert stream.training_flops(plan, lengths) == 3 * (forward - unseen)


def test_plain_torch_trains_the_same_model() -> None:
    """The same weights and rows give the same logits, of jagged and of padded histories."""
    plain = stream.plain_model(PLAN, LOG)
    ours: Any = ListenTask(PLAN, LOG, 0).model()
    batch = next(iter(Pipeline(ListeningDays(LOG, 8, first=0, last=0)).to_batches(feature_spec(10))))
    padded = PaddedBatch.of(LOG.records(0, 8), torch.device("cpu"))
    ours.eval()
    with torch.no_grad():
        weights = {
            name.removeprefix("dense.encoder.").removeprefix("dense."): one
            for name, one in ours.named_parameters()
        }
        for name, weight in plain.named_parameters():
            if name.startswith("layers."):
                weight.copy_(weights.pop(name))
        for number, layer in enumerate(one for one in plain.mlp if isinstance(one, torch.nn.Linear)):
            layer.weight.copy_(weights.pop(f"mlp.{number}.kernel.weight").t())
            layer.bias.copy_(weights.pop(f"mlp.{number}.bias"))
        assert not weights
        for name in TABLES:
            rows: Any = plain.tables[name].weight
            ours.embeddings.store.table(name).assign(torch.arange(len(rows)), rows.detach())
        assert_close(ours(batch), plain(padded), rtol=1e-4, atol=1e-5)


def test_plain_torch_learns() -> None:
    torch.manual_seed(0)
    trainer = PlainTrainer(stream.plain_model(PLAN, LOG), torch.device("cpu"), half=False)
    batch = PaddedBatch.of(LOG.records(0, 32), torch.device("cpu"))
    losses = [float(trainer.step(batch)) for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]


def test_everything_follows_from_the_scale() -> None:
    small, large = (StreamPlan.settle(BenchStreamOptions(scale=scale)) for scale in (1, 100))
    assert (small.users, small.items, small.max_length, small.dim, small.layers, small.batch) == (
        *(400, 2000, 64, 32, 2, 64),
    )
    for name in ("users", "items", "max_length", "dim", "layers", "heads", "batch"):
        assert getattr(large, name) > getattr(small, name)


@pytest.mark.parametrize("wrong", [{"scale": 0.0}, {"days": 0}])
def test_sizes_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="bench stream: --"):
        StreamPlan.settle(BenchStreamOptions(**wrong))
