"""A ranking request, one row of the user and many of items, is answered as full rows are.

The equality is checked for each ready model, whichever of its features are the user's; through the batcher
and over every transport in `server/test_candidates.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from serve.served_tasks import columns, exported, trained
from torch import Tensor, nn

from monolith import native
from monolith.errors import RequestError, RequestTooLargeError
from monolith.feature import (
    Batch,
    CrossFeature,
    FeatureIds,
    FeatureSpec,
    FloatFeature,
    Gatherer,
    IdFeature,
    SequenceFeature,
)
from monolith.model import DLRM, DCNv2, DeepFM, DeepInterest, MMoE, TwoTower
from monolith.serve import FoundRows, Predictor
from monolith.serve.candidates import CandidateColumns, CandidateRunner, find_candidates
from monolith.serve.dense import DenseGraph
from monolith.serve.manifest import Servable, ServableCollection, ServableDense, Signature
from monolith.serve.predictor import GraphRunner
from monolith.serve.request_reader import RequestReader
from monolith.serve.rows import gather_looked_up
from monolith.serve.tracing import TracedDense, collections_of, trace_dense
from monolith.store import TableIds

IDS = {name: IdFeature() for name in ("city", "item", "shop", "user")}
FLOATS = {"age": FloatFeature(), "price": FloatFeature()}
PLAIN = FeatureSpec(features={**IDS, **FLOATS})
LISTED = FeatureSpec(features={**IDS, **FLOATS, "seen": SequenceFeature(length=3, shares="item")})
CROSSED = FeatureSpec(features={**IDS, **FLOATS, "both": CrossFeature(of=("user", "item"))})
MODELS = {
    "deepfm": (PLAIN, lambda: DeepFM(PLAIN, dim=4, hidden=(8, 4), kernel_norm=True, threads=1)),
    "deepfm, crossed": (CROSSED, lambda: DeepFM(CROSSED, dim=4, hidden=(8,), threads=1)),
    "dcn": (PLAIN, lambda: DCNv2(PLAIN, dim=4, hidden=(8,), threads=1)),
    "dlrm": (PLAIN, lambda: DLRM(PLAIN, dim=4, bottom=(8,), top=(8,), threads=1)),
    "din": (LISTED, lambda: DeepInterest(LISTED, dim=4, attention=(4,), hidden=(8,), threads=1)),
    "mmoe": (PLAIN, lambda: MMoE(PLAIN, tasks=["click", "buy"], dim=4, threads=1)),
    "two_tower": (PLAIN, lambda: TwoTower(PLAIN, item=("item", "shop", "price"), dim=4, threads=1)),
}
COLUMNS: Mapping[str, Any] = {
    "user": np.array([17]),
    "city": np.array([3]),
    "age": np.array([31.0], np.float32),
    "seen": [[7, 8]],
    "item": np.array([7, 8, 9, 7]),
    "shop": np.array([1, 1, 2, 2]),
    "price": np.array([3.5, 4.0, 0.5, 1.0], np.float32),
}


class NumberedRows:
    """Rows that differ by ID and table, without files."""

    claim = None

    def __init__(self, tables: Mapping[str, int]) -> None:
        self.tables = dict(sorted(tables.items()))
        self.looked_up = 0

    def lookup(self, ids: TableIds, *, deadline: float | None = None) -> FoundRows:  # noqa: ARG002
        self.looked_up += len(ids.ids)
        parts = torch.split(ids.ids, ids.sizes.tolist())
        rows = [
            torch.sin(part[:, None] * 1.7 + torch.arange(width) + number).reshape(-1)
            for number, (part, width) in enumerate(zip(parts, self.tables.values(), strict=True))
        ]
        return FoundRows(torch.cat(rows).float())

    def gather(self, gatherer: Gatherer, ids: FeatureIds, *, deadline: float | None = None) -> Any:
        return gather_looked_up(self, gatherer, ids, deadline)

    def ids(self, table: str) -> None: ...

    def follow(self, attach: object) -> None: ...

    def close(self) -> None: ...


def predictions(module: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
    found = module(batch)
    return dict(found) if isinstance(found, Mapping) else {"click": found}


@cache
def traced_model(name: str) -> tuple[nn.Module, TracedDense]:
    spec, make = MODELS[name]
    module = make().eval()
    return module, trace_dense(module, predictions, floats=spec.floats)


def ready(name: str) -> SimpleNamespace:
    """Return a model to be asked with full rows and by side."""
    spec, _ = MODELS[name]
    module, traced = traced_model(name)
    reader = RequestReader(spec)
    collections = collections_of(module)
    servable = Servable(
        model=name,
        version="1",
        run="",
        checkpoint="",
        step=1,
        watermark=None,
        created=0.0,
        digest="",
        features=spec.to_dict(),
        signature=Signature(inputs=reader.inputs, outputs=()),
        collections=tuple(ServableCollection.of(one.inputs, one.layouts) for one in collections),
        dense=ServableDense(
            kind="exported",
            weights=tuple(traced.weights),
            floats=dict(spec.floats),
            outputs=traced.outputs,
            torch="",
        ),
    )
    tables = {name: c.dim for one in collections for name, c in one.slot_tables.configs.items()}
    rows, workers = NumberedRows(tables), native.Workers(1)
    graph = DenseGraph(traced.graph, traced.weights)
    gatherers = [Gatherer(one.plan(rows.tables), workers) for one in servable.collections]
    full = GraphRunner(graph, gatherers, rows, tuple(spec.floats), traced.outputs)
    return SimpleNamespace(
        reader=reader,
        rows=rows,
        graph=graph,
        full=full,
        ranking=CandidateRunner(servable, graph, rows, workers, [one.name for one in reader.inputs]),
        asked=lambda: find_candidates(COLUMNS, [one.name for one in reader.inputs]),
    )


def assert_equal_to_full_rows(model: SimpleNamespace, asked: CandidateColumns) -> None:
    found = model.ranking.run(asked, None)
    assert found is not None
    wanted, _ = model.full.run(model.reader.batch(asked.full()), None)
    assert found[0].keys() == wanted.keys()
    for head, values in wanted.items():
        torch.testing.assert_close(found[0][head], values, rtol=1e-6, atol=1e-6)
        assert len(values.unique()) > 1


@pytest.mark.parametrize("name", MODELS)
def test_each_ready_model_answers_as_with_full_rows(name):
    model = ready(name)
    asked = model.asked()
    assert_equal_to_full_rows(model, asked)
    two = CandidateColumns(
        {name: [*column, *column] for name, column in asked.shared.items()} | {"user": np.array([17, 18])},
        asked.own,
        np.array([3, 1]),
    )
    assert_equal_to_full_rows(model, two)


@pytest.mark.parametrize(
    "shared", [("user",), ("city", "price", "shop"), ("item",), ("age",), ("age", "price")]
)
def test_any_columns_may_be_those_with_one_row(shared):
    model = ready("deepfm")
    asked = CandidateColumns(
        {name: COLUMNS[name][:1] for name in COLUMNS if name in shared},
        {name: np.resize(COLUMNS[name], 4) for name in COLUMNS if name not in (*shared, "seen")},
        np.array([4]),
    )
    assert_equal_to_full_rows(model, asked)


def test_the_rows_of_the_user_are_looked_up_once():
    model = ready("deepfm")
    model.ranking.run(model.asked(), None)
    assert model.rows.looked_up == 2 + 3 + 2  # user and city; distinct items and shops


def test_swapped_weights_are_those_of_the_next_request():
    model = ready("deepfm")
    before, _ = model.ranking.run(model.asked(), None)
    model.graph.swap({name: one * 1.5 + 0.1 for name, one in model.graph.weights.items()})
    after, _ = model.ranking.run(model.asked(), None)
    assert not torch.allclose(before["click"], after["click"], atol=1e-3)
    assert_equal_to_full_rows(model, model.asked())


def test_a_graph_that_mixes_rows_is_answered_with_full_rows(caplog):
    model = ready("deepfm")
    graph = model.graph._whole  # what the split is made of, and not what answers full rows
    relu = next(node for node in graph.nodes if "sum" in str(node.target))
    relu.args = (relu.args[0], [0])  # over examples, in place of features
    assert model.ranking.run(model.asked(), None) is None
    assert "ranking requests are answered with full rows" in caplog.text


def test_a_bounded_number_of_ways_is_split():
    model = ready("deepfm")
    names = [name for name in COLUMNS if name != "seen"]
    answers = []
    for number in range(1, 20):
        own = {name: np.resize(COLUMNS[name], 4) for bit, name in enumerate(names) if number >> bit & 1}
        shared = {name: COLUMNS[name][:1] for name in names if name not in own}
        answers.append(model.ranking.run(CandidateColumns(shared, own, np.array([4])), None))
    assert [one is None for one in answers] == [False] * 16 + [True] * 3


# What is a ranking request


@pytest.fixture(scope="module")
def predictor(tmp_path_factory):
    root = tmp_path_factory.mktemp("servables")
    exported(trained(tmp_path_factory.mktemp("run")), root)
    with Predictor(str(root), show=False) as predictor:
        yield predictor


USER = ("user_id", "history", "where")


def asked_by_side(rows: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a request with one row of the user's columns, and the same with full rows."""
    full = columns(rows, seed=9)
    for name in USER:
        full[name] = full[name][:1] * rows
    return {name: full[name][:1] if name in USER else full[name] for name in full}, full


