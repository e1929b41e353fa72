"""What a stream stands on tells how many records there are, and keeps raw columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from monolith.data import (
    ArrowSource,
    BatchSpec,
    DriftingStream,
    FileSource,
    IterableSource,
    MemorySource,
    Pipeline,
    ShuffleConfig,
    Watch,
    fraction_read,
    keep_columns,
    known_size,
)
from monolith.data.epochs import Epochs, read_epochs
from monolith.data.format import Format
from monolith.data.formats import CsvFormat, JsonLinesFormat, ParquetFormat, TfRecordFormat
from monolith.data.layers import is_live
from monolith.data.transforms import NegativeDownsample
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


# Which part of the input is done

RECORDS = 1200
BATCH = 100


def files(folder: Path, form: Format, ending: str) -> list[str]:
    """Write three files, the second of which is as large as the others together."""
    paths, first = [], 0
    for name, size in (("a", 300), ("b", 600), ("c", 300)):
        paths.append(str(folder / f"{name}.{ending}"))
        items = [1_000_000 + (7919 * number) % 1_000_000 for number in range(first, first + size)]
        records = next(
            iter(MemorySource({"item": items, "label": [0.0, 1.0] * (size // 2)}, batch_size=size))
        )
        with form.writer(paths[-1]) as file:
            file.write(records)
        first += size
    return paths


def fractions(stream: Any) -> list[float | None]:
    """Return which part is done after each batch."""
    return [fraction_read(stream, stream.position()) for _ in stream]


def near(found: list[float | None], step: float, tolerance: float = 0.03) -> bool:
    return all(
        one is not None and abs(one - min(step * number, 1.0)) <= tolerance
        for number, one in enumerate(found, 1)
    )


FORMATS: list[tuple[Format, str]] = [
    (CsvFormat(chunk_bytes=1000), "csv"),
    (CsvFormat(), "csv"),
    (JsonLinesFormat(chunk_bytes=1000), "jsonl"),
    (ParquetFormat(chunk_rows=64, row_group_rows=128), "parquet"),
    (TfRecordFormat("tf_example", chunk_bytes=1000), "tfrecord"),
    (TfRecordFormat("tf_example", chunk_bytes=1000), "tfrecord.gz"),
]


@pytest.mark.parametrize(("form", "ending"), FORMATS)
def test_files_know_which_part_of_them_is_read_by_their_bytes(
    form: Format, ending: str, tmp_path: Path
) -> None:
    source = FileSource(files(tmp_path, form, ending), form, batch_size=BATCH)
    assert fraction_read(source, source.position()) == 0.0
    found = fractions(source)
    assert near(found, BATCH / RECORDS)
    assert found == sorted(found, key=lambda one: one or 0.0)
    assert found[-1] == pytest.approx(1.0, abs=0.01)


def csv(folder: Path, **options: Any) -> FileSource:
    form = CsvFormat(chunk_bytes=1000)
    return FileSource(files(folder, form, "csv"), form, batch_size=BATCH, **options)


def test_a_part_is_known_through_stages_that_hold_records_back_or_read_ahead(tmp_path: Path) -> None:
    stages = Pipeline(csv(tmp_path)).shuffle(ShuffleConfig(buffer=500)).rebatch(60).prefetch(4)
    assert near(fractions(stages.to_batches(SPEC).prefetch(2)), 60 / RECORDS, 0.05)


def test_a_part_is_one_of_the_input_where_records_are_left_out(tmp_path: Path) -> None:
    half = Pipeline(csv(tmp_path)).filter(lambda records: records["label"].flat_values > 0)
    assert near(fractions(half.to_batches(SPEC)), BATCH / RECORDS)
    sampled = Pipeline(csv(tmp_path)).transform(NegativeDownsample(drop_rate=0.5, seed=1))
    assert near(fractions(sampled.to_batches(SPEC)), BATCH / RECORDS)


def test_a_part_is_one_of_all_epochs_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    source = csv(tmp_path)
    read_epochs(source, Epochs(count=3, seed=1, buffer=200))
    first = fractions(Pipeline(source).take(1800))
    assert near(first[-1:], 1.0)  # of what is to be taken
    again = csv(tmp_path)
    read_epochs(again, Epochs(count=3, seed=1, buffer=200))
    again.restore(source.position())
    found = fractions(again)
    assert found[0] == pytest.approx(0.5 + BATCH / RECORDS / 3, abs=0.03)
    assert found[-1] == pytest.approx(1.0, abs=0.01)


def test_each_worker_knows_the_part_of_its_share(tmp_path: Path) -> None:
    assert near(fractions(csv(tmp_path, worker=1, num_workers=2)), BATCH / 600)


def test_a_part_is_not_known_of_what_has_no_end_or_does_not_say(tmp_path: Path) -> None:
    endless = csv(tmp_path, epochs=None)
    next(iter(endless))
    assert fraction_read(endless, endless.position()) is None
    assert fraction_read(object(), {}) is None


def test_tables_in_memory_know_their_part() -> None:
    assert fractions(memory()) == [0.4, 0.8, 1.0]
    assert fractions(memory().take(4)) == [0.5, 1.0]
    table = pytest.importorskip("pyarrow").table(COLUMNS)
    arrow = ArrowSource(table, batch_size=2, epochs=2, shuffle=ShuffleConfig(seed=1))
    assert fractions(arrow) == [0.2, 0.4, 0.6, 0.8, 1.0]


def test_what_was_there_already_is_not_live(tmp_path: Path) -> None:
    files = [str(tmp_path / "x.csv")]
    at_rest = [
        memory().rebatch(3).to_batches(SPEC).prefetch(1),
        FileSource(files, CsvFormat(), batch_size=2),
        ArrowSource(pa.table(COLUMNS), batch_size=2),
        DriftingStream(),
    ]
    as_they_come = [
        FileSource(Watch(files), CsvFormat(), batch_size=2),
        IterableSource(lambda: iter([{"item": 1}]), batch_size=2),
        object(),  # a source of somebody's own
    ]
    assert [is_live(one) for one in at_rest] == [False] * 4
    assert [is_live(one) for one in as_they_come] == [True] * 3
