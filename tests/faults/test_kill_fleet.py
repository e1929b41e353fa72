"""Any process of a fleet may be killed or stopped at any moment: the run goes on, every record once."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from faults.fleet_processes import (
    LIMIT,
    MEMBERS,
    FleetProcesses,
    LaunchedFleet,
    LoopedFleet,
    Place,
    QueuedFleet,
    WiredFleet,
)
from faults.network import why_no_network
from runtime.fleets import Tallied, read_model
from runtime.test_tiered_tables import ManyClicks

from monolith.cluster import fetch_ps_cluster
from monolith.cluster.status import StatusBoard

BLOWS = 20
"""Of each fleet; eight fleets are hit."""
KEEP_GOING = ("--failover.recovery", "keep_going")
COLD = ("--train.tables.storage", "tiered", "--train.tables.memory-bytes", "4MiB")


@pytest.mark.soak
def test_the_launcher_restarts_killed_members_and_the_run_continues(tmp_path: Path) -> None:
    with LaunchedFleet(tmp_path, 160) as fleet:
        for place in (("ps", 1), ("worker", 0)):
            fleet.wait_for_another_checkpoint()
            fleet.hit(place)
        fleet.finish()
        fleet.check_every_record_was_trained_once()
        assert "ps 1 was killed by SIGKILL; restarting it (1 of 6)" in fleet.output
        assert "worker 0 was killed by SIGKILL; restarting it (1 of 6)" in fleet.output


def test_an_outer_supervisor_can_restart_failures_and_surviving_processes_are_reused(tmp_path: Path) -> None:
    with LoopedFleet(tmp_path, 240) as fleet:
        for place in (("ps", 0), ("worker", 0)):
            fleet.wait_for_another_checkpoint()
            fleet.hit(place)
        fleet.finish()
        fleet.check_every_record_was_trained_once()
        killed = [-signal.SIGKILL, 0]
        assert fleet.exits == {
            ("ps", 0): killed,
            ("ps", 1): [0],
            ("worker", 0): killed,
            ("worker", 1): [0],
        }


def test_servers_whose_chief_is_killed_and_does_not_come_back_end_with_an_error(tmp_path: Path) -> None:
    with LaunchedFleet(tmp_path, 100_000, "--failover.max-retries", "0") as fleet:
        fleet.wait_for_another_checkpoint()
        fleet.hit(("worker", 0))
        assert fleet.launcher.wait(60) == 128 + signal.SIGKILL
        why, what_to_do = fleet.output.splitlines()[-2:]
        assert "worker 0 was killed by SIGKILL" in why
        assert re.search(
            r"the last checkpoint is \S+/model\.ckpt-\d+; this resumes from it: monolith train ", what_to_do
        )
        assert [fleet.pid(place) for place in MEMBERS] == [None] * 4


@pytest.mark.soak
def test_a_fleet_that_keeps_going_loses_no_more_than_it_says(tmp_path: Path) -> None:
    with LoopedFleet(tmp_path, 400, *KEEP_GOING) as fleet:
        for place in (("ps", 1), ("ps", 0), ("worker", 1), ("worker", 0)):
            fleet.wait_for_another_checkpoint()
            fleet.hit(place)
        fleet.finish()
        assert fleet.exits == {key: [-signal.SIGKILL, 0] for key in MEMBERS}
        assert check_lost_no_more_than_said(fleet) == 2


@pytest.mark.soak
def test_a_killed_server_is_served_by_its_standby(tmp_path: Path) -> None:
    with LaunchedFleet(tmp_path, 600, *KEEP_GOING, "--cluster.standbys", "1") as fleet:
        for share in (1, 0):
            fleet.wait_for(lambda: copied(fleet).issuperset({0, 1}), "each share to have a copy")
            fleet.wait_for_another_checkpoint()
            fleet.hit(serving(fleet, share))
        fleet.finish()
        assert len(re.findall("its share taken over by its standby at", fleet.output)) == 2
        assert check_lost_no_more_than_said(fleet) == 2


@pytest.mark.soak
def test_two_standbys_outlive_two_losses_before_another_copy_is_made(tmp_path: Path) -> None:
    with LaunchedFleet(tmp_path, 600, *KEEP_GOING, "--cluster.standbys", "2") as fleet:
        fleet.wait_for(lambda: copied(fleet).issuperset({0, 1}), "each share to have a copy")
        fleet.wait_for(
            lambda: not StatusBoard(str(fleet.model_dir)).read().processes[0].standbys, "all of the standbys"
        )
        fleet.wait_for_another_checkpoint()
        for loss in (1, 2):  # the second hits the standby that has just taken over
            fleet.hit(serving(fleet, 1, of=6))
            fleet.wait_for(
                lambda loss=loss: fleet.output.count(TAKEN_OVER) == loss, "the standby to take over"
            )
        fleet.finish()
        assert fleet.output.count(TAKEN_OVER) == 2
        assert check_lost_no_more_than_said(fleet) == 2


class TieredFleet(LaunchedFleet):
    """A worker and two servers, most of whose rows are in files."""

    SHAPE = ("--num-ps", "2", "--num-workers", "1", "--deterministic")
    members = MEMBERS[:3]

    def __init__(self, folder: Path, batches: int) -> None:
        super().__init__(folder, batches, *COLD)

    @property
    def task(self) -> list[str]:
        return ["runtime.test_tiered_tables:ManyClicks"]

    def cold_folders(self) -> set[Path]:
        return set((self.model_dir / "cold").glob("*.cold"))

    def cold_files(self) -> set[Path]:
        return set((self.model_dir / "cold").glob("*.cold/*.cold"))


@pytest.mark.soak
@pytest.mark.parametrize("place", [("ps", 1), ("worker", 0)])
def test_a_killed_fleet_with_cold_rows_ends_as_if_it_had_not_been_and_leaves_no_file(
    tmp_path: Path, place: Place
) -> None:
    task = ManyClicks(batches=80)
    with TieredFleet(tmp_path, task.batches) as fleet:
        fleet.wait_for_another_checkpoint()
        fleet.wait_for(fleet.cold_files, "cold rows")
        before = fleet.cold_folders()
        fleet.hit(place)
        fleet.finish()
        assert "was killed by SIGKILL; restarting it (1 of 6)" in fleet.output
        assert before
        assert fleet.cold_folders() == set()
    (tmp_path / "whole").mkdir()
    with TieredFleet(tmp_path / "whole", task.batches) as unharmed:
        unharmed.finish()
    whole, resumed = (read_model(task, one.model_dir) for one in (unharmed, fleet))
    assert (resumed.step, resumed.rows) == (whole.step, whole.rows)


TAKEN_OVER = "its share taken over by its standby at"


def copied(fleet: FleetProcesses) -> set[int]:
    """Shares of which a standby has had a whole copy."""
    said = re.findall(r"standbys have whole copies of the parameter servers ([\d, ]+)", fleet.output)
    return {int(share) for one in said for share in one.split(", ")}


def serving(fleet: FleetProcesses, share: int, of: int = 4) -> Place:
    """Which process serves a share, as the chief lists it."""
    (listed,) = (fleet.model_dir / "ps_cluster_dir").iterdir()
    address = re.escape(fetch_ps_cluster(str(listed))[share])
    found = re.search(rf"parameter server (\d+) of {of}(?:, a spare,)? listens on {address}\b", fleet.output)
    assert found is not None, fleet.output
    return "ps", int(found[1])


# Workers that come and go


@pytest.mark.soak
def test_a_worker_that_is_told_to_stop_leaves_and_an_unexpected_one_joins(tmp_path: Path) -> None:
    with QueuedFleet(tmp_path, 300, "--cluster.max-workers", "3") as fleet:
        fleet.wait_for_another_checkpoint()
        fleet.hit(("worker", 1), signal.SIGTERM)
        newcomer = fleet.start(fleet.member(("worker", 2)))
        fleet.finish()
        assert newcomer.wait(LIMIT) == 0
        assert fleet.exits == {place: [0] for place in MEMBERS}
        assert "SIGTERM; the others go on with what it had not trained" in fleet.output
        assert fleet.times_trained() == dict.fromkeys(range(fleet.data.records), 1.0)


@pytest.mark.soak
@pytest.mark.parametrize("keeps_going", [False, True])
def test_the_work_of_a_worker_that_is_killed_for_good_is_done_by_other_workers(
    tmp_path: Path, keeps_going: bool
) -> None:
    with QueuedFleet(tmp_path, 300, *KEEP_GOING * keeps_going) as fleet:
        fleet.wait_for_another_checkpoint()
        fleet.away.add(("worker", 1))
        fleet.hit(("worker", 1))
        fleet.finish()
        times = fleet.times_trained()
        assert times.keys() == set(range(fleet.data.records))
        if keeps_going:
            assert "worker 1 was lost, and its work was given back after" in fleet.output
            assert max(times.values()) <= 2
        else:
            assert set(times.values()) == {1.0}, "all went back to the last checkpoint"


def check_lost_no_more_than_said(fleet: FleetProcesses) -> int:
    """Return how many servers the fleet says it has lost."""
    tally = read_model(Tallied(batches=fleet.batches), fleet.model_dir).tally
    assert min(tally.values()) >= 1.0
    lost = re.findall(r"Lost: \d+ rows (\d+) updates", fleet.output.replace(",", ""))
    gone = 8 * fleet.batches - len(tally)
    assert gone <= 8 * sum(map(int, lost)), "each update was of one batch, of 8 records"
    return len(lost)


# Again and again

FLEETS: list[type[FleetProcesses]] = [LaunchedFleet, LoopedFleet, WiredFleet]


@dataclass(frozen=True)
class Blow:
    """What happens to whom, and for how many seconds."""

    kind: Literal["kill", "stop", "part"]
    place: Place
    seconds: float = 0.0
    after: float = 0.0
    """Seconds after a checkpoint."""

    def __str__(self) -> str:
        return f"{self.kind} {self.place[0]} {self.place[1]}" + (
            f", {self.seconds:.0f} s" * bool(self.seconds)
        )

    @property
    def only_delays(self) -> bool:
        return self.kind == "stop" and self.seconds <= 20


def schedule(seed: int, blows: int, *, wired: bool) -> list[Blow]:
    """Return what happens to a fleet, the same for the same seed: mostly kills, and one longer stop."""
    chance = random.Random(seed)
    kinds = ["kill"] * 5 + ["stop"] * 2 + ["part"] * 3 * wired

    def one() -> Blow:
        kind: Any = chance.choice(kinds)
        seconds = {"kill": [0.0], "stop": [3.0, 20.0], "part": [3.0, 10.0, 45.0]}[kind]
        return Blow(kind, chance.choice(MEMBERS), chance.choice(seconds), chance.uniform(0, 0.3))

    found = [one() for _ in range(blows)]
    found[chance.randrange(blows)] = Blow("stop", MEMBERS[seed % len(MEMBERS)], 90.0)
    return found


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(6))
def test_a_fleet_is_hit_again_and_again(tmp_path: Path, seed: int) -> None:
    """120 blows in all: kill -9, SIGSTOP of 3, 20 and 90 s and pulled cables, whoever it is."""
    kind = FLEETS[seed % len(FLEETS)]
    if kind is WiredFleet and (reason := why_no_network()) is not None:
        pytest.skip(reason)
    with kind(tmp_path, 5000, "--failover.max-retries", "100") as fleet:
        hit(fleet, seed)
        fleet.finish()
        fleet.check_every_record_was_trained_once()


@pytest.mark.soak
@pytest.mark.parametrize("seed", [11, 12])
def test_a_fleet_that_keeps_going_is_hit_again_and_again(tmp_path: Path, seed: int) -> None:
    """40 blows in all; what is lost is said, and the run comes to its end."""
    kind = FLEETS[seed % len(FLEETS)]
    away = sum(blow.seconds for blow in schedule(seed, BLOWS, wired=kind is WiredFleet))
    batches = 5000 + int(25 * away)  # the others go on meanwhile
    with kind(tmp_path, batches, "--failover.max-retries", "100", *KEEP_GOING) as fleet:
        hit(fleet, seed)
        fleet.finish()
        check_lost_no_more_than_said(fleet)


@pytest.mark.soak
@pytest.mark.parametrize("keeps_going", [False, True])
def test_a_worker_leaves_is_killed_and_comes_again_and_again(tmp_path: Path, keeps_going: bool) -> None:
    """20 blows each: worker 1 of data that hands out work is told to stop or killed, and comes back."""
    chance, place = random.Random(21), ("worker", 1)
    flags = ("--failover.max-retries", "100", *KEEP_GOING * keeps_going)
    with QueuedFleet(tmp_path, 5000, *flags) as fleet:
        fleet.returning.add(place)
        for _ in range(BLOWS):
            fleet.wait_for_another_checkpoint()
            fleet.hit(place, chance.choice([signal.SIGTERM, signal.SIGKILL]))
        fleet.returning.clear()
        fleet.finish()
        times = fleet.times_trained()
        assert times.keys() == set(range(fleet.data.records))
        assert keeps_going or set(times.values()) == {1.0}


def hit(fleet: FleetProcesses, seed: int) -> None:
    """Hit a fleet as its schedule says, each time when it has saved after the blow before."""
    for blow in schedule(seed, BLOWS, wired=isinstance(fleet, WiredFleet)):
        fleet.wait_for_another_checkpoint()
        time.sleep(blow.after)
        began = time.monotonic()
        strike(fleet, blow)
        fleet.wait_for_another_checkpoint()
        print(f"seed {seed}: {blow}: {time.monotonic() - began:.1f} s")  # noqa: T201


def strike(fleet: FleetProcesses, blow: Blow) -> None:
    if blow.kind == "kill":
        fleet.hit(blow.place)
        return
    if blow.kind == "part":
        assert isinstance(fleet, WiredFleet)
        fleet.part(blow.place, blow.seconds)
        return
    before = {member: fleet.pid(member) for member in MEMBERS}
    lost = fleet.output.count("was lost")
    pid = fleet.hit(blow.place, signal.SIGSTOP)
    time.sleep(blow.seconds)
    os.kill(pid, signal.SIGCONT)
    if blow.only_delays:  # it was only slow, and nobody calls it dead
        fleet.wait_for_another_checkpoint()
        assert {member: fleet.pid(member) for member in MEMBERS} == before
        assert fleet.output.count("was lost") == lost
