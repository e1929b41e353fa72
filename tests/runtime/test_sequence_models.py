"""Models of sequences on parameter servers and ranks: what one process trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.fleets import read_model, run_fleet
from runtime.rank_data import GivenBatches
from runtime.rank_runs import quiet, train_ranks
from torch import nn

from monolith.data import MemorySource, Pipeline, Stream
from monolith.feature import Batch, FeatureSpec, HistoryFeature, IdFeature, Label
from monolith.model import RetrievalModel
from monolith.model.by_name import MODELS
from monolith.runtime import LocalRun, Trainer
from monolith.table import Adagrad
from monolith.train import Hook, Mode, Outputs, SaveConfig, StepResult, Task, TrainConfig, TrainingRun

KINDS = ["hstu", "sasrec", "gru4rec", "sequence_ranker"]
ITEMS = 12
SPEC = FeatureSpec(
    features={
        "item": IdFeature(),
        "action": IdFeature(kind="string"),
        "history": HistoryFeature(of="item", max=6, with_=("action", "time")),
    },
    labels={"click": Label()},
    event_time="time",
)


def batches_of(count: int, seed: int = 0, users: int = 16) -> list[Batch]:
    """Users who step from each item to the third after it; a click is what follows an item below 6."""
    draw = torch.Generator().manual_seed(seed)
    first = torch.randint(0, ITEMS, (count * users,), generator=draw).tolist()
    lengths = torch.randint(1, 8, (count * users,), generator=draw).tolist()
    steps = [
        [(one + 3 * n) % ITEMS for n in range(many + 1)] for one, many in zip(first, lengths, strict=True)
    ]
    times = [[1_700_000_000 + 60 * n for n in range(len(one))] for one in steps]
    columns = {
        "item": [one[-1] for one in steps],
        "action": ["view"] * len(steps),
        "time": [one[-1] for one in times],
        "click": [float(one[-2] < ITEMS // 2) for one in steps],
        "history": [one[:-1] for one in steps],
        "history.action": [[("view", "buy")[item % 2] for item in one[:-1]] for one in steps],
        "history.time": [one[:-1] for one in times],
    }
    return list(Pipeline(MemorySource(columns, batch_size=users)).to_batches(SPEC))


@dataclass(frozen=True)
class Steps(Task):
    """Trains a model of sequences on batches that are in memory."""

    kind: str
    batches: Sequence[Batch]

    def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
        found: Any = GivenBatches(self.batches)
        return found

    def model(self) -> nn.Module:
        make: Any = MODELS[self.kind]
        settings = {"hidden": (8,)} if self.kind == "sequence_ranker" else {"negatives": ITEMS}
        model: nn.Module = make(
            SPEC, dim=8, layers=1, dropout=0.0, optimizer=Adagrad(learning_rate=0.3), threads=1, **settings
        )
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():  # the same on every thread that makes one
            for weight in model.parameters():
                weight.copy_(torch.rand(weight.shape, generator=draw) - 0.5)
        return model

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        if not isinstance(model, RetrievalModel):
            return super().outputs(model, batch)
        picked = model.pick(batch)
        return Outputs(picked.loss, {"click": picked.scores})

    def dense_optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        return torch.optim.Adam(model.parameters(), 0.01)

    def metrics(self, mode: Mode) -> Sequence[str]:  # noqa: ARG002
        return ()


class Watch(Hook):
    """Keeps the loss of each step, and the weights at the end."""

    def __init__(self, run: LocalRun) -> None:
        self._run = run
        self.losses: list[float] = []
        self.weights: dict[str, torch.Tensor] = {}

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        self.losses.append(float(result.loss))
        found = self._run.session.model.module.named_parameters()
        self.weights = {name: weight.detach().clone() for name, weight in found}


@pytest.mark.parametrize("kind", KINDS)
def test_one_worker_trains_the_same_bits_on_servers_as_alone(kind: str, tmp_path: Path) -> None:
    task = Steps(kind, batches_of(6))
    how: dict[str, Any] = {"deterministic": True, "save": SaveConfig(steps=6)}
    run_fleet(task, tmp_path / "fleet", num_workers=1, **how)
    alone = TrainConfig(model_dir=str(tmp_path / "alone"), summary_every_steps=None, fresh_rows=False, **how)
    Trainer(task, alone).train()
    fleet, one = read_model(task, tmp_path / "fleet"), read_model(task, tmp_path / "alone")
    assert fleet.step == one.step == 6
    assert fleet.weights == one.weights
    assert fleet.rows == one.rows
    assert set(one.rows) >= {"action", "item"}


@pytest.mark.parametrize("kind", KINDS)
def test_workers_and_ranks_learn_together(kind: str, tmp_path: Path) -> None:
    tasks = [Steps(kind, batches_of(40, seed)) for seed in range(2)]
    workers: dict[int, Watch] = {}

    def watched(number: int, run: LocalRun) -> list[Hook]:
        workers[number] = Watch(run)
        return [workers[number]]

    run_fleet(
        tasks[0],
        tmp_path / "fleet",
        task_of=tasks.__getitem__,
        hooks=lambda number: lambda run: watched(number, run),
    )
    assert read_model(tasks[0], tmp_path / "fleet").step == 80
    assert all(learned(one.losses) for one in workers.values())
    config = quiet(TrainConfig(model_dir=str(tmp_path / "ranks")), prefetch=0, async_push=False)
    train_ranks(tasks, config, hooks=watched)
    assert read_model(tasks[0], tmp_path / "ranks").step == 40
    assert all(learned(one.losses) for one in workers.values())
    assert all(torch.equal(weight, workers[1].weights[name]) for name, weight in workers[0].weights.items())


def learned(losses: Sequence[float]) -> bool:
    return sum(losses[-5:]) < 0.7 * sum(losses[:5])


def test_ranks_train_the_ranker_that_one_process_trains_of_their_batches_together(tmp_path: Path) -> None:
    whole = batches_of(4, users=32)
    halves = batches_of(8, users=16)  # the same examples
    config = quiet(TrainConfig(), prefetch=0, async_push=False)
    task = Steps("sequence_ranker", whole)
    Trainer(task, replace(config, model_dir=str(tmp_path / "one"))).train()
    tasks = [replace(task, batches=halves[rank::2]) for rank in range(2)]
    train_ranks(tasks, replace(config, model_dir=str(tmp_path / "ranks")))
    one, ranks = (read_model(task, tmp_path / name) for name in ("one", "ranks"))
    assert one.step == ranks.step == 4
    for name, weight in one.weights.items():
        torch.testing.assert_close(torch.tensor(ranks.weights[name]), torch.tensor(weight))
    for name, rows in one.rows.items():
        assert rows.keys() == ranks.rows[name].keys()
        for key, (_, value, _) in rows.items():
            found = torch.tensor(ranks.rows[name][key][1])
            torch.testing.assert_close(found, torch.tensor(value), rtol=1e-4, atol=1e-5)
