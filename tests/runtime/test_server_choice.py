"""More servers than shares: who is used, in which order, and what becomes of the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from runtime.fleets import Tallied, read_model, run_config, run_fleet

from monolith.cluster import (
    ClusterManager,
    ClusterManagerConfig,
    MemoryDiscovery,
    fetch_ps_cluster,
    save_ps_cluster,
)
from monolith.errors import ClusterError, UnavailableError
from monolith.observe import Metrics
from monolith.runtime import join_fleet
from monolith.runtime.cluster_config import ClusterConfig
from monolith.runtime.messages import FollowShard
from monolith.runtime.parameter_server import ServedShard, ServerEnd
from monolith.runtime.server_calls import ServerCalls
from monolith.runtime.server_choice import ServerChoice, Spares
from monolith.store import ParameterServer, ServerGroup
from monolith.train import TrainConfig
from monolith.wire.messages import write_message

TASK = Tallied(batches=6)
GONE = "127.0.0.1:1"
CALLS = ServerCalls(timeout=timedelta(seconds=30))


class Pool:
    """Servers in this process, registered by index, of which only `num_ps` have a share."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, count: int, num_ps: int) -> None:
        self.discovery = MemoryDiscovery()
        self.folder, self.num_ps = folder, num_ps
        self.shares: list[ServedShard] = []
        self.servers: list[ParameterServer] = []
        self._stack = stack
        for index in range(count):
            self.start(index)

    def start(self, index: int) -> ParameterServer:
        config = TrainConfig(model_dir=str(self.folder))
        cluster = ClusterConfig(role="ps", index=index, num_ps=self.num_ps, num_redundant_ps=index + 1)
        share = ServedShard(TASK, config, cluster)
        server = self._stack.enter_context(share.serve("127.0.0.1", 0, None))
        self.discovery.register("ps", index, server.address)
        self.shares.append(share)
        self.servers.append(server)
        return server

    @property
    def addresses(self) -> list[str]:
        return [server.address for server in self.servers]

    @property
    def manager(self) -> ClusterManager:
        return ClusterManager(
            self.discovery,
            ClusterManagerConfig(
                num_workers=1,
                num_ps=self.num_ps,
                num_redundant_ps=1,
                model_dir=str(self.folder),
                uuid="run",
                timeout=timedelta(),
                ps_file_timeout=timedelta(),
            ),
        )

    @property
    def file(self) -> str:
        return self.manager.ps_file

    def choice(self, **how: Any) -> ServerChoice:
        return ServerChoice(self.manager, CALLS, num_ps=self.num_ps, **how)

    def shares_of(self, addresses: list[str]) -> list[Any]:
        return [CALLS(address, "describe")["shard"] for address in addresses]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with contextlib.ExitStack() as stack:
        yield Pool(stack, tmp_path, count=3, num_ps=2)


# A server without a share


def test_a_spare_says_that_it_has_no_share_and_refuses_requests_for_rows(pool: Pool) -> None:
    spare = pool.servers[2].address
    assert CALLS(spare, "hello")["shard"] is None
    assert CALLS(spare, "describe")["shard"] is None
    with contextlib.closing(ServerGroup([spare], patience=timedelta())) as group:
        with pytest.raises(UnavailableError, match="has no shard of the model yet"):
            group.describe()
        with pytest.raises(UnavailableError, match="it is a spare"):
            group.read_step()
        with pytest.raises(UnavailableError, match="it is a spare"):
            group.exchange("pull_dense", {0: ({}, b"")})
        with pytest.raises(UnavailableError, match="has no share yet"):
            group.call(0, "server.begin", run="one")


def test_a_spare_that_is_assigned_a_share_serves_it(pool: Pool) -> None:
    addresses = [pool.servers[0].address, pool.servers[2].address]
    CALLS.assign(addresses[1], 1, 2)
    CALLS.assign(addresses[1], 1, 2)
    with contextlib.closing(ServerGroup(addresses)) as group:
        assert [about["shard"] for about in group.describe()] == [[0, 2], [1, 2]]
        group.call_all("server.begin", run="one")
        assert group.describe()[1]["incarnation"] == "one"


def test_a_share_may_change_until_a_run_begins_and_the_same_one_may_be_assigned_again(pool: Pool) -> None:
    server = pool.servers[0].address
    CALLS.assign(server, 1, 2)
    CALLS(server, "server.begin", run="one")
    CALLS.assign(server, 1, 2)
    assert CALLS(server, "describe")["incarnation"] == "one"
    with pytest.raises(ClusterError, match=r"holds share 1 of 2 in a run, and cannot take share 0 of 2"):
        CALLS.assign(server, 0, 2)
    with pytest.raises(ClusterError, match="there is no share 2 of 2"):
        CALLS.assign(server, 2, 2)


