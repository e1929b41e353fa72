"""Rows that are named first and moved later: records in another order, without touching their values.

A shuffle takes records of many chunks, cuts them into batches and joins what is left over. If each of these
steps moved values, column by column, a record would be copied four times and most of the time spent between
the copies. So a step only changes numbers, which block and which row in it, and the values move once, when
a column is looked at: then the core gathers all columns in one call, without the GIL.

    chunks, as parsed       block 0: a b c       block 1: d e
    take, slice, concat     (0, 2) (1, 0) | (0, 0) ...
    a look at a column      c d | a ...          a batch of 2, and the beginning of the next
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from monolith import native
from monolith.feature.spec import UnmovedRows
from monolith.tensors import RaggedTensor

Rows = NDArray[np.int64] | slice
"""Which rows: their numbers, none below 0, or a range."""

_DTYPES = {
    native.ColumnType.INT64: torch.int64,
    native.ColumnType.FLOAT: torch.float32,
    native.ColumnType.BYTES: torch.uint8,
}
_TYPES = (torch.uint8, torch.int64, torch.float32)


View = tuple[tuple[native.ColumnBlock, ...], NDArray[np.int32] | None, NDArray[np.int64], Sequence[int]]
"""Where rows of some columns are: blocks, the block of each row, the rows, and the numbers of the columns."""


class BlockLayout(NamedTuple):
    """Which columns a block has: only blocks of one layout are gathered together."""

    numbers: Mapping[str, int]
    """The number of each column in the block."""
    types: tuple[torch.dtype, ...]


class RowBlock(NamedTuple):
    """Columns in the form that the core gathers from."""

    layout: BlockLayout
    columns: native.ColumnBlock

    @classmethod
    def of(cls, size: int, columns: Mapping[str, RaggedTensor]) -> RowBlock | None:
        """Return the columns of some records as a block; None if they are not plain memory of the CPU."""
        types: list[torch.dtype] = []
        parts: list[tuple[object, object | None, object]] = []
        for column in columns.values():
            values, splits = column.values, column.row_splits
            if isinstance(values, RaggedTensor):
                parts.append((values.flat_values, values.row_splits, splits))
                types.append(torch.uint8)
            else:
                parts.append((values, None, splits))
                types.append(values.dtype)
        try:
            return cls(_layout(columns, types), native.ColumnBlock(size, parts, _TYPES))
        except ValueError:
            return None

    @staticmethod
    def copied(column: RaggedTensor) -> native.ColumnBlock:
        """Return a block of one column, wherever that is."""
        values = column.values
        texts = values.row_splits.cpu().contiguous() if isinstance(values, RaggedTensor) else None
        flat = column.flat_values.detach().cpu().contiguous()
        return native.ColumnBlock(column.nrows, [(flat, texts, column.row_splits.cpu().contiguous())], _TYPES)

    @classmethod
    def parsed(cls, names: Sequence[str], columns: native.ColumnBlock) -> RowBlock:
        """Return columns that never left the core, by their names."""
        return cls(_layout(names, [_DTYPES[one] for one in columns.types]), columns)


def _layout(names: Iterable[str], types: Sequence[torch.dtype]) -> BlockLayout:
    numbers = {name: number for number, name in enumerate(names)}
    assert len(numbers) == len(types)
    return BlockLayout(numbers, tuple(types))


class GatheredColumns(Mapping[str, RaggedTensor]):
    """Columns of rows that are gathered when the first of them is asked for. Safe from any thread.

    Until then it keeps the blocks alive, and afterwards only the rows.
    """

    __slots__ = ("_found", "_layout", "_places")

    def __init__(self, layout: BlockLayout, places: UnmovedRows) -> None:
        self._layout = layout
        # At any time one of the two is set. Two threads that ask first both gather, with the same result.
        self._places: UnmovedRows | None = places
        self._found: dict[str, RaggedTensor] | None = None

    @classmethod
    def of(cls, block: RowBlock, rows: NDArray[np.int64]) -> GatheredColumns:
        """Return rows of one block."""
        return cls(block.layout, UnmovedRows((block.columns,), None, rows, block.layout.numbers))

    @property
    def unmoved(self) -> UnmovedRows | None:
        """Where the values are; None if they were gathered."""
        return self._places

    def dtype_of(self, name: str) -> torch.dtype:
        return self._layout.types[self._layout.numbers[name]]

    @property
    def nbytes(self) -> int:
        """Memory of the columns; of blocks, as long as the rows were not moved."""
        places = self._places
        if places is not None:
            return sum(block.nbytes for block in places.blocks)
        return sum(map(bytes_of, self._gathered().values()))

    def take(self, rows: Rows) -> GatheredColumns | None:
        """Return some of these rows; None if the values were moved already."""
        places = self._places
        if places is None:
            return None
        block_of = None if places.block_of is None else places.block_of[rows]
        chosen = UnmovedRows(places.blocks, block_of, places.rows[rows], places.numbers)
        return GatheredColumns(self._layout, chosen)

    @staticmethod
    def concat(parts: Sequence[GatheredColumns]) -> GatheredColumns | None:
        """Return the rows of several; None if their columns differ, or some were moved already."""
        layout = parts[0]._layout
        all_places = [part._places for part in parts]
        blocks: dict[int, tuple[int, native.ColumnBlock]] = {}
        block_of: list[NDArray[np.int32]] = []
        rows: list[NDArray[np.int64]] = []
        for part, places in zip(parts, all_places, strict=True):
            if places is None or (part._layout is not layout and part._layout != layout):
                return None
            # Parts of one chunk name the same block, which is kept once.
            numbers = [blocks.setdefault(id(one), (len(blocks), one))[0] for one in places.blocks]
            if places.block_of is None:
                block_of.append(np.full(len(places.rows), numbers[0], np.int32))
            else:
                block_of.append(np.array(numbers, np.int32)[places.block_of])
            rows.append(places.rows)
        merged = tuple(one for _, one in blocks.values())
        which = None if len(merged) == 1 else np.concatenate(block_of)
        return GatheredColumns(layout, UnmovedRows(merged, which, np.concatenate(rows), layout.numbers))

    def one_by_one(self) -> GatheredColumns:
        """Return the same rows, of which each column is gathered on its own: for a look at a few of them."""
        return self if self._places is None else _OneByOne(self._layout, self._places)

    def _gathered(self) -> dict[str, RaggedTensor]:
        places = self._places
        if places is not None and self._found is None:
            arrays = native.gather_rows(places.blocks, places.block_of, places.rows)
            self._found = {
                name: _ragged(*array) for name, array in zip(self._layout.numbers, arrays, strict=True)
            }
            self._places = None  # after `_found`, so that another thread always sees one of them
        assert self._found is not None
        return self._found

    def __getitem__(self, name: str) -> RaggedTensor:
        return self._gathered()[name]

    # Names are looked up in their dict: a reader asks for many, batch by batch.

    def __contains__(self, name: object) -> bool:
        return name in self._layout.numbers

    def keys(self) -> KeysView[str]:
        return self._layout.numbers.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout.numbers)

    def __len__(self) -> int:
        return len(self._layout.numbers)


class _OneByOne(GatheredColumns):
    """Columns that are gathered one at a time, when each is asked for."""

    __slots__ = ("_single",)

    def __init__(self, layout: BlockLayout, places: UnmovedRows) -> None:
        super().__init__(layout, places)
        self._single: dict[str, RaggedTensor] = {}

    def __getitem__(self, name: str) -> RaggedTensor:
        found, places = self._single.get(name), self._places
        if found is None:
            assert places is not None
            number = places.numbers[name]
            [array] = native.gather_rows(places.blocks, places.block_of, places.rows, [number])
            found = self._single[name] = _ragged(*array)
        return found


def bytes_of(column: RaggedTensor) -> int:
    """Return the memory of a column."""
    values = column.values
    inner = bytes_of(values) if isinstance(values, RaggedTensor) else values.nbytes
    return inner + column.row_splits.nbytes


def _ragged(values: NDArray[Any], splits: NDArray[np.int64], texts: NDArray[np.int64] | None) -> RaggedTensor:
    inner: Any = torch.from_numpy(values)
    if texts is not None:
        inner = RaggedTensor(inner, torch.from_numpy(texts), validate=False)
    return RaggedTensor(inner, torch.from_numpy(splits), validate=False)
