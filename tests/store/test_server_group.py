"""A group of servers: who waits for one that is slow, gone or replaced, and who hears of it."""

from __future__ import annotations

import signal
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
import torch
from store.fleets import CONFIGS, Wire, dense, keys, serve, start, stop, wait_until

from monolith.errors import (
    ClusterError,
    DeadlineExceededError,
    LostStateError,
    MonolithError,
    UnavailableError,
)
from monolith.store import DenseShard, LocalStore, ParameterServer, ParameterServerStore, ServerGroup, pushes

pytest.importorskip("pyarrow")

AT_ONCE, SHORT, LONG = timedelta(), timedelta(seconds=0.2), timedelta(seconds=60)


def group_of(stack: ExitStack, *servers: str | ParameterServer, **options: Any) -> ServerGroup:
    addresses = [server if isinstance(server, str) else server.address for server in servers]
    group = ServerGroup(addresses, **{"patience": AT_ONCE, **options})
    stack.callback(group.close)
    return group


@pytest.fixture
def pool(stack: ExitStack) -> ThreadPoolExecutor:
    return stack.enter_context(ThreadPoolExecutor(4))


class Losses:
    """What a group was lost of, in order."""

    def __init__(self, group: ServerGroup) -> None:
        self.heard: list[tuple[int, MonolithError]] = []
        group.on_lost = lambda server, error: self.heard.append((server, error))

    @property
    def servers(self) -> list[int]:
        return [server for server, _ in self.heard]


def nobody() -> str:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"127.0.0.1:{taken.getsockname()[1]}"


# The step


def test_an_answer_that_was_overtaken_does_not_set_the_step_back(
    stack: ExitStack, pool: ThreadPoolExecutor
) -> None:
    asked, gate = threading.Event(), threading.Event()

    class Slow(DenseShard):
        def pull(self) -> dict[str, torch.Tensor]:
            asked.set()
            assert gate.wait(LONG.total_seconds())
            return super().pull()

    weights, optimizer = dense()
    server = stack.enter_context(ParameterServer([], Slow(weights, optimizer, (0, 1)), shard=(0, 1)))
    group = group_of(stack, server)
    pulled = pool.submit(group.exchange, "pull_dense", {0: ({}, b"")})
    assert asked.wait(LONG.total_seconds())  # it has read the step, which is 0
    group.push("push_dense", {0: ({"names": [], "wants_weights": False}, b"")})
    gate.set()
    assert pulled.result()[0].body["step"] == 0
    assert group.step == 1


# Slow servers


def stop_for(stack: ExitStack, seconds: float, timeout: timedelta, **options: Any) -> None:
    """Stop a real server for a while, under a lookup, two pushes and a push of weights."""
    process, address = start(stack, 0, 0, 1)
    group = group_of(stack, address, timeout=timeout, **options)
    store = ParameterServerStore(group, 0, CONFIGS)
    weights, optimizer = dense()
    store.attach_dense(weights, optimizer)
    store.apply_gradients(keys(1), torch.ones(2))
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    stop(process)
    stack.callback(process.send_signal, signal.SIGCONT)
    with ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(store.lookup, keys(1)),
            pool.submit(store.apply_gradients, keys(2), torch.ones(2)),
            pool.submit(store.apply_gradients, keys(2), torch.ones(2)),
            pool.submit(store.push_dense),
        ]
        time.sleep(seconds)  # so long it really is stopped
        assert not any(one.done() for one in asked)
        process.send_signal(signal.SIGCONT)
        found, *_ = [one.result(120) for one in asked]
    assert found.tolist() == [-1, -1]
    assert store.lookup(keys(2)).tolist() == [-2, -2], "each push was applied once"
    store.pull_dense()
    assert (weights["a"].tolist(), group.read_step()) == ([-1.0] * 4, 1)


def test_a_server_that_is_stopped_for_a_while_delays_and_nothing_is_applied_twice(stack: ExitStack) -> None:
    """For longer than an answer may take, so that everything is sent again and again."""
    stop_for(stack, 1.5, timedelta(seconds=1), patience=LONG)


@pytest.mark.soak
@pytest.mark.parametrize("timeout", [5, 30])
def test_a_server_that_is_stopped_for_20_seconds_delays(stack: ExitStack, timeout: int) -> None:
    stop_for(stack, 20.0, timedelta(seconds=timeout), replacement_timeout=timedelta(seconds=30))


