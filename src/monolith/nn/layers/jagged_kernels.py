"""Triton kernels of attention over jagged sequences, with gradients.

`jagged_attention` says what they compute. Triton comes with a CUDA build of torch and is not there without
one: this module is imported when the first CUDA tensor is attended to, and nowhere else.

A program has one block of queries (or, for the gradients of keys and values, of keys) of one head of one
sequence, and goes through the blocks on the other side of the causal triangle:

                 keys
               0 1 2 3        forward, gradient of queries:        block 3 reads keys 0 1 2 3
    queries  0 x              gradients of keys and values:        block 0 reads queries 0 1 2 3
             1 x x            gradients of the tables of biases:   diagonal 1 reads (1, 0) (2, 1) (3, 2)
             2 x x x
             3 x x x x

The host knows neither lengths nor how many blocks there are, so that nothing waits for the device and a CUDA
graph may be replayed with other lengths: the grid has the blocks of `max_length` for each sequence, and
programs without a block end at once. Programs start in the order of their index, those with most work first.

Sums are made in an order that depends on shapes alone, without atomics: results are equal to the bit from run
to run. The price is that scores are computed three times in backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from monolith.nn.layers.jagged_attention import GAP_BIT_SHIFT

_COMPILED = not triton.knobs.runtime.interpret
"""The interpreter knows no assembler."""

# fmt: off
LOG2_E = tl.constexpr(1.4426950408889634)
_BIT_SHIFT = tl.constexpr(GAP_BIT_SHIFT)
_COUNTS = ("sequences", "heads", "blocks")
_DIAGONAL_COUNTS = ("sequences", "heads", "shares", "stripes")
"""Triton would compile a kernel again for counts that are 1 or a multiple of 16."""


@triton.jit(do_not_specialize=("sequences", "row"))
def _split_times(times, asked, parts, splits, sequences, row, BLOCK: tl.constexpr):
    """Write times since the first step of each sequence as two floats: a multiple of 2^24, and the rest.

    `parts` has those at which steps are asked for, and `row` floats behind them those at which they happened.
    Up to 2^47 seconds they are exact. So the difference of two such times is rounded once, as an integer is
    that becomes a float, and takes three additions: a GPU converts integers at a fraction of its speed.
    """
    item = tl.program_id(0)
    begin = tl.load(splits + item % sequences)
    length = (tl.load(splits + item % sequences + 1) - begin).to(tl.int32)
    steps = item // sequences * BLOCK + tl.arange(0, BLOCK)
    inside = steps < length
    first = tl.load(times + begin, mask=length > 0, other=0)
    seen = tl.load(times + begin + steps, mask=inside, other=0) - first
    after = tl.load(asked + begin + steps, mask=inside, other=0) - first
    parts += 2 * (begin + steps)
    tl.store(parts, (after >> 24).to(tl.float32) * 16777216.0, mask=inside)
    tl.store(parts + 1, (after & 16777215).to(tl.float32), mask=inside)
    tl.store(parts + row, (seen >> 24).to(tl.float32) * 16777216.0, mask=inside)
    tl.store(parts + row + 1, (seen & 16777215).to(tl.float32), mask=inside)


@triton.jit
def _time_of(parts, first, inside, COMPILED: tl.constexpr):
    """Return both floats of the times of steps `first + inside`; see `_places`."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "ld.global.nc.v2.f32 {$0, $1}, [$2];", "=f,=f,l",
            [_places(parts, first * 2) + inside.to(tl.int64) * 8], (tl.float32, tl.float32), True, 1
        )
    steps = first + inside
    return tl.load(parts + 2 * steps), tl.load(parts + 2 * steps + 1)


@triton.jit
def _places(table, index):
    """Return addresses of floats, as integers that LLVM knows nothing about.

    What is added to them differs by constants that are known when a kernel is compiled: those become part of
    each load. LLVM would keep an address for each and count all of them up from block to block.
    """
    return tl.inline_asm_elementwise(
        "mov.b64 $0, $1;", "=l,l", [table.to(tl.int64) + index.to(tl.int64) * 4], tl.int64, True, 1
    )


@triton.jit
def _whole(high, low):
    return high.to(tl.float64) + low.to(tl.float64)


@triton.jit
def _of_gaps(table, gaps, COMPILED: tl.constexpr):
    """Return floats of a table, which has one for the upper bits of any float."""
    bits = gaps.to(tl.uint32, bitcast=True) >> _BIT_SHIFT
    if COMPILED:
        return tl.inline_asm_elementwise(
            "{ .reg .b64 at; mad.wide.u32 at, $2, 4, $1; ld.global.nc.f32 $0, [at]; }", "=f,l,r",
            [table.to(tl.int64), bits], tl.float32, True, 1
        )
    return tl.load(table + bits)


@triton.jit
def _bias_of(
    apart, left, right, asked_high, asked_low, seen_high, seen_low, by_distance, by_time,
    FAR: tl.constexpr, TIMED: tl.constexpr, COMPILED: tl.constexpr,
):
    """Return half of the biases of pairs that are `apart + left + right` steps from each other.

    `by_distance` has room on both sides, since a block reaches above the diagonal and beyond `max_length`.
    Triton would load a tile in an order of its own and exchange it between threads through shared memory. By
    assembler, each thread loads what it computes with.
    """
    bias = 0.0
    if FAR:
        if COMPILED:
            bias = tl.inline_asm_elementwise(
                "ld.global.nc.f32 $0, [$1];", "=f,l",
                [_places(by_distance, apart + left) + right.to(tl.int64) * 4], tl.float32, True, 1
            )
        else:
            bias = tl.load(by_distance + apart + left + right)
    if TIMED:
        gaps = (asked_high - seen_high) + (asked_low - seen_low)
        bias += _of_gaps(by_time, gaps, COMPILED)
    return bias


@triton.jit
def _gate(half, FAST: tl.constexpr):
    """Return what the next two functions take: the hyperbolic tangent of half a score, or its sigmoid."""
    if FAST == 2:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [half], tl.float32, True, 1)
    above = 1.0 + tl.exp2(-2.0 * LOG2_E * half)
    if FAST == 1:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [above], tl.float32, True, 1)
    return 1.0 / above