# The chief's choice


def test_those_that_register_first_are_used_and_listed_by_share(pool: Pool) -> None:
    assert pool.choice().of_chief() == pool.addresses[:2]
    assert fetch_ps_cluster(pool.file) == pool.addresses[:2]


def test_a_server_that_is_registered_and_dead_is_not_chosen(pool: Pool) -> None:
    first = pool.addresses[0]
    pool.discovery.register("ps", 0, GONE)
    assert pool.choice().of_chief() == pool.addresses[1:]
    assert pool.shares_of(pool.addresses[1:]) == [[0, 2], [1, 2]]
    assert first not in fetch_ps_cluster(pool.file)


def test_too_few_that_answer_are_waited_for(pool: Pool) -> None:
    pool.servers[0].close()
    pool.servers[1].close()
    with pytest.raises(
        UnavailableError, match="2 parameter servers are needed; 1 of those registered answer"
    ):
        pool.choice().of_chief()
    assert fetch_ps_cluster(pool.file) == []


def test_a_restarted_chief_keeps_the_list_whatever_it_would_choose_now(pool: Pool) -> None:
    backwards = pool.choice(candidates=3, choose=lambda found: list(reversed(found)))
    chosen = backwards.of_chief()
    assert chosen == [pool.addresses[2], pool.addresses[1]]
    assert pool.shares_of(chosen) == [[0, 2], [1, 2]]
    assert pool.choice().of_chief() == chosen
    assert fetch_ps_cluster(pool.file) == chosen


def test_a_late_worker_reads_the_list_and_not_the_registry(pool: Pool) -> None:
    chosen = pool.choice(candidates=3, choose=lambda found: found[1:]).of_chief()
    assert pool.choice().of_worker() == chosen == pool.addresses[1:]


def test_a_worker_waits_until_each_server_of_the_list_has_its_share(pool: Pool) -> None:
    save_ps_cluster(pool.file, pool.addresses[1:])  # as an earlier run left it
    with pytest.raises(UnavailableError, match="has not been assigned share 0 of 2"):
        pool.choice().of_worker()


def test_a_spare_takes_the_place_of_a_missing_listed_server_and_the_rest_stay(pool: Pool) -> None:
    pool.choice().of_chief()
    CALLS(pool.addresses[1], "server.begin", run="one")
    pool.servers[0].close()
    assert pool.choice().of_chief() == [pool.addresses[2], pool.addresses[1]]
    assert fetch_ps_cluster(pool.file) == [pool.addresses[2], pool.addresses[1]]
    assert pool.shares_of([pool.addresses[2]]) == [[0, 2]]


def test_a_server_that_comes_back_elsewhere_may_take_its_own_place(pool: Pool) -> None:
    pool.servers[2].close()
    pool.choice().of_chief()
    pool.servers[1].close()
    with pytest.raises(UnavailableError, match="no spare is there to take over"):
        pool.choice().of_chief()
    back = pool.start(1).address
    assert pool.choice().of_chief() == [pool.addresses[0], back]


def test_a_server_that_is_gone_has_a_moment_to_come_back_before_a_spare_takes_its_place(pool: Pool) -> None:
    now = [0.0]
    choice = pool.choice(spare_after=timedelta(seconds=5), clock=lambda: now[0])
    choice.of_chief()
    pool.servers[1].close()
    with pytest.raises(UnavailableError, match="may come back"):
        choice.of_chief()
    now[0] = 5.0
    assert choice.of_chief() == [pool.addresses[0], pool.addresses[2]]


def test_a_server_that_is_back_in_time_is_preferred_to_a_spare(pool: Pool) -> None:
    choice = pool.choice(spare_after=timedelta(hours=1))
    choice.of_chief()
    pool.servers[1].close()
    back = pool.start(1).address
    assert choice.places_of(1) == [pool.addresses[1], back]
    assert choice.of_chief() == [pool.addresses[0], back]
    assert fetch_ps_cluster(pool.file) == [pool.addresses[0], back]


def test_a_server_that_takes_over_during_a_run_is_listed(pool: Pool) -> None:
    choice = pool.choice()
    used = choice.of_chief()
    spare = choice.take_over(1, used)
    assert spare == pool.addresses[2]
    assert choice.take_over(0, used, [spare]) is None, "it was given another share, and does not serve it yet"
    choice.list_server(1, spare)
    assert pool.choice().of_worker() == [pool.addresses[0], spare]
    assert choice.take_over(0, [*used, spare]) is None, "no spare is left"


