"""What a stream stands on tells how many records there are, and keeps raw columns."""

from __future__ import annotations

from pathlib import Path

import pytest

from monolith.data import (
    BatchSpec,
    FileSource,
    MemorySource,
    Pipeline,
    ShuffleConfig,
    keep_columns,
    known_size,
)
from monolith.data.formats import CsvFormat, ParquetFormat
from monolith.errors import DataError

COLUMNS = {"item": [1, 2, 3, 4, 5], "name": ["a", "bb", "c", "d", "e"], "label": [0.0, 1.0, 0.0, 1.0, 0.0]}
SPEC = BatchSpec(ids=["item"], labels={"label": ("label", 0)}, event_time=None)


def memory() -> Pipeline:
    return Pipeline(MemorySource(COLUMNS, batch_size=2))


def test_a_size_is_known_through_stages_that_keep_all_records() -> None:
    assert known_size(memory().rebatch(3).shuffle(ShuffleConfig()).to_batches(SPEC).prefetch(2)) == 5
    assert known_size(memory().take(3).to_batches(SPEC)) == 3
    assert known_size(memory().take(30)) == 5
    assert known_size(Pipeline(MemorySource(COLUMNS, batch_size=2, epochs=3))) == 15


def test_a_size_is_not_known_where_a_function_makes_other_records() -> None:
    assert known_size(memory().map(lambda records: records)) is None
    assert known_size(Pipeline(MemorySource(COLUMNS, batch_size=2, epochs=None))) is None
    assert known_size(object()) is None


def test_files_of_parquet_know_theirs(tmp_path: Path) -> None:
    records = next(iter(MemorySource(COLUMNS, batch_size=5)))
    for form, name, size in ((ParquetFormat(), "x.parquet", 5), (CsvFormat(), "x.csv", None)):
        with form.writer(str(tmp_path / name)) as file:
            file.write(records)
        assert known_size(FileSource([str(tmp_path / name)], form, batch_size=2)) == size


def test_raw_columns_ride_along_through_stages() -> None:
    batches = memory().rebatch(3).to_batches(SPEC).prefetch(1)
    assert keep_columns(batches, ["name"])
    texts = [[bytes(text) for (text,) in batch.raw["name"].to_list()] for batch in batches]
    assert texts == [[b"a", b"bb", b"c"], [b"d", b"e"]]


def test_without_being_asked_nothing_rides_along() -> None:
    assert all(not batch.raw for batch in memory().to_batches(SPEC))
    assert not keep_columns(object(), ["name"])


def test_a_column_that_is_not_there_is_named_with_the_nearest() -> None:
    batches = memory().to_batches(SPEC)
    keep_columns(batches, ["nam"])
    with pytest.raises(DataError, match=r"no column 'nam' .*Did you mean 'name'\?"):
        list(batches)
