"""Between the stores of ranks: one exchange of all their gradients, and what all of them add up alike.

All ranks make the same calls in the same order, each with the ids of its own batch. What tells the others how
much is coming goes ahead, in a few bytes. The gradients of an id come together at the rank that it hashes to,
in the order of ranks, and one step is taken with their sum, so the outcome depends on nobody's speed.

A rank whose arguments do not fit says so in place of its request: then all refuse the call, and nobody hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from monolith.errors import ClusterError, FeatureError, TableClosedError
from monolith.store.collective import Collective
from monolith.store.dense import check_held
from monolith.store.rank_groups import RankGroups
from monolith.store.rows import HEADER_BYTES, RowCall, RowFlags, RowHeader, RowRequest
from monolith.store.spreading import Spread, Spreader
from monolith.store.store import Store, TableIds
from monolith.table import TableConfig
from monolith.wire.bulk import Bytes

_ALIGNMENT = 8
_REFUSED = bytes(HEADER_BYTES)


def _at_once() -> None:
    """Wait for nobody."""


@dataclass(frozen=True, slots=True, eq=False)
class RankGradients:
    """What all ranks have sent of a step for the ids of this one; to be applied once."""

    ids: TableIds
    """A batch, or more, of each rank in the order of ranks."""
    gradients: Tensor
    step: int
    event_time: int | Tensor
    latest_values: Tensor | None
    store: Store
    """Holds the rows."""
    ready: Callable[[], None] = _at_once
    """Returns when they may be applied."""

    def summed(self) -> RankGradients:
        """Return the same, on the CPU, with each id of a table once and its gradients' sum in rank order."""
        dims = list(self.store.tables.values())
        cells = list(enumerate(torch.split(self.ids.ids, self.ids.sizes.tolist())))
        floats = [size * dims[cell % len(dims)] for cell, size in enumerate(self.ids.sizes.tolist())]
        parts = torch.split(self.gradients.cpu(), floats)
        latest = None if self.latest_values is None else torch.split(self.latest_values.cpu(), floats)
        per_id = torch.tensor([cell % len(dims) for cell, ids in cells for _ in range(len(ids))])
        found = []
        for number, dim in enumerate(dims):
            mine = [cell for cell, _ in cells if cell % len(dims) == number]
            keys, places = torch.unique(torch.cat([cells[cell][1] for cell in mine]), return_inverse=True)
            first = torch.full((len(keys),), len(places)).scatter_reduce_(
                0, places, torch.arange(len(places)), "amin"
            )
            which = per_id == number
            given = torch.cat([parts[cell] for cell in mine]).view(-1, dim)
            found.append(
                (
                    keys,
                    torch.zeros(len(keys), dim).index_add_(0, places, given).flatten(),
                    _summed(self.ids.counts, which, keys, places),
                    _latest(self.event_time, which, keys, places),
                    None
                    if latest is None
                    else torch.cat([latest[c] for c in mine]).view(-1, dim)[first].flatten(),
                )
            )
        keys, gradients, counts, times, values = zip(*found, strict=True)
        return RankGradients(
            ids=TableIds(
                torch.cat(keys),
                torch.tensor([len(one) for one in keys]),
                None if self.ids.counts is None else torch.cat(counts),
            ),
            gradients=torch.cat(gradients),
            step=self.step,
            event_time=torch.cat(times) if isinstance(self.event_time, Tensor) else self.event_time,
            latest_values=None if latest is None else torch.cat(values),
            store=self.store,
            ready=self.ready,
        )

    def apply(self, gradients: Tensor | None = None) -> None:
        """Take one step for each distinct id; with other gradients than came, where these were changed."""
        self.ready()
        self.store.apply_gradients(
            self.ids,
            self.gradients if gradients is None else gradients,
            step=self.step,
            event_time=self.event_time,
            latest_values=self.latest_values,
        )


