"""What requests cost on this machine, measured through the classes that a run uses.

Processor time is measured, of the worker and of the servers each, not the time that passes: others who use
the machine disturb it less, and a simulation can put it onto as many machines as it likes.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from monolith.checkpoint import Checkpointer, Saver, TablesPart
from monolith.runtime.coordinator import Start
from monolith.runtime.messages import AskNews, BeginService, Join, OpenRun
from monolith.runtime.service import CoordinationService
from monolith.store import LocalStore, ParameterServer, ParameterServerStore, ServerGroup, Store, TableIds
from monolith.table import NativeTable
from monolith_bench.rows import batches_of, fill, table_configs

Floats = NDArray[np.float64]

MANY = 16
"""Servers in one process, to see what one request more costs who asks."""
FLOAT_BYTES, ID_BYTES = 4, 8
_BATCHES = 8
_MEETING = 1_000
"""Workers of the meeting that is measured."""


@dataclass(frozen=True, slots=True)
class DirectionCost:
    """Processor seconds of one exchange with S servers about n ids in all."""

    client_call: float
    client_request: float
    """For each server."""
    client_row: float
    """For each id: routing, writing, reading."""
    server_request: float
    server_row: float
    table_row: float
    """The part of `server_row` that is the table's own work."""
    bytes_up: int
    """For each id."""
    bytes_down: int


@dataclass(frozen=True, slots=True)
class Costs:
    """What there is to know of one machine."""

    lookup: DirectionCost
    push: DirectionCost
    call_client: float
    """Processor seconds of a small call, for who makes it."""
    call_server: float
    fan_out_client: float
    """The same where all servers are called at a time, for each."""
    look_for_lost: float
    """Processor seconds of one look at who is lost, for each worker, where workers meet."""
    wait_for_news: float
    """Processor seconds of a worker's wait for news there, until it is looked whether it is gone."""
    wake: float
    """Seconds of a request without work on either side: the wire of this machine, and waking up."""
    delays: Floats
    """Seconds by which answers came later than half of them did."""
    row_bytes: float
    """Memory of a row, its place in the index included."""
    saved_bytes: float
    """Of a row, on disk."""
    save_row: float
    """Processor seconds."""
    restore_row: float
    connection_files: float
    """Descriptors of one worker for each server."""
    connection_bytes: float
    """Memory of a server for each worker."""
    connection_threads: float
    """Threads of a server for each worker."""


class MeasuredExchange(NamedTuple):
    """One exchange, on average."""

    servers: int
    ids: int
    client: float
    server: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CostPlan:
    """How much is measured."""

    dim: int = 16
    rows: int = 200_000
    ids: tuple[int, ...] = (200, 4_000, 40_000)
    seconds: float = 1.0
    """For each size."""
    calls: int = 2_000
    """Small requests, for the delays."""
    seed: int = 0


# Processes


class Host:
    """A process with servers in it, that says what it has used."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.groups: list[list[str]] = []

    def listening(self) -> Host:
        """Wait until its servers listen."""
        self.groups = [group.split() for group in self._line().split(";")]
        return self

    def used(self) -> tuple[float, int, int]:
        """Return its processor seconds, its threads and its memory."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        seconds, threads, memory = self._line().split()
        return float(seconds), int(threads), int(memory)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise ChildProcessError("a process with servers has ended; see its error above")
        return line


@contextmanager
def hosting(shares: Sequence[Sequence[tuple[int, int]]], dim: int) -> Iterator[Host]:
    """Start a process with groups of servers, which ends with the block, or with us."""
    words = ";".join(" ".join(f"{k}/{n}" for k, n in group) for group in shares)
    program = f"from monolith_bench import scale_costs; scale_costs.host({words!r}, {dim})"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Host(process)
        finally:
            process.kill()


def host(words: str, dim: int) -> None:
    """Be such a process until standard input ends."""
    with ExitStack() as stack:
        lines: list[str] = []
        for group in words.split(";"):
            addresses = []
            for word in group.split():
                number, _, count = word.partition("/")
                store = LocalStore.from_configs(table_configs(dim), threads=1)
                server = ParameterServer([store], shard=(int(number), int(count)))
                addresses.append(stack.enter_context(server).address)
            lines.append(" ".join(addresses))
        sys.stdout.write(";".join(lines) + "\n")
        sys.stdout.flush()
        for _ in sys.stdin:
            sys.stdout.write(f"{time.process_time()} {entries('/proc/self/task')} {resident()}\n")
            sys.stdout.flush()


def resident() -> int:
    """Return the bytes that this process has in memory."""
    path = Path("/proc/self/statm")
    if path.is_file():
        return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# Batches


