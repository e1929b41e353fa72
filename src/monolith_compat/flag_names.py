"""Names of the original system's configuration: a run that finds this package reads them, too.

`ALIASES` has every field of the original's three configs. `OTHER_FLAGS` has the flags that it defined in
other files: its runners, its data service, its environment. Each name sets a field of `RunConfig`, or says
why there is no such field. `monolith.runtime.config_loading` finds `CONFIG_NAMES` through an entry point.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from monolith.config import Dropped, Renamed, Unsupported
from monolith.errors import ConfigError
from monolith.runtime.cluster_config import NO_LIMIT, FailoverConfig
from monolith.runtime.config_loading import OldNames
from monolith.train.config import RanksConfig


def milliseconds(value: object) -> object:
    """A number of milliseconds as a duration; a negative one meant no limit, which a lookup always has."""
    number = _number(value)
    if number is None:
        return value
    if number < 0:
        raise ConfigError(
            "a lookup without a limit would wait forever for a server that hangs; name one, or leave it out"
        )
    return f"{value}ms"


def milliseconds_or_never(value: object) -> object:
    """A number of milliseconds as a duration; a negative one meant no limit."""
    number = _number(value)
    return NO_LIMIT if number is not None and number < 0 else milliseconds(value)


def allreduce_bucket(value: object) -> object:
    """How gradients were put together before they were added up, as the bytes that are sent at a time."""
    fusion = str(value).strip().lower()
    sizes = {"": 0, "none": 0, "0": 0, "false": 0, "one": 1 << 40, "1": 1 << 40, "true": 1 << 40}
    sizes["grouped"] = RanksConfig().bucket_bytes
    if fusion not in sizes:
        raise ConfigError(f"must be none, one or grouped, got {value!r}; or set ranks.bucket_bytes")
    return sizes[fusion]


def minutes(value: object) -> object:
    """A number of minutes as a duration."""
    return value if _number(value) is None else f"{value}m"


def zero_is_default(value: object) -> object:
    """0 meant that the number of retries follows from other fields."""
    return FailoverConfig().max_retries if _number(value) == 0 else value


def recovery_mode(value: object) -> object:
    """Partial recovery was a switch, and nothing where the job decided."""
    text = str(value).strip().lower()
    if text in ("", "0", "false", "no", "off", "none"):
        return "exact"
    return "keep_going" if text in ("1", "true", "yes", "on") else value


def cuda_or_open(value: object) -> object:
    """Whether to train on a GPU was a switch."""
    switch = str(value).strip().lower()
    if switch in ("", "0", "false", "no", "off", "none"):
        return None
    return "cuda" if switch in ("1", "true", "yes", "on") else value


def in_step(value: object) -> object:
    """Training in step was a switch."""
    text = str(value).strip().lower()
    if text in ("", "0", "false", "no", "off", "none"):
        return "async"
    return "sync" if text in ("1", "true", "yes", "on") else value


def empty_is_open(value: object) -> object:
    """Empty text meant that nothing was chosen."""
    return None if value == "" else value


def listed(value: object) -> object:
    """Names with commas between them."""
    if not isinstance(value, str):
        return value
    return tuple(name.strip() for name in value.split(",") if name.strip())


def from_json(value: object) -> object:
    """A table written as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else {}
    except ValueError as cause:
        raise ConfigError(f"malformed JSON: {cause}") from cause


def turned_round(value: object) -> object:
    """A table from old names of weights to new ones, as one from new names to old."""
    table = from_json(value)
    if not isinstance(table, Mapping):
        return table
    turned = {str(new): old for old, new in table.items()}
    if len(turned) < len(table):
        new = next(each for each in turned if [*map(str, table.values())].count(each) > 1)
        raise ConfigError(f"two old names become {new}; which one is it?")
    return turned


def queue_folder(value: object) -> object:
    """Dynamic sharding was a switch, and needs a folder now."""
    if str(value).strip().lower() in ("", "0", "false", "no", "off", "none"):
        return None
    raise ConfigError(
        "workers take files from a queue in a folder that all of them see: name it as data.queue"
    )


def publish_place(value: object) -> object:
    """Sending changed rows to servers was a switch, and needs a place now."""
    if str(value).strip().lower() in ("", "0", "false", "no", "off", "none"):
        return None
    raise ConfigError(
        "servers read what a run publishes, and no registry finds them for it: say where to publish, as "
        "publish.to, and start them with `monolith serve DIR --follow`"
    )


@dataclass(frozen=True, slots=True)
class Words:
    """Old words for values -> new ones, in any case."""

    words: Mapping[str, str]

    def __call__(self, value: object) -> object:
        return self.words.get(value.lower(), value.lower()) if isinstance(value, str) else value


