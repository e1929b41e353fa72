"""Every field of the original's configs: a field of ours that acts, or a reason why there is none."""

from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from monolith.config import Dropped, Renamed, Unsupported, describe_fields, to_dict
from monolith.config.fields import leaf_paths
from monolith.errors import ConfigError
from monolith.runtime.config import RunConfig
from monolith.runtime.config_loading import RENAMED_FIELDS, load_run_config, moved_fields
from monolith.train.config import RanksConfig
from monolith_compat.flag_names import ALIASES, OLD_NAMES, OTHER_FLAGS

CPU_TRAINING = """
    server_type index num_ps num_workers model_name filter_capacity filter_split_num filter_type
    filter_equal_probability hashtable_init_capacity use_native_multi_hash_table
    embedding_prefetch_capacity enable_embedding_postpush enable_variable_prefetch
    enable_variable_postpush enable_sync_training enable_partial_sync_training enable_gpu_training
    processes_per_gpu merge_sync_training_ckpt mode partial_recovery tide_start_hour
    tide_start_minute tide_end_hour tide_end_minute tide_save_secs enable_realtime_training
    enable_async_optimize enable_pipelined_fwda2a enable_pipelined_bwda2a profile_some_steps_from
    profile_save_steps_interval profile_with_nvprof_from_to reorder_fids_in_data_pipeline
    chief_timeout_secs save_checkpoints_secs save_checkpoints_steps dense_only_save_checkpoints_secs
    dense_only_save_checkpoints_steps dense_only_stop_training_when_save warmup_file
    skip_zero_embedding_when_serving max_rpc_deadline_millis checkpoints_max_to_keep
    submit_time_secs containers_ready_time_secs cluster_type max_slow_start_wait_minute
    enable_model_ckpt_info feature_eviction_on_save only_feature_engineering
    enable_variable_partition enable_fused_layout force_shutdown_ps clear_nn continue_training
    reload_alias_map enable_alias_map_auto_gen enable_model_dump
    enable_resource_constrained_roughsort roughsort_candidate_items_path roughsort_items_use_parquet
    items_input_lagrangex_header items_input_has_sort_id items_input_kafka_dump
    items_input_kafka_dump_prefix device_fn use_dataservice num_extra_dsworker_on_gpu_worker
    save_summary_steps log_step_count_steps
"""
DISTRIBUTED = """
    model_dir tensorboard_log_path intra_op_parallelism_threads inter_op_parallelism_threads
    num_extra_ps num_redundant_ps uuid operation_timeout_in_ms session_creation_timeout_secs
    max_retry_times retry_wait_in_secs fountain_zk_host fountain_model_name dc_aware
"""
RUNNER = """
    task tf_config deep_insight_name discovery_type zk_server zk_watch_address_family is_local
    enable_fid_dedup bzid ps_replica_num tf_grpc_worker_cache_threads
    monolith_grpc_worker_service_handler_multiplier params_override base_name data_type feature_list
    sort_id restore_dir restore_ckpt deep_insight_target deep_insight_sample_ratio unified_serving
    use_estimator kafka_topics kafka_group_id kafka_servers input_path is_hourly wildcard start_date
    end_date start_hour end_hour enable_dynamic_sharding max_task_num_per_worker
    disable_native_metrics lagrangex_header kafka_dump kafka_dump_prefix
"""

PATHS = {info.path: info for info in describe_fields(RunConfig)}

KEPT = {
    "server_type": "worker",
    "index": 0,
    "num_ps": 0,
    "num_workers": 1,
    "model_name": "",
    "filter_split_num": 7,
    "filter_type": "sliding_hash_filter",
    "mode": "train",
    "chief_timeout_secs": timedelta(seconds=1800),
    "max_rpc_deadline_millis": timedelta(milliseconds=30000),
    "checkpoints_max_to_keep": 10,
    "cluster_type": "stable",
    "feature_eviction_on_save": False,
    "only_feature_engineering": False,
    "clear_nn": False,
    "continue_training": False,
    "save_summary_steps": 100,
    "model_dir": "",
    "uuid": "",
    "session_creation_timeout_secs": timedelta(seconds=7200),
    "max_retry_times": 6,  # 0 in its runner, 6 for its users, who are ours
    "retry_wait_in_secs": timedelta(seconds=5),  # 30 in its runner, 5 for its users
    "discovery_type": "consul",
    "is_local": False,
    "sort_id": True,
    "is_hourly": False,
    "lagrangex_header": False,
    "kafka_dump": False,
    "kafka_dump_prefix": False,
}
"""Old name -> default of the field it is now, where that is the original's."""


