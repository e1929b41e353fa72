"""The control server: halt, resume, save and look at a running job, from a shell or a scheduler.

The service is gRPC's `Controller` (proto/controller.proto). Where it listens is in the file
`controller_server_addr.txt` of the model directory for as long as the job runs, so that a client
that knows the directory can make the call:

    with ControlClient(model_dir) as job:
        job.save_checkpoint()
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from google.protobuf.message import Message  # type: ignore[import-untyped]

from monolith import concurrency, filesystem
from monolith.cluster.run_token import is_guarded, read_token
from monolith.cluster.security import (
    MESSAGE_WITHIN,
    SecurityConfig,
    add_grpc_port,
    grpc_channel,
    grpc_interceptors,
    guard_caller,
    guard_listener,
)
from monolith.concurrency import Future, ThreadPoolExecutor, wait
from monolith.config import Secret
from monolith.errors import (
    BarrierAlreadyPlacedError,
    ConfigError,
    FileMissingError,
    ListenError,
    MonolithError,
    ProfilerBusyError,
    RequestError,
    RetryableError,
    TrainingError,
)
from monolith.sync.publish_messages import PublishOrder, PublishStatus, ShardPublishStatus, operator_order
from monolith.train.hook import Hook, TrainingRun
from monolith.train.hooks.barrier import Barrier, unblocked_indices
from monolith.train.hooks.profiling import MOST_SECONDS, Trace, Tracer
from monolith.wire import controller_pb2 as wire
from monolith.wire.grpc_ports import import_grpc
from monolith.wire.messages import read_message, write_message
from monolith.wire.ports import ConnectionGuard, Limits

_log = logging.getLogger(__name__)

ADDRESS_FILE = "controller_server_addr.txt"
TOKEN_FILE = "controller_server_token"
GRACE_SECONDS = 20.0
_SERVICE = "Controller"
_THREADS = 4
_LOOK_EVERY = 0.5
"""Seconds between two looks at the connections of the port."""
_LONGEST_REQUEST = 64 << 10
"""Bytes; none of the requests has much in it."""
_LOOK_SECONDS = 0.2

_METHODS: dict[str, tuple[type[Message], type[Message]]] = {
    "StopTraining": (wire.StopTrainingRequest, wire.StopTrainingResponse),
    "ResumeTraining": (wire.ResumeTrainingRequest, wire.ResumeTrainingResponse),
    "GetBlockStatus": (wire.GetBlockStatusRequest, wire.GetBlockStatusResponse),
    "SaveCheckpoint": (wire.SaveCheckpointRequest, wire.SaveCheckpointResponse),
    "GetTrainingStatus": (wire.GetTrainingStatusRequest, wire.GetTrainingStatusResponse),
    "Profile": (wire.ProfileRequest, wire.ProfileResponse),
    "Publish": (wire.PublishRequest, wire.PublishResponse),
}

Obey = Callable[[PublishOrder], Sequence[ShardPublishStatus]]
"""Has all who hold rows do something with their publishing, and says where each stands."""


Call = Callable[[Any, Any], Message]
"""Answers a request; the second argument is gRPC's context of the call."""


