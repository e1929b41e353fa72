"""Where the numbers and messages of a training run go.

Numbers go to a `MetricClient`, which has the calls that training code knows (`emit_counter`,
`emit_timer`, `emit_store`) and keeps them in the process's `Metrics`, where a Prometheus
server collects them. Messages, one text for each sampled example, go to files or to Kafka
(`deep_insight`). Neither may ever delay a step: what cannot be taken in time is dropped and counted.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import StrEnum

import torch
from torch import Tensor

from monolith import concurrency
from monolith.errors import ConfigError
from monolith.observe import Metrics
from monolith.train.hook import Every, Hook, StepResult, TrainingRun

_log = logging.getLogger(__name__)


class MetricName(StrEnum):
    """The numbers a run tells of, by the names dashboards know. Timers are in seconds."""

    SAVE_CHECKPOINT = "save_checkpoint"
    SAVE_CHECKPOINT_FAILED = "save_checkpoint_failed"
    SAVE_CHECKPOINT_TIME = "save_checkpoint_time"
    """Tag: mode."""
    RUN_START_ELAPSED_TIME = "run_start_elapsed_time.all"
    RUN_STEPS = "run_steps.all"
    RUN_STEPS_ELAPSED_TIME = "run_steps_elapsed_time.all"
    """Tags, as of the two before: model_name, cluster_type."""
    STEP_LOSS = "step_loss"
    CONTAINER_READY_ELAPSED_TIME = "container_ready_elapsed_time.all"
    WORKER_FAILOVER_COUNT = "worker_failover_cnt"
    TRAINING_HEART_BEAT = "training_heart_beat"
    """Tag: type, "running" or "stopped"."""
    EXPORT_LATEST_VERSION = "export_models.latest_version"
    EXIT_HOOK = "exit_hook"
    """Tags: server_type, index, sig."""
    EMBEDDING_LOOKUP = "embedding_lookup"
    """By parameter server."""


class MetricClient:
    """Counters, timers and stores by name and tags, over `Metrics`. Thread-safe.

    Dots in a name become underscores, which is all that Prometheus allows: "run_steps.all" of a
    `Metrics("monolith.training")` is shown as `monolith_training_run_steps_all_total`. A name always
    has the same tags.

    Args:
        push: Is given all metrics in the Prometheus text format at every `flush`, for jobs that end
            before anyone comes to collect; by default `flush` does nothing.
    """

    def __init__(self, metrics: Metrics, push: Callable[[bytes], None] | None = None) -> None:
        self._metrics = metrics
        self._push = push

    def emit_counter(self, name: str, value: float = 1.0, tags: Mapping[str, object] | None = None) -> None:
        """Add `value` to a counter."""
        counted = _finite("counter", name, value)
        self._metrics.counter(_plain(name), name, sorted(tags or {})).inc(counted, **_texts(tags))

    def emit_timer(self, name: str, seconds: float, tags: Mapping[str, object] | None = None) -> None:
        """Count a duration."""
        took = _finite("timer", name, seconds)
        self._metrics.histogram(_plain(name), name, sorted(tags or {})).observe(took, **_texts(tags))

    def emit_store(self, name: str, value: float, tags: Mapping[str, object] | None = None) -> None:
        """Make `value` the current one; NaN is a value too, as of a loss."""
        number = _number("store", name, value)
        self._metrics.gauge(_plain(name), name, sorted(tags or {})).set(number, **_texts(tags))

    def flush(self) -> None:
        if self._push is not None:
            self._push(self._metrics.render())


def _plain(name: str) -> str:
    return re.sub(r"[.-]", "_", name)


def _texts(tags: Mapping[str, object] | None) -> dict[str, str]:
    return {key: str(value) for key, value in (tags or {}).items()}


def _number(kind: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{kind} {name!r} takes a number, got {value!r}")
    return float(value)


def _finite(kind: str, name: str, value: object) -> float:
    number = _number(kind, name, value)
    if not math.isfinite(number):
        raise ConfigError(f"{kind} {name!r} takes a finite number, got {number}")
    return number


class CustomMetricHook(Hook):
    """Stores numbers of one's own, taken from each step that is due.

    Library only: what to read off a step is code, so no setting installs it. Return it from `Task.hooks`, or
    give it to a `Trainer` with the client of its metrics.

    Args:
        scalars: Name to what reads a float32 or int32 scalar off a step.

    Raises:
        ConfigError: There are none; or, in a step, one is no such scalar.
    """

    def __init__(
        self,
        client: MetricClient,
        scalars: Mapping[str, Callable[[StepResult], Tensor]],
        *,
        every_steps: int = 100,
        tags: Mapping[str, object] | None = None,
    ) -> None:
        if not scalars:
            raise ConfigError("custom metrics: give at least one scalar to store")
        self._client = client
        self._scalars = dict(scalars)
        self._every = Every(every_steps, "custom metrics: every_steps")
        self._tags = tags

    def after_create(self, run: TrainingRun) -> None:
        self._every.begin(run.step)

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        if not self._every.crossed(result.step):
            return
        for name, read in self._scalars.items():
            scalar = read(result)
            if scalar.ndim or scalar.dtype not in (torch.float32, torch.int32):
                raise ConfigError(
                    f"custom metric {name!r} must be a float32 or int32 scalar, "
                    f"got {scalar.dtype} of shape {tuple(scalar.shape)}"
                )
            self._client.emit_store(name, scalar.item(), self._tags)


# Messages


@dataclass(frozen=True, slots=True)
class MessageCounts:
    """Outcomes of messages so far: `total` were offered; the other counts are those of each outcome."""

    total: int = 0
    success: int = 0
    failed: int = 0
    dropped: int = 0
    """Messages refused because the queue was full."""


class MessageQueue:
    """A bounded queue and the thread that empties it, one message at a time.

    A message that `handle` fails on is counted and the next one is taken, so that the thread ends
    only when asked to, and `finish` always returns.

    Args:
        handle: Runs on the thread. True counts the message as a success; False leaves that to `settle`.
        tick: Runs on the thread about every `tick_secs`, busy or not.
    """

    def __init__(
        self,
        name: str,
        handle: Callable[[str], bool],
        *,
        capacity: int = 100_000,
        tick: Callable[[], None] = lambda: None,
        tick_secs: float = 600.0,
        clock: Callable[[], float],
    ) -> None:
        self._name = name
        self._handle = handle
        self._tick = tick
        self._tick_secs = tick_secs
        self._clock = clock
        self._queue: concurrency.Queue[str | None] = concurrency.Queue(capacity)
        self._lock = concurrency.Lock()  # guards _counts
        self._counts = MessageCounts()
        self._thread: concurrency.Thread | None = None

    @property
    def counts(self) -> MessageCounts:
        with self._lock:
            return self._counts

    def start(self) -> None:
        if self._thread is None:
            self._thread = concurrency.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()

    def put(self, messages: Sequence[str]) -> None:
        """Take messages; those that find the queue full are dropped and counted."""
        dropped = 0
        for message in messages:
            try:
                self._queue.put_nowait(message)
            except concurrency.Full:
                dropped += 1
        self._count(total=len(messages), dropped=dropped)

    def settle(self, success: int = 0, failed: int = 0) -> None:
        """Count messages whose end is known only now. From any thread."""
        self._count(success=success, failed=failed)

    def finish(self) -> None:
        """Handle what is queued, then end the thread. Finishing again does nothing."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        while thread.is_alive():
            try:
                self._queue.put(None, timeout=1.0)
                break
            except concurrency.Full:
                continue
        thread.join()
        counts = self.counts
        if counts.failed or counts.dropped:
            _log.warning(
                "%s: of %d messages %d failed and %d were dropped",
                self._name,
                counts.total,
                counts.failed,
                counts.dropped,
            )

    def _count(self, **more: int) -> None:
        with self._lock:
            self._counts = replace(
                self._counts, **{name: getattr(self._counts, name) + n for name, n in more.items()}
            )

    def _work(self) -> None:
        ticked = self._clock()
        while True:
            try:
                message = self._queue.get(timeout=self._tick_secs)
            except concurrency.Empty:
                pass  # time to tick all the same
            else:
                if message is None:
                    return
                self._guarded(message)
            if self._clock() - ticked >= self._tick_secs:
                ticked = self._clock()
                try:
                    self._tick()
                except Exception:
                    _log.exception("%s: the periodic work failed", self._name)

    def _guarded(self, message: str) -> None:
        try:
            if self._handle(message):
                self._count(success=1)
        except Exception as error:
            if not self.counts.failed:  # one is enough to see what is wrong
                _log.warning("%s: cannot handle %.200r: %r", self._name, message, error)
            self._count(failed=1)


