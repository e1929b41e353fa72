"""What the chief knows of workers that have departed from a run whose data hands out work.

A worker may leave with steps that are in no checkpoint yet. Until they are, nobody may have the rest of its
work: who restores the checkpoint before would train it again, or not at all.

    departing ──a moment is cut in which it stands still──► cut ──on disk──► saved ──► given back
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from monolith.train.fleet.bodies import Departure
from monolith.train.peers import WorkerState


class Departures:
    """The departures of one run, by number. Used by the thread that trains."""

    def __init__(self) -> None:
        self._due: dict[int, Departure] = {}
        """Worker -> its departure, until its work was given back."""
        self.last = 0
        """The highest number that is known here."""
        self._past: set[int] = set()
        """Departures whose work was given back."""
        self._cut: dict[int, set[int]] = {}
        """Halt -> the departures that were known then."""
        self._saved: set[int] = set()
        self._since: dict[str, int] = {}
        """Worker -> the last halt before its work was given back, or dealt out."""
        self.gone: dict[str, WorkerState] = {}
        """Worker -> what is left of it, or was when another came in its place."""

    @property
    def due(self) -> list[tuple[int, Departure]]:
        """Who has departed, with work that was not given back yet, by worker."""
        return sorted(self._due.items())

    def note_heard(self, departing: Mapping[int, Departure]) -> None:
        """Note who has departed; what is old news by now is passed over."""
        for worker, one in departing.items():
            if one.number not in self._past:
                self._due[worker] = one
                self.last = max(self.last, one.number)

    def note_cut(self, halt: int, departing: Iterable[Departure]) -> None:
        """Note who had departed when everybody stood still."""
        self._cut[halt] = {one.number for one in departing if one.state is not None}

    def note_saved(self, halt: int) -> None:
        """Note that the checkpoint of a halt is on disk."""
        self._saved |= self._cut.pop(halt, set())
        self._cut = {number: found for number, found in self._cut.items() if number > halt}

    def is_saved(self, number: int) -> bool:
        """Whether all that a worker did before it departed is on disk."""
        return number in self._saved

    def note_given(self, worker: int, left: WorkerState, halt: int) -> None:
        """Note that its work was given back, after the halt of this number."""
        self._past.add(self._due.pop(worker).number)
        self._since[str(worker)] = halt
        self.gone[str(worker)] = left

    def note_dealt(self, workers: Iterable[int], halt: int) -> None:
        """Note that these workers were dealt other work, at the halt of this number."""
        self._since |= {str(worker): halt for worker in workers}

    def still_said(self, states: Mapping[str, WorkerState], halt: int) -> dict[str, WorkerState]:
        """Return what workers said at a halt, without those whose work was given back or dealt out since."""
        return {worker: one for worker, one in states.items() if halt > self._since.get(worker, 0)}
