"""Two hosts in one machine: what `test_partition.py` runs inside a network namespace of its own.

The first host is this namespace: ZooKeeper, and one process of a job. The second is another namespace
with the other process, joined by a cable that can be pulled. Prints what was seen, one JSON object per line.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from services.zookeeper import ZooKeeper

from monolith.cluster import NodeAliveChecker, ZooKeeperConfig, ZooKeeperDiscovery

HERE, THERE = "10.77.0.1", "10.77.0.2"
JOB = "partition"


def say(**seen: Any) -> None:
    sys.stdout.write(json.dumps(seen) + "\n")
    sys.stdout.flush()


def run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def join(servers: str) -> ZooKeeperDiscovery:
    return ZooKeeperDiscovery(JOB, ZooKeeperConfig(servers=servers, session_timeout=timedelta(seconds=2)))


def eventually(check: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 40
    while not check():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.02)


def second_host(servers: str) -> None:
    """Register as worker 1, and tell every change that is seen, until the input ends."""
    import socket

    with socket.create_server((THERE, 0)) as server, join(servers) as discovery:
        discovery.register("worker", 1, f"{THERE}:{server.getsockname()[1]}")
        discovery.watch("worker", lambda addresses: say(there=addresses))
        sys.stdin.read()


def first_host(folder: Path) -> None:
    run("ip", "link", "set", "lo", "up")
    holder = subprocess.Popen(["unshare", "-n", "cat"], stdin=subprocess.PIPE)
    own, others = Path("/proc/self/ns/net"), Path(f"/proc/{holder.pid}/ns/net")
    eventually(lambda: others.readlink() != own.readlink(), "there is a second host")
    inside = ["nsenter", "-t", str(holder.pid), "-n"]
    run("ip", "link", "add", "here", "type", "veth", "peer", "name", "there")
    run("ip", "link", "set", "there", "netns", str(holder.pid))
    run("ip", "addr", "add", f"{HERE}/24", "dev", "here")
    run("ip", "link", "set", "here", "up")
    run(*inside, "ip", "addr", "add", f"{THERE}/24", "dev", "there")
    run(*inside, "ip", "link", "set", "there", "up")

    server = ZooKeeper(folder)
    settings = folder / "zoo.cfg"
    settings.write_text(settings.read_text().replace("Address=127.0.0.1", "Address=0.0.0.0"))
    server.start()
    other = subprocess.Popen(
        [*inside, sys.executable, __file__, "second", f"{HERE}:{server.port}"], stdin=subprocess.PIPE
    )
    discovery = join(server.address)
    try:
        discovery.register("worker", 0, f"{HERE}:1")
        eventually(lambda: discovery.query("worker").keys() == {0, 1}, "both are there")
        address = discovery.query("worker")[1]
        second = timedelta(seconds=1)
        say(
            step="joined",
            here=sorted(discovery.query("worker")),
            dead=NodeAliveChecker([address], second).get_dead_nodes(),
        )

        run("ip", "link", "set", "here", "down")
        eventually(lambda: 1 not in discovery.query("worker"), "the other is gone")
        discovery.register("worker", 2, f"{HERE}:2")
        say(
            step="parted",
            here=sorted(discovery.query("worker")),
            dead=len(NodeAliveChecker([address], second).get_dead_nodes()),
        )

        run("ip", "link", "set", "here", "up")
        eventually(lambda: 1 in discovery.query("worker"), "the other is back")
        say(
            step="healed",
            here=sorted(discovery.query("worker")),
            same=discovery.query("worker")[1] == address,
            dead=NodeAliveChecker([address], second).get_dead_nodes(),
        )
        time.sleep(1.0)  # for the other's last word
    finally:
        discovery.close()
        for process in (other, holder):
            process.stdin.close()
            process.wait(30)
        server.stop()


if __name__ == "__main__":
    if sys.argv[1] == "second":
        second_host(sys.argv[2])
    else:
        first_host(Path(sys.argv[2]))
