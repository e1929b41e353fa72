from datetime import timedelta

import pytest

from monolith.cluster.run_config import (
    USER_DEFAULTS,
    RunConfig,
    for_rank,
    load_run_config,
    settle,
    settle_for_user,
)
from monolith.errors import ConfigError


def load(**values: object) -> RunConfig:
    return load_run_config(code=values)


def test_the_model_is_named_after_the_job_or_the_task():
    assert settle(load(model_name="m", deep_insight_name="j")).job.model_name == "m"
    assert settle(load(deep_insight_name="j")).job.model_name == "j"
    assert settle(load(task="tasks.ctr:MyTask")).job.model_name == "di_name_MyTask"
    assert settle(load(task="tasks.ctr.MyTask")).job.model_name == "di_name_MyTask"


def test_real_time_recovers_in_part_saves_weights_often_and_retries():
    # Upstream computed the retries before real time turned partial recovery on, and gave up at once.
    config = settle(load(enable_realtime_training=True))
    assert config.failover.partial_recovery is True
    assert config.failover.max_retries == 6
    assert config.checkpoint.dense_every == timedelta(minutes=30)


def test_real_time_changes_nothing_that_was_chosen():
    chosen = load(enable_realtime_training=True, partial_recovery=False, dense_only_save_checkpoints_steps=5)
    config = settle(chosen)
    assert (config.failover.partial_recovery, config.failover.max_retries) == (False, 6)
    assert (config.checkpoint.dense_every, config.checkpoint.dense_every_steps) == (None, 5)


@pytest.mark.parametrize(
    "values, retries",
    [({}, 6), ({"partial_recovery": True}, 6), ({"max_retry_times": 2}, 2), ({"max_retry_times": 0}, 6)],
)
def test_a_worker_joins_again_six_times_unless_told(values, retries):
    assert settle(load(**values)).failover.max_retries == retries


def test_no_retries_can_be_asked_for():
    assert settle(load_run_config(code={"failover.max_retries": 0})).failover.max_retries == 0


def test_summaries_go_where_the_checkpoints_are_unless_told():
    assert settle(load(model_dir="/m")).metrics.tensorboard_dir == "/m"
    assert settle(load(model_dir="/m", tensorboard_log_path="/t")).metrics.tensorboard_dir == "/t"


def test_settling_again_changes_nothing():
    once = settle(load(enable_realtime_training=True, model_dir="/m"))
    assert settle(once) == once


def test_an_author_gets_zookeeper_in_place_of_consul_and_does_not_wait_for_rows():
    values = {"num_ps": 1, "model_dir": "/m", "deep_insight_name": "j"}
    config = settle_for_user(load_run_config(code=values, defaults=USER_DEFAULTS))
    assert config.discovery.kind == "zookeeper"
    assert (config.embedding.prefetch, config.embedding.postpush) == (1, True)
    assert settle_for_user(load(embedding_prefetch_capacity=3)).embedding.prefetch == 3
    files = {"discovery.kind": "files", "discovery.folder": "/d"}
    assert settle_for_user(load_run_config(code={**values, **files})).discovery.kind == "files"


@pytest.mark.parametrize("values", [{"enable_gpu_training": True}, {"enable_sync_training": True}])
def test_on_gpus_and_where_ranks_step_together_rows_are_as_chosen(values):
    config = settle_for_user(load(**values))
    assert (config.embedding.prefetch, config.embedding.postpush) == (0, False)


def test_parameter_sync_is_real_time():
    assert load(enable_parameter_sync=True).training.realtime


def test_a_rank_is_a_worker_among_ranks_and_there_are_no_servers():
    config = for_rank(load(enable_sync_training=True, num_ps=4, model_dir="/m", uuid="u"), 3, 8)
    assert (config.cluster.role, config.cluster.index, config.cluster.num_workers) == ("worker", 3, 8)
    assert config.cluster.num_ps == 0
    assert config.data.reorder_fids
    assert not config.dense.partition
    assert config.job.model_dir == "/m"


def test_a_rank_has_a_folder_of_its_own_where_checkpoints_are_not_merged():
    values = {"enable_sync_training": True, "merge_sync_training_ckpt": False, "model_dir": "/m", "uuid": "u"}
    assert for_rank(load(**values), 3, 8).job.model_dir == "/m/u/index-0003"


def test_there_is_no_rank_beyond_the_last():
    with pytest.raises(ConfigError, match="counted from 0"):
        for_rank(RunConfig(), 2, 2)
