"""What a table on a GPU does beyond the contract: device tensors, streams, long runs, growth, dumps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

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

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SEGMENT = Segment(dim=8, optimizer=Adagrad(), initializer=RandomUniform(), learning_rate=0.5)
CONFIG = TableConfig(name="item", segments=(SEGMENT,), initial_rows=4096)


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Fail where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


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


@needs_gpu
def test_device_tensors_are_answered_on_the_device_and_nobody_waits() -> None:
    table = CudaTable(CONFIG)
    ids, gradients = torch.arange(100, device="cuda"), torch.ones(100, 8, device="cuda")
    times = torch.full((100,), 7, device="cuda")
    out = torch.empty(100, 8, device="cuda")
    with nothing_waits():
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


@needs_gpu
def test_out_must_be_where_the_ids_are() -> None:
    table = CudaTable(CONFIG)
    with pytest.raises(TableArgumentError, match="out"):
        table.lookup(torch.arange(2, device="cuda"), out=torch.empty(2, 8))


@needs_gpu
def test_an_impossible_time_on_the_device_is_complained_of_by_a_later_call() -> None:
    table = CudaTable(CONFIG)
    times = torch.tensor([-1, 5, 1 << 40], device="cuda")
    table.assign(torch.arange(3, device="cuda"), torch.ones(3, 8, device="cuda"), event_time=times)
    with pytest.raises(TableArgumentError, match="2 on the device"):
        table.stats()
    assert table.lookup_rows(torch.arange(3))[1].event_times.tolist() == [0, 5, 0]


@needs_gpu
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dim", [1, 5, 40])
@pytest.mark.parametrize("dedup", [False, True])
def test_every_optimizer_gives_the_bits_of_the_host(kind: str, dim: int, dedup: bool) -> None:
    dims = (1, 1) if kind == "batch_softmax" else (dim, 3)
    segments = tuple(
        Segment(dim=d, optimizer=OPTIMIZERS[kind](), initializer=RandomUniform(), learning_rate=rate)
        for d, rate in zip(dims, (0.125, 0.25), strict=True)
    )
    config = TableConfig(name="item", segments=segments)
    host, device = NativeTable(config), CudaTable(config)
    random = torch.Generator().manual_seed(dim)
    for step in range(3):
        ids = torch.randint(-300, 300, (2000,), generator=random)
        gradients = torch.randn(2000, config.dim, generator=random)
        for table in (host, device):
            table.apply_gradients(ids, gradients, step=step, event_time=step, dedup=dedup)
    assert_same_bits(host, device)


@needs_gpu
@pytest.mark.parametrize("dim", [1, 16, 100, 600, 3000])
@pytest.mark.parametrize("repeats", [511, 512, 513, 767, 768, 1500])
def test_gradients_of_an_id_that_is_everywhere_are_summed_in_order(dim: int, repeats: int) -> None:
    segment = Segment(dim=dim, optimizer=Adagrad(), initializer=RandomUniform(), learning_rate=0.5)
    config = TableConfig(name="item", segments=(segment,))
    host, device = NativeTable(config), CudaTable(config)
    random = torch.Generator().manual_seed(repeats)
    ids = torch.cat([torch.full((repeats,), 5), torch.full((repeats,), 6), torch.arange(300)])
    ids = ids[torch.randperm(len(ids), generator=random)]
    gradients = torch.randn(len(ids), dim, generator=random)
    for _ in range(2):
        for table in (host, device):
            table.apply_gradients(ids, gradients, event_time=torch.arange(len(ids)), dedup=True)
    assert_same_bits(host, device)


@needs_gpu
def test_it_grows_as_often_as_it_must_and_forgets_nothing() -> None:
    config = TableConfig(name="item", segments=(SEGMENT,))
    host, device = NativeTable(config), CudaTable(config)
    random = torch.Generator().manual_seed(0)
    for step in range(20):
        ids = torch.randint(-(2**62), 2**62, (5000,), generator=random)
        for table in (host, device):
            table.apply_gradients(ids, torch.ones(5000, 8), event_time=step)
            table.remove(ids[:2000])
    assert_same_bits(host, device)
    assert device.stats().load < 0.8


@needs_gpu
def test_calls_on_several_streams_follow_one_another() -> None:
    table = CudaTable(CONFIG)
    ids, ones = torch.arange(64, device="cuda"), torch.ones(64, 8, device="cuda")
    table.assign(ids, 0 * ones)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    for number in range(30):
        with torch.cuda.stream(streams[number % 3]):
            table.assign_add(ids, ones)
    assert table.lookup(ids.cpu()).unique().tolist() == [30]


@needs_gpu
def test_rows_move_between_host_and_device_in_the_files_of_any_table(tmp_path: Path) -> None:
    device, host, again = CudaTable(CONFIG), NativeTable(CONFIG), CudaTable(CONFIG)
    device.apply_gradients(torch.arange(1000), torch.randn(1000, 8), event_time=torch.arange(1000))
    dump(device, str(tmp_path / "device"))
    load(host, str(tmp_path / "device"))
    assert_same_bits(device, host)
    dump(host, str(tmp_path / "host"))
    load(again, str(tmp_path / "host"))
    assert_same_bits(device, again)


@needs_gpu
def test_a_budget_below_the_smallest_table_is_refused() -> None:
    with pytest.raises(ConfigError, match="capacity_bytes"):
        CudaTable(TableConfig(name="item", segments=(SEGMENT,), capacity_bytes=100))
