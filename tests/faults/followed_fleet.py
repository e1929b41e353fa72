"""A training share or a serving shard of a fleet as a process of its own, which a test kills.

    train SHARE OF PORT IDS FOLDER     trains on ids that come and go, and publishes its share
    serve SHARD OF FOLDER ADDRESS...   serves its ids of an export, and follows all shares

What the test says comes in by lines, and each is answered by one line that begins with the same word. Rows
are exchanged by files of the folder; the share that is killed goes on from what it saved last, as a run does.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from sync.tables import make_table

from monolith.observe.metrics import Metrics
from monolith.serve.metrics import FollowMetrics
from monolith.serve.overlay import FollowedTables, FollowTarget
from monolith.sync import LogPosition, Publisher, PublisherConfig, Subscriber
from monolith.sync.flight_channel import DeltaPort
from monolith.sync.flight_reader import FlightDeltaReader
from monolith.table import Expiry, FrozenTable, FrozenTables, Rows, in_share, iterate

DIM = 4
ROW_BYTES = 40
"""About what a row takes; a share has room for a fifth of its ids, so that new ones drive out old ones."""
LEAP_STEPS = 40
"""After so many steps nearly an hour passes without an event: rows of all but the last few expire."""
PATIENCE_S = 500.0
"""To come to a place, on a machine that has much else to do."""


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def heard() -> queue.SimpleQueue[str]:
    """Return the lines that come in, from now on."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            lines.put(line.strip())
        os._exit(0)  # the test has gone

    threading.Thread(target=listen, daemon=True).start()
    return lines


def write_rows(path: Path, ids: torch.Tensor, values: torch.Tensor) -> None:
    """Write rows in the order of their ids; who is killed meanwhile leaves the file as it was."""
    order = ids.argsort()
    part = path.with_suffix(".part.npz")
    np.savez(part, ids=ids[order].numpy(), values=values[order].numpy())
    part.replace(path)


class TrainingShare:
    """Trains, expires and evicts rows of one share."""

    def __init__(self, share: tuple[int, int], port: int, ids: int, folder: Path) -> None:
        self._share, self._ids = share, ids
        self._saved = folder / f"saved{share[0]}.npz"
        self._held = folder / f"published{share[0]}.npz"
        self._now = 0
        self._expired = 0
        self._steps = 0
        room = ids // share[1] // 5 * ROW_BYTES
        self._table = make_table(
            DIM, expiry=Expiry(default=timedelta(hours=1)), capacity_bytes=room, when_full="expire_oldest"
        )
        self._restore()
        writer = DeltaPort(port=port).writer(log_bytes=64 * ids)
        self._publisher = Publisher(
            {"item": self._table}, writer, PublisherConfig(run="run", shard=share, interval=0.05)
        )
        self._publisher.start()

    def live(self) -> None:
        """Train and do as told, until the test goes."""
        lines = heard()
        while True:
            self._step()
            try:
                line = lines.get(timeout=0.002)
            except queue.Empty:
                continue
            match line.split():
                case ["steps", count]:
                    for _ in range(int(count)):
                        self._step()
                    say("steps", self._steps, len(self._table))
                case ["save"]:
                    place = self._publisher.position  # before the rows are read, which may be newer
                    write_rows(self._saved, *self._rows())
                    say("save", place.epoch, place.sequence)
                case ["rewind"]:
                    for rows in iterate(self._table):  # at its ceiling a table has no room to be cleared into
                        self._table.remove(rows.ids)
                    self._restore()
                    self._publisher.begin_epoch("rewound")
                    say("rewind")
                case ["enough"]:
                    self._end(lines)

    def _step(self) -> None:
        """Train a batch, a quarter of it on ids of late; remove some; at times let old ones expire."""
        self._steps += 1
        self._now += 60 + 3240 * (self._steps % LEAP_STEPS == 0)
        batch = max(50, self._ids // 100)
        span = self._ids // 4
        lately = (self._steps * batch // 8) % self._ids + torch.randint(0, span, (batch,))
        some = torch.cat([torch.randint(0, self._ids, (batch // 4,)), lately % self._ids]).unique()
        some = some - self._ids // 2
        mine = some[in_share(some, self._share)]
        gradients = torch.randint(-8, 9, (len(mine), DIM)) / 4
        self._table.apply_gradients(mine, gradients, event_time=self._now)
        self._table.remove(mine[torch.rand(len(mine)) < 0.02])
        if self._steps % 10 == 0:
            self._expired += self._table.evict(self._now)

    def _rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows = Rows.concat(list(iterate(self._table)))
        return rows.ids, rows.values

    def _restore(self) -> None:
        if self._saved.exists():
            saved = np.load(self._saved)
            ids, values = torch.from_numpy(saved["ids"]), torch.from_numpy(saved["values"])
            times = torch.full((len(ids),), self._now)
            self._table.restore(Rows(ids, times, values, torch.empty(len(ids), 0)))

    def _end(self, lines: queue.SimpleQueue[str]) -> None:
        while not self._publisher.flush():
            threading.Event().wait(0.01)
        place = self._publisher.position
        write_rows(self._held, *self._rows())
        said = {
            "place": [place.epoch, place.sequence],
            "expired": self._expired,
            "driven_out": self._table.stats().evicted - self._expired,
            "published": str(self._publisher.stats),
        }
        say("enough", json.dumps(said))
        lines.get()  # nothing more comes: it publishes that all is quiet until the test goes


def serve(shard: tuple[int, int], folder: Path, addresses: list[str]) -> None:
    tables = FollowedTables(shard)
    export = FrozenTables({"item": FrozenTable(str(folder / f"export{shard[0]}.rows"))}, threads=1)
    view = tables.attach(export)
    said = json.loads((folder / "places.json").read_text())
    places = {int(share): LogPosition(*place) for share, place in said.items()}
    target = FollowTarget("model", tables, FollowMetrics(Metrics(), "model"), go_to=lambda _: None)
    subscriber = Subscriber(lambda: FlightDeltaReader(addresses), target, positions=places, wait=0.2)
    subscriber.start()
    lines = heard()
    while True:
        line = lines.get()
        wanted = {int(share): LogPosition(*place) for share, place in json.loads(line).items()}
        reached = subscriber.wait_for(wanted, PATIENCE_S)
        write_rows(folder / f"served{shard[0]}.npz", *view.present("item", 0, (1 << 64) - 1))
        say("reached" if reached else "late", dict(subscriber.progress))


if __name__ == "__main__":
    role, number, of, *rest = sys.argv[1:]
    if role == "train":
        TrainingShare((int(number), int(of)), int(rest[0]), int(rest[1]), Path(rest[2])).live()
    else:
        serve((int(number), int(of)), Path(rest[0]), rest[1:])
