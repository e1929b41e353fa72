"""The protocol over HTTP: every path, every error, JSON and binary tensors; and callers that mean no good."""

import contextlib
import gzip
import http.client
import json
import socket
import threading
import time
import zlib
from datetime import timedelta

import numpy as np
import pytest
from serve.server.linear import LinearCatalog, LinearModel, one_model
from serve.server.serving import PATIENCE, GrpcClient, ask_http, rows_json, rows_message, serving

from monolith import __version__
from monolith.cluster.security import Guard
from monolith.config import Secret
from monolith.serve.server import ServeLimits, http_api

INFER = "/v2/models/linear/infer"


def get(served, path, **headers):
    return ask_http(served.http_port, "GET", path, None, headers)[:2]


def infer(served, body, headers=None, path=INFER):
    return ask_http(served.http_port, "POST", path, body, headers)[:2]


def data_of(answer, output=0):
    return answer["outputs"][output]["data"]


def test_the_server_reports_its_name_and_its_state(served):
    assert get(served, "/v2")[1]["version"] == __version__
    assert get(served, "/v2/health/live") == (200, {"live": True})
    assert get(served, "/v2/health/ready") == (503, {"ready": False})  # a model cannot be loaded
    assert get(served, "/v2/models/linear/ready") == (200, {"name": "linear", "ready": True})
    assert get(served, "/v2/models/linear/versions/1/ready")[0] == 200
    assert get(served, "/v2/models/linear/versions/7/ready")[0] == 503
    assert get(served, "/v2/models/x/ready")[0] == 404
    status, index = ask_http(served.http_port, "POST", "/v2/repository/index")[:2]
    assert status == 200
    assert [(one["name"], one["state"]) for one in index] == [
        ("linear", "READY"),
        ("linear", "READY"),
        ("broken", "UNAVAILABLE"),
    ]
    assert "no such device" in index[2]["reason"]
    assert len(infer(served, {"ready": True}, path="/v2/repository/index")[1]) == 2


def test_a_model_says_what_it_takes_and_gives(served):
    status, about = get(served, "/v2/models/linear")
    assert status == 200
    assert about["versions"] == ["1", "2"]
    assert about["inputs"][1] == {"name": "item", "datatype": "INT64", "shape": [-1]}
    assert [one["name"] for one in about["outputs"]] == ["score", "double"]
    assert [one.get("parameters") for one in about["outputs"]] == [{"meaning": "score"}, None]
    assert get(served, "/v2/models/linear/versions/2")[0] == 200
    assert get(served, "/v2/models/linear/versions/3")[0] == 404


def test_json_is_answered_with_json(served):
    status, answer = infer(served, rows_json("a", "bb", id="q7"))
    assert status == 200
    assert (answer["model_name"], answer["model_version"], answer["id"]) == ("linear", "2", "q7")
    assert answer["outputs"][0] == {"name": "score", "datatype": "FP32", "shape": [2], "data": [101, 102]}
    assert answer["parameters"] == {"step": 200, "watermark": 1.5e9, "staleness": 0.5}
    path = "/v2/models/linear/versions/1/infer"
    assert data_of(infer(served, rows_json("a", outputs=[{"name": "double"}]), path=path)[1]) == [2]


def test_nested_lists_are_rows(served):
    tags = {"name": "tags", "datatype": "BYTES", "shape": [1, 2], "data": [["x", "y"]]}
    body = rows_json("a")
    assert data_of(infer(served, {"inputs": [*body["inputs"], tags]})[1]) == [121]


def test_lists_of_different_lengths_are_rows_too(served):
    tags = {"name": "tags", "datatype": "BYTES", "shape": [3], "data": [["x", "y"], [], [None, "x", "y"]]}
    body = rows_json("a", "a", "a")
    assert data_of(infer(served, {"inputs": [*body["inputs"], tags]})[1]) == [121, 101, 121]
    for data, why in (
        ([["x"], [7], ["y", "x"]], "tags"),
        ([["x", "y"], ["x", "y"]], "takes 3 values, got 4"),
    ):
        status, answer = infer(served, {"inputs": [*body["inputs"], {**tags, "data": data}]})
        assert status == 400
        assert why in answer["error"]


