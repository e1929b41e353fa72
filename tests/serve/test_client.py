"""Clients: one contract for threads and event loops, over both transports; and servers that misbehave."""

import asyncio
import gzip
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
import torch
from serve.server.linear import LinearCatalog, LinearModel, LinearSignature, Spec, one_model
from serve.server.serving import serving

from monolith.cli.main import main
from monolith.cluster.security import Guard, SecurityConfig
from monolith.config import Secret
from monolith.errors import (
    ConfigError,
    DeadlineExceededError,
    ForbiddenError,
    OverloadedError,
    RequestError,
    RequestTooLargeError,
    StaleAnswerError,
    UnavailableError,
    UnknownModelError,
)
from monolith.serve import AsyncClient, Client, ClientInput, ClientOptions, client_messages, client_transports
from monolith.serve.client_messages import GrpcDialect, InferQuestion, _unpacked, encode_inputs, tensors_of
from monolith.serve.config import ServeLimits
from monolith.serve.server.tensors import listed_tensor

ROWS = [
    {"user": "ann", "item": 7, "price": 0.5, "tags": ["x", "y"], "label": 1},
    {"user": "bo", "item": 8, "tags": [], "price": 1},
]
ONE = [{"user": "ann"}]
SOON = ClientOptions(timeout=timedelta(seconds=0.2))
PATIENT = ClientOptions(timeout=timedelta(seconds=60))


def until(reached: Callable[[], Any]) -> None:
    end = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.001)


class Awaited:
    """An `AsyncClient` on a loop of its own, called as a `Client` is."""

    def __init__(self, url: str, **how: Any) -> None:
        if "sleep" in how:
            waited = how["sleep"]

            async def sleep(seconds: float) -> None:
                waited(seconds)

            how["sleep"] = sleep
        self._runner = asyncio.Runner()
        self._client = AsyncClient(url, **how)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        return lambda *words, **more: self._runner.run(method(*words, **more))

    def __enter__(self) -> "Awaited":
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


@pytest.fixture(params=[Client, Awaited], ids=["threads", "loop"])
def client_of(request):
    return request.param


@pytest.fixture(params=["http", "grpc"])
def place(request):
    """Returns the URL of a server, over one transport."""
    return lambda server: server.http_url if request.param == "http" else f"grpc://{server.grpc_address}"


@pytest.fixture(scope="module")
def server():
    with serving(one_model()) as made:
        yield made


@pytest.fixture
def client(client_of, place, server):
    with client_of(place(server), options=PATIENT) as made:
        yield made


def test_rows_become_columns_of_the_types_that_the_model_takes(client):
    assert client.models() == ["f"]
    found = client.predict("f", ROWS, request_id="q-7")
    assert found.outputs["score"].tolist() == [3 + 7 + 0.5 + 20, 2 + 8 + 1]
    assert found.outputs["double"].dtype == np.float32
    assert (found.model, found.version, found.ignored, found.id) == ("f", "1", ("label",), "q-7")
    assert (found.step, found.staleness) == (100, timedelta(seconds=0.5))


def test_columns_are_lists_or_arrays(client):
    columns = {
        "user": np.array(["ann", "bo"]),
        "item": np.array([7, 8], np.int32),
        "price": np.array([0.5, 1.0]),
        "tags": [["x", "y"], None],
    }
    found = client.predict("f", columns, outputs=["score"])
    assert found.outputs["score"].tolist() == [30.5, 11]
    assert list(found.outputs) == ["score"]


def test_a_value_that_is_null_or_not_there_is_an_empty_cell(client):
    rows = [{"user": "ann", "tags": "x"}, {"user": "bo", "tags": None}, {"user": "cy"}]
    assert client.predict("f", rows).outputs["score"].tolist() == [3 + 10, 2, 2]


