"""Where rows are by default, and how a run goes on if the device has no room for more of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.test_device_rows import OnDevice, Rows, assert_same_rows
from runtime.test_step import Spoiled
from services.emulated_cuda import EmulatedDevice, Room, limited
from torch import nn
from train.tasks import Clicks

from monolith.data import DriftConfig, DriftingStream, Pipeline, Stream
from monolith.data.source import Position
from monolith.errors import AcceleratorError, ConfigError, DeviceFullError
from monolith.feature import Batch
from monolith.runtime import LocalRun, Trainer
from monolith.runtime.rows_place import RowsPlace
from monolith.table import CudaTable, NativeTable, SpillingTable, dumps
from monolith.table.cuda import snapshots
from monolith.train import Hook, Mode, Outputs, StepResult, TrainConfig, TrainingRun
from monolith.train.accelerator import Cpu
from monolith.train.config import TablesConfig
from monolith.train.hooks import SaveConfig

BATCHES = 40
SOME = 470_000
"""Bytes of the device: rows of 20 batches fit, and of 30 do not."""


def records(task: Clicks) -> Pipeline:
    """Return examples with many new IDs."""
    examples, size = task.batches * task.batch_size, task.batch_size
    drift = DriftConfig(examples=examples, batch_size=size, new_users=150, new_items=30)
    return Pipeline(DriftingStream(drift))


@dataclass(frozen=True)
class Resumable(Spoiled):
    """Its batches are read again from any place."""

    batches: int = BATCHES
    batch_size: int = 128
    live: bool = False

    def records(self, mode: Mode) -> Pipeline:  # noqa: ARG002
        return records(self)

    def dataset(self, mode: Mode) -> Any:
        return Listed(list(super().dataset(mode)), live=self.live)


@dataclass
class Listed(Stream[Batch]):
    batches: list[Batch]
    live: bool = False  # type: ignore[misc]
    at: int = 0

    def __iter__(self) -> Iterator[Batch]:
        while self.at < len(self.batches):
            self.at += 1
            yield self.batches[self.at - 1]

    def position(self) -> Position:
        return {"source": "listed", "next": self.at}

    def restore(self, position: Position) -> None:
        self.at = position["next"]


@dataclass
class Weights(Hook):
    """Takes down the weights at the end, and the steps that were taken."""

    found: dict[str, Any] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        self.steps.append(result.step)

    def end(self, run: TrainingRun) -> None:
        self.found = {name: one.detach().cpu().tolist() for name, one in run.model.named_parameters()}


@dataclass
class Unlimited(Hook):
    """Lifts the limit at the end: what the hooks after it read there needs memory, too."""

    room: Room
    peak: int = 0

    def end(self, run: TrainingRun) -> None:  # noqa: ARG002
        self.peak, self.room.most = self.room.peak, None


@dataclass
class Near(Hook):
    """Takes down how many rows of each table are on the device at the end."""

    rows: dict[str, int] = field(default_factory=dict)

    def end(self, run: TrainingRun) -> None:
        module: Any = run.model
        store = module.embeddings.store
        self.rows = {name: len(store.table(name)) - len(store.table(name).far) for name in store.tables}


@dataclass
class Ended:
    """A run, as it ended."""

    report: Any
    rows: Rows = field(default_factory=Rows)
    weights: Weights = field(default_factory=Weights)
    peak: int = 0
    """Bytes of the device, at most."""


def trained(task: Any = None, most: int | None = None, device: Any = None, **config: Any) -> Ended:
    """Train with so many bytes on the device; the config leaves open where rows are, unless it is said."""
    ended = Ended(None)
    settings = TrainConfig(**{"accelerator": "cuda", "deterministic": True, **config})
    accelerator = OnDevice(EmulatedDevice() if device is None else device)
    task = Resumable() if task is None else task
    with limited(most) as room:
        end = Unlimited(room)
        hooks = [end, ended.rows, ended.weights]
        ended.report = Trainer(task, settings, hooks=hooks, accelerator=accelerator).train()
    ended.peak = end.peak
    return ended


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot takes little of a device that is so small."""
    monkeypatch.setattr(snapshots, "_LEAST_BYTES", 1 << 12)
    monkeypatch.setattr(snapshots, "_LEAST_ROWS", 64)
    monkeypatch.setattr(dumps, "rows_per_block", lambda _: 256)


