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

# fmt: off
LOG2_TO_BUCKET = tl.constexpr(0.6931471805599453 / 0.301)
LOG2_E = tl.constexpr(1.4426950408889634)
_COUNTS = ("sequences", "heads", "blocks")
_DIAGONAL_COUNTS = ("pairs", "heads", "shares")
"""Triton would compile a kernel again for counts that are 1 or a multiple of 16."""


@triton.jit
def _bucket_near(gap, buckets, slack: tl.constexpr):
    """Return the time bucket of a gap, or a neighbour if it is within `slack` of a bucket from that."""
    found = tl.log2(tl.maximum(gap, 1).to(tl.float32)) * LOG2_TO_BUCKET + slack
    return tl.minimum(tl.maximum(found.to(tl.int32), 0), buckets - 1)


@triton.jit
def _biased(
    scores, apart, asked_at, seen, by_distance, by_time, bounds, buckets,
    FAR: tl.constexpr, TIMED: tl.constexpr, FLIPPED: tl.constexpr,
):
    """Return scores with the biases of pairs that are `apart` steps from each other.

    `by_distance` has room on both sides, since a block reaches above the diagonal and beyond `max_length`.

    The gaps of a block of pairs are in few buckets, one or two if it is far from the diagonal: going through
    them takes less time than to find the bucket of each pair, and a table of integers makes it exact.
    """
    if FAR:
        scores += tl.load(by_distance + apart)
    if TIMED:
        # The logarithm is off by far less than 1/1000 of a bucket.
        first = _bucket_near(tl.min(asked_at, 0) - tl.max(seen, 0), buckets, -0.001)
        last = _bucket_near(tl.max(asked_at, 0) - tl.min(seen, 0), buckets, 0.001)
        bias = tl.zeros_like(scores) + tl.load(by_time + first)
        if last > first:
            for bucket in range(first + 1, last + 1):
                reached = asked_at - tl.load(bounds + bucket)
                if FLIPPED:
                    bias = tl.where(reached[None, :] >= seen[:, None], tl.load(by_time + bucket), bias)
                else:
                    bias = tl.where(reached[:, None] >= seen[None, :], tl.load(by_time + bucket), bias)
        scores += bias
    return scores


