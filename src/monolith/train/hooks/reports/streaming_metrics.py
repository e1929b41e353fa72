"""Metrics while training: each batch is measured as it was predicted, before the model learned from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from monolith.feature import Batch
from monolith.train.hook import Hook, Run, StepResult
from monolith.train.metrics.metric_set import MetricSet, WindowRow


class MetricsHook(Hook):
    """Keeps a set of metrics up to date, and reports each window as it ends.

    Windows get the event time of the batch, that of its newest example. A window that is open when
    the run ends well is reported too.

    Args:
        weights: Weights of a batch's examples by head, where they have any.
        groups: The group of each of a batch's examples, such as its user, for grouped metrics.
        report: Gets "head/metric" and the row.
    """

    def __init__(
        self,
        metrics: MetricSet,
        *,
        weights: Callable[[Batch], Mapping[str, Tensor]] | None = None,
        groups: Callable[[Batch], Tensor] | None = None,
        report: Callable[[str, WindowRow], None] = lambda *_: None,
    ) -> None:
        self.metrics = metrics
        self._weights = weights
        self._groups = groups
        self._report = report

    def after_step(self, run: Run, result: StepResult) -> None:  # noqa: ARG002
        batch = result.batch
        self.metrics.update(
            result.predictions,
            batch.labels,
            self._weights(batch) if self._weights is not None else None,
            self._groups(batch) if self._groups is not None else None,
            batch.ids.event_time,
        )
        self._tell()

    def end(self, run: Run) -> None:  # noqa: ARG002
        self.metrics.close_windows()
        self._tell()

    def _tell(self) -> None:
        for name, rows in self.metrics.take_rows().items():
            for row in rows:
                self._report(name, row)
