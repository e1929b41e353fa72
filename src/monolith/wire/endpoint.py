"""The endpoint of a server: dispatches the requests that a transport receives, and enforces limits."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from monolith import concurrency
from monolith.concurrency import BoundedSemaphore, Condition, Event, Lock
from monolith.errors import MonolithError, OutOfMemoryError, RequestError, lacks_memory
from monolith.wire.bulk import Bytes, TrafficMeter
from monolith.wire.messages import Call, Gone, Poll
from monolith.wire.ports import Limits
from monolith.wire.transport import Service

Fetch = Callable[[dict[str, Any]], Any]
"""A handler from JSON to an Arrow record batch."""
Exchange = Callable[[dict[str, Any], Bytes], tuple[dict[str, Any], Any]]
"""A handler from JSON and bytes to JSON and any object with the buffer protocol."""
Message = Callable[[bytes, Bytes], tuple[bytes, Any]]
"""Like an exchange, with a header of the service's own in place of JSON; it must not begin with "{"."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Handlers:
    """The functions that answer the requests of a server. A MonolithError of one is sent to the caller."""

    calls: Mapping[str, Call] = field(default_factory=dict)
    """For `Caller.call`, by name."""
    polls: Mapping[str, Poll] = field(default_factory=dict)
    """For `Caller.call`, by name: functions that wait."""
    fetch: Fetch | None = None
    """For `Caller.fetch`."""
    exchanges: Mapping[str, Exchange] = field(default_factory=dict)
    """For `CallStream.send`, by name."""
    message: Message | None = None
    """For `CallStream.send_message`."""
    out_of_memory: Callable[[BaseException], None] | None = None
    """Told that there was no memory for a request: the process is to end, since it cannot do its work."""


class _AnswersInProgress:
    """Counts the blocks that are entered. A class: a generator would cost a request some microseconds."""

    def __init__(self) -> None:
        self._count = 0
        self._left_one = Condition()  # guards _count

    def __enter__(self) -> None:
        with self._left_one:
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._left_one:
            self._count -= 1
            self._left_one.notify_all()

    def wait_until_none(self, seconds: float) -> None:
        """Wait until nothing is in progress."""
        with self._left_one:
            self._left_one.wait_for(lambda: not self._count, seconds)


