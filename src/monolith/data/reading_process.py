"""A process that reads: batches are made outside the process that trains on them.

Threads that read share the interpreter with the thread that trains. Each call of torch hands it over, and to
get it back from a dozen reading threads takes longer than most of these calls. A process that reads has an
interpreter of its own:

    process that reads   source ──► batch ──► shared memory ─┐      one message for each batch: where its
                                                             │      tensors are, and the position after it
    process that trains  position, restore, commit           └──► the same tensors, without a copy

The process is forked early, before the one that trains has threads or tables, and inherits all that it needs
to open the data. Both have the same stream: the one that trains asks its own for facts about the data, and
moves it to positions; the other reads. Batches, their order and positions are those of reading by threads.

Memory of a batch is used again once no tensor of it is left. If the reading process ends, so does reading,
with an error; if the training process ends, the reading one is killed.
"""

from __future__ import annotations

import ctypes
import io
import logging
import logging.handlers
import mmap
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith import concurrency
from monolith.data.source import Position, Stage, Stream, closed_after
from monolith.errors import DataError, MonolithError
from monolith.feature import Batch
from monolith.feature.batches import one_each_splits

_log = logging.getLogger(__name__)

_AHEAD = 3  # batches that are read and not asked for yet
_ALIGNED = 64  # bytes: tensors begin at multiples of this
_SPARE = 1.25  # memory is this much larger than its first batch, since batches differ a little in size
_LENGTH = struct.Struct("<Q")
_AT_ONCE = 1 << 16  # bytes of messages that are received
_PR_SET_PDEATHSIG = 1  # prctl(2)
_LOOK_EVERY = 0.1  # seconds between two answers to which part of the data is read
_PATIENCE = 1.0  # seconds that the process has to end by itself
_STUCK = 30.0  # seconds that a source has to answer before reading is stopped by ending the process


def may_fork() -> bool:
    """Whether this process may start one that reads: on Linux, as long as it has no other thread."""
    return hasattr(os, "memfd_create") and threading.active_count() == 1


_Standing = tuple[Position, dict[str, int], float | None]
"""After a batch: the position, counts of bad records, and which part of the data is read, now and then."""


class _GoneError(Exception):
    """The other process is gone."""


