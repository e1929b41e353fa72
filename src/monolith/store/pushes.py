"""Pushes: each is applied once, however often it comes.

A worker whose connection broke cannot know whether its gradients were applied, so it sends them again. Every
push carries who sent it and a number, which counts up; a server remembers, of each sender, which numbers it
has applied. Numbers may come out of order, because threads of a worker push at once, and some never come:

    floor          highest
      |  1 1 1 0 1 1 1 0 1 |         1: applied, 0: `missing`, may still come
    refused: too old to remember     above: never seen

So little is remembered that a thousand workers take less than a megabyte, as long as numbers are not far
apart; `REMEMBERED` and the number of senders bound it in any case.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from monolith.errors import ClusterError, MonolithError, RequestError

REMEMBERED = 4096
"""How far back, from its highest number, a sender's pushes are known."""
_AT_FIRST = 64
"""How many numbers below the first that is seen may be on their way: a server that took over hears a sender
from the middle."""

T = TypeVar("T")


class KnownPushes(NamedTuple):
    """Which pushes of one sender were applied, for a server that goes on with what they made."""

    highest: int
    """The highest number that came."""
    missing: tuple[int, ...] = ()
    """Numbers shortly below the highest that were not applied, and may still come."""


@dataclass(slots=True)
class _Sender:
    floor: int
    highest: int
    missing: set[int]
    under_way: set[int] = field(default_factory=set)
    failed: OrderedDict[int, str] = field(default_factory=OrderedDict)
    """Number -> what went wrong; nobody knows how much of these was applied."""


class AppliedPushes:
    """What a server has applied for one run. Thread-safe.

    Args:
        senders: How many are known; the one that was silent longest is forgotten first.
    """

    def __init__(self, senders: int = 4096) -> None:
        self._most = senders
        self._changed = threading.Condition()  # guards everything here
        self._senders: OrderedDict[str, _Sender] = OrderedDict()

    def once(self, sender: str, number: int, apply: Callable[[], T], again: Callable[[], T]) -> T:
        """Return what `apply` returns if this push has not come before, or else what `again` does.

        Waits for a push that came before and is being applied. One that was refused, by a MonolithError, has
        changed nothing, and may come again.

        Raises:
            RequestError: The number is too old to know whether it was applied.
            ClusterError: It failed in the middle when it came before.
        """
        with self._changed:
            held = self._of(sender, number)
            self._changed.wait_for(lambda: number not in held.under_way)
            if number in held.failed:
                raise ClusterError(f"push {number} failed when it came first: {held.failed[number]}")
            is_new = self._is_new(held, number)
            if is_new:
                self._begin(held, number)
        if not is_new:
            return again()
        try:
            answer = apply()
        except MonolithError:
            self._end(held, number, came=False)
            raise
        except BaseException as error:
            self._end(held, number, failure=repr(error))
            raise
        self._end(held, number)
        return answer

    def known(self) -> dict[str, KnownPushes]:
        """Return what was applied, by sender."""
        with self._changed:
            return {sender: _known(held) for sender, held in self._senders.items()}

    def adopt(self, known: Mapping[str, KnownPushes]) -> None:
        """Take pushes for applied: what is held from now on has them in it."""
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
        self._senders.move_to_end(sender)
        return self._senders[sender]

    def _is_new(self, held: _Sender, number: int) -> bool:
        if number <= held.floor:
            raise RequestError(
                f"push {number} is too old to know whether it was applied: its sender is at {held.highest}, "
                f"and what came after {held.floor} is remembered. It is not applied"
            )
        return number > held.highest or number in held.missing

    def _begin(self, held: _Sender, number: int) -> None:
        held.under_way.add(number)
        held.missing.discard(number)
        if number > held.highest:
            held.floor = max(held.floor, number - REMEMBERED)
            held.missing.update(range(max(held.highest, held.floor) + 1, number))
            held.missing = {one for one in held.missing if one > held.floor}
            held.highest = number

    def _end(self, held: _Sender, number: int, *, came: bool = True, failure: str | None = None) -> None:
        with self._changed:
            held.under_way.discard(number)
            if not came and number > held.floor:
                held.missing.add(number)
            if failure is not None:
                held.failed[number] = failure
                if len(held.failed) > _AT_FIRST:
                    held.failed.popitem(last=False)
            self._changed.notify_all()


def _known(held: _Sender) -> KnownPushes:
    missing = sorted(held.missing | held.under_way)
    recent = tuple(number for number in missing if number > held.highest - _AT_FIRST)
    return KnownPushes(held.highest, recent)
