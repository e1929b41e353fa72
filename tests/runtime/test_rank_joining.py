"""Ranks find each other, and again after one of them was lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
import torch
from services.servers import free_port
from store.ranks import PORT, SOON, TOKEN, all_at_once
from torch import Tensor
from torch import distributed as dist

from monolith.cluster import Discovery, MemoryDiscovery, Waiting
from monolith.cluster.security import Guard
from monolith.config import Secret
from monolith.errors import ConfigError, DeadlineExceededError, FailedPeerError, RetryableError
from monolith.runtime.config_loading import read_run
from monolith.runtime.rank_rendezvous import ROLE, RankRendezvous
from monolith.store import RankGroups
from monolith.store.rank_calls import RankPort
from monolith.store.rank_groups import RankOptions
from monolith.store.rank_keys import join_attempt, keep_keys, reach_keys

HOST = "127.0.0.1"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def discovery(stack: ExitStack) -> Discovery:
    return stack.enter_context(MemoryDiscovery())


def meeting(
    rank: int, discovery: Discovery | None, environ: Mapping[str, str] | None = None, **more: Any
) -> RankRendezvous:
    options = {
        "port": PORT,
        "start": timedelta(seconds=60),
        "options": RankOptions(heartbeat_every=SOON),
    } | more
    return RankRendezvous(rank, 2, discovery=discovery, environ=environ or {}, **options)


def joined(stack: ExitStack, *meetings: RankRendezvous) -> list[RankGroups]:
    found = all_at_once(*(one.join for one in meetings))
    for groups in found:
        stack.callback(groups.close)
    return found


def sizes(groups: list[RankGroups]) -> list[tuple[int, int]]:
    return [(one.rank, one.size) for one in groups]


def test_ranks_meet_in_any_order(stack: ExitStack, discovery: Discovery) -> None:
    meetings = [meeting(rank, discovery) for rank in (1, 0)]
    assert sizes(joined(stack, *meetings)) == [(1, 2), (0, 2)]
    assert meetings[0].processes == meetings[1].processes
    assert len(set(meetings[0].processes)) == 2


@pytest.mark.parametrize("lost", [0, 1])
def test_when_one_restarts_all_meet_again(lost: int, stack: ExitStack, discovery: Discovery) -> None:
    meetings = [meeting(rank, discovery) for rank in range(2)]
    groups = joined(stack, *meetings)
    before = meetings[1 - lost].processes
    groups[lost].close()  # as its process does when it is killed
    meetings[lost] = meeting(lost, discovery)

    def goes_on() -> RankGroups:
        with pytest.raises(RetryableError):
            groups[1 - lost].control.all_gather(_one())
        groups[1 - lost].close()
        return meetings[1 - lost].join()

    again = all_at_once(goes_on, meetings[lost].join)
    for one in again:
        stack.callback(one.close)
    after = meetings[lost].processes
    assert [a == b for a, b in zip(before, after, strict=True)] == [rank != lost for rank in range(2)]


def _one() -> Tensor:
    return torch.zeros(1)


def test_a_rank_that_restarts_before_its_peers_have_noticed_tells_them(
    stack: ExitStack, discovery: Discovery
) -> None:
    meetings = [meeting(rank, discovery) for rank in range(2)]
    groups = joined(stack, *meetings)
    restarted = meeting(1, discovery)

    def goes_on() -> RankGroups:
        with pytest.raises(RetryableError, match=r"its process was lost|another rank is gone"):
            groups[0].control.all_gather(_one())
        groups[0].close()
        return meetings[0].join()

    def restarts() -> RankGroups:
        groups[1].close()
        return restarted.join()

    for one in all_at_once(goes_on, restarts):
        stack.callback(one.close)


def test_a_rank_that_was_replaced_while_it_runs_is_told_so(stack: ExitStack, discovery: Discovery) -> None:
    meetings = [meeting(rank, discovery) for rank in range(2)]
    groups = joined(stack, *meetings)
    with pytest.raises(DeadlineExceededError):  # no rank starts another attempt here
        meeting(1, discovery, start=timedelta(seconds=1)).join()
    groups[0].close()
    with pytest.raises(FailedPeerError) as raised:
        groups[1].control.all_gather(_one())
    assert raised.value.replaced == 1


def test_when_a_rank_leaves_before_all_are_connected_the_other_ranks_get_the_reason(
    discovery: Discovery,
) -> None:
    def leaves() -> None:
        while not discovery.query(ROLE):
            threading.Event().wait(0.02)
        host, port = discovery.query(ROLE)[0].split(":")
        keys = join_attempt(reach_keys(host, int(port)), TOKEN)
        keys.compare_set("process/1", "", "signed in")
        keys.wait(["lookups/0/0"])  # rank 0 waits for the same key of rank 1
        keys.fail(1, "it was told to stop")

    def stays() -> None:
        with pytest.raises(FailedPeerError, match="rank 1 cannot continue: it was told to stop"):
            meeting(0, discovery, options=RankOptions(silence=timedelta(days=1))).join()

    all_at_once(stays, leaves)


def test_ranks_with_different_tokens_are_told_what_to_set(discovery: Discovery) -> None:
    keys = keep_keys(HOST, TOKEN)
    discovery.register(ROLE, 0, f"{HOST}:{keys.port}")
    port = RankPort(guard=Guard(token=Secret("another")))
    with pytest.raises(DeadlineExceededError, match=r"'attempt'.*the same security.token_file"):
        meeting(1, discovery, port=port, start=timedelta(seconds=0.5)).join()


def test_keys_of_an_unknown_process_do_not_prevent_the_meeting(
    stack: ExitStack, discovery: Discovery
) -> None:
    first, other = meeting(0, discovery), meeting(1, discovery)

    def forged() -> RankGroups:
        while not discovery.query(ROLE):
            threading.Event().wait(0.02)
        host, port = discovery.query(ROLE)[0].split(":")
        raw = reach_keys(host, int(port))
        for key in ("process/1", "failed", "calls/1", "signed/1"):
            raw.set(key, '[1, "mine"]')
        return other.join()

    for groups in all_at_once(first.join, forged):
        stack.callback(groups.close)
    assert first.processes == other.processes


def test_a_waiting_rank_names_the_missing_ones_and_does_not_wait_for_ever(discovery: Discovery) -> None:
    seen: list[Waiting] = []
    alone = meeting(1, discovery, start=timedelta(seconds=0.3), on_waiting=seen.append)
    with pytest.raises(DeadlineExceededError, match="0 of 2 ranks were there"):
        alone.join()
    assert [(one.what, one.found, one.needed) for one in seen[:1]] == [("rank 0", 0, 2)]


def test_torchrun_keeps_the_keys(stack: ExitStack) -> None:
    agent = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    for restarts in ("0", "1"):
        environ = {
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(agent.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": restarts,
        }
        meetings = [meeting(rank, None, environ) for rank in range(2)]
        assert sizes(joined(stack, *meetings)) == [(0, 2), (1, 2)]


def test_mpirun_may_name_the_address_at_which_rank_0_keeps_them_and_others_wait_for_it(
    stack: ExitStack,
) -> None:
    environ = {"MASTER_ADDR": HOST, "MASTER_PORT": str(free_port())}
    waits = threading.Event()
    other = meeting(1, None, environ, on_waiting=lambda _: waits.set())

    def keeps() -> RankGroups:
        assert waits.wait(60)
        return meeting(0, None, environ).join()

    groups = all_at_once(keeps, other.join)
    stack.callback(lambda: all_at_once(*(one.close for one in groups)))
    assert sizes(groups) == [(0, 2), (1, 2)]


def test_without_a_registry_torchrun_must_have_started_them() -> None:
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        meeting(0, None).join()


def test_a_rank_has_its_place_from_torchrun() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
    flags = ("--cluster.mode", "sync", "--train.model-dir", "m")
    cluster = read_run(None, environ, flags=flags).cluster
    assert (cluster.index, cluster.num_workers) == (1, 3)
    assert read_run(None, environ, flags=("--train.model-dir", "m")).cluster.num_workers == 1
