"""The delta channel over Arrow Flight: a port that answers what comes after a place.

    port = DeltaPort(host="0.0.0.0", port=7000, guard=guard)      one for all shares of a process
    writer = port.writer()                                        one for each share
    reader = FlightDeltaReader(["trainer:7000"], guard=guard)     see `flight_reader`

A reader asks and waits for an answer: the frames that come after its place, as many as fit into one answer.
The port keeps a log for each share, bounded in bytes, and nothing for a reader but the snapshot
that is being made for it: so nobody who is slow holds up or grows a publisher. Who asks for what is no longer
kept is told to take a snapshot, which is made while it is fetched, a chunk at a time.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from monolith.errors import ConfigError, LostStateError, OverloadedError, RequestError, UnavailableError
from monolith.sync.channel import ShareLog, TakeSnapshot
from monolith.sync.delta_log import LOG_BYTES, DeltaLog
from monolith.sync.flight_calls import (
    SERVICE,
    AnswerAbout,
    DeltasBody,
    LeaveBody,
    SharesBody,
    SnapshotBody,
    pack_answer,
)
from monolith.sync.messages import Delta, Message, PublishState
from monolith.sync.wire_format import encode, log_to_plain
from monolith.wire.bulk import BulkMessages
from monolith.wire.flight import Clock, PortGuard, import_arrow
from monolith.wire.flight_server import Handlers, Server
from monolith.wire.messages import read_message, typed
from monolith.wire.ports import Limits, join_address

ANSWER_BYTES = 8 << 20
"""About how many bytes one answer has; more only where one frame is larger."""
IDLE_S = 60.0
"""Seconds after which a reader that asks no more is forgotten, and a snapshot that nobody fetches."""
_LINGER_S = 10.0

_log = logging.getLogger(__name__)


class DeltaPort:
    """Answers readers of all shares that this process publishes, until it is closed. Thread-safe.

    Args:
        host: Only this machine by default.
        port: 0 lets the system choose.
        advertise: The host by which readers reach this one, where that is not `host`.
        guard: What readers must present; None lets in everybody who can reach the port.
        limits: What one of them may ask for.
        readers: The most readers at a time; others are told to come back later.
        snapshots: The most snapshots that are made at a time.
        answer_bytes: About how many bytes one answer has.

    Raises:
        ListenError: The port is taken, or the address is not of this machine.
        MissingExtraError: pyarrow is not installed.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
        guard: PortGuard | None = None,
        limits: Limits | None = None,
        readers: int = 256,
        snapshots: int = 4,
        answer_bytes: int = ANSWER_BYTES,
        clock: Clock = time.monotonic,
        wall: Clock = time.time,
    ) -> None:
        if min(readers, snapshots, answer_bytes) < 1:
            raise ConfigError("delta port: readers, snapshots and answer_bytes must be at least 1")
        limits = (limits or Limits()).for_readers()
        self._wire = BulkMessages(import_arrow("the delta channel"))
        self._longest = limits.wait.total_seconds()
        self._answer_bytes = answer_bytes
        self._most_readers, self._most_snapshots = readers, snapshots
        self._clock, self._wall = clock, wall
        self._lock = threading.Lock()  # guards all below; never held while frames are made or waited for
        self._writers: list[FlightDeltaWriter] = []
        self._readers: dict[str, float] = {}
        """Reader -> when it asked last."""
        self._streams: dict[str, _SnapshotStream] = {}
        self._closed = False
        self._server = Server(
            SERVICE,
            Handlers(
                calls={"shares": typed(SharesBody, self._shares), "leave": typed(LeaveBody, self._leave)},
                fetch=self._fetch,
            ),
            host=host,
            port=port,
            guard=guard,
            limits=limits,
        )
        self.address = join_address(advertise or host, self._server.port)

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def reader_count(self) -> int:
        """How many readers have asked lately."""
        with self._lock:
            self._forget_idle()
            return len(self._readers)

    def writer(self, model: str = "", *, log_bytes: int = LOG_BYTES) -> FlightDeltaWriter:
        """Return the publisher's end of one share.

        Args:
            model: Which model's, where several are published by one process; readers name it.
            log_bytes: The most bytes of deltas that are kept for readers.
        """
        writer = FlightDeltaWriter(self, model, log_bytes)
        with self._lock:
            self._writers.append(writer)
        return writer

    def close(self) -> None:
        """Let readers go and free the port. Closing again does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            writers = list(self._writers)
        for writer in writers:
            writer.close()
        # A reader that was stopped in the middle of an answer would be waited for without end.
        ending = threading.Thread(target=self._server.close, name="delta-port-close", daemon=True)
        ending.start()
        ending.join(_LINGER_S)

    # For writers

    def drop_snapshots(self, writer: FlightDeltaWriter, *, leave: bool = False) -> None:
        """End the snapshots that are being made of a share; with `leave`, forget the share too."""
        with self._lock:
            ended = [name for name, stream in self._streams.items() if stream.writer is writer]
            streams = [self._streams.pop(name) for name in ended]
            if leave and writer in self._writers:
                self._writers.remove(writer)
        for stream in streams:
            stream.close()

    # Calls of readers

    def _shares(self, body: SharesBody) -> dict[str, Any]:
        self._admit(body.reader)
        with self._lock:
            writers = [writer for writer in self._writers if writer.model == body.model]
        logs = [log for log in (writer.log.log for writer in writers) if log is not None]
        # The time lets readers tell how far their clock is from ours, which stamps what is published.
        return {"shares": [log_to_plain(log) for log in logs], "now": self._wall()}

    def _leave(self, body: LeaveBody) -> None:
        with self._lock:
            stream = self._streams.pop(body.stream, None)
            if not body.stream:
                self._readers.pop(body.reader, None)
        if stream is not None:
            stream.close()

    def _fetch(self, ticket: dict[str, Any]) -> Any:
        asked = ticket.get("ask")
        if asked == "deltas":
            return self._deltas(read_message(DeltasBody, ticket.get("body")))
        if asked == "snapshot":
            return self._snapshot(read_message(SnapshotBody, ticket.get("body")))
        raise RequestError("a ticket must ask for deltas or for a snapshot")

    def _deltas(self, body: DeltasBody) -> Any:
        self._admit(body.reader)
        log = self._writer(body.model, body.share).log
        if body.after is not None:
            log.wait(body.after, body.state, min(body.wait, self._longest))
        deltas, state = log.after(body.after), log.state
        frames = [] if state.number == body.state else [encode(state)]
        size = 0
        for delta in deltas or ():
            if size >= self._answer_bytes:
                break
            frames.append(encode(delta))
            size += len(frames[-1])
        return pack_answer(self._wire, AnswerAbout(behind=deltas is None), frames)

    def _snapshot(self, body: SnapshotBody) -> Any:
        self._admit(body.reader)
        stream = self._begin_snapshot(body) if not body.stream else self._snapshot_of(body.stream)
        frames, more = stream.chunk(body.chunk, self._answer_bytes)
        if not more:
            with self._lock:
                self._streams.pop(stream.name, None)
        return pack_answer(self._wire, AnswerAbout(stream=stream.name if more else ""), frames)

    def _begin_snapshot(self, body: SnapshotBody) -> _SnapshotStream:
        writer = self._writer(body.model, body.share)
        buckets = None if body.buckets is None else torch.tensor(sorted(set(body.buckets)), dtype=torch.int64)
        with self._lock:
            self._forget_idle()
            if len(self._streams) >= self._most_snapshots:
                raise OverloadedError(
                    f"{len(self._streams)} snapshots are being made, as many as may be at a time; retry later"
                )
            stream = _SnapshotStream(writer, writer.log.snapshot(buckets), self._clock)
            self._streams[stream.name] = stream
        return stream

    def _snapshot_of(self, name: str) -> _SnapshotStream:
        with self._lock:
            stream = self._streams.get(name)
        if stream is None:
            raise LostStateError("the snapshot was given up: a new epoch began, or it was fetched too slowly")
        return stream

    def _writer(self, model: str, share: int) -> FlightDeltaWriter:
        with self._lock:
            for writer in reversed(self._writers):
                if writer.model == model and writer.share == share:
                    return writer
        raise UnavailableError(f"nobody publishes share {share} here any more, or not yet")

    def _admit(self, reader: str) -> None:
        """Count a reader among those who ask, if there is room."""
        with self._lock:
            if reader not in self._readers:
                self._forget_idle()
                if len(self._readers) >= self._most_readers:
                    raise OverloadedError(
                        f"{len(self._readers)} readers follow this publisher, as many as may; retry later, "
                        "or let others follow by Kafka or a folder"
                    )
            self._readers[reader] = self._clock()

    def _forget_idle(self) -> None:
        """Forget who does not ask any more. The lock is held."""
        before = self._clock() - IDLE_S
        for reader in [name for name, asked in self._readers.items() if asked < before]:
            del self._readers[reader]
        for name in [name for name, stream in self._streams.items() if stream.asked_at < before]:
            if self._streams[name].close():
                _log.warning("delta channel: gave up a snapshot that nobody fetched for %.0f s", IDLE_S)
                del self._streams[name]


class FlightDeltaWriter:
    """A publisher's end of one share; `DeltaPort.writer` makes it."""

    def __init__(self, port: DeltaPort, model: str, log_bytes: int) -> None:
        self.model = model
        self.share: int | None = None
        self.log = DeltaLog(log_bytes)
        self._port = port

    @property
    def address(self) -> str:
        """Where readers find it: host:port."""
        return self._port.address

    def open(self, log: ShareLog, snapshot: TakeSnapshot) -> None:
        self.share = log.share[0]
        self.log.open(log, snapshot)
        self._port.drop_snapshots(self)

    def append(self, delta: Delta) -> None:
        self.log.append(delta)

    def say(self, state: PublishState) -> None:
        self.log.say(state)

    def close(self) -> None:
        self.log.close()
        self._port.drop_snapshots(self, leave=True)


