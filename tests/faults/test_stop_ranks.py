"""Ranks that are told to stop at any moment end within seconds, with a checkpoint."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from faults.fleet_processes import LaunchedRanks

STOPS = 20
ENDS_WITHIN = 10.0
SIGTERM_STATUS = 143


class ThreeRanks(LaunchedRanks):
    SHAPE = ("--mode", "sync", "--num-workers", "3")
    members = [*LaunchedRanks.members, ("worker", 2)]  # noqa: RUF012 - as its base


def stop_launcher(ranks: ThreeRanks, _: random.Random) -> None:
    ranks.launcher.terminate()


def stop_each(ranks: ThreeRanks, chance: random.Random) -> None:
    """As a cluster does that ends the processes of a job by itself."""
    for place in ranks.members:
        if (pid := ranks.pid(place)) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        time.sleep(chance.choice([0, 0.01, 0.1, 0.5]))


@pytest.mark.soak
@pytest.mark.parametrize("stop", [stop_launcher, stop_each])
def test_three_ranks_are_stopped_again_and_again(
    stop: Callable[[ThreeRanks, random.Random], None], tmp_path: Path
) -> None:
    chance = random.Random(27)
    for number in range(STOPS):
        folder = tmp_path / str(number)
        folder.mkdir()
        with ThreeRanks(folder, 10_000_000) as ranks:
            ranks.wait_for_another_checkpoint()
            time.sleep(chance.uniform(0, 2))
            stop(ranks, chance)
            ranks.wait_for(lambda: ranks.launcher.poll() is not None, "the end", ENDS_WITHIN)
            assert ranks.launcher.returncode == SIGTERM_STATUS, ranks.output[-5000:]
            assert "killing it" not in ranks.output
            assert ranks.checkpoints
