"""A simulated cluster: processes that are killed, paused, cut off from each other and restarted.

A world is a function that starts processes on a `SimCluster` and says what must be true:

    def play(cluster):
        cluster.start("server", lambda: serve(cluster.discovery()))
        cluster.start("worker", lambda: work(cluster.discovery()))
        cluster.wait()                                  # faults happen here
        assert total("sim://run") == 100

    SimCluster(seed=7, faults=Faults.drawn(7)).run(play)

A process is a function. It runs on a machine of its own and ends in one of three ways, like a real one:

    it returns                 exit status 0; it is not started again
    it raises a retryable      exit status 75; it is started again after a while, as a launcher does
    it raises anything else    a defect: the run fails with this error

A kill is `kill -9`: the process is started again after a while. All faults happen in the first part of a
run. Then the network heals, machines run again, and the processes have `calm` virtual seconds to finish; a
run that does not is a livelock.
"""

from __future__ import annotations

import copy
import gc
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

from monolith import concurrency
from monolith.cluster.discovery import Callback, Closing, PollingWatch, Registration, check_registration
from monolith.errors import RetryableError, TransientFilesystemError, UnavailableError
from monolith.testing.disk import DiskFaults, SimDisk
from monolith.testing.groups import SimRankNetwork
from monolith.testing.grpc import SimGrpc
from monolith.testing.network import NetworkFaults, SimNetwork
from monolith.testing.scheduler import MachineKilled, SimMachine, SimThread, Simulation, TraceHandler

RETRYABLE = (RetryableError, TransientFilesystemError)
"""Errors after which a process is started again."""
_LEAVE_WITHIN = 30.0
"""Seconds that processes have to end once the chief has finished."""
REGISTRY = "registry"
"""The name of the machine with the addresses of processes, for `SimNetwork.cut`."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong in one run, besides what the network and the disk do at each message and file."""

    kills: int = 0
    cuts: int = 0
    """Pairs of machines that cannot reach each other for some seconds; connections stay half-open."""
    pauses: int = 0
    """Machines that stop for some seconds, as under a debugger or a swapping kernel."""
    clock_jumps: int = 0
    """Machines whose wall clock jumps by up to an hour; their monotonic clock does not."""
    drift: float = 0.0
    """Most by which a monotonic clock is fast or slow: 0.01 is one percent."""
    replacements: int = 0
    """Processes that are replaced although they run: a supervisor that cannot reach a machine starts its
    process on another one. Only those of `SimCluster.replaceable`."""
    every: tuple[float, float] = (0.02, 0.8)
    """Least and most virtual seconds between two of these."""
    longest: float = 20.0
    """Most virtual seconds of a cut, and of a pause."""
    network: NetworkFaults = field(default_factory=NetworkFaults)
    disk: DiskFaults = field(default_factory=DiskFaults)

    @classmethod
    def drawn(cls, seed: int, *, most: int = 3) -> Faults:
        """Return the faults of a seed. Each kind is left out by half of the seeds: many faults together hide
        what one alone would show."""
        draw = random.Random(f"faults {seed}")

        def some() -> int:
            return draw.choice([0, draw.randint(1, most)])

        return cls(
            kills=some(),
            cuts=some(),
            pauses=some(),
            clock_jumps=some(),
            drift=draw.choice([0.0, 0.01]),
            network=NetworkFaults(
                delay=(0.0001, draw.choice([0.001, 0.01])),
                break_chance=draw.choice([0.0, 0.0, 0.002, 0.02]),
                slow_chance=draw.choice([0.0, 0.01]),
            ),
            disk=DiskFaults(delay=(0.0, draw.choice([0.0, 0.002, 0.05]))),
        )


