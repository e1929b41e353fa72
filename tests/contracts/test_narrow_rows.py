"""What a table with narrow embeddings does on top of the contract of tables. Read the names in order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.tables import (
    cuda_table_classes,
    ids,
    rows,
    spilling_table_classes,
    table_classes,
    three_tier_table_classes,
    tiered_table_classes,
)
from torch import Tensor

from monolith.errors import ConfigError
from monolith.table import (
    Adagrad,
    CudaTable,
    DictTable,
    DynamicWdAdagrad,
    GroupAdagrad,
    MultiTable,
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


UNITS = {"bfloat16": 2**-7, "float16": 2**-10, "int8": 2**-6}
"""The distance of neighbours above 1, in a row whose largest value is ANCHOR."""
ANCHOR = 127 / 64


def config_of(*segments: Segment, **options: Any) -> TableConfig:
    return TableConfig(name="item", segments=segments or (SGD,), **{"embedding_dtype": "bfloat16", **options})


def kinds() -> list[Any]:
    classes = [*table_classes(), *spilling_table_classes()]
    found = [(dtype, cls) for dtype in ("bfloat16", "float16", "int8") for cls in classes]
    return found + [("int8", cls) for cls in [*tiered_table_classes(), *three_tier_table_classes()]]


@pytest.fixture(params=kinds(), ids=lambda kind: f"{kind[0]}-{kind[1].__name__}")
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def dtype(kind: Any) -> str:
    return str(kind[0])


@pytest.fixture
def make(kind: Any) -> Iterator[Make]:
    made: list[Table] = []

    def build(*segments: Segment, **options: Any) -> Table:
        made.append(kind[1](config_of(*segments, **{"embedding_dtype": kind[0], **options})))
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


def nearest(values: Tensor, dtype: str) -> Tensor:
    """Round by other means than the library's. Int8 comes near it: its scale is rounded to 17 bits."""
    if dtype == "int8":
        scale = values.double().abs().amax(dim=1, keepdim=True) / 127
        return ((values / scale).round() * scale).float()
    return values.to(getattr(torch, dtype)).float()


def anchored(count: int, value: float) -> Tensor:
    """Return rows of eight whose first value settles the scale that int8 rounds by."""
    values = torch.full((count, 8), value)
    values[:, 0] = ANCHOR
    return values


def by(count: int, change: float) -> Tensor:
    """Return gradients that add so much to all but the anchor."""
    gradients = torch.full((count, 8), -change)
    gradients[:, 0] = 0
    return gradients


# Values


def test_assigned_added_and_first_values_go_to_the_nearest(make: Make, dtype: str) -> None:
    table = make(replace(SGD, initializer=RandomUniform(low=-1.0, high=1.0)))
    many, values = torch.arange(100), torch.randn(100, 8, generator=torch.Generator().manual_seed(1))

    def check(wanted: Tensor) -> None:
        relative = 2e-5 if dtype == "int8" else 0.0
        torch.testing.assert_close(table.lookup(many), nearest(wanted, dtype), rtol=relative, atol=0.0)

    table.assign(many, values)
    check(values)
    held = table.lookup(many)
    table.assign_add(many, values)
    check(held + values)
    table.reinitialize(many, now=0)
    plain = DictTable(replace(table.config, embedding_dtype="float32"))
    plain.reinitialize(many, now=0)
    check(plain.lookup(many))


def test_a_step_is_taken_in_float32_and_rounded_once(make: Make, dtype: str) -> None:
    table, unit = make(embedding_rounding="nearest"), UNITS[dtype]
    table.assign(ids(1), anchored(1, 1.0))
    # The gradients of one ID are summed before they are rounded: each of them alone would be lost.
    table.apply_gradients(ids(1, 1, 1), by(3, 0.25 * unit), dedup=True)
    assert table.lookup(ids(1)).unique().tolist() == [1 + unit, ANCHOR]
    table.apply_gradients(ids(1, 1, 1), by(3, 0.25 * unit))
    assert table.lookup(ids(1)).unique().tolist() == [1 + unit, ANCHOR]


