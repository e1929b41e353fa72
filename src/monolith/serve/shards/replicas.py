"""The replicas of each shard, their states, and the connections to them.

    found ──hello──> up ──lost races──> slow  ──hello──> up
                     up ──failed──────> down  ──hello──> up

Requests go to replicas that are up, to a slow one only if none is up, and never to one that is down or was
only just found: a request must not wait for a machine that is gone. Threads of the map probe those replicas
until they answer as they should. If the registry fails, or lists no server, the last good map stays in use. A
replica that is no longer listed, while others are, is dropped.

`HedgeDelay` decides when an answer counts as slow: when it takes longer than 95 % of recent answers.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Mapping, Set
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from monolith import concurrency
from monolith.cluster import Discovery
from monolith.concurrency import Future, ThreadPoolExecutor, wait
from monolith.errors import MonolithError, UnavailableError
from monolith.serve.config import ShardsConfig
from monolith.serve.shards.protocol import SERVICE, ShardAbout, misfit, shard_part, shard_role
from monolith.wire.flight import Caller, CallStream
from monolith.wire.messages import read_message
from monolith.wire.transport import PortGuard

_log = logging.getLogger(__name__)

State = Literal["found", "up", "slow", "down"]

_IDLE = 10.0
"""Seconds after which an idle connection is closed."""
_PROBERS = 8
_RACES = 3
"""Races that a replica may lose in a row before it counts as slow: one in twenty requests is raced anyway."""
_RECENT = 256
_EVERY = 32
"""The delay is computed again after so many answers."""
_QUANTILE = 0.95
_BURST = 10.0
_PER_REQUEST = 0.1


class HedgeDelay:
    """How long to wait for a replica before another is asked: the 95th percentile of recent answers, bounded.

    It takes no lock: an answer that is lost in a race between threads is one of hundreds.
    """

    def __init__(self, least: float, most: float) -> None:
        self._least, self._most = least, most
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._noted = 0
        self.seconds = most

    def note(self, seconds: float) -> None:
        """Record the seconds of one answer."""
        self._recent.append(seconds)
        self._noted += 1
        if self._noted % _EVERY == 0:
            known = sorted(self._recent.copy())
            slow = known[min(len(known) - 1, int(_QUANTILE * len(known)))]
            self.seconds = min(self._most, max(self._least, slow))


class HedgeBudget:
    """Limits hedges to one request in ten, with bursts of ten.

    If all replicas are slow because of load, hedges would add to it.
    """

    def __init__(self) -> None:
        self._left = _BURST

    def earn(self) -> None:
        """Count a request."""
        self._left = min(_BURST, self._left + _PER_REQUEST)

    def spend(self) -> bool:
        """Take one hedge from the budget; return False if it is empty."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedRows:
    """The rows that an entry needs: a server must describe itself by these values (see `ShardAbout`)."""

    model: str
    version: str
    shards: int
    tables: Mapping[str, int]
    """Table to the width of its rows, sorted by name."""
    digest: str | None = None
    """Digest of the export; None accepts servers of any export of that version."""

    def of_shard(self, shard: int) -> dict[str, object]:
        wanted: dict[str, object] = {
            "model": self.model,
            "version": self.version,
            "shard": shard,
            "shards": self.shards,
            "tables": dict(self.tables),
        }
        return wanted if self.digest is None else wanted | {"digest": self.digest}


class ShardLine:
    """A connection with a stream on it, for one request at a time."""

    def __init__(self, replica: Replica, caller: Caller, stream: CallStream) -> None:
        self.replica = replica
        self.stream = stream
        self._caller = caller
        self.reused = False
        """Whether it was used before: then a failure may only mean that the server has restarted."""
        self.idle_since = 0.0

    def give_back(self) -> None:
        """Keep it for the next request, unless it is broken."""
        self.replica.keep(self)

    def close(self) -> None:
        self.stream.close()
        self._caller.close()


