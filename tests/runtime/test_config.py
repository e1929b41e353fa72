import dataclasses
import subprocess
import sys

import pytest

from monolith.cluster.security import SecurityConfig
from monolith.data import DataConfig, KafkaConfig
from monolith.errors import ConfigError
from monolith.runtime.config import RunConfig
from monolith.runtime.config_loading import check_run, load_run_config
from monolith.table import AdmissionConfig
from monolith.train import SaveConfig, TrainConfig

DISTRIBUTED = {"num_ps": 1, "num_workers": 2}
KAFKA = {"kafka_topics": "a", "kafka_servers": "h:1", "kafka_group_id": "g"}


@pytest.mark.parametrize(
    "values, problem",
    [
        (DISTRIBUTED, "model dir can't be empty"),
        ({**DISTRIBUTED, "model_dir": "m", "discovery_type": "zk"}, "under the job's name"),
        ({"server_type": "ps"}, "num_ps is 0"),
        (
            {"server_type": "ps", "index": 2, "num_ps": 2, "model_dir": "m"},
            "num_ps is 2 and indices begin at 0, so 2 is too high",
        ),
        (
            {"server_type": "ps", "index": 4, "num_ps": 2, "num_extra_ps": 1, "num_redundant_ps": 1},
            "num_ps + num_redundant_ps + num_extra_ps is 4 and indices begin at 0, so 4 is too high",
        ),
        ({"num_extra_ps": -1}, "must be at least 0"),
        ({"num_redundant_ps": -1}, "must be at least 0"),
        ({"num_ps": 2, "cluster.standbys": 3}, "must be from 0 to 2, got 3"),
        ({"cluster.standby_interval": 0.001}, "must be at least 10 ms"),
        (
            {"server_type": "ps", "index": 4, "num_ps": 2, "cluster.standbys": 1, "model_dir": "m"},
            "num_ps + num_redundant_ps + num_extra_ps + standbys * num_ps is 4 and indices begin at 0",
        ),
        ({"cluster.measure_ps": -1}, "must be at least 0"),
        ({"num_ps": 2, "num_extra_ps": 1, "cluster.use_ps": ["a:1"]}, "names 1 servers, and num_ps is 2"),
        ({"num_ps": 1, "cluster.use_ps": ["a:1"]}, "there is nothing to choose from"),
        ({"index": 1}, "num_workers is 1 and indices begin at 0, so 1 is too high"),
        ({"index": -1}, "must be at least 0"),
        ({"num_workers": 0}, "must be at least 1"),
        ({"server_type": "master"}, "one of 'worker', 'ps'"),
        ({"discovery_type": "primus"}, "set tf_config, or the variable TF_CONFIG"),
        ({"discovery.kind": "files"}, "needs a folder"),
        ({"tf_config": "{"}, "is not JSON"),
        ({"tf_config": "[]"}, '"cluster" in it'),
        ({"save_checkpoints_secs": 1, "save_checkpoints_steps": 1}, "Can not provide both"),
        ({"reset_dense": False, "continue_training": True}, "continue_training says what reset_dense does"),
        ({"tide_start_hour": 3}, "train.hours.end_hour is required"),
        ({"tide_save_secs": 0}, "secs_outside_hours must be above 0"),
        ({"start_date": "2024-01-31"}, "a day such as 20240131"),
        ({"start_date": "20240201", "end_date": "20240131"}, "is after"),
        ({"kafka_topics": "a"}, "kafka.servers is required"),
        ({**KAFKA, "kafka.settings": {"sasl.password": "p"}}, "give a password as kafka.password"),
        ({"operation_timeout_in_ms": 0}, "must be more than 0"),
        ({"uuid": "a/b"}, "no slash"),
        ({"train.steps": -1}, "steps must be above 0"),
        ({"threads.intra_op": 0}, "must be at least 1"),
        ({"filter_capacity": 5}, "capacity must be at least 300"),
        ({"data.start_hour": 3}, "set hourly"),
    ],
)
def test_what_does_not_go_together_is_refused(values, problem):
    with pytest.raises(ConfigError) as caught:
        load_run_config(code=values)
    assert problem in str(caught.value)


def test_servers_beyond_those_that_are_used_have_an_index_too():
    run = load_run_config(
        args=["--num_ps=2", "--num_extra_ps=1", "--cluster.num-redundant-ps", "1", "--model_dir=m"],
        code={"server_type": "ps", "index": 3},
    )
    assert (run.cluster.num_extra_ps, run.cluster.num_redundant_ps, run.cluster.num_spares) == (1, 1, 2)


def test_standbys_have_an_index_too_and_need_a_run_that_keeps_going():
    values = {"server_type": "ps", "index": 3, "num_ps": 2, "cluster.standbys": 1, "model_dir": "m"}
    assert load_run_config(code=values).cluster.num_spares == 2
    assert load_run_config(code={**values, "cluster.standbys": 2}).cluster.num_spares == 4
    with pytest.raises(ConfigError, match="a standby may lack the last updates of a lost server"):
        check_run(load_run_config(code=values))
    check_run(load_run_config(code={**values, "failover.recovery": "keep_going"}))


def test_a_run_contains_the_configs_of_the_rooms():
    run = load_run_config(
        code={**KAFKA, "train.save.steps": 5, "data.path": "d", "admission.kind": "no_filter"}
    )
    assert run.train == TrainConfig(save=SaveConfig(steps=5, asynchronous=True))
    assert run.kafka == KafkaConfig(servers=("h:1",), topics=("a",), group="g")
    assert run.security == SecurityConfig()
    assert run.inputs == {
        "kafka": run.kafka,
        "data": DataConfig(path="d"),
        "admission": AdmissionConfig(kind="no_filter"),
    }


def test_a_run_that_says_nothing_is_a_training_with_its_defaults():
    assert load_run_config().train == TrainConfig()
    assert RunConfig().inputs == {}


def test_reading_a_run_needs_no_torch():
    program = (
        "import sys\n"
        "from monolith.runtime import config_help, config_loading\n"
        "config_loading.load_run_config(args=['--num_ps=0'], environ={})\n"
        "config_help.template('ps')\n"
        "sys.exit('torch' in sys.modules or 'pyarrow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=120).returncode == 0


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().cluster.num_ps = 3  # type: ignore[misc]
