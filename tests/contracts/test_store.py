"""What every store does, wherever the parameters live."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
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
def make(request: pytest.FixtureRequest) -> Iterator[MakeStore]:
    if "server" in request.param:
        pytest.importorskip("pyarrow")
    with ExitStack() as stack:
        yield STORES[request.param](stack)


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


def test_rows_are_where_the_store_says(store: Store) -> None:
    train(store, keys([1], []), [1, 2])
    there = replace(keys([1], [1]), ids=torch.tensor([1, 1], device=store.device))
    assert store.lookup(there).device == store.device
    store.apply_gradients(there, torch.ones(3, device=store.device))
    assert store.lookup(keys([1], [1])).tolist() == [-1, -2, 0.5]


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
    two = TableIds(torch.tensor([1, 2, 2]), torch.tensor([2, 1]), batches=2)
    train(store, two, [3.0, 1.0, 1.0])
    # One step of Adagrad from zero moves by the rate, whatever the gradient.
    assert_close(store.lookup(TableIds(torch.tensor([1, 2]), torch.tensor([2]))), torch.tensor([-1.0, -1.0]))


def test_ids_that_repeat_within_a_batch_are_one_step_with_the_sum(make: MakeStore) -> None:
    segment = Segment(dim=1, optimizer=Adagrad(initial_accumulator_value=0.0), learning_rate=1.0)
    store = make({name: TableConfig(name=name, segments=(segment,)) for name in ("a", "b")})
    train(store, keys([1, 2, 1, 1], [1, 1], distinct=False), [3.0, 1.0, -1.0, 2.0, 5.0, -7.0])
    # One step of Adagrad from zero moves by the rate, whatever the gradient: two steps would go further.
    assert_close(store.lookup(keys([1, 2], [1])), torch.tensor([-1.0, -1.0, 1.0]))
    assert store.lookup(keys([1, 1, 2], [1, 1], distinct=False)).tolist() == [-1, -1, -1, 1, 1]


def test_ids_that_repeat_within_batches_and_over_them_are_one_step_each(make: MakeStore) -> None:
    segment = Segment(dim=1, optimizer=Adagrad(initial_accumulator_value=0.0), learning_rate=1.0)
    store = make({"a": TableConfig(name="a", segments=(segment,))})
    two = TableIds(torch.tensor([1, 2, 1, 2, 2]), torch.tensor([3, 2]), batches=2, distinct=False)
    train(store, two, [1.0, 1.0, 1.0, 1.0, 1.0], event_time=torch.tensor([3, 4, 5, 7, 6]))
    assert_close(store.lookup(TableIds(torch.tensor([1, 2]), torch.tensor([2]))), torch.tensor([-1.0, -1.0]))
    assert store.stats()["a"].max_event_time == 7


def test_ids_that_repeat_are_sightings_each(make: MakeStore) -> None:
    store = make(configs(), thresholds={"a": SlotThresholds(default=3)})
    counts = torch.tensor([2, 2, 1, 1])
    train(store, keys([1, 2, 1], [1], counts=counts, distinct=False), [0] * 7)
    train(store, keys([1, 2], [], distinct=False), [0] * 4)
    assert store.lookup(keys([1, 2], [1])).tolist() == [1, 1, 0, 0, 1]


def test_ids_of_any_sign_and_size_come_back_in_their_order(make: MakeStore) -> None:
    """In both tables, in several batches, with widths that differ."""
    store = make(configs())
    draw = torch.Generator().manual_seed(0)
    first = torch.randint(-(2**62), 2**62, (50,), generator=draw) * 2 + torch.arange(50) % 2
    a, b = first[:30], first[10:]
    sizes = torch.tensor([20, 15, 10, 25])
    two = TableIds(torch.cat([a[:20], b[:15], a[20:], b[15:]]), sizes, batches=2)
    gradients = torch.cat([torch.arange(20 * 2 + 15), torch.arange(100, 100 + 10 * 2 + 25)]).float()
    store.apply_gradients(two, gradients)
    assert_close(store.lookup(two), _after(gradients, sizes))
    backwards = TableIds(torch.cat([a.flip(0), b.flip(0)]), torch.tensor([30, 40]))
    rows_a = torch.cat([_after(gradients, sizes)[:40], _after(gradients, sizes)[55:75]]).view(-1, 2)
    rows_b = torch.cat([_after(gradients, sizes)[40:55], _after(gradients, sizes)[75:]])
    assert_close(store.lookup(backwards), torch.cat([rows_a.flip(0).flatten(), rows_b.flip(0)]))


def _after(gradients: Tensor, sizes: Tensor) -> Tensor:
    """Return the rows after one step from ones, in the order of the gradients."""
    floats = (sizes * torch.tensor([2, 1, 2, 1])).tolist()
    rates = torch.cat([torch.full((n,), rate) for n, rate in zip(floats, [1.0, 0.5] * 2, strict=True)])
    return 1 - rates * gradients


def test_a_filter_counts_sightings_not_batches(make: MakeStore) -> None:
    store = make(configs(), thresholds={"a": SlotThresholds(default=3)})
    train(store, keys([1, 2], [1], counts=torch.tensor([3, 2, 1])), [0, 0, 0, 0, 0])
    train(store, keys([1, 2], []), [0, 0, 0, 0])
    assert store.lookup(keys([1, 2], [1])).tolist() == [1, 1, 0, 0, 1]


def test_sightings_that_do_not_fit_are_refused_where_they_count(make: MakeStore) -> None:
    store = make(configs(), thresholds={"a": SlotThresholds(default=3)})
    for counts in ([1, 1], [0]):
        with pytest.raises(TableArgumentError, match="counts"):
            train(store, keys([1], [], counts=torch.tensor(counts)), [0, 0])


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


def test_what_would_expire_is_counted_and_a_table_can_be_left_alone(make: MakeStore) -> None:
    store = make(configs(expiry=Expiry.days(1)))
    train(store, keys([1, 2], [3]), [0] * 5, event_time=torch.tensor([0, 100_000, 0]))
    assert store.count_expired(100_000) == {"a": 1, "b": 1}
    assert store.evict(100_000, tables={"b"}) == {"a": 0, "b": 1}
    assert store.count_expired(100_000) == {"a": 1, "b": 0}


def test_without_a_time_each_table_is_its_own_clock(make: MakeStore) -> None:
    store = make(configs(expiry=Expiry.days(1)))
    train(store, keys([1, 2], [3]), [0] * 5, event_time=torch.tensor([0, 100_000, 0]))
    assert store.evict() == {"a": 1, "b": 0}


def test_stats_count_all_rows(make: MakeStore) -> None:
    store = make(configs())
    train(store, keys([1, 2, 3], [4]), [0] * 7, event_time=7)
    stats = store.stats()
    assert {name: (one.rows, one.inserted, one.max_event_time) for name, one in stats.items()} == {
        "a": (3, 3, 7),
        "b": (1, 1, 7),
    }


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
        (torch.tensor([1]), torch.tensor([2, -1]), torch.zeros(2)),
    ],
)
def test_arguments_that_do_not_fit_change_nothing(
    store: Store, ids: Tensor, sizes: Tensor, gradients: Tensor
) -> None:
    with pytest.raises(TableArgumentError):
        store.apply_gradients(TableIds(ids, sizes), gradients)
    assert [stats.rows for stats in store.stats().values()] == [0, 0]


@pytest.mark.parametrize(
    "options",
    [
        {"step": -1},
        {"event_time": -1},
        {"event_time": torch.tensor([1, 2])},
        {"latest_values": torch.zeros(3)},
    ],
)
def test_other_arguments_that_do_not_fit_change_nothing_either(store: Store, options: dict[str, Any]) -> None:
    with pytest.raises(TableArgumentError):
        train(store, keys([1], []), [0, 0], **options)
    assert [stats.rows for stats in store.stats().values()] == [0, 0]


def dense(learning_rate: float = 0.5) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    """Two weights of different sizes, at 1 and at 2, as every process of a job makes them."""
    weights = {"bias": nn.Parameter(torch.tensor([1.0])), "kernel": nn.Parameter(torch.full((2, 2), 2.0))}
    return weights, torch.optim.SGD(weights.values(), lr=learning_rate)


def test_dense_variables_are_updated_where_the_store_says(make: MakeStore) -> None:
    store = make(configs(), dense=dense)
    weights, optimizer = dense()
    store.attach_dense(weights, optimizer)
    weights["bias"].grad, weights["kernel"].grad = torch.tensor([1.0]), torch.eye(2)
    store.push_dense()
    store.pull_dense()
    assert weights["bias"].tolist() == [0.5]
    assert weights["kernel"].tolist() == [[1.5, 2.0], [2.0, 1.5]]
    assert [weight.grad for weight in weights.values()] == [None, None]


def test_a_dense_variable_without_a_gradient_stays_as_it_is(make: MakeStore) -> None:
    store = make(configs(), dense=dense)
    weights, optimizer = dense()
    store.attach_dense(weights, optimizer)
    weights["bias"].grad = torch.tensor([1.0])
    store.push_dense()
    store.push_dense()
    store.pull_dense()
    assert (weights["bias"].tolist(), weights["kernel"].tolist()) == ([0.5], [[2.0, 2.0], [2.0, 2.0]])


def test_dense_variables_can_be_pulled_before_any_were_pushed(make: MakeStore) -> None:
    store = make(configs(), dense=dense)
    weights, optimizer = dense()
    store.attach_dense(weights, optimizer)
    store.pull_dense()
    assert weights["bias"].tolist() == [1.0]


def test_a_store_serves_one_model(make: MakeStore) -> None:
    store = make(configs(), dense=dense)
    (weights, optimizer), other = dense(), nn.Parameter(torch.ones(1))
    with pytest.raises(FeatureError, match="does not hold 'other'"):
        store.attach_dense({**weights, "other": other}, optimizer)
    store.attach_dense(weights, optimizer)
    with pytest.raises(FeatureError, match="one store serves one model"):
        store.attach_dense(weights, optimizer)


def test_a_store_without_dense_variables_has_none_to_move(store: Store) -> None:
    train(store, keys([1], []), [1, 2])
    store.push_dense()
    store.pull_dense()
    assert store.lookup(keys([1], [])).tolist() == [0, -1]


def test_a_closed_store_answers_no_more(store: Store) -> None:
    store.close()
    store.close()
    with pytest.raises(TableClosedError):
        store.lookup(keys([1], []))
