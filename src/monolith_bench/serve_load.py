"""Load for a server: so many connections that each ask again as soon as they are answered.

Runs in a process of its own, so that the server does not wait for its client. What is sent is made once, and
of an answer only its status is read: over HTTP by the core, without Python, and over gRPC by `grpc_caller`.

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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from monolith import native
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
    """Seconds of processor time of the client while it asks; 0 if it is no process of its own."""


def main(words: list[str]) -> int:
    """Ask with what standard input holds, and print a `LoadSeen` as JSON."""
    kind, address, connections, seconds, process = words
    request = sys.stdin.buffer.read()
    load(kind, address, request, int(connections), _WARM_UP)
    before = processor_seconds(int(process))
    report = load(kind, address, request, int(connections), float(seconds))
    used = processor_seconds(int(process)) - before
    sys.stdout.write(json.dumps(asdict(replace(report, processor=used))) + "\n")
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
    host, _, port = address.rpartition(":")
    if kind == "http":
        seen = native.load_http(host, int(port), request, connections, seconds, _PATIENCE)
        answers = sum(seen.answers.values())
        return LoadSeen(
            requests=answers,
            failed=answers - seen.answers.get(200, 0) + seen.closed,
            seconds=seen.seconds,
            p50=seen.quantile(0.50),
            p99=seen.quantile(0.99),
            client=seen.processor_seconds,
        )
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_load_grpc(host, int(port), request, connections, seconds))


async def _load_grpc(host: str, port: int, request: bytes, connections: int, seconds: float) -> LoadSeen:
    """Connect as often as asked, and wait until every caller is done."""
    seen: list[float] = []
    failed: list[int] = []
    begun, used = time.perf_counter(), time.process_time()
    end = begun + seconds

    def caller() -> GrpcCaller:
        return GrpcCaller(GRPC_METHOD, f"{host}:{port}", request, seen=seen, failed=failed, end=end)

    loop = asyncio.get_running_loop()
    callers = [(await loop.create_connection(caller, host, port))[1] for _ in range(connections)]
    async with asyncio.timeout(seconds + _PATIENCE):
        await asyncio.gather(*(caller.done for caller in callers))
    ordered = sorted(seen)
    return LoadSeen(
        requests=len(seen),
        failed=len(failed),
        seconds=time.perf_counter() - begun,
        p50=percentile(ordered, 0.50),
        p99=percentile(ordered, 0.99),
        client=time.process_time() - used,
    )


def percentile(ordered: list[float], share: float) -> float:
    """Return the value below which a share of others lie; of nothing, infinity."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("inf")


def _loop_factory() -> Any:
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.new_event_loop
    return None
