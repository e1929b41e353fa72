"""The prefetch pipeline: rows looked up ahead and updated behind, in an order that timing cannot change.

While the model computes on one batch, a thread updates the rows of the batch before and looks up those of the
batch after. It does one thing at a time, in this order (with `ahead` = 1):

    time  ──►   lookup 0 │ lookup 1 │ update 0 │ lookup 2 │ update 1 │ lookup 3 │ ...
    model       .........│ step 0 ..│ step 1 .............│ step 2 .............│ ...

So a lookup sees every update but the last: a row is one step stale at most, and the result does not depend on
which thread was faster. `drain` finishes all updates and repeats the lookups made ahead, so that the steps
after it are the same as after a restart.

The thread is in one phase at a time:

                        an update is due
        ┌─────────────────────────────────────┐
        ▼                                     │
    UPDATING ────────► IDLE ────────► READING ────────► PREPARING ──► IDLE
                        ▲  a lookup is due    │ SILENT, or the end
                        └─────────────────────┘

READING waits for the source and touches no rows, so the training thread may do waiting updates itself
meanwhile (`_overtake`). In the other phases but IDLE it must wait.

With `complete`, rows are not looked up ahead but when an item is asked for, and updates are done when they
are pushed. So a lookup sees every update, as if nothing were read ahead; the thread reads items, and prepares
what does not depend on rows.

A live stream may have nothing to read for a while. With `patience`, and sooner with `update_after`, updates
then no longer wait for the next batch.

Ranks do all of this together: every lookup and update is a call that all of them make in one order. So in
`lockstep` nothing depends on time. That there is no data for now is an item, `SILENT`, which comes at the
same place on every rank: updates are done before it, `idle` is called, and reading continues.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Generic, Self, TypeVar

from monolith import concurrency

_log = logging.getLogger(__name__)

Item = TypeVar("Item")


Rows = TypeVar("Rows")


Work = Callable[[], None]


class Silence(Enum):
    """Takes the place of an item while there is none."""

    SILENT = "silent"


SILENT = Silence.SILENT


class _Phase(Enum):
    """What the thread of a pipeline does; see the drawing above."""

    IDLE = "idle"
    READING = "reading"
    PREPARING = "preparing"
    UPDATING = "updating"


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitForData:
    """What a pipeline does while its source has no item."""

    patience: float | None = None
    """Seconds after which updates no longer wait for the lookup of a missing item; None waits for it."""
    update_after: float | None = None
    """The same, if that is sooner: for a live stream, whose next batch may take long."""
    idle: Callable[[], bool] | None = None
    """Called every `patience` seconds, or at each `SILENT`, by the thread that waits; it waits no more for
    now if this returns True."""
    threaded: bool = False
    """Whether to read in a thread even if nothing is looked up ahead, so that `idle` is called."""


@dataclass(slots=True, eq=False)
class _Entry(Generic[Item, Rows]):
    item: Item
    rows: Rows
    stale: bool = False
    """Whether rows have changed since it was looked up."""


class PrefetchPipeline(Generic[Item, Rows]):
    """Items in order, each looked up before it is asked for. Used by one thread.

    Shapes: an item has the IDs of one batch, int64 (n,); its rows are the result of one lookup, float32.

    Args:
        items: The items to read; in lockstep, `SILENT` if there is none for now. A generator is closed by
            `close`.
        prepare: Looks up the rows of an item; or, with `complete`, prepares that.
        complete: Looks up the rows of an item that is asked for, from what `prepare` returned, on the thread
            that asks; None if `prepare` looks them up.
        ahead: Items that are looked up ahead; 0 looks up when asked, and without a thread unless `threaded`.
        behind: Whether updates are left to the thread; otherwise they are done when they are pushed.
        waiting: What to do while there is no item.
        lockstep: Whether other ranks do the same in pipelines of their own, so that time may decide nothing.

    Examples:
        >>> import torch
        >>> from monolith import LocalStore, Segment, TableConfig
        >>> from monolith.runtime.prefetch import PrefetchPipeline
        >>> from monolith.store import TableIds
        >>> config = TableConfig(name="item", segments=(Segment(dim=1, learning_rate=1.0),))
        >>> store = LocalStore.from_configs({"item": config})
        >>> ids = TableIds(torch.tensor([7, 8]), sizes=torch.tensor([2]))  # n = 2
        >>> pipeline = PrefetchPipeline(iter([ids, ids, ids]), store.lookup, ahead=1)
        >>> while (found := pipeline.next()) is not None:
        ...     batch, rows = found
        ...     pipeline.push(lambda batch=batch: store.apply_gradients(batch, torch.ones(2), step=1))
        ...     print(rows)  # rows are one update behind, whatever the timing
        tensor([0., 0.])
        tensor([0., 0.])
        tensor([-1., -1.])
        >>> pipeline.drain()
        >>> pipeline.close()
        True
    """

    def __init__(
        self,
        items: Iterator[Item | Silence],
        prepare: Callable[[Item], Rows],
        complete: Callable[[Item, Rows], Rows] | None = None,
        *,
        ahead: int = 1,
        behind: bool = True,
        waiting: WaitForData = WaitForData(),  # noqa: B008  it is immutable
        lockstep: bool = False,
    ) -> None:
        self._items = items
        self._lockstep = lockstep
        self._prepare = prepare
        self._complete = complete
        self._ahead = ahead
        self._behind = behind
        self._patience = None if lockstep else waiting.patience
        update_after = waiting.update_after
        self._update_after = self._patience if lockstep or update_after is None else update_after
        self._idle = waiting.idle
        # Guards all fields below. Invariant: rows are read or written by one thread at a time, by the
        # pipeline's own in PREPARING and UPDATING, by the training thread only while that is IDLE or READING
        # and `_pauses` keeps it from leaving these phases.
        self._changed = concurrency.Condition()
        # Work for the thread, in order; None is a lookup. The order of this queue is the order in which rows
        # are read and written, so it alone decides the result of training.
        self._todo: deque[Work | None] = deque()
        self._ready: deque[_Entry[Item, Rows]] = deque()  # looked up, and not asked for yet
        self._phase = _Phase.IDLE
        # While this is not 0 the training thread works on rows, and the other waits before it touches any. A
        # count, because `idle` may call `drain`, which pauses it too.
        self._pauses = 0
        self._silent = False  # the source has no item for now, in lockstep; `next` ends it
        self._ended = False  # the source has no item any more
        self._interrupted = False
        self._closed = False
        self._error: BaseException | None = None  # of the thread, which ends with it
        self._update_failed = False  # the error is of an update: rows lack it, whatever is done later
        self._begun = False  # the thread was started
        self._asked = False  # `next` returned without the item it asked for: its lookup is still queued
        threaded = waiting.threaded or ahead > 0
        self._thread = (
            concurrency.Thread(target=self._run, name="prefetch", daemon=True) if threaded else None
        )

    def next(self) -> tuple[Item, Rows] | None:
        """Return the next item and its rows; None at the end, after an `interrupt` instead of waiting, and if
        `idle` has something else to do.

        Raises:
            Exception: What reading or looking up raised, once; or what an update raised, from then on.
        """
        if self._thread is None:
            item = self._next_item()
            return None if item is None else (item, self._completed(item, self._prepare(item)))
        with self._changed:
            self._look_up_again()
            if not self._asked:  # otherwise the lookup asked for before is still to come
                self._todo.extend([None] * (1 if self._begun else 1 + self._ahead))
            self._asked = True
            if not self._begun:
                self._begun = True
                self._thread.start()
            self._changed.notify_all()
            # Two waits. First the short one of a live stream: then the updates of the last step are done
            # here, so that they are published. After it, and every `patience` seconds, `idle` may have
            # something to do: a pause of the fleet, a save that is due.
            if self._update_after != self._patience and not self._changed.wait_for(
                self._has_news, self._update_after
            ):
                self._overtake()
            while not self._changed.wait_for(self._has_news, self._patience) or self._is_only_silent():
                # In lockstep the thread itself does them, at the same place on every rank: before `SILENT`.
                if not self._lockstep:
                    self._overtake()
                if self._idle is not None and self._call_idle(self._idle):
                    return None
                self._silent = self._silent and self._interrupted  # then nothing more is read
                self._changed.notify_all()
            self._asked = False
            self._raise()
            if not self._ready:
                return None
            entry = self._ready.popleft()
        return entry.item, self._completed(entry.item, entry.rows)

    def _call_idle(self, idle: Callable[[], bool]) -> bool:
        # Without the lock, which `interrupt` waits for: `idle` may take minutes, in a pause of the fleet. In
        # lockstep nothing has to be paused: in a silence the thread only does updates, which `idle` may push
        # and drain.
        pauses = 0 if self._lockstep else 1
        self._pauses += pauses
        self._changed.release()
        try:
            return idle()
        finally:
            self._changed.acquire()
            self._pauses -= pauses
            self._changed.notify_all()

    def _completed(self, item: Item, rows: Rows) -> Rows:
        return rows if self._complete is None else self._complete(item, rows)

    @property
    def exhausted(self) -> bool:
        """Whether the items have ended and `next` has returned all of them; not if it was interrupted."""
        with self._changed:
            return self._ended and not self._ready and not self._interrupted

    def interrupt(self) -> None:
        """Let `next` wait no more; from any thread. If nothing is read ahead, it waits all the same."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def push(self, work: Work) -> None:
        """Do some work after the lookups that were asked for so far, before those that will be."""
        # Without a thread that looks up rows there is nothing to put this in order with.
        if self._thread is None or not self._begun or self._complete is not None:
            work()
            return
        with self._changed:
            self._raise()
            self._todo.append(work)
            self._changed.notify_all()
            if not self._behind:
                while not self._changed.wait_for(
                    lambda: self._error is not None or self._is_done(work), self._update_after
                ):
                    self._overtake()  # the thread waits for its source
                self._raise()

    def drain(self) -> None:
        """Return when all pushed work is done. Rows looked up ahead are looked up again.

        In lockstep, lookups that were asked for are done first, and `next` repeats those made ahead: a rank
        that drains must not make a collective call that the other ranks make later.
        """
        with self._changed:
            if self._lockstep:
                self._changed.wait_for(lambda: self._error is not None or self._rests())
            else:
                self._overtake()
            # These were looked up before the last updates. After a restart they would be looked up after
            # them, so they are now, too: with the same bits from here on.
            for entry in self._ready:
                entry.stale = self._complete is None
            if not self._lockstep:
                self._look_up_again()
            self._raise()

    def close(self, patience: float = 30.0) -> bool:
        """End the thread. Pushed work that was not done is reported: `drain` comes before a clean end.

        Args:
            patience: Seconds to wait for a source that is in a read.

        Returns:
            False if the source is blocked in a read, so that its items are still being read.
        """
        with self._changed:
            self._closed = True
            lost = sum(work is not None for work in self._todo)
            self._todo.clear()
            self._changed.notify_all()
        if lost:
            _log.warning("%d row updates were dropped, because the run failed", lost)
        if self._thread is not None and self._begun:
            # A source may be blocked in a read that nothing can interrupt. Its iterator cannot be closed from
            # here while the thread is inside it.
            self._thread.join(patience)
            if self._thread.is_alive():
                _log.warning(
                    "the source is still being read after %g s; its thread ends when that returns", patience
                )
                return False
        close = getattr(self._items, "close", None)
        if close is not None:
            close()
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # All methods below are called with the lock held, except `_run`, `_look_up` and `_next_item`.

    def _has_news(self) -> bool:
        if self._error is not None or self._ready or self._ended or self._interrupted:
            return True
        return self._silent and self._rests()

    def _is_only_silent(self) -> bool:
        return self._silent and not (self._error or self._ready or self._ended or self._interrupted)

    def _rests(self) -> bool:
        """Whether the thread has nothing to do until `next` asks for more, or ends a silence."""
        waits = self._silent or not self._todo
        return self._phase is _Phase.IDLE and waits and all(work is None for work in self._todo)

    def _look_up_again(self) -> None:
        """Repeat the lookups made before the last updates; the thread rests."""
        for entry in self._ready:
            if entry.stale:
                entry.rows, entry.stale = self._prepare(entry.item), False

    def _is_done(self, work: Work) -> bool:
        return self._phase is not _Phase.UPDATING and all(other is not work for other in self._todo)

    def _raise(self) -> None:
        """Raise the error of the thread; items that were looked up before it are returned first."""
        if self._error is not None and (not self._ready or self._update_failed):
            error = self._error
            self._ended = True
            if not self._update_failed:
                self._error = None
            raise error

    def _overtake(self) -> None:
        """Do the waiting updates in this thread, while the pipeline's own only reads."""
        self._pauses += 1  # first: the thread must not leave IDLE or READING once this has seen it there
        try:
            self._changed.wait_for(lambda: self._phase in (_Phase.IDLE, _Phase.READING))
            if self._update_failed:  # later updates must not be done on rows that lack this one
                self._raise()
            # Updates overtake the lookups that are still queued, which then see more updates than otherwise.
            # After a wait it is time that decides this, so ranks and deterministic runs never wait like that.
            # In `drain` it is not: lookups made ahead are repeated, so that all see the same updates.
            waiting = [work for work in self._todo if work is not None]
            self._todo = deque(work for work in self._todo if work is None)
            for work in waiting:
                work()
        finally:
            self._pauses -= 1
            self._changed.notify_all()

    def _enter(self, phase: _Phase) -> bool:
        """Wait until the thread may continue; return False if the pipeline is closed."""
        self._changed.wait_for(lambda: not self._pauses or self._closed)
        self._phase = _Phase.IDLE if self._closed else phase
        self._changed.notify_all()
        return not self._closed

    def _run(self) -> None:
        while True:
            with self._changed:
                self._phase = _Phase.IDLE
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or (self._has_work() and not self._pauses))
                if self._closed:
                    return
                work = self._take_work()
                self._phase = _Phase.READING if work is None else _Phase.UPDATING
            try:
                if work is not None:
                    work()
                elif not self._ended:
                    self._look_up()
            except BaseException as error:
                # The thread ends: later lookups and updates would work on rows that lack an update.
                with self._changed:
                    self._error = error
                    self._update_failed = work is not None
                    self._phase = _Phase.IDLE
                    self._changed.notify_all()
                return

    def _has_work(self) -> bool:
        """Whether there is something to do: in a silence, only updates."""
        return any(work is not None for work in self._todo) if self._silent else bool(self._todo)

    def _take_work(self) -> Work | None:
        if not self._silent:
            return self._todo.popleft()
        work = next(work for work in self._todo if work is not None)
        self._todo.remove(work)
        return work

    def _next_item(self) -> Item | None:
        """Return the next item, without a thread; None at the end, or if it is interrupted."""
        while True:
            item = next(self._items, None)
            if item is not SILENT:
                self._ended = item is None
                return item
            if self._idle is not None:
                self._idle()
            if self._interrupted:
                return None

    def _look_up(self) -> None:
        item = next(self._items, None)
        with self._changed:
            if item is SILENT:
                self._todo.appendleft(None)  # this lookup is still to be done
                self._silent = True
                return
            if item is None:
                self._ended = True
                return
            if not self._enter(_Phase.PREPARING):
                return
        rows = self._prepare(item)  # without the lock, as the phase says: `next` may return earlier items
        with self._changed:
            self._ready.append(_Entry(item, rows))