class SimProcess:
    """One process of a cluster, over all its restarts."""

    def __init__(self, cluster: SimCluster, name: str, main: Callable[[], object]) -> None:
        self._cluster, self.name, self._main = cluster, name, main
        self.machine: SimMachine | None = None
        self._thread: SimThread | None = None
        self.starts = 0
        self.finished = False
        """Whether it exited with status 0."""
        self.result: object = None
        """What its function returned."""

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start it on a new machine, as after a reboot: nothing is left of the last one but its files."""
        if self.machine is not None:
            self.machine.kill()
        self.starts += 1
        self.machine = self._cluster.machine(self.name)
        self._thread = self.machine.spawn(self._body)

    def replace(self) -> SimMachine:
        """Start it on a new machine while the last one runs on; return the last one, which nothing starts
        again."""
        last = self.machine
        assert last is not None
        last.name, self.machine = f"{self.name} (replaced)", None
        self.start()
        return last

    def kill(self) -> None:
        if self.machine is not None:
            self.machine.kill()

    def _body(self) -> None:
        simulation = self._cluster.simulation
        machine = simulation.current.machine
        try:
            result = self._main()
        except RETRYABLE as error:
            simulation.note(f"exits with status 75: {error!r:.300}")
            machine.kill()  # which ends this thread, too
        # The same is demanded of a replaced process, but its end does not count as that of the new one.
        ended = self if self.machine is machine else copy.copy(self)
        ended.result, ended.finished = result, True
        simulation.note("exits with status 0")
        for check in self._cluster.on_exit:
            check(ended)
        machine.kill()


class SimCluster:
    """The machines, network, disk and registry of one run.

    Args:
        seed: Decides everything that happens.
        faults: What goes wrong; nothing by default.
        traced: Keep log lines for the message of a failure. Costs as much time as the run itself, so a run
            of many seeds leaves it out and runs a seed that failed again.
        calm: Virtual seconds that processes have to finish once nothing goes wrong any more.
        lease: Seconds after which the registry forgets a dead process.
    """

    def __init__(
        self,
        seed: int,
        faults: Faults | None = None,
        *,
        traced: bool = False,
        calm: float = 900.0,
        lease: float = 2.0,
        most_switches: int = 400_000,
    ) -> None:
        self.faults = Faults() if faults is None else faults
        self.simulation = Simulation(seed, most_switches=most_switches)
        self.random = self.simulation.random
        self.network = SimNetwork(self.simulation, self.faults.network)
        self.disk = SimDisk(self.simulation, self.faults.disk)
        self.registry = SimRegistry(self, lease)
        self.processes: dict[str, SimProcess] = {}
        self.on_exit: list[Callable[[SimProcess], object]] = []
        """Called with each process that exits with status 0, at that moment."""
        self.replaceable: tuple[str, ...] = ()
        """Names of the processes that `Faults.replacements` may hit."""
        self.happened = 0
        """Faults that happened: a run may end before all of them have."""
        self.quiet = False
        """Whether all faults have happened and all cuts are healed."""
        self._traced, self._calm = traced, calm

    def run(self, play: Callable[[SimCluster], object]) -> None:
        """Run a world to its end.

        Raises:
            SimulationError: A rule was broken; the message has the seed and the last events.
        """

        def whole() -> None:
            stage = concurrency.machine()
            assert isinstance(stage, SimMachine)
            self.disk.attach(stage)
            stage.transport = self.network.transport(stage)
            stage.grpc = SimGrpc(self.network, stage)
            play(self)

        with _quiet(self.simulation, self._traced):
            self.simulation.run(whole)

    def machine(self, name: str) -> SimMachine:
        """Return a new machine that is connected to the network and the shared disk."""
        drift, draw = self.faults.drift, self.random
        made = self.simulation.machine(
            name,
            rate=1 + draw.uniform(-drift, drift) if drift else 1.0,
            wall_offset=draw.uniform(-60, 60) if self.faults.clock_jumps else 0.0,
        )
        made.transport = self.network.transport(made)
        made.ranks = SimRankNetwork(self.network, made)
        made.grpc = SimGrpc(self.network, made)
        self.disk.attach(made)
        return made

    def start(self, name: str, main: Callable[[], object]) -> SimProcess:
        """Start a process; `wait` starts it again whenever it dies."""
        process = self.processes[name] = SimProcess(self, name, main)
        process.start()
        return process

    def discovery(self) -> SimDiscovery:
        """Return the registry as the process of the calling thread sees it."""
        return SimDiscovery(self.registry)

    # Faults. Called on the stage, the machine of `play`.

    def wait(self, *, chief: str | None = None, done: Callable[[], bool] | None = None) -> None:
        """Let faults happen, restart what dies, and return when every process has finished.

        Args:
            chief: A process whose clean exit finishes the run: as `monolith.cluster.launch` does, the other
                processes then have some time to end and are stopped, and processes that had ended are started
                again if the chief has to be.
            done: Return when this is true instead.
        """
        until = done or (lambda: all(process.finished for process in self.processes.values()))
        stop_at: float | None = None
        faults = self._chosen_faults()
        restarts: dict[str, float] = {}
        heal_at: float | None = None
        calm_since: float | None = None
        next_fault = self._after(self.faults.every)
        while not until():
            now = self.simulation.now
            for process in self.processes.values():
                if not process.running and not process.finished:
                    due = restarts.setdefault(process.name, now + self.random.uniform(0.01, 3))
                    if now >= due:
                        del restarts[process.name]
                        process.start()
                        if process.name == chief:
                            for ended in self.processes.values():
                                ended.finished = False
            if chief is not None and self.processes[chief].finished:
                stop_at = now + _LEAVE_WITHIN if stop_at is None else stop_at
                if now >= stop_at:
                    return
            if heal_at is not None and now >= heal_at:
                self.network.heal()
                heal_at = None
            if faults and now >= next_fault:
                lasts = faults.pop()()
                self.happened += 1
                if lasts and (heal_at is None or now + lasts > heal_at):
                    heal_at = now + lasts
                next_fault = self._after(self.faults.every)
            if not faults and heal_at is None:
                calm_since = now if calm_since is None else calm_since
                self.quiet = True
                if now - calm_since > self._calm:
                    waiting = [one.name for one in self.processes.values() if not one.finished]
                    raise AssertionError(
                        f"livelock: {', '.join(waiting)} did not finish within {self._calm:g} s after the "
                        "last fault"
                    )
            # Mostly until something is due; a short wait at random lets a fault hit any moment.
            concurrency.sleep(self.random.uniform(0.01, 0.3))

    def _chosen_faults(self) -> list[Callable[[], float]]:
        faults = self.faults
        chosen: list[Callable[[], float]] = [
            *[self._kill_one] * faults.kills,
            *[self._cut_two] * faults.cuts,
            *[self._pause_one] * faults.pauses,
            *[self._set_a_clock] * faults.clock_jumps,
            *[self._replace_one] * faults.replacements,
        ]
        self.random.shuffle(chosen)
        return chosen

    def _after(self, seconds: tuple[float, float]) -> float:
        return self.simulation.now + self.random.uniform(*seconds)

    def _one(self) -> SimMachine | None:
        running = [one.machine for one in self.processes.values() if one.running and one.machine is not None]
        return self.random.choice(running) if running else None

    def _kill_one(self) -> float:
        if (machine := self._one()) is not None:
            machine.kill()
        return 0.0

    def _cut_two(self) -> float:
        names = sorted([*self.processes, REGISTRY])
        if len(names) < 2:
            return 0.0
        self.network.cut(*self.random.sample(names, 2))
        return self.random.uniform(0.1, self.faults.longest)

    def _pause_one(self) -> float:
        if (machine := self._one()) is not None:
            seconds = self.random.uniform(0.1, self.faults.longest)
            self.simulation.note(f"{machine.name} is paused for {seconds:.1f} s")
            machine.paused_until = max(machine.paused_until, self.simulation.now + seconds)
        return 0.0

    def _replace_one(self) -> float:
        """Let a machine seem dead, by a pause or because it is cut off from all others, and replace it."""
        running = [self.processes[name] for name in self.replaceable if self.processes[name].running]
        if not running:
            return 0.0
        process = self.random.choice(running)
        machine, seconds = process.replace(), self.random.uniform(0.1, self.faults.longest)
        self.simulation.note(f"{process.name} is replaced, and runs on")
        if self.random.random() < 0.5:
            machine.paused_until = self.simulation.now + seconds
            return 0.0
        for name in sorted([*self.processes, REGISTRY]):
            self.network.cut(machine.name, name)
        return seconds

    def _set_a_clock(self) -> float:
        if (machine := self._one()) is not None:
            machine.wall_offset = self.random.uniform(-3600, 3600)
            self.simulation.note(f"the clock of {machine.name} is set to {machine.wall_offset:+.0f} s")
        return 0.0


class SimRegistry:
    """The addresses of a cluster's processes: what ZooKeeper or Consul keeps for a real one."""

    def __init__(self, cluster: SimCluster, lease: float) -> None:
        self.cluster = cluster
        self.lease = lease
        self.machine = cluster.simulation.machine(REGISTRY)
        self.entries: dict[tuple[str, int], tuple[Registration, SimMachine]] = {}
        self._dead_since: dict[SimMachine, float] = {}

    def living(self) -> dict[tuple[str, int], Registration]:
        """Return the entries of machines that live, or died less than a lease ago."""
        now = self.cluster.simulation.now
        found = {}
        for key, (entry, owner) in list(self.entries.items()):
            if not owner.alive and now - self._dead_since.setdefault(owner, now) > self.lease:
                del self.entries[key]
            else:
                found[key] = entry
        return found


