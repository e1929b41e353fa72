"""What a group of tables does. Read the names in order: they are the specification."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contracts.tables import cuda_table_classes, ids, rows
from hypothesis import given, settings
from hypothesis import strategies as st
from services.properties import tries
from torch import Tensor
from vectors.case import Case, differences, load
from vectors.runner import run

from monolith import native
from monolith.errors import ServingTableError, TableArgumentError, TableClosedError, UnknownTableError
from monolith.table import (
    Adagrad,
    Constant,
    CudaTable,
    DelayCompensated,
    DictTable,
    Expiry,
    MultiTable,
    OneBit,
    Ones,
    PolynomialDecay,
    RandomUniform,
    Rows,
    Segment,
    Sgd,
    Table,
    TableConfig,
    TieredTable,
    iterate,
    merged_name,
)
from monolith.table.native_table import NativeTable

Make = Callable[..., MultiTable]
DAY = 86400
SGD = Segment(dim=1, optimizer=Sgd(), learning_rate=1.0)
WIDE = replace(SGD, dim=2)
SLOW = replace(SGD, optimizer=DelayCompensated(Sgd(), 1.0))


def floats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def config(*segments: Segment, name: str = "t", **options: Any) -> TableConfig:
    return TableConfig(name=name, segments=segments, **options)


def table_classes() -> list[Any]:
    """Return those that fused calls are made for; where g++ compiles kernels they take a while."""
    slow = [
        pytest.param(cls, marks=[] if cls is CudaTable else [pytest.mark.soak])
        for cls in cuda_table_classes()
    ]
    return [DictTable, NativeTable, *slow]


@pytest.fixture(params=table_classes(), ids=lambda cls: cls.__name__)
def table_class(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def make(table_class: Any) -> Iterator[Make]:
    """Make tables: `make(item=Segment(...), user=TableConfig(...))`."""
    made: list[MultiTable] = []

    def build(**tables: Segment | TableConfig) -> MultiTable:
        configs = {
            name: t if isinstance(t, TableConfig) else config(t, name=name) for name, t in tables.items()
        }
        made.append(MultiTable({name: table_class(c) for name, c in configs.items()}))
        return made[-1]

    yield build
    for tables in made:
        tables.close()


# Names


def test_tables_are_in_the_order_of_their_names(make: Make) -> None:
    tables = make(b=WIDE, c=SGD, a=SGD)
    assert tables.names == ("a", "b", "c")
    assert list(tables.tables) == ["a", "b", "c"]
    assert [tables[name].dim for name in tables.names] == [1, 2, 1]
    assert "a" in tables
    assert "d" not in tables


def test_an_unknown_name_is_an_error_that_names_the_nearest(make: Make) -> None:
    tables = make(item=SGD, user=SGD)
    with pytest.raises(UnknownTableError, match="'itme'; did you mean 'item'"):
        tables["itme"]
    with pytest.raises(KeyError):
        tables.lookup({"item": ids(1), "zebra": ids(1)})
    with pytest.raises(UnknownTableError):
        tables.contains({"zebra": ids(1)})
    for write in (tables.assign, tables.assign_add, tables.apply_gradients):
        with pytest.raises(UnknownTableError):
            write({"item": (ids(1), rows([1.0])), "zebra": (ids(1), rows([1.0]))})
    with pytest.raises(UnknownTableError):
        tables.apply_gradients({"item": (ids(1), rows([1.0]))}, learning_rates={"zebra": floats(1)})
    assert len(tables) == 0


# Calls by slot


def test_a_lookup_returns_the_slots_it_was_asked_for(make: Make) -> None:
    tables = make(b=WIDE, a=SGD, c=SGD)
    tables.assign({"b": (ids(1), rows([2.0, 3.0])), "a": (ids(1, 2), rows([4.0], [5.0]))})
    found = tables.lookup({"b": ids(1, 9), "a": ids(2)})
    assert {slot: values.tolist() for slot, values in found.items()} == {"b": [[2, 3], [0, 0]], "a": [[5]]}
    assert tables.lookup({}) == {}
    held = tables.contains({"a": ids(1, 2, 3), "c": ids(1)})
    assert {slot: mask.tolist() for slot, mask in held.items()} == {"a": [True, True, False], "c": [False]}


def test_writes_carry_their_event_time(make: Make) -> None:
    tables = make(a=SGD, b=SGD)
    tables.assign({"a": (ids(1), rows([1.0]))}, event_time=5)
    tables.assign_add(
        {"a": (ids(2), rows([1.0])), "b": (ids(1), rows([2.0]))}, event_time={"a": ids(6), "b": ids(7)}
    )
    tables.apply_gradients({"b": (ids(2), rows([3.0]))}, event_time=8)
    times = {name: tables[name].lookup_rows(ids(1, 2))[1].event_times.tolist() for name in tables.names}
    assert times == {"a": [5, 6], "b": [7, 8]}


def test_gradients_take_the_rates_of_their_own_table_whatever_the_order(make: Make) -> None:
    tables = make(b=SGD, a=SGD, c=replace(SGD, learning_rate=0.25))
    one = (ids(1), rows([1.0]))
    tables.apply_gradients(
        {"c": one, "b": one, "a": one}, learning_rates={"b": floats(0.5), "a": floats(2.0)}
    )
    found = tables.lookup({name: ids(1) for name in tables.names})
    assert [found[name].item() for name in "abc"] == [-2.0, -0.5, -0.25]


def test_equal_ids_are_steps_of_their_own_unless_they_are_summed(make: Make) -> None:
    tables = make(a=replace(SGD, optimizer=Adagrad(initial_accumulator_value=0.0)))
    update = {"a": (ids(1, 1), rows([3.0], [4.0]))}
    tables.apply_gradients(update)
    assert tables.lookup({"a": ids(1)})["a"].item() == pytest.approx(-1 - 4 / 5)
    tables["a"].clear()
    tables.apply_gradients(update, dedup=True)
    assert tables.lookup({"a": ids(1)})["a"].item() == pytest.approx(-1)


def test_a_bad_argument_for_one_table_leaves_all_of_them_alone(make: Make) -> None:
    tables = make(a=SGD, b=WIDE)
    good = (ids(1), rows([1.0]))
    for bad in ((ids(1), rows([1.0])), (ids(1).int(), rows([1.0, 1.0])), (ids(), rows([1.0, 1.0]))):
        for write in (tables.assign, tables.assign_add, tables.apply_gradients):
            with pytest.raises(TableArgumentError, match="of 'b' must be"):
                write({"a": good, "b": bad})
    fine = {"a": good, "b": (ids(1), rows([1.0, 1.0]))}
    for options in (
        {"event_time": -1},
        {"event_time": ids(1)},
        {"event_time": {"a": ids(1)}},
        {"event_time": {"a": ids(1), "b": ids(1, 2)}},
    ):
        with pytest.raises(TableArgumentError, match="event_time"):
            tables.assign(fine, **options)
    for wrong in (
        {"step": -1},
        {"learning_rates": {"b": floats(1, 1)}},
        {"latest_values": {"a": rows([1.0])}},
    ):
        with pytest.raises(TableArgumentError):
            tables.apply_gradients(fine, **wrong)
    assert len(tables) == 0


def test_latest_values_reach_the_slots_that_are_delay_compensated(make: Make) -> None:
    tables = make(a=SGD, b=SLOW)
    tables.assign({"b": (ids(1), rows([10.0]))})
    updates = {"a": (ids(1), rows([1.0])), "b": (ids(1), rows([2.0]))}
    with pytest.raises(TableArgumentError, match="latest_values"):
        tables.apply_gradients(updates)
    assert len(tables["a"]) == 0
    tables.apply_gradients(updates, latest_values={"a": rows([0.0]), "b": rows([7.0])})
    assert tables["b"].lookup(ids(1)).item() == 10 - (2 + 4 * 3)


def test_reinitialize_tells_what_was_there(make: Make) -> None:
    tables = make(a=replace(SGD, initializer=Ones()))
    tables.assign({"a": (ids(2), rows([5.0]))})
    assert tables.reinitialize("a", ids(1, 2), now=9).tolist() == [0, 1]
    assert tables["a"].lookup(ids(1, 2)).tolist() == [[1.0], [1.0]]
    assert tables["a"].lookup_rows(ids(1))[1].event_times.item() == 9


def test_reinitialize_of_an_unknown_table_says_so_for_every_id(make: Make) -> None:
    tables = make(a=SGD)
    status = tables.reinitialize("b", ids(1, 2, 3), now=0)
    assert status.dtype == torch.int8
    assert status.tolist() == [-1, -1, -1]
    assert tables.reinitialize("b", ids(), now=0).tolist() == []
    with pytest.raises(TableArgumentError):
        tables.reinitialize("b", ids(1).int(), now=0)
    with pytest.raises(TableArgumentError):
        tables.reinitialize("b", ids(1), now=-1)


# All tables


def test_each_table_expires_by_its_own_rule_and_its_own_clock(make: Make) -> None:
    tables = make(
        a=config(SGD, expiry=Expiry.days(1)),
        b=config(SGD, expiry=Expiry.days(3)),
        c=config(SGD, expiry=Expiry.days(1)),
    )
    for name in tables.names:
        tables.assign({name: (ids(1), rows([1.0]))}, event_time=0)
    tables.assign({"a": (ids(2), rows([1.0]))}, event_time=2 * DAY)
    assert tables.evict() == {"a": 1, "b": 0, "c": 0}
    assert tables.evict(now=2 * DAY) == {"a": 0, "b": 0, "c": 1}
    assert tables.evict(now=9 * DAY) == {"a": 1, "b": 1, "c": 0}


def test_rows_are_counted_by_table(make: Make) -> None:
    tables = make(b=SGD, a=SGD)
    tables.assign({"b": (ids(1, 2), rows([1.0], [1.0])), "a": (ids(1), rows([1.0]))})
    assert tables.feature_counts() == {"a": 1, "b": 2}
    assert len(tables) == 3
    assert {name: stats.rows for name, stats in tables.stats().items()} == {"a": 1, "b": 2}
    assert sorted(tables.tables["b"].scan().rows.ids.tolist()) == [1, 2]


def test_a_closed_group_answers_no_call(make: Make) -> None:
    tables = make(a=SGD)
    tables.close()
    tables.close()
    one = ids(1)
    for call in (
        lambda: len(tables),
        lambda: tables.lookup({"a": one}),
        lambda: tables.fused_lookup(one, one, num_batches=1),
        lambda: tables.fused_apply_gradients(one, one, floats(1), num_batches=1),
    ):
        with pytest.raises(TableClosedError):
            call()


# Slots that share a table


def test_slots_configured_alike_share_a_table(table_class: Any) -> None:
    alike = {"c": config(SGD, name="c"), "a": config(SGD, name="a"), "b": config(WIDE, name="b")}
    tables = MultiTable.from_configs(alike, table_class)
    shared, own = merged_name(["a", "c"]), merged_name(["b"])
    assert tables.names == ("a", "b", "c")
    assert tables.slots == {"a": shared, "b": own, "c": shared}
    assert list(tables.tables) == sorted([shared, own])
    assert tables["a"] is tables["c"]
    assert tables["a"].config.name == shared

    tables.assign({"c": (ids(3), rows([1.0])), "a": (ids(1), rows([2.0])), "b": (ids(1), rows([3.0, 4.0]))})
    found = tables.lookup({"c": ids(3, 1), "a": ids(1), "b": ids(1)})
    assert [found[slot].tolist() for slot in "cab"] == [[[1.0], [2.0]], [[2.0]], [[3.0, 4.0]]]
    assert tables.feature_counts() == {shared: 2, own: 1}


def test_slots_of_one_table_are_trained_in_one_call_in_the_order_of_their_names(table_class: Any) -> None:
    adagrad = replace(SGD, optimizer=Adagrad(initial_accumulator_value=0.0))
    tables = MultiTable.from_configs({s: config(adagrad, name=s) for s in "ab"}, table_class)
    updates = {"b": (ids(1), rows([4.0])), "a": (ids(1), rows([3.0]))}
    tables.apply_gradients(updates, event_time={"a": ids(9), "b": ids(5)})
    assert tables["a"].lookup(ids(1)).item() == pytest.approx(-1 - 4 / 5)
    assert tables["a"].lookup_rows(ids(1))[1].event_times.item() == 9
    tables["a"].clear()
    tables.apply_gradients(updates, dedup=True, learning_rates={"a": floats(0.5)})
    assert tables["b"].lookup(ids(1)).item() == pytest.approx(-0.5)


def test_slots_of_one_table_cannot_have_different_rates(table_class: Any) -> None:
    tables = MultiTable.from_configs({s: config(SGD, name=s) for s in "ab"}, table_class)
    with pytest.raises(TableArgumentError, match="shares table"):
        tables.apply_gradients(
            {"a": (ids(1), rows([1.0]))}, learning_rates={"a": floats(1.0), "b": floats(2.0)}
        )
    tables.apply_gradients({"a": (ids(1), rows([1.0]))}, learning_rates={"a": floats(2.0), "b": floats(2.0)})
    assert tables["b"].lookup(ids(1)).item() == -2.0


def test_a_slot_cannot_live_in_a_table_that_is_not_there(table_class: Any) -> None:
    with pytest.raises(UnknownTableError, match="'a' is to live in table 'x'"):
        MultiTable({"y": table_class(config(SGD))}, slots={"a": "x"})


# Fused calls


def test_a_fused_lookup_lays_rows_out_by_batch_then_table(make: Make) -> None:
    tables = make(b=WIDE, a=SGD)
    tables.assign({"a": (ids(1, 2), rows([1.0], [2.0])), "b": (ids(1), rows([3.0, 4.0]))})
    found = tables.fused_lookup(ids(1, 1, 2, 7), ids(1, 0, 0, 1, 1, 1), num_batches=3)
    assert found.embeddings.tolist() == [1, 3, 4, 2, 0, 0]
    assert found.recv_splits.tolist() == [1, 2, 3]
    assert found.id_offsets.tolist() == [0, 1, 1, 1, 2, 3, 4]
    assert found.emb_offsets.tolist() == [0, 1, 1, 1, 3, 4, 6]
    assert {t.dtype for t in (found.recv_splits, found.id_offsets, found.emb_offsets)} == {torch.int64}


def test_fused_rates_follow_the_order_of_the_tables(make: Make) -> None:
    tables = make(b=config(SGD, SGD), a=SGD)
    tables.fused_apply_gradients(
        ids(1, 1), ids(1, 1), floats(1, 1, 1), num_batches=1, learning_rates=floats(0.5, 2, 3)
    )
    assert tables["a"].lookup(ids(1)).tolist() == [[-0.5]]
    assert tables["b"].lookup(ids(1)).tolist() == [[-2.0, -3.0]]


def test_a_fused_lookup_can_put_rows_where_it_is_told(make: Make) -> None:
    tables = make(b=WIDE, a=SGD)
    tables.assign({"a": (ids(1, 2), rows([1.0], [2.0])), "b": (ids(1), rows([3.0, 4.0]))})
    memory = torch.full((5,), 9.0)
    found = tables.fused_lookup(ids(1, 1), ids(1, 1), num_batches=1, out=memory[:3])
    assert memory.tolist() == [1, 3, 4, 9, 9]
    assert found.embeddings.data_ptr() == memory.data_ptr()
    with pytest.raises(TableArgumentError, match="out"):
        tables.fused_lookup(ids(1, 1), ids(1, 1), num_batches=1, out=memory)


def test_without_fused_rates_each_segment_takes_its_own_at_that_step(make: Make) -> None:
    fading = PolynomialDecay(initial_learning_rate=1.0, decay_steps=10, end_learning_rate=0.0)
    tables = make(a=replace(SGD, learning_rate=fading), b=replace(SGD, learning_rate=0.25))
    tables.fused_apply_gradients(ids(1, 1), ids(1, 1), floats(1, 1), num_batches=1, step=5)
    assert tables.fused_lookup(ids(1, 1), ids(1, 1), num_batches=1).embeddings.tolist() == [-0.5, -0.25]


@pytest.mark.parametrize("dedup", [False, True])
def test_equal_ids_of_one_table_meet_across_shards(make: Make, dedup: bool) -> None:
    adagrad = replace(SGD, optimizer=Adagrad(initial_accumulator_value=0.0))
    tables = make(a=adagrad, b=adagrad)
    tables.fused_apply_gradients(
        ids(1, 1, 1), ids(1, 1, 1, 0), floats(3, 1, 4), num_batches=2, dedup=dedup, event_time=ids(9, 1, 5)
    )
    _, row = tables["a"].lookup_rows(ids(1))
    assert row.values.item() == pytest.approx(-1.0 if dedup else -1 - 4 / 5)
    assert row.event_times.item() == 9
    assert tables["b"].lookup(ids(1)).item() == pytest.approx(-1.0)


def test_fused_latest_values_are_laid_out_as_gradients(make: Make) -> None:
    tables = make(a=SGD, b=SLOW)
    tables.assign({"b": (ids(1, 2), rows([10.0], [20.0]))})
    wanted = (ids(1, 1, 1, 2), ids(1, 1, 1, 1), floats(1, 1, 1, 2))
    with pytest.raises(TableArgumentError, match="latest_values"):
        tables.fused_apply_gradients(*wanted, num_batches=2)
    tables.fused_apply_gradients(*wanted, num_batches=2, latest_values=floats(0, 7, 0, 15))
    assert tables["a"].lookup(ids(1)).item() == -2
    assert tables["b"].lookup(ids(1, 2)).tolist() == [[10 - (1 + 3)], [20 - (2 + 4 * 5)]]


def test_fused_arguments_that_do_not_fit_touch_nothing(make: Make) -> None:
    tables = make(a=SGD, b=WIDE)
    for sizes, shards in (
        (ids(1), 1),
        (ids(1, 1, 0), 1),
        (ids(1, 1), 2),
        (ids(1, 0), 1),
        (ids(1, 2), 1),
        (ids(3, -1), 1),
        (ids(2**62, 2**62), 1),
        (ids(1, 1), 0),
        (ids(1, 1), -1),
        (ids(1, 1), 1.0),
        (ids(1, 1).int(), 1),
    ):
        with pytest.raises(TableArgumentError):
            tables.fused_lookup(ids(1, 1), sizes, num_batches=shards)  # type: ignore[arg-type]
        with pytest.raises(TableArgumentError):
            tables.fused_apply_gradients(ids(1, 1), sizes, floats(1, 1, 1), num_batches=shards)  # type: ignore[arg-type]
    with pytest.raises(TableArgumentError, match=r"expected 2, got 1 \(2 tables, 1 batches, 2 ids\)"):
        tables.fused_lookup(ids(1, 1), ids(1), num_batches=1)
    for wrong in (
        {"gradients": floats(1, 1)},
        {"gradients": floats(1, 1, 1).double()},
        {"gradients": rows([1.0], [1.0], [1.0])},
        {"learning_rates": floats(1)},
        {"latest_values": floats(1)},
        {"event_time": ids(1, 2, 3)},
        {"event_time": -1},
        {"step": -1},
        {"ids": ids(1, 1).int()},
    ):
        arguments = {
            "ids": ids(1, 1),
            "sizes": ids(1, 1),
            "gradients": floats(1, 1, 1),
            "num_batches": 1,
        } | wrong
        with pytest.raises(TableArgumentError):
            tables.fused_apply_gradients(**arguments)  # type: ignore[arg-type]
    assert len(tables) == 0


def test_a_group_with_a_serving_table_is_not_trained(make: Make) -> None:
    tables = make(a=SGD, b=config(SGD, serving=True))
    with pytest.raises(ServingTableError):
        tables.fused_apply_gradients(ids(1, 1), ids(1, 1), floats(1, 1), num_batches=1)
    with pytest.raises(ServingTableError):
        tables.apply_gradients({name: (ids(1), rows([1.0])) for name in "ab"})
    assert len(tables) == 0


def test_a_call_of_no_ids_and_a_group_of_no_tables_are_fine(make: Make) -> None:
    for tables, sizes in ((make(), ids()), (make(a=SGD, b=WIDE), ids(0, 0, 0, 0))):
        tables.fused_apply_gradients(ids(), sizes, floats(), num_batches=2)
        found = tables.fused_lookup(ids(), sizes, num_batches=2)
        assert found.embeddings.tolist() == []
        assert found.recv_splits.tolist() == [0, 0]
        assert found.id_offsets.tolist() == [0] * (len(sizes) + 1)
        tables.apply_gradients({})
        assert len(tables) == 0


def test_tables_of_different_kinds_work_together() -> None:
    tables = MultiTable({"a": NativeTable(config(SGD)), "b": DictTable(config(WIDE))})
    tables.fused_apply_gradients(ids(1, 1, 1), ids(1, 1, 1, 0), floats(1, 2, 3, 4), num_batches=2)
    assert tables.fused_lookup(ids(1, 1), ids(1, 1), num_batches=1).embeddings.tolist() == [-5, -2, -3]


# Against plain calls

SEGMENTS = [
    SGD,
    WIDE,
    Segment(dim=3, optimizer=Adagrad(), initializer=RandomUniform(), learning_rate=0.5),
    Segment(
        dim=9, initializer=Constant(0.5), compressor=OneBit(step_size=2, amplitude=0.5), learning_rate=0.125
    ),
    replace(SLOW, dim=2),
]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[tuple[Segment, ...]], int, list[list[list[int]]]]:
    """Draw segments per table, shards, and for each call the sizes of shards and tables."""
    segments = draw(
        st.lists(
            st.lists(st.sampled_from(SEGMENTS), min_size=1, max_size=2).map(tuple), min_size=1, max_size=4
        )
    )
    shards = draw(st.integers(1, 4))
    row = st.lists(st.sampled_from([0, 0, 1, 2, 5, 40]), min_size=len(segments), max_size=len(segments))
    calls = st.lists(st.lists(row, min_size=shards, max_size=shards), min_size=1, max_size=3)
    return segments, shards, draw(calls)


@settings(max_examples=tries(25), deadline=None)
@given(layout=layouts(), seed=st.integers(0, 2**32 - 1), dedup=st.booleans(), timed=st.booleans())
def test_a_fused_call_is_one_plain_call_per_table(layout: Any, seed: int, dedup: bool, timed: bool) -> None:
    segments, shards, calls = layout
    configs = [config(*s, name=f"t{k}") for k, s in enumerate(segments)]
    native, plain = (MultiTable({c.name: cls(c) for c in configs}) for cls in (NativeTable, DictTable))
    single: list[Table] = [NativeTable(c) for c in configs]
    random = np.random.default_rng(seed)

    def eighths(*shape: int) -> Tensor:
        return torch.from_numpy(random.integers(-16, 17, shape).astype(np.float32) / 8)

    for step, sizes in enumerate(calls):
        keys = [[torch.from_numpy(random.integers(-9, 9, n)) for n in row] for row in sizes]
        grads = [[eighths(n, c.dim) for n, c in zip(row, configs, strict=True)] for row in sizes]
        seen = [[eighths(n, c.dim) for n, c in zip(row, configs, strict=True)] for row in sizes]
        times = [[torch.from_numpy(random.integers(0, 99, n)) for n in row] for row in sizes]
        rates = [eighths(len(c.segments)).abs() for c in configs]

        def flat(pieces: list[list[Tensor]]) -> Tensor:
            return torch.cat([piece.flatten() for row in pieces for piece in row])

        def of(pieces: list[list[Tensor]], k: int) -> Tensor:
            return torch.cat([row[k] for row in pieces])

        counts = torch.tensor(sizes).flatten()
        for tables in (native, plain):
            tables.fused_apply_gradients(
                flat(keys),
                counts,
                flat(grads),
                num_batches=shards,
                learning_rates=torch.cat(rates),
                step=step,
                event_time=flat(times) if timed else 3,
                dedup=dedup,
                latest_values=flat(seen),
            )
        for k, table in enumerate(single):
            table.apply_gradients(
                of(keys, k),
                of(grads, k),
                step=step,
                event_time=of(times, k) if timed else 3,
                learning_rates=rates[k],
                dedup=dedup,
                latest_values=of(seen, k),
            )

        found = native.fused_lookup(flat(keys), counts, num_batches=shards)
        one_by_one = [single[k].lookup(piece) for row in keys for k, piece in enumerate(row)]
        assert torch.equal(found.embeddings, torch.cat([piece.flatten() for piece in one_by_one]))
        expected = plain.fused_lookup(flat(keys), counts, num_batches=shards)
        np.testing.assert_allclose(found.embeddings, expected.embeddings, rtol=1e-4, atol=1e-5)
        for name in ("recv_splits", "id_offsets", "emb_offsets"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert native.feature_counts() == plain.feature_counts()
    for table in single:
        ours, theirs = native.tables[table.config.name].scan().rows, table.scan().rows
        for column in ("ids", "event_times", "values", "state"):
            assert torch.equal(getattr(ours, column), getattr(theirs, column)), column


@pytest.mark.parametrize(
    "vector",
    [v for v in load() if v["op"] in ("fused_lookup", "fused_apply_gradient", "multi_table_reinitialize")],
    ids=lambda vector: vector["name"],
)
def test_the_vectors_hold(vector: dict[str, Any], table_class: Any) -> None:
    found = run(Case(vector, table_class))
    assert not list(differences(vector["expected"], found, vector["tolerance"]))


# Tables with rows in files


def tiered(name: str, folder: Path, kind: Any = TieredTable, **options: Any) -> Any:
    adagrad = Segment(dim=4, optimizer=Adagrad(), learning_rate=0.1)
    settings = {"storage": "tiered", "memory_bytes": 4 << 20, "storage_dir": str(folder)}
    return kind(config(adagrad, name=name, **settings), most_hot_rows=500, **options)


def test_tables_with_rows_in_files_learn_side_by_side_as_in_memory(tmp_path: Path) -> None:
    names = [f"t{number:02}" for number in range(10)]
    reader = native.BlockReader()
    files = MultiTable({name: tiered(name, tmp_path, reader=reader) for name in names})
    memory = MultiTable({name: NativeTable(in_memory(files[name].config)) for name in names})
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 16):
        sizes = torch.randint(0, 400, (2 * len(names),), generator=generator)
        keys = torch.randint(0, 4000, (int(sizes.sum()),), generator=generator)
        files.read_ahead(keys, sizes)
        found = [tables.fused_lookup(keys, sizes, num_batches=2).embeddings for tables in (files, memory)]
        assert torch.equal(*found)
        gradients = torch.randn(len(found[0]), generator=generator)
        times = torch.full((len(keys),), step)
        for tables in (files, memory):
            tables.fused_apply_gradients(
                keys, sizes, gradients, num_batches=2, step=step, event_time=times, dedup=True
            )
    assert sum(table.cold_bytes_read for table in files.stats().values()) > 0
    assert files.feature_counts() == memory.feature_counts()
    for name in names:
        mine, theirs = (Rows.concat(list(iterate(tables[name]))) for tables in (files, memory))
        for column in ("ids", "event_times", "values", "state"):
            assert torch.equal(getattr(mine, column), getattr(theirs, column)), (name, column)
    files.close()


def test_no_table_with_rows_in_files_waits_for_another(tmp_path: Path) -> None:
    everyone = threading.Barrier(4)

    class Together(TieredTable):
        """Goes on once all tables have got as far as this one."""

        def lookup(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
            everyone.wait(60)
            return super().lookup(ids, out)

        def read_ahead(self, ids: Tensor) -> None:
            everyone.wait(60)
            super().read_ahead(ids)

        def apply_gradients(self, ids: Tensor, gradients: Tensor, **options: Any) -> None:
            everyone.wait(60)
            super().apply_gradients(ids, gradients, **options)

    tables = MultiTable({name: tiered(name, tmp_path, Together) for name in "abcd"})
    keys, sizes = torch.arange(8), torch.full((4,), 2)
    tables.read_ahead(keys, sizes)
    found = tables.fused_lookup(keys, sizes, num_batches=1).embeddings
    assert not found.any()
    tables.fused_apply_gradients(keys, sizes, torch.ones(32), num_batches=1)
    assert len(tables) == 8
    tables.close()


def test_a_table_that_fails_leaves_the_others_trained(tmp_path: Path) -> None:
    tables = MultiTable({name: tiered(name, tmp_path) for name in "abc"})
    tables["b"].close()
    with pytest.raises(TableClosedError, match="'b' was closed"):
        tables.fused_apply_gradients(torch.arange(6), torch.full((3,), 2), torch.ones(24), num_batches=1)
    assert [len(tables[name]) for name in "ac"] == [2, 2]
    tables.close()


def test_lookups_of_tables_with_rows_in_files_do_not_wait_for_writers(tmp_path: Path) -> None:
    tables = MultiTable({f"t{number:02}": tiered(f"t{number:02}", tmp_path) for number in range(40)})
    keys, sizes = torch.arange(40), torch.ones(40, dtype=torch.int64)
    with ExitStack() as frozen:
        for table in tables.tables.values():
            frozen.enter_context(table.frozen())
        update = (keys, sizes, torch.ones(160))
        writer = threading.Thread(target=tables.fused_apply_gradients, args=update, kwargs={"num_batches": 1})
        writer.start()
        try:
            writer.join(0.2)  # by now all threads that it gets wait for tables
            assert not tables.fused_lookup(keys, sizes, num_batches=1).embeddings.any()
            assert writer.is_alive()
        finally:
            frozen.close()
            writer.join(60)
    assert len(tables) == 40
    tables.close()


def in_memory(tiered_config: TableConfig) -> TableConfig:
    return replace(tiered_config, storage="memory", memory_bytes=None, storage_dir=None)
