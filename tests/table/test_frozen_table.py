from __future__ import annotations

import errno
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from services import warm

from monolith import native
from monolith.errors import (
    CorruptFileError,
    FileMissingError,
    FilesystemError,
    TableArgumentError,
    TableClosedError,
)
from monolith.filesystem.backends import LocalBackend
from monolith.table import FrozenSegment, FrozenTable, FrozenTables, write_frozen_table
from monolith.table.frozen_table import Coding

INT64 = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
Chunk = tuple[NDArray[np.int64], NDArray[np.float32]]


def chunk(rows: dict[int, list[float]]) -> Chunk:
    values = np.array(list(rows.values()), np.float32)
    return np.array(list(rows), np.int64), values.reshape(len(rows), -1)


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = f"{tmp_path}/item.rows"
    write_frozen_table(
        path, [FrozenSegment(2)], [chunk({7: [1, 2]}), chunk({-8: [3, 4], 0: [5, 6]})], rows=3, name="item"
    )
    return path


def test_an_id_reads_its_row_and_an_unknown_one_zeros(path: str) -> None:
    table = FrozenTable(path)
    assert table.lookup(ids(0, 9, 7, -8, 7)).tolist() == [[5, 6], [0, 0], [1, 2], [3, 4], [1, 2]]
    assert table.lookup(ids()).shape == (0, 2)
    assert (table.rows, len(table), table.dim, table.name) == (3, 3, 2, "item")


def test_what_is_written_is_said(tmp_path: Path) -> None:
    segments = [FrozenSegment(1), FrozenSegment(2, "fp16"), FrozenSegment(2, "int8")]
    info = write_frozen_table(
        f"{tmp_path}/b", segments, [chunk({7: [0.1, 1.0, 2.0, 127.0, 0.25]})], rows=10, name="b"
    )
    table = FrozenTable(info.path, verify=True)
    assert (info.rows, info.dim, info.segments) == (1, 5, tuple(segments))
    assert (table.rows, table.dim, table.segments) == (1, 5, tuple(segments))
    assert info.bytes == table.bytes == Path(info.path).stat().st_size
    assert info.crc == native.crc32c(Path(info.path).read_bytes())
    assert (info.largest_error, info.mean_error) == (0.25, 0.05)
    assert (table.largest_error, table.mean_error) == (0.25, 0.05)


def test_int4_has_fifteen_steps_and_two_values_in_a_byte(tmp_path: Path) -> None:
    values = [-7.0, 7.0, 3.4, -0.6, 0.0]
    segments = [FrozenSegment(5, "int4"), FrozenSegment(1)]
    info = write_frozen_table(f"{tmp_path}/a", segments, [chunk({7: [*values, 0.5]})], rows=1)
    table = FrozenTable(info.path, verify=True)
    assert table.segments == tuple(segments)
    assert table.lookup(ids(7)).tolist() == [[-7.0, 7.0, 3.0, -1.0, 0.0, 0.5]]
    assert info.largest_error == pytest.approx(0.4)


# Rows of which memory has a part


@pytest.fixture
def large(tmp_path: Path) -> str:
    path = f"{tmp_path}/large.rows"
    count = np.arange(20_000)
    segments = [FrozenSegment(1), FrozenSegment(30, "fp16")]
    rows = np.repeat(count[:, None] % 1000, 31, axis=1).astype(np.float32)
    write_frozen_table(path, segments, [(count * 7, rows)], rows=len(count), name="large")
    return path


def bounded(path: str, row_bytes: int) -> FrozenTables:
    index = FrozenTable(path).core.index_bytes
    return FrozenTables({"large": FrozenTable(path)}, memory_bytes=index + row_bytes)


def looked_up(tables: FrozenTables, keys: torch.Tensor) -> torch.Tensor:
    return tables.lookup(keys, torch.tensor([len(keys)]))


def test_a_table_in_little_memory_reads_the_same_rows(large: str) -> None:
    tables, whole = bounded(large, 100_000), FrozenTables({"large": FrozenTable(large)})
    for seed in range(5):
        keys = torch.randint(0, 150_000, (3000,), generator=torch.Generator().manual_seed(seed))
        assert looked_up(tables, keys).equal(looked_up(whole, keys))
    every = torch.arange(20_000) * 7
    assert looked_up(tables, every).equal(looked_up(whole, every))
    assert whole.reads is None
    reads = tables.reads
    assert reads is not None
    assert reads.found > reads.in_memory > 0
    assert 0 < reads.reads <= reads.found - reads.in_memory
    assert reads.memory_bytes <= FrozenTable(large).core.index_bytes + 100_000
    assert tables.present_ids("large", 0, 2**64 - 1).sort().values.equal(every)


