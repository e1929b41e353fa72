"""Workers agree on when to begin, halt and end, by calls that come over a network."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from monolith.errors import ClusterError, ConfigError, RequestError
from monolith.runtime.coordinator import Start
from monolith.runtime.messages import CALLS, AskNews, BeginService, Joined
from monolith.runtime.service import CoordinationService
from monolith.wire.messages import typed_calls, typed_polls, write_message

PATIENT = 60.0
START = write_message(Start(step=7, positions=({"next": 3},)))
NOT_YET = write_message(Joined())


def state(number: int = 0) -> dict[str, Any]:
    return {"position": {"next": number}, "examples": number, "skipped": 0, "event_time": None, "heads": []}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Caller:
    """Calls as over a network: what goes in and comes out is JSON."""

    def __init__(self, meeting: CoordinationService) -> None:
        self.meeting = meeting
        self._calls = typed_calls(CALLS, meeting.calls)
        self._polls = typed_polls(CALLS, meeting.polls)
        self.gone: set[int] = set()
        """Workers whose connections are broken."""

    def __call__(self, name: str, **body: Any) -> dict[str, Any]:
        sent, name = json.loads(json.dumps(body)), f"meeting.{name}"
        if name in self._polls:
            return json.loads(json.dumps(self._polls[name](sent, lambda: body["worker"] in self.gone)))
        return json.loads(json.dumps(self._calls[name](sent)))

    def join(self, worker: int, member: str = "process", known: str = "", wait: float = 0) -> dict[str, Any]:
        return self("join", worker=worker, member=member, known=known, wait=wait)

    def news(self, worker: int) -> dict[str, Any]:
        return self("news", run="r", worker=worker, seen=-1, wait=0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def call(clock: Clock) -> Caller:
    return Caller(CoordinationService(3, lost_after=timedelta(seconds=10), clock=clock))


@pytest.fixture
def running(call: Caller) -> Caller:
    call("begin", run="r", num_workers=3)
    call("open", run="r", start=START)
    return call


def in_thread(call: Caller, name: str, **body: Any) -> tuple[threading.Thread, list[dict[str, Any]]]:
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(call(name, **body)))
    thread.start()
    return thread, answers


def test_a_worker_begins_when_the_chief_has_restored(call: Caller) -> None:
    assert call.join(1) == NOT_YET
    call("begin", run="r", num_workers=3)
    assert call.join(1) == NOT_YET
    thread, answers = in_thread(call, "join", worker=1, member="process", known="", wait=PATIENT)
    call("open", run="r", start=START)
    thread.join(PATIENT)
    assert answers == [{**NOT_YET, "run": "r", "start": START}]


@pytest.mark.parametrize("final", [True, False])
def test_a_worker_that_waits_to_begin_is_told_that_the_chief_failed(
    call: Caller, clock: Clock, final: bool
) -> None:
    call("begin", run="r", num_workers=3)
    call("leave", run="r", worker=0, failure="no checkpoint", final=final)
    clock.now += 3
    why = {"run": "r", "why": "worker 0 failed: no checkpoint", "final": final, "ago": 3.0}
    assert call.join(1, wait=PATIENT) == {**NOT_YET, "failed": why}


def test_a_process_of_a_failed_run_waits_for_the_next(running: Caller) -> None:
    running("leave", run="r", worker=2, failure="no memory")
    assert running.join(1, known="r") == NOT_YET
    running("begin", run="next", num_workers=3)
    running("open", run="next", start={"step": 3, "positions": []})
    assert running.join(1, known="r") == {**NOT_YET, "run": "next", "start": write_message(Start(step=3))}


def test_a_worker_that_joins_twice_restarted_and_the_run_has_failed(running: Caller) -> None:
    assert running.join(1, "first process")["run"] == "r"
    assert running.join(1, "first process")["run"] == "r", "an answer was lost, and it asked again"
    assert running.join(1, "second process")["failed"]["why"] == "worker 1 restarted"
    assert running.news(0)["failure"] == "worker 1 restarted"


def test_a_process_that_was_replaced_is_told_to_end_when_it_joins_again(running: Caller) -> None:
    def join(member: str, process: str) -> dict[str, Any]:
        return running("join", worker=1, member=member, process=process)

    assert join("first attempt", "one")["run"] == "r"
    assert join("second attempt", "one")["failed"], "it restarted, and nothing else has its place"
    assert not join("of another process", "two")["replaced"]
    assert join("third attempt", "one") == {**NOT_YET, "replaced": True}
    assert running("join", worker=2, member="other", process="one")["replaced"] is False


def test_the_service_of_another_server_0_knows_which_processes_were_replaced(running: Caller) -> None:
    for process in ("one", "two"):
        running("join", worker=1, member=f"of {process}", process=process)
    following = Caller(CoordinationService(3))
    asked = {"worker": 1, "member": "again", "process": "one"}
    assert following("join", **asked) == NOT_YET, "it waits for the run"
    following("begin", run="r", num_workers=3, trained=running.news(0)["trained"])
    assert following("join", **asked) == {**NOT_YET, "replaced": True}


def test_a_worker_that_restarts_when_its_work_is_done_waits_for_the_end(running: Caller) -> None:
    running.join(1, "first process")
    running("leave", run="r", worker=1, state=state())
    assert running.join(1, "second process") == NOT_YET
    assert running.news(0)["failure"] is None
    running("over", run="r", wait=0)
    assert running.join(1, "second process") == {**NOT_YET, "over": True}


def test_all_processes_count_the_same_workers(call: Caller) -> None:
    with pytest.raises(ConfigError, match="the chief counts 2 workers and server 0 3"):
        call("begin", run="r", num_workers=2)
    with pytest.raises(ConfigError, match="there is no worker 3 of 3"):
        call.join(3)
    with pytest.raises(ConfigError, match="at least 1"):
        CoordinationService(0)


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
    running("arrive", run="r", worker=1, halt=first, state=state())
    assert running("halt", run="r")["halt"] == first
    assert running("gathered", run="r", wait=0)["missing"] == [2]


def test_the_chief_gathers_the_states_of_workers_that_arrived_or_left(running: Caller) -> None:
    halt = running("halt", run="r")["halt"]
    thread, answers = in_thread(running, "gathered", run="r", wait=PATIENT)
    running("leave", run="r", worker=2, state=state(2))
    running("arrive", run="r", worker=1, halt=halt, state=state(1))
    thread.join(PATIENT)
    assert answers[0]["missing"] == []
    assert answers[0]["states"] == {"1": state(1), "2": state(2)}
    assert running("gathered", run="r", wait=0, left=True)["missing"] == [1]


def test_a_process_that_arrives_late_at_a_released_pause_is_not_waited_for(running: Caller) -> None:
    old = running("halt", run="r")["halt"]
    running("release", run="r")
    running("halt", run="r")
    running("arrive", run="r", worker=1, halt=old, state=state())
    assert running("gathered", run="r", wait=0)["missing"] == [1, 2]


def test_a_worker_that_never_joined_is_missing_and_not_lost(running: Caller, clock: Clock) -> None:
    running.join(1)
    running("halt", run="r")
    clock.now += 1000
    gathered = running("gathered", run="r", wait=0)
    assert (gathered["missing"], gathered["absent"], gathered["failure"]) == ([1, 2], [2], None)


def failure(running: Caller, clock: Clock, seconds: float, by: int = 0, tick: int = 1) -> str | None:
    """Return why the run fails in so many seconds, in which one worker waits for news all the time."""
    seen = running.news(by)["version"]
    thread, answers = in_thread(running, "news", run="r", worker=by, seen=seen, wait=PATIENT)
    for _ in range(round(seconds / tick)):
        clock.now += tick
        thread.join(0.3)  # it looks five times a second
        if not thread.is_alive():
            break
        running("saved", run="r", halt=0)
        thread.join(PATIENT)
        if answers[0]["failure"]:
            break
        seen = answers[0]["version"]
        thread, answers = in_thread(running, "news", run="r", worker=by, seen=seen, wait=PATIENT)
    running("saved", run="r", halt=0)
    thread.join(PATIENT)
    return answers[0]["failure"]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_worker_whose_connection_broke_is_lost_within_seconds(
    running: Caller, clock: Clock, lost: int
) -> None:
    running.join(1)
    running.gone.add(lost)
    running("news", run="r", worker=lost, seen=running.news(lost)["version"], wait=PATIENT)
    who = "worker 0, the chief," if lost == 0 else "worker 1"
    assert failure(running, clock, 5, by=1 - lost) == f"{who} was lost: its connection broke. See its log."


def test_a_worker_that_connects_again_in_time_is_not_lost(running: Caller, clock: Clock) -> None:
    running.gone.add(1)
    running("news", run="r", worker=1, seen=running.news(1)["version"], wait=PATIENT)
    clock.now += 1
    running.gone.clear()
    running.news(1)
    assert failure(running, clock, 5) is None


def test_a_worker_that_asks_again_before_its_broken_connection_is_noticed_is_not_lost(
    running: Caller, clock: Clock
) -> None:
    running.join(1)
    body = {"run": "r", "worker": 1, "seen": running.news(1)["version"], "wait": PATIENT}
    broken = threading.Event()

    def ask(connection_is_broken: Callable[[], bool]) -> threading.Thread:
        """Ask for news on a thread of its own; return when the service waits."""
        waits = threading.Event()

        def gone() -> bool:
            waits.set()
            return connection_is_broken()

        poll = typed_polls(CALLS, running.meeting.polls)["meeting.news"]
        thread = threading.Thread(target=lambda: poll(dict(body), gone))
        thread.start()
        assert waits.wait(PATIENT)
        return thread

    first = ask(broken.is_set)
    second = ask(lambda: False)
    broken.set()
    first.join(PATIENT)
    assert failure(running, clock, 5) is None
    second.join(PATIENT)


def test_a_worker_that_is_only_slow_is_not_lost_and_one_that_is_silent_for_long_is(
    running: Caller, clock: Clock
) -> None:
    running.news(1)
    assert failure(running, clock, 9) is None
    assert (
        failure(running, clock, 3)
        == "worker 1 was lost: it has been silent for 11 s (timeouts.silence). See its log."
    )


@pytest.mark.parametrize("silence", [20, 40])
def test_the_setting_alone_decides_when_a_silent_worker_is_lost(clock: Clock, silence: int) -> None:
    call = Caller(CoordinationService(3, lost_after=timedelta(seconds=silence), clock=clock))
    call("begin", run="r", num_workers=3)
    call("open", run="r", start=START)
    call.news(1)  # answered: no connection breaks if it dies now, or hangs
    tick = silence // 10  # below STOPPED_FOR
    assert failure(call, clock, silence, tick=tick) is None
    lost = f"worker 1 was lost: it has been silent for {silence + tick} s (timeouts.silence). See its log."
    assert failure(call, clock, 2 * tick, tick=tick) == lost


def test_no_worker_is_lost_because_the_service_itself_was_stopped(running: Caller, clock: Clock) -> None:
    running.news(1)
    clock.now += 90
    assert failure(running, clock, 9) is None


def test_concurrent_waiters_look_for_lost_workers_once_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand who wait would look at a thousand workers each, five times a second."""
    clock, looks, asked = Clock(), list[float](), Counter[int]()
    monkeypatch.setattr(CoordinationService, "_check_all", lambda _, __, now, **___: looks.append(now))
    meeting = CoordinationService(3, clock=clock)
    meeting.calls["meeting.begin"](BeginService("r", 3))
    waiting, began = threading.Semaphore(0), clock.now

    def wait(worker: int) -> None:
        def gone() -> bool:
            asked[worker] += 1
            if asked[worker] == 3:
                waiting.release()
            return asked[worker] == 4

        meeting.polls["meeting.news"](AskNews("r", worker, 1, PATIENT), gone)

    threads = [threading.Thread(target=wait, args=[worker]) for worker in range(3)]
    clock.now += 0.25
    for thread in threads:
        thread.start()
    assert all(waiting.acquire(timeout=PATIENT) for _ in threads)
    assert looks == [began + 0.25]
    for thread in threads:
        thread.join(PATIENT)


