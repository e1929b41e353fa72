"""Buffers of a module, such as running means, in a fleet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.fleets import Outcome, Tallied, TalliedModel, read_model, run_fleet
from torch import Tensor, nn

from monolith.feature import Batch
from monolith.runtime.fleet_placement import merge_buffers
from monolith.train import Hook, StepResult, TrainingRun


def tensors(*values: Any) -> list[Tensor]:
    return [torch.tensor(value) for value in values]


# One for all


def test_numbers_are_the_mean_by_the_examples_that_each_has_trained_on() -> None:
    merged = merge_buffers(tensors([0.0]), [(30, tensors([1.0])), (10, tensors([5.0])), (0, tensors([0.0]))])
    assert merged[0].tolist() == [2.0]


def test_counters_are_what_all_began_with_and_what_each_has_added() -> None:
    merged = merge_buffers(tensors(100), [(8, tensors(103)), (16, tensors(105)), (0, tensors(100))])
    assert merged[0].item() == 108
    assert merge_buffers(tensors(0), [(8, tensors(6)), (8, tensors(6))])[0].item() == 12


def test_unchanged_buffers_stay_to_the_bit() -> None:
    tenth = torch.tensor([0.1, float("inf")])
    assert torch.equal(merge_buffers([tenth], [(3, [tenth]), (4, [tenth]), (7, [tenth])])[0], tenth)


@pytest.mark.parametrize("own", [[True, False], [1.5], [1 + 2j]])
def test_what_cannot_be_added_up_or_was_made_of_nothing_is_the_chiefs(own: Any) -> None:
    other = torch.zeros_like(torch.tensor(own))
    total = 0 if own == [1.5] else 9
    assert merge_buffers([other], [(total, tensors(own)), (total, [other])])[0].tolist() == own


# In a run


class Normed(TalliedModel):
    """Normalizes its logits, so that each worker has means of its own."""

    def __init__(self) -> None:
        super().__init__(0, None)
        self.norm = nn.BatchNorm1d(1, momentum=0.5)

    def forward(self, batch: Batch) -> Tensor:
        logits: Tensor = self.norm(super().forward(batch)[:, None])[:, 0]
        return logits


@dataclass(frozen=True)
class NormedTask(Tallied):
    def model(self) -> nn.Module:
        return Normed()


class Watch(Hook):
    """Notes the buffers of a worker at its first step and after its last."""

    def __init__(self, into: dict[str, Any]) -> None:
        self._into = into
        self._run: Any = None

    def of(self, run: Any) -> list[Hook]:
        self._run = run
        return [self]

    def _norm(self) -> nn.BatchNorm1d:
        norm: nn.BatchNorm1d = self._run.session.model.module.norm
        return norm

    def before_step(self, run: TrainingRun) -> None:  # noqa: ARG002
        assert self._norm().running_mean is not None
        self._into.setdefault("first", (self._norm().running_mean.item(), self._tracked()))

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        self._into["mean"] = self._norm().running_mean.item()  # type: ignore[union-attr, operator]
        self._into["examples"] = self._into.get("examples", 0) + result.examples
        self._into["batches"] = self._into.get("batches", 0) + 1

    def _tracked(self) -> int:
        return int(self._norm().num_batches_tracked.item())  # type: ignore[union-attr, operator]


def watched(task: NormedTask, model_dir: Path, num_workers: int) -> tuple[Outcome, list[dict[str, Any]]]:
    seen: list[dict[str, Any]] = [{} for _ in range(num_workers)]
    outcome = run_fleet(task, model_dir, num_workers=num_workers, hooks=lambda worker: Watch(seen[worker]).of)
    return outcome, seen


def test_a_checkpoint_has_the_means_of_all_workers_and_all_of_them_resume_from_it(tmp_path: Path) -> None:
    task = NormedTask(batches=12)
    outcome, seen = watched(task, tmp_path, 2)
    assert outcome.chief.step == 12
    saved = read_model(task, tmp_path).weights
    total = sum(one["examples"] for one in seen)
    expected = sum(one["mean"] * one["examples"] / total for one in seen)
    assert saved["norm.running_mean"] == pytest.approx([expected])
    assert seen[0]["mean"] != seen[1]["mean"]
    assert saved["norm.num_batches_tracked"] == sum(one["batches"] for one in seen) == 12

    longer = NormedTask(batches=24)
    _, again = watched(longer, tmp_path, 2)
    assert [one["first"] for one in again] == [(saved["norm.running_mean"][0], 12)] * 2
    assert read_model(longer, tmp_path).weights["norm.num_batches_tracked"] == 24


def test_one_worker_saves_its_own(tmp_path: Path) -> None:
    task = NormedTask(batches=5)
    _, (seen,) = watched(task, tmp_path, 1)
    saved = read_model(task, tmp_path).weights
    assert (saved["norm.running_mean"], saved["norm.num_batches_tracked"]) == ([seen["mean"]], 5)
