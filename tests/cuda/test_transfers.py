"""Copies between host and device: pinned memory is kept, and touched by one at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from services.slow_device import SlowDevice

from monolith.cuda import CudaDevice
from monolith.cuda.device import Device
from monolith.cuda.transfers import Carrier, Carriers, PinnedPool, Transfers

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def device() -> SlowDevice:
    return SlowDevice()


def event(device: SlowDevice):  # type: ignore[no-untyped-def]
    return device.first.record()


def test_memory_is_used_again_only_when_its_copy_is_over(device: SlowDevice) -> None:
    pool = PinnedPool(device)
    memory, copy = pool.lend(1000), event(device)
    pool.give_back(memory, copy)
    assert pool.lend(1000).data_ptr() != memory.data_ptr()
    copy.has_come = True
    assert pool.lend(1000).data_ptr() == memory.data_ptr()
    assert copy.waits == 0


def test_memory_that_nothing_copies_is_used_again_at_once(device: SlowDevice) -> None:
    pool = PinnedPool(device)
    memory = pool.lend(1000)
    pool.give_back(memory)
    assert pool.lend(900).data_ptr() == memory.data_ptr()


def test_the_smallest_that_suffices_is_lent(device: SlowDevice) -> None:
    pool = PinnedPool(device)
    small, large = pool.lend(1000), pool.lend(100_000)
    pool.give_back(large)
    pool.give_back(small)
    assert pool.lend(1000).data_ptr() == small.data_ptr()
    assert pool.lend(50_000).data_ptr() == large.data_ptr()


def test_batches_that_grow_leave_no_small_memory_behind(device: SlowDevice) -> None:
    pool = PinnedPool(device)
    small = pool.lend(1000)
    pool.give_back(small)
    large = pool.lend(100_000)
    pool.give_back(large)
    assert pool.lend(1000).data_ptr() == large.data_ptr()


def test_the_host_waits_for_the_oldest_copy_when_too_many_are_under_way(device: SlowDevice) -> None:
    pool = PinnedPool(device, under_way=2)
    copies = [event(device) for _ in range(2)]
    lent = [pool.lend(1000) for _ in copies]
    for memory, copy in zip(lent, copies, strict=True):
        pool.give_back(memory, copy)
    assert pool.lend(1000).data_ptr() == lent[0].data_ptr()
    assert [copy.waits for copy in copies] == [1, 0]


def test_what_is_staged_arrives_as_one_copy_that_the_stream_waits_for_and_the_host_does_not(
    device: SlowDevice,
) -> None:
    transfers = Transfers(device)
    staged = transfers.stage((3, torch.float32), (0, torch.int32), (2, torch.int64))
    staged.parts[0].copy_(torch.tensor([1.0, 2.0, 3.0]))
    staged.parts[2].copy_(torch.tensor([7, 8]))
    sent = staged.send()
    (copy,) = transfers.up.events  # type: ignore[attr-defined]
    rows, nothing, ids = sent.take()
    assert (rows.tolist(), nothing.tolist(), ids.tolist()) == ([1.0, 2.0, 3.0], [], [7, 8])
    assert (nothing.dtype, ids.dtype) == (torch.int32, torch.int64)
    assert device.first.waited_for == [copy]
    assert device.first.kept[0].data_ptr() == rows.data_ptr()
    assert copy.waits == 0


def test_what_was_sent_is_not_overwritten_by_the_next(device: SlowDevice) -> None:
    transfers = Transfers(device)
    places = []
    for _ in range(2):
        staged = transfers.stage((3, torch.float32))
        places.append(staged.parts[0].data_ptr())
        staged.send()
    assert places[0] != places[1]
    transfers.up.events[0].has_come = True  # type: ignore[attr-defined]
    assert transfers.stage((3, torch.float32)).parts[0].data_ptr() == places[0]
    assert len(device.pinned_sizes) == 2


def test_a_tensor_lands_after_what_computes_it_and_is_waited_for_where_it_is_read(device: SlowDevice) -> None:
    transfers = Transfers(device)
    gradient = torch.tensor([1.0, 2.0])
    landing = transfers.land(gradient)
    (copy,) = transfers.down.events  # type: ignore[attr-defined]
    assert transfers.down.waited_for == [device.first]  # type: ignore[attr-defined]
    assert transfers.down.kept[0] is gradient  # type: ignore[attr-defined]
    assert copy.waits == 0
    found = landing.wait()
    assert found.tolist() == [1.0, 2.0]
    assert copy.waits == 1
    place = found.data_ptr()
    assert transfers.land(gradient).wait().data_ptr() != place
    landing.release()
    assert transfers.land(gradient).wait().data_ptr() == place


# Carriers


def sent(carriers: Carriers, value: int, size: int = 1000) -> Carrier:
    carrier = carriers.lend(size)
    carrier.bytes[:size] = value
    carriers.send(carrier, size)
    return carrier


def used(device: SlowDevice, carriers: Carriers, carrier: Carrier) -> None:
    carrier.used = device.first.record()
    carriers.give_back(carrier)


def test_a_carrier_is_lent_again_once_it_is_given_back(device: SlowDevice) -> None:
    carriers = Carriers(device)
    one, two = sent(carriers, 1), sent(carriers, 2)
    assert (one.there[:1000] == 1).all()
    assert (two.there[:1000] == 2).all()
    used(device, carriers, one)
    assert carriers.lend(900) is one
    assert carriers.lend(900) not in (one, two)


def test_a_carrier_is_written_to_only_when_its_copy_is_done(device: SlowDevice) -> None:
    carriers = Carriers(device)
    one = sent(carriers, 1)
    used(device, carriers, one)
    copy: Any = one.sent
    assert carriers.lend(1000) is one
    assert (copy.has_come, copy.waits) == (True, 1)


def test_a_copy_to_the_device_waits_until_the_one_before_was_read(device: SlowDevice) -> None:
    carriers = Carriers(device)
    one = sent(carriers, 1)
    used(device, carriers, one)
    read: Any = one.used
    assert sent(carriers, 2) is one
    up: Any = carriers._up
    assert up.waited_for == [read]
    assert read.waits == 0  # only the device waits


def test_a_batch_that_is_larger_gets_a_larger_carrier_in_place_of_one(device: SlowDevice) -> None:
    carriers = Carriers(device)
    small = sent(carriers, 1)
    used(device, carriers, small)
    read: Any = small.used
    large = sent(carriers, 2, size=100_000)
    assert large is not small
    assert read.waits == 1  # its memory is freed, which a step may still have read
    used(device, carriers, large)
    assert carriers.lend(1000) is large


@needs_gpu
def test_many_batches_go_through_few_carriers_whole() -> None:
    device: Device = CudaDevice.of()
    carriers = Carriers(device)
    found, seen = torch.zeros(50, dtype=torch.int64, device=device.torch_device), set()
    for number in range(50):
        carrier = carriers.lend(1 << 20)
        seen.add(carrier.there.data_ptr())
        carrier.bytes[: 1 << 20] = number
        carriers.send(carrier, 1 << 20)
        assert carrier.sent is not None
        current = device.current_stream()
        current.wait_for_event(carrier.sent)
        found[number] = carrier.there[: 1 << 20].to(torch.int64).sum()
        carrier.used = current.record()
        carriers.give_back(carrier)
    assert found.tolist() == [number << 20 for number in range(50)]
    assert len(seen) == 1


@needs_gpu
def test_many_batches_go_up_and_come_back_whole() -> None:
    device: Device = CudaDevice.of()
    transfers = Transfers(device)
    for number in range(50):
        staged = transfers.stage((1 << 20, torch.float32), (1000, torch.int32))
        staged.parts[0].fill_(number)
        staged.parts[1].fill_(-number)
        rows, index = staged.send().take()
        landing = transfers.land(rows + index[0])
        assert landing.wait().eq(0).all()
        landing.release()
