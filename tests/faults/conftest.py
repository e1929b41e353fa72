"""Trainers to be killed, and folders for them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults.trainer_process import Job
from faults.trainers import MakeJob, Trainers, Uninterrupted


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    with Trainers() as trainers:
        yield trainers


@pytest.fixture(scope="module")
def make() -> Iterator[MakeJob]:
    """Folders are in memory where that can be: a kill takes nothing from the kernel, a disk is only slow."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:

        def make(**how: Any) -> Job:
            notes = tempfile.mkdtemp(dir=folder)
            return Job(**{"model_dir": f"{notes}/model", "notes": notes, **how})

        yield make


@pytest.fixture(scope="module")
def uninterrupted(trainers: Trainers, make: MakeJob) -> Uninterrupted:
    done: dict[tuple[int, int, int, str], Job] = {}

    def uninterrupted(job: Job) -> Job:
        key = job.batches, job.prefetch, job.save_every, job.reads
        if key not in done:
            done[key] = make(
                batches=job.batches, prefetch=job.prefetch, save_every=job.save_every, reads=job.reads
            )
            assert trainers.run(done[key]) == 0
        return done[key]

    return uninterrupted
