"""A real ZooKeeper, and as much of its protocol as the tests of others need.

Its sessions are short: an ephemeral node of a killed client is gone after two seconds.
"""

from __future__ import annotations

import socket
import struct
from pathlib import Path

from services.servers import JavaServer, need

JARS = Path("/usr/share/java")


class ZooKeeper(JavaServer):
    """One server, alone. Use it in a test as `zookeeper.address`."""

    name = "ZooKeeper"

    def __init__(self, folder: Path) -> None:
        need((JARS / "zookeeper.jar").exists(), self.name)
        super().__init__(folder)
        self.folder.joinpath("zoo.cfg").write_text(
            f"""\
dataDir={self.folder}/data
clientPort={self.port}
clientPortAddress=127.0.0.1
tickTime=500
minSessionTimeout=1000
maxClientCnxns=0
admin.enableServer=false
4lw.commands.whitelist=srvr,dump
"""
        )

    def arguments(self) -> list[str]:
        main = "org.apache.zookeeper.server.ZooKeeperServerMain"
        return ["-cp", f"{JARS}/*", main, str(self.folder / "zoo.cfg")]

    def ready(self) -> bool:
        return "Mode: standalone" in self.ask("srvr")

    def ask(self, word: str) -> str:
        """Return the answer to a four-letter word; empty when nobody listens."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), 5) as connection:
                connection.sendall(word.encode())
                with connection.makefile("rb") as answer:
                    return answer.read().decode()
        except OSError:
            return ""

    def ephemerals(self) -> set[str]:
        """Return the paths of all nodes that will go with their client's session."""
        lines = self.ask("dump").partition("Ephemerals")[2].splitlines()
        return {line.strip() for line in lines if line.strip().startswith("/")}

    def create(self, path: str, data: bytes) -> None:
        """Create a node that stays and that anybody may change. Its parent must be there."""
        with socket.create_connection(("127.0.0.1", self.port), 5) as connection:
            # Protocol 0, nothing seen yet, session of 5 s, a new session, no password.
            _call(connection, struct.pack(">iqiq", 0, 0, 5000, 0) + _text(b"\0" * 16))
            acl = struct.pack(">ii", 1, 0x1F) + _text(b"world") + _text(b"anyone")
            create = struct.pack(">ii", 1, 1) + _text(path.encode()) + _text(data) + acl
            answer = _call(connection, create + struct.pack(">i", 0))
            _, _, error = struct.unpack(">iqi", answer[:16])
            if error:
                raise RuntimeError(f"ZooKeeper refused to create {path}: error {error}")
            _send(connection, struct.pack(">ii", 2, -11))  # end the session


def _text(data: bytes) -> bytes:
    return struct.pack(">i", len(data)) + data


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(_text(message))


def _call(connection: socket.socket, message: bytes) -> bytes:
    _send(connection, message)
    (length,) = struct.unpack(">i", _receive(connection, 4))
    return _receive(connection, length)


def _receive(connection: socket.socket, length: int) -> bytes:
    received = b""
    while len(received) < length:
        part = connection.recv(length - len(received))
        if not part:
            raise ConnectionError("ZooKeeper hung up")
        received += part
    return received