class RankStore:
    """What the stores of ranks have in common, wherever the rows are.

    Gradients go, from all ranks, to the one that an id hashes to, which adds them up in the order of ranks.
    The weights are on every rank.

    Args:
        holder: Where this rank applies the gradients of its ids.
        configs: Of all tables, the same on every rank.
        groups: What connects the ranks; closed by whoever made it.
        number: Which of the model's stores this is, in an order that all ranks share.
        counts_sightings: Whether `TableIds.counts` make a difference to the holder.
    """

    def __init__(
        self,
        holder: Store,
        configs: Mapping[str, TableConfig],
        groups: RankGroups,
        number: int,
        *,
        counts_sightings: bool,
    ) -> None:
        self._holder = holder
        self._groups = groups
        self._number = number
        self._closed = False
        self._optimizer: torch.optim.Optimizer | None = None
        self._weights: list[nn.Parameter] = []
        self._pushes = RankLine(groups.pushes, Spreader(configs, groups.size, number), RowCall.PUSH)
        self._pushes.spreader.counts_sightings = counts_sightings

    @property
    def tables(self) -> Mapping[str, int]:
        return self._pushes.spreader.dims

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def delay_compensated(self) -> bool:
        return self._pushes.spreader.delay_compensated

    def apply_gradients(
        self,
        ids: TableIds,
        gradients: Tensor,
        *,
        step: int = 0,
        event_time: int | Tensor = 0,
        latest_values: Tensor | None = None,
    ) -> None:
        sent = self.send_gradients(
            ids, gradients, step=step, event_time=event_time, latest_values=latest_values
        )
        replace(sent, ready=_at_once).apply()  # who has sent theirs looks nothing up before this

    def send_gradients(
        self,
        ids: TableIds,
        gradients: Tensor,
        *,
        step: int = 0,
        event_time: int | Tensor = 0,
        latest_values: Tensor | None = None,
    ) -> RankGradients:
        """Do the first half of `apply_gradients`: return what came for the ids of this rank, from all."""
        self._check_open()
        line = self._pushes

        def spread() -> Spread:
            return line.spreader.push(
                ids, gradients, step=step, event_time=event_time, latest_values=latest_values
            )

        _, arrived = line.exchange(spread)
        came, rows_on = arrived.requests, self._holder.device
        latest = [arrived.floats(one.latest, rows_on) for _, one in came if one.latest is not None]
        return RankGradients(
            ids=joined_ids(came),
            gradients=torch.cat([arrived.floats(one.gradients, rows_on) for _, one in came]),
            step=step,
            event_time=_event_times(came),
            latest_values=torch.cat(latest) if latest else None,
            store=self._holder,
            ready=self._await_lookups,
        )

    def _await_lookups(self) -> None:
        """Return when rows may change: all that is looked up before was."""

    def attach_dense(self, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """Take charge of the dense variables, which every rank has, with the same values; see `Store`."""
        if self._optimizer is not None:
            raise FeatureError("this store has dense variables already; one store serves one model")
        check_held(parameters, optimizer)
        self._optimizer = optimizer
        self._weights = list(parameters.values())

    def push_dense(self) -> None:
        """Apply the sum of the gradients that all ranks hold; where no rank has one, nothing is done.

        Training sums them behind backward instead, weighted by examples; see `monolith.runtime.ranks`.
        """
        if self._optimizer is None:
            return
        there = torch.tensor([float(weight.grad is not None) for weight in self._weights])
        flat = [
            (torch.zeros_like(weight) if weight.grad is None else weight.grad).flatten()
            for weight in self._weights
        ]
        summed = self._groups.dense.sum(torch.cat([there, *flat]))
        have = summed[: len(self._weights)].tolist()
        parts = torch.split(summed[len(self._weights) :], [weight.numel() for weight in self._weights])
        for weight, many, part in zip(self._weights, have, parts, strict=True):
            weight.grad = part.view_as(weight) if many else None
        self._optimizer.step()
        self._optimizer.zero_grad()

    def pull_dense(self) -> None:
        """Do nothing: every rank takes the same steps from the same weights."""

    def _check_open(self) -> None:
        if self._closed:
            raise TableClosedError("this store of ranks was closed")


@dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """What all ranks ask of this one."""

    requests: list[tuple[RowHeader, RowRequest]]
    """In the order of ranks, in host memory."""
    data: Bytes
    """The memory that these lie in."""
    there: Tensor
    """The same where it arrived."""

    def floats(self, some: NDArray[np.float32], device: torch.device) -> Tensor:
        """Return floats of a request on a device: they stay where they arrived, if that is it."""
        if self.there.device != device:
            return torch.from_numpy(some)
        at = some.ctypes.data - self.data.ctypes.data
        return self.there[at : at + some.nbytes].view(torch.float32)


class RankLine:
    """One kind of call between all ranks, on a group of its own. Used by one thread at a time."""

    def __init__(self, collective: Collective, spreader: Spreader, call: RowCall) -> None:
        self.collective = collective
        self.spreader = spreader
        spreader.memory = self._lay_out
        self._call = call
        self._outgoing: Bytes = np.empty(0, np.uint8)
        self._calls = 0

    def exchange(self, write: Callable[[], Spread]) -> tuple[Spread, Arrived]:
        """Send every rank its part of a call; return what this one asks, and what each of them asks here."""
        self._calls += 1
        try:
            spread = write()
        except BaseException:
            self._send_headers([_REFUSED] * self.collective.size)
            raise
        headers = self._send_headers(
            [header._replace(number=self._calls).packed() for header in spread.headers]
        )
        about = [self._checked(rank, data) for rank, data in enumerate(headers)]
        cells = len(self.spreader.dims)
        arrays: list[dict[str, Any]] = [
            {"cells": one.batches * cells, "ids": one.ids, "floats": one.floats, "flags": one.flags}
            for one in about
        ]
        sizes = [RowRequest.size(**one) for one in arrays]
        padded = [_padded(size) for size in sizes]
        sent = [_padded(len(request.data)) for request in spread.requests]
        there = self.collective.all_to_all(torch.from_numpy(self._outgoing), sent, padded)
        came = there.cpu().numpy()
        requests, at = [], 0
        for size, room, one in zip(sizes, padded, arrays, strict=True):
            requests.append(RowRequest(came[at : at + size], **one))
            at += room
        return spread, Arrived(list(zip(about, requests, strict=True)), came, there)

    def _send_headers(self, headers: Sequence[bytes]) -> list[bytes]:
        data = torch.frombuffer(bytearray(b"".join(headers)), dtype=torch.uint8)
        lengths = [HEADER_BYTES] * self.collective.size
        came = self.collective.all_to_all(data, lengths, lengths).cpu().numpy().tobytes()
        return [came[at : at + HEADER_BYTES] for at in range(0, len(came), HEADER_BYTES)]

    def _checked(self, rank: int, data: bytes) -> RowHeader:
        if data == _REFUSED:
            raise ClusterError(f"rank {rank} was given what it cannot take, so no rank did anything")
        header, number = RowHeader.read(data), self.spreader.number
        if (header.call, header.store, header.number) != (self._call, number, self._calls):
            raise ClusterError(
                f"rank {rank} makes another call: {header.call.name} {header.number} of store "
                f"{header.store}, and here it is {self._call.name} {self._calls} of store {number}. All "
                "ranks must run the same task, with the same settings."
            )
        return header

    def _lay_out(self, sizes: Sequence[int]) -> list[Bytes]:
        """Return where requests are written: one after the other, as they are sent."""
        padded = [_padded(size) for size in sizes]
        self._outgoing = np.empty(sum(padded), np.uint8)
        starts = np.cumsum([0, *padded[:-1]])
        return [self._outgoing[at : at + size] for at, size in zip(starts, sizes, strict=True)]


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def joined_ids(came: Sequence[tuple[RowHeader, RowRequest]]) -> TableIds:
    """Return what all ranks sent as batches of one call, in the order of ranks."""
    counts = None
    if any(request.counts is not None for _, request in came):
        counts = np.concatenate(
            [np.ones_like(one.ids) if one.counts is None else one.counts for _, one in came]
        )
    return TableIds(
        torch.from_numpy(np.concatenate([request.ids for _, request in came])),
        torch.from_numpy(np.concatenate([request.sizes for _, request in came])),
        None if counts is None else torch.from_numpy(counts),
        batches=sum(header.batches for header, _ in came),
        distinct=not any(header.flags & RowFlags.REPEATED for header, _ in came),
    )


def _event_times(came: Sequence[tuple[RowHeader, RowRequest]]) -> int | Tensor:
    times = {header.event_time for header, request in came if header.ids and request.times is None}
    if len(times) <= 1 and all(request.times is None for header, request in came if header.ids):
        return times.pop() if times else 0
    return torch.from_numpy(
        np.concatenate(
            [
                np.full(header.ids, header.event_time, np.int64) if one.times is None else one.times
                for header, one in came
            ]
        )
    )


def _summed(counts: Tensor | None, which: Tensor, keys: Tensor, places: Tensor) -> Tensor:
    if counts is None:
        return torch.zeros(0, dtype=torch.int64)
    return torch.zeros_like(keys).index_add_(0, places, counts[which])


def _latest(times: int | Tensor, which: Tensor, keys: Tensor, places: Tensor) -> Tensor:
    if not isinstance(times, Tensor):
        return torch.zeros(0, dtype=torch.int64)
    return torch.zeros_like(keys).scatter_reduce_(0, places, times[which], "amax")
