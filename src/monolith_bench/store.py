"""`monolith bench store` compares rows and dense weights on parameter servers with those in this process.

Servers are processes on this machine, so nothing is said of a network, and they compete with
the worker for its cores. What a call costs beyond the table's own work and the wire shows when compared
with their sum: an echo by plain Flight, which moves the same bytes and does nothing with them, and the same
work in this process, one after the other.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from monolith.errors import ConfigError
from monolith.store import (
    DenseShard,
    LocalStore,
    ParameterServer,
    ParameterServerStore,
    ServerGroup,
    Store,
)
from monolith.wire.flight_transport import import_arrow, import_flight
from monolith_bench.options import BenchStoreOptions
from monolith_bench.report import Report
from monolith_bench.rows import batches_of, fill, table_configs
from monolith_bench.table import counted
from monolith_bench.timing import Contender, Timing, race

BATCHES = 16
WEIGHTS = 8
"""Dense weights, all of one size."""
FLOAT_BYTES, ID_BYTES = 4, 8
StoreCall = Callable[[Store, int], object]
ECHO = "plain Flight echo"
BOTH = "plain Flight echo and this process, added"
HALF = "half floats"
PURPOSE = "monolith bench store"


@dataclass(frozen=True, kw_only=True, slots=True)
class StorePlan:
    """The options, settled."""

    ids: tuple[int, ...]
    rows: int
    dim: int
    servers: tuple[int, ...]
    dense_bytes: int
    timing: Timing
    seed: int

    @classmethod
    def settle(cls, options: BenchStoreOptions) -> StorePlan:
        for name in ("ids", "rows", "dim", "servers", "repeats"):
            if np.min(getattr(options, name), initial=1) < 1:
                raise ConfigError(f"bench store: --{name} must be at least 1, got {getattr(options, name)}")
        least = WEIGHTS * FLOAT_BYTES
        if options.dense_bytes < least:
            raise ConfigError(
                f"bench store: --dense-bytes must be at least {least}, got {options.dense_bytes}"
            )
        rows = max(min(options.rows, 20_000), *options.ids) if options.quick else options.rows
        if max(options.ids) > rows:
            raise ConfigError(
                f"bench store: a batch of {max(options.ids)} distinct --ids needs as many --rows, and there "
                f"are {rows}"
            )
        return cls(
            ids=options.ids,
            rows=rows,
            dim=options.dim,
            servers=options.servers,
            dense_bytes=options.dense_bytes,
            timing=Timing(repeats=1, window=0.02)
            if options.quick
            else Timing(repeats=options.repeats, window=0.15),
            seed=options.seed,
        )


def run(options: BenchStoreOptions) -> int:
    """Measure, draw tables on standard error, and print JSON on request."""
    plan = StorePlan.settle(options)
    report = Report("store")
    measure(plan, report)
    report.finish()
    if options.json:
        report.print_json()
    return 0


def measure(plan: StorePlan, report: Report) -> None:
    with ExitStack() as stack:
        report.say(f"filling {plan.rows:,} rows, here and on {max(plan.servers)} processes or fewer")
        configs = table_configs(plan.dim)
        stores: dict[str, Store] = {"this process": LocalStore.from_configs(configs, threads=1)}
        # All are started before the first is awaited: most of their start is importing torch.
        started = {
            count: [stack.enter_context(child("serve", n, count, plan)) for n in range(count)]
            for count in plan.servers
        }
        echo_server = stack.enter_context(child("serve_echo", 0, 1, plan))
        for count, processes in started.items():
            group = ServerGroup([address_of(process) for process in processes])
            stack.callback(group.close)
            stores[counted(count, "server")] = ParameterServerStore(group, 0, configs)
        rounding = ServerGroup(group.addresses, half=True)
        stack.callback(rounding.close)
        halves = ParameterServerStore(rounding, 0, configs)
        echo = stack.enter_context(Echo.connected(address_of(echo_server)))
        for store in stores.values():
            fill(store, rows=plan.rows, dim=plan.dim)
        for size in plan.ids:
            measure_rows(plan, report, stores, echo, size, halves=halves)
        measure_dense(plan, report, stores, echo)
        for store in stores.values():
            store.close()


# Rows


def measure_rows(
    plan: StorePlan,
    report: Report,
    stores: dict[str, Store],
    echo: Echo,
    size: int,
    *,
    halves: ParameterServerStore,
) -> None:
    """Measure batches of one size; `halves` looks up in half floats, on the last of the stores."""
    batches = batches_of(size, rows=plan.rows, count=BATCHES, seed=plan.seed)
    gradients = [torch.full((size * plan.dim,), 0.01) for _ in batches]
    row_bytes = size * plan.dim * FLOAT_BYTES
    calls: dict[str, tuple[StoreCall, int, int]] = {
        "lookup": (lambda store, number: store.lookup(batches[number]), size * ID_BYTES, row_bytes),
        "apply_gradients": (
            lambda store, number: store.apply_gradients(batches[number], gradients[number], event_time=1),
            size * ID_BYTES + row_bytes,
            0,
        ),
    }
    for name, (call, up, down) in calls.items():
        case = f"{name}, {size:,} ids"
        report.say(case)

        contenders = {where: contender(size, stepper(store, call)) for where, store in stores.items()}
        contenders[ECHO] = contender(size, echo.of(up, down))
        if name == "lookup":
            contenders[f"{list(stores)[-1]}, {HALF}"] = contender(size, stepper(halves, call))
        rates = race(contenders, **plan.timing)
        here, wire = rates.pop("this process"), rates.pop(ECHO)
        baselines = {
            f"{case}, {BOTH}": 1 / (1 / here + 1 / wire),
            f"{case}, {ECHO}": wire,
            f"{case}, this process": here,
        }
        for baseline, rate in baselines.items():
            add(report, baseline, size, rate)
        for where, rate in rates.items():
            report.compare(f"{case}, {where}", "rows_per_s", rate, "rows/s", baselines)
            report.add(f"{case}, {where}", "ms_per_call", size / rate * 1e3, "ms")
    report.show(f"Batches of {size:,} distinct ids, {plan.dim} floats each")


def stepper(store: Store, call: StoreCall) -> Callable[[int], object]:
    return lambda number: call(store, number)


def add(report: Report, case: str, size: int, rate: float) -> None:
    report.add(case, "rows_per_s", rate, "rows/s")
    report.add(case, "ms_per_call", size / rate * 1e3, "ms")


# Dense weights


def measure_dense(plan: StorePlan, report: Report, stores: dict[str, Store], echo: Echo) -> None:
    case = f"dense push and pull, {plan.dense_bytes / 1e6:g} MB"
    report.say(case)
    contenders: dict[str, Contender] = {}
    for where, store in stores.items():
        weights, optimizer = make_dense(plan.dense_bytes)
        store.attach_dense(weights, optimizer)
        gradients = [torch.ones_like(weight) for weight in weights.values()]
        contenders[where] = contender(1, pusher(store, list(weights.values()), gradients))
    contenders[ECHO] = contender(1, echo.of(plan.dense_bytes, plan.dense_bytes))
    costs = {name: 1e3 / rate for name, rate in race(contenders, **plan.timing).items()}
    baselines = {f"{case}, {where}": costs.pop(where) for where in (ECHO, "this process")}
    for baseline, cost in baselines.items():
        report.add(baseline, "ms_per_call", cost, "ms")
    for where, cost in costs.items():
        report.compare(f"{case}, {where}", "ms_per_call", cost, "ms", baselines)
    report.show("Dense weights, plain descent")


def pusher(store: Store, weights: list[nn.Parameter], gradients: list[Tensor]) -> Callable[[int], object]:
    def push(_: int) -> None:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        store.push_dense()
        store.pull_dense()

    return push


def make_dense(size: int) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    floats = size // FLOAT_BYTES // WEIGHTS
    weights = {f"weight{number}": nn.Parameter(torch.zeros(floats)) for number in range(WEIGHTS)}
    return weights, torch.optim.SGD(weights.values(), lr=0.01)


def contender(rows: int, call: Callable[[int], object]) -> Contender:
    return Contender(rows, call, itertools.cycle(range(BATCHES)))


# Processes


@contextmanager
def child(role: str, number: int, count: int, plan: StorePlan) -> Iterator[subprocess.Popen[str]]:
    """Start a server in a process of its own, which ends with the block, or with us."""
    arguments: Sequence[int] = (number, count, plan.dim, plan.dense_bytes)
    program = f"from monolith_bench import store; store.{role}({', '.join(map(str, arguments))})"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def address_of(process: subprocess.Popen[str]) -> str:
    """Wait until a child listens."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def serve(number: int, count: int, dim: int, dense_bytes: int) -> None:
    """Be one of several servers until standard input ends."""
    store = LocalStore.from_configs(table_configs(dim), threads=1)
    share = DenseShard(*make_dense(dense_bytes), (number, count))
    with ParameterServer([store], share, shard=(number, count)) as server:
        announce(server.address)


