"""Who answers, on real sockets."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from datetime import timedelta

import pytest
from services.servers import free_port

from monolith.cluster import NodeAliveChecker
from monolith.errors import ClusterError, NodeAliveCheckerError, RetryableError


@pytest.fixture
def nodes():
    """Makes so many nodes that live."""
    with ExitStack() as stack:

        def make(count, host="127.0.0.1"):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            servers = [
                stack.enter_context(socket.create_server((host, 0), family=family)) for _ in range(count)
            ]
            shown = f"[{host}]" if ":" in host else host
            return [f"{shown}:{server.getsockname()[1]}" for server in servers]

        yield make


@pytest.mark.parametrize("count", range(6))
def test_exactly_those_that_refuse_are_dead(nodes, count):
    dead, alive = [f"127.0.0.1:{free_port()}" for _ in range(count)], nodes(5 - count)
    checker = NodeAliveChecker(dead + alive)
    assert set(checker.get_dead_nodes()) == set(dead)
    assert set(checker.get_alive_nodes()) == set(alive)
    assert checker.get_addrs() == dead + alive
    assert checker.all_nodes_alive() == (count == 0)


def test_without_processes_to_check_all_are_alive():
    assert NodeAliveChecker([]).all_nodes_alive()


def test_ipv6_nodes_are_asked_too(nodes):
    addrs = nodes(2, "::1")
    assert NodeAliveChecker(addrs).get_alive_nodes() == addrs


def test_a_name_that_has_only_an_ipv6_address_is_alive(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n::1 six.test\n")
    inside = """
import json, socket, sys
from monolith.cluster import NodeAliveChecker
with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
    assert {found[0] for found in socket.getaddrinfo("six.test", 80)} == {socket.AF_INET6}
    print(json.dumps(NodeAliveChecker([f"six.test:{server.getsockname()[1]}"]).get_dead_nodes()))
"""
    mount = f'mount --bind {hosts} /etc/hosts && exec "$0" -c "$1"'
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("a name of its own needs a mount namespace, which cannot be made here")
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, sys.executable, inside],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, json.loads(done.stdout or "null")) == (0, []), done.stderr


@pytest.mark.parametrize(
    "addr", ["garbage", "a:b::c:80", "127.0.0.1:http", "nobody.invalid:80", "a..b:80", ""]
)
def test_what_cannot_be_asked_is_dead_and_nothing_is_raised(addr):
    assert NodeAliveChecker([addr]).get_dead_nodes() == [addr]


def test_the_dead_are_logged_with_the_reason(caplog):
    addr = f"127.0.0.1:{free_port()}"
    with caplog.at_level(logging.WARNING):
        NodeAliveChecker([addr])
    assert f"cannot connect to {addr}: " in caplog.text
    assert "refused" in caplog.text


def test_an_error_names_the_dead_and_may_be_tried_again(nodes):
    (alive,) = nodes(1)
    dead = f"127.0.0.1:{free_port()}"
    with pytest.raises(NodeAliveCheckerError, match=dead) as raised:
        NodeAliveChecker([alive, dead]).require_all()
    assert raised.value.dead.keys() == {dead}
    assert alive not in str(raised.value)
    assert isinstance(raised.value, RetryableError)
    assert isinstance(raised.value, ClusterError)
    NodeAliveChecker([alive]).require_all()


@pytest.fixture
def silent():
    """The address of a node whose queue of connections is full: to connect takes for ever."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("", 0))
        server.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", server.getsockname()[1]))
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_silent_node_is_dead_after_the_timeout_and_all_are_asked_at_once(silent, nodes):
    dead = [silent.replace("127.0.0.1", f"127.0.0.{n}") for n in range(1, 101)]
    start = time.monotonic()
    checker = NodeAliveChecker([*dead, *nodes(1)], timedelta(milliseconds=300))
    assert time.monotonic() - start < 20  # one after the other they would take 30 s
    assert checker.get_dead_nodes() == dead


def test_no_thread_is_left_behind(nodes):
    before = threading.active_count()
    NodeAliveChecker(nodes(3), num_thread=2)
    assert threading.active_count() == before
