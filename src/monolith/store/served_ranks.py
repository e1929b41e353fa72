"""ServedRankStore: rows on parameter servers, trained by ranks that take every step together.

A rank asks the servers for the rows of its own batch. Gradients go to the rank that an id hashes to, as among
ranks that hold rows themselves, and from there to the server: so each id takes one step with the sum over all
ranks, and a server hears of it once. What is looked up is the same on every run, however fast each rank is:

    lookup    after all ranks have agreed on the batch; each does so only when its updates before are done
    update    after all ranks have sent their gradients; each does so only when its lookups before are done
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from monolith.store.rank_exchange import RankStore
from monolith.store.rank_groups import RankGroups
from monolith.store.remote import ParameterServerStore
from monolith.store.store import TableIds
from monolith.table import TableConfig, TableStats


class ServedRankStore(RankStore):
    """A `Store` of one rank, over parameter servers. Gradients are pushed by one thread at a time.

    Args:
        served: The same store, as one process has it that knows no other; closed with this one.
        configs: Of all tables, the same on every rank.
        groups: What connects the ranks; closed by whoever made it.
        number: Which of the model's stores this is, in an order that all ranks share.
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
        """Return what each table holds on all servers together; `load` is their mean."""
        return self._served.stats()

    def close(self) -> None:
        """Let go of this store; servers and connections go on."""
        self._closed = True
        self._served.close()

    def _await_lookups(self) -> None:
        """Wait for all ranks to come here, on the thread that looks up: then none does any more."""
        self._groups.lookups.all_gather(torch.zeros(1))
