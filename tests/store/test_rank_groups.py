"""The calls of process groups by NCCL, with one rank: all that one GPU can show.

What is not seen here: several GPUs, and a rank that is lost during a call.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from store.rank_process import CONFIGS, local_store, train
from store.ranks import connected, needs_nccl

from monolith.errors import UnavailableError
from monolith.store import AllToAllStore, RankGroups
from monolith.store.rank_groups import Collective

pytestmark = needs_nccl


@pytest.fixture
def groups() -> Iterator[RankGroups]:
    with connected(1, backend="nccl", rows_backend="nccl") as (one,):
        yield one


@pytest.mark.parametrize("where", ["cpu", "cuda:0"])
def test_results_come_to_the_device_that_the_call_says(groups: RankGroups, where: str) -> None:
    given = torch.arange(6.0, device=where)
    dense = groups.dense
    for found in (dense.sum(given.clone()), dense.begin_sum(given.clone())(), dense.broadcast(given)):
        assert found.device == given.device
        assert found.tolist() == [0, 1, 2, 3, 4, 5]
    assert dense.all_gather(given).tolist() == [[0, 1, 2, 3, 4, 5]]
    exchanged = groups.lookups.all_to_all(given, [6], [6])
    assert exchanged.device == torch.device("cuda", 0)
    assert exchanged.tolist() == [0, 1, 2, 3, 4, 5]
    assert len(groups.pushes.all_to_all(given[:0], [0], [0])) == 0


def test_a_call_sees_what_was_computed_before_it_and_later_work_sees_its_result(groups: RankGroups) -> None:
    """Both on a stream that is not the default one, with work that takes a while."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        big = torch.ones(2048, 2048, device="cuda")
        for _ in range(20):
            big = big @ big / 2048
        finish = groups.dense.begin_sum(big)
        total = finish().sum() * 2
    stream.synchronize()
    assert total.item() == 2 * 2048 * 2048


def test_a_store_of_one_rank_trains_as_one_without_ranks(groups: RankGroups) -> None:
    store = AllToAllStore(local_store("gpu"), CONFIGS, groups)
    for found, expected in zip(train(store, 0), train(local_store("host"), 0), strict=True):
        torch.testing.assert_close(found.cpu(), expected)
    store.close()


def test_an_aborted_group_refuses_further_calls(groups: RankGroups) -> None:
    every: list[Collective] = [groups.lookups, groups.pushes, groups.dense]
    for collective in every:
        collective.abort()
        with pytest.raises(UnavailableError, match="it was aborted here"):
            collective.all_gather(torch.zeros(1))
