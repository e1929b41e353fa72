"""The metrics of a task, head by head.

Batches are kept as they come, in host memory, and taken in by the metrics several at once: before a window
ends, a value is asked for or a checkpoint is saved, and after `AT_ONCE` examples or `BATCHES_AT_ONCE`. A
metric then costs a small part of what it does batch by batch.

A GPU trains 100,000 examples in less time than the host needs to sort them. So a run whose steps are graphs
leaves the metrics to a thread of their own, which takes in one part while the next one is kept:

    update      keep  keep  keep │ keep  keep  keep │ keep ...
    thread                       └► take in 1       └► take in 2
    rows of windows              nothing yet        those that 1 has ended

Rows are then reported one part later. Which part, and what is in it, follows from counts alone and never from
which thread was faster.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from monolith import concurrency
from monolith.errors import ConfigError, RestoreError
from monolith.feature import Batch
from monolith.train.metrics.metric_set import MetricSet, WindowRow
from monolith.train.metrics.sliding import KeptExamples, SlidingMetrics, live_values, together
from monolith.train.task import Mode, Task

_log = logging.getLogger(__name__)

AT_ONCE = 1 << 17
"""Examples that are kept until the metrics take them in."""
BATCHES_AT_ONCE = 1 << 10
"""Batches likewise: those of a live stream have a few examples, and the tensors of each take a kilobyte."""


class HeadMetrics:
    """The metrics of a task, made when the first batch shows what heads there are.

    Args:
        window: Examples or event time after which a row is reported; None counts from the start.
        threaded: Whether a thread takes batches in; `close` ends it.
    """

    def __init__(
        self,
        task: Task,
        mode: Mode,
        *,
        window: Any = None,
        report: Callable[[str, WindowRow], None] | None = None,
        threaded: bool = False,
    ) -> None:
        self._task = task
        self._wanted = task.metrics(mode)
        self._window = window
        self._report = report
        self._set: MetricSet | None = None
        self._live: dict[str, SlidingMetrics] = {}
        self._saved: Mapping[str, Any] | None = None
        # Not taken in yet; by head, batch after batch. All alike: one can lay them end to end.
        self._kept: dict[str, list[KeptExamples]] = {}
        self._kept_batches = self._kept_examples = 0
        self._oldest = self._newest = 0  # event times of these
        self._kept_like: object = None
        self._thread = concurrency.ThreadPoolExecutor(1, "metrics") if threaded else None
        self._taking: concurrency.Future[None] | None = None
        """While it is not done the thread has `_set`, and this one must not touch it; see `_taken_in`."""
        self._taken_until = 0  # the newest event time that was left to the thread
        self.left_out = 0
        """Batches that are not measured, because a prediction is not finite."""

    def check(self, predictions: Mapping[str, Tensor], batch: Batch) -> list[str]:
        """Compute all metrics of one batch by themselves, before anything is trained; return their names.

        Raises:
            ConfigError: `targets` or `metrics` of the task name a label that batches do not have, or a metric
                that does not exist.
            MetricError: Predictions, labels, weights or groups make no sense.
        """
        task, wanted = self._task, self._wanted
        if batch.labels:
            for what, named in (("targets", task.targets()), ("metrics", wanted)):
                for head in named if isinstance(named, Mapping) else ():
                    if head not in batch.labels:
                        near = difflib.get_close_matches(head, batch.labels, n=1)
                        hint = f" Did you mean {near[0]!r}?" if near else ""
                        raise ConfigError(
                            f"task {task.name!r}: {what}() names {head!r}, which is no label of its batches; "
                            f"they have {', '.join(batch.labels)}.{hint}"
                        )
        heads = [head for head in predictions if head in batch.labels]
        trial = MetricSet.named(self._names(heads))
        said = {head: predictions[head].detach().cpu() for head in heads}
        if all(bool(one.isfinite().all()) for one in said.values()):  # otherwise it is not measured
            trial.update(said, batch.labels, task.weights(batch), task.groups(batch), batch.ids.event_time)
        return list(trial.values())

    def update(
        self,
        predictions: Mapping[str, Tensor],
        batch: Batch,
        finite: Mapping[str, bool] | None = None,
    ) -> None:
        """Take in a batch as it was predicted; labels that are not predicted are skipped. A batch with a
        prediction that is not finite is left out, said and counted.

        Args:
            finite: Whether the predictions of each head are finite; None looks.

        Raises:
            MetricError: Labels or weights of this batch, or of one that was kept before, make no sense.
        """
        heads = [head for head in predictions if head in batch.labels]
        if self._set is None and heads:
            self._make(heads)
        if self._set is None:
            return
        predictions = {head: predictions[head].detach().cpu() for head in heads}  # waits for a device
        if finite is None:
            finite = {head: bool(predictions[head].isfinite().all()) for head in heads}
        if bad := [head for head in heads if not finite[head]]:
            self.left_out += 1
            if self.left_out == 1:
                _log.warning(
                    "a batch is left out of the metrics: predictions of %s are NaN or infinite. Further ones "
                    "are only counted",
                    ", ".join(bad),
                )
            return
        weights, groups = self._task.weights(batch) or {}, self._task.groups(batch)
        time = batch.ids.event_time
        seen = {
            head: KeptExamples.of(predictions[head], batch.labels[head], weights.get(head), groups, time)
            for head in heads
            if self._set.heads.get(head)
        }
        like = [(head, one.like) for head, one in seen.items()]
        if self._kept and like != self._kept_like:
            self._take_in()
        self._kept_like = like
        for head, one in seen.items():
            self._kept.setdefault(head, []).append(one)
            if head in self._live:
                self._live[head].add(one)
        self._oldest = min(self._oldest, time) if self._kept_examples else time
        self._newest = max(self._newest, time) if self._kept_examples else time
        self._kept_batches += 1
        self._kept_examples += len(batch)
        # By counts alone, and not by the clock: the AUC of very many examples depends on it, a little.
        full = self._kept_examples >= AT_ONCE or self._kept_batches >= BATCHES_AT_ONCE
        if full or self._ends_window():
            self._take_in()

    def values(self) -> dict[str, float]:
        """Return each metric as it stands, as "head/metric": over the latest examples where there are
        windows, see `SlidingMetrics`; otherwise over all."""
        if self._live:
            return live_values(self._live)
        self._taken_in()
        return {} if self._set is None else self._set.values()

    def values_later(self) -> concurrency.Future[dict[str, float]]:
        """Return the same, as it stands now, computed by the thread if there is one."""
        if self._thread is not None and self._live:
            return self._thread.submit(live_values, {head: one.copy() for head, one in self._live.items()})
        found = concurrency.Future[dict[str, float]]()
        found.set_result(self.values())
        return found

    def end(self) -> None:
        """Report the window that is open."""
        self._taken_in()
        if self._set is not None and self._window is not None:
            self._set.close_windows()
            self._tell()

    def state(self) -> dict[str, Any]:
        self._taken_in()
        if self._set is not None:
            return {"set": self._set.state()}
        return {"set": self._saved} if self._saved is not None else {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        self._forget()
        self._wait()
        self._saved = saved.get("set")
        self._set = None

    def close(self) -> None:
        """End the thread, if there is one. Batches that are kept are not taken in."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    def _make(self, heads: list[str]) -> None:
        """Make the metrics of heads, and resume from the saved state."""
        names = self._names(heads)
        self._set = MetricSet.named(names, window=self._window)
        if self._window is not None:
            self._live = {head: SlidingMetrics(some, self._window) for head, some in names.items()}
        if self._saved is not None:
            try:
                self._set.restore(self._saved)
            except RestoreError as cause:  # of another window, for instance: no reason not to train
                _log.warning("metrics start from zero: %s", cause)
                self._set.reset()
            self._saved = None

    def _names(self, heads: Sequence[str]) -> dict[str, Sequence[str]]:
        """Return the metrics of each head: those of its target, unless the task says otherwise."""
        wanted = self._wanted
        if not isinstance(wanted, Mapping):
            return dict.fromkeys(heads, wanted)
        return {head: wanted[head] if head in wanted else self._task.target(head).metrics for head in heads}

    def _ends_window(self) -> bool:
        """Return whether a window ends with what is kept; with a thread, about when one does."""
        assert self._set is not None
        if self._thread is None:
            return self._set.ends_within(self._kept_examples, self._oldest, self._newest)
        # The thread has the windows: count here what was left to it since the last time.
        if isinstance(self._window, timedelta):
            seconds = int(self._window.total_seconds())
            return self._newest // seconds > self._taken_until // seconds
        return self._window is not None and self._kept_examples >= self._window

    def _take_in(self) -> None:
        """Have the metrics take in the batches that were kept, and report the windows that ended."""
        self._wait()
        if self._set is None or not self._kept:
            return
        kept, self._taken_until = self._kept, self._newest
        self._forget()  # first: a batch that is refused must not be refused again, by a save
        if self._thread is None:
            _add(self._set, kept)
            self._tell()
        else:
            self._taking = self._thread.submit(_add, self._set, kept)

    def _taken_in(self) -> None:
        """Have the metrics take in the batches that were kept, and return when they have."""
        self._take_in()
        self._wait()

    def _wait(self) -> None:
        """Wait for the thread, and report the windows that it has ended."""
        taking, self._taking = self._taking, None
        if taking is not None:
            taking.result()  # raises what the metrics raised
            self._tell()

    def _forget(self) -> None:
        self._kept, self._kept_like = {}, None
        self._kept_batches = self._kept_examples = 0

    def _tell(self) -> None:
        if self._set is None or self._window is None:
            return
        for name, rows in self._set.take_rows().items():
            for row in rows:
                if self._report is not None:
                    self._report(name, row)


def _add(metrics: MetricSet, kept: Mapping[str, list[KeptExamples]]) -> None:
    """Have metrics take in batches of each head."""
    first = next(iter(kept.values()))
    weights = {head: together([one.weights for one in several]) for head, several in kept.items()}
    metrics.update(
        {head: torch.cat([one.predictions for one in several]) for head, several in kept.items()},
        {head: torch.cat([one.labels for one in several]) for head, several in kept.items()},
        {head: one for head, one in weights.items() if one is not None},
        together([one.groups for one in first]),
        [(len(one), one.event_time) for one in first],
    )
