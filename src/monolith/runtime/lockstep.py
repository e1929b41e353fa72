"""Reading in lockstep: ranks agree on which batches they train on.

Every lookup is a collective call, so a rank may look a batch up only if all ranks have one. Before each
batch, all ranks tell each other whether theirs is ready (one small all-gather):

    all READY            every rank trains on its batch
    one WAITING          every rank gets `SILENT` at the same place, unless silences are off
    one ENDED            the data has ended for all; ranks that have a batch left drop it
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from enum import IntEnum
from typing import Generic, TypeVar

import torch

from monolith import concurrency
from monolith.runtime.prefetch import SILENT, Silence
from monolith.store.rank_groups import Collective

_log = logging.getLogger(__name__)

Item = TypeVar("Item")


CLOSE_WITHIN = 5.0
"""Seconds that closing waits for a source that is being read."""


class Readiness(IntEnum):
    """What a rank tells the other ranks about its next batch."""

    READY = 0
    WAITING = 1
    ENDED = 2


class _Reader(Generic[Item]):
    """Reads one item ahead on a thread, so that a rank can report that it still waits for its source."""

    def __init__(self, items: Iterator[Item]) -> None:
        self._items = items
        self._found: concurrency.Queue[Item | BaseException | None] = concurrency.Queue(maxsize=1)
        self._closed = concurrency.Event()
        self._thread = concurrency.Thread(target=self._read, name="reader", daemon=True)
        self._thread.start()

    def poll(self, timeout: float) -> tuple[Readiness, Item | None]:
        """Return the next item, if it is read within `timeout` seconds, and the readiness to report.

        Raises:
            BaseException: What reading raised.
        """
        try:
            found = self._found.get(timeout=timeout)
        except concurrency.Empty:
            return Readiness.WAITING, None
        if isinstance(found, BaseException):
            raise found
        return (Readiness.ENDED if found is None else Readiness.READY), found

    def close(self) -> bool:
        """Stop reading; return False if the source is blocked in a read that does not return."""
        self._closed.set()
        self._thread.join(CLOSE_WITHIN)
        if self._thread.is_alive():
            _log.warning("the source is still being read; its thread ends when that returns")
            return False
        close = getattr(self._items, "close", None)
        if close is not None:
            close()
        return True

    def _read(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    return
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _put(self, found: Item | BaseException | None) -> bool:
        """Wait until there is space in the queue; return False if the reader was closed meanwhile."""
        while not self._closed.is_set():
            try:
                self._found.put(found, timeout=0.1)
            except concurrency.Full:
                continue
            return True
        return False


def aligned(
    items: Iterator[Item],
    collective: Collective,
    *,
    every: float,
    pressed: Callable[[], bool],
    silences: bool = True,
    on_stuck: Callable[[], None] = lambda: None,
) -> Generator[Item | Silence, None, None]:
    """Yield the items of this rank that all ranks train on, and `SILENT` if a rank has none for now.

    Args:
        items: Those of this rank; a generator is closed together with the one returned.
        collective: Used only by the thread that iterates.
        every: Seconds that an item may take before this rank reports that it waits.
        pressed: Whether this rank wants to stop waiting, so that `SILENT` is yielded in any case.
        silences: Whether it is yielded otherwise.
        on_stuck: Called when this is closed and the source is blocked in a read.
    """
    reader = _Reader(items)
    try:
        while True:
            item: Item | None = None
            readiness = Readiness.WAITING
            while True:
                # An item that was read is kept until all ranks have one: it is trained on exactly once.
                if item is None:
                    readiness, item = reader.poll(every)
                word = torch.tensor([int(readiness), int(pressed())])
                ranks, hurry = collective.all_gather(word).T.tolist()
                if Readiness.ENDED in ranks:
                    return
                if Readiness.WAITING not in ranks:
                    break
                if silences or any(hurry):
                    yield SILENT
            assert item is not None
            yield item
    finally:
        if not reader.close():
            on_stuck()
