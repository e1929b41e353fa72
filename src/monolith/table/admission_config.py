"""The config of an admission filter, apart from the filters: a run's config has it, and needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from monolith.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionConfig:
    """How sightings of ids without a row are counted, where a feature has an `occurrence_threshold`."""

    kind: Literal["sliding_hash_filter", "probabilistic_filter", "no_filter"] = "sliding_hash_filter"
    """The admission filter: count sightings for a while, admit by chance without counting, or admit all."""
    capacity: int = 1 << 22
    """Ids that a table's sliding filter remembers, at least 300; 2.4 bytes each."""
    split_num: int = 7
    """Parts of a sliding filter, at least 5; the oldest is emptied when the newest is full."""
    equal: bool = False
    """Whether a probabilistic filter gives every sighting the same chance, instead of one that grows with the
    sightings in a batch."""

    def __post_init__(self) -> None:
        for name, least in (("capacity", 300), ("split_num", 5)):
            if getattr(self, name) < least:
                raise ConfigError(f"admission: {name} must be at least {least}, got {getattr(self, name)}")
