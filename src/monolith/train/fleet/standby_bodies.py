"""What a chief and servers say to each other about second copies of shares; see `bodies`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from monolith.train.fleet.bodies import OfRun
from monolith.train.fleet.push_bodies import CopiedPushes
from monolith.wire.messages import Bounds, Count, Name, Nothing, Seconds, Text


@dataclass(frozen=True, slots=True)
class CopyOpened:
    """Answers `standby.open`: where the changes of a share are read."""

    address: Name
    incarnation: Name
    """Names what the server holds; its changes are read under this name."""


@dataclass(frozen=True, slots=True)
class FollowShare:
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
class StandbyStanding:
    """Answers `standby.standing`: which copy a server keeps, and how far it is."""

    in_run: bool
    """Whether it holds a share of a run, and can keep no copy."""
    follows: FollowShare | None = None
    whole: bool = False
    """Whether all of the share has come at least once."""
    error: Text = ""
    """Why it cannot follow now; empty while it can."""


@dataclass(frozen=True, slots=True)
class TakeOverShare:
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
class ShareTaken:
    """Answers `TakeOverShare`."""

    refused: Text = ""
    """Why it does not; empty where it serves the share from now on."""
    rows: Count = 0
    behind: Seconds = 0.0
    """Since the newest change that it has came."""
    copied: dict[Name, CopiedPushes] = field(default_factory=dict)
    """Sender to which of its pushes the copy has."""


STANDBY_CALLS: Mapping[str, type] = {
    "standby.open": OfRun,
    "standby.follow": FollowShare,
    "standby.standing": Nothing,
    "standby.take_over": TakeOverShare,
}
