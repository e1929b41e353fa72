"""The MLP environment: who this is, where the others are, and waiting for them."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
from services.servers import free_port

from monolith.errors import ConfigError, DeadlineExceededError
from monolith_compat.mlp import MLPDiscovery, MLPEnv

WORKER = {
    "MLP_ROLE": "worker",
    "MLP_ROLE_INDEX": "1",
    "MLP_PORT": "2000",
    "MLP_WORKER_NUM": "2",
    "MLP_PS_NUM": "1",
    "MLP_PS_0_PRIMARY_HOST": "h",
    "MLP_PS_0_PORT": "3000",
}
MPI = WORKER | {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MLP_WORKER_0_PORT": "4000",
    "MLP_WORKER_0_PRIMARY_HOST": "w0",
    "MLP_WORKER_1_PRIMARY_HOST": "w1",
}


def env(variables=WORKER, **more):
    return MLPEnv({**variables, **more}, host="own")


def test_the_environment_names_this_process_and_the_addresses_of_its_peers():
    mlp = env()
    assert (mlp.role, mlp.index, mlp.port) == ("WORKER", 1, 2000)
    assert mlp.all_roles == {"WORKER": 2, "PS": 1}
    assert mlp.get_addr("ps") == "h:3000"
    assert mlp.num_replicas("ps") == 1
    assert mlp.num_replicas() == 2
    assert mlp.available
    assert mlp.avaiable


def test_under_mpi_the_rank_counts_and_containers_hold_several():
    mlp = env(MPI)
    assert (mlp.enable_mpi, mlp.index, mlp.port) == (True, 3, 2003)
    assert mlp.get_addr("worker", 3) == "w1:4003"
    assert mlp.get_addr("worker", 1) == "w0:4001"
    assert mlp.get_addr() == "w1:4003"
    assert mlp.all_roles == {"WORKER": 4, "PS": 1}
    assert mlp.num_replicas("worker") == 4
    assert mlp.get_addr("ps") == "h:3000"


def test_mpi_ranks_count_for_workers_only():
    mlp = env(MPI, MLP_ROLE="ps", MLP_ROLE_INDEX="0")
    assert (mlp.enable_mpi, mlp.index, mlp.port) == (False, 0, 2000)
    assert mlp.num_replicas("worker") == 2


def test_ports_are_numbers():
    mlp = env(MLP_SSH_PORT="22", MLP_DEBUG_PORT=" 5678 ")
    assert (mlp.ssh_port, mlp.debug_port, mlp.get_port("ps"), mlp.get_port("worker")) == (
        22,
        5678,
        3000,
        2222,
    )
    assert env(MPI).get_port("worker", 2) == 4002
    without = {name: text for name, text in MPI.items() if name != "MLP_WORKER_0_PORT"}
    assert env(without).get_port("worker", 2) == 2224


def test_quotes_and_blanks_around_a_value_do_not_count_and_empty_is_missing():
    mlp = env(MLP_FRAMEWORK='"abc"', MLP_LOG_PATH=" '/logs' ", MLP_TASK_CMD='""', MLP_GPU_TYPE="")
    assert (mlp.framework, mlp.log_path, mlp.task_cmd, mlp.gpu_type) == ("abc", "/logs", None, "")


def test_resources_are_no_roles():
    mlp = env(MLP_GPU_NUM="8", MLP_CPU_NUM="4", MLP_GPU="2", MLP_CPU="16", MLP_MEM="1024", MLP_A_B_NUM="7")
    assert mlp.all_roles == {"WORKER": 2, "PS": 1}
    assert (mlp.cpu, mlp.gpu, mlp.mem) == (16, 2, 1024)


def test_without_the_scheduler_there_is_nothing():
    mlp = MLPEnv({"HOME": "/root"}, host="own")
    assert not mlp.available
    assert (mlp.role, mlp.index, mlp.port, mlp.all_roles, mlp.cpu) == ("", 0, 0, {}, 0)
    assert (mlp.framework, mlp.ssh_port, mlp.debug_port, mlp.entrypoint_dir) == (None, None, None, None)
    assert mlp.queue_owner is None


def test_the_host_is_what_the_scheduler_names():
    assert MLPEnv({**WORKER, "CLOUDNATIVE_INET_ADDR": "1.2.3.4,::1"}).host == "1.2.3.4"


def test_a_number_that_is_none_is_an_error_that_names_the_variable():
    for name in ("MLP_PORT", "MLP_WORKER_NUM", "MLP_ROLE_INDEX"):
        with pytest.raises(ConfigError, match=name):
            env(**{name: "many"})


def test_all_hosts_and_addresses_are_lists():
    mlp = env(MLP_PS_ALL_PRIMARY_HOSTS="a,b", MLP_PS_ALL_HOSTS="c", MLP_PS_ALL_ADDRS="a:1, b:2,")
    assert mlp.get_all_host("ps") == ["a", "b"]
    assert mlp.get_all_host("ps", is_primary=False) == ["c"]
    assert mlp.get_all_addrs("ps", is_primary=False) == ["a:1", "b:2"]
    assert mlp.get_all_addrs("ps") == []
    assert mlp.get_all_host("worker") == []


def test_an_own_entry_is_found_by_the_own_index_and_that_of_others_by_0():
    mlp = env(MLP_WORKER_1_PRIMARY_HOST="me", MLP_WORKER_1_HOST="me-too", MLP_WORKER_0_PRIMARY_HOST="chief")
    assert mlp.get_host() == "me"
    assert mlp.get_host(is_primary=False) == "me-too"
    assert mlp.get_host("worker", 0) == "chief"
    assert mlp.get_host("ps") == "h"
    assert mlp.get_host("dispatcher") is None
    assert mlp.get_addr("worker", 0) is None  # it has no port


def test_ipv6_hosts_wear_brackets():
    assert env(MLP_PS_0_PRIMARY_HOST="::1").get_addr("ps") == "[::1]:3000"


def test_the_dispatcher_has_a_target_in_any_case():
    assert env().dispatcher_target() == "grpc://localhost:5050"
    named = env(MLP_DISPATCHER_0_PRIMARY_HOST="d", MLP_DISPATCHER_0_PORT="7")
    assert (named.dispatcher_addr(), named.dispatcher_target()) == ("d:7", "grpc://d:7")


def test_the_input_queue_is_on_the_first_ps_or_else_worker():
    assert env().queue_owner == ("ps", 0)
    assert env({"MLP_ROLE": "worker", "MLP_WORKER_NUM": "1"}).queue_owner == ("worker", 0)


def test_extra_data_workers_and_profilers_of_all_ranks_have_ports_of_their_own():
    ranks = [env(MPI, OMPI_COMM_WORLD_RANK=str(rank)) for rank in range(4)]
    extra = [port for rank in ranks for port in rank.extra_dsworker_ports(2)]
    assert extra == list(range(2004, 2012))
    assert {rank.port for rank in ranks}.isdisjoint(extra)
    assert [rank.profiler_port() for rank in ranks] == [6666, 6667, 6668, 6669]
    assert env().profiler_port() == 6666


def test_profiles_are_written_where_the_whole_environment_says():
    assert env().trace_folder == "/tensorboard_logs/"
    assert env(TENSORBOARD_LOG_PATH="/tb").trace_folder == "/tb"


# Waiting and joining


class Peer:
    """Ports that answer as planned, and the time that passes."""

    def __init__(self, answers):
        self.answers = iter(answers)
        self.asked = []
        self.now = 0.0
        self.left = []

    def check(self, host, port, timeout):
        self.asked.append((host, port, timeout.total_seconds()))
        self.now += 1.0
        return next(self.answers)

    def sleep(self, seconds):
        self.now += seconds

    @property
    def hands(self):
        return {"check": self.check, "clock": lambda: self.now, "sleep": self.sleep}

    @property
    def of_join(self):
        return {"check": self.check, "sleep": self.sleep}


def test_waiting_asks_every_five_seconds_until_the_peer_answers():
    peer = Peer([False, False, True])
    assert env().wait("ps", use_ssh=False, **peer.hands)
    assert peer.asked == [("h", 3000, 1.0)] * 3
    assert peer.now == 13.0


def test_waiting_asks_at_the_ssh_port_where_there_is_one():
    peer = Peer([True, True])
    assert env(MLP_SSH_PORT="22").wait("ps", **peer.hands)
    assert env().wait("ps", **peer.hands)
    assert [port for _, port, _ in peer.asked] == [22, 3000]


def test_the_time_that_asking_takes_counts_for_the_timeout(caplog):
    peer = Peer([False] * 100)
    assert not env().wait("ps", timeout=timedelta(seconds=12), use_ssh=False, **peer.hands)
    assert peer.now <= 13.0
    assert "wait h:3000 timeout!" in caplog.text


def test_waiting_for_a_process_that_is_not_named_ends_at_once(caplog):
    assert not env().wait("dispatcher", **Peer([]).hands)
    assert "host is None" in caplog.text


def test_a_helper_joins_the_chief_and_leaves_with_it():
    peer = Peer([False, True, True, True, False])
    left = []
    chief = {"MLP_WORKER_0_PRIMARY_HOST": "c", "MLP_WORKER_0_PORT": "9"}
    env({**WORKER, **chief, "MLP_ROLE": "dispatcher"}).join(leave=left.append, **peer.of_join)
    assert left == [0]
    assert [timeout for _, _, timeout in peer.asked] == [1.0, 1.0, 60.0, 60.0, 60.0]
    assert peer.now == 5 + 5 + 2 * 10


def test_leaving_ends_the_process_with_status_0():
    chief = {"MLP_WORKER_0_PRIMARY_HOST": "c", "MLP_WORKER_0_PORT": "9"}
    with pytest.raises(SystemExit) as left:
        env({**WORKER, **chief}).join(**Peer([True, False]).of_join)
    assert left.value.code == 0


def test_joining_a_role_without_processes_is_an_error():
    with pytest.raises(ConfigError, match="MLP_WORKER_0_PRIMARY_HOST"):
        env().join(**Peer([]).of_join)


# Discovery


def cluster(ports=(3000, 3001)):
    variables = {
        "MLP_ROLE": "worker",
        "MLP_ROLE_INDEX": "1",
        "MLP_PORT": "2001",
        "MLP_PS_NUM": "2",
        "MLP_WORKER_NUM": "2",
    }
    for index in range(2):
        variables |= {
            f"MLP_PS_{index}_PRIMARY_HOST": "127.0.0.1",
            f"MLP_PS_{index}_PORT": str(ports[index]),
            f"MLP_WORKER_{index}_PRIMARY_HOST": f"w{index}",
            f"MLP_WORKER_{index}_HOST": f"w{index}-other",
            f"MLP_WORKER_{index}_PORT": str(2000 + index),
        }
    return MLPEnv(variables, host="own")


WORKERS = {0: "w0:2000", 1: "w1:2001"}


def test_the_roles_of_the_environment_are_found():
    discovery = MLPDiscovery(cluster())
    assert discovery.query("worker") == WORKERS
    assert discovery.query("ps", skip_port_check=True) == {0: "127.0.0.1:3000", 1: "127.0.0.1:3001"}
    assert discovery.query_all() == {"ps": {0: "127.0.0.1:3000", 1: "127.0.0.1:3001"}, "worker": WORKERS}
    assert discovery.query("dispatcher") == {}
    assert (discovery.addr, discovery.server_type, discovery.index) == ("own:2001", "worker", 1)


def test_what_is_deregistered_is_hidden_until_it_is_registered_again():
    discovery, told = MLPDiscovery(cluster()), []
    discovery.watch("worker", told.append)
    discovery.deregister("worker", 0, "w0:2000")
    assert discovery.query("worker") == {1: "w1:2001"}
    discovery.register("worker", 0, "w0:2000")
    assert discovery.query("worker") == WORKERS
    assert told == [WORKERS, {1: "w1:2001"}, WORKERS]


def test_everything_can_be_hidden():
    discovery = MLPDiscovery(cluster())
    discovery.deregister_all()
    assert discovery.query_all() == {"ps": {}, "worker": {}}


@pytest.mark.parametrize(
    "host", ["local", "localhost", "127.0.0.1", "0.0.0.0", "[::1]", "w1", "own", "w1-other"]
)
def test_a_process_may_call_itself_by_any_of_its_names(host):
    discovery = MLPDiscovery(cluster())
    before = discovery.query("worker")
    discovery.register("worker", 1, f"{host}:2001")
    assert discovery.query("worker") == before  # what the environment says stands


@pytest.mark.parametrize(
    ("role", "index", "address", "what"),
    [
        ("worker", 1, "w1:9999", "port 2001"),
        ("worker", 2, "w1:2001", "there are 2"),
        ("dispatcher", 0, "w1:2001", "roles"),
        ("worker", 1, "stranger:2001", "host w1"),
        ("worker", 1, "w1", "Invalid addr"),
    ],
)
def test_what_mlp_does_not_say_is_refused(role, index, address, what):
    with pytest.raises(ValueError, match=what):
        MLPDiscovery(cluster()).register(role, index, address)


def test_parameter_servers_are_found_once_their_ports_answer():
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = one.getsockname()[1], other.getsockname()[1]
        assert len(MLPDiscovery(cluster(ports)).query("ps")) == 2


def test_a_parameter_server_that_does_not_answer_in_time_is_named():
    port = free_port()
    discovery = MLPDiscovery(cluster((port, port)), ps_timeout=timedelta(milliseconds=100))
    with pytest.raises(DeadlineExceededError, match=f"127.0.0.1:{port} connect error!"):
        discovery.query("ps")
    assert len(discovery.entries("ps")) == 2


def test_after_closing_nothing_is_found():
    discovery = MLPDiscovery(cluster())
    discovery.close()
    assert discovery.query("worker") == discovery.query_all() == {}
