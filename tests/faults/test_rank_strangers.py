"""What a program without the token can do to ranks that a person started on this machine: nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from data.service.loopback import until
from faults.strangers import Stranger
from services import warm
from store.listeners import is_open, listening
from torch import distributed as dist

from monolith.cluster.files_discovery import FilesConfig, FilesDiscovery
from monolith.train.hooks import ControlClient

pytest.importorskip("pyarrow.flight")
pytest.importorskip("grpc")

TESTS = Path(__file__).parents[1]
OTHER_ADDRESS = "127.0.0.2"
RANKS = 2


class LaunchedRanks:
    """A run without end, as `monolith train --launch local --mode sync` makes one."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.model_dir = folder / "m"
        self.log = folder / "err"
        with self.log.open("w") as log:
            self.process = warm.Popen(
                [
                    *("-m", "monolith", "train", "train.tasks:Clicks", "--launch", "local"),
                    *("--mode", "sync", "--num-workers", str(RANKS), "--control", "--no-summaries"),
                    *("--model-dir", str(self.model_dir), "--set", "batches=10000000"),
                ],
                stdout=warm.DEVNULL,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
            )
        stack.callback(self.process.wait)
        stack.callback(self.process.kill)
        until(self._trains, 120)

    def _trains(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return (self.model_dir / "controller_server_addr.txt").exists() and len(self.members()) == RANKS

    def members(self) -> dict[int, list[str]]:
        """Return the processes of the ranks, each with its command line."""
        found = {}
        for folder in Path("/proc").iterdir():
            with suppress(OSError):
                words = (folder / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
                stands_in = "guardian" in " ".join(words) or words[1:2] == ["-IS"]
                if str(self.model_dir) in words and "--cluster.index" in words and not stands_in:
                    found[int(folder.name)] = words
        return found

    def keys(self) -> tuple[str, int]:
        """Return where rank 0 keeps the keys, as the folder says in which ranks meet."""
        words = next(iter(self.members().values()))
        with FilesDiscovery(FilesConfig(folder=words[words.index("--discovery.folder") + 1])) as discovery:
            host, port = discovery.query("rank")[0].split(":")
        return host, int(port)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def reached(host: str, port: int) -> Any:
    """Return the keys as every program has them that reaches their port."""
    make: Any = getattr(dist, "TCPStore")  # noqa: B009 - torch's stubs do not have it
    return make(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))


def forge(keys: Any, written: Path) -> None:
    """Write under every key that ranks read, and those by which they were once called."""
    write = f'{{"call": "tables.write", "body": {{"cut": "x", "prefix": "{written}", "full": true}}}}'
    evict = '{"call": "evict/0", "body": {"store": 0, "now": {"user": 4000000000, "item": 4000000000}}}'
    for rank in range(RANKS):
        for key in (f"process/{rank}", f"calls/{rank}", f"said/waits/{rank}"):
            keys.set(key, "127.0.0.2:9")
        for number, request in enumerate(("no JSON", write, evict), 1):
            keys.add(f"asks/{rank}", 1)
            keys.set(f"asked/{rank}/{number}", request)
    keys.set("failed", '[1, "give up"]')
    keys.set("attempt", "mine")
    keys.set("said/begun", "no")


def test_a_stranger_writes_nothing_evicts_nothing_and_does_not_end_the_run(
    stack: ExitStack, tmp_path: Path
) -> None:
    run = LaunchedRanks(stack, tmp_path)
    written = run.model_dir / "written"
    sockets = {found for process in run.members() for found in listening(process)}
    assert {host for host, _ in sockets} == {"127.0.0.1"}
    assert len(sockets) >= 1 + RANKS * 6, "keys, a port for calls and five groups of each rank, control"
    assert not any(is_open(OTHER_ADDRESS, port) for _, port in sockets)

    keys = reached(*run.keys())
    ports = [keys.get(f"calls/{rank}")[32:].decode() for rank in range(RANKS)]  # after the signature
    forge(keys, written)
    stranger = stack.enter_context(closing(Stranger()))
    evict = {"call": "evict/0", "body": {"store": 0, "now": {"user": 4000000000}}}
    for address in ports:
        assert "refused" in stranger.call(address, "ask", **evict)

    with ControlClient(str(run.model_dir)) as job:  # its owner may
        before = job.global_step()
        until(lambda: job.global_step() > before + 5)
        job.save_checkpoint(60)
    run.process.terminate()
    assert run.process.wait(120) == 143
    assert not written.exists()
    assert not list(run.model_dir.glob("written*"))
    assert "retrying" not in run.log.read_text(), "no attempt was lost"
