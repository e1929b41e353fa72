"""Deliberate bugs, each of which the simulator must find: one that finds none of them is worth nothing.

    python -m simulation fleet 0 1000 --mutant applied_twice      stops at the first seed that finds it

A mutant replaces one function of the product while its world runs. It is as small as the mistake that a
person could make there: a check left out, two lines in the wrong order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from simulation import data_service, kafka
from torch import Tensor

from monolith import concurrency
from monolith.checkpoint import PendingCheckpoint
from monolith.checkpoint.folder.retention import Retention
from monolith.checkpoint.folder.saver import MANIFEST, Saver
from monolith.data.files.leased import LeasedFiles
from monolith.data.files.work_queue import FileQueue, LeaseLedger
from monolith.data.kafka import KafkaSource
from monolith.data.kafka.positions import make_position, read_position
from monolith.data.kafka.source import _partition_of
from monolith.data.service import job, worker
from monolith.errors import RetryableError
from monolith.filesystem import atomic_write
from monolith.runtime import lockstep, rank_placement
from monolith.runtime.batches import ReadBatch, TrainingBatches
from monolith.runtime.coordinator import Quiesced
from monolith.runtime.fleet_placement import ServerPlacement
from monolith.runtime.lockstep import Readiness
from monolith.runtime.messages import BeginServer
from monolith.runtime.publish_hook import PublishHook
from monolith.runtime.publishers import RankPublishers
from monolith.runtime.rank_placement import RankPlacement
from monolith.runtime.rank_rows import RankShard, RankTables, RowsOnServers
from monolith.runtime.ranks import RankCoordinator
from monolith.runtime.server_calls import on_each, tell
from monolith.runtime.service import CoordinationService
from monolith.serve.client import _Conversation
from monolith.serve.client_transports import GrpcTransport
from monolith.serve.server.batching import RequestBatcher, Reservation, _Piece
from monolith.serve.server.grpc_port import GrpcPort
from monolith.serve.server.repository import LoadedVersion, Repository
from monolith.serve.shards.hedging import Leg
from monolith.serve.shards.shard_versions import ShardVersion, ShardVersions
from monolith.store.pushes import AppliedPushes
from monolith.store.rank_groups import Collective
from monolith.store.server import ParameterServer, _ServedState
from monolith.sync import Publisher, TableTarget
from monolith.sync.channel import SnapshotMaker
from monolith.sync.kafka_writer import KafkaDeltaWriter, _Producer
from monolith.sync.messages import Delta, LearnedUpTo, LogPosition, SnapshotBegin, SnapshotEnd
from monolith.sync.subscriber import _Follower
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


def _repeated_push_not_awaited() -> Sequence[Patch]:
    right = AppliedPushes.once

    def once(self: AppliedPushes, sender: str, number: int, apply: Any, again: Any) -> Any:
        pushes = self._senders.get(sender)
        if pushes is not None and number in pushes.under_way:
            return again()
        return right(self, sender, number, apply, again)

    return [(AppliedPushes, "once", once)]


def _sender_forgotten() -> Sequence[Patch]:
    right = AppliedPushes._of

    def forgetting(self: AppliedPushes, sender: str, number: int) -> Any:
        for other in [name for name, one in self._senders.items() if name != sender and not one.under_way]:
            del self._senders[other]
        return right(self, sender, number)

    return [(AppliedPushes, "_of", forgetting)]


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


def _workers_forgotten_with_server_0() -> Sequence[Patch]:
    right = CoordinationService._begin
    return [
        (CoordinationService, "_begin", lambda self, body: right(self, replace(body, trained={}))),
        (CoordinationService, "_count_unknown", lambda self, run, worker: None),  # noqa: ARG005
    ]


def _replaced_worker_not_refused() -> Sequence[Patch]:
    return [(CoordinationService, "_check_member", lambda self, run, worker, member: None)]  # noqa: ARG005


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

    def save(file: str, source: Any, counts: Any, *more: Any) -> None:
        source.commit(source.position())
        right(file, source, counts, *more)

    return [(data_service, "save", save)]


# Elastic fleets


def _given_back_from_its_start() -> Sequence[Patch]:
    right = LeasedFiles.give_back

    def give_back(self: LeasedFiles, former: Any) -> None:
        right(self, former._replace(cursor=replace(former.cursor, place=0, skip=0)))

    return [(LeasedFiles, "give_back", give_back)]


def _replaced_worker_takes_files() -> Sequence[Patch]:
    reading = FileQueue.others_are_reading

    def others_are_reading(self: FileQueue, worker: str, session: str = "") -> bool:  # noqa: ARG001
        with self._ledger() as ledger:
            own = next((one.session for one in ledger.leases.values() if one.worker == worker), "")
        return reading(self, worker, own)

    return [
        (LeaseLedger, "begin", lambda self, worker, session: self.release(worker)),  # noqa: ARG005
        (FileQueue, "others_are_reading", others_are_reading),
    ]


def _lease_token_ignored() -> Sequence[Patch]:
    return [(LeaseLedger, "current", lambda self, lease: self.leases.get(lease.number))]


# Ranks


def _positions_of_the_save_before() -> Sequence[Patch]:
    right = RankCoordinator._gather_states
    before: dict[RankCoordinator, Quiesced] = {}

    def gather(self: RankCoordinator, progress: Any) -> Quiesced:
        found = right(self, progress)
        stale = before.get(self, found)
        before[self] = found
        return replace(found, others=stale.others)

    return [(RankCoordinator, "_gather_states", gather)]


def _shard_of_when_it_is_written() -> Sequence[Patch]:
    cut, write = RankShard._cut, RankShard._write

    def late(self: RankShard, body: Any) -> Any:
        concurrency.sleep(0.05)
        cut(self, body)
        return write(self, body)

    return [(RankShard, "_cut", lambda self, body: {}), (RankShard, "_write", late)]  # noqa: ARG005


def _only_rank_0_restores() -> Sequence[Patch]:
    right = RankTables.restore

    def restore(self: RankTables, *args: Any) -> Any:
        with mock.patch.object(self._calls, "_addresses", {}):
            return right(self, *args)

    return [(RankTables, "restore", restore)]


def _weights_not_taken() -> Sequence[Patch]:
    return [(RankPlacement, "take_weights", lambda self: None)]  # noqa: ARG005


def _ends_with_the_first() -> Sequence[Patch]:
    def aligned(items: Any, collective: Any, *, every: float, **_: Any) -> Iterator[Any]:
        reader = lockstep._Reader(items)
        try:
            while True:
                said = collective.all_gather(torch.tensor([reader.poll(every)])).flatten().tolist()
                if Readiness.ENDED in said:
                    return
                for _ in range(1 - max(said) if max(said) <= Readiness.READY else 0):
                    yield reader.held.popleft()
        finally:
            reader.close()

    return [(rank_placement, "aligned", aligned)]


def _lost_sum_taken_for_a_sum() -> Sequence[Patch]:
    right = Collective._finish

    def finish(self: Collective, *args: Any, **options: Any) -> None:
        with suppress(RetryableError) if self._name == "dense" else nullcontext():
            right(self, *args, **options)

    return [(Collective, "_finish", finish)]


def _last_delta_of_a_rank_not_awaited() -> Sequence[Patch]:
    return [(RankPublishers, "flush", lambda self: self._share.flush())]


def _run_of_servers_not_renewed() -> Sequence[Patch]:
    run = "the only run"

    def begin(self: RowsOnServers) -> str:
        on_each(self.fresh, lambda server: tell(self._group, server, "server.begin", BeginServer(run)))
        self.join(run)
        for server in self.fresh:
            concurrency.Thread(target=self._attend, args=(server,), daemon=True).start()
        return run

    return [(RowsOnServers, "begin", begin)]


def _rank_leaves_before_the_last_save() -> Sequence[Patch]:
    right = RankCoordinator.leave

    def leave(self: RankCoordinator, outcome: Any, state: Any = None) -> bool:
        if outcome.failed or self.membership.is_chief:
            return right(self, outcome, state)
        self._groups.expect_end()
        return True

    return [(RankCoordinator, "leave", leave)]


# Kafka


def _offset_committed_wins() -> Sequence[Patch]:
    right = KafkaSource._begin

    def begin(self: KafkaSource, partitions: Sequence[Any]) -> Any:
        found = {one: offset for one, (offset, _) in self._client.committed(partitions).items()}
        return {**right(self, partitions), **found}

    return [(KafkaSource, "_begin", begin)]


def _position_skips_one() -> Sequence[Patch]:
    right = KafkaSource.position

    def position(self: KafkaSource) -> Any:
        known, offsets = read_position(right(self))
        ends = {one: self._client.ends(one)[1] for one in offsets}
        return make_position(known, {one: min(offset + 1, ends[one]) for one, offset in offsets.items()})

    return [(KafkaSource, "position", position)]


def _revoked_without_commit() -> Sequence[Patch]:
    def on_revoke(self: KafkaSource, consumer: Any, partitions: Any) -> None:  # noqa: ARG001
        self._notify_revoked(self._leave(partitions))

    return [(KafkaSource, "_on_revoke", on_revoke)]


def _revoked_with_commit() -> Sequence[Patch]:
    right = KafkaSource._on_revoke

    def on_revoke(self: KafkaSource, consumer: Any, partitions: Any) -> None:
        self._commits.add(
            {one: self._next[one] for one in map(_partition_of, partitions) if one in self._next}
        )
        right(self, consumer, partitions)

    return [(KafkaSource, "_on_revoke", on_revoke)]


def _offsets_committed_before_saved() -> Sequence[Patch]:
    right = kafka.save

    def save(file: str, source: Any, counts: Any, saved: Any) -> None:
        source.commit(source.position())
        right(file, source, counts, saved)

    return [(kafka, "save", save)]


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


def _last_changes_tried_once() -> Sequence[Patch]:
    return [(PublishHook, "_publish_last", lambda self, run: self.publishers.flush())]  # noqa: ARG005


def _snapshot_not_awaited() -> Sequence[Patch]:
    return [(SnapshotMaker, "unfinished", lambda self: None)]  # noqa: ARG005


def _last_weights_not_published() -> Sequence[Patch]:
    right = Publisher.flush

    def flush(self: Publisher) -> bool:
        with mock.patch.object(self, "_dense", self._ask_dense and self._ask_dense()):
            return right(self)

    return [(Publisher, "flush", flush)]


def _delivery_not_awaited() -> Sequence[Patch]:
    right = KafkaDeltaWriter._send

    def send(self: KafkaDeltaWriter, frame: bytes | None) -> int:
        with mock.patch.object(self._deltas, "deliver", return_value=0) if frame else nullcontext():
            return right(self, frame)

    return [(KafkaDeltaWriter, "_send", send)]


def _snapshot_named_too_early() -> Sequence[Patch]:
    right = KafkaDeltaWriter._write_snapshot

    def write(self: KafkaDeltaWriter, messages: Iterator[Any]) -> None:
        with mock.patch.object(self._rows, "deliver", return_value=0):
            right(self, messages)

    return [(KafkaDeltaWriter, "_write_snapshot", write)]


def _failed_delivery_counts() -> Sequence[Patch]:
    right = _Producer._on_delivery
    return [(_Producer, "_on_delivery", lambda self, error, message: right(self, None, message))]  # noqa: ARG005


def _epoch_by_own_clock() -> Sequence[Patch]:
    return [(KafkaDeltaWriter, "_begins_at", lambda self, shards: self._clock())]  # noqa: ARG005


def _deleted_too_early() -> Sequence[Patch]:
    right = KafkaDeltaWriter._delete_before

    def delete(self: KafkaDeltaWriter, offset: int) -> None:  # noqa: ARG001
        newest = self._opened().newest
        assert newest is not None
        right(self, newest.offset + 1)

    return [(KafkaDeltaWriter, "_delete_before", delete)]


def _gap_applied_over() -> Sequence[Patch]:
    right = _Follower._apply_delta

    def apply(self: _Follower, delta: Delta) -> bool:
        position = self.progress.position
        if self._snapshot is None and position is not None and delta.position.epoch == position.epoch:
            gap = delta.position.sequence == position.sequence + 2
            self.progress = replace(
                self.progress, position=replace(position, sequence=position.sequence + gap)
            )
        return right(self, delta)

    return [(_Follower, "_apply_delta", apply)]


def _epoch_of_a_delta_ignored() -> Sequence[Patch]:
    right = _Follower._apply_delta

    def apply(self: _Follower, delta: Delta) -> bool:
        if (position := self.progress.position) is not None:
            delta = replace(delta, position=replace(delta.position, epoch=position.epoch))
        return right(self, delta)

    return [(_Follower, "_apply_delta", apply)]


# Checkpoints


def _model_dir_not_locked() -> Sequence[Patch]:
    right = SimDisk.lock

    def lock(self: SimDisk, path: str, holder: bytes) -> Any:
        self.locks.clear()
        return right(self, path, holder)

    return [(SimDisk, "lock", lock)]


def _failed_save_counts() -> Sequence[Patch]:
    right = PendingCheckpoint.close
    return [(PendingCheckpoint, "close", lambda self, saved: right(self, saved=saved or True))]


def _chain_deleted() -> Sequence[Patch]:
    return [(Retention, "needed", lambda self, exempt: set())]  # noqa: ARG005


def _step_written_over() -> Sequence[Patch]:
    return [
        (Saver, "_free_name", lambda self, step, due: self.names.prefix(step)),  # noqa: ARG005
        (Saver, "_check_needs", lambda self, prefix, needs: None),  # noqa: ARG005
    ]


def _replaced_before_listed() -> Sequence[Patch]:
    right = Saver._free_name

    def free_name(self: Saver, step: int, due: Any) -> str:
        prefix = right(self, step, due)
        if (before := self.find(step)) not in (None, prefix):
            self._delete_files(before)
        return prefix

    return [(Saver, "_free_name", free_name)]


def _no_journal() -> Sequence[Patch]:
    return [(Saver, "_write_journal", lambda self, retention: None)]  # noqa: ARG005


def _any_version_answers() -> Sequence[Patch]:
    def find(self: ShardVersions, key: bytes) -> ShardVersion:  # noqa: ARG001
        return list(self._by_name.values())[-1]

    return [(ShardVersions, "find", find)]


def _failed_request_still_counts() -> Sequence[Patch]:
    def end(self: Leg) -> None:
        with self.lock:
            self.line = None

    return [(Leg, "end", end)]


def _deadline_not_watched() -> Sequence[Patch]:
    return [(Leg, "give_up", lambda self: None)]  # noqa: ARG005


# Requests over gRPC


def _answers_swapped() -> Sequence[Patch]:
    right = RequestBatcher._run_together

    def run(self: RequestBatcher, batch: Sequence[_Piece]) -> None:
        right(self, batch)
        one, other = batch[0].request, batch[-1].request
        if one.parts and other.parts and batch[0].rows == batch[-1].rows:
            one.parts[-1], other.parts[-1] = other.parts[-1], one.parts[-1]

    return [(RequestBatcher, "_run_together", run)]


def _quota_of_a_failed_call() -> Sequence[Patch]:
    right = Reservation.__exit__

    def leave(self: Reservation, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            right(self, kind, error, trace)

    return [(Reservation, "__exit__", leave)]


def _late_request_computed() -> Sequence[Patch]:
    def ask(self: RequestBatcher, one: Any, columns: Any) -> Any:
        return self._ask(columns.asked, deadline=one.deadline)

    return [(RequestBatcher, "_ask_for", ask)]


def _deadline_not_passed_on() -> Sequence[Patch]:
    right = GrpcTransport.send
    return [(GrpcTransport, "send", lambda self, call, _: right(self, call, 10.0))]


def _time_on_the_way_not_counted() -> Sequence[Patch]:
    right = _Conversation._check_age
    return [
        (_Conversation, "_check_age", lambda self, answer, _, options: right(self, answer, 0.0, options)),
    ]


def _closed_without_grace() -> Sequence[Patch]:
    right = GrpcPort.close
    return [(GrpcPort, "close", lambda self, _: right(self, 0.0))]


def _version_not_leased() -> Sequence[Patch]:
    @contextmanager
    def lease(self: Repository, name: str, version: str = "") -> Iterator[LoadedVersion]:
        yield self._find(name, version)

    return [(Repository, "lease", lease)]


MUTANTS = {
    "positions_of_the_save_before": Mutant(
        "ranks",
        "A checkpoint has the positions that ranks other than 0 reported for the one before it.",
        _positions_of_the_save_before,
        75,
    ),
    "shard_of_when_it_is_written": Mutant(
        "ranks",
        "A rank takes the snapshot of its rows when it writes it, not while all are quiesced.",
        _shard_of_when_it_is_written,
        38,
    ),
    "only_rank_0_restores": Mutant(
        "ranks", "After a loss only rank 0 restores its rows.", _only_rank_0_restores, 4
    ),
    "weights_not_taken": Mutant(
        "ranks", "A rank does not take the restored weights of rank 0.", _weights_not_taken, 6
    ),
    "ends_with_the_first": Mutant(
        "ranks", "The data of all ranks ends with the first that has none left.", _ends_with_the_first, 4
    ),
    "lost_sum_taken_for_a_sum": Mutant(
        "ranks", "A rank continues after a sum of gradients that failed.", _lost_sum_taken_for_a_sum, 76
    ),
    "run_of_servers_not_renewed": Mutant(
        "ranks",
        "Every attempt of the ranks has the same name on the servers.",
        _run_of_servers_not_renewed,
        19,
    ),
    "last_delta_of_a_rank_not_awaited": Mutant(
        "ranks",
        "Rank 0 ends although another rank has not published its last delta.",
        _last_delta_of_a_rank_not_awaited,
        seeds=17,
    ),
    "rank_leaves_before_the_last_save": Mutant(
        "ranks", "A rank ends before rank 0 has saved everything.", _rank_leaves_before_the_last_save, 1
    ),
    "fence_not_checked": Mutant(
        "fleet", "A server answers requests that mean an earlier state.", _fence_not_checked, 289
    ),
    "applied_twice": Mutant(
        "fleet", "A server applies a push again that its caller has sent again.", _applied_twice, 82
    ),
    "repeated_push_not_awaited": Mutant(
        "fleet",
        "A push that is sent again is acknowledged while the first one is under way.",
        _repeated_push_not_awaited,
        14,
    ),
    "sender_forgotten": Mutant(
        "fleet",
        "A server forgets which pushes of a sender it has applied when another one pushes.",
        _sender_forgotten,
        159,
    ),
    "pushes_not_awaited": Mutant(
        "fleet",
        "A worker reports its position while its pushes are on the way.",
        _pushes_not_awaited,
        420,
    ),
    "named_before_written": Mutant(
        "fleet", "A checkpoint is named before its files are complete.", _named_before_written, 34
    ),
    "not_synced": Mutant("fleet", "Files are renamed into place without being synced.", _not_synced, 2),
    "position_of_what_was_read": Mutant(
        "fleet",
        "A position counts the batches that were read, not those trained.",
        _position_of_what_was_read,
        4,
    ),
    "workers_forgotten_with_server_0": Mutant(
        "keep_going",
        "A new coordination service does not know which workers have trained.",
        _workers_forgotten_with_server_0,
        2,
    ),
    "replaced_worker_not_refused": Mutant(
        "keep_going",
        "The coordination service answers a worker that was replaced.",
        _replaced_worker_not_refused,
        19,
    ),
    "no_last_save": Mutant("fleet", "The chief exits without saving its last steps.", _no_last_save, 2),
    "unsynced_turns": Mutant(
        "data_service",
        "The dispatcher answers before the turn of a chunk is synced.",
        _unsynced_turns,
        seeds=3,
    ),
    "announced_in_two_steps": Mutant(
        "data_service",
        "A chunk and the place after it are noted in two transactions.",
        _announced_in_two_steps,
        seeds=149,
    ),
    "turn_given_anew": Mutant(
        "data_service", "Asking for a turn again gives another chunk.", _turn_given_anew, seeds=3
    ),
    "place_without_skip": Mutant(
        "data_service",
        "A chunk that begins inside of a batch is read again from the start of the batch.",
        _place_without_skip,
        seeds=14,
    ),
    "acknowledged_too_far": Mutant(
        "data_service",
        "An acknowledgement counts for all chunks that the trainer was given.",
        _acknowledged_too_far,
        seeds=14,
    ),
    "lease_for_ever": Mutant(
        "data_service", "The lease of a silent data worker never expires.", _lease_for_ever, seeds=16
    ),
    "committed_before_saved": Mutant(
        "data_service",
        "A position is committed before the checkpoint with it is written.",
        _committed_before_saved,
        seeds=14,
    ),
    "offset_committed_wins": Mutant(
        "kafka",
        "A restored position is ignored if the broker has a committed offset.",
        _offset_committed_wins,
        seeds=64,
    ),
    "position_skips_one": Mutant("kafka", "A position skips the next message.", _position_skips_one, seeds=4),
    "revoked_without_commit": Mutant(
        "kafka",
        "A member of a group gives partitions up without committing what it has saved.",
        _revoked_without_commit,
        seeds=270,
    ),
    "revoked_with_commit": Mutant(
        "kafka",
        "A member of a group that gives partitions up commits messages that are in no checkpoint.",
        _revoked_with_commit,
        seeds=4,
    ),
    "offsets_committed_before_saved": Mutant(
        "kafka",
        "Offsets are committed before the checkpoint with them is written.",
        _offsets_committed_before_saved,
        seeds=1,
    ),
    "gap_applied_over": Mutant(
        "publishing", "A delta is applied although the one before it is missing.", _gap_applied_over, 3
    ),
    "epoch_of_a_delta_ignored": Mutant(
        "publishing", "A delta of another epoch is applied.", _epoch_of_a_delta_ignored
    ),
    "removals_not_published": Mutant(
        "publishing", "A delta lacks the ids that have no row any more.", _removals_not_published, 2
    ),
    "snapshot_without_removals": Mutant(
        "publishing", "Rows that a snapshot does not have stay.", _snapshot_without_removals, 1
    ),
    "epoch_continued": Mutant(
        "publishing", "A restarted publisher continues the epoch before it.", _epoch_continued, 6
    ),
    "step_told_too_early": Mutant(
        "publishing", "A delta says a step whose rows it may lack.", _step_told_too_early, 1
    ),
    "snapshot_of_a_later_delta": Mutant(
        "publishing", "A snapshot says that it contains the delta after it.", _snapshot_of_a_later_delta, 3
    ),
    "snapshot_of_a_restore": Mutant(
        "publishing", "Snapshots are taken while rows are restored.", _snapshot_of_a_restore, seeds=20
    ),
    "overflow_not_noticed": Mutant(
        "publishing",
        "Changed ids that did not fit into the set are forgotten.",
        _overflow_not_noticed,
        seeds=1,
    ),
    "failed_delta_dropped": Mutant(
        "publishing",
        "A delta that the channel did not take is not sent again.",
        _failed_delta_dropped,
        seeds=45,
    ),
    "last_changes_tried_once": Mutant(
        "publishing",
        "A run ends although the channel has not taken its last changes.",
        _last_changes_tried_once,
        seeds=1,
    ),
    "snapshot_not_awaited": Mutant(
        "publishing",
        "A run ends although the snapshot that its readers start with is not written.",
        _snapshot_not_awaited,
        seeds=1,
    ),
    "last_weights_not_published": Mutant(
        "publishing",
        "The last delta of a run has new weights only if it is time for them.",
        _last_weights_not_published,
        seeds=1,
    ),
    "delivery_not_awaited": Mutant(
        "publishing", "A delta counts as sent before Kafka has it.", _delivery_not_awaited, 74
    ),
    "failed_delivery_counts": Mutant(
        "publishing", "A message that Kafka did not accept counts as delivered.", _failed_delivery_counts, 70
    ),
    "snapshot_named_too_early": Mutant(
        "publishing",
        "Readers are told of a snapshot before Kafka has all of its rows.",
        _snapshot_named_too_early,
        117,
    ),
    "epoch_by_own_clock": Mutant(
        "publishing",
        "An epoch in Kafka starts at the time of its writer's clock, though another one started later.",
        _epoch_by_own_clock,
        14,
    ),
    "deleted_too_early": Mutant(
        "publishing", "Messages in Kafka are deleted that a new reader needs.", _deleted_too_early, 1
    ),
    "run_not_named": Mutant(
        "elastic",
        "The only worker of a run leases files under another name after a restart.",
        lambda: [(LeasedFiles, "read_for", lambda self, run: None)],  # noqa: ARG005
        29,
    ),
    "replaced_worker_takes_files": Mutant(
        "elastic",
        "A worker that was replaced takes files under the number of its successor.",
        _replaced_worker_takes_files,
        88,
    ),
    "lease_token_ignored": Mutant(
        "leases",
        "A worker that has lost a lease changes that of its successor.",
        _lease_token_ignored,
        3,
    ),
    "given_back_from_its_start": Mutant(
        "elastic",
        "A file that a worker returns to the queue is read again from its start.",
        _given_back_from_its_start,
        15,
    ),
    "failed_save_counts": Mutant(
        "checkpoints", "Changes of a save that failed count as saved.", _failed_save_counts, 224
    ),
    "chain_deleted": Mutant(
        "checkpoints", "A checkpoint is deleted that an increment needs.", _chain_deleted, 1
    ),
    "step_written_over": Mutant(
        "checkpoints", "A step that is saved again is written over its checkpoint.", _step_written_over, 1
    ),
    "replaced_before_listed": Mutant(
        "checkpoints",
        "A checkpoint whose step is saved again is deleted before the new one is written.",
        _replaced_before_listed,
        1,
    ),
    "no_journal": Mutant(
        "checkpoints", "What is about to be written and deleted is not noted before.", _no_journal, 1
    ),
    "model_dir_not_locked": Mutant("writers", "Two trainers use one model_dir.", _model_dir_not_locked, 1),
    "any_version_answers": Mutant(
        "serving", "A server answers from the version that it opened last.", _any_version_answers, 4
    ),
    "deadline_not_watched": Mutant(
        "serving", "A request waits for a shard's answer however long it takes.", _deadline_not_watched, 7
    ),
    "failed_request_still_counts": Mutant(
        "serving", "A request that failed counts as under way for ever.", _failed_request_still_counts, 1
    ),
    "answers_swapped": Mutant(
        "asking", "Two requests of a batch get each other's rows.", _answers_swapped, 12
    ),
    "quota_of_a_failed_call": Mutant(
        "asking", "A request that failed keeps its place in the quotas.", _quota_of_a_failed_call, 1
    ),
    "late_request_computed": Mutant(
        "asking",
        "A batch with a bad row is computed again for requests whose deadline has passed.",
        _late_request_computed,
        157,
    ),
    "deadline_not_passed_on": Mutant(
        "asking",
        "A call is sent with the default time of a request, not with what is left of its own.",
        _deadline_not_passed_on,
        1,
    ),
    "time_on_the_way_not_counted": Mutant(
        "asking",
        "An answer is as old on arrival as it was when it was made.",
        _time_on_the_way_not_counted,
        233,
    ),
    "closed_without_grace": Mutant(
        "asking", "A server that closes cancels the calls under way.", _closed_without_grace, 62
    ),
    "version_not_leased": Mutant(
        "asking", "A version is closed while requests use it.", _version_not_leased, 5
    ),
}
