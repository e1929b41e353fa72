"""ModelFollower: keeps one served model up to date with its trainer, and knows how new it is.

Each loaded version is attached: its tables go below the overlay of deltas, and its predictor takes the
followed dense weights. Three cases when a newer version is attached:

    the overlay is newer than the export   it stays on top; after `compact_after`, overlay rows that
                                           the export already contains are dropped
    the export is newer than the overlay   the overlay is dropped, and following restarts at the export
    the export is older than the last one  the overlay is not complete over it, and is dropped as well

Threads: the subscriber applies messages, the repository attaches versions, and a watch thread checks ages
once a second. The subscriber is only replaced by the watch, because it may itself be waiting for a version to
load.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from monolith import concurrency
from monolith.checkpoint.saved_tables import WHOLE, IdShard
from monolith.observe.metrics import Metrics
from monolith.serve.config import ServeFollowConfig
from monolith.serve.manifest import Servable
from monolith.serve.metrics import FollowMetrics
from monolith.serve.overlay import FollowedTables, FollowTarget, GoTo
from monolith.serve.predictor import Predictor, claim_of
from monolith.serve.rows import CLOCKS_AGREE_WITHIN, ClaimCell, ServedUpTo
from monolith.sync.channel import OpenReader
from monolith.sync.messages import LearnedUpTo, LogPosition, is_same_run
from monolith.sync.subscriber import ShardProgress, Subscriber
from monolith.table import FrozenTables, OverlaidTables

_log = logging.getLogger(__name__)

LOOK_EVERY = 1.0
"""Seconds between two checks of the age of the served rows."""


class ModelFollower:
    """Follows a trainer for one model. Thread-safe; nothing is read before a version is attached.

    Args:
        model: Its name.
        open_reader: Opens a reader of the channel that the trainer publishes to.
        config: The trainer to follow, and when to warn.
        metrics: Counts rows and ages.
        share: The shard of IDs that this server has.
        go_to: Serves the version that the trainer names; see `FollowTarget`.
        clock: Unix seconds, which the stamps of publishers are compared with.
        timer: Seconds that only grow.
    """

    def __init__(
        self,
        model: str,
        open_reader: OpenReader,
        config: ServeFollowConfig,
        *,
        metrics: Metrics,
        go_to: GoTo,
        share: IdShard = WHOLE,
        clock: Callable[[], float] = concurrency.time,
        timer: Callable[[], float] = concurrency.monotonic,
    ) -> None:
        self._model = model
        self._open_reader = open_reader
        self._config = config
        self._clock, self._timer = clock, timer
        self._metrics = FollowMetrics(metrics, model)
        self.target = FollowTarget(model, FollowedTables(share), self._metrics, go_to)
        self._lock = concurrency.Lock()  # guards all below
        self._subscriber: Subscriber | None = None
        self._base: Servable | None = None
        self._listens_since = 0.0
        self._settle_at: float | None = None
        self._came_at = float("-inf")
        """When a delta was last applied."""
        self.notice = ""
        """A warning for the operator about the followed trainer; empty if all is well."""
        self._warned = False
        self._clock_differs_by = 0.0
        """The last clock difference that was logged."""
        self._again = False
        self._claims: ClaimCell | None = None
        """Claims of the newest generation of the overlay. Versions that were loaded before may still answer
        with an earlier generation; its rows no longer change, and it keeps its own cell."""
        self._claims_of = -1
        """The generation that `_claims` belongs to."""
        self._stop = concurrency.Event()
        self._watcher: concurrency.Thread | None = None

    # Versions

    @property
    def is_rolled_back(self) -> bool:
        """Whether the trainer rolled servers back to an exported version."""
        return self.target.rolled_back_to is not None

    def attach(self, predictor: Predictor) -> None:
        """Keep a predictor up to date from now on; the first one starts following."""
        if self.is_rolled_back:
            return
        servable = predictor.servable
        predictor.rows.follow(lambda tables, threads: self.attach_tables(servable, tables, threads=threads))
        self._rest_on(servable)
        newer_dense = not self._again and self._is_ahead_of(servable)
        self.target.add(predictor, newer_dense=newer_dense)
        predictor.follow(lambda: self.notice)
        self.begin()

    def attach_tables(
        self, servable: Servable, tables: FrozenTables, *, threads: int | None = None
    ) -> tuple[OverlaidTables, ClaimCell]:
        """Put the tables of a version below the overlay; return both as one, and their claims."""
        newer, older = self._is_behind(servable), self._is_older_than_base(servable)
        if newer or older:
            _log.info(
                "model %r: version %s is %s; dropping the overlay rows, and following from its export on",
                *(self._model, servable.version),
                "newer than the rows that were followed" if newer else "older than the version before it",
            )
            self.target.rows.drop()
            # Messages that the subscriber still applies are older than the export, so they are ignored until
            # the watch has replaced it. It cannot be replaced here: it may be waiting for this very load.
            self.target.rows.pause_applying(True)
            self._again = True
        with self.target.rows.write_lock:  # no delta may be applied between the tables and their claims
            overlaid = self.target.rows.attach(tables, threads=threads)
            claims = self._claims_over(servable)
        self._rest_on(servable)
        return overlaid, claims

    def _claims_over(self, servable: Servable) -> ClaimCell:
        """Return the claims of the attached tables; called under the overlay's write lock."""
        generation, base = self.target.generation, claim_of(servable)
        if self._claims is not None and self._claims_of == generation:
            self._claims.rebase(base)
            return self._claims
        # A running subscriber may be in the middle of a delta that it announced to the old claims, so
        # nothing is promised of the new ones until a new epoch arrives.
        reading = self._subscriber is not None and not self._again
        why = "overlay rows were dropped, and those of a new epoch have not arrived yet" if reading else ""
        self._claims, self._claims_of = ClaimCell(base, why), generation
        return self._claims

    def _is_older_than_base(self, servable: Servable) -> bool:
        """Whether a version is older than the one below the overlay, which was withheld since.

        Rows that were equal in the overlay and in the version before have been dropped from the overlay, so
        it is not complete over an older version.
        """
        base = self._base
        return base is not None and bool(self.target.rows.tables) and servable.step < base.step

    def _rest_on(self, servable: Servable) -> None:
        with self._lock:
            if self._base is not None and self._base.version != servable.version:
                self._settle_at = self._timer() + self._config.compact_after.total_seconds()
            self._base = servable

    def begin(self) -> None:
        """Start following at the log position of the attached export, if not started yet."""
        with self._lock:
            if self._subscriber is not None or self._base is None or self._stop.is_set():
                return
            positions = {
                int(shard): LogPosition(epoch, sequence)
                for shard, (epoch, sequence) in self._base.log_places.items()
            }
            self._subscriber = Subscriber(
                self._open_reader,
                self.target,
                positions=positions,
                clock=self._clock,
                on_applying=self._applying,
                on_applied=self._applied,
                refuse=None if self._config.any_run else self._refuse,
            )
            self._subscriber.start()
            self._listens_since = self._timer()
            if self._watcher is None:
                self._watcher = concurrency.Thread(
                    target=self._watch, name=f"follow-{self._model}", daemon=True
                )
                self._watcher.start()

    def _leave(self) -> None:
        with self._lock:
            subscriber, self._subscriber = self._subscriber, None
        if subscriber is not None:
            subscriber.close()

    def _is_ahead_of(self, servable: Servable) -> bool:
        standing = self.standing
        return bool(standing) and all(one.learned.step >= servable.step for one in standing.values())

    def _is_behind(self, servable: Servable) -> bool:
        """Whether an export is newer than the followed rows: by log position within one epoch, else by
        step."""
        standing = {number: one for number, one in self.standing.items() if one.position is not None}
        if not standing:
            return False
        for number, one in standing.items():
            place = servable.log_places.get(str(number))
            if place is not None and one.position is not None and one.position.epoch == place[0]:
                if one.position.sequence < place[1]:
                    return True
            elif one.learned.step < servable.step:
                return True
        return False

    # How new it is

    @property
    def standing(self) -> dict[int, ShardProgress]:
        """How far each shard of the trainer is followed."""
        subscriber = self._subscriber
        return {} if subscriber is None else dict(subscriber.progress)

    def up_to(self) -> ServedUpTo | None:
        """Return how far the oldest shard is followed; None while the rows of some shard are as exported."""
        generation, standing = self.target.generation, self.standing
        known = [one for one in standing.values() if one.applied_at > 0 and one.generation == generation]
        missing = self._subscriber is not None and self._subscriber.missing
        if not known or missing or len(known) < len(standing):
            return None
        oldest = min(known, key=lambda one: one.learned.published_at)
        return ServedUpTo(oldest.learned, oldest.received_at, oldest.applied_at, oldest.clock_offset)

    def staleness(self) -> float:
        """Return the age of the served rows, in seconds."""
        up_to = self.up_to()
        base = self._base
        if up_to is not None and not self.is_rolled_back:
            return up_to.age(self._clock())
        since = self._clock() if base is None else base.created
        return max(0.0, self._clock() - since)

    def _compare_clocks(self) -> float:
        """Log once when the publisher's clock and ours begin to differ; return the difference in seconds."""
        up_to = self.up_to()
        differs = 0.0 if up_to is None else up_to.clock_differs_by
        if abs(differs - self._clock_differs_by) > CLOCKS_AGREE_WITHIN:
            self._clock_differs_by = differs
            if differs:
                _log.warning(
                    "model %r: the publisher's clock differs from this server's: it is about %.0f s %s. "
                    "Answers say so in `clock_differs_by`; check NTP on both machines.",
                    *(self._model, abs(differs), "ahead" if differs > 0 else "behind"),
                )
        return differs

    def look(self) -> None:
        """Set gauges, warn about stale rows, and do delayed work. The watch thread calls it."""
        staleness = self.staleness()
        rows = self.target.rows
        self._metrics.set_gauges(staleness, rows.rows, rows.bytes, self._compare_clocks())
        self._compare_runs()
        if self.target.state.version != self.target.rolled_back_to:
            self.target.apply_state()
        if self._again:
            self._again = False
            self._leave()
            self.target.rows.pause_applying(False)
            self.begin()
        self._warn(staleness)
        with self._lock:
            due = self._settle_at is not None and self._timer() >= self._settle_at
            if due:
                self._settle_at = None
        if due:
            _log.info(
                "model %r: dropped %d overlay rows that the new export already contains",
                *(self._model, rows.settle()),
            )

    def _refuse(self, run: str, share: int, place: LogPosition) -> str:
        """Return why a publisher is refused; empty accepts it. Rows of another run would ruin the model."""
        base = self._base
        if base is None or not run or _is_of(base, run, share, place):
            return ""
        return (
            f"version {base.version} of model {self._model!r} was exported from the run {base.run!r}, and "
            f"the publisher belongs to the run {run!r}. Follow the run of the export, serve an export of the "
            "publisher's run, or allow it with --follow-any-run."
        )

    def _compare_runs(self) -> None:
        """Warn if the followed trainer is of another run than the export: it may be another model."""
        base, standing = self._base, self.standing
        others = sorted(
            {
                one.run
                for number, one in standing.items()
                if base is not None and one.run and not _is_of(base, one.run, number, one.position)
            }
        )
        subscriber = self._subscriber
        notice = "" if subscriber is None else subscriber.refused
        if base is not None and others:
            notice = (
                f"version {base.version} was exported from the run {base.run!r}, and the trainer that is "
                f"followed belongs to the run {others[0]!r}: its rows replace those of the export. If "
                "that is not intended, follow the run of the export, or serve an export of the trainer's run."
            )
        if notice and notice != self.notice and others:
            _log.warning("model %r: %s", self._model, notice)
        self.notice = notice
        self._metrics.follows(other_run=bool(notice))

    def _warn(self, staleness: float) -> None:
        bound = self._config.stale_after.total_seconds()
        if staleness <= bound:
            if self._warned:
                _log.info("model %r: the served rows are fresh again, %.1f s old", self._model, staleness)
            self._warned = False
        elif self.is_rolled_back or self.target.state.paused:
            self._listens_since = self._timer()
        elif not self._warned and self._timer() - self._listens_since >= bound:
            self._warned = True
            _log.warning(
                "model %r: the served rows are %.0f s old: %s; requests are still answered",
                *(self._model, staleness, self._why_stale()),
            )

    def _why_stale(self) -> str:
        subscriber = self._subscriber
        errors = [one.error for one in self.standing.values() if one.error]
        if subscriber is not None and subscriber.error:
            errors.insert(0, subscriber.error)
        if errors:
            return f"no newer rows arrive ({errors[0]})"
        if self.target.rows.in_snapshot:
            return "catching up, a snapshot of a shard is being received"
        if self._came_at > self._timer() - self._config.stale_after.total_seconds():
            return "catching up, the deltas that arrive are old"
        return "no newer rows arrive (nothing is published)"

    def _applying(self, share: IdShard, learned: LearnedUpTo | None) -> None:
        if self._claims is not None and not self.target.rows.is_paused:
            self._claims.applying(share, None if learned is None else max(learned.step, learned.newest_step))

    def _applied(self, followed: ShardProgress) -> None:
        assert followed.position is not None
        self._came_at = self._timer()
        up_to = ServedUpTo(followed.learned, followed.received_at, followed.applied_at, followed.clock_offset)
        current = followed.generation == self.target.generation == self._claims_of
        if self._claims is not None and current and not self.target.rows.is_paused:
            self._claims.applied(followed.shard, up_to.claim(followed.newest_step))
        self._metrics.served(followed.shard[0], followed.position.sequence, up_to)

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_EVERY):
            try:
                self.look()
            except Exception:  # whatever it is, requests are still answered
                _log.exception("model %r: checking the age of the rows failed", self._model)

    def close(self) -> None:
        """Stop following. The overlay stays. Closing again does nothing."""
        self._stop.set()
        self._leave()
        if self._watcher is not None and self._watcher is not concurrency.current_thread():
            self._watcher.join()


def _is_of(base: Servable, run: str, share: int, place: LogPosition | None) -> bool:
    """Whether a run continues the exported one, as far as can be told."""
    if not base.run or is_same_run(base.run, run):
        return True
    exported = base.log_places.get(str(share))
    return exported is not None and place is not None and exported[0] == place.epoch
