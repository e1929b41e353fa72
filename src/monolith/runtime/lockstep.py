"""Reading in lockstep: ranks agree on which batches they train on.

Every lookup is a collective call, so a rank may look a batch up only if all ranks do. So all ranks tell each
other how many batches they have read (one small all-gather), and then train on as many as each has. A rank
without data takes part with empty batches until the data of all ranks has ended:

    rank 0 has 3, rank 1 has 2    every rank trains on 2 batches; the third of rank 0 is kept
    rank 0 has 3, rank 1 ENDED    rank 0 trains on 3 batches, rank 1 takes 3 empty steps
    rank 0 has 3, rank 1 IDLE     the same: it waits for a queue whose last files the other ranks train on
    one WAITING, or all IDLE      every rank gets `SILENT` at the same place, unless silences are off
    all ENDED                     the data has ended

How many batches a rank has depends on time, but only the number of all-gathers follows from it: the batches
are the same, in the same order.
"""

from __future__ import annotations

import logging
from collections import deque
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
MOST_AHEAD = 4
"""Batches that are agreed on at once, at most. A rank may have read twice as many and one: those that it has
reported, and as many that wait in the queue of its reader."""


class Readiness(IntEnum):
    """What a rank tells the other ranks about its next batches: -n if it has n more than one."""

    READY = 0
    WAITING = 1
    IDLE = 2
    ENDED = 3


class _Reader(Generic[Item]):
    """Reads items ahead on a thread, so that a rank can report that it still waits for its source."""

    def __init__(self, items: Iterator[Item]) -> None:
        self._items = items
        # The thread itself has one more in its hand, which waits for a place.
        self._found: concurrency.Queue[Item | BaseException | None] = concurrency.Queue(maxsize=MOST_AHEAD)
        self.held: deque[Item] = deque()
        """Items that were read and are not trained on yet."""
        self._last: BaseException | None = None
        self._over = False  # `held` has the last items; after them comes `_last`, or the end
        self._closed = concurrency.Event()
        self._thread = concurrency.Thread(target=self._read, name="reader", daemon=True)
        self._thread.start()

    def poll(self, timeout: float) -> int:
        """Return the readiness to report, after `timeout` seconds at most if nothing is held.

        Raises:
            BaseException: What reading raised, once all items before it were trained on.
        """
        while not self._over and len(self.held) < MOST_AHEAD:
            try:
                found = self._found.get_nowait() if self.held else self._found.get(timeout=timeout)
            except concurrency.Empty:
                break
            if found is None or isinstance(found, BaseException):
                self._last, self._over = found, True
            else:
                self.held.append(found)
        if self.held:
            return Readiness.READY + 1 - len(self.held)
        if self._last is not None:
            raise self._last
        return Readiness.ENDED if self._over else Readiness.WAITING

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
    empty: Callable[[], Item],
    every: float,
    pressed: Callable[[], bool],
    silences: bool = True,
    shares_work: bool = False,
    on_stuck: Callable[[], None] = lambda: None,
) -> Generator[Item | Silence, None, None]:
    """Yield the items of this rank in order, and `SILENT` if a rank has none for now.

    If they end before those of another rank, empty ones follow, until those of all ranks have ended.

    Args:
        items: Those of this rank; a generator is closed together with the one returned.
        collective: Used only by the thread that iterates.
        empty: Makes an item for a step of the other ranks for which this rank has none.
        every: Seconds that an item may take before this rank reports that it waits.
        pressed: Whether this rank wants to stop waiting, so that `SILENT` is yielded in any case.
        silences: Whether it is yielded otherwise.
        shares_work: Whether items may come, or end, only after other ranks have trained on theirs, as with a
            queue of files. So they do not wait for this rank.
        on_stuck: Called when this is closed and the source is blocked in a read.
    """
    reader = _Reader(items)
    idle = False
    try:
        while True:
            # Items that were read are kept until all ranks have one: each is trained on exactly once.
            said = reader.poll(0.0 if idle else every)
            if said == Readiness.WAITING and shares_work:
                said = Readiness.IDLE
            ranks, hurry = collective.all_gather(torch.tensor([said, int(pressed())])).T.tolist()
            if all(one == Readiness.ENDED for one in ranks):
                return
            ready = [one for one in ranks if one <= Readiness.READY]
            idle = said == Readiness.IDLE and bool(ready)
            if ready and Readiness.WAITING not in ranks:
                for _ in range(1 - max(ready)):  # as many as the rank has that has the fewest
                    yield reader.held.popleft() if reader.held else empty()
            elif silences or any(hurry):
                yield SILENT
    finally:
        if not reader.close():
            on_stuck()
