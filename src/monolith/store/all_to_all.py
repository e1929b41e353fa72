"""AllToAllStore: rows spread over the ranks that train together, each of which holds those that hash to it.

All ranks make the same calls in the same order, each with the ids of its own batch. A lookup is two
exchanges, ids to who holds them and rows back; gradients are one: see `rank_exchange`. While all stand still,
one of them may look rows up alone: the others then make the same calls with no ids, as often as it asks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from monolith.store.local import LocalStore
from monolith.store.rank_exchange import RankLine, RankStore, joined_ids
from monolith.store.rank_groups import RankGroups
from monolith.store.rows import RowCall, RowRequest
from monolith.store.spreading import Spreader
from monolith.store.store import TableIds, add_stats
from monolith.table import TableConfig, TableStats, arguments
from monolith.wire.messages import Bounds, Count, Name, read_message

_Store = Annotated[int, Bounds(0, 1 << 16)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OfRankStore:
    """Asks about one of the model's stores."""

    store: _Store


@dataclass(frozen=True, slots=True, kw_only=True)
class CountRankRows(OfRankStore):
    now: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictRankRows(OfRankStore):
    now: dict[Name, Count]


class AllToAllStore(RankStore):
    """A `Store` over the ranks of a run. Lookups are made by one thread at a time, and so are pushes.

    Args:
        inner: The rows of this rank; closed with the store.
        configs: Of all tables, the same on every rank.
        groups: What connects the ranks; closed by whoever made it.
        number: Which of the model's stores this is, in an order that all ranks share.
    """

    def __init__(
        self, inner: LocalStore, configs: Mapping[str, TableConfig], groups: RankGroups, number: int = 0
    ) -> None:
        super().__init__(inner, configs, groups, number, counts_sightings=inner.counts_sightings)
        self.inner = inner
        self._lookups = RankLine(groups.lookups, Spreader(configs, groups.size, number), RowCall.LOOKUP)
        self._looks = RankLine(groups.control, Spreader(configs, groups.size, number), RowCall.LOOKUP)
        self._call_in: Callable[[int], None] | None = None
        groups.calls.offer(
            {
                f"stats/{number}": lambda body: self._own_stats(read_message(OfRankStore, body)),
                f"count_expired/{number}": lambda body: self._count(read_message(CountRankRows, body)),
                f"evict/{number}": lambda body: self._drop(read_message(EvictRankRows, body)),
            }
        )

    def lookup(self, ids: TableIds) -> Tensor:
        self._check_open()  # before anybody is called
        if self._call_in is None:
            return self._exchange(self._lookups, ids)
        self._call_in(self._number)
        return self._exchange(self._looks, ids)

    @contextmanager
    def looking_alone(self, call_in: Callable[[int], None]) -> Iterator[None]:
        """Have lookups of this rank go to ranks that stand still, for the length of a block.

        Args:
            call_in: Told the number of this store, before each: has the others call `answer_look`.
        """
        self._call_in = call_in
        try:
            yield
        finally:
            self._call_in = None

    def answer_look(self) -> None:
        """Take part in a lookup of a rank that looks alone, without ids of one's own."""
        nothing = torch.empty(0, dtype=torch.int64)
        self._exchange(self._looks, TableIds(nothing, torch.zeros(len(self.tables), dtype=torch.int64)))

    def _exchange(self, line: RankLine, ids: TableIds) -> Tensor:
        spread, arrived = line.exchange(lambda: line.spreader.lookup(ids))
        came = arrived.requests
        found = self.inner.lookup(_near(joined_ids(came), line.collective.device, self.inner.device))
        widths = list(self.tables.values())
        floats = [_floats(request, widths) for _, request in came]
        wanted = spread.routes.num_floats
        rows = line.collective.all_to_all(found, floats, wanted).cpu().numpy()
        ends = np.cumsum(wanted)
        parts = [rows[end - many : end] for end, many in zip(ends, wanted, strict=True)]
        return torch.from_numpy(spread.routes.gather_rows(parts))

    def count_expired(self, now: int) -> dict[str, int]:
        """Return how many rows `evict` would drop on all ranks. This, and what follows, one rank asks."""
        now = arguments.event_second(now, "now")
        found = self._ask("count_expired", now=now)
        return {name: sum(one[name] for one in found) for name in self.tables}

    def evict(self, now: int | None = None, *, tables: Collection[str] | None = None) -> dict[str, int]:
        if now is None:  # a table's clock is that of its newest row, on whichever rank it is
            times = {name: stats.max_event_time for name, stats in self.stats().items()}
        else:
            times = dict.fromkeys(self.tables, arguments.event_second(now, "now"))
        times = {name: time for name, time in times.items() if tables is None or name in tables}
        found = self._ask("evict", now=times)
        return {name: sum(one.get(name, 0) for one in found) for name in self.tables}

    def stats(self) -> dict[str, TableStats]:
        """Return what each table holds on all ranks together; `load` is their mean."""
        found = self._ask("stats")
        return {name: add_stats([TableStats(**one[name]) for one in found]) for name in self.tables}

    def close(self) -> None:
        self._closed = True
        self.inner.close()

    # Calls of other ranks

    def _ask(self, name: str, **body: Any) -> list[dict[str, Any]]:
        self._check_open()
        return self._groups.calls.ask_all(f"{name}/{self._number}", {"store": self._number, **body})

    def _own_stats(self, _: OfRankStore) -> dict[str, Any]:
        return {name: asdict(stats) for name, stats in self.inner.stats().items()}

    def _count(self, body: CountRankRows) -> dict[str, Any]:
        return dict(self.inner.count_expired(body.now))

    def _drop(self, body: EvictRankRows) -> dict[str, Any]:
        return {name: self.inner.table(name).evict(time) for name, time in body.now.items()}


def _near(ids: TableIds, sent_from: torch.device, rows_on: torch.device) -> TableIds:
    """Return ids that lie where rows do, if those are sent from there: they are answered where they lie."""
    return replace(ids, ids=ids.ids.to(rows_on)) if sent_from == rows_on else ids


def _floats(request: RowRequest, widths: Sequence[int]) -> int:
    """Return the floats of the rows that a lookup asks for."""
    return int((request.sizes.reshape(-1, len(widths)) * np.array(widths, np.int64)).sum())
