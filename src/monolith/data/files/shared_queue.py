"""A work queue in a folder that all workers see; see `work_queue`.

    files.jsonl    the names of all files, one per line; only grows
    ledger.json    which worker has which file; replaced atomically with every change
    lock           locked while a process reads or changes the other two

Every change is a function of the ledger. While the disk is full, changes are queued in this process and
applied again, in order, to the ledger as it is when it can next be written.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from monolith import concurrency
from monolith.data.files.work_queue import LEASE, Clock, FileQueue, Lease, LeaseLedger, are_strings, short
from monolith.errors import CorruptFileError, DataError, RestoreError, TransientFilesystemError
from monolith.filesystem import atomic_write, make_dirs, open_regular
from monolith.filesystem.backends import errors_as
from monolith.observe import Sightings

_log = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE = timedelta(minutes=35)
"""How long changes may be pending: about as long as the ten failed saves of the default take."""
RETRY_SECONDS = 1.0
CLOSE_SECONDS = 2.0
"""How long a worker that ends tries to write its pending changes."""


class SharedFileQueue(FileQueue):
    """A file queue in a folder that all workers see.

    A lock on a file lets one process at a time change the list and the ledger; the system
    releases it when a process dies. Needs a filesystem with POSIX locks: a
    local disk, NFS 4, CephFS, Lustre with flock. The clocks of the machines may be set while a run
    trains: a lease runs out if this process has not seen it renewed for its whole time. A process that
    has just started believes the clocks, which should then agree to within a small part of a lease.

    A full disk stops no worker before it needs another file. Changes that cannot be written stay in this
    process, in order, and are written before the next one that can be; until then `take` raises, and no lease
    expires, since no worker can renew any. A worker that is killed then loses only changes that its
    checkpoint implies: the next start settles them.

    Args:
        clock: Unix seconds, which leases are stamped with.
        timer: Seconds that only grow.
        patience: How long changes may be pending; then the next call is an error.
    """

    def __init__(
        self,
        folder: str,
        *,
        lease: timedelta = LEASE,
        clock: Clock = concurrency.time,
        timer: Clock = concurrency.monotonic,
        pause: Callable[[float], object] | None = None,
        patience: timedelta = PATIENCE,
    ) -> None:
        super().__init__(lease, clock, pause)
        self._timer, self._patience = timer, patience.total_seconds()
        self._sightings = Sightings(clock, timer)  # guarded by the ledger
        self._folder = Path(folder)
        with errors_as("make the folder of a file queue,", folder):
            make_dirs(self._folder)
        # flock is per process, so the threads of this one need their own lock. Always taken before flock.
        self._thread = concurrency.Lock()
        self._names: list[str] = []
        self._names_bytes = 0
        # Guarded by _thread:
        self._unwritten: dict[Hashable, Callable[[LeaseLedger], object]] = {}  # oldest first
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
            self._write_pending()
        return super().renew(lease)

    def flush(self) -> None:
        deadline = self._timer() + CLOSE_SECONDS
        while self._unwritten:
            self._next_attempt = -math.inf  # now
            self._write_pending()
            if self._unwritten and self._timer() >= deadline:
                _log.warning(
                    "%s The files of this worker are leased again when its leases expire, in up to "
                    "%.0f s. A run that resumes takes them before that, at the places of its checkpoint.",
                    *(self._trouble, self._seconds),
                )
                return
            if self._unwritten:
                (self._pause or concurrency.sleep)(RETRY_SECONDS / 2)

    def _write_pending(self) -> None:
        with suppress(TransientFilesystemError, DataError), self._ledger():
            pass  # entering writes the pending changes; callers that need them raise after `patience`

    def take(self, worker: str, number: int | None = None, *, session: str = "") -> Lease | None:
        found: list[Lease | None] = []
        try:
            with self._ledger() as ledger:
                ledger.expire(self._is_over)
                expires = self._clock() + self._seconds
                found.append(ledger.take(worker, number, expires, self._next_name, session))
        except TransientFilesystemError:
            if found != [None]:  # that no file is left is known without writing anything
                raise
        return found[0]

    def _change(self, name: Hashable, change: Callable[[LeaseLedger], T], otherwise: T) -> T:
        result = otherwise
        try:
            with self._ledger() as ledger:
                result = change(ledger)
        except TransientFilesystemError:
            if name is not None:
                with self._thread:
                    self._unwritten.pop(name, None)
                    self._unwritten[name] = change
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

        So every worker may add the same list, and a worker that watches a folder the files it found.
        """
        with self._locked():
            known = set(self._all_names())
            new = [file for file in dict.fromkeys(files) if file not in known]
            path = self._folder / "files.jsonl"
            if new:
                with errors_as("add to the files of a queue,", path), _open_shared(path) as file:
                    # Overwrite a partial line of a process that was killed while writing.
                    file.truncate(self._names_bytes)
                    file.write("".join(json.dumps(name) + "\n" for name in new).encode())
                    file.flush()
                    os.fsync(file.fileno())
            return len(new)

    def state(self) -> dict[str, Any]:
        with self._ledger() as ledger:
            return {**ledger.state(), "names": self._all_names()}

    def restore(self, state: dict[str, Any]) -> None:
        ledger = LeaseLedger.from_state(state)
        names = state.get("names")
        if not are_strings(names):
            raise RestoreError(f"cannot restore a file queue from {short(state)}: it names no files")
        with self._locked():
            # Files that were added since the state was taken stay, after those it knows.
            known = set(names)
            more = [name for name in self._all_names() if name not in known]
            with atomic_write(str(self._folder / "files.jsonl")) as file:
                file.write("".join(json.dumps(name) + "\n" for name in [*names, *more]).encode())
            self._names, self._names_bytes = [], 0
            self._write(ledger)
            self._unwritten.clear()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        path = self._folder / "lock"
        with self._thread:
            with self._noted(), errors_as("lock a file queue with", path):
                file = _open_shared(path)
            with file:
                fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed
                yield

    @contextmanager
    def _ledger(self) -> Iterator[LeaseLedger]:
        """Give the ledger with the pending changes applied, and write the changes of the caller.

        Raises:
            TransientFilesystemError: It cannot be written now. The pending changes stay pending.
            DataError: It could not be written for as long as `patience`.
        """
        with self._locked():
            with self._noted():
                before = self._read()
            ledger = LeaseLedger(
                before.leased_files, dict(before.waiting), dict(before.leases), dict(before.sessions)
            )
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
        """Note a transient failure; turn one that has lasted too long into an error that ends the run."""
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
        """Return the files of the list; reads only those added since the last call."""
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

    def _read(self) -> LeaseLedger:
        path = self._folder / "ledger.json"
        try:
            with errors_as("read", path):
                text = path.read_bytes()
            saved = json.loads(text)
        except FileNotFoundError:
            return LeaseLedger()
        except ValueError as cause:
            raise CorruptFileError(str(path), 0, f"not a ledger of a file queue: {cause}") from cause
        ledger = LeaseLedger.from_state(saved)
        ledger.leases = {lease["number"]: Lease(**lease) for lease in saved["leases"]}
        ledger.sessions = dict(saved.get("sessions", {}))  # older versions wrote none
        return ledger

    def _write(self, ledger: LeaseLedger) -> None:
        waiting = [[number, path, progress] for number, (path, progress) in sorted(ledger.waiting.items())]
        leases = [asdict(lease) for lease in ledger.leases.values()]
        saved = {
            "handed": ledger.leased_files,
            "waiting": waiting,
            "leases": leases,
            "sessions": ledger.sessions,
        }
        with atomic_write(str(self._folder / "ledger.json")) as file:
            file.write(json.dumps(saved).encode())


def _open_shared(path: Path) -> BinaryIO:
    """Open a file of a queue to append to it, or to lock it."""
    return os.fdopen(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")
