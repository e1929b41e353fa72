"""KServe's own Python client works as it is, over HTTP and gRPC.

It is tested where the package `kserve` is installed, and skipped elsewhere: kserve 0.21 with what it imports
takes some 150 MB (kubernetes above all), and it demands protobuf below 7 and pandas below 3; the pins of
this project are newer. `pip install --no-deps kserve`, and the packages that its import names, will do.

Client suites in packages: the wheels of kserve and tritonclient have no tests, and the newest releases of
tritonclient are wheels only. The source distribution of kserve has test/test_inference_client.py. It asks
KServe's own server in its process (`httpx.ASGITransport`) for a model that echoes whatever it gets, with
parameters such as `test-param`, which this server refuses as it would ignore them: it cannot run against
another server as it is. What it asks over version 2 is asked here.
"""

import asyncio

import numpy as np
import pytest
from serve.server.linear import LinearModel, one_model
from serve.server.serving import serving

kserve = pytest.importorskip("kserve")
infer_type = pytest.importorskip("kserve.protocol.infer_type")


def inputs(*, binary):
    user = kserve.InferInput("user", [2], "BYTES")
    user.set_data_from_numpy(np.array([b"a", b"bb"], dtype=object), binary_data=binary)
    item = kserve.InferInput("item", [2], "INT64")
    item.set_data_from_numpy(np.array([10, 20], np.int64), binary_data=binary)
    return [user, item]


def asked(*, binary, outputs=None, model="f"):
    return kserve.InferRequest(
        model_name=model,
        request_id="q-1",
        infer_inputs=inputs(binary=binary),
        request_outputs=outputs,
        parameters={"binary_data_output": True} if binary and outputs is None else None,
    )


@pytest.fixture(scope="module")
def server():
    with serving(one_model(LinearModel())) as running:
        yield running


def over_http(server, ask):
    """Ask with a client over HTTP, in a loop of its own."""

    async def run():
        config = kserve.RESTConfig(protocol="v2", retries=0)
        async with kserve.InferenceRESTClient(config) as client:
            return await ask(client, server.http_url)

    return asyncio.run(run())


def over_grpc(server, ask):
    async def run():
        async with kserve.InferenceGRPCClient(server.grpc_address) as client:
            return await ask(client)

    return asyncio.run(run())


def test_it_asks_whether_server_and_model_are_ready(server):
    async def ask(client, url):
        return [
            await client.is_server_live(url),
            await client.is_server_ready(url),
            await client.is_model_ready(url, "f"),
        ]

    async def ask_grpc(client):
        return [
            await client.is_server_live(),
            await client.is_server_ready(),
            await client.is_model_ready("f"),
            await client.is_model_ready("nobody"),
        ]

    assert over_http(server, ask) == [True, True, True]
    assert over_grpc(server, ask_grpc) == [True, True, True, False]


@pytest.mark.parametrize("binary", [False, True])
def test_it_is_answered_over_http(server, binary):
    answer = over_http(server, lambda client, url: client.infer(url, asked(binary=binary), model_name="f"))
    assert {one.name: one.as_numpy().tolist() for one in answer.outputs} == {
        "score": [11, 22],
        "double": [22, 44],
    }
    assert (answer.id, answer.model_name) == ("q-1", "f")


def test_it_chooses_an_output_over_http(server):
    wanted = [infer_type.RequestedOutput("double", parameters={"binary_data": True})]
    question = asked(binary=True, outputs=wanted)
    answer = over_http(server, lambda client, url: client.infer(url, question, model_name="f"))
    assert {one.name: one.as_numpy().tolist() for one in answer.outputs} == {"double": [22, 44]}


@pytest.mark.parametrize("binary", [False, True])
def test_it_is_answered_over_grpc(server, binary):
    answer = over_grpc(server, lambda client: client.infer(asked(binary=binary, outputs=[])))
    assert {one.name: one.as_numpy().tolist() for one in answer.outputs} == {
        "score": [11, 22],
        "double": [22, 44],
    }
    assert (answer.id, answer.model_name) == ("q-1", "f")


def test_it_is_told_what_is_wrong(server):
    import grpc
    import httpx

    question = asked(binary=False, model="nobody")
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        over_http(server, lambda client, url: client.infer(url, question, model_name="nobody"))
    with pytest.raises(grpc.RpcError, match="no model 'nobody'"):
        over_grpc(server, lambda client: client.infer(question))
