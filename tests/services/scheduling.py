"""How files of tests are given to workers: whole, slow ones first, and all that use a server to one of them.

A Ray, or a Kafka with its ZooKeeper, takes ten seconds of a core to start and some of it for as long as it
runs, so one is enough.
"""

from __future__ import annotations

from typing import Any

import pytest

TOGETHER = {
    "Ray": (  # and a ZooKeeper
        "tests/cluster/launch/test_ray.py",
        "tests/runtime/test_launch.py::test_a_run_on_ray_finds_itself_and_is_guarded_by_a_token",
        "tests/runtime/test_launch.py::test_discovery_through_ray_needs_a_name_and_meets_under_it",
        "tests/runtime/test_rank_processes.py::test_a_rank_on_ray_that_was_killed_is_restarted_and_all_resume",
        "tests/serve/test_ray_serve.py",
        "tests/contracts/test_discovery.py",
        "tests/cluster/test_ray_discovery.py",
        "tests/cluster/test_ray_connection.py",
        "tests/cluster/test_zookeeper.py",
        "tests/cluster/test_discovery_url.py",
        "tests/cli/test_doctor_cluster.py",
    ),
    "Kafka": (  # and its ZooKeeper
        "tests/contracts/test_source.py",
        "tests/contracts/test_delta_channel.py",
        "tests/sync/test_kafka_writer.py",
        "tests/runtime/test_rebalancing.py",
        "tests/data/test_kafka.py",
        "tests/faults/test_kill_kafka.py",
        "tests/end_to_end/test_joined_topics.py",
        "tests/train/hooks/test_installed.py",
        "tests/train/hooks/test_kafka_metrics.py",
        "tests/docs/test_kafka_guide.py",
    ),
}
"""The files that use a server; of a long file only the tests that do, so that other workers take the rest."""


def goes_with(nodeid: str) -> str:
    """Return what a test shares its worker with: its file, or what uses the same server."""
    path = nodeid.partition("::")[0]
    test = nodeid.partition("[")[0]
    return next((server for server, users in TOGETHER.items() if path in users or test in users), path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return goes_with(nodeid)

    return Scheduling(config, log)