class _SnapshotStream:
    """A snapshot that is made while it is fetched. The last chunk is kept: its answer may have been lost."""

    def __init__(self, writer: FlightDeltaWriter, messages: Iterator[Message], clock: Clock) -> None:
        self.name = secrets.token_hex(16)
        self.writer = writer
        self.asked_at = clock()
        self._clock = clock
        self._messages = messages
        self._lock = threading.Lock()  # guards what follows, and the making of chunks
        self._number = -1
        self._frames: list[bytes] = []
        self._more = True

    def chunk(self, number: int, most_bytes: int) -> tuple[list[bytes], bool]:
        """Return a chunk and whether others follow: the next, or the one before again."""
        self.asked_at = self._clock()
        with self._lock:
            if number == self._number + 1 and self._more:
                self._frames, self._number = self._next(most_bytes), number
            elif number != self._number:
                raise LostStateError(f"chunk {number} of a snapshot that is at {self._number} cannot be had")
            self.asked_at = self._clock()
            return self._frames, self._more

    def _next(self, most_bytes: int) -> list[bytes]:
        frames: list[bytes] = []
        size = 0
        while size < most_bytes:
            message = next(self._messages, None)
            if message is None:
                self._more = False
                break
            frames.append(encode(message))
            size += len(frames[-1])
        return frames

    def close(self) -> bool:
        """Let go of what makes it; return whether that could be done, or somebody is at it."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._more = False
            close = getattr(self._messages, "close", None)
            if close is not None:
                close()
            return True
        finally:
            self._lock.release()
