"""Admission and batching: how many requests wait, and which are answered together.

`Quotas` bounds the memory and the number of requests in flight, for all clients and for each one. JSON counts
for more than its length, since a list of short numbers takes ten times its text in memory. So a few large
requests cannot use all memory, and one client cannot use every slot. Quotas are per process.

    with quotas.admit("10.0.0.7") as reservation:
        reservation.add(len(body))

`RequestBatcher` has no thread that collects requests. The first request that finds the model idle becomes the
leader: its own thread takes the queued requests, runs the model and gives each request its rows. Requests
that arrive meanwhile wait and form the next batch. So a lone request is answered on the thread it came on,
without a hop to another and without a place in the queue, and batches grow by themselves when the model is
busy.

    queued ──taken by a leader──► running ──► answered or failed
       │ ▲                            └──rows are left──► to the end of the queue
       │ └──the leader is done, and this is the first──► leading: it takes the next batch
       └──its deadline passed──► abandoned: no leader looks at it again

The queue is in order of priority, and of arrival within one. A request of more than `max_rows` rows runs in
pieces, and after each it waits behind the other requests: a small one waits for one piece of it at most.

With `runners`, several leaders run batches at a time, but only if batches take long: Python runs one thread
at a time, and a short batch is mostly Python. A second leader would halve the batches and gain nothing
(docs/decisions/0080).

Invariant, under `RequestBatcher._lock`: while the queue is not empty, at least one request leads or has been
told to lead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from monolith import concurrency
from monolith.errors import (
    DeadlineExceededError,
    OverloadedError,
    RequestError,
    RetryableError,
    UnavailableError,
)
from monolith.serve.config import BatchingConfig, ServeLimits
from monolith.serve.predictor import Prediction
from monolith.serve.rows import Said
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


_T = TypeVar("_T")
Clock = Callable[[], float]
_LATE = "the deadline of the request passed before the model answered"


AskModel = Callable[..., Prediction]
"""`Predictor.predict`: takes columns and a `deadline`."""
Report = Callable[[int, int], None]
"""Called after each batch with its number of requests and rows."""


DEFAULT_PRIORITY = 5
"""Of a request that names none; 1 is answered first, 9 last."""
LONG_BATCH = 0.005
"""Seconds that batches take at least if several run at a time."""
_RECENT = 8
"""Batches that are looked at: the shortest counts, since a busy machine makes single ones longer."""


class ModelCall(NamedTuple):
    """What one request asks of the model."""

    columns: RequestColumns
    deadline: float | None
    priority: int = DEFAULT_PRIORITY


@dataclass(slots=True)
class ModelOutputs:
    """The outputs of the model for one request: arrays whose first dimension is the rows."""

    outputs: dict[str, NDArray[Any]]
    missing: tuple[str, ...]
    freshness: Said


class _Waiting:
    """A request in the queue, and later its answer.

    `leads`, `gone`, `taken` and membership of the queue change under the batcher's lock. `parts`, `found` and
    `error` are set by the leader that took rows of the request, before it puts the request back into the
    queue or releases `wake`; a request is with one leader at a time.
    """

    __slots__ = (
        *("columns", "deadline", "error", "found", "gone", "leads", "parts", "priority", "since", "taken"),
        "wake",
    )

    def __init__(
        self, columns: RequestColumns, deadline: float | None, since: float, priority: int = DEFAULT_PRIORITY
    ) -> None:
        self.columns = columns
        self.deadline = deadline
        self.since = since
        self.priority = priority
        self.taken = 0
        self.parts: list[tuple[ModelOutputs, float]] = []
        """The answers to its pieces so far, with the time of each."""
        self.found: ModelOutputs | None = None
        self.error: BaseException | None = None
        self.leads = False
        self.gone = False
        self.wake = concurrency.Lock()
        self.wake.acquire()

    @property
    def is_done(self) -> bool:
        return self.found is not None or self.error is not None

    @property
    def rows_left(self) -> int:
        return self.columns.rows - self.taken


class _Piece(NamedTuple):
    """Some rows of a request, in a batch: nearly always all of them."""

    request: _Waiting
    begin: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.begin

    @property
    def is_whole(self) -> bool:
        return self.rows == self.request.columns.rows

    @property
    def columns(self) -> RequestColumns:
        columns = self.request.columns
        return columns if self.is_whole else columns.part(self.begin, self.end)


class RequestBatcher:
    """Answers the requests of one version of a model in batches. Thread-safe.

    Shapes: a request has r rows, a batch n rows of one or several requests; outputs are arrays of r rows.

    Example: while the model runs 32 rows of request A, requests B (4 rows) and C (8 rows) arrive. When A is
    answered, B's thread leads: it runs one batch of 12 rows and wakes C with rows 4 to 12.

    Args:
        ask: Runs the model on columns, on any thread.
        limits: `queue` and `queue_rows` bound what waits.
        clock: The clock of deadlines, in seconds.
        report: Called after each batch.
        long_batch: Seconds that batches take at least if several run at a time.
    """

    def __init__(
        self,
        ask: AskModel,
        config: BatchingConfig,
        *,
        limits: ServeLimits,
        clock: Clock,
        report: Report | None = None,
        long_batch: float = LONG_BATCH,
    ) -> None:
        self._ask = ask
        self._max_rows = config.max_rows
        self._delay = config.max_delay.total_seconds()
        self._runners = config.runners
        self._most, self._most_rows = limits.queue, limits.queue_rows
        self._clock = clock
        self._report = report
        self._lock = concurrency.Lock()  # guards all below; never held while the model runs
        self._came = concurrency.Condition(self._lock)
        self._queue: list[_Waiting] = []
        """By priority; within one, in the order in which they came or were put back."""
        self._queued_rows = 0
        """Rows of the requests in the queue that were not taken yet."""
        self._leaders = 0
        self._long_batch = long_batch
        self._recent: deque[float] = deque([0.0] * _RECENT, _RECENT)
        """Seconds that the last batches took."""

    def run(
        self, columns: RequestColumns, deadline: float | None, priority: int = DEFAULT_PRIORITY
    ) -> ModelOutputs:
        """Return the answer to one request.

        Args:
            priority: From 1, answered first, to 9.

        Raises:
            OverloadedError: The queue is full.
            DeadlineExceededError: The deadline passed.
        """
        with self._lock:
            # A request that finds nothing queued needs no place in the queue: it leads from the start.
            is_alone = not self._queue and not self._delay and self._wants_leader()
            is_alone = is_alone and columns.rows <= self._max_rows
            self._leaders += is_alone
        if is_alone:
            return self._run_alone(columns, deadline)
        mine = _Waiting(columns, deadline, self._clock(), priority)
        self._add(mine)
        return self._result(mine)

    def run_all(self, calls: Sequence[ModelCall]) -> list[ModelOutputs | Exception]:
        """Answer several requests on this thread, in as few batches as possible.

        Returns:
            For each request its answer, or the error that `run` would raise.
        """
        found: dict[int, ModelOutputs | Exception] = {}
        now = self._clock()
        # The order of the queue, and no request in pieces, which would return to its end. So the first of
        # these that has no answer yet is the first to lead: this thread never waits for a request that waits
        # for this thread.
        order = sorted(range(len(calls)), key=lambda number: calls[number].priority)
        together = [number for number in order if calls[number].columns.rows <= self._max_rows]
        if len(together) > 1:
            waiting = {
                number: _Waiting(*calls[number][:2], now, calls[number].priority) for number in together
            }
            for number, one in waiting.items():  # all are queued before the first leads, and are in its batch
                if (refused := _or_error(self._add, one)) is not None:
                    found[number] = refused
            for number, one in waiting.items():
                if number not in found:
                    found[number] = _or_error(self._result, one)
        return [
            found[number] if number in found else _or_error(self.run, *calls[number])
            for number in range(len(calls))
        ]

    def _wants_leader(self) -> bool:
        """Whether a request that arrives now should lead. Called under the lock."""
        if self._leaders == 0:
            return True
        return self._leaders < self._runners and min(self._recent) >= self._long_batch

    def _add(self, mine: _Waiting) -> None:
        """Queue a request; it leads if the model is idle."""
        with self._lock:
            self._check_room(mine.columns.rows)
            self._enqueue(mine)
            if self._wants_leader():
                self._leaders += 1
                mine.leads = True
            elif self._delay:
                self._came.notify_all()

    def _result(self, mine: _Waiting) -> ModelOutputs:
        """Wait for the answer to a queued request, or run the model if it leads."""
        if mine.leads or self._wait(mine):
            self._lead(mine)
        if mine.error is not None:
            raise mine.error
        assert mine.found is not None
        return mine.found

    def _run_alone(self, columns: RequestColumns, deadline: float | None) -> ModelOutputs:
        """Run a request as a batch of its own, as the leader; then hand over to those that came meanwhile."""
        begun = self._clock()
        try:
            if deadline is not None and deadline <= begun:
                raise DeadlineExceededError(_LATE)
            answer = self._ask(columns.asked, deadline=deadline)
            found = ModelOutputs(plain_outputs(answer), tuple(answer.missing), answer.freshness)
        finally:
            with self._lock:
                self._recent.append(self._clock() - begun)
                self._hand_over()
        if self._report is not None:
            self._report(1, columns.rows)
        return found

    def _check_room(self, rows: int) -> None:
        if len(self._queue) >= self._most:
            raise OverloadedError(
                f"{len(self._queue)} requests wait for this model, which is the limit (--max-queue). "
                "Retry later, or start more servers."
            )
        if self._queue and self._queued_rows + rows > self._most_rows:
            raise OverloadedError(
                f"{self._queued_rows} rows wait for this model, and this request has {rows}; the limit is "
                f"{self._most_rows} (--max-queue-rows). Retry later, or start more servers."
            )

    def _enqueue(self, one: _Waiting) -> None:
        """Put a request behind those of its priority. Called under the lock."""
        at = len(self._queue)
        while at and self._queue[at - 1].priority > one.priority:
            at -= 1
        self._queue.insert(at, one)
        self._queued_rows += one.rows_left

    def _dequeue(self, one: _Waiting) -> None:
        self._queue.remove(one)
        self._queued_rows -= one.rows_left

    def _wait(self, mine: _Waiting) -> bool:
        """Wait for the answer or for the lead; return True for the lead."""
        left = -1.0 if mine.deadline is None else max(0.0, mine.deadline - self._clock())
        woken = mine.wake.acquire(timeout=left)
        if woken:
            return mine.leads
        with self._lock:
            mine.gone = True
            if mine in self._queue:
                self._dequeue(mine)
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
        """Make the first waiting request lead, if there is one. Called under the lock.

        A leader that is not the last one stops instead if batches have become short.
        """
        is_spare = self._leaders > 1 and min(self._recent) < self._long_batch
        for one in () if is_spare else self._queue:
            if not one.leads:
                one.leads = True
                one.wake.release()
                return
        self._leaders -= 1

    def _take(self, mine: _Waiting) -> list[_Piece]:
        """Take requests of one layout for one batch, the first of the queue first.

        A request that leads is skipped: its own thread takes it, and would otherwise run nothing.
        """
        with self._lock:
            if self._delay:
                self._wait_for_more()
            now = self._clock()
            batch: list[_Piece] = []
            rows = 0
            for one in list(self._queue):
                if one.leads and one is not mine:
                    continue
                if one.deadline is not None and one.deadline <= now:
                    self._dequeue(one)
                    one.error = DeadlineExceededError(_LATE)
                    self._tell(one)
                    continue
                if batch and (
                    one.columns.layout != batch[0].request.columns.layout
                    or rows + one.rows_left > self._max_rows
                ):
                    continue
                self._dequeue(one)
                piece = _Piece(one, one.taken, one.taken + min(one.rows_left, self._max_rows))
                one.taken = piece.end
                batch.append(piece)
                rows += piece.rows
                if rows >= self._max_rows:
                    break
            return batch

    def _wait_for_more(self) -> None:
        while self._queue:
            left = min(one.since for one in self._queue) + self._delay - self._clock()
            if left <= 0 or self._queued_rows >= self._max_rows:
                return
            self._came.wait(left)

    def _run(self, batch: Sequence[_Piece]) -> None:
        if not batch:
            return
        begun = self._clock()
        try:
            if len(batch) == 1:
                self._run_one(batch[0])
            else:
                self._run_together(batch)
        finally:
            with self._lock:
                self._recent.append(self._clock() - begun)
            for piece in batch:
                self._put_back_or_tell(piece)
        if self._report is not None:
            self._report(len(batch), sum(piece.rows for piece in batch))

    def _put_back_or_tell(self, piece: _Piece) -> None:
        one = piece.request
        if one.error is None and one.parts and one.rows_left:
            with self._lock:
                if not one.gone:  # its deadline may have passed while this piece ran
                    self._enqueue(one)
            return
        if one.error is None and one.parts:
            one.found = joined([part for part, _ in one.parts], [at for _, at in one.parts])
        if not one.is_done:  # after an interrupt or a memory error no client may wait forever
            one.error = RuntimeError("the model did not answer")
        self._tell(one)

    def _run_one(self, piece: _Piece) -> None:
        one = piece.request
        try:
            try:
                answer = self._ask_for(one, piece.columns)
            except RequestError:
                if piece.is_whole:
                    raise
                # The error names a row of the piece. All rows together are refused with the right one.
                answer = self._ask_for(one, one.columns)
                one.taken, one.parts = one.columns.rows, []
            self._note(piece, plain_outputs(answer), answer)
        except Exception as error:
            one.error = error

    def _ask_for(self, one: _Waiting, columns: RequestColumns) -> Prediction:
        """Run the model for one request, unless its deadline has passed while the model ran before."""
        if one.deadline is not None and one.deadline <= self._clock():
            raise DeadlineExceededError(_LATE)
        return self._ask(columns.asked, deadline=one.deadline)

    def _note(self, piece: _Piece, outputs: dict[str, NDArray[Any]], answer: Prediction) -> None:
        found = ModelOutputs(outputs, tuple(answer.missing), answer.freshness)
        piece.request.parts.append((found, self._clock()))

    def _run_together(self, batch: Sequence[_Piece]) -> None:
        deadlines = [one.deadline for one, _, _ in batch if one.deadline is not None]
        latest = max(deadlines) if len(deadlines) == len(batch) else None
        try:
            answer = self._ask(merged([piece.columns for piece in batch]), deadline=latest)
            outputs = plain_outputs(answer)
        except RetryableError as error:  # running each request alone would add load to what is overloaded
            for one, _, _ in batch:
                one.error = type(error)(str(error)) if type(error) in _COPIED else error
            return
        except Exception:
            # One request may have a bad row. Each is run alone, so that only that one fails.
            for piece in batch:
                self._run_one(piece)
            return
        begin = 0
        for piece in batch:
            end = begin + piece.rows
            self._note(piece, {name: values[begin:end] for name, values in outputs.items()}, answer)
            begin = end

    def _tell(self, one: _Waiting) -> None:
        """Wake the thread of an answered request. A leader is awake already."""
        if not one.leads and not one.gone and one.wake.locked():
            one.wake.release()


def _or_error(do: Callable[..., _T], *given: Any) -> _T | Exception:
    try:
        return do(*given)
    except Exception as error:
        return error


def joined(parts: Sequence[ModelOutputs], times: Sequence[float]) -> ModelOutputs:
    """Return the answer to a request from those to its pieces, each given at a time.

    What it says of the age of its rows holds for the oldest of them.
    """
    if len(parts) == 1:
        return parts[0]
    outputs = {name: np.concatenate([part.outputs[name] for part in parts]) for name in parts[0].outputs}
    missing = tuple(dict.fromkeys(name for part in parts for name in part.missing))
    return ModelOutputs(outputs, missing, _oldest([part.freshness for part in parts], times))


def _oldest(said: Sequence[Said], times: Sequence[float]) -> Said:
    for one in said:
        if "staleness" not in one:  # nothing can be promised of that piece, and so of none
            return one
    ages = [float(one["staleness"]) + max(times) - at for one, at in zip(said, times, strict=True)]
    found = dict(said[max(range(len(said)), key=ages.__getitem__)])
    found["staleness"] = round(max(ages), 3)
    for name, choose in (("step", min), ("watermark", min), ("newest_step", max)):
        values = [int(one[name]) for one in said if name in one]
        if len(values) == len(said):
            found[name] = choose(values)
        else:
            found.pop(name, None)
    return found


_COPIED = (DeadlineExceededError, OverloadedError)
"""Errors that each request raises as an own object: a traceback belongs to one thread."""


def plain_outputs(answer: Prediction) -> dict[str, NDArray[Any]]:
    """Return the outputs of a model as arrays."""
    return {
        name: values.numpy() if isinstance(values, Tensor) else np.asarray(values)
        for name, values in answer.outputs.items()
    }
