"""The coordination service follows its table of transitions: every event is allowed or refused as drawn."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import pytest
from runtime.test_departures import START as ELASTIC
from runtime.test_service import START as FIXED
from runtime.test_service import Caller, Clock, state

from monolith.errors import ClusterError
from monolith.runtime.service import TRANSITIONS, CoordinationService, RunPhase, WorkerEvent, WorkerPhase

WORKER = 1


class Walk:
    """A run that keeps going, with the chief and one worker, of which any event can be caused.

    Args:
        elastic: Whether its data is a work queue.
    """

    def __init__(self, *, elastic: bool, keep_going: bool = True) -> None:
        self.elastic = elastic
        self.clock = Clock()
        self.service = CoordinationService(2, lost_after=timedelta(seconds=10), clock=self.clock)
        self.call = Caller(self.service)
        self.call("begin", run="r", num_workers=2, keep_going=keep_going)

    def open(self) -> Walk:
        self.call("open", run="r", start=ELASTIC if self.elastic else FIXED)
        self.call.join(0)
        return self

    @property
    def phase(self) -> WorkerPhase:
        assert self.service._run is not None
        return self.service._run.phase_of(WORKER)

    @property
    def run_phase(self) -> RunPhase:
        assert self.service._run is not None
        return self.service._run.phase

    # Events

    def cause(self, event: WorkerEvent) -> None:
        """Cause an event; the service may refuse it, or answer that the worker has to wait."""
        causes: dict[WorkerEvent, Callable[[], object]] = {
            WorkerEvent.JOIN: lambda: self.call.join(WORKER),
            WorkerEvent.ASK: lambda: self.call(
                "news", run="r", worker=WORKER, seen=-1, wait=0, member="process"
            ),
            WorkerEvent.BREAK: self._break,
            WorkerEvent.LOSE: self._lose,
            WorkerEvent.LEAVE: lambda: self._leave(gives_back=False),
            WorkerEvent.DEPART: lambda: self._leave(gives_back=True),
            WorkerEvent.GIVE_BACK: lambda: self.call(
                "given_back", run="r", worker=WORKER, number=1, state=state()
            ),
        }
        with suppress(ClusterError):
            causes[event]()

    def _leave(self, *, gives_back: bool) -> None:
        self.call("leave", run="r", worker=WORKER, state=state(), gives_back=gives_back, member="process")

    def _break(self) -> None:
        self.call.gone.add(WORKER)
        seen = self.call.news(0)["version"]
        with suppress(TypeError):  # a broken connection is answered with nothing
            self._ask(seen=seen, wait=0.3)
        self.call.gone.clear()

    def _lose(self) -> None:
        """Let the worker be silent for too long, which the question of the chief finds out."""
        for _ in range(4):
            self.clock.now += 4
            self.call.news(0)
            assert self.service._run is not None
            with self.service._changed:  # as a question does that waits
                self.service._check_for_lost(self.service._run)

    def _ask(self, *, seen: int, wait: float) -> None:
        self.call("news", run="r", worker=WORKER, seen=seen, wait=wait, member="process")

    # Phases

    def to(self, phase: WorkerPhase) -> Walk:
        """Bring the worker to a phase, along the drawn transitions."""
        way = {
            WorkerPhase.UNKNOWN: [],
            WorkerPhase.PRESENT: [WorkerEvent.JOIN],
            WorkerPhase.PARTED: [WorkerEvent.JOIN, WorkerEvent.BREAK],
            WorkerPhase.LOST: [WorkerEvent.JOIN, WorkerEvent.LOSE],
            WorkerPhase.DEPARTING: [WorkerEvent.JOIN, WorkerEvent.DEPART],
            WorkerPhase.GONE: [WorkerEvent.JOIN, WorkerEvent.DEPART, WorkerEvent.GIVE_BACK],
            WorkerPhase.LEFT: [WorkerEvent.JOIN, WorkerEvent.LEAVE],
        }
        for event in way[phase]:
            self.cause(event)
        assert self.phase is phase
        return self


ONLY_ELASTIC = {WorkerPhase.DEPARTING, WorkerPhase.GONE}
ONLY_FIXED = {WorkerPhase.LOST}
CASES = [
    (elastic, phase, event)
    for elastic in (False, True)
    for phase in WorkerPhase
    for event in WorkerEvent
    if phase not in (ONLY_FIXED if elastic else ONLY_ELASTIC)
]


@pytest.mark.parametrize(
    ("elastic", "phase", "event"),
    CASES,
    ids=[f"{'elastic' if one[0] else 'fixed'}: {one[1].value}, {one[2].value}" for one in CASES],
)
def test_a_worker_changes_its_phase_only_as_drawn(
    elastic: bool, phase: WorkerPhase, event: WorkerEvent
) -> None:
    walk = Walk(elastic=elastic).open().to(phase)
    walk.cause(event)
    allowed = TRANSITIONS[phase].get(event)
    if event is WorkerEvent.DEPART and not elastic:
        allowed = TRANSITIONS[phase].get(WorkerEvent.LEAVE)  # there is no queue to give work back to
    assert walk.phase in ({phase} if allowed is None else allowed)


def test_without_keeping_going_a_lost_worker_fails_the_run() -> None:
    walk = Walk(elastic=False, keep_going=False).open().to(WorkerPhase.PRESENT)
    walk.cause(WorkerEvent.LOSE)
    assert walk.run_phase is RunPhase.FAILED
    walk.call("halt", run="r")
    assert walk.run_phase is RunPhase.FAILED, "it stays so"


def test_a_run_restores_trains_pauses_and_ends() -> None:
    walk = Walk(elastic=False)
    phases = [walk.run_phase]
    for name, more in (("open", {"start": FIXED}), ("halt", {}), ("release", {}), ("over", {"wait": 0})):
        walk.call(name, run="r", **more)
        phases.append(walk.run_phase)
    assert phases == [
        RunPhase.RESTORING,
        RunPhase.TRAINING,
        RunPhase.PAUSED,
        RunPhase.TRAINING,
        RunPhase.OVER,
    ]
