"""A job of any size, from costs measured on one machine: its steps event by event, the rest by arithmetic.

What is assumed, and not measured:

- Each worker and each server has a machine of its own, whose network has the latency and the bandwidth given.
- A server works on one request after the other, in the order in which workers began their exchanges. (Python
  holds it to one core but for the table's own work.) A worker's calls are made by one thread.
- Ids are spread over servers at random. Half of a worker's work for a request is done before it is sent.
- An answer may be late by as much as answers were late on this machine, with its neighbours. A late answer
  delays only its own worker.
- Rows are looked up ahead and updated behind: a step takes what is longer, computing or both exchanges.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from monolith_bench.scale_costs import Costs, DirectionCost

WARM_UP = 2
"""Steps of each worker that are not counted: all begin at the same moment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedJob:
    """A job."""

    workers: int
    servers: int
    ids: int = 10_000
    """Distinct ids of a batch."""
    examples: int = 2_048
    compute: float = 0.02
    """Seconds that a worker computes in a step."""
    latency: float = 100e-6
    """Seconds there and back."""
    bandwidth: float = 25e9 / 8
    """Bytes per second of one machine."""
    late: bool = True
    """Whether answers may be late."""
    overlapped: bool = True
    """Whether a worker computes while it waits for servers."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SimulatedSteps:
    """How steps went. Seconds."""

    median: float
    p99: float
    slowest: float
    """The slowest worker of a step, on average: who halts waits for it."""
    exchange: float
    """Of a step, what both exchanges took, median."""
    examples_per_s: float
    busy: float
    """The share of the time in which a server works."""


def simulate(costs: Costs, layout: SimulatedJob, *, steps: int = 12) -> SimulatedSteps:
    """Take so many steps on every worker."""
    servers = _Servers(costs, layout)
    # One event for each exchange, so that requests reach the servers in the order of time.
    due = [(0.0, worker, 0, False) for worker in range(layout.workers)]
    walls, exchanged = np.zeros((2, layout.workers, steps))
    begins, ends, began = np.zeros((3, layout.workers))
    while due:
        now, worker, number, read = heapq.heappop(due)
        if not read:
            began[worker] = now
            heapq.heappush(due, (servers.exchange(costs.lookup, now), worker, number, True))
            continue
        done = servers.exchange(costs.push, now)
        start = began[worker]
        end = max(done, start + layout.compute) if layout.overlapped else done + layout.compute
        exchanged[worker, number] = done - start
        walls[worker, number] = end - start
        if number == WARM_UP - 1:
            begins[worker] = end
        ends[worker] = end
        if number + 1 < steps:
            heapq.heappush(due, (end, worker, number + 1, False))
    counted = walls[:, WARM_UP:]
    return SimulatedSteps(
        median=float(np.median(counted)),
        p99=float(np.quantile(counted, 0.99)),
        slowest=float(counted.max(axis=0).mean()),
        exchange=float(np.median(exchanged[:, WARM_UP:])),
        examples_per_s=layout.examples * (steps - WARM_UP) * float(np.sum(1 / (ends - begins))),
        busy=float(servers.worked.mean() / ends.max()),
    )


class _Servers:
    """Queues, one for each server."""

    def __init__(self, costs: Costs, layout: SimulatedJob) -> None:
        self._delays = costs.delays
        self._layout = layout
        self._random = np.random.default_rng(layout.seed)
        self._free = np.zeros(layout.servers)
        """When each has done what it was asked so far."""
        self.worked = np.zeros(layout.servers)

    def exchange(self, cost: DirectionCost, began: float) -> float:
        """Ask each server that has rows of a batch; return when the last answer is read."""
        layout = self._layout
        rows = self._random.poisson(layout.ids / layout.servers, layout.servers)
        asked = np.flatnonzero(rows)
        if not len(asked):
            return began
        count = rows[asked].astype(np.float64)
        half = (cost.client_request + count * cost.client_row) / 2
        sent = began + cost.client_call + np.cumsum(half)
        arrived = sent + layout.latency / 2 + count * cost.bytes_up / layout.bandwidth
        service = cost.server_request + count * cost.server_row
        done = np.maximum(self._free[asked], arrived) + service
        self._free[asked] = done
        self.worked[asked] += service
        back = done + layout.latency / 2 + count * cost.bytes_down / layout.bandwidth
        if layout.late:
            back = back + self._random.choice(self._delays, len(asked))
        # Answers are read in order, each when it is there and those before it are read.
        return float(np.max(np.maximum(back, sent[-1]) + np.cumsum(half[::-1])[::-1]))


# What is no queue


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What a job of many machines depends on, in addition to its own code; assumed."""

    storage: float = 50e9
    """Bytes per second that the storage of checkpoints takes from, or gives to, all machines together."""
    disk: float = 1e9
    """The same for one of them."""
    cores: int = 8
    """Cores of a server that save or restore."""
    restart: float = 30.0
    """Seconds until a scheduler has started a lost process again."""
    notice: float = 2.0
    """Seconds until the other processes notice that its connection broke."""
    rejoin: float = 5.0
    """failover.wait: seconds before workers join again."""
    save_every: float = 600.0
    """Seconds between two checkpoints."""
    machine_fails: float = 180 * 86_400.0
    """Seconds between two failures of one machine, on average."""


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What a job of some size costs in addition to its steps. Seconds and bytes."""

    server_bytes: float
    save: float
    fan_out: float
    """One call of the chief to all servers."""
    halt: float
    """From the chief's request until all workers are quiesced and the snapshot is taken."""
    exact: float
    """From the loss of a server to where the job was before: recovery, and what is trained again."""
    keep_going: float
    """The same if only the lost shard is restored, and the rest of the job continues."""
    lost_updates: float
    """The share of all updates since the last checkpoint that keeping going loses."""
    meeting: float
    """Of one core of server 0, the share that waiting workers, and looking for lost ones, take."""
    goodput_exact: float
    goodput_keep_going: float
    connections: int
    """Of workers and servers together."""
    worker_files: float
    server_threads: float
    server_connection_bytes: float


