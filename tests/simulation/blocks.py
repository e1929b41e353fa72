"""Blocks of seeds, run by as many processes as there are cores."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from unittest import mock

import torch

from monolith.testing.scheduler import SimulationError


@dataclass
class Tally:
    """What came of some seeds of a world."""

    runs: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    """Seed -> the first line of what is wrong."""
    faults: int = 0
    virtual_seconds: float = 0.0
    switches: int = 0

    def add(self, other: Tally) -> None:
        self.runs += other.runs
        self.failed |= other.failed
        self.faults += other.faults
        self.virtual_seconds += other.virtual_seconds
        self.switches += other.switches


def run_block(world: str, first: int, end: int, mutant: str | None = None) -> Tally:
    """Run the seeds of a world from `first` to before `end`; with a deliberate bug, until one finds it."""
    from simulation.mutants import MUTANTS

    torch.set_num_threads(1)
    play = getattr(importlib.import_module(f"simulation.{world}"), world)
    if not gc.get_freeze_count():
        # Torch and what else was imported is some hundred thousand objects, which each run would look
        # through for garbage.
        gc.collect()
        gc.freeze()
    gc.set_threshold(10_000, 20, 100)
    tally = Tally()
    with nullcontext() if mutant is None else MUTANTS[mutant].applied():
        for seed in range(first, end):
            tally.runs += 1
            try:
                cluster = play(seed)
            except SimulationError as error:
                tally.failed[seed] = str(error).splitlines()[0][:300]
                if mutant is not None:
                    break
            else:
                tally.faults += cluster.happened
                tally.virtual_seconds += cluster.simulation.now
                tally.switches += cluster.simulation.switches
    return tally


@contextmanager
def processes() -> Iterator[ProcessPoolExecutor]:
    """Processes for `run_block`, one for each core."""
    # The order of sets of strings is part of a run, and only fixed if PYTHONHASHSEED is.
    with mock.patch.dict(os.environ, {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}):
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as pool:
            try:
                yield pool
            finally:
                pool.shutdown(cancel_futures=True)