@triton.jit
def _silu(half, gate, FAST: tl.constexpr):
    """Return the silu of scores."""
    if FAST == 2:
        return half * gate + half
    return 2.0 * half * gate


@triton.jit
def _times_slope(of_weights, half, gate, FAST: tl.constexpr):
    """Return twice the gradient of scores: that of the weights, times the slope of silu."""
    if FAST == 2:
        return of_weights * (half * (1.0 - gate * gate) + gate) + of_weights
    return 2.0 * of_weights * (gate + 2.0 * half * gate * (1.0 - gate))


@triton.jit
def _load(
    base, rows, columns, stride, length, WIDTH: tl.constexpr, PADDED: tl.constexpr, INSIDE: tl.constexpr,
):
    """Return rows of a head, with zeros beyond its width and, unless all are INSIDE, behind the sequence."""
    places = base + rows[:, None] * stride + columns[None, :]
    if INSIDE:
        if WIDTH == PADDED:
            return tl.load(places)
        return tl.load(places, mask=columns[None, :] < WIDTH, other=0.0)
    if WIDTH == PADDED:
        return tl.load(places, mask=rows[:, None] < length, other=0.0)
    return tl.load(
        places, mask=(rows[:, None] < length) & (columns[None, :] < WIDTH), other=0.0
    )


@triton.jit
def _load_from_first(base, rows, columns, stride, length, WIDTH: tl.constexpr):
    """Return rows of a head, with zeros beyond its width, before the sequence and behind it."""
    inside = (rows >= 0) & (rows < length)
    return tl.load(
        base + rows[:, None] * stride + columns[None, :],
        mask=inside[:, None] & (columns[None, :] < WIDTH), other=0.0,
    )