def planned(size: int, plan: CostPlan) -> list[TableIds]:
    return batches_of(size, rows=plan.rows, count=_BATCHES, seed=plan.seed)


Exchange = Callable[[Store, TableIds], object]


def exchanges(size: int, dim: int) -> dict[str, Exchange]:
    gradients = torch.full((size * dim,), 0.01)
    return {
        "lookup": lambda store, ids: store.lookup(ids),
        "push": lambda store, ids: store.apply_gradients(ids, gradients, event_time=1),
    }


def per_call(call: Callable[[int], object], seconds: float) -> tuple[int, float]:
    """Repeat a call for a while, after one to warm up; return how often, and its processor seconds here."""
    call(0)
    count, began, used = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds or count < 3:
        call(count)
        count += 1
    return count, (time.process_time() - used) / count


# Measuring


@dataclass(slots=True)
class Bench:
    """What is connected."""

    plan: CostPlan
    hosts: dict[int, Host]
    """By how many servers a group has, in one process."""
    stores: dict[int, ParameterServerStore]
    groups: dict[int, ServerGroup]
    pair: ParameterServerStore
    """Two servers, each a process."""
    pair_hosts: list[Host]
    files: float
    memory: float
    threads: float


@contextmanager
def connected(plan: CostPlan) -> Iterator[Bench]:
    """Start servers, fill them with rows, and connect."""
    with ExitStack() as stack:
        sizes = (1, MANY)
        shares = {size: [[(k, size) for k in range(size)]] for size in sizes}
        started = {size: stack.enter_context(hosting(shares[size], plan.dim)) for size in sizes}
        halves = [stack.enter_context(hosting([[(k, 2)]], plan.dim)) for k in range(2)]
        hosts = {size: found.listening() for size, found in started.items()}
        groups: dict[int, ServerGroup] = {}
        stores: dict[int, ParameterServerStore] = {}
        files, memory, threads = 0.0, 0.0, 0.0
        for size, found in hosts.items():
            before, open_before = found.used(), open_files()
            groups[size] = ServerGroup(found.groups[0])
            stack.callback(groups[size].close)
            stores[size] = ParameterServerStore(groups[size], 0, table_configs(plan.dim))
            stores[size].lookup(planned(min(plan.rows, 64 * size), plan)[0])
            after = found.used()
            files = (open_files() - open_before) / size
            memory, threads = (after[2] - before[2]) / size, (after[1] - before[1]) / size
        pair = ServerGroup([half.listening().groups[0][0] for half in halves])
        stack.callback(pair.close)
        bench = Bench(
            plan,
            hosts,
            stores,
            groups,
            ParameterServerStore(pair, 0, table_configs(plan.dim)),
            halves,
            files,
            max(memory, 0.0),
            max(threads, 0.0),
        )
        for store in (*stores.values(), bench.pair):
            fill(store, rows=plan.rows, dim=plan.dim)
        yield bench


def entries(folder: str) -> int:
    """Return how many entries a folder of /proc has; 0 where there is none."""
    return len(list(Path(folder).iterdir())) if Path(folder).is_dir() else 0


def open_files() -> int:
    return entries("/proc/self/fd")


def measure_costs(bench: Bench, say: Callable[[str], None]) -> Costs:
    """Measure everything that a simulation needs."""
    plan = bench.plan
    say("rows in this process, saved and restored")
    local = LocalStore.from_configs(table_configs(plan.dim), threads=1)
    fill(local, rows=plan.rows, dim=plan.dim)
    table_rows = table_work(local, plan)
    save, restore, saved_bytes = disk_work(local, plan)
    stats = local.stats()["item"]
    say(f"requests to 1 and to {MANY} servers")
    found: dict[str, list[MeasuredExchange]] = {"lookup": [], "push": []}
    for servers in bench.stores:
        for ids in plan.ids:
            for name, call in exchanges(ids, plan.dim).items():
                found[name].append(measure(bench, servers, call, ids))
    say("small calls, the meeting, and how late answers are")
    call_client, call_server = small_calls(bench, 1)
    fan_out, _ = small_calls(bench, MANY)
    look_for_lost, wait_for_news = meeting_work()
    walls = delays_of(bench)
    row = plan.dim * FLOAT_BYTES
    lookup = fitted(found["lookup"], table_rows["lookup"], ID_BYTES, row)
    push = fitted(found["push"], table_rows["push"], ID_BYTES + row, 0)
    work = sum(
        (
            lookup.client_call,
            lookup.client_request,
            lookup.client_row,
            lookup.server_request,
            lookup.server_row,
        )
    )
    result = Costs(
        lookup=lookup,
        push=push,
        call_client=call_client,
        call_server=call_server,
        fan_out_client=fan_out,
        look_for_lost=look_for_lost,
        wait_for_news=wait_for_news,
        wake=max(float(np.median(walls)) - work, 0.0),
        delays=np.maximum(walls - np.median(walls), 0.0),
        row_bytes=stats.bytes_total / stats.rows,
        saved_bytes=saved_bytes,
        save_row=save,
        restore_row=restore,
        connection_files=bench.files,
        connection_bytes=bench.memory,
        connection_threads=bench.threads,
    )
    local.close()
    return result


