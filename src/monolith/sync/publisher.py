"""Publisher: turns the changed rows of one shard into numbered deltas and appends them to a channel.

Tables record the ids of rows that changed or were removed in a set. Every interval the publisher empties the
set, looks the rows up and appends a delta: rows that exist, ids that have none any more. A row is as new as
that lookup, so it may be newer than the delta's number says and is never older. For this reason publishing
never waits for training, nor training for publishing.

    open ──▶ publishing ◀──resume── paused ◀── a guard's reason, `pause`, `rollback`
               │  ▲
               └──┘ a new epoch: more ids changed than the set holds, the tables were restored or rolled back

With each delta come digests of the next few buckets of ids, so that within one round through all buckets a
subscriber notices any difference, whatever caused it. A digest is taken after the rows of the delta were
read; a bucket with a row that changed since is left out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from monolith import concurrency
from monolith.checkpoint.saved_tables import WHOLE, IdShard, check_shard
from monolith.errors import TableClosedError, UnavailableError
from monolith.sync.channel import DeltaWriter, ShardLog, delta_bytes
from monolith.sync.messages import (
    BUCKETS,
    Delta,
    Digests,
    LearnedUpTo,
    LogPosition,
    Message,
    PublishState,
    SnapshotBegin,
    SnapshotEnd,
    SnapshotRows,
)
from monolith.table import Fp32, Rows, Table, TouchedKeySet, bucket_of, iterate, iterate_buckets

DELTA_IDS = 1 << 17
"""The most ids in one delta; if more have changed, another delta follows at once."""
DIGEST_BUCKETS = 256
"""The most buckets that a delta has digests of."""
DIGEST_ROWS = 8192
"""About how many rows of a table are read for the digests of one delta."""
CHUNK_BYTES = 4 << 20
"""About how large a message of a snapshot is."""

CheckDelta = Callable[[Delta], str | None]
"""Returns a reason to pause publishing before this delta, for an operator; None lets it be published."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PublisherConfig:
    """What a publisher publishes, and how often."""

    run: str
    """Names the run, for subscribers."""
    shard: IdShard = WHOLE
    """(k, n): all ids of the tables are, as unsigned numbers, k modulo n."""
    interval: float = 0.25
    """Seconds between deltas."""
    dense_interval: float = 1.0
    """Seconds between dense weights. If nothing changes, an empty delta is sent as often, so that readers can
    tell an idle run from a dead one."""
    with_state: bool = False
    """Whether rows come with their optimizer state, for standbys."""
    initial_state: PublishState | None = None
    """The state to start with, if publishing was paused before this process started."""
    digest_buckets: int = DIGEST_BUCKETS
    """The most buckets that a delta has digests of; 0: no digests."""
    touched_capacity: int | None = None
    """Changed ids of a table that are remembered until the next delta; if more change, a new epoch starts."""
    still: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered while the rows and the dense part of a delta are read. A parameter server lets no push change
    them meanwhile, so that its standby knows which pushes they contain."""


@dataclass(frozen=True, slots=True)
class PublishStats:
    """Counters of a publisher, since it was made."""

    deltas: int = 0
    rows: int = 0
    removed: int = 0
    bytes: int = 0
    dense: int = 0
    """Deltas with dense weights."""
    snapshots: int = 0
    """Snapshots that were started, including those of some buckets."""
    epochs: int = 0
    failures: int = 0
    """Attempts that found the channel unavailable."""
    lost: int = 0
    """Changed ids that did not fit into the set, each time the cause of a new epoch."""
    pending: int = 0
    """Changed ids that wait to be published."""
    seconds: float = 0.0
    """Time spent on making and sending deltas."""


class Publisher:
    """Publishes one shard of a model's rows. Thread-safe.

    Shapes: n changed IDs of a table since the last delta, d floats per row: ids int64 (n,), values float32
    (n, d).

    Args:
        tables: The tables of this process, by name.
        writer: The channel.
        dense: Returns copies of all dense weights by name, or None if there are none now. Called from any
            thread.
        learned: Returns the training progress. Called from any thread.
        check_delta: Called with every delta before it is published.
        clock: Returns Unix seconds, which messages are stamped with.
        timer: Returns seconds that only grow, for intervals.

    Examples:
        >>> import torch
        >>> from monolith import NativeTable, Publisher, Segment, TableConfig
        >>> from monolith.sync import MemoryChannel, PublisherConfig
        >>> table = NativeTable(TableConfig(name="item", segments=(Segment(dim=2),)))
        >>> publisher = Publisher({"item": table}, MemoryChannel().writer(), PublisherConfig(run="clicks"))
        >>> table.assign(torch.tensor([7]), torch.ones(1, 2))  # recorded as changed
        >>> delta = publisher.publish_now()
        >>> delta.position.sequence, delta.rows["item"].ids
        (1, tensor([7]))
        >>> publisher.close()
    """

    def __init__(
        self,
        tables: Mapping[str, Table],
        writer: DeltaWriter,
        config: PublisherConfig,
        *,
        dense: Callable[[], Mapping[str, Tensor] | None] | None = None,
        learned: Callable[[], LearnedUpTo] | None = None,
        check_delta: CheckDelta | None = None,
        clock: Callable[[], float] = concurrency.time,
        timer: Callable[[], float] = concurrency.monotonic,
    ) -> None:
        check_shard("publisher: shard", config.shard)
        self._tables = dict(tables)
        self._writer = writer
        self._config = config
        self._run, self._shard = config.run, config.shard
        self._ask_dense, self._ask_learned = dense, learned
        self._check_delta = check_delta
        self._clock, self._timer = clock, timer
        capacity = {} if config.touched_capacity is None else {"capacity": config.touched_capacity}
        self._touched = {name: TouchedKeySet(**capacity, name_suffix=f"_{name}") for name in self._tables}
        self._stop = concurrency.Event()
        self._thread: concurrency.Thread | None = None
        # Snapshots read these without the lock, from other threads; each is replaced in one assignment. A
        # snapshot that sees an old `_position` is still right: its reader applies some deltas again.
        self._position = LogPosition(concurrency.token_hex(16), 0)  # of the newest published delta
        self._making = self._position  # of the delta being made, else of the newest
        self._state = replace(
            PublishState() if config.initial_state is None else config.initial_state,
            number=int(clock() * 1000),
            publisher=concurrency.token_hex(16),
        )
        self._dense: Mapping[str, Tensor] | None = None
        self._restoring = False  # whether the rows are of no epoch: see `suspend`
        self._counting = concurrency.Lock()  # guards `_stats`; snapshots count without the lock below
        self._stats = PublishStats(epochs=1)
        # Everything below is guarded by this lock. It is reentrant: a guard's reason pauses inside a
        # publication, and a full set starts an epoch there.
        self._lock = concurrency.RLock()
        self._opened = False
        self._state_sent = False
        self._failing = ""
        self._unsent: Delta | None = None
        self._pending: dict[str, Tensor] = {}
        self._split = False  # whether the newest delta left changed ids for another
        self._lost = dict.fromkeys(self._tables, 0)
        self._cursors = dict.fromkeys(self._tables, 0)
        self._sent_at = self._dense_at = float("-inf")
        self._closed = False
        for name, table in self._tables.items():
            table.touch(self._touched[name])

    @property
    def state(self) -> PublishState:
        return self._state

    @property
    def position(self) -> LogPosition:
        """Position of the newest published delta: changes from now on are in deltas after it."""
        return self._position

    @property
    def trouble(self) -> str:
        """Why changes cannot be published now, and are retried; empty if they can."""
        return self._failing

    @property
    def stats(self) -> PublishStats:
        waiting = sum(len(touched) for touched in self._touched.values())
        with self._lock:
            waiting += sum(len(ids) for ids in self._pending.values())
            lost = sum(touched.lost for touched in self._touched.values())
            return replace(self._stats, pending=waiting, lost=lost)

    # Start and end

    def start(self) -> None:
        """Publish every interval from now on, in a thread of its own."""
        if self._thread is None:
            self._thread = concurrency.Thread(target=self._keep_publishing, name="publisher", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Publish the remaining changes, unless publishing is paused, and stop. Closing again does
        nothing."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            if self._closed:
                return
            with suppress(TableClosedError):
                self._try_to_publish()
            self._closed = True
            for name, table in self._tables.items():
                with suppress(TableClosedError):
                    table.untouch(self._touched[name])
            self._writer.close()

    def publish_now(self) -> Delta | None:
        """Publish the changes; return the delta, or None if nothing was published.

        Nothing is published if publishing is paused, the channel is unavailable, or nothing is due.
        """
        with self._lock:
            if self._closed or not self._reaches_channel() or self._state.paused:
                return None
            began = time.perf_counter()
            delta = self._make()
            # Ids that did not fit into the set are lost, so deltas cannot describe the changes any more.
            # Checked after the delta is made: the set may overflow while it is, and then this delta lacks
            # changes of the steps that it says it contains.
            if self._has_overflowed() or delta is None:
                return None
            try:
                reason = None if self._check_delta is None else self._check_delta(delta)
            except BaseException:
                self._take_back(delta)
                raise
            if reason is not None:
                self._take_back(delta)
                self.pause(reason)
                return None
            # From here on this very delta is retried, with its number, until the channel has it: a channel
            # may have stored it although it reported a failure, and ignores the repetition.
            self._unsent = delta
            sent = self._reaches_channel()
            self._count(seconds=time.perf_counter() - began)
            return delta if sent else None

    def flush(self) -> bool:
        """Publish all changes up to now, the newest dense weights included; return whether that succeeded."""
        with self._lock:
            if self._ask_dense is not None and self._ask_dense() is not self._dense:
                self._dense_at = float("-inf")  # due, however recently other weights were sent
        while True:
            self.publish_now()
            with self._lock:
                if self._closed or self._state.paused or self._unsent is not None or not self._opened:
                    return False
                if not self._pending and not any(len(touched) for touched in self._touched.values()):
                    return True

    def suspend(self) -> None:
        """Make no snapshots until `begin_epoch`: call it before rows are rolled back or restored.

        Otherwise a snapshot that a reader takes meanwhile would say that restored rows are of the step before
        the restore. The caller publishes nothing until then.
        """
        self._restoring = True

    def begin_epoch(self, why: str) -> None:
        """Start another history: the deltas published before no longer lead to what the tables contain now.

        Every subscriber takes a snapshot. Call it after the tables were rolled back or restored, while no
        step is trained.
        """
        with self._lock:
            self._restoring = False
            self._begin_epoch(why)

    def _begin_epoch(self, why: str) -> None:
        with self._lock:
            _log.info("publishing shard %d of %d: new epoch: %s", *self._shard, why)
            # Ids that change from here on are in the next delta and in snapshots of the new epoch: harmless.
            self._lost = {name: touched.lost for name, touched in self._touched.items()}
            for touched in self._touched.values():
                touched.steal()  # snapshots of the new epoch contain all of these rows
            self._pending.clear()
            self._unsent = None
            self._opened = False
            self._sent_at = self._dense_at = float("-inf")
            self._cursors = dict.fromkeys(self._tables, 0)
            self._position = self._making = LogPosition(concurrency.token_hex(16), 0)
            self._count(epochs=1)
            self._reaches_channel()

    # Pausing

    def pause(self, why: str) -> None:
        """Publish nothing until `resume`. Changed ids are collected meanwhile."""
        self._become(paused=True, reason=why)

    def rollback(self, version: str) -> None:
        """Pause publishing, and have servers roll back to an exported version."""
        self._become(paused=True, reason=f"rolled back to version {version}", version=version)

    def resume(self) -> None:
        """Publish the current rows again."""
        with self._lock:
            # Servers that rolled back have dropped the rows of all deltas: they need a snapshot.
            if self._state.version is not None:
                self._begin_epoch(f"resumed after a rollback to version {self._state.version}")
            self._become(paused=False)

    def _become(self, *, paused: bool, reason: str = "", version: str | None = None) -> None:
        with self._lock:
            now = self._clock()
            number = max(self._state.number + 1, int(now * 1000))
            self._state = PublishState(paused, reason, now, version, number, self._state.publisher)
            self._state_sent = False
            if paused:
                _log.warning("publishing shard %d of %d is paused: %s", *self._shard, reason)
            else:
                _log.info("publishing shard %d of %d resumes", *self._shard)
            self._reaches_channel()

    # The channel

    def _keep_publishing(self) -> None:
        delay = 0.0
        while not self._stop.wait(delay):
            began = concurrency.monotonic()
            try:
                self._try_to_publish()
            except TableClosedError:
                return
            with self._lock:
                more = self._split and not (self._failing or self._state.paused)
            delay = 0.0 if more else max(0.0, self._config.interval - (concurrency.monotonic() - began))

    def _try_to_publish(self) -> None:
        """Publish; log and count any failure, so that training continues."""
        try:
            self.publish_now()
        except TableClosedError:
            raise
        except Exception:
            self._fail("publishing failed", trace=True)

    def _reaches_channel(self) -> bool:
        """Send what the channel has not accepted yet: the epoch, the state, a delta. Return whether all is
        sent."""
        try:
            # The order matters: a channel refuses deltas of an epoch that was not opened, and readers must
            # know of a pause before they see another delta.
            if not self._opened:
                position = LogPosition(self._position.epoch, 0)
                widths = {name: table.dim for name, table in self._tables.items()}
                self._writer.open(ShardLog(self._run, self._shard, position, 1, widths), self._take_snapshot)
                self._opened, self._state_sent = True, False
            if not self._state_sent:
                self._writer.set_state(self._state)
                self._state_sent = True
            if self._unsent is not None and not self._state.paused:
                self._append(self._unsent)
        except UnavailableError as cause:
            self._fail(f"the delta channel is unavailable: {cause}")
            return False
        if self._failing:
            self._failing = ""
            _log.info("publishing shard %d of %d works again", *self._shard)
        return self._unsent is None or self._state.paused

    def _append(self, delta: Delta) -> None:
        self._writer.append(delta)
        self._unsent = None
        self._position = delta.position
        self._sent_at = self._timer()
        self._count(
            deltas=1,
            rows=sum(map(len, delta.rows.values())),
            removed=sum(map(len, delta.removed.values())),
            bytes=delta_bytes(delta),
            dense=int(delta.dense is not None),
        )

    def _fail(self, what: str, *, trace: bool = False) -> None:
        self._count(failures=1)
        if not self._failing:
            _log.warning(
                "publishing shard %d of %d: %s; training continues, changed rows are collected and retried",
                *self._shard,
                what,
                exc_info=trace,
            )
        self._failing = what

    def _count(self, **more: float) -> None:
        with self._counting:
            counted = {name: getattr(self._stats, name) + value for name, value in more.items()}
            self._stats = replace(self._stats, **counted)

    # Deltas

    def _has_overflowed(self) -> bool:
        """Start a new epoch if a set of changed ids overflowed; return whether one did."""
        missed = {
            name: touched.lost - self._lost[name]
            for name, touched in self._touched.items()
            if touched.lost != self._lost[name]
        }
        if not missed:
            return False
        which = ", ".join(f"{count:,} of table {name!r}" for name, count in missed.items())
        why = (
            f"more ids changed between two deltas than are remembered ({which} were dropped); "
            "every subscriber takes a snapshot. Publish more often, or change fewer rows at once."
        )
        _log.warning("publishing shard %d of %d: %s", *self._shard, why)
        self._begin_epoch(why)
        return True

    def _make(self) -> Delta | None:
        """Return the changes as the next delta; None if nothing is due.

        If that fails, the ids taken out of the sets of changed ids are put back.
        """
        taken: dict[str, Tensor] = {}
        try:
            return self._gather(taken)
        except BaseException:
            self._put_back(taken)
            self._dense_at = float("-inf")
            raise

    def _gather(self, taken: dict[str, Tensor]) -> Delta | None:
        now = self._timer()
        self._split = False
        self._making = position = replace(self._position, sequence=self._position.sequence + 1)
        rows: dict[str, Rows] = {}
        removed: dict[str, Tensor] = {}
        left = DELTA_IDS
        with self._config.still():
            learned = self._learned()  # before the rows are looked up: they contain at least this progress
            for name, table in self._tables.items():
                ids = self._changed(name)
                if len(ids) > left:
                    self._pending[name], ids = ids[left:], ids[:left]
                    self._split = True
                left -= len(ids)
                if len(ids):
                    taken[name] = ids
                    there, gone = self._look_up(table, ids)
                    if len(there):
                        rows[name] = there
                    if len(gone):
                        removed[name] = gone
            # The dense part of a standby says which pushes the rows contain: it comes with the last delta.
            dense = None if self._split and self._config.with_state else self._due_dense(now)
        if not rows and not removed and dense is None and now - self._sent_at < self._config.dense_interval:
            self._making = self._position  # a snapshot that ends now is complete with the next delta
            return None
        # After the rows were read: the update of one step more may have been under way.
        learned = replace(learned, newest_step=self._learned().step + 1)
        digests = {name: found for name in self._tables if (found := self._next_digests(name)) is not None}
        return Delta(
            self._run, self._shard, position, learned, rows, removed, dense, digests, complete=not self._split
        )

    def _changed(self, name: str) -> Tensor:
        # Stolen before the rows are looked up: a row that changes in between is sent now and once more later.
        stolen = self._touched[name].steal()
        waiting = self._pending.pop(name, None)
        return stolen if waiting is None else _union([waiting, stolen])

    def _look_up(self, table: Table, ids: Tensor) -> tuple[Rows, Tensor]:
        """Return the rows of the ids that have one, and the remaining ids."""
        found, rows = table.lookup_rows(ids)
        return self._as_sent(rows).keep(found), ids[~found]

    def _as_sent(self, rows: Rows) -> Rows:
        return rows if self._config.with_state else replace(rows, state=rows.state[:, :0])

    def _take_back(self, delta: Delta) -> None:
        """Count the ids of a delta that was not published as changed again."""
        self._put_back({name: rows.ids for name, rows in delta.rows.items()})
        self._put_back(delta.removed)
        if delta.dense is not None:
            self._dense_at = float("-inf")

    def _put_back(self, ids: Mapping[str, Tensor]) -> None:
        for name, some in ids.items():
            waiting = self._pending.get(name)
            self._pending[name] = some if waiting is None else _union([waiting, some])

    def _due_dense(self, now: float) -> Mapping[str, Tensor] | None:
        if self._ask_dense is None or now - self._dense_at < self._config.dense_interval:
            return None
        weights = self._ask_dense()
        if weights is not None:
            self._dense, self._dense_at = weights, now
        return weights

    def _learned(self) -> LearnedUpTo:
        learned = LearnedUpTo() if self._ask_learned is None else self._ask_learned()
        return replace(learned, published_at=self._clock())

    def _next_digests(self, name: str) -> Digests | None:
        """Return digests of the next few buckets of a table, without buckets with a row that changed by
        now."""
        table = self._tables[name]
        # A server stores rows in the table's compressed form: unless that is exact, its sums differ from
        # ours.
        exact = self._config.with_state or all(isinstance(s.compressor, Fp32) for s in table.config.segments)
        if not exact or self._config.digest_buckets == 0:
            return None
        count = max(1, min(self._config.digest_buckets, DIGEST_ROWS * BUCKETS // max(1, len(table))))
        first = self._cursors[name]
        buckets = torch.arange(first, min(BUCKETS, first + count))
        self._cursors[name] = (first + count) % BUCKETS if first + count < BUCKETS else 0
        sums = table.digests(buckets)
        since = self._changed(name)
        if len(since):
            self._pending[name] = since
        still = torch.ones(len(buckets), dtype=torch.bool)
        among = bucket_of(since) - first
        still[among[(among >= 0) & (among < len(buckets))]] = False
        return Digests(buckets[still], sums[still])

    # Snapshots

    def _take_snapshot(self, buckets: Tensor | None = None) -> Iterator[Message]:
        """Read the rows of this shard. From any thread, while rows are trained and published."""
        # Without the lock, which a publication holds while it waits for the channel: `_opened`, `_position`
        # and `_making` are each read once. The position first: every row read after it is at least as new.
        position, name, number = self._position, concurrency.token_hex(16), 0
        if not self._opened:
            raise UnavailableError("a new epoch is about to start; retry")
        self._refuse_if_paused(position)
        self._count(snapshots=1)
        dense = None
        if buckets is None:
            dense = self._dense if self._ask_dense is None else self._ask_dense()
        yield SnapshotBegin(self._run, self._shard, position, self._learned(), buckets, dense, name)
        for table_name, table in self._tables.items():
            for rows in self._chunks(table, buckets):
                self._refuse_if_paused(position)
                yield SnapshotRows(table_name, self._as_sent(rows), name, number)
                number += 1
        # Rows were read while deltas were made: the last of these deltas brings every row to one moment.
        self._refuse_if_paused(position)
        making = self._making
        whole_at = making if making.epoch == position.epoch else position
        yield SnapshotEnd(position, whole_at, name, number)

    def _chunks(self, table: Table, buckets: Tensor | None) -> Iterator[Rows]:
        width = 16 + 4 * (table.dim + (table.state_dim if self._config.with_state else 0))
        limit = min(1 << 16, max(1, CHUNK_BYTES // width))
        if buckets is None:
            return iterate(table, limit=limit)
        return iterate_buckets(table, buckets, limit=limit)

    def _refuse_if_paused(self, position: LogPosition) -> None:
        """Raise an error unless the rows that were just read may be part of a snapshot of this position."""
        state = self._state
        if state.paused:
            raise UnavailableError(f"publishing is paused: {state.reason}. Resume it for a snapshot.")
        if self._restoring or self._position.epoch != position.epoch:
            raise UnavailableError("rows are being restored, and a new epoch starts; take another snapshot")


def _union(several: list[Tensor]) -> Tensor:
    """Return ids, each once."""
    return torch.from_numpy(np.unique(torch.cat(several).numpy()))
