"""Example messages: payloads to records and back, and files of one payload after another.

Four kinds of messages carry examples:

    tf_example     TensorFlow's Example: one record, features by name
    example        Monolith's Example: the same, plus labels, weight and LineId
    instance       Monolith's Instance: ids of version 1 by slot, and features by name
    example_batch  Monolith's ExampleBatch: many records by column; shared features stay shared

The native core converts them from and to columns; `native/src/example_parser.h` lists every conversion. In
short: ids of version 1 become version 2, slot n of an Instance becomes the column `fc_slot_<n>`, doubles
become floats, lists of lists are concatenated, and LineId becomes `line_id.<field>`. A field that a LineId
does not have is an empty row, also `sample_rate`, which Monolith reads as 1.

TFRecord files and Monolith's framed files differ only in how a payload is wrapped (`tfrecord`). A place in
such a file is a byte of the stream: of the file itself, or decompressed. Resuming at a place of
a compressed file reads the file from its beginning.
"""

from __future__ import annotations

import contextlib
import copy
from abc import abstractmethod
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import BinaryIO, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from monolith import filesystem, native
from monolith.data.format import BadRecord, Chunk, Format, Part, RecordWriter
from monolith.data.formats.compressed import (
    AUTO,
    Decompressing,
    StreamCompressor,
    check_compression,
    compression_of,
    compressor_of,
)
from monolith.data.records import Records, column_from_arrays, concat
from monolith.errors import ConfigError, CorruptFileError, DataError
from monolith.tensors import RaggedTensor

KINDS = {
    "tf_example": native.ExampleKind.TF_EXAMPLE,
    "example": native.ExampleKind.EXAMPLE,
    "instance": native.ExampleKind.INSTANCE,
    "example_batch": native.ExampleKind.EXAMPLE_BATCH,
}

DATA_SOURCE_KEY = "data_source_key"
"""The column of the number that says which flow a record came by."""

_IDS = "fc_"
"""What Monolith begins the names of its columns of ids with."""


@dataclass(frozen=True, slots=True)
class ParsedPayloads:
    """The records of consecutive payloads."""

    first: int
    """The position of the first of them."""
    count: int
    records: Records
    bad: Sequence[tuple[int, str]]
    """(position, reason) of those that could not be read, in order."""


