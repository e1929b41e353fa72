"""Requests packed by the core, and requests read as columns, asked at the same time."""

from __future__ import annotations

import http.client
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from serve.server.serving import PATIENCE, GrpcClient, ask_http

from monolith import native
from monolith.serve import Predictor
from monolith.serve.server import InferenceServer, ServeConfig, ServedFolder
from monolith.serve.server.catalog import ServableCatalog
from monolith.wire.open_inference import message_types
from monolith_bench.options import BenchServeOptions
from monolith_bench.serve import columns_of, grpc_request, http_request
from monolith_bench.served_deepfm import write_deepfm

OPTIONS = BenchServeOptions(rows=300, features=3, dim=4, hidden=(8,))
Columns = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("servables") / "deepfm"
    write_deepfm(root, OPTIONS)
    return root


@pytest.fixture(scope="module")
def server(root):
    config = ServeConfig(http_port=0, grpc_port=0, threads=16)
    folders = [ServedFolder(folder=str(root), name="deepfm")]
    with closing(InferenceServer(config, folders, ServableCatalog())) as server:
        yield server


def by_grpc(server: InferenceServer, columns: Columns, *, typed: bool = False, dtype: str = "INT64") -> Any:
    message = message_types().ModelInferRequest(model_name="deepfm")
    for name, values in columns.items():
        one = message.inputs.add(name=name, datatype=dtype, shape=[len(values)])
        if typed:
            one.contents.int64_contents.extend(values.tolist())
        else:
            message.raw_input_contents.append(values.astype(dtype.lower()).tobytes())
    with GrpcClient(server.grpc_address) as client:
        return np.frombuffer(client.ModelInfer(message).raw_output_contents[0], np.float32)


def by_http(server: InferenceServer, columns: Columns) -> Any:
    head, _, body = http_request(columns, binary=True).partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")[1:]
    headers = dict(line.split(": ", 1) for line in lines)
    port = int(server.http_url.rpartition(":")[2])
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
        connection.request("POST", "/v2/models/deepfm/infer", body, headers)
        answer = connection.getresponse()
        data = answer.read()
        assert answer.status == 200, data
        return np.frombuffer(data[int(answer.headers["inference-header-content-length"]) :], np.float32)


def by_json(server: InferenceServer, columns: Columns) -> Any:
    port = int(server.http_url.rpartition(":")[2])
    inputs = [
        {"name": name, "datatype": "INT64", "shape": [len(values)], "data": values.tolist()}
        for name, values in columns.items()
    ]
    status, answer, _ = ask_http(port, "POST", "/v2/models/deepfm/infer", {"inputs": inputs})
    assert status == 200, answer
    return np.array(answer["outputs"][0]["data"], np.float32)


WAYS = {
    "gRPC raw": by_grpc,
    "gRPC typed": lambda server, columns: by_grpc(server, columns, typed=True),
    "gRPC, not packed": lambda server, columns: by_grpc(server, columns, dtype="INT32"),
    "HTTP binary": by_http,
    "HTTP JSON": by_json,
}


def ranking(rows: int, seed: int) -> tuple[Columns, Columns]:
    """Return a request with one row of two features, and the same in full rows."""
    short = columns_of(OPTIONS, rows, seed + 1)[seed]
    first, _, last = short
    short |= {first: short[first][:1], last: short[last][:1]}
    return short, {name: np.repeat(one, rows) if len(one) == 1 else one for name, one in short.items()}


@pytest.mark.parametrize("way", WAYS)
def test_a_ranking_request_is_answered_as_full_rows_are(root, server, way):
    short, full = ranking(7, 0)
    with Predictor(str(root), show=False) as predictor:
        request = native.read_grpc_request(grpc_request(short))
        assert request is not None
        assert isinstance(predictor.pack(request), native.PackedRanking)
        wanted = predictor.predict(full).outputs["click"]
    assert len(set(wanted.tolist())) > 1
    found = WAYS[way](server, short)
    assert torch.allclose(torch.from_numpy(found.copy()), wanted, rtol=0, atol=1e-6)


def test_concurrent_requests_of_all_ways_are_answered_as_predict_does(root, server):
    draw = random.Random(1)
    asked = [
        (draw.choice(sorted(WAYS)), ranking(draw.randint(1, 9), number)[number % 2]) for number in range(80)
    ]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda one: WAYS[one[0]](server, one[1]), asked))
    with Predictor(str(root), show=False) as predictor:
        for (way, columns), answer in zip(asked, found, strict=True):
            wanted = predictor.predict(columns).outputs["click"]
            assert torch.allclose(torch.from_numpy(answer.copy()), wanted, rtol=0, atol=1e-6), way


def test_usual_requests_are_packed_by_the_core(root):
    columns = columns_of(OPTIONS, 4, 1)[0]
    body = http_request(columns).partition(b"\r\n\r\n")[2]
    with Predictor(str(root), show=False) as predictor:
        for read in (
            native.read_grpc_request(grpc_request(columns)),
            native.read_http_request(body, len(body)),
        ):
            assert read is not None
            packed = predictor.pack(read)
            assert packed is not None
            assert torch.equal(
                predictor.predict(packed).outputs["click"], predictor.predict(columns).outputs["click"]
            )
