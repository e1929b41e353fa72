"""Any process of a fleet may be killed or stopped at any moment: the run goes on, every record once."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
from faults.fleet_processes import MEMBERS, FleetProcesses, LaunchedFleet, LoopedFleet, Place
from train.fleets import Tallied, read_model

BLOWS = 10
"""Of each fleet; six fleets are hit."""


def test_the_launcher_restarts_whoever_is_killed_and_the_run_goes_on(tmp_path: Path) -> None:
    with LaunchedFleet(tmp_path, 400) as fleet:
        for place in (("ps", 1), ("worker", 0)):
            fleet.wait_for_another_checkpoint()
            fleet.hit(place)
        fleet.finish()
        fleet.check_every_record_was_trained_once()
        assert "ps 1 was killed by SIGKILL; restarting it (1 of 6)" in fleet.output
        assert "worker 0 was killed by SIGKILL; restarting it (1 of 6)" in fleet.output


def test_whoever_restarts_failures_has_the_run_go_on_and_survivors_are_used_again(tmp_path: Path) -> None:
    with LoopedFleet(tmp_path, 600) as fleet:
        for place in (("ps", 0), ("worker", 1), ("worker", 0)):
            fleet.wait_for_another_checkpoint()
            fleet.hit(place)
        fleet.finish()
        fleet.check_every_record_was_trained_once()
        killed = [-signal.SIGKILL, 0]
        assert fleet.exits == {
            ("ps", 0): killed,
            ("ps", 1): [0],
            ("worker", 0): killed,
            ("worker", 1): killed,
        }


def test_servers_whose_chief_is_killed_and_does_not_come_back_end_with_an_error(tmp_path: Path) -> None:
    with LaunchedFleet(tmp_path, 100_000, "--failover.max-retries", "0") as fleet:
        fleet.wait_for_another_checkpoint()
        fleet.hit(("worker", 0))
        assert fleet.launcher.wait(60) == 128 + signal.SIGKILL
        assert "worker 0 was killed by SIGKILL" in fleet.output.splitlines()[-1]
        assert [fleet.pid(place) for place in MEMBERS] == [None] * 4


def test_a_fleet_that_keeps_going_loses_no_more_than_it_says(tmp_path: Path) -> None:
    with LoopedFleet(tmp_path, 600, "--failover.recovery", "keep_going", "--json") as fleet:
        for place in (("ps", 1), ("ps", 0), ("worker", 1), ("worker", 0)):
            fleet.wait_for_another_checkpoint()
            began = time.monotonic()
            fleet.hit(place)
            fleet.wait_for_another_checkpoint()
            print(f"keep going: kill {place[0]} {place[1]}: {time.monotonic() - began:.1f} s")  # noqa: T201
        fleet.finish()
        assert fleet.exits[("worker", 0)] == fleet.exits[("worker", 1)] == [-signal.SIGKILL, 0]
        tally = read_model(Tallied(batches=fleet.batches), fleet.model_dir).tally
        assert set(tally.values()) <= {1.0, 2.0}
        lost = re.findall(r"Lost: \d+ rows (\d+) updates", fleet.output.replace(",", ""))
        assert len(lost) == 2
        gone = 8 * fleet.batches - len(tally)
        assert gone <= 8 * sum(map(int, lost)), "each update was of one batch, of 8 records"


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(6))
def test_a_fleet_is_hit_again_and_again(tmp_path: Path, seed: int) -> None:
    """Sixty blows in all: kill -9 of the chief, the worker and servers, and SIGSTOP of 20 and 90 s."""
    chance = random.Random(seed)
    blows = [("kill", chance.choice(MEMBERS)) for _ in range(BLOWS - 2)]
    blows += [("stop 20", chance.choice(MEMBERS)), ("stop 90", MEMBERS[seed % len(MEMBERS)])]
    chance.shuffle(blows)
    kind = LaunchedFleet if seed % 2 else LoopedFleet
    with kind(tmp_path, 5000, "--failover.max-retries", "100") as fleet:
        for how, place in blows:
            fleet.wait_for_another_checkpoint()
            time.sleep(chance.uniform(0, 0.3))
            began = time.monotonic()
            strike(fleet, how, place)
            fleet.wait_for_another_checkpoint()
            print(f"seed {seed}: {how} {place[0]} {place[1]}: {time.monotonic() - began:.1f} s")  # noqa: T201
        fleet.finish()
        fleet.check_every_record_was_trained_once()


def strike(fleet: FleetProcesses, how: str, place: Place) -> None:
    if how == "kill":
        fleet.hit(place)
        return
    before = {member: fleet.pid(member) for member in MEMBERS}
    lost = fleet.output.count("was lost")
    pid = fleet.hit(place, signal.SIGSTOP)
    seconds = float(how.removeprefix("stop "))
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)
    if seconds < 30:  # it was only slow, and nobody calls it dead
        fleet.wait_for_another_checkpoint()
        assert {member: fleet.pid(member) for member in MEMBERS} == before
        assert fleet.output.count("was lost") == lost
