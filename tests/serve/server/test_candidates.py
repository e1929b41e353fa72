"""Ranking requests, one row of the user and many of items, over each transport and in batches."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from serve.served_tasks import columns, exported, trained
from serve.server.serving import PATIENCE, GrpcClient, Served, ask_http

from monolith.serve import Predictor
from monolith.serve.server import InferenceServer, ServeConfig, ServedFolder
from monolith.serve.server.catalog import ServableCatalog
from monolith.serve.server.tensors import raw_bytes
from monolith.wire.open_inference import SPLITS, message_types

USER = ("user_id", "history", "where")
"""Columns of which a request has one row."""
DTYPES = {"BYTES": None, "INT64": np.int64, "FP32": np.float32}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("servables")
    exported(trained(tmp_path_factory.mktemp("run")), root)
    return root


@pytest.fixture(scope="module")
def clicks(root):
    config = ServeConfig(http_port=0, grpc_port=0, threads=16)
    folders = [ServedFolder(folder=str(root), name="clicks")]
    with closing(InferenceServer(config, folders, ServableCatalog())) as server:
        yield server


def tensors(rows: int, *, full: bool) -> list[dict[str, Any]]:
    """Return the inputs of a request about items `rows`, with one row of the user or with full ones."""
    given = columns(rows, seed=rows)
    many = rows if full else 1
    found = []
    for name, datatype in (("user_id", "BYTES"), ("item", "INT64"), ("price", "FP32"), ("tags", "BYTES")):
        values = given[name][:1] * many if name in USER else given[name]
        found.append({"name": name, "datatype": datatype, "shape": [len(values)], "data": values})
    where, history = given["where"][0] * many, given["history"][0] * many
    splits = np.cumsum([0, *[len(given["history"][0])] * many]).tolist()
    found.append({"name": "where", "datatype": "FP32", "shape": [many, 2], "data": where})
    found.append({"name": "history", "datatype": "INT64", "shape": [len(history)], "data": history})
    found.append({"name": "history" + SPLITS, "datatype": "INT64", "shape": [len(splits)], "data": splits})
    return found


def raw(one: dict[str, Any]) -> bytes:
    kind = DTYPES[one["datatype"]]
    return raw_bytes([text.encode() for text in one["data"]] if kind is None else np.array(one["data"], kind))


def as_json(server: InferenceServer, inputs: list[dict[str, Any]]) -> list[float]:
    port = int(server.http_url.rpartition(":")[2])
    status, answer, _ = ask_http(port, "POST", "/v2/models/clicks/infer", {"inputs": inputs})
    assert status == 200, answer
    return answer["outputs"][0]["data"]


def as_binary(server: InferenceServer, inputs: list[dict[str, Any]]) -> list[float]:
    raws = [raw(one) for one in inputs]
    lines = [
        {
            **{key: one[key] for key in ("name", "datatype", "shape")},
            "parameters": {"binary_data_size": len(data)},
        }
        for one, data in zip(inputs, raws, strict=True)
    ]
    head = json.dumps({"inputs": lines}).encode()
    port = int(server.http_url.rpartition(":")[2])
    length = {"Inference-Header-Content-Length": str(len(head))}
    status, answer, _ = ask_http(port, "POST", "/v2/models/clicks/infer", b"".join([head, *raws]), length)
    assert status == 200, answer
    return answer["outputs"][0]["data"]


def as_grpc(server: InferenceServer, inputs: list[dict[str, Any]]) -> list[float]:
    message = message_types().ModelInferRequest(model_name="clicks")
    for one in inputs:
        message.inputs.add(name=one["name"], datatype=one["datatype"], shape=one["shape"])
        message.raw_input_contents.append(raw(one))
    with GrpcClient(server.grpc_address) as client:
        for _ in range(2):  # the second is decoded by the plan of the first
            answer = client.ModelInfer(message)
    return np.frombuffer(answer.raw_output_contents[0], np.float32).tolist()


@pytest.mark.parametrize("ask", [as_json, as_binary, as_grpc])
def test_each_transport_answers_as_with_full_rows(clicks, root, ask):
    found = ask(clicks, tensors(9, full=False))
    with Predictor(str(root), show=False) as predictor:
        given = {name: values for name, values in columns(9, seed=9).items() if name != "click"}
        for name in USER:
            given[name] = given[name][:1] * 9
        wanted = predictor.predict(given).outputs["click"].tolist()
    assert found == pytest.approx(wanted, rel=1e-6, abs=1e-6)
    assert len(set(found)) > 1
    assert ask(clicks, tensors(9, full=True)) == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def test_concurrent_requests_with_one_row_and_with_full_rows_get_their_own_answers(clicks):
    wanted = {rows: as_json(clicks, tensors(rows, full=True)) for rows in range(1, 9)}

    def ask(number: int) -> bool:
        rows = number % 8 + 1
        way = (as_json, as_grpc)[number % 2]
        found = way(clicks, tensors(rows, full=number % 3 == 0))
        return found == pytest.approx(wanted[rows], rel=1e-5, abs=1e-6)

    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(ask, range(96), timeout=PATIENCE))


# A model that shows its batches


def ranking(user: str, *items: int) -> dict[str, Any]:
    return {
        "inputs": [
            {"name": "user", "datatype": "BYTES", "shape": [1], "data": [user]},
            {"name": "item", "datatype": "INT64", "shape": [len(items)], "data": list(items)},
        ]
    }


def scores(server: Served, body: dict[str, Any], status: int = 200) -> Any:
    found, answer, _ = ask_http(server.http_port, "POST", "/v2/models/linear/versions/1/infer", body)
    assert found == status, answer
    return answer["error"] if status != 200 else answer["outputs"][0]["data"]


def test_one_row_holds_for_all_items(served):
    assert scores(served, ranking("ann", 7, 8, 9)) == [10, 11, 12]
    assert scores(served, ranking("ann", 7)) == [10]
    assert scores(served, ranking("ann")) == []


def test_inputs_of_two_sizes_that_are_not_one_are_refused(served):
    body = ranking("ann", 7, 8, 9)
    body["inputs"].append({"name": "price", "datatype": "FP32", "shape": [2], "data": [1.0, 2.0]})
    assert scores(served, body, 400) == "input 'price' has 2 rows, those before it have 3"


def test_requests_of_different_users_are_answered_in_one_batch(served):
    model = next(one for one in served.catalog.loaded if one.version == "1")
    with ThreadPoolExecutor(8) as threads:
        slow = threads.submit(scores, served, ranking("slow", 1))
        while not model.busy:
            pass
        some = [
            threads.submit(scores, served, ranking(user, *items))
            for user, items in (("ann", (7, 8)), ("robert", (1, 2, 3)), ("bo", ()))
        ]
        refused = threads.submit(scores, served, ranking("bad", 5, 6), 400)
        model.gate.set()
        assert slow.result(PATIENCE) == [5]
        assert [one.result(PATIENCE) for one in some] == [[10, 11], [7, 8, 9], []]
        assert "bad" in refused.result(PATIENCE)
