"""Clients on the same machine leave tensors in shared memory; what they do to it harms no server."""

import os
import threading
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from serve.server.linear import LinearModel, one_model
from serve.server.serving import GrpcClient, ask_http, serving

from monolith.cluster.security import Guard, derive_token
from monolith.config import Secret
from monolith.errors import ConfigError, ForbiddenError, RequestError
from monolith.serve.config import ServeConfig, ServeLimits
from monolith.serve.server import ServerProcesses
from monolith.serve.server.shared_memory import FOLDER, MOST_REGIONS, RegionStatus, SharedMemoryRegions
from monolith.wire.open_inference import message_types
from monolith.wire.ports import bound_socket

triton_grpc = pytest.importorskip("tritonclient.grpc")
triton_http = pytest.importorskip("tritonclient.http")
triton = pytest.importorskip("tritonclient.utils")
shm = pytest.importorskip("tritonclient.utils.shared_memory")

SIZE = 4096


PREFIX = f"monolith_{uuid4().hex}_"
"""What keys begin with, of this process alone."""


@pytest.fixture
def prefix():
    """What keys of one test begin with, since objects of earlier ones stay open until they are collected."""
    yield f"{PREFIX}{uuid4().hex[:8]}_"
    for left in FOLDER.glob(f"{PREFIX}*"):
        left.unlink()


@pytest.fixture(scope="module")
def served():
    with serving(one_model(), shared_memory=PREFIX) as server:
        yield server


@pytest.fixture(params=["http", "grpc"])
def client(request, served):
    """tritonclient over one transport."""
    with _client(served, request.param) as opened:
        yield opened
        opened.unregister_system_shared_memory()


def _client(served, transport):
    if transport == "grpc":
        return triton_grpc.InferenceServerClient(served.grpc_address)
    return triton_http.InferenceServerClient(served.http_url.removeprefix("http://"))


def _module(client):
    return triton_grpc if isinstance(client, triton_grpc.InferenceServerClient) else triton_http


def _object(key, *arrays):
    """Create a shared memory object that begins with some arrays."""
    handle = shm.create_shared_memory_region("of this process", f"/{key}", SIZE)
    shm.set_shared_memory_region(handle, arrays)
    return handle


def _texts(*texts):
    return triton.serialize_byte_tensor(np.array(texts, dtype=object))


def _input(client, name, shape, datatype, size, offset=0, region="in"):
    made = _module(client).InferInput(name, shape, datatype)
    made.set_shared_memory(region, size, offset)
    return made


def _output(client, name, size, offset=0, region="out"):
    made = _module(client).InferRequestedOutput(name)
    made.set_shared_memory(region, size, offset)
    return made


def _register(client, prefix, *arrays):
    """Register two regions, `in` with users and items, and `out`; return the objects."""
    given = arrays or (_texts(b"a", b"bb"), np.array([10, 20], np.int64))
    handles = _object(f"{prefix}in", *given), _object(f"{prefix}out")
    client.register_system_shared_memory("in", f"/{prefix}in", SIZE)
    client.register_system_shared_memory("out", f"/{prefix}out", SIZE - 64, offset=64)
    return handles


def _inputs(client):
    return [_input(client, "user", [2], "BYTES", 11), _input(client, "item", [2], "INT64", 16, 11)]


def _destroy(*handles):
    for one in handles:
        shm.destroy_shared_memory_region(one)


def _open_files(prefix):
    """Return how many descriptors of this process, in which the server runs, are of objects of a test."""
    found = 0
    for one in Path("/proc/self/fd").iterdir():
        try:
            found += prefix in str(one.readlink())
        except OSError:  # closed meanwhile
            continue
    return found


def test_inputs_and_outputs_stay_in_memory(client, prefix):
    handles = _register(client, prefix)
    wanted = [_output(client, "score", 8, 16), _module(client).InferRequestedOutput("double")]
    answer = client.infer("f", _inputs(client), outputs=wanted)
    assert shm.get_contents_as_numpy(handles[1], np.float32, [2], offset=64 + 16).tolist() == [11, 22]
    assert answer.as_numpy("double").tolist() == [22, 44]
    said = answer.get_output("score")
    if _module(client) is triton_http:
        parameters = said["parameters"]
        assert "data" not in said
    else:
        parameters = {
            name: getattr(one, one.WhichOneof("parameter_choice")) for name, one in said.parameters.items()
        }
    assert parameters == {
        "shared_memory_region": "out",
        "shared_memory_offset": 16,
        "shared_memory_byte_size": 8,
    }
    _destroy(*handles)


