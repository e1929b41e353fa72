"""Connections that send much, or nothing, and show no token are closed, and so are too many; no other is."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
from data.service.loopback import until

from monolith.wire.ports import ConnectionGuard, Limits, _OpenSockets

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
def guard(listener: socket.socket) -> Iterator[ConnectionGuard]:
    guard = ConnectionGuard(listener.getsockname()[1], Limits(stranger_bytes=MOST))
    yield guard
    guard.close()


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


def test_a_client_that_sends_too_much_is_cut_off_and_one_that_sends_little_is_not(
    listener: socket.socket,
) -> None:
    loud, served_loud = connect(listener)
    quiet, served_quiet = connect(listener)
    with loud, served_loud, quiet, served_quiet:
        quiet.sendall(bytes(MOST))
        loud.sendall(bytes(MOST + 1))
        until(lambda: is_cut(served_loud))
        assert not is_cut(served_quiet)


def test_an_admitted_client_may_send_what_it_likes_and_the_next_at_its_address_may_not(
    listener: socket.socket, guard: ConnectionGuard
) -> None:
    guest, served = connect(listener)
    with guest, served:
        guard.admit(peer_of(guest))
        guest.sendall(bytes(5 * MOST))
        stranger, other = connect(listener)
        with stranger, other:
            stranger.sendall(bytes(MOST + 1))
            until(lambda: is_cut(other))  # so it has looked since
        assert not is_cut(served)
    until(lambda: not guard._admitted)


def test_other_sockets_of_the_process_are_none_of_its_business(listener: socket.socket) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        caller, served = connect(other)
        loud, served_loud = connect(listener)
        with caller, served, loud, served_loud:
            caller.sendall(bytes(5 * MOST))
            loud.sendall(bytes(5 * MOST))
            until(lambda: is_cut(served_loud))
            assert not is_cut(served)


def open_sockets() -> int:
    """How many sockets this process has. Threads of earlier tests may open other files at any moment."""
    found = 0
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, as that of the listing itself
            found += str(file.readlink()).startswith("socket:")
    return found


def test_to_watch_a_connection_costs_no_file(listener: socket.socket, guard: ConnectionGuard) -> None:
    guard.check()
    before = open_sockets()
    with ExitStack() as stack:
        for _ in range(10):
            for line in connect(listener):
                stack.enter_context(line)
        for _ in range(3):
            guard.check()
        assert len(guard._connections) == 10
        assert open_sockets() == before + 20
    guard.check()
    assert open_sockets() == before


def test_guards_share_one_listing_of_sockets_per_interval(listener: socket.socket) -> None:
    shared, hour = _OpenSockets(), 3600.0
    first = shared.listed_in_this(hour)
    assert listener.fileno() in first
    caller, served = connect(listener)
    with caller, served:
        assert shared.listed_in_this(hour) is first
        assert shared.listed_in_this(1e-6)[served.fileno()] == os.fstat(served.fileno()).st_ino


# Too long, and too many


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def watched(listener: socket.socket, clock: Clock, **limits: object) -> ConnectionGuard:
    """Return a doorkeeper that looks when it is told to."""
    made = ConnectionGuard(listener.getsockname()[1], Limits(**limits), clock=clock)  # type: ignore[arg-type]
    made._closing.set()
    made._thread.join()
    made._closing.clear()
    return made


def test_a_connection_without_an_admitted_call_is_closed_after_a_while(listener: socket.socket) -> None:
    clock = Clock()
    guard = watched(listener, clock, admit_within=timedelta(seconds=10))
    silent, served_silent = connect(listener)
    guest, served_guest = connect(listener)
    with silent, served_silent, guest, served_guest:
        guard.admit(peer_of(guest))
        for clock.now in (0.0, 10.0):
            guard.check()
        assert not is_cut(served_silent)
        clock.now = 10.1
        guard.check()
        assert is_cut(served_silent)
        assert not is_cut(served_guest)
    guard.close()


@pytest.mark.parametrize("limit", ["connections", "peer_connections"])
def test_beyond_the_limit_the_oldest_unknown_clients_go_first_and_admitted_ones_last(
    listener: socket.socket, limit: str, caplog: pytest.LogCaptureFixture
) -> None:
    guard = watched(listener, Clock(), **{limit: 3})
    with ExitStack() as stack, caplog.at_level(logging.WARNING):
        lines = []
        for number in range(5):
            caller, served = connect(listener)
            stack.enter_context(caller)
            lines.append(stack.enter_context(served))
            if number == 0:
                guard.admit(peer_of(caller))
            guard.check()
        assert [is_cut(one) for one in lines] == [False, True, True, False, False]
        assert f"limits.{limit}" in caplog.text
    guard.close()


def test_many_closed_connections_are_one_line_a_second(
    listener: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    guard = watched(listener, clock, connections=1)
    with ExitStack() as stack, caplog.at_level(logging.WARNING):
        for number in range(20):
            clock.now = number * 0.01
            for line in connect(listener):
                stack.enter_context(line)
            guard.check()
        clock.now = 1.5
        guard.check()
    assert len(caplog.records) == 2
    assert "18 beyond" in caplog.text
    guard.close()


def test_closing_closes_the_connections_of_unknown_clients_and_no_other(listener: socket.socket) -> None:
    guard = watched(listener, Clock())
    silent, served_silent = connect(listener)
    guest, served_guest = connect(listener)
    with silent, served_silent, guest, served_guest:
        guard.admit(peer_of(guest))
        guard.close()
        assert is_cut(served_silent)
        assert not is_cut(served_guest)


def test_connections_are_closed_when_the_process_has_no_file_left() -> None:
    """In a process of its own: its limit of files is lowered."""
    program = """
        import os, resource, socket, sys
        from datetime import timedelta
        from monolith.wire.ports import ConnectionGuard
        from monolith.wire.ports import Limits

        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        listener = socket.create_server(("127.0.0.1", 0))
        guard = ConnectionGuard(listener.getsockname()[1], Limits(connections=4))
        guard._closing.set()
        guard._thread.join()
        lines = []
        for _ in range(10):
            caller = socket.create_connection(listener.getsockname())
            lines.append((caller, listener.accept()[0]))
        try:
            while True:
                os.open(os.devnull, os.O_RDONLY)
        except OSError:
            guard.check()
        for _, served in lines:
            served.settimeout(0)
        def is_cut(served):
            try:
                return served.recv(1) == b""
            except BlockingIOError:
                return False
        print(sum(is_cut(served) for _, served in lines))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert int(done.stdout) == 6


def test_a_port_has_a_quarter_of_the_files_of_its_process_at_most(listener: socket.socket) -> None:
    guard = watched(listener, Clock(), connections=1 << 30)
    assert guard._most == resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4
    guard.close()
