"""Slots, slices and columns, and the tables they ask for."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from monolith.errors import ConfigError, DuplicateNameError, EmptySlotError, FeatureError
from monolith.feature import ROW_OPTIMIZER, FeatureColumn, FeatureSlot, SlotConfig, Sum, collect_tables
from monolith.table import (
    Adagrad,
    AdmissionConfig,
    Fp16,
    Fp32,
    Ftrl,
    PolynomialDecay,
    RandomUniform,
    Sgd,
    Zeros,
    merged_name,
)


def slot(name: str = "user", dim: int = 4, **config: Any) -> FeatureSlot:
    made = FeatureSlot(SlotConfig(name=name, **config))
    made.add_slice(dim)
    return made


# Slots


def test_a_slot_begins_with_the_rows_of_ready_models_and_upstreams_bias() -> None:
    made = slot(has_bias=True)
    bias, vector = made.segments
    assert (bias.dim, bias.initializer, bias.compressor) == (1, Zeros(), Fp32())
    assert bias.optimizer == Ftrl(initial_accumulator_value=1e-6, beta=1.0)
    assert vector.initializer == RandomUniform(low=-0.05, high=0.05)
    assert (vector.optimizer, vector.compressor) == (ROW_OPTIMIZER, Fp16())
    assert made.config.occurrence_threshold == 0
    assert made.config.expire_after == timedelta(days=36500)


def test_a_slot_without_a_name_is_called_by_its_number() -> None:
    assert FeatureSlot(SlotConfig(slot_id=7)).name == "7"
    with pytest.raises(ConfigError, match="needs a name"):
        SlotConfig()


def test_slices_are_adjacent_with_the_bias_first() -> None:
    made = FeatureSlot(SlotConfig(name="user", has_bias=True))
    first, second = made.add_slice(4), made.add_slice(8)
    assert [(s.start, s.end) for s in made.slices] == [(0, 1), (1, 5), (5, 13)]
    assert (made.bias, first, second) == made.slices
    assert made.dim == 13


def test_a_slot_without_a_bias_has_none() -> None:
    with pytest.raises(FeatureError, match="no bias"):
        _ = slot().bias


def test_neighbouring_slices_that_are_trained_alike_are_one_segment() -> None:
    decay = PolynomialDecay(initial_learning_rate=0.1, decay_steps=10, end_learning_rate=0.01)
    made = FeatureSlot(SlotConfig(name="user"))
    made.add_slice(5, optimizer=Adagrad(warmup_steps=10))
    made.add_slice(3, optimizer=Sgd(), learning_rate=decay)
    made.add_slice(1, optimizer=Sgd(), learning_rate=decay)
    made.add_slice(2, optimizer=Sgd())
    assert [segment.dim for segment in made.segments] == [5, 4, 2]
    assert [s.dim for s in made.slices] == [5, 3, 1, 2]


def test_a_rate_of_zero_is_a_rate() -> None:
    made = FeatureSlot(SlotConfig(name="user", learning_rate=0.5))
    made.add_slice(1, learning_rate=0.0)
    assert made.segments[0].rate(0) == 0.0


def test_a_bias_does_not_inherit_the_rate_of_vectors() -> None:
    made = slot(has_bias=True, learning_rate=0.5)
    assert made.segments[0].rate(0) == Ftrl().learning_rate
    assert made.segments[1].rate(0) == 0.5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"slot_id": 32768}, "slot_id must be from 0 to 32767"),
        ({"occurrence_threshold": -1}, "occurrence_threshold must be 0 or more"),
        ({"expire_after": timedelta(days=-1)}, "expire_after must not be negative"),
    ],
)
def test_settings_out_of_range_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SlotConfig(name="user", **config)


# Columns


def test_a_column_adds_up_unless_told_otherwise() -> None:
    assert FeatureColumn(slot(), "user_id").combiner == Sum()


def test_a_column_reads_slices_of_its_own_slot_only() -> None:
    user, item = slot("user"), slot("item")
    column = FeatureColumn(user, "user_id")
    assert (column.lookup(user.slices[0]).start, column.lookup(user.slices[0]).end) == (0, 4)
    with pytest.raises(FeatureError, match=r"reads slot 'user'.*of slot 'item'"):
        column.lookup(item.slices[0])


# Tables


def test_each_slot_has_a_table_of_its_own_with_its_limits() -> None:
    month = timedelta(days=30)
    tables = collect_tables(
        [slot("user", 4, occurrence_threshold=3), slot("item", 8, expire_after=month)], seed=9
    )
    assert list(tables.configs) == ["item", "user"]
    assert [config.dim for config in tables.configs.values()] == [8, 4]
    assert [config.seed for config in tables.configs.values()] == [9, 9]
    assert tables.thresholds["user"].default == 3
    assert tables.configs["item"].expiry.default == month


def test_slots_that_share_a_table_keep_their_limits_by_slot() -> None:
    day, week = timedelta(days=1), timedelta(days=7)
    tables = collect_tables(
        [
            slot("user", slot_id=1, table="all", expire_after=day, occurrence_threshold=2),
            slot("item", slot_id=2, table="all", expire_after=week),
        ]
    )
    assert list(tables.configs) == ["all"]
    assert tables.table_of == {"user": "all", "item": "all"}
    assert tables.configs["all"].expiry.per_slot == {1: day, 2: week}
    assert tables.thresholds["all"].per_slot == {1: 2, 2: 0}


def test_a_slot_says_how_its_sightings_are_counted() -> None:
    chance = AdmissionConfig(kind="probabilistic_filter")
    tables = collect_tables([slot("user", occurrence_threshold=3, admission=chance), slot("item")])
    assert tables.thresholds["user"].counting == chance
    assert tables.thresholds["item"].counting == AdmissionConfig()


def test_slots_that_share_a_table_share_one_admission() -> None:
    chance = AdmissionConfig(kind="probabilistic_filter")
    shared = [slot("user", slot_id=1, table="all", admission=chance), slot("item", slot_id=2, table="all")]
    with pytest.raises(ConfigError, match="share table 'all': set the same admission on both"):
        collect_tables(shared)
    alike = [slot(name, slot_id=number, table="all", admission=chance) for number, name in enumerate("ab")]
    assert collect_tables(alike).thresholds["all"].counting == chance


def test_slots_that_share_a_table_must_have_the_same_rows() -> None:
    with pytest.raises(ConfigError, match="'user' and 'item' share table 'all' and have different rows"):
        collect_tables([slot("user", 4, slot_id=1, table="all"), slot("item", 8, slot_id=2, table="all")])


def test_limits_of_one_slot_among_several_need_its_number() -> None:
    with pytest.raises(ConfigError, match=r"'user' shares table 'all' and has limits .* needs a slot_id"):
        collect_tables(
            [slot("user", table="all", occurrence_threshold=2), slot("item", slot_id=2, table="all")]
        )


def test_a_slot_without_a_number_in_a_shared_table_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="'user' shares table 'all' and has no slot_id"):
        collect_tables([slot("user", table="all"), slot("item", slot_id=2, table="all")])


def test_a_slot_may_be_given_many_times_but_a_name_once() -> None:
    user = slot("user")
    assert list(collect_tables([user, user]).configs) == ["user"]
    with pytest.raises(DuplicateNameError, match="two slots are named 'user'"):
        collect_tables([user, slot("user")])


def test_a_slot_without_slices_is_refused() -> None:
    with pytest.raises(EmptySlotError, match="no slices"):
        collect_tables([FeatureSlot(SlotConfig(name="user"))])
    assert issubclass(EmptySlotError, RuntimeError)
    assert issubclass(DuplicateNameError, NameError)


def test_slots_with_equal_rows_are_merged_if_their_ids_tell_them_apart() -> None:
    slots = [
        slot("a", slot_id=1, expire_after=timedelta(days=1)),
        slot("b", slot_id=2, occurrence_threshold=3),
        slot("wide", dim=8, slot_id=3),
        slot("plain"),
        slot("bounded", slot_id=4, capacity_bytes=1 << 20),
        slot("counted", slot_id=5, admission=AdmissionConfig(kind="probabilistic_filter")),
        slot("named", slot_id=6, table="other"),
    ]
    found = collect_tables(slots, merge_equal=True)
    together = merged_name(["a", "b"])
    assert found.table_of["a"] == found.table_of["b"] == together
    assert sorted(found.configs) == sorted([together, "wide", "plain", "bounded", "counted", "other"])
    merged = found.configs[together]
    assert merged.merged == (("a", 1), ("b", 2))
    assert merged.expiry.per_slot == {1: timedelta(days=1), 2: timedelta(days=36500)}
    assert found.thresholds[together].per_slot == {1: 0, 2: 3}
    assert collect_tables(slots).table_of["a"] == "a"


def test_a_table_has_room_for_the_rows_of_all_its_slots() -> None:
    slots = [slot("a", slot_id=1, initial_rows=100), slot("b", slot_id=2), slot("c", initial_rows=5)]
    apart = collect_tables(slots, initial_rows=10).configs
    assert {name: one.initial_rows for name, one in apart.items()} == {"a": 100, "b": 10, "c": 5}
    together = collect_tables(slots, initial_rows=10, merge_equal=True).configs
    assert together[merged_name(["a", "b"])].initial_rows == 110


def test_a_slot_may_store_its_embeddings_otherwise_than_the_run() -> None:
    slots = [slot("a", slot_id=1, embedding_dtype="float32"), slot("b", slot_id=2), slot("c", slot_id=3)]
    how: dict[str, Any] = {"embedding_dtype": "bfloat16", "embedding_rounding": "nearest"}
    configs = collect_tables(slots, **how, merge_equal=True).configs
    assert {name: one.stores_narrow for name, one in configs.items()} == {
        "a": False,
        merged_name(["b", "c"]): True,
    }
    assert {one.embedding_rounding for one in configs.values()} == {"nearest"}
    shared = [
        slot("a", slot_id=1, table="all", embedding_dtype="bfloat16"),
        slot("b", slot_id=2, table="all"),
    ]
    with pytest.raises(ConfigError, match="set the same embedding_dtype on both"):
        collect_tables(shared)
