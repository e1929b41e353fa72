"""Workers agree on when to begin, halt and end, by calls of plain values."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from monolith.errors import ClusterError, ConfigError
from monolith.train.meeting import Meeting

PATIENT = 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Caller:
    """Calls as over a network: what goes in and comes out is JSON."""

    def __init__(self, meeting: Meeting) -> None:
        self._calls = meeting.calls

    def __call__(self, name: str, **body: Any) -> dict[str, Any]:
        return json.loads(json.dumps(self._calls[f"meeting.{name}"](json.loads(json.dumps(body)))))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def call(clock: Clock) -> Caller:
    return Caller(Meeting(3, clock=clock))


@pytest.fixture
def running(call: Caller) -> Caller:
    call("begin", run="r", num_workers=3)
    call("open", run="r", start={"step": 7})
    return call


def in_thread(call: Caller, name: str, **body: Any) -> tuple[threading.Thread, list[dict[str, Any]]]:
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(call(name, **body)))
    thread.start()
    return thread, answers


def test_a_worker_begins_when_the_chief_has_restored(call: Caller) -> None:
    assert call("join", worker=1, wait=0) == {"run": None}
    call("begin", run="r", num_workers=3)
    assert call("join", worker=1, wait=0) == {"run": None}
    thread, answers = in_thread(call, "join", worker=1, wait=PATIENT)
    call("open", run="r", start={"step": 7})
    thread.join(PATIENT)
    assert answers == [{"run": "r", "start": {"step": 7}}]


def test_a_worker_that_waits_to_begin_hears_that_the_chief_failed(call: Caller) -> None:
    call("begin", run="r", num_workers=3)
    call("leave", run="r", worker=0, failure="no checkpoint")
    with pytest.raises(ClusterError, match="worker 0 failed: no checkpoint"):
        call("join", worker=1, wait=PATIENT)


def test_everybody_counts_the_same_workers(call: Caller) -> None:
    with pytest.raises(ConfigError, match="the chief counts 2 workers and server 0 3"):
        call("begin", run="r", num_workers=2)
    with pytest.raises(ConfigError, match="there is no worker 3 of 3"):
        call("join", worker=3, wait=0)
    with pytest.raises(ConfigError, match="at least 1"):
        Meeting(0)


def test_a_halt_is_news_and_lasts_until_it_is_released(running: Caller) -> None:
    seen = running("news", run="r", worker=1, seen=-1, wait=0)["version"]
    thread, answers = in_thread(running, "news", run="r", worker=1, seen=seen, wait=PATIENT)
    halt = running("halt", run="r")["halt"]
    thread.join(PATIENT)
    assert answers[0]["halt"] == halt
    running("release", run="r")
    assert running("news", run="r", worker=1, seen=-1, wait=0)["halt"] is None
    assert running("halt", run="r")["halt"] == halt + 1


def test_a_halt_in_force_is_not_another_one(running: Caller) -> None:
    first = running("halt", run="r")["halt"]
    running("arrive", run="r", worker=1, halt=first, state={})
    assert running("halt", run="r")["halt"] == first
    assert list(running("gathered", run="r", wait=0)["missing"]) == ["2"]


def test_the_chief_gathers_the_states_of_those_who_arrived_or_left(running: Caller) -> None:
    halt = running("halt", run="r")["halt"]
    thread, answers = in_thread(running, "gathered", run="r", wait=PATIENT)
    running("leave", run="r", worker=2, state={"position": 2})
    running("arrive", run="r", worker=1, halt=halt, state={"position": 1})
    thread.join(PATIENT)
    assert answers[0]["missing"] == {}
    assert answers[0]["states"] == {"1": {"position": 1}, "2": {"position": 2}}
    missing = running("gathered", run="r", wait=0, left=True)["missing"]
    assert list(missing) == ["1"]


def test_whoever_arrives_late_at_a_halt_that_was_released_is_not_waited_for(running: Caller) -> None:
    old = running("halt", run="r")["halt"]
    running("release", run="r")
    running("halt", run="r")
    running("arrive", run="r", worker=1, halt=old, state={})
    assert list(running("gathered", run="r", wait=0)["missing"]) == ["1", "2"]


def test_it_is_known_how_long_a_worker_has_been_silent(running: Caller, clock: Clock) -> None:
    running("news", run="r", worker=1, seen=-1, wait=0)
    running("news", run="r", worker=0, seen=-1, wait=0)
    clock.now += 5
    running("halt", run="r")
    assert running("gathered", run="r", wait=0)["missing"] == {"1": 5.0, "2": None}
    assert running("news", run="r", worker=1, seen=-1, wait=0)["chief_silent"] == 5.0


def test_a_failure_ends_the_run_for_all(running: Caller) -> None:
    thread, answers = in_thread(running, "gathered", run="r", wait=PATIENT)
    running("leave", run="r", worker=2, failure="no memory")
    running("leave", run="r", worker=1, failure="worker 2 failed")
    thread.join(PATIENT)
    assert answers[0]["failure"] == "worker 2 failed: no memory"
    assert running("news", run="r", worker=0, seen=-1, wait=0)["failure"] == "worker 2 failed: no memory"


def test_everybody_hears_of_a_stop_of_saves_and_of_the_end(running: Caller) -> None:
    running("stop", run="r", reason="SIGTERM")
    running("stop", run="r", reason="later")
    running("saved", run="r", halt=2)
    running("saved", run="r", halt=1)
    running("over", run="r")
    news = running("news", run="r", worker=1, seen=-1, wait=0)
    assert (news["stop"], news["saved"], news["over"]) == ("SIGTERM", 2, True)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("news", {"worker": 1, "seen": -1, "wait": 0}),
        ("halt", {}),
        ("arrive", {"worker": 1, "halt": 1, "state": {}}),
        ("leave", {"worker": 1, "state": {}}),
        ("gathered", {"wait": 0}),
        ("release", {}),
        ("stop", {"reason": "x"}),
        ("saved", {"halt": 1}),
        ("over", {}),
        ("open", {"start": {}}),
    ],
)
def test_of_an_earlier_run_nothing_is_taken(running: Caller, name: str, body: dict[str, Any]) -> None:
    running("begin", run="another", num_workers=3)
    with pytest.raises(ClusterError, match="this run is over"):
        running(name, run="r", **body)


def test_who_waits_for_news_of_a_run_that_is_replaced_hears_of_it(running: Caller) -> None:
    seen = running("news", run="r", worker=1, seen=-1, wait=0)["version"]
    errors: list[Exception] = []

    def ask() -> None:
        try:
            running("news", run="r", worker=1, seen=seen, wait=PATIENT)
        except ClusterError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    running("begin", run="another", num_workers=3)
    thread.join(PATIENT)
    assert len(errors) == 1
