"""What a server says of its requests: metrics for all, log lines for some."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable

from monolith.observe.metrics import Metrics

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
