"""The dense half of a model becomes a graph that says what the model says."""

from __future__ import annotations

import io
import json
import math
import operator
import re
import struct
import zipfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from monolith.errors import CorruptFileError, ExportError, RestoreError
from monolith.feature import CONCAT, NONE, Batch, FeatureIds, FirstN, Layout
from monolith.model import (
    DLRM,
    FFM,
    DCNv2,
    DeepFM,
    DeepInterest,
    EmbeddingCollection,
    Feature,
    FeatureSet,
    MMoE,
    TwoTower,
)
from monolith.serve import dense
from monolith.serve.dense import DenseGraph, _without_python, clean_graph
from monolith.serve.operators import OPERATORS
from monolith.serve.tracing import TracedDense, collections_of, trace_dense

NAMES = ["user", "item", "context"]
HERE = re.escape(__file__)
FLOATS = {"price": 1, "where": 2}


def outputs(module: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
    found = module(batch)
    by_head = found if isinstance(found, Mapping) else {"click": found}
    return {head: torch.sigmoid(one) for head, one in by_head.items()}


def batch_of(size: int, names: list[str], seed: int = 0, each: int = 1) -> Batch:
    random = torch.Generator().manual_seed(seed)
    ids = FeatureIds.pack({name: torch.randint(0, 9, (size, each), generator=random) for name in names})
    return Batch(ids, {name: torch.rand(size, width, generator=random) for name, width in FLOATS.items()})


def with_rows(module: nn.Module) -> nn.Module:
    """Give every row that batches may ask for values of its own."""
    random = torch.Generator().manual_seed(7)
    for collection in collections_of(module):
        for name in collection.store.tables:
            table = collection.store.table(name)
            table.assign(torch.arange(9), torch.rand(9, table.dim, generator=random) - 0.5, event_time=1)
    return module.eval()


READY: dict[str, Callable[[], nn.Module]] = {
    "deepfm": lambda: DeepFM(NAMES, dim=4, hidden=(8,), floats=FLOATS),
    "deepfm with kernel norm and dropout": lambda: DeepFM(
        NAMES, dim=4, hidden=(8,), floats=FLOATS, kernel_norm=True, dropout=0.5
    ),
    "dcnv2": lambda: DCNv2(NAMES, dim=4, hidden=(8,), floats=FLOATS),
    "dlrm": lambda: DLRM(NAMES, dim=4, bottom=(4,), top=(8,), floats=FLOATS),
    "ffm": lambda: FFM(NAMES, [("user", "item", 4), ("user", "context", 4)]),
    "mmoe": lambda: MMoE(
        NAMES, tasks=["click", "buy"], dim=4, num_experts=2, experts=(8,), hidden=(4,), floats=FLOATS
    ),
    "din": lambda: DeepInterest(
        ["user", "item", Feature(name="context", shares="item", combiner=FirstN(3))],
        dim=4,
        attention=(4,),
        hidden=(8,),
        floats=FLOATS,
    ),
    "two-tower": lambda: TwoTower(NAMES, item=["item"], dim=4, hidden=(8,), out=4),
}


@pytest.mark.parametrize("name", READY)
def test_every_ready_model_is_exported_and_says_the_same_to_the_bit(name):
    module = with_rows(READY[name]())
    traced = trace_dense(module, outputs, floats=FLOATS)
    graph = loaded(traced)
    for size in (1, 3, 64):
        batch = batch_of(size, NAMES, seed=size)
        with torch.no_grad():
            wanted = outputs(module, batch)
            found = graph(rows_of(module, batch), list(batch.floats.values()))
        assert traced.outputs == tuple(wanted)
        for head, one in zip(traced.outputs, found, strict=True):
            assert torch.equal(one, wanted[head]), (head, size)


def loaded(traced: TracedDense) -> DenseGraph:
    return DenseGraph(traced.graph, traced.weights)


def rows_of(module: nn.Module, batch: Batch) -> list[Tensor]:
    found: list[Tensor] = []
    for collection in collections_of(module):
        for made in collection(batch).values():
            found += made if isinstance(made, list) else [made]
    return found


class Own(nn.Module):
    """A model over two collections, one of which gives lists, with `also` in the middle."""

    def __init__(self, also: Callable[[Tensor, Batch], Tensor] = lambda x, _: x) -> None:
        super().__init__()
        features = FeatureSet(["user", "item"])
        self.first = EmbeddingCollection([Layout("a", NONE, features.slices(["user", "item"], "v", 4))])
        other = FeatureSet(["context"])
        self.second = EmbeddingCollection([Layout("b", CONCAT, other.slices(["context"], "v", 4))])
        self.linear = nn.Linear(12, 1)
        self.also = also

    def forward(self, batch: Batch) -> Tensor:
        x = torch.cat([*self.first(batch)["a"], self.second(batch.ids)["b"]], 1)
        return self.also(self.linear(x).squeeze(1), batch)


@cache
def traced_own() -> TracedDense:
    return trace_dense(Own().eval(), outputs)


def test_a_model_of_several_collections_and_lists_is_exported():
    module = with_rows(Own())
    graph, batch = loaded(trace_dense(module, outputs)), batch_of(4, NAMES)
    with torch.no_grad():
        assert torch.equal(graph(rows_of(module, batch), [])[0], outputs(module, batch)["click"])


def test_a_graph_that_computes_with_the_number_of_rows_is_run_without_python(caplog):
    caplog.set_level("INFO", "monolith.serve.dense")
    module = with_rows(Own(lambda x, _: x.view(x.shape[0], 1).expand(x.shape[0], 3).sum(1)))
    graph = loaded(trace_dense(module, outputs))
    assert "run by Python" not in caplog.text
    for rows in (1, 4, 9, 64):
        batch = batch_of(rows, NAMES)
        with torch.no_grad():
            assert torch.equal(graph(rows_of(module, batch), [])[0], outputs(module, batch)["click"])


class AddsNoise(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x + torch.rand_like(x),)


def test_a_graph_whose_record_gives_other_answers_is_run_by_python(caplog):
    caplog.set_level("INFO", "monolith.serve.dense")
    module = torch.fx.symbolic_trace(AddsNoise())
    assert _without_python(module, (), lambda rows: [torch.rand(rows, 3)], "graph.pt2") == module.forward
    assert (
        "graph.pt2 is run by Python, operator by operator: it gives other answers for 1 rows" in caplog.text
    )


def test_a_model_that_is_never_given_its_labels_may_still_compute_a_loss():
    def with_loss(module: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        logits = module(batch)
        nn.functional.binary_cross_entropy_with_logits(logits, batch.labels["click"])
        return {"click": torch.sigmoid(logits)}

    assert trace_dense(Own().eval(), with_loss, heads=["click"]).outputs == ("click",)


@pytest.mark.parametrize(
    ("also", "said"),
    [
        (lambda x, batch: x + batch.ids.first("item"), r"reads the IDs of feature 'item' outside of its"),
        (lambda x, batch: x + batch.ids["item"].row_lengths(), r"reads the IDs of feature 'item' outside"),
        (lambda x, batch: x + len(batch.ids.ids), r"reads the IDs of all features, by batch\.ids\.ids"),
        (lambda x, batch: x + len(batch), r"calls len\(batch\).*batch\.ids\.batch_size"),
        (lambda x, _: x if float(x.sum()) > 0 else -x, r"torch\.export cannot trace Own: "),
        (lambda x, _: x[:2], r"predicts 'click' with shape \(2,\)"),
    ],
)
def test_a_model_that_cannot_be_exported_is_told_why_and_what_to_do(also, said):
    with pytest.raises(ExportError, match=said) as error:
        trace_dense(Own(also).eval(), outputs)
    if "shape" not in said:
        assert "--as-module" in str(error.value)


def test_a_model_that_looks_up_ids_of_its_own_making_is_told_so():
    class Made(Own):
        def forward(self, batch: Batch) -> Tensor:  # noqa: ARG002
            return self.linear(self.first({"user": torch.arange(3)})["a"][0]).squeeze(1)

    with pytest.raises(ExportError, match="IDs that it computes itself"):
        trace_dense(Made().eval(), outputs)


# What is in the file


def test_a_graph_holds_no_weights_and_nothing_pickled():
    traced = traced_own()
    with zipfile.ZipFile(io.BytesIO(traced.graph)) as archive:
        sizes = {name.partition("/")[2]: archive.getinfo(name).file_size for name in archive.namelist()}
        assert sizes["data/sample_inputs/model.pt"] == 0
        assert archive.read("archive/data/weights/model_weights_config.json") == b'{"config": {}}'
    assert sorted(traced.weights) == ["linear.bias", "linear.weight"]


def changed(graph: bytes, member: str, change: Callable[[bytes], bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(graph)) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, change(data) if name.endswith(member) else data)
    return made.getvalue()


@pytest.mark.parametrize(
    ("member", "change", "said"),
    [
        (
            "weights_config.json",
            lambda _: b'{"config": {"w": {"path_name": "weight_0", "use_pickle": true}}}',
            "tensor 'w' is pickled",
        ),
        ("sample_inputs/model.pt", lambda _: b"cos\nsystem\n", "pickled example inputs"),
        (
            "model.json",
            lambda data: data.replace(b"torch.ops.aten.sigmoid.default", b"torch.os.system"),
            r"calls 'torch\.os\.system'",
        ),
        (
            "model.json",
            lambda data: data.replace(b'"expr_str": "', b'"expr_str": "__import__(os)+'),
            "a size in it is .__import__",
        ),
        (
            "model.json",
            lambda data: data.replace(b"torch.ops.aten.sigmoid.default", b"torch.ops.aten.from_file.default"),
            r"calls 'torch\.ops\.aten\.from_file\.default', which is not an allowed operator",
        ),
        (
            "model.json",  # the name of an input is source code for torch.fx
            lambda data: data.replace(b'"weights_0"', b"\"w=__import__('os').getpid()\""),
            "has the invalid name .w=__import__",
        ),
        (
            "model.json",  # torch would import the module
            lambda data: data.replace(b"builtins.tuple", b"collections.defaultdict"),
            "arguments are in 'collections.defaultdict'",
        ),
        (
            "model.json",
            lambda data: data.replace(b'"arg": {"as_tensor":', b'"arg": {"as_operator":', 1),
            "an argument of the kind 'as_operator'",
        ),
        (
            "model.json",
            lambda data: data.replace(b'"device": {"type": "cpu"', b'"device": {"type": "cuda"', 1),
            "computes on 'cuda'",
        ),
        (
            "constants_config.json",
            lambda _: b'{"config": {"w": {"path_name": "opaque_obj_0", "use_pickle": false}}}',
            "tensor 'w' is a Python object",
        ),
        ("model.json", lambda data: data[:100], "no graph of torch.export"),
    ],
)
def test_a_graph_with_anything_else_in_it_is_refused_before_torch_reads_it(member, change, said):
    graph = changed(traced_own().graph, member, change)
    with pytest.raises(CorruptFileError, match=said):
        clean_graph(graph, "g.pt2")


@pytest.mark.parametrize("member", ["model.json", "constants_config.json"])
def test_a_graph_of_too_much_json_is_refused_before_it_is_read(member, monkeypatch):
    """As Python objects, JSON takes seven times its bytes: 700 MB cost 5 GiB."""
    graph = changed(traced_own().graph, member, lambda data: data + b" " * (dense.MOST_JSON_BYTES + 1))
    monkeypatch.setattr(json, "loads", lambda *_: pytest.fail("it was read"))
    with pytest.raises(CorruptFileError, match=f"more than {dense.MOST_JSON_BYTES} bytes of JSON"):
        clean_graph(graph, "g.pt2")


def two_directories(checked: bytes, loaded: bytes) -> bytes:
    """Return an archive of which zipfile reads the one graph, and torch the other.

    zipfile takes the ZIP64 record right before the locator, torch the one that the locator points to.
    """

    def record(size: int, at: int, count: int) -> bytes:
        return struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, at)

    parts, directories, at = [], [], 0
    for graph in (loaded, checked):
        with zipfile.ZipFile(io.BytesIO(graph)) as archive:
            begins, count = archive.start_dir, len(archive.namelist())
        end = graph.rindex(b"PK\5\6")
        moved = bytearray(graph[begins:end])
        place = 0
        for _ in range(count):  # members are `at` bytes further on
            was = struct.unpack_from("<I", moved, place + 42)[0]
            struct.pack_into("<I", moved, place + 42, was + at)
            place += 46 + sum(struct.unpack_from("<3H", moved, place + 28))
        parts.append(graph[:begins])
        directories.append((bytes(moved), count))
        at += begins
    theirs = at + len(directories[0][0])
    made = b"".join(parts) + directories[0][0] + record(len(directories[0][0]), at, directories[0][1])
    own_at = len(made)
    made += directories[1][0] + record(len(directories[1][0]), own_at, directories[1][1])
    made += struct.pack("<4sIQI", b"PK\6\7", 0, theirs, 1)
    return made + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)


