"""Asking a server about marked items, until its scores or its lists of best items know of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from monolith.serve.client import Client
from monolith.serve.client_messages import ClientAnswer
from monolith.serve.freshness_probe import up_to_of
from monolith.serve.rows import STAGES
from monolith_bench.marked_events import HEAD, MARKED, NOBODY, FreshnessJob

STAGES_OF_MARKS = (*STAGES, "ask")
"""And from there until who asks has the answer."""
BEST = 100
"""How many items a list of best items has."""
_PAUSE = 0.01
"""Seconds between an answer and the next request."""
_MOST_USERS = 32
"""Users whose lists are asked for at a time, those of the oldest marks: a server that is late is not asked
for more and more."""
_LOOK_BEFORE = 0.1
"""Seconds before an item is removed in which it must be in the list that it is to leave."""


@dataclass(frozen=True, slots=True)
class MarkSeen:
    """A marked event, and the first answer that knew of it. Times are Unix seconds."""

    number: int
    happened: float
    answered: float
    parameters: Mapping[str, Any]
    """What the answer said of how new it is."""

    @property
    def seconds(self) -> float:
        return self.answered - self.happened

    def stages(self, read: float | None = None, trained: float | None = None) -> dict[str, float]:
        """Return the seconds of each stage.

        The rest is of the answer's stamps: of the delta that brought it, or a later one that came at the same
        time.

        Args:
            read, trained: When its batch was; None takes the stamps for that, too.
        """
        up_to = up_to_of(self.parameters)
        read = up_to.learned.read_at if read is None else read
        trained = up_to.learned.trained_at if trained is None else trained
        ends = (
            *(self.happened, read, trained, up_to.learned.published_at),
            *(up_to.received_at, up_to.applied_at, self.answered),
        )
        return {
            name: max(0.0, ends[number + 1] - ends[number]) for number, name in enumerate(STAGES_OF_MARKS)
        }


class MarkWatch:
    """Asks for all marked items that have appeared and are not known yet, again and again.

    Each request also has an item that no event has: while an answer gives both the same score, the model does
    not know the marked item. The user is one that no event has, so that nothing else moves them apart.
    """

    def __init__(
        self,
        job: FreshnessJob,
        began: float,
        client: Client,
        model: str,
        *,
        patience: float = 10.0,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._job, self._began = job, began
        self._client, self._model = client, model
        self._patience = patience
        self._clock, self._sleep = clock, sleep
        self.next = 0
        """The first mark that was not waited for yet."""
        self.lost = 0
        """Marks that no answer knew of in time."""

    def pass_over(self) -> None:
        """Leave out the marks that have been due by now."""
        while self._happened(self.next) <= self._clock():
            self.next += 1

    def watch(self, marks: int, *, between: Callable[[], None] = lambda: None) -> list[MarkSeen]:
        """Wait for so many marks from the next one on.

        Args:
            between: Called after every answer.
        """
        end = self.next + marks
        waiting: list[int] = []
        seen: list[MarkSeen] = []
        while self.next < end or waiting:
            while self.next < end and self._happened(self.next) <= self._clock():
                waiting.append(self.next)
                self.next += 1
            known = self._known(waiting) if waiting else []
            seen += known
            over = {one.number for one in known}
            late = {one for one in waiting if self._clock() - self._happened(one) > self._patience} - over
            self.lost += len(late)
            waiting = [one for one in waiting if one not in over | late]
            between()
            self._sleep(_PAUSE)
        return seen

    def ask(self, items: Sequence[int]) -> ClientAnswer:
        """Return what the server says of items and a user that it does not know."""
        columns = {"user": [NOBODY] * len(items), "item": list(items)}
        return self._client.predict(self._model, columns)

    def _known(self, waiting: Sequence[int]) -> list[MarkSeen]:
        answer = self.ask([NOBODY, *(MARKED + number for number in waiting)])
        now = self._clock()
        unknown, *scores = answer.outputs[HEAD]
        return [
            MarkSeen(number, self._happened(number), now, answer.parameters)
            for number, score in zip(waiting, scores, strict=True)
            if score != unknown
        ]

    def _happened(self, number: int) -> float:
        return self._began + self._job.mark_at(number)


class ListWatch(MarkWatch):
    """Asks for the best items of the users of marked events, until the lists have the new items."""

    def _known(self, waiting: Sequence[int]) -> list[MarkSeen]:
        lists, answered = self._lists(waiting[:_MOST_USERS])
        return [
            MarkSeen(number, self._happened(number), answered, parameters)
            for number, (listed, parameters) in lists.items()
            if listed
        ]

    def _lists(self, marks: Sequence[int]) -> tuple[dict[int, tuple[bool, Mapping[str, Any]]], float]:
        """Return whether the list of each mark's user has its item, what the answer says, and the time."""
        users = {"user": [self._job.user_of_mark(number) for number in marks]}
        answer = self._client.topk(self._model, users, BEST)
        listed = [MARKED + number in items for number, items in zip(marks, answer.items, strict=True)]
        return {
            number: (one, answer.parameters) for number, one in zip(marks, listed, strict=True)
        }, self._clock()


class RemovalWatch(ListWatch):
    """Asks for the same lists around the time at which the trainer removes the items, until they are gone.

    An item that others push out of a list would look as if it were removed. So only those count that were in
    the list shortly before, and others are lost.

    Args:
        removed: Number of a mark -> when its item was removed; grows meanwhile.
    """

    def __init__(
        self,
        job: FreshnessJob,
        began: float,
        removed: Mapping[int, float],
        client: Client,
        model: str,
        *,
        patience: float = 10.0,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(job, began, client, model, patience=patience, clock=clock, sleep=sleep)
        self._removed = removed
        self._left: dict[int, tuple[float, Mapping[str, Any]] | None] = {}
        """Marks that were in a list -> the first answer without them since; None if they still are in it."""

    def _happened(self, number: int) -> float:
        return super()._happened(number) + self._job.remove_after - _LOOK_BEFORE

    def _known(self, waiting: Sequence[int]) -> list[MarkSeen]:
        lists, answered = self._lists(waiting[:_MOST_USERS])
        gone: list[MarkSeen] = []
        for number, (listed, parameters) in lists.items():
            if listed:
                self._left[number] = None
            elif number in self._left:
                left = self._left[number] = self._left[number] or (answered, parameters)
                # The trainer's word may come after the answer, but the removal itself cannot.
                if self._removed.get(number, left[0] + 1) <= left[0]:
                    gone.append(MarkSeen(number, self._removed[number], *left))
        return gone
