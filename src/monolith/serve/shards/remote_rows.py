"""RemoteRows: the rows of a model that are spread over serving servers, for its entry.

    config = ShardsConfig(discovery="files:///shared/job")
    rows = open_remote_rows(servable, config, guard=guard_caller(security))
    Predictor(DIR, rows=rows)

An ID is on the shard that its unsigned value modulo the number of shards names. A lookup sends at most one
request (a leg) to each shard, and sends all of them before it waits for the first answer:

    sent ──answer──► done
      ├──the replica fails──► sent to another replica, within the same lookup
      ├──slower than 95 % of recent answers──► a second replica is asked too (a hedge); the first answer wins
      └──no replica is left, or the deadline passes──► error; or zeros and the shard's name in the answer, if
         both the export and the config allow it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from monolith import concurrency
from monolith.cluster import Discovery, open_discovery_url
from monolith.concurrency import ThreadPoolExecutor
from monolith.errors import (
    ClusterError,
    ConfigError,
    DeadlineExceededError,
    LostStateError,
    MonolithError,
    UnavailableError,
)
from monolith.feature import FeatureIds, Gatherer
from monolith.feature.gathering import PackedFeatures
from monolith.serve.config import ShardsConfig
from monolith.serve.manifest import Servable
from monolith.serve.rows import AttachOverlay, FoundRows, RowsClaim, gather_looked_up, together
from monolith.serve.shards.hedging import NEVER, Floats, Leg, Minder, ShardAnswer
from monolith.serve.shards.protocol import read_claim
from monolith.serve.shards.replicas import HedgeBudget, Replica, ReplicaMap, ShardLine, WantedRows
from monolith.store import TableIds
from monolith.store.row_requests import (
    ANSWER_BYTES,
    Routes,
    RowCall,
    RowHeader,
    incarnation_bytes,
    read_answer,
)
from monolith.table import arguments
from monolith.wire.flight import Answer
from monolith.wire.transport import PortGuard

_HEDGERS = 8
_FOR_DEFAULTS = 0.8
"""Fraction of the client's time that a lookup may use if zeros may replace missing rows: the rest is for the
dense half."""


@dataclass(slots=True)
class ShardCounts:
    """Counts of lookups and their outcomes."""

    lookups: int = 0
    requests: int = 0
    failed_over: int = 0
    """Requests that were sent to another replica because one failed."""
    hedged: int = 0
    """Requests that were also sent to a second replica because the first was slow."""
    hedges_won: int = 0
    missing: int = 0
    """Requests whose rows were read as zeros because a shard did not answer."""
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
        servable: The manifest of the entry.
        discovery: By default the registry that `config.discovery` names, which is closed with the rows.
        guard: The token or certificate for servers; see `monolith.cluster.security.guard_caller`.
        environ: Has credentials that do not belong into the URL of a registry.

    Raises:
        ConfigError: The servable is not sharded, or the config asks for zeros that it does not allow.
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
    if discovery is None and not config.discovery:
        raise ConfigError(
            "an entry finds its serving servers in a registry; set discovery to its URL, such as "
            "files:///shared/job"
        )
    wanted = WantedRows(
        model=servable.model,
        version=servable.version,
        shards=servable.shards,
        tables={name: servable.tables[name].dim for name in sorted(servable.tables)},
        digest=servable.digest,
    )
    own = None
    if discovery is None:
        discovery = own = open_discovery_url(config.discovery, environ)
    return RemoteRows(
        wanted,
        config,
        discovery=discovery,
        guard=guard,
        missing_default=missing == "default",
        on_close=None if own is None else own.close,
    )


class RemoteRows:
    """A `RowSource` over serving servers. Thread-safe.

    Shapes: a lookup of n IDs splits into one leg per shard, with int64 IDs (n_k,), and merges their float32
    answers into (sum of ids x width,), in the order of the request.

    Example: with 2 shards, a lookup of IDs [4, 7, 9] sends [4] to shard 0 and [7, 9] to shard 1, and returns
    the rows of 4, 7 and 9 in that order.

    Args:
        wanted: The rows that servers must have.
        config: How servers are found and how long the entry waits for them.
        discovery: The registry of servers.
        guard: The token or certificate to present to servers.
        missing_default: Whether rows of a shard that does not answer are read as zeros.
        on_close: Called when the rows are closed.
    """

    def __init__(
        self,
        wanted: WantedRows,
        config: ShardsConfig,
        *,
        discovery: Discovery,
        guard: PortGuard | None = None,
        missing_default: bool = False,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._config = config
        self._tables = dict(wanted.tables)
        self._widths = np.array(list(self._tables.values()), np.int64)
        self._version_key = incarnation_bytes(wanted.version)
        self._missing_default = missing_default
        self._on_close = on_close
        self.counts = ShardCounts()
        self._limit = config.deadline.total_seconds()
        self._budget = HedgeBudget()
        self._hedgers = ThreadPoolExecutor(_HEDGERS, "shards-hedge")
        self._closed = False
        self._map = ReplicaMap(wanted, config, discovery, guard)
        self._minder = Minder(self._begin_hedge)

    @property
    def tables(self) -> Mapping[str, int]:
        """Table to the width of its rows, sorted by name."""
        return MappingProxyType(self._tables)

    @property
    def claim(self) -> None:
        """None: servers send the claim of their rows with each answer."""

    def follow(self, attach: AttachOverlay) -> None:
        """Do nothing: serving servers follow the trainer by themselves."""

    def ids(self, table: str) -> None:
        """None: the rows are on serving servers."""

    @property
    def shards(self) -> int:
        return len(self._map.shards)

    @property
    def ready(self) -> bool:
        """Whether every shard has a server that can answer."""
        return self._map.ready

    @property
    def replicas(self) -> dict[str, dict[str, str]]:
        """Shard to address to state: found, up, slow or down; see `monolith.serve.shards.replicas`."""
        return {
            shard.name: {one.address: one.state for one in shard.by_address.values()}
            for shard in self._map.shards
        }

    def wait_ready(self, seconds: float) -> bool:
        """Wait until `ready`; False if it is not by then."""
        return self._map.wait_ready(seconds)

    def refresh(self) -> None:
        """Query the registry now, in addition to every `config.refresh`."""
        self._map.refresh()

    def lookup(self, ids: TableIds, *, deadline: float | None = None) -> FoundRows:
        """Look up rows on all shards at once; see `RowSource.lookup`."""
        if self._closed:
            raise UnavailableError("the connections to serving servers were closed")
        self.counts.lookups += 1
        try:
            return self._lookup(ids, deadline)
        except MonolithError:
            self.counts.errors += 1
            raise

    def gather(
        self, gatherer: Gatherer, ids: FeatureIds | PackedFeatures, *, deadline: float | None = None
    ) -> tuple[Sequence[Tensor], FoundRows]:
        """Look up rows and gather them; see `RowSource.gather`."""
        return gather_looked_up(self, gatherer, ids, deadline)

    def close(self) -> None:
        """Close all connections; lookups in flight end in an error. Closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._minder.close()
        self._hedgers.shutdown(wait=True, cancel_futures=True)
        self._map.close()
        if self._on_close is not None:
            self._on_close()

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
        requests = routes.write_requests([keys])
        legs = [
            Leg(
                shard,
                RowHeader(RowCall.LOOKUP, 0, ids.batches, count, incarnation=self._version_key).packed(),
                request,
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
        """Return the answer to a leg; None if it is missing and its rows are read as zeros."""
        try:
            return self._receive(leg)
        except ClusterError as error:
            if self._missing_default and (deadline is None or concurrency.monotonic() < deadline):
                return None
            if leg.late:
                raise DeadlineExceededError(f"{leg.shard.name} did not answer before the deadline") from error
            raise

    def _until(self, deadline: float | None) -> float:
        now = concurrency.monotonic()
        if deadline is None:
            return now + self._limit
        left = deadline - now
        if left <= 0:
            raise DeadlineExceededError("the deadline passed before rows were looked up")
        return now + min(self._limit, left * (_FOR_DEFAULTS if self._missing_default else 1.0))

    def _send(self, leg: Leg) -> None:
        """Send a leg to a replica, or to the next one if that fails. If none is left, the leg has no line."""
        while (replica := leg.shard.choose(leg.tried)) is not None and not self._send_to(leg, replica):
            pass

    def _send_to(self, leg: Leg, replica: Replica) -> bool:
        """Send a leg to a replica; return False if that failed, which marks the replica as down."""
        for make in (replica.line, replica.new_line):
            left = leg.deadline - concurrency.monotonic()
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
                    # A reused connection fails if the server restarted since: one new connection tells.
                    if line.reused:
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
        """Wait for the answer to a leg, from any replica.

        Each turn of the loop waits for one line. A failed line is replaced by the running hedge if there is
        one, else by another replica; the loop ends when no replica is left or the deadline has passed.
        """
        while (line := leg.line) is not None:
            leg.wait_from(concurrency.monotonic())
            self._minder.watch(leg)
            try:
                rows = self._checked(line.stream.receive(), leg)
            except MonolithError as error:
                leg.end()
                self._minder.forget(leg)
                if leg.answer is not None:  # the hedge was faster and cancelled this line
                    line.close()
                    return leg.answer
                if leg.late:
                    line.close()
                    self._map.lost_race(line.replica, concurrency.monotonic() - leg.sent_at)
                    raise
                if not _may_fail_over(line.stream.broken, error):
                    line.give_back()
                    raise
                line.close()
                if (found := self._hedged(leg)) is not None:
                    self._map.failed(line.replica, error)
                    return found
                self._fail_over(leg, line, error)
            else:
                self._minder.forget(leg)
                leg.finish(keep_line=True)
                self._end_hedge(leg)
                line.replica.races_lost = 0
                leg.shard.hedge.note(concurrency.monotonic() - leg.sent_at)
                return rows
        if leg.late:
            raise DeadlineExceededError(f"{leg.shard.name} did not answer before the deadline")
        raise leg.shard.error()

    def _fail_over(self, leg: Leg, line: ShardLine, error: MonolithError) -> None:
        """Send a leg again after its line failed: to a restarted server, else to another replica."""
        self.counts.failed_over += 1
        if line.reused:  # the server may have restarted since the connection was made
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
                f"{leg.shard.name} answered with {len(answer.data)} bytes, {4 * leg.floats} were expected"
            )
        return ShardAnswer(answer.data.view(np.float32), read_claim(answer.header))

    # Hedging

    def _begin_hedge(self, leg: Leg) -> None:
        """Ask a second replica for a leg that is slow.

        Before the longest wait only a replica that is up is asked, and only within the hedge budget: if all
        replicas are slow because of load, hedges would add to it. After the longest wait, any replica is.
        Called by the minder's thread, so it must not wait: the request is sent by a thread of the pool.
        """
        with leg.lock:
            line = leg.line
            if line is None or leg.done or self._closed:
                return
            longest = leg.sent_at + self._config.hedge_most.total_seconds()
            patient = concurrency.monotonic() < longest
            replica = leg.shard.choose(leg.tried | {line.replica}, only_up=patient)
            if replica is None or (patient and line.replica.state == "up" and not self._budget.spend()):
                leg.hedge_at = longest if patient else NEVER
                return
            self.counts.hedged += 1
            leg.tried |= {line.replica, replica}
            leg.hedge = self._hedgers.submit(self._ask_second, leg, line.replica, replica)

    def _ask_second(self, leg: Leg, slow: Replica, replica: Replica) -> ShardAnswer:
        """Ask a second replica; if it answers first, cancel the line of the first."""
        second = Leg(leg.shard, leg.header, leg.data, leg.floats, leg.deadline, hedged=False)
        if not self._send_to(second, replica) or (line := second.line) is None:
            raise leg.shard.error()
        leg.second = second
        if leg.done:  # the first replica answered while this request was sent
            self._end_hedge(leg)
        self._minder.watch(second)
        try:
            rows = self._checked(line.stream.receive(), second)
        except MonolithError as error:
            second.finish(keep_line=False)
            if second.late:
                self._map.lost_race(replica, concurrency.monotonic() - second.sent_at)
            else:
                self._map.failed(replica, error)
            raise
        finally:
            self._minder.forget(second)
        second.finish(keep_line=True)
        if leg.answer_with(rows):
            self.counts.hedges_won += 1
            self._map.lost_race(slow, concurrency.monotonic() - leg.sent_at)
        return rows

    def _end_hedge(self, leg: Leg) -> None:
        """Shorten the deadline of the second replica, now that the first has answered.

        It is not cancelled at once: cancelling closes its connection, which is worth more than the answer.
        """
        if (second := leg.second) is not None and not second.done:
            second.deadline = min(
                second.deadline, concurrency.monotonic() + self._config.hedge_most.total_seconds()
            )
            self._minder.watch(second)

    def _hedged(self, leg: Leg) -> ShardAnswer | None:
        """Wait for the second replica, if one was asked, after the first has failed."""
        if leg.hedge is None:
            return None
        try:
            return leg.hedge.result(max(0.0, leg.deadline - concurrency.monotonic()))
        except (MonolithError, TimeoutError, CancelledError):  # cancelled: `close` came before it was sent
            return None


def _may_fail_over(broken: bool, error: MonolithError) -> bool:
    """Whether another replica may answer: not if this one refused the request itself, as all would."""
    return broken or isinstance(error, (LostStateError, UnavailableError)) or type(error) is ClusterError
