"""Causal attention over jagged sequences, in plain torch or by Triton kernels.

Sequences lie end to end in tensors of shape (n, heads, width), and row splits say where each one begins. Step
i of a sequence attends to steps 0 to i of the same sequence.

    hstu_attention      weights silu(q . k + bias) / max_length, without a softmax (Zhai et al., 2024)
    softmax_attention   as of transformers

Plain torch needs sequences next to each other. They are taken together by length, a group at a time, so that
one long sequence does not pad all: see `length_groups`. The host reads the lengths for that. It works on any
device in any dtype, and results on other paths are compared with it.

CUDA tensors of float32, bfloat16 and float16 go to the kernels in `jagged_kernels`. They take sequences where
they lie, and the host reads no lengths, so that a CUDA graph can contain them.

A graph of torch.export cannot know how many groups there are: `numbers` is given then, all sequences are one
group, and no kernel is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

MOST_CELLS = 1 << 24
"""Attention weights that are computed at once, over all heads: 64 MiB of float32."""
PADDED = 1.25
"""The longest sequence of a group is at most this many times its shortest, but for short ones."""
SHORT = 8
"""Sequences up to this length may be in one group."""
BUCKET_WIDTH = 0.301
"""Buckets of time gaps are this wide, by the natural logarithm: each ends at 1.35 times the one before."""
GAP_BIT_SHIFT = 17
"""Bits of a gap's float32 that do not count: of 23 bits behind the first significant one, 6 do."""
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST_HEAD = 256
"""The widest head that kernels take."""


@dataclass(frozen=True, slots=True, eq=False)
class PairBias:
    """What is added to the score of a step and an earlier one, learned by how far apart the two are."""

    by_distance: Tensor | None = None
    """float of shape (max_length,): by how many steps lie between them."""
    by_time: Tensor | None = None
    """float of shape (buckets,): by the bucket of their time gap; see `gap_buckets`."""
    times: Tensor | None = None
    """int64 of shape (n,): when each step happened. Needed with `by_time`."""
    asked: Tensor | None = None
    """int64 of shape (n,): when the result of each step is asked for. Needed with `by_time`."""


def hstu_attention(
    query: Tensor,
    key: Tensor,
    content: Tensor,
    row_splits: Tensor,
    max_length: int,
    bias: PairBias | None = None,
    numbers: Tensor | None = None,
) -> Tensor:
    """Return the sums of `content` by the weights `silu(query . key + bias) / max_length`.

    Shapes: n steps of all sequences together. JaggedSteps behind the last sequence have a result of zeros.

    Args:
        query: float of shape (n, heads, width).
        key: As `query`.
        content: float of shape (n, heads, content_width), with the dtype of `query`.
        row_splits: int64 of shape (sequences + 1,).
        max_length: The most steps of a sequence. On a GPU, results of a longer one are undefined.
        bias: What is added to scores.
        numbers: For a graph of torch.export: 0, 1 and so on, as many as the longest sequence has, or more.

    Returns:
        float of shape (n, heads, content_width).
    """
    bias = PairBias() if bias is None else bias
    if numbers is None and has_kernels(query, content):
        from monolith.nn.layers.jagged_kernels import JaggedSilu, JaggedSteps

        steps = JaggedSteps(row_splits.to(query.device), max_length)
        if bias.by_time is not None:
            assert bias.times is not None
            assert bias.asked is not None
            table = bucket_table(len(bias.by_time), query.device)
            times, asked = bias.times.to(query.device), bias.asked.to(query.device)
            steps = JaggedSteps(steps.row_splits, max_length, table, times, asked)
        result: Tensor = cast(Any, JaggedSilu).apply(
            query, key, content, bias.by_distance, bias.by_time, steps
        )
        return result

    def attend(group: LengthGroup) -> Tensor:
        scores = group.heads_of(query) @ group.heads_of(key).transpose(2, 3)
        for part in _biases(bias, group, max_length):
            scores = scores + part
        weights = torch.tril(functional.silu(scores) / max_length)
        return (weights @ group.heads_of(content)).transpose(1, 2)

    return _by_group(content, row_splits, attend, numbers)


