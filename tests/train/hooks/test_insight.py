"""Feature insight: what is computed, and what a training run writes of it."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from train.runs import WithSummaries
from train.tasks import Clicks

from monolith.errors import ConfigError, LayerArgumentError
from monolith.feature import (
    ADDN,
    CONCAT,
    NONE,
    STACK,
    Batch,
    FeatureColumn,
    FeatureIds,
    FeatureSlot,
    Layout,
    SlotConfig,
)
from monolith.model import EmbeddingCollection
from monolith.nn import Dense
from monolith.observe.summaries import StoredSummary, read_summaries
from monolith.runtime import Trainer
from monolith.table import Sgd
from monolith.train import Hook, StepResult, TrainConfig, TrainingRun, drive
from monolith.train.hooks import ModelInsightHook
from monolith.train.hooks.insight import FeatureInsightHook, feature_insight_data

NAMES, SIZES = ["f1", "f2", "f3"], [3, 5, 9]


def by_loop(inputs: Tensor, weight: Tensor) -> Tensor:
    parts = [x @ w for x, w in zip(inputs.split(SIZES, 1), weight.split(SIZES, 0), strict=True)]
    return torch.cat(parts, 1)


@pytest.fixture
def inputs() -> Tensor:
    return torch.randn(3, 17, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(17, 2, generator=torch.Generator().manual_seed(1))


def test_with_weight_and_label_each_segment_has_a_column_for_each_output(
    inputs: Tensor, weight: Tensor
) -> None:
    summary = feature_insight_data(inputs, NAMES, SIZES, weight, label=torch.tensor([0, 1, 0]))
    assert summary.data.shape == (3, 7)
    assert summary.content == (
        b'{"tag_type": "fi_train", "segment_names": ["f1", "f2", "f3"], "segment_sizes": [2, 2, 2], '
        b'"group_index": [0, 1, 2], "label_size": 1}'
    )
    assert summary.tag == "fi_train/monolith_feature_insight"
    np.testing.assert_allclose(summary.data[:, :6], by_loop(inputs, weight), rtol=1e-5)
    assert summary.data[:, 6].tolist() == [0, 1, 0]


def test_with_a_weight_alone_each_segment_has_the_sum_of_its_squares(inputs: Tensor, weight: Tensor) -> None:
    summary = feature_insight_data(inputs, NAMES, SIZES, weight)
    squares = by_loop(inputs, weight).reshape(3, 3, 2).square().sum(-1)
    np.testing.assert_allclose(summary.data, squares, rtol=1e-5)
    assert json.loads(summary.content) == {
        "tag_type": "fi_direct",
        "segment_names": NAMES,
        "segment_sizes": [1, 1, 1],
        "label_size": 0,
    }


def test_without_a_weight_the_inputs_are_written_as_they_are(inputs: Tensor) -> None:
    summary = feature_insight_data(inputs, NAMES, SIZES, name="user")
    np.testing.assert_array_equal(summary.data, inputs)
    assert summary.tag == "user_fi_direct/monolith_feature_insight"


def test_empty_segments_and_lengths_that_differ_are_refused(inputs: Tensor, weight: Tensor) -> None:
    with pytest.raises(ConfigError, match="at least one, got 0 and 0"):
        feature_insight_data(inputs, [], [], weight)
    with pytest.raises(ConfigError, match="got 2 and 3"):
        feature_insight_data(inputs, NAMES, [3, 14], weight)
    with pytest.raises(LayerArgumentError, match="sum to the width"):
        feature_insight_data(inputs, NAMES, [3, 5, 8], weight)


# The hook


class Training(WithSummaries):
    """A run of a few steps of one layer, whose batches are all alike."""

    def __init__(self, model_dir: str, layer: Dense, steps: int, by: int = 1) -> None:
        self.step = 0
        self.by = by
        self.model_dir = model_dir
        self.stop_reason: str | None = None
        self.layer = layer
        self.steps = steps
        self.inputs = torch.arange(12.0).reshape(4, 3)
        self.batch = Batch(
            FeatureIds.pack({"user": torch.arange(4)}), labels={"click": torch.tensor([0.0, 1, 0, 1])}
        )

    def request_stop(self, reason: str) -> None:
        self.stop_reason = self.stop_reason or reason

    def take_step(self) -> StepResult | None:
        if self.step == self.steps:
            return None
        self.step += self.by
        return StepResult(self.step, self.batch, self.layer(self.inputs).sum().detach())

    def drive(self, *hooks: Hook) -> None:
        with closing(self):
            drive(self, hooks, step=self.take_step)


def written(model_dir: Path) -> list[StoredSummary]:
    return list(read_summaries(sorted(str(path) for path in model_dir.rglob("*tfevents*"))))


def test_a_run_writes_every_so_many_steps(tmp_path: Path) -> None:
    layer = Dense(3, 2)
    Training(str(tmp_path), layer, 7).drive(FeatureInsightHook(layer, {"a": 1, "b": 2}, every_steps=3))
    found = written(tmp_path)
    assert [one.step for one in found] == [3, 6]
    assert found[0].tag == "fi_direct/monolith_feature_insight"
    assert found[0].data.shape == (4, 2)
    parts = torch.cat(
        [
            x @ w
            for x, w in zip(
                torch.arange(12.0).reshape(4, 3).split([1, 2], 1),
                layer.kernel().split([1, 2], 0),
                strict=True,
            )
        ],
        1,
    ).reshape(4, 2, 2)
    np.testing.assert_allclose(found[0].data, parts.square().sum(-1).detach(), rtol=1e-5)


def test_with_a_label_its_columns_are_written_too_and_rows_are_limited(tmp_path: Path) -> None:
    layer = Dense(3, 2)
    hook = FeatureInsightHook(layer, {"a": 1, "b": 2}, label="click", every_steps=1, max_rows=2)
    Training(str(tmp_path), layer, 1).drive(hook)
    (found,) = written(tmp_path)
    assert found.data.shape == (2, 5)
    assert found.data[:, 4].tolist() == [0, 1]
    assert json.loads(found.content)["segment_sizes"] == [2, 2]


def test_steps_in_between_are_not_watched(tmp_path: Path) -> None:
    layer = Dense(3, 2)
    watched: list[bool] = []

    class Look(Hook):
        def before_step(self, run: object) -> None:  # noqa: ARG002
            watched.append(bool(layer._forward_hooks))

    Training(str(tmp_path), layer, 4).drive(FeatureInsightHook(layer, {"a": 3}, every_steps=2), Look())
    assert watched[:4] == [False, True, False, True]
    assert not layer._forward_hooks


def test_a_run_without_a_folder_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    layer = Dense(3, 2)
    Training("", layer, 2).drive(FeatureInsightHook(layer, {"a": 3}, every_steps=1))
    assert list(tmp_path.iterdir()) == []


def test_steps_that_jump_are_written_too(tmp_path: Path) -> None:
    layer = Dense(3, 2)
    Training(str(tmp_path), layer, 24, by=3).drive(FeatureInsightHook(layer, {"a": 3}, every_steps=5))
    assert [one.step for one in written(tmp_path)] == [9, 12, 18, 24]  # the first after each multiple


# Feature insight for any module: how far the loss would move without a feature.


FEATURES = ("context", "item", "user")


class OwnModule(nn.Module):
    """No layer sees all features; what is read of the context plays no part, and of the bias only a sum."""

    def __init__(self) -> None:
        super().__init__()
        rows = Sgd(learning_rate=0.5)
        slots = [
            FeatureSlot(SlotConfig(name=name, has_bias=True, bias_optimizer=rows, optimizer=rows))
            for name in FEATURES
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

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        self.seen.append(run.model)


def test_a_model_of_ones_own_says_what_its_features_bring(tmp_path: Path) -> None:
    models = Models()
    config = TrainConfig(
        model_dir=str(tmp_path), insight_every_steps=5, max_steps=12, summary_every_steps=None
    )
    Trainer(OwnClicks(), config, hooks=[models]).train()
    assert all(isinstance(model, OwnModule) for model in models.seen)  # hooks get the model
    found = written(tmp_path)
    assert [one.step for one in found] == [5, 10]
    for one in found:
        assert json.loads(one.content)["segment_names"] == ["context", "item", "item+user", "user"]
        assert one.data.shape == (64, 4)
        brings = dict(zip(("context", "item", "bias", "user"), np.abs(one.data).mean(0), strict=True))
        assert brings["context"] == 0
        assert min(brings["item"], brings["user"], brings["bias"]) > 0


class Watched(WithSummaries):
    """A run of one step, whose loss is the mean of the logits."""

    step, model_dir = 0, ""

    def __init__(self, model: nn.Module, model_dir: str) -> None:
        self.model, self.model_dir = model, model_dir


def test_it_is_the_change_of_the_loss_to_first_order(tmp_path: Path) -> None:
    task = OwnClicks()
    model = task.model().train()
    batch = next(iter(task.dataset(None)))  # type: ignore[arg-type]
    table = model.embeddings.store
    for name in FEATURES:  # rows that are not zero
        some = torch.unique(batch.ids[name].flat_values)
        table.table(name).assign(some, torch.randn(len(some), table.tables[name]) * 0.01)
    hook, run = ModelInsightHook(every_steps=1), Watched(model, str(tmp_path))
    hook.after_create(run)  # type: ignore[arg-type]
    hook.before_step(run)  # type: ignore[arg-type]
    logits = model(batch)
    logits.mean().backward()
    hook.after_step(run, StepResult(1, batch, logits.mean().detach()))  # type: ignore[arg-type]
    hook.close()
    run.close()
    (found,) = written(tmp_path)
    read = model.embeddings(batch)
    assert found.data[:, 2] == pytest.approx(read["bias"].squeeze(1).abs().detach().numpy(), rel=1e-4)
    item = read["concat"][:, :2] @ model.weight[:2]
    item = item + (read["stack"][:, 0] * (read["stack"][:, 1] + 1)).sum(1)
    assert found.data[:, 1] == pytest.approx(item.abs().detach().numpy(), rel=1e-4)


def test_it_needs_a_row_to_write() -> None:
    with pytest.raises(ConfigError, match="max_rows"):
        ModelInsightHook(max_rows=0)
