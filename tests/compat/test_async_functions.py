from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from monolith.errors import QueueClosedError, WrongThreadError
from monolith_compat import AsyncFunctions

WAIT_SECONDS = 60


class Counter:
    def __init__(self) -> None:
        self.x = 0
        self.seen: list[Any] = []

    def add(self, amount: int = 1) -> int:
        self.x += amount
        self.seen.append(amount)
        return self.x


def test_a_call_runs_one_step_late_and_the_last_at_the_end() -> None:
    counter, functions = Counter(), AsyncFunctions()
    add = functions.add(counter.add)
    assert add(1) is None
    assert counter.x == 0
    add(1)
    assert counter.x == 1
    functions.close()
    assert counter.x == 2


def test_a_synchronous_function_is_the_target() -> None:
    counter = Counter()
    assert AsyncFunctions(is_async=False).add(counter.add)(2) == 2
    assert AsyncFunctions(is_async=True).add(counter.add, is_async=False)(2) == 4
    with AsyncFunctions(is_async=False) as functions:
        functions.add(counter.add, is_async=True)(1)
        assert counter.x == 4
    assert counter.x == 5


def test_arguments_may_be_absent_or_named() -> None:
    counter = Counter()
    with AsyncFunctions() as functions:
        add = functions.add(counter.add)
        add()
        add(amount=5)
    assert counter.seen == [1, 5]


def test_every_call_runs_exactly_once_and_in_order() -> None:
    counter = Counter()
    with AsyncFunctions() as functions:
        add = functions.add(counter.add)
        for number in range(50):
            functions.start_step()
            add(number)
    assert counter.seen == list(range(50))


def test_a_call_overlaps_with_the_next_step() -> None:
    began, go_on = threading.Event(), threading.Event()

    def target() -> None:
        began.set()
        assert go_on.wait(WAIT_SECONDS)

    with AsyncFunctions() as functions:
        push = functions.add(target)
        push()
        assert not began.is_set()
        functions.start_step()
        assert began.wait(WAIT_SECONDS)  # and we are still here: the step goes on meanwhile
        go_on.set()
        push()


def test_gradients_are_recorded_if_the_caller_does() -> None:
    seen: list[bool] = []
    with AsyncFunctions() as functions:
        call = functions.add(lambda: seen.append(torch.is_grad_enabled()))
        with torch.no_grad():
            call()
        call()
    assert seen == [False, True]


def test_functions_run_in_parallel() -> None:
    meeting, met = threading.Barrier(2, timeout=WAIT_SECONDS), []
    with AsyncFunctions() as functions:
        for push in [functions.add(lambda: met.append(meeting.wait())) for _ in range(2)]:
            push()
        functions.start_step()
    assert sorted(met) == [0, 1]  # alone, each would have waited in vain


def test_an_error_reaches_the_next_call_which_is_not_kept() -> None:
    done = []

    def target(number: int) -> None:
        done.append(number)
        if number == 1:
            raise ZeroDivisionError

    functions = AsyncFunctions()
    push = functions.add(target)
    push(1)
    with pytest.raises(ZeroDivisionError):
        push(2)
    push(3)
    functions.close()
    assert done == [1, 3]


def fail() -> None:
    raise ZeroDivisionError


def test_an_error_at_the_end_is_raised_after_all_had_their_turn() -> None:
    counter, functions = Counter(), AsyncFunctions()
    functions.add(fail)()
    functions.add(counter.add)()
    with pytest.raises(ZeroDivisionError):
        functions.close()
    assert counter.x == 1
    functions.close()


def test_several_errors_at_the_end_come_together() -> None:
    functions = AsyncFunctions()
    for _ in range(2):
        functions.add(fail)()
    with pytest.raises(ExceptionGroup) as caught:
        functions.close()
    assert len(caught.value.exceptions) == 2


def call_then_fail(target: Callable[..., Any]) -> None:
    with AsyncFunctions() as functions:
        functions.add(target)()
        raise KeyError


def test_an_error_in_the_loop_loses_no_update() -> None:
    counter = Counter()
    with pytest.raises(KeyError):
        call_then_fail(counter.add)
    assert counter.x == 1


def test_an_error_in_the_loop_is_not_hidden_by_one_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError) as caught:
        call_then_fail(fail)
    assert "ZeroDivisionError" in caught.value.__notes__[0]
    assert "async functions failed" in caplog.text


def test_after_the_end_calls_are_refused() -> None:
    functions = AsyncFunctions()
    push = functions.add(fail)
    functions.close()
    with pytest.raises(QueueClosedError, match="'async_queue'"):
        push()
    with pytest.raises(QueueClosedError, match="'late'"):
        functions.add(fail, name="late")


def test_a_function_that_calls_itself_is_told_that_it_would_wait_forever() -> None:
    functions = AsyncFunctions()
    itself: list[Callable[[], None]] = []
    itself.append(functions.add(lambda: [again() for again in itself]))
    itself[0]()
    with pytest.raises(WrongThreadError, match="wait for itself"):
        functions.close()


def test_a_call_that_was_never_closed_is_reported_as_lost(caplog: pytest.LogCaptureFixture) -> None:
    functions = AsyncFunctions()
    functions.add(print, name="push")()
    with caplog.at_level(logging.ERROR):
        del functions
        gc.collect()
    assert "'push' was never closed: its last call is lost" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_target_reads_and_writes_in_the_order_of_the_callers_stream() -> None:
    total = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()), AsyncFunctions() as functions:
        add = functions.add(total.add_)
        for number in range(10):
            torch.cuda._sleep(1_000_000)
            functions.start_step()
            add(torch.full((1 << 20,), float(number), device="cuda"))
        functions.close()
        assert total.unique().tolist() == [45.0]
