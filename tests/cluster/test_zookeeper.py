"""Discovery through a real ZooKeeper, which is killed and started again under its clients."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from datetime import timedelta

import pytest
from contracts.discoveries import eventually, zookeeper_config
from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError
from services.servers import free_port
from services.zookeeper import ZooKeeper

from monolith.cluster import (
    ZooKeeperConfig,
    ZooKeeperDiscovery,
    clear_zk_path,
    default_zk_servers,
    get_zk_auth_data,
)
from monolith.cluster.zookeeper import is_ipv6_only
from monolith.errors import ConfigError, DiscoveryError, MissingExtraError, UnavailableError

A, B, C = "192.168.0.1:1001", "192.168.0.2:1002", "[::1]:1003"
WEEK = timedelta(weeks=1).total_seconds()
HOUR = timedelta(hours=1)

_jobs = itertools.count()


@pytest.fixture
def stack():
    """Closes in the end what is entered."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def job():
    return f"job-{next(_jobs)}"


@pytest.fixture(scope="module")
def mortal(tmp_path_factory):
    """A ZooKeeper of this module's own: the one of all tests is not ours to kill."""
    server = ZooKeeper(tmp_path_factory.mktemp("mortal"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def join(stack, zookeeper, job):
    """Makes the discovery of one more process."""

    def make(server=zookeeper, name=job, **options):
        return stack.enter_context(ZooKeeperDiscovery(name, zookeeper_config(server, **options)))

    return make


@pytest.fixture
def connect(stack, zookeeper):
    """Makes a plain client, to look and to meddle."""

    def make(server=zookeeper, **options):
        client = KazooClient(server.address, timeout=2.0, **options)
        client.start(15)
        stack.callback(client.close)
        stack.callback(client.stop)
        return client

    return make


@pytest.fixture
def meddler(connect):
    return connect()


def test_without_kazoo_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "kazoo.client", None)
    with pytest.raises(MissingExtraError, match=r"monolith-recsys\[zookeeper\]"):
        ZooKeeperDiscovery("job", ZooKeeperConfig(servers="127.0.0.1:1"))


# Where the servers are, and who we are


def unresolvable(_):
    raise OSError("no such name")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"MY_HOST_IPV6": "::1"}, True),
        ({"MY_POD_IP": "1.2.3.4"}, False),
        ({"MY_HOST_IP": "1.2.3.4", "MY_HOST_IPV6": "::1"}, False),
        ({"MY_HOST_IP": "", "MY_POD_IP": "1.2.3.4"}, False),
        ({"MY_HOST_IP": ""}, True),
    ],
)
def test_a_container_says_whether_it_has_ipv6_only(environment, expected):
    assert is_ipv6_only(environment, unresolvable) is expected


def test_elsewhere_the_machines_own_name_says_it():
    assert not is_ipv6_only({}, lambda _: "10.0.0.1")
    assert is_ipv6_only({}, unresolvable)


def test_servers_are_those_that_this_machine_can_reach():
    four, six = {"MY_POD_IP": "1.2.3.4"}, {"MY_HOST_IPV6": "::1"}
    known = {"hosts": ["h1", "h2"], "ipv6_hosts": ["::1"]}
    assert default_zk_servers(**known, environment=four) == "h1:2181,h2:2181"
    assert default_zk_servers(**known, environment=four, use_ipv6=True) == "[::1]:2181"
    assert default_zk_servers(**known, environment=six) == "[::1]:2181"
    assert default_zk_servers(environment=four) == ""


def test_no_server_at_all_is_refused():
    with pytest.raises(ConfigError, match="no servers"):
        ZooKeeperConfig(servers="")


def test_the_credential_comes_from_the_environment_and_is_never_shown():
    assert get_zk_auth_data({}) == get_zk_auth_data({"ZK_AUTH": ""}) == ()
    auth = get_zk_auth_data({"ZK_AUTH": "u:p"})
    assert auth == (("digest", "u:p"),)
    assert "u:p" not in repr(ZooKeeperConfig(servers="h:1", auth=auth))


