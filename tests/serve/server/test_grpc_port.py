"""The protocol over gRPC: every method, every error, messages of all kinds."""

import threading
import time
from datetime import timedelta

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve.server.linear import LinearCatalog, LinearModel, one_model
from serve.server.serving import PATIENCE, GrpcClient, refusal, rows_message, serving

from monolith import __version__
from monolith.cluster.security import Guard
from monolith.config import Secret
from monolith.serve.server import ServeLimits
from monolith.serve.server.tensors import DATATYPES
from monolith.wire.open_inference import SERVICE, message_types

Code = grpc.StatusCode


@pytest.fixture(scope="module")
def client(served):
    with GrpcClient(served.grpc_address) as made:
        yield made


def scores(answer, output=0):
    return np.frombuffer(answer.raw_output_contents[output], np.float32).tolist()


def test_the_server_reports_its_name_and_its_state(client):
    assert client.ServerLive().live
    assert not client.ServerReady().ready  # a model cannot be loaded
    about = client.ServerMetadata()
    assert (about.name, about.version) == ("monolith", __version__)
    assert "model_repository" in about.extensions


def test_a_model_says_what_it_takes_and_gives(client):
    types = message_types()
    about = client.ModelMetadata(types.ModelMetadataRequest(name="linear"))
    assert about.versions == ["1", "2"]
    assert [(one.name, one.datatype, list(one.shape)) for one in about.inputs][:2] == [
        ("user", "BYTES", [-1]),
        ("item", "INT64", [-1]),
    ]
    assert [one.name for one in about.outputs] == ["score", "double"]
    assert client.ModelReady(types.ModelReadyRequest(name="linear", version="1")).ready
    assert not client.ModelReady(types.ModelReadyRequest(name="linear", version="7")).ready
    assert not client.ModelReady(types.ModelReadyRequest(name="broken")).ready
    assert not client.ModelReady(types.ModelReadyRequest(name="x")).ready
    assert refusal(client.ModelMetadata, types.ModelMetadataRequest(name="x"))[0] is Code.NOT_FOUND


def test_the_newest_version_answers_and_says_which_it_is(client):
    answer = client.ModelInfer(rows_message("a", "bb", id="q7"))
    assert scores(answer) == [101, 102]
    assert scores(answer, 1) == [202, 204]
    assert (answer.model_name, answer.model_version, answer.id) == ("linear", "2", "q7")
    assert [(one.name, one.datatype, list(one.shape)) for one in answer.outputs] == [
        ("score", "FP32", [2]),
        ("double", "FP32", [2]),
    ]
    assert answer.parameters["step"].int64_param == 200
    assert answer.parameters["watermark"].double_param == 1.5e9
    assert answer.parameters["staleness"].double_param == 0.5
    assert "missing_shards" not in answer.parameters


def test_a_version_and_an_output_can_be_asked_for(client):
    message = rows_message("a", model_version="1")
    message.outputs.add(name="double")
    answer = client.ModelInfer(message)
    assert answer.model_version == "1"
    assert [one.name for one in answer.outputs] == ["double"]
    assert scores(answer) == [2]


def test_raw_contents_and_typed_ones_are_the_same(client):
    types = message_types()
    raw = types.ModelInferRequest(model_name="linear", model_version="1")
    typed = types.ModelInferRequest(model_name="linear", model_version="1")
    for message in (raw, typed):
        message.inputs.add(name="user", datatype="BYTES", shape=[2])
        message.inputs.add(name="item", datatype="INT64", shape=[2])
        message.inputs.add(name="price", datatype="FP32", shape=[2])
    typed.inputs[0].contents.bytes_contents.extend([b"a", b"bb"])
    typed.inputs[1].contents.int64_contents.extend([10, -20])
    typed.inputs[2].contents.fp32_contents.extend([0.5, 0.25])
    raw.raw_input_contents.extend(
        [
            b"\1\0\0\0a\2\0\0\0bb",
            np.array([10, -20], np.int64).tobytes(),
            np.array([0.5, 0.25], np.float32).tobytes(),
        ]
    )
    assert scores(client.ModelInfer(raw)) == scores(client.ModelInfer(typed)) == [11.5, -17.75]


