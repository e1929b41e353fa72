"""What a table on a GPU does beyond the contract: device tensors, streams, long runs, growth, dumps."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from services.emulated_cuda import device_named, device_names, nothing_waits, on_devices

from monolith.cuda import Device
from monolith.errors import AcceleratorError, ConfigError, TableArgumentError
from monolith.table import (
    OPTIMIZERS,
    Adagrad,
    CudaTable,
    Expiry,
    FixedR8,
    Fp16,
    NativeTable,
    RandomUniform,
    Rows,
    Segment,
    TableConfig,
    TouchedKeySet,
    dump,
    iterate,
    load,
)
from monolith.table.cuda import growth, resident_rows
from monolith.table.cuda.memory import DeviceMemory, RowArrays

SEGMENT = Segment(dim=8, optimizer=Adagrad(), initializer=RandomUniform(), learning_rate=0.5)
CONFIG = TableConfig(name="item", segments=(SEGMENT,), initial_rows=4096)


@pytest.fixture(params=device_names())
def device(request: pytest.FixtureRequest) -> Device:
    return device_named(request.param)


def content(table: Any) -> Rows:
    return Rows.concat(list(iterate(table)))


def assert_same_bits(one: Any, other: Any) -> None:
    expected, found = content(one), content(other)
    for name in ("ids", "event_times", "values", "state"):
        # Counters are integers by their bits, some of which are no numbers.
        wanted, got = (getattr(rows, name).contiguous() for rows in (expected, found))
        assert torch.equal(wanted.view(torch.uint8), got.view(torch.uint8)), name


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_it_says_what_to_use() -> None:
    with pytest.raises(AcceleratorError, match="NativeTable"):
        CudaTable(CONFIG)


def test_device_tensors_are_answered_on_the_device_without_waiting(device: Device) -> None:
    table = CudaTable(CONFIG, device=device)
    with device.torch_device:
        ids, gradients = torch.arange(100), torch.ones(100, 8)
        times, out = torch.full((100,), 7), torch.empty(100, 8)
    with nothing_waits(device):
        for step in range(3):
            table.apply_gradients(ids, gradients, step=step, event_time=times, dedup=True)
        assert table.lookup(ids, out=out) is out
        seen = table.lookup(ids)
    assert seen.device == ids.device
    assert torch.equal(seen, out)
    assert torch.equal(seen.cpu(), table.lookup(ids.cpu()))
    found, rows = table.lookup_rows(ids)
    assert found.all()
    assert (rows.event_times == 7).all()


def test_out_must_be_where_the_ids_are_and_have_their_shape(device: Device) -> None:
    table = CudaTable(CONFIG, device=device)
    ids = torch.arange(2, device=device.torch_device)
    elsewhere = torch.empty(2, 8, device="meta" if ids.device.type == "cpu" else "cpu")
    for out in (elsewhere, torch.empty(3, 8, device=ids.device)):
        with pytest.raises(TableArgumentError, match="out"):
            table.lookup(ids, out=out)


def test_an_impossible_time_on_the_device_is_complained_of_by_a_later_call(device: Device) -> None:
    table = CudaTable(CONFIG, device=device)
    times = torch.tensor([-1, 5, 1 << 40], device=device.torch_device)
    ids, values = torch.arange(3), torch.ones(3, 8)
    table.assign(ids.to(times.device), values.to(times.device), event_time=times)
    with pytest.raises(TableArgumentError, match="2 on the device"):
        table.stats()
    assert table.lookup_rows(ids)[1].event_times.tolist() == [0, 5, 0]


@pytest.mark.parametrize(
    "device, kind, dim",
    on_devices(
        [(kind, dim) for dim in (1, 5, 40) for kind in OPTIMIZERS], plain=[(k, 5) for k in OPTIMIZERS]
    ),
    indirect=["device"],
)
@pytest.mark.parametrize("dedup", [False, True])
def test_every_optimizer_gives_the_bits_of_the_host(device: Device, kind: str, dim: int, dedup: bool) -> None:
    dims = (1, 1) if kind == "batch_softmax" else (dim, 3)
    segments = tuple(
        Segment(dim=d, optimizer=OPTIMIZERS[kind](), initializer=RandomUniform(), learning_rate=rate)
        for d, rate in zip(dims, (0.125, 0.25), strict=True)
    )
    config = TableConfig(name="item", segments=segments)
    host, table = NativeTable(config), CudaTable(config, device=device)
    random = torch.Generator().manual_seed(dim)
    for step in range(3):
        ids = torch.randint(-300, 300, (2000,), generator=random)
        gradients = torch.randn(2000, config.dim, generator=random)
        for one in (host, table):
            one.apply_gradients(ids, gradients, step=step, event_time=step, dedup=dedup)
    assert_same_bits(host, table)


@pytest.mark.parametrize(
    "device, kind, dim",
    on_devices(
        [(kind, dim) for dim in (16, 32, 64, 128, 256) for kind in OPTIMIZERS if kind != "batch_softmax"],
        plain=[("adagrad", 32), ("adam", 64), ("group_ftrl", 32)],
    ),
    indirect=["device"],
)
def test_rows_that_are_fetched_by_several_floats_have_the_same_bits(
    device: Device, kind: str, dim: int
) -> None:
    segment = Segment(dim=dim, optimizer=OPTIMIZERS[kind](), initializer=RandomUniform(), learning_rate=0.125)
    config = TableConfig(name="item", segments=(segment,))
    host, table = NativeTable(config), CudaTable(config, device=device)
    random = torch.Generator().manual_seed(dim)
    for step in range(3):
        ids = torch.randint(-100, 100, (300,), generator=random)
        gradients = torch.randn(301 * dim, generator=random)
        by = gradients[step : step + 300 * dim].reshape(300, dim)  # wherever it lies
        for one in (host, table):
            one.apply_gradients(ids, by, step=step, dedup=step < 2)
    assert_same_bits(host, table)


@pytest.mark.parametrize(
    "device, dim, repeats",
    on_devices(
        [(dim, many) for dim in (1, 16, 100, 600, 3000) for many in (511, 512, 513, 767, 768, 1500)],
        plain=[(16, 511), (16, 512), (16, 767), (16, 1500), (600, 513)],
    ),
    indirect=["device"],
)
def test_gradients_of_an_id_that_is_everywhere_are_summed_in_order(
    device: Device, dim: int, repeats: int
) -> None:
    segment = Segment(dim=dim, optimizer=Adagrad(), initializer=RandomUniform(), learning_rate=0.5)
    config = TableConfig(name="item", segments=(segment,))
    host, table = NativeTable(config), CudaTable(config, device=device)
    random = torch.Generator().manual_seed(repeats)
    ids = torch.cat([torch.full((repeats,), 5), torch.full((repeats,), 6), torch.arange(300)])
    ids = ids[torch.randperm(len(ids), generator=random)]
    gradients = torch.randn(len(ids), dim, generator=random)
    for _ in range(2):
        for one in (host, table):
            one.apply_gradients(ids, gradients, event_time=torch.arange(len(ids)), dedup=True)
    assert_same_bits(host, table)


@pytest.mark.parametrize("dedup", [False, True])
@pytest.mark.parametrize("dims", [(16,), (8, 3)])
@pytest.mark.parametrize("rate", [0.5, 3.0])  # with the decay, by the second a row need not stay finite
def test_gradients_that_are_not_usable_are_left_out_wherever_they_are(
    device: Device, dims: tuple[int, ...], dedup: bool, rate: float
) -> None:
    optimizer = Adagrad(weight_decay=0.5)
    segments = tuple(Segment(dim=dim, optimizer=optimizer, learning_rate=rate) for dim in dims)
    config = TableConfig(name="item", segments=segments)
    host, table = NativeTable(config), CudaTable(config, device=device)
    random = torch.Generator().manual_seed(1)
    for step in range(3):
        often = torch.full((600,), 7), torch.full((520,), 8 + step), torch.full((700,), 1000 + step)
        ids = torch.cat([*often, torch.randint(0, 400, (900,), generator=random)])
        ids = ids[torch.randperm(len(ids), generator=random)]
        gradients = torch.randn(len(ids), config.dim, generator=random)
        bad = (torch.rand(len(ids), generator=random) < 0.2) | (ids >= 1000) | (ids < 20)
        column = torch.randint(config.dim, (len(ids),), generator=random)
        gradients[bad, column[bad]] = torch.tensor([float("nan"), float("inf"), -1e16])[step]
        times = torch.randint(1000, (len(ids),), generator=random) + 5000 * bad
        for one in (host, table):
            one.apply_gradients(ids, gradients, step=step, event_time=times, dedup=dedup)
    assert_same_bits(host, table)
    expected, found = host.stats(), table.stats()
    for name in ("rows", "inserted", "non_finite", "max_event_time", "refused"):
        assert getattr(found, name) == getattr(expected, name), name
    assert found.non_finite > 2100


def test_it_grows_as_often_as_it_must_and_forgets_nothing(device: Device) -> None:
    config = TableConfig(name="item", segments=(SEGMENT,))
    host, table = NativeTable(config), CudaTable(config, device=device)
    random = torch.Generator().manual_seed(0)
    for step in range(8):
        ids = torch.randint(-(2**62), 2**62, (5000,), generator=random)
        for one in (host, table):
            one.apply_gradients(ids, torch.ones(5000, 8), event_time=step)
            one.remove(ids[:2000])
    assert_same_bits(host, table)
    assert table.stats().load < 0.8


def test_calls_on_several_streams_follow_one_another(device: Device) -> None:
    table = CudaTable(CONFIG, device=device)
    with device.torch_device:
        ids, ones = torch.arange(64), torch.ones(64, 8)
    table.assign(ids, 0 * ones)
    device.current_stream().synchronize()
    streams = [device.new_stream() for _ in range(3)]
    for number in range(30):
        with device.on(streams[number % 3]):
            table.assign_add(ids, ones)
    assert table.lookup(ids.cpu()).unique().tolist() == [30]


def test_rows_move_between_host_and_device_in_the_files_of_any_table(device: Device, tmp_path: Path) -> None:
    table, again = (CudaTable(CONFIG, device=device) for _ in range(2))
    host = NativeTable(CONFIG)
    table.apply_gradients(torch.arange(1000), torch.randn(1000, 8), event_time=torch.arange(1000))
    dump(table, str(tmp_path / "device"))
    load(host, str(tmp_path / "device"))
    assert_same_bits(table, host)
    dump(host, str(tmp_path / "host"))
    load(again, str(tmp_path / "host"))
    assert_same_bits(table, again)


def test_a_budget_below_the_smallest_table_is_refused(device: Device) -> None:
    with pytest.raises(ConfigError, match="capacity_bytes"):
        CudaTable(TableConfig(name="item", segments=(SEGMENT,), capacity_bytes=100), device=device)


def test_rows_that_come_and_go_in_a_full_table_are_found_and_never_two_memories_are_taken(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Marks of those that went are cleared away where the rows lie."""
    taken: list[int] = []
    first = DeviceMemory.__init__

    def count(memory: DeviceMemory, *arguments: Any, **more: Any) -> None:
        first(memory, *arguments, **more)
        taken.append(memory.bytes_index + memory.bytes_rows)

    monkeypatch.setattr(DeviceMemory, "__init__", count)
    capacity = 1 << 18
    config = TableConfig(name="item", segments=(SEGMENT,), capacity_bytes=capacity, when_full="expire_oldest")
    table = CudaTable(config, device=device)
    for step in range(12):
        many = torch.arange(step * 700, step * 700 + 2000)
        values = many.float()[:, None].expand(2000, 8).contiguous()
        table.assign(many, values, event_time=step + 1)
        held = table.contains(many)
        assert torch.equal(table.lookup(many), values * held[:, None])
        assert int(held.sum()) > 1500
    rows = content(table)
    assert torch.equal(rows.values[:, 0], rows.ids.float())
    assert len(rows.ids.unique()) == len(rows) == len(table)
    assert all(old + new <= capacity for old, new in pairwise(taken))
    assert taken[-1] > 0.9 * capacity


