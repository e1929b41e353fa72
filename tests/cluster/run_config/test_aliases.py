"""Every field of the old configs: where it is now, with the default and the unit that the spec gives."""

from datetime import timedelta

import pytest

from monolith.cluster.run_config import ALIASES, FLAGS_OF_OTHERS, RunConfig, load_run_config
from monolith.config import Dropped, Renamed, describe_fields, to_dict

FIELDS = {
    # CpuTrainingConfig
    "server_type": "worker",
    "index": 0,
    "num_ps": 0,
    "num_workers": 1,
    "model_name": "",
    "filter_capacity": 300_000_000,
    "filter_split_num": 7,
    "filter_type": "sliding_hash_filter",
    "filter_equal_probability": True,
    "hashtable_init_capacity": 0,
    "use_native_multi_hash_table": None,
    "embedding_prefetch_capacity": 0,
    "enable_embedding_postpush": False,
    "enable_variable_prefetch": False,
    "enable_variable_postpush": False,
    "enable_sync_training": False,
    "enable_partial_sync_training": False,
    "enable_gpu_training": False,
    "processes_per_gpu": 1,
    "merge_sync_training_ckpt": True,
    "mode": "train",
    "partial_recovery": None,
    "tide_start_hour": None,
    "tide_start_minute": None,
    "tide_end_hour": None,
    "tide_end_minute": None,
    "tide_save_secs": None,
    "enable_realtime_training": False,
    "enable_async_optimize": False,
    "enable_pipelined_fwda2a": False,
    "enable_pipelined_bwda2a": False,
    "profile_some_steps_from": None,
    "profile_save_steps_interval": 5000,
    "profile_with_nvprof_from_to": None,
    "reorder_fids_in_data_pipeline": False,
    "chief_timeout_secs": timedelta(seconds=1800),
    "save_checkpoints_secs": None,
    "save_checkpoints_steps": None,
    "dense_only_save_checkpoints_secs": None,
    "dense_only_save_checkpoints_steps": None,
    "dense_only_stop_training_when_save": False,
    "warmup_file": "./warmup_file",
    "skip_zero_embedding_when_serving": False,
    "max_rpc_deadline_millis": timedelta(milliseconds=30000),
    "checkpoints_max_to_keep": 10,
    "submit_time_secs": None,
    "containers_ready_time_secs": None,
    "cluster_type": "stable",
    "max_slow_start_wait_minute": timedelta(minutes=10),
    "enable_model_ckpt_info": False,
    "feature_eviction_on_save": False,
    "only_feature_engineering": False,
    "enable_variable_partition": True,
    "enable_fused_layout": False,
    "force_shutdown_ps": False,
    "clear_nn": False,
    "continue_training": False,
    "reload_alias_map": {},
    "enable_alias_map_auto_gen": None,
    "enable_model_dump": False,
    "enable_resource_constrained_roughsort": False,
    "roughsort_candidate_items_path": None,
    "roughsort_items_use_parquet": False,
    "items_input_lagrangex_header": False,
    "items_input_has_sort_id": False,
    "items_input_kafka_dump": False,
    "items_input_kafka_dump_prefix": False,
    "device_fn": None,
    "use_dataservice": None,
    "num_extra_dsworker_on_gpu_worker": 0,
    "save_summary_steps": 100,
    "log_step_count_steps": 100,
    # DistributedCpuTrainingConfig
    "model_dir": "",
    "tensorboard_log_path": "",
    "intra_op_parallelism_threads": 8,
    "inter_op_parallelism_threads": 16,
    "num_extra_ps": 0,
    "num_redundant_ps": 0,
    "uuid": "",
    "operation_timeout_in_ms": None,
    "session_creation_timeout_secs": timedelta(seconds=7200),
    "max_retry_times": None,
    "retry_wait_in_secs": timedelta(seconds=5),  # 30 in its runner, 5 for its users, who are ours
    "fountain_zk_host": None,
    "fountain_model_name": None,
    "dc_aware": False,
    # RunnerConfig
    "task": None,
    "tf_config": None,
    "deep_insight_name": None,
    "discovery_type": "consul",
    "zk_server": None,
    "zk_watch_address_family": "ipv4",
    "is_local": False,
    "enable_fid_dedup": False,
    "bzid": None,
    "ps_replica_num": None,
    "tf_grpc_worker_cache_threads": None,
    "monolith_grpc_worker_service_handler_multiplier": None,
    "params_override": {},
    "base_name": None,
    "data_type": None,
    "feature_list": (),
    "sort_id": True,
    "restore_dir": None,
    "restore_ckpt": None,
    "deep_insight_target": (),
    "deep_insight_sample_ratio": None,
    "unified_serving": False,
    "use_estimator": None,
    "kafka_topics": (),
    "kafka_group_id": None,
    "kafka_servers": (),
    "input_path": None,
    "is_hourly": False,
    "wildcard": None,
    "start_date": None,
    "end_date": None,
    "start_hour": None,
    "end_hour": None,
    "enable_dynamic_sharding": False,
    "max_task_num_per_worker": 1,
    "disable_native_metrics": False,
    "lagrangex_header": False,
    "kafka_dump": False,
    "kafka_dump_prefix": False,
}
"""Old name -> default, as the field has it now."""

