"""Publisher: what changed in the tables of one holder of rows, numbered and handed to a channel.

Tables put the ids of rows that changed or went into a set. Every interval the publisher takes them out, looks
their rows up and appends a delta: rows that are there, ids that have none. A row is as new as the look, which
may be newer than the delta's number and is never older. So nothing waits for training, nor training for it.

    open ──▶ publishing ◀──resume── held ◀── a guard's reason, `hold`, `rollback`
               │  ▲
               └──┘ a new epoch: more ids changed than the set holds, the tables were restored or rewound

With each delta come digests of the next few buckets of ids, so that a subscriber finds out what it holds
wrongly, whatever the reason, within one round through all buckets. A digest is taken after the rows of the
delta were read; a bucket of which a row changed since is left out.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from monolith.checkpoint.shares import WHOLE, IdShare, check_share
from monolith.errors import TableClosedError, UnavailableError
from monolith.sync.channel import DeltaWriter, ShareLog
from monolith.sync.delta_log import delta_bytes
from monolith.sync.messages import (
    BUCKETS,
    Delta,
    Digests,
    LearnedUpTo,
    LogPlace,
    Message,
    PublishState,
    SnapshotBegin,
    SnapshotEnd,
    SnapshotRows,
)
from monolith.table import Fp32, Rows, Table, TouchedKeySet, bucket_of, iterate, iterate_buckets

DELTA_IDS = 1 << 17
"""Ids in one delta, at most; where more have changed another follows at once."""
DIGEST_BUCKETS = 256
"""Buckets that a delta brings digests of, at most."""
DIGEST_ROWS = 8192
"""About how many rows of a table are read for the digests of one delta."""
CHUNK_BYTES = 4 << 20
"""About how large a message of a snapshot is."""

_log = logging.getLogger(__name__)


class PublishGuard(Protocol):
    """Looks at what is about to be published."""

    def check(self, delta: Delta) -> str | None:
        """Return a reason to hold publishing back, for a person; None lets the delta out."""


@dataclass(frozen=True, slots=True)
class PublishStats:
    """What a publisher has done, since it was made."""

    deltas: int = 0
    rows: int = 0
    removed: int = 0
    bytes: int = 0
    dense: int = 0
    """Deltas that brought dense weights."""
    snapshots: int = 0
    """Snapshots that were begun, those of some buckets among them."""
    epochs: int = 0
    failures: int = 0
    """Attempts that found the channel unavailable."""
    lost: int = 0
    """Changed ids that did not fit into the set, each time the cause of a new epoch."""
    pending: int = 0
    """Changed ids that wait to be published."""
    seconds: float = 0.0
    """Spent on making and sending deltas."""


class Publisher:
    """Publishes one share of a model's rows. Thread-safe.

    Args:
        tables: What this process holds, by name.
        writer: Where deltas go.
        run: Names the run, for those who read.
        share: (k, n): all ids of the tables are, as unsigned numbers, k modulo n.
        interval: Seconds between deltas.
        dense_interval: Seconds between dense weights. As often a delta is sent where nothing has changed, so
            that readers can tell a quiet run from one that is gone.
        dense: Returns copies of all dense weights by name, or None where there are none now. From any thread.
        learned: Returns what was learned up to now. From any thread.
        with_state: Whether rows come with their optimizer state, for standbys.
        guard: Asked about every delta before it is let out.
        state: Where it is held from the first moment on: why, since when, and at which version servers are.
        clock: Returns Unix seconds, which messages are stamped with.
        timer: Returns seconds that only grow, for intervals.
        digest_buckets: Buckets that a delta brings digests of, at most; 0: no digests.
        touched_capacity: Changed ids of a table that are remembered until the next delta; past it a new epoch
            begins.
    """

    def __init__(
        self,
        tables: Mapping[str, Table],
        writer: DeltaWriter,
        *,
        run: str,
        share: IdShare = WHOLE,
        interval: float = 0.25,
        dense_interval: float = 1.0,
        dense: Callable[[], Mapping[str, Tensor] | None] | None = None,
        learned: Callable[[], LearnedUpTo] | None = None,
        with_state: bool = False,
        guard: PublishGuard | None = None,
        state: PublishState | None = None,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
        digest_buckets: int = DIGEST_BUCKETS,
        touched_capacity: int | None = None,
    ) -> None:
        check_share("publisher: share", share)
        self._tables = dict(tables)
        self._writer = writer
        self._run, self._share = run, share
        self._interval, self._dense_interval = interval, dense_interval
        self._ask_dense, self._ask_learned = dense, learned
        self._with_state = with_state
        self._guard = guard
        self._clock, self._timer = clock, timer
        self._digest_buckets = digest_buckets
        sets = {} if touched_capacity is None else {"capacity": touched_capacity}
        self._touched = {name: TouchedKeySet(**sets, name_suffix=f"_{name}") for name in self._tables}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # Read without the lock by those who take snapshots; each is set in one step.
        self._place = LogPlace(uuid.uuid4().hex, 0)
        self._making = self._place
        self._state = replace(
            PublishState() if state is None else state,
            number=int(clock() * 1000),
            publisher=uuid.uuid4().hex,
        )
        self._dense: Mapping[str, Tensor] | None = None
        self._counting = threading.Lock()
        self._stats = PublishStats(epochs=1)  # guarded by the lock before it
        # All below is guarded by the lock.
        self._lock = threading.RLock()
        self._opened = False
        self._said = False
        self._failing = ""
        self._unsent: Delta | None = None
        self._pending: dict[str, Tensor] = {}
        self._cut = False  # whether the newest delta left changed ids for another
        self._lost = dict.fromkeys(self._tables, 0)
        self._cursors = dict.fromkeys(self._tables, 0)
        self._sent_at = self._dense_at = float("-inf")
        self._closed = False
        for name, table in self._tables.items():
            table.touch(self._touched[name])

    # What others ask

    @property
    def state(self) -> PublishState:
        return self._state

    @property
    def place(self) -> LogPlace:
        """Of the newest delta that was let out: what changes from now on is in deltas after it."""
        return self._place

    @property
    def trouble(self) -> str:
        """Why what has changed cannot be handed over now, and is retried; empty while it can."""
        return self._failing

    @property
    def stats(self) -> PublishStats:
        waiting = sum(len(touched) for touched in self._touched.values())
        with self._lock:
            waiting += sum(len(ids) for ids in self._pending.values())
            lost = sum(touched.lost for touched in self._touched.values())
            return replace(self._stats, pending=waiting, lost=lost)

    # Life

    def start(self) -> None:
        """Publish every interval from now on, in a thread of its own."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep_publishing, name="publisher", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Publish what is left, unless it is held, and stop. Closing again does nothing."""
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
        """Publish what has changed; return the delta, or None where nothing was let out.

        That is so where publishing is held, the channel is unavailable, or there is nothing to say.
        """
        with self._lock:
            if self._closed or not self._reaches_channel() or self._state.held:
                return None
            began = time.perf_counter()
            if self._have_missed():
                return None
            delta = self._make()
            if delta is None:
                return None
            reason = self._reason_to_hold(delta)
            if reason is not None:
                self._take_back(delta)
                self.hold(reason)
                return None
            sent = self._send(delta)
            self._count(seconds=time.perf_counter() - began)
            return delta if sent else None

    def flush(self) -> bool:
        """Publish all that has changed up to now; return whether it was let out."""
        while True:
            self.publish_now()
            with self._lock:
                if self._closed or self._state.held or self._unsent is not None or not self._opened:
                    return False
                if not self._pending and not any(len(touched) for touched in self._touched.values()):
                    return True

    def begin_epoch(self, why: str) -> None:
        """Begin another history: what was published before says nothing of what the tables hold now.

        Whoever follows takes a snapshot. To be called after the tables went back to an earlier state, or were
        restored, with nobody training.
        """
        with self._lock:
            _log.info("publishing share %d of %d: new epoch: %s", *self._share, why)
            self._lost = {name: touched.lost for name, touched in self._touched.items()}
            for touched in self._touched.values():
                touched.steal()  # all of it is in the snapshots of the new epoch
            self._pending.clear()
            self._unsent = None
            self._opened = False
            self._sent_at = self._dense_at = float("-inf")
            self._cursors = dict.fromkeys(self._tables, 0)
            self._place = self._making = LogPlace(uuid.uuid4().hex, 0)
            self._count(epochs=1)
            self._reaches_channel()

    # Holding back

    def hold(self, why: str) -> None:
        """Let nothing more out, until `resume`. What changes is collected."""
        self._become(held=True, reason=why)

    def rollback(self, version: str) -> None:
        """Hold publishing, and have servers go back to an exported version."""
        self._become(held=True, reason=f"rolled back to version {version}", version=version)

    def resume(self) -> None:
        """Go on publishing what is current."""
        with self._lock:
            if self._state.version is not None:
                self.begin_epoch(f"resumed after a rollback to version {self._state.version}")
            self._become(held=False)

    def _become(self, *, held: bool, reason: str = "", version: str | None = None) -> None:
        with self._lock:
            now = self._clock()
            number = max(self._state.number + 1, int(now * 1000))
            self._state = PublishState(held, reason, now, version, number, self._state.publisher)
            self._said = False
            if held:
                _log.warning("publishing share %d of %d is held: %s", *self._share, reason)
            else:
                _log.info("publishing share %d of %d goes on", *self._share)
            self._reaches_channel()

    # The channel

    def _keep_publishing(self) -> None:
        delay = 0.0
        while not self._stop.wait(delay):
            began = time.monotonic()
            try:
                self._try_to_publish()
            except TableClosedError:
                return
            with self._lock:
                more = self._cut and not (self._failing or self._state.held)
            delay = 0.0 if more else max(0.0, self._interval - (time.monotonic() - began))

    def _try_to_publish(self) -> None:
        """Publish, and let nothing that goes wrong get out: training goes on, heard of or not."""
        try:
            self.publish_now()
        except TableClosedError:
            raise
        except Exception:
            self._fail("publishing failed", trace=True)

    def _reaches_channel(self) -> bool:
        """Hand over what was not taken before: the epoch, the state, a delta. Return whether all was."""
        try:
            if not self._opened:
                place = LogPlace(self._place.epoch, 0)
                widths = {name: table.dim for name, table in self._tables.items()}
                self._writer.open(ShareLog(self._run, self._share, place, 1, widths), self._take_snapshot)
                self._opened, self._said = True, False
            if not self._said:
                self._writer.say(self._state)
                self._said = True
            if self._unsent is not None and not self._state.held:
                self._append(self._unsent)
        except UnavailableError as cause:
            self._fail(f"the delta channel is unavailable: {cause}")
            return False
        if self._failing:
            self._failing = ""
            _log.info("publishing share %d of %d works again", *self._share)
        return self._unsent is None or self._state.held

    def _send(self, delta: Delta) -> bool:
        self._unsent = delta
        return self._reaches_channel()

    def _append(self, delta: Delta) -> None:
        self._writer.append(delta)
        self._unsent = None
        self._place = delta.place
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
                "publishing share %d of %d: %s; training continues, changed rows are kept and retried",
                *self._share,
                what,
                exc_info=trace,
            )
        self._failing = what

    def _count(self, **more: float) -> None:
        with self._counting:
            counted = {name: getattr(self._stats, name) + value for name, value in more.items()}
            self._stats = replace(self._stats, **counted)

    # Deltas

    def _have_missed(self) -> bool:
        """Begin a new epoch where a set of changed ids overflowed. Return whether nothing can be sent now."""
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
            "whoever follows takes a snapshot. Publish more often, or change fewer rows at once."
        )
        _log.warning("publishing share %d of %d: %s", *self._share, why)
        self.begin_epoch(why)
        return not self._opened

    def _reason_to_hold(self, delta: Delta) -> str | None:
        try:
            return None if self._guard is None else self._guard.check(delta)
        except BaseException:
            self._take_back(delta)
            raise

    def _make(self) -> Delta | None:
        """Return what has changed as the next delta; None where there is nothing to say.

        Where that fails, what was taken out of the sets of changed ids is not forgotten.
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
        self._cut = False
        self._making = place = replace(self._place, sequence=self._place.sequence + 1)
        learned = self._learned()
        rows: dict[str, Rows] = {}
        removed: dict[str, Tensor] = {}
        left = DELTA_IDS
        for name, table in self._tables.items():
            ids = self._changed(name)
            if len(ids) > left:
                self._pending[name], ids = ids[left:], ids[:left]
                self._cut = True
            left -= len(ids)
            if len(ids):
                taken[name] = ids
                there, gone = self._look_up(table, ids)
                if len(there):
                    rows[name] = there
                if len(gone):
                    removed[name] = gone
        # What a standby gets beside the rows says which pushes they have: all, in the last of several deltas.
        dense = None if self._cut and self._with_state else self._due_dense(now)
        if not rows and not removed and dense is None and now - self._sent_at < self._dense_interval:
            return None
        # After the rows were read: the update of one step more may have been under way.
        learned = replace(learned, newest_step=self._learned().step + 1)
        digests = {name: found for name in self._tables if (found := self._next_digests(name)) is not None}
        return Delta(
            self._run, self._share, place, learned, rows, removed, dense, digests, complete=not self._cut
        )

    def _changed(self, name: str) -> Tensor:
        stolen = self._touched[name].steal()
        waiting = self._pending.pop(name, None)
        return stolen if waiting is None else _union([waiting, stolen])

    def _look_up(self, table: Table, ids: Tensor) -> tuple[Rows, Tensor]:
        """Return the rows of ids that have one, and the other ids."""
        found, rows = table.lookup_rows(ids)
        return self._as_sent(rows).keep(found), ids[~found]

    def _as_sent(self, rows: Rows) -> Rows:
        return rows if self._with_state else replace(rows, state=rows.state[:, :0])

    def _take_back(self, delta: Delta) -> None:
        """Count the ids of a delta that was not let out as changed again."""
        self._put_back({name: rows.ids for name, rows in delta.rows.items()})
        self._put_back(delta.removed)
        if delta.dense is not None:
            self._dense_at = float("-inf")

    def _put_back(self, ids: Mapping[str, Tensor]) -> None:
        for name, some in ids.items():
            waiting = self._pending.get(name)
            self._pending[name] = some if waiting is None else _union([waiting, some])

    def _due_dense(self, now: float) -> Mapping[str, Tensor] | None:
        if self._ask_dense is None or now - self._dense_at < self._dense_interval:
            return None
        weights = self._ask_dense()
        if weights is not None:
            self._dense, self._dense_at = weights, now
        return weights

    def _learned(self) -> LearnedUpTo:
        learned = LearnedUpTo() if self._ask_learned is None else self._ask_learned()
        return replace(learned, published_at=self._clock())

    def _next_digests(self, name: str) -> Digests | None:
        """Return digests of the next few buckets of a table, without those of which a row changed by now."""
        table = self._tables[name]
        # What a server holds of other rows is not what is held here, but as near as its coding comes.
        exact = self._with_state or all(isinstance(s.compressor, Fp32) for s in table.config.segments)
        if not exact or self._digest_buckets == 0:
            return None
        count = max(1, min(self._digest_buckets, DIGEST_ROWS * BUCKETS // max(1, len(table))))
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
        """Read the rows of this share. From any thread, beside training and publishing."""
        self._refuse_if_held()
        if not self._opened:
            raise UnavailableError("a new epoch is about to begin; ask again")
        self._count(snapshots=1)
        place, name, number = self._place, uuid.uuid4().hex, 0
        dense = None
        if buckets is None:
            dense = self._dense if self._ask_dense is None else self._ask_dense()
        yield SnapshotBegin(self._run, self._share, place, self._learned(), buckets, dense, name)
        for table_name, table in self._tables.items():
            for rows in self._chunks(table, buckets):
                self._refuse_if_held()
                yield SnapshotRows(table_name, self._as_sent(rows), name, number)
                number += 1
        making = self._making
        whole_at = making if making.epoch == place.epoch else place
        yield SnapshotEnd(place, whole_at, name, number)

    def _chunks(self, table: Table, buckets: Tensor | None) -> Iterator[Rows]:
        width = 16 + 4 * (table.dim + (table.state_dim if self._with_state else 0))
        limit = min(1 << 16, max(1, CHUNK_BYTES // width))
        if buckets is None:
            return iterate(table, limit=limit)
        return iterate_buckets(table, buckets, limit=limit)

    def _refuse_if_held(self) -> None:
        state = self._state
        if state.held:
            raise UnavailableError(f"publishing is held: {state.reason}. Resume it for a snapshot.")


def _union(several: list[Tensor]) -> Tensor:
    """Return ids, each once."""
    return torch.from_numpy(np.unique(torch.cat(several).numpy()))
