"""The memory of a device table: an index whose marks are cleared away where rows lie."""

from __future__ import annotations

import pytest
import torch
from services.emulated_cuda import device_named, device_names

from monolith.cuda import Device
from monolith.table import Adagrad, Segment, TableConfig
from monolith.table.cuda.layout import StepScalars, row_layout
from monolith.table.cuda.memory import EXTRA_PLACES, MARKS, NONE, USED, DeviceMemory, Recency, Times

CONFIG = TableConfig(name="item", segments=(Segment(dim=5, optimizer=Adagrad()),))


@pytest.fixture(params=[*device_names(), "shuffled"])
def device(request: pytest.FixtureRequest) -> Device:
    return device_named(request.param)


def filled(device: Device, places: int, ids: torch.Tensor) -> DeviceMemory:
    counters = torch.zeros(8, dtype=torch.int64, device=device.torch_device)
    stream = device.current_stream().handle
    memory = DeviceMemory(row_layout(CONFIG), counters, places, device=device, stream=stream)
    claimed = memory.claim(ids, Times(None, 1), None)
    values = ids.float()[:, None].expand(len(ids), 5).contiguous()
    memory.put(claimed, values, None, whole=False, scalars=StepScalars(CONFIG, lazy=False).scalars())
    return memory


def values_of(memory: DeviceMemory, ids: torch.Tensor) -> torch.Tensor:
    places = memory.find(ids)
    assert bool((places != NONE).all())
    return memory.read(places)[1]


@pytest.mark.parametrize("load", [0.75, 0.9, 0.98])
def test_tidying_frees_marked_places_and_every_row_is_found_as_it_was(device: Device, load: float) -> None:
    places = 4096
    ids = torch.arange(int(load * places), device=device.torch_device)
    memory = filled(device, places, ids)
    gone, kept = ids[ids % 3 == 0], ids[ids % 3 != 0]
    memory.drop(memory.find(gone).to(torch.int64))
    before = memory.counters.tolist()
    assert before[MARKS] > 0
    memory.tidy()
    after = memory.counters.tolist()
    assert after[MARKS] < before[MARKS] / 4
    assert after[USED] - after[MARKS] == before[USED] - before[MARKS] == len(kept)
    assert torch.equal(values_of(memory, kept)[:, 0], kept.float())
    assert bool((memory.find(gone) == NONE).all())
    assert memory.listed(places)[2] == len(kept)


def test_flags_go_where_their_rows_go(device: Device) -> None:
    ids = torch.arange(300, device=device.torch_device)
    memory = filled(device, 320, ids)
    memory.watch(on=True)
    assert memory.flags is not None
    memory.flags[memory.find(ids[:100]).to(torch.int64)] = 4
    memory.drop(memory.find(ids[ids % 3 == 0]).to(torch.int64))
    memory.tidy()
    kept = ids[ids % 3 != 0]
    for there in (memory, memory.moved(memory.empty(1024))):
        assert there.flags is not None
        assert torch.equal(there.flags[there.find(kept).to(torch.int64)] == 4, kept < 100)


def test_rows_that_are_tidied_keep_when_they_were_used_and_leave_no_stamp(device: Device) -> None:
    ids = torch.arange(300, device=device.torch_device)
    memory = filled(device, 320, ids)
    memory.recency = Recency(320 + EXTRA_PLACES, device.torch_device)
    stamps = memory.recency.stamps
    stamps[memory.find(ids).to(torch.int64)] = (ids + 1).to(torch.int32)
    memory.drop(memory.find(ids[ids % 3 == 0]).to(torch.int64))
    before, kept = memory.find(ids).clone(), ids[ids % 3 != 0]
    memory.tidy()
    places = memory.find(kept).to(torch.int64)
    assert not torch.equal(before[ids % 3 != 0].to(torch.int64), places)  # some have moved
    assert torch.equal(stamps[places].to(torch.int64), kept + 1)
    assert int((stamps != 0).sum()) == len(kept)
