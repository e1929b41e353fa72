from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from monolith import native
from monolith.errors import CorruptFileError, FileMissingError
from monolith.table import Adam, OneBit, Rows, Segment, TableConfig, inspect
from monolith.table.shard_files import Description, RowLayout, ShardReader, rows_per_block, write_shard

CONFIG = TableConfig(
    name="item", segments=(Segment(dim=1, optimizer=Adam()), Segment(dim=2, compressor=OneBit()))
)
DESCRIPTION = Description(
    table="item",
    layout=RowLayout.of(CONFIG),
    shard=1,
    num_shards=3,
    dump="0123456789abcdef",
    stamp="step 7",
    scales=(1.0, 0.1),
)


def some_rows(*ids: int) -> Rows:
    n = len(ids)
    state = torch.arange(n * 4, dtype=torch.float32).reshape(n, 4)
    state[:, 3] = torch.tensor(float("nan"))  # bits of a counter may look like anything
    return Rows(
        torch.tensor(ids, dtype=torch.int64),
        torch.full((n,), 2**32 - 1, dtype=torch.int64),
        torch.rand(n, 3),
        state,
    )


def bits(rows: Rows) -> list[bytes]:
    return [column.numpy().tobytes() for column in (rows.ids, rows.event_times, rows.values, rows.state)]


@pytest.fixture
def path(tmp_path: Path) -> str:
    write_shard(f"{tmp_path}/shard", DESCRIPTION, [some_rows(1, -2), some_rows(-(2**63))])
    return f"{tmp_path}/shard"


def read_all(path: str) -> list[Rows]:
    with ShardReader(path) as reader:
        return list(reader)


def test_rows_come_back_bit_by_bit_in_their_blocks(tmp_path: Path) -> None:
    blocks = [some_rows(1, 2, 3), some_rows(-(2**63), 2**63 - 1)]
    info = write_shard(f"{tmp_path}/shard", DESCRIPTION, iter(blocks))
    assert [bits(rows) for rows in read_all(info.path)] == [bits(rows) for rows in blocks]
    assert info == inspect(info.path, verify=True)
    assert info.description == DESCRIPTION
    assert (info.rows, info.blocks, info.max_event_time) == (5, 2, 2**32 - 1)
    assert info.bytes == Path(info.path).stat().st_size


@pytest.mark.parametrize("chunks", [[], [some_rows()]], ids=["no chunk", "an empty chunk"])
def test_a_shard_may_be_empty(tmp_path: Path, chunks: list[Rows]) -> None:
    info = write_shard(f"{tmp_path}/shard", DESCRIPTION, chunks)
    assert (info.rows, info.blocks) == (0, 0)
    assert read_all(info.path) == []


def test_every_part_begins_on_64_bytes(path: str) -> None:
    data = Path(path).read_bytes()
    for magic in (b"MONOROWS", b"ROWBLOCK", b"ROWS_END"):
        assert data.index(magic) % 64 == 0
    assert len(data) % 64 == 0


def test_columns_are_laid_out_as_the_format_says(path: str) -> None:
    data = Path(path).read_bytes()
    payload = data.index(b"ROWBLOCK") + 64
    assert np.frombuffer(data, "<i8", 2, payload).tolist() == [1, -2]
    assert np.frombuffer(data, "<u4", 2, payload + 64).tolist() == [2**32 - 1] * 2


def test_no_single_byte_can_change_unnoticed(path: str) -> None:
    data = bytearray(Path(path).read_bytes())
    for position in range(len(data)):
        data[position] ^= 1 << position % 8
        Path(path).write_bytes(data)
        with pytest.raises(CorruptFileError, match="shard: corrupt at byte") as caught:
            inspect(path, verify=True)
        assert 0 <= caught.value.offset <= len(data)
        data[position] ^= 1 << position % 8


def test_no_part_of_a_file_passes_for_the_whole(path: str) -> None:
    data = Path(path).read_bytes()
    for length in range(len(data)):
        Path(path).write_bytes(data[:length])
        with pytest.raises(CorruptFileError):
            inspect(path)


@pytest.mark.parametrize("extra", [b"\0", bytes(64), b"ROWBLOCK".ljust(64)])
def test_nothing_may_follow_the_end(path: str, extra: bytes) -> None:
    Path(path).write_bytes(Path(path).read_bytes() + extra)
    with pytest.raises(CorruptFileError):
        inspect(path)


def test_blocks_of_two_files_do_not_mix(path: str, tmp_path: Path) -> None:
    other = write_shard(f"{tmp_path}/other", DESCRIPTION, [some_rows(5, 6), some_rows(7)]).path
    ours, theirs = Path(path).read_bytes(), Path(other).read_bytes()
    block = ours.index(b"ROWBLOCK")
    Path(path).write_bytes(ours[:block] + theirs[block : block + 320] + ours[block + 320 :])
    with pytest.raises(CorruptFileError, match="not the one in the index") as caught:
        inspect(path, verify=True)
    assert caught.value.offset == block


def test_a_header_of_another_file_is_refused(path: str, tmp_path: Path) -> None:
    other = write_shard(f"{tmp_path}/other", replace(DESCRIPTION, stamp="step 8"), [some_rows(1)]).path
    ours, theirs = Path(path).read_bytes(), Path(other).read_bytes()
    block = ours.index(b"ROWBLOCK")
    assert theirs.index(b"ROWBLOCK") == block
    Path(path).write_bytes(theirs[:block] + ours[block:])
    with pytest.raises(CorruptFileError, match="description"):
        inspect(path)


def test_a_length_is_not_believed_for_its_checksum(path: str) -> None:
    """A trailer that promises 2^60 blocks, with a good checksum, asks for no memory."""
    data = bytearray(Path(path).read_bytes())
    data[-48:-40] = (1 << 60).to_bytes(8, "little")
    data[-4:] = native.crc32c(data[-64:-4]).to_bytes(4, "little")
    Path(path).write_bytes(data)
    with pytest.raises(CorruptFileError, match="does not end at the trailer"):
        inspect(path)


def test_a_later_version_is_named(path: str) -> None:
    data = bytearray(Path(path).read_bytes())
    data[8] = 2
    data[28:32] = native.crc32c(data[:28]).to_bytes(4, "little")
    Path(path).write_bytes(data)
    with pytest.raises(CorruptFileError, match="format version 2, this program reads 1"):
        inspect(path)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no shard" * 100)
    with pytest.raises(CorruptFileError):
        inspect(f"{tmp_path}/text")
    with pytest.raises(FileMissingError):
        inspect(f"{tmp_path}/absent")


def test_a_failure_while_writing_leaves_what_was_there(path: str) -> None:
    def failing() -> object:
        yield some_rows(9)
        raise ZeroDivisionError

    before = Path(path).read_bytes()
    with pytest.raises(ZeroDivisionError):
        write_shard(path, DESCRIPTION, failing())  # type: ignore[arg-type]
    assert Path(path).read_bytes() == before
    assert [p.name for p in Path(path).parent.iterdir()] == ["shard"]


def test_blocks_are_of_a_few_megabytes() -> None:
    wide = RowLayout.of(TableConfig(name="wide", segments=(Segment(dim=10**7),)))
    assert rows_per_block(wide) == 1
    assert 1 < rows_per_block(DESCRIPTION.layout) <= 1 << 16
