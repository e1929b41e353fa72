"""Channels for the contract: each opens writers and readers of one position, as a process would."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from services.kafka import CONSUMER_SETTINGS, PRODUCER_SETTINGS, Kafka
from sync.sample_messages import make_delta, make_rows

from monolith.checkpoint.saved_tables import IdShard
from monolith.sync import (
    Delta,
    DeltaReader,
    DeltaWriter,
    LearnedUpTo,
    LogPosition,
    MemoryChannel,
    Message,
    ShardLog,
    SnapshotBegin,
    SnapshotEnd,
    SnapshotRows,
)


class AnyChannel(Protocol):
    """One position to publish at."""

    snapshots_on_demand: bool
    """Whether a reader that asks gets a snapshot of this moment; else of some moment before."""

    def writer(self, log_bytes: int = 1 << 20, clock: Callable[[], float] = time.time) -> DeltaWriter: ...

    def reader(self) -> DeltaReader: ...


class PlainChannel:
    """Within this process."""

    snapshots_on_demand = True

    def __init__(self) -> None:
        self._channel: MemoryChannel | None = None

    def writer(self, log_bytes: int = 1 << 20, clock: Callable[[], float] = time.time) -> DeltaWriter:  # noqa: ARG002
        if self._channel is None:
            self._channel = MemoryChannel(log_bytes)
        return self._channel.writer()

    def reader(self) -> DeltaReader:
        return (self._channel or MemoryChannel()).reader()


class FlightChannel:
    snapshots_on_demand = True

    def __init__(self, stack: ExitStack) -> None:
        from monolith.sync.flight_channel import DeltaPort, ReaderLimits

        self._stack = stack
        self.port = DeltaPort(reader_limits=ReaderLimits(answer_bytes=1 << 12))
        stack.callback(self.port.close)

    def writer(self, log_bytes: int = 1 << 20, clock: Callable[[], float] = time.time) -> DeltaWriter:  # noqa: ARG002
        return self.port.writer(log_bytes=log_bytes)

    def reader(self) -> DeltaReader:
        from monolith.sync.flight_reader import FlightDeltaReader

        reader = FlightDeltaReader([self.port.address])
        self._stack.callback(reader.close)
        return reader


class FolderChannel:
    snapshots_on_demand = False

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self.folder = folder

    def writer(self, log_bytes: int = 1 << 20, clock: Callable[[], float] = time.time) -> DeltaWriter:
        from monolith.sync.folder_channel import FolderDeltaWriter

        writer = FolderDeltaWriter(str(self.folder), log_bytes=log_bytes, check_every=0.05, clock=clock)
        self._stack.callback(writer.close)
        return writer

    def reader(self) -> DeltaReader:
        from monolith.sync.folder_channel import FolderDeltaReader

        return FolderDeltaReader(str(self.folder), poll_every=0.01)


class KafkaChannel:
    snapshots_on_demand = False

    def __init__(self, stack: ExitStack, kafka: Kafka) -> None:
        self._stack = stack
        self._kafka = kafka
        self.topic = kafka.create_topic(partitions=3)

    def writer(self, log_bytes: int = 1 << 20, clock: Callable[[], float] = time.time) -> DeltaWriter:
        from monolith.sync.kafka_writer import KafkaDeltaWriter

        writer = KafkaDeltaWriter(
            [self._kafka.address],
            self.topic,
            log_bytes=log_bytes,
            message_bytes=1 << 10,
            settings=PRODUCER_SETTINGS,
            clock=clock,
        )
        self._stack.callback(writer.close)
        return writer

    def reader(self) -> DeltaReader:
        from monolith.sync.kafka_reader import KafkaDeltaReader

        reader = KafkaDeltaReader([self._kafka.address], self.topic, settings=CONSUMER_SETTINGS)
        self._stack.callback(reader.close)
        return reader


class SmallPublisher:
    """Publishes a few rows through a writer, one delta at a time: as little as a publisher can be."""

    def __init__(self, writer: DeltaWriter, *, epoch: str = "e1", shard: IdShard = (0, 1)) -> None:
        self.writer = writer
        self.shard = shard
        self.position = LogPosition(epoch, 0)
        self.rows: dict[int, float] = {}
        self.snapshots = 0
        self.open()

    def open(self, epoch: str | None = None) -> None:
        self.position = LogPosition(epoch or self.position.epoch, 0)
        log = ShardLog("run", self.shard, self.position, 1, {"item": 2})
        self.writer.open(log, self.snapshot)

    def publish(
        self, ids: Sequence[int] = (1, 2), *, removed: Sequence[int] = (), value: float = 1.0
    ) -> Delta:
        self.position = LogPosition(self.position.epoch, self.position.sequence + 1)
        for one in removed:
            self.rows.pop(one, None)
        self.rows |= dict.fromkeys(ids, value)
        delta = make_delta(
            self.position.sequence,
            ids,
            epoch=self.position.epoch,
            shard=self.shard,
            removed=removed,
            value=value,
        )
        self.writer.append(delta)
        return delta

    def snapshot(self, buckets: torch.Tensor | None = None) -> Iterator[Message]:
        self.snapshots += 1
        position, rows = self.position, dict(self.rows)
        yield SnapshotBegin("run", self.shard, position, LearnedUpTo(step=position.sequence), buckets)
        for one, value in rows.items():
            yield SnapshotRows("item", make_rows([one], value=value))
        yield SnapshotEnd(position, self.position)


class Copy:
    """What a reader has made of what it read: the rows of one shard."""

    def __init__(self) -> None:
        self.rows: dict[int, list[float]] = {}
        self.position: LogPosition | None = None
        self.snapshots = 0
        self.deltas: list[int] = []
        self.state = -1

    def follow(self, reader: DeltaReader, shard: int = 0, *, wait: float = 0.0) -> None:
        """Read once, until nothing is new."""
        for message in reader.read(shard, self.position, wait=wait):
            self.take(message)

    def take(self, message: Message) -> None:
        if isinstance(message, SnapshotBegin):
            self.rows, self.position = {}, message.position
        elif isinstance(message, SnapshotRows):
            self._put(message.rows)
        elif isinstance(message, SnapshotEnd):
            self.snapshots += 1
        elif isinstance(message, Delta):
            assert self.position is not None
            assert message.position == replace(self.position, sequence=self.position.sequence + 1)
            self.position = message.position
            self.deltas.append(message.position.sequence)
            for ids in message.removed.values():
                for one in ids.tolist():
                    self.rows.pop(one, None)
            for rows in message.rows.values():
                self._put(rows)
        else:
            self.state = message.number

    def equals(self, publisher: SmallPublisher) -> bool:
        wanted = {
            one: make_rows([one], value=value).values[0].tolist() for one, value in publisher.rows.items()
        }
        return self.position == publisher.position and self.rows == wanted

    def _put(self, rows: Any) -> None:
        for one, values in zip(rows.ids.tolist(), rows.values.tolist(), strict=True):
            self.rows[one] = values


def until(condition: Callable[[], bool], act: Callable[[], object], *, seconds: float = 60.0) -> None:
    """Do something again and again, until what it is to bring about on another thread is so."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        act()
        if condition():
            return
        time.sleep(0.001)
    raise AssertionError("it did not come about")
