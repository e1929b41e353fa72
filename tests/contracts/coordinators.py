"""Every implementation of the coordinator seam, as the processes that train one model together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field

from runtime.fleets import SOON, Tallied, serving, worker_state
from store.ranks import connected

from monolith.data.source import Position
from monolith.model import WeightOptimizer
from monolith.runtime import Coordinator, Fleet, FleetCoordinator, LocalCoordinator
from monolith.runtime.cluster_config import ClusterConfig
from monolith.runtime.coordinator import (
    Continue,
    Outcome,
    Pause,
    Quiesced,
    Restore,
    Start,
    Stop,
    WorkerProgress,
    WorkerState,
)
from monolith.runtime.ranks import RankCoordinator
from monolith.store import ServerGroup
from monolith.train import Mode, TrainConfig
from monolith.train.model import Model


@dataclass
class Process:
    """One of the processes that train together: its coordinator, its model, and a session's place."""

    coordinator: Coordinator
    model: Model
    weights: WeightOptimizer | None
    step: int = 0
    interrupted: bool = False
    drained: int = 0
    said: WorkerState = field(default_factory=lambda: worker_state(0))
    committed: list[Position] = field(default_factory=list)

    def drain(self) -> None:
        self.drained += 1

    @property
    def progress(self) -> WorkerProgress:
        return WorkerProgress(step=self.step, state=self.said)

    def join(self, start: Start) -> Start | None:
        """Start as a session does; the chief restores `start`."""
        return self.coordinator.join(lambda _: start, interrupted=lambda: self.interrupted)

    def at_step(self) -> str | None:
        """Act on decisions as a session does, until this process continues; return why it is to stop."""
        while True:
            decision = self.coordinator.at_step(self.progress)
            match decision:
                case Pause():
                    with self.coordinator.quiesce(self.progress, self.drain):
                        pass
                case Restore(start):
                    self.step = start.step
                case Continue() | Stop():
                    if decision.committed is not None:
                        self.committed.append(decision.committed)
                    return decision.reason if isinstance(decision, Stop) else None
                case _:
                    raise AssertionError(decision)

    def quiesce(self) -> AbstractContextManager[Quiesced | None]:
        return self.coordinator.quiesce(self.progress, self.drain)

    def end(self, outcome: Outcome) -> tuple[Quiesced | Restore | None, bool]:
        found = self.coordinator.finish(outcome, self.progress, lambda: None)
        return found, self.coordinator.leave(outcome, self.said)

    def take_step(self) -> int:
        """Train the weights on what gradients they have, and return which step that was."""
        assert self.weights is not None
        placement = self.coordinator.placement
        if placement.averaging is not None:
            placement.averaging.begin(1)
            assert placement.averaging.finish(None, None) is None
        self.weights.step()
        self.step = placement.count_step(self.step)
        return self.step


Crew = list[Process]
"""In the order of their indices; the first is the chief."""


def _process(coordinator: Coordinator, number: int) -> Process:
    placement = coordinator.placement
    model = Model(Tallied(), Mode.TRAIN, seed=0, make_store=placement.make_store)
    return Process(coordinator, model, placement.attach(model), said=worker_state(number))


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
                cluster = ClusterConfig(index=index, num_workers=num_workers)
                fleet = Fleet(ServerGroup(addresses), cluster, news_every=SOON)
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
"""By name. A new implementation of the seam gets a line here."""
