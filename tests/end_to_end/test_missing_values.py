"""A value that is missing is the same from every kind of data, and at a server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from serve.served_tasks import exported, trained

from monolith.data import FileSource, MemorySource, Pipeline, Source, Stream
from monolith.data.formats import format_of
from monolith.data.formats.tables import ArrowSource, IterableSource, PandasSource, PolarsSource
from monolith.feature import (
    Batch,
    BucketFeature,
    FeatureSpec,
    FloatFeature,
    IdFeature,
    Label,
    SequenceFeature,
)
from monolith.model import DeepInterest
from monolith.serve import Client, Predictor
from monolith.serve.request_reader import RequestReader
from monolith.serve.server import InferenceServer, ServeConfig, VersionPolicy
from monolith.serve.server.catalog import ServableCatalog, served_folder
from monolith.train import Mode, Task

SPEC = FeatureSpec(
    features={
        "user": IdFeature(kind="string"),
        "item": IdFeature(),
        "tags": IdFeature(kind="string", separator="|"),
        "seen": SequenceFeature(length=2, shares="item"),
        "price": FloatFeature(scale="log", missing=-1.0),
        "age": BucketFeature(boundaries=(18.0, 60.0)),
        "where": FloatFeature(width=2, missing=0.5),
    },
    labels={"click": Label()},
    event_time="time",
    optional=("click",),
)
LISTS = ("seen", "where")
"""What a CSV file cannot hold without a separator."""
PLAIN = replace(SPEC, features={name: one for name, one in SPEC.features.items() if name not in LISTS})
NAN = float("nan")
LARGE = 9_007_199_254_740_991  # a double holds it, a float32 does not
ROWS: list[dict[str, Any]] = [
    {
        "user": "ann",
        "item": LARGE,
        "tags": "a|b",
        "seen": [1, LARGE],
        "price": 1.5,
        "age": 30.0,
        "where": [1.0, 2.0],
        "time": 1_714_557_600,
        "click": 1.0,
    },
    dict.fromkeys(("user", "item", "tags", "seen", "price", "age", "where", "time", "click")),
    {
        "user": "bo",
        "item": 7,
        "tags": None,
        "seen": [],
        "price": None,
        "age": 60.0,
        "where": [None, 4.0],
        "time": 1_714_557_601,
        "click": 0.0,
    },
]
NAMES = list(ROWS[0])


def table(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row.get(name) for row in rows] for name in NAMES}


def with_nan(values: list[Any]) -> list[Any]:
    return [
        NAN if one is None else [NAN if x is None else x for x in one] if type(one) is list else one
        for one in values
    ]


# Paths


def file(folder: Path, name: str, text: str, spec: FeatureSpec) -> Source:
    (folder / name).write_text(text)
    return FileSource([str(folder / name)], format_of(name, types=spec.columns), batch_size=8)


def csv(folder: Path) -> Source:
    names = [name for name in NAMES if name not in LISTS]
    lines = [",".join("" if row[name] is None else str(row[name]) for name in names) for row in ROWS]
    return file(folder, "rows.csv", "\n".join([",".join(names), *lines]), PLAIN)


def jsonl_null(folder: Path) -> Source:
    return file(folder, "rows.jsonl", "\n".join(map(json.dumps, ROWS)), SPEC)


def jsonl_absent(folder: Path) -> Source:
    rows = [{name: one for name, one in row.items() if one is not None} for row in ROWS]
    return file(folder, "rows.jsonl", "\n".join(map(json.dumps, rows)), SPEC)


def jsonl_nan(folder: Path) -> Source:
    rows = [
        {n: NAN if one is None and n in ("price", "age") else one for n, one in row.items()} for row in ROWS
    ]
    return file(folder, "rows.jsonl", "\n".join(map(json.dumps, rows)), SPEC)


def arrow(*, nan: bool) -> pa.Table:
    columns = table(ROWS)
    types = {"where": pa.list_(pa.float64()), "seen": pa.list_(pa.int64())}
    doubles = ("price", "age", "item", "where", "click", "time") if nan else ()
    return pa.table(
        {
            name: pa.array(with_nan(values), types.get(name, pa.float64()))
            if name in doubles and name != "where"
            else pa.array(values, types.get(name))
            for name, values in columns.items()
        }
    )


def parquet(folder: Path, *, nan: bool) -> Source:
    pq.write_table(arrow(nan=nan), folder / "rows.parquet")
    form = format_of("rows.parquet", types=SPEC.columns)
    return FileSource([str(folder / "rows.parquet")], form, batch_size=8)


def pandas_nan(_: Path) -> Source:
    frame = pd.DataFrame(table(ROWS))  # numbers with gaps are doubles, and texts have None
    assert frame["item"].dtype == "float64"
    frame["user"] = [NAN if one is None else one for one in frame["user"]]
    return PandasSource(frame, batch_size=8)


def pandas_na(_: Path) -> Source:
    columns: dict[str, Any] = table(ROWS)
    columns["item"] = pd.array(columns["item"], dtype="Int64")
    columns["price"] = pd.array(columns["price"], dtype="Float64")
    columns["user"] = pd.array(columns["user"], dtype="string")
    columns["time"] = pd.to_datetime(pd.Series(columns["time"]), unit="s", utc=True)
    assert columns["time"][1] is pd.NaT
    assert columns["user"][1] is pd.NA
    return PandasSource(pd.DataFrame(columns), batch_size=8)


def polars_null(_: Path) -> Source:
    return PolarsSource(pl.DataFrame(table(ROWS)), batch_size=8)


def polars_nan(_: Path) -> Source:
    columns = {
        name: with_nan(values) if name in ("price", "age", "click") else values
        for name, values in table(ROWS).items()
    }
    return PolarsSource(pl.DataFrame(columns), batch_size=8)


def dicts(_: Path) -> Source:
    return IterableSource(ROWS, batch_size=8)


def columns_in_memory(_: Path) -> Source:
    return MemorySource({**table(ROWS), "price": with_nan(table(ROWS)["price"])}, batch_size=8)


def series_in_memory(_: Path) -> Source:
    return MemorySource(pd.DataFrame(table(ROWS)), batch_size=8)


PATHS: dict[str, Callable[[Path], Source]] = {
    "CSV, empty": csv,
    "JSON, null": jsonl_null,
    "JSON, absent": jsonl_absent,
    "JSON, NaN": jsonl_nan,
    "Parquet, null": lambda folder: parquet(folder, nan=False),
    "Parquet, NaN": lambda folder: parquet(folder, nan=True),
    "Arrow, null": lambda _: ArrowSource(arrow(nan=False), batch_size=8),
    "pandas, NaN and None": pandas_nan,
    "pandas, NA and NaT": pandas_na,
    "polars, null": polars_null,
    "polars, NaN": polars_nan,
    "dicts, None": dicts,
    "lists, None and NaN": columns_in_memory,
    "columns of pandas": series_in_memory,
}


def plain(batch: Batch) -> dict[str, Any]:
    """Return all that is in a batch, feature by feature."""
    times = batch.ids.event_times
    return {
        **{name: batch.ids[name].to_list() for name in batch.ids.names},
        **{name: values.tolist() for name, values in batch.floats.items()},
        **{name: [str(one) for one in values.tolist()] for name, values in batch.labels.items()},
        "time": None if times is None else times.tolist(),
    }


@pytest.fixture(scope="module")
def wanted() -> dict[str, Any]:
    """What they should be: rows without values, by hand."""
    empty = {name: [[] if one is None else one for one in values] for name, values in table(ROWS).items()}
    empty["where"] = [[1.0, 2.0], [], [NAN, 4.0]]
    return plain(SPEC.make(next(iter(MemorySource(empty, batch_size=8)))))


def test_what_a_missing_value_is(wanted: dict[str, Any]) -> None:
    assert [len(row) for row in wanted["user"]] == [1, 0, 1]
    assert wanted["item"] == [[LARGE], [], [7]]
    assert [len(row) for row in wanted["tags"]] == [2, 0, 0]
    assert wanted["seen"] == [[1, LARGE], [], []]
    assert wanted["price"] == [[pytest.approx(0.9162907)], [-1.0], [-1.0]]
    assert wanted["age"] == [[1], [], [2]]
    assert wanted["where"] == [[1.0, 2.0], [0.5, 0.5], [0.5, 4.0]]
    assert wanted["click"] == ["1.0", "nan", "0.0"]
    assert wanted["time"] == [1_714_557_600, 0, 1_714_557_601]


@pytest.mark.parametrize("path", PATHS)
def test_the_same_rows_are_the_same_batch_from_every_kind_of_data(
    path: str, wanted: dict[str, Any], tmp_path: Path
) -> None:
    spec = PLAIN if path.startswith("CSV") else SPEC
    stream = Pipeline(PATHS[path](tmp_path)).to_batches(spec)
    (batch,) = stream
    assert stream.bad_records() == {}
    found = plain(batch)
    assert found == {name: value for name, value in wanted.items() if name in found}
    assert len(found) == len(spec.features) + 2


@pytest.mark.parametrize("path", PATHS)
def test_a_record_without_its_label_is_left_out_for_the_same_reason(path: str, tmp_path: Path) -> None:
    spec = replace(PLAIN if path.startswith("CSV") else SPEC, optional=(), max_bad=0.5)
    stream = Pipeline(PATHS[path](tmp_path)).to_batches(spec)
    assert [len(batch) for batch in stream] == [2]
    ((why, count),) = stream.bad_records().items()
    assert (why.split(" (")[0], count) == ("label 'click' is empty", 1)


# A server


@dataclass(frozen=True)
class Clicks(Task):
    """Learns from the same rows, many times."""

    def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
        return Pipeline(MemorySource(table(ROWS * 20), batch_size=10)).to_batches(
            replace(SPEC, optional=(), max_bad=0.5)
        )

    def model(self) -> torch.nn.Module:
        return DeepInterest(SPEC, dim=4, attention=(4,), hidden=(8,), threads=1)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = trained(tmp_path_factory.mktemp("run"), Clicks())
    root = tmp_path_factory.mktemp("servables") / "clicks"
    exported(config, root, task=Clicks())
    return root


@pytest.fixture(scope="module")
def predictor(root: Path) -> Iterator[Predictor]:
    with Predictor(str(root), show=False) as made:
        yield made


@pytest.fixture(scope="module")
def scores(predictor: Predictor) -> list[float]:
    """What the model says of the batch that training reads."""
    empty = MemorySource({n: v for n, v in table(ROWS).items() if n != "click"}, batch_size=8)
    batch = SPEC.without_labels().make(next(iter(empty)))
    found: list[float] = predictor.predict_batch(batch).outputs["click"].tolist()
    assert len({*found}) == 3
    return found


INPUTS = {name: values for name, values in table(ROWS).items() if name not in ("click", "time")}

REQUESTS: dict[str, Mapping[str, Any]] = {
    "None": INPUTS,
    "NaN": {name: with_nan(values) for name, values in INPUTS.items()},
    "NA of pandas": {n: [pd.NA if one is None else one for one in values] for n, values in INPUTS.items()},
    "arrays of objects": {n: pd.Series(values, dtype=object).to_numpy() for n, values in INPUTS.items()},
    "an array of floats": {**INPUTS, "price": torch.tensor(with_nan(INPUTS["price"]))},
}


@pytest.mark.parametrize("form", REQUESTS)
def test_a_predictor_reads_what_is_missing_as_training_does(
    form: str, predictor: Predictor, scores: list[float]
) -> None:
    assert predictor.predict(REQUESTS[form]).outputs["click"].tolist() == scores


def test_a_column_that_is_not_there_is_missing_in_every_row(predictor: Predictor) -> None:
    some = {"user": ["ann", "bo"], "price": [None, None]}
    empty = {name: [None, None] for name in INPUTS} | some
    absent = predictor.predict({"user": some["user"]}).outputs["click"]
    assert torch.equal(absent, predictor.predict(empty).outputs["click"])


def test_a_request_makes_the_batch_of_training(wanted: dict[str, Any]) -> None:
    found = plain(RequestReader(SPEC).batch(INPUTS))
    assert found == {**{name: wanted[name] for name in found}, "time": None}


def test_servers_and_their_clients_know_missing_values_as_well(root: Path, scores: list[float]) -> None:
    config = ServeConfig(http_port=0, grpc_port=0, poll=timedelta(hours=1))
    rows = [{name: one for name, one in row.items() if name in INPUTS} for row in ROWS]
    absent = [{name: one for name, one in row.items() if one is not None} for row in rows]
    with InferenceServer(
        config, [served_folder(str(root), VersionPolicy.parse("latest"))], ServableCatalog({"threads": 1})
    ) as server:
        for url in (server.http_url, f"grpc://{server.grpc_address}"):
            with Client(url) as client:
                for some in (rows, absent):
                    found = client.predict("clicks", some).outputs["click"]
                    assert found == pytest.approx(scores, abs=1e-7)
                alone = client.predict("clicks", [{"user": "ann"}]).outputs["click"]
                empty = client.predict("clicks", [dict.fromkeys(INPUTS) | {"user": "ann"}]).outputs["click"]
                assert alone.tolist() == empty.tolist()
