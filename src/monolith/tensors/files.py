"""Dense files: named tensors in one safetensors file, every byte of it under a checksum.

Checkpoints are written so, and what processes send each other around a save. Any tool that
reads safetensors reads it:

    length      of the header, uint64, little-endian
    header      JSON: the dtype, shape and place of each tensor, and under `__metadata__` text;
                filled up with spaces
    tensors     end to end, those of the widest elements first
    checksums   one more tensor, `monolith.crc32c`, bytes: the CRC of length and header, of each
                tensor in their order in the file, and of these CRCs

With the checksums at the end a file is written in one pass from the tensors' own memory,
and a reader can check the few tensors it wants. What cannot be checked is not read. A
`FileRecord` covers the whole file once more, for a manifest: it also tells this file from
another good one that has its name. (The safetensors library reads and writes local files
only, and sums up nothing, so the format is spelled out here; tests compare the two.)

Tensors that share their memory, such as tied weights, are written once and read as one.
CRC is CRC-32C.
"""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from monolith import filesystem, native
from monolith.errors import CorruptFileError, RestoreError, SaveError
from monolith.front_door import module_when_used

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = module_when_used("torch")

CHECKSUMS = "monolith.crc32c"
"""The tensor of checksums; a name that is taken."""
SHARED = "monolith.shared"
"""A reserved key of the metadata: which names are aliases of another tensor, as JSON."""

_DTYPES = {
    "F64": ("float64", 8),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
    "C64": ("complex64", 8),
    "F32": ("float32", 4),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""Code in a file -> torch's name for it, and its bytes."""
_CODES = {name: code for code, (name, _) in _DTYPES.items()}
_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_CHUNK_BYTES = 4 << 20
_HEADER_LIMIT = 100_000_000  # the library's own


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a manifest keeps of a file, to know it again."""

    bytes: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a tensor in a file is, without its numbers."""

    code: str
    """What safetensors calls its type."""
    shape: tuple[int, ...]

    @property
    def dtype_name(self) -> str:
        """What torch calls its type."""
        return _DTYPES[self.code][0]

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype_name)
        return found

    def __str__(self) -> str:
        return f"{self.dtype_name} of shape {self.shape}"


@dataclass(frozen=True, slots=True)
class DenseHeader:
    """What is in a file."""

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    shared: Mapping[str, str]
    """Alias -> the name of its tensor."""


