"""`monolith bench serve` compares a DeepFM served over gRPC, HTTP and in-process with plain torch.

The predictor alone is compared with plain torch, eager, with the same dense half: with an `nn.EmbeddingBag`
for the vectors and one for the biases of each feature, and with one `nn.EmbeddingBag` for everything.

The server is a process of its own, started as a user starts it, and so is the client. It is compared with the
bare predictor, called by as many threads of this process with the same rows: the difference is what a server
adds. And it is compared with the fused torch model behind FastAPI and uvicorn (`plain_server`), JSON with
JSON, and gRPC and binary HTTP with raw bytes. All are measured by turns; the best of several rounds counts.

Processor time is what a request costs: user and system time of all processes of a server while a client asks,
divided by the requests that were answered. It depends less on what else the machine does than requests/s. The
client's own is reported next to it.

Requests that rank 500 items for one user are compared with the same requests in full rows, requests of texts
with those of whole numbers, and two runners and two processes with one. A sequence model ranks items with
the history of the user encoded once, in the cache, and in full rows. Last, a two-tower model is asked for the
best 10 items of catalogues.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from monolith.errors import ConfigError, UnavailableError
from monolith.observe.metrics import Metrics
from monolith.serve import Predictor
from monolith.serve.config import ServeConfig, ServedFolder
from monolith.serve.metrics import ServeMetrics
from monolith.serve.server.catalog import ServableCatalog
from monolith.serve.server.inference import Inference, InferRequest
from monolith.serve.server.tensors import WireTensor, raw_bytes
from monolith.wire.open_inference import message_types
from monolith_bench.dense_ways import measure_dense
from monolith_bench.marked_events import FreshnessJob
from monolith_bench.marked_trainer import export_filled
from monolith_bench.options import BenchServeOptions
from monolith_bench.plain_server import BagsModel, FusedModel, plain_request, plain_server
from monolith_bench.report import Report
from monolith_bench.serve_load import COMMAND, LoadSeen, percentile
from monolith_bench.served_deepfm import as_texts, names_of, write_deepfm
from monolith_bench.served_histories import CACHE_BYTES, in_full_rows, measure_live, ranking_of, write_ranked

NAME = "deepfm"
START_SECONDS = 600.0
BEST = 10
"""How many items a top-k request asks for."""
BARE = "the bare predictor"
TORCH = "plain torch, eager"
FUSED = "plain torch, eager, one table"
FASTAPI_JSON = "FastAPI, JSON"
FASTAPI_BINARY = "FastAPI, binary"
FASTAPI = {"gRPC": FASTAPI_BINARY, "HTTP, JSON": FASTAPI_JSON, "HTTP, binary": FASTAPI_BINARY}
"""Our transports -> what each is compared with."""
MOST_ATTENTION = 1 << 25
"""Pairs of steps in all rows of a request in full rows; more would take gigabytes."""
TEXT_ROWS = 260_000
"""The most rows of the model that is asked with texts."""


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
    if min(*options.batches, *options.connections, *options.catalogue) < 1 or options.rows < options.features:
        raise ConfigError(
            "bench serve: batches, connections, catalogue and rows must be at least 1, rows one per feature"
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
            if "dense" in options.parts:
                measure_dense(report, options)
            if "predictor" in options.parts:
                measure_alone(report, predictor, options)
            if "served" in options.parts:
                measure_served(report, predictor, root, options)
        if "ranking" in options.parts:
            with served(root) as ports:
                measure_ranking(report, ports, options)
        if "runners" in options.parts:
            measure_runners(report, root, options)
        if "texts" in options.parts:
            measure_texts(report, Path(folder), options)
        if "histories" in options.parts:
            measure_histories(report, Path(folder), options)
        if "topk" in options.parts:
            measure_topk(report, Path(folder), options)
    report.finish()
    if options.json:
        report.print_json()
    return 0


def quick(options: BenchServeOptions) -> BenchServeOptions:
    return replace(
        options,
        rows=2_600,
        processes=1,
        batches=(2,),
        connections=(2,),
        catalogue=(500,),
        seconds=0.1,
        repeats=1,
        hidden=(8,),
    )


# The predictor alone


def measure_alone(report: Report, predictor: Predictor, options: BenchServeOptions) -> None:
    """Compare one caller of the predictor with one of plain torch; all take numpy columns."""
    report.say("the predictor compared with plain torch, one caller")
    bags, fused = BagsModel(options).eval(), FusedModel(options).eval()

    @torch.inference_mode()
    def ask_bags(columns: Mapping[str, Any]) -> object:
        return bags([torch.from_numpy(values) for values in columns.values()])

    @torch.inference_mode()
    def ask_fused(columns: Mapping[str, Any]) -> object:
        return fused(torch.from_numpy(np.stack(list(columns.values()))))

    for batch in options.batches:
        requests = columns_of(options, batch, 32)
        asked = {"": predictor.predict, TORCH: ask_bags, FUSED: ask_fused}
        best = dict.fromkeys(asked, float("inf"))
        # By turns, so that what else the machine does meets all of them.
        for _ in range(options.repeats):
            for name, ask in asked.items():
                best[name] = min(best[name], mean_seconds(ask, requests, options.seconds / 2))
        case = f"predict, batch {batch}, one caller"
        baselines = {f"{case}, {name}": 1 / best[name] for name in (TORCH, FUSED)}
        for name, value in baselines.items():
            report.add(name, "requests_per_s", value, "requests/s")
        report.compare(case, "requests_per_s", 1 / best[""], "requests/s", baselines)
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
    """Measure every case over every transport, each compared with the bare predictor and with FastAPI."""
    inference = Inference(
        ServeConfig(), [ServedFolder(folder=str(root), name=NAME)], ServableCatalog(), ServeMetrics(Metrics())
    )
    inference.repository.refresh()
    report.say(f"starting a server of {options.processes} processes, and one of FastAPI")
    with (
        served(root, "--processes", str(options.processes)) as ours,
        plain_server(options) as (plain, plain_process),
    ):
        grpc, http, process = ours["grpc"], ours["http"], int(ours["process"])
        seconds = options.seconds / options.repeats
        for batch in options.batches:
            requests = columns_of(options, batch, 32)
            first = requests[0]
            raw = np.stack(list(first.values())).tobytes()
            listed = json.dumps({"inputs": {name: ids.tolist() for name, ids in first.items()}}).encode()
            wires = {
                "gRPC": Wire("grpc", grpc, process, grpc_request(first)),
                "HTTP, JSON": Wire("http", http, process, http_request(first)),
                "HTTP, binary": Wire("http", http, process, http_request(first, binary=True)),
                FASTAPI_JSON: Wire("http", plain, plain_process, plain_request("json", listed)),
                FASTAPI_BINARY: Wire("http", plain, plain_process, plain_request("binary", raw)),
            }
            for connections in options.connections:
                case = ServeCase(batch, connections)
                report.say(str(case))
                rounds: dict[str, list[LoadSeen]] = {}
                for _ in range(options.repeats):
                    found = {
                        BARE: by_threads(predictor.predict, requests, case, seconds),
                        "in-process": by_threads(_in_process(inference), requests, case, seconds),
                    } | {way: over_wire(wire, case, seconds) for way, wire in wires.items()}
                    for way, seen in found.items():
                        rounds.setdefault(way, []).append(seen)
                add_case(report, case, {way: best_of(seen) for way, seen in rounds.items()})
                report.show(f"Requests of {case}")
    inference.close()


def measure_ranking(
    report: Report, ports: Mapping[str, str], options: BenchServeOptions, *, texts: bool = False
) -> None:
    """Compare requests that rank many items with one row of the user with the same in full rows.

    What counts is the processor time of the server: a client that sends less also waits less.
    """
    items, count = 20 if options.quick else 500, round(options.features * 18 / 26)
    names = names_of(options.features)
    (full,) = columns_of(options, items, 1)
    if texts:
        full = {name: as_texts(name, ids.tolist()) for name, ids in full.items()}
    short = {name: full[name][:1] if name in names[:count] else full[name] for name in names}
    full = {name: np.repeat(short[name], items) if name in names[:count] else full[name] for name in names}
    kind_of = " of texts" if texts else ""
    case = f"candidates, {count} user and {len(names) - count} item features{kind_of}, {items} items"
    report.say(case)
    for way in WAYS:
        _compare(report, options, case, way, [(ports, short, ""), (ports, full, ", full rows")])
    report.show(f"Ranking{kind_of}: one row of the user compared with full rows")


def measure_texts(report: Report, folder: Path, options: BenchServeOptions) -> None:
    """Compare requests of texts, which the server hashes, with those of the same IDs as whole numbers."""
    options = replace(options, rows=min(options.rows, TEXT_ROWS))
    report.say(f"writing {options.rows:,} rows twice, found by number and by text")
    write_deepfm(folder / "numbers", options)
    write_deepfm(folder / "texts", options, texts=True)
    with served(folder / "numbers") as of_numbers, served(folder / "texts") as of_texts:
        for batch in options.batches:
            (numbers,) = columns_of(options, batch, 1)
            texts = {name: as_texts(name, ids.tolist()) for name, ids in numbers.items()}
            case = f"texts, batch {batch}"
            for way in WAYS:
                _compare(
                    report,
                    options,
                    case,
                    way,
                    [(of_texts, texts, ""), (of_numbers, numbers, ", whole numbers")],
                )
        report.show("Texts compared with whole numbers, one connection")
        measure_ranking(report, of_texts, options, texts=True)


def _compare(
    report: Report,
    options: BenchServeOptions,
    case: str,
    way: str,
    asked: Sequence[tuple[Mapping[str, str], Mapping[str, Any], str]],
) -> None:
    """Compare one request with another, by turns.

    Args:
        asked: Twice the server, the columns, and how the case is named.
    """
    kind, request = WAYS[way]
    wires = [Wire(kind, ports[kind], int(ports["process"]), request(columns)) for ports, columns, _ in asked]
    rounds = [
        [over_wire(wire, ServeCase(1, 1), options.seconds / options.repeats) for wire in wires]
        for _ in range(options.repeats)
    ]
    ours, theirs = (best_of(seen) for seen in zip(*rounds, strict=True))
    baseline, found = f"{case}, {way}{asked[1][2]}", _numbers(ours)
    for metric, (value, unit) in _numbers(theirs).items():
        report.add(baseline, metric, value, unit)
        if metric in found:  # a very short run has no processor time
            report.compare(f"{case}, {way}{asked[0][2]}", metric, found[metric][0], unit, {baseline: value})


def measure_runners(report: Report, root: Path, options: BenchServeOptions) -> None:
    """Compare servers that compute two batches at a time, on threads and in processes, with one that computes
    one, by turns."""
    kinds = {"1 runner": (), "2 runners": ("--runners", "2"), "2 processes": ("--processes", "2")}
    with ExitStack() as stack:
        ports = {name: stack.enter_context(served(root, *words)) for name, words in kinds.items()}
        for case in (
            ServeCase(batch, connections) for batch in options.batches for connections in options.connections
        ):
            report.say(f"one runner, two, and two processes, {case}")
            (columns,) = columns_of(options, case.batch, 1)
            request = http_request(columns, binary=True)
            rounds: dict[str, list[LoadSeen]] = {name: [] for name in kinds}
            for _ in range(options.repeats):
                for name, one in ports.items():
                    wire = Wire("http", one["http"], int(one["process"]), request)
                    rounds[name].append(over_wire(wire, case, options.seconds / options.repeats))
            found = {f"{case}, HTTP, binary, {name}": best_of(seen) for name, seen in rounds.items()}
            (baseline, alone), *others = found.items()
            for metric, (value, unit) in _numbers(alone).items():
                report.add(baseline, metric, value, unit)
                for name, seen in others:
                    if (number := _numbers(seen).get(metric)) is not None:
                        report.compare(name, metric, number[0], unit, {baseline: value})
            report.show(f"Two batches at a time compared with one, {case}")


def measure_histories(report: Report, folder: Path, options: BenchServeOptions) -> None:
    """Compare ranking requests whose history is encoded once, or in the cache, with those in full rows."""
    root = folder / "ranked"
    write_ranked(root)
    lengths, counts = ((20,), (1, 5)) if options.quick else ((200, 1_000), (1, 100, 500))
    cache = ("--history-cache-bytes", str(CACHE_BYTES))
    with served(root) as plain, served(root, *cache) as cached:
        for steps in lengths:
            for items in counts:
                asked = ranking_of(1, steps, items)
                case = f"history of {steps:,} steps, {items} items"
                report.say(case)
                _compare(
                    report,
                    options,
                    case,
                    "HTTP, binary",
                    [(cached, asked, ", in the cache"), (plain, asked, ", encoded once")],
                )
                if items * steps**2 <= MOST_ATTENTION:
                    full = in_full_rows(asked)
                    _compare(
                        report,
                        replace(options, repeats=1),
                        case,
                        "HTTP, binary",
                        [(plain, asked, ", encoded once, one round"), (plain, full, ", full rows")],
                    )
    report.show("Ranking by history: encoded once, and in the cache")
    measure_live(report, root, options)


def measure_topk(report: Report, folder: Path, options: BenchServeOptions) -> None:
    """Ask a two-tower model for the best items of one user, one caller at a time."""
    user = {"user": np.array([1])}
    wires = {
        "HTTP, JSON": ("http", http_request(user, search={"k": BEST})),
        "gRPC": ("grpc", grpc_request(user, search={"k": BEST})),
    }
    for items in options.catalogue:
        case = f"top {BEST} of {items:,} items"
        report.say(case)
        root = folder / f"two-tower-{items}"
        job = FreshnessJob(
            model_dir="", rows=items, dim=options.dim, hidden=options.hidden, seed=options.seed, towers=True
        )
        export_filled(job, root)
        with served(root) as ports:
            for way, (kind, request) in wires.items():
                wire = Wire(kind, ports[kind], int(ports["process"]), request)
                seen = best_of(
                    [
                        over_wire(wire, ServeCase(1, 1), options.seconds / options.repeats)
                        for _ in range(options.repeats)
                    ]
                )
                note = f"{seen.failed} failed" if seen.failed else None
                for metric, (value, unit) in _numbers(seen).items():
                    report.add(f"{case}, {way}", metric, value, unit, note=note)
    report.show(f"Top-k: the best {BEST} items for one user, one connection")


def best_of(rounds: Sequence[LoadSeen]) -> LoadSeen:
    """Return the round with the most requests per second, with the least processor time of any round."""
    fastest = max(rounds, key=lambda seen: seen.requests / seen.seconds)
    return replace(
        fastest,
        processor=min(seen.processor / seen.requests for seen in rounds) * fastest.requests,
        client=min(seen.client / seen.requests for seen in rounds) * fastest.requests,
        failed=sum(seen.failed for seen in rounds),
    )


def add_case(report: Report, case: ServeCase, found: Mapping[str, LoadSeen]) -> None:
    """Record what was seen of one case, the baselines first."""
    baselines = (BARE, *dict.fromkeys(FASTAPI.values()))
    for way in (*baselines, *(way for way in found if way not in baselines)):
        beside = [] if way in baselines else [BARE, *([FASTAPI[way]] if way in FASTAPI else [])]
        note = f"{found[way].failed} failed" if found[way].failed else None
        for metric, (value, unit) in _numbers(found[way]).items():
            if beside:
                others = {
                    f"{case}, {one}": numbers[metric][0]
                    for one in beside
                    if metric in (numbers := _numbers(found[one]))  # the bare predictor has no client
                }
                report.compare(f"{case}, {way}", metric, value, unit, others, note=note)
            else:
                report.add(f"{case}, {way}", metric, value, unit, note=note)


def _numbers(seen: LoadSeen) -> dict[str, tuple[float, str]]:
    """Return what is reported of some requests: metric -> value, unit."""
    spent = {"processor_time": seen.processor, "client_processor_time": seen.client}
    cost = {name: (value / seen.requests * 1e3, "ms") for name, value in spent.items() if value}
    return {
        "requests_per_s": (seen.requests / seen.seconds, "requests/s"),
        **cost,
        "p50": (seen.p50 * 1e3, "ms"),
        "p99": (seen.p99 * 1e3, "ms"),
    }


def by_threads(
    ask: Callable[[Any], object], requests: list[Any], case: ServeCase, seconds: float
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
    end[0] = time.perf_counter() + seconds + 3600
    ready.wait()
    begun, used = time.perf_counter(), time.process_time()
    end[0] = begun + seconds
    for thread in threads:
        thread.join()
    passed = time.perf_counter() - begun
    ordered = sorted(seen)
    return LoadSeen(
        requests=len(seen),
        failed=0,
        seconds=passed,
        p50=percentile(ordered, 0.5),
        p99=percentile(ordered, 0.99),
        processor=time.process_time() - used,
    )


def _in_process(inference: Inference) -> Callable[[Mapping[str, Any]], object]:
    """Ask through routes, limits, batches and metrics, without a wire."""

    def ask(columns: Mapping[str, Any]) -> object:
        tensors = [WireTensor(name, "INT64", values.shape, values) for name, values in columns.items()]
        return inference.infer(InferRequest(model=NAME, tensors=tensors))

    return ask


@dataclass(frozen=True, slots=True)
class Wire:
    """A request to a server over the network."""

    kind: str
    """"http" or "grpc"."""
    address: str
    process: int
    """The first process of the server."""
    request: bytes


def over_wire(wire: Wire, case: ServeCase, seconds: float) -> LoadSeen:
    """Ask from a process of its own, after a few requests that do not count."""
    words = ["-c", COMMAND, wire.kind, wire.address, str(case.connections), str(seconds), str(wire.process)]
    done = subprocess.run(
        [sys.executable, *words],
        input=wire.request,
        capture_output=True,
        timeout=seconds + 300,
        check=False,
    )
    if done.returncode:
        raise UnavailableError(f"the client failed: {done.stderr.decode()[-2000:]}")
    return LoadSeen(**json.loads(done.stdout))


@contextmanager
def served(root: Path, *more: str, follow: str | None = None) -> Iterator[dict[str, str]]:
    """Run `monolith serve` while the block lasts; yield its addresses, and its `process`.

    Args:
        more: Further words of the command.
        follow: Where a trainer publishes.
    """
    words = ["-m", "monolith", "serve", f"{NAME}={root}", "--http-port", "0", "--grpc-port", "0"]
    # What trains here is no run with a folder: its rows are taken for those of any export.
    following = [] if follow is None else ["--follow", follow, "--follow-any-run"]
    words += [*more, *following]
    process = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ
    )
    try:
        assert process.stdout is not None
        ports: dict[str, str] = {}
        begun = time.monotonic()
        while not ports.keys() & {"ask", "serving"}:  # its last line
            line = process.stdout.readline()
            if not line or time.monotonic() - begun > START_SECONDS:
                raise UnavailableError("the server did not start; `monolith serve` says why")
            kind, _, rest = line.partition(" ")
            ports[kind] = rest.split()[0].partition("://")[2]
        yield ports | {"process": str(process.pid)}
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


def grpc_request(
    columns: Mapping[str, np.ndarray[Any, Any]], *, search: Mapping[str, int] | None = None
) -> bytes:
    """Return a message with raw tensors.

    Args:
        search: The parameters of a top-k request; None asks for predictions.
    """
    message = message_types().ModelInferRequest(model_name=NAME)
    for name, values in columns.items():
        message.inputs.add(name=name, datatype=_datatype(values), shape=[len(values)])
        message.raw_input_contents.append(_raw(values))
    for name, number in (search or {}).items():
        message.parameters[name].int64_param = number
    data: bytes = message.SerializeToString()
    return data


def http_request(
    columns: Mapping[str, np.ndarray[Any, Any]],
    *,
    binary: bool = False,
    search: Mapping[str, int] | None = None,
) -> bytes:
    """Return a request as it goes over the connection, with JSON or raw tensors behind it.

    Args:
        search: The parameters of a top-k request; None asks for predictions.
    """
    raws: list[bytes] = []
    inputs: list[dict[str, Any]] = []
    for name, values in columns.items():
        line: dict[str, Any] = {"name": name, "datatype": _datatype(values), "shape": [len(values)]}
        if binary:
            raws.append(_raw(values))
            line["parameters"] = {"binary_data_size": len(raws[-1])}
        else:
            line["data"] = values.astype(str).tolist() if values.dtype.kind == "S" else values.tolist()
        inputs.append(line)
    parameters = {"binary_data_output": binary, **(search or {})}
    head = json.dumps({"inputs": inputs, "parameters": parameters}).encode()
    length = f"Inference-Header-Content-Length: {len(head)}\r\n" if binary else ""
    body = b"".join([head, *raws])
    first = (
        f"POST /v2/models/{NAME}/{'infer' if search is None else 'topk'} HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Length: {len(body)}\r\n{length}\r\n"
    )
    return first.encode() + body


def _datatype(values: np.ndarray[Any, Any]) -> str:
    return "BYTES" if values.dtype.kind == "S" else "INT64"


def _raw(values: np.ndarray[Any, Any]) -> bytes:
    return raw_bytes(values.tolist() if values.dtype.kind == "S" else values)


WAYS: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], bytes]]] = {
    "HTTP, JSON": ("http", http_request),
    "HTTP, binary": ("http", partial(http_request, binary=True)),
    "gRPC": ("grpc", grpc_request),
}
"""How a request is sent: its transport, and what makes its bytes."""
