from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from monolith.errors import TensorArgumentError
from monolith.tensors import RaggedTensor
from monolith_compat import fill_with_offset_map, finalize_shared_tensor, unique_key_with_value_and_offset

KEY = [[], [0, 1, 2, 1, 0], [0, 1, 0], []]
DIMS = [1, 2, 3, 4]
POS = [[], [0, 1, 2], [3, 4], []]


def ragged(rows: Any, rank: int = 1) -> RaggedTensor:
    return RaggedTensor.from_list(rows, dtype=torch.int64, ragged_rank=rank)


def test_each_distinct_key_of_a_row_lists_its_places() -> None:
    unique_key, value_offset, size = unique_key_with_value_and_offset(ragged(KEY), DIMS)
    assert unique_key.to_list() == [[], [0, 1, 2], [0, 1], []]
    assert value_offset.to_list() == [[], [[0, 8], [2, 6], [4]], [[10, 16], [13]], []]
    assert size == 19


def test_every_row_needs_a_width() -> None:
    with pytest.raises(TensorArgumentError, match="4 numbers"):
        unique_key_with_value_and_offset(ragged(KEY), DIMS[:3])


def test_embeddings_are_copied_to_all_their_places() -> None:
    _, value_offset, size = unique_key_with_value_and_offset(ragged(KEY), DIMS)
    before = torch.zeros(size)
    buffer = fill_with_offset_map(ragged(POS), torch.arange(12.0), value_offset, before, DIMS)
    assert buffer.tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 0, 1, 6, 7, 8, 9, 10, 11, 6, 7, 8]
    assert not before.any()


def test_shards_that_answer_apart_fill_one_buffer() -> None:
    _, value_offset, size = unique_key_with_value_and_offset(ragged(KEY), DIMS)
    parts = [
        fill_with_offset_map(ragged(pos), torch.tensor(value), value_offset, torch.zeros(size), DIMS)
        for pos, value in (
            ([[], [0, 2], [4], []], [0.0, 1, 4, 5, 9, 10, 11]),
            ([[], [1], [3], []], [2.0, 3, 6, 7, 8]),
        )
    ]
    joined = finalize_shared_tensor(parts)
    assert joined.tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 0, 1, 6, 7, 8, 9, 10, 11, 6, 7, 8]
    with pytest.raises(TensorArgumentError, match="one shape"):
        finalize_shared_tensor([parts[0], torch.zeros(1)])


def test_the_gradient_sums_over_all_places() -> None:
    _, value_offset, size = unique_key_with_value_and_offset(ragged(KEY), DIMS)
    value = torch.rand(12, dtype=torch.float64, requires_grad=True)
    buffer = torch.rand(size, dtype=torch.float64, requires_grad=True)

    def filled(value: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        return finalize_shared_tensor(
            [fill_with_offset_map(ragged(POS), value, value_offset, buffer, DIMS), buffer * 2]
        )

    assert gradcheck(filled, (value, buffer))


@pytest.mark.parametrize(
    ("pos", "floats"),
    [
        (POS, 11),
        (POS, 13),
        ([[], [0, 1, 2], [3, 5], []], 12),
        ([[], [0, 1, 2], [3, -1], []], 12),
        (POS[:3], 12),
    ],
)
def test_too_few_floats_too_many_and_unknown_keys_are_refused(pos: Any, floats: int) -> None:
    _, value_offset, size = unique_key_with_value_and_offset(ragged(KEY), DIMS)
    with pytest.raises(TensorArgumentError):
        fill_with_offset_map(ragged(pos), torch.zeros(floats), value_offset, torch.zeros(size), DIMS)


def test_a_buffer_too_small_for_the_places_is_refused() -> None:
    _, value_offset, size = unique_key_with_value_and_offset(ragged(KEY), DIMS)
    with pytest.raises(TensorArgumentError, match="places"):
        fill_with_offset_map(ragged(POS), torch.zeros(12), value_offset, torch.zeros(size - 1), DIMS)


@given(st.lists(st.lists(st.integers(-2, 2), max_size=6), min_size=1, max_size=4))
def test_filling_what_was_made_unique_gives_back_every_key(rows: list[list[int]]) -> None:
    dims = [1 + i % 3 for i in range(len(rows))]
    unique_key, value_offset, size = unique_key_with_value_and_offset(ragged(rows), dims)
    entries = unique_key.with_values(torch.arange(len(unique_key.flat_values)))
    value = [
        float(k) for row, dim in zip(unique_key.to_list(), dims, strict=True) for k in row for _ in range(dim)
    ]
    buffer = fill_with_offset_map(entries, torch.tensor(value), value_offset, torch.full((size,), 9.0), dims)
    assert buffer.tolist() == [
        k for row, dim in zip(rows, dims, strict=True) for k in row for _ in range(dim)
    ]
