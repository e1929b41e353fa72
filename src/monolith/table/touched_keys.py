"""Touched keys: the ids whose rows changed since someone last asked.

Training puts ids in; the publisher of changed rows takes them all out, every
few seconds. The set is bounded: past its capacity it forgets everything and says how
much that was, since a sender that far behind does better to start over.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from monolith import native
from monolith.errors import ConfigError
from monolith.table import arguments

TOUCHED_KEY_SET_CAPACITY = 2_097_152
"""64 MiB of keys, at 32 bytes each."""
TOUCHED_KEY_SET_CONCURRENCY_LEVEL = 1024


class TouchedKeySet:
    """A set of int64 ids, any of them. Thread-safe.

    Args:
        capacity: Keys above which the next insertion empties the set first.
        concurrency_level: Taken and checked for configurations that name it, without effect:
            the native set has no stripes of locks to count.
        name_suffix: Ends `name`, to tell sets apart in logs and metrics.

    Examples:
        >>> import torch
        >>> from monolith import NativeTable, Segment, TableConfig
        >>> from monolith.table import TouchedKeySet
        >>> touched = TouchedKeySet()
        >>> table = NativeTable(TableConfig(name="item", segments=(Segment(dim=2),)), touched=touched)
        >>> table.assign(torch.tensor([7, 8]), torch.ones(2, 2))
        >>> touched.steal().sort().values, len(touched)
        (tensor([7, 8]), 0)
    """

    def __init__(
        self,
        capacity: int = TOUCHED_KEY_SET_CAPACITY,
        concurrency_level: int = TOUCHED_KEY_SET_CONCURRENCY_LEVEL,
        name_suffix: str = "",
    ) -> None:
        if capacity < 1 or concurrency_level < 1:
            raise ConfigError(
                "touched keys: capacity and concurrency_level must be at least 1, "
                f"got {capacity} and {concurrency_level}"
            )
        self.name = f"MonolithTouchedKeySet{name_suffix}"
        self._core = native.TouchedKeySet(capacity)
        self._asked: list[Callable[[], None]] = []

    @property
    def core(self) -> native.TouchedKeySet:
        """What a native table fills."""
        return self._core

    @property
    def capacity(self) -> int:
        return int(self._core.capacity)

    def insert(self, ids: Tensor) -> int:
        """Add int64 ids of any shape, in order; return how many keys were dropped to make room."""
        return int(self._core.insert(arguments.id_array(ids.reshape(-1))))

    def ask_before(self, tell: Callable[[], None]) -> None:
        """Call `tell` whenever the set is read: it inserts the ids that are still pending elsewhere."""
        self._asked = [*self._asked, tell]

    def ask_no_more(self, tell: Callable[[], None]) -> None:
        self._asked = [other for other in self._asked if other != tell]

    def steal(self) -> Tensor:
        """Take all keys, int64 in no order, and leave the set empty, in one step."""
        self._ask()
        return torch.from_numpy(self._core.steal())

    @property
    def lost(self) -> int:
        """Keys dropped since the set was made. Where it grows, changes were missed: start over."""
        self._ask()
        return int(self._core.lost)

    def __len__(self) -> int:
        self._ask()
        return len(self._core)

    def _ask(self) -> None:
        for tell in self._asked:
            tell()
