"""JSON lines: well made, badly made, and cut anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from monolith.data import BadRecord, Records, concat, format_of
from monolith.data.formats.json_lines import JsonLinesFormat
from monolith.data.formats.memory import cells_of, json_object, read_row, rows_as_records, to_records
from monolith.errors import ConfigError, DataError
from monolith.feature.spec.times import TIME


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.jsonl"


def read(path: Path, form: JsonLinesFormat | None = None, **options: Any) -> tuple[Records, list[BadRecord]]:
    chunks = list((form or JsonLinesFormat()).chunks(str(path), **options))
    return concat([chunk.records for chunk in chunks]), [bad for chunk in chunks for bad in chunk.bad]


def test_types_are_the_narrowest_that_fit_and_missing_ones_no_values(path: Path) -> None:
    path.write_text(
        '{"id": 1, "price": 2, "word": "hi", "tags": [1, 2], "none": null}\n'
        '{"price": 0.5, "tags": []}\n\n{"id": true, "tags": [3, null], "word": null}\n'
    )
    records, bad = read(path)
    assert not bad
    assert records["id"].to_list() == [[1], [], [1]]
    assert records["price"].to_list() == [[2.0], [0.5], []]
    assert records["tags"].to_list() == [[1, 2], [], [3]]
    assert records.strings("word") == [[b"hi"], [], []]
    assert records.strings("none") == [[], [], []]


def test_bad_lines_are_left_out_and_told(path: Path) -> None:
    path.write_text('{"a": 1}\nnonsense\n[1]\n{"a": "x"}\n{"a": 2, "b": 1}\n{"a": 3}\n')
    form = JsonLinesFormat(types={"a": torch.int64}, infer_records=1)
    records, bad = read(path, form)
    assert records["a"].to_list() == [[1], [3]]
    assert [one.place for one in bad] == [9, 18, 22, 33]
    assert [one.payload for one in bad][1] == b"[1]\n"
    assert "expected an object" in bad[1].reason
    assert "'x' is not a whole number" in bad[2].reason
    assert "'b' is not among" in bad[3].reason


def test_a_line_that_is_too_long_is_bad(path: Path) -> None:
    path.write_text('{"a": "' + "x" * 40 + '"}\n{"a": "y"}\n')
    records, bad = read(path, JsonLinesFormat(types={"a": torch.uint8}, record_bytes=20))
    assert records.strings("a") == [[b"y"]]
    assert "longer than 20 bytes" in bad[0].reason


@pytest.mark.parametrize("chunk_bytes", [1, 30, 1 << 20])
def test_reading_resumes_from_any_chunk(path: Path, chunk_bytes: int) -> None:
    path.write_text("".join(f'{{"a": {n}}}\n' for n in range(20)))
    form = JsonLinesFormat(chunk_bytes=chunk_bytes)
    chunks = list(form.chunks(str(path)))
    assert sum(len(chunk.records) for chunk in chunks) == 20
    read_so_far = 0
    for chunk in chunks:
        read_so_far += len(chunk.records)
        rest = [
            row for later in form.chunks(str(path), start=chunk.next) for row in later.records["a"].to_list()
        ]
        assert rest == [[n] for n in range(read_so_far, 20)]


def test_what_was_written_is_read_back(path: Path) -> None:
    records = to_records(
        {
            "id": [[1, 2], [], [-(1 << 63)]],
            "price": [0.1, 1e-8, 3.0],
            "word": [[b"hi", b""], None, [b"\xff\xc3\xa9"]],
        }
    )
    with format_of(str(path)).writer(str(path)) as file:
        file.write(records)
    back, bad = read(path)
    assert not bad
    assert back["id"].to_list() == records["id"].to_list()
    assert back["price"].to_list() == records["price"].to_list()
    assert back.strings("word") == records.strings("word")
    assert json.loads(path.read_text().splitlines()[1]) == {"id": None, "price": 1e-8, "word": None}
    assert read(path, columns=["id"])[0].columns.keys() == {"id"}


def test_numbers_that_json_lacks_are_null_or_refused(path: Path) -> None:
    with JsonLinesFormat().writer(str(path)) as file:
        file.write(to_records({"a": [float("nan"), 1.5]}))
    assert path.read_text() == '{"a": null}\n{"a": 1.5}\n'
    with pytest.raises(DataError, match="infinite"), JsonLinesFormat().writer(str(path)) as file:
        file.write(to_records({"a": [float("inf")]}))


def test_empty_files_have_no_records(path: Path) -> None:
    path.write_text("\n")
    assert list(JsonLinesFormat().chunks(str(path))) == []


@pytest.mark.parametrize("options", [{"chunk_bytes": 0}, {"types": {"a": torch.int32}}])
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="jsonl"):
        JsonLinesFormat(**options)


VALUES = (
    "1",
    "-0",
    "0.5",
    "1e3",
    "1e400",
    "-7.25e-3",
    "16777217",
    "0.1",
    "01",
    "1.",
    "9223372036854775808",
    "18446744073709551616",
    "-9223372036854775808",
    "true",
    "false",
    "null",
    "NaN",
    "-Infinity",
    "[]",
    "[1, null, 2]",
    "[null]",
    "[0.5, true]",
    "[[1]]",
    '{"x": 1}',
    '"hi"',
    '""',
    '["a", null, "b"]',
    '"\\u00e9\\n\\ud83d\\ude00"',
    '"\\ud800"',
    '"caf\u00e9"',
    '"2024-05-01"',
    '"\\q"',
    "nonsense",
    "",
)
TYPES = {"a": torch.int64, "b": torch.float32, "c": torch.uint8, "d": TIME}


def random_lines(random: Random, count: int) -> bytes:
    """Lines of which most are fine, with odd values, keys, blanks and bytes among them."""
    lines = [b"{}"]  # the first record adds no key to the types
    for _ in range(count):
        fields = [
            (name, random.choice(VALUES) if random.random() < 0.3 else {"c": '"x"'}.get(name, "5"))
            for name in random.sample("abcd" if random.random() < 0.8 else "abcdea", random.randrange(5))
        ]
        blank = random.choice(["", " ", "\t"])
        line = "{" + ",".join(f'{blank}"{name}"{blank}:{value}' for name, value in fields) + blank + "}"
        if random.random() < 0.05:
            line = random.choice(["", "  ", line[:-1], line + "x", "[1]", "\ufeff" + line, line * 2])
        data = line.encode()
        if random.random() < 0.03:
            data = data.replace(b"x", random.choice([b"\xff", b"\xed\xa0\x80", b"\x00", b"\x1f"]))
        lines.append(data)
    return b"\n".join(lines)


@pytest.mark.parametrize("columns", [None, ["a", "c"], ["a", "b", "c", "d"]])
@pytest.mark.parametrize("seed", range(6))
def test_the_core_reads_every_line_as_python_does(path: Path, seed: int, columns: list[str] | None) -> None:
    path.write_bytes(random_lines(Random(seed), 400))
    form = JsonLinesFormat(types=TYPES, infer_records=1, chunk_bytes=2000)
    found, bad = read(path, form, columns=columns)
    # The same, line by line and in Python alone.
    wanted = {name: dtype for name, dtype in TYPES.items() if columns is None or name in columns}
    rows, reasons, place = [], [], 0
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if line.strip():
                row = json_object(line)
                rows.append(cells_of(row, wanted) if columns else read_row(row, TYPES, wanted))
        except ValueError as cause:
            reasons.append((place, f"line at byte {place}: {cause}", line))
        place += len(line)
    assert [(one.place, one.reason, one.payload) for one in bad] == reasons
    expected = rows_as_records(rows, wanted)
    assert len(found) == len(rows) > 50
    for name, column in expected.columns.items():
        assert found[name].row_splits.equal(column.row_splits)
        if column.dtype is torch.float32:  # NaN is not equal to itself, and -0 equals 0
            assert found[name].flat_values.view(torch.int32).equal(column.flat_values.view(torch.int32))
        elif column.dtype is torch.int64:
            assert found[name].flat_values.equal(column.flat_values)
        else:
            assert found.strings(name) == expected.strings(name)
