"""Tensors as the Open Inference Protocol sends them, and the columns that a model takes.

Whatever came is checked here, against itself and against the model's signature, before anything works on
it: a datatype that is none, a shape that does not fit the bytes, lengths that lead outside.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monolith import native
from monolith.errors import RequestError, RequestTooLargeError
from monolith.serve.candidates import CandidateColumns
from monolith.serve.manifest import Signature, TensorSpec
from monolith.wire.open_inference import (
    BF16,
    DTYPES,
    LENGTH_BYTES,
    SPLITS,
    read_bfloat16,
    unsigned_kept,
    values_dtype,
    write_bfloat16,
)

DATATYPES = ("BYTES", BF16, *DTYPES)
TIME = "time"
"""The meaning of an input of times, which may be texts."""
_MOST_DIMENSIONS = 8
_MOST_TEXTS = 1 << 20
"""Of one input; each takes some 50 bytes of memory, and as few as 4 in a message."""

Values = NDArray[Any] | list[bytes]


@dataclass(slots=True)
class WireTensor:
    """A named tensor; its values one after another, the last dimension fastest."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Values
    row_ends: NDArray[np.int64] | None = None
    """Where some rows have no value: 0, and after how many values each row ends."""


def raw_tensor(name: str, datatype: str, shape: Sequence[int], data: bytes | memoryview) -> WireTensor:
    """Return the tensor that these bytes are. They are borrowed, not copied, but for BYTES.

    Raises:
        RequestError: They are not one.
    """
    dims = tuple(shape)
    count = _count(name, dims)
    if datatype == "BYTES":
        return WireTensor(name, datatype, dims, _read_texts(name, count, data))
    dtype = values_dtype(datatype)
    if dtype is None:
        raise _no_datatype(name, datatype)
    width = 2 if datatype == BF16 else dtype.itemsize
    if len(data) != count * width:
        raise RequestError(
            f"input {name!r}: {datatype} of shape {list(dims)} takes {count * width} bytes, got {len(data)}"
        )
    values = read_bfloat16(data) if datatype == BF16 else np.frombuffer(data, dtype)
    return WireTensor(name, datatype, dims, values)


def listed_tensor(name: str, datatype: str, shape: Sequence[int], values: Iterable[Any]) -> WireTensor:
    """Return the tensor of plain values, flat: numbers, booleans, or texts for BYTES.

    A value may be None: it is missing, as an empty cell of a CSV. Where rows have several numbers it keeps
    its place, as NaN.

    Raises:
        RequestError: A value is not of that datatype, or there are more or fewer than the shape says.
    """
    dims = tuple(shape)
    count = _count(name, dims)
    given = list(values)
    if len(given) != count:
        lists = f". Send lists of different lengths as all values, with {name}.row_splits (INT64, rows + 1)"
        raise RequestError(
            f"input {name!r}: shape {list(dims)} takes {count} values, got {len(given)}"
            f"{lists if len(given) > count else ''}"
        )
    ends = None
    dtype = values_dtype(datatype)
    has_none = type(None) in _types(given)
    if has_none and len(dims) == 2 and dtype is not None and dtype.kind == "f":
        given = [math.nan if one is None else one for one in given]
    elif has_none and len(dims) in (1, 2):
        there = np.array([one is not None for one in given]).reshape(dims[0], -1)
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(there.sum(1), dtype=np.int64)])
    read: Values
    if datatype == "BYTES":
        read = [_text(name, row, one) for row, one in enumerate(given) if one is not None or ends is None]
    else:
        if dtype is None:
            raise _no_datatype(name, datatype)
        read = _numbers(name, datatype, dtype, given, ends is not None)
        if datatype == BF16:
            read = read_bfloat16(write_bfloat16(read))
    return WireTensor(name, datatype, dims, read, ends)


def ragged_tensor(name: str, datatype: str, rows: Sequence[Sequence[Any]]) -> WireTensor:
    """Return the tensor of a list of plain values for each row; one that is None is left out.

    Raises:
        RequestError: A value is not of that datatype.
    """
    there = [[one for one in row if one is not None] for row in rows]
    ends = np.cumsum([0, *map(len, there)], dtype=np.int64)
    flat = listed_tensor(name, datatype, (int(ends[-1]),), [one for row in there for one in row])
    return replace(flat, shape=(len(rows),), row_ends=ends)


