"""Growth: how full a device table is, which size comes next, and how tables share the memory of a device.

Usage. A batch creates at most as many rows as it has ids. The host adds those up to an upper bound, and now
and then has the true number copied from the device, which it reads once the copy has arrived. Only a call
that must know the number waits for the device.

Sizes. A table grows by moving its rows into another memory, so that for a moment there are two. Without a
budget it doubles, or grows by half when it is large, so that both fit. With a budget both count: a small
table doubles, too; from a small part of the budget it takes all that is left next to the rows it moves, and
never grows again.

    capacity_bytes  |= small: doubles =|==================== final size =====================|
                    0                 1/16                                                    1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from monolith.cuda.device import Device, DeviceEvent
from monolith.errors import ConfigError, TableArgumentError
from monolith.table.arguments import MAX_EVENT_TIME
from monolith.table.config import TableConfig
from monolith.table.cuda.layout import row_layout
from monolith.table.cuda.memory import BAD_TIMES, EXTRA_PLACES, KEYS, MARKS, NEWEST, RECENCY_BYTES, USED

_ASKED_FROM = 0.5  # of the limit: while the bound is lower, the true number does not matter


@dataclass(frozen=True, slots=True)
class Counted:
    """The counters of a table at the moment they were read."""

    counters: list[int]

    @property
    def rows(self) -> int:
        return self.counters[USED] - self.counters[MARKS]


class UsageCounters:
    """The counters of one table. Not thread-safe.

    Args:
        device: The one of the counters.

    Attributes:
        counters: int64 on the device.
        written: How many ids batches have had so far.
        marks: Marked places when the counters were last read.
    """

    def __init__(self, name: str, counters: Tensor, device: Device) -> None:
        self.counters = counters
        self._name = name
        self._bound = 0
        self._device = device
        self._copy = device.pinned(tuple(counters.shape), counters.dtype)
        self._arrives: DeviceEvent | None = None
        self._asked_at = 0  # rows written when the copy under way was made
        self._complained_at = -1
        self.written = 0
        self.marks = 0

    def bound(self) -> int:
        """Return an upper bound of the places in use."""
        if self._arrives is not None and self._arrives.query():
            self._arrives = None
            self.learn(self._copy.tolist(), self._asked_at)
        return self._bound

    def learn(self, counters: list[int], written: int) -> None:
        """Use counters that were read when `written` had the given value."""
        if written > self._complained_at:  # bad times of earlier batches were reported already
            self._checked(counters)
        self.marks = counters[MARKS]
        # Batches since then may have created a row for each of their ids.
        self._bound = min(self._bound, counters[USED] + self.written - written)

    def wrote(self, ids: int) -> int:
        """Count a batch that was written; return the bound after it."""
        self._bound += ids
        self.written += ids
        return self._bound

    def grew(self, ids: int, limit: int) -> None:
        """Count a batch that was written, and ask the device for the true number if it may matter soon."""
        self.wrote(ids)
        # One copy at a time. It runs behind the kernels on the stream; `bound` picks it up once it has
        # arrived.
        if self._arrives is None and self._bound > _ASKED_FROM * limit:
            self._copy.copy_(self.counters, non_blocking=True)
            self._arrives = self._device.current_stream().record()
            self._asked_at = self.written

    def holds(self, places: int) -> None:
        """Set the bound: no more places are in use, as of the next launch."""
        self._bound = places
        self._arrives = None

    def read(self) -> Counted:
        """Return the counters, waiting for the device."""
        seen = Counted(self.counters.tolist())
        self.holds(seen.counters[USED])
        return self._checked(seen.counters)

    def clear(self) -> None:
        """Reset the counters of a table that was cleared, its newest event time included."""
        self.counters[USED] = self.counters[MARKS] = self.counters[NEWEST] = 0
        self.holds(0)

    def _checked(self, counters: list[int]) -> Counted:
        if wrong := counters[BAD_TIMES]:
            self.counters[BAD_TIMES] = 0
            self._complained_at = self.written
            raise TableArgumentError(
                f"table {self._name!r}: event_time: {wrong:,} on the device, given to an earlier call, "
                f"were not Unix seconds from 0 to {MAX_EVENT_TIME}; those rows were written with time 0"
            )
        return Counted(counters)


FULL = 0.75
"""Of its places are in use when a table grows."""

# Loads are shares of places in use: searches get slow above 0.9.
_AFTER_GROWTH = 0.375  # half of FULL: the table doubled
_AFTER_LARGE_GROWTH = 0.5  # grown by half: old and new memory must fit at the same time
_LEAST_GROWTH = 0.7  # after growth on a device with little free memory
_FULL_FOR_A_WHILE = 0.8  # while a large table waits for the call that moves it
_LARGE_BYTES = 1 << 30
_BRIM = 0.9  # a table that has its final size fills up to this
_LEAST_PLACES = 256
_SMALL = 16  # a budget's part that a table leaves for all the rest
_MUCH_TOO_LARGE = 4  # times the size that the rows need: then memory is returned


class Growth:
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
        return (self._most - places - EXTRA_PLACES) // KEYS * KEYS

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
        """Return a smaller size that is worth moving to, never below the first; None if there is none."""
        wanted = max(self._first, _places_for(rows, _AFTER_GROWTH))
        if _MUCH_TOO_LARGE * wanted > places or (self._most is not None and wanted > self._small):
            return None
        return wanted


def _most_places(config: TableConfig, bytes_per_place: int) -> int | None:
    if config.capacity_bytes is None:
        return None
    places = (config.capacity_bytes // bytes_per_place - EXTRA_PLACES) // KEYS * KEYS
    if places < KEYS:
        raise ConfigError(
            f"table {config.name!r}: capacity_bytes is {config.capacity_bytes:,}, and on a GPU a table of "
            f"such rows needs {(KEYS + EXTRA_PLACES) * bytes_per_place:,} at least"
        )
    return places


def _places_for(rows: int, load: float) -> int:
    return (int(rows / load) // KEYS + 1) * KEYS


def bytes_for_rows(config: TableConfig, rows: int) -> int:
    """Return the bytes of a device for a table with room for so many rows, of which others spill."""
    places = _places_for(rows, FULL) + EXTRA_PLACES
    return places * (row_layout(config).bytes_per_place + RECENCY_BYTES)


def device_budgets(configs: Mapping[str, TableConfig], total: int) -> dict[str, int]:
    """Return the bytes for each table, `total` together at most.

    Raises:
        ConfigError: They are too few for the smallest tables there are.
    """
    per_place = {name: row_layout(one).bytes_per_place + RECENCY_BYTES for name, one in configs.items()}
    said = [one.initial_rows for one in configs.values() if one.initial_rows]
    usual = max(1, sum(said) // len(said)) if said else 1
    weights = {name: (one.initial_rows or usual) * per_place[name] for name, one in configs.items()}
    # Shares are by weight, but a table takes no more than its own capacity_bytes. What those tables leave is
    # divided among the remaining ones, which may bring further tables to their capacity: repeat until none
    # is.
    shares: dict[str, int] = {}
    while open_names := [name for name in configs if name not in shares]:
        left = total - sum(shares.values())
        weight = sum(weights[name] for name in open_names)
        fair = {name: left * weights[name] // weight for name in open_names}
        bounded = {
            name: most
            for name in open_names
            if (most := configs[name].capacity_bytes) is not None and most <= fair[name]
        }
        shares |= bounded or fair
    for name, share in shares.items():
        least = (KEYS + EXTRA_PLACES) * per_place[name]
        if share < least:
            raise ConfigError(
                f"{total:,} bytes on a device for {len(configs)} tables: {name!r} has {share:,}, and the "
                f"smallest table of such rows needs {least:,}; raise device_memory_bytes, or leave it out"
            )
    return shares