def serve_echo(*_: int) -> None:
    """Answer every message with as many bytes as it asks for, until standard input ends."""
    arrow, flight = import_arrow(PURPOSE), import_flight(PURPOSE)

    class EchoServer(flight.FlightServerBase):  # type: ignore[misc, name-defined]
        def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:  # noqa: ARG002
            first = True
            batches: dict[int, Iterator[Any]] = {}
            while True:
                try:
                    chunk = reader.read_chunk()
                except StopIteration:
                    return
                size = int(chunk.app_metadata.to_pybytes())
                if size not in batches:
                    batches[size] = itertools.cycle(byte_batches(arrow, size))
                batch = next(batches[size])
                if first:
                    writer.begin(batch.schema)
                    first = False
                writer.write_batch(batch)

    server = EchoServer("grpc+tcp://127.0.0.1:0")
    announce(f"127.0.0.1:{server.port}")


def announce(address: str) -> None:
    sys.stdout.write(f"{address}\n")
    sys.stdout.flush()
    sys.stdin.read()


class Echo:
    """A stream to a server that sends back so many bytes for so many."""

    def __init__(self, writer: Any, reader: Any) -> None:
        self._writer, self._reader = writer, reader
        self._begun = False

    @classmethod
    @contextmanager
    def connected(cls, address: str) -> Iterator[Echo]:
        flight = import_flight(PURPOSE)
        with flight.connect(f"grpc+tcp://{address}") as client:
            writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b""))
            with writer:
                yield cls(writer, reader)

    def of(self, up: int, down: int) -> Callable[[int], object]:
        """Return what sends so many bytes and waits for so many."""
        batches, asked = byte_batches(import_arrow(PURPOSE), up), str(down).encode()

        def exchange(number: int) -> object:
            if not self._begun:
                self._writer.begin(batches[0].schema)
                self._begun = True
            self._writer.write_with_metadata(batches[number], asked)
            return self._reader.read_chunk()

        return exchange


def byte_batches(arrow: Any, size: int) -> list[Any]:
    """Return messages of some bytes, sent in turn: rows and gradients are other memory in every step."""
    some = [np.full(size, number, np.uint8) for number in range(BATCHES)]
    return [arrow.record_batch([arrow.array(one)], names=["bytes"]) for one in some]
