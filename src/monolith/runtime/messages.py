"""The messages between the processes of a run.

Each is a frozen dataclass that `monolith.wire.messages` reads and checks. A call named "meeting.x" is
answered by the coordination service on server 0, "server.x" by every parameter server, and `Word` is what
ranks say between two steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from monolith.checkpoint.part import RestoreReport
from monolith.data.source import Position
from monolith.runtime.coordinator import Start, WorkerState
from monolith.sync.publish_messages import PublishOrder, PublishProgress
from monolith.wire.messages import (
    Bounds,
    Count,
    Json,
    Name,
    Nothing,
    Seconds,
    Text,
)


@dataclass(frozen=True, slots=True)
class CopiedPushes:
    """The pushes of one sender that the copy of a shard includes."""

    highest: Count
    """The highest number that arrived."""
    missing: tuple[Count, ...] = ()
    """Numbers shortly below it that are not in it."""


@dataclass(frozen=True, slots=True)
class PlacePushes:
    """The pushes of a worker that left to one shard, all of them acknowledged."""

    incarnation: Name | None
    """The incarnation of the shard's server, as the worker knew it."""
    last: Count = 0
    """The number of its last push."""
    since: Count = 0
    """The number of its last push when the server was last replaced."""
    carried: tuple[Count, ...] = ()
    """Numbers up to that which only the new server acknowledged."""
    marks: dict[str, Count] = field(default_factory=dict)
    """Pause -> the pushes acknowledged by then and lost since."""


@dataclass(frozen=True, slots=True)
class PushesTold:
    """The pushes of a worker that left, by shard."""

    sender: Name
    places: tuple[PlacePushes, ...]


WorkName = Literal["tables.write", "tables.restore", "dense.restore"]
"""Work that takes a server longer than a call may take."""

# The coordination service


@dataclass(frozen=True, slots=True)
class OfRun:
    run: Name


@dataclass(frozen=True, slots=True)
class Served:
    """The server of a shard, since the process that served it at first was lost."""

    address: Name
    incarnation: Name
    halt: Count = 0
    """The pause whose snapshot it was restored from; 0 for the start of the run."""
    copied: dict[Name, CopiedPushes] | None = None
    """If a standby took over: sender -> its pushes that the copy includes."""


@dataclass(frozen=True, slots=True)
class Departure:
    """A worker of an elastic run has left or was lost; the chief is to give its work back."""

    number: Count
    """Unique within a run."""
    state: WorkerState | None = None
    """Its state when it left, all its updates done; None if it was lost, with its unsaved steps."""


@dataclass(frozen=True, slots=True)
class DealtPosition:
    """The position from which a worker reads, since work was assigned anew."""

    halt: Count
    """The pause at which it was assigned."""
    position: Position


@dataclass(frozen=True, slots=True)
class Trained:
    """How much a process of a worker has trained, as it last said."""

    member: Name | None
    """Names the process; None if it is not part of the run any more."""
    examples: Count
    processes: tuple[Name, ...] = ()
    """The last processes that joined as this worker, in all of their attempts; the newest is the last one."""


@dataclass(frozen=True, slots=True)
class BeginService:
    """A run starts; or the service takes over one that continues, whose server 0 was lost."""

    run: Name
    num_workers: Count
    max_workers: Count = 0
    """The most workers there may be; 0 for `num_workers`."""
    keep_going: bool = False
    """Whether the run survives the loss of a worker."""
    halts: Count = 0
    """The number of the last pause."""
    saved: Count = 0
    stop: Text | None = None
    unfinished: bool = False
    safe: dict[str, WorkerState] = field(default_factory=dict)
    servers: dict[str, Served] = field(default_factory=dict)
    present: tuple[Count, ...] = ()
    """Workers that were present, in an elastic run."""
    departing: dict[str, Departure] = field(default_factory=dict)
    departures: Count = 0
    """The number of the last departure."""
    gone: dict[str, WorkerState] = field(default_factory=dict)
    dealt: dict[str, DealtPosition] = field(default_factory=dict)
    """Worker -> the work last assigned to it."""
    joined: tuple[Count, ...] = ()
    """Workers that are part of the run, and are expected to rejoin."""
    pushes: dict[str, PushesTold] = field(default_factory=dict)
    """Worker that left -> its pushes."""
    left: dict[str, WorkerState] = field(default_factory=dict)
    """Worker that left -> its last state."""
    trained: dict[str, Trained] = field(default_factory=dict)
    """Worker -> its process, and how much that has trained, as far as the chief knows."""


