"""Spreading: one call of a store, checked and written out for each of those who hold its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from monolith.errors import TableArgumentError
from monolith.store.routes import Routes
from monolith.store.rows import RowCall, RowFlags, RowHeader, RowRequest
from monolith.store.store import TableIds
from monolith.table import TableConfig, arguments
from monolith.wire.bulk import Bytes

Memory = Callable[[Sequence[int]], Sequence[Bytes]]
"""From how many bytes each request has to where they are written."""


def _one_each(sizes: Sequence[int]) -> list[Bytes]:
    return [np.empty(size, np.uint8) for size in sizes]


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """A call, written out: of everybody who holds rows, what is asked there; perhaps nothing."""

    routes: Routes
    headers: list[RowHeader]
    requests: list[RowRequest]


class Spreader:
    """Writes the calls of one store out, in the same way whoever holds the rows.

    Args:
        configs: The tables of the store.
        holders: How many hold rows.
        number: Which of the model's stores this is.
    """

    def __init__(self, configs: Mapping[str, TableConfig], holders: int, number: int) -> None:
        self.dims = {name: configs[name].dim for name in sorted(configs)}
        """Table to the width of its rows, sorted by name."""
        self.counts_sightings = True
        """Whether `TableIds.counts` make a difference; otherwise they are not sent."""
        self._widths = np.array(list(self.dims.values()), np.int64)
        self._delayed = next((config for config in configs.values() if _is_delayed(config)), None)
        self._holders = holders
        self.number = number
        self.memory: Memory = _one_each
        """Where requests are written to."""

    @property
    def delay_compensated(self) -> bool:
        return self._delayed is not None

    def lookup(self, ids: TableIds, flags: RowFlags = RowFlags.NONE) -> Spread:
        """Write a lookup out; see `Store.lookup`.

        Raises:
            TableArgumentError: An argument does not fit.
        """
        return self._written(RowCall.LOOKUP, self._routes(ids), ids.batches, flags)

    def push(
        self,
        ids: TableIds,
        gradients: Tensor,
        *,
        step: int,
        event_time: int | Tensor,
        latest_values: Tensor | None,
    ) -> Spread:
        """Write gradients out; see `Store.apply_gradients`.

        Raises:
            TableArgumentError: An argument does not fit.
        """
        arguments.check_step(step)
        if self._delayed is not None and latest_values is None:
            arguments.latest_array(None, self._delayed, 0)
        routes = self._routes(ids)
        num_ids = len(ids.ids)
        grads = arguments.float_array(gradients, (routes.floats,), "gradients")
        flags, latest, counts = RowFlags.NONE if ids.distinct else RowFlags.REPEATED, None, None
        if latest_values is not None:
            latest = arguments.float_array(latest_values, (routes.floats,), "latest_values")
            flags |= RowFlags.LATEST if self._delayed is not None else RowFlags.NONE
        times = arguments.event_time_array(event_time, num_ids)
        flags |= RowFlags.TIMES if isinstance(event_time, Tensor) else RowFlags.NONE
        if ids.counts is not None and self.counts_sightings:
            arguments.count_array(ids.counts, num_ids)
            counts = arguments.id_array(ids.counts, "counts")
            flags |= RowFlags.COUNTS
        one_time = 0 if flags & RowFlags.TIMES else int(times[0])
        spread = self._written(RowCall.PUSH, routes, ids.batches, flags, step=step, event_time=one_time)
        requests = spread.requests
        routes.spread_rows(grads, [one.gradients for one in requests])
        if latest is not None and flags & RowFlags.LATEST:
            routes.spread_rows(latest, [one.latest for one in requests if one.latest is not None])
        if flags & RowFlags.TIMES:
            routes.spread_numbers(times, [one.times for one in requests if one.times is not None])
        if counts is not None:
            routes.spread_numbers(counts, [one.counts for one in requests if one.counts is not None])
        return spread

    def _routes(self, ids: TableIds) -> Routes:
        """Check ids and sizes; return where they go."""
        keys, sizes = arguments.id_array(ids.ids), arguments.id_array(ids.sizes, "sizes")
        batches = ids.batches
        if not isinstance(batches, int) or batches < 1:
            raise TableArgumentError(f"batches must be a whole number, 1 or more, got {batches!r}")
        return Routes(keys, sizes, self._widths, batches, self._holders)

    def _written(
        self,
        call: RowCall,
        routes: Routes,
        batches: int,
        flags: RowFlags,
        *,
        step: int = 0,
        event_time: int = 0,
    ) -> Spread:
        """Return a call with its ids and sizes written; the other arrays are still to be."""
        cells = routes.sizes.shape[1]
        sent = RowFlags.NONE if call == RowCall.LOOKUP else flags  # what arrays there are
        floats = [0 if call == RowCall.LOOKUP else many for many in routes.num_floats]
        lengths = list(zip(routes.num_ids, floats, strict=True))
        memory = self.memory(
            [RowRequest.size(cells=cells, ids=n, floats=many, flags=sent) for n, many in lengths]
        )
        requests = [
            RowRequest(data, cells=cells, ids=n, floats=many, flags=sent)
            for data, (n, many) in zip(memory, lengths, strict=True)
        ]
        for request, sizes in zip(requests, routes.sizes, strict=True):
            request.sizes[:] = sizes
        routes.spread_ids([one.ids for one in requests])
        headers = [
            RowHeader(call, self.number, batches, n, many, flags, step, event_time) for n, many in lengths
        ]
        return Spread(routes, headers, requests)


def _is_delayed(config: TableConfig) -> bool:
    return any(segment.optimizer.delay_compensation is not None for segment in config.segments)
