from __future__ import annotations

import json
import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from monolith import filesystem, native
from monolith.errors import CorruptFileError, FileMissingError, FilesystemError, RestoreError, SaveError
from monolith.tensors.files import (
    CHECKSUMS,
    SHARED,
    FileRecord,
    TensorInfo,
    read_header,
    read_tensors,
    record_of,
    write_tensors,
)

SMALL = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.tensor([True, False, True])}


@pytest.fixture
def path(tmp_path: Path) -> str:
    return f"{tmp_path}/x.safetensors"


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name].view(-1), tensor.contiguous().view(-1)), name


# There and back


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)])
def test_every_dtype_and_shape_comes_back(path: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensors = {"x": (torch.rand(shape) * 100).to(dtype), "y": torch.ones(shape).to(dtype)}
    write_tensors(path, tensors, {})
    assert_same(read_tensors(path), tensors)


@pytest.mark.parametrize("dtype", [torch.uint64, torch.uint32, torch.uint16, torch.float8_e4m3fn])
def test_bits_of_rare_dtypes_come_back(path: str, dtype: torch.dtype) -> None:
    bits = torch.arange(16, dtype=torch.uint8)
    write_tensors(path, {"x": bits.view(dtype)}, {})
    found = read_tensors(path)["x"]
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), bits)


def test_nan_infinity_and_minus_zero_keep_their_bits(path: str) -> None:
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    write_tensors(path, {"x": odd}, {})
    assert read_tensors(path)["x"].view(torch.int32).tolist() == odd.view(torch.int32).tolist()


def test_large_int64_are_exact(path: str) -> None:
    write_tensors(path, {"x": torch.tensor([2**63 - 1, -(2**63)])}, {})
    assert read_tensors(path)["x"].tolist() == [2**63 - 1, -(2**63)]


def test_tensors_that_are_not_contiguous_come_back(path: str) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "transposed": whole.T,
        "strided": whole[::2, 1::2],
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 3),
        "conjugate": torch.complex(torch.ones(2), torch.ones(2)).conj(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    write_tensors(path, tensors, {})
    assert_same(read_tensors(path), {name: t.detach().resolve_conj() for name, t in tensors.items()})


def test_what_is_one_tensor_is_written_once_and_read_as_one(path: str) -> None:
    tied = torch.rand(1000)
    record = write_tensors(path, {"in": tied, "out": tied, "view": tied[:10], "row": tied.view(1, 1000)}, {})
    assert record.bytes < 2 * 4000 + 1000
    found = read_tensors(path)
    assert found["in"] is found["out"]
    assert_same(found, {"in": tied, "out": tied, "view": tied[:10], "row": tied.view(1, 1000)})
    assert read_header(path).shared == {"out": "in"}
    assert read_tensors(path, only="out".__eq__).keys() == {"out"}


def test_tensors_without_elements_are_not_one(path: str) -> None:
    write_tensors(path, {"a": torch.empty(0), "b": torch.empty(0)}, {})
    assert read_header(path).shared == {}


def test_no_tensors_at_all(path: str) -> None:
    write_tensors(path, {}, {"k": "v"})
    assert read_tensors(path) == {}
    assert read_header(path).metadata == {"k": "v"}


def test_the_header_says_what_there_is_without_reading_it(path: str) -> None:
    write_tensors(path, SMALL, {"note": 'with "quotes", ü and\nlines'})
    header = read_header(path)
    assert header.tensors == {
        "a.weight": TensorInfo("F32", (2, 3)),
        "a.bias": TensorInfo("BOOL", (3,)),
    }
    assert header.metadata == {"note": 'with "quotes", ü and\nlines'}
    assert str(header.tensors["a.weight"]) == "float32 of shape (2, 3)"
    assert header.tensors["a.weight"].dtype is torch.float32


def test_a_tensor_larger_than_a_chunk(path: str) -> None:
    big = torch.arange(3_000_000, dtype=torch.int64)
    record = write_tensors(path, {"big": big, "small": torch.ones(1)}, {})
    assert torch.equal(read_tensors(path)["big"], big)
    assert read_tensors(path, record, only="small".__eq__)["small"].tolist() == [1.0]


def test_what_is_read_is_the_readers_own(path: str) -> None:
    write_tensors(path, SMALL, {})
    read_tensors(path)["a.weight"].zero_()
    assert_same(read_tensors(path), SMALL)


def test_remote_paths_work() -> None:
    path = "memory://dense/x.safetensors"
    filesystem.make_dirs("memory://dense")
    record = write_tensors(path, SMALL, {})
    assert_same(read_tensors(path, record), SMALL)
    assert filesystem.list_files("memory://dense") == ["memory://dense/x.safetensors"]


# The record


def test_the_record_is_of_the_whole_file(path: str) -> None:
    record = write_tensors(path, SMALL, {})
    data = Path(path).read_bytes()
    assert record == FileRecord(len(data), native.crc32c(data)) == record_of(path)


def test_another_good_file_of_that_name_is_refused(path: str) -> None:
    record = write_tensors(path, SMALL, {})
    write_tensors(path, {name: torch.zeros_like(tensor) for name, tensor in SMALL.items()}, {})
    with pytest.raises(CorruptFileError, match=rf"{path}.*was recorded: it is another file"):
        read_tensors(path, record)
    write_tensors(path, {}, {})
    with pytest.raises(CorruptFileError, match=r"bytes, \d+ were recorded"):
        read_tensors(path, record)


# The format is safetensors


def test_the_safetensors_library_reads_what_we_write(path: str) -> None:
    tensors = {
        "bf16": torch.rand(3).bfloat16(),
        "bool": torch.tensor(True),
        "i64": torch.tensor([[1, 2]]),
        "none": torch.empty(0, 2),
    }
    write_tensors(path, tensors, {"a": "b"})
    found = safetensors.torch.load_file(path)
    assert found.pop(CHECKSUMS).dtype == torch.uint8
    assert_same(found, tensors)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"a": "b"}


