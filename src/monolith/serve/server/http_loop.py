"""The loop that reads HTTP: uvicorn's parser and protocol, with the bounds that they lack.

One event loop reads and writes for all connections (docs/decisions/0040 says why), and hands each request to
an application. It bounds what hostile clients can do: a head that is too long or never ends, more connections
than are allowed, all together or of one peer. Bodies are the application's.

A connection that begins as HTTP/2 does is gRPC's, where both share a port: its bytes go to and from the
gRPC server of this process, over a unix socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from monolith import concurrency
from monolith.cluster.security import is_loopback
from monolith.errors import optional_package
from monolith.serve.config import ServeLimits
from monolith.wire.ports import within_files

_log = logging.getLogger(__name__)

HEAD_BYTES = 64 << 10
"""The longest head of a request: its first line and headers."""
KEEP_ALIVE_SECONDS = 75
HTTP2 = b"PRI"
"""How HTTP/2 begins, and no method of HTTP/1 does."""
BACKLOG = 2048
SPARE = 64
"""Connections beyond the most that only ask whether the server lives; of one peer, an eighth of it."""
PROBE_SECONDS = 2.0
"""How long such a connection may take for its request."""
_HOST = re.compile(r"(\[[0-9a-f:.%]+\]|[a-z0-9]([a-z0-9._-]*[a-z0-9])?)(:[0-9]{1,5})?", re.IGNORECASE)
_REMEMBERED_HOSTS = 64

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]
"""As ASGI has it."""


class KnownHosts:
    """The names by which clients reach a listener; requests for other names are refused.

    A page of any site can make its own name mean this machine, and its user's browser then takes us for that
    site (DNS rebinding). A page cannot choose what the browser sends as `Host`.

    Args:
        host: The address listened on.
        allowed: Other names that are fine.
        any_name: Whether all names are: a token or a certificate is asked for, which such a page lacks.
    """

    def __init__(self, host: str, allowed: Iterable[str] = (), *, any_name: bool = False) -> None:
        names = ("localhost", host, *allowed)
        self._names = frozenset(name.strip("[]").lower() for name in names)
        self._any_name = any_name
        self._only_here = is_loopback(host)
        self._seen: set[str] = set()
        """Headers that were found to be right; clients send the same ones again and again."""

    def knows(self, header: str) -> bool:
        """Whether a Host header names this server. Called on the loop only."""
        if header in self._seen:
            return True
        match = _HOST.fullmatch(header)
        if match is None:
            return False
        name = match[1].strip("[]").lower()
        known = self._any_name or name in self._names or self._is_ours(name)
        if known and len(self._seen) < _REMEMBERED_HOSTS:
            self._seen.add(header)
        return known

    def refusal(self, method: str, headers: Mapping[str, str]) -> str | None:
        """Return why a request is refused; None if it is not. Programs need not send these headers."""
        host = headers.get("host")
        if host is not None and not self.knows(host):
            return (
                f"the Host header {host[:80]!r} does not name this server; use the address that it listens "
                "on, or start it with --allowed-hosts"
            )
        follows_link = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
        if is_cross_site(headers) and not follows_link:
            return "a page of another site has sent this"
        return None

    def _is_ours(self, name: str) -> bool:
        """Whether a name is an address, which no site can make mean another one."""
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not self._only_here


def is_cross_site(headers: Mapping[str, str]) -> bool:
    """Whether a browser says that a page of another site has sent a request."""
    origin = headers.get("origin")
    same = origin is None or origin.partition("://")[2].lower() == headers.get("host", "").lower()
    return not same or headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none")


class HttpLoop:
    """Answers HTTP on sockets that are bound already, until closed.

    Args:
        app: Answers requests, on the loop.
        sockets: Bound; owned from now on.
        context: For TLS, on all of them.
        limits: Of connections, and how long a caller may take for a head.
        relay: The unix socket of a gRPC server, for connections that begin as HTTP/2.
        peer_socket: Another place to listen, for processes of this user, without TLS.
        probes: Paths that are answered on connections beyond the most, too.
    """

    def __init__(
        self,
        app: Application,
        sockets: list[socket.socket],
        *,
        context: Any = None,
        limits: ServeLimits,
        relay: Path | None = None,
        peer_socket: Path | None = None,
        probes: Iterable[str] = (),
    ) -> None:
        uvicorn, self._protocol = _import_uvicorn()
        config = uvicorn.Config(
            app,
            http=self._protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            backlog=BACKLOG,
            proxy_headers=False,
        )
        config.load()
        config.ssl = context
        self._bounds = _Bounds(limits, relay, probes)
        config.monolith = self._bounds
        self._server = uvicorn.Server(config)
        self._config = config
        self._sockets = sockets
        self._peer_socket = peer_socket
        self._ready = concurrency.Event()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = concurrency.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure

    def close(self, grace: float) -> None:
        """Take no new requests, and wait so many seconds for those in flight."""
        self._bounds.closing = True
        self._config.timeout_graceful_shutdown = max(1, int(grace))
        self._server.should_exit = True
        self._thread.join(grace + 5)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(self._serve())
        except BaseException as error:
            self._failure = error
            if self._ready.is_set():
                _log.exception("the HTTP server failed")
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = self._server
        serving = asyncio.ensure_future(server.serve(self._sockets))
        while not server.started and not serving.done():
            await asyncio.sleep(0.001)
        peers = None
        if self._peer_socket is not None and not serving.done():
            plain = self._config
            peers = await self._loop.create_unix_server(
                lambda: self._protocol(plain, server.server_state, {}), str(self._peer_socket)
            )
            self._peer_socket.chmod(0o600)
        self._ready.set()
        try:
            await serving
        finally:
            if peers is not None:
                peers.close()


class _Bounds:
    """What the protocol of a connection looks at. Used on the loop only."""

    def __init__(self, limits: ServeLimits, relay: Path | None, probes: Iterable[str]) -> None:
        self.read_timeout = limits.read_timeout.total_seconds()
        self.relay = relay
        self.probes = frozenset(path.encode() for path in probes)
        self.closing = False
        """Whether connections that are made from now on are closed: uvicorn tells only those that it had."""
        self._most = within_files(limits.connections)
        if self._most < limits.connections:
            _log.info(
                "a port takes %d connections and not %d (serve.limits.connections): a quarter of the files "
                "that this process may open. For more, raise the hard limit of files (ulimit -Hn)",
                self._most,
                limits.connections,
            )
        self._most_of_peer = limits.peer_connections
        self.waiting: dict[Any, str] = {}
        """Connections beyond the most whose probe has not come yet, oldest first -> their peer."""
        self._count = 0
        self._of_peer: dict[str, int] = {}

    def enter(self, peer: str) -> tuple[bool, bool]:
        """Count a connection; return whether it is one too many, and whether it cannot even be a probe."""
        own = self._of_peer.get(peer, 0)
        self._count += 1
        self._of_peer[peer] = own + 1
        spare = SPARE if self.probes else 0
        over = self._count > self._most or (peer != "" and own >= self._most_of_peer)
        far_over = self._count > self._most + spare or (peer != "" and own >= self._most_of_peer + spare // 8)
        return over, far_over

    def make_room(self, peer: str) -> bool:
        """Close the connection that has waited longest without a probe, of this peer if it has one."""
        oldest = next((one for one, its in self.waiting.items() if its == peer), None)
        oldest = oldest or next(iter(self.waiting), None)
        if oldest is not None:
            del self.waiting[oldest]
            oldest.transport.close()
        return oldest is not None

    def leave(self, peer: str) -> None:
        self._count -= 1
        left = self._of_peer[peer] - 1
        if left:
            self._of_peer[peer] = left
        else:
            del self._of_peer[peer]


class _Relay(asyncio.Protocol):
    """One end of a connection that is passed on: what comes here is written there.

    Args:
        closed: Called when this end is closed.
    """

    def __init__(
        self,
        other: asyncio.Transport | None = None,
        first: bytes = b"",
        closed: Callable[[], None] = lambda: None,
    ) -> None:
        self._other = other
        self._held = [first]
        self._closed = closed

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        if self._other is not None:
            transport.write(b"".join(self._held))

    def join(self, other: asyncio.Transport) -> None:
        """Learn where to write, and write what came before."""
        self._other = other
        if whole := b"".join(self._held):
            other.write(whole)

    def data_received(self, data: bytes) -> None:
        if self._other is None:
            self._held.append(data)
        else:
            self._other.write(data)

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        self._closed()
        if self._other is not None:
            self._other.close()

    # The end that cannot be written to fast enough keeps the other one from reading.

    def pause_writing(self) -> None:
        if self._other is not None:
            self._other.pause_reading()

    def resume_writing(self) -> None:
        if self._other is not None and not self._other.is_closing():
            self._other.resume_reading()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    with contextlib.suppress(ImportError):
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
        return factory
    return None


def _import_uvicorn() -> tuple[Any, Any]:
    """Return uvicorn, and its protocol with the bounds that it lacks.

    Raises:
        MissingExtraError: Either is not installed.
    """
    with optional_package("uvicorn with httptools", "serve", "serving over HTTP", "uvicorn", "httptools"):
        import uvicorn
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class BoundedProtocol(HttpToolsProtocol):
        """One connection: a head within bytes and time, and not too many connections.

        The timer runs while a head is awaited that has begun, or that never has. A connection beyond the most
        is answered probes only.
        """

        def connection_made(self, transport: Any) -> None:
            self._bounds: _Bounds = self.config.monolith  # type: ignore[attr-defined]
            self._head = b""
            self._head_bytes = 0
            self._in_head = True
            self._known = self._bounds.relay is None
            self._refused = False
            self._timer = None
            super().connection_made(transport)
            self._peer = self.client[0] if self.client else ""
            self._probes_only, far_over = self._bounds.enter(self._peer)
            if self._bounds.closing:
                transport.close()
                return
            # A probe sends its request at once: idle connections are no reason to refuse it.
            if far_over and not self._bounds.make_room(self._peer):
                self._refuse(503, "too many connections")
                return
            wait = self._bounds.read_timeout
            if self._probes_only:
                self._bounds.waiting[self] = self._peer
                self.timeout_keep_alive = 1
                wait = min(wait, PROBE_SECONDS)
            self._timer = self.loop.call_later(wait, self._too_slow)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            self._bounds.waiting.pop(self, None)
            self._bounds.leave(self._peer)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if not self._known:
                self._head += data
                if HTTP2.startswith(self._head[: len(HTTP2)]) and len(self._head) < len(HTTP2):
                    return
                self._known = True
                data, self._head = self._head, b""
                if data.startswith(HTTP2):
                    if self._probes_only:
                        self.transport.close()
                    else:
                        self._hand_over(data)
                    return
            if self.transport.is_closing():
                return
            if self._in_head:
                self._head_bytes += len(data)
                if self._timer is None:
                    self._timer = self.loop.call_later(self._bounds.read_timeout, self._too_slow)
            super().data_received(data)
            if self._in_head and self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
                self._refuse(431, f"the head of the request is longer than {HEAD_BYTES} bytes")

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._stop_timer()
            self._bounds.waiting.pop(self, None)
            if self._probes_only and self.url.partition(b"?")[0] not in self._bounds.probes:
                self._refuse(503, "too many connections, of all clients or of this one; retry later")
                return
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            if not self._refused:
                super().on_body(body)

        def on_message_complete(self) -> None:
            self._in_head = True
            self._head_bytes = 0
            if not self._refused:
                super().on_message_complete()

        def send_400_response(self, msg: str) -> None:
            self._refuse(400, msg)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _too_slow(self) -> None:
            self._timer = None
            if self._in_head and not self.transport.is_closing():
                if self._head_bytes or self._head:
                    self._refuse(408, "the head of the request took too long")
                else:
                    self.transport.close()

        def _refuse(self, status: int, text: str) -> None:
            self._refused = True
            body = json.dumps({"error": text}).encode()
            self.transport.write(
                b"HTTP/1.1 %d Refused\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
                b"connection: close\r\n\r\n%s" % (status, len(body), body)
            )
            self.transport.close()

        def _hand_over(self, data: bytes) -> None:
            """Pass this connection on to the gRPC server."""
            self._stop_timer()
            self.connections.discard(self)
            bounds, peer = self._bounds, self._peer
            near = _Relay(first=b"", closed=lambda: bounds.leave(peer))
            transport = self.transport
            transport.set_protocol(near)
            near.connection_made(transport)
            task = self.loop.create_task(_connect_relay(self.loop, self._bounds.relay, transport, near, data))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    return uvicorn, BoundedProtocol


async def _connect_relay(
    loop: asyncio.AbstractEventLoop, path: Path | None, transport: Any, near: _Relay, data: bytes
) -> None:
    try:
        far, _ = await loop.create_unix_connection(lambda: _Relay(transport, data), str(path))
    except OSError:
        transport.close()
        return
    near.join(far)