@dataclass(frozen=True, slots=True)
class ResumeRun:
    """A chief that restarted rejoins a run that continued."""

    run: Name
    member: Name


@dataclass(frozen=True, slots=True)
class RunResumed:
    """Answers `ResumeRun`."""

    goes_on: bool
    """Whether the run is known here, has not failed and is not over."""
    opened: bool = False
    saved: Count = 0
    stop: Text | None = None
    safe: dict[str, WorkerState] = field(default_factory=dict)
    """Worker -> its state in the last checkpoint."""
    servers: dict[str, Served] = field(default_factory=dict)
    start: Start | None = None
    """The start of workers that join."""
    gone: dict[str, WorkerState] = field(default_factory=dict)
    """Worker whose work was given back -> its last state."""


@dataclass(frozen=True, slots=True)
class ComeBack:
    """A worker rejoins its run at the server that replaced server 0."""

    run: Name
    worker: Count
    member: Name
    step: Count
    """The highest step that it knows of."""
    left: WorkerState | None = None
    """Its last state, if it has left."""
    lost: dict[Name, Count] = field(default_factory=dict)
    """Updates lost with each replaced server, keyed by its successor's incarnation: `LostUpdates` again,
    which the previous service may not have counted."""


@dataclass(frozen=True, slots=True)
class PublishServer:
    run: Name
    server: Count
    served: Served


@dataclass(frozen=True, slots=True)
class LostUpdates:
    """The updates of a worker that were lost with a server: they are in no checkpoint."""

    run: Name
    worker: Count
    incarnation: Name
    """The incarnation of its successor."""
    updates: Count


@dataclass(frozen=True, slots=True)
class AskLostUpdates:
    run: Name
    incarnation: Name
    wait: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class AllLostUpdates:
    """Answers `AskLostUpdates`."""

    updates: Count
    """Of the workers that have said."""
    missing: tuple[Count, ...]
    """Workers that have not said yet."""
    lost: tuple[Count, ...] = ()
    """Workers that were lost as well: their lost updates are not known."""


@dataclass(frozen=True, slots=True)
class Returned:
    """A worker was lost and came back, or its work was given back."""

    worker: Count
    records: Count | None
    """Those it had trained since its last saved position, as far as it had said: they are trained again. None
    if it is not known whether it had trained any, because server 0 was lost as well."""
    seconds: Seconds
    """From when it was missed to when it joined again, or others could have its work."""
    by_others: bool = False
    """Whether others train them."""


@dataclass(frozen=True, slots=True)
class GivenBack:
    """The work of a departed worker was given back."""

    run: Name
    worker: Count
    number: Count
    """Of its departure."""
    state: WorkerState
    """What is left of it: what it has trained, and where another in its place begins."""


@dataclass(frozen=True, slots=True)
class DealOut:
    """All work is assigned anew, while all workers are quiesced."""

    run: Name
    halt: Count
    """Which must still be in force."""
    states: dict[str, WorkerState]
    """Worker -> its state with the position assigned to it, for all that continue."""
    given: tuple[GivenBack, ...] = ()
    """Departed workers, whose work the remaining ones have now."""


@dataclass(frozen=True, slots=True)
class DealTaken:
    """Answers `DealOut`."""

    taken: bool
    """Whether the assignment counts; if the pause is not in force any more, no worker learns of it."""


@dataclass(frozen=True, slots=True)
class OpenRun:
    run: Name
    start: Start


@dataclass(frozen=True, slots=True)
class Join:
    worker: Count
    member: Name
    """Names the process."""
    known: Text = ""
    """A run of which it knows that it has failed."""
    wait: Seconds = 0.0
    process: Name | None = None
    """Names the process in all of its attempts: `member` is of one attempt."""


@dataclass(frozen=True, slots=True)
class FailedRun:
    run: Name
    why: Text
    final: bool
    """Whether the chief will not restart by itself."""
    ago: float
    """Seconds."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Answers `Join`: a run to take part in, or one that is over or has failed, or nothing yet."""

    run: Name | None = None
    start: Start | None = None
    over: bool = False
    unfinished: bool = False
    failed: FailedRun | None = None
    state: WorkerState | None = None
    """The state of this worker in the last checkpoint, if it rejoins a run that continued."""
    servers: dict[str, Served] = field(default_factory=dict)
    """By place: those that were replaced since the run began."""
    replaced: bool = False
    """Whether another process has joined as this worker since this one did first."""


