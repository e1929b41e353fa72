"""Lazy decay equals decay of all rows in each step, in what is read as in what is trained.

The reference is a dense torch embedding with dense Adagrad, all of whose weights are decayed in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from contracts.tables import (
    ids,
    rows,
    spilling_table_classes,
    table_classes,
    three_tier_table_classes,
    tiered_table_classes,
)
from torch import Tensor, nn
from torch.testing import assert_close

from monolith.errors import ConfigError
from monolith.table import (
    Adagrad,
    DelayCompensated,
    DictTable,
    DynamicWdAdagrad,
    NativeTable,
    RandomUniform,
    Segment,
    Table,
    TableConfig,
    iterate,
)
from monolith.table.update_rules import caught_up

MANY, DIM, RATE, DECAY = 30, 3, 0.1, 0.2
LAZY = DynamicWdAdagrad(learning_rate=RATE, weight_decay=DECAY, lazy_decay=True)

Make = Callable[..., Table]


@pytest.fixture(
    params=[
        *table_classes(),
        *tiered_table_classes(),
        *spilling_table_classes(),
        *three_tier_table_classes(),
    ],
    ids=lambda cls: cls.__name__,
)
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[Table] = []

    def build(*segments: Segment) -> Table:
        config = TableConfig(name="item", segments=segments or (_segment(),))
        made.append(request.param(config))
        return made[-1]

    yield build
    for table in made:
        table.close()


def _segment(optimizer: Any = LAZY, **more: Any) -> Segment:
    return Segment(dim=DIM, optimizer=optimizer, initializer=RandomUniform(low=-1.0, high=1.0), **more)


class Dense:
    """Trains the same rows as a dense embedding that decays as a whole in each step."""

    def __init__(self, first: Tensor) -> None:
        self.embedding = nn.Embedding.from_pretrained(first.clone(), freeze=False)
        self._adagrad = torch.optim.Adagrad(
            self.embedding.parameters(), lr=RATE, initial_accumulator_value=0.1, eps=0.0
        )

    def step(self, batch: Tensor, wanted: Tensor) -> None:
        self._adagrad.zero_grad()
        ((self.embedding(batch) - wanted) ** 2).sum().backward()
        with torch.no_grad():
            self.embedding.weight.mul_(1 - RATE * DECAY)
        self._adagrad.step()


def train(table: Table, batch: Tensor, wanted: Tensor, step: int) -> None:
    gradients = 2 * (table.lookup(batch) - wanted)
    table.apply_gradients(batch, gradients, step=step, dedup=True)


def born(table: Table) -> Tensor:
    """Give every id its row, by a step that moves none of them; return the rows."""
    table.apply_gradients(torch.arange(MANY), torch.zeros(MANY, DIM), step=0)
    return table.lookup(torch.arange(MANY))


def test_rows_that_are_read_and_trained_now_and_then_equal_those_of_a_dense_embedding(make: Make) -> None:
    table = make()
    dense = Dense(born(table))
    drawn = torch.Generator().manual_seed(7)
    everything = torch.arange(MANY)
    for step in range(1, 120):
        batch = torch.randint(0, 6 if step % 3 else MANY, (5,), generator=drawn)  # most ids are rare
        wanted = torch.randn(5, DIM, generator=drawn)
        train(table, batch, wanted, step)
        dense.step(batch, wanted)
        assert_close(table.lookup(everything), dense.embedding.weight.detach(), rtol=2e-5, atol=1e-6)


def test_without_it_a_row_that_is_not_in_a_batch_stays_as_it_is(make: Make) -> None:
    eager = DynamicWdAdagrad(learning_rate=RATE, weight_decay=DECAY)
    table = make(_segment(eager))
    before = born(table)
    table.apply_gradients(ids(1), torch.zeros(1, DIM), step=1)
    assert torch.equal(table.lookup(ids(2)), before[2:3])


def test_a_table_that_is_restored_shows_and_trains_the_same(make: Make) -> None:
    one, other = make(), make()
    born(one)
    for step in range(1, 9):
        one.apply_gradients(ids(step), torch.ones(1, DIM), step=step)
    for chunk in iterate(one, limit=7):
        other.restore(chunk)
    everything = torch.arange(MANY)
    assert torch.equal(other.lookup(everything), one.lookup(everything))  # nobody said a rate yet
    for table in (one, other):
        table.apply_gradients(ids(3, 20), torch.ones(2, DIM), step=9)
    assert torch.equal(other.lookup(everything), one.lookup(everything))


def test_a_table_that_goes_back_to_earlier_rows_goes_back_to_their_step(make: Make) -> None:
    table = make()
    born(table)
    table.apply_gradients(ids(1), torch.ones(1, DIM), step=3)
    saved, shown = list(iterate(table)), table.lookup(torch.arange(MANY))
    for step in range(4, 9):
        table.apply_gradients(ids(step), torch.ones(1, DIM), step=step)
    table.clear()
    for chunk in saved:
        table.restore(chunk)
    assert torch.equal(table.lookup(torch.arange(MANY)), shown)


def test_a_step_that_comes_again_or_late_takes_nothing_more(make: Make) -> None:
    table = make(_segment(learning_rate=0.5))
    table.apply_gradients(ids(1), torch.zeros(1, DIM), step=4)
    at_birth = table.lookup(ids(1))
    table.apply_gradients(ids(2), torch.zeros(1, DIM), step=6)
    later = at_birth * np.float32(0.9 * 0.9)
    assert_close(table.lookup(ids(1)), later)
    for step in (6, 6, 5):
        table.apply_gradients(ids(1), torch.zeros(1, DIM), step=step)
        assert_close(table.lookup(ids(1)), later)


def test_a_row_decays_from_its_first_step_on_and_not_from_that_of_the_table(make: Make) -> None:
    early, late = make(), make()
    early.apply_gradients(ids(1), torch.zeros(1, DIM), step=0)
    late.apply_gradients(ids(1), torch.zeros(1, DIM), step=1_000_000_000)
    assert torch.equal(early.lookup(ids(1)), late.lookup(ids(1)))


def test_what_is_assigned_reads_as_it_is_and_decays_from_then_on(make: Make) -> None:
    table = make()
    born(table)
    table.apply_gradients(ids(1), torch.zeros(1, DIM), step=5)
    table.assign(ids(2), rows([1.0, 2.0, 3.0]))
    assert table.lookup(ids(2)).tolist() == [[1.0, 2.0, 3.0]]
    before = table.lookup(ids(3))
    table.assign_add(ids(3), torch.ones(1, DIM))
    assert_close(table.lookup(ids(3)), before + 1)
    table.apply_gradients(ids(1), torch.zeros(1, DIM), step=6)
    assert_close(table.lookup(ids(2)), rows([1.0, 2.0, 3.0]) * (1 - RATE * DECAY))


def test_the_rate_of_the_newest_step_counts_for_the_steps_that_were_missed(make: Make) -> None:
    table = make()
    before = born(table)
    for step, rate in ((1, 0.1), (2, 0.1), (3, 1.0)):
        table.apply_gradients(ids(1), torch.zeros(1, DIM), step=step, learning_rates=torch.tensor([rate]))
    assert_close(table.lookup(ids(2)), before[2:3] * 0.8**3)


def test_other_segments_of_a_row_do_not_decay(make: Make) -> None:
    table = make(
        Segment(dim=1, optimizer=Adagrad(), initializer=RandomUniform(low=0.5, high=1.0)), _segment()
    )
    table.apply_gradients(ids(1, 2), torch.zeros(2, 1 + DIM), step=0)
    before = table.lookup(ids(2))
    table.apply_gradients(ids(1), torch.zeros(1, 1 + DIM), step=1)
    after = table.lookup(ids(2))
    assert torch.equal(after[:, :1], before[:, :1])
    assert_close(after[:, 1:], before[:, 1:] * (1 - RATE * DECAY))


def test_both_tables_have_the_same_bits() -> None:
    config = TableConfig(name="item", segments=(_segment(),))
    plain, native = DictTable(config), NativeTable(config)
    drawn = torch.Generator().manual_seed(3)
    for step in range(60):
        batch = torch.randint(0, MANY, (4,), generator=drawn)
        gradients = torch.randn(4, DIM, generator=drawn)
        for table in (plain, native):
            table.apply_gradients(batch, gradients, step=step, dedup=True)
        everything = torch.arange(MANY)
        assert torch.equal(plain.lookup(everything), native.lookup(everything))
    native.close()


def test_rows_that_are_read_out_of_a_table_are_caught_up_on(make: Make) -> None:
    table = make()
    born(table)
    for step in range(1, 9):
        table.apply_gradients(ids(step), torch.ones(1, DIM), step=step)
    values_of = caught_up(table.config, iterate(table, limit=7))
    for chunk in iterate(table, limit=7):
        assert np.array_equal(values_of(chunk), table.lookup(chunk.ids).numpy())


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="lazy_decay takes decay off the value; it needs decouple"):
        DynamicWdAdagrad(lazy_decay=True, decouple_weight_decay=False)
    with pytest.raises(ConfigError, match="with lazy_decay a stored value is older"):
        DelayCompensated(LAZY, 0.1)
