"""`monolith bench serve` compares a DeepFM served over gRPC, HTTP and in-process with the bare predictor.

The server is a process of its own, started as a person would, and so is the client. Each number is
compared with the bare predictor's, called by as many threads of this process with the same rows, in the same
run: the difference is what a server adds. The predictor alone is compared with plain torch: 26
`nn.EmbeddingBag` for vectors and 26 for biases, eager, with the same dense half. Last, requests that rank 500
items for one user are compared with the same requests in full rows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from monolith.errors import ConfigError, UnavailableError
from monolith.model.deepfm import DeepFMDense
from monolith.observe.metrics import Metrics
from monolith.serve import Predictor
from monolith.serve.config import ServeConfig, ServedFolder
from monolith.serve.metrics import ServeMetrics
from monolith.serve.server.catalog import ServableCatalog
from monolith.serve.server.inference import Inference, InferRequest
from monolith.serve.server.tensors import WireTensor
from monolith.wire.open_inference import message_types
from monolith_bench.options import BenchServeOptions
from monolith_bench.report import Report
from monolith_bench.serve_candidates import ITEMS, measure_candidates
from monolith_bench.serve_load import COMMAND, LoadSeen, percentile
from monolith_bench.served_deepfm import names_of, write_deepfm

NAME = "deepfm"
START_SECONDS = 600.0
BARE = "the bare predictor"
TORCH = "plain torch, eager"


@dataclass(frozen=True, slots=True)
class ServeCase:
    """So many rows in a request, from so many callers."""

    batch: int
    connections: int

    def __str__(self) -> str:
        return f"batch {self.batch}, {self.connections} connections"


def run(options: BenchServeOptions) -> int:
    """Measure, and print what was found."""
    options = quick(options) if options.quick else options
    if min(options.batches) < 1 or min(options.connections) < 1 or options.rows < options.features:
        raise ConfigError(
            "bench serve: batches, connections and rows must be at least 1, rows one per feature"
        )
    report = Report("serve")
    with tempfile.TemporaryDirectory(prefix="monolith-bench-", dir=options.folder) as folder:
        root = Path(folder) / NAME
        report.say(f"writing {options.rows:,} rows of {options.dim + 1} floats")
        write_deepfm(root, options)
        report.say("loading them")
        begun = time.perf_counter()
        with Predictor(str(root), show=False) as predictor:
            report.add("load", "seconds", time.perf_counter() - begun, "s")
            measure_alone(report, predictor, options)
            measure_served(report, predictor, root, options)
            measure_ranking(report, root, options)
    report.finish()
    if options.json:
        report.print_json()
    return 0


def quick(options: BenchServeOptions) -> BenchServeOptions:
    return replace(options, rows=2_600, processes=1, batches=(2,), connections=(2,), seconds=0.1, hidden=(8,))


# The predictor alone


class TorchModel(nn.Module):
    """The same model as torch has it."""

    def __init__(self, options: BenchServeOptions) -> None:
        super().__init__()
        rows = options.rows // options.features
        self.vectors = nn.ModuleList(
            nn.EmbeddingBag(rows, options.dim, mode="sum") for _ in range(options.features)
        )
        self.biases = nn.ModuleList(nn.EmbeddingBag(rows, 1, mode="sum") for _ in range(options.features))
        self.dense = DeepFMDense(options.features, options.dim, 0, options.hidden)

    def forward(self, columns: list[Tensor]) -> Tensor:
        bags = torch.arange(len(columns[0]))
        vectors = torch.cat([bag(ids, bags) for bag, ids in zip(self.vectors, columns, strict=True)], 1)
        biases = torch.cat([bag(ids, bags) for bag, ids in zip(self.biases, columns, strict=True)], 1)
        found: Tensor = self.dense(biases.sum(1, keepdim=True), vectors)
        return torch.sigmoid(found)


def measure_alone(report: Report, predictor: Predictor, options: BenchServeOptions) -> None:
    """Compare one caller of the predictor with one of plain torch; both take numpy columns."""
    report.say("the predictor compared with plain torch, one caller")
    model = TorchModel(options).eval()
    for batch in options.batches:
        requests = columns_of(options, batch, 32)

        def eager(columns: Mapping[str, Any]) -> object:
            with torch.inference_mode():
                return model([torch.from_numpy(values) for values in columns.values()])

        # By turns, so that what else the machine does meets both.
        ours, theirs = [], []
        for _ in range(options.repeats):
            ours.append(mean_seconds(predictor.predict, requests, options.seconds / 2))
            theirs.append(mean_seconds(eager, requests, options.seconds / 2))
        case = f"predict, batch {batch}, one caller"
        report.add(f"{case}, {TORCH}", "requests_per_s", 1 / min(theirs), "requests/s")
        report.compare(
            case,
            "requests_per_s",
            1 / min(ours),
            "requests/s",
            {f"{case}, {TORCH}": 1 / min(theirs)},
        )
    report.show("The predictor compared with plain torch eager, one caller")


def mean_seconds(ask: Callable[[Any], object], requests: list[Any], seconds: float) -> float:
    """Return the mean time of a call, over about so many seconds."""
    for request in requests[:3]:
        ask(request)
    count = 0
    begun = time.perf_counter()
    while (passed := time.perf_counter() - begun) < seconds or not count:
        ask(requests[count % len(requests)])
        count += 1
    return passed / count if count else passed


# Served


def measure_served(report: Report, predictor: Predictor, root: Path, options: BenchServeOptions) -> None:
    """Measure every case over every transport, each compared with the bare predictor."""
    inference = Inference(
        ServeConfig(), [ServedFolder(folder=str(root), name=NAME)], ServableCatalog(), ServeMetrics(Metrics())
    )
    inference.repository.refresh()
    report.say(f"starting a server of {options.processes} processes")
    with served(root, options.processes) as ports:
        for batch in options.batches:
            for connections in options.connections:
                case = ServeCase(batch, connections)
                report.say(str(case))
                requests = columns_of(options, batch, 32)
                found = {
                    BARE: by_threads(predictor.predict, requests, case, options),
                    "in-process": by_threads(_in_process(inference), requests, case, options),
                    "gRPC": over_wire("grpc", ports["grpc"], grpc_request(requests[0]), case, options),
                    "HTTP, JSON": over_wire("http", ports["http"], http_request(requests[0]), case, options),
                    "HTTP, binary": over_wire(
                        "http", ports["http"], http_request(requests[0], binary=True), case, options
                    ),
                }
                add_case(report, case, found)
                report.show(f"Requests of {case}")
    inference.close()


def measure_ranking(report: Report, root: Path, options: BenchServeOptions) -> None:
    """Measure requests about many items of one user; see `serve_candidates`."""
    items = 20 if options.quick else ITEMS
    (full,) = columns_of(options, items, 1)
    with served(root) as ports:
        requests: dict[str, tuple[str, Callable[[Mapping[str, Any]], bytes]]] = {
            "HTTP, JSON": ("http", http_request),
            "HTTP, binary": ("http", partial(http_request, binary=True)),
            "gRPC": ("grpc", grpc_request),
        }

        def ask(way: str, columns: Mapping[str, Any]) -> LoadSeen:
            kind, made = requests[way]
            return over_wire(kind, ports[kind], made(columns), ServeCase(items, 1), options)

        measure_candidates(report, full, options, ask, int(ports["pid"]))


def add_case(report: Report, case: ServeCase, found: Mapping[str, LoadSeen]) -> None:
    """Record what was seen of one case, the bare predictor's first."""
    bare = found[BARE]
    for way, seen in found.items():
        numbers = {
            "requests_per_s": (seen.requests / seen.seconds, bare.requests / bare.seconds, "requests/s"),
            "p50": (seen.p50 * 1e3, bare.p50 * 1e3, "ms"),
            "p99": (seen.p99 * 1e3, bare.p99 * 1e3, "ms"),
        }
        note = f"{seen.failed} failed" if seen.failed else None
        for metric, (value, beside, unit) in numbers.items():
            if way == BARE:
                report.add(f"{case}, {BARE}", metric, value, unit)
            else:
                report.compare(f"{case}, {way}", metric, value, unit, {f"{case}, {BARE}": beside}, note=note)


