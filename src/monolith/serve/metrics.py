"""The metrics of serving, and the access log. All metric names of this package are in this file."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

from monolith import concurrency
from monolith.observe.metrics import Metrics
from monolith.observe.progress import describe_bytes, describe_part, describe_rate
from monolith.serve.rows import ServedUpTo
from monolith.sync.messages import PublishState
from monolith.table.frozen_table import FrozenTables, RowReads

_log = logging.getLogger("monolith.access")
_reads_log = logging.getLogger(__name__)
_SAY_EVERY = 60.0
"""Seconds between two log lines about the rows of one model that were read from the disk."""

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
    """Metrics of an inference server."""

    def __init__(self, metrics: Metrics) -> None:
        self.all = metrics
        self._requests = metrics.counter(
            "serve_requests", "Requests, by outcome", ("model", "version", "transport", "code")
        )
        self._seconds = metrics.histogram(
            "serve_request_seconds",
            "Seconds from a decoded request to its answer",
            ("model",),
            LATENCY_BUCKETS,
        )
        self._rows = metrics.counter("serve_rows", "Rows answered", ("model", "version"))
        self._batch_rows = metrics.histogram("serve_batch_rows", "Rows per batch", ("model",), ROW_BUCKETS)
        self._batch_requests = metrics.histogram(
            "serve_batch_requests", "Requests per batch", ("model",), ROW_BUCKETS[:10]
        )
        self._answered: dict[tuple[str, str, str], tuple[Add, Add, Add]] = {}
        self._batched: dict[str, tuple[Add, Add]] = {}
        """Cached series of the counters that every request increments."""
        self._in_flight = metrics.gauge("serve_in_flight", "Requests in flight")
        self._missing = metrics.counter(
            "serve_missing_shards", "Answers in which the rows of a shard were read as zeros", ("shard",)
        )
        self._shadow = metrics.counter(
            "serve_shadow_requests",
            "Requests mirrored to a shadow, by outcome",
            ("name", "shadow", "outcome"),
        )
        self._difference = metrics.histogram(
            "serve_shadow_difference",
            "Largest absolute difference between an answer and its shadow's answer",
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


class HistoryMetrics:
    """Metrics of the cache of encoded histories."""

    def __init__(self, metrics: Metrics) -> None:
        self._lookups = metrics.counter(
            "serve_history_cache_lookups",
            "Histories of ranking requests that the cache had (hit) or that were encoded (miss)",
            ("model", "outcome"),
        )
        self._dropped = metrics.counter(
            "serve_history_cache_evictions", "Encoded histories dropped because the cache was full"
        )
        self._bytes = metrics.gauge("serve_history_cache_bytes", "Bytes of host memory the cache uses")

    def looked_up(self, model: str, hits: int, misses: int) -> None:
        for outcome, count in (("hit", hits), ("miss", misses)):
            if count:
                self._lookups.inc(count, model=model, outcome=outcome)

    def kept(self, size: int, dropped: int) -> None:
        self._bytes.set(size)
        if dropped:
            self._dropped.inc(dropped)


class ReadMetrics:
    """Metrics of rows of which memory has a part, by the name of their model or shard; the log has a line of
    each from time to time."""

    def __init__(self, metrics: Metrics, *, clock: Callable[[], float] = concurrency.monotonic) -> None:
        self._clock = clock
        self._rows = metrics.counter(
            "serve_rows_found",
            "Rows looked up that were in memory (memory) or read from the disk (disk), if memory is limited",
            ("model", "tier"),
        )
        self._reads = metrics.counter("serve_row_reads", "Reads of rows from the disk", ("model",))
        self._read_bytes = metrics.counter("serve_row_read_bytes", "Bytes read for rows", ("model",))
        self._memory = metrics.gauge(
            "serve_row_memory_bytes", "Memory for rows and their index, if memory is limited", ("model",)
        )
        self._last: dict[str, tuple[FrozenTables, RowReads]] = {}
        self._unsaid: dict[str, tuple[float, RowReads]] = {}  # since then

    def count(self, model: str, tables: FrozenTables) -> None:
        """Count the reads since the last call; of tables that are new, since they were opened."""
        now = tables.reads
        if now is None:
            return
        known, before = self._last.get(model, (None, RowReads()))
        self._last[model] = (tables, now)
        if known is not tables:
            before = RowReads()
        grown = now - before
        self._rows.inc(grown.in_memory, model=model, tier="memory")
        self._rows.inc(grown.found - grown.in_memory, model=model, tier="disk")
        self._reads.inc(grown.reads, model=model)
        self._read_bytes.inc(grown.bytes_read, model=model)
        self._memory.set(now.memory_bytes, model=model)
        self._say(model, grown)

    def _say(self, model: str, grown: RowReads) -> None:
        """Log how many rows were in memory, once a minute; nothing of a minute without a row."""
        now = self._clock()
        since, counted = self._unsaid.get(model, (now, RowReads()))
        counted += grown
        if now - since < _SAY_EVERY:
            self._unsaid[model] = (since, counted)
            return
        self._unsaid[model] = (now, RowReads())
        if counted.found:
            seconds = now - since
            _reads_log.info(
                "model %s: %s of %s rows were found in memory in the last %.0f s; %s of %s/s from the disk",
                model,
                describe_part(counted.in_memory / counted.found),
                f"{counted.found:,}",
                seconds,
                describe_rate(counted.reads / seconds, "reads"),
                describe_bytes(counted.bytes_read / seconds),
            )


class VersionStatistics:
    """Counts the requests of one version since it was loaded, for the statistics extension. Thread-safe."""

    def __init__(self) -> None:
        self._lock = concurrency.Lock()  # guards all of the below
        self._last = 0.0
        self._rows = 0
        self._times = {"success": [0, 0.0], "fail": [0, 0.0], "compute_infer": [0, 0.0]}

    def answered(self, rows: int, seconds: float) -> None:
        with self._lock:
            self._last = concurrency.time()
            self._rows += rows
            self._add("success", seconds)

    def failed(self, seconds: float) -> None:
        with self._lock:
            self._add("fail", seconds)

    def computed(self, seconds: float) -> None:
        """Count a batch."""
        with self._lock:
            self._add("compute_infer", seconds)

    def _add(self, name: str, seconds: float) -> None:
        times = self._times[name]
        times[0] += 1
        times[1] += seconds

    def read(self) -> dict[str, Any]:
        """Return the counts by the names that the extension has for them."""
        with self._lock:
            return {
                "last_inference": int(self._last * 1e3),
                "inference_count": self._rows,
                "execution_count": self._times["compute_infer"][0],
                "inference_stats": {
                    name: {"count": int(count), "ns": int(seconds * 1e9)}
                    for name, (count, seconds) in self._times.items()
                },
            }


class AccessLog:
    """Logs a fraction of the answered requests, and at most ten refused requests per second.

    Args:
        fraction: Fraction of answered requests that are logged, 0 to 1.
        generator: Random numbers for the choice.
        clock: Seconds.
    """

    def __init__(self, fraction: float, generator: random.Random, clock: Callable[[], float]) -> None:
        self._fraction = fraction
        self._random = generator
        self._clock = clock
        self._lock = concurrency.Lock()  # guards the two below
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
        if self._fraction and self._random.random() < self._fraction:
            _log.info(
                "answered %d rows with %s version %s in %.2f ms",
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


class IndexMetrics:
    """Metrics of the searched items of retrieval models."""

    def __init__(self, metrics: Metrics) -> None:
        self._items = metrics.gauge("serve_index_items", "Items that can be found", ("model",))
        self._updates = metrics.counter("serve_index_updates", "Items embedded again", ("model",))
        self._recall = metrics.gauge(
            "serve_index_recall",
            "Fraction of the best items of a sampled request that a brute-force search finds, too",
            ("model",),
        )
        self._failures = metrics.counter(
            "serve_index_failures", "Updates of an index that failed", ("model",)
        )

    def updated(self, model: str, embedded: int, items: int) -> None:
        self._updates.inc(embedded, model=model)
        self._items.set(items, model=model)

    def compared(self, model: str, recall: float) -> None:
        self._recall.set(recall, model=model)

    def failed(self, model: str) -> None:
        self._failures.inc(model=model)


class FollowMetrics:
    """Metrics of one model that follows a trainer."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._model = model
        self._stages = metrics.histogram(
            "serve_event_to_served_seconds",
            "Seconds from an event to a served row, by stage: read, train, publish, wire, apply, total",
            ("model", "stage"),
            STAGE_BUCKETS,
        )
        self._rows = metrics.counter(
            "serve_followed_rows", "Rows received from the trainer, by deltas or snapshots", ("model", "by")
        )
        self._resyncs = metrics.counter(
            "serve_follow_resyncs", "Snapshots of a whole shard that were applied", ("model",)
        )
        self._differences = metrics.counter(
            "serve_follow_differences", "Buckets whose digest differed from the trainer's", ("model",)
        )
        self._repaired = metrics.counter(
            "serve_follow_repaired_rows",
            "Rows that snapshots changed or deleted because they differed from the trainer's",
            ("model",),
        )
        self._misfits = metrics.counter(
            "serve_follow_dense_refused",
            "Dense weights refused because they do not fit the served model",
            ("model",),
        )
        self._place = metrics.gauge(
            "serve_follow_sequence", "Sequence number of the newest applied delta", ("model", "shard")
        )
        self._staleness = metrics.gauge(
            "serve_staleness_seconds", "Age of the served rows of the oldest shard, in seconds", ("model",)
        )
        self._clock_offset = metrics.gauge(
            "serve_follow_clock_offset_seconds",
            "Seconds that the publisher's clock is ahead of this server's; 0 while they agree",
            ("model",),
        )
        self._overlay_rows = metrics.gauge(
            "serve_overlay_rows", "Rows in the overlay, which are newer than the export", ("model",)
        )
        self._overlay_bytes = metrics.gauge(
            "serve_overlay_bytes", "Bytes of host memory the overlay uses", ("model",)
        )
        self._held = metrics.gauge(
            "serve_follow_paused", "1 while the trainer has paused publishing", ("model",)
        )
        self._back = metrics.gauge(
            "serve_rolled_back",
            "1 while an older version is served because the trainer rolled servers back",
            ("model",),
        )

        self._other_run = metrics.gauge(
            "serve_follows_other_run", "1 if the trainer is of another run than the export", ("model",)
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

    def served(self, shard: int, sequence: int, up_to: ServedUpTo) -> None:
        """Note that a delta is served now."""
        self._place.set(sequence, model=self._model, shard=str(shard))
        stages = up_to.stages()
        for stage, seconds in stages.items():
            self._stages.observe(seconds, model=self._model, stage=stage)
        if up_to.learned.event_at > 0:
            total = max(0.0, up_to.applied_at + up_to.clock_differs_by - up_to.learned.event_at)
            self._stages.observe(total, model=self._model, stage="total")

    def set_gauges(self, staleness: float, rows: int, size: int, clock_offset: float = 0.0) -> None:
        self._staleness.set(staleness, model=self._model)
        self._clock_offset.set(clock_offset, model=self._model)
        self._overlay_rows.set(rows, model=self._model)
        self._overlay_bytes.set(size, model=self._model)

    def set_state(self, state: PublishState, back: str | None) -> None:
        self._held.set(float(state.paused), model=self._model)
        self._back.set(float(back is not None), model=self._model)


class LookupMetrics:
    """Metrics of the lookups of a serving server."""

    def __init__(self, metrics: Metrics, role: str) -> None:
        self._lookups = metrics.counter("serve_lookups", "Row lookups answered", ("shard",))
        self._ids = metrics.counter("serve_lookup_ids", "IDs in answered lookups", ("shard",))
        self._seconds = metrics.histogram(
            "serve_lookup_seconds", "Seconds of a lookup without the network", ("shard",)
        )
        self._role = role

    def answered(self, ids: int, seconds: float) -> None:
        self._lookups.inc(shard=self._role)
        self._ids.inc(ids, shard=self._role)
        self._seconds.observe(seconds, shard=self._role)
