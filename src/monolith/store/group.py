"""ServerGroup: connections to all parameter servers of a job, for everybody in this process.

A request to several servers is sent to all before the first answer is awaited, so they work
at the same time, and no thread is needed for that. Each request has a connection to itself
while it lasts; threads do not wait for each other.

Whatever was asked is asked again after a connection broke or an answer was late: what only reads, because it
changes nothing, and a push, because it carries a number by which the server applies it once (see
`monolith.store.pushes`). Where a server is gone, who waits for it goes on elsewhere after `replace`:

    asked -> answered
      |  connection broke, late, nobody there          for `patience`, or `hold` if that is longer
      |  it restarted and lost its state               for `hold`, until `replace`
      v
    waits -> asked again, at the place the server has then; the same numbers
      |  time is over, `expect` or `describe` found another run, or the group was closed
      v
    an error
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from monolith.errors import ClusterError, ConfigError, LostStateError, MonolithError, UnavailableError
from monolith.store.dense import dump_dense, fill_dense, read_dense, share_of_weights
from monolith.store.lines import Kind, ServerLine, ServerLines
from monolith.store.rows import RowHeader, incarnation_bytes
from monolith.store.servers import SERVICE
from monolith.wire.bulk import Traffic, TrafficMeter
from monolith.wire.flight import Answer, Caller, PortGuard, StoppedError

_LONG_POLL = timedelta(seconds=30)
"""What a small call may take longer than bulk: some wait for something to happen."""
_RETRY_AFTER = 0.05
_GREET_AGAIN_WITHIN = timedelta(seconds=2)
"""How long a greeting may take when a server is tried again. It cannot be taken back when it is replaced."""

_log = logging.getLogger(__name__)

_OVERTAKEN = ("push_dense", "pull_dense")
"""Exchanges of which several are under way at a time: the answer that comes last may be the older one."""

Request = tuple[Mapping[str, Any] | RowHeader, Any]
"""JSON, or what a message about rows says of itself; and bytes beside it."""
OnGone = Callable[[int, MonolithError], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where a server is, and what it holds there; None while nobody has asked. Replaced, never changed."""

    address: str
    incarnation: str | None = None


class _Failure(NamedTuple):
    error: MonolithError
    place: _Place
    passing: bool
    """Whether it may help to ask again."""
    was_connected: bool
    """Whether the connection had been made, and broke: another one may not."""

    @property
    def lost_state(self) -> bool:
        return isinstance(self.error, LostStateError)


class PushStanding(NamedTuple):
    """How far this process is with its pushes to one place."""

    last: int
    """The number of the last that was made."""
    unanswered: frozenset[int] = frozenset()
    """Numbers of those that nobody has acknowledged yet: whoever serves the place next is sent them again."""

    @property
    def acknowledged(self) -> int:
        return self.last - len(self.unanswered)


_Attempt = Callable[[Collection[int], bool], dict[int, _Failure]]
"""Asks some servers once, in a hurry or not; returns what failed."""


