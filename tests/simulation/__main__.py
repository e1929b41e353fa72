"""Runs seeds of a world: `PYTHONHASHSEED=0 python -m simulation fleet 0 1000`, in the folder tests."""

from __future__ import annotations

import importlib
import os
import sys
import time

import torch

from monolith.testing.scheduler import SimulationError


def main(world: str, first: int, end: int | None = None) -> int:
    torch.set_num_threads(1)
    play = getattr(importlib.import_module(f"simulation.{world}"), world)
    if end is None:
        try:
            play(first, traced=True)
        except SimulationError as error:
            print(error)
            return 1
        return 0
    failed, began, switches, virtual = [], time.monotonic(), 0, 0.0
    for seed in range(first, end):
        try:
            cluster = play(seed)
        except SimulationError as error:
            failed.append(seed)
            print(f"seed {seed}: {str(error).splitlines()[0][:200]}", flush=True)
        else:
            switches += cluster.simulation.switches
            virtual += cluster.simulation.now
    took = time.monotonic() - began
    runs = end - first
    print(
        f"{world}: {runs} runs, {len(failed)} failed {failed[:20]}, {took / runs:.3f} s a run, "
        f"{runs / took * 3600:,.0f} runs an hour, {virtual / took:,.0f} simulated seconds a second, {switches / took:,.0f} switches a second"
    )
    return bool(failed)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(
            sys.executable,
            [sys.executable, "-m", "simulation", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
