"""The world of publishing: trainers publish rows, removals and weights through a channel to servers.

Every write stores a number that no other write stores, in both columns of a row. So from a row alone it is
known which write it is of, and a server is judged exactly: when it says that it has learned up to step 7,
each of its rows must be one that the trainer had at the end of step 7 or later, in that history of the run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from monolith import concurrency, filesystem
from monolith.runtime.metric_guard import MetricGuard
from monolith.runtime.publish_hook import PublishHook
from monolith.runtime.publish_shard import PublishPlan, ShardPublisher
from monolith.runtime.publishers import LocalPublisher
from monolith.sync import DeltaReader, DeltaWriter, Subscriber, TableTarget
from monolith.sync.channel import ChannelFaults, MemoryChannel, ShardLog, TakeSnapshot
from monolith.sync.flight_channel import PUBLISHER, DeltaPort, ReaderLimits
from monolith.sync.flight_reader import FlightDeltaReader
from monolith.sync.folder_channel import FolderDeltaReader, FolderDeltaWriter
from monolith.sync.kafka_reader import KafkaDeltaReader, unseal
from monolith.sync.kafka_writer import KafkaDeltaWriter
from monolith.sync.messages import BUCKETS, Delta, LearnedUpTo, LogPosition, Message, PublishState
from monolith.sync.publish_config import GuardConfig, PublishConfig
from monolith.sync.publish_messages import PublishOrder
from monolith.sync.publisher import PublisherConfig
from monolith.sync.subscriber import ShardProgress
from monolith.table import NativeTable, Segment, Sgd, TableConfig, in_share, iterate
from monolith.testing.cluster import Faults, SimCluster
from monolith.testing.kafka import SimKafka

FOLDER = "sim://channel"
PORT = 7000
BROKERS = ["kafka:9092"]
TOPIC = "deltas"
NO_ROW = 0


class History:
    """One history of a shard's rows: what each step wrote. A run that is restored starts another one."""

    def __init__(self, before: History | None = None, up_to: int = 0) -> None:
        self.writes: dict[int, list[tuple[int, int]]] = {}
        """Id -> step and number of each write, in order; NO_ROW for a removal."""
        for key, writes in () if before is None else before.writes.items():
            self.writes[key] = [(step, number) for step, number in writes if step <= up_to]

    def write(self, key: int, step: int, number: int) -> None:
        self.writes.setdefault(key, []).append((step, number))

    def numbers(self, key: int, first: int, last: int | None) -> set[int]:
        """Return what the row of an id was at the end of step `first`, and up to the end of step `last`."""
        found = {NO_ROW}
        for step, number in self.writes.get(key, ()):
            if step <= first:
                found = {number}
            elif last is None or step <= last:
                found.add(number)
        return found


