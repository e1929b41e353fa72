"""The world of sharded serving: entries look rows up on replicas of shards while new versions are exported.

An exporter writes one version after the other and removes old ones. Servers open each version at their own
time; entries swap to it at theirs, with the repository of the product, which closes the old version after its
last request. All floats of a row are a number made of its version and its ID, so an answer is judged exactly:
each float is the one of the version that answers, or a zero of a shard that the answer names as missing.

The files are real ones, in a folder of the run: tables are mapped by the native core and versions are locked
with `flock`, neither of which is simulated. Processes, threads, clocks, registry and network are.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from monolith import concurrency
from monolith.errors import RetryableError, UnavailableError
from monolith.serve.config import ServedFolder, ShardsConfig
from monolith.serve.manifest import Servable, ServableTable, write_servable
from monolith.serve.rows import FoundRows
from monolith.serve.server.catalog import ServableCatalog
from monolith.serve.server.repository import Repository
from monolith.serve.shards import ServingServer, ServingServerConfig, open_remote_rows, shard_part
from monolith.serve.versions import (
    ENTRY,
    LockedVersion,
    NewVersion,
    existing_version,
    keep_newest,
    list_versions,
)
from monolith.store import TableIds
from monolith.table import FrozenSegment, write_frozen_table
from monolith.testing.cluster import Faults, SimCluster

MODEL = "clicks"
TABLES = {"item": 1, "user": 2}
IDS = 20
"""IDs 1 to 20 have rows; others read as zeros."""
PORT = 7000
_POOL = 8
"""Threads that an entry has for hedges, and for probes."""
_SETTLED = 3.0
"""Virtual seconds at the end in which every request must be answered from the newest version."""


@dataclass(frozen=True)
class Shape:
    """The choices of a seed."""

    shards: int
    replicas: int
    entries: int
    threads: int
    """Threads of an entry that look rows up."""
    versions: int
    keep: int
    """Versions that the exporter keeps."""
    open_versions: int
    """Versions that a server keeps open."""
    fixed_ports: bool
    warm_up: bool
    """Whether a version is asked once before it answers requests."""
    missing: str
    slow_lookups: float
    """Chance that a server takes up to 0.3 s for a lookup."""
    restarts: float
    """Chance in each second that a server is stopped in good order, and started again."""
    config: ShardsConfig

    @classmethod
    def drawn(cls, seed: int) -> Shape:
        draw = random.Random(f"serving {seed}")
        missing = draw.choice(["refuse", "refuse", "default"])
        return cls(
            shards=draw.choice([1, 2]),
            replicas=draw.choice([1, 2, 2]),
            entries=draw.choice([1, 1, 2]),
            threads=draw.choice([1, 2]),
            versions=draw.choice([1, 2, 3]),
            keep=draw.choice([1, 2]),
            open_versions=draw.choice([1, 2, 3]),
            fixed_ports=draw.random() < 0.5,
            warm_up=draw.random() < 0.5,
            missing=missing,
            slow_lookups=draw.choice([0.0, 0.1, 0.3]),
            restarts=draw.choice([0.0, 0.0, 0.2]),
            config=ShardsConfig(
                deadline=timedelta(seconds=draw.choice([0.2, 0.5])),
                hedge=seed % 2 == 0,
                hedge_least=timedelta(seconds=0.002),
                hedge_most=timedelta(seconds=draw.choice([0.01, 0.05, 0.1])),
            ),
        )


class World:
    """What all processes of a run have done, for comparisons. The code under test uses nothing of it."""

    def __init__(self, seed: int, cluster: SimCluster, folder: str) -> None:
        self.shape, self.cluster, self.folder = Shape.drawn(seed), cluster, folder
        self.roots = [f"{folder}/{part}" for part in (ENTRY, *map(shard_part, range(self.shape.shards)))]
        self.entries: dict[int, EntryProcess] = {}
        self.stopping = False

    @property
    def newest(self) -> int:
        """The newest version that entries may find."""
        return int(list_versions(self.roots[0])[-1])

    # Processes

    def export(self, pause: Callable[[], None]) -> None:
        """Write the versions that are not there yet, shards first, as `monolith export` does."""
        for version in range(1, self.shape.versions + 1):
            for root in reversed(self.roots):
                pause()
                if existing_version(root, f"{version}", "digest") is None:
                    write_version(root, version, self.shape)
            keep_newest(self.roots, self.shape.keep)

    def serve(self, name: str, shard: int, replica: int) -> None:
        shape, draw = self.shape, self.cluster.random

        def take_time() -> None:
            if not self.cluster.quiet and draw.random() < shape.slow_lookups:
                concurrency.sleep(draw.uniform(0, 0.3))

        server = ServingServer(
            self.folder,
            shard,
            ServingServerConfig(
                host=name,
                port=PORT if shape.fixed_ports else 0,
                replica=replica,
                versions=shape.open_versions,
                threads=1,
                check_every=timedelta(seconds=1),
            ),
            discovery=self.cluster.discovery(),
            on_lookup=take_time,
        )
        # The locks of a process that is killed are released by the kernel. Here, that is this process.
        on_kill(lambda: [one.close() for one in server._versions._by_name.values()])
        stop = concurrency.Event()

        def watch() -> None:
            while not stop.is_set():
                concurrency.sleep(1)
                if self.stopping or (not self.cluster.quiet and draw.random() < shape.restarts):
                    stop.set()

        concurrency.Thread(target=watch, name="operator", daemon=True).start()
        with server:
            server.serve(stop)
        if not self.stopping:
            raise UnavailableError("an operator restarts it")

    # What must be true

    def is_over(self) -> bool:
        """Whether nothing goes wrong any more, and every entry answers from the last version."""
        cluster, shape = self.cluster, self.shape
        if not cluster.quiet:
            return False
        cluster.network.faults.break_chance = cluster.network.faults.slow_chance = 0.0
        return (
            cluster.processes["exporter"].finished
            and all(one.running or one.finished for one in cluster.processes.values())
            and len(self.entries) == shape.entries
            and all(min(one.good_since) < float("inf") for one in self.entries.values())
            and all(cluster.simulation.now - max(one.good_since) > _SETTLED for one in self.entries.values())
        )

    def check_bounds(self) -> None:
        """Check that entries keep no more than the requests that are under way."""
        shape = self.shape
        for entry in self.entries.values():
            for model in entry.models:
                rows = model.rows
                legs = len(rows._minder._legs)
                assert legs <= shape.threads * shape.shards + _POOL, f"{legs} requests are watched"
                for shard in rows._map.shards:
                    for one in shard.by_address.values():
                        assert one.in_flight >= 0, f"{one.in_flight} requests wait for {one.address}"
                        assert one.in_flight <= shape.threads + _POOL, f"{one.in_flight} wait"
                        assert len(one._idle) <= shape.threads + _POOL + 1, f"{len(one._idle)} are idle"


class EntryModel:
    """A version of the entry as the repository needs it: a `Predictor` without its dense half."""

    answers_here = False  # it waits for the rows of its shards

    def __init__(self, world: World, entry: EntryProcess, folder: str) -> None:
        self._locked = LockedVersion(folder)
        on_kill(self._locked.close)
        self._entry, self._world = entry, world
        self.version = int(self._locked.servable.version)
        self.rows = open_remote_rows(
            self._locked.servable, world.shape.config, discovery=world.cluster.discovery()
        )
        entry.models.append(self)
        self.rows.wait_ready(30.0)

    def warm_up(self) -> None:
        if self._world.shape.warm_up:
            self.rows.lookup(TableIds(torch.tensor([1, 2]), torch.tensor([1, 1])))

    def close(self) -> None:
        self.rows.close()
        self._locked.close()
        self._entry.models.remove(self)
        for shard in self.rows._map.shards:
            for one in shard.by_address.values():
                assert one.in_flight == 0, f"{one.in_flight} requests wait for {one.address}, none runs"
                assert not one._idle, f"{one.address}: {len(one._idle)} connections are open after close"


class EntryCatalog(ServableCatalog):
    """The versions of an entry, loaded without their dense half."""

    def __init__(self, world: World, entry: EntryProcess) -> None:
        super().__init__()
        self._world, self._entry = world, entry

    def load(self, folder: str, version: str) -> Any:
        return EntryModel(self._world, self._entry, f"{folder}/{version}")


class EntryProcess:
    """A process that answers requests, from the newest version that it has loaded."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.models: list[EntryModel] = []
        self.good_since = [float("inf")] * world.shape.threads
        """Virtual time of the first of the newest requests that were answered from the newest version, by
        thread."""
        world.entries[number] = self

    def run(self) -> None:
        world = self.world
        repository = Repository(
            [ServedFolder(folder=world.roots[0], name=MODEL)],
            EntryCatalog(world, self),
            lambda *version: None,  # type: ignore[arg-type, return-value]  # noqa: ARG005
            clock=concurrency.monotonic,
        )
        repository.refresh()
        threads = [
            concurrency.Thread(target=self._ask, args=(repository, number), name=f"requests-{number}")
            for number in range(world.shape.threads)
        ]
        for thread in threads:
            thread.start()
        while not world.stopping:
            concurrency.sleep(1)
            repository.refresh()
        for thread in threads:
            thread.join()
        repository.close()
        assert not self.models, f"{len(self.models)} versions are open after all were retired"

    def _ask(self, repository: Repository, number: int) -> None:
        world, draw = self.world, self.world.cluster.random
        while not world.stopping:
            concurrency.sleep(draw.uniform(0, 0.6))
            ids = [[draw.randint(1, IDS + 2) for _ in range(draw.randint(0, 3))] for _ in TABLES]
            sizes = [len(table) for table in ids]
            seconds = draw.choice([None, 0.05, 0.3, 1.0])
            began, machine = concurrency.monotonic(), world.cluster.simulation.current.machine
            asked_at, oldest = world.cluster.simulation.now, world.newest
            limit = world.shape.config.deadline.total_seconds()
            limit = limit if seconds is None else min(limit, seconds)
            good = False
            try:
                with repository.lease(MODEL) as loaded:
                    model: EntryModel = loaded.model  # type: ignore[assignment]
                    found = model.rows.lookup(
                        TableIds(torch.tensor([*chain(*ids)], dtype=torch.int64), torch.tensor(sizes)),
                        deadline=None if seconds is None else began + seconds,
                    )
                    self._judge(model.version, ids, found)
                good = model.version == oldest == world.newest and not found.missing
            except RetryableError as error:
                world.cluster.simulation.note(f"no answer: {error!r:.200}")
            # A paused machine answers late, whatever its program does.
            late = world.cluster.simulation.now - max(asked_at, machine.paused_until)
            assert late < limit + 1.0, f"a request of {limit:g} s ended after {late:g} s"
            if not good:
                self.good_since[number] = float("inf")
            elif self.good_since[number] == float("inf"):
                self.good_since[number] = asked_at

    def _judge(self, version: int, ids: list[list[int]], found: FoundRows) -> None:
        """Check every float of an answer, and what it says of itself."""
        shape = self.world.shape
        assert not found.missing or shape.missing == "default", f"{found.missing} may not be missing"
        expected = []
        for table, dim in zip(ids, TABLES.values(), strict=True):
            for one in table:
                missing = shard_part(one % shape.shards) in found.missing
                expected += [0.0 if missing or one > IDS else value_of(version, one)] * dim
        assert found.rows.tolist() == expected, (
            f"version {version} of {ids} is {expected}, not {found.rows.tolist()}; missing: {found.missing}"
        )
        if found.claim is not None:
            assert found.claim.step == version, f"rows of version {version} say step {found.claim.step}"


