"""Subscriber: brings a target up to date with what publishers say, and keeps it so.

It follows every share of a model from where it is. Messages may be lost, come twice, late or in another
order: their numbers say what fits. What does not fit is not applied, and the share is read again from the
place that was reached; a log that no longer has it, or has begun another epoch, answers with a snapshot.

    place of a share                 what comes                        then
    ────────────────                 ──────────                        ────
    (epoch, n)                       delta n + 1 of the epoch          applied: (epoch, n + 1)
    (epoch, n)                       delta up to n of the epoch        passed over
    (epoch, n)                       any other delta                   read again after (epoch, n)
    any                              a whole snapshot at (e, m)        (e, m)
    (epoch, n)                       buckets at (epoch, m)             (epoch, the lower of both)
    (epoch, n)                       part of a snapshot at (epoch, m)  (epoch, the lower of both)
    (epoch, n)                       part of one of another epoch      nowhere: a snapshot is next
    any                              a version to go back to           nowhere, until it is resumed
    any                              the target let its rows go        nowhere: a snapshot is next

Where digests differ, the buckets are read anew. A share is known by its number and by how many there are:
when that changes all places are forgotten, and every share begins with a snapshot.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch

from monolith.checkpoint.shares import IdShare
from monolith.errors import ConfigError, MonolithError
from monolith.sync.channel import DeltaReader, OpenReader, ShareLog
from monolith.sync.messages import (
    Delta,
    LearnedUpTo,
    LogPlace,
    Message,
    PublishState,
    SnapshotBegin,
    SnapshotEnd,
    SnapshotRows,
)
from monolith.sync.target import DeltaTarget

_log = logging.getLogger(__name__)

RefuseRun = Callable[[str, int, LogPlace], str]
"""Takes the identity of a run, a share of it and a place in its log; returns why not to follow it, or ""."""


@dataclass(frozen=True, slots=True)
class Followed:
    """How far a subscriber is with one share."""

    share: IdShare
    place: LogPlace | None = None
    """What was applied last; None: nothing that counts."""
    learned: LearnedUpTo = field(default_factory=LearnedUpTo)
    """What the target has learned from."""
    received_at: float = 0.0
    """Unix seconds at which the message applied last came."""
    applied_at: float = 0.0
    state: PublishState = field(default_factory=PublishState)
    run: str = ""
    """The run that publishes it, as it says itself."""
    generation: int = -1
    """Of the target when that was applied: what another one holds has not learned from it."""
    newest_step: int | None = None
    """No row of the share has an update of a later step; None if nobody knows, as after a snapshot of rows
    that were being trained."""
    error: str = ""
    """Why it cannot follow now, for a person; empty while it can."""
    deltas: int = 0
    """Applied, ever."""
    snapshots: int = 0
    """Taken to their end, ever."""
    clock_offset: float | None = None
    """Seconds that the publisher's clock is ahead of ours; None if the channel cannot measure it."""
    repaired: int = 0
    """Buckets that were read anew because they differed, ever."""


