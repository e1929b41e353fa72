"""Clients of inference servers: `Client` for threads, `AsyncClient` for event loops.

    with Client("http://127.0.0.1:8000") as client:
        answer = client.predict("clicks", [{"user": "ann", "price": 3.5}])

They work with any server of the Open Inference Protocol: the inputs of a model are read from its metadata.

Both classes hold the same conversation with a server, `_Conversation`. It is written once, as generators that
yield a call to send or a number of seconds to wait, and are told the reply: nothing in it blocks, so a thread
and an event loop can both run it.

    inputs of the model cached? ──no──► fetch ──► encode ──► send ──► read ──► new enough? ──► answer
                  ▲                                 ▲ │        │
                  └── refused, or another version ──┘ └─retry──┘ connection lost, 429, 503, UNAVAILABLE
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from monolith import concurrency
from monolith.cluster.security import Guard, SecurityConfig, guard_caller, ssl_context
from monolith.config import Checked, Problem
from monolith.errors import ConfigError, DeadlineExceededError, RequestError, StaleAnswerError
from monolith.serve.client_messages import (
    ClientAnswer,
    ClientInput,
    Dialect,
    GrpcDialect,
    HttpDialect,
    InferQuestion,
    ItemSearch,
    Row,
    TopKAnswer,
    WireCall,
    WireError,
    encode_inputs,
)
from monolith.serve.client_transports import (
    AsyncClientTransport,
    AsyncGrpcTransport,
    AsyncHttpTransport,
    ClientTransport,
    GrpcTransport,
    HttpTransport,
    find_trace_headers,
)

T = TypeVar("T")
Inputs = Sequence[Row] | Mapping[str, Any]
"""Rows, each a value or a list of values by column; or columns, each a list or an array."""
_Step = tuple[WireCall[Any], float] | float
"""A call and the seconds for it; or seconds to wait."""
_MOST_VERSIONS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientOptions(Checked):
    """How a client asks: its deadline, its retries, and how old an answer may be.

    Examples:
        >>> from datetime import timedelta
        >>> from monolith.serve import ClientOptions
        >>> options = ClientOptions(timeout=timedelta(milliseconds=50), max_staleness=timedelta(seconds=10))
        >>> options.retries
        2
    """

    timeout: timedelta = timedelta(seconds=10)
    """Longest time for an answer, retries included. The server is told, and drops work that is too late."""
    retries: int = 2
    """How often a request is repeated if its connection was lost or the server was too busy, as long as the
    timeout allows it. A request that timed out, or that the server refused, is not repeated."""
    backoff: timedelta = timedelta(milliseconds=50)
    """Time before the first retry; it doubles with each. A random half of it is left out, so that clients do
    not return all at once. A server that says when to retry is not asked before."""
    max_staleness: timedelta | None = None
    """Largest age, when an answer arrives, of the rows that it was made of. An older answer, or one of
    unknown age, raises `StaleAnswerError`, which has the answer. The time since the request was sent counts
    as age: a client cannot know how much of it passed after the rows were read."""
    priority: int = 0
    """From 1, answered first, to 9; 0 leaves it to the server, whose default is 5."""
    connections: int = 16
    """Largest number of HTTP connections; requests beyond wait for one. Over gRPC all requests share one."""

    def problems(self) -> Iterator[Problem]:
        if self.timeout <= timedelta(0):
            yield Problem(("timeout",), "must be more than 0")
        if self.retries < 0:
            yield Problem(("retries",), f"must be 0 or more, got {self.retries}")
        if self.backoff < timedelta(0):
            yield Problem(("backoff",), "must be 0 or more")
        if self.max_staleness is not None and self.max_staleness < timedelta(0):
            yield Problem(("max_staleness",), "must be 0 or more")
        if not 0 <= self.priority <= 9:
            yield Problem(("priority",), f"must be from 0 to 9, got {self.priority}")
        if self.connections < 1:
            yield Problem(("connections",), f"must be at least 1, got {self.connections}")


@dataclass(slots=True)
class _Described:
    """The inputs of a model, and the versions that have answered."""

    inputs: tuple[ClientInput, ...]
    versions: set[str] = field(default_factory=set)
    outdated: bool = False
    """Whether a version has answered that may take other inputs."""


class _Conversation:
    """What a client says to a server; see the top of the module. Thread-safe.

    Metadata is fetched once. It is fetched again if a version answers that did not before, which may take
    more inputs, and if the server refuses a request that was made from cached metadata.
    """

    def __init__(self, dialect: Dialect, options: ClientOptions, clock: Callable[[], float]) -> None:
        self._dialect = dialect
        self._options = options
        self._clock = clock
        self._random = random.Random(concurrency.token_hex(16))
        self._trace_headers = find_trace_headers()
        self._described: dict[tuple[str, str], _Described] = {}
        self._extensions: tuple[str, ...] | None = None

    def models(self) -> Generator[_Step, Any, list[str]]:
        return (yield from self._call(self._dialect.models(), self._options, self._deadline(self._options)))

    def inputs(self, model: str, version: str) -> Generator[_Step, Any, tuple[ClientInput, ...]]:
        found = yield from self._describe(model, version, self._options, self._deadline(self._options))
        return found.inputs

    def predict(
        self, question: InferQuestion, given: Inputs, options: ClientOptions
    ) -> Generator[_Step, Any, ClientAnswer]:
        key = question.model, question.version
        deadline = self._deadline(options)
        cached = described = self._described.get(key)
        while True:
            if described is None or described.outdated:
                cached = None
                described = yield from self._describe(*key, options, deadline)
            try:
                tensors, ignored = encode_inputs(described.inputs, given)
                if question.search is not None:
                    tensors = [*tensors, *question.search.exclude]
                asked = replace(question, tensors=tensors, priority=options.priority)
                call = self._dialect.infer(asked, self._extensions or ())
                if trace := self._trace_headers():
                    call = replace(call, headers={**call.headers, **trace})
                answer, seconds = yield from self._timed_call(call, options, deadline)
                break
            except RequestError as error:
                # Perhaps the model takes other inputs than when it was described, a moment ago or long since.
                if type(error) is not RequestError:
                    raise
                before, cached = described, None
                described = yield from self._describe(*key, options, deadline)
                if described.inputs == before.inputs:
                    raise
        if ignored:
            answer = replace(answer, ignored=ignored)
        if answer.version not in described.versions:
            described.outdated = cached is not None and bool(described.versions)
            if len(described.versions) >= _MOST_VERSIONS:
                described.versions.clear()
            described.versions.add(answer.version)  # a split answers with two in turns; each is news once
        self._check_age(answer, seconds, options)
        return answer

    def topk(
        self, question: InferQuestion, users: Inputs, options: ClientOptions
    ) -> Generator[_Step, Any, TopKAnswer]:
        try:
            return TopKAnswer.of((yield from self.predict(question, users, options)))
        except StaleAnswerError as error:
            error.answer = TopKAnswer.of(error.answer)
            raise

    def _deadline(self, options: ClientOptions) -> float:
        return self._clock() + options.timeout.total_seconds()

    def _describe(
        self, model: str, version: str, options: ClientOptions, deadline: float
    ) -> Generator[_Step, Any, _Described]:
        """Fetch the inputs of a model; once in a client's life also which extensions the server has."""
        if self._extensions is None:
            call = self._dialect.extensions()
            self._extensions = () if call is None else (yield from self._call(call, options, deadline))
        inputs = yield from self._call(self._dialect.inputs(model, version), options, deadline)
        before = self._described.get((model, version))
        found = _Described(inputs, set() if before is None else before.versions)
        self._described[model, version] = found
        return found

    def _call(self, call: WireCall[T], options: ClientOptions, deadline: float) -> Generator[_Step, Any, T]:
        answer, _ = yield from self._timed_call(call, options, deadline)
        return answer

    def _timed_call(
        self, call: WireCall[T], options: ClientOptions, deadline: float
    ) -> Generator[_Step, Any, tuple[T, float]]:
        """Send a call, again and again if that is safe and may help; return the answer, and the seconds since
        it was sent for the last time."""
        attempt = 0
        while True:
            sent = self._clock()
            left = deadline - sent
            if left <= 0:
                raise DeadlineExceededError(
                    f"no answer within {options.timeout.total_seconds():g} s ({attempt} attempts)"
                )
            try:
                return call.read((yield call, left)), self._clock() - sent
            except WireError as failure:
                backoff = options.backoff.total_seconds() * 2**attempt * self._random.uniform(0.5, 1.0)
                wait = max(backoff, failure.wait)
                if not failure.may_retry or attempt >= options.retries or self._clock() + wait >= deadline:
                    raise failure.error from failure.__cause__
            attempt += 1
            yield wait

    def _check_age(self, answer: ClientAnswer, seconds: float, options: ClientOptions) -> None:
        """Refuse an answer that is too old, so many seconds after it was asked for."""
        most, age = options.max_staleness, answer.staleness
        if age is not None:
            age += timedelta(seconds=round(seconds, 3))
        if most is not None and (age is None or age > most):
            raise StaleAnswerError(answer.model, age, most, answer)


