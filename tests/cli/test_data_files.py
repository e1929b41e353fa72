"""`monolith data head | stats | convert | validate`: files of records, for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from monolith.cli.data_files import FilesBar
from monolith.cli.main import main
from monolith.data import Records, format_of
from monolith.data.formats import CsvFormat
from monolith.errors import ConfigError
from monolith.tensors import RaggedTensor


@pytest.fixture
def records() -> Records:
    return Records(
        4,
        {
            "item": RaggedTensor.from_list([[1, 2], [], [3], [4]], dtype=torch.int64),
            "price": RaggedTensor.from_list([[0.5], [1.5], [2.5], []]),
            "word": RaggedTensor.from_list(
                [[[104, 105]], [[104]], [[]], []], dtype=torch.uint8, ragged_rank=2
            ),
        },
    )


@pytest.fixture
def file(tmp_path: Path, records: Records) -> str:
    path = str(tmp_path / "some.tfrecord")
    with format_of(path).writer(path) as out:
        out.write(records)
    return path


def read(path: str) -> dict[str, Any]:
    (chunk,) = format_of(path).chunks(path)
    return {name: chunk.records[name].to_list() for name in chunk.records.columns}


# head


def test_the_first_records_are_shown(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "head", file, "--records", "2"]) == 0
    printed = capsys.readouterr().out
    assert "(tf_example)" in printed
    assert "1, 2" in printed
    assert "hi" in printed
    assert "2.5" not in printed


def test_records_can_be_had_as_json(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "head", file, "--json", "--columns", "item", "word", "--records", "9"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == {"item": [1, 2], "word": ["hi"]}
    assert [row["item"] for row in rows] == [[1, 2], [], [3], [4]]


def test_a_file_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["data", "head", str(tmp_path / "none.parquet")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# stats


def test_columns_are_counted_over_all_files(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    other = str(Path(file).with_name("other.parquet"))
    assert main(["data", "convert", file, "--to", other]) == 0
    assert main(["data", "stats", file, other, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["records"] == 8
    assert found["columns"]["item"]["fill"] == 0.75
    assert found["columns"]["item"]["distinct"] == 4
    assert found["columns"]["price"]["mean"] == 1.5


def test_a_table_and_a_picture_are_drawn(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "stats.png"
    assert main(["data", "stats", file, "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "4 records" in printed
    assert "75.0%" in printed


def test_progress_is_by_bytes_over_all_files(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a.csv", "b.csv")]
    for path, size in zip(paths, (100, 300), strict=True):
        Path(path).write_text("id\n" + "12345\n" * size)
    form = CsvFormat(chunk_bytes=200)
    with FilesBar(paths, "Counting") as bar:
        assert bar.part() == 0
        found = [bar.part() or 0.0 for path in paths for _ in bar.watched(path, form.chunks(path))]
        assert bar.part() == 1
    assert found == sorted(found)
    assert min(abs(part - 0.25) for part in found) < 0.01  # where the first file ends


def test_a_pattern_names_many_files_and_one_that_names_none_is_refused(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "stats", str(Path(file).with_name("*.tfrecord")), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["records"] == 4
    assert main(["data", "stats", "/nowhere/*.csv"]) == 2
    assert "there is no file '/nowhere/*.csv'" in capsys.readouterr().err


# convert


@pytest.mark.parametrize("suffix", ["parquet", "csv", "tsv", "tfrecord.gz"])
def test_formats_go_in_and_out(file: str, tmp_path: Path, suffix: str) -> None:
    there, back = str(tmp_path / f"there.{suffix}"), str(tmp_path / "back.tfrecord")
    assert main(["data", "convert", file, "--to", there, "--columns", "item", "price"]) == 0
    assert main(["data", "convert", there, "--to", back]) == 0
    assert read(back) == {name: rows for name, rows in read(file).items() if name != "word"}


def test_a_format_can_be_named(file: str, tmp_path: Path) -> None:
    path = str(tmp_path / "anything")
    assert main(["data", "convert", file, "--to", path, "--to-format", "example_batch"]) == 0
    (chunk,) = format_of(path, "example_batch").chunks(path)
    assert chunk.records["item"].to_list() == [[1, 2], [], [3], [4]]


def test_what_cannot_be_converted_is_refused(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "convert", file, "--to", file]) == 2
    assert "is both input and output" in capsys.readouterr().err
    assert main(["data", "convert", file]) == 2
    assert "--to" in capsys.readouterr().err


# validate


def test_floats_that_are_not_finite_are_found_with_file_record_and_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "day.csv"
    path.write_text("item,price,label\n1,0.5,1.0\n2,nan,0.0\n3,inf,0.5\n4,1.5,nan\n")
    assert main(["data", "validate", str(path)]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{path}: record 1: column 'price' is nan" in printed
    assert f"{path}: record 2: column 'price' is inf" in printed
    assert f"{path}: record 3: column 'label' is nan" in printed
    assert "1 good records, 3 faults" in printed


def test_good_files_have_no_faults(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "validate", file]) == 0
    assert "4 good records, 0 faults" in capsys.readouterr().out


def test_damage_is_told_by_file_and_byte(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    content = bytearray(Path(file).read_bytes())
    content[-3] ^= 1
    Path(file).write_bytes(content)
    assert main(["data", "validate", file]) == 1
    assert "corrupt at byte" in capsys.readouterr().out


def test_malformed_records_are_told_and_stop_a_conversion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, to = tmp_path / "bad.csv", tmp_path / "good.parquet"
    path.write_text("a,b\n1,2\n1,2,3\n4,5\n")
    assert main(["data", "validate", str(path)]) == 1
    printed = capsys.readouterr().out
    assert "2 good records, 1 faults" in printed
    assert main(["data", "convert", str(path), "--to", str(to)]) == 2
    assert not to.exists()
    assert main(["data", "convert", str(path), "--to", str(to), "--skip-bad"]) == 0
    assert read(str(to)) == {"a": [[1], [4]], "b": [[2], [5]]}


# Choosing a format


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("x.tfrecord", "tf_example"),
        ("x.tfrecord.gz", "tf_example"),
        ("s3://b/x.PARQUET", "parquet"),
        ("x.csv", "csv"),
    ],
)
def test_a_name_tells_the_format(path: str, name: str) -> None:
    assert format_of(path).name == name


def test_a_name_that_does_not_tell_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not tell its format"):
        format_of("part-00000")
    with pytest.raises(ConfigError, match="did you mean 'parquet'"):
        format_of("x", "parket")


# What is odd in tables


def test_a_bad_value_of_a_csv_is_found_with_its_line_column_and_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One in the head of the file, which decides what its column is, and one far behind it."""
    rows = [f"{number},0.5\n" for number in range(3000)]
    rows[5] = "5,cheap\n"
    rows[2500] = "x7,0.5\n"
    path = tmp_path / "some.csv"
    path.write_text("item,price\n" + "".join(rows))
    assert main(["data", "validate", str(path)]) == 1
    head, behind, end = capsys.readouterr().out.splitlines()
    assert head.startswith(f"{path}: line 7: column 'price': 'cheap' is not a number")
    assert behind == f"{path}: line 2502: column 'item': 'x7' is not a whole number"
    assert end == "2,999 good records, 2 faults"


def test_an_empty_file_is_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "some.csv"
    path.write_text("item,price\n")
    assert main(["data", "validate", str(path)]) == 1
    assert f"{path}: the file is empty: it has no records" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["head", "stats"])
def test_a_column_that_a_table_lacks_is_an_error_that_names_the_others(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "some.csv"
    path.write_text("item,price\n1,2\n")
    assert main(["data", command, str(path), "--columns", "itm"]) == 2
    assert "has no column 'itm'; it has item, price. Did you mean 'item'?" in capsys.readouterr().err
