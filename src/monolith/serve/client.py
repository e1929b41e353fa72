"""Asking a server of models, over HTTP or gRPC, with rows as a person writes them.

    with open_asker("http://127.0.0.1:8000", guard) as asker:
        asker.ask("clicks", [{"user": "ann", "price": 3.5}])

Works with any server of the Open Inference Protocol: what the model takes is asked of the server.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Protocol, Self
from urllib.parse import quote, urlsplit

import numpy as np

from monolith.cluster.security import HEADER, Guard, grpc_channel
from monolith.errors import (
    ConfigError,
    DeadlineExceededError,
    MissingExtraError,
    OverloadedError,
    RequestError,
    UnavailableError,
    UnknownModelError,
)
from monolith.serve.manifest import SPLITS
from monolith.serve.server.http_bodies import TIMEOUT_HEADER
from monolith.serve.server.tensors import DTYPES, raw_tensor
from monolith.wire.open_inference import SERVICE, message_types, service_methods

_ISO = re.compile(r"\d{4}-\d\d-\d\d")
Row = Mapping[str, Any]
_LARGEST_ANSWER = 1 << 30


@dataclass(frozen=True, slots=True)
class AskedTensor:
    """An input of a model, as its server says."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """What a model said of some rows."""

    model: str
    version: str
    outputs: dict[str, list[Any]]
    """By name: one value, or list of values, for each row."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """What the server said beside: step, watermark, shards that were missing."""
    passed_over: tuple[str, ...] = ()
    """Columns of the rows that the model does not take."""


class Wire(Protocol):
    """One way to reach a server."""

    def models(self) -> list[str]: ...
    def inputs(self, model: str, version: str) -> list[AskedTensor]: ...
    def infer(self, model: str, version: str, inputs: Sequence[Mapping[str, Any]]) -> Answered:
        """Send inputs as the JSON of the protocol has them."""

    def close(self) -> None: ...


class Asker:
    """Asks a server.

    Args:
        wire: How it is reached.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def only_model(self) -> str:
        """Return the name of the model, where the server has one.

        Raises:
            ConfigError: It has several, or none.
        """
        names = self._wire.models()
        if len(names) != 1:
            raise ConfigError(f"the server has {', '.join(names) or 'no models'}; say which with --model")
        return names[0]

    def ask(self, model: str, rows: Sequence[Row], version: str = "") -> Answered:
        """Return what a model says of rows.

        Raises:
            RequestError: A value is not what the model takes, or the server says so.
            UnavailableError: The server cannot be reached, or cannot answer now.
        """
        if not rows:
            raise RequestError("there are no rows to ask with")
        known = self._wire.inputs(model, version)
        given = {name for row in rows for name in row}
        used = [one for one in known if one.name in given]
        if not used:
            takes = ", ".join(one.name for one in known)
            raise RequestError(f"model {model!r} takes {takes}; the rows have {', '.join(sorted(given))}")
        inputs = [tensor for one in used for tensor in tensors_of(one, [row.get(one.name) for row in rows])]
        found = self._wire.infer(model, version, inputs)
        passed_over = tuple(sorted(given - {one.name for one in known}))
        return Answered(found.model, found.version, found.outputs, found.parameters, passed_over)

    def close(self) -> None:
        self._wire.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def tensors_of(one: AskedTensor, values: Sequence[Any]) -> list[dict[str, Any]]:
    """Return a column as inputs of a request: one, or two where rows are lists of several lengths, or none.

    Raises:
        RequestError: A value is of another type than the input.
    """
    if one.datatype == "INT64" and all(_is_time(value) for value in values):
        one = replace(one, datatype="BYTES")  # for the server to take or to refuse
    plain = not any(value is None or isinstance(value, list) for value in values)
    if plain and len(one.shape) == 1:
        column = [_value(one, row, value) for row, value in enumerate(values)]
        return [_input(one.name, one.datatype, [len(column)], column)]
    lists = [value if isinstance(value, list) else [] if value is None else [value] for value in values]
    is_wide = len(one.shape) == 2 and one.shape[1] != -1
    if is_wide:  # a number that is missing keeps its place, as null
        lists = [items or [None] * one.shape[1] for items in lists]
    else:
        lists = [[item for item in items if item is not None] for items in lists]
    flat = [_value(one, row, item) for row, items in enumerate(lists) for item in items]
    if is_wide:
        return [_input(one.name, one.datatype, [len(lists), one.shape[1]], flat)]
    ends = np.cumsum([0, *map(len, lists)]).tolist()
    return [
        _input(one.name, one.datatype, [len(flat)], flat),
        _input(one.name + SPLITS, "INT64", [len(ends)], ends),
    ]


