"""Two workers push over wires that break; what is learned is what a store learns that saw each push once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from services.properties import tries
from store.fleets import CONFIGS, Wire, dense, keys, serve

from monolith.store import LocalStore, ParameterServerStore, ServerGroup

pytest.importorskip("pyarrow")

LONG = timedelta(seconds=60)


@dataclass(frozen=True)
class Step:
    ids: tuple[int, ...]
    gradient: int
    breaks: Literal["up", "down"] | None
    after: int
    """Bytes from the beginning of the step to the break."""


STEPS = st.lists(
    st.builds(
        Step,
        ids=st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True).map(tuple),
        gradient=st.integers(-8, 8),
        breaks=st.sampled_from([None, "up", "down"]),
        after=st.integers(0, 600),
    ),
    max_size=5,
)


def train(steps: list[Step], servers: list[str]) -> None:
    """Be one worker: push rows and weights, over a wire to each server."""
    with ExitStack() as stack:
        wires = [Wire(server) for server in servers]
        for wire in wires:
            stack.callback(wire.close)
        group = ServerGroup([wire.address for wire in wires], patience=LONG)
        stack.callback(group.close)
        store = ParameterServerStore(group, 0, CONFIGS)
        weights, optimizer = dense()
        store.attach_dense(weights, optimizer)
        for number, step in enumerate(steps):
            if step.breaks is not None:
                wires[number % len(wires)].cut_after(step.breaks, step.after)
            gradients = torch.full((2 * len(step.ids),), float(step.gradient))
            store.apply_gradients(keys(*step.ids), gradients)
            for weight in weights.values():
                weight.grad = torch.full_like(weight, float(step.gradient))
            store.push_dense()
            store.lookup(keys(*step.ids))


@settings(max_examples=tries(6), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mine=STEPS, theirs=STEPS, count=st.sampled_from([1, 2]))
def test_pushes_of_two_workers_over_wires_that_break_are_each_applied_once(
    mine: list[Step], theirs: list[Step], count: int
) -> None:
    with ExitStack() as stack:
        servers = serve(stack, CONFIGS, count, dense=dense)
        addresses = [server.address for server in servers]
        with ThreadPoolExecutor(2) as pool:
            for worker in [pool.submit(train, steps, addresses) for steps in (mine, theirs)]:
                worker.result(300)
        local = LocalStore.from_configs(CONFIGS, threads=1)
        weights, optimizer = dense()
        local.attach_dense(weights, optimizer)
        for step in mine + theirs:
            local.apply_gradients(keys(*step.ids), torch.full((2 * len(step.ids),), float(step.gradient)))
            for weight in weights.values():
                weight.grad = torch.full_like(weight, float(step.gradient))
            local.push_dense()
        group = ServerGroup(addresses)
        stack.callback(group.close)
        store = ParameterServerStore(group, 0, CONFIGS)
        assert store.lookup(keys(*range(6))).tolist() == local.lookup(keys(*range(6))).tolist()
        learned, its_optimizer = dense()
        assert group.fetch_dense(learned, its_optimizer) == len(mine + theirs)
        assert [one.tolist() for one in learned.values()] == [one.tolist() for one in weights.values()]
