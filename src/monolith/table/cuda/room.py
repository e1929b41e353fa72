"""Room: how large the memory of a device table may be, and what comes next when it is full or nearly empty.

A table grows by moving its rows into another memory, so that for a moment there are two. Without a budget it
doubles, or grows by half where it is large, to have room for both and to take less at once. With one, both
count: as long as it is small a table doubles, too, and from a small share of the budget it goes to all that
is left beside the rows it moves, and never grows again.
"""

from __future__ import annotations

from monolith.errors import ConfigError
from monolith.table.config import TableConfig
from monolith.table.cuda.memory import BESIDE, KEYS

FULL = 0.75
"""Of its places are in use when a table grows."""

_AFTER_GROWTH = 0.375
_AFTER_LARGE_GROWTH = 0.5
_LEAST_GROWTH = 0.7  # the load after a growth that found little room
_FULL_FOR_A_WHILE = 0.8
_LARGE_BYTES = 1 << 30
_BRIM = 0.9  # of the places of a table that does not grow any more
_LEAST_PLACES = 256
_SMALL = 16  # a budget's part that a table leaves for all the rest
_MUCH_TOO_LARGE = 4  # times what the rows would be given: then memory goes back


class Room:
    """The sizes of one table's memory, in places.

    Raises:
        ConfigError: `capacity_bytes` is less than the smallest table needs.
    """

    def __init__(self, config: TableConfig, bytes_per_place: int) -> None:
        self._large = _LARGE_BYTES // bytes_per_place
        self._most = _most_places(config, bytes_per_place)
        self._small = 0 if self._most is None else self._most // _SMALL
        self._first = self.first(config.initial_rows)

    @property
    def most_rows(self) -> int | None:
        """How many rows the largest table has, with places free for a quick search; None for any number."""
        return None if self._most is None else int(self._most * FULL)

    def first(self, rows: int) -> int:
        """Return the size for a table that is about to get so many rows."""
        wanted = max(_LEAST_PLACES, _places_for(rows, FULL))
        return wanted if self._most is None or wanted <= self._small else self._most

    def limit(self, places: int) -> int:
        """Return how many places of so many may be in use."""
        return int(places * (FULL if self.grows(places) else _BRIM))

    def grows(self, places: int) -> bool:
        """Whether a table of this size may become a larger one."""
        return self._most is None or places <= self._small

    def grown(self, places: int, rows: int) -> int:
        """Return the size after this one, for a table that is to have so many rows."""
        load = _AFTER_LARGE_GROWTH if places > self._large else _AFTER_GROWTH
        wanted = _places_for(rows, load)
        if self._most is None or wanted <= self._small:
            return max(wanted, places)
        return (self._most - places - BESIDE) // KEYS * KEYS

    def sizes(self, wanted: int, rows: int) -> list[int]:
        """Return the sizes to try for so many rows, the wanted first: smaller ones where the device has no
        room for that. A budget leaves no choice."""
        least = _places_for(rows, _LEAST_GROWTH)
        if self._most is not None or least >= wanted:
            return [wanted]
        return [wanted, (wanted + least) // 2 // KEYS * KEYS, least]

    def may_wait(self, places: int, used: int) -> bool:
        """Whether a table of this size may be so full for a while: large ones take memory in one call and
        move in another, so that none of them takes too long."""
        return self._most is None and places > self._large and used <= _FULL_FOR_A_WHILE * places

    @property
    def bounded(self) -> bool:
        """Whether there is a budget."""
        return self._most is not None

    def reserved(self, places: int, rows: int, more: int) -> int:
        """Return the size after this one that has room for so many rows more; without a budget."""
        return max(self.grown(places, rows), _places_for(rows + more, FULL))

    def shrunk(self, places: int, rows: int) -> int | None:
        """Return a smaller size that is worth moving to, never below the first; None where there is none."""
        wanted = max(self._first, _places_for(rows, _AFTER_GROWTH))
        if _MUCH_TOO_LARGE * wanted > places or (self._most is not None and wanted > self._small):
            return None
        return wanted


def _most_places(config: TableConfig, bytes_per_place: int) -> int | None:
    if config.capacity_bytes is None:
        return None
    places = (config.capacity_bytes // bytes_per_place - BESIDE) // KEYS * KEYS
    if places < KEYS:
        raise ConfigError(
            f"table {config.name!r}: capacity_bytes is {config.capacity_bytes:,}, and on a GPU a table of "
            f"such rows needs {(KEYS + BESIDE) * bytes_per_place:,} at least"
        )
    return places


def _places_for(rows: int, load: float) -> int:
    return (int(rows / load) // KEYS + 1) * KEYS
