"""Parameter servers for tests: in this process, in one of their own, and a wire that can be cut.

python -m store.fleets PORT NUMBER COUNT
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal

import torch
from contracts.stores import serve
from services import warm
from torch import nn

from monolith.store import DenseShard, LocalStore, ParameterServer, TableIds
from monolith.table import Segment, TableConfig

TESTS = Path(__file__).parents[1]
CONFIGS = {"item": TableConfig(name="item", segments=(Segment(dim=2, learning_rate=1.0),))}
"""Rows of two floats that begin at zero and move by the gradient."""

__all__ = ["CONFIGS", "Wire", "dense", "keys", "serve", "start", "stop", "wait_until"]


def keys(*ids: int) -> TableIds:
    return TableIds(torch.tensor(ids, dtype=torch.int64), torch.tensor([len(ids)]))


def dense() -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    """Three weights that begin at zero and move by the gradient."""
    weights = {name: nn.Parameter(torch.zeros(size)) for name, size in (("a", 4), ("b", 2), ("c", 1))}
    return weights, torch.optim.SGD(weights.values(), lr=1.0)


def start(stack: ExitStack, port: int, number: int, count: int) -> tuple[warm.Popen, str]:
    """Start a server in a process of its own, which ends with the stack; return it and its address."""
    process = warm.Popen(
        ["-m", "store.fleets", str(port), str(number), str(count)],
        stdout=warm.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdout is not None
    stack.callback(process.stdout.close)
    return process, process.stdout.readline().strip()


def stop(process: warm.Popen) -> None:
    """Stop a process; return when none of its threads runs any more."""
    process.send_signal(signal.SIGSTOP)
    tasks = Path(f"/proc/{process.pid}/task")
    assert wait_until(
        lambda: all(
            (one / "stat").read_text().rpartition(")")[2].split()[0] == "T" for one in tasks.iterdir()
        )
    )


def wait_until(true: Callable[[], object], seconds: float = 60.0) -> bool:
    """Look again and again whether something has happened in another thread or process."""
    give_up = time.monotonic() + seconds
    while not true():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.005)
    return True


class Wire:
    """Passes bytes on between callers and a server, until it is cut."""

    def __init__(self, server: str) -> None:
        host, _, port = server.rpartition(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        self._lock = threading.Lock()  # guards _budget
        self._budget: dict[str, int | None] = {"up": None, "down": None}
        self.seen: list[object] = []
        """Of each connection that was made: who made it."""
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_after(self, direction: Literal["up", "down"], num_bytes: int) -> None:
        """Break all connections, once, when so many bytes more have come for the server, or from it.

        The last of them are not passed on.
        """
        with self._lock:
            self._budget[direction] = num_bytes

    def cut(self) -> None:
        """Break all connections. New ones can be made."""
        ends, self._ends = self._ends, []
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # or who is about to be let in still would be
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, peer = self._listener.accept()
                self.seen.append(peer)
                far = socket.create_connection(self._server)
                self._ends += [near, far]
                for one, other, way in ((near, far, "up"), (far, near, "down")):
                    threading.Thread(target=self._pass_on, args=(one, other, way), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, way: str) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if self._is_spent(way, len(data)):
                    self.cut()
                    return
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _is_spent(self, way: str, num_bytes: int) -> bool:
        with self._lock:
            left = self._budget[way]
            if left is not None:
                self._budget[way] = left - num_bytes if left > num_bytes else None
            return left is not None and left <= num_bytes


def main(port: int, number: int, count: int) -> None:
    store = LocalStore.from_configs(CONFIGS, threads=1)
    share = DenseShard(*dense(), (number, count))
    with ParameterServer([store], share, shard=(number, count), port=port) as server:
        sys.stdout.write(server.address + "\n")
        sys.stdout.flush()
        threading.Event().wait()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