def test_some_inputs_are_sent_and_others_stay_in_memory(client, prefix):
    handles = _register(client, prefix)
    price = _module(client).InferInput("price", [2], "FP32")
    price.set_data_from_numpy(np.array([0.5, 0.25], np.float32))
    user, item = _inputs(client)
    assert client.infer("f", [user, price, item]).as_numpy("score").tolist() == [11.5, 22.25]
    sent = _module(client).InferInput("user", [2], "BYTES")
    sent.set_data_from_numpy(np.array([b"abc", b"b"], dtype=object))
    client.infer("f", [sent, price], outputs=[_output(client, "score", 8)])
    assert shm.get_contents_as_numpy(handles[1], np.float32, [2], offset=64).tolist() == [3.5, 1.25]
    _destroy(*handles)


def test_regions_are_listed_and_unregistered(client, prefix):
    as_json = {} if _module(client) is triton_http else {"as_json": True}

    def listed(*which):
        found = client.get_system_shared_memory_status(*which, **as_json)
        rows = found if isinstance(found, list) else found.get("regions", {}).values()
        return {one["name"]: (one["key"], int(one.get("offset", 0)), int(one["byte_size"])) for one in rows}

    handles = _register(client, prefix)
    assert listed() == {"in": (f"/{prefix}in", 0, SIZE), "out": (f"/{prefix}out", 64, SIZE - 64)}
    assert listed("out").keys() == {"out"}
    with pytest.raises(triton.InferenceServerException, match="no region 'other'"):
        listed("other")
    with pytest.raises(triton.InferenceServerException, match="'in' is registered already"):
        client.register_system_shared_memory("in", f"{prefix}in", SIZE)
    client.unregister_system_shared_memory("in")
    client.unregister_system_shared_memory("in")
    assert listed().keys() == {"out"}
    client.unregister_system_shared_memory()
    assert listed() == {}
    with pytest.raises(triton.InferenceServerException, match="no region 'in'"):
        client.infer("f", _inputs(client))
    _destroy(*handles)


def test_memory_of_gpus_is_refused(client):
    client.unregister_cuda_shared_memory()  # as Triton's examples do before they begin
    assert not client.get_cuda_shared_memory_status(
        **({} if _module(client) is triton_http else {"as_json": True})
    )
    with pytest.raises(triton.InferenceServerException, match="no memory of a GPU; register system"):
        client.register_cuda_shared_memory("in", "aGFuZGxl", 0, 64)


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_a_server_uses_memory_of_clients_only_if_it_is_told_to(transport, prefix):
    for chosen in ("", prefix):
        with serving(one_model(), shared_memory=chosen) as server, _client(server, transport) as client:
            about = client.get_server_metadata()
            extensions = about["extensions"] if transport == "http" else about.extensions
            assert ("system_shared_memory" in extensions) == bool(chosen)
            if not chosen:
                for call in (
                    lambda: client.register_system_shared_memory("in", f"{prefix}in", SIZE),
                    client.unregister_system_shared_memory,
                    client.get_system_shared_memory_status,
                    lambda: client.infer("f", _inputs(client)),
                ):
                    with pytest.raises(
                        triton.InferenceServerException, match="start it with --shared-memory"
                    ):
                        call()


# What a client may register


@pytest.mark.parametrize(
    "key",
    ["other", "/other", "{0}/x", "{0}../x", "{0}x.y", "/{0}x/", "//{0}x", "{0}\0", "{0}é", "", "../{0}x"],
)
def test_only_keys_with_the_prefix_are_opened(key, prefix):
    regions = SharedMemoryRegions(f"/{prefix}", SIZE)
    (FOLDER / f"{prefix}x").write_bytes(b"0" * SIZE)
    with pytest.raises(ForbiddenError, match="its key must be"):
        regions.register(RegionStatus("in", key.format(prefix), 0, SIZE))
    regions.register(RegionStatus("in", f"{prefix}x", 0, SIZE))


def test_only_plain_objects_are_opened(prefix, tmp_path):
    (tmp_path / "secret").write_bytes(b"0" * SIZE)
    (FOLDER / f"{prefix}link").symlink_to(tmp_path / "secret")
    (FOLDER / f"{prefix}folder").mkdir()
    os.mkfifo(FOLDER / f"{prefix}pipe")
    regions = SharedMemoryRegions(prefix, SIZE)
    for name, why in {
        "link": "it is a symbolic link",
        "folder": "Is a directory",
        "pipe": "no ordinary file",
        "missing": "No such file",
    }.items():
        with pytest.raises(RequestError, match=why):
            regions.register(RegionStatus(name, f"{prefix}{name}", 0, 1))
    assert _open_files(prefix) == 0
    (FOLDER / f"{prefix}folder").rmdir()


