"""A whole run as one value: the configs of the packages that a run uses, and the checks between them.

Each field exists once, in the config of the package that obeys it: `train` is the `TrainConfig` that a
trainer takes, `kafka` the `KafkaConfig` of a source, `security` the credentials of listeners. So a file, a
flag (--train.save.steps), a variable (MONOLITH_TRAIN__SAVE__STEPS) and Python code use the same names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from monolith.cluster.security import SecurityConfig
from monolith.config import Checked, Problem, problems_in
from monolith.config.problems import at_least, not_negative
from monolith.config.reading import nearest
from monolith.data.config import DataConfig, DataServiceConfig
from monolith.data.kafka.config import KafkaConfig
from monolith.errors import ConfigError
from monolith.runtime.cluster_config import (
    ClusterConfig,
    DiscoveryConfig,
    FailoverConfig,
    JobConfig,
    TimeoutsConfig,
)
from monolith.serve.config import ServeConfig
from monolith.store.dense_config import DenseConfig
from monolith.sync.publish_config import PublishConfig
from monolith.table.config import AdmissionConfig
from monolith.train.candidates_config import CandidatesConfig
from monolith.train.config import RanksConfig, TrainConfig
from monolith.wire.ports import Limits

if TYPE_CHECKING:
    from monolith.feature import FeatureSpec
    from monolith.model.by_name import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadsConfig(Checked):
    """The number of threads that torch uses; None leaves it to torch."""

    intra_op: int | None = None
    """Threads that share one operation of torch. None is one for each core, or for every second one where a
    process of 8 cores or more computes on them: then the other cores read, and look rows up."""
    inter_op: int | None = None
    """Operations of torch that run at a time; None leaves it to torch."""

    def problems(self) -> Iterator[Problem]:
        yield from at_least(1, self, "intra_op", "inter_op")


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsConfig(Checked):
    """The metrics of this process for Prometheus, and its status for `monolith status watch`."""

    prefix: str | None = None
    """The prefix of metric names; None means monolith."""
    port: int | None = None
    """The port on which metrics are served to Prometheus; 0 takes a free one, None serves none. Of several
    processes that a launcher starts on one machine, only the first has it, and the rest take free ones."""
    host: str = "127.0.0.1"
    """The address of the metrics port. One that other machines can reach needs certificates or a token: see
    security."""
    status_every: timedelta | None = None
    """How often this process writes its status to status/ of the model_dir, for `monolith status`; 0 writes
    nothing, None takes 2 s, and 15 s in a model_dir that is remote."""

    def problems(self) -> Iterator[Problem]:
        yield from not_negative(self, "port", "status_every")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileConfig(Checked):
    """The steps that torch's profiler records."""

    from_step: int | None = None
    """The first of ten steps that are profiled; the profile is a file in the model_dir."""

    def problems(self) -> Iterator[Problem]:
        yield from not_negative(self, "from_step")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExamplesConfig:
    """Settings of the examples that features are read from; see `FeatureSpec`."""

    event_time: str | None = None
    """The column of each example's time, by which rows expire and time gaps are measured: texts in ISO 8601,
    which are UTC without a zone, timestamps, dates, or Unix times. An example without one does not move the
    clock."""
    event_time_unit: Literal["auto", "iso", "s", "ms", "us", "ns"] = "auto"
    """What numbers in columns of times count: seconds, milliseconds, microseconds or nanoseconds; or "iso"
    for texts in ISO 8601 alone. "auto" recognises each by its size or form, and a line of the log says so."""
    group: str | None = None
    """The feature of ids that groups examples for metrics by group, such as the user."""
    fids: bool = False
    """Whether ids carry the slot of their feature in their high bits, as fids of version 2."""
    optional: tuple[str, ...] = ()
    """Columns that the data may lack: they then read as empty cells, and a label is not there. A label that
    is not optional must be in every record: one without it is bad."""
    max_bad: float = 0.1
    """The fraction of records that may be bad, 0 to 1: left out and counted. More end the run."""

    @property
    def settings(self) -> dict[str, Any]:
        """All settings by name, as a FeatureSpec takes them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


RowCoding = Literal["fp32", "fp16", "int8", "int4"]

EXPORTED = "exported_models"
"""The default folder of servables, in the model_dir."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportConfig(Checked):
    """Servables of a run's checkpoints, for `monolith serve`."""

    when_saving: bool = False
    """Whether every checkpoint is exported when it is saved. An export that fails is logged and counted, and
    training continues."""
    dir: str | None = None
    """The folder that versions are written to, on a disk of this machine; None is exported_models in the
    model_dir."""
    keep: int | None = None
    """How many versions to keep, in addition to those that a server has loaded; None keeps the versions of
    all kept checkpoints."""
    coding: RowCoding = "fp32"
    """How the numbers of rows are written: fp16 takes half the memory, int8 about a quarter, int4 an eighth,
    and the error that they make is measured."""
    codings: Mapping[str, RowCoding] = field(default_factory=dict)
    """The coding of single tables that differ from `coding`."""
    shards: int = 0
    """How many serving servers the rows are split over; 0 keeps them with the rest of the model."""
    warm_up_file: str | None = None
    """A file of requests with which a server warms up, in place of rows of the evaluation data: JSON objects
    as /v2/models/NAME/infer takes them, one in each line, or warmup.json of another version. If there is no
    such file, a line says so."""
    missing_rows: Literal["refuse", "default"] = "refuse"
    """Whether a server answers with zeros in place of rows whose serving server does not answer, and says so;
    refuse answers with an error."""
    inputs: Literal["raw", "batch"] = "raw"
    """The inputs of a server: raw columns, as in the data; or, with "batch", IDs and floats as batches have
    them, hashed and scaled. A model whose batches are made by code of the task is refused with "raw"."""

    def problems(self) -> Iterator[Problem]:
        yield from at_least(1, self, "keep")
        yield from not_negative(self, "shards")


