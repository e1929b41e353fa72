"""Every implementation of the store seam, made the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from monolith.store import DenseShare, LocalStore, ParameterServer, ParameterServerStore, ServerGroup, Store
from monolith.table import DictTable, NativeTable, TableConfig

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
        share = None if dense is None else DenseShare(*dense(), (number, count))
        servers.append(ParameterServer([store], share, share=(number, count), **(server or {})))
        stack.callback(servers[-1].close)
    return servers


def _remote(count: int) -> MakeStores:
    def bind(stack: ExitStack) -> MakeStore:
        def make(configs: Mapping[str, TableConfig], **more: Any) -> Store:
            servers = serve(stack, configs, count, **more)
            group = ServerGroup([server.address for server in servers])
            stack.callback(group.close)
            return ParameterServerStore(group, 0, configs)

        return make

    return bind


STORES: dict[str, MakeStores] = {
    "plain": _local(make_table=DictTable, threads=1),
    "local": _local(make_table=NativeTable, threads=1),
    "local, 2 threads": _local(make_table=NativeTable, threads=2),
    "1 server": _remote(1),
    "3 servers": _remote(3),
}