DISCOVERY_WORDS = Words({"primus": "tf_config", "zk": "zookeeper"})
FORMAT_WORDS = Words(
    {"instance": "framed_instance", "example": "framed_example", "examplebatch": "framed_example_batch"}
)

_CALLS = "it tuned TensorFlow's own remote calls; ours need no such number"

_OVERLAP = (
    "ranks exchange rows ahead of and behind the dense half of a step anyway, by train.prefetch and "
    "train.async_push, in an order that gives the same results as without"
)
_FOLLOWED = (
    "nothing is sent to servers by name: each reads what the run publishes, by `monolith serve DIR --follow` "
    "with the place that publish.to says"
)
_ITEMS = "no run reads all items after training; `monolith export embeddings` does, with candidates.path"
_FOUNTAIN = "Fountain is a service inside ByteDance; see data_service and kafka"

ALIASES: Mapping[str, Renamed | Dropped | Unsupported] = {
    # CpuTrainingConfig
    "server_type": Renamed("cluster.role"),
    "index": Renamed("cluster.index"),
    "num_ps": Renamed("cluster.num_ps"),
    "num_workers": Renamed("cluster.num_workers"),
    "model_name": Renamed("train.model_name"),
    "filter_capacity": Renamed("admission.capacity"),
    "filter_split_num": Renamed("admission.split_num"),
    "filter_type": Renamed("admission.kind"),
    "filter_equal_probability": Renamed("admission.equal"),
    "hashtable_init_capacity": Renamed("train.tables.initial_rows"),
    "use_native_multi_hash_table": Dropped("a store looks up all tables at once, whatever they are"),
    "embedding_prefetch_capacity": Renamed("train.prefetch"),
    "enable_embedding_postpush": Renamed("train.async_push"),
    "enable_variable_prefetch": Renamed("dense.prefetch"),
    "enable_variable_postpush": Renamed("dense.postpush"),
    "enable_sync_training": Renamed("cluster.mode", in_step),
    "enable_partial_sync_training": Renamed("cluster.mode", in_step, off_is_nothing=True),
    "enable_gpu_training": Renamed("train.accelerator", cuda_or_open),
    "processes_per_gpu": Unsupported(
        "a GPU belongs to one rank; start as many ranks as there are GPUs", default=1
    ),
    "merge_sync_training_ckpt": Unsupported(
        "all processes of a run write one checkpoint; there is no other way", default=True
    ),
    "mode": Renamed("job.command"),
    "partial_recovery": Renamed("failover.recovery", recovery_mode),
    "tide_start_hour": Renamed("train.hours.start_hour"),
    "tide_start_minute": Renamed("train.hours.start_minute"),
    "tide_end_hour": Renamed("train.hours.end_hour"),
    "tide_end_minute": Renamed("train.hours.end_minute"),
    "tide_save_secs": Renamed("train.save.secs_outside_hours"),
    "enable_realtime_training": Renamed("publish.to", publish_place),
    "enable_async_optimize": Dropped(_OVERLAP),
    "enable_pipelined_fwda2a": Dropped(_OVERLAP),
    "enable_pipelined_bwda2a": Dropped(_OVERLAP),
    "profile_some_steps_from": Renamed("profile.from_step"),
    "profile_save_steps_interval": Unsupported(
        "profiles are not taken regularly; name their first step with profile.from_step", default=5000
    ),
    "profile_with_nvprof_from_to": Unsupported(
        "no outside profiler is told when to record; torch's own does, from profile.from_step on"
    ),
    "reorder_fids_in_data_pipeline": Dropped(
        "a lookup removes duplicate ids and sorts them by server anyway"
    ),
    "chief_timeout_secs": Renamed("timeouts.finish"),
    "save_checkpoints_secs": Renamed("train.save.secs"),
    "save_checkpoints_steps": Renamed("train.save.steps"),
    "dense_only_save_checkpoints_secs": Renamed("train.dense_save.secs"),
    "dense_only_save_checkpoints_steps": Renamed("train.dense_save.steps"),
    "dense_only_stop_training_when_save": Unsupported("dense weights are saved without holding the workers"),
    "warmup_file": Renamed("export.warm_up_file", empty_is_open),
    "skip_zero_embedding_when_serving": Dropped(
        "it saved memory; served rows are a mapped file, of which only the rows that are read take memory"
    ),
    "max_rpc_deadline_millis": Renamed("timeouts.lookup", milliseconds),
    "checkpoints_max_to_keep": Renamed("train.keep.max_to_keep"),
    "submit_time_secs": Renamed("train.submitted_at"),
    "containers_ready_time_secs": Dropped("the chief takes the time itself, when all processes are there"),
    "cluster_type": Renamed("cluster.kind"),
    "max_slow_start_wait_minute": Renamed("train.hooks.slow_start_max_wait", minutes),
    "enable_model_ckpt_info": Dropped("a checkpoint always has the number of ids of each slot next to it"),
    "feature_eviction_on_save": Renamed("train.keep.evict"),
    "only_feature_engineering": Renamed("job.dump_features"),
    "enable_variable_partition": Dropped(
        "weights are shared out by size, the largest first to the server that has least; none is split"
    ),
    "enable_fused_layout": Dropped("all features of a batch are looked up and laid out in one call anyway"),
    "force_shutdown_ps": Dropped("servers always end with the run"),
    "clear_nn": Renamed("train.restore.reset_dense"),
    "continue_training": Renamed("train.restore.continue_training"),
    "reload_alias_map": Renamed("train.restore.alias_map", turned_round),
    "enable_alias_map_auto_gen": Renamed("train.restore.auto_alias"),
    "enable_model_dump": Renamed("export.when_saving"),
    "enable_resource_constrained_roughsort": Unsupported(_ITEMS),
    "roughsort_candidate_items_path": Unsupported(_ITEMS),
    "roughsort_items_use_parquet": Unsupported(_ITEMS),
    "items_input_lagrangex_header": Unsupported(_ITEMS),
    "items_input_has_sort_id": Unsupported(_ITEMS),
    "items_input_kafka_dump": Unsupported(_ITEMS),
    "items_input_kafka_dump_prefix": Unsupported(_ITEMS),
    "device_fn": Dropped("a module computes where the task has moved it to"),
    "use_dataservice": Renamed("data_service.enabled"),
    "num_extra_dsworker_on_gpu_worker": Renamed("data_service.extra_workers"),
    "save_summary_steps": Renamed("train.summary_every_steps"),
    "log_step_count_steps": Renamed("train.report_every_steps"),
    # DistributedCpuTrainingConfig
    "model_dir": Renamed("train.model_dir"),
    "tensorboard_log_path": Renamed("train.tracking.tensorboard_dir"),
    "intra_op_parallelism_threads": Renamed("threads.intra_op"),
    "inter_op_parallelism_threads": Renamed("threads.inter_op"),
    "num_extra_ps": Renamed("cluster.num_extra_ps"),
    "num_redundant_ps": Renamed("cluster.num_redundant_ps"),
    "uuid": Renamed("job.id"),
    "operation_timeout_in_ms": Renamed("timeouts.operation", milliseconds_or_never),
    "session_creation_timeout_secs": Renamed("timeouts.start"),
    "max_retry_times": Renamed("failover.max_retries", zero_is_default),
    "retry_wait_in_secs": Renamed("failover.wait"),
    "fountain_zk_host": Dropped(_FOUNTAIN),
    "fountain_model_name": Dropped(_FOUNTAIN),
    "dc_aware": Unsupported(_FOLLOWED),
    # RunnerConfig
    "task": Renamed("job.task", beside_table=True),
    "tf_config": Renamed("discovery.tf_config", empty_is_open),
    "deep_insight_name": Renamed("job.name", empty_is_open),
    "discovery_type": Renamed("discovery.kind", DISCOVERY_WORDS),
    "zk_server": Renamed("discovery.zookeeper", empty_is_open),
    "zk_watch_address_family": Unsupported(_FOLLOWED, default="ipv4"),
    "is_local": Renamed("job.local"),
    "enable_fid_dedup": Dropped("an id that a batch has twice is always sent once"),
    "bzid": Unsupported(_FOLLOWED),
    "ps_replica_num": Unsupported(_FOLLOWED),
    "tf_grpc_worker_cache_threads": Dropped(_CALLS),
    "monolith_grpc_worker_service_handler_multiplier": Dropped(_CALLS),
    "params_override": Renamed("task", from_json),
    "base_name": Unsupported(_FOLLOWED),
    "data_type": Renamed("data.format", FORMAT_WORDS),
    "feature_list": Renamed("data.columns", listed),
    "sort_id": Renamed("data.sort_id"),
    "restore_dir": Renamed("train.restore.dir", empty_is_open),
    "restore_ckpt": Renamed("train.restore.checkpoint", empty_is_open),
    "deep_insight_target": Renamed("train.hooks.deep_insight.targets", listed),
    "deep_insight_sample_ratio": Renamed("train.hooks.deep_insight.sample_ratio"),
    "unified_serving": Unsupported(_FOLLOWED),
    "use_estimator": Dropped("there is one way to train, without TensorFlow's estimator"),
    "kafka_topics": Renamed("kafka.topics", listed),
    "kafka_group_id": Renamed("kafka.group"),
    "kafka_servers": Renamed("kafka.servers", listed),
    "input_path": Renamed("data.path"),
    "is_hourly": Renamed("data.hourly"),
    "wildcard": Renamed("data.pattern"),
    "start_date": Renamed("data.start_date"),
    "end_date": Renamed("data.end_date"),
    "start_hour": Renamed("data.start_hour"),
    "end_hour": Renamed("data.end_hour"),
    "enable_dynamic_sharding": Renamed("data.queue", queue_folder),
    "max_task_num_per_worker": Unsupported("a worker reads one file at a time", default=1),
    "disable_native_metrics": Unsupported("the core has no metrics of its own", default=True),
    "lagrangex_header": Renamed("data.lagrangex"),
    "kafka_dump": Renamed("data.kafka_dump"),
    "kafka_dump_prefix": Renamed("data.kafka_dump_prefix"),
}
"""Old name -> where the field is now, or why there is none."""

