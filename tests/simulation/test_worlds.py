"""Every world, with some seeds, and deliberate bugs that they find. `make soak` runs many more of both."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
from simulation.blocks import Tally, processes, run_block
from simulation.mutants import MUTANTS

WORLDS = (
    "fleet",
    "keep_going",
    "elastic",
    "leases",
    "ranks",
    "data_service",
    "kafka",
    "fleet_kafka",
    "publishing",
    "serving",
    "asking",
    "checkpoints",
    "writers",
    "together",
)
SEEDS = 200
"""Of each world. They are the same in every run, so a failure is never a matter of luck."""
BLOCK = 10
MOST = 1_000
"""Seeds within which every deliberate bug is found."""
SOON = 10
"""Bugs that take more seeds than this are left to `make soak`."""


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with processes() as found:
        yield found


@pytest.mark.parametrize("world", WORLDS)
def test_no_seed_breaks_a_rule(world: str, pool: ProcessPoolExecutor) -> None:
    blocks = [pool.submit(run_block, world, first, first + BLOCK) for first in range(0, SEEDS, BLOCK)]
    tally = Tally()
    for block in blocks:
        tally.add(block.result())
    again = [f"{why}; see python -m simulation {world} {seed}" for seed, why in tally.failed.items()]
    assert not again, "\n".join(again)
    assert tally.faults > SEEDS, "so few faults show nothing"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if mutant.seeds <= SOON else [pytest.mark.soak])
        for name, mutant in MUTANTS.items()
    ],
)
def test_a_deliberate_bug_is_found(name: str, pool: ProcessPoolExecutor) -> None:
    mutant = MUTANTS[name]
    for first in range(0, MOST, 2 * BLOCK):
        blocks = [pool.submit(run_block, mutant.world, at, at + BLOCK, name) for at in (first, first + BLOCK)]
        if any(block.result().failed for block in blocks):
            return
    pytest.fail(f"no seed below {MOST} notices this bug: {mutant.sentence}")
