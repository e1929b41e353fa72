import dataclasses

import pytest

from monolith.cluster.run_config import RunConfig, load_run_config
from monolith.errors import ConfigError

DISTRIBUTED = {"num_ps": 1, "num_workers": 2}


@pytest.mark.parametrize(
    "values, problem",
    [
        (DISTRIBUTED, "model dir can't be empty"),
        ({**DISTRIBUTED, "model_dir": "m", "discovery_type": "zk"}, "under the job's name"),
        ({"server_type": "ps"}, "num_ps is 0"),
        ({"server_type": "ps", "index": 2, "num_ps": 2, "model_dir": "m"}, "there are 2 of this role"),
        ({"index": 1}, "there are 1 of this role"),
        ({"index": -1}, "must be at least 0"),
        ({"num_workers": 0}, "must be at least 1"),
        ({"num_extra_ps": 1}, "nothing to add servers to"),
        ({"zk_watch_address_family": "ipv5"}, "one of 'ipv4', 'ipv6'"),
        ({"server_type": "master"}, "one of 'worker', 'ps'"),
        ({"discovery_type": "primus"}, "set tf_config, or the variable TF_CONFIG"),
        ({"discovery.kind": "files"}, "needs a folder"),
        ({"tf_config": "{"}, "is not JSON"),
        ({"tf_config": "[]"}, '"cluster" in it'),
        ({"save_checkpoints_secs": 1, "save_checkpoints_steps": 1}, "only one of them may be set"),
        ({"enable_async_optimize": True}, "only synchronous training"),
        ({"enable_sync_training": True, "enable_embedding_postpush": True}, "out of step"),
        ({"enable_sync_training": True, "enable_variable_prefetch": True}, "only asynchronous"),
        ({"clear_nn": False, "continue_training": True}, "unless reset_dense is on"),
        ({"tide_start_hour": 3}, "a window needs all four"),
        ({"tide_save_secs": 0}, "must be more than 0"),
        ({"start_date": "2024-01-31"}, "a day such as 20240131"),
        ({"start_date": "20240201", "end_date": "20240131"}, "is after"),
        ({"kafka_topics": "a"}, "topics need servers"),
        ({"kafka.settings": {"sasl.password": "p"}}, "give a password as kafka.password"),
        ({"enable_resource_constrained_roughsort": True}, "needs the path of the items"),
        ({"profile_with_nvprof_from_to": "9,3"}, "a first and a last step"),
        ({"deep_insight_sample_ratio": 1.5}, "from 0 to 1"),
        ({"operation_timeout_in_ms": 0}, "must be more than 0"),
        ({"uuid": "a/b"}, "no slash"),
    ],
)
def test_what_does_not_go_together_is_refused(values, problem):
    with pytest.raises(ConfigError) as caught:
        load_run_config(code=values)
    assert problem in str(caught.value)


def test_a_server_in_real_time_must_know_whom_to_update():
    base = {**DISTRIBUTED, "model_dir": "m", "server_type": "ps", "enable_realtime_training": True}
    with pytest.raises(ConfigError) as caught:
        load_run_config(code=base)
    assert str(caught.value).count("must know which servers of requests to update") == 2
    assert load_run_config(code={**base, "bzid": "b", "base_name": "n"}).training.realtime


def test_full_synchrony_is_synchrony_that_is_not_partial():
    base = {"enable_sync_training": True, "num_ps": 1, "model_dir": "m"}
    assert load_run_config(code=base).training.fully_synchronous
    assert not load_run_config(code={**base, "enable_partial_sync_training": True}).training.fully_synchronous
    assert not RunConfig().training.fully_synchronous


def test_servers_to_start_are_those_needed_extra_and_redundant():
    values = {"num_ps": 2, "num_extra_ps": 1, "num_redundant_ps": 3, "model_dir": "m"}
    config = load_run_config(code={**values, "server_type": "ps", "index": 5})
    assert config.cluster.total_ps == 6


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().cluster.num_ps = 3  # type: ignore[misc]