@pytest.fixture(scope="module")
def roomy() -> Ended:
    """A run with room for all rows on the device."""
    ended = trained()
    assert ended.rows.kinds == {CudaTable}
    return ended


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    name = "monolith.runtime.trainer"
    return [one.getMessage() for one in caplog.records if one.name == name and one.levelname == "WARNING"]


def budget_of(said: str) -> int:
    return int(said.partition("device_memory_bytes = ")[2].partition(" ")[0])


# Where they are at first


TIERED = TablesConfig(storage="tiered", memory_bytes=1 << 23)
GPU = OnDevice(EmulatedDevice())


@pytest.mark.parametrize(
    "config, alone, accelerator, expected, said",
    [
        ({}, True, None, "host", ""),
        ({"accelerator": "cpu"}, True, Cpu(), "host", ""),
        ({"accelerator": "cuda"}, True, GPU, "device", "that is the default for a run of one process"),
        ({"accelerator": "cuda"}, False, GPU, "host", "only a run of one process"),
        ({"accelerator": "cuda"}, True, Cpu(), "host", "the accelerator cannot hold them"),
        ({"accelerator": "cuda", "tables": TIERED}, True, GPU, "host", 'storage = "tiered" they need'),
        (
            {"accelerator": "cuda", "device_memory_bytes": 9},
            True,
            GPU,
            "device",
            "device_memory_bytes is set",
        ),
        (
            {"accelerator": "cuda", "device_memory_bytes": 9},
            False,
            GPU,
            "device",
            "device_memory_bytes is set",
        ),
        (
            {"accelerator": "cuda", "device_memory_bytes": 9, "tables": TIERED},
            True,
            GPU,
            "device",
            "device_memory_bytes is set",
        ),
        ({"accelerator": "cuda", "embedding_device": "host"}, True, GPU, "host", ""),
        ({"accelerator": "cuda", "embedding_device": "device"}, True, GPU, "device", ""),
    ],
)
def test_a_run_of_one_process_has_its_rows_on_the_gpu_unless_something_rules_that_out(
    config: dict[str, Any],
    alone: bool,
    accelerator: Any,
    expected: str,
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "monolith.runtime.rows_place")
    given = TrainConfig(**config)
    place = RowsPlace.of(given, accelerator, alone=alone)
    assert place.config.embedding_device == expected
    assert place.config.device_memory_bytes == given.device_memory_bytes
    place.say()
    assert said in caplog.text
    assert bool(caplog.records) == bool(said)


def test_memory_for_rows_on_the_device_needs_a_gpu_too() -> None:
    with pytest.raises(ConfigError, match="device_memory_bytes needs a GPU, and accelerator is None"):
        TrainConfig(device_memory_bytes=1 << 23)


def test_a_run_says_where_its_rows_are_and_commands_that_read_have_them_in_host_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "monolith.runtime.rows_place")
    ended = trained(Resumable(batches=6), model_dir=str(tmp_path))
    assert ended.rows.kinds == {CudaTable}
    assert ended.report.replayed > 0
    assert "embedding rows are on the GPU (train.embedding_device): that is the default" in caplog.text
    config = TrainConfig(accelerator="cuda", model_dir=str(tmp_path))
    with limited() as room:
        Trainer(Resumable(batches=6), config, accelerator=GPU).evaluate()
    assert room.peak < 30_000  # the smallest tables alone take 40,000


class WithoutCompiler(EmulatedDevice):
    """Cannot make kernels."""

    def kernels(self, *_: Any) -> Any:
        raise AcceleratorError("no NVRTC is there")


