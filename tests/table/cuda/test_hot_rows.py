"""Rows that come to a device ahead of steps: trained as if all had been in one memory, to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from services.emulated_cuda import EmulatedDevice, device_names, nothing_waits
from services.properties import tries
from services.spilling_tables import spilling_table, three_tier_table
from table.cuda.test_spilling_table import assert_same_bits, fill, held
from torch import Tensor

from monolith import native
from monolith.cuda import Device, device_of
from monolith.errors import CorruptFileError
from monolith.table import (
    Adagrad,
    Expiry,
    NativeTable,
    RandomUniform,
    Segment,
    SpillingTable,
    TableConfig,
    TouchedKeySet,
)
from monolith.table.cuda.fused import CapturedStep, FusedTables
from monolith.table.cuda.hot_rows import HotRows, StagedBatch, can_stage

DIMS = (4, 5, 3)


def config(number: int, **more: Any) -> TableConfig:
    segment = Segment(dim=DIMS[number], optimizer=Adagrad(), initializer=RandomUniform(), learning_rate=0.5)
    return TableConfig(name=f"t{number}", segments=(segment,), expiry=Expiry.days(1), **more)


class Pair:
    """Tables with few rows on a device, and the same tables in host memory alone."""

    def __init__(
        self, device: Device, *, places: int = 64, each: int = 8, files: bool = False, **how: Any
    ) -> None:
        self.device = device
        self.here = [NativeTable(config(number)) for number in range(len(DIMS))]
        make = three_tier_table if files else spilling_table
        self.there = [
            make(config(number), device=device, places=places, **how) for number in range(len(DIMS))
        ]
        self.hot = HotRows(self.there, native.Workers(2))
        self.sizes = np.full(len(DIMS), each, np.int64)
        where = device.torch_device
        self._number = torch.zeros(1, dtype=torch.int64, device=where)
        refused = torch.zeros(5, dtype=torch.int64, device=where)
        occurring = torch.from_numpy(self.sizes).to(where)
        self._captured = CapturedStep(self.hot.near, self.sizes, self._number, refused, occurring)
        self._sent: list[Tensor] = []
        self.step = 0

    def sent(self, tensor: Tensor) -> Tensor:
        """Send a tensor to the device, as a run does: from memory that the device reads by itself."""
        pinned = self.device.pinned(tuple(tensor.shape), tensor.dtype).copy_(tensor)
        self._sent.append(pinned)  # until the device is done with it
        return pinned.to(self.device.torch_device, non_blocking=True)

    def stage(self, ids: Tensor) -> StagedBatch:
        """Stage a batch with these ids for each table."""
        flat = torch.cat([ids] * len(DIMS))
        return self.hot.stage(flat, self.sent(flat), self.sizes)

    def train(self, staged: StagedBatch) -> bool:
        """Train on a batch in both; return whether that was a step over near rows alone."""
        each, now = int(self.sizes[0]), self.step
        ids = staged.ids[:each]
        random = torch.Generator().manual_seed(self.step)
        gradients = [torch.randn(each, dim, generator=random) for dim in DIMS]
        for table, by in zip(self.here, gradients, strict=True):
            table.apply_gradients(ids, by, step=self.step, event_time=now, dedup=True)
        if ready := self.hot.ready(staged):
            where = self.device.torch_device
            self._number.fill_(self.step)
            self._captured.coming = staged.coming
            self._captured.ready(np.full(len(DIMS), 0.5, np.float32))
            second = torch.full((1,), now, dtype=torch.int64, device=where)
            flat = self.sent(torch.cat([by.flatten() for by in gradients]))
            self._captured.train(staged.there, second, flat)
            self.hot.trained(staged)
        else:
            for spilling, by in zip(self.there, gradients, strict=True):
                spilling.apply_gradients(ids, by, step=self.step, event_time=now, dedup=True)
        self.step += 1
        return ready

    def check(self) -> None:
        for here, there in zip(self.here, self.there, strict=True):
            assert not set(held(there.near)) & set(held(there.far))
            assert_same_bits(here, there)

    def close(self) -> None:
        for table in self.there:
            table.close()


@pytest.fixture(params=device_names())
def device(request: pytest.FixtureRequest) -> Device:
    return device_of(None) if request.param == "gpu" else EmulatedDevice()


@pytest.fixture(params=[False, True], ids=["memory", "files"])
def pair(device: Device, request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(device, files=request.param)
    yield made
    made.close()


def zipf(random: np.random.Generator, size: int) -> Tensor:
    return torch.from_numpy(np.minimum(random.zipf(1.2, size), 1 << 40).astype(np.int64))


def test_a_skewed_stream_is_trained_as_in_host_memory_and_fetches_cold_rows_only(pair: Pair) -> None:
    random = np.random.default_rng(0)
    ahead = pair.stage(zipf(random, 8))
    for _ in range(60):
        staged, ahead = ahead, pair.stage(zipf(random, 8))
        assert pair.train(staged)
    pair.check()
    assert sum(len(table.far) for table in pair.there) > 50
    assert 0.7 < pair.hot.counts.share < 1


def test_the_room_on_the_device_is_used_for_rows_however_many_have_come_and_gone(device: Device) -> None:
    pair = Pair(device, places=256)
    random = np.random.default_rng(2)
    rows = []
    for number in range(200):
        pair.train(pair.stage(torch.from_numpy(random.integers(0, 2000, 8))))
        if number >= 150:
            rows.append(len(pair.there[0].near))
    assert min(rows) > 0.7 * (pair.there[0].near.most_rows or 0)
    pair.check()
    pair.close()


def test_cold_rows_of_a_batch_are_read_once_and_counted(device: Device) -> None:
    pair = Pair(device, places=64, files=True)
    for first in range(0, 400, 8):
        pair.train(pair.stage(torch.arange(first, first + 8)))
    table = pair.there[0]
    with SpillingTable.moving([table]):
        pass  # rows on their way are far now
    table.far.flush()  # type: ignore[attr-defined]
    before = table.stats()
    assert before.device_rows == len(table.near)
    assert 0 < before.rows - before.device_rows - before.cold_rows <= 6  # in host memory
    assert before.tiered_ids == 400
    cold = torch.arange(8)
    staged = pair.stage(cold)
    assert table.near.contains(cold).all()
    assert not table.far.contains(cold).any()
    after = table.stats()
    assert after.tiered_ids == 408
    assert after.cold_ids_read - before.cold_ids_read == 8
    pair.train(staged)
    pair.check()
    pair.close()


def test_staged_batches_train_on_while_the_index_of_the_files_refuses_new_ids(device: Device) -> None:
    pair = Pair(device, places=64, files=True, hot=4000)
    most = [table.far.core.most_rows for table in pair.there]  # type: ignore[attr-defined]
    for one, rows in zip(pair.there, most, strict=True):
        fill(one, rows - 60)
    for one in pair.here:
        fill(one, min(most) - 60)
    random, ahead = np.random.default_rng(4), list[StagedBatch]()
    steps = []
    for _ in range(60):
        some = random.integers(0, 200, 6), random.integers(1 << 40, (1 << 40) + 400, 2)
        ahead.append(pair.stage(torch.from_numpy(np.concatenate(some))))
        if len(ahead) == 3:
            steps.append(pair.train(ahead.pop(0)))
    assert all(steps[:15])  # by steps over near rows
    assert not all(steps)
    old, new = torch.arange(200), torch.arange(1 << 40, (1 << 40) + 400)
    for here, there, rows in zip(pair.here, pair.there, most, strict=True):
        has = there.contains(new)
        assert int(has.sum()) == 60
        for ids in (old, new[has]):
            assert torch.equal(there.lookup(ids), here.lookup(ids))
        assert not there.lookup(new[~has]).any()
        assert there.stats().rows == rows == len(there.near) + len(there.far)
        assert there.stats().refused > 20
    for there in pair.there:
        there.remove(torch.arange(1000, 1100))  # rows that go make room
    assert pair.train(pair.stage(new[-8:]))
    assert all(bool(there.contains(new[-8:]).all()) for there in pair.there)
    pair.close()


def test_a_damaged_file_is_refused_when_a_batch_needs_its_rows(device: Device) -> None:
    pair = Pair(device, places=64, files=True)
    for first in range(0, 400, 8):
        pair.train(pair.stage(torch.arange(first, first + 8)))
    far = [table.far for table in pair.there]
    assert len(pair.there[0]) == 400  # rows on their way are far now
    far[0].flush()  # type: ignore[attr-defined]
    for path in far[0].folder.glob("*.cold"):  # type: ignore[attr-defined]
        content = bytearray(path.read_bytes())
        content[5000] ^= 1
        path.write_bytes(content)
    with pytest.raises(CorruptFileError):
        pair.stage(torch.arange(8))
    assert [len(one) for one in pair.there] == [400] * len(DIMS)  # no row left its place
    pair.close()


def test_staging_waits_for_nothing_while_there_is_room(pair: Pair) -> None:
    for first in range(0, 24, 8):
        pair.train(pair.stage(torch.arange(first, first + 8)))
    with nothing_waits(pair.device):
        pair.train(pair.stage(torch.arange(4, 12)))
    pair.check()


def test_rows_of_staged_batches_stay_whatever_else_is_staged(device: Device) -> None:
    pair = Pair(device, places=96)
    random = np.random.default_rng(1)
    waiting: list[StagedBatch] = []
    for _ in range(40):
        waiting.append(pair.stage(torch.from_numpy(random.integers(0, 200, 8))))
        if len(waiting) == 3:
            staged = waiting.pop(0)
            assert staged.fits
            pair.train(staged)
    pair.check()
    pair.close()


def test_a_batch_with_more_ids_than_the_device_has_room_for_is_trained_where_its_rows_are(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(device, places=16, each=20)
    for first in (0, 10, 5, 0):
        assert not pair.train(pair.stage(torch.arange(first, first + 20)))
    assert caplog.text.count("a batch has 20 distinct ids, and the device has room for 12 rows") == 1
    pair.train(pair.stage(torch.arange(20) % 3))
    pair.check()
    pair.close()


def test_rows_on_their_way_are_seen_by_whatever_reads_the_table(pair: Pair) -> None:
    for first in range(0, 80, 8):
        pair.train(pair.stage(torch.arange(first, first + 8)))
    table, here = pair.there[0], pair.here[0]
    with SpillingTable.moving([table]):
        SpillingTable.start_spills([(table, 10)], pair.hot._transfers)
    everything = torch.arange(100)
    assert torch.equal(table.lookup(everything), here.lookup(everything))
    with SpillingTable.moving([table]):
        SpillingTable.start_spills([(table, 10)], pair.hot._transfers)
    assert len(table) == len(here)
    pair.check()


def test_touched_sets_hear_of_trained_rows_and_not_of_moved_ones(pair: Pair) -> None:
    for first in range(0, 80, 8):
        pair.train(pair.stage(torch.arange(first, first + 8)))
    touched = TouchedKeySet(1000)
    for table in pair.there:
        table.touch(touched)
    pair.train(pair.stage(torch.arange(8)))
    assert sorted(touched.steal().tolist()) == list(range(8))


def test_statistics_do_not_count_moves(pair: Pair) -> None:
    random = np.random.default_rng(3)
    for _ in range(30):
        pair.train(pair.stage(torch.from_numpy(random.integers(0, 100, 8))))
    for here, there in zip(pair.here, pair.there, strict=True):
        expected, found = here.stats(), there.stats()
        for name in ("rows", "inserted", "removed", "refused", "evicted", "max_event_time"):
            assert getattr(found, name) == getattr(expected, name), name


READS = ["lookup", "evict", "snapshot", "freeze"]
WRITES = ["assign", "remove", "track", "restore", "clear", "drop"]


@settings(max_examples=tries(15), deadline=None)
@given(
    story=st.lists(
        st.tuples(st.sampled_from((*READS, *WRITES, *["train"] * 20)), st.integers(0, 120)),
        min_size=12,
        max_size=60,
    ),
    ahead=st.integers(1, 3),
    files=st.booleans(),
)
@pytest.mark.parametrize("kind", device_names())
def test_whatever_else_is_done_it_is_the_table_in_host_memory(
    kind: str, story: Sequence[tuple[str, int]], ahead: int, files: bool
) -> None:
    pair = Pair(device_of(None) if kind == "gpu" else EmulatedDevice(), places=64, files=files)
    waiting: list[StagedBatch] = []
    for what, at in story:
        ids = torch.arange(at, at + 8)
        if what == "train":
            waiting.append(pair.stage(ids))
            while len(waiting) >= ahead:
                pair.train(waiting.pop(0))
        elif what == "drop":
            waiting.clear()
        else:
            for here, there in zip(pair.here, pair.there, strict=True):
                answers = [do(table, what, ids, pair.step) for table in (here, there)]
                if isinstance(answers[0], Tensor):
                    assert torch.equal(answers[0], answers[1])
    for staged in waiting:
        pair.train(staged)
    pair.check()
    pair.close()


def do(table: Any, what: str, ids: Tensor, step: int) -> Tensor | None:
    if what == "lookup":
        return torch.as_tensor(table.lookup(ids))
    if what == "assign":
        table.assign(ids, torch.ones(len(ids), table.dim), event_time=step)
    elif what == "remove":
        table.remove(ids[:3])
    elif what == "evict":
        return torch.tensor(table.evict(86_400 + int(ids[0])))
    elif what == "snapshot":
        snapshot = table.snapshot()
        count = len(snapshot)
        snapshot.close(saved=True)
        return torch.tensor(count)
    elif what == "track":
        table.track_changes(True)
    elif what == "restore":
        table.restore(table.lookup_rows(ids)[1])
    elif what == "clear":
        if int(ids[0]) % 8 == 0:
            table.clear()
    elif what == "freeze":
        with table.frozen():
            return torch.tensor(len(table))
    return None


def test_only_tables_that_spill_without_a_limit_are_staged(device: Device) -> None:
    free, bounded = config(0), config(1, capacity_bytes=1 << 20)
    one, other = spilling_table(free, device=device), spilling_table(bounded, device=device)
    assert can_stage([one])
    assert not can_stage([one, other])
    assert not can_stage([one, NativeTable(replace(free))])
    halved = spilling_table(replace(config(2), embedding_dtype="bfloat16"), device=device)
    assert not can_stage([one, halved])
    for tables, why in (([other], "it has a capacity_bytes"), ([halved], "not stored as float32")):
        said = FusedTables(tables, device).why_not_captured() or ""
        assert f"table {tables[0].config.name!r} keeps some of its rows in host memory, and " in said
        assert why in said
    for table in (one, other, halved):
        table.close()
