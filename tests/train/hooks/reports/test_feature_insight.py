"""Feature insight: what is computed, and what a training run writes of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from monolith.errors import ConfigError, LayerArgumentError
from monolith.feature import Batch, FeatureIds
from monolith.nn import Dense
from monolith.observe.summary_files import StoredSummary, read_summaries
from monolith.train import Hook, StepResult, drive
from monolith.train.hooks.reports.feature_insight import FeatureInsightHook, feature_insight_data

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


class Training:
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
