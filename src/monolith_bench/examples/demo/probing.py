"""Asking a server again and again: what the demo knows of it, it knows as a client does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from monolith.errors import MonolithError
from monolith.serve.client import Client
from monolith_bench.examples.demo.live_stream import NEW_ITEM
from monolith_bench.examples.demo.story import ProbeAnswer

AskScores = Callable[[], tuple[float, float, int]]
"""Returns the served scores of the new item and of an unknown one, and the step they were learned up to."""
UNKNOWN_ITEM = NEW_ITEM + 1
_STRANGER = {"user": NEW_ITEM + 2, "context": NEW_ITEM + 3}
"""The other features of a request: unknown ids, so that only the item can move the score."""


def ask_scores(client: Client, model: str) -> tuple[float, float, int]:
    """Ask a server what a stranger thinks of the new item and of an unknown one, in one request."""
    rows = [{**_STRANGER, "item": item} for item in (NEW_ITEM, UNKNOWN_ITEM)]
    answered = client.predict(model, rows)
    (scores,) = answered.outputs.values()
    return float(scores[0]), float(scores[1]), int(answered.parameters.get("step", 0))


class Prober:
    """Asks in a thread of its own, and takes down every answer and every failure. Used by one other thread.

    Args:
        ask: Raises a MonolithError or an OSError if there is no answer.
        every: Seconds from an answer to the next request.
        clock: Returns Unix seconds.
    """

    def __init__(
        self, ask: AskScores, *, every: float = 0.02, clock: Callable[[], float] = time.time
    ) -> None:
        self._ask = ask
        self._every = every
        self._clock = clock
        self._stop = threading.Event()
        self._answers: list[ProbeAnswer] = []  # only ever added to, by the thread
        self._thread = threading.Thread(target=self._keep_asking, name="prober", daemon=True)

    @property
    def answers(self) -> list[ProbeAnswer]:
        """All answers and failures until now, in order."""
        return self._answers.copy()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _keep_asking(self) -> None:
        while not self._stop.is_set():
            try:
                score, unknown, step = self._ask()
            except (MonolithError, OSError):
                answer = ProbeAnswer(at=self._clock(), score=None)
            else:
                answer = ProbeAnswer(at=self._clock(), score=score, unknown=unknown, step=step)
            self._answers.append(answer)
            self._stop.wait(self._every)
