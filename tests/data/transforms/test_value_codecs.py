"""Lists of numbers as strings of bytes."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from data.transforms.record_lists import records_of
from hypothesis import given, settings
from hypothesis import strategies as st

from monolith.data.transforms import DecodeValues, EncodeValues, decode_values, encode_values
from monolith.errors import DataError
from monolith.tensors import RaggedTensor


def column(*rows):
    return RaggedTensor.from_list([list(row) for row in rows], dtype=torch.float32, ragged_rank=1)


def strings(encoded):
    return [[bytes(text) for text in row] for row in encoded.to_list()]


def test_half_precision():
    assert strings(encode_values(column([1.0, -2.0], [], [0.5]), "f16")) == [
        [struct.pack("<2e", 1.0, -2.0)],
        [],
        [struct.pack("<e", 0.5)],
    ]


def test_bf16_cuts_the_lower_bits_off():
    encoded = encode_values(column([1.0 + 2**-7 + 2**-8]), "bf16")
    assert decode_values(encoded, "bf16").to_list() == [[1.0 + 2**-7]]


def test_up_to_four_numbers_are_halves_in_qtz8mm():
    assert strings(encode_values(column([1.0, 2.0, 3.0, 4.0]), "qtz8mm")) == [
        [struct.pack("<4e", 1, 2, 3, 4)]
    ]


def test_more_are_places_between_the_smallest_and_the_largest():
    encoded = encode_values(column([0.0, 255.0, 1.0, 127.4, 127.6]), "qtz8mm")
    assert strings(encoded) == [[struct.pack("<2e", 0, 255) + bytes([0, 255, 1, 127, 128])]]
    assert decode_values(encoded, "qtz8mm").to_list() == [[0.0, 255.0, 1.0, 127.0, 128.0]]


def test_equal_numbers_have_no_distance_to_divide():
    encoded = encode_values(column([3.0] * 6), "qtz8mm")
    assert decode_values(encoded, "qtz8mm").to_list() == [[3.0] * 6]


def test_what_half_precision_cannot_hold_is_refused():
    with pytest.raises(DataError, match=r"cannot encode 70000\.0 in half precision"):
        encode_values(column([1.0, 70000.0]), "f16")


def test_a_string_of_no_list_is_refused():
    odd = records_of([{"a": [b"abc"]}])["a"]
    with pytest.raises(DataError, match="odd"):
        decode_values(odd, "qtz8mm")
    with pytest.raises(DataError, match="more than one string"):
        decode_values(records_of([{"a": [b"ab", b"cd"]}])["a"], "f16")


rows = st.lists(st.lists(st.floats(-1000, 1000, width=16), max_size=9), max_size=6)


@settings(deadline=None)
@given(rows, st.sampled_from(["f16", "bf16", "qtz8mm"]))
def test_numbers_come_back_about_as_they_were(rows, codec):
    back = decode_values(encode_values(column(*rows), codec), codec).to_list()
    assert [len(row) for row in back] == [len(row) for row in rows]
    for mine, theirs in zip(rows, back, strict=True):
        if codec == "f16" or (codec == "qtz8mm" and len(mine) <= 4):
            assert theirs == mine
        elif codec == "bf16":
            assert theirs == pytest.approx(mine, rel=2**-7)
        else:
            assert np.abs(np.subtract(mine, theirs)).max() <= (max(mine) - min(mine)) / 255 * 0.51 + 1e-4


def test_columns_are_encoded_and_decoded_in_records():
    records = records_of([{"x": [1.0, 2.0]}, {}])
    there = EncodeValues(column="x", codec="f16", into="packed")(records, first=0)
    back = DecodeValues(column="packed", codec="f16", into="y")(there, first=0)
    assert back["y"].to_list() == [[1.0, 2.0], []]
