"""What a table on a GPU does beyond the contract: device tensors, streams, long runs, growth, dumps."""

from __future__ import annotations

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
    NativeTable,
    RandomUniform,
    Rows,
    Segment,
    TableConfig,
    dump,
    iterate,
    load,
)

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


def test_device_tensors_are_answered_on_the_device_and_nobody_waits(device: Device) -> None:
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


def test_it_grows_as_often_as_it_must_and_forgets_nothing(device: Device) -> None:
    config = TableConfig(name="item", segments=(SEGMENT,))
    host, table = NativeTable(config), CudaTable(config, device=device)
    random = torch.Generator().manual_seed(0)
    for step in range(20):
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