class _Connected:
    """What both clients are made of: a conversation, and how calls reach the server."""

    def __init__(
        self,
        url: str,
        options: ClientOptions | None,
        security: SecurityConfig | None,
        clock: Callable[[], float],
    ) -> None:
        self._options = options or ClientOptions()
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if parts.scheme not in ("http", "https", "grpc") or not host:
            raise ConfigError(
                f"cannot connect to {url!r}: write http://host:port, https://host:port or grpc://host:port"
            )
        self._guard = _caller(security)
        self._context = None if security is None else ssl_context(security, server=False)
        self._is_grpc = parts.scheme == "grpc"
        address = f"{f'[{host}]' if ':' in host else host}:{port or (8001 if self._is_grpc else 8000)}"
        self._place = address if self._is_grpc else f"{parts.scheme}://{address}"
        dialect: Dialect = GrpcDialect(address) if self._is_grpc else HttpDialect(address)
        self._talk = _Conversation(dialect, self._options, clock)

    @property
    def options(self) -> ClientOptions:
        """The options of requests that have none of their own."""
        return self._options


def _caller(security: SecurityConfig | None) -> Guard:
    """Return what a client presents: the token it was given, or the one for predictions."""
    guard = Guard() if security is None else guard_caller(security)
    return guard if guard.token is not None else guard.for_role("predict")