class Replica:
    """One server of a shard. Thread-safe."""

    def __init__(self, wanted: dict[str, object], address: str, guard: PortGuard | None) -> None:
        self.address = address
        self.state: State = "found"
        self.why = "it has not answered a probe"
        self.in_flight = 0
        """Approximate number of requests that wait for it; changed without a lock."""
        self.races_lost = 0
        """Races that it lost in a row."""
        self.probe_at = 0.0
        """When to probe it next."""
        self.probing: Future[None] | None = None
        self._wanted = wanted
        self._guard = guard
        self._lock = concurrency.Lock()  # guards what follows
        self._idle: list[ShardLine] = []
        self._closed = False

    def line(self, seconds: float) -> ShardLine:
        """Return an idle connection, or a new one that is made within so many seconds.

        Raises:
            RetryableError: It does not answer.
            MonolithError: Another server listens at the address.
        """
        with self._lock:
            if self._idle:
                line = self._idle.pop()
                line.reused = True
                return line
        return self.new_line(seconds)

    def new_line(self, seconds: float) -> ShardLine:
        """Return a new connection; see `line`."""
        caller = Caller(
            SERVICE, self.address, guard=self._guard, timeout=timedelta(seconds=max(seconds, 0.001))
        )
        try:
            about = read_message(ShardAbout, caller.call("hello", version=self._wanted["version"]))
            if (wrong := misfit(about, self._wanted)) is not None:
                raise UnavailableError(f"the server at {self.address} is another one: {wrong}")
            return ShardLine(self, caller, caller.open_stream())
        except BaseException:
            caller.close()
            raise

    def keep(self, line: ShardLine) -> None:
        """Take a connection back."""
        line.idle_since = concurrency.monotonic()
        with self._lock:
            if not (line.stream.broken or self._closed):
                self._idle.append(line)
                return
        line.close()

    def drop_idle(self, before: float | None = None) -> None:
        """Close the idle connections, or those idle since before a time."""
        with self._lock:
            gone = [line for line in self._idle if before is None or line.idle_since < before]
            self._idle = [line for line in self._idle if line not in gone]
        for line in gone:
            line.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self.drop_idle()


class ShardReplicas:
    """The replicas of one shard."""

    def __init__(self, shard: int, role: str, hedge: HedgeDelay) -> None:
        self.name = shard_part(shard)
        self.role = role
        self.hedge = hedge
        self.by_address: dict[str, Replica] = {}  # replaced as a whole: requests take no lock

    def choose(self, tried: Set[Replica] = frozenset(), *, only_up: bool = False) -> Replica | None:
        """Return a replica to ask: of two that are up, the less busy one; None if there is none.

        Args:
            only_up: Whether to return None rather than a slow replica if none is up.
        """
        members = [one for one in self.by_address.values() if one not in tried]
        able = [one for one in members if one.state == "up"]
        if not able and not only_up:
            able = [one for one in members if one.state == "slow"]
        # The power of two choices: the less busy one of two random replicas. Comparing all would send every
        # thread to the same idle replica, because `in_flight` is read without a lock.
        if len(able) > 2:
            able = random.sample(able, 2)
        elif len(able) == 2 and random.random() < 0.5:
            able.reverse()
        return min(able, key=lambda one: one.in_flight) if able else None

    @property
    def ready(self) -> bool:
        return any(one.state in ("up", "slow") for one in self.by_address.values())

    def error(self) -> UnavailableError:
        """Return the error for a shard without a replica that can be asked."""
        members = list(self.by_address.values())
        if not members:
            return UnavailableError(
                f"{self.name}: no server is registered as {self.role}. Start its serving servers with "
                "the registry of the entry"
            )
        each = "; ".join(f"{one.address} ({one.why or one.state})" for one in members)
        return UnavailableError(f"{self.name}: none of its {len(members)} servers answers: {each}")