@pytest.mark.parametrize(
    ("offset", "size", "why"),
    [
        (0, SIZE + 1, "would end at byte 4097"),
        (SIZE, 1, "would end"),
        ((1 << 62) - 1, (1 << 62) - 1, "would end"),
        (0, 0, "at least 1 byte"),
    ],
)
def test_a_region_is_inside_its_object(client, prefix, offset, size, why):
    handle = _object(f"{prefix}in")
    before = _open_files(prefix)  # the client is this process, too
    with pytest.raises(triton.InferenceServerException, match=why):
        client.register_system_shared_memory("in", f"{prefix}in", size, offset)
    assert _open_files(prefix) == before
    _destroy(handle)


def test_the_numbers_of_a_region_are_checked(served, prefix):
    (FOLDER / f"{prefix}in").write_bytes(b"0" * SIZE)
    path = "/v2/systemsharedmemory/region/in/register"
    for wrong in (
        {},
        {"key": 3, "byte_size": 1},
        {"key": f"{prefix}in"},
        {"key": f"{prefix}in", "byte_size": -1},
        {"key": f"{prefix}in", "byte_size": 1 << 63},
        {"key": f"{prefix}in", "byte_size": 1.5},
        {"key": f"{prefix}in", "byte_size": 64, "offset": -64},
        {"key": f"{prefix}in", "byte_size": True},
    ):
        assert ask_http(served.http_port, "POST", path, wrong)[0] == 400, wrong
    kind = message_types().SystemSharedMemoryRegisterRequest
    with GrpcClient(served.grpc_address) as client:
        for size, offset in ((1, (1 << 64) - 1), ((1 << 64) - 1, 1)):
            asked = kind(name="in", key=f"{prefix}in", byte_size=size, offset=offset)
            with pytest.raises(Exception, match="would end at byte"):
                client.SystemSharedMemoryRegister(asked)


def test_regions_are_not_without_number(prefix):
    (FOLDER / f"{prefix}in").write_bytes(b"0" * SIZE)
    regions = SharedMemoryRegions(prefix, SIZE)
    for number in range(MOST_REGIONS):
        regions.register(RegionStatus(str(number), f"{prefix}in", 0, SIZE))
    with pytest.raises(RequestError, match="which is the limit"):
        regions.register(RegionStatus("more", f"{prefix}in", 0, SIZE))
    with pytest.raises(RequestError, match="needs a name"):
        regions.register(RegionStatus("", f"{prefix}in", 0, SIZE))
    assert _open_files(prefix) == MOST_REGIONS
    regions.unregister()
    assert _open_files(prefix) == 0


# What a request may name


@pytest.mark.parametrize(
    ("size", "offset", "why"),
    [
        (SIZE + 1, 0, "not inside the region"),
        (16, SIZE - 15, "not inside the region"),
        (16, (1 << 62) - 16, "not inside the region"),
        (-16, 16, "must be a number of bytes"),
        (16, -16, "must be a number of bytes"),
        (8, 0, "takes 16 bytes, got 8"),
    ],
)
def test_an_input_is_inside_its_region(client, prefix, size, offset, why):
    handles = _register(client, prefix)
    user = _input(client, "user", [2], "BYTES", 11)
    with pytest.raises(triton.InferenceServerException, match=why):
        client.infer("f", [user, _input(client, "item", [2], "INT64", size, offset)])
    with pytest.raises(triton.InferenceServerException, match="would end at"):
        client.infer("f", [_input(client, "user", [2], "BYTES", 10)])
    assert client.infer("f", _inputs(client)).as_numpy("score").tolist() == [11, 22]
    _destroy(*handles)


def test_an_output_that_does_not_fit_is_not_written(client, prefix):
    handles = _register(client, prefix)
    wanted = [_output(client, "double", 8), _output(client, "score", 7, 8)]
    with pytest.raises(triton.InferenceServerException, match="'score' has 8 bytes; the request gives it 7"):
        client.infer("f", _inputs(client), outputs=wanted)
    with pytest.raises(triton.InferenceServerException, match="not inside the region 'out'"):
        client.infer("f", _inputs(client), outputs=[_output(client, "score", 8, SIZE - 64)])
    assert not shm.get_contents_as_numpy(handles[1], np.uint8, [SIZE]).any()
    _destroy(*handles)


