from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from contracts.tables import ids, table_classes
from hypothesis import given
from hypothesis import strategies as st

from monolith.errors import CorruptFileError, FilesystemError, RestoreError
from monolith.table import NoFilter, ProbabilisticFilter, Segment, SlidingFilter, SlotThresholds, TableConfig
from monolith.table.filter_files import SplitMeta, decode_data, decode_meta, encode_data, encode_meta
from monolith.table.sharded_files import records, tfrecord


def sliding(capacity: int = 300, split_num: int = 7, threshold: int = 2) -> SlidingFilter:
    return SlidingFilter(capacity, split_num, SlotThresholds(threshold))


def cells(admission: SlidingFilter) -> list[list[int]]:
    return [admission.core.read_cells(split).tolist() for split in range(admission.split_num)]


@pytest.fixture
def base(tmp_path: Path) -> str:
    return f"{tmp_path}/hash_filter_0"


@pytest.fixture
def saved(base: str) -> SlidingFilter:
    """A filter whose head has moved on, and its files at `base`."""
    admission = sliding()
    admission.refuse(torch.arange(100) << 17)
    admission.save(base)
    return admission


def test_a_filter_comes_back_as_it_was(base: str, saved: SlidingFilter) -> None:
    other = sliding()
    other.add(ids(1 << 60))
    other.restore(base)
    assert cells(other) == cells(saved)
    assert len(other) == len(saved)
    for name in ("head", "head_increment", "failure_count"):
        assert getattr(other.core.meta(), name) == getattr(saved.core.meta(), name)
    assert saved.core.meta().head > 0
    keys = torch.arange(200) << 17
    assert torch.equal(other.refuse(keys), saved.refuse(keys))


def test_there_is_one_file_per_split(base: str) -> None:
    sliding().save(base)
    assert len(list(Path(base).parent.iterdir())) == 7
    sliding(split_num=2).save(base)
    assert len(list(Path(base).parent.iterdir())) == 5
    sliding(split_num=5).restore(base)


def test_a_large_filter_takes_several_records(base: str) -> None:
    admission = sliding(200_000, 5)
    admission.refuse(torch.arange(45_000) << 17)
    admission.save(base)
    with Path(f"{base}-00000-of-00005").open("rb") as file:
        assert len(list(records(file, ""))) == 1 + 6, "the 64 cells behind the last are empty"
    other = sliding(200_000, 5)
    other.restore(base)
    assert cells(other) == cells(admission)


def test_empty_cells_take_no_space(base: str) -> None:
    sliding(1_000_000).save(base)
    assert sum(path.stat().st_size for path in Path(base).parent.iterdir()) < 1000


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"capacity": 600}, "total_size 60, this one has 120"),
        ({"split_num": 8}, "split_num 7, this one has 8"),
    ],
)
@pytest.mark.usefixtures("saved")
def test_a_filter_unlike_the_saved_one_refuses(base: str, settings: dict[str, int], reason: str) -> None:
    other = sliding(**settings)
    other.add(ids(7))
    with pytest.raises(RestoreError, match=reason):
        other.restore(base)
    assert len(other) == 1


@pytest.mark.usefixtures("saved")
def test_a_missing_split_is_named(base: str) -> None:
    Path(f"{base}-00003-of-00007").unlink()
    with pytest.raises(RestoreError, match="missing: 3"):
        sliding().restore(base)


def test_no_files_at_all_is_said(base: str) -> None:
    with pytest.raises(RestoreError, match="no files"):
        sliding().restore(base)


def test_files_of_two_moments_do_not_mix(base: str, saved: SlidingFilter, tmp_path: Path) -> None:
    saved.refuse(torch.arange(500, 700) << 17)
    saved.save(f"{tmp_path}/later")
    Path(f"{tmp_path}/later-00002-of-00007").rename(f"{base}-00002-of-00007")
    with pytest.raises(RestoreError, match="another moment"):
        sliding().restore(base)


@pytest.mark.usefixtures("saved")
def test_no_single_byte_can_change_unnoticed(base: str) -> None:
    path = Path(f"{base}-00000-of-00007")
    data = bytearray(path.read_bytes())
    other = sliding()
    other.add(ids(7))
    for position in range(len(data)):
        data[position] ^= 1 << position % 8
        path.write_bytes(data)
        with pytest.raises(CorruptFileError, match="00000-of-00007: corrupt at byte"):
            other.restore(base)
        data[position] ^= 1 << position % 8
    assert len(other) == 1, "nothing was touched"


@pytest.mark.usefixtures("saved")
def test_no_part_of_a_file_passes_for_the_whole(base: str) -> None:
    path = Path(f"{base}-00000-of-00007")
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CorruptFileError):
            sliding().restore(base)


@pytest.mark.usefixtures("saved")
def test_cells_out_of_place_are_refused(base: str) -> None:
    path = Path(f"{base}-00000-of-00007")
    with path.open("rb") as file:
        (_, meta), *_ = records(file, "")
    one = np.ones(1, np.uint16)
    for offsets in ((5, 4), (5, 5), (10**6,)):
        path.write_bytes(tfrecord(meta) + b"".join(tfrecord(encode_data(o, one)) for o in offsets))
        with pytest.raises(RestoreError, match="come after"):
            sliding().restore(base)


@pytest.mark.usefixtures("saved")
def test_a_write_that_fails_leaves_the_old_files(base: str) -> None:
    before = {path: path.read_bytes() for path in Path(base).parent.iterdir()}
    big = sliding(100_000)
    big.refuse(torch.arange(10_000) << 17)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with pytest.raises(FilesystemError, match="0-00000-of-00007"):
            big.save(base)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert {path: path.read_bytes() for path in Path(base).parent.iterdir()} == before


