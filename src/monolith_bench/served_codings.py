"""The AUC of a model whose rows are served as an export codes them: in halves, in int8, in int4.

A model is trained once for each seed. What its best epoch reaches on the test is measured with the rows as
trained, and with those that a file of each coding returns; the dense half is the same.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor, nn

from monolith.model import EmbeddingCollection
from monolith.store import LocalStore
from monolith.table import Rows, Table, iterate
from monolith.table.frozen_table import Coding, FrozenSegment, FrozenTable, write_frozen_table
from monolith_bench.learner import Learner, Likes, Recipe, Split, TwoAucs, early_stopped

CODINGS: Mapping[str, Coding] = {f"rows served as {one}": one for one in ("fp32", "fp16", "int8", "int4")}


def coded_aucs(split: Split, recipe: Recipe, likes: Likes, seed: int, kind: str) -> dict[str, TwoAucs]:
    """Train one model, and return what its best epoch reaches by coding; only the test differs."""
    learner = Learner(recipe, likes, seed, kind=kind)
    found: dict[str, float] = {}

    def serve(test: Tensor) -> None:
        for said, coding in CODINGS.items():
            with rows_served_as(learner.model, coding):
                found[said] = learner.auc(test)

    best = early_stopped(learner, split, seed, on_best=serve)
    return {said: TwoAucs(best.valid, test, best.epoch) for said, test in found.items()}


@contextmanager
def rows_served_as(model: nn.Module, coding: Coding) -> Iterator[None]:
    """Give the rows of a model the values that an export with this coding has, for a block."""
    tables = [
        table for one in model.modules() if isinstance(one, EmbeddingCollection) for table in _tables(one)
    ]
    kept: list[tuple[Table, Rows]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, table in enumerate(tables):
            rows = Rows.concat(list(iterate(table)))
            kept.append((table, rows))
            path = str(Path(folder) / f"{number}.rows")
            segments = [FrozenSegment(segment.dim, coding) for segment in table.config.segments]
            write_frozen_table(path, segments, [(rows.ids.numpy(), rows.values.numpy())], rows=len(rows))
            served = FrozenTable(path)
            table.assign(rows.ids, served.lookup(rows.ids))
            served.close()
    try:
        yield
    finally:
        for table, rows in kept:
            table.restore(rows)


def _tables(rows: EmbeddingCollection) -> list[Table]:
    store = rows.store
    assert isinstance(store, LocalStore)
    return [store.table(name) for name in store.tables]
