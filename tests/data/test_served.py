"""Served features, written by a server and read back by training: the very same IDs and floats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from monolith.data import MemorySource, Pipeline, Records, concat
from monolith.data.formats import format_of
from monolith.data.served import KEY, REQ_ID, SCORE, STEP, ServedRequest, ServedSpec, served_records
from monolith.errors import DataError
from monolith.feature import (
    Batch,
    BucketFeature,
    CrossFeature,
    FeatureIds,
    FeatureSpec,
    FloatFeature,
    HistoryFeature,
    IdFeature,
    Label,
    SequenceFeature,
)

SPEC = FeatureSpec(
    features={
        "user": IdFeature(column="user_id", kind="string"),
        "item": IdFeature(),
        "tags": IdFeature(kind="string", separator="|", weights="strengths"),
        "age": BucketFeature(boundaries=(18.0, 30.0)),
        "user_item": CrossFeature(of=("user", "item")),
        "history": SequenceFeature(length=2, shares="item", times="history_times"),
        "steps": HistoryFeature(of="item", max=2, with_=("user", "time")),
        "price": FloatFeature(scale="log", missing=-1.0),
        "where": FloatFeature(width=2),
    },
    labels={"click": Label(), "bought": Label(column="order")},
    event_time="time",
    optional=("age", "order"),
    group="user",
)
RAW = {
    "user_id": ["ann", "bob", "eve"],
    "item": [7, -3, 1 << 60],
    "tags": ["a|b", "", "c"],
    "strengths": ["0.5|2", "", "3"],
    "age": [17.5, 30.0, None],
    "history": [[1, 2, 3], [], [4]],
    "history_times": [[10, 20, 30], [], [5]],
    "steps": [[1, 2, 3], [], [4]],
    "steps.user": [["ann", "bob", "eve"], [], ["eve"]],
    "steps.time": [[1_600_000_000, 1_600_000_001, 1_600_000_002], [], [1_600_000_003]],
    "price": [0.1, None, 3.0],
    "where": [[0.25, 1e-30], [1.0, 2.0], [3.5, 4.5]],
    "time": [1_700_000_000, 1_700_000_001, 1_700_000_002],
}


def records_of(raw: dict[str, list[object]]) -> Records:
    return concat(list(MemorySource(raw, batch_size=len(raw["item"]))))


def read_back(path: Path, spec: FeatureSpec) -> Batch:
    form = format_of(str(path))
    return ServedSpec.of(spec).make(concat([chunk.records for chunk in form.chunks(str(path))]))


def assert_same_features(one: Batch, other: Batch) -> None:
    assert set(one.ids.names) == set(other.ids.names)
    for name in one.ids.names:
        assert one.ids[name].to_list() == other.ids[name].to_list(), name
    assert one.floats.keys() == other.floats.keys()
    for name, numbers in one.floats.items():
        assert torch.equal(numbers, other.floats[name]), name


def logged(batch: Batch, path: Path, **columns: list[float]) -> None:
    request = ServedRequest(
        id="r1",
        time=1_700_000_100,
        model="ads",
        version="6",
        step=6,
        rows=len(batch),
        scores={"click": np.linspace(0, 1, len(batch), dtype=np.float32)},
    )
    records = served_records(batch, [request])
    more = {
        name: records_of({"item": [0] * len(batch), name: values})[name] for name, values in columns.items()
    }
    with format_of(str(path)).writer(str(path)) as file:
        file.write(records.with_columns(more))


@pytest.mark.parametrize("fids", [False, True])
def test_training_reads_the_very_ids_and_floats_that_were_served(tmp_path: Path, fids: bool) -> None:
    raw = RAW | {"item": [7, 3, 1 << 40]} if fids else RAW
    spec = replace(SPEC, fids=fids)
    batch = spec.only(spec.features).make(records_of(raw))
    logged(batch, tmp_path / "log.tfrecord", click=[1.0, 0.0, 1.0])
    found = read_back(tmp_path / "log.tfrecord", spec)
    assert_same_features(batch, found)
    assert batch.ids.weights is not None
    assert found.ids.weights is not None
    assert sorted(batch.ids.weights.tolist()) == sorted(found.ids.weights.tolist())
    assert found.labels["click"].tolist() == [1, 0, 1]
    assert found.ids.event_time == 1_700_000_100  # when it was served
    assert found.groups is not None
    assert batch.groups is not None
    assert torch.equal(found.groups, batch.groups)


def test_a_feature_that_all_rows_of_a_request_share_is_logged_with_each() -> None:
    ids = FeatureIds.pack({"user": torch.tensor([5]), "item": torch.tensor([1, 2, 3])}, shared=["user"])
    request = ServedRequest(id="r", time=1, model="m", version="1", step=0, rows=3, scores={})
    assert served_records(Batch(ids), [request])["user"].to_list() == [[5], [5], [5]]


def test_each_row_of_each_request_has_a_key_of_its_own() -> None:
    ids = FeatureIds.pack({"item": torch.tensor([1, 2, 3])})
    requests = [
        ServedRequest(id=name, time=1, model="m", version="1", step=9, rows=rows, scores={"p": np.ones(rows)})
        for name, rows in (("a", 2), ("b\ud800", 1))
    ]
    records = served_records(Batch(ids), requests)
    assert records.strings(KEY) == [[b"a/0"], [b"a/1"], [b"b\\ud800/0"]]
    assert records.strings(REQ_ID) == [[b"a"], [b"a"], [b"b\\ud800"]]
    assert records[STEP].to_list() == [[9], [9], [9]]
    assert records[SCORE + "p"].to_list() == [[1.0], [1.0], [1.0]]


def test_a_feature_may_not_have_the_name_of_a_column_of_the_log() -> None:
    ids = FeatureIds.pack({KEY: torch.tensor([1])})
    request = ServedRequest(id="r", time=1, model="m", version="1", step=0, rows=1, scores={})
    with pytest.raises(DataError, match="rename the feature"):
        served_records(Batch(ids), [request])


def test_a_log_without_a_feature_is_refused_unless_the_data_may_lack_it() -> None:
    batch = SPEC.only(SPEC.features).make(records_of(RAW))
    request = ServedRequest(id="r", time=1, model="m", version="1", step=0, rows=3, scores={})
    log = served_records(batch, [request])
    spec = ServedSpec.of(SPEC.only(SPEC.features))
    without = {name: column for name, column in log.columns.items() if name != "user"}
    with pytest.raises(DataError, match="'user'"):
        spec.make(Records(3, without, complete=True))
    without = {name: column for name, column in log.columns.items() if name != "age"}
    assert spec.make(Records(3, without, complete=True)).ids["age"].row_lengths().tolist() == [0, 0, 0]


def test_raw_columns_are_not_taken_for_served_features() -> None:
    spec = ServedSpec.of(FeatureSpec(features={"tags": IdFeature(kind="string")}, labels={}))
    raw = {"item": [1], "tags": ["a"], "line_id.req_time": [5]}
    with pytest.raises(DataError, match=r"data\.served"):
        spec.make(records_of(raw))


def test_records_with_half_of_their_numbers_are_bad_ones_and_left_out() -> None:
    spec = ServedSpec.of(FeatureSpec(features={"where": FloatFeature(width=2)}, labels={}, max_bad=1.0))
    raw = {"item": [1, 2], "where": [[0.5, 1.5], [2.5]], "line_id.req_time": [5, 6]}
    [batch] = Pipeline(MemorySource(raw, batch_size=2)).to_batches(spec)
    assert batch.floats["where"].tolist() == [[0.5, 1.5]]


def test_the_spec_of_the_batches_of_a_log_is_that_by_which_its_requests_were_read() -> None:
    data = Pipeline(MemorySource({"item": [1]}, batch_size=1)).to_batches(ServedSpec.of(SPEC))
    assert data.spec is SPEC