def raw_bytes(values: Values) -> bytes:
    """Return the bytes of a raw tensor."""
    if isinstance(values, list):
        return b"".join(part for one in values for part in (len(one).to_bytes(LENGTH_BYTES, "little"), one))
    return np.ascontiguousarray(values).tobytes()


def output_tensor(name: str, values: NDArray[Any]) -> WireTensor:
    """Return an output of a model as a tensor."""
    if values.dtype == np.float32:  # nearly always
        return WireTensor(name, "FP32", values.shape, values.reshape(-1))
    for datatype, dtype in DTYPES.items():
        if values.dtype == dtype:
            return WireTensor(name, datatype, values.shape, values.reshape(-1))
    return WireTensor(name, "FP32", values.shape, values.astype(np.float32).reshape(-1))


PACKED = (("packed", b""),)
"""The layout of rows that the core has packed out of the bytes of a request."""
PackedRequest = native.PackedRows | native.PackedRanking


@dataclass(slots=True)
class RequestColumns:
    """What a model is asked, checked."""

    values: Any
    """Columns by name, or what the core has packed."""
    rows: int
    layout: tuple[tuple[str, int | bytes], ...]
    """Name and width of each column: requests of one layout can be answered together."""
    shared: frozenset[str] = frozenset()
    """Columns with one row, which holds for all; their row splits included. See `candidates`."""

    @classmethod
    def of_packed(cls, packed: PackedRequest) -> RequestColumns:
        if isinstance(packed, native.PackedRanking):
            # Requests that have other inputs with one row are not merged with this one.
            return cls(packed, packed.items.rows, (("ranking", packed.own),))
        return cls(packed, packed.rows, PACKED)

    @property
    def asked(self) -> dict[str, Any] | PackedRequest | CandidateColumns:
        """What a predictor is asked."""
        return self.values if not self.shared else merged([self])

    def part(self, begin: int, end: int) -> RequestColumns:
        """Return some of the rows, without a copy of arrays."""
        if isinstance(self.values, PackedRequest):
            return RequestColumns(self.values.part(begin, end), end - begin, self.layout)
        values: dict[str, Any] = {}
        for name, column in self.values.items():
            ends = self.values.get(name + SPLITS)
            if name in self.shared:
                values[name] = column
            elif name.endswith(SPLITS) and name.removesuffix(SPLITS) in self.values:
                values[name] = column[begin : end + 1] - column[begin]
            elif ends is not None:
                values[name] = column[int(ends[begin]) : int(ends[end])]
            else:
                values[name] = column[begin:end]
        return RequestColumns(values, end - begin, self.layout, self.shared)


def columns_of(tensors: Sequence[WireTensor], signature: Signature) -> RequestColumns:
    """Return tensors as columns of a model.

    Raises:
        RequestError: The model has no such input, or it is of another type or shape, or has other rows; one
            row next to more holds for all of them.
    """
    if not tensors:
        raise RequestError("the request has no inputs; it needs " + _names(signature))
    known = {spec.name: spec for spec in signature.inputs}
    given: dict[str, WireTensor] = {}
    for tensor in tensors:
        if tensor.name in given:
            raise RequestError(f"input {tensor.name!r} is given twice")
        given[tensor.name] = tensor
    values: dict[str, Any] = {}
    layout: list[tuple[str, int | bytes]] = []
    sizes: dict[str, int] = {}
    for name, tensor in given.items():
        if name not in known:
            if name.endswith(SPLITS) and name.removesuffix(SPLITS) in given:
                continue
            raise RequestError(f"the model has no input {name!r}; it takes {_names(signature)}")
        splits = given.get(name + SPLITS)
        ends = tensor.row_ends if splits is None else _splits(splits, tensor)
        if ends is None:
            column, found, width = _fixed(tensor, known[name])
        else:
            column, found, width = _typed(tensor, known[name]), len(ends) - 1, -1
            values[name + SPLITS] = ends
        sizes[name] = found
        values[name] = column
        is_text = known[name].datatype != "BYTES" and isinstance(column, list)
        layout.append(
            (f"{name} as text" if is_text else name, width)
        )  # not to be laid end to end with numbers
    rows = _row_count(sizes)
    shared = frozenset(name for name, size in sizes.items() if size != rows)
    if shared:
        # Requests with other columns of one row are not merged with this one: their columns differ in rows.
        layout += [(f"{name} for all rows", 0) for name in shared]
        shared |= {name + SPLITS for name in shared if name + SPLITS in values}
    layout.sort()
    return RequestColumns(values, rows, tuple(layout), shared)