@triton.jit
def _store(base, values, rows, columns, stride, length, WIDTH: tl.constexpr):
    places = base + rows[:, None] * stride + columns[None, :]
    mask = (rows[:, None] < length) & (columns[None, :] < WIDTH)
    tl.store(places, values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _forward_blocks(
    total, query, asked_high, asked_low, above, inside, k, v, seen, by_distance, by_time,
    k_stride, v_stride, length, first, last,
    WIDTH: tl.constexpr, CONTENT: tl.constexpr, PADDED: tl.constexpr, CONTENT_PADDED: tl.constexpr,
    N: tl.constexpr, FAR: tl.constexpr, TIMED: tl.constexpr, DIAGONAL: tl.constexpr, FAST: tl.constexpr,
    COMPILED: tl.constexpr, PRECISION: tl.constexpr,
):
    """Add what blocks of keys from `first` to `last` give to a block of queries."""
    for start in range(first, last, N):
        keys = start + tl.arange(0, N)
        key = _load(k, keys, tl.arange(0, PADDED), k_stride, length, WIDTH, PADDED, not DIAGONAL)
        seen_high, seen_low = keys, keys
        if TIMED:
            seen_high, seen_low = _time_of(seen, start, tl.arange(0, N), COMPILED)
        bias = _bias_of(
            above - start, inside[:, None], -tl.arange(0, N)[None, :],
            asked_high[:, None], asked_low[:, None], seen_high[None, :], seen_low[None, :],
            by_distance, by_time, FAR, TIMED, COMPILED,
        )
        half = 0.5 * tl.dot(query, tl.trans(key), input_precision=PRECISION) + bias
        weights = _silu(half, _gate(half, FAST), FAST)
        if DIAGONAL:
            weights = tl.where((above + inside)[:, None] >= keys[None, :], weights, 0.0)
        content = _load(
            v, keys, tl.arange(0, CONTENT_PADDED), v_stride, length, CONTENT, CONTENT_PADDED, not DIAGONAL
        )
        total = tl.dot(weights.to(content.dtype), content, total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=_COUNTS)
def _forward(
    q, k, v, out, splits, by_distance, by_time, parts, row,
    q_stride, k_stride, v_stride, out_stride, sequences, heads, blocks, scale,
    WIDTH: tl.constexpr, CONTENT: tl.constexpr, PADDED: tl.constexpr, CONTENT_PADDED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, FAR: tl.constexpr, TIMED: tl.constexpr, FAST: tl.constexpr,
    COMPILED: tl.constexpr, PRECISION: tl.constexpr,
):
    item = tl.program_id(0)
    pair = item % (sequences * heads)
    begin = tl.load(splits + pair // heads)
    length = (tl.load(splits + pair // heads + 1) - begin).to(tl.int32)
    start = (blocks - 1 - item // (sequences * heads)) * M
    if start >= length:
        return
    head = pair % heads
    inside = tl.arange(0, M)
    rows = start + inside
    query = _load(
        q + begin * q_stride + head * WIDTH, rows, tl.arange(0, PADDED), q_stride, length, WIDTH, PADDED,
        False
    )
    k += begin * k_stride + head * WIDTH
    v += begin * v_stride + head * CONTENT
    asked_high, asked_low = rows, rows
    if TIMED:
        parts += 2 * begin
        asked_high, asked_low = _time_of(parts, start, inside, COMPILED)
    seen = parts + row
    total = tl.zeros([M, CONTENT_PADDED], tl.float32)
    total = _forward_blocks(
        total, query, asked_high, asked_low, start, inside, k, v, seen, by_distance, by_time,
        k_stride, v_stride, length, 0, start,
        WIDTH, CONTENT, PADDED, CONTENT_PADDED, N, FAR, TIMED, False, FAST, COMPILED, PRECISION,
    )
    total = _forward_blocks(
        total, query, asked_high, asked_low, start, inside, k, v, seen, by_distance, by_time,
        k_stride, v_stride, length, start, tl.minimum(start + M, length),
        WIDTH, CONTENT, PADDED, CONTENT_PADDED, N, FAR, TIMED, True, FAST, COMPILED, PRECISION,
    )
    _store(
        out + begin * out_stride + head * CONTENT, total * scale, rows, tl.arange(0, CONTENT_PADDED),
        out_stride, length, CONTENT,
    )


@triton.jit
def _query_blocks(
    total, query, gradient, asked_high, asked_low, above, inside, k, v, seen, by_distance, by_time,
    k_stride, v_stride, length, first, last,
    WIDTH: tl.constexpr, CONTENT: tl.constexpr, PADDED: tl.constexpr, CONTENT_PADDED: tl.constexpr,
    N: tl.constexpr, FAR: tl.constexpr, TIMED: tl.constexpr, DIAGONAL: tl.constexpr, FAST: tl.constexpr,
    COMPILED: tl.constexpr, PRECISION: tl.constexpr,
):
    """Add what blocks of keys from `first` to `last` give to the gradient of a block of queries."""
    for start in range(first, last, N):
        keys = start + tl.arange(0, N)
        key = _load(k, keys, tl.arange(0, PADDED), k_stride, length, WIDTH, PADDED, not DIAGONAL)
        content = _load(
            v, keys, tl.arange(0, CONTENT_PADDED), v_stride, length, CONTENT, CONTENT_PADDED, not DIAGONAL
        )
        seen_high, seen_low = keys, keys
        if TIMED:
            seen_high, seen_low = _time_of(seen, start, tl.arange(0, N), COMPILED)
        bias = _bias_of(
            above - start, inside[:, None], -tl.arange(0, N)[None, :],
            asked_high[:, None], asked_low[:, None], seen_high[None, :], seen_low[None, :],
            by_distance, by_time, FAR, TIMED, COMPILED,
        )
        half = 0.5 * tl.dot(query, tl.trans(key), input_precision=PRECISION) + bias
        of_weights = tl.dot(gradient, tl.trans(content), input_precision=PRECISION)
        of_scores = _times_slope(of_weights, half, _gate(half, FAST), FAST)
        if DIAGONAL:
            of_scores = tl.where((above + inside)[:, None] >= keys[None, :], of_scores, 0.0)
        total = tl.dot(of_scores.to(key.dtype), key, total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=_COUNTS)
def _query_gradient(
    q, k, v, out_gradient, q_gradient, splits, by_distance, by_time, parts, row,
    q_stride, k_stride, v_stride, out_stride, q_gradient_stride, sequences, heads, blocks, scale,
    WIDTH: tl.constexpr, CONTENT: tl.constexpr, PADDED: tl.constexpr, CONTENT_PADDED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, FAR: tl.constexpr, TIMED: tl.constexpr, FAST: tl.constexpr,
    COMPILED: tl.constexpr, PRECISION: tl.constexpr,
):
    item = tl.program_id(0)
    pair = item % (sequences * heads)
    begin = tl.load(splits + pair // heads)
    length = (tl.load(splits + pair // heads + 1) - begin).to(tl.int32)
    start = (blocks - 1 - item // (sequences * heads)) * M
    if start >= length:
        return
    head = pair % heads
    inside = tl.arange(0, M)
    rows = start + inside
    columns, content_columns = tl.arange(0, PADDED), tl.arange(0, CONTENT_PADDED)
    query = _load(q + begin * q_stride + head * WIDTH, rows, columns, q_stride, length, WIDTH, PADDED, False)
    gradient = _load(
        out_gradient + begin * out_stride + head * CONTENT, rows, content_columns, out_stride, length,
        CONTENT, CONTENT_PADDED, False,
    )
    k += begin * k_stride + head * WIDTH
    v += begin * v_stride + head * CONTENT
    asked_high, asked_low = rows, rows
    if TIMED:
        parts += 2 * begin
        asked_high, asked_low = _time_of(parts, start, inside, COMPILED)
    seen = parts + row
    total = tl.zeros([M, PADDED], tl.float32)
    total = _query_blocks(
        total, query, gradient, asked_high, asked_low, start, inside, k, v, seen, by_distance, by_time,
        k_stride, v_stride, length, 0, start,
        WIDTH, CONTENT, PADDED, CONTENT_PADDED, N, FAR, TIMED, False, FAST, COMPILED, PRECISION,
    )
    total = _query_blocks(
        total, query, gradient, asked_high, asked_low, start, inside, k, v, seen, by_distance, by_time,
        k_stride, v_stride, length, start, tl.minimum(start + M, length),
        WIDTH, CONTENT, PADDED, CONTENT_PADDED, N, FAR, TIMED, True, FAST, COMPILED, PRECISION,
    )
    _store(
        q_gradient + begin * q_gradient_stride + head * WIDTH, total * (0.5 * scale), rows, columns,
        q_gradient_stride, length, WIDTH,
    )


@triton.jit
def _key_blocks(
    of_key, of_content, key, content, seen_high, seen_low, below, inside, q, out_gradient, asked,
    by_distance, by_time, q_stride, out_stride, length, first, last,
    WIDTH: tl.constexpr, CONTENT: tl.constexpr, PADDED: tl.constexpr, CONTENT_PADDED: tl.constexpr,
    M: tl.constexpr, FAR: tl.constexpr, TIMED: tl.constexpr, DIAGONAL: tl.constexpr, FAST: tl.constexpr,
    COMPILED: tl.constexpr, PRECISION: tl.constexpr,
):
    """Add what blocks of queries from `first` to `last` give to the gradients of a block of keys.

    Tiles have a row for each key here: the products that sum over queries then need no transposed weights.
    """
    for start in range(first, last, M):
        rows = start + tl.arange(0, M)
        query = _load(q, rows, tl.arange(0, PADDED), q_stride, length, WIDTH, PADDED, False)
        gradient = _load(
            out_gradient, rows, tl.arange(0, CONTENT_PADDED), out_stride, length, CONTENT, CONTENT_PADDED,
            False
        )
        asked_high, asked_low = rows, rows
        if TIMED:
            asked_high, asked_low = _time_of(asked, start, tl.arange(0, M), COMPILED)
        bias = _bias_of(
            start - below, -inside[:, None], tl.arange(0, M)[None, :],
            asked_high[None, :], asked_low[None, :], seen_high[:, None], seen_low[:, None],
            by_distance, by_time, FAR, TIMED, COMPILED,
        )
        half = 0.5 * tl.dot(key, tl.trans(query), input_precision=PRECISION) + bias
        gate = _gate(half, FAST)
        weights = _silu(half, gate, FAST)
        if DIAGONAL:
            weights = tl.where(rows[None, :] >= (below + inside)[:, None], weights, 0.0)
        of_content = tl.dot(weights.to(gradient.dtype), gradient, of_content, input_precision=PRECISION)
        of_weights = tl.dot(content, tl.trans(gradient), input_precision=PRECISION)
        of_scores = _times_slope(of_weights, half, gate, FAST)
        if DIAGONAL:
            of_scores = tl.where(rows[None, :] >= (below + inside)[:, None], of_scores, 0.0)
        of_key = tl.dot(of_scores.to(query.dtype), query, of_key, input_precision=PRECISION)
    return of_key, of_content


@triton.jit(do_not_specialize=_COUNTS)
def _key_gradient(
    q, k, v, out_gradient, k_gradient, v_gradient, splits, by_distance, by_time, parts, row,
    q_stride, k_stride, v_stride, out_stride, k_gradient_stride, v_gradient_stride,
    sequences, heads, blocks, scale,
    WIDTH: tl.constexpr, CONTENT: tl.constexpr, PADDED: tl.constexpr, CONTENT_PADDED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, FAR: tl.constexpr, TIMED: tl.constexpr, FAST: tl.constexpr,
    COMPILED: tl.constexpr, PRECISION: tl.constexpr,
):
    item = tl.program_id(0)
    pair = item % (sequences * heads)
    begin = tl.load(splits + pair // heads)
    length = (tl.load(splits + pair // heads + 1) - begin).to(tl.int32)
    # The first block of keys has most queries: it comes first, whatever the length.
    start = (tl.cdiv(length, N) - blocks + item // (sequences * heads)) * N
    if start < 0:
        return
    head = pair % heads
    inside = tl.arange(0, N)
    keys = start + inside
    columns, content_columns = tl.arange(0, PADDED), tl.arange(0, CONTENT_PADDED)
    key = _load(k + begin * k_stride + head * WIDTH, keys, columns, k_stride, length, WIDTH, PADDED, False)
    content = _load(
        v + begin * v_stride + head * CONTENT, keys, content_columns, v_stride, length, CONTENT,
        CONTENT_PADDED, False,
    )
    q += begin * q_stride + head * WIDTH
    out_gradient += begin * out_stride + head * CONTENT
    seen_high, seen_low = keys, keys
    if TIMED:
        parts += 2 * begin
        seen_high, seen_low = _time_of(parts + row, start, inside, COMPILED)
    of_key = tl.zeros([N, PADDED], tl.float32)
    of_content = tl.zeros([N, CONTENT_PADDED], tl.float32)
    # N is a multiple of M: blocks of queries begin where the block of keys does.
    of_key, of_content = _key_blocks(
        of_key, of_content, key, content, seen_high, seen_low, start, inside, q, out_gradient, parts,
        by_distance, by_time, q_stride, out_stride, length, start, tl.minimum(start + N, length),
        WIDTH, CONTENT, PADDED, CONTENT_PADDED, M, FAR, TIMED, True, FAST, COMPILED, PRECISION,
    )
    of_key, of_content = _key_blocks(
        of_key, of_content, key, content, seen_high, seen_low, start, inside, q, out_gradient, parts,
        by_distance, by_time, q_stride, out_stride, length, start + N, length,
        WIDTH, CONTENT, PADDED, CONTENT_PADDED, M, FAR, TIMED, False, FAST, COMPILED, PRECISION,
    )
    _store(
        k_gradient + begin * k_gradient_stride + head * WIDTH, of_key * (0.5 * scale), keys, columns,
        k_gradient_stride, length, WIDTH,
    )
    _store(
        v_gradient + begin * v_gradient_stride + head * CONTENT, of_content * scale, keys, content_columns,
        v_gradient_stride, length, CONTENT,
    )


@triton.jit(do_not_specialize=_DIAGONAL_COUNTS)
def _bias_gradient(
    q, k, v, out_gradient, tiles, sums, buckets_of, splits, by_distance, by_time, parts, row,
    q_stride, k_stride, v_stride, out_stride, sequences, heads, shares, stripes,
    WIDTH: tl.constexpr, CONTENT: tl.constexpr, PADDED: tl.constexpr, CONTENT_PADDED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, FAR: tl.constexpr, TIMED: tl.constexpr,
    BUCKETS_PADDED: tl.constexpr, FAST: tl.constexpr, COMPILED: tl.constexpr, PRECISION: tl.constexpr,
):
    """Sum the gradients of scores, by distance and by time, over one share of all blocks of a diagonal.

    A program has one block diagonal: for each M queries, the N keys that lie `apart` from them. All its tiles
    have the same distances in the same places, so that they are added as they are: `tiles` of shape
    (diagonals, shares, M, N). Times have no such order: for each bucket between the smallest and the largest
    one in a tile, those in that bucket are added up. Neither depends on the head: heads are summed first.
    """
    # Programs of the first diagonals have most tiles, and start first.
    share = tl.program_id(0) % shares
    diagonal = tl.program_id(0) // shares
    inside, across = tl.arange(0, M), tl.arange(0, N)
    columns, content_columns = tl.arange(0, PADDED), tl.arange(0, CONTENT_PADDED)
    bins = tl.arange(0, BUCKETS_PADDED)
    # The last query of a block on the first diagonal sees the last key.
    behind = (diagonal + 1) * N - M
    total = tl.zeros([M, N], tl.float32)
    by_bucket = tl.zeros([BUCKETS_PADDED], tl.float32)
    for sequence in range(share // stripes, sequences, tl.cdiv(shares, stripes)):
        begin = tl.load(splits + sequence)
        length = (tl.load(splits + sequence + 1) - begin).to(tl.int32)
        for start in range((diagonal * N // M + share % stripes) * M, length, M * stripes):
            rows = start + inside
            keys = start - behind + across
            asked_high, asked_low, seen_high, seen_low = rows, rows, keys, keys
            if TIMED:
                asked_high, asked_low = _time_of(parts + 2 * begin, start, inside, COMPILED)
                seen_high, seen_low = _time_of(parts + row + 2 * begin, start - behind, across, COMPILED)
            bias = _bias_of(
                behind, inside[:, None], -across[None, :],
                asked_high[:, None], asked_low[:, None], seen_high[None, :], seen_low[None, :],
                by_distance, by_time, FAR, TIMED, COMPILED,
            )
            of_scores = tl.zeros([M, N], tl.float32)
            for head in range(heads):
                query = _load(
                    q + begin * q_stride + head * WIDTH, rows, columns, q_stride, length, WIDTH, PADDED,
                    False
                )
                key = _load_from_first(
                    k + begin * k_stride + head * WIDTH, keys, columns, k_stride, length, WIDTH
                )
                half = 0.5 * tl.dot(query, tl.trans(key), input_precision=PRECISION) + bias
                gradient = _load(
                    out_gradient + begin * out_stride + head * CONTENT, rows, content_columns, out_stride,
                    length, CONTENT, CONTENT_PADDED, False,
                )
                content = _load_from_first(
                    v + begin * v_stride + head * CONTENT, keys, content_columns, v_stride, length, CONTENT
                )
                of_weights = tl.dot(gradient, tl.trans(content), input_precision=PRECISION)
                of_scores += _times_slope(of_weights, half, _gate(half, FAST), FAST)
            # Zero outside the sequence: there the gradient of the result is, or the content.
            of_scores = tl.where(behind + inside[:, None] >= across[None, :], of_scores, 0.0)
            total += of_scores
            if TIMED:
                gaps = (asked_high[:, None] - seen_high[None, :]) + (asked_low[:, None] - seen_low[None, :])
                buckets = _of_gaps(buckets_of, gaps, COMPILED)
                # The smallest and the largest gap, rounded as any. Float64 has all times, and few of them.
                asked_at, seen_at = _whole(asked_high, asked_low), _whole(seen_high, seen_low)
                behind_all, before_all = float("inf"), float("-inf")
                asking, seeable = rows < length, (keys >= 0) & (keys < length)
                least = tl.min(tl.where(asking, asked_at, behind_all), 0)
                least -= tl.max(tl.where(seeable, seen_at, before_all), 0)
                most = tl.max(tl.where(asking, asked_at, before_all), 0)
                most -= tl.min(tl.where(seeable, seen_at, behind_all), 0)
                first = _of_gaps(buckets_of, least.to(tl.float32), False).to(tl.int32)
                last = _of_gaps(buckets_of, most.to(tl.float32), False).to(tl.int32)
                for bucket in range(first, last + 1):
                    found = tl.sum(tl.sum(tl.where(buckets == bucket, of_scores, 0.0), 1), 0)
                    by_bucket += tl.where(bins == bucket, found, 0.0)
    place = diagonal * shares + share
    tl.store(tiles + place.to(tl.int64) * M * N + inside[:, None] * N + across[None, :], total)
    if TIMED:
        tl.store(sums + place * BUCKETS_PADDED + bins, by_bucket)


# Softmax


@triton.jit
def _kept(seed, pair, rows, keys, length, dropout):
    """Return by what weights are multiplied: 0 for those that are dropped, the same ones in backward."""
    drawn = tl.rand(tl.load(seed) + pair, rows * length + keys)
    return tl.where(drawn < dropout, 0.0, 1.0 / (1.0 - dropout))


@triton.jit(do_not_specialize=_COUNTS)
def _softmax_forward(
    q, k, v, out, normalizers, splits, seed,
    q_stride, k_stride, v_stride, out_stride, sequences, heads, blocks, scale, dropout,
    WIDTH: tl.constexpr, CONTENT: tl.constexpr, PADDED: tl.constexpr, CONTENT_PADDED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):
    item = tl.program_id(0)
    pair = item % (sequences * heads)
    begin = tl.load(splits + pair // heads)
    length = (tl.load(splits + pair // heads + 1) - begin).to(tl.int32)
    start = (blocks - 1 - item // (sequences * heads)) * M
    if start >= length:
        return
    head = pair % heads
    rows = start + tl.arange(0, M)
    columns, content_columns = tl.arange(0, PADDED), tl.arange(0, CONTENT_PADDED)
    query = _load(q + begin * q_stride + head * WIDTH, rows, columns, q_stride, length, WIDTH, PADDED, False)
    k += begin * k_stride + head * WIDTH
    v += begin * v_stride + head * CONTENT
    total = tl.zeros([M, CONTENT_PADDED], tl.float32)
    most = tl.full([M], float("-inf"), tl.float32)
    below = tl.zeros([M], tl.float32)
    for first in range(0, tl.minimum(start + M, length), N):
        keys = first + tl.arange(0, N)
        key = _load(k, keys, columns, k_stride, length, WIDTH, PADDED, False)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (scale * LOG2_E)
        scores = tl.where(rows[:, None] >= keys[None, :], scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))  # of the first block, every row sees the first key
        shrunk = tl.exp2(most - higher)
        weights = tl.exp2(scores - higher[:, None])
        below = below * shrunk + tl.sum(weights, 1)
        if DROPS:
            weights *= _kept(seed, pair, rows[:, None], keys[None, :], length, dropout)
        content = _load(v, keys, content_columns, v_stride, length, CONTENT, CONTENT_PADDED, False)
        total = tl.dot(
            weights.to(content.dtype), content, total * shrunk[:, None], input_precision=PRECISION
        )
        most = higher
    tl.store(normalizers + (begin + rows) * heads + head, most + tl.log2(below), mask=rows < length)
    _store(
        out + begin * out_stride + head * CONTENT, total / below[:, None], rows, content_columns, out_stride,
        length, CONTENT,
    )


@triton.jit(do_not_specialize=_COUNTS)
def _softmax_query_gradient(
    q, k, v, out_gradient, q_gradient, normalizers, deltas, splits, seed,
    q_stride, k_stride, v_stride, out_stride, q_gradient_stride, sequences, heads, blocks, scale, dropout,
    WIDTH: tl.constexpr, CONTENT: tl.constexpr, PADDED: tl.constexpr, CONTENT_PADDED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):
    item = tl.program_id(0)
    pair = item % (sequences * heads)
    begin = tl.load(splits + pair // heads)
    length = (tl.load(splits + pair // heads + 1) - begin).to(tl.int32)
    start = (blocks - 1 - item // (sequences * heads)) * M
    if start >= length:
        return
    head = pair % heads
    rows = start + tl.arange(0, M)
    columns, content_columns = tl.arange(0, PADDED), tl.arange(0, CONTENT_PADDED)
    query = _load(q + begin * q_stride + head * WIDTH, rows, columns, q_stride, length, WIDTH, PADDED, False)
    gradient = _load(
        out_gradient + begin * out_stride + head * CONTENT, rows, content_columns, out_stride, length,
        CONTENT,
        CONTENT_PADDED, False,
    )
    normalizer = tl.load(normalizers + (begin + rows) * heads + head, mask=rows < length, other=0.0)
    delta = tl.load(deltas + (begin + rows) * heads + head, mask=rows < length, other=0.0)
    k += begin * k_stride + head * WIDTH
    v += begin * v_stride + head * CONTENT
    total = tl.zeros([M, PADDED], tl.float32)
    for first in range(0, tl.minimum(start + M, length), N):
        keys = first + tl.arange(0, N)
        key = _load(k, keys, columns, k_stride, length, WIDTH, PADDED, False)
        content = _load(v, keys, content_columns, v_stride, length, CONTENT, CONTENT_PADDED, False)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (scale * LOG2_E)
        seen = rows[:, None] >= keys[None, :]
        weights = tl.where(seen, tl.exp2(scores - normalizer[:, None]), 0.0)
        of_weights = tl.dot(gradient, tl.trans(content), input_precision=PRECISION)
        if DROPS:
            of_weights *= _kept(seed, pair, rows[:, None], keys[None, :], length, dropout)
        of_scores = weights * (of_weights - delta[:, None])
        total = tl.dot(of_scores.to(key.dtype), key, total, input_precision=PRECISION)
    _store(
        q_gradient + begin * q_gradient_stride + head * WIDTH, total * scale, rows, columns,
        q_gradient_stride, length, WIDTH,
    )


@triton.jit(do_not_specialize=_COUNTS)
def _softmax_key_gradient(
    q, k, v, out_gradient, k_gradient, v_gradient, normalizers, deltas, splits, seed,
    q_stride, k_stride, v_stride, out_stride, k_gradient_stride, v_gradient_stride,
    sequences, heads, blocks, scale, dropout,
    WIDTH: tl.constexpr, CONTENT: tl.constexpr, PADDED: tl.constexpr, CONTENT_PADDED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):
    item = tl.program_id(0)
    pair = item % (sequences * heads)
    begin = tl.load(splits + pair // heads)
    length = (tl.load(splits + pair // heads + 1) - begin).to(tl.int32)
    start = (tl.cdiv(length, N) - blocks + item // (sequences * heads)) * N
    if start < 0:
        return
    head = pair % heads
    keys = start + tl.arange(0, N)
    columns, content_columns = tl.arange(0, PADDED), tl.arange(0, CONTENT_PADDED)
    key = _load(k + begin * k_stride + head * WIDTH, keys, columns, k_stride, length, WIDTH, PADDED, False)
    content = _load(
        v + begin * v_stride + head * CONTENT, keys, content_columns, v_stride, length, CONTENT,
        CONTENT_PADDED, False,
    )
    q += begin * q_stride + head * WIDTH
    out_gradient += begin * out_stride + head * CONTENT
    of_key = tl.zeros([N, PADDED], tl.float32)
    of_content = tl.zeros([N, CONTENT_PADDED], tl.float32)
    for first in range(start, length, M):
        rows = first + tl.arange(0, M)
        query = _load(q, rows, columns, q_stride, length, WIDTH, PADDED, False)
        gradient = _load(
            out_gradient, rows, content_columns, out_stride, length, CONTENT, CONTENT_PADDED, False
        )
        normalizer = tl.load(normalizers + (begin + rows) * heads + head, mask=rows < length, other=0.0)
        delta = tl.load(deltas + (begin + rows) * heads + head, mask=rows < length, other=0.0)
        scores = tl.dot(key, tl.trans(query), input_precision=PRECISION) * (scale * LOG2_E)
        # Weights of rows behind the sequence would be those of zeros.
        seen = (rows[None, :] >= keys[:, None]) & (rows[None, :] < length)
        weights = tl.where(seen, tl.exp2(scores - normalizer[None, :]), 0.0)
        of_weights = tl.dot(content, tl.trans(gradient), input_precision=PRECISION)
        dropped = weights
        if DROPS:
            kept = _kept(seed, pair, rows[None, :], keys[:, None], length, dropout)
            dropped = weights * kept
            of_weights *= kept
        of_content = tl.dot(dropped.to(gradient.dtype), gradient, of_content, input_precision=PRECISION)
        of_scores = weights * (of_weights - delta[None, :])
        of_key = tl.dot(of_scores.to(query.dtype), query, of_key, input_precision=PRECISION)
    _store(
        k_gradient + begin * k_gradient_stride + head * WIDTH, of_key * scale, keys, columns,
        k_gradient_stride, length, WIDTH,
    )
    _store(
        v_gradient + begin * v_gradient_stride + head * CONTENT, of_content, keys, content_columns,
        v_gradient_stride, length, CONTENT,
    )


# fmt: on


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a kernel cuts its triangle."""

    queries: int
    keys: int
    warps: int
    stages: int


_SIXTEEN_BITS = {
    "forward": {64: Blocks(128, 32, 4, 3), 128: Blocks(128, 32, 4, 3), 256: Blocks(64, 32, 4, 2)},
    "query": {64: Blocks(64, 32, 4, 3), 128: Blocks(64, 64, 4, 2), 256: Blocks(64, 32, 4, 2)},
    "key": {64: Blocks(32, 64, 4, 3), 128: Blocks(32, 64, 4, 3), 256: Blocks(32, 64, 8, 2)},
    "bias": {64: Blocks(64, 64, 8, 3), 128: Blocks(64, 64, 8, 3), 256: Blocks(64, 64, 8, 1)},
}
_FLOAT32 = {
    "forward": {64: Blocks(32, 32, 4, 2), 128: Blocks(32, 32, 4, 2), 256: Blocks(32, 16, 8, 1)},
    "query": {64: Blocks(32, 32, 4, 2), 128: Blocks(32, 32, 4, 1), 256: Blocks(32, 16, 8, 1)},
    "key": {64: Blocks(32, 32, 4, 2), 128: Blocks(32, 32, 4, 1), 256: Blocks(16, 16, 8, 1)},
    "bias": {64: Blocks(32, 32, 4, 2), 128: Blocks(32, 32, 4, 1), 256: Blocks(32, 32, 8, 1)},
}
"""By kernel, and by the larger of the padded widths of a head, up to."""
_LARGEST_BLOCK = 128


def blocks_of(kernel: str, dtype: torch.dtype, widest: int) -> Blocks:
    """Return how a kernel cuts its triangle for heads of a width."""
    by_width = (_FLOAT32 if dtype is torch.float32 else _SIXTEEN_BITS)[kernel]
    return by_width[next(width for width in by_width if widest <= width)]


def _padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


@dataclass(frozen=True, slots=True, eq=False)
class JaggedSteps:
    """Where steps are, and when they happened; see `jagged_attention`."""

    row_splits: Tensor
    max_length: int
    buckets: Tensor | None = None
    """As `bucket_table` returns it, if times count."""
    times: Tensor | None = None
    asked: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Bias:
    """What kernels read to find the bias of a pair; absent tensors are never read."""

    tensors: tuple[Tensor | int, ...]
    """Row splits, half of the biases by distance and by the upper bits of gaps, and `parts` and `row` as of
    `_split_times`."""
    table: Tensor
    """As `JaggedSteps.buckets`."""
    far: bool
    """Whether there is a bias by distance."""
    buckets: int
    """Of the bias by time; 0 if there is none."""

    @classmethod
    def of(cls, by_distance: Tensor | None, by_time: Tensor | None, steps: JaggedSteps) -> _Bias:
        splits = steps.row_splits
        far = timed = parts = table = splits
        row = buckets = 0
        if by_distance is not None:
            around = (_LARGEST_BLOCK, 2 * _LARGEST_BLOCK)
            far = torch.nn.functional.pad(by_distance.float() * 0.5, around)[_LARGEST_BLOCK:]
        if by_time is not None:
            assert steps.buckets is not None
            assert steps.times is not None
            assert steps.asked is not None
            table, buckets = steps.buckets, by_time.shape[0]
            timed = (by_time.float() * 0.5).index_select(0, table)
            # Zeros behind a sequence: a block that reaches there reads numbers.
            row = (2 * (steps.times.shape[0] + _LARGEST_BLOCK) + 15) // 16 * 16
            parts = timed.new_zeros(2 * row)
            sequences, block = splits.shape[0] - 1, 512
            if sequences:
                _split_times[(sequences * triton.cdiv(steps.max_length, block),)](
                    steps.times.contiguous(), steps.asked.contiguous(), parts, splits, sequences, row,
                    BLOCK=block,
                )  # fmt: skip
        return cls((splits, far, timed, parts, row), table, by_distance is not None, buckets)


class JaggedSilu(torch.autograd.Function):
    """`hstu_attention`, which has the arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        content: Tensor,
        by_distance: Tensor | None,
        by_time: Tensor | None,
        steps: JaggedSteps,
    ) -> Tensor:
        query, key, content = _as_rows(query), _as_rows(key), _as_rows(content)
        launch = _Launch(query, content, steps)
        bias = _Bias.of(by_distance, by_time, steps)
        blocks = launch.blocks("forward")
        out = content.new_zeros(content.shape)
        _forward[launch.grid(blocks.queries)](
            query, key, content, out, *bias.tensors, *_strides(query, key, content, out),
            *launch.sizes(blocks.queries), 1.0 / steps.max_length, **launch.silu_constants(blocks, bias),
        )  # fmt: skip
        ctx.steps, ctx.bias = steps, bias
        ctx.dtypes = [None if one is None else one.dtype for one in (by_distance, by_time)]
        ctx.save_for_backward(query, key, content)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, content = ctx.saved_tensors
        launch, bias = _Launch(query, content, ctx.steps), ctx.bias
        inputs = (query, key, content, _as_rows(gradient))
        scale = 1.0 / ctx.steps.max_length
        of_query = of_key = of_content = of_distance = of_time = None
        if ctx.needs_input_grad[0]:
            of_query = query.new_zeros(query.shape)
            blocks = launch.blocks("query")
            _query_gradient[launch.grid(blocks.queries)](
                *inputs, of_query, *bias.tensors, *_strides(*inputs, of_query),
                *launch.sizes(blocks.queries), scale, **launch.silu_constants(blocks, bias),
            )  # fmt: skip
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            of_key, of_content = key.new_zeros(key.shape), content.new_zeros(content.shape)
            blocks = launch.blocks("key")
            _key_gradient[launch.grid(blocks.keys)](
                *inputs, of_key, of_content, *bias.tensors, *_strides(*inputs, of_key, of_content),
                *launch.sizes(blocks.keys), scale, **launch.silu_constants(blocks, bias),
            )  # fmt: skip
        if ctx.needs_input_grad[3] or ctx.needs_input_grad[4]:
            found = _bias_gradients(launch, inputs, bias)
            of_distance, of_time = (
                None if dtype is None else (one * (0.5 * scale)).to(dtype)
                for one, dtype in zip(found, ctx.dtypes, strict=True)
            )
        return of_query, of_key, of_content, of_distance, of_time, None


class JaggedSoftmax(torch.autograd.Function):
    """`softmax_attention`, which has the arguments."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, content: Tensor, steps: JaggedSteps, dropout: float
    ) -> Tensor:
        query, key, content = _as_rows(query), _as_rows(key), _as_rows(content)
        launch = _Launch(query, content, steps)
        blocks = launch.blocks("forward")
        out = content.new_zeros(content.shape)
        normalizers = query.new_empty(query.shape[:2], dtype=torch.float32)
        # Drawn on the device by torch's generator: a seed reproduces it, and a CUDA graph draws a new one.
        seed = torch.randint(2**62, (1,), device=query.device) if dropout else steps.row_splits
        _softmax_forward[launch.grid(blocks.queries)](
            query, key, content, out, normalizers, steps.row_splits, seed, *_strides(query, key, content,
            out),
            *launch.sizes(blocks.queries)[:3], query.shape[2] ** -0.5, dropout,
            **launch.constants(blocks), DROPS=dropout > 0,
        )  # fmt: skip
        ctx.steps, ctx.dropout = steps, dropout
        ctx.save_for_backward(query, key, content, out, normalizers, seed)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, content, out, normalizers, seed = ctx.saved_tensors
        launch = _Launch(query, content, ctx.steps)
        inputs = (query, key, content, _as_rows(gradient))
        deltas = (gradient.float() * out.float()).sum(2)
        shared = (normalizers, deltas, ctx.steps.row_splits, seed)
        scales = (query.shape[2] ** -0.5, ctx.dropout)
        of_query, of_key = query.new_zeros(query.shape), key.new_zeros(key.shape)
        of_content = content.new_zeros(content.shape)
        blocks = launch.blocks("query")
        _softmax_query_gradient[launch.grid(blocks.queries)](
            *inputs, of_query, *shared, *_strides(*inputs, of_query), *launch.sizes(blocks.queries)[:3],
            *scales,
            **launch.constants(blocks), DROPS=ctx.dropout > 0,
        )  # fmt: skip
        blocks = launch.blocks("key")
        _softmax_key_gradient[launch.grid(blocks.keys)](
            *inputs, of_key, of_content, *shared, *_strides(*inputs, of_key, of_content),
            *launch.sizes(blocks.keys)[:3], *scales, **launch.constants(blocks), DROPS=ctx.dropout > 0,
        )  # fmt: skip
        return of_query, of_key, of_content, None, None


class _Launch:
    """Arguments that kernels have in common."""

    def __init__(self, query: Tensor, content: Tensor, steps: JaggedSteps) -> None:
        self.heads, self.width = query.shape[1:]
        self.content_width = content.shape[2]
        self.sequences = steps.row_splits.shape[0] - 1
        self.max_length = steps.max_length
        self.dtype = query.dtype

    def blocks(self, kernel: str) -> Blocks:
        return blocks_of(kernel, self.dtype, max(_padded(self.width), _padded(self.content_width)))

    def grid(self, size: int) -> tuple[int]:
        return (triton.cdiv(self.max_length, size) * self.sequences * self.heads,)

    def sizes(self, size: int) -> tuple[int, ...]:
        return self.sequences, self.heads, triton.cdiv(self.max_length, size)

    def constants(self, blocks: Blocks) -> dict[str, Any]:
        return {
            "WIDTH": self.width,
            "CONTENT": self.content_width,
            "PADDED": _padded(self.width),
            "CONTENT_PADDED": _padded(self.content_width),
            "M": blocks.queries,
            "N": blocks.keys,
            # As torch multiplies float32.
            "PRECISION": "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee",
            "num_warps": blocks.warps,
            "num_stages": blocks.stages,
        }

    def silu_constants(self, blocks: Blocks, bias: _Bias) -> dict[str, Any]:
        # An error of 2 ** -11 is less than what bfloat16 rounds off.
        fast = {torch.bfloat16: 2, torch.float16: 1}.get(self.dtype, 0)
        return {
            **self.constants(blocks),
            "FAR": bias.far,
            "TIMED": bias.buckets > 0,
            "FAST": fast if _COMPILED else 0,
            "COMPILED": _COMPILED,
        }


def _bias_gradients(launch: _Launch, inputs: tuple[Tensor, ...], bias: _Bias) -> tuple[Tensor, Tensor]:
    """Return twice the gradients of `by_distance` and `by_time`, before they are divided by `max_length`."""
    blocks = launch.blocks("bias")
    rows, keys = blocks.queries, blocks.keys
    diagonals = triton.cdiv(triton.cdiv(launch.max_length, rows) * rows, keys)
    # Enough programs for a large GPU, whichever one this is: results are then the same on all. Several take
    # turns in the blocks of a diagonal: sequences may be few, and one may have most of the blocks.
    wanted, positions = triton.cdiv(1024, max(1, diagonals)), triton.cdiv(launch.max_length, rows)
    stripes = max(triton.cdiv(wanted, max(1, launch.sequences)), min(8, wanted, positions // 4))
    stripes = max(1, min(stripes, positions))
    shares = stripes * max(1, min(launch.sequences, triton.cdiv(wanted, stripes)))
    padded = _padded(max(1, bias.buckets))
    tiles = inputs[0].new_empty((diagonals, shares, rows, keys), dtype=torch.float32)
    sums = inputs[0].new_empty((diagonals, shares, padded), dtype=torch.float32)
    _bias_gradient[(diagonals * shares,)](
        *inputs, tiles, sums, bias.table.float(), *bias.tensors, *_strides(*inputs), launch.sequences,
        launch.heads, shares, stripes, **launch.silu_constants(blocks, bias), BUCKETS_PADDED=padded,
    )  # fmt: skip
    by_distance = sums_by_distance(tiles.sum(1), launch.max_length)
    return by_distance, (sums.sum((0, 1)) if bias.buckets else sums.new_zeros(padded))[: bias.buckets]


def sums_by_distance(tiles: Tensor, max_length: int) -> Tensor:
    """Return the sums of what blocks on diagonals have at each distance.

    Args:
        tiles: Of shape (diagonals, rows, keys). Row i and column j of diagonal d are
            `(d + 1) * keys - rows + i - j` steps apart.
    """
    rows, keys = tiles.shape[1:]
    # In a row of a tile, the distance falls from left to right. Flipped, and shifted by its number, each row
    # has a distance in the same column: `d * keys - rows + 1 + column`.
    flipped = torch.nn.functional.pad(tiles.flip(2), (0, rows))
    columns = rows + keys - 1
    shifted = flipped.flatten(1)[:, :-rows].unflatten(1, (rows, columns)).sum(1)
    # These columns reach into those of the next diagonals.
    parts = triton.cdiv(columns, keys)
    pieces = torch.nn.functional.pad(shifted, (0, parts * keys - columns)).unflatten(1, (parts, keys))
    found = torch.nn.functional.pad(pieces[:, 0], (0, 0, 0, parts - 1))
    for part in range(1, parts):
        found[part : part + len(pieces)] += pieces[:, part]
    return found.flatten()[rows - 1 : rows - 1 + max_length]


def _as_rows(tensor: Tensor) -> Tensor:
    """Return a tensor of shape (n, heads, width) with all floats of a step next to each other."""
    return tensor if tensor.stride()[1:] == (tensor.shape[2], 1) else tensor.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    return [one.stride(0) for one in tensors]
