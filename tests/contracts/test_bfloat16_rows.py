"""What a table with bfloat16 embeddings does on top of the contract of tables. Read the names in order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.tables import ids, rows, spilling_table_classes, table_classes
from torch import Tensor

from monolith.errors import ConfigError
from monolith.table import (
    Adagrad,
    DictTable,
    DynamicWdAdagrad,
    GroupAdagrad,
    NativeTable,
    RandomUniform,
    Segment,
    Sgd,
    StochasticRounding,
    Table,
    TableConfig,
    dump,
    iterate,
    load,
)

Make = Callable[..., Table]

SGD = Segment(dim=8, optimizer=Sgd(), learning_rate=1.0)
BIAS_AND_VECTOR = (
    Segment(dim=1, optimizer=Adagrad(), learning_rate=0.1),
    Segment(dim=6, optimizer=Adagrad(), learning_rate=0.1, initializer=RandomUniform(low=-1.0, high=1.0)),
)
LAZY = DynamicWdAdagrad(learning_rate=0.1, weight_decay=0.2, lazy_decay=True)


def config_of(*segments: Segment, **options: Any) -> TableConfig:
    return TableConfig(name="item", segments=segments or (SGD,), **{"embedding_dtype": "bfloat16", **options})


@pytest.fixture(params=[*table_classes(), *spilling_table_classes()], ids=lambda cls: cls.__name__)
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[Table] = []

    def build(*segments: Segment, **options: Any) -> Table:
        made.append(request.param(config_of(*segments, **options)))
        return made[-1]

    yield build
    for table in made:
        table.close()


def everything(table: Table) -> dict[int, tuple[list[float], list[float]]]:
    return {
        key: (values, state)
        for chunk in iterate(table)
        for key, values, state in zip(
            chunk.ids.tolist(), chunk.values.tolist(), chunk.state.tolist(), strict=True
        )
    }


def as_torch_rounds(values: Tensor) -> Tensor:
    return values.to(torch.bfloat16).to(torch.float32)


# Values


def test_assigned_added_and_first_values_go_to_the_nearest(make: Make) -> None:
    table = make(replace(SGD, initializer=RandomUniform(low=-1.0, high=1.0)))
    many, values = torch.arange(100), torch.randn(100, 8, generator=torch.Generator().manual_seed(1))
    table.assign(many, values)
    assert torch.equal(table.lookup(many), as_torch_rounds(values))
    table.assign_add(many, values)
    assert torch.equal(table.lookup(many), as_torch_rounds(as_torch_rounds(values) + values))
    table.reinitialize(many, now=0)
    plain = DictTable(replace(table.config, embedding_dtype="float32"))
    plain.reinitialize(many, now=0)
    assert torch.equal(table.lookup(many), as_torch_rounds(plain.lookup(many)))


def test_a_step_is_taken_in_float32_and_rounded_once(make: Make) -> None:
    table = make(embedding_rounding="nearest")
    table.assign(ids(1), torch.ones(1, 8))
    # The gradients of one ID are summed before they are rounded: each of them alone would be lost.
    table.apply_gradients(ids(1, 1, 1), torch.full((3, 8), -0.002), dedup=True)
    assert table.lookup(ids(1)).unique().tolist() == [1.0078125]
    table.apply_gradients(ids(1, 1, 1), torch.full((3, 8), -0.002))
    assert table.lookup(ids(1)).unique().tolist() == [1.0078125]


def test_by_chance_a_step_goes_to_a_neighbour_and_the_mean_is_right(make: Make) -> None:
    table = make()
    many = torch.arange(4000)
    table.assign(many, torch.ones(4000, 8))
    table.apply_gradients(many, torch.full((4000, 8), -0.002), step=3)
    seen = table.lookup(many)
    assert seen.unique().tolist() == [1.0, 1.0078125]
    assert abs(seen.mean().item() - 1.002) < 1e-4  # 5 deviations
    for column in range(8):  # each column and each row has chances of its own
        assert abs(seen[:, column].mean().item() - 1.002) < 3e-4
    assert len(seen.unique(dim=0)) > 100


def test_many_small_steps_add_up_by_chance_and_are_lost_to_the_nearest(make: Make) -> None:
    many = torch.arange(64)
    for rounding, wanted in (("nearest", 1.0), ("stochastic", 0.9)):
        table = make(embedding_rounding=rounding)
        table.assign(many, torch.ones(64, 8))
        for step in range(100):
            table.apply_gradients(many, torch.full((64, 8), 0.001), step=step)
        assert abs(table.lookup(many).mean().item() - wanted) < 0.01


def test_chances_are_the_same_again_and_others_by_step_and_seed(make: Make) -> None:
    def trained(step: int, **options: Any) -> Tensor:
        table = make(**options)
        table.assign(torch.arange(50), torch.ones(50, 8))
        table.apply_gradients(torch.arange(50), torch.full((50, 8), -0.004), step=step)
        return table.lookup(torch.arange(50))

    first = trained(7)
    assert torch.equal(first, trained(7))
    assert not torch.equal(first, trained(8))
    assert not torch.equal(first, trained(7, seed=1))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(
    "segments", [(SGD,), BIAS_AND_VECTOR, (Segment(dim=3, optimizer=LAZY, learning_rate=0.1),)], ids=len
)
def test_it_is_the_plain_table_to_the_bit(make: Make, segments: tuple[Segment, ...], rounding: str) -> None:
    table = make(*segments, embedding_rounding=rounding)
    plain = DictTable(table.config)
    random = torch.Generator().manual_seed(3)
    for step in range(6):
        some = torch.randint(-20, 20, (60,), generator=random)
        by = torch.randn(60, table.dim, generator=random)
        for one in (table, plain):
            one.apply_gradients(some, by, step=step, dedup=step % 2 == 0)
            one.assign_add(some[:9], by[:9])
            one.remove(some[20:22])
            assert one.lookup(some).dtype == torch.float32
        assert torch.equal(table.lookup(some), plain.lookup(some))
        assert everything(table) == everything(plain)


def test_optimizer_state_stays_float32(make: Make) -> None:
    table = make(Segment(dim=8, optimizer=Adagrad(initial_accumulator_value=0.1), learning_rate=0.1))
    table.apply_gradients(ids(1), torch.full((1, 8), 0.3))
    (_, state), *_ = everything(table).values()
    assert state == [(torch.tensor(0.1) + torch.tensor(0.3) * torch.tensor(0.3)).item()] * 8


def test_a_step_whose_row_would_not_be_finite_is_not_taken(make: Make) -> None:
    """And what is large and finite stays finite."""
    table = make(Segment(dim=8, optimizer=Adagrad(weight_decay=1e20), learning_rate=1e10))
    table.assign(ids(1), torch.full((1, 8), 3.4e38))
    held = everything(table)
    assert held[1][0] == [3.3895313892515355e38] * 8
    table.apply_gradients(ids(1), torch.zeros(1, 8))
    assert everything(table) == held
    assert table.stats().non_finite == 1


def test_a_row_takes_half_the_bytes_of_values(make: Make) -> None:
    def row_bytes(optimizer: Any, dtype: str) -> float:
        table = make(Segment(dim=64, optimizer=optimizer), embedding_dtype=dtype)
        table.assign(torch.arange(12), torch.ones(12, 64))
        return table.stats().bytes_rows

    assert row_bytes(Sgd(), "bfloat16") < 0.6 * row_bytes(Sgd(), "float32")
    assert row_bytes(GroupAdagrad(), "bfloat16") < 0.6 * row_bytes(GroupAdagrad(), "float32")


# On disk


def test_a_dump_holds_every_value_and_loads_with_either_setting(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = make(*BIAS_AND_VECTOR)
    table.apply_gradients(torch.arange(50), torch.ones(50, 7), step=1)
    dump(table, str(tmp_path / "item"))
    for dtype in ("bfloat16", "float32"):
        other = make(*BIAS_AND_VECTOR, embedding_dtype=dtype)
        with caplog.at_level(logging.WARNING):
            load(other, str(tmp_path / "item"))
        assert everything(other) == everything(table)
    assert not caplog.records


def test_float32_rows_are_rounded_to_the_nearest_when_loaded_which_is_logged(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = make(embedding_dtype="float32")
    before.assign(ids(1, 2), rows([0.1] * 8, [0.5] * 8))
    dump(before, str(tmp_path / "item"))
    table = make()
    with caplog.at_level(logging.WARNING):
        load(table, str(tmp_path / "item"))
    assert table.lookup(ids(1, 2))[:, 0].tolist() == [0.10009765625, 0.5]
    assert "of 2 restored rows, 1 had float32 values that were rounded to the nearest" in caplog.text


# Settings


@pytest.mark.parametrize("wrong", [{"embedding_dtype": "half"}, {"embedding_rounding": "up"}])
def test_an_unknown_setting_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        config_of(**wrong)


def test_two_ways_to_round_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="StochasticRounding"):
        config_of(replace(SGD, optimizer=StochasticRounding(Sgd())))


def test_tables_of_different_storage_are_not_merged() -> None:
    signatures = {
        config_of(**how).signature()
        for how in ({}, {"embedding_rounding": "nearest"}, {"embedding_dtype": "float32"})
    }
    assert len(signatures) == 3


def test_a_serving_table_stores_what_its_compressors_say() -> None:
    table = NativeTable(config_of(serving=True))
    table.assign(ids(1), torch.full((1, 8), 0.1))
    assert table.lookup(ids(1)).unique().tolist() == [torch.tensor(0.1).item()]


@pytest.mark.parametrize("workers", [1, 3])
def test_the_outcome_does_not_depend_on_the_number_of_threads(workers: int) -> None:
    from monolith import native

    many = torch.arange(50_000)
    by = torch.randn(50_000, 7, generator=torch.Generator().manual_seed(2))
    tables = [
        NativeTable(config_of(*BIAS_AND_VECTOR)),
        NativeTable(config_of(*BIAS_AND_VECTOR), workers=native.Workers(workers)),
    ]
    for table in tables:
        for step in range(3):
            table.apply_gradients(many, by, step=step, dedup=True)
    assert torch.equal(*(table.lookup(many) for table in tables))