def test_a_cell_that_is_null_is_an_empty_one(served):
    tags = {"name": "tags", "datatype": "BYTES", "shape": [2], "data": [None, "x"]}
    body = rows_json("a", "a")
    assert data_of(infer(served, {"inputs": [*body["inputs"], tags]})[1]) == [101, 111]


def binary_request(*users):
    raw = b"".join(len(one).to_bytes(4, "little") + one for one in users)
    item = np.arange(len(users), dtype=np.int64).tobytes()
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": "user",
                    "datatype": "BYTES",
                    "shape": [len(users)],
                    "parameters": {"binary_data_size": len(raw)},
                },
                {
                    "name": "item",
                    "datatype": "INT64",
                    "shape": [len(users)],
                    "parameters": {"binary_data_size": len(item)},
                },
            ],
            "outputs": [
                {"name": "score", "parameters": {"binary_data": True}},
                {"name": "double", "parameters": {"binary_data": False}},
            ],
        }
    ).encode()
    return head + raw + item, {"Inference-Header-Content-Length": str(len(head))}


def test_binary_tensors_follow_the_json_both_ways(served):
    body, headers = binary_request(b"a", b"bb")
    status, answer, said = ask_http(served.http_port, "POST", INFER, body, headers)
    assert status == 200
    length = int(said["Inference-Header-Content-Length"])
    head = json.loads(answer[:length])
    assert head["outputs"][0]["parameters"] == {"binary_data_size": 8}
    assert data_of(head, 1) == [202, 206]
    assert np.frombuffer(answer[length:], np.float32).tolist() == [101, 103]
    wanted = rows_json("a", parameters={"binary_data_output": True})
    assert ask_http(served.http_port, "POST", INFER, wanted)[2]["content-type"] == "application/octet-stream"


def test_packed_requests_are_unpacked(served):
    plain = json.dumps(rows_json("a")).encode()
    for name, packed in (("gzip", gzip.compress(plain)), ("deflate", zlib.compress(plain))):
        assert data_of(infer(served, packed, {"content-encoding": name})[1]) == [101]
    for name, packed in (("gzip", b"no"), ("gzip", gzip.compress(plain)[:-9]), ("br", plain)):
        assert infer(served, packed, {"content-encoding": name})[0] == 400


def one_input(**changes):
    return {"inputs": [{"name": "user", "datatype": "BYTES", "shape": [1], "data": ["a"], **changes}]}


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b'{"inputs": NaN}', 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        (b"[]", 400, "JSON object"),
        ({}, 400, "`inputs`"),
        ({"inputs": {}}, 400, "`inputs`"),
        ({"inputs": [3]}, 400, "inputs[0]"),
        ({"inputs": []}, 400, "no inputs"),
        (one_input(name=7), 400, "`name`"),
        (one_input(name="x" * 2000), 400, "`name`"),
        (one_input(name="usr"), 400, "no input 'usr'"),
        (one_input(datatype="STRING"), 400, "no datatype 'STRING'"),
        (one_input(shape=None), 400, "`shape`"),
        (one_input(shape=[-1]), 400, "`shape`"),
        (one_input(shape=[True]), 400, "`shape`"),
        (one_input(shape=[2]), 400, "2 values, got 1"),
        (one_input(data="a"), 400, "`data`"),
        (one_input(data=[1]), 400, "must be a text"),
        (one_input(data=[{}]), 400, "must be a text"),
        (one_input(data=["\ud800"]), 400, "half of a character"),
        (one_input(parameters={"binary_data_size": 5}), 400, "0 are left"),
        (one_input(parameters=[]), 400, "`parameters`"),
        (rows_json("a", outputs=[{"name": "x"}]), 400, "no output 'x'"),
        (rows_json("a", outputs=[3]), 400, "`outputs`"),
        (rows_json("a", id=3), 400, "`id`"),
        (rows_json("a", parameters={"timeout": "soon"}), 400, "microseconds"),
        (rows_json("a", parameters={"priority": 10}), 400, "from 1, answered first, to 9"),
        (rows_json("a", parameters={"priority": True}), 400, "from 1, answered first, to 9"),
        (rows_json("a", parameters={"sequence_id": 7}), 400, "does not support the parameter 'sequence_id'"),
        (
            one_input(parameters={"content_type": "r"}),
            400,
            "parameter 'content_type' of inputs[0]",
        ),
        (
            rows_json("a", outputs=[{"name": "score", "parameters": {"classification": 3}}]),
            400,
            "parameter 'classification' of the output 'score'",
        ),
        (rows_json("x", "bad"), 400, "row 1"),
        (rows_json("bug"), 500, "its log says why"),
    ],
)
def test_what_is_wrong_with_a_body_is_said(served, body, status, says):
    found, answer = infer(served, body)
    assert (found, says in answer["error"]) == (status, True), answer


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v2/nothing", 404),
        ("GET", "/v2/models/x", 404),
        ("GET", "/v2/models/linear/versions/9", 404),
        ("POST", "/v2/models/x/infer", 400),  # what is asked of it comes first
        ("GET", INFER, 405),
        ("DELETE", "/v2/models/linear", 405),
        ("POST", "/v2/repository/models/x/load", 403),
        ("POST", "/v2/repository/models/linear/unload", 403),
        ("GET", "/v2/models/broken", 503),
        ("GET", "/v2/models/%ff", 400),
        ("GET", "/metrics", 200),
        ("GET", "/docs", 200),
        ("GET", "/openapi.json", 200),
        ("HEAD", "/v2", 200),
    ],
)
def test_every_path_has_its_status(served, method, path, status):
    assert ask_http(served.http_port, method, path)[0] == status


