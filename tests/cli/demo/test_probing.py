"""Asking a server again and again: every answer is taken down, and every failure."""

from __future__ import annotations

import queue
from itertools import count

import pytest

from monolith.cli.demo.probing import Prober
from monolith.errors import UnavailableError


class Server:
    """Answers what it is told to, and says when it was asked."""

    def __init__(self, *outcomes: tuple[float, int] | Exception) -> None:
        self._outcomes = list(outcomes)
        self.done: queue.Queue[None] = queue.Queue()

    def ask(self) -> tuple[float, int]:
        if not self._outcomes:
            self.done.put(None)
            return 0.0, 0
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def test_answers_come_in_order_with_their_times() -> None:
    server, clock = Server((0.25, 7), (0.5, 8)), count(100)
    with Prober(server.ask, every=0.0, clock=lambda: float(next(clock))) as prober:
        server.done.get(timeout=60)
        first, second = prober.answers[:2]
    assert (first.at, first.score, first.step) == (100.0, 0.25, 7)
    assert (second.at, second.score, second.step) == (101.0, 0.5, 8)


@pytest.mark.parametrize("failure", [ConnectionRefusedError("gone"), UnavailableError("not now")])
def test_no_answer_is_taken_down_and_asking_goes_on(failure: Exception) -> None:
    server = Server((0.25, 7), failure, (0.5, 8))
    with Prober(server.ask, every=0.0) as prober:
        server.done.get(timeout=60)
        scores = [one.score for one in prober.answers[:3]]
    assert scores == [0.25, None, 0.5]
