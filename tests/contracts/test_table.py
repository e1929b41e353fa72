"""What every table does. Read the names in order: they are the specification."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import numpy as np
import pytest
import torch
from contracts.tables import (
    ids,
    narrow_table_classes,
    rows,
    spilling_table_classes,
    table_classes,
    three_tier_table_classes,
    tiered_table_classes,
)
from torch import Tensor
from torch.testing import assert_close

import monolith.table
from monolith.errors import RestoreError, ServingTableError, TableArgumentError, TableClosedError
from monolith.table import (
    OPTIMIZERS,
    Adagrad,
    Adam,
    BatchSoftmax,
    Constant,
    DelayCompensated,
    DictTable,
    Expiry,
    FixedR8,
    Fp16,
    Momentum,
    OneBit,
    Ones,
    PolynomialDecay,
    RandomUniform,
    Rows,
    Segment,
    Sgd,
    SlidingFilter,
    SlotThresholds,
    StochasticRounding,
    Table,
    TableConfig,
    TouchedKeySet,
    bucket_of,
    digest_rows,
    in_share,
    iterate,
    iterate_buckets,
)
from monolith.table.digests import BUCKETS

Make = Callable[..., Table]

SGD = Segment(dim=2, optimizer=Sgd(), learning_rate=1.0)
DAY = 86400


@pytest.fixture(
    params=[
        *table_classes(),
        *tiered_table_classes(),
        *spilling_table_classes(),
        *three_tier_table_classes(),
        *narrow_table_classes(),
    ],
    ids=lambda cls: cls.__name__,
)
def table_class(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def make(table_class: Any) -> Iterator[Make]:
    """Make tables: `make(Segment(...), ..., option=...)`; by default two values trained by sgd at rate 1."""
    made: list[Table] = []

    def build(*segments: Segment, admission: Any = None, touched: Any = None, **options: Any) -> Table:
        config = TableConfig(name="item", segments=segments or (SGD,), **options)
        made.append(table_class(config, admission=admission, touched=touched))
        return made[-1]

    yield build
    for table in made:
        table.close()


@pytest.fixture
def table(make: Make) -> Table:
    return make()


def everything(table: Table, **how: int) -> dict[int, tuple[int, list[float], list[float]]]:
    """Read a table by scanning it: id to event time, values and state."""
    found: dict[int, tuple[int, list[float], list[float]]] = {}
    for chunk in iterate(table, **how):
        columns = (chunk.ids, chunk.event_times, chunk.values, chunk.state)
        for key, *row in zip(*(column.tolist() for column in columns), strict=True):
            assert key not in found
            found[key] = tuple(row)
    return found


# Shape


def test_it_tells_its_width_and_the_width_of_its_state(make: Make) -> None:
    table = make(Segment(dim=2, optimizer=Adagrad()), Segment(dim=3, optimizer=Adam()))
    assert (table.dim, table.state_dim, len(table)) == (5, 2 + 8, 0)
    assert table.config.name == "item"


# Reading


def test_reading_an_unseen_id_gives_zeros_and_leaves_no_row(make: Make) -> None:
    table = make(replace(SGD, initializer=Ones()))
    assert table.lookup(ids(7)).tolist() == [[0.0, 0.0]]
    assert len(table) == 0


def test_ids_are_answered_in_the_order_given_repeats_included(table: Table) -> None:
    table.assign(ids(1, 2), rows([1, 10], [2, 20]))
    assert table.lookup(ids(2, 9, 1, 2)).tolist() == [[2, 20], [0, 0], [1, 10], [2, 20]]


def test_an_answer_is_a_copy(table: Table) -> None:
    table.assign(ids(1), rows([1, 1]))
    before = table.lookup(ids(1))
    table.assign(ids(1), rows([2, 2]))
    assert before.tolist() == [[1, 1]]
    before.fill_(9)
    assert table.lookup(ids(1)).tolist() == [[2, 2]]


def test_an_answer_can_go_into_a_tensor_of_the_caller(table: Table) -> None:
    table.assign(ids(1), rows([1, 2]))
    out = torch.full((2, 2), 9.0)
    assert table.lookup(ids(1, 5), out=out) is out
    assert out.tolist() == [[1, 2], [0, 0]]


def test_no_ids_are_fine(table: Table) -> None:
    nothing, no_rows = torch.empty(0, dtype=torch.int64), torch.empty(0, 2)
    assert table.lookup(nothing).shape == (0, 2)
    table.assign(nothing, no_rows)
    table.assign_add(nothing, no_rows)
    table.apply_gradients(nothing, no_rows, dedup=True)
    table.apply_gradients(nothing, no_rows, dedup=False)
    assert table.reinitialize(nothing, now=0).shape == (0,)
    assert table.remove(nothing) == 0
    assert table.contains(nothing).shape == (0,)
    assert len(table.lookup_rows(nothing)[1]) == 0
    assert table.evict() == 0
    assert len(table) == 0


@pytest.mark.parametrize("key", [0, -1, 1, 2**63 - 1, -(2**63), 1 << 48, -(1 << 48)])
def test_any_int64_is_an_id(table: Table, key: int) -> None:
    table.assign(ids(key), rows([1, 2]))
    assert table.contains(ids(key)).tolist() == [True]
    assert table.lookup(ids(key, key ^ 1)).tolist() == [[1, 2], [0, 0]]
    assert list(everything(table)) == [key]
    assert table.remove(ids(key)) == 1


def test_strided_ids_and_values_are_read_right(table: Table) -> None:
    table.assign(torch.arange(6)[::2], torch.arange(12.0).reshape(2, 6).T[::2])
    assert table.lookup(ids(0, 2, 4)).tolist() == [[0, 6], [2, 8], [4, 10]]
    assert table.lookup(torch.tensor([[4, 0], [2, 0]])[:, 0]).tolist() == [[4, 10], [2, 8]]


def test_whole_rows_come_with_state_and_time(make: Make) -> None:
    table = make(Segment(dim=2, optimizer=Adagrad(initial_accumulator_value=0.5), learning_rate=1.0))
    table.assign(ids(3), rows([1, 2]), event_time=9)
    found, whole = table.lookup_rows(ids(4, 3))
    assert found.tolist() == [False, True]
    assert whole.ids.tolist() == [4, 3]
    assert whole.event_times.tolist() == [0, 9]
    assert whole.values.tolist() == [[0, 0], [1, 2]]
    assert whole.state.tolist() == [[0, 0], [0.5, 0.5]]


def test_contains_tells_ids_with_a_row(table: Table) -> None:
    table.assign(ids(1), rows([0, 0]))
    assert table.contains(ids(1, 2)).tolist() == [True, False]


# Assigning


def test_assign_overwrites_and_keeps_the_optimizer_state(make: Make) -> None:
    table = make(Segment(dim=1, optimizer=Adagrad(initial_accumulator_value=1.0), learning_rate=1.0))
    table.apply_gradients(ids(1), rows([1]))
    table.assign(ids(1), rows([5]), event_time=3)
    assert everything(table) == {1: (3, [5.0], [2.0])}


def test_repeats_are_assigned_in_order(table: Table) -> None:
    table.assign(ids(1, 1), rows([1, 1], [2, 2]), event_time=torch.tensor([8, 5]))
    assert everything(table) == {1: (8, [2, 2], [])}  # the newest of their times


def test_assign_add_starts_a_new_row_from_its_initializer(make: Make) -> None:
    table = make(replace(SGD, initializer=Constant(3.0)))
    table.assign_add(ids(1, 1), rows([1, 2], [1, 2]), event_time=4)
    assert everything(table) == {1: (4, [5, 7], [])}


# Training


def test_a_gradient_starts_a_new_row_from_its_initializer(make: Make) -> None:
    table = make(replace(SGD, initializer=Ones()))
    table.apply_gradients(ids(1), rows([0.5, 1]), event_time=6)
    assert everything(table) == {1: (6, [0.5, 0], [])}


@pytest.mark.float32_rows
def test_repeats_take_one_step_each(make: Make) -> None:
    table = make(Segment(dim=1, optimizer=Adagrad(initial_accumulator_value=1.0), learning_rate=1.0))
    table.apply_gradients(ids(1, 1), rows([1], [1]))
    assert table.lookup_rows(ids(1))[1].state.tolist() == [[3.0]]
    assert_close(table.lookup(ids(1)), rows([-(2**-0.5) - 3**-0.5]))


@pytest.mark.float32_rows
def test_dedup_sums_repeats_over_the_whole_call_and_takes_one_step(make: Make) -> None:
    table = make(Segment(dim=1, optimizer=Adagrad(initial_accumulator_value=1.0), learning_rate=1.0))
    repeated = torch.arange(1000).repeat(3)
    table.apply_gradients(repeated, torch.ones(3000, 1), dedup=True, event_time=torch.arange(3000))
    _, found = table.lookup_rows(torch.arange(1000))
    assert found.state.unique().tolist() == [10.0]
    assert_close(found.values, torch.full((1000, 1), -3 / 10**0.5))
    assert found.event_times.tolist() == list(range(2000, 3000))


def test_dedup_keeps_the_latest_event_time_wherever_it_is(table: Table) -> None:
    table.apply_gradients(ids(1, 1, 1), torch.ones(3, 2), dedup=True, event_time=torch.tensor([3, 9, 4]))
    assert everything(table) == {1: (9, [-3, -3], [])}


@pytest.mark.float32_rows
@pytest.mark.many_layouts
@pytest.mark.parametrize("decay", [0.0, 0.25])
@pytest.mark.parametrize("dim", [1, 3, 4, 7, 16, 17, 20, 33, 64, 70])
def test_adagrad_is_the_same_to_the_bit_whatever_the_width(make: Make, dim: int, decay: float) -> None:
    optimizer = Adagrad(initial_accumulator_value=0.125, weight_decay=decay)
    table = make(Segment(dim=dim, optimizer=optimizer, learning_rate=0.5))
    many = torch.arange(200)
    values, norms = torch.randn(200, dim).numpy(), np.full((200, dim), 0.125, np.float32)
    table.assign(many, torch.from_numpy(values))
    for _ in range(2):
        gradients = torch.randn(200, dim)
        table.apply_gradients(many, gradients)
        moved = gradients.numpy()
        if decay:
            moved = moved + np.float32(decay) * values
        norms = norms + moved * moved
        values = values - np.float32(0.5) / np.sqrt(norms) * moved  # torch's root is not exact everywhere
    assert torch.equal(table.lookup(many), torch.from_numpy(values))


def test_the_callers_gradients_are_left_alone(make: Make) -> None:
    table = make(Segment(dim=1, compressor=OneBit(), learning_rate=1.0))
    gradients = rows([1], [2])
    table.apply_gradients(ids(1, 1), gradients, dedup=True)
    table.apply_gradients(ids(1, 1), gradients)
    assert gradients.tolist() == [[1], [2]]


def test_each_segment_has_its_own_optimizer_and_rate(make: Make) -> None:
    table = make(
        Segment(dim=1, optimizer=Sgd(), learning_rate=0.5),
        Segment(dim=1, optimizer=Adagrad(initial_accumulator_value=3.0, learning_rate=2.0)),
    )
    table.apply_gradients(ids(1), rows([1, 1]))
    assert table.lookup(ids(1)).tolist() == [[-0.5, -1.0]]


def test_rates_of_the_call_replace_those_of_the_config(make: Make) -> None:
    table = make(replace(SGD, dim=1), replace(SGD, dim=1))
    table.apply_gradients(ids(1), rows([1, 1]), learning_rates=torch.tensor([0.25, 0.0]))
    assert table.lookup(ids(1)).tolist() == [[-0.25, 0.0]]


def test_a_schedule_is_read_at_the_step_of_the_call(make: Make) -> None:
    rate = PolynomialDecay(initial_learning_rate=1.0, decay_steps=4, end_learning_rate=0.0)
    table = make(Segment(dim=1, learning_rate=rate))
    for step, key in enumerate([10, 11, 12]):
        table.apply_gradients(ids(key), rows([1]), step=step)
    assert table.lookup(ids(10, 11, 12)).tolist() == [[-1], [-0.75], [-0.5]]


def test_a_rate_of_zero_is_a_rate(make: Make) -> None:
    table = make(Segment(dim=1, optimizer=Sgd(learning_rate=5.0), learning_rate=0.0))
    table.apply_gradients(ids(1), rows([1]))
    assert everything(table) == {1: (0, [0.0], [])}


@pytest.mark.parametrize("kind", ["ftrl", "group_ftrl", "group_adagrad"])
def test_a_warm_up_that_begins_at_rate_zero_leaves_the_values_alone(make: Make, kind: str) -> None:
    optimizer = monolith.table.OPTIMIZERS[kind](warmup_steps=10)  # type: ignore[call-arg]
    table = make(Segment(dim=2, optimizer=optimizer, initializer=Ones()))
    table.apply_gradients(ids(1), rows([0.5, 2]), step=0)
    assert table.lookup(ids(1)).tolist() == [[1, 1]]
    table.apply_gradients(ids(1), rows([0.5, 2]), step=10)
    assert table.lookup(ids(1)).isfinite().all()


def test_batch_softmax_learns_the_interval_between_sightings(make: Make) -> None:
    table = make(Segment(dim=1, optimizer=BatchSoftmax()))
    for step in range(1, 1001):
        seen = [key for key, every in ((5, 5), (10, 10)) if step % every == 0]
        if seen:
            table.apply_gradients(ids(*seen), torch.zeros(len(seen), 1), step=step)
    assert_close(1 / table.lookup(ids(5, 10)), rows([1 / 5], [1 / 10]), atol=0.01, rtol=0)
    assert table.lookup_rows(ids(5))[1].state.numpy().view("int64").tolist() == [[1000]]


def test_delay_compensation_corrects_by_what_the_worker_saw(make: Make) -> None:
    table = make(Segment(dim=1, optimizer=DelayCompensated(Sgd(), 0.5), learning_rate=1.0))
    table.assign(ids(1), rows([3]))
    table.apply_gradients(ids(1), rows([2]), latest_values=rows([1]))
    assert table.lookup(ids(1)).tolist() == [[3 - (2 + 0.5 * 4 * 2)]]


@pytest.mark.many_layouts
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e20])
@pytest.mark.parametrize("dedup", [False, True])
def test_a_gradient_that_is_not_finite_leaves_its_row_and_is_counted(
    make: Make, bad: float, dedup: bool
) -> None:
    for optimizer in OPTIMIZERS.values():
        table = make(
            Segment(dim=1, optimizer=optimizer()),
            *([] if optimizer is BatchSoftmax else [Segment(dim=16, optimizer=optimizer())]),
        )
        table.apply_gradients(ids(1, 2), torch.full((2, table.dim), 0.5), event_time=10)
        before = everything(table)
        gradients = torch.full((4, table.dim), 0.5)
        gradients[torch.tensor([0, 3]), -1] = bad
        table.apply_gradients(
            ids(1, 2, 3, 4), gradients, event_time=torch.tensor([20, 21, 22, 99]), dedup=dedup, step=1
        )
        after = everything(table)
        assert after[1] == before[1]
        assert after[2][0] == 21
        assert after.keys() == {1, 2, 3}
        assert (table.stats().non_finite, table.stats().max_event_time) == (2, 22)
        assert torch.isfinite(table.lookup(ids(1, 2, 3))).all()


def test_a_large_batch_loses_only_what_is_not_finite(make: Make) -> None:
    many, gradients = torch.arange(20_000), torch.ones(20_000, 2)
    gradients[12_345, 1] = math.nan
    table = make()
    table.apply_gradients(many, gradients)
    assert (len(table), table.stats().non_finite) == (19_999, 1)
    assert table.lookup(ids(12_345, 12_346)).tolist() == [[0, 0], [-1, -1]]


@pytest.mark.float32_rows
@pytest.mark.parametrize("wide", [2, 32])
def test_a_step_whose_row_would_not_be_finite_is_not_taken(make: Make, wide: int) -> None:
    """Each takes place in a row of its own: a decay past all measure, and a correction by what was seen."""
    decaying = Momentum(weight_decay=1e20)
    table = make(Segment(dim=wide, optimizer=decaying, learning_rate=1e10))
    table.assign(ids(1), torch.full((1, wide), 1e15))
    table.apply_gradients(ids(1), torch.zeros(1, wide))
    assert (table.lookup(ids(1)).unique().tolist(), table.stats().non_finite) == (
        [torch.tensor(1e15).item()],
        1,
    )
    delayed = make(Segment(dim=wide, optimizer=DelayCompensated(Sgd(), 0.5), learning_rate=1.0))
    delayed.assign(ids(1), torch.ones(1, wide))
    delayed.apply_gradients(ids(1), torch.ones(1, wide), latest_values=torch.full((1, wide), math.nan))
    assert (delayed.lookup(ids(1)).unique().tolist(), delayed.stats().non_finite) == ([1], 1)


def test_stochastic_rounding_leaves_halves_and_rounds_only_its_own_segment(make: Make) -> None:
    rounded = Segment(dim=64, optimizer=StochasticRounding(Sgd()), learning_rate=1.0)
    table = make(rounded, replace(SGD, dim=1))
    many = torch.arange(500)
    table.apply_gradients(many, torch.full((500, 65), -0.1), step=1)
    seen = table.lookup(many)
    halves = torch.tensor([0.0999755859375, 0.10003662109375])
    assert torch.equal(seen[:, :64].unique(), halves)
    assert seen[:, 64].unique().tolist() == torch.tensor([0.1]).tolist()
    assert abs(seen[:, :64].mean().item() - 0.1) < 1e-6


def test_stochastic_rounding_keeps_values_finite_beyond_the_largest_half(make: Make) -> None:
    table = make(Segment(dim=4, optimizer=StochasticRounding(Sgd()), learning_rate=0.0))
    table.assign(ids(1), rows([1e6, -1e6, 65510, 65504]))
    table.apply_gradients(ids(1), torch.zeros(1, 4))
    assert table.lookup(ids(1)).tolist() == [[65504, -65504, 65504, 65504]]


@pytest.mark.exact_rows
def test_coarse_compressors_are_seen_by_lookups_and_not_by_the_stored_row(make: Make) -> None:
    table = make(Segment(dim=1, compressor=FixedR8(5.0), learning_rate=1.0))
    table.assign(ids(1), rows([0.0546875]))
    assert table.lookup(ids(1)).tolist() == [[0.0390625]]
    assert everything(table) == {1: (0, [0.0546875], [])}
    table.apply_gradients(ids(1), rows([0.0078125]))
    assert everything(table) == {1: (0, [0.046875], [])}


@pytest.mark.float32_rows
def test_one_bit_steepens_with_the_steps_and_scales_the_gradient(make: Make) -> None:
    table = make(Segment(dim=1, compressor=OneBit(step_size=100, amplitude=0.1), learning_rate=1.0))
    table.assign(ids(1), rows([1]))
    assert_close(table.lookup(ids(1)), rows([0.07615941]))
    table.apply_gradients(ids(1), rows([1]), step=100)
    assert_close(table.lookup_rows(ids(1))[1].values, rows([1 - 0.035840667]))
    scale = 1.5**0.5
    assert_close(table.lookup(ids(1)), 0.1 * torch.tanh(scale * rows([1 - 0.035840667])))
    table.apply_gradients(ids(2), rows([0]), step=199)
    assert_close(table.lookup(ids(1)), 0.1 * torch.tanh(scale * rows([1 - 0.035840667])))


@pytest.mark.float32_rows
def test_a_fp16_compressor_does_not_touch_training(make: Make) -> None:
    table = make(Segment(dim=1, compressor=Fp16()))
    table.assign(ids(1), rows([0.1]))
    assert torch.equal(table.lookup(ids(1)), rows([0.1]))


@pytest.mark.float32_rows
def test_random_first_values_depend_on_seed_id_and_column_only(table_class: Any) -> None:
    segments = (
        Segment(dim=1, initializer=RandomUniform(low=0.0, high=1.0)),
        Segment(dim=7, initializer=RandomUniform(low=-0.5, high=0.25)),
    )
    many = torch.randint(-(2**63), 2**63 - 1, (100,), generator=torch.Generator().manual_seed(0))

    def born(cls: Any, order: Tensor, seed: int) -> Tensor:
        table = cls(TableConfig(name="t", segments=segments, seed=seed))
        table.assign_add(order, torch.zeros(len(order), 8))
        return table.lookup(many)

    first = born(table_class, many, seed=7)
    assert torch.equal(first, born(table_class, many.flip(0), seed=7))
    assert torch.equal(first, born(DictTable, many, seed=7))
    assert not torch.equal(first, born(table_class, many, seed=8))
    assert len(first[:, 0].unique()) == 100
    assert first[:, 1:].min() >= -0.5
    assert first[:, 1:].max() < 0.25
    assert abs(first[:, 0].mean().item() - 0.5) < 0.1


# Reinitializing and removing


def test_reinitialize_resets_values_and_state_and_tells_which_rows_existed(make: Make) -> None:
    table = make(Segment(dim=1, optimizer=Adagrad(), initializer=Constant(2.0), learning_rate=1.0))
    table.apply_gradients(ids(1), rows([3]))
    status = table.reinitialize(ids(1, 2, 2), now=50)
    assert status.tolist() == [1, 0, 1]
    assert status.dtype == torch.int8
    fresh = (50, [2.0], [torch.tensor(0.1).item()])
    assert everything(table) == {1: fresh, 2: fresh}


def test_remove_drops_rows_and_tells_how_many_there_were(table: Table) -> None:
    table.assign(ids(1, 2, 3), torch.ones(3, 2))
    assert table.remove(ids(1, 1, 9, 3)) == 2
    assert list(everything(table)) == [2]
    assert table.stats().removed == 2


def test_a_removed_row_comes_back_fresh(make: Make) -> None:
    table = make(Segment(dim=1, optimizer=Adagrad(initial_accumulator_value=1.0), learning_rate=0.0))
    table.apply_gradients(ids(1), rows([3]))
    table.remove(ids(1))
    table.assign(ids(1), rows([1]))
    assert everything(table) == {1: (0, [1.0], [1.0])}


# Expiry


def test_rows_expire_by_the_age_of_their_last_update_and_equality_expires(make: Make) -> None:
    table = make(expiry=Expiry.days(1))
    table.assign(ids(1, 2, 3), torch.ones(3, 2), event_time=torch.tensor([99, 100, 101]))
    assert table.evict(now=100 + DAY) == 2
    assert list(everything(table)) == [3]
    assert table.stats().evicted == 2


def test_every_slot_has_its_own_time_to_live(make: Make) -> None:
    table = make(expiry=Expiry.days(14, {0: 0, 1: 5, 2: 6}))
    keys = [slot << 48 | 7 for slot in (1, 2, 3)]
    table.assign(ids(*keys), torch.ones(3, 2), event_time=1234)
    assert table.evict(now=1234 + 5 * DAY) == 1
    assert table.contains(ids(*keys)).tolist() == [False, True, True]


def test_time_is_what_the_events_say(make: Make) -> None:
    table = make(expiry=Expiry.days(1))
    table.assign(ids(1), rows([1, 1]), event_time=0)
    assert table.evict() == 0
    table.assign(ids(2), rows([1, 1]), event_time=DAY)
    assert table.stats().max_event_time == DAY
    assert table.evict() == 1
    assert list(everything(table)) == [2]


def test_a_time_to_live_of_zero_expires_all_that_is_not_newer(make: Make) -> None:
    table = make(expiry=Expiry.days(0))
    table.assign(ids(1, 2), torch.ones(2, 2), event_time=torch.tensor([5, 6]))
    assert table.evict(now=5) == 1


def test_any_write_refreshes_and_a_read_does_not(make: Make) -> None:
    table = make(expiry=Expiry.days(1))
    table.assign(ids(1, 2, 3, 4), torch.ones(4, 2), event_time=0)
    table.assign(ids(1), rows([1, 1]), event_time=DAY)
    table.assign_add(ids(2), rows([1, 1]), event_time=DAY)
    table.apply_gradients(ids(3), rows([1, 1]), event_time=DAY)
    table.lookup(ids(4))
    table.evict()
    assert sorted(everything(table)) == [1, 2, 3]


@pytest.mark.parametrize("dedup", [False, True])
def test_older_data_does_not_make_a_row_older(make: Make, dedup: bool) -> None:
    table = make(expiry=Expiry.days(1))
    keys = ids(1, 2, 3)
    table.apply_gradients(keys, torch.ones(3, 2), event_time=5 * DAY)
    table.assign(ids(1), rows([1, 1]), event_time=DAY)
    table.assign_add(ids(2), rows([1, 1]), event_time=2 * DAY)
    table.apply_gradients(ids(3, 3, 4), torch.ones(3, 2), event_time=ids(3 * DAY, DAY, DAY), dedup=dedup)
    assert table.lookup_rows(ids(1, 2, 3, 4))[1].event_times.tolist() == [5 * DAY, 5 * DAY, 5 * DAY, DAY]
    table.apply_gradients(ids(4, 5), torch.ones(2, 2), event_time=ids(0, 0), dedup=dedup)  # beside a new one
    assert table.lookup_rows(ids(4, 5))[1].event_times.tolist() == [DAY, 0]


def test_a_whole_row_has_its_own_time(make: Make) -> None:
    table = make()
    table.apply_gradients(ids(1, 2), torch.ones(2, 2), event_time=7)
    _, saved = table.lookup_rows(ids(1))
    table.restore(replace(saved, event_times=ids(3)))
    table.reinitialize(ids(2), now=4)
    assert table.lookup_rows(ids(1, 2))[1].event_times.tolist() == [3, 4]


def test_what_would_expire_can_be_counted_before(make: Make) -> None:
    table = make(expiry=Expiry.days(14, {1: 5}))
    table.assign(ids(1, 2, 1 << 48), torch.ones(3, 2), event_time=ids(DAY, 2 * DAY, 2 * DAY))
    assert [table.count_expired(now) for now in (0, 7 * DAY, 15 * DAY, 16 * DAY)] == [0, 1, 2, 3]
    assert (len(table), table.stats().evicted) == (3, 0)


def test_event_times_beyond_2038_are_kept(table: Table) -> None:
    table.apply_gradients(ids(1), rows([1, 1]), event_time=2**32 - 1)
    assert table.lookup_rows(ids(1))[1].event_times.tolist() == [2**32 - 1]
    assert table.stats().max_event_time == 2**32 - 1


# Admission and touched keys


@pytest.fixture
def after_sightings() -> Callable[[int], SlidingFilter]:
    return lambda n: SlidingFilter(capacity=1000, split_num=7, thresholds=SlotThresholds(default=n))


@pytest.fixture
def touched() -> TouchedKeySet:
    return TouchedKeySet(1000, 1)


def test_new_ids_wait_for_the_filter(make: Make, after_sightings: Callable[[int], Any]) -> None:
    table = make(admission=after_sightings(3))
    history = []
    for _ in range(4):
        table.apply_gradients(ids(0, 0, 1), torch.full((3, 2), -1.0))
        history.append(table.lookup(ids(0, 1))[:, 0].tolist())
    assert history == [[0, 0], [1, 0], [3, 0], [5, 1]]
    assert (table.stats().filtered, table.stats().inserted) == (6, 2)


def test_ids_with_a_row_are_not_asked_about(make: Make, after_sightings: Callable[[int], Any]) -> None:
    table = make(admission=after_sightings(1))
    table.assign(ids(1), rows([1, 1]))
    table.assign(ids(1), rows([1, 1]))
    table.assign_add(ids(1), rows([1, 1]))
    assert table.lookup(ids(1)).tolist() == [[2, 2]]
    assert table.stats().filtered == 1


def test_assign_and_assign_add_wait_too(make: Make, after_sightings: Callable[[int], Any]) -> None:
    table = make(admission=after_sightings(2))
    table.assign(ids(1), rows([1, 1]))
    table.assign_add(ids(1), rows([1, 1]))
    assert len(table) == 0
    table.assign_add(ids(1), rows([1, 1]))
    assert len(table) == 1


def test_dedup_tells_the_filter_how_often_an_id_was_seen(
    make: Make, after_sightings: Callable[[int], Any]
) -> None:
    table = make(admission=after_sightings(3))
    table.apply_gradients(ids(1, 1, 1), torch.ones(3, 2), dedup=True)
    assert (len(table), table.stats().filtered) == (0, 3)
    table.apply_gradients(ids(1), torch.ones(1, 2), dedup=True)
    assert table.lookup(ids(1)).tolist() == [[-1, -1]]


def test_an_id_can_count_as_several_sightings(make: Make, after_sightings: Callable[[int], Any]) -> None:
    table = make(admission=after_sightings(3))
    table.apply_gradients(ids(1, 2), torch.ones(2, 2), counts=ids(2, 3))
    assert (len(table), table.stats().filtered) == (0, 5)
    table.apply_gradients(ids(1, 2), torch.ones(2, 2), counts=ids(1, 1))
    assert (sorted(everything(table)), table.stats().filtered) == ([2], 6)


def test_counts_add_up_where_equal_ids_are_brought_together(
    make: Make, after_sightings: Callable[[int], Any]
) -> None:
    table = make(admission=after_sightings(5))
    table.apply_gradients(ids(1, 2, 1), torch.ones(3, 2), dedup=True, counts=ids(2, 1, 3))
    table.apply_gradients(ids(1, 2), torch.ones(2, 2), dedup=True)
    assert sorted(everything(table)) == [1]


@pytest.mark.parametrize("counts", [ids(1), ids(0, 1), torch.ones(2)])
def test_counts_that_count_nothing_are_refused(table: Table, counts: Tensor) -> None:
    with pytest.raises(TableArgumentError, match="counts"):
        table.apply_gradients(ids(1, 2), torch.ones(2, 2), counts=counts)
    assert len(table) == 0


def test_restored_and_reinitialized_rows_pass_the_filter(
    make: Make, after_sightings: Callable[[int], Any]
) -> None:
    table = make(admission=after_sightings(3))
    table.reinitialize(ids(1), now=0)
    table.restore(Rows(ids(2), ids(0), rows([1, 1]), torch.empty(1, 0)))
    assert sorted(everything(table)) == [1, 2]


def test_every_write_touches_its_ids(make: Make, touched: Any) -> None:
    table = make(touched=touched)
    table.assign(ids(1), rows([1, 1]))
    table.assign_add(ids(2), rows([1, 1]))
    table.apply_gradients(ids(3, 3, 4), torch.ones(3, 2))
    table.reinitialize(ids(5), now=0)
    table.restore(Rows(ids(6), ids(0), rows([1, 1]), torch.empty(1, 0)))
    assert sorted(touched.steal().tolist()) == [1, 2, 3, 4, 5, 6]


def test_ids_that_lose_their_rows_are_touched(make: Make, touched: Any) -> None:
    table = make(touched=touched, expiry=Expiry(default=timedelta(days=1)))
    table.assign(ids(1, 2, 3), torch.ones(3, 2), event_time=ids(0, 0, 2 * DAY))
    touched.steal()
    table.remove(ids(1, 9))
    assert touched.steal().tolist() == [1], "nothing is gone of an id that had no row"
    table.evict(2 * DAY)
    assert touched.steal().tolist() == [2]
    table.clear()
    assert touched.steal().tolist() == [3]


def test_rows_pushed_out_and_zero_assignments_are_touched(make: Make, touched: Any) -> None:
    serving = make(touched=touched, serving=True, skip_zero=True)
    serving.assign(ids(1, 2), torch.ones(2, 2))
    touched.steal()
    serving.assign(ids(1), torch.zeros(1, 2))
    serving.restore(Rows(ids(2), ids(0), torch.zeros(1, 2), torch.empty(1, 0)))
    assert sorted(touched.steal().tolist()) == [1, 2]


def test_touching_begins_and_ends_while_the_table_is_used(make: Make, touched: Any) -> None:
    table: Any = make(touched=touched)
    other = TouchedKeySet(1000)
    table.assign(ids(1), rows([1, 1]))
    table.touch(other)
    table.assign(ids(2), rows([1, 1]))
    table.untouch(other)
    table.assign(ids(3), rows([1, 1]))
    assert other.steal().tolist() == [2]
    assert sorted(touched.steal().tolist()) == [1, 2, 3]


def test_digests_tell_rows_apart_by_id_and_by_every_bit(make: Make) -> None:
    table, same, other = cast("list[Table]", [make() for _ in range(3)])
    every = torch.arange(BUCKETS)
    keys = torch.arange(-50, 50)
    table.assign(keys, torch.arange(200.0).reshape(100, 2))
    same.assign(keys.flip(0), torch.arange(200.0).reshape(100, 2).flip(0))
    other.assign(keys, torch.arange(200.0).reshape(100, 2))
    assert torch.equal(table.digests(every), same.digests(every)), "in whatever order rows came"
    other.assign(ids(7), torch.tensor([[-0.0, 115.0]]))
    differing = (table.digests(every) != other.digests(every)).nonzero().squeeze(1)
    assert differing.tolist() == bucket_of(ids(7)).tolist()
    other.remove(ids(7))
    assert not torch.equal(table.digests(differing), other.digests(differing))


@pytest.mark.parametrize("count", [3, 2000])
def test_rows_are_iterated_bucket_by_bucket(make: Make, count: int) -> None:
    table = make()
    table.assign(torch.arange(300), torch.arange(600.0).reshape(300, 2))
    buckets = bucket_of(torch.arange(count)).unique()
    chunks = list(iterate_buckets(table, buckets, limit=10))
    assert all(0 < len(chunk) <= 10 for chunk in chunks)
    expected = [key for key in range(300) if bucket_of(ids(key)).item() in buckets.tolist()]
    assert sorted(torch.cat([chunk.ids for chunk in chunks]).tolist()) == expected
    assert list(iterate_buckets(table, ids())) == []


@pytest.mark.exact_rows
def test_digests_are_those_of_the_rows_given_one_by_one(make: Make) -> None:
    table = cast(Table, make())
    keys = torch.arange(-50, 50)
    values = torch.randint(0, 128, (100, 2)) / 128
    table.assign(keys, values)
    buckets = bucket_of(keys).unique()
    assert torch.equal(table.digests(buckets), digest_rows(keys, values, buckets))
    shares = [table.digests(buckets, share=(number, 3)) for number in range(3)]
    assert torch.equal(sum(shares, torch.zeros_like(buckets)), table.digests(buckets))
    third = in_share(keys, (1, 3))
    assert torch.equal(shares[1], digest_rows(keys[third], values[third], buckets))
    with pytest.raises(ValueError, match="share"):
        table.digests(buckets, share=(3, 3))


def test_an_id_that_must_wait_is_not_touched(
    make: Make, touched: Any, after_sightings: Callable[[int], Any]
) -> None:
    table = make(touched=touched, admission=after_sightings(1))
    table.apply_gradients(ids(1), rows([1, 1]))
    assert touched.steal().tolist() == []


# Capacity

CAPACITY = 8 << 20
WIDE = Segment(dim=1024, learning_rate=1.0)


@pytest.mark.float32_rows
def test_a_full_table_turns_new_ids_away_and_counts_them(make: Make) -> None:
    table = make(WIDE, capacity_bytes=CAPACITY)
    many = torch.arange(3000)
    table.assign(many, torch.ones(3000, 1024))
    stats = table.stats()
    assert 0 < stats.rows < 3000
    assert stats.rows + stats.refused == 3000
    assert stats.bytes_total <= CAPACITY
    held = table.contains(many)
    assert int(held.sum()) == stats.rows
    assert table.lookup(many)[~held].abs().sum() == 0
    table.assign_add(many[held], torch.ones(stats.rows, 1024))
    assert table.lookup(many)[held].unique().tolist() == [2.0]


@pytest.mark.float32_rows
@pytest.mark.parametrize("capacity, dim", [(1 << 17, 1), (1 << 18, 1), (CAPACITY, 1024)])
def test_a_full_table_can_be_cleared_and_filled_again(make: Make, capacity: int, dim: int) -> None:
    table = make(replace(SGD, dim=dim), capacity_bytes=capacity)
    many = torch.arange(20_000 if dim == 1 else 3000)
    values = torch.ones(len(many), dim)
    table.assign(many, values)
    held = len(table)
    assert held < len(many)
    for _ in range(3):
        table.clear()
        assert len(table) == 0
        table.assign(many, values)
        assert len(table) == held
    assert table.stats().bytes_total <= capacity


def test_a_full_table_may_expire_the_oldest_for_a_newcomer(make: Make) -> None:
    table = make(WIDE, capacity_bytes=CAPACITY, when_full="expire_oldest")
    table.assign(torch.arange(3000), torch.ones(3000, 1024), event_time=torch.arange(3000) + 1)
    stats = table.stats()
    assert stats.bytes_total <= CAPACITY
    assert stats.refused == 0
    assert stats.rows + stats.evicted == 3000
    # A table may choose among the oldest; the newer half of what it can hold is safe.
    times = {time for time, _, _ in everything(table).values()}
    assert times >= set(range(3001 - stats.rows // 2, 3001))


@pytest.mark.float32_rows
def test_rows_pushed_out_by_later_ids_of_their_own_batch_leave_no_trace(make: Make) -> None:
    table = make(WIDE, capacity_bytes=CAPACITY, when_full="expire_oldest")
    many = torch.arange(3000)
    for _ in range(2):
        table.assign(many, many.float()[:, None].expand(3000, 1024).contiguous(), event_time=many + 1)
    held = table.contains(many)
    assert 0 < int(held.sum()) < 3000
    assert torch.equal(table.lookup(many)[:, 0], many.float() * held)
    assert torch.equal(table.lookup(many)[:, -1], many.float() * held)


def test_one_large_batch_fills_a_table_as_many_small_ones_do(make: Make) -> None:
    many = torch.arange(40_000)
    tables = [make(replace(SGD, dim=1), capacity_bytes=1 << 19) for _ in range(2)]
    for table, batch in zip(tables, (100, 40_000), strict=True):
        for some in many.split(batch):
            table.assign(some, torch.ones(len(some), 1))
    small, large = (len(table) for table in tables)
    assert 0.7 * small < large < 40_000


def test_every_row_of_a_table_full_to_the_brim_is_found_again(make: Make) -> None:
    table = make(replace(SGD, dim=1), capacity_bytes=1 << 18)
    many = torch.arange(40_000)
    table.assign(many, torch.ones(40_000, 1))
    held = many[table.contains(many)]
    assert 0 < len(held) < 40_000
    table.apply_gradients(held, -torch.ones(len(held), 1))
    assert torch.equal(table.lookup(held), torch.full((len(held), 1), 2.0))


@pytest.mark.float32_rows
def test_an_older_newcomer_does_not_push_out_newer_rows(make: Make) -> None:
    table = make(WIDE, capacity_bytes=CAPACITY, when_full="expire_oldest")
    many = torch.arange(3000)
    table.assign(many, torch.ones(3000, 1024), event_time=100)
    newer = many[table.contains(many)]
    table.assign(many - 10_000, torch.ones(3000, 1024), event_time=99)
    assert bool(table.contains(newer).all())
    assert table.stats().refused > 0
    assert table.stats().bytes_total <= CAPACITY


def test_removed_rows_make_room(make: Make) -> None:
    table = make(WIDE, capacity_bytes=CAPACITY)
    many = torch.arange(3000)
    table.assign(many, torch.ones(3000, 1024))
    held = many[table.contains(many)]
    table.remove(held[:10])
    table.assign(many + 10_000, torch.ones(3000, 1024))
    assert len(table) > len(held) - 10
    assert table.stats().bytes_total <= CAPACITY


# Scanning and restoring


@pytest.mark.parametrize("limit", [1, 7, 100, 1000])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_shards_are_disjoint_and_cover_the_table(table: Table, limit: int, num_shards: int) -> None:
    many = torch.arange(-50, 50)
    table.assign(many, many.float()[:, None].expand(100, 2), event_time=3)
    shards = [everything(table, limit=limit, shard=s, num_shards=num_shards) for s in range(num_shards)]
    assert sum(map(len, shards)) == 100
    union = {key: row for shard in shards for key, row in shard.items()}
    assert union == {key: (3, [key, key], []) for key in range(-50, 50)}


def test_a_scan_is_bounded(table: Table) -> None:
    table.assign(torch.arange(100), torch.ones(100, 2))
    chunk = table.scan(limit=7)
    assert 0 < len(chunk.rows) <= 7
    assert chunk.cursor is not None


def test_an_empty_table_scans_to_its_end_at_once(table: Table) -> None:
    chunk = table.scan()
    assert (len(chunk.rows), chunk.cursor) == (0, None)
    assert chunk.rows.values.shape == (0, 2)


def test_rows_that_stay_are_scanned_exactly_once_whatever_comes_and_goes(table: Table) -> None:
    table.assign(torch.arange(2000), torch.ones(2000, 2))
    seen: list[int] = []
    cursor, fresh = None, 10_000
    while True:
        chunk = table.scan(cursor, limit=97)
        seen += chunk.rows.ids.tolist()
        if chunk.cursor is None:
            break
        cursor = chunk.cursor
        table.assign(torch.arange(fresh, fresh + 500), torch.ones(500, 2))
        table.remove(torch.arange(fresh - 400, fresh))
        fresh += 500
    stayed = sorted(key for key in seen if key < 2000)
    assert stayed == list(range(2000))
    assert len(seen) == len(set(seen))


def test_what_was_scanned_restores_into_an_equal_table(make: Make) -> None:
    segments = (
        Segment(dim=2, optimizer=Adam(), initializer=RandomUniform()),
        Segment(dim=1, optimizer=BatchSoftmax()),
    )
    one, other = make(*segments), make(*segments)
    for step in range(1, 4):
        one.apply_gradients(torch.arange(50), torch.ones(50, 3), step=step, event_time=step)
    for chunk in iterate(one, limit=13):
        other.restore(chunk)
    assert everything(other) == everything(one)
    assert other.stats().max_event_time == 3
    for table in (one, other):
        table.apply_gradients(torch.arange(50), torch.ones(50, 3), step=4)
    assert everything(other) == everything(one)


def test_restore_overwrites_rows_that_exist(table: Table) -> None:
    table.assign(ids(1), rows([1, 1]), event_time=9)
    table.restore(Rows(ids(1), ids(4), rows([2, 3]), torch.empty(1, 0)))
    assert everything(table) == {1: (4, [2, 3], [])}


def test_rows_without_state_are_restored_with_fresh_state(make: Make) -> None:
    table = make(Segment(dim=1, optimizer=Adagrad(initial_accumulator_value=0.5)))
    table.restore(Rows(ids(1), ids(4), rows([2]), torch.empty(1, 0)))
    assert everything(table) == {1: (4, [2.0], [0.5])}


def test_rows_of_another_width_are_refused(make: Make) -> None:
    table = make(Segment(dim=1, optimizer=Adagrad()))
    with pytest.raises(RestoreError, match="3 floats of values"):
        table.restore(Rows(ids(1), ids(4), rows([2, 2, 2]), torch.empty(1, 0)))
    with pytest.raises(RestoreError, match="2 floats of state"):
        table.restore(Rows(ids(1), ids(4), rows([2]), torch.zeros(1, 2)))
    assert len(table) == 0


def test_clear_drops_rows_and_the_clock_and_keeps_counters(table: Table) -> None:
    table.assign(ids(1, 2), torch.ones(2, 2), event_time=5)
    table.clear()
    assert len(table) == 0
    assert (table.stats().inserted, table.stats().max_event_time) == (2, 0)
    table.assign(ids(1), rows([1, 2]))
    assert everything(table) == {1: (0, [1, 2], [])}


@pytest.mark.float32_rows
def test_stats_add_up(table: Table) -> None:
    table.assign(torch.arange(10), torch.ones(10, 2))
    table.assign(torch.arange(10), torch.ones(10, 2))
    table.remove(ids(3))
    stats = table.stats()
    assert (stats.rows, stats.inserted, stats.removed, stats.refused) == (9, 10, 1, 0)
    assert stats.bytes_total >= stats.bytes_rows >= 9 * 8
    assert stats.bytes_total >= stats.bytes_index > 0
    assert 0 <= stats.load <= 1


# Serving


def test_a_serving_table_holds_what_its_codes_can_say(make: Make) -> None:
    table = make(
        Segment(dim=1, compressor=Fp16(), optimizer=Adagrad()),
        Segment(dim=2, compressor=FixedR8(5.0)),
        Segment(dim=2, compressor=OneBit(amplitude=0.25)),
        serving=True,
    )
    assert table.state_dim == 0
    table.assign(ids(1), rows([0.1, 100.0, 3.5, 0.001, -7.0]), event_time=4)
    half = torch.tensor(0.1).half().item()
    assert table.lookup(ids(1, 2)).tolist() == [[half, 4.9609375, 3.515625, 0.25, -0.25], [0] * 5]
    assert table.lookup_rows(ids(1))[1].event_times.tolist() == [4]
    table.assign_add(ids(1), rows([0, -1, 0, 0, 1]))
    assert table.lookup(ids(1))[0, 1:].tolist() == [3.9453125, 3.515625, 0.25, 0.25]


def test_a_serving_table_restores_training_rows_without_their_state(make: Make) -> None:
    trained = make(Segment(dim=1, optimizer=Adagrad(), learning_rate=1.0))
    trained.assign(ids(1), rows([0.5]), event_time=7)
    served = make(Segment(dim=1, optimizer=Adagrad(), compressor=Fp16()), serving=True)
    served.restore(trained.scan().rows)
    assert everything(served) == {1: (7, [0.5], [])}


def test_a_serving_table_does_not_train(make: Make) -> None:
    table = make(serving=True)
    with pytest.raises(ServingTableError):
        table.apply_gradients(ids(1), rows([1, 1]))
    with pytest.raises(ServingTableError):
        table.reinitialize(ids(1), now=0)


def test_a_new_serving_row_starts_from_its_initializer_too(make: Make) -> None:
    table = make(Segment(dim=1, initializer=Ones()), serving=True)
    table.assign_add(ids(1), rows([2]))
    assert table.lookup(ids(1)).tolist() == [[3]]


def test_a_serving_table_that_skips_zeros_holds_none(make: Make) -> None:
    table = make(serving=True, skip_zero=True)
    table.assign(ids(1, 2, 3), rows([1, 1], [0, 0], [1e-30, 0]))
    assert list(everything(table)) == [1]
    table.restore(Rows(ids(1, 2), ids(0, 0), rows([0, 0], [0, 1]), torch.empty(2, 0)))
    assert list(everything(table)) == [2]
    table.assign(ids(2), rows([0, 0]))
    assert len(table) == 0
    assert table.stats().removed == 2


# Refusals: nothing is touched


@pytest.mark.parametrize(
    "bad",
    [
        torch.tensor([1], dtype=torch.int32),
        torch.tensor([1.0]),
        torch.tensor(1),
        torch.tensor([[1]]),
        [1],
    ],
    ids=["int32", "float", "0-d", "2-d", "list"],
)
def test_ids_must_be_one_row_of_int64(table: Table, bad: Any) -> None:
    for call in (
        lambda: table.lookup(bad),
        lambda: table.lookup_rows(bad),
        lambda: table.contains(bad),
        lambda: table.remove(bad),
        lambda: table.reinitialize(bad, now=0),
        lambda: table.assign(bad, rows([1, 1])),
        lambda: table.assign_add(bad, rows([1, 1])),
        lambda: table.apply_gradients(bad, rows([1, 1])),
    ):
        with pytest.raises(TableArgumentError, match="ids"):
            call()
    assert len(table) == 0


@pytest.mark.parametrize(
    "bad",
    [
        torch.ones(1, 2, dtype=torch.float64),
        torch.ones(1, 2, dtype=torch.float16),
        torch.ones(2),
        torch.ones(1, 3),
        torch.ones(2, 2),
        torch.ones(1, 2, 1),
    ],
    ids=["double", "half", "flat", "too wide", "too many", "3-d"],
)
def test_values_must_be_float32_of_one_row_per_id(table: Table, bad: Tensor) -> None:
    for call in (
        lambda: table.assign(ids(1), bad),
        lambda: table.assign_add(ids(1), bad),
        lambda: table.apply_gradients(ids(1), bad),
        lambda: table.apply_gradients(ids(1), rows([1, 1]), latest_values=bad),
        lambda: table.lookup(ids(1), out=bad),
    ):
        with pytest.raises(TableArgumentError):
            call()
    assert len(table) == 0


def test_out_must_be_contiguous(table: Table) -> None:
    with pytest.raises(TableArgumentError, match="contiguous"):
        table.lookup(ids(1, 2), out=torch.empty(2, 2).T)


@pytest.mark.parametrize("bad", [-1, 2**32, ids(-1), ids(2**32), ids(1, 2), torch.tensor([1.0])], ids=str)
def test_event_times_must_be_unix_seconds_one_or_one_per_id(table: Table, bad: Any) -> None:
    for call in (table.assign, table.assign_add, table.apply_gradients):
        with pytest.raises(TableArgumentError, match="event_time"):
            call(ids(1), rows([1, 1]), event_time=bad)  # type: ignore[operator]
    assert len(table) == 0
    assert table.stats().max_event_time == 0


def test_there_must_be_one_rate_per_segment(table: Table) -> None:
    for bad in (torch.tensor([0.1, 0.1]), torch.tensor([]), torch.tensor(0.1), torch.tensor([0.1]).double()):
        with pytest.raises(TableArgumentError, match="learning_rates"):
            table.apply_gradients(ids(1), rows([1, 1]), learning_rates=bad)
    assert len(table) == 0


def test_delay_compensation_needs_the_latest_values(make: Make) -> None:
    table = make(Segment(dim=1, optimizer=StochasticRounding(DelayCompensated(Sgd(), 0.1))))
    with pytest.raises(TableArgumentError, match="latest_values"):
        table.apply_gradients(ids(1), rows([1]))
    assert len(table) == 0


def test_a_step_is_not_negative(make: Make) -> None:
    table = make(Segment(dim=1, optimizer=BatchSoftmax()))
    with pytest.raises(TableArgumentError, match="step"):
        table.apply_gradients(ids(1), rows([1]), step=-1)
    assert len(table) == 0


def test_reinitialize_refuses_an_impossible_time(table: Table) -> None:
    with pytest.raises(TableArgumentError, match="now"):
        table.reinitialize(ids(1), now=-1)


@pytest.mark.parametrize(
    "how", [{"limit": 0}, {"shard": 1}, {"shard": -1}, {"shard": 0, "num_shards": 0}], ids=str
)
def test_a_scan_must_make_sense(table: Table, how: dict[str, int]) -> None:
    with pytest.raises(TableArgumentError, match="scan"):
        table.scan(**how)  # type: ignore[arg-type]


# Threads and the end


def test_no_update_is_lost_between_threads(make: Make) -> None:
    table = make(replace(SGD, dim=4))
    keys = torch.arange(64)

    def work() -> None:
        for _ in range(25):
            table.assign_add(keys, torch.ones(64, 4))
            table.apply_gradients(keys, torch.full((64, 4), -1.0), dedup=True)
            seen = table.lookup(keys)
            assert torch.equal(seen, seen[:, :1].expand(64, 4)), "a row was read half-written"

    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert table.lookup(keys).unique().tolist() == [4 * 25 * 2]


def test_a_closed_table_refuses_every_call(table: Table) -> None:
    table.close()
    table.close()
    one, value = ids(1), rows([1, 1])
    for call in (
        lambda: len(table),
        lambda: table.lookup(one),
        lambda: table.lookup_rows(one),
        lambda: table.contains(one),
        lambda: table.assign(one, value),
        lambda: table.assign_add(one, value),
        lambda: table.apply_gradients(one, value),
        lambda: table.reinitialize(one, now=0),
        lambda: table.remove(one),
        table.evict,
        table.scan,
        lambda: table.restore(Rows(one, one, value, torch.empty(1, 0))),
        table.clear,
        table.stats,
    ):
        with pytest.raises(TableClosedError, match="item"):
            call()
