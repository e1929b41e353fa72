"""What the processes of a fleet say to each other, beside the calls of the store: see `monolith.wire.bodies`.

Each call takes one of the requests here, and is answered by one of the answers, or by nothing. A call
that is not in one of the tables is not served.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from monolith.checkpoint.report import RestoreReport
from monolith.train.peers import Start, WorkerState
from monolith.wire.bodies import Bounds, Count, Json, Name, Nothing, Seconds, Text

# Where workers meet


@dataclass(frozen=True, slots=True)
class OfRun:
    run: Name


@dataclass(frozen=True, slots=True)
class BeginMeeting:
    run: Name
    num_workers: Count


@dataclass(frozen=True, slots=True)
class OpenMeeting:
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


@dataclass(frozen=True, slots=True)
class AskNews:
    run: Name
    worker: Count
    seen: int
    """The version that the worker knows."""
    wait: Seconds = 0.0


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


@dataclass(frozen=True, slots=True)
class HaltNumber:
    """Answers a halt."""

    halt: Count


@dataclass(frozen=True, slots=True)
class Arrive:
    run: Name
    worker: Count
    halt: Count
    state: WorkerState


@dataclass(frozen=True, slots=True)
class AskGathered:
    run: Name
    wait: Seconds = 0.0
    left: bool = False
    """Whether only those count who have left."""


@dataclass(frozen=True, slots=True)
class GatheredStates:
    """Answers `AskGathered`."""

    missing: tuple[Count, ...]
    absent: tuple[Count, ...]
    """Those of the missing who never joined."""
    states: dict[str, WorkerState]
    """By worker: of those who stand still, or left."""
    failure: Text | None


@dataclass(frozen=True, slots=True)
class HaltSaved:
    run: Name
    halt: Count


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


@dataclass(frozen=True, slots=True)
class Stop:
    run: Name
    reason: Text
    unfinished: bool = False


# What the chief asks of each server


@dataclass(frozen=True, slots=True)
class AssignShare:
    """Gives a server that is not in a run the share `index` of `num_ps`."""

    index: Count
    num_ps: Annotated[int, Bounds(1, 1 << 20)]


@dataclass(frozen=True, slots=True)
class Attend:
    run: Name
    wait: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class EndRun:
    run: Name
    finished: bool


@dataclass(frozen=True, slots=True)
class OfCut:
    run: Name
    cut: Name


@dataclass(frozen=True, slots=True)
class CloseCut:
    run: Name
    cut: Name
    saved: bool


@dataclass(frozen=True, slots=True)
class StartJob:
    work: Literal["tables.write", "tables.restore"]
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
        )

    def report(self) -> RestoreReport:
        """Return what was restored, but for how many rows: others have some, too."""
        return RestoreReport(
            reset=self.reset,
            renamed=self.renamed,
            skipped=self.skipped,
            missing=self.missing,
            unused=self.unused,
        )


CALLS: Mapping[str, type] = {
    "meeting.begin": BeginMeeting,
    "meeting.open": OpenMeeting,
    "meeting.join": Join,
    "meeting.news": AskNews,
    "meeting.halt": OfRun,
    "meeting.arrive": Arrive,
    "meeting.gathered": AskGathered,
    "meeting.release": OfRun,
    "meeting.saved": HaltSaved,
    "meeting.over": SayOver,
    "meeting.leave": Leave,
    "meeting.stop": Stop,
    "server.assign": AssignShare,
    "server.reserve": Nothing,
    "server.begin": OfRun,
    "server.attend": Attend,
    "server.end": EndRun,
    "server.health": OfRun,
    "tables.cut": OfCut,
    "tables.close": CloseCut,
    "job.start": StartJob,
    "job.wait": WaitForJob,
}

WORK: Mapping[str, type] = {"tables.write": WriteTables, "tables.restore": RestoreTables}
"""What `job.start` may start."""