def _is_time(value: Any) -> bool:
    """Whether a value is a time as text, or a list of them."""
    if isinstance(value, list) and value:
        return all(map(_is_time, value))
    return isinstance(value, str) and _ISO.match(value) is not None


def _input(name: str, datatype: str, shape: list[int], data: list[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def _value(one: AskedTensor, row: int, value: Any) -> Any:
    if value is None:
        return None
    if one.datatype == "BYTES":
        if isinstance(value, (str, int, float)):
            return str(value)
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        pass
    elif DTYPES[one.datatype].kind == "f" or isinstance(value, int):
        return value
    raise RequestError(f"row {row}: {one.name!r} must be {one.datatype}, got {json.dumps(value)[:60]}")


def open_asker(
    url: str, guard: Guard | None = None, *, context: ssl.SSLContext | None = None, timeout: float = 10.0
) -> Asker:
    """Return who asks the server at a URL: http, https, or grpc://host:port.

    Args:
        guard: What to show to the server.
        context: For TLS over HTTP.
        timeout: Seconds for a request.

    Raises:
        ConfigError: The URL is none.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme not in ("http", "https", "grpc") or not host:
        raise ConfigError(
            f"cannot ask {url!r}: write http://host:port, https://host:port or grpc://host:port"
        )
    shown = guard or Guard()
    if parts.scheme == "grpc":
        return Asker(GrpcWire(f"{_bracketed(host)}:{port or 8001}", shown, timeout))
    if parts.scheme == "https":
        context = context or ssl.create_default_context()
        return Asker(HttpWire(host, port or 8000, context, shown, timeout))
    return Asker(HttpWire(host, port or 8000, None, shown, timeout))


class HttpWire:
    """JSON over HTTP."""

    def __init__(
        self, host: str, port: int, context: ssl.SSLContext | None, guard: Guard, timeout: float
    ) -> None:
        self._where = f"{_bracketed(host)}:{port}"
        self._timeout = timeout
        self._headers = {} if guard.header is None else {HEADER: guard.header}
        if context is None:
            self._connection = http.client.HTTPConnection(host, port, timeout=timeout + 1)
        else:
            self._connection = _NamedConnection(host, port, timeout + 1, context, guard.server_name or host)

    def models(self) -> list[str]:
        return sorted({str(one["name"]) for one in self._call("POST", "/v2/repository/index", {})})

    def inputs(self, model: str, version: str) -> list[AskedTensor]:
        about = self._call("GET", _model_path(model, version))
        return [AskedTensor(one["name"], one["datatype"], tuple(one["shape"])) for one in about["inputs"]]

    def infer(self, model: str, version: str, inputs: Sequence[Mapping[str, Any]]) -> Answered:
        said = self._call("POST", f"{_model_path(model, version)}/infer", {"inputs": list(inputs)})
        outputs = {
            one["name"]: np.reshape(np.array(one["data"]), one["shape"]).tolist() for one in said["outputs"]
        }
        return Answered(said["model_name"], said["model_version"], outputs, said.get("parameters", {}))

    def close(self) -> None:
        self._connection.close()

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        headers = {**self._headers, TIMEOUT_HEADER: str(int(self._timeout * 1e3))}
        data = None if body is None else json.dumps(body).encode()
        try:
            self._connection.request(method, path, data, headers)
            answer = self._connection.getresponse()
            read = answer.read(_LARGEST_ANSWER)
        except TimeoutError as cause:
            raise DeadlineExceededError(f"{self._where} did not answer within {self._timeout:g} s") from cause
        except (OSError, http.client.HTTPException) as cause:
            raise UnavailableError(
                f"cannot reach a server at {self._where}: {cause or type(cause).__name__}. Is `monolith "
                "serve` running there?"
            ) from cause
        try:
            said = json.loads(read)
        except ValueError as cause:
            raise UnavailableError(f"what answers at {self._where} is no server of models") from cause
        if answer.status == 200:
            return said
        text = said.get("error", said) if isinstance(said, dict) else said
        raise _ERRORS.get(answer.status, RequestError)(f"{self._where} answered {answer.status}: {text}")


class _NamedConnection(http.client.HTTPSConnection):
    """HTTPS to a server whose certificate may have another name than the host it is reached by."""

    def __init__(
        self, host: str, port: int, timeout: float, context: ssl.SSLContext, server_name: str
    ) -> None:
        super().__init__(host, port, timeout=timeout, context=context)
        self._trust = context
        self._server_name = server_name

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        self.sock = self._trust.wrap_socket(self.sock, server_hostname=self._server_name)


_ERRORS = {
    404: UnknownModelError,
    429: OverloadedError,
    500: UnavailableError,
    503: UnavailableError,
    504: DeadlineExceededError,
}
_GRPC_ERRORS = {
    "NOT_FOUND": UnknownModelError,
    "RESOURCE_EXHAUSTED": OverloadedError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
    "UNAVAILABLE": UnavailableError,
    "INTERNAL": UnavailableError,
}


class GrpcWire:
    """Messages over gRPC."""

    def __init__(self, address: str, guard: Guard, timeout: float) -> None:
        try:
            import grpc  # type: ignore[import-untyped]
        except ImportError as cause:
            raise MissingExtraError("grpcio", "serve", "asking over gRPC") from cause
        self._errors = grpc.RpcError
        self._where = address
        self._timeout = timeout
        self._channel = grpc_channel(address, guard, {"grpc.max_receive_message_length": _LARGEST_ANSWER})

    def models(self) -> list[str]:
        return sorted({one.name for one in self._call("RepositoryIndex").models})

    def inputs(self, model: str, version: str) -> list[AskedTensor]:
        about = self._call("ModelMetadata", name=model, version=version)
        return [AskedTensor(one.name, one.datatype, tuple(one.shape)) for one in about.inputs]

    def infer(self, model: str, version: str, inputs: Sequence[Mapping[str, Any]]) -> Answered:
        kind = message_types().ModelInferRequest
        tensors = [
            kind.InferInputTensor(name=one["name"], datatype=one["datatype"], shape=one["shape"])
            for one in inputs
        ]
        raws = [_raw(one["datatype"], one["data"]) for one in inputs]
        said = self._call(
            "ModelInfer", model_name=model, model_version=version, inputs=tensors, raw_input_contents=raws
        )
        outputs: dict[str, list[Any]] = {}
        for one, raw in zip(said.outputs, said.raw_output_contents, strict=True):
            tensor = raw_tensor(one.name, one.datatype, one.shape, raw)
            values = np.asarray(tensor.values, dtype=object if one.datatype == "BYTES" else None)
            outputs[one.name] = values.reshape(tuple(one.shape)).tolist()
        parameters = {
            name: getattr(value, value.WhichOneof("parameter_choice"))
            for name, value in sorted(said.parameters.items())
            if value.WhichOneof("parameter_choice")
        }
        return Answered(said.model_name, said.model_version, outputs, parameters)

    def close(self) -> None:
        self._channel.close()

    def _call(self, method: str, **fields: Any) -> Any:
        request, answer = service_methods()[method]
        call = self._channel.unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=request.SerializeToString,
            response_deserializer=answer.FromString,
        )
        try:
            return call(request(**fields), timeout=self._timeout)
        except self._errors as cause:
            kind = _GRPC_ERRORS.get(cause.code().name, RequestError)
            text = f"{self._where} answered {cause.code().name}: {cause.details()}"
            raise kind(text) from cause


def _raw(datatype: str, data: Sequence[Any]) -> bytes:
    if datatype == "BYTES":
        texts = [one.encode() for one in data]
        return b"".join(len(one).to_bytes(4, "little") + one for one in texts)
    try:
        return np.array(data, DTYPES[datatype]).tobytes()
    except (OverflowError, ValueError) as cause:
        raise RequestError(f"a value is too large for {datatype}") from cause


def _model_path(model: str, version: str) -> str:
    path = f"/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