class Client(_Connected):
    """Asks an inference server, over HTTP or gRPC. Any number of threads may share one.

    Connections are kept and shared. The inputs of a model are fetched once, and again when another version
    answers. A request is repeated if that is safe; see `ClientOptions`.

    Args:
        url: http://host:port, https://host:port or grpc://host:port.
        options: Deadline, retries, and how old an answer may be.
        security: The token and the certificates to present.
        clock: Seconds that only grow.
        sleep: Waits so many seconds.

    Raises:
        ConfigError: The URL is malformed, or a file of `security` cannot be read.

    Examples:
        >>> from monolith import Client, ClientOptions, RetryableError
        >>> with Client("http://127.0.0.1:1", options=ClientOptions(retries=0)) as client:
        ...     try:
        ...         answer = client.predict("ads", [{"user": "ann", "price": 3.5}])
        ...         scores = answer.outputs["click"]
        ...     except RetryableError:  # also too many requests, and a timeout
        ...         print("no server is there")
        no server is there
    """

    def __init__(
        self,
        url: str,
        *,
        options: ClientOptions | None = None,
        security: SecurityConfig | None = None,
        clock: Callable[[], float] = concurrency.monotonic,
        sleep: Callable[[float], None] = concurrency.sleep,
    ) -> None:
        super().__init__(url, options, security, clock)
        self._sleep = sleep
        self._transport: ClientTransport = (
            GrpcTransport(self._place, self._guard)
            if self._is_grpc
            else HttpTransport(self._place, self._guard, self._context, self._options.connections)
        )

    def predict(
        self,
        model: str,
        inputs: Inputs,
        *,
        version: str = "",
        outputs: Sequence[str] = (),
        request_id: str = "",
        split_key: str = "",
        options: ClientOptions | None = None,
    ) -> ClientAnswer:
        """Return the predictions of a model for some rows.

        Args:
            inputs: Rows, each a value or a list of values by column: `[{"user": "ann", "tags": ["a", "b"]}]`;
                or columns: `{"user": ["ann", "bo"], "price": np.array([3.5, 1.0])}`. A value that is None or
                left out is missing. Columns that the model does not read are not sent.
                To rank items for one user, give the columns of the user one row, and those of the items a row
                each: `{"user": ["ann"], "item": ["i1", "i2", "i3"]}`.
            version: Empty lets the server choose.
            outputs: Names of the outputs to return; empty returns all.
            request_id: Sent with the request and returned with the answer.
            split_key: Requests with the same key are answered by the same target of a split.
            options: Options of this request, in place of those of the client; `connections` is the client's.

        Raises:
            RequestError: A value does not fit the model, here or by the server's answer; the token is wrong
                (ForbiddenError), the server has no such model (UnknownModelError), or there are too many rows
                (RequestTooLargeError).
            UnavailableError: The server cannot be reached, or cannot answer now.
            OverloadedError: The server has as many requests as it takes.
            DeadlineExceededError: There is no answer within the timeout. The client can be used again.
            StaleAnswerError: The answer is older than `max_staleness`.
        """
        question = InferQuestion(model, version, (), outputs, request_id, split_key, 0)
        return self._run(self._talk.predict(question, inputs, options or self._options))

    def topk(
        self,
        model: str,
        users: Inputs,
        k: int = 10,
        *,
        filters: Mapping[str, Any] | None = None,
        exclude: Collection[Any] = (),
        version: str = "",
        options: ClientOptions | None = None,
    ) -> TopKAnswer:
        """Return the best items of a retrieval model for some users.

        Args:
            users: The features of the user tower, in rows or columns as for `predict`.
            k: How many items each user gets; there are fewer if filters leave fewer.
            filters: Attribute of the catalogue -> a value, a list of values of which an item has one, or
                `{"min": ..., "max": ...}`.
            exclude: Items that are not returned, such as those that the user has seen; for several users, a
                collection of items for each.
            version: Empty lets the server choose.
            options: Options of this request, in place of those of the client; `connections` is the client's.

        Raises:
            RequestError: As for `predict`; also if the model has no towers, or the catalogue has no such
                attribute.
            RetryableError: As for `predict`.
        """
        question = InferQuestion(model, version, (), (), "", "", 0, ItemSearch.of(k, filters, exclude))
        return self._run(self._talk.topk(question, users, options or self._options))

    def models(self) -> list[str]:
        """Return the names of the server's models; raises as `predict` does."""
        return self._run(self._talk.models())

    def inputs(self, model: str, version: str = "") -> tuple[ClientInput, ...]:
        """Return the inputs that a model takes; raises as `predict` does."""
        return self._run(self._talk.inputs(model, version))

    def close(self) -> None:
        """Close all connections."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, talk: Generator[_Step, Any, T]) -> T:
        try:
            step = next(talk)
            while True:
                try:
                    reply = self._sleep(step) if isinstance(step, float) else self._transport.send(*step)
                except WireError as failure:
                    step = talk.throw(failure)
                else:
                    step = talk.send(reply)
        except StopIteration as end:
            result: T = end.value
            return result


class AsyncClient(_Connected):
    """Asks an inference server from an event loop of asyncio, over HTTP or gRPC.

    It is `Client` with methods to await. All requests of one `AsyncClient` must be of one event loop.

    Args:
        url: http://host:port, https://host:port or grpc://host:port.
        options: Deadline, retries, and how old an answer may be.
        security: The token and the certificates to present.
        clock: Seconds that only grow.
        sleep: Waits so many seconds.

    Raises:
        ConfigError: The URL is malformed, or a file of `security` cannot be read.

    Examples:
        >>> import asyncio
        >>> from monolith import AsyncClient, ClientOptions, RetryableError
        >>> async def ask():
        ...     async with AsyncClient("grpc://127.0.0.1:1", options=ClientOptions(retries=0)) as client:
        ...         rows = [{"user": "ann"}], [{"user": "bo"}]
        ...         return await asyncio.gather(*(client.predict("ads", some) for some in rows))
        >>> try:
        ...     asyncio.run(ask())
        ... except RetryableError:
        ...     print("no server is there")
        no server is there
    """

    def __init__(
        self,
        url: str,
        *,
        options: ClientOptions | None = None,
        security: SecurityConfig | None = None,
        clock: Callable[[], float] = concurrency.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        super().__init__(url, options, security, clock)
        self._sleep = sleep
        self._transport: AsyncClientTransport = (
            AsyncGrpcTransport(self._place, self._guard)
            if self._is_grpc
            else AsyncHttpTransport(self._place, self._guard, self._context, self._options.connections)
        )

    async def predict(
        self,
        model: str,
        inputs: Inputs,
        *,
        version: str = "",
        outputs: Sequence[str] = (),
        request_id: str = "",
        split_key: str = "",
        options: ClientOptions | None = None,
    ) -> ClientAnswer:
        """Return the predictions of a model for some rows; see `Client.predict`."""
        question = InferQuestion(model, version, (), outputs, request_id, split_key, 0)
        return await self._run(self._talk.predict(question, inputs, options or self._options))

    async def topk(
        self,
        model: str,
        users: Inputs,
        k: int = 10,
        *,
        filters: Mapping[str, Any] | None = None,
        exclude: Collection[Any] = (),
        version: str = "",
        options: ClientOptions | None = None,
    ) -> TopKAnswer:
        """Return the best items of a retrieval model for some users; see `Client.topk`."""
        question = InferQuestion(model, version, (), (), "", "", 0, ItemSearch.of(k, filters, exclude))
        return await self._run(self._talk.topk(question, users, options or self._options))

    async def models(self) -> list[str]:
        """Return the names of the server's models; raises as `predict` does."""
        return await self._run(self._talk.models())

    async def inputs(self, model: str, version: str = "") -> tuple[ClientInput, ...]:
        """Return the inputs that a model takes; raises as `predict` does."""
        return await self._run(self._talk.inputs(model, version))

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, talk: Generator[_Step, Any, T]) -> T:
        try:
            step = next(talk)
            while True:
                reply: Any = None
                try:
                    if isinstance(step, float):
                        await self._sleep(step)
                    else:
                        reply = await self._transport.send(*step)
                except WireError as failure:
                    step = talk.throw(failure)
                else:
                    step = talk.send(reply)
        except StopIteration as end:
            result: T = end.value
            return result
