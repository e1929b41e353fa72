"""What two checkpoints have not in common: rows, dense variables, and how far the data was read.

Tables are walked side by side in the order of their hashes, and of the rows that changed only
the few that changed most are remembered, so that tables of any size can be compared.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith import filesystem
from monolith.checkpoint.folder.manifest import Link, read_chain
from monolith.checkpoint.folder.state_files import dense_path
from monolith.checkpoint.offline.reading import SavedTables, readable
from monolith.checkpoint.saved_tables import SavedHistory, describe_table, dumps_of
from monolith.errors import UnknownTableError
from monolith.observe import Progress
from monolith.table import Rows
from monolith.table.row_streams import newest_rows, side_by_side
from monolith.tensors.files import DenseHeader, FileRecord, read_header, read_tensors


@dataclass(frozen=True, slots=True)
class RowChange:
    """How far one row has moved."""

    id: int
    distance: float
    """The L2 norm of the change of its values; NaN or infinite where they are."""
    before: float
    """The L2 norm of its values."""
    after: float


@dataclass(kw_only=True, slots=True)
class TableDifference:
    """One table in two checkpoints."""

    name: str
    rows_before: int = 0
    rows_after: int = 0
    added: int = 0
    removed: int = 0
    changed: int = 0
    """Rows whose values or optimizer state differ, bit by bit."""
    touched: int = 0
    """Rows of which only the event time differs."""
    layout: tuple[str, str] | None = None
    """What a row is made of, if that differs."""
    largest: list[RowChange] = field(default_factory=list)
    """Of the rows that changed, those that moved furthest, the furthest first."""

    @property
    def same(self) -> bool:
        return not (self.added or self.removed or self.changed or self.touched or self.layout)


@dataclass(frozen=True, slots=True)
class VariableDifference:
    """One dense variable in two checkpoints."""

    name: str
    kind: str
    """"added", "removed", "changed", or "reshaped" where shape or type differ."""
    largest: float | None = None
    """Of what changed, the largest absolute difference of an element."""
    words: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """What two checkpoints have not in common."""

    before: str
    after: str
    steps: tuple[int, int]
    tables: tuple[TableDifference, ...]
    """Those that are the same as well."""
    variables: tuple[VariableDifference, ...]
    variables_same: int
    states: dict[str, tuple[Any, Any]]
    """Part -> its values in both, if they differ; None if a checkpoint has no such part."""

    @property
    def same(self) -> bool:
        return all(table.same for table in self.tables) and not self.variables and not self.states


def compare(
    before: str,
    after: str,
    *,
    tables: Collection[str] | None = None,
    top: int = 10,
    progress: Progress | None = None,
) -> Difference:
    """Return in what two checkpoints differ; each may be an increment.

    Args:
        tables: Which to compare; all by default.
        top: Rows to name of each table.
        progress: Advanced by rows.

    Raises:
        UnknownTableError: Neither has such a table.
        RestoreError, CorruptFileError: A file is damaged; the message names it.
    """
    chains = read_chain(before), read_chain(after)
    old, new = map(SavedTables, chains)
    known = sorted({*old.names, *new.names})
    for name in tables or ():
        if name not in known:
            raise UnknownTableError(f"neither has a table {name!r}; there are {', '.join(known) or 'none'}")
    differences = []
    for name in known if tables is None else sorted(tables):
        found = [saved.history(name) if name in saved.names else [] for saved in (old, new)]
        differences.append(_compare_table(name, found[0], found[1], top, progress))
    variables, same = _compare_dense(chains[0], chains[1])
    return Difference(
        before=before,
        after=after,
        steps=(chains[0][-1].manifest.step, chains[1][-1].manifest.step),
        tables=tuple(differences),
        variables=tuple(variables),
        variables_same=same,
        states=_compare_states(chains[0], chains[1]),
    )


# Tables


def _compare_table(
    name: str, old: SavedHistory, new: SavedHistory, top: int, progress: Progress | None
) -> TableDifference:
    found = TableDifference(name=name)
    if not old or not new:
        for rows in newest_rows(dumps_of(old or new)):
            found.added += 0 if old else len(rows)
            found.removed += len(rows) if old else 0
            _advance(progress, len(rows))
        found.rows_before, found.rows_after = found.removed, found.added
        return found
    layouts = [describe_table(history).layout for history in (old, new)]
    if layouts[0] != layouts[1]:
        found.layout = str(layouts[0]), str(layouts[1])
    furthest = _Furthest(top)
    for beside in side_by_side(dumps_of(old), dumps_of(new)):
        both = len(beside.before)
        found.rows_before += both + beside.only_before
        found.rows_after += both + beside.only_after
        found.removed += beside.only_before
        found.added += beside.only_after
        _advance(progress, 2 * both + beside.only_before + beside.only_after)
        if both and layouts[0].dim == layouts[1].dim:
            _compare_rows(found, furthest, beside.before, beside.after)
    found.largest = furthest.sorted()
    return found


def _compare_rows(found: TableDifference, furthest: _Furthest, before: Rows, after: Rows) -> None:
    """Count and keep the changes of rows of the same ids."""
    differ = _bits_differ(before.values, after.values)
    if before.state.shape == after.state.shape:
        differ |= _bits_differ(before.state, after.state)
    retimed = before.event_times.numpy() != after.event_times.numpy()
    found.changed += int(differ.sum())
    found.touched += int((retimed & ~differ).sum())
    furthest.add(
        *(column[differ] for column in (before.ids.numpy(), before.values.numpy(), after.values.numpy()))
    )


def _bits_differ(before: Tensor, after: Tensor) -> NDArray[np.bool_]:
    """Return for each row whether a bit differs: state may be counters, which are no numbers as floats."""
    differ: NDArray[np.bool_] = (before.view(torch.int32) != after.view(torch.int32)).any(dim=1).numpy()
    return differ


class _Furthest:
    """Remembers the rows that moved furthest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._furthest: list[tuple[float, int, RowChange]] = []  # a heap, the least first

    def add(self, ids: NDArray[np.int64], before: NDArray[np.float32], after: NDArray[np.float32]) -> None:
        if not self._most or not len(ids):
            return
        with np.errstate(all="ignore"):
            old, new = before.astype(np.float64), after.astype(np.float64)
            moved = np.linalg.norm(new - old, axis=1)
            order = np.where(np.isnan(moved), np.inf, moved)  # nothing is further than what is no number
        for at in np.argsort(-order, kind="stable")[: self._most].tolist():
            change = RowChange(
                int(ids[at]),
                float(moved[at]),
                float(np.linalg.norm(old[at])),
                float(np.linalg.norm(new[at])),
            )
            heapq.heappush(self._furthest, (float(order[at]), change.id, change))
            if len(self._furthest) > self._most:
                heapq.heappop(self._furthest)

    def sorted(self) -> list[RowChange]:
        return [change for _, _, change in sorted(self._furthest, key=lambda one: (-one[0], one[1]))]