def test_an_archive_with_two_directories_is_loaded_as_it_was_checked_or_refused():
    good = traced_own()
    touched = [b"torch.ops.aten.sigmoid.default", b"torch.ops.aten.tanh.default"]
    other = changed(good.graph, "model.json", lambda data: data.replace(*touched))
    archive = two_directories(checked=changed(good.graph, "byteorder", bytes), loaded=other)
    read_by_torch = [str(node.target) for node in torch.export.load(io.BytesIO(archive)).graph.nodes]
    assert "aten.tanh.default" in read_by_torch  # the attack works on torch alone
    try:
        rebuilt = torch.export.load(io.BytesIO(clean_graph(archive, "g.pt2")))
    except CorruptFileError as refused:
        assert "zip64" in str(refused)  # noqa: PT017  zipfile of Python 3.12.3 and later reads no such archive
        return
    names = [str(node.target) for node in rebuilt.graph.nodes]
    assert "aten.tanh.default" not in names
    assert "aten.sigmoid.default" in names
    rows, floats = good.example
    assert torch.equal(DenseGraph(archive, good.weights)(rows, floats)[0], loaded(good)(rows, floats)[0])


def test_a_model_with_an_operator_that_is_not_served_is_told_so_when_it_is_exported():
    with pytest.raises(ExportError, match=r"aten\.rand_like.*not an allowed operator.*--as-module"):
        trace_dense(Own(lambda x, _: x + 0 * torch.rand_like(x)).eval(), outputs)


