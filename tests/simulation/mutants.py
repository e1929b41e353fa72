"""Deliberate bugs, each of which the simulator must find: one that finds none of them is worth nothing.

    python -m simulation fleet 0 1000 --mutant applied_twice      stops at the first seed that finds it

A mutant replaces one function of the product while its world runs. It is as small as the mistake that a
person could make there: a check left out, two lines in the wrong order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from simulation import data_service
from torch import Tensor

from monolith.checkpoint import PendingCheckpoint, checkpointer
from monolith.checkpoint.folder.retention import Retention
from monolith.checkpoint.folder.saver import MANIFEST, Saver
from monolith.data.service import job, worker
from monolith.filesystem import atomic_write
from monolith.runtime.batches import ReadBatch, TrainingBatches
from monolith.runtime.fleet_placement import ServerPlacement
from monolith.store.pushes import AppliedPushes
from monolith.store.server import ParameterServer, _ServedState
from monolith.sync import Publisher, TableTarget
from monolith.sync.messages import LearnedUpTo, LogPosition, SnapshotBegin, SnapshotEnd
from monolith.testing.disk import SimDisk
from monolith.train.hooks.save import SaveHook

Patch = tuple[object, str, Callable[..., Any]]
"""An object, the name of one of its attributes, and the function in its place."""


@dataclass(frozen=True)
class Mutant:
    """One deliberate bug."""

    world: str
    sentence: str
    """What is wrong, in words."""
    patches: Callable[[], Sequence[Patch]]
    seeds: int = 1_000
    """How many seeds it took to find it when this was last measured."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, wrong in self.patches():
                stack.enter_context(mock.patch.object(owner, name, wrong))
            yield


def _fence_not_checked() -> Sequence[Patch]:
    return [
        (_ServedState, "matches", lambda self, incarnation: True),  # noqa: ARG005
        (ParameterServer, "_meant", lambda self, body: self._state),  # noqa: ARG005
    ]


def _applied_twice() -> Sequence[Patch]:
    return [(AppliedPushes, "once", lambda self, sender, number, apply, again: apply())]  # noqa: ARG005


def _pushes_not_awaited() -> Sequence[Patch]:
    return [(ServerPlacement, "settle", lambda self: None)]  # noqa: ARG005


def _named_before_written() -> Sequence[Patch]:
    right = Saver.save

    def promise(prefix: str) -> None:
        with atomic_write(f"{prefix}{MANIFEST}"):
            pass

    def save(self: Saver, step: int, write: Callable[[str], None], **more: Any) -> str:
        prefix = right(self, step, promise, **more)
        write(prefix)
        return prefix

    return [(Saver, "save", save)]


def _not_synced() -> Sequence[Patch]:
    return [(SimDisk, "sync", lambda self, file, path: file.flush())]  # noqa: ARG005


def _position_of_what_was_read() -> Sequence[Patch]:
    def read(self: TrainingBatches) -> Iterator[ReadBatch]:
        ahead = None
        for batch in self.stream:
            if ahead is not None:
                yield ReadBatch(ahead, self.stream.position(), self._clock())
            ahead = batch
        if ahead is not None:
            yield ReadBatch(ahead, self.stream.position(), self._clock())

    return [(TrainingBatches, "_read", read)]


def _no_last_save() -> Sequence[Patch]:
    return [(SaveHook, "_save_last", lambda self, run, give_up: None)]  # noqa: ARG005


# The data service


def _unsynced_turns() -> Sequence[Patch]:
    class Unsynced(job._Transaction):
        def __init__(self, database: Any, *, durable: bool = False) -> None:  # noqa: ARG002
            super().__init__(database)

    return [(job, "_Transaction", Unsynced)]


def _announced_in_two_steps() -> Sequence[Patch]:
    def announce(self: Any, lease: str, sequence: int, *chunk: Any) -> bool:
        place, size, after = chunk
        with job._Transaction(self._db, durable=True):
            row = self._leased(lease)
            if row is None or sequence != row[4]:
                return row is not None
            epoch, number, split, reader, _ = row
            self._db.execute(
                "INSERT INTO chunks (epoch, number, sequence, split, place, size, worker) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (epoch, number, sequence, split, job._text(place), size, reader),
            )
        with job._Transaction(self._db, durable=True):
            self._db.execute(
                "UPDATE splits SET chunks = chunks + 1, place = ? WHERE lease = ?", (job._text(after), lease)
            )
        return True

    return [(job.Job, "announce", announce)]


