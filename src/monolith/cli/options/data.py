"""The options of `monolith data ...`, apart from the code that runs them: they must not load torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from monolith.cli.options.flags import SecurityOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class DataHeadOptions:
    """Show the first records of some files."""

    paths: tuple[str, ...]
    """Files, or patterns with * in them."""
    records: int = 3
    """How many records to show."""
    columns: tuple[str, ...] = ()
    """Columns to show; by default all."""
    format: str | None = None
    """The format of the files; by default taken from their names."""
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
class DataJoinOptions:
    """Join a log of served features with the actions of users, and write labelled examples to one file.

    Examples have a column label with a number for each --positives, 1 or 0; set labels.NAME.column to label.
    Negatives are all rows that were served and had no positive action within the window.
    """

    paths: tuple[str, ...]
    """Files of the log, or patterns with * in them; read in the order of their names."""
    actions: tuple[str, ...] = ()
    """Files of actions, in order of time, or patterns: records with the columns of --key, --time and
    --action."""
    to: str = ""
    """The file to write; it appears when it is complete."""
    positives: tuple[str, ...] = ("1",)
    """For each label the actions that make it 1, such as 1,2; several may follow each other."""
    window: str = "1h"
    """How long after a row was served its actions count: seconds, or as in 1h."""
    lateness: str = "10m"
    """How far from the order of time records of either stream may be."""
    negative_rate: float = 1.0
    """Fraction of negatives to keep; line_id.sample_rate of each example says it."""
    key: str = "served.key"
    """The column that names an event in both: ID/ROW of a request; or line_id.req_id, if all requests have
    one row."""
    time: str = "line_id.req_time"
    """The column of Unix seconds in both."""
    action: str = "line_id.actions"
    """The column of the actions, whole numbers."""
    actions_format: str | None = None
    """The format of the files of actions; by default taken from their names."""
    to_format: str | None = None
    """The format to write; by default taken from the name of the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSkewOptions:
    """Compare served features and scores with what the training pipeline computes for the same events.

    The exit status is 1 if there are differences.
    """

    run: str
    """The folder of the run whose pipeline and model are compared with the log."""
    log: tuple[str, ...]
    """Files of the log of served features, or patterns with * in them."""
    data: str | None = None
    """Files of raw records of the served events, in place of those that the run predicts."""
    key: str = "served.key"
    """The column of the data that names the event: ID/ROW of its request, or the ID alone for row 0."""
    config: Path | None = None
    """The config file of the run; by default the one it was trained with."""
    task: str | None = None
    """The task, path/to/file.py:Name; by default the one that was trained."""
    checkpoint: str | None = None
    """The checkpoint whose scores are compared; by default that of the step that was served last, if it is
    there."""
    quiet: bool = False
    """Show the result alone, and on standard error only warnings and errors."""
    json: bool = False
    """Print one JSON object instead of a table."""


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
