"""The clock of a machine is set a day ahead and back, under `monolith train` with saves by seconds.

Run as a script, this is the command with a wall clock that is as far off as a file says. libfaketime would do
the same below Python, but its `clock_nanosleep` refuses what `time.sleep` asks of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

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
        return ["train.fleets:TalliedSlowly"]

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