def test_we_read_what_the_safetensors_library_writes_if_told_what_to_check_it_by(path: str) -> None:
    safetensors.torch.save_file(SMALL, path, {"a": "b"})
    for read in (read_tensors, read_header):
        with pytest.raises(RestoreError, match=rf"{path} carries no checksums.*record_of"):
            read(path)
    assert_same(read_tensors(path, record_of(path)), SMALL)


# What cannot be written


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.rand(2).to(torch.complex128), "no type for complex128"),
        (torch.eye(2).to_sparse(), "sparse_coo"),
        (torch.empty(2, device="meta"), "meta device"),
    ],
)
def test_what_safetensors_cannot_hold_is_refused_by_name(path: str, tensor: Tensor, why: str) -> None:
    with pytest.raises(SaveError, match=rf"'odd\.one'.*{why}"):
        write_tensors(path, {"odd.one": tensor}, {})
    assert not Path(path).exists()


@pytest.mark.parametrize("name", [CHECKSUMS, "__metadata__"])
def test_names_the_file_uses_itself_are_refused(path: str, name: str) -> None:
    with pytest.raises(SaveError, match="uses that name"):
        write_tensors(path, {name: torch.ones(1)}, {})


def test_metadata_is_text(path: str) -> None:
    for metadata in ({"a": 1}, {SHARED: "{}"}):
        with pytest.raises(SaveError, match="metadata must be text"):
            write_tensors(path, {}, metadata)  # type: ignore[arg-type]


# Damage


def test_every_flipped_bit_and_every_cut_is_refused_by_the_files_name(path: str) -> None:
    tied = torch.ones(2)
    record = write_tensors(path, {**SMALL, "in": tied, "out": tied}, {"k": "v"})
    data = Path(path).read_bytes()
    for position in range(len(data)):
        flipped = data[:position] + bytes([data[position] ^ (1 << position % 8)]) + data[position + 1 :]
        for broken in (flipped, data[:position]):
            Path(path).write_bytes(broken)
            with pytest.raises(CorruptFileError) as caught:
                read_tensors(path, record)
            assert caught.value.path == path
            assert 0 <= caught.value.offset <= len(data)
            with pytest.raises((CorruptFileError, RestoreError), match=path):
                read_tensors(path)
    Path(path).write_bytes(data + b"\0")
    with pytest.raises(CorruptFileError):
        read_tensors(path)


