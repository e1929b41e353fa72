"""The pass over all candidates: the vector of every item that could be retrieved, and how well it is found.

A retrieval model is judged by where the item that was wanted stands among all of them, not among those that
happen to be in a batch. So all are run through the item tower once, with the model as it stands, and each
query is ranked against the lot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from monolith.data.records import concat_rows, take_rows
from monolith.errors import ConfigError, DataError
from monolith.feature import Batch, ColumnKind
from monolith.tensors import RaggedTensor
from monolith.train.metrics.ranking import KINDS, MRR, ranking_scores

_log = logging.getLogger(__name__)

_PAIRS_AT_ONCE = 1 << 24
"""Scores of queries with candidates computed in one go: 64 MiB of float32."""


@runtime_checkable
class Towers(Protocol):
    """A model with a vector for the user and one for the item, such as `TwoTower`."""

    item_id: str
    """The feature of ids that says which item an example is about."""

    def users(self, batch: Batch) -> Tensor: ...

    def items(self, batch: Batch) -> Tensor: ...


def towers_of(model: nn.Module) -> Towers:
    """Return the part of a model that has two towers.

    Raises:
        ConfigError: It has none.
    """
    found = next((part for part in model.modules() if isinstance(part, Towers)), None)
    if found is None:
        raise ConfigError(
            f"{type(model).__name__} has no towers: candidates need a model with users(batch), items(batch) "
            "and item_id, such as TwoTower"
        )
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """All items that could be retrieved, with their vectors."""

    ids: Tensor
    """int64 of shape (n,), sorted, each once."""
    vectors: Tensor
    """float32 of shape (n, out): a row for each id."""
    raw: Mapping[str, RaggedTensor] = field(default_factory=dict)
    """Columns of the items as they were read, if columns were asked for; see `Stream.keep_columns`."""
    raw_kinds: Mapping[str, ColumnKind] = field(default_factory=dict)
    """How the data holds the columns of `raw`, where that is known."""

    @classmethod
    def of(
        cls, model: nn.Module, batches: Iterable[Batch], advance: Callable[[int], object] | None = None
    ) -> Candidates:
        """Run every item through the item tower of a model in eval mode. Of an item that comes twice, the
        last counts.

        Args:
            advance: Told the examples of each batch that is done.

        Raises:
            DataError: There are no items, or one without an id.
        """
        towers = towers_of(model)
        ids, vectors = [], []
        raw: dict[str, list[RaggedTensor]] = {}
        kinds: dict[str, ColumnKind] = {}
        for batch in batches:
            rows = batch.ids[towers.item_id]
            if bool((rows.row_lengths() != 1).any()):
                raise DataError(
                    f"candidates: each item must have one id in feature {towers.item_id!r}; some have "
                    "none or several"
                )
            with torch.no_grad():
                vectors.append(towers.items(batch).float())
            ids.append(batch.ids.first(towers.item_id))
            for name, column in batch.raw.items():
                raw.setdefault(name, []).append(column)
            kinds = {**batch.raw_kinds, **kinds}
            if advance is not None:
                advance(len(batch))
        if not ids:
            raise DataError("candidates: there are no items")
        known, place = torch.unique(torch.cat(ids), return_inverse=True)
        last = torch.zeros(len(known), dtype=torch.int64)
        last.scatter_reduce_(0, place, torch.arange(len(place)), "amax", include_self=False)
        if len(known) < len(place):
            _log.warning("candidates: %d of %d items come twice", len(place) - len(known), len(place))
        whole = torch.cat(vectors)
        columns = {name: take_rows(concat_rows(parts), last) for name, parts in raw.items()}
        return cls(known, whole[last.to(whole.device)], columns, kinds)

    def __len__(self) -> int:
        return len(self.ids)

    def places(self, ids: Tensor) -> Tensor:
        """Return the row of each id, -1 for one that is no candidate."""
        at = torch.searchsorted(self.ids, ids).clamp(max=len(self) - 1)
        return torch.where(self.ids[at] == ids, at, -1)

    def ranked(
        self,
        queries: Tensor,
        wanted: RaggedTensor,
        ks: Sequence[int],
        barred: RaggedTensor | None = None,
    ) -> dict[str, Tensor]:
        """Return recall@k, ndcg@k, hit_rate@k, mrr@k for each k, and mrr, of each query among all candidates.

        A relevant item that is no candidate counts as not found.

        Args:
            queries: float of shape (queries, out).
            wanted: Ids of what each query wanted.
            barred: Ids that are not offered to each query, such as what the user has seen; what it wanted is
                offered all the same.

        Returns:
            float64 of shape (queries,) by name; NaN for a query that wanted nothing.
        """
        at_once = max(1, _PAIRS_AT_ONCE // len(self))
        parts = [
            self._ranked(
                queries[start : start + at_once],
                _rows(wanted, start, start + at_once),
                ks,
                None if barred is None else _rows(barred, start, start + at_once),
            )
            for start in range(0, len(queries), at_once)
        ]
        names = ranking_names(ks)
        none = torch.empty(0, dtype=torch.float64)
        return {name: torch.cat([part[name] for part in parts]) if parts else none for name in names}

    def _ranked(
        self, queries: Tensor, wanted: RaggedTensor, ks: Sequence[int], barred: RaggedTensor | None
    ) -> dict[str, Tensor]:
        scores = (queries.float() @ self.vectors.t()).cpu()
        relevance = torch.zeros_like(scores)
        rows, places = _rows_of(wanted), self.places(wanted.flat_values)
        there = places >= 0
        relevance[rows[there], places[there]] = 1
        if barred is not None:
            at, hidden = _rows_of(barred), self.places(barred.flat_values)
            at, hidden = at[hidden >= 0], hidden[hidden >= 0]
            free = relevance[at, hidden] == 0
            scores[at[free], hidden[free]] = -torch.inf
        missing = torch.bincount(rows[~there], minlength=len(scores))
        if bool(missing.any()):
            behind = torch.arange(int(missing.max())) < missing[:, None]  # behind all, so not found
            scores = torch.cat([scores, torch.full(behind.shape, -torch.inf)], 1)
            relevance = torch.cat([relevance, behind.float()], 1)
        return ranking_scores(scores, relevance, ks)


def ranking_names(ks: Sequence[int]) -> list[str]:
    """Return the names of what `Candidates.ranked` finds."""
    return [*(f"{kind}@{k}" for kind in KINDS for k in ks), MRR]


def _rows(ragged: RaggedTensor, start: int, end: int) -> RaggedTensor:
    splits = ragged.row_splits[start : end + 1]
    return RaggedTensor(ragged.flat_values[int(splits[0]) : int(splits[-1])], splits - splits[0])


def _rows_of(ragged: RaggedTensor) -> Tensor:
    """Return the row that each value is in."""
    return torch.repeat_interleave(torch.arange(ragged.nrows), ragged.row_lengths())