def test_a_client_without_the_credential_neither_sees_nor_changes_private_nodes(join, connect, job, caplog):
    caplog.set_level(logging.DEBUG)
    private = {"auth": (("digest", "user:hush"),), "private": True}
    discovery = join(**private)
    discovery.register("ps", 0, A)
    assert join(**private).query("ps") == {0: A}
    with pytest.raises(DiscoveryError, match="NoAuth"):
        join(delay=timedelta(milliseconds=10))
    assert "hush" not in caplog.text
    assert "Auth(...)" in caplog.text
    with pytest.raises(NoAuthError):
        connect().set(f"/monolith/{job}/ps.0", b"other")
    with pytest.raises(NoAuthError):
        connect(auth_data=[("digest", "user:wrong")]).get(f"/monolith/{job}/ps.0")
    assert connect(auth_data=[("digest", "user:hush")]).get(f"/monolith/{job}/ps.0")[0] == A.encode()


def test_private_nodes_need_a_credential():
    with pytest.raises(ConfigError, match="ZK_AUTH"):
        ZooKeeperConfig(servers="h:1", private=True)


# Nodes


def test_an_entry_is_an_ephemeral_node_with_the_address(join, meddler, zookeeper, job):
    join().register("ps", 3, C)
    assert meddler.get(f"/monolith/{job}/ps.3")[0] == C.encode()
    assert f"/monolith/{job}/ps.3" in zookeeper.ephemerals()


def test_nodes_of_other_kinds_and_empty_ones_are_no_entries(join, meddler, job):
    discovery = join()
    for name, data in (("notes", b"x"), ("ps.x", b"x"), (".1", b"x"), ("ps.1", b"")):
        meddler.create(f"/monolith/{job}/{name}", data)
    discovery.register("ps", 0, A)
    assert discovery.query("ps") == {0: A}
    meddler.set(f"/monolith/{job}/ps.1", B.encode())
    eventually(lambda: discovery.query("ps") == {0: A, 1: B})
    meddler.set(f"/monolith/{job}/ps.1", b"")
    eventually(lambda: discovery.query("ps") == {0: A})


@pytest.mark.parametrize("period", [HOUR, timedelta(milliseconds=10)])
def test_an_entry_that_was_overwritten_is_put_right_within_a_second(join, meddler, job, period):
    discovery, other = join(reregister_every=period), join()
    discovery.register("ps", 0, A)
    for _ in range(3):
        meddler.set(f"/monolith/{job}/ps.0", b"wrongdata")
        eventually(lambda: meddler.get(f"/monolith/{job}/ps.0")[0] == A.encode(), 1)
    eventually(lambda: discovery.query("ps") == other.query("ps") == {0: A}, 1)


def test_an_entry_that_was_deleted_comes_back_and_its_watch_is_one(join, meddler, job):
    discovery, told = join(), []
    discovery.register("ps", 0, A)
    discovery.watch("ps", told.append)
    for _ in range(10):
        before = meddler.exists(f"/monolith/{job}/ps.0")
        meddler.delete(f"/monolith/{job}/ps.0")
        eventually(lambda: (now := meddler.exists(f"/monolith/{job}/ps.0")) and now.czxid != before.czxid)  # noqa: B023
    eventually(lambda: discovery.query("ps") == {0: A})
    eventually(lambda: told[-1] == {0: A})
    watchers = discovery._client._data_watchers[f"/monolith/{job}/ps.0"]
    eventually(lambda: len(watchers) == 1)


def test_a_whole_path_that_was_cleared_comes_back(join, meddler, job):
    discovery = join()
    discovery.register("ps", 0, A)
    discovery.register("worker", 1, B)
    clearing = meddler.transaction()  # all at once, or the living would be quicker
    for path in (f"/monolith/{job}/ps.0", f"/monolith/{job}/worker.1", f"/monolith/{job}"):
        clearing.delete(path)
    assert clearing.commit() == [True] * 3
    eventually(
        lambda: meddler.exists(f"/monolith/{job}/ps.0") and meddler.exists(f"/monolith/{job}/worker.1")
    )
    eventually(lambda: (discovery.query("ps"), discovery.query("worker")) == ({0: A}, {1: B}))
    other = join()
    other.register("ps", 1, B)
    eventually(lambda: discovery.query("ps") == {0: A, 1: B})


