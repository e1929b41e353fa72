"""Whatever the network and the disk do: a store on parameter servers is a plain dict.

The machine runs on a simulated thread, next to the machines of one or two parameter servers and of a worker.
Connections break before or after a request had its effect, machines are cut off from each other, and disks
are full.
"""

from __future__ import annotations

from datetime import timedelta

import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from services.properties import tries
from simulation.machines import SimulatedStateMachine, run_on, run_simulated
from store.fleets import keys

from monolith import concurrency
from monolith.checkpoint import Checkpointer, Saver, TablesPart
from monolith.errors import FilesystemError, TableClosedError
from monolith.store import LocalStore, ParameterServer, ParameterServerStore, ServerGroup
from monolith.table import Expiry, Segment, Sgd, TableConfig
from monolith.testing.disk import SimDisk
from monolith.testing.network import SimNetwork
from monolith.testing.scheduler import SimMachine

EXPIRY = timedelta(hours=1)
CONFIGS = {
    "item": TableConfig(
        name="item",
        segments=(Segment(dim=1, optimizer=Sgd(), learning_rate=1.0),),
        expiry=Expiry(default=EXPIRY),
    )
}
IDS = st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True)
START = 1_800_000_000

Rows = dict[int, tuple[float, int]]
"""ID -> its value and the time of its last update."""


class Server:
    """One parameter server, on a machine of its own."""

    def __init__(self, machine: SimMachine, shard: tuple[int, int]) -> None:
        self.machine = machine
        self.store = LocalStore.from_configs(CONFIGS, threads=1)
        self.server = ParameterServer([self.store], shard=shard)
        part = TablesPart({"item": self.store.table("item")}, incremental=True)
        self.checkpointer = Checkpointer(Saver(f"sim://ps-{shard[0]}"), [part], full_every=3)


class Stores(SimulatedStateMachine):
    """A worker that trains and reads, and servers that expire, save and restore their rows."""

    @initialize(seed=st.integers(0, 2**16), servers=st.sampled_from([1, 2]))
    def begin(self, seed: int, servers: int) -> None:
        self.simulation = self.begin_simulation(seed)
        self.network = SimNetwork(self.simulation)
        self.rows: Rows = {}
        self.saved: tuple[int, Rows] | None = None
        self.now = START
        self.step = 0
        self.disks = [SimDisk(self.simulation) for _ in range(servers)]
        self.servers: list[Server] = []
        for number, disk in enumerate(self.disks):
            machine = self.add_machine(f"ps-{number}")
            disk.attach(machine)
            shard = (number, servers)
            run_on(machine, lambda machine=machine, shard=shard: self.servers.append(Server(machine, shard)))
        self.worker = self.add_machine("worker")
        run_on(self.worker, self.connect)

    def add_machine(self, name: str) -> SimMachine:
        machine = self.simulation.machine(name)
        machine.transport = self.network.transport(machine)
        return machine

    def connect(self) -> None:
        addresses = [one.server.address for one in self.servers]
        self.group = ServerGroup(addresses, patience=timedelta(hours=1))
        self.store = ParameterServerStore(self.group, 0, CONFIGS)

    # The worker

    @rule(ids=IDS, gradient=st.integers(-8, 8))
    def push(self, ids: list[int], gradient: int) -> None:
        self.step += 1
        gradients = torch.full((len(ids),), float(gradient))

        def push() -> None:
            self.store.apply_gradients(keys(*ids), gradients, step=self.step, event_time=self.now)

        run_on(self.worker, push)
        for one in ids:
            self.rows[one] = (self.rows.get(one, (0.0, 0))[0] - gradient, self.now)

    @rule(ids=IDS)
    def look_up(self, ids: list[int]) -> None:
        found: list[float] = []
        run_on(self.worker, lambda: found.extend(self.store.lookup(keys(*ids)).tolist()))
        assert found == [self.rows.get(one, (0.0, 0))[0] for one in ids]

    @rule()
    def count(self) -> None:
        found: list[int] = []
        run_on(self.worker, lambda: found.append(self.store.stats()["item"].rows))
        assert found == [len(self.rows)]

    @rule()
    def expire(self) -> None:
        self.now += 40 * 60
        run_on(self.worker, lambda: self.store.evict(self.now))
        oldest = self.now - EXPIRY.total_seconds()
        self.rows = {one: row for one, row in self.rows.items() if row[1] >= oldest}

    # Faults

    @rule(chance=st.sampled_from([0.0, 0.05, 0.3]))
    def break_connections(self, chance: float) -> None:
        self.network.faults.break_chance = chance

    @rule(which=st.integers(0, 1), seconds=st.floats(0.1, 20))
    def cut_off(self, which: int, seconds: float) -> None:
        """Cut the worker off from a server for a while; calls made meanwhile are retried."""
        self.network.cut("worker", f"ps-{which % len(self.servers)}")

        def heal() -> None:
            concurrency.sleep(seconds)
            self.network.heal()

        concurrency.Thread(target=heal).start()

    # The servers

    @rule(free=st.none() | st.integers(0, 3000))
    def save(self, free: int | None) -> None:
        """Save the rows of all servers; one of the disks may be full, and then the save before counts."""
        self.step += 1
        self.disks[0].faults.free_bytes = free
        failed = False
        for one in self.servers:
            failed = failed or not self.saves(one)
        self.disks[0].faults.free_bytes = None
        assert not failed or free is not None
        if not failed:
            self.saved = self.step, dict(self.rows)

    def saves(self, server: Server) -> bool:
        try:
            run_on(server.machine, lambda: server.checkpointer.save(self.step))
        except FilesystemError:
            return False
        return True

    @rule()
    def restore(self) -> None:
        if self.saved is None:
            return
        step, rows = self.saved
        for one in self.servers:
            prefix = one.checkpointer.saver.names.prefix(step)
            run_on(one.machine, lambda one=one, prefix=prefix: one.checkpointer.restore(prefix))
        self.rows = dict(rows)
        self.step += 1

    def teardown(self) -> None:
        if not hasattr(self, "worker"):
            return
        self.look_up(list(range(8)))
        run_on(self.worker, self.close)
        for one in self.servers:
            run_on(one.machine, one.server.close)
            one.machine.kill()
        self.worker.kill()

    def close(self) -> None:
        self.store.close()
        try:
            self.store.lookup(keys(1))
        except TableClosedError:
            self.group.close()
        else:
            raise AssertionError("a store that is closed answers")


def test_a_store_is_a_dict_whatever_the_network_and_the_disk_do() -> None:
    run_simulated(Stores, examples=tries(8), steps=30)
