"""TFRecord files of examples: what TensorFlow writes, with its checksums.

TfRecordFormat("tf_example").chunks("clicks.tfrecord.gz", columns=["user", "item", "label"])
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray

from monolith import filesystem, native
from monolith.data.format import Chunk, RecordWriter
from monolith.data.formats.compressed import AUTO, check_compression
from monolith.data.formats.examples import PayloadParser, PayloadWriter, example_kind
from monolith.data.formats.streams import (
    CHUNK_BYTES,
    RECORD_BYTES,
    check_record_bytes,
    open_writer,
    read_chunks,
    stream_bounds,
)
from monolith.data.records import Records

_HEADER_BYTES = 12


class TfRecordFormat:
    """TFRecord files of one kind of example (see `formats.examples`).

    A record whose payload is no such example is in `Chunk.bad`; a wrong checksum means that the file
    itself is damaged, and nothing after it is to be believed. Places are bytes: see `formats.streams`.

    Args:
        compression: None, "gzip" or "zlib" ("zstd" where that package is installed); "auto" reads what is
            there, and writes what the name ends in, .gz for example.
        ids: See `PayloadWriter`.
        chunk_bytes: About how much of a file is read and parsed at a time.
        record_bytes: The most that one record may have. A longer one ends the file as a damaged one does.
    """

    def __init__(
        self,
        kind: str = "tf_example",
        *,
        compression: str | None = AUTO,
        ids: Collection[str] | None = None,
        workers: native.Workers | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        record_bytes: int = RECORD_BYTES,
    ) -> None:
        example_kind(kind)
        self.name = kind
        self._compression = check_compression(compression)
        self._ids = ids
        self._workers = workers
        self._chunk_bytes = chunk_bytes
        self._record_bytes = check_record_bytes(record_bytes)

    def chunks(self, path: str, *, start: int = 0, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        compression = _compression_in(path) if self._compression == AUTO else self._compression
        parser = PayloadParser(self.name, columns=columns, workers=self._workers)
        yield from read_chunks(
            path,
            native.split_tfrecords,
            parser,
            start=start,
            compression=compression,
            chunk_bytes=self._chunk_bytes,
            record_bytes=self._record_bytes,
            announced=_announced,
        )

    def in_pieces(self, piece_bytes: int) -> TfRecordFormat:
        """Return the same with smaller chunks; see `SplittableFormat`."""
        other = copy.copy(self)
        other._chunk_bytes = min(piece_bytes, self._chunk_bytes)
        return other

    def bounds(self, path: str) -> list[int] | None:
        """Return the bytes at which chunks begin; see `SplittableFormat`."""
        compression = _compression_in(path) if self._compression == AUTO else self._compression
        return stream_bounds(
            path,
            native.split_tfrecords,
            compression=compression,
            chunk_bytes=self._chunk_bytes,
            record_bytes=self._record_bytes,
            announced=_announced,
        )

    def writer(self, path: str) -> AbstractContextManager[RecordWriter]:
        writer = PayloadWriter(self.name, ids=self._ids, workers=self._workers)
        return open_writer(path, self._compression, _seal, writer)


def _seal(records: Records, data: bytes, splits: NDArray[np.int64]) -> bytes:  # noqa: ARG001  frames use it
    return native.seal_tfrecords(data, splits)


def _announced(record: bytes) -> int:
    """Return how long a record says that it is. The checksum of its length was right."""
    if len(record) < _HEADER_BYTES:
        return 0
    return int.from_bytes(record[:8], "little") + _HEADER_BYTES + 4


def _compression_in(path: str) -> str | None:
    """Return what a file is compressed with. Its first bytes tell; its name may be anything."""
    with filesystem.open_read(path) as file:
        head = file.read(_HEADER_BYTES)
    if len(head) == _HEADER_BYTES and native.masked_crc32c(head[:8]) == int.from_bytes(head[8:], "little"):
        return None  # a length and its checksum: no compressed stream begins like that by chance
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        return "zstd"
    if len(head) > 1 and head[0] == 0x78 and int.from_bytes(head[:2], "big") % 31 == 0:
        return "zlib"
    return None
