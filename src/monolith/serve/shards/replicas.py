"""Which replicas a shard has, which of them answer, and the connections to them.

    found ──hello──> up ──lost races──> slow  ──hello──> up
                     up ──failed──────> down  ──hello──> up

Requests go to replicas that are up; to one that is slow where none is up; and never to one that is down,
or was only just found: a request must not wait for a machine that is gone. Those are greeted by threads of
the map, again and again, until they answer as they should. A registry that fails, or has nobody any more,
changes nothing: the last good map is kept. A replica that it no longer has, while it has others, is let go
of.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from monolith.cluster import Discovery
from monolith.errors import MonolithError, UnavailableError
from monolith.serve.config import ShardsConfig
from monolith.serve.shards.protocol import SERVICE, ShardAbout, misfit, shard_part, shard_role
from monolith.wire.flight import Caller, CallStream, PortGuard
from monolith.wire.messages import read_message

_log = logging.getLogger(__name__)

State = Literal["found", "up", "slow", "down"]

_IDLE = 10.0
"""Seconds after which a connection that nobody uses is closed."""
_GREETERS = 8
_RACES = 3
"""That a replica may lose in a row: one in twenty requests is raced, whoever answers it."""


_KEPT = 256
_ENOUGH = 32
"""Answers from which on the wait follows from them, and after how many it is found out again."""
_SHARE = 0.95
_SPARE = 10.0
_PER_REQUEST = 0.1


class HedgeDelay:
    """How long to wait for a replica before another is asked: the 95th percentile of recent answers, bounded.

    Any thread may call it; a number that is lost in a race is one of hundreds.
    """

    def __init__(self, least: float, most: float) -> None:
        self._least, self._most = least, most
        self._recent: deque[float] = deque(maxlen=_KEPT)
        self._noted = 0
        self.seconds = most

    def note(self, seconds: float) -> None:
        """Learn from an answer that came."""
        self._recent.append(seconds)
        self._noted += 1
        if self._noted % _ENOUGH == 0:
            known = sorted(self._recent.copy())
            slow = known[min(len(known) - 1, int(_SHARE * len(known)))]
            self.seconds = min(self._most, max(self._least, slow))


class HedgeBudget:
    """How many requests may be made twice: one in ten, and a few at once.

    Where all replicas are slow because there is too much to do, to ask another would make it more.
    """

    def __init__(self) -> None:
        self._left = _SPARE

    def earn(self) -> None:
        """A request was made."""
        self._left = min(_SPARE, self._left + _PER_REQUEST)

    def spend(self) -> bool:
        """Whether another one may be made twice; if so, it counts."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedRows:
    """Whose rows an entry wants: what a server must say of itself, by the fields of `ShardAbout`."""

    model: str
    version: str
    shards: int
    tables: Mapping[str, int]
    digest: str | None = None

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
        """Whether it was used before: then that it fails may only mean that the server has restarted."""
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
        self.why = "it was not greeted yet"
        self.in_flight = 0
        """Requests that wait for it, about."""
        self.races_lost = 0
        """In a row."""
        self.greet_at = 0.0
        """When to greet it next."""
        self.greeting: Future[None] | None = None
        self._wanted = wanted
        self._guard = guard
        self._lock = threading.Lock()  # guards what follows
        self._idle: list[ShardLine] = []
        self._closed = False

    def line(self, seconds: float) -> ShardLine:
        """Return a connection that nobody uses, or a new one, which is made within so many seconds.

        Raises:
            RetryableError: It does not answer.
            MonolithError: It is not the server that is meant.
        """
        with self._lock:
            if self._idle:
                line = self._idle.pop()
                line.reused = True
                return line
        return self.new_line(seconds)

    def new_line(self, seconds: float) -> ShardLine:
        """As `line`, always a new one."""
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
        line.idle_since = time.monotonic()
        with self._lock:
            if not (line.stream.broken or self._closed):
                self._idle.append(line)
                return
        line.close()

    def drop_idle(self, before: float | None = None) -> None:
        """Close the connections that nobody uses, or has since then."""
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
        """Return a replica to ask: of two that are up, the one with less to do; None where there is none.

        Args:
            only_up: Whether one that is slow will not do where none is up.
        """
        members = [one for one in self.by_address.values() if one not in tried]
        able = [one for one in members if one.state == "up"]
        if not able and not only_up:
            able = [one for one in members if one.state == "slow"]
        if len(able) > 2:
            able = random.sample(able, 2)
        elif len(able) == 2 and random.random() < 0.5:
            able.reverse()
        return min(able, key=lambda one: one.in_flight) if able else None

    @property
    def ready(self) -> bool:
        return any(one.state in ("up", "slow") for one in self.by_address.values())

    def error(self) -> UnavailableError:
        """Return what to say where no replica is left to ask."""
        members = list(self.by_address.values())
        if not members:
            return UnavailableError(
                f"{self.name}: nobody is registered as {self.role}. Start its serving servers, with "
                "the registry that the entry has"
            )
        each = "; ".join(f"{one.address} ({one.why or one.state})" for one in members)
        return UnavailableError(f"{self.name}: none of its {len(members)} servers answers: {each}")


