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
    """Where the job's state is kept, on a local disk; started again on the same folder, it goes on."""
    discovery: str | None = None
    """Where to say that the dispatcher is here: zookeeper://host:2181/job, consul://host:8500/job or
    files:///shared/folder/job. Taken back at the end."""
    host: str = "127.0.0.1"
    """Address to listen on; by default this machine only."""
    port: int = 5050
    """0 chooses a free one."""
    advertise: str | None = None
    """The host by which others reach this machine, where it is not the address listened on."""
    epochs: int = 1
    """How often each split is read."""
    lease: float = 10.0
    """Seconds that a data worker may be silent before its splits go to others."""
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
    files:///shared/folder/job. It is found again when it has moved."""
    host: str = "127.0.0.1"
    """Address to listen on; by default this machine only."""
    port: int = 0
    """0 chooses a free one."""
    advertise: str | None = None
    """The host by which trainers reach this machine, where it is not the address listened on."""
    readers: int = 2
    """Splits to read at a time."""
    buffer_chunks: int = 16
    """Chunks that may wait for a trainer before reading stops."""
    chunk_records: int = 4096
    """The most records in a chunk."""
    patience: float = 300.0
    """Seconds that the dispatcher may be away, at the start or later."""
    security: Annotated[SecurityOptions, tyro.conf.arg(name="")] = field(default_factory=SecurityOptions)
