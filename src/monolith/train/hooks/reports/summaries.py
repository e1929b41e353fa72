"""Summaries of a run: its loss, metrics, size and speed, where TensorBoard or another tracker finds them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from monolith.table import TableStats
from monolith.train.hook import Every, Hook, Run, StepResult
from monolith.train.hooks.config import TrackingConfig
from monolith.train.hooks.reports.trackers import OpenSink, ScalarSink, sink_openers


class Measured(Protocol):
    """Whoever knows the metrics of a run, such as a `MetricSet`."""

    def values(self) -> Mapping[str, float]: ...


class SummaryHook(Hook):
    """Writes scalars every `every_steps` steps, and of what is left when the run ends well.

    `loss` is the mean over the steps since the last writing, `examples_per_s` their speed; `metrics/...`
    are as they stand, and left out while they have nothing to say; `rows/<table>` and `bytes/<table>` are
    what the tables hold. The loss is read from the device only when it is written. A run without
    a model folder has no files of TensorBoard.

    Args:
        metrics: Is only read: those of the session, which a hook before this one keeps up to date.
        stats: What the tables hold, by name: `store.stats`.
        sinks: Open those who take the scalars; by default files of TensorBoard in the model folder.
        clock: Seconds that never run backwards.
    """

    _loss: Tensor | None
    _steps: int
    _examples: int

    def __init__(
        self,
        every_steps: int = 100,
        *,
        metrics: Measured | None = None,
        stats: Callable[[], Mapping[str, TableStats]] | None = None,
        sinks: Sequence[OpenSink] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open = sink_openers(TrackingConfig(), "") if sinks is None else sinks
        self._every = Every(every_steps, "summaries: every_steps")
        self._metrics = metrics
        self._stats = stats
        self._clock = clock
        self._sinks: list[ScalarSink] = []
        self._begin_span()

    def after_create(self, run: Run) -> None:
        if not self._sinks:
            for opened in self._open:
                if (sink := opened(run)) is not None:
                    self._sinks.append(sink)
                    sink.start(run.step)
        self._every.begin(run.step)
        self._begin_span()

    def after_step(self, run: Run, result: StepResult) -> None:  # noqa: ARG002
        loss = result.loss.detach().double()
        self._loss = loss if self._loss is None else self._loss + loss
        self._steps += 1
        self._examples += result.examples
        if self._every.crossed(result.step):
            self._write(result.step)

    def end(self, run: Run) -> None:
        if self._steps:
            self._write(run.step)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def _begin_span(self) -> None:
        self._loss = None
        self._steps = self._examples = 0
        self._began = self._clock()

    def _write(self, step: int) -> None:
        if self._sinks and self._loss is not None:
            values = {"loss": float(self._loss) / self._steps}
            passed = self._clock() - self._began
            if passed > 0:
                values["examples_per_s"] = self._examples / passed
            found = self._metrics.values() if self._metrics is not None else {}
            values |= {f"metrics/{name}": value for name, value in found.items() if not math.isnan(value)}
            stats = self._stats() if self._stats is not None else {}
            for name, table in stats.items():
                values |= {f"rows/{name}": table.rows, f"bytes/{name}": table.bytes_total}
            for sink in self._sinks:
                sink.scalars(values, step)
                sink.flush()
        self._begin_span()
