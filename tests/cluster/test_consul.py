"""Consul, asked over TCP and a unix socket, by an HTTP server that keeps to its documentation."""

from __future__ import annotations

import logging
import sys
import threading
import time
from contextlib import ExitStack
from datetime import timedelta

import pytest
from contracts.discoveries import consul_config, eventually
from services.consul import Agent, Catalog
from services.servers import free_port

from monolith.cluster import ConsulClient, ConsulConfig, ConsulDiscovery, ConsulService
from monolith.errors import (
    ConfigError,
    DeadlineExceededError,
    DiscoveryError,
    MissingExtraError,
    UnavailableError,
)

JOB = "data.monolith.123456"
A, B, C = "192.168.0.1:1001", "192.168.0.2:1002", "192.168.0.1:1002"


class Now:
    """A clock that a test sets."""

    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def stack():
    """Closes in the end what is entered."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def make_agent(stack):
    def make(**options):
        agent = Agent(**options)
        stack.callback(agent.stop)
        return agent

    return make


@pytest.fixture(params=["stock", "stock, unix socket", "vendor"])
def agent(request, make_agent, tmp_path):
    path = tmp_path / "consul.sock" if "unix" in request.param else None
    return make_agent(vendor=request.param == "vendor", path=path)


@pytest.fixture
def join(agent, stack):
    """Makes the discovery of one more process."""

    def make(to=agent, hands=None, **options):
        api = "lookup" if to.vendor else "stock"
        return stack.enter_context(ConsulDiscovery(JOB, consul_config(to, api=api, **options), **hands or {}))

    return make


@pytest.fixture
def client_of(stack):
    def make(agent, clock=time.monotonic, **options):
        api = "lookup" if agent.vendor else "stock"
        return stack.enter_context(ConsulClient(consul_config(agent, api=api, **options), clock))

    return make


@pytest.fixture
def client(agent, client_of):
    return client_of(agent)


def test_without_httpx_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(MissingExtraError, match=r"monolith-recsys\[consul\]"):
        ConsulDiscovery(JOB, ConsulConfig())


# Where the agent is


def test_the_environment_names_the_agent(tmp_path):
    def found(**variables):
        return ConsulConfig.from_environment(variables, socket_path=str(tmp_path / "none"))

    assert found(CONSUL_HTTP_HOST="a", TCE_HOST_IP="b", CONSUL_HTTP_PORT="7").address == "a:7"
    assert found(CONSUL_HTTP_HOST="", TCE_HOST_IP="b").address == "b:8500"
    assert found().address == "127.0.0.1:8500"
    assert found(CONSUL_HTTP_HOST="::1").address == "[::1]:8500"
    assert found(CONSUL_HTTP_HOST="/run/c.sock").is_unix_socket
    assert found(CONSUL_HTTP_ADDR="c:9").address == "c:9"
    assert found(CONSUL_HTTP_ADDR="https://c:9").tls is not None
    assert found(CONSUL_HTTP_ADDR="unix:///run/c.sock").address == "/run/c.sock"


def test_the_vendors_agent_listens_elsewhere():
    assert ConsulConfig.from_environment({}, socket_path="/none", api="lookup").address == "127.0.0.1:2280"


def test_a_socket_that_is_there_is_taken_before_this_machine(make_agent, tmp_path):
    agent = make_agent(path=tmp_path / "s")
    assert ConsulConfig.from_environment({}, socket_path=agent.host).address == agent.host
    assert ConsulConfig.from_environment({"TCE_HOST_IP": "b"}, socket_path=agent.host).host == "b"


@pytest.mark.parametrize("variables", [{"CONSUL_HTTP_PORT": "x"}, {"CONSUL_HTTP_ADDR": "http://:x"}])
def test_what_names_no_agent_is_refused(variables):
    with pytest.raises(ConfigError, match="CONSUL_HTTP"):
        ConsulConfig.from_environment(variables)


def test_the_token_is_sent_and_never_shown(make_agent, client_of):
    agent = make_agent()
    agent.token = "hush"
    config = ConsulConfig.from_environment({"CONSUL_HTTP_TOKEN": "hush"})
    assert config.token == "hush"
    assert "hush" not in repr(config)
    client_of(agent, token="hush").register("job", 1)
    with pytest.raises(DiscoveryError, match="403, Permission denied"):
        client_of(agent).register("job", 1)


# The client


def test_what_is_registered_is_looked_up(client):
    client.register("test_name", 1234, tags={"index": "0"}, host="127.0.0.1")
    eventually(lambda: client.lookup("test_name"))
    (found,) = client.lookup("test_name")
    assert (found.host, found.port, found.tags) == ("127.0.0.1", 1234, {"index": "0"})
    client.deregister("test_name", 1234)
    assert client.lookup("test_name") == []


def test_the_vendor_is_asked_and_read_as_it_is(make_agent, client_of):
    agent = make_agent(vendor=True)
    client = client_of(agent)
    client.register("test_name", 12345, tags={"index": "0", "ip": "::1"})
    assert agent.bodies[0] == {
        "id": "test_name-12345",
        "name": "test_name",
        "port": 12345,
        "check": {"ttl": "60s"},
        "tags": ["index:0", "ip:::1"],
    }
    eventually(lambda: client.lookup("test_name"))
    assert client.lookup("test_name") == [ConsulService("127.0.0.1", 12345, {"index": "0", "ip": "::1"})]
    assert ("GET", "/v1/lookup/name") in agent.requests
    assert ("GET", "/v1/agent/check/pass/service:test_name-12345") in agent.requests


def test_a_stock_agent_is_asked_as_documented(make_agent, client_of):
    agent = make_agent()
    client = client_of(agent)
    client.register("job", 1, host="h")
    assert agent.bodies[0] == {
        "ID": "job-1",
        "Name": "job",
        "Port": 1,
        "Address": "h",
        "Check": {"TTL": "60s", "Status": "passing", "DeregisterCriticalServiceAfter": "600s"},
    }
    eventually(lambda: ("PUT", "/v1/agent/check/pass/service:job-1") in agent.requests)
    assert client.services("job") == [ConsulService("h", 1, {}, "job-1", "node-a")]
    assert client.node_name() == "node-a"


def test_durations_are_written_as_consul_reads_them(make_agent, client_of):
    agent = make_agent()
    odd = {"ttl": timedelta(seconds=90, milliseconds=500), "remove_after": timedelta(days=20)}
    client_of(agent, **odd).register("job", 1)
    check = agent.bodies[0]["Check"]
    assert (check["TTL"], check["DeregisterCriticalServiceAfter"]) == ("90500ms", "1728000s")


def test_a_script_is_left_to_the_agent(agent, client):
    before = threading.active_count()
    client.register("job", 1, check_script="exit 0")
    check = {key.lower(): value for key, value in agent.bodies[0].items()}["check"]
    check = {key.lower(): value for key, value in check.items()}
    assert check["interval"] == "30s"
    assert check.get("script") == "exit 0" or check["args"] == ["/bin/sh", "-c", "exit 0"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ConsulHealthCheck")]
    assert threading.active_count() <= before + 1  # of the server's


def test_a_lookup_that_the_agent_answers_with_an_error_finds_nothing(agent, client, caplog):
    agent.failing["/v1"] = 500
    with caplog.at_level(logging.ERROR):
        assert client.lookup("job") == []
    assert "500, out of order" in caplog.text
    with pytest.raises(UnavailableError, match="500, out of order"):
        client.services("job")


@pytest.mark.parametrize("status", [400, 500])
def test_a_registration_that_the_agent_refuses_is_an_error_with_its_words(agent, client, status):
    agent.failing["/v1/agent/service"] = status
    with pytest.raises(DiscoveryError, match=f"{status}, out of order"):
        client.register("job", 1)
    with pytest.raises(DiscoveryError, match=f"{status}, out of order"):
        client.deregister("job", 1)


def test_deregistering_what_the_agent_does_not_know_asks_it_and_is_no_error(agent, client):
    client.register("job", 2)
    client.deregister("job", 1)
    assert any("deregister" in path for _, path in agent.requests)
    eventually(lambda: len(client.lookup("job")) == 1)


def test_names_may_be_of_any_characters(client):
    name = "a b/c?d=e&f#g%20ü"
    client.register(name, 1)
    eventually(lambda: len(client.lookup(name)) == 1)
    client.deregister(name, 1)
    assert client.lookup(name) == []


def test_an_agent_that_is_not_there_is_unavailable(stack):
    client = stack.enter_context(ConsulClient(ConsulConfig(port=free_port())))
    with pytest.raises(UnavailableError, match="Is the agent running"):
        client.lookup("job")


def test_an_agent_that_does_not_answer_takes_no_longer_than_allowed(agent, client):
    agent.hangs.set()
    start = time.monotonic()
    with pytest.raises(DeadlineExceededError, match=r"took longer than 0\.2 s"):
        client.lookup("job", timeout=timedelta(milliseconds=200))
    assert time.monotonic() - start < 60


def test_what_answers_but_is_no_consul_is_said(make_agent, client_of):
    agent = make_agent(vendor=True)
    agent.answer = lambda *_: (200, "<html>")
    with pytest.raises(DiscoveryError, match="no list of services"):
        client_of(agent).services("job")


def test_errors_leave_no_connection_behind(agent, client):
    agent.failing["/v1"] = 500
    for _ in range(20):
        client.lookup("job")
    assert len(agent.connections) == 1


# The cache


def test_an_answer_that_is_young_enough_is_given_again(agent, client_of):
    now = Now()
    client = client_of(agent, now)
    client.register("job", 1, check_script="exit 0")
    assert client.cache_age("job") is None
    assert len(client.lookup("job", max_age=timedelta(seconds=10))) == 1
    client.deregister("job", 1)
    now.seconds += 10
    assert client.cache_age("job") == timedelta(seconds=10)
    assert len(client.lookup("job", max_age=timedelta(seconds=10))) == 1
    now.seconds += 1
    assert client.lookup("job", max_age=timedelta(seconds=10)) == []
    assert client.cache_age("job") == timedelta(0)


def test_without_an_age_the_agent_is_always_asked(agent, client):
    client.lookup("job")
    client.lookup("job")
    assert len([path for _, path in agent.requests if "job" in path or "lookup" in path]) == 2


def test_the_first_lookup_of_a_name_has_more_time(agent, client):
    agent.hangs.set()
    threading.Timer(0.3, agent.hangs.clear).start()
    assert client.lookup("job", timedelta(milliseconds=50), max_age=timedelta(seconds=1)) == []
    agent.hangs.set()
    with pytest.raises(DeadlineExceededError):
        client.lookup("job", timedelta(milliseconds=50), max_age=timedelta(microseconds=1))


def test_many_threads_may_look_up_through_the_cache(client):
    threads = [
        threading.Thread(target=client.lookup, args=("job",), kwargs={"max_age": timedelta(seconds=9)})
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_an_error_is_not_kept_as_an_answer(agent, client):
    agent.failing["/v1"] = 500
    assert client.lookup("job", max_age=timedelta(seconds=9)) == []
    assert client.cache_age("job") is None


# Signs of life


def hearts():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ConsulHealthCheck-")]


def test_a_thread_keeps_a_service_alive_and_ends_with_it(agent, client_of):
    quick = {"ttl": timedelta(milliseconds=300), "heartbeat": timedelta(milliseconds=50)}
    client = client_of(agent, **quick)
    client.register("job", 1)
    client.register("job", 2)
    assert sorted(hearts()) == ["ConsulHealthCheck-job-1", "ConsulHealthCheck-job-2"]
    time.sleep(0.8)
    assert agent.shown("job") == {"job-1", "job-2"}
    client.deregister("job", 1)
    assert hearts() == ["ConsulHealthCheck-job-2"]
    time.sleep(0.2)
    assert agent.shown("job") == {"job-2"}
    client.close()
    assert hearts() == []
    eventually(lambda: agent.shown("job") == set())


def test_a_service_without_signs_of_life_is_hidden_and_then_removed(make_agent):
    now = Now()
    agent = make_agent(catalog=Catalog(clock=now))
    discovery = ConsulDiscovery(JOB, consul_config(agent, heartbeat=timedelta(seconds=59)))
    discovery.register("ps", 0, A)
    eventually(lambda: any("check/pass" in path for _, path in agent.requests))
    now.seconds += 61
    assert discovery.query("ps") == {}
    now.seconds += 601
    assert agent.shown(JOB) == set()
    assert agent.services == {}
    discovery.close()


@pytest.mark.parametrize("trouble", ["refused", "500", "garbage"])
def test_heartbeats_continue_after_any_trouble(agent, client_of, trouble):
    quick = {"ttl": timedelta(milliseconds=500), "heartbeat": timedelta(milliseconds=50)}
    client = client_of(agent, **quick)
    client.register("job", 1)
    if trouble == "refused":
        agent.kill()
        time.sleep(0.2)
        agent.start()
    elif trouble == "500":
        agent.failing["/v1/agent/check"] = 500
        time.sleep(0.2)
        agent.failing.clear()
    else:
        agent.answer, answer = lambda *_: (600, "?\r\n\r\n"), agent.answer
        time.sleep(0.2)
        agent.answer = answer
    time.sleep(0.8)
    assert agent.shown("job") == {"job-1"}


def test_a_service_that_its_agent_forgot_is_registered_again(agent, client_of):
    client = client_of(agent, heartbeat=timedelta(milliseconds=50))
    client.register("job", 1)
    eventually(lambda: agent.shown("job"))
    agent.kill(forget=True)
    agent.start()
    eventually(lambda: agent.shown("job") == {"job-1"})


# Discovery


def test_entries_come_and_go(join):
    discovery = join()
    discovery.register("server", 0, A)
    discovery.register("server", 1, B)
    assert discovery.query("server") == {0: A, 1: B}
    discovery.register("server", 0, C)
    assert discovery.query("server") == {0: C, 1: B}
    assert discovery.query_all() == {"server": {0: C, 1: B}}
    discovery.deregister("server", 0)
    discovery.deregister("server", 1)
    assert discovery.query("server") == {}


def test_all_entries_of_a_job_can_be_removed(join):
    discovery = join()
    discovery.register("ps", 0, A)
    discovery.register("worker", 0, B)
    discovery.deregister_all()
    assert discovery.query_all() == {}


def test_processes_with_the_same_port_on_several_hosts_share_an_agent(join):
    discovery = join()
    discovery.register("ps", 0, "10.0.0.1:2222")
    discovery.register("ps", 1, "10.0.0.2:2222")
    discovery.deregister("ps", 0)
    assert discovery.query("ps") == {1: "10.0.0.2:2222"}


def test_foreign_services_under_the_same_name_are_skipped(join, client):
    client.register(JOB, 1, tags={"name": "ps"})
    client.register(JOB, 2, tags={"name": "ps", "index": "x"})
    client.register(JOB, 3)
    assert join().query_all() == {}


def slept(seconds):
    """Hands for a discovery that notes how long it would sleep, and draws the longest wait."""
    return {"sleep": seconds.append, "uniform": lambda _, high: high}


def test_an_agent_that_cannot_be_reached_is_tried_five_times(agent, join):
    pauses = []
    discovery = join(hands=slept(pauses), max_backoff=timedelta(seconds=5))
    agent.kill()
    with pytest.raises(OSError, match="Is the agent running"):
        discovery.register("ps", 0, A)
    assert pauses == [5.0] * 4


def test_an_agent_that_comes_back_in_time_is_enough(agent, join):
    discovery = join(hands={"sleep": lambda _: agent.lives or agent.start()})
    agent.kill()
    discovery.register("ps", 0, A)
    assert discovery.query("ps") == {0: A}


def test_a_machine_whose_registrations_are_lost_is_told_so(agent, join):
    agent.loses_registrations = True
    pauses = []
    discovery = join(hands=slept(pauses), visible_every=timedelta(seconds=5))
    with pytest.raises(OSError, match="This machine is blacklisted by consul") as raised:
        discovery.register("ps", 0, A)
    assert isinstance(raised.value, DiscoveryError)
    assert pauses == [5.0] * 36
    assert hearts() == []


def test_an_agent_that_goes_while_registering_leaves_no_thread(agent, join):
    discovery = join(tries=1)
    agent.loses_registrations = True
    threading.Timer(0.2, agent.kill).start()
    with pytest.raises(UnavailableError):
        discovery.register("ps", 0, A)
    assert hearts() == []


def test_an_entry_left_by_another_machine_is_replaced(make_agent, join):
    catalog = Catalog()
    here, there = make_agent(catalog=catalog, node="here"), make_agent(catalog=catalog, node="there")
    before = ConsulDiscovery(JOB, consul_config(there))
    before.register("ps", 0, A)
    there.kill()
    after = join(here)
    assert after.query("ps") == {0: A}
    after.register("ps", 0, B)
    assert after.query("ps") == {0: B}
    before.close()


def test_an_entry_that_comes_back_again_and_again_ends_in_an_error(make_agent, join):
    catalog = Catalog()
    here, there = make_agent(catalog=catalog, node="here"), make_agent(catalog=catalog, node="there")
    before, pauses = join(there), []
    before.register("ps", 0, A)
    after = join(here, hands=slept(pauses), replace_every=timedelta(seconds=3))
    with pytest.raises(DiscoveryError, match=f"{A} has that place and came back after each of 10"):
        after.register("ps", 0, B)
    assert pauses == [3.0] * 10
    assert before.query("ps") == {0: A}


def test_taking_out_an_entry_of_another_machine_touches_no_service_of_the_own_agent(make_agent, join):
    catalog = Catalog()
    here, there = make_agent(catalog=catalog, node="here"), make_agent(catalog=catalog, node="there")
    join(there).register("ps", 0, "10.0.0.1:2222")
    discovery = join(here)
    discovery.register("worker", 0, "10.0.0.2:2222")
    there.kill()
    discovery.deregister("ps", 0)
    assert (discovery.query("ps"), discovery.query("worker")) == ({}, {0: "10.0.0.2:2222"})


def test_a_replaced_process_neither_comes_back_nor_removes_its_successor(agent, join):
    quick = {"heartbeat": timedelta(milliseconds=30)}
    before, after = join(**quick), join(**quick)
    before.register("ps", 0, A)
    after.register("ps", 0, B)
    time.sleep(0.3)
    eventually(lambda: len(agent.shown(JOB)) == 1)
    assert after.query("ps") == {0: B}
    before.close()
    assert after.query("ps") == {0: B}


def test_closing_takes_no_longer_when_the_agent_is_gone(agent, join):
    discovery = join()
    discovery.register("ps", 0, A)
    discovery.watch("ps", lambda _: None)
    agent.kill()
    start = time.monotonic()
    discovery.close()
    assert time.monotonic() - start < 60
    assert hearts() == []


@pytest.mark.parametrize("options", [{"heartbeat": timedelta(seconds=60)}, {"tries": 0}, {"api": "etcd"}])
def test_what_cannot_work_is_refused(options):
    with pytest.raises(ConfigError):
        ConsulConfig(**options)