class ControlServer:
    """Serves some calls of `Controller`, from `start` to `close`.

    Args:
        calls: By name, what answers them.
        tracer: Profiles this process when asked; None refuses to.
        address: host:port to listen on; port 0 is any free one. Only this machine by default.
        security: Certificates and the token that callers must present. Without, only an address of this
            machine is listened on, and a token is made: callers find it in the model_dir, in a file that only
            this user can read, the same for all processes of the run.
        waiting: How many callers may wait for something at a time.
        message_within: Seconds that a call may take for its message.
    """

    def __init__(
        self,
        calls: Mapping[str, Call],
        *,
        tracer: Tracer | None = None,
        address: str = "127.0.0.1:0",
        security: SecurityConfig | None = None,
        grace: float = GRACE_SECONDS,
        waiting: int = 1,
        message_within: float = MESSAGE_WITHIN,
    ) -> None:
        self._calls = dict(calls)
        if tracer is not None:
            self._calls["Profile"] = lambda request, context: self._profile(tracer, request, context)
        self._listen_on = address
        self._security = SecurityConfig() if security is None else security
        self._grace = grace
        self._waiting = waiting
        self._message_within = message_within
        self._server: Any = None
        self._doorkeeper: ConnectionGuard | None = None
        self.closing = concurrency.Event()
        """Set when calls that wait should give up."""
        self.address: str | None = None
        """host:port while it serves."""

    def start(self, model_dir: str = "") -> None:
        """Serve from now on.

        Args:
            model_dir: Where callers find a token that is made.

        Raises:
            ListenError: The port is taken.
            ConfigError: Others can reach the address, and nothing is demanded of them.
        """
        grpc = import_grpc("grpc", "controlling a running job")
        guard = guard_listener(self._listen_on, self._security)
        if guard.token is None and not guard.uses_tls:
            guard = replace(guard, token=control_token(model_dir))
        self.closing.clear()
        server = grpc.server(
            # A caller that waits for a save or a trace occupies a thread: some are left for other calls.
            ThreadPoolExecutor(self._waiting + _THREADS, thread_name_prefix="control-server"),
            interceptors=grpc_interceptors(guard, self._message_within, self._admit),
            options=(
                ("grpc.so_reuseport", 0),  # a taken port is an error, not a port for two
                ("grpc.max_receive_message_length", _LONGEST_REQUEST),
            ),
        )
        server.add_generic_rpc_handlers((self._handlers(grpc),))
        try:
            port = add_grpc_port(server, self._listen_on, guard)
        except ListenError as cause:
            raise ListenError(
                f"cannot serve the controller on {self._listen_on}: {cause}. Choose an address of this "
                "machine and a free port, or port 0."
            ) from cause
        server.start()
        self._server = server
        self._doorkeeper = ConnectionGuard(port, Limits(), bounds_bytes=False, every=_LOOK_EVERY)
        self.address = f"{self._listen_on.rpartition(':')[0]}:{port}"
        _log.info("control server listens on %s", self.address)

    def close(self) -> None:
        """Let calls finish that are under way. Closing again does nothing."""
        self.closing.set()
        self.address = None
        if self._doorkeeper is not None:
            self._doorkeeper.close()
            self._doorkeeper = None
        if self._server is not None:
            self._server.stop(self._grace).wait()
            self._server = None

    def _admit(self, peer: str) -> None:
        if self._doorkeeper is not None:
            self._doorkeeper.admit(peer)

    def _profile(self, tracer: Tracer, request: Any, context: Any) -> Message:
        try:
            trace = tracer.trace(
                steps=request.steps,
                seconds=request.seconds,
                given_up=lambda: self.closing.is_set() or not context.is_active(),
            )
        except ProfilerBusyError as error:
            raise _RefusedError("ALREADY_EXISTS", str(error)) from error
        except ConfigError as error:
            raise _RefusedError("INVALID_ARGUMENT", str(error)) from error
        return wire.ProfileResponse(path=trace.path, steps=trace.steps, seconds=trace.seconds)

    def _handlers(self, grpc: Any) -> Any:
        def method(answer: Call) -> Call:
            def call(request: Message, context: Any) -> Message:
                try:
                    return answer(request, context)
                except _RefusedError as error:
                    context.abort(getattr(grpc.StatusCode, error.code), str(error))
                    raise AssertionError("abort raises") from error
                except Exception as error:  # whatever it is, the server stays up, and its log has the rest
                    number = concurrency.token_hex(4)
                    _log.exception("the controller failed (error %s)", number)
                    context.abort(grpc.StatusCode.INTERNAL, f"{_said(error)} (error {number})")
                    raise AssertionError("abort raises") from error

            return call

        return grpc.method_handlers_generic_handler(
            _SERVICE,
            {
                name: grpc.unary_unary_rpc_method_handler(
                    method(answer),
                    request_deserializer=_METHODS[name][0].FromString,
                    response_serializer=_METHODS[name][1].SerializeToString,
                )
                for name, answer in self._calls.items()
            },
        )