@dataclass(frozen=True, slots=True)
class AskNews:
    run: Name
    worker: Count
    seen: int
    """The version that the worker knows."""
    wait: Seconds = 0.0
    member: Name | None = None
    """Names the process; one that was replaced is refused."""
    examples: Count = 0
    """Examples it has trained on since the run started."""


@dataclass(frozen=True, slots=True)
class News:
    """Answers `AskNews`: all that a worker needs to know while it trains."""

    version: Count
    """Counts the changes so far."""
    halt: Count | None
    stop: Text | None
    unfinished: bool
    failure: Text | None
    saved: Count
    over: bool
    servers: dict[str, Served] = field(default_factory=dict)
    """By place: those that were replaced since the run began."""
    returned: tuple[Returned, ...] = ()
    present: tuple[Count, ...] = ()
    """Workers that are there, where they may come and go."""
    departing: dict[str, Departure] = field(default_factory=dict)
    """By worker: those whose work the chief is to give back."""
    dealt: DealtPosition | None = None
    """What the worker who asks was dealt last."""
    joined: tuple[Count, ...] = ()
    """Workers other than the chief that are part of the run or have left it; for the chief."""
    pushes: dict[str, PushesTold] = field(default_factory=dict)
    """By worker: what those had pushed who left; for the chief."""
    left: dict[str, WorkerState] = field(default_factory=dict)
    """By worker that left: its last state; for the chief."""
    trained: dict[str, Trained] = field(default_factory=dict)
    """By worker: its process, and how much that has trained; for the chief."""


@dataclass(frozen=True, slots=True)
class PauseNumber:
    """Answers a halt."""

    halt: Count


@dataclass(frozen=True, slots=True)
class Arrive:
    run: Name
    worker: Count
    halt: Count
    state: WorkerState
    member: Name | None = None


@dataclass(frozen=True, slots=True)
class AskGathered:
    run: Name
    wait: Seconds = 0.0
    left: bool = False
    """Whether only those count who have left."""
    halt: Count | None = None
    """The halt that is meant; None takes the one in force."""


@dataclass(frozen=True, slots=True)
class GatheredStates:
    """Answers `AskGathered`."""

    missing: tuple[Count, ...]
    absent: tuple[Count, ...]
    """Those of the missing who never joined."""
    states: dict[str, WorkerState]
    """Worker -> its state: if quiesced or left, the reported one; if lost, the last saved one."""
    failure: Text | None
    in_force: bool = True
    """Whether the halt that was meant is the one in force."""
    departing: dict[str, Departure] = field(default_factory=dict)
    """By worker: those among them that are to be given back."""
    here: tuple[Count, ...] = ()
    """The workers among them that continue afterwards."""


@dataclass(frozen=True, slots=True)
class PauseSaved:
    run: Name
    halt: Count
    state: WorkerState | None = None
    """Of the chief, at that halt."""


@dataclass(frozen=True, slots=True)
class SayOver:
    run: Name
    wait: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class Farewell:
    """Answers `SayOver`."""

    untold: tuple[Count, ...]
    """Present workers that do not know it yet."""
    unfinished: bool


@dataclass(frozen=True, slots=True)
class Leave:
    run: Name
    worker: Count
    state: WorkerState | None = None
    """None for one that failed."""
    failure: Text | None = None
    final: bool = False
    lost: bool = False
    """Whether the failure was not its own: it lost others, and will join again."""
    gives_back: bool = False
    """Whether it leaves its work to the other workers, which continue."""
    member: Name | None = None
    pushes: PushesTold | None = None
    """What it had pushed to each server: it may be gone when one of them is lost."""


@dataclass(frozen=True, slots=True)
class StopRun:
    run: Name
    reason: Text
    unfinished: bool = False


# What the chief asks of each server


@dataclass(frozen=True, slots=True)
class AssignShard:
    """Gives a server that is not in a run the share `index` of `num_ps`."""

    index: Count
    num_ps: Annotated[int, Bounds(1, 1 << 20)]


@dataclass(frozen=True, slots=True)
class BeginServer:
    run: Name
    incarnation: Name | None = None
    """Names what the server holds from now on; None takes the run's name."""


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """Answers `server.standing`: what a server holds, and of which run."""

    process: Name
    run: Name | None
    incarnation: Name


