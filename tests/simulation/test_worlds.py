"""Every world, with some seeds; `make soak` and `python -m simulation` run many more."""

from __future__ import annotations

import importlib

import pytest
import torch

from monolith.testing.scheduler import SimulationError

WORLDS = ("fleet", "keep_going", "ranks", "publishing", "data_service", "checkpoints")
SEEDS = 20
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("world", WORLDS)
def test_no_seed_breaks_a_rule(world: str, part: int) -> None:
    play = getattr(importlib.import_module(f"simulation.{world}"), world)
    torch.set_num_threads(1)
    for seed in range(part, SEEDS, PARTS):
        try:
            play(seed)
        except SimulationError as error:
            again = f"cd tests && PYTHONHASHSEED=0 python -m simulation {world} {seed}"
            raise AssertionError(f"{str(error).splitlines()[0]}\nTo see what happened: {again}") from error