PATHS = {info.path: info for info in describe_fields(RunConfig)}


def test_there_are_125_fields_and_each_has_a_place_or_a_reason():
    assert len(FIELDS) == 125
    assert ALIASES.keys() == FIELDS.keys()
    for alias in [*ALIASES.values(), *FLAGS_OF_OTHERS.values()]:
        assert isinstance(alias, Dropped) or alias.path in PATHS


def test_no_two_fields_have_one_place():
    places = [alias.path for alias in ALIASES.values() if isinstance(alias, Renamed)]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("name", FIELDS)
def test_defaults_are_as_they_were(name):
    alias = ALIASES[name]
    if isinstance(alias, Renamed):
        assert PATHS[alias.path].default == FIELDS[name]


def test_every_field_is_explained():
    assert [path for path, info in PATHS.items() if not info.doc] == []


@pytest.mark.parametrize(
    "old, text, path, value",
    [
        ("max_rpc_deadline_millis", "1500", "timeouts.lookup", timedelta(seconds=1.5)),
        ("operation_timeout_in_ms", "-1", "timeouts.operation", None),
        ("operation_timeout_in_ms", "250", "timeouts.operation", timedelta(milliseconds=250)),
        ("max_slow_start_wait_minute", "3", "timeouts.slow_start", timedelta(minutes=3)),
        ("chief_timeout_secs", "90", "timeouts.finish", timedelta(seconds=90)),
        ("retry_wait_in_secs", "5", "failover.wait", timedelta(seconds=5)),
        ("max_retry_times", "0", "failover.max_retries", None),
        ("max_retry_times", "4", "failover.max_retries", 4),
        ("discovery_type", "ZK", "discovery.kind", "zookeeper"),
        ("discovery_type", "mlp", "discovery.kind", "mlp"),
        ("data_type", "ExampleBatch", "data.record", "example_batch"),
        ("data_type", "Instance", "data.record", "instance"),
        ("feature_list", "a,b", "data.features", ("a", "b")),
        ("deep_insight_target", "ctr", "metrics.targets", ("ctr",)),
        ("profile_with_nvprof_from_to", "10,20", "profile.cuda_steps", (10, 20)),
        ("disable_native_metrics", "false", "metrics.native", True),
        ("disable_native_metrics", "true", "metrics.native", False),
        ("reload_alias_map", '{"old": "new"}', "restore.renamed", {"old": "new"}),
        ("params_override", '{"train.steps": 3}', "job.params", {"train.steps": 3}),
        ("deep_insight_name", "", "job.name", None),
        ("overwrite_end_date", "20240131", "data.end_date", "20240131"),
    ],
)
def test_old_units_and_words_are_understood_in_flags_variables_and_files(tmp_path, old, text, path, value):
    def at(config: RunConfig) -> object:
        found: object = config
        for name in path.split("."):
            found = getattr(found, name)
        return found

    file = tmp_path / "run.toml"
    typed = {"false": "false", "true": "true"}.get(text, text if text.lstrip("-").isdigit() else None)
    if old == "overwrite_end_date":
        typed = None
    file.write_text(f"{old} = {typed or repr(text)}\n")
    assert at(load_run_config(args=[f"--{old}={text}"])) == value
    assert at(load_run_config(environ={f"MONOLITH_{old.upper()}": text})) == value
    assert at(load_run_config(file=file)) == value


def test_topics_are_a_list_however_they_are_given(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('kafka_topics = "a, b"\nkafka_servers = "h:1"\nkafka_group_id = "g"')
    assert load_run_config(file=file).kafka.topics == ("a", "b")
    args = ["--kafka_topics", "a,b", "--kafka_servers", "h:1,i:2", "--kafka_group_id", "g"]
    kafka = load_run_config(args=args).kafka
    assert (kafka.topics, kafka.servers, kafka.group) == (("a", "b"), ("h:1", "i:2"), "g")


def test_names_without_a_meaning_are_accepted_with_a_warning():
    warnings: list[str] = []
    dropped = [name for name, alias in {**ALIASES, **FLAGS_OF_OTHERS}.items() if isinstance(alias, Dropped)]
    config = load_run_config(code=dict.fromkeys(dropped, 1), warn=warnings.append)
    assert to_dict(config) == to_dict(RunConfig())
    assert len(warnings) == len(dropped)
    assert all("is ignored: " in warning for warning in warnings)


def test_the_flag_of_the_data_service_sets_it_unless_code_has():
    # Upstream's link of a field to a flag: the flag's value counts where the code's is the default.
    assert load_run_config(args=["--dataset_use_dataservice"]).data_service.enabled is True
    assert load_run_config(args=[]).data_service.enabled is None
    both = load_run_config(args=["--dataset_use_dataservice"], code={"data_service.enabled": False})
    assert both.data_service.enabled is False
