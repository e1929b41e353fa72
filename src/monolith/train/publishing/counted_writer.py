"""A writer that counts what goes through it: for `/metrics`, and for whoever asks how publishing stands."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from torch import Tensor

from monolith.errors import UnavailableError
from monolith.observe import Metrics
from monolith.sync.channel import DeltaWriter, ShardLog, TakeSnapshot
from monolith.sync.messages import Delta, LearnedUpTo, Message, PublishState

STAGES = ("read", "train", "publish")
"""From the event to its batch, from there to the end of its step, from there to its delta."""
FRESHNESS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 18000)


class CountedWriter:
    """A `DeltaWriter` around another. The counts are read from any thread.

    Args:
        problem: Says what is wrong with part of a snapshot, which then ends there; deltas the publisher looks
            at itself.
        clock: Unix seconds.
    """

    def __init__(
        self,
        inner: DeltaWriter,
        metrics: Metrics,
        share: int,
        *,
        problem: Callable[[Message], str | None] = lambda _: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._inner = inner
        self._problem = problem
        self._clock = clock
        name = str(share)
        self._count_rows = metrics.counter(
            "publish_rows", "Rows that were published, removed ones included", ["share"]
        ).series(share=name)
        self._count_bytes = metrics.counter(
            "publish_bytes", "Bytes of the tensors of published deltas", ["share"]
        ).series(share=name)
        self._count_deltas = metrics.counter("publish_deltas", "Published deltas", ["share"]).series(
            share=name
        )
        self._count_errors = metrics.counter(
            "publish_errors", "Deltas that the channel did not take, to be tried again", ["share"]
        ).series(share=name)
        self._count_resyncs = metrics.counter(
            "publish_resyncs",
            "Epochs after the first: subscribers take a snapshot or a difference",
            ["share"],
        ).series(share=name)
        self._name = name
        self._held = metrics.gauge("publish_held", "1 while publishing is held back", ["share"])
        self._time = metrics.gauge("publish_time_seconds", "When the newest delta was published", ["share"])
        self._lag = metrics.gauge(
            "publish_lag_seconds", "From the newest event that a delta has to its publishing", ["share"]
        )
        stages = metrics.histogram(
            "publish_stage_seconds",
            "Of the newest event of each delta: event to batch (read), to its step (train), to its delta "
            "(publish)",
            ["stage"],
            buckets=FRESHNESS_BUCKETS,
        )
        self._stages = {stage: stages.series(stage=stage) for stage in STAGES}
        self._epochs = 0
        self._event_at = 0.0
        self.deltas = self.rows = self.bytes = self.errors = 0
        self.newest = LearnedUpTo()
        """What the newest delta has learned from."""

    @property
    def address(self) -> str | None:
        return self._inner.address

    @property
    def resyncs(self) -> int:
        return max(self._epochs - 1, 0)

    def open(self, log: ShardLog, snapshot: TakeSnapshot) -> None:
        try:
            self._inner.open(log, _Looked(snapshot, self._problem))
        except Exception:
            self._count_error()
            raise
        self._epochs += 1
        if self._epochs > 1:
            self._count_resyncs(1)

    def append(self, delta: Delta) -> None:
        try:
            self._inner.append(delta)
        except Exception:
            self._count_error()
            raise
        rows, size = _size(delta)
        self.deltas, self.rows, self.bytes = self.deltas + 1, self.rows + rows, self.bytes + size
        self._count_deltas(1)
        self._count_rows(rows)
        self._count_bytes(size)
        self._observe(delta.learned)

    def set_state(self, state: PublishState) -> None:
        self._held.set(float(state.paused), share=self._name)
        self._inner.set_state(state)

    def close(self) -> None:
        self._inner.close()

    def _count_error(self) -> None:
        self.errors += 1
        self._count_errors(1)

    def _observe(self, learned: LearnedUpTo) -> None:
        now = learned.published_at or self._clock()
        self.newest = learned
        self._time.set(now, share=self._name)
        if not learned.event_at or learned.event_at <= self._event_at:
            return  # nothing of it is new
        self._event_at = learned.event_at
        self._lag.set(max(now - learned.event_at, 0.0), share=self._name)
        moments = {
            "read": (learned.event_at, learned.read_at),
            "train": (learned.read_at, learned.trained_at),
            "publish": (learned.trained_at, now),
        }
        for stage, (begin, end) in moments.items():
            if begin and end:
                self._stages[stage](max(end - begin, 0.0))


class _Looked:
    """A snapshot that ends where something is wrong with it."""

    def __init__(self, snapshot: TakeSnapshot, problem: Callable[[Message], str | None]) -> None:
        self._snapshot = snapshot
        self._problem = problem

    def __call__(self, buckets: Tensor | None = None) -> Iterator[Message]:
        for message in self._snapshot(buckets):
            if (why := self._problem(message)) is not None:
                raise UnavailableError(f"there is no snapshot for now: {why}")
            yield message


def _size(delta: Delta) -> tuple[int, int]:
    """Return the rows of a delta, removed ones included, and the bytes of its tensors."""
    tensors = [
        one for rows in delta.rows.values() for one in (rows.ids, rows.event_times, rows.values, rows.state)
    ]
    tensors += delta.removed.values()
    tensors += (delta.dense or {}).values()
    counted = sum(map(len, delta.rows.values())) + sum(map(len, delta.removed.values()))
    return counted, sum(one.numel() * one.element_size() for one in tensors)
