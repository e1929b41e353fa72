"""What every store does, wherever the parameters live."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contracts.stores import STORES, MakeStore
from torch import Tensor, nn
from torch.testing import assert_close

from monolith.errors import FeatureError, TableArgumentError, TableClosedError
from monolith.store import Store, TableIds
from monolith.table import Adagrad, DelayCompensated, Expiry, Ones, Segment, Sgd, SlotThresholds, TableConfig


@pytest.fixture(params=STORES)
def make(request: pytest.FixtureRequest) -> MakeStore:
    return STORES[request.param]


def configs(**options: Any) -> dict[str, TableConfig]:
    """Two tables, given in the wrong order: widths 2 and 1, rates 1 and 0.5, rows born as ones."""
    return {
        "b": TableConfig(
            name="b", segments=(Segment(dim=1, initializer=Ones(), learning_rate=0.5),), **options
        ),
        "a": TableConfig(
            name="a", segments=(Segment(dim=2, initializer=Ones(), learning_rate=1.0),), **options
        ),
    }


@pytest.fixture
def store(make: MakeStore) -> Store:
    return make(configs())


def keys(a: list[int], b: list[int], **options: Any) -> TableIds:
    return TableIds(torch.tensor(a + b, dtype=torch.int64), torch.tensor([len(a), len(b)]), **options)


def train(store: Store, ids: TableIds, gradients: list[float], **options: Any) -> None:
    store.apply_gradients(ids, torch.tensor(gradients, dtype=torch.float32), **options)


def test_tables_are_sorted_by_name(store: Store) -> None:
    assert list(store.tables.items()) == [("a", 2), ("b", 1)]


def test_ids_without_a_row_read_as_zeros_and_leave_none(store: Store) -> None:
    assert store.lookup(keys([1, 2], [1])).tolist() == [0, 0, 0, 0, 0]
    assert [stats.rows for stats in store.stats().values()] == [0, 0]


def test_each_table_is_trained_with_its_own_gradients_and_rate(store: Store) -> None:
    train(store, keys([1, 2], [1]), [1, 2, 3, 4, 5])
    assert store.lookup(keys([2, 1], [1])).tolist() == [-2, -3, 0, -1, -1.5]


def test_equal_ids_of_different_tables_are_different_rows(store: Store) -> None:
    train(store, keys([7], []), [1, 1])
    assert store.lookup(keys([7], [7])).tolist() == [0, 0, 0]
    assert {name: stats.rows for name, stats in store.stats().items()} == {"a": 1, "b": 0}


def test_what_is_looked_up_belongs_to_the_caller(store: Store) -> None:
    train(store, keys([1], [1]), [0, 0, 0])
    store.lookup(keys([1], [1])).zero_()
    assert store.lookup(keys([1], [1])).tolist() == [1, 1, 1]


def test_a_call_without_ids_does_nothing(store: Store) -> None:
    assert store.lookup(keys([], [])).shape == (0,)
    train(store, keys([], []), [])


def test_gradients_of_several_batches_are_one_step_for_each_id(make: MakeStore) -> None:
    segment = Segment(dim=1, optimizer=Adagrad(initial_accumulator_value=0.0), learning_rate=1.0)
    store = make({"a": TableConfig(name="a", segments=(segment,))})
    two = TableIds(torch.tensor([1, 2, 2]), torch.tensor([2, 1]), parts=2)
    train(store, two, [3.0, 1.0, 1.0])
    # One step of Adagrad from zero moves by the rate, whatever the gradient.
    assert_close(store.lookup(TableIds(torch.tensor([1, 2]), torch.tensor([2]))), torch.tensor([-1.0, -1.0]))


def test_a_filter_counts_sightings_not_batches(make: MakeStore) -> None:
    store = make(configs(), thresholds={"a": SlotThresholds(default=3)})
    train(store, keys([1, 2], [1], counts=torch.tensor([3, 2, 1])), [0, 0, 0, 0, 0])
    train(store, keys([1, 2], []), [0, 0, 0, 0])
    assert store.lookup(keys([1, 2], [1])).tolist() == [1, 1, 0, 0, 1]


def test_rates_follow_the_step(make: MakeStore) -> None:
    table = TableConfig(name="a", segments=(Segment(dim=1, learning_rate=float),))
    store = make({"a": table})
    one = TableIds(torch.tensor([1]), torch.tensor([1]))
    train(store, one, [1.0], step=2)
    train(store, one, [1.0], step=3)
    assert store.lookup(one).tolist() == [-5]


def test_rows_expire_by_event_time(make: MakeStore) -> None:
    store = make(configs(expiry=Expiry.days(1)))
    train(store, keys([1, 2], [3]), [0] * 5, event_time=torch.tensor([0, 100_000, 0]))
    assert store.evict(100_000) == {"a": 1, "b": 1}
    assert store.lookup(keys([1, 2], [3])).tolist() == [0, 0, 1, 1, 0]


def test_delay_compensation_asks_for_the_rows_gradients_were_computed_on(make: MakeStore) -> None:
    segment = Segment(dim=1, optimizer=DelayCompensated(Sgd(), lambda_=1.0), learning_rate=1.0)
    store = make({"a": TableConfig(name="a", segments=(segment,))})
    one = TableIds(torch.tensor([1]), torch.tensor([1]))
    assert store.delay_compensated
    with pytest.raises(TableArgumentError, match="latest_values"):
        train(store, one, [1.0])
    train(store, one, [2.0], latest_values=torch.tensor([0.0]))
    train(store, one, [1.0], latest_values=torch.tensor([0.0]))
    # w = -2, then g = 1 + 1 * (w - 0) = -1.
    assert store.lookup(one).tolist() == [-1.0]


@pytest.mark.parametrize(
    ("ids", "sizes", "gradients"),
    [
        (torch.tensor([1, 2]), torch.tensor([1, 2]), torch.zeros(4)),
        (torch.tensor([1]), torch.tensor([1]), torch.zeros(2)),
        (torch.tensor([1]), torch.tensor([1, 0]), torch.zeros(3)),
        (torch.tensor([1.0]), torch.tensor([1, 0]), torch.zeros(2)),
        (torch.tensor([1]), torch.tensor([1, 0]), torch.zeros(2, dtype=torch.float64)),
    ],
)
def test_arguments_that_do_not_fit_change_nothing(
    store: Store, ids: Tensor, sizes: Tensor, gradients: Tensor
) -> None:
    with pytest.raises(TableArgumentError):
        store.apply_gradients(TableIds(ids, sizes), gradients)
    assert [stats.rows for stats in store.stats().values()] == [0, 0]


def test_dense_variables_are_updated_where_the_store_says(store: Store) -> None:
    weight = nn.Parameter(torch.tensor([1.0]))
    store.attach_dense({"weight": weight}, torch.optim.SGD([weight], lr=0.5))
    weight.grad = torch.tensor([1.0])
    store.push_dense()
    store.pull_dense()
    assert (weight.tolist(), weight.grad) == ([0.5], None)


def test_a_store_serves_one_model(store: Store) -> None:
    weight, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    with pytest.raises(FeatureError, match="does not hold 'other'"):
        store.attach_dense({"other": other}, torch.optim.SGD([weight], lr=1.0))
    store.attach_dense({"weight": weight}, torch.optim.SGD([weight], lr=1.0))
    with pytest.raises(FeatureError, match="one store serves one model"):
        store.attach_dense({"weight": weight}, torch.optim.SGD([weight], lr=1.0))


def test_a_closed_store_answers_no_more(store: Store) -> None:
    store.close()
    store.close()
    with pytest.raises(TableClosedError):
        store.lookup(keys([1], []))
