"""Fleets of threads whose servers and workers are lost and come back, while the others keep going."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from runtime.fleets import PATIENT, Tallied
from store.fleets import Wire

from monolith.cluster import MemoryDiscovery
from monolith.errors import UnavailableError
from monolith.observe import Metrics
from monolith.runtime import Fleet, FleetCoordinator, Trainer, TrainReport
from monolith.runtime.cluster_config import ClusterConfig, TimeoutsConfig
from monolith.runtime.failover import KeepGoing
from monolith.runtime.parameter_server import ServedShard
from monolith.runtime.publish_shard import PublishPlan
from monolith.runtime.server_calls import ServerCalls
from monolith.runtime.standbys import CopyPlan, Standbys, UsedServer
from monolith.store import ParameterServer, ServerGroup
from monolith.sync.publish_messages import Flushed
from monolith.train import Hook, SaveConfig, TrainConfig

SOON = timedelta(seconds=0.1)


def wait_for(ready: Callable[[], object], what: str) -> None:
    limit = time.monotonic() + PATIENT
    while not ready():
        assert time.monotonic() < limit, f"waited for {what}"
        time.sleep(0.01)


class BreakingShare(ServedShard):
    """A server that is lost when it is asked for something, once for each name in `breaks`."""

    breaks: set[str]
    lose: Callable[[], None]

    def _may_break(self, name: str) -> None:
        if name in self.breaks:
            self.breaks.remove(name)
            threading.Thread(target=self.lose, daemon=True).start()
            raise UnavailableError(f"killed at {name}")

    def _begin(self, body: Any) -> None:
        self._may_break("server.begin")
        super()._begin(body)

    def _cut(self, body: Any) -> None:
        self._may_break("tables.cut")
        super()._cut(body)

    def _close(self, body: Any) -> None:
        self._may_break("tables.close")
        super()._close(body)

    def _write(self, body: Any) -> Any:
        self._may_break("tables.write")
        return super()._write(body)

    def _flush(self, body: Any) -> Flushed:
        self._may_break("publish.flush")
        return super()._flush(body)

    def _restore(self, body: Any) -> Any:
        self._may_break("tables.restore")
        return super()._restore(body)

    def _restore_dense(self, body: Any) -> Any:
        self._may_break("dense.restore")
        return super()._restore_dense(body)


@dataclass
class LosingFleet:
    """Servers in this process that can be lost, and places of workers among them."""

    config: TrainConfig
    num_ps: int = 2
    num_workers: int = 1
    max_workers: int | None = None
    task: Tallied = field(default_factory=Tallied)
    keeps_going: bool = True
    loses_servers: bool = False
    """Whether a server's connections can be broken: all bytes go through a wire then, which takes time."""
    discovery: MemoryDiscovery = field(default_factory=MemoryDiscovery)
    servers: dict[int, ParameterServer] = field(default_factory=dict)
    wires: dict[int, Wire] = field(default_factory=dict)
    shares: dict[int, ServedShard] = field(default_factory=dict)
    breaks: dict[int, set[str]] = field(default_factory=dict)
    """Server -> the calls at each of which it is lost, once."""
    stack: ExitStack = field(default_factory=ExitStack)
    publish: PublishPlan | None = None
    copies: CopyPlan | None = None
    """How standbys are told of changes; None for a fleet without."""
    standbys_wanted: int = 1
    metrics: Metrics = field(default_factory=Metrics)
    standbys: Standbys | None = None
    """Who keeps copies, as the chief sees to it."""

    def __enter__(self) -> Self:
        for index in range(self.num_ps):
            self.start_server(index)
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()
        for wire in self.wires.values():
            wire.close()
        for share in self.shares.values():
            share.close_publishing()
        for server in self.servers.values():
            server.close()

    def start_server(self, index: int) -> None:
        """Serve a place, in a process that has nothing of what was there before."""
        share = BreakingShare(
            self.task,
            self.config,
            ClusterConfig(
                role="ps",
                index=index,
                num_ps=self.num_ps,
                num_redundant_ps=max(index + 1 - self.num_ps, 0),
                num_workers=self.num_workers,
                max_workers=self.max_workers or 0,
            ),
            publish=self.publish,
            copies=self.copies,
        )
        share.breaks = self.breaks.setdefault(index, set())
        share.lose = lambda: self.replace_server(index)
        self.shares[index] = share
        self.servers[index] = share.serve("127.0.0.1", 0, None)
        if self.loses_servers:
            self.wires[index] = Wire(self.servers[index].address)
        self.discovery.register("ps", index, self.address(index))

    def address(self, index: int) -> str:
        """Where workers find a server."""
        return (self.wires if self.loses_servers else self.servers)[index].address

    def lose_server(self, index: int) -> None:
        """End a server; what it held is gone."""
        assert self.loses_servers
        self.discovery.deregister("ps", index)
        self.wires[index].close()
        held = self.shares[index]._held
        if held is not None and held.copied is not None:
            held.copied.port.close()  # whoever is killed tells nobody what it learned last
        self.shares[index].close_publishing()
        threading.Thread(target=self.servers[index].close, daemon=True).start()

    def replace_server(self, index: int) -> None:
        self.lose_server(index)
        self.start_server(index)

    def miss(self, worker: int) -> None:
        """Have the meeting notice that a worker is gone, as if it had been silent for long enough."""
        meeting = self.shares[0]._meeting

        def noticed() -> bool:
            with meeting._changed:
                assert meeting._run is not None
                run = meeting._run
                if run.failure or worker in run.lost or worker in run.gone:
                    return True
                run.heard[worker] = -float("inf")
                return False

        wait_for(noticed, f"worker {worker} to be missed")

    def take_over(self, place: int, given: Collection[str] = ()) -> str | None:
        """Give a place to a spare, which are the servers that have a number beyond `num_ps`."""
        for index in sorted(self.servers):
            address = self.address(index)
            if index >= self.num_ps and self.servers[index].shard is None and address not in given:
                ServerCalls()(address, "server.assign", index=place, num_ps=self.num_ps)
                return address
        return None

    def fleet(self, index: int = 0, **how: Any) -> Fleet:
        """A worker's place, in a fleet that keeps going."""

        def connect(address: str) -> ServerGroup:
            return ServerGroup([address], patience=timedelta(), timeout=timedelta(seconds=5))

        def find(place: int) -> list[str]:
            found = self.discovery.query("ps").get(place)
            return [] if found is None else [found]

        group = ServerGroup(
            [self.address(place) for place in range(self.num_ps)],
            patience=timedelta(seconds=0.2),
            replacement_timeout=timedelta(seconds=PATIENT),
        )
        if self.copies is not None and index == 0:
            how["standbys"] = self.standbys = Standbys(
                lambda: list(self.discovery.query("ps").values()),
                lambda: [UsedServer(*one) for one in zip(group.addresses, group.incarnations, strict=True)],
                ServerCalls(timeout=timedelta(seconds=PATIENT)),
                wanted=self.standbys_wanted,
                metrics=self.metrics,
                every=0.1,
            )
        fleet = Fleet(
            group,
            ClusterConfig(index=index, num_workers=self.num_workers, max_workers=self.max_workers or 0),
            TimeoutsConfig(start=timedelta(seconds=PATIENT), finish=timedelta(seconds=PATIENT)),
            news_every=SOON,
            keep_going=KeepGoing(find=find, connect=connect, **how) if self.keeps_going else None,
        )
        self.stack.enter_context(fleet)
        group.describe()
        return fleet

    def train(self, index: int = 0, hooks: Sequence[Hook] = (), **how: Any) -> Worker:
        return Worker(self, index, hooks, how)


class Worker(threading.Thread):
    """One worker that trains; `report` waits for its end."""

    def __init__(self, fleet: LosingFleet, index: int, hooks: Sequence[Hook], how: dict[str, Any]) -> None:
        super().__init__(daemon=True, name=f"worker-{index}")
        self.fleet = fleet.fleet(index, **how)
        self.trainer = Trainer(
            fleet.task,
            fleet.config,
            hooks=hooks,
            coordinator=FleetCoordinator(self.fleet),
            publish=fleet.publish,
        )
        self.found: TrainReport | BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.found = self.trainer.train()
        except BaseException as error:
            self.found = error

    def report(self) -> TrainReport:
        self.join(PATIENT)
        assert not self.is_alive(), "a worker hangs"
        if isinstance(self.found, BaseException):
            raise self.found
        assert self.found is not None
        return self.found


def settings(model_dir: Path | str, **more: Any) -> TrainConfig:
    return TrainConfig(
        **{
            "model_dir": str(model_dir),
            "save": SaveConfig(steps=6, retry_secs=0.01),
            "prefetch": 0,
            "async_push": False,
            "summary_every_steps": None,
            "idle_after": timedelta(milliseconds=50),
            **more,
        }
    )