class _Channel:
    """Messages between the two processes: pickled values, and open files. Raises `_GoneError`."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._lock = concurrency.Lock()  # messages are sent whole; logs come from any thread
        self._received = bytearray()
        self.files: list[int] = []
        """All that were received, in the order in which they were sent."""

    def send(self, message: Any, files: Sequence[int] = ()) -> None:
        data = pickle.dumps(message)
        data = _LENGTH.pack(len(data)) + data
        try:
            with self._lock:
                sent = socket.send_fds(self._end, [data], list(files))
                self._end.sendall(memoryview(data)[sent:])
        except OSError as cause:
            raise _GoneError from cause

    def receive(self) -> Any:
        """Wait for a message."""
        while not self._has_whole():
            try:
                data, files, _, _ = socket.recv_fds(self._end, _AT_ONCE, 1)
            except OSError as cause:
                raise _GoneError from cause
            if not data:
                raise _GoneError
            self._received += data
            self.files += files
        (length,) = _LENGTH.unpack_from(self._received)
        end = _LENGTH.size + length
        # Only these two processes have an end of the socket pair, and one has forked the other.
        message = pickle.loads(memoryview(self._received)[_LENGTH.size : end])
        del self._received[:end]
        return message

    def has_message(self) -> bool:
        """Whether `receive` finds something, or raises, at once."""
        if self._has_whole():
            return True
        try:
            self._end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            pass  # `receive` says so
        return True

    def close(self) -> None:
        self._end.close()
        for file in self.files:
            os.close(file)
        self.files = []

    def _has_whole(self) -> bool:
        there = len(self._received) - _LENGTH.size
        return there >= 0 and there >= _LENGTH.unpack_from(self._received)[0]


# Batches as messages


class _Packer(pickle.Pickler):
    """Pickles a batch without its tensors, and says where each of those is to be."""

    def __init__(self, file: io.BytesIO, batch: Batch) -> None:
        super().__init__(file, protocol=5)
        self.arrays: list[tuple[int, NDArray[Any]]] = []
        self.end = 0
        ids = batch.ids
        plain = len(ids.splits) == len(ids.ids) + 1 and ids.splits is one_each_splits(len(ids.ids))
        self._plain_splits = ids.splits if plain else None

    def persistent_id(self, item: Any) -> tuple[Any, ...] | None:
        if not isinstance(item, Tensor):
            return None
        if item is self._plain_splits:
            return (len(item) - 1,)  # recognised by their identity, so they must be the same over there
        at, data = self.end, item.detach()
        no_array = data.dtype is torch.bfloat16  # numpy does not have it
        values = (data.view(torch.int16) if no_array else data).numpy()
        end = at + values.nbytes
        self.arrays.append((at, values))
        self.end = -(-end // _ALIGNED) * _ALIGNED
        return at, end, None if no_array else values.dtype, values.shape


class _Unpacker(pickle.Unpickler):
    def __init__(self, data: bytes, memory: NDArray[np.uint8]) -> None:
        super().__init__(io.BytesIO(data))
        self._memory = memory

    def persistent_load(self, about: Any) -> Tensor:
        if len(about) == 1:
            return one_each_splits(about[0])
        at, end, dtype, shape = about
        # Sliced as an array: to view a tensor hands the interpreter over. The tensor keeps the whole array,
        # whose end says that its memory is free.
        found = torch.from_numpy(self._memory[at:end].view(dtype or np.int16).reshape(shape))
        return found if dtype is not None else found.view(torch.bfloat16)


# The process that reads


class _Slots:
    """Pieces of shared memory, each for one batch at a time, as the reading process sees them."""

    def __init__(self) -> None:
        self._files: list[int] = []
        self._memory: list[NDArray[np.uint8]] = []
        self.free: list[int] = []

    def write(self, parts: Sequence[tuple[int, NDArray[Any]]], size: int) -> tuple[int, int, list[int]]:
        """Write arrays to a free slot; returns its number, its size, and its file if it is a new one."""
        new: list[int] = []
        if self.free:
            number = self.free.pop()
        else:
            number = len(self._files)
            self._files.append(os.memfd_create("monolith-batch"))
            self._memory.append(self._grown(number, size))
            new = self._files[number:]
        if self._memory[number].size < size:
            self._memory[number] = self._grown(number, size)
        memory = self._memory[number]
        for at, values in parts:
            memory[at : at + values.nbytes].view(values.dtype).reshape(values.shape)[...] = values
        return number, memory.size, new

    def _grown(self, number: int, size: int) -> NDArray[np.uint8]:
        room = max(int(size * _SPARE), mmap.PAGESIZE)
        os.ftruncate(self._files[number], room)
        return np.frombuffer(mmap.mmap(self._files[number], room), np.uint8)


class _Reader:
    """Reads as the training process asks, in the process that reads."""

    def __init__(self, channel: _Channel, opened: Callable[..., Stream[Batch]]) -> None:
        self._channel = channel
        self._open = opened
        self._slots = _Slots()
        self._unread = 0
        self._stopped = False
        self._look_again_at = 0.0

    def serve(self) -> None:
        """Do what messages ask for, until the training process is gone."""
        with suppress(_GoneError):
            while True:
                self._take_message()

    def _take_message(self) -> None:
        kind, *about = self._channel.receive()
        if kind == "read":
            self._read(*about)
        elif kind == "taken":
            self._unread -= 1
            self._slots.free += about[0]
        elif kind == "stop":
            self._slots.free += about[0]
            self._stopped = True

    def _read(self, number: int, given: tuple[Any, ...], columns: Sequence[str], at: Position | None) -> None:
        self._unread, self._stopped = 0, False
        try:
            with closing(self._open(*given)) as stream:
                if columns:
                    stream.keep_columns(columns)
                if at is not None:
                    stream.restore(at)
                with closed_after(stream) as batches:
                    for batch in batches:
                        while self._channel.has_message() or (self._unread >= _AHEAD and not self._stopped):
                            self._take_message()
                        if self._stopped:
                            break
                        self._send(number, batch, stream)
                self._channel.send(("end", number, None, *self._standing(stream, at_end=True)))
        except _GoneError:
            raise
        except Exception as cause:
            self._channel.send(("error", number, *_portable(cause)))

    def _send(self, number: int, batch: Batch, stream: Stream[Batch]) -> None:
        file = io.BytesIO()
        packer = _Packer(file, batch)
        packer.dump(batch)
        slot, size, new = self._slots.write(packer.arrays, packer.end)
        about = slot, size, packer.end, file.getvalue()
        self._channel.send(("batch", number, about, *self._standing(stream)), new)
        self._unread += 1

    def _standing(self, stream: Stream[Batch], *, at_end: bool = False) -> _Standing:
        """Return what the training process cannot ask its own stream, which is not read."""
        now, position = concurrency.monotonic(), stream.position()
        looks = at_end or now >= self._look_again_at
        if looks:
            self._look_again_at = now + _LOOK_EVERY
        return position, stream.bad_records(), stream.fraction_read(position) if looks else None


class _ForwardedLogs(logging.handlers.QueueHandler):
    """Sends log records to the training process, which writes them among its own."""

    def __init__(self, channel: _Channel) -> None:
        super().__init__(channel)  # type: ignore[arg-type]
        self._channel = channel

    def enqueue(self, record: logging.LogRecord) -> None:
        with suppress(_GoneError):
            self._channel.send(("log", record))


def _portable(error: Exception) -> tuple[type[Exception], tuple[Any, ...], dict[str, Any]]:
    """Return an error as a message: its class may want other arguments than it keeps."""
    if not isinstance(error, MonolithError):
        error.add_note("In the process that reads data:\n" + "".join(traceback.format_exception(error)))
    found = type(error), error.args, error.__dict__
    try:
        pickle.dumps(found)
    except Exception:
        return DataError, (f"reading failed: {type(error).__name__}: {error}",), {}
    return found


def _raised(kind: type[Exception], arguments: tuple[Any, ...], attributes: dict[str, Any]) -> Exception:
    error = kind.__new__(kind)
    error.args = arguments
    error.__dict__.update(attributes)
    return error


def _be_reader(channel: _Channel, opened: Callable[..., Stream[Batch]], parent: int) -> NoReturn:
    """Read until the training process ends: all that a fork does."""
    status = 1
    try:
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # It is the training process that decides when both end.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        logging.getLogger().handlers = [_ForwardedLogs(channel)]
        torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
        if os.getppid() == parent:
            _Reader(channel, opened).serve()
            status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)  # what the training process would do at its end is not this one's


# The process that trains


class ReadingProcess:
    """A process of this one's that reads batches. Used by one thread at a time.

    Args:
        opened: Opens the data: called there with the arguments of `open`, which can be pickled.

    Examples:
        >>> from monolith.data import MemorySource, Pipeline
        >>> from monolith.data.reading_process import ReadingProcess
        >>> from monolith.feature import FeatureSpec, IdFeature
        >>> spec = FeatureSpec(features={"user": IdFeature()}, labels={})
        >>> def opened(size):
        ...     return Pipeline(MemorySource({"user": [17, 18, 19]}, batch_size=size)).to_batches(spec)
        >>> with ReadingProcess(opened) as process:  # as soon as the program starts: see `may_fork`
        ...     [batch.ids.ids.tolist() for batch in process.open(2)]
        [[17, 18], [19]]
    """

    def __init__(self, opened: Callable[..., Stream[Batch]]) -> None:
        self._open = opened
        mine, other = socket.socketpair()
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if not self._pid:
            mine.close()
            _be_reader(_Channel(other), opened, parent)
        other.close()
        self._channel = _Channel(mine)
        self._closed = False
        self._turn = concurrency.Lock()  # held by the thread that receives
        self._number = 0
        self._memory: list[mmap.mmap] = []
        self._freed: deque[int] = deque()
        """Slots that no tensor uses any more; put here by any thread."""

    def open(self, *given: Any) -> Stream[Batch]:
        """Return a stream whose batches the other process reads. One of them is read at a time.

        A stream of live events, or of work that is dealt out while it is read, is read here.
        """
        source = self._open(*given)
        if source.live is not False or source.work_queue is not None:
            _log.warning("the data is read by threads of this process: it is live, or from a queue")
            return source
        return _ReadElsewhere(self, source, given)

    def close(self) -> None:
        """End the process. Closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._channel.close()
        deadline = concurrency.monotonic() + _PATIENCE
        while os.waitpid(self._pid, os.WNOHANG) == (0, 0):
            if concurrency.monotonic() > deadline:  # it waits for its source
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                return
            concurrency.sleep(0.001)

    def __enter__(self) -> ReadingProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, given: tuple[Any, ...], columns: Sequence[str], at: Position | None) -> int:
        """Have the process read from a position; returns the number of this reading."""
        self._number += 1
        self._send("read", self._number, given, tuple(columns), at)
        return self._number

    def next(self, number: int) -> tuple[Batch | None, _Standing]:
        """Return the next batch, and what holds after it; None at the end.

        Raises:
            Exception: What reading raised there.
            DataError: The process has ended.
        """
        with self._turn:
            return self._next(number)

    def _next(self, number: int) -> tuple[Batch | None, _Standing]:
        while True:
            kind, *about = self._receive()
            if kind == "log":
                self._write(about[0])
                continue
            if kind == "batch":
                slot, size, used, data = about[1]
                batch = self._batch(slot, size, used, data)
                if about[0] == number:
                    self._send("taken", self._take_freed())
                    return batch, (about[2], about[3], about[4])
            elif about[0] == number:
                if kind == "error":
                    raise _raised(*about[1:])
                return None, (about[2], about[3], about[4])

    def stop(self, number: int) -> None:
        """Have the process read no more, and drop what it has read. If another thread still waits for its
        source, the process is ended, and so is that wait."""
        if not self._turn.acquire(timeout=_STUCK):
            _log.warning("the source of the data does not answer; the process that reads it is ended")
            self.close()
            return
        try:
            with suppress(Exception):  # an error of a reading that is over is none
                self._send("stop", self._take_freed())
                while self._next(number)[0] is not None:
                    pass
        finally:
            self._turn.release()

    def _take_freed(self) -> list[int]:
        return [self._freed.popleft() for _ in range(len(self._freed))]

    def _batch(self, slot: int, size: int, used: int, data: bytes) -> Batch:
        if slot == len(self._memory):  # a new one: they are numbered in the order of their first use
            self._memory.append(mmap.mmap(self._channel.files[slot], size))
        elif len(self._memory[slot]) < size:
            self._memory[slot] = mmap.mmap(self._channel.files[slot], size)
        memory = np.frombuffer(self._memory[slot], np.uint8, used)
        freed = weakref.finalize(memory, self._freed.append, slot)
        freed.atexit = False
        batch = _Unpacker(data, memory).load()
        assert isinstance(batch, Batch)
        return batch

    @staticmethod
    def _write(record: logging.LogRecord) -> None:
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)

    def _send(self, *message: Any) -> None:
        try:
            self._channel.send(message)
        except _GoneError as cause:
            raise self._ended() from cause

    def _receive(self) -> Any:
        try:
            return self._channel.receive()
        except _GoneError as cause:
            raise self._ended() from cause

    def _ended(self) -> DataError:
        how = "was closed"
        if not self._closed:
            self._closed = True
            _, status = os.waitpid(self._pid, 0)
            code = os.waitstatus_to_exitcode(status)
            how = f"ended with status {code}" if code >= 0 else f"was killed by signal {-code}"
            self._channel.close()
        return DataError(
            f"the process that reads the data {how}. If the machine has no memory left for it, lower "
            "data.threads, or set train.reading_process to false; the same command resumes the run"
        )