def test_a_large_table_takes_memory_in_one_call_and_moves_in_the_next(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "_LARGE_BYTES", 0)
    config = TableConfig(name="item", segments=(SEGMENT,))
    host, table = NativeTable(config), CudaTable(config, device=device)
    ids, values = torch.arange(4000), torch.rand(4000, 8)
    ahead = grown = 0
    for some in ids.split(10):
        before = table.stats()
        for one in (host, table):
            one.assign(some, values[some])
        after = table.stats()
        if after.bytes_total > before.bytes_total:
            assert after.bytes_index == before.bytes_index
            ahead += 1
        elif after.bytes_index > before.bytes_index:
            assert after.bytes_total == after.bytes_index + after.bytes_rows
            grown += 1
    assert_same_bits(host, table)
    assert grown > 4
    assert ahead in (grown, grown + 1)
    for start in (10_000, 20_000):  # more at once than can wait
        for one in (host, table):
            one.assign(ids + start, values)
    assert_same_bits(host, table)
    table.clear()
    assert table.stats().bytes_total == CudaTable(config, device=device).stats().bytes_total


def test_a_table_grows_by_less_where_the_device_has_no_room_for_more(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where it has none at all the call says so, and the table is as it was."""
    taken = RowArrays.of
    most = 3000

    def of(layout: Any, rows: int, where: torch.device) -> RowArrays:
        if rows > most:
            raise torch.OutOfMemoryError("no room")
        return taken(layout, rows, where)

    monkeypatch.setattr(RowArrays, "of", of)
    table = CudaTable(TableConfig(name="item", segments=(SEGMENT,)), device=device)
    ids, values = torch.arange(2000), torch.rand(2000, 8)
    for some in ids.split(100):
        table.assign(some, values[some])
    assert torch.equal(table.lookup(ids), values)
    with pytest.raises(AcceleratorError, match="capacity_bytes"):
        table.assign(ids + 2000, values)
    assert torch.equal(table.lookup(ids), values)
    assert len(table) == 2000


def test_evicting_goes_by_parts_and_gives_memory_back(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident_rows, "_AT_ONCE", 1000)
    config = TableConfig(name="item", segments=(SEGMENT,), expiry=Expiry.days(1))
    table = CudaTable(config, device=device)
    first = table.stats().bytes_total
    ids = torch.arange(5000)
    table.assign(ids, torch.ones(5000, 8), event_time=ids)
    table.assign(ids[:40], 2 * torch.ones(40, 8), event_time=10**9)
    full = table.stats().bytes_total
    assert table.evict(now=10**9) == 4960
    assert table.stats().bytes_total <= full / 4
    assert table.lookup(ids).sum(1).unique(return_counts=True)[1].tolist() == [4960, 40]
    table.clear()
    assert table.stats().bytes_total == first


def test_a_touched_set_is_told_when_it_is_looked_into_and_no_step_waits(device: Device) -> None:
    touched = TouchedKeySet(1000)
    table = CudaTable(CONFIG, touched=touched, device=device)
    with device.torch_device:
        ids, gradients = torch.arange(100), torch.ones(100, 8)
    with nothing_waits(device):
        table.apply_gradients(ids, gradients, dedup=True)
        ids.fill_(-1)  # the caller's own again
    assert sorted(touched.steal().tolist()) == list(range(100))
    table.apply_gradients(ids[:1], gradients[:1])
    table.close()
    assert touched.steal().tolist() == [-1]


def test_a_set_that_is_far_too_small_for_a_table_that_is_cleared_says_what_it_lost(device: Device) -> None:
    touched = TouchedKeySet(10)
    table = CudaTable(CONFIG, device=device)
    table.assign(torch.arange(1000), torch.ones(1000, 8))
    table.touch(touched)
    table.clear()
    assert touched.lost > 0


def test_digests_of_codes_are_those_of_what_they_say(device: Device) -> None:
    segments = Segment(dim=3, compressor=Fp16()), Segment(dim=2, compressor=FixedR8(5.0))
    config = TableConfig(name="item", segments=segments, serving=True)
    tables = CudaTable(config, device=device), NativeTable(config)
    values, buckets = torch.randn(300, 5), torch.arange(0, 4096, 3)
    for one in tables:
        one.assign(torch.arange(-100, 200), values)
    found, expected = (one.digests(buckets, share=(1, 2)) for one in tables)
    assert torch.equal(found, expected)
    assert int((found != 0).sum()) > 10


@pytest.mark.parametrize("dedup", [False, True])
def test_nothing_depends_on_the_order_of_threads(dedup: bool) -> None:
    config = TableConfig(name="item", segments=(SEGMENT,))
    plain, shuffled = (CudaTable(config, device=device_named(name)) for name in ("emulated", "shuffled"))
    random = torch.Generator().manual_seed(0)
    for step in range(6):
        ids = torch.randint(0, 400, (700,), generator=random)
        gradients = torch.randn(700, 8, generator=random)
        for table in (plain, shuffled):
            table.apply_gradients(ids, gradients, step=step, event_time=ids + step, dedup=dedup)
            table.assign_add(ids[:50], gradients[:50], event_time=step)
            table.assign(ids[50:90], gradients[50:90], event_time=step)
            table.remove(ids[::5])
            table.evict(now=86400 * 365 * 60)
    assert_same_bits(plain, shuffled)
    assert plain.stats() == shuffled.stats()
