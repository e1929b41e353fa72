"""What `monolith data head | stats | convert | validate` takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DataHeadOptions:
    """Show the first records of a file."""

    path: str
    """The file to read."""
    records: int = 3
    """How many records to show."""
    columns: tuple[str, ...] = ()
    """Columns to show; by default all."""
    format: str | None = None
    """The format of the file; by default taken from its name."""
    json: bool = False
    """Print one JSON object per record instead of a table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataStatsOptions:
    """Count what each column of some files holds: fill rates, values per record, distinct values."""

    paths: tuple[str, ...]
    """Files, or patterns with * in them."""
    columns: tuple[str, ...] = ()
    """Columns to count; by default all."""
    format: str | None = None
    """How the files are written; by default told by their names."""
    plot: str | None = None
    """Also draw a picture to this file (.png, .svg, .pdf)."""
    json: bool = False
    """Print one JSON object instead of a table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConvertOptions:
    """Write the records of some files to one file of another format."""

    paths: tuple[str, ...]
    """Files to read, or patterns with * in them."""
    to: str = ""
    """The file to write; it appears when it is complete."""
    columns: tuple[str, ...] = ()
    """Columns to keep; by default all."""
    format: str | None = None
    """The format of the files to read; by default taken from their names."""
    to_format: str | None = None
    """The format to write; by default taken from the name of the file."""
    skip_bad: bool = False
    """Skip malformed records instead of stopping."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataValidateOptions:
    """Read files to their end and report what is wrong with them."""

    paths: tuple[str, ...]
    """Files, or patterns with * in them."""
    format: str | None = None
    """How the files are written; by default told by their names."""
    most: int = 20
    """Faults to print; the others are only counted."""
