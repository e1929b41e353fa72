"""CSV files: well made, badly made, and cut anywhere."""

from __future__ import annotations

import csv
import io
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from data.formats.csv_reference import PlainChunk, PlainCsv
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from services.properties import tries

from monolith import native
from monolith.data import BadRecord, Chunk, Records, concat
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


def test_the_mark_that_spreadsheets_put_before_the_first_name_is_no_part_of_it(path: Path) -> None:
    path.write_text("user,n\n7,2\n8,3\n", encoding="utf-8-sig")
    records, bad = read(path)
    assert not bad
    assert records["user"].to_list() == [[7], [8]]


def test_nor_is_it_part_of_the_first_value_without_a_header(path: Path) -> None:
    path.write_text("7,2\n8,3\n", encoding="utf-8-sig")
    records, bad = read(path, CsvFormat(header=False, types={"a": torch.int64, "b": torch.int64}))
    assert not bad
    assert records["a"].to_list() == [[7], [8]]


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
    assert bad[1].reason == "line 4: column 'id': 'x' is not a whole number"
    assert bad[3].reason.startswith("line 7: ")
    assert "64 bits" in bad[3].reason


def test_a_column_that_a_few_values_make_a_text_is_named_with_the_first_of_them(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [f"{number},{number}.5,w{number}\n" for number in range(50)]
    rows[7] = "7,n/a,w7\n"
    path.write_text("id,price,word\n" + "".join(rows))
    form = CsvFormat()
    records, _ = read(path, form)
    assert records["price"].dtype is torch.uint8
    read(path, form)
    (line,) = caplog.messages  # of the column that is a text in earnest nothing, and once of this one
    assert "line 9: column 'price': 'n/a' is not a number, and 49 other records have one" in line
    assert [odd.text for odd in form.odd_values(str(path))] == [line.removeprefix(f"csv: {path}: ")]
    assert not CsvFormat(types={"price": torch.float32}).odd_values(str(path))


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
def test_reading_resumes_from_any_chunk(path: Path, chunk_bytes: int) -> None:
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


@pytest.mark.parametrize(("delimiter", "used"), [(",", ";"), (",", "\t"), ("\t", ","), (";", "|")])
def test_a_file_with_another_delimiter_is_warned_about(
    path: Path, delimiter: str, used: str, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text(f"a{used}b\n1{used}2\n")
    read(path, CsvFormat(delimiter=delimiter))
    (said,) = caplog.messages
    assert f"fields seem to be separated by {used!r}, and {delimiter!r} was expected" in said
    assert f"CsvFormat(delimiter={used!r})" in said


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


def test_long_fields_and_long_gaps_are_read(path: Path) -> None:
    text = "x" * 300_000
    path.write_text(f'id,s\n1,"{text}"\n' + "\r\n" * 200_000 + f"2,{text}\n" + "\n" * 200_000 + "3,b\n")
    for chunk_bytes in (1, 1 << 20, 4 << 20):
        records, bad = read(path, CsvFormat(chunk_bytes=chunk_bytes))
        assert not bad
        assert records["id"].to_list() == [[1], [2], [3]]
        assert [len(row[0]) for row in records.strings("s")] == [300_000, 300_000, 1]


def test_a_file_of_empty_lines_has_no_records(path: Path) -> None:
    path.write_text("\n" * 200_000)
    assert list(CsvFormat().chunks(str(path))) == []
    path.write_text("id\n" + "\r\n" * 200_000)
    assert list(CsvFormat().chunks(str(path))) == []


@pytest.mark.parametrize("separators", [("ab", None), ("é", None), (",", ""), (",", "\n"), (";", ";")])
def test_the_core_refuses_what_cannot_separate(separators: tuple[str, str | None]) -> None:
    with pytest.raises(ValueError, match="separat"):
        native.CsvDialect(*separators, 1)


def test_the_core_refuses_columns_that_are_not_there() -> None:
    dialect = native.CsvDialect(",", None, 10)
    with pytest.raises(ValueError, match="positions"):
        native.CsvParser(dialect, 1, [(1, native.ColumnType.INT64)])


# Beside the plain reader


def assert_same(chunk: Chunk, plain: PlainChunk) -> None:
    assert (chunk.next, len(chunk.records)) == (plain.next, plain.size)
    assert list(chunk.bad) == plain.bad
    assert {name: column.dtype for name, column in chunk.records.columns.items()} == plain.types
    for name, dtype in plain.types.items():
        if dtype is torch.uint8:
            assert chunk.records.strings(name) == plain.cells[name]
            continue
        column = chunk.records[name]
        assert column.row_lengths().tolist() == [len(row) for row in plain.cells[name]]
        values = torch.tensor([value for row in plain.cells[name] for value in row], dtype=dtype)
        bits = torch.int64 if dtype is torch.int64 else torch.int32  # so that NaN is like itself
        assert torch.equal(column.flat_values.view(bits), values.view(bits))


def compare(path: Path, data: bytes, columns: list[str] | None = None, **options: Any) -> None:
    """Check that the native reader does with a file what the plain one does, from every chunk on."""
    path.write_bytes(data)
    form = CsvFormat(**options)
    try:
        plain = list(PlainCsv(**options).chunks(data, columns=columns))
    except CorruptFileError as cause:
        refusal = cause.reason
    else:
        refusal = None
    if refusal is not None:
        with pytest.raises(CorruptFileError) as caught:
            list(form.chunks(str(path), columns=columns))
        assert caught.value.reason == refusal
        return
    found = list(form.chunks(str(path), columns=columns))
    assert len(found) == len(plain)
    for chunk, other in zip(found, plain, strict=True):
        assert_same(chunk, other)
    if len(found) > 1:
        again = list(form.chunks(str(path), start=found[0].next, columns=columns))
        for chunk, other in zip(again, plain[1:], strict=True):
            assert_same(chunk, other)


whole = st.one_of(
    st.integers(-(1 << 63) - 2, (1 << 64) + 2).map(str),
    st.integers(-20, 20).map(str),
    st.from_regex(r"\A[ \t]{0,2}[+-]?[0-9]{0,24}[ \r\n]?\Z"),
)
numbers = st.one_of(
    st.floats().map(repr),
    st.floats(width=32).map(str),
    st.from_regex(r"\A[+-]?[0-9]{0,20}\.?[0-9]{0,20}([eE][+-]?[0-9]{0,4})?\Z"),
    st.sampled_from(["inf", "-NAN", "Infinity", "1_0", "0x1", "1e99999999999", "1e-400", ".", "1.", ".5"]),
)
words = st.text(st.sampled_from('ab,;|"\r\n\t \0é\ufeff'), max_size=6)
cells = st.one_of(whole, numbers, words, st.just(""))
lists = st.lists(cells, max_size=3).map("|".join)
options = st.fixed_dictionaries(
    {
        "chunk_bytes": st.sampled_from([1, 7, 40, 1 << 20]),
        "record_bytes": st.sampled_from([3, 12, 60, 1 << 20]),
        "infer_rows": st.sampled_from([1, 3, 1000]),
        "list_separator": st.sampled_from([None, "|"]),
        "delimiter": st.sampled_from([",", "\t"]),
    }
)
PARTS = [b'"', b",", b"\n", b"\r", b"\r\n", b"a", b"1", b"2.5", b"|", b'""', b" ", b"\xc3", b"x,y\n"]
same_folder = settings(
    max_examples=tries(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@st.composite
def tables(draw: st.DrawFn) -> tuple[bytes, dict[str, Any]]:
    """Well-made files, whatever their cells hold, and options to read them with."""
    chosen = draw(options)
    kinds = draw(st.lists(st.sampled_from([whole, numbers, words, lists]), min_size=1, max_size=4))
    file = io.StringIO(newline="")
    rows = csv.writer(
        file,
        delimiter=chosen["delimiter"],
        lineterminator=draw(st.sampled_from(["\n", "\r\n"])),
        quoting=draw(st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])),
    )
    rows.writerow([f"c{number}" for number in range(len(kinds))])
    rows.writerows(draw(st.lists(st.tuples(*kinds), max_size=8)))
    return file.getvalue().encode(), chosen


@same_folder
@given(table=tables(), columns=st.none() | st.sets(st.sampled_from(["c0", "c1", "c3"])))
def test_tables_are_read_as_by_the_plain_reader(
    path: Path, table: tuple[bytes, dict[str, Any]], columns: set[str] | None
) -> None:
    data, chosen = table
    compare(path, data, None if columns is None else sorted(columns), **chosen)


@same_folder
@given(
    table=tables(),
    damage=st.lists(
        st.tuples(
            st.integers(0, 200),
            st.integers(0, 3),
            st.sampled_from([b"", b'"', b"\n", b"\r", b",", b"\xff", b'""', b'"\n', b"x"]),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_damage_costs_what_it_costs_the_plain_reader(
    path: Path, table: tuple[bytes, dict[str, Any]], damage: list[tuple[int, int, bytes]]
) -> None:
    data, chosen = table
    for place, cut, put in damage:
        at = place % (len(data) + 1)
        data = data[:at] + put + data[at + cut :]
    compare(path, data, **chosen)


@same_folder
@given(
    parts=st.lists(st.sampled_from(PARTS)),
    types=st.lists(st.sampled_from([torch.int64, torch.float32, torch.uint8]), min_size=1, max_size=3),
    chosen=options,
)
@example([b'"', b"\r", b'"', b"x", b"\n"], [torch.uint8], {})
@example([b"a", b'"', b"\n", b"1", b'"', b"\n"], [torch.uint8], {"record_bytes": 3})
def test_any_bytes_are_read_as_by_the_plain_reader(
    path: Path, parts: list[bytes], types: list[torch.dtype], chosen: dict[str, Any]
) -> None:
    named = {f"c{number}": dtype for number, dtype in enumerate(types)}
    compare(path, b"".join(parts), header=False, types=named, **chosen)
    compare(path, b"".join(parts), **chosen)


def test_it_makes_no_difference_where_a_reading_ends(path: Path) -> None:
    lines = ['1,"a\nb"\r\n', '2,"say ""x"""\n', "\n", "3,é\r\n", "x,y\n", '4,c"d\n', '"5","e"f\n', "6\n"]
    data = ("id,s\n" + "".join(lines) * 3000).encode()
    types = {"id": torch.int64, "s": torch.uint8}
    (plain,) = PlainCsv(types=types).chunks(data)
    ids, lengths = [row[0] for row in plain.cells["id"]], [len(row) for row in plain.cells["s"]]
    texts = b"".join(row[0] for row in plain.cells["s"] if row)
    cycle = len("".join(lines).encode())
    path.write_bytes(data)
    for chunk_bytes in range(70_000, 70_000 + cycle):
        chunks = list(CsvFormat(types=types, chunk_bytes=chunk_bytes).chunks(str(path)))
        assert len(chunks) > 2
        records = concat([chunk.records for chunk in chunks])
        assert records["id"].flat_values.tolist() == ids
        assert records["s"].row_lengths().tolist() == lengths
        assert bytes(records["s"].flat_values.numpy()) == texts
        assert [bad for chunk in chunks for bad in chunk.bad] == plain.bad
        assert all(after.next > before.next for before, after in pairwise(chunks))


def test_the_core_asks_for_more_until_a_chunk_is_whole() -> None:
    data = b'1,"a\nb"\r\n\r\n2,"c"\n3,d'
    dialect = native.CsvDialect(",", None, 100)
    parser = native.CsvParser(dialect, 2, [(0, native.ColumnType.INT64)])
    for end in range(len(data) + 1):
        parsed = parser.parse(data[:end], False, 10)
        # A chunk of 10 bytes ends with the empty line; the next record does not have to be there.
        assert parsed.whole == (end >= 11)
        if parsed.whole:
            assert (parsed.records, parsed.next) == (1, 11)