@dataclass(frozen=True, slots=True)
class Attend:
    run: Name
    wait: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class Attended:
    """Answers `Attend`."""

    rows: Count
    """In all tables of the server, now."""


@dataclass(frozen=True, slots=True)
class EndRun:
    run: Name
    finished: bool


@dataclass(frozen=True, slots=True)
class OfSnapshot:
    run: Name
    cut: Name


@dataclass(frozen=True, slots=True)
class CloseSnapshot:
    run: Name
    cut: Name | None
    """None for all there are: those of a chief that is gone."""
    saved: bool


@dataclass(frozen=True, slots=True)
class StartJob:
    work: WorkName
    body: dict[str, Json]
    """What the work takes; it looks at it itself."""
    job: Name | None = None


@dataclass(frozen=True, slots=True)
class JobStarted:
    """Answers `StartJob`."""

    job: Name


@dataclass(frozen=True, slots=True)
class WaitForJob:
    job: Name
    wait: Seconds


@dataclass(frozen=True, slots=True)
class JobResult:
    """Answers `WaitForJob`."""

    done: bool
    answer: dict[str, Json] = field(default_factory=dict)
    """Of the work, when it is done."""


@dataclass(frozen=True, slots=True)
class WriteTables:
    run: Name
    cut: Name
    prefix: Name
    full: bool


@dataclass(frozen=True, slots=True)
class ServerHealth:
    """Answers `server.health`: a `HealthStatus`, and why."""

    status: Count
    message: Text


@dataclass(frozen=True, slots=True)
class TablesWritten:
    """Answers `WriteTables`."""

    entry: dict[str, Json]
    """What the manifest says of them."""


@dataclass(frozen=True, slots=True)
class RestoreTables:
    run: Name
    chain: tuple[tuple[Name, dict[str, Json]], ...]
    """Of each checkpoint: its prefix, and what its manifest says of the tables."""
    optimizer_state: Literal["keep", "reset", "auto"]
    strict: bool
    changes: Json = None
    """How the model differs from that of the checkpoint, where it may."""


@dataclass(frozen=True, slots=True)
class RestoreDense:
    """Has a server restore its share of the weights and of what their optimizer keeps."""

    run: Name
    prefix: Name
    entry: dict[str, Json]
    """What the manifest says of the weights."""
    optimizer_state: Literal["keep", "reset", "auto"]
    strict: bool
    alias_map: dict[str, str] | None = None
    auto_alias: bool = True
    changes: Json = None


@dataclass(frozen=True, slots=True)
class DenseRestored:
    """Answers `RestoreDense`."""

    weights: Count
    """Of this server."""


@dataclass(frozen=True, slots=True)
class TablesRestored:
    """Answers `RestoreTables`: a `RestoreReport`, as JSON has it, and the rows that are there now."""

    loaded: dict[str, str]
    reset: dict[str, str]
    renamed: dict[str, str]
    skipped: dict[str, str]
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    rows: dict[str, Count]
    partly: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, report: RestoreReport, rows: Mapping[str, int]) -> TablesRestored:
        return cls(
            loaded=dict(report.loaded),
            reset=dict(report.reset),
            renamed=dict(report.renamed),
            skipped=dict(report.skipped),
            missing=report.missing,
            unused=report.unused,
            rows=dict(rows),
            partly=dict(report.partly),
            sizes=dict(report.sizes),
        )

    def report(self) -> RestoreReport:
        """Return the report of this shard, without row counts: other shards have rows, too."""
        return RestoreReport(
            reset=self.reset,
            renamed=self.renamed,
            skipped=self.skipped,
            missing=self.missing,
            unused=self.unused,
            partly=self.partly,
            sizes=self.sizes,
        )


