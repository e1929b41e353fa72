"""The messages between the processes of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from monolith.checkpoint.part import RestoreReport
from monolith.data.source import Position
from monolith.runtime.coordinator import Start, WorkerState
from monolith.train.publishing.bodies import HoldersTold, PublishOrder
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
    """Which pushes of one sender are in the copy of a share."""

    highest: Count
    """The highest number that came."""
    missing: tuple[Count, ...] = ()
    """Numbers shortly below it that are not in it."""


@dataclass(frozen=True, slots=True)
class PlacePushes:
    """What a worker that left had pushed to one place, all of it acknowledged."""

    incarnation: Name | None
    """Of who serves the place, as the worker knew it."""
    last: Count = 0
    """The number of its last push."""
    since: Count = 0
    """The number of its last push when the place was replaced last."""
    carried: tuple[Count, ...] = ()
    """Numbers up to that which were acknowledged only by who served it then."""
    marks: dict[str, Count] = field(default_factory=dict)
    """By halt: what had been acknowledged then, and was lost since."""


@dataclass(frozen=True, slots=True)
class PushesTold:
    """What a worker that left had pushed, by place."""

    sender: Name
    places: tuple[PlacePushes, ...]


WorkName = Literal["tables.write", "tables.restore", "dense.restore"]
"""What takes a server longer than a call may."""

# Where workers meet


@dataclass(frozen=True, slots=True)
class OfRun:
    run: Name


@dataclass(frozen=True, slots=True)
class Served:
    """Who serves a place since the process that did at first was lost."""

    address: Name
    incarnation: Name
    halt: Count = 0
    """The halt whose checkpoint it was restored from; 0 for what everybody began with."""
    copied: dict[Name, CopiedPushes] | None = None
    """Where a standby took over: sender to which of its pushes are in what it holds."""


@dataclass(frozen=True, slots=True)
class Departure:
    """A worker of a run whose data hands out work is no more; the chief is to give back what it had."""

    number: Count
    """No two of a run have the same."""
    state: WorkerState | None = None
    """How it stood when it left, all its updates done; None where it was lost, with what it had not saved."""


@dataclass(frozen=True, slots=True)
class DealtPosition:
    """Where a worker goes on, since the parts of the data were dealt out anew."""

    halt: Count
    """When everybody stood still for that."""
    position: Position


@dataclass(frozen=True, slots=True)
class BeginService:
    """A run begins; or a meeting takes over one that goes on, whose server 0 was lost."""

    run: Name
    num_workers: Count
    max_workers: Count = 0
    """The most there may be; 0 for no more than there are."""
    keep_going: bool = False
    """Whether a worker that is lost does not end the run for the others."""
    halts: Count = 0
    """The last halt there was."""
    saved: Count = 0
    stop: Text | None = None
    unfinished: bool = False
    safe: dict[str, WorkerState] = field(default_factory=dict)
    servers: dict[str, Served] = field(default_factory=dict)
    present: tuple[Count, ...] = ()
    """Workers that were there, where they may come and go."""
    departing: dict[str, Departure] = field(default_factory=dict)
    departures: Count = 0
    """The last there was."""
    gone: dict[str, WorkerState] = field(default_factory=dict)
    dealt: dict[str, DealtPosition] = field(default_factory=dict)
    """By worker: what it was dealt last."""
    joined: tuple[Count, ...] = ()
    """Workers that have a part in the run, and are to come back to it."""
    pushes: dict[str, PushesTold] = field(default_factory=dict)
    """By worker: what those had pushed who left."""


@dataclass(frozen=True, slots=True)
class ResumeRun:
    """A chief comes back to a run that goes on."""

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
    """By worker: what it said of itself when the last checkpoint was cut."""
    servers: dict[str, Served] = field(default_factory=dict)
    start: Start | None = None
    """What workers are told that join."""
    gone: dict[str, WorkerState] = field(default_factory=dict)
    """By worker: what is left of those whose work was given back."""


@dataclass(frozen=True, slots=True)
class ComeBack:
    """A worker of a run that goes on looks for it where server 0 is now."""

    run: Name
    worker: Count
    member: Name
    step: Count
    """The highest that it has heard of."""
    left: WorkerState | None = None
    """What it left with, where it has."""
    lost: dict[Name, Count] = field(default_factory=dict)
    """What it had pushed in vain, by the incarnation of what replaced the lost server: `LostUpdates` again,
    which the meeting before may not have passed on."""


@dataclass(frozen=True, slots=True)
class PublishServer:
    run: Name
    server: Count
    served: Served


@dataclass(frozen=True, slots=True)
class LostUpdates:
    """What a worker had pushed to a server that was lost, and was not in the checkpoint."""

    run: Name
    worker: Count
    incarnation: Name
    """Of what replaced it."""
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
    """Workers that were lost as well: nobody knows what they had pushed in vain."""


@dataclass(frozen=True, slots=True)
class Returned:
    """A worker was lost and came back, or its work was given back."""

    worker: Count
    records: Count
    """Those it had trained since its last saved position, as far as it had said: they are trained again."""
    seconds: Seconds
    """From when it was missed to when it joined again, or others could have its work."""
    by_others: bool = False
    """Whether others train them."""


@dataclass(frozen=True, slots=True)
class GivenBack:
    """The work of a worker that departed is with the others."""

    run: Name
    worker: Count
    number: Count
    """Of its departure."""
    state: WorkerState
    """What is left of it: what it has trained, and where another in its place begins."""


@dataclass(frozen=True, slots=True)
class DealOut:
    """The parts of the data are dealt out anew, while everybody stands still."""

    run: Name
    halt: Count
    """Which must still be in force."""
    states: dict[str, WorkerState]
    """By worker: how it stands with what it was dealt, all who go on."""
    given: tuple[GivenBack, ...] = ()
    """Those who departed, and whose parts the others have now."""


@dataclass(frozen=True, slots=True)
class DealTaken:
    """Answers `DealOut`."""

    taken: bool
    """Whether everybody has what it was dealt; otherwise the halt is not in force, and nobody hears of it."""


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


@dataclass(frozen=True, slots=True)
class FailedRun:
    run: Name
    why: Text
    final: bool
    """Whether the chief will not begin again by itself."""
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
    """What the last checkpoint has of this worker, where it takes its place in a run that goes on."""
    servers: dict[str, Served] = field(default_factory=dict)
    """By place: those that were replaced since the run began."""


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
    """Trained on by it since everybody began."""


@dataclass(frozen=True, slots=True)
class News:
    """Answers `AskNews`: all that a worker wants to hear of while it trains."""

    version: Count
    """Counts what there was to hear."""
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
    """Workers beside the chief that have a part in the run, those who left it too; for the chief."""
    pushes: dict[str, PushesTold] = field(default_factory=dict)
    """By worker: what those had pushed who left; for the chief."""


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
    """By worker: of those who stand still, or left; or were lost, as they were when last saved."""
    failure: Text | None
    in_force: bool = True
    """Whether the halt that was meant is the one in force."""
    departing: dict[str, Departure] = field(default_factory=dict)
    """By worker: those among them that are to be given back."""
    here: tuple[Count, ...] = ()
    """Those among them that go on afterwards."""


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
    """Workers who have not heard it yet, and may still."""
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
    """Whether it leaves work to the others, who go on."""
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
        """Return what was restored, but for how many rows: others have some, too."""
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
    "publish.told": HoldersTold,
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
        """Which share of which run this is, whoever holds it."""
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
    what was learned since."""


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
    """Of rank 0: everybody stands still, for the so manieth time; 0 for nobody."""
    saved: Count = 0
    """Of rank 0: the halt whose moment is on disk by now."""
    look: Count = 0
    """Of rank 0, while everybody stands still: it looks rows up in this store, from 1, and they answer; 0 for
    none."""
    back: bool = False
    """Of rank 0, as it lets everybody go: an earlier checkpoint was restored, and they go on from it."""
    over: bool = False
    """Of rank 0: all is saved, and everybody may leave."""


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