LOOKS_PER_S = 5.0
"""Checks per second, by the coordination service, for lost workers and for waiting workers that are gone."""


def upkeep(
    costs: Costs, layout: SimulatedJob, rows: float, steps: SimulatedSteps, around: Surroundings
) -> Upkeep:
    """Return what such a job costs in addition to its steps, with so many rows."""
    share = rows / layout.servers
    total = rows * costs.saved_bytes
    at_disk = max(share * costs.saved_bytes / around.disk, total / around.storage)
    save = max(share * costs.save_row / around.cores, at_disk)
    restore = max(share * costs.restore_row / around.cores, at_disk)
    own_disk = share * costs.saved_bytes / around.disk
    restore_one = max(share * costs.restore_row / around.cores, own_disk)
    fan_out = layout.servers * costs.fan_out_client + costs.call_server + layout.latency
    arrive = layout.workers * costs.call_server
    halt = steps.slowest + arrive + 2 * layout.latency + fan_out
    begin = 3 * fan_out + arrive
    back = around.notice + around.restart + around.rejoin
    exact = back + begin + restore + around.save_every / 2
    keep_going = around.notice + around.restart + restore_one
    machines = layout.servers + layout.workers
    between = around.machine_fails / machines
    saving = halt / around.save_every
    return Upkeep(
        server_bytes=share * costs.row_bytes,
        save=save,
        fan_out=fan_out,
        halt=halt,
        exact=exact,
        keep_going=keep_going,
        lost_updates=1 / layout.servers,
        meeting=LOOKS_PER_S * layout.workers * (costs.look_for_lost + costs.wait_for_news),
        goodput_exact=max(1 - saving - exact / (between + exact), 0.0),
        goodput_keep_going=max(1 - saving - keep_going / (between + keep_going), 0.0),
        connections=2 * layout.workers * layout.servers,
        worker_files=costs.connection_files * layout.servers,
        server_threads=costs.connection_threads * layout.workers,
        server_connection_bytes=costs.connection_bytes * layout.workers,
    )