def test_usual_and_unusual_requests_are_read_alike(client):
    types = message_types()

    def ask(users, items, datatype="INT64", model_version="1"):
        message = types.ModelInferRequest(model_name="linear", model_version=model_version)
        message.inputs.add(name="user", datatype="BYTES", shape=[len(users)])
        message.inputs.add(name="item", datatype=datatype, shape=[len(items)])
        message.raw_input_contents.append(b"".join(len(u).to_bytes(4, "little") + u for u in users))
        message.raw_input_contents.append(np.array(items, datatype.lower()).tobytes())
        return client.ModelInfer(message)

    for turn in range(3):
        assert scores(ask([b"a", b"bb"], [10 * turn, 7])) == [1 + 10 * turn, 9]
        assert scores(ask([b"a"], [turn])) == [1 + turn]
        assert scores(ask([b"a"], [turn], "INT32")) == [1 + turn]  # is converted, and so not read by the core
        assert scores(ask([b"a"], [turn], model_version="2")) == [101 + turn]
    torn = types.ModelInferRequest(model_name="linear", raw_input_contents=[b"\1\0\0\0a", b"\0" * 7])
    torn.inputs.add(name="user", datatype="BYTES", shape=[1])
    torn.inputs.add(name="item", datatype="INT64", shape=[1])
    code, text = refusal(client.ModelInfer, torn)
    assert (code, "takes 8 bytes, got 7" in text) == (Code.INVALID_ARGUMENT, True)


def infer(*inputs, raw=(), **fields):
    """A request with inputs (name, datatype, shape, field, values)."""
    message = message_types().ModelInferRequest(model_name="linear", raw_input_contents=raw, **fields)
    for name, datatype, shape, field, values in inputs:
        one = message.inputs.add(name=name, datatype=datatype, shape=shape)
        if field:
            getattr(one.contents, field).extend(values)
    return message


@pytest.mark.parametrize(
    ("message", "code", "says"),
    [
        (rows_message("a", model="nobody"), Code.NOT_FOUND, "no model 'nobody'"),
        (rows_message("a", model_version="9"), Code.NOT_FOUND, "no version '9'"),
        (rows_message("a", model="broken"), Code.UNAVAILABLE, "cannot answer"),
        (rows_message("x", "bad"), Code.INVALID_ARGUMENT, "row 1"),
        (infer(), Code.INVALID_ARGUMENT, "no inputs"),
        (infer(("usr", "BYTES", [0], "", ())), Code.INVALID_ARGUMENT, "no input 'usr'"),
        (infer(("user", "BYTES", [2], "bytes_contents", [b"a"])), Code.INVALID_ARGUMENT, "2 values, got 1"),
        (infer(("user", "BYTES", [1], "fp32_contents", [1])), Code.INVALID_ARGUMENT, "bytes_contents"),
        (infer(("item", "INT8", [1], "int_contents", [300])), Code.INVALID_ARGUMENT, "too large for INT8"),
        (infer(("item", "FP16", [1], "", [])), Code.INVALID_ARGUMENT, "raw"),
        (infer(("item", "INT", [1], "", [])), Code.INVALID_ARGUMENT, "no datatype"),
        (infer(("item", "INT64", [-1], "", [])), Code.INVALID_ARGUMENT, "negative"),
        (infer(("item", "INT64", [1], "", []), raw=[b"", b""]), Code.INVALID_ARGUMENT, "one for each"),
        (b"\xff\xff", Code.INVALID_ARGUMENT, "no inference.ModelInferRequest"),
        (rows_message("a", "bug"), Code.INTERNAL, "its log says why"),
    ],
)
def test_what_is_wrong_is_said_with_the_right_code(client, message, code, says):
    found, text = refusal(client.ModelInfer, message)
    assert (found, says in text) == (code, True), text


def with_parameter(of, name, **value):
    """A request with a parameter of itself, its first input or its first output."""
    message = rows_message("a")
    message.outputs.add(name="score")
    owner = {"request": message, "input": message.inputs[0], "output": message.outputs[0]}[of]
    for field, content in value.items():
        setattr(owner.parameters[name], field, content)
    return message


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(
    ("message", "says"),
    [
        (with_parameter("request", "sequence_id", int64_param=7), "'sequence_id' of a request"),
        (with_parameter("request", "timeout", string_param="soon"), "microseconds"),
        (with_parameter("request", "timeout", int64_param=-5), "microseconds"),
        (with_parameter("request", "priority", int64_param=10), "from 1, answered first, to 9"),
        (
            with_parameter("input", "content_type", string_param="r"),
            "'content_type' of the",
        ),
        (with_parameter("output", "classification", int64_param=3), "'classification' of the output 'score'"),
    ],
)
def test_a_parameter_that_would_be_ignored_is_refused(client, message, says, raw):
    if raw:
        sent = type(message).FromString(message.SerializeToString())
        sent.inputs[0].ClearField("contents")
        sent.raw_input_contents.append(b"\x01\x00\x00\x00a")
        message = sent
    found, text = refusal(client.ModelInfer, message)
    assert (found, says in text) == (Code.INVALID_ARGUMENT, True), text


