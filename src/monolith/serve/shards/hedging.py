"""Legs: the requests of one lookup, one per shard, and the watch over those that take too long.

The thread of a lookup sends all its legs and then waits for one after the other: no thread is started or
woken for a request that is answered in time. `Minder` wakes up when the leg that is waited for is due, to
have a second replica asked (a hedge) or to end the wait at the deadline. It ends the thread's read by
cancelling the stream. Legs that are not waited for yet may have been answered long ago.

Invariant: a stream may be cancelled only under the leg's lock and only while the leg has its line. After that
the line may already belong to another request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from monolith import concurrency
from monolith.concurrency import Future
from monolith.serve.rows import RowsClaim
from monolith.serve.shards.replicas import Replica, ShardLine, ShardReplicas
from monolith.wire.bulk import Bytes

Floats = NDArray[np.float32]


class ShardAnswer(NamedTuple):
    """The rows of one shard, and how new they are."""

    rows: Floats
    claim: RowsClaim


NEVER = float("inf")
_GRACE = 0.005
"""Seconds granted to an answer that has arrived but was not read while the thread waited for another leg."""
_HEDGE_GRACE = 0.001


class Leg:
    """The request of one lookup to one shard.

    The thread of the lookup sends it and waits; the minder may hedge it or give it up; a thread of the pool
    may answer it with the row of a second replica. `lock` decides between the three.
    """

    def __init__(
        self, shard: ShardReplicas, header: bytes, data: Bytes, floats: int, deadline: float, *, hedged: bool
    ) -> None:
        self.shard = shard
        self.header = header
        self.data = data
        self.floats = floats
        """Number of floats that the answer must have."""
        self.deadline = deadline
        self.hedged = hedged
        """Whether a second replica may be asked if the first is slow."""
        self.tried: set[Replica] = set()
        self.hedge_at = NEVER
        self.hedge: Future[ShardAnswer] | None = None
        self.second: Leg | None = None
        """The request to the second replica."""
        self.sent_at = 0.0
        self.line: ShardLine | None = None
        self.answer: ShardAnswer | None = None
        """The answer of the second replica, if it was faster."""
        self.late = False
        """Whether the wait was ended at the deadline."""
        self.done = False
        self.lock = concurrency.Lock()  # guards line, hedge, answer, late and done

    def begin(self, line: ShardLine) -> None:
        """Note that the request was sent over a line."""
        with self.lock:
            self.line = line
        self.sent_at = concurrency.monotonic()
        self.hedge_at = self.sent_at + self.shard.hedge.seconds if self.hedged else NEVER
        line.replica.in_flight += 1

    def wait_from(self, now: float) -> None:
        """Note that the thread of the lookup waits for this leg from now on: only now can it be late."""
        self.hedge_at = max(self.hedge_at, now + _HEDGE_GRACE)
        self.deadline = max(self.deadline, now + _GRACE)

    def end(self) -> None:
        """Take the line away from the leg: from now on it is not cancelled."""
        with self.lock:
            line, self.line = self.line, None
        if line is not None:
            line.replica.in_flight -= 1

    def finish(self, *, keep_line: bool) -> None:
        """End the leg. Its line is reused for other requests unless it was cancelled or is broken."""
        with self.lock:
            self.done = True
            line, self.line = self.line, None
            cancelled = self.answer is not None or self.late
        if line is not None:
            line.replica.in_flight -= 1
            if keep_line and not cancelled:
                line.give_back()
            else:
                line.close()

    def answer_with(self, found: ShardAnswer) -> bool:
        """Answer with the rows of the second replica; return False if the first was faster."""
        with self.lock:
            if self.done or self.answer is not None:
                return False
            self.answer = found
            if self.line is not None:
                self.line.stream.cancel("another replica was faster")
            return True

    def give_up(self) -> None:
        """End the wait at the deadline."""
        with self.lock:
            if not self.done and self.answer is None:
                self.late = True
                if self.line is not None:
                    self.line.stream.cancel("the deadline of the request passed")


class Minder:
    """A thread that watches the legs that lookups wait for, until it is closed.

    Args:
        hedge: Called with a leg for which a second replica should be asked; must not wait.
    """

    def __init__(self, hedge: Callable[[Leg], None]) -> None:
        self._hedge = hedge
        self._changed = concurrency.Condition()  # guards all below
        self._legs: dict[Leg, None] = {}  # as a set, in the order of `watch`: a simulated run is repeatable
        self._wakes_at = NEVER
        self._stopped = False
        self._thread = concurrency.Thread(target=self._run, name="shards-minder", daemon=True)
        self._thread.start()

    def watch(self, leg: Leg) -> None:
        due = min(leg.hedge_at, leg.deadline)
        with self._changed:
            self._legs[leg] = None
            stopped = self._stopped
            if due < self._wakes_at:  # seldom: legs that are watched already are due before
                self._changed.notify()
        if stopped:  # the thread has ended, and `close` did not see this leg
            leg.give_up()

    def forget(self, leg: Leg) -> None:
        with self._changed:
            self._legs.pop(leg, None)

    def close(self) -> None:
        """End the thread and give up the remaining legs."""
        with self._changed:
            self._stopped = True
            legs = list(self._legs)
            self._changed.notify()
        for leg in legs:
            leg.give_up()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                now = concurrency.monotonic()
                self._wakes_at = min((min(leg.hedge_at, leg.deadline) for leg in self._legs), default=NEVER)
                if self._stopped:
                    return
                if self._wakes_at > now:
                    self._changed.wait(None if self._wakes_at == NEVER else self._wakes_at - now)
                    continue
                due = [leg for leg in self._legs if min(leg.hedge_at, leg.deadline) <= now]
                for leg in due:
                    if leg.deadline <= now:
                        del self._legs[leg]
            for leg in due:
                if leg.deadline <= now:
                    leg.give_up()
                else:
                    leg.hedge_at = NEVER
                    self._hedge(leg)
