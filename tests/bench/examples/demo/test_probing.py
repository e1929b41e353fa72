"""Asking a server again and again: every answer is taken down, and every failure."""

from __future__ import annotations

import queue
from itertools import count

import pytest

from monolith.errors import UnavailableError
from monolith_bench.examples.demo.probing import Prober
from monolith_bench.examples.demo.story import ProbeAnswer


class Server:
    """Answers what it is told to, and says when it was asked."""

    def __init__(self, *outcomes: tuple[float, float, int] | Exception) -> None:
        self._outcomes = list(outcomes)
        self.done: queue.Queue[None] = queue.Queue()

    def ask(self) -> tuple[float, float, int]:
        if not self._outcomes:
            self.done.put(None)
            return 0.0, 0.0, 0
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def test_answers_come_in_order_with_their_times() -> None:
    server, clock = Server((0.25, 0.2, 7), (0.5, 0.2, 8)), count(100)
    with Prober(server.ask, every=0.0, clock=lambda: float(next(clock))) as prober:
        server.done.get(timeout=60)
        first, second = prober.answers[:2]
    assert first == ProbeAnswer(at=100.0, score=0.25, unknown=0.2, step=7)
    assert second == ProbeAnswer(at=101.0, score=0.5, unknown=0.2, step=8)


@pytest.mark.parametrize("failure", [ConnectionRefusedError("gone"), UnavailableError("not now")])
def test_a_missing_answer_is_recorded_and_probing_continues(failure: Exception) -> None:
    server = Server((0.25, 0.2, 7), failure, (0.5, 0.2, 8))
    with Prober(server.ask, every=0.0) as prober:
        server.done.get(timeout=60)
        scores = [one.score for one in prober.answers[:3]]
    assert scores == [0.25, None, 0.5]