@pytest.mark.parametrize("below", [False, True])
def test_a_node_that_stays_is_replaced_by_one_that_goes_with_its_process(
    join, meddler, zookeeper, job, below
):
    path = f"/monolith/{job}/ps.0"
    meddler.create(path, b"left behind", makepath=True)
    if below:
        meddler.create(f"{path}/child", b"x")
    join().register("ps", 0, A)
    assert path in zookeeper.ephemerals()
    assert meddler.get(path)[0] == A.encode()


def test_an_entry_outlives_the_session_that_had_its_place(join, connect, job):
    """The address in another session's node would go when that session does."""
    before = connect()
    before.create(f"/monolith/{job}/ps.0", A.encode(), ephemeral=True, makepath=True)
    after = join()
    after.register("ps", 0, B)
    assert after.query("ps") == {0: B}
    assert connect().exists(f"/monolith/{job}/ps.0").ephemeralOwner == after._client.client_id[0]
    before.stop()
    time.sleep(0.3)
    assert join().query("ps") == {0: B}


def test_a_replaced_process_gets_its_place_back_only_when_the_other_is_gone(join, meddler, job):
    before, after = join(reregister_every=timedelta(milliseconds=20)), join()
    before.register("ps", 0, A)
    after.register("ps", 0, B)
    made = meddler.exists(f"/monolith/{job}/ps.0").czxid
    time.sleep(0.3)
    assert meddler.exists(f"/monolith/{job}/ps.0").czxid == made
    assert after.query("ps") == {0: B}
    after.close()
    eventually(lambda: before.query("ps") == {0: A})


def test_registering_again_never_restores_the_old_address(join, meddler, job):
    discovery = join(reregister_every=timedelta(milliseconds=5))
    for number in range(30):
        discovery.register("ps", 0, f"10.0.0.1:{number}")
        assert discovery.query("ps") == {0: f"10.0.0.1:{number}"}
    time.sleep(0.2)
    assert meddler.get(f"/monolith/{job}/ps.0")[0] == b"10.0.0.1:29"


def test_registering_again_makes_no_further_threads(join):
    discovery = join()
    discovery.register("ps", 0, A)
    before = threading.active_count()
    for number in range(20):
        discovery.register("ps", 0, f"10.0.0.1:{number}")
        discovery.register("ps", number + 1, A)
    assert threading.active_count() == before


def test_what_was_deregistered_stays_away(join, meddler, job):
    discovery = join(reregister_every=timedelta(milliseconds=5))
    discovery.register("ps", 0, A)
    discovery.deregister("ps", 0)
    time.sleep(0.2)
    assert meddler.exists(f"/monolith/{job}/ps.0") is None


# Sessions, connections, and servers that die


def expire(discovery, connect, server):
    """End a session as the server does: who connects with its id may close it."""
    lost = discovery._client.client_id
    thief = connect(server, client_id=lost)
    thief.stop()
    return lost


def test_entries_are_made_again_after_the_session_was_lost(join, connect, zookeeper, job):
    discovery, other, told = join(), join(), []
    discovery.register("ps", 0, A)
    discovery.register("worker", 0, B)
    other.watch("ps", told.append)
    eventually(lambda: told[-1:] == [{0: A}])
    lost = expire(discovery, connect, zookeeper)
    eventually(lambda: (now := discovery._client.client_id) is not None and now != lost)
    eventually(lambda: {f"/monolith/{job}/ps.0", f"/monolith/{job}/worker.0"} <= zookeeper.ephemerals())
    eventually(lambda: other.query("ps") == {0: A} and other.query("worker") == {0: B})
    eventually(lambda: discovery.query("ps") == {0: A})
    other.register("ps", 1, B)
    eventually(lambda: discovery.query("ps") == {0: A, 1: B})