def _turn_given_anew() -> Sequence[Patch]:
    right = job.Job.turns

    def turns(self: job.Job, trainer: str, session: str, turn: int, most: int) -> Any:
        return right(self, trainer, session, max(turn, self._trainer(trainer)[0]) if most else turn, most)

    return [(job.Job, "turns", turns)]


def _place_without_skip() -> Sequence[Patch]:
    right = worker.read_again
    return [
        (worker, "read_again", lambda source, place, size: right(source, replace(place, skip=0), size)),
    ]


def _acknowledged_too_far() -> Sequence[Patch]:
    right = job.Job.acknowledge

    def acknowledge(self: job.Job, trainer: str, turn: int) -> None:  # noqa: ARG001
        right(self, trainer, self._trainer(trainer)[0])

    return [(job.Job, "acknowledge", acknowledge)]


def _lease_for_ever() -> Sequence[Patch]:
    return [(job.Job, "_expire", lambda self: None)]  # noqa: ARG005


def _committed_before_saved() -> Sequence[Patch]:
    right = data_service.save

    def save(file: str, source: Any, counts: Any) -> None:
        source.commit(source.position())
        right(file, source, counts)

    return [(data_service, "save", save)]


# Publishing


def _removals_not_published() -> Sequence[Patch]:
    right = Publisher._look_up

    def look_up(self: Publisher, table: Any, ids: Tensor) -> tuple[Any, Tensor]:
        rows, gone = right(self, table, ids)
        return rows, gone[:0]

    return [(Publisher, "_look_up", look_up)]


def _snapshot_without_removals() -> Sequence[Patch]:
    return [(TableTarget, "end_snapshot", TableTarget.abort_snapshot)]


def _epoch_continued() -> Sequence[Patch]:
    right = Publisher.__init__

    def init(self: Publisher, *args: Any, **options: Any) -> None:
        right(self, *args, **options)
        self._position = self._making = LogPosition(f"shard {self._shard[0]}", 0)

    return [(Publisher, "__init__", init)]


def _step_told_too_early() -> Sequence[Patch]:
    right = Publisher._learned

    def learned(self: Publisher) -> LearnedUpTo:
        found = right(self)
        return replace(found, step=found.step + 1)

    return [(Publisher, "_learned", learned)]


def _snapshot_of_a_later_delta() -> Sequence[Patch]:
    right = Publisher._take_snapshot

    def take(self: Publisher, buckets: Tensor | None = None) -> Iterator[Any]:
        shift = 0
        for message in right(self, buckets):
            if isinstance(message, SnapshotBegin):
                shift = int(self._making.sequence == message.position.sequence)
            if isinstance(message, SnapshotBegin | SnapshotEnd):
                later = replace(message.position, sequence=message.position.sequence + shift)
                message = replace(message, position=later)  # noqa: PLW2901
            yield message

    return [(Publisher, "_take_snapshot", take)]


def _snapshot_of_a_restore() -> Sequence[Patch]:
    return [
        (Publisher, "suspend", lambda self: None),  # noqa: ARG005
        (Publisher, "_refuse_if_paused", lambda self, position: None),  # noqa: ARG005
    ]


def _overflow_not_noticed() -> Sequence[Patch]:
    return [(Publisher, "_has_overflowed", lambda self: False)]  # noqa: ARG005


def _failed_delta_dropped() -> Sequence[Patch]:
    right = Publisher._fail

    def fail(self: Publisher, what: str, *, trace: bool = False) -> None:
        self._unsent = None
        right(self, what, trace=trace)

    return [(Publisher, "_fail", fail)]


# Checkpoints


def _failed_save_counts() -> Sequence[Patch]:
    right = PendingCheckpoint.close
    return [(PendingCheckpoint, "close", lambda self, saved: right(self, saved=saved or True))]


