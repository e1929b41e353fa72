"""A whole run as one value: what file, flags, variables and old names say, in the fields of the rooms.

Nothing here needs torch, so that a launcher, `monolith config` and `--help` answer at once.
"""

from monolith.run.config import MetricsConfig, ProfileConfig, RunConfig, ThreadsConfig
from monolith.run.loading import check_run, load_run_config, read_run, refused
from monolith.run.old_names import ALIASES, FLAGS_OF_OTHERS, OLD_NAMES
from monolith.run.processes import ClusterConfig, DiscoveryConfig, FailoverConfig, JobConfig, TimeoutsConfig
from monolith.run.settling import settle

__all__ = [
    "ALIASES",
    "FLAGS_OF_OTHERS",
    "OLD_NAMES",
    "ClusterConfig",
    "DiscoveryConfig",
    "FailoverConfig",
    "JobConfig",
    "MetricsConfig",
    "ProfileConfig",
    "RunConfig",
    "ThreadsConfig",
    "TimeoutsConfig",
    "check_run",
    "load_run_config",
    "read_run",
    "refused",
    "settle",
]
