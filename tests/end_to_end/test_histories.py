"""A history is the same from every kind of data, and at a server."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from monolith.data import FileSource, MemorySource, Pipeline, Source
from monolith.data.formats import format_of
from monolith.data.formats.tables import ArrowSource, IterableSource, PandasSource, PolarsSource
from monolith.feature import Batch, FeatureSpec, HistoryFeature, IdFeature
from monolith.serve.request_reader import RequestReader

HISTORY = HistoryFeature(of="item", max=3, with_=("action", "at"))
SPEC = FeatureSpec(
    features={"item": IdFeature(kind="string"), "action": IdFeature(), "history": HISTORY},
    labels={},
    event_time="at",
)
NOW = 1_714_557_600
ROWS: list[dict[str, Any]] = [
    {
        "item": "d",
        "action": 1,
        "at": NOW,
        "history": ["a", "b", "c", "ä"],
        "history.action": [1, 2, 1, 9_007_199_254_740_991],
        "history.time": [NOW - 400, NOW - 300, NOW - 200, NOW - 100],
    },
    {"item": "e", "action": 2, "at": NOW + 1, "history": [], "history.action": [], "history.time": []},
    {"item": "f", "action": 1, "at": NOW + 2, "history": None, "history.action": None, "history.time": None},
    {"item": "a", "action": 2, "at": NOW + 3, "history": ["a"], "history.action": [2], "history.time": [NOW]},
]
COLUMNS = {name: [row[name] for row in ROWS] for name in ROWS[0]}


def read(batch: Batch) -> dict[str, list[list[int]]]:
    return {name: batch.ids[name].to_list() for name in ("history", "history.action", "history.time")}


def file(folder: Path, name: str, text: str, spec: FeatureSpec = SPEC) -> Source:
    (folder / name).write_text(text)
    return FileSource([str(folder / name)], format_of(name, types=spec.columns), batch_size=8)


def csv(folder: Path) -> Source:
    def cell(value: Any) -> str:
        return "" if value is None else "|".join(map(str, value)) if isinstance(value, list) else str(value)

    lines = [",".join(cell(value) for value in row.values()) for row in ROWS]
    return file(folder, "rows.csv", "\n".join([",".join(ROWS[0]), *lines]), SPLIT)


def iso(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def jsonl_texts(folder: Path) -> Source:
    rows = [
        {**row, "at": iso(row["at"]), "history.time": [iso(one) for one in row["history.time"] or []]}
        for row in ROWS
    ]
    return file(folder, "rows.jsonl", "\n".join(map(json.dumps, rows)))


def parquet(folder: Path) -> Source:
    table = pa.table(COLUMNS)
    times = pa.list_(pa.timestamp("ms", "UTC"))
    stamps = [None if one is None else [1000 * time for time in one] for one in COLUMNS["history.time"]]
    place = table.column_names.index("history.time")
    table = table.set_column(place, "history.time", pa.array(stamps, pa.list_(pa.int64())).cast(times))
    pq.write_table(table, folder / "rows.parquet")
    name = str(folder / "rows.parquet")
    return FileSource([name], format_of(name, types=SPEC.columns), batch_size=8)


SPLIT = replace(SPEC, features={**SPEC.features, "history": replace(HISTORY, separator="|")})
SOURCES: dict[str, Callable[[Path], Source]] = {
    "csv": csv,
    "json lines": lambda folder: file(folder, "rows.jsonl", "\n".join(map(json.dumps, ROWS))),
    "json lines, texts": jsonl_texts,
    "parquet": parquet,
    "memory": lambda _: MemorySource(COLUMNS, batch_size=8),
    "arrow": lambda _: ArrowSource(pa.table(COLUMNS), batch_size=8),
    "pandas": lambda _: PandasSource(pd.DataFrame(COLUMNS), batch_size=8),
    "polars": lambda _: PolarsSource(pl.DataFrame(COLUMNS), batch_size=8),
    "iterable": lambda _: IterableSource(ROWS, batch_size=8),
}


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("name", SOURCES)
def test_every_kind_of_data_gives_the_same_history(name: str, threads: int, tmp_path: Path) -> None:
    spec = SPLIT if name == "csv" else SPEC
    (batch,) = Pipeline(SOURCES[name](tmp_path)).to_batches(spec, threads=threads)
    ids = SPEC.only(["item"]).make(next(iter(MemorySource({"item": ["b", "c", "ä", "a"]}, batch_size=4)))).ids
    b, c, d, a = ids["item"].flat_values.tolist()
    assert read(batch) == {
        "history": [[b, c, d], [], [], [a]],
        "history.action": [[2, 1, 9_007_199_254_740_991], [], [], [2]],
        "history.time": [[NOW - 300, NOW - 200, NOW - 100], [], [], [NOW]],
    }


@pytest.mark.parametrize("spec", [SPEC, SPLIT], ids=["lists", "separator"])
def test_a_server_reads_what_training_reads(spec: FeatureSpec) -> None:
    columns: dict[str, Any] = COLUMNS
    if spec is SPLIT:
        columns = {
            name: ["|".join(map(str, one or [])) for one in values] if name.startswith("history") else values
            for name, values in COLUMNS.items()
        }
    (batch,) = Pipeline(MemorySource(columns, batch_size=8)).to_batches(spec)
    served = RequestReader(spec).batch(columns)
    assert read(served) == read(batch)
    assert served.ids["item"].to_list() == batch.ids["item"].to_list()
