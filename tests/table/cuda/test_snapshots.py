"""What a snapshot of a device table does beyond the contract: a copy of all rows if the device has room, or
copies of the rows that change; growth and shrinking."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from services.emulated_cuda import device_named, device_names

from monolith.cuda import Device
from monolith.table import (
    Adagrad,
    CudaTable,
    Expiry,
    Fp16,
    RandomUniform,
    Rows,
    Scan,
    Segment,
    TableConfig,
    iterate,
)
from monolith.table.cuda import snapshots

SEGMENT = Segment(dim=3, optimizer=Adagrad(), initializer=RandomUniform(), learning_rate=0.5)
CONFIG = TableConfig(name="item", segments=(SEGMENT,), expiry=Expiry.days(1))


@pytest.fixture(params=device_names())
def device(request: pytest.FixtureRequest) -> Device:
    return device_named(request.param)


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has no room for a copy of a table."""
    monkeypatch.setattr(snapshots, "_WHOLE_SHARE", 0)


@pytest.fixture(params=["room", "no room"])
def with_and_without_room(request: pytest.FixtureRequest) -> None:
    if request.param == "no room":
        request.getfixturevalue("no_room")


def content(chunks: Any) -> dict[int, tuple[Any, ...]]:
    found: dict[int, tuple[Any, ...]] = {}
    for rows in chunks:
        columns = rows.event_times.tolist(), rows.values.tolist(), rows.state.tolist()
        for key, *row in zip(rows.ids.tolist(), *columns, strict=True):
            assert key not in found
            found[key] = tuple(row)
    return found


def scanned(snapshot: Any, limit: int = 100, **how: Any) -> Any:
    cursor: int | None = None
    while True:
        scan: Scan = snapshot.scan(cursor, limit=limit, **how)
        assert len(scan.rows) <= limit
        yield scan.rows
        if scan.cursor is None:
            return
        cursor = scan.cursor


def train(table: Any, ids: Any, time: int = 1) -> None:
    keys = torch.as_tensor(ids)
    table.apply_gradients(keys, torch.ones(len(keys), table.dim), event_time=time, dedup=True)


def test_a_snapshot_is_a_copy_of_the_table_until_it_is_closed(device: Device) -> None:
    table = CudaTable(CONFIG, device=device)
    train(table, range(1000))
    before = content(iterate(table))
    stats = table.stats()
    snapshot = table.snapshot()
    assert stats.bytes_total < snapshot.captured_bytes < 1.2 * stats.bytes_total
    train(table, range(2000), time=5)
    assert content(scanned(snapshot)) == before
    snapshot.close(saved=True)
    assert snapshot.captured_bytes == 0


def test_rows_that_moved_within_the_table_are_in_the_copy_once(device: Device) -> None:
    table = CudaTable(CONFIG, device=device)
    train(table, range(1000))
    table.remove(torch.arange(0, 1000, 2))
    before = content(iterate(table))
    snapshot = table.snapshot()
    train(table, range(1000, 1400))  # places of rows that were removed become free
    assert content(scanned(snapshot)) == before


@pytest.mark.usefixtures("no_room")
def test_copies_that_the_device_has_no_room_for_go_to_the_host(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "_LEAST_BYTES", 0)
    monkeypatch.setattr(snapshots, "_MOST_BYTES", 0)
    monkeypatch.setattr(snapshots, "_LEAST_ROWS", 64)
    table = CudaTable(CONFIG, device=device)
    train(table, range(1000))
    before = content(iterate(table))
    snapshot = table.snapshot()
    for first in range(0, 1000, 200):
        train(table, range(first, first + 250), time=5)
        table.remove(torch.arange(first, first + 20))
    assert content(scanned(snapshot)) == before
    assert snapshot.captured_bytes == 1000 * (8 + 4 + 1 + 24)
    snapshot.close(saved=True)


@pytest.mark.usefixtures("with_and_without_room")
def test_a_snapshot_outlives_growth_and_shrinking(device: Device) -> None:
    table = CudaTable(CONFIG, device=device)
    table.track_changes()
    train(table, range(150))
    before = content(iterate(table))
    snapshot = table.snapshot()
    train(table, range(140, 4000), time=100)  # grows
    assert content(scanned(snapshot)) == before
    table.evict(now=100 + 10**9)  # shrinks
    assert len(table) == 0
    train(table, range(50), time=10**9)
    assert content(scanned(snapshot)) == before
    assert content(scanned(snapshot, changed_only=True)) == before
    snapshot.close(saved=False)
    again = table.snapshot()
    assert set(content(scanned(again, changed_only=True))) == set(range(50))
    assert set(again.removed().tolist()) == set(range(4000))
    again.close(saved=True)


@pytest.mark.usefixtures("with_and_without_room")
def test_a_table_that_serves_codes_is_snapshot_as_what_they_say(device: Device) -> None:
    config = TableConfig(name="item", segments=(Segment(dim=3, compressor=Fp16()),), serving=True)
    table = CudaTable(config, device=device)
    table.assign(torch.arange(50), torch.randn(50, 3), event_time=3)
    before = content(iterate(table))
    snapshot = table.snapshot()
    table.assign(torch.arange(25), torch.randn(25, 3), event_time=4)
    assert content(scanned(snapshot, limit=7)) == before


def test_what_is_scanned_is_on_the_host(device: Device) -> None:
    table = CudaTable(CONFIG, device=device)
    train(table, range(5))
    snapshot = table.snapshot()
    rows: Rows = snapshot.scan().rows
    assert {column.device.type for column in (rows.ids, rows.event_times, rows.values, rows.state)} == {"cpu"}
