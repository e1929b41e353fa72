"""Records written as lists, and a source of them, for tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from monolith.data import Position, Records
from monolith.errors import RestoreError
from monolith.tensors import RaggedTensor


def column(rows: Sequence[Sequence[Any]]) -> RaggedTensor:
    """Ints, floats or bytes by record."""
    kinds = {type(value) for row in rows for value in row}
    if kinds == {bytes}:
        texts = [[list(value) for value in row] for row in rows]
        return RaggedTensor.from_list(texts, dtype=torch.uint8, ragged_rank=2)
    return RaggedTensor.from_list(
        [list(row) for row in rows], dtype=torch.float32 if kinds == {float} else torch.int64, ragged_rank=1
    )


def records(shared: Sequence[str] = (), **columns: Sequence[Sequence[Any]]) -> Records:
    """Columns by name; a double underscore stands for a dot."""
    named = {name.replace("__", "."): column(rows) for name, rows in columns.items()}
    size = max(len(rows) for name, rows in columns.items() if name not in shared)
    return Records(size, named, frozenset(shared))


def rows_of(some: Records) -> list[dict[str, Any]]:
    """Records one by one, as dicts of what they hold."""
    columns: Mapping[str, list[Any]] = {
        name: some.strings(name) if some[name].dtype is torch.uint8 else some[name].to_list()
        for name in sorted(some.columns)
    }
    return [{name: rows[at] for name, rows in columns.items()} for at in range(some.size)]


class ListSource:
    """Yields parts of a list of records; its position is how many parts it has yielded."""

    def __init__(self, parts: Sequence[Records]) -> None:
        self._parts = list(parts)
        self._next = 0
        self.closed = False

    def __iter__(self) -> Iterator[Records]:
        while self._next < len(self._parts):
            self._next += 1
            yield self._parts[self._next - 1]

    def position(self) -> Position:
        return {"kind": "list", "next": self._next}

    def restore(self, position: Position) -> None:
        if position.get("kind") != "list":
            raise RestoreError(f"not a position of a list: {position!r}")
        self._next = position["next"]

    def close(self) -> None:
        self.closed = True