def softmax_attention(
    query: Tensor,
    key: Tensor,
    content: Tensor,
    row_splits: Tensor,
    max_length: int,
    dropout: float = 0.0,
    numbers: Tensor | None = None,
) -> Tensor:
    """Return the sums of `content` by the weights `softmax(query . key / sqrt(width))`.

    Args:
        query: As of `hstu_attention`, with the other arguments.
        dropout: The fraction of weights that is dropped.

    Returns:
        float of shape (n, heads, content_width).
    """
    if numbers is None and has_kernels(query, content):
        from monolith.nn.layers.jagged_kernels import JaggedSoftmax, JaggedSteps

        steps = JaggedSteps(row_splits.to(query.device), max_length)
        result: Tensor = cast(Any, JaggedSoftmax).apply(query, key, content, steps, dropout)
        return result

    def attend(group: LengthGroup) -> Tensor:
        query_, key_, content_ = (group.heads_of(one) for one in (query, key, content))
        found = functional.scaled_dot_product_attention(
            query_, key_, content_, dropout_p=dropout, is_causal=True
        )
        return found.transpose(1, 2)

    return _by_group(content, row_splits, attend, numbers)


def has_kernels(query: Tensor, content: Tensor) -> bool:
    """Return whether kernels take these tensors."""
    return (
        query.is_cuda
        and query.dtype in KERNEL_DTYPES
        and max(query.shape[2], content.shape[2]) <= WIDEST_HEAD
        and _has_triton()
    )


@lru_cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def gap_buckets(gaps: Tensor, buckets: int) -> Tensor:
    """Return the bucket of each gap, int64, by its logarithm.

    Seven significant bits of a gap count, rounded down: its float32 with the lower bits cleared. The natural
    logarithm of that, divided by `BUCKET_WIDTH` and rounded down, is the bucket. Gaps below 1 are in the
    first bucket, and the last one has no end.

        gaps       1   2   100   127   3600   3616
        kept       1   2   100   127   3584   3616
        buckets    0   2    15    16     27     27

    So the upper bits of a float say the bucket, with no bound to compare the gap with. No kept number is so
    close to a bound that the error of a logarithm would matter: results are the same everywhere.

    Args:
        gaps: int64, of any shape.
    """
    bits = gaps.clamp(min=1).to(torch.float32).view(torch.int32)
    kept = (bits & -(1 << GAP_BIT_SHIFT)).view(torch.float32)
    return (kept.log() / BUCKET_WIDTH).long().clamp(max=buckets - 1)


@lru_cache
def bucket_table(buckets: int, device: torch.device) -> Tensor:
    """Return the buckets of all gaps by the upper bits of their floats, int32 of shape (32768,)."""
    first, infinite = (
        127 << (23 - GAP_BIT_SHIFT),
        255 << (23 - GAP_BIT_SHIFT),
    )  # the bits of 1.0 and of infinity
    gaps = (torch.arange(first, infinite, dtype=torch.int32) << GAP_BIT_SHIFT).view(torch.float32)
    made = torch.zeros(1 << (32 - GAP_BIT_SHIFT), dtype=torch.int32)
    made[first:infinite] = gap_buckets(gaps, buckets).int()
    # A copy from pinned memory is the only one for which the host does not wait.
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


def _biases(bias: PairBias, group: LengthGroup, max_length: int) -> Iterator[Tensor]:
    """Yield what is added to scores, of shapes (sequences or 1, 1, length, length)."""
    if bias.by_distance is not None:
        steps = torch.arange(group.places.shape[1], device=group.places.device)
        apart = (steps[:, None] - steps).clamp(min=0, max=max_length - 1)
        yield bias.by_distance[apart][None, None]
    if bias.by_time is not None:
        assert bias.times is not None
        assert bias.asked is not None
        gaps = bias.asked[group.places][:, :, None] - bias.times[group.places][:, None, :]
        yield bias.by_time[gap_buckets(gaps, len(bias.by_time))][:, None]


