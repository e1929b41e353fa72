"""Filter files: what a sliding filter has counted, in upstream's layout.

One TFRecord file per split, `<basename>-ddddd-of-ddddd`. Its first record is a
HashFilterSplitMetaDump: the split's numbers, and those of the filter as a whole. Then
come HashFilterSplitDataDump records of up to 10,000 cells with the place they belong.
Cells that are all empty are left out: restoring begins with an empty filter.

The two messages are small enough to be read and written here. A data message is
nothing but varints, which numpy handles thousands at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from monolith import filesystem, native
from monolith.errors import CorruptFileError, RestoreError
from monolith.filesystem.backends import errors_as
from monolith.table.sharded_files import find_sharded, records, replace_sharded, sharded_names, tfrecord

CELLS_PER_RECORD = 10_000

_Cells = NDArray[np.uint16]
_Fields = dict[int, list[int | bytes]]
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_UINT32, _UINT64 = (1 << 32) - 1, (1 << 64) - 1
_SLIDING_FIELDS = (
    "split_num",
    "max_forward_step",
    "max_backward_step",
    "max_step",
    "head",
    "head_increment",
    "failure_count",
)
_SPLIT_FIELDS = ("failure_count", "total_size", "num_elements")


@dataclass(frozen=True, slots=True)
class SplitMeta:
    """The first record of a file."""

    split: dict[str, int]
    fill_rate: float
    sliding: dict[str, int]


def save(core: native.SlidingFilter, basename: str) -> None:
    """Write a filter, replacing the files at `basename` when all new ones are complete.

    Each split is written as it is at one moment. To save the filter as a whole at one
    moment, hold sightings back until this returns.

    Raises:
        FilesystemError: A file could not be written; the old ones are still there.
    """
    sliding = _numbers(core.meta(), _SLIDING_FIELDS)
    names = sharded_names(basename, core.split_num)
    with replace_sharded(basename, core.split_num) as files:
        for split, (name, file) in enumerate(zip(names, files, strict=True)):
            with errors_as("write", name):
                _write_split(core, split, sliding, file)


def _write_split(core: native.SlidingFilter, split: int, sliding: dict[str, int], file: BinaryIO) -> None:
    cells = core.read_cells(split)
    found = core.split_meta(split)
    numbers = _numbers(found, _SPLIT_FIELDS)
    chunks = {offset: cells[offset : offset + CELLS_PER_RECORD] for offset in _used_chunks(cells)}
    # As many as are written here, so that a reader can tell whether it has them all.
    numbers["num_elements"] = sum(int(np.count_nonzero(chunk)) for chunk in chunks.values())
    file.write(tfrecord(encode_meta(SplitMeta(numbers, found.fill_rate, sliding))))
    for offset, chunk in chunks.items():
        file.write(tfrecord(encode_data(offset, chunk)))


def _used_chunks(cells: _Cells) -> list[int]:
    """Return where the chunks begin that are not all empty. Most of a filter is: four cells are one look."""
    whole = len(cells) // 4 * 4
    used = np.flatnonzero(cells[:whole].view(np.uint64)) * 4
    rest = whole + np.flatnonzero(cells[whole:])
    found: list[int] = np.unique(np.concatenate([used, rest]) // CELLS_PER_RECORD).tolist()
    return [chunk * CELLS_PER_RECORD for chunk in found]


def restore(core: native.SlidingFilter, basename: str) -> None:
    """Read a filter of the same capacity and splits; everything is checked before it is touched.

    Raises:
        RestoreError: Files are missing, of different filters, or of one unlike this.
        CorruptFileError: A file is damaged; says where.
    """
    paths = find_sharded(basename)
    metas = [_check_split(core, path) for path in paths]
    for path, meta in zip(paths, metas, strict=True):
        if meta.sliding != metas[0].sliding:
            raise RestoreError(
                f"cannot restore the sliding filter: {path} was saved at another moment than {paths[0]}. "
                "Use files that were saved together."
            )
    if len(paths) != metas[0].sliding["split_num"]:
        raise RestoreError(
            f"cannot restore the sliding filter: {basename} has {len(paths)} files, "
            f"it was saved with split_num {metas[0].sliding['split_num']}"
        )
    try:
        core.restore(native.SlidingFilterMeta(**metas[0].sliding))
    except ValueError as cause:
        raise RestoreError(f"{basename}: {cause}") from cause
    for split, (path, meta) in enumerate(zip(paths, metas, strict=True)):
        core.restore_split(split, native.FilterSplitMeta(**meta.split, fill_rate=meta.fill_rate))
        for offset, cells in _read(path)[1]:
            core.write_cells(split, offset, cells)


def inspect(basename: str, *, verify: bool = False) -> list[SplitMeta]:
    """Return what the files of a filter say of themselves, in order; with `verify`, after reading them.

    Raises:
        RestoreError: Files are missing.
        CorruptFileError: A file is damaged; says where.
    """
    metas = []
    for path in find_sharded(basename):
        meta, chunks = _read(path)
        if verify:
            _check_used(path, meta, sum(int(np.count_nonzero(cells)) for _, cells in chunks))
        metas.append(meta)
    return metas


def _check_split(core: native.SlidingFilter, path: str) -> SplitMeta:
    """Read a file to its end and return its meta, if it is sound and fits the filter."""
    meta, chunks = _read(path)
    running = core.split_meta(0)
    for name, saved, mine in (
        ("split_num", meta.sliding["split_num"], core.split_num),
        ("total_size", meta.split["total_size"], running.total_size),
        ("fill_rate", meta.fill_rate, running.fill_rate),
    ):
        if saved != mine:
            raise RestoreError(
                f"cannot restore the sliding filter from {path}: it was saved with {name} {saved}, this one "
                f"has {mine}. Restore with the capacity and split_num it was saved with."
            )
    end = used = 0
    for offset, cells in chunks:
        if offset < end or offset + len(cells) > core.cells_per_split:
            raise RestoreError(
                f"cannot restore the sliding filter from {path}: cells {offset} to {offset + len(cells)} "
                f"come after cell {end} of {core.cells_per_split}"
            )
        end = offset + len(cells)
        used += int(np.count_nonzero(cells))
    _check_used(path, meta, used)
    return meta


def _check_used(path: str, meta: SplitMeta, used: int) -> None:
    # Upstream counts no more elements than the capacity, so there may be more cells than elements.
    if used < meta.split["num_elements"]:
        raise CorruptFileError(
            path,
            _size(path),
            f"it ends after {used} cells in use of {meta.split['num_elements']}",
        )


def _read(path: str) -> tuple[SplitMeta, Iterator[tuple[int, _Cells]]]:
    found = _records(path)
    at, payload = next(found, (0, None))
    if payload is None:
        raise CorruptFileError(path, 0, "the file is empty; it should begin with a HashFilterSplitMetaDump")
    try:
        meta = decode_meta(payload)
    except ValueError as cause:
        raise CorruptFileError(path, at, f"not a HashFilterSplitMetaDump: {cause}") from cause
    return meta, _data(found, path)


def _records(path: str) -> Iterator[tuple[int, bytes]]:
    with filesystem.open_read(path) as file:
        yield from records(file, path)


def _data(found: Iterator[tuple[int, bytes]], path: str) -> Iterator[tuple[int, _Cells]]:
    for at, payload in found:
        try:
            yield decode_data(payload)
        except ValueError as cause:
            raise CorruptFileError(path, at, f"not a HashFilterSplitDataDump: {cause}") from cause


def _size(path: str) -> int:
    with filesystem.open_read(path) as file:
        return file.seek(0, 2)


def _numbers(meta: object, names: tuple[str, ...]) -> dict[str, int]:
    return {name: int(getattr(meta, name)) for name in names}


# The two messages


def encode_meta(meta: SplitMeta) -> bytes:
    """Return a HashFilterSplitMetaDump."""
    sliding = _varint_fields(meta.sliding, _SLIDING_FIELDS)
    return b"".join(
        (
            _varint_fields(meta.split, _SPLIT_FIELDS),
            struct.pack("<Bd", 4 << 3 | _FIXED64, meta.fill_rate),
            _varint(5 << 3 | _BYTES),
            _varint(len(sliding)),
            sliding,
        )
    )


def decode_meta(message: bytes) -> SplitMeta:
    """Read a HashFilterSplitMetaDump. Raises ValueError for what is none."""
    found = _fields(message)
    rate = _last(found, 4, bytes)
    if len(rate) != 8:
        raise ValueError("fill_rate is not a double")
    (fill_rate,) = struct.unpack("<d", rate)
    return SplitMeta(
        _named(found, _SPLIT_FIELDS), fill_rate, _named(_fields(_last(found, 5, bytes)), _SLIDING_FIELDS)
    )


def encode_data(offset: int, cells: _Cells) -> bytes:
    """Return a HashFilterSplitDataDump; a cell is a tag and one to three bytes of varint."""
    head, tag = _varint(1 << 3 | _VARINT) + _varint(offset), 2 << 3 | _VARINT
    if len(cells) and cells.max() < 1 << 7:  # as where few ids were seen: one byte each
        return head + (cells << 8 | tag).astype("<u2").tobytes()
    value = cells.astype(np.uint32)
    table = np.empty((len(cells), 4), np.uint8)
    table[:, 0] = tag
    more = (value >= 1 << 7, value >= 1 << 14)
    table[:, 1] = value & 0x7F | more[0].astype(np.uint32) << 7
    table[:, 2] = value >> 7 & 0x7F | more[1].astype(np.uint32) << 7
    table[:, 3] = value >> 14
    written = np.ones(table.shape, np.bool_)
    written[:, 2], written[:, 3] = more
    return head + table[written].tobytes()


def decode_data(message: bytes) -> tuple[int, _Cells]:
    """Read a HashFilterSplitDataDump: offset and cells. Raises ValueError for what is none."""
    offset, cells = _plain_data(message) or _any_data(message)
    if offset > _UINT32 or (len(cells) and int(cells.max()) > np.iinfo(np.uint16).max):
        raise ValueError("an offset or a cell is out of range")
    return offset, cells.astype(np.uint16)


def _plain_data(message: bytes) -> tuple[int, NDArray[np.uint64]] | None:
    """Read the message as `encode_data` and upstream write it; None if it is written otherwise."""
    try:
        numbers = _varints(message)
    except ValueError:
        return None
    tags, values = numbers[0::2], numbers[1::2]
    if len(tags) != len(values) or not np.isin(tags, (1 << 3, 2 << 3)).all():
        return None
    offsets = values[tags == 1 << 3]
    return int(offsets[-1]) if len(offsets) else 0, values[tags == 2 << 3]


def _any_data(message: bytes) -> tuple[int, NDArray[np.uint64]]:
    """Read the message field by field: cells may be packed, and fields come that we do not know."""
    found = _fields(message)
    parts = [_varints(part if isinstance(part, bytes) else _varint(part)) for part in found.get(2, [])]
    return _last(found, 1, int, 0), np.concatenate([np.empty(0, np.uint64), *parts])


def _varints(message: bytes) -> NDArray[np.uint64]:
    """Read bytes that are nothing but varints."""
    data = np.frombuffer(message, np.uint8)
    ends = np.flatnonzero(data < 0x80)
    if len(data) and (not len(ends) or ends[-1] != len(data) - 1):
        raise ValueError("it ends inside a varint")
    starts = np.append(0, ends + 1)[:-1]
    longest = int((ends - starts).max(initial=0)) + 1
    if longest > 10:
        raise ValueError("a varint has more than ten bytes")
    numbers = np.zeros(len(ends), np.uint64)
    for place in range(longest):
        has = starts + place <= ends
        seven_bits = data[starts[has] + place].astype(np.uint64) & np.uint64(0x7F)
        numbers[has] |= seven_bits << np.uint64(7 * place)
    return numbers


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def _varint_fields(numbers: dict[str, int], names: tuple[str, ...]) -> bytes:
    return b"".join(
        _varint(field << 3 | _VARINT) + _varint(numbers[name]) for field, name in enumerate(names, start=1)
    )


def _fields(message: bytes) -> _Fields:
    """Return all values of each field of a message: varints as numbers, the rest as bytes."""
    found: _Fields = {}
    at = 0
    while at < len(message):
        key, at = _varint_at(message, at)
        field, wire = key >> 3, key & 7
        if not 1 <= field < 1 << 29:
            raise ValueError(f"field number {field} is out of range")
        value: int | bytes
        if wire == _VARINT:
            value, at = _varint_at(message, at)
        elif wire in (_FIXED64, _FIXED32, _BYTES):
            size, at = _varint_at(message, at) if wire == _BYTES else ({_FIXED64: 8, _FIXED32: 4}[wire], at)
            if size > len(message) - at:
                raise ValueError(f"field {field} reaches past the end")
            value, at = message[at : at + size], at + size
        else:
            raise ValueError(f"field {field} has the wire type {wire}")
        found.setdefault(field, []).append(value)
    return found


def _varint_at(message: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            raise ValueError("it ends inside a varint")
        number |= (message[at] & 0x7F) << shift
        at += 1
        if message[at - 1] < 0x80:
            return number & _UINT64, at
    raise ValueError("a varint has more than ten bytes")


def _last(found: _Fields, field: int, kind: type[Any], default: Any = None) -> Any:
    """Return a field's value, the last one if it comes twice, as protobuf does."""
    value = found.get(field, [default])[-1]
    if not isinstance(value, kind):
        raise ValueError(f"field {field} is missing or of another type")
    return value


def _named(found: _Fields, names: tuple[str, ...]) -> dict[str, int]:
    """Return varint fields 1, 2, ... by name; an absent one is 0."""
    numbers = {name: _last(found, field, int, 0) for field, name in enumerate(names, start=1)}
    for name, number in numbers.items():
        if number > (_UINT64 if name in ("failure_count", "total_size", "num_elements") else _UINT32):
            raise ValueError(f"{name} is out of range: {number}")
    return numbers
