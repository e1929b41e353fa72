"""The pieces that discoveries share; what all of them do is in tests/contracts/test_discovery.py."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
from contracts.discoveries import eventually

from monolith.cluster import MemoryDiscovery, MemoryRegistry, Registration, locator
from monolith.cluster.discovery import PollingWatch
from monolith.errors import UnavailableError

A = "10.0.0.1:1"
SOON = timedelta(milliseconds=5)


def test_ages_come_from_the_clock_that_was_handed_in():
    discovery = MemoryDiscovery(clock=lambda: 1234.5)
    discovery.register("ps", 0, A)
    assert discovery.entries("ps") == [Registration(0, A, 1234.5)]


def test_discoveries_without_a_registry_in_common_do_not_meet():
    one, other = MemoryDiscovery(), MemoryDiscovery()
    one.register("ps", 0, A)
    assert other.query("ps") == {}


def test_a_locator_returns_the_current_address_or_that_there_is_none():
    discovery = MemoryDiscovery()
    locate = locator(discovery, "ps", 1)
    with pytest.raises(UnavailableError, match=r"no process is registered as ps 1$"):
        locate()
    discovery.register("ps", 0, A)
    with pytest.raises(UnavailableError, match=r"as ps 1; registered are \[0\]"):
        locate()
    discovery.register("ps", 1, A)
    assert locate() == A
    discovery.register("ps", 1, "10.0.0.2:2")
    assert locate() == "10.0.0.2:2"


def test_a_discovery_is_closed_by_its_with():
    registry = MemoryRegistry()
    with MemoryDiscovery(registry) as discovery:
        discovery.register("ps", 0, A)
    assert MemoryDiscovery(registry).query("ps") == {}


def test_a_polling_watch_has_no_thread_before_the_first_watcher():
    before = threading.active_count()
    watch = PollingWatch(lambda _: {}, SOON, "test")
    assert threading.active_count() == before
    watch.add("ps", lambda _: None)
    assert threading.active_count() == before + 1
    watch.close()
    assert threading.active_count() == before


def test_while_the_registry_is_away_watchers_keep_what_they_know_and_are_told_when_it_is_back():
    answers = [{0: A}]
    asked, told = [], []

    def query(_):
        asked.append(answers[-1])
        if answers[-1] is None:
            raise UnavailableError("away")
        return answers[-1]

    watch = PollingWatch(query, SOON, "test")
    watch.add("ps", told.append)
    eventually(lambda: told)
    answers.append(None)
    eventually(lambda: asked[-2:] == [None, None])
    answers.append({})
    eventually(lambda: len(told) > 1)
    watch.close()
    assert told == [{0: A}, {}]


def test_a_polling_watch_ends_at_once_however_rarely_it_asks():
    watch = PollingWatch(lambda _: {}, timedelta(hours=1), "test")
    told = []
    watch.add("ps", told.append)
    eventually(lambda: told)
    start = time.monotonic()
    watch.close()
    assert time.monotonic() - start < 60


def test_a_second_watch_is_told_without_waiting_for_the_next_round():
    watch, told = PollingWatch(lambda _: {0: A}, timedelta(hours=1), "test"), []
    watch.add("ps", lambda _: None)
    time.sleep(0.05)
    watch.add("ps", told.append)
    eventually(lambda: told[-1:] == [{0: A}])
    watch.close()