class ControlServerHook(Hook):
    """Serves `Controller` while the run lasts.

    Args:
        barrier: Placed to halt training; a `BarrierHook` makes the run obey it, and should call
            `SaveHook.before_step` while it waits, or a halted job cannot be saved.
        trigger_save: `SaveHook.trigger_save`; called on a thread of the server.
        publish: Answers what is asked of publishing; None if the run publishes nothing.
        tracer, address, security, grace: As for `ControlServer`.
        limits: What one caller may ask for.
    """

    def __init__(
        self,
        barrier: Barrier,
        trigger_save: Callable[[], Future[str | None]],
        *,
        tracer: Tracer | None = None,
        publish: Obey | None = None,
        address: str = "127.0.0.1:0",
        security: SecurityConfig | None = None,
        grace: float = GRACE_SECONDS,
        limits: Limits | None = None,
    ) -> None:
        self._barrier = barrier
        self._trigger_save = trigger_save
        self._limits = limits or Limits()
        self._saves = concurrency.BoundedSemaphore(self._limits.saves)
        self._run: TrainingRun | None = None
        self._path: str | None = None
        calls: dict[str, Call] = {
            "StopTraining": lambda *_: self._stop(),
            "ResumeTraining": lambda *_: self._resume(),
            "GetBlockStatus": lambda *_: self._block_status(),
            "SaveCheckpoint": lambda _, context: self._save_for_few(context),
            "GetTrainingStatus": lambda *_: self._training_status(),
            "Publish": lambda request, _: _publish(publish, request),
        }
        self._server = ControlServer(
            calls,
            tracer=tracer,
            address=address,
            security=security,
            grace=grace,
            waiting=self._limits.saves + 1,
        )

    @property
    def address(self) -> str | None:
        """host:port while it serves."""
        return self._server.address

    def after_create(self, run: TrainingRun) -> None:
        if self.address is not None:
            return
        self._run = run
        if run.model_dir:
            filesystem.make_dirs(run.model_dir)
        self._server.start(run.model_dir)
        if run.model_dir:
            self._path = filesystem.join(run.model_dir, ADDRESS_FILE)
            with filesystem.atomic_write(self._path) as file:
                file.write(str(self.address).encode())

    def close(self) -> None:
        """Take the address back, and let calls finish that are under way."""
        self._server.closing.set()
        try:
            if self._path is not None:
                filesystem.remove(self._path)
        finally:
            self._path = None
            self._server.close()

    def _training_status(self) -> wire.GetTrainingStatusResponse:
        assert self._run is not None  # who serves has been created
        return wire.GetTrainingStatusResponse(global_step=self._run.step)

    def _stop(self) -> wire.StopTrainingResponse:
        try:
            self._barrier.place()
        except BarrierAlreadyPlacedError as error:
            raise _RefusedError("ALREADY_EXISTS", str(error)) from error
        return wire.StopTrainingResponse()

    def _resume(self) -> wire.ResumeTrainingResponse:
        self._barrier.remove()
        return wire.ResumeTrainingResponse()

    def _block_status(self) -> wire.GetBlockStatusResponse:
        return wire.GetBlockStatusResponse(
            blocked_indices=self._barrier.blocked_indices(),
            unblocked_indices=unblocked_indices(self._barrier),
        )

    def _save_for_few(self, context: Any) -> wire.SaveCheckpointResponse:
        if not self._saves.acquire(blocking=False):
            raise _RefusedError(
                "RESOURCE_EXHAUSTED",
                f"{self._limits.saves} callers wait for a checkpoint, the most that limits.saves allows; ask "
                "again when one is saved",
            )
        try:
            return self._save(context)
        finally:
            self._saves.release()

    def _save(self, context: Any) -> wire.SaveCheckpointResponse:
        try:
            saved = self._trigger_save()
            # Not `result(timeout)`, whose TimeoutError may be the save's own, or come as the save is done.
            while not wait([saved], _LOOK_SECONDS).done:
                given_up = self._server.closing.is_set() or not context.is_active()
                if given_up and not saved.done():
                    raise _RefusedError("UNAVAILABLE", "the run ended before it saved")
            saved.result()
            return wire.SaveCheckpointResponse()
        except _RefusedError:
            raise
        except Exception as error:
            _log.exception("saving a checkpoint on request failed")
            raise _RefusedError("INTERNAL", f"cannot save: {type(error).__name__}: {_said(error)}") from error


def _publish(obey: Obey | None, request: Any) -> wire.PublishResponse:
    try:
        order = operator_order(request.action, reason=request.reason, version=request.version)
    except RequestError as error:
        raise _RefusedError("INVALID_ARGUMENT", str(error)) from error
    if obey is None:
        raise _RefusedError("FAILED_PRECONDITION", "this run publishes nothing; start it with publish.to")
    try:
        shares = obey(order)
    except RequestError as error:
        raise _RefusedError("FAILED_PRECONDITION", str(error)) from error
    except RetryableError as error:
        raise _RefusedError("UNAVAILABLE", str(error)) from error
    return wire.PublishResponse(shares=json.dumps(write_message(PublishStatus(tuple(shares)))))


def control_token(model_dir: str) -> Secret:
    """Return a token that this user's processes share in their model_dir; without a local model_dir, a token
    that no other process knows."""
    if not model_dir or filesystem.is_remote(model_dir):
        _log.warning(
            "this run cannot be controlled: it has no token, and other users could read one in %r. Start it "
            "with security.token_file.",
            model_dir,
        )
        return Secret(concurrency.token_hex(32))
    return read_token(Path(model_dir) / TOKEN_FILE, make=True)


def _said(error: Exception) -> str:
    """Return what a caller sees of an error: no path, and nothing of one that was not raised on purpose."""
    if isinstance(error, OSError) and not isinstance(error, MonolithError):
        return error.strerror or str(error)
    return str(error) if isinstance(error, MonolithError) else "see the log of the run"


