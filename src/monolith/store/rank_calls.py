"""Calls of ranks to each other that are no collectives: one asks, at any time, and the others answer.

How many rows there are is asked by whoever draws a line of progress; a checkpoint is written while training
goes on. Neither may wait for the others to come by, as a collective would. So every rank has a thread that
answers, and requests and answers lie as JSON under the keys that all ranks share anyway to find each other:

    asked/3/17     the 17th request to rank 3
    answered/3/17  its answer, until whoever asked has read it
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

from monolith import errors
from monolith.errors import (
    ClusterError,
    DeadlineExceededError,
    MonolithError,
    RetryableError,
    UnavailableError,
)
from monolith.store.collective import KeyValues
from monolith.wire.bodies import Call, Json

_log = logging.getLogger(__name__)

LOOK_EVERY = 0.02
"""Seconds between two looks for an answer."""
FOREVER = timedelta(days=365)


class RankCalls:
    """Asks other ranks, and answers them, until it is closed. Thread-safe.

    Args:
        connect: Makes a connection to the keys that all ranks share. Who waits for a key keeps the connection
            busy, so the thread that answers has its own.
        timeout: How long an answer may take.
    """

    def __init__(self, connect: Callable[[], KeyValues], rank: int, size: int, *, timeout: timedelta) -> None:
        self.rank = rank
        self.size = size
        self._connect = connect
        self._timeout = timeout.total_seconds()
        self._calls: dict[str, Call] = {}
        self._trouble: RetryableError | None = None
        self._over = threading.Event()
        self._asking = connect()
        self._turn = threading.Lock()  # guards the connection that asks
        self._thread = threading.Thread(target=self._serve, name="rank-calls", daemon=True)
        self._thread.start()

    def offer(self, calls: Mapping[str, Call]) -> None:
        """Answer these calls from now on. One that comes before is waited for."""
        self._calls |= calls

    def ask_all(self, name: str, body: Mapping[str, Json]) -> list[dict[str, Json]]:
        """Return the answers of all ranks in their order, this one's too.

        Raises:
            MonolithError: What the first of them raised that did.
            RetryableError: One is gone, or does not answer in time.
        """
        others = [rank for rank in range(self.size) if rank != self.rank]
        asked = {rank: self._ask(rank, name, body) for rank in others}
        try:
            own = self._calls[name](dict(body))
        finally:  # they are answered in any case, and nobody else takes what was answered
            found = {rank: self._answer_of(key) for rank, key in asked.items()}
        return [own if rank == self.rank else _opened(rank, found[rank]) for rank in range(self.size)]

    def fail(self, error: RetryableError) -> None:
        """Have whoever waits for an answer raise this. From any thread."""
        self._trouble = self._trouble or error

    def close(self) -> None:
        """End. Closing again does nothing."""
        if self._over.is_set():
            return
        self._over.set()
        with contextlib.suppress(ClusterError):  # where the keys are gone, the thread is, too
            self._ask(self.rank, "", {})
            self._thread.join(10)

    def _ask(self, rank: int, name: str, body: Mapping[str, Json]) -> str:
        with self._turn, reached():
            number = self._asking.add(f"asks/{rank}", 1)
            self._asking.set(f"asked/{rank}/{number}", json.dumps({"call": name, "body": body}))
        return f"answered/{rank}/{number}"

    def _answer_of(self, key: str) -> dict[str, Json]:
        deadline = time.monotonic() + self._timeout
        while True:
            with self._turn, reached():
                if self._asking.check([key]):
                    found: dict[str, Json] = json.loads(self._asking.get(key))
                    self._asking.delete_key(key)
                    return found
            if self._trouble is not None:
                raise self._trouble
            if self._over.wait(LOOK_EVERY) or time.monotonic() >= deadline:
                raise DeadlineExceededError(f"a rank has not answered within {self._timeout:.0f} s")

    def _serve(self) -> None:
        number = 1
        try:
            keys = self._connect()
            keys.set_timeout(FOREVER)
            while not self._over.is_set():
                key = f"asked/{self.rank}/{number}"
                request = json.loads(keys.get(key))
                keys.delete_key(key)
                if request["call"]:  # or this rank has ended
                    thread = threading.Thread(
                        target=self._answer, args=(number, request), name="rank-call", daemon=True
                    )
                    thread.start()
                number += 1
        except RuntimeError as error:  # the process that kept the keys is gone, and the run with it
            if not self._over.is_set():
                _log.info("rank %d answers no more: %s", self.rank, error)

    def _answer(self, number: int, request: dict[str, Any]) -> None:
        name = str(request.get("call"))
        try:
            while name not in self._calls:
                if self._over.wait(0.05):
                    return
            answer: dict[str, Json] = {"answer": self._calls[name](request["body"])}
        except MonolithError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        except Exception as error:
            _log.exception("rank %d: %.60s failed", self.rank, name)
            answer = {"error": "", "message": f"{name:.60} failed: {error}; its log says more"}
        try:
            with self._turn, reached():
                self._asking.set(f"answered/{self.rank}/{number}", json.dumps(answer))
        except UnavailableError as error:
            _log.info("rank %d could not answer: %s", self.rank, error)


@contextlib.contextmanager
def reached() -> Iterator[None]:
    """Make an error of ours of what goes wrong on the way to the keys."""
    try:
        yield
    except RuntimeError as cause:
        raise UnavailableError(f"the rank that keeps what all share is gone: {cause}") from cause


def _opened(rank: int, answer: dict[str, Json]) -> dict[str, Json]:
    if "error" not in answer:
        found: dict[str, Json] = answer["answer"]
        return found
    kind = getattr(errors, answer["error"], None)
    if not isinstance(kind, type) or not issubclass(kind, MonolithError) or "__init__" in vars(kind):
        kind = ClusterError  # its constructor takes more than a message
    raise kind(f"rank {rank}: {answer['message']}")
