"""Runs seeds of a world, in the folder tests:

python -m simulation fleet 0 1000      seeds 0 to 999; prints those that break a rule, and figures
python -m simulation fleet 17          seed 17 again, with its last events
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from contextlib import nullcontext
from typing import Protocol

import torch
from simulation.mutants import MUTANTS

from monolith.testing.cluster import SimCluster
from monolith.testing.scheduler import SimulationError


class Play(Protocol):
    """Runs one seed of a world."""

    def __call__(self, seed: int, *, traced: bool = False) -> SimCluster: ...


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    play = getattr(importlib.import_module(f"simulation.{options.world}"), options.world)
    with MUTANTS[options.mutant].applied() if options.mutant else nullcontext():
        if options.end is None:
            return replay(play, options.first)
        return run(play, options.world, range(options.first, options.end), first_only=bool(options.mutant))


def replay(play: Play, seed: int) -> int:
    """Run one seed with its trace."""
    try:
        play(seed, traced=True)
    except SimulationError as error:
        say(str(error))
        return 1
    return 0


def run(play: Play, world: str, seeds: range, *, first_only: bool) -> int:
    """Run seeds, print those that break a rule, and print figures."""
    runs, failed, switches, virtual, faults = 0, 0, 0, 0.0, 0
    began, worked = time.monotonic(), time.process_time()
    for seed in seeds:
        runs += 1
        try:
            cluster = play(seed)
        except SimulationError as error:
            failed += 1
            say(str(error).splitlines()[0][:300])
            if first_only:
                break
        else:
            switches += cluster.simulation.switches
            virtual += cluster.simulation.now
            faults += cluster.happened
    took = time.monotonic() - began
    say(
        f"{world}: {runs} runs with {faults:,} faults, {failed} failed; {took / runs:.3f} s a run, "
        f"of which {(time.process_time() - worked) / runs:.3f} s on the processor; {virtual / took:,.0f} "
        f"virtual seconds and {switches / took:,.0f} changes of threads a second"
    )
    return bool(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("world", help="the name of a module of this folder that has a function of that name")
    parser.add_argument("first", type=int, help="the first seed, or the only one, which is then traced")
    parser.add_argument("end", type=int, nargs="?", help="one more than the last seed")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="a deliberate bug; stops when it is found")
    return parser


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    # The order of sets of strings is part of a run, and only fixed if this is.
    if os.environ.get("PYTHONHASHSEED") != "0":
        again = [sys.executable, "-m", "simulation", *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, "PYTHONHASHSEED": "0"})
    sys.exit(main(sys.argv[1:]))
