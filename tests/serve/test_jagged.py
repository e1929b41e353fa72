"""Histories as inputs of a graph: of any length, and what it says is what the model says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from monolith import HSTU, Batch, Each, Feature, RaggedTensor, SASRec
from monolith.errors import LayerArgumentError
from monolith.feature import FeatureIds
from monolith.model import GRU4Rec, SequenceRanker
from monolith.serve.dense import DenseGraph
from monolith.serve.jagged import JaggedInputs
from monolith.serve.tracing import collections_of, trace_dense, trace_histories

FEATURES = [
    "item",
    "action",
    Feature(name="history", shares="item", combiner=Each()),
    Feature(name="history.action", shares="action", combiner=Each()),
]
MODELS: dict[str, Callable[[], Any]] = {
    "sasrec": lambda: SASRec(FEATURES, dim=8, heads=2, max_length=6),
    "hstu": lambda: HSTU(FEATURES, dim=8, max_length=6),
    "hstu without times": lambda: HSTU(FEATURES, dim=8, max_length=6, time_buckets=0),
    "ranker with hstu": lambda: SequenceRanker(FEATURES, dim=8, hidden=(8,), max_length=6),
    "ranker with sasrec": lambda: SequenceRanker(
        FEATURES, encoder="sasrec", dim=8, hidden=(8,), max_length=6
    ),
}
LENGTHS: list[list[int]] = [[3, 0, 6, 1], [0], [1], [6], [0, 0], [2, 2, 2], [5, 0]]


def with_rows(model: Any) -> Any:
    random = torch.Generator().manual_seed(7)
    for name in model.embeddings.store.tables:
        table = model.embeddings.store.table(name)
        table.assign(torch.arange(9), torch.rand(9, table.dim, generator=random) - 0.5, event_time=1)
    return model.eval()


def batch_of(lengths: list[int], *, event_times: bool = True) -> Batch:
    random = torch.Generator().manual_seed(sum(lengths))
    size, steps = torch.tensor(lengths), sum(lengths)
    drawn = [torch.randint(0, 9, (steps,), generator=random) for _ in range(2)]
    times = torch.randint(1, 100_000, (steps,), generator=random).cumsum(0)
    values = {"history": drawn[0], "history.action": drawn[1], "history.time": times}
    features: dict[str, Any] = {
        name: RaggedTensor.from_row_lengths(one, size) for name, one in values.items()
    }
    features["item"] = features["action"] = torch.randint(0, 9, (len(lengths),), generator=random)
    now = torch.full((len(lengths),), 1_000_000)
    return Batch(FeatureIds.pack(features, event_times=now if event_times else None))


def tensors_of(model: Any, batch: Batch, times: tuple[str, ...]) -> list[Tensor]:
    (collection,) = collections_of(model)
    found = collection.gather(batch)
    rows = collection.prepare(batch).rows
    return JaggedInputs([collection.plan], times).tensors(found.gather(rows), batch.ids)


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_says_what_the_model_says_for_histories_of_any_length(name: str) -> None:
    model = with_rows(MODELS[name]())
    traced = trace_dense(model, lambda module, batch: {"score": module(batch)})
    graph = DenseGraph(traced.graph, traced.weights, record=False)
    assert traced.times == (("history.time",) if "hstu" in name and "without" not in name else ())
    for lengths in LENGTHS:
        for event_times in (True, False):
            batch = batch_of(lengths, event_times=event_times)
            with torch.no_grad():
                (found,) = graph(tensors_of(model, batch, traced.times), [])
                assert_close(found, model(batch), rtol=1e-5, atol=1e-6)


def test_the_vectors_of_users_and_items_are_graphs_too() -> None:
    model = with_rows(MODELS["hstu"]())
    for call in (model.users, model.items):
        traced = trace_dense(model, lambda _, batch, call=call: {"vector": call(batch)}, vectors=True)  # type: ignore[misc]
        graph = DenseGraph(traced.graph, traced.weights, record=False)
        items_alone = Batch(FeatureIds.pack({"item": torch.arange(4)}))
        for batch in (*map(batch_of, LENGTHS), items_alone):
            with torch.no_grad():
                (found,) = graph(tensors_of(model, batch, traced.times), [])
                assert_close(found, call(batch), rtol=1e-5, atol=1e-6)


def test_a_recurrent_network_is_no_graph() -> None:
    with pytest.raises(LayerArgumentError, match=r"recurrent network .* export a model with HSTU"):
        trace_dense(GRU4Rec(FEATURES, dim=8).eval(), lambda module, batch: {"score": module(batch)})


@pytest.mark.parametrize("name", [name for name in MODELS if "ranker" in name])
def test_a_ranker_is_cut_into_two_graphs(name: str) -> None:
    """`trace_histories` compares both with the whole, for several users, also without items."""
    model = with_rows(MODELS[name]())
    for graph in trace_histories(model, lambda module, batch: {"score": module(batch)}, model):
        assert graph
