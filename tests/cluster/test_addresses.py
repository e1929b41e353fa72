"""Addresses as text, and ports that answer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from services.servers import free_port

from monolith.cluster import (
    Address,
    AddressFamily,
    check_port,
    concat_ip_and_port,
    get_local_host,
    get_local_ip,
    get_local_server_addr,
    is_ipv4_supported,
    is_ipv6_address,
    wait_for_port,
)
from monolith.errors import AddressError, ClusterError, DeadlineExceededError

SECOND = timedelta(seconds=1)
SHORT = timedelta(milliseconds=200)


@contextmanager
def listening(host: str = "127.0.0.1") -> Iterator[int]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        yield server.getsockname()[1]


# Text


@pytest.mark.parametrize(
    ("ip", "expected"), [("localhost", "localhost:10"), ("127.0.0.1", "127.0.0.1:10"), ("::1", "[::1]:10")]
)
def test_only_ipv6_wears_brackets(ip, expected):
    assert concat_ip_and_port(ip, 10) == expected


@pytest.mark.parametrize("ip", ["::1", "fe80::1", "2001:db8::", "fe80::1%eth0"])
def test_a_literal_ipv6_address_is_one(ip):
    assert is_ipv6_address(ip)


@pytest.mark.parametrize("ip", ["127.0.0.1", "localhost", "[::1]", "", "a:b", "::1:2222:x", "host:80"])
def test_names_brackets_and_garbage_are_no_ipv6_address(ip):
    assert not is_ipv6_address(ip)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1:80", "10.0.0.1", 80),
        ("worker-0.svc:2222", "worker-0.svc", 2222),
        ("[::1]:80", "::1", 80),
        ("0.0.0.0:0", "0.0.0.0", 0),
        ("h:65535", "h", 65535),
    ],
)
def test_an_address_is_a_host_and_a_whole_number_and_reads_as_it_was_written(text, host, port):
    address = Address.parse(text)
    assert (address.host, address.port) == (host, port)
    assert str(address) == text


@pytest.mark.parametrize("text", ["", "h", "h:", ":80", "h:x", "h:-1", "h:65536", "h:8²", "h 1:80 ", " h:80"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(AddressError, match="Invalid addr: "):
        Address.parse(text)


@pytest.mark.parametrize("text", ["a:b::c:80", "::1:80", "[host]:80", "[10.0.0.1]:80"])
def test_brackets_are_for_ipv6_and_ipv6_needs_them(text):
    with pytest.raises(AddressError, match="brackets"):
        Address.parse(text)


def test_families_are_written_as_they_always_were():
    assert (AddressFamily.IPV4, AddressFamily.IPV6) == ("ipv4", "ipv6")


# This machine


def resolving(*ips: str):
    """A resolver that knows these addresses of every name; IPv4 ones not when asked for IPv6."""

    def resolve(_name, _port, family=0):
        fit = [ip for ip in ips if family == 0 or is_ipv6_address(ip)]
        if not fit:
            raise socket.gaierror("no such name")
        return [(0, 0, 0, "", (ip, 0)) for ip in fit]

    return resolve


def test_the_local_ip_is_the_first_of_this_machines_name():
    assert get_local_ip(resolving("10.0.0.7", "::7")) == "10.0.0.7"
    assert get_local_ip(resolving("::7", "10.0.0.7")) == "::7"


def test_where_the_name_cannot_be_resolved_it_is_asked_for_ipv6_alone():
    asked = []

    def resolve(name, port, family=0):
        asked.append(family)
        if family == 0:
            raise socket.gaierror("only AAAA")
        return resolving("::7")(name, port, family)

    assert get_local_ip(resolve) == "::7"
    assert asked == [0, socket.AF_INET6]


def test_a_machine_without_any_address_says_so():
    with pytest.raises(ClusterError, match="does not resolve"):
        get_local_ip(resolving())


def test_ipv4_is_supported_where_the_local_ip_is_none_of_ipv6():
    assert is_ipv4_supported(resolving("10.0.0.7"))
    assert not is_ipv4_supported(resolving("::7"))


def test_the_local_server_address_has_brackets_where_it_needs_them():
    assert get_local_server_addr(10, resolving("10.0.0.7")) == "10.0.0.7:10"
    assert get_local_server_addr(10, resolving("::7")) == "[::7]:10"
    assert Address.parse(get_local_server_addr(10)).port == 10


def test_a_scheduler_names_the_local_host():
    assert get_local_host({"YARN_INET_ADDR": "1.2.3.4"}) == "1.2.3.4"
    both = {"CLOUDNATIVE_INET_ADDR": "1.2.3.4,5.6.7.8", "YARN_INET_ADDR": "9.9.9.9"}
    assert get_local_host(both) == "1.2.3.4"
    assert get_local_host({}, resolving("10.0.0.7")) == "10.0.0.7"


@pytest.mark.parametrize("name", ["CLOUDNATIVE_INET_ADDR", "YARN_INET_ADDR"])
def test_a_scheduler_that_names_no_process_is_an_error(name):
    with pytest.raises(ClusterError, match=name):
        get_local_host({name: ""})


# Ports


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]", "localhost"])
def test_a_port_that_listens_is_found(host):
    with listening(host.strip("[]") if ":" in host else "127.0.0.1") as port:
        assert check_port(host, port)


def test_a_closed_port_is_retried_with_pauses_until_the_time_is_over():
    pauses = []

    def sleep(seconds):
        pauses.append(seconds)
        time.sleep(seconds)

    start = time.monotonic()
    assert not check_port("127.0.0.1", free_port(), timedelta(milliseconds=250), sleep=sleep)
    assert time.monotonic() - start > 0.2
    assert 1 <= len(pauses) <= 5


def test_a_port_that_opens_meanwhile_is_found():
    port = free_port()
    opening = threading.Timer(0.2, lambda: servers.append(socket.create_server(("127.0.0.1", port))))
    servers: list[socket.socket] = []
    opening.start()
    try:
        assert check_port("127.0.0.1", port, timedelta(seconds=10))
    finally:
        opening.join()
        servers[0].close()


def test_checking_a_port_leaves_no_connection_open():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert check_port("127.0.0.1", server.getsockname()[1])
        connection, _ = server.accept()
        connection.settimeout(5)
        with connection:
            assert connection.recv(1) == b""


def test_a_host_that_cannot_be_a_name_is_not_there():
    assert not check_port("a" * 70 + ".test", 80, SHORT)
    assert not check_port("no such host", 80, SHORT)


def test_waiting_for_a_port_ends_when_it_opens():
    with listening() as port:
        wait_for_port(f"127.0.0.1:{port}", SECOND)
    with listening("::1") as port:
        wait_for_port(f"[::1]:{port}", SECOND)


def test_waiting_for_a_port_that_never_opens_ends_with_an_error_that_names_it():
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(DeadlineExceededError, match=f"{address} connect error!.*refused"):
        wait_for_port(address, SHORT, every=timedelta(milliseconds=50))


def test_waiting_for_what_is_no_address_does_not_wait():
    with pytest.raises(AddressError):
        wait_for_port("nowhere", None)
