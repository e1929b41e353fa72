"""Canary: gives a new version more and more traffic, as long as it answers like the old one.

    running at 1 % ──hold, enough requests, guards hold──► 10 % ──► 50 % ──► promoted: all requests
        └──a guard fails, at any step──► rolled back: none
        └──an operator changes the split──► stopped: it stays as the operator set it

The guards compare the candidate with the base, over the requests of one step:

    latency       the 95th percentile of seconds to answer
    calibration   the mean of each output. A split draws users by chance, so both should predict the same on
                  average; a server has no labels, so the base is taken to be calibrated. Only a shift that is
                  more than chance counts: beyond three standard errors.
    errors        the fraction of requests that failed by a fault of the server or model
"""

from __future__ import annotations

import enum
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monolith import concurrency
from monolith.observe import Metrics
from monolith.serve.config import CanaryConfig, Route, canary_route

_log = logging.getLogger(__name__)

LATENCIES = 4096
"""The newest latencies of each arm that a percentile is taken of."""
STANDARD_ERRORS = 3.0


class CanaryState(enum.Enum):
    RUNNING = "running"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled back"
    STOPPED = "stopped"


@dataclass(slots=True)
class _Scores:
    """Sums over the values of one output."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def squared_error(self) -> float:
        """The square of the standard error of the mean."""
        return max(0.0, self.squares / self.count - self.mean**2) / self.count


@dataclass(slots=True)
class _Arm:
    """The requests of one target during one step."""

    requests: int = 0
    failed: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=LATENCIES))
    scores: dict[str, _Scores] = field(default_factory=dict)


class Canary:
    """One name whose requests are split between a base and a candidate. Thread-safe.

    Args:
        route: The name, with the base and then the candidate.
        clock: Seconds that only grow.
    """

    def __init__(
        self, route: Route, config: CanaryConfig, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        self.name = route.name
        self._config = config
        self._clock = clock
        base, candidate = route.targets
        self._targets = {False: base, True: candidate}
        self._weight = metrics.gauge(
            "serve_canary_weight", "Fraction of the requests for a name that go to its canary", ("name",)
        )
        self._states = metrics.gauge("serve_canary_state", "1 for the state of a canary", ("name", "state"))
        self._lock = concurrency.Lock()  # guards the arms; held for a few instructions
        self._arms = {False: _Arm(), True: _Arm()}
        self._since = clock()
        self._step = 0
        self.state = CanaryState.RUNNING
        self.reason = ""
        self._show()

    @property
    def targets(self) -> str:
        """The targets of the split as they should be now."""
        return canary_route(self.name, self._targets[False], self._targets[True], self._share).targets_text

    @property
    def _share(self) -> float:
        if self.state is CanaryState.RUNNING:
            return self._config.steps[self._step]
        return float(self.state is CanaryState.PROMOTED)

    def answered(self, target: tuple[str, str], seconds: float, outputs: Mapping[str, NDArray[Any]]) -> None:
        """Count an answer of a model and version."""
        candidate = self._is_candidate(target)
        if candidate is None:
            return
        sums = {
            head: (values.size, float(values.sum(dtype=np.float64)), float((values.astype(float) ** 2).sum()))
            for head, values in outputs.items()
        }
        with self._lock:
            arm = self._arms[candidate]
            arm.requests += 1
            arm.seconds.append(seconds)
            for head, (count, total, squares) in sums.items():
                one = arm.scores.setdefault(head, _Scores())
                one.count += count
                one.total += total
                one.squares += squares

    def failed(self, target: tuple[str, str]) -> None:
        """Count a request that failed by a fault of the server or model."""
        candidate = self._is_candidate(target)
        if candidate is not None:
            with self._lock:
                self._arms[candidate].requests += 1
                self._arms[candidate].failed += 1

    def tick(self, current: str | None) -> str | None:
        """Judge the step; return other targets for the split, or None if it stays.

        Args:
            current: The targets of the split now; others than this canary's are an operator's.
        """
        if self.state is not CanaryState.RUNNING:
            return None
        if current != self.targets:
            self._end(CanaryState.STOPPED, f"an operator set {current or 'no split'}")
            return None
        with self._lock:
            base, candidate = self._arms[False], self._arms[True]
            least = self._config.least_requests
            if candidate.failed >= least and not candidate.seconds:
                trouble: str | None = f"all of {candidate.failed} requests failed"
            elif min(base.requests, candidate.requests) < least:
                return None
            else:
                trouble = self._trouble(base, candidate)
        if trouble is not None:
            self._end(CanaryState.ROLLED_BACK, trouble)
            return self.targets
        if self._clock() - self._since < self._config.hold.total_seconds():
            return None
        if self._step + 1 == len(self._config.steps):
            self._end(CanaryState.PROMOTED, "all guards held at every step")
            return self.targets
        with self._lock:
            self._step += 1
            self._arms = {False: _Arm(), True: _Arm()}
            self._since = self._clock()
        self._show()
        _log.info("canary of %r: the guards held; it gets %.3g of the requests now", self.name, self._share)
        return self.targets

    def _trouble(self, base: _Arm, candidate: _Arm) -> str | None:
        """Return which guard fails, in words. Called under the lock."""
        config = self._config
        failed, usual = candidate.failed / candidate.requests, base.failed / base.requests
        if failed > usual + config.max_errors:
            return f"{failed:.2%} of its requests failed, and {usual:.2%} of the base's"
        if base.seconds and candidate.seconds:
            slow, quick = (float(np.quantile(list(arm.seconds), 0.95)) for arm in (candidate, base))
            if slow > quick * config.max_latency:
                return f"95 % of its answers take up to {slow * 1e3:.3g} ms, and the base's {quick * 1e3:.3g}"
        for head, mine in candidate.scores.items():
            theirs = base.scores.get(head)
            if theirs is None or not theirs.count or not mine.count:
                continue
            chance = STANDARD_ERRORS * math.sqrt(mine.squared_error + theirs.squared_error)
            # Not a number on either side fails: a comparison with it is false.
            if not abs(mine.mean - theirs.mean) - chance <= config.max_shift * abs(theirs.mean):
                return f"the mean of {head!r} is {mine.mean:.4g}, and the base's {theirs.mean:.4g}"
        return None

    def _is_candidate(self, target: tuple[str, str]) -> bool | None:
        for candidate, one in self._targets.items():
            if (one.model, one.version) == target:
                return candidate
        return None

    def _end(self, state: CanaryState, why: str) -> None:
        self.state, self.reason = state, why
        self._show()
        _log.log(
            logging.INFO if state is CanaryState.PROMOTED else logging.WARNING,
            "canary of %r is %s: %s",
            *(self.name, state.value, why),
        )

    def _show(self) -> None:
        self._weight.set(self._share, name=self.name)
        for state in CanaryState:
            self._states.set(float(state is self.state), name=self.name, state=state.value)
