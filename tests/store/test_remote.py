"""A store over servers, beyond the contract: who fits, who trains at once, who is gone."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
import torch
from contracts.stores import serve
from store.fleets import CONFIGS, Wire, dense, keys, start, wait_until
from torch import nn
from torch.testing import assert_close

from monolith.errors import (
    ClusterError,
    ConfigError,
    DeadlineExceededError,
    FeatureError,
    RestoreError,
    UnavailableError,
)
from monolith.store import LocalStore, ParameterServer, ParameterServerStore, ServerGroup, Store, TableIds
from monolith.store.row_requests import RowCall, RowHeader, RowRequest
from monolith.table import Segment, TableConfig

pytest.importorskip("pyarrow")

SHORT = timedelta(seconds=0.2)
LONG = timedelta(seconds=60)


def group_of(stack: ExitStack, *addresses: str, **options: Any) -> ServerGroup:
    group = ServerGroup(addresses, **{"patience": SHORT, **options})
    stack.callback(group.close)
    return group


def addresses(servers: list[ParameterServer]) -> list[str]:
    return [server.address for server in servers]


class Held:
    """A store whose next call waits inside, until it is let go."""

    def __init__(self, inner: LocalStore) -> None:
        self._inner = inner
        self.entered, self.let_go = threading.Event(), threading.Event()
        self.let_go.set()
        self.entries = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return found if name not in ("lookup_arrays", "apply_gradients") else self._slowly(found)

    def _slowly(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*arguments: Any, **options: Any) -> Any:
            self.entered.set()
            self.entries += not self.let_go.is_set()
            assert self.let_go.wait(60)
            return call(*arguments, **options)

        return slow

    def hold(self) -> None:
        self.entered.clear()
        self.let_go.clear()


def held_server(stack: ExitStack, shard: tuple[int, int] = (0, 1)) -> tuple[ParameterServer, Held]:
    held: Any = Held(LocalStore.from_configs(CONFIGS, threads=1))
    server = ParameterServer([held], shard=shard)
    stack.callback(server.close)
    stack.callback(held.let_go.set)
    return server, held


# Who fits


def test_servers_in_another_order_are_refused(stack: ExitStack) -> None:
    first, second = addresses(serve(stack, CONFIGS, 2))
    with pytest.raises(ConfigError, match=f"0 of 2 at {second} is number 1 of 2, and was given as number 0"):
        ParameterServerStore(group_of(stack, second, first), 0, CONFIGS)


def test_a_part_of_the_servers_is_refused(stack: ExitStack) -> None:
    first, _ = addresses(serve(stack, CONFIGS, 2))
    with pytest.raises(ConfigError, match="is number 0 of 2, and was given as number 0 of 1"):
        ParameterServerStore(group_of(stack, first), 0, CONFIGS)


def test_servers_of_another_task_are_refused(stack: ExitStack) -> None:
    group = group_of(stack, *addresses(serve(stack, CONFIGS, 1, dense=dense)))
    wide = {"item": TableConfig(name="item", segments=(Segment(dim=3),))}
    with pytest.raises(ConfigError, match=r"'item' has rows of 2 floats there, .* needs rows of 3 floats"):
        ParameterServerStore(group, 0, wide)
    more = {**CONFIGS, "user": TableConfig(name="user", segments=(Segment(dim=3),))}
    with pytest.raises(ConfigError, match="'user' has no such table there"):
        ParameterServerStore(group, 0, more)
    with pytest.raises(ConfigError, match=r"'item' has rows of 2 floats there, .* needs no such table"):
        ParameterServerStore(group, 0, {})
    with pytest.raises(ConfigError, match="has 1 stores, and this model needs number 1"):
        ParameterServerStore(group, 1, CONFIGS)
    weights = {"a": nn.Parameter(torch.zeros(5))}
    with pytest.raises(FeatureError, match=r"'a' is float32 of shape \(4,\) there, and .* \(5,\) here"):
        ParameterServerStore(group, 0, CONFIGS).attach_dense(weights, torch.optim.SGD(weights.values(), lr=1))


def test_a_group_needs_an_address() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        ServerGroup([])


def test_rows_are_in_the_folders_that_checkpoints_read(stack: ExitStack) -> None:
    servers = serve(stack, CONFIGS, 3)
    store = ParameterServerStore(group_of(stack, *addresses(servers)), 0, CONFIGS)
    ids = (0, 1, 2, 3, -1)  # -1 stands for 2^64 - 1, which 3 divides
    store.apply_gradients(keys(*ids), torch.ones(10))
    found = [one["item"]["rows"] for one in store.group.call_all("stats", store=0)]
    assert found == [3, 1, 1]


def test_a_model_may_have_several_stores(stack: ExitStack) -> None:
    configs = [{name: TableConfig(name=name, segments=(Segment(dim=1, learning_rate=1.0),))} for name in "ab"]
    stores = [LocalStore.from_configs(config, threads=1) for config in configs]
    server = ParameterServer(stores, shard=(0, 1))
    stack.callback(server.close)
    group = group_of(stack, server.address)
    first, second = (ParameterServerStore(group, number, config) for number, config in enumerate(configs))
    first.apply_gradients(keys(1), torch.ones(1))
    assert (first.lookup(keys(1)).item(), second.lookup(keys(1)).item()) == (-1, 0)
    assert list(second.tables) == ["b"]


# Who trains at once


def test_two_workers_train_the_same_rows_and_no_gradient_is_lost(stack: ExitStack) -> None:
    where, steps = addresses(serve(stack, CONFIGS, 2)), 50
    ids = TableIds(torch.arange(100), torch.tensor([100]))

    def train() -> None:
        with ExitStack() as own:
            store = ParameterServerStore(group_of(own, *where), 0, CONFIGS)
            for _ in range(steps):
                store.lookup(ids)
                store.apply_gradients(ids, torch.ones(200))

    with ThreadPoolExecutor(2) as pool:
        for worker in [pool.submit(train) for _ in range(2)]:
            worker.result()
    store = ParameterServerStore(group_of(stack, *where), 0, CONFIGS)
    assert store.lookup(ids).tolist() == [-2.0 * steps] * 200


def test_threads_of_one_worker_share_a_group(stack: ExitStack) -> None:
    group, steps = group_of(stack, *addresses(serve(stack, CONFIGS, 2))), 50
    store = ParameterServerStore(group, 0, CONFIGS)

    def train(first: int) -> None:
        ids = TableIds(torch.arange(first, first + 10), torch.tensor([10]))
        for _ in range(steps):
            store.apply_gradients(ids, torch.ones(20))
            assert len(store.lookup(ids)) == 20

    with ThreadPoolExecutor(4) as pool:
        for thread in [pool.submit(train, first) for first in (0, 0, 5, 100)]:
            thread.result()
    expected = [-2.0] * 5 + [-3.0] * 5 + [-1.0] * 5
    assert store.lookup(keys(*range(15))).view(-1, 2)[:, 0].tolist() == [steps * each for each in expected]


def test_dense_gradients_of_two_workers_are_all_applied_and_counted(stack: ExitStack) -> None:
    where, steps = addresses(serve(stack, CONFIGS, 2, dense=dense)), 20

    def train() -> int:
        with ExitStack() as own:
            group = group_of(own, *where)
            store = ParameterServerStore(group, 0, CONFIGS)
            weights, optimizer = dense()
            store.attach_dense(weights, optimizer)
            for _ in range(steps):
                for weight in weights.values():
                    weight.grad = torch.ones_like(weight)
                store.push_dense()
                store.pull_dense()
            return group.step

    with ThreadPoolExecutor(2) as pool:
        counted = [worker.result() for worker in [pool.submit(train) for _ in range(2)]]
    assert max(counted) == 2 * steps
    store = ParameterServerStore(group_of(stack, *where), 0, CONFIGS)
    weights, optimizer = dense()
    store.attach_dense(weights, optimizer)
    store.pull_dense()
    assert [weight.tolist() for weight in weights.values()] == [[-2.0 * steps] * n for n in (4, 2, 1)]


# Dense weights, around a save


def adam() -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    weights = {name: nn.Parameter(torch.ones(size)) for name, size in (("a", 4), ("b", 2), ("c", 1))}
    return weights, torch.optim.Adam(weights.values(), lr=0.1)


def push(store: Store, weights: dict[str, nn.Parameter], value: float) -> None:
    for weight in weights.values():
        weight.grad = torch.full_like(weight, value)
    store.push_dense()
    store.pull_dense()


def test_weights_that_were_fetched_and_sent_to_other_servers_train_the_same(stack: ExitStack) -> None:
    """From two servers by way of the chief to three."""
    old = ParameterServerStore(group_of(stack, *addresses(serve(stack, CONFIGS, 2, dense=adam))), 0, CONFIGS)
    new = ParameterServerStore(group_of(stack, *addresses(serve(stack, CONFIGS, 3, dense=adam))), 0, CONFIGS)
    (trained, optimizer), (chief, its_optimizer), (weights, last) = adam(), adam(), adam()
    old.attach_dense(trained, optimizer)
    new.attach_dense(weights, last)
    for value in (1.0, -0.5):
        push(old, trained, value)
    assert old.group.fetch_dense(chief, its_optimizer) == 2
    assert_close(dict(chief), trained)
    assert its_optimizer.state[chief["a"]]["step"] == 2
    new.group.send_dense(chief, its_optimizer, step=2)
    for value in (0.25, 1.0):
        push(old, trained, value)
        push(new, weights, value)
    assert_close(weights, trained, rtol=0, atol=0)
    assert new.group.step == old.group.step == 4


def test_servers_that_train_otherwise_are_not_saved_as_if_they_did(stack: ExitStack) -> None:
    group = group_of(stack, *addresses(serve(stack, CONFIGS, 2, dense=adam)))
    weights, optimizer = dense()
    with pytest.raises(RestoreError, match="the state of Adam: the optimizer here is SGD"):
        group.fetch_dense(weights, optimizer)
    with pytest.raises(RestoreError, match="the state of SGD: the optimizer here is Adam"):
        group.send_dense(weights, optimizer)
    assert weights["a"].tolist() == [0.0] * 4


# Who is gone


def test_a_server_killed_in_the_middle_is_named_and_may_come_back_empty(stack: ExitStack) -> None:
    first, there = start(stack, 0, 0, 2)
    victim, gone = start(stack, 0, 1, 2)
    group = group_of(stack, there, gone)
    store = ParameterServerStore(group, 0, CONFIGS)
    store.apply_gradients(keys(0, 1), torch.ones(4))
    before = group.incarnations
    named = f"parameter server 1 of 2 at {gone}: no answer"
    victim.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(2) as pool:
        found = pool.submit(store.lookup, keys(0, 1))
        pushed = pool.submit(store.apply_gradients, keys(1), torch.ones(2))
        victim.kill()
        victim.wait()
        for waiting in (found, pushed):
            with pytest.raises(UnavailableError, match=named):
                waiting.result()
    with pytest.raises(UnavailableError, match=named):
        store.lookup(keys(0, 1))
    with pytest.raises(UnavailableError, match=f"{named}.* is not known"):
        store.apply_gradients(keys(0, 1), torch.ones(4))
    with pytest.raises(UnavailableError, match=named):
        store.stats()
    assert store.lookup(keys(0)).tolist() == [-2, -2], "the other server goes on"

    start(stack, int(gone.rpartition(":")[2]), 1, 2)
    with pytest.raises(UnavailableError, match=r"1 of 2 .* the server restarted or serves another run"):
        store.lookup(keys(0, 1))
    again = ParameterServerStore(group, 0, CONFIGS)
    assert again.lookup(keys(0, 1)).tolist() == [-2, -2, 0, 0]
    assert (group.incarnations[0] == before[0], group.incarnations[1] == before[1]) == (True, False)
    assert first.poll() is None


def test_a_server_that_comes_late_is_waited_for(stack: ExitStack) -> None:
    (server,) = serve(stack, CONFIGS, 1)
    port = server.port
    server.close()
    group = group_of(stack, f"127.0.0.1:{port}", patience=LONG)
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(ParameterServerStore, group, 0, CONFIGS)
        serve(stack, CONFIGS, 1, server={"port": port})
        assert made.result().lookup(keys(1)).tolist() == [0, 0]


@pytest.mark.parametrize("cuts", [1, 3])
def test_gradients_are_sent_again_when_the_wire_breaks_and_applied_once(stack: ExitStack, cuts: int) -> None:
    server, held = held_server(stack)
    wire = Wire(server.address)
    stack.callback(wire.close)
    store = ParameterServerStore(group_of(stack, wire.address, patience=LONG), 0, CONFIGS)
    store.lookup(keys(1))
    held.hold()
    with ThreadPoolExecutor(1) as pool:
        pushed = pool.submit(store.apply_gradients, keys(1), torch.ones(2))
        assert held.entered.wait(60)
        for number in range(cuts):
            wire.cut()
            assert wait_until(lambda seen=number + 2: len(wire.seen) >= seen)
        assert not pushed.done()
        held.let_go.set()
        pushed.result(60)
    store.apply_gradients(keys(1), torch.ones(2))
    assert store.lookup(keys(1)).tolist() == [-2, -2]


def test_dense_gradients_are_sent_again_and_counted_once(stack: ExitStack) -> None:
    (server,) = serve(stack, CONFIGS, 1, dense=dense)
    group = group_of(stack, server.address)
    store = ParameterServerStore(group, 0, CONFIGS)
    weights, optimizer = dense()
    store.attach_dense(weights, optimizer)
    push(store, weights, 1.0)
    again = {"names": [], "sender": group.sender, "number": 1}
    answer = group.exchange("push_dense", {0: (again, b"")})[0]
    assert (answer.body["step"], answer.data.view("float32").tolist()[:4]) == (1, [-1.0] * 4)
    push(store, weights, 1.0)
    assert (server.step, weights["a"].tolist()) == (2, [-2.0] * 4)


def test_lookups_are_repeated_when_the_wire_breaks(stack: ExitStack) -> None:
    server, held = held_server(stack)
    wire = Wire(server.address)
    stack.callback(wire.close)
    store = ParameterServerStore(group_of(stack, wire.address, patience=LONG), 0, CONFIGS)
    store.apply_gradients(keys(1), torch.ones(2))
    held.hold()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(store.lookup, keys(1))
        assert held.entered.wait(60)
        wire.cut()
        held.let_go.set()
        assert found.result().tolist() == [-1, -1]


def test_an_interrupted_call_leaves_no_answer_for_the_next(stack: ExitStack) -> None:
    store = ParameterServerStore(group_of(stack, *addresses(serve(stack, CONFIGS, 2))), 0, CONFIGS)
    store.apply_gradients(keys(0, 1), torch.tensor([1.0, 1.0, 2.0, 2.0]))
    asked = RowRequest(cells=1, ids=1)
    asked.sizes[:], asked.ids[:] = 1, 0
    honest = RowHeader(RowCall.LOOKUP, store=0, batches=1, ids=1), asked.data
    with pytest.raises(TypeError, match="not JSON serializable"):  # after server 0 was asked
        store.group.exchange("lookup", {0: honest, 1: ({"store": {1}}, b"")})
    assert store.lookup(keys(2, 1)).tolist() == [0, 0, -2, -2]


@pytest.mark.parametrize("count", [1, 2])
def test_rows_may_come_as_half_floats_and_stay_whole_on_the_servers(stack: ExitStack, count: int) -> None:
    where = addresses(serve(stack, CONFIGS, count))
    whole = ParameterServerStore(group_of(stack, *where), 0, CONFIGS)
    half = ParameterServerStore(group_of(stack, *where, half=True), 0, CONFIGS)
    gradients = torch.tensor([1.0, 1.0 + 2**-12, -3.0001e-5, 1e-9])
    half.apply_gradients(keys(1, 2), gradients)
    assert whole.lookup(keys(1, 2)).tolist() == (-gradients).tolist(), "what is pushed is not rounded"
    found = half.lookup(keys(2, 1))
    assert found.dtype == torch.float32
    expected = -torch.cat([gradients[2:], gradients[:2]])
    assert found.tolist() == expected.half().float().tolist()
    error = (found - expected).abs()
    assert bool((error <= torch.maximum(expected.abs() * 2**-11, torch.tensor(2.0**-25))).all())


def test_rows_too_large_for_half_floats_come_whole(stack: ExitStack) -> None:
    group = group_of(stack, *addresses(serve(stack, CONFIGS, 1)), half=True)
    store = ParameterServerStore(group, 0, CONFIGS)
    store.apply_gradients(keys(1), torch.tensor([-70_000.0, -1.0001]))
    assert store.lookup(keys(1)).tolist() == torch.tensor([70_000.0, 1.0001]).tolist()


def test_lookups_have_a_limit_of_their_own(stack: ExitStack) -> None:
    server, held = held_server(stack)
    group = group_of(stack, server.address, timeout=timedelta(seconds=60), lookup_timeout=SHORT)
    store = ParameterServerStore(group, 0, CONFIGS)
    held.hold()
    with pytest.raises(DeadlineExceededError, match=r"server 0 of 1 at .*: no answer in 0.2 s"):
        store.lookup(keys(1))
    held.let_go.set()


def test_an_answer_that_does_not_come_in_time_is_given_up(stack: ExitStack) -> None:
    server, held = held_server(stack)
    store = ParameterServerStore(group_of(stack, server.address, timeout=SHORT), 0, CONFIGS)
    held.hold()
    with pytest.raises(DeadlineExceededError, match=r"server 0 of 1 at .*: no answer in 0.2 s"):
        store.lookup(keys(1))
    with pytest.raises(DeadlineExceededError, match="Whether it has applied the gradients is not known"):
        store.apply_gradients(keys(1), torch.ones(2))
    held.let_go.set()
    assert store.lookup(keys(2)).tolist() == [0, 0]


def test_an_answer_that_is_late_is_asked_for_again(stack: ExitStack) -> None:
    server, held = held_server(stack)
    store = ParameterServerStore(group_of(stack, server.address, timeout=SHORT, patience=LONG), 0, CONFIGS)
    store.apply_gradients(keys(1), torch.ones(2))
    held.hold()
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(store.lookup, keys(1)), pool.submit(store.apply_gradients, keys(2), torch.ones(2))
        assert wait_until(lambda: held.entries >= 4), "both came, and the lookup came again twice"
        held.let_go.set()
        assert asked[0].result(60).tolist() == [-1, -1]
        asked[1].result(60)
    assert store.lookup(keys(2)).tolist() == [-1, -1]


def test_only_the_server_that_kept_us_waiting_is_named(stack: ExitStack) -> None:
    (quick,) = serve(stack, CONFIGS, 2)[:1]
    slow, held = held_server(stack, shard=(1, 2))
    store = ParameterServerStore(group_of(stack, quick.address, slow.address, timeout=SHORT), 0, CONFIGS)
    held.hold()
    with pytest.raises(DeadlineExceededError, match=r"server 1 of 2 at .*: no answer in 0.2 s"):
        store.lookup(keys(0, 1))
    held.let_go.set()
    assert store.lookup(keys(0)).tolist() == [0, 0], "the other's connection was not cut off with it"


def test_a_closed_group_raises_in_waiting_calls_as_well(stack: ExitStack) -> None:
    server, held = held_server(stack)
    group = group_of(stack, server.address)
    store = ParameterServerStore(group, 0, CONFIGS)
    held.hold()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(store.lookup, keys(1))
        assert held.entered.wait(60)
        group.close()
        with pytest.raises(ClusterError, match="these connections to parameter servers were closed"):
            found.result()
    for refused in (store.stats, lambda: store.lookup(keys(1))):
        with pytest.raises(ClusterError, match="were closed"):
            refused()


def test_a_server_can_be_closed_while_workers_keep_their_connections(stack: ExitStack) -> None:
    (server,) = serve(stack, CONFIGS, 1)
    store = ParameterServerStore(group_of(stack, server.address), 0, CONFIGS)
    store.lookup(keys(1))
    server.close()
    server.close()
    with pytest.raises(UnavailableError, match="no answer"):
        store.lookup(keys(1))
