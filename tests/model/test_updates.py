"""apply_gradients: everything that happens between a loss and changed parameters, in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from monolith.errors import ConfigError, NonFiniteError, UnknownTableError
from monolith.feature import CONCAT, FeatureColumn, FeatureSlot, Layout, SlotConfig
from monolith.model import EmbeddingCollection, EmbeddingOptimizer, UpdateConfig, apply_gradients
from monolith.nn import GradClipType
from monolith.store import LocalStore
from monolith.table import Sgd


class Setting:
    """One weight of 1 and one row of ones, both trained by plain descent with a rate of 1."""

    def __init__(self) -> None:
        slot = FeatureSlot(SlotConfig(name="f", optimizer=Sgd(), learning_rate=1.0))
        vector = slot.add_slice(4)
        self.embeddings = EmbeddingCollection(
            [Layout("f", CONCAT, [FeatureColumn(slot, "f").lookup(vector)])]
        )
        assert isinstance(self.embeddings.store, LocalStore)
        self.table = self.embeddings.store.table("f")
        self.table.assign(torch.tensor([1]), torch.ones(1, 4))
        self.weight = nn.Parameter(torch.tensor(1.0))
        self.sparse = EmbeddingOptimizer(self.embeddings)
        self.dense = torch.optim.SGD([self.weight], lr=1.0)

    def run(self, *, dense: bool = True, scale: float = 1.0, together: Any = None, **config: Any) -> Any:
        row = self.embeddings({"f": torch.tensor([1])})["f"][0]
        loss = scale * (row[:3].sum() + (self.weight if dense else 0))
        return apply_gradients(
            loss, self.sparse, self.dense if dense else None, UpdateConfig(**config), together=together
        )

    @property
    def row(self) -> list[float]:
        found: list[float] = self.table.lookup(torch.tensor([1]))[0].tolist()
        return found


def test_without_settings_it_is_a_plain_step() -> None:
    setting = Setting()
    assert setting.run() is None
    assert (setting.weight.item(), setting.row) == (0, [0, 0, 0, 1])
    assert (setting.sparse.global_step, setting.weight.grad) == (1, None)


def test_where_others_take_steps_too_the_rows_are_told_which_this_was() -> None:
    """In between: the weights were updated when it is asked, and the rows were not."""
    setting, asked = Setting(), []

    def count() -> int:
        asked.append((setting.weight.item(), setting.row))
        return 7

    row = setting.embeddings({"f": torch.tensor([1])})["f"][0]
    apply_gradients(row[:3].sum() + setting.weight, setting.sparse, setting.dense, count=count)
    assert asked == [(0.0, [1, 1, 1, 1])]
    assert (setting.row, setting.sparse.global_step) == ([0, 0, 0, 1], 7)


def test_one_norm_holds_for_dense_and_sparse_gradients() -> None:
    setting = Setting()
    assert setting.run(clip_norm=1.0).item() == 2
    assert (setting.weight.item(), setting.row) == (0.5, [0.5, 0.5, 0.5, 1])


def test_without_dense_weights_rows_are_trained_and_the_step_counts() -> None:
    setting = Setting()
    setting.run(dense=False)
    assert (setting.row, setting.sparse.global_step) == ([0, 0, 0, 1], 1)


def test_dense_gradients_are_divided_before_the_norm_is_taken() -> None:
    setting = Setting()
    norm = setting.run(divide_dense_by=2, clip_norm=100.0)
    assert_close(norm, torch.tensor(3.25**0.5))
    assert setting.weight.item() == 0.5


def test_weight_decay_comes_after_clipping() -> None:
    setting = Setting()
    setting.run(clip_norm=1.0, dense_weight_decay=0.25)
    assert setting.weight.item() == 0.25


def test_dense_and_sparse_norms_can_be_apart() -> None:
    setting = Setting()
    setting.run(clip_type=GradClipType.ClipByDenseAndSparse, clip_norm=0.5, sparse_clip_norm=3**0.5 / 2)
    assert_close(torch.tensor([setting.weight.item(), *setting.row]), torch.tensor([0.5, 0.5, 0.5, 0.5, 1]))


def test_the_sparse_limit_can_warm_up() -> None:
    setting = Setting()
    setting.sparse.global_step = 1
    setting.run(clip_norm=2.0, sparse_norm_warmup_steps=4)
    assert (setting.weight.item(), setting.row[0]) == (0, 0.75)  # a quarter of the limit, of the norm 2


class Others:
    """Others who take each step, too, with three times the gradient; or who cannot."""

    def __init__(self, weight: nn.Parameter, trouble: str | None = None) -> None:
        self._weight = weight
        self._trouble = trouble
        self.seen: list[Any] = []

    def begin(self, examples: int) -> None:
        self.seen.append(examples)

    def finish(self, loss: torch.Tensor | None, trouble: str | None) -> str | None:  # noqa: ARG002
        assert self._weight.grad is not None
        self._weight.grad *= 2
        self.seen.append(trouble)
        return self._trouble

    def add_up(self, squares: torch.Tensor) -> torch.Tensor:
        return squares


def test_ranks_that_step_together_apply_the_gradient_of_all() -> None:
    setting = Setting()
    others = Others(setting.weight)
    setting.run(together=others)
    assert (setting.weight.item(), others.seen) == (-1, [1, None])


def test_a_batch_that_another_cannot_take_is_skipped_here_too() -> None:
    setting = Setting()
    with pytest.raises(NonFiniteError, match="rank 1"):
        setting.run(together=Others(setting.weight, trouble="rank 1: the loss is nan"))
    assert (setting.weight.item(), setting.row, setting.sparse.global_step) == (1, [1, 1, 1, 1], 0)


def test_an_error_here_is_reported_to_the_other_ranks() -> None:
    setting = Setting()
    others = Others(setting.weight, trouble="told")
    with pytest.raises(NonFiniteError):
        setting.run(scale=float("nan"), together=others)
    assert others.seen == [1, "the loss is nan"]


def test_a_table_whose_gradient_is_short_is_left_alone() -> None:
    setting = Setting()
    setting.run(min_norms={"f": 2.0})
    assert setting.row == [1, 1, 1, 1]
    setting.run(min_norms={"f": 1.5})
    assert setting.row == [0, 0, 0, 1]
    with pytest.raises(UnknownTableError, match="no collection has a table 'g'"):
        setting.run(min_norms={"g": 1.0})


@pytest.mark.parametrize(
    "config",
    [{"clip_norm": 0.0}, {"sparse_clip_norm": -1.0}, {"divide_dense_by": 0}, {"dense_weight_decay": -0.1}],
)
def test_settings_that_make_no_sense_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(config))):
        UpdateConfig(**config)
