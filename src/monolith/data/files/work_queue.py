"""Work queues: which worker reads which file, decided while they read.

A worker leases a file. It reports when it has finished the file; if it dies, its leases expire and the file
is leased again from the last reported place. So a fast worker reads more, and no file is lost.

A report says "all records before this place count". A trainer reports the position of a checkpoint after
the checkpoint is saved, never before: records that were trained since are lost with the worker and must be
read again. This order makes each record count exactly once."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeGuard, TypeVar

from monolith import concurrency
from monolith.errors import ConfigError, DataError, ReplacedError, RestoreError

_log = logging.getLogger(__name__)

T = TypeVar("T")

Clock = Callable[[], float]
"""Returns seconds: Unix time for a queue that several processes use, since it is the same in all of them."""

Progress = dict[str, int]
"""A place in a file, as plain numbers that only the readers interpret. Empty at the beginning."""

LEASE = timedelta(minutes=10)


class StrQueue:
    """A first-in-first-out queue of strings that may refill itself when it is empty. Thread-safe.

    Args:
        refill: Called when nothing is left; returns more, or nothing at the end, after which it
            is never called again.
    """

    def __init__(
        self,
        values: Sequence[str] = (),
        *,
        capacity: int = 100_000,
        refill: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        if capacity < 1:
            raise ConfigError(f"a string queue's capacity must be at least 1, got {capacity}")
        self._capacity = capacity
        self._refill = refill
        self._lock = concurrency.Lock()  # guards all below
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
                self._add(self._refill() if self._refill is not None else ())
                self._ended = not self._values
            return (self._values.popleft(), False) if self._values else ("", True)

    def __len__(self) -> int:
        with self._lock:
            return len(self._values)

    def state(self) -> dict[str, Any]:
        """Return the strings that are left. The owner of `refill` saves its state."""
        with self._lock:
            return {"values": list(self._values), "ended": self._ended}

    def restore(self, state: dict[str, Any]) -> None:
        """Contain exactly the strings of a saved state."""
        values, ended = state.get("values"), state.get("ended")
        if not are_strings(values) or not isinstance(ended, bool):
            raise RestoreError(f"cannot restore a string queue from {short(state)}: not a state of one")
        with self._lock:
            self._values = deque(values)
            self._ended = ended

    def _add(self, values: Sequence[str]) -> None:
        if len(self._values) + len(values) > self._capacity:
            raise DataError(
                f"string queue: {len(values)} more do not fit: it has {len(self._values)} "
                f"of at most {self._capacity}"
            )
        self._values.extend(values)
        if values:
            self._ended = False


@dataclass(frozen=True, slots=True)
class Lease:
    """A file that one worker may read for a while."""

    number: int
    """The number of the file in the queue: the same for every worker."""
    path: str
    worker: str
    token: str
    """Unique to this lease, so that a worker that lost it cannot change that of its successor (fencing)."""
    expires: float
    """Unix seconds."""
    progress: Progress = field(default_factory=dict)
    """The place to start from."""
    read: bool = False
    """Whether all of it was read, although no checkpoint contains that yet."""
    session: str = ""
    """Names the process of the worker; see `FileQueue.begin`."""


@dataclass(slots=True)
class LeaseLedger:
    """Which worker has which file: a plain value that knows neither locks nor where the names come from.

    Every file is in exactly one place: not leased yet (its number is `leased_files` or more), `waiting`,
    `leases`, or in none of them, which means finished. Its progress only changes by a report.
    """

    leased_files: int = 0
    """Files that were ever leased: their numbers are below this."""
    waiting: dict[int, tuple[str, Progress]] = field(default_factory=dict)
    """Unfinished files that no worker has, by number, each with its path and progress."""
    leases: dict[int, Lease] = field(default_factory=dict)
    sessions: dict[str, str] = field(default_factory=dict)
    """Worker -> the session of its newest process, if it said that it begins."""

    def begin(self, worker: str, session: str) -> None:
        # In one change with the release: in between, the earlier process could lease a file under the name of
        # its successor, which would take that for one of its own, and not wait for it.
        self.sessions[worker] = session
        self.release(worker)

    def take(
        self,
        worker: str,
        number: int | None,
        expires: float,
        name_of: Callable[[int], str | None],
        session: str = "",
    ) -> Lease | None:
        if session and self.sessions.get(worker, session) != session:
            raise ReplacedError(
                f"file queue: cannot lease a file to {worker!r}: another process was started under this name "
                "and reads its files. This process was replaced, and ends. If both are meant to run, give "
                "each a number of its own (cluster.index, or worker of FileSource)."
            )
        if number is not None:
            # A restarted worker takes over its own lease; that of another worker it does not get.
            own = self.leases.get(number)
            if own is not None and own.worker == worker:
                self.put_back(own)
            if number not in self.waiting:
                return None
        elif self.waiting:
            number = min(self.waiting)  # oldest first: other workers may be waiting for it
        else:
            name = name_of(self.leased_files)
            if name is None:
                return None
            number = self.leased_files
            self.leased_files += 1
            self.waiting[number] = (name, {})
        path, progress = self.waiting.pop(number)
        lease = Lease(number, path, worker, concurrency.token_hex(8), expires, progress, session=session)
        self.leases[number] = lease
        return lease

    def current(self, lease: Lease) -> Lease | None:
        """Return the newest version of a lease; None if it was lost (its token differs)."""
        known = self.leases.get(lease.number)
        return known if known is not None and known.token == lease.token else None

    def expire(self, is_over: Callable[[Lease], bool]) -> None:
        for lease in [lease for lease in self.leases.values() if is_over(lease)]:
            self.put_back(lease)

    def release(self, worker: str, session: str = "") -> None:
        for lease in list(self.leases.values()):
            if lease.worker == worker and session in ("", lease.session):
                self.put_back(lease)

    def release_all(self, prefix: str) -> None:
        for lease in [lease for lease in self.leases.values() if lease.worker.startswith(prefix)]:
            self.put_back(lease)

    def settle(
        self, workers: Collection[str], finished: Collection[int], reached: Mapping[int, Progress]
    ) -> None:
        # Release first: then all files of these workers wait, and can be finished or moved forward.
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
            "handed": self.leased_files,
            "waiting": [[number, path, progress] for number, (path, progress) in sorted(waiting.items())],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> LeaseLedger:
        try:
            waiting = {
                int(number): (str(path), {str(key): int(value) for key, value in progress.items()})
                for number, path, progress in state["waiting"]
            }
            return cls(int(state["handed"]), waiting)
        except (KeyError, TypeError, ValueError, AttributeError) as cause:
            raise RestoreError(
                f"cannot restore a file queue from {short(state)}: not a state of one"
            ) from cause


class FileQueue(ABC):
    """Leases files, each to one worker at a time. Any thread may call it.

        waiting ──take──► leased ──report(progress)──► leased ──finish──► done
           ▲                 │
           └── give_back, release, settle, or the lease expires: from the last reported progress

        lease = queue.take("worker 1")
        queue.report(lease, {"place": 4096})     # after a checkpoint that contains these records
        queue.finish(lease)

    Each verb is one change of the ledger, made by one caller at a time (`_ledger`).
    """

    def __init__(self, lease: timedelta, clock: Clock, pause: Callable[[float], object] | None) -> None:
        if lease <= timedelta(0):
            raise ConfigError(f"file queue: a lease must last longer than {lease}")
        self._seconds = lease.total_seconds()
        self._clock = clock
        self._pause = pause

    def _is_over(self, lease: Lease) -> bool:
        """Whether a lease has expired. Called with the ledger locked."""
        return lease.expires <= self._clock()

    def _is_fresh(self, lease: Lease) -> bool:
        """Whether a lease of this process needs no renewal yet."""
        return lease.expires - self._clock() > self._seconds * 2 / 3

    @abstractmethod
    def _ledger(self) -> AbstractContextManager[LeaseLedger]:
        """Give the ledger to one caller at a time, and store its changes."""

    def _change(self, name: Hashable, change: Callable[[LeaseLedger], T], otherwise: T) -> T:  # noqa: ARG002
        """Change the ledger and return the result of the change.

        Args:
            name: Names the change: of several pending ones with the same name, the newest counts. None only
                reads.
            otherwise: The result if the ledger cannot be read now.
        """
        with self._ledger() as ledger:
            return change(ledger)

    @abstractmethod
    def _next_name(self, number: int) -> str | None:
        """Return the file of this number, which was never leased. Called with the ledger locked."""

    def begin(self, worker: str, session: str) -> None:
        """Note that a process starts to read as a worker, and release the leases of the process before it.

        From now on that process is refused if it takes a file, in case it was only paused or cut off.

        Args:
            session: Names the process, as it does in its later calls.

        Raises:
            TransientFilesystemError: It cannot be written now, because a disk is full; retry later.
        """
        with self._ledger() as ledger:
            ledger.begin(worker, session)

    def take(self, worker: str, number: int | None = None, *, session: str = "") -> Lease | None:
        """Lease the next file to a worker; None when no file is waiting now.

        Args:
            number: Lease this file, if it is waiting or leased to the same worker: a restarted worker asks
                for the file that its position names.
            session: The session with which this process began; empty if it did not say that it begins.

        Raises:
            ReplacedError: Another process has begun as this worker since.
            TransientFilesystemError: The lease cannot be written now, because a disk is full; retry later.
        """
        with self._ledger() as ledger:
            ledger.expire(self._is_over)
            expires = self._clock() + self._seconds
            return ledger.take(worker, number, expires, self._next_name, session)

    def renew(self, lease: Lease) -> Lease | None:
        """Return the lease with a new expiry, or None if it was lost.

        Costs next to nothing while most of its time is left; call it at every batch.
        """
        if self._is_fresh(lease):
            return lease

        def change(ledger: LeaseLedger) -> Lease | None:
            ledger.expire(self._is_over)
            known = ledger.current(lease)
            if known is None:
                return None
            expires = self._clock() + self._seconds
            renewed = ledger.leases[lease.number] = replace(known, expires=expires)
            return renewed

        otherwise: Lease | None = lease
        return self._change(("renew", lease.token), change, otherwise)

    def report(self, lease: Lease, progress: Progress) -> bool:
        """Note that all records before this place count; return False if the lease was lost."""

        def change(ledger: LeaseLedger) -> bool:
            ledger.expire(self._is_over)
            known = ledger.current(lease)
            if known is None:
                return False
            expires = self._clock() + self._seconds
            ledger.leases[lease.number] = replace(known, expires=expires, progress=progress)
            return True

        return self._change(("report", lease.token), change, otherwise=True)

    def mark_read(self, lease: Lease) -> None:
        """Note that the file was read to its end, so that no worker waits for it to come back."""

        def change(ledger: LeaseLedger) -> None:
            known = ledger.current(lease)
            if known is not None:
                ledger.leases[lease.number] = replace(known, read=True)

        self._change(("read", lease.token), change, None)

    def finish(self, lease: Lease) -> bool:
        """Note that all records of the file count; return False if the lease was lost."""

        def change(ledger: LeaseLedger) -> bool:
            ledger.expire(self._is_over)
            return ledger.current(lease) is not None and ledger.leases.pop(lease.number) is not None

        return self._change(("finish", lease.token), change, otherwise=True)

    def give_back(self, lease: Lease) -> None:
        """Return the file to the queue, from the place that was last reported."""

        def change(ledger: LeaseLedger) -> None:
            if ledger.current(lease) is not None:
                ledger.put_back(ledger.leases[lease.number])

        self._change(("give back", lease.token), change, None)

    def release(self, worker: str, session: str = "") -> None:
        """Release all leases of a worker that is known to have died or stopped.

        Args:
            session: Only those of this process, and not those of one that was started in its place.
        """
        self._change(object(), lambda ledger: ledger.release(worker, session), None)

    def release_all(self, prefix: str) -> None:
        """Release all leases of workers whose names have this prefix."""
        self._change(object(), lambda ledger: ledger.release_all(prefix), None)

    def settle(
        self, workers: Collection[str], finished: Collection[int], reached: Mapping[int, Progress]
    ) -> None:
        """Release all leases of former workers and note their progress, in one change: in between, another
        worker could lease one of their files from its older progress.

        Args:
            finished: Files of which all records count.
            reached: Other files, and how far their records count.
        """
        self._change(object(), lambda ledger: ledger.settle(workers, finished, reached), None)

    def readers(self) -> list[str]:
        """Return the names of the workers that have leases."""
        with self._ledger() as ledger:
            return sorted({lease.worker for lease in ledger.leases.values()})

    def others_are_reading(self, worker: str, session: str = "") -> bool:
        """Return whether other workers are reading files, so that some may come back yet."""

        def is_reading(ledger: LeaseLedger) -> bool:
            return any(
                (lease.worker, lease.session) != (worker, session) and not lease.read
                for lease in ledger.leases.values()
            )

        return self._change(None, is_reading, otherwise=True)

    def wait(self, stop: concurrency.Event) -> None:
        """Sleep a moment before asking again, or until an event is set."""
        (self._pause or stop.wait)(min(self._seconds / 10, 1.0))

    @property
    def trouble(self) -> str:
        """Why the queue cannot write changes now, for an operator; empty if it can."""
        return ""

    def flush(self) -> None:
        """Try to write the changes that could not be written so far; returns within a few seconds."""
        return  # a queue in memory has nothing to write

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return plain values that survive JSON: the waiting files, and how far leased ones were read."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state. All leases are lost; their files wait, from the reported progress."""


class LocalFileQueue(FileQueue):
    """A file queue for the threads of one process, or behind a service of it.

    Args:
        names: The files: a list, or a queue that may refill itself.
    """

    def __init__(
        self,
        names: Sequence[str] | StrQueue,
        *,
        lease: timedelta = LEASE,
        clock: Clock = concurrency.monotonic,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        super().__init__(lease, clock, pause)
        self._names = names if isinstance(names, StrQueue) else StrQueue(names, capacity=max(len(names), 1))
        self._lock = concurrency.Lock()  # guards _leases
        self._leases = LeaseLedger()

    def state(self) -> dict[str, Any]:
        with self._ledger() as ledger:
            return {**ledger.state(), "names": self._names.state()}

    def restore(self, state: dict[str, Any]) -> None:
        ledger = LeaseLedger.from_state(state)
        with self._lock:
            self._names.restore(state.get("names", {}))
            self._leases = ledger

    @contextmanager
    def _ledger(self) -> Iterator[LeaseLedger]:
        with self._lock:
            yield self._leases

    def _next_name(self, number: int) -> str | None:  # noqa: ARG002  they come in order
        name, ended = self._names.dequeue()
        return None if ended else name


def are_strings(values: object) -> TypeGuard[list[str]]:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
