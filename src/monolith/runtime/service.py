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

Where the run is to keep going, neither ends it. A worker that was lost stands still, at every halt, as it
stood when it was last saved; one that joins in its place goes on from there. When server 0 itself is lost,
the chief has another meeting take over the run, and workers come back to it:

    resume     a chief that restarted takes the run on
    back       a worker finds the run where server 0 is now
    served     the chief says who serves a place that was lost; everybody hears it as news
    lost       each worker says what it had pushed to the lost server in vain

Where the data hands out work, workers come and go. Nobody waits for one that is not there, and one that comes
begins with nothing. One that leaves, or is lost where the run keeps going, departs: it stands at halts where
it stood last, or was last saved, until the chief has given its work back to the others.

    unknown ──join──► present ──leave, gives_back; or lost──► departing ──given_back──► gone ──join──► present

Where the chief deals the data out, it halts everybody, deals all there is to those who are there, and says so
before it lets them go: each hears what it was dealt together with that it may go on.

    deal       what everybody has from now on; those who departed have nothing

Who was lost is shut out from then on, should it only have been slow: it joins again, as any other.

What is said, and how it is checked where it comes from a network, is in `bodies`. No call waits longer
than it was told to.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol, TypeVar

from monolith.errors import ConfigError, RequestError, UnavailableError
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
)
from monolith.runtime.push_counts import marked, take_lost_of
from monolith.wire.messages import Answer, Gone, PollAnswer

_log = logging.getLogger(__name__)

T = TypeVar("T")


LONGEST_WAIT = 20.0
"""Seconds that one call may be kept waiting, whatever it asks for."""


LOST_AFTER = timedelta(seconds=60)
"""A worker that has not been heard of for so long is lost, although its connection holds: it hangs, or was
stopped, or its machine is gone."""


RETURN_WITHIN = 2.0
"""Seconds that a worker has to connect again."""


ASK_WITHIN = 25.0
"""Seconds that a worker has to ask again after an answer: one that dies between two questions has no
connection that breaks. Longer than a process may be stopped without being lost."""


STOPPED_FOR = 5.0
"""Seconds without a look for the lost, by which this process knows that it was stopped itself."""


_LOOK_EVERY = 0.2
"""Seconds after which whoever waits for news looks whether its caller is gone; and between two looks for the
lost, whoever makes them."""


_NOBODY = ""
"""Who stands in for a worker whose process has no part in the run any more."""


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
    answered: dict[int, float] = field(default_factory=dict)
    """Worker -> when it was answered, until it asks again."""
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
    keep_going: bool = False
    """Whether a worker that is lost does not end it."""
    lost: dict[int, float] = field(default_factory=dict)
    """Worker -> when it was missed, until it is back."""
    trained: dict[int, int] = field(default_factory=dict)
    """Worker -> the examples it said it has trained."""
    stood: dict[int, dict[int, WorkerState]] = field(default_factory=dict)
    """Halt -> how everybody stood, until it is saved."""
    safe: dict[int, WorkerState] = field(default_factory=dict)
    """Worker -> how it stood at the last halt that was saved."""
    servers: dict[int, Served] = field(default_factory=dict)
    """Place -> who serves it, where that is not who did at first."""
    updates: dict[str, dict[int, int]] = field(default_factory=dict)
    """Incarnation -> what each worker had pushed in vain to what it replaced."""
    joined: set[int] = field(default_factory=set)
    """Workers that have a part in it, of whom another meeting knew, until they are back."""
    pushes: dict[int, PushesTold] = field(default_factory=dict)
    """Worker -> what it had pushed when it left."""
    returned: list[Returned] = field(default_factory=list)
    departing: dict[int, Departure] = field(default_factory=dict)
    """Worker -> what it left with, until its work was given back."""
    departures: int = 0
    """Those there ever were."""
    gone: dict[int, WorkerState] = field(default_factory=dict)
    """Worker -> what is left of it, since its work was given back."""
    given: dict[int, int] = field(default_factory=dict)
    """Worker -> the last halt before its work was given back, or dealt out: what it said at those counts no
    more."""
    dealt: dict[int, DealtPosition] = field(default_factory=dict)
    """Worker -> what it was dealt last."""
    version: int = 0
    """Counts changes that workers want to hear of."""

    @property
    def hands_out(self) -> bool:
        """Whether workers may come and go."""
        return self.start is not None and self.start.hands_out

    @property
    def others(self) -> set[int]:
        """The workers that there are, or should be back soon, beside the chief."""
        return self.heard.keys() - {0}

    @property
    def having_part(self) -> set[int]:
        """The workers beside the chief whose processes have a part in it, or had when they left."""
        here = {worker for worker, member in self.members.items() if worker and member != _NOBODY}
        return here | self.joined

    def count_for_those_who_left(self) -> None:
        """Note what workers that left had pushed in vain to servers that were replaced since."""
        for worker, told in self.pushes.items():
            self.pushes[worker], lost = take_lost_of(told, self.servers)
            for incarnation, updates in lost.items():
                self.updates.setdefault(incarnation, {}).setdefault(worker, updates)


