"""What a browser is answered: the page, what is new, and its buttons.

    GET  /                          the page; its files hold nothing that is secret, and are open to all
    GET  /events                    server-sent events: all there is, then what changes
    GET  /state                     all there is, once
    POST /publish/hold|resume|rollback
    POST /splits/set                divide the requests of a server in another way

A page on this machine can be called by every site that its user visits, so no call is trusted because of
where it comes from. `Host` must name this machine, or a name of the attacker's could be made to mean it. What
acts needs a header that no other site can send without being asked first, which is refused; and where the
browser says who sent it, that must be the page itself. Nothing is known by a cookie: beyond this machine a
token is sent with each call.

The page as a whole: from its sources to an address for a browser.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import resources
from types import TracebackType
from typing import Annotated, Any, Self

from monolith.cluster.security import REFUSAL, Guard, SecurityConfig, guard_listener, is_loopback
from monolith.config import Secret
from monolith.errors import ConfigError, MonolithError, RequestError, UnavailableError
from monolith.serve.config import ServeLimits
from monolith.serve.server.http_loop import HttpLoop, KnownHosts, Message, Receive, Send, is_cross_site
from monolith.ui.board import EVERY, Board, PageSource, Seen
from monolith.ui.sources import source_of
from monolith.wire.messages import Bounds, Name, read_message
from monolith.wire.ports import bound_socket, join_address

_log = logging.getLogger(__name__)

PAGE_HEADER = "x-monolith-page"
"""Sent by the page with whatever acts. Another site cannot, unless a question to us is answered with yes."""
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}
"""With every answer: nothing is fetched from elsewhere, framed, or kept."""
MOST_BODY = 16 << 10
MOST_STREAMS = 64
"""Onlookers at a time."""
BODY_SECONDS = 10.0
WRITE_SECONDS = 30.0
"""A browser that reads nothing for so long is disconnected."""
QUIET_SECONDS = 15.0
"""After so long without news a comment line is sent, so that a closed connection is noticed."""


@dataclass(frozen=True, slots=True)
class HoldRequest:
    """Pause publishing."""

    source: Name
    reason: Annotated[str, Bounds(0, 500)] = ""


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """Resume publishing."""

    source: Name


@dataclass(frozen=True, slots=True)
class RollbackRequest:
    """Roll servers back to an exported version."""

    source: Name
    version: Annotated[str, Bounds(1, 200)]


@dataclass(frozen=True, slots=True)
class SplitRequest:
    """Divide the requests for a name in another way."""

    source: Name
    name: Annotated[str, Bounds(1, 200)]
    targets: Annotated[str, Bounds(0, 2000)]


ACTIONS = ("/publish/hold", "/publish/resume", "/publish/rollback", "/splits/set")


class _AnsweredError(Exception):
    """A request that ends here; never leaves this module."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class PageApp:
    """Answers browsers, as an ASGI application.

    Args:
        board: What there is to see.
        guard: What callers must show.
        host: The address listened on; one of this machine alone takes only names of this machine.
        every: Seconds between two looks for news.
    """

    def __init__(self, board: Board, guard: Guard, host: str, *, every: float = 1.0) -> None:
        self._board = board
        self._guard = guard
        self._hosts = KnownHosts(host, any_name=not is_loopback(host))
        self._every = every
        self._streams = 0
        self._closing = False
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="page")
        static = resources.files("monolith.ui").joinpath("static")
        self._files = {
            path: (static.joinpath(name).read_bytes(), kind) for path, (name, kind) in FILES.items()
        }

    def close(self) -> None:
        """End the streams."""
        self._closing = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        headers = _headers(scope["headers"])
        path, method = scope["path"], scope["method"]
        try:
            if headers is None or not self._hosts.knows(headers.get("host", "")):
                raise _AnsweredError(
                    403,
                    "the Host header does not name this machine; use the address that monolith ui printed",
                )
            if path in self._files:
                _allow(method, "GET", "HEAD")
                body, kind = self._files[path]
                await _write(send, 200, body, kind)  # of a HEAD, uvicorn leaves the body out
                return
            if path not in ("/events", "/state", *ACTIONS):
                raise _AnsweredError(404, "there is nothing here")
            if not self._guard.admits(headers.get("authorization", "").encode("latin-1")):
                raise _AnsweredError(401, REFUSAL)
            if is_cross_site(headers):
                raise _AnsweredError(403, "another site has sent this")
            if path in ACTIONS:
                _allow(method, "POST")
                await self._act(path.rpartition("/")[2], headers, receive, send)
                return
            _allow(method, "GET")
            if path == "/state":
                await _write(send, 200, _json(self._board.news(Seen())))
                return
            await self._stream(receive, send)
        except _AnsweredError as error:
            more = {"www-authenticate": "Bearer"} if error.status == 401 else {}
            await _write(
                send, error.status, _json({"error": str(error)}), headers={**more, "connection": "close"}
            )

    async def _stream(self, receive: Receive, send: Send) -> None:
        if self._streams >= MOST_STREAMS:
            raise _AnsweredError(503, f"{MOST_STREAMS} onlookers are the most")
        self._streams += 1
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await _begin(send, 200, "text/event-stream; charset=utf-8", {"x-accel-buffering": "no"})
            seen, quiet = Seen(), 0.0
            while not gone.done() and not self._closing:
                news = self._board.news(seen)
                quiet = 0.0 if news is not None else quiet + self._every
                if news is not None or quiet >= QUIET_SECONDS:
                    quiet = 0.0
                    text = b": nothing new\n\n" if news is None else b"data: " + _json(news) + b"\n\n"
                    async with asyncio.timeout(WRITE_SECONDS):
                        await send({"type": "http.response.body", "body": text, "more_body": True})
                await asyncio.wait([gone], timeout=self._every)
            await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            return  # uvicorn closes a connection whose answer has not ended
        finally:
            self._streams -= 1
            gone.cancel()
            with suppress(asyncio.CancelledError):
                await gone

    async def _act(self, verb: str, headers: Mapping[str, str], receive: Receive, send: Send) -> None:
        if PAGE_HEADER not in headers:
            raise _AnsweredError(403, f"only the page may do that: the header {PAGE_HEADER} is missing")
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise _AnsweredError(415, "the body must be application/json")
        body = await _body(headers, receive)
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._threads, self._do, verb, body)
        except (RequestError, ConfigError) as error:
            raise _AnsweredError(400, str(error)) from error
        except UnavailableError as error:
            raise _AnsweredError(502, str(error)) from error
        except MonolithError as error:
            raise _AnsweredError(409, str(error)) from error
        await _write(send, 200, _json({"done": verb}))

    def _do(self, verb: str, body: bytes) -> None:
        try:
            found = json.loads(body)
        except (ValueError, RecursionError) as cause:
            raise RequestError("the body is not JSON") from cause
        if verb == "hold":
            hold = read_message(HoldRequest, found)
            self._board.control(hold.source).hold(hold.reason or "held by hand, on the page")
        elif verb == "resume":
            self._board.control(read_message(ResumeRequest, found).source).resume()
        elif verb == "set":
            split = read_message(SplitRequest, found)
            self._board.set_split(split.source, split.name, split.targets)
            _log.info(
                "the page was told to split requests for %r: %s", split.name, split.targets or "no more"
            )
            return
        else:
            back = read_message(RollbackRequest, found)
            self._board.control(back.source).rollback(back.version)
        _log.info("the page was told to %s publishing", verb)


