"""Compressed files, as decompressed streams and as files to read lines from.

A place in a compressed file is a byte of its decompressed stream; seeking backwards reads the file again from
its beginning.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import zlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast

from monolith.errors import ConfigError, CorruptFileError, DataError
from monolith.filesystem import atomic_write, open_read

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

AUTO = "auto"
COMPRESSIONS = ("gzip", "zlib", "zstd", "snappy")

_PIECES = {"gzip": 16 << 10, "zlib": 16 << 10}
"""How many bytes of a compressed file are read at a time: decompressed, they may be a thousand times as
many."""
_PIECE_BYTES = 4 << 10
"""The same for other compressions: with zstd, it may be thirty thousand times as much."""
_BUFFER_BYTES = 64 << 10
COMPRESSED_SUFFIXES = {
    ".gz": "gzip",
    ".gzip": "gzip",
    ".zlib": "zlib",
    ".zz": "zlib",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".snappy": "snappy",
}
_WINDOWS = {"gzip": 31, "zlib": 15}
"""The `wbits` that tell zlib which of its two wrappings is meant."""


def check_compression(compression: str | None) -> str | None:
    """Return the compression if there is one of that name, or none, or "auto"."""
    if compression not in (None, AUTO, *COMPRESSIONS):
        known = ", ".join(COMPRESSIONS)
        raise ConfigError(f"there is no compression {compression!r}; there are {known}, auto and None")
    return compression


def compression_of(path: str) -> str | None:
    """Return the compression that a file's name tells."""
    return next((name for suffix, name in COMPRESSED_SUFFIXES.items() if path.lower().endswith(suffix)), None)


class OpenText:
    """A file of text, open to read, which its name may say is compressed.

    Args:
        end: Treat the file as ended at this byte, although it may have more; not for compressed files.
    """

    def __init__(self, path: str, end: int | None = None) -> None:
        opened = open_read(path)
        if end is not None:
            opened = cast(BinaryIO, io.BufferedReader(_Until(opened, end), _BUFFER_BYTES))
        compression = compression_of(path)
        self._stream = None if compression is None else _DecompressedFile(opened, path, compression)
        self.file = opened
        if self._stream is not None:
            self.file = cast(BinaryIO, io.BufferedReader(self._stream, _BUFFER_BYTES))

    def __enter__(self) -> OpenText:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def reached(self, place: int) -> int:
        """Return how many bytes of the file, as it is on disk, were read when the text is read to a place.

        Of a compressed one, that is about as many as were read by now.
        """
        return place if self._stream is None else self._stream.reached


READ_BYTES = 64 << 10
"""Read beyond a chunk, so that its last record is there to the end and more."""


class TextWindow:
    """A range of bytes of a text file, which moves forward."""

    def __init__(self, file: BinaryIO, place: int) -> None:
        file.seek(place)
        self._file = file
        self.place = place
        """Where in the file it begins."""
        self.view = memoryview(b"")
        self.last = False
        """Whether the file ends with it."""

    def fill(self, size: int) -> None:
        """Read on until there are `size` bytes, or all there are."""
        if self.last or len(self.view) >= size:
            return
        parts = [bytes(self.view)]
        missing = size - len(self.view)
        while missing > 0 and not self.last:
            parts.append(self._file.read(missing))
            missing -= len(parts[-1])
            self.last = not parts[-1]
        self.view = memoryview(b"".join(parts))  # other memory: views of the former one stay as they are

    def move(self, size: int) -> None:
        """Leave bytes behind."""
        self.view = self.view[size:]
        self.place += size

    def cut(
        self, chunk_bytes: int, find_end: Callable[[memoryview, bool, int], tuple[bool, int]]
    ) -> Iterator[tuple[int, memoryview]]:
        """Yield the rest of the file in chunks that are not parsed: where each begins, and its bytes.

        Args:
            find_end: As `native.find_csv_chunk_end`, of a format.
        """
        while True:
            # As much is shown each time, whatever is there: a chunk must not depend on the one before.
            shown = chunk_bytes + READ_BYTES
            while True:
                self.fill(shown)
                last = self.last and len(self.view) <= shown
                whole, end = find_end(self.view[:shown], last, chunk_bytes)
                if whole:
                    break
                # The chunk's last record is longer than the bytes shown: show more.
                self.move(end)
                shown = 2 * shown + READ_BYTES
            if not end:
                return
            place, view = self.place, self.view[:end]
            self.move(end)
            yield place, view


@contextlib.contextmanager
def write_text(path: str) -> Iterator[BinaryIO]:
    """Write a file that appears under its name when the block ends well, compressed as the name says."""
    compressor = compressor_of(compression_of(path))
    with atomic_write(path) as file:
        if compressor is None:
            yield file
        else:
            yield cast(BinaryIO, _Compressing(file, compressor))
            file.write(compressor.flush())


class _Compressing:
    def __init__(self, file: BinaryIO, compressor: StreamCompressor) -> None:
        self._file = file
        self._compressor = compressor

    def write(self, data: bytes) -> int:
        self._file.write(self._compressor.compress(data))
        return len(data)


