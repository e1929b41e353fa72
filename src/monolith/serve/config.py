"""The settings of serving: the server and its limits, batching, routes, following, and sharded rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

from monolith.config import Checked, Problem
from monolith.errors import ConfigError
from monolith.sync.publish_config import KafkaSettings, kafka_problems


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeFollowConfig(Checked):
    """Which trainer a served model follows."""

    url: str = ""
    """Where the trainer publishes its rows: grpc://host:port of each publisher, separated by commas;
    kafka://broker/topic; or a folder. Empty serves models as exported."""
    stale_after: timedelta = timedelta(seconds=10)
    """Warn when the served rows are older than this."""
    any_run: bool = False
    """Follow a publisher of another run than the export's; by default it is refused."""
    compact_after: timedelta = timedelta(seconds=30)
    """Time after loading a newer export until overlay rows that it already contains are dropped."""
    kafka_settings: KafkaSettings = field(default_factory=dict)
    """Anything else librdkafka knows if `url` is kafka://broker/topic, security included:
    { "security.protocol" = "SASL_SSL", "sasl.mechanism" = "SCRAM-SHA-512", ... }."""

    def problems(self) -> Iterator[Problem]:
        if self.stale_after <= timedelta(0):
            yield Problem(("stale_after",), "must be more than 0")
        if self.compact_after < timedelta(0):
            yield Problem(("compact_after",), "must be at least 0")
        yield from kafka_problems(self.kafka_settings, self.url)


