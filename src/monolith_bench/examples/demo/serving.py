"""The process that the demo serves from: `monolith serve`, which also ends with its parent process.

python -m monolith_bench.examples.demo.serving clicks=DIR --follow URL ...      # as `monolith serve` takes it
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from monolith.errors import UnavailableError

MODEL = "clicks"
GRACE_SECONDS = 20.0


class ServingProcess:
    """A process that serves an export, and follows the trainer. One thread uses it.

    Args:
        folder: Of exported versions.
        follow: The channel of the trainer.
        log: A file that its log is added to.
    """

    def __init__(self, folder: Path, follow: str, log: Path) -> None:
        self._log = log
        words = [f"{MODEL}={folder}", "--follow", follow, "--http-port", "0", "--grpc-port", "0"]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, *words, "--predict-threads", "1"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def wait_until_ready(self) -> str:
        """Return its address, as soon as it answers there.

        Raises:
            UnavailableError: It ended first.
        """
        assert self._process.stdout is not None
        http = ""
        while line := self._process.stdout.readline():
            word, _, rest = line.partition(" ")
            if word == "http":
                http = rest.split()[0]
            if word == "ask":  # its last line
                return http
        status = self._process.wait()
        said = self._log.read_text(errors="replace").strip().rpartition("\n")[2]
        raise UnavailableError(
            f"demo: the process that serves ended with status {status}: {said or 'it said nothing'}. "
            f"Its log is {self._log}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def main(arguments: list[str]) -> int:
    """Serve until SIGTERM, or until the process that started this one is gone."""
    from monolith.cli.main import main as run_command

    threading.Thread(target=end_with_parent, name="parent", daemon=True).start()
    return run_command(["serve", *arguments])


def end_with_parent() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