def test_values_are_sent_or_in_memory_and_not_both(client, prefix, served):
    handles = _register(client, prefix)
    place = {"shared_memory_region": "in", "shared_memory_byte_size": 11}
    one = {"name": "user", "datatype": "BYTES", "shape": [2], "parameters": place}
    for wrong, why in (
        ({**one, "data": ["a", "b"]}, "it needs one of both"),
        ({**one, "parameters": {**place, "binary_data_size": 11}}, "'binary_data_size'"),
        ({**one, "parameters": {"shared_memory_byte_size": 11}}, "does not support the parameter"),
        ({**one, "parameters": {**place, "shared_memory_region": 3}}, "must be the name"),
    ):
        status, said, _ = ask_http(served.http_port, "POST", "/v2/models/f/infer", {"inputs": [wrong]})
        assert status == 400
        assert why in said["error"]
    message = message_types().ModelInferRequest(model_name="f", raw_input_contents=[bytes(11)])
    there = message.inputs.add(name="user", datatype="BYTES", shape=[2])
    there.parameters["shared_memory_region"].string_param = "in"
    there.parameters["shared_memory_byte_size"].int64_param = 11
    with GrpcClient(served.grpc_address) as plain:
        with pytest.raises(Exception, match="0 inputs outside of shared memory and 1 raw contents"):
            plain.ModelInfer(message)
        del message.raw_input_contents[:]
        there.contents.bytes_contents.append(b"a")
        with pytest.raises(Exception, match="it needs one of both"):
            plain.ModelInfer(message)
    _destroy(*handles)