def test_a_worker_that_has_left_may_be_silent(running: Caller, clock: Clock) -> None:
    running.news(1)
    running("leave", run="r", worker=1, state=state())
    assert failure(running, clock, 14) is None


def test_a_failure_ends_the_run_for_all(running: Caller) -> None:
    thread, answers = in_thread(running, "gathered", run="r", wait=PATIENT)
    running("leave", run="r", worker=2, failure="no memory")
    running("leave", run="r", worker=1, failure="worker 2 failed")
    thread.join(PATIENT)
    assert answers[0]["failure"] == "worker 2 failed: no memory"
    assert running("news", run="r", worker=0, seen=-1, wait=0)["failure"] == "worker 2 failed: no memory"


def test_all_processes_are_told_of_a_stop_of_saves_and_of_the_end(running: Caller) -> None:
    running("stop", run="r", reason="SIGTERM", unfinished=True)
    running("stop", run="r", reason="later", unfinished=False)
    running("saved", run="r", halt=2)
    running("saved", run="r", halt=1)
    assert running("over", run="r", wait=0) == {"untold": [], "unfinished": True}
    news = running("news", run="r", worker=1, seen=-1, wait=0)
    assert (news["stop"], news["saved"], news["over"]) == ("SIGTERM", 2, True)
    assert news["unfinished"]


