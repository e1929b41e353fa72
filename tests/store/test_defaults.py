"""Whoever builds a model decides where its rows live."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from store.fleets import CONFIGS

from monolith.feature import CONCAT, FeatureColumn, FeatureSlot, Layout, SlotConfig, Sum
from monolith.model import EmbeddingCollection
from monolith.store import LocalStore, Store, default_stores, make_store
from monolith.table import TableConfig


class Maker:
    """Makes local stores, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.made: list[Store] = []
        self.asked: list[dict[str, Any]] = []

    def __call__(self, configs: Mapping[str, TableConfig], /, **options: Any) -> Store:
        self.asked.append({"configs": configs, **options})
        self.made.append(LocalStore.from_configs(configs, **options))
        return self.made[-1]


def test_outside_of_any_block_rows_live_here() -> None:
    assert isinstance(make_store(CONFIGS), LocalStore)


def test_the_innermost_block_decides_and_ends_with_an_error_too() -> None:
    outer, inner = Maker(), Maker()
    with default_stores(outer):
        with suppress(RuntimeError), default_stores(inner):
            assert make_store(CONFIGS, threads=1) is inner.made[0]
            raise RuntimeError
        assert make_store(CONFIGS) is outer.made[0]
    make_store(CONFIGS)
    assert (len(outer.made), len(inner.made)) == (1, 1)
    assert inner.asked == [{"configs": CONFIGS, "thresholds": None, "threads": 1}]


def test_other_threads_are_not_meant() -> None:
    maker = Maker()
    with default_stores(maker), ThreadPoolExecutor(1) as pool:
        pool.submit(make_store, CONFIGS).result()
    assert not maker.made


def test_a_collection_without_a_store_of_its_own_asks_for_one() -> None:
    slot = FeatureSlot(SlotConfig(name="item", occurrence_threshold=2))
    layouts = [Layout("vectors", CONCAT, [FeatureColumn(slot, "item", Sum()).lookup(slot.add_slice(2))])]
    maker = Maker()
    with default_stores(maker):
        collection = EmbeddingCollection(layouts, threads=1)
        own = EmbeddingCollection(layouts, store=LocalStore.from_configs(collection.slot_tables.configs))
    assert collection.store is maker.made[0]
    assert own.store is not collection.store
    assert maker.asked == [
        {
            "configs": collection.slot_tables.configs,
            "thresholds": collection.slot_tables.thresholds,
            "threads": 1,
        }
    ]
