"""What is special about discovery through Ray; what all discoveries do is in contracts/test_discovery.py."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
from contracts.discoveries import eventually
from services.ray import RayCluster

from monolith.cluster.ray_discovery import RayDiscovery, RayDiscoveryConfig
from monolith.errors import ConfigError, MissingExtraError, UnavailableError

A, B = "192.168.0.1:1001", "192.168.0.2:1002"
QUICK = RayDiscoveryConfig(
    heartbeat=timedelta(seconds=0.2), expire_after=timedelta(seconds=1), settle=timedelta(seconds=1.5)
)
Join = Callable[..., RayDiscovery]
_jobs = itertools.count()


@pytest.fixture
def join(ray_cluster: RayCluster) -> Iterator[Join]:  # noqa: ARG001
    """Discoveries of one new job, closed in the end."""
    job = f"job-{os.getpid()}-{next(_jobs)}"
    with ExitStack() as stack:
        yield lambda config=QUICK: stack.enter_context(RayDiscovery(job, config))


def actor_of(discovery: RayDiscovery, config: RayDiscoveryConfig = QUICK) -> Any:
    import ray

    return ray.get_actor(f"discovery of {discovery.job}", namespace=config.namespace)


REGISTRANT = """
import sys, time
from monolith.cluster.ray_discovery import RayDiscovery, RayDiscoveryConfig
from datetime import timedelta

job, address, of = sys.argv[1:]
config = RayDiscoveryConfig(
    address=address, heartbeat=timedelta(seconds=0.2), expire_after=timedelta(seconds=1)
)
RayDiscovery(job, config).register("worker", 0, of)
time.sleep(100)
"""


def test_entries_of_a_killed_process_are_removed_and_watchers_are_told(
    ray_cluster: RayCluster, join: Join
) -> None:
    discovery = join()
    told: list[dict[int, str]] = []
    discovery.watch("worker", told.append)
    process = subprocess.Popen([sys.executable, "-c", REGISTRANT, discovery.job, ray_cluster.address, A])
    try:
        eventually(lambda: told and told[-1] == {0: A}, 60)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    eventually(lambda: told[-1] == {})
    assert discovery.query("worker") == {}


@pytest.mark.soak
def test_entries_of_the_living_outlast_the_lease(join: Join) -> None:
    one, other = join(), join()
    told: list[dict[int, str]] = []
    other.watch("worker", told.append)
    one.register("worker", 0, A)
    eventually(lambda: told and told[-1] == {0: A})
    count = len(told)
    threading.Event().wait(2.0)
    assert other.query("worker") == {0: A}
    assert len(told) == count


def test_when_the_actor_dies_all_register_again_and_watchers_see_no_gap(join: Join) -> None:
    import ray

    one, other = join(), join()
    one.register("worker", 0, A)
    other.register("worker", 1, B)
    registered = one.entries("worker")
    told: list[dict[int, str]] = []
    other.watch("worker", told.append)
    eventually(lambda: told and told[-1] == {0: A, 1: B})
    ray.kill(actor_of(one))
    eventually(lambda: one.entries("worker") == registered)
    one.register("worker", 2, B)
    eventually(lambda: told[-1] == {0: A, 1: B, 2: B})
    assert [addresses for addresses in told if len(addresses) > 1 and 0 not in addresses] == []
    assert {} not in told[1:]


@pytest.mark.soak
def test_an_actor_without_callers_ends(join: Join) -> None:
    brief = RayDiscoveryConfig(heartbeat=timedelta(seconds=0.2), linger=timedelta(seconds=1))
    discovery = join(brief)
    discovery.register("worker", 0, A)
    actor = actor_of(discovery)
    threading.Event().wait(2.0)
    assert actor_of(discovery) == actor  # this process keeps asking
    discovery.close()

    def ended() -> bool:
        try:
            actor_of(discovery)
        except ValueError:
            return True
        return False

    eventually(ended)


@pytest.mark.soak
def test_concurrent_processes_share_one_actor(join: Join) -> None:
    discoveries = [join() for _ in range(8)]
    threads = [
        threading.Thread(target=discovery.register, args=("worker", index, A))
        for index, discovery in enumerate(discoveries)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [discovery.query("worker") for discovery in discoveries] == [dict.fromkeys(range(8), A)] * 8


@pytest.mark.soak
def test_a_thousand_registrations_and_two_hundred_watchers_without_a_missed_change(join: Join) -> None:
    discoveries = [join(RayDiscoveryConfig()) for _ in range(200)]
    told: dict[int, dict[int, str]] = {}
    for number, discovery in enumerate(discoveries):
        discovery.watch("worker", functools.partial(told.__setitem__, number))
    want = {index: f"10.0.0.1:{index}" for index in range(1000)}
    for index, address in want.items():
        discoveries[index % 200].register("worker", index, address)
    eventually(lambda: list(told.values()) == [want] * 200, 60)


@pytest.mark.soak
def test_jobs_of_one_name_in_different_namespaces_do_not_meet(join: Join) -> None:
    one, other = join(), join(RayDiscoveryConfig(namespace="elsewhere"))
    one.register("worker", 0, A)
    assert other.query("worker") == {}


def test_a_heartbeat_must_be_shorter_than_what_it_prevents() -> None:
    with pytest.raises(ConfigError, match="heartbeat"):
        RayDiscoveryConfig(heartbeat=timedelta(seconds=30))
    with pytest.raises(ConfigError, match="linger"):
        RayDiscoveryConfig(linger=timedelta(seconds=1))


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"monolith-recsys\[ray\]"):
        RayDiscovery("job")


def test_a_process_that_was_disconnected_from_ray_gets_an_error(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    discovery = join()
    with monkeypatch.context() as patch:
        patch.setattr(ray, "is_initialized", lambda: False)
        with pytest.raises(UnavailableError, match="disconnected"):
            discovery.query("worker")
