"""Reading ahead: parts of files are parsed by several threads before it is their turn, and come in order.

    tasks ──next, a few ahead──► threads: parse ──in the order of the tasks──► one consumer

One thread decides what is read next, takes the results and checks them. So records, their order, positions
and errors are the same for any number of threads; these only save the wait. An error of a task, or of the
iterator of tasks, is raised when it is its turn: the results before it come first.

Memory is bounded by how many results may be ahead (`ahead_of`): a few for each thread, fewer if they are
large.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import Generic, NamedTuple, Self, TypeVar

from monolith.concurrency import Future, ThreadPoolExecutor
from monolith.data.format import Chunk
from monolith.data.records import Records
from monolith.observe.machine import usable_cores

T = TypeVar("T")

_MOST_THREADS = 16
"""More wait for each other's turn in Python."""

AHEAD_BYTES = 256 << 20
"""Memory of what is read ahead of its turn, about."""


def default_threads() -> int:
    """Return how many threads read by default: three of four cores of the machine, up to 16."""
    # Not all cores: the threads of torch and of tables spin for a moment when they have no work, and a
    # thread that reads on the same core makes a step wait for the other half of a parallel loop.
    return min(max(usable_cores() * 3 // 4, 1), _MOST_THREADS)


def ahead_of(threads: int, result_bytes: int) -> int:
    """Return how many results may be ahead: enough for all threads, unless each takes much memory."""
    return min(2 * threads, max(AHEAD_BYTES // max(result_bytes, 1), 2))


class InOrder(Generic[T]):
    """Runs tasks on threads and returns their results in order. One thread takes them.

        with InOrder(2, "squares", (partial(pow, number, 2) for number in range(3))) as squares:
            squares.take(), squares.take(), squares.take(), squares.take()      # 0, 1, 4, None

    Args:
        tasks: Are asked for by the thread that takes results, and run by others.
        first_alone: Run the first task in the thread that takes results, before any other.
    """

    def __init__(
        self, threads: int, name: str, tasks: Iterator[Callable[[], T]], *, first_alone: bool = False
    ) -> None:
        self._threads = threads
        self._tasks = tasks
        self._pool = ThreadPoolExecutor(threads, name)
        self._running: deque[Future[T]] = deque()
        self._failure: Exception | None = None
        self._ended = False
        self._first_alone = first_alone

    def take(self, result_bytes: int = 0) -> T | None:
        """Return the next result, and keep the threads busy meanwhile; None after the last.

        Args:
            result_bytes: Memory of a result, about.
        """
        if self._first_alone:
            self._first_alone = False
            first = next(self._tasks, None)
            self._ended = first is None
            if first is not None:
                return first()
        while not self._ended and len(self._running) < ahead_of(self._threads, result_bytes):
            try:
                task = next(self._tasks, None)
            except Exception as error:
                task, self._failure = None, error
            if task is None:
                self._ended = True
            else:
                self._running.append(self._pool.submit(task))
        if self._running:
            return self._running.popleft().result()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> list[T]:
        """End the threads; return the results that were not taken."""
        self._ended = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        close_iterator(self._tasks)
        done = [one for one in self._running if not one.cancelled() and one.exception() is None]
        self._running.clear()
        return [one.result() for one in done]


class LoadedPiece(NamedTuple):
    """A piece that was read ahead."""

    chunk: Chunk | None
    """Its first chunk; None if there is none."""
    shuffled: Records | None
    """The records of the first chunk in their random order."""
    rest: Iterator[Chunk]
    """The chunks after the first."""

    def chunks(self) -> Iterator[Chunk]:
        try:
            if self.chunk is not None:
                yield self.chunk
                yield from self.rest
        finally:
            close_iterator(self.rest)


def close_iterator(items: Iterator[object]) -> None:
    """Close the file of a reader that was not read to its end."""
    if isinstance(items, Generator):
        items.close()
