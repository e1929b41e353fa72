"""An application master in this process, on a unix socket, asked over real gRPC."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from monolith.errors import ClusterError
from monolith.wire import primus_am_service_pb2 as pb
from monolith_compat.yarn import ApplicationMaster, application_master_address, get_local_host

grpc = pytest.importorskip("grpc", reason="grpcio is not installed")

STATES = pb.CreateSavepointStatusResponse


class FakeMaster:
    """Keeps what it is asked, and answers as told."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, object]] = []
        self.begun = pb.CreateSavepointResponse(savepoint_id="123")
        self.states = [STATES(create_savepoint_state=STATES.SUCCEEDED)]
        self.broken: set[str] = set()

    def answer(self, method: str, response: object):
        def handle(request, context):
            self.asked.append((method, request))
            if method in self.broken:
                context.abort(grpc.StatusCode.INTERNAL, "broken")
            if method == "createSavepoint":
                return self.begun
            if method == "createSavepointStatus":
                return self.states.pop(0) if len(self.states) > 1 else self.states[0]
            return response()

        return handle

    def methods(self) -> list[str]:
        return [method for method, _ in self.asked]


CALLS = {
    "kill": (pb.KillRequest, pb.KillResponse),
    "succeed": (pb.SucceedRequest, pb.SucceedResponse),
    "createSavepoint": (pb.CreateSavepointRequest, pb.CreateSavepointResponse),
    "createSavepointStatus": (pb.CreateSavepointStatusRequest, pb.CreateSavepointStatusResponse),
}


@pytest.fixture
def fake(tmp_path):
    master = FakeMaster()
    server = grpc.server(ThreadPoolExecutor(2))
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            master.answer(name, response),
            request_deserializer=request.FromString,
            response_serializer=response.SerializeToString,
        )
        for name, (request, response) in CALLS.items()
    }
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("primus.AppMasterService", handlers),)
    )
    assert server.add_insecure_port(f"unix:{tmp_path}/am")
    server.start()
    yield master
    server.stop(None).wait()


@pytest.fixture
def environ(tmp_path) -> dict[str, str]:
    return {"PRIMUS_AM_RPC_HOST": "unix", "PRIMUS_AM_RPC_PORT": f"{tmp_path}/am"}


