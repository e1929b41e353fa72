"""Who answers a name, by weight, and who is asked beside."""

import random
from collections import Counter
from contextlib import ExitStack

import pytest
from serve.server.linear import LinearCatalog, LinearModel
from serve.server.serving import GrpcClient, ask_http, refusal, rows_json, rows_message, serving

from monolith.cluster.security import Guard
from monolith.config import Secret
from monolith.errors import ConfigError
from monolith.serve.config import Route, RouteTarget, ServeConfig, VersionPolicy
from monolith.serve.server import ServerProcesses
from monolith.serve.server.traffic import TrafficRoutes
from monolith.wire.open_inference import message_types
from monolith.wire.ports import bound_socket


def routes(splits=(), shadows=()):
    return TrafficRoutes(
        [Route.parse(one) for one in splits],
        [Route.parse(one) for one in shadows],
        ["ads", "feed"],
        random.Random(1),
    )


def test_a_route_is_a_name_and_targets_with_weights():
    assert Route.parse("ads=ads/120:90,feed") == Route(
        "ads", (RouteTarget("ads", "120", 90), RouteTarget("feed", "", 1))
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ads",
        "ads=",
        "=ads",
        "ads=a b",
        "ads=ads:x",
        "ads=ads:1.2.3",
        "ads=ads:0",
        "ads=ads:" + "9" * 400,
        "ads=ads:1000000001",
        "ads=a:1,b:0." + "0" * 20 + "1",
    ],
)
def test_what_is_no_route_is_refused(text):
    with pytest.raises(ConfigError, match="route"):
        Route.parse(text)


@pytest.mark.parametrize("text", ["", "newest", "latest:0", "latest:-1", "specific:", "all:1"])
def test_what_is_no_policy_is_refused(text):
    with pytest.raises(ConfigError, match="version policy"):
        VersionPolicy.parse(text)


def test_requests_are_split_by_weight():
    traffic = routes(["ads=ads/1:75,ads/2:25"])
    counts = Counter(traffic.target("ads", "") for _ in range(4000))
    assert set(counts) == {("ads", "1"), ("ads", "2")}
    assert 2850 < counts["ads", "1"] < 3150
    assert traffic.main("ads") == ("ads", "1")
    assert traffic.pinned() == {"ads": {"1", "2"}}


def test_a_request_that_names_a_version_gets_it():
    assert routes(["ads=ads/1:75,ads/2:25"]).target("ads", "7") == ("ads", "7")


def test_a_name_without_a_route_is_the_model():
    assert routes().target("ads", "") == ("ads", "")


def test_shadows_are_asked_for_their_share():
    traffic = routes(shadows=["ads=feed:0.5"])
    asked = sum(len(traffic.shadows("ads")) for _ in range(4000))
    assert 1850 < asked < 2150
    assert not traffic.shadows("feed")
    assert len(routes(shadows=["ads=feed"]).shadows("ads")) == 1


@pytest.mark.parametrize(
    ("splits", "shadows", "says"),
    [
        (["x=nobody"], [], "nobody"),
        (["x=ads", "x=feed"], [], "two routes"),
        ([], ["x=ads"], "neither a model nor a split"),
    ],
)
def test_routes_that_lead_nowhere_are_refused(splits, shadows, says):
    with pytest.raises(ConfigError, match=says):
        routes(splits, shadows)


def test_a_share_of_more_than_all_is_refused():
    with pytest.raises(ConfigError, match="at most 1"):
        ServeConfig(shadows=("ads=ads:2",))


def test_a_key_always_goes_to_the_same_target_and_keys_are_split_by_weight():
    split, again = routes(["ads=ads/1:75,ads/2:25"]), routes(["ads=ads/1:75,ads/2:25"])
    chosen = {f"user {n}": split.target("ads", "", f"user {n}") for n in range(4000)}
    assert all(again.target("ads", "", key) == found for key, found in chosen.items())
    assert 2850 < Counter(chosen.values())["ads", "1"] < 3150


