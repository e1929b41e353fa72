"""Feature ids: slots and signatures in 64 bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monolith.errors import FeatureError
from monolith.feature import (
    check_fid_v2,
    convert_v1_to_v2,
    describe,
    hash_floats,
    hash_integers,
    hash_strings,
    make_fid,
    signature_of,
    slot_of,
    switch_slot,
)


@given(slot=st.integers(0, 1023), signature=st.integers(0, (1 << 64) - 1), version=st.sampled_from([1, 2]))
def test_a_fid_gives_back_its_slot_and_the_bits_of_the_signature_that_fit(
    slot: int, signature: int, version: int
) -> None:
    fid = make_fid(slot, signature, version)
    assert -(1 << 63) <= fid < 1 << 63
    assert slot_of(fid, version) == slot
    assert signature_of(fid, version) == signature & (1 << {1: 54, 2: 48}[version]) - 1


@given(slot=st.integers(0, 1023), signature=st.integers(-(1 << 63), (1 << 63) - 1))
def test_tensors_are_treated_like_numbers(slot: int, signature: int) -> None:
    for version in (1, 2):
        fids = make_fid(slot, torch.tensor([signature]), version)
        assert fids.tolist() == [make_fid(slot, signature, version)]
        assert slot_of(fids, version).tolist() == [slot]
        assert convert_v1_to_v2(fids).tolist() == [convert_v1_to_v2(fids.item())]
        assert switch_slot(fids, 7, version).tolist() == [switch_slot(fids.item(), 7, version)]


def test_version_1_fids_of_high_slots_are_negative_and_unsigned_ones_are_taken_too() -> None:
    assert make_fid(512, 0, 1) == -(1 << 63)
    assert slot_of(1 << 63, 1) == slot_of(-(1 << 63), 1) == 512


def test_converting_keeps_the_slot_and_loses_six_bits() -> None:
    v1 = make_fid(1023, (0b101 << 48) | 9, version=1)
    assert (slot_of(convert_v1_to_v2(v1)), signature_of(convert_v1_to_v2(v1))) == (1023, 9)


@pytest.mark.parametrize(("slot", "version"), [(1024, 1), (32768, 2), (-1, 1), (-1, 2)])
def test_a_slot_out_of_range_is_refused(slot: int, version: int) -> None:
    with pytest.raises(FeatureError, match=f"slot should be less than .*, while got {slot}"):
        make_fid(slot, 1, version)


def test_there_are_two_versions() -> None:
    with pytest.raises(FeatureError, match="version 1 or 2"):
        make_fid(1, 1, version=3)


def test_a_raw_fid_of_version_2_has_a_zero_in_front() -> None:
    assert check_fid_v2(make_fid(32767, 5)) == make_fid(32767, 5)
    for wrong in (-1, 1 << 63):
        with pytest.raises(FeatureError, match="highest bit"):
            check_fid_v2(wrong)


def test_a_fid_can_be_read_by_people() -> None:
    assert describe(make_fid(1, 100)) == "281474976710756(v2|slot=1|sig=100)"
    assert describe(make_fid(1023, 0, 1), 1) == "18428729675200069632(v1|slot=1023|sig=0)"


# Hashing


def test_strings_have_the_same_fids_in_every_process_on_every_machine() -> None:
    fids = hash_strings(["", "a", "cat", "eight by", "eight by8", "grüße"], slot=3)
    assert fids.tolist() == [HASHED[text] for text in ("", "a", "cat", "eight by", "eight by8", "grüße")]


HASHED = {
    "": 844424930131968,
    "a": 890104222996866,
    "cat": 1124471852454107,
    "eight by": 929371762779662,
    "eight by8": 946470741720434,
    "grüße": 1072473165421790,
}


def test_text_and_bytes_are_one() -> None:
    assert torch.equal(hash_strings(["grüße"], 1), hash_strings(["grüße".encode()], 1))


def test_zeros_at_the_end_count() -> None:
    assert len(set(hash_strings([b"", b"\0", b"\0\0", b"\0" * 8, b"\0" * 9], 0).tolist())) == 5


@given(st.lists(st.text(), unique=True, max_size=50))
def test_hashed_strings_keep_to_their_slot_and_do_not_meet(texts: list[str]) -> None:
    fids = hash_strings(texts, slot=9)
    assert slot_of(fids).tolist() == [9] * len(texts)
    assert len(set(fids.tolist())) == len(texts)


def test_no_strings_no_fids() -> None:
    assert hash_strings([], 1).shape == (0,)


def test_equal_numbers_have_equal_fids() -> None:
    nan, other_nan = float("nan"), -float("nan")
    fids = hash_floats(torch.tensor([[0.0, -0.0], [nan, other_nan], [1.5, 1.25]]), slot=2)
    assert fids.shape == (3, 2)
    assert fids[0, 0] == fids[0, 1]
    assert fids[1, 0] == fids[1, 1]
    assert fids[2, 0] != fids[2, 1]
    assert slot_of(fids).unique().tolist() == [2]


def test_integers_of_any_size_fit_when_hashed() -> None:
    wide = torch.tensor([1 << 60, (1 << 60) + 1, -1])
    assert len(hash_integers(wide, 4).unique()) == 3
    assert slot_of(hash_integers(wide, 4)).tolist() == [4, 4, 4]


def test_hashing_knows_both_versions() -> None:
    assert slot_of(hash_strings(["a"], 600, version=1), 1).tolist() == [600]
    with pytest.raises(FeatureError):
        hash_strings(["a"], 1024, version=1)
