"""A launch hands a kernel its arguments as the kernel declares them, and says what went wrong by name."""

from __future__ import annotations

import ctypes
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from services.emulated_cuda import EmulatedDevice, EmulationError

from monolith import native
from monolith.cuda.kernels import (
    KernelCache,
    KernelCounts,
    Kernels,
    compiled_kernels,
    kernel_counts,
    kernel_signatures,
)
from monolith.errors import AcceleratorError

SOURCE = r"""
using i64 = long long;
using u64 = unsigned long long;
using u32 = unsigned;
struct Pair { int first; float second; };

// Copies the bytes of its arguments one after another.
extern "C" __global__ void __launch_bounds__(32, 1)
    record(unsigned char* out, const float* __restrict__ pointer, int small, u32 unsigned_small, i64 large,
           u64 unsigned_large, float number, const __grid_constant__ Pair pair) {
  unsigned char* to = out;
  const auto put = [&](auto value) {
    for (int i = 0; i < (int)sizeof(value); ++i) *to++ = ((const unsigned char*)&value)[i];
  };
  if (threadIdx.x != 0) return;
  put(pointer), put(small), put(unsigned_small), put(large), put(unsigned_large), put(number), put(pair);
}

extern "C" __global__ void nothing() {}
extern "C" __global__ void trap(int* out) { if (threadIdx.x < 16) __syncwarp(); else __syncthreads(); }
"""
RECORD = struct.Struct("=QiIqQfif")


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return EmulatedDevice().kernels(SOURCE, "recording")


def record(kernels: Kernels, *arguments: Any) -> tuple[Any, ...]:
    out = torch.zeros(RECORD.size, dtype=torch.uint8, device=EmulatedDevice().torch_device)
    kernels.launch("record", 1, out, *arguments, stream=0, threads=32)
    return RECORD.unpack(out.cpu().numpy().tobytes())


class Pair(ctypes.Structure):
    _fields_ = [("first", ctypes.c_int), ("second", ctypes.c_float)]


def test_types_are_read_from_the_source() -> None:
    assert kernel_signatures(SOURCE) == {"record": "PPiIqQfs", "nothing": "", "trap": "P"}


def test_a_kernel_in_a_header_is_found() -> None:
    header = 'extern "C" __global__ void f(const Cells cells, long long n, CONSTANT Pointers out) {}'
    assert kernel_signatures('#include "f.cuh"\n', (("f.cuh", header),)) == {"f": "sqs"}


@pytest.mark.parametrize("pair", [Pair(3, 0.5), bytes(Pair(3, 0.5)), memoryview(bytes(Pair(3, 0.5)))])
def test_a_kernel_gets_the_bytes_of_its_arguments(kernels: Kernels, pair: Any) -> None:
    tensor = torch.zeros(3, device=EmulatedDevice().torch_device)
    found = record(kernels, tensor, -5, 0xFFFF_FFFF, -(1 << 62), (1 << 64) - 1, 1.5, pair)
    assert found == (tensor.data_ptr(), -5, 0xFFFF_FFFF, -(1 << 62), (1 << 64) - 1, 1.5, 3, 0.5)


