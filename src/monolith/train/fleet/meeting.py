"""Where the workers of a run agree on when to begin, halt and end. Server 0 keeps it.

    begin      the chief starts a run: what an earlier run left is forgotten
    join       a worker waits here for the chief to have restored everything, and learns where to go on
    halt       the chief wants nobody to train; each worker finishes its step and arrives with its state
    release    they go on
    saved      the checkpoint of a halt is on disk, so sources may forget what came before it
    leave      a worker is done, and leaves its last state behind; or it failed, which ends the run for all
    stop       everybody is to finish
    over       the last checkpoint is on disk, or never will be

A worker hears of all this by asking for news, again and again. That also tells that it lives: it has a
question here all the time, and one whose connection breaks and does not come back is lost.

    unknown ──join──► present ──leave──► left
                       │   ▲
         broken, silent│   │asks again
                       ▼   │
                      parted ──RETURN_WITHIN, or silent for lost_after──► lost: the run has failed

A run that has failed stays so. Whoever is left of it hears why, and joins again; the chief begins the next.
A worker that joins a run twice has restarted, and does not know what it trained: the run has failed, too.

What is said, and how it is checked where it comes from a network, is in `bodies`. No call waits longer
than it was told to.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

from monolith.errors import ConfigError, RequestError, UnavailableError
from monolith.train.fleet.bodies import (
    Arrive,
    AskGathered,
    AskNews,
    BeginMeeting,
    FailedRun,
    Farewell,
    GatheredStates,
    HaltNumber,
    HaltSaved,
    Join,
    Joined,
    Leave,
    News,
    OfRun,
    OpenMeeting,
    SayOver,
    Stop,
)
from monolith.train.peers import Start, WorkerState
from monolith.wire.bodies import Answer, Gone, PollAnswer

LONGEST_WAIT = 20.0
"""Seconds that one call may be kept waiting, whatever it asks for."""
LOST_AFTER = timedelta(seconds=60)
"""A worker that has not been heard of for so long is lost, although its connection holds: it hangs, or was
stopped, or its machine is gone."""
RETURN_WITHIN = 2.0
"""Seconds that a worker has to connect again."""
STOPPED_FOR = 5.0
"""Seconds without a look for the lost, by which this process knows that it was stopped itself."""
_LOOK_EVERY = 0.2


class _OfRun(Protocol):
    """Any request that says which run it means."""

    @property
    def run(self) -> str: ...


@dataclass(slots=True)
class _Run:
    """One start of the chief."""

    name: str
    start: Start | None = None
    """What workers are told when they may begin; None while the chief still restores."""
    halt: int | None = None
    members: dict[int, str] = field(default_factory=dict)
    """Worker -> the process that joined as that one."""
    arrived: dict[int, WorkerState] = field(default_factory=dict)
    """Worker -> its state, at the halt in force."""
    left: dict[int, WorkerState] = field(default_factory=dict)
    """Worker -> its last state."""
    heard: dict[int, float] = field(default_factory=dict)
    """Worker -> when it last said something."""
    parted: dict[int, float] = field(default_factory=dict)
    """Worker -> when its connection broke, until it asks again."""
    stop: str | None = None
    unfinished: bool = False
    """Whether somebody stopped it before its end."""
    failure: str | None = None
    failed_at: float = 0.0
    final: bool = False
    """Whether the chief will not begin again by itself."""
    saved: int = 0
    """The last halt whose checkpoint is on disk."""
    over: bool = False
    told: set[int] = field(default_factory=set)
    """Workers who know that it is over."""
    version: int = 0
    """Counts changes that workers want to hear of."""


class Meeting:
    """The state that the workers of a run share. Thread-safe.

    Args:
        num_workers: The chief included, who is worker 0.
        lost_after: How long a worker may be silent.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        lost_after: timedelta = LOST_AFTER,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if num_workers < 1:
            raise ConfigError(f"meeting: num_workers must be at least 1, got {num_workers}")
        self._num_workers = num_workers
        self._lost_after = lost_after.total_seconds()
        self._clock = clock
        self._changed = threading.Condition()  # guards what follows
        self._run: _Run | None = None
        self._halts = 0
        self._looked = clock()

    @property
    def calls(self) -> Mapping[str, Answer]:
        """What others may call, by name."""
        return {
            "meeting.begin": self._begin,
            "meeting.open": self._open,
            "meeting.join": self._join,
            "meeting.halt": self._halt,
            "meeting.arrive": self._arrive,
            "meeting.gathered": self._gathered,
            "meeting.release": self._release,
            "meeting.saved": self._saved,
            "meeting.over": self._over,
            "meeting.leave": self._leave,
            "meeting.stop": self._stop,
        }

    @property
    def polls(self) -> Mapping[str, PollAnswer]:
        """What others may call and have told whether they are still there."""
        return {"meeting.news": self._news}

    # The chief's

    def _begin(self, body: BeginMeeting) -> None:
        if body.num_workers != self._num_workers:
            raise ConfigError(
                f"the chief counts {body.num_workers} workers and server 0 {self._num_workers}; "
                "start all processes with the same cluster.num_workers"
            )
        with self._changed:
            self._run = _Run(body.run)
            self._note(self._run)

    def _open(self, body: OpenMeeting) -> None:
        with self._changed:
            run = self._of(body)
            run.start = body.start
            run.heard[0] = self._clock()
            self._note(run)

    def _halt(self, body: OfRun) -> HaltNumber:
        with self._changed:
            run = self._of(body)
            if run.halt is None:
                self._halts += 1
                run.halt = self._halts
                run.arrived.clear()
                self._note(run)
            return HaltNumber(run.halt)

    def _gathered(self, body: AskGathered) -> GatheredStates:
        """Wait until every other worker has arrived or left; say who has not, and who never joined."""
        with self._changed:
            run = self._of(body)

            def missing() -> list[int]:
                here = run.left.keys() if body.left else run.left.keys() | run.arrived.keys()
                return [worker for worker in range(1, self._num_workers) if worker not in here]

            self._wait(lambda: self._run is not run or not missing() or run.failure is not None, body.wait)
            return GatheredStates(
                missing=tuple(missing()),
                absent=tuple(worker for worker in missing() if worker not in run.members),
                states={str(w): state for w, state in {**run.arrived, **run.left}.items()},
                failure=run.failure,
            )

    def _release(self, body: OfRun) -> None:
        with self._changed:
            run = self._of(body)
            run.halt = None
            run.arrived.clear()
            self._note(run)

    def _saved(self, body: HaltSaved) -> None:
        with self._changed:
            run = self._of(body)
            run.saved = max(run.saved, body.halt)
            self._note(run)

    def _over(self, body: SayOver) -> Farewell:
        """Tell everybody; say who has not heard it yet, and may still."""
        with self._changed:
            run = self._of(body)
            if not run.over:
                run.over = True
                self._note(run)
            # Whoever keeps this may be gone in a moment.
            self._wait(lambda: not self._untold(run), body.wait)
            return Farewell(tuple(self._untold(run)), run.unfinished)

    def _untold(self, run: _Run) -> list[int]:
        return sorted(run.members.keys() - run.told - run.parted.keys())

    # Every worker's

    def _join(self, body: Join) -> Joined:
        """Wait for a run to begin; say which one, or that one has failed or is over.

        A run of which the caller knows that it has failed is waited out.
        """
        self._check_worker(body.worker)
        worker, member, known = body.worker, body.member, body.known

        def has_news() -> bool:
            run = self._run
            if run is None:
                return False
            if run.failure is not None:
                return run.name != known
            # Who restarted when all its work was done has nothing to do but hear how it ended.
            return run.over or (run.start is not None and worker not in run.left)

        with self._changed:
            self._wait(has_news, body.wait)
            run = self._run
            if run is None or not has_news():
                return Joined()
            if run.over:
                run.told.add(worker)
                return Joined(over=True, unfinished=run.unfinished)
            if run.failure is None and run.members.get(worker, member) != member:
                self._fail(run, f"worker {worker} restarted")
            if run.failure is not None:
                ago = self._clock() - run.failed_at
                return Joined(failed=FailedRun(run.name, run.failure, run.final, ago))
            run.members[worker] = member
            run.heard[worker] = self._clock()
            return Joined(run.name, run.start)

    def _news(self, body: AskNews, gone: Gone) -> News | None:
        with self._changed:
            run, worker = self._of(body), body.worker
            run.heard[worker] = self._clock()
            run.parted.pop(worker, None)
            limit = self._clock() + min(body.wait, LONGEST_WAIT)
            while run.version == body.seen and self._run is run and self._clock() < limit:
                self._changed.wait(_LOOK_EVERY)
                if gone():
                    run.parted[worker] = self._clock()
                    return None
                self._look_for_lost(run)
            run = self._of(body)
            run.heard[worker] = self._clock()
            if run.over:
                run.told.add(worker)
                self._changed.notify_all()
            return News(
                version=run.version,
                halt=run.halt,
                stop=run.stop,
                unfinished=run.unfinished,
                failure=run.failure,
                saved=run.saved,
                over=run.over,
            )

    def _arrive(self, body: Arrive) -> None:
        self._check_worker(body.worker)
        with self._changed:
            run = self._of(body)
            if run.halt == body.halt:  # otherwise it was released meanwhile
                run.arrived[body.worker] = body.state
                self._changed.notify_all()

    def _leave(self, body: Leave) -> None:
        self._check_worker(body.worker)
        with self._changed:
            run, worker = self._of(body), body.worker
            if body.failure:
                self._fail(run, f"worker {worker} failed: {body.failure}", final=body.final)
            elif body.state is None:
                raise RequestError("state: it is missing; only a worker that failed may leave without one")
            else:
                run.left[worker] = body.state
                self._note(run)

    def _stop(self, body: Stop) -> None:
        with self._changed:
            run = self._of(body)
            run.stop = run.stop or body.reason
            run.unfinished = run.unfinished or body.unfinished
            self._note(run)

    # Inside; the lock is held

    def _look_for_lost(self, run: _Run) -> None:
        now = self._clock()
        stopped, self._looked = now - self._looked > STOPPED_FOR, now
        if stopped:  # it was this process that slept: nobody could be heard
            run.heard = dict.fromkeys(run.heard, now)
            run.parted = dict.fromkeys(run.parted, now)
        for worker, heard in run.heard.items():
            if worker in run.left or run.over:
                continue
            who = "worker 0, the chief," if worker == 0 else f"worker {worker}"
            if now - run.parted.get(worker, now) > RETURN_WITHIN:
                self._fail(run, f"{who} was lost: its connection broke. See its log.")
            elif now - heard > self._lost_after:
                self._fail(run, f"{who} was lost: it has been silent for {now - heard:.0f} s. See its log.")

    def _fail(self, run: _Run, why: str, *, final: bool = False) -> None:
        if run.failure is None:
            run.failure, run.final, run.failed_at = why, final, self._clock()
            self._note(run)

    def _of(self, body: _OfRun) -> _Run:
        if self._run is None or self._run.name != body.run:
            raise UnavailableError(
                "this run is over: the chief or server 0 restarted. A worker that joins again resumes from "
                "the last checkpoint."
            )
        return self._run

    def _check_worker(self, worker: int) -> None:
        if not 0 <= worker < self._num_workers:
            raise ConfigError(
                f"there is no worker {worker} of {self._num_workers}; start all processes with the "
                "same cluster.num_workers"
            )

    def _note(self, run: _Run) -> None:
        run.version += 1
        self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], seconds: float) -> None:
        self._changed.wait_for(ready, min(seconds, LONGEST_WAIT))