class _RefusedError(Exception):
    """A call that ends in an error, a name of gRPC's status codes; never leaves the server as such."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class BlockStatus:
    """Which workers wait at the barrier, and which do not. The chief, 0, waits while there is one."""

    blocked: tuple[int, ...]
    unblocked: tuple[int, ...]


class ControlClient:
    """Calls the control server of a running job; close it, or use it in a `with`.

    Args:
        model_dir: Of the job: it says there where it listens.
        address: host:port of another process of the job than its chief, which only profiles.
        security: The certificates and the token that the server wants to see; by default the token that
            a job of this user left in the model_dir.
        timeout: Seconds to wait for an answer; a save has a limit of its own.

    Raises:
        TrainingError: No job says that it runs there. Also raised by calls that get no answer, or an error.
        ConfigError: By calls: the server refuses the token.
    """

    def __init__(
        self,
        model_dir: str,
        *,
        address: str | None = None,
        security: SecurityConfig | None = None,
        timeout: float = 30.0,
    ) -> None:
        import_grpc("grpc", "controlling a running job")
        self.address = _chief_address(model_dir) if address is None else address
        self._timeout = timeout
        security = SecurityConfig() if security is None else security
        token = Path(model_dir) / TOKEN_FILE
        if model_dir and not is_guarded(security) and not filesystem.is_remote(model_dir) and token.exists():
            security = replace(security, token=read_token(token))
        guard = guard_caller(security)
        self._channel = grpc_channel(self.address, guard)

    def stop_training(self) -> None:
        """Halt before the next step.

        Raises:
            BarrierAlreadyPlacedError: The job is halted already.
        """
        self._call("StopTraining")

    def resume_training(self) -> None:
        self._call("ResumeTraining")

    def block_status(self) -> BlockStatus:
        status = self._call("GetBlockStatus")
        return BlockStatus(tuple(status.blocked_indices), tuple(status.unblocked_indices))

    def save_checkpoint(self, timeout: float | None = None) -> None:
        """Save, and return when the checkpoint is on disk."""
        self._call("SaveCheckpoint", timeout=timeout)

    def global_step(self) -> int:
        return int(self._call("GetTrainingStatus").global_step)

    def profile(self, *, steps: int = 0, seconds: float = 10.0) -> Trace:
        """Record what the process does, and return when the trace is on its disk.

        Args:
            steps: Ends the trace earlier; 0 does not count them.

        Raises:
            ProfilerBusyError: It is being profiled already.
            ConfigError: More is asked for than a trace may have.
        """
        found = self._call("Profile", {"steps": steps, "seconds": seconds}, timeout=2 * MOST_SECONDS)
        return Trace(found.path, int(found.steps), found.seconds)

    def publish(self, action: str, *, reason: str = "", version: str = "") -> Sequence[ShardPublishStatus]:
        """Have the run hold, resume or take back what it publishes, or say how that stands.

        Raises:
            ConfigError: The order makes no sense.
            TrainingError: The run publishes nothing, or a holder of rows could not be told.
        """
        found = self._call("Publish", {"action": action, "reason": reason, "version": version})
        return read_message(PublishStatus, json.loads(found.shares)).shares

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, name: str, fields: Mapping[str, Any] | None = None, **options: Any) -> Any:
        grpc = import_grpc("grpc", "controlling a running job")
        request, response = _METHODS[name]
        method = self._channel.unary_unary(
            f"/{_SERVICE}/{name}",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        try:
            return method(request(**(fields or {})), **{"timeout": self._timeout, **options})
        except grpc.RpcError as cause:
            _translate(grpc, name, self.address, cause)


def _chief_address(model_dir: str) -> str:
    path = filesystem.join(model_dir, ADDRESS_FILE)
    try:
        return filesystem.read_bytes(path).decode().strip()
    except FileMissingError as cause:
        raise TrainingError(
            f"cannot find the job of {model_dir}: there is no {path}. It is not running, or has no "
            "control server."
        ) from cause


def _translate(grpc: Any, name: str, address: str, cause: Any) -> NoReturn:
    code, details = cause.code(), cause.details()
    if code == grpc.StatusCode.ALREADY_EXISTS:
        kind = ProfilerBusyError if name == "Profile" else BarrierAlreadyPlacedError
        raise kind(details) from cause
    if code == grpc.StatusCode.INVALID_ARGUMENT:
        raise ConfigError(details) from cause
    if code == grpc.StatusCode.UNAUTHENTICATED:
        raise ConfigError(f"{address} refuses {name}: {details}. Give the token of the job.") from cause
    gone = code == grpc.StatusCode.UNAVAILABLE and "connect" in details
    hint = (
        ". No process listens there: the job has ended, was killed, or is being started again" if gone else ""
    )
    raise TrainingError(f"{name} at {address} failed: {code.name}: {details}{hint}") from cause