def test_numbers_may_be_of_python_or_numpy_and_pointers_null_or_addresses(kernels: Kernels) -> None:
    assert record(kernels, None, np.int32(7), True, np.int64(8), 9, 2, Pair()) == (0, 7, 1, 8, 9, 2.0, 0, 0.0)
    assert record(kernels, 0x1234, -1, 0, -1, 0, -1.0, Pair())[:6] == (0x1234, -1, 0, -1, 0, -1.0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((), ValueError, "kernel 'record' takes 8 arguments, was given 1"),
        ((None, 1 << 31, 0, 0, 0, 0.0, Pair()), ValueError, "argument 2 cannot be 2147483648"),
        ((None, 0, -1, 0, 0, 0.0, Pair()), ValueError, "argument 3 cannot be -1"),
        ((None, 0, 0, 1 << 63, 0, 0.0, Pair()), OverflowError, "too big"),
        ((None, 0, 0, 0, -1, 0.0, Pair()), OverflowError, "negative"),
        ((None, 0, 0, 0, 0, 0.0, bytes(12)), ValueError, "argument 7 has 8 bytes, was given 12"),
        ((None, 0, 0, 0, 0, 0.0, 5), TypeError, "bytes-like"),
        ((None, "0", 0, 0, 0, 0.0, Pair()), TypeError, "int"),
        (("here", 0, 0, 0, 0, 0.0, Pair()), AttributeError, "data_ptr"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused(
    kernels: Kernels, arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        record(kernels, *arguments)


def test_a_failed_launch_names_the_kernel_and_the_error(kernels: Kernels) -> None:
    with pytest.raises(EmulationError, match="launching kernel 'trap' failed with CUDA_ERROR_LAUNCH_FAILED"):
        kernels.launch("trap", 1, None, stream=0, threads=32)


def test_threads_that_never_computed_on_the_device_may_launch(kernels: Kernels) -> None:
    found: list[tuple[Any, ...]] = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(record(kernels, None, n, 0, 0, 0, 0.0, Pair())))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one[1] for one in found) == [0, 1, 2, 3]


def test_a_kernel_that_the_image_lacks_is_named(kernels: Kernels) -> None:
    module = kernels._module
    with pytest.raises(native.CudaError, match="finding kernel 'absent' failed"):
        module.kernel("absent", "")
    with pytest.raises(native.CudaError, match="kernel 'trap': parameter 0 has 8 bytes, its type 'i' has 4"):
        module.kernel("trap", "i")


def test_a_machine_without_a_driver_is_told_so() -> None:
    with pytest.raises(native.CudaError, match=r"the CUDA driver cannot be loaded: libnowhere\.so"):
        native.CudaDriver("libnowhere.so", 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gets_the_same_bytes() -> None:
    device = torch.device("cuda", 0)
    waited = kernel_counts().seconds
    made = compiled_kernels(SOURCE, "recording", device)
    assert kernel_counts().seconds > waited
    out = torch.zeros(RECORD.size, dtype=torch.uint8, device=device)
    stream = torch.cuda.current_stream().cuda_stream
    made.launch("record", 1, out, None, -5, 7, -8, 9, 1.5, Pair(3, 0.5), stream=stream, threads=32)
    assert RECORD.unpack(out.cpu().numpy().tobytes()) == (0, -5, 7, -8, 9, 1.5, 3, 0.5)
    with pytest.raises(ValueError, match="argument 7 has 8 bytes, was given 12"):
        made.launch("record", 1, out, None, -5, 7, -8, 9, 1.5, bytes(12), stream=stream, threads=32)
    with pytest.raises(AcceleratorError, match="'nothing' failed with CUDA_ERROR_INVALID_VALUE"):
        made.launch("nothing", 1, stream=stream, threads=1 << 20)


# The cache of compiled kernels


class Compiler:
    """Compiles to what it is told, and counts."""

    def __init__(self, image: bytes = b"an image") -> None:
        self.image = image
        self.calls = 0

    def __call__(self) -> bytes:
        self.calls += 1
        return self.image


def test_kernels_are_compiled_once_for_all_processes(tmp_path: Path) -> None:
    first, second = Compiler(), Compiler()
    assert KernelCache(tmp_path / "kernels").image("rows", "sm_90", first) == b"an image"
    assert KernelCache(tmp_path / "kernels").image("rows", "sm_90", second) == b"an image"
    assert (first.calls, second.calls) == (1, 0)


def test_it_counts_what_was_compiled_and_what_was_there(tmp_path: Path) -> None:
    KernelCache(tmp_path).image("rows", "sm_90", Compiler())
    cache = KernelCache(tmp_path)
    for about in ("sm_90", "sm_100", "sm_120"):
        cache.image("rows", about, Compiler())
    cache.note_wait(1.5)
    cache.note_wait(0.5)
    assert cache.counts == KernelCounts(compiled=2, cached=1, seconds=2.0)


def test_kernels_are_compiled_again_if_anything_they_depend_on_changes(tmp_path: Path) -> None:
    cache, other = KernelCache(tmp_path), Compiler(b"for another driver")
    cache.image("rows", "sm_90, driver 12080", Compiler())
    assert cache.image("rows", "sm_90, driver 13000", other) == b"for another driver"


@pytest.mark.parametrize("damaged", [b"", b"short", bytes(100)])
def test_a_damaged_entry_is_compiled_again(
    tmp_path: Path, damaged: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    cache, again = KernelCache(tmp_path), Compiler()
    cache.image("rows", "sm_90", Compiler())
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(damaged or entry.read_bytes()[:-1])
    assert cache.image("rows", "sm_90", again) == b"an image"
    assert again.calls == 1
    assert "are damaged" in caplog.text
    assert cache.image("rows", "sm_90", Compiler(b"never")) == b"an image"


def test_a_folder_that_cannot_be_written_costs_time_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache, compiler = KernelCache(tmp_path / "file" / "kernels"), Compiler()
    assert [cache.image("rows", "sm_90", compiler) for _ in range(2)] == [b"an image"] * 2
    assert compiler.calls == 2


def test_threads_that_compile_the_same_leave_one_whole_entry(tmp_path: Path) -> None:
    image, cache = bytes(range(256)) * 4000, KernelCache(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        found = threads.map(lambda _: cache.image("rows", "sm_90", Compiler(image)), range(32))
        assert set(found) == {image}
    assert len(list(tmp_path.iterdir())) == 1, "no unfinished file is left"
    assert KernelCache(tmp_path).image("rows", "sm_90", Compiler(b"never")) == image
