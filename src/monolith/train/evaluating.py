"""Evaluating a run while it trains: on held data, with the model as it stands, and what follows from it.

    due ──all paused, every update done──► measured ──better than the best──► saved, and named the best
                                                    └──not, `patience` times in a row──► the run stops early

What was best and how long ago is part of every checkpoint: a run that was killed compares on as if it had
not been. The model is the one that trains, in eval mode for as long; rows are only read, random numbers are
the evaluation's own, and the data is opened anew each time. So all that training notices is what it notices
of a save: its updates are done before it continues.
"""

from __future__ import annotations

import difflib
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch

from monolith import concurrency
from monolith.checkpoint import BestCheckpoint
from monolith.data import Stream, as_stream
from monolith.errors import ConfigError
from monolith.feature import Batch
from monolith.train.evaluate_config import HEADLINES, LOSS, EvaluateConfig
from monolith.train.evaluation_log import Evaluation, EvaluationLog
from monolith.train.hook import Every, Hook, StepResult, TrainingRun
from monolith.train.metrics.heads import HeadMetrics
from monolith.train.model import Model, OwnRandom
from monolith.train.task import Mode, Outputs, Task

_log = logging.getLogger(__name__)


_ROUNDING = 1e-6
"""The error of epochs, which are counted in fractions."""

OnOpen = Callable[[Stream[Batch]], object]
"""Told of data that was opened and not read yet."""


def measured(
    task: Task,
    outputs: Iterable[tuple[Batch, Outputs]],
    advance: Callable[[int], object] | None = None,
) -> dict[str, float]:
    """Return the task's metrics over batches, as "head/metric", and "examples" and "loss".

    Args:
        advance: Told the examples of each batch that is done.

    Raises:
        ConfigError: There are no batches.
    """
    metrics = HeadMetrics(task, Mode.EVALUATE)
    examples, loss = 0, 0.0
    measures: dict[str, list[torch.Tensor]] = {}
    for batch, found in outputs:
        metrics.update(found.predictions, batch)
        examples += len(batch)
        loss += float(found.loss) * len(batch)
        for name, values in found.measures.items():
            measures.setdefault(name, []).append(values.detach().cpu().double())
        if advance is not None:
            advance(len(batch))
    if not examples:
        raise ConfigError(f"task {task.name!r}: dataset(Mode.EVALUATE) has no examples")
    means = {name: float(torch.cat(parts).nanmean()) for name, parts in measures.items()}
    all_values = {**metrics.values(), **means, LOSS: loss / examples, "examples": float(examples)}
    return all_values | ({"left_out": float(metrics.left_out)} if metrics.left_out else {})


def outputs_of(
    model: Model,
    mode: Mode,
    own: OwnRandom,
    steps: int | None,
    *,
    data: Mode | None = None,
    on_open: OnOpen | None = None,
    heads: Sequence[str] = (),
) -> Iterator[tuple[Batch, Outputs]]:
    """Yield the batches of a mode, read anew, and what a model in eval mode says of them.

    Args:
        own: Where random numbers are drawn from.
        steps: Batches to read; None reads all.
        data: The mode whose batches are read instead.
        on_open: Given the data before it is read.
        heads: The labels that the model was trained on: a batch without any gets those, as NaN, so that
            predictions have the same names with and without labels.
    """
    with own.drawn():
        stream = as_stream(model.task.dataset(mode if data is None else data))
    with closing(stream), _reading(model, mode, own):
        if mode is Mode.PREDICT:
            stream.allow_missing_labels()
        if on_open is not None:
            on_open(stream)
        batches = iter(stream)
        for _ in itertools.count() if steps is None else range(steps):
            with own.drawn(), torch.no_grad():
                batch = next(batches, None)
                if batch is None:
                    return
                if heads and not batch.labels:
                    unknown = torch.full((len(batch),), math.nan)
                    batch = replace(batch, labels=dict.fromkeys(heads, unknown))
                outputs = model.outputs(batch, model.prepare(batch))
            yield batch, outputs


@contextmanager
def _reading(model: Model, mode: Mode, own: OwnRandom) -> Iterator[None]:
    """Have the task do what it does once for all batches."""
    with ExitStack() as held:
        with own.drawn(), torch.no_grad():
            held.enter_context(model.task.reading(model.module, mode))
        yield