def test_models_that_are_not_served_are_not_found(served):
    assert infer(served, rows_json("a"), path="/v2/models/x/infer")[0] == 404
    assert infer(served, rows_json("a"), path="/v2/models/broken/infer")[0] == 503


def test_a_length_of_json_beyond_the_body_is_refused(served):
    body, _ = binary_request(b"a")
    for length in ("99999", "-1", "x", "9" * 99):
        status, answer = infer(served, body, {"Inference-Header-Content-Length": length})
        assert status == 400
        assert "inference-header-content-length" in answer["error"]


def test_the_metrics_count_what_was_asked(served):
    infer(served, rows_json("a"))
    text = get(served, "/metrics")[1].decode()
    assert 'monolith_serve_requests_total{code="ok",model="linear",transport="http",version="2"}' in text
    assert "monolith_serve_batch_rows_bucket" in text


def test_batches_are_counted_by_the_name_that_is_served():
    with serving(one_model(LinearModel(name="exported"))) as server:
        assert ask_http(server.http_port, "POST", "/v2/models/f/infer", rows_json("a"))[0] == 200
        text = get(server, "/metrics")[1].decode()
    assert 'monolith_serve_batch_rows_count{model="f"} 1.0' in text
    assert "exported" not in text


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        ("gzip, deflate, br", "gzip"),
        ("DEFLATE", "deflate"),
        ("gzip;q=0, deflate;q=0.5", "deflate"),
        ("gzip;q=0.000", None),
        ("br", None),
        ("", None),
    ],
)
def test_a_long_answer_is_packed_as_its_client_takes_it(served, accepted, encoding):
    body = rows_json(*["a"] * 500)
    plain = ask_http(served.http_port, "POST", "/v2/models/linear/infer", body)[1]["outputs"]
    connection = http.client.HTTPConnection("127.0.0.1", served.http_port, timeout=PATIENCE)
    connection.request("POST", "/v2/models/linear/infer", json.dumps(body), {"accept-encoding": accepted})
    answer = connection.getresponse()
    read = answer.read()
    connection.close()
    assert answer.headers.get("content-encoding") == encoding
    if encoding is not None:
        assert len(read) < len(json.dumps(plain))
        read = zlib.decompress(read, 47)
    assert json.loads(read)["outputs"] == plain


def test_a_short_answer_is_not_packed(served):
    _, _, headers = ask_http(served.http_port, "GET", "/v2", headers={"accept-encoding": "gzip"})
    assert "content-encoding" not in headers


def test_the_index_lists_splits():
    catalog = LinearCatalog({"a": {"1": LinearModel}, "b": {"1": LinearModel}})
    with serving(catalog, splits=("ads=a:90,b/1:10",)) as server:
        found = ask_http(server.http_port, "POST", "/v2/repository/index")[1]
        assert found[-1] == {"name": "ads", "version": "", "state": "READY", "reason": "split: a:90,b/1:10"}
        assert len(found) == 3


