"""Every deliberate bug is found by its world within a thousand seeds."""

from __future__ import annotations

import importlib

import pytest
import torch
from simulation.mutants import MUTANTS

from monolith.testing.scheduler import SimulationError

SEEDS = 1_000


@pytest.mark.soak
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_world_finds_the_bug(mutant: str) -> None:
    bug = MUTANTS[mutant]
    play = getattr(importlib.import_module(f"simulation.{bug.world}"), bug.world)
    torch.set_num_threads(1)
    with bug.applied():
        for seed in range(SEEDS):
            try:
                play(seed)
            except SimulationError:
                return
    pytest.fail(f"{SEEDS} seeds of {bug.world} did not notice: {bug.sentence}")