def _chain_deleted() -> Sequence[Patch]:
    return [(Retention, "needed", lambda self, exempt: set())]  # noqa: ARG005


def _manifest_left_at_replaced_files() -> Sequence[Patch]:
    return [(checkpointer, "checkpoint_exists", lambda prefix: False)]  # noqa: ARG005


def _no_journal() -> Sequence[Patch]:
    return [(Saver, "_write_journal", lambda self, retention: None)]  # noqa: ARG005


MUTANTS = {
    "fence_not_checked": Mutant(
        "fleet", "A server answers requests that mean an earlier state.", _fence_not_checked, 186
    ),
    "applied_twice": Mutant(
        "fleet", "A server applies a push again that its caller has sent again.", _applied_twice, 45
    ),
    "pushes_not_awaited": Mutant(
        "fleet",
        "A worker reports its position while its pushes are on the way.",
        _pushes_not_awaited,
        420,
    ),
    "named_before_written": Mutant(
        "fleet", "A checkpoint is named before its files are complete.", _named_before_written, 3
    ),
    "not_synced": Mutant("fleet", "Files are renamed into place without being synced.", _not_synced, 1),
    "position_of_what_was_read": Mutant(
        "fleet",
        "A position counts the batches that were read, not those trained.",
        _position_of_what_was_read,
        4,
    ),
    "no_last_save": Mutant("fleet", "The chief exits without saving its last steps.", _no_last_save, 1),
    "unsynced_turns": Mutant(
        "data_service", "The dispatcher answers before the turn of a chunk is synced.", _unsynced_turns
    ),
    "announced_in_two_steps": Mutant(
        "data_service",
        "A chunk and the place after it are noted in two transactions.",
        _announced_in_two_steps,
    ),
    "turn_given_anew": Mutant(
        "data_service", "Asking for a turn again gives another chunk.", _turn_given_anew
    ),
    "place_without_skip": Mutant(
        "data_service",
        "A chunk that begins inside of a batch is read again from the start of the batch.",
        _place_without_skip,
    ),
    "acknowledged_too_far": Mutant(
        "data_service",
        "An acknowledgement counts for all chunks that the trainer was given.",
        _acknowledged_too_far,
    ),
    "lease_for_ever": Mutant(
        "data_service", "The lease of a silent data worker never expires.", _lease_for_ever
    ),
    "committed_before_saved": Mutant(
        "data_service",
        "A position is committed before the checkpoint with it is written.",
        _committed_before_saved,
    ),
    "removals_not_published": Mutant(
        "publishing", "A delta lacks the ids that have no row any more.", _removals_not_published
    ),
    "snapshot_without_removals": Mutant(
        "publishing", "Rows that a snapshot does not have stay.", _snapshot_without_removals
    ),
    "epoch_continued": Mutant(
        "publishing", "A restarted publisher continues the epoch before it.", _epoch_continued
    ),
    "step_told_too_early": Mutant(
        "publishing", "A delta says a step whose rows it may lack.", _step_told_too_early
    ),
    "snapshot_of_a_later_delta": Mutant(
        "publishing", "A snapshot says that it contains the delta after it.", _snapshot_of_a_later_delta
    ),
    "snapshot_of_a_restore": Mutant(
        "publishing", "Snapshots are taken while rows are restored.", _snapshot_of_a_restore
    ),
    "overflow_not_noticed": Mutant(
        "publishing", "Changed ids that did not fit into the set are forgotten.", _overflow_not_noticed
    ),
    "failed_delta_dropped": Mutant(
        "publishing", "A delta that the channel did not take is not sent again.", _failed_delta_dropped
    ),
    "failed_save_counts": Mutant(
        "checkpoints", "Changes of a save that failed count as saved.", _failed_save_counts
    ),
    "chain_deleted": Mutant(
        "checkpoints", "A checkpoint is deleted that an increment needs.", _chain_deleted
    ),
    "manifest_left_at_replaced_files": Mutant(
        "checkpoints",
        "A checkpoint of a step that exists is written over it while its manifest is in place.",
        _manifest_left_at_replaced_files,
    ),
    "no_journal": Mutant(
        "checkpoints", "What is about to be written and deleted is not noted before.", _no_journal
    ),
}
