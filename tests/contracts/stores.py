"""Every implementation of the store seam, made the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import cache, partial
from itertools import count
from typing import Any

import torch
from services.emulated_cuda import device_named, device_names
from store.ranks import all_at_once, connect
from torch import nn

from monolith.errors import MonolithError
from monolith.store import (
    AllToAllStore,
    DenseShard,
    LocalStore,
    ParameterServer,
    ParameterServerStore,
    RankGroups,
    ServedRankStore,
    ServerGroup,
    Store,
    TableIds,
)
from monolith.store.all_to_all import RankStore
from monolith.table import DictTable, NativeTable, TableConfig

FEW = 4096
"""Bytes on a device for all tables of a test: dozens of rows each."""
Dense = Callable[[], tuple[Mapping[str, nn.Parameter], torch.optim.Optimizer]]
"""Makes the dense half of a model, as every process of a job does for itself."""
MakeStore = Callable[..., Store]
"""From the configs of tables, `dense` and `thresholds` to a store."""
MakeStores = Callable[[ExitStack], MakeStore]
"""What is started for a store ends with the stack."""


def _local(**options: Any) -> MakeStores:
    def make(
        configs: Mapping[str, TableConfig],
        *,
        dense: Dense | None = None,  # noqa: ARG001
        **more: Any,
    ) -> Store:
        return LocalStore.from_configs(configs, **options, **more)

    return lambda _: make


def serve(
    stack: ExitStack,
    configs: Mapping[str, TableConfig],
    count: int,
    *,
    dense: Dense | None = None,
    server: Mapping[str, Any] | None = None,
    **more: Any,
) -> list[ParameterServer]:
    """Start servers in this process, each with an empty share of these tables."""
    servers = []
    for number in range(count):
        store = LocalStore.from_configs(configs, threads=1, **more)
        stack.callback(store.close)
        share = None if dense is None else DenseShard(*dense(), (number, count))
        servers.append(ParameterServer([store], share, shard=(number, count), **(server or {})))
        stack.callback(servers[-1].close)
    return servers


def _remote(count: int, **options: Any) -> MakeStores:
    def bind(stack: ExitStack) -> MakeStore:
        def make(configs: Mapping[str, TableConfig], **more: Any) -> Store:
            servers = serve(stack, configs, count, **options, **more)
            group = ServerGroup([server.address for server in servers])
            stack.callback(group.close)
            return ParameterServerStore(group, 0, configs)

        return make

    return bind


class _Restarting:
    """A store over servers: before each call the next is closed, and replaced by one that holds its rows."""

    def __init__(self, stack: ExitStack, configs: Mapping[str, TableConfig], count: int, **more: Any) -> None:
        self._held = [
            LocalStore.from_configs(configs, threads=1, **_without_dense(more)) for _ in range(count)
        ]
        dense = more.get("dense")
        self._dense = [None if dense is None else DenseShard(*dense(), (k, count)) for k in range(count)]
        self._servers = [self._serve(number) for number in range(count)]
        stack.callback(self._close)
        self._group = ServerGroup([server.address for server in self._servers])
        stack.callback(self._group.close)
        self._store = ParameterServerStore(self._group, 0, configs)
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if callable(found) and name != "close":
            self._restart(self._calls % len(self._servers))
            self._calls += 1
        return found

    def _restart(self, number: int) -> None:
        before, self._servers[number] = self._servers[number], self._serve(number)
        self._group.replace(number, self._servers[number].address, self._servers[number].incarnation)
        before.close()

    def _serve(self, number: int) -> ParameterServer:
        share = (number, len(self._held))
        return ParameterServer([self._held[number]], self._dense[number], shard=share)

    def _close(self) -> None:
        for server in self._servers:
            server.close()


def _without_dense(more: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in more.items() if name != "dense"}


def _restarting(count: int) -> MakeStores:
    def bind(stack: ExitStack) -> MakeStore:
        def make(configs: Mapping[str, TableConfig], **more: Any) -> Any:
            return _Restarting(stack, configs, count, **more)

        return make

    return bind


class _Together:
    """The stores of all ranks as one: each call is made by the next rank, and by the others with nothing."""

    def __init__(self, stores: Sequence[RankStore], dense: Dense | None) -> None:
        self._stores = stores
        self._dense = dense
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._stores[0], name)
        nothing = _NOTHING.get(name)
        if nothing is None or not callable(found):
            return found
        caller, self._calls = self._calls % len(self._stores), self._calls + 1

        def call(*given: Any, **more: Any) -> Any:
            shared = {"step": more["step"]} if "step" in more else {}
            calls: list[Any] = [getattr(store, name) for store in self._stores]
            asked, little = nothing(self)
            for rank, one in enumerate(calls):
                yes = rank == caller
                calls[rank] = partial(one, *(given if yes else asked), **(more if yes else little | shared))
            error, found = all_at_once(*(partial(_outcome, one) for one in calls))[caller]
            if error is not None:
                raise error
            return found

        return call

    def nothing(self, batches: int = 1) -> TableIds:
        return TableIds(torch.zeros(0, dtype=torch.int64), torch.zeros(batches * len(self.tables)).long())

    def attach_dense(self, weights: Any, optimizer: Any) -> None:
        """The first rank's are those that the caller looks at, so it is the one with gradients."""
        self._stores[0].attach_dense(weights, optimizer)
        for store in self._stores[1:]:
            assert self._dense is not None
            store.attach_dense(*self._dense())

    def close(self) -> None:
        for store in self._stores:
            store.close()


