"""Clients that others wrote work as they are."""

import contextlib

import numpy as np
import pytest
from hypothesis.errors import Unsatisfiable
from serve.server.linear import LinearModel, one_model
from serve.server.serving import ask_http, serving

from monolith.cluster.security import Guard
from monolith.config import Secret

schemathesis = pytest.importorskip("schemathesis")
triton_grpc = pytest.importorskip("tritonclient.grpc")
triton_http = pytest.importorskip("tritonclient.http")
errors = pytest.importorskip("tritonclient.utils")


@pytest.fixture(params=["http", "grpc"])
def triton(request, served):
    """tritonclient over one transport, and its module."""
    module = {"http": triton_http, "grpc": triton_grpc}[request.param]
    url = served.http_url.removeprefix("http://") if request.param == "http" else served.grpc_address
    client = module.InferenceServerClient(url)
    yield client, module
    client.close()


def inputs(module, **options):
    user = module.InferInput("user", [2], "BYTES")
    user.set_data_from_numpy(np.array([b"a", b"bb"], dtype=object), **options)
    item = module.InferInput("item", [2], "INT64")
    item.set_data_from_numpy(np.array([10, 20], np.int64), **options)
    return [user, item]


def test_tritonclient_asks_what_there_is(triton):
    client, module = triton
    assert client.is_server_live()
    assert not client.is_server_ready()
    assert client.is_model_ready("linear", "2")
    assert not client.is_model_ready("nobody")
    about = client.get_model_metadata("linear")
    names = about["inputs"] if module is triton_http else about.inputs
    assert len(names) == 4
    index = client.get_model_repository_index()
    assert len(index if module is triton_http else index.models) == 3


def test_tritonclient_is_answered(triton):
    client, module = triton
    answer = client.infer("linear", inputs(module), request_id="q", timeout=50_000_000, priority=2)
    assert answer.as_numpy("score").tolist() == [111, 122]
    assert answer.as_numpy("double").tolist() == [222, 244]
    wanted = [module.InferRequestedOutput("double")]
    answer = client.infer("linear", inputs(module), model_version="1", outputs=wanted)
    assert answer.as_numpy("double").tolist() == [22, 44]
    assert answer.as_numpy("score") is None


def test_tritonclient_sends_bfloat16(triton):
    client, module = triton
    kind = pytest.importorskip("ml_dtypes").bfloat16  # as tritonclient wants it
    price = _named(module, "price", np.array([1.5, -2.0], kind), "BF16")
    user = _named(module, "user", np.array([b"a", b"b"], dtype=object), "BYTES")
    assert client.infer("linear", [user, price]).as_numpy("score").tolist() == [102.5, 99]


def test_tritonclient_reads_statistics(triton):
    client, module = triton

    def statistics(*which):
        found = client.get_inference_statistics(
            *which, **({"as_json": True} if module is triton_grpc else {})
        )
        return {(one["name"], one["version"]): one for one in found["model_stats"]}

    before = statistics("linear", "1")["linear", "1"]
    client.infer("linear", inputs(module), model_version="1")
    with pytest.raises(errors.InferenceServerException):
        client.infer("linear", [_named(module, "item", np.zeros(2, np.float32), "FP32")], model_version="1")
    after = statistics("linear", "1")["linear", "1"]

    def grown(*path):
        old, new = before, after
        for name in path:
            old, new = old.get(name, {}), new[name]
        return int(new) - int(old or 0)

    assert grown("inference_count") == 2
    assert grown("execution_count") == 1
    for name in ("success", "fail", "compute_infer"):
        assert grown("inference_stats", name, "count") == 1
        assert grown("inference_stats", name, "ns") > 0
    assert grown("last_inference") > 0
    assert statistics().keys() == statistics("linear").keys() == {("linear", "1"), ("linear", "2")}
    with pytest.raises(errors.InferenceServerException, match="no model 'nobody'"):
        statistics("nobody")


