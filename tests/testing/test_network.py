"""The network of a simulation carries the calls of the real client to the real server, or breaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from monolith import concurrency
from monolith.errors import ClusterError, DeadlineExceededError, ListenError, UnavailableError
from monolith.testing.network import NetworkFaults, SimNetwork
from monolith.testing.scheduler import SimMachine, Simulation
from monolith.wire.endpoint import Handlers
from monolith.wire.flight import Caller
from monolith.wire.flight_server import Server
from monolith.wire.transport import Service

SERVICE = Service(
    name="counter",
    peers="clients and the server",
    failure=ClusterError,
    told=(UnavailableError,),
    unreachable=UnavailableError,
    late=DeadlineExceededError,
)
ADDRESS = "server:7000"


class World:
    """A server that counts, and machines that call it."""

    def __init__(self, seed: int, faults: NetworkFaults | None = None) -> None:
        self.simulation = Simulation(seed)
        self.network = SimNetwork(self.simulation, faults)
        self.applied: Counter[str] = Counter()
        self.server = self.machine("server")

    def machine(self, name: str) -> SimMachine:
        found = self.simulation.machine(name)
        found.transport = self.network.transport(found)
        return found

    def serve(self) -> None:
        def add(body: dict[str, Any]) -> dict[str, Any]:
            self.applied[body["key"]] += 1
            return {"count": self.applied[body["key"]]}

        def double(_: dict[str, Any], data: Any) -> tuple[dict[str, Any], Any]:
            return {"size": len(data)}, data * 2

        def slow(_: dict[str, Any], gone: Callable[[], bool]) -> dict[str, Any]:
            while not gone():
                concurrency.sleep(1)
            return {}

        handlers = Handlers(calls={"add": add}, polls={"slow": slow}, exchanges={"double": double})
        self.server.spawn(lambda: Server(SERVICE, handlers, host="server", port=7000)).join()

    def run(self, play: Callable[[], object]) -> None:
        self.simulation.run(lambda: (self.serve(), self.machine("client").spawn(play).join()))


def caller(**options: Any) -> Caller:
    return Caller(SERVICE, ADDRESS, **options)


def test_a_call_reaches_the_server_and_its_answer_the_caller() -> None:
    world = World(1)
    world.run(lambda: [caller().call("add", key="a") for _ in range(3)])
    assert world.applied == {"a": 3}
    assert 0 < world.simulation.now < 1


def test_a_stream_carries_bytes_in_both_directions() -> None:
    def play() -> None:
        stream = caller().open_stream()
        for _ in range(3):
            stream.send("double", {}, np.arange(4, dtype=np.uint8))
            answer = stream.receive()
            assert answer.body == {"size": 4}
            assert answer.data.tolist() == [0, 2, 4, 6]
        stream.close()

    World(1).run(play)


def test_a_broken_connection_may_have_applied_the_call_or_not() -> None:
    counts = []
    for seed in range(40):
        world = World(seed, NetworkFaults(break_chance=1.0))

        def play() -> None:
            with pytest.raises(UnavailableError, match="the connection broke"):
                caller().call("add", key="a")

        world.run(play)
        counts.append(world.applied["a"])
    assert set(counts) == {0, 1}


def test_a_call_over_a_cut_is_late_and_may_arrive_after_the_cut() -> None:
    world = World(3)

    def play() -> None:
        world.network.cut("client", "server")
        with pytest.raises(DeadlineExceededError):
            caller(timeout=timedelta(seconds=2)).call("add", key="a")
        assert not world.applied
        world.network.heal()
        concurrency.sleep(1)
        assert world.applied == {"a": 1}

    world.run(play)


def test_a_killed_server_breaks_the_calls_that_wait_for_it() -> None:
    world = World(4)

    def play() -> None:
        concurrency.Thread(target=lambda: (concurrency.sleep(5), world.server.kill())).start()
        with pytest.raises(UnavailableError, match="the server is gone"):
            caller().call("slow")
        with pytest.raises(UnavailableError, match="nothing listens"):
            caller().call("add", key="a")

    world.run(play)


def test_a_caller_with_patience_finds_the_restarted_server() -> None:
    world = World(5)

    def play() -> None:
        world.server.kill()

        def restart() -> None:
            concurrency.sleep(30)
            world.server = world.machine("server")
            world.serve()

        concurrency.Thread(target=restart).start()
        caller(patience=timedelta(minutes=1)).call("add", key="a")

    world.run(play)
    assert world.applied == {"a": 1}
    assert world.simulation.now > 30


def test_a_port_is_listened_on_once() -> None:
    world = World(6)

    def play() -> None:
        with pytest.raises(ListenError):
            Server(SERVICE, Handlers(), host="server", port=7000)

    world.run(play)