def value_of(version: int, key: int) -> float:
    return float(1000 * version + key)


def write_version(root: str, version: int, shape: Shape) -> None:
    """Write one version of the entry, or of a shard."""
    part = Path(root).name
    with NewVersion(root, f"{version}", "digest") as new:
        tables: dict[str, ServableTable] = {}
        for name, dim in TABLES.items():
            file = f"{name}.rows"
            keys = np.arange(1, IDS + 1, dtype=np.int64)
            if part != ENTRY:
                keys = keys[[shard_part(key % shape.shards) == part for key in keys.tolist()]]
                values = (1000.0 * version + keys).astype(np.float32)[:, None].repeat(dim, 1)
                write_frozen_table(
                    f"{new.folder}/{file}", [FrozenSegment(dim)], [(keys, values)], rows=len(keys)
                )
            tables[name] = ServableTable(
                file=file, rows=len(keys), dim=dim, coding="fp32", largest_error=0.0, mean_error=0.0
            )
        write_servable(new.folder, manifest(version, part, shape, tables))
        new.commit()


def manifest(version: int, part: str, shape: Shape, tables: Mapping[str, ServableTable]) -> Servable:
    return Servable(
        model=MODEL,
        version=f"{version}",
        run="run",
        checkpoint=f"model.ckpt-{version}",
        step=version,
        watermark=None,
        created=float(version),
        digest="digest",
        part=part,
        shards=shape.shards,
        missing_rows=shape.missing,  # type: ignore[arg-type]
        tables=tables,
    )


