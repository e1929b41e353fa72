"""What the calls of the data service take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from monolith.data.service.job import Place
from monolith.wire.messages import Bounds, Count, Json, Name, Seconds, Text

_Many = Annotated[int, Bounds(0, 1 << 16)]


@dataclass(frozen=True, slots=True)
class PlaceBody:
    """A `Place`, as JSON has it."""

    position: Json
    skip: Count = 0

    def read(self) -> Place:
        return Place(self.position, self.skip)


@dataclass(frozen=True, slots=True)
class OfWorker:
    worker: Name


@dataclass(frozen=True, slots=True)
class LeaseBody:
    worker: Name
    wait: Seconds


@dataclass(frozen=True, slots=True)
class RenewBody:
    worker: Name
    leases: Annotated[list[Name], Bounds(0, 1 << 16)]


@dataclass(frozen=True, slots=True)
class AnnounceBody:
    lease: Name
    sequence: Count
    place: PlaceBody
    size: Annotated[int, Bounds(1, 1 << 32)]
    after: PlaceBody


@dataclass(frozen=True, slots=True)
class OfLease:
    lease: Name


@dataclass(frozen=True, slots=True)
class FailBody:
    lease: Name
    error: Text


@dataclass(frozen=True, slots=True)
class ChunkBody:
    """Also the ticket by which a trainer fetches: it names a chunk, and says nothing of what that is."""

    job: Name
    epoch: Count
    number: Count
    sequence: Count

    @property
    def id(self) -> tuple[str, int, int, int]:
        return self.job, self.epoch, self.number, self.sequence


@dataclass(frozen=True, slots=True)
class AttachBody:
    trainer: Name
    job: Name | None
    turn: Count


@dataclass(frozen=True, slots=True)
class TurnsBody:
    trainer: Name
    session: Name
    turn: Count
    most: _Many
    wait: Seconds


@dataclass(frozen=True, slots=True)
class AcknowledgeBody:
    trainer: Name
    turn: Count


@dataclass(frozen=True, slots=True)
class ReleaseBody:
    trainer: Name
    job: Name | None = None
    turn: Count | None = None
