"""How a worker learns what the other processes do."""

from __future__ import annotations

import threading
from typing import Any

from monolith.runtime.fleet_news import FleetNews
from monolith.runtime.messages import News
from monolith.wire.messages import write_message

PATIENT = 60.0


class Server0:
    """A group whose server 0 always has the same news."""

    def __init__(self) -> None:
        self.given_up = threading.Event()

    def call(self, *_: Any, **__: Any) -> dict[str, Any]:
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
