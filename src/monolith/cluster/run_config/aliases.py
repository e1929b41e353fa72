"""The names that fields had in ByteDance's Monolith, so that its files, flags and habits still work.

`ALIASES` has every field of its three configs. `FLAGS_OF_OTHERS` has flags that were defined
elsewhere: by its runners, its data service, its environment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from monolith.config import Dropped, Renamed
from monolith.errors import ConfigError


def milliseconds(value: object) -> object:
    """A number of milliseconds as a duration; a negative one meant no limit."""
    return _duration(value, "ms")


def minutes(value: object) -> object:
    """A number of minutes as a duration."""
    return _duration(value, "m")


def zero_is_open(value: object) -> object:
    """0 meant that the number follows from other fields."""
    return None if _number(value) == 0 else value


def empty_is_open(value: object) -> object:
    """Empty text meant that nothing was chosen."""
    return None if value == "" else value


def listed(value: object) -> object:
    """Names with commas between them."""
    if not isinstance(value, str):
        return value
    return tuple(name.strip() for name in value.split(",") if name.strip())


def numbers(value: object) -> object:
    """Numbers with commas between them."""
    return [_whole(name) for name in value.split(",")] if isinstance(value, str) else value


def opposite(value: object) -> object:
    """The field says the opposite of its old name."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str) and value.lower() in ("true", "1", "yes", "on", "false", "0", "no", "off"):
        return "false" if value.lower() in ("true", "1", "yes", "on") else "true"
    return value