def _headers(sent: list[tuple[bytes, bytes]]) -> dict[str, str] | None:
    """Return headers by name; None if a security header is repeated."""
    found: dict[str, str] = {}
    for name, value in sent:
        key = name.decode("latin-1").lower()
        if key in found and key in ("host", "origin", "authorization", "content-length", "sec-fetch-site"):
            return None
        found[key] = value.decode("latin-1")
    return found


def _allow(method: str, *allowed: str) -> None:
    if method not in allowed:
        raise _AnsweredError(405, f"takes {' and '.join(allowed)}")


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(headers: Mapping[str, str], receive: Receive) -> bytes:
    said = headers.get("content-length", "0")
    if len(said) > 9 or int(said) > MOST_BODY:
        raise _AnsweredError(413, f"the body has more than {MOST_BODY} bytes")
    parts = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _AnsweredError(400, "the caller is gone")
                parts += message["body"]
                if len(parts) > MOST_BODY:
                    raise _AnsweredError(413, f"the body has more than {MOST_BODY} bytes")
                if not message.get("more_body"):
                    return bytes(parts)
    except TimeoutError as cause:
        raise _AnsweredError(408, f"the body did not arrive within {BODY_SECONDS:g} s") from cause


def _json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


async def _begin(send: Send, status: int, kind: str, headers: Mapping[str, str]) -> None:
    both = {"content-type": kind, **HEADERS, **headers}
    sent = [(name.encode(), value.encode()) for name, value in both.items()]
    await send({"type": "http.response.start", "status": status, "headers": sent})


