"""Guards of publishing: what is looked at before a delta is let out, and why it is not.

A row that is NaN, infinite or out of all proportion answers requests as soon as it is published. So it is
held back, and with it everything that was learned since: nobody knows what else is wrong. Training goes on,
and what it changes meanwhile is published when somebody, or something, says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from monolith.sync.messages import Delta, Message, SnapshotBegin, SnapshotRows
from monolith.sync.publish_config import GuardConfig

MOST_REMEMBERED = 1000
"""Bad rows of a table that are looked at again."""
SMALL = 1.0
"""Values up to this are no explosion, whatever was usual."""

LookUp = Callable[[str, Tensor], Tensor]
"""From a table and ids to what their rows hold now; zeros where there is none."""


class RecoveringGuard(Protocol):
    """A `PublishGuard` that knows when what it held back is well again. Used by the publisher's thread."""

    def check(self, delta: Delta) -> str | None:
        """Return why a delta must not be let out; None where it may."""

    def recovered(self, look_up: LookUp) -> bool:
        """Whether what it gave as a reason is within bounds by now."""

    @property
    def first_bad_step(self) -> int | None:
        """The first step that its reason may be about; None if it does not know, or has no reason."""

    def accept(self) -> None:
        """Take things as they are: somebody lets publishing go on."""


class RowGuard:
    """Holds back rows and weights that are NaN, infinite, or out of all proportion."""

    first_bad_step = None
    """It looks at every delta: a row that it holds back came after the last delta that it let out."""

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self._usual: dict[str, float] = {}
        """Table -> the largest absolute value that was let out of it."""
        self._bad: dict[str, Tensor] = {}
        """Table -> ids of rows that were held back."""
        self._bad_weights = False

    def check(self, delta: Delta) -> str | None:
        self.accept()
        for name, weight in (delta.dense or {}).items():
            if (value := _largest(weight)) is not None and (why := self._beyond(value)) is not None:
                self._bad_weights = True
                return f"the weight {name!r} {why}"
        found = {name: _largest(rows.values) for name, rows in delta.rows.items()}
        for name, value in found.items():
            if value is not None and (why := self._beyond(value, name)) is not None:
                return f"table {name!r}: {self._describe_rows(delta, name, why)}"
        self._usual |= {
            name: max(value, self._usual.get(name, 0.0)) for name, value in found.items() if value is not None
        }
        return None

    def problem(self, message: Message) -> str | None:
        """Return what is wrong with part of a snapshot, if something is. From any thread."""
        if isinstance(message, SnapshotRows):
            value = _largest(message.rows.values)
            why = None if value is None else self._beyond(value, message.table)
            return None if why is None else f"table {message.table!r}: a row {why}"
        if isinstance(message, SnapshotBegin):
            found = ((name, _largest(weight)) for name, weight in (message.dense or {}).items())
            said = ((name, self._beyond(value)) for name, value in found if value is not None)
            return next((f"the weight {name!r} {why}" for name, why in said if why is not None), None)
        return None

    def recovered(self, look_up: LookUp) -> bool:
        if self._bad_weights:
            return True  # the next delta that brings weights is looked at, and they come often
        for name, ids in self._bad.items():
            value = _largest(look_up(name, ids))
            if value is not None and self._beyond(value, name) is not None:
                return False
        return True

    def accept(self) -> None:
        self._bad = {}
        self._bad_weights = False

    def _describe_rows(self, delta: Delta, name: str, why: str) -> str:
        rows = delta.rows[name]
        sizes = rows.values.abs().amax(dim=1)
        bound = self._bound(name)
        bad = (~(sizes <= bound)).nonzero().reshape(-1)
        self._bad[name] = rows.ids[bad[:MOST_REMEMBERED]].clone()
        first = int(rows.ids[bad[0]])
        return f"the row of id {first} {why}; {len(bad):,} of {len(rows):,} rows of the delta do"

    def _bound(self, table: str | None = None) -> float:
        """Return the largest absolute value that may be let out; at most the largest float."""
        config = self._config
        bound = torch.finfo(torch.float32).max
        if config.largest_value is not None:
            bound = min(bound, config.largest_value)
        if config.times_usual is not None and table is not None and (usual := self._usual.get(table, 0.0)):
            bound = min(bound, max(config.times_usual * usual, SMALL))
        return bound

    def _beyond(self, value: float, table: str | None = None) -> str | None:
        """Return what is wrong with a largest absolute value, if something is."""
        if value <= self._bound(table):
            return None
        if not math.isfinite(value):
            return "is NaN or infinite"
        largest = self._config.largest_value
        if largest is not None and value > largest:
            return f"has a value of {value:.4g}, above publish.guard.largest_value of {largest:g}"
        assert table is not None
        return (
            f"has a value of {value:.4g}, where {self._usual[table]:.4g} was the largest that was published "
            f"before: more than {self._config.times_usual:g} times (publish.guard.times_usual)"
        )


class AllGuards:
    """Several guards: the first that has a reason gives it."""

    def __init__(self, guards: Sequence[RecoveringGuard]) -> None:
        self._guards = tuple(guards)

    def check(self, delta: Delta) -> str | None:
        return next((why for guard in self._guards if (why := guard.check(delta)) is not None), None)

    def recovered(self, look_up: LookUp) -> bool:
        return all(guard.recovered(look_up) for guard in self._guards)

    @property
    def first_bad_step(self) -> int | None:
        steps = [guard.first_bad_step for guard in self._guards]
        return min((step for step in steps if step is not None), default=None)

    def accept(self) -> None:
        for guard in self._guards:
            guard.accept()


def _largest(values: Tensor) -> float | None:
    """Return the largest absolute value; NaN where there is one, None where there is nothing to look at."""
    if not values.numel() or not values.is_floating_point():
        return None
    least, most = torch.aminmax(values)
    return max(-float(least), float(most)) if not bool(least.isnan()) else math.nan
