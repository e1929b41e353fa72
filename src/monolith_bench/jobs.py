"""Trainings of an experiment that run at the same time, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def computed(jobs: int, compute: Callable[..., Result], calls: Sequence[tuple[Any, ...]]) -> Iterator[Result]:
    """Return the result of each call, in the order of the calls.

    Args:
        jobs: How many are computed at the same time; 1 computes them in this process. Processes share the
            cores evenly.
        compute: A function of a module, which another process can import.
    """
    if jobs == 1:
        for arguments in calls:
            yield compute(*arguments)
        return
    threads = max(1, (os.cpu_count() or 1) // jobs)
    # New processes, not forks: a fork cannot use a GPU.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        min(jobs, len(calls)), context, initializer=torch.set_num_threads, initargs=(threads,)
    ) as pool:
        pending = [pool.submit(compute, *arguments) for arguments in calls]
        try:
            for future in pending:
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)
