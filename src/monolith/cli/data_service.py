"""`monolith data dispatcher` and `monolith data worker`: the two servers of the data service.

Each prints its address as one line on standard output, shows on standard error how far it
has come, and stops in order on SIGTERM or Ctrl-C.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from monolith.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class DataDispatcherOptions:
    """Hand out splits of data to data workers, and their chunks to trainers, each once per epoch."""

    splits: tuple[str, ...]
    """Files, patterns with * in them, or whatever else the workers' source understands."""
    folder: str
    """Where the job's state is kept, on a local disk; started again on the same folder, it goes on."""
    host: str = "127.0.0.1"
    """Address to listen on; by default this machine only."""
    port: int = 5050
    """0 chooses a free one."""
    token_file: Path | None = None
    """A file with the shared token that workers and trainers must present."""
    epochs: int = 1
    """How often each split is read."""
    lease: float = 10.0
    """Seconds that a data worker may be silent before its splits go to others."""
    trainer_timeout: float | None = None
    """Seconds that a trainer may be silent before what it has not acknowledged goes to others; by default
    it is waited for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataWorkerOptions:
    """Read splits of data for a dispatcher, and send them to trainers."""

    source: str
    """module:function that opens a split: takes its name, returns a source. Modules of the current folder are
    found, too."""
    dispatcher: str | None = None
    """host:port of the dispatcher; by default what MLP's environment says, as in MLP_DISPATCHER_0_HOST."""
    host: str = "127.0.0.1"
    """Address to listen on; by default this machine only."""
    port: int = 0
    """0 chooses a free one."""
    advertise: str | None = None
    """The host by which trainers reach this machine, where it is not the address listened on."""
    token_file: Path | None = None
    """A file with the shared token."""
    readers: int = 2
    """Splits to read at a time."""
    buffer_chunks: int = 16
    """Chunks that may wait for a trainer before reading stops."""
    chunk_records: int = 4096
    """The most records in a chunk."""
    patience: float = 300.0
    """Seconds that the dispatcher may be away."""


def dispatcher(options: DataDispatcherOptions) -> int:
    """Run a dispatcher until it is told to stop."""
    from monolith import filesystem
    from monolith.data.service import Dispatcher, JobConfig
    from monolith.observe import progress

    splits: list[str] = []
    for split in options.splits:
        found = filesystem.glob(split) if "*" in split else [split]
        if not found:
            raise ConfigError(f"data dispatcher: no file matches {split!r}")
        splits += found
    config = JobConfig(
        splits=tuple(splits),
        epochs=options.epochs,
        lease=timedelta(seconds=options.lease),
        trainer_timeout=None
        if options.trainer_timeout is None
        else timedelta(seconds=options.trainer_timeout),
    )
    with (
        told_to_stop() as stop,
        Dispatcher(
            config,
            folder=options.folder,
            host=options.host,
            port=options.port,
            token=read_token(options.token_file),
        ) as running,
        progress("Data dispatched", unit="records") as bar,
    ):
        say(f"dispatcher {running.address}")
        known = 0
        while not stop.wait(1.0):
            records = running.status()["records"]
            bar.advance(records - known)
            known = records
    return 0


def worker(options: DataWorkerOptions) -> int:
    """Run a data worker until it is told to stop, or loses its dispatcher."""
    from monolith.data.service import DataWorker, dispatcher_from_environment

    open_split = find_function(options.source)
    with (
        told_to_stop() as stop,
        DataWorker(
            options.dispatcher or dispatcher_from_environment(os.environ),
            open_split,
            host=options.host,
            port=options.port,
            advertise=options.advertise,
            token=read_token(options.token_file),
            readers=options.readers,
            buffer_chunks=options.buffer_chunks,
            chunk_records=options.chunk_records,
            patience=timedelta(seconds=options.patience),
        ) as running,
    ):
        say(f"worker {running.address}")
        while not stop.is_set() and not running.wait(0.5):
            pass
    return 0


def read_token(path: Path | None) -> str | None:
    """Return the token in a file, less the line's end."""
    if path is None:
        return None
    try:
        token = path.read_text(encoding="utf-8").strip()
    except OSError as cause:
        raise ConfigError(f"cannot read the token file {path}: {cause}") from cause
    if not token:
        raise ConfigError(f"the token file {path} is empty")
    return token


def find_function(name: str) -> Callable[[str], Any]:
    """Return what `module:function` names."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise ConfigError(f"--source must be module:function, got {name!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a script's path does not begin with the current folder; `python -m` has it
    try:
        found: Callable[[str], Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as cause:
        raise ConfigError(f"--source {name}: {cause}") from cause
    return found


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@contextmanager
def told_to_stop() -> Iterator[threading.Event]:
    """An event that SIGTERM and Ctrl-C set, as long as the block lasts."""
    stop = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
