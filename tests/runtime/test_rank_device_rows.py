"""Ranks whose shares of the rows are on devices: the run is the one with rows in host memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.fleets import read_model
from runtime.rank_data import Given
from runtime.rank_runs import quiet, train_ranks
from runtime.test_device_rows import OnDevice
from runtime.test_ranks import halves, regression
from services.emulated_cuda import device_named, device_names
from store.ranks import needs_nccl

from monolith.model import UpdateConfig
from monolith.train import TrainConfig
from monolith.train.config import TablesConfig

ON_DEVICE: dict[str, Any] = {"accelerator": "cuda", "embedding_device": "device"}
FEW: dict[str, Any] = {"device_memory_bytes": 2048}
THREE_TIERS: dict[str, Any] = FEW | {"tables": TablesConfig(storage="tiered", memory_bytes=4 << 20)}
CLIPPED = UpdateConfig(clip_norm=0.5)
"""Then gradients that came from all are added up and clipped before they are applied."""


@pytest.mark.parametrize("name", device_names())
@pytest.mark.parametrize(
    "more, prefetch, update",
    [
        ({}, 0, UpdateConfig()),
        ({}, 1, CLIPPED),
        (FEW, 1, UpdateConfig()),
        (THREE_TIERS, 1, UpdateConfig()),
    ],
)
def test_ranks_with_rows_on_a_device_learn_the_same(
    name: str,
    more: dict[str, Any],
    prefetch: int,
    update: UpdateConfig,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Both share the one device there is; rows go from rank to rank through host memory."""
    tasks = [
        Given(dense=True, loss=regression, update=update, batches=mine) for mine in halves(3, 4, steps=5)
    ]
    plain = quiet(TrainConfig(), prefetch=prefetch)
    host = replace(plain, model_dir=str(tmp_path / "host"))
    device = replace(plain, model_dir=str(tmp_path / "device"), **ON_DEVICE, **more)
    train_ranks(tasks, host)
    # On a GPU with the accelerator of the settings, as in a run.
    accelerator = None if name == "gpu" else OnDevice(device_named(name))
    reports = train_ranks(tasks, device, accelerator=accelerator)
    assert [report.step for report in reports] == [5, 5]
    assert_same_model(tasks[0], tmp_path)
    assert "not replayed as CUDA graphs: graphs are for runs of one process. Launching" in caplog.text


@needs_nccl
@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_rank_that_exchanges_by_nccl_learns_the_same(prefetch: int, tmp_path: Path) -> None:
    """One rank, since NCCL wants a GPU for each: all of its calls are made, with nothing to exchange."""
    task = Given(dense=True, loss=regression, update=CLIPPED, batches=halves(4, steps=5)[0])
    plain = quiet(TrainConfig(), prefetch=prefetch)
    train_ranks([task], replace(plain, model_dir=str(tmp_path / "host")))
    device = replace(plain, model_dir=str(tmp_path / "device"), **ON_DEVICE)
    (report,) = train_ranks([task], device, backend="nccl", rows_backend="nccl")
    assert report.step == 5
    assert_same_model(task, tmp_path)


def assert_same_model(task: Given, folder: Path) -> None:
    expected, found = (read_model(task, folder / where) for where in ("host", "device"))
    for weight, value in expected.weights.items():
        torch.testing.assert_close(torch.tensor(found.weights[weight]), torch.tensor(value))
    assert found.rows["f"].keys() == expected.rows["f"].keys()
    for key, (_, value, state) in expected.rows["f"].items():
        torch.testing.assert_close(torch.tensor(found.rows["f"][key][1]), torch.tensor(value))
        torch.testing.assert_close(torch.tensor(found.rows["f"][key][2]), torch.tensor(state))