class ReplicaMap:
    """The replicas of all shards, kept up to date by a thread until it is closed.

    Args:
        wanted: Whose rows they must have.
        discovery: Still the caller's to close.
        guard: What to present to servers.
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
        self._wake = threading.Event()
        self._stopped = False
        self._greeters = ThreadPoolExecutor(_GREETERS, "shards-greet")
        self._within = max(config.deadline, config.retry).total_seconds()
        self.refresh()
        wait(self._greet(), timeout=self._within)
        self._thread = threading.Thread(target=self._keep, name="shards-map", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether every shard has a replica that can be asked."""
        return all(shard.ready for shard in self.shards)

    def wait_ready(self, seconds: float) -> bool:
        """Wait until `ready`; False if it is not by then."""
        until = time.monotonic() + seconds
        while not self.ready:
            if self._stopped or time.monotonic() >= until:
                return False
            time.sleep(0.02)
        return True

    def failed(self, replica: Replica, error: Exception) -> None:
        """A request found a replica gone: it is asked nothing until it has been greeted again."""
        replica.state, replica.why = "down", str(error)
        replica.drop_idle()
        replica.greet_at = 0.0
        self._wake.set()

    def lost_race(self, replica: Replica, seconds: float) -> None:
        """Another was faster. After a few such races in a row, this one is asked only where there is no
        other, until it was greeted."""
        replica.races_lost += 1
        if replica.state == "up" and replica.races_lost >= _RACES:
            replica.state = "slow"
            replica.why = f"it had not answered after {1000 * seconds:.0f} ms"
            replica.greet_at = time.monotonic() + self._config.retry.total_seconds()

    def refresh(self) -> None:
        """Ask the registry. The map's thread does this; a test may."""
        for number, shard in enumerate(self.shards):
            try:
                found = set(self._discovery.query(shard.role).values())
            except (MonolithError, OSError) as error:
                self._say(shard.role, f"cannot ask for {shard.role}, keeping the last servers known: {error}")
                continue
            if not found:
                self._say(shard.role, f"nobody is registered as {shard.role}; keeping the last servers known")
                for replica in shard.by_address.values():  # a server that ends waits for idle connections
                    replica.drop_idle(time.monotonic() - self._config.refresh.total_seconds())
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
        self._greeters.shutdown(wait=True, cancel_futures=True)
        for shard in self.shards:
            for replica in shard.by_address.values():
                replica.close()

    # The thread

    def _keep(self) -> None:
        refresh, retry = self._config.refresh.total_seconds(), self._config.retry.total_seconds()
        refresh_at = time.monotonic() + refresh
        while not self._stopped:
            self._wake.wait(min(retry, refresh))
            self._wake.clear()
            now = time.monotonic()
            if now >= refresh_at:
                try:
                    self.refresh()
                except Exception:  # whatever a registry raises, requests go on
                    _log.exception("sharded serving: cannot refresh the map, retrying")
                refresh_at = time.monotonic() + refresh
            self._greet()
            for shard in self.shards:
                for replica in shard.by_address.values():
                    replica.drop_idle(now - _IDLE)

    def _greet(self) -> list[Future[None]]:
        """Greet all who are not up, each on a thread of the pool."""
        begun, now = [], time.monotonic()
        for shard in self.shards:
            for replica in shard.by_address.values():
                busy = replica.greeting is not None and not replica.greeting.done()
                if replica.state != "up" and not busy and now >= replica.greet_at and not self._stopped:
                    replica.greeting = self._greeters.submit(self._greet_one, shard, replica)
                    begun.append(replica.greeting)
        return begun

    def _greet_one(self, shard: ShardReplicas, replica: Replica) -> None:
        try:
            line = replica.new_line(self._within)
        except Exception as error:
            replica.state, replica.why = "down", str(error)
            self._say(replica.address, f"{shard.name}: {replica.address} cannot be used: {error}")
            replica.greet_at = time.monotonic() + self._config.retry.total_seconds()
        else:
            replica.state, replica.why, replica.races_lost = "up", "", 0
            self._said.pop(replica.address, None)
            line.give_back()

    def _say(self, about: str, what: str) -> None:
        """Warn once, until it has changed."""
        if self._said.get(about) != what:
            self._said[about] = what
            _log.warning("sharded serving: %s", what)
