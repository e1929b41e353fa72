"""Times the kernels of jagged attention with other blocks, on a GPU: python tools/tune_attention.py [seconds]"""

from __future__ import annotations

import itertools
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from monolith.nn.layers import jagged_kernels as K
from monolith.nn.layers.jagged_attention import time_bounds

B = K.Blocks
CANDIDATES = {
    "forward": [B(128, 32, 4, 3), B(64, 64, 4, 2), B(128, 64, 8, 2), B(128, 64, 8, 3), B(64, 32, 4, 3), B(128, 32, 8, 3)],
    "query": [B(64, 32, 4, 3), B(64, 64, 4, 2), B(128, 64, 8, 2), B(64, 32, 4, 2)],
    "key": [B(32, 64, 4, 3), B(64, 128, 8, 2), B(32, 128, 8, 3), B(32, 64, 4, 2), B(64, 64, 4, 2)],
    "bias": [B(64, 64, 8, 3), B(64, 64, 8, 2), B(64, 64, 4, 2), B(64, 64, 4, 3), B(32, 32, 4, 3)],
}
MODES = {"none": (False, False), "distance": (True, False), "both": (True, True)}
LENGTH, SEQUENCES, HEADS = 4096, 8, 4


def inputs(width, far, timed, sequences=SEQUENCES):
    torch.manual_seed(0)
    n = LENGTH * sequences
    q, k, v, g = (torch.randn(n, HEADS, width, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    q /= width**0.5
    splits = torch.arange(sequences + 1, device="cuda") * LENGTH
    # A step each ten minutes or so, over a month: sessions with long gaps between them.
    gaps = torch.where(torch.rand(n) < 0.05, torch.rand(n) * 86400, torch.rand(n) * 300).long()
    times = gaps.cumsum(0).cuda()
    asked = torch.cat([times[1:], times[-1:]])
    by_distance = torch.randn(LENGTH, device="cuda") * 0.02 if far else None
    by_time = torch.randn(128, device="cuda") * 0.02 if timed else None
    bounds = time_bounds(128, torch.device("cuda")) if timed else None
    return q, k, v, g, splits, by_distance, by_time, bounds, times if timed else None, asked if timed else None


def caller(kernel, blocks, fast, made):
    q, k, v, g, splits, by_distance, by_time, bounds, times, asked = made
    steps = K.JaggedSteps(splits, LENGTH, bounds, times, asked)
    launch = K._Launch(q, v, steps)
    bias = launch.bias(by_distance, by_time, steps)
    launch.blocks = lambda _: blocks
    constants = launch.silu_constants(blocks) | {"FAST": fast}
    one, two = torch.empty_like(q), torch.empty_like(q)
    s = [q.stride(0)] * 6
    sizes = (*launch.sizes(blocks.keys if kernel == "key" else blocks.queries), launch.buckets, 1 / LENGTH)
    if kernel == "forward":
        return lambda: K._forward[launch.grid(blocks.queries)](q, k, v, one, *bias, *s[:4], *sizes, **constants)
    if kernel == "query":
        return lambda: K._query_gradient[launch.grid(blocks.queries)](q, k, v, g, one, *bias, *s[:5], *sizes, **constants)
    if kernel == "key":
        return lambda: K._key_gradient[launch.grid(blocks.keys)](q, k, v, g, one, two, *bias, *s, *sizes, **constants)
    return lambda: K._bias_gradients(launch, (q, k, v, g), bias)


def shown(blocks):
    return f"{blocks.queries}x{blocks.keys}, {blocks.warps} warps, {blocks.stages} stages"


def warm(job):
    width, kernel, blocks, mode, fast = job
    try:
        caller(kernel, blocks, fast, inputs(width, *MODES[mode], sequences=SEQUENCES))()
        torch.cuda.synchronize()
        return None
    except Exception as error:
        return repr(error)[:150]


def main():
    import triton

    limit = float(sys.argv[1]) if len(sys.argv) > 1 else 200.0
    began = time.monotonic()
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    peak = 2 * 8192**3 / triton.testing.do_bench(lambda: a @ b, return_mode="median") / 1e9
    print(f"bf16 matmul {peak:.0f} TFLOP/s", flush=True)
    jobs = []
    for width, mode, fast in ((128, "both", 2), (128, "distance", 2), (64, "both", 2), (64, "distance", 2)):
        for kernel, candidates in CANDIDATES.items():
            if kernel == "bias" and mode == "none":
                continue
            jobs += [(width, kernel, one, mode, fast) for one in candidates]
    pool = ProcessPoolExecutor(12, mp_context=get_context("spawn"))
    for job, done in [(job, pool.submit(warm, job)) for job in jobs]:
        width, kernel, blocks, mode, fast = job
        if time.monotonic() - began > limit:
            print("time is over", flush=True)
            break
        error = done.result()
        if error is not None:
            print(width, mode, fast, kernel, shown(blocks), error, flush=True)
            continue
        run = caller(kernel, blocks, fast, inputs(width, *MODES[mode]))
        ms = triton.testing.do_bench(run, warmup=10, rep=60, return_mode="median")
        products = {"forward": 2, "query": 3, "key": 4, "bias": 2}[kernel]
        flops = products * 2 * width * HEADS * SEQUENCES * LENGTH * (LENGTH + 1) / 2
        print(f"{width} {mode} fast={fast} {kernel} {shown(blocks)}: {ms:.3f} ms, {flops / ms / 1e9:.0f} TFLOP/s of its own products", flush=True)
    pool.shutdown(wait=False, cancel_futures=True)
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    import os
    os._exit(0)


if __name__ == "__main__":
    main()