def test_inputs_in_memory_count_within_the_limits_of_requests(prefix):
    limits = ServeLimits(request_bytes=1 << 12, in_flight_bytes=1 << 20)
    with (
        serving(one_model(), shared_memory=prefix, limits=limits) as server,
        _client(server, "grpc") as client,
    ):
        handles = _register(client, prefix)
        large = [_input(client, "item", [256], "INT64", 2048), _input(client, "price", [513], "FP32", 2052)]
        with pytest.raises(triton.InferenceServerException, match="more than 4096 bytes in shared memory"):
            client.infer("f", large)
        _destroy(*handles)
    limits = ServeLimits(in_flight_bytes=64 << 10)
    with serving(one_model(), shared_memory=prefix, limits=limits) as server:
        large = 1 << 16
        (FOLDER / f"{prefix}large").write_bytes(bytes(large))
        for transport in ("http", "grpc"):
            with _client(server, transport) as client:
                client.register_system_shared_memory(transport, f"{prefix}large", large)
                item = _input(client, "item", [large // 8], "INT64", large, region=transport)
                with pytest.raises(triton.InferenceServerException, match="--max-bytes-in-flight"):
                    client.infer("f", [item])
                client.infer(
                    "f", [_input(client, "user", [1], "BYTES", 4, region=transport)]
                )  # all is released


# What a client may do meanwhile


def test_an_object_that_has_shrunk_is_an_error_and_does_not_grow_again(client, prefix):
    handles = _register(client, prefix)
    os.truncate(FOLDER / f"{prefix}out", 64)
    with pytest.raises(triton.InferenceServerException, match="has 64 bytes now"):
        client.infer("f", _inputs(client), outputs=[_output(client, "score", 8)])
    assert (FOLDER / f"{prefix}out").stat().st_size == 64
    os.truncate(FOLDER / f"{prefix}in", 8)
    with pytest.raises(triton.InferenceServerException, match="has 8 bytes now"):
        client.infer("f", _inputs(client))
    assert client.is_server_live()
    _destroy(*handles)


def _while_the_model_works(server, transport, act, ask):
    """Act between the reading of a request and its answer; return the answer."""
    found = []

    def infer():
        with _client(server, transport) as client:  # that of HTTP is of one thread
            found.append(ask(client))

    thread = threading.Thread(target=infer)
    thread.start()
    model = server.catalog.loaded[0]
    while not model.busy:
        thread.join(0.01)
        assert thread.is_alive(), "it was answered at once"
    act()
    model.gate.set()
    thread.join(60)
    return found[0]


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_a_model_reads_a_copy_and_its_answer_is_written_though_its_region_is_unregistered(transport, prefix):
    with serving(one_model(), shared_memory=prefix) as server, _client(server, transport) as client:
        before = _open_files(prefix)
        handles = _register(client, prefix, _texts(b"slow"), np.array([5], np.int64))
        opened = _open_files(prefix)

        def change():
            shm.set_shared_memory_region(handles[0], [np.array([1000], np.int64)], offset=8)
            client.unregister_system_shared_memory()
            assert _open_files(prefix) == opened - 1  # that of `out` is in use

        _while_the_model_works(
            server,
            transport,
            change,
            lambda client: client.infer(
                "f",
                [_input(client, "user", [1], "BYTES", 8), _input(client, "item", [1], "INT64", 8, 8)],
                outputs=[_output(client, "score", 4)],
            ),
        )
        assert shm.get_contents_as_numpy(handles[1], np.float32, [1], offset=64).tolist() == [9]
        _destroy(*handles)
        server.close()  # its threads keep no request
        assert _open_files(prefix) == before


# Who may register


CONTROL = Secret("s3cret")


def test_the_control_token_registers_and_the_predict_token_uses(prefix):
    control = {"authorization": "Bearer s3cret"}
    predict = {"authorization": f"Bearer {derive_token(CONTROL, 'predict').reveal()}"}
    (FOLDER / f"{prefix}in").write_bytes(_texts(b"a").item())
    given = ("in", f"{prefix}in", 5)
    with serving(one_model(), shared_memory=prefix, server={"guard": Guard(token=CONTROL)}) as server:
        for transport in ("http", "grpc"):
            with _client(server, transport) as client:
                for call in (
                    lambda: client.register_system_shared_memory(*given, headers=predict),
                    lambda: client.unregister_system_shared_memory(headers=predict),
                ):
                    with pytest.raises(triton.InferenceServerException, match="needs the control token"):
                        call()
                client.register_system_shared_memory(*given, headers=control)
                user = _input(client, "user", [1], "BYTES", 5)
                assert client.infer("f", [user], headers=predict).as_numpy("score").tolist() == [1]
                client.unregister_system_shared_memory(headers=control)
    alone = Guard(role="predict", role_tokens={"predict": Secret("p")})
    with pytest.raises(ConfigError, match="Start with --token-file"):
        serving(one_model(), shared_memory=prefix, server={"guard": alone}).__enter__()


@pytest.mark.parametrize("wrong", [".", "..", "a/b", "/", ".hidden", "a b", "é", "x" * 300])
def test_a_prefix_is_the_beginning_of_a_name(wrong):
    with pytest.raises(ConfigError, match="letters, digits"):
        ServeConfig(shared_memory=wrong)
    assert ServeConfig(shared_memory="/shop.2_").shared_memory == "/shop.2_"


def test_processes_on_one_port_know_the_same_regions(prefix, tmp_path):
    guard = Guard(token=CONTROL)
    headers = {"authorization": "Bearer s3cret"}
    (FOLDER / f"{prefix}in").write_bytes(bytes(64))
    with ExitStack() as open_things:
        ports = {}
        for name in ("http_port", "grpc_port"):
            held = bound_socket("127.0.0.1", 0, share=True)
            open_things.callback(held.close)
            ports[name] = held.getsockname()[1]

        def start(index):
            return serving(
                one_model(LinearModel()),
                shared_memory=prefix,
                server={"peers": ServerProcesses(tmp_path, index, 2, guard), "guard": guard},
                **ports,
            )

        def known():
            return [sorted(one.name for one in each.inference.shared_memory.status()) for each in pair]

        pair = [open_things.enter_context(start(0))]
        with _client(pair[0], "http") as over_http, _client(pair[0], "grpc") as over_grpc:
            over_grpc.register_system_shared_memory("early", f"{prefix}in", 64, headers=headers)
            (FOLDER / f"{prefix}gone").write_bytes(bytes(64))
            over_grpc.register_system_shared_memory("gone", f"{prefix}gone", 64, headers=headers)
            (FOLDER / f"{prefix}gone").unlink()
            # One that is started, or restarted, later takes the regions whose objects still have a key.
            pair.append(open_things.enter_context(start(1)))
            assert known() == [["early", "gone"], ["early"]]
            over_http.register_system_shared_memory("http", f"{prefix}in", 32, 32, headers=headers)
            over_grpc.register_system_shared_memory("a/b", f"{prefix}in", 64, headers=headers)
            assert known() == [["a/b", "early", "gone", "http"], ["a/b", "early", "http"]]
            assert {one.inference.shared_memory.status("http")[0] for one in pair} == {
                RegionStatus("http", f"{prefix}in", 32, 32)
            }
            over_http.unregister_system_shared_memory("http", headers=headers)
            over_grpc.unregister_system_shared_memory("a/b", headers=headers)
            over_grpc.unregister_system_shared_memory("gone", headers=headers)
            assert known() == [["early"], ["early"]]
            over_http.unregister_system_shared_memory(headers=headers)
            assert known() == [[], []]