class ReplicaMap:
    """The replicas of all shards, kept up to date by a thread until it is closed.

    Args:
        wanted: The rows that they must have.
        discovery: The registry; the caller closes it.
        guard: The token or certificate to present to servers.
    """

    def __init__(
        self, wanted: WantedRows, config: ShardsConfig, discovery: Discovery, guard: PortGuard | None
    ) -> None:
        self._wanted = wanted
        self._config = config
        self._discovery = discovery
        self._guard = guard
        least, most = config.hedge_least.total_seconds(), config.hedge_most.total_seconds()
        self.shards = [
            ShardReplicas(shard, shard_role(wanted.model, shard), HedgeDelay(least, most))
            for shard in range(wanted.shards)
        ]
        self._said: dict[str, str] = {}
        self._wake = concurrency.Event()
        self._stopped = False
        self._probers = ThreadPoolExecutor(_PROBERS, "shards-probe")
        self._within = max(config.deadline, config.retry).total_seconds()
        self.refresh()
        wait(self._probe(), timeout=self._within)
        self._thread = concurrency.Thread(target=self._keep, name="shards-map", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether every shard has a replica that can answer."""
        return all(shard.ready for shard in self.shards)

    def wait_ready(self, seconds: float) -> bool:
        """Wait until `ready`; False if it is not by then."""
        until = concurrency.monotonic() + seconds
        while not self.ready:
            if self._stopped or concurrency.monotonic() >= until:
                return False
            concurrency.sleep(0.02)
        return True

    def failed(self, replica: Replica, error: Exception) -> None:
        """Mark a replica as down after a failed request, until a probe succeeds."""
        replica.state, replica.why = "down", str(error)
        replica.drop_idle()
        replica.probe_at = 0.0
        self._wake.set()

    def lost_race(self, replica: Replica, seconds: float) -> None:
        """Count a lost race. After a few in a row the replica is slow, until a probe succeeds."""
        replica.races_lost += 1
        if replica.state == "up" and replica.races_lost >= _RACES:
            replica.state = "slow"
            replica.why = f"it had not answered after {1000 * seconds:.0f} ms"
            replica.probe_at = concurrency.monotonic() + self._config.retry.total_seconds()

    def refresh(self) -> None:
        """Query the registry. The map's thread calls it."""
        for number, shard in enumerate(self.shards):
            try:
                found = set(self._discovery.query(shard.role).values())
            except (MonolithError, OSError) as error:
                self._say(
                    shard.role,
                    f"cannot query the registry for {shard.role}, keeping the last known servers: {error}",
                )
                continue
            if not found:
                self._say(
                    shard.role, f"no server is registered as {shard.role}; keeping the last known servers"
                )
                # A server that is stopping waits for its idle connections to close.
                for replica in shard.by_address.values():
                    replica.drop_idle(concurrency.monotonic() - self._config.refresh.total_seconds())
                continue
            self._said.pop(shard.role, None)
            if found == shard.by_address.keys():
                continue
            old = shard.by_address
            wanted = self._wanted.of_shard(number)
            shard.by_address = {
                address: old.get(address) or Replica(wanted, address, self._guard)
                for address in sorted(found)
            }
            for address in old.keys() - found:
                old[address].close()
            self._wake.set()

    def close(self) -> None:
        self._stopped = True
        self._wake.set()
        self._thread.join()
        self._probers.shutdown(wait=True, cancel_futures=True)
        for shard in self.shards:
            for replica in shard.by_address.values():
                replica.close()

    # The thread

    def _keep(self) -> None:
        refresh, retry = self._config.refresh.total_seconds(), self._config.retry.total_seconds()
        refresh_at = concurrency.monotonic() + refresh
        while not self._stopped:
            self._wake.wait(min(retry, refresh))
            self._wake.clear()
            now = concurrency.monotonic()
            if now >= refresh_at:
                try:
                    self.refresh()
                except Exception:  # whatever a registry raises, requests continue
                    _log.exception("sharded serving: cannot refresh the map, retrying")
                refresh_at = concurrency.monotonic() + refresh
            self._probe()
            for shard in self.shards:
                for replica in shard.by_address.values():
                    replica.drop_idle(now - _IDLE)

    def _probe(self) -> list[Future[None]]:
        """Probe all replicas that are not up, each on a thread of the pool."""
        begun, now = [], concurrency.monotonic()
        for shard in self.shards:
            for replica in shard.by_address.values():
                busy = replica.probing is not None and not replica.probing.done()
                if replica.state != "up" and not busy and now >= replica.probe_at and not self._stopped:
                    replica.probing = self._probers.submit(self._probe_one, shard, replica)
                    begun.append(replica.probing)
        return begun

    def _probe_one(self, shard: ShardReplicas, replica: Replica) -> None:
        try:
            line = replica.new_line(self._within)
        except Exception as error:
            replica.state, replica.why = "down", str(error)
            self._say(replica.address, f"{shard.name}: {replica.address} cannot be used: {error}")
            replica.probe_at = concurrency.monotonic() + self._config.retry.total_seconds()
        else:
            replica.state, replica.why, replica.races_lost = "up", "", 0
            self._said.pop(replica.address, None)
            line.give_back()

    def _say(self, about: str, what: str) -> None:
        """Log a warning once, until it changes."""
        if self._said.get(about) != what:
            self._said[about] = what
            _log.warning("sharded serving: %s", what)