def test_the_size_of_raw_contents_may_be_said_as_kserves_client_does(client):
    message = infer(("user", "BYTES", [1], "", []), raw=[b"\x01\x00\x00\x00a"])
    size = message.inputs[0].parameters["binary_data_size"]
    size.int64_param = 5
    assert scores(client.ModelInfer(message)) == [101]
    size.int64_param = 6
    assert refusal(client.ModelInfer, message) == (
        Code.INVALID_ARGUMENT,
        "the input 'user': binary_data_size is 6, and it has 5 bytes",
    )


def test_a_priority_is_accepted(client):
    assert scores(client.ModelInfer(with_parameter("request", "priority", uint64_param=1))) == [101]


def test_the_repository_lists_loads_and_unloads():
    types = message_types()
    controlled = {"allow_control": True, "server": {"guard": Guard(token=Secret("s3cret"))}}
    control = (("authorization", "Bearer s3cret"),)
    with (
        serving(one_model(), **controlled) as server,
        GrpcClient(server.grpc_address, control) as client,
    ):

        def index(ready=False):
            found = client.RepositoryIndex(types.RepositoryIndexRequest(ready=ready)).models
            return [(one.name, one.version, one.state) for one in found]

        assert index() == [("f", "1", "READY")]
        client.RepositoryModelUnload(types.RepositoryModelUnloadRequest(model_name="f"))
        assert index() == [("f", "", "UNAVAILABLE")]
        assert index(ready=True) == []
        assert refusal(client.ModelInfer, rows_message("a", model="f"))[0] is Code.UNAVAILABLE
        server.catalog.folders["f"]["1"] = LinearModel
        client.RepositoryModelLoad(types.RepositoryModelLoadRequest(model_name="f"))
        assert scores(client.ModelInfer(rows_message("a", model="f"))) == [1]
        assert (
            refusal(client.RepositoryModelLoad, types.RepositoryModelLoadRequest(model_name="x"))[0]
            is Code.NOT_FOUND
        )
        configured = types.RepositoryModelLoadRequest(model_name="f")
        configured.parameters["config"].string_param = "{}"
        found, text = refusal(client.RepositoryModelLoad, configured)
        assert (found, "'config' of a load" in text) == (Code.INVALID_ARGUMENT, True)


def test_missing_shards_are_said_with_the_answer():
    with (
        serving(one_model(LinearModel(missing=("ps_1", "ps_3")))) as server,
        GrpcClient(server.grpc_address) as client,
    ):
        answer = client.ModelInfer(rows_message("a", model="f"))
        assert answer.parameters["missing_shards"].string_param == "ps_1,ps_3"
        assert b'serve_missing_shards_total{shard="ps_3"} 1.0' in server.inference.render_metrics()


def test_the_callers_deadline_is_obeyed():
    model = LinearModel()
    with serving(one_model(model)) as server, GrpcClient(server.grpc_address) as client:
        slow = client.ModelInfer
        threading.Thread(target=lambda: slow(rows_message("slow", model="f")), daemon=True).start()
        end = time.monotonic() + PATIENCE
        while not model.busy:
            assert time.monotonic() < end
            time.sleep(0.001)
        assert (
            refusal(client.ModelInfer, rows_message("a", model="f"), timeout=0.05)[0]
            is Code.DEADLINE_EXCEEDED
        )
        by_parameter = rows_message("a", model="f")
        by_parameter.parameters["timeout"].int64_param = 1000
        code, text = refusal(client.ModelInfer, by_parameter)
        assert code is Code.DEADLINE_EXCEEDED
        assert "deadline of the request passed" in text
        model.gate.set()
        assert scores(client.ModelInfer(rows_message("a", model="f"))) == [1]


