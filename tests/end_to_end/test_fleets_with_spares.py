"""Whole fleets of real processes that find each other by files: each of them exits with 0."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runtime.fleets import Tallied, read_model
from services import warm

from monolith.cluster import fetch_ps_cluster

TESTS = Path(__file__).parents[1]
LIMIT = 150.0
BATCHES = 6


class Processes:
    """The processes of one run, each started by its own command line."""

    def __init__(self, folder: Path, num_ps: int, num_workers: int, *flags: str) -> None:
        self.folder = folder
        self.model_dir = folder / "model"
        self.file = str(self.model_dir / "ps_cluster_dir" / "run-1")
        self._counts = ("--num-ps", str(num_ps), "--num-workers", str(num_workers))
        self._flags = flags
        self.running: dict[str, warm.Popen] = {}

    def start(self, role: str, *indices: int, task: str = "runtime.fleets:Tallied") -> None:
        for index in indices:
            self.running[f"{role} {index}"] = warm.Popen(
                [
                    *("-m", "monolith", "train", task, "--set", f"batches={BATCHES}"),
                    *("--model-dir", str(self.model_dir), "--job.id", "run-1", *self._counts),
                    *("--discovery.kind", "files", "--discovery.folder", str(self.folder / "registry")),
                    *("--cluster.role", role, "--cluster.index", str(index)),
                    *("--cluster.listen", "127.0.0.1", "--failover.wait", "0.1s"),
                    *("--threads", "1", "--no-summaries", "--quiet", "--log-level", "info", *self._flags),
                ],
                cwd=TESTS,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
                    "OMP_NUM_THREADS": "1",
                },
                stdout=(self.folder / f"{role}-{index}").open("a"),
                stderr=warm.STDOUT,
            )

    def kill(self, name: str) -> None:
        self.running[name].kill()
        self.running[name].wait()

    def said(self, name: str) -> str:
        return (self.folder / name.replace(" ", "-")).read_text()

    def wait_for(self, found: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT
        while not found():
            assert time.monotonic() < deadline, {name: self.said(name)[-1000:] for name in self.running}
            time.sleep(0.05)

    def finish(self) -> None:
        """All exit with 0, and every record was trained once."""
        exits = {name: process.wait(LIMIT) for name, process in self.running.items()}
        assert exits == dict.fromkeys(exits, 0), {name: self.said(name)[-1000:] for name in self.running}
        task = Tallied(batches=BATCHES)
        assert read_model(task, self.model_dir).tally == dict.fromkeys(range(task.records), 1.0)

    @property
    def listed(self) -> list[str]:
        return fetch_ps_cluster(self.file)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Callable[..., Processes]]:
    made: list[Processes] = []

    def make(num_ps: int, num_workers: int, *flags: str) -> Processes:
        made.append(Processes(tmp_path, num_ps, num_workers, *flags))
        return made[-1]

    yield make
    for process in (process for each in made for process in each.running.values()):
        process.kill()
        process.wait()


def test_four_servers_and_three_workers(processes: Callable[..., Processes]) -> None:
    fleet = processes(4, 3)
    fleet.start("ps", 0, 1, 2, 3)
    fleet.start("worker", 0, 1, 2)
    fleet.finish()
    assert fleet.listed == []  # there was nothing to choose


def test_two_servers_are_chosen_of_four_for_one_worker(processes: Callable[..., Processes]) -> None:
    fleet = processes(2, 1, "--cluster.num-extra-ps", "2", "--cluster.measure-ps", "0.2s")
    fleet.start("ps", 0, 1, 2, 3)
    fleet.start("worker", 0)
    fleet.finish()
    table = [line.split() for line in fleet.said("worker 0").splitlines() if "127.0.0.1:" in line]
    shares = {words[0]: words[1] for words in table if words[0] in ("0", "1")}
    assert [shares["0"], shares["1"]] == fleet.listed
    assert [words[0] for words in table] == ["0", "1", "spare", "spare"]


def test_four_servers_and_two_redundant_ones_keep_their_list_through_a_chief_that_restarts(
    processes: Callable[..., Processes],
) -> None:
    fleet = processes(4, 2, "--cluster.num-redundant-ps", "2")
    fleet.start("ps", 5, 4, 3, 1)  # two are late
    fleet.start("worker", 0)
    fleet.wait_for(lambda: fleet.listed)
    before = fleet.listed
    fleet.kill("worker 0")
    fleet.start("ps", 0, 2)
    fleet.start("worker", 0, 1)
    fleet.finish()
    assert fleet.listed == before


def test_a_step_that_is_late_is_tried_again_and_does_not_count(
    processes: Callable[..., Processes], tmp_path: Path
) -> None:
    late = ("--set", f"notes={tmp_path / 'notes'}", "--set", "late=2", "--failover.max-retries", "1")
    fleet = processes(1, 1, *late)
    fleet.start("ps", 0, task="runtime.late_steps:LateSteps")
    fleet.start("worker", 0, task="runtime.late_steps:LateSteps")
    fleet.finish()
    assert fleet.said("worker 0").count("retrying in 0.1 s (servers replaced so far: 0, at most 1)") == 2
