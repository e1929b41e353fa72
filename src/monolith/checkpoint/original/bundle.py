"""Tensor bundles: the dense variables of a TensorFlow checkpoint, read and written without TensorFlow.

    <prefix>.index                      a table of sorted keys, as LevelDB keeps them
    <prefix>.data-00000-of-0000n        the bytes of the tensors

The index begins with the empty key, which holds the number of data files; every other key is the name of a
variable and says its dtype and shape and where its bytes are. A partitioned variable has no bytes of its own:
its entry lists slices, and each slice has an entry under a key that encodes the name and the extents.

    index file  = block*  metaindex-block  index-block  footer
    block       = entry*  restart:u32*  restarts:u32   then  compression:u8  masked-crc32c:u32
    entry       = shared:varint  own:varint  value:varint  key[own]  value[value]
    footer      = handle(metaindex)  handle(index)  padding to 40 bytes  magic:u64

The files are not trusted: each offset, length and checksum is checked against the file before memory is set
aside, and what does not add up is a CorruptFileError with the file and the byte.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]
from torch import Tensor

from monolith import filesystem, native
from monolith.errors import CorruptFileError, FileMissingError, RestoreError, SaveError
from monolith.table.sharded_files import MAX_SHARDS
from monolith.wire.tensor_bundle_pb2 import BundleEntry, BundleHeader, BundleShape, BundleSlice

ProtoMessage = TypeVar("ProtoMessage", bound=Message)

_MAGIC = 0xDB4775248B80FB57
_FOOTER = 48
_TRAILER = 5  # after each block: how it is compressed, and its checksum
_MOST_INDEX_BYTES = 1 << 30
_RESTART_EVERY = 16
_STRING = 7

DTYPES = {
    1: torch.float32,
    2: torch.float64,
    3: torch.int32,
    4: torch.uint8,
    5: torch.int16,
    6: torch.int8,
    8: torch.complex64,
    9: torch.int64,
    10: torch.bool,
    14: torch.bfloat16,
    17: torch.uint16,
    18: torch.complex128,
    19: torch.float16,
    22: torch.uint32,
    23: torch.uint64,
}
"""TensorFlow's number of a dtype -> torch's."""
_NUMBERS = {dtype: number for number, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class BundleVariable:
    """A variable of a bundle, before its bytes are read."""

    name: str
    dtype: torch.dtype | None
    """None for text and other kinds that torch does not have."""
    shape: tuple[int, ...]
    slices: int = 0
    """How many parts it was partitioned into; 0 if it was not."""
    kind: int = field(default=0, repr=False)
    """TensorFlow's number of the dtype."""

    @property
    def dtype_name(self) -> str:
        if self.dtype is not None:
            return str(self.dtype).removeprefix("torch.")
        return "string" if self.kind == _STRING else f"dtype {self.kind}"


