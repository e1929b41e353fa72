"""Workers come and go while the run goes on, where the data hands out work: every record is trained once."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runtime.fleets import PATIENT, TalliedFiles, TalliedQueue, TalliedService, read_model
from runtime.losing import LosingFleet, Worker, settings, wait_for

from monolith.errors import ConfigError
from monolith.train import Hook, SaveConfig, StepResult, TrainConfig
from monolith.train.hook import DATA_ENDED

pytest.importorskip("pyarrow")

SOURCES = ["queue", "service"]
SOAK = pytest.mark.soak
ONE_NOW = [pytest.param("queue", marks=SOAK), "service"]
"""The service in `make test`, which has more that can go wrong; both in `make soak`."""


@contextlib.contextmanager
def handed_out(kind: str, folder: Path, batches: int = 15) -> Iterator[TalliedFiles]:
    """A task whose data hands out work."""
    folder.mkdir(exist_ok=True)
    if kind == "queue":
        yield TalliedQueue(batches=batches, folder=str(folder))
        return
    with TalliedService(batches=batches, folder=str(folder)).served() as task:
        yield task


class Steps(Hook):
    """Counts the steps of one worker, and does something after one of them."""

    def __init__(self, at: int = 0, act: Callable[[], object] = lambda: None) -> None:
        self._at, self._act = at, act
        self.taken = 0

    def after_step(self, run: Any, result: StepResult) -> None:  # noqa: ARG002
        self.taken += 1
        if self.taken == self._at:
            self._act()


class Held(Hook):
    """Holds a worker after some of its steps until it may go on; it stands still where all do."""

    def __init__(self, after: int, may: Callable[[], object]) -> None:
        self._after, self._may = after, may
        self.taken = 0

    def after_step(self, run: Any, result: StepResult) -> None:  # noqa: ARG002
        self.taken += 1
        if self.taken == self._after:
            fleet = run.session.coordinator._fleet
            wait_for(lambda: self._may() or fleet.is_halted, "what holds a worker")


class Ended(Hook):
    """Counts how often a worker has looked for a step, and found no more of its data."""

    times = 0

    def before_step(self, run: Any) -> None:
        wait_for_more = run.session.wait_for_more

        def counted(*args: Any) -> Any:
            self.times += 1
            return wait_for_more(*args)

        run.session.wait_for_more = counted


class Paced(Hook):
    """Takes as many steps as it may, and stands still with the others meanwhile."""

    def __init__(self) -> None:
        self.may = self.taken = 0
        self.ended = False

    def end(self, run: Any) -> None:  # noqa: ARG002
        self.ended = True

    def let(self, steps: int) -> None:
        """Let it take more steps, and wait until it has begun the last of those before."""
        wait_for(lambda: self.taken >= self.may or self.ended, "the chief to take its steps")
        self.may += steps

    def before_step(self, run: Any) -> None:
        def may() -> bool:
            run.session.at_step(run)
            return self.taken < self.may

        wait_for(may, "steps that may be taken")
        self.taken += 1


class Killed(BaseException):
    """As if the process had been killed."""


class Vanish(Hook):
    """Ends a worker after so many of its steps, without a word; the others find out at once."""

    def __init__(self, fleet: LosingFleet, worker: int, after: int = -1) -> None:
        self._fleet, self._worker, self._left = fleet, worker, after
        self.now = threading.Event()

    def after_step(self, run: Any, result: StepResult) -> None:  # noqa: ARG002
        self._left -= 1
        if not self._left or self.now.is_set():
            place = run.session.coordinator._fleet
            place._close_listener()
            place._run = ""
            self._fleet.miss(self._worker)
            raise Killed


def elastic(model_dir: Path, **more: Any) -> TrainConfig:
    return settings(model_dir, **{"save": SaveConfig(steps=4, retry_secs=0.01), **more})


def check_once(task: TalliedFiles, model_dir: Path) -> None:
    tally = read_model(task, model_dir).tally
    assert tally == dict.fromkeys(range(task.records), 1.0)


def check_at_least_once(task: TalliedFiles, model_dir: Path, again: int) -> None:
    tally = read_model(task, model_dir).tally
    assert tally.keys() == set(range(task.records)), "nothing is left out"
    assert sum(times - 1 for times in tally.values()) <= again


# Leaving


@pytest.mark.parametrize(
    ("kind", "keeps_going"),
    [
        ("queue", False),
        ("service", True),
        pytest.param("queue", True, marks=SOAK),
        pytest.param("service", False, marks=SOAK),
    ],
)
def test_a_worker_that_is_told_to_stop_leaves_its_work_to_other_workers(
    tmp_path: Path, kind: str, keeps_going: bool
) -> None:
    with (
        handed_out(kind, tmp_path / "data") as task,
        LosingFleet(
            elastic(tmp_path, save=SaveConfig()), num_workers=2, task=task, keeps_going=keeps_going
        ) as fleet,
    ):
        steps = Steps(3, lambda: other.trainer.stop("SIGTERM"))
        other = fleet.train(1, [steps])
        chief = fleet.train(0, [Held(1, lambda: steps.taken >= 3)])
        left, report = other.report(), chief.report()
    assert (left.departed, left.stop_reason, left.finished) == (True, "SIGTERM", False)
    assert (report.finished, report.stop_reason) == (True, DATA_ENDED)
    assert report.examples == task.records
    check_once(task, tmp_path)


def test_a_worker_that_is_told_to_stop_stops_all_if_the_source_has_no_work_queue(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    task = TalliedFiles(batches=24, folder=str(tmp_path / "data"))
    with LosingFleet(elastic(tmp_path), num_workers=2, task=task, keeps_going=False) as fleet:
        other = fleet.train(1, [Steps(3, lambda: other.trainer.stop("SIGTERM"))])
        chief = fleet.train(0, [Held(2, lambda: chief.fleet.stop_reason)])
        left, report = other.report(), chief.report()
    assert not left.departed
    assert not report.finished
    assert "worker 1: SIGTERM" in report.stop_reason


# Being lost


@pytest.mark.parametrize("kind", SOURCES)
def test_a_worker_that_is_lost_has_its_work_given_back_at_once(tmp_path: Path, kind: str) -> None:
    with (
        handed_out(kind, tmp_path / "data") as task,
        LosingFleet(elastic(tmp_path), num_workers=2, task=task) as fleet,
    ):
        other = fleet.train(1, [Vanish(fleet, 1, 3)])
        chief = fleet.train(0, [Held(1, lambda: other.found)])
        report = chief.report()
    assert isinstance(other.found, Killed)
    assert (report.finished, report.stop_reason) == (True, DATA_ENDED)
    (lost,) = report.lost.workers
    assert (lost.worker, lost.by_others) == (1, True)
    assert "given back" in lost.describe()
    check_at_least_once(task, tmp_path, again=8 * 3)


def test_what_is_lost_when_all_others_have_ended_is_read_by_the_chief(tmp_path: Path) -> None:
    may = threading.Event()
    with (
        handed_out("service", tmp_path / "data", batches=6) as task,
        LosingFleet(elastic(tmp_path, save=SaveConfig()), num_workers=2, task=task) as fleet,
    ):
        other = fleet.train(1, [Held(1, may.is_set), Vanish(fleet, 1, 1)])
        ended = Ended()
        chief = fleet.train(0, [Held(1, lambda: other.fleet.joined), ended])
        wait_for(lambda: ended.times, "the chief to have read everything")
        may.set()
        report = chief.report()
        wait_for(lambda: other.found, "the other to be gone")
    assert isinstance(other.found, Killed)
    assert report.finished
    check_at_least_once(task, tmp_path, again=8)


# Coming


@pytest.mark.parametrize("kind", ONE_NOW)
def test_an_unexpected_worker_joins_and_takes_work(tmp_path: Path, kind: str) -> None:
    newcomer: list[Worker] = []
    third = Steps()

    def come() -> None:
        newcomer.append(fleet.train(2, [third]))

    with (
        handed_out(kind, tmp_path / "data", batches=21) as task,
        LosingFleet(elastic(tmp_path), num_workers=2, max_workers=3, task=task, keeps_going=False) as fleet,
    ):
        chief = fleet.train(0, [Steps(3, come), Held(4, lambda: third.taken >= 2)])
        report = chief.report()
        assert newcomer[0].report().finished
    assert third.taken >= 2
    assert report.finished, "worker 1 never came, and nobody has waited for it"
    assert report.examples == task.records
    check_once(task, tmp_path)


def test_more_workers_than_shards_are_refused_if_the_source_has_no_work_queue(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    task = TalliedFiles(batches=6, folder=str(tmp_path / "data"))
    with (
        LosingFleet(elastic(tmp_path), num_workers=2, max_workers=3, task=task) as fleet,
        pytest.raises(ConfigError, match=r"cluster\.max_workers"),
    ):
        fleet.train(0).report()


@pytest.mark.parametrize("keeps_going", [False, pytest.param(True, marks=SOAK)])
def test_a_worker_that_left_comes_again(tmp_path: Path, keeps_going: bool) -> None:
    again: list[Worker] = []
    second = Steps()
    with (
        handed_out("service", tmp_path / "data", batches=21) as task,
        LosingFleet(elastic(tmp_path), num_workers=2, task=task, keeps_going=keeps_going) as fleet,
    ):
        steps = Steps(3, lambda: other.trainer.stop("SIGTERM"))
        other = fleet.train(1, [steps])

        def come() -> None:
            other.join(PATIENT)
            again.append(fleet.train(1, [second]))

        chief = fleet.train(
            0, [Held(1, lambda: steps.taken >= 3), Steps(3, come), Held(6, lambda: second.taken)]
        )
        report = chief.report()
        assert again[0].report().finished
    assert report.finished
    check_once(task, tmp_path)


# Starting again


@pytest.mark.parametrize(
    ("kind", "workers"), [pytest.param("queue", 1, marks=SOAK), ("queue", 3), ("service", 3)]
)
def test_a_checkpoint_of_any_members_is_resumed_by_any_number(
    tmp_path: Path, kind: str, workers: int
) -> None:
    with handed_out(kind, tmp_path / "data", batches=21) as task:
        first = elastic(tmp_path, max_steps=10)
        with LosingFleet(first, num_workers=2, task=task, keeps_going=False) as fleet:
            steps = Steps(3, lambda: other.trainer.stop("SIGTERM"))
            other = fleet.train(1, [steps])
            chief = fleet.train(0, [Held(1, lambda: steps.taken >= 3)])
            assert other.report().departed
            assert chief.report().step < task.batches
        with LosingFleet(elastic(tmp_path), num_workers=workers, task=task, keeps_going=False) as fleet:
            reports = [fleet.train(index) for index in reversed(range(workers))]
            assert all(worker.report().finished for worker in reports)
    check_once(task, tmp_path)


@pytest.mark.parametrize("kind", SOURCES)
def test_with_exactly_once_the_remaining_workers_roll_back_and_continue_without_the_lost_one(
    tmp_path: Path, kind: str
) -> None:
    with handed_out(kind, tmp_path / "data") as task:
        config = elastic(tmp_path)
        with LosingFleet(config, num_workers=2, task=task, keeps_going=False) as fleet:
            other = fleet.train(1, [Vanish(fleet, 1, 3)])
            chief = fleet.train(0, [Held(3, lambda: other.found)])
            chief.join(PATIENT)
            assert isinstance(chief.found, Exception)
            assert "worker 1 was lost" in str(chief.found)
            report = fleet.train(0).report()
    assert report.finished
    check_once(task, tmp_path)


# The chief, and server 0


@pytest.mark.parametrize("kind", ONE_NOW)
def test_a_lost_chief_rejoins_workers_that_continued(tmp_path: Path, kind: str) -> None:
    with (
        handed_out(kind, tmp_path / "data") as task,
        LosingFleet(elastic(tmp_path), num_workers=2, task=task) as fleet,
    ):
        steps = Steps()
        first = fleet.train(0, [Held(1, lambda: steps.taken), Vanish(fleet, 0, 3)])
        other = fleet.train(1, [steps, Held(2, lambda: first.found)])
        first.join(PATIENT)
        assert isinstance(first.found, Killed)
        report = fleet.train(0).report()
        assert other.report().finished
    assert report.finished
    check_at_least_once(task, tmp_path, again=8 * 3)


def test_workers_that_came_and_left_are_known_where_server_0_is_now(tmp_path: Path) -> None:
    with (
        handed_out("queue", tmp_path / "data", batches=21) as task,
        LosingFleet(elastic(tmp_path), num_workers=2, max_workers=3, task=task, loses_servers=True) as fleet,
    ):
        stays, leaves = Steps(), Steps(2, lambda: left.trainer.stop("SIGTERM"))
        left, other = fleet.train(1, [leaves]), fleet.train(2, [stays])

        def lose() -> None:
            left.join(PATIENT)
            fleet.replace_server(0)

        held = Held(1, lambda: stays.taken and leaves.taken >= 2)
        report = fleet.train(0, [held, Steps(3, lose)]).report()
        assert (left.report().departed, other.report().finished) == (True, True)
    assert report.finished
    tally = read_model(task, tmp_path).tally
    assert {record for record in tally if record % 2} == set(range(1, task.records, 2)), "what server 1 knows"
    assert set(tally.values()) == {1.0}


# All of it


def come_and_go_at_random(fleet: LosingFleet, chance: random.Random, *, loses: bool, steps: int) -> int:
    """Have workers come, leave and, if so asked, be lost for so many steps of the chief, and the rest be
    trained; return how many were lost."""
    paced = Paced()
    chief = fleet.train(0, [paced])
    everybody: list[Worker] = []
    there: dict[int, tuple[Worker, Vanish]] = {}
    while chief.is_alive() and paced.may < steps:
        index = chance.randrange(1, 4)
        if index not in there or not there[index][0].is_alive():
            vanish = Vanish(fleet, index)
            there[index] = (fleet.train(index, [vanish]), vanish)
            everybody.append(there[index][0])
        elif loses and chance.random() < 0.5:
            there[index][1].now.set()
        else:
            there[index][0].trainer.stop("SIGTERM")
        paced.let(chance.randrange(1, 4))
    paced.let(1000)
    report = chief.report()
    for worker in everybody:
        worker.join(PATIENT)
    failed = [worker.found for worker in everybody if isinstance(worker.found, Exception)]
    lost = sum(isinstance(worker.found, Killed) for worker in everybody)
    assert not failed
    assert (report.finished, report.stop_reason) == (True, DATA_ENDED)
    assert len(report.lost.workers) == lost
    return lost


MOMENTS = [
    (1, "queue", True),
    pytest.param(2, "service", False, marks=SOAK),
    *(pytest.param(seed, kind, seed % 4 < 2, marks=SOAK) for seed in range(3, 19) for kind in SOURCES),
]
"""A seed, what hands out work, and whether workers are lost as well."""


@pytest.mark.parametrize(("seed", "kind", "loses"), MOMENTS)
def test_workers_come_leave_and_are_lost_at_random_moments(
    tmp_path: Path, seed: int, kind: str, loses: bool
) -> None:
    chance = random.Random(seed)
    with (
        handed_out(kind, tmp_path / "data", batches=36) as task,
        LosingFleet(
            elastic(tmp_path, save=SaveConfig(steps=4, retry_secs=0.01, asynchronous=seed % 2 == 0)),
            num_workers=2,
            max_workers=4,
            task=task,
            keeps_going=loses,
        ) as fleet,
    ):
        lost = come_and_go_at_random(fleet, chance, loses=loses, steps=24)
    tally = read_model(task, tmp_path).tally
    assert tally.keys() == set(range(task.records)), "nothing is left out"
    assert max(tally.values()) <= 1 + lost
