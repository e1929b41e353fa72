"""One caller over gRPC, as little as HTTP/2 allows: what is asked is always the same, so it is encoded once.

A client library would take as much of the processor as the server that it measures. This one sends the same
head and message on one stream after another, keeps within the server's windows, answers its pings, and of
an answer reads only whether it ended well.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
_FRAME = 9
_LARGEST_FRAME = 16_384
_WINDOW = 65_535
_OUR_WINDOW = 1 << 30
_TABLE_SIZE, _INITIAL_WINDOW = 1, 4
"""Of the settings: how many headers are remembered, how much of a stream may be sent before it is read."""
ENDED_WELL = b"grpc-status\x010"
"""In the last head of an answer, written out, since no headers are remembered."""


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def literal(name: bytes, value: bytes) -> bytes:
    """Return a header that no table remembers, so that it reads the same each time."""
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


class GrpcCaller(asyncio.Protocol):
    """One connection: asks, and asks again when the answer has ended.

    Args:
        method: /package.Service/Method.
        message: What is asked.
        seen: Told how many seconds each answer took.
        failed: Told of each that did not end well.
        end: By `time.perf_counter`: after that, nothing more is asked.
    """

    def __init__(
        self, method: str, authority: str, message: bytes, *, seen: list[float], failed: list[int], end: float
    ) -> None:
        self._head = b"".join(
            literal(name, value)
            for name, value in (
                (b":method", b"POST"),
                (b":scheme", b"http"),
                (b":path", method.encode()),
                (b":authority", authority.encode()),
                (b"content-type", b"application/grpc"),
                (b"te", b"trailers"),
            )
        )
        self._message = b"\0" + len(message).to_bytes(4, "big") + message
        self._seen = seen
        self._failed = failed
        self._end = end
        self._stream = -1
        self._read = bytearray()
        self._window = _WINDOW
        """Of the connection: what may be sent."""
        self._first_window = _WINDOW
        """Of each stream, at first."""
        self._stream_window = 0
        self._rest = b""
        self._began = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        settings = frame(SETTINGS, 0, 0, _setting(_TABLE_SIZE, 0) + _setting(_INITIAL_WINDOW, _OUR_WINDOW))
        window = frame(WINDOW_UPDATE, 0, 0, (_OUR_WINDOW - _WINDOW).to_bytes(4, "big"))
        transport.write(PREFACE + settings + window)

    def data_received(self, data: bytes) -> None:
        read = self._read
        read += data
        at = 0
        while len(read) - at >= _FRAME:
            size = int.from_bytes(read[at : at + 3], "big")
            if len(read) - at < _FRAME + size:
                break
            kind, flags = read[at + 3], read[at + 4]
            stream = int.from_bytes(read[at + 5 : at + 9], "big")
            self._take(kind, flags, stream, bytes(read[at + _FRAME : at + _FRAME + size]))
            at += _FRAME + size
        del read[:at]

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        if not self.done.done():
            self._failed.append(1)
            self.done.set_result(None)

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == HEADERS:
            if flags & END_STREAM:
                self._answered(ENDED_WELL in payload)
        elif kind == SETTINGS:
            if not flags & ACK:
                self._settle(payload)
        elif kind == WINDOW_UPDATE:
            more = int.from_bytes(payload, "big")
            if stream == 0:
                self._window += more
            elif stream == self._stream:
                self._stream_window += more
            self._send()
        elif kind == PING:
            if not flags & ACK:
                self._transport.write(frame(PING, ACK, 0, payload))
        elif kind in (RST_STREAM, GOAWAY):
            self._answered(False)

    def _settle(self, payload: bytes) -> None:
        for at in range(0, len(payload), 6):
            if int.from_bytes(payload[at : at + 2], "big") == _INITIAL_WINDOW:
                self._first_window = int.from_bytes(payload[at + 2 : at + 6], "big")
        self._transport.write(frame(SETTINGS, ACK, 0, b""))
        if not self._began:
            self._began = True
            self._ask()

    def _ask(self) -> None:
        self._stream += 2
        self._stream_window = self._first_window
        self._asked = time.perf_counter()
        self._rest = self._message
        self._send(frame(HEADERS, END_HEADERS, self._stream, self._head))

    def _send(self, before: bytes = b"") -> None:
        """Send what the windows allow."""
        parts = [before]
        while self._rest:
            size = min(len(self._rest), _LARGEST_FRAME, self._window, self._stream_window)
            if size <= 0:
                break
            part, self._rest = self._rest[:size], self._rest[size:]
            self._window -= size
            self._stream_window -= size
            parts.append(frame(DATA, 0 if self._rest else END_STREAM, self._stream, part))
        if any(parts):
            self._transport.write(b"".join(parts))

    def _answered(self, well: bool) -> None:
        now = time.perf_counter()
        self._seen.append(now - self._asked)
        if not well:
            self._failed.append(1)
        if now < self._end and self._stream < 1 << 30 and not self._transport.is_closing():
            self._ask()
        elif not self.done.done():
            self.done.set_result(None)
            self._transport.close()


def _setting(name: int, value: int) -> bytes:
    return name.to_bytes(2, "big") + value.to_bytes(4, "big")