def test_strings_lists_and_missing_columns_are_answered_as_full_rows_are(predictor):
    short, full = asked_by_side(7)
    for drop in ((), ("tags",), ("history",)):
        one = {name: values for name, values in short.items() if name not in drop}
        other = {name: values for name, values in full.items() if name not in drop}
        found, wanted = predictor.predict(one), predictor.predict(other)
        torch.testing.assert_close(found.outputs["click"], wanted.outputs["click"], rtol=1e-6, atol=1e-6)
        assert found.freshness.keys() == wanted.freshness.keys()


def test_a_user_without_items_gets_no_predictions(predictor):
    short, _ = asked_by_side(1)
    none = {name: values if name in USER else values[:0] for name, values in short.items()}
    assert predictor.predict(none).outputs["click"].shape == (0,)


def test_columns_of_two_sizes_that_are_not_one_are_refused(predictor):
    short, _ = asked_by_side(6)
    with pytest.raises(RequestError, match="rows"):
        predictor.predict({**short, "price": [1.0, 2.0]})


def test_a_bad_value_of_the_user_is_an_error_that_names_its_column(predictor):
    short, _ = asked_by_side(6)
    with pytest.raises(RequestError, match="where"):
        predictor.predict({**short, "where": [[1.0, 2.0, 3.0]]})


def test_a_long_row_is_not_repeated_without_bounds():
    asked = CandidateColumns({"user_id": ["x" * (1 << 14)]}, {"item": [1] * 2000}, np.array([2000]))
    with pytest.raises(RequestTooLargeError, match="user_id"):
        asked.full()


def test_many_threads_get_their_own_answers(predictor):
    requests = [asked_by_side(rows) for rows in range(2, 10)]
    wanted = [predictor.predict(full).outputs["click"] for _, full in requests]
    wrong: list[int] = []

    def ask(number: int) -> None:
        for _ in range(20):
            found = predictor.predict(requests[number][0]).outputs["click"]
            if not torch.allclose(found, wanted[number], rtol=1e-6, atol=1e-6):
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
