"""A whole run as one value: every choice that is not the model's own, in groups, checked together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from monolith.cluster.run_config.learning import (
    CheckpointConfig,
    DenseConfig,
    EmbeddingConfig,
    RestoreConfig,
    TideConfig,
    TrainingConfig,
)
from monolith.cluster.run_config.processes import (
    ClusterConfig,
    DiscoveryConfig,
    FailoverConfig,
    JobConfig,
    TimeoutsConfig,
)
from monolith.cluster.run_config.surroundings import (
    CandidatesConfig,
    DataConfig,
    DataServiceConfig,
    KafkaConfig,
    MetricsConfig,
    ProfileConfig,
    ServingConfig,
    SyncConfig,
)
from monolith.cluster.security import SecurityConfig
from monolith.config import Checked, Problem
from monolith.wire.limits import Limits


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig(Checked):
    """A whole run. Building one reads, writes and starts nothing; `settle` decides what None leaves open."""

    job: JobConfig = field(default_factory=JobConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    limits: Limits = field(default_factory=Limits)
    failover: FailoverConfig = field(default_factory=FailoverConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    dense: DenseConfig = field(default_factory=DenseConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    restore: RestoreConfig = field(default_factory=RestoreConfig)
    data: DataConfig = field(default_factory=DataConfig)
    kafka: KafkaConfig = field(default_factory=KafkaConfig)
    data_service: DataServiceConfig = field(default_factory=DataServiceConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    serving: ServingConfig = field(default_factory=ServingConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    tide: TideConfig = field(default_factory=TideConfig)
    candidates: CandidatesConfig = field(default_factory=CandidatesConfig)
    train: Mapping[str, Any] = field(default_factory=dict)
    """What else TrainConfig has and no group above: steps, max_steps, seed, metric_window, alert, ..."""

    @property
    def distributed(self) -> bool:
        """Whether there is more than this process."""
        return not self.job.local and (self.cluster.num_ps > 0 or self.cluster.num_workers > 1)

    def problems(self) -> Iterator[Problem]:
        several = ("job.local", "cluster.num_ps", "cluster.num_workers")
        if self.distributed and not self.job.model_dir:
            yield Problem(
                ("job.model_dir", *several),
                "model dir can't be empty: the processes share their files there; give one with --model-dir",
            )
        if self.distributed and self.discovery.kind == "zookeeper" and not self.job.name:
            yield Problem(
                ("job.name", "discovery.kind", *several), "processes meet in ZooKeeper under the job's name"
            )
        training, cluster = self.training, self.cluster
        if training.partially_synchronous and not self.job.local and cluster.num_ps == 0:
            yield Problem(
                ("training.partially_synchronous", "cluster.num_ps", "job.local"),
                "the tables are on parameter servers then, but num_ps is 0",
            )
        if training.synchronous or training.partially_synchronous:
            ways = ("training.synchronous", "training.partially_synchronous")
            if self.dense.prefetch:
                yield Problem(("dense.prefetch", *ways), "only asynchronous training may use old weights")
        if training.fully_synchronous and self.embedding.postpush:
            yield Problem(
                ("embedding.postpush", "training.synchronous", "training.partially_synchronous"),
                "rows would change out of step with other ranks; see training.defer_sparse_updates",
            )
        if training.realtime and cluster.role == "ps":
            for name, given in (
                ("job.business_id", self.job.business_id),
                ("sync.base_name", self.sync.base_name),
            ):
                if not given:
                    yield Problem(
                        (name, "training.realtime", "cluster.role"),
                        "a parameter server in real time must know which servers of requests to update",
                    )
