"""What clients can make a server hold: bytes, threads, connections; and which of them it answers at all."""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from serve.server.linear import LinearModel, one_model
from serve.server.serving import PATIENCE, GrpcClient, Served, ask_http, rows_json, rows_message, serving

from monolith.cluster.security import Guard
from monolith.config import Secret
from monolith.errors import ConfigError, OverloadedError, UnavailableError
from monolith.serve.server import ServeLimits
from monolith.serve.server.batching import Quotas
from monolith.wire.open_inference import SERVICE, message_types

INFER = "/v2/models/f/infer"
CONTROL = {"authorization": "Bearer s3cret"}
GUARD = Guard(token=Secret("s3cret"))
PREDICT = {"authorization": str(GUARD.for_role("predict").header)}


def get(server: Served, path: str, **headers: str) -> int:
    return ask_http(server.http_port, "GET", path, headers=headers)[0]


def infer(server: Served, body: Any = None, **headers: str) -> int:
    body = rows_json("a") if body is None else body
    return ask_http(server.http_port, "POST", INFER, body, headers)[0]


# Bytes


def test_bytes_are_counted_until_a_request_is_answered():
    quotas = Quotas(ServeLimits(bytes_in_flight=100))
    with quotas.admit("a") as first:
        first.add(60)
        with quotas.admit("b") as second, pytest.raises(UnavailableError, match="max-bytes-in-flight"):
            second.add(60)
    with quotas.admit("b") as second:
        second.add(100)


def test_one_peer_cannot_take_the_places_of_others():
    quotas = Quotas(ServeLimits(peer_requests=2))
    with quotas.admit("a"), quotas.admit("a"):
        with pytest.raises(OverloadedError, match="2 requests of a are in flight"):
            quotas.admit("a")
        with quotas.admit("b"), quotas.admit(""):
            pass
    with quotas.admit("a"):
        pass


@pytest.fixture(scope="module")
def narrow() -> Iterator[Served]:
    limits = ServeLimits(json_bytes=2000, bytes_in_flight=100_000, rows=100, body_rate=100)
    with serving(one_model(), limits=limits) as server:
        yield server


def test_json_has_a_smaller_limit_than_tensors_in_binary(narrow):
    text = "a" * 3000
    assert infer(narrow, rows_json(text)) == 413
    raw = len(text).to_bytes(4, "little") + text.encode()
    one = {"name": "user", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(raw)}}
    head = json.dumps({"inputs": [one]}).encode()
    length = {"inference-header-content-length": str(len(head))}
    assert infer(narrow, head + raw, **length) == 200
    long_head = head + b" " * 3000
    assert infer(narrow, long_head + raw, **{"inference-header-content-length": str(len(long_head))}) == 413


def test_a_grpc_message_without_raw_contents_has_the_limit_of_json(narrow):
    with GrpcClient(narrow.grpc_address) as client:
        with pytest.raises(grpc.RpcError, match=r"without raw_input_contents.*--max-json-bytes"):
            client.ModelInfer(rows_message("a" * 3000, model="f"))
        message = message_types().ModelInferRequest(model_name="f")
        message.inputs.add(name="user", datatype="BYTES", shape=[1])
        message.raw_input_contents.append((3000).to_bytes(4, "little") + b"a" * 3000)
        assert client.ModelInfer(message).outputs[0].shape == [1]
        message = message_types().ModelInferRequest(model_name="f")
        for _ in range(40_000):
            message.inputs.add()
        with pytest.raises(grpc.RpcError, match="more than 4096 inputs"):
            client.ModelInfer(message)


def test_json_with_many_lists_in_it_is_refused_before_it_is_read():
    with serving(one_model(), limits=ServeLimits(rows=10)) as server:
        assert infer(server, b"[" + b"[]," * 2000 + b"0]") == 413
        assert infer(server) == 200


def test_packed_bodies_count_as_what_they_become_and_others_are_told_to_retry():
    limits = ServeLimits(json_bytes=1 << 20, bytes_in_flight=1 << 20)
    with serving(one_model(), limits=limits) as server:
        packed = gzip.compress(b" " * 200_000)
        status, said, headers = ask_http(
            server.http_port, "POST", INFER, packed, {"content-encoding": "gzip"}
        )
        assert (status, headers["retry-after"]) == (503, "1")
        assert "--max-bytes-in-flight" in said["error"]
        assert infer(server) == 200


TESTS = Path(__file__).parents[2]
PROGRAM = """
import sys
from serve.server.linear import one_model
from serve.server.serving import serving
with serving(one_model()) as server:
    print(server.http_port, server.grpc_address, flush=True)
    sys.stdin.read()
"""
BOMBS = {
    "gzip": lambda: gzip.compress(b"[" + b"0," * (30 << 20) + b"0]", 1),
    "lists": lambda: gzip.compress(b"[" + b"[]," * (2 << 20) + b"[]]", 1),
    "nested": lambda: gzip.compress(b"[" * (4 << 20), 1),
    "numbers": lambda: gzip.compress(b'{"inputs": [' + b"1e1," * ((2 << 20) - 100) + b"0]}", 1),
}