def test_a_filter_without_memory_writes_nothing(base: str) -> None:
    NoFilter().save(base)
    NoFilter().restore(base)
    assert list(Path(base).parent.iterdir()) == []


def test_a_probabilistic_filter_resumes_with_the_same_probabilities(base: str) -> None:
    ids = torch.arange(100)
    admission = ProbabilisticFilter(SlotThresholds(3), seed=5)
    admission.refuse(ids)
    kept = admission.copy()
    admission.save(base)
    following = admission.refuse(ids).tolist()
    other = ProbabilisticFilter(SlotThresholds(3), seed=5)
    other.restore(base)
    assert other.refuse(ids).tolist() == following
    assert kept.refuse(ids).tolist() == following
    Path(base + ".draws").write_bytes(b"many")
    with pytest.raises(CorruptFileError, match="one number"):
        other.restore(base)


def test_a_filter_that_saved_nothing_starts_from_the_beginning(base: str) -> None:
    ids = torch.arange(100)
    restored = ProbabilisticFilter(SlotThresholds(3))
    restored.restore(base)
    assert torch.equal(restored.refuse(ids), ProbabilisticFilter(SlotThresholds(3)).refuse(ids))


def test_a_copy_of_a_filter_does_not_count_on(base: str) -> None:
    admission = SlidingFilter(1000, 7, SlotThresholds(5))
    admission.refuse(torch.tensor([1, 1, 2]))
    copy = admission.copy()
    admission.refuse(torch.tensor([1, 3]))
    assert copy.get(torch.tensor([1, 2, 3])).tolist() == [2, 1, 0]
    copy.save(base)
    other = SlidingFilter(1000, 7, SlotThresholds(5))
    other.restore(base)
    assert other.get(torch.tensor([1, 2, 3])).tolist() == [2, 1, 0]


@pytest.mark.parametrize("cls", table_classes())
def test_counting_resumes_where_it_was_saved(base: str, cls: type) -> None:
    """Threshold 2, saved with count 1: one more update is ignored, the next one works."""
    config = TableConfig(name="item", segments=(Segment(dim=1, learning_rate=1.0),))
    first, second = sliding(), sliding()
    table = cls(config, admission=first)
    table.apply_gradients(ids(5), torch.tensor([[-1.0]]))
    first.save(base)
    second.restore(base)
    table = cls(config, admission=second)
    values = []
    for _ in range(2):
        table.apply_gradients(ids(5), torch.tensor([[-1.0]]))
        values.append(table.lookup(ids(5)).item())
    assert values == [0.0, 1.0]


# Messages

META = SplitMeta(
    split={"failure_count": 2**63, "total_size": 300, "num_elements": 0},
    fill_rate=1.2,
    sliding={
        "split_num": 7,
        "max_forward_step": 2,
        "max_backward_step": 5,
        "max_step": 16,
        "head": 0,
        "head_increment": 2**32 - 1,
        "failure_count": 0,
    },
)


def test_a_meta_message_is_what_protobuf_writes() -> None:
    assert encode_meta(META).hex() == (
        "0880808080808080808001"  # failure_count
        "10ac02"  # total_size
        "1800"  # num_elements
        "21333333333333f33f"  # fill_rate
        "2a12"
        "080710021805201028"  # split_num to max_step
        "0030ffffffff0f3800"  # head, head_increment, failure_count
    )
    assert decode_meta(encode_meta(META)) == META


def test_absent_numbers_are_zero_and_unknown_fields_are_skipped() -> None:
    bare = bytes.fromhex("21000000000000f03f" + "2a00" + "f2012a0300")[:-5]
    assert decode_meta(bare).split == {"failure_count": 0, "total_size": 0, "num_elements": 0}
    assert decode_meta(bare + bytes.fromhex("320161" + "3d00000000" + "4001")).fill_rate == 1.0


@pytest.mark.parametrize(
    "message",
    ["", "08", "0880", "21", "2a05", "0b", "00", "2a00", "0880808080808080808080" + "01", "2200" + "2a00"],
)
def test_what_is_no_meta_message_is_refused(message: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        decode_meta(bytes.fromhex(message))


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 2**16 - 1), max_size=50))
def test_cells_come_back(offset: int, numbers: list[int]) -> None:
    found = decode_data(encode_data(offset, np.array(numbers, np.uint16)))
    assert (found[0], found[1].tolist()) == (offset, numbers)


def test_a_data_message_is_what_protobuf_writes() -> None:
    assert encode_data(300, np.array([0, 127, 128, 65535], np.uint16)).hex() == "08ac02" + "1000" + "107f" + (
        "108001" + "10ffff03"
    )


def test_packed_cells_and_unknown_fields_are_read_too() -> None:
    message = bytes.fromhex("0805" + "12038001" + "07" + "1009" + "1d000000ff" + "3001")
    offset, found = decode_data(message)
    assert (offset, found.tolist()) == (5, [128, 7, 9])


@pytest.mark.parametrize(
    "message", ["10", "1080", "10808004", "08" + "8080808010", "1203" + "80", "12018010"]
)
def test_what_is_no_data_message_is_refused(message: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        decode_data(bytes.fromhex(message))


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused(message: bytes) -> None:
    for decode in (decode_meta, decode_data):
        refusal = None
        try:
            decode(message)
        except ValueError as error:
            refusal = str(error)
        assert refusal != ""  # read, or refused with a reason; any other error fails
