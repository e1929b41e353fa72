"""Ranks of one run as threads of one process: each has its groups, and nothing is shared but the keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from torch import distributed as dist

from monolith.cluster.security import Guard
from monolith.config import Secret
from monolith.store import RankGroups
from monolith.store.rank_calls import RankPort
from monolith.store.rank_groups import RankOptions
from monolith.store.rank_keys import begin_attempt

T = TypeVar("T")

needs_nccl = pytest.mark.skipif(
    not torch.cuda.is_available() or not dist.is_nccl_available(), reason="needs a GPU, and torch with NCCL"
)

PATIENT = 60.0
SOON = timedelta(seconds=0.05)
TOKEN = Secret("of-the-tests")
PORT = RankPort(guard=Guard(token=TOKEN))


def all_at_once(*calls: Callable[[], T]) -> list[T]:
    """Make every call on a thread of its own; return what came of each, or raise the first error."""
    threads = ThreadPoolExecutor(len(calls), "rank")
    try:
        made = [threads.submit(call) for call in calls]
        _, hanging = wait(made, PATIENT)
        assert not hanging, f"{len(hanging)} of {len(made)} ranks hang"
        return [one.result() for one in made]
    finally:
        threads.shutdown(wait=False)


def connect(size: int, **options: Any) -> Sequence[RankGroups]:
    """Return the groups of each rank."""
    keys = begin_attempt(dist.HashStore(), TOKEN)
    port = options.pop("port", PORT)
    settings = RankOptions(**{"timeout": timedelta(seconds=PATIENT), "heartbeat_every": SOON} | options)
    return all_at_once(
        *(partial(RankGroups, keys, rank, size, port=port, options=settings) for rank in range(size))
    )


@contextmanager
def connected(size: int, **options: Any) -> Iterator[Sequence[RankGroups]]:
    """Give the groups of each rank, until the block ends."""
    groups = connect(size, **options)
    try:
        yield groups
    finally:
        for one in groups:
            one.close()