@dataclass(frozen=True)
class Shape:
    """The choices of a seed."""

    channel: str
    shards: int
    servers: int
    ids: int
    steps: int
    interval: float
    digest_buckets: int
    log_bytes: int
    log_files: int
    answer_bytes: int
    delta_ids: int
    changed_ids: int
    """Changed ids that a publisher remembers between two deltas."""
    rows_at_once: int
    """Rows in one message of a snapshot."""
    message_bytes: int
    """Bytes of a frame in one message of Kafka."""
    delivery_seconds: float
    """Seconds that the broker may take to accept a delta."""
    deletes_records: bool
    """Whether the broker can delete messages."""
    rollbacks: float
    """Chance at each step that the trainer goes back to its checkpoint, without a restart."""
    orders: float
    """Chance at each step that an operator pauses publishing, or rolls servers back."""
    ends: bool
    """Whether trainers end after their last step, so that only the channel has their rows."""
    cuts: int
    """How often the channel cannot be reached from a trainer that is about to end."""
    in_transit: ChannelFaults | None
    """What happens to messages between the channel and a subscriber; None: they arrive as they were sent."""

    @classmethod
    def drawn(cls, seed: int) -> Shape:
        draw = random.Random(f"publishing {seed}")
        digest_buckets = draw.choice([0, 256, BUCKETS])
        channel = draw.choice(["folder", "flight", "discovery", "kafka"])
        at_end = random.Random(f"publishing, at the end {seed}")
        in_transit = random.Random(f"publishing, in transit {seed}")
        return cls(
            channel=channel,
            ends=channel in ("folder", "kafka") and at_end.random() < 0.5,
            cuts=at_end.choice([0, 1, 2]),
            in_transit=ChannelFaults(
                drop=in_transit.choice([0.0, 0.1]),
                repeat=in_transit.choice([0.0, 0.1]),
                reorder=in_transit.choice([0.0, 0.1]),
                delay=in_transit.choice([0.0, 0.3]),
            )
            if in_transit.random() < 0.5
            else None,
            shards=draw.choice([1, 1, 2]),
            servers=draw.choice([1, 1, 2, 3]),
            ids=draw.choice([6, 12, 24]),
            steps=draw.randint(3, 16),
            interval=draw.choice([0.05, 0.25]),
            digest_buckets=digest_buckets,
            log_bytes=draw.choice([2, 4, 1000]) * (1000 + 16 * digest_buckets),
            log_files=draw.choice([4, 4096]),
            answer_bytes=draw.choice([500, 8 << 20]),
            delta_ids=draw.choice([3, 1 << 17, 1 << 17]),
            changed_ids=draw.choice([5, 1 << 20, 1 << 20]),
            rows_at_once=draw.choice([2, 5, 1000]),
            rollbacks=draw.choice([0.0, 0.0, 0.1]),
            orders=draw.choice([0.0, 0.0, 0.1]),
            message_bytes=draw.choice([(1000 + 16 * digest_buckets) // 3, 512 << 10]),
            delivery_seconds=draw.choice([0.5, 2.0, 30.0]),
            deletes_records=draw.random() < 0.8,
        )


@dataclass
class Saved:
    """A checkpoint of a shard, which a restarted trainer starts from."""

    step: int = 0
    rows: dict[int, int] = field(default_factory=dict)
    history: History = field(default_factory=History)


class World:
    """What all processes of a run have done, for comparisons. The code under test uses nothing of it."""

    def __init__(self, seed: int, cluster: SimCluster) -> None:
        self.shape, self.cluster = Shape.drawn(seed), cluster
        self.broker = SimKafka(cluster.network, deletes_records=self.shape.deletes_records)
        self.saved = [Saved() for _ in range(self.shape.shards)]
        self.trainers: dict[int, TrainerProcess] = {}
        self.servers: dict[int, ServerProcess] = {}
        self.histories: dict[str, History] = {}
        """Epoch -> the history that it publishes."""
        self.newest = 0
        """The number of the newest write."""
        self.cuts = self.shape.cuts
        self._heal_at: float | None = None

    def keys(self, shard: int) -> list[int]:
        every = torch.arange(1, self.shape.ids + 1)
        mine: list[int] = every[in_share(every, (shard, self.shape.shards))].tolist()
        return mine

    def writer(self, shard: int) -> DeltaWriter:
        shape = self.shape
        if shape.channel == "folder":
            return FolderDeltaWriter(
                FOLDER, log_bytes=shape.log_bytes, log_files=shape.log_files, check_every=0.5
            )
        if shape.channel == "kafka":
            return KafkaDeltaWriter(
                BROKERS,
                TOPIC,
                log_bytes=shape.log_bytes,
                message_bytes=shape.message_bytes,
                delivery_timeout=timedelta(seconds=shape.delivery_seconds),
                answer_within=5.0,
            )
        port = DeltaPort(
            host=f"trainer-{shard}",
            port=PORT,
            reader_limits=ReaderLimits(answer_bytes=shape.answer_bytes, snapshots=2),
        )
        discovery = self.cluster.discovery() if shape.channel == "discovery" else None
        return port.writer(log_bytes=shape.log_bytes, discovery=discovery, owns_port=True)

    def reader(self) -> DeltaReader:
        if self.shape.channel == "folder":
            return FolderDeltaReader(FOLDER, poll_every=0.2, patience=10.0)
        if self.shape.channel == "kafka":
            return KafkaDeltaReader(BROKERS, TOPIC, patience=10.0, answer_within=5.0)
        if self.shape.channel == "discovery":
            registry = self.cluster.discovery()
            return FlightDeltaReader(lambda: [*registry.query(PUBLISHER).values()])
        return FlightDeltaReader([f"trainer-{shard}:{PORT}" for shard in range(self.shape.shards)])

    def cut_channel(self, trainer: str) -> None:
        """Make the channel unreachable from a trainer: for less, or more, time than its end waits for it."""
        seconds = self.cluster.random.choice([5.0, 90.0])
        if self.shape.channel == "folder":
            self.cluster.disk.cut(FOLDER, seconds)
        else:
            self.cluster.network.cut(trainer, "kafka")
            self._heal_at = self.cluster.simulation.now + seconds

    # What must be true

    def is_over(self) -> bool:
        """Whether nothing goes wrong any more, and every server has what the trainers have."""
        shape, running = self.shape, self.cluster.processes
        if self._heal_at is not None and self.cluster.simulation.now >= self._heal_at:
            self._heal_at = None
            self.cluster.network.heal()
        if self.cluster.quiet:
            self.cluster.disk.faults.error_chance = 0.0
            for server in self.servers.values():
                server.transit.faults = None  # a long snapshot would hardly ever arrive as a whole
        return (
            self.cluster.quiet
            and all(
                one.finished if shape.ends and name.startswith("trainer") else one.running
                for name, one in running.items()
            )
            and len(self.trainers) == shape.shards
            and len(self.servers) == shape.servers
            and all(one.step == shape.steps and not one.orders for one in self.trainers.values())
            and not self.differences()
        )

    def differences(self) -> list[str]:
        expected: dict[int, int] = {}
        for trainer in self.trainers.values():
            expected |= numbers_of(trainer.table)
        found = []
        for number, server in self.servers.items():
            if (rows := numbers_of(server.table)) != expected:
                found.append(f"server-{number} has {rows}, the trainers have {expected}")
            weights = self.trainers[0].weights
            if server.target.dense is None or not torch.equal(server.target.dense["w"], weights["w"]):
                found.append(f"server-{number} has the weights {server.target.dense}, not {weights}")
        return found

    def check_claim(self, server: ServerProcess, progress: ShardProgress) -> None:
        """Check that a server has the rows of the steps that it says it has."""
        assert progress.position is not None
        assert progress.repaired == 0, "rows of a server differed from the published ones, and were repaired"
        history = self.histories[progress.position.epoch]
        rows = numbers_of(server.table)
        step, newest = progress.learned.step, progress.newest_step
        trainer = self.trainers.get(progress.shard[0])
        for key in self.keys(progress.shard[0]):
            number = rows.get(key, NO_ROW)
            allowed = history.numbers(key, step, newest)
            assert number in allowed, (
                f"server {server.number} says it has steps {step} to {newest} of {progress.position}; row "
                f"{key} is {number}, not one of {sorted(allowed)}"
            )
            if trainer is not None and trainer.history is history and trainer.paused_at is not None:
                assert number <= trainer.paused_at, f"row {key} was written after publishing was paused"

    def check_bounds(self) -> None:
        """Check that the channel keeps no more than it may."""
        if self.shape.channel == "folder":
            for folder in filesystem.list_folders(FOLDER):
                every = [filesystem.base_name(path) for path in filesystem.list_files(folder)]
                names = [name for name in every if not filesystem.is_temporary(name)]
                deltas = [name for name in names if name.startswith("delta-")]
                assert len(deltas) <= self.shape.log_files, deltas
                assert sum(name.startswith("snapshot-") for name in names) <= 1, names
                assert len(every) - len(names) <= 2, every
        if self.shape.channel == "kafka" and self.shape.deletes_records and not self.shape.ends:
            for trainer in self.trainers.values():
                self._check_topic(trainer)
        for trainer in self.trainers.values():
            stored = trainer.stored_bytes()
            assert stored <= self.shape.log_bytes, f"the log has {stored} bytes"

    def _check_topic(self, trainer: TrainerProcess) -> None:
        """Check that the broker deletes messages that no reader needs: after some snapshots, since a request
        may be lost."""
        log, writer = self.broker.logs[TOPIC, trainer.shard], trainer.writer
        assert isinstance(writer, KafkaDeltaWriter)
        for _ in range(20):
            writer._maker.want()
            concurrency.sleep(2)
            about = unseal(log.values[-1] or b"")[0]
            if about.before is not None and log.low >= about.before.offset:
                return
        raise AssertionError(f"the messages from {log.low} on are not deleted, though {about.before}")


class TrainerProcess:
    """A process that trains one shard and publishes it, from its first step or from its checkpoint on."""

    def __init__(self, world: World, shard: int) -> None:
        self.world, self.shard = world, shard
        self._draw = random.Random(world.cluster.random.random())
        self.weights: dict[str, torch.Tensor] = {}
        self.orders: list[PublishOrder] = []
        """Orders that will still be given."""
        self.paused_at: int | None = None
        """The newest write before publishing was paused."""
        self.table = make_table()
        saved = world.saved[shard]
        self.step, self.history = saved.step, History(saved.history, saved.step)
        self._restore(saved)
        self.writer: DeltaWriter | None = None
        self._plan = PublishPlan(
            config=PublishConfig(
                to="here",
                interval=timedelta(seconds=world.shape.interval),
                guard=GuardConfig(largest_value=None, times_usual=None),
            ),
            run="run",
            open_writer=lambda share: self._open(share[0]),
        )
        self.publisher = ShardPublisher(
            {"item": Interleaved(self.table)}, (shard, world.shape.shards), self._plan
        )
        world.trainers[shard] = self

    def run(self) -> None:
        shape, draw = self.world.shape, self._draw
        self._note()
        self.publisher.start()
        while True:
            concurrency.sleep(draw.uniform(0.01, 0.4))
            if self.orders:
                self._execute(self.orders.pop())
            if self.step == shape.steps:
                if shape.ends and not self.orders:
                    self._end()
                    return
                continue
            self._train()
            if draw.random() < 0.2:
                self._save()
            if draw.random() < shape.rollbacks:
                self._go_back()
            elif not self.orders and draw.random() < shape.orders:
                self._execute(PublishOrder("hold", "an operator said so"))
                self.orders = [PublishOrder("resume")] * draw.randint(1, 4)
                if draw.random() < 0.5:
                    self.orders.append(PublishOrder("rollback", version="1"))

    def _end(self) -> None:
        """End as a run does: saved, and with status 0 only if all rows and weights are published."""
        world = self.world
        self._save()
        if world.cuts:
            world.cuts -= 1
            world.cut_channel(f"trainer-{self.shard}")
        run: Any = SimpleNamespace(step=self.step, interrupted=False)
        model: Any = SimpleNamespace(published=lambda: self.weights)
        config = self._plan.config
        hook = PublishHook(
            LocalPublisher(self.publisher), model, config, MetricGuard(config.guard), leads=False
        )
        try:
            hook.end(run)
        finally:
            hook.close()

    def stored_bytes(self) -> int:
        log = getattr(self.writer, "log", None)
        return 0 if log is None else int(log.stored_bytes)

    def _train(self) -> None:
        """One step: some rows are written, some removed, and only then does the step count as learned."""
        draw, keys = self._draw, self.world.keys(self.shard)
        step = self.step + 1
        for _ in range(draw.randint(1, 3)):
            some = draw.sample(keys, draw.randint(1, min(4, len(keys))))
            if draw.random() < 0.3:
                self._write(step, dict.fromkeys(some, NO_ROW))
            else:
                self._write(step, {key: self._next() for key in some})
            if draw.random() < 0.5:
                concurrency.sleep(draw.uniform(0, 0.05))
        self.step = step
        self._note()

    def _next(self) -> int:
        self.world.newest += 1
        return self.world.newest

    def _write(self, step: int, numbers: dict[int, int]) -> None:
        for key, number in numbers.items():
            self.history.write(key, step, number)
        assign(self.table, numbers)

    def _note(self) -> None:
        self.weights = {"w": torch.tensor([float(self.step)])}
        self.publisher.send_weights(self.weights)
        self.publisher.learning.note(LearnedUpTo(step=self.step, event_at=float(self.step)))

    def _save(self) -> None:
        self.world.saved[self.shard] = Saved(self.step, numbers_of(self.table), self.history)

    def _restore(self, saved: Saved) -> None:
        self.table.clear()
        assign(self.table, saved.rows)

    def _go_back(self) -> None:
        saved = self.world.saved[self.shard]
        self.world.cluster.simulation.note(f"goes back from step {self.step} to {saved.step}")
        with self.publisher.restoring():
            self.table.clear()
            concurrency.sleep(self._draw.uniform(0, 0.2))
            self._restore(saved)
            self.step, self.history = saved.step, History(saved.history, saved.step)
            concurrency.sleep(self._draw.uniform(0, 0.2))
        self._note()

    def _execute(self, order: PublishOrder) -> None:
        if order.action == "resume":
            self.paused_at = None
        self.publisher.execute(order)
        if order.action == "hold":
            self.paused_at = self.world.newest

    def _open(self, shard: int) -> DeltaWriter:
        self.writer = self.world.writer(shard)
        return NotesEpochs(self.writer, self)


class NotesEpochs:
    """A `DeltaWriter` that notes which history each epoch is of, and else is the one that it was given."""

    def __init__(self, inner: DeltaWriter, trainer: TrainerProcess) -> None:
        self._inner, self._trainer = inner, trainer
        self.address = inner.address
        self.append: Callable[[Delta], None] = inner.append
        self.set_state: Callable[[PublishState], None] = inner.set_state
        self.unfinished = inner.unfinished
        self.close = inner.close

    def open(self, log: ShardLog, snapshot: TakeSnapshot) -> None:
        self._trainer.world.histories[log.newest.epoch] = self._trainer.history
        self._inner.open(log, snapshot)


class FaultyReader:
    """A `DeltaReader` whose messages are lost, repeated and late, even by an epoch, as it may."""

    def __init__(self, inner: DeltaReader, transit: MemoryChannel) -> None:
        self._inner, self._transit = inner, transit
        self.logs, self.close = inner.logs, inner.close

    def read(self, shard: int, after: LogPosition | None, *, wait: float) -> Iterator[Message]:
        return self._transit.in_transit(shard, self._inner.read(shard, after, wait=wait))

    def read_buckets(self, shard: int, buckets: torch.Tensor) -> Iterator[Message]:
        return self._transit.in_transit(shard, self._inner.read_buckets(shard, buckets))


class ServerProcess:
    """A process that follows all shards into a table of its own."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        seed = world.cluster.random.getrandbits(32) if world.shape.in_transit else 0
        self.transit = MemoryChannel(faults=world.shape.in_transit, seed=seed)
        self.table = make_table()
        self.target = ServedTarget(self.table)
        world.servers[number] = self

    def run(self) -> None:
        draw = random.Random(self.world.cluster.random.random())
        positions: dict[int, Any] = {}
        while True:
            subscriber = Subscriber(
                lambda: FaultyReader(self.world.reader(), self.transit),
                self.target,
                positions=positions,
                on_applied=self._applied,
            )
            subscriber.start()
            concurrency.sleep(draw.choice([3.0, 30.0, 1000.0]))
            # As after a reload of the model: another subscriber continues where this one was.
            subscriber.close()
            positions = {
                shard: one.position for shard, one in subscriber.progress.items() if one.position is not None
            }

    def _applied(self, progress: ShardProgress) -> None:
        if progress.generation != self.target.generation:
            return
        try:
            self.world.check_claim(self, progress)
        except AssertionError as error:  # a subscriber survives any error
            self.world.cluster.simulation.fail(error)
            raise


class ServedTarget(TableTarget):
    """Rows that are dropped when servers are rolled back to a version, as the overlay of a server is."""

    def __init__(self, table: NativeTable) -> None:
        super().__init__({"item": Interleaved(table)})
        self._rows = table
        self._drops = 0

    @property
    def generation(self) -> int:
        return self._drops

    def set_state(self, state: PublishState) -> None:
        super().set_state(state)
        if state.version is not None:
            self._drops += 1
            self._rows.clear()


class Interleaved:
    """A table whose calls take time, now and then, while other threads run: as native calls do."""

    def __init__(self, table: NativeTable) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._table, name)
        if name not in ("lookup_rows", "digests", "scan", "restore", "remove"):
            return found

        def call(*args: Any, **options: Any) -> Any:
            self._take_time()
            result = found(*args, **options)
            self._take_time()
            return result

        return call

    @staticmethod
    def _take_time() -> None:
        if random.random() < 0.2:
            concurrency.sleep(random.uniform(0, 0.05))


def make_table() -> NativeTable:
    segment = Segment(dim=2, optimizer=Sgd(), learning_rate=1.0)
    return NativeTable(TableConfig(name="item", segments=(segment,)))


def assign(table: NativeTable, numbers: dict[int, int]) -> None:
    gone = [key for key, number in numbers.items() if number == NO_ROW]
    there = {key: number for key, number in numbers.items() if number != NO_ROW}
    if gone:
        table.remove(torch.tensor(gone))
    if there:
        values = torch.tensor([*there.values()], dtype=torch.float32)
        table.assign(torch.tensor([*there]), values[:, None].repeat(1, 2))


def numbers_of(table: NativeTable) -> dict[int, int]:
    """Return the number of each row of a table."""
    found: dict[int, int] = {}
    for rows in iterate(table):
        for key, (one, other) in zip(rows.ids.tolist(), rows.values.tolist(), strict=True):
            assert one == other, f"row {key} is of two writes: {one} and {other}"
            found[key] = int(one)
    return found


@contextmanager
def small_messages(shape: Shape) -> Iterator[None]:
    """Let few rows fill a delta, a message of a snapshot and the set of changed ids, as millions do."""
    config = partial(PublisherConfig, touched_capacity=shape.changed_ids, digest_buckets=shape.digest_buckets)
    with ExitStack() as stack:
        for name, value in (
            ("monolith.sync.publisher.DELTA_IDS", shape.delta_ids),
            ("monolith.sync.publisher.CHUNK_BYTES", 24 * shape.rows_at_once),
            ("monolith.runtime.publish_shard.PublisherConfig", config),
        ):
            stack.enter_context(mock.patch(name, value))
        yield


def publishing(seed: int, *, traced: bool = False) -> SimCluster:
    """Run one seed of the world, and return the cluster for its figures."""
    faults = replace(Faults.drawn(seed), longest=5.0)
    faults.disk.error_chance = random.Random(f"disk {seed}").choice([0.0, 0.0, 0.02])
    cluster = SimCluster(seed, faults, traced=traced)
    world = World(seed, cluster)

    def play(cluster: SimCluster) -> None:
        def run(make: Callable[[World, int], TrainerProcess | ServerProcess], number: int) -> None:
            world.broker.attach()
            make(world, number).run()

        if world.shape.channel == "kafka":
            cluster.start("kafka", world.broker.serve)
        for shard in range(world.shape.shards):
            cluster.start(f"trainer-{shard}", partial(run, TrainerProcess, shard))
        for number in range(world.shape.servers):
            cluster.start(f"server-{number}", partial(run, ServerProcess, number))
        cluster.wait(done=world.is_over)
        concurrency.sleep(5)
        assert not world.differences()
        world.check_bounds()

    with small_messages(world.shape):
        cluster.run(play)
    return cluster
