"""A parameter server by itself: what it says, whom it lets in, and that those who wait keep nobody else."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from store.fleets import CONFIGS, dense, keys, serve

from monolith.cluster.security import Guard, SecurityConfig, guard_caller
from monolith.config import Secret
from monolith.errors import (
    ClusterError,
    ConfigError,
    ListenError,
    RequestError,
    RetryableError,
    TableArgumentError,
    TableClosedError,
    TrainingError,
    UnavailableError,
    UnknownTableError,
)
from monolith.store import DenseShard, LocalStore, ParameterServer, ParameterServerStore, ServerGroup
from monolith.store.row_requests import RowCall, RowHeader, RowRequest
from monolith.wire.endpoint import Handlers

pytest.importorskip("pyarrow")

AT_ONCE = timedelta()


def group_of(stack: ExitStack, *servers: ParameterServer, **options: Any) -> ServerGroup:
    group = ServerGroup([server.address for server in servers], **{"patience": AT_ONCE, **options})
    stack.callback(group.close)
    return group


def test_a_server_describes_itself(stack: ExitStack) -> None:
    servers = serve(stack, CONFIGS, 2, dense=dense)
    first, second = group_of(stack, *servers).describe()
    assert (first["shard"], second["shard"]) == ([0, 2], [1, 2])
    assert first["stores"] == [{"tables": {"item": 2}, "counts_sightings": False}]
    assert first["weights"] == {"a": [[4], "float32"]}
    assert second["weights"] == {"b": [[2], "float32"], "c": [[1], "float32"]}
    assert first["incarnation"] == servers[0].incarnation != second["incarnation"]


def test_calls_that_others_plug_in_are_answered_and_their_errors_too(stack: ExitStack) -> None:
    def refuse(body: dict[str, Any]) -> dict[str, Any]:
        raise TrainingError(f"no, {body['name']}")

    calls = {"double": lambda body: {"twice": 2 * body["n"]}, "refuse": refuse}
    group = group_of(stack, *serve(stack, CONFIGS, 2, server={"extra": Handlers(calls=calls)}))
    assert group.call(1, "double", n=4) == {"twice": 8}
    assert group.call_all("double", n=1) == [{"twice": 2}, {"twice": 2}]
    with pytest.raises(TrainingError, match="no, worker"):
        group.call_all("refuse", name="worker")
    with pytest.raises(ClusterError, match="parameter server: there is no call 'triple'"):
        group.call(0, "triple")
    with pytest.raises(ConfigError, match="there is no parameter server 2; there are 2"):
        group.call(2, "double", n=1)


def test_a_call_may_not_take_the_name_of_the_servers_own() -> None:
    with pytest.raises(ConfigError, match="a call 'describe' of its own"):
        ParameterServer([], shard=(0, 1), extra=Handlers(calls={"describe": lambda _: {}}))


@pytest.mark.parametrize("shard", [(1, 1), (-1, 2), (0, 0)])
def test_a_number_that_makes_no_sense_is_refused(shard: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="number 0 to n - 1 of n"):
        ParameterServer([], shard=shard)


def test_a_port_that_is_taken_is_named(stack: ExitStack) -> None:
    (server,) = serve(stack, CONFIGS, 1)
    with pytest.raises(ListenError, match=f"parameter server: cannot listen on 127.0.0.1:{server.port}"):
        ParameterServer([], shard=(0, 1), port=server.port)


def test_eight_calls_that_wait_keep_neither_lookups_nor_each_other(stack: ExitStack) -> None:
    waiting, go_on = threading.Semaphore(0), threading.Event()

    def wait(_: dict[str, Any]) -> dict[str, Any]:
        waiting.release()
        return {"went_on": go_on.wait(60)}

    servers = serve(stack, CONFIGS, 1, server={"extra": Handlers(calls={"wait": wait})})
    group = group_of(stack, *servers)
    store = ParameterServerStore(group, 0, CONFIGS)
    with ThreadPoolExecutor(8) as pool:
        polls = [pool.submit(group.call, 0, "wait") for _ in range(8)]
        try:
            assert all(waiting.acquire(timeout=60) for _ in polls)
            store.apply_gradients(keys(1), torch.ones(2))
            assert store.lookup(keys(1)).tolist() == [-1, -1]
            assert group.read_step() == 0
            assert not any(poll.done() for poll in polls)
        finally:
            go_on.set()
        assert [poll.result() for poll in polls] == [{"went_on": True}] * 8


def test_the_global_step_counts_pushes_and_can_be_set(stack: ExitStack) -> None:
    servers = serve(stack, CONFIGS, 2)
    group = group_of(stack, *servers)
    store = ParameterServerStore(group, 0, CONFIGS)
    weights: dict[str, torch.nn.Parameter] = {}
    store.attach_dense(weights, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    group.set_step(10)
    store.push_dense()
    store.push_dense()
    assert (group.step, group.read_step(), servers[0].step) == (12, 12, 12)
    servers[0].step = 3
    assert group.read_step() == 3


def test_another_run_takes_the_place_of_the_one_before(stack: ExitStack) -> None:
    (server,) = serve(stack, CONFIGS, 1)
    group = group_of(stack, server)
    store = ParameterServerStore(group, 0, CONFIGS)
    store.apply_gradients(keys(1), torch.ones(2))
    fresh = LocalStore.from_configs(CONFIGS, threads=1)
    server.replace([fresh], DenseShard(*dense(), (0, 1)))
    assert list(group.describe()[0]["weights"]) == ["a", "b", "c"]
    assert store.lookup(keys(1)).tolist() == [0, 0]


def test_a_worker_of_an_earlier_run_is_refused_and_changes_nothing(stack: ExitStack) -> None:
    (server,) = serve(stack, CONFIGS, 1)
    sleeper, awake = group_of(stack, server), group_of(stack, server)
    store = ParameterServerStore(sleeper, 0, CONFIGS)
    store.apply_gradients(keys(1), torch.ones(2))
    fresh = LocalStore.from_configs(CONFIGS, threads=1)
    server.replace([fresh], incarnation="second run")
    for late in (
        lambda: store.apply_gradients(keys(1), torch.ones(2)),
        lambda: store.lookup(keys(1)),
        store.push_dense,
        lambda: store.evict(0),
        lambda: sleeper.set_step(9),
    ):
        with pytest.raises(UnavailableError, match="the server restarted or serves another run"):
            late()
    assert (len(fresh.table("item")), server.step) == (0, 0)
    awake.expect("second run")
    awake.set_step(3)
    assert server.step == 3


@pytest.mark.parametrize("replaced", [True, False])
def test_tables_that_close_under_a_request_are_said_to_be_of_an_earlier_run_if_they_are(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    (server,) = serve(stack, CONFIGS, 1)
    store = ParameterServerStore(group_of(stack, server), 0, CONFIGS)

    def closed(*_: Any, **__: Any) -> None:
        if replaced:
            server.replace([LocalStore.from_configs(CONFIGS, threads=1)], incarnation="second run")
        raise TableClosedError("table 'item' was closed")

    monkeypatch.setattr(LocalStore, "apply_gradients", closed)
    with pytest.raises(UnavailableError if replaced else TableClosedError):
        store.apply_gradients(keys(1), torch.ones(2))


def test_a_store_that_is_not_there_is_named(stack: ExitStack) -> None:
    group = group_of(stack, *serve(stack, CONFIGS, 1))
    with pytest.raises(UnknownTableError, match="there is no store 1; this model has 1"):
        group.call(0, "stats", store=1)


def test_bytes_that_are_not_a_request_are_refused(stack: ExitStack) -> None:
    group = group_of(stack, *serve(stack, CONFIGS, 1))
    honest = RowHeader(RowCall.LOOKUP, store=0, batches=1, ids=2)
    with pytest.raises(ClusterError, match="there is no call 'look'"):
        group.exchange("look", {0: ({}, b"")})
    with pytest.raises(TableArgumentError, match="received 5 bytes for 2 ids and 0 floats, expected 24"):
        group.exchange("lookup", {0: (honest, b"12345")})
    for wrong, message in [
        ({"batches": 0}, "batches must be a whole number from 1"),
        ({"batches": 1 << 30}, "batches must be a whole number from 1"),
        ({"ids": 1 << 60}, "ids must be a whole number from 0"),
        ({"floats": 1 << 60}, "floats must be a whole number from 0"),
        ({"ids": (1 << 26) + 1}, r"it has 67,108,865 ids, and limits\.ids allows 67,108,864"),
        ({"flags": 1 << 9}, "the flags 0x200, which do not exist"),
        ({"call": 7}, "the call 7 and"),
    ]:
        with pytest.raises(RequestError, match=message):
            group.exchange("lookup", {0: (honest._replace(**wrong), b"")})
    with pytest.raises(UnknownTableError, match="there is no store 1; this model has 1"):
        group.exchange("lookup", {0: (honest._replace(store=1), b"")})
    with pytest.raises(RequestError, match="a push must have a number from 1 on"):
        group.exchange("push", {0: (honest._replace(call=RowCall.PUSH), b"")})
    request = RowRequest(cells=1, ids=2)
    request.sizes[:], request.ids[:] = 2, (1, 2)
    answer = group.exchange("lookup", {0: (honest, request.data)})[0]
    assert answer.data.view(np.float32).tolist() == [0.0] * 4


# Who is let in


@pytest.fixture
def tls(certificates: Path) -> SecurityConfig:
    return SecurityConfig(
        cert=certificates / "ca-node.crt", key=certificates / "ca-node.key", ca=certificates / "ca.crt"
    )


def test_without_the_token_no_client_is_admitted(stack: ExitStack) -> None:
    right = Guard(token=Secret("secret"))
    servers = serve(stack, CONFIGS, 1, server={"guard": right})
    for wrong in (None, Guard(token=Secret("Secret"))):
        group = group_of(stack, *servers, guard=wrong)
        said = "refused the shared token" if wrong is None else "does not have this run's token"
        with pytest.raises(ConfigError, match=rf"parameter server 0 of 1 at .* {said}"):
            group.describe()
        with pytest.raises(ConfigError, match=said):
            group.exchange("lookup", {0: ({}, b"")})
    store = ParameterServerStore(group_of(stack, *servers, guard=right), 0, CONFIGS)
    assert store.lookup(keys(1)).tolist() == [0, 0]


def test_with_certificates_rows_are_served_and_clients_without_one_are_refused(
    stack: ExitStack, tls: SecurityConfig, certificates: Path
) -> None:
    guard = guard_caller(replace(tls, token=Secret("secret")))
    servers = serve(stack, CONFIGS, 2, server={"guard": guard})
    store = ParameterServerStore(group_of(stack, *servers, guard=guard), 0, CONFIGS)
    store.apply_gradients(keys(1, 2), torch.ones(4))
    assert store.lookup(keys(2, 1)).tolist() == [-1] * 4
    with pytest.raises(RetryableError, match=r"no answer from .*, or it expects other certificates"):
        group_of(stack, *servers).describe()
    strange = replace(tls, ca=certificates / "other.crt")
    with pytest.raises(ConfigError, match="another authority than ours signed its certificate"):
        group_of(stack, *servers, guard=guard_caller(strange)).describe()
    with pytest.raises(ConfigError, match="refused the shared token"):
        group_of(stack, *servers, guard=guard_caller(tls)).describe()