INPUTS = ("data", "kafka", "data_service", "admission", "candidates")
"""Groups that a task receives unchanged, each by a setting of its type."""

NEXT_ITEM = ("sasrec", "hstu", "gru4rec")
"""The types of ready models that learn which item comes next."""
RETRIEVAL = ("two_tower", *NEXT_ITEM)
"""The types of ready models that retrieve items, and are measured among all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig(Checked):
    """The config of a whole run.

    Building one reads, writes and starts nothing; `settle` decides what None leaves open.

    Examples:
        >>> from monolith import ClusterConfig, RunConfig, TrainConfig
        >>> config = RunConfig(cluster=ClusterConfig(num_ps=2), train=TrainConfig(model_dir="run"))
        >>> config.cluster.num_ps
        2
    """

    TITLE: ClassVar[str] = "the config"
    """The name of the config in error messages."""

    job: JobConfig = field(default_factory=JobConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    task: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the task, by name."""
    data: DataConfig | None = None
    """The files that the task reads; needs a task with a setting of type DataConfig."""
    kafka: KafkaConfig | None = None
    """The stream that the task reads; needs a task with a setting of type KafkaConfig."""
    data_service: DataServiceConfig | None = None
    """The data service that the task reads from; needs a task with a setting of type DataServiceConfig."""
    admission: AdmissionConfig | None = None
    """How ids earn their rows; needs a task with a setting of type AdmissionConfig."""
    features: Mapping[str, Any] = field(default_factory=dict)
    """The features that the model reads of raw data; needs a task with a setting of type FeatureSpec."""
    labels: Mapping[str, Any] = field(default_factory=dict)
    """The labels that the model learns to predict, by task; the default is the column `label`. Models of the
    next item (sasrec, hstu, gru4rec) need none; with some, items of records without a positive one are not
    picked."""
    examples: ExamplesConfig = field(default_factory=ExamplesConfig)
    model: Mapping[str, Any] = field(default_factory=dict)
    """A ready model: its type, such as deepfm, and its settings. With features and data it is a whole task;
    together with a task in Python, it needs a setting of type ModelConfig."""
    candidates: CandidatesConfig | None = None
    """The items that a two-tower model retrieves from; together with a task in Python, it needs a setting of
    type CandidatesConfig."""
    export: ExportConfig = field(default_factory=ExportConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    publish: PublishConfig = field(default_factory=PublishConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    dense: DenseConfig = field(default_factory=DenseConfig)
    ranks: RanksConfig = field(default_factory=RanksConfig)
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    limits: Limits = field(default_factory=Limits)
    failover: FailoverConfig = field(default_factory=FailoverConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    threads: ThreadsConfig = field(default_factory=ThreadsConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    @property
    def distributed(self) -> bool:
        """Whether the run has more processes than this one."""
        alone = self.job.local or self.job.cpu_test
        return not alone and (self.cluster.num_ps > 0 or self.cluster.num_workers > 1)

    @property
    def model_name(self) -> str:
        """The name of the model in the labels of metrics."""
        task = (self.job.task or "").rpartition(":")[2].rpartition(".")[2]
        return self.train.model_name or self.job.name or f"di_name_{task}"

    @property
    def has_data_service(self) -> bool:
        """Whether the run has a data service of its own, whose dispatcher its processes find."""
        service = self.data_service
        return service is not None and service.enabled and service.dispatcher is None and not self.job.local

    @property
    def retrieves(self) -> bool:
        """Whether the run is defined by its config alone, and its model retrieves items."""
        return self.job.task is None and self.model.get("type") in RETRIEVAL

    @property
    def inputs(self) -> dict[str, object]:
        """The groups that configure the task's data and rows: each is passed to the task's setting of its
        type."""
        groups = {name: getattr(self, name) for name in INPUTS}
        groups["features"] = self.feature_spec
        groups["model"] = self.model_config
        return {name: given for name, given in groups.items() if given is not None}

    @property
    def feature_spec(self) -> FeatureSpec | None:
        """The feature spec by which the model reads raw data; None if the config has no features.

        Raises:
            ConfigError: The features do not go together.
        """
        if not self.features:
            return None
        from monolith.feature import FeatureSpec  # which needs torch, and a run without features does not

        return FeatureSpec.from_dict(self._spec_settings, "the config")

    @property
    def _spec_settings(self) -> dict[str, Any]:
        # Every record of a history has an item that came next, so that none needs a label.
        unlabelled = self.model.get("type") in NEXT_ITEM
        labels = {"labels": self.labels} if self.labels or unlabelled else {}
        return {"features": self.features, **labels, **self.examples.settings}

    @property
    def model_config(self) -> ModelConfig | None:
        """The ready model; None if the config names none.

        Raises:
            ConfigError: There is no such model, or it has no such setting.
        """
        if not self.model:
            return None
        from monolith.model.by_name import ModelConfig  # which needs torch, as features do

        return ModelConfig.from_dict(self.model)

    def problems(self) -> Iterator[Problem]:
        several = ("job.local", "cluster.num_ps", "cluster.num_workers")
        if self.distributed and not self.train.model_dir:
            yield Problem(
                ("train.model_dir", *several),
                "model dir can't be empty: the processes of a run share their files there; set --model-dir",
            )
        if self.distributed and self.discovery.kind == "zookeeper" and not self.job.name:
            yield Problem(
                ("job.name", "discovery.kind", *several),
                "discovery by ZooKeeper needs job.name: the processes meet under the job's name",
            )
        if not self.features and (self.labels or self.examples != ExamplesConfig()):
            yield Problem(
                ("labels", "examples"), "these go with features; name some, as in [features.user_id]"
            )
        try:
            if self.features:
                _check_features(_Written(repr(self._spec_settings), self._spec_settings))
        except ConfigError as error:
            yield from problems_in(("features", "labels", "examples"), error)
        if self.distributed and self.cluster.mode == "sync":
            yield from self._problems_of_ranks()
        try:
            self.model_config  # noqa: B018
        except ConfigError as error:
            yield from problems_in(("model",), error)
        yield from self._unknown_settings()
        if self.model and self.job.task is None and not self.features:
            yield Problem(
                ("features", "model", "job.task"),
                "a model without a task of its own reads features; name some, as in [features.user_id]",
            )
        if self.model and self.job.task is None and self.data is None:
            yield Problem(
                ("data", "model", "job.task"),
                'a model without a task of its own reads files; say which, as in [data] path = "clicks.csv"',
            )
        if self.data is not None and self.data.live and self.train.epochs is not None:
            yield Problem(
                ("train.epochs", "data.watch", "data.kafka"),
                "a stream is read once, as it comes: leave train.epochs out; or, to read the files that are "
                "there several times, give them as data.path",
            )
        if self.retrieves and self.candidates is None:
            yield Problem(
                ("candidates", "model", "job.task"),
                f"a model of type {self.model.get('type')} is measured among all items; say where they are, "
                'as in [candidates] path = "items.csv"',
            )
        if self.candidates is not None and self.model and self.job.task is None and not self.retrieves:
            yield Problem(
                ("candidates", "model", "job.task"),
                f"candidates are of models that retrieve items ({', '.join(RETRIEVAL)}); this one scores "
                "what the data has",
            )
        topics = [self.kafka, None if self.data is None else self.data.kafka]
        for name in [name for one in topics if one is not None for name in one.settings]:
            if re.search("password|secret|token", name) and not name.endswith("location"):
                yield Problem(
                    ("kafka.settings",), f"{name!r} would be printed; give a password as kafka.password"
                )

    def _unknown_settings(self) -> Iterator[Problem]:
        """Yield the settings that the task of a config without a task of its own does not have."""
        if not self.model or self.job.task is not None or not self.task:
            return
        from monolith.runtime.config_task import ConfigRetrievalTask, ConfigTask  # which need torch

        known = [one.name for one in fields(ConfigRetrievalTask if self.retrieves else ConfigTask)]
        for name in dict.fromkeys(path.partition(".")[0] for path in self.task):
            if name not in known:
                near = nearest(name, known)
                yield Problem((f"task.{name}",), f"unknown key; the nearest known key is task.{near}")

    def _problems_of_ranks(self) -> Iterator[Problem]:
        """Yield what does not go together with ranks, or with ranks whose rows are on servers."""
        ranks = ("cluster.mode", "cluster.num_ps")
        if self.dense != DenseConfig():
            yield Problem(
                ("dense", *ranks),
                "every rank has all of the weights and averages their gradients in each step; nothing is "
                "fetched or pushed. Leave dense out, or set cluster.mode to async",
            )
        if self.failover.recovery == "keep_going":
            yield Problem(
                ("failover.recovery", *ranks),
                "ranks continue from the same step or not at all: a rank that kept its weights while the "
                "other ranks rolled back to the last checkpoint would train rows that its weights do not "
                "fit. Set it to exact, or cluster.mode to async",
            )
        if self.cluster.num_ps and self.discovery.kind == "mpi":
            yield Problem(
                ("discovery.kind", *ranks),
                "the ranks of mpirun meet in a folder that the parameter servers, which mpirun did not "
                "start, do not know; name a registry that both reach, such as files",
            )


@dataclass(frozen=True, slots=True)
class _Written:
    """Settings that are compared by how they are written."""

    text: str
    settings: Mapping[str, Any] = field(compare=False)


@lru_cache(maxsize=8)
def _check_features(written: _Written) -> None:
    """Raise a ConfigError if features do not go together.

    A start makes several copies of its config with the same features; to read 200 of them takes 0.2 s.
    """
    from monolith.feature import FeatureSpec

    FeatureSpec.from_dict(written.settings, "the config")


CONFIG_TASK = "monolith.runtime.config_task:ConfigTask"
"""The task of a run whose config has a model and names no task."""

RETRIEVAL_TASK = "monolith.runtime.config_task:ConfigRetrievalTask"
"""The task of such a run if its model retrieves items."""


def as_cpu_test(config: RunConfig) -> RunConfig:
    """Return the config of a run on one CPU if `job.cpu_test` asks for a test of the task."""
    if not config.job.cpu_test:
        return config
    train = replace(config.train, accelerator="cpu", embedding_device="host", device_memory_bytes=None)
    return replace(config, job=replace(config.job, local=True), train=train)


def settle(config: RunConfig) -> RunConfig:
    """Return the config with every value decided that None left open."""
    job, timeouts = config.job, config.timeouts
    if config.model and job.task is None:
        job = replace(job, task=RETRIEVAL_TASK if config.retrieves else CONFIG_TASK)
    if timeouts.operation is None:
        timeouts = replace(timeouts, operation=timeouts.lookup)
    return replace(config, job=job, timeouts=timeouts, train=_with_hours(config.train))


def _with_hours(train: TrainConfig) -> TrainConfig:
    """A run with an interval for saves outside of its daily window continues there, and does not end."""
    if train.hours is None or train.save.hours is not None or train.save.secs_outside_hours is None:
        return train
    return replace(train, hours=None, save=replace(train.save, hours=train.hours))
