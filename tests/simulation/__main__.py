"""Runs seeds of a world, in the folder tests:

python -m simulation fleet 0 1000      seeds 0 to 999; prints those that break a rule, and figures
python -m simulation fleet 17          seed 17 again, with its last events
python -m simulation fleet 0 1000 --mutant NAME     with a deliberate bug; stops at the seed that finds it
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from contextlib import nullcontext

import torch
from simulation.mutants import MUTANTS

from monolith.testing.scheduler import SimulationError


def main(world: str, first: int, end: int | None = None, mutant: str | None = None) -> int:
    torch.set_num_threads(1)
    with MUTANTS[mutant][2]() if mutant else nullcontext():
        return run(world, first, end, stop_at_first=mutant is not None)


def run(world: str, first: int, end: int | None, *, stop_at_first: bool) -> int:
    play = getattr(importlib.import_module(f"simulation.{world}"), world)
    if end is None:
        try:
            play(first, traced=True)
        except SimulationError as error:
            say(str(error))
            return 1
        return 0
    failed, switches, virtual, faults = [], 0, 0.0, 0
    began, worked = time.monotonic(), time.process_time()
    for seed in range(first, end):
        try:
            cluster = play(seed)
        except SimulationError as error:
            failed.append(seed)
            say(f"{str(error).splitlines()[0][:300]}")
            if stop_at_first:
                say(f"{world}: found after {seed - first + 1} seeds")
                return 1
        else:
            switches += cluster.simulation.switches
            virtual += cluster.simulation.now
            faults += cluster.happened
    took, runs = time.monotonic() - began, end - first
    say(
        f"{world}: {runs} runs with {faults:,} faults, {len(failed)} failed; {took / runs:.3f} s a run, "
        f"of which {(time.process_time() - worked) / runs:.3f} s on the processor; {virtual / took:,.0f} "
        f"virtual seconds and {switches / took:,.0f} changes of threads a second"
    )
    return bool(failed)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    # The order of sets of strings is part of a run, and only fixed if this is.
    if os.environ.get("PYTHONHASHSEED") != "0":
        again = [sys.executable, "-m", "simulation", *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, "PYTHONHASHSEED": "0"})
    parser = argparse.ArgumentParser(prog="python -m simulation")
    parser.add_argument("world")
    parser.add_argument("first", type=int)
    parser.add_argument("end", type=int, nargs="?")
    parser.add_argument("--mutant", choices=MUTANTS)
    sys.exit(main(**vars(parser.parse_args())))
