"""Named arrays, and records, as bytes: what the joiner keeps on disk.

Little-endian, in this order:

    head     magic "MONOCOLS", version, length and CRC of the description, length and CRC of the payload
    description  JSON: what the writer has to say, then name, dtype and count of every array
    payload  the arrays, each filled up with zeros to a multiple of 8 bytes

CRC is CRC-32C. Lengths and checksums are compared before anything is believed, so a file
that was cut or altered is refused with its name and the byte where it went wrong.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from monolith import native
from monolith.data.records import Records
from monolith.errors import CorruptFileError
from monolith.feature import ColumnKind
from monolith.tensors import RaggedTensor

_HEAD = struct.Struct("<8sIIIIQ")
_MAGIC, _VERSION, _ALIGN = b"MONOCOLS", 1, 8
_DTYPES = {name: np.dtype(f"<{name}") for name in ("i8", "f4", "u1")}

Arrays = dict[str, NDArray[Any]]


def pack(about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return JSON-able values and one-dimensional arrays of int64, float32 or uint8 as bytes."""
    named = [(name, _short(array.dtype), len(array)) for name, array in arrays.items()]
    description = json.dumps({"about": about, "arrays": named}).encode()
    parts = []
    for array in arrays.values():
        raw = np.ascontiguousarray(array).tobytes()
        parts += [raw, b"\0" * (-len(raw) % _ALIGN)]
    payload = b"".join(parts)
    head = _HEAD.pack(
        _MAGIC,
        _VERSION,
        len(description),
        native.crc32c(description),
        native.crc32c(payload),
        len(payload),
    )
    return head + description + payload


def unpack(data: bytes, path: str) -> tuple[dict[str, Any], Arrays]:
    """Return what `pack` was given; the arrays may be written to.

    Args:
        path: Where the bytes came from, for the error.

    Raises:
        CorruptFileError: They are not what `pack` returned.
    """
    if len(data) < _HEAD.size:
        raise CorruptFileError(
            path, len(data), f"{len(data)} bytes are too few for the {_HEAD.size} of a head"
        )
    magic, version, about_bytes, about_crc, payload_crc, payload_bytes = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise CorruptFileError(path, 0, f"begins with {magic!r} version {version}, not {_MAGIC!r} {_VERSION}")
    begin = _HEAD.size + about_bytes
    if len(data) != begin + payload_bytes:
        raise CorruptFileError(
            path,
            min(len(data), begin + payload_bytes),
            f"has {len(data)} bytes, its head says {begin + payload_bytes}",
        )
    writable = bytearray(data)  # arrays over bytes are read-only, which torch does not take well
    view = memoryview(writable)
    if native.crc32c(bytes(view[_HEAD.size : begin])) != about_crc:
        raise CorruptFileError(path, _HEAD.size, "the description does not match its checksum")
    if native.crc32c(bytes(view[begin:])) != payload_crc:
        raise CorruptFileError(path, begin, "the payload does not match its checksum")
    description = json.loads(data[_HEAD.size : begin])
    arrays: Arrays = {}
    for name, short, count in description["arrays"]:
        dtype = _DTYPES[short]
        arrays[name] = np.frombuffer(writable, dtype, count, begin)
        begin += count * dtype.itemsize + (-count * dtype.itemsize % _ALIGN)
    return description["about"], arrays


def records_to_bytes(records: Records) -> bytes:
    """Return records as bytes, column by column."""
    arrays: Arrays = {}
    for name, column in records.columns.items():
        arrays[f"{name}/values"] = column.flat_values.numpy()
        arrays[f"{name}/rows"] = column.row_splits.numpy()
        if isinstance(column.values, RaggedTensor):
            arrays[f"{name}/texts"] = column.values.row_splits.numpy()
    about = {
        "size": records.size,
        "columns": list(records.columns),
        "shared": sorted(records.shared),
        "kinds": {name: [kind.type, kind.single] for name, kind in records.kinds.items()},
    }
    return pack(about, arrays)


def records_from_bytes(data: bytes, path: str) -> Records:
    """Return what `records_to_bytes` was given.

    Raises:
        CorruptFileError: The bytes of `path` are not that.
    """
    about, arrays = unpack(data, path)
    columns = {}
    for name in about["columns"]:
        values: torch.Tensor | RaggedTensor = torch.from_numpy(arrays[f"{name}/values"])
        if f"{name}/texts" in arrays:
            values = RaggedTensor(values, torch.from_numpy(arrays[f"{name}/texts"]), validate=False)
        columns[name] = RaggedTensor(values, torch.from_numpy(arrays[f"{name}/rows"]), validate=False)
    # Files of an earlier version do not say how the data held their columns.
    kinds = {name: ColumnKind(*kind) for name, kind in about.get("kinds", {}).items()}
    return Records(about["size"], columns, frozenset(about["shared"]), kinds=kinds)


def _short(dtype: np.dtype[Any]) -> str:
    return next(name for name, known in _DTYPES.items() if known == dtype)