class PayloadParser:
    """Reads payloads of one kind. Safe from any thread. Called with a list of payloads, it decodes for Kafka.

    Args:
        columns: To read; None for all. Other columns are skipped without parsing.
        workers: Threads that parse; the result is the same without.
    """

    def __init__(
        self, kind: str, *, columns: Sequence[str] | None = None, workers: native.Workers | None = None
    ) -> None:
        self._kind = example_kind(kind)
        names = None if columns is None else list(columns)
        self._parser = native.ExampleParser(self._kind, names, workers)

    def parse(
        self, buffer: bytes, offsets: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> list[ParsedPayloads]:
        """Read the payloads at these places of a buffer.

        Returns:
            One answer for all payloads; where each payload is a batch, one for each, since batches need
            not have the same shared values, or even the same columns.

        Raises:
            DataError: Columns times records are more than can be laid out.
        """
        if self._kind is native.ExampleKind.EXAMPLE_BATCH:
            return [
                ParsedPayloads(first, 1, _records(one), [(first, reason) for _, reason in one.bad])
                for first, one in enumerate(self._parser.parse_batches(buffer, offsets, lengths))
            ]
        try:
            parsed = self._parser.parse(buffer, offsets, lengths)
        except ValueError as cause:
            raise DataError(f"cannot read {len(offsets)} payloads: {cause}") from cause
        return [ParsedPayloads(0, len(offsets), _records(parsed), parsed.bad)]

    def __call__(self, payloads: list[bytes], /) -> tuple[Records, Sequence[BadRecord]]:
        """Return the records in order, and what could not be read: `place` is the position in `payloads`."""
        lengths = np.fromiter(map(len, payloads), np.int64, len(payloads))
        parts: list[Records] = []
        bad: list[BadRecord] = []
        dtypes: dict[str, torch.dtype] = {}
        for parsed in self.parse(b"".join(payloads), np.cumsum(lengths) - lengths, lengths):
            bad += [BadRecord(index, reason, payloads[index]) for index, reason in parsed.bad]
            found = {name: column.dtype for name, column in parsed.records.columns.items()}
            if wrong := [name for name, dtype in found.items() if dtypes.get(name, dtype) is not dtype]:
                # Only a batch can be: other kinds were parsed together.
                reason = f"wrong type: column {wrong[0]!r} is another in the batches before"
                bad.append(BadRecord(parsed.first, reason, payloads[parsed.first]))
            else:
                dtypes |= found
                parts.append(parsed.records)
        return concat(parts) if parts else Records(0, {}), bad


class PayloadWriter:
    """Writes records as payloads of one kind: one each, or one batch for all. Safe from any thread.

    A record without values in a column has nothing of it in its payload. Labels, weight, LineId and
    `data_source_key` go where the message has fields for them, except in a tf_example, which has none.
    Ids are written as version 2 throughout, an Instance's too.

    Args:
        ids: The int64 columns that hold ids, for the messages that tell ids from integers; by default
            those named fc_ and on, as Monolith names them. Reading makes no difference between the two.
    """

    def __init__(
        self, kind: str, *, ids: Collection[str] | None = None, workers: native.Workers | None = None
    ) -> None:
        self._kind = example_kind(kind)
        self._ids = None if ids is None else frozenset(ids)
        self._workers = workers

    def encode(self, records: Records) -> tuple[bytes, NDArray[np.int64]]:
        """Return payloads end to end, and where each begins, with the end behind the last.

        Raises:
            DataError: A column has another type than the field of the message.
        """
        columns = []
        for name, column in records.columns.items():
            inner = column.values
            strings = inner.row_splits.contiguous().numpy() if isinstance(inner, RaggedTensor) else None
            ids = name.startswith(_IDS) if self._ids is None else name in self._ids
            values, splits = (part.contiguous().numpy() for part in (column.flat_values, column.row_splits))
            columns.append((name, name in records.shared, ids, values, splits, strings))
        try:
            return native.encode_examples(self._kind, records.size, columns, self._workers)
        except ValueError as cause:
            raise DataError(f"cannot write {len(records)} records: {cause}") from cause

    def __call__(self, records: Records) -> list[bytes]:
        """Return the payloads."""
        data, splits = self.encode(records)
        return [data[begin:end] for begin, end in pairwise(splits.tolist())]


def example_kind(kind: str) -> native.ExampleKind:
    """Return the kind of that name."""
    if kind not in KINDS:
        raise ConfigError(f"unknown kind of example {kind!r}; there are {', '.join(KINDS)}")
    return KINDS[kind]


def _records(parsed: native.ParsedExamples) -> Records:
    columns: dict[str, RaggedTensor] = {}
    shared = set()
    for name, is_shared, flat, splits, inner in parsed.take_columns():
        columns[name] = column_from_arrays(flat, splits, inner)
        if is_shared:
            shared.add(name)
    return Records(parsed.records, columns, frozenset(shared))


CHUNK_BYTES = 4 << 20
RECORD_BYTES = 256 << 20
"""The default limit on the bytes of one record, header included."""
_SKIP_BYTES = 1 << 20


class PayloadFormat(Format):
    """Files of one payload after another, all of one kind of example.

    A subclass says how payloads are wrapped (`_split`, `_seal`) and how a file is compressed. A record whose
    payload is no such example is in `Chunk.bad`.

    Args:
        kind: A name of `KINDS`.
        compression: None, "gzip" or "zlib" ("zstd" if that package is installed), or "auto".
        ids: See `PayloadWriter`.
        chunk_bytes: About how much of a file is read and parsed at a time.
        record_bytes: The most that one record may have. A longer one ends the file as a damaged one does.
    """

    def __init__(
        self,
        kind: str,
        *,
        compression: str | None = AUTO,
        ids: Collection[str] | None = None,
        workers: native.Workers | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        record_bytes: int = RECORD_BYTES,
    ) -> None:
        example_kind(kind)
        if record_bytes < 1:
            raise ConfigError(f"record_bytes must be at least 1, got {record_bytes}")
        self._kind = kind
        self._compression = check_compression(compression)
        self._ids = ids
        self._workers = workers
        self._chunk_bytes = chunk_bytes
        self._record_bytes = record_bytes

    # How payloads are wrapped

    @abstractmethod
    def _split(self, buffer: bytes) -> native.SplitStream:
        """Find the payloads in some bytes, which begin with a record."""

    @abstractmethod
    def _seal(self, records: Records, data: bytes, splits: NDArray[np.int64]) -> bytes:
        """Return payloads, given end to end with where each begins, as a stream of records."""

    def _announced(self, record: bytes) -> int:
        """Return how many bytes a record says that it has, given its beginning; 0 if it does not say yet.

        Tells that a record is too long before all of it is read.
        """
        del record
        return 0

    def _amend(
        self, parsed: ParsedPayloads, headers: NDArray[np.int64], columns: Sequence[str] | None
    ) -> Records:
        """Return the records of payloads, with anything that the headers of their frames add."""
        del headers, columns
        return parsed.records

    def _detect_compression(self, path: str) -> str | None:
        """Return how a file is compressed if `compression` is "auto"."""
        return compression_of(path)

    # Reading and writing

    def chunks(self, path: str, *, start: int = 0, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        for parse in self.parts(path, start=start, columns=columns):
            yield from parse()

    def parts(self, path: str, *, start: int = 0, columns: Sequence[str] | None = None) -> Iterator[Part]:
        compression = self._compression_in(path)
        parser = PayloadParser(self._kind, columns=columns, workers=self._workers)
        with contextlib.closing(self._buffers(path, start, compression)) as buffers:
            for buffer in buffers:
                yield partial(self._parse, parser, columns, buffer, is_compressed=compression is not None)

    def _parse(
        self, parser: PayloadParser, columns: Sequence[str] | None, part: _Buffer, *, is_compressed: bool
    ) -> list[Chunk]:
        at, buffer, found = part.at, part.bytes, part.found
        starts = np.append(found.starts, found.consumed)
        chunks = []
        for parsed in parser.parse(buffer, found.offsets, found.lengths):
            last = parsed.first + parsed.count
            bad = []
            for index, reason in parsed.bad:
                place, begin = at + int(starts[index]), int(found.offsets[index])
                payload = buffer[begin : begin + int(found.lengths[index])]
                bad.append(BadRecord(place, f"record at byte {place}: {reason}", payload))
            end = int(starts[last])
            # A place in a compressed file is one in the decompressed stream; how much of the file itself was
            # read by then is interpolated.
            read = part.reached - part.taken
            on_disk = part.taken + round(end / len(buffer) * read) if is_compressed else at + end
            records = self._amend(parsed, found.headers[parsed.first : last], columns)
            chunks.append(Chunk(records, at + end, bad, on_disk))
        return chunks

    def in_pieces(self, piece_bytes: int) -> Self:
        other = copy.copy(self)
        other._chunk_bytes = min(piece_bytes, self._chunk_bytes)
        return other

    def bounds(self, path: str) -> list[int] | None:
        """Return the bytes at which chunks begin, without parsing the payloads; see `Format`."""
        if self._compression_in(path) is not None:
            return None
        found = [one.at + one.found.consumed for one in self._buffers(path, 0, None)]
        return [0, *found] if found else []

    @contextlib.contextmanager
    def writer(self, path: str) -> Iterator[RecordWriter]:
        compression = compression_of(path) if self._compression == AUTO else self._compression
        compressor = compressor_of(compression)
        encoder = PayloadWriter(self._kind, ids=self._ids, workers=self._workers)
        with filesystem.atomic_write(path) as file:
            yield _StreamWriter(
                file, compressor, lambda records: self._seal(records, *encoder.encode(records))
            )
            if compressor is not None:
                file.write(compressor.flush())

    def _compression_in(self, path: str) -> str | None:
        return self._detect_compression(path) if self._compression == AUTO else self._compression

    def _buffers(self, path: str, start: int, compression: str | None) -> Generator[_Buffer, None, None]:
        """Yield ranges of a stream with the payloads in them.

        Each has `chunk_bytes`, or one record if that is longer, whatever came before. So a reader that starts
        at the end of a range gets the same ranges as one that came from before.
        """
        at, rest, wanted = start, b"", self._chunk_bytes
        with contextlib.closing(_open_stream(path, start, compression)) as file:
            while True:
                taken = file.tell()
                piece = file.read(wanted - len(rest)) if len(rest) < wanted else b""
                rest = rest + piece if rest else piece
                if not rest:
                    return
                ended = len(rest) < wanted
                buffer = rest[:wanted]
                found = self._split(buffer)
                if len(found.offsets):
                    yield _Buffer(at, buffer, found, taken, file.tell())
                if found.failure and (ended or not found.truncated):
                    inside = f" (inside its {compression} stream)" if compression else ""
                    raise CorruptFileError(path, at + found.consumed, found.failure + inside)
                rest = rest[found.consumed :]
                at += found.consumed
                size = max(self._announced(rest), 0 if found.consumed else len(rest))
                if size > self._record_bytes:
                    raise CorruptFileError(
                        path,
                        at,
                        f"the record that begins here has {size:,} bytes or more, and record_bytes allows "
                        f"{self._record_bytes:,}. If it is sound, read it with a higher record_bytes",
                    )
                # A record longer than the buffer: read three times as much, as long as the file has it.
                wanted = self._chunk_bytes if found.consumed else min(3 * wanted, self._record_bytes + 1)


class _Buffer(NamedTuple):
    """A range of a stream."""

    at: int
    """The byte of the stream at which it begins."""
    bytes: bytes
    found: native.SplitStream
    """Its payloads."""
    taken: int
    """Bytes of the file that were read before it."""
    reached: int
    """The same by its end."""


class _StreamWriter:
    """Writes records to an open file, wrapped by `seal`."""

    def __init__(
        self, file: BinaryIO, compressor: StreamCompressor | None, seal: Callable[[Records], bytes]
    ) -> None:
        self._file = file
        self._compressor = compressor
        self._seal = seal

    def write(self, records: Records) -> None:
        stream = self._seal(records)
        self._file.write(stream if self._compressor is None else self._compressor.compress(stream))


def _open_stream(path: str, start: int, compression: str | None) -> BinaryIO | Decompressing:
    """Open a file at a place of its stream."""
    file = filesystem.open_read(path)
    with contextlib.ExitStack() as undo:
        undo.callback(file.close)
        if compression is None:
            if start > file.seek(0, 2):
                raise CorruptFileError(path, start, "the file ends before the place to resume from")
            file.seek(start)
            undo.pop_all()
            return file
        reader = Decompressing(file, path, compression)
        left = start
        while left:
            if not (skipped := reader.read(min(left, _SKIP_BYTES))):
                raise CorruptFileError(path, start, "the stream ends before the place to resume from")
            left -= len(skipped)
        undo.pop_all()
        return reader
