"""Agreement: ranks read their data each for itself, and train on a batch only when everybody has one.

Before each batch all ranks say what they have. One whose data has ended ends it for all: what the others have
read by then nobody trains on, and it stays in front of their positions. While somebody has nothing yet, the
question is asked again: a rank may wait for a live stream for hours, and nobody hangs in one long call.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Generator, Iterator
from enum import IntEnum
from typing import Generic, TypeVar

import torch

from monolith.store.rank_groups import Collective
from monolith.train.lane import SILENT, Silence

Item = TypeVar("Item")

_log = logging.getLogger(__name__)

CLOSE_WITHIN = 5.0
"""Seconds that closing waits for a source that is being read."""


class Readiness(IntEnum):
    """What a rank says of its data."""

    READY = 0
    WAITING = 1
    ENDED = 2


class _Reader(Generic[Item]):
    """Reads ahead on a thread, so that who waits for an item need not wait for ever."""

    def __init__(self, items: Iterator[Item]) -> None:
        self._items = items
        self._found: queue.Queue[Item | BaseException | None] = queue.Queue(maxsize=1)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, name="reader", daemon=True)
        self._thread.start()

    def look(self, timeout: float) -> tuple[Readiness, Item | None]:
        """Return the next item, if it comes in time, and what the others are to hear.

        Raises:
            BaseException: What reading raised.
        """
        try:
            found = self._found.get(timeout=timeout)
        except queue.Empty:
            return Readiness.WAITING, None
        if isinstance(found, BaseException):
            raise found
        return (Readiness.ENDED if found is None else Readiness.READY), found

    def close(self) -> bool:
        """End; return whether nobody reads the items any more."""
        self._over.set()
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
                if not self._hand_over(item):
                    return
            self._hand_over(None)
        except BaseException as error:
            self._hand_over(error)

    def _hand_over(self, found: Item | BaseException | None) -> bool:
        while not self._over.is_set():
            try:
                self._found.put(found, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False


def agreed(
    items: Iterator[Item],
    collective: Collective,
    *,
    every: float,
    pressed: Callable[[], bool],
    silences: bool = True,
    on_stuck: Callable[[], None] = lambda: None,
) -> Generator[Item | Silence, None, None]:
    """Give the items of this rank that all ranks train on, and `SILENT` where somebody has none for now.

    Args:
        items: Of this rank; a generator is closed with the one returned.
        collective: Used by whoever reads.
        every: Seconds that an item may take before the others hear that there is none.
        pressed: Whether this rank wants to wait no more, so that a silence is given in any case.
        silences: Whether they are given otherwise.
        on_stuck: Called where this is closed, and the items are still being read.
    """
    reader = _Reader(items)
    try:
        while True:
            item: Item | None = None
            readiness = Readiness.WAITING
            while True:
                if item is None:
                    readiness, item = reader.look(every)
                word = torch.tensor([int(readiness), int(pressed())])
                everybody, hurry = collective.all_gather(word).T.tolist()
                if Readiness.ENDED in everybody:
                    return
                if Readiness.WAITING not in everybody:
                    break
                if silences or any(hurry):
                    yield SILENT
            assert item is not None
            yield item
    finally:
        if not reader.close():
            on_stuck()
