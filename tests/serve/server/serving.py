"""Starts servers, and asks them as a client without any library would."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest
from serve.server.linear import LinearCatalog

from monolith.serve.server import InferenceServer, ServeConfig, ServedFolder, VersionPolicy
from monolith.wire.open_inference import SERVICE, message_types, service_methods

PATIENCE = 60


class Served(InferenceServer):
    """A server, and its catalog."""

    catalog: LinearCatalog

    @property
    def http_port(self) -> int:
        port = urlsplit(self.http_url).port
        assert port is not None
        return port


@contextmanager
def serving(
    catalog: LinearCatalog, *, policy: str = "latest", server: dict[str, Any] | None = None, **config: Any
) -> Iterator[Served]:
    settings = {
        "http_port": 0,
        "grpc_port": 0,
        "poll": timedelta(seconds=0.02),
        "drain": timedelta(seconds=PATIENCE),
        "threads": 16,
        **config,
    }
    folders = [
        ServedFolder(folder=name, name=name, policy=VersionPolicy.parse(policy)) for name in catalog.folders
    ]
    running = Served(ServeConfig(**settings), folders, catalog, **(server or {}))
    running.catalog = catalog
    try:
        yield running
    finally:
        for model in catalog.loaded:
            model.gate.set()
        running.close()


def ask_http(
    port: int, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, Any, http.client.HTTPMessage]:
    """Return the status, the JSON (or bytes) and the headers of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        connection.request(method, path, data, headers or {})
        answer = connection.getresponse()
        read = answer.read()
        kind = answer.headers.get("content-type", "")
        return (
            answer.status,
            json.loads(read) if read and kind == "application/json" else read,
            answer.headers,
        )
    finally:
        connection.close()


def rows_json(*users: str, **others: Any) -> dict[str, Any]:
    inputs = [{"name": "user", "datatype": "BYTES", "shape": [len(users)], "data": list(users)}]
    return {"inputs": inputs, **others}


def refusal(call: Any, *arguments: Any, **options: Any) -> tuple[grpc.StatusCode, str]:
    """Return the code and the text with which a call over gRPC is refused."""
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, **options)
    return caught.value.code(), caught.value.details()


class GrpcClient:
    """Calls every method of the service by its name: `client.ModelInfer(request)`."""

    def __init__(self, address: str, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self.channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._metadata = metadata

    def __getattr__(self, name: str) -> Any:
        if name not in service_methods():
            raise AttributeError(name)
        request, answer = service_methods()[name]
        call = self.channel.unary_unary(
            f"/{SERVICE}/{name}",
            request_serializer=lambda one: one if isinstance(one, bytes) else one.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        return lambda message=None, timeout=PATIENCE: call(
            request() if message is None else message, timeout=timeout, metadata=self._metadata
        )

    def __enter__(self) -> GrpcClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.channel.close()


def rows_message(*users: str, model: str = "linear", **fields: Any) -> Any:
    types = message_types()
    message = types.ModelInferRequest(model_name=model, **fields)
    message.inputs.add(name="user", datatype="BYTES", shape=[len(users)]).contents.bytes_contents.extend(
        user.encode() for user in users
    )
    return message
