"""The emulated device runs kernels as a GPU would, and says what would go wrong there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from services.emulated_cuda import EmulatedDevice, EmulationError

SOURCE = r"""
// Sums of blocks, by shuffles within warps and shared memory between them.
extern "C" __global__ void sum_blocks(const int* __restrict__ numbers, long long n, int* sums) {
  __shared__ int of_warps[8];
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  int sum = i < n ? numbers[i] : 0;
  for (int lanes = 16; lanes > 0; lanes >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  if ((threadIdx.x & 31) == 0) of_warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  sum = 0;
  for (int warp = 0; warp < blockDim.x / 32; ++warp) sum += of_warps[warp];
  sums[blockIdx.x] = sum;
}

// Tiles of 8 lanes that go their own ways: each sums what its first lanes say, as many as its number.
extern "C" __global__ void sum_tiles(int* out) {
  const int tile = threadIdx.x / 8;
  const unsigned mask = 0xffu << (threadIdx.x & 24);
  int sum = 0;
  for (int j = 0; j <= tile; ++j) sum += __shfl_sync(mask, (int)threadIdx.x, j, 8);
  const unsigned odd = __ballot_sync(mask, threadIdx.x & 1) & mask;
  out[threadIdx.x] = 100 * sum + __popc(odd);
}

extern "C" __global__ void shift(int* out) {
  const int lane = threadIdx.x & 31;
  const int up = __shfl_up_sync(0xffffffffu, lane, 1, 4);
  const int down = __shfl_down_sync(0xffffffffu, lane, 1, 4);
  out[lane] = up * 100 + down;
}

extern "C" __global__ void votes(int* out) {
  const int none = __syncthreads_or(threadIdx.x > 1000);
  const int many = __syncthreads_count(threadIdx.x < 40);
  const int all = __all_sync(0xffffffffu, threadIdx.x < 64);
  const int any = __any_sync(0xffffffffu, threadIdx.x == 70);
  out[threadIdx.x] = none * 1000 + many * 10 + all * 2 + any;
}

// A lane that has returned is not waited for.
extern "C" __global__ void some_leave(int* out) {
  if (threadIdx.x >= 20) return;
  out[threadIdx.x] = (int)__ballot_sync(0xffffffffu, 1);
  __syncthreads();
}

extern "C" __global__ void never_met(int* out) {
  if (threadIdx.x < 16) __syncwarp();
  else __syncthreads();
}

extern "C" __global__ void reads_an_absent_lane(int* out) {
  if (threadIdx.x < 8) out[threadIdx.x] = __shfl_sync(0xffu, 1, 9);
}

// Wrong: reads and writes apart, so that others come between.
extern "C" __global__ void count_badly(int* out) {
  const int before = __ldcg(out);
  atomicExch(out, before + 1);
}

// Wrong, too: who is last stays.
extern "C" __global__ void last_block(int* out) { *out = blockIdx.x; }

struct Three {
  int at[3];
};
extern "C" __global__ void first_of(Three three, int* out) { *out = three.at[0]; }

extern "C" __global__ void count_well(int* out) { atomicAdd(out, 1); }
"""


def run(kernel: str, out: torch.Tensor, *, seed: int = 0, blocks: int = 1, threads: int = 32) -> list[int]:
    EmulatedDevice(seed=seed).kernels(SOURCE, "examples").launch(
        kernel, blocks, out, stream=0, threads=threads
    )
    return out.tolist()


def zeros(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int32, device=EmulatedDevice().torch_device)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_blocks_warps_and_shared_memory_work_together(seed: int) -> None:
    numbers, sums = torch.arange(600, dtype=torch.int32).to(zeros(0).device), zeros(3)
    made = EmulatedDevice(seed=seed).kernels(SOURCE, "examples")
    made.launch("sum_blocks", 3, numbers, 600, sums, stream=0, threads=256)
    assert sums.tolist() == [int(part.sum()) for part in numbers.split(256)]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tiles_of_a_warp_go_their_own_ways(seed: int) -> None:
    sums = [sum(8 * tile + j for j in range(tile + 1)) for tile in range(4)]
    assert run("sum_tiles", zeros(32), seed=seed) == [100 * one + 4 for one in sums for _ in range(8)]


def test_lanes_at_the_borders_of_a_width_keep_their_own() -> None:
    ups = [max(lane - 1, lane // 4 * 4) for lane in range(32)]
    downs = [min(lane + 1, lane // 4 * 4 + 3) for lane in range(32)]
    assert run("shift", zeros(32)) == [100 * up + down for up, down in zip(ups, downs, strict=True)]


def test_a_block_and_its_warps_vote() -> None:
    assert run("votes", zeros(96), threads=96) == [402] * 64 + [401] * 32


def test_a_thread_that_has_returned_is_not_waited_for() -> None:
    assert run("some_leave", zeros(20)) == [(1 << 20) - 1] * 20


def test_threads_that_wait_in_vain_are_named_and_the_next_launch_works() -> None:
    with pytest.raises(EmulationError, match=r"never_met: .*16 at __syncthreads in line .*16 at __syncwarp"):
        run("never_met", zeros(1))
    assert run("count_well", zeros(1)) == [32]


def test_a_lane_that_takes_no_part_cannot_be_read() -> None:
    with pytest.raises(EmulationError, match="reads_an_absent_lane: lane 0 reads lane 9"):
        run("reads_an_absent_lane", zeros(8))


def test_a_seed_shows_what_depends_on_the_order_of_threads() -> None:
    assert run("count_badly", zeros(1)) == [32]
    assert run("count_badly", zeros(1), seed=1) != [32]
    assert run("count_well", zeros(1), seed=1) == [32]


def test_a_seed_shows_what_depends_on_the_order_of_blocks() -> None:
    assert run("last_block", zeros(1), blocks=9) == [8]
    assert {run("last_block", zeros(1), blocks=9, seed=seed)[0] for seed in (1, 2, 3)} != {8}
    assert run("count_well", zeros(1), blocks=9, seed=1) == [9 * 32]


def test_a_struct_of_another_size_is_refused() -> None:
    made = EmulatedDevice().kernels(SOURCE, "examples")
    with pytest.raises(ValueError, match="kernel 'first_of': argument 0 has 12 bytes, was given 8"):
        made.launch("first_of", 1, bytes(8), zeros(1), stream=0)


def test_a_source_that_does_not_compile_says_where() -> None:
    with pytest.raises(EmulationError, match=r"broken.cu:2"):
        EmulatedDevice().kernels("\nint x = y;\n", "broken")


def test_a_stream_is_the_current_one_while_it_is_on() -> None:
    device = EmulatedDevice()
    first, stream = device.current_stream(), device.new_stream()
    with device.on(stream):
        assert device.current_stream() == stream != first
    assert device.current_stream() == first


# Its tensors and those of the host


@pytest.fixture
def there() -> torch.Tensor:
    return torch.arange(6.0, device=EmulatedDevice().torch_device).view(2, 3)


MIXED = {
    "sum": lambda there, host: there + host,
    "sum, the host's first": lambda there, host: host + there,
    "in place": lambda there, host: there.add_(host),
    "in place on the host": lambda there, host: host.add_(there),
    "concatenation": lambda there, host: torch.cat([there, host]),
    "product": lambda there, host: there @ host.t(),
    "choice": lambda there, host: torch.where(there > 1, there, host),
    "comparison": torch.equal,
    "loss": torch.nn.functional.mse_loss,
    "index of the host's": lambda there, host: host[there[0].long() % 2],
    "rows by index": lambda there, host: there.index_select(0, host[0].long()),
}


@pytest.mark.parametrize("mix", MIXED.values(), ids=MIXED)
def test_tensors_of_the_host_and_of_the_device_do_not_mix(mix: Any, there: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        mix(there, torch.zeros(2, 3))


def test_numbers_and_indices_of_the_host_may_be_used_as_on_a_gpu(there: torch.Tensor) -> None:
    assert (there * torch.tensor(2.0)).sum().item() == 30
    assert there[torch.tensor([1])].tolist() == [[3, 4, 5]]
    assert there[torch.tensor([True, False])].tolist() == [[0, 1, 2]]


def test_tensors_are_copied_both_ways_and_views_share_memory(there: torch.Tensor) -> None:
    here = torch.empty(3).copy_(there[1])
    assert type(here) is torch.Tensor
    assert here.tolist() == [3, 4, 5]
    there[0].copy_(here)
    assert there.cpu().tolist() == [[3, 4, 5], [3, 4, 5]]
    assert there.cpu().device.type == "cpu"
    assert there[1].data_ptr() == there.data_ptr() + 12


def test_a_tensor_of_the_device_is_no_array_of_the_host(there: torch.Tensor) -> None:
    for convert in (np.asarray, lambda tensor: tensor.numpy()):
        with pytest.raises(TypeError, match="can't convert"):
            convert(there)


def test_gradients_are_on_the_device_of_their_weights(there: torch.Tensor) -> None:
    model = torch.nn.Linear(3, 1).to(there.device)
    optimizer = torch.optim.Adagrad(model.parameters())
    before = model.weight.cpu()
    model(there).square().mean().backward()
    optimizer.step()
    assert model.weight.grad is not None
    assert model.weight.grad.device == there.device
    assert not torch.equal(model.weight.cpu(), before)


def test_a_kernel_refuses_a_tensor_in_host_memory() -> None:
    with pytest.raises(EmulationError, match="'count_well': argument 0 is a tensor in host memory"):
        run("count_well", torch.zeros(1, dtype=torch.int32))