class Time:
    """A clock that moves only by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


@pytest.fixture
def master(environ):
    with ApplicationMaster(environ, sleep=lambda _: None) as made:
        yield made


def test_kill_tells_the_reason_and_a_grace(fake, master):
    assert master.kill("TestKill") is True
    [(method, request)] = fake.asked
    assert method == "kill"
    assert (request.exit_code, request.diagnose) == (1, "TestKill")
    assert request.graceful_shutdown_timeout_ms.value == 20000


def test_finish_tells_only_the_grace(fake, master):
    assert master.finish() is True
    [(method, request)] = fake.asked
    assert method == "succeed"
    assert (request.exit_code, request.diagnose) == (0, "")
    assert request.graceful_shutdown_timeout_ms.value == 20000


def test_a_save_point_is_asked_for_and_waited_for(fake, master):
    assert master.create_save_point("/dst") is True
    assert fake.methods() == ["createSavepoint", "createSavepointStatus"]
    assert fake.asked[0][1].savepoint_dir == "/dst"
    assert fake.asked[1][1].savepoint_restore_id == "123"


def test_a_save_point_that_takes_time_is_asked_for_every_5_seconds(fake, environ):
    fake.states = [
        STATES(create_savepoint_state=STATES.PENDING),
        STATES(create_savepoint_state=STATES.RUNNING),
        STATES(create_savepoint_state=STATES.SUCCEEDED),
    ]
    time = Time()
    with ApplicationMaster(environ, sleep=time.sleep, clock=time.clock) as master:
        assert master.create_save_point("/dst") is True
    assert time.sleeps == [5.0, 5.0]


def test_a_save_point_that_takes_for_ever_has_failed_at_the_deadline(fake, environ):
    fake.states = [STATES(create_savepoint_state=STATES.RUNNING)]
    time = Time()
    with ApplicationMaster(environ, sleep=time.sleep, clock=time.clock) as master:
        assert master.create_save_point("/dst", timeout=timedelta(seconds=12)) is False
    assert time.sleeps == [5.0, 5.0, 2.0]


@pytest.mark.parametrize(
    "state",
    [
        STATES(create_savepoint_state=STATES.FAILED, message="disk full"),
        STATES(create_savepoint_state=STATES.SUCCEEDED, code=7, message="not really"),
        STATES(create_savepoint_state=STATES.RUNNING, code=7, message="lost"),
    ],
)
def test_a_save_point_with_a_failure_or_a_code_has_failed(fake, master, state, caplog):
    fake.states = [state]
    with caplog.at_level(logging.ERROR):
        assert master.create_save_point("/dst") is False
    assert state.message in caplog.text


def test_a_save_point_that_is_refused_is_not_asked_for_again(fake, master, caplog):
    fake.begun = pb.CreateSavepointResponse(code=3, message="busy")
    assert master.create_save_point("/dst") is False
    assert fake.methods() == ["createSavepoint"]
    assert "busy" in caplog.text


def test_every_failure_is_false_and_never_none(fake, master):
    fake.broken = set(CALLS)
    assert (master.kill("x"), master.finish(), master.create_save_point("/d")) == (False, False, False)
    fake.broken = {"createSavepointStatus"}
    assert master.create_save_point("/d") is False


def test_an_address_without_a_server_is_false(environ):
    with ApplicationMaster(environ) as master:
        assert (master.kill("x"), master.finish(), master.create_save_point("/d")) == (False, False, False)


@pytest.mark.parametrize("environ", [{}, {"PRIMUS_AM_RPC_HOST": "h"}, {"PRIMUS_AM_RPC_PORT": "1"}])
def test_without_an_application_master_all_is_false(environ, caplog):
    with caplog.at_level(logging.INFO), ApplicationMaster(environ) as master:
        assert (master.kill("x"), master.finish(), master.create_save_point("/d")) == (False, False, False)
    assert "Current framework doesn't support kill. Ignore killing..." in caplog.text


def test_the_address_is_host_and_port_and_a_unix_socket_is_written_alike():
    environ = {"PRIMUS_AM_RPC_HOST": "h", "PRIMUS_AM_RPC_PORT": "80"}
    assert application_master_address(environ) == "h:80"
    environ = {"PRIMUS_AM_RPC_HOST": "unix", "PRIMUS_AM_RPC_PORT": "name"}
    assert application_master_address(environ) == "unix:name"


def test_many_threads_share_one_channel(fake, environ):
    with ApplicationMaster(environ) as master:
        threads = [threading.Thread(target=master.kill, args=("x",)) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(master._channels) == 1
    assert fake.methods() == ["kill"] * 16


def test_after_closing_a_call_connects_again(fake, master):
    assert master.kill("a")
    master.close()
    assert master.kill("b")
    assert len(fake.asked) == 2


def test_the_local_host_is_what_the_scheduler_says():
    assert get_local_host({"YARN_INET_ADDR": "1.2.3.4"}) == "1.2.3.4"
    cloud = {"CLOUDNATIVE_INET_ADDR": "1.2.3.4,5.6.7.8", "YARN_INET_ADDR": "9.9.9.9"}
    assert get_local_host(cloud) == "1.2.3.4"
    assert get_local_host({})
    with pytest.raises(ClusterError):
        get_local_host({"YARN_INET_ADDR": ""})


def test_the_messages_have_the_numbers_of_the_contract():
    fields = {
        message.name: {f.name: f.number for f in message.fields}
        for message in pb.DESCRIPTOR.message_types_by_name.values()
    }
    assert fields["KillRequest"] == {"exit_code": 1, "diagnose": 2, "graceful_shutdown_timeout_ms": 3}
    assert fields["CreateSavepointResponse"] == {"code": 1, "message": 2, "savepoint_id": 3}
    assert fields["PSInfo"] == {"ip": 1, "ports": 2, "shard_id": 3, "name": 4}
    service = pb.DESCRIPTOR.services_by_name["AppMasterService"]
    assert service.full_name == "primus.AppMasterService"
    assert [method.name for method in service.methods] == [
        *("ponyHeartbeat", "ponyGetPSInfo", "ponyStartWorker", "succeed", "kill", "suspend", "suspendStatus"),
        *("resume", "getSnapshot", "progress", "isStarving", "status", "getTaskTimePoint"),
        *("createSavepoint", "createSavepointStatus"),
    ]
