"""A real Ray: a head as a process of its own, on free ports, with files and a token of its own."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from services.servers import free_port, need, wait_until

CPUS = 8
"""That Ray believes in: members of a test wait for each other, not for cores."""


def need_ray() -> None:
    """Skip a test that needs Ray where there is none; in CI, fail it."""
    need(importlib.util.find_spec("ray") is not None, "Ray")


class RayCluster:
    """One head. Use it as `ray_cluster.address`, or by Ray's client protocol `ray_cluster.client_address`."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ray-"))  # Ray's sockets need a short path
        token = self.folder / "token"
        token.write_text(secrets.token_hex(32))
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        """For processes that want to connect."""
        self.port, self.client_port = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def client_address(self) -> str:
        return f"ray://127.0.0.1:{self.client_port}"

    def start(self) -> None:
        """Start the head, and wait until it answers."""
        ray = Path(sys.executable).with_name("ray")
        log = self.folder / "log.txt"
        # Should this process be killed, nobody is left to stop Ray: the kernel then does.
        guard = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [
                    *guard,
                    *(str(ray), "start", "--head", "--block", f"--port={self.port}", f"--num-cpus={CPUS}"),
                    *(f"--ray-client-server-port={self.client_port}", f"--temp-dir={self.folder}"),
                    *("--dashboard-agent-listen-port=0", "--include-dashboard=false"),
                    *("--disable-usage-stats", f"--object-store-memory={80 << 20}"),
                ],
                # Ray starts workers at niceness 15: on a busy machine they would wait for all other tests.
                env={**os.environ, **self.environment, "RAY_worker_niceness": "0"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            wait_until(self._ready, f"Ray on {self.address} answers", 120)
        except TimeoutError as cause:
            self.stop()
            raise TimeoutError(f"{cause}; it said:\n{log.read_text()[-2000:]}") from None

    def stop(self) -> None:
        """End the head and all that it started, which are a process group; then remove its files."""
        process, self._process = self._process, None
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)  # asked politely, Ray takes seconds and forgets its agents
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise TimeoutError(f"Ray ended with {self._process.returncode} instead of answering")
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0
