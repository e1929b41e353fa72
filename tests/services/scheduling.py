"""How files of tests are given to workers: whole, the slow ones first, and all that use Ray to one of them.

A Ray takes ten seconds of a core to start and some of it for as long as it runs, so one is enough.
"""

from __future__ import annotations

from typing import Any

import pytest

RAY_FILES = (
    "tests/cluster/launch/test_ray.py",
    "tests/cli/test_launching.py",
    "tests/contracts/test_discovery.py",
    "tests/cluster/test_ray_discovery.py",
    "tests/cluster/test_ray_connection.py",
)


def goes_with(nodeid: str) -> str:
    """Return what a test shares its worker with: its file, or what uses the same server."""
    path = nodeid.partition("::")[0]
    return "Ray" if path in RAY_FILES else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return goes_with(nodeid)

    return Scheduling(config, log)
