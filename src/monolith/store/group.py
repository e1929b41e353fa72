"""ServerGroup: connections to all parameter servers of a job, for everybody in this process.

A request to several servers is sent to all before the first answer is awaited, so they work
at the same time, and no thread is needed for that. Each request has a connection to itself
while it lasts; threads do not wait for each other.

What is repeated after a connection broke: whatever only reads. Gradients are not: nobody
knows whether the server had applied them, and applied twice they would be wrong for good,
while a batch that is missing is what failover copes with anyway.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import nn

from monolith.errors import ClusterError, ConfigError, MonolithError, RetryableError
from monolith.store.dense import dump_dense, fill_dense, read_dense, share_of_weights
from monolith.store.servers import SERVICE
from monolith.wire.flight import Answer, Caller, CallStream, PortGuard, StoppedError

_LONG_POLL = timedelta(seconds=30)
"""What a small call may take longer than bulk: some wait for something to happen."""
_RETRY_AFTER = 0.05
_IDLE = 2.0
"""Seconds after which a connection that nobody uses is closed: a server that wants to end waits for it."""

Request = tuple[Mapping[str, Any], Any]
"""JSON, and bytes beside it."""


@dataclass(slots=True, eq=False)
class _Line:
    """A connection, used by one thread at a time."""

    server: int
    bulk: bool
    address: str
    caller: Caller
    stream: CallStream | None = None
    deadline: float | None = None
    """When an answer is too late; None while none is awaited."""
    limit: float = 0.0
    """Seconds from the request to that moment."""
    idle_since: float = 0.0

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()
        self.caller.close()


@dataclass(slots=True)
class _Lines:
    """All connections. The group's lock guards it."""

    idle: dict[tuple[int, bool], list[_Line]] = field(default_factory=dict)
    """By server, and whether they are for bulk."""
    busy: set[_Line] = field(default_factory=set)


class _Failure(NamedTuple):
    error: MonolithError
    in_the_middle: bool
    """Whether the connection had been made, and broke: another one may not."""