def _advance(progress: Progress | None, rows: int) -> None:
    if progress is not None:
        progress.advance(rows)


# Dense variables and the rest


def _compare_dense(old: Sequence[Link], new: Sequence[Link]) -> tuple[list[VariableDifference], int]:
    paths = [_newest_dense(chain) for chain in (old, new)]
    headers = [DenseHeader({}, {}, {}) if path is None else read_header(path) for path in paths]
    found: list[VariableDifference] = []
    same = 0
    for name in sorted({*headers[0].tensors, *headers[1].tensors}):
        before, after = (header.tensors.get(name) for header in headers)
        if before is None or after is None:
            kind = "added" if before is None else "removed"
            found.append(VariableDifference(name, kind, words=str(after if before is None else before)))
        elif before != after:
            found.append(VariableDifference(name, "reshaped", words=f"{before}, then {after}"))
        else:
            assert paths[0] is not None
            assert paths[1] is not None
            largest = _largest(*(_read_one(path, name) for path in paths if path is not None))
            if largest is None:
                same += 1
            else:
                found.append(VariableDifference(name, "changed", largest))
    return found, same


def _newest_dense(chain: Sequence[Link]) -> str | None:
    for link in reversed(chain):
        path = dense_path(link.prefix)
        files = link.manifest.parts.get("dense", {}).get("files", {})
        if filesystem.base_name(path) in files:
            return path
    return None


def _read_one(path: str, name: str) -> Tensor:
    """Read one variable, checked by its own checksum: one at a time, however large the model is."""
    return read_tensors(path, only=lambda other: other == name)[name]


def _largest(before: Tensor, after: Tensor) -> float | None:
    """Return the largest absolute difference; None if every bit is the same."""
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (before, after)]
    if torch.equal(*flat):
        return None
    wide = torch.complex128 if before.is_complex() else torch.float64
    return float((after.to(wide) - before.to(wide)).abs().max())


def _compare_states(old: Sequence[Link], new: Sequence[Link]) -> dict[str, tuple[Any, Any]]:
    """Return the parts of plain values that differ, from the manifests; tensors are compared by checksum."""
    states = [_states(chain) for chain in (old, new)]
    return {
        name: (_value(states[0].get(name)), _value(states[1].get(name)))
        for name in sorted({*states[0], *states[1]})
        if states[0].get(name) != states[1].get(name)
    }


def _states(chain: Sequence[Link]) -> dict[str, tuple[Any, list[FileRecord]]]:
    return {
        name: (entry["value"], [FileRecord(**record) for record in entry.get("files", {}).values()])
        for link in chain
        for name, entry in link.manifest.parts.items()
        if "value" in entry
    }


def _value(state: tuple[Any, list[FileRecord]] | None) -> Any:
    return None if state is None else readable(state[0])