def test_by_chance_a_step_goes_to_a_neighbour_and_the_mean_is_right(make: Make, dtype: str) -> None:
    table, unit = make(), UNITS[dtype]
    many = torch.arange(4000)
    table.assign(many, anchored(4000, 1.0))
    table.apply_gradients(many, by(4000, 0.25 * unit), step=3)
    seen = table.lookup(many)
    assert seen.unique().tolist() == [1, 1 + unit, ANCHOR]
    assert abs(seen[:, 1:].mean().item() - 1 - 0.25 * unit) < 0.013 * unit  # 5 deviations
    for column in range(1, 8):  # each column and each row has chances of its own
        assert abs(seen[:, column].mean().item() - 1 - 0.25 * unit) < 0.035 * unit
    assert len(seen.unique(dim=0)) > 60


def test_many_small_steps_add_up_by_chance_and_are_lost_to_the_nearest(make: Make, dtype: str) -> None:
    many, unit = torch.arange(64), UNITS[dtype]
    for rounding, wanted in (("nearest", 0.0), ("stochastic", 12.5)):
        table = make(embedding_rounding=rounding)
        table.assign(many, anchored(64, 1.0))
        for step in range(100):
            table.apply_gradients(many, by(64, 0.125 * unit), step=step)
        assert abs(table.lookup(many)[:, 1:].mean().item() - 1 - wanted * unit) < 0.8 * unit


def test_chances_are_the_same_again_and_others_by_step_and_seed(make: Make) -> None:
    def trained(step: int, **options: Any) -> Tensor:
        table = make(**options)
        table.assign(torch.arange(50), anchored(50, 1.0))
        table.apply_gradients(torch.arange(50), by(50, 2**-11), step=step)
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
        gradients = torch.randn(60, table.dim, generator=random)
        for one in (table, plain):
            one.apply_gradients(some, gradients, step=step, dedup=step % 2 == 0)
            one.assign_add(some[:9], gradients[:9])
            one.remove(some[20:22])
            assert one.lookup(some).dtype == torch.float32
        assert torch.equal(table.lookup(some), plain.lookup(some))
        assert everything(table) == everything(plain)


WIDTHS = [
    pytest.param(widths, marks=() if widths == (32,) or cls is CudaTable else pytest.mark.soak)
    for cls in cuda_table_classes()[:1]
    for widths in ((32,), (16,), (64,), (1, 31), (16, 16), (4, 28), (5, 2, 6), (200,))
]
"""Those that a device fetches four at a time, two, and one; on an emulated one, most are a soak."""


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
@pytest.mark.parametrize("cls", cuda_table_classes())
def test_fused_steps_of_rows_of_any_width_are_those_of_host_memory(
    cls: Any, dtype: str, widths: tuple[int, ...], rounding: str
) -> None:
    segments = [
        replace(BIAS_AND_VECTOR[1], dim=width, optimizer=GroupAdagrad() if number % 2 else Adagrad())
        for number, width in enumerate(widths)
    ]
    names, random = ("a", "b"), torch.Generator().manual_seed(5)
    config = config_of(*segments, embedding_dtype=dtype, embedding_rounding=rounding)
    there, here = (
        MultiTable({name: kind(replace(config, name=name)) for name in names}) for kind in (cls, NativeTable)
    )
    for step in range(4):
        some = torch.randint(0, 50, (160,), generator=random)
        some[:20] = 7
        gradients = torch.randn(160 * config.dim, generator=random) * 10.0**-step
        seen = []
        for tables in (there, here):
            batch = some, torch.tensor([90, 70])
            tables.fused_apply_gradients(*batch, gradients, num_batches=1, step=step, dedup=step > 0)
            seen.append(tables.fused_lookup(*batch, num_batches=1).embeddings.cpu())
        assert torch.equal(*seen)
    for name in names:
        assert everything(there[name]) == everything(here[name])
        buckets = torch.arange(4096)
        assert torch.equal(there[name].digests(buckets), here[name].digests(buckets))
    there.close()


