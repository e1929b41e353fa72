"""Where the first empty cell of a column is: the line an editor shows, or the record."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch

from monolith.data import Format
from monolith.data.files.bad_records import locate_empty_cell
from monolith.data.formats import CsvFormat, JsonLinesFormat, ParquetFormat
from monolith.data.records import Records
from monolith.tensors import RaggedTensor

TYPES = {"word": torch.uint8, "y": torch.float32}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("word,y\na,1\nb,0\n", None),
        ("word,y\na,\nb,0\n", "line 2"),
        ("word,y\na,1\nb,\n", "line 3"),
        ("word,y\r\na,1\r\nb,\r\n", "line 3"),
        ("word,y\na,1\nb,", "line 3"),
        ("word,y\na,1\n\n\nb,\nc,\n", "line 5"),
        ('word,y\n"a\nb",1\nc,\n', "line 4"),
        ("word,y\na,1\na,no number\na,1,2\nb,\n", "line 5"),
    ],
)
def test_the_line_is_the_one_an_editor_shows(tmp_path: Path, text: str, place: str | None) -> None:
    path = tmp_path / "some.csv"
    path.write_bytes(text.encode())
    assert locate_empty_cell(CsvFormat(types=TYPES), str(path), "y") == place


@pytest.mark.parametrize("chunk_bytes", [1, 100, 5000, 4 << 20])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_it_is_found_in_a_long_file_whatever_its_chunks(
    tmp_path: Path, chunk_bytes: int, suffix: str
) -> None:
    lines = [f"word-{number},{'' if number == 1234 else number}" for number in range(2000)]
    text = "\n".join(["word,y", *lines]).encode()
    path = tmp_path / f"some.csv{suffix}"
    path.write_bytes(gzip.compress(text) if suffix else text)
    assert locate_empty_cell(CsvFormat(types=TYPES, chunk_bytes=chunk_bytes), str(path), "y") == "line 1236"


def test_json_lines_have_lines_and_other_formats_records(tmp_path: Path) -> None:
    lined = tmp_path / "some.jsonl"
    lined.write_text('{"y": 1.0}\nno json\n{"y": 2.0}\n{"y": null}\n')
    assert locate_empty_cell(JsonLinesFormat(types={"y": torch.float32}), str(lined), "y") == "line 4"
    other: Format = ParquetFormat()
    path = str(tmp_path / "some.parquet")
    with other.writer(path) as file:
        file.write(Records(3, {"y": RaggedTensor.from_list([[1.0], [], [2.0]], dtype=torch.float32)}))
    assert locate_empty_cell(other, path, "y") == "record 2"
