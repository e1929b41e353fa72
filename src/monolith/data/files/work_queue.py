"""Work queues: which worker reads which file, decided while they read.

A worker takes a file as a lease that ends by itself. Who finishes a file says so; who
dies loses its leases when they run out, and the file is handed out again from the last
place that was reported. So a fast worker reads more, and no file is lost.

A report says "all records before this place count". A trainer that saves checkpoints
reports what a checkpoint covers, when it is saved and not before: what was trained
after it is lost with the worker, and must be read again.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeGuard, TypeVar

from monolith.errors import ConfigError, CorruptFileError, DataError, RestoreError, TransientFilesystemError
from monolith.filesystem import atomic_write
from monolith.filesystem.backends import errors_as
from monolith.observe import Sightings

_log = logging.getLogger(__name__)

T = TypeVar("T")

Clock = Callable[[], float]
"""Seconds. Of a queue that processes share Unix seconds, which are the same in all of them."""

Progress = dict[str, int]
"""A place in a file: plain numbers that mean something to the readers only. Empty at its beginning."""

LEASE = timedelta(minutes=10)
PATIENCE = timedelta(minutes=35)
"""How long a queue keeps what it cannot write: about as long as the ten failed saves of the default take."""
RETRY_SECONDS = 1.0
CLOSE_SECONDS = 2.0
"""How long a worker that ends tries to write what it still has to say to the queue."""


class StrQueue:
    """Strings, first in, first out, that may be refilled when it runs dry. Thread-safe.

    Args:
        fill: Called when nothing is left; returns more, or nothing at the end, after which it
            is never called again.
    """

    def __init__(
        self,
        values: Sequence[str] = (),
        *,
        capacity: int = 100_000,
        fill: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        if capacity < 1:
            raise ConfigError(f"a string queue's capacity must be at least 1, got {capacity}")
        self._capacity = capacity
        self._fill = fill
        self._lock = threading.Lock()  # guards all below
        self._values: deque[str] = deque()
        self._ended = False
        self.enqueue_many(values)

    def enqueue_many(self, values: Sequence[str]) -> None:
        """Add all of these, or none.

        Raises:
            DataError: They would not fit.
        """
        with self._lock:
            self._add(values)

    def dequeue(self) -> tuple[str, bool]:
        """Return the oldest string and False; or, at the end and ever after, an empty one and True."""
        with self._lock:
            if not self._values and not self._ended:
                self._add(self._fill() if self._fill is not None else ())
                self._ended = not self._values
            return (self._values.popleft(), False) if self._values else ("", True)

    def __len__(self) -> int:
        with self._lock:
            return len(self._values)

    def state(self) -> dict[str, Any]:
        """Return what is left. Where `fill` stands is for its owner to save."""
        with self._lock:
            return {"values": list(self._values), "ended": self._ended}

    def restore(self, state: dict[str, Any]) -> None:
        """Hold what a queue held when its state was taken, and nothing else."""
        values, ended = state.get("values"), state.get("ended")
        if not _are_strings(values) or not isinstance(ended, bool):
            raise RestoreError(f"cannot restore a string queue from {_short(state)}: not a state of one")
        with self._lock:
            self._values = deque(values)
            self._ended = ended

    def _add(self, values: Sequence[str]) -> None:
        if len(self._values) + len(values) > self._capacity:
            raise DataError(
                f"string queue: {len(values)} more do not fit: it holds {len(self._values)} "
                f"of at most {self._capacity}"
            )
        self._values.extend(values)
        if values:
            self._ended = False


@dataclass(frozen=True, slots=True)
class Lease:
    """A file that one worker may read for a while."""

    number: int
    """Of the file in the queue: the same whoever reads it."""
    path: str
    worker: str
    token: str
    """Of this lease alone, so that who lost it cannot speak for who has it now."""
    expires: float
    """Unix seconds."""
    progress: Progress = field(default_factory=dict)
    """Where to begin."""
    read: bool = False
    """Whether all of it was read, though it is not known yet whether that counts."""


class FileQueue(Protocol):
    """Hands out files, each to one worker at a time. Any thread may call it."""

    def take(self, worker: str, number: int | None = None) -> Lease | None:
        """Hand out the next file, or None when none is waiting now.

        Args:
            number: Hand out this one, if it is waiting or a lease of the same worker: what a worker
                asks for that was restarted and knows what it was reading.

        Raises:
            TransientFilesystemError: The lease cannot be noted now, because a disk is full; ask again later.
        """

    def renew(self, lease: Lease) -> Lease | None:
        """Return the lease with its time starting anew, or None if it was lost.

        Costs next to nothing while most of its time is left; call it at every batch.
        """

    def report(self, lease: Lease, progress: Progress) -> bool:
        """Say that all records before this place count; return False if the lease was lost."""

    def mark_read(self, lease: Lease) -> None:
        """Say that the file was read to its end, so that nobody waits for it to come back."""

    def finish(self, lease: Lease) -> bool:
        """Say that all records of the file count; return False if the lease was lost."""

    def give_back(self, lease: Lease) -> None:
        """Let another worker have the file, from where it was reported last."""

    def release(self, worker: str) -> None:
        """Take back all leases of a worker that is known to have died or stopped."""

    def settle(
        self, workers: Collection[str], finished: Collection[int], reached: Mapping[int, Progress]
    ) -> None:
        """Take back all leases of workers that are no more, and note what they had done, in one go: nobody is
        handed a file of theirs at the place that was reported before.

        Args:
            finished: Files of which all records count.
            reached: Others, and how far their records count.
        """

    def readers(self) -> list[str]:
        """Return the names of the workers that have leases."""

    def others_hold(self, worker: str) -> bool:
        """Whether other workers are reading files, so that some may come back yet."""

    def wait(self) -> None:
        """Let some time pass before asking again."""

    @property
    def trouble(self) -> str:
        """Why the queue cannot note changes now, for a person; empty if it can."""

    def flush(self) -> None:
        """Try to write the changes that could not be written so far; returns within a few seconds."""

    def state(self) -> dict[str, Any]:
        """Return plain values that survive JSON: what is waiting, and how far leased files have come."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a state. All leases are lost; their files wait, from the places that were reported."""


