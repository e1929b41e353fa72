"""The barrier of a fleet: its chief holds all workers between their steps."""

from __future__ import annotations

import threading

from monolith.errors import BarrierAlreadyPlacedError
from monolith.train.fleet.fleet import Fleet
from monolith.train.hooks.barrier import Placement


class FleetBarrier:
    """A `Barrier` that the chief places. The others stand still between their steps. Thread-safe."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._lock = threading.Lock()  # guards what follows
        self._placed: Placement | None = None

    @property
    def capacity(self) -> int:
        return self._fleet.num_workers

    def place(self, action: str = "") -> Placement:
        with self._lock:
            if self._placed is not None:
                raise BarrierAlreadyPlacedError(
                    f"cannot place a barrier (action {action!r}): one is in place (action "
                    f"{self._placed.action!r}). Wait until it is removed, or remove it."
                )
            self._placed = Placement(action, self._fleet.hold())
            return self._placed

    def remove(self) -> None:
        with self._lock:
            if self._placed is not None:
                self._placed = None
                self._fleet.let_go()

    def placement(self) -> Placement | None:
        with self._lock:
            return self._placed

    def blocked_indices(self) -> list[int]:
        with self._lock:
            if self._placed is None:
                return []
            return [0, *self._fleet.standing_still()]
