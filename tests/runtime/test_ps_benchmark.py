"""The fastest of many servers are used: how they are measured and ranked."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from datetime import timedelta

import pytest

from monolith.errors import ConfigError, RequestError, UnavailableError
from monolith.runtime.server_choice import Measure, MeasuredServer, PsBenchmark, StepMeasure, host_of, ranked
from monolith.store import ParameterServer
from monolith.store.server import SERVICE
from monolith.wire.flight import Caller

GONE = "127.0.0.1:1"


def speeds(**found: float) -> Measure:
    """Servers as `a_1=10.0` for a:1."""

    def measure(addresses: Sequence[str]) -> list[MeasuredServer]:
        return [MeasuredServer(address, found[address.replace(":", "_")]) for address in addresses]

    return measure


@pytest.mark.parametrize(
    ("found", "needed", "best"),
    [
        ({"a_1": 10, "a_2": 20, "b_1": 25}, 2, ["a:2", "b:1"]),
        ({"a_1": 10, "b_1": 10, "c_1": 10}, 2, ["c:1", "b:1"]),
        ({"a_1": 5, "a_2": 6, "a_3": 7, "b_1": 12, "c_1": 8}, 3, ["a:3", "b:1", "a:2"]),
    ],
)
def test_the_fastest_of_a_host_counts_for_the_whole_host(
    found: dict[str, float], needed: int, best: list[str]
) -> None:
    addresses = [name.replace("_", ":") for name in found]
    assert PsBenchmark(needed, speeds(**found))(addresses) == best


def test_as_many_are_returned_as_are_needed() -> None:
    assert len(PsBenchmark(1, speeds(ps0=1.0, ps1=2.0))(["ps0", "ps1"])) == 1


def test_servers_that_are_named_are_used_and_nothing_is_measured() -> None:
    def measure(_: Sequence[str]) -> list[MeasuredServer]:
        raise AssertionError("measured")

    assert PsBenchmark(1, measure, overridden=["overridden"])(["ps0", "ps1"]) == ["overridden"]


def test_fewer_names_than_are_needed_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"2 parameter servers are needed, and cluster\.use_ps names 1"):
        PsBenchmark(2, speeds(), overridden=["a:1"])


def test_a_host_is_the_text_before_the_port() -> None:
    assert [host_of(address) for address in ("10.0.0.1:80", "[fd00::1]:80", "[fd00::2]:80", "ps0")] == [
        "10.0.0.1",
        "[fd00::1]",
        "[fd00::2]",
        "ps0",
    ]


def test_the_ranking_is_a_table_with_spare_and_failed_servers() -> None:
    said: list[str] = []

    def measure(_: Sequence[str]) -> list[MeasuredServer]:
        return [
            MeasuredServer("a:1", 10.0, 0.1),
            MeasuredServer("b:1", 20.0, 0.05),
            MeasuredServer("c:1", problem="no answer"),
        ]

    assert PsBenchmark(1, measure, say=said.append)(["a:1", "b:1", "c:1"]) == ["b:1"]
    assert said[0].splitlines() == [
        "share  parameter server  steps/s    latency  with its host",
        "    0  b:1                  20.0    50.0 ms           20.0",
        "spare  a:1                  10.0   100.0 ms           10.0",
        "    -  c:1               no answer",
    ]


def test_too_few_that_can_be_measured_are_waited_for() -> None:
    def measure(_: Sequence[str]) -> list[MeasuredServer]:
        return [MeasuredServer("a:1", 1.0), MeasuredServer("b:1", problem="no answer")]

    with pytest.raises(
        UnavailableError, match="2 parameter servers are needed, and 1 could be measured; b:1"
    ):
        PsBenchmark(2, measure)(["a:1", "b:1"])


# Over a port


@pytest.fixture
def servers() -> Iterator[list[str]]:
    with contextlib.ExitStack() as stack:
        spares = [stack.enter_context(ParameterServer([], shard=None)) for _ in range(2)]
        yield [server.address for server in spares]


def test_servers_that_have_no_share_yet_are_measured(servers: list[str]) -> None:
    ticks = itertools.count(0.0, 0.25)  # each look at the clock is a quarter of a second later
    found = StepMeasure(timedelta(), clock=lambda: next(ticks))(servers)
    assert [server.address for server in found] == servers
    assert [server.problem for server in found] == ["", ""]
    assert all(server.throughput > 0 and server.latency > 0 for server in found)


def test_a_missing_server_is_reported_and_delays_no_other(servers: list[str]) -> None:
    found = StepMeasure(timedelta())([GONE, servers[0]])
    assert "no answer" in found[0].problem
    assert not found[1].problem
    assert [server.address for server in ranked(found)] == [servers[0]]


def test_a_sample_of_another_size_is_refused(servers: list[str]) -> None:
    with Caller(SERVICE, servers[0]) as caller, contextlib.closing(caller.open_stream()) as stream:
        stream.send("sample_step", {}, b"1234")
        with pytest.raises(RequestError, match="262144 bytes, got 4"):
            stream.receive()