class _Until(io.RawIOBase):
    """The beginning of a file, as a file one can read and seek."""

    def __init__(self, file: BinaryIO, end: int) -> None:
        self._file = file
        self._end = end
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        into = memoryview(buffer).cast("B")
        piece = self._file.read(min(len(into), max(self._end - self._place, 0)))
        into[: len(piece)] = piece
        self._place += len(piece)
        return len(piece)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_SET, "readers of text go to places"
        self._place = self._file.seek(offset)
        return self._place

    def tell(self) -> int:
        return self._place

    def close(self) -> None:
        self._file.close()
        super().close()


class _DecompressedFile(io.RawIOBase):
    """A compressed file that reads and seeks as if it were not compressed."""

    def __init__(self, file: BinaryIO, path: str, compression: str) -> None:
        self._file = file
        self._path = path
        self._compression = compression
        self._stream = Decompressing(file, path, compression)
        self._place = 0

    @property
    def reached(self) -> int:
        """How many bytes of the file were read, compressed as they are."""
        return self._stream.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, into: WriteableBuffer, /) -> int:
        with memoryview(into) as buffer:
            data = self._stream.read(len(buffer))
            buffer[: len(data)] = data
        self._place += len(data)
        return len(data)

    def tell(self) -> int:
        return self._place

    def seek(self, place: int, whence: int = io.SEEK_SET, /) -> int:
        if whence != io.SEEK_SET:
            raise io.UnsupportedOperation("the decompressed size of a file is unknown")
        if place < self._place:
            self._file.seek(0)
            self._stream = Decompressing(self._file, self._path, self._compression)
            self._place = 0
        while self._place < place and (skipped := self._stream.read(min(place - self._place, _BUFFER_BYTES))):
            self._place += len(skipped)
        return self._place

    def close(self) -> None:
        super().close()
        self._file.close()


class StreamCompressor(Protocol):
    """Compresses a stream piece by piece: one of zlib, or of the optional zstandard."""

    def compress(self, data: bytes, /) -> bytes: ...

    def flush(self) -> bytes: ...


class Decompressor(Protocol):
    """Decompresses one stream piece by piece: one of zlib, or of the optional zstandard."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes:
        """The bytes after the end of the stream."""

    def decompress(self, data: bytes, /) -> bytes: ...


class Decompressing:
    """Reads the decompressed bytes of a file. Several streams may follow each other, as `cat` leaves them."""

    def __init__(self, file: BinaryIO, path: str, compression: str) -> None:
        self._file = file
        self._path = path
        self._compression = compression
        self._piece_bytes = _PIECES.get(compression, _PIECE_BYTES)
        self._stream: Decompressor | None = None
        self._ready = bytearray()
        self._taken = self._given = 0

    def read(self, size: int, /) -> bytes:
        while len(self._ready) < size and (piece := self._file.read(self._piece_bytes)):
            self._take(piece)
            self._taken += len(piece)
        if len(self._ready) < size and self._stream is not None and not self._stream.eof:
            raise CorruptFileError(
                self._path, self._taken, f"the file ends inside its {self._compression} stream"
            )
        result = bytes(self._ready[:size])
        del self._ready[:size]
        self._given += len(result)
        return result

    def tell(self) -> int:
        # Some decompressed bytes were not read yet: a small file is decompressed at once.
        return self._taken * self._given // max(self._given + len(self._ready), 1)

    def close(self) -> None:
        self._file.close()

    def _take(self, piece: bytes) -> None:
        while piece:
            if self._stream is None or self._stream.eof:
                self._stream = _decompressor(self._compression)
            try:
                self._ready += self._stream.decompress(piece)
            except Exception as cause:  # zlib and zstandard have errors of their own
                raise CorruptFileError(
                    self._path, self._taken, f"from here on this is not a {self._compression} stream: {cause}"
                ) from cause
            piece = self._stream.unused_data if self._stream.eof else b""


def _decompressor(compression: str) -> Decompressor:
    if compression in _WINDOWS:
        return zlib.decompressobj(_WINDOWS[compression])
    stream: Decompressor = _zstandard(compression).ZstdDecompressor().decompressobj()
    return stream


def compressor_of(compression: str | None) -> StreamCompressor | None:
    if compression is None:
        return None
    if compression in _WINDOWS:
        return zlib.compressobj(wbits=_WINDOWS[compression])
    stream: StreamCompressor = _zstandard(compression).ZstdCompressor().compressobj()
    return stream


def _zstandard(compression: str) -> ModuleType:
    if compression == "snappy":
        raise DataError(
            "snappy is not read or written here: there are several ways to split it into blocks, and "
            "files do not say which. Decompress the file, or write it with gzip, zlib or zstd."
        )
    try:
        return importlib.import_module("zstandard")
    except ModuleNotFoundError as cause:
        raise DataError(
            "zstd needs the package 'zstandard', which is not installed: pip install zstandard"
        ) from cause
