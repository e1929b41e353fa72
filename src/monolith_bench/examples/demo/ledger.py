"""The demo's ledger records which process trained on which record, so that its claims can be checked.

A killed process loses its steps since its last checkpoint; the next process takes them
again. So the steps that count are those of the first process up to the checkpoint and
those of the second. Each must begin with the record after the last of the step before: then
none was lost and none counts twice. The steps that were taken twice show more: their loss,
before and after the kill, must be the same to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from monolith_bench.examples.demo.process import Event, Started, Stepped, WindowEnded


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """How the second process resumed after the first was killed."""

    killed_step: int
    """The last step of the first process."""
    killed_record: int
    """The record it would have trained on next."""
    step: int
    """The last step that the second process found done."""
    next_record: int
    expected_record: int
    """What the first process would have trained on next, after that step."""
    seconds: float
    """From the kill to the end of the first step."""
    again: int
    """Steps that both processes take and that can be compared: up to the next save, which is a pause."""
    compared: int
    """Of those, the ones that the second process has taken by now."""
    same: int
    """Of those, the ones with the same records and the same bits of loss."""

    @property
    def exact(self) -> bool:
        return self.next_record == self.expected_record and 0 < self.again == self.compared == self.same


class Ledger:
    """What two processes told, one after the other.

    Args:
        save_steps: How many steps lie between two saves.
    """

    def __init__(self, save_steps: int) -> None:
        self._save_steps = save_steps
        self._steps: dict[int, Stepped] = {}  # those that count
        self._windows: dict[int, WindowEnded] = {}  # by where they end
        self._before: dict[int, Stepped] = {}  # the steps lost in the kill
        self._starts: list[Started] = []
        self._killed_at = 0.0
        self._killed: Stepped | None = None
        self._seconds = 0.0
        self._trained = 0
        self._last_at = 0.0

    def add(self, event: Event) -> None:
        """Take an event down, in the order in which they were told."""
        match event:
            case Started():
                self._start(event)
            case Stepped():
                self._steps[event.step] = event
                self._trained += event.end - event.first
                self._seconds += event.at - self._last_at
                self._last_at = event.at
            case WindowEnded():
                self._windows[event.end] = event
            case _:
                pass

    def killed(self, at: float) -> None:
        """The process is dead, and all that it told is taken down."""
        self._killed_at = at
        self._killed = self._steps[self.step]

    @property
    def step(self) -> int:
        """The last step that was taken."""
        return next(reversed(self._steps), 0)

    @property
    def next_record(self) -> int:
        return self.end_of(self.step)

    @property
    def seconds(self) -> float:
        """Spent on training, in both processes."""
        return self._seconds

    @property
    def speed(self) -> float:
        """Examples per second, those that were trained on again included."""
        return self._trained / self._seconds if self._seconds else 0.0

    @property
    def windows(self) -> list[WindowEnded]:
        """Those that count, in order."""
        return [self._windows[end] for end in sorted(self._windows)]

    def end_of(self, step: int) -> int:
        """Return the number of the record after a step."""
        return self._steps[step].end if step else 0

    def trained_by(self, at: float) -> int:
        """Return the number of the record that was next at a Unix time, as far as steps count."""
        return max((step.end for step in self._steps.values() if step.at <= at), default=0)

    def gapless(self) -> bool:
        """Whether the steps that count went through all records from the first on, each once."""
        steps = [self._steps[step] for step in sorted(self._steps)]
        return (
            bool(steps)
            and steps[0].step == 1
            and steps[0].first == 0
            and all(b.step == a.step + 1 and b.first == a.end for a, b in pairwise(steps))
        )

    def resume(self) -> Resume | None:
        """Return how the second process resumed; None before its first step."""
        if len(self._starts) < 2 or self._killed is None:
            return None
        start = self._starts[1]
        first = self._steps.get(start.step + 1)
        if first is None:
            return None
        again = [step for step in self._before if step <= start.step + self._save_steps]
        compared = [step for step in again if step in self._steps]
        return Resume(
            killed_step=self._killed.step,
            killed_record=self._killed.end,
            step=start.step,
            next_record=start.next_record,
            expected_record=self.end_of(start.step),
            seconds=first.at - self._killed_at,
            again=len(again),
            compared=len(compared),
            same=sum(_alike(self._before[step], self._steps[step]) for step in compared),
        )

    def _start(self, event: Started) -> None:
        self._starts.append(event)
        self._last_at = event.at
        self._before = {number: step for number, step in self._steps.items() if number > event.step}
        self._steps = {number: step for number, step in self._steps.items() if number <= event.step}
        self._windows = {end: one for end, one in self._windows.items() if end <= event.next_record}


def _alike(one: Stepped, other: Stepped) -> bool:
    return (one.first, one.end, one.loss) == (other.first, other.end, other.loss)
