"""Pushes: each is applied once, however often it comes.

A worker whose connection broke cannot know whether its gradients were applied, so it sends them again. Every
push carries its sender and a number that counts up; a server remembers which numbers of each sender it has
applied. Numbers may arrive out of order, because threads of a worker push at once, and some never arrive:

    floor          highest
      |  1 1 1 0 1 1 1 0 1 |         1: applied, 0: `missing`, may still arrive
    refused: too old to remember     above: never seen

No sender is forgotten, because a push that a forgotten one repeats would look like a new one and be applied
twice. A window of `REMEMBERED` numbers per sender and a limit on senders bound the memory: in practice no
number is missing, and a sender takes about 300 bytes. A push that is beyond these bounds is refused by an
UnavailableError, on which the run restarts from its checkpoint; the restored state begins with no sender.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from monolith import concurrency
from monolith.errors import ClusterError, MonolithError, UnavailableError

MOST_SENDERS = 1 << 18
"""Senders per state of a server: every start of a worker is one."""
REMEMBERED = 4096
"""How far back, from its highest number, a sender's pushes are known."""
_AT_FIRST = 64
"""How many numbers below a sender's first may still arrive: a server that took over for another sees a sender
from the middle of its numbers."""

_NONE: frozenset[int] = frozenset()

T = TypeVar("T")


class KnownPushes(NamedTuple):
    """Which pushes of one sender were applied: copied to a server that takes over their result."""

    highest: int
    """The highest number that arrived."""
    missing: tuple[int, ...] = ()
    """Numbers shortly below the highest that were not applied, and may still arrive."""


@dataclass(slots=True)
class _Sender:
    floor: int
    highest: int
    # Empty ones are one object, `_NONE`, since there may be many senders.
    missing: frozenset[int]
    under_way: frozenset[int] = _NONE
    failed: dict[int, str] | None = None
    """Number -> error; it is unknown how much of these pushes was applied."""


class AppliedPushes:
    """The numbers of the pushes that a server has applied for one run. Thread-safe.

        applied = AppliedPushes()
        applied.once("worker-a", 1, apply=step, again=weights)   # calls step()
        applied.once("worker-a", 1, apply=step, again=weights)   # a retry: calls weights() only

    Args:
        senders: How many senders it knows at most; further ones are refused.
    """

    def __init__(self, senders: int | None = None) -> None:
        self._most = MOST_SENDERS if senders is None else senders
        # Guards all senders. Released while a push is applied: `under_way` makes a retry of the same push
        # wait for the first one, while pushes of other numbers run at the same time.
        self._changed = concurrency.Condition()
        self._is_still = False
        """Whether new pushes wait, because `still` has a block running."""
        self._senders: dict[str, _Sender] = {}

    def once(self, sender: str, number: int, apply: Callable[[], T], again: Callable[[], T]) -> T:
        """Return the result of `apply` if this push was not applied before, else that of `again`.

        Waits while the same push is being applied by another thread. A push that was refused by a
        MonolithError has changed nothing, and may be sent again.

        Raises:
            UnavailableError: It cannot be known whether the push was applied: its number is too old, or there
                are too many senders.
            ClusterError: The push failed halfway when it first arrived.
        """
        with self._changed:
            while self._is_still or number in (pushes := self._of(sender, number)).under_way:
                self._changed.wait()
            if pushes.failed and number in pushes.failed:
                raise ClusterError(f"push {number} failed when it first arrived: {pushes.failed[number]}")
            is_new = self._is_new(pushes, number)
            if is_new:
                self._begin(pushes, number)
        if not is_new:
            return again()
        try:
            answer = apply()
        except MonolithError:  # refused before anything changed: a retry may apply it
            self._end(pushes, number, applied=False)
            raise
        except BaseException as error:  # failed halfway: neither applying it again nor skipping it is right
            self._end(pushes, number, failure=repr(error))
            raise
        self._end(pushes, number)
        return answer

    @contextmanager
    def still(self) -> Iterator[dict[str, KnownPushes]]:
        """Let no push be under way while the block runs; yield which were applied.

        What is read in the block has exactly these pushes. Pushes that arrive meanwhile wait for its end.
        """
        with self._changed:
            while self._is_still:
                self._changed.wait()
            self._is_still = True  # first, or one push after the other could keep this waiting
        try:
            with self._changed:
                while any(pushes.under_way for pushes in self._senders.values()):
                    self._changed.wait()
            yield self.known()
        finally:
            with self._changed:
                self._is_still = False
                self._changed.notify_all()

    def known(self) -> dict[str, KnownPushes]:
        """Return the applied pushes of each sender."""
        with self._changed:
            return {sender: _known(pushes) for sender, pushes in self._senders.items()}

    def adopt(self, known: Mapping[str, KnownPushes]) -> None:
        """Count pushes as applied: the state that the server holds from now on contains them."""
        with self._changed:
            for sender, (highest, missing) in known.items():
                floor = max(0, highest - _AT_FIRST)
                recent = frozenset(number for number in missing if floor < number <= highest)
                self._senders[sender] = _Sender(floor, highest, recent)

    def _of(self, sender: str, number: int) -> _Sender:
        pushes = self._senders.get(sender)
        if pushes is None:
            if len(self._senders) >= self._most:
                raise UnavailableError(
                    f"{self._most:,} senders have pushed to this state of the server, and it cannot remember "
                    "the pushes of another one. Nothing was applied. A run that restarts from its checkpoint "
                    "begins with no sender; every start of a worker is one"
                )
            floor = max(0, number - 1 - _AT_FIRST)
            pushes = _Sender(floor, number - 1, frozenset(range(floor + 1, number)))
            self._senders[sender] = pushes
        return pushes

    def _is_new(self, pushes: _Sender, number: int) -> bool:
        if number <= pushes.floor:
            raise UnavailableError(
                f"push {number} is too old to know whether it was applied: its sender is at {pushes.highest} "
                f"and only numbers above {pushes.floor} are remembered. It is not applied now. Workers that "
                "rejoin the run resume from its last checkpoint"
            )
        return number > pushes.highest or number in pushes.missing

    def _begin(self, pushes: _Sender, number: int) -> None:
        # Out of `missing` before it is applied: while it is under way a retry waits, and then finds it
        # applied.
        pushes.under_way |= {number}
        pushes.missing = pushes.missing - {number} or _NONE
        if number > pushes.highest:
            pushes.floor = max(pushes.floor, number - REMEMBERED)
            skipped = range(max(pushes.highest, pushes.floor) + 1, number)
            if skipped or pushes.missing:  # rarely: most pushes arrive in order
                still = (one for one in pushes.missing if one > pushes.floor)
                pushes.missing = frozenset((*still, *skipped)) or _NONE
            pushes.highest = number

    def _end(self, pushes: _Sender, number: int, *, applied: bool = True, failure: str | None = None) -> None:
        with self._changed:
            pushes.under_way = pushes.under_way - {number} or _NONE
            if not applied and number > pushes.floor:
                pushes.missing |= {number}
            if failure is not None:
                pushes.failed = {**(pushes.failed or {}), number: failure}
                if len(pushes.failed) > _AT_FIRST:
                    del pushes.failed[next(iter(pushes.failed))]
            self._changed.notify_all()


def _known(pushes: _Sender) -> KnownPushes:
    # One that is under way counts as missing: a copy of the rows that is taken now may lack it.
    missing = sorted(pushes.missing | pushes.under_way)
    recent = tuple(number for number in missing if number > pushes.highest - _AT_FIRST)
    return KnownPushes(pushes.highest, recent)
