"""AllToAllStore and ServedRankStore: the stores of ranks that take every step together.

All ranks make the same calls in the same order, each with the IDs of its own batch. An ID belongs to the rank
that it hashes to (`Routes`). One step of two ranks, rows held by the ranks:

    lookup   rank 0 has ids 4 7          rank 1 has ids 4 9
             ── all_to_all of requests ──►  rank 0 is asked for 4 | 4       rank 1 for 7 | 9
             ◄── all_to_all of rows ──────  each rank gets its rows back in its own order
    push     ── all_to_all of gradients ─►  rank 0 sums both gradients of 4 in rank order, takes one step

Because the owner sums in rank order, the result does not depend on the speed of any rank. A rank whose
arguments are invalid sends a refusal in place of its requests: then all ranks refuse the call, and none
hangs.

With `ServedRankStore` the rows are on parameter servers: ranks look rows up there directly, and the owner of
an ID sends the summed gradient to its server, which sees one push per ID and step. The rows that a lookup
returns are the same in every run, however fast each rank is:

    lookup    after all ranks have agreed on the batch; each agrees only when its earlier updates are applied
    update    after all ranks have sent their gradients; each sends only when its earlier lookups are done
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from monolith.errors import ClusterError, FeatureError, RequestError, TableClosedError
from monolith.store.dense import check_optimizer_covers
from monolith.store.local import LocalStore
from monolith.store.rank_groups import Collective, RankGroups
from monolith.store.remote import ParameterServerStore
from monolith.store.row_requests import (
    HEADER_BYTES,
    PartitionedRequest,
    RequestPartitioner,
    RowCall,
    RowFlags,
    RowHeader,
    RowProtocol,
    RowRequest,
)
from monolith.store.store import Store, TableIds, add_stats
from monolith.table import TableConfig, TableStats, arguments
from monolith.wire.bulk import Bytes
from monolith.wire.messages import Bounds, Count, Name, read_message

_ALIGNMENT = 8
_REFUSED = bytes(HEADER_BYTES)


# One exchange between all ranks


@dataclass(frozen=True, slots=True, eq=False)
class ReceivedRequests:
    """The requests of all ranks to this one."""

    requests: list[tuple[RowHeader, RowRequest]]
    """In rank order, in host memory."""
    data: Bytes
    """The host memory of these requests."""
    there: Tensor
    """The same bytes on the device that received them."""

    def floats(self, some: NDArray[np.float32], device: torch.device) -> Tensor:
        """Return floats of a request on a device, without a copy if they were received there."""
        if self.there.device != device:
            return torch.from_numpy(some)
        offset = some.ctypes.data - self.data.ctypes.data
        return self.there[offset : offset + some.nbytes].view(torch.float32)

    def table_ids(self) -> TableIds:
        """Return the IDs of all ranks as batches of one call, in rank order."""
        counts = None
        if any(request.counts is not None for _, request in self.requests):
            counts = np.concatenate(
                [np.ones_like(one.ids) if one.counts is None else one.counts for _, one in self.requests]
            )
        return TableIds(
            torch.from_numpy(np.concatenate([request.ids for _, request in self.requests])),
            torch.from_numpy(np.concatenate([request.sizes for _, request in self.requests])),
            None if counts is None else torch.from_numpy(counts),
            batches=sum(header.batches for header, _ in self.requests),
            distinct=not any(header.flags & RowFlags.REPEATED for header, _ in self.requests),
        )

    def event_times(self) -> int | Tensor:
        """Return the event time of all IDs if it is the same, otherwise one per ID."""
        times = {
            header.event_time for header, request in self.requests if header.ids and request.times is None
        }
        if len(times) <= 1 and all(one.times is None for header, one in self.requests if header.ids):
            return times.pop() if times else 0
        per_rank = [
            np.full(header.ids, header.event_time, np.int64) if one.times is None else one.times
            for header, one in self.requests
        ]
        return torch.from_numpy(np.concatenate(per_rank))


class RankExchange:
    """One kind of call between all ranks, on a group of its own. Used by one thread at a time.

    A call is one all_to_all, with a slice for each rank: the header of the request, and the request. Both
    ends of a slice must know its length before it is sent, and only the sender knows its request. So a slice
    has a space, which both ends compute from the requests that went the same way in the last calls:

        call 1    space 72     header                      MORE ──► second all_to_all: the request, 800 bytes
        call 2    space 904    header | request, 792 bytes | zeros
        call 3    space 904    header | 832 bytes of it    MORE ──► second all_to_all: the other 40 bytes

    A rank of which one request does not fit sets MORE in all of its headers, so all ranks know that there is
    a second exchange. The int64 IDs of a request are read in place: slices and headers have multiples of 8
    bytes.
    """

    def __init__(self, collective: Collective, partitioner: RequestPartitioner, call: RowCall) -> None:
        self.collective = collective
        self.partitioner = partitioner
        partitioner.memory = self._lay_out
        self._call = call
        self._calls = 0
        # By rank: the bytes of the last requests to it and from it. What this rank has of another as `_sent`,
        # the other has of this one as `_received`.
        self._sent = [deque[int](maxlen=_REMEMBERED) for _ in range(collective.size)]
        self._received = [deque[int](maxlen=_REMEMBERED) for _ in range(collective.size)]
        self._outgoing: Bytes = np.empty(0, np.uint8)

    def exchange(
        self, partition: Callable[[], PartitionedRequest]
    ) -> tuple[PartitionedRequest, ReceivedRequests]:
        """Send every rank its part of a call; return this rank's call and the requests of all ranks to it."""
        self._calls += 1
        sent, received = ([_space(one) for one in way] for way in (self._sent, self._received))
        try:
            call = partition()
        except BaseException:
            # The other ranks wait for slices. Without this refusal they would hang until the timeout.
            self.collective.all_to_all(torch.zeros(sum(sent), dtype=torch.uint8), sent, received)
            raise
        self._fill_slices(call, sent)
        there = self.collective.all_to_all(torch.from_numpy(self._outgoing), sent, received)
        data = there.cpu().numpy()
        starts = _starts(received)
        headers = [
            self._checked(rank, data[at : at + HEADER_BYTES].tobytes()) for rank, at in enumerate(starts)
        ]
        # After this line all ranks proceed or all raise: each has seen the same headers, refusals included.
        cells = len(self.partitioner.dims)
        arrays: list[dict[str, Any]] = [
            {"cells": one.batches * cells, "ids": one.ids, "floats": one.floats, "flags": one.flags}
            for one in headers
        ]
        sizes = [RowRequest.size(**one) for one in arrays]
        begin = [at + HEADER_BYTES for at in starts]
        if any(one.flags & RowFlags.MORE for one in headers):
            there = self._with_rest(call, sent, there, received, sizes)
            data, begin = there.cpu().numpy(), _starts([_padded(size) for size in sizes])
        for rank in range(self.collective.size):
            self._sent[rank].append(len(call.requests[rank]))
            self._received[rank].append(sizes[rank])
        requests = [
            RowRequest(data[at : at + size], **one)
            for at, size, one in zip(begin, sizes, arrays, strict=True)
        ]
        return call, ReceivedRequests(list(zip(headers, requests, strict=True)), data, there)

    def _lay_out(self, sizes: Sequence[int]) -> list[Bytes]:
        """Return the memory of the requests: in the slices that are sent, if all have space there."""
        spaces = [_space(one) for one in self._sent]
        self._outgoing = np.empty(sum(spaces), np.uint8)
        if not _all_fit(sizes, spaces):
            return [np.empty(size, np.uint8) for size in sizes]
        starts = [at + HEADER_BYTES for at in _starts(spaces)]
        return [self._outgoing[at : at + size] for at, size in zip(starts, sizes, strict=True)]

    def _fill_slices(self, call: PartitionedRequest, spaces: Sequence[int]) -> None:
        """Write the headers, and as much of the requests as is not there yet."""
        fit = _all_fit([len(one) for one in call.requests], spaces)
        more = RowFlags.NONE if fit else RowFlags.MORE
        for header, request, at, space in zip(
            call.headers, call.requests, _starts(spaces), spaces, strict=True
        ):
            numbered = header._replace(number=self._calls, flags=header.flags | more)
            place = self._outgoing[at : at + space]
            place[:HEADER_BYTES] = np.frombuffer(numbered.packed(RowProtocol.RANKS), np.uint8)
            if not fit:
                place[HEADER_BYTES : HEADER_BYTES + len(request)] = request[: space - HEADER_BYTES]
            place[HEADER_BYTES + len(request) :] = 0  # this memory had something else before

    def _with_rest(
        self,
        call: PartitionedRequest,
        sent: Sequence[int],
        there: Tensor,
        received: Sequence[int],
        sizes: Sequence[int],
    ) -> Tensor:
        """Exchange what had no space; return the requests of all ranks, each padded to 8 bytes."""
        outgoing = [
            request[space - HEADER_BYTES :] for request, space in zip(call.requests, sent, strict=True)
        ]
        missing = [max(size - space + HEADER_BYTES, 0) for size, space in zip(sizes, received, strict=True)]
        rest = self.collective.all_to_all(
            torch.from_numpy(np.concatenate(outgoing)), [len(one) for one in outgoing], missing
        )
        parts = []
        for size, place, late in zip(
            sizes, torch.split(there, list(received)), torch.split(rest, missing), strict=True
        ):
            padding = there.new_zeros(_padded(size) - size)
            parts += [place[HEADER_BYTES : HEADER_BYTES + size], late, padding]
        return torch.cat(parts)

    def _checked(self, rank: int, data: bytes) -> RowHeader:
        if data == _REFUSED:
            raise ClusterError(f"rank {rank} refused the arguments of this call, so no rank applied it")
        try:
            header, number = RowHeader.read(data, RowProtocol.RANKS), self.partitioner.number
        except RequestError as error:
            raise ClusterError(f"rank {rank} sent a request that this rank cannot read: {error}") from error
        if (header.call, header.store, header.number) != (self._call, number, self._calls):
            raise ClusterError(
                f"rank {rank} makes another call: {header.call.name} {header.number} of store "
                f"{header.store}, and this rank makes {self._call.name} {self._calls} of store {number}. All "
                "ranks must run the same task, with the same settings."
            )
        return header


