"""CSV files: well made, badly made, and cut anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from monolith.data import BadRecord, Records, concat
from monolith.data.formats.csv import CsvFormat
from monolith.data.formats.memory import to_records
from monolith.errors import ConfigError, CorruptFileError, DataError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.csv"


def read(path: Path, form: CsvFormat | None = None, **options: Any) -> tuple[Records, list[BadRecord]]:
    chunks = list((form or CsvFormat()).chunks(str(path), **options))
    return concat([chunk.records for chunk in chunks]), [bad for chunk in chunks for bad in chunk.bad]


def test_types_are_the_narrowest_that_fit_and_empty_fields_no_values(path: Path) -> None:
    path.write_text("id,price,name,nothing\n1,0.5,a,\n,2,,\n-3,1e3,4,\n")
    records, bad = read(path)
    assert not bad
    assert records["id"].to_list() == [[1], [], [-3]]
    assert records["price"].to_list() == [[0.5], [2.0], [1000.0]]
    assert records.strings("name") == [[b"a"], [], [b"4"]]
    assert records.strings("nothing") == [[], [], []]


def test_types_can_be_given(path: Path) -> None:
    path.write_text("id,n\n1,2\n")
    records, _ = read(path, CsvFormat(types={"n": torch.float32, "id": torch.uint8}))
    assert records["n"].dtype is torch.float32
    assert records.strings("id") == [[b"1"]]


def test_lists_have_a_separator_of_their_own(path: Path) -> None:
    path.write_text("id;tags\n1;2|3\n4;\n5;6||7\n")
    records, _ = read(path, CsvFormat(delimiter=";", list_separator="|"))
    assert records["tags"].to_list() == [[2, 3], [], [6, 7]]


def test_without_a_header_the_types_name_the_columns(path: Path) -> None:
    path.write_text("1\t2\n3\t4\n")
    form = CsvFormat(delimiter="\t", header=False, types={"a": torch.int64, "b": torch.float32})
    assert read(path, form)[0]["b"].to_list() == [[2.0], [4.0]]
    assert read(path, form, columns=["a"])[0]["a"].to_list() == [[1], [3]]


def test_quotes_hold_delimiters_quotes_and_newlines(path: Path) -> None:
    path.write_bytes(b'id,s\r\n1,"a,b"\r\n2,"say ""x"""\r\n3,"two\nlines"\r\n4,\xff\r\n')
    records, bad = read(path)
    assert not bad
    assert records.strings("s") == [[b"a,b"], [b'say "x"'], [b"two\nlines"], [b"\xff"]]


def test_bad_lines_are_left_out_and_told(path: Path) -> None:
    path.write_text("id,n\n1,2\n3\nx,4\n5,6,7\n\n99999999999999999999,1\n1_0,1\n8,9\n")
    types = {"id": torch.int64, "n": torch.int64}
    records, bad = read(path, CsvFormat(types=types))
    assert records["id"].to_list() == [[1], [8]]
    assert [(one.place, one.payload) for one in bad] == [
        (9, b"3\n"),
        (11, b"x,4\n"),
        (15, b"5,6,7\n"),
        (22, b"99999999999999999999,1\n"),
        (45, b"1_0,1\n"),
    ]
    assert "1 fields instead of 2" in bad[0].reason
    assert "column 'id': 'x' is not a whole number" in bad[1].reason
    assert "64 bits" in bad[3].reason


def test_what_is_not_asked_for_is_not_judged(path: Path) -> None:
    path.write_text("id,n\n1,x\n")
    records, bad = read(path, CsvFormat(types={"id": torch.int64, "n": torch.int64}), columns=["id", "zz"])
    assert (len(records), list(records.columns), bad) == (1, ["id"], [])


def test_a_quote_that_is_never_closed_costs_one_line(path: Path) -> None:
    path.write_text('id,s\n1,a\n2,"b\n3,c\n4,d\n')
    records, bad = read(path)
    assert records["id"].to_list() == [[1], [3], [4]]
    assert [one.payload for one in bad] == [b'2,"b\n']
    path.write_text('id,s\n1,"b\n' + "2,c\n" * 100)
    records, bad = read(path, CsvFormat(record_bytes=50))
    assert len(records) == 100
    assert [one.payload for one in bad] == [b'1,"b\n']


