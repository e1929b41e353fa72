"""A task whose model, data or columns do not fit says which, and where it is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from monolith.data import BatchSpec, MemorySource, Pipeline, Stream
from monolith.errors import DataError, FeatureError, MonolithError
from monolith.feature import Batch
from monolith.model import DeepFM
from monolith.nn import Target
from monolith.runtime import Trainer
from monolith.train import Hook, Mode, Outputs, StepResult, Task, TrainConfig, TrainingRun

SPEC = BatchSpec(ids=("user", "item"), event_time=None)
COLUMNS = {"user": [1, 2, 3, 4], "item": [5, 6, 7, 8], "label": [0, 1, 1, 0]}


class Shaped(nn.Module):
    """A model whose logits are handed on as somebody wants them."""

    def __init__(self, shape: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner = DeepFM(["user", "item"], dim=2, hidden=(2,), threads=1)
        self.shape = shape

    def forward(self, batch: Batch) -> Any:
        return self.shape(self.inner(batch))


@dataclass(frozen=True)
class Likes(Task):
    """Four records, two to a batch."""

    columns: Mapping[str, Any] = field(default_factory=lambda: COLUMNS)
    spec: BatchSpec = SPEC
    features: tuple[str, ...] = ("user", "item")
    shape: Callable[[Tensor], Any] | None = None

    def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
        return Pipeline(MemorySource(self.columns, batch_size=2)).to_batches(self.spec)

    def model(self) -> nn.Module:
        if self.shape is not None:
            return Shaped(self.shape)
        return DeepFM(list(self.features), dim=2, hidden=(2,), threads=1)


def without(*names: str) -> dict[str, Any]:
    return {name: column for name, column in COLUMNS.items() if name not in names}


def test_a_label_of_whole_numbers_trains() -> None:
    assert Trainer(Likes()).train().examples == 4


@pytest.mark.parametrize("name", ["user", "item", "label"])
def test_a_column_that_the_data_lacks_ends_the_run_before_its_first_step(name: str) -> None:
    with pytest.raises(DataError, match=f"no column '{name}'; the columns that are read are "):
        Trainer(Likes(columns=without(name))).train()


def test_a_feature_of_the_model_that_batches_lack_is_named_with_the_nearest() -> None:
    with pytest.raises(
        FeatureError, match=r"reads feature 'itm'.*they have user, item\. Did you mean 'item'"
    ):
        Trainer(Likes(features=("user", "itm"))).train()


def test_a_model_without_labels_is_neither_trained_nor_evaluated_but_predicts(tmp_path: Path) -> None:
    unlabelled = Likes(columns=without("label"), spec=replace(SPEC, optional=("label",)))
    with pytest.raises(DataError, match="the batches to train on have no labels"):
        Trainer(unlabelled).train()
    config = TrainConfig(model_dir=str(tmp_path))
    Trainer(Likes(), config).train()
    with pytest.raises(DataError, match="the batches to evaluate on have no labels"):
        Trainer(unlabelled, config).evaluate()
    assert [len(batch) for batch, _ in Trainer(unlabelled, config).predict()] == [2, 2]


class OwnLoss(Likes):
    """Needs no labels."""

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        logits = model(batch)
        return Outputs(logits.square().mean(), {"size": logits})


def test_a_loss_that_needs_no_labels_trains_without() -> None:
    task = OwnLoss(columns=without("label"), spec=replace(SPEC, labels={}))
    assert Trainer(task).train().steps == 2


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        (torch.mean, r"a tensor of shape \(\)"),
        (lambda logits: logits[None, None], r"a tensor of shape \(1, 1, 2\)"),
        (lambda logits: torch.stack([logits] * 3, 1), "3 columns for 1 labels"),
        (lambda logits: logits[:1], r"shape \(1,\) for 'label'"),
        (lambda logits: {"click": logits}, "a dict without 'label': it has 'click'"),
        (lambda logits: {"label": logits.mean()}, r"shape \(\) for 'label'"),
        (lambda logits: {"label": 0.5}, "float for 'label'"),  # noqa: ARG005
        (lambda logits: [logits], "a list"),
    ],
    ids=["scalar", "deep", "columns", "short", "no_label", "scalar_in_dict", "number", "list"],
)
def test_what_a_model_returns_is_checked_and_the_model_s_line_is_named(
    shape: Callable[[Tensor], Any], found: str
) -> None:
    here = f"{Path(__file__).name}:{Shaped.forward.__code__.co_firstlineno}"
    with pytest.raises(FeatureError, match=rf"forward of Shaped \(.*{here}\) returns {found}.*Return logits"):
        Trainer(Likes(shape=shape)).train()


def test_data_without_an_example_is_an_error_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    nothing = Likes(columns={"user": [], "item": [], "label": []})
    with pytest.raises(DataError, match=r"'likes': dataset\(Mode.TRAIN\) has no examples"):
        Trainer(nothing, TrainConfig(model_dir=str(tmp_path))).train()
    assert not list(tmp_path.glob("model.ckpt-*"))


REGRESSION = {"seconds": Target(loss="mse")}
TWO_SPEC = replace(SPEC, labels={"label": ("label", 0), "seconds": ("seconds", 0)})


@dataclass(frozen=True)
class TwoLabels(Likes):
    """Has a class and a number as labels, and whatever targets and metrics a test wants."""

    columns: Mapping[str, Any] = field(default_factory=lambda: {**COLUMNS, "seconds": [1.0, 2.0, 3.0, 4.0]})
    spec: BatchSpec = TWO_SPEC
    shape: Callable[[Tensor], Any] | None = lambda logits: torch.stack([logits, logits], 1)
    named: Mapping[str, Target] = field(default_factory=lambda: REGRESSION)
    wanted: Mapping[str, Sequence[str]] | None = None

    def targets(self) -> Mapping[str, Target]:
        return self.named

    def metrics(self, mode: Mode) -> Any:
        return super().metrics(mode) if self.wanted is None else self.wanted


def test_a_label_that_neither_targets_nor_metrics_name_has_the_metrics_of_a_class(tmp_path: Path) -> None:
    config = TrainConfig(model_dir=str(tmp_path))
    assert Trainer(TwoLabels(), config).train().checkpoint is not None
    found = Trainer(TwoLabels(), config).evaluate()
    assert {"label/auc", "seconds/rmse"} <= found.keys()
    only = Trainer(TwoLabels(wanted={"seconds": ("mae",), "label": ()}), config).evaluate()
    assert only.keys() == {"seconds/mae", "loss", "examples"}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"named": {**REGRESSION, "lable": Target()}}, r"targets\(\) names 'lable'.*mean 'label'\?"),
        ({"wanted": {"labl": ("auc",)}}, r"metrics\(\) names 'labl'.*Did you mean 'label'\?"),
        ({"wanted": {"label": ("acu",)}}, "no metric is called 'acu'; did you mean 'auc'"),
        ({"wanted": {"seconds": ("auc",)}}, "auc: labels must be 0 or 1"),
        ({"wanted": {"label": ("gauc",)}}, "groups"),
    ],
)
def test_targets_and_metrics_are_checked_before_the_first_step(wrong: dict[str, Any], words: str) -> None:
    steps: list[int] = []

    class Count(Hook):
        def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
            steps.append(result.step)

    with pytest.raises(MonolithError, match=words):
        Trainer(TwoLabels(**wrong), hooks=[Count()]).train()
    assert not steps


@pytest.mark.parametrize(("size", "epochs", "steps"), [(4, 1, 1), (9, 1, 1), (4, 3, 3), (2, 1, None)])
def test_a_batch_as_large_as_the_data_is_warned_of(
    caplog: pytest.LogCaptureFixture, size: int, epochs: int, steps: int | None
) -> None:
    class Sized(Likes):
        def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
            return Pipeline(MemorySource(self.columns, batch_size=size)).to_batches(self.spec)

    Trainer(Sized(), TrainConfig(epochs=epochs)).train()
    said = [one.getMessage() for one in caplog.records if "as large as all the data" in one.getMessage()]
    assert len(said) == (steps is not None)
    made = "one step" if steps == 1 else f"{steps} steps in {epochs} epochs"
    assert all(f"4 examples made {made}" in one for one in said)
