"""When an answer counts as slow: when it takes longer than nearly all did lately."""

from __future__ import annotations

from collections import deque

_KEPT = 256
_ENOUGH = 32
"""Answers from which on the wait follows from them, and after how many it is found out again."""
_SHARE = 0.95
_SPARE = 10.0
_PER_REQUEST = 0.1


class HedgeDelay:
    """How long to wait for a replica before another is asked: the 95th percentile of recent answers, bounded.

    Any thread may call it; a number that is lost in a race is one of hundreds.
    """

    def __init__(self, least: float, most: float) -> None:
        self._least, self._most = least, most
        self._recent: deque[float] = deque(maxlen=_KEPT)
        self._noted = 0
        self.seconds = most

    def note(self, seconds: float) -> None:
        """Learn from an answer that came."""
        self._recent.append(seconds)
        self._noted += 1
        if self._noted % _ENOUGH == 0:
            known = sorted(self._recent.copy())
            slow = known[min(len(known) - 1, int(_SHARE * len(known)))]
            self.seconds = min(self._most, max(self._least, slow))


class HedgeBudget:
    """How many requests may be made twice: one in ten, and a few at once.

    Where all replicas are slow because there is too much to do, to ask another would make it more.
    """

    def __init__(self) -> None:
        self._left = _SPARE

    def earn(self) -> None:
        """A request was made."""
        self._left = min(_SPARE, self._left + _PER_REQUEST)

    def spend(self) -> bool:
        """Whether another one may be made twice; if so, it counts."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
