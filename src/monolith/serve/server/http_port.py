"""HTTP: reads requests within limits, hands each to a thread that answers it, and writes the answer.

`http_loop` reads and writes for all connections. What could hold it up, decoding, waiting for the model,
encoding, is done on other threads. Bodies are read here, within bytes and time. Health probes are answered on
the loop: they wait for no thread and count in no quota.
"""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from monolith.errors import OverloadedError, RequestError, RequestTooLargeError, UnavailableError
from monolith.serve.server.config import ServeLimits
from monolith.serve.server.http_api import PROBES, HttpApi, HttpReply, HttpRequest
from monolith.serve.server.http_loop import HttpLoop, Message, Receive, Send
from monolith.serve.server.quotas import Held, Quotas


class HttpPort:
    """Answers HTTP on sockets that are bound already, until closed.

    Args:
        api: Answers requests.
        sockets: Bound; owned from now on.
        context: For TLS, on all of them.
        limits: What callers may do.
        quotas: Counts what requests hold.
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
        quotas: Quotas,
        threads: int,
        relay: Path | None = None,
        peer_socket: Path | None = None,
    ) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="http")
        self._loop = HttpLoop(
            _App(api, limits, quotas, self._threads),
            sockets,
            context=context,
            limits=limits,
            relay=relay,
            peer_socket=peer_socket,
            probes=PROBES,
        )

    def close(self, grace: float) -> None:
        """Take no new requests, and wait so many seconds for those in flight."""
        self._loop.close(grace)
        self._threads.shutdown(wait=False, cancel_futures=True)


class _App:
    """From uvicorn's events to whole requests and back."""

    def __init__(
        self, api: HttpApi, limits: ServeLimits, quotas: Quotas, threads: ThreadPoolExecutor
    ) -> None:
        self._api = api
        self._quotas = quotas
        self._probe = Held(quotas, "")
        self._rate = limits.body_rate
        self._patience = limits.read_timeout.total_seconds()
        self._concurrency = limits.concurrency
        self._reading = 0
        self._threads = threads

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["raw_path"].decode("ascii", "replace")
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if path in PROBES:
            await _write(send, self._api.answer(HttpRequest(method, path, headers, self._probe)))
            return
        refused = self._api.refused(method, headers)
        if refused is not None:
            refused.headers["connection"] = "close"
            await _write(send, refused)
            return
        if self._reading >= self._concurrency:
            busy = OverloadedError(f"{self._reading} requests are being read or answered, which is the most")
            await _write(send, self._api.refuse(busy))
            return
        client = scope["client"]
        self._reading += 1
        try:
            with self._quotas.admit(client[0] if client else "") as held:
                await self._answer(HttpRequest(method, path, headers, held), receive, send)
        except OverloadedError as error:
            await _write(send, self._api.refuse(error))
        finally:
            self._reading -= 1

    async def _answer(self, request: HttpRequest, receive: Receive, send: Send) -> None:
        try:
            body = await self._body(request, receive)
        except (RequestTooLargeError, UnavailableError) as error:
            await _write(send, self._api.refuse(error))
            return
        except TimeoutError:
            late = RequestError(
                f"the body came with less than {self._rate} bytes a second after {self._patience:g} s"
            )
            await _write(send, self._api.refuse(late, 408))
            return
        if body is None:
            return  # the caller is gone
        request.body = body
        loop = asyncio.get_running_loop()
        await _write(send, await loop.run_in_executor(self._threads, self._api.answer, request))

    async def _body(self, request: HttpRequest, receive: Receive) -> bytes | None:
        most = self._api.most_bytes(request.headers)
        said = request.headers.get("content-length", "0")
        if len(said) > 18 or int(said) > most:  # the parser has seen to it that it is a number
            raise _too_large(most)
        parts: list[bytes] = []
        size = 0
        begun = asyncio.get_running_loop().time()
        async with asyncio.timeout(self._patience) as patience:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                part = message["body"]
                parts.append(part)
                size += len(part)
                if size > most:
                    raise _too_large(most)
                # As they come, not as the header says: it costs nothing to claim a large body.
                request.held.add(len(part))
                if not message.get("more_body"):
                    return parts[0] if len(parts) == 1 else b"".join(parts)
                patience.reschedule(begun + self._patience + size / self._rate)


def _too_large(most: int) -> RequestTooLargeError:
    return RequestTooLargeError(
        f"the body has more than {most} bytes, which are the most (--max-json-bytes; with tensors in binary, "
        "--max-request-bytes)"
    )


async def _write(send: Send, reply: HttpReply) -> None:
    headers = [
        (b"content-type", reply.content_type.encode()),
        (b"content-length", str(len(reply.body)).encode()),
        *((name.encode(), value.encode()) for name, value in reply.headers.items()),
    ]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})
