"""A server that is killed while it logs loses no record that it had written, and leaves no half of one."""

from __future__ import annotations

import os
from pathlib import Path

from services import warm

from monolith.data.formats import format_of
from monolith.serve.served_log import recover

WRITER = """
import sys
from pathlib import Path
import torch
from monolith.concurrency import Clocks
from monolith.data import Records
from monolith.serve.config import ServeLogConfig
from monolith.serve.served_log import FolderSink
from monolith.tensors import RaggedTensor

sink = FolderSink(Path(sys.argv[1]), ServeLogConfig(to=sys.argv[1]), Clocks())
wide = torch.arange(100_001)
for item in range(1_000_000):
    one = {"item": RaggedTensor(torch.tensor([item]), torch.arange(2))}
    one["much"] = RaggedTensor(torch.rand(100_000), wide[[0, -1]])  # so that most of the time is writing
    sink.write(Records(1, one))
    print(item, flush=True)
"""


def test_a_killed_server_leaves_all_records_that_it_had_written(tmp_path: Path) -> None:
    for kills in range(3):
        writer = warm.Popen(
            ["-c", WRITER, str(tmp_path)],
            stdout=warm.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert writer.stdout is not None
        written = [int(writer.stdout.readline()) for _ in range(5 + kills)]
        assert recover(tmp_path) == []  # it is alive
        writer.kill()
        written += [int(line) for line in writer.stdout.read().split()]
        writer.wait()
        [name] = recover(tmp_path)
        path = str(tmp_path / name)
        found = [
            item
            for chunk in format_of(path).chunks(path, columns=["item"])
            for item in chunk.records["item"].flat_values.tolist()
        ]
        assert found[: len(written)] == written
        assert found == list(range(len(found)))
    assert not list(tmp_path.glob("*.open"))
