"""What a store in this process adds to its tables; all else is in the contract of stores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from services.emulated_cuda import device_named, device_names

from monolith.errors import AcceleratorError, TableArgumentError
from monolith.observe import MemoryUse, MemoryWatch
from monolith.store import LocalStore
from monolith.store.store import TableIds
from monolith.table import (
    AdmissionConfig,
    CudaTable,
    DictTable,
    NativeTable,
    NoFilter,
    ProbabilisticFilter,
    Segment,
    SlidingFilter,
    SlotThresholds,
    SpillingTable,
    Table,
    TableConfig,
)

MIB = 1 << 20


def test_a_trainer_of_rows_is_warned_when_memory_runs_short(caplog: pytest.LogCaptureFixture) -> None:
    table = NativeTable(TableConfig(name="item", segments=(Segment(dim=1),)))
    now = [0.0]
    memory = MemoryWatch(lambda: MemoryUse(60 * MIB, 90 * MIB, 100 * MIB), clock=lambda: now[0])
    store = LocalStore({"item": table}, memory=memory)
    for first in range(0, 100, 10):
        ids = TableIds(torch.arange(first, first + 10), torch.tensor([10]))
        store.apply_gradients(ids, torch.ones(10))
        now[0] += 10
    (message,) = caplog.messages
    for part in ("90 MiB of 100 MiB", "60 MiB of them by this process", "most of it in 'item'", "10 rows"):
        assert part in message


def test_rows_can_be_looked_up_into_memory_of_the_caller() -> None:
    store = LocalStore({"item": NativeTable(TableConfig(name="item", segments=(Segment(dim=2),)))})
    store.table("item").assign(torch.tensor([1]), torch.tensor([[3.0, 4.0]]))
    out = torch.full((4,), 9.0)
    store.lookup_into(TableIds(torch.tensor([1, 2]), torch.tensor([2])), out)
    assert out.tolist() == [3, 4, 0, 0]


def test_cold_rows_of_each_table_are_read_ahead(tmp_path: Path) -> None:
    stored = {"storage": "tiered", "memory_bytes": 4 << 20, "storage_dir": str(tmp_path)}
    in_memory = TableConfig(name="b", segments=(Segment(dim=1),))
    tiered = {name: TableConfig(name=name, segments=(Segment(dim=256),), **stored) for name in ("a", "c")}
    store = LocalStore.from_configs({"b": in_memory, **tiered})
    for name in tiered:
        table = store.table(name)
        table.assign(torch.arange(10_000), torch.ones(10_000, 256))
        table.flush()  # type: ignore[attr-defined]
    # Two batches of three tables.
    sizes = torch.tensor([10, 5, 0, 0, 5, 20])
    ids = TableIds(torch.cat([torch.arange(size) for size in sizes.tolist()]), sizes, batches=2)
    store.read_ahead(ids)
    read = [store.table(name).stats().cold_ids_read for name in ("a", "b", "c")]
    assert 0 < read[0] <= 10 < read[2] <= 20
    assert read[1] == 0
    assert store.lookup(ids).sum() == (10 + 20) * 256
    assert [store.table(name).stats().cold_ids_read for name in ("a", "b", "c")] == read


@pytest.mark.parametrize("make_table", [NativeTable, DictTable])
def test_the_arrays_of_a_request_are_looked_up_like_tensors(make_table: Callable[..., Table]) -> None:
    configs = {
        name: TableConfig(name=name, segments=(Segment(dim=dim),)) for name, dim in (("a", 2), ("b", 1))
    }
    store = LocalStore.from_configs(configs, make_table=make_table)
    ids = TableIds(torch.tensor([1, 7, 8, 2]), torch.tensor([1, 2, 1, 0]), batches=2)
    store.apply_gradients(ids, torch.arange(6.0))
    found = store.lookup_arrays(ids.ids.numpy(), ids.sizes.numpy(), 2)
    assert found.tolist() == store.lookup(ids).tolist()
    assert len(set(found.tolist())) == 6
    with pytest.raises(TableArgumentError, match=r"\(2 tables, 2 batches, 3 ids\)"):
        store.lookup_arrays(ids.ids.numpy()[:3].copy(), ids.sizes.numpy(), 2)


@pytest.mark.parametrize("name", device_names())
def test_rows_are_on_a_device_when_asked_for(name: str) -> None:
    device = device_named(name)
    config = {"item": TableConfig(name="item", segments=(Segment(dim=1, learning_rate=1.0),))}
    store = LocalStore.from_configs(config, device=device)
    assert isinstance(store.table("item"), CudaTable)
    assert store.device == device.torch_device
    ids = TableIds(torch.tensor([1, 1, 2]).to(store.device), torch.tensor([3]), distinct=False)
    store.apply_gradients(ids, torch.ones(3, device=store.device))
    assert store.lookup(ids).tolist() == [-2, -2, -1]
    assert store.lookup(ids).device == store.device


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize("name", device_names())
def test_what_a_device_has_no_room_for_is_in_host_memory(name: str) -> None:
    """A table that is full before it could spill is on the device alone, and leaves the rest to others."""
    segments = (Segment(dim=4),)
    configs = {
        "item": TableConfig(name="item", segments=segments),
        "user": TableConfig(name="user", segments=segments, capacity_bytes=1000),
    }
    store = LocalStore.from_configs(configs, device=device_named(name), device_bytes=4000)
    item, user = store.table("item"), store.table("user")
    assert isinstance(item, SpillingTable)
    assert isinstance(user, CudaTable)
    assert 2000 < item.near.stats().bytes_total <= 3000
    ids = TableIds(torch.arange(500), torch.tensor([500, 0]))
    store.apply_gradients(ids, torch.ones(2000))
    assert len(item.far) > 400
    assert store.lookup(ids).shape == (2000,)
    store.close()


@pytest.mark.parametrize("name", device_names())
def test_rows_on_a_device_are_not_said_to_fill_host_memory(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = TableConfig(name="item", segments=(Segment(dim=4),))
    device = device_named(name)
    spilling = SpillingTable.within(config, device_bytes=2000, device=device)
    for table, words in (
        (CudaTable(config, device=device), "no tables: rows are on the device"),
        (spilling, f"{100 - (spilling.near.most_rows or 0)} rows"),
    ):
        caplog.clear()
        memory = MemoryWatch(lambda: MemoryUse(60 * MIB, 90 * MIB, 100 * MIB), clock=lambda: 0.0)
        store = LocalStore({"item": table}, memory=memory)
        store.apply_gradients(TableIds(torch.arange(100), torch.tensor([100])), torch.ones(400))
        assert words in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_rows_cannot_be_there() -> None:
    config = {"item": TableConfig(name="item", segments=(Segment(dim=1),))}
    with pytest.raises(AcceleratorError, match="'item': no CUDA device"):
        LocalStore.from_configs(config, device=torch.device("cuda"))


@pytest.mark.parametrize(
    ("counting", "kind"),
    [
        (AdmissionConfig(capacity=500, split_num=5), SlidingFilter),
        (AdmissionConfig(kind="probabilistic_filter", equal=True), ProbabilisticFilter),
        (AdmissionConfig(kind="no_filter"), NoFilter),
    ],
)
def test_sightings_are_counted_as_the_thresholds_say(counting: AdmissionConfig, kind: type) -> None:
    config = {"item": TableConfig(name="item", segments=(Segment(dim=1),))}
    store = LocalStore.from_configs(config, thresholds={"item": SlotThresholds(2, counting=counting)})
    found = store.filters["item"]
    assert type(found) is kind
    if isinstance(found, SlidingFilter):
        assert found.split_num == 5