def measure(bench: Bench, servers: int, call: Exchange, ids: int) -> MeasuredExchange:
    """Return what an exchange with so many servers about so many ids takes here and there."""
    host, batches = bench.hosts[servers], planned(ids, bench.plan)
    before = host.used()[0]
    count, client = per_call(_on(bench.stores[servers], call, batches), bench.plan.seconds)
    return MeasuredExchange(servers, ids, client, (host.used()[0] - before) / (count + 1))


def fitted(found: Sequence[MeasuredExchange], table_row: float, up: int, down: int) -> DirectionCost:
    """Return costs per exchange, request and id, of which the measured are sums; none below 0."""
    call, request, row = _fit([[1.0, one.servers, one.ids] for one in found], [one.client for one in found])
    served, served_row = _fit([[one.servers, one.ids] for one in found], [one.server for one in found])
    return DirectionCost(
        client_call=call,
        client_request=request,
        client_row=row,
        server_request=served,
        server_row=served_row,
        table_row=min(table_row, served_row),
        bytes_up=up,
        bytes_down=down,
    )


def _fit(rows: Sequence[Sequence[float]], totals: Sequence[float]) -> list[float]:
    """Least squares of relative errors; a cost that would be negative is 0, and the others fitted again."""
    table, total = np.array(rows), np.array(totals)
    weighed, ones = table / total[:, None], np.ones(len(total))
    kept = list(range(table.shape[1]))
    while True:
        costs = np.zeros(table.shape[1])
        costs[kept] = np.linalg.lstsq(weighed[:, kept], ones, rcond=None)[0]
        negative = [number for number in kept if costs[number] < 0]
        if not negative:
            return [float(cost) for cost in costs]
        kept.remove(min(negative, key=lambda number: costs[number]))


def table_work(local: LocalStore, plan: CostPlan) -> dict[str, float]:
    """Return processor seconds of an id in this process's table, by direction."""
    size = plan.ids[-1]
    batches = planned(size, plan)
    return {
        name: per_call(_on(local, call, batches), plan.seconds / 2)[1] / size
        for name, call in exchanges(size, plan.dim).items()
    }


def _on(store: Store, call: Exchange, batches: list[TableIds]) -> Callable[[int], object]:
    return lambda number: call(store, batches[number % _BATCHES])


def disk_work(local: LocalStore, plan: CostPlan) -> tuple[float, float, float]:
    """Return processor seconds to save a row, to restore one, and its bytes on disk."""
    other = LocalStore.from_configs(table_configs(plan.dim), threads=1)
    with tempfile.TemporaryDirectory(prefix="monolith-scale-") as folder:
        used = time.process_time()
        prefix = Checkpointer(Saver(folder), [_tables(local)]).save(1)
        saved = time.process_time()
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        begun = time.process_time()
        Checkpointer(Saver(folder), [_tables(other)]).restore(prefix)
        restored = time.process_time()
    other.close()
    return (saved - used) / plan.rows, (restored - begun) / plan.rows, size / plan.rows


def _tables(store: LocalStore) -> TablesPart:
    table = store.table("item")
    assert isinstance(table, NativeTable)
    return TablesPart({"item": table})


def small_calls(bench: Bench, servers: int) -> tuple[float, float]:
    """Return processor seconds of a small call here and there."""
    group, found = bench.groups[servers], bench.hosts[servers]
    before = found.used()[0]
    count, client = per_call(lambda _: group.call_all("step"), bench.plan.seconds / 2)
    return client / servers, (found.used()[0] - before) / (count + 1) / servers


def delays_of(bench: Bench) -> Floats:
    """Return how long requests for one row took, to one server that does nothing else."""
    (ids,) = planned(1, bench.plan)[:1]
    store, walls = bench.stores[1], np.empty(bench.plan.calls)
    for number in range(len(walls)):
        began = time.perf_counter()
        store.lookup(ids)
        walls[number] = time.perf_counter() - began
    return walls


