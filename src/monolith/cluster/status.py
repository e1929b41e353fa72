"""The status of a job: each process writes its own into the folder they share.

Every process of a run writes a small file into `status/` of the model_dir every few seconds: its name,
its phase, its speed. A reader of the folder sees the whole job, from any machine, without a request to any
process: not to the chief, which would have to ask a thousand servers, and not to a process that hangs.

    written every few seconds ──clean end──► removed
              │
              ├──an error ends it──► left behind, and says so
              └──killed, stopped, cut off──► left behind, and grows old

A file that was left behind is how the next start of that process knows that it is a restart.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, Self

from monolith import concurrency, filesystem
from monolith.errors import MonolithError, RequestError, TransientFilesystemError
from monolith.filesystem.backends import errors_as
from monolith.observe import Doublings
from monolith.observe.progress import describe_bytes, describe_count, describe_part, describe_rate
from monolith.wire.messages import Count, Name, Seconds, Text, read_message, write_message

_log = logging.getLogger(__name__)

FOLDER = "status"
"""In the model_dir."""
STATUS_PATH = "/status"
"""On the port of a process's metrics."""
EVERY = timedelta(seconds=2)
REMOTE_EVERY = timedelta(seconds=15)
"""On storage where every write is a request."""
MOST_PROCESSES = 20_000
"""More files than these are not read."""
SILENT_PERIODS = 4
"""A process that has missed so many of its own periods is silent."""
SPAN_SECONDS = 10.0
"""A rate is that of the last so many seconds."""
FAILED = "failed"
"""The state of a process that an error has ended."""
_LONGEST_FILE = 64 << 10