def write_tensors(path: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileRecord:
    """Write tensors to a file that appears under its name when it is complete.

    They must not change meanwhile: a caller that trains on passes copies. Tensors that are
    not contiguous on the CPU are copied there, one at a time.

    Raises:
        SaveError: A tensor is of a kind that safetensors has no word for. Nothing was written.
        FilesystemError: It could not be written; what had the name before is still there.
    """
    plan = _FilePlan.of(path, tensors, metadata)
    with filesystem.atomic_write(path) as file:
        return plan.write(file)


def dump_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of such a file.

    Raises:
        SaveError: A tensor is of a kind that safetensors has no word for.
    """
    file = io.BytesIO()
    _FilePlan.of("a message", tensors, metadata).write(file)
    return file.getvalue()


def load_tensors(data: bytes, name: str) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    """Return the tensors of what `dump_tensors` returned, each checked, and the metadata.

    Args:
        name: What to call the bytes in an error.

    Raises:
        CorruptFileError: Where and why the bytes are not as they were written.
        RestoreError: They carry no checksums.
    """
    reader = _Reader(name, io.BytesIO(data))
    reader.check_head()
    return reader.read(None, lambda _: True), reader.header.metadata


def read_header(path: str) -> DenseHeader:
    """Return what is in a file, without reading its tensors.

    Raises:
        FileMissingError: There is no such file.
        CorruptFileError: It is no such file, or damaged in its header.
        RestoreError: It carries no checksums.
    """
    with filesystem.open_read(path) as file:
        reader = _Reader(path, file)
        reader.check_head()
        return reader.header


def read_tensors(
    path: str, record: FileRecord | None = None, *, only: Callable[[str], bool] | None = None
) -> dict[str, Tensor]:
    """Return the tensors of a file, each checked, and read into memory of its own.

    Args:
        record: The recorded size and checksum of the file; it is then read, and checked, as a whole.
        only: Which names to return; all by default.

    Raises:
        FileMissingError: There is no such file.
        CorruptFileError: Where and why the file is not as it was written.
        RestoreError: There is nothing to check it by: it carries no checksums, and no record was given.
    """
    with filesystem.open_read(path) as file:
        reader = _Reader(path, file)
        if record is not None and record.bytes != reader.size:
            raise CorruptFileError(
                path,
                min(record.bytes, reader.size),
                f"it has {reader.size} bytes, {record.bytes} were recorded",
            )
        if record is None:
            reader.check_head()
        return reader.read(record, only or (lambda _: True))


def record_of(path: str) -> FileRecord:
    """Return the record of a file of any kind, by reading it.

    Raises:
        FileMissingError: There is no such file.
    """
    size = crc = 0
    with filesystem.open_read(path) as file:
        while piece := file.read(_CHUNK_BYTES):
            size += len(piece)
            crc = native.crc32c(piece, crc)
    return FileRecord(size, crc)


def memory_of(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return what two tensors have in common if they are one in memory; None if there is no memory to
    share."""
    if tensor.numel() == 0 or tensor.layout is not torch.strided:
        return None
    place = tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()
    return (*place, tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg())


# Writing


class _SummedFile:
    """A file that counts and sums up what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.bytes = 0
        self.crc = 0

    def write(self, data: memoryview) -> int:
        """Write all of `data`; return its own CRC."""
        own = 0
        for piece in _pieces(data):
            self._file.write(piece)
            own = native.crc32c(piece, own)
            self.crc = native.crc32c(piece, self.crc)
        self.bytes += len(data)
        return own


@dataclass(frozen=True, slots=True)
class _FilePlan:
    """A file that can be written: its head, and its tensors in the order of the file."""

    head: bytes
    tensors: list[Tensor]

    @classmethod
    def of(cls, path: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> _FilePlan:
        kept, shared = _without_shared(tensors)
        for name, tensor in kept.items():
            _check_writable(name, tensor)
        for key, text in metadata.items():
            if key == SHARED or not isinstance(key, str) or not isinstance(text, str):
                raise SaveError(
                    f"cannot write {path}: metadata must be text other than {SHARED!r}, got {key!r}"
                )
        order = sorted(kept, key=lambda name: (-kept[name].itemsize, name))
        head = _head({name: kept[name] for name in order}, dict(metadata), shared)
        return cls(head, [kept[name] for name in order])

    def write(self, file: BinaryIO) -> FileRecord:
        summed = _SummedFile(file)
        sums = [summed.write(memoryview(self.head))]
        sums += [summed.write(_bytes_of(tensor)) for tensor in self.tensors]
        summed.write(memoryview(_seal(sums)))
        return FileRecord(summed.bytes, summed.crc)


def _without_shared(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    kept: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    owners: dict[tuple[Any, ...], str] = {}
    for name in sorted(tensors):
        memory = memory_of(tensors[name])
        owner = name if memory is None else owners.setdefault(memory, name)
        if owner == name:
            kept[name] = tensors[name]
        else:
            shared[name] = owner
    return kept, shared


def _check_writable(name: str, tensor: Tensor) -> None:
    if name in (CHECKSUMS, "__metadata__"):
        raise SaveError(f"cannot write a tensor named {name!r}: the file itself uses that name")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise SaveError(f"cannot write {name!r}: it is {kind}, and only dense tensors can be saved")
    if tensor.is_meta:
        raise SaveError(f"cannot write {name!r}: it is on the meta device, so it has no values")
    dtype = _name(tensor.dtype)
    if dtype not in _CODES:
        raise SaveError(f"cannot write {name!r}: safetensors has no type for {dtype}")


def _head(tensors: Mapping[str, Tensor], metadata: dict[str, str], shared: dict[str, str]) -> bytes:
    if shared:
        metadata[SHARED] = json.dumps(shared, sort_keys=True)
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.numel() * tensor.itemsize
        header[name] = _entry(_CODES[_name(tensor.dtype)], list(tensor.shape), at, end)
        at = end
    sums_bytes = _CRC.size * (len(tensors) + 2)
    header[CHECKSUMS] = _entry("U8", [sums_bytes], at, at + sums_bytes)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH.size)
    if len(text) > _HEADER_LIMIT:
        raise SaveError(
            f"names and metadata take {len(text)} bytes, a header has at most {_HEADER_LIMIT}. "
            "Write several files."
        )
    return _LENGTH.pack(len(text)) + text


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _entry(code: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": code, "shape": shape, "data_offsets": [begin, end]}


def _seal(sums: list[int]) -> bytes:
    packed = b"".join(map(_CRC.pack, sums))
    return packed + _CRC.pack(native.crc32c(packed))


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor, or of a copy if it is not contiguous on the CPU."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if plain.numel() < 2:  # of any stride, which counts for nothing
        plain = plain.flatten().as_strided((plain.numel(),), (1,))
    return _memory(plain)


def _memory(tensor: Tensor) -> memoryview:
    flat = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat.data if flat.size else memoryview(b"")


def _pieces(data: memoryview) -> Iterator[memoryview]:
    for begin in range(0, len(data), _CHUNK_BYTES):
        yield data[begin : begin + _CHUNK_BYTES]


# Reading


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a tensor in the file."""

    name: str
    info: TensorInfo
    begin: int
    end: int


class _Reader:
    """One file, opened. What its header says must add up to its size before memory is set aside."""

    def __init__(self, path: str, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self.size = file.seek(0, 2)
        self._head, self._places, metadata = self._open()
        self._data_at = len(self._head)
        self._has_sums = bool(self._places) and self._places[-1].name == CHECKSUMS
        if self._has_sums:
            self._sums_at = self._places.pop()
            if self._sums_at.info != TensorInfo("U8", (_CRC.size * (len(self._places) + 2),)):
                raise self._corrupt(8, f"{CHECKSUMS} is {self._sums_at.info}, which is not one per tensor")
        shared = self._shared(metadata)
        infos = {place.name: place.info for place in self._places}
        infos |= {name: infos[owner] for name, owner in shared.items()}
        self.header = DenseHeader(infos, metadata, shared)

    def check_head(self) -> None:
        """Refuse a file that has no checksums or another head than they say."""
        if not self._has_sums:
            raise RestoreError(
                f"{self._path} carries no checksums: Monolith did not write it. If you trust it, read it "
                "with record_of(path) as its record."
            )
        if native.crc32c(self._head) != self._sums()[0]:
            raise self._corrupt(0, "the header does not match its checksum")

    def read(self, record: FileRecord | None, only: Callable[[str], bool]) -> dict[str, Tensor]:
        """Read the wanted tensors; with a record, all bytes."""
        wanted = {name for name in self.header.tensors if only(name)}
        owners = {self.header.shared.get(name, name) for name in wanted}
        found: dict[str, Tensor] = {}
        whole = native.crc32c(self._head)
        sums: list[int | None] = [whole]
        scratch = bytearray(_CHUNK_BYTES if record is not None else 0)
        for place in self._places:
            at, size, own = self._data_at + place.begin, place.end - place.begin, 0
            if place.name not in owners and record is None:
                sums.append(None)
                continue
            target: memoryview | None = None
            if place.name in owners:
                found[place.name] = torch.empty(place.info.shape, dtype=place.info.dtype)
                target = _memory(found[place.name])
            self._file.seek(at)
            for begin in range(0, size, _CHUNK_BYTES):
                end = min(begin + _CHUNK_BYTES, size)
                buffer = memoryview(scratch)[: end - begin] if target is None else target[begin:end]
                self._read_into(buffer, at + begin)
                own = native.crc32c(buffer, own)
                if record is not None:
                    whole = native.crc32c(buffer, whole)
            sums.append(own)
        self._check_sums(sums)
        if record is not None:
            if self._has_sums:
                whole = native.crc32c(self._raw_sums(), whole)
            if whole != record.crc32c:
                raise self._corrupt(
                    0, f"its checksum is {whole:08x}, {record.crc32c:08x} was recorded: it is another file"
                )
        return {
            name: found[self.header.shared.get(name, name)] for name in self.header.tensors if name in wanted
        }

    def _check_sums(self, found: list[int | None]) -> None:
        if not self._has_sums:
            return
        for number, (own, expected) in enumerate(zip(found, self._sums(), strict=True)):
            if own is None or own == expected:
                continue
            if number == 0:
                raise self._corrupt(0, "the header does not match its checksum")
            place = self._places[number - 1]
            raise self._corrupt(
                self._data_at + place.begin, f"the tensor {place.name!r} does not match its checksum"
            )

    def _sums(self) -> list[int]:
        raw = self._raw_sums()
        *sums, own = (crc for (crc,) in _CRC.iter_unpack(raw))
        if native.crc32c(raw[: -_CRC.size]) != own:
            raise self._corrupt(self._data_at + self._sums_at.begin, "the checksums do not match their own")
        return sums

    def _raw_sums(self) -> bytes:
        return bytes(self._read(self._data_at + self._sums_at.begin, self._sums_at.end - self._sums_at.begin))

    def _open(self) -> tuple[bytes, list[_Place], dict[str, str]]:
        if self.size < _LENGTH.size:
            raise self._corrupt(self.size, f"a safetensors file has at least 8 bytes, this has {self.size}")
        prefix = self._read(0, _LENGTH.size)
        (length,) = _LENGTH.unpack(prefix)
        if length > min(self.size - _LENGTH.size, _HEADER_LIMIT):
            raise self._corrupt(
                0, f"a header of {length} bytes does not fit a file of {self.size}: cut, or no safetensors"
            )
        text = self._read(_LENGTH.size, length)
        try:
            header = json.loads(text, object_pairs_hook=_without_repeats)
            metadata = header.pop("__metadata__", {})
            if any(not isinstance(text, str) for text in metadata.values()):
                raise ValueError("metadata must be text")
            places = [_place(name, entry) for name, entry in header.items()]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as cause:
            raise self._corrupt(_LENGTH.size, f"the header is malformed: {cause}") from cause
        places.sort(key=lambda place: (place.begin, place.end, place.name))
        self._check_places(places, _LENGTH.size + length)
        return bytes(prefix + text), places, metadata

    def _check_places(self, places: list[_Place], data_at: int) -> None:
        at = 0
        for place in places:
            if place.begin != at:
                raise self._corrupt(data_at + at, f"the tensor {place.name!r} does not begin where it should")
            at = place.end
        if data_at + at != self.size:
            raise self._corrupt(
                min(data_at + at, self.size),
                f"the tensors end at byte {data_at + at}, the file at {self.size}",
            )

    def _shared(self, metadata: dict[str, str]) -> dict[str, str]:
        names = {place.name for place in self._places}
        try:
            shared: dict[str, str] = json.loads(metadata.pop(SHARED, "{}"))
            if names & shared.keys() or not names.issuperset(shared.values()):
                raise ValueError("they are not names of other tensors")
        except (ValueError, TypeError, AttributeError, RecursionError) as cause:
            raise self._corrupt(_LENGTH.size, f"{SHARED} is malformed: {cause}") from cause
        return shared

    def _read(self, at: int, size: int) -> bytearray:
        buffer = bytearray(size)
        self._file.seek(at)
        self._read_into(memoryview(buffer), at)
        return buffer

    def _read_into(self, buffer: memoryview, at: int) -> None:
        have = 0
        while have < len(buffer):
            got = self._file.readinto(buffer[have:])  # type: ignore[attr-defined]
            if not got:
                raise self._corrupt(at + have, f"the file ends {len(buffer) - have} bytes early")
            have += got

    def _corrupt(self, offset: int, reason: str) -> CorruptFileError:
        return CorruptFileError(self._path, offset, reason)


def _place(name: str, entry: dict[str, Any]) -> _Place:
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if any(type(n) is not int or n < 0 for n in (*shape, begin, end)):
        raise ValueError(f"{name!r} has a negative or broken number")
    code = entry["dtype"]
    if math.prod(shape) * _DTYPES[code][1] != end - begin:
        raise ValueError(f"{name!r} of shape {shape} does not take {end - begin} bytes")
    return _Place(name, TensorInfo(code, shape), begin, end)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice")
    return found