@triton.jit
def _sigmoid(x, FAST: tl.constexpr):
    if FAST == 2:
        half = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x * 0.5], tl.float32, True, 1)
        return half * 0.5 + 0.5
    if FAST == 1:
        above = 1.0 + tl.exp2(-LOG2_E * x)
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [above], tl.float32, True, 1)
    return 1.0 / (1.0 + tl.exp2(-LOG2_E * x))


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
def _store(base, values, rows, columns, stride, length, WIDTH: tl.constexpr):
    places = base + rows[:, None] * stride + columns[None, :]
    mask = (rows[:, None] < length) & (columns[None, :] < WIDTH)
    tl.store(places, values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _forward_blocks(
    total, query, asked_at, rows, k, v, times, by_distance, by_time, bounds,
    k_stride, v_stride, length, first, last, buckets,
    WIDTH: tl.constexpr, CONTENT: tl.constexpr, PADDED: tl.constexpr, CONTENT_PADDED: tl.constexpr,
    N: tl.constexpr, FAR: tl.constexpr, TIMED: tl.constexpr, DIAGONAL: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add what blocks of keys from `first` to `last` give to a block of queries."""
    for start in range(first, last, N):
        keys = start + tl.arange(0, N)
        key = _load(k, keys, tl.arange(0, PADDED), k_stride, length, WIDTH, PADDED, not DIAGONAL)
        apart = rows[:, None] - keys[None, :]
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        seen = keys
        if TIMED:
            seen = tl.load(times + tl.minimum(keys, length - 1))
        scores = _biased(
            scores, apart, asked_at, seen, by_distance, by_time, bounds, buckets, FAR, TIMED, False
        )
        weights = scores * _sigmoid(scores, FAST)
        if DIAGONAL:
            weights = tl.where(apart >= 0, weights, 0.0)
        content = _load(
            v, keys, tl.arange(0, CONTENT_PADDED), v_stride, length, CONTENT, CONTENT_PADDED, not DIAGONAL
        )
        total = tl.dot(weights.to(content.dtype), content, total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=_COUNTS)
def _forward(
    q, k, v, out, splits, by_distance, by_time, bounds, times, asked,
    q_stride, k_stride, v_stride, out_stride, sequences, heads, blocks, buckets, scale,
    WIDTH: tl.constexpr, CONTENT: tl.constexpr, PADDED: tl.constexpr, CONTENT_PADDED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, FAR: tl.constexpr, TIMED: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
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
    query = _load(
        q + begin * q_stride + head * WIDTH, rows, tl.arange(0, PADDED), q_stride, length, WIDTH, PADDED,
        False
    )
    k += begin * k_stride + head * WIDTH
    v += begin * v_stride + head * CONTENT
    asked_at = rows
    if TIMED:
        times += begin
        asked_at = tl.load(asked + begin + tl.minimum(rows, length - 1))
    total = tl.zeros([M, CONTENT_PADDED], tl.float32)
    total = _forward_blocks(
        total, query, asked_at, rows, k, v, times, by_distance, by_time, bounds,
        k_stride, v_stride, length, 0, start, buckets,
        WIDTH, CONTENT, PADDED, CONTENT_PADDED, N, FAR, TIMED, False, FAST, PRECISION,
    )
    total = _forward_blocks(
        total, query, asked_at, rows, k, v, times, by_distance, by_time, bounds,
        k_stride, v_stride, length, start, tl.minimum(start + M, length), buckets,
        WIDTH, CONTENT, PADDED, CONTENT_PADDED, N, FAR, TIMED, True, FAST, PRECISION,
    )
    _store(
        out + begin * out_stride + head * CONTENT, total * scale, rows, tl.arange(0, CONTENT_PADDED),
        out_stride,
        length, CONTENT,
    )


@triton.jit
def _query_blocks(
    total, query, gradient, asked_at, rows, k, v, times, by_distance, by_time, bounds,
    k_stride, v_stride, length, first, last, buckets,
    WIDTH: tl.constexpr, CONTENT: tl.constexpr, PADDED: tl.constexpr, CONTENT_PADDED: tl.constexpr,
    N: tl.constexpr, FAR: tl.constexpr, TIMED: tl.constexpr, DIAGONAL: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add what blocks of keys from `first` to `last` give to the gradient of a block of queries."""
    for start in range(first, last, N):
        keys = start + tl.arange(0, N)
        key = _load(k, keys, tl.arange(0, PADDED), k_stride, length, WIDTH, PADDED, not DIAGONAL)
        content = _load(
            v, keys, tl.arange(0, CONTENT_PADDED), v_stride, length, CONTENT, CONTENT_PADDED, not DIAGONAL
        )
        apart = rows[:, None] - keys[None, :]
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        seen = keys
        if TIMED:
            seen = tl.load(times + tl.minimum(keys, length - 1))
        scores = _biased(
            scores, apart, asked_at, seen, by_distance, by_time, bounds, buckets, FAR, TIMED, False
        )
        of_weights = tl.dot(gradient, tl.trans(content), input_precision=PRECISION)
        share = _sigmoid(scores, FAST)
        of_scores = of_weights * share * (1.0 + scores * (1.0 - share))
        if DIAGONAL:
            of_scores = tl.where(apart >= 0, of_scores, 0.0)
        total = tl.dot(of_scores.to(key.dtype), key, total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=_COUNTS)
def _query_gradient(
    q, k, v, out_gradient, q_gradient, splits, by_distance, by_time, bounds, times, asked,
    q_stride, k_stride, v_stride, out_stride, q_gradient_stride, sequences, heads, blocks, buckets, scale,
    WIDTH: tl.constexpr, CONTENT: tl.constexpr, PADDED: tl.constexpr, CONTENT_PADDED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, FAR: tl.constexpr, TIMED: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
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
    k += begin * k_stride + head * WIDTH
    v += begin * v_stride + head * CONTENT
    asked_at = rows
    if TIMED:
        times += begin
        asked_at = tl.load(asked + begin + tl.minimum(rows, length - 1))
    total = tl.zeros([M, PADDED], tl.float32)
    total = _query_blocks(
        total, query, gradient, asked_at, rows, k, v, times, by_distance, by_time, bounds,
        k_stride, v_stride, length, 0, start, buckets,
        WIDTH, CONTENT, PADDED, CONTENT_PADDED, N, FAR, TIMED, False, FAST, PRECISION,
    )
    total = _query_blocks(
        total, query, gradient, asked_at, rows, k, v, times, by_distance, by_time, bounds,
        k_stride, v_stride, length, start, tl.minimum(start + M, length), buckets,
        WIDTH, CONTENT, PADDED, CONTENT_PADDED, N, FAR, TIMED, True, FAST, PRECISION,
    )
    _store(
        q_gradient + begin * q_gradient_stride + head * WIDTH, total * scale, rows, columns,
        q_gradient_stride,
        length, WIDTH,
    )


@triton.jit
def _key_blocks(
    of_key, of_content, key, content, seen, keys, q, out_gradient, asked, by_distance, by_time, bounds,
    q_stride, out_stride, length, first, last, buckets,
    WIDTH: tl.constexpr, CONTENT: tl.constexpr, PADDED: tl.constexpr, CONTENT_PADDED: tl.constexpr,
    M: tl.constexpr, FAR: tl.constexpr, TIMED: tl.constexpr, DIAGONAL: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
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
        apart = rows[None, :] - keys[:, None]
        scores = tl.dot(key, tl.trans(query), input_precision=PRECISION)
        asked_at = rows
        if TIMED:
            asked_at = tl.load(asked + tl.minimum(rows, length - 1))
        scores = _biased(
            scores, apart, asked_at, seen, by_distance, by_time, bounds, buckets, FAR, TIMED, True
        )
        share = _sigmoid(scores, FAST)
        weights = scores * share
        if DIAGONAL:
            weights = tl.where(apart >= 0, weights, 0.0)
        of_content = tl.dot(weights.to(gradient.dtype), gradient, of_content, input_precision=PRECISION)
        of_weights = tl.dot(content, tl.trans(gradient), input_precision=PRECISION)
        of_scores = of_weights * share * (1.0 + scores * (1.0 - share))
        if DIAGONAL:
            of_scores = tl.where(apart >= 0, of_scores, 0.0)
        of_key = tl.dot(of_scores.to(query.dtype), query, of_key, input_precision=PRECISION)
    return of_key, of_content


@triton.jit(do_not_specialize=_COUNTS)
def _key_gradient(
    q, k, v, out_gradient, k_gradient, v_gradient, splits, by_distance, by_time, bounds, times, asked,
    q_stride, k_stride, v_stride, out_stride, k_gradient_stride, v_gradient_stride,
    sequences, heads, blocks, buckets, scale,
    WIDTH: tl.constexpr, CONTENT: tl.constexpr, PADDED: tl.constexpr, CONTENT_PADDED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, FAR: tl.constexpr, TIMED: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
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
    keys = start + tl.arange(0, N)
    columns, content_columns = tl.arange(0, PADDED), tl.arange(0, CONTENT_PADDED)
    key = _load(k + begin * k_stride + head * WIDTH, keys, columns, k_stride, length, WIDTH, PADDED, False)
    content = _load(
        v + begin * v_stride + head * CONTENT, keys, content_columns, v_stride, length, CONTENT,
        CONTENT_PADDED,
        False,
    )
    q += begin * q_stride + head * WIDTH
    out_gradient += begin * out_stride + head * CONTENT
    seen = keys
    if TIMED:
        asked += begin
        seen = tl.load(times + begin + tl.minimum(keys, length - 1))
    of_key = tl.zeros([N, PADDED], tl.float32)
    of_content = tl.zeros([N, CONTENT_PADDED], tl.float32)
    # N is a multiple of M: blocks of queries begin where the block of keys does.
    of_key, of_content = _key_blocks(
        of_key, of_content, key, content, seen, keys, q, out_gradient, asked, by_distance, by_time, bounds,
        q_stride, out_stride, length, start, tl.minimum(start + N, length), buckets,
        WIDTH, CONTENT, PADDED, CONTENT_PADDED, M, FAR, TIMED, True, FAST, PRECISION,
    )
    of_key, of_content = _key_blocks(
        of_key, of_content, key, content, seen, keys, q, out_gradient, asked, by_distance, by_time, bounds,
        q_stride, out_stride, length, start + N, length, buckets,
        WIDTH, CONTENT, PADDED, CONTENT_PADDED, M, FAR, TIMED, False, FAST, PRECISION,
    )
    _store(
        k_gradient + begin * k_gradient_stride + head * WIDTH, of_key * scale, keys, columns,
        k_gradient_stride,
        length, WIDTH,
    )
    _store(
        v_gradient + begin * v_gradient_stride + head * CONTENT, of_content * scale, keys, content_columns,
        v_gradient_stride, length, CONTENT,
    )


@triton.jit(do_not_specialize=_DIAGONAL_COUNTS)
def _bias_gradient(
    q, k, v, out_gradient, tiles, sums, splits, by_distance, by_time, bounds, times, asked,
    q_stride, k_stride, v_stride, out_stride, pairs, heads, shares, buckets,
    WIDTH: tl.constexpr, CONTENT: tl.constexpr, PADDED: tl.constexpr, CONTENT_PADDED: tl.constexpr,
    M: tl.constexpr, FAR: tl.constexpr, TIMED: tl.constexpr, BUCKETS_PADDED: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr,
):
    """Sum the gradients of scores, by distance and by time, over one share of the sequences and heads.

    A program has one block diagonal. All its tiles have the same distances in the same places, so that they
    are added as they are: `tiles` of shape (diagonals, shares, M, M). Times have no such order: for each
    bucket between the smallest and the largest one in a tile, those in that bucket are added up.
    """
    diagonal = tl.program_id(0)
    share = tl.program_id(1)
    inside = tl.arange(0, M)
    columns, content_columns = tl.arange(0, PADDED), tl.arange(0, CONTENT_PADDED)
    bins = tl.arange(0, BUCKETS_PADDED)
    total = tl.zeros([M, M], tl.float32)
    by_bucket = tl.zeros([BUCKETS_PADDED], tl.float32)
    apart = diagonal * M + inside[:, None] - inside[None, :]
    for pair in range(share, pairs, shares):
        begin = tl.load(splits + pair // heads)
        length = (tl.load(splits + pair // heads + 1) - begin).to(tl.int32)
        head = pair % heads
        for start in range(diagonal * M, length, M):
            rows = start + inside
            keys = rows - diagonal * M
            query = _load(
                q + begin * q_stride + head * WIDTH, rows, columns, q_stride, length, WIDTH, PADDED, False
            )
            key = _load(
                k + begin * k_stride + head * WIDTH, keys, columns, k_stride, length, WIDTH, PADDED, False
            )
            scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
            asked_at, seen = rows, keys
            if TIMED:
                asked_at = tl.load(asked + begin + tl.minimum(rows, length - 1))
                seen = tl.load(times + begin + tl.minimum(keys, length - 1))
            scores = _biased(
                scores, apart, asked_at, seen, by_distance, by_time, bounds, buckets, FAR, TIMED, False
            )
            gradient = _load(
                out_gradient + begin * out_stride + head * CONTENT, rows, content_columns, out_stride, length,
                CONTENT, CONTENT_PADDED, False,
            )
            content = _load(
                v + begin * v_stride + head * CONTENT, keys, content_columns, v_stride, length, CONTENT,
                CONTENT_PADDED, False,
            )
            of_weights = tl.dot(gradient, tl.trans(content), input_precision=PRECISION)
            kept = _sigmoid(scores, FAST)
            # Zero behind the sequence: there the gradient of the result is.
            of_scores = tl.where(apart >= 0, of_weights * kept * (1.0 + scores * (1.0 - kept)), 0.0)
            total += of_scores
            if TIMED:
                first = _bucket_near(tl.min(asked_at, 0) - tl.max(seen, 0), buckets, -0.001)
                last = _bucket_near(tl.max(asked_at, 0) - tl.min(seen, 0), buckets, 0.001)
                # Always so. Triton overlaps loads and products of a loop only if it sees no loop in it.
                if last >= first:
                    for bucket in range(first, last + 1):
                        reached = asked_at - tl.load(bounds + bucket)
                        passed = asked_at - tl.load(bounds + bucket + 1)
                        inner = (reached[:, None] >= seen[None, :]) & (passed[:, None] < seen[None, :])
                        found = tl.sum(tl.sum(tl.where(inner, of_scores, 0.0), 1), 0)
                        by_bucket += tl.where(bins == bucket, found, 0.0)
    place = diagonal * shares + share
    tl.store(tiles + place.to(tl.int64) * M * M + inside[:, None] * M + inside[None, :], total)
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
    "query": {64: Blocks(64, 32, 4, 3), 128: Blocks(64, 32, 4, 3), 256: Blocks(64, 32, 4, 2)},
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
    bounds: Tensor | None = None
    """As `time_bounds` returns it, if times count."""
    times: Tensor | None = None
    asked: Tensor | None = None


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
        bias = launch.bias(by_distance, by_time, steps)
        blocks = launch.blocks("forward")
        out = content.new_zeros(content.shape)
        _forward[launch.grid(blocks.queries)](
            query, key, content, out, *bias, *_strides(query, key, content, out),
            *launch.sizes(blocks.queries),
            launch.buckets, 1.0 / steps.max_length, **launch.silu_constants(blocks),
        )  # fmt: skip
        ctx.steps = steps
        ctx.save_for_backward(query, key, content, by_distance, by_time)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, content, by_distance, by_time = ctx.saved_tensors
        launch = _Launch(query, content, ctx.steps)
        bias = launch.bias(by_distance, by_time, ctx.steps)
        inputs = (query, key, content, _as_rows(gradient))
        scale = 1.0 / ctx.steps.max_length
        of_query = of_key = of_content = of_distance = of_time = None
        if ctx.needs_input_grad[0]:
            of_query = query.new_zeros(query.shape)
            blocks = launch.blocks("query")
            _query_gradient[launch.grid(blocks.queries)](
                *inputs, of_query, *bias, *_strides(*inputs, of_query), *launch.sizes(blocks.queries),
                launch.buckets, scale, **launch.silu_constants(blocks),
            )  # fmt: skip
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            of_key, of_content = key.new_zeros(key.shape), content.new_zeros(content.shape)
            blocks = launch.blocks("key")
            _key_gradient[launch.grid(blocks.keys)](
                *inputs, of_key, of_content, *bias, *_strides(*inputs, of_key, of_content),
                *launch.sizes(blocks.keys), launch.buckets, scale, **launch.silu_constants(blocks),
            )  # fmt: skip
        if ctx.needs_input_grad[3] or ctx.needs_input_grad[4]:
            by_diagonal, by_bucket = _bias_gradients(launch, inputs, bias)
            if by_distance is not None:
                of_distance = (by_diagonal * scale).to(by_distance.dtype)
            if by_time is not None:
                of_time = (by_bucket * scale).to(by_time.dtype)
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
        self.buckets = 0
        self._far = False

    def bias(
        self, by_distance: Tensor | None, by_time: Tensor | None, steps: JaggedSteps
    ) -> tuple[Tensor, ...]:
        """Return the tensors of row splits and biases; an absent one is never read."""
        self._far, absent = by_distance is not None, steps.row_splits
        far = timed = absent
        if by_distance is not None:
            around = (_LARGEST_BLOCK, _LARGEST_BLOCK)
            far = torch.nn.functional.pad(by_distance.float(), around)[_LARGEST_BLOCK:]
        if by_time is not None:
            timed, self.buckets = by_time.float().contiguous(), by_time.shape[0]
        rest = (
            absent if one is None else one.contiguous() for one in (steps.bounds, steps.times, steps.asked)
        )
        return steps.row_splits, far, timed, *rest

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

    def silu_constants(self, blocks: Blocks) -> dict[str, Any]:
        # An error of 2 ** -11 is less than what bfloat16 rounds off. The interpreter knows no assembler.
        fast = {torch.bfloat16: 2, torch.float16: 1}.get(self.dtype, 0)
        return {
            **self.constants(blocks),
            "FAR": self._far,
            "TIMED": self.buckets > 0,
            "FAST": 0 if triton.knobs.runtime.interpret else fast,
        }


def _bias_gradients(
    launch: _Launch, inputs: tuple[Tensor, ...], bias: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `by_distance` and `by_time`, before they are divided by `max_length`."""
    blocks = launch.blocks("bias")
    size, pairs = blocks.queries, launch.sequences * launch.heads
    diagonals = triton.cdiv(launch.max_length, size)
    # Enough programs for a large GPU, whichever one this is: results are then the same on all.
    shares = max(1, min(pairs, triton.cdiv(1024, diagonals)))
    padded = _padded(max(1, launch.buckets))
    tiles = inputs[0].new_empty((diagonals, shares, size, size), dtype=torch.float32)
    sums = inputs[0].new_empty((diagonals, shares, padded), dtype=torch.float32)
    constants = launch.silu_constants(blocks)
    del constants["N"]
    _bias_gradient[(diagonals, shares)](
        *inputs, tiles, sums, *bias, *_strides(*inputs), pairs, launch.heads, shares, launch.buckets,
        **constants, BUCKETS_PADDED=padded,
    )  # fmt: skip
    # In a row of a tile, the distance falls from left to right. Flipped, and shifted by its number, each row
    # has a distance in the same column: `diagonal * size + column - (size - 1)`.
    flipped = torch.nn.functional.pad(tiles.sum(1).flip(2), (0, size))
    shifted = flipped.flatten(1)[:, :-size].unflatten(1, (size, 2 * size - 1)).sum(1)
    own, before = shifted[:, size - 1 :], torch.nn.functional.pad(shifted[1:, : size - 1], (1, 0, 0, 1))
    by_distance = (own + before).flatten()[: launch.max_length]
    return by_distance, (sums.sum((0, 1)) if launch.buckets else sums.new_zeros(padded))[: launch.buckets]


def _as_rows(tensor: Tensor) -> Tensor:
    """Return a tensor of shape (n, heads, width) with all floats of a step next to each other."""
    return tensor if tensor.stride()[1:] == (tensor.shape[2], 1) else tensor.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    return [one.stride(0) for one in tensors]
