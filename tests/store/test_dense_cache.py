"""A worker's copy of the dense weights: what a step reads, and how old that may be."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from store.fleets import CONFIGS
from torch import Tensor, nn

from monolith.errors import ConfigError, FeatureError, UnavailableError
from monolith.store import DenseShard, LocalStore, ParameterServer, ParameterServerStore, ServerGroup
from monolith.store.dense_cache import DenseCache
from monolith.store.dense_config import DenseConfig

SECONDS = 30.0
BOTH = DenseConfig(prefetch=True, postpush=True)
PREFETCH = DenseConfig(prefetch=True)
POSTPUSH = DenseConfig(postpush=True)
MODES = {"neither": DenseConfig(), "prefetch": PREFETCH, "postpush": POSTPUSH, "both": BOTH}


def five() -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    """A weight of 5 on server 1 of 2, and a larger one on server 0; both move by the gradient."""
    weights = {"large": nn.Parameter(torch.zeros(3)), "var": nn.Parameter(torch.tensor(5.0))}
    return weights, torch.optim.SGD(weights.values(), lr=1.0)


class Gated(DenseShard):
    """Applies gradients when it is let."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gate = threading.Event()
        self.gate.set()
        self.fails: Exception | None = None

    def push(
        self, gradients: Mapping[str, Tensor], rates: Mapping[int, float] | None = None
    ) -> dict[str, Tensor]:
        assert self.gate.wait(SECONDS)
        if self.fails is not None:
            raise self.fails
        return super().push(gradients, rates)


