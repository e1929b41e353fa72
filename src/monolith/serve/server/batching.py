"""Quotas: how much the requests in flight may hold, all together and those of one peer.

A request is admitted when its headers have come. The bytes that it holds are counted as they come, until it
is answered. JSON counts for more than its length: a list of short numbers takes ten times its text in
memory. So a few large requests cannot take all memory, and one peer cannot take all places.

    with quotas.admit("10.0.0.7") as held:
        held.add(len(body))

Quotas are per process: with --processes 4, each has its own.

Batching: requests that arrive together are answered together.

There is no thread that collects requests. Whoever comes while nobody works leads: it takes what waits,
runs the model, and leaves each caller its rows. Who comes meanwhile waits, and is part of the next batch.
So a request alone is answered on the thread it came on, without a hop to another, and the busier the
model is the larger the batches get, by themselves.

    waiting ──taken──► running ──► answered or failed
       │ └──the leader is done, and it is the oldest──► leading: it takes the next batch
       └──its time is up──► given up: nobody looks at it again

Invariant, under `_lock`: while the queue holds somebody, at least one caller leads, or has been told to.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from monolith.errors import DeadlineExceededError, OverloadedError, RetryableError, UnavailableError
from monolith.serve.config import BatchingConfig, ServeLimits
from monolith.serve.predictor import Prediction
from monolith.serve.server.tensors import RequestColumns, merged

JSON_COST = 16
"""Bytes of memory that a byte of JSON, or of typed gRPC contents, is counted as. Measured: up to 11 for
numbers and keys; brackets would take up to 39, and `JsonReader` bounds how many there are."""


class Quotas:
    """Counts what requests in flight hold. Thread-safe.

    A peer is an address, without the port; "" is a process of this server, which has no quota.
    """

    def __init__(self, limits: ServeLimits) -> None:
        self._most_bytes = limits.bytes_in_flight
        self._most_requests = limits.peer_requests
        self._lock = threading.Lock()  # guards the two below
        self._bytes = 0
        self._requests: dict[str, int] = {}

    def admit(self, peer: str) -> Held:
        """Admit a request, until what is returned is closed.

        Raises:
            OverloadedError: Too many requests of the peer are in flight.
        """
        if peer:
            with self._lock:
                count = self._requests.get(peer, 0)
                if count >= self._most_requests:
                    raise OverloadedError(
                        f"{count} requests of {peer} are in flight, which are the most of one peer "
                        "(--max-peer-requests). Retry later."
                    )
                self._requests[peer] = count + 1
        return Held(self, peer)

    def hold(self, count: int) -> None:
        with self._lock:
            if self._bytes + count > self._most_bytes:
                raise UnavailableError(
                    f"requests in flight hold {self._bytes} bytes of {self._most_bytes} "
                    f"(--max-bytes-in-flight), and this one needs {count} more. Retry later."
                )
            self._bytes += count

    def release(self, peer: str, count: int) -> None:
        with self._lock:
            self._bytes -= count
            if peer:
                left = self._requests[peer] - 1
                if left:
                    self._requests[peer] = left
                else:
                    del self._requests[peer]


class Held:
    """What one request holds. Used by one thread at a time."""

    __slots__ = ("_bytes", "_peer", "_quotas")

    def __init__(self, quotas: Quotas, peer: str) -> None:
        self._quotas = quotas
        self._peer = peer
        self._bytes = 0

    def add(self, count: int) -> None:
        """Count more bytes.

        Raises:
            UnavailableError: All requests together would hold more than is allowed.
        """
        self._quotas.hold(count)
        self._bytes += count

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._quotas.release(self._peer, self._bytes)


Clock = Callable[[], float]
_LATE = "the request's time was up before the model answered"


AskModel = Callable[..., Prediction]
"""`Predictor.predict`: takes columns and `deadline`."""
Report = Callable[[int, int], None]
"""Told how many requests and rows were answered together."""


@dataclass(slots=True)
class FoundOutputs:
    """The answer to one request."""

    outputs: dict[str, NDArray[Any]]
    missing: tuple[str, ...]
    freshness: Mapping[str, bool | int | float | str]


class _Waiting:
    """A request in the queue, and later its answer."""

    __slots__ = ("columns", "deadline", "error", "found", "gone", "leads", "since", "wake")

    def __init__(self, columns: RequestColumns, deadline: float | None, since: float) -> None:
        self.columns = columns
        self.deadline = deadline
        self.since = since
        self.found: FoundOutputs | None = None
        self.error: BaseException | None = None
        self.leads = False
        self.gone = False
        self.wake = threading.Lock()
        self.wake.acquire()

    @property
    def is_done(self) -> bool:
        return self.found is not None or self.error is not None


class RequestBatcher:
    """Answers the requests of one version of a model. Thread-safe.

    Args:
        ask: Answers columns, on any thread.
        queue: The most requests that wait.
        clock: By which deadlines are meant.
        report: Called after each batch.
    """

    def __init__(
        self, ask: AskModel, config: BatchingConfig, *, queue: int, clock: Clock, report: Report | None = None
    ) -> None:
        self._ask = ask
        self._max_rows = config.max_rows
        self._delay = config.max_delay.total_seconds()
        self._runners = config.runners
        self._most = queue
        self._clock = clock
        self._report = report
        self._lock = threading.Lock()  # guards all below
        self._came = threading.Condition(self._lock)
        self._queue: deque[_Waiting] = deque()
        self._leaders = 0

    def run(self, columns: RequestColumns, deadline: float | None) -> FoundOutputs:
        """Return the answer to one request.

        Raises:
            OverloadedError: Too many wait already.
            DeadlineExceededError: The deadline passed.
        """
        mine = _Waiting(columns, deadline, self._clock())
        with self._lock:
            if len(self._queue) >= self._most:
                raise OverloadedError(
                    f"{len(self._queue)} requests wait for this model, which is the most. Ask again later, "
                    "or start more servers."
                )
            self._queue.append(mine)
            if self._leaders < self._runners:
                self._leaders += 1
                mine.leads = True
            elif self._delay:
                self._came.notify_all()
        if mine.leads or self._wait(mine):
            self._lead(mine)
        if mine.error is not None:
            raise mine.error
        assert mine.found is not None
        return mine.found

    def _wait(self, mine: _Waiting) -> bool:
        """Wait for the answer, or for the lead, which makes it True."""
        left = -1.0 if mine.deadline is None else max(0.0, mine.deadline - self._clock())
        woken = mine.wake.acquire(timeout=left)
        if woken:
            return mine.leads
        with self._lock:
            mine.gone = True
            if mine in self._queue:
                self._queue.remove(mine)
            if mine.leads:  # told to just now: it is another's turn
                self._hand_over()
        raise DeadlineExceededError(_LATE)

    def _lead(self, mine: _Waiting) -> None:
        try:
            while not mine.is_done:
                self._run(self._take(mine))
        finally:
            with self._lock:
                self._hand_over()

    def _hand_over(self) -> None:
        """Tell the oldest who waits, and has not been told, to lead; called under the lock."""
        for one in self._queue:
            if not one.leads:
                one.leads = True
                one.wake.release()
                return
        self._leaders -= 1

    def _take(self, mine: _Waiting) -> list[_Waiting]:
        """Take requests of one layout, as many as are answered together, the oldest first.

        Those of other leaders stay: each of them takes its own.
        """
        with self._lock:
            if self._delay:
                self._wait_for_more()
            now = self._clock()
            batch: list[_Waiting] = []
            rows = 0
            for one in list(self._queue):
                if one.leads and one is not mine:
                    continue
                if one.deadline is not None and one.deadline <= now:
                    self._queue.remove(one)
                    one.error = DeadlineExceededError(_LATE)
                    self._tell(one)
                elif not batch or (
                    one.columns.layout == batch[0].columns.layout
                    and rows + one.columns.rows <= self._max_rows
                ):
                    self._queue.remove(one)
                    batch.append(one)
                    rows += one.columns.rows
                    if rows >= self._max_rows:
                        break
            return batch

    def _wait_for_more(self) -> None:
        while self._queue:
            rows = sum(one.columns.rows for one in self._queue)
            left = self._queue[0].since + self._delay - self._clock()
            if left <= 0 or rows >= self._max_rows:
                return
            self._came.wait(left)

    def _run(self, batch: Sequence[_Waiting]) -> None:
        if not batch:
            return
        try:
            if len(batch) == 1:
                self._run_one(batch[0])
            else:
                self._run_together(batch)
        finally:
            for one in batch:
                if not one.is_done:  # an interrupt, a memory error: nobody may wait for ever
                    one.error = RuntimeError("the model did not answer")
                self._tell(one)
        if self._report is not None:
            self._report(len(batch), sum(one.columns.rows for one in batch))

    def _run_one(self, one: _Waiting) -> None:
        try:
            answer = self._ask(one.columns.values, deadline=one.deadline)
            one.found = FoundOutputs(plain_outputs(answer), tuple(answer.missing), answer.freshness)
        except Exception as error:
            one.error = error

    def _run_together(self, batch: Sequence[_Waiting]) -> None:
        deadlines = [one.deadline for one in batch if one.deadline is not None]
        latest = max(deadlines) if len(deadlines) == len(batch) else None
        try:
            answer = self._ask(merged([one.columns for one in batch]), deadline=latest)
            outputs = plain_outputs(answer)
        except RetryableError as error:  # whoever asks again at once makes it worse
            for one in batch:
                one.error = type(error)(str(error)) if type(error) in _COPIED else error
            return
        except Exception:
            # It may be the row of one of them: let nobody pay for another's mistake.
            for one in batch:
                self._run_one(one)
            return
        begin = 0
        for one in batch:
            end = begin + one.columns.rows
            one.found = FoundOutputs(
                {name: values[begin:end] for name, values in outputs.items()},
                tuple(answer.missing),
                answer.freshness,
            )
            begin = end

    def _tell(self, one: _Waiting) -> None:
        """Wake a caller that has its answer; the leader itself is awake, and one that was told to lead."""
        if not one.leads and not one.gone and one.wake.locked():
            one.wake.release()


_COPIED = (DeadlineExceededError, OverloadedError)
"""Errors of which each caller raises its own: a traceback belongs to one thread."""


def plain_outputs(answer: Prediction) -> dict[str, NDArray[Any]]:
    """Return the outputs of a model as arrays."""
    return {name: np.asarray(values) for name, values in answer.outputs.items()}
