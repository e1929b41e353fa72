"""Connections that send much and show nothing are cut off; all others are left alone."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from data.service.loopback import until

from monolith.wire.doorkeeper import Doorkeeper

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux counts what a connection has sent"
)

MOST = 10_000


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.create_server((request.param, 0), family=family) as listener:
        yield listener


@pytest.fixture(autouse=True)
def keeper(listener: socket.socket) -> Iterator[Doorkeeper]:
    keeper = Doorkeeper(listener.getsockname()[1], MOST)
    yield keeper
    keeper.close()


def connect(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    caller = socket.create_connection(listener.getsockname()[:2])
    return caller, listener.accept()[0]


def peer_of(caller: socket.socket) -> str:
    """As gRPC names it."""
    host, port = caller.getsockname()[:2]
    return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"


def is_cut(served: socket.socket) -> bool:
    """Whether it ends after what was sent."""
    served.settimeout(0.01)
    try:
        while served.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    return True


def test_who_sends_too_much_is_cut_off_and_who_sends_little_is_not(listener: socket.socket) -> None:
    loud, served_loud = connect(listener)
    quiet, served_quiet = connect(listener)
    with loud, served_loud, quiet, served_quiet:
        quiet.sendall(bytes(MOST))
        loud.sendall(bytes(MOST + 1))
        until(lambda: is_cut(served_loud))
        assert not is_cut(served_quiet)


def test_who_was_let_in_may_send_what_it_likes_and_the_next_at_its_place_may_not(
    listener: socket.socket, keeper: Doorkeeper
) -> None:
    guest, served = connect(listener)
    with guest, served:
        keeper.admit(peer_of(guest))
        guest.sendall(bytes(5 * MOST))
        stranger, other = connect(listener)
        with stranger, other:
            stranger.sendall(bytes(MOST + 1))
            until(lambda: is_cut(other))  # so it has looked since
        assert not is_cut(served)
    until(lambda: not keeper._admitted)


def test_other_sockets_of_the_process_are_none_of_its_business(listener: socket.socket) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        caller, served = connect(other)
        loud, served_loud = connect(listener)
        with caller, served, loud, served_loud:
            caller.sendall(bytes(5 * MOST))
            loud.sendall(bytes(5 * MOST))
            until(lambda: is_cut(served_loud))
            assert not is_cut(served)


def test_looking_leaves_no_files_open(listener: socket.socket, keeper: Doorkeeper, tmp_path: Path) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    reading, writing = os.pipe()
    with (tmp_path / "file").open("w"), os.fdopen(reading), os.fdopen(writing, "w"):
        keeper.close()  # from here on it looks when we say so
        before = open_files()
        for _ in range(20):
            keeper._look()
        assert open_files() <= before
        guest, served = connect(listener)
        with guest, served:
            keeper._look()
        keeper._look()
        assert open_files() <= before
