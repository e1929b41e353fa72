"""`monolith data head | stats | convert | validate`: files of records, for people."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from monolith.cli.data_files import FilesBar
from monolith.cli.main import main
from monolith.data import Records, format_of, statistics
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


def test_the_first_records_of_files_that_patterns_name_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, rows in (("a", "1\n2\n"), ("b", "3\n4\n")):
        (tmp_path / f"{name}.csv").write_text(f"item\n{rows}")
    assert main(["data", "head", str(tmp_path / "*.csv"), "--json", "--records", "3"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"item": [n]} for n in (1, 2, 3)
    ]
    assert main(["data", "head", str(tmp_path / "a.csv"), str(tmp_path / "b.csv"), "--records", "9"]) == 0
    printed = "".join(capsys.readouterr().out.split())  # long paths are broken into lines
    assert "a.csv(csv)" in printed
    assert "b.csv(csv)" in printed
    assert main(["data", "head", str(tmp_path / "c*.csv")]) == 2


@pytest.mark.parametrize("command", ["head", "stats"])
def test_a_line_and_columns_without_end_are_not_shown_whole(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wide.jsonl").write_text(
        json.dumps({f"c{n}": n for n in range(1_005)} | {"n" * 9999: 1}) + "\n"
    )
    assert main(["data", command, str(tmp_path / "wide.jsonl")]) == 0
    printed = capsys.readouterr().out
    assert "and 6 more columns" in printed
    (tmp_path / "long.jsonl").write_bytes(b'{"a": "' + b"x" * (2 << 20) + b'"}\n{"a": "y"}\n')
    assert main(["data", command, str(tmp_path / "long.jsonl")]) == 0
    printed = capsys.readouterr().out
    assert "malformed records are not" in printed
    assert len(printed) < 10_000
    (tmp_path / "long.csv").write_bytes(b"x" * (3 << 20))
    assert main(["data", command, str(tmp_path / "long.csv")]) == 2
    assert "not a header of a CSV file: longer than 1,048,576 bytes" in capsys.readouterr().err


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
    assert "25.0%" in printed


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


def test_infinite_floats_are_found_with_file_record_and_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "day.csv"
    path.write_text("item,price,label\n1,0.5,1.0\n2,nan,0.0\n3,inf,0.5\n4,1.5,nan\n")
    assert main(["data", "validate", str(path)]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{path}: record 2: column 'price' is inf" in printed
    assert "3 good records, 1 fault" in printed  # NaN is a value that is missing


SHOP = "user,code,price,tags,time\n" + "".join(
    f"u_{n:x},{'A12' if n == 30 else n},{'' if n % 4 else n / 4},{'a|b' if n % 2 else ''},"
    f"2023-05-01T10:00:{n:02}\n"
    for n in range(60)
)


def test_a_good_csv_with_texts_gaps_lists_and_times_passes_and_what_may_be_a_mistake_is_noted_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "shop.csv"
    path.write_text(SHOP)
    assert main(["data", "validate", str(path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"note: {path}: line 32: column 'code': 'A12' is not a number, and 59 other records" in printed
    assert printed.endswith("60 good records, 0 faults, 1 note")
    assert not caplog.messages


def test_statistics_name_means_shares_missing_times_and_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "shop.csv"
    path.write_text(SHOP)
    assert main(["data", "stats", str(path)]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.split()}
    assert " ".join(rows["column"]) == "column kind missing values per record distinct min mean max"
    assert rows["price"] == ["price", "floats", "75.0%", "0.25", "15", "0", "7", "14"]
    assert " ".join(rows["tags"]) == "tags strings 50.0% 1.00, at most 2 2 1 bytes 1 bytes 1 bytes"
    assert rows["time"][:5] == ["time", "times", "0.0%", "1.00", "60"]
    assert rows["time"][5:7] + rows["time"][-2:] == ["2023-05-01", "10:00:00", "2023-05-01", "10:00:59"]
    monkeypatch.setattr(statistics, "EXACT", 20)
    assert main(["data", "stats", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "about 60" in printed
    assert "estimated within one percent" in printed


def test_timestamps_of_a_parquet_file_are_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"t": pa.array([datetime(2024, 5, 1)], pa.timestamp("ms")), "n": [7]}), path)
    assert main(["data", "stats", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["columns"]
    assert (found["t"]["kind"], found["t"]["low"]) == ("times", 1714521600)
    assert (found["n"]["kind"], found["n"]["mean"]) == ("ids", 7)


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
    assert "2 good records, 1 fault" in printed
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
    behind, head, end = capsys.readouterr().out.splitlines()
    assert head.startswith(f"{path}: line 7: column 'price': 'cheap' is not a number")
    assert behind.startswith(
        f"{path}: line 2502: column 'item': 'x7' is not a number, and 2,999 other records"
    )
    assert end == "3,000 good records, 2 faults"


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_column_may_change_its_type_after_the_first_records(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole numbers for a thousand records, then others, then texts."""
    prices = [*range(1500), *(0.5 + n for n in range(1500))]
    codes: list[int | str] = [n if n < 1500 else f"x{n}" for n in range(3000)]
    path = tmp_path / f"some.{suffix}"
    if suffix == "csv":
        lines = ["price,code", *(f"{price},{code}" for price, code in zip(prices, codes, strict=True))]
    else:
        lines = [
            json.dumps({"price": price, "code": str(code)}) for price, code in zip(prices, codes, strict=True)
        ]
    path.write_text("\n".join(lines))
    assert main(["data", "validate", str(path)]) == 0
    assert main(["data", "stats", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.split("faults\n")[1])["columns"]
    assert {name: (one["kind"], one["values"]) for name, one in found.items()} == {
        "price": ("floats", 3000),
        "code": ("strings", 3000),
    }


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
