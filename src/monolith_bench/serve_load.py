"""Load for a server: so many connections that each ask again as soon as they are answered.

Runs in a process of its own, so that the server does not wait for its client, and speaks as little Python as
it can: what is sent is made once, and of an answer only its status is read.

    python -c COMMAND http 127.0.0.1:8000 8 2.0 4711 < request

It also reads how much processor time the server takes meanwhile, that of a process and of all its children,
and how much it takes itself: what a faster client could win.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from monolith_bench.grpc_caller import GrpcCaller

COMMAND = "import sys; from monolith_bench.serve_load import main; sys.exit(main(sys.argv[1:]))"
GRPC_METHOD = "/inference.GRPCInferenceService/ModelInfer"
_PATIENCE = 60.0
_WARM_UP = 0.05
"""Seconds in which a server is asked before it is measured."""


@dataclass(frozen=True, slots=True)
class LoadSeen:
    """What the callers saw."""

    requests: int
    failed: int
    seconds: float
    p50: float
    """Seconds."""
    p99: float
    processor: float = 0.0
    """Seconds of processor time of the server meanwhile, user and system."""
    client: float = 0.0
    """Seconds of processor time of the client; 0 if it is no process of its own."""


def main(words: list[str]) -> int:
    """Ask with what standard input holds, and print a `LoadSeen` as JSON."""
    kind, address, connections, seconds, process = words
    request = sys.stdin.buffer.read()
    load(kind, address, request, int(connections), _WARM_UP)
    before, own = processor_seconds(int(process)), time.process_time()
    report = load(kind, address, request, int(connections), float(seconds))
    client, used = time.process_time() - own, processor_seconds(int(process)) - before
    sys.stdout.write(json.dumps(asdict(replace(report, processor=used, client=client))) + "\n")
    return 0


def processor_seconds(process: int, proc: Path = Path("/proc")) -> float:
    """Return the user and system time of a process and its living children; 0 if there is no /proc."""
    if not proc.is_dir():
        return 0.0
    # The clock that clock_getcpuclockid(3) returns for a process, which Python does not call. Its nanoseconds
    # are user and system time of all threads; /proc/PID/stat has the same in ticks of 10 ms.
    own = time.clock_gettime((~process << 3) | 2)
    children = (proc / str(process) / "task" / str(process) / "children").read_text().split()
    return own + sum(processor_seconds(int(child)) for child in children)


def load(kind: str, address: str, request: bytes, connections: int, seconds: float) -> LoadSeen:
    """Ask as often as `connections` callers can, and return what they saw.

    Args:
        kind: "http", where `request` is all that goes over the connection, or "grpc", where it is a message.
        address: host:port.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        ask = _load_http if kind == "http" else _load_grpc
        return runner.run(ask(address, request, connections, seconds))


class HttpCaller(asyncio.Protocol):
    """One connection over HTTP: asks, and asks again when the answer is whole."""

    def __init__(self, request: bytes, seen: list[float], failed: list[int], end: float) -> None:
        self._request = request
        self._seen = seen
        self._failed = failed
        self._end = end
        self._read = bytearray()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        self._begun = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._read += data
        head = self._read.find(b"\r\n\r\n")
        if head < 0:
            return
        at = self._read.find(b"content-length: ")
        size = int(self._read[at + 16 : self._read.find(b"\r\n", at)])
        if len(self._read) < head + 4 + size:
            return
        now = time.perf_counter()
        self._seen.append(now - self._begun)
        if self._read[9:12] != b"200":
            self._failed.append(1)
        self._read.clear()
        if now < self._end:
            self._ask()
        else:
            self._finish()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        if not self.done.done():
            self._failed.append(1)
            self.done.set_result(None)

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
        self._transport.close()


Caller = HttpCaller | GrpcCaller


async def _load_http(address: str, request: bytes, connections: int, seconds: float) -> LoadSeen:
    seen: list[float] = []
    failed: list[int] = []
    end = time.perf_counter() + seconds

    def caller() -> HttpCaller:
        return HttpCaller(request, seen, failed, end)

    return await _until_done(address, caller, connections, seconds, (seen, failed))


async def _load_grpc(address: str, request: bytes, connections: int, seconds: float) -> LoadSeen:
    seen: list[float] = []
    failed: list[int] = []
    end = time.perf_counter() + seconds

    def caller() -> GrpcCaller:
        return GrpcCaller(GRPC_METHOD, address, request, seen=seen, failed=failed, end=end)

    return await _until_done(address, caller, connections, seconds, (seen, failed))


async def _until_done(
    address: str,
    make: Callable[[], Caller],
    connections: int,
    seconds: float,
    noted: tuple[list[float], list[int]],
) -> LoadSeen:
    """Connect as often as asked, and wait until every caller is done."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    begun = time.perf_counter()
    callers = [(await loop.create_connection(make, host, int(port)))[1] for _ in range(connections)]
    async with asyncio.timeout(seconds + _PATIENCE):
        await asyncio.gather(*(caller.done for caller in callers))
    seen, failed = noted
    return _report(seen, len(failed), time.perf_counter() - begun)


def _report(seen: list[float], failed: int, seconds: float) -> LoadSeen:
    ordered = sorted(seen)
    return LoadSeen(
        requests=len(seen),
        failed=failed,
        seconds=seconds,
        p50=percentile(ordered, 0.50),
        p99=percentile(ordered, 0.99),
    )


def percentile(ordered: list[float], share: float) -> float:
    """Return the value below which a share of others lie; of nothing, infinity."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("inf")


def _loop_factory() -> Any:
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.new_event_loop
    return None