_TPU = (
    "a task runs on a TPU by train.accelerator = xla; torch_xla finds the device, and compiles what a step "
    "computes, by itself"
)

_TORCH_DISTRIBUTED = "ranks exchange gradients through torch.distributed"

OTHER_FLAGS: Mapping[str, Renamed | Dropped | Unsupported] = {
    "dataset_use_dataservice": Renamed("data_service.enabled"),
    "data_service_dispatcher": Renamed("data_service.dispatcher"),
    "enable_parameter_sync": Renamed("publish.to", publish_place),
    "metric_prefix": Renamed("metrics.prefix"),
    "save_summary_interval": Renamed("train.summary_every_steps"),
    "root_log_interval": Renamed("train.report_every_steps"),
    "overwrite_end_date": Renamed("job.override_end_date", empty_is_open),
    "enable_local_profiling": Dropped("name the first step with profile.from_step"),
    "tf_version": Dropped("there is no TensorFlow"),
    "tpu": Dropped(_TPU),
    "gcp_project": Dropped(_TPU),
    "tpu_zone": Dropped(_TPU),
    "iterations_per_loop": Dropped(_TPU),
    "pipeline_execution": Dropped(_TPU),
    "enable_tpu_version_config": Dropped(_TPU),
    "host_call_every_n_steps": Dropped(_TPU),
    "enable_stopping_signals": Dropped(_TPU),
    "cpu_test": Renamed("job.cpu_test"),
    "partition_strategy": Dropped("an id's shard is its remainder; there is no other way"),
    "with_horovod": Dropped("ranks are taken from the environment that MPI or torchrun sets"),
    "with_byteps": Dropped(_TORCH_DISTRIBUTED),
    "with_byteps_allreduce": Dropped(_TORCH_DISTRIBUTED),
    "with_allreduce_fusion": Renamed("ranks.bucket_bytes", allreduce_bucket),
    "with_allreduce_fp16": Renamed("ranks.half_gradients"),
    "skip_allreduce": Renamed("ranks.skip_allreduce"),
    "sync_empty_rank0_ps_shard": Dropped(
        "rank 0 holds its share of the rows, as every rank does: it is not busier than the other ranks"
    ),
}
"""Old flags, and variables less their MONOLITH_, that no config had."""

