"""The request batcher: each request gets its own rows or an error; none waits for a leader that is gone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import pytest
import torch
from interleavings.mutants import check_found

from monolith import concurrency
from monolith.errors import DeadlineExceededError, OverloadedError
from monolith.serve.config import BatchingConfig, ServeLimits
from monolith.serve.predictor import Prediction
from monolith.serve.server import batching
from monolith.serve.server.batching import ModelCall, Quotas, RequestBatcher
from monolith.serve.server.tensors import RequestColumns
from monolith.testing.interleavings import explore, run_threads

MODULES = [batching, sys.modules[__name__]]


def columns(*values: int) -> RequestColumns:
    return RequestColumns({"x": np.array(values)}, len(values), (("x", 1),))


def answering(
    requests: int,
    *,
    queue: int = 10,
    patience: float | None = None,
    fails: int = 0,
    max_rows: int = 3,
    long_batch: float = 0.0,
    threads: int = 0,
    **config: object,
) -> Callable[[], None]:
    """Requests of 1 and 2 rows, at once; each must get the double of its own numbers, or a known error.

    Args:
        long_batch: Batches take 10 ms. If they are long when shorter, a second runner starts at once; if not,
            it starts as well, because those before took longer, and stops after a batch.
        threads: If not 0, so many threads ask together, each for several requests.
    """

    def scenario() -> None:
        running = most_running = asked = 0
        counting = concurrency.Lock()  # of these three

        def ask(values: dict[str, np.ndarray], *, deadline: float | None = None) -> Prediction:  # noqa: ARG001
            nonlocal running, most_running, asked
            with counting:
                running += 1
                asked += 1
                failing = asked <= fails
                most_running = max(most_running, running)
            concurrency.sleep(0.01)
            with counting:
                running -= 1
            if failing:
                raise ValueError("a bad row")
            return Prediction({"y": torch.from_numpy(2 * np.asarray(values["x"]))})

        reported: list[int] = []
        settings = BatchingConfig(max_rows=max_rows, **config)  # type: ignore[arg-type]
        batcher = RequestBatcher(
            ask,
            settings,
            limits=ServeLimits(queue=queue),
            clock=concurrency.monotonic,
            report=lambda _, rows: reported.append(rows),
            long_batch=long_batch,
        )
        batcher._recent.extend([1.0] * len(batcher._recent))
        answered = [0] * requests

        def rows_of(number: int) -> list[int]:
            return [10 * number + 1, 10 * number + 2][: 1 + number % 2]

        def ask_for(numbers: list[int]) -> None:
            deadline = None if patience is None else concurrency.monotonic() + patience
            calls = [ModelCall(columns(*rows_of(one)), deadline, 5 - one % 3) for one in numbers]
            for number, found in zip(numbers, batcher.run_all(calls), strict=True):
                if isinstance(found, Exception):
                    check_error(found)
                else:
                    assert found.outputs["y"].tolist() == [2 * one for one in rows_of(number)]
                    answered[number] = len(rows_of(number))

        def check_error(error: Exception) -> None:
            if isinstance(error, DeadlineExceededError | OverloadedError):
                assert patience is not None or queue < requests
            elif isinstance(error, ValueError):
                assert fails
            else:
                raise error

        def request(number: int) -> None:
            mine = rows_of(number)
            deadline = None if patience is None else concurrency.monotonic() + patience
            try:
                found = batcher.run(columns(*mine), deadline)
            except Exception as error:
                check_error(error)
            else:
                assert found.outputs["y"].tolist() == [2 * one for one in mine]
                answered[number] = len(mine)

        if threads:
            parts = [list(range(first, requests, threads)) for first in range(threads)]
            run_threads(*(lambda part=part: ask_for(part) for part in parts))
        else:
            run_threads(*(lambda number=number: request(number) for number in range(requests)))
        assert most_running <= settings.runners
        assert sum(reported) >= sum(answered)
        assert batcher._leaders == 0
        assert not batcher._queue
        assert batcher._queued_rows == 0

    return scenario


ALONE = answering(3)
TWO_RUNNERS = answering(4, runners=2)
LATE = answering(3, patience=0.015)
WAITING_FOR_MORE = answering(3, patience=0.03, max_delay=timedelta(milliseconds=5))
FULL = answering(4, queue=1)
FAILING = answering(3, fails=2)
PIECES = answering(4, max_rows=1)
PIECES_OF_TWO = answering(4, max_rows=1, runners=2, patience=0.035)
SHORT_BATCHES = answering(5, runners=2, max_rows=2, long_batch=0.02)
TOGETHER = answering(6, threads=2, max_rows=2, runners=2, long_batch=0.02)
TOGETHER_LATE = answering(6, threads=2, max_rows=1, patience=0.035)


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(ALONE, id="one runner"),
        pytest.param(TWO_RUNNERS, id="two runners"),
        pytest.param(LATE, id="deadlines"),
        pytest.param(WAITING_FOR_MORE, id="waiting for more"),
        pytest.param(FULL, id="a full queue"),
        pytest.param(FAILING, id="a model that fails"),
        pytest.param(PIECES, id="requests in pieces"),
        pytest.param(PIECES_OF_TWO, id="pieces, two runners and deadlines"),
        pytest.param(SHORT_BATCHES, id="a runner that stops"),
        pytest.param(TOGETHER, id="several requests of a thread, two runners"),
        pytest.param(TOGETHER_LATE, id="several requests of a thread, pieces and deadlines"),
    ],
)
def test_every_request_is_answered_with_its_own_rows(scenario: Callable[[], None], schedules: int) -> None:
    explore(scenario, MODULES, schedules=schedules)


def test_quotas_count_what_is_in_flight(schedules: int) -> None:
    def scenario() -> None:
        quotas = Quotas(ServeLimits(in_flight_bytes=100, peer_requests=2))
        refused: list[str] = []

        def request() -> None:
            try:
                with quotas.admit("10.0.0.7") as reservation:
                    reservation.add(40)
                    assert quotas._bytes <= 100
            except OverloadedError:
                refused.append("requests")

        run_threads(request, request, request)
        assert len(refused) <= 1
        assert quotas._bytes == 0
        assert not quotas._requests

    explore(scenario, MODULES, schedules=schedules)


def _lead_is_lost(self: RequestBatcher, mine: batching._Waiting) -> bool:
    """The lead that a request got when its time was over is not passed on."""
    left = -1.0 if mine.deadline is None else max(0.0, mine.deadline - self._clock())
    if mine.wake.acquire(timeout=left):
        return mine.leads
    with self._lock:
        mine.gone = True
        if mine in self._queue:
            self._dequeue(mine)
    raise DeadlineExceededError("late")


def _without_lock(self: RequestBatcher, mine: batching._Waiting) -> list[batching._Piece]:
    batch = [one for one in self._queue if one is mine or not one.leads]
    pieces = [batching._Piece(one, 0, one.columns.rows) for one in batch]
    for one in batch:
        self._dequeue(one)
        one.taken = one.columns.rows
    return pieces


def _leads_by_an_old_look(
    self: RequestBatcher, columns: RequestColumns, deadline: float | None, priority: int = 5
) -> batching.ModelOutputs:
    """Whether there is a leader is looked at before the lock is taken."""
    mine = batching._Waiting(columns, deadline, self._clock(), priority)
    has_leader = self._leaders >= self._runners
    with self._lock:
        self._enqueue(mine)
        if not has_leader:
            self._leaders += 1
            mine.leads = True
    if mine.leads or self._wait(mine):
        self._lead(mine)
    assert mine.found is not None
    return mine.found


@pytest.mark.parametrize(
    ("scenario", "name", "wrong"),
    [
        pytest.param(LATE, "_wait", _lead_is_lost, id="a lead is lost with a late request"),
        pytest.param(TWO_RUNNERS, "_take", _without_lock, id="requests are taken without the lock"),
        pytest.param(ALONE, "run", _leads_by_an_old_look, id="a leader is looked for too early"),
    ],
)
def test_a_deliberate_bug_is_found(
    scenario: Callable[[], None], name: str, wrong: Callable[..., object]
) -> None:
    check_found(scenario, MODULES, RequestBatcher, name, wrong)
