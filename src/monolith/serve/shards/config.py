"""How an entry asks serving servers for rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from monolith.config import Checked, Problem

_NO_TIME = timedelta()


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardsConfig(Checked):
    """Where serving servers are found, and what happens to those that are slow or gone."""

    discovery: str = ""
    """The registry in which serving servers are found, such as files:///shared/job or zookeeper://host:2181/job."""
    shards: int = 0
    """Serving servers that the rows are spread over; 0 takes the number that the export has."""
    deadline: timedelta = timedelta(milliseconds=500)
    """The longest that rows are waited for, unless the caller of a request gives less time."""
    hedge: bool = True
    """Whether another replica is asked where one takes longer than nearly all answers did lately."""
    hedge_least: timedelta = timedelta(milliseconds=2)
    """The shortest wait before another replica is asked."""
    hedge_most: timedelta = timedelta(milliseconds=100)
    """The longest wait before another replica is asked; also the wait while too few answers have come."""
    missing: Literal["refuse", "default"] | None = None
    """What happens to a request where a shard does not answer: an error, or zeros for its rows and its name
    in the answer. By default what the export allows; "default" only where the export allows it."""
    refresh: timedelta = timedelta(seconds=1)
    """How often the registry is asked for servers."""
    retry: timedelta = timedelta(milliseconds=250)
    """How often a server that is gone or slow is tried, apart from requests."""

    def problems(self) -> Iterator[Problem]:
        if self.shards < 0:
            yield Problem(("shards",), f"must be 0 or more, got {self.shards}")
        for name in ("deadline", "hedge_least", "refresh", "retry"):
            if getattr(self, name) <= _NO_TIME:
                yield Problem((name,), f"must be more than 0, got {getattr(self, name)}")
        if self.hedge_most < self.hedge_least:
            yield Problem(
                ("hedge_most", "hedge_least"), f"{self.hedge_most} must not be less than {self.hedge_least}"
            )