def test_a_caller_without_the_token_is_refused_but_for_probes():
    with serving(one_model(), server={"guard": Guard(token=Secret("s3cret"))}) as server:
        assert get(server, "/v2/health/ready") == (200, {"ready": True})
        for path in ("/v2", "/metrics", "/openapi.json"):
            assert get(server, path)[0] == 401
        assert infer(server, rows_json("a"), path="/v2/models/f/infer")[0] == 401
        assert (
            infer(server, rows_json("a"), {"authorization": "Bearer wrong"}, "/v2/models/f/infer")[0] == 401
        )
        assert (
            infer(server, rows_json("a"), {"authorization": "Bearer s3cret"}, "/v2/models/f/infer")[0] == 200
        )


def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_deadlines_queues_and_concurrency_have_their_codes():
    model = LinearModel()
    path = "/v2/models/f/infer"
    limits = ServeLimits(queue=1, concurrency=3, timeout=timedelta(seconds=PATIENCE))
    with serving(one_model(model), limits=limits) as server:

        def slow():
            answers.append(infer(server, rows_json("slow"), path=path)[0])

        answers = []
        threads = [threading.Thread(target=slow, daemon=True)]
        threads[0].start()
        until(lambda: model.busy)
        for headers, body in (
            ({"x-request-timeout-ms": "20"}, rows_json("a")),
            ({}, rows_json("a", parameters={"timeout": 20_000})),
        ):
            assert infer(server, body, headers, path)[0] == 504
        threads.append(threading.Thread(target=slow, daemon=True))
        threads[1].start()
        until(lambda: server.inference._in_flight == 2)
        until(lambda: len(server.inference.repository._find("f", "").batcher._queue) == 1)
        status, _, headers = ask_http(server.http_port, "POST", path, rows_json("a"))
        assert (status, headers["retry-after"]) == (429, "1")
        model.gate.set()
        for thread in threads:
            thread.join(PATIENCE)
        assert answers == [200, 200]


def connect(server):
    made = socket.create_connection(("127.0.0.1", server.http_port), timeout=PATIENCE)
    made.settimeout(PATIENCE)
    return made


def read_all(made):
    parts = []
    try:
        while part := made.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


@pytest.fixture(scope="module")
def strict():
    """A server with narrow limits."""
    limits = ServeLimits(request_bytes=10_000, rows=100, read_timeout=timedelta(seconds=1), connections=20)
    with serving(one_model(), limits=limits) as server:
        yield server


def check_unharmed(server):
    assert data_of(infer(server, rows_json("a"), path="/v2/models/f/infer")[1]) == [1]


def test_bodies_that_are_too_large_are_refused(strict):
    path = "/v2/models/f/infer"
    assert infer(strict, rows_json("a" * 20_000), path=path)[0] == 413
    bomb = gzip.compress(b" " * 5_000_000)
    assert len(bomb) < 10_000
    assert infer(strict, bomb, {"content-encoding": "gzip"}, path)[0] == 413
    assert infer(strict, rows_json(*["a"] * 101), path=path)[0] == 413
    with connect(strict) as made:  # in parts, without saying how long it will be
        made.sendall(
            b"POST /v2/models/f/infer HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        made.sendall(b"3000\r\n" + b"x" * 0x3000 + b"\r\n")
        assert b" 413 " in read_all(made)
    refused = 'monolith_serve_requests_total{code="too_large",model="",transport="http",version=""} '
    counted = [line for line in get(strict, "/metrics")[1].decode().splitlines() if refused in line]
    assert counted == [f"{refused}2.0"]  # of those whose bodies were not read to their end
    check_unharmed(strict)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /v2", b" 408 "),
        (b"GET /v2 HTTP/1.1\r\nhost: localhost\r\nx-a: ", b" 408 "),
        (b"POST /v2/models/f/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{", b" 408 "),
        (b"GET /v2 HTTP/1.1\r\n" + b"x-a: " + b"y" * 70_000, b" 431 "),
        (b"GET /v2 HTTP/1.1\r\n" + b"x-a: b\r\n" * 10_000, b" 431 "),
        (b"\x16\x03\x01\x02\x00", b" 400 "),
        (b"GET /v2 HTTP/1.1\r\ncontent-length: -1\r\n\r\n", b" 400 "),
        (b"GET /v2 HTTP/1.1\r\ncontent-length: 99999999999999999999\r\n\r\n", b" 4"),
        (b"", b""),
    ],
)
def test_callers_that_are_slow_or_speak_something_else_are_hung_up_on(strict, sent, status):
    with connect(strict) as made:
        made.sendall(sent)
        assert status in read_all(made)[:40]
    check_unharmed(strict)


