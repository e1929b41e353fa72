"""The Open Inference Protocol over gRPC.

Messages are read and written here and nowhere else. A thread for each request, and not an event loop: on one
core, Python's loop for gRPC took a quarter more time for a request (docs/decisions/0040).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import cache
from itertools import islice
from typing import Any, NoReturn

import numpy as np

from monolith import __version__, concurrency, native
from monolith.cluster.security import HEADER, Guard, add_grpc_port, grpc_interceptors
from monolith.concurrency import ThreadPoolExecutor
from monolith.errors import (
    ForbiddenError,
    MonolithError,
    RequestError,
    RequestTooLargeError,
    UnavailableError,
    UnknownModelError,
)
from monolith.serve.item_index import TopK
from monolith.serve.server.batching import JSON_COST, Quotas
from monolith.serve.server.inference import (
    GRPC_STATUS,
    INTERNAL,
    NO_CONTROL,
    NO_CONTROL_TOKEN,
    NO_REGION_TOKEN,
    PLATFORM,
    SERVER_NAME,
    SPLIT,
    TIMEOUT,
    UNLOAD_PARAMETERS,
    VERSION,
    Inference,
    InferReply,
    InferRequest,
    PackedInputs,
    Parameter,
    check_parameters,
    code_of,
    read_filter,
    read_priority,
    read_split_key,
    read_timeout,
    read_version,
)
from monolith.serve.server.processes import ServerProcesses
from monolith.serve.server.shared_memory import (
    NO_CUDA,
    PARAMETERS,
    RegionSlice,
    RegionStatus,
    SharedInputs,
)
from monolith.serve.server.spans import TRACE_HEADERS
from monolith.serve.server.tensors import WireTensor, listed_tensor, raw_bytes, raw_tensor
from monolith.wire.grpc_ports import import_grpc
from monolith.wire.open_inference import (
    BF16,
    BINARY_SIZE,
    CONTENTS,
    FILTER,
    PRIORITY,
    RETRY_HEADER,
    SERVICE,
    SPLIT_KEY,
    TOP_K,
    message_pool,
    message_types,
    packed_infer_type,
    service_methods,
)
from monolith.wire.ports import ConnectionGuard, Limits

_FIELDS = sorted(set(CONTENTS.values()))
_LOOK_EVERY = 0.5
"""Seconds between two looks at the connections of the port."""
_MOST_FIELDS = 4096
"""Inputs, contents and outputs of a request that is longer than the next."""
_MOST_DESCRIBED = 64 << 10
"""Bytes that describe the inputs of a request; more of them are typed contents."""
_PROBES = ("ServerLive", "ServerReady")
HEALTH = "grpc.health.v1.Health"
REFLECTION = "grpc.reflection.v1.ServerReflection"
_RETRY_AFTER_MS = {"overloaded": "1000", "unavailable": "1000", "too_large": "-1"}
"""When a client may retry; too large a request has the status of too many, and is not to be sent again."""


class GrpcPort:
    """Answers gRPC until closed.

    Args:
        inference: Answers.
        address: host:port, with port 0 for any free one; or unix:path.
        guard: What callers must show.
        peers: Other processes that serve the same models, and load and unload with this one.
        quotas: Counts what requests hold.
    """

    def __init__(
        self, inference: Inference, address: str, guard: Guard, peers: ServerProcesses, quotas: Quotas
    ) -> None:
        grpc = import_grpc("serve", "serving over gRPC")
        config = inference.config
        guard = guard.for_role("predict")
        self._control = guard.for_role("control")
        self._inference = inference
        self._peers = peers
        self._quotas = quotas
        self._most_typed = min(config.limits.json_bytes, config.limits.request_bytes)
        self._working = concurrency.BoundedSemaphore(config.threads)
        self._grpc = grpc
        self._doorkeeper: ConnectionGuard | None = None
        self._types = message_types()
        self._packed = packed_infer_type()
        # gRPC waits for the message of a call on a thread, so there is one for each call that may be open:
        # calls without a message block no thread of other calls. `_working` bounds the calls that compute.
        self._threads = ThreadPoolExecutor(config.limits.concurrency, thread_name_prefix="grpc")
        self._server = grpc.server(
            self._threads,
            interceptors=grpc_interceptors(
                guard,
                config.limits.read_timeout.total_seconds(),
                self._admit,
                open_to_all=(f"/{HEALTH}/Check",),
            ),
            maximum_concurrent_rpcs=config.limits.concurrency,
            options=[
                ("grpc.max_receive_message_length", config.limits.request_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", int(peers.share_port)),
                ("grpc.max_metadata_size", 64 << 10),
                ("grpc.server_handshake_timeout_ms", int(config.limits.read_timeout.total_seconds() * 1e3)),
                ("grpc.http2.max_ping_strikes", 0),
            ],
        )
        self._server.add_generic_rpc_handlers((self._handlers(),))
        self._answer_health()
        self._reflect()
        self.port = add_grpc_port(self._server, address, guard)
        self._server.start()
        if not address.startswith("unix:"):  # the shared port bounds its connections itself
            limits = Limits(
                connections=config.limits.connections,
                peer_connections=config.limits.peer_connections,
                admit_within=config.limits.read_timeout,
            )
            self._doorkeeper = ConnectionGuard(self.port, limits, bounds_bytes=False, every=_LOOK_EVERY)

    def close(self, grace: float) -> None:
        """Refuse new requests and wait so many seconds for those in flight."""
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        self._server.stop(grace).wait()
        self._threads.shutdown(wait=False)

    def _admit(self, peer: str) -> None:
        if self._doorkeeper is not None:
            self._doorkeeper.admit(peer)

    def _infer_packed(self, data: bytes, context: Any) -> bytes:
        """Answer a request. The usual one is read by the core; any other is decoded by protobuf."""
        usual = native.read_grpc_request(data)
        if usual is not None and (not usual.typed or len(data) <= self._most_typed):
            outputs: _Outputs = [(name, None) for name, _ in usual.outputs]
            return self._infer_inputs((usual.model, usual.version, usual.id), outputs, usual, data, context)
        if len(data) > _MOST_DESCRIBED and not _has_few_fields(data):
            many = RequestTooLargeError(f"the message has more than {_MOST_FIELDS} inputs and outputs")
            self._inference.refuse("grpc", many)
            self._abort(context, many)
        try:
            packed = self._packed.FromString(data)
        except Exception:
            return self._infer_whole(data, context)  # which says what is wrong
        inputs, contents = packed.inputs, packed.raw_input_contents
        if packed.parameters or not contents or len(inputs) != len(contents):
            return self._infer_whole(data, context)
        if len(data) > _MOST_DESCRIBED and sum(map(len, inputs)) > _MOST_DESCRIBED:
            return self._infer_whole(data, context)
        kind = self._types.ModelInferRequest.InferRequestedOutputTensor
        try:
            outputs = self._outputs(kind.FromString(one) for one in packed.outputs)
        except Exception as error:
            self._abort(context, error)
        target = (packed.model_name, packed.model_version, packed.id)
        return self._infer_inputs(target, outputs, None, data, context)

    def _infer_inputs(
        self,
        target: tuple[str, str, str],
        outputs: _Outputs,
        usual: native.WireRequest | None,
        data: bytes,
        context: Any,
    ) -> bytes:
        """Answer a request whose inputs are decoded when its model is known.

        Args:
            target: The model, its version, and the ID of the request.
            usual: The request as the core has read it; None if it is unusual.
        """
        model, version, request_id = target
        try:
            asked = InferRequest(
                model=model,
                version=version,
                id=request_id,
                tensors=PackedInputs(usual, lambda: self._sent_tensors(data)),
                outputs=[name for name, _ in outputs],
                shared_outputs=_shared(outputs),
                timeout=context.time_remaining(),
                transport="grpc",
                trace=self._trace(context),
            )
            answered: bytes = self._reply(self._inference.infer(asked)).SerializeToString()
        except Exception as error:
            self._abort(context, error)
        return answered

    def _sent_tensors(self, data: bytes) -> list[WireTensor]:
        """Return the inputs of a request that has as many raw contents: none can be in shared memory."""
        with self._quotas.admit("") as reservation:
            shared = SharedInputs(self._inference.shared_memory, reservation)
            return _tensors(self._types.ModelInferRequest.FromString(data), shared)

    def _handlers(self) -> Any:
        methods = service_methods()
        answers = {name: self._method(getattr(self, f"_{_snake(name)}"), *methods[name]) for name in methods}
        self._infer_whole, answers["ModelInfer"] = answers["ModelInfer"], self._infer_packed
        handlers = {
            name: self._grpc.unary_unary_rpc_method_handler(
                answer if name in _PROBES else self._within_quotas(answer)
            )
            for name, answer in answers.items()
        }
        return self._grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _within_quotas(self, answer: Callable[[bytes, Any], bytes]) -> Callable[[bytes, Any], bytes]:
        def handle(data: bytes, context: Any) -> bytes:
            host, _, _ = context.peer().rpartition(":")
            try:
                # Over the shared port, all peers look like one; its connections are counted there.
                reservation = self._quotas.admit("" if host.startswith("unix") else host)
            except Exception as error:
                self._inference.refuse("grpc", error)
                self._abort(context, error)
            with reservation:
                try:
                    reservation.add(len(data))
                except Exception as error:
                    self._inference.refuse("grpc", error)
                    self._abort(context, error)
                with self._working:
                    return answer(data, context)

        return handle

    def _answer_health(self) -> None:
        """Answer `grpc.health.v1`, as orchestrators and load balancers ask it, if its package is installed.

        There is no `Watch`: each caller would hold a thread. Clients of gRPC that ask for it do without.
        """
        if (health_pb2 := _import_health()) is None:
            return
        kind = health_pb2.HealthCheckResponse

        def check(request: Any, context: Any) -> Any:
            if request.service not in ("", SERVICE):
                context.abort(
                    self._grpc.StatusCode.NOT_FOUND, f"there is no service {request.service[:80]!r}"
                )
            return kind(status=kind.SERVING if self._inference.is_ready else kind.NOT_SERVING)

        handler = self._grpc.unary_unary_rpc_method_handler(
            check, health_pb2.HealthCheckRequest.FromString, kind.SerializeToString
        )
        self._server.add_generic_rpc_handlers(
            (self._grpc.method_handlers_generic_handler(HEALTH, {"Check": handler}),)
        )

    def _reflect(self) -> None:
        """Let tools such as grpcurl ask which methods there are, if the package for it is installed.

        It has v1alpha. The messages of v1 are the same under another name.
        """
        try:
            from grpc_reflection.v1alpha import (  # type: ignore[import-untyped]
                reflection,
                reflection_pb2,
            )
        except ModuleNotFoundError:
            return
        pool, names = _reflected()
        handler = self._grpc.stream_stream_rpc_method_handler(
            reflection.ReflectionServicer(names, pool=pool).ServerReflectionInfo,
            reflection_pb2.ServerReflectionRequest.FromString,
            reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        for name in (REFLECTION, reflection.SERVICE_NAME):
            self._server.add_generic_rpc_handlers(
                (self._grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler}),)
            )

    def _method(
        self, answer: Callable[[Any, Any], Any], kind: Any, reply: Any
    ) -> Callable[[bytes, Any], bytes]:
        """Return a handler of bytes: gRPC itself would call a message that cannot be read our mistake."""
        read, write = kind.FromString, reply.SerializeToString

        def handle(data: bytes, context: Any) -> bytes:
            if len(data) > self._most_typed:
                large = RequestTooLargeError(
                    f"the message has {len(data)} bytes; without raw_input_contents, or with parameters, the "
                    f"most are {self._most_typed} (--max-json-bytes). Send raw contents, or several requests."
                )
                self._inference.refuse("grpc", large)
                self._abort(context, large)
            with self._quotas.admit("") as reservation:
                try:
                    reservation.add(JSON_COST * len(data))
                except UnavailableError as busy:
                    self._inference.refuse("grpc", busy)
                    self._abort(context, busy)
                try:
                    request = read(data)
                except Exception as cause:
                    error = RequestError(f"the message is no {kind.DESCRIPTOR.full_name}: {cause}")
                    self._inference.refuse("grpc", error)
                    self._abort(context, error)
                try:
                    answered: bytes = write(answer(request, context))
                except Exception as error:
                    if kind is not self._types.ModelInferRequest:  # of which `Inference` has taken note
                        self._inference.refuse("grpc", error)
                    self._abort(context, error)
                return answered

        return handle

    def _abort(self, context: Any, error: Exception) -> NoReturn:
        code = code_of(error)
        text = INTERNAL if code == "internal" else str(error)
        if (wait := _RETRY_AFTER_MS.get(code)) is not None:
            context.set_trailing_metadata(((RETRY_HEADER, wait),))
        context.abort(getattr(self._grpc.StatusCode, GRPC_STATUS[code]), text)
        raise AssertionError("abort returned")

    def _server_live(self, request: Any, context: Any) -> Any:  # noqa: ARG002
        return self._types.ServerLiveResponse(live=True)

    def _server_ready(self, request: Any, context: Any) -> Any:  # noqa: ARG002
        return self._types.ServerReadyResponse(ready=self._inference.is_ready)

    def _model_ready(self, request: Any, context: Any) -> Any:  # noqa: ARG002
        # Triton answers "not ready" for a model that it does not know, and its clients rely on it.
        try:
            ready = self._inference.has_ready(request.name, request.version)
        except UnknownModelError:
            ready = False
        return self._types.ModelReadyResponse(ready=ready)

    def _model_statistics(self, request: Any, context: Any) -> Any:  # noqa: ARG002
        found = self._inference.statistics(request.name, request.version)
        return self._types.ModelStatisticsResponse(model_stats=found)

    def _server_metadata(self, request: Any, context: Any) -> Any:  # noqa: ARG002
        return self._types.ServerMetadataResponse(
            name=SERVER_NAME, version=__version__, extensions=self._inference.extensions
        )

    def _model_metadata(self, request: Any, context: Any) -> Any:  # noqa: ARG002
        signature, versions, _ = self._inference.describe(request.name, request.version)
        kind = self._types.ModelMetadataResponse
        return kind(
            name=request.name,
            versions=versions,
            platform=PLATFORM,
            inputs=[
                kind.TensorMetadata(name=one.name, datatype=one.datatype, shape=one.shape)
                for one in signature.inputs
            ],
            outputs=[
                kind.TensorMetadata(name=one.name, datatype=one.datatype, shape=one.shape)
                for one in signature.outputs
            ],
        )

    def _repository_index(self, request: Any, context: Any) -> Any:  # noqa: ARG002
        kind = self._types.RepositoryIndexResponse
        return kind(
            models=[
                kind.ModelIndex(name=one.name, version=one.version, state=one.state, reason=one.reason)
                for one in self._inference.index(request.ready)
            ]
        )

    def _repository_model_load(self, request: Any, context: Any) -> Any:
        self._check_control(context)
        check_parameters("a load", request.parameters, (SPLIT,))
        if SPLIT in request.parameters:
            targets = _parameter(request.parameters, SPLIT, "")
            if not isinstance(targets, str):
                raise RequestError(f"the parameter {SPLIT!r} must be a text, MODEL[/VERSION][:WEIGHT],...")
            self._inference.set_split(request.model_name, targets)
            self._peers.set_split(request.model_name, targets)
        else:
            self._inference.repository.load(request.model_name)
            self._peers.tell("load", request.model_name)
        return self._types.RepositoryModelLoadResponse()

    def _repository_model_unload(self, request: Any, context: Any) -> Any:
        self._check_control(context)
        check_parameters("an unload", request.parameters, UNLOAD_PARAMETERS)
        version = read_version(_parameter(request.parameters, VERSION, ""))
        self._inference.repository.unload(request.model_name, version)
        self._peers.tell("unload", request.model_name, {VERSION: version} if version else None)
        return self._types.RepositoryModelUnloadResponse()

    def _check_control(self, context: Any) -> None:
        if not self._inference.config.allow_control:
            raise ForbiddenError(NO_CONTROL)
        if not self._has_control(context):
            raise ForbiddenError(NO_CONTROL_TOKEN)

    def _has_control(self, context: Any) -> bool:
        sent = [value for key, value in context.invocation_metadata() if key == HEADER]
        return len(sent) <= 1 and self._control.admits(sent[0] if sent else "")

    def _system_shared_memory_status(self, request: Any, context: Any) -> Any:  # noqa: ARG002
        answer = self._types.SystemSharedMemoryStatusResponse()
        for one in self._inference.shared_memory.status(request.name):
            region = answer.regions[one.name]
            region.name, region.key = one.name, one.key
            region.offset, region.byte_size = one.offset, one.byte_size
        return answer

    def _system_shared_memory_register(self, request: Any, context: Any) -> Any:
        if not self._has_control(context):
            raise ForbiddenError(NO_REGION_TOKEN)
        one = RegionStatus(request.name, request.key, request.offset, request.byte_size)
        self._inference.shared_memory.register(one)
        self._peers.tell_regions("register", one.name, asdict(one))
        return self._types.SystemSharedMemoryRegisterResponse()

    def _system_shared_memory_unregister(self, request: Any, context: Any) -> Any:
        if not self._has_control(context):
            raise ForbiddenError(NO_REGION_TOKEN)
        self._inference.shared_memory.unregister(request.name)
        self._peers.tell_regions("unregister", request.name)
        return self._types.SystemSharedMemoryUnregisterResponse()

    def _cuda_shared_memory_status(self, request: Any, context: Any) -> Any:  # noqa: ARG002
        return self._types.CudaSharedMemoryStatusResponse()

    def _cuda_shared_memory_register(self, request: Any, context: Any) -> Any:  # noqa: ARG002
        raise RequestError(NO_CUDA)

    def _cuda_shared_memory_unregister(self, request: Any, context: Any) -> Any:  # noqa: ARG002
        # Clients unregister what they may have left there before they begin, of both kinds.
        return self._types.CudaSharedMemoryUnregisterResponse()

    def _model_infer(self, request: Any, context: Any) -> Any:
        with self._quotas.admit("") as reservation:
            shared = SharedInputs(self._inference.shared_memory, reservation)
            return self._reply(self._inference.infer(self._read(request, context, shared)))

    def _read(self, request: Any, context: Any, shared: SharedInputs) -> InferRequest:
        try:
            topk = None
            if TOP_K in request.parameters:
                k: Any = _parameter(request.parameters, TOP_K, 0)
                topk = TopK(k, read_filter(_parameter(request.parameters, FILTER, "{}")))
            known = (TIMEOUT, PRIORITY, SPLIT_KEY, TOP_K, *(() if topk is None else (FILTER,)))
            check_parameters("a request", request.parameters, known)
            outputs = self._outputs(request.outputs)
            return InferRequest(
                model=request.model_name,
                version=request.model_version,
                id=request.id,
                tensors=_tensors(request, shared),
                outputs=[name for name, _ in outputs],
                shared_outputs=_shared(outputs),
                timeout=_timeout(request, context.time_remaining()),
                priority=read_priority(_parameter(request.parameters, PRIORITY, 0)),
                split_key=read_split_key(_parameter(request.parameters, SPLIT_KEY, "")),
                transport="grpc",
                trace=self._trace(context),
                topk=topk,
            )
        except MonolithError as error:
            self._inference.refuse("grpc", error, request.model_name, request.id)
            raise

    def _trace(self, context: Any) -> dict[str, str] | None:
        if not self._inference.records_spans:
            return None
        return {key: value for key, value in context.invocation_metadata() if key in TRACE_HEADERS}

    def _reply(self, reply: InferReply) -> Any:
        kind = self._types.ModelInferResponse
        message = kind(model_name=reply.model, model_version=reply.version, id=reply.id)
        for key, value in reply.parameters.items():
            _set(message.parameters[key], value)
        for tensor in reply.outputs:
            output = message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            # One for each output, as clients find them by their place.
            is_sent = tensor.name not in reply.shared
            message.raw_output_contents.append(raw_bytes(tensor.values) if is_sent else b"")
            for key, value in reply.shared.get(tensor.name, {}).items():
                _set(output.parameters[key], value)
        return message

    def _outputs(self, outputs: Iterable[Any]) -> _Outputs:
        found: _Outputs = []
        for one in outputs:
            what, parameters = f"the output {one.name[:80]!r}", _plain(one.parameters)
            place = self._inference.shared_memory.slice_of(what, parameters)
            check_parameters(what, parameters, () if place is None else PARAMETERS)
            found.append((one.name, place))
        return found


def _has_few_fields(data: bytes) -> bool:
    """Whether a message has no more fields than a request needs, found without decoding it.

    Each field takes 16 bytes or more in memory, and as few as two in a message.
    """
    return sum(1 for _ in islice(_fields(data), _MOST_FIELDS + 1)) <= _MOST_FIELDS


def _fields(data: bytes) -> Iterator[int]:
    """Yield the tags of a message's fields; ends early at one that cannot be read, which decoding refuses."""
    at = 0
    try:
        while at < len(data):
            tag, at = _varint(data, at)
            yield tag
            match tag & 7:
                case 0:
                    _, at = _varint(data, at)
                case 1:
                    at += 8
                case 2:
                    size, at = _varint(data, at)
                    at += size
                case 5:
                    at += 4
                case _:
                    return
    except IndexError:
        return


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at a place of a message, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80 or shift > 63:
            return value, at
        shift += 7