def test_tritonclient_over_http_sends_json_and_packs(served):
    client = triton_http.InferenceServerClient(served.http_url.removeprefix("http://"))
    wanted = [triton_http.InferRequestedOutput("score", binary_data=False)]
    answer = client.infer("linear", inputs(triton_http, binary_data=False), outputs=wanted)
    assert answer.as_numpy("score").tolist() == [111, 122]
    for encoding in ("gzip", "deflate"):
        rows = np.arange(1000)
        many = [
            _named(triton_http, "user", np.array([b"a"] * 1000, dtype=object), "BYTES"),
            _named(triton_http, "item", rows, "INT64"),
        ]
        answer = client.infer(
            "linear", many, request_compression_algorithm=encoding, response_compression_algorithm=encoding
        )
        assert answer.as_numpy("score").tolist() == (101 + rows).tolist()
    client.close()


def test_tritonclient_is_told_what_is_wrong(triton):
    client, module = triton
    with pytest.raises(errors.InferenceServerException, match="no model 'nobody'"):
        client.infer("nobody", inputs(module))
    with pytest.raises(errors.InferenceServerException, match="must be INT64"):
        client.infer("linear", [_named(module, "item", np.zeros(2, np.float32), "FP32")])


def _named(module, name, values, datatype):
    made = module.InferInput(name, list(values.shape), datatype)
    made.set_data_from_numpy(values)
    return made


def test_tritonclient_loads_and_unloads():
    guard = Guard(token=Secret("s3cret"))
    headers = {"authorization": "Bearer s3cret"}
    with serving(one_model(LinearModel()), allow_control=True, server={"guard": guard}) as server:
        server.catalog.folders["f"]["1"] = LinearModel
        client = triton_grpc.InferenceServerClient(server.grpc_address)
        client.unload_model("f", headers=headers)
        assert not client.is_model_ready("f", headers=headers)
        client.load_model("f", headers=headers)
        assert client.is_model_ready("f", headers=headers)
        with pytest.raises(errors.InferenceServerException, match="does not support the parameter 'config'"):
            client.load_model("f", headers=headers, config="{}")
        client.close()
        over_http = triton_http.InferenceServerClient(server.http_url.removeprefix("http://"))
        over_http.unload_model("f", headers=headers)
        with pytest.raises(errors.InferenceServerException, match="does not support the parameter 'config'"):
            over_http.load_model("f", headers=headers, config="{}")
        over_http.load_model("f", headers=headers)
        assert over_http.is_model_ready("f", headers=headers)
        over_http.close()


def _check_contract(served, examples, modes):
    """Send what the document allows, and what it does not, to every path; judge each answer by it."""
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    document = ask_http(served.http_port, "GET", "/openapi.json")[1]
    for path in document["paths"].values():
        for one in path.get("parameters", ()):  # names that are served, so that more is asked of them
            one["schema"]["enum"] = {"name": ["linear", "x"], "version": ["1", "9"]}[one["name"]]
    # A model takes less than a document can say, and 503 is an answer.
    excluded = [not_a_server_error, checks.positive_data_acceptance, checks.negative_data_rejection]
    checked = set()
    for result in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = result.ok()
        for mode in modes:

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(
                max_examples=examples,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            def check(case):
                answer = case.call(base_url=served.http_url)
                assert answer.status_code != 500, answer.text
                case.validate_response(answer, excluded_checks=excluded)

            with contextlib.suppress(Unsatisfiable):  # nothing to be wrong about
                check()
        checked.add((operation.method, operation.path))
    return checked


def test_every_path_answers_as_the_document_says(served):
    assert len(_check_contract(served, 1, [schemathesis.GenerationMode.POSITIVE])) == 26


@pytest.mark.soak
def test_whatever_is_sent_to_any_path_is_answered_as_the_document_says(served):
    assert len(_check_contract(served, 200, list(schemathesis.GenerationMode))) == 26
