"""gRPC in a simulation: what a bad network does to calls, and the real ports over it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from contracts.grpc_ports import SimGrpcPorts

from monolith import concurrency
from monolith.cluster.security import SecurityConfig
from monolith.concurrency import Future
from monolith.config import Secret
from monolith.errors import BarrierAlreadyPlacedError, TrainingError
from monolith.testing.network import NetworkFaults
from monolith.testing.scheduler import SimMachine
from monolith.train.hooks.barrier import LocalBarrier
from monolith.train.hooks.control_server import ControlClient, ControlServerHook

SECURITY = SecurityConfig(token=Secret("of-the-run"))


class Run(NamedTuple):
    """A run as the control server sees it."""

    model_dir: str
    step: int


def play_with(play: Callable[[SimGrpcPorts], object], seed: int = 0) -> None:
    SimGrpcPorts.run(play, seed)  # type: ignore[arg-type]


def restart(ports: SimGrpcPorts) -> None:
    """Give the server another machine, as after a reboot."""
    simulation = ports.server.simulation
    machine = simulation.machine("server")
    machine.grpc = type(ports.server.grpc)(ports.network, machine)
    ports.server = machine


def test_a_broken_connection_may_have_had_its_effect_or_not() -> None:
    effects = []
    for seed in range(40):
        done: list[bytes] = []

        def play(ports: SimGrpcPorts, done: list[bytes] = done) -> None:
            method = ports.method(ports.serve(lambda data, _: done.append(data) or data)[1])
            ports.network.faults = NetworkFaults(break_chance=1.0)
            error = ports.failure(lambda: method(b"a", timeout=30))
            assert (error.code().name, error.details()) == ("UNAVAILABLE", "Socket closed")

        play_with(play, seed)
        effects.append(len(done))
    assert set(effects) == {0, 1}


def test_a_broken_connection_ends_all_of_its_calls() -> None:
    def play(ports: SimGrpcPorts) -> None:
        begun: list[bytes] = []

        def answer(data: bytes, context: Any) -> bytes:
            begun.append(data)
            ports.until(lambda: data == b"breaks" or not context.is_active())
            return data

        method = ports.method(ports.serve(answer)[1])
        waits = method.future(b"waits", timeout=60)
        ports.until(lambda: begun)
        ports.network.faults = NetworkFaults(break_chance=1.0)
        assert ports.failure(lambda: method(b"breaks", timeout=60)).code().name == "UNAVAILABLE"
        assert ports.failure(waits.result).code().name == "UNAVAILABLE"

    play_with(play)


def test_a_cut_off_client_waits_for_its_deadline_and_its_call_arrives_after_the_cut() -> None:
    def play(ports: SimGrpcPorts) -> None:
        done: list[bytes] = []
        method = ports.method(ports.serve(lambda data, _: done.append(data) or data)[1])
        assert method(b"a", timeout=30) == b"a"
        ports.network.cut("client", "server")
        began = concurrency.monotonic()
        assert ports.failure(lambda: method(b"b", timeout=2)).code().name == "DEADLINE_EXCEEDED"
        assert 2 <= concurrency.monotonic() - began < 2.1
        assert done == [b"a"]
        ports.network.heal()
        ports.until(lambda: done == [b"a", b"b"])
        assert method(b"c", timeout=30) == b"c"

    play_with(play)


def test_an_answer_waits_until_the_cut_is_over() -> None:
    def play(ports: SimGrpcPorts) -> None:
        def answer(data: bytes, _: Any) -> bytes:
            ports.network.cut("client", "server")
            return data

        call = ports.method(ports.serve(answer)[1]).future(b"a", timeout=30)
        concurrency.sleep(3)
        assert not call.done()
        ports.network.heal()
        assert call.result() == b"a"

    play_with(play)


def test_a_connection_cannot_be_made_over_a_cut() -> None:
    def play(ports: SimGrpcPorts) -> None:
        _, address = ports.serve(lambda data, _: data)
        ports.network.cut("client", "server")
        method = ports.method(address)
        assert ports.failure(lambda: method(b"", timeout=2)).code().name == "DEADLINE_EXCEEDED"
        began = concurrency.monotonic()
        assert ports.failure(lambda: method(b"", timeout=60)).code().name == "UNAVAILABLE"
        assert 19 < concurrency.monotonic() - began < 21, "as long as gRPC tries to connect"

    play_with(play)


@pytest.mark.parametrize("cut", [False, True])
def test_a_killed_server_ends_its_calls_once_the_client_can_know(cut: bool) -> None:
    def play(ports: SimGrpcPorts) -> None:
        begun: list[bytes] = []

        def answer(data: bytes, _: Any) -> bytes:
            begun.append(data)
            concurrency.sleep(100)
            return data

        _, address = ports.serve(answer)
        method = ports.method(address)
        calls = [method.future(b"", timeout=60)]
        ports.until(lambda: begun)
        if cut:
            ports.network.cut("client", "server")
        ports.server.kill()
        calls.append(method.future(b"", timeout=60))
        concurrency.sleep(2)
        assert [one.done() for one in calls] == [not cut] * 2, "a cut-off client knows nothing"
        restart(ports)
        ports.serve(lambda data, _: data, port=int(address.rpartition(":")[2]))
        ports.network.heal()
        assert [ports.failure(one.result).code().name for one in calls] == ["UNAVAILABLE"] * 2
        concurrency.sleep(1)
        assert method(b"a", timeout=60) == b"a"

    play_with(play)


def test_the_handler_of_a_killed_client_learns_that_it_is_gone() -> None:
    def play(ports: SimGrpcPorts) -> None:
        seen: list[str] = []

        def answer(data: bytes, context: Any) -> bytes:
            seen.append("begun")
            ports.until(lambda: not context.is_active())
            seen.append("over")
            return data

        _, address = ports.serve(answer)
        other = ports.server.simulation.machine("other")
        other.grpc = type(ports.server.grpc)(ports.network, other)
        other.spawn(lambda: SimGrpcPorts().method(address)(b"", timeout=60))
        ports.until(lambda: seen)
        other.kill()
        ports.until(lambda: seen == ["begun", "over"])

    play_with(play)


def test_a_channel_waits_longer_after_each_refused_connection() -> None:
    def play(ports: SimGrpcPorts) -> None:
        method = ports.method("server:1")
        looked = []
        began = concurrency.monotonic()
        while concurrency.monotonic() < began + 10:
            error = ports.failure(lambda: method(b"", timeout=1))
            if "waiting to try again" not in error.details():
                looked.append(concurrency.monotonic() - began)
            concurrency.sleep(0.01)
        waits = [after - before for before, after in pairwise(looked)]
        assert waits[0] < 0.2
        assert waits[-1] > 1

    play_with(play)


def test_an_order_to_a_run_whose_answer_was_lost_can_be_given_again() -> None:
    outcomes = set()
    for seed in range(20):

        def play(ports: SimGrpcPorts) -> None:
            saved: Future[str | None] = Future()
            barrier = LocalBarrier(1)
            hook = ControlServerHook(barrier, lambda: saved, address="server:7000", security=SECURITY)
            ports.server.spawn(lambda: hook.after_create(Run("", 7))).join()  # type: ignore[arg-type]
            job = ControlClient("", address="server:7000", security=SECURITY)
            ports.network.faults = NetworkFaults(break_chance=1.0)
            with pytest.raises(TrainingError, match="UNAVAILABLE"):
                job.stop_training()
            ports.network.faults = NetworkFaults()
            if has_stopped := bool(barrier.blocked_indices()):
                with pytest.raises(BarrierAlreadyPlacedError):
                    job.stop_training()
            else:
                job.stop_training()
            outcomes.add(has_stopped)
            for _ in range(2):
                job.resume_training()
            assert not barrier.blocked_indices()
            for _ in range(5):  # more than may wait at a time: those whose callers are gone make room
                with pytest.raises(TrainingError, match="DEADLINE_EXCEEDED"):
                    job.save_checkpoint(timeout=1)
                concurrency.sleep(1)
            saved.set_result("model.ckpt-7")
            job.save_checkpoint(timeout=1)
            assert job.global_step() == 7

        play_with(play, seed)
    assert outcomes == {False, True}


def test_names_of_grpc_that_are_not_simulated_are_refused() -> None:
    def play(ports: SimGrpcPorts) -> None:
        with pytest.raises(AttributeError, match=r"grpc\.aio is not simulated"):
            _ = ports.lib.aio
        assert isinstance(concurrency.machine(), SimMachine)

    play_with(play)
