"""Workers begin to read tests at different folders, and read all of them."""

from __future__ import annotations

import pytest
from services.shared_rewriting import rotated

FOLDERS = ["bench", "checkpoint", "cli", "data", "train"]


def test_workers_begin_apart() -> None:
    assert [rotated(FOLDERS, worker, 3)[0] for worker in range(3)] == ["bench", "checkpoint", "data"]


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_every_worker_reads_all(workers: int) -> None:
    assert all(sorted(rotated(FOLDERS, worker, workers)) == FOLDERS for worker in range(workers))