def at(config: RunConfig, path: str) -> Any:
    return attrgetter(path)(config)


def test_there_are_125_fields_and_each_has_a_place_or_a_reason() -> None:
    names = f"{CPU_TRAINING} {DISTRIBUTED} {RUNNER}".split()
    assert (len(names), len(set(names))) == (125, 125)
    assert ALIASES.keys() == set(names)
    for alias in OLD_NAMES.values():
        if isinstance(alias, Renamed):
            assert alias.path in PATHS
        else:
            assert alias.reason


def test_no_two_fields_have_one_flag_except_a_switch_next_to_another() -> None:
    renamed = {name: alias for name, alias in ALIASES.items() if isinstance(alias, Renamed)}
    beside = [name for name, alias in renamed.items() if alias.off_is_nothing]
    assert beside == ["enable_partial_sync_training"]
    places = [alias.path for name, alias in renamed.items() if name not in beside]
    assert len(set(places)) == len(places)
    assert {renamed[name].path for name in beside} <= set(places)


@pytest.mark.parametrize(
    ("switches", "mode"),
    [
        ({"enable_sync_training": True, "enable_partial_sync_training": True}, "sync"),
        ({"enable_partial_sync_training": True, "enable_sync_training": True}, "sync"),
        ({"enable_partial_sync_training": True}, "sync"),
        ({"enable_sync_training": True, "enable_partial_sync_training": False}, "sync"),
        ({"enable_sync_training": False, "enable_partial_sync_training": False}, "async"),
    ],
)
def test_partial_sync_training_is_training_in_step(switches: dict[str, Any], mode: str) -> None:
    beside = {"num_ps": 1, "train.model_dir": "m"}
    assert at(load_run_config(code={**switches, **beside}), "cluster.mode") == mode
    flags = [f"--{name}={str(on).lower()}" for name, on in switches.items()]
    assert at(load_run_config(args=flags, code=beside), "cluster.mode") == mode


def test_switches_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="given twice, also by the old name enable_partial_sync_training"):
        load_run_config(code={"enable_sync_training": False, "enable_partial_sync_training": True})


@pytest.mark.parametrize("name", KEPT)
def test_defaults_are_as_they_were(name: str) -> None:
    alias = ALIASES[name]
    assert isinstance(alias, Renamed)
    assert PATHS[alias.path].default == KEPT[name]


def test_every_field_is_explained() -> None:
    assert [path for path, info in PATHS.items() if not info.doc] == []


@pytest.mark.parametrize(
    "old, text, path, value",
    [
        ("max_rpc_deadline_millis", "1500", "timeouts.lookup", timedelta(seconds=1.5)),
        ("operation_timeout_in_ms", "250", "timeouts.operation", timedelta(milliseconds=250)),
        ("chief_timeout_secs", "90", "timeouts.finish", timedelta(seconds=90)),
        ("retry_wait_in_secs", "5", "failover.wait", timedelta(seconds=5)),
        ("max_retry_times", "0", "failover.max_retries", 6),
        ("max_retry_times", "4", "failover.max_retries", 4),
        ("partial_recovery", "true", "failover.recovery", "keep_going"),
        ("partial_recovery", "false", "failover.recovery", "exact"),
        ("discovery_type", "ZK", "discovery.kind", "zookeeper"),
        ("data_type", "ExampleBatch", "data.format", "framed_example_batch"),
        ("data_type", "Instance", "data.format", "framed_instance"),
        ("feature_list", "a,b", "data.columns", ("a", "b")),
        ("enable_dynamic_sharding", "false", "data.queue", None),
        ("enable_realtime_training", "false", "publish.to", None),
        ("enable_parameter_sync", "false", "publish.to", None),
        ("filter_capacity", "500", "admission.capacity", 500),
        ("reload_alias_map", '{"old": "new"}', "train.restore.alias_map", {"new": "old"}),
        ("params_override", '{"train.steps": 3}', "task", {"train.steps": 3}),
        ("deep_insight_name", "", "job.name", None),
        ("max_slow_start_wait_minute", "3", "train.hooks.slow_start_max_wait", timedelta(minutes=3)),
        ("deep_insight_target", "click,buy", "train.hooks.deep_insight.targets", ("click", "buy")),
        ("overwrite_end_date", "20240131", "job.override_end_date", "20240131"),
        ("cpu_test", "true", "job.cpu_test", True),
        ("enable_gpu_training", "true", "train.accelerator", "cuda"),
        ("save_checkpoints_secs", "60", "train.save.secs", 60.0),
        ("dense_only_save_checkpoints_steps", "7", "train.dense_save.steps", 7),
        ("embedding_prefetch_capacity", "3", "train.prefetch", 3),
        ("enable_embedding_postpush", "false", "train.async_push", False),
        ("enable_variable_prefetch", "true", "dense.prefetch", True),
        ("enable_variable_postpush", "true", "dense.postpush", True),
        ("intra_op_parallelism_threads", "3", "threads.intra_op", 3),
        ("restore_dir", "/old", "train.restore.dir", "/old"),
        ("task", "tasks:Mine", "job.task", "tasks:Mine"),
        ("use_dataservice", "true", "data_service.enabled", True),
    ],
)
def test_old_units_and_words_are_understood_in_flags_variables_and_files(
    tmp_path, old: str, text: str, path: str, value: object
) -> None:
    beside = {"data.start_date": "20240101"} if path == "data.end_date" else {}
    file = tmp_path / "run.toml"
    typed = text if text in ("false", "true") or text.isdigit() else None
    file.write_text(f"{old} = {(typed if old != 'overwrite_end_date' else None) or repr(text)}\n")
    assert at(load_run_config(args=[f"--{old}={text}"], code=beside), path) == value
    assert at(load_run_config(environ={f"MONOLITH_{old.upper()}": text}, code=beside), path) == value
    assert at(load_run_config(file=file, code=beside), path) == value


