from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch

from monolith.errors import ConfigError, QueueClosedError, TensorArgumentError
from monolith.tensors import PrefetchQueue, RaggedTensor, prefetch

WAIT_SECONDS = 60
"""Nothing takes this long unless it hangs."""


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Start `work` in a thread; the result waits for it and gives back what it returned or raised."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def finish() -> Any:
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive(), "hangs"
        return outcome[0]

    return finish


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.fixture(autouse=True)
def no_thread_left_behind() -> Iterator[None]:
    yield
    if prefetch_threads():
        gc.collect()
    for thread in prefetch_threads():
        thread.join(WAIT_SECONDS)
    assert not prefetch_threads()


# The queue


def test_items_leave_in_the_order_they_came() -> None:
    queue: PrefetchQueue[int] = PrefetchQueue(4)
    for item in range(4):
        queue.put(item)
    assert queue.size() == 4
    assert [queue.get() for _ in range(4)] == [0, 1, 2, 3]
    assert queue.size() == 0


def test_a_full_queue_waits_for_room() -> None:
    queue: PrefetchQueue[int] = PrefetchQueue(1)
    queue.put(1)
    waiting = in_thread(lambda: queue.put(2))
    assert queue.size() == 1
    assert [queue.get(), queue.get()] == [1, 2]
    assert waiting() is None


def test_an_empty_queue_waits_for_an_item() -> None:
    queue: PrefetchQueue[int] = PrefetchQueue(1)
    waiting = in_thread(queue.get)
    queue.put(7)
    assert waiting() == 7


def test_a_closed_queue_is_drained_and_then_says_so() -> None:
    queue: PrefetchQueue[int] = PrefetchQueue(2)
    queue.put(1)
    queue.close()
    assert queue.closed
    with pytest.raises(QueueClosedError, match="put"):
        queue.put(2)
    assert queue.get() == 1
    for _ in range(2):
        with pytest.raises(QueueClosedError, match="get"):
            queue.get()


def test_a_queue_closed_with_an_error_raises_it_after_the_last_item() -> None:
    queue: PrefetchQueue[int] = PrefetchQueue(2)
    queue.put(1)
    queue.close(error=ZeroDivisionError())
    queue.close()
    assert queue.get() == 1
    with pytest.raises(ZeroDivisionError):
        queue.get()


def test_closing_wakes_waiting_threads() -> None:
    full: PrefetchQueue[int] = PrefetchQueue(1)
    full.put(1)
    empty: PrefetchQueue[int] = PrefetchQueue(1)
    putting, getting = in_thread(lambda: full.put(2)), in_thread(empty.get)
    full.close()
    empty.close()
    assert isinstance(putting(), QueueClosedError)
    assert isinstance(getting(), QueueClosedError)


def test_closing_may_drop_queued_items() -> None:
    queue: PrefetchQueue[int] = PrefetchQueue(1)
    queue.put(1)
    queue.close(discard=True)
    assert queue.size() == 0


def test_many_threads_lose_and_repeat_nothing() -> None:
    queue: PrefetchQueue[int] = PrefetchQueue(3)

    def put(start: int) -> None:
        for item in range(start, start + 100):
            queue.put(item)

    putting = [in_thread(lambda start=start: put(start)) for start in range(0, 400, 100)]  # type: ignore[misc]
    getting = [in_thread(lambda: [queue.get() for _ in range(100)]) for _ in range(4)]
    assert sorted(item for finish in getting for item in finish()) == list(range(400))
    assert [finish() for finish in putting] == [None] * 4


@pytest.mark.parametrize("capacity", [0, -1, 1.5])
def test_a_queue_has_room_for_at_least_one(capacity: Any) -> None:
    with pytest.raises(ConfigError, match="capacity"):
        PrefetchQueue(capacity)


# Prefetching, on either side of having a thread


@pytest.mark.parametrize("capacity", [0, 1, 3, 100])
def test_elements_come_in_order_to_the_end(capacity: int) -> None:
    elements = prefetch(range(20), capacity)
    assert list(elements) == list(range(20))
    assert list(elements) == []


@pytest.mark.parametrize("capacity", [0, 2])
def test_a_function_gives_one_element_per_call(capacity: int) -> None:
    numbers = iter(range(3))
    assert list(prefetch(lambda: next(numbers), capacity)) == [0, 1, 2]


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Batch:
    ids: Any


@pytest.mark.parametrize("capacity", [0, 2])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_any_nesting_survives(capacity: int, device: str | None) -> None:
    tensor, ragged = torch.ones(2), RaggedTensor.from_list([[], [1], [2, 3]])
    element = {
        "t": tensor,
        "s": "text",
        "n": None,
        "l": [ragged, (1.5, True)],
        "p": Pair(tensor, Batch(ragged)),
    }
    (found,) = prefetch([element], capacity, device)
    assert found.keys() == element.keys()
    assert found["t"] is tensor
    assert found["l"][0].to_list() == [[], [1], [2, 3]]
    assert (found["s"], found["n"], found["l"][1]) == ("text", None, (1.5, True))
    assert isinstance(found["p"], Pair)
    assert isinstance(found["p"].right, Batch)


@pytest.mark.parametrize("capacity", [0, 2])
@pytest.mark.parametrize("error", [ZeroDivisionError, QueueClosedError])
def test_an_error_of_the_source_comes_after_the_elements_before_it(
    capacity: int, error: type[Exception]
) -> None:
    def source() -> Iterator[int]:
        yield 1
        yield 2
        raise error

    elements = prefetch(source(), capacity)
    assert [next(elements), next(elements)] == [1, 2]
    with pytest.raises(error):
        next(elements)
    with pytest.raises(StopIteration):
        next(elements)