def test_a_damaged_tensor_is_named_and_the_others_can_be_read(path: str) -> None:
    write_tensors(path, {"good": torch.zeros(100), "hurt": torch.ones(100)}, {})
    data = bytearray(Path(path).read_bytes())
    at = data.index(torch.ones(100).numpy().tobytes())
    data[at + 77] ^= 4
    Path(path).write_bytes(data)
    with pytest.raises(CorruptFileError, match=f"corrupt at byte {at}: the tensor 'hurt'"):
        read_tensors(path)
    assert read_tensors(path, only="good".__eq__)["good"].tolist() == [0.0] * 100
    assert read_header(path).tensors.keys() == {"good", "hurt"}


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b"\xff\xfe",
        b'{"x": 1}',
        b'{"x": {"dtype": "F32", "shape": [1]}}',
        b'{"x": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [99999999999], "data_offsets": [0, 399999999996]}}',
        b'{"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}, '
        b'"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}, '
        b'"y": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}}',
        b'{"__metadata__": {"a": 1}, "x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}',
        b'{"__metadata__": null, "x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}',
        b'{"__metadata__": {"monolith.shared": "{\\"y\\": \\"z\\"}"}, '
        b'"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}',
        b'{"monolith.crc32c": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}',
        b"[" * 100_000,
    ],
)
def test_a_header_that_makes_no_sense_is_refused(path: str, header: bytes) -> None:
    data = struct.pack("<Q", len(header)) + header + bytes(4)
    Path(path).write_bytes(data)
    with pytest.raises(CorruptFileError, match=path):
        read_tensors(path, FileRecord(len(data), native.crc32c(data)))


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 8, b"\x89PNG\r\n\x1a\n" + bytes(100), bytes(64)])
def test_a_file_of_another_kind_is_refused(path: str, content: bytes) -> None:
    Path(path).write_bytes(content)
    with pytest.raises(CorruptFileError, match=path):
        read_tensors(path)


def test_a_missing_file_is_said(path: str) -> None:
    with pytest.raises(FileMissingError, match=path):
        read_tensors(path)


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_full_disk_leaves_the_old_file(path: str) -> None:
    record = write_tensors(path, SMALL, {})
    with pytest.raises(FilesystemError, match=rf"cannot write {path}"), file_size_limit(4096):
        write_tensors(path, {"x": torch.zeros(10_000)}, {})
    assert [p.name for p in Path(path).parent.iterdir()] == ["x.safetensors"]
    assert_same(read_tensors(path, record), SMALL)


def test_memory_is_not_doubled(path: str) -> None:
    """Written from the tensor's own memory, read into it: nothing of its size is made in between."""
    import tracemalloc

    big = torch.zeros(16 << 20, dtype=torch.uint8)
    tracemalloc.start()
    try:
        record = write_tensors(path, {"big": big}, {})
        read_tensors(path, record)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_the_checksums_are_where_the_format_says(path: str) -> None:
    write_tensors(path, SMALL, {})
    data = Path(path).read_bytes()
    head_bytes = 8 + struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8:head_bytes])
    begin, end = header[CHECKSUMS]["data_offsets"]
    assert head_bytes + end == len(data)
    sums = np.frombuffer(data[head_bytes + begin :], "<u4").tolist()
    pieces = [data[:head_bytes], SMALL["a.weight"].numpy().tobytes(), SMALL["a.bias"].numpy().tobytes()]
    assert sums[:3] == [native.crc32c(piece) for piece in pieces]
    assert sums[3] == native.crc32c(data[head_bytes + begin : -4])
