"""`monolith predict`: raw columns beside predictions, one schema, and how far it is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from monolith.cli.main import main
from monolith.data import BatchSpec, FileSource, MemorySource, Pipeline, Stream, format_of
from monolith.feature import Batch, hash_strings
from monolith.model import DeepFM
from monolith.train import Mode, Task

TASK = f"{Path(__file__)}:Shop"
NAMES = [f"user-{number % 5}" for number in range(40)]


@dataclass(frozen=True)
class Shop(Task):
    """Two labels; to predict there is data with them, or without."""

    labelled: bool = True
    path: str = ""
    """A file to predict instead."""

    def dataset(self, mode: Mode) -> Stream[Batch]:
        columns: dict[str, Any] = {
            "user_id": NAMES,
            "user": hash_strings(NAMES, slot=1),
            "price": [number / 4 for number in range(40)],
            "click": [float(number % 2) for number in range(40)],
            "like": [float(number % 3 == 0) for number in range(40)],
        }
        if mode is Mode.PREDICT and not self.labelled:
            columns = {name: columns[name] for name in ("user_id", "user", "price")}
        labels = {"click": ("click", 0), "like": ("like", 0)}
        optional = ["click", "like"] if mode is Mode.PREDICT else []
        spec = BatchSpec(ids=["user"], labels=labels, optional=optional, event_time=None)
        if self.path:
            return Pipeline(FileSource([self.path], format_of(self.path), batch_size=8)).to_batches(spec)
        return Pipeline(MemorySource(columns, batch_size=8)).to_batches(spec).prefetch(1)

    def model(self) -> nn.Module:
        return _Two()


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = DeepFM(["user"], dim=2, hidden=(2,), threads=1)

    def forward(self, batch: Batch) -> torch.Tensor:
        logits = self.inner(batch)
        return torch.stack([logits, -logits], dim=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("shop"))
    assert main(["train", TASK, "--model-dir", folder, "--quiet", "--no-summaries"]) == 0
    return folder


def predict(trained: str, to: Path, *flags: str) -> list[dict[str, Any]]:
    assert main(["predict", TASK, "--model-dir", trained, "--to", str(to), *flags]) == 0
    rows: list[dict[str, Any]] = []
    for chunk in format_of(str(to)).chunks(str(to)):
        columns = {name: chunk.records[name].to_list() for name in chunk.records.columns}
        rows += [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return rows


@pytest.mark.parametrize("suffix", ["parquet", "csv", "jsonl"])
def test_raw_columns_are_passed_through_as_they_are(trained: str, tmp_path: Path, suffix: str) -> None:
    rows = predict(trained, tmp_path / f"p.{suffix}", "--columns", "user_id,price", "--quiet")
    assert [bytes(text).decode() for row in rows for text in row["user_id"]] == NAMES
    assert [row["price"] for row in rows] == [[number / 4] for number in range(40)]
    assert {len(row["prediction.click"]) for row in rows} == {1}


def write_shop(path: Path) -> pa.Table:
    """Write forty rows with ids of every kind, as other programs write them; CSV has no lists."""
    table = pa.table(
        {
            "user": pa.array([number % 5 for number in range(40)], pa.int64()),
            "user_id": pa.array([f"u_{number:02x}ä" for number in range(40)]),
            "item_id": pa.array([number - 20 for number in range(40)], pa.int32()),
            "big_id": pa.array([(1 << 64) - 1 - number for number in range(40)], pa.uint64()),
            "price": pa.array([number / 10 for number in range(40)], pa.float64()),
            "tags": pa.array([["a"] if number else ["b", "c"] for number in range(40)]),
        }
    )
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".csv":
        table = table.drop(["tags"])
        table.to_pandas().to_csv(path, index=False)
    else:
        table.to_pandas().to_json(path, orient="records", lines=True)
    return table


def read_lines(path: Path) -> pd.DataFrame:
    return pd.DataFrame([json.loads(line) for line in path.read_text().splitlines()])


READERS = {".parquet": pd.read_parquet, ".csv": pd.read_csv, ".jsonl": read_lines}


@pytest.mark.parametrize("suffix", READERS)
@pytest.mark.parametrize("of", READERS)
def test_predictions_join_with_the_data_by_any_id(trained: str, tmp_path: Path, of: str, suffix: str) -> None:
    data, to = tmp_path / f"data{of}", tmp_path / f"p{suffix}"
    table = write_shop(data)
    names = [name for name in table.column_names if name != "user" and (suffix != ".csv" or name != "tags")]
    predict(trained, to, "--set", f"path={data}", "--columns", ",".join(names), "--quiet")
    before, after = READERS[of](data), READERS[suffix](to)
    for name in names:
        if name == "tags":
            assert [list(row) for row in before[name]] == [list(row) for row in after[name]]
            continue
        assert len(before.merge(after, on=name)) == 40, name
    if of == suffix == ".parquet":
        assert pq.read_schema(to).field("prediction.click").type == pa.float32()
        for name in names:
            assert pq.read_schema(to).field(name).type == table.schema.field(name).type


def test_the_schema_is_the_same_with_and_without_labels(trained: str, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = {}
    for labelled in ("true", "false"):
        path = tmp_path / f"{labelled}.parquet"
        flags = ("--columns", "user_id", "--set", f"labelled={labelled}", "--quiet")
        rows[labelled] = predict(trained, path, *flags)
    schemas = [parquet.read_schema(path) for path in sorted(tmp_path.glob("*.parquet"))]
    assert schemas[0].equals(schemas[1])
    assert schemas[0].names == ["prediction.click", "prediction.like", "label.click", "label.like", "user_id"]
    for name in ("prediction.click", "prediction.like", "user_id"):
        assert [row[name] for row in rows["true"]] == [row[name] for row in rows["false"]]
    assert {tuple(row["label.like"]) for row in rows["true"]} == {(0.0,), (1.0,)}
    assert {tuple(row["label.like"]) for row in rows["false"]} == {()}


def test_what_is_written_in_json_lines_is_plain(trained: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    predict(trained, path, "--columns", "user_id", "--quiet", "--steps", "1")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 8
    assert "user-0" in path.read_text().splitlines()[0]


def test_progress_knows_how_much_there_is(
    trained: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from monolith.cli import evaluation

    asked: list[float | None] = []
    real = evaluation.progress

    def progress(label: str, total: float | None = None, unit: str = "", **more: Any) -> Any:
        asked.append(total)
        return real(label, total, unit, **more)

    monkeypatch.setattr(evaluation, "progress", progress)
    predict(trained, tmp_path / "p.csv")
    predict(trained, tmp_path / "q.csv", "--steps", "2")
    assert main(["evaluate", TASK, "--model-dir", trained]) == 0
    assert asked == [40, None, 40]


def test_a_column_that_is_written_already_is_refused(
    trained: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["predict", TASK, "--model-dir", trained, "--to", str(tmp_path / "p.csv"), "--columns"]
    assert main([*words, "user_idd"]) == 2
    assert "no column 'user_idd' to pass through; it has user_id, user" in (said := capsys.readouterr().err)
    assert "Did you mean 'user_id'?" in said
    assert not (tmp_path / "p.csv").exists()
