"""Where the data hands out work, the meeting lets workers come and go."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from runtime.test_service import NOT_YET, Caller, Clock, state

from monolith.errors import ConfigError, UnavailableError
from monolith.runtime.coordinator import Start, WorkerState
from monolith.runtime.fleet_news import Departures
from monolith.runtime.messages import Departure
from monolith.runtime.service import CoordinationService
from monolith.wire.messages import write_message

BEGUN = tuple({"next": 0, "worker": worker} for worker in range(4))
START = write_message(Start(step=7, positions=BEGUN, hands_out=True))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=[False, True], ids=["exact", "keep going"])
def call(request: pytest.FixtureRequest, clock: Clock) -> Caller:
    call = Caller(CoordinationService(2, max_workers=4, lost_after=timedelta(seconds=10), clock=clock))
    call("begin", run="r", num_workers=2, max_workers=4, keep_going=request.param)
    call("open", run="r", start=START)
    return call


def keeps_going(clock: Clock) -> Caller:
    call = Caller(CoordinationService(2, max_workers=4, lost_after=timedelta(seconds=10), clock=clock))
    call("begin", run="r", num_workers=2, max_workers=4, keep_going=True)
    call("open", run="r", start=START)
    return call


def gathered(call: Caller, **more: Any) -> dict[str, Any]:
    return call("gathered", run="r", **more)


def leave(call: Caller, worker: int, number: int) -> None:
    call("leave", run="r", worker=worker, state=state(number), gives_back=True, member="process")


def test_no_process_waits_for_a_worker_that_has_not_joined(call: Caller) -> None:
    call("halt", run="r")
    assert gathered(call)["missing"] == []
    assert gathered(call, left=True)["missing"] == []


def test_a_worker_beyond_those_that_began_joins_and_is_waited_for(call: Caller) -> None:
    joined = call.join(3)
    assert (joined["run"], joined["start"]["step"]) == ("r", 7)
    assert joined["state"]["position"] == BEGUN[3]
    call("halt", run="r")
    assert gathered(call)["missing"] == [3]
    with pytest.raises(ConfigError, match="there is no worker 4 of 4"):
        call.join(4)


def test_no_worker_joins_while_a_snapshot_is_taken(call: Caller) -> None:
    call("halt", run="r")
    assert call.join(1) == NOT_YET
    call("release", run="r")
    assert call.join(1)["run"] == "r"


def test_a_worker_that_leaves_work_waits_until_it_is_given_back_and_is_forgotten_then(call: Caller) -> None:
    call.join(1)
    leave(call, 1, 5)
    leave(call, 1, 5)  # said twice
    assert call.news(0)["departing"] == {"1": {"number": 1, "state": state(5)}}
    assert call.join(1, member="next") == NOT_YET, "its work is not the others' yet"
    call("halt", run="r")
    assert gathered(call)["missing"] == []
    assert gathered(call)["states"] == {"1": state(5)}
    call("release", run="r")
    left = {**state(5), "position": {"next": None}}
    call("given_back", run="r", worker=1, number=1, state=left)
    assert call.news(0)["departing"] == {}
    call("halt", run="r")
    assert gathered(call)["states"] == {"1": left}, "what it has trained still counts"
    call("release", run="r")
    assert call.join(1, member="next")["state"] == left
    call("given_back", run="r", worker=1, number=1, state=state(9))
    assert call.news(0)["present"] == [1], "old news change nothing"


def test_a_worker_whose_work_was_given_back_does_not_count_as_there_when_it_says_something(
    call: Caller,
) -> None:
    call.join(1)
    leave(call, 1, 5)
    call("given_back", run="r", worker=1, number=1, state=state(5))
    with pytest.raises(UnavailableError):
        call("news", run="r", worker=1, seen=-1, member="process")
    assert call.news(0)["present"] == []


def test_a_lost_worker_departs_with_what_it_had_saved_and_is_fenced(clock: Clock) -> None:
    call = keeps_going(clock)
    call.join(1)
    call("news", run="r", worker=1, seen=-1, member="process", examples=30)
    call("leave", run="r", worker=1, member="process", failure="server 1 is gone", lost=True)
    assert call.news(0)["departing"] == {"1": {"number": 1, "state": None}}
    for name, more in {
        "news": {"seen": -1},
        "arrive": {"halt": 1, "state": state()},
        "leave": {"failure": "it was only slow"},
    }.items():
        with pytest.raises(UnavailableError, match="worker 1 was taken for lost"):
            call(name, run="r", worker=1, member="process", **more)
    clock.now += 4
    call("given_back", run="r", worker=1, number=1, state=state(0))
    (returned,) = call.news(0)["returned"]
    assert returned == {"worker": 1, "records": 30, "seconds": 4.0, "by_others": True}
    assert call.news(0)["failure"] is None


def test_a_worker_that_restarts_before_it_is_missed_waits_until_its_work_is_given_back(clock: Clock) -> None:
    call = keeps_going(clock)
    call.join(1)
    assert call.join(1, member="next") == NOT_YET
    assert call.news(0)["departing"] == {"1": {"number": 1, "state": None}}
    call("given_back", run="r", worker=1, number=1, state=state(0))
    assert call.join(1, member="next")["run"] == "r"


def test_what_was_said_before_work_was_given_back_is_not_saved_after(clock: Clock) -> None:
    call = keeps_going(clock)
    call.join(1)
    halt = call("halt", run="r")["halt"]
    call("arrive", run="r", worker=1, halt=halt, state=state(8))
    call("release", run="r")
    call.join(1, member="next")  # so it is lost while the checkpoint is written
    blank = state(0)
    call("given_back", run="r", worker=1, number=1, state=blank)
    call("saved", run="r", halt=halt, state=state(1))
    assert call.join(1, member="next")["state"] == blank


def test_a_service_that_takes_over_waits_for_the_earlier_members_only(clock: Clock) -> None:
    call = Caller(CoordinationService(2, max_workers=4, lost_after=timedelta(seconds=10), clock=clock))
    departing = {"2": {"number": 6, "state": state(2)}}
    about = {"present": [1], "departing": departing, "departures": 6, "gone": {"3": state(3)}}
    call("begin", run="r", num_workers=2, max_workers=4, keep_going=True, halts=4, **about)
    call("open", run="r", start=START)
    call("halt", run="r")
    assert gathered(call)["missing"] == [1]
    assert gathered(call)["states"] == {"2": state(2), "3": state(3)}
    stranger = call("back", run="r", worker=3, member="process", step=9)
    assert stranger["failed"]["why"] == "the run was restarted without this worker"
    assert call("back", run="r", worker=1, member="process", step=9)["run"] == "r"


# Where the chief deals the work out


def test_a_worker_that_is_lost_together_with_server_0_departs(clock: Clock) -> None:
    call = keeps_going(clock)
    call.join(1)
    call("news", run="r", worker=1, member="process", seen=-1, wait=0, examples=9)
    news = call.news(0)
    told = {key: news[key] for key in ("present", "joined", "trained")}
    other = Caller(CoordinationService(2, max_workers=4, clock=clock))
    begin = {"run": "r", "num_workers": 2, "max_workers": 4, "keep_going": True}
    other("begin", **begin, **told, safe={"1": state(6)})
    other("open", run="r", start=START)
    assert other.join(1, "another process") == NOT_YET, "the work of the lost one comes first"
    assert list(other.news(0)["departing"]) == ["1"]
    other("given_back", run="r", worker=1, number=1, state=state(6))
    assert other.join(1, "another process")["run"] == "r"
    (lost,) = other.news(0)["returned"]
    assert (lost["worker"], lost["records"], lost["by_others"]) == (1, 3, True)


def test_a_worker_whose_work_was_given_back_before_server_0_was_lost_is_not_reported(clock: Clock) -> None:
    call = keeps_going(clock)
    call.join(1)
    leave(call, 1, 5)
    call("given_back", run="r", worker=1, number=1, state=state(5))
    news = call.news(0)
    told = {key: news[key] for key in ("present", "trained")}
    other = Caller(CoordinationService(2, max_workers=4, clock=clock))
    begin = {"run": "r", "num_workers": 2, "max_workers": 4, "keep_going": True, "joined": [1]}
    other("begin", **begin, **told, gone={"1": state(5)})
    other("open", run="r", start=START)
    assert other.join(1, "another process")["run"] == "r"
    assert other.news(0)["returned"] == []


def arrived(call: Caller, number: int) -> int:
    """Have workers 1 and 2 stand still; return the number of the halt."""
    halt: int = call("halt", run="r")["halt"]
    for worker in (1, 2):
        call("arrive", run="r", worker=worker, halt=halt, state=state(number + worker), member="process")
    return halt


def dealt(*workers: int) -> dict[str, Any]:
    return {str(worker): state(10 * worker) for worker in workers}


def test_each_worker_is_told_what_it_was_dealt_when_it_may_continue(call: Caller) -> None:
    call.join(1)
    call.join(2)
    halt = arrived(call, 0)
    assert gathered(call, halt=halt)["here"] == [1, 2]
    assert call.news(1)["dealt"] is None
    assert call("deal", run="r", halt=halt, states=dealt(0, 1, 2))["taken"]
    call("release", run="r")
    for worker in (1, 2):
        heard = call.news(worker)
        assert heard["halt"] is None
        assert heard["dealt"] == {"halt": halt, "position": {"next": 10 * worker}}


def test_a_deal_while_no_worker_is_paused_is_ignored(call: Caller) -> None:
    call.join(1)
    call.join(2)
    halt = arrived(call, 0)
    call("release", run="r")
    assert not call("deal", run="r", halt=halt, states=dealt(0, 1, 2))["taken"]
    call("halt", run="r")
    assert not call("deal", run="r", halt=halt, states=dealt(0, 1, 2))["taken"]
    assert call.news(1)["dealt"] is None


def test_a_departed_worker_has_nothing_when_its_work_was_dealt_to_others(call: Caller) -> None:
    call.join(1)
    call.join(2)
    leave(call, 2, 5)
    halt = arrived(call, 0)
    blank = state(0)
    given = [{"run": "r", "worker": 2, "number": 1, "state": blank}]
    for _ in range(2):  # it may be said twice
        assert call("deal", run="r", halt=halt, states=dealt(0, 1), given=given)["taken"]
    assert gathered(call)["states"] == {"1": state(10), "2": blank}, "what a checkpoint keeps from now on"
    call("release", run="r")
    assert call.news(0)["departing"] == {}
    assert call.join(2, member="next")["state"] == blank
    assert call.news(2)["dealt"] is None


def test_what_was_said_before_work_was_dealt_out_is_not_saved_after(clock: Clock) -> None:
    call = keeps_going(clock)
    call.join(1)
    call.join(2)
    before = arrived(call, 0)
    call("release", run="r")
    halt = arrived(call, 5)
    call("deal", run="r", halt=halt, states=dealt(0, 1, 2))
    call("release", run="r")
    call("saved", run="r", halt=before, state=state(1))
    assert call("resume", run="r", member="chief")["safe"] == dealt(0, 1, 2)
    after = arrived(call, 50)
    call("saved", run="r", halt=after, state=state(60))
    expected = {"0": state(60), "1": state(51), "2": state(52)}
    assert call("resume", run="r", member="chief")["safe"] == expected


def test_a_meeting_that_takes_over_says_what_was_dealt(clock: Clock) -> None:
    call = Caller(CoordinationService(2, max_workers=4, lost_after=timedelta(seconds=10), clock=clock))
    mine = {"halt": 4, "position": {"next": 7}}
    call(
        "begin",
        run="r",
        num_workers=2,
        max_workers=4,
        keep_going=True,
        halts=4,
        present=[1],
        dealt={"1": mine},
    )
    call("open", run="r", start=START)
    call("back", run="r", worker=1, member="process", step=9)
    assert call.news(1)["dealt"] == mine


# What the chief knows of them


def worker_state(examples: int) -> WorkerState:
    return WorkerState(position={"next": examples}, examples=examples, skipped=0, event_time=None)


def test_a_departure_is_saved_with_the_moment_that_was_cut_after_it() -> None:
    known = Departures()
    left = Departure(1, worker_state(5))
    known.note_cut(1, [])
    known.note_heard({2: left})
    known.note_cut(2, [left])
    known.note_saved(1)
    assert not known.is_saved(1)
    known.note_saved(2)
    assert known.is_saved(1)
    assert known.due == [(2, left)]


def test_old_news_of_a_departure_is_ignored() -> None:
    known = Departures()
    lost = Departure(1)
    known.note_heard({2: lost})
    known.note_given(2, worker_state(0), halt=3)
    known.note_heard({2: lost})
    assert known.due == []
    assert known.still_said({"1": worker_state(1), "2": worker_state(2)}, 3) == {"1": worker_state(1)}
    assert known.still_said({"2": worker_state(2)}, 4) == {"2": worker_state(2)}
    known.note_heard({2: Departure(2)})
    assert known.due == [(2, Departure(2))]


def test_what_workers_said_before_they_were_dealt_other_work_counts_no_more() -> None:
    known = Departures()
    known.note_dealt([0, 2], halt=3)
    said = {"0": worker_state(0), "1": worker_state(1), "2": worker_state(2)}
    assert known.still_said(said, 3) == {"1": worker_state(1)}
    assert known.still_said(said, 4) == said
