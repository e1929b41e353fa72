"""Runs whose rows are on a device: trained, saved, restored, evaluated as with rows in host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from services.emulated_cuda import device_named, device_names
from torch.testing import assert_close
from train.tasks import Clicks, rows_of

from monolith.cuda import Device
from monolith.errors import ConfigError
from monolith.store import LocalStore
from monolith.table import CudaTable
from monolith.train import TrainConfig, Trainer
from monolith.train.accelerator import Cpu
from monolith.train.device_rows import store_maker
from monolith.train.hook import Hook, Run

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

    def end(self, run: Run) -> None:
        module: Any = run.model
        store = module.embeddings.store
        self.found = rows_of(module)
        self.kinds = {type(store.table(name)) for name in store.tables}


def trainer(device: Device | None, *hooks: Hook, task: Any = TASK, **config: Any) -> Trainer:
    if device is None:
        return Trainer(task, TrainConfig(**config), hooks=hooks)
    config |= {"accelerator": "cuda", "rows_on": "device"}
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


def test_rows_wait_for_admission_as_in_host_memory(device: Device) -> None:
    host, there = Rows(), Rows()
    for where, rows in ((None, host), (device, there)):
        trainer(where, rows, task=Clicks(batches=6, batch_size=16, threshold=3), deterministic=True).train()
    assert_same_rows(there.found, host.found)


def test_rows_on_a_device_need_a_gpu() -> None:
    with pytest.raises(ConfigError, match="accelerator is None; set accelerator to cuda, or rows_on to host"):
        TrainConfig(rows_on="device")
    with pytest.raises(ConfigError, match="accelerator is 'xla'"):
        TrainConfig(rows_on="device", accelerator="xla")
    config = TrainConfig(rows_on="device", accelerator="cuda")
    with pytest.raises(ConfigError, match=r"set train.accelerator to cuda, or train.rows_on to host"):
        store_maker(config, Cpu(), LocalStore.from_configs)
    assert store_maker(TrainConfig(), Cpu(), LocalStore.from_configs) == LocalStore.from_configs


def test_rows_on_a_device_are_for_runs_of_one_process() -> None:
    peers: Any = object()
    config = TrainConfig(rows_on="device", accelerator="cuda")
    with pytest.raises(ConfigError, match="rows are with parameter servers or ranks in this run"):
        Trainer(TASK, config, peers=peers, accelerator=Cpu())
