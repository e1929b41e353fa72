from __future__ import annotations

import struct
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from data.formats.messages import Row, rows_of, to_records, without_empty

from monolith import native
from monolith.data import Chunk
from monolith.data.formats import FramedFormat, Framing, PayloadWriter
from monolith.errors import ConfigError, CorruptFileError, DataError

ROWS: list[Row] = [
    {"user": [1], "label": [1.0]},
    {"label": [0.0], "line_id.uid": [9]},
    {"user": [2, 3], "text": [b"two"]},
]
FRAMINGS = [
    Framing(lagrangex=True),
    *(
        Framing(kafka_dump_prefix=prefix, sort_id=sort_id, kafka_dump=dump)
        for prefix, sort_id, dump in product([False, True], repeat=3)
    ),
]


def number(value: int) -> bytes:
    return struct.pack("<Q", value)


def write(path: Path, rows: list[Row], kind: str = "example", **options: object) -> None:
    with FramedFormat(kind, **options).writer(str(path)) as writer:  # type: ignore[arg-type]
        writer.write(to_records(rows))


def read(path: Path, kind: str = "example", **options: object) -> list[Chunk]:
    return list(FramedFormat(kind, **options).chunks(str(path)))  # type: ignore[arg-type]


def all_rows(chunks: list[Chunk]) -> list[Row]:
    return [row for chunk in chunks for row in rows_of(chunk.records)]


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("kind", ["example", "instance", "example_batch", "tf_example"])
def test_what_is_written_is_read(framing: Framing, kind: str, tmp_path: Path) -> None:
    write(tmp_path / "file", ROWS, kind, framing=framing)
    source = {"data_source_key": [0]} if framing.lagrangex else {}
    assert all_rows(read(tmp_path / "file", kind, framing=framing)) == [
        without_empty(row) | source for row in ROWS
    ]


def test_a_frame_is_a_header_a_length_and_the_payload(tmp_path: Path) -> None:
    (payload,) = PayloadWriter("example")(to_records(ROWS[:1]))
    framing = Framing(kafka_dump_prefix=True, sort_id=True, kafka_dump=True)
    (tmp_path / "file").write_bytes(
        number(0) + number(5) + number(3) + b"abc" + number(0) + number(len(payload)) + payload
        + number(4) + b"abcd" + number(0) + number(len(payload)) + payload
    )  # fmt: skip
    assert all_rows(read(tmp_path / "file", framing=framing)) == [ROWS[0]] * 2


def test_the_tag_of_a_frame_names_the_source(tmp_path: Path) -> None:
    rows: list[Row] = [
        {"user": [1], "data_source_key": [0xABCDEF00]},
        {"user": [2], "data_source_key": [256]},
    ]
    framing = Framing(lagrangex=True, payload_kind=3)
    write(tmp_path / "file", rows, framing=framing)
    data = (tmp_path / "file").read_bytes()
    assert struct.unpack_from("<Q", data) == (0xABCDEF03,)
    assert all_rows(read(tmp_path / "file", framing=framing)) == rows
    # It counts, and not what the payload says; a bad record takes its tag with it.
    (payload,) = PayloadWriter("example")(to_records(rows[1:]))
    stream = b"".join(
        number(tag) + number(len(one)) + one
        for tag, one in ((0x500, payload), (0x600, b"\xff"), (0x700, payload))
    )
    (tmp_path / "file").write_bytes(stream)
    (chunk,) = read(tmp_path / "file", framing=framing)
    assert [row["data_source_key"] for row in rows_of(chunk.records)] == [[0x500], [0x700]]
    assert [bad.place for bad in chunk.bad] == [16 + len(payload)]
    chunks = FramedFormat(framing=framing).chunks(str(tmp_path / "file"), columns=["user"])
    assert [set(chunk.records.columns) for chunk in chunks] == [{"user"}]


def test_a_source_that_would_hide_the_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="low byte"):
        write(tmp_path / "file", [{"data_source_key": [3]}], framing=Framing(lagrangex=True))


@pytest.mark.parametrize("framing", FRAMINGS)
def test_every_truncation_is_refused_unless_it_is_between_records(framing: Framing, tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, ROWS, framing=framing)
    whole = path.read_bytes()
    header = native.FrameHeader(
        tag=framing.lagrangex,
        kafka_dump_prefix=framing.kafka_dump_prefix,
        sort_id=framing.sort_id,
        kafka_dump=framing.kafka_dump,
    )
    starts = set(native.split_frames(whole, header).starts.tolist())
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        if size in starts:
            assert len(all_rows(read(path, framing=framing))) < len(ROWS)
        else:
            with pytest.raises(CorruptFileError, match="truncated record") as caught:
                read(path, framing=framing)
            assert caught.value.offset in starts


def test_no_flipped_bit_does_worse_than_a_bad_record_or_another_value(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, ROWS, framing=Framing(sort_id=True))
    whole = path.read_bytes()
    refused = 0
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            chunks = read(path, framing=Framing(sort_id=True))
        except CorruptFileError:
            refused += 1
        else:
            assert len(all_rows(chunks)) <= len(ROWS)
    assert 0 < refused < 8 * len(whole)  # lengths are noticed, values have no checksum here


@pytest.mark.parametrize("length", [0xFEFEFEFE, 1 << 63, (1 << 64) - 1])
def test_a_length_that_none_can_have_is_refused_at_once(length: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(number(0) + number(length) + b"x" * 100)
    with pytest.raises(CorruptFileError, match="length") as caught:
        read(tmp_path / "file")
    assert caught.value.offset == 8


@pytest.mark.parametrize("name", ["file.gz", "file.zlib"])
def test_files_may_be_compressed(name: str, tmp_path: Path) -> None:
    write(tmp_path / name, ROWS)
    assert (tmp_path / name).read_bytes()[:1] in {b"\x1f", b"\x78"}
    chunks = read(tmp_path / name)
    assert all_rows(chunks) == [without_empty(row) for row in ROWS]
    rest = FramedFormat().chunks(str(tmp_path / name), start=chunks[-1].next)
    assert list(rest) == []


def test_framings_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="no other header"):
        Framing(lagrangex=True, sort_id=True)
    with pytest.raises(ConfigError, match="payload_kind"):
        Framing(payload_kind=256)


def test_tags_and_frames_must_be_of_one_number() -> None:
    with pytest.raises(ValueError, match="one tag each"):
        native.seal_frames(b"", np.array([0, 0]), native.FrameHeader(tag=True), np.empty(0, dtype=np.int64))