_Outputs = list[tuple[str, RegionSlice | None]]
"""The outputs that a request asks for, and where those are written that are not sent."""


def _shared(outputs: _Outputs) -> dict[str, RegionSlice]:
    return {name: place for name, place in outputs if place is not None}


def _tensors(request: Any, shared: SharedInputs) -> list[WireTensor]:
    """Return the inputs of a request: raw, typed or in shared memory."""
    copies: list[bytes | None] = []
    for one in request.inputs:
        what, parameters = f"the input {one.name[:80]!r}", _plain(one.parameters)
        copies.append(shared.read(what, parameters) if parameters else None)
        # KServe's client sends the size of raw contents here, too, as over HTTP.
        check_parameters(what, parameters, (BINARY_SIZE,) if copies[-1] is None else PARAMETERS)
        if copies[-1] is not None and one.HasField("contents"):
            raise RequestError(f"{what} has contents and is in shared memory; it needs one of both")
    raws, sent = request.raw_input_contents, copies.count(None)
    if raws and len(raws) != sent:
        where = " outside of shared memory" if sent < len(copies) else ""
        raise RequestError(
            f"the request has {sent} inputs{where} and {len(raws)} raw contents; it needs one for each, or "
            "none"
        )
    contents = iter(raws)
    found: list[WireTensor] = []
    for one, copy in zip(request.inputs, copies, strict=True):
        data = next(contents) if copy is None and raws else copy
        size = _parameter(one.parameters, BINARY_SIZE, None)
        if size is not None and (data is None or size != len(data)):
            sent_bytes = "no raw contents" if data is None else f"{len(data)} bytes"
            raise RequestError(
                f"the input {one.name[:80]!r}: {BINARY_SIZE} is {size}, and it has {sent_bytes}"
            )
        found.append(
            _typed_tensor(one) if data is None else raw_tensor(one.name, one.datatype, one.shape, data)
        )
    return found


