"""A registry by its URL: the three kinds, what the environment adds, and what is refused."""

from __future__ import annotations

import pytest
from services.consul import Agent

from monolith.cluster import (
    ConsulDiscovery,
    FilesDiscovery,
    ZooKeeperDiscovery,
    open_discovery_url,
)
from monolith.errors import ConfigError, DiscoveryError

A = "10.0.0.1:1"


def test_files_meet_in_a_folder(tmp_path):
    url = f"files://{tmp_path}/shared/job"
    with open_discovery_url(url) as one, open_discovery_url(url) as other:
        assert isinstance(one, FilesDiscovery)
        one.register("ps", 0, A)
        assert other.query("ps") == {0: A}
    assert (tmp_path / "shared" / "job" / "ps").is_dir()


def test_processes_of_a_job_meet_in_zookeeper(zookeeper):
    url = f"zookeeper://{zookeeper.address}/url-job"
    with open_discovery_url(url) as one:
        assert isinstance(one, ZooKeeperDiscovery)
        one.register("ps", 0, A)
        assert "/monolith/url-job/ps.0" in zookeeper.ephemerals()
        with open_discovery_url(url, {"ZK_AUTH": "me:secret"}) as other:
            assert other.query("ps") == {0: A}
        with open_discovery_url(f"zookeeper://{zookeeper.address},{zookeeper.address}/other-job") as stranger:
            assert stranger.query("ps") == {}


def test_processes_of_a_job_meet_in_consul():
    agent = Agent()
    try:
        for url, environ in {
            f"consul://{agent.host}:{agent.port}/job": {},
            "consul:///job": {"CONSUL_HTTP_HOST": agent.host, "CONSUL_HTTP_PORT": str(agent.port)},
        }.items():
            with open_discovery_url(url, environ) as discovery:
                assert isinstance(discovery, ConsulDiscovery)
                discovery.register("ps", 0, A)
                assert agent.shown("job")
            assert not agent.shown("job")
    finally:
        agent.stop()


def test_a_consul_with_the_lookup_api_is_named_in_the_url():
    agent = Agent(vendor=True)
    try:
        with open_discovery_url(f"consul://{agent.host}:{agent.port}/job?api=lookup") as discovery:
            discovery.register("ps", 0, A)
            assert discovery.query("ps") == {0: A}
        assert ("GET", "/v1/lookup/name") in agent.requests
    finally:
        agent.stop()
    with pytest.raises(ConfigError, match=r"may be only \?api=lookup"):
        open_discovery_url("consul://h:2280/job?api=other")


def test_the_token_of_consul_comes_from_the_environment():
    agent = Agent()
    agent.token = "right"
    url = f"consul://{agent.host}:{agent.port}/job"
    try:
        with open_discovery_url(url, {"CONSUL_HTTP_TOKEN": "right"}) as discovery:
            assert discovery.query("ps") == {}
        with open_discovery_url(url) as discovery, pytest.raises(DiscoveryError):
            discovery.query("ps")
    finally:
        agent.stop()


@pytest.mark.parametrize(
    "url, message",
    [
        ("zk.example:2181", "it must be zookeeper://host:2181/job, consul://"),
        ("zookeper://h:2181/job", "Did you mean zookeeper://"),
        ("file:///shared", "Did you mean files://"),
        ("zookeeper://h:2181", "after the servers comes the job's name"),
        ("zookeeper://h:2181/", "after the servers comes the job's name"),
        ("zookeeper://h:2181/a/b", "one word without slashes"),
        ("zookeeper:///job", "names no ZooKeeper server"),
        ("consul://h:http/job", "expected host:port"),
        ("files://shared/job", "give an absolute path"),
    ],
)
def test_what_is_no_registry_is_refused_with_what_to_write(url, message):
    with pytest.raises(ConfigError, match=message):
        open_discovery_url(url)


def test_a_password_in_a_url_is_refused_and_not_repeated():
    with pytest.raises(ConfigError, match="Set ZK_AUTH") as caught:
        open_discovery_url("zookeeper://me:hunter2@h:2181/job")
    assert "hunter2" not in str(caught.value)
