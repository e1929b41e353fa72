"""Ranks that are evaluated while they train: rank 0 measures the whole model, and the others hand it rows."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from runtime.fleets import read_model
from runtime.rank_data import Steady
from runtime.rank_runs import quiet, train_ranks
from torch import Tensor, nn

from monolith.checkpoint import named_checkpoint
from monolith.data import Stream
from monolith.errors import MonolithError
from monolith.feature import Batch
from monolith.runtime import Trainer
from monolith.store import AllToAllStore
from monolith.train import EvaluateConfig, Mode, Outputs, SaveConfig, TrainConfig

EVALUATED = quiet(
    TrainConfig(), save=SaveConfig(steps=2), evaluate=EvaluateConfig(every_steps=2, steps=3, metric="loss")
)


@dataclass(frozen=True)
class Means(Steady):
    """Whose model has a running mean, which every rank has of its own batches."""

    def model(self) -> nn.Module:
        model = super().model()
        model.add_module("norm", nn.BatchNorm1d(1, affine=False))
        return model

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        found = super().outputs(model, batch)
        norm: Any = model.norm
        scaled: Tensor = norm(next(iter(batch.labels.values()))[:, None]).sum()
        return Outputs(found.loss + scaled, found.predictions)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "eval" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("size", "num_ps", "task", "options"),
    [
        (2, 0, Steady(batches=12), {"prefetch": 0, "async_push": False}),
        (3, 0, Steady(batches=12), {"prefetch": 2}),
        (2, 0, Means(batches=12), {"prefetch": 1}),
        (2, 1, Steady(batches=12), {"prefetch": 1}),
    ],
)
def test_an_evaluation_is_that_of_the_checkpoint_of_its_step(
    size: int, num_ps: int, task: Steady, options: dict[str, Any], tmp_path: Path
) -> None:
    config = replace(EVALUATED, model_dir=str(tmp_path), **options)
    reports = train_ranks([task] * size, config, num_ps=num_ps)
    steps = 12 // size
    assert [report.step for report in reports] == [steps] * size
    assert [report.evaluations for report in reports] == [steps // 2] + [0] * (size - 1)
    found = lines(tmp_path)
    assert [one["step"] for one in found] == list(range(2, steps + 1, 2))
    reader = Trainer(task, replace(config, evaluate=EvaluateConfig()))
    for one in found:
        read = reader.evaluate(steps=3, checkpoint=named_checkpoint(str(tmp_path), str(one["step"])))
        assert one["examples"] == read.pop("examples") == 24
        assert one["metrics"] == pytest.approx(read, rel=1e-5)


def test_training_continues_as_if_it_had_only_been_saved(tmp_path: Path) -> None:
    task, saved = Steady(batches=12), replace(EVALUATED, evaluate=EvaluateConfig(), prefetch=1)
    for name, config in (("without", saved), ("with", replace(saved, evaluate=EVALUATED.evaluate))):
        train_ranks([task] * 2, replace(config, model_dir=str(tmp_path / name)))
    assert read_model(task, tmp_path / "with") == read_model(task, tmp_path / "without")


def test_ranks_stop_early_together(tmp_path: Path) -> None:
    never = EvaluateConfig(every_steps=1, steps=1, metric="loss", min_delta=1e9, patience=2)
    reports = train_ranks([Steady()] * 2, replace(EVALUATED, evaluate=never, model_dir=str(tmp_path)))
    assert [report.step for report in reports] == [3, 3]
    assert "stopped early: 2 evaluations had no better loss" in reports[0].stop_reason
    assert all(report.finished for report in reports)


def test_when_an_evaluation_fails_the_other_ranks_get_the_reason(tmp_path: Path) -> None:
    class Broken(Steady):
        def dataset(self, mode: Mode) -> Stream[Batch]:
            if mode is Mode.EVALUATE:
                raise MonolithError("nothing is withheld")
            return super().dataset(mode)

    with pytest.raises(MonolithError, match="nothing is withheld"):
        train_ranks([Broken()] * 2, replace(EVALUATED, model_dir=str(tmp_path)))


def test_when_a_rank_fails_while_another_evaluates_all_get_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: AllToAllStore) -> None:  # noqa: ARG001
        raise MonolithError("no memory")

    monkeypatch.setattr(AllToAllStore, "answer_solo_lookup", fail)
    with pytest.raises(MonolithError, match=r"rank [12] cannot continue: MonolithError: no memory"):
        train_ranks([Steady()] * 3, replace(EVALUATED, model_dir=str(tmp_path)))