def test_optimizer_state_stays_float32(make: Make) -> None:
    table = make(Segment(dim=8, optimizer=Adagrad(initial_accumulator_value=0.1), learning_rate=0.1))
    table.apply_gradients(ids(1), torch.full((1, 8), 0.3))
    (_, state), *_ = everything(table).values()
    assert state == [(torch.tensor(0.1) + torch.tensor(0.3) * torch.tensor(0.3)).item()] * 8


def test_a_step_whose_row_would_not_be_finite_is_not_taken(make: Make, dtype: str) -> None:
    """And what is large and finite stays finite."""
    table = make(Segment(dim=8, optimizer=Adagrad(weight_decay=1e36), learning_rate=1e10))
    table.assign(ids(1), torch.full((1, 8), 3.4e38))
    held = everything(table)
    largest = {"bfloat16": 3.3895313892515355e38, "float16": 65504.0, "int8": 3.4e38}[dtype]
    assert held[1][0] == pytest.approx([largest] * 8, rel=1e-5 if dtype == "int8" else 0)
    table.apply_gradients(ids(1), torch.zeros(1, 8))
    assert everything(table) == held
    assert table.stats().non_finite == 1


def test_a_row_takes_fewer_bytes_of_values(make: Make, dtype: str) -> None:
    def row_bytes(optimizer: Any, dtype: str) -> float:
        table = make(Segment(dim=64, optimizer=optimizer), embedding_dtype=dtype)
        table.assign(torch.arange(12), torch.ones(12, 64))
        return table.stats().bytes_rows

    most = 0.4 if dtype == "int8" else 0.6
    assert row_bytes(Sgd(), dtype) < most * row_bytes(Sgd(), "float32")
    assert row_bytes(GroupAdagrad(), dtype) < most * row_bytes(GroupAdagrad(), "float32")


# Int8

INT8_TABLES = pytest.mark.parametrize("cls", [NativeTable, *cuda_table_classes()])


@INT8_TABLES
def test_a_bias_has_another_scale_than_the_vector_next_to_it(cls: Any) -> None:
    table = cls(config_of(*BIAS_AND_VECTOR, embedding_dtype="int8"))
    values = torch.tensor([[5.0, 0.0127, -0.0127, 0.001, 0.0002, 0.0, 0.006]])
    table.assign(ids(1), values)
    assert (table.lookup(ids(1)) - values).abs()[:, 1:].max() < 0.0127 / 253
    assert table.lookup(ids(1))[0, 0].item() == pytest.approx(5.0, rel=2**-17)


@INT8_TABLES
def test_a_row_of_int8_is_the_same_after_any_number_of_restores(cls: Any) -> None:
    values = (
        torch.randn(1000, 7, generator=torch.Generator().manual_seed(4))
        * torch.logspace(-30, 30, 1000)[:, None]
    )
    table, other = (cls(config_of(*BIAS_AND_VECTOR, embedding_dtype="int8")) for _ in range(2))
    many = torch.arange(1000)
    table.assign(many, values)
    for step in range(3):
        table.apply_gradients(many, values, step=step)
        other.restore(table.scan().rows)
        assert everything(other) == everything(table)
        assert torch.equal(other.digests(torch.arange(4096)), table.digests(torch.arange(4096)))


@INT8_TABLES
def test_the_largest_of_a_row_of_int8_grows_by_small_steps(cls: Any) -> None:
    """Its code is always 127; it is the scale that is rounded by chance."""
    table = cls(config_of(embedding_dtype="int8"))
    many = torch.arange(500)
    table.assign(many, torch.ones(500, 8))
    for step in range(100):
        table.apply_gradients(many, torch.full((500, 8), -1e-6), step=step)
    assert abs(table.lookup(many).mean().item() - 1.0001) < 8e-6


@INT8_TABLES
def test_a_nan_that_is_assigned_makes_nans_of_its_segment(cls: Any) -> None:
    table = cls(config_of(*BIAS_AND_VECTOR, embedding_dtype="int8"))
    table.assign(ids(1), torch.tensor([[2.0, 1.0, float("nan"), 0.0, 0.0, 0.0, 0.0]]))
    assert table.lookup(ids(1)).isnan().tolist() == [[False] + [True] * 6]


