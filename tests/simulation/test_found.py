"""Seeds that once broke a rule because of a defect in the product, with what was wrong."""

from __future__ import annotations

import importlib

import pytest
import torch

FOUND = [
    ("data_service", 2, "the dispatcher told trainers of turns that were not synced to its disk"),
]


@pytest.mark.parametrize(("world", "seed", "what"), FOUND)
def test_a_seed_that_found_a_defect_finds_it_no_more(world: str, seed: int, what: str) -> None:
    torch.set_num_threads(1)
    assert what
    getattr(importlib.import_module(f"simulation.{world}"), world)(seed)