_NOTHING: dict[str, Callable[[_Together], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "lookup": lambda all_of_them: ((all_of_them.nothing(),), {}),
    "apply_gradients": lambda all_of_them: (
        (all_of_them.nothing(), torch.zeros(0)),
        {"latest_values": torch.zeros(0)},
    ),
    "push_dense": lambda _: ((), {}),
}
"""Of each call that all ranks make together, what those give who have nothing to give."""


def _outcome(call: Callable[[], Any]) -> tuple[Exception | None, Any]:
    try:
        return None, call()
    except (MonolithError, TypeError) as error:
        return error, None


@cache
def _kept(size: int) -> Sequence[RankGroups]:
    """Ranks that stay connected from test to test, since each test has stores of its own."""
    return connect(size, heartbeat_every=timedelta(seconds=1))


def _ranks(size: int, **options: Any) -> MakeStores:
    numbers = count()

    def bind(_: ExitStack) -> MakeStore:
        def make(configs: Mapping[str, TableConfig], *, dense: Dense | None = None, **more: Any) -> Any:
            groups, number = _kept(size), next(numbers)
            stores = [
                AllToAllStore(
                    LocalStore.from_configs(configs, threads=1, **options, **more), configs, one, number
                )
                for one in groups
            ]
            return _Together(stores, dense)

        return make

    return bind


def _served_ranks(size: int, servers: int) -> MakeStores:
    numbers = count()

    def bind(stack: ExitStack) -> MakeStore:
        def make(configs: Mapping[str, TableConfig], *, dense: Dense | None = None, **more: Any) -> Any:
            addresses = [one.address for one in serve(stack, configs, servers, **more)]
            number, stores = next(numbers), []
            for one in _kept(size):
                group = ServerGroup(addresses)
                stack.callback(group.close)
                stores.append(ServedRankStore(ParameterServerStore(group, 0, configs), configs, one, number))
            return _Together(stores, dense)

        return make

    return bind


def _on_devices() -> dict[str, MakeStores]:
    """Return stores on the device there is, and on an emulated one wherever it can be compiled."""
    found: dict[str, MakeStores] = {}
    for name in device_names():
        device = device_named(name)
        found |= {
            f"rows on the {name} device": _local(device=device),
            f"few rows on the {name} device": _local(device=device, device_bytes=FEW),
            f"2 servers with rows on the {name} device": _remote(2, device=device),
            f"2 ranks with rows on the {name} device": _ranks(2, device=device),
        }
    return found


STORES: dict[str, MakeStores] = {
    "plain": _local(make_table=DictTable, threads=1),
    "local": _local(make_table=NativeTable, threads=1),
    "local, 2 threads": _local(make_table=NativeTable, threads=2),
    "1 server": _remote(1),
    "2 servers": _remote(2),
    "3 servers": _remote(3),
    "5 servers": _remote(5),
    "2 servers that restart": _restarting(2),
    "1 rank": _ranks(1),
    "2 ranks": _ranks(2),
    "3 ranks": _ranks(3),
    "2 ranks on 2 servers": _served_ranks(2, 2),
    **_on_devices(),
}