def test_topics_are_a_list_however_they_are_given(tmp_path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('kafka_topics = "a, b"\nkafka_servers = "h:1"\nkafka_group_id = "g"')
    found = load_run_config(file=file).kafka
    assert found is not None
    assert found.topics == ("a", "b")
    args = ["--kafka_topics", "a,b", "--kafka_servers", "h:1,i:2", "--kafka_group_id", "g"]
    found = load_run_config(args=args).kafka
    assert found is not None
    assert (found.topics, found.servers, found.group) == (("a", "b"), ("h:1", "i:2"), "g")


def test_a_window_of_the_day_is_one_table() -> None:
    tide = {"tide_start_hour": 1, "tide_start_minute": 2, "tide_end_hour": 3, "tide_end_minute": 4}
    window = load_run_config(code=tide).train.hours
    assert window is not None
    assert str(window) == "01:02-03:04 UTC"


@pytest.mark.parametrize(
    "old, text, says",
    [
        ("reload_alias_map", '{"a": "c", "b": "c"}', "two old names become c"),
        ("reload_alias_map", "{", "malformed JSON"),
        ("max_rpc_deadline_millis", "-1", "a lookup without a limit would wait forever"),
        ("with_allreduce_fusion", "two", "must be none, one or grouped"),
        ("enable_dynamic_sharding", "true", "name it as data.queue"),
        ("enable_realtime_training", "true", "say where to publish, as publish.to"),
        ("enable_parameter_sync", "true", "say where to publish, as publish.to"),
    ],
)
def test_old_values_that_have_no_meaning_any_more_are_refused(old: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_run_config(args=[f"--{old}={text}"])


def test_names_without_a_meaning_are_accepted_with_a_warning() -> None:
    warnings: list[str] = []
    dropped = [name for name, alias in OLD_NAMES.items() if isinstance(alias, Dropped)]
    config = load_run_config(code=dict.fromkeys(dropped, 1), warn=warnings.append)
    assert to_dict(config) == to_dict(RunConfig())
    assert len(warnings) == len(dropped)
    assert all("is ignored: " in warning for warning in warnings)


ASKED = """
    server_type=ps index=1 num_ps=1 num_workers=2 model_name=feed filter_capacity=500 filter_split_num=5
    filter_type=no_filter filter_equal_probability=false hashtable_init_capacity=9
    use_native_multi_hash_table=false embedding_prefetch_capacity=3 enable_embedding_postpush=false
    enable_variable_prefetch=true enable_variable_postpush=true enable_sync_training=true
    enable_partial_sync_training=true enable_gpu_training=true processes_per_gpu=2
    merge_sync_training_ckpt=false mode=eval partial_recovery=true tide_start_hour=1 tide_start_minute=2
    tide_end_hour=3 tide_end_minute=4 tide_save_secs=60 enable_realtime_training=true
    enable_async_optimize=true enable_pipelined_fwda2a=true enable_pipelined_bwda2a=true
    profile_some_steps_from=7 profile_save_steps_interval=7 profile_with_nvprof_from_to=1,2
    reorder_fids_in_data_pipeline=true chief_timeout_secs=90 save_checkpoints_secs=60
    save_checkpoints_steps=7 dense_only_save_checkpoints_secs=60 dense_only_save_checkpoints_steps=7
    dense_only_stop_training_when_save=true warmup_file=asked.jsonl skip_zero_embedding_when_serving=true
    max_rpc_deadline_millis=1500 checkpoints_max_to_keep=3 submit_time_secs=7 containers_ready_time_secs=7
    cluster_type=tide max_slow_start_wait_minute=3 enable_model_ckpt_info=true feature_eviction_on_save=true
    only_feature_engineering=true enable_variable_partition=false enable_fused_layout=true
    force_shutdown_ps=true clear_nn=true continue_training=true reload_alias_map={"old":"new"}
    enable_alias_map_auto_gen=false enable_model_dump=true enable_resource_constrained_roughsort=true
    roughsort_candidate_items_path=items roughsort_items_use_parquet=true items_input_lagrangex_header=true
    items_input_has_sort_id=true items_input_kafka_dump=true items_input_kafka_dump_prefix=true
    device_fn=place use_dataservice=true num_extra_dsworker_on_gpu_worker=2 save_summary_steps=7
    log_step_count_steps=7 model_dir=elsewhere tensorboard_log_path=logs intra_op_parallelism_threads=3
    inter_op_parallelism_threads=3 num_extra_ps=1 num_redundant_ps=1 uuid=u operation_timeout_in_ms=250
    session_creation_timeout_secs=90 max_retry_times=4 retry_wait_in_secs=7 fountain_zk_host=h
    fountain_model_name=feed dc_aware=true task=tasks:Mine tf_config={"cluster":{}} deep_insight_name=feed
    discovery_type=mlp zk_server=h:1 zk_watch_address_family=ipv6 is_local=true enable_fid_dedup=true bzid=b
    ps_replica_num=2 tf_grpc_worker_cache_threads=3 monolith_grpc_worker_service_handler_multiplier=2
    params_override={"a":1} base_name=feed data_type=Example feature_list=a,b sort_id=false restore_dir=old
    restore_ckpt=model.ckpt-1 deep_insight_target=click deep_insight_sample_ratio=0.5 unified_serving=true
    use_estimator=true kafka_topics=a kafka_group_id=other kafka_servers=h:1 input_path=p is_hourly=true
    wildcard=*.csv start_date=20240101 end_date=20240102 start_hour=1 end_hour=2
    enable_dynamic_sharding=true max_task_num_per_worker=2 disable_native_metrics=false lagrangex_header=true
    kafka_dump=true kafka_dump_prefix=true
"""
"""Each flag with a value that is not its default."""
HOURS = {f"train.hours.{name}": 0 for name in ("start_hour", "start_minute", "end_hour")}
DAYS = {"data.start_date": "20231231", "data.end_date": "20240105"}
KAFKA = {"kafka.topics": ["t"], "kafka.group": "g", "kafka.servers": ["s:1"]}
NEEDS: dict[str, dict[str, Any]] = {
    "server_type num_extra_ps num_redundant_ps": {"cluster.num_ps": 1},
    "index": {"cluster.num_workers": 2, "cluster.num_ps": 1},
    "tide_start_hour tide_start_minute tide_end_hour tide_end_minute": HOURS | {"train.hours.end_minute": 30},
    "continue_training": {"train.restore.reset_dense": True},
    "restore_ckpt": {"train.restore.dir": "old"},
    "deep_insight_target": {"train.hooks.deep_insight.folder": "f"},
    "kafka_topics kafka_group_id kafka_servers": KAFKA,
    "start_date end_date is_hourly": DAYS,
    "start_hour end_hour": {**DAYS, "data.hourly": True},
}
"""Flags -> the settings that they need next to them."""
NEED_A_PLACE = ("enable_realtime_training", "enable_dynamic_sharding")
"""Switches for which a place is set now, which the error names."""


@pytest.mark.parametrize("flag", ASKED.split(), ids=lambda flag: flag.partition("=")[0])
def test_a_flag_of_the_original_acts_or_says_by_name_why_not(flag: str) -> None:
    name = flag.partition("=")[0]
    alias, said = ALIASES[name], list[str]()
    needed = [settings for names, settings in NEEDS.items() if name in names.split()]
    beside = {"train.model_dir": "m", "data.path": "x"} | (needed[0] if needed else {})
    without = load_run_config(code=beside)
    if isinstance(alias, Unsupported) or name in NEED_A_PLACE:
        with pytest.raises(ConfigError, match=name):
            load_run_config(args=[f"--{flag}"], code=beside)
        return
    if isinstance(alias, Renamed):
        beside.pop(alias.path, None)
    asked = load_run_config(args=[f"--{flag}"], code=beside, warn=said.append)
    assert (asked != without) == isinstance(alias, Renamed)
    assert [line.partition(" (from")[0] for line in said] == ([] if asked != without else [name])


def test_all_125_flags_are_asked_for_something() -> None:
    assert {flag.partition("=")[0] for flag in ASKED.split()} == ALIASES.keys()


UNSUPPORTED = {name: alias for name, alias in OLD_NAMES.items() if isinstance(alias, Unsupported)}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_asking_for_what_cannot_be_had_is_refused_with_the_reason(name: str) -> None:
    alias = UNSUPPORTED[name]
    asked = not alias.default if isinstance(alias.default, bool) else 7
    for source in (
        {"code": {name: asked}},
        {"args": [f"--{name}={str(asked).lower()}"]},
        {"environ": {f"MONOLITH_{name.upper()}": str(asked)}},
    ):
        with pytest.raises(ConfigError) as caught:
            load_run_config(**source)
        assert alias.reason in str(caught.value)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_not_asking_for_it_is_fine(name: str) -> None:
    alias = UNSUPPORTED[name]
    for nothing in (alias.default, None):
        assert load_run_config(code={name: nothing}) == RunConfig()
    assert load_run_config(args=[f"--{name}={alias.default}"]) == RunConfig()


def test_the_flag_of_the_data_service_sets_it_unless_code_has() -> None:
    # Upstream's link of a field to a flag: the flag's value counts where the code's is the default.
    assert at(load_run_config(args=["--dataset_use_dataservice"]), "data_service.enabled") is True
    assert load_run_config(args=[]).data_service is None
    both = load_run_config(args=["--dataset_use_dataservice"], code={"data_service.enabled": False})
    assert at(both, "data_service.enabled") is False


# Former paths of our own fields


def test_a_former_path_is_not_one_of_today_and_leads_to_one() -> None:
    moved = moved_fields()
    assert moved.keys().isdisjoint(PATHS)
    for place in moved.values():
        if isinstance(place, str):
            assert place.partition(",")[0] in PATHS


def test_a_file_of_the_flat_shape_is_told_where_each_key_goes(tmp_path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model_dir = "m"\nsteps = 3\n[save]\nsteps = 7\n[task]\nbatches = 4\n')
    with pytest.raises(ConfigError) as caught:
        load_run_config(file=file)
    assert str(caught.value).splitlines() == [
        "cannot read the config: 3 problems",
        f"  - model_dir is train.model_dir (from {file})",
        f"  - steps is train.steps (from {file})",
        f"  - save.steps is train.save.steps (from {file})",
    ]
    file.write_text('model_dir = "m"\n')  # by itself, an old name
    assert load_run_config(file=file).train.model_dir == "m"


def test_every_field_of_the_flat_shape_has_its_place() -> None:
    moved = moved_fields()
    assert [path for path in PATHS if path.startswith("train.") and path[6:] not in moved] == []


@pytest.mark.parametrize(
    "source",
    [
        {"code": {"checkpoint.keep": 3}},
        {"args": ["--checkpoint.keep", "3"]},
        {"args": ["--checkpoint.keep=3"]},
        {"environ": {"MONOLITH_CHECKPOINT__KEEP": "3"}},
    ],
)
def test_a_former_group_is_told_where_its_fields_are(source: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.keep is train\.keep\.max_to_keep \(from "):
        load_run_config(**source)


def test_a_former_field_that_is_gone_says_why(tmp_path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[training]\nsynchronous = true\n[sync]\nbase_name = "x"\n[restore.renamed]\na = "b"\n')
    with pytest.raises(ConfigError) as caught:
        load_run_config(file=file)
    said = str(caught.value)
    assert "training.synchronous is cluster.mode, async or sync" in said
    assert f"sync.base_name is gone (from {file}): nothing is sent to servers by name" in said
    assert "restore.renamed.a is train.restore.alias_map, from new names to old ones" in said


def test_no_old_name_is_a_group_but_the_task() -> None:
    groups = {path.partition(".")[0] for path in leaf_paths(RunConfig)}
    assert groups & OLD_NAMES.keys() == {"task"}
    assert OTHER_FLAGS.keys().isdisjoint(ALIASES)


def test_a_negative_timeout_of_operations_is_none_at_all() -> None:
    config = load_run_config(args=["--operation_timeout_in_ms", "-1"])
    assert config.timeouts.operation == timedelta(days=36500)
    assert load_run_config(args=["--operation_timeout_in_ms=500"]).timeouts.operation == timedelta(
        seconds=0.5
    )


def test_the_flags_of_the_originals_own_test_of_pipelining_are_taken() -> None:
    flags = [f"--enable_{name}=true" for name in ("pipelined_fwda2a", "pipelined_bwda2a", "async_optimize")]
    said: list[str] = []
    config = load_run_config(
        args=["--enable_sync_training=true", "--enable_embedding_postpush=true", *flags], warn=said.append
    )
    assert (config.cluster.mode, config.train.async_push) == ("sync", True)
    assert len(said) == 3
    assert all("is ignored: ranks exchange rows ahead of and behind the dense half" in line for line in said)


@pytest.mark.parametrize(
    ("fusion", "sent"), [("none", 0), ("one", 1 << 40), ("grouped", RanksConfig().bucket_bytes)]
)
def test_the_originals_variables_for_ranks_act_or_say_why_not(fusion: str, sent: int) -> None:
    said: list[str] = []
    environ = {
        "MONOLITH_WITH_ALLREDUCE_FUSION": fusion,
        "MONOLITH_WITH_ALLREDUCE_FP16": "1",
        "MONOLITH_SKIP_ALLREDUCE": "1",
        "MONOLITH_SYNC_EMPTY_RANK0_PS_SHARD": "1",
    }
    config = load_run_config(environ=environ, warn=said.append)
    assert config.ranks == RanksConfig(bucket_bytes=sent, half_gradients=True, skip_allreduce=True)
    (line,) = said
    assert "sync_empty_rank0_ps_shard" in line
    assert "rank 0 holds its share of the rows" in line


def test_the_initial_capacity_of_tables_acts() -> None:
    assert load_run_config(args=["--hashtable_init_capacity=1000"]).train.tables.initial_rows == 1000


@pytest.mark.parametrize(("former", "renamed"), RENAMED_FIELDS.items())
def test_a_renamed_field_is_read_by_its_former_path_and_the_new_one_is_named(
    former: str, renamed: Renamed
) -> None:
    if former in ("train.tide", "train.save.tide"):
        value: object = {"start_hour": 1, "start_minute": 2, "end_hour": 3, "end_minute": 4}
    else:
        given = {"job.mode": "eval", "job.end_date": "20240131", "train.rows_on": "host"}
        value = given.get(former, "m" if former.endswith("model_name") else 1)
    if former == "train.restore.clear_nn":
        value = True
    said: list[str] = []
    others = {"data.path": "x"} if former.startswith("data.") else {}
    by_former = load_run_config(code={former: value, **others}, warn=said.append)
    assert by_former == load_run_config(code={renamed.path: value, **others})
    assert said
    assert all(f"(from code) is now {renamed.path}" in line for line in said)


def test_a_renamed_field_is_read_from_variables_and_flags(tmp_path: Path) -> None:
    said: list[str] = []
    file = tmp_path / "run.toml"
    file.write_text("[train.save]\ntide_secs = 60\n")
    run = load_run_config(
        file=file,
        environ={"MONOLITH_TRAIN__TIDE__START_HOUR": "1", "MONOLITH_TRAIN__TIDE__END_HOUR": "2"},
        args=["--train.tide.start-minute", "0", "--train.hours.end-minute=5", "--train.rows-on=host"],
        warn=said.append,
    )
    assert str(run.train.hours) == "01:00-02:05 UTC"
    assert run.train.save.secs_outside_hours == 60
    assert "train.rows_on (from --train.rows-on) is now train.embedding_device" in said


def test_a_field_given_by_both_paths_in_one_source_is_refused() -> None:
    both = {"train.rows_on": "host", "train.embedding_device": "host"}
    with pytest.raises(ConfigError, match=r"train.embedding_device .*given twice, also by its old path"):
        load_run_config(code=both)