def test_a_graph_names_no_folder_of_the_machine_that_exported_it():
    with zipfile.ZipFile(
        io.BytesIO(trace_dense(READY["dcnv2"]().eval(), outputs, floats=FLOATS).graph)
    ) as archive:
        whole = b"".join(archive.read(name) for name in archive.namelist())
    for folder in (Path(__file__).parents[2], Path.home(), Path(torch.__file__).parents[1]):
        assert str(folder).encode() not in whole
    assert b".py" not in whole
    assert b"def forward" not in whole


def test_operators_that_are_served_exist_and_touch_nothing_but_tensors():
    plain = {"Tensor", "number", "int", "SymInt", "float", "bool", "str", "Device", "Layout"}
    for text in OPERATORS:
        root, _, rest = text.partition(".")
        found = {"torch": torch, "math": math, "_operator": operator}[root]
        for part in rest.split("."):
            found = getattr(found, part)
        if not text.startswith("torch.ops."):
            continue
        schema = found._schema
        for argument in schema.arguments:
            kind = re.sub(r"Optional|List|\[|\]", "", str(argument.type))
            assert kind in plain, (text, kind)
            assert "file" not in argument.name, text
        draws = torch.Tag.nondeterministic_seeded in found.tags
        assert not draws or "dropout" in text or "attention" in text or text.endswith(".input"), text
    for text in ("aten.from_file.default", "aten.empty.memory_format", "aten.as_strided.default"):
        assert f"torch.ops.{text}" not in OPERATORS


