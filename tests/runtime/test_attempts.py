"""A worker whose others were lost joins again: as often as it may where they were replaced, else for free."""

from __future__ import annotations

from datetime import timedelta

import pytest
from simulation.counting import read_counts
from simulation.fleet import FOLDER, FleetShape, work
from simulation.following import CHANNEL, Followers, folder_plan

from monolith import concurrency
from monolith.errors import ReplacedError, RetryableError, UnavailableError
from monolith.observe import Metrics
from monolith.runtime import serve_parameters
from monolith.runtime.attempts import STEADY, UNCOUNTED, Retries
from monolith.runtime.cluster_config import FailoverConfig
from monolith.testing.cluster import SimCluster


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Worker:
    """One that is let down again and again."""

    def __init__(self, retries: int, *, stopped: bool = False) -> None:
        self.said: list[str] = []
        self.paused: list[float] = []
        self.metrics = Metrics()
        self.clock = Clock()
        self._stopped = stopped
        self._failover = Retries(
            FailoverConfig(max_retries=retries, wait=timedelta(seconds=5)),
            self.metrics,
            say=self.said.append,
            pause=self._pause,
            clock=self.clock,
        )

    def train(self, *servers: str, seconds: float = 0.0) -> None:
        """Join these servers, train for a while and lose them, as `SharedTraining` does."""
        try:
            self._failover.joined(servers)
            self.clock.now += seconds
            raise UnavailableError("server 1 is gone")
        except RetryableError as error:
            self._failover.lost(error)

    def _pause(self, seconds: float) -> bool:
        self.paused.append(seconds)
        return self._stopped


def test_a_worker_joins_again_as_often_as_servers_may_be_replaced() -> None:
    worker = Worker(2)
    worker.train("a", "b")
    worker.train("a", "c")
    worker.train("d", "c")
    with pytest.raises(UnavailableError, match="server 1 is gone"):
        worker.train("d", "e")
    assert worker.paused == [5.0] * 3
    assert worker.said[-1] == ("server 1 is gone\nretrying in 5 s (servers replaced so far: 2, at most 2)")
    assert "monolith_worker_failovers_total 3.0" in worker.metrics.render().decode()


def test_a_retry_with_the_same_servers_does_not_count() -> None:
    worker = Worker(1)
    for _ in range(50):
        worker.train("a", "b")
    worker.train("a", "c")
    assert worker.said[-1].endswith("(servers replaced so far: 1, at most 1)")


def test_retries_that_do_not_count_have_an_end_too() -> None:
    worker = Worker(1)
    for _ in range(UNCOUNTED + 1):
        worker.train("a")
    with pytest.raises(UnavailableError):
        worker.train("a")


def test_after_training_for_a_while_the_retries_are_counted_again() -> None:
    worker = Worker(1)
    for _ in range(2 * UNCOUNTED):
        worker.train("a", seconds=STEADY.total_seconds())
    assert len(worker.paused) == 2 * UNCOUNTED


def test_without_retries_the_first_loss_is_the_end() -> None:
    worker = Worker(0)
    with pytest.raises(UnavailableError):
        worker.train("a")
    assert (worker.said, worker.paused) == ([], [])


def test_a_process_that_is_asked_to_stop_while_it_waits_does_not_rejoin() -> None:
    worker = Worker(5, stopped=True)
    with pytest.raises(UnavailableError):
        worker.train("a")


@pytest.mark.parametrize(("save_steps", "when"), [(1, "before a save"), (1000, "at the end")])
def test_a_chief_whose_workers_do_not_come_ends_so_that_a_launcher_starts_all_again(
    save_steps: int,
    when: str,  # noqa: ARG001
) -> None:
    shape = FleetShape(num_ps=1, num_workers=2, batches=4, save_steps=save_steps)
    task = shape.task()

    def play(cluster: SimCluster) -> None:
        ps, worker = shape.config("ps", 0), shape.config("worker", 0)
        cluster.start("ps-0", lambda: serve_parameters(task, ps, cluster.discovery()))
        chief = cluster.start("worker-0", lambda: work(task, worker, cluster.discovery()))
        cluster.wait(done=lambda: chief.starts == 2)

    SimCluster(0).run(play)


def test_a_worker_that_was_replaced_and_is_back_ends_and_its_successor_trains_on() -> None:
    shape = FleetShape(num_ps=1, num_workers=2, batches=60, save_steps=5, read_seconds=0.5)
    task = shape.task()
    ended: list[tuple[bool, str]] = []

    def play(cluster: SimCluster) -> None:
        def train(index: int) -> object:
            machine = concurrency.machine()
            try:
                return work(task, shape.config("worker", index), cluster.discovery())
            except ReplacedError as error:
                ended.append((machine is earlier, str(error)))
                raise

        ps = shape.config("ps", 0)
        cluster.start("ps-0", lambda: serve_parameters(task, ps, cluster.discovery()))
        cluster.start("worker-0", lambda: train(0))
        worker = cluster.start("worker-1", lambda: train(1))
        concurrency.sleep(3)
        earlier = worker.replace()
        earlier.paused_until = cluster.simulation.now + 5
        cluster.wait(chief="worker-0")
        assert worker.starts == 2, "the successor was not disturbed"

    SimCluster(0).run(play)
    ((was_earlier, why),) = ended
    assert was_earlier
    assert why.startswith("cannot rejoin as worker 1: another process has joined as this worker since")


def test_a_chief_whose_delta_channel_stays_away_is_saved_and_ends_so_that_a_launcher_counts_the_restart() -> (
    None
):
    shape = FleetShape(num_ps=1, num_workers=1, batches=4, save_steps=1)
    task = shape.task()

    def play(cluster: SimCluster) -> None:
        cluster.disk.cut(CHANNEL, 150.0)
        ps, worker, plan = shape.config("ps", 0), shape.config("worker", 0), folder_plan(0.25)
        cluster.start("ps-0", lambda: serve_parameters(task, ps, cluster.discovery(), publish=plan))
        chief = cluster.start("worker-0", lambda: work(task, worker, cluster.discovery(), plan))
        cluster.wait(done=lambda: chief.starts == 2)
        counted = read_counts(task, FOLDER)
        assert counted is not None
        counted.check_exactly_once(task)
        followers = Followers(cluster)
        followers.start(1)
        cluster.wait(chief="worker-0")
        followers.check_equal(counted)

    SimCluster(0).run(play)
