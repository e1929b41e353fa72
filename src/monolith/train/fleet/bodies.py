"""What the calls of a parameter server of a run take, beside those of the store: see `monolith.wire.bodies`.

A call that is not in one of these tables is not served.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from monolith.wire.bodies import Count, Json, Name, Seconds, Text


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
    start: dict[str, Json]


@dataclass(frozen=True, slots=True)
class Join:
    worker: Count
    member: Name
    known: Text = ""
    wait: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class News:
    run: Name
    worker: Count
    seen: int
    wait: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class Arrive:
    run: Name
    worker: Count
    halt: Count
    state: Json


@dataclass(frozen=True, slots=True)
class Gathered:
    run: Name
    wait: Seconds = 0.0
    left: bool = False


@dataclass(frozen=True, slots=True)
class HaltSaved:
    run: Name
    halt: Count


@dataclass(frozen=True, slots=True)
class Over:
    run: Name
    wait: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class Leave:
    run: Name
    worker: Count
    state: Json = None
    failure: Text | None = None
    final: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    run: Name
    reason: Text
    unfinished: bool = False


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
    job: Name | None = None


@dataclass(frozen=True, slots=True)
class WaitForJob:
    job: Name
    wait: Seconds


@dataclass(frozen=True, slots=True)
class WriteTables:
    run: Name
    cut: Name
    prefix: Name
    full: bool


@dataclass(frozen=True, slots=True)
class RestoreTables:
    run: Name
    chain: tuple[tuple[Name, dict[str, Json]], ...]
    optimizer_state: Literal["keep", "reset", "auto"]
    strict: bool


CALLS: Mapping[str, type] = {
    "meeting.begin": BeginMeeting,
    "meeting.open": OpenMeeting,
    "meeting.join": Join,
    "meeting.news": News,
    "meeting.halt": OfRun,
    "meeting.arrive": Arrive,
    "meeting.gathered": Gathered,
    "meeting.release": OfRun,
    "meeting.saved": HaltSaved,
    "meeting.over": Over,
    "meeting.leave": Leave,
    "meeting.stop": Stop,
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