def test_a_killed_server_that_comes_back_finds_every_entry_again(join, mortal):
    patient = timedelta(seconds=20)  # of a server that has just begun, connections may time out
    one, other, told = join(mortal, delay=patient), join(mortal, delay=patient), []
    one.register("ps", 0, A)
    other.register("ps", 1, B)
    eventually(lambda: one.query("ps") == {0: A, 1: B})
    one.watch("ps", told.append)
    for number in range(2):
        mortal.kill()
        assert one.query("ps")[0] == A  # what was known is still known
        time.sleep(0.2)
        mortal.restart()
        other.register("ps", 2 + number, C)
        eventually(lambda: one.query("ps").keys() == set(range(3 + number)), 20)  # noqa: B023
    assert one.query("ps") == {0: A, 1: B, 2: C, 3: C}
    eventually(lambda: told[-1] == one.query("ps"))


def test_a_server_that_is_away_for_longer_than_the_session_finds_every_entry_again(join, mortal):
    discovery = join(mortal)
    discovery.register("ps", 0, A)
    mortal.kill()
    time.sleep(3)
    mortal.restart()
    late = join(mortal)
    eventually(lambda: late.query("ps") == {0: A}, 20)
    time.sleep(3)  # by now the server has ended all sessions that did not come back
    eventually(lambda: late.query("ps") == {0: A}, 20)  # one that was ended registers again
    eventually(lambda: discovery.query("ps") == {0: A}, 20)


def test_registering_while_the_server_is_away_is_an_error_that_may_pass(join, mortal):
    discovery = join(mortal, tries=2, delay=timedelta(milliseconds=200))
    mortal.kill()
    start = time.monotonic()
    try:
        eventually(lambda: not discovery._client.connected)
        with pytest.raises(UnavailableError, match="2 tries failed"):
            discovery.register("ps", 0, A)
        assert time.monotonic() - start < 60
    finally:
        mortal.restart()
    eventually(lambda: discovery._client.connected, 20)
    discovery.register("ps", 0, A)
    assert discovery.query("ps") == {0: A}


def test_a_server_that_comes_back_in_time_is_waited_for(join, mortal):
    discovery = join(mortal, tries=3, delay=timedelta(seconds=20))
    mortal.kill()
    registering = threading.Thread(target=discovery.register, args=("ps", 0, A))
    registering.start()
    time.sleep(0.3)
    mortal.restart()
    registering.join(20)
    assert discovery.query("ps") == {0: A}


def test_closing_while_the_server_is_away_ends_soon_and_leaves_no_thread(join, mortal):
    before = set(threading.enumerate())
    discovery = join(mortal)
    discovery.register("ps", 0, A)
    discovery.watch("ps", lambda _: None)
    mortal.kill()
    try:
        start = time.monotonic()
        discovery.close()
        assert time.monotonic() - start < 60
        assert set(threading.enumerate()) - before == set()
    finally:
        mortal.restart()


def test_a_server_that_is_not_there_is_an_error_and_leaves_no_thread():
    before = set(threading.enumerate())
    config = ZooKeeperConfig(servers=f"127.0.0.1:{free_port()}", connect_timeout=timedelta(milliseconds=300))
    with pytest.raises(UnavailableError, match=r"did not answer within 0\.3 s"):
        ZooKeeperDiscovery("job", config)
    assert set(threading.enumerate()) - before == set()


PROCESS = """
import sys, threading
from datetime import timedelta
from monolith.cluster import ZooKeeperConfig, ZooKeeperDiscovery
servers, job, then = sys.argv[1:]
discovery = ZooKeeperDiscovery(job, ZooKeeperConfig(servers=servers, session_timeout=timedelta(seconds=2)))
discovery.register("ps", 7, "10.0.0.7:7")
print("registered", flush=True)
if then == "wait":
    threading.Event().wait()
del discovery
"""


