"""Filters that the threads which parse files are asked about: nothing changes but the thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from monolith.data import FileSource, Pipeline, Position, Records, format_of
from monolith.data.config import DataConfig, DataSplit
from monolith.data.formats.memory import to_records
from monolith.data.shuffling import ShuffleConfig
from monolith.data.transforms import FilterByFid, FilterByValue, NegativeDownsample, UseFieldAsLabel
from monolith.data.transforms.transform import Filter, Transform
from monolith.errors import DataError

ROWS = 4000
SMALL = ShuffleConfig(seed=3, buffer=500, piece_bytes=4 << 10)
ORDERS = pytest.mark.parametrize("shuffle", [None, SMALL])


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    lines = [f"{n},{n % 7},w{n % 11}" for n in range(ROWS)]
    for number, some in enumerate((lines[:1500], lines[1500:])):
        (tmp_path / f"{number}.csv").write_text("\n".join(["id,kind,word", *some]) + "\n")
    return [str(tmp_path / f"{number}.csv") for number in range(2)]


def source(files: list[str], threads: int, shuffle: ShuffleConfig | None) -> FileSource:
    types = {"id": torch.int64, "kind": torch.int64, "word": torch.uint8}
    form = format_of(files[0], types=types)
    return FileSource(files, form, batch_size=128, threads=threads, shuffle=shuffle)


def drained(pipeline: Pipeline, first: int = 10**9) -> tuple[list[list[int]], list[Position]]:
    """Return the ids of each batch, and the position after it."""
    ids, positions = [], []
    for records in pipeline:
        ids.append(records["id"].flat_values.tolist())
        positions.append(pipeline.position())
        if len(ids) == first:
            break
    return ids, positions


class Watched:
    """A predicate that notes by which threads it is asked, and about how many records."""

    def __init__(self, predicate: Callable[[Records], torch.Tensor]) -> None:
        self._predicate = predicate
        self.asked: list[tuple[str, int]] = []

    def __call__(self, records: Records) -> torch.Tensor:
        self.asked.append((threading.current_thread().name, len(records)))
        return self._predicate(records)


def odd(records: Records) -> torch.Tensor:
    return records["kind"].flat_values % 2 == 1


@ORDERS
def test_records_and_positions_are_those_of_one_thread(
    files: list[str], shuffle: ShuffleConfig | None
) -> None:
    plain = drained(Pipeline(source(files, 0, shuffle)).filter(odd).rebatch(100))
    watched = Watched(odd)
    ahead = drained(Pipeline(source(files, 2, shuffle)).filter(watched, any_thread=True).rebatch(100))
    assert ahead == plain
    assert sorted(chain.from_iterable(plain[0])) == [n for n in range(ROWS) if n % 7 % 2]
    here = sum(count for name, count in watched.asked if not name.startswith("monolith-read"))
    assert sum(count for _, count in watched.asked) == ROWS  # each record once
    assert here <= ROWS / 4  # the first piece of all is read alone


@ORDERS
def test_a_pipeline_resumes_with_the_next_record(files: list[str], shuffle: ShuffleConfig | None) -> None:
    def pipeline(threads: int) -> Pipeline:
        return Pipeline(source(files, threads, shuffle)).filter(odd, any_thread=True).rebatch(100)

    whole, _ = drained(pipeline(0))
    begun, positions = drained(pipeline(2), first=7)
    resumed = pipeline(2)
    resumed.restore(positions[-1])
    assert begun + drained(resumed)[0] == whole


def test_a_filter_without_a_promise_is_asked_where_batches_are_read(files: list[str]) -> None:
    watched = Watched(odd)
    drained(Pipeline(source(files, 2, SMALL)).filter(watched))
    assert {name for name, _ in watched.asked} == {threading.current_thread().name}


def test_an_error_comes_when_it_is_the_turn_of_its_record(files: list[str]) -> None:
    def fussy(records: Records) -> torch.Tensor:
        if bool((records["id"].flat_values == 3000).any()):
            raise DataError("record 3000 is odd")
        return torch.ones(len(records), dtype=torch.bool)

    batches = iter(Pipeline(source(files, 2, None)).filter(fussy, any_thread=True))
    before = [next(batches)["id"].flat_values.tolist() for _ in range(3000 // 128)]
    assert list(chain.from_iterable(before)) == list(range(3000 // 128 * 128))
    with pytest.raises(DataError, match="record 3000 is odd"):
        next(batches)


class ByThread(Filter):
    any_thread = True

    def __init__(self) -> None:
        self.watched = Watched(odd)

    def mask(self, records: Records) -> torch.Tensor:
        return self.watched(records)


@ORDERS
@pytest.mark.parametrize(
    "later",
    [
        (),
        (FilterByValue(column="word", op="in", operand=("w1", "w2", "w3")),),
        (UseFieldAsLabel(column="kind"), FilterByFid(filter_fids=(17,), columns=("id",))),
        (UseFieldAsLabel(column="kind"), NegativeDownsample(drop_rate=0.5)),
    ],
)
def test_transforms_make_the_same_of_records(
    files: list[str], shuffle: ShuffleConfig | None, later: tuple[Transform, ...]
) -> None:
    def read(threads: int, first: Transform) -> Any:
        pipeline = Pipeline(source(files, threads, shuffle)).transform(first)
        for one in later:
            pipeline = pipeline.transform(one)
        return drained(pipeline)

    asked = ByThread()
    assert read(2, asked) == read(0, ByThread())
    numbered = bool(later) and isinstance(later[-1], NegativeDownsample)
    elsewhere = any(name.startswith("monolith-read") for name, _ in asked.watched.asked)
    assert elsewhere is not numbered  # numbers are given to all records of the stream, in order


@pytest.mark.parametrize(
    "split",
    [
        DataSplit(evaluate=0.2, predict=0.1),
        DataSplit(evaluate=0.2, by=("word",)),
        DataSplit(time="id", evaluate_from=2500),
        DataSplit(last_of="word", time="id"),
    ],
)
@pytest.mark.parametrize("part", ["train", "evaluate"])
def test_splits_are_the_same_for_any_number_of_threads(files: list[str], split: DataSplit, part: Any) -> None:
    types = {"id": torch.int64, "kind": torch.int64, "word": torch.uint8}
    folder = str(Path(files[0]).parent)

    def read(threads: int) -> Any:
        data = DataConfig(path=f"{folder}/*.csv", split=split)
        return drained(data.pipeline(part, 100, types=types, shuffle=SMALL, threads=threads))

    assert read(2) == read(0)


@pytest.mark.parametrize("form", ["jsonl", "tfrecord", "parquet"])
def test_other_formats_keep_what_was_found_too(tmp_path: Path, form: str) -> None:
    path, numbers = str(tmp_path / f"a.{form}"), list(range(ROWS))
    kinds = [n % 7 for n in numbers]
    if form == "parquet":
        parquet.write_table(pa.table({"id": numbers, "kind": kinds}), path, row_group_size=200)
    else:
        with format_of(path).writer(path) as writer:
            writer.write(to_records({"id": numbers, "kind": kinds}))
    watched = Watched(odd)
    read = FileSource([path], format_of(path), batch_size=128, threads=2, shuffle=SMALL)
    ids, _ = drained(Pipeline(read).filter(watched, any_thread=True))
    assert sorted(chain.from_iterable(ids)) == [n for n in numbers if n % 7 % 2]
    assert any(name.startswith("monolith-read") for name, _ in watched.asked)
    assert sum(count for _, count in watched.asked) == ROWS
