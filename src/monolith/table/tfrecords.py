"""TFRecord framing for upstream's files: a length, its checksum, a payload, its checksum.

For files of few, long records. Where there are millions, as in entry dumps, the
native codec frames and reads them itself.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO

from monolith import native
from monolith.errors import CorruptFileError

_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_CHUNK_BYTES = 4 << 20


def tfrecord(payload: bytes) -> bytes:
    """Return a payload framed as one record."""
    length = _LENGTH.pack(len(payload))
    return b"".join(
        (
            length,
            _CRC.pack(native.masked_crc32c(length)),
            payload,
            _CRC.pack(native.masked_crc32c(payload)),
        )
    )


def records(file: BinaryIO, path: str) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, payload) of each record in an open file.

    Raises:
        CorruptFileError: A checksum is wrong, or the file ends inside a record.
    """
    at = 0
    while header := _upto(file, _LENGTH.size + _CRC.size):
        if len(header) < _LENGTH.size + _CRC.size:
            raise CorruptFileError(path, at, "the file ends inside the header of a record")
        if native.masked_crc32c(header[: _LENGTH.size]) != _CRC.unpack_from(header, _LENGTH.size)[0]:
            raise CorruptFileError(path, at, "bad length checksum")
        (length,) = _LENGTH.unpack_from(header)
        # Read in chunks: even a length with a good checksum may promise more than the file has.
        body = _upto(file, length + _CRC.size)
        if len(body) < length + _CRC.size:
            raise CorruptFileError(path, at, f"the file ends inside a record of {length} bytes")
        payload = body[:length]
        if native.masked_crc32c(payload) != _CRC.unpack_from(body, length)[0]:
            raise CorruptFileError(path, at, "bad data checksum")
        yield at, payload
        at += len(header) + len(body)


def _upto(file: BinaryIO, size: int) -> bytes:
    """Read `size` bytes, or what is left of the file."""
    pieces: list[bytes] = []
    while size and (piece := file.read(min(size, _CHUNK_BYTES))):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)