def test_what_is_wrong_is_said(client):
    with pytest.raises(RequestError, match="row 0: 'item' must be INT64, got \"x\""):
        client.predict("f", [{"item": "x"}])
    with pytest.raises(RequestError, match="takes user, item, price, tags; the request has x"):
        client.predict("f", [{"x": 1}])
    with pytest.raises(RequestError, match="no rows"):
        client.predict("f", [])
    with pytest.raises(RequestError, match="row 0: bad"):
        client.predict("f", [{"user": "bad"}])
    with pytest.raises(UnavailableError, match="the server failed to answer"):
        client.predict("f", [{"user": "bug"}])
    with pytest.raises(UnknownModelError, match="no model 'g'"):
        client.predict("g", ONE)
    with pytest.raises(UnknownModelError, match="no version '9'"):
        client.predict("f", ONE, version="9")


def test_one_client_serves_many_threads(place, server):
    with (
        Client(place(server), options=replace(PATIENT, connections=3)) as shared,
        ThreadPoolExecutor(8) as pool,
    ):

        def ask(item: int) -> list[float]:
            return shared.predict("f", {"user": ["ann"], "item": [item]}).outputs["score"].tolist()

        assert list(pool.map(ask, range(100))) == [[3 + item] for item in range(100)]


def test_one_client_serves_many_tasks(place, server):
    async def ask_all() -> list[Any]:
        async with AsyncClient(place(server), options=replace(PATIENT, connections=3)) as shared:
            asked = (shared.predict("f", {"user": ["ann"], "item": [item]}) for item in range(30))
            return [one.outputs["score"].tolist() for one in await asyncio.gather(*asked)]

    assert asyncio.run(ask_all()) == [[3 + item] for item in range(30)]


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "grpc://127.0.0.1:1"])
def test_a_server_that_is_not_there_is_said_to_be(client_of, url):
    waits: list[float] = []
    with (
        client_of(url, sleep=waits.append) as client,
        pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"),
    ):
        client.models()
    assert len(waits) == 2
    assert 0.025 <= waits[0] <= 0.05 <= waits[1] <= 0.1  # doubled, and a random half left out


