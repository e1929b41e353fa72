"""Tensor bundles: what TensorFlow wrote is read, what is damaged is refused, what we write is read back."""

from __future__ import annotations

import json
import random
import shutil
import struct
from pathlib import Path

import pytest
import torch

from monolith.checkpoint.original.bundle import _MAGIC, TensorBundle, _index_bytes, write_bundle
from monolith.errors import CorruptFileError, FileMissingError, MonolithError, RestoreError, SaveError
from monolith.native import masked_crc32c
from monolith.wire.tensor_bundle_pb2 import BundleEntry, BundleHeader, BundleShape, BundleSlice

DATA = Path(__file__).parent / "data"
PREFIXES = ("dtypes/model.ckpt-7", "partitioned/model.ckpt-2", "several_files/model.ckpt-9")


@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_number_that_tensorflow_wrote_is_read(prefix: str) -> None:
    expected = json.loads((DATA / prefix).with_name("expected.json").read_text())
    bundle = TensorBundle(str(DATA / prefix))
    assert bundle.variables.keys() == expected.keys()
    for name, wanted in expected.items():
        found = bundle.variables[name]
        assert (found.dtype_name, list(found.shape)) == (wanted["dtype"], wanted["shape"])
        if wanted["dtype"] == "string":
            with pytest.raises(RestoreError, match="is a string tensor, and only numbers are read"):
                bundle.read(name)
            continue
        value = bundle.read(name).double().flatten()
        assert float(value.sum()) == pytest.approx(wanted["sum"], rel=1e-12)
        assert [*value[:1].tolist(), *value[-1:].tolist()] == wanted["ends"]


def test_a_partitioned_variable_is_put_together_along_any_axis() -> None:
    bundle = TensorBundle(str(DATA / "partitioned/model.ckpt-2"))
    assert {name: one.slices for name, one in bundle.variables.items() if one.slices} == {
        name + slot: parts
        for name, parts in (("dense/kernel", 3), ("wide", 2))
        for slot in ("", "/Adam", "/Adam_1")
    }
    wide = bundle.read("wide")  # each column was 1/8, 2/8, ...; two steps of Adam took 0.02 off
    assert torch.allclose(wide[:, 0], torch.arange(1, 71) / 8 - 0.02, atol=1e-4)
    assert torch.equal(wide[:, 0], wide[:, 1])


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    tensors = {
        "tower/kernel": torch.rand(3, 2).t(),  # not contiguous
        "tower/bias": torch.rand(2, dtype=torch.float64),
        "half": torch.rand(3).half(),
        "bfloat": torch.rand(3).bfloat16(),
        "flag": torch.tensor([True, False]),
        "global_step": torch.tensor(1 << 40),
        "empty": torch.empty(0, 3),
        **{f"many/{number:03d}": torch.tensor([float(number)]) for number in range(50)},
    }
    prefix = f"{tmp_path}/model.ckpt-1"
    write_bundle(prefix, tensors)
    bundle = TensorBundle(prefix)
    assert bundle.variables.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(bundle.read(name), tensor)
    with pytest.raises(SaveError, match="no such kind"):
        write_bundle(prefix, {"a": torch.zeros(1, dtype=torch.float8_e4m3fn)})


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    shutil.copytree(DATA / "partitioned", tmp_path / "copied")
    return tmp_path / "copied" / "model.ckpt-2"


def all_read(prefix: Path) -> None:
    bundle = TensorBundle(str(prefix))
    for name in bundle.variables:
        bundle.read(name)


def test_a_changed_byte_is_noticed_wherever_it_is(copied: Path) -> None:
    for suffix in (".index", ".data-00000-of-00001"):
        path = copied.with_name(copied.name + suffix)
        data = bytearray(path.read_bytes())
        covered = len(data) - 48 if suffix == ".index" else len(data)  # the footer is padded
        for position in range(0, covered, 7):
            data[position] ^= 1 << position % 8
            path.write_bytes(data)
            with pytest.raises(CorruptFileError, match="corrupt at byte") as caught:
                all_read(copied)
            assert path.name in str(caught.value)
            data[position] ^= 1 << position % 8
        path.write_bytes(data)


def test_a_file_that_was_cut_short_is_refused(copied: Path) -> None:
    for suffix in (".index", ".data-00000-of-00001"):
        path = copied.with_name(copied.name + suffix)
        data = path.read_bytes()
        for length in range(0, len(data), 11):
            path.write_bytes(data[:length])
            with pytest.raises(CorruptFileError):
                all_read(copied)
        path.write_bytes(data)
    all_read(copied)