class Subscriber:
    """Follows all shares of a model. Thread-safe.

    Args:
        open_reader: Opens an end of the channel; each thread has its own.
        target: What is brought up to date.
        places: Of each share by its number: what the target holds already, from an export or a checkpoint.
        wait: Seconds to wait for something new before looking whether shares have changed.
        clock: Returns Unix seconds.
        on_applying: Called before rows change, on the thread that changes them: with the share, and what the
            delta has learned from, or None before rows of a snapshot.
        on_applied: Called after a delta, or all deltas that were made at once, and after a snapshot, on the
            thread that applied it.
        refuse: Returns why a run is not to be followed, for a person; empty if it is. By default all are.
    """

    def __init__(
        self,
        open_reader: OpenReader,
        target: DeltaTarget,
        *,
        places: Mapping[int, LogPlace] | None = None,
        wait: float = 1.0,
        clock: Callable[[], float] = time.time,
        on_applying: Callable[[IdShare, LearnedUpTo | None], None] = lambda _share, _learned: None,
        on_applied: Callable[[Followed], None] = lambda _: None,
        refuse: RefuseRun | None = None,
    ) -> None:
        self._open_reader = open_reader
        self._refuse: RefuseRun = (lambda *_: "") if refuse is None else refuse
        self._target = _SharedTarget(target, clock, on_applying, on_applied)
        self._places = dict(places or {})
        self._wait = wait
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._reader: DeltaReader | None = None
        # Replaced as a whole, by one thread.
        self._followers: dict[int, _Follower] = {}
        self._lines = _Lines()
        self.error = ""
        """Why it is not known what is published, for a person; empty while it is."""
        self.refused = ""
        """Why a publisher that was found is not followed, for a person; empty if all are."""
        self.missing: tuple[int, ...] = ()
        """Shares that must be somewhere, since others say how many there are, and were never found."""

    @property
    def standing(self) -> Mapping[int, Followed]:
        """How far each share is, by its number."""
        return {
            number: replace(one.followed, clock_offset=one.clock_offset)
            for number, one in sorted(self._followers.items())
        }

    def start(self) -> None:
        """Follow from now on, in threads of its own: one, and one for each share."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep_following, name="subscriber", daemon=True)
            self._thread.start()

    def catch_up(self, *, wait: float = 0.0) -> None:
        """Read each share once, in this thread, up to where nothing new has come for `wait` seconds.

        For those who did not call `start`. What went wrong is in `standing` and `error`.
        """
        self._look_for_shares()
        for follower in self._followers.values():
            follower.open()
            follower.read(wait)

    def wait_for(self, places: Mapping[int, LogPlace], timeout: float) -> bool:
        """Wait until the shares are at these places or further, at most so many seconds; return whether."""

        def reached() -> bool:
            standing = self.standing
            return all(
                number in standing and _has_reached(standing[number].place, place)
                for number, place in places.items()
            )

        return self._target.wait_for(reached, timeout)

    def close(self) -> None:
        """Stop. What was applied stays. Closing again does nothing."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._leave()
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    # Shares

    def _keep_following(self) -> None:
        delay = 0.0
        while not self._stop.wait(delay):
            try:
                self._look_for_shares()
            except Exception as cause:  # whatever it is, what is followed is followed on
                if self._lines.is_due(repr(cause)):
                    _log.exception("cannot find out what is published; trying again")
                self.error = str(cause)
            for follower in self._followers.values():
                follower.start(self._wait)
            stale = any(follower.stale for follower in self._followers.values())
            soon = min(self._wait, max(2 * delay, 0.05)) if self.error else min(self._wait, 0.05)
            delay = soon if stale or not self._followers else self._wait

    def _look_for_shares(self) -> None:
        """Follow what is published now."""
        try:
            if self._reader is None:
                self._reader = self._open_reader()
            logs = self._reader.shares()
        except MonolithError as cause:
            if self._lines.is_due(str(cause)):
                _log.warning("cannot find out what is published: %s; trying again", cause)
            self.error = str(cause)
            return
        refused = [self._refuse(log.run, log.share[0], log.newest) for log in logs]
        found = [log for log, why in zip(logs, refused, strict=True) if not why]
        self.error = self.refused = next(filter(None, refused), "")
        if self.refused and self._lines.is_due(self.refused):
            _log.warning("not followed: %s", self.refused)
        current = next((one.share[1] for one in self._followers.values()), None)
        total = _number_of_shares(found, current)
        if total is None:
            return
        if current not in (None, total):
            _log.warning("there are %d shares now and were %d: taking all of them anew", total, current)
            self._leave()
            self._places = {}
        for log in found:
            number, of = log.share
            if of == total and number not in self._followers:
                place = self._places.pop(number, None)
                follower = _Follower(
                    log, place, self._open_reader, self._target, self._stop, refuse=self._refuse
                )
                self._followers = {**self._followers, number: follower}
            if of == total:
                self._followers[number].clock_offset = log.clock_offset
        self._look_for_missing(total)

    def _look_for_missing(self, total: int) -> None:
        missing = tuple(number for number in range(total) if number not in self._followers)
        if missing:
            which = ", ".join(map(str, missing))
            self.error = (
                f"of {total} shares nobody who was asked publishes {which}, whose rows stay as they are; "
                "name all publishers"
            )
            if missing != self.missing:
                _log.warning("%s; looking again", self.error)
        elif self.missing:
            _log.info("all %d shares are published now", total)
        self.missing = missing

    def _leave(self) -> None:
        for follower in self._followers.values():
            follower.close()
        self._followers = {}
        self._target.forget_states()


def _has_reached(place: LogPlace | None, wanted: LogPlace) -> bool:
    return place is not None and place.epoch == wanted.epoch and place.sequence >= wanted.sequence


