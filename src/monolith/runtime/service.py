"""The coordination service: how the workers of a run agree on when to start, pause and end. Server 0 runs it.

It is one state machine. The run has a phase, and each of its workers has one:

                  open             halt              release
    RESTORING ─────────► TRAINING ──────► PAUSED ───────────────► TRAINING ── over ──► OVER
        │                    │               │
        └────────────────────┴── lose, fail ─┴──► FAILED, unless the run keeps going

The calls of the chief, and of every worker:

    begin      the chief starts a run: the service drops an earlier one
    open       the chief has restored the model, so workers may join
    halt       all workers pause: each finishes its step and arrives with its state
    release    they resume
    saved      the snapshot of a pause is on disk, so sources may commit their positions
    stop       all workers are to finish
    over       the last checkpoint is on disk, or never will be
    join       a worker waits for the chief to have restored everything, and learns where to start
    arrive     a worker is quiesced at a pause
    leave      a worker is done, and leaves its last state behind; or it failed, which ends the run for all
    news       a worker asks for changes, again and again, with one call open at all times. So the service
               knows that it is alive: a worker whose connection breaks and does not come back is lost

    Phases of a worker (`TRANSITIONS` has the table, and says which phase follows):

               join              leave
    UNKNOWN ────────► PRESENT ───────────────────────► LEFT
                      │  ▲  │ depart: elastic, gives its work back      given back
              broken  │  │  ├────────────────────────► DEPARTING ─────────────────► GONE ── join ──► PRESENT
              ▼       │  │  │ lose: elastic, keeps going   ▲
            PARTED ───┘  │  ▼                              │
              │  asks    └─ LOST ── join, asks again       │
              └── lose: RETURN_WITHIN, or silent for lost_after ──► LOST, DEPARTING, or the run FAILED

A run that has FAILED stays so: its workers learn why and join again, and the chief starts the next run. A
worker that joins a run twice has restarted, and does not know what it trained: that fails the run, too.

If the run keeps going, neither ends it. The state of a LOST worker at every pause is its last saved one, and
the process that replaces it starts from there. When server 0 itself is lost, the chief has another server
take over the service, and workers rejoin it:

    resume     a chief that restarted takes over its run
    back       a worker rejoins the run at the new server 0
    served     the chief names the new server of a shard; all workers learn it as news
    lost       each worker reports the updates it lost with the old one

If the data is a work queue, the run is elastic: workers join and leave. None is waited for, and one that
joins starts with nothing. One that leaves, or is lost while the run keeps going, is DEPARTING until the chief
has given its work back; until then its state at a pause is its last reported or saved one.

If the chief assigns the work, it pauses all workers, assigns everything to the present ones, and says so
before it releases them: each learns its assignment together with the release.

    deal       the work of each worker from now on; departed workers have none

A lost worker is fenced, in case it was only slow: its calls are refused, and it joins again like any other.
Unless another process has joined as the same worker meanwhile: then it was replaced, and is told to end. If
both joined again and again, each would end the runs of the other.

Every call may arrive twice, because a caller whose connection broke cannot know whether the first one did. So
each either has the same effect twice (`halt` returns the pause in force, `saved` takes the maximum, `leave`
the same state) or names what it is about, and a second one finds nothing to do (`given back` and `deal` carry
a number). `begin` drops what the run had, but is over before `open` lets anyone join.

No call waits longer than it asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import TypeVar

from monolith import concurrency
from monolith.errors import ConfigError, RequestError, UnavailableError
from monolith.runtime.cluster_config import TimeoutsConfig
from monolith.runtime.coordinator import Start, WorkerState
from monolith.runtime.messages import (
    AllLostUpdates,
    Arrive,
    AskGathered,
    AskLostUpdates,
    AskNews,
    BeginService,
    ComeBack,
    DealOut,
    DealTaken,
    DealtPosition,
    Departure,
    FailedRun,
    Farewell,
    GatheredStates,
    GivenBack,
    Join,
    Joined,
    Leave,
    LostUpdates,
    News,
    OfRun,
    OpenRun,
    PauseNumber,
    PauseSaved,
    PublishServer,
    PushesTold,
    ResumeRun,
    Returned,
    RunResumed,
    SayOver,
    Served,
    StopRun,
    Trained,
)
from monolith.runtime.push_counts import marked, take_lost_of
from monolith.wire.messages import Answer, Gone, PollAnswer

_log = logging.getLogger(__name__)

T = TypeVar("T")


_KNOWN_PROCESSES = 8
"""How many processes of a worker a new service learns of: one that was replaced before these could join."""


LONGEST_WAIT = 20.0
"""The most seconds that a call waits, whatever it asks for."""


LOST_AFTER = TimeoutsConfig().silence
"""A worker that is silent for this long is lost although its connection is open: it hangs, or was stopped, or
its machine is gone."""


RETURN_WITHIN = 2.0
"""Seconds that a worker has to reconnect."""


STOPPED_FOR = 5.0
"""Seconds without a check for lost workers, after which this process knows that it was stopped itself."""


_CHECK_EVERY = 0.2
"""Seconds after which a call that waits for news checks whether its caller is gone; and between two checks
for lost workers."""


_FENCED = ""
"""The member of a worker whose process is not part of the run any more: it equals no process."""


class RunPhase(Enum):
    """The phase of a run; see the drawing above."""

    RESTORING = "restoring"
    TRAINING = "training"
    PAUSED = "paused"
    FAILED = "failed"
    OVER = "over"


class WorkerPhase(Enum):
    """The phase of one worker in a run."""

    UNKNOWN = "unknown"
    """It has not joined yet."""
    PRESENT = "present"
    PARTED = "parted"
    """Its connection broke a moment ago."""
    LOST = "lost"
    """It is gone, and expected to rejoin: the run keeps going."""
    DEPARTING = "departing"
    """It is gone for good, and the chief has not given its work back yet."""
    GONE = "gone"
    """Its work was given back; a new process may join under its number."""
    LEFT = "left"
    """It has finished its work."""


class WorkerEvent(Enum):
    """What may happen to a worker."""

    JOIN = "join"
    ASK = "ask"
    """It asks for news."""
    BREAK = "break"
    """The connection of its question for news breaks."""
    LOSE = "lose"
    """It has not come back in time, or was silent for too long."""
    LEAVE = "leave"
    DEPART = "depart"
    """It leaves its work to the other workers."""
    GIVE_BACK = "give back"
    """The chief has given its work back."""


_PRESENT = {
    WorkerEvent.JOIN: {WorkerPhase.PRESENT, WorkerPhase.DEPARTING},  # another process: see `_join`
    WorkerEvent.ASK: {WorkerPhase.PRESENT},
    WorkerEvent.BREAK: {WorkerPhase.PARTED},
    WorkerEvent.LOSE: {WorkerPhase.LOST, WorkerPhase.DEPARTING},
    WorkerEvent.LEAVE: {WorkerPhase.LEFT},
    WorkerEvent.DEPART: {WorkerPhase.DEPARTING},
}
TRANSITIONS: Mapping[WorkerPhase, Mapping[WorkerEvent, Set[WorkerPhase]]] = {
    WorkerPhase.UNKNOWN: {
        WorkerEvent.JOIN: {WorkerPhase.PRESENT},
        WorkerEvent.ASK: {WorkerPhase.PRESENT},  # as the chief does, which never joins
        WorkerEvent.BREAK: {WorkerPhase.PARTED},
        WorkerEvent.LEAVE: {WorkerPhase.LEFT},
        WorkerEvent.DEPART: {WorkerPhase.DEPARTING},
    },
    WorkerPhase.PRESENT: _PRESENT,
    WorkerPhase.PARTED: _PRESENT,
    WorkerPhase.LOST: {
        WorkerEvent.JOIN: {WorkerPhase.PRESENT, WorkerPhase.LOST},  # the same process is LOST until it asks
        WorkerEvent.ASK: {WorkerPhase.PRESENT},
        WorkerEvent.BREAK: {WorkerPhase.PARTED},
        WorkerEvent.LEAVE: {WorkerPhase.LEFT},
        WorkerEvent.DEPART: {WorkerPhase.DEPARTING},
    },
    WorkerPhase.DEPARTING: {WorkerEvent.GIVE_BACK: {WorkerPhase.GONE}},
    WorkerPhase.GONE: {WorkerEvent.JOIN: {WorkerPhase.PRESENT}},
    WorkerPhase.LEFT: {},
}
"""Phase -> the events it allows -> the phases that may follow. A lost worker becomes LOST, or DEPARTING if
the run is elastic. In a run that does not keep going, LOSE and a JOIN of another process end the run."""


@dataclass(slots=True)
class _Run:
    """One start of the chief. Guarded by the lock of the service.

    The phase of a worker is not a field: `phase_of` reads it from the tables below, so that each event
    changes one table and no two can disagree. A worker may be in several of them; the order in `phase_of`
    decides.
    """

    name: str
    start: Start | None = None
    """The start of every worker; None while the chief restores."""
    halt: int | None = None
    """The number of the pause in force."""
    members: dict[int, str] = field(default_factory=dict)
    """Worker -> the process that joined as that one."""
    arrived: dict[int, WorkerState] = field(default_factory=dict)
    """Worker -> its state, at the pause in force."""
    left: dict[int, WorkerState] = field(default_factory=dict)
    """Worker that has finished -> its last state."""
    # Signs of life. `_check_all` reads them; seconds of the service's clock.
    heard: dict[int, float] = field(default_factory=dict)
    """Worker -> when its last call arrived."""
    parted: dict[int, float] = field(default_factory=dict)
    """Worker -> when its connection broke, until it asks again."""
    questions: dict[int, int] = field(default_factory=dict)
    """Worker -> how often it has asked for news: only the newest question tells whether it is there."""
    stop: str | None = None
    unfinished: bool = False
    """Whether it was stopped before its end."""
    failure: str | None = None
    failed_at: float = 0.0
    final: bool = False
    """Whether the chief will not restart by itself."""
    saved: int = 0
    """The last pause whose snapshot is on disk."""
    over: bool = False
    told: set[int] = field(default_factory=set)
    """Workers that know that it is over."""
    keep_going: bool = False
    """Whether it survives the loss of a worker."""
    lost: dict[int, float] = field(default_factory=dict)
    """Worker -> when it was missed, until it rejoins."""
    trained: dict[int, int] = field(default_factory=dict)
    """Worker -> the examples it last reported."""
    # A state is safe once the snapshot of its pause is on disk, which is some time after the pause: workers
    # train on meanwhile. So states are kept by pause until `saved` names it.
    stood: dict[int, dict[int, WorkerState]] = field(default_factory=dict)
    """Pause -> the states of all workers then, until that snapshot is on disk."""
    safe: dict[int, WorkerState] = field(default_factory=dict)
    """Worker -> its state in the last snapshot on disk."""
    servers: dict[int, Served] = field(default_factory=dict)
    """Shard -> its server, if that was replaced."""
    updates: dict[str, dict[int, int]] = field(default_factory=dict)
    """Incarnation of a new server -> worker -> its updates that were lost with the old one."""
    joined: set[int] = field(default_factory=set)
    """Workers of the run, as the previous service knew them, until they rejoin."""
    before: dict[int, str] = field(default_factory=dict)
    """Worker -> its process, as the previous service knew it, until one rejoins."""
    pushes: dict[int, PushesTold] = field(default_factory=dict)
    """Worker that left -> its pushes."""
    returned: list[Returned] = field(default_factory=list)
    departing: dict[int, Departure] = field(default_factory=dict)
    """Worker -> its departure, until its work is given back."""
    departures: int = 0
    """The number of departures so far."""
    gone: dict[int, WorkerState] = field(default_factory=dict)
    """Worker -> its last state, since its work was given back."""
    given: dict[int, int] = field(default_factory=dict)
    """Worker -> the last pause before its work was given back, or assigned anew: states it reported up to
    then do not count any more, even if their snapshot reaches the disk later. They name work that another
    worker has by now, which would be trained twice."""
    dealt: dict[int, DealtPosition] = field(default_factory=dict)
    """Worker -> the work last assigned to it."""
    version: int = 0
    """Counts the changes that workers need to know."""

    @property
    def phase(self) -> RunPhase:
        if self.failure is not None:
            return RunPhase.FAILED
        if self.over:
            return RunPhase.OVER
        if self.start is None:
            return RunPhase.RESTORING
        return RunPhase.TRAINING if self.halt is None else RunPhase.PAUSED

    def phase_of(self, worker: int) -> WorkerPhase:
        # In this order: a worker that departs may have left, and one that is lost was parted and present.
        for known, phase in (
            (self.departing, WorkerPhase.DEPARTING),
            (self.left, WorkerPhase.LEFT),
            (self.lost, WorkerPhase.LOST),
            (self.parted, WorkerPhase.PARTED),
            (self.heard, WorkerPhase.PRESENT),
            (self.gone, WorkerPhase.GONE),
        ):
            if worker in known:
                return phase
        return WorkerPhase.UNKNOWN

    def allows(self, worker: int, event: WorkerEvent) -> bool:
        """Whether an event may change the phase of a worker; see `TRANSITIONS`."""
        return event in TRANSITIONS[self.phase_of(worker)]

    @property
    def hands_out(self) -> bool:
        """Whether workers may join and leave: the run is elastic."""
        return self.start is not None and self.start.hands_out

    @property
    def others(self) -> set[int]:
        """The workers that are present or expected back soon, without the chief."""
        return self.heard.keys() - {0}

    @property
    def having_part(self) -> set[int]:
        """The workers whose processes are part of the run, or were until they left; without the chief."""
        here = {worker for worker, member in self.members.items() if worker and member != _FENCED}
        return here | self.joined

    def all_trained(self, processes: Mapping[int, list[str]]) -> dict[int, Trained]:
        """Return, by worker, its process and how much that has trained, without the chief.

        Args:
            processes: By worker: those that joined as that one.
        """
        return {
            worker: Trained(
                None if member == _FENCED or worker in self.departing else member,
                self.trained.get(worker, 0),
                tuple(processes.get(worker, ())[-_KNOWN_PROCESSES:]),
            )
            for worker, member in {**self.before, **self.members}.items()
            if worker
        }

    def count_for_workers_that_left(self) -> None:
        """Count the updates of workers that left, lost with servers that were replaced since."""
        for worker, told in self.pushes.items():
            self.pushes[worker], lost = take_lost_of(told, self.servers)
            for incarnation, updates in lost.items():
                self.updates.setdefault(incarnation, {}).setdefault(worker, updates)


class CoordinationService:
    """The state machine of one run at a time. Thread-safe.

    Args:
        num_workers: Includes the chief, which is worker 0.
        max_workers: The most workers of an elastic run; None for `num_workers`.
        lost_after: How long a worker may be silent.
        raise_step: Called with the steps that workers know of, if this service takes over a run.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        max_workers: int | None = None,
        lost_after: timedelta = LOST_AFTER,
        raise_step: Callable[[int], object] = lambda _: None,
        clock: Callable[[], float] = concurrency.monotonic,
    ) -> None:
        if num_workers < 1:
            raise ConfigError(f"coordination: num_workers must be at least 1, got {num_workers}")
        self._num_workers = num_workers
        self._max_workers = num_workers if max_workers is None else max_workers
        self._lost_after = lost_after.total_seconds()
        self._raise_step = raise_step
        self._clock = clock
        # Guards all fields below, and the run with all of its tables. A call holds it except while it waits,
        # so one that has waited looks at the run again: `self._run is not run` means that the chief has
        # started another one. Notified at every change.
        self._changed = concurrency.Condition()
        self._run: _Run | None = None
        self._processes: dict[int, list[str]] = {}
        """Worker -> its processes, in the order in which they joined first, over all runs."""
        # The number of the last pause. A new run does not reset it: a number names one pause for as long as
        # this service lives.
        self._halts = 0
        self._checked = clock()

    @property
    def calls(self) -> Mapping[str, Answer]:
        """The calls that other processes may make, by name."""
        return {
            "meeting.begin": self._begin,
            "meeting.resume": self._resume,
            "meeting.open": self._open,
            "meeting.served": self._served,
            "meeting.updates": self._updates,
            "meeting.join": self._join,
            "meeting.back": self._back,
            "meeting.lost": self._lost,
            "meeting.halt": self._halt,
            "meeting.arrive": self._arrive,
            "meeting.gathered": self._gathered,
            "meeting.release": self._release,
            "meeting.saved": self._saved,
            "meeting.over": self._over,
            "meeting.leave": self._leave,
            "meeting.given_back": self._given_back,
            "meeting.deal": self._deal,
            "meeting.stop": self._stop,
        }

    @property
    def polls(self) -> Mapping[str, PollAnswer]:
        """The calls that notice when their caller is gone."""
        return {"meeting.news": self._news}

    # Calls of the chief

    def _begin(self, body: BeginService) -> None:
        if body.num_workers != self._num_workers:
            raise ConfigError(
                f"the chief counts {body.num_workers} workers and server 0 {self._num_workers}; "
                "start all processes with the same cluster.num_workers"
            )
        if (most := body.max_workers or body.num_workers) != self._max_workers:
            raise ConfigError(
                f"the chief allows {most} workers and server 0 {self._max_workers}; start all processes with "
                "the same cluster.max_workers"
            )
        trained = _by_number(body.trained)
        with self._changed:
            for worker, one in trained.items():
                # Those that joined at the lost service did so before any that waits for this one already.
                waiting = [name for name in self._processes.get(worker, ()) if name not in one.processes]
                self._processes[worker] = [*one.processes, *waiting]
            # A service that takes over from a lost server 0 continues to count where that stopped: workers
            # hold states and pushes under the numbers of earlier pauses.
            self._halts = max(self._halts, body.halts)
            self._run = _Run(
                body.run,
                keep_going=body.keep_going,
                saved=body.saved,
                stop=body.stop,
                unfinished=body.unfinished,
                safe=_by_number(body.safe),
                servers=_by_number(body.servers),
                heard=dict.fromkeys(body.present, self._clock()),
                departing=_by_number(body.departing),
                departures=body.departures,
                gone=_by_number(body.gone),
                dealt=_by_number(body.dealt),
                joined=set(body.joined),
                pushes=_by_number(body.pushes),
                left=_by_number(body.left),
                before={worker: one.member for worker, one in trained.items() if one.member is not None},
                trained={worker: one.examples for worker, one in trained.items()},
            )
            self._run.count_for_workers_that_left()
            self._note(self._run)

    def _resume(self, body: ResumeRun) -> RunResumed:
        """Let a chief that restarted take over its run; workers were not paused for that."""
        with self._changed:
            run = self._run
            if run is None or run.name != body.run or run.phase in (RunPhase.FAILED, RunPhase.OVER):
                return RunResumed(goes_on=False)
            if 0 in run.heard and run.members.get(0) != body.member:  # it may say so twice
                self._take_back(run, 0)
            run.members[0] = body.member
            # A pause of the chief before it ends here: the snapshot that it was for is never written.
            run.halt = None
            run.arrived.clear()
            run.heard[0] = self._clock()
            self._note(run)
            return RunResumed(
                goes_on=True,
                opened=run.start is not None,
                saved=run.saved,
                stop=run.stop,
                safe=_by_text(run.safe),
                servers=_by_text(run.servers),
                start=run.start,
                gone=_by_text(run.gone),
            )

    def _open(self, body: OpenRun) -> None:
        with self._changed:
            run = self._of(body.run)
            run.start = body.start
            run.heard[0] = self._clock()
            self._note(run)

    def _served(self, body: PublishServer) -> None:
        with self._changed:
            run = self._of(body.run)
            run.servers[body.server] = body.served
            run.count_for_workers_that_left()
            self._note(run)

    def _updates(self, body: AskLostUpdates) -> AllLostUpdates:
        """Wait until every worker has reported the updates it lost; return their sum, and which have not.

        Workers that left reported it when they did."""
        with self._changed:
            run = self._of(body.run)
            said = run.updates.setdefault(body.incarnation, {})

            def lost() -> set[int]:
                return (run.lost.keys() | run.departing.keys()) - said.keys()

            def missing() -> set[int]:
                return run.having_part - said.keys() - lost()

            self._wait(lambda: self._run is not run or not missing(), body.wait)
            updates = sum(said.values())
            return AllLostUpdates(updates, tuple(sorted(missing())), tuple(sorted(lost() - {0})))

    def _halt(self, body: OfRun) -> PauseNumber:
        with self._changed:
            run = self._of(body.run)
            if run.halt is None:  # a barrier of an operator may have paused the workers already
                self._halts += 1
                run.halt = self._halts
                run.arrived.clear()
                self._note(run)
            return PauseNumber(run.halt)

    def _gathered(self, body: AskGathered) -> GatheredStates:
        """Wait until every other worker has arrived or left; return those that have not, or never joined.

        In an elastic run, every other worker is every present one."""
        with self._changed:
            run = self._of(body.run)

            def missing() -> list[int]:
                # A worker that departs counts as quiesced: it takes no steps, and its last state is known.
                here = run.left.keys() | run.departing if body.left else self._quiesced(run).keys()
                # A worker that never joined is waited for, unless the run is elastic: its shard of the data
                # is in no other worker's position, and a checkpoint without it would skip that data.
                wanted = run.others if run.hands_out else set(range(1, self._num_workers))
                return sorted(wanted - here)

            def in_force() -> bool:
                # False after server 0 was replaced: the new service knows no pause, and no arrivals.
                return body.halt is None or run.halt == body.halt

            def has_news() -> bool:
                return self._run is not run or not missing() or run.failure is not None or not in_force()

            self._wait(has_news, body.wait)
            return GatheredStates(
                missing=tuple(missing()),
                absent=tuple(worker for worker in missing() if worker not in run.members),
                states=_by_text(self._quiesced(run)),
                failure=run.failure,
                in_force=in_force(),
                departing=_by_text(run.departing),
                here=tuple(sorted(run.arrived)),
            )

    def _quiesced(self, run: _Run) -> dict[int, WorkerState]:
        """Return the states of all quiesced workers. For a lost worker it is the last saved one."""
        lost = {worker: run.safe[worker] for worker in run.lost if worker in run.safe}
        departed = {worker: one.state for worker, one in run.departing.items() if one.state is not None}
        # From the oldest knowledge to the newest: the last one wins if a worker is in several.
        return {**run.gone, **lost, **run.arrived, **run.left, **departed}

    def _release(self, body: OfRun) -> None:
        with self._changed:
            run = self._of(body.run)
            if run.halt is not None:
                run.stood[run.halt] = self._quiesced(run)  # `saved` comes later, if at all
            run.halt = None
            run.arrived.clear()
            self._note(run)

    def _saved(self, body: PauseSaved) -> None:
        with self._changed:
            run = self._of(body.run)
            run.saved = max(run.saved, body.halt)
            # The pause may still be in force: a barrier of an operator outlasts the save.
            stood = self._quiesced(run) if run.halt == body.halt else run.stood.get(body.halt, {})
            run.safe |= {
                worker: state for worker, state in stood.items() if body.halt > run.given.get(worker, 0)
            }
            if body.state is not None and body.halt > run.given.get(0, 0):
                run.safe[0] = body.state
            run.stood = {halt: stood for halt, stood in run.stood.items() if halt > body.halt}
            self._note(run)

    def _over(self, body: SayOver) -> Farewell:
        """Tell all workers; return the present ones that do not know it yet."""
        with self._changed:
            run = self._of(body.run)
            if not run.over:
                run.over = True
                self._note(run)
            # The chief ends server 0, and with it this service, once this returns.
            self._wait(lambda: not self._untold(run), body.wait)
            return Farewell(tuple(self._untold(run)), run.unfinished)

    def _untold(self, run: _Run) -> list[int]:
        here = {worker for worker, member in run.members.items() if worker and member != _FENCED}
        away = run.parted.keys() | run.lost.keys() | run.departing.keys()
        return sorted(here - run.told - away)

    # Calls of every worker

    def _join(self, body: Join) -> Joined:
        """Wait for a run to start; return which one, or that one has failed or is over.

        A run that the caller knows to have failed is waited out.
        """
        self._check_worker(body.worker)
        worker, member, known = body.worker, body.member, body.known
        if body.process is not None:
            with self._changed:
                processes = self._processes.setdefault(worker, [])
                if body.process not in processes:
                    processes.append(body.process)
                if body.process != processes[-1]:
                    return Joined(replaced=True)

        def has_news() -> bool:
            run = self._run
            if run is None:
                return False
            if run.failure is not None:
                return run.name != known
            # A worker that restarted after it had left has nothing to do but learn how the run ended.
            return run.over or (run.start is not None and may_join(run))

        def may_join(run: _Run) -> bool:
            """Whether its phase allows it. During a pause only a worker joins that the chief waits for."""
            waited_for = not run.hands_out and worker not in self._quiesced(run)
            return run.allows(worker, WorkerEvent.JOIN) and (run.phase is not RunPhase.PAUSED or waited_for)

        with self._changed:
            self._wait(has_news, body.wait)
            run = self._run
            if run is None or not has_news():
                return Joined()
            if run.over:
                run.told.add(worker)
                return Joined(over=True, unfinished=run.unfinished)
            process = run.members.get(worker, run.before.get(worker, member))
            if run.failure is None and process not in (member, _FENCED):
                # Another process has this number: it restarted. What it had trained since the last snapshot
                # is in the model, and it would train that again.
                if not run.keep_going:
                    self._fail(run, f"worker {worker} restarted")
                elif run.hands_out:
                    self._lose(run, worker, f"worker {worker} restarted.")
                    return Joined()  # it joins once the other workers have its work
                else:
                    self._take_back(run, worker)
            if run.failure is not None:
                ago = self._clock() - run.failed_at
                return Joined(failed=FailedRun(run.name, run.failure, run.final, ago))
            if worker in run.joined and not (worker in run.trained or worker in run.gone):
                self._count_unknown(run, worker)
            if run.hands_out:
                self._begin_with_nothing(run, worker)
            run.members[worker] = member
            run.joined.discard(worker)
            run.before.pop(worker, None)
            run.pushes.pop(worker, None)
            # A new process has pushed nothing to servers that were replaced before it joined: with this the
            # count of their lost updates does not wait for it.
            for served in run.servers.values():
                run.updates.setdefault(served.incarnation, {}).setdefault(worker, 0)
            run.heard[worker] = self._clock()
            run.parted.pop(worker, None)
            if run.hands_out:
                self._note(run)
            return Joined(run.name, run.start, state=run.safe.get(worker), servers=_by_text(run.servers))

    def _back(self, body: ComeBack) -> Joined:
        """Let a worker rejoin whose server 0 was lost and is here now; it never stopped training."""
        self._check_worker(body.worker)
        with self._changed:
            run = self._run
            if run is None or run.start is None:
                return Joined()
            unknown = run.hands_out and body.worker not in run.heard
            other = run.members.get(body.worker, body.member) != body.member
            if run.name != body.run or other or unknown:
                failed = FailedRun(body.run, "the run was restarted without this worker", False, 0.0)
                return Joined(failed=failed)
            if run.before.pop(body.worker, body.member) != body.member:
                # The previous service had let it join in place of that process, and was lost with the word.
                self._count_returned(run, body.worker)
            run.members[body.worker] = body.member
            run.joined.discard(body.worker)
            for incarnation, updates in body.lost.items():
                run.updates.setdefault(incarnation, {}).setdefault(body.worker, updates)
            run.heard[body.worker] = self._clock()
            run.parted.pop(body.worker, None)
            run.lost.pop(body.worker, None)
            if run.hands_out:
                self._begin_with_nothing(run, body.worker)  # unless its last saved state is known
            if body.left is not None:  # it had left before server 0 was lost, which knew its last state
                run.left[body.worker] = body.left
            # The new server 0 counts from what the chief knew; another worker may have seen a later step.
            self._raise_step(body.step)
            self._note(run)
            return Joined(run.name, run.start, servers=_by_text(run.servers))

    def _lost(self, body: LostUpdates) -> None:
        with self._changed:
            run = self._of(body.run)
            said = run.updates.setdefault(body.incarnation, {})
            if body.worker not in said or body.worker not in run.pushes:  # its pushes at the end include it
                said[body.worker] = body.updates
            self._changed.notify_all()

    def _news(self, body: AskNews, gone: Gone) -> News | None:
        with self._changed:
            run, worker = self._of(body.run), body.worker
            self._check_member(run, worker, body.member)
            run.heard[worker] = self._clock()
            run.parted.pop(worker, None)
            run.lost.pop(worker, None)
            question = run.questions[worker] = run.questions.get(worker, 0) + 1
            run.trained[worker] = max(run.trained.get(worker, 0), body.examples)
            limit = self._clock() + min(body.wait, LONGEST_WAIT)
            # There is no thread that looks for lost workers: the calls that wait here do it, one at a time.
            # With no call left there is no worker either, and none to tell.
            while run.version == body.seen and self._run is run and self._clock() < limit:
                self._changed.wait(_CHECK_EVERY)
                if gone():
                    # A worker whose connection broke asks again at once, often before this call notices that
                    # its own is gone. Then it is there, and must not count as parted.
                    if run.questions[worker] == question:
                        run.parted[worker] = self._clock()
                    return None
                self._check_for_lost(run)
            # Both again: while this waited, the chief may have started another run, or fenced this worker.
            run = self._of(body.run)
            self._check_member(run, worker, body.member)
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
                servers=_by_text(run.servers),
                returned=tuple(run.returned),
                present=tuple(sorted(run.others)) if run.hands_out else (),
                departing=_by_text(run.departing),
                dealt=run.dealt.get(worker),
                joined=() if worker else tuple(sorted(run.having_part)),
                pushes={} if worker else _by_text(run.pushes),
                left={} if worker else _by_text(run.left),
                trained={} if worker else _by_text(run.all_trained(self._processes)),
            )

    def _arrive(self, body: Arrive) -> None:
        self._check_worker(body.worker)
        with self._changed:
            run = self._of(body.run)
            self._check_member(run, body.worker, body.member)
            if run.halt == body.halt:  # otherwise the pause is over
                run.arrived[body.worker] = body.state
                self._changed.notify_all()

    def _leave(self, body: Leave) -> None:
        self._check_worker(body.worker)
        with self._changed:
            run, worker = self._of(body.run), body.worker
            self._check_member(run, worker, body.member)
            # If the run keeps going, a worker that failed because a server was lost is itself only lost: it
            # rejoins. Any other failure is its own, would come again, and ends the run.
            if body.failure and run.keep_going and body.lost:
                self._lose(run, worker, f"worker {worker} lost others: {body.failure}")
            elif body.failure:
                self._fail(run, f"worker {worker} failed: {body.failure}", final=body.final)
            elif body.state is None:
                raise RequestError("state: it is missing; only a worker that failed may leave without one")
            else:
                self._keep_pushes(run, worker, body.pushes)
                if not (body.gives_back and run.hands_out and worker):
                    run.left[worker] = body.state
                    self._note(run)
                elif run.allows(worker, WorkerEvent.DEPART):  # it may say so twice
                    self._depart(run, worker, body.state)

    def _given_back(self, body: GivenBack) -> None:
        with self._changed:
            run = self._of(body.run)
            self._give_back(run, body)
            self._note(run)

    def _deal(self, body: DealOut) -> DealTaken:
        with self._changed:
            run = self._of(body.run)
            if run.halt != body.halt:  # server 0 was replaced: the workers at the pause have resumed
                return DealTaken(taken=False)
            for worker, state in _by_number(body.states).items():
                # The assigned position is safe at once, without a checkpoint: together the positions of all
                # workers cover the same work as before, only divided otherwise.
                run.safe[worker], run.given[worker] = state, body.halt
                run.dealt[worker] = DealtPosition(body.halt, state.position)
                if worker in run.arrived:
                    run.arrived[worker] = state
            for given in body.given:
                self._give_back(run, given)
            self._note(run)
            return DealTaken(taken=True)

    def _stop(self, body: StopRun) -> None:
        with self._changed:
            run = self._of(body.run)
            run.stop = run.stop or body.reason
            run.unfinished = run.unfinished or body.unfinished
            self._note(run)

    # Inside; the lock is held by the caller

    def _check_for_lost(self, run: _Run) -> None:
        """Check all workers, unless another waiting call has just done so."""
        now = self._clock()
        if now - self._checked >= _CHECK_EVERY:
            slept, self._checked = now - self._checked > STOPPED_FOR, now
            self._check_all(run, now, slept=slept)

    def _check_all(self, run: _Run, now: float, *, slept: bool) -> None:
        # This process was stopped (SIGSTOP, a frozen VM), and no call could arrive meanwhile. Without this,
        # all workers at once would look silent when it continues.
        if slept:
            run.heard = dict.fromkeys(run.heard, now)
            run.parted = dict.fromkeys(run.parted, now)
        for worker, last in run.heard.items():
            if run.over or not run.allows(worker, WorkerEvent.LOSE):
                continue
            name = "worker 0, the chief," if worker == 0 else f"worker {worker}"
            # Two ways to be lost: a process that died breaks the connection of its question; one that hangs
            # keeps it open, and one that died between two questions has none.
            if now - run.parted.get(worker, now) > RETURN_WITHIN:
                self._lose(run, worker, f"{name} was lost: its connection broke. See its log.")
            elif now - last > self._lost_after:
                silent = (
                    f"{name} was lost: it has been silent for {now - last:.0f} s (timeouts.silence). "
                    "See its log."
                )
                self._lose(run, worker, silent)

    def _lose(self, run: _Run, worker: int, why: str) -> None:
        """Continue without a worker until it rejoins, if the run keeps going; fail the run otherwise."""
        if not run.keep_going:
            self._fail(run, why)
        elif worker not in run.lost:
            _log.warning("%s The other workers keep going.", why)
            run.lost[worker] = self._clock()
            # Not `_note`: workers need not know of a loss. The chief does, which may wait for this one.
            self._changed.notify_all()
            if run.hands_out and worker:
                self._depart(run, worker, None)

    def _depart(self, run: _Run, worker: int, state: WorkerState | None) -> None:
        """Have the chief give back the work of a worker that is not part of the run from now on."""
        run.departures += 1  # a number for each: a worker may depart, join and depart again
        run.departing[worker] = Departure(run.departures, state)
        run.arrived.pop(worker, None)
        # Without a last state it did not leave by itself, and may only be slow. It is fenced before its work
        # is given back, so that no two workers have it.
        if state is None:
            run.members[worker] = _FENCED
        self._note(run)

    def _keep_pushes(self, run: _Run, worker: int, pushes: PushesTold | None) -> None:
        """Keep the pushes of a worker that leaves; the next snapshot includes all of them."""
        if pushes is not None and worker not in run.pushes:
            # A pause in force has not been cut yet, as far as this worker is concerned: it left instead of
            # arriving, all of its pushes acknowledged.
            cut = self._halts + 1 if run.halt is None else run.halt
            run.pushes[worker] = marked(pushes, cut)
            run.count_for_workers_that_left()

    def _give_back(self, run: _Run, body: GivenBack) -> None:
        """Note that the work of a departed worker was given back."""
        worker = body.worker
        departure = run.departing.get(worker)
        if departure is None or departure.number != body.number:
            return  # it was reported before
        if departure.state is None:
            self._count_returned(run, worker, by_others=True)
        del run.departing[worker]
        run.gone[worker] = run.safe[worker] = body.state
        run.given[worker] = self._halts
        run.members[worker] = _FENCED  # equals no process, so a new one may join under its number
        run.trained[worker] = body.state.examples
        for known in (run.lost, run.heard, run.parted, run.arrived, run.dealt):
            known.pop(worker, None)

    def _begin_with_nothing(self, run: _Run, worker: int) -> None:
        """Note the start of a worker that joins an elastic run."""
        assert run.start is not None
        run.gone.pop(worker, None)
        if worker < len(run.start.positions):
            began = WorkerState(position=run.start.positions[worker], examples=0, skipped=0, event_time=None)
            run.safe.setdefault(worker, began)

    def _take_back(self, run: _Run, worker: int) -> None:
        """Note that another process replaces a worker, and what it will train again."""
        self._count_returned(run, worker)
        run.parted.pop(worker, None)
        run.arrived.pop(worker, None)
        run.trained[worker] = run.safe[worker].examples if worker in run.safe else 0
        self._note(run)

    def _count_returned(self, run: _Run, worker: int, *, by_others: bool = False) -> None:
        """Note the records that are trained again because a worker was lost."""
        saved = run.safe[worker].examples if worker in run.safe else 0
        records = max(run.trained.pop(worker, 0) - saved, 0)
        now = self._clock()
        seconds = now - run.lost.pop(worker, now)
        run.returned.append(Returned(worker, records, seconds, by_others))
        how = "its work was given back" if by_others else "it is back"
        _log.warning(
            "worker %d was lost, and %s after %.1f s; the records since its last saved position are trained "
            "again, %s",
            worker,
            how,
            seconds,
            f"{records:,} as far as it had said",
        )

    def _count_unknown(self, run: _Run, worker: int) -> None:
        """Note that a worker joins which may have had an earlier process: only the lost service knew."""
        run.returned.append(Returned(worker, None, 0.0))
        _log.warning(
            "worker %d joined, and server 0 was lost before it had told whether an earlier process of this "
            "worker had trained; if one had, the records since its last saved position are trained again",
            worker,
        )
        self._note(run)

    def _fail(self, run: _Run, why: str, *, final: bool = False) -> None:
        if run.failure is None:
            run.failure, run.final, run.failed_at = why, final, self._clock()
            self._note(run)

    def _of(self, run: str) -> _Run:
        """Return the run of this name, which a caller means; its calls are refused once another began."""
        if self._run is None or self._run.name != run:
            raise UnavailableError(
                "this run is over: the chief or server 0 restarted. A worker that joins again resumes from "
                "the last checkpoint."
            )
        return self._run

    def _check_worker(self, worker: int) -> None:
        if not 0 <= worker < self._max_workers:
            raise ConfigError(
                f"there is no worker {worker} of {self._max_workers}; start all processes with the "
                "same cluster.num_workers and cluster.max_workers"
            )

    def _check_member(self, run: _Run, worker: int, member: str | None) -> None:
        """Refuse a process that was fenced or replaced."""
        if member is not None and run.members.get(worker, member) != member:
            raise UnavailableError(f"worker {worker} was taken for lost, or another has taken its place")

    def _note(self, run: _Run) -> None:
        run.version += 1
        self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], seconds: float) -> None:
        self._changed.wait_for(ready, min(seconds, LONGEST_WAIT))


def _by_number(found: Mapping[str, T]) -> dict[int, T]:
    """Return a table of JSON with numbers as keys.

    Raises:
        RequestError: A key is no number.
    """
    if odd := [key for key in found if not key.isdecimal()]:
        raise RequestError(f"a worker or server is named by its number, got {odd[0]!r:.60}")
    return {int(key): value for key, value in found.items()}


def _by_text(found: Mapping[int, T]) -> dict[str, T]:
    """Return a table with numbers as keys as JSON has it."""
    return {str(number): value for number, value in found.items()}
