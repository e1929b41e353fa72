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

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith import filesystem, native
from monolith.data.records import Records
from monolith.data.transforms.columns import (
    parse_integer,
    parse_number,
    read_column,
    signed,
)
from monolith.data.transforms.transform import Filter, Rewrite
from monolith.errors import ConfigError, DataError
from monolith.tensors import RaggedTensor

Op = Literal[
    "gt", "ge", "eq", "lt", "le", "neq", "between", "in", "not-in",
    "all", "any", "diff", "startswith", "endswith",
]  # fmt: skip
Operand = int | float | str

ORDERED = frozenset({"gt", "ge", "lt", "le", "between"})
"""Need an order, which strings do not have here."""
TEXT_ONLY = frozenset({"startswith", "endswith"})
ON_LISTS = frozenset({"all", "any", "diff"})
"""Test all values of a record; the remaining operators test its only one."""
SINGLE = frozenset({"gt", "ge", "eq", "lt", "le", "neq"})
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
    _tests: dict[torch.dtype, list[native.RowTest]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """By the type of the column."""

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
        dtype = records.dtype_of(self.column)
        if dtype not in self._tests:
            self._tests[dtype] = self._make_tests(dtype)
        views, single = records.views([self.column]), self.op not in ON_LISTS
        found = [
            test.passing(views, len(records), empty=self.keep_empty, single=single)
            for test in self._tests[dtype]
        ]
        passing = np.minimum.reduce(found)
        if single and (several := (passing > 1).nonzero()[0]).size:
            row = int(several[0])
            raise DataError(
                f"{self._name()}: {self.op} asks about one value, but record {row} of the batch has "
                f"{int(records[self.column].row_lengths()[row])}. For lists there are all, any and diff."
            )
        return torch.from_numpy(passing.view(np.bool_))

    def _make_tests(self, dtype: torch.dtype) -> list[native.RowTest]:
        """Return what the core asks of a column of this type: all of these must pass."""
        operands = self._operands_for(dtype)
        if self.op == "all":  # each operand for itself: whole ones among whole numbers, others as float64
            whole, rest = ([one for one in operands if isinstance(one, int) is are] for are in (True, False))
            groups = [_as_column(some, dtype) for some in (whole, rest) if some]
            return [test for some in groups for test in asking_for_all(some)]
        compared = _as_column(operands, dtype)
        if self.op in ORDERED or self.op in TEXT_ONLY:
            return [native.RowTest(self.op, **_operands(compared), any=1)]
        wishes = [1] * len(compared)
        none = int(self.op in ("neq", "not-in", "diff"))
        return [native.RowTest("one of", **_operands(compared), wishes=wishes, any=1 - none, none=none)]

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


def asking_for_all(
    operands: Sequence[int] | Sequence[float] | Sequence[bytes], *, shift: int = 0, bits: int = (1 << 64) - 1
) -> list[native.RowTest]:
    """Return tests that together ask for all of some operands among the values of a record.

    Args:
        shift, bits: Which bits of an int64 are compared with the operands; see `native.RowTest`.
    """
    distinct = list(dict.fromkeys(operands))
    tests = []
    for begin in range(0, len(distinct), 64):
        some = distinct[begin : begin + 64]
        wishes = [1 << place for place in range(len(some))]
        all_of = (1 << len(some)) - 1
        tests.append(
            native.RowTest("one of", **_operands(some), wishes=wishes, shift=shift, bits=bits, all=all_of)
        )
    return tests


def _as_column(operands: Sequence[Any], dtype: torch.dtype) -> list[int] | list[float] | list[bytes]:
    """Return operands in the type in which they are compared: that of the column, or float64 for int64 and a
    fraction."""
    if dtype is torch.uint8 or (dtype is torch.int64 and all(isinstance(one, int) for one in operands)):
        return list(operands)
    compared = torch.float64 if dtype is torch.int64 else torch.float32
    decimals: list[float] = torch.tensor(operands, dtype=compared).tolist()
    return decimals


def _operands(operands: Sequence[Any]) -> dict[str, Any]:
    """Return operands of one type as the argument of a `native.RowTest`."""
    kind = {int: "ints", float: "decimals", bytes: "texts"}[type(operands[0])]
    return {kind: operands}


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
