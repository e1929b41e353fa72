"""The evaluation of a model while it trains, and the end of a run that no longer improves.

    due ──all paused, every update done──► measured ──better than the best──► saved, and named the best
                                                    └──not, `patience` times in a row──► the run stops early

The model is the one that trains, in eval mode for as long; rows are only read, random numbers are the
evaluation's own, and the data is opened anew each time. So an evaluation delays training as a save does, and
changes nothing in it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator

from monolith import concurrency
from monolith.errors import ConfigError
from monolith.feature import Batch
from monolith.runtime.checkpoints import RunCheckpoints
from monolith.runtime.session import Session
from monolith.train.evaluate_config import EvaluateConfig
from monolith.train.evaluating import (
    ROUNDING,
    BestSoFar,
    check_first_batch,
    check_metric,
    measured,
    outputs_of,
)
from monolith.train.evaluation_log import Evaluation, EvaluationLog
from monolith.train.hook import Every, Hook, StepResult, TrainingRun
from monolith.train.model import OwnRandom
from monolith.train.task import Mode, Outputs

_log = logging.getLogger(__name__)


class EvaluateHook(Hook):
    """Evaluates the model that trains, where this process leads; comes before the hook that saves.

    Args:
        config: Is enabled.
        keeper: Saves the best; None if nothing is kept.
        log: Where evaluations are written; None if nothing is kept.
        epochs: How often the data is read; None if the task says it.
        clock: Seconds that never run backwards.
    """

    def __init__(
        self,
        session: Session,
        config: EvaluateConfig,
        best: BestSoFar,
        *,
        seed: int = 0,
        keeper: RunCheckpoints | None = None,
        log: EvaluationLog | None = None,
        epochs: int | None = None,
        clock: Callable[[], float] = concurrency.monotonic,
    ) -> None:
        self._session = session
        self._epochs = epochs or 1
        self._passes_at_last = 0.0
        self._config = config
        self._seed = seed
        self._keeper = keeper
        self._log = log
        self._clock = clock
        self._every = None if config.every_steps is None else Every(config.every_steps)
        self._due_at = math.inf
        self.best = best
        self.latest: Evaluation | None = None
        """The last evaluation of this run. Read by any thread."""
        self.evaluations = 0
        """How many there were in this run."""
        self.seconds = 0.0
        """How long they took together."""
        check_metric(session.task, config)

        if config.every_epochs is not None and epochs is None:
            raise ConfigError(
                "evaluate: every_epochs counts epochs of the data; set train.epochs, or every_steps instead"
            )

    def after_create(self, run: TrainingRun) -> None:
        if self._every is not None:
            self._every.begin(run.step)
        self._passes_at_last = self._passes()
        if run.stop_reason is None:
            check_first_batch(self._session.model, self._config, OwnRandom(self._seed))
        self._wait()
        if self._keeper is not None and self._config.keep_best and self.best.metric is not None:
            self.best.reconcile(self._keeper.named_best(), run.step)
            if self.best.step is not None:
                self._keeper.name_best(self.best.step, self.best.metric, self.best.value)
        if self.best.gives_up:
            run.request_stop(self._why_early())

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        crossed = self._every is not None and self._every.crossed(run.step)
        if self._config.every_epochs is not None:
            each = self._config.every_epochs
            crossed = self._passes() // each > self._passes_at_last // each
        if crossed or self._clock() >= self._due_at:
            self._evaluate(run)

    def _passes(self) -> float:
        """Return how often the data was read up to here, such as 1.5."""
        read = self._session.fraction_read()
        return 0.0 if read is None else read * self._epochs + ROUNDING

    def end(self, run: TrainingRun) -> None:
        if self._config.at_end and not run.interrupted and self.best.last_step != run.step:
            self._evaluate(run)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def _evaluate(self, run: TrainingRun) -> None:
        with self._session.evaluable():
            found = self._measure(run)
            if found is None:
                return
            self.latest, self.evaluations = found, self.evaluations + 1
            self.seconds += found.seconds
            passes = self._passes()
            # Data that is read once has no epochs to compare within: each evaluation counts.
            since = passes - self._passes_at_last if self._epochs > 1 else 1.0
            is_best = self.best.take(found.step, found.metrics, since)
            self._passes_at_last = passes
            assert self.best.metric is not None
            _log.info(
                "evaluated step %d in %.1f s: %s",
                found.step,
                found.seconds,
                ", ".join(f"{name} {value:.6f}" for name, value in found.metrics.items()),
                extra={"evaluation": found.to_json()},
            )
            if self._log is not None:
                self._log.add(found)
            if is_best and self._keeper is not None and self._config.keep_best:
                self._keeper.keep_best(run, found.step, self.best.metric, self.best.value)
        if self.best.gives_up:
            run.request_stop(self._why_early())
        self._wait()  # what it took is not counted against the next

    def _measure(self, run: TrainingRun) -> Evaluation | None:
        """Return what the model is worth as it stands; None if the run was interrupted meanwhile."""
        began, session = self._clock(), self._session

        def until_interrupted() -> Iterator[tuple[Batch, Outputs]]:
            for found in outputs_of(session.model, Mode.EVALUATE, OwnRandom(self._seed), self._config.steps):
                yield found
                if session.interrupted:
                    return

        with session.readable(), session.model.evaluating():
            values = measured(session.task, until_interrupted())
        if session.interrupted:
            return None
        examples = int(values.pop("examples"))
        return Evaluation(
            step=run.step,
            metrics=values,
            examples=examples,
            seconds=self._clock() - began,
            protocol=session.task.protocol(Mode.EVALUATE),
        )

    def _wait(self) -> None:
        if self._config.every is not None:
            self._due_at = self._clock() + self._config.every.total_seconds()

    def _why_early(self) -> str:
        best = f"the best, {self.best.value:.6f}, was at step {self.best.step}"
        return f"stopped early: {self.best.since} evaluations had no better {self.best.metric}; {best}"
