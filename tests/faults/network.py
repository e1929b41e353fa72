"""Hosts in one machine: network namespaces around a switch, with cables that can be pulled."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import ExitStack

ON_ANOTHER_HOST = """
import ctypes, os, sys
namespace, *words = sys.argv[1:]
with open(namespace) as file:
    if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)
sys.argv[1:] = words
from monolith.cli.main import main
sys.exit(main(words))
"""
"""A program that moves to a namespace, its first argument, and is `monolith` with the others there."""


def why_no_network() -> str | None:
    """Return why there cannot be hosts here; None where there can."""
    if missing := [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]:
        return f"needs {', '.join(missing)}"
    tried = subprocess.run(
        ["unshare", "-n", "ip", "link", "add", "name", "one", "type", "bridge"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"network namespaces cannot be made: {tried.stderr.strip()}" if tried.returncode else None


class Network:
    """So many hosts. A namespace lives as long as a process in it, and that one as long as this object."""

    def __init__(self, hosts: int) -> None:
        self._open = ExitStack()
        self._switch = self._new_namespace()
        self._run(self._switch, "link", "add", "switch", "type", "bridge")
        self._run(self._switch, "link", "set", "switch", "up")
        self._hosts = [self._new_namespace() for _ in range(hosts)]
        for number, host in enumerate(self._hosts):
            port = f"port{number}"
            self._run(self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth", "netns", host)
            self._run(self._switch, "link", "set", port, "master", "switch")
            self._run(host, "addr", "add", f"{self.address(number)}/24", "dev", "eth")
            for pid, link in ((self._switch, port), (host, "eth"), (host, "lo")):
                self._run(pid, "link", "set", link, "up")

    def address(self, host: int) -> str:
        return f"10.78.0.{host + 1}"

    def namespace(self, host: int) -> str:
        """Return the file by which a process enters."""
        return f"/proc/{self._hosts[host]}/ns/net"

    def plug(self, host: int, into: bool) -> None:
        """Plug the cable of a host in, or pull it: what is on its way is lost, no connection is closed."""
        self._run(self._switch, "link", "set", f"port{host}", "up" if into else "down")

    def close(self) -> None:
        self._open.close()

    def _new_namespace(self) -> str:
        holder = subprocess.Popen(
            ["unshare", "-n", "sh", "-c", "echo there; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert holder.stdin is not None
        assert holder.stdout is not None
        self._open.callback(holder.wait)
        self._open.callback(holder.stdout.close)
        self._open.callback(holder.stdin.close)
        assert holder.stdout.readline() == b"there\n"
        return str(holder.pid)

    def _run(self, pid: str, *words: str) -> None:
        subprocess.run(["nsenter", "-t", pid, "-n", "ip", *words], check=True)