def test_a_list_without_living_servers_is_of_an_earlier_run(pool: Pool) -> None:
    save_ps_cluster(pool.file, [GONE, "127.0.0.1:2"])
    assert pool.choice().of_chief() == pool.addresses[:2]


class BrokenOnce(ServerCalls):
    """The first connection to each server breaks."""

    def __init__(self) -> None:
        super().__init__(timeout=timedelta(seconds=30))
        self._broken: set[str] = set()

    def __call__(self, address: str, name: str, /, **body: Any) -> dict[str, Any]:
        if address not in self._broken:
            self._broken.add(address)
            raise UnavailableError(f"the connection to {address} broke")
        return super().__call__(address, name, **body)


def test_servers_that_do_not_answer_for_a_moment_keep_their_shares(pool: Pool) -> None:
    chosen = pool.choice(candidates=3, choose=lambda found: list(reversed(found))).of_chief()
    for address in chosen:
        CALLS(address, "server.begin", run="one")
    choice = ServerChoice(pool.manager, BrokenOnce(), num_ps=2)
    with pytest.raises(UnavailableError, match="did not answer a moment ago, and does now"):
        choice.of_chief()
    assert choice.of_chief() == chosen


def test_the_chief_tells_metrics_how_many_servers_are_missing(pool: Pool) -> None:
    metrics = Metrics()
    for index in (0, 1):
        train = TrainConfig(model_dir=str(pool.folder), model_name=f"m{index}")
        config = run_config(train, index=index, num_ps=2, num_workers=2, num_redundant_ps=1)
        with join_fleet(pool.discovery, config, metrics=metrics):
            pass
    shown = metrics.render().decode()
    assert 'containers_num_left_ps{cluster_type="stable",model_name="m0"} 0.0' in shown
    assert 'containers_job_waiting{cluster_type="stable",model_name="m0"} 0.0' in shown
    assert "m1" not in shown


# Spares, while a run goes on and at its end


def test_spares_are_told_that_the_run_is_over_and_dead_ones_are_skipped(pool: Pool) -> None:
    used = pool.choice().of_chief()
    pool.discovery.register("ps", 3, GONE)
    before = fetch_ps_cluster(pool.file)
    spares = Spares(pool.manager.registered_ps, lambda: used, CALLS)
    assert spares.addresses() == [pool.addresses[2], GONE]
    spares.end("one", finished=True)
    assert pool.shares[2]._over.is_set()
    assert not pool.shares[0]._over.is_set()
    assert fetch_ps_cluster(pool.file) == before


def test_a_spare_that_finds_a_chief_keeps_waiting() -> None:
    now = [0.0]
    spare = ClusterConfig(role="ps", index=1, num_ps=1, num_redundant_ps=1)
    share = ServedShard(TASK, TrainConfig(), spare, clock=lambda: now[0])
    with share.serve("127.0.0.1", 0, None) as server:
        now[0] = 100.0
        CALLS(server.address, "server.reserve")
        assert share._chief.absent_for() == 0.0


# Whole runs


@pytest.mark.parametrize("spare", [{"num_redundant_ps": 2}, {"num_extra_ps": 1}])
def test_a_run_with_spares_trains_everything_once_and_all_servers_end(
    tmp_path: Path, spare: dict[str, Any]
) -> None:
    outcome = run_fleet(TASK, tmp_path, num_ps=2, num_workers=2, **spare)
    assert outcome.chief.step == TASK.batches
    servers = 2 + sum(spare.values())
    assert outcome.servers == dict.fromkeys(range(servers), ServerEnd("the run is over", finished=True))
    assert read_model(TASK, tmp_path).tally == dict.fromkeys(range(TASK.records), 1.0)


@pytest.mark.parametrize(("copies", "taken"), [({2: 0}, 3), ({2: 0, 3: 1}, 3), ({2: 0, 3: 0}, 2)])
def test_a_spare_that_keeps_the_copy_of_another_share_takes_over_only_where_no_other_does(
    pool: Pool, copies: dict[int, int], taken: int
) -> None:
    pool.start(3)
    for spare, share in copies.items():
        CALLS(
            pool.addresses[spare],
            "standby.follow",
            **write_message(FollowShard("run", share, 2, pool.addresses[share], "incarnation")),
        )
    assert pool.choice().take_over(1, pool.addresses[:2]) == pool.addresses[taken]
    assert pool.shares_of([pool.addresses[taken]]) == [[1, 2]]