class SimDiscovery(Closing):
    """A registry as one process sees it; implements `monolith.cluster.Discovery`."""

    def __init__(self, registry: SimRegistry) -> None:
        here = concurrency.machine()
        assert isinstance(here, SimMachine), "a SimDiscovery is made by a process of the simulation"
        self._registry, self._machine = registry, here
        self._watch = PollingWatch(self.query, timedelta(seconds=0.5), "watch-registry")

    def register(self, role: str, index: int, address: str) -> None:
        check_registration(role, index, address)
        self._reach()
        entry = Registration(index, address, self._machine.time())
        self._registry.entries[role, index] = (entry, self._machine)

    def deregister(self, role: str, index: int, address: str | None = None) -> None:
        self._reach()
        found = self._registry.entries.get((role, index))
        if found is not None and address in (None, found[0].address):
            del self._registry.entries[role, index]

    def query(self, role: str) -> dict[int, str]:
        return {entry.index: entry.address for entry in self.entries(role)}

    def entries(self, role: str) -> list[Registration]:
        self._reach()
        return sorted(entry for (of, _), entry in self._registry.living().items() if of == role)

    def roles(self) -> list[str]:
        self._reach()
        return sorted({role for role, _ in self._registry.living()})

    def watch(self, role: str, callback: Callback) -> Callable[[], None]:
        return self._watch.add(role, callback)

    def close(self) -> None:
        self._watch.close()
        entries = self._registry.entries
        for key in [key for key, (_, owner) in entries.items() if owner is self._machine]:
            del entries[key]

    def _reach(self) -> None:
        """Ask the registry: takes a while, and fails if the process is cut off from it."""
        registry = self._registry
        if not registry.cluster.network.travel(self._machine, registry.machine, at_most=3.0):
            raise UnavailableError(f"{self._machine.name} cannot reach the registry")


