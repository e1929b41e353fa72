"""The files of a dump side by side, on threads that stop together.

Writing and reading release the GIL in the core and in the system, so threads do. When
one file fails there is no use for the others: they stop at their next chunk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from monolith.errors import TableArgumentError

Item = TypeVar("Item")
Result = TypeVar("Result")


class StopTogether:
    """Passed to each task; it puts its chunks through `chunks` to be told when to stop."""

    def __init__(self) -> None:
        self._stop = threading.Event()

    def set(self) -> None:
        self._stop.set()

    def chunks(self, source: Iterable[Item]) -> Iterator[Item]:
        """Yield from `source` until another task has failed."""
        for chunk in source:
            if self._stop.is_set():
                raise _StoppedError
            yield chunk


class _StoppedError(Exception):
    """Another task failed; never leaves this module."""


def in_parallel(
    work: Callable[[Item, StopTogether], Result], items: Sequence[Item], workers: int
) -> list[Result]:
    """Return `work` of each item, in order, `workers` at a time; raise the first failure once all ended."""
    if workers < 1:
        raise TableArgumentError(f"workers must be at least 1, got {workers}")
    stop = StopTogether()

    def one(item: Item) -> Result:
        for _ in stop.chunks([item]):
            try:
                return work(item, stop)
            except BaseException:
                stop.set()
                raise
        raise AssertionError("unreachable: the loop returns or raises")

    if min(workers, len(items)) <= 1:  # no thread for one file
        return [work(item, stop) for item in items]
    with ThreadPoolExecutor(min(workers, len(items)), "table-files") as pool:
        futures = [pool.submit(one, item) for item in items]
        try:
            wait(futures)
        except BaseException:  # the caller was interrupted
            stop.set()
            raise
    failures = [error for future in futures if (error := future.exception()) is not None]
    for error in failures:
        if not isinstance(error, _StoppedError):
            raise error
    return [future.result() for future in futures]
