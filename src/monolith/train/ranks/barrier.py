"""The barrier of ranks: rank 0 does not come to the next step, and everybody waits for it there."""

from __future__ import annotations

import threading

from monolith.errors import BarrierAlreadyPlacedError
from monolith.store.rank_groups import RankGroups
from monolith.train.hooks.barrier import Placement

WAITS = "waits/{rank}"
"""Under which a rank says that it waits for the others, once that has taken a second."""


class RankBarrier:
    """A `Barrier` that rank 0 places; its `BarrierHook` keeps it from its next step. Thread-safe."""

    def __init__(self, groups: RankGroups) -> None:
        self._groups = groups
        self._lock = threading.Lock()  # guards what follows
        self._placed: Placement | None = None
        self._generation = 0

    @property
    def capacity(self) -> int:
        return self._groups.size

    def place(self, action: str = "") -> Placement:
        with self._lock:
            if self._placed is not None:
                raise BarrierAlreadyPlacedError(
                    f"cannot place a barrier (action {action!r}): one is in place (action "
                    f"{self._placed.action!r}). Wait until it is removed, or remove it."
                )
            self._generation += 1
            self._placed = Placement(action, self._generation)
            return self._placed

    def remove(self) -> None:
        with self._lock:
            self._placed = None

    def placement(self) -> Placement | None:
        with self._lock:
            return self._placed

    def blocked_indices(self) -> list[int]:
        if self.placement() is None:
            return []
        others = range(1, self.capacity)
        return [0, *(rank for rank in others if self._groups.get_note(WAITS.format(rank=rank)))]