def test_a_file_that_is_no_archive_is_refused():
    with pytest.raises(CorruptFileError, match=r"g\.pt2.*no graph"):
        clean_graph(b"hello", "g.pt2")


# Weights


def test_weights_are_swapped_between_two_calls():
    module = with_rows(Own())
    traced = trace_dense(module, outputs)
    graph, batch = loaded(traced), batch_of(4, NAMES)
    graph.swap({"linear.weight": torch.zeros(1, 12), "linear.bias": torch.zeros(1)})
    assert graph(rows_of(module, batch), [])[0].tolist() == [0.5] * 4
    assert graph.weights["linear.bias"].tolist() == [0.0]


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"linear.weight": torch.zeros(1, 12)}, "'linear.bias' is only in one"),
        ({"linear.weight": torch.zeros(2, 12), "linear.bias": torch.zeros(1)}, "'linear.weight' has shape"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights, said):
    graph = loaded(traced_own())
    with pytest.raises(RestoreError, match=said):
        graph.swap(weights)


# A model of one's own that no graph can hold


class _Own(nn.Module):
    """A model of a person, over embeddings of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = DeepFM(NAMES, dim=4, hidden=(4,))


class ByValue(_Own):
    def forward(self, batch: Batch) -> Tensor:
        logits: Tensor = self.inner(batch)
        if logits.sum() > 0:  # decides by value
            return logits
        return -logits


class ByItem(_Own):
    def forward(self, batch: Batch) -> Tensor:
        logits: Tensor = self.inner(batch)
        return logits[: int(logits.max().item())]  # makes a number


class ReadsIds(_Own):
    def forward(self, batch: Batch) -> Tensor:
        first = batch.ids.first("user")  # looks at ids
        logits: Tensor = self.inner(batch)
        return logits + first


class Remembers(_Own):
    def forward(self, batch: Batch) -> Tensor:
        logits: Tensor = self.inner(batch)
        return logits * (1 if torch.compiler.is_compiling() else 2)


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


@pytest.mark.parametrize(
    ("model", "marker", "advice"),
    [
        (ByValue, "# decides by value", "use torch.where, or a mask"),
        (ByItem, "# makes a number", "use torch.where, or a mask"),
        (ReadsIds, "# looks at ids", "Read a float feature or a layout instead"),
    ],
)
def test_an_error_names_the_line_of_the_model_and_what_to_do(
    model: type[nn.Module], marker: str, advice: str
) -> None:
    with pytest.raises(ExportError) as raised:
        trace_dense(with_rows(model()), outputs)
    said = str(raised.value)
    assert said.startswith(f"{__file__}:{line_of('  ' + marker)}, in forward: ")
    assert advice in said
    assert "--as-module" in said


def test_a_graph_that_says_something_else_names_the_class_of_the_model() -> None:
    place = f"^{HERE}:{line_of('class Remembers')}, class Remembers: "
    with pytest.raises(ExportError, match=f"{place}the graph predicts something else.*torch.where"):
        trace_dense(with_rows(Remembers()), outputs)
