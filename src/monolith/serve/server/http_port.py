"""HTTP: reads requests within limits, hands each to a thread that answers it, and writes the answer.

`http_loop` reads and writes for all connections. What could hold it up, decoding, waiting for the model,
encoding, is done on other threads. A body that trickles in is borne with here.
"""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from monolith.errors import OverloadedError, RequestError, RequestTooLargeError
from monolith.serve.server.config import ServeLimits
from monolith.serve.server.http_api import HttpApi, HttpReply, HttpRequest
from monolith.serve.server.http_loop import HEAD_BYTES, HttpLoop, Message, Receive, Send


class HttpPort:
    """Answers HTTP on sockets that are bound already, until closed.

    Args:
        api: Answers requests.
        sockets: Bound; owned from now on.
        context: For TLS, on all of them.
        limits: What callers may do.
        threads: How many requests are answered at a time; others wait.
        relay: The unix socket of a gRPC server, for connections that begin as HTTP/2.
        peer_socket: Another place to listen, for processes of this user, without TLS.
    """

    def __init__(
        self,
        api: HttpApi,
        sockets: list[socket.socket],
        *,
        context: Any = None,
        limits: ServeLimits,
        threads: int,
        relay: Path | None = None,
        peer_socket: Path | None = None,
    ) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="http")
        self._loop = HttpLoop(
            _App(api, limits, self._threads),
            sockets,
            context=context,
            limits=limits,
            relay=relay,
            peer_socket=peer_socket,
        )

    def close(self, grace: float) -> None:
        """Take no new requests, and wait so many seconds for those in flight."""
        self._loop.close(grace)
        self._threads.shutdown(wait=False, cancel_futures=True)


class _App:
    """From uvicorn's events to whole requests and back."""

    def __init__(self, api: HttpApi, limits: ServeLimits, threads: ThreadPoolExecutor) -> None:
        self._api = api
        self._most = limits.request_bytes
        self._patience = limits.read_timeout.total_seconds()
        self._concurrency = limits.concurrency
        self._reading = 0
        self._threads = threads

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        request = HttpRequest(
            scope["method"],
            scope["raw_path"].decode("ascii", "replace"),
            {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]},
        )
        refused = self._api.refused(request)
        if refused is not None:
            refused.headers["connection"] = "close"
            await _write(send, refused)
        elif self._reading >= self._concurrency:
            busy = OverloadedError(f"{self._reading} requests are being read or answered, which is the most")
            await _write(send, self._api.refuse(busy))
        else:
            self._reading += 1
            try:
                await self._answer(request, receive, send)
            finally:
                self._reading -= 1

    async def _answer(self, request: HttpRequest, receive: Receive, send: Send) -> None:
        try:
            body = await self._body(request, receive)
        except RequestTooLargeError as error:
            await _write(send, self._api.refuse(error))
            return
        except TimeoutError:
            late = RequestError(f"the body did not arrive within {self._patience:g} s")
            await _write(send, self._api.refuse(late, 408))
            return
        if body is None:
            return  # the caller is gone
        request.body = body
        loop = asyncio.get_running_loop()
        await _write(send, await loop.run_in_executor(self._threads, self._api.answer, request))

    async def _body(self, request: HttpRequest, receive: Receive) -> bytes | None:
        said = request.headers.get("content-length", "0")
        if len(said) > 18 or int(said) > self._most:  # the parser has seen to it that it is a number
            raise self._too_large()
        parts: list[bytes] = []
        size = 0
        async with asyncio.timeout(self._patience) as patience:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                part = message["body"]
                parts.append(part)
                size += len(part)
                if size > self._most:
                    raise self._too_large()
                if not message.get("more_body"):
                    return parts[0] if len(parts) == 1 else b"".join(parts)
                if size >= HEAD_BYTES:  # it comes along: each part has its own time
                    patience.reschedule(asyncio.get_running_loop().time() + self._patience)

    def _too_large(self) -> RequestTooLargeError:
        return RequestTooLargeError(f"the body has more than {self._most} bytes, which are the most")


async def _write(send: Send, reply: HttpReply) -> None:
    headers = [
        (b"content-type", reply.content_type.encode()),
        (b"content-length", str(len(reply.body)).encode()),
        *((name.encode(), value.encode()) for name, value in reply.headers.items()),
    ]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})