def meeting_work() -> tuple[float, float]:
    """Return processor seconds of a look at who is lost, for each worker that meets there, and of a wait."""
    wait = waiting_work(1)
    return max(waiting_work(_MEETING) - wait, 0.0) / (_MEETING - 1), wait


def waiting_work(workers: int) -> float:
    """Return processor seconds of a wait for news that ends with a look at so many workers."""
    meeting = CoordinationService(workers, clock=_Ticks())
    calls, news = meeting.calls, meeting.polls["meeting.news"]
    calls["meeting.begin"](BeginService("r", workers))
    calls["meeting.open"](OpenRun("r", Start(step=0)))
    for worker in range(1, workers):
        calls["meeting.join"](Join(worker, f"m{worker}"))
    answer = news(AskNews("r", 0, -1), lambda: False)
    version = getattr(answer, "version", 0)
    looks = 0

    def gone() -> bool:
        nonlocal looks
        looks += 1
        return False

    used = time.thread_time()
    news(AskNews("r", 0, version, 2.0), gone)
    return (time.thread_time() - used) / max(looks, 1)


class _Ticks:
    """A clock that advances by 0.1 s whenever it is read, so that every wait ends after some reads."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        self._now += 0.1
        return self._now


class RealStep(NamedTuple):
    """A step in which rows are looked up and then pushed, and nothing is computed. Seconds."""

    wall: float
    """The best: others who use the machine only ever make it slower."""
    processor: float
    """Of the worker and the servers together, on average."""


def real_steps(bench: Bench, servers: int, ids: int, seconds: float) -> RealStep:
    """Take such steps for a while, with one server, or with two that are a process each."""
    hosts = [bench.hosts[1]] if servers == 1 else bench.pair_hosts
    store: Store = bench.stores[1] if servers == 1 else bench.pair
    batches, calls = planned(ids, bench.plan), exchanges(ids, bench.plan.dim)
    walls: list[float] = []

    def step(number: int) -> None:
        start = time.perf_counter()
        for call in calls.values():
            call(store, batches[number % _BATCHES])
        walls.append(time.perf_counter() - start)

    before = sum(host.used()[0] for host in hosts)
    count, client = per_call(step, seconds)
    served = sum(host.used()[0] for host in hosts) - before
    return RealStep(min(walls), client + served / (count + 1))


def processor_seconds(costs: Costs, servers: int, ids: int) -> float:
    """Return what such a step should take of all processors, by the costs."""
    return sum(
        one.client_call
        + servers * (one.client_request + one.server_request)
        + ids * (one.client_row + one.server_row)
        for one in (costs.lookup, costs.push)
    )


def as_results(costs: Costs) -> Mapping[str, tuple[float, str]]:
    """Return the costs by name, with their units, for a report."""
    found: dict[str, tuple[float, str]] = {}
    for name, one in (("lookup", costs.lookup), ("push", costs.push)):
        found |= {
            f"{name}, worker, a call": (one.client_call * 1e6, "us"),
            f"{name}, worker, a request": (one.client_request * 1e6, "us"),
            f"{name}, worker, a row": (one.client_row * 1e9, "ns"),
            f"{name}, server, a request": (one.server_request * 1e6, "us"),
            f"{name}, server, a row": (one.server_row * 1e9, "ns"),
            f"{name}, server, a row, its table": (one.table_row * 1e9, "ns"),
        }
    return found | {
        "small call, caller": (costs.call_client * 1e6, "us"),
        "small call, server": (costs.call_server * 1e6, "us"),
        "small call to all, caller, each": (costs.fan_out_client * 1e6, "us"),
        "meeting, a look for the lost, a worker": (costs.look_for_lost * 1e9, "ns"),
        "meeting, a wait for news": (costs.wait_for_news * 1e6, "us"),
        "request, waiting": (costs.wake * 1e6, "us"),
        "answer, later than half, p99": (float(np.quantile(costs.delays, 0.99)) * 1e6, "us"),
        "answer, later than half, p99.9": (float(np.quantile(costs.delays, 0.999)) * 1e6, "us"),
        "row, memory": (costs.row_bytes, "bytes"),
        "row, on disk": (costs.saved_bytes, "bytes"),
        "row, save": (costs.save_row * 1e9, "ns"),
        "row, restore": (costs.restore_row * 1e9, "ns"),
        "connection, worker, descriptors": (costs.connection_files, "files"),
        "connection, server, memory": (costs.connection_bytes / 1024, "KiB"),
        "connection, server, threads": (costs.connection_threads, "threads"),
    }
