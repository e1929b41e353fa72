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

import torch
from simulation.blocks import run_block
from simulation.mutants import MUTANTS

from monolith.testing.scheduler import SimulationError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("world", help="the name of a module of this folder that has a function of that name")
    parser.add_argument("first", type=int, help="the first seed, or the only one, which is then traced")
    parser.add_argument("end", type=int, nargs="?", help="one more than the last seed")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="a deliberate bug; stops when it is found")
    options = parser.parse_args()
    if options.end is None:
        return replay(options.world, options.first)
    began, worked = time.monotonic(), time.process_time()
    tally = run_block(options.world, options.first, options.end, options.mutant)
    took, busy = time.monotonic() - began, time.process_time() - worked
    for why in tally.failed.values():
        say(why)
    say(
        f"{options.world}: {tally.runs} runs with {tally.faults:,} faults, {len(tally.failed)} failed; "
        f"{took / tally.runs:.3f} s a run, of which {busy / tally.runs:.3f} s on the processor; "
        f"{tally.virtual_seconds / took:,.0f} virtual seconds a second"
    )
    return bool(tally.failed)


def replay(world: str, seed: int) -> int:
    """Run one seed with its trace."""
    torch.set_num_threads(1)
    try:
        getattr(importlib.import_module(f"simulation.{world}"), world)(seed, traced=True)
    except SimulationError as error:
        say(str(error))
        return 1
    return 0


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    # The order of sets of strings is part of a run, and only fixed if this is.
    if os.environ.get("PYTHONHASHSEED") != "0":
        again = [sys.executable, "-m", "simulation", *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, "PYTHONHASHSEED": "0"})
    sys.exit(main())
