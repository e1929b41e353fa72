"""Rows on parameter servers, asked by ranks: in an order that nobody's speed changes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from store.fleets import CONFIGS, keys, serve
from store.ranks import all_at_once, connected

from monolith.store import ParameterServerStore, ServedRankStore, ServerGroup
from monolith.table import Adagrad, Segment, TableConfig

ONE_STEP = {
    "item": TableConfig(
        name="item",
        segments=(Segment(dim=2, learning_rate=1.0, optimizer=Adagrad(initial_accumulator_value=0.0)),),
    )
}
"""Two steps with half a gradient each would move a row further than one with all of it."""


class Watched(ParameterServerStore):
    """Notes when it is asked to update rows."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.pushed = threading.Event()

    def apply_gradients(self, *args: Any, **more: Any) -> None:
        self.pushed.set()
        super().apply_gradients(*args, **more)


Ranks = Sequence[tuple[ServedRankStore, Watched]]


@pytest.fixture(params=[CONFIGS])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with ExitStack() as stack:
        addresses = [one.address for one in serve(stack, request.param, 2)]
        found = []
        for groups in stack.enter_context(connected(2)):
            group = ServerGroup(addresses)
            stack.callback(group.close)
            watched = Watched(group, 0, request.param)
            found.append((ServedRankStore(watched, request.param, groups), watched))
        yield found


@pytest.mark.parametrize("ranks", [ONE_STEP], indirect=True)
def test_an_id_of_all_ranks_takes_one_step_with_the_sum(ranks: Ranks) -> None:
    all_at_once(
        *(lambda store=store: store.apply_gradients(keys(7), torch.tensor([0.5, 3.0])) for store, _ in ranks)
    )
    assert [store.lookup(keys(7)).tolist() for store, _ in ranks] == [[-1.0, -1.0]] * 2


def test_gradients_that_were_exchanged_ahead_change_nothing_while_a_rank_looks_up(ranks: Ranks) -> None:
    """As with a limit on norms: who has all gradients might push them while another still looks up."""
    sent = all_at_once(
        *(lambda store=store: store.send_gradients(keys(*range(8)), torch.ones(16)) for store, _ in ranks)
    )
    (slow, _), (fast, pushes) = ranks
    with ThreadPoolExecutor(1) as thread:
        applied = thread.submit(sent[1].apply)
        try:
            assert not pushes.pushed.wait(0.2)
            assert slow.lookup(keys(*range(8))).tolist() == [0.0] * 16
        finally:
            sent[0].apply()
        applied.result(60)
    assert fast.lookup(keys(*range(8))).tolist() == [-2.0] * 16
