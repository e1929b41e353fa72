"""Admission and batching: how many requests wait, and which are answered together.

`Quotas` bounds the memory and the number of requests in flight, for all clients and for each one. JSON counts
for more than its length, since a list of short numbers takes ten times its text in memory. So a few large
requests cannot use all memory, and one client cannot use every slot. Quotas are per process.

    with quotas.admit("10.0.0.7") as reservation:
        reservation.add(len(body))

`RequestBatcher` has no thread that collects requests. The first request that finds the model idle becomes the
leader: its own thread takes the queued requests, runs the model and gives each request its rows. Requests
that arrive meanwhile wait and form the next batch. So a lone request is answered on the thread it came on,
without a hop to another, and batches grow by themselves when the model is busy.

    queued ──taken by a leader──► running ──► answered or failed
       │ └──the leader is done, and this is the oldest──► leading: it takes the next batch
       └──its deadline passed──► abandoned: no leader looks at it again

Invariant, under `RequestBatcher._lock`: while the queue is not empty, at least one request leads or has been
told to lead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from monolith import concurrency
from monolith.errors import DeadlineExceededError, OverloadedError, RetryableError, UnavailableError
from monolith.serve.config import BatchingConfig, ServeLimits
from monolith.serve.predictor import Prediction
from monolith.serve.server.tensors import RequestColumns, merged

JSON_COST = 16
"""Bytes of memory that a byte of JSON, or of typed gRPC contents, is counted as. Measured: up to 11 for
numbers and keys; brackets would take up to 39, and `JsonReader` bounds how many there are."""


class Quotas:
    """Counts the memory and the number of the requests in flight. Thread-safe.

    A peer is a client address without the port; "" is another process of this server, which has no quota.
    """

    def __init__(self, limits: ServeLimits) -> None:
        self._most_bytes = limits.in_flight_bytes
        self._most_requests = limits.peer_requests
        self._lock = concurrency.Lock()  # guards the two counters below
        self._bytes = 0
        self._requests: dict[str, int] = {}

    def admit(self, peer: str) -> Reservation:
        """Admit a request until the returned reservation is closed.

        Raises:
            OverloadedError: The peer has too many requests in flight.
        """
        if peer:
            with self._lock:
                count = self._requests.get(peer, 0)
                if count >= self._most_requests:
                    raise OverloadedError(
                        f"{count} requests of {peer} are in flight, which is the limit for one client "
                        "(--max-peer-requests). Retry later."
                    )
                self._requests[peer] = count + 1
        return Reservation(self, peer)

    def reserve(self, count: int) -> None:
        with self._lock:
            if self._bytes + count > self._most_bytes:
                raise UnavailableError(
                    f"requests in flight use {self._bytes} bytes of {self._most_bytes} "
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


class Reservation:
    """The memory that one request uses. Used by one thread at a time."""

    __slots__ = ("_bytes", "_peer", "_quotas")

    def __init__(self, quotas: Quotas, peer: str) -> None:
        self._quotas = quotas
        self._peer = peer
        self._bytes = 0

    def add(self, count: int) -> None:
        """Count more bytes.

        Raises:
            UnavailableError: All requests together would use more than is allowed.
        """
        self._quotas.reserve(count)
        self._bytes += count

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._quotas.release(self._peer, self._bytes)


Clock = Callable[[], float]
_LATE = "the deadline of the request passed before the model answered"


AskModel = Callable[..., Prediction]
"""`Predictor.predict`: takes columns and a `deadline`."""
Report = Callable[[int, int], None]
"""Called after each batch with its number of requests and rows."""


@dataclass(slots=True)
class ModelOutputs:
    """The outputs of the model for one request: arrays whose first dimension is the rows."""

    outputs: dict[str, NDArray[Any]]
    missing: tuple[str, ...]
    freshness: Mapping[str, bool | int | float | str]


class _Waiting:
    """A request in the queue, and later its answer.

    `leads`, `gone`, and membership of the queue change under the batcher's lock. `found` and `error` are set
    by the leader that took the request out of the queue, before it releases `wake`.
    """

    __slots__ = ("columns", "deadline", "error", "found", "gone", "leads", "since", "wake")

    def __init__(self, columns: RequestColumns, deadline: float | None, since: float) -> None:
        self.columns = columns
        self.deadline = deadline
        self.since = since
        self.found: ModelOutputs | None = None
        self.error: BaseException | None = None
        self.leads = False
        self.gone = False
        self.wake = concurrency.Lock()
        self.wake.acquire()

    @property
    def is_done(self) -> bool:
        return self.found is not None or self.error is not None


class RequestBatcher:
    """Answers the requests of one version of a model in batches. Thread-safe.

    Shapes: a request has r rows, a batch n rows of one or several requests; outputs are arrays of r rows.

    Example: while the model runs 32 rows of request A, requests B (4 rows) and C (8 rows) arrive. When A is
    answered, B's thread leads: it runs one batch of 12 rows and wakes C with rows 4 to 12.

    Args:
        ask: Runs the model on columns, on any thread.
        queue: Limit of waiting requests.
        clock: The clock of deadlines, in seconds.
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
        self._lock = concurrency.Lock()  # guards all below; never held while the model runs
        self._came = concurrency.Condition(self._lock)
        self._queue: deque[_Waiting] = deque()
        self._leaders = 0

    def run(self, columns: RequestColumns, deadline: float | None) -> ModelOutputs:
        """Return the answer to one request.

        Raises:
            OverloadedError: The queue is full.
            DeadlineExceededError: The deadline passed.
        """
        mine = _Waiting(columns, deadline, self._clock())
        with self._lock:
            if len(self._queue) >= self._most:
                raise OverloadedError(
                    f"{len(self._queue)} requests wait for this model, which is the limit (--max-queue). "
                    "Retry later, or start more servers."
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
        """Wait for the answer or for the lead; return True for the lead."""
        left = -1.0 if mine.deadline is None else max(0.0, mine.deadline - self._clock())
        woken = mine.wake.acquire(timeout=left)
        if woken:
            return mine.leads
        with self._lock:
            mine.gone = True
            if mine in self._queue:
                self._queue.remove(mine)
            # The lead may have been handed to this request between the timeout and the lock. It must pass it
            # on, or the requests behind it would wait for a leader that is gone.
            if mine.leads:
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
        """Make the oldest waiting request lead, if there is one. Called under the lock."""
        for one in self._queue:
            if not one.leads:
                one.leads = True
                one.wake.release()
                return
        self._leaders -= 1

    def _take(self, mine: _Waiting) -> list[_Waiting]:
        """Take requests of one layout for one batch, the oldest first.

        A request that leads is skipped: its own thread takes it, and would otherwise run nothing.
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
                if not one.is_done:  # after an interrupt or a memory error no client may wait forever
                    one.error = RuntimeError("the model did not answer")
                self._tell(one)
        if self._report is not None:
            self._report(len(batch), sum(one.columns.rows for one in batch))

    def _run_one(self, one: _Waiting) -> None:
        try:
            answer = self._ask(one.columns.values, deadline=one.deadline)
            one.found = ModelOutputs(plain_outputs(answer), tuple(answer.missing), answer.freshness)
        except Exception as error:
            one.error = error

    def _run_together(self, batch: Sequence[_Waiting]) -> None:
        deadlines = [one.deadline for one in batch if one.deadline is not None]
        latest = max(deadlines) if len(deadlines) == len(batch) else None
        try:
            answer = self._ask(merged([one.columns for one in batch]), deadline=latest)
            outputs = plain_outputs(answer)
        except RetryableError as error:  # running each request alone would add load to what is overloaded
            for one in batch:
                one.error = type(error)(str(error)) if type(error) in _COPIED else error
            return
        except Exception:
            # One request may have a bad row. Each is run alone, so that only that one fails.
            for one in batch:
                self._run_one(one)
            return
        begin = 0
        for one in batch:
            end = begin + one.columns.rows
            one.found = ModelOutputs(
                {name: values[begin:end] for name, values in outputs.items()},
                tuple(answer.missing),
                answer.freshness,
            )
            begin = end

    def _tell(self, one: _Waiting) -> None:
        """Wake the thread of an answered request. A leader is awake already."""
        if not one.leads and not one.gone and one.wake.locked():
            one.wake.release()


_COPIED = (DeadlineExceededError, OverloadedError)
"""Errors that each request raises as an own object: a traceback belongs to one thread."""


def plain_outputs(answer: Prediction) -> dict[str, NDArray[Any]]:
    """Return the outputs of a model as arrays."""
    return {name: np.asarray(values) for name, values in answer.outputs.items()}