def on_kill(call: Callable[[], object]) -> None:
    """Call a function when the machine of the calling thread is killed."""
    machine: Any = concurrency.machine()
    machine.on_kill.append(call)


def serving(seed: int, *, traced: bool = False) -> SimCluster:
    """Run one seed of the world, and return the cluster for its figures."""
    cluster = SimCluster(seed, replace(Faults.drawn(seed), longest=5.0), traced=traced, calm=150.0)

    def play(cluster: SimCluster) -> None:
        shape = world.shape
        for root in world.roots:
            write_version(root, 1, shape)
        for shard in range(shape.shards):
            for replica in range(shape.replicas):
                name = f"server-{shard}-{replica}"
                cluster.start(name, lambda name=name, at=(shard, replica): world.serve(name, *at))
        for number in range(shape.entries):
            cluster.start(f"entry-{number}", lambda number=number: EntryProcess(world, number).run())
        cluster.start(
            "exporter", lambda: world.export(lambda: concurrency.sleep(cluster.random.uniform(0, 0.5)))
        )
        cluster.simulation.invariants.append(world.check_bounds)
        cluster.wait(done=world.is_over)
        world.stopping = True
        end = cluster.simulation.now + 60
        while left := [name for name, one in cluster.processes.items() if not one.finished]:
            assert cluster.simulation.now < end, f"{', '.join(left)} did not end in good order"
            concurrency.sleep(0.5)

    with tempfile.TemporaryDirectory(prefix="serving-") as folder:
        world = World(seed, cluster, folder)
        cluster.run(play)
    return cluster
