"""The summaries of a run: what a TensorBoard reader finds after it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from monolith.errors import ConfigError
from monolith.feature import Batch, FeatureIds
from monolith.observe.summary_files import read_summaries
from monolith.table import TableStats
from monolith.train import Hook, StepResult, drive
from monolith.train.hooks.reports.summaries import SummaryHook
from monolith.train.metrics.metric_set import MetricSet


class Training:
    """A run whose losses are given, on batches of two examples."""

    def __init__(self, model_dir: str, losses: list[float], step: int = 0, by: int = 1) -> None:
        self.step = step
        self.by = by
        self.model_dir = model_dir
        self.stop_reason: str | None = None
        self._losses = iter(losses)
        self.batch = Batch(
            FeatureIds.pack({"user": torch.arange(2)}, event_time=77),
            labels={"click": torch.tensor([0.0, 1.0])},
        )

    def request_stop(self, reason: str) -> None:
        self.stop_reason = self.stop_reason or reason

    def take_step(self) -> StepResult | None:
        loss = next(self._losses, None)
        if loss is None:
            return None
        self.step += self.by
        predictions = {"click": torch.tensor([0.1, 0.9])}
        return StepResult(self.step, self.batch, torch.tensor(loss), predictions)

    def drive(self, *hooks: Hook) -> None:
        drive(self, hooks, step=self.take_step)


def ticking(seconds: float) -> Callable[[], float]:
    ticks = itertools.count()
    return lambda: next(ticks) * seconds


def scalars(model_dir: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    paths = sorted(str(path) for path in (model_dir / "summaries").glob("*tfevents*"))
    for one in read_summaries(paths, "scalars"):
        found.setdefault(one.tag, []).append((one.step, pytest.approx(float(one.data), nan_ok=True)))
    return found


def stats(rows: int, size: int) -> TableStats:
    others: dict[str, Any] = dict.fromkeys(TableStats.__dataclass_fields__, 0)
    return TableStats(**{**others, "rows": rows, "bytes_total": size})


def test_the_loss_is_the_mean_since_the_last_writing_and_the_rest_is_written_at_the_end(
    tmp_path: Path,
) -> None:
    Training(str(tmp_path), [1.0, 3.0, 5.0, 7.0, 100.0]).drive(SummaryHook(every_steps=2))
    assert scalars(tmp_path)["loss"] == [(2, 2.0), (4, 6.0), (5, 100.0)]


def test_speed_is_counted_in_examples(tmp_path: Path) -> None:
    Training(str(tmp_path), [1.0] * 4).drive(SummaryHook(every_steps=2, clock=ticking(0.5)))
    # One tick, half a second, passes between the end of a span and the next writing: 4 examples.
    assert scalars(tmp_path)["examples_per_s"] == [(2, 8.0), (4, 8.0)]


def test_tables_are_shown_by_name(tmp_path: Path) -> None:
    hook = SummaryHook(every_steps=1, stats=lambda: {"user": stats(10, 640), "item": stats(3, 96)})
    Training(str(tmp_path), [1.0]).drive(hook)
    found = scalars(tmp_path)
    assert found["rows/user"] == [(1, 10)]
    assert found["bytes/item"] == [(1, 96)]


def test_metrics_are_shown_when_they_have_something_to_say(tmp_path: Path) -> None:
    metrics = MetricSet.named({"click": ("auc", "gauc")})

    class Measure(Hook):
        def after_step(self, run: object, result: StepResult) -> None:  # noqa: ARG002
            users = result.batch.ids["user"].flat_values
            metrics.update(result.predictions, result.batch.labels, groups=users)

    Training(str(tmp_path), [1.0]).drive(Measure(), SummaryHook(every_steps=1, metrics=metrics))
    found = scalars(tmp_path)
    assert found["metrics/click/auc"] == [(1, 1.0)]
    assert "metrics/click/gauc" not in found  # each user has one example, which ranks nothing


def test_a_loss_that_is_nan_is_shown_as_it_is(tmp_path: Path) -> None:
    Training(str(tmp_path), [math.nan]).drive(SummaryHook(every_steps=1))
    assert scalars(tmp_path)["loss"] == [(1, pytest.approx(math.nan, nan_ok=True))]


def test_a_run_that_goes_on_writes_at_the_same_steps(tmp_path: Path) -> None:
    Training(str(tmp_path), [1.0] * 3, step=7).drive(SummaryHook(every_steps=5))
    assert [step for step, _ in scalars(tmp_path)["loss"]] == [10]


def test_a_run_without_a_folder_writes_nothing(tmp_path: Path) -> None:
    Training("", [1.0] * 3).drive(SummaryHook(every_steps=1))
    assert list(tmp_path.iterdir()) == []


def test_what_was_written_before_a_crash_is_there(tmp_path: Path) -> None:
    class Crash(Hook):
        def after_step(self, run: object, result: StepResult) -> None:  # noqa: ARG002
            if result.step == 3:
                raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        Training(str(tmp_path), [1.0] * 9).drive(SummaryHook(every_steps=2), Crash())
    assert scalars(tmp_path)["loss"] == [(2, 1.0)]


def test_every_steps_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        SummaryHook(every_steps=0)


def test_a_step_that_jumps_over_a_multiple_is_written(tmp_path: Path) -> None:
    Training(str(tmp_path), [1.0] * 8, by=3).drive(SummaryHook(every_steps=10))
    assert [step for step, _ in scalars(tmp_path)["loss"]] == [12, 21, 24]
