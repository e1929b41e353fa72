from __future__ import annotations

import gzip
import importlib.util
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from data.formats.messages import KINDS, Row, rows_of, to_records, without_empty
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monolith import filesystem, native
from monolith.data import Chunk, concat
from monolith.data.formats import FORMATS, TfRecordFormat
from monolith.errors import ConfigError, CorruptFileError, DataError, FileMissingError

FIXTURES = Path(__file__).parents[1] / "fixtures"
TENSORFLOW = [
    {"user": [7], "tags": [1, -2, 1 << 62], "score": [0.5, -1.25], "text": [b"a", b"", b"\xff\x00b"]},
    {"user": [8], "label": [1.0]},
    {},
    {"user": [-9], "text": ["é".encode()], "score": [float("inf")], "label": [0.0]},
]
ROWS: list[Row] = [
    {"user": [1], "label": [1.0], "text": [b"one"]},
    {"user": [], "label": [0.0]},
    {"user": [2, 3], "label": [1.0], "text": [b"", b"two"]},
]
each_compression = pytest.mark.parametrize("compression", [None, "gzip", "zlib"])
same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def read(path: Path | str, **options: object) -> list[Chunk]:
    return list(TfRecordFormat(**{"chunk_bytes": 100} | options).chunks(str(path)))  # type: ignore[arg-type]


def all_rows(chunks: list[Chunk]) -> list[Row]:
    return [row for chunk in chunks for row in rows_of(chunk.records)]


def write(path: Path | str, rows: list[Row], **options: object) -> None:
    with TfRecordFormat(**options).writer(str(path)) as writer:  # type: ignore[arg-type]
        writer.write(to_records(rows))


def tfrecords(*payloads: bytes) -> bytes:
    lengths = torch.tensor([0, *map(len, payloads)]).cumsum(0).numpy()
    return native.seal_tfrecords(b"".join(payloads), lengths)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zlib"])
def test_files_of_tensorflow_are_read(suffix: str) -> None:
    chunks = read(FIXTURES / f"tensorflow.tfrecord{suffix}")
    assert all_rows(chunks) == TENSORFLOW
    assert not any(chunk.bad for chunk in chunks)


@pytest.mark.parametrize("kind", ["tf_example", "example", "instance", "example_batch"])
@each_compression
def test_what_is_written_is_read(kind: str, compression: str | None, tmp_path: Path) -> None:
    write(tmp_path / "file", ROWS, kind=kind, compression=compression)
    chunks = read(tmp_path / "file", kind=kind)
    assert rows_of(concat([chunk.records for chunk in chunks])) == [without_empty(row) for row in ROWS]


@same_folder
@given(st.lists(KINDS["example"], max_size=5))
def test_whatever_is_written_is_read(tmp_path: Path, messages: list[tuple[bytes, Row]]) -> None:
    rows = [without_empty(row) for _, row in messages]
    write(tmp_path / "file", rows, kind="example")
    chunks = read(tmp_path / "file", kind="example")
    assert all_rows(chunks) == rows