def _typed_tensor(one: Any) -> WireTensor:
    contents = one.contents
    field = CONTENTS.get(one.datatype)
    if field is None:
        if one.datatype in ("FP16", BF16):
            raise RequestError(f"input {one.name!r}: {one.datatype} is sent raw, in raw_input_contents")
        return raw_tensor(one.name, one.datatype, one.shape, b"")  # says that there is no such datatype
    wrong = [other for other in _FIELDS if other != field and len(getattr(contents, other))]
    if wrong:
        raise RequestError(f"input {one.name!r}: {one.datatype} is sent in {field}, got values in {wrong[0]}")
    values = getattr(contents, field)
    if one.datatype in ("INT8", "INT16", "UINT8", "UINT16"):
        kind = np.iinfo(one.datatype.lower())
        outside = [value for value in values if not kind.min <= value <= kind.max]
        if outside:
            raise RequestError(f"input {one.name!r}: {outside[0]} is too large for {one.datatype}")
    return listed_tensor(one.name, one.datatype, one.shape, values)


def _timeout(request: Any, remaining: float | None) -> float | None:
    """Return the seconds that a caller waits, by its deadline and by the parameter of Triton's clients."""
    asked = read_timeout(_parameter(request.parameters, TIMEOUT, 0))
    return min((one for one in (asked, remaining) if one is not None), default=None)


