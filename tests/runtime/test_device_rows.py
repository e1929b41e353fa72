"""Runs whose rows are on a device: trained, saved, restored, evaluated as with rows in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from services.emulated_cuda import device_named, device_names
from torch import Tensor, nn
from torch.testing import assert_close
from train.published import Following
from train.tasks import Clicks, Numbers, rows_of
from train.test_retrieval import Likes

from monolith.cuda import Device
from monolith.errors import ConfigError, FeatureError
from monolith.feature import Batch
from monolith.runtime import Trainer
from monolith.runtime.fleet_coordinator import FleetCoordinator
from monolith.runtime.local import LocalPlacement, store_maker
from monolith.store import LocalStore
from monolith.table import CudaTable, Segment, SpillingTable, TableConfig
from monolith.train import Mode, Outputs, TrainConfig
from monolith.train.accelerator import Cpu
from monolith.train.hook import Hook, TrainingRun
from monolith.train.hooks import SaveConfig

TASK = Clicks(batches=6, batch_size=16)


class OnDevice(Cpu):
    """Stands for a GPU, with memory for rows that is this device's."""

    name = "cuda"

    def __init__(self, device: Device) -> None:
        self._device = device

    def device(self) -> torch.device:
        return self._device.torch_device

    def rows_device(self) -> Device:
        return self._device


@pytest.fixture(params=device_names())
def device(request: pytest.FixtureRequest) -> Device:
    return device_named(request.param)


