"""The job: which worker reads which split, the chunks of each split, and which trainer gets each chunk.

All that must survive is in one SQLite file and changes in transactions, so a dispatcher
that was killed resumes as if nothing had happened. Liveness (when each process last called)
is in memory only: after a restart all processes count as having called just now, or every lease
would expire at once. See the package for the protocol.

    split    free ──lease──► leased ──announce, again and again──► leased ──finish──► done
               ▲                │ silent for `lease`, deregister, fail
               └────────────────┘ continues after the last chunk that was announced
    chunk    announced ──► free ──turns──► of a trainer, with a turn ──acknowledge──► kept, later forgotten
                            ▲                  │ release: the trainer is given up
                            └──────────────────┘

What a retry may repeat: `register`, `renew`, `acknowledge` and `release` change nothing the second time;
`announce` knows the last chunk again; `turns` returns the same chunks for the same turn. A `lease` whose
answer was lost leases another split, and the first one expires.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from monolith import concurrency, filesystem
from monolith.data.source import Position
from monolith.errors import ConfigError, DataError, RestoreError, ShutOutError
from monolith.wire.flight import Clock

_SCHEMA = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT);
CREATE TABLE splits (
    epoch INTEGER, number INTEGER, split TEXT, done INTEGER DEFAULT 0,
    place TEXT, chunks INTEGER DEFAULT 0, records INTEGER DEFAULT 0,
    lease TEXT, worker TEXT, failures INTEGER DEFAULT 0, error TEXT,
    PRIMARY KEY (epoch, number)
);
CREATE INDEX splits_by_lease ON splits (lease) WHERE lease IS NOT NULL;
CREATE TABLE chunks (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    epoch INTEGER, number INTEGER, sequence INTEGER, split TEXT,
    place TEXT, size INTEGER, worker TEXT, trainer TEXT, turn INTEGER,
    UNIQUE (epoch, number, sequence)
);
CREATE INDEX chunks_without_trainer ON chunks (id) WHERE trainer IS NULL;
CREATE UNIQUE INDEX chunks_by_turn ON chunks (trainer, turn) WHERE trainer IS NOT NULL;
CREATE TABLE trainers (
    trainer TEXT PRIMARY KEY, session TEXT, turns INTEGER DEFAULT 0,
    acknowledged INTEGER DEFAULT 0, forgotten INTEGER DEFAULT 0
);
"""
_CHUNK = "epoch, number, sequence, split, place, size, worker, turn"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataJobConfig:
    """What to read, and when a process counts as dead."""

    splits: tuple[str, ...]
    """Files, or other parts of a source, as the workers' `open_split` understands them. Leased in this
    order."""
    epochs: int = 1
    """How often each split is read."""
    lease: timedelta = timedelta(seconds=10)
    """How long a data worker may be silent before its splits are leased to other workers."""
    trainer_timeout: timedelta | None = None
    """How long a trainer may be silent before its unacknowledged chunks go to other trainers; None for ever,
    which is right if it will be restarted from its checkpoint."""
    attempts: int = 3
    """How often reading a split may fail before the job does."""
    keep_acknowledged: int = 100_000
    """How many chunks a trainer can roll back behind its acknowledged position."""

    def __post_init__(self) -> None:
        if not self.splits:
            raise ConfigError("data service: a job needs at least one split")
        if len(set(self.splits)) < len(self.splits):
            raise ConfigError("data service: a split is given twice; each would be read once more per epoch")
        if self.epochs < 1 or self.attempts < 1 or self.keep_acknowledged < 0:
            raise ConfigError(
                "data service: epochs and attempts must be at least 1, keep_acknowledged 0 or more"
            )
        if self.lease <= timedelta() or (self.trainer_timeout or self.lease) <= timedelta():
            raise ConfigError("data service: lease and trainer_timeout must be above 0")


@dataclass(frozen=True, slots=True)
class Place:
    """A place `skip` records after a position of a source: positions are known only between its batches."""

    position: Position
    skip: int = 0


