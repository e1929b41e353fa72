"""What every device does that code for GPUs is written against: NVIDIA's, and the emulated one of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from services.emulated_cuda import device_named, device_names

from monolith.cuda import CudaDevice, Device, blocks_for, device_of
from monolith.cuda.device import is_full, room_for_rows
from monolith.errors import AcceleratorError, DeviceFullError

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_it_says_what_is_needed() -> None:
    with pytest.raises(AcceleratorError, match="NVIDIA GPU"):
        device_of(torch.device("cuda", 0))


def test_another_device_than_a_gpu_is_refused() -> None:
    with pytest.raises(AcceleratorError, match="cpu is no CUDA device"):
        device_of(torch.device("cpu"))


@needs_gpu
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(AcceleratorError, match="no cuda:99"):
        device_of(torch.device("cuda", 99))


@needs_gpu
def test_a_device_without_a_number_is_the_current_one() -> None:
    assert device_of(None) == device_of(torch.device("cuda")) == CudaDevice.of(torch.device("cuda", 0))


@pytest.fixture(params=device_names())
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = device_named(request.param)
    with device.active():
        yield device


def test_streams_wait_for_each_other_and_events_tell_when_and_how_long(device: Device) -> None:
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
    assert device.current_stream() not in (first, second)
    assert ended.milliseconds_since(began) > 0
    assert ended.query()
    device.current_stream().wait_for(second)
    assert doubled.unique().tolist() == [20]


def test_its_tensors_are_on_the_device_of_torch(device: Device) -> None:
    here = torch.zeros(3, dtype=torch.int64, device=device.torch_device)
    assert device.holds(here)
    assert not device.holds(torch.zeros(3, device="meta"))
    kept = device.pinned((3,), torch.int64)
    assert kept.device.type == "cpu"
    assert here.copy_(kept.fill_(7), non_blocking=True).tolist() == [7, 7, 7]


def test_kernels_run_on_the_stream_they_are_launched_on(device: Device) -> None:
    source = """
extern "C" __global__ void add(int* numbers, int more, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) numbers[i] += more;
}
"""
    numbers = torch.arange(1000, dtype=torch.int32, device=device.torch_device)
    arguments = numbers, 5, 999
    device.compile_ahead(source, "add")
    kernels, stream = device.kernels(source, "add"), device.new_stream()
    stream.wait_for(device.current_stream())
    kernels.launch("add", blocks_for(999), *arguments, stream=stream.handle)
    kernels.launch("add", 0, *arguments, stream=stream.handle)
    stream.synchronize()
    assert numbers.tolist() == [*range(5, 1004), 999]


def test_it_tells_what_it_is(device: Device) -> None:
    assert device.name
    assert device.processors > 0
    free = device.free_bytes
    device.give_back()
    assert device.free_bytes >= free > 0
    assert 0 < room_for_rows(device) < device.free_bytes


def test_an_error_says_whether_the_device_is_full() -> None:
    def caused(cause: BaseException) -> BaseException:
        error = AcceleratorError("cannot be captured")
        error.__cause__ = cause
        return error

    full = [
        DeviceFullError("no room"),
        torch.OutOfMemoryError("no room"),
        RuntimeError("CUDA error: out of memory"),
    ]
    assert all(is_full(error) and is_full(caused(error)) for error in full)
    others = [AcceleratorError("no compiler"), RuntimeError("no room"), MemoryError()]
    assert not any(is_full(error) or is_full(caused(error)) for error in others)