@dataclass(slots=True)
class _Ledger:
    """Who has what. Knows neither locks nor where the names come from."""

    handed: int = 0
    """Files that were ever handed out: their numbers are below this."""
    waiting: dict[int, tuple[str, Progress]] = field(default_factory=dict)
    """Files that came back."""
    leases: dict[int, Lease] = field(default_factory=dict)

    def take(
        self,
        worker: str,
        number: int | None,
        expires: float,
        name_of: Callable[[int], str | None],
    ) -> Lease | None:
        if number is not None:
            own = self.leases.get(number)
            if own is not None and own.worker == worker:
                self.put_back(own)
            if number not in self.waiting:
                return None
        elif self.waiting:
            number = min(self.waiting)  # the oldest first: it has kept others waiting
        else:
            name = name_of(self.handed)
            if name is None:
                return None
            number = self.handed
            self.handed += 1
            self.waiting[number] = (name, {})
        path, progress = self.waiting.pop(number)
        lease = Lease(number, path, worker, secrets.token_hex(8), expires, progress)
        self.leases[number] = lease
        return lease

    def held(self, lease: Lease) -> Lease | None:
        """Return the lease as it is known here, if it was not lost."""
        known = self.leases.get(lease.number)
        return known if known is not None and known.token == lease.token else None

    def expire(self, is_over: Callable[[Lease], bool]) -> None:
        for lease in [lease for lease in self.leases.values() if is_over(lease)]:
            self.put_back(lease)

    def release(self, worker: str) -> None:
        for lease in [lease for lease in self.leases.values() if lease.worker == worker]:
            self.put_back(lease)

    def settle(
        self, workers: Collection[str], finished: Collection[int], reached: Mapping[int, Progress]
    ) -> None:
        for worker in workers:
            self.release(worker)
        for number in finished:
            self.waiting.pop(number, None)
        for number, progress in reached.items():
            if number in self.waiting:
                path, _ = self.waiting[number]
                self.waiting[number] = (path, progress)

    def put_back(self, lease: Lease) -> None:
        del self.leases[lease.number]
        self.waiting[lease.number] = (lease.path, lease.progress)

    def state(self) -> dict[str, Any]:
        waiting = self.waiting | {n: (lease.path, lease.progress) for n, lease in self.leases.items()}
        return {
            "handed": self.handed,
            "waiting": [[number, path, progress] for number, (path, progress) in sorted(waiting.items())],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> _Ledger:
        try:
            waiting = {
                int(number): (str(path), {str(key): int(value) for key, value in progress.items()})
                for number, path, progress in state["waiting"]
            }
            return cls(int(state["handed"]), waiting)
        except (KeyError, TypeError, ValueError, AttributeError) as cause:
            raise RestoreError(
                f"cannot restore a file queue from {_short(state)}: not a state of one"
            ) from cause


class _Queue(ABC):
    """What the queues below have in common: the verbs, each in one go on the ledger."""

    def __init__(self, lease: timedelta, clock: Clock, pause: Callable[[float], None]) -> None:
        if lease <= timedelta(0):
            raise ConfigError(f"file queue: a lease must last longer than {lease}")
        self._seconds = lease.total_seconds()
        self._clock = clock
        self._pause = pause

    def _is_over(self, lease: Lease) -> bool:
        """Whether a lease ran out. Called with the ledger held."""
        return lease.expires <= self._clock()

    def _is_fresh(self, lease: Lease) -> bool:
        """Whether a lease of this process needs no renewal yet."""
        return lease.expires - self._clock() > self._seconds * 2 / 3

    @abstractmethod
    def _ledger(self) -> AbstractContextManager[_Ledger]:
        """Give the ledger to one caller at a time, and keep what it makes of it."""

    def _tell(self, what: Hashable, change: Callable[[_Ledger], T], otherwise: T) -> T:  # noqa: ARG002
        """Change the ledger and return what the change does.

        Args:
            what: Names the change: of several with one name that could not be made yet, the newest counts.
                None changes nothing, and only looks.
            otherwise: What to return if the ledger cannot be read now.
        """
        with self._ledger() as ledger:
            return change(ledger)

    @abstractmethod
    def _next_name(self, number: int) -> str | None:
        """Return the file of this number, which was never handed out. Called with the ledger held."""

    def take(self, worker: str, number: int | None = None) -> Lease | None:
        with self._ledger() as ledger:
            ledger.expire(self._is_over)
            return ledger.take(worker, number, self._clock() + self._seconds, self._next_name)

    def renew(self, lease: Lease) -> Lease | None:
        if self._is_fresh(lease):
            return lease

        def change(ledger: _Ledger) -> Lease | None:
            ledger.expire(self._is_over)
            known = ledger.held(lease)
            if known is None:
                return None
            expires = self._clock() + self._seconds
            renewed = ledger.leases[lease.number] = replace(known, expires=expires)
            return renewed

        otherwise: Lease | None = lease
        return self._tell(("renew", lease.token), change, otherwise)

    def report(self, lease: Lease, progress: Progress) -> bool:
        def change(ledger: _Ledger) -> bool:
            ledger.expire(self._is_over)
            known = ledger.held(lease)
            if known is None:
                return False
            expires = self._clock() + self._seconds
            ledger.leases[lease.number] = replace(known, expires=expires, progress=progress)
            return True

        return self._tell(("report", lease.token), change, otherwise=True)

    def mark_read(self, lease: Lease) -> None:
        def change(ledger: _Ledger) -> None:
            known = ledger.held(lease)
            if known is not None:
                ledger.leases[lease.number] = replace(known, read=True)

        self._tell(("read", lease.token), change, None)

    def finish(self, lease: Lease) -> bool:
        def change(ledger: _Ledger) -> bool:
            ledger.expire(self._is_over)
            return ledger.held(lease) is not None and ledger.leases.pop(lease.number) is not None

        return self._tell(("finish", lease.token), change, otherwise=True)

    def give_back(self, lease: Lease) -> None:
        def change(ledger: _Ledger) -> None:
            if ledger.held(lease) is not None:
                ledger.put_back(ledger.leases[lease.number])

        self._tell(("give back", lease.token), change, None)

    def release(self, worker: str) -> None:
        self._tell(object(), lambda ledger: ledger.release(worker), None)

    def settle(
        self, workers: Collection[str], finished: Collection[int], reached: Mapping[int, Progress]
    ) -> None:
        self._tell(object(), lambda ledger: ledger.settle(workers, finished, reached), None)

    def readers(self) -> list[str]:
        with self._ledger() as ledger:
            return sorted({lease.worker for lease in ledger.leases.values()})

    def others_hold(self, worker: str) -> bool:
        def look(ledger: _Ledger) -> bool:
            return any(lease.worker != worker and not lease.read for lease in ledger.leases.values())

        return self._tell(None, look, otherwise=True)

    def wait(self) -> None:
        self._pause(min(self._seconds / 10, 1.0))

    @property
    def trouble(self) -> str:
        return ""

    def flush(self) -> None:
        return None  # nothing waits to be written


class LocalFileQueue(_Queue):
    """A file queue for the threads of one process, or behind a service of it.

    Args:
        names: Files to hand out: a list, or a queue that may fill itself.
    """

    def __init__(
        self,
        names: Sequence[str] | StrQueue,
        *,
        lease: timedelta = LEASE,
        clock: Clock = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(lease, clock, pause)
        self._names = names if isinstance(names, StrQueue) else StrQueue(names, capacity=max(len(names), 1))
        self._lock = threading.Lock()  # guards _book
        self._book = _Ledger()

    def state(self) -> dict[str, Any]:
        with self._ledger() as ledger:
            return {**ledger.state(), "names": self._names.state()}

    def restore(self, state: dict[str, Any]) -> None:
        book = _Ledger.from_state(state)
        with self._lock:
            self._names.restore(state.get("names", {}))
            self._book = book

    @contextmanager
    def _ledger(self) -> Iterator[_Ledger]:
        with self._lock:
            yield self._book

    def _next_name(self, number: int) -> str | None:  # noqa: ARG002  they come in order
        name, ended = self._names.dequeue()
        return None if ended else name


class SharedFileQueue(_Queue):
    """A file queue in a folder that all workers see.

    The folder holds the list of files, which only grows, and a small ledger that is
    replaced in one step; a lock on a third file lets one process at a time change them, and
    is let go by the system when a process dies. Needs a filesystem with POSIX locks: a
    local disk, NFS 4, CephFS, Lustre with flock. The clocks of the machines may be set while a run
    trains: a lease runs out if this process has not seen it renewed for its whole time. A process that
    has just started believes the clocks, which should then agree to within a small part of a lease.

    A full disk stops no worker before it needs another file. Changes that cannot be written are kept in this
    process, in order, and are written before the next one that can be; until then `take` raises, and no lease
    counts as run out, since no worker can renew any. A worker that is killed then loses only changes that its
    checkpoint implies: the next start settles them.

    Args:
        clock: Unix seconds, which leases are stamped with.
        timer: Seconds that only grow.
        patience: How long changes are kept; then the next call is an error.
    """

    def __init__(
        self,
        folder: str,
        *,
        lease: timedelta = LEASE,
        clock: Clock = time.time,
        timer: Clock = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
        patience: timedelta = PATIENCE,
    ) -> None:
        super().__init__(lease, clock, pause)
        self._timer, self._patience = timer, patience.total_seconds()
        self._sightings = Sightings(clock, timer)  # guarded by the ledger
        self._folder = Path(folder)
        with errors_as("make the folder of a file queue,", folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Lock()  # a process-wide lock does not keep our own threads apart
        self._names: list[str] = []
        self._names_bytes = 0
        # Guarded by _thread:
        self._unwritten: dict[Hashable, Callable[[_Ledger], object]] = {}  # oldest first
        self._failing_since: float | None = None
        self._failed_at = self._next_attempt = -math.inf
        self._trouble = ""

    @property
    def trouble(self) -> str:
        return self._trouble

    @property
    def unwritten(self) -> int:
        """How many changes wait to be written."""
        return len(self._unwritten)

    def renew(self, lease: Lease) -> Lease | None:
        if self._unwritten:
            self._write_kept()
        return super().renew(lease)

    def flush(self) -> None:
        deadline = self._timer() + CLOSE_SECONDS
        while self._unwritten:
            self._next_attempt = -math.inf  # now
            self._write_kept()
            if self._unwritten and self._timer() >= deadline:
                _log.warning(
                    "%s The files of this worker are handed out again when its leases run out, in up to "
                    "%.0f s. A run that resumes takes them before that, at the places of its checkpoint.",
                    *(self._trouble, self._seconds),
                )
                return
            if self._unwritten:
                self._pause(RETRY_SECONDS / 2)

    def _write_kept(self) -> None:
        with suppress(TransientFilesystemError, DataError), self._ledger():
            pass  # it writes what is kept; whether that lasts too long is for those to say who need it

    def take(self, worker: str, number: int | None = None) -> Lease | None:
        found: list[Lease | None] = []
        try:
            with self._ledger() as ledger:
                ledger.expire(self._is_over)
                found.append(ledger.take(worker, number, self._clock() + self._seconds, self._next_name))
        except TransientFilesystemError:
            if found != [None]:  # that no file is left is known without writing anything
                raise
        return found[0]

    def _tell(self, what: Hashable, change: Callable[[_Ledger], T], otherwise: T) -> T:
        result = otherwise
        try:
            with self._ledger() as ledger:
                result = change(ledger)
        except TransientFilesystemError:
            if what is not None:
                with self._thread:
                    self._unwritten.pop(what, None)
                    self._unwritten[what] = change
        return result

    def _is_over(self, lease: Lease) -> bool:
        # No worker could renew a lease while the disk was full; each has its whole time again since then.
        if self._failing_since is not None or self._timer() - self._failed_at < self._seconds:
            return False
        return self._age(lease) >= self._seconds

    def _is_fresh(self, lease: Lease) -> bool:
        with self._thread:
            return self._age(lease) < self._seconds / 3

    def _age(self, lease: Lease) -> float:
        began = lease.expires - self._seconds
        return self._sightings.age(lease.token, lease.expires, renewed_at=began, most=self._seconds)

    def add(self, files: Sequence[str]) -> int:
        """Add the files that were never added before; return how many those were.

        So every worker may add the same list, and one that watches a folder what it found.
        """
        with self._locked():
            known = set(self._all_names())
            new = [file for file in dict.fromkeys(files) if file not in known]
            path = self._folder / "files.jsonl"
            if new:
                with errors_as("add to the files of a queue,", path), path.open("ab") as file:
                    # What a process that was killed had half written is not a line yet: over it.
                    file.truncate(self._names_bytes)
                    file.write("".join(json.dumps(name) + "\n" for name in new).encode())
                    file.flush()
                    os.fsync(file.fileno())
            return len(new)

    def state(self) -> dict[str, Any]:
        with self._ledger() as ledger:
            return {**ledger.state(), "names": self._all_names()}

    def restore(self, state: dict[str, Any]) -> None:
        book = _Ledger.from_state(state)
        names = state.get("names")
        if not _are_strings(names):
            raise RestoreError(f"cannot restore a file queue from {_short(state)}: it names no files")
        with self._locked():
            # Files that were added since the state was taken stay, after those it knows.
            known = set(names)
            more = [name for name in self._all_names() if name not in known]
            with atomic_write(str(self._folder / "files.jsonl")) as file:
                file.write("".join(json.dumps(name) + "\n" for name in [*names, *more]).encode())
            self._names, self._names_bytes = [], 0
            self._write(book)
            self._unwritten.clear()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        path = self._folder / "lock"
        with self._thread:
            with self._noted(), errors_as("lock a file queue with", path):
                file = path.open("ab")
            with file:
                fcntl.flock(file, fcntl.LOCK_EX)  # let go with the file
                yield

    @contextmanager
    def _ledger(self) -> Iterator[_Ledger]:
        """Give the ledger with the changes that are kept, and write it with what the caller changes.

        Raises:
            TransientFilesystemError: It cannot be written now. The changes that were kept still are.
            DataError: It could not be written for as long as `patience`.
        """
        with self._locked():
            with self._noted():
                before = self._read()
            ledger = _Ledger(before.handed, dict(before.waiting), dict(before.leases))
            self._sightings.keep({lease.token for lease in ledger.leases.values()})
            for change in self._unwritten.values():
                change(ledger)
            yield ledger
            if ledger != before:
                if self._timer() < self._next_attempt:
                    # A reader comes here at every batch; to try for each would slow it down for nothing.
                    raise TransientFilesystemError(self._trouble)
                with self._noted():
                    self._write(ledger)
                if self._failing_since is not None:
                    _log.warning("the file queue in %s can be written again", self._folder)
                self._failing_since, self._trouble = None, ""
            self._unwritten.clear()

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Note a failure that may pass; turn one that has lasted too long into an error that ends the run."""
        try:
            yield
        except TransientFilesystemError as error:
            now = self._failed_at = self._timer()
            self._next_attempt = now + RETRY_SECONDS
            self._trouble = f"the file queue in {self._folder} cannot be written: {error}"
            if self._failing_since is None:
                self._failing_since = now
                _log.warning(
                    "%s Training continues with the files that this worker has; changes are kept and retried",
                    self._trouble,
                )
            if (lasts := now - self._failing_since) >= self._patience:
                raise DataError(
                    f"{self._trouble} It was retried for {lasts:.0f} s. Make room there and start the run "
                    "again: it resumes from its newest checkpoint."
                ) from error
            raise

    def _next_name(self, number: int) -> str | None:
        names = self._all_names()
        return names[number] if number < len(names) else None

    def _all_names(self) -> list[str]:
        """Return the files of the list; reads only what was added since the last call."""
        path = self._folder / "files.jsonl"
        if not path.exists():
            return self._names
        with path.open("rb") as file:
            file.seek(self._names_bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._names.append(json.loads(line))
                self._names_bytes += len(line)
        return self._names

    def _read(self) -> _Ledger:
        path = self._folder / "ledger.json"
        try:
            with errors_as("read", path):
                text = path.read_bytes()
            saved = json.loads(text)
        except FileNotFoundError:
            return _Ledger()
        except ValueError as cause:
            raise CorruptFileError(str(path), 0, f"not a ledger of a file queue: {cause}") from cause
        ledger = _Ledger.from_state(saved)
        ledger.leases = {lease["number"]: Lease(**lease) for lease in saved["leases"]}
        return ledger

    def _write(self, ledger: _Ledger) -> None:
        waiting = [[number, path, progress] for number, (path, progress) in sorted(ledger.waiting.items())]
        leases = [asdict(lease) for lease in ledger.leases.values()]
        saved = {"handed": ledger.handed, "waiting": waiting, "leases": leases}
        with atomic_write(str(self._folder / "ledger.json")) as file:
            file.write(json.dumps(saved).encode())


def _are_strings(values: object) -> TypeGuard[list[str]]:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
