"""The clock of a machine is set a day ahead and back, under `monolith train` with saves by seconds.

Run as a script, this is the command with a wall clock that is as far off as a file says. libfaketime would do
the same below Python, but its `clock_nanosleep` refuses what `time.sleep` asks of it.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

OFFSET = "OFFSET_FILE"


def main() -> int:
    real, file = time.time, Path(os.environ[OFFSET])
    time.time = lambda: real() + float(file.read_text() or 0)  # before anything of ours is imported
    from monolith.cli.main import main as command

    return command(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())

import pytest  # noqa: E402
from faults.fleet_processes import TESTS, FleetProcesses  # noqa: E402
from runtime.test_service import START, Caller, Clock, failure  # noqa: E402

from monolith import concurrency  # noqa: E402
from monolith.data.files.work_queue import LocalFileQueue  # noqa: E402
from monolith.data.service.job import DataJobConfig, Job  # noqa: E402
from monolith.runtime.service import CoordinationService  # noqa: E402


class JumpyRun(FleetProcesses):
    """A run of one process, and its wall clock."""

    SHAPE = ()
    members = []  # noqa: RUF012

    def __init__(self, folder: Path, batches: int) -> None:
        super().__init__(folder, batches)
        self._file = folder / "offset"
        self.set_clock(0)
        words = self.command("--save-secs", "0.3")[2:]  # less -m monolith
        at = words.index("--save-steps")
        del words[at : at + 2]
        self.process = subprocess.Popen(
            [sys.executable, __file__, *words],
            cwd=TESTS,
            env={**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", OFFSET: str(self._file)},
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    @property
    def task(self) -> list[str]:
        return ["runtime.fleets:TalliedSlowly"]

    def set_clock(self, offset: float) -> None:
        aside = self._file.with_suffix(".new")
        aside.write_text(str(offset))
        aside.rename(self._file)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        super().close()


@pytest.mark.soak
def test_a_run_and_its_saves_continue_when_the_wall_clock_is_set_a_day_ahead_and_back(tmp_path: Path) -> None:
    with JumpyRun(tmp_path, 800) as run:
        run.wait_for_another_checkpoint()
        run.set_clock(86_400)
        run.wait_for(lambda: "jumped ahead by 86400 s" in run.output, "a word about the jump")
        run.wait_for_another_checkpoint()
        run.set_clock(0)
        run.wait_for(lambda: "jumped back by 86400 s" in run.output, "a word about the jump back")
        for _ in range(2):
            run.wait_for_another_checkpoint()
        run.wait_for(lambda: run.process.poll() is not None, "the end")
        assert run.process.returncode == 0, run.output[-5000:]
        assert run.output.count("jumped") == 2
        run.check_every_record_was_trained_once()


# Heartbeats and leases: a wall clock that jumps ends none and keeps none alive. Those that are files, of a
# queue or a registry, have tests of their own.

LASTS = 10.0


class Workers:
    """The heartbeats of a fleet's workers, with the service that hears them."""

    made_by = CoordinationService

    def __init__(self, folder: Path, timer: Clock) -> None:  # noqa: ARG002
        self._timer = timer
        self._call = Caller(CoordinationService(2, lost_after=timedelta(seconds=LASTS), clock=timer))
        self._call("begin", run="r", num_workers=2)
        self._call("open", run="r", start=START)
        self._call.join(1)

    def renew(self) -> None:
        self._call.news(1)

    def lost_within(self, seconds: float) -> bool:
        return failure(self._call, self._timer, seconds, tick=2) is not None


class Splits:
    """The lease of a data worker on a split, with the dispatcher's job."""

    made_by = Job

    def __init__(self, folder: Path, timer: Clock) -> None:
        self._timer = timer
        config = DataJobConfig(splits=("a",), lease=timedelta(seconds=LASTS))
        self._job = Job(config, str(folder), clock=timer)
        self._lease = self._job.lease("w")

    def renew(self) -> None:
        assert self._lease is not None
        self._job.renew("w", [self._lease.lease])

    def lost_within(self, seconds: float) -> bool:
        self._timer.now += seconds
        return self._job.lease("other") is not None


class Files:
    """The lease of a thread on a file, with a queue in its process."""

    made_by = LocalFileQueue

    def __init__(self, folder: Path, timer: Clock) -> None:  # noqa: ARG002
        self._timer = timer
        self._queue = LocalFileQueue(["a"], lease=timedelta(seconds=LASTS), clock=timer)
        self._lease = self._queue.take("w")

    def renew(self) -> None:
        assert self._lease is not None
        self._lease = self._queue.renew(self._lease)

    def lost_within(self, seconds: float) -> bool:
        self._timer.now += seconds
        return self._queue.take("other") is not None


@pytest.mark.parametrize("jump", [86_400.0, -86_400.0])
@pytest.mark.parametrize("kind", [Workers, Splits, Files])
def test_the_monotonic_clock_alone_ends_heartbeats_and_leases(
    kind: Any, jump: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert inspect.signature(kind.made_by).parameters["clock"].default is concurrency.monotonic
    timer, real, offset = Clock(), time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: real() + offset)
    held = kind(tmp_path, timer)
    offset = jump
    assert not held.lost_within(4)
    held.renew()
    assert not held.lost_within(8), "the jump has ended nothing"
    offset = 0.0
    assert held.lost_within(4), "the jump back keeps nothing alive"
