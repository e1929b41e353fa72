"""Where processes listen, as the kernel says."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

LISTENS = "0A"


def listening(process: int) -> set[tuple[str, int]]:
    """Return address and port of every TCP socket on which a process listens."""
    sockets = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):  # it was closed meanwhile
            sockets.add(str(descriptor.readlink()))
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and f"socket:[{words[9]}]" in sockets:
                host, port = words[1].split(":")
                numbers = bytes.fromhex(host)
                # The kernel prints each four bytes as one number of the machine, which is little-endian.
                packed = b"".join(numbers[at : at + 4][::-1] for at in range(0, len(numbers), 4))
                address = socket.inet_ntop(family, packed).removeprefix("::ffff:")  # IPv4 all the same
                found.add((address, int(port, 16)))
    return found


def is_open(host: str, port: int) -> bool:
    """Whether a connection to an address is accepted."""
    with suppress(OSError), socket.create_connection((host, port), 5):
        return True
    return False