class TensorBundle:
    """The variables of a checkpoint of TensorFlow, found by `<prefix>.index`.

        bundle = TensorBundle("model.ckpt-100")
        bundle.variables["dense/kernel"].shape     # (8, 4)
        bundle.read("dense/kernel")                # a tensor of that shape

    Raises:
        FileMissingError: There is no index.
        CorruptFileError: It is damaged, or of a machine that stores the high byte first.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.path = f"{prefix}.index"
        size = filesystem.file_size(self.path)
        if size > _MOST_INDEX_BYTES:
            raise CorruptFileError(self.path, _MOST_INDEX_BYTES, f"an index of {size} bytes is too large")
        entries = dict(_IndexFile(self.path, filesystem.read_bytes(self.path)).entries())
        self._header = self._read_header(entries)
        self._slices: dict[bytes, tuple[int, bytes]] = {}
        self._entries: dict[str, tuple[int, BundleEntry]] = {}
        for key, (offset, value) in entries.items():
            if not key:
                continue
            if key[0] == 0:  # an encoded slice: no name begins with a zero byte
                self._slices[key] = offset, value
                continue
            try:
                name = key.decode()
            except UnicodeDecodeError as cause:
                raise CorruptFileError(self.path, offset, f"the key {key[:40]!r} is no name") from cause
            self._entries[name] = offset, self._entry(offset, value)
        self.variables: dict[str, BundleVariable] = {
            name: BundleVariable(
                name, DTYPES.get(entry.dtype), self._shape(offset, entry), len(entry.slices), entry.dtype
            )
            for name, (offset, entry) in self._entries.items()
        }

    def read(self, name: str) -> Tensor:
        """Return the value of a variable; that of a partitioned one is put together.

        Raises:
            RestoreError: It is text, or of a dtype that torch does not have.
            FileMissingError: A data file is missing.
            CorruptFileError: A data file is too short or damaged, or slices do not add up.
        """
        offset, entry = self._entries[name]
        found = self.variables[name]
        if found.dtype is None:
            raise RestoreError(
                f"{self.prefix}: variable {name!r} is a {found.dtype_name} tensor, and only numbers are "
                "read. Leave it out with `= false` in the name map."
            )
        if entry.slices:
            return self._read_slices(offset, entry, found)
        return self._read_bytes(name, offset, entry, found.shape, found.dtype)

    def _read_header(self, entries: Mapping[bytes, tuple[int, bytes]]) -> BundleHeader:
        offset, value = entries.get(b"", (0, None))
        if value is None:
            raise CorruptFileError(self.path, 0, "it has no header, which is the value of the empty key")
        header = _parsed(self.path, offset, value, BundleHeader())
        if header.endianness != BundleHeader.LITTLE:
            raise CorruptFileError(self.path, offset, "its data is big-endian, which is not read")
        if not 0 <= header.num_shards <= MAX_SHARDS:
            raise CorruptFileError(self.path, offset, f"it claims {header.num_shards} data files")
        return header

    def _entry(self, offset: int, value: bytes) -> BundleEntry:
        return _parsed(self.path, offset, value, BundleEntry())

    def _shape(self, offset: int, entry: BundleEntry) -> tuple[int, ...]:
        shape = tuple(dim.size for dim in entry.shape.dim)
        if entry.shape.unknown_rank or any(size < 0 for size in shape) or len(shape) > 254:
            raise CorruptFileError(self.path, offset, f"a variable has no shape, or the shape {shape[:8]}")
        return shape

    def _read_bytes(
        self, name: str, offset: int, entry: BundleEntry, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        if not 0 <= entry.shard_id < self._header.num_shards:
            raise CorruptFileError(
                self.path, offset, f"{name!r} is in data file {entry.shard_id} of {self._header.num_shards}"
            )
        needed = math.prod(shape) * dtype.itemsize
        if entry.size != needed:
            raise CorruptFileError(
                self.path,
                offset,
                f"{name!r} of shape {shape} takes {needed} bytes, {entry.size} are recorded",
            )
        path = f"{self.prefix}.data-{entry.shard_id:05d}-of-{self._header.num_shards:05d}"
        try:
            size = filesystem.file_size(path)
        except FileMissingError as cause:
            raise FileMissingError(
                f"{self.path} says that {name!r} is in {path}, which is missing. Copy all data files of the "
                "checkpoint next to its index."
            ) from cause
        if entry.offset < 0 or entry.offset + entry.size > size:
            raise CorruptFileError(
                path,
                size,
                f"{name!r} is at bytes {entry.offset} to {entry.offset + entry.size}, beyond its end",
            )
        with filesystem.open_read(path) as file:
            file.seek(entry.offset)
            data = bytearray(file.read(entry.size))
        if len(data) != entry.size or native.masked_crc32c(data) != entry.crc32c:
            raise CorruptFileError(path, entry.offset, f"the bytes of {name!r} do not match their checksum")
        if not data:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).reshape(shape)

    def _read_slices(self, offset: int, whole: BundleEntry, found: BundleVariable) -> Tensor:
        assert found.dtype is not None
        parts: list[tuple[int, BundleEntry, tuple[slice, ...], tuple[int, ...]]] = []
        for one in whole.slices:
            at, shape = self._extents(offset, found, one)
            where, value = self._slices.get(_slice_key(found.name, one), (offset, None))
            if value is None:
                raise CorruptFileError(self.path, offset, f"a slice of {found.name!r} has no entry")
            entry = self._entry(where, value)
            if entry.dtype != whole.dtype or self._shape(where, entry) != shape:
                raise CorruptFileError(self.path, where, f"a slice of {found.name!r} does not fit the whole")
            parts.append((where, entry, at, shape))
        # Before memory is set aside: the slices must have bytes for all of it.
        if sum(entry.size for _, entry, _, _ in parts) != math.prod(found.shape) * found.dtype.itemsize:
            raise CorruptFileError(
                self.path, offset, f"the slices of {found.name!r} do not make up its shape"
            )
        values = [self._read_bytes(found.name, w, entry, shape, found.dtype) for w, entry, _, shape in parts]
        result = torch.zeros(found.shape, dtype=found.dtype)
        covered = torch.zeros(found.shape, dtype=torch.bool)
        for (_, _, at, _), tensor in zip(parts, values, strict=True):
            result[at] = tensor
            covered[at] = True
        if not bool(covered.all()):
            raise CorruptFileError(self.path, offset, f"the slices of {found.name!r} overlap and leave a gap")
        return result

    def _extents(
        self, offset: int, whole: BundleVariable, one: BundleSlice
    ) -> tuple[tuple[slice, ...], tuple[int, ...]]:
        """Return which part of a variable a slice is, and its shape."""
        bounds = []
        if len(one.extent) == len(whole.shape):
            for extent, size in zip(one.extent, whole.shape, strict=True):
                # A slice with no length spans the axis.
                start = extent.start if extent.HasField("length") else 0
                length = extent.length if extent.HasField("length") else size
                if start < 0 or length < 0 or start + length > size:
                    break
                bounds.append((start, length))
        if len(bounds) != len(whole.shape):
            raise CorruptFileError(self.path, offset, f"a slice is outside of {whole.name!r} {whole.shape}")
        return tuple(slice(s, s + n) for s, n in bounds), tuple(n for _, n in bounds)


def write_bundle(prefix: str, tensors: Mapping[str, Tensor]) -> list[str]:
    """Write variables as a checkpoint that TensorFlow reads; return the files.

    Args:
        prefix: Its folder must exist. The index is written last: a bundle without one does not count.

    Raises:
        SaveError: A name or dtype is of a kind that a bundle cannot hold.
    """
    data_path, index_path = f"{prefix}.data-00000-of-00001", f"{prefix}.index"
    header = BundleHeader(num_shards=1, version=BundleHeader.Version(producer=1))
    index: dict[bytes, bytes] = {b"": header.SerializeToString()}
    at = 0
    with filesystem.atomic_write(data_path) as file:
        for name in sorted(tensors, key=str.encode):
            tensor = tensors[name].detach().cpu().contiguous()
            if tensor.dtype not in _NUMBERS or not name or name[0] == "\0":
                raise SaveError(
                    f"cannot write {name!r} of {tensor.dtype} to {prefix}: TensorFlow has no such kind"
                )
            data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
            file.write(data)
            index[name.encode()] = BundleEntry(
                dtype=_NUMBERS[tensor.dtype],
                shape=BundleShape(dim=[BundleShape.Dim(size=size) for size in tensor.shape]),
                offset=at,
                size=len(data),
                crc32c=native.masked_crc32c(data),
            ).SerializeToString()
            at += len(data)
    with filesystem.atomic_write(index_path) as file:
        file.write(_index_bytes(index))
    return [index_path, data_path]


# The index file


class _IndexFile:
    """The bytes of an index."""

    def __init__(self, path: str, data: bytes) -> None:
        self._path = path
        self._data = data

    def entries(self) -> Iterator[tuple[bytes, tuple[int, bytes]]]:
        """Yield each key with the byte it is at and its value.

        Raises:
            CorruptFileError: The file is no index, or damaged.
        """
        if len(self._data) < _FOOTER:
            raise CorruptFileError(self._path, 0, f"an index has at least {_FOOTER} bytes")
        footer = len(self._data) - _FOOTER
        if struct.unpack_from("<Q", self._data, len(self._data) - 8)[0] != _MAGIC:
            raise CorruptFileError(
                self._path, len(self._data) - 8, "this is not the index of a TensorFlow checkpoint"
            )
        meta, at = self._handle(self._data, footer, footer)
        for _ in self._block(*meta):  # nothing of it is needed, but that it is sound
            pass
        index, _ = self._handle(self._data, at, footer)
        seen: set[bytes] = set()
        for _, offset, packed in self._block(*index):
            handle, _ = self._handle(packed, 0, offset)
            for key, where, value in self._block(*handle):
                if key in seen:
                    raise CorruptFileError(self._path, where, f"the key {key[:40]!r} is there twice")
                seen.add(key)
                yield key, (where, value)

    def _handle(self, data: bytes, at: int, where: int) -> tuple[tuple[int, int], int]:
        """Return where a block is and how long, and the byte after the handle that says so."""
        offset, at = self._varint(data, at, where)
        size, at = self._varint(data, at, where)
        if offset + size + _TRAILER > len(self._data) - _FOOTER:
            raise CorruptFileError(
                self._path, where, f"a block at byte {offset} of {size} bytes is beyond the end"
            )
        return (offset, size), at

    def _block(self, offset: int, size: int) -> Iterator[tuple[bytes, int, bytes]]:
        """Yield key, the byte it is at, and value."""
        body = self._data[offset : offset + size]
        compression = self._data[offset + size]
        (crc,) = struct.unpack_from("<I", self._data, offset + size + 1)
        if native.masked_crc32c(self._data[offset : offset + size + 1]) != crc:
            raise CorruptFileError(self._path, offset, "a block does not match its checksum")
        if compression == 1:
            try:
                body = native.snappy_decode(body)
            except ValueError as cause:
                raise CorruptFileError(self._path, offset, str(cause)) from cause
        elif compression:
            raise CorruptFileError(
                self._path, offset + size, f"a block is compressed by method {compression}"
            )
        if len(body) < 4:
            raise CorruptFileError(self._path, offset, "a block has no restarts")
        (restarts,) = struct.unpack_from("<I", body, len(body) - 4)
        end = len(body) - 4 - 4 * restarts
        if end < 0:
            raise CorruptFileError(
                self._path, offset, f"a block of {len(body)} bytes claims {restarts} restarts"
            )
        key, at = b"", 0
        while at < end:
            where = offset + at if compression == 0 else offset
            shared, at = self._varint(body, at, where)
            own, at = self._varint(body, at, where)
            length, at = self._varint(body, at, where)
            if shared > len(key) or own + length > end - at:
                raise CorruptFileError(self._path, where, "an entry is longer than its block")
            key = key[:shared] + body[at : at + own]
            yield key, where, body[at + own : at + own + length]
            at += own + length

    def _varint(self, data: bytes, at: int, where: int) -> tuple[int, int]:
        value = 0
        for shift in range(0, 70, 7):
            if at >= len(data):
                break
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
        raise CorruptFileError(self._path, where, "a number has no end")


def _parsed(path: str, offset: int, value: bytes, into: ProtoMessage) -> ProtoMessage:
    try:
        into.ParseFromString(value)
    except DecodeError as cause:
        raise CorruptFileError(path, offset, f"an entry is no {type(into).__name__}: {cause}") from cause
    return into


def _slice_key(name: str, one: BundleSlice) -> bytes:
    """Return the key of a slice: numbers and text that sort as what they encode ("ordered code")."""
    escaped = {0x00: b"\x00\xff", 0xFF: b"\xff\x00"}
    key = _ordered(0) + b"".join(escaped.get(byte, bytes([byte])) for byte in name.encode()) + b"\x00\x01"
    key += _ordered(len(one.extent))
    for extent in one.extent:
        whole = not extent.HasField("length")
        key += _ordered_signed(0 if whole else extent.start) + _ordered_signed(-1 if whole else extent.length)
    return key


def _ordered(value: int) -> bytes:
    """Return a number that is not negative: how many bytes, then the bytes, high ones first."""
    body = value.to_bytes((value.bit_length() + 7) // 8, "big")
    return bytes([len(body)]) + body


def _ordered_signed(value: int) -> bytes:
    """Return a number of 64 bits: as many high bits set as there are bytes, inverted for negative ones."""
    bits = (~value if value < 0 else value).bit_length()
    length = bits // 7 + 1
    body = bytearray((value & (1 << 80) - 1).to_bytes(10, "big")[10 - length :])
    header = ((1 << length) - 1) << (16 - length)
    body[0] ^= header >> 8
    if length > 1:
        body[1] ^= header & 0xFF
    return bytes(body)


def _index_bytes(entries: Mapping[bytes, bytes]) -> bytes:
    """Return an index of one uncompressed block."""
    keys = sorted(entries)
    out = bytearray()

    def block(pairs: list[tuple[bytes, bytes]]) -> bytes:
        """Append a block; return its handle."""
        body, restarts = bytearray(), []
        for number, (key, value) in enumerate(pairs):
            if number % _RESTART_EVERY == 0:  # where a reader may begin: keys are written whole all the same
                restarts.append(len(body))
            body += b"\0" + _varint(len(key)) + _varint(len(value)) + key + value
        restarts = restarts or [0]
        body += struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))
        handle = _varint(len(out)) + _varint(len(body))
        body += b"\0"
        out.extend(body + struct.pack("<I", native.masked_crc32c(body)))
        return handle

    data = block([(key, entries[key]) for key in keys])
    meta = block([])
    index = block([(keys[-1], data)])
    out += (meta + index).ljust(_FOOTER - 8, b"\0") + struct.pack("<Q", _MAGIC)
    return bytes(out)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
