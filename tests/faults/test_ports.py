"""What a program without a token learns from each port: the last column of the table in docs/security.md.

Each server is the real one, in this process, with a token. The program has no code of ours: pyarrow, grpc,
HTTP and torch are all it needs.
"""

from __future__ import annotations

import http.client
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pytest
from data.service.processes import CONFIG, open_split
from faults.port_servers import saved
from pyarrow import flight
from serve.server.linear import LinearCatalog, LinearModel
from serve.server.serving import ask_http, rows_json, serving
from serve.shards.shard_folders import write_shards
from sync.delta_channels import SmallPublisher
from torch.distributed import TCPStore
from train.runs import FakeRun
from train.tasks import Clicks

from monolith.cluster.security import Guard, SecurityConfig
from monolith.config import Secret
from monolith.data.service import DataWorker, Dispatcher
from monolith.observe import Metrics
from monolith.runtime.cluster_config import ClusterConfig
from monolith.runtime.parameter_server import ServedShard
from monolith.serve.shards import ServingServer
from monolith.store.rank_calls import RankCalls, RankPort
from monolith.store.rank_keys import keep_keys
from monolith.sync.flight_channel import DeltaPort
from monolith.train import TrainConfig
from monolith.train.hooks import ControlServerHook, LocalBarrier
from monolith.ui import Feed, Page
from monolith.wire.open_inference import SERVICE, service_methods

TOKEN = Secret("the-control-token-of-this-test")
GUARD = Guard(token=TOKEN)
SOON = timedelta(seconds=10)
DOCS = Path(__file__).parents[2] / "docs" / "security.md"


@pytest.fixture(scope="module")
def table() -> dict[str, str]:
    """The first and the last column of the table of ports."""
    lines = [line for line in DOCS.read_text().splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {row[0]: row[-1] for row in rows if len(row) == 6}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


# Flight


def parameter_server(folder: Path, stack: ExitStack) -> list[str]:
    share = ServedShard(Clicks(), TrainConfig(model_dir=str(folder)), ClusterConfig(role="ps", num_ps=1))
    return [stack.enter_context(share.serve("127.0.0.1", 0, GUARD)).address]


def rank(folder: Path, stack: ExitStack) -> list[str]:  # noqa: ARG001
    keys = keep_keys("127.0.0.1", TOKEN)
    stack.callback(RankCalls(keys, 0, 2, RankPort(guard=GUARD), timeout=SOON).close)
    return [keys.get("calls/0").decode()]


def delta(folder: Path, stack: ExitStack) -> list[str]:  # noqa: ARG001
    port = DeltaPort(guard=GUARD.for_role("follow"))
    stack.callback(port.close)
    SmallPublisher(port.writer()).publish(range(10))
    return [port.address]


def serving_server(folder: Path, stack: ExitStack) -> list[str]:
    write_shards(folder, shards=1)
    return [stack.enter_context(ServingServer(str(folder), 0, guard=GUARD.for_role("follow"))).address]


def data_service(folder: Path, stack: ExitStack) -> list[str]:
    dispatcher = stack.enter_context(Dispatcher(CONFIG, folder=str(folder), guard=GUARD))
    worker = stack.enter_context(DataWorker(dispatcher.address, open_split, guard=GUARD))
    return [dispatcher.address, worker.address]


FLIGHT_PORTS = {
    "parameter server (Flight)": parameter_server,
    "rank calls (Flight)": rank,
    "delta port (Flight)": delta,
    "serving server (Flight)": serving_server,
    "data dispatcher, data worker (Flight)": data_service,
}
FLIGHT_CALLS: dict[str, Callable[[flight.FlightClient], object]] = {
    "a call": lambda client: list(client.do_action(flight.Action("status", b"{}"))),
    "read": lambda client: client.do_get(flight.Ticket(b"{}")).read_all(),
    "write": lambda client: client.do_put(flight.FlightDescriptor.for_path("x"), pa.schema([]))[1].read(),
    "exchange": lambda client: client.do_exchange(flight.FlightDescriptor.for_command(b""))[1].schema,
    "list": lambda client: list(client.list_flights()),
    "list calls": lambda client: list(client.list_actions()),
    "info": lambda client: client.get_flight_info(flight.FlightDescriptor.for_path("x")),
}


class Hello(flight.ClientAuthHandler):  # type: ignore[misc]
    """Begins the handshake, as a program does that knows how, and guesses the proof."""

    def authenticate(self, outgoing: Any, incoming: Any) -> None:
        outgoing.write(b"monolith-proof/1 control,follow " + b"0" * 32)
        self.heard = incoming.read()
        outgoing.write(b"0" * 64)
        incoming.read()

    def get_token(self) -> bytes:
        return b""


@pytest.mark.parametrize("name", FLIGHT_PORTS)
def test_a_flight_port_reveals_that_it_demands_a_token(
    name: str, table: dict[str, str], stack: ExitStack, tmp_path: Path
) -> None:
    assert table[name] == "`UNAUTHENTICATED`, and a proof that it has the token"
    for address in FLIGHT_PORTS[name](tmp_path, stack):
        for what, call in FLIGHT_CALLS.items():
            client = stack.enter_context(closing(flight.FlightClient(f"grpc+tcp://{address}")))
            with pytest.raises(flight.FlightUnauthenticatedError, match="has not proved") as refused:
                call(client)
            said = str(refused.value).partition("gRPC client debug context")[0]
            assert re.fullmatch(
                r"the caller has not proved that it has the shared token: the call has no proof\. "
                r"Detail: Unauthenticated(\. )?",
                said,
            ), what
        hello = Hello()
        with pytest.raises(flight.FlightUnauthenticatedError, match="the caller has another token"):
            client.authenticate(hello)
        assert re.fullmatch(rb"(control|follow) [0-9a-f]{32} [0-9a-f]{64}", hello.heard)


# gRPC and HTTP


def grpc_status(stack: ExitStack, address: str, method: str) -> grpc.StatusCode:
    channel = stack.enter_context(grpc.insecure_channel(address))
    with pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(method)(b"", timeout=SOON.total_seconds())
    return refused.value.code()


def test_the_control_server_reveals_that_it_demands_a_token(
    table: dict[str, str], stack: ExitStack, tmp_path: Path
) -> None:
    assert table["control server (gRPC)"] == "`UNAUTHENTICATED`"
    control = ControlServerHook(LocalBarrier(1), saved, security=SecurityConfig(token=TOKEN), grace=0.1)
    control.after_create(FakeRun(tmp_path, step=7))
    stack.callback(control.close)
    assert control.address is not None
    for method in ("StopTraining", "ResumeTraining", "SaveCheckpoint", "GetBlockStatus", "GetTrainingStatus"):
        status = grpc_status(stack, control.address, f"/Controller/{method}")
        assert status is grpc.StatusCode.UNAUTHENTICATED, method


def test_a_model_server_reveals_its_health(table: dict[str, str], stack: ExitStack) -> None:
    assert table["predictions (HTTP, gRPC)"] == (
        "health over HTTP and `grpc.health.v1`; else `401` and `UNAUTHENTICATED`"
    )
    assert table["load and unload of models"] == "`401`; with the predict token `403`"
    catalog = LinearCatalog({"linear": {"1": lambda: LinearModel(version="1")}})
    server = stack.enter_context(serving(catalog, server={"guard": GUARD}))
    port = server.http_port
    assert ask_http(port, "GET", "/v2/health/live")[:2] == (200, {"live": True})
    assert ask_http(port, "GET", "/v2/health/ready")[:2] == (200, {"ready": True})
    for method, path in (
        ("GET", "/"),
        ("GET", "/v2"),
        ("GET", "/metrics"),
        ("GET", "/v2/models/linear"),
        ("GET", "/v2/models/no_such"),
        ("POST", "/v2/models/linear/infer"),
        ("POST", "/v2/repository/index"),
        ("POST", "/v2/repository/models/linear/load"),
        ("POST", "/v2/repository/models/linear/unload"),
    ):
        status, answer, _ = ask_http(port, method, path, rows_json("u") if method == "POST" else None)
        assert (path, status) == (path, 401)
        assert "linear" not in str(answer)
    methods = [f"/{SERVICE}/{name}" for name in service_methods()]
    assert f"/{SERVICE}/ServerLive" in methods
    with grpc.insecure_channel(server.grpc_address) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=SOON.total_seconds()) == b"\x08\x01"  # status: SERVING, and no more
    for path in methods:
        assert grpc_status(stack, server.grpc_address, path) is grpc.StatusCode.UNAUTHENTICATED, path
    predict = {"authorization": str(GUARD.for_role("predict").header)}
    assert ask_http(port, "POST", "/v2/repository/models/linear/unload", {}, predict)[0] == 403


