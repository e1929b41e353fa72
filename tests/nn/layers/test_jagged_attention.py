"""Attention over jagged sequences: Triton kernels give what plain torch gives in float64.

Kernels run on a GPU, or without one in Triton's interpreter, on the CPU: with Triton installed and
TRITON_INTERPRET=1 in the environment. (Triton 3.6 and numpy 2.4 do not fit together there.)
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from monolith.nn.layers import HSTUEncoder, SASRecEncoder
from monolith.nn.layers.jagged_attention import (
    BUCKET_WIDTH,
    SHORT,
    PairBias,
    bucket_table,
    gap_buckets,
    hstu_attention,
    length_groups,
    positions_of,
    softmax_attention,
)

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
kernels = pytest.mark.skipif(
    find_spec("triton") is None or not (ON_GPU or INTERPRETED),
    reason="no CUDA device, nor Triton with TRITON_INTERPRET=1",
)
gpu = pytest.mark.skipif(not ON_GPU, reason="no CUDA device")

TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""The largest error of a tensor, by the norm of all of it."""
BUCKETS = 20


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def no_tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@dataclass(frozen=True, kw_only=True)
class Case:
    lengths: tuple[int, ...] = (3, 0, 1, 17, 70)
    heads: int = 1
    width: int = 16
    content_width: int = 16
    by_distance: bool = True
    by_time: bool = True
    dtype: torch.dtype = torch.float32
    behind: int = 0
    """JaggedSteps behind the last sequence."""

    @property
    def max_length(self) -> int:
        return max(self.lengths, default=0) + 1


CASES = {
    "both biases": Case(heads=2),
    "no bias": Case(heads=2, by_distance=False, by_time=False),
    "distance alone": Case(by_time=False),
    "time alone": Case(by_distance=False),
    "widths that no block has": Case(width=50, content_width=3),
    "one step each": Case(lengths=(1, 1, 1)),
    "no step": Case(lengths=(0, 0)),
    "no sequence": Case(lengths=()),
    "steps behind the last sequence": Case(lengths=(5, 2), behind=4),
    "just a block, and one step more": Case(lengths=(128, 129), width=8, by_time=False),
    "float16": Case(width=50, content_width=50, dtype=torch.float16),
}
ON_GPU_ALONE = {
    "long": Case(lengths=(2000, 3, 257, 1030), heads=2, width=64, content_width=64),
    "long, bfloat16": Case(
        lengths=(2000, 3, 257, 1030), heads=2, width=128, content_width=128, dtype=torch.bfloat16
    ),
    "long, float16": Case(lengths=(700, 300), heads=3, width=100, content_width=64, dtype=torch.float16),
    "bfloat16": Case(width=50, content_width=50, dtype=torch.bfloat16),
    "wide": Case(lengths=(130, 300), width=256, content_width=200),
    "wide, bfloat16": Case(lengths=(130, 300), width=256, content_width=256, dtype=torch.bfloat16),
}
"""The interpreter is too slow for these, or has no such dtype."""
ALL = CASES | (ON_GPU_ALONE if ON_GPU else {})


@dataclass(frozen=True)
class Inputs:
    query: Tensor
    key: Tensor
    content: Tensor
    row_splits: Tensor
    max_length: int
    bias: PairBias

    @classmethod
    def of(cls, case: Case) -> Inputs:
        """Return leaves on the device of the kernels; query, key and content lie in the same rows."""
        n = sum(case.lengths) + case.behind
        widths = [case.heads * one for one in (case.width, case.width, case.content_width)]
        drawn = torch.randn(n, sum(widths), dtype=torch.float64).to(DEVICE, case.dtype)
        parts = [one.unflatten(1, (case.heads, -1)).detach() for one in drawn.split(widths, 1)]
        parts[0].div_(math.sqrt(case.width))
        times = torch.randint(0, 10**5, (n,)).cumsum(0).to(DEVICE)
        bias = PairBias(
            torch.randn(case.max_length, device=DEVICE).requires_grad_() if case.by_distance else None,
            torch.randn(BUCKETS, device=DEVICE).requires_grad_() if case.by_time else None,
            times,
            times + torch.randint(-9, 10**4, (n,)).to(DEVICE),
        )
        query, key, content = (one.requires_grad_() for one in parts)
        return cls(query, key, content, splits_of(case.lengths).to(DEVICE), case.max_length, bias)

    def in_float64(self) -> Inputs:
        """Return leaves of equal values, on the CPU."""

        def moved(one: Tensor) -> Tensor:
            return one.detach().cpu().double().requires_grad_()

        bias = PairBias(
            *(None if one is None else moved(one) for one in (self.bias.by_distance, self.bias.by_time)),
            *(None if one is None else one.cpu() for one in (self.bias.times, self.bias.asked)),
        )
        parts = (moved(one) for one in (self.query, self.key, self.content))
        return Inputs(*parts, self.row_splits.cpu(), self.max_length, bias)

    def leaves(self) -> dict[str, Tensor]:
        found = {
            "query": self.query,
            "key": self.key,
            "content": self.content,
            "by_distance": self.bias.by_distance,
            "by_time": self.bias.by_time,
        }
        return {name: one for name, one in found.items() if one is not None}


