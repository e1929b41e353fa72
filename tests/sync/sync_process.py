"""A publisher or a subscriber as a process of its own, which a test kills: its arguments say which.

    publish PORT IDS FILE      changes and removes rows until it is told to end; then says its position
    follow ADDRESS FILE        follows; waits for each position that it is told, and says whether it got there

Both write the rows they hold to FILE before they say so.
"""

from __future__ import annotations

import sys
import threading

import numpy as np
import torch
from sync.tables import make_table

from monolith.sync import LogPosition, Publisher, PublisherConfig, Subscriber, TableTarget
from monolith.sync.flight_channel import DeltaPort
from monolith.sync.flight_reader import FlightDeltaReader
from monolith.table import Rows, Table, iterate

DIM = 4
PATIENCE_S = 240.0
"""To come to a position, on a machine that has much else to do."""


def say(text: object) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def write_rows(table: Table, path: str) -> None:
    rows = Rows.concat(list(iterate(table)))
    order = rows.ids.argsort()
    np.savez(path, ids=rows.ids[order].numpy(), values=rows.values[order].numpy())


def publish(port: str, ids: str, path: str) -> None:
    table = make_table(DIM)
    publisher = Publisher(
        {"item": table},
        DeltaPort(port=int(port)).writer(log_bytes=1 << 20),
        PublisherConfig(run="run", interval=0.02),
    )
    publisher.start()
    told = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), told.set()), daemon=True).start()
    step = 0
    while not told.is_set():
        step += 1
        chosen = torch.randint(0, int(ids), (100,)).unique()
        table.assign(chosen, torch.randn(len(chosen), DIM))
        table.remove(torch.randint(0, int(ids), (20,)).unique())
        if step % 20 == 0:
            say(step)
        told.wait(0.001)
    while not publisher.flush():
        told.wait(0.01)
    write_rows(table, path)
    say(f"{publisher.position.epoch} {publisher.position.sequence}")
    sys.stdin.read()


def follow(address: str, path: str) -> None:
    table = make_table(DIM)
    subscriber = Subscriber(lambda: FlightDeltaReader([address]), TableTarget({"item": table}), wait=0.1)
    subscriber.start()
    for line in sys.stdin:
        epoch, sequence = line.split()
        reached = subscriber.wait_for({0: LogPosition(epoch, int(sequence))}, PATIENCE_S)
        write_rows(table, path)
        say("reached" if reached else f"late: {subscriber.progress}")


if __name__ == "__main__":
    {"publish": publish, "follow": follow}[sys.argv[1]](*sys.argv[2:])