def test_more_than_the_limits_allow_is_refused():
    model = LinearModel()
    limits = ServeLimits(
        request_bytes=2000, rows=3, concurrency=2, queue=1, timeout=timedelta(seconds=PATIENCE)
    )
    with serving(one_model(model), limits=limits) as server, GrpcClient(server.grpc_address) as client:
        code, text = refusal(client.ModelInfer, rows_message(*"abcd", model="f"))
        assert (code, "4 rows; the limit is 3" in text) == (Code.RESOURCE_EXHAUSTED, True)
        code, text = refusal(client.ModelInfer, rows_message("a" * 3000, model="f"))
        assert (code, "larger than max" in text) == (Code.RESOURCE_EXHAUSTED, True)
        waiting = [
            threading.Thread(target=lambda: client.ModelInfer(rows_message("slow", model="f")), daemon=True)
            for _ in range(2)
        ]
        for thread in waiting:
            thread.start()
        end = time.monotonic() + PATIENCE
        while server.inference._in_flight < 2:
            assert time.monotonic() < end
            time.sleep(0.001)
        assert refusal(client.ModelInfer, rows_message("a", model="f"))[0] is Code.RESOURCE_EXHAUSTED
        model.gate.set()
        for thread in waiting:
            thread.join(PATIENCE)
        # gRPC frees the place of a call a moment after its client has the answer.
        while (found := outcome(client.ModelInfer, rows_message("a", model="f"))) is Code.RESOURCE_EXHAUSTED:
            assert time.monotonic() < end
        assert scores(found) == [1]


def test_a_caller_without_the_token_is_refused_before_its_message_is_read():
    guard = Guard(token=Secret("s3cret"))
    with serving(one_model(), server={"guard": guard}) as server:
        with GrpcClient(server.grpc_address) as client:
            assert refusal(client.ServerLive)[0] is Code.UNAUTHENTICATED
            assert refusal(client.ModelInfer, b"\xff")[0] is Code.UNAUTHENTICATED
        with GrpcClient(server.grpc_address, (("authorization", "Bearer s3cret"),)) as client:
            assert client.ServerLive().live


def test_splits_send_each_version_its_share_and_shadow_answers_are_compared_and_discarded():
    catalog = LinearCatalog(
        {"f": {v: lambda v=v: LinearModel(version=v, bias=int(v)) for v in ("1", "2", "3")}}
    )
    routes = ("ab=f/1:1,f/2:1",)
    with (
        serving(catalog, splits=routes, shadows=("ab=f/3",)) as server,
        GrpcClient(server.grpc_address) as client,
    ):
        answers = [client.ModelInfer(rows_message("a", model="ab")) for _ in range(40)]
        assert {(one.model_version, *scores(one)) for one in answers} == {("1", 2.0), ("2", 3.0)}
        metric = b'serve_shadow_requests_total{name="ab",outcome="different",shadow="f/3"} 40.0'
        end = time.monotonic() + PATIENCE
        while metric not in server.inference.render_metrics():
            assert time.monotonic() < end
            time.sleep(0.01)
        about = client.ModelMetadata(message_types().ModelMetadataRequest(name="ab"))
        assert about.versions == ["1", "2", "3"]


def test_a_version_is_switched_under_load_without_a_failed_request():
    catalog = LinearCatalog({"f": {"1": lambda: LinearModel(version="1")}})
    failures, versions = [], set()
    stop = threading.Event()
    with serving(catalog) as server:

        def ask():
            with GrpcClient(server.grpc_address) as client:
                while not stop.is_set():
                    try:
                        versions.add(client.ModelInfer(rows_message("a", model="f")).model_version)
                    except grpc.RpcError as error:
                        failures.append(error)

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + PATIENCE
        for version in "1234":
            catalog.folders["f"][version] = lambda version=version: LinearModel(version=version)
            while version not in versions:
                assert time.monotonic() < end
                time.sleep(0.005)
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert not failures
    assert [model.closed for model in catalog.loaded] == [True] * 4


REFLECTIONS = ("grpc.reflection.v1", "grpc.reflection.v1alpha")


