"""Runs many seeds of every world, from where the last sweep ended; in the folder tests:

    python -m simulation.sweep --runs 100000

Failing seeds are kept in build/simulation.json and run first the next time: one that passes is dropped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from simulation.blocks import Tally, processes, run_block
from simulation.test_worlds import WORLDS

STATE = Path(__file__).parents[2] / "build" / "simulation.json"
BLOCK = 100


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation.sweep", description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000, help="how many, of all worlds together")
    parser.add_argument("--worlds", nargs="+", default=list(WORLDS), choices=WORLDS)
    options = parser.parse_args()
    state = json.loads(STATE.read_text()) if STATE.exists() else {}
    tallies = {world: Tally() for world in options.worlds}
    began = time.monotonic()
    with processes() as pool:
        for world, tally in tallies.items():
            kept = state.setdefault(world, {"next": 0, "failed": []})
            for seed in kept["failed"]:
                tally.add(pool.submit(run_block, world, seed, seed + 1).result())
        blocks = {}
        for number in range(0, options.runs, BLOCK):
            world = options.worlds[number // BLOCK % len(options.worlds)]
            first = state[world]["next"]
            state[world]["next"] = first + BLOCK
            blocks[pool.submit(run_block, world, first, first + BLOCK)] = world
        for done, world in blocks.items():
            tallies[world].add(done.result())
    took = time.monotonic() - began
    for world, tally in tallies.items():
        state[world]["failed"] = sorted(tally.failed)
        say(f"{world}: {tally.runs:,} runs, {tally.faults:,} faults, {tally.virtual_seconds:,.0f} virtual s")
        for seed, why in sorted(tally.failed.items()):
            say(f"  seed {seed}: {why}; see it with: python -m simulation {world} {seed}")
    STATE.parent.mkdir(exist_ok=True)
    STATE.write_text(json.dumps(state))
    runs = sum(tally.runs for tally in tallies.values())
    virtual = sum(tally.virtual_seconds for tally in tallies.values())
    say(f"{runs / took * 3600:,.0f} runs an hour, {virtual / took:,.0f} virtual seconds a second")
    return any(tally.failed for tally in tallies.values())


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
