"""A fleet: the processes that train one model together, as one of its workers sees them.

Parameter servers hold rows and weights. Workers, of whom the first is the chief, read a share of
the data each and train on what the servers hold. The chief also restores and saves: it halts the
others, has every server hold its share of the moment fast, and lets everybody go on while it is
written. So a checkpoint holds everything that was trained and nothing else, with the position of
each worker in its data.

Whoever dies ends the run for all, and those who are left hear of it within seconds. They stay and join
again; when the lost one is back the chief begins the next run, from the last checkpoint. What an earlier
run still has on its way is refused by the servers, so nothing is trained twice.

A fleet that keeps going does not end for that. Who is lost is brought back into the same run, from the last
checkpoint, and the others keep what they learned: see `recovery` for servers, `returning` for how workers go
on, and `meeting` for workers that are lost.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

from monolith.checkpoint import RestoreOptions, SavedPart
from monolith.cluster import ClusterManager, ClusterManagerConfig, Discovery, OnWaiting, Waiting
from monolith.cluster.security import Guard
from monolith.data import WorkQueueSource
from monolith.data.source import Position
from monolith.errors import ClusterError, ConfigError, DeadlineExceededError, RetryableError, UnavailableError
from monolith.observe import Metrics
from monolith.runtime.coordinator import LastCheckpoint, Start, WorkerState
from monolith.runtime.failover import LOOK_EVERY, KeepGoing, ServerRecovery, WorkerReturn, restore_dense
from monolith.runtime.fleet_news import Departures, FleetNews, LostServerPolicy
from monolith.runtime.losses import Lost, LostServer
from monolith.runtime.messages import (
    Arrive,
    AskGathered,
    BeginServer,
    BeginService,
    DealOut,
    DealTaken,
    DealtPosition,
    Departure,
    EndRun,
    Farewell,
    GatheredStates,
    GivenBack,
    Join,
    Joined,
    Leave,
    OfRun,
    OpenRun,
    PauseNumber,
    PauseSaved,
    PublishServer,
    ResumeRun,
    RunResumed,
    SayOver,
    Served,
    ServerHealth,
    ServerStatus,
    StopRun,
)
from monolith.runtime.push_counts import PushCounts
from monolith.runtime.server_calls import POLL, ServerCalls, TableWork, ask, on_each, tell
from monolith.runtime.server_choice import RESERVE_EVERY, PsBenchmark, ServerChoice, Spares, StepMeasure
from monolith.runtime.standbys import ShardStandbys, Standbys, UsedServer
from monolith.store import ParameterServerStore, ServerGroup, Store
from monolith.table import SlotThresholds, TableConfig
from monolith.train.hooks.barrier import HealthStatus, MachineHealth
from monolith.wire.messages import Nothing, write_message

_log = logging.getLogger(__name__)

A = TypeVar("A")


NEWS_EVERY = timedelta(seconds=POLL)


FAREWELL = timedelta(minutes=2)
"""How long the others have to hear that the run is over, as long as they are there."""


SAY_EVERY = 15.0
"""Seconds between two lines of the log about who is waited for."""


JOIN_WITHIN = 5.0
"""Seconds that a run which is stopping waits for workers that have not joined it."""


STOP_WITHIN = 60.0
"""Seconds that a worker has to stop where it is told to."""


OLD_NEWS = 60.0
"""Seconds after which the failure of a chief is no reason to give up for who comes now."""


class QuiescedFleet(NamedTuple):
    """Nobody but the chief trains."""

    number: int
    states: dict[int, WorkerState]
    """Of the others, by worker and in order."""
    here: tuple[int, ...] = ()
    """Those among them that go on afterwards."""
    departing: Mapping[int, Departure] = {}
    """Those among them that departed, with work that the others do not have yet."""


class Fleet:
    """One worker's place in a fleet. Used by its training thread; closes the group in the end.

    Args: see `join_fleet`.
        spares: Servers that the chief keeps beside those of the group; closed in the end.
        keep_going: How to go on when servers are lost; None ends the run for that.
    """

    def __init__(
        self,
        group: ServerGroup,
        index: int,
        num_workers: int,
        *,
        max_workers: int | None = None,
        spares: Spares | None = None,
        start_timeout: timedelta = timedelta(hours=2),
        finish_timeout: timedelta = timedelta(minutes=30),
        news_every: timedelta = NEWS_EVERY,
        keep_going: KeepGoing | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_workers = num_workers if max_workers is None else max_workers
        if not 0 <= index < self.max_workers:
            raise ConfigError(f"there is no worker {index} of {self.max_workers}")
        self.group = group
        self.index = index
        self.num_workers = num_workers
        self.spares = spares
        self._member = secrets.token_hex(8)
        self._start_timeout = start_timeout
        self._finish_timeout = finish_timeout
        self._news_every = news_every.total_seconds()
        self._how = keep_going
        self._clock = clock
        self._stores = 0
        self._held = False
        self._run = ""
        self._pushes = PushCounts(group)
        self._halts: dict[int, int] = {}
        """Step -> the halt at which it was cut, as the chief."""
        self._last_halt = 0
        self._stood: dict[int, dict[int, WorkerState]] = {}
        """QuiescedFleet -> how the others stood, as the chief, until it is saved."""
        self._safe: dict[str, WorkerState] = {}
        """By worker: how it stood at the last halt that was saved, as the chief."""
        self._start = Start(step=0)
        self._departures = Departures()
        self._dealt: dict[int, DealtPosition] = {}
        """Worker -> what it was dealt last; all that were, as the chief, and as another worker itself."""
        self._asked: set[int] = set()
        """Workers that were there when work was dealt out, as the chief, and those that have left."""
        self._replaced: dict[int, Served] = {}
        """Servers to be restored that others are still to hear of, as a chief that came back."""
        self.fresh: tuple[int, ...] = tuple(range(len(group)))
        """Servers that hold nothing of the run yet, so that a restore is for them, as the chief."""
        self.last_checkpoint: Callable[[], LastCheckpoint | None] = lambda: None
        """Finds what a lost share is restored from, as the chief. From any thread."""
        self._absent: list[int] = []
        """Workers who have not joined yet, as far as is known here."""
        self._listener: FleetNews | None = None
        self._recovery: ServerRecovery | None = None
        self._return: WorkerReturn | None = None
        self.finished = True
        """Once the run is over: whether it came to its end, and nobody stopped it before."""

    @property
    def is_chief(self) -> bool:
        return self.index == 0

    @property
    def keeps_going(self) -> bool:
        """Whether it outlives the loss of others."""
        return self._how is not None

    @property
    def resumed(self) -> bool:
        """Whether the chief came back to a run that some servers still hold."""
        return len(self.fresh) < len(self.group)

    @property
    def lost(self) -> Lost:
        """What was lost so far, as the chief knows it."""
        return Lost() if self._recovery is None else self._recovery.lost

    @property
    def safe(self) -> list[WorkerState | None]:
        """How each worker stood when the last checkpoint was cut, where that is known, as the chief."""
        return [self._safe.get(str(worker)) for worker in range(self.max_workers)]

    @property
    def start(self) -> Start:
        """What everybody began with."""
        return self._start

    @property
    def hands_out(self) -> bool:
        """Whether the data hands out work, so that workers may come and go."""
        return self._start.hands_out

    @property
    def losses(self) -> int:
        """How often servers were lost so far, as the chief."""
        return 0 if self._recovery is None else self._recovery.losses

    @property
    def tables(self) -> TableWork:
        """What the servers may be asked to do with their tables, as the chief."""
        return TableWork(self.group, self._run)

    @property
    def servers(self) -> tuple[str, ...]:
        """Names the processes of the servers: one that restarted has another name."""
        return self.group.processes

    def read_step(self) -> int:
        """Ask server 0 for the step of the whole model."""
        return self.group.read_step()

    def server_health(self, server: int) -> MachineHealth:
        """Ask one server for its health. From any thread."""
        answer = self._ask("server.health", OfRun(self._run), ServerHealth, server)
        return MachineHealth(HealthStatus(answer.status), answer.message)

    def make_store(
        self,
        configs: Mapping[str, TableConfig],
        /,
        *,
        thresholds: Mapping[str, SlotThresholds] | None,  # noqa: ARG002  the servers know them
        threads: int | None,  # noqa: ARG002
    ) -> Store:
        """Return the next store of the model that is being bound; see `MakeStore`."""
        number, self._stores = self._stores, self._stores + 1
        return ParameterServerStore(self.group, number, configs)

    # Beginning

    def begin(self, *, hands_out: bool = False) -> None:
        """Start a run, as its chief: what an earlier one left on the servers no longer counts.

        Where the fleet keeps going and some servers still hold a run, take that one on instead: `fresh` says
        which servers do not.

        Args:
            hands_out: Whether the data hands out work. Then a run whose server 0 was lost with its chief is
                not taken on: nobody knows where its workers began.
        """
        if self.spares is not None:
            self.spares.keep()
        if self._how is None or not self._resume(hands_out=hands_out):
            self._run = secrets.token_hex(8)
            self._tell_servers("server.begin", BeginServer(self._run))
            self.group.expect(self._run)
            self._begin_meeting(self.group, {})
        self._listen()

    def _resume(self, *, hands_out: bool) -> bool:
        """Take on the run that servers still hold, if there is one that goes on."""
        found = on_each(
            range(len(self.group)), lambda one: self._ask("server.standing", Nothing(), ServerStatus, one)
        )
        runs = {one.run for one in found if one.run is not None}
        if len(runs) != 1:
            return False
        (run,) = runs
        if found[0].run != run and hands_out:
            return False
        served: dict[str, Served] = {}
        saved = 0
        if found[0].run == run:
            meeting = self._ask("meeting.resume", ResumeRun(run, self._member), RunResumed)
            if not meeting.goes_on or not meeting.opened:
                return False
            served, saved, self._safe = dict(meeting.servers), meeting.saved, dict(meeting.safe)
            self._start = meeting.start or self._start
            self._departures.gone = dict(meeting.gone)
        meant = {
            place: served[str(place)].incarnation if str(place) in served else run for place in self._places
        }
        self.fresh = tuple(place for place in self._places if found[place].incarnation != meant[place])
        if not self.resumed:
            return False
        self._run = run
        _log.warning(
            "coming back to a run that goes on; servers %s lost what they held", list(self.fresh) or "none"
        )
        self.group.expect(run)
        for place in self.fresh:
            incarnation = secrets.token_hex(8)
            self._tell("server.begin", BeginServer(run, incarnation), place)
            served[str(place)] = Served(self.group.addresses[place], incarnation, saved)
        servers = {int(place): one for place, one in served.items()}
        for place, one in servers.items():
            self.group.replace(place, self.group.addresses[place], one.incarnation)
        if 0 in self.fresh:
            self._begin_meeting(self.group, servers)
        self.tables.close_cut(None, saved=False)  # what the chief before was about to save
        self._replaced = {place: served[str(place)] for place in self.fresh}
        return True

    @property
    def _places(self) -> range:
        return range(len(self.group))

    def _begin_meeting(self, server: ServerGroup, servers: Mapping[int, Served]) -> None:
        """Have server 0 keep the meeting: of a new run, or of one that goes on."""
        listener = self._listener
        present = () if listener is None else listener.present
        departing = dict(self._departing())
        body = BeginService(
            self._run,
            self.num_workers,
            self.max_workers,
            keep_going=self.keeps_going,
            halts=self._last_halt,
            saved=0 if listener is None else listener.saved,
            stop=None if listener is None else listener.stop_reason,
            unfinished=False if listener is None else listener.unfinished,
            safe=self._safe,
            servers={str(place): served for place, served in servers.items()},
            present=present,
            departing={str(worker): one for worker, one in departing.items()},
            departures=self._departures.last,
            gone={worker: one for worker, one in self._departures.gone.items() if int(worker) not in present},
            dealt={str(worker): one for worker, one in self._dealt.items()},
            joined=() if listener is None else listener.joined,
            pushes={} if listener is None else dict(listener.pushes),
        )
        tell(server, 0, "meeting.begin", body)

    def _listen(self) -> None:
        """Hear of the others from now on."""
        mending: LostServerPolicy | None = None
        if self._how is not None and self.is_chief:
            mending = self._recovery = ServerRecovery(
                self.group,
                self._run,
                self._pushes,
                self._how,
                last=self._find_last,
                halt_of=lambda step: self._halts.get(step, 0),
                take_over_meeting=self._take_over_meeting,
                patience=self._start_timeout,
            )
        elif self._how is not None:
            mending = self._return = WorkerReturn(
                self.group,
                self._run,
                self._pushes,
                self._how,
                worker=self.index,
                member=self._member,
                patience=self._start_timeout,
            )
        self._listener = FleetNews(
            self.group, self._run, self.index, self._news_every, member=self._member, mending=mending
        )
        if self.is_chief:
            self._listener.attend()

    def _find_last(self) -> LastCheckpoint | None:
        return self.last_checkpoint()

    def _take_over_meeting(self, server: ServerGroup, servers: Mapping[int, Served]) -> None:
        """Have a new server 0 count on from the highest step there was, and keep the meeting of this run."""
        server.call(0, "set_step", step=self.group.step)
        self._begin_meeting(server, servers)
        tell(server, 0, "meeting.open", OpenRun(self._run, self._start))

    def open(self, start: Start) -> None:
        """Let the others begin, as the chief. They are told `start`."""
        self.check()
        self._start = start
        self._tell("meeting.open", OpenRun(self._run, start))
        for place, served in self._replaced.items():
            self._tell("meeting.served", PublishServer(self._run, place, served))
            assert self._recovery is not None
            last = self.last_checkpoint()
            source = None if last is None else last.prefix
            found = LostServer(server=place, rows=None, updates=0, seconds=0.0, restored_from=source)
            self._recovery.count(found, served.incarnation)
        self._replaced = {}
        if self._how is not None and self._how.standbys is not None:
            self._how.standbys.keep(self._run)

    @property
    def standbys(self) -> tuple[ShardStandbys, ...]:
        """How many standbys each shard has, as the chief knows; empty in other workers. From any thread."""
        standbys = None if self._how is None else self._how.standbys
        return () if standbys is None else standbys.standing()

    @property
    def run(self) -> str:
        """Names the run on the servers; "" before this worker takes part in one."""
        return self._run

    @property
    def joined(self) -> bool:
        """Whether this worker takes part in a run."""
        return bool(self._run)

    def join(self, stopped: Callable[[], bool] = lambda: False) -> Start | None:
        """Wait until the chief has restored everything; return what it says of where to go on.

        A run that failed long before this worker came is waited out: somebody may start the chief again.

        Args:
            stopped: Whether somebody wants this worker to stop; looked at every second.

        Returns:
            None where the run is over, and this worker's part in it done; or it was stopped.

        Raises:
            DeadlineExceededError: It did not in time.
            ClusterError: It failed, and will not begin again by itself.
        """
        limit, said = self._clock() + self._start_timeout.total_seconds(), self._clock()
        known, first = "", True
        while not stopped():
            answer = self._ask("meeting.join", Join(self.index, self._member, known, 1.0), Joined)
            if answer.run is not None:
                self._run = answer.run
                self.group.expect(self._run)
                for place, served in answer.servers.items():
                    self.group.replace(int(place), served.address, served.incarnation)
                self._listen()
                assert answer.start is not None
                self._start = answer.start
                return replace(answer.start, back=answer.state)
            if answer.over:
                self.finished = not answer.unfinished
                return None
            if (failed := answer.failed) is not None:
                if failed.final and not (first and failed.ago > OLD_NEWS):
                    raise ClusterError(failed.why)
                known = failed.run
            first = False
            now = self._clock()
            if now >= limit:
                raise DeadlineExceededError(
                    f"worker {self.index} waited {self._start_timeout} for the chief to restore the model; "
                    "see the chief's log"
                )
            if now - said >= SAY_EVERY:
                said = now
                _log.info("waiting for the chief to restore the model")
        return None

    # Between steps

    @property
    def stop_reason(self) -> str | None:
        """Why everybody is to finish; None while nobody asked."""
        return None if self._listener is None else self._listener.stop_reason

    def check(self) -> None:
        """Raise what has gone wrong with the others."""
        if self._listener is not None:
            self._listener.check()

    @property
    def is_halted(self) -> bool:
        """Whether the chief wants nobody to train."""
        return self._listener is not None and self._listener.halt is not None

    def wait_at_halt(self, state: WorkerState) -> int:
        """Arrive with this worker's state, all its updates done, and wait until everybody may go on.

        Returns:
            The number of the halt; 0 where it was over before.
        """
        listener = self._listener
        assert listener is not None
        halt = listener.halt
        if halt is None:
            return 0
        self._pushes.mark(halt)
        self._surely("meeting.arrive", Arrive(self._run, self.index, halt, state, self._member))
        listener.wait_for_release(halt)
        return halt

    def note_trained(self, examples: int) -> None:
        """Have the others know how many examples this worker has trained since everybody began."""
        if self._listener is not None:
            self._listener.examples = examples

    @contextlib.contextmanager
    def halted(self, stopped: Callable[[], bool] = lambda: False) -> Iterator[QuiescedFleet]:
        """Hold the others between their steps, as the chief, and hand out their states.

        Args:
            stopped: Whether somebody wants the run to stop: who has not joined it yet never will.
        """
        if self._recovery is not None:
            self._recovery.wait_until_whole(self._start_timeout.total_seconds())
        number = self._halt()
        try:
            gathered = self._gather(number, stopped)
            states = self._by_worker(gathered)
            self._stood[number] = states
            self._departures.note_cut(number, gathered.departing.values())
            departing = {int(worker): one for worker, one in gathered.departing.items()}
            yield QuiescedFleet(number, states, gathered.here, departing)
        finally:
            if not self._held:
                self._release()

    def note_cut(self, step: int) -> None:
        """Note, as the chief, that the halt in force is cut: all updates of this worker are done."""
        self._halts[step] = self._last_halt
        self._pushes.mark(self._last_halt)

    def pause(self) -> int:
        """Pause the other workers, as the chief, until `resume`; return its number. From any thread."""
        self._held = True
        return self._halt()

    def resume(self) -> None:
        """End a `pause`."""
        self._held = False
        self._release()

    def quiesced_workers(self) -> list[int]:
        """Return the other workers that are quiesced at the pause in force, or have left, as the chief."""
        answer = self._ask("meeting.gathered", AskGathered(self._run), GatheredStates)
        return sorted(int(worker) for worker in answer.states)

    def note_saved(self, halt: int, state: WorkerState | None = None) -> None:
        """Tell the others, as the chief, that the checkpoint of a halt is on disk.

        Args:
            state: How the chief stood then.
        """
        if (stood := self._stood.get(halt)) is not None:
            known = {str(worker): one for worker, one in stood.items()}
            self._safe |= self._departures.still_said(known, halt)
        self._departures.note_saved(halt)
        if state is not None:
            self._safe |= self._departures.still_said({"0": state}, halt)
        self._stood = {number: states for number, states in self._stood.items() if number > halt}
        self._halts = {step: number for step, number in self._halts.items() if number >= halt}
        self._pushes.forget_before(halt)
        self._surely("meeting.saved", PauseSaved(self._run, halt, state))

    @property
    def saved_halt(self) -> int:
        """The last halt whose checkpoint is on disk, as far as is known here; 0 for none."""
        return 0 if self._listener is None else self._listener.saved

    def restore_dense(self, saved: SavedPart, options: RestoreOptions) -> None:
        """Have the servers that lost what they held restore their weights, as a chief that came back."""
        restore_dense(self.group, self.fresh, self._run, saved, options)

    def begin_commit(self, losses: int) -> None:
        """Say, as the chief, that all servers have written a checkpoint; see `ServerRecovery`."""
        if self._recovery is not None:
            self._recovery.begin_commit(losses)

    def end_commit(self) -> None:
        """Say, as the chief, that the checkpoint counts, or never will."""
        if self._recovery is not None:
            self._recovery.end_commit()

    def stop(self, reason: str, *, unfinished: bool = False) -> None:
        """Ask everybody to finish.

        Args:
            unfinished: Whether there is more to do: the run is then not done, however well it ends.
        """
        self._surely("meeting.stop", StopRun(self._run, reason, unfinished))

    # Ending

    def leave(self, state: WorkerState, *, gives_back: bool = False) -> None:
        """Say that this worker is done, all its updates too.

        Args:
            gives_back: Whether it leaves the rest of its work to the others, who go on.
        """
        if self._return is not None:
            self._return.left = state
        pushes = self._pushes.told() if self.keeps_going else None
        gone = Leave(self._run, self.index, state, gives_back=gives_back, member=self._member, pushes=pushes)
        self._surely("meeting.leave", gone)

    # Workers that come and go

    @property
    def save_wanted(self) -> bool:
        """Whether a worker has left whose last steps are in no checkpoint yet, as the chief."""
        return any(
            one.state is not None and self._ready(worker, one) is None for worker, one in self._departing()
        )

    def give_back(self, give_back: Callable[[Position], Position]) -> bool:
        """Have the others get the work of those who departed, as far as what they did is saved, as the chief;
        return whether there was any.

        Args:
            give_back: That of the data; see `WorkQueueSource`.
        """
        found = [(worker, one, self._ready(worker, one)) for worker, one in self._departing()]
        for worker, departure, state in found:
            if state is None:
                continue
            _log.info("worker %d is gone; what it has not trained goes to the others", worker)
            left = replace(state, position=give_back(state.position), event_time=None)
            self._safe[str(worker)] = left
            self._departures.note_given(worker, left, self._last_halt)
            self._surely("meeting.given_back", GivenBack(self._run, worker, departure.number, left))
        return any(state is not None for _, _, state in found)

    def _departing(self) -> list[tuple[int, Departure]]:
        """Return who departed, with work that was not given back yet."""
        if self._listener is not None:
            self._departures.note_heard(self._listener.departing)
        return self._departures.due

    def _ready(self, worker: int, departure: Departure) -> WorkerState | None:
        """Return how a worker stood that departed, in what is saved; None where its last steps are not."""
        safe = self._safe.get(str(worker))
        if safe is None and worker < len(self._start.positions):
            position = self._start.positions[worker]
            safe = WorkerState(position=position, examples=0, skipped=0, event_time=None)
        if departure.state is None or (safe is not None and departure.state.examples == safe.examples):
            return safe
        return departure.state if self._departures.is_saved(departure.number) else None

    @property
    def deals_out(self) -> bool:
        """Whether the chief deals out the work of all, when workers come and go."""
        return self._start.deals_out

    @property
    def deal_wanted(self) -> bool:
        """Whether somebody has come who has nothing, or gone who had something, as the chief."""
        if self._held or self.stop_reason is not None or self._listener is None:
            return False
        return bool(self._departing()) or not self._asked.issuperset(self._listener.present)

    def deal(self, halt: QuiescedFleet, mine: WorkerState, queue: WorkQueueSource) -> Position | None:
        """Divide all remaining work among the workers that are here, while all are quiesced, as the chief.

        Args:
            mine: The state of the chief.

        Returns:
            The position from which the chief reads now; None if all workers keep their work.
        """
        assert self._listener is not None
        self._asked = {*halt.here, *self._listener.present} - halt.departing.keys()
        states = {0: mine, **{worker: halt.states[worker] for worker in halt.here}}
        if not halt.departing and states.keys() == self._dealt.keys():
            return None
        gone = {worker: halt.states[worker] for worker in halt.departing}
        remaining = [one.position for one in (*states.values(), *gone.values())]
        positions = queue.reassign(remaining, len(states))
        states = {
            worker: replace(states[worker], position=position)
            for worker, position in zip(states, positions, strict=True)
        }
        gone = {
            worker: replace(one, position=queue.give_back(one.position), event_time=None)
            for worker, one in gone.items()
        }
        given = (GivenBack(self._run, one, halt.departing[one].number, gone[one]) for one in gone)
        said = DealOut(self._run, halt.number, {str(one): states[one] for one in states}, tuple(given))
        # One that was lost may have taken it, but nobody hears of that any more.
        if not self._insist(lambda: self._ask("meeting.deal", said, DealTaken)).taken:
            self._asked = set()
            return None
        _log.info("the work was dealt out anew, to workers %s", ", ".join(map(str, states)))
        self._dealt = {worker: DealtPosition(halt.number, state.position) for worker, state in states.items()}
        self._safe |= {str(worker): state for worker, state in states.items()}
        self._departures.note_heard(halt.departing)
        self._departures.note_dealt(states, halt.number)
        for worker, left in gone.items():
            self._safe[str(worker)] = left
            self._departures.note_given(worker, left, halt.number)
        return states[0].position

    def take_dealt(self) -> Position | None:
        """Return where this worker, who is not the chief, goes on with what it was dealt; each deal once."""
        dealt = None if self._listener is None else self._listener.dealt
        if dealt is None or dealt == self._dealt.get(self.index):
            return None
        self._dealt[self.index] = dealt
        return dealt.position

    @property
    def has_departing(self) -> bool:
        """Whether work of others is still to be given back, as the chief."""
        return bool(self._departing())

    def fail(self, why: str, *, final: bool, lost: bool = False) -> None:
        """Say that this worker cannot go on, which ends the run; if anybody hears it.

        Args:
            final: Whether nobody should wait for this process to join or begin again by itself.
            lost: Whether it fails because others were lost.
        """
        self._close_listener()
        if not self._run:
            return
        with contextlib.suppress(ClusterError, ConfigError):
            final = final and self.is_chief
            gone = Leave(self._run, self.index, failure=why, final=final, lost=lost, member=self._member)
            self._tell("meeting.leave", gone)

    def wait_for_others(self, idle: Callable[[], None], *, stopping: bool = False) -> dict[int, WorkerState]:
        """Wait, as the chief, until all other workers have left; return their last states, in order.

        After `finish_timeout` they are asked to stop.

        Args:
            idle: Called every second meanwhile.
            stopping: Whether the run stops before its end: a worker that has not joined yet never will.

        Raises:
            UnavailableError: A worker was lost, or never joined.
            DeadlineExceededError: A worker does not stop.
        """
        began, deadline = self._clock(), self.finish_deadline()
        while missing := self.still_training():
            if stopping:
                self._check_joined(began)
            idle()
            deadline.check(missing)
        return self._states()

    def finish_deadline(self) -> FinishDeadline:
        """Return a deadline, from now, for the other workers to finish."""
        return FinishDeadline(self, self._finish_timeout, self._clock)

    def still_training(self) -> list[int]:
        """Wait up to a second, as the chief, for all other workers to leave; return those that have not."""
        try:
            return self._missing(wait=1.0)
        except RetryableError:
            # The coordination service was lost with server 0: ask again once that is replaced.
            if self._how is None:
                raise
            self.check()
            self._how.sleep(LOOK_EVERY)
            return list(self._listener.present if self.hands_out and self._listener else self._all_others)

    @property
    def _all_others(self) -> range:
        return range(1, self.num_workers)

    def wait_for_end(self) -> None:
        """Wait, having left, until the chief has saved and said that the run is over.

        Raises:
            RetryableError: Nobody says so any more: what this worker did last may not be saved.
        """
        assert self._listener is not None
        self.finished = self._listener.wait_for_end(self._finish_timeout.total_seconds())

    def end(self) -> None:
        """Tell everybody, as the chief, that the run is over and saved; who is gone is passed over."""
        if self._recovery is not None:
            self._recovery.wait_until_counted()  # while the others are there to say it
        self._close_listener()
        limit = self._clock() + FAREWELL.total_seconds()
        with _passed_over("server 0"):
            while True:
                answer = self._ask("meeting.over", SayOver(self._run, 1.0), Farewell)
                self.finished = not answer.unfinished
                if not answer.untold:
                    break
                if self._clock() >= limit:
                    _log.warning("workers %s were not told that the run is over", list(answer.untold))
                    break

        def say(server: int) -> None:
            with _passed_over(f"server {server}"):
                self._tell("server.end", EndRun(self._run, self.finished), server)

        on_each(self._places, say)
        if self.spares is not None:
            self.spares.end(self._run, finished=self.finished)

    def close(self) -> None:
        """Let go of the servers. Closing again does nothing."""
        self._close_listener()
        if self.spares is not None:
            self.spares.close()
        self.group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Inside

    def _ask(self, name: str, request: object, kind: type[A], server: int = 0) -> A:
        return ask(self.group, server, name, request, kind)

    def _tell(self, name: str, request: object, server: int = 0) -> None:
        tell(self.group, server, name, request)

    def _tell_servers(self, name: str, request: object) -> None:
        self.group.call_all(name, **write_message(request))

    def _surely(self, name: str, request: object) -> None:
        """Tell the meeting what it may be told twice."""
        self._insist(lambda: self._tell(name, request))

    def _insist(self, call: Callable[[], A]) -> A:
        """Call the meeting until it answers; one that was lost with server 0, when it is back."""
        limit = self._clock() + self._start_timeout.total_seconds()
        while True:
            try:
                return call()
            except RetryableError:
                if self._how is None or self._clock() >= limit:
                    raise
                self.check()
                self._how.sleep(LOOK_EVERY)

    def _halt(self) -> int:
        self._last_halt = self._ask("meeting.halt", OfRun(self._run), PauseNumber).halt
        return self._last_halt

    def _release(self) -> None:
        self._surely("meeting.release", OfRun(self._run))

    def _gather(self, halt: int, stopped: Callable[[], bool]) -> GatheredStates:
        """Wait until all others stand still; one that has not come yet is waited for as at the start."""
        began = said = self._clock()
        while missing := self._missing(halt=halt, wait=1.0):
            if stopped():
                self._check_joined(began)
            now = self._clock()
            if now - began > self._start_timeout.total_seconds():
                raise DeadlineExceededError(
                    f"cannot save: waited {self._start_timeout} for workers "
                    f"{', '.join(map(str, missing))} to halt; see their logs"
                )
            if now - said >= SAY_EVERY:
                said = now
                who = ", ".join(map(str, missing))
                _log.warning("waiting for workers %s to halt before saving; see their logs", who)
        return self._gathered(AskGathered(self._run, halt=halt))

    def _check_joined(self, since: float) -> None:
        """Wait no longer for workers who never came, when the run is to stop."""
        if self._absent and self._clock() - since > JOIN_WITHIN:
            raise UnavailableError(
                f"workers {', '.join(map(str, self._absent))} never joined, so the steps since the last "
                "checkpoint cannot be saved; the next start resumes from it"
            )

    def _states(self) -> dict[int, WorkerState]:
        return self._by_worker(self._gathered(AskGathered(self._run)))

    def _by_worker(self, gathered: GatheredStates) -> dict[int, WorkerState]:
        """Return the states of the others: of all there are, or where they come and go, ever were."""
        found = {int(worker): state for worker, state in gathered.states.items()}
        return {worker: found[worker] for worker in (sorted(found) if self.hands_out else self._all_others)}

    def _missing(self, *, halt: int | None = None, wait: float) -> list[int]:
        """Return who does not stand still yet at a halt, or without one, who has not left."""
        self.check()
        answer = self._gathered(AskGathered(self._run, wait, left=halt is None, halt=halt))
        if answer.failure:
            raise UnavailableError(answer.failure)
        self._absent = list(answer.absent)
        self._departures.note_heard({int(worker): one for worker, one in answer.departing.items()})
        return list(answer.missing)

    def _gathered(self, asked: AskGathered) -> GatheredStates:
        answer = self._ask("meeting.gathered", asked, GatheredStates)
        if not answer.in_force:
            raise UnavailableError("server 0 was lost, and with it who stood still")
        return answer

    def _close_listener(self) -> None:
        if self._how is not None and self._how.standbys is not None:
            self._how.standbys.close()
        if self._recovery is not None:
            self._recovery.close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None


class FinishDeadline:
    """Asks workers that still train to stop once the chief has waited for them long enough.

    waiting ──timeout──► asked to stop ──STOP_WITHIN──► DeadlineExceededError
    """

    def __init__(self, fleet: Fleet, timeout: timedelta, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._timeout = timeout
        self._clock = clock
        self._limit = clock() + timeout.total_seconds()
        self._asked_at: float | None = None

    def check(self, training: Sequence[int]) -> None:
        """Note that these workers still train.

        Raises:
            DeadlineExceededError: They were asked to stop, and did not in time.
        """
        now, workers = self._clock(), ", ".join(map(str, training))
        if self._asked_at is None and now >= self._limit:
            _log.warning("workers %s are still training; asking them to stop", workers)
            self._fleet.stop(f"the chief has waited {self._timeout} for this worker", unfinished=True)
            self._asked_at = now
        elif self._asked_at is not None and now - self._asked_at > STOP_WITHIN:
            raise DeadlineExceededError(
                f"workers {workers} were asked to stop and did not within {STOP_WITHIN:g} s; "
                "all steps since the last checkpoint are lost"
            )


@contextlib.contextmanager
def _passed_over(who: str) -> Iterator[None]:
    try:
        yield
    except ClusterError as error:
        _log.warning("could not tell %s that the run is over: %s", who, error)


PATIENCE = timedelta(seconds=1)
"""How long to try a server where nobody answers: one that restarted holds nothing of this run."""


KEEP_GOING_EVERY = timedelta(seconds=1)
"""How often who keeps going says what would be lost with it."""


_ASK_EVERY = 0.5


def join_fleet(
    discovery: Discovery,
    *,
    index: int,
    num_ps: int,
    num_workers: int,
    max_workers: int | None = None,
    guard: Guard | None = None,
    model_dir: str = "",
    run_id: str = "",
    num_redundant_ps: int = 0,
    num_extra_ps: int = 0,
    standbys: int = 0,
    measure_ps: timedelta = timedelta(seconds=10),
    use_ps: Sequence[str] = (),
    metrics: Metrics | None = None,
    model_name: str = "",
    cluster_type: str = "stable",
    say: Callable[[str], None] = _log.info,
    start_timeout: timedelta = timedelta(hours=2),
    finish_timeout: timedelta = timedelta(minutes=30),
    call_timeout: timedelta = timedelta(seconds=30),
    lookup_timeout: timedelta | None = None,
    half_rows: bool = False,
    news_every: timedelta = NEWS_EVERY,
    keep_going: bool = False,
    spare_after: timedelta = timedelta(seconds=5),
    on_waiting: OnWaiting | None = None,
) -> Fleet:
    """Wait for the servers of a run to answer, and return this worker's place among its processes.

    Args:
        max_workers: The most workers there may be, where the data hands out work; None for no more.
        guard: What to present to the servers.
        run_id: Names this submission of the job; see `ClusterManagerConfig.uuid`.
        num_redundant_ps: Servers beyond `num_ps`: those that register first are used.
        num_extra_ps: Servers beyond `num_ps`: the chief measures all and uses the fastest.
        standbys: How many servers keep a copy of each shard, 0 to 2: `num_ps` servers more for each.
            Only for those who keep going.
        measure_ps: How long it measures them.
        use_ps: Addresses to use where there are extra servers, instead of measuring.
        metrics: Are told how many servers are missing, under the model's name and the cluster's type; and
            what was lost.
        say: Told which servers were chosen, and why.
        start_timeout: How long to wait for servers, and then for the chief.
        finish_timeout: How long the chief waits for the others at the end.
        call_timeout: The longest that one call of a server may take.
        lookup_timeout: The same for a lookup of rows; None takes that of other calls.
        half_rows: Whether lookups are answered in half floats; see `ServerGroup`.
        news_every: How often each says that it lives; of news it hears at once.
        keep_going: Whether the others keep what they learned when a process is lost.
        spare_after: How long a lost server may take to come back before a spare takes its place.
        on_waiting: Told who is missing.

    Raises:
        DeadlineExceededError: Some servers did not come in time.
        ConfigError: They serve another task, or were counted otherwise.
    """
    check_standbys(standbys, keep_going=keep_going)
    spares_wanted = num_redundant_ps + num_extra_ps + standbys * num_ps
    manager = ClusterManager(
        discovery,
        ClusterManagerConfig(
            num_workers=num_workers,
            num_ps=num_ps,
            model_dir=model_dir,
            uuid=run_id,
            model_name=model_name,
            cluster_type=cluster_type,
            num_redundant_ps=spares_wanted,
            query_every=timedelta(seconds=0.5),
            timeout=start_timeout,
            ps_file_timeout=start_timeout,
        ),
        metrics=metrics if index == 0 else None,
        on_waiting=on_waiting,
    )
    calls = ServerCalls(guard)
    choose: PsBenchmark | None = None
    if num_extra_ps:
        choose = PsBenchmark(num_ps, StepMeasure(measure_ps, guard), overridden=use_ps, say=say)
    choice = ServerChoice(
        manager,
        calls,
        num_ps=num_ps,
        candidates=num_ps + num_extra_ps,
        choose=choose,
        spare_after=spare_after,
    )

    def connect(addresses: Sequence[str], patience: timedelta) -> ServerGroup:
        return ServerGroup(
            addresses,
            guard=guard,
            patience=patience,
            timeout=call_timeout,
            lookup_timeout=lookup_timeout,
            replacement_timeout=start_timeout if keep_going else timedelta(),
            half=half_rows,
        )

    spares: Spares | None = None
    listed = bool(spares_wanted)
    if not listed:
        group = _answering(lambda: manager.query_ps(num_ps), num_ps, connect, start_timeout, on_waiting)
    elif index:
        group = _answering(choice.of_worker, num_ps, connect, start_timeout, on_waiting)
    else:
        group = _answering(choice.of_chief, num_ps, connect, start_timeout, on_waiting)
        every = min(RESERVE_EVERY, start_timeout / 4)
        spares = Spares(manager.registered_ps, lambda: group.addresses, calls, every=every)

    def find(place: int) -> list[str]:
        with contextlib.suppress(RetryableError):
            return choice.places_of(place) if listed else manager.registered_at(place)
        return []

    copies: Standbys | None = None
    if standbys and index == 0:
        copies = Standbys(
            manager.registered_ps,
            lambda: [UsedServer(*one) for one in zip(group.addresses, group.incarnations, strict=True)],
            calls,
            wanted=standbys,
            metrics=metrics,
            say=say,
        )
    how = KeepGoing(
        find=find,
        connect=lambda address: connect([address], timedelta()),
        spare=(lambda place: choice.take_over(place, group.addresses)) if listed else None,
        served=choice.list_server if listed else None,
        spare_after=spare_after,
        standbys=copies,
        metrics=metrics,
    )
    try:
        return Fleet(
            group,
            index,
            num_workers,
            max_workers=max_workers,
            spares=spares,
            start_timeout=start_timeout,
            finish_timeout=finish_timeout,
            news_every=min(news_every, KEEP_GOING_EVERY) if keep_going else news_every,
            keep_going=how if keep_going else None,
        )
    except BaseException:
        group.close()
        raise


def check_standbys(standbys: int, *, keep_going: bool) -> None:
    """Refuse standbys that a run cannot use.

    Raises:
        ConfigError: Says why.
    """
    if standbys not in (0, 1, 2):
        raise ConfigError(f"standbys must be from 0 to 2, got {standbys}")
    if standbys and not keep_going:
        raise ConfigError(
            "standbys are for runs that keep going: a copy may miss the last updates, and an exact run goes "
            "back to its last checkpoint"
        )


def reach_servers(
    discovery: Discovery,
    *,
    num_ps: int,
    num_workers: int,
    guard: Guard | None = None,
    start_timeout: timedelta = timedelta(hours=2),
    call_timeout: timedelta = timedelta(seconds=30),
    lookup_timeout: timedelta | None = None,
    half_rows: bool = False,
    on_waiting: OnWaiting | None = None,
) -> ServerGroup:
    """Wait for the servers of a run whose workers are ranks, and return connections to them.

    Args: see `join_fleet`.

    Raises:
        DeadlineExceededError: Some did not come in time.
        ConfigError: They serve another task, or were counted otherwise.
    """
    config = ClusterManagerConfig(
        num_workers=num_workers, num_ps=num_ps, query_every=timedelta(seconds=0.5), timeout=start_timeout
    )
    manager = ClusterManager(discovery, config, on_waiting=on_waiting)

    def connect(addresses: Sequence[str], patience: timedelta) -> ServerGroup:
        return ServerGroup(
            addresses,
            guard=guard,
            patience=patience,
            timeout=call_timeout,
            lookup_timeout=lookup_timeout,
            half=half_rows,
        )

    return _answering(lambda: manager.query_ps(num_ps), num_ps, connect, start_timeout, on_waiting)


def _answering(
    find: Callable[[], list[str]],
    num_ps: int,
    connect: Callable[[Sequence[str], timedelta], ServerGroup],
    timeout: timedelta,
    on_waiting: OnWaiting | None,
) -> ServerGroup:
    """Return connections to all servers once each of them answers.

    A registry may know a server that is dead, or whose port is not open yet: it is asked again until what
    it says is true.

    Args:
        find: Returns the addresses by share.
    """
    began = time.monotonic()
    while True:
        addresses: list[str] = []
        answered = 0
        try:
            addresses = find()
            with contextlib.closing(connect(addresses, timedelta())) as probe:
                for server in range(num_ps):
                    probe.call(server, "hello")
                    answered += 1
            group = connect(addresses, PATIENCE)
            try:
                group.describe()
                return group
            except BaseException:
                group.close()
                raise
        except RetryableError as cause:
            elapsed = timedelta(seconds=time.monotonic() - began)
            if elapsed >= timeout:
                raise DeadlineExceededError(
                    f"waited {timeout} for {num_ps} parameter servers to answer: {cause}"
                ) from cause
            _log.debug("not all servers answer yet: %s", cause)
        if on_waiting is not None:
            late = min(answered, num_ps - 1)
            who = (
                f"parameter server {late} at {addresses[late]} to answer"
                if addresses
                else "servers to choose"
            )
            on_waiting(Waiting(who, answered, num_ps, elapsed))
        time.sleep(_ASK_EVERY)
