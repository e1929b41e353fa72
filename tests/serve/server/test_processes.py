"""Servers that share a port act as one: what concerns all reaches all."""

from contextlib import ExitStack

import pytest
from serve.server.linear import LinearCatalog, LinearModel
from serve.server.serving import GrpcClient, ask_http, rows_json, rows_message, serving

from monolith.cluster.security import Guard
from monolith.config import Secret
from monolith.errors import ListenError
from monolith.serve.server import ServerProcesses
from monolith.wire.open_inference import message_types
from monolith.wire.ports import bound_socket

GUARD = Guard(token=Secret("s3cret"))
TOKEN = {"authorization": "Bearer s3cret"}


@pytest.fixture
def pair(tmp_path):
    """Two servers on the same two ports."""
    with ExitStack() as open_things:
        ports = {}
        for name in ("http_port", "grpc_port"):
            held = bound_socket("127.0.0.1", 0, share=True)
            open_things.callback(held.close)
            ports[name] = held.getsockname()[1]
        yield [
            open_things.enter_context(
                serving(
                    LinearCatalog({"f": {"1": LinearModel}}),
                    allow_control=True,
                    server={"peers": ServerProcesses(tmp_path, index, 2, GUARD), "guard": GUARD},
                    **ports,
                )
            )
            for index in range(2)
        ]


def test_both_listen_on_one_port_and_what_one_is_told_the_other_does(pair):
    first, second = pair
    assert (first.http_url, first.grpc_address) == (second.http_url, second.grpc_address)
    path = "/v2/repository/models/f"
    assert ask_http(first.http_port, "POST", f"{path}/unload", headers=TOKEN)[0] == 200
    assert [server.inference.repository.is_ready("f") for server in pair] == [False, False]
    with GrpcClient(first.grpc_address, tuple(TOKEN.items())) as client:
        client.RepositoryModelLoad(message_types().RepositoryModelLoadRequest(model_name="f"))
        assert client.ModelInfer(rows_message("a", model="f")).model_version == "1"
    assert [server.inference.repository.is_ready("f") for server in pair] == [True, True]
    body = {"parameters": {"version": "1"}}
    assert ask_http(first.http_port, "POST", f"{path}/unload", body, headers=TOKEN)[0] == 200
    assert [server.inference.repository.is_ready("f") for server in pair] == [False, False]
    body = {"parameters": {"version": 1}}
    assert ask_http(first.http_port, "POST", f"{path}/unload", body, headers=TOKEN)[0] == 400


def test_metrics_are_those_of_both(pair):
    for server in pair:
        server.inference.refuse("http", ValueError("a"))
    text = ask_http(pair[0].http_port, "GET", "/metrics", headers=TOKEN)[1].decode()
    for process in "01":
        assert (
            'monolith_serve_requests_total{code="internal",model="",transport="http",version="",'
            f'process="{process}"}} 1.0' in text
        )
    assert text.count("# TYPE monolith_serve_requests counter") == 1


def test_a_missing_process_delays_no_other(pair):
    first, second = pair
    second.close()
    port = first.http_port
    assert ask_http(port, "POST", "/v2/repository/models/f/unload", headers=TOKEN)[0] == 200
    text = ask_http(port, "GET", "/metrics", headers=TOKEN)[1].decode()
    assert 'process="0"' in text
    assert 'process="1"' not in text
    assert ask_http(port, "POST", "/v2/models/f/infer", rows_json("a"), TOKEN)[0] == 503


def test_a_port_that_is_taken_is_said_to_be(pair):
    with pytest.raises(ListenError, match="in use"):
        bound_socket("127.0.0.1", pair[0].http_port, share=False)