def typed_zeros(count: int) -> bytes:
    """Return a request with one input of so many numbers, each of one byte."""

    def field(number: int, content: bytes) -> bytes:
        size, length = len(content), b""
        while size > 0x7F:
            length += bytes([size & 0x7F | 0x80])
            size >>= 7
        return bytes([number << 3 | 2]) + length + bytes([size]) + content

    message = message_types().ModelInferRequest(model_name="f")
    message.inputs.add(name="user").contents.int64_contents.append(0)
    found = field(1, b"f") + field(5, field(1, b"user") + field(5, field(3, bytes(1))))
    assert message_types().ModelInferRequest.FromString(found) == message
    return field(1, b"f") + field(5, field(1, b"user") + field(5, field(3, bytes(count))))


def test_json_bombs_cost_a_server_little_memory_and_probes_are_answered_meanwhile():
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        port, address = process.stdout.readline().split()

        def peak() -> int:
            status = Path(f"/proc/{process.pid}/status").read_text()
            return int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) << 10

        before = peak()
        answers: list[int] = []

        def attack(bomb: bytes) -> None:
            headers = {"content-encoding": "gzip"}
            answers.append(ask_http(int(port), "POST", INFER, bomb, headers)[0])

        threads = [
            threading.Thread(target=attack, args=(bomb,), daemon=True)
            for make in BOMBS.values()
            for bomb in [make()]
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert ask_http(int(port), "GET", "/v2/health/live")[0] == 200
            time.sleep(0.05)
        assert set(answers) <= {400, 413, 503}
        with GrpcClient(address) as client, pytest.raises(grpc.RpcError, match="--max-json-bytes"):
            client.ModelInfer(typed_zeros(40 << 20))
        assert peak() - before < 1 << 30  # one of them took 1.65 GB
        assert ask_http(int(port), "POST", INFER, rows_json("a"))[0] == 200
    finally:
        process.kill()
        process.communicate()


# Slow clients


def test_a_body_that_comes_too_slowly_is_given_up():
    limits = ServeLimits(read_timeout=timedelta(seconds=0.3), body_rate=100_000)
    with serving(one_model(), limits=limits) as server:
        with socket.create_connection(("127.0.0.1", server.http_port), timeout=PATIENCE) as made:
            made.sendall(b"POST %s HTTP/1.1\r\nhost: localhost\r\n" % INFER.encode())
            made.sendall(b"content-length: 4000000\r\n\r\n" + b" " * 70_000)
            begun = time.monotonic()
            made.settimeout(0.02)
            answer = b""
            while not answer and time.monotonic() - begun < PATIENCE:
                try:
                    made.sendall(b" ")  # each part came in time, once
                    answer = made.recv(1000)
                except TimeoutError:
                    continue
        assert b" 408 " in answer
        assert infer(server) == 200


def half_open(address: str, count: int, stop: threading.Event, stack: ExitStack, **headers: str) -> list[Any]:
    """Begin calls whose message never comes."""

    def silence() -> Iterator[bytes]:
        stop.wait()
        return
        yield

    calls = []
    channel = None
    for number in range(count):
        if number % 50 == 0:
            channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
            stack.callback(channel.close)
        method = channel.stream_unary(f"/{SERVICE}/ModelInfer")
        calls.append(method.future(silence(), metadata=tuple(headers.items())))
    return calls


@pytest.mark.parametrize("guard", [None, GUARD])
def test_calls_without_a_message_keep_no_thread_from_others(guard):
    """Without a token all are admitted; with one, those that lack it are refused before their message."""
    stop = threading.Event()
    made = {"guard": guard} if guard else {}
    limits = ServeLimits(read_timeout=timedelta(seconds=PATIENCE))
    with serving(one_model(), server=made, threads=4, limits=limits) as server, ExitStack() as stack:
        stack.callback(stop.set)
        calls = half_open(server.grpc_address, 20, stop, stack)
        if guard is not None:
            for call in calls:
                assert call.code() is grpc.StatusCode.UNAUTHENTICATED
        else:
            time.sleep(0.2)
        with GrpcClient(server.grpc_address, tuple(PREDICT.items())) as client:
            assert client.ModelInfer(rows_message("a", model="f"), timeout=PATIENCE / 2).outputs[0].shape == [
                1
            ]


def test_a_call_whose_message_does_not_come_is_cancelled():
    stop = threading.Event()
    limits = ServeLimits(read_timeout=timedelta(seconds=0.2))
    with serving(one_model(), limits=limits) as server, ExitStack() as stack:
        stack.callback(stop.set)
        for call in half_open(server.grpc_address, 3, stop, stack):
            assert call.code() is grpc.StatusCode.CANCELLED


# Peers


def test_probes_are_answered_while_a_peer_has_used_up_its_quota():
    model = LinearModel()
    limits = ServeLimits(peer_requests=1, timeout=timedelta(seconds=PATIENCE))
    with serving(one_model(model), limits=limits, threads=1) as server:
        slow = threading.Thread(target=infer, args=(server, rows_json("slow")), daemon=True)
        slow.start()
        end = time.monotonic() + PATIENCE
        while not model.busy:
            assert time.monotonic() < end
            time.sleep(0.002)
        status, said, headers = ask_http(server.http_port, "POST", INFER, rows_json("a"))
        assert (status, headers["retry-after"]) == (429, "1")
        assert "--max-peer-requests" in said["error"]
        assert get(server, "/v2/health/ready") == 200  # the only thread is busy as well
        with GrpcClient(server.grpc_address) as client:
            held = server._quotas.admit("ipv4:127.0.0.1")
            with held, pytest.raises(grpc.RpcError, match="--max-peer-requests"):
                client.ModelInfer(rows_message("a", model="f"))
            assert client.ServerLive().live
        model.gate.set()
        slow.join(PATIENCE)
        assert infer(server) == 200


@pytest.mark.parametrize("shared", [False, True])
def test_connections_of_one_peer_are_bounded_and_its_probes_are_answered(shared):
    with (
        serving(
            one_model(), limits=ServeLimits(peer_connections=3), **({"port": 0} if shared else {})
        ) as server,
        ExitStack() as stack,
    ):
        for _ in range(3):
            made = stack.enter_context(socket.create_connection(("127.0.0.1", server.http_port)))
            if shared:  # those that are passed on to gRPC count as well
                made.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
                assert made.recv(100)
        assert infer(server) == 503
        assert get(server, "/v2/health/live") == 200
        stack.close()
        end = time.monotonic() + PATIENCE
        while infer(server) != 200:
            assert time.monotonic() < end


# Browsers


@pytest.fixture(scope="module")
def here() -> Iterator[Served]:
    with serving(one_model(), allowed_hosts=("Proxy.example",)) as server:
        yield server


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:8000", 200),
        ("localhost:8000", 200),
        ("[::1]:8000", 200),
        ("proxy.example:443", 200),
        ("attacker.example", 403),
        ("127.0.0.1.attacker.example", 403),
        ("10.0.0.7", 403),
        ("a b", 403),
    ],
)
def test_a_request_for_another_name_is_refused(here, host, status):
    assert get(here, "/v2", host=host) == status
    assert get(here, "/v2/health/live", host=host) == 200
    if status == 403:
        assert "--allowed-hosts" in ask_http(here.http_port, "GET", "/v2", headers={"host": host})[1]["error"]