@dataclass(frozen=True, slots=True)
class SplitLease:
    """The right to cut a split into chunks, from a place on."""

    lease: str
    """The secret of the lease: unique and unguessable, so that only the worker it was granted to can announce
    chunks under it. A later lease of the split invalidates an earlier one."""
    epoch: int
    number: int
    """Of the split in the job."""
    split: str
    place: Place | None
    """None for the beginning."""
    sequence: int
    """Of the next chunk."""


@dataclass(frozen=True, slots=True)
class SplitChunk:
    """Some records of a split that one trainer reads: the same ones for every reader at any time."""

    epoch: int
    number: int
    sequence: int
    split: str
    place: Place
    size: int
    worker: str
    """The data worker that has it in memory."""
    turn: int | None
    """The turn of its trainer; None while no trainer has it."""


class Job:
    """The state of a job. Not thread-safe.

    Args:
        folder: On a local disk; one dispatcher at a time. An existing job is resumed.

    Raises:
        RestoreError: The folder is of a job with other splits.
        DataError: Another dispatcher uses the folder.
    """

    def __init__(self, config: DataJobConfig, folder: str, *, clock: Clock = concurrency.monotonic) -> None:
        self.config = config
        self._clock = clock
        filesystem.make_dirs(folder)
        path = filesystem.join(folder, "job.sqlite")
        # Private, since it contains the sessions of trainers. The caller holds the dispatcher's lock, on any
        # thread.
        self._db = filesystem.open_database(path)
        try:
            # Locked for the whole life of this process: a second dispatcher on the folder is refused. NORMAL
            # with a write-ahead log loses no transaction when the process is killed, only when the machine
            # loses power.
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._open(path)
        except sqlite3.OperationalError as cause:
            self._db.close()
            raise DataError(
                f"data service: cannot use {path}: {cause}. If another dispatcher runs this job, stop "
                "it first."
            ) from cause
        except RestoreError:
            self._db.close()
            raise
        self._replaced: set[str] = set()
        """Sessions that are over. Of this process only: no call survives the end of its dispatcher."""
        now = clock()
        self._leases = {
            lease: now for (lease,) in self._db.execute("SELECT lease FROM splits WHERE lease IS NOT NULL")
        }
        self._workers: dict[str, float] = {
            worker: now
            for (worker,) in self._db.execute("SELECT DISTINCT worker FROM splits WHERE lease IS NOT NULL")
        }
        self._trainers: dict[str, float] = {
            trainer: now for (trainer,) in self._db.execute("SELECT trainer FROM trainers WHERE session > ''")
        }

    def _open(self, path: str) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        known = self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'about'").fetchone()
        self._db.execute("COMMIT")
        if not known:
            with _Transaction(self._db):
                for statement in _SCHEMA.split(";"):
                    self._db.execute(statement)
                self._tell("id", concurrency.token_hex(8))
                self._begin_epoch(0)
        self.id = str(self._told("id"))
        splits = tuple(
            split for (split,) in self._db.execute("SELECT split FROM splits WHERE epoch = 0 ORDER BY number")
        )
        if splits != self.config.splits:
            raise RestoreError(
                f"cannot resume the job in {path}: it has {len(splits)} splits, the first {splits[0]!r}; "
                f"this one has {len(self.config.splits)}, the first {self.config.splits[0]!r}. "
                "Another job needs another folder."
            )

    def close(self) -> None:
        """Close the file. Closing again does nothing."""
        self._db.close()

    # Data workers

    def register(self, worker: str) -> None:
        """Note that a worker starts; leases of an earlier worker at the same address are released."""
        with _Transaction(self._db):
            self._db.execute("UPDATE splits SET lease = NULL, worker = NULL WHERE worker = ?", (worker,))
        self._workers[worker] = self._clock()

    def deregister(self, worker: str) -> None:
        """Note that a worker stops, and release its leases."""
        self.register(worker)
        del self._workers[worker]

    def lease(self, worker: str) -> SplitLease | None:
        """Lease a split that no worker reads; None if there is none now."""
        self._workers[worker] = self._clock()
        self._expire()
        with _Transaction(self._db):
            row = self._db.execute(
                "SELECT epoch, number, split, place, chunks FROM splits "
                "WHERE lease IS NULL AND NOT done AND failures < ? ORDER BY epoch, number LIMIT 1",
                (self.config.attempts,),
            ).fetchone()
            if row is None:
                return None
            epoch, number, split, place, chunks = row
            # The prefix keeps the text a text in job files of before, whose column is of integers: SQLite
            # would store one of digits alone as a number.
            lease = f"lease-{concurrency.token_hex(16)}"
            self._db.execute(
                "UPDATE splits SET lease = ?, worker = ? WHERE epoch = ? AND number = ?",
                (lease, worker, epoch, number),
            )
        self._leases[lease] = self._clock()
        return SplitLease(lease, epoch, number, split, _place(place), chunks)

    def renew(self, worker: str, leases: Iterable[str]) -> tuple[list[str], list[tuple[int, int, int]]]:
        """Keep leases from expiring.

        Returns:
            Those that are lost all the same, and the worker's chunks (epoch, split, sequence) that no
            trainer was given yet.
        """
        self._workers[worker] = now = self._clock()
        lost = []
        for lease in leases:
            if self._leased(lease) is None:
                lost.append(lease)
            else:
                self._leases[lease] = now
        self._expire()
        waiting = self._db.execute(
            "SELECT epoch, number, sequence FROM chunks WHERE trainer IS NULL AND worker = ?", (worker,)
        )
        return lost, waiting.fetchall()

    def announce(self, lease: str, sequence: int, place: Place, size: int, after: Place) -> bool:
        """Note the next chunk of a leased split, for good; False if the lease is lost, and nothing was noted.

        The places are those of the split's source. The dispatcher does not open it: the source itself refuses
        a position that names other data, when a worker restores it.

        Announcing the last one again changes nothing.
        """
        with _Transaction(self._db):
            row = self._leased(lease)
            if row is None:
                return False
            epoch, number, split, worker, chunks = row
            # A repeated call: its answer was lost on the way. Only the last chunk can be announced again.
            if sequence == chunks - 1:
                return True
            if sequence != chunks:
                raise DataError(
                    f"data service: chunk {sequence} of {split!r} was announced, {chunks} is next"
                )
            # The chunk and the place after it change in one transaction: a successor of this lease continues
            # exactly after the last chunk that exists, so the split has neither gap nor overlap.
            self._db.execute(
                "INSERT INTO chunks (epoch, number, sequence, split, place, size, worker) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (epoch, number, sequence, split, _text(place), size, worker),
            )
            self._db.execute(
                "UPDATE splits SET chunks = chunks + 1, records = records + ?, place = ?, failures = 0 "
                "WHERE lease = ?",
                (size, _text(after), lease),
            )
        return True

    def finish(self, lease: str, chunks: int) -> bool:
        """Note that a leased split has no more records; False if the lease is lost.

        Args:
            chunks: How many the split was cut into. If this machine lost power, it may have fewer of them:
                the split is then not finished, and is leased again from the last one it has.
        """
        with _Transaction(self._db):
            row = self._leased(lease)
            if row is None:
                return False
            epoch, known = int(row[0]), int(row[4])
            if chunks != known:
                self._db.execute("UPDATE splits SET lease = NULL, worker = NULL WHERE lease = ?", (lease,))
                return False
            self._db.execute(
                "UPDATE splits SET done = 1, lease = NULL, worker = NULL WHERE lease = ?", (lease,)
            )
            # An epoch starts when all splits of the one before are read: chunks never mix epochs.
            left = self._db.execute("SELECT 1 FROM splits WHERE NOT done LIMIT 1").fetchone()
            if left is None and epoch + 1 < self.config.epochs:
                self._begin_epoch(epoch + 1)
        return True

    def fail(self, lease: str, error: str) -> None:
        """Note that a leased split could not be read; another worker may try."""
        with _Transaction(self._db):
            self._db.execute(
                "UPDATE splits SET failures = failures + 1, error = ?, lease = NULL, worker = NULL "
                "WHERE lease = ?",
                (error, lease),
            )

    def workers(self) -> list[str]:
        """Return the addresses of the data workers that called recently."""
        oldest = self._clock() - self.config.lease.total_seconds()
        return sorted(worker for worker, heard in self._workers.items() if heard >= oldest)

    # Trainers

    def attach(self, trainer: str, job: str | None, turn: int, session: str | None = None) -> str:
        """Let a trainer resume from a turn, and return the session that its calls must carry from now on.

        This fences another process of the same name: its session is no longer valid.

        Args:
            session: Chosen by the trainer, another one for every iteration: calls of an earlier iteration
                that are still under way must not take chunks that the new one does not know of. The same one
                again is a repeated call and changes nothing.

        Raises:
            RestoreError: There is no such turn: of another job, not given yet, or given to another trainer
                since.
            ShutOutError: The session was replaced by another one since.
        """
        _, current, _ = self._trainer(trainer)
        if session is not None and session == current:
            return session
        if session in self._replaced:
            raise self._shut_out(trainer)
        self._check_turn(trainer, job, turn)
        session = session or concurrency.token_hex(8)
        if current is not None:
            self._replaced.add(current)
        with _Transaction(self._db, durable=True):
            self._db.execute(
                "INSERT INTO trainers (trainer, session) VALUES (?, ?) "
                "ON CONFLICT (trainer) DO UPDATE SET session = excluded.session",
                (trainer, session),
            )
        self._trainers[trainer] = self._clock()
        return session

    def turns(self, trainer: str, session: str, turn: int, most: int) -> list[SplitChunk]:
        """Return a trainer's chunks from a turn on: those it was given before, then free ones.

        Asking again gives the same ones, so an answer that was lost does no harm.

        Raises:
            ShutOutError: Another process attached as this trainer, or the trainer was taken for lost.
            DataError: A split could not be read, and nothing else is left.
        """
        self._expire()
        # The session fences: a process that was replaced, or given up, must not take chunks any more.
        turns, current, _ = self._trainer(trainer)
        if current != session:
            raise self._shut_out(trainer)
        self._trainers[trainer] = self._clock()
        # `turn` may be below `turns`: the answer before was lost, or the trainer restored a checkpoint. Then
        # it first gets the chunks it had, and new ones only beyond them.
        if turn + most > turns:
            self._give(trainer, turns, turn + most - turns)
        rows = self._db.execute(
            f"SELECT {_CHUNK} FROM chunks WHERE trainer = ? AND turn >= ? ORDER BY turn LIMIT ?",
            (trainer, turn, most),
        ).fetchall()
        if not rows and most:
            self._check_failures()
        return [_chunk(row) for row in rows]

    def chunk(self, job: str, epoch: int, number: int, sequence: int) -> SplitChunk:
        """Return a chunk that was announced: for a worker that is asked for one and does not have it.

        Raises:
            DataError: There is none; or it was acknowledged, and forgotten since.
        """
        row = self._db.execute(
            f"SELECT {_CHUNK} FROM chunks WHERE epoch = ? AND number = ? AND sequence = ?",
            (epoch, number, sequence),
        ).fetchone()
        if job != self.id or row is None:
            raise DataError(
                f"data service: this job has no chunk {sequence} of split {number} in epoch {epoch}, "
                "or no longer"
            )
        return _chunk(row)

    def is_over(self) -> bool:
        """Whether every split was read as often as wanted, and every chunk was given to a trainer."""
        left = self._db.execute(
            "SELECT (SELECT 1 FROM splits WHERE NOT done LIMIT 1), "
            "(SELECT 1 FROM chunks WHERE trainer IS NULL LIMIT 1)"
        ).fetchone()
        return bool(left == (None, None))

    def acknowledge(self, trainer: str, turn: int) -> None:
        """Note that a trainer has saved all before `turn`. An older turn changes nothing."""
        turns, _, _ = self._trainer(trainer)
        if turn > turns:
            raise DataError(f"data service: trainer {trainer!r} acknowledged turn {turn} of {turns}")
        oldest = turn - self.config.keep_acknowledged
        with _Transaction(self._db, durable=True):
            self._db.execute(
                "UPDATE trainers SET acknowledged = max(acknowledged, ?), forgotten = max(forgotten, ?) "
                "WHERE trainer = ?",
                (turn, oldest, trainer),
            )
            self._db.execute("DELETE FROM chunks WHERE trainer = ? AND turn < ?", (trainer, oldest))

    def release(self, trainer: str, job: str | None = None, turn: int | None = None) -> int:
        """Free the chunks that a trainer has not acknowledged for other trainers; return how many.

        Args:
            job, turn: Of a position of the trainer: free the chunks after that instead, because the restored
                checkpoint need not be the last one that was acknowledged.

        Raises:
            RestoreError: There is no such turn, as in `attach`.
        """
        if turn is not None:
            self._check_turn(trainer, job, turn)
        with _Transaction(self._db, durable=True):
            if turn is not None:
                self._db.execute("UPDATE trainers SET acknowledged = ? WHERE trainer = ?", (turn, trainer))
            # Chunks keep their definition, only their trainer and turn are cleared: another trainer reads the
            # same records.
            freed = self._db.execute(
                "UPDATE chunks SET trainer = NULL, turn = NULL WHERE trainer = ? AND turn >= "
                "(SELECT acknowledged FROM trainers WHERE trainer = ?)",
                (trainer, trainer),
            ).rowcount
            self._db.execute(
                "UPDATE trainers SET turns = acknowledged, session = NULL WHERE trainer = ?", (trainer,)
            )
        self._trainers.pop(trainer, None)
        return freed

    def status(self) -> dict[str, Any]:
        """Return how far the job has come: JSON-able."""
        (splits, done, chunks, records) = self._db.execute(
            "SELECT count(*), sum(done), sum(chunks), sum(records) FROM splits"
        ).fetchone()
        (waiting,) = self._db.execute("SELECT count(*) FROM chunks WHERE trainer IS NULL").fetchone()
        trainers = self._db.execute("SELECT trainer, turns, acknowledged FROM trainers ORDER BY trainer")
        errors = self._db.execute(
            "SELECT split, error FROM splits WHERE failures >= ?", (self.config.attempts,)
        )
        return {
            "job": self.id,
            "splits": splits,
            "splits_done": done,
            "chunks": chunks,
            "records": records,
            "chunks_waiting": waiting,
            "over": self.is_over(),
            "workers": self.workers(),
            "trainers": {name: {"turns": turns, "acknowledged": acked} for name, turns, acked in trainers},
            "failed": dict(errors.fetchall()),
        }

    def _give(self, trainer: str, turns: int, most: int) -> None:
        free = self._db.execute(
            "SELECT id FROM chunks WHERE trainer IS NULL ORDER BY id LIMIT ?", (most,)
        ).fetchall()
        if not free:  # nothing to sync while a trainer waits
            return
        with _Transaction(self._db, durable=True):
            self._db.executemany(
                "UPDATE chunks SET trainer = ?, turn = ? WHERE id = ?",
                [(trainer, turns + place, chunk) for place, (chunk,) in enumerate(free)],
            )
            self._db.execute("UPDATE trainers SET turns = turns + ? WHERE trainer = ?", (len(free), trainer))

    @staticmethod
    def _shut_out(trainer: str) -> ShutOutError:
        return ShutOutError(
            f"data service: trainer {trainer!r} was shut out: another process attached under its name, "
            "or it was silent for longer than trainer_timeout. Restore from a checkpoint."
        )

    def _check_failures(self) -> None:
        row = self._db.execute(
            "SELECT split, failures, error FROM splits WHERE failures >= ? LIMIT 1", (self.config.attempts,)
        ).fetchone()
        if row is not None:
            raise DataError(f"data service: split {row[0]!r} could not be read, {row[1]} times: {row[2]}")

    def _expire(self) -> None:
        """Take back the leases of processes that have been silent for too long."""
        now = self._clock()
        oldest = now - self.config.lease.total_seconds()
        for worker in [worker for worker, heard in self._workers.items() if heard < oldest]:
            del self._workers[worker]  # its next call adds it again
        expired = [lease for lease, heard in self._leases.items() if heard < oldest]
        if expired:
            with _Transaction(self._db):
                self._db.executemany(
                    "UPDATE splits SET lease = NULL, worker = NULL WHERE lease = ?",
                    [(one,) for one in expired],
                )
            for lease in expired:
                del self._leases[lease]
        if self.config.trainer_timeout is not None:
            oldest = now - self.config.trainer_timeout.total_seconds()
            for trainer in [trainer for trainer, heard in self._trainers.items() if heard < oldest]:
                self.release(trainer)

    def _leased(self, lease: str) -> Sequence[Any] | None:
        row: Sequence[Any] | None = self._db.execute(
            "SELECT epoch, number, split, worker, chunks FROM splits WHERE lease = ?", (lease,)
        ).fetchone()
        return row

    def _check_turn(self, trainer: str, job: str | None, turn: int) -> None:
        if job is not None and job != self.id:
            raise RestoreError(
                f"data service: trainer {trainer!r} has a position in job {job}, but the dispatcher runs job "
                f"{self.id}. Start it with the folder of that job, or the trainer without a position."
            )
        turns, _, forgotten = self._trainer(trainer)
        if not forgotten <= turn <= turns:
            why = "its chunks were forgotten" if turn < forgotten else "later chunks went to other trainers"
            raise RestoreError(
                f"data service: trainer {trainer!r} cannot resume from turn {turn}: the dispatcher has turns "
                f"{forgotten} to {turns} of it; {why}. See keep_acknowledged and trainer_timeout."
            )

    def _trainer(self, trainer: str) -> tuple[int, str | None, int]:
        row = self._db.execute(
            "SELECT turns, session, forgotten FROM trainers WHERE trainer = ?", (trainer,)
        ).fetchone()
        return row or (0, None, 0)

    def _begin_epoch(self, epoch: int) -> None:
        self._db.executemany(
            "INSERT INTO splits (epoch, number, split) VALUES (?, ?, ?)",
            [(epoch, number, split) for number, split in enumerate(self.config.splits)],
        )

    def _told(self, name: str) -> Any:
        return self._db.execute("SELECT value FROM about WHERE name = ?", (name,)).fetchone()[0]

    def _tell(self, name: str, value: object) -> None:
        self._db.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", (name, str(value)))


class _Transaction:
    """Commits all changes of a block, or none if it raises.

    Args:
        durable: Sync the commit, and so every one before it, to the disk. A machine that loses power undoes
            the last commits that were not synced. That is harmless for what data workers announce: another
            one reads it again. It is not for what a trainer was told: the chunks that it trains would be free
            again, and be trained a second time.
    """

    def __init__(self, database: sqlite3.Connection, *, durable: bool = False) -> None:
        self._database = database
        self._synchronous = "FULL" if durable else "NORMAL"

    def __enter__(self) -> None:
        self._database.execute(f"PRAGMA synchronous = {self._synchronous}")
        self._database.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._database.execute("COMMIT" if kind is None else "ROLLBACK")


def _text(place: Place) -> str:
    return json.dumps([place.position, place.skip])


def _chunk(row: Sequence[Any]) -> SplitChunk:
    epoch, number, sequence, split, place, size, worker, turn = row
    return SplitChunk(epoch, number, sequence, split, Place(*json.loads(place)), size, worker, turn)


def _place(text: str | None) -> Place | None:
    return None if text is None else Place(*json.loads(text))
