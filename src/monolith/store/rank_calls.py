"""Rank calls: a rank calls all other ranks at any time, and they answer while they train.

Requests such as "how many rows do you have" and "write your part of this checkpoint" cannot wait for the next
collective. So every rank has a Flight server, which demands the credentials of the run's security settings:
the token, and certificates if there are some. Its address is a signed key; see `RankKeys`.

    rank 0: ask_all("stats/0", ...) ──► ask {call, body} ──► rank 1, rank 2: the function that was offered
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from monolith import concurrency
from monolith.cluster.security import Guard
from monolith.errors import (
    ClusterError,
    DeadlineExceededError,
    MonolithError,
    RetryableError,
    UnavailableError,
)
from monolith.store import server
from monolith.store.rank_keys import RankKeys
from monolith.wire.endpoint import Handlers
from monolith.wire.flight import Caller
from monolith.wire.flight_server import Server
from monolith.wire.messages import Call, Gone, Json, Name, read_message
from monolith.wire.ports import Limits
from monolith.wire.transport import Service

SERVICE = Service(
    name="rank",
    peers="all ranks",
    failure=ClusterError,
    told=server.SERVICE.told,
    unreachable=UnavailableError,
    late=DeadlineExceededError,
)
CHECK_EVERY = 0.1
"""Seconds between two checks whether a rank was lost in the meantime."""
CLOSE_WITHIN = 5.0
"""Seconds that closing waits for answers in progress. A call that takes longer ends with its process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPort:
    """Where a rank listens, for calls and for the data of gloo, and the credentials that callers must
    present."""

    host: str = "127.0.0.1"
    """The one address of this machine on which it listens, and by which the other ranks reach it."""
    guard: Guard
    """The same on all ranks."""
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCall:
    """A call to a rank, by the name under which that rank offers it."""

    call: Name
    body: dict[str, Json]


class RankCalls:
    """Calls other ranks, and answers their calls, until it is closed. Thread-safe.

        groups.calls.offer({"rows": lambda body: {"rows": len(table)}})      # on every rank
        groups.calls.ask_all("rows", {})                                     # rank 0: [{"rows": 7}, {"rows":
        5}]

    Args:
        keys: Shared by all ranks.
        timeout: How long an answer may take.
    """

    def __init__(self, keys: RankKeys, rank: int, size: int, port: RankPort, *, timeout: timedelta) -> None:
        self.rank = rank
        self.size = size
        self._keys = keys
        self._guard = port.guard
        self._timeout = timeout
        self._calls: dict[str, Call] = {}
        self._lost: RetryableError | None = None  # set once, by any thread; read by `ask_all`
        self._over = concurrency.Event()
        self._addresses: dict[int, str] = {}
        self._lock = concurrency.Lock()  # guards the one below; not held during a call
        self._free: dict[int, list[Caller]] = defaultdict(list)
        """Rank -> idle connections. Several per rank, so that a stats call does not wait for a long write."""
        self._server: Server | None = None
        if size > 1:
            polls = {"ask": lambda body, gone: self._answer(read_message(RankCall, body), gone)}
            self._server = Server(
                SERVICE, Handlers(polls=polls), host=port.host, guard=port.guard, limits=port.limits
            )
            keys.set(f"calls/{rank}", self._server.address)

    def find_addresses(self) -> None:
        """Read the addresses of the other ranks. Called once all are connected: later writes do not count."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        self._addresses = {rank: self._keys.get(f"calls/{rank}").decode() for rank in others}

    def offer(self, calls: Mapping[str, Call]) -> None:
        """Answer these calls from now on. A call that arrives earlier waits."""
        self._calls |= calls

    def ask_all(self, name: str, body: Mapping[str, Json]) -> list[dict[str, Json]]:
        """Return the answers of all ranks in rank order, including this one's.

        Raises:
            MonolithError: The error of the first rank that raised one.
            RetryableError: A rank is gone, or does not answer in time.
        """
        answers: concurrency.SimpleQueue[tuple[int, dict[str, Json] | MonolithError]] = (
            concurrency.SimpleQueue()
        )
        for rank in self._addresses:
            # Not from a pool, which the interpreter joins at exit: a rank that hangs never answers.
            concurrency.Thread(
                target=lambda rank=rank: answers.put((rank, self._ask(rank, name, body))),
                name="rank-ask",
                daemon=True,
            ).start()
        found: dict[int, dict[str, Json] | MonolithError] = {}
        try:
            found[self.rank] = self._calls[name](dict(body))
        finally:  # the other ranks work on it in any case, and must finish before the caller continues
            while len(found.keys() - {self.rank}) < len(self._addresses):
                try:
                    rank, answer = answers.get(timeout=CHECK_EVERY)
                    found[rank] = answer
                except concurrency.Empty:
                    if self._lost is not None:
                        raise self._lost from None
                    if self._over.is_set():
                        raise UnavailableError(f"{name}: this rank has ended") from None
        return [_opened(rank, answer) for rank, answer in sorted(found.items())]

    def fail(self, error: RetryableError) -> None:
        """Make every `ask_all` that waits raise this. From any thread."""
        self._lost = self._lost or error

    def close(self) -> None:
        """End. Closing again does nothing."""
        if self._over.is_set():
            return
        self._over.set()
        self._close_free()
        if self._server is not None:
            ending = concurrency.Thread(target=self._server.close, name="rank-calls-close", daemon=True)
            ending.start()
            ending.join(CLOSE_WITHIN)

    def _ask(self, rank: int, name: str, body: Mapping[str, Json]) -> dict[str, Json] | MonolithError:
        with self._lock:
            free = self._free[rank]
            caller = (
                free.pop()
                if free
                else Caller(SERVICE, self._addresses[rank], guard=self._guard, timeout=self._timeout)
            )
        try:
            return caller.call("ask", call=name, body=body)
        except MonolithError as error:
            return error
        except Exception as error:  # whatever it is, `ask_all` must not wait for it
            return ClusterError(f"{name:.60} failed: {type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._free[rank].append(caller)  # it reconnects if it has to
            if self._over.is_set():
                self._close_free()

    def _close_free(self) -> None:
        with self._lock:
            callers = [caller for free in self._free.values() for caller in free]
            self._free.clear()
        for caller in callers:
            caller.close()

    def _answer(self, asked: RankCall, gone: Gone) -> dict[str, Json]:
        while asked.call not in self._calls:  # this rank has not built its model yet
            if gone() or self._over.wait(CHECK_EVERY):
                raise UnavailableError(f"{asked.call:.60}: this rank has ended")
        return self._calls[asked.call](asked.body)


def _opened(rank: int, answer: dict[str, Json] | MonolithError) -> dict[str, Json]:
    if not isinstance(answer, MonolithError):
        return answer
    with contextlib.suppress(TypeError):  # its constructor takes more than a message
        answer = type(answer)(f"rank {rank}: {answer}")
    raise answer