def by_threads(
    ask: Callable[[Any], object], requests: list[Any], case: ServeCase, options: BenchServeOptions
) -> LoadSeen:
    """Ask from as many threads of this process as there are connections."""
    seen: list[float] = []
    ready = threading.Barrier(case.connections + 1)
    end = [0.0]

    def caller() -> None:
        mine: list[float] = []
        ask(requests[0])
        ready.wait()
        turn = 0
        while (asked := time.perf_counter()) < end[0]:
            ask(requests[turn % len(requests)])
            mine.append(time.perf_counter() - asked)
            turn += 1
        seen.extend(mine)

    threads = [threading.Thread(target=caller) for _ in range(case.connections)]
    for thread in threads:
        thread.start()
    end[0] = time.perf_counter() + options.seconds + 3600
    ready.wait()
    begun = time.perf_counter()
    end[0] = begun + options.seconds
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begun
    ordered = sorted(seen)
    return LoadSeen(
        requests=len(seen),
        failed=0,
        seconds=seconds,
        p50=percentile(ordered, 0.5),
        p99=percentile(ordered, 0.99),
    )


def _in_process(inference: Inference) -> Callable[[Mapping[str, Any]], object]:
    """Ask through routes, limits, batches and metrics, without a wire."""

    def ask(columns: Mapping[str, Any]) -> object:
        tensors = [WireTensor(name, "INT64", values.shape, values) for name, values in columns.items()]
        return inference.infer(InferRequest(model=NAME, tensors=tensors))

    return ask


