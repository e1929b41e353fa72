"""ServerGroup: the connections of this process to all parameter servers of a job.

A request to several servers is sent to all of them before the first answer is awaited, so they work at the
same time without extra threads. Each request has a connection to itself while it lasts (see `connections`);
threads do not wait for each other.

Every request is retried after a broken connection or a late answer. A retry is safe: a lookup changes
nothing, and a push carries a number by which the server applies it once (see `pushes`). The life of one
request:

    sent ──► answered
      │  connection broke, answer late, nothing listens     retried for max(patience, replacement_timeout)
      │  the server restarted and lost its state            waits replacement_timeout for `replace`
      ▼
    waiting ──► sent again, to the server's address of that moment, with the same push numbers
      │  time is over, `expect` or `describe` started another run, `give_up`, or the group was closed
      ▼
    error

**Fencing.** Each request names the incarnation of the state it means. A server that restarted, or serves
another run, has another incarnation and refuses the request by a LostStateError: a worker that slept through
a failover cannot train rows which others have restored in the meantime.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from monolith import concurrency
from monolith.concurrency import ThreadPoolExecutor
from monolith.errors import ClusterError, ConfigError, LostStateError, MonolithError, UnavailableError
from monolith.store.connections import ConnectionPool, Kind, ServerConnection
from monolith.store.dense import dump_dense, load_dense_states, partition_weights, read_dense
from monolith.store.row_requests import RowHeader, incarnation_bytes
from monolith.store.server import SERVICE
from monolith.wire.bulk import Traffic, TrafficMeter
from monolith.wire.flight import Answer, Caller, StoppedError
from monolith.wire.transport import PortGuard

_LONG_POLL = timedelta(seconds=30)
"""Small calls may take this much longer than bulk requests: some are long polls."""
_RETRY_AFTER = 0.05
_RECONNECT_TIMEOUT = timedelta(seconds=2)
"""Limit of the first call on a new connection during a retry. That call cannot be cancelled when the server
is replaced, so it must not take long."""

_log = logging.getLogger(__name__)

_CONCURRENT = ("push_dense", "pull_dense")
"""Exchanges of which several run at a time: the answer that arrives last may be the older one."""

Request = tuple[Mapping[str, Any] | RowHeader, Any]
"""The header of a request, as JSON or as a `RowHeader`, and its payload."""
OnLost = Callable[[int, MonolithError], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Endpoint:
    """The address of a server and the incarnation of its state; None before the first call.

    Compared by identity: a new object means that the server moved or was given another state.
    """

    address: str
    incarnation: str | None = None


class _Failure(NamedTuple):
    error: MonolithError
    endpoint: _Endpoint
    retryable: bool
    """Whether a retry may help."""
    was_connected: bool
    """Whether the failure is a broken connection: a new connection may work."""

    @property
    def lost_state(self) -> bool:
        return isinstance(self.error, LostStateError)


class PushProgress(NamedTuple):
    """How far this process is with its pushes to one server, across replacements of that server."""

    last: int
    """The number of the newest push."""
    unanswered: frozenset[int] = frozenset()
    """Numbers that no server has acknowledged yet: a successor of the server is sent them again."""

    @property
    def acknowledged(self) -> int:
        return self.last - len(self.unanswered)


_Attempt = Callable[[Collection[int], bool], dict[int, _Failure]]
"""Sends a request to some servers once; the flag says that it is a retry. Returns the failures by server."""


class ServerGroup:
    """The parameter servers of a job, in order. Thread-safe.

        group = ServerGroup(["10.0.0.1:5000", "10.0.0.2:5000"], timeout=timedelta(seconds=10))
        answers = group.exchange("pull_dense", {0: ({}, b""), 1: ({}, b"")})    # both servers work at once
        group.replace(1, "10.0.0.3:5000", incarnation="9f1c")                   # waiting requests move there

    A server that restarted, or serves another run, no longer holds the rows that this process trains.
    Requests to it fail by a LostStateError until `describe` was called again, as every new
    `ParameterServerStore` does, or `expect` or `replace` names the state that it holds now.

    Args:
        addresses: host:port of every server; the index of a server is its shard number.
        guard: The credentials that this process presents.
        timeout: How long an answer may take. Small calls may take half a minute more.
        lookup_timeout: How long a lookup of rows may take; by default `timeout`.
        patience: How long to retry a server that does not answer, from the first failure on.
        half: Whether lookups are answered in half precision, which halves the bytes: a row is rounded by at
            most one part in 2,048, or by 3e-8 if that is more. Rows on servers and gradients keep 32 bits.
        replacement_timeout: How long an exchange, or a stateful call, waits for a lost server to return or to
            be replaced. Has no effect if it is shorter than `patience`.

    Raises:
        ConfigError: There are no addresses.
        MissingExtraError: pyarrow is not installed.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        guard: PortGuard | None = None,
        timeout: timedelta = timedelta(seconds=30),
        lookup_timeout: timedelta | None = None,
        patience: timedelta = timedelta(seconds=5),
        replacement_timeout: timedelta = timedelta(),
        half: bool = False,
    ) -> None:
        if not addresses:
            raise ConfigError("a group of parameter servers needs the address of at least one")
        self._guard = guard
        self._meter = TrafficMeter()
        self._timeout = timeout
        self._lookup_timeout = timeout if lookup_timeout is None else lookup_timeout
        self._patience = patience
        self.replacement_timeout = replacement_timeout
        """May be changed; requests that wait already keep the value they started with."""
        self.half = half
        self.on_lost: OnLost | None = None
        """Called with a lost server and the error: once per loss, from any thread, as soon as an exchange or
        a stateful call notices. The server may have been replaced, or answer again, by then."""
        self.sender = concurrency.token_hex(8)
        """Names this process to servers: pushes are numbered per sender."""
        # Guards all fields up to _pool. Held only for short reads and writes, never while a request is under
        # way: `replace` and `give_up` must get in while other threads wait for a lost server.
        self._lock = concurrency.Lock()
        self._endpoints = [_Endpoint(address) for address in addresses]
        self._runs = 0
        """Counts the runs this process has worked on: a request of an earlier run is not retried."""
        self._numbers = [0] * len(addresses)
        """The number of the newest push to each server."""
        self._unanswered: list[set[int]] = [set() for _ in addresses]
        self._replaced = [0] * len(addresses)
        """How often each server was replaced: an answer of a replaced server acknowledges nothing."""
        self._given_up: MonolithError | None = None
        self._lost: set[int] = set()
        self._processes: tuple[str, ...] = ()
        self._step = 0
        self._pool: ThreadPoolExecutor | None = None
        self._stop = concurrency.Event()
        shortest = min(self._timeout, self._lookup_timeout).total_seconds()
        self._connections = ConnectionPool(self._connect, shortest, self._stop)
        self._connect(0, "small", False).close()  # raises now if pyarrow is missing

    def __len__(self) -> int:
        return len(self._endpoints)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The current address of each server."""
        with self._lock:
            return tuple(endpoint.address for endpoint in self._endpoints)

    @property
    def step(self) -> int:
        """The global step of server 0's last answer; 0 before the first."""
        with self._lock:
            return self._step

    @property
    def incarnations(self) -> tuple[str | None, ...]:
        """The incarnation of each server's state; None before the first call."""
        with self._lock:
            return tuple(endpoint.incarnation for endpoint in self._endpoints)

    @property
    def traffic(self) -> Traffic:
        """Bytes received from all servers and sent to them."""
        return self._meter.total()

    @property
    def pushes(self) -> tuple[PushProgress, ...]:
        """How far this process is with its pushes to each server."""
        with self._lock:
            return tuple(self._pushes(server) for server in range(len(self)))

    def _pushes(self, server: int) -> PushProgress:
        # The caller holds the lock.
        return PushProgress(self._numbers[server], frozenset(self._unanswered[server]))

    @property
    def processes(self) -> tuple[str, ...]:
        """An ID of each server process, as `describe` found it: a restarted server has a new one."""
        with self._lock:
            return self._processes

    # Small calls

    def call(self, server: int, name: str, /, *, stateful: bool = False, **body: Any) -> dict[str, Any]:
        """Return a server's answer to a small call, which may reach it more than once.

        Args:
            stateful: Whether the call is about the server's state, and refused if that was lost.

        Raises:
            UnavailableError: The server does not answer, and patience is over.
            DeadlineExceededError: It did not answer in time.
            ConfigError: It refuses the token, or its certificate is not trusted.
            MonolithError: The server raised this error.
        """
        if not 0 <= server < len(self):
            raise ConfigError(f"there is no parameter server {server}; there are {len(self)}")
        if not stateful:
            return self._call_once(server, "small", name, body)
        answers: dict[int, dict[str, Any]] = {}

        def attempt(_: Collection[int], __: bool) -> dict[int, _Failure]:
            endpoint = self._endpoint(server)
            try:
                answers[server] = self._call_once(
                    server, "stateful", name, {**body, "incarnation": endpoint.incarnation}
                )
            except MonolithError as error:
                retryable = isinstance(error, (SERVICE.unreachable, SERVICE.late))
                return {server: _Failure(error, endpoint, retryable, was_connected=False)}
            return {}

        self._retry(attempt, [server])
        return answers[server]

    def _call_once(self, server: int, kind: Kind, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        connection = self._take(server, kind)
        try:
            with self._naming(server):
                return connection.caller.call(name, **body)
        finally:
            self._connections.give_back(connection)

    def call_all(self, name: str, /, **body: Any) -> list[dict[str, Any]]:
        """Return the answers of all servers, in order, to a call that is made to all at once."""
        if len(self) == 1:
            return [self.call(0, name, **body)]
        with self._lock:
            self._check_open()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(len(self), thread_name_prefix="parameter-servers")
            asked = [self._pool.submit(self.call, server, name, **body) for server in range(len(self))]
        failures = [failure for future in asked if (failure := future.exception()) is not None]
        if failures:
            raise failures[0]
        return [future.result() for future in asked]

    def describe(self) -> list[dict[str, Any]]:
        """Return the description of each server, and accept the state that each holds now.

        Raises:
            ConfigError: They are not the servers of one job in this order.
            UnavailableError: One of them has no shard yet.
        """
        found = self.call_all("describe")
        for server, about in enumerate(found):
            if about["shard"] is None:
                raise UnavailableError(
                    f"{self._name(server)} has no shard of the model yet: it is a spare until the chief "
                    "assigns it one"
                )
            number, count = about["shard"]
            if (number, count) != (server, len(self)):
                raise ConfigError(
                    f"{self._name(server)} is number {number} of {count}, and was given as number {server} "
                    f"of {len(self)}. Give the addresses of all servers of the job, in their order."
                )
        self._use([about["incarnation"] for about in found])
        with self._lock:
            self._processes = tuple(about["process"] for about in found)
            self._step = found[0]["step"]
        return found

    def expect(self, incarnation: str) -> None:
        """Accept only servers whose state has this incarnation.

        Requests of an earlier run that still wait for a server fail.
        """
        self._use([incarnation] * len(self))

    def replace(self, server: int, address: str, incarnation: str) -> PushProgress:
        """Send requests for a server to another address, or another incarnation, of the same run from now on.

        Waiting requests are retried there, with the same push numbers.

        Returns:
            How far this process was with the replaced server. Pushes that it had not acknowledged by now
            count only when its successor acknowledges them: a late answer of the old server is ignored.
        """
        with self._lock:
            self._check_open()
            self._endpoints[server] = _Endpoint(address, incarnation)
            self._replaced[server] += 1
            self._lost.discard(server)
            progress = self._pushes(server)
        self._connections.drop(server, "it was replaced")
        return progress

    def give_up(self, error: MonolithError) -> None:
        """Stop waiting for lost servers: requests that wait, now or later, raise this. From any thread."""
        with self._lock:
            self._given_up = error

    def _use(self, incarnations: list[str]) -> None:
        with self._lock:
            before = [endpoint.incarnation for endpoint in self._endpoints]
            if any(old not in (None, new) for old, new in zip(before, incarnations, strict=True)):
                self._runs += 1
            self._endpoints = [
                endpoint if endpoint.incarnation == new else _Endpoint(endpoint.address, new)
                for endpoint, new in zip(self._endpoints, incarnations, strict=True)
            ]
            self._lost.clear()
        self._connections.drop_idle("bulk")

    def set_step(self, step: int) -> None:
        """Set the global step, as after a restore."""
        self._note_step(0, self.call(0, "set_step", stateful=True, step=step))

    def read_step(self) -> int:
        """Ask server 0 for the global step."""
        self._note_step(0, self.call(0, "step", stateful=True))
        return self.step

    # Bulk

    def exchange(self, name: str, requests: Mapping[int, Request]) -> dict[int, Answer]:
        """Return the answers of several servers to requests that are made at the same time.

        A request may reach a server more than once.

        Args:
            requests: By server. Their payloads must not change until this returns.

        Raises:
            MonolithError: See `call`. Other servers may have applied their requests.
        """
        return self._exchange(name, requests, {})

    def _exchange(
        self, name: str, requests: Mapping[int, Request], numbers: Mapping[int, int]
    ) -> dict[int, Answer]:
        """Make an exchange; `numbers` has the push number of each server if each is to be applied once."""
        answers: dict[int, Answer] = {}
        # The run this exchange belongs to. If `expect` starts another one while it waits, it fails instead of
        # being sent: its gradients are of rows that were rolled back.
        runs = self._runs

        def attempt(servers: Collection[int], retry: bool) -> dict[int, _Failure]:
            asked = {server: requests[server] for server in servers}
            return self._attempt(name, asked, answers, numbers=numbers, runs=runs, retry=retry)

        self._retry(attempt, requests.keys())
        for server, answer in answers.items():
            self._note_step(server, answer.body, concurrent=name in _CONCURRENT)
        return answers

    def push(self, name: str, requests: Mapping[int, Request]) -> dict[int, Answer]:
        """Make an exchange whose requests are applied once: each gets the next push number of its server."""
        numbered: dict[int, Request] = {}
        numbers: dict[int, int] = {}
        # Numbered once, before the first attempt: every retry carries the same number, also to a successor of
        # the server, and is applied once.
        with self._lock:
            for server, (body, data) in requests.items():
                number = self._numbers[server] = self._numbers[server] + 1
                self._unanswered[server].add(number)
                numbers[server] = number
                numbered[server] = _numbered(body, self.sender, number), data
        return self._exchange(name, numbered, numbers)

    def _retry(self, attempt: _Attempt, servers: Collection[int]) -> None:
        """Send requests until all servers have answered, or one has not for too long.

        Raises:
            MonolithError: Why a server did not answer; the other servers may have.
        """
        patience, replacement = self._patience.total_seconds(), self.replacement_timeout.total_seconds()
        pending, first_failure, runs = set(servers), 0.0, self._runs
        # Servers that lost their state, by the endpoint at which they did. A retry there cannot help; it is
        # made once `replace` or `expect` has installed another endpoint.
        stateless: dict[int, _Endpoint] = {}
        last: dict[int, _Failure] = {}
        retry = False
        while pending:
            asked = [server for server in pending if self._endpoint(server) is not stateless.get(server)]
            failures = attempt(asked, retry) if asked else {}
            pending -= set(asked) - failures.keys()
            if not pending:
                break
            # Time counts from the first failure of any server, so the whole exchange ends in bounded time
            # even if servers fail one after the other.
            now = concurrency.monotonic()
            first_failure = first_failure if retry else now
            retry = True
            last |= failures
            for server, failure in failures.items():
                if not failure.retryable:
                    raise failure.error
                self._note_loss(server, failure, max(replacement, 0.0 if failure.lost_state else patience))
                if failure.lost_state:
                    stateless[server] = failure.endpoint
            for server in pending:
                if self._runs != runs:  # `expect` or `describe` started another run: this one is over
                    raise last[server].error
                if self._given_up is not None:
                    raise self._given_up from last[server].error
                wait = replacement if last[server].lost_state else max(patience, replacement)
                if now - first_failure >= wait:
                    raise last[server].error
            if self._stop.wait(_RETRY_AFTER):
                raise self._closed()
        if self._lost:  # read without the lock: nearly always empty, and checked again under it
            with self._lock:
                self._lost -= set(servers)

    def _note_loss(self, server: int, failure: _Failure, wait: float) -> None:
        """Report once that a server is lost. A broken connection alone is no loss: a new one may work."""
        if failure.was_connected and not isinstance(failure.error, SERVICE.late):
            return
        with self._lock:
            if server in self._lost or self._endpoints[server] is not failure.endpoint:
                return
            self._lost.add(server)
        if wait > 0:
            _log.warning("%s; retrying for %g s", failure.error, wait)
        if self.on_lost is not None:
            self.on_lost(server, failure.error)

    def _attempt(
        self,
        name: str,
        requests: Mapping[int, Request],
        answers: dict[int, Answer],
        *,
        numbers: Mapping[int, int],
        runs: int,
        retry: bool,
    ) -> dict[int, _Failure]:
        """Send each request once, to all servers before the first answer is read; return the failures.

        A push is acknowledged as soon as its answer is here, however long other servers take. It is not if
        the server was replaced since the request was sent: its successor may not have the push, so the
        request is sent again.
        """
        failures: dict[int, _Failure] = {}
        connections: dict[int, ServerConnection] = {}
        with self._lock:
            replaced = tuple(self._replaced)  # before anything is sent: see `_acknowledge`
        try:
            for server, (body, data) in requests.items():
                endpoint = self._endpoints[server]
                try:
                    connections[server] = self._take(server, "bulk", retry=retry)
                    self._send(connections[server], name, body, data, runs)
                except (MonolithError, StoppedError) as error:
                    failures[server] = self._failure(server, endpoint, connections.get(server), error)
            for server, connection in connections.items():
                if server in failures or connection.stream is None:
                    continue
                endpoint = self._endpoints[server]
                try:
                    answer = connection.stream.receive()
                    self._connections.answered(connection)  # the next server may take past this deadline
                    if not self._acknowledge(server, numbers.get(server), replaced[server]):
                        connection.stream.broken = True
                        raise SERVICE.unreachable("it was replaced")
                    answers[server] = answer
                except (MonolithError, StoppedError) as error:
                    failures[server] = self._failure(server, endpoint, connection, error)
        finally:
            for server, connection in connections.items():
                if server not in answers and server not in failures and connection.stream is not None:
                    connection.stream.broken = True  # interrupted here, and its answer is still to come
                self._connections.give_back(connection)
        return failures

    def _acknowledge(self, server: int, number: int | None, replaced: int) -> bool:
        """Count a push as applied, and return True; return False if the server was replaced since."""
        with self._lock:
            # `replace` reads the unanswered pushes and raises `_replaced` under the same lock: a push is
            # either in its answer, or is sent again to the successor. It is never in neither.
            if number is not None and self._replaced[server] != replaced:
                return False
            if number is not None:
                self._unanswered[server].discard(number)
            return True

    def _send(
        self,
        connection: ServerConnection,
        name: str,
        body: Mapping[str, Any] | RowHeader,
        data: Any,
        runs: int,
    ) -> None:
        if connection.stream is None:
            known = self._endpoint(connection.server)
            answer = connection.caller.call("hello", incarnation=known.incarnation)
            with self._lock:
                if known.incarnation is None and self._endpoints[connection.server] is known:
                    self._endpoints[connection.server] = _Endpoint(known.address, answer["incarnation"])
            connection.stream = connection.caller.open_stream()
        with self._lock:
            if self._runs != runs:
                raise LostStateError("this process works on another run by now")
            incarnation = self._endpoints[connection.server].incarnation
        limit = self._lookup_timeout if name == "lookup" else self._timeout
        # Starts the deadline before the request is sent: a server that does not read is late, too.
        if not self._connections.await_answer(connection, limit.total_seconds()):
            raise SERVICE.unreachable("it was replaced")
        if isinstance(body, RowHeader):
            header = body._replace(incarnation=incarnation_bytes(incarnation)).packed()
            connection.stream.send_message(header, data)
        else:
            connection.stream.send(name, {**body, "incarnation": incarnation}, data)

    # Dense weights, around a save

    def fetch_dense(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        schedule: LRScheduler | None = None,
    ) -> int:
        """Copy the servers' weights, optimizer state and schedule into a module's; return the global step.

        Raises:
            RestoreError: They hold other weights, or train them by another optimizer. Nothing has changed.
        """
        requests: dict[int, Request] = {server: ({}, b"") for server in range(len(self))}
        answers = self.exchange("dump_dense", requests)
        states = [read_dense(answers[server].data.tobytes()) for server in range(len(self))]
        load_dense_states(parameters, optimizer, states, schedule)
        return states[0].step

    def send_dense(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        step: int | None = None,
        schedule: LRScheduler | None = None,
    ) -> None:
        """Send a module's weights and the state of its optimizer to the servers, to each its shard.

        Args:
            step: The new global step; by default it stays.
            schedule: Changes the optimizer's learning rates, on every server.

        Raises:
            RestoreError: A server owns other weights, or trains them by another optimizer.
            SaveError: The optimizer's state has a value that is neither number, text nor tensor.
        """
        servers = partition_weights(parameters, len(self))
        step = self.read_step() if step is None else step
        requests: dict[int, Request] = {}
        for server in range(len(self)):
            mine = {name: parameters[name] for name, owner in servers.items() if owner == server}
            requests[server] = {}, dump_dense(mine, optimizer, step, schedule)
        self.exchange("load_dense", requests)

    def close(self) -> None:
        """Close all connections; requests that wait fail. Closing again does nothing."""
        # First the flag, then the connections: a request that is cancelled looks at it and does not retry.
        # The pool last, since its threads wait for such requests.
        self._stop.set()
        with self._lock:
            pool = self._pool
        self._connections.close()
        if pool is not None:
            pool.shutdown()

    # Inside

    def _endpoint(self, server: int) -> _Endpoint:
        with self._lock:
            return self._endpoints[server]

    def _name(self, server: int) -> str:
        return f"parameter server {server} of {len(self)} at {self._endpoint(server).address}"

    @contextmanager
    def _naming(self, server: int) -> Iterator[None]:
        """Add the server's name and address to errors of its connection."""
        try:
            yield
        except (MonolithError, StoppedError) as cause:
            named = self._named(server, cause)
            if named is cause:
                raise
            raise named from cause

    def _named(self, server: int, cause: MonolithError | StoppedError) -> MonolithError:
        if isinstance(cause, StoppedError):
            return self._closed()
        if not isinstance(cause, (SERVICE.unreachable, SERVICE.late, ConfigError)):
            return cause
        return self._closed() if self._stop.is_set() else type(cause)(f"{self._name(server)}: {cause}")

    def _failure(
        self,
        server: int,
        endpoint: _Endpoint,
        connection: ServerConnection | None,
        cause: MonolithError | StoppedError,
    ) -> _Failure:
        """Judge why a server, at the endpoint of that moment, did not answer."""
        error = self._named(server, cause)
        if error is not cause:
            error.__cause__ = cause
        connected = connection is not None and connection.stream is not None
        # The same error types also come from the server itself, over a whole connection: those are answers.
        unanswered = connection is not None and (connection.stream is None or connection.is_broken)
        retryable = isinstance(error, LostStateError) or (
            unanswered and isinstance(error, (SERVICE.unreachable, SERVICE.late))
        )
        return _Failure(error, endpoint, retryable, connected)

    def _note_step(self, server: int, body: Mapping[str, Any], *, concurrent: bool = False) -> None:
        """Remember the global step in server 0's answer; an answer that was overtaken sets nothing back."""
        if server == 0 and "step" in body:
            with self._lock:
                self._step = max(self._step, body["step"]) if concurrent else body["step"]

    def _take(self, server: int, kind: Kind, *, retry: bool = False) -> ServerConnection:
        self._check_open()
        return self._connections.take(server, kind, retry=retry)

    def _connect(self, server: int, kind: Kind, retry: bool) -> Caller:
        timeout = self._timeout if kind == "bulk" else self._timeout + _LONG_POLL
        return Caller(
            SERVICE,
            lambda: self._endpoint(server).address,
            guard=self._guard,
            patience=self._patience if kind == "small" else timedelta(),
            timeout=min(timeout, _RECONNECT_TIMEOUT) if retry and kind == "bulk" else timeout,
            stops=(self._stop,),
            meter=self._meter,
        )

    def _check_open(self) -> None:
        if self._stop.is_set():
            raise self._closed()

    def _closed(self) -> ClusterError:
        return ClusterError("these connections to parameter servers were closed")


def _numbered(body: Mapping[str, Any] | RowHeader, sender: str, number: int) -> Mapping[str, Any] | RowHeader:
    if isinstance(body, RowHeader):
        return body._replace(sender=sender, number=number)
    return {**body, "sender": sender, "number": number}
