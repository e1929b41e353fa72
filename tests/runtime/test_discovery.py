import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
from services.consul import Agent

from monolith.cluster.consul import ConsulDiscovery
from monolith.cluster.files_discovery import FilesDiscovery
from monolith.cluster.zookeeper import ZooKeeperConfig
from monolith.errors import ConfigError
from monolith.runtime import discovery
from monolith.runtime.cluster_config import DiscoveryConfig
from monolith.runtime.config import RunConfig
from monolith.runtime.config_loading import load_run_config, read_run
from monolith.runtime.discovery import (
    TORCHRUN_VARIABLES,
    Role,
    assign_role,
    discovery_defaults,
    dispatcher_address,
    installed_schedulers,
    listen_address,
    open_discovery,
)
from monolith_compat.mlp import MLPDiscovery
from monolith_compat.mpi import MPI_VARIABLES, PMI_VARIABLES
from monolith_compat.tf_config import TfConfigDiscovery
from monolith_compat.yarn import application_master

CLUSTER = {
    "chief": ["host0:2222"],
    "ps": ["host1:2222", "host2:2222"],
    "worker": ["host3:2222", "host4:2222"],
}
MLP = {
    "MLP_ROLE": "worker",
    "MLP_ROLE_INDEX": "1",
    "MLP_PORT": "2000",
    "MLP_WORKER_NUM": "2",
    "MLP_PS_NUM": "1",
    "MLP_WORKER_1_PRIMARY_HOST": "w",
    "MLP_WORKER_1_PORT": "2000",
    "YARN_INET_ADDR": "10.0.0.1",
}
RANK = {"RANK": "2", "WORLD_SIZE": "4"}


def tf_config(kind: str, index: int) -> str:
    return json.dumps({"cluster": CLUSTER, "task": {"type": kind, "index": index}})


def role_of(environ: Mapping[str, str]) -> Role:
    """The role that the scheduler of this environment names."""
    kind = discovery_defaults(environ)["discovery.kind"]
    found = DiscoveryConfig(kind=kind, tf_config=environ.get("TF_CONFIG"))
    return installed_schedulers()[kind].role(replace(RunConfig(), discovery=found), environ)


def load(**values: object) -> RunConfig:
    return load_run_config(code=values)


# What the environment says


@pytest.mark.parametrize(
    "kind, index, expected",
    [
        ("chief", 0, ("worker", 0, "host0:2222")),
        ("worker", 1, ("worker", 2, "host4:2222")),
        ("ps", 1, ("ps", 1, "host2:2222")),
    ],
)
def test_tf_config_names_role_index_address_and_counts(kind, index, expected):
    role = role_of({"TF_CONFIG": tf_config(kind, index)})
    assert (role.kind, role.index, role.address) == expected
    assert (role.num_ps, role.num_workers, role.source) == (2, 3, "TF_CONFIG")


def test_on_yarn_there_is_an_application_master_to_report_to():
    environ = {"PRIMUS_AM_RPC_HOST": "h", "PRIMUS_AM_RPC_PORT": "1"}
    assert application_master(environ) is not None
    assert application_master({}) is None


def test_mlp_names_role_and_index():
    assert role_of(MLP) == Role(
        kind="worker", index=1, source="MLP", address="w:2000", num_ps=1, num_workers=2
    )


@pytest.mark.parametrize("environ", [RANK, {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}])
def test_a_rank_is_a_worker(environ):
    run = read_run(None, environ, flags=("--cluster.mode", "sync", "--train.model-dir", "m"))
    assert (run.cluster.role, run.cluster.index, run.cluster.num_workers) == ("worker", 2, 4)


@pytest.mark.parametrize("names", [TORCHRUN_VARIABLES, MPI_VARIABLES, PMI_VARIABLES])
def test_the_first_rank_of_a_machine_has_the_port_of_metrics_and_the_rest_take_free_ones(names):
    flags = ("--cluster.mode", "sync", "--train.model-dir", "m", "--metrics.port", "9100")
    ports = []
    for rank in range(4):  # two on each of two machines
        environ = dict(zip(names, map(str, (rank, 4, rank % 2, 2)), strict=True))
        ports.append(read_run(None, environ, flags=flags).metrics.port)
    assert ports == [9100, 0, 9100, 0]


def test_tf_config_counts_more_than_mlp_and_mlp_more_than_ranks():
    everything = {**MLP, **RANK, "TF_CONFIG": tf_config("ps", 0)}
    kinds = [discovery_defaults(environ) for environ in (everything, {**MLP, **RANK}, RANK, {})]
    assert kinds == [{"discovery.kind": "tf_config"}, {"discovery.kind": "mlp"}, {}, {}]


