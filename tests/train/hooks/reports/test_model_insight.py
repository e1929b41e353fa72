"""Feature insight for any module: how far the loss would move without a feature."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from train.tasks import Clicks

from monolith.errors import ConfigError
from monolith.feature import ADDN, CONCAT, NONE, STACK, Batch, FeatureColumn, FeatureSlot, Layout, SlotConfig
from monolith.model import EmbeddingCollection
from monolith.observe.summary_files import read_summaries
from monolith.runtime import Trainer
from monolith.table import Sgd
from monolith.train import Hook, Run, StepResult, TrainConfig
from monolith.train.hooks import ModelInsightHook

NAMES = ("context", "item", "user")


class OwnModule(nn.Module):
    """No layer sees all features; what is read of the context plays no part, and of the bias only a sum."""

    def __init__(self) -> None:
        super().__init__()
        rows = Sgd(learning_rate=0.5)
        slots = [
            FeatureSlot(SlotConfig(name=name, has_bias=True, bias_optimizer=rows, optimizer=rows))
            for name in NAMES
        ]
        context, item, user = (FeatureColumn(slot, slot.name) for slot in slots)
        two = {slot.name: slot.add_slice(2) for slot in slots}
        three = {slot.name: slot.add_slice(3) for slot in slots}
        self.embeddings = EmbeddingCollection(
            [
                Layout("concat", CONCAT, [item.lookup(two["item"]), user.lookup(three["user"])]),
                Layout("stack", STACK, [item.lookup(two["item"]), user.lookup(two["user"])]),
                Layout("apart", NONE, [context.lookup(two["context"]), user.lookup(two["user"])]),
                Layout("bias", ADDN, [item.bias(), user.bias()]),
            ]
        )
        self.weight = nn.Parameter(torch.arange(1.0, 6.0) / 10)

    def forward(self, batch: Batch) -> Tensor:
        read: Any = self.embeddings(batch)
        ignored, user = read["apart"]
        stacked = ((read["stack"][:, 0] + 1) * (read["stack"][:, 1] + 1)).sum(1)
        return (
            (read["concat"] + 1) @ self.weight
            + stacked
            + user.sum(1)
            + 0 * ignored.sum(1)
            + read["bias"].squeeze(1)
        )


@dataclass(frozen=True)
class OwnClicks(Clicks):
    def model(self) -> nn.Module:
        return OwnModule()

    def dense_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)


class Models(Hook):
    def __init__(self) -> None:
        self.seen: list[nn.Module] = []

    def after_step(self, run: Run, result: StepResult) -> None:  # noqa: ARG002
        self.seen.append(run.model)


def test_a_model_of_ones_own_says_what_its_features_bring(tmp_path: Path) -> None:
    models = Models()
    config = TrainConfig(
        model_dir=str(tmp_path), insight_every_steps=5, max_steps=12, summary_every_steps=None
    )
    Trainer(OwnClicks(), config, hooks=[models]).train()
    assert all(isinstance(model, OwnModule) for model in models.seen)  # hooks get the model
    found = list(read_summaries([str(one) for one in (tmp_path / "summaries" / "insight").iterdir()]))
    assert [one.step for one in found] == [5, 10]
    for one in found:
        assert json.loads(one.content)["segment_names"] == ["context", "item", "item+user", "user"]
        assert one.data.shape == (64, 4)
        brings = dict(zip(("context", "item", "bias", "user"), np.abs(one.data).mean(0), strict=True))
        assert brings["context"] == 0
        assert min(brings["item"], brings["user"], brings["bias"]) > 0


class Watched:
    """A run of one step, whose loss is the mean of the logits."""

    step, model_dir = 0, ""

    def __init__(self, model: nn.Module, model_dir: str) -> None:
        self.model, self.model_dir = model, model_dir


def test_it_is_the_change_of_the_loss_to_first_order(tmp_path: Path) -> None:
    task = OwnClicks()
    model = task.model().train()
    batch = next(iter(task.dataset(None)))  # type: ignore[arg-type]
    table = model.embeddings.store
    for name in NAMES:  # rows that are not zero
        some = torch.unique(batch.ids[name].flat_values)
        table.table(name).assign(some, torch.randn(len(some), table.tables[name]) * 0.01)
    hook, run = ModelInsightHook(every_steps=1), Watched(model, str(tmp_path))
    hook.after_create(run)  # type: ignore[arg-type]
    hook.before_step(run)  # type: ignore[arg-type]
    logits = model(batch)
    logits.mean().backward()
    hook.after_step(run, StepResult(1, batch, logits.mean().detach()))  # type: ignore[arg-type]
    hook.close()
    (found,) = read_summaries([str(one) for one in (tmp_path / "summaries" / "insight").iterdir()])
    read = model.embeddings(batch)
    assert found.data[:, 2] == pytest.approx(read["bias"].squeeze(1).abs().detach().numpy(), rel=1e-4)
    item = read["concat"][:, :2] @ model.weight[:2]
    item = item + (read["stack"][:, 0] * (read["stack"][:, 1] + 1)).sum(1)
    assert found.data[:, 1] == pytest.approx(item.abs().detach().numpy(), rel=1e-4)


def test_it_needs_a_row_to_write() -> None:
    with pytest.raises(ConfigError, match="max_rows"):
        ModelInsightHook(max_rows=0)
