"""The dense half of a model becomes a graph that says what the model says."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Mapping

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
from monolith.serve.dense import DenseGraph, check_graph
from monolith.serve.exporting.tracing import TracedDense, collections_of, trace_dense

NAMES = ["user", "item", "context"]
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


def test_a_model_of_several_collections_and_lists_is_exported():
    module = with_rows(Own())
    graph, batch = loaded(trace_dense(module, outputs)), batch_of(4, NAMES)
    with torch.no_grad():
        assert torch.equal(graph(rows_of(module, batch), [])[0], outputs(module, batch)["click"])


def test_a_model_that_is_never_given_its_labels_may_still_compute_a_loss():
    def with_loss(module: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        logits = module(batch)
        nn.functional.binary_cross_entropy_with_logits(logits, batch.labels["click"])
        return {"click": torch.sigmoid(logits)}

    assert trace_dense(Own().eval(), with_loss, heads=["click"]).outputs == ("click",)


@pytest.mark.parametrize(
    ("also", "said"),
    [
        (lambda x, batch: x + batch.ids.first("item"), r"reads the ids of feature 'item' itself"),
        (lambda x, batch: x + batch.ids["item"].row_lengths(), r"reads the ids of feature 'item' itself"),
        (lambda x, batch: x + len(batch.ids.ids), r"reads the ids of all features, by batch\.ids\.ids"),
        (lambda x, batch: x + len(batch), r"asks for len\(batch\).*batch\.ids\.batch_size"),
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

    with pytest.raises(ExportError, match="ids that it has made itself"):
        trace_dense(Made().eval(), outputs)


# What is in the file


def test_a_graph_holds_no_weights_and_nothing_pickled():
    traced = trace_dense(Own().eval(), outputs)
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
        ("sample_inputs/model.pt", lambda _: b"cos\nsystem\n", "example inputs, which are pickled"),
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
        ("model.json", lambda data: data[:100], "no graph of torch.export"),
        ("byteorder", lambda data: data, None),
    ],
)
def test_a_graph_with_anything_else_in_it_is_refused_before_torch_reads_it(member, change, said):
    graph = changed(trace_dense(Own().eval(), outputs).graph, member, change)
    if said is None:
        check_graph(graph, "g.pt2")
        return
    with pytest.raises(CorruptFileError, match=said):
        check_graph(graph, "g.pt2")


def test_a_file_that_is_no_archive_is_refused():
    with pytest.raises(CorruptFileError, match=r"g\.pt2.*no graph"):
        check_graph(b"hello", "g.pt2")


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
    graph = loaded(trace_dense(Own().eval(), outputs))
    with pytest.raises(RestoreError, match=said):
        graph.swap(weights)
