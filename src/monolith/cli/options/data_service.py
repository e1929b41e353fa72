"""The options of `monolith data dispatcher | worker`, apart from what runs them: reading them must not load
torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import tyro

from monolith.cli.options.security import SecurityOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class DataDispatcherOptions:
    """Hand out splits of data to data workers, and their chunks to trainers, each once per epoch."""

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
