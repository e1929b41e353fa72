"""The metrics of a task, head by head."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from monolith.errors import RestoreError
from monolith.feature import Batch
from monolith.train.metrics.metric_set import MetricSet, WindowRow
from monolith.train.metrics.sliding import SlidingMetrics, live_values
from monolith.train.task import Mode, Task

_log = logging.getLogger(__name__)


class HeadMetrics:
    """The metrics of a task, made when the first batch shows what heads there are.

    Args:
        window: Examples or event time after which a row is reported; None counts from the start.
    """

    def __init__(
        self,
        task: Task,
        mode: Mode,
        *,
        window: Any = None,
        report: Callable[[str, WindowRow], None] | None = None,
    ) -> None:
        self._task = task
        self._wanted = task.metrics(mode)
        self._window = window
        self._report = report
        self._set: MetricSet | None = None
        self._live: dict[str, SlidingMetrics] = {}
        self._saved: Mapping[str, Any] | None = None
        self.left_out = 0
        """Batches that are not measured, because a prediction is not finite."""

    def update(self, predictions: Mapping[str, Tensor], batch: Batch) -> None:
        """Take in a batch as it was predicted; labels that are not predicted are skipped. A batch with a
        prediction that is not finite is left out, said and counted."""
        heads = [head for head in predictions if head in batch.labels]
        if self._set is None and heads:
            wanted = self._wanted if isinstance(self._wanted, Mapping) else dict.fromkeys(heads, self._wanted)
            names = {head: wanted.get(head, ()) for head in heads}
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
        if self._set is None:
            return
        if bad := [head for head in heads if not bool(predictions[head].isfinite().all())]:
            self.left_out += 1
            if self.left_out == 1:
                _log.warning(
                    "a batch is left out of the metrics: predictions of %s are NaN or infinite. Further ones "
                    "are only counted",
                    ", ".join(bad),
                )
            return
        weights, groups = self._task.weights(batch), self._task.groups(batch)
        self._set.update(
            {head: predictions[head] for head in heads},
            {head: batch.labels[head] for head in heads},
            weights,
            groups,
            batch.ids.event_time,
        )
        for head, live in self._live.items():
            weight = (weights or {}).get(head)
            live.update(predictions[head], batch.labels[head], weight, groups, batch.ids.event_time)
        self._tell()

    def values(self) -> dict[str, float]:
        """Return each metric as it stands, as "head/metric": over the latest examples where there are
        windows, see `SlidingMetrics`; otherwise over all."""
        if self._live:
            return live_values(self._live)
        return {} if self._set is None else self._set.values()

    def end(self) -> None:
        """Report the window that is open."""
        if self._set is not None and self._window is not None:
            self._set.close_windows()
            self._tell()

    def state(self) -> dict[str, Any]:
        if self._set is not None:
            return {"set": self._set.state()}
        return {"set": self._saved} if self._saved is not None else {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        self._saved = saved.get("set")
        self._set = None

    def _tell(self) -> None:
        if self._set is None or self._window is None:
            return
        for name, rows in self._set.take_rows().items():
            for row in rows:
                if self._report is not None:
                    self._report(name, row)