def test_rows_are_in_host_memory_where_the_gpu_cannot_hold_tables(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "monolith.runtime.rows_place")
    task, device = Clicks(batches=6, batch_size=16), WithoutCompiler()
    ended = trained(task, device=device)
    assert ended.rows.kinds == {NativeTable}
    assert ended.report.steps == 6
    assert "embedding rows are in host memory (train.embedding_device): no NVRTC is there" in caplog.text
    assert not warnings(caplog)
    with pytest.raises(AcceleratorError, match="no NVRTC"):
        trained(task, device=device, embedding_device="device")


# No room for more


@pytest.mark.parametrize("asked", [None, "device"])
def test_a_run_without_a_checkpoint_begins_again_with_fewer_rows_on_the_device(
    asked: str | None, roomy: Ended, caplog: pytest.LogCaptureFixture
) -> None:
    ended = trained(most=SOME, embedding_device=asked)
    assert ended.rows.kinds == {SpillingTable}
    assert ended.rows.far > 50
    assert ended.peak <= SOME
    assert ended.rows.found == roomy.rows.found  # to the bit
    assert ended.weights.found == roomy.weights.found
    assert (ended.report.step, ended.report.steps, ended.report.examples) == (40, 40, 40 * 128)
    assert ended.report.loss == roomy.report.loss
    assert ended.report.windows == roomy.report.windows
    taken = ended.weights.steps
    failed = taken.index(1, 1)
    assert taken == [*range(1, failed + 1), *range(1, BATCHES + 1)]
    assert 20 <= failed <= 30
    (said,) = warnings(caplog)
    assert said.startswith("the device has no room for the ")
    assert f"no checkpoint yet, so training starts over, and repeats {failed} steps" in said
    assert "steps that need such rows take longer" in said
    assert "kernel by kernel" not in caplog.text  # as a step that cannot be captured would be
    assert "Set train.device_memory_bytes = " in said


