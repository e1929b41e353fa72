"""What every discovery does, whatever holds the entries."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from contracts.discoveries import DISCOVERIES, FIXED, WORKERS, Join, eventually, joined

from monolith.cluster import MemoryDiscovery, Registration
from monolith.errors import AddressError, ConfigError, DiscoveryError

A, B, C = "192.168.0.1:1001", "192.168.0.2:1002", "192.168.0.1:1002"


def join_of(request: pytest.FixtureRequest, tmp_path: Path, cases: dict[str, Any]) -> Iterator[Join]:
    case = cases[request.param]
    service = None if case.service is None else request.getfixturevalue(case.service)
    with joined(case, tmp_path, service) as join:
        yield join


@pytest.fixture(params=DISCOVERIES)
def join(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Join]:
    yield from join_of(request, tmp_path, DISCOVERIES)


@pytest.fixture(params=FIXED)
def join_fixed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Join]:
    yield from join_of(request, tmp_path, FIXED)


@pytest.fixture(params=[*DISCOVERIES, *FIXED])
def join_any(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Join]:
    """With `WORKERS` registered, by whomever."""
    case = {**DISCOVERIES, **FIXED}[request.param]
    service = None if case.service is None else request.getfixturevalue(case.service)
    with joined(case, tmp_path, service) as join:
        first = join()
        for index, address in WORKERS.items():
            first.register("worker", index, address)
        yield join


def test_what_is_registered_is_found_at_once_here_and_soon_elsewhere(join: Join) -> None:
    one, other = join(), join()
    one.register("server", 0, A)
    assert one.query("server") == {0: A}
    other.register("server", 1, B)
    assert other.query("server")[1] == B
    for discovery in (one, other):
        eventually(lambda discovery=discovery: discovery.query("server") == {0: A, 1: B})


def test_earlier_entries_are_found_by_later_processes(join_any: Join) -> None:
    assert join_any().query("worker") == WORKERS


def test_a_role_without_entries_is_empty(join: Join) -> None:
    assert join().query("ps") == {}


def test_only_roles_with_entries_are_listed(join: Join) -> None:
    one, other = join(), join()
    assert one.roles() == []
    one.register("worker", 0, A)
    one.register("dataservice_dispatcher", 0, B)
    for discovery in (one, other):
        eventually(lambda discovery=discovery: discovery.roles() == ["dataservice_dispatcher", "worker"])
    one.deregister("worker", 0)
    for discovery in (one, other):
        eventually(lambda discovery=discovery: discovery.roles() == ["dataservice_dispatcher"])
    other.close()
    assert other.roles() == []


def test_the_roles_of_a_fixed_cluster_are_those_it_names(join_fixed: Join) -> None:
    discovery = join_fixed()
    assert discovery.roles() == ["worker"]
    discovery.close()
    assert discovery.roles() == []


def test_what_is_deregistered_is_gone(join: Join) -> None:
    one, other = join(), join()
    one.register("server", 0, A)
    other.register("server", 1, B)
    one.deregister("server", 0)
    assert 0 not in one.query("server")
    other.deregister("server", 1, B)
    for discovery in (one, other):
        eventually(lambda discovery=discovery: discovery.query("server") == {})


def test_deregistering_what_was_never_registered_is_no_error(join: Join) -> None:
    discovery = join()
    discovery.register("server", 4, "h:4")
    discovery.deregister("server", 5)
    assert discovery.query("server") == {4: "h:4"}


def test_deregistering_with_another_address_leaves_the_entry_to_its_owner(join: Join) -> None:
    discovery = join()
    discovery.register("server", 0, A)
    discovery.deregister("server", 0, B)
    assert discovery.query("server") == {0: A}


def test_registering_again_replaces_the_address(join: Join) -> None:
    one, other = join(), join()
    one.register("server", 0, A)
    one.register("server", 0, C)
    assert one.query("server") == {0: C}
    eventually(lambda: other.query("server") == {0: C})


def test_a_restarted_process_takes_the_place_of_the_one_before(join: Join) -> None:
    before, after = join(), join()
    before.register("server", 0, A)
    after.register("server", 0, B)
    assert after.query("server") == {0: B}
    eventually(lambda: before.query("server") == {0: B})
    before.close()
    assert after.query("server") == {0: B}


def test_roles_do_not_meet(join: Join) -> None:
    discovery = join()
    discovery.register("ps", 0, A)
    discovery.register("worker", 0, B)
    assert (discovery.query("ps"), discovery.query("worker")) == ({0: A}, {0: B})


def test_a_role_may_have_dots(join: Join) -> None:
    discovery = join()
    discovery.register("ps.canary.2", 11, A)
    assert discovery.query("ps.canary.2") == {11: A}
    assert join().query("ps.canary.2") == {11: A}
    assert discovery.query("ps") == {}


@pytest.mark.parametrize("address", ["[::1]:80", "[fe80::1]:2222", "worker-0.svc:1", "localhost:65535"])
def test_addresses_of_every_kind_come_back_as_they_were(join: Join, address: str) -> None:
    discovery = join()
    discovery.register("worker", 0, address)
    assert discovery.query("worker") == {0: address}


@pytest.mark.parametrize("address", ["", "host", "host:", ":80", "host:http", "a:b::c:80", "host:70000"])
def test_what_is_no_address_is_refused(join: Join, address: str) -> None:
    discovery = join()
    with pytest.raises(AddressError, match="Invalid addr"):
        discovery.register("worker", 0, address)
    assert discovery.query("worker") == {}


@pytest.mark.parametrize(("role", "index"), [("", 0), ("a/b", 0), ("..", 0), ("worker", -1)])
def test_what_no_registry_could_name_is_refused(join: Join, role: str, index: int) -> None:
    with pytest.raises(ConfigError):
        join().register(role, index, A)


def test_a_query_is_a_copy(join_any: Join) -> None:
    discovery = join_any()
    discovery.query("worker").clear()
    assert discovery.query("worker") == WORKERS


def test_entries_are_what_the_query_finds_by_index(join_any: Join) -> None:
    entries = join_any().entries("worker")
    assert [(entry.index, entry.address) for entry in entries] == list(WORKERS.items())


def test_entries_know_when_they_were_registered(join: Join) -> None:
    before = time.time()
    join().register("worker", 3, A)
    (entry,) = join().entries("worker")
    assert isinstance(entry, Registration)
    assert entry.registered_at is not None
    assert before - 1 <= entry.registered_at <= time.time() + 1


def test_a_fixed_cluster_knows_no_times(join_fixed: Join) -> None:
    assert {entry.registered_at for entry in join_fixed().entries("worker")} == {None}


class Watching:
    """A callback that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[dict[int, str]] = []

    def __call__(self, addresses: dict[int, str]) -> None:
        self.told.append(addresses)

    @property
    def last(self) -> dict[int, str] | None:
        return self.told[-1] if self.told else None