def test_rows_that_are_asked_for_again_are_in_memory_even_after_a_scan(large: str) -> None:
    tables = bounded(large, 400_000)  # for a quarter of the rows
    hot = torch.arange(0, 2000) * 7

    def disk_reads(keys: torch.Tensor) -> int:
        before = tables.reads
        looked_up(tables, keys)
        after = tables.reads
        assert before is not None
        assert after is not None
        return after.found - after.in_memory - (before.found - before.in_memory)

    assert disk_reads(hot) == 2000
    for _ in range(3):
        disk_reads(hot)
    assert disk_reads(hot) < 50  # a few share their places with too many others
    disk_reads(torch.arange(2000, 12_000) * 7)  # twice what memory has room for
    assert disk_reads(hot) < 1000


def test_small_tables_are_in_memory_before_large_ones(path: str, large: str) -> None:
    small, big = FrozenTable(path), FrozenTable(large)
    tables = FrozenTables({"small": small, "big": big}, memory_bytes=big.core.index_bytes + 50_000)
    assert small.reads is None
    assert big.reads is not None
    tables.prefault()
    whole = FrozenTables({"a": FrozenTable(path), "b": FrozenTable(large)}, memory_bytes=1 << 30)
    assert whole.reads is None


def test_memory_for_less_than_the_index_is_refused(large: str) -> None:
    with pytest.raises(TableArgumentError, match=r"memory of 1,000 bytes is too little .* 20,000 rows"):
        FrozenTables({"large": FrozenTable(large)}, memory_bytes=1000)


def test_threads_share_a_table_in_little_memory(large: str) -> None:
    tables, whole = bounded(large, 50_000), FrozenTables({"large": FrozenTable(large)})
    wrong: list[int] = []

    def ask(seed: int) -> None:
        for n in range(20):
            keys = torch.randint(0, 140_000, (500,), generator=torch.Generator().manual_seed(seed * 100 + n))
            if not looked_up(tables, keys).equal(looked_up(whole, keys)):
                wrong.append(seed)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_file_that_was_cut_since_it_was_opened_is_named(large: str) -> None:
    tables = bounded(large, 20_000)
    with Path(large).open("r+b") as file:
        file.truncate(8192)
    with pytest.raises(CorruptFileError, match=r"large.rows.*ends too early"):
        looked_up(tables, torch.arange(20_000) * 7)


def test_a_table_may_be_empty(tmp_path: Path) -> None:
    write_frozen_table(f"{tmp_path}/a", [FrozenSegment(3)], [], rows=0)
    assert FrozenTable(f"{tmp_path}/a", verify=True).lookup(ids(0, 1)).tolist() == [[0] * 3] * 2


@given(
    codings=st.lists(st.tuples(st.integers(1, 3), st.sampled_from(get_args(Coding))), min_size=1, max_size=4),
    numbers=st.lists(INT64, unique=True, max_size=60),
    asked=st.lists(INT64, max_size=20),
    chunks=st.integers(1, 30),
    data=st.data(),
)
def test_it_answers_as_a_dict_does_within_the_error_it_says(
    codings: list[tuple[int, Coding]], numbers: list[int], asked: list[int], chunks: int, data: st.DataObject
) -> None:
    segments = [FrozenSegment(dim, coding) for dim, coding in codings]
    dim = sum(segment.dim for segment in segments)
    row = st.lists(FLOATS, min_size=dim, max_size=dim)
    rows = {number: data.draw(row) for number in numbers}
    cut = [dict(list(rows.items())[at : at + chunks]) for at in range(0, len(rows), chunks)]
    with TemporaryDirectory() as folder:
        info = write_frozen_table(f"{folder}/a", segments, map(chunk, cut), rows=len(rows))
        table = FrozenTable(info.path, verify=True)
        both = [*numbers, *asked]
        found = table.lookup(ids(*both)).numpy().astype(np.float64)
    wanted = np.array([rows.get(number, [0.0] * dim) for number in both], np.float64).reshape(-1, dim)
    error = np.abs(found - wanted)
    assert np.isfinite(found).all()
    assert error.max(initial=0) <= info.largest_error
    exact = np.repeat([s.coding == "fp32" for s in segments], [s.dim for s in segments])
    assert (error[:, exact] == 0).all()
    assert (error[[number not in rows for number in both]] == 0).all()


def test_int8_keeps_every_value_within_half_a_step(tmp_path: Path) -> None:
    values = torch.randn(1000, 16) * torch.logspace(-3, 3, 1000)[:, None]
    info = write_frozen_table(
        f"{tmp_path}/a", [FrozenSegment(16, "int8")], [(np.arange(1000), values.numpy())], rows=1000
    )
    found = FrozenTable(info.path).lookup(torch.arange(1000))
    step = values.abs().amax(1, keepdim=True) / 127
    assert ((found - values).abs() <= step * 0.5001).all()
    assert info.largest_error == pytest.approx(float((found - values).abs().max()))
    assert info.mean_error == pytest.approx(float((found - values).abs().mean()), rel=1e-4)