class CoordinationService:
    """The state that the workers of a run share. Thread-safe.

    Args:
        num_workers: The chief included, who is worker 0.
        max_workers: The most there may be, where the data hands out work; None for no more.
        lost_after: How long a worker may be silent.
        raise_step: Told the steps that workers have heard of, where this meeting takes over a run.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        max_workers: int | None = None,
        lost_after: timedelta = LOST_AFTER,
        raise_step: Callable[[int], object] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if num_workers < 1:
            raise ConfigError(f"meeting: num_workers must be at least 1, got {num_workers}")
        self._num_workers = num_workers
        self._max_workers = num_workers if max_workers is None else max_workers
        self._lost_after = lost_after.total_seconds()
        self._raise_step = raise_step
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
        """What others may call and have told whether they are still there."""
        return {"meeting.news": self._news}

    # The chief's

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
        with self._changed:
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
            )
            self._run.count_for_those_who_left()
            self._note(self._run)

    def _resume(self, body: ResumeRun) -> RunResumed:
        """Let a chief that restarted take on the run it left, whom nobody held back for that."""
        with self._changed:
            run = self._run
            if run is None or run.name != body.run or run.failure is not None or run.over:
                return RunResumed(goes_on=False)
            if 0 in run.heard:
                self._take_back(run, 0)
            run.members[0] = body.member
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
            run = self._of(body)
            run.start = body.start
            run.heard[0] = self._clock()
            self._note(run)

    def _served(self, body: PublishServer) -> None:
        with self._changed:
            run = self._of(body)
            run.servers[body.server] = body.served
            run.count_for_those_who_left()
            self._note(run)

    def _updates(self, body: AskLostUpdates) -> AllLostUpdates:
        """Wait until every worker has said what it had pushed in vain; say how much, and who has not.

        Those who left said it when they did."""
        with self._changed:
            run = self._of(body)
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
            run = self._of(body)
            if run.halt is None:
                self._halts += 1
                run.halt = self._halts
                run.arrived.clear()
                self._note(run)
            return PauseNumber(run.halt)

    def _gathered(self, body: AskGathered) -> GatheredStates:
        """Wait until every other worker has arrived or left; say who has not, and who never joined.

        Where workers come and go, those are all who are there."""
        with self._changed:
            run = self._of(body)

            def missing() -> list[int]:
                here = run.left.keys() | run.departing if body.left else self._standing(run).keys()
                wanted = run.others if run.hands_out else set(range(1, self._num_workers))
                return sorted(wanted - here)

            def in_force() -> bool:
                return body.halt is None or run.halt == body.halt

            def has_news() -> bool:
                return self._run is not run or not missing() or run.failure is not None or not in_force()

            self._wait(has_news, body.wait)
            return GatheredStates(
                missing=tuple(missing()),
                absent=tuple(worker for worker in missing() if worker not in run.members),
                states=_by_text(self._standing(run)),
                failure=run.failure,
                in_force=in_force(),
                departing=_by_text(run.departing),
                here=tuple(sorted(run.arrived)),
            )

    def _standing(self, run: _Run) -> dict[int, WorkerState]:
        """Return the states of all who stand still. Who was lost stands where it was last saved."""
        lost = {worker: run.safe[worker] for worker in run.lost if worker in run.safe}
        departed = {worker: one.state for worker, one in run.departing.items() if one.state is not None}
        return {**run.gone, **lost, **run.arrived, **run.left, **departed}

    def _release(self, body: OfRun) -> None:
        with self._changed:
            run = self._of(body)
            if run.halt is not None:
                run.stood[run.halt] = self._standing(run)
            run.halt = None
            run.arrived.clear()
            self._note(run)

    def _saved(self, body: PauseSaved) -> None:
        with self._changed:
            run = self._of(body)
            run.saved = max(run.saved, body.halt)
            stood = self._standing(run) if run.halt == body.halt else run.stood.get(body.halt, {})
            run.safe |= {
                worker: state for worker, state in stood.items() if body.halt > run.given.get(worker, 0)
            }
            if body.state is not None and body.halt > run.given.get(0, 0):
                run.safe[0] = body.state
            run.stood = {halt: stood for halt, stood in run.stood.items() if halt > body.halt}
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
        here = {worker for worker, member in run.members.items() if worker and member != _NOBODY}
        away = run.parted.keys() | run.lost.keys() | run.departing.keys()
        return sorted(here - run.told - away)

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
            return run.over or (run.start is not None and worker not in run.left and may_come(run))

        def may_come(run: _Run) -> bool:
            """Whether the place is free; and nobody who is not waited for comes while a moment is cut."""
            waited_for = not run.hands_out and worker not in self._standing(run)
            return worker not in run.departing and (run.halt is None or waited_for)

        with self._changed:
            self._wait(has_news, body.wait)
            run = self._run
            if run is None or not has_news():
                return Joined()
            if run.over:
                run.told.add(worker)
                return Joined(over=True, unfinished=run.unfinished)
            if run.failure is None and run.members.get(worker, member) not in (member, _NOBODY):
                if not run.keep_going:
                    self._fail(run, f"worker {worker} restarted")
                elif run.hands_out:
                    self._lose(run, worker, f"worker {worker} restarted.")
                    return Joined()  # when the others have what it had
                else:
                    self._take_back(run, worker)
            if run.failure is not None:
                ago = self._clock() - run.failed_at
                return Joined(failed=FailedRun(run.name, run.failure, run.final, ago))
            if run.hands_out:
                self._begin_with_nothing(run, worker)
            run.members[worker] = member
            run.joined.discard(worker)
            run.pushes.pop(worker, None)
            for served in run.servers.values():
                run.updates.setdefault(served.incarnation, {}).setdefault(worker, 0)
            run.heard[worker] = self._clock()
            run.parted.pop(worker, None)
            run.answered.pop(worker, None)
            if run.hands_out:
                self._note(run)
            return Joined(run.name, run.start, state=run.safe.get(worker), servers=_by_text(run.servers))

    def _back(self, body: ComeBack) -> Joined:
        """Take on a worker whose server 0 was lost and is here now; it has stopped nowhere."""
        self._check_worker(body.worker)
        with self._changed:
            run = self._run
            if run is None or run.start is None:
                return Joined()
            unknown = run.hands_out and body.worker not in run.heard
            other = run.members.get(body.worker, body.member) != body.member
            if run.name != body.run or other or unknown:
                failed = FailedRun(body.run, "the run was begun again without this worker", False, 0.0)
                return Joined(failed=failed)
            run.members[body.worker] = body.member
            run.joined.discard(body.worker)
            for incarnation, updates in body.lost.items():
                run.updates.setdefault(incarnation, {}).setdefault(body.worker, updates)
            run.heard[body.worker] = self._clock()
            run.parted.pop(body.worker, None)
            run.answered.pop(body.worker, None)
            run.lost.pop(body.worker, None)
            if run.hands_out:
                self._begin_with_nothing(run, body.worker)  # unless it is known how it was last saved
            if body.left is not None:
                run.left[body.worker] = body.left
            self._raise_step(body.step)
            self._note(run)
            return Joined(run.name, run.start, servers=_by_text(run.servers))

    def _lost(self, body: LostUpdates) -> None:
        with self._changed:
            run = self._of(body)
            said = run.updates.setdefault(body.incarnation, {})
            if body.worker not in said or body.worker not in run.pushes:  # what it left with says it as well
                said[body.worker] = body.updates
            self._changed.notify_all()

    def _news(self, body: AskNews, gone: Gone) -> News | None:
        with self._changed:
            run, worker = self._of(body), body.worker
            self._check_member(run, worker, body.member)
            run.heard[worker] = self._clock()
            run.parted.pop(worker, None)
            run.answered.pop(worker, None)
            run.lost.pop(worker, None)
            run.trained[worker] = max(run.trained.get(worker, 0), body.examples)
            limit = self._clock() + min(body.wait, LONGEST_WAIT)
            while run.version == body.seen and self._run is run and self._clock() < limit:
                self._changed.wait(_LOOK_EVERY)
                if gone():
                    run.parted[worker] = self._clock()
                    return None
                self._look_for_lost(run)
            run = self._of(body)
            self._check_member(run, worker, body.member)
            run.heard[worker] = run.answered[worker] = self._clock()
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
            )

    def _arrive(self, body: Arrive) -> None:
        self._check_worker(body.worker)
        with self._changed:
            run = self._of(body)
            self._check_member(run, body.worker, body.member)
            if run.halt == body.halt:  # otherwise it was released meanwhile
                run.arrived[body.worker] = body.state
                self._changed.notify_all()

    def _leave(self, body: Leave) -> None:
        self._check_worker(body.worker)
        with self._changed:
            run, worker = self._of(body), body.worker
            self._check_member(run, worker, body.member)
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
                elif worker not in run.departing:  # it may say so twice
                    self._depart(run, worker, body.state)

    def _given_back(self, body: GivenBack) -> None:
        with self._changed:
            run = self._of(body)
            self._let_go(run, body)
            self._note(run)

    def _deal(self, body: DealOut) -> DealTaken:
        with self._changed:
            run = self._of(body)
            if run.halt != body.halt:
                return DealTaken(taken=False)
            for worker, state in _by_number(body.states).items():
                run.safe[worker], run.given[worker] = state, body.halt
                run.dealt[worker] = DealtPosition(body.halt, state.position)
                if worker in run.arrived:
                    run.arrived[worker] = state
            for given in body.given:
                self._let_go(run, given)
            self._note(run)
            return DealTaken(taken=True)

    def _stop(self, body: StopRun) -> None:
        with self._changed:
            run = self._of(body)
            run.stop = run.stop or body.reason
            run.unfinished = run.unfinished or body.unfinished
            self._note(run)

    # Inside; the lock is held

    def _look_for_lost(self, run: _Run) -> None:
        """Look at all workers, unless somebody else who waits has just done so."""
        now = self._clock()
        if now - self._looked >= _LOOK_EVERY:
            slept, self._looked = now - self._looked > STOPPED_FOR, now
            self._look_at_all(run, now, slept=slept)

    def _look_at_all(self, run: _Run, now: float, *, slept: bool) -> None:
        if slept:  # it was this process: nobody could be heard
            run.heard = dict.fromkeys(run.heard, now)
            run.parted = dict.fromkeys(run.parted, now)
            run.answered = dict.fromkeys(run.answered, now)
        for worker, heard in run.heard.items():
            if worker in run.left or worker in run.lost or worker in run.departing or run.over:
                continue
            who = "worker 0, the chief," if worker == 0 else f"worker {worker}"
            if now - run.parted.get(worker, now) > RETURN_WITHIN:
                self._lose(run, worker, f"{who} was lost: its connection broke. See its log.")
            elif now - run.answered.get(worker, now) > ASK_WITHIN:
                silent = f"{who} was lost: it has asked for no news for {now - heard:.0f} s. See its log."
                self._lose(run, worker, silent)
            elif now - heard > self._lost_after:
                silent = f"{who} was lost: it has been silent for {now - heard:.0f} s. See its log."
                self._lose(run, worker, silent)

    def _lose(self, run: _Run, worker: int, why: str) -> None:
        """Go on without a worker until it is back, where the run is to keep going; or fail."""
        if not run.keep_going:
            self._fail(run, why)
        elif worker not in run.lost:
            _log.warning("%s The others keep going.", why)
            run.lost[worker] = self._clock()
            self._changed.notify_all()
            if run.hands_out and worker:
                self._depart(run, worker, None)

    def _depart(self, run: _Run, worker: int, state: WorkerState | None) -> None:
        """Have the chief give back what a worker had, who has no part in the run from now on."""
        run.departures += 1
        run.departing[worker] = Departure(run.departures, state)
        run.arrived.pop(worker, None)
        if state is None:
            run.members[worker] = _NOBODY
        self._note(run)

    def _keep_pushes(self, run: _Run, worker: int, pushes: PushesTold | None) -> None:
        """Note what a worker that leaves had pushed; the next cut has all of it."""
        if pushes is not None and worker not in run.pushes:
            cut = self._halts + 1 if run.halt is None else run.halt
            run.pushes[worker] = marked(pushes, cut)
            run.count_for_those_who_left()

    def _let_go(self, run: _Run, body: GivenBack) -> None:
        """Note that the others have the work of a worker that departed."""
        worker = body.worker
        departure = run.departing.get(worker)
        if departure is None or departure.number != body.number:
            return  # it was said before
        if departure.state is None:
            self._count_returned(run, worker, by_others=True)
        del run.departing[worker]
        run.gone[worker] = run.safe[worker] = body.state
        run.given[worker] = self._halts
        run.members[worker] = _NOBODY
        run.trained[worker] = body.state.examples
        for known in (run.lost, run.heard, run.parted, run.arrived, run.dealt):
            known.pop(worker, None)

    def _begin_with_nothing(self, run: _Run, worker: int) -> None:
        """Note where a worker begins that comes to data which hands out work."""
        assert run.start is not None
        run.gone.pop(worker, None)
        if worker < len(run.start.positions):
            began = WorkerState(position=run.start.positions[worker], examples=0, skipped=0, event_time=None)
            run.safe.setdefault(worker, began)

    def _take_back(self, run: _Run, worker: int) -> None:
        """Note that another process takes the place of a worker, and what it will train again."""
        self._count_returned(run, worker)
        run.parted.pop(worker, None)
        run.arrived.pop(worker, None)
        run.trained[worker] = run.safe[worker].examples if worker in run.safe else 0
        self._note(run)

    def _count_returned(self, run: _Run, worker: int, *, by_others: bool = False) -> None:
        """Note what is trained again since a worker was lost, and by whom."""
        saved = run.safe[worker].examples if worker in run.safe else 0
        records = max(run.trained.pop(worker, 0) - saved, 0)
        now = self._clock()
        seconds = now - run.lost.pop(worker, now)
        run.returned.append(Returned(worker, records, seconds, by_others))
        who = "its work was given back" if by_others else "it is back"
        _log.warning(
            "worker %d was lost, and %s after %.1f s; the records since its last saved position are trained "
            "again, %s",
            worker,
            who,
            seconds,
            f"{records:,} as far as it had said",
        )

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
        if not 0 <= worker < self._max_workers:
            raise ConfigError(
                f"there is no worker {worker} of {self._max_workers}; start all processes with the "
                "same cluster.num_workers and cluster.max_workers"
            )

    def _check_member(self, run: _Run, worker: int, member: str | None) -> None:
        """Refuse a process whose place another has, or nobody."""
        if member is not None and run.members.get(worker, member) != member:
            raise UnavailableError(f"worker {worker} was taken for lost, or another has taken its place")

    def _note(self, run: _Run) -> None:
        run.version += 1
        self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], seconds: float) -> None:
        self._changed.wait_for(ready, min(seconds, LONGEST_WAIT))


def _by_number(found: Mapping[str, T]) -> dict[int, T]:
    """Return a table of JSON by number.

    Raises:
        RequestError: A key is none.
    """
    if odd := [key for key in found if not key.isdecimal()]:
        raise RequestError(f"a worker or server is named by its number, got {odd[0]!r:.60}")
    return {int(key): value for key, value in found.items()}


def _by_text(found: Mapping[int, T]) -> dict[str, T]:
    """Return a table by number as JSON has it."""
    return {str(number): value for number, value in found.items()}
