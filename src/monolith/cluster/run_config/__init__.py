"""One configuration for every way to run: typed, in groups, read by new names and old."""

from monolith.cluster.run_config.aliases import ALIASES, FLAGS_OF_OTHERS
from monolith.cluster.run_config.learning import (
    CheckpointConfig,
    DenseConfig,
    EmbeddingConfig,
    FilterConfig,
    RestoreConfig,
    TideConfig,
    TrainingConfig,
)
from monolith.cluster.run_config.loading import USER_DEFAULTS, load_run_config, read_tables, said_fields
from monolith.cluster.run_config.processes import (
    ClusterConfig,
    DiscoveryConfig,
    FailoverConfig,
    JobConfig,
    TimeoutsConfig,
)
from monolith.cluster.run_config.run import RunConfig
from monolith.cluster.run_config.settling import for_rank, settle, settle_for_user
from monolith.cluster.run_config.surroundings import (
    CandidatesConfig,
    DataConfig,
    DataServiceConfig,
    FramingConfig,
    KafkaConfig,
    MetricsConfig,
    ProfileConfig,
    ServingConfig,
    SyncConfig,
)

__all__ = [
    "ALIASES",
    "FLAGS_OF_OTHERS",
    "USER_DEFAULTS",
    "CandidatesConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "DataConfig",
    "DataServiceConfig",
    "DenseConfig",
    "DiscoveryConfig",
    "EmbeddingConfig",
    "FailoverConfig",
    "FilterConfig",
    "FramingConfig",
    "JobConfig",
    "KafkaConfig",
    "MetricsConfig",
    "ProfileConfig",
    "RestoreConfig",
    "RunConfig",
    "ServingConfig",
    "SyncConfig",
    "TideConfig",
    "TimeoutsConfig",
    "TrainingConfig",
    "for_rank",
    "load_run_config",
    "read_tables",
    "said_fields",
    "settle",
    "settle_for_user",
]
