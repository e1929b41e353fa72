"""Any rank may be killed at any moment: all go on from the last checkpoint, every record once."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from faults.fleet_processes import LaunchedRanks, LaunchedServedRanks

BLOWS = 50


def test_ranks_resume_together_when_one_was_killed(tmp_path: Path) -> None:
    with LaunchedRanks(tmp_path, 480) as ranks:
        for place in (("worker", 1), ("worker", 0)):
            ranks.wait_for_another_checkpoint()
            ranks.hit(place)
        ranks.finish()
        ranks.check_every_record_was_trained_once()
        assert "worker 1 was killed by SIGKILL; restarting it (1 of 6)" in ranks.output
        assert "worker 0 was killed by SIGKILL; restarting it (1 of 6)" in ranks.output


@pytest.mark.soak
def test_ranks_and_the_server_with_their_rows_resume_when_one_was_killed(tmp_path: Path) -> None:
    with LaunchedServedRanks(tmp_path, 480) as ranks:
        for place in (("ps", 0), ("worker", 1)):
            ranks.wait_for_another_checkpoint()
            ranks.hit(place)
        ranks.finish()
        ranks.check_every_record_was_trained_once()
        assert "ps 0 was killed by SIGKILL; restarting it (1 of 6)" in ranks.output
        assert "worker 1 was killed by SIGKILL; restarting it (1 of 6)" in ranks.output


@pytest.mark.soak
@pytest.mark.parametrize("kind", [LaunchedRanks, LaunchedServedRanks])
def test_ranks_are_killed_again_and_again(kind: type[LaunchedRanks], tmp_path: Path) -> None:
    """At any moment: while they start, find each other, restore, train and save."""
    chance = random.Random(16)
    flags = ("--failover.max-retries", "200", "--timeouts.silence", "20s")
    with kind(tmp_path, 6000, *flags) as ranks:
        for blow in range(BLOWS):
            if blow % 5 == 0:
                ranks.wait_for_another_checkpoint()
            time.sleep(chance.uniform(0, 3))
            ranks.hit(chance.choice(ranks.members))
        ranks.finish()
        ranks.check_every_record_was_trained_once()