def test_a_page_of_another_site_is_refused(here):
    own = f"127.0.0.1:{here.http_port}"
    assert infer(here, origin=f"http://{own}") == 200
    assert infer(here, origin="https://attacker.example") == 403
    assert infer(here, origin="null") == 403
    assert infer(here, origin="http://localhost:3000", **{"sec-fetch-site": "same-site"}) == 403
    assert infer(here, **{"sec-fetch-site": "cross-site"}) == 403
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert get(here, "/docs", **link) == 200  # a link that was clicked


def test_any_name_is_fine_if_a_token_is_demanded():
    with serving(one_model(), server={"guard": GUARD}) as server:
        assert get(server, "/v2", host="models.internal", **PREDICT) == 200
        assert get(server, "/v2", host="models.internal") == 401


# Control


def load(server: Served, headers: dict[str, str]) -> tuple[int, grpc.StatusCode]:
    status = ask_http(server.http_port, "POST", "/v2/repository/models/f/load", headers=headers)[0]
    request = message_types().RepositoryModelLoadRequest(model_name="f")
    with GrpcClient(server.grpc_address, tuple(headers.items())) as client:
        try:
            client.RepositoryModelLoad(request)
        except grpc.RpcError as error:
            return status, error.code()
    return status, grpc.StatusCode.OK


def test_models_are_loaded_on_request_only_if_that_is_allowed_and_with_the_control_token():
    code = grpc.StatusCode
    with serving(one_model()) as server:
        assert load(server, {}) == (403, code.PERMISSION_DENIED)
    with serving(one_model(), server={"guard": GUARD}) as server:
        assert load(server, CONTROL) == (403, code.PERMISSION_DENIED)
    with serving(one_model(), allow_control=True, server={"guard": GUARD}) as server:
        assert load(server, {}) == (401, code.UNAUTHENTICATED)
        assert load(server, PREDICT) == (403, code.PERMISSION_DENIED)
        assert load(server, CONTROL) == (200, code.OK)
        assert infer(server, **PREDICT) == infer(server, **CONTROL) == 200
    with pytest.raises(ConfigError, match="--token-file"), serving(one_model(), allow_control=True):
        pass
