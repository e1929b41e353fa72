"""What a run says of its examples beside their features and labels."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class ExamplesConfig:
    """Settings of the examples that features are read of; see `FeatureSpec`."""

    event_time: str | None = None
    """The column of each example's time, by which rows expire and time gaps are measured: texts in ISO 8601,
    which are UTC without a zone, timestamps, dates, or Unix times. An example without one does not move the
    clock."""
    event_time_unit: Literal["auto", "iso", "s", "ms", "us", "ns"] = "auto"
    """What numbers in columns of times count: seconds, milliseconds, microseconds or nanoseconds; or "iso"
    for texts in ISO 8601 alone. "auto" recognises each by its size or form, and a line of the log says so."""
    group: str | None = None
    """The feature of ids that groups examples for metrics by group, such as the user."""
    fids: bool = False
    """Whether ids carry the slot of their feature in their high bits, as fids of version 2."""
    optional: tuple[str, ...] = ()
    """Columns that the data may lack: they then read as empty cells, and a label is not there. A label that
    is not optional must be in every record: one without it is bad."""
    max_bad: float = 0.1
    """The share of records that may be bad, 0 to 1: left out and counted. More end the run."""

    @property
    def settings(self) -> dict[str, Any]:
        """All of it by name, as a FeatureSpec takes it."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
