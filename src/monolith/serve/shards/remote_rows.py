"""RemoteRows: the rows of a model that are spread over serving servers, for its entry.

    config = ShardsConfig(discovery="files:///shared/job")
    rows = open_remote_rows(servable, config, guard=guard_caller(security))
    Predictor(DIR, rows=rows)

An id is on the shard that its number, without a sign, modulo the number of shards says. A lookup sends at
most one request to each shard, all before it waits for the first answer. A replica that fails is left for
another at once, within the same lookup; one that is slow is raced against another; a shard that does not
answer at all is an error, or, where the export and the config allow it, zeros and the shard's name in the
answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Self

import numpy as np
import torch

from monolith.cluster import Discovery, open_discovery_url
from monolith.errors import (
    ClusterError,
    ConfigError,
    DeadlineExceededError,
    LostStateError,
    MonolithError,
    UnavailableError,
)
from monolith.serve.config import ShardsConfig
from monolith.serve.manifest import Servable
from monolith.serve.rows import FoundRows, RowsClaim, together
from monolith.serve.shards.hedging import NEVER, Floats, Leg, Minder, ShardAnswer
from monolith.serve.shards.protocol import read_claim
from monolith.serve.shards.replicas import HedgeBudget, Replica, ReplicaMap, ShardLine, WantedRows
from monolith.store import TableIds
from monolith.store.row_requests import (
    ANSWER_BYTES,
    Routes,
    RowCall,
    RowHeader,
    RowRequest,
    incarnation_bytes,
    read_answer,
)
from monolith.table import arguments
from monolith.wire.flight import Answer, PortGuard

_HEDGERS = 8
_FOR_DEFAULTS = 0.8
"""Of the caller's time, where zeros may stand for what does not come: the rest is for the answer."""


@dataclass(slots=True)
class ShardCounts:
    """What happened to lookups so far."""

    lookups: int = 0
    requests: int = 0
    failed_over: int = 0
    """Requests that were made again because a replica failed."""
    hedged: int = 0
    """Requests that another replica was asked as well."""
    hedges_won: int = 0
    missing: int = 0
    """Requests that were answered with zeros, since a shard did not answer."""
    errors: int = 0
    """Lookups that ended in an error."""


def open_remote_rows(
    servable: Servable,
    config: ShardsConfig,
    *,
    discovery: Discovery | None = None,
    guard: PortGuard | None = None,
    environ: Mapping[str, str] | None = None,
) -> RemoteRows:
    """Return the rows of an entry's servable.

    Args:
        servable: What the manifest of the entry says.
        discovery: By default what `config.discovery` names, which is closed with the rows.
        guard: What to present to servers; see `monolith.cluster.security.guard_caller`.
        environ: Has what does not belong into the URL of a registry.

    Raises:
        ConfigError: The servable is not sharded, or the config wants what it does not allow.
    """
    if servable.shards < 1:
        raise ConfigError(f"version {servable.version} of {servable.model} has its rows in its own folder")
    if config.shards not in (0, servable.shards):
        raise ConfigError(
            f"shards is {config.shards}, and version {servable.version} was exported for {servable.shards}"
        )
    missing = config.missing or servable.missing_rows
    if missing == "default" and servable.missing_rows != "default":
        raise ConfigError(
            "missing = default answers with zeros for the rows of servers that do not answer; "
            f"{servable.model} was exported without allowing that. Export it with missing_rows = default"
        )
    return RemoteRows(
        config,
        model=servable.model,
        version=servable.version,
        shards=servable.shards,
        tables={name: table.dim for name, table in servable.tables.items()},
        missing_default=missing == "default",
        digest=servable.digest,
        discovery=discovery,
        guard=guard,
        environ=environ,
    )


