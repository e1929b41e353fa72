"""Filtering by the values of a column.

Most questions are about a single value: `gt`, `in`, `startswith` and their kin. Three are
about a list: does the record have `all` of the operands, `any` of them, or none (`diff`)?
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
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
from monolith.data.transforms.transform import Filter
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
"""Look at all values of a record; the others at its only one."""
SINGLE = frozenset(COMPARISONS)
"""Take exactly one operand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterByValue(Filter):
    """Keeps records by what they have in one column, such as `line_id.req_time` or a feature of numbers.

    A file of operands is read when the first records come.
    """

    column: str
    """What to look at."""
    op: Op
    """`between` is from the first operand up to, but without, the second."""
    operand: Operand | tuple[Operand, ...] = ()
    """One for comparisons, two for `between`, any number for the others."""
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
                f"{self._name()}: {self.op} asks about one value, but record {row} of the stretch has "
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
            self._from_file.extend(line.strip() for line in lines if line.strip())
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
    """Return values and operands in one type: that of the column, or float64 for int64 beside a fraction."""
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


def values_of(records: Records, name: str) -> RaggedTensor:
    """Return a column of numbers, whichever type it has, as float32."""
    if name in records.columns and records.columns[name].dtype is torch.int64:
        column = records[name]
        return column.with_values(column.flat_values.to(torch.float32))
    return read_column(records, name, torch.float32)
