"""Values of a column: filters by them, and lists of floats compressed to one string.

Most filters test a single value: `gt`, `in`, `startswith` and similar ones. Three test a list: does the
record have `all` of the operands, `any` of them, or none (`diff`)?

Compressed lists, for features that travel far, all little-endian:

    f16      half precision
    bf16     the upper 16 bits of a float32; the lower ones are cut off
    qtz8mm   the smallest and the largest as f16, then a byte per number that interpolates between them;
             lists of up to four numbers are f16 instead
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith import filesystem
from monolith.data.records import Records
from monolith.data.transforms.columns import (
    parse_integer,
    parse_number,
    read_column,
    rows_count,
    rows_with_any,
    signed,
)
from monolith.data.transforms.transform import Filter, Rewrite
from monolith.errors import ConfigError, DataError
from monolith.tensors import RaggedTensor, ranges

Op = Literal[
    "gt", "ge", "eq", "lt", "le", "neq", "between", "in", "not-in",
    "all", "any", "diff", "startswith", "endswith",
]  # fmt: skip
Operand = int | float | str

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "lt": operator.lt,
    "le": operator.le,
    "neq": operator.ne,
}
ORDERED = frozenset({"gt", "ge", "lt", "le", "between"})
"""Need an order, which strings do not have here."""
TEXT_ONLY = frozenset({"startswith", "endswith"})
ON_LISTS = frozenset({"all", "any", "diff"})
"""Test all values of a record; the remaining operators test its only one."""
SINGLE = frozenset(COMPARISONS)
"""Take exactly one operand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterByValue(Filter):
    """Keeps records by what they have in one column, such as `line_id.req_time` or a feature of numbers.

    A file of operands is read when the first records come.
    """

    any_thread = True

    column: str
    """What to look at."""
    op: Op
    """`between` is from the first operand up to, but without, the second."""
    operand: Operand | tuple[Operand, ...] = ()
    """One for comparisons, two for `between`, any number for other operators."""
    operand_file: str | None = None
    """In place of `operand`: a text file with one operand per line. Empty lines are skipped."""
    keep_empty: bool = False
    """Whether a record without a value is kept."""
    _from_file: list[str] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        operands = self._operands()
        if self.operand_file is not None:
            if operands:
                raise ConfigError(f"{self._name()}: give operand or operand_file, not both")
            return
        self._check_count(operands)
        kinds = {str if isinstance(one, str) else float for one in operands}
        if len(kinds) > 1:
            raise ConfigError(f"{self._name()}: operands must be all text or all numbers, got {operands!r}")
        if kinds == {str} and self.op in ORDERED:
            raise ConfigError(
                f"{self._name()}: strings have no order here; compare them with eq, in, startswith"
            )
        if kinds == {float} and self.op in TEXT_ONLY:
            raise ConfigError(f"{self._name()}: operands must be text, got {operands!r}")
        if any(isinstance(one, bool) for one in operands):
            raise ConfigError(f"{self._name()}: an operand must be a number or text, got {operands!r}")
        for one in operands:
            if isinstance(one, int) and signed(one) != one and self.op in ORDERED:
                raise ConfigError(f"{self._name()}: {one} is beyond the int64 that values are ordered as")

    def mask(self, records: Records) -> Tensor:
        if self.column not in records.columns:
            return torch.full((len(records),), self.keep_empty)
        column = records[self.column]
        operands = self._operands_for(column.dtype)
        empty = column.row_lengths() == 0
        if self.op in ON_LISTS:
            passed = self._ask_lists(column, operands)
        else:
            values = self._only_values(column)
            passed = torch.zeros(len(records), dtype=torch.bool)
            passed[~empty] = (
                self._ask_strings(values, operands)
                if isinstance(values, RaggedTensor)
                else self._ask_numbers(values, operands)
            )
        return torch.where(empty, torch.full_like(empty, self.keep_empty), passed)

    def _ask_numbers(self, values: Tensor, operands: Sequence[Any]) -> Tensor:
        if self.op in COMPARISONS:
            passed: Tensor = COMPARISONS[self.op](*_comparable(values, operands))
            return passed
        if self.op == "between":
            values, bounds = _comparable(values, operands)
            return (values >= bounds[0]) & (values < bounds[1])
        found = torch.isin(*_comparable(values, operands))
        return ~found if self.op == "not-in" else found

    def _ask_strings(self, texts: RaggedTensor, operands: Sequence[bytes]) -> Tensor:
        if self.op in TEXT_ONLY:
            found = torch.zeros(len(texts), dtype=torch.bool)
            for operand in operands:
                found |= _begins(texts, operand) if self.op == "startswith" else _ends(texts, operand)
            return found
        found = _is_one_of(texts, operands)
        return ~found if self.op in ("neq", "not-in") else found

    def _ask_lists(self, column: RaggedTensor, operands: Sequence[Any]) -> Tensor:
        values = column.values

        def among(some: Sequence[Any]) -> Tensor:
            if isinstance(values, RaggedTensor):
                return _is_one_of(values, some)
            return torch.isin(*_comparable(values, some))

        if self.op == "any":
            return rows_with_any(column, among(operands))
        if self.op == "diff":
            return ~rows_with_any(column, among(operands))
        passed = torch.ones(column.nrows, dtype=torch.bool)
        for operand in dict.fromkeys(operands):
            passed &= rows_count(column, among([operand])) > 0
        return passed

    def _only_values(self, column: RaggedTensor) -> Tensor | RaggedTensor:
        lengths = column.row_lengths()
        if bool((lengths > 1).any()):
            row = int((lengths > 1).nonzero()[0])
            raise DataError(
                f"{self._name()}: {self.op} asks about one value, but record {row} of the batch has "
                f"{int(lengths[row])}. For lists there are all, any and diff."
            )
        return column.values

    def _operands_for(self, dtype: torch.dtype) -> list[Any]:
        """Return the operands as values of the column's type."""
        operands: Sequence[Operand] = self._operands()
        from_text = self.operand_file is not None
        if self.operand_file is not None:
            operands = self._read_file(self.operand_file)
            self._check_count(operands)
        if dtype is torch.uint8:
            if self.op in ORDERED:
                raise DataError(f"{self._name()}: the column holds strings, which have no order here")
            if not all(isinstance(one, str) for one in operands):
                raise DataError(f"{self._name()}: the column holds strings, the operands are {operands!r}")
            return [str(one).encode() for one in operands]
        if self.op in TEXT_ONLY:
            raise DataError(f"{self._name()}: the column holds numbers, not strings")
        if from_text:
            where = f"{self._name()}: {self.operand_file}"
            if dtype is torch.int64:
                return [signed(parse_integer(str(one))) for one in operands]
            return [parse_number(str(one), where) for one in operands]
        if any(isinstance(one, str) for one in operands):
            raise DataError(f"{self._name()}: the column holds numbers, the operands are {operands!r}")
        return [signed(one) if isinstance(one, int) and dtype is torch.int64 else one for one in operands]

    def _read_file(self, path: str) -> list[str]:
        if not self._from_file:
            lines = filesystem.read_bytes(path).decode().splitlines()
            # All at once: another thread may be here, too.
            self._from_file[:] = [line.strip() for line in lines if line.strip()]
        return self._from_file

    def _operands(self) -> tuple[Operand, ...]:
        return self.operand if isinstance(self.operand, tuple) else (self.operand,)

    def _check_count(self, operands: Sequence[Operand]) -> None:
        wanted = 1 if self.op in SINGLE else 2 if self.op == "between" else None
        if not operands or (wanted is not None and len(operands) != wanted):
            expected = {1: "one operand", 2: "two operands", None: "at least one operand"}[wanted]
            raise ConfigError(f"{self._name()}: {self.op} takes {expected}, got {len(operands)}")

    def _name(self) -> str:
        return f"filter by value of {self.column!r}"


