"""Pushes: each is applied once, however often it comes.

A worker whose connection broke cannot know whether its gradients were applied, so it sends them again. Every
push carries its sender and a number that counts up; a server remembers which numbers of each sender it has
applied. Numbers may arrive out of order, because threads of a worker push at once, and some never arrive:

    floor          highest
      |  1 1 1 0 1 1 1 0 1 |         1: applied, 0: `missing`, may still arrive
    refused: too old to remember     above: never seen

A window of `REMEMBERED` numbers per sender and a limit on senders bound the memory: a thousand workers take
less than a megabyte, because in practice only a few numbers are missing.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from monolith import concurrency
from monolith.errors import ClusterError, MonolithError, RequestError
from monolith.observe import Doublings

_log = logging.getLogger(__name__)

REMEMBERED = 4096
"""How far back, from its highest number, a sender's pushes are known."""
_AT_FIRST = 64
"""How many numbers below a sender's first may still arrive: a server that took over for another sees a sender
from the middle of its numbers."""

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
    missing: set[int]
    under_way: set[int] = field(default_factory=set)
    failed: OrderedDict[int, str] = field(default_factory=OrderedDict)
    """Number -> error; it is unknown how much of these pushes was applied."""


class AppliedPushes:
    """The numbers of the pushes that a server has applied for one run. Thread-safe.

        applied = AppliedPushes()
        applied.once("worker-a", 1, apply=step, again=weights)   # calls step()
        applied.once("worker-a", 1, apply=step, again=weights)   # a retry: calls weights() only

    Args:
        senders: How many senders are remembered; the one that was silent longest is forgotten first.
    """

    def __init__(self, senders: int = 4096) -> None:
        self._most = senders
        # Guards all senders. Released while a push is applied: `under_way` makes a retry of the same push
        # wait for the first one, while pushes of other numbers run at the same time.
        self._changed = concurrency.Condition()
        self._is_still = False
        """Whether new pushes wait, because `still` has a block running."""
        self._senders: OrderedDict[str, _Sender] = OrderedDict()
        self._forgotten = 0
        self._doublings = Doublings()

    def once(self, sender: str, number: int, apply: Callable[[], T], again: Callable[[], T]) -> T:
        """Return the result of `apply` if this push was not applied before, else that of `again`.

        Waits while the same push is being applied by another thread. A push that was refused by a
        MonolithError has changed nothing, and may be sent again.

        Raises:
            RequestError: The number is too old to know whether it was applied.
            ClusterError: The push failed halfway when it first arrived.
        """
        with self._changed:
            while self._is_still or number in (pushes := self._of(sender, number)).under_way:
                self._changed.wait()
            if number in pushes.failed:
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
                recent = {number for number in missing if floor < number <= highest}
                self._senders[sender] = _Sender(floor, highest, recent)

    def _of(self, sender: str, number: int) -> _Sender:
        if sender not in self._senders:
            floor = max(0, number - 1 - _AT_FIRST)
            self._senders[sender] = _Sender(floor, number - 1, set(range(floor + 1, number)))
            idle = (name for name, one in self._senders.items() if not one.under_way and name != sender)
            if len(self._senders) > self._most and (silent := next(idle, None)) is not None:
                del self._senders[silent]
                self._forgotten += 1
                # Were this sender to repeat a push now, it would be applied again.
                if self._doublings.due(self._forgotten):
                    _log.warning(
                        "more than %d senders push to this server; forgot which pushes of %d others were "
                        "applied, those that were silent longest. A push that one of them repeats would be "
                        "applied twice.",
                        self._most,
                        self._forgotten,
                    )
        self._senders.move_to_end(sender)
        return self._senders[sender]

    def _is_new(self, pushes: _Sender, number: int) -> bool:
        if number <= pushes.floor:
            raise RequestError(
                f"push {number} is too old to know whether it was applied: its sender is at {pushes.highest} "
                f"and only numbers above {pushes.floor} are remembered. It is not applied"
            )
        return number > pushes.highest or number in pushes.missing

    def _begin(self, pushes: _Sender, number: int) -> None:
        # Out of `missing` before it is applied: while it is under way a retry waits, and then finds it
        # applied.
        pushes.under_way.add(number)
        pushes.missing.discard(number)
        if number > pushes.highest:
            pushes.floor = max(pushes.floor, number - REMEMBERED)
            pushes.missing.update(range(max(pushes.highest, pushes.floor) + 1, number))
            if pushes.missing:  # rarely: most pushes arrive in order
                pushes.missing = {one for one in pushes.missing if one > pushes.floor}
            pushes.highest = number

    def _end(self, pushes: _Sender, number: int, *, applied: bool = True, failure: str | None = None) -> None:
        with self._changed:
            pushes.under_way.discard(number)
            if not applied and number > pushes.floor:
                pushes.missing.add(number)
            if failure is not None:
                pushes.failed[number] = failure
                if len(pushes.failed) > _AT_FIRST:
                    pushes.failed.popitem(last=False)
            self._changed.notify_all()


def _known(pushes: _Sender) -> KnownPushes:
    # One that is under way counts as missing: a copy of the rows that is taken now may lack it.
    missing = sorted(pushes.missing | pushes.under_way)
    recent = tuple(number for number in missing if number > pushes.highest - _AT_FIRST)
    return KnownPushes(pushes.highest, recent)
