<<<<<<< HEAD
"""Seeds that once broke a rule because of a defect in the product, with what was wrong."""
=======
"""Seeds that once broke a rule: each led to a mend."""
>>>>>>> main

from __future__ import annotations

import importlib

import pytest
import torch

FOUND = [
<<<<<<< HEAD
    ("data_service", 2, "the dispatcher told trainers of turns that were not synced to its disk"),
=======
    (
        "ranks",
        1090,
        "a connection broke after rank 1 had received the last word, and rank 0 waited for it to come back",
    ),
>>>>>>> main
]


@pytest.mark.parametrize(("world", "seed", "what"), FOUND)
<<<<<<< HEAD
def test_a_seed_that_found_a_defect_finds_it_no_more(world: str, seed: int, what: str) -> None:
    torch.set_num_threads(1)
    assert what
=======
def test_a_seed_that_found_a_defect_passes(world: str, seed: int, what: str) -> None:  # noqa: ARG001
    torch.set_num_threads(1)
>>>>>>> main
    getattr(importlib.import_module(f"simulation.{world}"), world)(seed)
