"""Processes that follow a run of the counting model through a folder: in the end they have its rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from simulation.counting import COUNTS, Counted

from monolith import concurrency
from monolith.runtime.publish_shard import PublishPlan
from monolith.sync import Subscriber, TableTarget
from monolith.sync.folder_channel import FolderDeltaReader, FolderDeltaWriter
from monolith.sync.publish_config import GuardConfig, PublishConfig
from monolith.table import NativeTable, Segment, Sgd, TableConfig, iterate
from monolith.testing.cluster import SimCluster

CHANNEL = "sim://channel"
SUBSCRIBER = "subscriber-"
EQUAL_WITHIN = 120.0
"""Virtual seconds that subscribers have after the end of the run."""


def folder_plan(interval: float) -> PublishPlan:
    """Return how a run publishes to the folder, every so many seconds."""
    return PublishPlan(
        config=PublishConfig(
            to=CHANNEL,
            interval=timedelta(seconds=interval),
            guard=GuardConfig(largest_value=None, times_usual=None),
        ),
        run="run",
        open_writer=lambda _: FolderDeltaWriter(CHANNEL, check_every=0.5),
    )


def cut_channel(cluster: SimCluster) -> None:
    """Make the folder unreachable: for less, or for more, time than the end of a run waits for it."""
    cluster.disk.cut(CHANNEL, cluster.random.choice([5.0, 90.0]))


@dataclass
class Followers:
    """The subscribers of a run, each a process with a table of its own."""

    cluster: SimCluster
    tables: dict[int, NativeTable] = field(default_factory=dict)

    def start(self, count: int) -> None:
        for number in range(count):
            self.cluster.start(f"{SUBSCRIBER}{number}", lambda number=number: self._follow(number))

    def check_equal(self, counted: Counted) -> None:
        """Check that all of them get the rows of the last checkpoint, although the run is over: nothing
        but the channel is left of it."""
        simulation = self.cluster.simulation
        for name, process in self.cluster.processes.items():
            if not name.startswith(SUBSCRIBER):
                process.kill()
                process.finished = True

        def equal() -> bool:
            return all(rows_of(table) == counted.times for table in self.tables.values())

        # A subscriber that is killed now starts again, so faults may still happen.
        limit = simulation.now + EQUAL_WITHIN
        self.cluster.wait(done=lambda: equal() or simulation.now > limit)
        assert equal(), {number: rows_of(table) for number, table in self.tables.items()}

    def _follow(self, number: int) -> None:
        table = self.tables[number] = NativeTable(
            TableConfig(name=COUNTS, segments=(Segment(dim=1, optimizer=Sgd(learning_rate=1.0)),))
        )
        subscriber = Subscriber(
            lambda: FolderDeltaReader(CHANNEL, poll_every=1.0, patience=10.0), TableTarget({COUNTS: table})
        )
        subscriber.start()
        concurrency.Event().wait()


def rows_of(table: NativeTable) -> dict[int, int]:
    return {
        record: int(value[0])
        for chunk in iterate(table)
        for record, value in zip(chunk.ids.tolist(), chunk.values.tolist(), strict=True)
    }