def splits_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def hstu_by_kernels(inputs: Inputs) -> Tensor:
    """Attend as `hstu_attention` does on a GPU, in the interpreter, too."""
    from monolith.nn.layers.jagged_kernels import JaggedSilu, JaggedSteps

    bias = inputs.bias
    steps = JaggedSteps(inputs.row_splits, inputs.max_length)
    if bias.by_time is not None:
        table = bucket_table(len(bias.by_time), DEVICE)
        steps = replace(steps, buckets=table, times=bias.times, asked=bias.asked)
    parts = (inputs.query, inputs.key, inputs.content)
    result: Tensor = JaggedSilu.apply(*parts, bias.by_distance, bias.by_time, steps)
    return result


def hstu_by_torch(inputs: Inputs) -> Tensor:
    return hstu_attention(
        inputs.query, inputs.key, inputs.content, inputs.row_splits, inputs.max_length, inputs.bias
    )


def results(inputs: Inputs, out: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Return what was attended to, and all gradients."""
    leaves = inputs.leaves()
    unused = sum(leaf.sum().double() * 0 for leaf in leaves.values())  # if there is no step
    gradients = torch.autograd.grad((out * weights.to(out)).sum() + unused, list(leaves.values()))
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, one in found.items():
        right = expected[name]
        assert one.shape == right.shape, name
        error = float((one.cpu().double() - right).norm() / right.norm().clamp(min=1e-12))
        assert error <= tolerance, f"{name} is off by {error:.2e}"  # so is NaN


# HSTU


@kernels
@pytest.mark.usefixtures("no_tf32")
@pytest.mark.parametrize("name", ALL)
def test_kernels_give_what_torch_gives(name: str) -> None:
    inputs = Inputs.of(ALL[name])
    right = inputs.in_float64()
    expected = hstu_by_torch(right)
    weights = torch.randn(expected.shape).to(ALL[name].dtype).double()
    found = results(inputs, hstu_by_kernels(inputs), weights)
    assert_near(found, results(right, expected, weights), TOLERANCES[ALL[name].dtype])


@kernels
def test_kernels_give_the_same_to_the_bit_each_time() -> None:
    inputs = Inputs.of(ALL["long, bfloat16"] if ON_GPU else ALL["both biases"])
    weights = torch.randn(inputs.content.shape, device=DEVICE)
    first, second = (results(inputs, hstu_by_kernels(inputs), weights) for _ in range(2))
    for name, one in first.items():
        assert torch.equal(one, second[name]), name


@kernels
@pytest.mark.parametrize("shape", [(16, 32), (64, 32), (48, 16)])
def test_sums_by_distance_are_those_of_tiles_in_place(shape: tuple[int, int]) -> None:
    from monolith.nn.layers.jagged_kernels import sums_by_distance

    rows, keys = shape
    tiles = torch.randn(4, rows, keys, dtype=torch.float64)
    expected = torch.zeros(200, dtype=torch.float64)
    for diagonal in range(4):
        behind = (diagonal + 1) * keys - rows
        for i in range(rows):
            for j in range(keys):
                if 0 <= behind + i - j < 200:
                    expected[behind + i - j] += tiles[diagonal, i, j]
    torch.testing.assert_close(sums_by_distance(tiles, 200)[: 4 * keys], expected[: 4 * keys])


@kernels
@pytest.mark.parametrize("shape", [(16, 32), (32, 16)])
def test_blocks_of_biases_may_have_any_shape(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    from monolith.nn.layers import jagged_kernels

    blocks = jagged_kernels.Blocks(*shape, 4, 1)
    monkeypatch.setitem(jagged_kernels._FLOAT32["bias"], 64, blocks)
    inputs = Inputs.of(CASES["both biases"])
    right = inputs.in_float64()
    expected = hstu_by_torch(right)
    weights = torch.randn(expected.shape).double()
    found = results(inputs, hstu_by_kernels(inputs), weights)
    assert_near(found, results(right, expected, weights), TOLERANCES[torch.float32])


def bucket_of(gap: int) -> int:
    """Return the bucket of a gap, by Python's integers and float64."""
    (rounded,) = struct.unpack("f", struct.pack("f", max(gap, 1)))  # to float32
    whole = int(rounded)
    extra = max(whole.bit_length() - 7, 0)
    return int(math.log(whole >> extra << extra) / BUCKET_WIDTH)


def gaps_at_bounds() -> Tensor:
    """Return gaps around each bound of a bucket, and around the next number of seven bits."""
    gaps = [-(2**40), -1, 0, 2**24 + 1, 2**24 + 3, 2**47]
    for bucket in range(int(math.log(2**47) / BUCKET_WIDTH)):
        bound = math.ceil(math.exp(bucket * BUCKET_WIDTH))
        apart = 1 << max(bound.bit_length() - 7, 0)
        nearest = math.ceil(bound / apart) * apart
        gaps += [edge + by for edge in (bound, nearest) for by in (-(edge >> 25) - 1, -1, 0)]
    return torch.tensor(sorted(set(gaps)))


def test_time_buckets_are_logarithms_of_seven_bits() -> None:
    gaps = gaps_at_bounds()
    assert gap_buckets(gaps, 160).tolist() == [bucket_of(gap) for gap in gaps.tolist()]
    small = torch.arange(1, 129)
    exact = [int(math.log(gap) / BUCKET_WIDTH) for gap in small.tolist()]
    assert gap_buckets(small, 160).tolist() == exact
    assert gap_buckets(torch.tensor([2**62, 100]), 5).tolist() == [4, 4]


def test_no_logarithm_is_so_close_to_a_bound_that_rounding_matters() -> None:
    upper = torch.arange(1 + (127 << 6), (127 + 65) << 6, dtype=torch.int32)  # gaps up to 2^65
    logarithms = (upper << 17).view(torch.float32).double().log() / BUCKET_WIDTH
    assert float((logarithms - logarithms.round()).abs().min()) > 5e-5  # float32 is off by 1e-5 at most
    table = bucket_table(160, torch.device("cpu"))
    assert torch.equal(table[upper], logarithms.int())
    small_or_negative = torch.tensor([0.0, 0.5, 1.0, -1.0, -1e10]).view(torch.int32).long() % 2**32 >> 17
    assert not table[small_or_negative].any()


@pytest.mark.parametrize("attend", [hstu_by_torch, pytest.param(hstu_by_kernels, marks=kernels)])
@pytest.mark.parametrize("buckets", [1, 30, 160])
def test_each_gap_is_in_its_bucket(attend: Any, buckets: int) -> None:
    """Sequences of one step, whose result is the bias of its own gap, passed through silu."""
    gaps = gaps_at_bounds()
    device = DEVICE if attend is hstu_by_kernels else torch.device("cpu")
    zeros, ones = torch.zeros(len(gaps), 1, 1, device=device), torch.ones(len(gaps), 1, 1, device=device)
    splits = torch.arange(len(gaps) + 1, device=device)
    by_time = torch.arange(buckets, device=device) / 10
    times = torch.randint(-(10**15), 10**15, (len(gaps),))
    bias = PairBias(None, by_time, times.to(device), (times + gaps).to(device))
    found = attend(Inputs(zeros, zeros, ones, splits, 1, bias)).flatten().cpu()
    expected = torch.tensor([min(bucket_of(gap), buckets - 1) for gap in gaps.tolist()]) / 10
    torch.testing.assert_close(found, torch.nn.functional.silu(expected))


@kernels
def test_a_gap_between_steps_is_rounded_once() -> None:
    """A sum of two floats is what a gap of whole numbers is next to a bound, far from the first step, too."""
    gaps = gaps_at_bounds().clamp(min=0)
    begin = torch.randint(0, 2**46, (len(gaps),))
    times = torch.stack([torch.zeros_like(begin), begin, begin + gaps], 1).flatten()
    n = len(times)
    splits = torch.arange(0, n + 1, 3)
    query = torch.zeros(n, 1, 1)
    content = torch.tensor([0.0, 1.0, 0.0]).repeat(len(gaps))[:, None, None]  # the last step sees the second
    bias = PairBias(None, torch.arange(160) / 10, times, times)
    moved = replace(bias, **{k: getattr(bias, k).to(DEVICE) for k in ("by_time", "times", "asked")})
    parts = (one.to(DEVICE) for one in (query, query, content, splits))
    found = hstu_by_kernels(Inputs(*parts, 3, moved))[2::3].flatten().cpu()
    expected = torch.nn.functional.silu(gap_buckets(gaps, 160) / 10) / 3
    torch.testing.assert_close(found, expected)


@kernels
def test_times_may_have_any_order_and_unit() -> None:
    inputs = Inputs.of(CASES["both biases"])
    n = len(inputs.query)
    mixed = torch.randint(-(10**13), 10**13, (2, n)).to(DEVICE)  # milliseconds, say
    inputs = replace(inputs, bias=replace(inputs.bias, times=mixed[0], asked=mixed[1]))
    right = inputs.in_float64()
    weights = torch.randn(inputs.content.shape)
    found = results(inputs, hstu_by_kernels(inputs), weights)
    assert_near(found, results(right, hstu_by_torch(right), weights), TOLERANCES[torch.float32])


@gpu
def test_tf32_is_used_if_torch_may_use_it() -> None:
    inputs = Inputs.of(Case(heads=2, width=64, content_width=64))
    right = inputs.in_float64()
    weights = torch.randn(inputs.content.shape)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    found = results(inputs, hstu_by_kernels(inputs), weights)
    torch.backends.cuda.matmul.allow_tf32 = before
    expected = results(right, hstu_by_torch(right), weights)
    # TF32 keeps 10 bits of what is multiplied. Nearly all pairs are in one bucket of time, where gradients of
    # both signs add up to little: with factors cut to 10 bits in float64, errors of such sums reach 2e-2.
    sums = {"by_time"}
    for names, tolerance in ((found.keys() - sums, 5e-3), (sums, 1e-1)):
        assert_near(
            {name: found[name] for name in names}, {name: expected[name] for name in names}, tolerance
        )
    assert not torch.equal(found["out"], hstu_by_kernels(inputs))


# Softmax


def softmax_by_kernels(inputs: Inputs, dropout: float = 0.0) -> Tensor:
    from monolith.nn.layers.jagged_kernels import JaggedSoftmax, JaggedSteps

    steps = JaggedSteps(inputs.row_splits, inputs.max_length)
    result: Tensor = JaggedSoftmax.apply(inputs.query, inputs.key, inputs.content, steps, dropout)
    return result


def softmax_by_torch(inputs: Inputs) -> Tensor:
    return softmax_attention(inputs.query, inputs.key, inputs.content, inputs.row_splits, inputs.max_length)


SOFTMAX = {
    "several": Case(heads=2, by_distance=False, by_time=False),
    "widths that no block has": Case(width=50, content_width=3, by_distance=False, by_time=False),
    "no step": Case(lengths=(0, 0), by_distance=False, by_time=False),
    "steps behind the last sequence": Case(lengths=(5, 2), behind=4, by_distance=False, by_time=False),
    "just a block, and one step more": Case(lengths=(128, 129), width=8, by_distance=False, by_time=False),
}
SOFTMAX |= {
    name: replace(case, by_distance=False, by_time=False)
    for name, case in (ON_GPU_ALONE if ON_GPU else {}).items()
}


@kernels
@pytest.mark.usefixtures("no_tf32")
@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax_kernels_give_what_torch_gives(name: str) -> None:
    inputs = Inputs.of(SOFTMAX[name])
    right = inputs.in_float64()
    expected = softmax_by_torch(right)
    weights = torch.randn(expected.shape).to(SOFTMAX[name].dtype).double()
    found = results(inputs, softmax_by_kernels(inputs), weights)
    assert_near(found, results(right, expected, weights), TOLERANCES[SOFTMAX[name].dtype])


@kernels
def test_dropped_weights_are_the_same_ones_in_backward() -> None:
    """A result is linear in the content: the gradient of each element sums the weights that were kept."""
    inputs = Inputs.of(Case(lengths=(40, 3), by_distance=False, by_time=False))
    whole = replace(inputs, content=torch.ones_like(inputs.content).requires_grad_())
    kept = softmax_by_kernels(whole, 0.3)
    (gradient,) = torch.autograd.grad(kept.sum(), whole.content)
    torch.testing.assert_close(gradient.sum(), kept.sum())
    assert 0.9 < float(kept.mean()) < 1.1  # those that are kept make up for the others
    assert float(kept.std()) > 0.01
    torch.manual_seed(7)
    first = softmax_by_kernels(inputs, 0.3)
    torch.manual_seed(7)
    assert torch.equal(first, softmax_by_kernels(inputs, 0.3))
    assert not torch.equal(first, softmax_by_kernels(inputs, 0.3))


# What models of sequences need for CUDA graphs


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def encoders() -> dict[str, torch.nn.Module]:
    return {
        "hstu": HSTUEncoder(50, 200, heads=1, dropout=0.1).to(DEVICE),
        "sasrec": SASRecEncoder(50, 200, heads=1, dropout=0.1).to(DEVICE),
    }


def encoded(encoder: torch.nn.Module, values: Tensor, splits: Tensor, times: Tensor) -> Tensor:
    states: Tensor = (
        encoder(values, splits, times) if isinstance(encoder, HSTUEncoder) else encoder(values, splits)
    )
    return states


@gpu
@pytest.mark.parametrize("name", ["hstu", "sasrec"])
def test_an_encoder_never_waits_for_the_device(name: str) -> None:
    encoder = encoders()[name]
    values = torch.randn(230, 50, device=DEVICE, requires_grad=True)
    splits, times = splits_of((200, 0, 30)).to(DEVICE), torch.arange(230, device=DEVICE)
    encoded(encoder, values, splits, times).sum().backward()  # compiles kernels
    with no_waiting():
        encoded(encoder, values, splits, times).sum().backward()


@gpu
@pytest.mark.parametrize("name", ["hstu", "sasrec"])
def test_a_cuda_graph_is_replayed_with_other_lengths(name: str) -> None:
    encoder = encoders()[name].eval()
    values = torch.randn(230, 50, device=DEVICE, requires_grad=True)
    splits, times = splits_of((200, 0, 30)).to(DEVICE), torch.arange(230, device=DEVICE)
    parameters = [values, *encoder.parameters()]

    def run() -> tuple[Tensor, ...]:
        states = encoded(encoder, values, splits, times)
        return states, *torch.autograd.grad(states.square().sum(), parameters)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    splits.copy_(splits_of((20, 150, 60)))
    graph.replay()
    for found, expected in zip(captured, run(), strict=True):
        assert torch.equal(found, expected)


# Plain torch


@pytest.mark.parametrize("attend", ["hstu", "softmax"])
def test_steps_behind_the_last_sequence_have_a_result_of_zeros(attend: str) -> None:
    query, key, content = torch.randn(3, 7, 2, 4).unbind(0)
    splits = splits_of((2, 0, 3))
    if attend == "hstu":
        found = hstu_attention(query, key, content, splits, 5)
    else:
        found = softmax_attention(query, key, content, splits, 5)
    assert found[:5].abs().sum(2).min() > 0
    assert found[5:].tolist() == torch.zeros(2, 2, 4).tolist()


# Groups


def test_groups_hold_every_step_once_and_pad_little() -> None:
    lengths = tuple(torch.randint(0, 300, (200,)).tolist())
    splits = splits_of(lengths)
    places, padded = [], 0
    for group in length_groups(splits):
        length = group.places.shape[1]
        places += group.places[group.real].tolist()
        padded += group.places.numel() if length > SHORT else 0
        assert length <= max(SHORT, 1.25 * int(group.real.sum(1).min()))
    assert sorted(places) == list(range(sum(lengths)))
    assert padded < 1.25 * sum(lengths)


def test_groups_stay_within_their_memory() -> None:
    splits = splits_of((10,) * 100)
    assert {len(group.places) for group in length_groups(splits, heads=2, most_cells=2_000)} == {10}
    assert [len(group.places) for group in length_groups(splits, most_cells=1)] == [1] * 100


def test_positions_count_from_the_start_of_each_sequence() -> None:
    assert positions_of(splits_of((2, 0, 3)), 5).tolist() == [0, 1, 0, 1, 2]