@each_compression
def test_reading_resumes_from_the_end_of_every_chunk(compression: str | None, tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    write(path, ROWS * 20, compression=compression)
    file_format = TfRecordFormat(chunk_bytes=100)
    chunks = list(file_format.chunks(path))
    assert len(chunks) > 5
    rest = [without_empty(row) for row in ROWS * 20]
    for chunk in chunks:
        rest = rest[len(chunk.records) :]
        after = [row for one in file_format.chunks(path, start=chunk.next) for row in rows_of(one.records)]
        assert after == rest


def test_a_place_beyond_the_end_is_refused(tmp_path: Path) -> None:
    for compression in (None, "gzip"):
        write(tmp_path / "file", ROWS, compression=compression)
        with pytest.raises(CorruptFileError, match="ends before the place"):
            list(TfRecordFormat().chunks(str(tmp_path / "file"), start=10_000))


def test_batches_are_chunks_of_their_own_and_keep_what_they_share(tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    file_format = TfRecordFormat("example_batch")
    with file_format.writer(path) as writer:
        for user in (1, 2):
            records = to_records([{"item": [5]}, {"item": [6]}])
            column = to_records([{"user": [user]}]).columns["user"]
            writer.write(type(records)(2, {**records.columns, "user": column}, frozenset({"user"})))
    first, second = file_format.chunks(path)
    assert first.records.shared == second.records.shared == {"user"}
    assert rows_of(second.records) == [{"item": [5], "user": [2]}, {"item": [6], "user": [2]}]
    assert [rows_of(one.records) for one in file_format.chunks(path, start=first.next)] == [
        rows_of(second.records)
    ]


def test_only_the_columns_asked_for_are_read(tmp_path: Path) -> None:
    write(tmp_path / "file", ROWS)
    chunks = TfRecordFormat().chunks(str(tmp_path / "file"), columns=["label", "nowhere"])
    assert {name for chunk in chunks for name in chunk.records.columns} == {"label"}


def test_a_bad_payload_is_reported_with_its_place_and_left_out(tmp_path: Path) -> None:
    good = b"".join([])
    (tmp_path / "file").write_bytes(tfrecords(good, b"\x0a\x05abc", good))
    (chunk,) = read(tmp_path / "file")
    assert len(chunk.records) == 2
    (bad,) = chunk.bad
    assert (bad.place, bad.payload) == (16, b"\x0a\x05abc")
    assert "byte 16" in bad.reason
    assert chunk.next == 16 * 3 + 5


def test_records_longer_than_a_chunk_are_read(tmp_path: Path) -> None:
    rows: list[Row] = [{"text": [b"x" * 1000]}, {"text": [b"y"]}]
    write(tmp_path / "file", rows)
    assert all_rows(read(tmp_path / "file")) == rows


def test_an_empty_file_holds_no_records(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert read(tmp_path / "file") == []


def test_every_truncation_is_refused_unless_it_is_between_records(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, ROWS)
    whole = path.read_bytes()
    ends = {0, *native.split_tfrecords(whole).starts.tolist(), len(whole)}
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        if size in ends:
            assert sum(len(chunk.records) for chunk in read(path)) < len(ROWS)
        else:
            with pytest.raises(CorruptFileError, match="truncated record") as caught:
                read(path)
            assert caught.value.offset in ends
            assert caught.value.path == str(path)


@pytest.mark.parametrize("name", ["file", "file.gz", "file.zlib"])
def test_every_flipped_bit_is_noticed(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    write(path, ROWS)
    whole = path.read_bytes()
    before = all_rows(read(path))
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            after = all_rows(read(path))
        except CorruptFileError:
            continue
        # Some bits of a compressed stream say nothing about the data: a time, a level, the filling of a byte.
        assert name != "file"
        assert after == before


@pytest.mark.parametrize("compression", ["gzip", "zlib"])
def test_every_truncation_of_a_compressed_file_is_refused(compression: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, ROWS, compression=compression)
    whole = path.read_bytes()
    for size in range(1, len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptFileError):
            read(path, compression=compression)


def test_what_was_good_before_the_damage_is_yielded_first(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(tfrecords(b"", b"") + b"\xff" * 20)
    chunks = TfRecordFormat().chunks(str(path))
    assert len(next(chunks).records) == 2
    with pytest.raises(CorruptFileError, match="bad length checksum") as caught:
        next(chunks)
    assert caught.value.offset == 32


def test_compressed_streams_may_follow_each_other(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"".join(gzip.compress(tfrecords(b"", b"")) for _ in range(3)))
    assert sum(len(chunk.records) for chunk in read(tmp_path / "file")) == 6


def test_auto_goes_by_the_first_bytes_and_not_by_the_name(tmp_path: Path) -> None:
    (tmp_path / "file.gz").write_bytes(tfrecords(b""))
    assert len(read(tmp_path / "file.gz")[0].records) == 1
    (tmp_path / "file").write_bytes(zlib.compress(tfrecords(b"")))
    assert len(read(tmp_path / "file")[0].records) == 1
    # A record of 0x8b1f bytes begins as gzip does, and is none.
    payload = b"\x0a\x9b\x96\x02" + b"\x00" * 0x8B1B
    (tmp_path / "file").write_bytes(tfrecords(payload[:0x8B1F]))
    assert (tmp_path / "file").read_bytes().startswith(b"\x1f\x8b")
    (chunk,) = read(tmp_path / "file")
    assert len(chunk.records) + len(chunk.bad) == 1


def test_auto_writes_what_the_name_ends_in(tmp_path: Path) -> None:
    write(tmp_path / "file.gz", ROWS)
    gzip.decompress((tmp_path / "file.gz").read_bytes())
    write(tmp_path / "file", ROWS)
    assert not native.split_tfrecords((tmp_path / "file").read_bytes()).failure


def test_a_file_that_fails_to_be_written_does_not_appear(tmp_path: Path) -> None:
    rows: list[Row] = [{"user": [1]}, {"label": [1]}]  # a label is a float
    with pytest.raises(DataError), TfRecordFormat("example").writer(str(tmp_path / "file")) as writer:
        [writer.write(to_records([row])) for row in rows]
    assert not list(tmp_path.iterdir())


def test_remote_files_are_read_and_written() -> None:
    write("memory://tfrecords/file.gz", ROWS)
    try:
        chunks = read("memory://tfrecords/file.gz")
        assert all_rows(chunks) == [without_empty(row) for row in ROWS]
    finally:
        filesystem.remove_tree("memory://tfrecords")


def test_what_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(FileMissingError):
        read(tmp_path / "file")
    with pytest.raises(ConfigError, match="there is no compression 'lzma'"):
        TfRecordFormat(compression="lzma")
    with pytest.raises(DataError, match="snappy is not read or written here"):
        list(TfRecordFormat(compression="snappy").chunks(str(FIXTURES / "tensorflow.tfrecord")))


def test_zstd_needs_its_package(tmp_path: Path) -> None:
    path = tmp_path / "file.zst"
    if importlib.util.find_spec("zstandard") is None:
        with pytest.raises(DataError, match="pip install zstandard"):
            write(path, ROWS)
    else:
        write(path, ROWS)
        assert all_rows(read(path)) == [without_empty(row) for row in ROWS]


def test_formats_are_found_by_name() -> None:
    for kind in KINDS:
        assert FORMATS[kind]().name == kind


def test_a_record_that_says_it_is_longer_than_allowed_is_refused_before_it_is_read(tmp_path):
    """A compressed file of zeros holds a thousand times its size; so does the record that begins it."""
    length = (1 << 40).to_bytes(8, "little")
    begin = length + native.masked_crc32c(length).to_bytes(4, "little")
    path = tmp_path / "bomb.tfrecord.gz"
    path.write_bytes(gzip.compress(begin) + 256 * gzip.compress(bytes(1 << 20)))
    assert path.stat().st_size < 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(
            CorruptFileError, match=r"1,099,511,627,792 bytes or more, and record_bytes allows"
        ):
            list(TfRecordFormat().chunks(str(path)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 << 20


def test_the_longest_record_is_a_setting(tmp_path):
    path = tmp_path / "some.tfrecord"
    path.write_bytes(native.seal_tfrecords(bytes(1000), np.array([0, 0, 1000])))
    with pytest.raises(
        CorruptFileError, match=r"at byte 16: .* 1,016 bytes or more, and record_bytes allows 1,000"
    ):
        list(TfRecordFormat(record_bytes=1000, chunk_bytes=100).chunks(str(path)))
    assert list(TfRecordFormat(record_bytes=1016, chunk_bytes=100).chunks(str(path)))
    with pytest.raises(ConfigError, match="record_bytes must be at least 1"):
        TfRecordFormat(record_bytes=0)