def _row_count(sizes: Mapping[str, int]) -> int:
    """Return how many rows a request has: inputs with one row do not count where others have more."""
    first = next(iter(sizes.values()))
    if set(sizes.values()) == {first}:
        return first
    rows = first
    for name, size in sizes.items():
        if rows == 1:
            rows = size
        elif size not in (1, rows):
            raise RequestError(f"input {name!r} has {size} rows, those before it have {rows}")
    return rows


def merged(parts: Sequence[RequestColumns]) -> dict[str, Any] | PackedRequest | CandidateColumns:
    """Return the rows of all parts, which have one layout, one after another."""
    if isinstance(parts[0].values, native.PackedRows):
        return native.join_rows([part.values for part in parts])
    if isinstance(parts[0].values, native.PackedRanking):
        return native.join_rankings([part.values for part in parts])
    whole = _merged_values(parts) if len(parts) > 1 else parts[0].values
    shared = parts[0].shared
    if not shared:
        return whole
    return CandidateColumns(
        {name: column for name, column in whole.items() if name in shared},
        {name: column for name, column in whole.items() if name not in shared},
        np.array([part.rows for part in parts], np.int64),
    )


def _merged_values(parts: Sequence[RequestColumns]) -> dict[str, Any]:
    first = parts[0].values
    whole: dict[str, Any] = {}
    for name in first:
        columns = [part.values[name] for part in parts]
        if name.endswith(SPLITS) and name.removesuffix(SPLITS) in first:
            whole[name] = _joined_splits(columns)
        elif isinstance(columns[0], list):
            whole[name] = [one for column in columns for one in column]
        else:
            whole[name] = np.concatenate(columns)
    return whole