def test_metrics_and_status_reveal_nothing(table: dict[str, str], stack: ExitStack) -> None:
    assert table["`/metrics`, `/status` (HTTP)"] == "`401`"
    pages = {"/status": lambda: b"secret"}
    shown = stack.enter_context(Metrics().serve(0, admits=GUARD.admits, pages=pages))
    for path in ("/", "/metrics", "/status", "/no/such/page"):
        status, answer, _ = ask_http(shown.port, "GET", path)
        assert (path, status) == (path, 401)
        assert b"secret" not in bytes(answer)


def test_the_page_reveals_where_to_sign_in(table: dict[str, str], stack: ExitStack) -> None:
    assert table["the page (HTTP)"] == "the sign-in page"
    page = stack.enter_context(Page([Feed("a-name-of-ours")], token=TOKEN.reveal()))
    port = int(str(page.address).rpartition(":")[2].strip("/"))
    for path, expected in {"/": 200, "/page.js": 200, "/state": 401, "/events": 401, "/nothing": 404}.items():
        status, answer, _ = ask_http(port, "GET", path)
        assert (path, status) == (path, expected)
        assert b"a-name-of-ours" not in bytes(str(answer), "utf8")
    for action in ("hold", "resume", "rollback"):
        with suppress(http.client.RemoteDisconnected):
            assert ask_http(port, "POST", f"/publish/{action}", {"source": "a-name-of-ours"})[0] == 401


# torch


def test_rank_keys_reveal_where_ranks_are_and_may_be_deleted(table: dict[str, str], stack: ExitStack) -> None:
    assert table["rank keys (torch's TCPStore)"] == "addresses of the ranks; a program may delete keys"
    keys = keep_keys("127.0.0.1", TOKEN)
    stack.callback(RankCalls(keys, 0, 2, RankPort(guard=GUARD), timeout=SOON).close)
    address = keys.get("calls/0")
    stranger = TCPStore("127.0.0.1", keys.port, is_master=False, timeout=SOON)
    found = [name for name in (f"{keys.attempt}/calls/0", "calls/0") if stranger.check([name])]
    assert [address in stranger.get(name) for name in found] == [True]
    assert TOKEN.reveal().encode() not in stranger.get(found[0])
    assert stranger.delete_key(found[0])
