"""What a run reads and whom it tells: data, servers of requests, metrics, profiles."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from monolith.cluster.run_config.checks import at_least, not_negative
from monolith.config import Checked, Problem, Secret


@dataclass(frozen=True, kw_only=True, slots=True)
class FramingConfig(Checked):
    """What stands before each record of a framed file."""

    lagrangex: bool = False
    """A number with the kind of the payload in it; then there is no other header."""
    sort_id: bool = False
    """The size of a sort id, and the sort id."""
    kafka_dump: bool = False
    """A number, as dumps of Kafka have it."""
    kafka_dump_prefix: bool = False
    """One number more before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(Checked):
    """The files that are read."""

    path: str | None = None
    """File or folder."""
    pattern: str | None = None
    """Which files below it, with * in it."""
    record: Literal["instance", "example", "example_batch"] | None = None
    """What a record is; None leaves it to the task."""
    framing: FramingConfig = FramingConfig(sort_id=True)
    features: tuple[str, ...] = ()
    """Features to read; none means all."""
    hourly: bool = False
    """Folders by hour, not by day."""
    start_date: str | None = None
    """The first day, as 20240131."""
    end_date: str | None = None
    """The day after the last."""
    start_hour: int | None = None
    """The first hour of the first day."""
    end_hour: int | None = None
    """The hour after the last one of the last day."""
    dynamic_sharding: bool = False
    """Workers take files from a shared queue, instead of each having its own from the beginning."""
    tasks_per_worker: int = 1
    """Files that a worker reads at a time."""
    reorder_fids: bool = False
    """Remove duplicate ids and sort them by server while reading, not in the step."""
    dump_features_only: bool = False
    """Read and write what the features are, and train nothing."""

    def problems(self) -> Iterator[Problem]:
        yield from at_least(1, self, "tasks_per_worker")
        for name in ("start_date", "end_date"):
            given = getattr(self, name)
            if given and not re.fullmatch(r"\d{8}", given):
                yield Problem((name,), f"must be a day such as 20240131, got {given!r}")
        for name in ("start_hour", "end_hour"):
            given = getattr(self, name)
            if given is not None and not 0 <= given <= 24:
                yield Problem((name,), f"must be from 0 to 24, got {given}")
        if self.start_date and self.end_date and self.start_date > self.end_date:
            yield Problem(("start_date", "end_date"), f"{self.start_date} is after {self.end_date}")


@dataclass(frozen=True, kw_only=True, slots=True)
class KafkaConfig(Checked):
    """The stream that is read."""

    servers: tuple[str, ...] = ()
    """host:port of some brokers."""
    topics: tuple[str, ...] = ()
    """Topics to read."""
    group: str | None = None
    """The consumer group."""
    username: str | None = None
    """For SASL."""
    password: Secret | None = None
    """For SASL."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Anything else librdkafka knows."""

    def problems(self) -> Iterator[Problem]:
        if self.topics and not self.servers:
            yield Problem(("topics", "servers"), "topics need servers to read them from")
        if self.topics and not self.group:
            yield Problem(("topics", "group"), "topics are read by a group: name one")
        for name in self.settings:
            if re.search("password|secret|token", name) and not name.endswith("location"):
                yield Problem(("settings",), f"{name!r} would be printed; give a password as kafka.password")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataServiceConfig(Checked):
    """A service of other processes that reads the data and hands out its batches."""

    enabled: bool | None = None
    """Read through it. None means no."""
    dispatcher: str | None = None
    """host:port of its dispatcher; None asks MLP's environment."""
    extra_workers: int = 0
    """Data workers that each GPU worker starts beside itself."""

    def problems(self) -> Iterator[Problem]:
        yield from not_negative(self, "extra_workers")


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidatesConfig(Checked):
    """A pass over all items after training, which keeps what a first ranking stage needs of each."""

    enabled: bool = False
    """Make that pass."""
    path: str | None = None
    """File of items, or folder of Parquet files."""
    parquet: bool = False
    """It is a folder of Parquet files."""
    framing: FramingConfig = FramingConfig()

    def problems(self) -> Iterator[Problem]:
        if self.enabled and not self.path:
            yield Problem(("enabled", "path"), "the pass over all items needs the path of the items")


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncConfig(Checked):
    """Sending changed rows to the servers that answer requests, in training in real time."""

    base_name: str | None = None
    """The model's name there."""
    ps_replicas: int | None = None
    """Replicas of each shard there."""
    unified: bool = False
    """The servers are found in ZooKeeper under the business id, instead of one by one."""
    data_center_aware: bool = False
    """Keep replicas of different data centres apart."""

    def problems(self) -> Iterator[Problem]:
        yield from at_least(1, self, "ps_replicas")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingConfig(Checked):
    """What is made for servers of requests."""

    warmup_file: str = "./warmup_file"
    """Requests that a server answers to itself before it answers others."""
    skip_zero_rows: bool = False
    """Do not load rows that are all zeros; they read as zeros anyway."""
    dump_model: bool = False
    """Write the model beside its checkpoints, so that others can look at it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsConfig(Checked):
    """What a run says about itself, and how often."""

    prefix: str | None = None
    """What names of metrics begin with; None means monolith."""
    targets: tuple[str, ...] = ()
    """Heads whose predictions are reported."""
    sample_ratio: float | None = None
    """Share of predictions that is; None leaves it to the task."""
    native: bool = False
    """Metrics of the core, too."""
    summary_every_steps: int = 100
    """Steps between summaries for TensorBoard."""
    log_every_steps: int = 100
    """Steps between lines of the log."""
    tensorboard_dir: str = ""
    """Folder of the summaries; empty means model_dir."""
    port: int | None = None
    """Where Prometheus may ask for metrics; 0 takes a free port, None serves none."""
    host: str = "127.0.0.1"
    """The address of that port. One that others can reach asks for a certificate or the token, as security
    says."""

    def problems(self) -> Iterator[Problem]:
        yield from at_least(1, self, "summary_every_steps", "log_every_steps")
        yield from not_negative(self, "port")
        if self.sample_ratio is not None and not 0 <= self.sample_ratio <= 1:
            yield Problem(("sample_ratio",), f"must be from 0 to 1, got {self.sample_ratio}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileConfig(Checked):
    """Looking at where time goes."""

    from_step: int | None = None
    """Profile ten steps from this one on."""
    every_steps: int = 5000
    """Steps between profiles that are taken regularly."""
    cuda_steps: tuple[int, int] | None = None
    """First and last step that an outside profiler of CUDA records."""

    def problems(self) -> Iterator[Problem]:
        yield from not_negative(self, "from_step")
        yield from at_least(1, self, "every_steps")
        if self.cuda_steps is not None and not 0 <= self.cuda_steps[0] <= self.cuda_steps[1]:
            yield Problem(("cuda_steps",), f"must be a first and a last step, got {self.cuda_steps}")
