"""Devices that code for GPUs is written against."""

from __future__ import annotations

import pytest
import torch

from monolith.cuda import CudaDevice, device_of
from monolith.errors import AcceleratorError

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_it_says_what_is_needed() -> None:
    with pytest.raises(AcceleratorError, match="NVIDIA GPU"):
        device_of(torch.device("cuda", 0))


@needs_gpu
def test_a_device_without_a_number_is_the_current_one() -> None:
    assert device_of(None) == device_of(torch.device("cuda")) == CudaDevice.of(torch.device("cuda", 0))


@needs_gpu
def test_streams_wait_for_each_other_and_events_tell_when_and_how_long() -> None:
    device = CudaDevice.of()
    with device.active():
        first, second = device.new_stream(), device.new_stream()
        assert first != second
        ones = torch.zeros(1 << 20, device=device.torch_device)
        first.wait_for(device.current_stream())
        with device.on(first):
            assert device.current_stream() == first
            began = first.record(timed=True)
            for _ in range(10):
                ones += 1
        second.wait_for_event(first.record())
        with device.on(second):
            doubled = 2 * ones
            ended = second.record(timed=True)
        second.keep(ones)
        assert ended.milliseconds_since(began) > 0
        assert ended.query()
        device.current_stream().wait_for(second)
        assert doubled.unique().tolist() == [20]
        assert device.holds(ones)
        assert not device.holds(ones.cpu())
        assert device.pinned((3,), torch.int64).is_pinned()
        assert device.processors > 0
        assert device.name
        free = device.free_bytes
        del ones, doubled
        device.give_back()
        assert device.free_bytes >= free > 0
