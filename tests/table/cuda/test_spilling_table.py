"""Rows that overflow from a device to host memory: which go, which come back, and that nothing else shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from services.emulated_cuda import EmulatedDevice, device_names, nothing_waits
from services.properties import tries
from services.spilling_tables import bytes_of, spilling_table, three_tier_table
from torch import Tensor

from monolith.cuda import Device, device_of
from monolith.errors import ConfigError, RestoreError, TableArgumentError
from monolith.table import (
    Adagrad,
    CudaTable,
    DictTable,
    Expiry,
    NativeTable,
    OneBit,
    RandomUniform,
    Rows,
    Segment,
    SlidingFilter,
    SlotThresholds,
    SpillingTable,
    Table,
    TableConfig,
    TableSnapshot,
    TieredTable,
    TouchedKeySet,
    dump,
    dump_changes,
    dump_snapshot,
    iterate,
    load,
    load_changes,
)
from monolith.table.digests import BUCKETS

SEGMENT = Segment(dim=4, optimizer=Adagrad(), initializer=RandomUniform(), learning_rate=0.5)
CONFIG = TableConfig(name="item", segments=(SEGMENT,), expiry=Expiry.days(1))
NEAR = 12
"""Rows that the smallest table on a device has room for."""


@pytest.fixture(params=device_names())
def device(request: pytest.FixtureRequest) -> Device:
    return device_of(None) if request.param == "gpu" else EmulatedDevice()


@pytest.fixture
def table(device: Device) -> Iterator[SpillingTable]:
    made = spilling_table(CONFIG, device=device)
    yield made
    made.close()


def train(table: Table, ids: Tensor, step: int = 0, **more: Any) -> None:
    gradients = torch.randn(len(ids), table.dim, generator=torch.Generator().manual_seed(step))
    table.apply_gradients(ids, gradients, step=step, event_time=step, **more)


def held(table: Table) -> list[int]:
    return sorted(key for rows in iterate(table) for key in rows.ids.tolist())


def content(table: Table, limit: int = 1000) -> Rows:
    return Rows.concat([table.scan(limit=1).rows.slice(0, 0), *iterate(table, limit=limit)])


def assert_same_bits(one: Table, other: Table, limit: int = 1000) -> None:
    expected, found = content(one), content(other, limit)
    for name in ("ids", "event_times", "values", "state"):
        wanted, got = (getattr(rows, name) for rows in (expected, found))
        assert wanted.shape == got.shape, name
        assert wanted.numpy().tobytes() == got.numpy().tobytes(), name


def test_rows_stay_on_the_device_as_long_as_there_is_room(table: SpillingTable) -> None:
    train(table, torch.arange(NEAR))
    assert held(table.near) == list(range(NEAR))
    assert len(table.far) == 0


def test_the_least_recently_written_rows_leave(table: SpillingTable) -> None:
    for step in range(4):
        train(table, torch.arange(3 * step, 3 * step + 3), step)
    train(table, torch.tensor([0, 1, 2]), 4)  # used again
    table.lookup(torch.tensor([3, 4, 5]))  # to look is not to use
    train(table, torch.tensor([100, 101, 102]), 5)
    assert held(table.far) == [3, 4, 5]
    assert held(table.near) == [0, 1, 2, 6, 7, 8, 9, 10, 11, 100, 101, 102]


def test_a_row_leaves_and_comes_back_with_its_state_and_its_time(table: SpillingTable) -> None:
    train(table, torch.arange(NEAR), 3)
    before = table.lookup_rows(torch.arange(NEAR))[1]
    train(table, torch.arange(100, 100 + NEAR), 4)
    assert held(table.far) == list(range(NEAR))
    after = table.lookup_rows(torch.arange(NEAR))[1]
    for name in ("ids", "event_times", "values", "state"):
        assert torch.equal(getattr(before, name), getattr(after, name)), name
    table.apply_gradients(torch.arange(NEAR), torch.zeros(NEAR, 4))
    assert held(table.near) == list(range(NEAR))
    _, back = table.near.lookup_rows(torch.arange(NEAR))
    assert torch.equal(back.state, before.state)
    assert torch.equal(back.event_times, before.event_times)


def test_no_row_of_the_batch_at_hand_leaves(table: SpillingTable) -> None:
    train(table, torch.arange(NEAR))
    batch = torch.cat([torch.arange(4), torch.arange(100, 108)])  # the four oldest among them
    train(table, batch, 1)
    assert held(table.near) == sorted(batch.tolist())


def test_what_a_batch_has_beyond_all_room_is_trained_in_host_memory(table: SpillingTable) -> None:
    reference = NativeTable(CONFIG)
    for step in range(3):
        for one in (reference, table):
            train(one, torch.arange(100).repeat(2), step, dedup=True)
    assert len(table.near) == NEAR
    assert len(table.far) == 100 - NEAR
    assert_same_bits(reference, table)


def test_a_lookup_answers_from_both_and_moves_nothing(table: SpillingTable) -> None:
    many = torch.arange(30)
    table.assign(many, many.float()[:, None].expand(30, 4).contiguous())
    near = held(table.near)
    assert table.lookup(torch.tensor([29, 500, 0, 29, 15]))[:, 0].tolist() == [29, 0, 0, 29, 15]
    out = torch.empty(30, 4)
    assert table.lookup(many, out=out) is out
    assert out[:, 3].tolist() == list(range(30))
    assert table.contains(torch.tensor([29, 500, 0])).tolist() == [True, False, True]
    assert held(table.near) == near


def test_device_tensors_are_answered_on_the_device(device: Device) -> None:
    table = spilling_table(CONFIG, device=device)
    many = torch.arange(40, device=device.torch_device)
    table.apply_gradients(many, torch.ones(40, 4, device=device.torch_device), event_time=many, dedup=True)
    seen = table.lookup(many)
    assert seen.device == many.device
    assert torch.equal(seen.cpu(), table.lookup(many.cpu()))
    found, rows = table.lookup_rows(many)
    assert found.all()
    assert torch.equal(rows.event_times, many)


@pytest.mark.parametrize("kind", device_names())
def test_no_call_waits_while_all_rows_are_on_the_device(kind: str) -> None:
    device = device_of(None) if kind == "gpu" else EmulatedDevice()
    table = SpillingTable.within(CONFIG, device_bytes=1 << 20, device=device)
    many = torch.arange(100, device=device.torch_device)
    gradients = torch.ones(100, 4, device=device.torch_device)
    with nothing_waits(device):
        for step in range(3):
            table.apply_gradients(many, gradients, step=step, event_time=many, dedup=True)
        table.lookup(many)
    assert len(table) == 100


# Three tiers


def in_files(table: SpillingTable) -> int:
    return table.stats().cold_rows


def test_rows_go_from_the_device_to_host_memory_and_on_to_files_and_come_back_from_either(
    device: Device,
) -> None:
    table, reference = three_tier_table(CONFIG, device=device, hot=6), NativeTable(CONFIG)
    for step in range(10):
        for one in (table, reference):
            train(one, torch.arange(6 * step, 6 * step + 6), step)
    assert (len(table), len(table.near)) == (60, NEAR)
    assert 60 - NEAR - 6 <= in_files(table) < 60 - NEAR
    assert_same_bits(reference, table)
    for step, ids in enumerate((torch.arange(6), torch.arange(42, 48), torch.arange(3, 9)), 10):
        for one in (table, reference):
            train(one, ids, step)
        assert set(ids.tolist()) <= set(held(table.near))
    assert_same_bits(reference, table)
    before = table.stats()
    assert (before.inserted, before.removed, before.evicted) == (60, 0, 0)
    assert table.remove(torch.arange(0, 60, 7)) == reference.remove(torch.arange(0, 60, 7)) == 9
    assert table.evict(86_400 + 4) == reference.evict(86_400 + 4)
    assert_same_bits(reference, table)
    for name in ("rows", "inserted", "removed", "evicted", "max_event_time"):
        assert getattr(table.stats(), name) == getattr(reference.stats(), name), name
    table.close()


def test_a_lookup_in_three_tiers_moves_nothing_and_counts_ids_once(device: Device) -> None:
    table = three_tier_table(CONFIG, device=device)
    many = torch.arange(40)
    for some in many.split(4):
        table.assign(some, some.float()[:, None].expand(4, 4).contiguous())
    near, before = held(table.near), table.stats()
    assert before.tiered_ids == 40
    assert table.lookup(torch.tensor([39, 500, 0, 39, 15]))[:, 0].tolist() == [39, 0, 0, 39, 15]
    assert (held(table.near), in_files(table)) == (near, before.cold_rows)
    assert table.stats().tiered_ids == 45
    table.close()


def test_host_memory_stays_within_its_budget_while_a_table_in_three_tiers_grows(
    device: Device, tmp_path: Path
) -> None:
    segment = Segment(dim=64, optimizer=Adagrad(), initializer=RandomUniform(), learning_rate=0.5)
    config = TableConfig(
        name="item", segments=(segment,), storage="tiered", memory_bytes=4 << 20, storage_dir=str(tmp_path)
    )
    budget = bytes_of(config, 1024)
    table = SpillingTable.within(config, device_bytes=budget, device=device)
    batch = 500
    for step in range(40):
        train(table, torch.arange(batch * step, batch * step + batch), step)
        stats = table.stats()
        assert stats.device_bytes <= budget
        assert stats.bytes_total - stats.device_bytes <= 4 << 20
    assert stats.rows == 40 * batch  # of 512 bytes: 10 MB
    assert stats.cold_rows > 10 * batch
    assert list(tmp_path.glob("*.cold"))
    snapshot = table.snapshot()
    table.close()
    assert list(tmp_path.glob("*.cold"))  # the snapshot may still be dumped
    snapshot.close(saved=False)
    assert not list(tmp_path.glob("*.cold"))


def test_new_ids_are_refused_once_the_index_has_room_for_the_rows_of_all_tiers_and_no_more(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(CONFIG, storage="tiered", memory_bytes=4 << 20)
    table, reference = three_tier_table(CONFIG, device=device, hot=4000, places=64), TieredTable(config)
    most = reference.core.most_rows
    for one in (table, reference):
        fill(one, most - 40)
    old, new = torch.arange(60), torch.arange(1 << 40, (1 << 40) + 100)
    for step in range(10):  # all of the device's rows go, and come back
        for one in (table, reference):
            train(one, torch.cat([old.roll(10 * step)[:10], new[10 * step : 10 * step + 10]]), step)
            train(one, old, step)
    assert_same_bits(reference, table, limit=1 << 16)
    assert held_of(table, new) == new[:40].tolist()
    assert table.stats().rows == most == len(table.near) + len(table.far)
    assert table.stats().refused == reference.stats().refused == 60
    assert f"table 'item' is full: it refused 10 new ids and holds {most:,} rows" in caplog.text
    assert "set memory_bytes to 8,388,608 for twice as many rows" in caplog.text
    with pytest.raises(RestoreError, match=r"Set memory_bytes to at least"):
        table.restore(rows_of(new[50:60], table))
    assert table.remove(old[:20]) == 20  # rows that go make room, and a call takes what there is
    train(table, new[50:90], 10)
    assert held_of(table, new) == new[:40].tolist() + new[50:70].tolist()
    assert table.stats().refused == 80
    for one in (table, reference):
        one.close()


def fill(table: Table, rows: int) -> None:
    for some in torch.arange(rows).split(1 << 14):
        table.restore(rows_of(some, table))


def rows_of(ids: Tensor, table: Table) -> Rows:
    n = len(ids)
    return Rows(ids, torch.zeros_like(ids), torch.zeros(n, table.dim), torch.ones(n, table.state_dim))


def held_of(table: Table, ids: Tensor) -> list[int]:
    found: list[int] = ids[table.contains(ids)].tolist()
    return found


def test_comings_and_goings_between_the_halves_are_not_counted(table: SpillingTable) -> None:
    for step in range(6):
        train(table, torch.arange(10 * step, 10 * step + 10) % 40, step)
    stats = table.stats()
    assert (stats.rows, stats.inserted, stats.removed, stats.evicted) == (40, 40, 0, 0)
    assert table.remove(torch.arange(5)) == 5
    assert table.evict(86400 + 3) == 20  # those of the steps 2 and 3
    stats = table.stats()
    assert (stats.rows, stats.inserted, stats.removed, stats.evicted) == (15, 40, 5, 20)
    assert stats.max_event_time == 5
    assert stats.bytes_total == table.near.stats().bytes_total + table.far.stats().bytes_total


def test_restored_rows_go_where_there_is_room_and_move_none(table: SpillingTable) -> None:
    source = NativeTable(CONFIG)
    train(source, torch.arange(30), 7)
    table.restore(source.scan().rows)
    assert (len(table.near), len(table.far)) == (NEAR, 30 - NEAR)
    near = held(table.near)
    train(source, torch.arange(30), 8)
    table.restore(source.scan().rows)
    assert held(table.near) == near
    assert_same_bits(source, table, limit=7)


def test_one_bit_is_as_steep_in_either_half(device: Device) -> None:
    config = TableConfig(name="item", segments=(Segment(dim=2, compressor=OneBit(step_size=2)),))
    table, reference = spilling_table(config, device=device), DictTable(config)
    for step in range(5):
        for one in (table, reference):
            train(one, torch.arange(8 * step, 8 * step + 8), step)
    assert table.scales == table.far.scales == pytest.approx(reference.scales)
    table.set_scales([3.0])
    assert table.near.scales == table.far.scales == [3.0]


def test_new_ids_are_counted_once_wherever_they_get_their_row(device: Device) -> None:
    def admission() -> SlidingFilter:
        return SlidingFilter(capacity=1000, split_num=7, thresholds=SlotThresholds(default=2))

    table = spilling_table(CONFIG, device=device, admission=admission())
    reference = NativeTable(CONFIG, admission=admission())
    for step in range(5):
        for one in (table, reference):
            train(one, torch.arange(30), step)
    assert table.stats().filtered == reference.stats().filtered > 50
    assert_same_bits(reference, table)


def test_evicted_ids_are_remembered_right_however_often_places_are_tidied(device: Device) -> None:
    near = CudaTable(
        replace(CONFIG, capacity_bytes=bytes_of(CONFIG, 256), initial_rows=256),
        device=device,
        remembers_use=True,
    )
    used: dict[int, int] = {}  # id to the last step
    random = torch.Generator().manual_seed(0)
    for step in range(25):
        batch = torch.randint(0, 100_000, (60,), generator=random).unique()
        if (count := len(near) + len(batch) - 220) > 0:  # fuller than a spilling table: places are short
            gone = near.idle(count, batch)
            # Of a batch that leaves in part any may.
            assert {used[key] for key in gone.tolist()} <= set(sorted(used.values())[:count])
            near.remove(gone)
            used = {key: last for key, last in used.items() if key not in gone.tolist()}
        train(near, batch, step)
        used |= dict.fromkeys(batch.tolist(), step)
    assert len(used) == len(near)


def test_moved_rows_are_not_reported(device: Device) -> None:
    touched = TouchedKeySet(1000)
    table = spilling_table(CONFIG, device=device, touched=touched)
    train(table, torch.arange(NEAR))
    assert sorted(touched.steal().tolist()) == list(range(NEAR))
    train(table, torch.arange(100, 100 + NEAR), 1)  # all others go far
    assert sorted(touched.steal().tolist()) == list(range(100, 100 + NEAR))
    train(table, torch.tensor([3, 50]), 2)
    assert sorted(touched.steal().tolist()) == [3, 50]
    table.remove(torch.tensor([4, 100]))  # far and near
    assert sorted(touched.steal().tolist()) == [4, 100]


def test_digests_are_those_of_all_rows(table: SpillingTable) -> None:
    reference = NativeTable(CONFIG)
    for one in (table, reference):
        train(one, torch.arange(50))
    buckets = torch.arange(BUCKETS)
    assert torch.equal(table.digests(buckets), reference.digests(buckets))
    assert torch.equal(table.digests(buckets, share=(1, 3)), reference.digests(buckets, share=(1, 3)))


def test_a_cut_is_of_its_moment_whatever_rows_change_places(table: SpillingTable) -> None:
    train(table, torch.arange(30), 1)
    before = content(table)
    cut = table.snapshot()
    for step in range(2, 8):
        train(table, torch.arange(5 * step, 5 * step + 10) % 45, step)
    table.remove(torch.arange(3))
    assert len(cut) == 30
    chunks, cursor = [], None
    while True:
        scan = cut.scan(cursor, limit=7)
        chunks.append(scan.rows)
        if (cursor := scan.cursor) is None:
            break
    found = Rows.concat(chunks)
    for name in ("ids", "event_times", "values", "state"):
        assert torch.equal(getattr(found, name), getattr(before, name)), name
    assert cut.max_event_time == 1
    cut.close(saved=True)


def test_changes_bring_a_copy_up_to_date_whatever_rows_change_places(
    table: SpillingTable, tmp_path: Path
) -> None:
    copy = NativeTable(CONFIG)
    table.track_changes()
    train(table, torch.arange(30), 1)
    with _cut(table) as cut:
        dump_snapshot(cut, str(tmp_path / "base"))
    load(copy, str(tmp_path / "base"))
    for step in range(2, 8):
        train(table, torch.arange(5 * step, 5 * step + 10) % 45, step)
        table.remove(torch.tensor([step, 40 + step]))
        with _cut(table) as cut:
            dump_changes(cut, str(tmp_path / str(step)))
        load_changes(copy, str(tmp_path / str(step)))
        assert_same_bits(table, copy)


@contextmanager
def _cut(table: SpillingTable) -> Iterator[TableSnapshot]:
    cut = table.snapshot()
    yield cut
    cut.close(saved=True)


@pytest.mark.parametrize("kind", [SpillingTable, NativeTable, CudaTable])
def test_files_of_any_table_are_loaded_by_any_other(kind: Any, device: Device, tmp_path: Path) -> None:
    def made() -> Any:
        if kind is SpillingTable:
            return spilling_table(CONFIG, device=device)
        return kind(CONFIG, **({"device": device} if kind is CudaTable else {}))

    source, spilled, again = made(), spilling_table(CONFIG, device=device), made()
    train(source, torch.arange(60), 3)
    dump(source, str(tmp_path / "one"))
    load(spilled, str(tmp_path / "one"))
    dump(spilled, str(tmp_path / "two"))
    load(again, str(tmp_path / "two"))
    assert_same_bits(source, spilled)
    assert_same_bits(source, again)


KEYS = 40


@st.composite
def batches(draw: st.DrawFn) -> tuple[str, list[int], int, bool]:
    kinds = ["train", "train", "train", "assign", "assign_add", "reinitialize", "remove", "restore", "evict"]
    keys = draw(st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=25))
    return draw(st.sampled_from(kinds)), keys, draw(st.integers(0, 86400 * 2)), draw(st.booleans())


@pytest.mark.parametrize("kind", device_names())
@settings(max_examples=tries(25), deadline=None)
@given(story=st.lists(batches(), min_size=5, max_size=25), limit=st.sampled_from([1, 7, 1000]))
def test_whatever_comes_and_goes_it_is_the_table_that_never_spilled(
    kind: str, story: list[tuple[str, list[int], int, bool]], limit: int
) -> None:
    device = device_of(None) if kind == "gpu" else EmulatedDevice()
    table, reference = spilling_table(CONFIG, device=device), NativeTable(CONFIG)
    for step, (call, keys, time, flag) in enumerate(story):
        ids = torch.tensor(keys)
        values = torch.randn(len(ids), 4, generator=torch.Generator().manual_seed(step))
        whole = reference.lookup_rows(ids)[1]
        moved = replace(whole, ids=KEYS - 1 - whole.ids)  # rows are born as well as overwritten
        said = []
        for one in (table, reference):
            if call == "train":
                one.apply_gradients(ids, values, step=step, event_time=torch.full_like(ids, time), dedup=flag)
            elif call == "assign":
                one.assign(ids, values, event_time=time)
            elif call == "assign_add":
                one.assign_add(ids, values, event_time=time)
            elif call == "reinitialize":
                said.append(one.reinitialize(ids, now=time).tolist())
            elif call == "remove":
                said.append(one.remove(ids))
            elif call == "restore":
                one.restore(moved)
            else:
                said.append(one.evict(time if flag else None))
        assert not said or said[0] == said[1]
        both = torch.arange(KEYS)
        assert not (table.near.contains(both) & table.far.contains(both)).any()
        assert torch.equal(table.lookup(both), reference.lookup(both))
    assert len(table.near) <= NEAR
    assert_same_bits(reference, table, limit)
    for name in ("rows", "inserted", "filtered", "refused", "evicted", "removed", "max_event_time"):
        assert getattr(table.stats(), name) == getattr(reference.stats(), name), name
    table.close()


def test_wrong_arguments_touch_nothing(table: SpillingTable) -> None:
    train(table, torch.arange(30))
    before = content(table)
    many, right = torch.arange(30), torch.ones(30, 4)
    for call in (
        lambda: table.apply_gradients(many, right, event_time=torch.full((30,), -1)),
        lambda: table.apply_gradients(many, right, counts=torch.zeros(30, dtype=torch.int64)),
        lambda: table.apply_gradients(many, torch.ones(30, 3)),
        lambda: table.assign(many, right, event_time=torch.arange(29)),
    ):
        with pytest.raises(TableArgumentError):
            call()
    assert torch.equal(content(table).values, before.values)


def test_a_ceiling_counts_both_halves_and_a_full_table_keeps_moving_rows(device: Device) -> None:
    config = replace(CONFIG, capacity_bytes=1 << 17)
    table = SpillingTable.within(config, device_bytes=1 << 15, device=device)
    many = torch.arange(20_000)
    for some in many.split(500):
        train(table, some)
    stats = table.stats()
    assert stats.rows + stats.refused == 20_000
    assert stats.refused > 0
    assert stats.bytes_total <= 1 << 17
    far = torch.tensor(held(table.far))
    for some in far[:200].split(20):
        train(table, some, 1)
        assert table.near.contains(some).all()
    assert len(table) == stats.rows
    assert table.stats().refused == stats.refused


def test_what_cannot_spill_is_refused(device: Device) -> None:
    with pytest.raises(ConfigError, match="Use a CudaTable"):
        SpillingTable.within(replace(CONFIG, capacity_bytes=1000), device_bytes=1000, device=device)
    with pytest.raises(ConfigError, match="device has a budget"):
        SpillingTable(CONFIG, CudaTable(CONFIG, device=device), NativeTable(CONFIG))