def test_other_weights_move_only_the_keys_that_must_move():
    before = routes(["ads=ads/1:75,ads/2:25"])
    after = before.with_split("ads", Route.parse("ads=ads/1:50,ads/2:50"))
    keys = [f"user {n}" for n in range(4000)]
    moved = [(before.target("ads", "", key), after.target("ads", "", key)) for key in keys]
    assert Counter(moved).keys() == {
        (("ads", "1"), ("ads", "1")),
        (("ads", "1"), ("ads", "2")),
        (("ads", "2"), ("ads", "2")),
    }


def test_another_split_chooses_by_itself():
    traffic = routes(["a=ads/1,ads/2", "b=ads/1,ads/2"])
    same = sum(traffic.target("a", "", f"{n}") == traffic.target("b", "", f"{n}") for n in range(2000))
    assert 900 < same < 1100


def test_a_target_without_weight_gets_nothing_and_one_alone_is_a_pin():
    assert {routes(["a=ads/1:0,ads/2:1"]).target("a", "", f"{n}") for n in range(50)} == {("ads", "2")}
    assert {routes(["a=ads/1"]).target("a", "") for _ in range(50)} == {("ads", "1")}


def test_routes_are_described_as_they_are_written():
    written = {"ads": "ads/1:99.99999,ads/2:0.00001", "b": "feed:1"}
    traffic = routes([f"{name}={targets}" for name, targets in written.items()])
    assert traffic.described() == written
    assert traffic.with_split("b", None).described() == {"ads": written["ads"]}


# A running server

GUARD = Guard(token=Secret("s3cret"))
TOKEN = {"authorization": "Bearer s3cret"}


def catalog():
    def broken():
        raise OSError("no such device")

    made = {one: lambda one=one: LinearModel(version=one, bias=int(one)) for one in ("1", "2", "3")}
    return LinearCatalog({"f": {"0": broken, **made}})


@pytest.fixture
def server():
    with serving(
        catalog(),
        allow_control=True,
        splits=("ads=f/1:50,f/3:50",),
        split_columns={"ads": "user"},
        server={"guard": GUARD},
    ) as running:
        yield running


def version_of(server, user, *, headers=None, **parameters):
    body = rows_json(user, **({"parameters": parameters} if parameters else {}))
    status, reply, _ = ask_http(
        server.http_port, "POST", "/v2/models/ads/infer", body, {**TOKEN, **(headers or {})}
    )
    assert status == 200, reply
    return reply["model_version"]


def set_split(server, targets, headers=TOKEN):
    return ask_http(server.http_port, "POST", "/v2/splits/ads", {"targets": targets}, headers)[:2]


def test_requests_of_one_user_go_to_one_version_over_any_transport(server):
    with GrpcClient(server.grpc_address, tuple(TOKEN.items())) as client:
        for user in ("ann", "bob", "eve", "joe"):
            by_column = version_of(server, user)
            assert version_of(server, "someone", split_key=user) == by_column
            assert version_of(server, "someone", headers={"x-monolith-split-key": user}) == by_column
            assert client.ModelInfer(rows_message(user, model="ads")).model_version == by_column
            raw = message_types().ModelInferRequest(model_name="ads")
            raw.inputs.add(name="user", datatype="BYTES", shape=[1])
            raw.raw_input_contents.append(len(user).to_bytes(4, "little") + user.encode())
            assert client.ModelInfer(raw).model_version == by_column
            message = rows_message("someone", model="ads")
            message.parameters["split_key"].string_param = user
            assert client.ModelInfer(message).model_version == by_column
    assert {version_of(server, f"user {n}") for n in range(20)} == {"1", "3"}


def test_a_split_key_that_is_no_text_is_refused(server):
    body = rows_json("ann", parameters={"split_key": 7})
    status, reply, _ = ask_http(server.http_port, "POST", "/v2/models/ads/infer", body, TOKEN)
    assert status == 400
    assert "split_key" in reply["error"]


