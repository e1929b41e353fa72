"""Data workers: read splits, cut them into chunks, and send these to trainers.

A worker has no state that could be lost. It reads the splits it has leased and announces every
chunk to the dispatcher; chunks wait here for the trainer that gets them, and reading stops
while too many wait. A requested chunk that is not here, because it was sent before or because
another worker cut it, is read again from its place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from monolith import concurrency
from monolith.data.records import Records, concat
from monolith.data.service.job import Place
from monolith.data.service.messages import (
    POLL,
    Address,
    ChunkBody,
    DataCaller,
    DataServer,
    PortGuard,
    StoppedError,
    UnreachableError,
    join_address,
    to_batch,
)
from monolith.data.source import Source
from monolith.errors import ConfigError, DataError, MonolithError
from monolith.wire.messages import Nothing, read_message, typed
from monolith.wire.ports import Limits

OpenSplit = Callable[[str], Source]
"""Opens a split from its beginning. Has to give the same records in the same order, on every worker."""

_log = logging.getLogger(__name__)

_LONGEST_ERROR = 10_000
_Id = tuple[str, int, int, int]  # job, epoch, split, sequence


@dataclass(frozen=True, slots=True)
class Piece:
    """Records that become a chunk."""

    records: Records
    place: Place
    """Where it begins."""
    after: Place
    """Where the next one does."""


def pieces(source: Source, place: Place | None, most: int) -> Iterator[Piece]:
    """Yield the records of a source from a place on, at most so many at a time.

    Small batches are not combined: a reader of a live stream wants them now.
    """
    if place is not None:
        source.restore(place.position)
    # A source has positions only between its batches, so a place inside of one is a position and a skip.
    base, skip = source.position(), 0 if place is None else place.skip
    for records in source:
        after = source.position()
        at = min(skip, records.size)
        skip -= at
        while at < records.size:
            end = min(at + most, records.size)
            yield Piece(
                records.slice(at, end),
                Place(base, at),
                Place(after) if end == records.size else Place(base, end),
            )
            at = end
        base = after


def read_again(source: Source, place: Place, size: int) -> Records:
    """Return `size` records of a source from a place on.

    Raises:
        DataError: There are fewer: the split has changed.
    """
    if size < 1:
        raise DataError(f"data service: a chunk has at least one record, not {size}")
    parts: list[Records] = []
    found = 0
    for piece in pieces(source, place, size):
        part = piece.records.slice(0, size - found)
        parts.append(part)
        found += part.size
        if found == size:
            return concat(parts)
    raise DataError(f"data service: {size} records were read at {place} before, now there are {found}")


@dataclass(slots=True)
class _Buffer:
    """Chunks that wait to be fetched. The worker's lock guards it."""

    free: dict[_Id, Any] = field(default_factory=dict)
    """Not given to a trainer yet, as far as is known."""
    given: dict[_Id, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataWorkerConfig:
    """How a data worker reads."""

    readers: int = 2
    """Splits to read at a time."""
    buffer_chunks: int = 16
    """Chunks, of all splits together, that may wait for a trainer before reading stops; and about as many
    that trainers were given and have not fetched."""
    chunk_records: int = 4096
    """The most records of a chunk."""
    patience: timedelta = timedelta(minutes=5)
    """How long the dispatcher may be unreachable."""

    def __post_init__(self) -> None:
        if min(self.readers, self.buffer_chunks, self.chunk_records) < 1:
            raise ConfigError("data worker: readers, buffer_chunks and chunk_records must be at least 1")


class DataWorker:
    """Serves one dispatcher until it is closed.

    Args:
        dispatcher: host:port, or a function that finds it.
        open_split: Opens a split of the job.
        advertise: The host by which trainers reach this worker, if that is not `host`.
        guard: The credentials for the dispatcher, and those to demand of trainers.
        limits: What one trainer may ask for.

    Raises:
        ListenError: The port is taken.
        ConfigError: The dispatcher refuses the token, or has a certificate that is not to be trusted.
        DataError: The dispatcher cannot be reached.
        MissingExtraError: pyarrow is not installed.
    """

    def __init__(
        self,
        dispatcher: Address,
        open_split: OpenSplit,
        config: DataWorkerConfig | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
        guard: PortGuard | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._config = config = config or DataWorkerConfig()
        self._open_split = open_split
        self._stop = concurrency.Event()
        # Guards _buffer, _leases, _renew_every and _failure. Readers add chunks and wait for space; `_renew`
        # learns from the dispatcher which were given away and which leases are lost; `_fetch` removes chunks,
        # on threads of the server. Never held during a call.
        self._changed = concurrency.Condition()
        self._buffer = _Buffer()
        self._leases: set[str] = set()
        self._renew_every = POLL
        self._failure: BaseException | None = None
        self._address_of_dispatcher, self._guard = dispatcher, guard
        self._server = DataServer(
            {"ping": typed(Nothing, lambda _: {})},
            fetch=lambda ticket: self._fetch(read_message(ChunkBody, ticket)),
            host=host,
            port=port,
            guard=guard,
            limits=limits,
            out_of_memory=self._fail,
        )
        self.address = join_address(advertise or host, self._server.port)
        try:
            with self._dispatcher() as dispatch:
                dispatch.call("register", worker=self.address)
        except BaseException:
            self._server.close()
            raise
        self._threads = [
            concurrency.Thread(target=self._guarded, args=(work,), name=name)
            for name, work in [
                ("renew", self._renew),
                *((f"read-{one}", self._read) for one in range(config.readers)),
            ]
        ]
        for thread in self._threads:
            thread.start()

    @property
    def port(self) -> int:
        return self._server.port

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the worker has stopped; return whether it has.

        Raises:
            MonolithError: It stopped because the dispatcher was away for too long, or refused it.
        """
        stopped = self._stop.wait(seconds)
        with self._changed:
            if self._failure is not None:
                raise self._failure
        return stopped

    def close(self) -> None:
        """Stop reading, give splits back, finish sending and free the port. Closing again does nothing."""
        first = not self._stop.is_set()
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        if first:
            self._deregister()
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _dispatcher(self) -> DataCaller:
        """Return a way to call the dispatcher, for one thread."""
        return DataCaller(
            self._address_of_dispatcher,
            guard=self._guard,
            patience=self._config.patience,
            stops=(self._stop,),
        )

    # Reading

    def _guarded(self, work: Callable[[DataCaller], None]) -> None:
        """Run a thread's work; an error in it stops the worker."""
        try:
            with self._dispatcher() as dispatch:
                work(dispatch)
        except StoppedError:
            return  # close() was called
        except Exception as error:  # raised by `wait`
            _log.error("data worker %s stops: %s", self.address, error)
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Stop the worker; `wait` raises the error."""
        with self._changed:
            self._failure = self._failure or error
            self._stop.set()
            self._changed.notify_all()

    def _read(self, dispatch: DataCaller) -> None:
        while not self._stop.is_set():
            answer = dispatch.call("lease", worker=self.address, wait=POLL)
            if answer["lease"] is None:
                continue
            with self._changed:
                self._renew_every = answer["renew_every"]
                self._leases.add(answer["lease"]["lease"])
                self._changed.notify_all()
            try:
                self._read_split(dispatch, answer["job"], **answer["lease"])
            finally:
                with self._changed:
                    self._leases.discard(answer["lease"]["lease"])

    def _read_split(
        self,
        dispatch: DataCaller,
        job: str,
        *,
        lease: str,
        epoch: int,
        number: int,
        split: str,
        place: dict[str, Any] | None,
        sequence: int,
    ) -> None:
        """Read a split to its end, or until the lease is lost."""
        try:
            source = self._open_split(split)
            try:
                begin = None if place is None else Place(**place)
                for piece in pieces(source, begin, self._config.chunk_records):
                    if not self._offer(dispatch, (job, epoch, number, sequence), lease, piece):
                        return
                    sequence += 1
            finally:
                source.close()
        except (StoppedError, UnreachableError):
            raise
        except Exception as error:  # of any source; the dispatcher counts them, and fails the job
            _log.warning("data worker: cannot read split %r: %s", split, error)
            dispatch.call("fail", lease=lease, error=f"{type(error).__name__}: {error}"[:_LONGEST_ERROR])
            return
        dispatch.call("finish", lease=lease, chunks=sequence)

    def _offer(self, dispatch: DataCaller, chunk: _Id, lease: str, piece: Piece) -> bool:
        """Wait until the buffer has space, then announce a chunk; return whether the lease is still valid."""
        with self._changed:
            while len(self._buffer.free) >= self._config.buffer_chunks and lease in self._leases:
                if self._stop.is_set():
                    raise StoppedError
                self._changed.wait()
            if lease not in self._leases:  # `_renew` learned that another worker reads the split now
                return False
            # Stored before it is announced: a trainer may ask for it at once.
            self._buffer.free[chunk] = to_batch(piece.records)
        held = dispatch.call(
            "announce",
            lease=lease,
            sequence=chunk[-1],
            place=asdict(piece.place),
            size=piece.records.size,
            after=asdict(piece.after),
        )["held"]
        # The dispatcher decides, whatever `_renew` knows: another worker may have cut this chunk by now.
        if not held:
            with self._changed:
                self._buffer.free.pop(chunk, None)
                self._changed.notify_all()
        return bool(held)

    def _renew(self, dispatch: DataCaller) -> None:
        while not self._stop.is_set():
            with self._changed:
                leases = sorted(self._leases)
                offered = list(self._buffer.free)
            answer = dispatch.call("renew", worker=self.address, leases=leases)
            waiting = {tuple(one) for one in answer["waiting"]}
            with self._changed:
                self._leases -= set(answer["lost"])
                for chunk in offered:
                    # A chunk that was not announced yet is not among those that wait, either: it moves to the
                    # given ones too early, which costs nothing but its place in the count.
                    if chunk[1:] not in waiting and chunk in self._buffer.free:
                        self._buffer.given[chunk] = self._buffer.free.pop(chunk)
                while len(self._buffer.given) > self._config.buffer_chunks:
                    del self._buffer.given[next(iter(self._buffer.given))]  # the oldest; it can be read again
                self._changed.notify_all()
                every = self._renew_every
            self._stop.wait(every)

    def _deregister(self) -> None:
        """Release the leases at once if the dispatcher answers; otherwise they expire."""
        with suppress(MonolithError), DataCaller(self._address_of_dispatcher, guard=self._guard) as dispatch:
            dispatch.call("deregister", worker=self.address)

    # Sending

    def _fetch(self, ticket: ChunkBody) -> Any:
        """Return a chunk as an Arrow batch: from the buffer, or read again.

        The worker asks the dispatcher what to read, so a ticket cannot name a file. It opens a split of the
        job, and the split's source refuses a position that names a file outside that split.
        """
        # Sent once from memory: if the answer is lost, the trainer asks again, and the chunk is read again.
        with self._changed:
            batch = self._buffer.given.pop(ticket.id, None)
            if batch is None:
                batch = self._buffer.free.pop(ticket.id, None)
            self._changed.notify_all()
        if batch is not None:
            return batch
        with DataCaller(self._address_of_dispatcher, guard=self._guard) as dispatch:
            chunk = dispatch.call("chunk", **asdict(ticket))
        source = self._open_split(chunk["split"])
        try:
            return to_batch(read_again(source, Place(**chunk["place"]), chunk["size"]))
        finally:
            source.close()