@pytest.mark.parametrize("then", ["wait", "end"])
def test_the_entry_of_a_process_that_ended_without_closing_goes(join, zookeeper, job, then):
    discovery = join()
    command = [sys.executable, "-c", PROCESS, zookeeper.address, job, then]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "registered\n"
        if then == "wait":
            eventually(lambda: discovery.query("ps") == {7: "10.0.0.7:7"})
            process.kill()
        assert process.wait(10) == (0 if then == "end" else -9)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    eventually(lambda: discovery.query("ps") == {})


# Many


def test_a_thousand_registrations_reach_two_hundred_watchers(join):
    """Each watcher sees each index come, and in the end all is as it was registered."""
    registrars, watchers = [join() for _ in range(4)], [join() for _ in range(5)]
    seen = [set() for _ in range(200)]
    last = [{} for _ in range(200)]

    def told(number, addresses):
        seen[number].update(addresses.items())
        last[number] = addresses

    for number in range(200):
        watchers[number % 5].watch("ps", lambda addresses, number=number: told(number, addresses))

    def register(first):
        for index in range(first, 1000, 4):
            registrars[first].register("ps", index, f"10.0.0.1:{index}")

    threads = [threading.Thread(target=register, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = {index: f"10.0.0.1:{index}" for index in range(1000)}
    eventually(lambda: all(one == expected for one in last), 60)
    for registrar, index in zip(registrars, range(4), strict=True):
        registrar.register("ps", index, f"10.0.0.2:{index}")
        registrar.deregister("ps", index + 4)
    expected |= {index: f"10.0.0.2:{index}" for index in range(4)}
    expected = {index: address for index, address in expected.items() if index not in range(4, 8)}
    eventually(lambda: all(one == expected for one in last), 60)
    everything = {(index, f"10.0.0.1:{index}") for index in range(1000)} | set(expected.items())
    assert all(one == everything for one in seen)


# Clearing


def ages(weeks):
    """A clock that many weeks from now: nodes cannot be made old, but others can be late."""
    return lambda: time.time() + weeks * WEEK


def clear(zookeeper, name, *, force=False, weeks=0.0):
    clear_zk_path(name, zookeeper_config(zookeeper), force=force, clock=ages(weeks))


def test_nodes_unchanged_for_nine_weeks_are_removed(meddler, zookeeper, job):
    meddler.create(f"/monolith/{job}-old/ps.0", b"left behind", makepath=True)
    clear(zookeeper, job, weeks=8.99)
    assert meddler.exists(f"/monolith/{job}-old/ps.0")
    clear(zookeeper, job, weeks=9.01)
    assert meddler.exists(f"/monolith/{job}-old") is None


def test_a_job_that_lives_is_nobodys_to_clear(meddler, zookeeper, join, job):
    name = f"{job}-months-old"
    discovery = join(name=name)
    discovery.register("ps", 0, A)
    clear(zookeeper, job, weeks=100)
    assert meddler.exists(f"/monolith/{name}/ps.0")


def test_a_job_of_that_name_is_in_the_way_unless_forced(meddler, zookeeper, job):
    meddler.create(f"/monolith/{job}/ps.0", b"x", makepath=True)
    meddler.create(f"/monolith/{job}/worker.0", b"x")
    meddler.ensure_path("/monolith/another")
    with pytest.raises(ValueError, match=r"there are \[ps.0,worker.0\] in monolith zk path"):
        clear(zookeeper, job)
    clear(zookeeper, job, force=True)
    assert meddler.exists(f"/monolith/{job}") is None
    assert meddler.exists("/monolith/another")
    clear(zookeeper, job)


def test_two_concurrent_cleanups_do_not_disturb_each_other(meddler, zookeeper, job):
    for number in range(40):
        meddler.create(f"/monolith/{job}-{number}/a/b", b"x", makepath=True)
    failures = []

    def run():
        try:
            clear(zookeeper, job, weeks=10)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert not [name for name in meddler.get_children("/monolith") if name.startswith(f"{job}-")]


def test_clearing_leaves_no_thread(zookeeper, job):
    before = set(threading.enumerate())
    clear(zookeeper, job)
    assert set(threading.enumerate()) - before == set()