# What is refused while writing


@pytest.mark.parametrize(
    ("chunks", "why"),
    [
        ([chunk({1: [1.0]}), chunk({1: [2.0]})], "id 1 came twice"),
        ([chunk({1: [float("nan")]})], "row of id 1 is nan"),
        ([chunk({1: [float("inf")]})], "row of id 1 is inf"),
        ([chunk({number: [1.0] for number in range(5)})], "more rows came than the 4"),
        ([chunk({1: [1.0, 2.0]})], r"values of shape \(n, 1\)"),
        ([(np.arange(1), np.zeros((1, 1)))], "float64"),
    ],
)
def test_rows_that_do_not_fit_are_refused_and_leave_nothing(
    tmp_path: Path, chunks: list[Chunk], why: str
) -> None:
    with pytest.raises(TableArgumentError, match=why):
        write_frozen_table(f"{tmp_path}/a", [FrozenSegment(1)], chunks, rows=4)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("segment", [lambda: FrozenSegment(0), lambda: FrozenSegment(1, "fp8")])  # type: ignore[arg-type]
def test_segments_that_cannot_be_are_refused(segment: object) -> None:
    with pytest.raises(TableArgumentError, match="a segment"):
        segment()  # type: ignore[operator]


def test_a_full_disk_is_said_and_leaves_what_was_there(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Path(path).read_bytes()
    create = LocalBackend.create

    def full(self: LocalBackend, name: str, **how: bool) -> BinaryIO:
        file = create(self, name, **how)
        written = 0

        class Full:
            def write(self, data: bytes) -> int:
                nonlocal written
                written += len(data)
                if written > 100:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return file.write(data)

            def close(self) -> None:
                file.close()

        return Full()  # type: ignore[return-value]

    monkeypatch.setattr(LocalBackend, "create", full)
    with pytest.raises(FilesystemError, match="disk is full"):
        write_frozen_table(path, [FrozenSegment(2)], [chunk({n: [1, 2] for n in range(100)})], rows=100)
    assert Path(path).read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["item.rows"]


# Damaged files


def test_there_is_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(FileMissingError, match="nowhere"):
        FrozenTable(f"{tmp_path}/nowhere")


def test_rows_are_mapped_from_local_disks_only() -> None:
    with pytest.raises(FilesystemError, match="Copy it"):
        FrozenTable("s3://bucket/item.rows")


@pytest.mark.parametrize("content", [b"", b"MONO", b"MONOROWS" + bytes(120), bytes(4096)])
def test_a_foreign_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"/a: corrupt at byte 0: this is no table"):
        FrozenTable(f"{tmp_path}/a")


def test_a_file_of_a_later_format_is_refused(path: str) -> None:
    content = bytearray(Path(path).read_bytes())
    struct.pack_into("<I", content, 8, 2)
    Path(path).write_bytes(content)
    with pytest.raises(CorruptFileError, match="it is of format 2, this version reads format 1"):
        FrozenTable(path)


@pytest.mark.parametrize("less", [1, 64, 128, 256])
def test_a_file_that_was_cut_is_refused(path: str, less: int) -> None:
    Path(path).write_bytes(Path(path).read_bytes()[:-less])
    with pytest.raises(CorruptFileError, match=r"item.rows: corrupt .* the file was cut"):
        FrozenTable(path)


