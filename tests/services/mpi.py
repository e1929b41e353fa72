"""A real mpirun, where there is one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from services import warm
from services.servers import need

LONGEST_S = 120.0


def need_mpirun() -> None:
    """Skip a test that needs mpirun where there is none; in CI, fail it."""
    need(shutil.which("mpirun") is not None, "mpirun")


def mpirun(ranks: int, words: list[str], *, cwd: Path) -> tuple[int, str]:
    """Run a program in so many ranks, each a warm process; return mpirun's status and what all have said.

    Raises:
        TimeoutExpired: It has not ended.
    """
    options = ["--oversubscribe", "--bind-to", "none"]
    if os.geteuid() == 0:
        options.append("--allow-run-as-root")
    log = cwd / "mpirun.log"
    with log.open("w") as output:
        done = subprocess.run(
            ["mpirun", *options, "-n", str(ranks), str(warm.server().interpreter), *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            timeout=LONGEST_S,
            check=False,
        )
    return done.returncode, log.read_text()