def _number_of_shares(found: Sequence[ShareLog], current: int | None) -> int | None:
    """Return how many shares there are; None where that cannot be told yet.

    While a run changes how many it has, some of both may be there: those that are all there count, and before
    that those that were followed.
    """
    present: dict[int, set[int]] = {}
    for log in found:
        present.setdefault(log.share[1], set()).add(log.share[0])
    whole = [total for total, numbers in present.items() if len(numbers) == total]
    if current in whole or (not whole and current in present):
        return current
    if whole:
        return max(whole)
    return None if current is not None or not present else max(present, key=lambda n: len(present[n]))


class _Lines:
    """Decides which lines about a publisher are logged: one per change, and at most one a second.

    A publisher that answers nothing, or something else each time, would fill the log of a server.
    """

    def __init__(self, every: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._every = every
        self._clock = clock
        self._last: str | None = None
        self._due_at = 0.0

    def is_due(self, text: str) -> bool:
        """Whether to log a line; empty for a publisher that is well."""
        if text == self._last or self._clock() < self._due_at:
            return False
        self._last, self._due_at = text, self._clock() + self._every
        return True


class _SharedTarget:
    """The target of several shares: one call at a time, and one snapshot at a time."""

    def __init__(
        self,
        target: DeltaTarget,
        clock: Callable[[], float],
        on_applying: Callable[[IdShare, LearnedUpTo | None], None],
        on_applied: Callable[[Followed], None],
    ) -> None:
        self.target = target
        self.clock = clock
        self.on_applying = on_applying
        self.on_applied = on_applied
        self.turn = threading.Lock()
        """Held from the begin of a snapshot to its end."""
        self.generation = target.generation
        """Of the target when it was handed over: places that were handed over with it are of that one."""
        self._changed = threading.Condition()
        # The states of the shares, by their numbers, and what was made of them: guarded by the condition.
        self._states: dict[int, PublishState] = {}
        self._told: PublishState | None = None

    def __enter__(self) -> DeltaTarget:
        self._changed.acquire()
        return self.target

    def __exit__(self, *_: object) -> None:
        self._changed.notify_all()
        self._changed.release()

    def wait_for(self, reached: Callable[[], bool], timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(reached, timeout)

    def follow(self, share: int, state: PublishState) -> None:
        """Take note of the state of a share, and tell the target what all of them come to.

        While one share is to go back to a version all do, and while one is held all are: those who publish
        are told one after the other, and their clocks say nothing of each other.
        """
        with self as target:
            self._states[share] = state
            told = max(self._states.values(), key=lambda one: (one.version is not None, one.held, one.since))
            if told != self._told:
                self._told = told
                target.follow(told)

    def forget_states(self) -> None:
        """Forget what shares said that are followed no more."""
        with self:
            self._states.clear()


@dataclass(slots=True)
class _Snapshot:
    """A snapshot of which some came."""

    begin: SnapshotBegin
    received_at: float
    numbers: set[int] = field(default_factory=set)
    end: SnapshotEnd | None = None

    @property
    def whole(self) -> bool:
        if self.end is None:
            return False
        return self.end.chunks is None or len(self.numbers) == self.end.chunks


class _Follower:
    """Follows one share."""

    def __init__(
        self,
        log: ShareLog,
        place: LogPlace | None,
        open_reader: OpenReader,
        target: _SharedTarget,
        stop: threading.Event,
        *,
        refuse: RefuseRun,
    ) -> None:
        self.share = share = log.share
        self.followed = Followed(share, place, run=log.run)
        self.clock_offset = log.clock_offset
        """As it was measured last; set by the thread that looks for shares."""
        self.stale = False
        """Whether the share is not, or not any more, one of as many as it was."""
        self._open_reader = open_reader
        self._target = target
        self._stop = stop
        self._refuse = refuse
        self._lines = _Lines()
        self._left = threading.Event()
        self._thread: threading.Thread | None = None
        self._reader: DeltaReader | None = None
        self._snapshot: _Snapshot | None = None
        self._generation = target.generation  # of the target, when the place was reached
        self._compare_after = 0  # digests of deltas up to it are not compared
        self._differing: set[int] = set()

    def start(self, wait: float) -> None:
        if self._thread is None:
            name = f"subscriber-{self.share[0]}"
            self._thread = threading.Thread(target=self._keep_reading, args=(wait,), name=name, daemon=True)
            self._thread.start()

    def _keep_reading(self, wait: float) -> None:
        while not self._stopped():
            try:
                again = self.open() and self.read(wait)
            except Exception as cause:  # whatever it is, the share is read again
                if self._lines.is_due(repr(cause)):
                    _log.exception("share %d of %d cannot be followed; trying again", *self.share)
                self.followed = replace(self.followed, error=str(cause) or type(cause).__name__)
                again = False
            if not again:
                self._left.wait(min(wait, 0.5))

    def _stopped(self) -> bool:
        return self._stop.is_set() or self._left.is_set()

    def open(self) -> bool:
        """Open a reader where there is none; return whether there is one."""
        if self._reader is None:
            try:
                self._reader = self._open_reader()
            except MonolithError as cause:
                self._fail(cause)
                return False
        return True

    def close(self) -> None:
        self._left.set()
        if self._thread is not None:
            self._thread.join()
        self._drop_snapshot()
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def read(self, wait: float) -> bool:
        """Read on from where the share is; return whether to go on at once."""
        if self._reader is None:
            return False
        number = self.share[0]
        try:
            self._take_all(self._reader.read(number, self.followed.place, wait=wait))
            if self._differing and self.followed.place is not None:
                self._repair(self._reader)
        except MonolithError as cause:
            self._fail(cause)
            return False
        finally:
            self._drop_snapshot()
        if self.followed.error:
            self.followed = replace(self.followed, error="")
            if self._lines.is_due(""):
                _log.info("following share %d of %d again", *self.share)
        return self.followed.state.version is None and not self.stale

    def _fail(self, cause: MonolithError) -> None:
        if self._lines.is_due(str(cause)):
            _log.warning("cannot follow share %d of %d: %s; trying again", *self.share, cause)
        self.followed = replace(self.followed, error=str(cause))

    def _take_all(self, messages: Iterator[Message]) -> None:
        try:
            for message in messages:
                if self._stopped() or not self._take(message):
                    return
        finally:
            if (close := getattr(messages, "close", None)) is not None:
                with suppress(MonolithError):
                    close()

    def _take(self, message: Message) -> bool:
        """Do what a message says, where it fits; return whether to read on from here."""
        if isinstance(message, PublishState):
            return self._take_state(message)
        if isinstance(message, SnapshotRows):
            return self._take_rows(message)
        if isinstance(message, SnapshotEnd):
            return self._take_end(message)
        if message.share != self.share:
            self.stale = True
            return False
        self.stale = False
        if message.run != self.followed.run:
            if why := self._refuse(message.run, self.share[0], message.place):
                raise ConfigError(why)
            self.followed = replace(self.followed, run=message.run)
        return self._begin(message) if isinstance(message, SnapshotBegin) else self._take_delta(message)

    def _take_state(self, state: PublishState) -> bool:
        known = self.followed.state
        if state.publisher == known.publisher and state.number < known.number:
            return True
        if state != known:
            self.followed = replace(self.followed, state=state)
            self._target.follow(self.share[0], state)
        if state.version is None:
            return True
        self.followed = replace(self.followed, place=None)  # what deltas brought is dropped
        return False

    # Deltas

    def _take_delta(self, delta: Delta) -> bool:
        if self._snapshot is not None:
            return True  # the rest of it may still come; if not, this delta is read again
        place, following = self.followed.place, delta.place
        if place is None or following.epoch != place.epoch or following.sequence > place.sequence + 1:
            return False
        if following.sequence <= place.sequence:
            return True
        received = self._target.clock()
        with self._target as target:
            if self._is_let_go(target):
                return False
            self._target.on_applying(self.share, delta.learned)
            target.apply(delta.rows, delta.removed)
            if delta.dense is not None:
                target.swap_dense(delta.dense)
            # Rows of a snapshot were read while they were trained, up to the delta that was made next.
            covered = following.sequence >= self._compare_after
            self.followed = replace(
                self.followed,
                place=following,
                learned=delta.learned if delta.complete else self.followed.learned,
                received_at=received,
                applied_at=self._target.clock(),
                generation=self._generation,
                newest_step=(delta.learned.newest_step or None) if covered else None,
                deltas=self.followed.deltas + 1,
            )
            if delta.complete:
                self._target.on_applied(replace(self.followed, clock_offset=self.clock_offset))
            if following.sequence > self._compare_after:
                self._compare(target, delta)
        return not self._differing

    def _is_let_go(self, target: DeltaTarget) -> bool:
        """Whether the target holds nothing any more of what the place says; then there is no place either."""
        if target.generation == self._generation:
            return False
        self._generation = target.generation
        self.followed = replace(self.followed, place=None)
        return True

    def _compare(self, target: DeltaTarget, delta: Delta) -> None:
        for table, digests in delta.digests.items():
            if table in target.tables and len(digests.buckets):
                held = target.digests(table, self.share, digests.buckets)
                if held is not None:
                    self._differing.update(digests.buckets[held != digests.sums].tolist())

    def _repair(self, reader: DeltaReader) -> None:
        """Read the buckets that differ anew."""
        buckets = torch.tensor(sorted(self._differing), dtype=torch.int64)
        repaired = self.followed.snapshots
        _log.warning(
            "share %d of %d differs from what is published in %d buckets of ids: reading them anew",
            *self.share,
            len(buckets),
        )
        self._differing.clear()
        self._take_all(reader.read_buckets(self.share[0], buckets))
        if self.followed.snapshots > repaired:
            self.followed = replace(self.followed, repaired=self.followed.repaired + len(buckets))

    # Snapshots

    def _begin(self, begin: SnapshotBegin) -> bool:
        if self._snapshot is not None and begin.snapshot and begin.snapshot == self._snapshot.begin.snapshot:
            return True
        self._drop_snapshot()
        self._target.turn.acquire()
        self._snapshot = _Snapshot(begin, self._target.clock())
        with self._target as target:
            if self._is_let_go(target) and begin.buckets is not None:
                return False
            target.begin_snapshot(self.share, begin.buckets)
        return True

    def _take_rows(self, message: SnapshotRows) -> bool:
        snapshot = self._snapshot
        if snapshot is None or message.snapshot != snapshot.begin.snapshot:
            return True
        if message.snapshot and message.number in snapshot.numbers:
            return True
        with self._target as target:
            if not snapshot.numbers:
                self._target.on_applying(self.share, None)
            snapshot.numbers.add(message.number)
            target.snapshot_rows(message.table, message.rows)
        return self._finish(snapshot) if snapshot.whole else True

    def _take_end(self, end: SnapshotEnd) -> bool:
        snapshot = self._snapshot
        if snapshot is None or end.snapshot != snapshot.begin.snapshot:
            return True
        snapshot.end = end
        return self._finish(snapshot) if snapshot.whole else True

    def _finish(self, snapshot: _Snapshot) -> bool:
        begin, end = snapshot.begin, snapshot.end
        assert end is not None
        place = begin.place if begin.buckets is None else _lower(self.followed.place, begin.place)
        with self._target as target:
            if self._is_let_go(target):
                return False
            if not snapshot.numbers:
                self._target.on_applying(self.share, None)
            target.end_snapshot()
            if begin.dense is not None:
                target.swap_dense(begin.dense)
            self._snapshot = None
            learned = begin.learned
            if begin.buckets is not None and learned.step >= self.followed.learned.step:
                learned = self.followed.learned  # other buckets are as they were
            self.followed = replace(
                self.followed,
                place=place,
                learned=learned,
                received_at=snapshot.received_at,
                applied_at=self._target.clock(),
                generation=self._generation,
                newest_step=None,
                snapshots=self.followed.snapshots + 1,
            )
            self._compare_after = end.whole_at.sequence
            self._target.on_applied(replace(self.followed, clock_offset=self.clock_offset))
        self._target.turn.release()
        self._differing.clear()
        return True

    def _drop_snapshot(self) -> None:
        """Forget a snapshot that broke off. Where rows of it are older than the place, which they are where
        it came late, the place goes back: what is read again from there is newer than they are."""
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is None:
            return
        with self._target as target:
            target.drop_snapshot()
            if snapshot.numbers:
                place, begun = self.followed.place, snapshot.begin.place
                same = place is not None and place.epoch == begun.epoch
                self.followed = replace(self.followed, place=_lower(place, begun) if same else None)
        self._target.turn.release()


def _lower(place: LogPlace | None, other: LogPlace) -> LogPlace | None:
    """Return the earlier of two places of an epoch; of two epochs the first, since the other is not whole."""
    if place is None or place.epoch != other.epoch:
        return place
    return min(place, other, key=lambda one: one.sequence)
