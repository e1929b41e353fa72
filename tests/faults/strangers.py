"""A stranger: another user of this machine who can reach every port of it, and was told nothing.

`Stranger` runs pyarrow's own client in a process of its own, as the user nobody where the tests are root.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

NOBODY = 65534
ANSWER_WITHIN_S = 120.0

PROGRAM = """
import json, os, sys
from pyarrow import flight
if sys.argv[1] != "me":  # now that Python, which may be in a folder of root's, is loaded
    os.setgroups([]), os.setgid(int(sys.argv[1])), os.setuid(int(sys.argv[1]))

def ask(address, kind, name, body):
    client = flight.FlightClient(f"grpc+tcp://{address}")
    if kind == "call":
        (result,) = client.do_action(flight.Action(name, body.encode()))
        return json.loads(result.body.to_pybytes())
    if kind == "large":
        (result,) = client.do_action(flight.Action(name, b"x" * int(body)))
        return json.loads(result.body.to_pybytes())
    if kind == "fetch":
        reader = client.do_get(flight.Ticket(body.encode()))
        answer = (reader.schema.metadata or {}).get(b"monolith.answer")
        return json.loads(answer) if answer else {"rows": reader.read_all().to_pylist()}
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b""))
    return {"columns": reader.schema.names}

for line in sys.stdin:
    try:
        said = ask(*json.loads(line))
    except Exception as error:
        said = {"refused": type(error).__name__, "message": str(error)}
    print(json.dumps(said, default=str), flush=True)
"""


class Stranger:
    """Another user of the machine, until it is closed. Every question has a connection of its own."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(NOBODY) if is_root() else "me"],
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={},
        )

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def call(self, address: str, name: str, **body: Any) -> dict[str, Any]:
        return self._ask(address, "call", name, json.dumps(body))

    def send(self, address: str, size: int) -> dict[str, Any]:
        """Send a call of so many bytes."""
        return self._ask(address, "large", "hello", str(size))

    def fetch(self, address: str, **ticket: Any) -> dict[str, Any]:
        return self._ask(address, "fetch", "", json.dumps(ticket))

    def stream(self, address: str) -> dict[str, Any]:
        return self._ask(address, "stream", "", "")

    def may_read(self, path: Path) -> bool:
        """Whether it can read a file of ours by itself. Only where it is another user."""
        done = subprocess.run(
            ["cat", str(path)], user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, check=False
        )
        return done.returncode == 0

    def _ask(self, *arguments: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], ANSWER_WITHIN_S)[0]:
            raise TimeoutError(f"no answer after {ANSWER_WITHIN_S:g} s: {arguments}")
        said: dict[str, Any] = json.loads(self._process.stdout.readline())
        return said


def is_root() -> bool:
    return os.geteuid() == 0