@dataclass(frozen=True, slots=True)
class LengthGroup:
    """Sequences of similar length, and where their steps are."""

    places: Tensor
    """int64 of shape (sequences, length): of each step among all steps. Behind the end of a sequence, any."""
    real: Tensor
    """bool of the same shape: which steps there are."""

    def heads_of(self, steps: Tensor) -> Tensor:
        """Return shape (sequences, heads, length, width), of steps of shape (n, heads, width)."""
        return steps[self.places].transpose(1, 2)


def length_groups(row_splits: Tensor, heads: int = 1, most_cells: int = MOST_CELLS) -> Iterator[LengthGroup]:
    """Cut sequences into groups whose attention weights are computed together, the longest ones first.

    Args:
        row_splits: int64 of shape (sequences + 1,). Read on the host: on a GPU, this waits for it.
    """
    lengths = row_splits.diff()
    longest_first = torch.argsort(lengths, descending=True, stable=True)
    sizes = lengths[longest_first].tolist()
    begin = 0
    while begin < len(sizes) and sizes[begin]:
        length = sizes[begin]
        least = 1 if length <= SHORT else math.ceil(length / PADDED)
        most = max(1, most_cells // (heads * length * length))
        end = begin + 1
        while end < len(sizes) and sizes[end] >= least and end - begin < most:
            end += 1
        rows = longest_first[begin:end]
        steps = torch.arange(length, device=row_splits.device)
        real = steps < lengths[rows, None]
        # A place behind the end is that of the first step: causal attention never looks there.
        places = row_splits[rows, None] + torch.where(real, steps, 0)
        yield LengthGroup(places, real)
        begin = end


def all_in_one(row_splits: Tensor, numbers: Tensor, steps: int) -> LengthGroup:
    """Return all sequences as one group, without looking at their lengths.

    Args:
        numbers: 0, 1 and so on: as many as the longest sequence has, or more.
        steps: Of all sequences, at least 1: an empty one may begin behind the last.
    """
    real = numbers < row_splits.diff()[:, None]
    places = row_splits[:-1, None] + torch.where(real, numbers, 0)
    return LengthGroup(places.clamp(max=steps - 1), real)


def _by_group(
    content: Tensor,
    row_splits: Tensor,
    compute: Callable[[LengthGroup], Tensor],
    numbers: Tensor | None,
) -> Tensor:
    """Return what `compute` returns for the steps of each group, in the order of all steps.

    Args:
        content: Of shape (n, heads, width), as the result.
        compute: Returns shape (sequences, length, heads, width).
    """
    steps, heads = content.shape[:2]
    if numbers is not None:
        positions = positions_of(row_splits, steps).clamp(max=numbers.shape[0] - 1)
        return compute(all_in_one(row_splits, numbers, steps))[sequence_of(row_splits, steps), positions]
    results, places = [], []
    for group in length_groups(row_splits, heads):
        results.append(compute(group)[group.real])
        places.append(group.places[group.real])
    found = sum(len(one) for one in places)
    if found < steps:  # behind the last sequence
        results.append(torch.zeros_like(content[found:]))
        places.append(torch.arange(found, steps, device=row_splits.device))
    if not results:
        return torch.zeros_like(content)
    order = torch.empty(steps, dtype=torch.int64, device=row_splits.device)
    order[torch.cat(places)] = torch.arange(steps, device=row_splits.device)
    return torch.cat(results)[order]


def sequence_of(row_splits: Tensor, steps: int) -> Tensor:
    """Return int64 of shape (steps,): the sequence that each step is in.

    JaggedSteps behind the last sequence, with which a graph is padded, count to the last.
    """
    places = torch.arange(steps, device=row_splits.device)
    return torch.searchsorted(row_splits[1:], places, right=True).clamp(max=row_splits.shape[0] - 2)


def positions_of(row_splits: Tensor, steps: int) -> Tensor:
    """Return int64 of shape (steps,): how many steps of its sequence are before each."""
    starts = row_splits[sequence_of(row_splits, steps)]
    return torch.arange(steps, device=row_splits.device) - starts