def test_the_chief_knows_which_workers_have_not_been_told_of_the_end(running: Caller) -> None:
    running.join(1)
    running.join(2)
    running.news(1)
    assert running("over", run="r", wait=0)["untold"] == [1, 2]
    running.news(1)
    assert running("over", run="r", wait=0)["untold"] == [2]
    thread, answers = in_thread(running, "over", run="r", wait=PATIENT)
    running.news(2)
    thread.join(PATIENT)
    assert answers[0]["untold"] == []


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("news", {"worker": 1, "seen": -1, "wait": 0}),
        ("halt", {}),
        ("arrive", {"worker": 1, "halt": 1, "state": state()}),
        ("leave", {"worker": 1, "state": state()}),
        ("gathered", {"wait": 0}),
        ("release", {}),
        ("stop", {"reason": "x", "unfinished": False}),
        ("saved", {"halt": 1}),
        ("over", {"wait": 0}),
        ("open", {"start": START}),
    ],
)
def test_of_an_earlier_run_nothing_is_taken(running: Caller, name: str, body: dict[str, Any]) -> None:
    running("begin", run="another", num_workers=3)
    with pytest.raises(ClusterError, match="this run is over"):
        running(name, run="r", **body)


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("open", {"start": {"step": 7, "place": 1}}, "start.place: unknown key"),
        ("open", {"start": {"positions": []}}, "start.step is missing"),
        ("open", {"start": {"step": 7, "positions": [3]}}, r"start.positions\[0\]: expected object"),
        ("arrive", {"worker": 1, "halt": 1, "state": {"examples": 1}}, "state.position is missing"),
        (
            "arrive",
            {"worker": 1, "halt": 1, "state": {**state(), "examples": -1}},
            "state.examples: expected",
        ),
        ("leave", {"worker": 1}, "state: it is missing"),
        ("halt", {"worker": 1}, "worker: unknown key"),
    ],
)
def test_a_message_of_a_worker_is_checked_before_it_is_passed_to_others(
    running: Caller, name: str, body: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        running(name, run="r", **body)


def test_a_process_that_waits_for_news_of_a_replaced_run_is_told(running: Caller) -> None:
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


# What was lost with servers


SERVED = {"address": "h:1", "incarnation": "next", "copied": {"one": {"highest": 3}, "two": {"highest": 9}}}


def pushes(sender: str, last: int, incarnation: str = "r") -> dict[str, Any]:
    return {"sender": sender, "places": [{"incarnation": "r"}, {"incarnation": incarnation, "last": last}]}


def updates(call: Caller, wait: float = 0) -> tuple[int, list[int], list[int]]:
    """How many are lost, who may still say, and who was lost."""
    answer = call("updates", run="r", incarnation="next", wait=wait)
    return answer["updates"], answer["missing"], answer["lost"]


@pytest.fixture
def training(call: Caller) -> Caller:
    call("begin", run="r", num_workers=3, keep_going=True)
    call("open", run="r", start=START)
    for worker in (1, 2):
        call.join(worker)
    return call


def test_every_worker_says_what_it_has_lost_with_a_server(training: Caller) -> None:
    training("served", run="r", server=1, served=SERVED)
    assert updates(training) == (0, [1, 2], [])
    training("lost", run="r", worker=1, incarnation="next", updates=4)
    asked, answers = in_thread(training, "updates", run="r", incarnation="next", wait=PATIENT)
    training("lost", run="r", worker=2, incarnation="next", updates=3)
    asked.join(PATIENT)
    assert [(one["updates"], one["missing"]) for one in answers] == [(7, [])]


@pytest.mark.parametrize("before", [True, False])
def test_a_worker_that_left_is_counted_by_what_it_left_with(training: Caller, before: bool) -> None:
    said = [
        ("leave", {"worker": 1, "state": state(), "pushes": pushes("one", 8)}),
        ("served", {"server": 1, "served": SERVED}),
    ]
    for name, body in said if before else reversed(said):
        training(name, run="r", **body)
    assert updates(training) == (5, [2], [])
    training("lost", run="r", worker=1, incarnation="next", updates=6)
    assert updates(training) == (5, [2], []), "it said so twice"


def test_a_departed_worker_is_counted_though_it_is_gone(call: Caller) -> None:
    call("begin", run="r", num_workers=3, keep_going=True)
    call("open", run="r", start={**START, "hands_out": True})
    call.join(1)
    call("leave", run="r", worker=1, state=state(), gives_back=True, pushes=pushes("one", 8))
    call("given_back", run="r", worker=1, number=1, state=state())
    call("served", run="r", server=1, served=SERVED)
    assert updates(call) == (5, [], [])


def test_a_worker_that_was_lost_as_well_is_named_and_not_waited_for(training: Caller) -> None:
    training("served", run="r", server=1, served=SERVED)
    training("lost", run="r", worker=2, incarnation="next", updates=3)
    training("leave", run="r", worker=1, failure="it broke", lost=True)
    assert updates(training, wait=PATIENT) == (3, [], [1])


def test_a_worker_that_joins_after_a_loss_has_lost_nothing(training: Caller) -> None:
    training("served", run="r", server=1, served=SERVED)
    training("lost", run="r", worker=2, incarnation="next", updates=3)
    training("leave", run="r", worker=1, failure="it broke", lost=True)
    training.join(1, "another process")
    assert updates(training) == (3, [], [])


def test_a_service_that_takes_over_waits_for_the_earlier_participants(training: Caller) -> None:
    """Nobody has come back yet, and the chief asks at once what was lost with server 0."""
    training("leave", run="r", worker=1, state=state(), pushes=pushes("one", 8))
    news = training.news(0)
    assert (news["joined"], list(news["pushes"])) == ([1, 2], ["1"])
    assert (training.news(2)["joined"], training.news(2)["pushes"]) == ([], {}), "only the chief needs it"
    other = Caller(CoordinationService(3))
    told = {key: news[key] for key in ("joined", "pushes")}
    other("begin", run="r", num_workers=3, keep_going=True, servers={"1": SERVED}, **told)
    other("open", run="r", start=START)
    assert updates(other) == (5, [2], [])
    other("back", run="r", worker=2, member="process", step=9, lost={"next": 3})
    assert updates(other) == (8, [], []), "what it had told the meeting that was lost"


def test_a_worker_that_left_and_was_lost_with_server_0_does_not_train_again(training: Caller) -> None:
    training("leave", run="r", worker=1, state=state(6), pushes=pushes("one", 8))
    news = training.news(0)
    assert news["left"] == {"1": state(6)}
    assert training.news(2)["left"] == {}, "only the chief needs it"
    other = Caller(CoordinationService(3))
    told = {key: news[key] for key in ("joined", "pushes", "left")}
    other("begin", run="r", num_workers=3, keep_going=True, **told)
    other("open", run="r", start=START)
    assert other.join(1, "another process") == NOT_YET, "it has nothing to do but learn how the run ends"
    other("back", run="r", worker=2, member="process", step=9)
    gathered = other("gathered", run="r", left=True)
    assert (gathered["missing"], gathered["states"]) == ([2], {"1": state(6)})
    other("over", run="r", wait=0)
    assert other.join(1, "another process")["over"]


def taken_over(lost: Caller, **more: Any) -> Caller:
    """Another service that begins with what the chief knows of a lost one: its news, and its checkpoint."""
    news = lost.news(0)
    told = {key: news[key] for key in ("joined", "pushes", "left", "trained")}
    other = Caller(CoordinationService(3))
    other("begin", run="r", num_workers=3, keep_going=True, **{**told, **more})
    other("open", run="r", start=START)
    return other


def returned(call: Caller) -> list[tuple[int, int | None]]:
    """The workers that were lost, and how many records each trains again."""
    return [(one["worker"], one["records"]) for one in call.news(0)["returned"]]


def trained(call: Caller, worker: int, examples: int) -> None:
    call("news", run="r", worker=worker, member="process", seen=-1, wait=0, examples=examples)


def test_a_worker_that_is_lost_together_with_server_0_is_reported(training: Caller) -> None:
    trained(training, 1, 9)
    assert training.news(0)["trained"]["1"] == {"member": "process", "examples": 9, "processes": []}
    assert training.news(2)["trained"] == {}, "only the chief needs it"
    other = taken_over(training, safe={"1": state(6)})
    assert other.join(1, "another process")["state"] == state(6)
    assert returned(other) == [(1, 3)]
    other("back", run="r", worker=2, member="process", step=9)
    assert returned(other) == [(1, 3)], "worker 2 was never lost"
    assert taken_over(other).news(0)["returned"] == [], "the chief has heard of it"


def test_what_a_worker_has_trained_outlasts_several_servers_0(training: Caller) -> None:
    trained(training, 1, 9)
    third = taken_over(taken_over(training), safe={"1": state(6)})
    third.join(1, "another process")
    assert returned(third) == [(1, 3)]


def test_a_process_that_the_chief_had_not_heard_of_is_back_and_the_one_before_it_reported(
    training: Caller,
) -> None:
    """The service that let it join in place of the lost one was lost before it could say so."""
    trained(training, 1, 9)
    other = taken_over(training, safe={"1": state(6)})
    other("back", run="r", worker=1, member="another process", step=9)
    assert returned(other) == [(1, 3)]


def test_a_worker_of_which_only_the_lost_service_knew_is_reported_as_unknown(training: Caller) -> None:
    other = taken_over(training, joined=[1, 2], trained={})
    other("back", run="r", worker=2, member="process", step=9)
    other.join(1)
    assert returned(other) == [(1, None)]


def test_a_worker_that_joins_for_the_first_time_is_not_reported(call: Caller) -> None:
    call("begin", run="r", num_workers=3, keep_going=True)
    call("open", run="r", start=START)
    call.join(1)
    assert returned(call) == []
