"""ParameterServerStore: rows and dense weights on parameter servers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from monolith.errors import ConfigError, FeatureError, RetryableError, TableArgumentError, TableClosedError
from monolith.store.dense import check_optimizer_covers
from monolith.store.dense_cache import DenseCache
from monolith.store.dense_config import DenseConfig
from monolith.store.row_requests import Floats, PartitionedRequest, RequestPartitioner, RowFlags, read_answer
from monolith.store.server_group import Request, ServerGroup
from monolith.store.store import TableIds, add_stats
from monolith.table import TableConfig, TableStats, arguments
from monolith.wire.flight import Answer


class ParameterServerStore:
    """A `Store` over parameter servers. Thread-safe. A call makes one request to each server, all at once.

    A broken connection or a late answer only costs time: requests are retried for as long as the group waits
    (`patience`, `replacement_timeout`), and a push is applied once. Only after that do `apply_gradients` and
    `push_dense` raise a RetryableError, and some servers may have applied their part.

    Args:
        group: The servers; shared with other stores of the model, and closed by the caller.
        number: The index of this store among the model's stores.
        configs: The tables that the model needs.

    Raises:
        ConfigError: The servers hold other tables, or were given in another order.
        RetryableError: A server does not answer.

    Examples:
        >>> import torch
        >>> from monolith import LocalStore, ParameterServerStore, Segment, TableConfig
        >>> from monolith.store import ParameterServer, ServerGroup, TableIds
        >>> configs = {"item": TableConfig(name="item", segments=(Segment(dim=1, learning_rate=1.0),))}
        >>> servers = [ParameterServer([LocalStore.from_configs(configs)], shard=(k, 2)) for k in range(2)]
        >>> group = ServerGroup([server.address for server in servers])
        >>> store = ParameterServerStore(group, 0, configs)
        >>> ids = TableIds(torch.tensor([7, 8]), sizes=torch.tensor([2]))  # 8 is on server 0, 7 on server 1
        >>> store.apply_gradients(ids, torch.tensor([1.0, 2.0]), step=1)
        >>> store.lookup(ids)
        tensor([-1., -2.])
        >>> for one in (group, *servers):
        ...     one.close()
    """

    def __init__(self, group: ServerGroup, number: int, configs: Mapping[str, TableConfig]) -> None:
        self.group = group
        self._number = number
        self._partitioner = RequestPartitioner(configs, len(group), number)
        self._dims = self._partitioner.dims
        self._closed = False
        self._descriptions = group.describe()
        found = [self._checked(server, about) for server, about in enumerate(self._descriptions)]
        self._partitioner.counts_sightings = any(one["counts_sightings"] for one in found)
        self._dense: DenseCache | None = None

    @property
    def tables(self) -> Mapping[str, int]:
        return self._dims

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def delay_compensated(self) -> bool:
        return self._partitioner.delay_compensated

    @property
    def counts_sightings(self) -> bool:
        """Whether `TableIds.counts` matter to an admission filter of some server."""
        return self._partitioner.counts_sightings

    def lookup(self, ids: TableIds) -> Tensor:
        self._check_open()
        flags = RowFlags.HALF if self.group.half else RowFlags.NONE
        call = self._partitioner.lookup(ids, flags)
        requests, routes = _asked(call), call.routes
        answers = self.group.exchange("lookup", requests)
        rows = [
            self._rows_of(server, answers[server], floats) if server in answers else np.empty(0, np.float32)
            for server, floats in enumerate(routes.num_floats)
        ]
        return torch.from_numpy(routes.gather_rows(rows))

    def apply_gradients(
        self,
        ids: TableIds,
        gradients: Tensor,
        *,
        step: int = 0,
        event_time: int | Tensor = 0,
        latest_values: Tensor | None = None,
    ) -> None:
        self._check_open()
        call = self._partitioner.push(
            ids, gradients, step=step, event_time=event_time, latest_values=latest_values
        )
        self._push("apply_gradients", _asked(call))

    def attach_dense(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        config: DenseConfig | None = None,
        scheduled: bool = False,
    ) -> None:
        """Take charge of the dense variables; see `Store`.

        Args:
            config: What is fetched and pushed while steps are computed.
            scheduled: Whether the servers have a schedule for the optimizer's learning rates. Otherwise they
                are told when a rate of `optimizer` changes.
        """
        if self._dense is not None:
            raise FeatureError("this store has dense variables already; one store serves one model")
        check_optimizer_covers(parameters, optimizer)
        self._dense = DenseCache(
            self.group,
            lambda requests: self._push("push_dense", requests),
            parameters,
            optimizer,
            self._descriptions,
            config=config,
            scheduled=scheduled,
        )

    @property
    def dense(self) -> DenseCache | None:
        """The dense variables, if some were attached."""
        return self._dense

    def push_dense(self) -> None:
        """Send each server the gradients of its weights.

        Server 0 gets a push in any case, because it counts the steps.
        """
        self._check_open()
        if self._dense is None:
            self._push("push_dense", {0: ({"names": []}, b"")})
        else:
            self._dense.push()

    def pull_dense(self) -> None:
        """Copy the fetched weights into the variables; before the first fetch, fetch them. See
        `DenseCache`."""
        self._check_open()
        if self._dense is not None:
            self._dense.assign()

    def count_expired(self, now: int) -> dict[str, int]:
        self._check_open()
        now = arguments.event_second(now, "now")
        found = self.group.call_all("count_expired", stateful=True, store=self._number, now=now)
        return {name: sum(one[name] for one in found) for name in self._dims}

    def evict(self, now: int | None = None, *, tables: Collection[str] | None = None) -> dict[str, int]:
        self._check_open()
        if now is None:  # a table's clock is the event time of its newest row, on whichever server it is
            times = {name: stats.max_event_time for name, stats in self.stats().items()}
        else:
            times = dict.fromkeys(self._dims, arguments.event_second(now, "now"))
        times = {name: time for name, time in times.items() if tables is None or name in tables}
        gone = self.group.call_all("evict", stateful=True, store=self._number, now=times)
        return {name: sum(one.get(name, 0) for one in gone) for name in self._dims}

    def stats(self) -> dict[str, TableStats]:
        """Return the statistics of each table over all servers; `load` is their mean."""
        self._check_open()
        found = self.group.call_all("stats", stateful=True, store=self._number)
        return {name: add_stats([TableStats(**one[name]) for one in found]) for name in self._dims}

    def close(self) -> None:
        """Close this store; servers and connections stay open."""
        self._closed = True
        if self._dense is not None:
            self._dense.close()

    # Inside

    def _checked(self, server: int, about: dict[str, Any]) -> dict[str, Any]:
        where = f"parameter server {server} at {self.group.addresses[server]}"
        if not 0 <= self._number < len(about["stores"]):
            raise ConfigError(
                f"{where} has {len(about['stores'])} stores, and this model needs number {self._number}. "
                "Do all processes run the same task?"
            )
        found: dict[str, Any] = about["stores"][self._number]
        for name in sorted(self._dims.keys() | found["tables"].keys()):
            here, there = self._dims.get(name), found["tables"].get(name)
            if here != there:
                raise ConfigError(
                    f"{where} does not fit: table {name!r} has {_width(there)} there, and this model needs "
                    f"{_width(here)}. Do all processes run the same task?"
                )
        return found

    def _check_open(self) -> None:
        if self._closed:
            raise TableClosedError("this store of parameter servers was closed")

    def _rows_of(self, server: int, answer: Answer, expected: int) -> Floats:
        flags, floats = read_answer(answer.header)
        size = 2 if flags & RowFlags.HALF else 4
        if (floats, len(answer.data)) != (expected, expected * size):
            raise TableArgumentError(
                f"parameter server {server} answered {floats} floats in {len(answer.data)} bytes, expected "
                f"{expected}. Do all processes run the same task?"
            )
        if not flags & RowFlags.HALF:
            return answer.data.view(np.float32)
        return answer.data.view(np.float16).astype(np.float32)

    def _push(self, name: str, requests: Mapping[int, Request]) -> dict[int, Any]:
        try:
            return self.group.push(name, requests)
        except RetryableError as cause:
            raise type(cause)(f"{cause}. Whether it has applied the gradients is not known.") from cause


def _asked(call: PartitionedRequest) -> dict[int, Request]:
    """Return the requests that have IDs, by server."""
    found = zip(call.headers, call.requests, strict=True)
    return {server: request for server, request in enumerate(found) if request[0].ids}


def _width(dim: int | None) -> str:
    return "no such table" if dim is None else f"rows of {dim} floats"