class ServerGroup:
    """The parameter servers of a job, in order. Thread-safe.

    A server that restarted, or began another run, no longer holds the rows that this process works on. It
    is refused, by a LostStateError, until `describe` was called again, as every new
    `ParameterServerStore` does, or `expect` or `replace` says what it holds now.

    Args:
        addresses: host:port of every server; its place is its number.
        guard: What servers want to be shown.
        timeout: How long an answer may take. Small calls may wait half a minute more.
        lookup_timeout: How long a lookup of rows may take; None as long as others.
        patience: How long to go on trying a server where nobody answers, from the first failure on.
        half: Whether lookups are answered in half floats, at half the bytes: a row is rounded by at most one
            part in 2,048, or by 3e-8 where that is more. What servers hold and what is pushed stays as it is.
        hold: How long an exchange, or a call about what a server holds, waits for one that is gone or has
            lost its state, for it to come back or be replaced. Shorter than `patience`, it changes nothing.

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
        hold: timedelta = timedelta(),
        half: bool = False,
    ) -> None:
        if not addresses:
            raise ConfigError("a group of parameter servers needs the address of at least one")
        self._guard = guard
        self._meter = TrafficMeter()
        self._timeout = timeout
        self._lookup_timeout = timeout if lookup_timeout is None else lookup_timeout
        self._patience = patience
        self.hold = hold
        """May be changed; who waits already goes on as it was."""
        self.half = half
        self.on_gone: OnGone | None = None
        """Told which server was lost, and how: once per loss, from any thread, as soon as somebody who waits
        for an exchange or a held call notices. It may have been replaced, or answer again, by then."""
        self.sender = secrets.token_hex(8)
        """Names this process to servers, beside the numbers of its pushes."""
        self._lock = threading.Lock()  # guards what follows
        self._places = [_Place(address) for address in addresses]
        self._runs = 0
        """How often this process began to work on another run."""
        self._numbers = [0] * len(addresses)
        """Of the last push to each server."""
        self._unanswered: list[set[int]] = [set() for _ in addresses]
        self._replaced = [0] * len(addresses)
        """How often each place was given to somebody else."""
        self._given_up: MonolithError | None = None
        self._lost: set[int] = set()
        self._processes: tuple[str, ...] = ()
        self._step = 0
        self._pool: ThreadPoolExecutor | None = None
        self._stop = threading.Event()
        shortest = min(self._timeout, self._lookup_timeout).total_seconds()
        self._lines = ServerLines(self._connect, shortest, self._stop)
        self._connect(0, "small", False).close()  # a package that is missing is said now

    def __len__(self) -> int:
        return len(self._places)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where each server is now."""
        with self._lock:
            return tuple(place.address for place in self._places)

    @property
    def step(self) -> int:
        """The global step, as server 0 has answered last; 0 before it did."""
        with self._lock:
            return self._step

    @property
    def incarnations(self) -> tuple[str | None, ...]:
        """Of each server, as `describe` found it."""
        with self._lock:
            return tuple(place.incarnation for place in self._places)

    @property
    def traffic(self) -> Traffic:
        """What came from all servers, and went to them."""
        return self._meter.total()

    @property
    def pushes(self) -> tuple[PushStanding, ...]:
        """How far this process is with its pushes to each place, whoever served it then."""
        with self._lock:
            return tuple(self._pushes(server) for server in range(len(self)))

    def _pushes(self, server: int) -> PushStanding:
        """The lock is held."""
        return PushStanding(self._numbers[server], frozenset(self._unanswered[server]))

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
        if not 0 <= server < len(self):
            raise ConfigError(f"there is no parameter server {server}; there are {len(self)}")
        if not held:
            return self._call_once(server, "small", name, body)
        answers: dict[int, dict[str, Any]] = {}

        def attempt(_: Collection[int], __: bool) -> dict[int, _Failure]:
            place = self._place(server)
            try:
                answers[server] = self._call_once(
                    server, "held", name, {**body, "incarnation": place.incarnation}
                )
            except MonolithError as error:
                passing = isinstance(error, (SERVICE.unreachable, SERVICE.late))
                return {server: _Failure(error, place, passing, was_connected=False)}
            return {}

        self._persist(attempt, [server])
        return answers[server]

    def _call_once(self, server: int, kind: Kind, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        line = self._take(server, kind)
        try:
            with self._naming(server):
                return line.caller.call(name, **body)
        finally:
            self._lines.give_back(line)

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
            UnavailableError: One of them has no share yet.
        """
        found = self.call_all("describe")
        for server, about in enumerate(found):
            if about["share"] is None:
                raise UnavailableError(
                    f"{self._name(server)} has no share of the model yet: it is a spare, until the chief "
                    "assigns it one"
                )
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
        """Work with servers that all hold what has this name, and with no others.

        Whoever still waits for a server of what was worked on before hears that it is over.
        """
        self._use([incarnation] * len(self))

    def replace(self, server: int, address: str, incarnation: str) -> PushStanding:
        """Find a server elsewhere, or holding something else, from now on; the run is the same.

        Whoever waits for it goes on there, with the numbers that pushes had.

        Returns:
            How far this process was with who served the place before. What that had not acknowledged by now
            counts only when its successor has: an answer that comes late is asked for again.
        """
        with self._lock:
            self._check_open()
            self._places[server] = _Place(address, incarnation)
            self._replaced[server] += 1
            self._lost.discard(server)
            standing = self._pushes(server)
        self._lines.drop(server, "it was replaced")
        return standing

    def give_up(self, error: MonolithError) -> None:
        """Wait for no lost server any more: whoever does, now or later, raises this. From any thread."""
        with self._lock:
            self._given_up = error

    def _use(self, incarnations: list[str]) -> None:
        with self._lock:
            before = [place.incarnation for place in self._places]
            if any(old not in (None, new) for old, new in zip(before, incarnations, strict=True)):
                self._runs += 1
            self._places = [
                place if place.incarnation == new else _Place(place.address, new)
                for place, new in zip(self._places, incarnations, strict=True)
            ]
            self._lost.clear()
        self._lines.drop_idle("bulk")

    def set_step(self, step: int) -> None:
        """Set the global step, as after a restore."""
        self._heard(0, self.call(0, "set_step", held=True, step=step))

    def read_step(self) -> int:
        """Ask server 0 for the global step."""
        self._heard(0, self.call(0, "step", held=True))
        return self.step

    # Bulk

    def exchange(self, name: str, requests: Mapping[int, Request]) -> dict[int, Answer]:
        """Return the answers of several servers to requests that are made at the same time.

        A request may reach a server more than once.

        Args:
            requests: By server. What they hold must stay as it is meanwhile.

        Raises:
            MonolithError: As of `call`. Other servers may have done what they were asked to.
        """
        return self._exchange(name, requests, {})

    def _exchange(
        self, name: str, requests: Mapping[int, Request], numbers: Mapping[int, int]
    ) -> dict[int, Answer]:
        """Exchange what has these numbers, by server, where each is to be done once."""
        answers: dict[int, Answer] = {}
        runs = self._runs

        def attempt(servers: Collection[int], hurry: bool) -> dict[int, _Failure]:
            asked = {server: requests[server] for server in servers}
            return self._ask(name, asked, answers, numbers=numbers, runs=runs, hurry=hurry)

        self._persist(attempt, requests.keys())
        for server, answer in answers.items():
            self._heard(server, answer.body, overtaken=name in _OVERTAKEN)
        return answers

    def push(self, name: str, requests: Mapping[int, Request]) -> dict[int, Answer]:
        """As `exchange`, for what is to be done once: each request is given the next number of its server."""
        numbered: dict[int, Request] = {}
        numbers: dict[int, int] = {}
        with self._lock:
            for server, (body, data) in requests.items():
                number = self._numbers[server] = self._numbers[server] + 1
                self._unanswered[server].add(number)
                numbers[server] = number
                numbered[server] = _numbered(body, self.sender, number), data
        return self._exchange(name, numbered, numbers)

    def _persist(self, attempt: _Attempt, servers: Collection[int]) -> None:
        """Ask servers until all have answered, or one has not for too long.

        Raises:
            MonolithError: Why; the others may have answered.
        """
        patience, hold = self._patience.total_seconds(), self.hold.total_seconds()
        pending, first_failure, runs = set(servers), 0.0, self._runs
        forgetful: dict[int, _Place] = {}  # who lost its state where it is
        last: dict[int, _Failure] = {}
        hurry = False
        while pending:
            asked = [server for server in pending if self._place(server) is not forgetful.get(server)]
            failures = attempt(asked, hurry) if asked else {}
            pending -= set(asked) - failures.keys()
            if not pending:
                break
            now = time.monotonic()
            first_failure = first_failure if hurry else now
            hurry = True
            last |= failures
            for server, failure in failures.items():
                if not failure.passing:
                    raise failure.error
                self._note_loss(server, failure, max(hold, 0.0 if failure.lost_state else patience))
                if failure.lost_state:
                    forgetful[server] = failure.place
            for server in pending:
                if self._runs != runs:
                    raise last[server].error
                if self._given_up is not None:
                    raise self._given_up from last[server].error
                wait = hold if last[server].lost_state else max(patience, hold)
                if now - first_failure >= wait:
                    raise last[server].error
            if self._stop.wait(_RETRY_AFTER):
                raise self._closed()
        if self._lost:
            with self._lock:
                self._lost -= set(servers)

    def _note_loss(self, server: int, failure: _Failure, wait: float) -> None:
        """Say once that a server is lost. A connection that broke says nothing yet: another may be made."""
        if failure.was_connected and not isinstance(failure.error, SERVICE.late):
            return
        with self._lock:
            if server in self._lost or self._places[server] is not failure.place:
                return
            self._lost.add(server)
        if wait > 0:
            _log.warning("%s; trying for %g s", failure.error, wait)
        if self.on_gone is not None:
            self.on_gone(server, failure.error)

    def _ask(
        self,
        name: str,
        requests: Mapping[int, Request],
        answers: dict[int, Answer],
        *,
        numbers: Mapping[int, int],
        runs: int,
        hurry: bool,
    ) -> dict[int, _Failure]:
        """Make requests once; add to `answers`, and return what failed.

        A numbered one is acknowledged when its answer is here, whatever others still have to say; unless the
        server was replaced since it was asked, whose successor may not have it.
        """
        failures: dict[int, _Failure] = {}
        lines: dict[int, ServerLine] = {}
        with self._lock:
            replaced = tuple(self._replaced)
        try:
            for server, (body, data) in requests.items():
                place = self._places[server]
                try:
                    lines[server] = self._take(server, "bulk", hurry=hurry)
                    self._send(lines[server], name, body, data, runs)
                except (MonolithError, StoppedError) as error:
                    failures[server] = self._failure(server, place, lines.get(server), error)
            for server, line in lines.items():
                if server not in failures and line.stream is not None:
                    place = self._places[server]
                    try:
                        answer = line.stream.receive()
                        self._lines.answered(line)  # another server may keep us waiting past its deadline
                        if not self._acknowledge(server, numbers.get(server), replaced[server]):
                            line.stream.broken = True
                            raise SERVICE.unreachable("it was replaced")
                        answers[server] = answer
                    except (MonolithError, StoppedError) as error:
                        failures[server] = self._failure(server, place, line, error)
        finally:
            for server, line in lines.items():
                if server not in answers and server not in failures and line.stream is not None:
                    line.stream.broken = True  # we were interrupted, and its answer is still to come
                self._lines.give_back(line)
        return failures

    def _acknowledge(self, server: int, number: int | None, replaced: int) -> bool:
        """Count a push as done, and return True; False where another serves the place by now."""
        with self._lock:
            if number is not None and self._replaced[server] != replaced:
                return False
            if number is not None:
                self._unanswered[server].discard(number)
            return True

    def _send(
        self, line: ServerLine, name: str, body: Mapping[str, Any] | RowHeader, data: Any, runs: int
    ) -> None:
        if line.stream is None:
            known = self._place(line.server)
            answer = line.caller.call("hello", incarnation=known.incarnation)
            if known.incarnation is None:
                self._met(line.server, known, answer["incarnation"])
            line.stream = line.caller.open_stream()
        with self._lock:
            if self._runs != runs:
                raise LostStateError("this process works on another run by now")
            meant = self._places[line.server].incarnation
        limit = self._lookup_timeout if name == "lookup" else self._timeout
        if not self._lines.await_answer(line, limit.total_seconds()):
            raise SERVICE.unreachable("it was replaced")
        if isinstance(body, RowHeader):
            line.stream.send_message(body._replace(incarnation=incarnation_bytes(meant)).packed(), data)
        else:
            line.stream.send(name, {**body, "incarnation": meant}, data)

    def _met(self, server: int, place: _Place, incarnation: str) -> None:
        with self._lock:
            if self._places[server] is place:
                self._places[server] = _Place(place.address, incarnation)

    # Dense weights, around a save

    def fetch_dense(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        schedule: LRScheduler | None = None,
    ) -> int:
        """Fill a module's weights, its optimizer and the schedule of that with what the servers hold; return
        the global step.

        Raises:
            RestoreError: They hold other weights, or train them by another optimizer. Nothing has changed.
        """
        requests: dict[int, Request] = {server: ({}, b"") for server in range(len(self))}
        answers = self.exchange("dump_dense", requests)
        states = [read_dense(answers[server].data.tobytes()) for server in range(len(self))]
        fill_dense(parameters, optimizer, states, schedule)
        return states[0].step

    def send_dense(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        step: int | None = None,
        schedule: LRScheduler | None = None,
    ) -> None:
        """Make the servers hold a module's weights and the state of its optimizer, each its share.

        Args:
            step: The global step from now on; by default it stays.
            schedule: Moves the optimizer's rates, on every server.

        Raises:
            RestoreError: A server is in charge of other weights, or trains them by another optimizer.
            SaveError: The optimizer keeps something that is neither number, text nor tensor.
        """
        servers = share_of_weights(parameters, len(self))
        step = self.read_step() if step is None else step
        requests: dict[int, Request] = {}
        for server in range(len(self)):
            mine = {name: parameters[name] for name, owner in servers.items() if owner == server}
            requests[server] = {}, dump_dense(mine, optimizer, step, schedule)
        self.exchange("load_dense", requests)

    def close(self) -> None:
        """Let go of all connections; whoever waits hears of it. Closing again does nothing."""
        self._stop.set()
        with self._lock:
            pool = self._pool
        self._lines.close()
        if pool is not None:
            pool.shutdown()

    # Inside

    def _place(self, server: int) -> _Place:
        with self._lock:
            return self._places[server]

    def _name(self, server: int) -> str:
        return f"parameter server {server} of {len(self)} at {self._place(server).address}"

    @contextmanager
    def _naming(self, server: int) -> Iterator[None]:
        """Say of which server an error is that speaks of a connection, and not of what was asked."""
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
        self, server: int, place: _Place, line: ServerLine | None, cause: MonolithError | StoppedError
    ) -> _Failure:
        """Return what it means that a server, where it was then, did not answer."""
        error = self._named(server, cause)
        if error is not cause:
            error.__cause__ = cause
        connected = line is not None and line.stream is not None
        unheard = line is not None and (line.stream is None or line.is_broken)
        passing = isinstance(error, LostStateError) or (
            unheard and isinstance(error, (SERVICE.unreachable, SERVICE.late))
        )
        return _Failure(error, place, passing, connected)

    def _heard(self, server: int, body: Mapping[str, Any], *, overtaken: bool = False) -> None:
        """Take note of the step that server 0 says it is at; an old answer sets nothing back."""
        if server == 0 and "step" in body:
            with self._lock:
                self._step = max(self._step, body["step"]) if overtaken else body["step"]

    def _take(self, server: int, kind: Kind, *, hurry: bool = False) -> ServerLine:
        self._check_open()
        return self._lines.take(server, kind, hurry=hurry)

    def _connect(self, server: int, kind: Kind, hurry: bool) -> Caller:
        timeout = self._timeout if kind == "bulk" else self._timeout + _LONG_POLL
        return Caller(
            SERVICE,
            lambda: self._place(server).address,
            guard=self._guard,
            patience=self._patience if kind == "small" else timedelta(),
            timeout=min(timeout, _GREET_AGAIN_WITHIN) if hurry and kind == "bulk" else timeout,
            stop=self._stop,
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