def test_without_the_package_of_a_scheduler_an_error_names_it(monkeypatch):
    monkeypatch.setattr(discovery, "installed_schedulers", dict)
    with pytest.raises(ConfigError, match="'mlp' needs the package monolith_compat"):
        assign_role(load_run_config(code={"discovery.kind": "mlp"}), MLP)


def test_what_makes_no_sense_is_refused():
    for environ in ({"TF_CONFIG": "{"}, {"TF_CONFIG": tf_config("worker", 9)}, {"MLP_ROLE": "worker"}):
        with pytest.raises(ConfigError):
            role_of(environ)


# The config of this process


def test_discovery_by_tf_config_names_this_process():
    config = load(tf_config=tf_config("chief", 0), discovery_type="primus", model_dir="m", num_ps=2)
    placed = assign_role(config, {})
    assert (placed.cluster.role, placed.cluster.index) == ("worker", 0)
    assert placed.cluster.num_workers == 3
    placed = assign_role(load(tf_config=tf_config("ps", 1), discovery_type="primus", model_dir="m"), {})
    assert (placed.cluster.role, placed.cluster.index, placed.cluster.num_ps) == ("ps", 1, 2)


def test_discovery_by_mlp_names_this_process():
    placed = assign_role(load(discovery_type="mlp", model_dir="m"), MLP)
    assert (placed.cluster.role, placed.cluster.index) == ("worker", 1)
    assert (placed.cluster.num_ps, placed.cluster.num_workers) == (1, 2)


@pytest.mark.parametrize(("role", "placed"), [("dispatcher", "dispatcher"), ("DSWORKER", "data_worker")])
def test_a_process_that_mlp_started_to_read_data_does_so(role, placed):
    environ = {**MLP, "MLP_ROLE": role, f"MLP_{role.upper()}_NUM": "3", "MLP_ROLE_INDEX": "2"}
    cluster = assign_role(load(discovery_type="mlp", model_dir="m"), environ).cluster
    assert (cluster.role, cluster.index) == (placed, 2)


def test_a_role_that_a_run_does_not_have_is_refused_with_the_nearest():
    environ = {**MLP, "MLP_ROLE": "dispacher", "MLP_DISPACHER_NUM": "1"}
    with pytest.raises(ConfigError, match="did you mean dispatcher"):
        assign_role(load(discovery_type="mlp", model_dir="m"), environ)


def test_the_dispatcher_is_where_the_config_or_mlp_says():
    service = load(discovery_type="mlp", model_dir="m", use_dataservice=True)
    found = {"MLP_DISPATCHER_0_PRIMARY_HOST": "d", "MLP_DISPATCHER_0_PORT": "5"}
    assert dispatcher_address(service, {**MLP, **found}) == "d:5"
    named = replace(service, data_service=replace(service.data_service, dispatcher="e:6"))
    assert dispatcher_address(named, {**MLP, **found}) == "e:6"
    assert dispatcher_address(load(), {}) is None  # a registry may know


def test_a_misspelled_variable_of_the_dispatcher_is_named_next_to_the_missing_one():
    service = load(discovery_type="mlp", model_dir="m", use_dataservice=True)
    wrong = {"MLP_DISPACHER_0_PRIMARY_HOST": "d", "MLP_DISPATCHER_0_PORT": "5"}
    with pytest.raises(
        ConfigError, match=r"no MLP_DISPATCHER_0_PRIMARY_HOST.*it has MLP_DISPACHER_0_PRIMARY_HOST"
    ):
        dispatcher_address(service, {**MLP, **wrong})


def test_a_process_without_an_entry_of_its_own_listens_on_mlp_port():
    environ = {"MLP_ROLE": "worker", "MLP_WORKER_NUM": "1", "MLP_PORT": "2000", "YARN_INET_ADDR": "10.0.0.9"}
    assert listen_address(load(discovery_type="mlp"), environ) == ("10.0.0.9", 2000)


def test_an_mlp_port_that_contradicts_what_others_are_told_is_refused():
    with pytest.raises(ConfigError, match=r"worker 1, listens on port 2001, and others are told w:2000"):
        listen_address(load(discovery_type="mlp"), {**MLP, "MLP_PORT": "2001"})


def test_flags_name_this_process_with_every_other_registry():
    config = load(num_ps=1, num_workers=3, index=2, model_dir="m", uuid="u")
    assert assign_role(config, {**MLP, **RANK, "TF_CONFIG": tf_config("ps", 0)}) == config


def test_a_local_run_is_left_alone():
    config = load(is_local=True, discovery_type="mlp")
    assert assign_role(config, MLP) == config


# The registry


def test_a_local_run_has_no_registry():
    with open_discovery(load(is_local=True), {}) as discovery:
        assert discovery is None