def test_more_connections_than_allowed_are_refused_and_existing_ones_continue(strict):
    held = [connect(strict) for _ in range(20)]
    try:
        with connect(strict) as made:
            made.sendall(b"GET /v2 HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b" 503 " in read_all(made)
        assert get(strict, "/v2/health/live")[0] == 200  # a probe is answered all the same
    finally:
        for one in held:
            one.close()
    until(lambda: get(strict, "/v2")[0] == 200)
    check_unharmed(strict)


def test_a_caller_that_disconnects_in_the_middle_harms_no_other(strict):
    for _ in range(10):
        with connect(strict) as made:
            made.sendall(
                b"POST /v2/models/f/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: 900\r\n\r\n{"
            )
    check_unharmed(strict)


def test_requests_on_one_connection_are_answered_in_order(strict):
    body = json.dumps(rows_json("abc")).encode()
    head = b"POST /v2/models/f/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n" % len(body)
    last = b"connection: close\r\n\r\n"
    with connect(strict) as made:
        made.sendall((head + b"\r\n" + body) * 2 + head + last + body)
        answer = read_all(made)
    assert answer.count(b" 200 OK") == 3
    assert answer.count(b"[3.0]") == 3


def test_one_port_serves_both_transports():
    model = LinearModel()
    with serving(one_model(model), port=0) as server:
        assert server.grpc_address == server.http_url.removeprefix("http://")
        assert data_of(infer(server, rows_json("a"), path="/v2/models/f/infer")[1]) == [1]
        with GrpcClient(server.grpc_address) as client:
            assert client.ServerReady().ready
            answer = client.ModelInfer(rows_message("a", "b" * 100_000, model="f"))
            assert np.frombuffer(answer.raw_output_contents[0], np.float32).tolist() == [1, 100_000]


def test_a_connection_that_is_made_while_the_server_stops_is_closed_at_once():
    with serving(one_model()) as server:
        server._http._loop._bounds.closing = True  # uvicorn has told all connections that it knew of
        with connect(server) as late:
            assert read_all(late) == b""


@pytest.mark.parametrize("ports", [{}, {"port": 0}])
def test_a_server_that_is_told_to_stop_answers_what_is_in_flight(ports):
    model = LinearModel()
    with serving(one_model(model), **ports) as server:
        answers = []

        def slow():
            answers.append(infer(server, rows_json("slow"), path="/v2/models/f/infer"))

        def slow_grpc():
            with GrpcClient(server.grpc_address) as client:
                answers.append(client.ModelInfer(rows_message("slow", model="f")))

        threads = [threading.Thread(target=one, daemon=True) for one in (slow, slow_grpc)]
        for thread in threads:
            thread.start()
        until(lambda: server.inference._in_flight == 2)
        closing = threading.Thread(target=server.close, daemon=True)
        closing.start()
        until(lambda: not server.inference.is_ready)
        assert closing.is_alive()
        assert not model.closed
        model.gate.set()
        closing.join(PATIENCE)
        for thread in threads:
            thread.join(PATIENCE)
        assert len(answers) == 2
        assert model.closed
        with pytest.raises(ConnectionRefusedError):
            get(server, "/v2/health/live")


# On which thread a request is answered

LOOP = "http"
"""The name of the thread that reads and writes for all connections."""


def on_the_loop(model: LinearModel) -> list[bool]:
    return [name == LOOP for name in model.threads]


def test_a_short_request_that_is_alone_is_answered_on_the_loop():
    model = LinearModel(answers_here=True)
    with serving(one_model(model)) as server:
        for _ in range(3):
            assert infer(server, rows_json("ann"), path="/v2/models/f/infer")[0] == 200
    assert on_the_loop(model) == [True] * 3


def test_short_requests_that_arrive_together_are_answered_on_the_loop_in_one_batch():
    model = LinearModel(answers_here=True)
    users = ["a", "bb", "bad", "dddd"]
    with serving(one_model(model)) as server, contextlib.ExitStack() as stack:
        connections = []
        for _ in range(len(users) + 1):
            one = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=PATIENCE)
            stack.callback(one.close)
            one.request("POST", "/v2/models/f/infer", json.dumps(rows_json("warm")))
            assert one.getresponse().read()
            connections.append(one)
        first, *others = connections
        first.request("POST", "/v2/models/f/infer", json.dumps(rows_json("slow")))
        until(lambda: model.busy == 1)  # the loop is in the model, and reads nothing
        for one, user in zip(others, users, strict=True):
            one.request("POST", "/v2/models/f/infer", json.dumps(rows_json(user)))
        model.batches.clear()
        model.gate.set()
        assert data_of(json.loads(first.getresponse().read())) == [4]
        replies = [one.getresponse() for one in others]
        assert [reply.status for reply in replies] == [200, 200, 400, 200]
        bodies = [json.loads(reply.read()) for reply in replies]
    assert [data_of(bodies[number])[0] for number in (0, 1, 3)] == [1, 2, 4]
    assert "row 0" in bodies[2]["error"]
    assert model.batches == [1, 1, 1, 1]  # the slow one; then one batch, refused for a row, and so each alone
    assert all(on_the_loop(model))
    assert len(model.threads) == len(connections) + 1 + 1 + len(users)


