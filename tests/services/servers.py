"""Servers as real processes: started on a free port, killed, started again, and always stopped.

A server keeps its files in one folder and its port for life, so that what comes back after a kill is the same
server. Only processes that were started here are ever signalled, by their process id.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FREE_PORTS = (20_000, 32_000)
"""Below the range in which Linux chooses ports, /proc/sys/net/ipv4/ip_local_port_range."""
START_TIMEOUT_S = 60.0
"""A Java server takes two seconds on an idle machine, and many more on one where others build."""


def need(found: bool, what: str) -> None:
    """Skip a test whose server is not installed; on CI, where it must be, fail it."""
    if found:
        return
    message = f"{what} is not installed; run `make services`"
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


def free_port() -> int:
    """Return a port of this machine that nobody listens on.

    Not one of those that the kernel gives to whoever asks for any: somebody may have asked before the server
    that is meant to have it is up.
    """
    while True:
        port = random.randrange(*FREE_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_until(ready: Callable[[], bool], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
    """Ask until the answer is yes; fail when it is still no after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.05)


class JavaServer:
    """One server in a folder of its own. What it says goes to `log`."""

    name = "server"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = free_port()
        self.log = folder / "log.txt"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """Of the running process; None when there is none."""
        return None if self._process is None else self._process.pid

    def arguments(self) -> list[str]:
        """Return what follows `java` and its settings: the class path, the class and its arguments."""
        raise NotImplementedError

    def ready(self) -> bool:
        """Say whether the server answers."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the process and wait until it answers."""
        assert self._process is None, f"{self.name} runs already"
        java = ["java", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        # Should this process be killed, nobody is left to stop the server: the kernel then does.
        guard = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*guard, *java, *self.arguments()], stdout=log, stderr=log, cwd=self.folder
            )
        try:
            wait_until(self._alive_and_ready, f"{self.name} on {self.address} answers")
        except TimeoutError as cause:
            self.kill()
            raise TimeoutError(f"{cause}; it said:\n{self.log.read_text()[-2000:]}") from None

    def kill(self) -> None:
        """End the process as a power cut would (SIGKILL)."""
        self._end(lambda process: process.kill())

    def stop(self) -> None:
        """Ask the process to end (SIGTERM), and kill it when it does not. Without one, do nothing."""
        self._end(lambda process: process.terminate())

    def restart(self) -> None:
        """Start again after `kill` or `stop`, on the same files and port."""
        self.start()

    def _alive_and_ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise TimeoutError(f"{self.name} ended with {self._process.returncode} instead of answering")
        return self.ready()

    def _end(self, signal: Callable[[subprocess.Popen[bytes]], None]) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        signal(process)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