def test_tools_can_ask_which_methods_there_are(served):
    from google.protobuf.descriptor_pool import DescriptorPool
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
        ProtoReflectionDescriptorDatabase,
    )

    with grpc.insecure_channel(served.grpc_address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert SERVICE in database.get_services()
        service = DescriptorPool(database).FindServiceByName(SERVICE)
        assert "ModelInfer" in service.methods_by_name
        assert (
            service.methods_by_name["ModelInfer"].input_type.fields_by_name["raw_input_contents"].number == 7
        )


def test_tools_may_ask_by_the_first_version_of_reflection(served):
    from grpc_reflection.v1alpha import reflection_pb2

    pytest.importorskip("grpc_health")
    with grpc.insecure_channel(served.grpc_address) as channel:
        ask = channel.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            reflection_pb2.ServerReflectionRequest.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )
        (listed,) = ask(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=PATIENCE)
        names = {one.name for one in listed.list_services_response.service}
        assert names == {
            SERVICE,
            "grpc.health.v1.Health",
            *(f"{one}.ServerReflection" for one in REFLECTIONS),
        }
        for name in names:
            request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=name)
            (found,) = ask(iter([request]), timeout=PATIENCE)
            assert found.file_descriptor_response.file_descriptor_proto


def test_health_is_told_without_a_token():
    health_pb2 = pytest.importorskip("grpc_health.v1.health_pb2")
    health_pb2_grpc = pytest.importorskip("grpc_health.v1.health_pb2_grpc")

    guard = Guard(token=Secret("s3cret"))
    with serving(one_model(), server={"guard": guard}) as server:
        with grpc.insecure_channel(server.grpc_address) as channel:
            asked = health_pb2_grpc.HealthStub(channel)

            def status(service=""):
                return asked.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE).status

            assert status() == status(SERVICE) == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.RpcError) as unknown:
                status("x")
            assert unknown.value.code() is Code.NOT_FOUND
            with pytest.raises(grpc.RpcError) as unsupported:
                next(iter(asked.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE)))
            assert unsupported.value.code() is Code.UNIMPLEMENTED
            server.inference.stop_being_ready()
            assert status() == health_pb2.HealthCheckResponse.NOT_SERVING
        with GrpcClient(server.grpc_address) as client:
            assert refusal(client.ModelInfer, rows_message("a", model="f"))[0] is Code.UNAUTHENTICATED


def contents():
    return st.fixed_dictionaries(
        {},
        optional={
            "bytes_contents": st.lists(st.binary(max_size=4), max_size=4),
            "int64_contents": st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=4),
            "int_contents": st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=4),
            "uint64_contents": st.lists(st.integers(0, (1 << 64) - 1), max_size=4),
            "fp32_contents": st.lists(st.floats(width=32), max_size=4),
            "bool_contents": st.lists(st.booleans(), max_size=4),
        },
    )


names = st.sampled_from(["user", "item", "price", "tags", "tags.row_splits", "score", "", "\u00e9"])
shapes = st.lists(st.sampled_from([0, 1, 1, 2, 2, 3, 4, -1, 1 << 62]), max_size=3)
inputs = st.builds(
    dict,
    name=names,
    datatype=st.sampled_from([*DATATYPES, "INT64", "BYTES", "FP32", "", "FP8"]),
    shape=shapes,
    contents=contents(),
)


def outcome(call, message):
    """Return the answer, or the code with which the message was refused, which has a reason."""
    try:
        return call(message)
    except grpc.RpcError as error:
        return error.code() if error.details() else None


REFUSALS = (Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.RESOURCE_EXHAUSTED)

messages = st.builds(
    lambda **fields: message_types().ModelInferRequest(**fields),
    model_name=st.sampled_from(["linear", "linear", "linear", "x", ""]),
    model_version=st.sampled_from(["", "", "1", "3"]),
    inputs=st.lists(inputs, max_size=4),
    outputs=st.lists(st.builds(dict, name=names), max_size=2),
    raw_input_contents=st.lists(st.binary(max_size=24), max_size=4),
    parameters=st.dictionaries(
        st.sampled_from(["timeout", "x"]), st.sampled_from([{"int64_param": -5}, {"string_param": "a"}, {}])
    ),
)


@given(messages)
def test_any_message_is_answered_or_refused_with_a_reason(client, message):
    found = outcome(client.ModelInfer, message)
    assert found in REFUSALS or len(found.outputs) == len(found.raw_output_contents) >= 1


@given(st.binary(max_size=60))
def test_any_bytes_are_refused_with_a_reason(client, data):
    assert outcome(client.ModelInfer, data) in REFUSALS
