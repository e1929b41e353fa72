"""Streams: files of one payload after another, read in chunks and written, compressed or not.

TFRecord files and Monolith's framed files differ only in how a payload is wrapped. A place in such a
file is a byte of the stream: of the file itself, or of what it decompresses to, and then going on
from a place reads the file from its beginning.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from monolith import filesystem, native
from monolith.data.format import BadRecord, Chunk
from monolith.data.formats.compressed import (
    AUTO,
    Decompressing,
    StreamCompressor,
    compression_of,
    compressor_of,
)
from monolith.data.formats.examples import ParsedPayloads, PayloadParser, PayloadWriter
from monolith.data.records import Records
from monolith.errors import ConfigError, CorruptFileError

CHUNK_BYTES = 4 << 20
RECORD_BYTES = 256 << 20
"""The most that one record may have, header and all, where nobody says otherwise."""
_SKIP_BYTES = 1 << 20
Split = Callable[[bytes], native.SplitStream]
Amend = Callable[[ParsedPayloads, NDArray[np.int64]], Records]
"""Gets payloads and the headers of their frames; returns their records."""
Announced = Callable[[bytes], int]
"""Gets the beginning of a record; returns how many bytes it says that it has, 0 where it does not say yet."""
Seal = Callable[[Records, bytes, NDArray[np.int64]], bytes]
"""Gets records, their payloads end to end, and where each begins; returns a stream."""


def check_record_bytes(record_bytes: int) -> int:
    """Return the most that one record may have, if that makes sense."""
    if record_bytes < 1:
        raise ConfigError(f"record_bytes must be at least 1, got {record_bytes}")
    return record_bytes


def read_chunks(
    path: str,
    split: Split,
    parser: PayloadParser,
    *,
    start: int,
    compression: str | None,
    chunk_bytes: int,
    record_bytes: int = RECORD_BYTES,
    announced: Announced = lambda _: 0,
    amend: Amend | None = None,
) -> Iterator[Chunk]:
    """Yield what the payloads of a file hold, from a place on.

    Args:
        record_bytes: The most that one record may have.
        announced: Tells a record that is longer before it is read; by default only reading it does.

    Raises:
        CorruptFileError: The file cannot be read any further. What was good before that was yielded.
    """
    found = _buffers(
        path,
        split,
        start=start,
        compression=compression,
        chunk_bytes=chunk_bytes,
        record_bytes=record_bytes,
        announced=announced,
    )
    with contextlib.closing(found) as buffers:
        for at, buffer, payloads, taken, reached in buffers:
            for chunk in _chunks(at, buffer, payloads, parser, amend):
                part = (chunk.next - at) / len(buffer)
                yield replace(
                    chunk, reached=taken + round(part * (reached - taken)) if compression else chunk.next
                )


def stream_bounds(
    path: str,
    split: Split,
    *,
    compression: str | None,
    chunk_bytes: int,
    record_bytes: int = RECORD_BYTES,
    announced: Announced = lambda _: 0,
) -> list[int] | None:
    """Return the bytes at which the chunks of a stream begin, without a look at the payloads; see
    `SplittableFormat`."""
    if compression is not None:
        return None
    bounds = [0]
    found = _buffers(
        path,
        split,
        start=0,
        compression=None,
        chunk_bytes=chunk_bytes,
        record_bytes=record_bytes,
        announced=announced,
    )
    bounds += [at + payloads.consumed for at, _, payloads, _, _ in found]
    return bounds if len(bounds) > 1 else []


def _buffers(
    path: str,
    split: Split,
    *,
    start: int,
    compression: str | None,
    chunk_bytes: int,
    record_bytes: int,
    announced: Announced,
) -> Generator[tuple[int, bytes, native.SplitStream, int, int], None, None]:
    """Yield stretches of a stream with the payloads in them: the byte at which a stretch begins, its bytes,
    its payloads, and how much of the file was read before it and by its end.

    Each has `chunk_bytes`, or one record where that is longer, whatever came before. So those from the end of
    one on are the same for a reader that begins there.
    """
    check_record_bytes(record_bytes)
    at, rest, wanted = start, b"", chunk_bytes
    with contextlib.closing(_open(path, start, compression)) as file:
        while True:
            taken = file.tell()
            piece = file.read(wanted - len(rest)) if len(rest) < wanted else b""
            rest = rest + piece if rest else piece
            if not rest:
                return
            ended = len(rest) < wanted
            buffer = rest[:wanted]
            found = split(buffer)
            if len(found.offsets):
                yield at, buffer, found, taken, file.tell()
            if found.failure and (ended or not found.truncated):
                inside = f" (of what its {compression} holds)" if compression else ""
                raise CorruptFileError(path, at + found.consumed, found.failure + inside)
            rest = rest[found.consumed :]
            at += found.consumed
            if (size := max(announced(rest), 0 if found.consumed else len(rest))) > record_bytes:
                raise CorruptFileError(
                    path,
                    at,
                    f"the record that begins here has {size:,} bytes or more, and record_bytes allows "
                    f"{record_bytes:,}. If it is sound, read it with a higher record_bytes",
                )
            # A record longer than what was read: read three times as much, as long as the file has it.
            wanted = chunk_bytes if found.consumed else min(3 * wanted, record_bytes + 1)


def _chunks(
    at: int, buffer: bytes, found: native.SplitStream, parser: PayloadParser, amend: Amend | None
) -> Iterator[Chunk]:
    starts = np.append(found.starts, found.consumed)
    for parsed in parser.parse(buffer, found.offsets, found.lengths):
        last = parsed.first + parsed.count
        bad = []
        for index, reason in parsed.bad:
            place, begin = at + int(starts[index]), int(found.offsets[index])
            payload = buffer[begin : begin + int(found.lengths[index])]
            bad.append(BadRecord(place, f"record at byte {place}: {reason}", payload))
        records = parsed.records if amend is None else amend(parsed, found.headers[parsed.first : last])
        yield Chunk(records, at + int(starts[last]), bad)


class StreamWriter:
    """Writes records to an open file."""

    def __init__(
        self,
        file: BinaryIO,
        compressor: StreamCompressor | None,
        seal: Seal,
        writer: PayloadWriter,
    ) -> None:
        self._file = file
        self._compressor = compressor
        self._seal = seal
        self._writer = writer

    def write(self, records: Records) -> None:
        stream = self._seal(records, *self._writer.encode(records))
        self._file.write(stream if self._compressor is None else self._compressor.compress(stream))


@contextlib.contextmanager
def open_writer(
    path: str,
    compression: str | None,
    seal: Seal,
    writer: PayloadWriter,
) -> Iterator[StreamWriter]:
    """Write a file that appears under its name when the block ends well; `seal` wraps payloads."""
    compressor = compressor_of(compression_of(path) if compression == AUTO else compression)
    with filesystem.atomic_write(path) as file:
        yield StreamWriter(file, compressor, seal, writer)
        if compressor is not None:
            file.write(compressor.flush())


# Opening


class _Reader(Protocol):
    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes; none only at the end."""

    def tell(self) -> int:
        """Return how many bytes of the file were read, compressed as they are."""

    def close(self) -> None: ...


def _open(path: str, start: int, compression: str | None) -> _Reader:
    """Open a file at a place of its stream."""
    file = filesystem.open_read(path)
    with contextlib.ExitStack() as undo:
        undo.callback(file.close)
        if compression is None:
            if start > file.seek(0, 2):
                raise CorruptFileError(path, start, "the file ends before the place to go on from")
            file.seek(start)
            undo.pop_all()
            return file
        reader = Decompressing(file, path, compression)
        left = start
        while left:
            if not (skipped := reader.read(min(left, _SKIP_BYTES))):
                raise CorruptFileError(path, start, "the stream ends before the place to go on from")
            left -= len(skipped)
        undo.pop_all()
        return reader
