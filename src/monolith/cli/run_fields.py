"""What a training makes of each field of a run's config: every field is in one of these tables.

Some go over into `TrainConfig`, some the command obeys itself, and some ask for what cannot be had yet: that
is an error, and never passed over. None is accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Mapping

TRAIN_FIELDS: Mapping[str, str] = {
    "job.model_dir": "model_dir",
    "embedding.prefetch": "prefetch",
    "embedding.postpush": "async_push",
    "checkpoint.every": "save.secs",
    "checkpoint.every_steps": "save.steps",
    "checkpoint.dense_every": "dense_save.secs",
    "checkpoint.dense_every_steps": "dense_save.steps",
    "checkpoint.keep": "keep.max_to_keep",
    "checkpoint.evict_expired": "keep.evict",
    "checkpoint.max_expired_share": "expiry.max_share",
    "checkpoint.max_clock_ahead": "expiry.max_ahead",
    "restore.folder": "restore.dir",
    "restore.checkpoint": "restore.checkpoint",
    "restore.reset_dense": "restore.clear_nn",
    "restore.keep_step": "restore.continue_training",
    "restore.renamed": "restore.alias_map",
    "restore.guess_renamed": "restore.auto_alias",
    "metrics.summary_every_steps": "summary_every_steps",
    "tide.start_hour": "tide.start_hour",
    "tide.start_minute": "tide.start_minute",
    "tide.end_hour": "tide.end_hour",
    "tide.end_minute": "tide.end_minute",
    "tide.save_every": "save.tide_secs",
}
"""Field of a run -> field of its training, where somebody said it. `[train]` has all others.

With tide.save_every a run goes on outside of its window and saves that often; without, it ends.
"""

OBEYED: Mapping[str, tuple[str, ...]] = {
    "job": ("task", "mode", "name", "model_name", "id", "local", "params", "submitted_at"),
    "cluster": ("role", "index", "num_ps", "num_workers", "kind", "listen", "port"),
    "discovery": ("kind", "zookeeper", "zookeeper_auth", "tf_config", "folder", "ray"),
    "security": ("cert", "key", "ca", "server_name", "token", "token_file"),
    "limits": ("call_bytes", "message_bytes", "ids", "wait", "calls", "saves", "stranger_bytes"),
    "failover": ("max_retries", "wait"),
    "timeouts": ("operation", "lookup", "start", "finish", "silence", "abandoned"),
    "training": ("intra_op_threads", "inter_op_threads"),
    "data": ("dump_features_only",),
    "metrics": ("prefix", "host", "port"),
    "profile": ("from_step",),
}
"""Group -> fields that the command itself obeys."""

SO_ANYWAY: Mapping[str, tuple[str, ...]] = {
    "cluster": ("force_ps_shutdown",),
    "embedding": ("fused_layout", "dedup"),
    "checkpoint": ("count_fids",),
}
"""Group -> switches that change nothing: what they turn on is always on."""

_OWN_DATA = "a task reads its own data: give this to the task, as a setting of its own in [task]"
_OWN_TABLES = "a task makes its own tables: give this to its features"
_OWN_SHARE = (
    "each server is told its share when it starts, so that none can be left out; start num_ps of them"
)
_NO_SERVING = "changed rows are not sent to servers of requests yet, and nothing here serves them"
_BY_RANK = "all ranks stepping together is not built yet; workers train asynchronously on parameter servers"

NOT_YET: Mapping[str, str] = {
    "cluster.num_extra_ps": _OWN_SHARE,
    "cluster.num_redundant_ps": _OWN_SHARE,
    "failover.partial_recovery": "a run that lost a server restores all of them from the last checkpoint, "
    "as failover.max_retries allows",
    "training.synchronous": _BY_RANK,
    "training.partially_synchronous": _BY_RANK,
    "training.realtime": "changed rows are not sent to servers of requests yet",
    **{
        f"training.{name}": _BY_RANK
        for name in ("processes_per_gpu", "defer_sparse_updates", "overlap_forward", "overlap_backward")
    },
    "checkpoint.merge_ranks": _BY_RANK,
    "timeouts.slow_start": "workers begin together: none holds back while the first steps are made",
    "dense.partition": "a weight is not cut in pieces: each lies whole on the server that has least",
    "job.business_id": _NO_SERVING,
    "discovery.address_family": _NO_SERVING,
    **{f"sync.{name}": _NO_SERVING for name in ("base_name", "ps_replicas", "unified", "data_center_aware")},
    "serving.warmup_file": _NO_SERVING,
    "serving.skip_zero_rows": _NO_SERVING,
    "serving.dump_model": "no model is written beside its checkpoints; what a checkpoint holds is shown by "
    "`monolith checkpoint inspect` and written out by `monolith checkpoint export`",
    "training.gpu": "a module computes where the task has moved it to; move it in model()",
    "embedding.initial_capacity": _OWN_TABLES,
    "embedding.filter.kind": _OWN_TABLES,
    "embedding.filter.capacity": _OWN_TABLES,
    "embedding.filter.splits": _OWN_TABLES,
    "embedding.filter.equal_probability": _OWN_TABLES,
    "dense.prefetch": "weights come with the answer to each push, and are not fetched ahead",
    "dense.postpush": "gradients of weights are pushed in the step; those of rows can follow it",
    "checkpoint.dense_barrier": "weights are saved without holding the workers",
    **{
        f"data.{name}": _OWN_DATA
        for name in (
            *("path", "pattern", "record", "features", "hourly", "start_date", "end_date", "start_hour"),
            *("end_hour", "dynamic_sharding", "tasks_per_worker", "reorder_fids"),
            *(f"framing.{part}" for part in ("lagrangex", "sort_id", "kafka_dump", "kafka_dump_prefix")),
        )
    },
    **{
        f"kafka.{name}": _OWN_DATA
        for name in ("servers", "topics", "group", "username", "password", "settings")
    },
    **{f"data_service.{name}": _OWN_DATA for name in ("enabled", "dispatcher", "extra_workers")},
    "metrics.targets": "predictions are reported by a hook of the task: DeepInsightHook",
    "metrics.sample_ratio": "predictions are reported by a hook of the task: DeepInsightHook",
    "metrics.native": "there are none of the core's own",
    "metrics.log_every_steps": "lines of the log are counted in time: report_every in [train]",
    "metrics.tensorboard_dir": "summaries are in summaries/ of the model_dir",
    "profile.every_steps": "there are no regular profiles; say profile.from_step",
    "profile.cuda_steps": "no outside profiler is told when to record; say profile.from_step",
    **{
        f"candidates.{name}": "there is no pass over all items after training yet"
        for name in (
            *("enabled", "path", "parquet"),
            *(f"framing.{part}" for part in ("lagrangex", "sort_id", "kafka_dump", "kafka_dump_prefix")),
        )
    },
}
"""Field -> why asking for it is an error."""