def _comparable(values: Tensor, operands: Sequence[int | float]) -> tuple[Tensor, Tensor]:
    """Return values and operands in one type: that of the column, or float64 for int64 and a fraction."""
    if values.dtype is torch.int64 and all(isinstance(one, int) for one in operands):
        return values, torch.tensor(operands, dtype=torch.int64)
    if values.dtype is torch.int64:
        return values.to(torch.float64), torch.tensor(operands, dtype=torch.float64)
    return values, torch.tensor(operands, dtype=torch.float32)


# Strings, end to end


def _begins(texts: RaggedTensor, prefix: bytes) -> Tensor:
    return _same_at(texts, texts.row_splits[:-1], prefix)


def _ends(texts: RaggedTensor, suffix: bytes) -> Tensor:
    return _same_at(texts, texts.row_splits[1:] - len(suffix), suffix)


def _same_at(texts: RaggedTensor, starts: Tensor, part: bytes) -> Tensor:
    """Return a mask of the texts that are long enough and have `part` where told."""
    same = texts.row_lengths() >= len(part)
    flat = texts.flat_values
    for place, byte in enumerate(part):
        rows = same.nonzero().squeeze(1)
        same[rows] = flat[starts[rows] + place] == byte
    return same


def _is_one_of(texts: RaggedTensor, wanted: Sequence[bytes]) -> Tensor:
    """Return a mask of the texts that equal one of `wanted`. Works through one length after the other."""
    lengths = texts.row_lengths()
    found = torch.zeros(len(texts), dtype=torch.bool)
    for size in {len(text) for text in wanted}:
        rows = (lengths == size).nonzero().squeeze(1)
        if not size:
            found[rows] = True
        elif len(rows):
            flat = texts.flat_values[ranges(texts.row_splits[rows], lengths[rows])].numpy()
            # numpy cuts zeros off the end, which cannot make two texts of one length equal.
            mine = np.ascontiguousarray(flat).view(f"S{size}")
            theirs = np.array([text for text in wanted if len(text) == size], dtype=f"S{size}")
            found[rows] = torch.from_numpy(np.isin(mine, theirs))
    return found


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
    # qtz8mm: short lists as f16, long ones as two bounds and a code per number.
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
