"""Runs many seeds of every world, from where the last sweep ended; in the folder tests:

    python -m simulation.sweep --runs 100000

Failing seeds are kept in build/simulation.json and run first the next time: one that passes is dropped.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import deque
from concurrent.futures import Future
from pathlib import Path

from simulation.blocks import Tally, processes, run_block
from simulation.test_worlds import WORLDS

STATE = Path(__file__).parents[2] / "build" / "simulation.json"
BLOCK = 25


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation.sweep", description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000, help="how many, of all worlds together")
    parser.add_argument("--worlds", nargs="+", default=list(WORLDS), choices=WORLDS)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no more runs after so long")
    options = parser.parse_args()
    state = json.loads(STATE.read_text()) if STATE.exists() else {}
    tallies = {world: Tally() for world in options.worlds}
    began = time.monotonic()

    def finish(world: str, first: int, end: int, done: Future[Tally]) -> None:
        """Count a block, and keep it at once: a sweep that is stopped continues after it."""
        tally = done.result()
        tallies[world].add(tally)
        kept = state[world]
        kept["next"] = max(kept["next"], end)
        kept["runs"] += tally.runs
        kept["virtual_seconds"] += tally.virtual_seconds
        kept["failed"] = sorted({*kept["failed"]} - {*range(first, end)} | tally.failed.keys())
        for seed, why in tally.failed.items():
            say(f"{world} {seed}: {why}; see it with: python -m simulation {world} {seed}")
        STATE.parent.mkdir(exist_ok=True)
        STATE.write_text(json.dumps(state))

    blocks: deque[tuple[str, int, int, Future[Tally]]] = deque()
    with processes() as pool:

        def submit(world: str, first: int, end: int) -> None:
            blocks.append((world, first, end, pool.submit(run_block, world, first, end)))
            if len(blocks) > 4:  # some blocks ahead of the processes, and not all at once
                finish(*blocks.popleft())

        for world in options.worlds:
            kept = {"next": 0, "failed": [], "runs": 0, "virtual_seconds": 0.0, **state.get(world, {})}
            state[world] = kept
            for seed in list(kept["failed"]):
                submit(world, seed, seed + 1)
        following = {world: state[world]["next"] for world in options.worlds}
        for number in range(0, options.runs, BLOCK):
            if time.monotonic() - began > options.seconds:
                break
            world = options.worlds[number // BLOCK % len(options.worlds)]
            submit(world, following[world], following[world] + BLOCK)
            following[world] += BLOCK
        while blocks:
            finish(*blocks.popleft())
    took = time.monotonic() - began
    for world, tally in tallies.items():
        say(
            f"{world}: {tally.runs:,} runs, {tally.faults:,} faults, {tally.virtual_seconds:,.0f} virtual s, "
            f"{len(tally.failed)} failed; {state[world]['runs']:,} runs in all sweeps"
        )
    runs = sum(tally.runs for tally in tallies.values())
    virtual = sum(tally.virtual_seconds for tally in tallies.values())
    say(f"{runs / took * 3600:,.0f} runs an hour, {virtual / took:,.0f} virtual seconds a second")
    return any(tally.failed for tally in tallies.values())


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
