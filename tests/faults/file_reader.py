"""A reader of files that is killed at any moment, and the process that starts one after the other.

Run as a script, it imports everything once and then forks a reader for every line on its
standard input: a JSON list of the arguments of `read`, and of the seconds after which to kill
it, or null. It prints the exit status. A reader writes one line per batch: the ids and the
position after them, together.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from monolith.data import Source
from monolith.data.files.shared_queue import SharedFileQueue
from monolith.data.files.source import FileSource
from monolith.data.formats.parquet import ParquetFormat
from monolith.data.pipeline import Pipeline
from monolith.data.shuffling import ShuffleConfig

FORMAT = ParquetFormat(chunk_rows=16, row_group_rows=32)


def make(kind: str, folder: str) -> Source:
    """Return a source over the files of a folder."""
    files = sorted(map(str, Path(folder).glob("*.parquet")))
    if kind == "queue":
        queue = SharedFileQueue(str(Path(folder) / "queue"))
        queue.add(files)
        return FileSource(queue, FORMAT, batch_size=5, auto_commit=False, worker=0)
    source = FileSource(files, FORMAT, batch_size=5, shuffle=ShuffleConfig(seed=3, buffer=50))
    if kind == "files":
        return source
    return Pipeline(source).filter(lambda records: records["id"].flat_values % 2 == 0).rebatch(7).prefetch(3)


def delivered(log: Path) -> tuple[list[int], Any]:
    """Return the ids of all whole lines, and the position of the last; cut off a line that is not whole."""
    ids: list[int] = []
    position, end = None, 0
    if log.exists():
        for line in log.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                entry = json.loads(line)
                ids += entry["ids"]
                position = entry["position"]
                end += len(line)
        os.truncate(log, end)
    return ids, position


def read(kind: str, folder: str, log: str) -> None:
    """Go on from where the log ends, to the end of the data."""
    source: Any = make(kind, folder)
    _, position = delivered(Path(log))
    if position is not None:
        source.restore(position)
    with Path(log).open("ab", buffering=0) as file:
        for batch in source:
            entry = {"ids": batch["id"].flat_values.tolist(), "position": source.position()}
            file.write(json.dumps(entry).encode() + b"\n")
            source.commit(entry["position"])


def main() -> None:
    for line in sys.stdin:
        *arguments, patience = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                read(*arguments)
                code = 0
            finally:
                os._exit(code)
        if patience is not None:
            time.sleep(patience)
            os.kill(pid, signal.SIGKILL)  # ours still, if only its exit status
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