_NO_TIME = timedelta()


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardsConfig(Checked):
    """How an entry finds serving servers, and how long it waits for them."""

    discovery: str = ""
    """The registry in which serving servers are found, such as files:///shared/job or zookeeper://host:2181/job."""
    shards: int = 0
    """Number of shards of the rows; 0 takes the number of the export."""
    deadline: timedelta = timedelta(milliseconds=500)
    """Longest wait for rows, unless the deadline of the request is earlier."""
    hedge: bool = True
    """Whether a second replica is asked if one is slower than 95 % of recent answers."""
    hedge_least: timedelta = timedelta(milliseconds=2)
    """Shortest wait before a second replica is asked."""
    hedge_most: timedelta = timedelta(milliseconds=100)
    """Longest wait before a second replica is asked; also the wait until there are enough recent answers."""
    missing: Literal["refuse", "default"] | None = None
    """What happens to a request if a shard does not answer: "refuse" returns an error, "default" reads its
    rows as zeros and names the shard in the answer. None takes the setting of the export, which must allow
    "default"."""
    refresh: timedelta = timedelta(seconds=1)
    """Interval at which the registry is queried."""
    retry: timedelta = timedelta(milliseconds=250)
    """Interval at which a slow or lost server is probed."""

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
    """Limits of one request, of one client, and of all requests together."""

    request_bytes: int = 64 << 20
    """Largest request with binary tensors, after decompression."""
    json_bytes: int = 8 << 20
    """Largest JSON of a request, after decompression, and largest gRPC message without raw contents: both
    take many times their size in memory."""
    in_flight_bytes: int = 1 << 30
    """Memory that all requests in flight may use; JSON counts 16 times its size."""
    rows: int = 65_536
    """Largest number of rows of one request."""
    concurrency: int = 1024
    """Largest number of requests that are read, queued or answered at a time."""
    queue: int = 512
    """Largest number of requests that wait for one version of a model."""
    queue_rows: int = 262_144
    """Largest number of rows that wait for one version of a model, of all requests together."""
    timeout: timedelta = timedelta(seconds=10)
    """Longest time for a request, whatever deadline its client sets."""
    read_timeout: timedelta = timedelta(seconds=10)
    """Longest time for the headers of an HTTP request, for its body before `body_rate` applies, and for the
    message of a gRPC call to arrive."""
    body_rate: int = 16 << 10
    """Lowest speed, in bytes per second, at which the body of an HTTP request may arrive."""
    connections: int = 4096
    """Largest number of HTTP connections, including gRPC connections over a shared port; never more than a
    quarter of the files that the process may open."""
    peer_connections: int = 1024
    """Largest number of such connections from one client address."""
    peer_requests: int = 512
    """Largest number of requests in flight from one client address."""

    def problems(self) -> Iterator[Problem]:
        for name in (
            "request_bytes",
            "json_bytes",
            "in_flight_bytes",
            "rows",
            "concurrency",
            "queue",
            "queue_rows",
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
    """How requests are batched."""

    max_rows: int = 1024
    """Largest number of rows in a batch. A larger request runs in pieces, and others are answered between
    them."""
    max_delay: timedelta = timedelta(0)
    """How long a request may wait for others while the model is idle. 0 batches only the requests that arrive
    while the model is busy."""
    runners: int = 1
    """Largest number of batches of one version that run at a time. More than one run only while batches take
    5 ms or more: of shorter ones, Python can run one at a time. For more cores, start several processes."""

    def problems(self) -> Iterator[Problem]:
        for name in ("max_rows", "runners"):
            if getattr(self, name) < 1:
                yield Problem((name,), "must be at least 1")
        if self.max_delay < timedelta(0):
            yield Problem(("max_delay",), "must be at least 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeLogConfig(Checked):
    """The log of served features: requests, the features that the model was given, and its answers."""

    to: str = ""
    """Where the log goes: a local folder, or kafka://broker:port[,broker:port]/topic. Empty logs nothing."""
    fraction: float = 1.0
    """Fraction of the requests that are logged, above 0 and up to 1, chosen by a hash of their ID."""
    file_bytes: int = 64 << 20
    """Size at which a file of the folder is complete, and another one is begun."""
    file_age: timedelta = timedelta(minutes=1)
    """Age at which a file is complete although it is smaller; only complete files are read."""
    max_files: int | None = None
    """Number of complete files in the folder above which the oldest are deleted, read or not; None deletes
    none."""
    queue_rows: int = 65_536
    """Rows that may wait to be logged. More are dropped and counted: the log never delays an answer."""
    kafka_settings: KafkaSettings = field(default_factory=dict)
    """Anything else librdkafka knows, security included: { "security.protocol" = "SASL_SSL", ... }."""

    def problems(self) -> Iterator[Problem]:
        if not 0 < self.fraction <= 1:
            yield Problem(("fraction",), f"must be above 0 and at most 1, got {self.fraction}")
        for name in ("file_bytes", "queue_rows", "max_files"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield Problem((name,), f"must be at least 1, got {value}")
        if self.file_age <= timedelta(0):
            yield Problem(("file_age",), "must be more than 0")


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """Which of the versions in a folder are served.

    Example: VersionPolicy.parse("latest:2").wanted(["100", "120", "140"]) returns ["120", "140"].
    """

    newest: int | None = 1
    """Serve so many of the newest versions; None serves all."""
    named: tuple[str, ...] = ()
    """Serve only these versions."""
    preferred: Callable[[Sequence[str]], str | None] | None = None
    """Chooses the version to serve; the newest is served if it is None or returns None."""

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
        """Return the versions to serve, of versions in order of age, oldest first."""
        if self.named:
            return [version for version in versions if version in self.named]
        if self.preferred is not None and (chosen := self.preferred(versions)) is not None:
            return [chosen]
        return versions if self.newest is None else versions[-self.newest :]


MOST_WEIGHT = 1e9
"""Largest weight in a route. A sum of such numbers is exact enough to choose by."""


@dataclass(frozen=True, slots=True)
class RouteTarget:
    """A model, or one version of it, and its weight in a route."""

    model: str
    version: str
    weight: float


@dataclass(frozen=True, slots=True)
class Route:
    """A name that clients request, and the targets that its requests go to."""

    name: str
    targets: tuple[RouteTarget, ...]

    @property
    def targets_text(self) -> str:
        """The targets as `parse` reads them, behind the name."""
        named = [f"{one.model}/{one.version}" if one.version else one.model for one in self.targets]
        weights = [f"{one.weight:.12f}".rstrip("0").rstrip(".") for one in self.targets]
        return ",".join(f"{name}:{weight}" for name, weight in zip(named, weights, strict=True))

    @classmethod
    def parse(cls, text: str) -> Route:
        """Read `NAME=MODEL[/VERSION][:WEIGHT],...`, as in `ads=ads/120:90,ads/140:10`."""
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
            raise ConfigError(f"cannot read the route {text!r}: a weight is not a number") from cause
        if not all(
            target.weight == 0 or 1 / MOST_WEIGHT <= target.weight <= MOST_WEIGHT for target in targets
        ):
            raise ConfigError(
                f"cannot use the route {text[:200]!r}: a weight must be 0, or from {1 / MOST_WEIGHT:g} to "
                f"{MOST_WEIGHT:g}"
            )
        if not sum(target.weight for target in targets):
            raise ConfigError(f"cannot use the route {text!r}: at least one weight must be more than 0")
        return cls(name, targets)


def canary_route(name: str, base: RouteTarget, candidate: RouteTarget, share: float) -> Route:
    """Return the split between a base and its candidate; of one target if the other gets nothing."""
    weights = ((base, round(100 * (1 - share), 9)), (candidate, round(100 * share, 9)))
    targets = tuple(RouteTarget(one.model, one.version, weight) for one, weight in weights if weight)
    return Route(name, targets)


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryConfig(Checked):
    """How a new version gets more and more traffic, and when it is rolled back."""

    routes: tuple[str, ...] = ()
    """Canaries, as `NAME=BASE,CANDIDATE`, each a MODEL/VERSION or a MODEL: `ads=ads/120,ads/140`."""
    steps: tuple[float, ...] = (0.01, 0.1, 0.5)
    """Fractions of the requests that the candidate gets, one after another; then it gets all."""
    hold: timedelta = timedelta(minutes=10)
    """Least time of each step."""
    least_requests: int = 1000
    """Least requests of base and of candidate, each, before a step is judged."""
    max_latency: float = 1.5
    """Roll back if the candidate's 95th percentile of latency is more than so many times the base's."""
    max_shift: float = 0.1
    """Roll back if the mean of an output differs from the base's by more than this fraction, and chance."""
    max_errors: float = 0.01
    """Roll back if the candidate's fraction of failed requests is above the base's by more than this."""

    def problems(self) -> Iterator[Problem]:
        if (
            not self.steps
            or any(not 0 < one < 1 for one in self.steps)
            or sorted(self.steps) != [*self.steps]
        ):
            yield Problem(("steps",), "must be fractions between 0 and 1 that rise")
        if self.hold < timedelta(0):
            yield Problem(("hold",), "must be at least 0")
        if self.least_requests < 1:
            yield Problem(("least_requests",), "must be at least 1")
        if self.max_latency < 1:
            yield Problem(("max_latency",), "must be at least 1")
        for name in ("max_shift", "max_errors"):
            if getattr(self, name) < 0:
                yield Problem((name,), "must be at least 0")
        for text in self.routes:
            try:
                targets = Route.parse(text).targets
            except ConfigError as error:
                yield Problem(("routes",), str(error))
                continue
            named = {(one.model, one.version) for one in targets}
            if len(targets) != 2 or len(named) != 2 or any(one.weight != 1 for one in targets):
                yield Problem(
                    ("routes",), f"{text!r} must name a base and another candidate, without weights"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedFolder:
    """A folder with versions of a model."""

    folder: str
    name: str
    policy: VersionPolicy = field(default_factory=VersionPolicy)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig(Checked):
    """The settings of one inference server."""

    host: str = "127.0.0.1"
    """Address to listen on; by default only this machine can reach it."""
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
    shared_memory: str = ""
    """What the keys of POSIX shared memory objects begin with that clients on this machine may register, for
    inputs and outputs that are not sent. Empty registers none."""
    limits: ServeLimits = field(default_factory=ServeLimits)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    splits: tuple[str, ...] = ()
    """Routes that divide the requests for a name: `NAME=MODEL[/VERSION][:WEIGHT],...`, as in
    `ads=ads/120:90,ads/140:10`."""
    split_columns: Mapping[str, str] = field(default_factory=dict)
    """Name of a split -> an input column whose first value decides: requests with the same value go to the
    same target. A request with a `split_key` of its own goes by that."""
    shadows: tuple[str, ...] = ()
    """Shadow traffic, as `NAME=MODEL[/VERSION][:FRACTION]`: mirror a fraction of the requests for a name to a
    model and compare; clients never see the answers."""
    items: tuple[str, ...] = ()
    """Files of items for top-k requests, as `NAME=FILE`: CSV, Parquet or JSON lines with a row for each item,
    the columns of the model's item tower, and attributes to filter by. Read again when it changes."""
    follow: ServeFollowConfig = field(default_factory=ServeFollowConfig)
    shards: ShardsConfig = field(default_factory=ShardsConfig)
    poll: timedelta = timedelta(seconds=1)
    """Interval at which folders are polled for new versions."""
    drain: timedelta = timedelta(seconds=30)
    """Time for requests in flight to finish after the server was told to stop."""
    threads: int = 64
    """Number of requests of one transport that are handled at a time."""
    predict_threads: int = 1
    """Threads that compute one batch, of torch, too. More than one wait for each other busily, which is
    quicker only for batches of thousands of rows; `batching.runners` computes several batches at a time."""
    memory_bytes: int | None = None
    """Memory for the rows of each loaded model version and for finding them; None is as much as they need.
    With less, the rows that are asked for most are in memory, and all others are read from the disk. Several
    processes of one command divide it."""
    history_cache_bytes: int = 0
    """Memory for encoded histories of users, of all models of a process: a ranking request of a user whose
    history, rows and weights are as before does not encode it again. 0 keeps none."""
    access_log: float = 0.0
    """Fraction of answered requests that are logged, 0 to 1; of refused requests, ten per second are."""
    trace_to: str = ""
    """The OpenTelemetry collector that gets a span of each request whose client sends `traceparent`, sampled:
    http://host:4318/v1/traces, for OTLP over HTTP. Empty records no spans."""
    log: ServeLogConfig = field(default_factory=ServeLogConfig)

    canary: CanaryConfig = field(default_factory=CanaryConfig)

    @property
    def split_routes(self) -> list[Route]:
        """The splits, and those that canaries begin with."""
        begun = [Route.parse(text) for text in self.canary.routes]
        first = self.canary.steps[0]
        return [
            *(Route.parse(text) for text in self.splits),
            *(canary_route(one.name, one.targets[0], one.targets[1], first) for one in begun),
        ]

    @property
    def shadow_routes(self) -> list[Route]:
        return [Route.parse(text) for text in self.shadows]

    def problems(self) -> Iterator[Problem]:
        if self.port is None and self.http_port is None and self.grpc_port is None:
            yield Problem(("port", "http_port", "grpc_port"), "need at least one port to listen on")
        for name in ("port", "http_port", "grpc_port"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 65535:
                yield Problem((name,), "must be from 0 to 65535")
        if self.shared_memory and not re.fullmatch(
            r"/?[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}", self.shared_memory
        ):
            yield Problem(
                ("shared_memory",),
                "must be up to 200 letters, digits, _, - and dots, and not begin with a dot",
            )
        if self.threads < 1:
            yield Problem(("threads",), "must be at least 1")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            yield Problem(("memory_bytes",), f"must be 1 or more, got {self.memory_bytes}")
        if self.history_cache_bytes < 0:
            yield Problem(("history_cache_bytes",), f"must be 0 or more, got {self.history_cache_bytes}")
        if not 0 <= self.access_log <= 1:
            yield Problem(("access_log",), "must be from 0 to 1")
        if self.poll <= timedelta(0):
            yield Problem(("poll",), "must be more than 0")
        if self.predict_threads < 1:
            yield Problem(("predict_threads",), "must be at least 1")
        for name in ("splits", "shadows"):
            for text in getattr(self, name):
                try:
                    route = Route.parse(text)
                except ConfigError as error:
                    yield Problem((name,), str(error))
                    continue
                if name == "shadows" and any(target.weight > 1 for target in route.targets):
                    yield Problem((name,), f"of {route.name!r}: a fraction must be at most 1")