def from_json(value: object) -> object:
    """A table written as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else {}
    except ValueError as cause:
        raise ConfigError(f"malformed JSON: {cause}") from cause


@dataclass(frozen=True, slots=True)
class Words:
    """Old words for values -> new ones, in any case."""

    words: Mapping[str, str]

    def __call__(self, value: object) -> object:
        return self.words.get(value.lower(), value.lower()) if isinstance(value, str) else value


DISCOVERY_WORDS = Words({"primus": "tf_config", "zk": "zookeeper"})
RECORD_WORDS = Words({"examplebatch": "example_batch"})

_CALLS = "it tuned TensorFlow's own remote calls; ours need no such number"

ALIASES: Mapping[str, Renamed | Dropped] = {
    # CpuTrainingConfig
    "server_type": Renamed("cluster.role"),
    "index": Renamed("cluster.index"),
    "num_ps": Renamed("cluster.num_ps"),
    "num_workers": Renamed("cluster.num_workers"),
    "model_name": Renamed("job.model_name"),
    "filter_capacity": Renamed("embedding.filter.capacity"),
    "filter_split_num": Renamed("embedding.filter.splits"),
    "filter_type": Renamed("embedding.filter.kind"),
    "filter_equal_probability": Renamed("embedding.filter.equal_probability"),
    "hashtable_init_capacity": Renamed("embedding.initial_capacity"),
    "use_native_multi_hash_table": Dropped("a store looks up all tables at once, whatever they are"),
    "embedding_prefetch_capacity": Renamed("embedding.prefetch"),
    "enable_embedding_postpush": Renamed("embedding.postpush"),
    "enable_variable_prefetch": Renamed("dense.prefetch"),
    "enable_variable_postpush": Renamed("dense.postpush"),
    "enable_sync_training": Renamed("training.synchronous"),
    "enable_partial_sync_training": Renamed("training.partially_synchronous"),
    "enable_gpu_training": Renamed("training.gpu"),
    "processes_per_gpu": Renamed("training.processes_per_gpu"),
    "merge_sync_training_ckpt": Renamed("checkpoint.merge_ranks"),
    "mode": Renamed("job.mode"),
    "partial_recovery": Renamed("failover.partial_recovery"),
    "tide_start_hour": Renamed("tide.start_hour"),
    "tide_start_minute": Renamed("tide.start_minute"),
    "tide_end_hour": Renamed("tide.end_hour"),
    "tide_end_minute": Renamed("tide.end_minute"),
    "tide_save_secs": Renamed("tide.save_every"),
    "enable_realtime_training": Renamed("training.realtime"),
    "enable_async_optimize": Renamed("training.defer_sparse_updates"),
    "enable_pipelined_fwda2a": Renamed("training.overlap_forward"),
    "enable_pipelined_bwda2a": Renamed("training.overlap_backward"),
    "profile_some_steps_from": Renamed("profile.from_step"),
    "profile_save_steps_interval": Renamed("profile.every_steps"),
    "profile_with_nvprof_from_to": Renamed("profile.cuda_steps", numbers),
    "reorder_fids_in_data_pipeline": Renamed("data.reorder_fids"),
    "chief_timeout_secs": Renamed("timeouts.finish"),
    "save_checkpoints_secs": Renamed("checkpoint.every"),
    "save_checkpoints_steps": Renamed("checkpoint.every_steps"),
    "dense_only_save_checkpoints_secs": Renamed("checkpoint.dense_every"),
    "dense_only_save_checkpoints_steps": Renamed("checkpoint.dense_every_steps"),
    "dense_only_stop_training_when_save": Renamed("checkpoint.dense_barrier"),
    "warmup_file": Renamed("serving.warmup_file"),
    "skip_zero_embedding_when_serving": Renamed("serving.skip_zero_rows"),
    "max_rpc_deadline_millis": Renamed("timeouts.lookup", milliseconds),
    "checkpoints_max_to_keep": Renamed("checkpoint.keep"),
    "submit_time_secs": Renamed("job.submitted_at"),
    "containers_ready_time_secs": Dropped("the chief takes the time itself, when all processes are there"),
    "cluster_type": Renamed("cluster.kind"),
    "max_slow_start_wait_minute": Renamed("timeouts.slow_start", minutes),
    "enable_model_ckpt_info": Renamed("checkpoint.count_fids"),
    "feature_eviction_on_save": Renamed("checkpoint.evict_expired"),
    "only_feature_engineering": Renamed("data.dump_features_only"),
    "enable_variable_partition": Renamed("dense.partition"),
    "enable_fused_layout": Renamed("embedding.fused_layout"),
    "force_shutdown_ps": Renamed("cluster.force_ps_shutdown"),
    "clear_nn": Renamed("restore.reset_dense"),
    "continue_training": Renamed("restore.keep_step"),
    "reload_alias_map": Renamed("restore.renamed", from_json),
    "enable_alias_map_auto_gen": Renamed("restore.guess_renamed"),
    "enable_model_dump": Renamed("serving.dump_model"),
    "enable_resource_constrained_roughsort": Renamed("candidates.enabled"),
    "roughsort_candidate_items_path": Renamed("candidates.path"),
    "roughsort_items_use_parquet": Renamed("candidates.parquet"),
    "items_input_lagrangex_header": Renamed("candidates.framing.lagrangex"),
    "items_input_has_sort_id": Renamed("candidates.framing.sort_id"),
    "items_input_kafka_dump": Renamed("candidates.framing.kafka_dump"),
    "items_input_kafka_dump_prefix": Renamed("candidates.framing.kafka_dump_prefix"),
    "device_fn": Dropped("a module computes where it was moved to; training.gpu allows a GPU"),
    "use_dataservice": Renamed("data_service.enabled"),
    "num_extra_dsworker_on_gpu_worker": Renamed("data_service.extra_workers"),
    "save_summary_steps": Renamed("metrics.summary_every_steps"),
    "log_step_count_steps": Renamed("metrics.log_every_steps"),
    # DistributedCpuTrainingConfig
    "model_dir": Renamed("job.model_dir"),
    "tensorboard_log_path": Renamed("metrics.tensorboard_dir"),
    "intra_op_parallelism_threads": Renamed("training.intra_op_threads"),
    "inter_op_parallelism_threads": Renamed("training.inter_op_threads"),
    "num_extra_ps": Renamed("cluster.num_extra_ps"),
    "num_redundant_ps": Renamed("cluster.num_redundant_ps"),
    "uuid": Renamed("job.id"),
    "operation_timeout_in_ms": Renamed("timeouts.operation", milliseconds),
    "session_creation_timeout_secs": Renamed("timeouts.start"),
    "max_retry_times": Renamed("failover.max_retries", zero_is_open),
    "retry_wait_in_secs": Renamed("failover.wait"),
    "fountain_zk_host": Dropped("Fountain is a service inside ByteDance; see data_service and kafka"),
    "fountain_model_name": Dropped("Fountain is a service inside ByteDance; see data_service and kafka"),
    "dc_aware": Renamed("sync.data_center_aware"),
    # RunnerConfig
    "task": Renamed("job.task"),
    "tf_config": Renamed("discovery.tf_config", empty_is_open),
    "deep_insight_name": Renamed("job.name", empty_is_open),
    "discovery_type": Renamed("discovery.kind", DISCOVERY_WORDS),
    "zk_server": Renamed("discovery.zookeeper", empty_is_open),
    "zk_watch_address_family": Renamed("discovery.address_family"),
    "is_local": Renamed("job.local"),
    "enable_fid_dedup": Renamed("embedding.dedup"),
    "bzid": Renamed("job.business_id"),
    "ps_replica_num": Renamed("sync.ps_replicas"),
    "tf_grpc_worker_cache_threads": Dropped(_CALLS),
    "monolith_grpc_worker_service_handler_multiplier": Dropped(_CALLS),
    "params_override": Renamed("job.params", from_json),
    "base_name": Renamed("sync.base_name"),
    "data_type": Renamed("data.record", RECORD_WORDS),
    "feature_list": Renamed("data.features", listed),
    "sort_id": Renamed("data.framing.sort_id"),
    "restore_dir": Renamed("restore.folder", empty_is_open),
    "restore_ckpt": Renamed("restore.checkpoint", empty_is_open),
    "deep_insight_target": Renamed("metrics.targets", listed),
    "deep_insight_sample_ratio": Renamed("metrics.sample_ratio"),
    "unified_serving": Renamed("sync.unified"),
    "use_estimator": Dropped("there is one way to train, without TensorFlow's estimator"),
    "kafka_topics": Renamed("kafka.topics", listed),
    "kafka_group_id": Renamed("kafka.group", empty_is_open),
    "kafka_servers": Renamed("kafka.servers", listed),
    "input_path": Renamed("data.path"),
    "is_hourly": Renamed("data.hourly"),
    "wildcard": Renamed("data.pattern"),
    "start_date": Renamed("data.start_date"),
    "end_date": Renamed("data.end_date"),
    "start_hour": Renamed("data.start_hour"),
    "end_hour": Renamed("data.end_hour"),
    "enable_dynamic_sharding": Renamed("data.dynamic_sharding"),
    "max_task_num_per_worker": Renamed("data.tasks_per_worker"),
    "disable_native_metrics": Renamed("metrics.native", opposite),
    "lagrangex_header": Renamed("data.framing.lagrangex"),
    "kafka_dump": Renamed("data.framing.kafka_dump"),
    "kafka_dump_prefix": Renamed("data.framing.kafka_dump_prefix"),
}
"""Old name -> where the field is now, or why there is none."""

_TPU = "there is no TPU runner; a task runs on CPUs and GPUs"

FLAGS_OF_OTHERS: Mapping[str, Renamed | Dropped] = {
    "dataset_use_dataservice": Renamed("data_service.enabled"),
    "data_service_dispatcher": Renamed("data_service.dispatcher"),
    "enable_parameter_sync": Renamed("training.realtime"),
    "metric_prefix": Renamed("metrics.prefix"),
    "save_summary_interval": Renamed("metrics.summary_every_steps"),
    "root_log_interval": Renamed("metrics.log_every_steps"),
    "overwrite_end_date": Renamed("data.end_date", empty_is_open),
    "enable_local_profiling": Dropped("say which steps: profile.from_step"),
    "tf_version": Dropped("there is no TensorFlow"),
    "tpu": Dropped(_TPU),
    "gcp_project": Dropped(_TPU),
    "tpu_zone": Dropped(_TPU),
    "iterations_per_loop": Dropped(_TPU),
    "pipeline_execution": Dropped(_TPU),
    "enable_tpu_version_config": Dropped(_TPU),
    "host_call_every_n_steps": Dropped(_TPU),
    "enable_stopping_signals": Dropped(_TPU),
    "cpu_test": Dropped("every task runs on a CPU"),
    "partition_strategy": Dropped("an id's shard is its remainder; there is no other way"),
    "with_horovod": Dropped("ranks are taken from the environment that MPI or torchrun sets"),
    "with_byteps": Dropped("ranks exchange gradients through torch.distributed"),
}
"""Old flags, and variables less their MONOLITH_, that no config had."""


def _duration(value: object, unit: str) -> object:
    number = _number(value)
    if number is None:
        return value
    return None if number < 0 else f"{value}{unit}"


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"expected whole numbers with commas between them, got {text!r}") from None
