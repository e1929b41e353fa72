"""What processes of a run say to each other about pushes, for lost ones to be counted; see `bodies`."""

from __future__ import annotations

from dataclasses import dataclass, field

from monolith.wire.messages import Count, Name


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
