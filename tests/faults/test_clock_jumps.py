"""The clock of a machine is set a day ahead and back, under `monolith train` with saves by seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from faults.fleet_processes import TESTS, FleetProcesses

LIBRARY = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(LIBRARY is None, reason="libfaketime is not installed: apt install faketime"),
]


class JumpyRun(FleetProcesses):
    """A run of one process whose wall clock, and only that, is as far off as a file says."""

    SHAPE = ()
    members = []  # noqa: RUF012

    def __init__(self, folder: Path, batches: int) -> None:
        super().__init__(folder, batches)
        self._file = folder / "offset"
        self.set_clock("+0")
        self.process = subprocess.Popen(
            [sys.executable, *self.command("--train.save.secs", "0.5", "--train.save.steps", "null")],
            cwd=TESTS,
            env={
                **os.environ,
                "PYTHONPATH": str(TESTS),
                "OMP_NUM_THREADS": "1",
                "LD_PRELOAD": str(LIBRARY),
                "FAKETIME_TIMESTAMP_FILE": str(self._file),
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
                "FAKETIME_CACHE_DURATION": "1",
                "DONT_FAKE_MONOTONIC": "1",
            },
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    @property
    def task(self) -> list[str]:
        return ["train.fleets:TalliedSlowly"]

    def command(self, *more: str) -> list[str]:
        words = super().command(*more)
        at = words.index("--save-steps")
        return [*words[:at], *words[at + 2 :]]

    def set_clock(self, offset: str) -> None:
        self._file.write_text(f"{offset}\n")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        super().close()


def test_a_run_and_its_saves_continue_when_the_wall_clock_is_set_a_day_ahead_and_back(tmp_path: Path) -> None:
    with JumpyRun(tmp_path, 1000) as run:
        run.wait_for_another_checkpoint()
        run.set_clock("+1d")
        run.wait_for(lambda: "jumped ahead by 86400 s" in run.output, "a word about the jump")
        run.wait_for_another_checkpoint()
        run.set_clock("+0")
        run.wait_for(lambda: "jumped back by 86400 s" in run.output, "a word about the jump back")
        for _ in range(2):
            run.wait_for_another_checkpoint()
        run.wait_for(lambda: run.process.poll() is not None, "the end")
        assert run.process.returncode == 0
        run.check_every_record_was_trained_once()
    assert run_output(tmp_path).count("jumped") == 2


def run_output(folder: Path) -> str:
    return (folder / "output.txt").read_text()