@given(data=st.data())
def test_whatever_bytes_differ_it_is_an_answer_or_an_error_of_ours(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "a")
        write_frozen_table(str(path), [FrozenSegment(2)], [chunk({7: [1, 2], 8: [3, 4]})], rows=2)
        content = bytearray(path.read_bytes())
        for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4, unique=True)):
            content[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        with pytest.raises(CorruptFileError, match="/a: corrupt at byte"):
            FrozenTable(str(path), verify=True)
        try:
            assert FrozenTable(str(path)).lookup(ids(7, 8, 9)).shape == (3, 2)
        except CorruptFileError as error:
            assert error.path == str(path)  # noqa: PT017


def test_a_row_number_that_makes_no_sense_is_an_error_where_it_is_met(path: str) -> None:
    content = bytearray(Path(path).read_bytes())
    (index_at,) = struct.unpack_from("<Q", content, len(content) - 128 + 32)
    struct.pack_into("<5I", content, index_at + 40, *[3] * 5)
    Path(path).write_bytes(content)
    table = FrozenTable(path)
    assert table.lookup(ids(1)).tolist() == [[0, 0]]
    with pytest.raises(CorruptFileError, match=f"corrupt at byte {index_at}: the index names row 3 of 3"):
        table.lookup(ids(7))
    with pytest.raises(CorruptFileError, match="row 3 of 3"):
        FrozenTables({"item": table}).lookup(ids(1, 7), ids(2))
    with pytest.raises(CorruptFileError, match="do not match their checksum"):
        table.verify()


# Many tables, threads and processes


@pytest.fixture
def tables(path: str, tmp_path: Path) -> Iterator[FrozenTables]:
    write_frozen_table(f"{tmp_path}/b", [FrozenSegment(1, "fp16")], [chunk({7: [8], 8: [9]})], rows=2)
    made = FrozenTables({"user": FrozenTable(f"{tmp_path}/b"), "item": FrozenTable(path)})
    yield made
    made.close()


def test_one_call_reads_all_tables_in_the_order_of_their_names(tables: FrozenTables) -> None:
    assert list(tables.tables.items()) == [("item", 2), ("user", 1)]
    assert tables.lookup(ids(7, 9, 7), ids(1, 2)).tolist() == [1, 2, 0, 8]
    assert tables.lookup(ids(7, 8, 0), ids(1, 1, 1, 0)).tolist() == [1, 2, 9, 5, 6]
    assert tables.lookup(ids(), ids(0, 0)).tolist() == []
    assert tables.rows == 5


@pytest.mark.parametrize("sizes", [ids(1, 1), ids(3), ids(4, -1), ids()])
def test_sizes_that_do_not_fit_are_refused(tables: FrozenTables, sizes: torch.Tensor) -> None:
    with pytest.raises(TableArgumentError, match="sizes"):
        tables.lookup(ids(7, 9, 7), sizes)


def test_many_threads_and_large_calls_read_what_was_written(tmp_path: Path) -> None:
    count = 20_000
    numbers = torch.randperm(count) * 7919 - 10**9
    values = torch.rand(count, 17)
    write_frozen_table(f"{tmp_path}/a", [FrozenSegment(17)], [(numbers.numpy(), values.numpy())], rows=count)
    tables = FrozenTables({"a": FrozenTable(f"{tmp_path}/a")}, threads=3)
    wrong: list[int] = []

    def read(seed: int) -> None:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        got = tables.lookup(numbers[order], ids(count)).view(count, 17)
        if not torch.equal(got, values[order]):
            wrong.append(seed)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_after_closing_there_is_an_error_and_others_read_on(path: str) -> None:
    table = FrozenTable(path)
    tables = FrozenTables({"item": table})
    table.close()
    table.close()
    with pytest.raises(TableClosedError, match=r"item\.rows"):
        table.lookup(ids(7))
    assert tables.lookup(ids(7), ids(1)).tolist() == [1, 2]
    tables.close()
    with pytest.raises(TableClosedError, match="closed"):
        tables.lookup(ids(7), ids(1))


def test_a_file_that_is_replaced_or_deleted_stays_open_for_its_readers(path: str) -> None:
    old = FrozenTable(path)
    write_frozen_table(path, [FrozenSegment(2)], [chunk({7: [9, 9]})], rows=1)
    assert (old.lookup(ids(7)).tolist(), FrozenTable(path).lookup(ids(7)).tolist()) == ([[1, 2]], [[9, 9]])
    Path(path).unlink()
    assert old.lookup(ids(-8)).tolist() == [[3, 4]]


def test_prefault_and_verify_say_how_far_they_are(path: str) -> None:
    class Seen:
        total = 0.0

        def advance(self, amount: float = 1) -> None:
            self.total += amount

    table, read, checked = FrozenTable(path), Seen(), Seen()
    table.prefault(read, threads=2)
    table.verify(checked)
    assert read.total == table.bytes
    assert 0 < checked.total <= table.bytes


READER = """
import sys, torch
from monolith.table import FrozenTable
table = FrozenTable(sys.argv[1], verify=True)
print("open", flush=True)
sys.stdin.readline()
print(table.lookup(torch.tensor([7, -8, 0, 1])).tolist())
"""


def test_several_processes_map_the_same_file_and_share_its_memory(path: str) -> None:
    readers = [warm.Popen(["-c", READER, path], stdin=warm.PIPE, stdout=warm.PIPE) for _ in range(2)]
    maps = []
    for reader in readers:
        assert reader.stdout.readline() == "open\n"
        lines = Path(f"/proc/{reader.pid}/maps").read_text().splitlines()
        maps.append([line.split()[1] for line in lines if line.endswith("item.rows")])
    for reader in readers:
        said, _ = reader.communicate("go\n", timeout=60)
        assert said == "[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [0.0, 0.0]]\n"
    assert maps == [["r--s"], ["r--s"]]
