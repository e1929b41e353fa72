"""Simulated process groups carry the collective calls of ranks, or break as those of gloo do."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
import torch

from monolith import concurrency
from monolith.config import Secret
from monolith.errors import DeadlineExceededError, RetryableError, UnavailableError
from monolith.store.rank_groups import Collective
from monolith.store.rank_keys import join_attempt, keep_keys, reach_keys
from monolith.store.rank_network import GroupOptions, rank_network
from monolith.testing.cluster import SimCluster
from monolith.testing.scheduler import SimThread

TOKEN = Secret("of-the-tests")
HOST = "127.0.0.1"
OPTIONS = GroupOptions(host=HOST, connect=timedelta(seconds=5), timeout=timedelta(seconds=5))
Work = Callable[[Collective], object]


def run(seed: int, size: int, work: Work, between: Callable[[SimCluster], None] = lambda _: None) -> None:
    """Connect ranks, and let each do its work; `between` happens one virtual second later."""

    def rank(port: list[int], index: int) -> None:
        if index == 0:
            keys = keep_keys(HOST, TOKEN)
            port.append(keys.port)
        else:
            while not port:
                concurrency.sleep(0.1)
            keys = join_attempt(reach_keys(HOST, port[0]), TOKEN)
        group = rank_network().make_group(keys, "dense", index, size, OPTIONS)
        work(Collective(group, "dense"))

    def play(cluster: SimCluster) -> None:
        port: list[int] = []
        threads: list[SimThread] = []
        for index in range(size):
            machine = cluster.machine(f"rank-{index}")
            threads.append(machine.spawn(partial(rank, port, index)))
        concurrency.sleep(1)
        between(cluster)
        for thread in threads:
            thread.join()

    SimCluster(seed).run(play)


@pytest.mark.parametrize("seed", range(5))
def test_each_call_gives_every_rank_what_gloo_would(seed: int) -> None:
    found: dict[int, list[list[int]]] = {}

    def work(group: Collective) -> None:
        mine = torch.tensor([group.rank + 1])
        found[group.rank] = [
            group.all_gather(mine).flatten().tolist(),
            group.sum(mine.clone()).tolist(),
            group.broadcast(mine, root=1).tolist(),
            group.all_to_all(torch.arange(3) + 10 * group.rank, [1] * 3, [1] * 3).tolist(),
        ]

    run(seed, 3, work)
    assert found == {rank: [[1, 2, 3], [6], [2], [rank, 10 + rank, 20 + rank]] for rank in range(3)}


def test_a_killed_rank_breaks_the_calls_that_wait_for_it() -> None:
    broken: list[int] = []

    def work(group: Collective) -> None:
        if group.rank == 2:
            concurrency.sleep(100)
        with pytest.raises(UnavailableError, match="is gone"):
            group.sum(torch.ones(1))
        broken.append(group.rank)

    run(1, 3, work, lambda cluster: _machine(cluster, "rank-2").kill())
    assert sorted(broken) == [0, 1]


def test_a_rank_that_is_cut_off_is_noticed_when_the_time_of_a_call_is_up() -> None:
    errors: dict[int, RetryableError] = {}

    def work(group: Collective) -> None:
        concurrency.sleep(2)
        try:
            group.sum(torch.ones(1))
        except RetryableError as error:
            errors[group.rank] = error

    run(1, 2, work, lambda cluster: cluster.network.cut("rank-0", "rank-1"))
    assert errors.keys() == {0, 1}
    assert all(isinstance(error, DeadlineExceededError) for error in errors.values())


def test_an_aborted_group_breaks_the_call_of_another_rank() -> None:
    def work(group: Collective) -> None:
        if group.rank == 0:
            concurrency.sleep(1)
            group.abort()
            return
        with pytest.raises(UnavailableError):
            group.sum(torch.ones(1))

    run(1, 2, work)


def test_a_call_waits_in_slices_until_all_take_part() -> None:
    waits: list[int] = []

    def work(group: Collective) -> None:
        if group.rank == 0:
            concurrency.sleep(3.5)
        group.all_gather(torch.zeros(1), lambda: waits.append(group.rank))

    run(1, 2, work)
    assert waits.count(1) in (2, 3)
    assert 0 not in waits


def _machine(cluster: SimCluster, name: str):  # type: ignore[no-untyped-def]
    return next(one for one in cluster.simulation.machines if one.name == name)
