"""How new the served rows are: what a delta adds to the claim of every answer, and what `/metrics` counts.

From an event to an answer that knows of it there are five stages: the event is *read*, *trained* on,
*published*, goes over the *wire* and is *applied*. Publishers stamp their messages with the ends of the
first three, by their clock; the rest is ours. If the two machines disagree on the time, the difference is
taken into account if the channel can measure it, and named in the answer: a time between two clocks that
differ is never given as if it were right.
"""

from __future__ import annotations

from dataclasses import dataclass

from monolith.observe.metrics import Metrics
from monolith.serve.claims import RowsClaim
from monolith.sync.messages import LearnedUpTo, PublishState

STAGES = ("read", "train", "publish", "wire", "apply")
CLOCKS_AGREE_WITHIN = 1.0
"""Seconds by which the clocks of two machines may differ before answers say so."""
STAGE_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0),
    *(30.0, 60.0, 300.0, 3600.0, 86400.0),
)


@dataclass(frozen=True, slots=True)
class ServedUpTo:
    """What a served model has learned from, and when that came here. Times are Unix seconds."""

    learned: LearnedUpTo
    received_at: float
    applied_at: float
    clock_offset: float | None = None
    """Seconds that the publisher's clock is ahead of ours, as the channel measured it; None if it cannot."""

    @property
    def clock_differs_by(self) -> float:
        """Seconds by which the publisher's clock is ahead of ours; 0 if they agree, as far as is known.

        Without a measurement only a message from the future tells: it is ahead by that much at least.
        """
        found = self.clock_offset
        if found is None:
            found = max(0.0, self.learned.published_at - self.received_at)
        return found if abs(found) > CLOCKS_AGREE_WITHIN else 0.0

    @property
    def as_of(self) -> float:
        """When it was published, by our clock, or when it came if that cannot be told."""
        differs = self.clock_differs_by
        if not self.learned.published_at:
            return self.applied_at
        if differs and self.clock_offset is None:
            return self.received_at
        return self.learned.published_at - differs

    def age(self, now: float) -> float:
        """Return the seconds since it was published, or since it came if that cannot be told."""
        return max(0.0, now - self.as_of)

    def stages(self) -> dict[str, float]:
        """Return the seconds that each stage took, of those whose ends are both known."""
        learned, differs = self.learned, self.clock_differs_by
        ends = (
            learned.event_at,
            learned.read_at,
            learned.trained_at,
            learned.published_at,
            self.received_at + differs,  # by the publisher's clock, as those before
            self.applied_at + differs,
        )
        return {
            name: max(0.0, ends[number + 1] - ends[number])
            for number, name in enumerate(STAGES)
            if ends[number] > 0 and ends[number + 1] > 0
        }

    def claim(self, newest_step: int | None) -> RowsClaim:
        """Return what the rows of the share are from now on; see `monolith.serve.claims`."""
        learned = self.learned
        return RowsClaim(
            learned.step,
            newest_step,
            self.as_of,
            learned.watermark,
            {
                "event_at": learned.event_at,
                "read_at": learned.read_at,
                "trained_at": learned.trained_at,
                "published_at": learned.published_at,
                "received_at": self.received_at,
                "applied_at": self.applied_at,
            },
            clock_differs_by=self.clock_differs_by,
            unknown="" if learned.step else "the trainer did not say which step its rows are of",
        )


class FollowMetrics:
    """The numbers of one model that follows."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._model = model
        self._stages = metrics.histogram(
            "serve_event_to_served_seconds",
            "From an event to a row that is served, by stage: read, train, publish, wire, apply; total",
            ("model", "stage"),
            STAGE_BUCKETS,
        )
        self._rows = metrics.counter(
            "serve_followed_rows", "Rows that were brought, by deltas or snapshots", ("model", "by")
        )
        self._resyncs = metrics.counter(
            "serve_follow_resyncs", "Snapshots of a whole share that were taken", ("model",)
        )
        self._differences = metrics.counter(
            "serve_follow_differences", "Buckets whose digest differed from the trainer's", ("model",)
        )
        self._repaired = metrics.counter(
            "serve_follow_repaired_rows",
            "Rows that snapshots brought or took since they differed",
            ("model",),
        )
        self._misfits = metrics.counter(
            "serve_follow_dense_refused", "Dense weights that do not fit the served model", ("model",)
        )
        self._place = metrics.gauge(
            "serve_follow_sequence", "The newest delta that was applied", ("model", "share")
        )
        self._staleness = metrics.gauge(
            "serve_staleness_seconds", "The age of what is served, of its oldest share", ("model",)
        )
        self._clock_offset = metrics.gauge(
            "serve_follow_clock_offset_seconds",
            "Seconds that the publisher's clock is ahead of this server's; 0 while they agree",
            ("model",),
        )
        self._overlay_rows = metrics.gauge(
            "serve_overlay_rows", "Rows that are newer than the export they lie over", ("model",)
        )
        self._overlay_bytes = metrics.gauge("serve_overlay_bytes", "Memory of these rows", ("model",))
        self._held = metrics.gauge(
            "serve_follow_held", "1 where the trainer holds publishing back", ("model",)
        )
        self._back = metrics.gauge(
            "serve_rolled_back", "1 where an older version is served since the trainer said so", ("model",)
        )

        self._other_run = metrics.gauge(
            "serve_follows_other_run", "1 where the trainer is of another run than the export", ("model",)
        )

    def follows(self, *, other_run: bool) -> None:
        self._other_run.set(float(other_run), model=self._model)

    def applied(self, rows: int) -> None:
        """Count the rows of a delta."""
        self._rows.inc(rows, model=self._model, by="delta")

    def snapshot_began(self, buckets: int | None) -> None:
        """Count a snapshot: of so many buckets that differed, or of everything."""
        if buckets is None:
            self._resyncs.inc(model=self._model)
        else:
            self._differences.inc(buckets, model=self._model)

    def snapshot_rows(self, rows: int, changed: int) -> None:
        """Count rows of a snapshot, and those of them that were not known."""
        self._rows.inc(rows, model=self._model, by="snapshot")
        self._repaired.inc(changed, model=self._model)

    def dense_refused(self) -> None:
        self._misfits.inc(model=self._model)

    def served(self, share: int, sequence: int, up_to: ServedUpTo) -> None:
        """Note that a delta is served now."""
        self._place.set(sequence, model=self._model, share=str(share))
        stages = up_to.stages()
        for stage, seconds in stages.items():
            self._stages.observe(seconds, model=self._model, stage=stage)
        if up_to.learned.event_at > 0:
            total = max(0.0, up_to.applied_at + up_to.clock_differs_by - up_to.learned.event_at)
            self._stages.observe(total, model=self._model, stage="total")

    def stands(self, staleness: float, rows: int, size: int, clock_offset: float = 0.0) -> None:
        self._staleness.set(staleness, model=self._model)
        self._clock_offset.set(clock_offset, model=self._model)
        self._overlay_rows.set(rows, model=self._model)
        self._overlay_bytes.set(size, model=self._model)

    def told(self, state: PublishState, back: str | None) -> None:
        self._held.set(float(state.held), model=self._model)
        self._back.set(float(back is not None), model=self._model)
