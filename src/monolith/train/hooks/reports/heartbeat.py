"""The heart-beat: a run says that it is alive, also while a step takes for ever."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import timedelta

from monolith.train.hook import Hook, Run
from monolith.train.hooks.reports.metric_sinks import MetricClient, MetricName


class HeartBeatHook(Hook):
    """Counts "running" every `every` from a thread of its own, and "stopped" once, however the run ends.

    Args:
        stop: Ends the thread at once when set; `close` sets it. By default an event of its own.
    """

    def __init__(
        self,
        client: MetricClient,
        *,
        every: timedelta = timedelta(seconds=30),
        tags: Mapping[str, object] | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self._client = client
        self._every = every.total_seconds()
        self._tags = dict(tags or {})
        self._stop = threading.Event() if stop is None else stop
        self._thread: threading.Thread | None = None

    def after_create(self, run: Run) -> None:  # noqa: ARG002
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="heart-beat", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._emit("stopped")
            self._client.flush()

    def _beat(self) -> None:
        while not self._stop.is_set():
            self._emit("running")
            self._stop.wait(self._every)

    def _emit(self, kind: str) -> None:
        self._client.emit_counter(MetricName.TRAINING_HEART_BEAT, 1, {**self._tags, "type": kind})
