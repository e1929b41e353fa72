"""Callers that mean no good, under load: others are answered as ever, and memory stays."""

import random
import resource
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta

import grpc
import pytest
from serve.server.linear import one_model
from serve.server.serving import PATIENCE, GrpcClient, ask_http, rows_json, rows_message, serving

from monolith.cluster.security import SecurityConfig, guard_caller, ssl_context
from monolith.errors import UnavailableError
from monolith.serve import Client
from monolith.serve.server import ServeLimits

INFER = b"POST /v2/models/f/infer HTTP/1.1\r\nhost: localhost\r\n"


def hostile_bytes(draw):
    """Return something that no good client sends."""
    return draw.choice(
        [
            lambda: draw.randbytes(draw.randrange(1, 2000)),
            lambda: INFER + b"content-length: 99999999\r\n\r\n",
            lambda: INFER + b"content-length: 500\r\n\r\n" + draw.randbytes(100),
            lambda: INFER + b"content-length: 500\r\n\r\n" + draw.randbytes(500),
            lambda: INFER + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
            lambda: INFER + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
            lambda: INFER + b"x: " + b"y" * draw.randrange(100_000),
            lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + draw.randbytes(200),
            lambda: INFER + b'inference-header-content-length: 9\r\ncontent-length: 12\r\n\r\n{"inputs":[]',
            lambda: b"GET /v2/models/" + b"a" * 5000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        ]
    )()


def attack(server, stop, seed):
    draw = random.Random(seed)
    attacks = 0
    with GrpcClient(server.grpc_address) as client:
        while not stop.is_set():
            port = server.http_port if draw.random() < 0.8 else int(server.grpc_address.rpartition(":")[2])
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as made:
                made.settimeout(0.05)
                made.sendall(hostile_bytes(draw))
                with suppress(TimeoutError):
                    made.recv(10_000)
            with suppress(grpc.RpcError):
                client.ModelInfer(draw.randbytes(draw.randrange(300)), timeout=5)
            attacks += 1
    return attacks


def under_attack(seconds, attackers):
    """Return how often good callers were answered while others attacked, wrong answers, and KB grown."""
    limits = ServeLimits(
        request_bytes=20_000, read_timeout=timedelta(seconds=2), timeout=timedelta(seconds=PATIENCE)
    )
    with serving(one_model(), limits=limits, port=0) as server:
        stop = threading.Event()
        wrong, right = [], [0]

        def good():
            with GrpcClient(server.grpc_address) as client:
                while not stop.is_set():
                    if client.ModelInfer(rows_message("abc", model="f")).outputs[0].shape != [1]:
                        wrong.append("grpc")
                    answer = ask_http(server.http_port, "POST", "/v2/models/f/infer", rows_json("abc"))[:2]
                    if answer[0] != 200 or answer[1]["outputs"][0]["data"] != [3]:
                        wrong.append(answer)
                    right[0] += 1

        threads = [threading.Thread(target=good, daemon=True)]
        threads += [
            threading.Thread(target=attack, args=(server, stop, seed), daemon=True)
            for seed in range(attackers)
        ]
        for thread in threads:
            thread.start()
        time.sleep(seconds / 2)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        time.sleep(seconds / 2)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        return right[0], wrong, grown


def test_good_callers_are_answered_while_others_attack():
    right, wrong, _ = under_attack(seconds=2, attackers=2)
    assert right
    assert not wrong


@pytest.mark.soak
def test_memory_stays_while_others_attack_for_long():
    right, wrong, grown = under_attack(seconds=60, attackers=4)
    assert right > 100
    assert not wrong
    assert grown < 50_000  # KB; the largest request is 20 KB


@pytest.mark.parametrize("shared", [False, True])
def test_only_callers_with_a_certificate_are_answered(certificates, shared):
    security = SecurityConfig(
        cert=certificates / "ca-node.crt", key=certificates / "ca-node.key", ca=certificates / "ca.crt"
    )
    stranger = SecurityConfig(
        cert=certificates / "other-node.crt", key=certificates / "other-node.key", ca=certificates / "ca.crt"
    )
    guard = guard_caller(security)
    made = {"guard": guard, "context": ssl_context(security, server=True)}
    with serving(one_model(), server=made, **({"port": 0} if shared else {})) as server:
        for url in (server.http_url, f"grpc://{server.grpc_address}"):
            with Client(url, security=security) as client:
                assert client.predict("f", [{"user": "ann"}]).outputs["score"].tolist() == [3]
            with Client(url, security=stranger) as client, pytest.raises(UnavailableError):
                client.models()