def test_requests_return_to_the_loop_after_those_on_other_threads(monkeypatch):
    monkeypatch.setattr(http_api, "REST_SECONDS", 0.0)
    monkeypatch.setattr(http_api, "QUICK_SECONDS", -1.0)  # every answer counts as slow, but for no time
    model = LinearModel(answers_here=True)
    with serving(one_model(model)) as server:
        for _ in range(3):
            assert infer(server, rows_json("ann"), path="/v2/models/f/infer")[0] == 200
    assert on_the_loop(model) == [True] * 3


def test_a_request_that_may_wait_or_is_large_is_answered_on_another_thread():
    waits, here = LinearModel(), LinearModel(answers_here=True)
    with serving(one_model(waits)) as server:
        infer(server, rows_json("ann"), path="/v2/models/f/infer")
    with serving(one_model(here)) as server:
        infer(server, rows_json("a" * http_api.QUICK_BYTES), path="/v2/models/f/infer")
        packed = gzip.compress(json.dumps(rows_json("ann")).encode())
        infer(server, packed, {"Content-Encoding": "gzip"}, path="/v2/models/f/infer")
    assert on_the_loop(waits) + on_the_loop(here) == [False] * 3


def test_a_request_that_is_not_alone_is_answered_on_another_thread():
    model = LinearModel(answers_here=True)
    with serving(one_model(model)) as server, GrpcClient(server.grpc_address) as client:
        slow = threading.Thread(target=client.ModelInfer, args=[rows_message("slow", model="f")], daemon=True)
        slow.start()
        while not model.busy:
            time.sleep(0.001)
        answers: list[int] = []
        quick = threading.Thread(
            target=lambda: answers.append(infer(server, rows_json("ann"), path="/v2/models/f/infer")[0]),
            daemon=True,
        )
        quick.start()
        until(lambda: server.inference._in_flight == 2)
        assert get(server, "/v2/health/live")[0] == 200  # the loop waits for neither
        model.gate.set()
        quick.join(PATIENCE)
        slow.join(PATIENCE)
    assert answers == [200]
    assert on_the_loop(model) == [False, False]


def test_after_a_slow_answer_requests_leave_the_loop_to_others(monkeypatch):
    monkeypatch.setattr(http_api, "QUICK_SECONDS", -1.0)  # every answer counts as slow
    model = LinearModel(answers_here=True)
    with serving(one_model(model)) as server:
        for _ in range(2):
            infer(server, rows_json("ann"), path="/v2/models/f/infer")
    assert on_the_loop(model) == [True, False]