_REMEMBERED = 8
"""Calls whose requests decide on the space of the next one: after a large one, it is not kept for long."""


def _space(sizes: Collection[int]) -> int:
    """Return the bytes of a slice, from those of the last requests that went the same way."""
    largest = max(sizes, default=0)
    # Requests of two batches of the same size differ by a few in a thousand: few of them need MORE.
    return HEADER_BYTES + _padded(largest + largest // 32)


def _all_fit(sizes: Sequence[int], spaces: Sequence[int]) -> bool:
    return all(HEADER_BYTES + size <= space for size, space in zip(sizes, spaces, strict=True))


def _starts(sizes: Sequence[int]) -> list[int]:
    """Return where each of some pieces begins that follow each other."""
    return list(itertools.accumulate(sizes[:-1], initial=0))


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


# Gradients of all ranks


def _at_once() -> None:
    """Wait for nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class RankGradients:
    """The gradients that all ranks have sent for the IDs of this rank in one step; applied once.

    sent = store.send_gradients(ids, gradients, step=7)
    sent.apply()              # or sent.summed(), to see one gradient per ID before `apply`
    """

    ids: TableIds
    """One batch or more of each rank, in rank order."""
    gradients: Tensor
    step: int
    event_time: int | Tensor
    latest_values: Tensor | None
    store: Store
    """Holds the rows."""
    ready: Callable[[], None] = _at_once
    """Returns when the gradients may be applied."""

    def summed(self) -> RankGradients:
        """Return one gradient per ID of each table, the sum in rank order, on the CPU."""
        dims = list(self.store.tables.values())
        # A cell is one table of one batch: cell k is table k % len(dims).
        cells = list(enumerate(torch.split(self.ids.ids, self.ids.sizes.tolist())))
        floats = [size * dims[cell % len(dims)] for cell, size in enumerate(self.ids.sizes.tolist())]
        parts = torch.split(self.gradients.cpu(), floats)
        latest = None if self.latest_values is None else torch.split(self.latest_values.cpu(), floats)
        table_of_id = torch.tensor([cell % len(dims) for cell, ids in cells for _ in range(len(ids))])
        found = []
        for number, dim in enumerate(dims):
            mine = [cell for cell, _ in cells if cell % len(dims) == number]
            # keys: (unique,); inverse: (ids of the table,), the index of each ID in keys
            keys, inverse = torch.unique(torch.cat([cells[cell][1] for cell in mine]), return_inverse=True)
            first = torch.full((len(keys),), len(inverse)).scatter_reduce_(
                0, inverse, torch.arange(len(inverse)), "amin"
            )
            which = table_of_id == number
            given = torch.cat([parts[cell] for cell in mine]).view(-1, dim)
            found.append(
                (
                    keys,
                    torch.zeros(len(keys), dim).index_add_(0, inverse, given).flatten(),
                    _summed_counts(self.ids.counts, which, keys, inverse),
                    _latest_times(self.event_time, which, keys, inverse),
                    None
                    if latest is None
                    else torch.cat([latest[c] for c in mine]).view(-1, dim)[first].flatten(),
                )
            )
        keys, gradients, counts, times, values = zip(*found, strict=True)
        return replace(
            self,
            ids=TableIds(
                torch.cat(keys),
                torch.tensor([len(one) for one in keys]),
                None if self.ids.counts is None else torch.cat(counts),
            ),
            gradients=torch.cat(gradients),
            event_time=torch.cat(times) if isinstance(self.event_time, Tensor) else self.event_time,
            latest_values=None if latest is None else torch.cat(values),
        )

    def apply(self, gradients: Tensor | None = None) -> None:
        """Take one step for each distinct ID, with these gradients in place of the received ones if given."""
        self.ready()
        self.store.apply_gradients(
            self.ids,
            self.gradients if gradients is None else gradients,
            step=self.step,
            event_time=self.event_time,
            latest_values=self.latest_values,
        )


def _summed_counts(counts: Tensor | None, which: Tensor, keys: Tensor, inverse: Tensor) -> Tensor:
    if counts is None:
        return torch.zeros(0, dtype=torch.int64)
    return torch.zeros_like(keys).index_add_(0, inverse, counts[which])


def _latest_times(times: int | Tensor, which: Tensor, keys: Tensor, inverse: Tensor) -> Tensor:
    if not isinstance(times, Tensor):
        return torch.zeros(0, dtype=torch.int64)
    return torch.zeros_like(keys).scatter_reduce_(0, inverse, times[which], "amax")


# The stores


class RankStore:
    """The part that both stores of ranks have in common: summing gradients of rows and of dense weights.

    Every rank holds all dense weights.

    Args:
        holder: Applies the gradients of this rank's IDs.
        configs: All tables, the same on every rank.
        groups: The connections to the other ranks; closed by the caller.
        number: The index of this store among the model's stores, the same on every rank.
        counts_sightings: Whether `TableIds.counts` matter to an admission filter of the holder.
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
        partitioner = RequestPartitioner(configs, groups.size, number)
        partitioner.counts_sightings = counts_sightings
        self._pushes = RankExchange(groups.pushes, partitioner, RowCall.PUSH)

    @property
    def tables(self) -> Mapping[str, int]:
        return self._pushes.partitioner.dims

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def delay_compensated(self) -> bool:
        return self._pushes.partitioner.delay_compensated

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
        # No wait for lookups: a rank that has sent its gradients looks nothing up before this returns.
        replace(sent, ready=_at_once).apply()

    def send_gradients(
        self,
        ids: TableIds,
        gradients: Tensor,
        *,
        step: int = 0,
        event_time: int | Tensor = 0,
        latest_values: Tensor | None = None,
    ) -> RankGradients:
        """Do the first half of `apply_gradients`: return the gradients of all ranks for this rank's IDs."""
        self._check_open()
        pushes = self._pushes
        _, received = pushes.exchange(
            lambda: pushes.partitioner.push(
                ids, gradients, step=step, event_time=event_time, latest_values=latest_values
            )
        )
        requests, device = received.requests, self._holder.device
        latest = [received.floats(one.latest, device) for _, one in requests if one.latest is not None]
        return RankGradients(
            ids=received.table_ids(),
            gradients=torch.cat([received.floats(one.gradients, device) for _, one in requests]),
            step=step,
            event_time=received.event_times(),
            latest_values=torch.cat(latest) if latest else None,
            store=self._holder,
            ready=self._await_lookups,
        )

    def _await_lookups(self) -> None:
        """Return when rows may change because all earlier lookups are done."""

    def attach_dense(self, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """Take charge of the dense variables, which have the same values on every rank; see `Store`."""
        if self._optimizer is not None:
            raise FeatureError("this store has dense variables already; one store serves one model")
        check_optimizer_covers(parameters, optimizer)
        self._optimizer = optimizer
        self._weights = list(parameters.values())

    def push_dense(self) -> None:
        """Apply the sum of all ranks' gradients; a weight without a gradient on any rank does not change.

        Training sums them during backward instead, weighted by examples; see `monolith.runtime.ranks`.
        """
        if self._optimizer is None:
            return
        # One all-reduce of [1.0 per weight that has a gradient here | all gradients, flat].
        used = [float(weight.grad is not None) for weight in self._weights]
        there = torch.tensor(used, device=self._weights[0].device if self._weights else None)
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


_Store = Annotated[int, Bounds(0, 1 << 16)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStoreCall:
    """A call about one of the model's stores."""

    store: _Store


@dataclass(frozen=True, slots=True, kw_only=True)
class CountRankRows(RankStoreCall):
    now: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictRankRows(RankStoreCall):
    now: dict[Name, Count]


class AllToAllStore(RankStore):
    """A `Store` whose rows are held by the ranks. Lookups are made by one thread at a time, and so are
    pushes.

    While training is quiesced, one rank may look rows up alone (`solo_lookups`): the other ranks then take
    part with no IDs, as often as it asks.

    Args:
        inner: The rows of this rank; closed with the store.
        configs: All tables, the same on every rank.
        groups: The connections to the other ranks; closed by the caller.
        number: The index of this store among the model's stores, the same on every rank.

    Examples:
        >>> import torch
        >>> from monolith import AllToAllStore, LocalStore, Segment, TableConfig
        >>> from monolith.cluster.security import Guard
        >>> from monolith.config import Secret
        >>> from monolith.store import RankGroups, TableIds
        >>> from monolith.store.rank_calls import RankPort
        >>> from monolith.store.rank_keys import begin_attempt
        >>> token = Secret("shared by the ranks")
        >>> keys = begin_attempt(torch.distributed.HashStore(), token)
        >>> configs = {"item": TableConfig(name="item", segments=(Segment(dim=1, learning_rate=1.0),))}
        >>> with RankGroups(keys, rank=0, size=1, port=RankPort(guard=Guard(token=token))) as groups:
        ...     store = AllToAllStore(LocalStore.from_configs(configs), configs, groups)  # on every rank
        ...     ids = TableIds(torch.tensor([7, 8]), sizes=torch.tensor([2]))
        ...     store.apply_gradients(ids, torch.tensor([1.0, 2.0]), step=1)
        ...     store.lookup(ids)
        tensor([-1., -2.])
    """

    def __init__(
        self, inner: LocalStore, configs: Mapping[str, TableConfig], groups: RankGroups, number: int = 0
    ) -> None:
        super().__init__(inner, configs, groups, number, counts_sightings=inner.counts_sightings)
        self.inner = inner
        self._lookups, self._solo = (
            RankExchange(group, RequestPartitioner(configs, groups.size, number), RowCall.LOOKUP)
            for group in (groups.lookups, groups.control)
        )
        self._call_in: Callable[[int], None] | None = None
        groups.calls.offer(
            {
                f"stats/{number}": lambda body: self._own_stats(read_message(RankStoreCall, body)),
                f"count_expired/{number}": lambda body: self._count(read_message(CountRankRows, body)),
                f"evict/{number}": lambda body: self._drop(read_message(EvictRankRows, body)),
            }
        )

    def lookup(self, ids: TableIds) -> Tensor:
        self._check_open()  # before other ranks are called
        if self._call_in is None:
            return self._exchange(self._lookups, ids)
        self._call_in(self._number)
        return self._exchange(self._solo, ids)

    @contextmanager
    def solo_lookups(self, call_in: Callable[[int], None]) -> Iterator[None]:
        """Let this rank look rows up alone while the other ranks are quiesced, for the length of a block.

        Args:
            call_in: Called with the number of this store before each lookup: makes the other ranks call
                `answer_solo_lookup`.
        """
        self._call_in = call_in
        try:
            yield
        finally:
            self._call_in = None

    def answer_solo_lookup(self) -> None:
        """Take part in the solo lookup of another rank, with no IDs of this rank."""
        self._exchange(self._solo, TableIds.none(len(self.tables)))

    def _exchange(self, exchange: RankExchange, ids: TableIds) -> Tensor:
        call, received = exchange.exchange(lambda: exchange.partitioner.lookup(ids))
        asked = received.table_ids()
        if exchange.collective.device == self.inner.device:  # rows are sent from the device they are on
            asked = replace(asked, ids=asked.ids.to(self.inner.device))
        found = self.inner.lookup(asked)
        widths = np.array(list(self.tables.values()), np.int64)
        floats = [int((one.sizes.reshape(-1, len(widths)) * widths).sum()) for _, one in received.requests]
        wanted = call.routes.num_floats
        rows = exchange.collective.all_to_all(found, floats, wanted).cpu().numpy()
        ends = np.cumsum(wanted)
        parts = [rows[end - many : end] for end, many in zip(ends, wanted, strict=True)]
        return torch.from_numpy(call.routes.gather_rows(parts))

    # These three are called by one rank, which asks the other ranks by `RankCalls`, without a collective.

    def count_expired(self, now: int) -> dict[str, int]:
        """Return how many rows `evict` would drop on all ranks, by table."""
        now = arguments.event_second(now, "now")
        found = self._ask("count_expired", now=now)
        return {name: sum(one[name] for one in found) for name in self.tables}

    def evict(self, now: int | None = None, *, tables: Collection[str] | None = None) -> dict[str, int]:
        if now is None:  # a table's clock is the event time of its newest row, on whichever rank it is
            times = {name: stats.max_event_time for name, stats in self.stats().items()}
        else:
            times = dict.fromkeys(self.tables, arguments.event_second(now, "now"))
        times = {name: time for name, time in times.items() if tables is None or name in tables}
        found = self._ask("evict", now=times)
        return {name: sum(one.get(name, 0) for one in found) for name in self.tables}

    def stats(self) -> dict[str, TableStats]:
        """Return the statistics of each table over all ranks; `load` is their mean."""
        found = self._ask("stats")
        return {name: add_stats([TableStats(**one[name]) for one in found]) for name in self.tables}

    def close(self) -> None:
        self._closed = True
        self.inner.close()

    def _ask(self, name: str, **body: Any) -> list[dict[str, Any]]:
        self._check_open()
        return self._groups.calls.ask_all(f"{name}/{self._number}", {"store": self._number, **body})

    def _own_stats(self, _: RankStoreCall) -> dict[str, Any]:
        return {name: asdict(stats) for name, stats in self.inner.stats().items()}

    def _count(self, body: CountRankRows) -> dict[str, Any]:
        return dict(self.inner.count_expired(body.now))

    def _drop(self, body: EvictRankRows) -> dict[str, Any]:
        return {name: self.inner.table(name).evict(time) for name, time in body.now.items()}


class ServedRankStore(RankStore):
    """A `Store` of one rank whose rows are on parameter servers. Gradients are pushed by one thread at a
    time.

    Args:
        served: The parameter server store of this rank alone; closed with this one.
        configs: All tables, the same on every rank.
        groups: The connections to the other ranks; closed by the caller.
        number: The index of this store among the model's stores, the same on every rank.
    """

    def __init__(
        self,
        served: ParameterServerStore,
        configs: Mapping[str, TableConfig],
        groups: RankGroups,
        number: int = 0,
    ) -> None:
        super().__init__(served, configs, groups, number, counts_sightings=served.counts_sightings)
        self._served = served

    def lookup(self, ids: TableIds) -> Tensor:
        return self._served.lookup(ids)

    def count_expired(self, now: int) -> dict[str, int]:
        return self._served.count_expired(now)

    def evict(self, now: int | None = None, *, tables: Collection[str] | None = None) -> dict[str, int]:
        return self._served.evict(now, tables=tables)

    def stats(self) -> dict[str, TableStats]:
        """Return the statistics of each table over all servers; `load` is their mean."""
        return self._served.stats()

    def close(self) -> None:
        """Close this store; servers and connections stay open."""
        self._closed = True
        self._served.close()

    def _await_lookups(self) -> None:
        # A barrier on the thread that looks up: when all ranks are here, none has a lookup under way.
        self._groups.lookups.all_gather(torch.zeros(1))
