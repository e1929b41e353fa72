"""What the tests of the data service run in processes of their own.

python -m data.service.processes worker DISPATCHER
python -m data.service.processes dispatcher FOLDER PORT
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from data.lists import ListSource, records
from services import warm

from monolith import filesystem
from monolith.data import Position, Records, Source
from monolith.data.service import DataJobConfig, DataServiceSource, DataWorker, DataWorkerConfig, Dispatcher

YIELD, RECORDS = 7, 49
SPLITS = tuple(f"{number}" for number in range(6))
CONFIG = DataJobConfig(splits=SPLITS, lease=timedelta(seconds=1.0))
ALL = [int(split) * 1000 + number for split in SPLITS for number in range(RECORDS)]
TESTS = Path(__file__).parents[2]


def open_split(split: str) -> Source:
    """49 records in yields of 7, each with a number that no other has."""
    first = int(split) * 1000
    numbers = range(first, first + RECORDS)
    return ListSource(
        [
            records(
                id=[[number] for number in numbers[begin : begin + YIELD]],
                text=[[b"x" * (number % 3)] for number in numbers[begin : begin + YIELD]],
            )
            for begin in range(0, RECORDS, YIELD)
        ]
    )


class Counting:
    """A split that counts what was read of it."""

    def __init__(self, split: str, read: list[int]) -> None:
        self._source = open_split(split)
        self._read = read

    def __iter__(self) -> Iterator[Records]:
        for one in self._source:
            self._read.append(one.size)
            yield one

    def position(self) -> Position:
        return self._source.position()

    def restore(self, position: Position) -> None:
        self._source.restore(position)

    def close(self) -> None:
        self._source.close()


def train(dispatcher: str, name: str, checkpoint: str) -> None:
    """Read as a trainer does: after every third chunk, save what was seen together with the position."""
    source = DataServiceSource(dispatcher, name, prefetch=2)
    seen: list[int] = []
    for turn, some in enumerate(source, start=1):
        seen += some["id"].flat_values.tolist()
        if turn % 3 == 0:
            with filesystem.atomic_write(checkpoint) as file:
                file.write(json.dumps({"position": source.position(), "seen": seen}).encode())
        say(str(turn))


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def start(*arguments: str) -> tuple[warm.Popen, str]:
    """Start this module, and return the process and the address it prints."""
    process = warm.Popen(
        ["-m", "data.service.processes", *arguments],
        stdout=warm.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def main(role: str, *arguments: str) -> None:
    if role == "worker":
        with DataWorker(
            arguments[0], open_split, DataWorkerConfig(chunk_records=5, readers=1, buffer_chunks=4)
        ) as worker:
            say(worker.address)
            worker.wait()
    elif role == "dispatcher":
        with Dispatcher(CONFIG, folder=arguments[0], port=int(arguments[1])) as dispatcher:
            say(dispatcher.address)
            threading.Event().wait()
    else:
        train(*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
