"""Two hosts that lose sight of each other, and find each other again."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from services.servers import need
from services.zookeeper import JARS


def why_not() -> str | None:
    """Return why there cannot be two hosts here; None where there can."""
    missing = [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    tried = subprocess.run(
        ["unshare", "-n", "ip", "link", "add", "name", "one", "type", "veth", "peer", "name", "two"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"network namespaces cannot be made: {tried.stderr.strip()}" if tried.returncode else None


def test_a_partition_removes_a_host_and_its_end_restores_it(tmp_path: Path) -> None:
    need((JARS / "zookeeper.jar").exists(), "ZooKeeper")
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    done = subprocess.run(
        [
            "unshare",
            "-n",
            sys.executable,
            str(Path(__file__).with_name("two_hosts.py")),
            "first",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line for line in lines if "step" in line] == [
        {"step": "joined", "here": [0, 1], "dead": []},
        {"step": "parted", "here": [0, 2], "dead": 1},
        {"step": "healed", "here": [0, 1, 2], "same": True, "dead": []},
    ]
    there = [sorted(line["there"]) for line in lines if "there" in line]
    assert ["0", "1"] in there
    assert ["0", "1", "2"] in there, "the other host learned what it had missed"
    assert [] not in there, "and never took its own blindness for the end of all others"