@pytest.mark.parametrize("url", ["ftp://a", "http://", "http://a:x", "grpc://:1"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigError, match="cannot connect to"):
        Client(url)


@pytest.mark.parametrize(
    "wrong", [{"retries": -1}, {"timeout": timedelta()}, {"priority": 10}, {"connections": 0}]
)
def test_options_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ClientOptions(**wrong)


def test_the_token_is_presented(client_of, place):
    token = Secret("s3cret")
    with serving(one_model(), server={"guard": Guard(token=token)}) as server:
        url = place(server)
        with client_of(url, security=SecurityConfig(token=token)) as client:
            assert client.predict("f", ONE).outputs["score"].tolist() == [3]
        with client_of(url) as client, pytest.raises(ForbiddenError, match="token"):
            client.models()
        derived = Guard(token=token).for_role("predict").token
        with client_of(url, security=SecurityConfig(predict_token=derived)) as client:
            assert client.predict("f", ONE).outputs["score"].tolist() == [3]


def test_a_client_can_be_used_again_after_a_timeout(client_of, place):
    with serving(one_model()) as server:
        (model,) = server.catalog.loaded
        with client_of(place(server), options=PATIENT) as client:
            client.models()  # connects, which may take longer than a short timeout
            with pytest.raises(DeadlineExceededError):
                client.predict("f", [{"user": "slow"}], options=SOON)
            model.gate.set()
            assert client.predict("f", ONE).outputs["score"].tolist() == [3]


def test_a_busy_server_is_asked_again_when_it_says(client_of, place):
    with serving(one_model(), limits=ServeLimits(peer_requests=2)) as server, ThreadPoolExecutor(2) as pool:
        (model,) = server.catalog.loaded
        waits: list[float] = []

        def sleep(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 2:
                model.gate.set()
            if len(waits) > 2:
                until(lambda: server.inference._in_flight == 0)

        url, patient = place(server), replace(PATIENT, retries=1000)
        with Client(url, options=patient) as other, client_of(url, options=patient, sleep=sleep) as client:
            assert client.predict("f", ONE).outputs["score"].tolist() == [3]
            slow = [pool.submit(other.predict, "f", [{"user": "slow"}]) for _ in range(2)]
            until(lambda: server.inference._in_flight == 2)
            with pytest.raises(OverloadedError):
                client.predict("f", ONE, options=replace(PATIENT, retries=0))
            assert waits == []
            assert client.predict("f", ONE).outputs["score"].tolist() == [3]
            assert set(waits) == {1.0}
            assert [one.result().outputs["score"].tolist() for one in slow] == [[4], [4]]


def test_a_request_that_is_too_large_is_not_sent_again(client_of, place):
    waits: list[float] = []
    with (
        serving(one_model(), limits=ServeLimits(rows=1)) as server,
        client_of(place(server), sleep=waits.append) as client,
        pytest.raises(RequestTooLargeError),
    ):
        client.predict("f", ROWS)
    assert waits == []


def test_a_server_that_was_restarted_is_found(client_of, place):
    with serving(one_model()) as server:
        ports = {"http_port": server.http_port, "grpc_port": int(server.grpc_address.rpartition(":")[2])}
        client = client_of(place(server), options=replace(PATIENT, retries=20))
        client.__enter__()
        assert client.predict("f", ONE).version == "1"
    with serving(one_model(LinearModel(version="2")), **ports):
        assert client.predict("f", ONE).version == "2"
        client.__exit__(None, None, None)


def test_inputs_of_a_new_version_are_found(client_of, place):
    wide = LinearSignature(inputs=(*LinearSignature().inputs, Spec("age", "INT64", (-1,))))
    catalog = LinearCatalog({"f": {"1": LinearModel}})
    rows = [{"user": "ann", "age": 3}]
    with serving(catalog) as server, client_of(place(server), options=PATIENT) as client:
        assert client.predict("f", rows).ignored == ("age",)
        catalog.folders["f"]["2"] = lambda: LinearModel(version="2", signature=wide)
        while (answer := client.predict("f", rows)).version == "1":
            pass
        assert answer.ignored == ("age",)  # encoded for version 1, and fine
        assert client.predict("f", rows).ignored == ()


def test_a_request_that_no_longer_fits_is_encoded_again(client_of, place):
    texts = LinearSignature(inputs=(Spec("user", "BYTES", (-1,)), Spec("item", "BYTES", (-1,))))

    class Texts(LinearModel):
        def predict(self, columns: Any, **_: Any) -> Any:
            item = np.array([int(one) for one in columns["item"]])
            return super().predict({**columns, "item": item})

    catalog = LinearCatalog({"f": {"1": LinearModel}})
    rows = [{"user": "ann", "item": 4}]
    with serving(catalog) as server, client_of(place(server), options=PATIENT) as client:
        assert client.predict("f", rows).outputs["score"].tolist() == [7]
        catalog.folders["f"]["2"] = lambda: Texts(version="2", signature=texts)
        while (answer := client.predict("f", rows)).version == "1":
            pass
        assert answer.outputs["score"].tolist() == [7]


def test_an_answer_that_is_too_old_is_an_error_with_the_answer(client_of, place, server):
    old = replace(PATIENT, max_staleness=timedelta(seconds=0.1))
    with client_of(place(server), options=old) as client:
        with pytest.raises(StaleAnswerError, match=r"s old, the client accepts 0\.1 s") as stale:
            client.predict("f", ONE)
        assert timedelta(seconds=0.5) <= stale.value.staleness
        assert stale.value.answer.staleness == timedelta(seconds=0.5)
        assert stale.value.answer.outputs["score"].tolist() == [3]
        fine = replace(PATIENT, max_staleness=timedelta(seconds=1))
        assert client.predict("f", ONE, options=fine).version == "1"


def test_requests_beyond_the_pool_wait_and_say_so():
    with serving(one_model()) as server:
        (model,) = server.catalog.loaded
        with Client(server.http_url, options=replace(PATIENT, connections=1)) as client:
            client.models()
            with ThreadPoolExecutor(1) as pool:
                slow = pool.submit(client.predict, "f", [{"user": "slow"}])
                until(lambda: model.busy)
                with pytest.raises(DeadlineExceededError, match=r"all 1 connections .* were busy"):
                    client.predict("f", ONE, options=SOON)
                model.gate.set()
                assert slow.result().outputs["score"].tolist() == [4]


# A server over HTTP that does what it is told


@dataclass
class Script:
    """What a server answers to `infer`, one after another: a status and a body; None drops the connection."""

    answers: list[tuple[int, Any, dict[str, str]] | None]
    extensions: list[str] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=lambda: [INPUTS])
    """What it says to be the inputs of the model, one after another; the last one stays."""
    asked: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)


