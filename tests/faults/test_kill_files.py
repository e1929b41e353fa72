"""A reader that is killed and started again delivers every record exactly once."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.file_reader import FORMAT, delivered
from services import warm

from monolith.data.formats.memory import to_records

KILLS = 50
RECORDS = 3000


class Readers:
    """Starts readers, one at a time, and kills some."""

    def __init__(self) -> None:
        tests = Path(__file__).parents[1]
        self._server = warm.Popen(
            [str(tests / "faults" / "file_reader.py")],
            stdin=warm.PIPE,
            stdout=warm.PIPE,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")]),
            },
        )

    def run(self, kind: str, folder: Path, log: Path, patience: float | None) -> int:
        """Read on; kill the reader after some seconds if it is still there. Return how it ended."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps([kind, str(folder), str(log), patience]), file=self._server.stdin, flush=True)
        return int(self._server.stdout.readline())

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=30)


@pytest.fixture(scope="module")
def readers() -> Iterator[Readers]:
    readers = Readers()
    yield readers
    readers.close()


def write(folder: Path) -> None:
    first = 0
    for number, size in enumerate([400, 1, 799, 0, 1000, 300, 500]):
        with FORMAT.writer(str(folder / f"{number}.parquet")) as writer:
            ids = range(first, first + size)
            writer.write(
                to_records({"id": [[one] for one in ids], "tags": [[one] * (one % 4) for one in ids]})
            )
        first += size
    assert first == RECORDS


@pytest.mark.parametrize("kind", ["files", "pipeline", "queue"])
def test_every_record_is_delivered_once_whenever_the_reader_is_killed(
    kind: str, readers: Readers, tmp_path: Path
) -> None:
    rng = random.Random(kind)
    wanted = list(range(RECORDS) if kind != "pipeline" else range(0, RECORDS, 2))
    kills = rounds = 0
    while kills < KILLS:
        rounds += 1
        folder = tmp_path / str(rounds)
        folder.mkdir()
        write(folder)
        log = folder / "log"
        while True:
            patience = None if kills == KILLS else rng.uniform(0, 0.06)
            status = readers.run(kind, folder, log, patience)
            assert status in (0, -signal.SIGKILL)
            if status == 0:
                break
            kills += 1
        ids, _ = delivered(log)
        assert len(ids) == len(wanted), f"{len(ids) - len(wanted)} records too many"
        assert sorted(ids) == wanted