def test_a_line_that_is_too_long_is_bad_piece_by_piece(path: Path) -> None:
    path.write_text("id,s\n1," + "x" * 100 + "\n2,b\n")
    records, bad = read(path, CsvFormat(record_bytes=80))
    assert records["id"].to_list() == [[2]]
    assert "longer than 80 bytes" in bad[0].reason
    assert b"".join(one.payload for one in bad) == b"1," + b"x" * 100 + b"\n"


def test_unsigned_ids_keep_their_bits(path: Path) -> None:
    path.write_text(f"id\n{2**64 - 1}\n")
    assert read(path)[0]["id"].to_list() == [[-1]]


@pytest.mark.parametrize("chunk_bytes", [1, 7, 20, 1000])
def test_reading_goes_on_from_any_chunk(path: Path, chunk_bytes: int) -> None:
    path.write_text("id,s\n" + "".join(f'{number},"a\n{number}"\n' for number in range(20)) + "x")
    form = CsvFormat(chunk_bytes=chunk_bytes)
    whole = list(form.chunks(str(path)))
    ids = [one for chunk in whole for one in chunk.records["id"].flat_values.tolist()]
    assert ids == list(range(20))
    seen = 0
    for chunk in whole:
        seen += len(chunk.records)
        rest = list(form.chunks(str(path), start=chunk.next))
        assert [one for part in rest for one in part.records["id"].flat_values.tolist()] == ids[seen:]
    assert whole[-1].next == path.stat().st_size


def test_types_do_not_depend_on_where_reading_begins(path: Path) -> None:
    path.write_text("n\n0.5\n" + "1\n" * 100)
    form = CsvFormat(chunk_bytes=10)
    assert {chunk.records["n"].dtype for chunk in form.chunks(str(path), start=50)} == {torch.float32}


def test_what_was_written_is_read_back(path: Path) -> None:
    form = CsvFormat(list_separator=";")
    columns = {
        "id": [[1], [2, -3], []],
        "price": [[0.1], [], [1e30, float("inf")]],
        "s": [['a,"b"\n'], [], ["c", b"\xff"]],
    }
    records = to_records(columns)
    with form.writer(str(path)) as writer:
        writer.write(records)
        writer.write(records)
    again, bad = read(path, form)
    assert not bad
    for name in ("id", "price"):
        assert again[name].to_list() == records[name].to_list() * 2
    assert again.strings("s") == records.strings("s") * 2
    assert "0.1," in path.read_text(errors="replace")


def test_what_cannot_be_written_is_refused(path: Path) -> None:
    def write(form: CsvFormat, *parts: dict[str, Any]) -> None:
        with form.writer(str(path)) as writer:
            for part in parts:
                writer.write(to_records(part))

    with pytest.raises(DataError, match="list_separator"):
        write(CsvFormat(), {"id": [[1, 2]]})
    with pytest.raises(DataError, match="separates lists"):
        write(CsvFormat(list_separator=";"), {"s": ["a;b"]})
    with pytest.raises(DataError, match="same columns"):
        write(CsvFormat(), {"a": [1]}, {"b": [1]})
    assert not path.exists()


def test_empty_files_have_no_records(path: Path) -> None:
    for text in ("", "id,n\n", "id,n"):
        path.write_text(text)
        assert list(CsvFormat().chunks(str(path))) == []


def test_a_header_that_makes_no_sense_is_refused(path: Path) -> None:
    for text in ("a,a\n1,2\n", "a,,b\n1,2,3\n", '"a\n'):
        path.write_text(text)
        with pytest.raises(CorruptFileError):
            list(CsvFormat().chunks(str(path)))


@pytest.mark.parametrize(
    "options",
    [
        {"delimiter": ",,"},
        {"delimiter": '"'},
        {"delimiter": ",", "list_separator": ","},
        {"header": False},
        {"types": {"a": torch.float64}},
        {"chunk_bytes": 0},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CsvFormat(**options)
