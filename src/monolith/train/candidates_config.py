"""What a run says of the items its model retrieves from: where they are, how finding them is measured.

Nothing here needs torch, as in `evaluate_config`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from monolith.config import Checked, Problem
from monolith.data.config import FormatName


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidatesConfig(Checked):
    """All items that could be retrieved, and how high the wanted ones should stand among them."""

    path: str
    """The table of items, a record for each, with the columns of the item tower's features: a file, or a path
    with * in it."""
    format: FormatName | None = None
    """The format of the table of items; None tells it by the name of its file."""
    batch_size: int = 4096
    """How many items go through the item tower at a time."""
    ks: tuple[int, ...] = (10, 100)
    """How many of the best candidates count, for recall@k, ndcg@k, hit_rate@k and mrr@k."""
    barred: str | None = None
    """The feature of ids that an evaluation does not offer, such as what the user has seen before; what was
    wanted is offered all the same. None offers all candidates."""

    def problems(self) -> Iterator[Problem]:
        if self.batch_size < 1:
            yield Problem(("batch_size",), f"must be at least 1, got {self.batch_size}")
        if not self.ks or min(self.ks) < 1 or len(set(self.ks)) < len(self.ks):
            yield Problem(("ks",), f"must be one or more different numbers from 1 on, got {list(self.ks)}")