OLD_NAMES: Mapping[str, Renamed | Dropped | Unsupported] = {**OTHER_FLAGS, **ALIASES}

_PATHS_WITHOUT_FIELD = {
    "job.business_id": "bzid",
    "cluster.force_ps_shutdown": "force_shutdown_ps",
    "discovery.address_family": "zk_watch_address_family",
    "training.processes_per_gpu": "processes_per_gpu",
    "training.defer_sparse_updates": "enable_async_optimize",
    "training.overlap_forward": "enable_pipelined_fwda2a",
    "training.overlap_backward": "enable_pipelined_bwda2a",
    "embedding.fused_layout": "enable_fused_layout",
    "embedding.dedup": "enable_fid_dedup",
    "dense.partition": "enable_variable_partition",
    "checkpoint.dense_barrier": "dense_only_stop_training_when_save",
    "checkpoint.merge_ranks": "merge_sync_training_ckpt",
    "checkpoint.count_fids": "enable_model_ckpt_info",
    "data.tasks_per_worker": "max_task_num_per_worker",
    "data.reorder_fids": "reorder_fids_in_data_pipeline",
    "sync": "base_name",
    "serving.dump_model": "enable_model_dump",
    "metrics.native": "disable_native_metrics",
    "metrics.log_every_steps": "log_step_count_steps",
    "metrics.tensorboard_dir": "tensorboard_log_path",
    "profile.every_steps": "profile_save_steps_interval",
    "profile.cuda_steps": "profile_with_nvprof_from_to",
}
"""Former path -> the old name that says why there is no such field."""


CONFIG_NAMES = OldNames(
    names=OLD_NAMES, paths={path: OLD_NAMES[old] for path, old in _PATHS_WITHOUT_FIELD.items()}
)
"""The value of the entry point by which a run finds these names."""


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None
