"""Every implementation of the peers seam, as everybody who trains one model together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field

from runtime.fleets import SOON, Tallied, serving, worker_state
from store.ranks import connected

from monolith.model import WeightOptimizer
from monolith.runtime import Coordinator, Fleet, FleetCoordinator, LocalCoordinator
from monolith.runtime.coordinator import Start, WorkerState
from monolith.runtime.ranks import RankCoordinator
from monolith.store import ServerGroup
from monolith.train import Mode, TrainConfig
from monolith.train.model import Model


@dataclass
class Process:
    """One of those who train together: its peers, its model, and what a session would be."""

    peers: Coordinator
    model: Model
    weights: WeightOptimizer | None
    step: int = 0
    interrupted: bool = False
    drained: int = 0
    said: WorkerState = field(default_factory=lambda: worker_state(0))

    def drain(self) -> None:
        self.drained += 1

    def state(self) -> WorkerState:
        return self.said

    def go_back(self, start: Start) -> None:
        self.step = start.step

    def begin(self, start: Start) -> Start | None:
        """Begin as a session does, having restored `start` where this one leads."""
        self.peers.begin()
        self.peers.go_to(start.step)
        mine = start if self.peers.leads else Start(step=0)
        return self.peers.open(mine, self)

    def take_step(self) -> int:
        """Train the weights on what gradients they have, and return which step that was."""
        assert self.weights is not None
        if self.peers.together is not None:
            self.peers.together.begin(1)
            assert self.peers.together.finish(None) is None
        self.weights.step()
        self.step = self.peers.count(self.step)
        return self.step


Crew = list[Process]
"""In the order of their shares; the first leads."""


def _process(peers: Coordinator, number: int) -> Process:
    model = Model(Tallied(), Mode.TRAIN, seed=0, make_store=peers.make_store)
    return Process(peers, model, peers.attach(model), said=worker_state(number))


@contextmanager
def _alone() -> Iterator[Crew]:
    process = _process(LocalCoordinator(), 0)
    with closing(process.model):
        yield [process]


def _fleet(num_ps: int, num_workers: int) -> Callable[[], AbstractContextManager[Crew]]:
    @contextmanager
    def crew() -> Iterator[Crew]:
        with ExitStack() as stack:
            addresses = stack.enter_context(
                serving(Tallied(), num_ps=num_ps, num_workers=num_workers, config=TrainConfig())
            )
            processes = []
            for index in range(num_workers):
                fleet = Fleet(ServerGroup(addresses), index, num_workers, news_every=SOON)
                stack.enter_context(fleet)
                fleet.group.describe()
                processes.append(_process(FleetCoordinator(fleet), index))
            yield processes

    return crew


def _ranks(size: int) -> Callable[[], AbstractContextManager[Crew]]:
    @contextmanager
    def crew() -> Iterator[Crew]:
        with connected(size) as groups:
            yield [_process(RankCoordinator(one), rank) for rank, one in enumerate(groups)]

    return crew


def _ranks_on_servers(size: int, num_ps: int) -> Callable[[], AbstractContextManager[Crew]]:
    @contextmanager
    def crew() -> Iterator[Crew]:
        with ExitStack() as stack:
            addresses = stack.enter_context(
                serving(Tallied(), num_ps=num_ps, num_workers=size, config=TrainConfig(), holds_weights=False)
            )
            processes = []
            for rank, one in enumerate(stack.enter_context(connected(size))):
                servers = stack.enter_context(closing(ServerGroup(addresses)))
                processes.append(_process(RankCoordinator(one, servers=servers), rank))
            yield processes

    return crew


CREWS: dict[str, Callable[[], AbstractContextManager[Crew]]] = {
    "alone": _alone,
    "one worker on a server": _fleet(1, 1),
    "three workers on two servers": _fleet(2, 3),
    "one rank": _ranks(1),
    "three ranks": _ranks(3),
    "two ranks on a server": _ranks_on_servers(2, 1),
}
"""By name. Whoever adds peers adds a line here."""
