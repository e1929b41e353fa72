"""Parquet files, ours and those of others."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from monolith.data import Records, concat
from monolith.data.formats.memory import to_records
from monolith.data.formats.parquet import ParquetFormat
from monolith.errors import ConfigError, CorruptFileError, DataError, FileMissingError, MissingExtraError
from monolith.feature.spec.times import TIME

FIXTURES = Path(__file__).parents[1] / "fixtures"


def read(path: Path | str, form: ParquetFormat | None = None, **options: Any) -> Records:
    return concat([chunk.records for chunk in (form or ParquetFormat()).chunks(str(path), **options)])


def column(values: Any, path: Path) -> list[Any]:
    """What comes out of one column of pyarrow."""
    pq.write_table(pa.table({"x": values}), path / "x.parquet")
    records = read(path / "x.parquet")
    return records.strings("x") if records["x"].dtype is torch.uint8 else records["x"].to_list()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (pa.array([1, None, -3], pa.int8()), [[1], [], [-3]]),
        (pa.array([2**64 - 1, None], pa.uint64()), [[-1], []]),
        (pa.array([2**32 - 1], pa.uint32()), [[2**32 - 1]]),
        (pa.array([True, False, None]), [[1], [0], []]),
        (pa.array([0.5, None, float("inf")], pa.float64()), [[0.5], [], [float("inf")]]),
        (pa.array([0.5], pa.float16()), [[0.5]]),
        (pa.array([Decimal("1.25"), None]), [[1.25], []]),
        (pa.array(["a", None, "", "äb"]), [[b"a"], [], [b""], "äb".encode()]),
        (pa.array([b"\xff\x00"], pa.binary(2)), [[b"\xff\x00"]]),
        (pa.array(["a", "b", None, "a"]).dictionary_encode(), [[b"a"], [b"b"], [], [b"a"]]),
        (pa.array([datetime(2024, 1, 1, 0, 0, 1, 999, UTC)], pa.timestamp("us", "UTC")), [[1704067201]]),
        (pa.array([date(2024, 1, 1)]), [[1704067200]]),
        (pa.array([[1, 2], [], None, [None, 3], [None]], pa.list_(pa.int32())), [[1, 2], [], [], [3], []]),
        (pa.array([[0.5], None], pa.large_list(pa.float64())), [[0.5], []]),
        (pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2)), [[1, 2], [], [3, 4]]),
        (pa.array([["a", None, "bc"], [], None, [""]]), [[b"a", b"bc"], [], [], [b""]]),
        (pa.array([], pa.int64()), []),
    ],
)
def test_columns_become_one_of_our_types(values: pa.Array, expected: list[Any], tmp_path: Path) -> None:
    expected = [[one] if isinstance(one, bytes) else one for one in expected]
    if not len(values):
        pq.write_table(pa.table({"x": values}), tmp_path / "x")
        assert list(ParquetFormat().chunks(str(tmp_path / "x"))) == []
        return
    assert column(values, tmp_path) == expected


def test_slices_of_strings_and_lists_are_read_from_their_middle(tmp_path: Path) -> None:
    path = tmp_path / "x"
    table = pa.table(
        {"s": ["a", "bc", None, "d"], "l": [["p"], None, ["q", "rs"], []], "n": [[1], [2, 3], [], [4]]}
    )
    pq.write_table(table, path)
    chunks = list(ParquetFormat(chunk_rows=1).chunks(str(path), start=1))
    assert [chunk.next for chunk in chunks] == [2, 3, 4]
    records = concat([chunk.records for chunk in chunks])
    assert records.strings("s") == [[b"bc"], [], [b"d"]]
    assert records.strings("l") == [[], [b"q", b"rs"], []]
    assert records["n"].to_list() == [[2, 3], [], [4]]


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    records = to_records(
        {"id": [[1], [2, -3], []], "price": [[0.1], [], [1e30, float("inf")]], "s": [["a"], [], ["", "b"]]}
    )
    with ParquetFormat().writer(path) as writer:
        writer.write(records)
        writer.write(records)
    again = read(path)
    for name in ("id", "price"):
        assert again[name].to_list() == records[name].to_list() * 2
        assert again[name].dtype is records[name].dtype
    assert again.strings("s") == [[b"a"], [], [b"", b"b"]] * 2


def test_row_groups_and_chunks_have_the_sizes_asked_for(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    form = ParquetFormat(chunk_rows=3, row_group_rows=5)
    with form.writer(path) as writer:
        for first in range(0, 12, 4):
            writer.write(to_records({"id": list(range(first, first + 4))}))
    about = pq.ParquetFile(path).metadata
    assert [about.row_group(number).num_rows for number in range(about.num_row_groups)] == [5, 5, 2]
    chunks = list(form.chunks(path))
    assert [(len(chunk.records), chunk.next) for chunk in chunks] == [
        (3, 3),
        (2, 5),
        (3, 8),
        (2, 10),
        (2, 12),
    ]
    for chunk in chunks:
        rest = [one for part in form.chunks(path, start=chunk.next) for one in part.records["id"].flat_values]
        assert rest == list(range(chunk.next, 12))


def test_single_columns_are_plain_for_other_readers(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    form = ParquetFormat(single=["id", "s"])
    with form.writer(path) as writer:
        writer.write(to_records({"id": [[7], [], [8]], "s": [[], ["a"], ["b"]]}))
    assert pq.read_table(path).to_pydict() == {"id": [7, None, 8], "s": [None, "a", "b"]}
    with pytest.raises(DataError, match="'id' is to have one value"), form.writer(path) as writer:
        writer.write(to_records({"id": [[7, 8]]}))
    assert len(read(path)) == 3  # the file that was there


def test_only_the_columns_asked_for_are_read(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    pq.write_table(pa.table({"line_id": [1], "line_id.uid": [2], "b": [{"no": 1}]}), path)
    assert list(read(path, columns=["line_id", "missing"]).columns) == ["line_id"]
    assert read(path, columns=["line_id.uid"])["line_id.uid"].to_list() == [[2]]
    assert len(read(path, columns=[])) == 1
    with pytest.raises(DataError, match=r"'b' has the type struct.*Name the columns"):
        read(path)


def test_a_column_of_nothing_but_nulls_is_empty_and_of_whatever_type_the_next_file_has(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "x")
    pq.write_table(pa.table({"a": [1, 2], "none": pa.nulls(2)}), path)
    found = read(path)
    assert found["none"].to_list() == [[], []]
    pq.write_table(pa.table({"a": [3], "none": ["text"]}), path)
    assert concat([found, read(path)]).strings("none") == [[], [], [b"text"]]


def test_a_null_in_a_list_of_numbers_keeps_its_place(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    pq.write_table(pa.table({"x": [[1.0, None], None], "ids": [[1, None], [2]]}), path)
    found = read(path)
    assert found["x"].flat_values.isnan().tolist() == [False, True]
    assert found["x"].row_lengths().tolist() == [2, 0]
    assert found["ids"].to_list() == [[1], [2]]


def test_whole_numbers_and_times_that_a_file_has_as_doubles_are_exact_where_they_are_declared(
    tmp_path: Path,
) -> None:
    path, large = str(tmp_path / "x"), (1 << 53) - 1
    nan = float("nan")
    pq.write_table(pa.table({"id": [float(large), nan, None], "t": [1714557600.75, nan, None]}), path)
    found = read(path, ParquetFormat(types={"id": torch.int64, "t": TIME}))
    assert found["id"].to_list() == [[large], [], []]
    assert found["t"].to_list() == [[1714557600], [], []]
    pq.write_table(pa.table({"id": [1.5]}), path)
    with pytest.raises(DataError, match=r"column 'id' must hold whole numbers, as ids, got 1.5"):
        read(path, ParquetFormat(types={"id": torch.int64}))


def test_files_of_polars_are_read() -> None:
    records = read(FIXTURES / "polars.parquet")
    assert records["user"].to_list() == [[1], [], [3]]
    assert records["tags"].to_list() == [[1, 2], [], [3]]
    assert records["price"].to_list() == [[0.5], [], [-1.25]]
    assert records["clicked"].to_list() == [[1], [0], []]
    assert records.strings("name") == [[b"a"], [], [b"bcd"]]
    assert records.strings("words") == [[b"x", b"yz"], [], []]
    assert records.strings("kind") == [[b"k"], [b"l"], [b"k"]]
    assert records["at"].to_list() == [[1704067200], [], [1704067201]]


def test_a_file_that_is_torn_or_something_else_is_refused(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    with ParquetFormat().writer(str(good)) as writer:
        writer.write(to_records({"id": np.arange(10_000)}))
    content = good.read_bytes()
    for broken in (b"", b"PAR1", content[:-10], b"x" * 1000):
        bad.write_bytes(broken)
        with pytest.raises(CorruptFileError, match="bad: corrupt at byte 0"):
            read(bad)
    middle = bytearray(content)
    middle[100:2000] = b"\xff" * 1900
    bad.write_bytes(middle)
    with pytest.raises(CorruptFileError):
        read(bad)
    with pytest.raises(CorruptFileError, match="10000 rows, but was to be read on from row 10001"):
        read(good, start=10_001)
    assert list(ParquetFormat().chunks(str(good), start=10_000)) == []
    with pytest.raises(FileMissingError):
        read(tmp_path / "missing")


def test_a_file_that_is_not_finished_does_not_appear(tmp_path: Path) -> None:
    def fail() -> None:
        with ParquetFormat().writer(str(tmp_path / "x")) as writer:
            writer.write(to_records({"id": [1]}))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_records_of_one_file_have_the_same_columns(tmp_path: Path) -> None:
    form = ParquetFormat(row_group_rows=1)

    def write(parts: Sequence[Records]) -> None:
        with form.writer(str(tmp_path / "x")) as writer:
            for part in parts:
                writer.write(part)

    with pytest.raises(DataError, match="it has a, these have b"):
        write([to_records({"a": [1]}), to_records({"b": [1]})])


def test_shared_columns_are_written_for_every_record(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    one = to_records({"user": [[7, 8]]}).columns["user"]
    records = Records(2, {"user": one, **to_records({"id": [1, 2]}).columns}, frozenset({"user"}))
    with ParquetFormat().writer(path) as writer:
        writer.write(records)
    assert read(path)["user"].to_list() == [[7, 8], [7, 8]]


def test_without_pyarrow_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match="arrow"):
        next(ParquetFormat().chunks("x"))


def test_sizes_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError):
        ParquetFormat(chunk_rows=0)


def test_a_file_whose_column_names_are_no_text_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "day.parquet"
    pq.write_table(pa.table({"user": [1, 2]}), path)
    path.write_bytes(path.read_bytes().replace(b"user", b"\xa6ser"))
    with pytest.raises(CorruptFileError, match="not a Parquet file that can be read"):
        list(ParquetFormat().chunks(str(path)))


def test_a_file_whose_statistics_contradict_its_schema_is_corrupt() -> None:
    # Found by the fuzzer: asked for the place of a column, pyarrow ended the process.
    with pytest.raises(CorruptFileError, match="histogram size mismatch"):
        read(FIXTURES / "damaged_histogram.parquet")
