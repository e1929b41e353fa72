"""What a server says of its requests: metrics for all, log lines for some."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable

from monolith.observe.metrics import Metrics
from monolith.serve.rows import ServedUpTo
from monolith.sync.messages import PublishState

_log = logging.getLogger("monolith.access")

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384)
DIFFERENCE_BUCKETS = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0)
LATENCY_BUCKETS = (
    *(
        0.00025,
        0.0005,
        0.001,
        0.002,
        0.004,
        0.008,
        0.016,
        0.032,
        0.064,
        0.125,
        0.25,
        0.5,
        1.0,
        2.5,
        5.0,
        10.0,
    ),
)
STAGE_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0),
    *(30.0, 60.0, 300.0, 3600.0, 86400.0),
)
REFUSALS_PER_SECOND = 10

Add = Callable[[float], None]


class ServeMetrics:
    """The numbers of a server."""

    def __init__(self, metrics: Metrics) -> None:
        self.all = metrics
        self._requests = metrics.counter(
            "serve_requests", "Requests by outcome", ("model", "version", "transport", "code")
        )
        self._seconds = metrics.histogram(
            "serve_request_seconds", "From a decoded request to its answer", ("model",), LATENCY_BUCKETS
        )
        self._rows = metrics.counter("serve_rows", "Rows answered", ("model", "version"))
        self._batch_rows = metrics.histogram(
            "serve_batch_rows", "Rows answered together", ("model",), ROW_BUCKETS
        )
        self._batch_requests = metrics.histogram(
            "serve_batch_requests", "Requests answered together", ("model",), ROW_BUCKETS[:10]
        )
        self._answered: dict[tuple[str, str, str], tuple[Add, Add, Add]] = {}
        self._batched: dict[str, tuple[Add, Add]] = {}
        """Series of what is counted for every request, by what they are of."""
        self._in_flight = metrics.gauge("serve_in_flight", "Requests that are being answered")
        self._missing = metrics.counter(
            "serve_missing_shards", "Answers with rows of a shard read as zeros", ("shard",)
        )
        self._shadow = metrics.counter(
            "serve_shadow_requests", "Requests also asked of a shadow", ("name", "shadow", "outcome")
        )
        self._difference = metrics.histogram(
            "serve_shadow_difference",
            "Largest difference between an answer and its shadow's",
            ("name", "shadow"),
            DIFFERENCE_BUCKETS,
        )

    def answered(
        self, *, model: str, version: str, transport: str, code: str, rows: int = 0, seconds: float = 0.0
    ) -> None:
        if code != "ok":
            self._requests.inc(model=model, version=version, transport=transport, code=code)
            return
        key = (model, version, transport)
        series = self._answered.get(key)
        if series is None:
            series = self._answered[key] = (
                self._requests.series(model=model, version=version, transport=transport, code=code),
                self._seconds.series(model=model),
                self._rows.series(model=model, version=version),
            )
        series[0](1.0)
        series[1](seconds)
        series[2](rows)

    def batched(self, model: str, requests: int, rows: int) -> None:
        series = self._batched.get(model)
        if series is None:
            series = self._batched[model] = (
                self._batch_requests.series(model=model),
                self._batch_rows.series(model=model),
            )
        series[0](requests)
        series[1](rows)

    def in_flight(self, count: int) -> None:
        self._in_flight.set(count)

    def missing(self, shards: tuple[str, ...]) -> None:
        for shard in shards:
            self._missing.inc(shard=shard)

    def shadowed(self, name: str, shadow: str, outcome: str, difference: float | None = None) -> None:
        self._shadow.inc(name=name, shadow=shadow, outcome=outcome)
        if difference is not None:
            self._difference.observe(difference, name=name, shadow=shadow)


class AccessLog:
    """A line for some of the requests: a share of those answered, and ten a second of those refused.

    Args:
        share: Of answered requests.
        generator: Draws.
        clock: Seconds.
    """

    def __init__(self, share: float, generator: random.Random, clock: Callable[[], float]) -> None:
        self._share = share
        self._random = generator
        self._clock = clock
        self._lock = threading.Lock()  # guards the two below
        self._second = 0
        self._refused = 0

    def answered(
        self,
        *,
        model: str,
        version: str,
        transport: str,
        id: str,  # noqa: A002
        rows: int,
        seconds: float,
    ) -> None:
        if self._share and self._random.random() < self._share:
            _log.info(
                "answered %d rows by %s version %s in %.2f ms",
                *(rows, model, version, seconds * 1e3),
                extra={
                    "model": model,
                    "model_version": version,
                    "transport": transport,
                    "request_id": id,
                    "rows": rows,
                    "milliseconds": round(seconds * 1e3, 3),
                    "code": "ok",
                },
            )

    def refused(self, *, model: str, transport: str, id: str, code: str, why: str) -> None:  # noqa: A002
        second = int(self._clock())
        with self._lock:
            if second != self._second:
                self._second, self._refused = second, 0
            self._refused += 1
            if self._refused > REFUSALS_PER_SECOND:
                return
        _log.warning(
            "refused a request (%s): %s",
            *(code, why[:300]),
            extra={"model": model[:200], "transport": transport, "request_id": id[:200], "code": code},
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


class LookupMetrics:
    """What a serving server has answered, for its metrics."""

    def __init__(self, metrics: Metrics, role: str) -> None:
        self._lookups = metrics.counter("serve_lookups", "Lookups of rows that were answered", ("shard",))
        self._ids = metrics.counter("serve_lookup_ids", "Ids that lookups asked for", ("shard",))
        self._seconds = metrics.histogram(
            "serve_lookup_seconds", "How long a lookup took, but for the wire", ("shard",)
        )
        self._role = role

    def answered(self, ids: int, seconds: float) -> None:
        self._lookups.inc(shard=self._role)
        self._ids.inc(ids, shard=self._role)
        self._seconds.observe(seconds, shard=self._role)