class ServerGroup:
    """The parameter servers of a job, in order. Thread-safe.

    A server that restarted, or began another run, no longer holds the rows that this process works on. It
    is refused, by an UnavailableError, until `describe` was called again, as every new
    `ParameterServerStore` does, or `expect` says what it holds now.

    Args:
        addresses: host:port of every server; its place is its number.
        guard: What servers want to be shown.
        timeout: How long an answer may take. Small calls may wait half a minute more.
        lookup_timeout: How long a lookup of rows may take; None as long as others.
        patience: How long to go on trying a server where nobody answers.
        hold: How long an exchange, or a call about what a server holds, waits for one that is gone, and
            repeats what it asked for; with 0 it fails at once.

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
        hold: timedelta = timedelta(0),
    ) -> None:
        if not addresses:
            raise ConfigError("a group of parameter servers needs the address of at least one")
        self.addresses = tuple(addresses)
        self._guard = guard
        self._timeout = timeout
        self._lookup_timeout = timeout if lookup_timeout is None else lookup_timeout
        self._patience = patience
        self._hold = hold.total_seconds()
        self.on_gone: Callable[[int, MonolithError], None] | None = None
        """Told once of each loss of a server that is waited for, from any thread."""
        self._lock = threading.Lock()  # guards all below, and addresses
        self._gone: set[int] = set()
        self._given_up: MonolithError | None = None
        self._acknowledged = [0] * len(self.addresses)
        self._lines = _Lines()
        self._incarnations: list[str | None] = [None] * len(self.addresses)
        self._processes: tuple[str, ...] = ()
        self._step = 0
        self._stop = threading.Event()
        self._keeper: threading.Thread | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._caller(0, bulk=False).close()  # a package that is missing is said now

    def __len__(self) -> int:
        return len(self.addresses)

    @property
    def step(self) -> int:
        """The global step, as server 0 has answered last; 0 before it did."""
        with self._lock:
            return self._step

    @property
    def incarnations(self) -> tuple[str | None, ...]:
        """Of each server, as `describe` found it."""
        with self._lock:
            return tuple(self._incarnations)

    @property
    def processes(self) -> tuple[str, ...]:
        """Names each server's start, as `describe` found it: a server that restarted has another."""
        with self._lock:
            return self._processes

    # Small calls

    def call(self, server: int, name: str, /, *, held: bool = False, **body: Any) -> dict[str, Any]:
        """Return a server's answer to a small call, which may reach it more than once.

        Args:
            held: Whether the call is about what the server holds, and refused where that is gone.

        Raises:
            UnavailableError: It is gone, for longer than there was patience.
            DeadlineExceededError: It did not answer in time.
            ConfigError: It refuses the token, or its certificate is not to be trusted.
            MonolithError: What the server raised.
        """
        limit = time.monotonic() + self._hold
        while True:
            try:
                answer = self._call(server, name, body, held)
            except RetryableError as error:
                if not held:
                    raise
                self._wait_for_return({server: error}, limit)
            else:
                self._note_there(server)
                return answer

    def _call(self, server: int, name: str, body: Mapping[str, Any], held: bool) -> dict[str, Any]:
        line = self._take(server, bulk=False)
        try:
            meant = {"incarnation": self.incarnations[server]} if held else {}
            with self._naming(server):
                return line.caller.call(name, **body, **meant)
        finally:
            self._give_back(line)

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
        """Return what each server says of itself, and work with them as they are now.

        Raises:
            ConfigError: They are not those of one job in this order.
        """
        found = self.call_all("describe")
        for server, about in enumerate(found):
            number, count = about["share"]
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
        """Work with servers that all hold what has this name, and with no others."""
        self._use([incarnation] * len(self))

    def replace(self, server: int, address: str, incarnation: str) -> None:
        """Have a place served elsewhere from now on; who waits for it goes on there. From any thread."""
        with self._lock:
            addresses = list(self.addresses)
            addresses[server] = address
            self.addresses = tuple(addresses)
            self._incarnations[server] = incarnation
            stale = [line for bulk in (True, False) for line in self._lines.idle.pop((server, bulk), [])]
            for line in self._lines.busy:
                if line.server == server and line.stream is not None:
                    line.stream.cancel("the server was replaced")
        for line in stale:
            line.close()

    def give_up(self, error: MonolithError) -> None:
        """Hold nothing any more: whoever waits for a server raises this. From any thread."""
        with self._lock:
            self._given_up = error

    @property
    def acknowledged(self) -> tuple[int, ...]:
        """Pushes that each place has acknowledged to this process, whoever served it."""
        with self._lock:
            return tuple(self._acknowledged)

    def _wait_for_return(self, failures: Mapping[int, MonolithError], limit: float) -> None:
        """Wait a moment before a request is repeated to servers that are gone.

        Raises:
            MonolithError: They were waited for long enough, or nobody expects them back.
        """
        first = next(iter(failures.values()))
        if not self._hold or time.monotonic() >= limit:
            raise first
        with self._lock:
            self._check_open()
            if self._given_up is not None:
                raise self._given_up
            new = {server: error for server, error in failures.items() if server not in self._gone}
            self._gone |= new.keys()
        for server, error in new.items():
            if self.on_gone is not None:
                self.on_gone(server, error)
        self._stop.wait(_RETRY_AFTER)

    def _note_there(self, server: int) -> None:
        if self._gone:
            with self._lock:
                self._gone.discard(server)

    def _use(self, incarnations: list[str]) -> None:
        with self._lock:
            stale = [line for lines in self._lines.idle.values() for line in lines if line.bulk]
            self._lines.idle = {key: lines for key, lines in self._lines.idle.items() if not key[1]}
            self._incarnations = list(incarnations)
        for line in stale:
            line.close()

    def set_step(self, step: int) -> None:
        """Set the global step, as after a restore."""
        self._heard(0, self.call(0, "set_step", held=True, step=step))

    def read_step(self) -> int:
        """Ask server 0 for the global step."""
        self._heard(0, self.call(0, "step", held=True))
        return self.step

    # Bulk

    def exchange(self, name: str, requests: Mapping[int, Request], *, repeat: bool) -> dict[int, Answer]:
        """Return the answers of several servers to requests that are made at the same time.

        Args:
            requests: By server.
            repeat: Whether a request may be made again after a connection broke.

        Raises:
            MonolithError: As of `call`. Other servers may have done what they were asked to.
        """
        answers: dict[int, Answer] = {}
        began = time.monotonic()
        pending, give_up = dict(requests), began + self._patience.total_seconds()
        while pending:
            failures = self._attempt(name, pending, answers)
            broken = {server for server, failure in failures.items() if failure.in_the_middle}
            pending = {server: requests[server] for server in failures}
            if failures and repeat and broken == failures.keys() and time.monotonic() < give_up:
                self._stop.wait(_RETRY_AFTER)
            elif failures:
                errors = {server: failure.error for server, failure in failures.items()}
                if not all(isinstance(error, RetryableError) for error in errors.values()):
                    raise next(iter(errors.values()))
                self._wait_for_return(errors, began + self._hold)
        for server, answer in answers.items():
            self._heard(server, answer.body)
            self._note_there(server)
        if not repeat:
            with self._lock:
                for server in answers:
                    self._acknowledged[server] += 1
        return answers

    def _attempt(
        self, name: str, requests: Mapping[int, Request], answers: dict[int, Answer]
    ) -> dict[int, _Failure]:
        """Make requests once; add to `answers`, and return what failed."""
        failures: dict[int, _Failure] = {}
        lines: dict[int, _Line] = {}
        try:
            for server, (body, data) in requests.items():
                with self._failing(server, lines, failures):
                    lines[server] = self._take(server, bulk=True)
                    self._send(lines[server], name, body, data)
            for server, line in lines.items():
                if server not in failures and line.stream is not None:
                    with self._failing(server, lines, failures):
                        answers[server] = line.stream.receive()
                        with self._lock:
                            line.deadline = None  # another server may keep us waiting past it
        finally:
            for server, line in lines.items():
                if server not in answers and server not in failures and line.stream is not None:
                    line.stream.broken = True  # we were interrupted, and its answer is still to come
                self._give_back(line)
        return failures

    def _send(self, line: _Line, name: str, body: Mapping[str, Any], data: Any) -> None:
        if line.stream is None:
            with self._lock:
                known = self._incarnations[line.server]
            answer = line.caller.call("hello", incarnation=known)
            with self._lock:
                self._incarnations[line.server] = known or answer["incarnation"]
            line.stream = line.caller.open_stream()
        limit = self._lookup_timeout if name == "lookup" else self._timeout
        with self._lock:
            meant = self._incarnations[line.server]
            line.limit = limit.total_seconds()
            line.deadline = time.monotonic() + line.limit
        line.stream.send(name, {**body, "incarnation": meant}, data)

    # Dense weights, around a save

    def fetch_dense(self, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
        """Fill a module's weights and its optimizer with what the servers hold; return the global step.

        Raises:
            RestoreError: They hold other weights, or train them by another optimizer. Nothing has changed.
        """
        requests: dict[int, Request] = {server: ({}, b"") for server in range(len(self))}
        answers = self.exchange("dump_dense", requests, repeat=True)
        states = [read_dense(answers[server].data.tobytes()) for server in range(len(self))]
        fill_dense(parameters, optimizer, states)
        return states[0].step

    def send_dense(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        step: int | None = None,
    ) -> None:
        """Make the servers hold a module's weights and the state of its optimizer, each its share.

        Args:
            step: The global step from now on; by default it stays.

        Raises:
            RestoreError: A server is in charge of other weights, or trains them by another optimizer.
            SaveError: The optimizer keeps something that is neither number, text nor tensor.
        """
        servers = share_of_weights(parameters, len(self))
        step = self.read_step() if step is None else step
        requests: dict[int, Request] = {}
        for server in range(len(self)):
            mine = {name: parameters[name] for name, owner in servers.items() if owner == server}
            requests[server] = {}, dump_dense(mine, optimizer, step)
        self.exchange("load_dense", requests, repeat=True)

    def close(self) -> None:
        """Let go of all connections; whoever waits hears of it. Closing again does nothing."""
        self._stop.set()
        with self._lock:
            lines = [line for lines in self._lines.idle.values() for line in lines]
            self._lines.idle = {}
            for line in self._lines.busy:
                if line.stream is not None:
                    line.stream.cancel("the connections were closed")
            keeper, pool = self._keeper, self._pool
        for line in lines:
            line.close()
        if keeper is not None:
            keeper.join()
        if pool is not None:
            pool.shutdown()

    # Inside

    def _name(self, server: int) -> str:
        return f"parameter server {server} of {len(self)} at {self.addresses[server]}"

    @contextmanager
    def _naming(self, server: int) -> Iterator[None]:
        """Say of which server an error is that speaks of a connection, and not of what was asked."""
        try:
            yield
        except StoppedError as cause:
            raise self._closed() from cause
        except (SERVICE.unreachable, SERVICE.late, ConfigError) as cause:
            if self._stop.is_set():
                raise self._closed() from cause
            raise type(cause)(f"{self._name(server)}: {cause}") from cause

    @contextmanager
    def _failing(
        self, server: int, lines: Mapping[int, _Line], failures: dict[int, _Failure]
    ) -> Iterator[None]:
        try:
            with self._naming(server):
                yield
        except MonolithError as error:
            line = lines.get(server)
            broken = line is not None and line.stream is not None and line.stream.broken
            failures[server] = _Failure(error, broken and isinstance(error, SERVICE.unreachable))

    def _heard(self, server: int, body: Mapping[str, Any]) -> None:
        if server == 0 and "step" in body:
            with self._lock:
                self._step = body["step"]

    def _take(self, server: int, *, bulk: bool) -> _Line:
        """Return a connection that nobody uses, or a new one."""
        if not 0 <= server < len(self):
            raise ConfigError(f"there is no parameter server {server}; there are {len(self)}")
        with self._lock:
            self._check_open()
            if self._keeper is None:
                self._keeper = threading.Thread(target=self._keep, name="server-group", daemon=True)
                self._keeper.start()
            idle = self._lines.idle.get((server, bulk))
            line = idle.pop() if idle else self._make_line(server, bulk)
            self._lines.busy.add(line)
            return line

    def _make_line(self, server: int, bulk: bool) -> _Line:
        return _Line(server, bulk, self.addresses[server], self._caller(server, bulk=bulk))

    def _give_back(self, line: _Line) -> None:
        closed: list[_Line] = []
        with self._lock:
            self._lines.busy.discard(line)
            line.deadline = None
            line.idle_since = time.monotonic()
            idle = self._lines.idle.setdefault((line.server, line.bulk), [])
            if line.stream is not None and line.stream.broken:
                closed, idle[:] = [line, *idle], []  # the others go the same way, most likely
            elif (
                self._stop.is_set()
                or (line.bulk and line.stream is None)
                or line.address != self.addresses[line.server]
            ):
                closed = [line]
            else:
                idle.append(line)
        for one in closed:
            one.close()

    def _caller(self, server: int, *, bulk: bool) -> Caller:
        return Caller(
            SERVICE,
            self.addresses[server],
            guard=self._guard,
            patience=self._patience,
            timeout=self._timeout if bulk else self._timeout + _LONG_POLL,
            stop=self._stop,
        )

    def _keep(self) -> None:
        """Until the group is closed: cut off answers that are late, close connections that nobody uses."""
        shortest = min(self._timeout, self._lookup_timeout).total_seconds()
        while not self._stop.wait(min(shortest / 4, _IDLE / 4)):
            now = time.monotonic()
            with self._lock:
                for line in self._lines.busy:
                    if line.deadline is not None and now >= line.deadline and line.stream is not None:
                        line.stream.cancel(f"no answer in {line.limit:g} s")
                        line.deadline = None
                unused = [
                    line
                    for lines in self._lines.idle.values()
                    for line in lines
                    if now - line.idle_since >= _IDLE
                ]
                for lines in self._lines.idle.values():
                    lines[:] = [line for line in lines if line not in unused]
            for line in unused:
                line.close()

    def _check_open(self) -> None:
        if self._stop.is_set():
            raise self._closed()

    def _closed(self) -> ClusterError:
        return ClusterError("these connections to parameter servers were closed")
