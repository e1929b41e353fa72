"""TFRecord files of examples, as TensorFlow writes them with checksums; and Monolith's framed files.

    TfRecordFormat("tf_example").chunks("clicks.tfrecord.gz", columns=["user", "item", "label"])

A framed file has a header, a length in eight bytes and a payload, without a checksum. The file does not say
which header it has, so the reader must know. Read with the wrong one, it ends in a length that makes no
sense, mostly at its beginning: CorruptFileError."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from monolith import filesystem, native
from monolith.data.format import Chunk, RecordWriter
from monolith.data.formats.compressed import AUTO, check_compression, compression_of
from monolith.data.formats.payloads import (
    CHUNK_BYTES,
    DATA_SOURCE_KEY,
    RECORD_BYTES,
    ParsedPayloads,
    PayloadParser,
    PayloadWriter,
    check_record_bytes,
    example_kind,
    open_writer,
    read_chunks,
    stream_bounds,
)
from monolith.data.records import Records
from monolith.errors import ConfigError, DataError
from monolith.tensors import RaggedTensor

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


_SOURCE_BITS = 0xFFFFFF00
"""Of a tag: the low byte is the kind of the payload, the 24 bits above it are the key of its source."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Framing:
    """The header before the length of each payload."""

    lagrangex: bool = False
    """One number, with the payload's kind and the key of its source in it. Excludes the others."""
    kafka_dump_prefix: bool = False
    """A number: 0, and then one more, or else the size of the sort id."""
    sort_id: bool = False
    """The size of the sort id, unless the prefix was it, and the sort id."""
    kafka_dump: bool = False
    """A number."""
    payload_kind: int = 0
    """With `lagrangex`: the low byte to write. Reading does not look at it."""

    def __post_init__(self) -> None:
        if self.lagrangex and (self.kafka_dump_prefix or self.sort_id or self.kafka_dump):
            raise ConfigError("framing: with lagrangex there is no other header")
        if not 0 <= self.payload_kind < 256:
            raise ConfigError(f"framing: payload_kind must be from 0 to 255, got {self.payload_kind}")


class FramedFormat:
    """Framed files of one kind of example (see `formats.examples`).

    With `lagrangex` framing the key of each payload's source is the column `data_source_key`, whatever
    the payload itself says. Places are bytes: see `formats.streams`.

    Args:
        compression: None, "gzip" or "zlib" ("zstd" where that package is installed); "auto" is what the
            name ends in, .gz for example. There is no telling from the first bytes of such a file.
        ids: See `PayloadWriter`.
        chunk_bytes: About how much of a file is read and parsed at a time.
        record_bytes: The most that one record may have. A longer one ends the file as a damaged one does.
    """

    def __init__(
        self,
        kind: str = "example",
        *,
        framing: Framing | None = None,
        compression: str | None = AUTO,
        ids: Collection[str] | None = None,
        workers: native.Workers | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        record_bytes: int = RECORD_BYTES,
    ) -> None:
        example_kind(kind)
        self.name = f"framed_{kind}"
        self._kind = kind
        self._framing = framing or Framing()
        self._header = native.FrameHeader(
            tag=self._framing.lagrangex,
            kafka_dump_prefix=self._framing.kafka_dump_prefix,
            sort_id=self._framing.sort_id,
            kafka_dump=self._framing.kafka_dump,
        )
        self._compression = check_compression(compression)
        self._ids = ids
        self._workers = workers
        self._chunk_bytes = chunk_bytes
        self._record_bytes = check_record_bytes(record_bytes)

    def chunks(self, path: str, *, start: int = 0, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        compression = compression_of(path) if self._compression == AUTO else self._compression
        parser = PayloadParser(self._kind, columns=columns, workers=self._workers)
        lifts = self._framing.lagrangex and (columns is None or DATA_SOURCE_KEY in columns)
        yield from read_chunks(
            path,
            self._split,
            parser,
            start=start,
            compression=compression,
            chunk_bytes=self._chunk_bytes,
            record_bytes=self._record_bytes,
            amend=_with_source if lifts else None,
        )

    def in_pieces(self, piece_bytes: int) -> FramedFormat:
        """Return the same with smaller chunks; see `SplittableFormat`."""
        other = copy.copy(self)
        other._chunk_bytes = min(piece_bytes, self._chunk_bytes)
        return other

    def bounds(self, path: str) -> list[int] | None:
        """Return the bytes at which chunks begin; see `SplittableFormat`."""
        compression = compression_of(path) if self._compression == AUTO else self._compression
        return stream_bounds(
            path,
            self._split,
            compression=compression,
            chunk_bytes=self._chunk_bytes,
            record_bytes=self._record_bytes,
        )

    def writer(self, path: str) -> AbstractContextManager[RecordWriter]:
        writer = PayloadWriter(self._kind, ids=self._ids, workers=self._workers)
        return open_writer(path, self._compression, self._seal, writer)

    def _split(self, buffer: bytes) -> native.SplitStream:
        return native.split_frames(buffer, self._header)

    def _seal(self, records: Records, data: bytes, splits: NDArray[np.int64]) -> bytes:
        tags = np.empty(0, dtype=np.int64)
        if self._framing.lagrangex:
            keys = np.zeros(len(splits) - 1, dtype=np.int64)
            if DATA_SOURCE_KEY in records.columns:
                column = records[DATA_SOURCE_KEY].to_padded(1).squeeze(1).numpy()[: len(keys)]
                keys[: len(column)] = column  # one for a batch, which is of one source
            if np.any(keys & 0xFF):
                raise DataError(
                    f"framed: the low byte of {DATA_SOURCE_KEY} is the payload's kind; it must be 0"
                )
            tags = keys | self._framing.payload_kind
        return native.seal_frames(data, splits, self._header, tags)


def _with_source(parsed: ParsedPayloads, tags: NDArray[np.int64]) -> Records:
    """Return the records with the source that the frames name."""
    records = parsed.records
    keys = torch.from_numpy(tags & _SOURCE_BITS)
    if parsed.bad:
        kept = torch.ones(len(keys), dtype=torch.bool)
        kept[[index - parsed.first for index, _ in parsed.bad]] = False
        keys = keys[kept]
    if len(keys) == 1:
        keys = keys.expand(records.size)  # of a batch all records
    column = RaggedTensor(keys.contiguous(), torch.arange(records.size + 1), validate=False)
    return records.with_columns({DATA_SOURCE_KEY: column})
