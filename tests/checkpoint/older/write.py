"""Writes the checkpoints of this folder: `python write.py FOLDER`, with the program that is to be older.

They were written once, by the program named in README.md. Whoever adds some of a later
program writes them into a folder of their own, and leaves these as they are.
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from checkpoint.older.task import ALONE, FLEET, OlderTask, checkpoints, config_of, content_of

from monolith.cluster import MemoryDiscovery
from monolith.runtime import Trainer, join_fleet, serve_parameters

SERVERS = WORKERS = 2


def write_alone(folder: Path) -> None:
    """Train in one process, in two runs, so that the folder has a history."""
    for steps in (4, 3):
        Trainer(OlderTask(), config_of(folder, steps=steps)).train()


def write_fleet(folder: Path) -> None:
    """Train with two servers and two workers, who are threads."""
    discovery, stop = MemoryDiscovery(), threading.Event()
    config = config_of(folder, deterministic=False, max_steps=7)

    def serve(index: int) -> None:
        serve_parameters(
            OlderTask(),
            config,
            discovery,
            index=index,
            num_ps=SERVERS,
            num_workers=WORKERS,
            stop=stop,
            linger=timedelta(),
        )

    def work(index: int) -> None:
        with join_fleet(discovery, index=index, num_ps=SERVERS, num_workers=WORKERS) as fleet:
            Trainer(OlderTask(), config, fleet=fleet).train()

    servers, workers = _threads(serve, SERVERS), _threads(work, WORKERS)
    for thread in workers:
        thread.join()
    stop.set()
    for thread in servers:
        thread.join()


def _threads(run: Callable[[int], None], count: int) -> list[threading.Thread]:
    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    return threads


def write_content(folder: Path) -> None:
    """Write beside each checkpoint what it brings back."""
    for prefix in checkpoints(folder):
        Path(f"{prefix}.content.json").write_text(json.dumps(content_of(prefix)))


def write_end(folder: Path) -> None:
    """Write what comes of going on to the end of the data; the folder itself stays as it is."""
    with tempfile.TemporaryDirectory() as elsewhere:
        copy = Path(elsewhere, "copy")
        shutil.copytree(folder, copy)
        Trainer(OlderTask(), config_of(copy)).train()
        Path(folder, "end.json").write_text(json.dumps(content_of(checkpoints(copy)[-1])))


def pack(folder: Path) -> None:
    """Make one small file of a folder, without the lock, which is of the process that wrote it."""
    with tarfile.open(f"{folder}.tar.xz", "w:xz") as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.name != ".lock":
                archive.add(path, path.relative_to(folder.parent))
    shutil.rmtree(folder)


def main(folder: Path) -> None:
    write_alone(folder / ALONE)
    write_content(folder / ALONE)
    write_end(folder / ALONE)
    write_fleet(folder / FLEET)
    write_content(folder / FLEET)
    pack(folder / ALONE)
    pack(folder / FLEET)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
