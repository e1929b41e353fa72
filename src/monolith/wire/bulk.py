"""Bulk messages: bytes that Flight sends and receives without a copy, and a count of them.

pyarrow copies neither sent nor received bytes if they are declared as a column of a record batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from monolith import concurrency
from monolith.errors import RequestError

Bytes = NDArray[np.uint8]
"""Received bytes that the receiver may keep and write to. The address is a multiple of 8."""

_ALIGNMENT = 8
PADDING = b" "
"""Appended to a header to align the bytes after it: JSON ignores it, and other headers contain their size."""
_LARGE = 32 << 10
"""Messages of at least this many bytes are aligned: below it, a copy is cheaper than the padding."""


class BulkMessages:
    """Turns bytes into what Flight carries, a batch of one column with a header as its metadata, and back."""

    def __init__(self, arrow: Any) -> None:
        self._arrow = arrow
        self._byte = arrow.uint8()
        self.schema = arrow.schema([("bytes", self._byte)])

    def batch(self, data: Any) -> Any:
        """Return bytes as a batch, without a copy."""
        buffer = self._arrow.py_buffer(data)
        column = self._arrow.Array.from_buffers(self._byte, buffer.size, [None, buffer])
        return self._arrow.RecordBatch.from_arrays([column], schema=self.schema)

    def padded(self, header: bytes, size: int) -> bytes:
        """Return a header with up to 7 bytes of padding, so that the `size` bytes after it arrive aligned."""
        if size < _LARGE:
            return header
        # The receiver keeps a large message in memory as it arrived, in its protobuf encoding: the bytes
        # follow the header and the two lengths. `take` makes a copy if that layout ever changes.
        padded = -(-size // _ALIGNMENT) * _ALIGNMENT
        before = len(header) + _varint(len(header)) + _varint(padded) - 2
        return header + PADDING * (-before % _ALIGNMENT)

    def take(self, chunk: Any) -> tuple[bytes, Bytes]:
        """Return the header and the bytes of a message; without a copy if they are aligned.

        Raises:
            RequestError: It is another kind of message.
        """
        batch, metadata = chunk.data, chunk.app_metadata  # pyarrow makes new objects for each access
        if batch is None or metadata is None or batch.schema != self.schema:
            raise RequestError("a message must be a header and one column of bytes")
        header: bytes = metadata.to_pybytes()
        buffer = batch.column(0).buffers()[1]
        if buffer is None or buffer.size == 0:
            return header, np.empty(0, np.uint8)
        data = np.asarray(_WritableBuffer(buffer))
        if buffer.address % _ALIGNMENT:
            data = data.copy()
        return header, data


def _varint(number: int) -> int:
    """Return how many bytes a number takes in protobuf."""
    return max(-(-number.bit_length() // 7), 1)


class _WritableBuffer:
    """Memory of a received message as numpy sees it: writable, since no other code has a reference to it."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer  # keeps the memory alive for as long as the array
        self.__array_interface__ = {
            "data": (buffer.address, False),
            "shape": (buffer.size,),
            "typestr": "|u1",
            "version": 3,
        }


class Traffic(NamedTuple):
    """Bytes of messages, without the overhead of Flight and the network."""

    received: int = 0
    sent: int = 0


class TrafficMeter:
    """Counts the bytes of all connections of a server, or of a group of callers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = concurrency.Lock()  # guards the counts
        self._received = self._sent = 0

    def count(self, *, received: int = 0, sent: int = 0) -> None:
        with self._lock:
            self._received += received
            self._sent += sent

    def total(self) -> Traffic:
        with self._lock:
            return Traffic(self._received, self._sent)