INPUTS = [
    {"name": "user", "datatype": "BYTES", "shape": [-1]},
    {"name": "x", "datatype": "FP32", "shape": [-1]},
]
GOOD = {
    "model_name": "f",
    "model_version": "1",
    "outputs": [{"name": "score", "datatype": "FP32", "shape": [1], "data": [None]}],
}


@contextmanager
def scripted(script: Script) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            script.asked.append((self.path, dict(self.headers), b""))
            models = self.path.startswith("/v2/models")
            inputs = script.inputs.pop(0) if models and len(script.inputs) > 1 else script.inputs[0]
            self._send(200, {"inputs": inputs} if models else {"extensions": script.extensions}, {})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            script.asked.append((self.path, dict(self.headers), body))
            answer = script.answers.pop(0)
            if answer is None:
                self.close_connection = True
            else:
                self._send(*answer)

        def _send(self, status: int, said: Any, headers: dict[str, str]) -> None:
            data = said if isinstance(said, bytes) else json.dumps(said).encode()
            self.send_response(status)
            for name, value in {"content-length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listening.daemon_threads = True
    thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}"
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


def test_a_lost_connection_and_a_server_that_starts_are_tried_again(client_of):
    script = Script([None, (503, {"error": "loading"}, {"retry-after": "0.01"}), (200, GOOD, {})])
    waits: list[float] = []
    with scripted(script) as url, client_of(url, options=PATIENT, sleep=waits.append) as client:
        found = client.predict("f", [{"user": "ann", "x": float("nan")}])
    assert np.isnan(found.outputs["score"]).tolist() == [True]
    assert len(waits) == 2
    assert [path for path, _, _ in script.asked] == ["/v2", "/v2/models/f", *["/v2/models/f/infer"] * 3]
    _, headers, body = script.asked[-1]
    assert json.loads(body)["inputs"][1]["data"] == [None]  # no extensions: all of it is JSON
    assert 0 < int(headers["x-request-timeout-ms"]) <= 60_000


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, RequestError),
        (401, ForbiddenError),
        (413, RequestTooLargeError),
        (500, UnavailableError),
        (504, DeadlineExceededError),
    ],
)
def test_a_request_that_would_fail_again_is_sent_once(client_of, status, kind):
    script = Script([(status, {"error": "no"}, {})])
    waits: list[float] = []
    with (
        scripted(script) as url,
        client_of(url, options=PATIENT, sleep=waits.append) as client,
        pytest.raises(kind, match=f"answered {status}: no"),
    ):
        client.predict("f", ONE)
    assert waits == []


def test_metadata_is_fetched_once_and_options_are_sent(client_of):
    script = Script([(200, GOOD, {})] * 3)
    options = replace(PATIENT, priority=2)
    with scripted(script) as url, client_of(url, options=options) as client:
        for _ in range(3):
            client.predict("f", ONE, split_key="ann")
    assert [path for path, _, _ in script.asked] == ["/v2", "/v2/models/f", *["/v2/models/f/infer"] * 3]
    assert json.loads(script.asked[-1][2])["parameters"] == {"priority": 2, "split_key": "ann"}
    question = InferQuestion(
        "f", "", encode_inputs((ClientInput("x", "FP32", (-1,)),), {"x": [1]})[0], (), "", "ann", 3
    )
    sent = GrpcDialect("x").infer(question, ()).body.parameters
    assert (sent["priority"].int64_param, sent["split_key"].string_param) == (3, "ann")


def test_a_split_between_versions_is_not_described_again_and_again(client_of):
    script = Script([(200, {**GOOD, "model_version": version}, {}) for version in "1212121"])
    with scripted(script) as url, client_of(url, options=PATIENT) as client:
        for _ in range(7):
            client.predict("f", ONE)
    assert [path for path, _, _ in script.asked].count("/v2/models/f") == 2