def over_wire(
    kind: str, address: str, request: bytes, case: ServeCase, options: BenchServeOptions
) -> LoadSeen:
    """Ask from a process of its own."""
    words = ["-c", COMMAND, kind, address, str(case.connections), str(options.seconds)]
    done = subprocess.run(
        [sys.executable, *words],
        input=request,
        capture_output=True,
        timeout=options.seconds + 300,
        check=False,
    )
    if done.returncode:
        raise UnavailableError(f"the client failed: {done.stderr.decode()[-2000:]}")
    return LoadSeen(**json.loads(done.stdout))


@contextmanager
def served(root: Path, processes: int = 1, *, follow: str | None = None) -> Iterator[dict[str, str]]:
    """Run `monolith serve` while the block lasts; yield its addresses, and its process ID as `pid`.

    Args:
        follow: Where a trainer publishes.
    """
    words = ["-m", "monolith", "serve", f"{NAME}={root}", "--http-port", "0", "--grpc-port", "0"]
    # What trains here is no run with a folder: its rows are taken for those of any export.
    following = [] if follow is None else ["--follow", follow, "--follow-any-run"]
    words += ["--processes", str(processes), *following]
    process = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ
    )
    try:
        assert process.stdout is not None
        ports: dict[str, str] = {"pid": str(process.pid)}
        begun = time.monotonic()
        while not ports.keys() & {"ask", "serving"}:  # its last line
            line = process.stdout.readline()
            if not line or time.monotonic() - begun > START_SECONDS:
                raise UnavailableError("the server did not start; `monolith serve` says why")
            kind, _, rest = line.partition(" ")
            ports[kind] = rest.split()[0].partition("://")[2]
        yield ports
    finally:
        process.terminate()
        process.wait(60)


# What is asked


def columns_of(options: BenchServeOptions, batch: int, count: int) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Return the columns of some requests: one id of each feature in every row."""
    random = np.random.default_rng(options.seed)
    rows = options.rows // options.features
    return [
        {name: random.integers(0, rows, batch) for name in names_of(options.features)} for _ in range(count)
    ]


def grpc_request(columns: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    """Return a message with raw tensors."""
    message = message_types().ModelInferRequest(model_name=NAME)
    for name, values in columns.items():
        message.inputs.add(name=name, datatype="INT64", shape=[len(values)])
        message.raw_input_contents.append(values.tobytes())
    data: bytes = message.SerializeToString()
    return data


def http_request(columns: Mapping[str, np.ndarray[Any, Any]], *, binary: bool = False) -> bytes:
    """Return a request as it goes over the connection, with JSON or raw tensors behind it."""
    raws: list[bytes] = []
    inputs: list[dict[str, Any]] = []
    for name, values in columns.items():
        line: dict[str, Any] = {"name": name, "datatype": "INT64", "shape": [len(values)]}
        if binary:
            raws.append(values.tobytes())
            line["parameters"] = {"binary_data_size": len(raws[-1])}
        else:
            line["data"] = values.tolist()
        inputs.append(line)
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": binary}}).encode()
    length = f"Inference-Header-Content-Length: {len(head)}\r\n" if binary else ""
    body = b"".join([head, *raws])
    first = (
        f"POST /v2/models/{NAME}/infer HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Length: {len(body)}\r\n{length}\r\n"
    )
    return first.encode() + body