# On disk


def test_a_dump_holds_every_value_and_loads_with_either_setting(
    make: Make, dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = make(*BIAS_AND_VECTOR)
    table.apply_gradients(torch.arange(50), torch.ones(50, 7), step=1)
    dump(table, str(tmp_path / "item"))
    for other_dtype in (dtype, "float32"):
        other = make(*BIAS_AND_VECTOR, embedding_dtype=other_dtype)
        with caplog.at_level(logging.WARNING):
            load(other, str(tmp_path / "item"))
        assert everything(other) == everything(table)
    assert not caplog.records


def test_float32_rows_are_rounded_to_the_nearest_when_loaded_which_is_logged(
    make: Make, dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = make(embedding_dtype="float32")
    before.assign(ids(1, 2), rows([0.1] * 8, [ANCHOR] + [0.5] * 7))
    dump(before, str(tmp_path / "item"))
    table = make()
    with caplog.at_level(logging.WARNING):
        load(table, str(tmp_path / "item"))
    held = table.lookup(ids(1, 2))
    assert held[1].tolist() == [ANCHOR] + [0.5] * 7
    assert held[0, 0].item() == pytest.approx(0.1, rel=2e-3)
    assert f"stores embeddings as {dtype}: of 2 restored rows, 1 had float32 values" in caplog.text


def test_each_precision_loads_what_each_other_dumped(tmp_path: Path) -> None:
    dtypes, many = ("float32", "bfloat16", "float16", "int8"), torch.arange(50)
    for one in dtypes:
        before = NativeTable(config_of(*BIAS_AND_VECTOR, embedding_dtype=one))
        before.apply_gradients(many, torch.ones(50, 7), step=1)
        dump(before, str(tmp_path / one))
        for other in dtypes:
            after = NativeTable(config_of(*BIAS_AND_VECTOR, embedding_dtype=other))
            load(after, str(tmp_path / one))
            wanted = before.lookup(many)
            assert (after.lookup(many) - wanted).abs().max() <= wanted.abs().max() / 250


# Settings


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be 'float32', 'bfloat16', 'float16' or 'int8', got 'half'"):
        config_of(embedding_dtype="half")
    with pytest.raises(ConfigError, match="embedding_rounding"):
        config_of(embedding_rounding="up")


def test_two_ways_to_round_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="StochasticRounding"):
        config_of(replace(SGD, optimizer=StochasticRounding(Sgd())))


def test_tables_of_different_storage_are_not_merged() -> None:
    signatures = {
        config_of(**how).signature()
        for how in (
            {},
            {"embedding_rounding": "nearest"},
            {"embedding_dtype": "float32"},
            {"embedding_dtype": "int8"},
        )
    }
    assert len(signatures) == 4


@pytest.mark.parametrize("dtype", UNITS)
def test_a_serving_table_stores_what_its_compressors_say(dtype: str) -> None:
    table = NativeTable(config_of(serving=True, embedding_dtype=dtype))
    table.assign(ids(1), torch.full((1, 8), 0.1))
    assert table.lookup(ids(1)).unique().tolist() == [torch.tensor(0.1).item()]


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("workers", [1, 3])
def test_the_outcome_does_not_depend_on_the_number_of_threads(workers: int, dtype: str) -> None:
    from monolith import native

    many = torch.arange(50_000)
    gradients = torch.randn(50_000, 7, generator=torch.Generator().manual_seed(2))
    tables = [
        NativeTable(config_of(*BIAS_AND_VECTOR, embedding_dtype=dtype)),
        NativeTable(config_of(*BIAS_AND_VECTOR, embedding_dtype=dtype), workers=native.Workers(workers)),
    ]
    for table in tables:
        for step in range(3):
            table.apply_gradients(many, gradients, step=step, dedup=True)
    assert torch.equal(*(table.lookup(many) for table in tables))
