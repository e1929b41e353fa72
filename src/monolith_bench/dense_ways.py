"""The dense half of a servable model, run in each of the ways that there are.

Processor time of a call on one thread, by turns: the exported graph by Python, operator by operator;
recorded, as a server runs it; compiled by AOTInductor (`monolith export --compile`), where there is a C++
compiler; and by ONNX Runtime with constant weights, where `onnxruntime` and `onnxscript` are installed.
"""

from __future__ import annotations

import io
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from monolith.errors import ExportError
from monolith.serve.dense import CompiledDense, DenseGraph, compile_graph
from monolith.serve.tracing import TracedDense
from monolith_bench.options import BenchServeOptions
from monolith_bench.report import Report
from monolith_bench.served_deepfm import traced_deepfm
from monolith_bench.timing import one_thread

Ask = Callable[[Sequence[Tensor]], Sequence[Any]]
RECORDED = "recorded"
"""The way of a server."""


def measure_dense(report: Report, options: BenchServeOptions) -> None:
    """Compare the ways to run the dense half of the bench's model."""
    report.say("ways to run the dense half")
    _, _, traced = traced_deepfm(options)
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        ways = _ways(report, traced, Path(folder), compiles=not options.quick)
        for batch in options.batches:
            draw = torch.Generator().manual_seed(batch)
            rows = [torch.rand((batch, *one.shape[1:]), generator=draw) - 0.5 for one in traced.example[0]]
            best = dict.fromkeys(ways, float("inf"))
            for _ in range(4 * options.repeats):  # short turns: what else the machine does meets all of them
                for name, ask in ways.items():
                    best[name] = min(best[name], processor_seconds(ask, rows, options.seconds / 20) * 1e6)
            case = f"dense half, batch {batch}"
            baseline = {f"{case}, {RECORDED}": best.pop(RECORDED)}
            for name, value in baseline.items():
                report.add(name, "processor_us", value, "us")
            for name, value in best.items():
                report.compare(f"{case}, {name}", "processor_us", value, "us", baseline)
    report.show("Ways to run the dense half, one thread")


def _ways(report: Report, traced: TracedDense, folder: Path, *, compiles: bool) -> dict[str, Ask]:
    """Return what runs the graph in each way, by name; all give the same answers."""
    graph, weights = traced.graph, traced.weights
    plain, recorded = (DenseGraph(graph, weights, record=record) for record in (False, True))
    ways: dict[str, Ask] = {
        RECORDED: lambda rows: recorded(rows, ()),
        "by Python": lambda rows: plain(rows, ()),
    }
    sample = traced.example[0]
    if compiles:
        package = folder / "compiled.pt2"
        try:
            package.write_bytes(compile_graph(graph, weights, traced.example))
        except ExportError as error:
            report.say(f"AOTInductor is left out: {error}")
        else:
            compiled = CompiledDense(str(package), weights)
            ways["AOTInductor"] = lambda rows: compiled(rows, ())
    if find_spec("onnxruntime") is not None and find_spec("onnxscript") is not None:
        ways["ONNX Runtime"] = _by_onnx_runtime(traced, folder / "dense.onnx")
    with torch.inference_mode():
        expected = recorded(sample, ())[0]
        for name, ask in ways.items():
            found = torch.as_tensor(ask(sample)[0])
            if not torch.allclose(found, expected, rtol=1e-4, atol=1e-5):
                raise ExportError(f"{name} does not give the answers of the graph")
    return ways


class _WithWeights(nn.Module):
    """A graph whose weights are constants."""

    def __init__(self, traced: TracedDense) -> None:
        super().__init__()
        self._graph = torch.export.load(io.BytesIO(traced.graph)).module()
        for number, weight in enumerate(traced.weights.values()):
            self.register_buffer(f"weight_{number}", weight)

    def forward(self, *rows: Tensor) -> Any:
        return self._graph(list(self.buffers(recurse=False)), list(rows), [])


def _by_onnx_runtime(traced: TracedDense, path: Path) -> Ask:
    import onnxruntime  # type: ignore[import-not-found, import-untyped, unused-ignore]

    for talkative in ("onnx_ir", "onnxscript", "torch.onnx"):
        logging.getLogger(talkative).setLevel(logging.ERROR)
    sample = tuple(traced.example[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about itself
        torch.onnx.export(
            _WithWeights(traced),
            sample,
            path,
            dynamo=True,
            verbose=False,
            dynamic_shapes={"rows": tuple({0: torch.export.Dim("examples", min=1)} for _ in sample)},
        )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]

    def ask(rows: Sequence[Tensor]) -> Sequence[Any]:
        found: Sequence[Any] = session.run(
            None, {name: row.numpy() for name, row in zip(names, rows, strict=True)}
        )
        return found

    return ask


def processor_seconds(ask: Ask, rows: Sequence[Tensor], seconds: float) -> float:
    """Return the mean processor time of a call, over about so many seconds."""
    with torch.inference_mode():
        for _ in range(5):
            ask(rows)
        count, begun = 0, time.process_time()
        while (passed := time.process_time() - begun) < seconds:
            for _ in range(10):
                ask(rows)
            count += 10
    return passed / max(1, count)
