"""Guards check a delta before it is published, and pause publishing if something is wrong with it.

A row that is NaN, infinite or out of all proportion answers requests as soon as it is published. So
publishing pauses at such a row, and everything learned since stays unpublished too: it is not known what else
is wrong. Training continues. Its changes are published when an operator resumes publishing, or when the guard
finds the rows recovered, if the config allows that.
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
"""The most bad rows of a table whose recovery is checked."""
SMALL = 1.0
"""Values up to this may always be published, whatever was usual."""

LookUp = Callable[[str, Tensor], Tensor]
"""Takes a table and ids; returns the current rows, zeros for an id without one."""


class PublishGuard(Protocol):
    """Decides whether a delta may be published, and when its objection is settled. For the publisher's
    thread."""

    def check(self, delta: Delta) -> str | None:
        """Return why a delta must not be published; None if it may."""

    def recovered(self, look_up: LookUp) -> bool:
        """Whether the values that it objected to are within bounds by now."""

    @property
    def first_bad_step(self) -> int | None:
        """The first step that its reason may be about; None if it does not know, or has no reason."""

    def accept(self) -> None:
        """Forget the objection: an operator resumes publishing."""


class RowGuard:
    """Objects to rows and weights that are NaN, infinite, or out of all proportion.

    Shapes: a delta has n rows of d floats per table, float32 (n, d).

    Examples:
        >>> import torch
        >>> from monolith import GuardConfig
        >>> from monolith.sync import Delta, LearnedUpTo, LogPosition
        >>> from monolith.sync.guard import RowGuard
        >>> from monolith.table import Rows
        >>> rows = Rows(torch.tensor([7]), torch.tensor([0]), torch.tensor([[torch.nan]]), torch.empty(1, 0))
        >>> delta = Delta("run", (0, 1), LogPosition("e", 1), LearnedUpTo(), {"item": rows})
        >>> RowGuard(GuardConfig()).check(delta)
        "table 'item': the row of id 7 is NaN or infinite; 1 of 1 rows of the delta do"
    """

    first_bad_step = None
    """None: it checks every delta, so a bad row came after the last published delta."""

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self._usual: dict[str, float] = {}
        """Table -> its largest absolute value that was published."""
        self._bad: dict[str, Tensor] = {}
        """Table -> ids of bad rows."""
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
        """Return the problem of a snapshot's message, or None. Called from any thread."""
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
            return True  # the next delta with weights is checked, and those come often
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
        """Return the largest absolute value that may be published; at most the largest float."""
        config = self._config
        bound = torch.finfo(torch.float32).max
        if config.largest_value is not None:
            bound = min(bound, config.largest_value)
        if config.times_usual is not None and table is not None and (usual := self._usual.get(table, 0.0)):
            bound = min(bound, max(config.times_usual * usual, SMALL))
        return bound

    def _beyond(self, value: float, table: str | None = None) -> str | None:
        """Return the problem of a largest absolute value, or None."""
        if value <= self._bound(table):
            return None
        if not math.isfinite(value):
            return "is NaN or infinite"
        largest = self._config.largest_value
        if largest is not None and value > largest:
            return f"has a value of {value:.4g}, above publish.guard.largest_value of {largest:g}"
        assert table is not None
        return (
            f"has a value of {value:.4g}, and the largest published before was {self._usual[table]:.4g}: "
            f"more than {self._config.times_usual:g} times (publish.guard.times_usual)"
        )


class AllGuards:
    """Combines several guards: the first objection counts."""

    def __init__(self, guards: Sequence[PublishGuard]) -> None:
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
    """Return the largest absolute value; NaN if there is one, None if there are no floats."""
    if not values.numel() or not values.is_floating_point():
        return None
    least, most = torch.aminmax(values)
    return max(-float(least), float(most)) if not bool(least.isnan()) else math.nan
