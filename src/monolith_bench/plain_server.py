"""The server that `monolith bench serve` compares with: the same model in plain torch, behind FastAPI.

It is what a good engineer writes in an afternoon: one `nn.EmbeddingBag` for all features, whose IDs are moved
by the offset of their feature, the dense half in torch, and FastAPI on uvicorn's fastest loop and parser. A
request is answered on the loop, without a hop to a thread, by one thread of torch.

    POST /json     {"inputs": {"f000": [7, 8], ...}} in, {"click": [0.12, 0.4]} out
    POST /binary   int64 of shape (features, rows) in, float32 of shape (rows,) out
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from monolith.errors import MissingExtraError, UnavailableError
from monolith.model.deepfm import DeepFMDense
from monolith_bench.options import BenchServeOptions
from monolith_bench.served_deepfm import HEAD, names_of

OPTIONS = "MONOLITH_BENCH_PLAIN_SERVER"
"""The environment variable by which the processes of the server get the options of the bench."""
START_SECONDS = 600.0


class BagsModel(nn.Module):
    """The model with an `nn.EmbeddingBag` for the vectors, and one for the biases, of each feature.

    Shapes: int64 of shape (rows,) per feature in, float32 of shape (rows,) out.
    """

    def __init__(self, options: BenchServeOptions) -> None:
        super().__init__()
        rows = options.rows // options.features
        self.vectors = nn.ModuleList(
            nn.EmbeddingBag(rows, options.dim, mode="sum") for _ in range(options.features)
        )
        self.biases = nn.ModuleList(nn.EmbeddingBag(rows, 1, mode="sum") for _ in range(options.features))
        self.dense = DeepFMDense(options.features, options.dim, 0, options.hidden)

    def forward(self, columns: Sequence[Tensor]) -> Tensor:
        bags = torch.arange(len(columns[0]))
        vectors = torch.cat([bag(ids, bags) for bag, ids in zip(self.vectors, columns, strict=True)], 1)
        biases = torch.cat([bag(ids, bags) for bag, ids in zip(self.biases, columns, strict=True)], 1)
        found: Tensor = self.dense(biases.sum(1, keepdim=True), vectors)
        return torch.sigmoid(found)


class FusedModel(nn.Module):
    """The model with one `nn.EmbeddingBag` for all features: a row is a vector and a bias.

    Shapes: int64 of shape (features, rows) in, float32 of shape (rows,) out.
    """

    offsets: Tensor

    def __init__(self, options: BenchServeOptions) -> None:
        super().__init__()
        rows = options.rows // options.features
        self.table = nn.EmbeddingBag(rows * options.features, options.dim + 1, mode="sum")
        self.register_buffer("offsets", torch.arange(options.features)[:, None] * rows)
        self.dense = DeepFMDense(options.features, options.dim, 0, options.hidden)

    def forward(self, ids: Tensor) -> Tensor:
        features, rows = ids.shape
        # One bag per ID, example after example, so that the vectors of an example are next to each other.
        found = self.table((ids + self.offsets).T.reshape(-1, 1)).view(rows, features, -1)
        vectors, biases = found[:, :, :-1].reshape(rows, -1), found[:, :, -1]
        scores: Tensor = self.dense(biases.sum(1, keepdim=True), vectors)
        return torch.sigmoid(scores)


def app() -> Any:
    """Return the application; uvicorn calls this in each process."""
    from fastapi import FastAPI, Request, Response
    from pydantic import create_model

    torch.set_num_threads(1)
    options = BenchServeOptions(**json.loads(os.environ[OPTIONS]))
    names = names_of(options.features)
    model = FusedModel(options).eval()
    made = FastAPI()

    @torch.inference_mode()
    def scores(ids: Tensor) -> Tensor:
        found: Tensor = model(ids)
        return found

    # The types are for FastAPI, which reads them when it runs: not texts, in spite of the import above.
    async def answer_json(asked: Any) -> Any:
        return {HEAD: scores(torch.tensor([asked.inputs[name] for name in names])).tolist()}

    async def answer_binary(request: Any) -> Any:
        ids = torch.frombuffer(bytearray(await request.body()), dtype=torch.int64)
        return Response(scores(ids.view(len(names), -1)).numpy().tobytes())

    asked_type = create_model("Asked", inputs=(dict[str, list[int]], ...))
    answer_json.__annotations__ = {"asked": asked_type, "return": dict[str, list[float]]}
    answer_binary.__annotations__ = {"request": Request}
    made.post("/json")(answer_json)
    made.post("/binary", response_model=None)(answer_binary)
    return made


@contextmanager
def plain_server(options: BenchServeOptions) -> Iterator[tuple[str, int]]:
    """Run the server while the block lasts; yield its address and its process.

    Raises:
        MissingExtraError: FastAPI is not installed.
        UnavailableError: The server did not start.
    """
    if find_spec("fastapi") is None:
        raise MissingExtraError("fastapi", "bench", "comparing with FastAPI in bench serve")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["-m", "uvicorn", "--factory", "monolith_bench.plain_server:app", "--port", str(port)]
    words += ["--workers", str(options.processes), "--no-access-log", "--log-level", "warning"]
    environment = os.environ | {OPTIONS: json.dumps(asdict(options))}
    process = subprocess.Popen([sys.executable, *words], env=environment)
    try:
        begun = time.monotonic()
        while not _answers(port, options):
            if process.poll() is not None or time.monotonic() - begun > START_SECONDS:
                raise UnavailableError("the FastAPI server did not start; its log is above")
            time.sleep(0.1)
        yield f"127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait(60)


def _answers(port: int, options: BenchServeOptions) -> bool:
    """Whether the server answers a request of one row."""
    request = plain_request("binary", np.zeros((options.features, 1), np.int64).tobytes())
    try:
        with socket.create_connection(("127.0.0.1", port), 60) as connection:
            connection.sendall(request)
            return connection.recv(64).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def plain_request(path: str, body: bytes) -> bytes:
    """Return a request as it is sent over the connection."""
    kind = "application/json" if path == "json" else "application/octet-stream"
    head = (
        f"POST /{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
