"""A stranger: another user of this machine who can reach every port of it, and was told nothing.

`Stranger` runs pyarrow's own client in a process of its own, as the user nobody where the tests are root.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

NOBODY = 65534

PROGRAM = """
import json, os, sys
from pyarrow import flight
address, kind, name, body, user = sys.argv[1:]
if user != "me":  # now that Python, which may be in a folder of root's, is loaded
    os.setgroups([]), os.setgid(int(user)), os.setuid(int(user))
client = flight.FlightClient(f"grpc+tcp://{address}")
said = {}
try:
    if kind == "call":
        (result,) = client.do_action(flight.Action(name, body.encode()))
        said = json.loads(result.body.to_pybytes())
    elif kind == "large":
        (result,) = client.do_action(flight.Action(name, b"x" * int(body)))
        said = json.loads(result.body.to_pybytes())
    elif kind == "fetch":
        reader = client.do_get(flight.Ticket(body.encode()))
        answer = (reader.schema.metadata or {}).get(b"monolith.answer")
        said = json.loads(answer) if answer else {"rows": reader.read_all().to_pylist()}
    else:
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b""))
        said = {"columns": reader.schema.names}
except Exception as error:
    said = {"refused": type(error).__name__, "message": str(error)}
print(json.dumps(said))
"""


class Stranger:
    """Another user of the machine."""

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
        user = str(NOBODY) if is_root() else "me"
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *arguments, user],
            cwd="/",
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={},
        )
        assert done.returncode == 0, done.stderr
        said: dict[str, Any] = json.loads(done.stdout)
        return said


def is_root() -> bool:
    return os.geteuid() == 0
