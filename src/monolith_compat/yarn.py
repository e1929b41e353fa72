"""YARN: telling the application master of a job, which Primus runs, how the job ends.

If there is no application master, no request is sent and nothing fails. Every call returns True when
the master did as requested, and False when it did not: it refused, could not be reached in
time, or there is none. The log says which. Nothing else is returned, and nothing raised, so the
end of a job never fails over the report of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from monolith.cluster.addresses import Clock, Sleep, get_local_host
from monolith.cluster.security import Guard, grpc_channel
from monolith.errors import optional_package

__all__ = ["ApplicationMaster", "application_master_address", "get_local_host"]

_log = logging.getLogger(__name__)

CALL_TIMEOUT = timedelta(seconds=10)
SHUTDOWN_GRACE = timedelta(seconds=20)
"""How long the master gives the processes of a job to end."""
POLL_EVERY = timedelta(seconds=5)
SAVE_POINT_TIMEOUT = timedelta(hours=1)


def application_master_address(environ: Mapping[str, str]) -> str | None:
    """Return the address of the application master, as gRPC writes it; None if there is none.

    The host "unix" with a path as port is a unix socket.
    """
    host, port = environ.get("PRIMUS_AM_RPC_HOST"), environ.get("PRIMUS_AM_RPC_PORT")
    return f"{host}:{port}" if host and port else None


def application_master(environ: Mapping[str, str]) -> ApplicationMaster | None:
    """Return the application master to which the chief reports the end of the run; None if there is none."""
    return None if application_master_address(environ) is None else ApplicationMaster(environ)


class ApplicationMaster:
    """Calls to the application master. Any thread may make them; each address has one connection.

    Args:
        environ: Says where it is. Looked at again at every call.
        sleep: Between questions for a save point.
    """

    def __init__(
        self, environ: Mapping[str, str], *, sleep: Sleep = time.sleep, clock: Clock = time.monotonic
    ) -> None:
        self._environ = environ
        self._sleep = sleep
        self._clock = clock
        self._lock = threading.Lock()  # guards _channels
        self._channels: dict[str, Any] = {}

    def kill(self, reason: str) -> bool:
        """Have the whole job ended as failed."""
        from monolith.wire import primus_am_service_pb2 as pb

        request = pb.KillRequest(exit_code=1, diagnose=reason)
        request.graceful_shutdown_timeout_ms.value = _milliseconds(SHUTDOWN_GRACE)
        return self._call("kill", request, pb.KillResponse) is not None

    def finish(self) -> bool:
        """Have the whole job ended as successful."""
        from monolith.wire import primus_am_service_pb2 as pb

        request = pb.SucceedRequest()
        request.graceful_shutdown_timeout_ms.value = _milliseconds(SHUTDOWN_GRACE)
        return self._call("succeed", request, pb.SucceedResponse) is not None

    def create_save_point(self, folder: str, timeout: timedelta = SAVE_POINT_TIMEOUT) -> bool:
        """Have the master write a save point into `folder`, and wait until it has.

        Args:
            timeout: From now on; a save point that takes longer counts as failed.
        """
        from monolith.wire import primus_am_service_pb2 as pb

        begun = self._call(
            "createSavepoint", pb.CreateSavepointRequest(savepoint_dir=folder), pb.CreateSavepointResponse
        )
        if begun is None:
            return False
        if begun.code != 0:
            _log.error("the application master refuses a save point: %s (code %d)", begun.message, begun.code)
            return False
        question = pb.CreateSavepointStatusRequest(savepoint_restore_id=begun.savepoint_id)
        states = pb.CreateSavepointStatusResponse
        deadline = self._clock() + timeout.total_seconds()
        while True:
            answer = self._call("createSavepointStatus", question, pb.CreateSavepointStatusResponse)
            if answer is None:
                return False
            state = answer.create_savepoint_state
            if answer.code == 0 and state == states.SUCCEEDED:
                _log.info("save point %s is in %s", begun.savepoint_id, folder)
                return True
            if answer.code != 0 or state not in (states.PENDING, states.RUNNING):
                _log.error(
                    "save point %s failed: state %d, code %d, %s",
                    *(begun.savepoint_id, state, answer.code, answer.message or "no message"),
                )
                return False
            left = deadline - self._clock()
            if left <= 0:
                _log.error("save point %s did not finish within %s", begun.savepoint_id, timeout)
                return False
            self._sleep(min(POLL_EVERY.total_seconds(), left))

    def close(self) -> None:
        """Close the connections. A later call makes a new one."""
        with self._lock:
            channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: str, request: Any, response: Any) -> Any | None:
        """The answer of the master; None, and a line in the log, where there is none."""
        address = application_master_address(self._environ)
        if address is None:
            if method == "kill":
                _log.info("Current framework doesn't support kill. Ignore killing...")
            else:
                _log.info("no application master: ignoring the request to %s", method)
            return None
        grpc = _import_grpc()
        try:
            call = self._channel(address).unary_unary(
                f"/primus.AppMasterService/{method}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=response.FromString,
            )
            return call(request, timeout=CALL_TIMEOUT.total_seconds())
        except (grpc.RpcError, ValueError) as error:  # ValueError: another thread closed the channel
            _log.error("the application master at %s did not %s: %s", address, method, _told(error))
            return None

    def _channel(self, address: str) -> Any:
        with self._lock:
            if address not in self._channels:
                # Primus offers neither certificates nor tokens.
                self._channels[address] = grpc_channel(address, Guard())
            return self._channels[address]


def _told(error: Any) -> str:
    code, details = getattr(error, "code", None), getattr(error, "details", None)
    return f"{code()}: {details()}" if code and details else str(error)


def _milliseconds(duration: timedelta) -> int:
    return duration // timedelta(milliseconds=1)


def _import_grpc() -> Any:
    with optional_package("grpcio", "grpc", "talking to the application master", "grpc"):
        import grpc  # type: ignore[import-untyped]
    return grpc
