"""The delta channel over Arrow Flight: a port of the publisher that answers readers.

    port = DeltaPort(host="0.0.0.0", port=7000, guard=guard)      one for all shards of a process
    writer = port.writer()                                        one for each shard
    reader = FlightDeltaReader(["trainer:7000"], guard=guard)     see `flight_reader`

A reader asks for the frames after its position and waits for one answer, which has as many as fit into it.
The port has a log for each shard, bounded in bytes, and per reader only the snapshot that is being made for
it: a slow reader neither blocks a publisher nor grows its memory.

    reader                                      port
    shares(model)                          ->   the description of each shard's log, and the time
    deltas(share, after, state, wait)      ->   frames after the position, or behind=True: take a snapshot
    snapshot(share, stream="", chunk=0)    ->   frames, and the name of the stream; made while it is fetched
    snapshot(share, stream, chunk=n)       ->   chunk n, or n - 1 again if its answer was lost
    leave(reader, stream)                  ->   the stream, or everything of the reader, is dropped
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch

from monolith import concurrency
from monolith.cluster.discovery import Discovery
from monolith.errors import (
    ConfigError,
    CorruptMessageError,
    LostStateError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from monolith.sync.channel import LOG_BYTES, DeltaLog, ShardLog, TakeSnapshot, Unfinished
from monolith.sync.messages import BUCKETS, Delta, LogPosition, Message, PublishState
from monolith.sync.wire_format import encode, log_to_plain
from monolith.wire.bulk import BulkMessages
from monolith.wire.endpoint import Handlers
from monolith.wire.flight import Clock
from monolith.wire.flight_server import Server
from monolith.wire.flight_transport import import_arrow
from monolith.wire.messages import Bounds, Count, Name, Seconds, Text, read_message, typed
from monolith.wire.ports import Limits, join_address
from monolith.wire.transport import PortGuard, Service

PUBLISHER = "publisher"
"""The role under which publishers with a port are registered, by the number of their shard."""
IDLE_S = 60.0
"""Seconds without a request after which a reader, or a snapshot that is not fetched, is forgotten."""
_LINGER_S = 10.0
AWAITED_S = 5.0
"""Seconds that the end of a run waits for a reader that neither asks nor comes nearer to the last delta."""

_log = logging.getLogger(__name__)


# The calls. Names of calls and fields are the protocol: releases with other names could not be mixed.

SERVICE = Service(
    name="delta channel",
    peers="publishers and subscribers",
    failure=UnavailableError,
    told=(ConfigError, LostStateError, OverloadedError, UnavailableError),
    unreachable=UnavailableError,
    late=UnavailableError,
    token_hint=(
        " A run that was given none has one in MODEL_DIR/run_token: follow it with --token-file "
        "MODEL_DIR/run_token, or with --follow-token-file and what `monolith config token --role follow "
        "--model-dir MODEL_DIR` prints."
    ),
)

_ABOUT = b"monolith.delta"


@dataclass(frozen=True, slots=True)
class LogsRequest:
    """Asks which shards of a model are published."""

    reader: Name
    model: Text


@dataclass(frozen=True, slots=True)
class LeaveRequest:
    """Tells that a reader stops; or, with a stream, that it does not need the rest of a snapshot."""

    reader: Name
    stream: Text = ""


@dataclass(frozen=True, slots=True)
class DeltasRequest:
    """Asks for the deltas after a position."""

    reader: Name
    model: Text
    share: Count
    after: LogPosition | None
    state: int
    """The number of the publish state that the reader knows; -1: none."""
    wait: Seconds


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """Asks for a chunk of a snapshot."""

    reader: Name
    model: Text
    share: Count
    stream: Text
    """Names the snapshot; empty to start one."""
    chunk: Count
    buckets: Annotated[list[Annotated[int, Bounds(0, BUCKETS - 1)]], Bounds(0, BUCKETS)] | None


@dataclass(frozen=True, slots=True)
class AnswerAbout:
    """The metadata of an answer with frames."""

    behind: bool = False
    """The log no longer has the position asked for: take a snapshot."""
    stream: str = ""
    """Names the snapshot that continues after this chunk; empty after the last chunk."""


def pack_answer(wire: BulkMessages, about: AnswerAbout, frames: Sequence[bytes]) -> Any:
    """Return frames as the record batch that a `Fetch` answers with."""
    metadata = json.dumps({"behind": about.behind, "stream": about.stream})
    return wire.batch(b"".join(frames)).replace_schema_metadata({_ABOUT: metadata})


def unpack_answer(batch: Any) -> tuple[AnswerAbout, memoryview]:
    """Return the metadata and the frames that `pack_answer` put into a batch; the bytes are the caller's own.

    Raises:
        CorruptMessageError: The batch is something else.
    """
    try:
        metadata = json.loads((batch.schema.metadata or {})[_ABOUT])
        data = batch.column(0).buffers()[1]
        frames = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8).copy()
        return AnswerAbout(bool(metadata["behind"]), str(metadata["stream"])), frames[: batch.num_rows].data
    except (KeyError, TypeError, ValueError, IndexError) as cause:
        raise CorruptMessageError("a delta channel was answered by something else") from cause


# The port


@dataclass(frozen=True, kw_only=True, slots=True)
class ReaderLimits:
    """How much all readers of a delta port together may take."""

    readers: int = 256
    """The most readers at a time; further readers are told to retry later."""
    snapshots: int = 4
    """The most snapshots that are made at a time."""
    answer_bytes: int = 8 << 20
    """About how many bytes one answer has; more only if one frame is larger."""

    def __post_init__(self) -> None:
        if min(self.readers, self.snapshots, self.answer_bytes) < 1:
            raise ConfigError("delta port: readers, snapshots and answer_bytes must be at least 1")


class DeltaPort:
    """Answers readers of all shards that this process publishes, until it is closed. Thread-safe.

    Args:
        host: Only this machine by default.
        port: 0 lets the system choose.
        advertise: The host by which readers reach this one, if that is not `host`.
        guard: The credentials that readers must present; None admits every process that can reach the port.
        limits: Bounds on one request.
        reader_limits: Bounds on all readers together.

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
        reader_limits: ReaderLimits | None = None,
        clock: Clock = concurrency.monotonic,
        wall: Clock = concurrency.time,
    ) -> None:
        limits = (limits or Limits()).for_readers()
        self._wire = BulkMessages(import_arrow("the delta channel"))
        self._longest = limits.wait.total_seconds()
        self._most = reader_limits or ReaderLimits()
        self._clock, self._wall = clock, wall
        # Guards everything below; never held while frames are made or waited for, which may take seconds.
        self._lock = concurrency.Lock()
        self._writers: list[FlightDeltaWriter] = []
        self._readers: dict[str, float] = {}
        """Reader -> time of its latest request."""
        self._streams: dict[str, _SnapshotStream] = {}
        self._closed = False
        self._server = Server(
            SERVICE,
            Handlers(
                calls={"shares": typed(LogsRequest, self._logs), "leave": typed(LeaveRequest, self._leave)},
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
        """The number of readers with a recent request."""
        with self._lock:
            self._forget_idle()
            return len(self._readers)

    def writer(
        self,
        model: str = "",
        *,
        log_bytes: int = LOG_BYTES,
        discovery: Discovery | None = None,
        owns_port: bool = False,
    ) -> FlightDeltaWriter:
        """Return the publisher's end of one shard.

        Args:
            model: The model that the shard is of, if one process publishes several; readers name it.
            log_bytes: The most bytes of deltas in the log.
            discovery: Registry in which the writer announces the port.
            owns_port: Close the port with the writer.
        """
        writer = FlightDeltaWriter(self, model, log_bytes, discovery, owns_port=owns_port)
        with self._lock:
            self._writers.append(writer)
        return writer

    def close(self) -> None:
        """Disconnect readers and free the port. Closing again does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            writers = list(self._writers)
        for writer in writers:
            writer.close()
        # The server waits for requests in progress: without end, if a reader was stopped in the middle of an
        # answer. So it ends in a thread that this process waits for `_LINGER_S` at most.
        ending = concurrency.Thread(target=self._server.close, name="delta-port-close", daemon=True)
        ending.start()
        ending.join(_LINGER_S)

    # For writers

    def now(self) -> float:
        """Return seconds that only grow."""
        return self._clock()

    def drop_snapshots(self, writer: FlightDeltaWriter, *, leave: bool = False) -> None:
        """End the snapshots of a shard that are being made; with `leave`, forget the shard too."""
        with self._lock:
            ended = [name for name, stream in self._streams.items() if stream.writer is writer]
            streams = [self._streams.pop(name) for name in ended]
            if leave and writer in self._writers:
                self._writers.remove(writer)
        for stream in streams:
            stream.close()

    # Calls of readers

    def _logs(self, asked: LogsRequest) -> dict[str, Any]:
        self._admit(asked.reader)
        with self._lock:
            writers = [writer for writer in self._writers if writer.model == asked.model]
        logs = [log for log in (writer.log.log for writer in writers) if log is not None]
        # With the time, readers measure how far their clock is from ours, which stamps the messages.
        return {"shares": [log_to_plain(log) for log in logs], "now": self._wall()}

    def _leave(self, asked: LeaveRequest) -> None:
        with self._lock:
            stream = self._streams.pop(asked.stream, None)
            if not asked.stream:
                self._readers.pop(asked.reader, None)
                for writer in self._writers:
                    writer.forget_reader(asked.reader)
        if stream is not None:
            stream.close()

    def _fetch(self, ticket: dict[str, Any]) -> Any:
        asked = ticket.get("ask")
        if asked == "deltas":
            return self._deltas(read_message(DeltasRequest, ticket.get("body")))
        if asked == "snapshot":
            return self._snapshot(read_message(SnapshotRequest, ticket.get("body")))
        raise RequestError("a ticket must ask for deltas or for a snapshot")

    def _deltas(self, asked: DeltasRequest) -> Any:
        self._admit(asked.reader)
        writer = self._writer(asked.model, asked.share)
        writer.note_reader(asked.reader, asked.after)
        log = writer.log
        # The wait, the deltas and the state are three looks at a log that changes meanwhile. That is
        # harmless: a delta that is missed is in the next answer, and a state is sent again until the reader
        # knows it.
        if asked.after is not None:
            log.wait(asked.after, asked.state, min(asked.wait, self._longest))
        deltas, state = log.after(asked.after), log.state
        writer.note_reader(asked.reader, asked.after)  # it waited, and is still there
        frames = [] if state.number == asked.state else [encode(state)]
        size = 0
        for delta in deltas or ():
            if size >= self._most.answer_bytes:
                break
            frames.append(encode(delta))
            size += len(frames[-1])
        return pack_answer(self._wire, AnswerAbout(behind=deltas is None), frames)

    def _snapshot(self, asked: SnapshotRequest) -> Any:
        self._admit(asked.reader)
        if asked.stream:
            with self._lock:
                stream = self._streams.get(asked.stream)
            if stream is None:
                raise LostStateError(
                    "the snapshot was given up: a new epoch started, or it was fetched too slowly"
                )
        else:
            stream = self._begin_snapshot(asked)
        frames, more = stream.chunk(asked.chunk, self._most.answer_bytes)
        if asked.buckets is None:
            stream.writer.note_reader(asked.reader, None, moved=True)
        if not more:
            with self._lock:
                self._streams.pop(stream.name, None)
        return pack_answer(self._wire, AnswerAbout(stream=stream.name if more else ""), frames)

    def _begin_snapshot(self, asked: SnapshotRequest) -> _SnapshotStream:
        writer, buckets = self._writer(asked.model, asked.share), asked.buckets
        chosen = None if buckets is None else torch.tensor(sorted(set(buckets)), dtype=torch.int64)
        with self._lock:
            self._forget_idle()
            # A reader takes one snapshot at a time: one that it started before was given up. If the answer
            # with its name was lost, the reader could not even tell.
            for name in [one.name for one in self._streams.values() if one.reader == asked.reader]:
                self._streams.pop(name).close()
            if len(self._streams) >= self._most.snapshots:
                raise OverloadedError(
                    f"{len(self._streams)} snapshots are being made, as many as may be at a time; retry later"
                )
            stream = _SnapshotStream(asked.reader, writer, writer.log.snapshot(chosen), self._clock)
            self._streams[stream.name] = stream
        return stream

    def _writer(self, model: str, shard: int) -> FlightDeltaWriter:
        with self._lock:
            for writer in reversed(self._writers):
                if writer.model == model and writer.shard == shard:
                    return writer
        raise UnavailableError(f"this process does not publish shard {shard} any more, or not yet")

    def _admit(self, reader: str) -> None:
        """Register a request of a reader, unless there are too many readers."""
        with self._lock:
            if reader not in self._readers:
                self._forget_idle()
                if len(self._readers) >= self._most.readers:
                    raise OverloadedError(
                        f"{len(self._readers)} readers follow this publisher, as many as may; retry later, "
                        "or follow by Kafka or a folder"
                    )
            self._readers[reader] = self._clock()

    def _forget_idle(self) -> None:
        """Forget readers and snapshots without a recent request. The lock is held."""
        before = self._clock() - IDLE_S
        for reader in [name for name, asked in self._readers.items() if asked < before]:
            del self._readers[reader]
        for name in [name for name, stream in self._streams.items() if stream.asked_at < before]:
            if self._streams[name].close():
                _log.warning("delta channel: dropped a snapshot that was not fetched for %.0f s", IDLE_S)
                del self._streams[name]


@dataclass(slots=True)
class _ReaderOf:
    """A reader of one shard."""

    after: LogPosition | None
    """The position that it has reached; None while it takes a snapshot."""
    asked_at: float
    moved_at: float
    """When it last came nearer to the newest delta."""


class FlightDeltaWriter:
    """A publisher's end of one shard; `DeltaPort.writer` makes it.

    The log ends with this process. So at the end of a run, readers that are there have a moment to fetch the
    last deltas (see `unfinished`); no reader can make the run fail.
    """

    def __init__(
        self, port: DeltaPort, model: str, log_bytes: int, discovery: Discovery | None, *, owns_port: bool
    ) -> None:
        self.model = model
        self.shard: int | None = None
        self.log = DeltaLog(log_bytes)
        self._port, self._owns_port = port, owns_port
        self._discovery = discovery
        self._registered: int | None = None
        self._lock = concurrency.Lock()  # guards the three below: readers ask on threads of their own
        self._readers: dict[str, _ReaderOf] = {}
        self._moves = 0
        self._appended_at = port.now()

    @property
    def address(self) -> str:
        return self._port.address

    def open(self, log: ShardLog, snapshot: TakeSnapshot) -> None:
        self.shard = log.shard[0]
        self.log.open(log, snapshot)
        self._port.drop_snapshots(self)
        # Registered last: a reader that finds the address must find the log.
        if self._discovery is not None and self._registered != self.shard:
            self._deregister()
            self._discovery.register(PUBLISHER, self.shard, self.address)
            self._registered = self.shard

    def append(self, delta: Delta) -> None:
        self.log.append(delta)
        with self._lock:
            self._appended_at = self._port.now()

    def set_state(self, state: PublishState) -> None:
        self.log.set_state(state)

    def note_reader(self, reader: str, after: LogPosition | None, *, moved: bool = False) -> None:
        """Note that a reader has all deltas up to a position, or fetches a snapshot."""
        now = self._port.now()
        with self._lock:
            known = self._readers.get(reader)
            if known is None:
                known = self._readers[reader] = _ReaderOf(after, now, now)
            if moved or known.after != after:
                known.after, known.moved_at = after, now
                self._moves += 1
            known.asked_at = now

    def forget_reader(self, reader: str) -> None:
        """Forget a reader that stops."""
        with self._lock:
            self._readers.pop(reader, None)

    def unfinished(self) -> Unfinished | None:
        """Return that readers have not fetched the last delta: those that ask, and come nearer to it."""
        now = self._port.now()
        with self._lock:
            for name in [name for name, one in self._readers.items() if now - one.asked_at > IDLE_S]:
                del self._readers[name]
            awaited = [
                one
                for one in self._behind()
                if now - one.asked_at < AWAITED_S and now - max(one.moved_at, self._appended_at) < AWAITED_S
            ]
            if not awaited:
                return None
            reason = f"{len(awaited)} readers have not fetched the last delta"
            return Unfinished(reason, self._moves, by_readers=True)

    def _behind(self) -> list[_ReaderOf]:
        """Return the readers that lack deltas. The lock is held."""
        log = self.log.log
        return [] if log is None else [one for one in self._readers.values() if one.after != log.newest]

    def close(self) -> None:
        with self._lock:
            if behind := len(self._behind()):
                _log.warning(
                    "shard %s is published no more, and %d of its readers have not fetched the last delta: "
                    "they lack its rows until the next start of the run",
                    self.shard,
                    behind,
                )
            self._readers.clear()
        self._deregister()
        self.log.close()
        self._port.drop_snapshots(self, leave=True)
        if self._owns_port:
            self._port.close()

    def _deregister(self) -> None:
        if self._discovery is not None and self._registered is not None:
            self._discovery.deregister(PUBLISHER, self._registered, self.address)
            self._registered = None


class _SnapshotStream:
    """A snapshot that is made while it is fetched. The last chunk is stored, as its answer may get lost."""

    def __init__(
        self, reader: str, writer: FlightDeltaWriter, messages: Iterator[Message], clock: Clock
    ) -> None:
        self.name = concurrency.token_hex(16)
        self.reader, self.writer = reader, writer
        self.asked_at = clock()
        self._clock = clock
        self._messages = messages
        # Guards what follows, and is held while a chunk is made: a generator runs on one thread at a time,
        # and a reader that asks for a chunk again, because it waited too long, must get the same one.
        self._lock = concurrency.Lock()
        self._number = -1
        self._frames: list[bytes] = []
        self._more = True

    def chunk(self, number: int, most_bytes: int) -> tuple[list[bytes], bool]:
        """Return a chunk and whether more follow: the next chunk, or the last one again."""
        self.asked_at = self._clock()
        with self._lock:
            if number == self._number + 1 and self._more:
                self._frames, self._number = self._next(most_bytes), number
            elif number != self._number:
                raise LostStateError(f"chunk {number} of a snapshot at chunk {self._number} is not available")
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
        """Stop making it; return False if a request is making a chunk right now."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._more = False
            if (close := getattr(self._messages, "close", None)) is not None:
                close()  # of a generator: it may be in the middle of a table
            return True
        finally:
            self._lock.release()
