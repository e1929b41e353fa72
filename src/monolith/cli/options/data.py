"""The options of `monolith data ...`, apart from the code that runs them: they must not load torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import tyro

from monolith.cli.options.flags import SecurityOptions


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
    """Faults to print; the rest are only counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataDispatcherOptions:
    """Assign splits of data to data workers, and their chunks to trainers, each once per epoch."""

    splits: tuple[str, ...]
    """Files, patterns with * in them, or whatever else the workers' source understands."""
    folder: str
    """The local folder for the state of the job; a dispatcher restarted with the same folder continues."""
    discovery: str | None = None
    """Where the dispatcher registers: zookeeper://host:2181/job, consul://host:8500/job or
    files:///shared/folder/job. It deregisters at the end."""
    host: str = "127.0.0.1"
    """The address to listen on; by default only this machine can reach it."""
    port: int = 5050
    """The port to listen on; 0 chooses a free one."""
    advertise: str | None = None
    """The host by which others reach this machine, where it is not the address listened on."""
    epochs: int = 1
    """How often each split is read."""
    lease: float = 10.0
    """Seconds without a sign of a data worker after which its splits go to others."""
    trainer_timeout: float | None = None
    """Seconds that a trainer may be silent before what it has not acknowledged goes to others; by default
    it is waited for."""
    security: Annotated[SecurityOptions, tyro.conf.arg(name="")] = field(default_factory=SecurityOptions)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataWorkerOptions:
    """Read splits of data for a dispatcher, and send them to trainers."""

    source: str
    """module:function that opens a split: takes its name, returns a source. Modules of the current folder are
    found, too."""
    dispatcher: str | None = None
    """host:port of the dispatcher; by default what discovery says, and without that MLP's environment, as in
    MLP_DISPATCHER_0_HOST."""
    discovery: str | None = None
    """Where the dispatcher is registered: zookeeper://host:2181/job, consul://host:8500/job or
    files:///shared/folder/job. It is looked up again when it has moved."""
    host: str = "127.0.0.1"
    """The address to listen on; by default only this machine can reach it."""
    port: int = 0
    """The port to listen on; 0 chooses a free one."""
    advertise: str | None = None
    """The host by which trainers reach this machine, where it is not the address listened on."""
    readers: int = 2
    """The number of splits read at the same time."""
    buffer_chunks: int = 16
    """The number of chunks that may wait for a trainer before reading pauses."""
    chunk_records: int = 4096
    """The largest number of records in a chunk."""
    patience: float = 300.0
    """Seconds that the dispatcher may be unreachable, at the start or later."""
    security: Annotated[SecurityOptions, tyro.conf.arg(name="")] = field(default_factory=SecurityOptions)
