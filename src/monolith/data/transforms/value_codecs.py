"""Compressed numbers: a list of floats as one string of bytes, for features that travel far.

    f16      half precision
    bf16     the upper 16 bits of a float32; the lower ones are cut off
    qtz8mm   the smallest and the largest as f16, then a byte per number for its place
             between them. Lists of up to four numbers are f16 instead

All little-endian.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from monolith.data.records import Records
from monolith.data.transforms.columns import read_column
from monolith.data.transforms.transform import Rewrite
from monolith.errors import DataError
from monolith.tensors import RaggedTensor

Codec = Literal["f16", "bf16", "qtz8mm"]

_HALF = np.dtype("<f2")
_SHORT = 4
"""The longest list that qtz8mm keeps as f16."""
_HEAD_BYTES = 2 * _HALF.itemsize
_CODES = 255


def encode_values(column: RaggedTensor, codec: Codec) -> RaggedTensor:
    """Return each row of float32 as one string, and an empty row as none.

    Raises:
        DataError: A number is beyond half precision, and the codec needs that.
    """
    values, lengths = column.flat_values.numpy(), column.row_lengths().numpy()
    if codec == "bf16":
        return _one_string_each(_bytes((values.view(np.uint32) >> 16).astype("<u2")), 2 * lengths)
    if codec == "f16":
        return _one_string_each(_bytes(_halves(values)), 2 * lengths)
    is_long = lengths > _SHORT
    sizes = np.where(is_long, _HEAD_BYTES + lengths, 2 * lengths)
    begins = np.cumsum(sizes) - sizes
    row = column.value_rowids.numpy()
    place = np.arange(len(values)) - column.row_splits.numpy()[row]
    out = np.empty(int(sizes.sum()), np.uint8)

    short = ~is_long[row]
    at = begins[row[short]] + 2 * place[short]
    out[at[:, None] + np.arange(2)] = _bytes(_halves(values[short])).reshape(-1, 2)

    numbers, counts = values[~short], lengths[is_long]
    if len(counts):
        starts = np.cumsum(counts) - counts
        ends = np.stack([np.minimum.reduceat(numbers, starts), np.maximum.reduceat(numbers, starts)], axis=1)
        bounds = _halves(ends)  # what a reader will have
        out[begins[is_long][:, None] + np.arange(_HEAD_BYTES)] = _bytes(bounds).reshape(-1, _HEAD_BYTES)
        low, step = (np.repeat(part, counts) for part in _low_and_step(bounds))
        steps = np.divide(numbers - low, step, out=np.zeros(len(numbers)), where=step > 0)
        codes = np.clip(np.floor(steps + 0.5), 0, _CODES)
        out[begins[row[~short]] + _HEAD_BYTES + place[~short]] = codes.astype(np.uint8)
    return _one_string_each(out, sizes)


def decode_values(column: RaggedTensor, codec: Codec) -> RaggedTensor:
    """Return the float32 numbers of strings that `encode_values` made, at most one per record.

    Raises:
        DataError: A record has several strings, or one of a length that no list gives.
    """
    texts = column.values
    assert isinstance(texts, RaggedTensor)
    data = texts.flat_values.numpy()
    sizes = np.zeros(column.nrows, np.int64)
    if bool((column.row_lengths() > 1).any()):
        raise DataError(f"cannot decode {codec} values: a record has more than one string")
    sizes[column.row_lengths().numpy() == 1] = texts.row_lengths().numpy()
    is_long = sizes > 2 * _SHORT if codec == "qtz8mm" else np.zeros(len(sizes), np.bool_)
    if (sizes[~is_long] % 2).any():
        raise DataError(
            f"cannot decode {codec} values: a string of up to {sizes[~is_long].max()} bytes has an odd length"
        )
    if codec == "bf16":
        upper = np.frombuffer(data.tobytes(), "<u2").astype(np.uint32) << 16
        return _floats(upper.view(np.float32), sizes // 2)
    counts = np.where(is_long, sizes - _HEAD_BYTES, sizes // 2)
    begins = np.cumsum(sizes) - sizes
    row = np.repeat(np.arange(len(sizes)), counts)
    place = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
    out = np.empty(len(row), np.float32)

    short = ~is_long[row]
    at = begins[row[short]] + 2 * place[short]
    out[short] = _from_bytes(data[at[:, None] + np.arange(2)])[:, 0]
    if is_long.any():
        bounds = _from_bytes(data[begins[is_long][:, None] + np.arange(_HEAD_BYTES)])
        low, step = (np.repeat(part, counts[is_long]) for part in _low_and_step(bounds))
        out[~short] = low + step * data[begins[row[~short]] + _HEAD_BYTES + place[~short]]
    return _floats(out, counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeValues(Rewrite):
    """Compresses a column of numbers into a column of strings."""

    column: str
    codec: Codec
    into: str | None = None
    """The column to write; None for the same one."""

    def rewrite(self, records: Records) -> Records:
        encoded = encode_values(read_column(records, self.column, torch.float32), self.codec)
        return records.with_columns({self.into or self.column: encoded})


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeValues(Rewrite):
    """Turns a column of strings back into the numbers that were compressed into it."""

    column: str
    codec: Codec
    into: str | None = None
    """The column to write; None for the same one."""

    def rewrite(self, records: Records) -> Records:
        decoded = decode_values(read_column(records, self.column, torch.uint8), self.codec)
        return records.with_columns({self.into or self.column: decoded})


def _halves(numbers: NDArray[np.float32]) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        halves = numbers.astype(_HALF)
    if not np.isfinite(halves).all():
        worst = float(numbers[~np.isfinite(halves)].flat[0])
        raise DataError(f"cannot encode {worst} in half precision, which ends at 65504; use bf16")
    return halves


def _low_and_step(bounds: NDArray[np.float16]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the smallest number and the width of a code, for rows of (smallest, largest)."""
    low, high = bounds.astype(np.float64).T
    return low, (high - low) / _CODES


def _bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.frombuffer(array.tobytes(), np.uint8)


def _from_bytes(rows: NDArray[np.uint8]) -> NDArray[np.float16]:
    """Return rows of half floats from rows of bytes."""
    return np.ascontiguousarray(rows).view(_HALF)


def _floats(values: NDArray[np.float32], counts: NDArray[np.int64]) -> RaggedTensor:
    return RaggedTensor.from_row_lengths(torch.from_numpy(values), torch.from_numpy(counts), validate=False)


def _one_string_each(data: NDArray[np.uint8], sizes: NDArray[np.int64]) -> RaggedTensor:
    """Return a column of strings, given end to end; a record of size 0 has none."""
    flat = torch.from_numpy(data.copy())
    present = torch.from_numpy((sizes > 0).astype(np.int64))
    texts = RaggedTensor.from_row_lengths(flat, torch.from_numpy(sizes[sizes > 0]), validate=False)
    return RaggedTensor.from_row_lengths(texts, present, validate=False)
