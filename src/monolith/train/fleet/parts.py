"""What a checkpoint of a fleet is made of: as that of one process, so that either restores the other's.

Rows are written and read by the servers that hold them, each its share, at paths that all
processes reach. Weights come to the chief, who writes them as ever.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from monolith.checkpoint import DensePart, RestoreOptions, SavedPart, merge_entries
from monolith.checkpoint.part import Entry, PartCut
from monolith.checkpoint.report import RestoreReport
from monolith.errors import ClusterError
from monolith.train.fleet.buffers import FleetBuffers
from monolith.train.fleet.fleet import Fleet
from monolith.train.fleet.table_work import TableWork


class TableServers(Protocol):
    """The servers of a run, as far as its checkpoints have to do with them."""

    @property
    def keeps_going(self) -> bool:
        """Whether the run outlives the loss of a server."""

    @property
    def losses(self) -> int:
        """How often servers were lost so far."""

    @property
    def fresh(self) -> Sequence[int]:
        """Servers that hold nothing of the run yet, so that a restore is for them."""

    @property
    def tables(self) -> TableWork:
        """What the servers may be asked to do with their tables."""

    def note_cut(self, step: int) -> None:
        """Hear that this step is about to be cut: all updates are done."""

    def begin_commit(self, losses: int) -> None:
        """Hear that all servers have written a checkpoint; see `ServerRecovery`."""

    def end_commit(self) -> None:
        """Hear that the checkpoint counts, or never will."""


class ServedTables:
    """The tables of all servers, held fast and written by them."""

    name = "tables"

    def __init__(self, servers: TableServers) -> None:
        self._servers = servers

    def cut(self, step: int) -> PartCut:
        cut = _ServedCut(self._servers, secrets.token_hex(8))
        self._servers.note_cut(step)
        try:
            self._servers.tables.cut(cut.name)
        except BaseException:
            cut.close(saved=False)
            raise
        return cut

    def restore(self, chain: Sequence[SavedPart], options: RestoreOptions) -> RestoreReport:
        # Of a run that goes on, only the servers that lost what they held: the others are ahead of it.
        answers = self._servers.tables.restore(chain, options, self._servers.fresh)
        if not answers:
            return RestoreReport(skipped={"tables": "all servers still hold them"})
        rows = {name: sum(answer.rows[name] for answer in answers) for name in answers[0].loaded}
        loaded = {name: f"{many:,} rows on {len(answers)} servers" for name, many in rows.items()}
        return replace(RestoreReport().merge(*(answer.report() for answer in answers)), loaded=loaded)


class _ServedCut:
    def __init__(self, servers: TableServers, name: str) -> None:
        self._servers = servers
        self.name = name
        self._losses = servers.losses
        self._commits = False
        self._closed = False

    def write(self, prefix: str, *, full: bool) -> Entry:
        written = self._servers.tables.write(self.name, prefix, full=full)
        if not self._commits:
            self._servers.begin_commit(self._losses)
            self._commits = True
        return merge_entries([answer.entry for answer in written])

    def close(self, *, saved: bool) -> None:
        if not self._closed:
            self._closed = True
            # A moment that was not saved is of no use to anybody, and a server that is gone holds it no more.
            try:
                passing = not saved or self._servers.keeps_going
                with suppress(ClusterError) if passing else nullcontext():
                    self._servers.tables.close_cut(self.name, saved=saved)
            finally:
                if self._commits:
                    self._servers.end_commit()


class ServedDense:
    """The weights, and the buffers of all workers: brought here to be saved, sent out again when restored."""

    name = "dense"

    def __init__(
        self,
        fleet: Fleet,
        inner: DensePart,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
        *,
        schedule: LRScheduler | None = None,
        buffers: FleetBuffers,
    ) -> None:
        self._fleet = fleet
        self._inner = inner
        self._parameters = dict(parameters)
        self._optimizer = optimizer
        self._schedule = schedule
        self._buffers = buffers

    def cut(self, step: int) -> PartCut:
        if self._optimizer is not None:
            self._fleet.group.fetch_dense(self._parameters, self._optimizer, schedule=self._schedule)
        with self._buffers.merged():
            return self._inner.cut(step)

    def restore(self, chain: Sequence[SavedPart], options: RestoreOptions) -> RestoreReport:
        cleared = options.custom.clears(options.model_dir)
        report = self._inner.restore(chain, options)
        if not self._fleet.resumed:
            self.send()
        elif chain and not cleared:  # servers that still hold theirs keep them, whatever was asked for
            self._fleet.restore_dense(chain[-1], options)
        return report

    def send(self) -> None:
        """Give the servers the weights as they are here."""
        if self._optimizer is not None:
            self._fleet.group.send_dense(self._parameters, self._optimizer, schedule=self._schedule)