def test_each_kind_opens_its_registry(tmp_path):
    primus = load(tf_config=tf_config("chief", 0), discovery_type="primus")
    with open_discovery(primus, {}) as discovery:
        assert isinstance(discovery, TfConfigDiscovery)
        assert discovery.query("ps") == {0: "host1:2222", 1: "host2:2222"}
    with open_discovery(load(uuid="data.monolith.123456"), {}) as discovery:
        assert isinstance(discovery, ConsulDiscovery)
    with open_discovery(load(discovery_type="mlp"), MLP) as discovery:
        assert isinstance(discovery, MLPDiscovery)
    files = load_run_config(code={"discovery.kind": "files", "discovery.folder": str(tmp_path / "d")})
    with open_discovery(files, {}) as discovery:
        assert isinstance(discovery, FilesDiscovery)


@pytest.mark.parametrize("socket", [False, True])
def test_a_run_meets_through_consuls_lookup_api_by_a_setting(tmp_path, socket):
    agent = Agent(vendor=True, path=tmp_path / "consul.sock" if socket else None)
    code = {"job.id": "data.monolith.123456", "discovery.kind": "consul", "discovery.consul_api": "lookup"}
    environ = {"CONSUL_HTTP_HOST": agent.host} | ({} if socket else {"CONSUL_HTTP_PORT": str(agent.port)})
    try:
        with open_discovery(load_run_config(code=code), environ) as one:
            one.register("ps", 0, "10.0.0.1:1")
            with open_discovery(load_run_config(code=code), environ) as other:
                assert other.query("ps") == {0: "10.0.0.1:1"}
        assert ("GET", "/v1/lookup/name") in agent.requests
        assert not any(path.startswith("/v1/health") for _, path in agent.requests)
    finally:
        agent.stop()


def test_zookeeper_is_told_the_job_the_servers_and_this_process(monkeypatch):
    opened: list[tuple[str, ZooKeeperConfig]] = []
    monkeypatch.setattr(discovery, "ZooKeeperDiscovery", lambda job, config: opened.append((job, config)))
    values = {"discovery_type": "zk", "zk_server": "127.0.0.1:0", "deep_insight_name": "j"}
    open_discovery(load_run_config(code=values, environ={"ZK_AUTH": "u:p"}), {})
    open_discovery(load(discovery_type="zk", deep_insight_name="j"), {"zk_servers": "other:2181"})
    first, second = (config for _, config in opened)
    assert [job for job, _ in opened] == ["j", "j"]
    assert (first.servers, first.auth) == ("127.0.0.1:0", (("digest", "u:p"),))
    assert (second.servers, second.auth) == ("other:2181", ())


def test_a_registry_needs_a_name_to_meet_under():
    with pytest.raises(ConfigError, match=r"job\.id"):
        open_discovery(load(), {})
    with pytest.raises(ConfigError, match=r"job\.name"):
        open_discovery(load(discovery_type="zk"), {})
    with pytest.raises(ConfigError, match="no servers are named"):
        open_discovery(load(discovery_type="zk", deep_insight_name="j"), {})


def test_a_scheduler_that_named_all_processes_is_the_registry():
    assert discovery_defaults({"TF_CONFIG": "{}", **MLP}) == {"discovery.kind": "tf_config"}
    assert discovery_defaults(MLP) == {"discovery.kind": "mlp"}
    assert discovery_defaults({"TF_CONFIG": "", "MLP_ROLE": " "}) == {}


# Where to listen


def test_a_process_listens_where_its_scheduler_said_that_it_does():
    primus = load(tf_config=tf_config("ps", 1), discovery_type="primus")
    assert listen_address(primus, {}) == ("host2", 2222)
    assert listen_address(load(discovery_type="mlp"), MLP) == ("w", 2000)


def test_elsewhere_it_listens_on_the_machines_own_address_and_any_port():
    files = {"discovery.kind": "files", "discovery.folder": "d"}
    environ = {"CLOUDNATIVE_INET_ADDR": "10.0.0.7,10.0.0.8"}
    assert listen_address(load_run_config(code=files), environ) == ("10.0.0.7", 0)


def test_the_config_has_the_last_word_on_where_to_listen():
    here = {"cluster.listen": "127.0.0.1", "cluster.port": 81}
    config = load_run_config(code={"tf_config": tf_config("ps", 1), "discovery_type": "primus", **here})
    assert listen_address(config, {}) == ("127.0.0.1", 81)
    config = load_run_config(code={"cluster.listen": "127.0.0.1", "uuid": "u"})
    assert listen_address(config, {"CLOUDNATIVE_INET_ADDR": "10.0.0.7"}) == ("127.0.0.1", 0)


def test_of_the_servers_that_tf_config_names_the_spare_ones_are_not_used():
    config = load(tf_config=tf_config("ps", 1), discovery_type="primus", model_dir="m", num_redundant_ps=1)
    placed = assign_role(config, {})
    assert (placed.cluster.num_ps, placed.cluster.index) == (1, 1)