class BestSoFar:
    """Which evaluation was the best, and how many there were since. Its state is part of a checkpoint."""

    def __init__(self, config: EvaluateConfig) -> None:
        self._config = config
        self.metric: str | None = None
        """By which evaluations are compared; None before the first."""
        self.step: int | None = None
        """Of the best one; None before there is one."""
        self.value = math.nan
        self.since = 0
        """Evaluations since then that were no better."""
        self.last_step: int | None = None
        """Of the last evaluation."""
        self.passes = 0.0
        """Epochs between the best evaluation and the last."""

    @property
    def gives_up(self) -> bool:
        """Whether the run is to stop, because too many evaluations in a row were no better.

        With several epochs, not before a whole pass over the data since the best one: within an epoch a
        metric rises and falls with the order of the data.
        """
        patience = self._config.patience
        return patience is not None and self.since >= patience and self.passes >= 1 - _ROUNDING

    def take(self, step: int, metrics: Mapping[str, float], passes: float = 1.0) -> bool:
        """Take in an evaluation; return whether it is the best.

        Args:
            passes: Over the data, since the evaluation before; 1 if the data is read once.

        Raises:
            ConfigError: It has no such metric.
        """
        metric = choose_metric(self._config, metrics)
        if metric != self.metric:
            if self.metric is not None:
                _log.warning("evaluations are compared by %s from now on, not by %s", metric, self.metric)
            self.metric, self.step, self.value, self.since = metric, None, math.nan, 0
        self.last_step = step
        self.passes += passes
        if self._is_better(metrics[metric]):
            self.step, self.value, self.since, self.passes = step, metrics[metric], 0, 0.0
            return True
        self.since += 1
        return False

    def reconcile(self, named: BestCheckpoint | None, step: int) -> None:
        """Believe what the folder names as the best, where it is of this history and better than what is
        known: it was found at the end of a run, after the last save."""
        if named is None or named.metric != self.metric or named.step > step:
            return
        if self._is_better(named.value):
            self.step, self.value, self.since, self.passes = named.step, named.value, 0, 0.0

    def state(self) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "step": self.step,
            "value": None if math.isnan(self.value) else self.value,
            "since": self.since,
            "last_step": self.last_step,
            "passes": self.passes,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.metric, self.step, self.since = state["metric"], state["step"], int(state["since"])
        self.value = math.nan if state["value"] is None else float(state["value"])
        self.last_step = state["last_step"]
        self.passes = float(state.get("passes", 1.0))  # checkpoints of before had none

    def _is_better(self, value: float) -> bool:
        assert self.metric is not None
        if not math.isfinite(value):
            return False
        if self.step is None:
            return True
        gain = value - self.value if self._config.direction(self.metric) == "max" else self.value - value
        return gain > self._config.min_delta


def choose_metric(config: EvaluateConfig, metrics: Mapping[str, float]) -> str:
    """Return the metric by which evaluations are compared; by default the first AUC or RMSE, or the loss.

    Raises:
        ConfigError: There is no such metric.
    """
    wanted = config.metric
    if wanted is None:
        found = [name for name in metrics if name.endswith(HEADLINES)]
        return found[0] if found else LOSS
    found = [name for name in metrics if wanted == name or name.endswith(f"/{wanted}")]
    if not found:
        raise ConfigError(_no_metric(wanted, list(metrics)))
    return found[0]


def _no_metric(wanted: str, there: Sequence[str]) -> str:
    near = difflib.get_close_matches(wanted, there, n=1)
    near = near or difflib.get_close_matches(wanted.rpartition("/")[2], there, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"evaluate: there is no metric {wanted!r}; there are {', '.join(there)}.{hint}"


class KeepsBest(Protocol):
    """Saves the model, and names the best checkpoint."""

    def named_best(self) -> BestCheckpoint | None:
        """Return which checkpoint the folder names as the best."""

    def keep_best(self, run: TrainingRun, step: int, metric: str, value: float) -> None:
        """Save the model as it stands at a step, and name it the best once it is on disk."""

    def name_best(self, step: int, metric: str, value: float) -> None:
        """Name the checkpoint of a step the best, if it is on disk."""


class EvaluatedSession(Protocol):
    """The training session that an `EvaluateHook` measures; `monolith.runtime` has it."""

    @property
    def task(self) -> Task: ...

    @property
    def model(self) -> Model: ...

    @property
    def interrupted(self) -> bool:
        """Whether this process was asked to stop."""

    def fraction_read(self) -> float | None:
        """Return which part of its data this process has trained on, if that is known."""

    def evaluable(self) -> AbstractContextManager[None]:
        """Pause all processes that train the model, every update done."""

    def readable(self) -> AbstractContextManager[None]:
        """Make every row readable by this process, inside of `evaluable`."""


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
        session: EvaluatedSession,
        config: EvaluateConfig,
        best: BestSoFar,
        *,
        seed: int = 0,
        keeper: KeepsBest | None = None,
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
        _check_metric(session.task, config)

        if config.every_epochs is not None and epochs is None:
            raise ConfigError(
                "evaluate: every_epochs counts epochs of the data; set train.epochs, or every_steps instead"
            )

    def after_create(self, run: TrainingRun) -> None:
        if self._every is not None:
            self._every.begin(run.step)
        self._passes_at_last = self._passes()
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
        return 0.0 if read is None else read * self._epochs + _ROUNDING

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
        return Evaluation(step=run.step, metrics=values, examples=examples, seconds=self._clock() - began)

    def _wait(self) -> None:
        if self._config.every is not None:
            self._due_at = self._clock() + self._config.every.total_seconds()

    def _why_early(self) -> str:
        best = f"the best, {self.best.value:.6f}, was at step {self.best.step}"
        return f"stopped early: {self.best.since} evaluations had no better {self.best.metric}; {best}"


def _check_metric(task: Task, config: EvaluateConfig) -> None:
    """Refuse a metric that no evaluation will have, before anything is trained."""
    measures = task.measures(Mode.EVALUATE)
    if config.metric is None or config.metric in measures:
        return
    wanted = task.metrics(Mode.EVALUATE)
    if isinstance(wanted, Mapping):
        there = [f"{head}/{name}" for head, names in wanted.items() for name in names]
    else:
        there = list(wanted)
    kinds = {name.rpartition("/")[2] for name in there}
    kind = config.metric.rpartition("/")[2]
    known_head = not isinstance(wanted, Mapping) or "/" not in config.metric or config.metric in there
    if kind != LOSS and (kind not in kinds or not known_head):
        raise ConfigError(f"task {task.name!r}: {_no_metric(config.metric, [*there, *measures, LOSS])}")
