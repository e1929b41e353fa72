"""JSON lines: well made, badly made, and cut anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from monolith.data import BadRecord, Records, concat, format_of
from monolith.data.formats.json_lines import JsonLinesFormat
from monolith.data.formats.memory import to_records
from monolith.errors import ConfigError, DataError


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