class Rows(Hook):
    """Takes down the rows at the end, and where they were."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.kinds: set[type] = set()
        self.filtered: dict[str, int] = {}
        self.far = 0
        """Rows of tables on a device that are in host memory."""

    def end(self, run: TrainingRun) -> None:
        module: Any = run.model
        store = module.embeddings.store
        self.found = rows_of(module)
        tables = [store.table(name) for name in store.tables]
        self.filtered = {name: stats.filtered for name, stats in store.stats().items()}
        self.kinds = {type(table) for table in tables}
        self.far = sum(len(table.far) for table in tables if isinstance(table, SpillingTable))


def trainer(device: Device | None, *hooks: Hook, task: Any = TASK, **config: Any) -> Trainer:
    if device is None:
        return Trainer(task, TrainConfig(**config), hooks=hooks)
    config |= {"accelerator": "cuda", "embedding_device": "device"}
    return Trainer(task, TrainConfig(**config), hooks=hooks, accelerator=OnDevice(device))


def assert_same_rows(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert any(expected.values())
    for name, rows in expected.items():
        assert found[name].keys() == rows.keys()
        for key, (time, values, state) in rows.items():
            assert found[name][key][0] == time
            assert_close(torch.tensor(found[name][key][1]), torch.tensor(values), rtol=1e-4, atol=1e-5)
            assert_close(torch.tensor(found[name][key][2]), torch.tensor(state), rtol=1e-4, atol=1e-5)


def test_a_run_trains_as_with_rows_in_host_memory(device: Device) -> None:
    host, there = Rows(), Rows()
    for where, rows in ((None, host), (device, there)):
        report = trainer(where, rows, deterministic=True).train()
        assert report.step == 6
    assert there.kinds == {CudaTable}
    assert_same_rows(there.found, host.found)


def test_a_run_trains_evaluates_and_predicts_as_with_rows_in_host_memory(
    device: Device, tmp_path: Path
) -> None:
    seen = []
    for where in (None, device):
        rows, folder = Rows(), str(tmp_path / ("host" if where is None else "device"))
        run = trainer(where, rows, model_dir=folder, deterministic=True, save=SaveConfig(steps=3))
        report = run.train()
        predicted = torch.cat([p["click"].cpu() for _, p in run.predict(steps=2)])
        seen.append((rows, report, run.evaluate(steps=3), predicted))
    (host, told, measured, said), (there, *also) = seen
    assert there.kinds == {CudaTable}
    assert also[0].step == told.step == 6
    assert_same_rows(there.found, host.found)
    assert also[1] == pytest.approx(measured, rel=1e-4)
    assert_close(also[2], said, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_moves_between_host_memory_and_a_device(device: Device, tmp_path: Path) -> None:
    """A run that goes to the device and back in the middle ends like one that does not."""
    alone, last = Rows(), Rows()
    how = {"deterministic": True, "save": SaveConfig(steps=2)}
    trainer(None, alone, model_dir=str(tmp_path / "alone"), **how).train()
    stretches: list[tuple[Device | None, int | None]] = [(None, 2), (device, 2), (None, None)]
    for where, steps in stretches:
        trainer(where, last, model_dir=str(tmp_path / "moved"), steps=steps, **how).train()
    assert_same_rows(last.found, alone.found)


def test_rows_wait_for_admission_as_in_host_memory(device: Device) -> None:
    host, there = Rows(), Rows()
    for where, rows in ((None, host), (device, there)):
        trainer(where, rows, task=Clicks(batches=6, batch_size=16, threshold=3), deterministic=True).train()
    assert_same_rows(there.found, host.found)


def test_a_subscriber_ends_equal_to_a_trainer_whose_rows_are_on_a_device(device: Device) -> None:
    following, rows = Following(TASK), Rows()
    config = TrainConfig(accelerator="cuda", embedding_device="device", summary_every_steps=None)
    made = Trainer(TASK, config, hooks=[rows], publish=following.plan, accelerator=OnDevice(device))
    made.train()
    trained = {name: {key: tuple(row[1]) for key, row in of.items()} for name, of in rows.found.items()}
    assert following.values == trained
    assert any(trained.values())


def test_rows_that_a_device_has_no_room_for_are_trained_all_the_same(device: Device) -> None:
    host, there = Rows(), Rows()
    for where, rows, more in ((None, host, {}), (device, there, {"device_memory_bytes": 3100})):
        trainer(where, rows, deterministic=True, **more).train()
    assert there.kinds == {SpillingTable}
    assert there.far > 10
    assert_same_rows(there.found, host.found)


@pytest.mark.parametrize("first, then", [({}, None), ({"device_memory_bytes": 3100}, None), (None, {})])
def test_a_run_resumes_from_its_checkpoint_wherever_rows_were(
    device: Device, tmp_path: Path, first: dict[str, Any] | None, then: dict[str, Any] | None
) -> None:
    """Half of the steps with rows on the device and half with rows in host memory, or the other way round."""
    moved, stayed = Rows(), Rows()
    for folder, rows, halves in (("moved", moved, (first, then)), ("stayed", stayed, (None, None))):
        for steps, more in zip((3, 6), halves, strict=True):
            config: Any = {"max_steps": steps, "model_dir": str(tmp_path / folder), **(more or {})}
            report = trainer(None if more is None else device, rows, deterministic=True, **config).train()
            assert report.step == steps
    assert_same_rows(moved.found, stayed.found)


def test_memory_for_rows_on_a_device_is_for_such_rows() -> None:
    for wrong in ({"embedding_device": "host"}, {"device_memory_bytes": 0}):
        config: Any = {
            "accelerator": "cuda",
            "embedding_device": "device",
            "device_memory_bytes": 1000,
        } | wrong
        with pytest.raises(ConfigError, match="device_memory_bytes"):
            TrainConfig(**config)


def test_memory_of_a_device_is_shared_out_among_the_tables_of_one_collection(device: Device) -> None:
    config = TrainConfig(embedding_device="device", accelerator="cuda", device_memory_bytes=1 << 20)
    make = store_maker(config, OnDevice(device), LocalPlacement())
    tables = {"item": TableConfig(name="item", segments=(Segment(dim=4),))}
    make(tables, thresholds=None, threads=1).close()
    with pytest.raises(ConfigError, match="several embedding collections"):
        make(tables, thresholds=None, threads=1)


def test_rows_on_a_device_need_a_gpu() -> None:
    with pytest.raises(ConfigError, match="accelerator is None; set accelerator to cuda, or embedding"):
        TrainConfig(embedding_device="device")
    with pytest.raises(ConfigError, match="accelerator is 'xla'"):
        TrainConfig(embedding_device="device", accelerator="xla")
    config = TrainConfig(embedding_device="device", accelerator="cuda")
    with pytest.raises(ConfigError, match=r"set train.accelerator to cuda, or train.embedding"):
        store_maker(config, Cpu(), LocalPlacement())
    assert store_maker(TrainConfig(), Cpu(), LocalPlacement()) == LocalStore.from_configs


def test_device_rows_are_refused_if_parameter_servers_store_the_rows() -> None:
    coordinator = FleetCoordinator(cast(Any, None))
    config = TrainConfig(embedding_device="device", accelerator="cuda")
    with pytest.raises(ConfigError, match="rows are on parameter servers in this run"):
        Trainer(TASK, config, coordinator=coordinator, accelerator=Cpu())


# What a task gets


@dataclass(frozen=True)
class OwnLoss(Clicks):
    """Computes its own loss and a measure of labels, as the guide to targets shows."""

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        logits: Tensor = model(batch)
        error = logits.sigmoid() - batch.labels["click"]
        return Outputs(error.square().mean(), {"click": logits.sigmoid()}, {"off": error.detach().abs()})

    def measures(self, mode: Mode) -> Sequence[str]:  # noqa: ARG002
        return ["off"]


@pytest.mark.parametrize("task", [OwnLoss(batches=6, batch_size=16), Numbers(batches=6, batch_size=16)])
def test_a_task_gets_labels_and_floats_on_the_device_of_its_model(
    device: Device, tmp_path: Path, task: Clicks
) -> None:
    measured = []
    for where in (None, device):
        folder = str(tmp_path / ("host" if where is None else "device"))
        run = trainer(where, task=task, model_dir=folder, deterministic=True)
        assert run.train().step == 6
        measured.append(run.evaluate(steps=3))
        assert sum(len(said["click"]) for _, said in run.predict(steps=2)) == 32
    assert measured[1] == pytest.approx(measured[0], rel=1e-4)


def test_labels_that_a_loss_cannot_take_are_refused_on_a_device_too(device: Device) -> None:
    @dataclass(frozen=True)
    class Twice(Clicks):
        def dataset(self, mode: Mode) -> Any:
            for batch in super().dataset(mode):
                yield replace(batch, labels={"click": 2 * batch.labels["click"] + 1})

    with pytest.raises(FeatureError, match="click"):
        trainer(device, task=Twice(batches=6, batch_size=16)).train()


def test_candidates_are_ranked_on_a_device_as_in_host_memory(device: Device, tmp_path: Path) -> None:
    class Labeled(Likes):
        def dataset(self, mode: Mode) -> Any:
            for batch in super().dataset(mode):
                yield replace(batch, labels={"like": (torch.arange(len(batch)) % 4 > 0).float()})

    measured = []
    for where in (None, device):
        folder = str(tmp_path / ("host" if where is None else "device"))
        run = trainer(where, task=Labeled(), model_dir=folder, deterministic=True, max_steps=8)
        run.train()
        measured.append(run.evaluate())
    assert measured[0]["mrr"] > 0
    assert measured[1] == pytest.approx(measured[0], rel=0.02, nan_ok=True)