def test_a_version_that_comes_between_the_description_and_the_first_request_is_described(client_of):
    script = Script([(400, {"error": "x is missing"}, {}), (200, GOOD, {})], inputs=[INPUTS[:1], INPUTS])
    with scripted(script) as url, client_of(url, options=PATIENT) as client:
        assert client.predict("f", [{"user": "ann", "x": 1.0}]).version == "1"
    sent = [json.loads(body)["inputs"] for path, _, body in script.asked if path.endswith("infer")]
    assert [len(inputs) for inputs in sent] == [1, 2]


def test_the_time_that_an_answer_took_counts_as_age(client_of):
    script = Script([(200, {**GOOD, "parameters": {"staleness": 0.5}}, {})] * 2)
    seconds = itertools.count()  # a second passes whenever the clock is read
    with scripted(script) as url, client_of(url, options=PATIENT, clock=lambda: next(seconds)) as client:
        with pytest.raises(StaleAnswerError) as stale:
            client.predict("f", ONE, options=replace(PATIENT, max_staleness=timedelta(seconds=1)))
        assert stale.value.staleness == timedelta(seconds=1.5)
        client.predict("f", ONE, options=replace(PATIENT, max_staleness=timedelta(seconds=1.5)))


def test_an_answer_of_unknown_age_is_too_old(client_of):
    script = Script([(200, GOOD, {})])
    old = replace(PATIENT, max_staleness=timedelta(hours=1))
    with (
        scripted(script) as url,
        client_of(url, options=old) as client,
        pytest.raises(StaleAnswerError, match="of unknown age"),
    ):
        client.predict("f", ONE)


@pytest.mark.parametrize("said", [b"<html>", b"[]", b"{}", {**GOOD, "outputs": [{"name": "s"}]}])
def test_a_process_that_is_no_inference_server_is_said_to_be_none(client_of, said):
    with (
        scripted(Script([(200, said, {})])) as url,
        client_of(url, options=PATIENT) as client,
        pytest.raises(UnavailableError, match="is not a server of the Open Inference Protocol"),
    ):
        client.predict("f", ONE)


def answer_of(
    data: Any = (0.5,), *, shape: Any = (1,), datatype: Any = "FP32", **more: Any
) -> dict[str, Any]:
    return {
        **GOOD,
        "outputs": [{"name": "score", "datatype": datatype, "shape": shape, "data": data}],
        **more,
    }


@pytest.mark.parametrize(
    "said",
    [
        b"[" * 200_000,
        b'{"a":' * 200_000,
        answer_of([float("nan")]),
        answer_of([float("inf")]),
        answer_of([1 << 80], datatype="INT64"),
        answer_of(shape=[-1]),
        answer_of(shape=[2]),
        answer_of(shape=["1"]),
        answer_of(shape=[1 << 70]),
        answer_of(shape=[[]], datatype=["FP32"]),
        answer_of(datatype="BYTES"),
        answer_of(parameters=[]),
        answer_of(parameters={"step": "ten"}),
        answer_of(parameters={"staleness": "1e400"}),
        answer_of(parameters={"staleness": 1e300}),
        answer_of(parameters={"staleness": -1}),
        answer_of(model_name=7),
        answer_of(id=[]),
    ],
    ids=lambda said: str(said)[:60],
)
def test_an_answer_that_is_deep_not_finite_or_of_another_shape_is_refused(client_of, said):
    with (
        scripted(Script([(200, said, {})])) as url,
        client_of(url, options=replace(PATIENT, max_staleness=timedelta(hours=1))) as client,
        pytest.raises(UnavailableError, match="is not a server of the Open Inference Protocol"),
    ):
        client.predict("f", ONE)