@pytest.mark.parametrize("capacity", [0, 1])
def test_closing_early_ends_the_source_too(capacity: int) -> None:
    ended = threading.Event()

    def source() -> Iterator[int]:
        try:
            while True:
                yield 0
        finally:
            ended.set()

    with prefetch(source(), capacity) as elements:
        assert next(elements) == 0
    assert ended.wait(WAIT_SECONDS)
    assert not prefetch_threads()
    with pytest.raises(StopIteration):
        next(elements)
    elements.close()


@pytest.mark.parametrize("capacity", [0, 1])
@pytest.mark.parametrize("recorded", [True, False])
def test_gradients_are_recorded_if_the_caller_does(capacity: int, recorded: bool) -> None:
    weight = torch.ones(1, requires_grad=True)
    with torch.set_grad_enabled(recorded):
        (element,) = prefetch((weight * 2 for _ in range(1)), capacity)
    assert element.requires_grad is recorded


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigError, match="capacity"):
        prefetch([], -1)
    with pytest.raises(TensorArgumentError, match="iterable or callable"):
        prefetch(3, 1)  # type: ignore[arg-type]


# Prefetching with a thread


def test_a_thread_works_ahead_up_to_the_capacity() -> None:
    made, fifth = [], threading.Event()

    def source() -> Iterator[int]:
        for number in range(20):
            made.append(number)
            if number == 4:
                fifth.set()
            yield number

    with prefetch(source(), 4) as elements:
        assert fifth.wait(WAIT_SECONDS)  # four are ready, and one waits for room
        assert elements.size() == 4
        assert made == [0, 1, 2, 3, 4]
        assert list(elements) == list(range(20))


def test_without_a_thread_nothing_is_made_before_it_is_asked_for() -> None:
    made: list[int] = []
    elements = prefetch((made.append(i) or i for i in range(3)), 0)  # type: ignore[func-returns-value]
    assert (made, elements.size()) == ([], 0)
    next(elements)
    assert made == [0]
    assert not prefetch_threads()


def test_closing_wakes_a_consumer_that_waits() -> None:
    asked, release = threading.Event(), threading.Event()

    def source() -> int:
        asked.set()
        release.wait(WAIT_SECONDS)
        raise StopIteration

    elements = prefetch(source, 1, patience=timedelta(0))
    waiting = in_thread(lambda: next(elements, "ended"))
    assert asked.wait(WAIT_SECONDS)
    elements.close()
    assert waiting() == "ended"
    release.set()


def test_a_source_that_does_not_return_is_left_behind_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = threading.Event()
    elements = prefetch(lambda: release.wait(WAIT_SECONDS), 1, patience=timedelta(0))
    with caplog.at_level(logging.WARNING):
        elements.close()
    assert "did not return" in caplog.text
    release.set()


def test_a_forgotten_iterator_takes_its_thread_along() -> None:
    elements = prefetch(iter(int, 1), 1)
    next(elements)
    (thread,) = prefetch_threads()
    del elements
    gc.collect()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()


def test_elements_are_not_kept_once_taken() -> None:
    class Token:
        pass

    alive: list[Any] = []

    def source() -> Iterator[Token]:
        for _ in range(2):
            token = Token()
            alive.append(weakref.ref(token))
            yield token
            del token

    elements = prefetch(source(), 1)
    first = next(elements)
    second = next(elements)
    assert next(elements, None) is None
    del first, second
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


# On a CUDA device

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@cuda
@pytest.mark.parametrize("capacity", [0, 1, 3])
def test_elements_arrive_on_the_device_in_order_and_complete(capacity: int) -> None:
    def source() -> Iterator[Any]:
        for number in range(30):
            big = torch.full((1 << 20,), number)
            yield {
                "big": big,
                "again": big,
                "rows": RaggedTensor.from_list([[], [number]]),
                "name": str(number),
            }

    for number, element in enumerate(prefetch(source(), capacity, "cuda")):
        assert element["big"].device.type == "cuda"
        assert element["again"] is element["big"]
        assert element["name"] == str(number)
        # Read on the current stream right away: the copy must be waited for.
        assert int((element["big"] != number).sum()) == 0
        assert element["rows"].to_list() == [[], [number]]


@cuda
def test_a_consumer_on_a_stream_of_its_own_waits_for_the_copy() -> None:
    source = (torch.full((1 << 22,), float(number)) for number in range(20))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sums = [element.double().mean() for element in prefetch(source, 2, "cuda")]
    stream.synchronize()
    assert [value.item() for value in sums] == list(range(20))


@cuda
def test_tensors_keep_their_device_unless_told() -> None:
    def source() -> Iterator[Any]:
        for number in range(20):
            busy = torch.full((1 << 22,), float(number), device="cuda")
            for _ in range(10):
                busy = busy * 1
            yield busy, torch.tensor(number)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = [(there.double().mean(), here) for there, here in prefetch(source(), 2)]
    stream.synchronize()
    assert [value.item() for value, _ in found] == list(range(20))
    assert [(here.item(), here.device.type) for _, here in found] == [(n, "cpu") for n in range(20)]


@cuda
def test_memory_is_not_given_out_while_the_consumer_still_reads_it() -> None:
    """Each element is dropped at once, with slow work on it still queued."""
    source = (torch.full((1 << 22,), float(number)) for number in range(40))
    stream, sums = torch.cuda.Stream(), []
    with torch.cuda.stream(stream):
        for element in prefetch(source, 2, "cuda"):
            torch.cuda._sleep(2_000_000)
            sums.append(element.double().mean())
            del element
    stream.synchronize()
    assert [value.item() for value in sums] == list(range(40))
