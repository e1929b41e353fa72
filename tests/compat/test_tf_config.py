"""TF_CONFIG as discovery."""

from __future__ import annotations

import json

import pytest

from monolith.errors import AddressError, ConfigError
from monolith_compat.tf_config import TfConfigDiscovery

CLUSTER = {
    "chief": ["host0:2222"],
    "ps": ["host1:2222", "host2:2222"],
    "worker": ["host3:2222", "host4:2222", "host5:2222"],
}


def discovery(kind="worker", index=1, cluster=CLUSTER):
    return TfConfigDiscovery({"cluster": cluster, "task": {"type": kind, "index": index}})


def test_the_chief_is_worker_0_and_shifts_the_other_workers():
    found = discovery()
    assert found.query("ps") == {0: "host1:2222", 1: "host2:2222"}
    assert found.query("worker") == {0: "host0:2222", 1: "host3:2222", 2: "host4:2222", 3: "host5:2222"}
    assert (found.addr, found.server_type, found.index) == ("host4:2222", "worker", 2)


def test_the_chief_reports_itself_as_worker_0():
    found = discovery("chief", 0)
    assert (found.addr, found.server_type, found.index) == ("host0:2222", "worker", 0)


def test_a_parameter_server_keeps_its_index():
    found = discovery("ps", 1)
    assert (found.addr, found.server_type, found.index) == ("host2:2222", "ps", 1)


def test_without_a_chief_the_workers_count_from_0():
    found = discovery(cluster={"worker": ["host3:2222", "host4:2222"]})
    assert found.query("worker") == {0: "host3:2222", 1: "host4:2222"}
    assert found.index == 1


def test_a_job_of_workers_alone_has_no_parameter_servers():
    assert discovery(cluster={"worker": ["host3:2222", "host4:2222"]}).query("ps") == {}


def test_there_are_no_other_roles():
    with pytest.raises(ValueError, match="name must be ps/worker"):
        discovery().query("evaluator")


def test_registering_changes_nothing():
    found = discovery()
    found.register("worker", 9, "host9:2222")
    found.deregister("ps", 0)
    assert found.query("ps") == {0: "host1:2222", 1: "host2:2222"}
    assert 9 not in found.query("worker")


def test_it_is_read_from_the_variable_as_it_is():
    text = json.dumps({"cluster": CLUSTER, "task": {"type": "ps", "index": "1"}})
    assert TfConfigDiscovery.from_json(text).addr == "host2:2222"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"cluster": []}', '{"cluster": {"ps": "h:1"}}', '{"cluster": {}, "task": 1}']
)
def test_what_is_no_tf_config_is_refused(text):
    with pytest.raises(ConfigError, match="TF_CONFIG"):
        TfConfigDiscovery.from_json(text)


def test_an_address_that_is_none_is_refused():
    with pytest.raises(AddressError):
        discovery(cluster={"ps": ["host1"]})


@pytest.mark.parametrize("task", [{}, {"type": "ps", "index": 7}, {"type": "ps", "index": "x"}])
def test_a_task_that_the_cluster_does_not_have_is_an_error_when_asked_for(task):
    found = TfConfigDiscovery({"cluster": CLUSTER, "task": task})
    assert len(found.query("ps")) == 2
    with pytest.raises(ConfigError):
        assert found.addr