def _parameter(parameters: Any, name: str, default: object) -> object:
    if name not in parameters:
        return default
    value = parameters[name]
    chosen = value.WhichOneof("parameter_choice")
    return default if chosen is None else getattr(value, chosen)


def _plain(parameters: Any) -> dict[str, object]:
    return {name: _parameter(parameters, name, None) for name in parameters}


def _set(parameter: Any, value: Parameter) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int):
        parameter.int64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.string_param = value


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


@cache
def _reflected() -> tuple[Any, tuple[str, ...]]:
    """Return the descriptors that reflection tells, and the names of the services.

    Made once in a process, which takes some milliseconds: all servers have the same.
    """
    from google.protobuf import (  # type: ignore[import-untyped]
        descriptor_pb2,
        descriptor_pool,
        text_format,
    )
    from grpc_reflection.v1alpha import reflection, reflection_pb2

    health_pb2 = _import_health()
    health = [] if health_pb2 is None else [health_pb2.DESCRIPTOR]
    pool = descriptor_pool.DescriptorPool()
    ours = message_pool().FindFileContainingSymbol(SERVICE)
    for file in (ours, *health, reflection_pb2.DESCRIPTOR):
        copied = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(copied)
        pool.Add(copied)
    renamed = text_format.MessageToString(copied).replace("v1alpha", "v1")
    pool.Add(text_format.Parse(renamed, descriptor_pb2.FileDescriptorProto()))
    return pool, (SERVICE, *([HEALTH] if health else ()), REFLECTION, reflection.SERVICE_NAME)


def _import_health() -> Any | None:
    """Return the messages of `grpc.health.v1`; None if the package is not installed."""
    try:
        from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        return None
    return health_pb2
