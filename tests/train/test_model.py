"""A task's model, bound to stores in the order of its modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional
from train.tasks import Clicks, Numbers

from monolith.model import DeepFM
from monolith.store import LocalStore, Store
from monolith.table import TableConfig
from monolith.train import Mode
from monolith.train.model import Model, _differs_in_eval


class Two(Clicks):
    """Two collections, of which the one that was made first stands last."""

    def model(self) -> nn.Module:
        last = DeepFM(["item"], dim=2, threads=1)
        return nn.Sequential(DeepFM(["user"], dim=2, threads=1), last)


class Maker:
    def __init__(self) -> None:
        self.made: list[tuple[str, ...]] = []

    def __call__(self, configs: Mapping[str, TableConfig], /, **options: Any) -> Store:
        self.made.append(tuple(configs))
        return LocalStore.from_configs(configs, **options)


@pytest.mark.parametrize("mode", Mode)
def test_collections_get_their_stores_in_the_order_of_the_modules(mode: Mode) -> None:
    make = Maker()
    model = Model(Two(), mode, seed=0, make_store=make)
    assert make.made == [("user",), ("item",)]
    assert [tuple(store.tables) for store in model.stores] == make.made
    model.close()


def test_without_a_choice_rows_live_in_this_process() -> None:
    model = Model(Two(), Mode.TRAIN, seed=0)
    assert all(isinstance(store, LocalStore) for store in model.stores)
    model.close()


def test_a_model_without_rows_has_a_store_without_tables() -> None:
    make = Maker()
    model = Model(Numbers(), Mode.TRAIN, seed=0, make_store=make)
    assert make.made == [()]
    assert dict(model.tables) == {}
    model.close()


def test_a_model_knows_which_layers_say_something_else_in_eval_mode() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.dropout(x, 0.5, self.training)

    plain = [nn.Linear(2, 2), nn.Dropout(0.0), nn.LayerNorm(2), nn.GRU(2, 2)]
    differing = [
        nn.Dropout(0.1),
        nn.BatchNorm1d(2),
        nn.MultiheadAttention(2, 1, dropout=0.1),
        nn.RReLU(),
        Own(),
    ]
    assert not any(map(_differs_in_eval, plain))
    assert all(map(_differs_in_eval, differing))