CALLS: Mapping[str, type] = {
    "meeting.begin": BeginService,
    "meeting.resume": ResumeRun,
    "meeting.back": ComeBack,
    "meeting.served": PublishServer,
    "meeting.lost": LostUpdates,
    "meeting.updates": AskLostUpdates,
    "meeting.open": OpenRun,
    "meeting.join": Join,
    "meeting.news": AskNews,
    "meeting.halt": OfRun,
    "meeting.arrive": Arrive,
    "meeting.gathered": AskGathered,
    "meeting.release": OfRun,
    "meeting.saved": PauseSaved,
    "meeting.over": SayOver,
    "meeting.leave": Leave,
    "meeting.given_back": GivenBack,
    "meeting.deal": DealOut,
    "meeting.stop": StopRun,
    "server.assign": AssignShard,
    "server.reserve": Nothing,
    "server.begin": BeginServer,
    "server.standing": Nothing,
    "server.attend": Attend,
    "server.end": EndRun,
    "server.health": OfRun,
    "publish.obey": PublishOrder,
    "publish.told": PublishProgress,
    "publish.flush": OfRun,
    "tables.cut": OfSnapshot,
    "tables.close": CloseSnapshot,
    "job.start": StartJob,
    "job.wait": WaitForJob,
}


WORK: Mapping[str, type] = {
    "tables.write": WriteTables,
    "tables.restore": RestoreTables,
    "dense.restore": RestoreDense,
}
"""What `job.start` may start."""


@dataclass(frozen=True, slots=True)
class CopyOpened:
    """Answers `standby.open`: where the changes of a share are read."""

    address: Name
    incarnation: Name
    """Names what the server holds; its changes are read under this name."""


@dataclass(frozen=True, slots=True)
class FollowShard:
    """Has a server that has no run keep the copy of a share."""

    run: Name
    index: Count
    num_ps: Annotated[int, Bounds(1, 1 << 20)]
    address: Name
    """As `CopyOpened` says."""
    incarnation: Name

    @property
    def share(self) -> tuple[str, int, int]:
        """The shard and the run, independent of the process that serves it."""
        return self.run, self.index, self.num_ps


@dataclass(frozen=True, slots=True)
class StandbyStatus:
    """Answers `standby.standing`: which copy a server keeps, and how far it is."""

    in_run: bool
    """Whether it holds a share of a run, and can keep no copy."""
    follows: FollowShard | None = None
    whole: bool = False
    """Whether all of the share has come at least once."""
    error: Text = ""
    """Why it cannot follow now; empty while it can."""


@dataclass(frozen=True, slots=True)
class TakeOverShard:
    """Has a standby serve what it has a copy of, in the place of a server that is lost."""

    run: Name
    lost: Name
    """The incarnation that was lost with it."""
    incarnation: Name
    """Names what the standby holds from now on."""
    before: tuple[Name, ...] = ()
    """Incarnations of the shard that other standbys replaced before: a copy of one serves as well, and lacks
    everything learned since."""


@dataclass(frozen=True, slots=True)
class ShardTaken:
    """Answers `TakeOverShard`."""

    refused: Text = ""
    """Why it does not; empty where it serves the share from now on."""
    rows: Count = 0
    behind: Seconds = 0.0
    """Since the newest change that it has came."""
    copied: dict[Name, CopiedPushes] = field(default_factory=dict)
    """Sender to which of its pushes the copy has."""


STANDBY_CALLS: Mapping[str, type] = {
    "standby.open": OfRun,
    "standby.follow": FollowShard,
    "standby.standing": Nothing,
    "standby.take_over": TakeOverShard,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What one rank says between two steps. Most of the time, nothing."""

    stop: Text | None = None
    """Why this rank ends."""
    interrupted: bool = False
    """Whether it does so with more to do."""
    halt: Count = 0
    """From rank 0: all ranks quiesce; the number of that pause, 0 for none."""
    saved: Count = 0
    """Of rank 0: the halt whose moment is on disk by now."""
    look: Count = 0
    """From rank 0, while all are quiesced: it looks rows up in this store, from 1, and all answer; 0 for
    none."""
    back: bool = False
    """From rank 0, as it releases all ranks: an earlier checkpoint was restored, and all resume from it."""
    over: bool = False
    """From rank 0: everything is saved, and all ranks may leave."""


NOTHING = Word()


_CutName = Annotated[str, Bounds(1, 64)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRank:
    """Has a rank hold its tables fast as they are now."""

    cut: _CutName


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseRankSnapshot:
    cut: _CutName
    saved: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRankSnapshot:
    cut: _CutName
    prefix: Name
    full: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRank:
    """Has a rank restore its share of the tables from a chain of checkpoints: prefix and entry of each."""

    chain: tuple[tuple[Name, dict[str, Json]], ...]
    optimizer_state: Literal["keep", "reset", "auto"]
    strict: bool
    changes: Json = None
    """How the model differs from that of the checkpoint, where it may."""
