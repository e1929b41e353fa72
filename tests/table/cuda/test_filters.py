"""Admission filters that count on a device: the same answers and counts as in host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from services.emulated_cuda import device_named, device_names, nothing_waits
from torch import Tensor

from monolith.cuda import Device
from monolith.errors import TableArgumentError
from monolith.table import CudaTable, NativeTable, Segment, SlotThresholds, TableConfig
from monolith.table.admission import ProbabilisticFilter, SlidingFilter
from monolith.table.cuda.fused import FusedTables
from monolith.table.table import Table

CONFIG = TableConfig(name="item", segments=(Segment(dim=2),))
THREE = SlotThresholds(default=3)
BY_SLOT = SlotThresholds(default=0, per_slot={1: 2, 2: 5})

FILTERS: dict[str, Callable[[], SlidingFilter | ProbabilisticFilter]] = {
    "counts": lambda: SlidingFilter(1 << 16, thresholds=THREE),
    "counts, by slot": lambda: SlidingFilter(1 << 16, thresholds=BY_SLOT),
    "counts, and old sightings fade": lambda: SlidingFilter(1200, 5, THREE),
    "counts, and has no cell for many ids": lambda: SlidingFilter(300, 300, SlotThresholds(default=15)),
    "draws": lambda: ProbabilisticFilter(THREE, seed=3),
    "draws, each sighting alike": lambda: ProbabilisticFilter(BY_SLOT, equal=True),
}


@pytest.fixture(params=device_names())
def device(request: pytest.FixtureRequest) -> Device:
    return device_named(request.param)


def ids_of_batch(number: int, *, size: int = 300, most: int = 4000) -> Tensor:
    """Return ids of three slots, some of them several times, in an order of their own."""
    draw = torch.Generator().manual_seed(number)
    rank = (torch.rand(size, generator=draw, dtype=torch.float64) ** 3 * most).to(torch.int64)
    return rank | (rank % 3) << 48


def train(table: Table, batches: range, *, dedup: bool = True, counts: bool = False) -> None:
    for number in batches:
        ids = ids_of_batch(number)
        gradients = torch.ones(len(ids), 2)
        gradients[5::50] = torch.nan  # is no sighting
        sightings = ids % 4 + 1 if counts else None
        table.apply_gradients(ids, gradients, step=number, dedup=dedup, counts=sightings)


def counted(admission: SlidingFilter | ProbabilisticFilter, folder: Path) -> list[bytes]:
    """Return the files of a filter."""
    folder.mkdir(exist_ok=True)
    admission.save(str(folder / "filter"))
    return [path.read_bytes() for path in sorted(folder.iterdir())]


def assert_same(one: Table, other: Table) -> None:
    mine, theirs = one.scan(limit=100_000).rows, other.scan(limit=100_000).rows
    assert len(mine)
    by_id, their_order = mine.ids.argsort(), theirs.ids.argsort()
    assert torch.equal(mine.ids[by_id], theirs.ids[their_order])
    assert torch.equal(mine.values[by_id], theirs.values[their_order])
    assert one.stats().filtered == other.stats().filtered


@pytest.mark.parametrize("how", [{}, {"counts": True}, {"dedup": False}], ids=["", "counts", "no dedup"])
@pytest.mark.parametrize("kind", list(FILTERS))
def test_it_admits_whom_a_filter_in_host_memory_does(
    device: Device, tmp_path: Path, kind: str, how: dict[str, bool]
) -> None:
    here, there = FILTERS[kind](), FILTERS[kind]()
    host, on_device = NativeTable(CONFIG, admission=here), CudaTable(CONFIG, admission=there, device=device)
    for part in (range(8), range(8, 14)):
        for table in (host, on_device):
            train(table, part, **how)
        assert counted(there, tmp_path / "there") == counted(here, tmp_path / "here")
        assert_same(on_device, host)
    assert there.away is not None


@pytest.mark.parametrize("kind", ["counts", "counts, and has no cell for many ids", "draws"])
def test_the_order_of_threads_does_not_matter(tmp_path: Path, kind: str) -> None:
    filters = FILTERS[kind](), FILTERS[kind]()
    tables = [
        CudaTable(CONFIG, admission=one, device=device_named(name))
        for one, name in zip(filters, ("emulated", "shuffled"), strict=True)
    ]
    for table in tables:
        train(table, range(8))
    assert counted(filters[0], tmp_path / "one") == counted(filters[1], tmp_path / "other")
    assert_same(*tables)


def test_its_counts_are_restored_and_copied(device: Device, tmp_path: Path) -> None:
    kind = "counts, and old sightings fade"
    before, after = FILTERS[kind](), FILTERS[kind]()
    train(CudaTable(CONFIG, admission=before, device=device), range(9))
    table = CudaTable(CONFIG, admission=after, device=device)
    train(table, range(20, 40))  # what is restored takes the place of this
    kept = counted(before, tmp_path / "kept")
    assert isinstance(after, SlidingFilter)
    after.restore(str(tmp_path / "kept" / "filter"))
    copied = after.copy()
    assert counted(copied, tmp_path / "copied") == kept
    for one in (table, CudaTable(CONFIG, admission=copied, device=device)):
        one.clear()
        train(one, range(9, 12))
    assert counted(after, tmp_path / "after") == counted(copied, tmp_path / "copied")
    assert counted(before, tmp_path / "before") == kept
    after.forget()
    assert len(after) == 0


def test_its_own_methods_look_on_the_device(device: Device) -> None:
    admission = SlidingFilter(1000, thresholds=THREE)
    table = CudaTable(CONFIG, admission=admission, device=device)
    ids = torch.tensor([7, 8, 7])
    table.apply_gradients(ids, torch.ones(3, 2), step=1)
    assert admission.get(torch.tensor([7, 8, 9])).tolist() == [2, 1, 0]
    assert admission.add(torch.tensor([8]), torch.tensor([2])).tolist() == [1]
    assert admission.refuse(torch.tensor([7])).tolist() == [True]
    table.apply_gradients(ids, torch.ones(3, 2), step=2)
    assert table.contains(torch.tensor([7, 8])).tolist() == [True, True]
    assert (len(admission), admission.failures) == (2, 0)


def test_a_filter_is_asked_in_one_place(device: Device) -> None:
    shared = SlidingFilter(1000, thresholds=THREE)
    NativeTable(CONFIG, admission=shared)
    table = CudaTable(CONFIG, admission=shared, device=device)
    why = FusedTables([table], device).why_not_captured()
    assert why == "table 'item' counts in host memory how often an id was seen before it gets a row"
    table.apply_gradients(torch.tensor([7]), torch.ones(1, 2), step=1)
    assert shared.away is None
    assert shared.get(torch.tensor([7])).tolist() == [1]
    alone = SlidingFilter(1000, thresholds=THREE)
    CudaTable(CONFIG, admission=alone, device=device)
    with pytest.raises(TableArgumentError, match="counts for a table on a GPU"):
        NativeTable(CONFIG, admission=alone)


def test_answers_do_not_wait_for_the_device(device: Device) -> None:
    config = replace(CONFIG, initial_rows=10_000)
    table = CudaTable(config, admission=FILTERS["counts"](), device=device)
    ids = torch.arange(100, device=device.torch_device)
    gradients = torch.ones(100, 2, device=device.torch_device)
    for step in range(4):
        table.apply_gradients(ids, gradients, step=step)
    with nothing_waits(device):
        table.apply_gradients(ids, gradients, step=5)
    assert len(table) == 100