def test_a_server_that_is_silent_for_longer_than_that_is_too_late(stack: ExitStack) -> None:
    process, address = start(stack, 0, 0, 1)
    group = group_of(stack, address, timeout=SHORT, replacement_timeout=SHORT)
    losses = Losses(group)
    store = ParameterServerStore(group, 0, CONFIGS)
    store.lookup(keys(1))
    stop(process)
    with pytest.raises(DeadlineExceededError, match=f"0 of 1 at {address}: no answer"):
        store.apply_gradients(keys(1), torch.ones(2))
    assert losses.servers == [0]


# Servers that are gone, and come back


def test_a_persistent_caller_waits_for_a_server_to_come_back_at_its_address(
    stack: ExitStack, pool: ThreadPoolExecutor
) -> None:
    (server,) = serve(stack, CONFIGS, 1)
    held = LocalStore.from_configs(CONFIGS, threads=1)
    group = group_of(stack, server, replacement_timeout=LONG)
    losses = Losses(group)
    store = ParameterServerStore(group, 0, CONFIGS)
    server.close()
    pushed, counted = pool.submit(store.apply_gradients, keys(1), torch.ones(2)), pool.submit(store.stats)
    assert wait_until(lambda: losses.heard)
    again = ParameterServer([held], shard=(0, 1), port=server.port)
    stack.callback(again.close)
    again.replace([held], incarnation=server.incarnation)
    pushed.result(60)
    counted.result(60)
    group.close()
    assert held.table("item").lookup(torch.tensor([1])).tolist() == [[-1, -1]]
    assert losses.servers == [0], "two waited, and it was one loss"


def test_a_persistent_caller_continues_with_the_successor_of_a_server(
    stack: ExitStack, pool: ThreadPoolExecutor
) -> None:
    first, second = serve(stack, CONFIGS, 2)
    (_, spare) = serve(stack, CONFIGS, 2)
    group = group_of(stack, first, second, replacement_timeout=LONG)
    losses = Losses(group)
    store = ParameterServerStore(group, 0, CONFIGS)
    second.close()
    asked: list[Future[Any]] = [
        pool.submit(store.lookup, keys(0, 1)),
        pool.submit(store.apply_gradients, keys(0, 1), torch.ones(4)),
        pool.submit(store.stats),
    ]
    assert wait_until(lambda: losses.heard)
    group.replace(1, spare.address, spare.incarnation)
    assert asked[0].result(60).shape == (4,)
    for one in asked[1:]:
        one.result(60)
    assert store.lookup(keys(0, 1)).tolist() == [-1] * 4
    assert losses.servers == [1]
    assert (group.addresses[1], group.incarnations[1]) == (spare.address, spare.incarnation)


def test_a_server_that_lost_its_state_is_waited_for_until_it_is_replaced(
    stack: ExitStack, pool: ThreadPoolExecutor
) -> None:
    (server,) = serve(stack, CONFIGS, 1)
    group = group_of(stack, server, replacement_timeout=LONG)
    losses = Losses(group)
    store = ParameterServerStore(group, 0, CONFIGS)
    fresh = LocalStore.from_configs(CONFIGS, threads=1)
    server.replace([fresh], incarnation="restored")
    pushed = pool.submit(store.apply_gradients, keys(1), torch.ones(2))
    counted = pool.submit(store.stats)
    assert wait_until(lambda: losses.heard)
    assert isinstance(losses.heard[0][1], LostStateError)
    assert not pushed.done()
    group.replace(0, server.address, "restored")
    pushed.result(60)
    assert counted.result(60)["item"].rows <= 1
    assert fresh.table("item").lookup(torch.tensor([1])).tolist() == [[-1, -1]]


def test_a_push_on_its_way_goes_to_the_server_that_replaces_a_silent_one(
    stack: ExitStack, pool: ThreadPoolExecutor
) -> None:
    """Nobody hangs up there, so only the replacement says that it is gone."""
    process, address = start(stack, 0, 0, 1)
    (spare,) = serve(stack, CONFIGS, 1)
    group = group_of(stack, address, replacement_timeout=LONG, timeout=LONG)
    store = ParameterServerStore(group, 0, CONFIGS)
    store.lookup(keys(1))
    stop(process)
    pushed = pool.submit(store.apply_gradients, keys(1), torch.ones(2))
    assert wait_until(lambda: group._connections._busy)
    group.replace(0, spare.address, spare.incarnation)
    pushed.result(60)
    assert store.lookup(keys(1)).tolist() == [-1, -1]
    process.send_signal(signal.SIGCONT)
    assert store.lookup(keys(1)).tolist() == [-1, -1], "what the old one still answers is nobody's"