# The heart-beat: a run says that it is alive, also while a step takes for ever.


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
        stop: concurrency.Event | None = None,
    ) -> None:
        self._client = client
        self._every = every.total_seconds()
        self._tags = dict(tags or {})
        self._stop = concurrency.Event() if stop is None else stop
        self._thread: concurrency.Thread | None = None

    def after_create(self, run: TrainingRun) -> None:  # noqa: ARG002
        if self._thread is None:
            self._thread = concurrency.Thread(target=self._beat, name="heart-beat", daemon=True)
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


# Throughput: how long a run took to start, and how many steps it takes since.


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
        clock: Callable[[], float] = concurrency.time,
        timer: Callable[[], float] = concurrency.monotonic,
    ) -> None:
        self._client = client
        self._tags = {"model_name": model_name, "cluster_type": cluster_type}
        self._started_at = started_at
        self._every = every.total_seconds()
        self._clock, self._timer = clock, timer
        self._last: tuple[float, int] | None = None

    def after_create(self, run: TrainingRun) -> None:
        if self._last is None:
            waited = max(self._clock() - self._started_at, 0.0)
            self._client.emit_timer(MetricName.RUN_START_ELAPSED_TIME, waited, self._tags)
        self._last = (self._timer(), run.step)

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        assert self._last is not None
        now, (then, step) = self._timer(), self._last
        if now - then < self._every:
            return
        self._last = (now, result.step)
        self._client.emit_counter(MetricName.RUN_STEPS, result.step - step, self._tags)
        self._client.emit_timer(MetricName.RUN_STEPS_ELAPSED_TIME, now - then, self._tags)
        self._client.emit_store(MetricName.STEP_LOSS, float(result.loss), self._tags)
        self._client.flush()