async def _write(
    send: Send,
    status: int,
    body: bytes,
    kind: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> None:
    await _begin(send, status, kind, {"content-length": str(len(body)), **(headers or {})})
    await send({"type": "http.response.body", "body": body})


MOST_CONNECTIONS = 256
GRACE_SECONDS = 1.0


class Page:
    """Draws what sources say, from `start` to `close`.

    Args:
        sources: What to look at; a text as `monolith ui` takes it: RUN, URL, NAME=RUN or NAME=URL.
        host: The address to listen on. Only this machine can reach the usual one.
        port: 0 chooses a free one.
        token: What onlookers must show; needed where others can reach the address, unless a guard says
            something else. The page asks for it.
        guard: What callers must show, in place of the token.
        context: For TLS.
        source_security: What to show to the sources that are given as texts.
        every: Seconds between two looks at a source.

    Raises:
        ConfigError: Others can reach the address, and nothing is demanded of them; or two sources have one
            name; or a text names none.
    """

    def __init__(
        self,
        sources: Sequence[PageSource | str],
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        *,
        guard: Guard | None = None,
        context: ssl.SSLContext | None = None,
        source_security: SecurityConfig | None = None,
        every: float = EVERY,
    ) -> None:
        if guard is None:
            guard = guard_listener(host, SecurityConfig(token=None if token is None else Secret(token)))
        opened = [source_of(one, source_security) if isinstance(one, str) else one for one in sources]
        self._board = Board(opened, every=every)
        self._app = PageApp(self._board, guard, host, every=every)
        self._host = host
        self._port = port
        self._context = context
        self._loop: HttpLoop | None = None
        self.address: str | None = None
        """The URL of the page, from `start` on."""

    def start(self) -> Self:
        """Look and listen from now on.

        Raises:
            ListenError: The port is taken.
            MissingExtraError: A package of the extra `serve` is missing.
        """
        if self._loop is not None:
            return self
        listener = bound_socket(self._host, self._port, whose="ui")
        port = listener.getsockname()[1]
        try:
            self._loop = HttpLoop(
                self._app,
                [listener],
                context=self._context,
                limits=ServeLimits(connections=MOST_CONNECTIONS, read_timeout=timedelta(seconds=10)),
            )
        except BaseException:
            listener.close()
            raise
        scheme = "http" if self._context is None else "https"
        self.address = f"{scheme}://{join_address(self._host, port)}/"
        self._board.start()
        return self

    def close(self) -> None:
        """Stop. Closing again does nothing."""
        self._app.close()
        if self._loop is not None:
            self._loop.close(GRACE_SECONDS)
            self._loop = None
        self._board.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
