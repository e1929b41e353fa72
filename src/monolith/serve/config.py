"""Whom a server follows, and when it says that it hears nothing.

How an entry asks serving servers for rows.

How a server is set up: where it listens, what it bears, how it batches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

from monolith.config import Checked, Problem
from monolith.errors import ConfigError


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeLimits(Checked):
    """What one request, and all of them together, may ask of a server."""

    request_bytes: int = 64 << 20
    """The largest request with its tensors in binary, after it was unpacked."""
    json_bytes: int = 8 << 20
    """The largest JSON of a request, after it was unpacked, and the largest gRPC message without raw
    contents: both take many times their size in memory."""
    bytes_in_flight: int = 1 << 30
    """The most bytes that requests in flight hold together; JSON counts 16 times."""
    rows: int = 65_536
    """The most rows of one request."""
    concurrency: int = 1024
    """The most requests that are read, wait or are worked on at a time."""
    queue: int = 512
    """The most requests that wait for one version of a model."""
    timeout: timedelta = timedelta(seconds=10)
    """The longest that a request takes, whatever its caller allows."""
    read_timeout: timedelta = timedelta(seconds=10)
    """The longest that a client may take for the headers of an HTTP request, for its body before
    `body_rate` counts, and for the message of a gRPC call."""
    body_rate: int = 16 << 10
    """The fewest bytes in a second that the body of an HTTP request may come with."""
    connections: int = 4096
    """The most HTTP connections, and those that a shared port passes on to gRPC."""
    peer_connections: int = 1024
    """The most such connections of one peer address."""
    peer_requests: int = 512
    """The most requests of one peer address in flight."""

    def problems(self) -> Iterator[Problem]:
        for name in (
            "request_bytes",
            "json_bytes",
            "bytes_in_flight",
            "rows",
            "concurrency",
            "queue",
            "body_rate",
            "connections",
            "peer_connections",
            "peer_requests",
        ):
            if getattr(self, name) < 1:
                yield Problem((name,), "must be at least 1")
        for name in ("timeout", "read_timeout"):
            if getattr(self, name) <= timedelta(0):
                yield Problem((name,), "must be more than 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchingConfig(Checked):
    """How requests are answered together."""

    max_rows: int = 1024
    """The most rows that are answered together; a larger request is answered alone."""
    max_delay: timedelta = timedelta(0)
    """How long a request may wait for others while nothing is worked on. 0: only those that came while
    the model was busy are answered together."""
    runners: int = 1
    """How many batches of one version are worked on at a time."""

    def problems(self) -> Iterator[Problem]:
        for name in ("max_rows", "runners"):
            if getattr(self, name) < 1:
                yield Problem((name,), "must be at least 1")
        if self.max_delay < timedelta(0):
            yield Problem(("max_delay",), "must be at least 0")


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """Which of the versions in a folder are served."""

    newest: int | None = 1
    """So many, the newest; None for all."""
    named: tuple[str, ...] = ()
    """These, and no others."""
    preferred: Callable[[Sequence[str]], str | None] | None = None
    """Says which of the versions is served in place of the newest; None has the newest."""

    @classmethod
    def parse(cls, text: str) -> VersionPolicy:
        """Read "latest", "latest:2", "all" or "specific:120,140"."""
        kind, _, rest = text.partition(":")
        if kind == "latest" and (not rest or (rest.isascii() and rest.isdecimal() and int(rest) > 0)):
            return cls(int(rest or 1))
        if text == "all":
            return cls(None)
        if kind == "specific" and (named := tuple(filter(None, map(str.strip, rest.split(","))))):
            return cls(None, named)
        raise ConfigError(
            f"cannot read the version policy {text!r}: write latest, latest:2, all, or specific:120,140"
        )

    def wanted(self, versions: list[str]) -> list[str]:
        """Return those to serve of these, which are the oldest first."""
        if self.named:
            return [version for version in versions if version in self.named]
        if self.preferred is not None and (chosen := self.preferred(versions)) is not None:
            return [chosen]
        return versions if self.newest is None else versions[-self.newest :]


@dataclass(frozen=True, slots=True)
class RouteTarget:
    """A model, or one version of it, and how much of the traffic it gets."""

    model: str
    version: str
    weight: float


@dataclass(frozen=True, slots=True)
class Route:
    """A name that callers ask for, and who answers."""

    name: str
    targets: tuple[RouteTarget, ...]

    @classmethod
    def parse(cls, text: str) -> Route:
        """Read "NAME=MODEL[/VERSION][:WEIGHT],...", as in "ads=ads/120:90,ads/140:10"."""
        name, equals, rest = text.partition("=")
        parts = [
            re.fullmatch(r"([^/:,\s]+)(?:/([^/:,\s]+))?(?::([0-9.]+))?", part) for part in rest.split(",")
        ]
        if not name or not equals or not all(parts):
            raise ConfigError(
                f"cannot read the route {text!r}: write NAME=MODEL[/VERSION][:WEIGHT],..., "
                "as in ads=ads/120:90,ads/140:10"
            )
        try:
            targets = tuple(
                RouteTarget(part[1], part[2] or "", float(1 if part[3] is None else part[3]))
                for part in parts
                if part
            )
        except ValueError as cause:
            raise ConfigError(f"cannot read the route {text!r}: a weight is no number") from cause
        if not sum(target.weight for target in targets):
            raise ConfigError(f"cannot use the route {text!r}: at least one weight must be more than 0")
        return cls(name, targets)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedFolder:
    """A folder with versions of a model."""

    folder: str
    name: str
    policy: VersionPolicy = field(default_factory=VersionPolicy)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig(Checked):
    """One server."""

    host: str = "127.0.0.1"
    """The address to listen on; by default only this machine can reach it."""
    port: int | None = None
    """One port for both HTTP and gRPC; 0 for any free one."""
    http_port: int | None = 8000
    """The port for HTTP; 0 for any free one, None for no HTTP."""
    grpc_port: int | None = 8001
    """The port for gRPC; 0 for any free one, None for no gRPC."""
    allowed_hosts: tuple[str, ...] = ()
    """Other names by which clients reach the server over HTTP."""
    allow_control: bool = False
    """Whether clients with the control token may load and unload models."""
    limits: ServeLimits = field(default_factory=ServeLimits)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    splits: tuple[Route, ...] = ()
    shadows: tuple[Route, ...] = ()
    """Who else is asked, and not heard: the weight is the share of requests, at most 1."""
    follow: ServeFollowConfig = field(default_factory=ServeFollowConfig)
    poll: timedelta = timedelta(seconds=1)
    """How often folders are looked at for a new version."""
    drain: timedelta = timedelta(seconds=30)
    """How long requests in flight have to end after the server was told to stop."""
    threads: int = 64
    """How many requests of one transport are decoded, waited for and encoded at a time."""
    access_log: float = 0.0
    """The share of answered requests that are logged, 0 to 1; of refused ones, ten in a second."""

    def problems(self) -> Iterator[Problem]:
        if self.port is None and self.http_port is None and self.grpc_port is None:
            yield Problem(("port", "http_port", "grpc_port"), "need at least one port to listen on")
        for name in ("port", "http_port", "grpc_port"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 65535:
                yield Problem((name,), "must be from 0 to 65535")
        if self.threads < 1:
            yield Problem(("threads",), "must be at least 1")
        if not 0 <= self.access_log <= 1:
            yield Problem(("access_log",), "must be from 0 to 1")
        if self.poll <= timedelta(0):
            yield Problem(("poll",), "must be more than 0")
        for route in self.shadows:
            if any(target.weight > 1 for target in route.targets):
                yield Problem(("shadows",), f"of {route.name!r}: a share must be at most 1")