@contextmanager
def _quiet(simulation: Simulation, traced: bool) -> Iterator[None]:
    """Make a run repeatable and fast: one core, no log but the trace, no garbage collection meanwhile."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    state = random.getstate()
    disabled = logging.root.manager.disable
    collects = gc.isenabled()
    if traced:
        root.handlers[:] = [TraceHandler(simulation)]
        root.setLevel(logging.INFO)
    else:
        logging.disable(logging.CRITICAL)
    if cores and len(cores) > 1:
        os.sched_setaffinity(0, {random.SystemRandom().choice(sorted(cores))})
    gc.disable()
    unraisable = sys.unraisablehook
    # Generators of a killed process are closed when they are collected, and then find that it is dead.
    sys.unraisablehook = lambda told: None if told.exc_type is MachineKilled else unraisable(told)
    random.seed(simulation.seed)  # for code under test that draws from the module's generator
    try:
        yield
    finally:
        sys.unraisablehook = unraisable
        if collects:
            gc.enable()
        if cores:
            os.sched_setaffinity(0, cores)
        random.setstate(state)
        logging.disable(disabled)
        root.handlers[:] = handlers
        root.setLevel(level)


__all__ = ["Faults", "MachineKilled", "SimCluster", "SimDiscovery", "SimProcess", "SimRegistry"]