class Endpoint:
    """Answers the requests of one server, whichever transport received them.

    Its methods never raise: an error is an answer.
    """

    def __init__(self, service: Service, handlers: Handlers, closing: Event, limits: Limits) -> None:
        self.service = service
        self.handlers = handlers
        self.closing = closing
        self.limits = limits
        self.meter = TrafficMeter()
        self._free_calls = BoundedSemaphore(limits.calls)
        self._lock = Lock()  # guards _json_bytes and _streams
        self._json_bytes = 0
        """Bytes of all JSON calls in progress."""
        self._streams: Counter[str] = Counter()
        """Peer address -> its open streams."""
        self.answering = _AnswersInProgress()
        """`with endpoint.answering:` counts a call, or a request of a stream, as in progress: a server that
        closes waits for it."""

    @property
    def has_streams(self) -> bool:
        """Whether callers may keep a stream open."""
        return bool(self.handlers.exchanges) or self.handlers.message is not None

    def answer(self, name: str, body: Any, gone: Gone) -> bytes:
        """Answer a small call; `body` is an Arrow buffer."""

        def work() -> dict[str, Any]:
            with self._counted(), self._json(body) as found:
                if name in self.handlers.polls:  # a closing server ends them, and does not wait
                    over = lambda: self.closing.is_set() or gone()  # noqa: E731
                    return {"answer": self.handlers.polls[name](found, over)}
                return {"answer": self._known(self.handlers.calls, name)(found)}

        answer = self._answered(name, work)
        self.meter.count(received=memoryview(body).nbytes, sent=len(answer))
        return answer

    def fetch(self, ticket: bytes) -> tuple[bytes, Any]:
        """Return an answer for a ticket and a record batch, which is None if there are no records."""
        found: Any = None

        def work() -> dict[str, Any]:
            nonlocal found
            if self.handlers.fetch is None:
                raise RequestError("this server serves no records")
            with self._counted(), self._json(ticket) as asked:
                found = self.handlers.fetch(asked)
            return {}

        return self._answered("fetch", work), found

    def exchange(self, header: bytes, data: Bytes) -> tuple[bytes, Any]:
        """Answer a request of a stream."""
        what = "a request of a stream"
        if self.handlers.message is not None and not header.startswith(b"{"):
            try:
                self._check_size(data)
                return self.handlers.message(header, data)
            except Exception as error:
                return self._failed(what, error), b""
        sent: Any = b""

        def work() -> dict[str, Any]:
            nonlocal sent
            with self._json(header) as request:
                name, body = request.get("name"), request.get("body")
                if not isinstance(name, str) or not isinstance(body, dict):
                    raise RequestError(
                        "a request must be an object with a name, a string, and a body, an object"
                    )
                self._check_size(data)
                answer, sent = self._known(self.handlers.exchanges, name)(body, data)
            return {"answer": answer}

        return self._answered(what, work), sent

    def _check_size(self, data: Bytes) -> None:
        if len(data) > self.limits.message_bytes:
            raise _too_large(len(data), "message_bytes", self.limits.message_bytes)

    def _answered(self, name: str, work: Callable[[], dict[str, Any]]) -> bytes:
        try:
            return json.dumps(work()).encode()
        except Exception as error:
            return self._failed(name, error)

    def _failed(self, name: str, error: Exception) -> bytes:
        """Return the answer to a request whose handler raised this, while the error is handled."""
        if lacks_memory(error):
            return _error(OutOfMemoryError.__name__, self.note_no_memory(name, error))
        if isinstance(error, RequestError):
            return self.refused(name, error)
        if isinstance(error, MonolithError):
            return _error(type(error).__name__, str(error))
        number = concurrency.token_hex(4)  # a bug in a handler must not stop the server
        _log.exception("%s: %.60s failed (error %s)", self.service.name, name, number)
        return _error("", f"{self.service.name}: {name:.60} failed; see error {number} in its log")

    def note_no_memory(self, name: str, error: BaseException) -> str:
        """Have the process end, if it can, because it had no memory for a request; return what callers are
        told."""
        ends = self.handlers.out_of_memory
        said = f"{self.service.name}: {name:.60}: it has no memory left{'' if ends is None else ', and ends'}"
        _log.error("%s: %s: %s", said, type(error).__name__, error)
        if ends is not None:
            ends(error)
        return said

    def refused(self, name: str, error: RequestError) -> bytes:
        return _error(RequestError.__name__, f"{self.service.name}: {name:.60}: {error}")

    @contextmanager
    def _json(self, body: Any) -> Iterator[dict[str, Any]]:
        """Parse the JSON of a message, unless it or all messages in progress together are too large.

        Sizes are compared before parsing: parsed JSON takes up to 30 times its size.
        """
        size = memoryview(body).nbytes
        if size > self.limits.call_bytes:
            raise _too_large(size, "call_bytes", self.limits.call_bytes)
        with self._lock:
            if self._json_bytes and self._json_bytes + size > self.limits.calls_bytes:
                raise RequestError(
                    f"calls of {self._json_bytes:,} bytes are in progress, and limits.calls_bytes allows "
                    f"{self.limits.calls_bytes:,}; retry later"
                )
            self._json_bytes += size
        try:
            try:
                found = json.loads(bytes(body))
            except (ValueError, RecursionError) as cause:
                raise RequestError("its body is not JSON") from cause
            if not isinstance(found, dict):
                raise RequestError("its body must be a JSON object")
            yield found
        finally:
            with self._lock:
                self._json_bytes -= size

    @contextmanager
    def streaming(self, peer: str) -> Iterator[str | None]:
        """Count a stream while it is open; yield the reason to refuse it, or None."""
        host = peer.rpartition(":")[0]
        limits, why = self.limits, None
        with self._lock:
            if self._streams.total() >= limits.streams:
                why = f"it has {limits.streams} streams open, as many as limits.streams allows"
            elif self._streams[host] >= limits.peer_streams:
                why = f"it has {limits.peer_streams} streams of this peer, which limits.peer_streams allows"
            else:
                self._streams[host] += 1
        try:
            yield why
        finally:
            if why is None:
                with self._lock:
                    self._streams[host] -= 1
                    if not self._streams[host]:
                        del self._streams[host]

    @contextmanager
    def _counted(self) -> Iterator[None]:
        if not self._free_calls.acquire(blocking=False):
            raise RequestError(
                f"{self.limits.calls} calls are in progress, as many as limits.calls allows; retry later"
            )
        try:
            yield
        finally:
            self._free_calls.release()

    def _known(self, table: Mapping[str, Any], name: str) -> Any:
        if name not in table:
            raise self.service.failure(
                f"{self.service.name}: there is no call {name[:60]!r}; there are {', '.join(table)}"
            )
        return table[name]


def _error(kind: str, message: str) -> bytes:
    return json.dumps({"error": kind, "message": message}).encode()


def _too_large(size: int, limit: str, most: int) -> RequestError:
    return RequestError(f"it has {size:,} bytes, and limits.{limit} allows {most:,}")
