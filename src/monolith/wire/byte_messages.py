"""Bytes in Flight messages: written once, and read where they came.

pyarrow copies neither what is sent nor what is received, if it is told that bytes are a column.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from monolith.errors import RequestError

Bytes = NDArray[np.uint8]
"""Bytes that one side sent and the other may keep: nobody else writes to them. Aligned to 8."""

_ALIGNMENT = 8
PADDING = b" "
"""At the end of a header: JSON does not mind it, and other headers know their size."""
_LARGE = 32 << 10
"""Bytes from which on a copy costs more than it takes to avoid it."""


class ByteMessages:
    """Bytes as Flight carries them: a batch of one column, and a header beside it."""

    def __init__(self, arrow: Any) -> None:
        self._arrow = arrow
        self._byte = arrow.uint8()
        self.schema = arrow.schema([("bytes", self._byte)])

    def batch(self, data: Any) -> Any:
        """Return bytes as a batch, without a copy."""
        held = self._arrow.py_buffer(data)
        column = self._arrow.Array.from_buffers(self._byte, held.size, [None, held])
        return self._arrow.RecordBatch.from_arrays([column], schema=self.schema)

    def padded(self, header: bytes, size: int) -> bytes:
        """Return a header with fewer than 8 bytes of padding, so that so many bytes come aligned.

        A large message lies in memory as it came, protobuf around it, and its bytes follow the header and
        the lengths of both. Where that does not hold, whoever takes them makes a copy.
        """
        if size < _LARGE:
            return header
        padded = -(-size // _ALIGNMENT) * _ALIGNMENT
        before = len(header) + _varint(len(header)) + _varint(padded) - 2
        return header + PADDING * (-before % _ALIGNMENT)

    def take(self, chunk: Any) -> tuple[bytes, Bytes]:
        """Return the header and the bytes of a message; without a copy where they are aligned.

        Raises:
            RequestError: It is another kind of message.
        """
        if chunk.data is None or chunk.app_metadata is None or chunk.data.schema != self.schema:
            raise RequestError("a message must be a header and one column of bytes")
        held = chunk.data.column(0).buffers()[1]
        if held is None or held.size == 0:
            return chunk.app_metadata.to_pybytes(), np.empty(0, np.uint8)
        data = np.asarray(_Received(held))
        if held.address % _ALIGNMENT:
            data = data.copy()
        return chunk.app_metadata.to_pybytes(), data


def _varint(number: int) -> int:
    """Return how many bytes a number takes in protobuf."""
    return max(-(-number.bit_length() // 7), 1)


class _Received:
    """Memory of a message, for numpy to write to as well: it came over the wire, so it is nobody else's."""

    def __init__(self, held: Any) -> None:
        self._held = held
        self.__array_interface__ = {
            "data": (held.address, False),
            "shape": (held.size,),
            "typestr": "|u1",
            "version": 3,
        }