class _ReadElsewhere(Stage[Batch, Batch]):
    """The stream of a reading process; its upstream is the same stream in this process, which is not read."""

    def __init__(self, process: ReadingProcess, source: Stream[Batch], given: tuple[Any, ...]) -> None:
        super().__init__(source)
        self._process = process
        self._given = given
        self._columns: tuple[str, ...] = ()
        self._position: Position | None = None  # None: that of the source
        self._moved = False
        self._bad: dict[str, int] = {}
        self._fraction: float | None = None
        self._reading: int | None = None

    def __iter__(self) -> Iterator[Batch]:
        self._stop()
        at = self.position() if self._moved else None
        self._position, self._moved = self.position(), True
        number = self._reading = self._process.begin(self._given, self._columns, at)
        while True:
            try:
                batch, (self._position, self._bad, fraction) = self._process.next(number)
            except BaseException:
                self._reading = None
                raise
            if fraction is not None:
                self._fraction = fraction
            if batch is None:
                break
            yield batch
            if self._reading != number:
                raise DataError("pipeline: restored or closed while it was being read")
        self._reading = None

    def position(self) -> Position:
        return super().position() if self._position is None else self._position

    def restore(self, position: Position) -> None:
        self._stop()
        super().restore(position)
        self._position, self._fraction, self._moved = None, None, True

    def redistribute(self, positions: Sequence[Position], workers: int) -> list[Position]:
        self._stop()
        return super().redistribute(positions, workers)

    def keep_columns(self, names: Sequence[str]) -> bool:
        self._columns = tuple(names)
        return super().keep_columns(names)

    def bad_records(self) -> dict[str, int]:
        return self._bad

    def fraction_read(self, position: Position, records: int = 0) -> float | None:
        return super().fraction_read(position, records) if self._fraction is None else self._fraction

    def close(self) -> None:
        self._stop()
        super().close()

    def _stop(self) -> None:
        number, self._reading = self._reading, None
        if number is not None:
            self._process.stop(number)
