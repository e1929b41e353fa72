"""HTTP: reads requests within limits, hands each to a thread that answers it, and writes the answer.

`http_loop` reads and writes for all connections. Work that would block it, such as decoding, waiting for the
model and encoding, is done on other threads. Bodies are read here, within bytes and time. Health probes are
answered on the loop: they wait for no thread and count in no quota. So are short requests, as many as have
arrived in one batch: that saves the way to other threads and back (docs/decisions/0077 and 0080).

The Open Inference Protocol over HTTP: from a whole request to a whole answer, on any thread.

It knows no web server: `http_port` reads requests, within limits, and hands them over.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from monolith import __version__
from monolith.cluster.security import REFUSAL, Guard
from monolith.concurrency import ThreadPoolExecutor
from monolith.errors import (
    ForbiddenError,
    MonolithError,
    OverloadedError,
    RequestError,
    RequestTooLargeError,
    UnavailableError,
)
from monolith.serve.config import ServeLimits
from monolith.serve.server.batching import Quotas, Reservation
from monolith.serve.server.http_bodies import (
    BinaryOutputs,
    JsonReader,
    packed,
    read_infer,
    unpacked,
    write_infer,
)
from monolith.serve.server.http_loop import HttpLoop, KnownHosts, Message, Receive, Send
from monolith.serve.server.inference import (
    HTTP_STATUS,
    INTERNAL,
    NO_CONTROL,
    NO_CONTROL_TOKEN,
    NO_REGION_TOKEN,
    PLATFORM,
    SERVER_NAME,
    UNLOAD_PARAMETERS,
    VERSION,
    Inference,
    InferReply,
    InferRequest,
    check_parameters,
    code_of,
    read_version,
)
from monolith.serve.server.processes import PEER_HEADER, ServerProcesses
from monolith.serve.server.shared_memory import NO_CUDA, RegionStatus
from monolith.wire.open_inference import JSON_LENGTH


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
        self._probe = Reservation(quotas, "")
        self._rate = limits.body_rate
        self._patience = limits.read_timeout.total_seconds()
        self._concurrency = limits.concurrency
        self._reading = 0
        self._quick_from = 0.0
        """When requests may be answered on the loop again, by its clock."""
        self._threads = threads
        self._short: deque[tuple[HttpRequest, asyncio.Future[HttpReply]]] = deque()
        """Short requests that arrived and wait for `_answer_short`."""
        self._is_due = False
        """Whether `_answer_short` will be called."""
        self._short_on_threads = 0
        """Short requests that are answered on other threads."""

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
            with self._quotas.admit(client[0] if client else "") as reservation:
                await self._answer(HttpRequest(method, path, headers, reservation), receive, send)
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
        if self._reading == 1 and not self._short_on_threads and self._is_short(request, QUICK_BYTES):
            await asyncio.sleep(0)  # what else has arrived by now is counted then
            if self._reading == 1 and self._may_use_loop(loop.time()):
                begun = time.thread_time()
                reply = self._api.answer(request)
                self._note_time(loop.time(), time.thread_time() - begun)
                await _write(send, reply)
                return
        if not self._is_short(request, QUICK_BATCH_BYTES // QUICK_REQUESTS):
            await _write(send, await loop.run_in_executor(self._threads, self._api.answer, request))
            return
        answered: asyncio.Future[HttpReply] = loop.create_future()
        self._short.append((request, answered))
        self._call_soon(loop)
        await _write(send, await answered)

    def _is_short(self, request: HttpRequest, most: int) -> bool:
        """Whether a request may be answered on the loop: one of at most so many bytes that asks a model."""
        return (
            len(request.body) <= most
            and request.path.endswith("/infer")
            and "content-encoding" not in request.headers
        )

    def _may_use_loop(self, now: float) -> bool:
        """Whether short requests may be answered on the loop now: it would not wait for a large request, or
        for one over gRPC, and did not take long lately."""
        return (
            now >= self._quick_from
            and self._api.answers_at_once
            and self._api.in_flight <= self._short_on_threads
        )

    def _note_time(self, now: float, seconds: float) -> None:
        if seconds > QUICK_SECONDS:
            self._quick_from = now + REST_SECONDS

    def _call_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_due:
            self._is_due = True
            loop.call_soon(self._answer_short, loop)

    def _answer_short(self, loop: asyncio.AbstractEventLoop) -> None:
        """Answer the short requests that have arrived, in batches on the loop, or each on another thread."""
        self._is_due = False
        if not self._may_use_loop(loop.time()):
            while self._short:
                request, answered = self._short.popleft()
                self._short_on_threads += 1
                running = loop.run_in_executor(self._threads, self._api.answer, request)
                running.add_done_callback(partial(self._end_on_thread, loop, answered))
            return
        # Short requests that went to other threads are waited for. Otherwise, under load, there would always
        # be some, and the loop would never be used again.
        if self._short_on_threads:
            return
        some = [self._short.popleft() for _ in range(min(len(self._short), QUICK_REQUESTS))]
        begun = time.thread_time()
        try:
            replies = self._api.answer_all([request for request, _ in some])
        except Exception as error:  # a bug, and no client may wait forever
            for _, answered in some:
                if not answered.done():
                    answered.set_exception(error)
        else:
            for (_, answered), reply in zip(some, replies, strict=True):
                if not answered.done():  # the server may have been told to stop meanwhile
                    answered.set_result(reply)
        self._note_time(loop.time(), time.thread_time() - begun)
        if self._short:  # the loop reads and writes in between
            self._call_soon(loop)

    def _end_on_thread(
        self,
        loop: asyncio.AbstractEventLoop,
        answered: asyncio.Future[HttpReply],
        running: asyncio.Future[HttpReply],
    ) -> None:
        self._short_on_threads -= 1
        if not answered.done():
            if running.cancelled():
                answered.cancel()
            elif (error := running.exception()) is not None:
                answered.set_exception(error)
            else:
                answered.set_result(running.result())
        if self._short:
            self._call_soon(loop)

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
                request.reservation.add(len(part))
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


JSON = "application/json"
OCTETS = "application/octet-stream"
METRICS = "text/plain; version=0.0.4; charset=utf-8"
PROBES = ("/v2/health/live", "/v2/health/ready")
"""Answered for every client, whatever quota is used up: a probe has no token, and they say nothing
else."""
_RETRY = {"retry-after": "1"}
_REMEMBERED_PATHS = 256
QUICK_BYTES = 64 << 10
"""The largest body of a request that is answered on the loop because it is alone."""
QUICK_REQUESTS = 16
QUICK_BATCH_BYTES = 256 << 10
"""The most requests that are answered on the loop together, and the most bytes of their bodies. A longer one
is mostly arithmetic, during which the loop can read and write if another thread does it."""
QUICK_SECONDS = 0.01
REST_SECONDS = 1.0
"""If that took more processor time than `QUICK_SECONDS`, nothing is answered on the loop for `REST_SECONDS`:
a large model must not keep probes waiting again and again."""


@dataclass(slots=True)
class HttpRequest:
    """A request, read to its end."""

    method: str
    path: str
    """As it was sent, without what follows a question mark."""
    headers: Mapping[str, str]
    """By their names in lower case."""
    reservation: Reservation
    """Counts the memory that the request uses."""
    body: bytes = b""


@dataclass(slots=True)
class HttpReply:
    """What to answer."""

    status: int
    body: bytes = b""
    content_type: str = JSON
    headers: dict[str, str] = field(default_factory=dict)


class HttpApi:
    """Answers requests. Thread-safe.

    Args:
        inference: Answers those that ask a model.
        guard: Which tokens callers must have.
        peers: Other processes that serve the same models.
        hosts: The names by which clients reach this server.
    """

    def __init__(self, inference: Inference, guard: Guard, peers: ServerProcesses, hosts: KnownHosts) -> None:
        self._inference = inference
        self._guard = guard.for_role("predict")
        self._control = guard.for_role("control")
        self._peers = peers
        self._hosts = hosts
        limits = inference.config.limits
        self._infer_paths: dict[str, tuple[str, str]] = {}
        """Paths that were answered with predictions -> their model and version: clients use them again and
        again, and reading a path takes longer than looking for it."""
        self._json = JsonReader(limits)
        self._most = limits.request_bytes
        self._most_json = min(limits.json_bytes, limits.request_bytes)

    @property
    def in_flight(self) -> int:
        """See `Inference.in_flight`."""
        return self._inference.in_flight

    @property
    def answers_at_once(self) -> bool:
        """See `Inference.answers_at_once`."""
        return self._inference.answers_at_once

    def refused(self, method: str, headers: Mapping[str, str]) -> HttpReply | None:
        """Return the answer to a caller that is not admitted, before its body is read; None for others."""
        if (why := self._hosts.refusal(method, headers)) is not None:
            return _error(403, why)
        if self._guard.admits(headers.get("authorization", "")):
            return None
        return _error(401, REFUSAL, {"www-authenticate": "Bearer"})

    def most_bytes(self, headers: Mapping[str, str]) -> int:
        """Return how long the body of a request may be: all of it is JSON, unless a header says otherwise."""
        return self._most if JSON_LENGTH in headers else self._most_json

    def error_reply(self, error: Exception) -> HttpReply:
        """Return the answer to a request that failed."""
        code = code_of(error)
        headers = _RETRY if code in ("overloaded", "unavailable") else {}
        return _error(HTTP_STATUS[code], INTERNAL if code == "internal" else str(error), headers)

    def refuse(self, error: MonolithError, status: int | None = None) -> HttpReply:
        """Take note of a request that was not read to its end; return its answer, which ends the connection.

        Args:
            status: In place of the one that errors of this kind have.
        """
        self._inference.refuse("http", error)
        reply = self.error_reply(error)
        reply.status = status or reply.status
        reply.headers["connection"] = "close"
        return reply

    def answer(self, request: HttpRequest) -> HttpReply:
        """Answer a request; whatever is wrong with it is an answer, too."""
        noted = False
        known = self._infer_paths.get(request.path) if request.method == "POST" else None
        if known is not None:
            try:
                return self._packed(self._infer(*known, request), request)
            except Exception as error:
                return self._failed(error)
        try:
            parts = [unquote(part, errors="strict") for part in request.path.split("/")[1:]]
            allowed = self._routes(parts, request)
            if allowed is None:
                return _error(404, f"there is nothing at {request.path[:200]}; /docs lists what there is")
            method = "GET" if request.method == "HEAD" else request.method
            if method not in allowed:
                return _error(
                    405, f"{request.path[:200]} takes {', '.join(allowed)}", {"allow": ", ".join(allowed)}
                )
            noted = parts[-1] in ("infer", "topk")
            reply = allowed[method]()
            if parts[-1] == "infer" and len(self._infer_paths) < _REMEMBERED_PATHS:
                named = parts[2], parts[4] if len(parts) > 4 else ""
                self._infer_paths[request.path] = named
        except UnicodeDecodeError:
            return _error(400, "the path is no UTF-8")
        except Exception as error:
            if not noted or not isinstance(error, MonolithError):
                self._inference.refuse("http", error)
            return self.error_reply(error)
        reply = self._packed(reply, request)
        if request.method == "HEAD":
            reply.body = b""
        return reply

    def answer_all(self, requests: Sequence[HttpRequest]) -> list[HttpReply]:
        """Answer several requests on this thread; those that ask a model for predictions, in one batch."""
        replies: dict[int, HttpReply] = {}
        asked: list[tuple[int, InferRequest, BinaryOutputs]] = []
        for number, request in enumerate(requests):
            known = self._infer_paths.get(request.path) if request.method == "POST" else None
            if known is None:
                replies[number] = self.answer(request)
                continue
            try:
                asked.append((number, *self._read_infer(*known, request)))
            except Exception as error:
                replies[number] = self._failed(error)
        found = self._inference.infer_all([one for _, one, _ in asked])
        for (number, _, binary), reply in zip(asked, found, strict=True):
            try:
                if isinstance(reply, Exception):
                    raise reply
                replies[number] = self._packed(_written(reply, binary), requests[number])
            except Exception as error:
                replies[number] = self._failed(error)
        return [replies[number] for number in range(len(requests))]

    def _failed(self, error: Exception) -> HttpReply:
        """Return the answer to a request for predictions that failed. Our own errors were noted before."""
        if not isinstance(error, MonolithError):
            self._inference.refuse("http", error)
        return self.error_reply(error)

    def _packed(self, reply: HttpReply, request: HttpRequest) -> HttpReply:
        reply.body, encoding = packed(reply.body, request.headers.get("accept-encoding", ""))
        if encoding:
            reply.headers = {**reply.headers, "content-encoding": encoding, "vary": "accept-encoding"}
        return reply

    def _routes(self, parts: list[str], request: HttpRequest) -> Mapping[str, Callable[[], HttpReply]] | None:
        """Return what can be done at a path: method -> what answers."""
        match parts:
            case ["metrics"]:
                return {"GET": lambda: self._metrics(request)}
            case ["openapi.json"]:
                return {"GET": lambda: _json(openapi_document())}
            case ["docs"]:
                return {"GET": lambda: HttpReply(200, _static("docs.html"), "text/html; charset=utf-8")}
            case ["v2"] | ["v2", ""]:
                return {"GET": self._about}
            case ["v2", "health", "live"]:
                return {"GET": lambda: _json({"live": True})}
            case ["v2", "health", "ready"]:
                return {"GET": lambda: _readiness(self._inference.is_ready)}
            case ["v2", "repository", "index"]:
                return {"POST": lambda: self._index(request)}
            case ["v2", "splits"]:
                return {"GET": lambda: _json(self._inference.traffic.described())}
            case ["v2", "splits", name]:
                return {"POST": lambda: self._split(name, request)}
            case ["v2", "repository", "models", name, "load" | "unload" as verb]:
                return {"POST": lambda: self._change(name, verb, request)}
            case ["v2", "systemsharedmemory" | "cudasharedmemory" as kind, "status" | "unregister" as verb]:
                return self._regions(kind, "", verb, request)
            case [
                "v2",
                "systemsharedmemory" | "cudasharedmemory" as kind,
                "region",
                name,
                "status" | "register" | "unregister" as verb,
            ]:
                return self._regions(kind, name, verb, request)
            case ["v2", "models", "stats"]:
                return {"GET": lambda: self._statistics("", "")}
            case ["v2", "models", name, "versions", version, *rest]:
                return self._model(name, version, rest, request)
            case ["v2", "models", name, *rest]:
                return self._model(name, "", rest, request)
        return None

    def _model(
        self, name: str, version: str, rest: list[str], request: HttpRequest
    ) -> Mapping[str, Callable[[], HttpReply]] | None:
        match rest:
            case []:
                return {"GET": lambda: self._metadata(name, version)}
            case ["ready"]:
                return {"GET": lambda: _readiness(self._inference.has_ready(name, version), name)}
            case ["infer"]:
                return {"POST": lambda: self._infer(name, version, request)}
            case ["topk"]:
                return {"POST": lambda: self._infer(name, version, request, topk=True)}
            case ["stats"]:
                return {"GET": lambda: self._statistics(name, version)}
        return None

    def _regions(
        self, kind: str, name: str, verb: str, request: HttpRequest
    ) -> Mapping[str, Callable[[], HttpReply]]:
        if kind == "cudasharedmemory":
            return {"GET": lambda: _json([])} if verb == "status" else {"POST": lambda: _no_cuda(verb)}
        if verb == "status":
            return {"GET": lambda: self._region_status(name)}
        return {"POST": lambda: self._change_regions(name, verb, request)}

    def _metrics(self, request: HttpRequest) -> HttpReply:
        own = self._inference.render_metrics()
        return HttpReply(200, own if PEER_HEADER in request.headers else self._peers.metrics(own), METRICS)

    def _about(self) -> HttpReply:
        return _json(
            {"name": SERVER_NAME, "version": __version__, "extensions": list(self._inference.extensions)}
        )

    def _metadata(self, name: str, version: str) -> HttpReply:
        signature, versions, _ = self._inference.describe(name, version)
        return _json(
            {
                "name": name,
                "versions": list(versions),
                "platform": PLATFORM,
                "inputs": [_tensor(one) for one in signature.inputs],
                "outputs": [_tensor(one) for one in signature.outputs],
            }
        )

    def _statistics(self, name: str, version: str) -> HttpReply:
        return _json({"model_stats": self._inference.statistics(name, version)})

    def _index(self, request: HttpRequest) -> HttpReply:
        asked = self._json_body(request)
        ready = asked.get("ready", False)
        if not isinstance(ready, bool):
            raise RequestError("`ready` must be true or false")
        return _json(
            [
                {"name": one.name, "version": one.version, "state": one.state, "reason": one.reason}
                for one in self._inference.index(ready)
            ]
        )

    def _check_control(self, request: HttpRequest) -> None:
        if not self._inference.config.allow_control:
            raise ForbiddenError(NO_CONTROL)
        if not self._control.admits(request.headers.get("authorization", "")):
            raise ForbiddenError(NO_CONTROL_TOKEN)

    def _split(self, name: str, request: HttpRequest) -> HttpReply:
        self._check_control(request)
        asked = self._json_body(request)
        targets = asked.get("targets")
        if not isinstance(targets, str) or asked.keys() != {"targets"}:
            raise RequestError(
                'the body must be {"targets": "MODEL[/VERSION][:WEIGHT],..."}, as "ads/120:90,ads/140:10"; ""'
                " removes the split"
            )
        self._inference.set_split(name, targets)
        if PEER_HEADER not in request.headers:
            self._peers.set_split(name, targets)
        return _json(self._inference.traffic.described())

    def _change(self, name: str, verb: str, request: HttpRequest) -> HttpReply:
        self._check_control(request)
        parameters = self._json_body(request).get("parameters", {})
        if not isinstance(parameters, dict):
            raise RequestError("`parameters` must be an object")
        repository = self._inference.repository
        if verb == "load":
            check_parameters("a load", parameters, ())
            repository.load(name)
        else:
            check_parameters("an unload", parameters, UNLOAD_PARAMETERS)
            repository.unload(name, read_version(parameters.get(VERSION, "")))
        if PEER_HEADER not in request.headers:
            self._peers.tell(verb, name, {VERSION: parameters[VERSION]} if VERSION in parameters else None)
        return _json({})

    def _region_status(self, name: str) -> HttpReply:
        return _json([asdict(one) for one in self._inference.shared_memory.status(name)])

    def _change_regions(self, name: str, verb: str, request: HttpRequest) -> HttpReply:
        """Register a region, or unregister one or, without a name, all."""
        if not self._control.admits(request.headers.get("authorization", "")):
            raise ForbiddenError(NO_REGION_TOKEN)
        said: Mapping[str, Any] | None = None
        if verb == "register":
            one = RegionStatus.read(name, self._json_body(request))
            self._inference.shared_memory.register(one)
            said = asdict(one)
        else:
            self._inference.shared_memory.unregister(name)
        if PEER_HEADER not in request.headers:
            self._peers.tell_regions(verb, name, said)
        return _json({})

    def _infer(self, name: str, version: str, request: HttpRequest, *, topk: bool = False) -> HttpReply:
        asked, binary = self._read_infer(name, version, request, topk=topk)
        return _written(self._inference.infer(asked), binary)

    def _read_infer(
        self, name: str, version: str, request: HttpRequest, *, topk: bool = False
    ) -> tuple[InferRequest, BinaryOutputs]:
        try:
            return read_infer(
                (name, version),
                self._unpacked(request),
                request.headers,
                self._json,
                request.reservation,
                self._inference.shared_memory,
                topk=topk,
            )
        except MonolithError as error:
            self._inference.refuse("http", error, name)
            raise

    def _json_body(self, request: HttpRequest) -> Mapping[str, Any]:
        """Return the JSON object of a body; an empty one where there is none."""
        body = self._unpacked(request)
        asked = self._json.read(body, request.reservation) if body.strip() else {}
        if not isinstance(asked, dict):
            raise RequestError("the body must be a JSON object")
        return asked

    def _unpacked(self, request: HttpRequest) -> bytes:
        encoding = request.headers.get("content-encoding", "").lower()
        return unpacked(request.body, encoding, self.most_bytes(request.headers), request.reservation)


def _written(reply: InferReply, binary: BinaryOutputs) -> HttpReply:
    body, head = write_infer(reply, binary)
    if head is None:
        return HttpReply(200, body)
    return HttpReply(200, body, OCTETS, {JSON_LENGTH: str(head)})


def _readiness(ready: bool, name: str | None = None) -> HttpReply:
    said: dict[str, Any] = {"ready": ready} if name is None else {"name": name, "ready": ready}
    return _json(said, 200 if ready else 503)


def _no_cuda(verb: str) -> HttpReply:
    """Refuse to register; a client that unregisters what it may have left there need not care."""
    if verb == "register":
        raise RequestError(NO_CUDA)
    return _json({})


def _tensor(one: Any) -> dict[str, Any]:
    plain = {"name": one.name, "datatype": one.datatype, "shape": list(one.shape)}
    return {**plain, "parameters": {"meaning": one.meaning}} if one.meaning else plain


def _json(value: Any, status: int = 200) -> HttpReply:
    return HttpReply(status, json.dumps(value).encode())


def _error(status: int, text: str, headers: Mapping[str, str] | None = None) -> HttpReply:
    return HttpReply(status, json.dumps({"error": text}).encode(), headers=dict(headers or {}))


def plain_error(status: int, text: str) -> HttpReply:
    """Return an answer that says what is wrong, and ends the connection."""
    return _error(status, text, {"connection": "close"})


@cache
def openapi_document() -> Mapping[str, Any]:
    """Return the OpenAPI document of the HTTP port."""
    document: dict[str, Any] = json.loads(_static("openapi.json"))
    document["info"]["version"] = __version__
    return document


@cache
def _static(name: str) -> bytes:
    return resources.files("monolith.serve.server").joinpath("static", name).read_bytes()
