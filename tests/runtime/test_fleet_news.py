"""How a worker learns what the other processes do."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

from monolith.runtime.cluster_config import ClusterConfig, TimeoutsConfig
from monolith.runtime.coordinator import Start
from monolith.runtime.fleet import Fleet
from monolith.runtime.fleet_news import FleetNews
from monolith.runtime.messages import Joined, News
from monolith.wire.messages import write_message

PATIENT = 60.0


class Server0:
    """A group whose server 0 always has the same news."""

    def __init__(self) -> None:
        self.given_up = threading.Event()
        self.was_asked, self.asked = threading.Event(), list[float]()

    def __len__(self) -> int:
        return 1

    def expect(self, run: str) -> None:
        pass

    def call(self, _: int, name: str, **body: Any) -> dict[str, Any]:
        if name == "meeting.join":
            return write_message(Joined("r", Start(step=0)))
        if name == "meeting.news":
            self.asked.append(body["wait"])
            self.was_asked.set()
        return write_message(News(1, halt=1, stop=None, unfinished=False, failure=None, saved=0, over=False))

    def give_up(self, _: Exception) -> None:
        self.given_up.set()


class Broken:
    """A policy that fails in a way that nobody expected."""

    def take(self, _: Any) -> None:
        raise ZeroDivisionError("nobody expected this")


def test_an_error_of_the_thread_that_asks_reaches_the_training_thread() -> None:
    group: Any = Server0()
    policy: Any = Broken()
    news = FleetNews(group, "r", 1, 0.01, member="m", mending=policy)
    assert group.given_up.wait(PATIENT), "requests that wait for a server end, too"
    for _ in range(1000):
        try:
            news.check()
        except ZeroDivisionError:
            return
        threading.Event().wait(0.01)
    raise AssertionError("the training thread would wait forever")


def test_a_worker_reports_several_times_in_the_silence_after_which_it_is_lost() -> None:
    group: Any = Server0()
    timeouts = TimeoutsConfig(silence=timedelta(seconds=6))
    fleet = Fleet(group, ClusterConfig(role="worker", index=1, num_workers=2), timeouts)
    assert fleet.join() is not None
    assert group.was_asked.wait(PATIENT)
    fleet.fail("the test is over", final=False)
    assert max(group.asked) <= 2.0
