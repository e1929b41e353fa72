"""Text that is compressed: read as it is without, from any place on, and refused where it is cut."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from monolith.data import Format, Records, concat
from monolith.data.formats import format_of
from monolith.data.formats.csv import CsvFormat
from monolith.data.formats.json_lines import JsonLinesFormat
from monolith.data.formats.memory import to_records
from monolith.errors import CorruptFileError, DataError

IDS = list(range(2000))
NAMES = [f"u{n * n % 1009}" for n in IDS]
ENDINGS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zlib": zlib.compress, "": bytes}
each_ending = pytest.mark.parametrize("ending", ENDINGS)
each_format = pytest.mark.parametrize(
    "form", [CsvFormat(chunk_bytes=1000), JsonLinesFormat(chunk_bytes=1000)], ids=["csv", "jsonl"]
)


def write(path: Path, form: Format) -> None:
    with form.writer(str(path)) as file:
        file.write(to_records({"id": IDS, "name": NAMES}))


def read(path: Path, form: Format, start: int = 0) -> Records:
    return concat([chunk.records for chunk in form.chunks(str(path), start=start)])


@each_ending
@each_format
def test_what_was_written_is_read_back_from_any_chunk_on(tmp_path: Path, form: Format, ending: str) -> None:
    path = tmp_path / f"x.{form.name}{ending}"
    write(path, form)
    chunks = list(form.chunks(str(path)))
    assert len(chunks) > 10
    whole = concat([chunk.records for chunk in chunks])
    assert whole["id"].flat_values.tolist() == IDS
    assert whole.strings("name") == [[name.encode()] for name in NAMES]
    middle = len(chunks) // 2
    rest = read(path, form, chunks[middle].next)
    assert rest["id"].to_list() == concat([chunk.records for chunk in chunks[middle + 1 :]])["id"].to_list()


@each_format
def test_files_are_what_other_programs_write_and_read(tmp_path: Path, form: Format) -> None:
    write(tmp_path / "x", form)
    write(tmp_path / "x.gz", form)
    plain = (tmp_path / "x").read_bytes()
    assert gzip.decompress((tmp_path / "x.gz").read_bytes()) == plain
    (tmp_path / "y.GZ").write_bytes(gzip.compress(plain))
    assert len(read(tmp_path / "y.GZ", form)) == len(IDS)


@each_format
def test_how_far_reading_came_is_told_in_bytes_of_the_file(tmp_path: Path, form: Format) -> None:
    path = tmp_path / "x.gz"
    write(path, form)
    reached = [chunk.reached for chunk in form.chunks(str(path))]
    assert None not in reached
    assert reached == sorted(reached)  # type: ignore[type-var]
    assert reached[-1] == path.stat().st_size


@each_format
def test_a_file_that_is_cut_is_refused_by_what_is_wrong_with_it(tmp_path: Path, form: Format) -> None:
    path = tmp_path / "x.gz"
    write(path, form)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(CorruptFileError, match="the file ends inside its gzip stream"):
        read(path, form)


def test_a_file_that_only_has_the_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv.gz").write_text("id,name\n1,u\n")
    with pytest.raises(CorruptFileError, match="this is not a gzip stream"):
        read(tmp_path / "x.csv.gz", format_of("x.csv.gz"))


def test_what_is_compressed_as_nothing_here_can_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv.snappy").write_bytes(b"x")
    with pytest.raises(DataError, match="Decompress the file"):
        read(tmp_path / "x.csv.snappy", format_of("x.csv.snappy"))