@pytest.mark.parametrize("live, limit", [(True, {}), (False, {"steps": BATCHES})])
def test_a_run_goes_on_from_its_last_checkpoint_with_fewer_rows_on_the_device(
    live: bool, limit: dict[str, Any], roomy: Ended, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save = SaveConfig(steps=14)
    task = Resumable(batches=BATCHES + 10 * bool(limit), live=live)
    ended = trained(task, SOME, model_dir=str(tmp_path), save=save, **limit)
    assert ended.rows.kinds == {SpillingTable}
    assert ended.rows.found == roomy.rows.found
    assert ended.weights.found == roomy.weights.found
    assert (ended.report.step, ended.report.steps, ended.report.examples) == (40, 40, 40 * 128)
    assert ended.report.restored_from is None
    taken = ended.weights.steps
    again = next(n for n in range(1, len(taken)) if taken[n] <= taken[n - 1])
    assert taken == [*range(1, again + 1), *range(taken[again], BATCHES + 1)]
    assert taken[again] == 15
    (said,) = warnings(caplog)
    assert (
        f"Training resumes from {tmp_path / 'model.ckpt-14'}, and repeats {again - 14} steps. Rows have "
        in said
    )


def test_rows_that_are_learned_without_graphs_go_on_as_well(tmp_path: Path) -> None:
    """With an optimizer whose steps are not captured; and as with rows in host memory."""

    class Eager(Clicks):
        def records(self, mode: Mode) -> Pipeline:  # noqa: ARG002
            return records(self)

    task = Eager(batches=BATCHES, batch_size=128)
    host = trained(task, embedding_device="host")
    for folder in ("", str(tmp_path)):
        ended = trained(task, SOME, model_dir=folder, save=SaveConfig(steps=14))
        assert ended.rows.kinds == {SpillingTable}
        assert_same_rows(ended.rows.found, host.rows.found)
        assert ended.report.examples == host.report.examples


def test_a_live_stream_without_a_checkpoint_is_not_read_again() -> None:
    said = r"no checkpoint yet, and the data is a live stream.* Set train.device_memory_bytes to the memory"
    with pytest.raises(DeviceFullError, match=said):
        trained(Resumable(live=True), SOME)


def test_a_checkpoint_that_does_not_fit_is_restored_with_fewer_rows_on_the_device(
    roomy: Ended, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = Resumable(live=True)
    trained(task, model_dir=str(tmp_path), max_steps=36)
    ended = trained(task, SOME, model_dir=str(tmp_path))
    assert ended.rows.kinds == {SpillingTable}
    assert ended.weights.steps == [37, 38, 39, 40]
    assert ended.rows.found == roomy.rows.found
    assert ended.report.restored_from == str(tmp_path / "model.ckpt-36")
    assert ended.report.examples == 4 * 128
    (said,) = warnings(caplog)
    assert f"Training resumes from {tmp_path / 'model.ckpt-36'}. Rows have " in said


@dataclass(frozen=True)
class Wide(Resumable):
    """Its forward pass takes memory of the device, too."""

    activations: int = 0

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        where = next(model.parameters()).device
        torch.empty(self.activations, dtype=torch.uint8, device=where)
        return super().outputs(model, batch)


def test_a_step_without_room_because_of_the_rows_is_the_same(
    roomy: Ended, caplog: pytest.LogCaptureFixture
) -> None:
    """The first budget leaves too little for it, and half of that enough."""
    ended = trained(Wide(activations=200_000), 500_000)
    assert ended.rows.kinds == {SpillingTable}
    assert ended.rows.found == roomy.rows.found
    assert ended.weights.found == roomy.weights.found
    first, second = warnings(caplog)
    assert first.startswith("no room for 200,000 bytes")
    assert budget_of(second) == pytest.approx(budget_of(first) / 2, rel=0.01)


def test_rows_are_in_host_memory_if_even_fewer_on_the_device_leave_no_room(
    roomy: Ended, caplog: pytest.LogCaptureFixture
) -> None:
    """The model needs nearly all of it."""
    task, most = Wide(activations=400_000), 430_000
    ended = trained(task, most)
    assert ended.rows.kinds == {NativeTable}
    assert_same_rows(ended.rows.found, roomy.rows.found)
    assert len(warnings(caplog)) == 4
    assert "All rows are in host memory now" in warnings(caplog)[-1]
    caplog.clear()
    with pytest.raises(torch.OutOfMemoryError):  # rows are where the config says
        trained(task, most, embedding_device="device")
    assert len(warnings(caplog)) == 3


def test_a_budget_that_the_config_sets_is_not_changed() -> None:
    with pytest.raises(DeviceFullError, match="no room"):
        trained(most=SOME, device_memory_bytes=1_000_000)


def test_an_error_of_another_kind_ends_the_run() -> None:
    class Fails(Hook):
        def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
            raise RuntimeError("something else")

    config = TrainConfig(accelerator="cuda")
    with pytest.raises(RuntimeError, match="something else"):
        Trainer(Resumable(batches=3), config, hooks=[Fails()], accelerator=GPU).train()


def test_what_an_attempt_had_on_the_device_is_divided_in_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also if hooks, which each attempt makes by itself, keep its run."""
    kept: list[LocalRun] = []
    near = Near()

    def hooks(local: LocalRun) -> list[Hook]:
        kept.append(local)
        return [near] if len(kept) == 2 else []

    with limited(SOME):
        Trainer(Resumable(), TrainConfig(accelerator="cuda"), hooks=hooks, accelerator=GPU).train()
        assert len(kept) == 2
        (said,) = warnings(caplog)
        assert budget_of(said) > 0.7 * SOME
    # It is divided by how many rows the tables had, and not evenly. How many that was when there was no room
    # depends on how many batches were on their way.
    assert near.rows["user"] > 1.3 * near.rows["item"]
    assert near.rows["context"] == 50  # a small table has room all the same