def test_a_watch_tells_what_is_there_first(join_any: Join) -> None:
    watching = Watching()
    join_any().watch("worker", watching)
    eventually(lambda: watching.last == WORKERS)


def test_a_watch_tells_of_every_change_that_stays(join: Join) -> None:
    one, other, watching = join(), join(), Watching()
    one.watch("worker", watching)
    eventually(lambda: watching.last == {})
    other.register("worker", 0, A)
    eventually(lambda: watching.last == {0: A})
    other.register("worker", 1, B)
    eventually(lambda: watching.last == {0: A, 1: B})
    other.register("worker", 0, C)
    eventually(lambda: watching.last == {0: C, 1: B})
    other.deregister("worker", 1)
    eventually(lambda: watching.last == {0: C})
    other.register("ps", 0, A)
    other.close()
    eventually(lambda: watching.last == {})
    assert all(before != after for before, after in zip(watching.told, watching.told[1:], strict=False))


def test_a_watch_that_was_ended_is_told_no_more(join: Join) -> None:
    discovery, ended, watching = join(), Watching(), Watching()
    end = discovery.watch("worker", ended)
    discovery.watch("worker", watching)
    eventually(lambda: ended.told and watching.told)
    end()
    discovery.register("worker", 0, A)
    eventually(lambda: watching.last == {0: A})
    assert ended.told == [{}]


def test_a_callback_that_fails_ends_neither_its_watch_nor_others(join: Join) -> None:
    discovery, watching, calls = join(), Watching(), []

    def fail(addresses: dict[int, str]) -> None:
        calls.append(addresses)
        raise RuntimeError("of the callback's own")

    discovery.watch("worker", fail)
    discovery.watch("worker", watching)
    eventually(lambda: calls and watching.told)
    discovery.register("worker", 0, A)
    eventually(lambda: watching.last == {0: A} and calls[-1] == {0: A})


def test_closing_takes_out_what_was_registered_and_nothing_else(join: Join) -> None:
    one, other = join(), join()
    one.register("worker", 0, A)
    one.register("worker", 1, B)
    other.register("worker", 2, C)
    other.register("worker", 1, A)
    one.close()
    eventually(lambda: other.query("worker") == {1: A, 2: C})


def test_a_closed_discovery_finds_nothing_and_registers_nothing(join_any: Join) -> None:
    discovery = join_any()
    discovery.close()
    discovery.close()
    assert discovery.query("worker") == {}
    assert discovery.entries("worker") == []


def test_closing_does_not_tell_watchers_that_all_entries_are_gone(join: Join) -> None:
    for _ in range(5):
        one, other, watching = join(), join(), Watching()
        one.register("worker", 0, A)
        other.watch("worker", watching)
        eventually(lambda watching=watching: watching.last == {0: A})
        one.register("ps", 1, B)  # something to read while closing
        other.close()
        assert watching.last == {0: A}


def test_registering_with_a_closed_discovery_is_an_error(join: Join) -> None:
    discovery = join()
    discovery.close()
    with pytest.raises(DiscoveryError, match="closed"):
        discovery.register("worker", 0, A)


def test_closing_leaves_no_thread_behind(join: Join) -> None:
    join().register("worker", 9, A)  # so that threads of the registry's own are there before
    before = set(threading.enumerate())
    discovery = join()
    discovery.watch("worker", Watching())
    discovery.register("worker", 0, A)
    discovery.register("worker", 0, C)
    discovery.register("worker", 1, B)
    discovery.close()
    left = [thread for thread in set(threading.enumerate()) - before if "process_request" not in thread.name]
    assert left == []


def test_random_changes_by_several_processes_end_as_they_do_in_memory(join: Join) -> None:
    chance = random.Random(6)
    plain = MemoryDiscovery()
    processes = [join() for _ in range(3)]
    owners: dict[tuple[str, int], Any] = {}
    for number in range(40):
        role, index = chance.choice(["ps", "worker"]), chance.randrange(4)
        if owners.get((role, index)) and chance.random() < 0.4:
            owners.pop((role, index)).deregister(role, index)
            plain.deregister(role, index)
        else:
            process = chance.choice(processes)
            before = owners.get((role, index))
            if before not in (None, process):  # a process that lives would look after its entry
                before.deregister(role, index)
            process.register(role, index, f"10.0.0.{index}:{number}")
            plain.register(role, index, f"10.0.0.{index}:{number}")
            owners[role, index] = process
    for process in processes:
        for role in ("ps", "worker"):
            eventually(lambda process=process, role=role: process.query(role) == plain.query(role))
