"""ParameterServerStore: rows and dense weights on parameter servers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from monolith.errors import ConfigError, FeatureError, RetryableError, TableArgumentError, TableClosedError
from monolith.store.dense import check_held
from monolith.store.dense_cache import DenseCache
from monolith.store.dense_config import DenseConfig
from monolith.store.group import Request, ServerGroup
from monolith.store.routes import Floats
from monolith.store.rows import RowFlags, read_answer
from monolith.store.spreading import Spread, Spreader
from monolith.store.store import TableIds, add_stats
from monolith.table import TableConfig, TableStats, arguments
from monolith.wire.flight import Answer


class ParameterServerStore:
    """A `Store` over servers. Thread-safe. A call makes one request to each server, all at once.

    A connection that breaks and an answer that is late cost time and nothing else: what was asked is asked
    again for as long as the group waits (`patience`, `hold`), and what was pushed is applied once. Only
    after that do `apply_gradients` and `push_dense` raise an error that is retryable, and some servers may
    have applied their part.

    Args:
        group: The servers; shared with other stores of the model, and closed by whoever made it.
        number: Which of the model's stores this is, on the servers.
        configs: The tables that the model needs.

    Raises:
        ConfigError: The servers hold other tables, or were given in another order.
        RetryableError: A server does not answer.
    """

    def __init__(self, group: ServerGroup, number: int, configs: Mapping[str, TableConfig]) -> None:
        self.group = group
        self._number = number
        self._spreader = Spreader(configs, len(group), number)
        self._dims = self._spreader.dims
        self._closed = False
        self._descriptions = group.describe()
        found = [self._checked(server, about) for server, about in enumerate(self._descriptions)]
        self._spreader.counts_sightings = any(one["counts_sightings"] for one in found)
        self._dense: DenseCache | None = None

    @property
    def tables(self) -> Mapping[str, int]:
        return self._dims

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def delay_compensated(self) -> bool:
        return self._spreader.delay_compensated

    @property
    def counts_sightings(self) -> bool:
        """Whether `TableIds.counts` make a difference on some server."""
        return self._spreader.counts_sightings

    def lookup(self, ids: TableIds) -> Tensor:
        self._check_open()
        flags = RowFlags.HALF if self.group.half else RowFlags.NONE
        spread = self._spreader.lookup(ids, flags)
        requests, routes = _asked(spread), spread.routes
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
        spread = self._spreader.push(
            ids, gradients, step=step, event_time=event_time, latest_values=latest_values
        )
        self._push("apply_gradients", _asked(spread))

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
            scheduled: Whether the servers have a schedule for the rates of the optimizer. Otherwise they are
                told when somebody moves those of `optimizer`.
        """
        if self._dense is not None:
            raise FeatureError("this store has dense variables already; one store serves one model")
        check_held(parameters, optimizer)
        self._dense = DenseCache(
            self.group,
            lambda requests: self._push("push_dense", requests),
            parameters,
            optimizer,
            self._descriptions,
            config=config,
            moved_there=scheduled,
        )

    @property
    def dense(self) -> DenseCache | None:
        """The dense variables, where some were attached."""
        return self._dense

    def push_dense(self) -> None:
        """Send each server the gradients of its weights.

        Server 0 hears of it in any case, because it counts the steps.
        """
        self._check_open()
        if self._dense is None:
            self._push("push_dense", {0: ({"names": []}, b"")})
        else:
            self._dense.push()

    def pull_dense(self) -> None:
        """Make the variables what was fetched; before anything was, ask for it. See `DenseCache`."""
        self._check_open()
        if self._dense is not None:
            self._dense.assign()

    def count_expired(self, now: int) -> dict[str, int]:
        self._check_open()
        now = arguments.event_second(now, "now")
        found = self.group.call_all("count_expired", held=True, store=self._number, now=now)
        return {name: sum(one[name] for one in found) for name in self._dims}

    def evict(self, now: int | None = None, *, tables: Collection[str] | None = None) -> dict[str, int]:
        self._check_open()
        if now is None:  # a table's clock is that of its newest row, on whichever server it is
            times = {name: stats.max_event_time for name, stats in self.stats().items()}
        else:
            times = dict.fromkeys(self._dims, arguments.event_second(now, "now"))
        times = {name: time for name, time in times.items() if tables is None or name in tables}
        gone = self.group.call_all("evict", held=True, store=self._number, now=times)
        return {name: sum(one.get(name, 0) for one in gone) for name in self._dims}

    def stats(self) -> dict[str, TableStats]:
        """Return what each table holds on all servers together; `load` is their mean."""
        self._check_open()
        found = self.group.call_all("stats", held=True, store=self._number)
        return {name: add_stats([TableStats(**one[name]) for one in found]) for name in self._dims}

    def close(self) -> None:
        """Let go of this store; servers and connections go on."""
        self._closed = True
        if self._dense is not None:
            self._dense.close()

    # Inside

    def _checked(self, server: int, about: dict[str, Any]) -> dict[str, Any]:
        where = f"parameter server {server} at {self.group.addresses[server]}"
        if not 0 <= self._number < len(about["stores"]):
            raise ConfigError(
                f"{where} has {len(about['stores'])} stores, and this model asks for number {self._number}. "
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


def _asked(spread: Spread) -> dict[int, Request]:
    """Return the requests to those servers that are asked for rows."""
    found = zip(spread.headers, spread.requests, strict=True)
    return {server: (header, one.data) for server, (header, one) in enumerate(found) if header.ids}


def _width(dim: int | None) -> str:
    return "no such table" if dim is None else f"rows of {dim} floats"
