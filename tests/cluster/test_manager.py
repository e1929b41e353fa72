"""A cluster put together from discovery, in no time: the clock moves only while somebody sleeps."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from monolith.cluster import (
    Cluster,
    ClusterManager,
    ClusterManagerConfig,
    MemoryDiscovery,
    ProcessRole,
    fetch_ps_cluster,
    save_ps_cluster,
)
from monolith.errors import ConfigError, DeadlineExceededError, UnavailableError
from monolith.observe import Metrics

OWN = "10.0.0.9:1"


class Time:
    """Does what is planned for each sleep."""

    def __init__(self, *plans):
        self.now = 0.0
        self.slept = []
        self.plans = list(plans)

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds
        if self.plans:
            self.plans.pop(0)()

    @property
    def hands(self):
        return {"clock": lambda: self.now, "sleep": self.sleep}


def config(**options):
    return ClusterManagerConfig(**{"num_workers": 4, "num_ps": 2, **options})


def registered(*ps, chief="10.0.0.1:1"):
    discovery = MemoryDiscovery()
    for index, address in ps:
        discovery.register("ps", index, address)
    if chief:
        discovery.register("worker", 0, chief)
    return discovery


A, B, C = "a:1", "b:1", "c:1"


def test_servers_are_taken_by_index_and_no_more_than_needed():
    manager = ClusterManager(registered((2, C), (0, A), (1, B)), config(), **Time().hands)
    assert manager.query_ps(2) == [A, B]


def test_the_chief_has_its_own_address_and_workers_are_placeholders():
    cluster, task = ClusterManager(registered((0, A), (1, B)), config()).training_cluster(OWN, 0)
    assert cluster == Cluster(OWN, ("0.0.0.0:1", "0.0.0.0:2", "0.0.0.0:3"), (A, B))
    assert task == ProcessRole("chief", 0)


def test_a_worker_finds_the_chief_and_puts_itself_into_the_list():
    cluster, task = ClusterManager(registered((0, A), (1, B)), config()).training_cluster(OWN, 2)
    assert cluster == Cluster("10.0.0.1:1", ("0.0.0.0:1", OWN, "0.0.0.0:3"), (A, B))
    assert task == ProcessRole("worker", 1)


def test_other_workers_are_not_part_of_the_picture():
    discovery = registered((0, A), (1, B))
    before = ClusterManager(discovery, config()).training_cluster(OWN, 2)
    discovery.register("worker", 1, "10.0.0.5:1")
    assert ClusterManager(discovery, config()).training_cluster(OWN, 2) == before
    discovery.register("ps", 1, C)
    assert ClusterManager(discovery, config()).training_cluster(OWN, 2) != before


def test_a_job_without_servers_waits_for_none():
    time = Time()
    cluster, _ = ClusterManager(MemoryDiscovery(), config(num_ps=0), **time.hands).training_cluster(OWN, 0)
    assert (cluster.ps, time.slept) == ((), [])


# Waiting


def test_the_chief_waits_for_enough_servers_and_says_how_far_it_is():
    discovery, said = registered((0, A), chief=None), []
    time = Time(lambda: None, lambda: discovery.register("ps", 4, B))
    manager = ClusterManager(discovery, config(), on_waiting=said.append, **time.hands)
    assert manager.training_cluster(OWN, 0)[0].ps == (A, B)
    assert time.slept == [5, 5]
    assert [(one.what, one.found, one.needed, one.elapsed.seconds) for one in said] == [
        ("ps", 1, 2, 0),
        ("ps", 1, 2, 5),
    ]


def test_a_worker_waits_for_the_chief():
    discovery, said = registered((0, A), (1, B), chief=None), []
    time = Time(lambda: discovery.register("worker", 0, "10.0.0.1:1"))
    manager = ClusterManager(discovery, config(), on_waiting=said.append, **time.hands)
    assert manager.training_cluster(OWN, 1)[0].chief == "10.0.0.1:1"
    assert [(one.what, one.found, one.needed) for one in said] == [("chief", 0, 1)]


def test_waiting_ends_at_the_deadline_and_names_the_processes_that_joined():
    manager = ClusterManager(
        registered((1, B)), config(timeout=timedelta(seconds=12)), **(time := Time()).hands
    )
    with pytest.raises(DeadlineExceededError, match=r"12 s for 2 ps, and found 1.*1 at b:1"):
        manager.training_cluster(OWN, 0)
    assert time.slept == [5, 5, 2]


class Away(MemoryDiscovery):
    """A registry that cannot be reached a few times."""

    times = 2

    def query(self, role):
        if self.times:
            self.times -= 1
            raise UnavailableError("the registry is away")
        return super().query(role)


def test_a_registry_that_is_away_for_a_while_is_waited_for():
    discovery = Away()
    discovery.register("ps", 0, A)
    discovery.register("ps", 1, B)
    time = Time()
    assert ClusterManager(discovery, config(), **time.hands).training_cluster(OWN, 0)[0].ps == (A, B)
    assert time.slept == [5, 5]


def test_a_registry_that_stays_away_is_named_in_the_end():
    discovery = Away()
    discovery.times = 99
    manager = ClusterManager(discovery, config(timeout=timedelta(seconds=12)), **Time().hands)
    with pytest.raises(DeadlineExceededError, match="the registry is away"):
        manager.training_cluster(OWN, 0)


def test_metrics_say_how_many_are_missing_and_that_the_wait_is_over():
    metrics, shown = Metrics(), []
    discovery = registered((0, A))

    def show():
        shown.append(metrics.render().decode())
        discovery.register("ps", 1, B)

    manager = ClusterManager(discovery, config(model_name="m"), metrics=metrics, **Time(show).hands)
    manager.training_cluster(OWN, 0)
    labels = '{cluster_type="stable",model_name="m"}'
    assert f"monolith_containers_num_left_ps{labels} 1.0" in shown[0]
    assert f"monolith_containers_job_waiting{labels} 1.0" in shown[0]
    after = metrics.render().decode()
    assert f"monolith_containers_num_left_ps{labels} 0.0" in after
    assert f"monolith_containers_job_waiting{labels} 0.0" in after


@pytest.mark.parametrize(("options", "index"), [({}, 0), ({"model_name": "m"}, 1)])
def test_there_are_no_metrics_without_a_model_name_nor_from_workers(options, index):
    metrics = Metrics()
    manager = ClusterManager(registered((0, A), (1, B)), config(**options), metrics=metrics)
    manager.training_cluster(OWN, index)
    assert b"num_left_ps" not in metrics.render()


# The file of the chosen servers


def redundant(folder, **options):
    return config(num_redundant_ps=2, model_dir=str(folder), **options)


def test_what_is_saved_is_fetched(tmp_path):
    path, addresses = str(tmp_path / "dir" / "ps_info"), ["0.0.0.0:0", "0.0.0.0:1", "0.0.0.0:2"]
    save_ps_cluster(path, addresses)
    assert fetch_ps_cluster(path) == addresses


def test_a_missing_or_empty_file_has_no_servers_and_no_time_is_no_wait(tmp_path):
    time = Time()
    assert fetch_ps_cluster(str(tmp_path / "no"), timedelta(0), **time.hands) == []
    (tmp_path / "empty").touch()
    assert fetch_ps_cluster(str(tmp_path / "empty"), timedelta(0), **time.hands) == []
    assert time.slept == []


def test_the_file_is_named_by_the_run():
    assert redundant("/m").ps_file == "/m/ps_cluster_dir/ps_info"
    assert redundant("/m", uuid="u").ps_file == "/m/ps_cluster_dir/u"


def test_the_chief_freezes_the_first_that_register(tmp_path):
    discovery = registered((3, C), (1, B))
    ClusterManager(discovery, redundant(tmp_path)).training_cluster(OWN, 0)
    discovery.register("ps", 0, A)
    restarted, _ = ClusterManager(discovery, redundant(tmp_path)).training_cluster(OWN, 0)
    worker, _ = ClusterManager(discovery, redundant(tmp_path)).training_cluster("10.0.0.8:1", 1)
    assert restarted.ps == worker.ps == (B, C)


def test_a_restarted_job_finds_the_same_cluster(tmp_path):
    first = ClusterManager(registered((0, A), (1, B), (2, C)), redundant(tmp_path)).training_cluster(OWN, 0)
    again = ClusterManager(registered((2, C)), redundant(tmp_path), **Time().hands).training_cluster(OWN, 0)
    assert again == first


def test_asking_for_all_servers_in_the_end_leaves_the_list_alone(tmp_path):
    discovery = registered((0, A), (1, B), (2, C), (3, "d:1"))
    manager = ClusterManager(discovery, redundant(tmp_path))
    manager.training_cluster(OWN, 0)
    assert manager.query_ps(4) == [A, B, C, "d:1"]
    assert fetch_ps_cluster(redundant(tmp_path).ps_file) == [A, B]
    assert ClusterManager(discovery, redundant(tmp_path)).training_cluster(OWN, 0)[0].ps == (A, B)


def test_a_list_of_a_run_with_another_number_of_servers_is_replaced(tmp_path):
    save_ps_cluster(redundant(tmp_path).ps_file, ["old:1", "old:2", "old:3"])
    cluster, _ = ClusterManager(registered((0, A), (1, B)), redundant(tmp_path)).training_cluster(OWN, 0)
    assert cluster.ps == (A, B)
    assert fetch_ps_cluster(redundant(tmp_path).ps_file) == [A, B]


def test_a_worker_waits_for_the_list_and_not_for_servers(tmp_path):
    settings, said = redundant(tmp_path), []
    time = Time(
        lambda: save_ps_cluster(settings.ps_file, ["old:1"]),
        lambda: save_ps_cluster(settings.ps_file, [B, C]),
    )
    manager = ClusterManager(registered((0, A)), settings, on_waiting=said.append, **time.hands)
    assert manager.training_cluster(OWN, 1)[0].ps == (B, C)
    assert [(one.what, one.found) for one in said] == [(settings.ps_file, 0), (settings.ps_file, 1)]


def test_a_worker_that_waits_in_vain_names_the_file(tmp_path):
    settings = redundant(tmp_path)
    manager = ClusterManager(registered((0, A)), settings, **(time := Time()).hands)
    with pytest.raises(TimeoutError, match=settings.ps_file):
        manager.training_cluster(OWN, 1)
    assert sum(time.slept) == 1800


def test_concurrent_writers_leave_one_whole_list(tmp_path):
    path = str(tmp_path / "ps" / "ps_info")
    lists = [[f"10.0.{writer}.{number}:1" for number in range(50)] for writer in range(8)]
    seen: list[list[str]] = []
    threads = [threading.Thread(target=save_ps_cluster, args=(path, one)) for one in lists]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seen.append(fetch_ps_cluster(path))
    for thread in threads:
        thread.join()
    assert all(one in [[], *lists] for one in [*seen, fetch_ps_cluster(path)])
    assert [one.name for one in (tmp_path / "ps").iterdir()] == ["ps_info"]


@pytest.mark.parametrize(
    "options", [{"num_workers": 0}, {"num_ps": -1}, {"num_redundant_ps": -1}, {"num_redundant_ps": 1}]
)
def test_what_makes_no_cluster_is_refused(options):
    with pytest.raises(ConfigError):
        config(**options)


@pytest.mark.parametrize("index", [-1, 4])
def test_a_worker_that_the_job_does_not_have_is_refused(index):
    with pytest.raises(ConfigError, match="there are 4"):
        ClusterManager(registered(), config()).training_cluster(OWN, index)
