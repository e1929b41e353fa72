"""Whom a server follows, and when it says that it hears nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from monolith.config import Checked, Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeFollowConfig(Checked):
    """What a served model is brought up to date from."""

    url: str = ""
    """Where the trainer publishes what it learned: grpc://host:port of each holder of rows, with commas;
    kafka://broker/topic; or a folder. Empty: a model is served as it was exported."""
    stale_after: timedelta = timedelta(seconds=10)
    """The age of what is served that is warned about."""
    any_run: bool = False
    """Follow a publisher of another run than the export's; by default it is refused."""
    settle_after: timedelta = timedelta(seconds=30)
    """How long after a newer export was loaded the rows that it holds as well are let go of."""

    def problems(self) -> Iterator[Problem]:
        if self.stale_after <= timedelta(0):
            yield Problem(("stale_after",), "must be more than 0")
        if self.settle_after < timedelta(0):
            yield Problem(("settle_after",), "must be at least 0")
