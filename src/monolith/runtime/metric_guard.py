"""Pauses publishing when the model gets worse: its AUC falls, or its calibration error rises.

Every batch is predicted before it is trained on, so the latest examples say how good the model is that would
be published. The guard compares them with the usual level of this run:

    warming up ──warm_up examples──► watching ──past a bound──► out of bounds
        ▲                               ▲                           │
        └────────── accept ─────────────┴──── within half of it ────┘

The usual level is a slow running mean that stops while publishing is paused, so that bad values never become
usual. Levels and the latest examples are in the checkpoint: a run that is restarted is watched at once.

Labels are bad for a while before the metrics of a whole window say so. So the guard also knows the first step
that may be bad: all examples of the last window that was found well had been trained on since. Some labels of
that window may have been bad already, so the first bad step is that of the window's first example.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from monolith import concurrency
from monolith.errors import MetricError
from monolith.sync.guard import LookUp
from monolith.sync.messages import Delta
from monolith.sync.publish_config import GuardConfig
from monolith.train.metrics.sliding import SlidingMetrics

_log = logging.getLogger(__name__)

LOOKS_PER_WINDOW = 4
"""How often, at the most, metrics are computed while a window of examples passes."""
LOOK_EVERY = 0.25
"""Seconds, at the least, between two computations: they take milliseconds of the training thread."""


class BadSince(NamedTuple):
    """Why publishing is to be paused, and the first step that may be bad."""

    reason: str
    step: int


class _Look(NamedTuple):
    """A moment at which metrics were computed."""

    examples: int
    """That had been seen by then, of all batches of the head."""
    step: int


@dataclass(slots=True)
class _Head:
    """One head: its latest examples, and the levels that its metrics have."""

    latest: SlidingMetrics
    levels: dict[str, float] = field(default_factory=dict)
    """auc, and the calibration error."""
    examples: int = 0
    """Examples of this run and of its starts before, or since an operator accepted the current level."""
    unseen: int = 0
    """Examples since the last look."""
    seen: int = 0
    """Examples of this start, and those of the window that it restored."""
    looks: deque[_Look] = field(default_factory=deque)
    """The looks of the latest window, and the last one before it."""
    clean_step: int = 0
    """The step before the first example of the last window that was found well."""
    broken: bool = False
    """Whether its labels or predictions are such that there is nothing to measure."""

    def restart(self, step: int) -> None:
        """Count all up to a step as well."""
        self.looks, self.clean_step = deque([_Look(self.seen, step)]), step

    def looked(self, step: int, *, well: bool) -> None:
        """Note a look, and that the window was found well by it."""
        self.looks.append(_Look(self.seen, step))
        while self.looks[1].examples <= self.seen - len(self.latest):
            self.looks.popleft()
        if well:
            self.clean_step = self.looks[0].step


class MetricGuard:
    """`PublishGuard` of what the training thread measures. Thread-safe.

    Args:
        clock: Seconds that only grow.
    """

    def __init__(self, config: GuardConfig, *, clock: Callable[[], float] = concurrency.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._lock = concurrency.Lock()  # guards what follows
        self._heads: dict[str, _Head] = {}
        self._reasons: dict[str, str] = {}
        """Head and metric -> why publishing is paused."""
        self._looked = -math.inf
        self._step = 0

    @property
    def looks(self) -> bool:
        """Whether the config sets a bound to check."""
        return self._config.auc_fall is not None or self._config.calibration_rise is not None

    @property
    def reason(self) -> str | None:
        """Why publishing must pause; None while all metrics are within bounds."""
        with self._lock:
            return next(iter(self._reasons.values()), None)

    @property
    def bad(self) -> BadSince | None:
        """The reason, and the first step whose rows are not trusted."""
        with self._lock:
            for name, reason in self._reasons.items():
                return BadSince(reason, self._heads[name.rpartition("/")[0]].clean_step + 1)
            return None

    @property
    def first_bad_step(self) -> int | None:
        bad = self.bad
        return None if bad is None else bad.step

    def update(
        self, predictions: Mapping[str, Tensor], labels: Mapping[str, Tensor], *, step: int = 0
    ) -> None:
        """Add the predictions of a batch, on the training thread.

        Args:
            step: The step that trained on it.
        """
        if not self.looks:
            return
        with self._lock:
            if step < self._step:  # the run rolled back: earlier steps no longer count
                for head in self._heads.values():
                    head.restart(min(head.clean_step, max(step - 1, 0)))
            self._step = step
            for name, predicted in predictions.items():
                if name in labels:
                    self._take(name, predicted, labels[name])
            due = self._clock() - self._looked >= LOOK_EVERY
            least = max(self._config.window // LOOKS_PER_WINDOW, 1)
            for name, head in self._heads.items():
                if due and head.unseen >= least and not head.broken:
                    self._looked = self._clock()
                    self._look(name, head)

    def check(self, delta: Delta) -> str | None:  # noqa: ARG002  it is not about rows
        return self.reason

    def recovered(self, look_up: LookUp) -> bool:  # noqa: ARG002
        return self.reason is None

    def accept(self) -> None:
        with self._lock:
            self._reasons = {}
            for head in self._heads.values():
                head.levels, head.examples = {}, 0
                head.restart(self._step)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: levels, the latest examples, and why publishing is paused."""
        with self._lock:
            heads = {}
            for name, head in self._heads.items():
                heads[name] = {
                    "levels": dict(head.levels),
                    "examples": head.examples,
                    "clean_step": head.clean_step,
                }
                if (latest := head.latest.examples) is not None:
                    heads[name] |= {"predictions": latest.predictions, "labels": latest.labels}
            return {"heads": heads, "reasons": dict(self._reasons)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Resume with the state of a checkpoint."""
        with self._lock:
            self._step, self._heads = 0, {}
            for name, one in saved["heads"].items():
                head = self._heads[name] = self._new_head()
                head.levels, head.examples = dict(one["levels"]), one["examples"]
                head.restart(one["clean_step"])
                if "labels" in one:
                    head.latest.update(one["predictions"], one["labels"])
                    head.seen = len(head.latest)
            self._reasons = {
                name: why for name, why in saved["reasons"].items() if self._bound(name) is not None
            }

    # Inside, with the lock held

    def _new_head(self) -> _Head:
        return _Head(SlidingMetrics(("auc", "calibration"), self._config.window))

    def _bound(self, metric: str) -> float | None:
        """Return the bound of a "head/metric"."""
        return self._config.auc_fall if metric.endswith("/auc") else self._config.calibration_rise

    def _take(self, name: str, predictions: Tensor, labels: Tensor) -> None:
        head = self._heads.get(name)
        if head is None:
            head = self._heads[name] = self._new_head()
            head.restart(max(self._step - 1, 0))  # a checkpoint that was restored had been judged before
        if head.broken or not bool(predictions.isfinite().all()):
            return  # the step itself skips such a batch
        head.latest.update(predictions, labels)
        head.examples += len(predictions)
        head.unseen += len(predictions)
        head.seen += len(predictions)

    def _look(self, name: str, head: _Head) -> None:
        share = head.unseen / self._config.warm_up
        head.unseen = 0
        try:
            found = head.latest.values()
        except MetricError as error:
            head.broken = True
            _log.info("publishing is not guarded by the metrics of %r: %s", name, error)
            return
        miscalibrated = abs(found["calibration"] - 1)
        well = [
            self._compare(head, metric, value, share)
            for metric, value in ((f"{name}/auc", found["auc"]), (f"{name}/calibration", miscalibrated))
        ]
        head.looked(self._step, well=all(well))

    def _compare(self, head: _Head, name: str, value: float, share: float) -> bool:
        """Compare a value with its level; return whether it is within half of the bound.

        Args:
            share: How far the level moves towards the value.
        """
        bound = self._bound(name)
        if bound is None or not math.isfinite(value):
            return True
        level = head.levels.get(name, value)
        warm = head.examples >= self._config.warm_up
        beyond = level - value if name.endswith("/auc") else value - level
        if warm and beyond > bound:
            self._reasons[name] = _describe(name, value, level, bound, self._config.window)
        elif name in self._reasons and beyond <= bound / 2:
            del self._reasons[name]
        if name not in self._reasons:
            head.levels[name] = level + min(share, 1.0) * (value - level)
        return beyond <= bound / 2


def _describe(name: str, value: float, level: float, bound: float, window: int) -> str:
    if name.endswith("/auc"):
        return (
            f"{name} of the latest {window:,} examples fell to {value:.4f}, from about {level:.4f}: by more "
            f"than publish.guard.auc_fall of {bound:g}"
        )
    return (
        f"the error of {name} over the latest {window:,} examples rose to {value:.4f}, from about "
        f"{level:.4f}: by more than publish.guard.calibration_rise of {bound:g}"
    )