class RemoteRows:
    """A `RowSource` over serving servers. Thread-safe.

    Args:
        config: How servers are found and waited for.
        model: Whose servers, by the name they are registered with.
        version: The version that this entry serves.
        shards: How many there are; by default `config.shards`.
        tables: Table to the width of its rows.
        missing_default: Whether zeros may stand for the rows of a shard that does not answer; by default
            whether `config.missing` says so.
        digest: Of the export; None takes servers of any export of that version.
        discovery: As of `open_remote_rows`.
        guard: As of `open_remote_rows`.
    """

    def __init__(
        self,
        config: ShardsConfig,
        *,
        model: str,
        version: str,
        tables: Mapping[str, int],
        shards: int | None = None,
        missing_default: bool | None = None,
        digest: str | None = None,
        discovery: Discovery | None = None,
        guard: PortGuard | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        count = config.shards if shards is None else shards
        if count < 1:
            raise ConfigError(f"rows are spread over at least 1 shard, got {count}")
        if discovery is None and not config.discovery:
            raise ConfigError(
                "an entry finds its serving servers in a registry; set discovery to its URL, such as "
                "files:///shared/job"
            )
        self._config = config
        self._tables = {name: tables[name] for name in sorted(tables)}
        self._widths = np.array(list(self._tables.values()), np.int64)
        self._version_key = incarnation_bytes(version)
        self._missing_default = config.missing == "default" if missing_default is None else missing_default
        self._own = open_discovery_url(config.discovery, environ) if discovery is None else None
        found = discovery if self._own is None else self._own
        assert found is not None
        wanted = WantedRows(model=model, version=version, shards=count, tables=self._tables, digest=digest)
        self.counts = ShardCounts()
        self._limit = config.deadline.total_seconds()
        self._budget = HedgeBudget()
        self._hedgers = ThreadPoolExecutor(_HEDGERS, "shards-hedge")
        self._closed = False
        self._map = ReplicaMap(wanted, config, found, guard)
        self._minder = Minder(self._begin_hedge)

    @property
    def tables(self) -> Mapping[str, int]:
        """Table to the width of its rows, sorted by name."""
        return MappingProxyType(self._tables)

    @property
    def shards(self) -> int:
        return len(self._map.shards)

    @property
    def ready(self) -> bool:
        """Whether every shard has a server that can be asked."""
        return self._map.ready

    @property
    def replicas(self) -> dict[str, dict[str, str]]:
        """Shard to address to state: up, slow, down, found (and not greeted yet)."""
        return {
            shard.name: {one.address: one.state for one in shard.by_address.values()}
            for shard in self._map.shards
        }

    def wait_ready(self, seconds: float) -> bool:
        """Wait until `ready`; False if it is not by then."""
        return self._map.wait_ready(seconds)

    def refresh(self) -> None:
        """Ask the registry now. It is asked every `config.refresh` anyway."""
        self._map.refresh()

    def lookup(self, ids: TableIds, *, deadline: float | None = None) -> FoundRows:
        """As `RowSource.lookup`."""
        if self._closed:
            raise UnavailableError("the connections to serving servers were closed")
        self.counts.lookups += 1
        try:
            return self._lookup(ids, deadline)
        except MonolithError:
            self.counts.errors += 1
            raise

    def close(self) -> None:
        """Let go of all connections; lookups under way end in an error. Closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._minder.close()
        self._hedgers.shutdown(wait=True, cancel_futures=True)
        self._map.close()
        if self._own is not None:
            self._own.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # One lookup

    def _lookup(self, ids: TableIds, deadline: float | None) -> FoundRows:
        until = self._until(deadline)
        keys, sizes = arguments.id_array(ids.ids), arguments.id_array(ids.sizes, "sizes")
        routes = Routes(keys, sizes, self._widths, ids.batches, self.shards)
        requests = [RowRequest(cells=len(sizes), ids=count) for count in routes.num_ids]
        for request, shares in zip(requests, routes.sizes, strict=True):
            request.sizes[:] = shares
        routes.spread_ids([request.ids for request in requests])
        legs = [
            Leg(
                shard,
                RowHeader(RowCall.LOOKUP, 0, ids.batches, count, incarnation=self._version_key).packed(),
                request.data,
                floats,
                until,
                hedged=self._config.hedge,
            )
            for shard, request, count, floats in zip(
                self._map.shards, requests, routes.num_ids, routes.num_floats, strict=True
            )
        ]
        missing: list[str] = []
        answers: list[Floats] = []
        claims: list[RowsClaim] = []
        try:
            for leg in legs:
                if leg.floats:
                    self._send(leg)
            for leg in legs:
                if not leg.floats:
                    answers.append(np.empty(0, np.float32))
                elif (found := self._answer(leg, deadline)) is not None:
                    answers.append(found.rows)
                    claims.append(found.claim)
                else:
                    self.counts.missing += 1
                    missing.append(leg.shard.name)
                    answers.append(np.zeros(leg.floats, np.float32))
        except BaseException:
            for leg in legs:
                self._minder.forget(leg)
                leg.finish(keep_line=False)
            raise
        rows = torch.from_numpy(routes.gather_rows(answers))
        return FoundRows(rows, tuple(missing), together(claims) if claims else None)

    def _answer(self, leg: Leg, deadline: float | None) -> ShardAnswer | None:
        """Return the answer to a leg; None where zeros may stand for it."""
        try:
            return self._receive(leg)
        except ClusterError as error:
            if self._missing_default and (deadline is None or time.monotonic() < deadline):
                return None
            if leg.late:
                raise DeadlineExceededError(f"{leg.shard.name} did not answer before the deadline") from error
            raise

    def _until(self, deadline: float | None) -> float:
        now = time.monotonic()
        if deadline is None:
            return now + self._limit
        left = deadline - now
        if left <= 0:
            raise DeadlineExceededError("the deadline has passed before rows were asked for")
        return now + min(self._limit, left * (_FOR_DEFAULTS if self._missing_default else 1.0))

    def _send(self, leg: Leg) -> None:
        """Send a leg to a replica, or to the next where that fails. Where none is left, it has no line."""
        while (replica := leg.shard.choose(leg.tried)) is not None and not self._send_to(leg, replica):
            pass

    def _send_to(self, leg: Leg, replica: Replica) -> bool:
        """Whether a leg could be sent to a replica; if not, that counts as down."""
        for make in (replica.line, replica.new_line):
            left = leg.deadline - time.monotonic()
            if left <= 0:
                leg.late = True
                break
            line = None
            try:
                line = make(left)
                line.stream.send_message(leg.header, leg.data)
            except MonolithError as error:
                if line is not None:
                    line.close()
                    if line.reused:  # the server may only have restarted
                        replica.drop_idle()
                        continue
                self._map.failed(replica, error)
                break
            self.counts.requests += 1
            self._budget.earn()
            leg.begin(line)
            return True
        leg.tried.add(replica)
        return False

    def _receive(self, leg: Leg) -> ShardAnswer:
        """Return the answer to a leg, from whichever replica."""
        while (line := leg.line) is not None:
            leg.wait_from(time.monotonic())
            self._minder.watch(leg)
            try:
                rows = self._checked(line.stream.receive(), leg)
            except MonolithError as error:
                leg.end()
                self._minder.forget(leg)
                if leg.answer is not None:  # another replica was faster, and our line was cut
                    line.close()
                    return leg.answer
                if leg.late:
                    line.close()
                    self._map.lost_race(line.replica, time.monotonic() - leg.sent_at)
                    raise
                if not _may_go_on(line.stream.broken, error):
                    line.give_back()
                    raise
                line.close()
                if (found := self._hedged(leg)) is not None:
                    self._map.failed(line.replica, error)
                    return found
                self._go_on(leg, line, error)
            else:
                self._minder.forget(leg)
                leg.finish(keep_line=True)
                self._end_hedge(leg)
                line.replica.races_lost = 0
                leg.shard.hedge.note(time.monotonic() - leg.sent_at)
                return rows
        if leg.late:
            raise DeadlineExceededError(f"{leg.shard.name} did not answer before the deadline")
        raise leg.shard.error()

    def _go_on(self, leg: Leg, line: ShardLine, error: MonolithError) -> None:
        """Send a leg again, whose line has failed."""
        self.counts.failed_over += 1
        if line.reused:  # the server may only have restarted
            line.replica.drop_idle()
            if self._send_to(leg, line.replica):
                return
        else:
            leg.tried.add(line.replica)
            self._map.failed(line.replica, error)
        self._send(leg)

    def _checked(self, answer: Answer, leg: Leg) -> ShardAnswer:
        _, floats = read_answer(answer.header[:ANSWER_BYTES])
        if floats != leg.floats or len(answer.data) != 4 * floats:
            raise UnavailableError(
                f"{leg.shard.name} answered with {len(answer.data)} bytes in place of {4 * leg.floats}"
            )
        return ShardAnswer(answer.data.view(np.float32), read_claim(answer.header))

    # Hedging

    def _begin_hedge(self, leg: Leg) -> None:
        """Ask another replica that is up, if not too many requests are raced already; or, after the longest
        wait that there is, any other."""
        with leg.lock:
            line = leg.line
            if line is None or leg.done or self._closed:
                return
            longest = leg.sent_at + self._config.hedge_most.total_seconds()
            patient = time.monotonic() < longest
            replica = leg.shard.choose(leg.tried | {line.replica}, only_up=patient)
            if replica is None or (patient and line.replica.state == "up" and not self._budget.spend()):
                leg.hedge_at = longest if patient else NEVER
                return
            self.counts.hedged += 1
            leg.tried |= {line.replica, replica}
            leg.hedge = self._hedgers.submit(self._ask_also, leg, line.replica, replica)

    def _ask_also(self, leg: Leg, slow: Replica, replica: Replica) -> ShardAnswer:
        """Ask another replica; if it answers first, end the wait for the first."""
        also = Leg(leg.shard, leg.header, leg.data, leg.floats, leg.deadline, hedged=False)
        if not self._send_to(also, replica) or (line := also.line) is None:
            raise leg.shard.error()
        leg.also = also
        if leg.done:  # meanwhile
            self._end_hedge(leg)
        self._minder.watch(also)
        try:
            rows = self._checked(line.stream.receive(), also)
        except MonolithError as error:
            also.finish(keep_line=False)
            if also.late:
                self._map.lost_race(replica, time.monotonic() - also.sent_at)
            else:
                self._map.failed(replica, error)
            raise
        finally:
            self._minder.forget(also)
        also.finish(keep_line=True)
        if leg.answer_with(rows):
            self.counts.hedges_won += 1
            self._map.lost_race(slow, time.monotonic() - leg.sent_at)
        return rows

    def _end_hedge(self, leg: Leg) -> None:
        """The first replica has answered: the other, if it was asked, has only a moment left to do so. It is
        not cut off at once, since a connection is worth more than the answer."""
        if (also := leg.also) is not None and not also.done:
            also.deadline = min(also.deadline, time.monotonic() + self._config.hedge_most.total_seconds())
            self._minder.watch(also)

    def _hedged(self, leg: Leg) -> ShardAnswer | None:
        """Wait for the other replica that was asked, if one was, now that the first has failed."""
        if leg.hedge is None:
            return None
        try:
            return leg.hedge.result(max(0.0, leg.deadline - time.monotonic()))
        except (MonolithError, TimeoutError):
            return None


def _may_go_on(broken: bool, error: MonolithError) -> bool:
    """Whether another replica may answer what this one did not: not what it refuses with reason."""
    return broken or isinstance(error, (LostStateError, UnavailableError)) or type(error) is ClusterError
