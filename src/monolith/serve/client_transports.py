"""The transports of a client: each sends one call to a server, and returns the raw reply.

A transport knows nothing of the messages it sends; `client_messages` makes them. If a call fails, it raises a
`WireError` that says whether sending it again is safe. There are two for threads and two for event loops, one
of each over HTTP and one over gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from monolith import concurrency
from monolith.cluster.security import HEADER, Guard, grpc_async_channel, grpc_channel
from monolith.errors import (
    DeadlineExceededError,
    ForbiddenError,
    MonolithError,
    OverloadedError,
    RequestError,
    RequestTooLargeError,
    UnavailableError,
    UnknownModelError,
    optional_package,
)
from monolith.serve.client_messages import HttpRawReply, WireCall, WireError, retry_seconds
from monolith.wire.grpc_ports import import_grpc
from monolith.wire.open_inference import RETRY_HEADER, SERVICE, TIMEOUT_HEADER, service_methods

LARGEST_ANSWER = 256 << 20
"""Bytes of an answer; a longer one is refused. Its JSON and its texts have bounds of their own, in
`client_messages`."""
LARGEST_ERROR = 64 << 10
"""Bytes that are read of an answer with another status than 200."""
KEEP_ALIVE = 60.0
"""Seconds that an idle connection is kept: less than servers do, so that none is closed under a request."""
_GRPC_OPTIONS = {
    "grpc.max_receive_message_length": LARGEST_ANSWER,
    "grpc.max_send_message_length": -1,
    # A restarted server is found within a second; by default a channel waits up to two minutes.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.min_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1000,
    # A connection that a firewall dropped without a word fails after this, instead of for ever.
    "grpc.keepalive_time_ms": 60_000,
}
_GRPC_ERRORS: Mapping[str, type[MonolithError]] = {
    "NOT_FOUND": UnknownModelError,
    "RESOURCE_EXHAUSTED": OverloadedError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
    "UNAVAILABLE": UnavailableError,
    "INTERNAL": UnavailableError,
    "UNKNOWN": UnavailableError,
    "UNAUTHENTICATED": ForbiddenError,
    "PERMISSION_DENIED": ForbiddenError,
}


def find_trace_headers() -> Callable[[], dict[str, str]]:
    """Return a function that names the current span of OpenTelemetry, if its package is installed."""
    try:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ModuleNotFoundError:
        return dict
    propagator = TraceContextTextMapPropagator()

    def headers() -> dict[str, str]:
        found: dict[str, str] = {}
        propagator.inject(found)
        return found

    return headers


class ClientTransport(Protocol):
    """Sends calls on the calling thread. Thread-safe."""

    def send(self, call: WireCall[Any], seconds: float) -> Any:
        """Return the raw reply.

        Raises:
            WireError: There is none, within these seconds.
        """

    def close(self) -> None: ...


class AsyncClientTransport(Protocol):
    """Sends calls on the running event loop."""

    async def send(self, call: WireCall[Any], seconds: float) -> Any: ...
    async def close(self) -> None: ...


class _Http:
    """What both transports over HTTP share."""

    def __init__(self, url: str, guard: Guard, context: ssl.SSLContext | None, connections: int) -> None:
        with optional_package("httpx", "serve", "a client over HTTP"):
            import httpx
        self._httpx = httpx
        self._where = url.partition("://")[2]
        self._connections = connections
        # Answers are not compressed unless asked for: between two machines of a rack that costs more than
        # it saves.
        headers = {"accept-encoding": "identity"}
        if guard.header is not None:
            headers[HEADER] = guard.header
        self._extensions = {"sni_hostname": guard.server_name} if guard.server_name else {}
        self._settings: dict[str, Any] = {
            "base_url": url,
            "headers": headers,
            "trust_env": False,  # no proxy and no certificates from the environment
            "limits": httpx.Limits(
                max_connections=connections,
                max_keepalive_connections=connections,
                keepalive_expiry=KEEP_ALIVE,
            ),
        }
        # Without TLS, False keeps httpx from reading the certificates of the system for nothing.
        is_https = url.startswith("https:")
        self._settings["verify"] = (context or ssl.create_default_context()) if is_https else False

    def _request(self, call: WireCall[Any], seconds: float) -> dict[str, Any]:
        """Return the arguments of `httpx.Client.stream`."""
        return {
            "method": call.method,
            "url": call.path,
            "content": call.body,
            "headers": {**call.headers, TIMEOUT_HEADER: str(max(1, int(seconds * 1e3)))},
            # Of each phase: waiting for a connection, connecting, sending, and the head of the answer.
            "timeout": seconds,
            "extensions": dict(self._extensions),
        }

    @contextlib.contextmanager
    def _translated(self, seconds: float) -> Iterator[None]:
        httpx = self._httpx
        try:
            yield
        except httpx.PoolTimeout as cause:
            raise self._too_busy(seconds) from cause
        except (httpx.TimeoutException, TimeoutError) as cause:
            late = f"{self._where} did not answer within {seconds:.3g} s"
            raise WireError(DeadlineExceededError(late)) from cause
        except (httpx.TransportError, ssl.SSLError) as cause:
            gone = UnavailableError(
                f"cannot reach a server at {self._where}: {cause or type(cause).__name__}. Is `monolith "
                "serve` running there?"
            )
            raise WireError(gone, may_retry=True) from cause

    def _too_busy(self, seconds: float) -> WireError:
        busy = f"all {self._connections} connections to {self._where} were busy for {seconds:.3g} s"
        return WireError(DeadlineExceededError(f"{busy} (ClientOptions.connections)"))

    def _takes(self, reply: Any, body: bytearray, part: bytes) -> bool:
        """Add a part to the body of an answer; return whether more of it is wanted.

        Raises:
            WireError: It is too long, or compressed: a few bytes could become any number.
        """
        encoding = reply.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise self._refused(f"is compressed ({encoding[:40]}), which it was not asked to be")
        body += part
        if reply.status_code != 200:
            del body[LARGEST_ERROR:]
            return len(body) < LARGEST_ERROR
        if len(body) > LARGEST_ANSWER:
            raise self._refused(f"has more than {LARGEST_ANSWER} bytes")
        return True

    def _refused(self, why: str) -> WireError:
        return WireError(UnavailableError(f"the answer of {self._where} {why}"))


class HttpTransport(_Http):
    """A pool of HTTP connections for threads.

    Each connection is an httpx client of its own, and one thread uses it at a time. The pool of httpx is not
    safe to share: a thread may close the connection that another one has just begun to use, whose request
    then fails or waits for its timeout (https://github.com/encode/httpcore/issues/1110).
    """

    def __init__(self, url: str, guard: Guard, context: ssl.SSLContext | None, connections: int) -> None:
        super().__init__(url, guard, context, connections)
        self._settings["limits"] = self._httpx.Limits(max_connections=1, keepalive_expiry=KEEP_ALIVE)
        self._room = concurrency.BoundedSemaphore(connections)
        self._idle: list[Any] = []
        """The last one that was used is used next, so that idle ones expire."""
        self._closed = False

    def send(self, call: WireCall[Any], seconds: float) -> HttpRawReply:
        deadline = concurrency.monotonic() + seconds
        if not self._room.acquire(timeout=seconds):
            raise self._too_busy(seconds)
        try:
            try:
                client = self._idle.pop()
            except IndexError:
                client = self._httpx.Client(**self._settings)
            try:
                return self._send(client, call, deadline)
            finally:
                self._idle.append(client)
                if self._closed:
                    self.close()
        finally:
            self._room.release()

    def _send(self, client: Any, call: WireCall[Any], deadline: float) -> HttpRawReply:
        seconds = max(0.001, deadline - concurrency.monotonic())
        body = bytearray()
        with self._translated(seconds), client.stream(**self._request(call, seconds)) as reply:
            for part in reply.iter_raw():
                if not self._takes(reply, body, part):
                    break
                if concurrency.monotonic() > deadline:  # an answer that trickles
                    raise TimeoutError
            return HttpRawReply(reply.status_code, reply.headers, bytes(body))

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().close()


class AsyncHttpTransport(_Http):
    """A pool of HTTP connections for an event loop."""

    def __init__(self, url: str, guard: Guard, context: ssl.SSLContext | None, connections: int) -> None:
        super().__init__(url, guard, context, connections)
        self._client = self._httpx.AsyncClient(**self._settings)

    async def send(self, call: WireCall[Any], seconds: float) -> HttpRawReply:
        body = bytearray()
        with self._translated(seconds):
            async with asyncio.timeout(seconds), self._client.stream(**self._request(call, seconds)) as reply:
                async for part in reply.aiter_raw():
                    if not self._takes(reply, body, part):
                        break
                return HttpRawReply(reply.status_code, reply.headers, bytes(body))
        raise AssertionError("unreachable")

    async def close(self) -> None:
        await self._client.aclose()


def _grpc_failure(where: str, error: Any) -> WireError:
    """Return the failure that a gRPC error is."""
    code, details = error.code().name, error.details()
    pushback = [value for key, value in error.trailing_metadata() or () if key == RETRY_HEADER]
    never = any(value.startswith("-") for value in pushback)
    kind = _GRPC_ERRORS.get(code, RequestError)
    if kind is OverloadedError and never:
        kind = RequestTooLargeError
    return WireError(
        kind(f"{where} answered {code}: {details}"),
        may_retry=code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED") and not never,
        wait=retry_seconds(pushback[0]) / 1e3 if pushback else 0.0,
    )


class _GrpcMethods:
    """The methods of a channel, each made when it is first called."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self._methods: dict[str, Any] = {}

    def method(self, name: str) -> Any:
        found = self._methods.get(name)
        if found is None:
            request, reply = service_methods()[name]
            found = self._methods[name] = self.channel.unary_unary(
                f"/{SERVICE}/{name}",
                request_serializer=request.SerializeToString,
                response_deserializer=reply.FromString,
            )
        return found


class GrpcTransport:
    """A gRPC channel for threads; all requests share its connection."""

    def __init__(self, address: str, guard: Guard) -> None:
        self._error = import_grpc("serve", "requests over gRPC").RpcError
        self._where = address
        self._methods = _GrpcMethods(grpc_channel(address, guard, _GRPC_OPTIONS))

    def send(self, call: WireCall[Any], seconds: float) -> Any:
        try:
            send = self._methods.method(call.method)
            return send(call.body, timeout=seconds, metadata=tuple(call.headers.items()))
        except self._error as cause:
            raise _grpc_failure(self._where, cause) from cause

    def close(self) -> None:
        self._methods.channel.close()


class AsyncGrpcTransport:
    """A gRPC channel for the event loop that first uses it."""

    def __init__(self, address: str, guard: Guard) -> None:
        self._error = import_grpc("serve", "requests over gRPC").RpcError
        self._where, self._guard = address, guard
        self._methods: _GrpcMethods | None = None

    async def send(self, call: WireCall[Any], seconds: float) -> Any:
        if self._methods is None:  # a channel belongs to the loop that runs when it is made
            self._methods = _GrpcMethods(grpc_async_channel(self._where, self._guard, _GRPC_OPTIONS))
        try:
            send = self._methods.method(call.method)
            return await send(call.body, timeout=seconds, metadata=tuple(call.headers.items()))
        except self._error as cause:
            raise _grpc_failure(self._where, cause) from cause

    async def close(self) -> None:
        if self._methods is not None:
            await self._methods.channel.close()
