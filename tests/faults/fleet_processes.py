"""Fleets of real processes, to be hit: two servers and two workers who train a tallied task.

They are started in one of two ways: all by `monolith train --launch local`, which restarts what dies; or each
by a loop of its own that restarts failures, as Kubernetes, Ray and YARN do, and on one host or on as many.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self

from faults.network import ON_ANOTHER_HOST, Network
from runtime.fleets import Tallied, TalliedQueue, read_model
from services import warm
from services.warm_server import SHOW_STACKS

TESTS = Path(__file__).parents[1]
LIMIT = 180.0
MEMBERS = [("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1)]
SERVED_RANKS = [MEMBERS[0], *MEMBERS[2:]]

Place = tuple[str, int]
"""Role and index."""


class FleetProcesses:
    """Processes that train in one model_dir, with the text of all of them. None outlives its block."""

    SHAPE: tuple[str, ...] = ("--num-ps", "2", "--num-workers", "2")
    members = MEMBERS

    def __init__(self, folder: Path, batches: int, *flags: str) -> None:
        self.model_dir = folder / "model"
        self.batches = batches
        self._folder = folder
        self._flags = flags
        self._output = (folder / "output.txt").open("a")

    @property
    def task(self) -> list[str]:
        return ["runtime.fleets:Tallied"]

    def command(self, *more: str) -> list[str]:
        return [
            *("-m", "monolith", "train", *self.task),
            *("--set", f"batches={self.batches}", "--model-dir", str(self.model_dir)),
            *(*self.SHAPE, "--save-steps", "20", "--no-summaries", "--threads", "1"),
            *("--quiet", "--log-level", "info", "--failover.wait", "0.5s", *self._flags, *more),
        ]

    def start(self, command: list[str]) -> warm.Popen:
        return warm.Popen(
            command,
            cwd=TESTS,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
                "OMP_NUM_THREADS": "1",
            },
            stdout=self._output,
            stderr=warm.STDOUT,
        )

    @property
    def output(self) -> str:
        return (self._folder / "output.txt").read_text()

    # What can be done to them

    def pid(self, place: Place) -> int | None:
        """Return the process id of a member, not of its guardian."""
        words_of_it = ["--cluster.role", place[0], "--cluster.index", str(place[1])]
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                words = (folder / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
                stands_in = "guardian" in " ".join(words) or words[1:2] == ["-IS"]  # see `warm_interpreter`
                if str(self.model_dir) in words and words_of_it == words[-4:] and not stands_in:
                    return int(folder.name)
        return None

    def hit(self, place: Place, number: int = signal.SIGKILL) -> int:
        """Send a signal to a member that runs."""
        hit: list[int] = []

        def strikes() -> bool:
            pid = self.pid(place)
            with contextlib.suppress(ProcessLookupError):  # it has just ended, and another takes its place
                if pid is not None:
                    os.kill(pid, number)
                    hit.append(pid)
            return bool(hit)

        self.wait_for(strikes, f"{place} to run")
        return hit[0]

    # What comes of it

    @property
    def checkpoints(self) -> set[str]:
        return {path.name for path in self.model_dir.glob("model.ckpt-*.manifest")}

    def wait_for_another_checkpoint(self) -> None:
        before = self.checkpoints

        def is_named() -> bool:
            """Whether a restart would find it: a checkpoint is written first, and named then."""
            state = self.model_dir / "checkpoint"
            said = state.read_text("utf-8") if state.exists() else ""
            return any(f'{name.removesuffix(".manifest")}"' in said for name in self.checkpoints - before)

        self.wait_for(is_named, "another checkpoint")

    def wait_for(self, found: Callable[[], object], what: str, limit: float = LIMIT) -> None:
        deadline = time.monotonic() + limit
        while not found():
            if time.monotonic() >= deadline:
                raise AssertionError(f"waited {limit:g} s for {what}:\n{self._output_with_stacks()}")
            time.sleep(0.05)

    def _output_with_stacks(self) -> str:
        """Return what they said last, and where each thread of them is."""
        said = self.output[-5000:]
        length = len(self.output)
        for place in MEMBERS:
            if (pid := self.pid(place)) is not None:
                os.kill(pid, SHOW_STACKS)
                time.sleep(0.5)
        return f"{said}\n{self.output[length:]}"

    def check_every_record_was_trained_once(self) -> None:
        model = read_model(Tallied(batches=self.batches), self.model_dir)
        assert model.step == self.batches
        assert model.tally == dict.fromkeys(range(8 * self.batches), 1.0)

    def close(self) -> None:
        for place in self.members:
            if (pid := self.pid(place)) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._output.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class LaunchedFleet(FleetProcesses):
    """All by one command, which restarts what dies."""

    def __init__(self, folder: Path, batches: int, *flags: str) -> None:
        super().__init__(folder, batches, "--launch", "local", *flags)
        self.launcher = self.start(self.command())

    def finish(self) -> None:
        """Wait for the end of the run, which is a good one."""
        self.wait_for(lambda: self.launcher.poll() is not None, "the launcher to end", 4 * LIMIT)
        assert self.launcher.returncode == 0, self.output[-5000:]

    def close(self) -> None:
        self.launcher.kill()  # its guardians end the others
        self.launcher.wait()
        super().close()


class LaunchedRanks(LaunchedFleet):
    """Two ranks that train in step, by one command."""

    SHAPE = ("--mode", "sync", "--num-workers", "2")
    members = MEMBERS[2:]

    def check_every_record_was_trained_once(self) -> None:
        model = read_model(Tallied(batches=self.batches), self.model_dir)
        assert model.step == self.batches // 2, "each step is one batch of each"
        assert model.tally == dict.fromkeys(range(8 * self.batches), 1.0)


class LaunchedServedRanks(LaunchedRanks):
    """Two ranks whose rows are on a parameter server."""

    SHAPE = ("--mode", "sync", "--num-ps", "1", "--num-workers", "2")
    members = SERVED_RANKS


class LoopedFleet(FleetProcesses):
    """Each process in a loop that starts it again until it exits with 0."""

    def __init__(self, folder: Path, batches: int, *flags: str) -> None:
        found = ("--discovery.kind", "files", "--discovery.folder", str(folder / "registry"))
        super().__init__(folder, batches, *found, "--cluster.port", "0", *flags)
        self._closing = threading.Event()
        self.exits: dict[Place, list[int]] = {place: [] for place in MEMBERS}
        self.away: set[Place] = set()
        """Who is not started again."""
        self.returning: set[Place] = set()
        """Who is started again though it exited with 0."""
        self._threads = [threading.Thread(target=self._loop, args=(place,)) for place in MEMBERS]
        for thread in self._threads:
            thread.start()

    def member(self, place: Place) -> list[str]:
        """Return the command of one member."""
        role, index = place
        return self.command(
            "--cluster.listen", self.host(place), "--cluster.role", role, "--cluster.index", str(index)
        )

    def host(self, place: Place) -> str:  # noqa: ARG002
        return "127.0.0.1"

    def _loop(self, place: Place) -> None:
        while not self._closing.is_set():
            process = self.start(self.member(place))
            while process.poll() is None:
                if self._closing.wait(0.1):
                    process.kill()
            self.exits[place].append(process.wait())
            done = self.exits[place][-1] == 0 and place not in self.returning
            if done or place in self.away:
                return

    def finish(self) -> None:
        """Wait until every process has exited with 0, but for those who stay away."""
        for thread in self._threads:
            self.wait_for(partial(_has_ended, thread), "all to end", 4 * LIMIT)
        done = [place for place, exits in self.exits.items() if exits[-1:] == [0] or place in self.away]
        assert done == MEMBERS, f"{self.exits}\n{self.output[-5000:]}"

    def close(self) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join()
        super().close()


def _has_ended(thread: threading.Thread) -> bool:
    return not thread.is_alive()


class QueuedFleet(LoopedFleet):
    """Whose data hands out work: a queue of files."""

    def __init__(self, folder: Path, batches: int, *flags: str) -> None:
        files = folder / "data"
        files.mkdir()
        self.data = TalliedQueue(batches=batches, folder=str(files))
        self.data.write()
        super().__init__(folder, batches, *flags)

    @property
    def task(self) -> list[str]:
        return ["runtime.fleets:TalliedQueue", "--set", f"folder={self.data.folder}"]

    def times_trained(self) -> dict[int, float]:
        """Return how often each record was trained."""
        return read_model(self.data, self.model_dir).tally


class WiredFleet(LoopedFleet):
    """Each process on a host of its own, whose cable can be pulled: network namespaces around one switch."""

    def __init__(self, folder: Path, batches: int, *flags: str) -> None:
        self._network = Network(len(MEMBERS))
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        super().__init__(folder, batches, "--security.token-file", str(token), *flags)

    def host(self, place: Place) -> str:
        return self._network.address(MEMBERS.index(place))

    def member(self, place: Place) -> list[str]:
        _, _, *words = super().member(place)  # less -m monolith
        return ["-c", ON_ANOTHER_HOST, self._network.namespace(MEMBERS.index(place)), *words]

    def part(self, place: Place, seconds: float) -> None:
        """Pull the cable of a member for so long."""
        self._network.plug(MEMBERS.index(place), False)
        time.sleep(seconds)
        self._network.plug(MEMBERS.index(place), True)

    def close(self) -> None:
        super().close()
        self._network.close()
