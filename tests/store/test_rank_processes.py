"""Ranks as processes, with rows on a device: they train what one process trains with rows in host memory."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from services import warm
from store.rank_process import CONFIGS, STEPS, batch, local_store

from monolith.store import LocalStore, TableIds
from monolith.table import NativeTable, Rows, iterate, load

SIZE, PATIENT = 2, 300
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.mark.parametrize(
    "where, backend",
    [
        ("emulated", "gloo"),
        pytest.param(
            "gpu", "gloo", marks=pytest.mark.skipif(not GPUS, reason="needs a GPU, which both share")
        ),
        pytest.param(
            "gpu", "nccl", marks=pytest.mark.skipif(GPUS < SIZE, reason="needs a GPU for each rank")
        ),
    ],
)
def test_two_processes_with_rows_on_devices_train_as_one_with_rows_in_host_memory(
    where: str, backend: str, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = [
        warm.Popen(
            ["-m", "store.rank_process", str(rank), str(SIZE), str(port), str(tmp_path), where, backend],
            env={**os.environ, **({"CUDA_VISIBLE_DEVICES": str(rank)} if backend == "nccl" else {})},
        )
        for rank in range(SIZE)
    ]
    assert [process.wait(PATIENT) for process in processes] == [0] * SIZE
    one = local_store("host")
    seen = [torch.load(tmp_path / f"seen-{rank}.pt", weights_only=True) for rank in range(SIZE)]
    for step in range(STEPS):
        for rank in range(SIZE):
            assert torch.equal(seen[rank][step], one.lookup(batch(step, rank)[0]))
        _train_all(one, step)
    for name, config in CONFIGS.items():
        together = NativeTable(config)
        for rank in range(SIZE):
            load(together, str(tmp_path / f"{name}-{rank}"), clear=False)
        _assert_same(together, one.table(name))


def _train_all(store: LocalStore, step: int) -> None:
    """Take one step with the batches of all ranks."""
    parts = [batch(step, rank) for rank in range(SIZE)]
    ids = TableIds(
        torch.cat([one.ids for one, _, _ in parts]),
        torch.cat([one.sizes for one, _, _ in parts]),
        batches=SIZE,
    )
    gradients = torch.cat([given for _, given, _ in parts])
    store.apply_gradients(ids, gradients, step=step, event_time=parts[0][2])


def _assert_same(one: Any, other: Any) -> None:
    found, expected = (Rows.concat(list(iterate(table))) for table in (one, other))
    assert len(found) > 30
    for name in ("ids", "event_times", "values", "state"):
        wanted, got = (getattr(rows, name).contiguous().view(torch.uint8) for rows in (expected, found))
        assert torch.equal(wanted, got), name
