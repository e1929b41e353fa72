"""ModelFollower: keeps one served model up to date with a trainer, and knows how new it is.

A version that is loaded is attached: its tables lie under what deltas brought, its predictor takes their
dense weights. What was brought stays when a newer export is attached, unless that export is newer than all of
it; once both have been served side by side for a moment, rows that the export holds as well are let go of.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from monolith.checkpoint.shares import WHOLE, IdShare
from monolith.observe.metrics import Metrics
from monolith.serve.config import ServeFollowConfig
from monolith.serve.manifest import Servable
from monolith.serve.metrics import FollowMetrics
from monolith.serve.overlay import FollowedTables, GoTo, ServedTarget
from monolith.serve.predictor import Predictor, claim_of
from monolith.serve.rows import CLOCKS_AGREE_WITHIN, ClaimCell, MappedRows, ServedUpTo
from monolith.sync.channel import OpenReader
from monolith.sync.messages import LearnedUpTo, LogPlace
from monolith.sync.run_identity import is_same_run
from monolith.sync.subscriber import Followed, Subscriber
from monolith.table import FrozenTables, OverlaidTables

_log = logging.getLogger(__name__)

LOOK_EVERY = 1.0
"""Seconds between two looks at how old what is served has become."""


class ModelFollower:
    """Follows for one model. Thread-safe; nothing is read before a version is attached.

    Args:
        model: Its name.
        open_reader: Opens an end of the channel that the trainer publishes through.
        config: When to warn.
        metrics: Where to count.
        share: The ids that this server has.
        go_to: Serves the version that the trainer names; see `ServedTarget`.
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
        share: IdShare = WHOLE,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._open_reader = open_reader
        self._config = config
        self._clock, self._timer = clock, timer
        self._metrics = FollowMetrics(metrics, model)
        self.target = ServedTarget(model, FollowedTables(share), self._metrics, go_to)
        self._lock = threading.Lock()  # guards all below
        self._subscriber: Subscriber | None = None
        self._base: Servable | None = None
        self._listens_since = 0.0
        self._settle_at: float | None = None
        self._came_at = float("-inf")
        """When a delta was applied last."""
        self.notice = ""
        """What whoever runs this server should know of what it follows; empty where that is as it should."""
        self._warned = False
        self._clock_differs_by = 0.0
        """What was said last of the publisher's clock."""
        self._again = False
        self._claims: ClaimCell | None = None
        """How new the rows of the newest generation are. Those of an earlier one, which versions that were
        loaded before may still answer with, do not change any more, and their cell stays with them."""
        self._claims_of = -1
        """The generation of the rows that these are the claims of."""
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None

    # Versions

    @property
    def is_back(self) -> bool:
        """Whether the trainer has sent servers back to an exported version, which stays as it is."""
        return self.target.back is not None

    def attach(self, predictor: Predictor) -> None:
        """Bring a predictor up to date from now on, and begin to follow where that was not begun."""
        if self.is_back:
            return
        rows = predictor.rows
        if isinstance(rows, MappedRows):
            rows.lie_under(*self.attach_tables(predictor.servable, rows.files, threads=rows.threads))
        else:
            self._rest_on(predictor.servable)
        newer_dense = not self._again and self._is_ahead_of(predictor.servable)
        self.target.add(predictor, newer_dense=newer_dense)
        predictor.follow(lambda: self.notice)
        self.begin()

    def attach_tables(
        self, servable: Servable, tables: FrozenTables, *, threads: int | None = None
    ) -> tuple[OverlaidTables, ClaimCell]:
        """Return the tables of a version under what deltas brought, and how new their rows are."""
        newer, older = self._is_behind(servable), self._is_older_than_base(servable)
        if newer or older:
            _log.info(
                "model %r: version %s is %s; dropping the overlay rows, and following from its export on",
                *(self._model, servable.version),
                "newer than the rows that were followed" if newer else "older than the version before it",
            )
            self.target.rows.drop()
            # What the subscriber still brings is older than the export. It is replaced by the watch, since it
            # may wait for a version to be loaded, and whoever loads one is here.
            self.target.rows.pass_over(True)
            self._again = True
        with self.target.rows.turn:  # so that no delta comes between the tables and their claims
            overlaid = self.target.rows.attach(tables, threads=threads)
            claims = self._claims_over(servable)
        self._rest_on(servable)
        return overlaid, claims

    def _claims_over(self, servable: Servable) -> ClaimCell:
        """Return the claims of the tables that were attached, which lie over an export."""
        generation, base = self.target.generation, claim_of(servable)
        if self._claims is not None and self._claims_of == generation:
            self._claims.rest_on(base)
            return self._claims
        # A subscriber that is reading may just be applying a delta, of which it told the claims before.
        reading = self._subscriber is not None and not self._again
        why = "rows were dropped, and those of a new epoch have not come yet" if reading else ""
        self._claims, self._claims_of = ClaimCell(base, why), generation
        return self._claims

    def _is_older_than_base(self, servable: Servable) -> bool:
        """Whether a version is older than the one under the overlay, which was withheld since.

        Rows that were equal in the overlay and in the version before have been dropped from the overlay, so
        it is not complete over an older version.
        """
        base = self._base
        return base is not None and bool(self.target.rows.tables) and servable.step < base.step

    def _rest_on(self, servable: Servable) -> None:
        with self._lock:
            if self._base is not None and self._base.version != servable.version:
                self._settle_at = self._timer() + self._config.settle_after.total_seconds()
            self._base = servable

    def begin(self) -> None:
        """Follow from now on, from where the version that is attached was exported; if not begun yet."""
        with self._lock:
            if self._subscriber is not None or self._base is None or self._stop.is_set():
                return
            places = {
                int(share): LogPlace(epoch, sequence)
                for share, (epoch, sequence) in self._base.log_places.items()
            }
            self._subscriber = Subscriber(
                self._open_reader,
                self.target,
                places=places,
                clock=self._clock,
                on_applying=self._applying,
                on_applied=self._applied,
                refuse=None if self._config.any_run else self._refuse,
            )
            self._subscriber.start()
            self._listens_since = self._timer()
            if self._watcher is None:
                self._watcher = threading.Thread(
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
        """Whether an export is newer than what was followed: by places where these are of one epoch."""
        standing = {number: one for number, one in self.standing.items() if one.place is not None}
        if not standing:
            return False
        for number, one in standing.items():
            place = servable.log_places.get(str(number))
            if place is not None and one.place is not None and one.place.epoch == place[0]:
                if one.place.sequence < place[1]:
                    return True
            elif one.learned.step < servable.step:
                return True
        return False

    # How new it is

    @property
    def standing(self) -> dict[int, Followed]:
        """How far each share of training is followed."""
        subscriber = self._subscriber
        return {} if subscriber is None else dict(subscriber.standing)

    def up_to(self) -> ServedUpTo | None:
        """Return what the oldest of all shares has learned from; None while some are as exported, also where
        what had come was let go of since."""
        generation, standing = self.target.generation, self.standing
        known = [one for one in standing.values() if one.applied_at > 0 and one.generation == generation]
        missing = self._subscriber is not None and self._subscriber.missing
        if not known or missing or len(known) < len(standing):
            return None
        oldest = min(known, key=lambda one: one.learned.published_at)
        return ServedUpTo(oldest.learned, oldest.received_at, oldest.applied_at, oldest.clock_offset)

    def staleness(self) -> float:
        """Return the age of what is served, in seconds."""
        up_to = self.up_to()
        base = self._base
        if up_to is not None and not self.is_back:
            return up_to.age(self._clock())
        since = self._clock() if base is None else base.created
        return max(0.0, self._clock() - since)

    def _compare_clocks(self) -> float:
        """Say once when the publisher's clock and ours begin to differ; return by how much they do."""
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
        """Set gauges, warn where nothing was heard for too long, and tidy up. The watch does this."""
        staleness = self.staleness()
        rows = self.target.rows
        self._metrics.stands(staleness, rows.rows, rows.bytes, self._compare_clocks())
        self._compare_runs()
        if self.target.state.version != self.target.back:
            self.target.settle_state()
        if self._again:
            self._again = False
            self._leave()
            self.target.rows.pass_over(False)
            self.begin()
        self._warn(staleness)
        with self._lock:
            due = self._settle_at is not None and self._timer() >= self._settle_at
            if due:
                self._settle_at = None
        if due:
            _log.info("model %r: %d rows are as exported, and let go of", self._model, rows.settle())

    def _refuse(self, run: str, share: int, place: LogPlace) -> str:
        """Return why a run is not followed: its rows would replace those of another model."""
        base = self._base
        if base is None or not run or _is_of(base, run, share, place):
            return ""
        return (
            f"version {base.version} of model {self._model!r} was exported from the run {base.run!r}, and "
            f"the publisher is of the run {run!r}. Follow the run of the export, serve an export of the "
            "publisher's run, or allow it with --follow-any-run."
        )

    def _compare_runs(self) -> None:
        """Say where what is followed is of another run than what was exported: it may be another model."""
        base, standing = self._base, self.standing
        others = sorted(
            {
                one.run
                for number, one in standing.items()
                if base is not None and one.run and not _is_of(base, one.run, number, one.place)
            }
        )
        subscriber = self._subscriber
        notice = "" if subscriber is None else subscriber.refused
        if base is not None and others:
            notice = (
                f"version {base.version} was exported from the run {base.run!r}, and the trainer that is "
                f"followed says that it is the run {others[0]!r}: all of its rows are taken, whatever the "
                "export has. If that is not meant, follow the run of the export, or serve one of its own."
            )
        if notice and notice != self.notice and others:
            _log.warning("model %r: %s", self._model, notice)
        self.notice = notice
        self._metrics.follows(other_run=bool(notice))

    def _warn(self, staleness: float) -> None:
        bound = self._config.stale_after.total_seconds()
        if staleness <= bound:
            if self._warned:
                _log.info("model %r: what is served is %.1f s old again", self._model, staleness)
            self._warned = False
        elif self.is_back or self.target.state.held:
            self._listens_since = self._timer()
        elif not self._warned and self._timer() - self._listens_since >= bound:
            self._warned = True
            _log.warning(
                "model %r: what is served is %.0f s old, and %s; answers go on",
                *(self._model, staleness, self._why_stale()),
            )

    def _why_stale(self) -> str:
        subscriber = self._subscriber
        errors = [one.error for one in self.standing.values() if one.error]
        if subscriber is not None and subscriber.error:
            errors.insert(0, subscriber.error)
        if errors:
            return f"nothing newer comes ({errors[0]})"
        if self.target.rows.in_snapshot:
            return "it is catching up: all rows of a share are on their way"
        if self._came_at > self._timer() - self._config.stale_after.total_seconds():
            return "it is catching up: changes come in, and are of a while ago"
        return "nothing newer comes (nothing is published)"

    def _applying(self, share: IdShare, learned: LearnedUpTo | None) -> None:
        if self._claims is not None and not self.target.rows.is_passing:
            self._claims.applying(share, None if learned is None else max(learned.step, learned.newest_step))

    def _applied(self, followed: Followed) -> None:
        assert followed.place is not None
        self._came_at = self._timer()
        up_to = ServedUpTo(followed.learned, followed.received_at, followed.applied_at, followed.clock_offset)
        current = followed.generation == self.target.generation == self._claims_of
        if self._claims is not None and current and not self.target.rows.is_passing:
            self._claims.applied(followed.share, up_to.claim(followed.newest_step))
        self._metrics.served(followed.share[0], followed.place.sequence, up_to)

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_EVERY):
            try:
                self.look()
            except Exception:  # whatever it is, answers go on
                _log.exception("model %r: a look at how new it is failed", self._model)

    def close(self) -> None:
        """Stop following. What was brought stays. Closing again does nothing."""
        self._stop.set()
        self._leave()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()


def _is_of(base: Servable, run: str, share: int, place: LogPlace | None) -> bool:
    """Whether a run goes on with what was exported, as far as can be told."""
    if not base.run or is_same_run(base.run, run):
        return True
    exported = base.log_places.get(str(share))
    return exported is not None and place is not None and exported[0] == place.epoch