class Servers:
    """Two servers of the weights, and workers on them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.shares = [Gated(*five(), (number, 2)) for number in range(2)]
        self._addresses = []
        for number, share in enumerate(self.shares):
            rows = LocalStore.from_configs(CONFIGS, threads=1)
            stack.callback(rows.close)
            server = ParameterServer([rows], share, shard=(number, 2))
            stack.callback(server.close)
            self._addresses.append(server.address)

    @property
    def value(self) -> float:
        """What a direct read finds."""
        return float(self.shares[1].pull()["var"])

    def worker(self, config: DenseConfig | None = None) -> Worker:
        return Worker(self._stack, self._addresses, config)

    def add(self, value: float) -> None:
        """Have another worker add to the weight."""
        self.worker().step(-value)


class Worker:
    def __init__(self, stack: ExitStack, addresses: list[str], config: DenseConfig | None) -> None:
        group = ServerGroup(addresses)
        stack.callback(group.close)
        self._store = ParameterServerStore(group, 0, CONFIGS)
        stack.callback(self._store.close)
        self.weights, self.optimizer = five()
        self._store.attach_dense(self.weights, self.optimizer, config=config)
        self._store.pull_dense()

    @property
    def cache(self) -> DenseCache:
        assert self._store.dense is not None
        return self._store.dense

    @property
    def value(self) -> float:
        """What a step reads."""
        return float(self.weights["var"].detach())

    def step(self, gradient: float | None = None) -> float:
        """Take a step with a gradient of the weight, or none; return what it read."""
        read = self.value
        if gradient is not None:
            self.weights["var"].grad = torch.tensor(gradient)
        self._store.push_dense()
        self._store.pull_dense()
        return read


@pytest.fixture
def servers(stack: ExitStack) -> Servers:
    return Servers(stack)


# The values of the original's variables_test


def test_what_others_change_is_read_when_it_was_fetched(servers: Servers) -> None:
    worker = servers.worker(PREFETCH)
    assert worker.value == 5.0
    servers.add(2.0)
    assert (worker.value, servers.value) == (5.0, 7.0)
    worker.cache.refresh()
    assert worker.value == 7.0


@pytest.mark.parametrize("mode", MODES)
def test_what_others_change_is_read_within_two_steps(servers: Servers, mode: str) -> None:
    worker = servers.worker(MODES[mode])
    worker.step()
    servers.add(-1.0)
    worker.step()
    worker.step()
    assert worker.value == 4.0


@pytest.mark.parametrize("config", [PREFETCH, BOTH])
def test_the_gradient_goes_to_the_server_and_the_copy_stays_until_it_is_fetched(
    servers: Servers, config: DenseConfig
) -> None:
    worker = servers.worker(config)
    worker.step(1.0)
    assert worker.value == 5.0
    worker.cache.settle()
    assert (servers.value, worker.value) == (4.0, 4.0)


# How old weights may be


def test_with_neither_a_step_reads_what_its_last_push_made(servers: Servers) -> None:
    worker = servers.worker()
    assert [worker.step(1.0) for _ in range(3)] == [5.0, 4.0, 3.0]
    assert worker.cache.staleness == 0


@pytest.mark.parametrize("config", [PREFETCH, BOTH])
def test_in_the_background_a_worker_alone_is_exactly_one_step_behind(
    servers: Servers, config: DenseConfig
) -> None:
    worker = servers.worker(config)
    assert [worker.step(1.0) for _ in range(5)] == [5.0, 5.0, 4.0, 3.0, 2.0]
    assert worker.cache.staleness == 1
    worker.cache.settle()
    assert (worker.value, worker.cache.staleness) == (0.0, 0)
    assert worker.cache.behind == (1, 1)


@pytest.mark.parametrize("bound", [1, 3])
@pytest.mark.parametrize("prefetch", [True, False])
def test_the_bound_is_kept_by_waiting(servers: Servers, bound: int, prefetch: bool) -> None:
    worker = servers.worker(DenseConfig(prefetch=prefetch, postpush=True, max_staleness=bound))
    servers.shares[1].gate.clear()
    for _ in range(bound):
        worker.step(1.0)
    assert worker.cache.staleness == bound
    one_more = threading.Thread(target=worker.step, args=(1.0,))
    one_more.start()
    one_more.join(0.2)
    assert one_more.is_alive(), "it waits for the first push to be answered"
    assert worker.value == 5.0
    servers.shares[1].gate.set()
    one_more.join(SECONDS)
    assert worker.cache.staleness <= bound
    worker.cache.settle()
    assert (servers.value, worker.value) == (4.0 - bound, 4.0 - bound)


def test_steps_are_counted_while_their_pushes_are_on_their_way(servers: Servers) -> None:
    worker = servers.worker(DenseConfig(prefetch=True, postpush=True, max_staleness=3))
    servers.shares[0].gate.clear()
    counted = []
    for _ in range(3):
        worker.step(1.0)
        counted.append(worker.cache.step)
    servers.shares[0].gate.set()
    worker.cache.settle()
    assert [*counted, worker.cache.step, servers.shares[0].step] == [1, 2, 3, 3, 3]


def test_how_far_behind_weights_are_counts_the_steps_of_all(servers: Servers) -> None:
    worker = servers.worker()
    for _ in range(4):
        servers.add(1.0)
    worker.step(1.0)
    assert worker.cache.behind == (4, 4)
    worker.step(1.0)
    assert worker.cache.behind == (0, 4)


def test_a_push_that_fails_behind_a_step_is_raised_by_the_next(servers: Servers) -> None:
    worker = servers.worker(BOTH)
    servers.shares[1].fails = UnavailableError("somebody pulled the plug")
    worker.step(1.0)
    with pytest.raises(UnavailableError, match="pulled the plug"):
        worker.step(1.0)
    with pytest.raises(UnavailableError, match="pulled the plug"):
        worker.cache.settle()


def test_a_bound_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_staleness"):
        DenseConfig(max_staleness=0)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (DenseConfig(), False),
        (PREFETCH, False),
        (BOTH, False),
        (POSTPUSH, True),
        (DenseConfig(prefetch=True, max_staleness=2), True),
        (DenseConfig(max_staleness=2), False),
    ],
)
def test_what_depends_on_time_says_so(config: DenseConfig, expected: bool) -> None:
    assert config.depends_on_time is expected


# Rates


@pytest.mark.parametrize("mode", MODES)
def test_rates_that_are_moved_on_a_worker_hold_on_the_servers(servers: Servers, mode: str) -> None:
    worker = servers.worker(MODES[mode])
    worker.step(1.0)
    worker.optimizer.param_groups[0]["lr"] = 0.5
    worker.step(1.0)
    worker.cache.settle()
    assert servers.value == 3.5


def test_unchanged_rates_stay_as_another_worker_set_them(servers: Servers) -> None:
    mover, other = servers.worker(), servers.worker()
    mover.optimizer.param_groups[0]["lr"] = 0.5
    mover.step(1.0)
    other.step(1.0)
    assert servers.value == 4.0


def test_rates_of_groups_that_are_not_there_are_refused() -> None:
    share = DenseShard(*five(), (0, 1))
    with pytest.raises(FeatureError, match="no group 3"):
        share.push({}, {3: 0.5})
    assert share.step == 0
