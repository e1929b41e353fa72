"""A fleet: parameter servers and the workers that train one model on them, as one worker sees it.

Parameter servers hold rows and dense weights. Each worker reads a shard of the data and trains on the
servers' parameters; worker 0 is the chief. The chief also restores and saves. For a snapshot it pauses all
other workers, has every server take a snapshot of its shard, and resumes them while the servers write it:

    chief      pause ──► workers quiesced ──► snapshot on every server ──► resume ──► written ──► committed
    workers    train ──► drain, report their state, wait ────────────────► train ───────────────► commit

So a checkpoint holds everything that was trained and nothing else, with each worker's position in its data.

A lost process ends the run for all: the remaining ones learn of it within seconds and rejoin, and once the
lost process is back, the chief starts the next run from the last checkpoint. Servers refuse updates of an
earlier run that are still in flight, so nothing is trained twice.

A fleet that keeps going survives a loss. The lost process rejoins the same run from the last checkpoint, and
all others keep what they learned: see `failover` for servers, and `service` for workers.

Threads of the chief, and what they share with its training thread:

    training        all methods of `Fleet`, unless they say otherwise
    news            asks server 0 for changes; writes the fields of `FleetNews`
    attending       one per server; brings a lost one back. That of server 0 also gives a new coordination
                    service everything the chief knows (`_begin_meeting`), so it reads `_safe`, `_dealt`,
                    `_last_halt`, `_start` and the departures. Each of these is replaced as a whole.
    control port    `pause` and `resume`
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

from monolith import concurrency
from monolith.checkpoint import RestoreOptions, SavedPart
from monolith.data import WorkQueueSource
from monolith.data.source import Position
from monolith.errors import (
    AbsentWorkersError,
    ClusterError,
    ConfigError,
    DeadlineExceededError,
    ReplacedError,
    RetryableError,
    UnavailableError,
)
from monolith.runtime.cluster_config import ClusterConfig, TimeoutsConfig
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
from monolith.runtime.server_calls import POLL, TableWork, ask, on_each, tell
from monolith.runtime.server_choice import Spares
from monolith.runtime.standbys import ShardStandbys
from monolith.store import ParameterServerStore, ServerGroup, Store
from monolith.table import SlotThresholds, TableConfig
from monolith.train.hooks.barrier import HealthStatus, MachineHealth
from monolith.wire.messages import Nothing, write_message

_log = logging.getLogger(__name__)

A = TypeVar("A")
T = TypeVar("T")


NEWS_EVERY = timedelta(seconds=POLL)
"""How often a worker reports that it is alive. It learns news at once: its question waits at server 0."""


ASKS_IN_SILENCE = 3
"""How often a worker reports, at least, in the time after which a silent one is lost."""


FAREWELL = timedelta(minutes=2)
"""How long the chief waits for present workers to learn that the run is over."""


SAY_EVERY = 15.0
"""Seconds between two log lines about the workers that are waited for."""


JOIN_WITHIN = 5.0
"""Seconds that a run which is stopping waits for workers that have not joined it."""


STOP_WITHIN = 60.0
"""Seconds that a worker has to stop once it was told to."""


_SNAPSHOT, _BARRIER = "a snapshot is taken", "a barrier is in place"
"""Why the chief holds the other workers."""


OLD_NEWS = 60.0
"""Seconds after which the failure of an earlier chief does not stop a worker that joins: it may restart."""


class QuiescedFleet(NamedTuple):
    """All workers are quiesced, at the pause of this number."""

    number: int
    states: dict[int, WorkerState]
    """Worker -> its state, without the chief, in order."""
    here: tuple[int, ...] = ()
    """The workers among them that resume afterwards."""
    departing: Mapping[int, Departure] = {}
    """The workers among them that departed, with work that was not given back yet."""


class Fleet:
    """One worker's part in a fleet: the client of the coordination service on server 0.

    Used by the training thread, unless a method says otherwise. Closes the group in the end.

    Args:
        cluster: The index of this worker, and how many there are.
        timeouts: How long to wait for the start of the run, and for workers to finish.
        spares: Servers that the chief keeps in addition to those of the group; closed in the end.
        keep_going: How to replace lost servers; None ends the run if one is lost.
        news_every: How often this worker reports that it is alive.
        process: Names this process in all of its attempts, to notice when another one replaces it; None does
            not.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        group: ServerGroup,
        cluster: ClusterConfig,
        timeouts: TimeoutsConfig | None = None,
        *,
        spares: Spares | None = None,
        keep_going: KeepGoing | None = None,
        news_every: timedelta = NEWS_EVERY,
        process: str | None = None,
        clock: Callable[[], float] = concurrency.monotonic,
    ) -> None:
        timeouts = timeouts or TimeoutsConfig()
        self.index = cluster.index
        self.num_workers = cluster.num_workers
        self.max_workers = cluster.max_workers or cluster.num_workers
        self.group = group
        self.spares = spares
        self._member = concurrency.token_hex(8)
        self._process = process
        self._start_timeout = timeouts.start
        self._finish_timeout = timeouts.finish
        # A worker without news is silent between two questions, and must not count as lost for that.
        self._news_every = min(news_every, timeouts.silence / ASKS_IN_SILENCE).total_seconds()
        self._how = keep_going
        self._clock = clock
        self._stores = 0
        self._run = ""
        # Guards `_holds`. The training thread pauses the workers for a snapshot, and a control port for an
        # operator, each at any time: they stay paused until both have released them. Held during the call
        # that pauses or releases, or a release could overtake the next pause.
        self._holding = concurrency.Lock()
        self._holds: set[str] = set()
        self._pushes = PushCounts(group)
        # What a snapshot contains is known at its pause, and counts once it is on disk, steps later. Until
        # then the chief keeps it by the number of the pause; `note_saved` turns it into `_safe`.
        self._halts: dict[int, int] = {}
        """Step -> the pause at which its snapshot was taken, as the chief."""
        self._last_halt = 0
        self._stood: dict[int, dict[int, WorkerState]] = {}
        """Pause -> the states of the other workers then, as the chief, until that snapshot is on disk."""
        self._safe: dict[str, WorkerState] = {}
        """Worker -> its state in the last snapshot on disk, as the chief."""
        self._start = Start(step=0)
        self._departures = Departures()
        self._dealt: dict[int, DealtPosition] = {}
        """Worker -> the work last assigned to it: of all workers on the chief, of itself on another."""
        self._asked: set[int] = set()
        """Workers that were present when work was last assigned, as the chief."""
        self._replaced: dict[int, Served] = {}
        """Replaced servers that the workers do not know of yet, as a chief that rejoined."""
        self.fresh: tuple[int, ...] = tuple(range(len(group)))
        """Servers that hold nothing of the run yet, and are to be restored, as the chief."""
        self.last_checkpoint: Callable[[], LastCheckpoint | None] = lambda: None
        """Finds the checkpoint that a lost shard is restored from, as the chief. From any thread."""
        self._absent: list[int] = []
        """Workers that have not joined yet, as far as is known here."""
        self._listener: FleetNews | None = None
        self._recovery: ServerRecovery | None = None
        self._return: WorkerReturn | None = None
        self.finished = True
        """Once the run is over: whether it reached its end, and was not stopped before."""

    @property
    def is_chief(self) -> bool:
        return self.index == 0

    @property
    def keeps_going(self) -> bool:
        """Whether the run survives the loss of a process."""
        return self._how is not None

    @property
    def resumed(self) -> bool:
        """Whether this chief rejoined a run that some servers still hold."""
        return len(self.fresh) < len(self.group)

    @property
    def lost(self) -> Lost:
        """The losses so far, as the chief knows them."""
        return Lost() if self._recovery is None else self._recovery.lost

    @property
    def safe(self) -> list[WorkerState | None]:
        """The state of each worker in the last checkpoint, if known, as the chief."""
        return [self._safe.get(str(worker)) for worker in range(self.max_workers)]

    @property
    def start(self) -> Start:
        """The start of all workers."""
        return self._start

    @property
    def hands_out(self) -> bool:
        """Whether the data is a work queue, so that workers may join and leave."""
        return self._start.hands_out

    @property
    def losses(self) -> int:
        """How many servers were lost so far, as the chief."""
        return 0 if self._recovery is None else self._recovery.losses

    @property
    def tables(self) -> TableWork:
        """Snapshots and restores of the servers' tables, as the chief."""
        return TableWork(self.group, self._run)

    @property
    def servers(self) -> tuple[str, ...]:
        """The names of the server processes: one that restarted has another name."""
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
        """Start a run as its chief: the servers drop an earlier one.

        If the fleet keeps going and some servers still hold a run, rejoin that one instead: `fresh` are the
        servers that do not hold it.

        Args:
            hands_out: Whether the data is a work queue. Then a run whose server 0 was lost together with its
                chief is not rejoined: the start of its workers is not known any more.
        """
        if self.spares is not None:
            self.spares.keep()
        if self._how is None or not self._resume(hands_out=hands_out):
            self._run = concurrency.token_hex(8)
            # All servers drop the previous run before the service of the new one starts: a worker that joins
            # it must not find rows of the previous one, and pushes of that one are refused from here on.
            self._tell_servers("server.begin", BeginServer(self._run))
            self.group.expect(self._run)
            self._begin_meeting(self.group, {})
        self._listen()

    def _resume(self, *, hands_out: bool) -> bool:
        """Rejoin the run that servers still hold; return False if there is none that continues."""
        found = on_each(
            range(len(self.group)), lambda one: self._ask("server.standing", Nothing(), ServerStatus, one)
        )
        runs = {one.run for one in found if one.run is not None}
        if len(runs) != 1:
            return False  # none, or servers of two runs: neither can be continued as a whole
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
        # A server that was replaced before has the incarnation that its replacement was given; every other
        # one is named after the run. One that restarted since has neither.
        meant = {
            place: served[str(place)].incarnation if str(place) in served else run for place in self._places
        }
        self.fresh = tuple(place for place in self._places if found[place].incarnation != meant[place])
        if not self.resumed:
            return False
        self._run = run
        _log.warning(
            "rejoining a run that continued; servers %s lost their shards", list(self.fresh) or "none"
        )
        self.group.expect(run)
        # A lost shard gets a new incarnation at once, though `restore` fills it only later: workers that
        # still push to the old one are refused, and wait until `open` publishes the new one.
        for place in self.fresh:
            incarnation = concurrency.token_hex(8)
            self._tell("server.begin", BeginServer(run, incarnation), place)
            served[str(place)] = Served(self.group.addresses[place], incarnation, saved)
        servers = {int(place): one for place, one in served.items()}
        for place, one in servers.items():
            self.group.replace(place, self.group.addresses[place], one.incarnation)
        if 0 in self.fresh:
            # The service was lost with server 0, which knew the workers, and this chief has just started: any
            # worker may have pushed to a server that was lost, and is asked for what it lost.
            self._begin_meeting(self.group, servers, joined=tuple(range(1, self.num_workers)))
        self.tables.close_cut(None, saved=False)  # the snapshot that the previous chief was about to save
        self._replaced = {place: served[str(place)] for place in self.fresh}
        return True

    @property
    def _places(self) -> range:
        return range(len(self.group))

    def _begin_meeting(
        self, server: ServerGroup, servers: Mapping[int, Served], joined: tuple[int, ...] = ()
    ) -> None:
        """Have server 0 start the coordination service: of a new run, or of one that continues.

        In the second case the service before it is lost with its server. What it knew is put together from
        what the chief knows, and workers report the rest when they rejoin (`ComeBack`). Called by the
        training thread at the start, and by the thread that attends to server 0 later.

        Args:
            joined: Workers that may be part of it, if no news of the run has said which are.
        """
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
            # The last news may be older than a worker: one that joined and left since would not be missed.
            joined=joined if listener is None else tuple({*listener.joined, *range(1, self.num_workers)}),
            pushes={} if listener is None else dict(listener.pushes),
            # One that left and was lost since cannot say so itself, and would train all of its data again.
            left={} if listener is None else dict(listener.left),
            # By these a process that joins in place of a lost one is told from one that is the first.
            trained={} if listener is None else dict(listener.trained),
        )
        tell(server, 0, "meeting.begin", body)

    def _listen(self) -> None:
        """Start to ask for news of the run, on a thread of its own."""
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
        """Have a new server 0 count from the highest step so far, and serve the coordination of this run."""
        # In this order: workers rejoin once the run is open, and one that knows of a later step raises it.
        server.call(0, "set_step", step=self.group.step)
        self._begin_meeting(server, servers)
        tell(server, 0, "meeting.open", OpenRun(self._run, self._start))

    def open(self, start: Start) -> None:
        """Let the other workers start, as the chief, from `start`."""
        self.check()
        self._start = start
        self._tell("meeting.open", OpenRun(self._run, start))
        # Only now, as all of them are restored: workers push to the new servers as soon as they know them.
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
        """How many standbys each shard has, as the chief knows; empty on other workers. From any thread."""
        standbys = None if self._how is None else self._how.standbys
        return () if standbys is None else standbys.standing()

    @property
    def run(self) -> str:
        """The name of the run on the servers; "" before this worker joins one."""
        return self._run

    @property
    def joined(self) -> bool:
        """Whether this worker has joined a run."""
        return bool(self._run)

    def join(self, stopped: Callable[[], bool] = lambda: False) -> Start | None:
        """Wait until the chief has restored everything; return where this worker starts.

        A run that failed long before this worker joined is waited out: its chief may be started again.

        Args:
            stopped: Whether this worker was asked to stop; checked every second.

        Returns:
            None if the run is over, and with it this worker's part; or it was stopped.

        Raises:
            DeadlineExceededError: The chief did not restore in time.
            ReplacedError: Another process has joined as this worker since this one did first.
            ClusterError: The chief failed, and will not restart by itself.
        """
        limit, said = self._clock() + self._start_timeout.total_seconds(), self._clock()
        known, first = "", True
        while not stopped():
            asked = Join(self.index, self._member, known, 1.0, self._process)
            answer = self._ask("meeting.join", asked, Joined)
            if answer.replaced:
                raise ReplacedError(
                    f"cannot rejoin as worker {self.index}: another process has joined as this worker since. "
                    "This process was replaced, and ends. If both were meant to run, give each a number of "
                    "its own (cluster.index)."
                )
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
                # A failure that this worker was there for, or that is fresh, is news of its own chief. An old
                # one at its first question is of a chief that may be starting again right now.
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
        """Why all workers are to finish; None if they are not."""
        return None if self._listener is None else self._listener.stop_reason

    def check(self) -> None:
        """Raise the error that ended the run for this worker, if there is one."""
        if self._listener is not None:
            self._listener.check()

    @property
    def is_halted(self) -> bool:
        """Whether the chief has paused all workers."""
        return self._listener is not None and self._listener.halt is not None

    def wait_at_halt(self, state: WorkerState) -> int:
        """Report this worker's state, with all its updates done, and wait until the chief resumes all.

        Returns:
            The number of the pause; 0 if it was over before.
        """
        listener = self._listener
        assert listener is not None
        halt = listener.halt
        if halt is None:
            return 0
        # Before `arrive`: the chief may have the servers take their snapshots as soon as all have arrived,
        # and every push acknowledged by now is in them.
        self._pushes.mark(halt)
        self._surely("meeting.arrive", Arrive(self._run, self.index, halt, state, self._member))
        listener.wait_for_release(halt)
        return halt

    def note_trained(self, examples: int) -> None:
        """Report how many examples this worker has trained on since the run started."""
        if self._listener is not None:
            self._listener.examples = examples

    @contextlib.contextmanager
    def halted(self, stopped: Callable[[], bool] = lambda: False) -> Iterator[QuiescedFleet]:
        """Have all other workers quiesced, as the chief, and yield their states.

        Args:
            stopped: Whether the run was asked to stop: a worker that has not joined yet never will.
        """
        # A snapshot needs all servers. Waiting for a lost one before the pause lets the workers train on.
        if self._recovery is not None:
            self._recovery.wait_until_whole(self._start_timeout.total_seconds())
        number = self._hold(_SNAPSHOT)
        try:
            gathered = self._gather(number, stopped)
            states = self._by_worker(gathered)
            self._stood[number] = states
            self._departures.note_cut(number, gathered.departing.values())
            departing = {int(worker): one for worker, one in gathered.departing.items()}
            yield QuiescedFleet(number, states, gathered.here, departing)
        finally:
            self._release(_SNAPSHOT)

    def note_cut(self, step: int) -> None:
        """Note, as the chief, that the snapshot of the pause in force is taken: its own updates are done."""
        self._halts[step] = self._last_halt
        self._pushes.mark(self._last_halt)

    def pause(self) -> int:
        """Pause the other workers, as the chief, until `resume`; return its number. From any thread."""
        return self._hold(_BARRIER)

    def resume(self) -> None:
        """End a `pause`; workers stay quiesced while a snapshot is taken. From any thread."""
        self._release(_BARRIER)

    def quiesced_workers(self) -> list[int]:
        """Return the other workers that are quiesced at the pause in force, or have left, as the chief."""
        answer = self._ask("meeting.gathered", AskGathered(self._run), GatheredStates)
        return sorted(int(worker) for worker in answer.states)

    def note_saved(self, halt: int, state: WorkerState | None = None) -> None:
        """Tell the other workers, as the chief, that the snapshot of a pause is on disk.

        Args:
            state: The state of the chief then.
        """
        # First what this process knows, then the service: if server 0 is lost in between, the service that
        # replaces it gets the new states from here, and `_surely` tells it the number of the pause.
        if (stood := self._stood.get(halt)) is not None:
            known = {str(worker): one for worker, one in stood.items()}
            self._safe = self._safe | self._departures.still_said(known, halt)
        self._departures.note_saved(halt)
        if state is not None:
            self._safe = self._safe | self._departures.still_said({"0": state}, halt)
        self._stood = {number: states for number, states in self._stood.items() if number > halt}
        self._halts = {step: number for step, number in self._halts.items() if number >= halt}
        self._pushes.forget_before(halt)
        self._surely("meeting.saved", PauseSaved(self._run, halt, state))

    @property
    def saved_halt(self) -> int:
        """The last pause whose snapshot is on disk, as far as is known here; 0 for none."""
        return 0 if self._listener is None else self._listener.saved

    def restore_dense(self, saved: SavedPart, options: RestoreOptions) -> None:
        """Have the servers that lost their shards restore their dense weights, as a chief that rejoined."""
        restore_dense(self.group, self.fresh, self._run, saved, options)

    def begin_commit(self, losses: int) -> None:
        """Note, as the chief, that all servers have written a checkpoint; see `ServerRecovery`."""
        if self._recovery is not None:
            self._recovery.begin_commit(losses)

    def end_commit(self) -> None:
        """Note, as the chief, that the checkpoint is committed, or never will be."""
        if self._recovery is not None:
            self._recovery.end_commit()

    def stop(self, reason: str, *, unfinished: bool = False) -> None:
        """Tell all workers to finish.

        Args:
            unfinished: Whether there is more to do: the run is then not finished, however cleanly it ends.
        """
        self._surely("meeting.stop", StopRun(self._run, reason, unfinished))

    # Ending

    def leave(self, state: WorkerState, *, gives_back: bool = False) -> None:
        """Report that this worker is done, all its updates included.

        Args:
            gives_back: Whether it leaves its unfinished work to the other workers, which continue.
        """
        # Before the call: if server 0 is lost before it answers, this worker tells its state to the next one.
        if self._return is not None:
            self._return.left = state
        pushes = self._pushes.told() if self.keeps_going else None
        gone = Leave(self._run, self.index, state, gives_back=gives_back, member=self._member, pushes=pushes)
        self._surely("meeting.leave", gone)

    # Workers that join and leave

    @property
    def save_wanted(self) -> bool:
        """Whether a worker has left and its last steps are in no checkpoint yet, as the chief."""
        return any(
            one.state is not None and self._ready(worker, one) is None for worker, one in self._departing()
        )

    def give_back(self, give_back: Callable[[Position], Position]) -> bool:
        """Return the work of departed workers to the queue, as far as their steps are saved, as the chief.

        Args:
            give_back: Returns the work after a position to the queue; see `WorkQueueSource`.

        Returns:
            Whether any work was returned.
        """
        found = [(worker, one, self._ready(worker, one)) for worker, one in self._departing()]
        for worker, departure, state in found:
            if state is None:
                continue
            _log.info("worker %d has left; its unfinished work goes to the other workers", worker)
            # Returned to the queue once: `note_given` makes the departure past, so a repeated report of it by
            # the service is ignored.
            left = replace(state, position=give_back(state.position), event_time=None)
            self._safe = {**self._safe, str(worker): left}
            self._departures.note_given(worker, left, self._last_halt)
            self._surely("meeting.given_back", GivenBack(self._run, worker, departure.number, left))
        return any(state is not None for _, _, state in found)

    def _departing(self) -> list[tuple[int, Departure]]:
        """Return the workers that departed, with work that was not given back yet."""
        if self._listener is not None:
            self._departures.note_heard(self._listener.departing)
        return self._departures.due

    def _ready(self, worker: int, departure: Departure) -> WorkerState | None:
        """Return the saved state of a departed worker; None if its last steps are not saved yet."""
        safe = self._safe.get(str(worker))
        if safe is None and worker < len(self._start.positions):
            position = self._start.positions[worker]
            safe = WorkerState(position=position, examples=0, skipped=0, event_time=None)
        # A worker that was lost trained past its saved state, and how far is not known: its work is taken up
        # again from there. One that left says how far it came; that counts once a checkpoint has it.
        if departure.state is None or (safe is not None and departure.state.examples == safe.examples):
            return safe
        return departure.state if self._departures.is_saved(departure.number) else None

    @property
    def deals_out(self) -> bool:
        """Whether the chief assigns the work of all workers when one joins or leaves."""
        return self._start.deals_out

    @property
    def deal_wanted(self) -> bool:
        """Whether a worker has joined that has no work, or left with some, as the chief."""
        # With a barrier in place no work is moved: the deal waits until it is removed.
        if _BARRIER in self._holds or self.stop_reason is not None or self._listener is None:
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
        # All or nothing: either the service takes the whole deal, or every worker keeps what it had. A server
        # 0 that was lost may have taken it, but no worker learns of that any more.
        if not self._insist(lambda: self._ask("meeting.deal", said, DealTaken)).taken:
            self._asked = set()
            return None
        _log.info("the work was assigned anew, to workers %s", ", ".join(map(str, states)))
        self._dealt = {worker: DealtPosition(halt.number, state.position) for worker, state in states.items()}
        self._safe = self._safe | {str(worker): state for worker, state in states.items()}
        self._departures.note_heard(halt.departing)
        self._departures.note_dealt(states, halt.number)
        for worker, left in gone.items():
            self._safe = {**self._safe, str(worker): left}
            self._departures.note_given(worker, left, halt.number)
        return states[0].position

    def take_dealt(self) -> Position | None:
        """Return the position newly assigned to this worker, which is not the chief; each one once."""
        dealt = None if self._listener is None else self._listener.dealt
        if dealt is None or dealt == self._dealt.get(self.index):
            return None
        self._dealt[self.index] = dealt
        return dealt.position

    @property
    def has_departing(self) -> bool:
        """Whether work of departed workers is still to be given back, as the chief."""
        return bool(self._departing())

    def fail(self, why: str, *, final: bool, lost: bool = False) -> None:
        """Report that this worker failed, which ends the run; if server 0 can be reached.

        Args:
            final: Whether this process will not rejoin or restart by itself, so that none should wait.
            lost: Whether it failed because another process was lost.
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
        missing = self._unless_lost(lambda: self._missing(wait=1.0))
        if missing is None:
            return list(self._listener.present if self.hands_out and self._listener else self._all_others)
        return missing

    def positions_of_others(self) -> list[Position] | None:
        """Return the last positions of all other workers that ever joined, as the chief; None: ask again."""
        states = self._unless_lost(self._states)
        return None if states is None else [state.position for state in states.values()]

    def _unless_lost(self, ask: Callable[[], T]) -> T | None:
        """Return what the coordination service says; None if it was lost with server 0, to ask again."""
        try:
            return ask()
        except RetryableError:
            if self._how is None:
                raise
            self.check()
            self._how.sleep(LOOK_EVERY)
            return None

    @property
    def _all_others(self) -> range:
        return range(1, self.num_workers)

    def wait_for_end(self) -> None:
        """Wait, having left, until the chief has saved and ended the run.

        Raises:
            RetryableError: The chief was lost: the last steps of this worker may not be saved.
        """
        assert self._listener is not None
        self.finished = self._listener.wait_for_end(self._finish_timeout.total_seconds())

    def end(self) -> None:
        """Tell all processes, as the chief, that the run is over and saved; lost ones are skipped."""
        if self._recovery is not None:
            self._recovery.wait_until_counted()  # while the other workers are there to report it
        self._close_listener()  # or a server that ends would be missed, and replaced
        limit = self._clock() + FAREWELL.total_seconds()
        # Workers before servers: they wait at server 0 for the word that their last steps are saved, and that
        # server is gone after `server.end`.
        with _ignore_lost("server 0"):
            while True:
                answer = self._ask("meeting.over", SayOver(self._run, 1.0), Farewell)
                self.finished = not answer.unfinished
                if not answer.untold:
                    break
                if self._clock() >= limit:
                    _log.warning("workers %s were not told that the run is over", list(answer.untold))
                    break

        def say(server: int) -> None:
            with _ignore_lost(f"server {server}"):
                self._tell("server.end", EndRun(self._run, self.finished), server)

        on_each(self._places, say)
        if self.spares is not None:
            self.spares.end(self._run, finished=self.finished)

    def close(self) -> None:
        """Close the connections to the servers. Closing again does nothing."""
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
        """Tell the service something that may be told twice."""
        self._insist(lambda: self._tell(name, request))

    def _insist(self, call: Callable[[], A]) -> A:
        """Call the service until it answers; if it was lost with server 0, until that is replaced.

        The call may reach the service more than once, and must be one that changes nothing the second time.
        A run that does not keep going has no replacement to wait for.
        """
        limit = self._clock() + self._start_timeout.total_seconds()
        while True:
            try:
                return call()
            except RetryableError:
                if self._how is None or self._clock() >= limit:
                    raise
                self.check()
                self._how.sleep(LOOK_EVERY)

    def _hold(self, why: str) -> int:
        """Pause the other workers, or keep them paused, for a reason; return the number of the pause."""
        with self._holding:
            # Asked again if the answer is lost: workers may be paused by then, and only the chief that knows
            # of a pause releases it. Noted only after the call: a pause that the service never received is
            # not to be released.
            paused = self._insist(lambda: self._ask("meeting.halt", OfRun(self._run), PauseNumber))
            self._last_halt = paused.halt
            self._holds.add(why)
            return self._last_halt

    def _release(self, why: str) -> None:
        """Resume the other workers, unless they are held for another reason."""
        with self._holding:
            self._holds.discard(why)
            if not self._holds:
                self._surely("meeting.release", OfRun(self._run))

    def _gather(self, halt: int, stopped: Callable[[], bool]) -> GatheredStates:
        """Wait until all other workers are quiesced; one that has not joined yet is waited for, too."""
        began = said = self._clock()
        while missing := self._missing(halt=halt, wait=1.0):
            if stopped():
                self._check_joined(began)
            now = self._clock()
            if now - began > self._start_timeout.total_seconds():
                self.check_absent(now - began)
                raise DeadlineExceededError(
                    f"cannot save: waited {self._start_timeout} for workers "
                    f"{', '.join(map(str, missing))} to pause; see their logs"
                )
            if now - said >= SAY_EVERY:
                said = now
                who = ", ".join(map(str, missing))
                _log.warning("waiting for workers %s to pause before saving; see their logs", who)
        # The states, which `_missing` does not return. No worker leaves the pause before its release.
        return self._gathered(AskGathered(self._run, halt=halt))

    def check_absent(self, waited: float) -> None:
        """Raise an error if some workers have not joined, having waited for so many seconds, as the chief.

        Raises:
            AbsentWorkersError: Names them.
        """
        if self._absent:
            raise AbsentWorkersError(
                f"waited {waited:.0f} s for workers {', '.join(map(str, self._absent))}, which have not "
                "joined the run; see their logs. If an earlier chief told them that the run is over, they "
                "have ended: start them again, together with the chief."
            )

    def _check_joined(self, since: float) -> None:
        """Wait no longer for workers that never joined, if the run is to stop."""
        if self._absent and self._clock() - since > JOIN_WITHIN:
            raise UnavailableError(
                f"workers {', '.join(map(str, self._absent))} never joined, so the steps since the last "
                "checkpoint cannot be saved; the next start resumes from it"
            )

    def _states(self) -> dict[int, WorkerState]:
        return self._by_worker(self._gathered(AskGathered(self._run)))

    def _by_worker(self, gathered: GatheredStates) -> dict[int, WorkerState]:
        """Return the states of all other workers; of an elastic run, of all that ever joined."""
        found = {int(worker): state for worker, state in gathered.states.items()}
        return {worker: found[worker] for worker in (sorted(found) if self.hands_out else self._all_others)}

    def _missing(self, *, halt: int | None = None, wait: float) -> list[int]:
        """Return the workers that are not quiesced yet at a pause; without one, those that have not left."""
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
            raise UnavailableError("server 0 was lost, and with it the states of the paused workers")
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
            AbsentWorkersError: Some of them never joined.
            DeadlineExceededError: They were asked to stop, and did not in time.
        """
        now, workers = self._clock(), ", ".join(map(str, training))
        if self._asked_at is None and now >= self._limit:
            _log.warning("workers %s are still training; asking them to stop", workers)
            self._fleet.stop(f"the chief has waited {self._timeout} for this worker", unfinished=True)
            self._asked_at = now
        elif self._asked_at is not None and now - self._asked_at > STOP_WITHIN:
            self._fleet.check_absent(self._timeout.total_seconds() + STOP_WITHIN)
            raise DeadlineExceededError(
                f"workers {workers} were asked to stop and did not within {STOP_WITHIN:g} s; "
                "all steps since the last checkpoint are lost"
            )


@contextlib.contextmanager
def _ignore_lost(process: str) -> Iterator[None]:
    try:
        yield
    except ClusterError as error:
        _log.warning("could not tell %s that the run is over: %s", process, error)