@pytest.mark.parametrize(
    ("sizes", "head_length"),
    [
        ([1 << 40], None),
        ([-4, 8], None),
        ([True], None),
        ([4], -1),
        ([4], 1 << 40),
        ([2], None),
        ([4, 4], None),
    ],
)
def test_parts_of_a_binary_answer_that_do_not_add_up_are_refused(client_of, sizes, head_length):
    outputs = [
        {"name": f"s{number}", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": size}}
        for number, size in enumerate(sizes)
    ]
    head = json.dumps({**GOOD, "outputs": outputs}).encode()
    length = len(head) if head_length is None else head_length
    said = (200, head + b"\0\0\0\0", {"inference-header-content-length": str(length)})
    with (
        scripted(Script([said], extensions=["binary_tensor_data"])) as url,
        client_of(url, options=PATIENT) as client,
        pytest.raises(UnavailableError, match="is not a server of the Open Inference Protocol"),
    ):
        client.predict("f", ONE)


@pytest.mark.parametrize(
    "inputs",
    [
        [{"name": [], "datatype": "FP32", "shape": [-1]}],
        [{"name": "user", "datatype": {}, "shape": [-1]}],
        [{"name": "user", "datatype": "BYTES", "shape": "wide"}],
        [{"name": "user", "datatype": "BYTES", "shape": [1.5]}],
        {"user": 1},
    ],
)
def test_metadata_of_other_types_is_refused(client_of, inputs):
    with (
        scripted(Script([], inputs=[inputs])) as url,
        client_of(url, options=PATIENT) as client,
        pytest.raises(UnavailableError, match="is not a server of the Open Inference Protocol"),
    ):
        client.predict("f", ONE)


@pytest.mark.parametrize("splits", [[0, 5], [1, 2], [0, 2, 1, 2], [0.0, 2.0]])
def test_items_whose_splits_do_not_fit_are_refused(client_of, splits):
    kind = "INT64" if all(isinstance(one, int) for one in splits) else "FP32"
    outputs = [
        {"name": "item", "datatype": "INT64", "shape": [2], "data": [7, 8]},
        {"name": "item.row_splits", "datatype": kind, "shape": [len(splits)], "data": splits},
        {"name": "score", "datatype": "FP32", "shape": [2], "data": [0.5, 0.25]},
    ]
    with (
        scripted(Script([(200, {**GOOD, "outputs": outputs}, {})])) as url,
        client_of(url, options=PATIENT) as client,
        pytest.raises(UnavailableError, match="items, scores and splits do not fit"),
    ):
        client.topk("f", ONE)


def test_an_answer_costs_no_more_memory_than_the_bounds(client_of, monkeypatch):
    monkeypatch.setattr(client_messages, "LARGEST_JSON", 1000)
    monkeypatch.setattr(client_messages, "MOST_TEXTS", 100)
    monkeypatch.setattr(client_transports, "LARGEST_ANSWER", 10_000)
    texts = {"name": "s", "datatype": "BYTES", "shape": [101], "parameters": {"binary_data_size": 404}}
    head = json.dumps({**GOOD, "outputs": [texts]}).encode()
    bomb = gzip.compress(b" " * 5000 + json.dumps(GOOD).encode())
    for status, said, headers, why in (
        (200, b" " * 20_000, {}, "more than 10000 bytes"),
        (200, answer_of([0] * 1000, shape=[1000]), {}, "its JSON has more than 1000 bytes"),
        (200, head + bytes(404), {"inference-header-content-length": str(len(head))}, "more than 100 texts"),
        (200, bomb, {"content-encoding": "gzip"}, "compressed"),
        (500, b"x" * 200_000, {}, "answered 500: x{200}$"),
        (400, {"error": "y" * 200_000}, {}, "answered 400"),
        (400, b"[" * 60_000, {}, "answered 400"),
    ):
        with (
            scripted(Script([(status, said, headers)])) as url,
            client_of(url, options=replace(PATIENT, retries=0)) as client,
            pytest.raises((UnavailableError, RequestError), match=why) as refused,
        ):
            client.predict("f", ONE)
        assert len(str(refused.value)) < 2000


# Values


def test_lists_of_one_length_where_the_model_says_so():
    (made,) = tensors_of(ClientInput("x", "FP32", (-1, 2)), [[1, 2], None, [3, None]])
    assert (made.datatype, made.shape) == ("FP32", (3, 2))
    assert made.plain() == [1, 2, None, None, 3, None]
    with pytest.raises(RequestError, match="row 1: 'x' must have 2 numbers, got 1"):
        tensors_of(ClientInput("x", "FP32", (-1, 2)), [[1, 2], [3]])


@pytest.mark.parametrize(
    ("datatype", "shape", "values", "says"),
    [
        ("INT64", (-1,), [1, 2.5], "row 1: 'x' must be INT64, got 2.5"),
        ("INT64", (-1,), [True], "row 0: 'x' must be INT64, got true"),
        ("INT64", (-1,), [1 << 70], "too large for INT64"),
        ("INT64", (-1,), np.array([1.0]), "got an array of float64"),
        ("FP32", (-1,), np.zeros((1, 1, 1)), "one or two dimensions"),
        ("FP32", (-1,), "ann", "must be a list"),
        ("BYTES", (-1,), [{}], r"row 0: 'x' must be BYTES, got \{\}"),
        ("BYTES", (-1,), ["\ud800"], "half of a character"),
        ("NEW", (-1,), [1], "which this client cannot send"),
    ],
)
def test_values_that_do_not_fit_are_refused(datatype, shape, values, says):
    with pytest.raises(RequestError, match=says):
        tensors_of(ClientInput("x", datatype, shape), values)


@pytest.mark.parametrize("values", [[7, (1 << 64) - 5], np.array([7, (1 << 64) - 5], np.uint64)])
def test_unsigned_ids_keep_their_bits(values):
    (made,) = tensors_of(ClientInput("x", "INT64", (-1,)), values)
    assert made.plain() == [7, -5]


def test_bfloat16_is_rounded_to_the_nearest_value():
    values = [1.0, -2.5, 1.00390625, 1.01171875, 3.4e38, float("inf"), float("nan"), 0.0]
    (made,) = tensors_of(ClientInput("x", "BF16", (-1,)), values)
    read = _unpacked("BF16", [8], made.raw())
    want = torch.tensor(values).to(torch.bfloat16).float().numpy()
    assert np.array_equal(read, want, equal_nan=True)
    assert np.array_equal(listed_tensor("x", "BF16", [8], values).values, want, equal_nan=True)


def test_values_of_numpy_and_bytes_are_taken():
    (numbers,) = tensors_of(ClientInput("x", "INT64", (-1,)), [np.int32(3), 4])
    assert numbers.plain() == [3, 4]
    (texts,) = tensors_of(ClientInput("x", "BYTES", (-1,)), [b"a", 5, "\u00e9"])
    assert texts.raw() == b"\1\0\0\0a\1\0\0\0005\2\0\0\0\xc3\xa9"
    (lists,) = tensors_of(ClientInput("x", "INT64", (-1, -1)), np.array([3, 4]))
    assert lists.shape == (2, 1)


# The command


def test_the_command_prints_a_table_or_json(place, server, capsys, tmp_path):
    url = place(server)
    assert main(["query", url, "--row", json.dumps(ROWS[0]), json.dumps(ROWS[1])]) == 0
    said = capsys.readouterr()
    assert "30.5" in said.out
    assert "f version 1, step 100" in said.out
    assert "does not take label" in said.err
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    for name in ("rows.json", "rows.jsonl"):
        assert main(["query", url, "--file", str(tmp_path / name), "--json"]) == 0
        said = capsys.readouterr()
        assert "does not take label" in said.err
        assert "HTTP Request" not in said.err
        answer = json.loads(said.out)
        assert answer["outputs"]["score"] == [30.5, 11]
        assert answer["version"] == "1"


def test_the_command_names_the_input_that_a_column_may_mean(server, capsys):
    assert main(["query", server.http_url, "--row", '{"user": "ann", "prices": 2.5}']) == 0
    said = capsys.readouterr().err
    assert "the model does not take prices, which was ignored; it takes user" in said
    assert "Did you mean price?" in said


def test_the_command_wants_to_know_which_of_several_models(capsys):
    catalog = LinearCatalog({"a": {"1": LinearModel}, "b": {"1": LinearModel}})
    with serving(catalog) as server:
        assert main(["query", server.http_url, "--row", '{"user": "ann"}']) == 2
    assert "a, b; say which with --model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "give rows"),
        (["--row", "{"], "is no JSON"),
        (["--row", "[1]"], "must be a JSON object"),
        (["--file", "nowhere.json"], "cannot read"),
        (["--row", '{"user": {}}'], "must be BYTES"),
    ],
)
def test_the_command_says_what_is_wrong_with_rows(server, capsys, words, says):
    assert main(["query", server.http_url, *words]) == 2
    assert says in capsys.readouterr().err
