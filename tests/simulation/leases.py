"""The world of a queue of files whose leases end under live workers: they pause for longer, and report late.

There is no fleet, so only the queue tells workers apart. A worker is as small as one can be: it counts the
records that it reads, and saves the counts with its position in one file. Then it commits, often long after.
A worker that loses a lease has trained records that another one trains again. But what the queue has once
noted as trained is in a checkpoint, and is leased to none.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from contextlib import closing
from dataclasses import replace
from datetime import timedelta

from simulation.counting import RECORD
from simulation.elastic import NumberFiles

from monolith import concurrency, filesystem
from monolith.data.files.shared_queue import SharedFileQueue
from monolith.data.files.source import FileSource
from monolith.testing.cluster import Faults, SimCluster


def leases(seed: int, *, traced: bool = False) -> SimCluster:
    """Run one seed of the world, and return the cluster for its figures."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        return _leases(seed, folder, traced=traced)


def _leases(seed: int, folder: str, *, traced: bool) -> SimCluster:
    draw = random.Random(f"leases {seed}")
    num_workers, num_records, file_records = (
        draw.choice([2, 2, 3]),
        draw.randint(6, 24),
        draw.choice([2, 4, 6]),
    )
    batch_size, save_every = draw.choice([1, 2]), draw.choice([1, 2, 4])
    slow_reads, late_commits = draw.choice([0.0, 0.1]), draw.choice([0.0, 0.2])
    lease = timedelta(seconds=draw.choice([1, 1, 3, 3600]))
    format_of_files = NumberFiles(draw.choice([0.05, 0.2]))
    workers = [f"worker-{number}" for number in range(num_workers)]
    ranges = [
        (one, min(one + file_records, num_records + 1)) for one in range(1, num_records + 1, file_records)
    ]
    files = {f"{first}-{end - 1}": range(first, end) for first, end in ranges}
    noted: set[int] = set()
    """Records that the queue has noted as trained at some time."""
    # A queue of files is for machines whose clocks agree to within a small part of a lease.
    faults = replace(Faults.drawn(seed), clock_jumps=0, drift=0.0, longest=draw.choice([2.0, 8.0]))
    outlives = lease > timedelta(minutes=1)
    """Whether a lease lasts longer than the run: only then a worker finds its files after a restart as it
    left them, and may continue from its position."""

    def counts_of(name: str) -> Counter[int]:
        """Return what the newest checkpoint of a worker has counted."""
        if not filesystem.exists(f"sim://{name}"):
            return Counter()
        saved = json.loads(filesystem.read_bytes(f"sim://{name}"))
        return Counter({int(record): times for record, times in saved["counts"].items()})

    def check_noted(queue: SharedFileQueue) -> None:
        """Check that what the queue notes as trained is in a checkpoint, and stays noted."""
        state = queue.state()
        left = {path: progress.get("place", 0) for _, path, progress in state["waiting"]}
        now: set[int] = set()
        for number, (path, records) in enumerate(files.items()):
            if number < state["handed"]:
                now |= set(records[: left.get(path, len(records))])
        assert noted <= now, f"the queue had noted {sorted(noted - now)} as trained, and leases them again"
        saved = {record for name in workers for record in counts_of(name)}
        assert now <= saved, f"the queue notes {sorted(now - saved)} as trained, which no checkpoint has"
        noted.update(now)

    def play(cluster: SimCluster) -> None:
        def train(number: int, name: str) -> None:
            counts, file = counts_of(name), f"sim://{name}"
            queue = SharedFileQueue(folder, lease=lease)
            queue.add(list(files))
            source = FileSource(
                queue,
                format_of_files,
                batch_size=batch_size,
                worker=number,
                num_workers=num_workers,
                threads=0,
            )
            if outlives and filesystem.exists(file):
                source.restore(json.loads(filesystem.read_bytes(file))["position"])

            def save() -> None:
                position = source.position()
                with filesystem.atomic_write(file) as out:
                    out.write(json.dumps({"position": position, "counts": counts}).encode())
                if cluster.random.random() < late_commits:
                    concurrency.sleep(cluster.random.uniform(0, 3 * min(lease.total_seconds(), 3)))
                source.commit(position)
                check_noted(queue)

            with closing(iter(source)) as batches:
                for step, records in enumerate(batches, 1):
                    counts.update(records.columns[RECORD].values.tolist())
                    if cluster.random.random() < slow_reads:
                        concurrency.sleep(cluster.random.uniform(0, 2 * min(lease.total_seconds(), 3)))
                    if step % save_every == 0:
                        save()
            save()
            source.close()

        for number, name in enumerate(workers):
            cluster.start(name, lambda number=number, name=name: train(number, name))
        cluster.wait()
        total = sum((counts_of(name) for name in workers), Counter[int]())
        assert total.keys() == set(range(1, num_records + 1)), f"records with times trained: {total}"
        if outlives:
            assert set(total.values()) == {1}, f"records with times trained: {total}"

    cluster = SimCluster(seed, faults, traced=traced)
    cluster.run(play)
    return cluster
