"""gRPC for the contract of its ports: the real package on this machine, and the simulated one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monolith import concurrency
from monolith.concurrency import ThreadPoolExecutor
from monolith.testing.grpc import SimGrpc
from monolith.testing.network import SimNetwork
from monolith.testing.scheduler import SimMachine, Simulation
from monolith.wire.grpc_ports import import_grpc

METHOD = "/contract.Service/Call"
Answer = Callable[[bytes, Any], bytes]


class GrpcPorts:
    """Serves one method, and calls it."""

    host = "127.0.0.1"

    def __init__(self) -> None:
        self.lib = import_grpc("grpc", "its contract")
        self._close: list[Callable[[], object]] = []

    def serve(self, answer: Answer, *, port: int = 0, threads: int = 8, **options: Any) -> tuple[Any, str]:
        """Return a server whose method answers so, and its address."""
        grpc = import_grpc("grpc", "its contract")
        handler = grpc.unary_unary_rpc_method_handler(answer)
        server = grpc.server(ThreadPoolExecutor(threads), **options)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("contract.Service", {"Call": handler}),)
        )
        port = server.add_insecure_port(f"{self.host}:{port}")
        server.start()
        self._close.append(lambda: server.stop(None).wait())
        return server, f"{self.host}:{port}"

    def channel(self, address: str) -> Any:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 100)]
        channel = self.lib.insecure_channel(address, options=options)
        self._close.append(channel.close)
        return channel

    def method(self, address: str, name: str = METHOD) -> Any:
        return self.channel(address).unary_unary(name)

    def failure(self, call: Callable[[], object]) -> Any:
        """Return the error of a call: code, details and trailing metadata."""
        try:
            answer = call()
        except self.lib.RpcError as error:
            return error
        raise AssertionError(f"the call was answered: {answer!r}")

    def until(self, holds: Callable[[], object]) -> None:
        """Wait until something is true."""
        end = concurrency.monotonic() + 30
        while not holds():
            assert concurrency.monotonic() < end, "it did not happen within 30 s"
            concurrency.sleep(0.01)

    def close(self) -> None:
        for close in reversed(self._close):
            close()

    @classmethod
    def run(cls, play: Callable[[GrpcPorts], object]) -> None:
        """Run a test, here or in a simulation."""
        ports = cls()
        try:
            play(ports)
        finally:
            ports.close()


class SimGrpcPorts(GrpcPorts):
    """A server and a client on two simulated machines."""

    host = "server"
    server: SimMachine
    network: SimNetwork

    def serve(self, answer: Answer, **options: Any) -> tuple[Any, str]:
        found: list[tuple[Any, str]] = []
        failed: list[Exception] = []

        def begin() -> None:
            try:
                found.append(GrpcPorts.serve(self, answer, **options))
            except Exception as error:
                failed.append(error)

        self.server.spawn(begin).join()
        if failed:
            raise failed[0]
        self._close.pop()  # its machine ends with the simulation
        return found[0]

    @classmethod
    def run(cls, play: Callable[[GrpcPorts], object], seed: int = 0) -> None:
        simulation = Simulation(seed)
        network = SimNetwork(simulation)

        def machine(name: str) -> SimMachine:
            made = simulation.machine(name)
            made.grpc = SimGrpc(network, made)
            return made

        def client() -> None:
            ports = cls()
            ports.server, ports.network = machine("server"), network
            play(ports)
            ports.close()

        simulation.run(lambda: machine("client").spawn(client).join())
