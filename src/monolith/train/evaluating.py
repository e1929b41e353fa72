"""Evaluation on held-out data: the metrics of a model, and which of the evaluations of a run was the best.

The best evaluation and its age are part of every checkpoint: a run that was killed continues to compare as if
it had not been. `monolith.runtime.evaluate_hook` evaluates while a run trains.
"""

from __future__ import annotations

import difflib
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

import torch

from monolith.checkpoint import BestCheckpoint
from monolith.data import Stream, as_stream
from monolith.errors import ConfigError
from monolith.feature import Batch
from monolith.train.evaluate_config import HEADLINES, LOSS, EvaluateConfig
from monolith.train.metrics.heads import HeadMetrics
from monolith.train.model import Model, OwnRandom
from monolith.train.task import Mode, Outputs, Task

_log = logging.getLogger(__name__)


ROUNDING = 1e-6
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
        raise ConfigError(_no_examples(task))
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
        return patience is not None and self.since >= patience and self.passes >= 1 - ROUNDING

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


def check_first_batch(model: Model, config: EvaluateConfig, own: OwnRandom) -> None:
    """Look at the first batch of the evaluation data, before anything is trained.

    Live data is left alone: there may be no batch for now.

    Raises:
        ConfigError: There is none, or no evaluation will have the metric that they are compared by.
        MetricError: The metrics cannot be computed of it.
        DataError: It cannot be read.
        FeatureError: Its batches are made by another spec than the data to train on.
    """
    task = model.task
    with own.drawn():
        stream = as_stream(task.dataset(Mode.EVALUATE))
    with closing(stream), own.drawn():
        model.check_spec(stream.spec)
        if stream.live:
            return
        batch = next(iter(stream), None)
    if batch is None:
        raise ConfigError(_no_examples(task))
    if batch.labels:
        guesses = {head: torch.full((len(batch),), 0.5) for head in batch.labels}
        names = HeadMetrics(task, Mode.EVALUATE).check(guesses, batch)
        choose_metric(config, dict.fromkeys([*names, *task.measures(Mode.EVALUATE), LOSS], 0.0))


def _no_examples(task: Task) -> str:
    return f"task {task.name!r}: dataset(Mode.EVALUATE) has no examples"


def check_metric(task: Task, config: EvaluateConfig) -> None:
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
    if isinstance(wanted, Mapping):  # labels that are not named have the metrics of their target
        kinds |= set(task.target("").metrics)
    head = config.metric.rpartition("/")[0]
    known_head = not isinstance(wanted, Mapping) or head not in wanted or config.metric in there
    if kind != LOSS and (kind not in kinds or not known_head):
        raise ConfigError(f"task {task.name!r}: {_no_metric(config.metric, [*there, *measures, LOSS])}")
