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