Role = Literal["worker", "ps", "dispatcher", "data_worker"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TierStatus:
    """The tiered tables of a process, all together. A rate is None until it is known."""

    rows: Count
    hot_rows: Count
    """Of the rows, those in memory, of a device or of the host; all others are in files."""
    file_bytes: Count
    compactions: Count
    """Files that were compacted since the process started."""
    ids_per_s: Seconds | None = None
    """IDs that were looked up or written, per second."""
    ids_read_per_s: Seconds | None = None
    """Of these, the IDs whose row had to be read from a file."""
    reads_per_s: Seconds | None = None
    """Reads of files, most of them of one block, per second."""
    read_per_s: Seconds | None = None
    """Bytes that were read from files, per second."""
    written_per_s: Seconds | None = None
    device_rows: Count = 0
    """Of the hot rows, those on a device."""
    device_bytes: Count = 0
    memory_bytes: Count = 0
    """Of the host: hot rows, the index of all others, and buffers."""


def describe_tiers(tiers: Iterable[TierStatus | None]) -> str:
    """Return the tiered tables of some processes in a line; empty if they have none."""
    known = [one for one in tiers if one is not None]
    if not known:
        return ""
    rows = sum(one.rows for one in known)
    hot = sum(one.hot_rows for one in known)
    there = sum(one.device_rows for one in known)
    device_bytes = sum(one.device_bytes for one in known)
    memory_bytes = sum(one.memory_bytes for one in known)
    file_bytes = sum(one.file_bytes for one in known)
    places = [
        (there, "on the device", device_bytes),
        (hot - there, "in host memory" if there else "in memory", memory_bytes),
        (rows - hot, "in files", file_bytes),
    ]
    ids = sum(one.ids_per_s or 0.0 for one in known)
    ids_read = sum(one.ids_read_per_s or 0.0 for one in known)
    reads = sum(one.reads_per_s or 0.0 for one in known)
    read = sum(one.read_per_s or 0.0 for one in known)
    written = sum(one.written_per_s or 0.0 for one in known)
    compactions = sum(one.compactions for one in known)
    parts = [
        f"{describe_count(rows)} rows: "
        + ", ".join(
            f"{describe_count(count)} {where} ({describe_bytes(size)})"
            for count, where, size in places
            if count or where != "on the device"
        ),
        f"{describe_part(max(1 - ids_read / ids, 0.0))} of lookups and updates read no file" if ids else "",
        f"{describe_rate(reads, 'reads')} of {describe_bytes(read)}/s, {describe_bytes(written)}/s written"
        if any(one.read_per_s is not None for one in known)
        else "",
        f"{describe_count(compactions)} file{'' if compactions == 1 else 's'} compacted"
        if compactions
        else "",
    ]
    return "; ".join(filter(None, parts))


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessStatus:
    """What one process says of itself. None is what it does not know, or has not."""

    role: Role
    index: Count
    state: Name
    """A few words: starting, training, halted, serving, saving, failed."""
    time: Seconds
    """When it said so, in Unix seconds."""
    every: Seconds
    """How often it says so, in seconds."""
    started: Seconds
    """When the process started, in Unix seconds."""
    host: Text = ""
    pid: Count = 0
    address: Text = ""
    """Where it listens; empty for a process that does not."""
    control: Text = ""
    """Where its control server listens; empty for a process without."""
    metrics: Text = ""
    """The URL of its metrics; empty for a process that shows none."""
    job: Text = ""
    num_ps: Count = 0
    """Servers of the whole job."""
    num_workers: Count = 1
    step: Count | None = None
    """The global step, as this process knows it."""
    examples_per_s: Seconds | None = None
    steps_per_s: Seconds | None = None
    lag_seconds: Seconds | None = None
    """How far the newest example is behind the clock."""
    staleness: Seconds | None = None
    """Steps of others between two of this worker's, on average: its gradients do not know of them."""
    rows: Count | None = None
    bytes: Count | None = None
    """Memory of the tables."""
    tiers: TierStatus | None = None
    """Its tiered tables; None for a process without."""
    received_per_s: Seconds | None = None
    """Bytes that came over the wire."""
    sent_per_s: Seconds | None = None
    restarts: Count = 0
    """Restarts of this process since it last ended cleanly."""
    failovers: Count = 0
    """Times this process lost other processes and resumed."""
    data_read: Seconds | None = None
    """Which part of its data this worker has trained on, from 0 to 1."""
    seconds_left: Seconds | None = None
    """How long the run will still take at the speed so far, as this worker sees it."""
    saved_at: Seconds | None = None
    """When the last checkpoint was on disk, in Unix seconds; only the chief knows."""
    save_trouble: Text = ""
    """Why the newest state is not saved or exported, a queue of files not written, or expired rows not
    evicted; empty while all of it succeeds, or another process knows."""
    publishing: Text = ""
    """The state of publishing, in words; empty if nothing is published, or another process knows."""
    standbys: Text = ""
    """Shards that lack a standby and since when, in words; only the chief knows. Empty if none does."""

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}"

    def age(self, now: float) -> float:
        """Return the seconds since the process wrote, from its clock to `now` by this machine's."""
        return max(now - self.time, 0.0)

    def clock_ahead(self, now: float) -> float:
        """Return how far its clock is ahead of `now`; 0 if they agree. Its age is then not known."""
        ahead = self.time - now
        return ahead if ahead > SPAN_SECONDS else 0.0

    def is_silent(self, now: float) -> bool:
        """Return whether the process has missed several writes."""
        return self.age(now) > max(SILENT_PERIODS * self.every, SPAN_SECONDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStatus:
    """The status of every process of a job."""

    time: Seconds
    """The time of gathering in Unix seconds, by the clock of the process that gathered."""
    processes: tuple[ProcessStatus, ...] = ()
    unreadable: Count = 0
    """Files that are damaged, of another version, or too many."""

    def to_json(self) -> bytes:
        return json.dumps(write_message(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> JobStatus:
        """Read what `to_json` wrote.

        Raises:
            RequestError: It is something else.
        """
        try:
            found = json.loads(text)
        except ValueError as cause:
            raise RequestError(f"it is not JSON: {cause}") from cause
        return read_message(cls, found)


class StatusBoard:
    """The status files of a job, in its model_dir."""

    def __init__(self, model_dir: str) -> None:
        self.folder = filesystem.join(model_dir, FOLDER)
        self.is_remote = filesystem.is_remote(model_dir)

    @property
    def every(self) -> timedelta:
        """The default interval between writes."""
        return REMOTE_EVERY if self.is_remote else EVERY

    def write(self, status: ProcessStatus) -> None:
        """Replace the last status of a process.

        Raises:
            FilesystemError: The folder cannot be written.
        """
        path, text = self._path(status.role, status.index), json.dumps(write_message(status)).encode()
        filesystem.make_dirs(self.folder)
        if self.is_remote:
            with filesystem.atomic_write(path) as file:
                file.write(text)
            return
        # Like an atomic write, without waiting for the disk: a status is worthless after the machine crashed.
        unfinished = Path(filesystem.temporary(path))
        try:
            with errors_as("write", path):
                created = filesystem.open_regular(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
                with os.fdopen(created, "wb") as opened:
                    opened.write(text)
                unfinished.replace(path)
        except TransientFilesystemError:
            # `monolith status` must be able to report a full disk. A file of less than a block can be
            # rewritten in place without new blocks, so the old one is overwritten. A reader may see a
            # torn one.
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            _write_over(path, text)

    def read_one(self, role: Role, index: int) -> ProcessStatus | None:
        """Return the last status of a process; None if it wrote none, or none that is readable."""
        with suppress(MonolithError):
            return self._read(self._path(role, index))
        return None

    def read(self, clock: Callable[[], float] = concurrency.time) -> JobStatus:
        """Return what is known of all processes.

        Raises:
            FilesystemError: The folder is there and cannot be read.
        """
        found: list[ProcessStatus] = []
        bad = 0
        paths = filesystem.list_files(self.folder) if filesystem.is_folder(self.folder) else []
        paths = [path for path in paths if path.endswith(".json")]
        for path in paths[:MOST_PROCESSES]:
            try:
                found.append(self._read(path))
            except MonolithError as error:
                _log.debug("%s: %s", path, error)
                bad += filesystem.exists(path)  # otherwise its process has ended meanwhile
        bad += max(len(paths) - MOST_PROCESSES, 0)
        found.sort(key=lambda status: (status.role != "worker", status.index))
        return JobStatus(time=clock(), processes=tuple(found), unreadable=bad)

    def remove(self, role: Role, index: int) -> None:
        """Take a process's word back; the folder goes with the last."""
        filesystem.remove(self._path(role, index))
        if not self.is_remote:
            with suppress(OSError):
                Path(self.folder).rmdir()

    def _path(self, role: Role, index: int) -> str:
        return filesystem.join(self.folder, f"{role}-{index}.json")

    def _read(self, path: str) -> ProcessStatus:
        with filesystem.open_read(path) as file:
            text = file.read(_LONGEST_FILE)
        try:
            return read_message(ProcessStatus, json.loads(text))
        except ValueError as cause:
            raise RequestError(f"it is not JSON: {cause}") from cause


def _write_over(path: str, text: bytes) -> None:
    """Replace the content of a file without taking more of the disk."""
    with errors_as("write", path), os.fdopen(filesystem.open_regular(path, os.O_RDWR), "r+b") as file:
        file.write(text)
        file.truncate()


class StatusWriter:
    """Writes how this process stands, from a thread of its own, while the block lasts.

    A board that cannot be written is warned about, and harms nothing else.

    Args:
        look: Says how it stands now; called on that thread. What is said of time and restarts is set here.
    """

    def __init__(
        self,
        board: StatusBoard,
        look: Callable[[], ProcessStatus],
        *,
        every: timedelta | None = None,
        clock: Callable[[], float] = concurrency.time,
    ) -> None:
        self._board = board
        self._look = look
        self._every = (board.every if every is None else every).total_seconds()
        self._clock = clock
        self._restarts = 0
        self._failures, self._worth_saying = 0, Doublings()
        self._stop = concurrency.Event()
        self._thread = concurrency.Thread(target=self._write_on, name="status", daemon=True)

    def now(self) -> ProcessStatus:
        """Return how the process stands."""
        return replace(self._look(), time=self._clock(), every=self._every, restarts=self._restarts)

    def write(self) -> None:
        """Write it now; a failure is logged, the first and then ever fewer."""
        with self._passing_over():
            self._board.write(self.now())

    def __enter__(self) -> Self:
        me = self._look()
        if (before := self._board.read_one(me.role, me.index)) is not None:
            self._restarts = before.restarts + 1
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        with self._passing_over():
            status = self.now()
            if error is not None and not isinstance(error, SystemExit | KeyboardInterrupt):
                self._board.write(replace(status, state=FAILED))
            else:
                self._board.remove(status.role, status.index)

    def _write_on(self) -> None:
        while not self._stop.is_set():
            self.write()
            self._stop.wait(self._every)

    @contextmanager
    def _passing_over(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # training continues after any error
            self._failures += 1
            if self._worth_saying.due(self._failures):
                _log.warning("`monolith status watch` cannot see this process: %s", error)


class StatusPage:
    """The status of a job as bytes for clients, gathered at most once per interval. Thread-safe.

    Args:
        board: Has the status of the other processes; None for a process without a shared folder.
        own: Returns the status of this process now.
    """

    def __init__(
        self,
        board: StatusBoard | None,
        own: Callable[[], ProcessStatus],
        *,
        at_most_every: float = 1.0,
        clock: Callable[[], float] = concurrency.time,
        timer: Callable[[], float] = concurrency.monotonic,
    ) -> None:
        self._board = board
        self._own = own
        self._keep = at_most_every
        self._clock, self._timer = clock, timer
        self._lock = concurrency.Lock()  # guards what follows, and lets one caller gather at a time
        self._page = b""
        self._gathered = -math.inf

    def __call__(self) -> bytes:
        with self._lock:
            now = self._timer()
            if not self._page or now - self._gathered >= self._keep:
                self._page, self._gathered = self._gather().to_json(), now
            return self._page

    def _gather(self) -> JobStatus:
        job = JobStatus(time=self._clock()) if self._board is None else self._board.read(self._clock)
        own = self._own()
        others = [one for one in job.processes if (one.role, one.index) != (own.role, own.index)]
        known = sorted([*others, own], key=lambda status: (status.role != "worker", status.index))
        return replace(job, processes=tuple(known))


class _Seen(NamedTuple):
    time: float
    counts: Mapping[str, float]


class Rates:
    """How fast counters grow, over the last seconds. For one thread.

    Args:
        clock: Seconds that only grow.
    """

    def __init__(
        self, span: float = SPAN_SECONDS, clock: Callable[[], float] = concurrency.monotonic
    ) -> None:
        self._span = span
        self._clock = clock
        self._seen: deque[_Seen] = deque()

    def of(self, counts: Mapping[str, float]) -> dict[str, float]:
        """Record the counters; return the growth of each per second.

        Empty at first, or if a counter restarted.
        """
        now = self._clock()
        if self._seen and any(counts[name] < self._seen[-1].counts.get(name, 0) for name in counts):
            self._seen.clear()
        while len(self._seen) > 1 and now - self._seen[1].time >= self._span:
            self._seen.popleft()
        self._seen.append(_Seen(now, dict(counts)))
        then = self._seen[0]
        if now <= then.time:
            return {}
        return {name: (counts[name] - then.counts.get(name, 0)) / (now - then.time) for name in counts}