def test_noise_in_place_of_an_index_is_refused(tmp_path: Path) -> None:
    random_bytes = random.Random(5)
    for _ in range(300):
        noise = random_bytes.randbytes(random_bytes.randrange(48, 200)) + struct.pack("<Q", _MAGIC)
        (tmp_path / "x.index").write_bytes(noise)
        with pytest.raises(MonolithError):
            all_read(tmp_path / "x")


def test_a_missing_file_is_named(copied: Path) -> None:
    copied.with_name("model.ckpt-2.data-00000-of-00001").unlink()
    with pytest.raises(FileMissingError, match=r"data-00000-of-00001, which is missing. Copy all data files"):
        all_read(copied)
    with pytest.raises(FileMissingError):
        TensorBundle(str(copied.with_name("none")))


# An index that is sound and lies


def lying(tmp_path: Path, entries: dict[bytes, bytes], **header: int) -> TensorBundle:
    said = BundleHeader(**{"num_shards": 1, **header}).SerializeToString()
    (tmp_path / "x.index").write_bytes(_index_bytes({b"": said, **entries}))
    (tmp_path / "x.data-00000-of-00001").write_bytes(bytes(16))
    return TensorBundle(str(tmp_path / "x"))


def entry(*shape: int, **fields: int) -> BundleEntry:
    dims = [BundleShape.Dim(size=size) for size in shape]
    crc = masked_crc32c(bytes(fields.get("size", 0) if fields.get("size", 0) < 100 else 0))
    return BundleEntry(**{"dtype": 1, "shape": BundleShape(dim=dims), "crc32c": crc, **fields})


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (entry(2, size=16), "takes 8 bytes, 16 are recorded"),
        (entry(1 << 40, 1 << 22, size=1 << 62), "takes 18446744073709551616 bytes"),
        (entry(1 << 50, size=1 << 52), "beyond its end"),
        (entry(4, size=16, offset=8), "beyond its end"),
        (entry(4, size=16, offset=-8), "beyond its end"),
        (entry(4, size=16, shard_id=1), "data file 1 of 1"),
        (entry(-1, size=16), "has no shape"),
        (entry(4, size=16, crc32c=5), "do not match their checksum"),
    ],
)
def test_an_entry_that_cannot_be_is_refused_before_memory_is_taken(
    tmp_path: Path, made: BundleEntry, reason: str
) -> None:
    with pytest.raises(CorruptFileError, match=reason):
        lying(tmp_path, {b"a": made.SerializeToString()}).read("a")


def test_a_header_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptFileError, match="big-endian"):
        lying(tmp_path, {}, endianness=1)
    with pytest.raises(CorruptFileError, match="claims 1000000 data files"):
        lying(tmp_path, {}, num_shards=1_000_000)
    with pytest.raises(CorruptFileError, match="is no name"):
        lying(tmp_path, {b"\xff\xfe": b""})
    with pytest.raises(CorruptFileError, match="is no BundleEntry"):
        lying(tmp_path, {b"a": b"\xff\xff"})


def test_slices_must_make_up_the_whole(tmp_path: Path) -> None:
    extent = BundleSlice.Extent
    whole = entry(4)
    whole.slices.append(BundleSlice(extent=[extent(start=0, length=2)]))
    with pytest.raises(CorruptFileError, match="a slice of 'a' has no entry"):
        lying(tmp_path, {b"a": whole.SerializeToString()}).read("a")
    key = b"\x00a\x00\x01\x01\x01\x80\x82"  # 0, "a", one axis, from 0, 2 long
    part = entry(2, size=8).SerializeToString()
    with pytest.raises(CorruptFileError, match="do not make up its shape"):
        lying(tmp_path, {b"a": whole.SerializeToString(), key: part}).read("a")
    whole.slices.append(BundleSlice(extent=[extent(start=0, length=2)]))
    with pytest.raises(CorruptFileError, match="overlap and leave a gap"):
        lying(tmp_path, {b"a": whole.SerializeToString(), key: part}).read("a")
    whole.slices[1].extent[0].start = 3
    with pytest.raises(CorruptFileError, match="outside of 'a'"):
        lying(tmp_path, {b"a": whole.SerializeToString(), key: part}).read("a")