def test_an_answer_counts_when_it_is_here_and_only_while_its_server_serves(
    stack: ExitStack, pool: ThreadPoolExecutor
) -> None:
    """Else who counts what was lost with a server would not know of a push that is not sent again."""
    asked, gate = threading.Event(), threading.Event()

    class Slow(DenseShard):
        def push(self, *about: Any) -> dict[str, torch.Tensor]:
            asked.set()
            assert gate.wait(LONG.total_seconds())
            return super().push(*about)

    def served(number: int, kind: type[DenseShard] = DenseShard) -> ParameterServer:
        return stack.enter_context(ParameterServer([], kind(*dense(), (number, 2)), shard=(number, 2)))

    group = group_of(stack, served(0), served(1, Slow), replacement_timeout=LONG)
    spares = served(0), served(1)
    group.describe()
    request = {"names": [], "wants_weights": False}, b""
    pushed = pool.submit(group.push, "push_dense", {0: request, 1: request})
    assert asked.wait(LONG.total_seconds())
    assert wait_until(lambda: not group.pushes[0].unanswered), "whatever server 1 takes"
    before = [group.replace(place, spares[place].address, spares[place].incarnation) for place in (0, 1)]
    gate.set()
    pushed.result(60)
    assert [(one.acknowledged, sorted(one.unanswered)) for one in before] == [(1, []), (0, [1])]
    assert [one.acknowledged for one in group.pushes] == [1, 1]
    assert [spare.step for spare in spares] == [0, 1], "only what was not acknowledged goes to the next"


def test_a_server_can_be_replaced_twice_while_a_caller_waits(
    stack: ExitStack, pool: ThreadPoolExecutor
) -> None:
    (server,), (spare,) = serve(stack, CONFIGS, 1), serve(stack, CONFIGS, 1)
    group = group_of(stack, server, replacement_timeout=LONG)
    losses = Losses(group)
    store = ParameterServerStore(group, 0, CONFIGS)
    server.close()
    pushed = pool.submit(store.apply_gradients, keys(1), torch.ones(2))
    assert wait_until(lambda: losses.servers == [0])
    group.replace(0, nobody(), "dies at once")
    assert wait_until(lambda: losses.servers == [0, 0]), "each is a loss"
    assert not pushed.done()
    group.replace(0, spare.address, spare.incarnation)
    pushed.result(60)
    assert store.lookup(keys(1)).tolist() == [-1, -1]


def test_a_server_that_answers_again_can_be_lost_again(stack: ExitStack) -> None:
    (server,) = serve(stack, CONFIGS, 1)
    group = group_of(stack, server)
    losses = Losses(group)
    store = ParameterServerStore(group, 0, CONFIGS)
    for number in range(1, 3):
        group.replace(0, nobody(), server.incarnation)
        for _ in range(2):
            with pytest.raises(UnavailableError, match="no answer"):
                store.lookup(keys(1))
        assert losses.servers == [0] * number
        group.replace(0, server.address, server.incarnation)
        assert store.lookup(keys(1)).tolist() == [0, 0]


def test_a_connection_that_breaks_and_is_made_again_is_no_loss(stack: ExitStack) -> None:
    (server,) = serve(stack, CONFIGS, 1)
    wire = Wire(server.address)
    stack.callback(wire.close)
    group = group_of(stack, wire.address, patience=LONG)
    losses = Losses(group)
    store = ParameterServerStore(group, 0, CONFIGS)
    for _ in range(3):
        store.apply_gradients(keys(1), torch.ones(2))
        wire.cut()
    assert store.lookup(keys(1)).tolist() == [-3, -3]
    assert losses.heard == []


def test_without_hold_a_server_that_lost_its_state_is_refused_at_once(stack: ExitStack) -> None:
    (server,) = serve(stack, CONFIGS, 1)
    group = group_of(stack, server, patience=LONG)
    losses = Losses(group)
    store = ParameterServerStore(group, 0, CONFIGS)
    server.replace([LocalStore.from_configs(CONFIGS, threads=1)], incarnation="another")
    for _ in range(2):
        with pytest.raises(LostStateError, match="the server restarted or serves another run"):
            store.lookup(keys(1))
    assert losses.servers == [0]