def test_weights_and_pins_change_while_the_server_answers(server):
    repository = server.inference.repository
    assert repository.versions("f") == ("1", "3")
    assert set_split(server, "f/2:1") == (200, {"ads": "f/2:1"})  # a pin
    assert {version_of(server, f"user {n}") for n in range(20)} == {"2"}
    assert repository.versions("f") == ("2", "3")  # the newest stays, by the policy
    assert set_split(server, "f/2:90,f/3:10")[0] == 200
    assert ask_http(server.http_port, "GET", "/v2/splits", headers=TOKEN)[1] == {"ads": "f/2:90,f/3:10"}
    assert set_split(server, "")[0] == 200
    assert ask_http(server.http_port, "GET", "/v2/splits", headers=TOKEN)[1] == {}
    assert repository.versions("f") == ("3",)


@pytest.mark.parametrize(
    ("targets", "status"), [("f/9", 404), ("f/0", 503), ("nobody", 400), ("f:x", 400), ("f:0", 400), (7, 400)]
)
def test_a_split_that_cannot_be_served_changes_nothing(server, targets, status):
    found, reply = set_split(server, targets)
    assert found == status, reply
    assert server.inference.traffic.described() == {"ads": "f/1:50,f/3:50"}
    assert server.inference.repository.versions("f") == ("1", "3")
    assert version_of(server, "ann") in ("1", "3")


def test_only_those_with_the_control_token_change_splits(server):
    predict = GUARD.for_role("predict").header
    assert set_split(server, "f/2", {"authorization": predict})[0] == 403
    with serving(catalog(), splits=("ads=f/1",), server={"guard": GUARD}) as other:
        status, reply = set_split(other, "f/2")
    assert status == 403
    assert "--allow-control" in reply["error"]


def load(targets, name="ads"):
    request = message_types().RepositoryModelLoadRequest(model_name=name)
    request.parameters["split"].string_param = targets
    return request


def test_splits_are_changed_over_grpc_by_a_load_with_targets(server):
    with GrpcClient(server.grpc_address, tuple(TOKEN.items())) as client:
        client.RepositoryModelLoad(load("f/2:90,f/3:10"))
        listed = client.RepositoryIndex(message_types().RepositoryIndexRequest()).models
        assert [(one.name, one.reason) for one in listed if one.name == "ads"] == [
            ("ads", "split: f/2:90,f/3:10")
        ]
        assert {version_of(server, f"user {n}") for n in range(50)} == {"2", "3"}
        client.RepositoryModelLoad(load(""))
        assert server.inference.traffic.described() == {}


def test_a_split_over_grpc_that_cannot_be_served_changes_nothing(server):
    number = load("")
    number.parameters["split"].int64_param = 7
    with GrpcClient(server.grpc_address, tuple(TOKEN.items())) as client:
        for request, code in (
            (load("f/9"), "NOT_FOUND"),
            (load("f/0"), "UNAVAILABLE"),
            (load("nobody"), "INVALID_ARGUMENT"),
            (number, "INVALID_ARGUMENT"),
        ):
            assert refusal(client.RepositoryModelLoad, request)[0].name == code
    with GrpcClient(server.grpc_address, (("authorization", GUARD.for_role("predict").header),)) as client:
        assert refusal(client.RepositoryModelLoad, load("f/2"))[0].name == "PERMISSION_DENIED"
    assert server.inference.traffic.described() == {"ads": "f/1:50,f/3:50"}


def test_all_processes_of_a_server_have_the_same_splits(tmp_path):
    held = bound_socket("127.0.0.1", 0, share=True)
    with held, ExitStack() as opened:

        def process(index):
            return opened.enter_context(
                serving(
                    catalog(),
                    allow_control=True,
                    splits=("ads=f/1:50,f/3:50",),
                    http_port=held.getsockname()[1],
                    grpc_port=None,
                    server={"peers": ServerProcesses(tmp_path, index, 3, GUARD), "guard": GUARD},
                )
            )

        pair = [process(0), process(1)]
        assert set_split(pair[0], "f/2:1")[0] == 200
        # One that is started again later learns it from the others.
        for one in (*pair, process(2)):
            assert one.inference.traffic.described() == {"ads": "f/2:1"}
            assert one.inference.repository.is_ready("f", "2")
