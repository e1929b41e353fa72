"""Throughput: how long a run took to start, and how many steps it takes since."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from monolith.train.hook import Hook, Run, StepResult
from monolith.train.hooks.reports.metric_sinks import MetricClient, MetricName


class ThroughputHook(Hook):
    """Emits the time until the first step, then steps, their time and the loss every `every`.

    Args:
        started_at: When the process was asked for, in Unix seconds.
        clock: Unix seconds.
        timer: Seconds that only grow.
    """

    def __init__(
        self,
        client: MetricClient,
        *,
        model_name: str,
        cluster_type: str,
        started_at: float,
        every: timedelta = timedelta(seconds=30),
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._tags = {"model_name": model_name, "cluster_type": cluster_type}
        self._started_at = started_at
        self._every = every.total_seconds()
        self._clock, self._timer = clock, timer
        self._last: tuple[float, int] | None = None

    def after_create(self, run: Run) -> None:
        if self._last is None:
            waited = max(self._clock() - self._started_at, 0.0)
            self._client.emit_timer(MetricName.RUN_START_ELAPSED_TIME, waited, self._tags)
        self._last = (self._timer(), run.step)

    def after_step(self, run: Run, result: StepResult) -> None:  # noqa: ARG002
        assert self._last is not None
        now, (then, step) = self._timer(), self._last
        if now - then < self._every:
            return
        self._last = (now, result.step)
        self._client.emit_counter(MetricName.RUN_STEPS, result.step - step, self._tags)
        self._client.emit_timer(MetricName.RUN_STEPS_ELAPSED_TIME, now - then, self._tags)
        self._client.emit_store(MetricName.STEP_LOSS, float(result.loss), self._tags)
        self._client.flush()