def test_the_hold_has_an_end(stack: ExitStack) -> None:
    group = group_of(stack, nobody(), replacement_timeout=SHORT)
    with pytest.raises(UnavailableError, match="no answer"):
        group.exchange("pull_dense", {0: ({}, b"")})


def test_a_waiting_caller_is_told_that_this_process_works_on_another_run(
    stack: ExitStack, pool: ThreadPoolExecutor
) -> None:
    """Gradients of what was learned before must not be pushed into what was restored."""
    (server,) = serve(stack, CONFIGS, 1)
    group = group_of(stack, server, replacement_timeout=LONG)
    losses = Losses(group)
    store = ParameterServerStore(group, 0, CONFIGS)
    fresh = LocalStore.from_configs(CONFIGS, threads=1)
    server.replace([fresh], incarnation="second run")
    pushed = pool.submit(store.apply_gradients, keys(1), torch.ones(2))
    assert wait_until(lambda: losses.heard)
    group.expect("second run")
    with pytest.raises(LostStateError):
        pushed.result(60)
    assert len(fresh.table("item")) == 0
    store.apply_gradients(keys(1), torch.ones(2))
    assert len(fresh.table("item")) == 1


def test_a_waiting_caller_is_told_that_the_group_was_closed(
    stack: ExitStack, pool: ThreadPoolExecutor
) -> None:
    group = group_of(stack, nobody(), replacement_timeout=LONG)
    losses = Losses(group)
    waiting = [
        pool.submit(group.push, "push_dense", {0: ({"names": []}, b"")}),
        pool.submit(group.call, 0, "stats", stateful=True, store=0),
    ]
    assert wait_until(lambda: losses.heard)
    group.close()
    for one in waiting:
        with pytest.raises(ClusterError, match="were closed"):
            one.result(60)
    with pytest.raises(ClusterError, match="were closed"):
        group.replace(0, nobody(), "too late")


# Numbers


def test_threads_that_push_at_once_have_numbers_of_their_own(
    stack: ExitStack, pool: ThreadPoolExecutor
) -> None:
    (server,) = serve(stack, CONFIGS, 1)
    group = group_of(stack, server)
    store = ParameterServerStore(group, 0, CONFIGS)
    begin = threading.Barrier(4)

    def train() -> None:
        begin.wait(60)
        for _ in range(25):
            store.apply_gradients(keys(1), torch.ones(2))

    for one in [pool.submit(train) for _ in range(4)]:
        one.result(120)
    assert store.lookup(keys(1)).tolist() == [-100, -100]


def test_two_groups_are_two_senders(stack: ExitStack) -> None:
    (server,) = serve(stack, CONFIGS, 1)
    for _ in range(2):
        ParameterServerStore(group_of(stack, server), 0, CONFIGS).push_dense()
    assert server.step == 2


def test_a_sender_that_a_server_cannot_remember_is_refused_until_its_state_is_restored(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushes, "MOST_SENDERS", 1)
    (server,) = serve(stack, CONFIGS, 1)
    first, second = (group_of(stack, server) for _ in range(2))
    request: dict[int, Any] = {0: ({"names": []}, b"")}
    first.push("push_dense", request)
    with pytest.raises(UnavailableError, match="1 senders have pushed"):  # failover retries this error
        second.push("push_dense", request)
    first.exchange("push_dense", {0: ({"names": [], "sender": first.sender, "number": 1}, b"")})
    assert server.step == 1, "neither applied nor forgotten"
    server.replace([], DenseShard({}, None, (0, 1)), incarnation=server.incarnation)
    second.push("push_dense", request)
    assert server.step == 1


def test_another_run_remembers_no_numbers_of_the_one_before(stack: ExitStack) -> None:
    (server,) = serve(stack, CONFIGS, 1)
    group = group_of(stack, server)
    group.push("push_dense", {0: ({"names": []}, b"")})
    server.replace([], DenseShard({}, None, (0, 1)), incarnation=server.incarnation)
    group.exchange("push_dense", {0: ({"names": [], "sender": group.sender, "number": 1}, b"")})
    assert server.step == 1