def _joined_splits(columns: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    before = 0
    joined = [np.zeros(1, np.int64)]
    for ends in columns:
        joined.append(ends[1:] + before)
        before += int(ends[-1])
    return np.concatenate(joined)


def _count(name: str, shape: tuple[int, ...]) -> int:
    if len(shape) > _MOST_DIMENSIONS:
        raise RequestError(f"input {name!r} has {len(shape)} dimensions; the most are {_MOST_DIMENSIONS}")
    if shape and min(shape) < 0:
        raise RequestError(f"input {name!r}: no dimension can be negative, got the shape {list(shape)}")
    return math.prod(shape)


def _read_texts(name: str, count: int, data: bytes | memoryview) -> list[bytes]:
    if count > _MOST_TEXTS:
        raise RequestTooLargeError(
            f"input {name!r} has {count} texts; the most of one input are {_MOST_TEXTS}. Send several "
            "requests."
        )
    whole = bytes(data)
    size = len(whole)
    if count * LENGTH_BYTES > size:
        raise RequestError(
            f"input {name!r}: {count} texts with their lengths take at least {count * LENGTH_BYTES} bytes, "
            f"got {size}"
        )
    texts: list[bytes] = []
    at = 0
    for number in range(count):
        begin = at + LENGTH_BYTES
        end = begin + int.from_bytes(whole[at:begin], "little")
        if begin > size or end > size:
            raise RequestError(
                f"input {name!r}: text {number} at byte {at} would end at {end}, the tensor at {size}"
            )
        texts.append(whole[begin:end])
        at = end
    if at != size:
        raise RequestError(f"input {name!r}: {size - at} bytes are left after its {count} texts")
    return texts


def _text(name: str, row: int, value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise RequestError(f"input {name!r}: value {row} must be a text, got {_shown(value)}")
    try:
        return value.encode()
    except UnicodeEncodeError as cause:
        raise RequestError(f"input {name!r}: value {row} is half of a character") from cause


def _types(values: Iterable[Any]) -> set[type]:
    return set(map(type, values))


def _numbers(
    name: str, datatype: str, dtype: np.dtype[Any], given: list[Any], may_miss: bool
) -> NDArray[Any]:
    allowed = {"b": (bool,), "i": (int,), "u": (int,), "f": (int, float)}[dtype.kind]
    values = [one for one in given if one is not None] if may_miss else given
    plain = not values or _types(values) <= {*allowed}  # a look at each value costs more than all the rest
    for row, value in enumerate(() if plain else given):
        if value is None and may_miss:
            continue
        if not isinstance(value, allowed) or (dtype.kind != "b" and isinstance(value, bool)):
            raise RequestError(f"input {name!r}: value {row} must be of {datatype}, got {_shown(value)}")
    try:
        with np.errstate(over="ignore"):
            return np.array(values, dtype)
    except (OverflowError, ValueError) as cause:
        if datatype == "INT64" and (kept := unsigned_kept(values)) is not None:
            return kept
        raise RequestError(f"input {name!r}: a value is too large for {datatype}") from cause


def _fixed(tensor: WireTensor, spec: TensorSpec) -> tuple[Any, int, int]:
    """Return a column of rows of one width, how many rows, and the width; 0 for a value alone."""
    shape = tensor.shape
    if len(shape) not in (1, 2):
        raise RequestError(
            f"input {tensor.name!r} must have the shape [rows] or [rows, values], got {list(shape)}"
        )
    column = _typed(tensor, spec)
    if len(shape) == 1 or (shape[1] == 1 and len(spec.shape) == 1):
        return column, shape[0], 0
    width = shape[1]
    if len(spec.shape) == 2 and spec.shape[1] not in (-1, width):
        raise RequestError(
            f"input {tensor.name!r} must have {spec.shape[1]} values in each row, got the shape {list(shape)}"
        )
    if isinstance(column, list):
        return [column[row * width : (row + 1) * width] for row in range(shape[0])], shape[0], width
    return column.reshape(shape), shape[0], width


def _typed(tensor: WireTensor, spec: TensorSpec) -> Any:
    """Return values as a model takes them: texts, int64 or float32."""
    values = tensor.values
    if isinstance(values, list) and spec.meaning == TIME:
        return values
    if isinstance(values, list) or spec.datatype == "BYTES":
        if not isinstance(values, list) or spec.datatype != "BYTES":
            raise RequestError(f"input {tensor.name!r} must be {spec.datatype}, got {tensor.datatype}")
        return values
    if DTYPES[spec.datatype].kind == "f":
        with np.errstate(over="ignore"):
            return values.astype(np.float32, copy=False)
    if values.dtype.kind == "f":
        raise RequestError(
            f"input {tensor.name!r} must be {spec.datatype} or another whole number, got {tensor.datatype}"
        )
    if values.dtype == np.uint64 and spec.meaning != TIME:
        return values.view(np.int64)  # an unsigned ID keeps its bits, as in training
    if values.dtype == np.uint64 and values.size and int(values.max()) > np.iinfo(np.int64).max:
        raise RequestError(f"input {tensor.name!r}: {int(values.max())} is too large for INT64")
    return values.astype(np.int64, copy=False)


def _splits(splits: WireTensor, items: WireTensor) -> NDArray[np.int64]:
    ends = splits.values
    if (
        isinstance(ends, list)
        or ends.dtype.kind not in "iu"
        or len(splits.shape) != 1
        or len(ends) < 1
        or splits.row_ends is not None
    ):
        raise RequestError(f"input {splits.name!r} must be INT64 of the shape [rows + 1]")
    if len(items.shape) != 1:
        raise RequestError(
            f"input {items.name!r} must have one dimension, all items of all rows, with {splits.name!r}"
        )
    if items.row_ends is not None:
        raise RequestError(f"input {items.name!r}: no item can be null with {splits.name!r}; leave it out")
    whole = ends.astype(np.int64)
    if whole[0] != 0 or whole[-1] != len(items.values) or bool((np.diff(whole) < 0).any()):
        raise RequestError(
            f"input {splits.name!r} must rise from 0 to the {len(items.values)} items of {items.name!r}"
        )
    return whole


def _names(signature: Signature) -> str:
    names = [spec.name for spec in signature.inputs]
    return ", ".join(names[:40]) + (", ..." if len(names) > 40 else "")


def _no_datatype(name: str, datatype: str) -> RequestError:
    return RequestError(
        f"input {name[:80]!r}: there is no datatype {datatype[:20]!r}; one of {', '.join(DATATYPES)}"
    )


def _shown(value: object) -> str:
    return repr(value)[:60] if not isinstance(value, (list, dict)) else f"a {type(value).__name__}"
