"""Long work is started by one call and waited for by others."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import pytest

from monolith.errors import ClusterError, SaveError
from monolith.runtime.messages import CALLS
from monolith.runtime.server_calls import KEPT, Jobs
from monolith.wire.messages import Call, typed_calls

PATIENT = 60.0


def served(jobs: Jobs) -> Mapping[str, Call]:
    """Its calls, as a server answers them."""
    return typed_calls(CALLS, jobs.calls)


def test_work_is_started_once_and_waited_for() -> None:
    go, done = threading.Event(), []

    def double(body: dict[str, Any]) -> dict[str, Any]:
        assert go.wait(PATIENT)
        done.append(body)
        return {"twice": 2 * body["n"]}

    calls = served(Jobs({"tables.write": double}))
    started = {"work": "tables.write", "body": {"n": 4}, "job": "a"}
    assert calls["job.start"](started) == {"job": "a"}
    assert calls["job.wait"]({"job": "a", "wait": 0.01}) == {"done": False, "answer": {}}
    calls["job.start"](started)  # the first answer was lost on the way
    go.set()
    assert calls["job.wait"]({"job": "a", "wait": PATIENT}) == {"done": True, "answer": {"twice": 8}}
    assert done == [{"n": 4}]


def test_an_error_of_the_work_is_raised_in_the_waiting_caller_and_in_one_that_retries() -> None:
    def fail(_: dict[str, Any]) -> dict[str, Any]:
        raise SaveError("no room")

    calls = served(Jobs({"tables.write": fail}))
    job = calls["job.start"]({"work": "tables.write", "body": {}})
    for _ in range(2):
        with pytest.raises(SaveError, match="no room"):
            calls["job.wait"]({**job, "wait": PATIENT})


def test_a_job_that_timed_out_inside_is_not_one_that_is_not_done() -> None:
    def late(_: dict[str, Any]) -> dict[str, Any]:
        raise TimeoutError("the disk did not answer")

    calls = served(Jobs({"tables.write": late}))
    job = calls["job.start"]({"work": "tables.write", "body": {}})
    with pytest.raises(TimeoutError, match="the disk"):
        calls["job.wait"]({**job, "wait": PATIENT})


def test_work_that_is_done_as_its_wait_ends_has_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    class JustInTime(Future[Any]):
        """Is done in the very moment in which whoever waits for its result gives up."""

        def result(self, timeout: float | None = None) -> Any:
            try:
                return super().result(timeout)
            except TimeoutError:
                go.set()
                super().result(PATIENT)
                raise

    monkeypatch.setattr("monolith.runtime.server_calls.Future", JustInTime)
    calls = served(Jobs({"tables.write": lambda _: {"saved": go.wait(PATIENT)}}))
    job = calls["job.start"]({"work": "tables.write", "body": {}})
    answer = calls["job.wait"]({**job, "wait": 0.01})
    go.set()
    if not answer["done"]:
        answer = calls["job.wait"]({**job, "wait": PATIENT})
    assert answer == {"done": True, "answer": {"saved": True}}


def test_old_answers_are_forgotten_and_asking_for_them_is_an_error() -> None:
    calls = served(Jobs({"tables.write": lambda _: {}}))
    for number in range(KEPT + 2):
        calls["job.start"]({"work": "tables.write", "body": {}, "job": str(number)})
        calls["job.wait"]({"job": str(number), "wait": PATIENT})
    with pytest.raises(ClusterError, match="there is no job 0"):
        calls["job.wait"]({"job": "0", "wait": 0})
    assert calls["job.wait"]({"job": str(KEPT + 1), "wait": 0})["done"]
