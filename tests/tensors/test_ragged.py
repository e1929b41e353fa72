from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monolith.errors import TensorArgumentError
from monolith.tensors import (
    RaggedTensor,
    fused_value_rowids,
    gen_seq_mask,
    maybe_squeeze_3d_tensor,
    normalize_merged_split,
    ranges,
)

NUMBERS = st.lists(st.lists(st.integers(-5, 5), max_size=4), max_size=5)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_rows_are_the_values_between_the_splits() -> None:
    ragged = RaggedTensor(ints(1, 2, 3), ints(0, 0, 1, 3))
    assert ragged.to_list() == [[], [1], [2, 3]]
    assert (len(ragged), ragged.nrows, ragged.ragged_rank, ragged.ndim) == (3, 3, 1, 2)
    assert (ragged.shape, ragged.dtype, ragged.device.type) == ((3, None), torch.int64, "cpu")
    assert ragged.row_lengths().tolist() == [0, 1, 2]
    assert repr(ragged) == "RaggedTensor(shape=(3, None), dtype=torch.int64, device='cpu')"


def test_rows_may_hold_rows() -> None:
    rows = [[[1], []], [], [[2, 3]]]
    ragged = RaggedTensor.from_list(rows)
    assert ragged.to_list() == rows
    assert (ragged.ragged_rank, ragged.shape) == (2, (3, None, None))
    assert ragged.flat_values.tolist() == [1, 2, 3]
    assert isinstance(ragged.values, RaggedTensor)
    assert ragged.values.to_list() == [[1], [], [2, 3]]


def test_inner_dimensions_may_be_uniform() -> None:
    ragged = RaggedTensor.from_list([[], [[1.0, 2.0]]], ragged_rank=1)
    assert (ragged.shape, ragged.dtype) == ((2, None, 2), torch.float32)


@given(NUMBERS)
def test_lists_survive_a_round_trip(rows: list[list[int]]) -> None:
    assert RaggedTensor.from_list(rows, dtype=torch.int64).to_list() == rows


@pytest.mark.parametrize("rows", [[1, 2], [[1], 2], [[1, [2]]]])
def test_numbers_must_be_at_one_depth(rows: list[Any]) -> None:
    with pytest.raises(TensorArgumentError, match="ragged rank"):
        RaggedTensor.from_list(rows)


@pytest.mark.parametrize("splits", [[1, 3], [0, 2], [0, 4], [0, 2, 1, 3]])
def test_splits_must_rise_from_zero_to_the_number_of_values(splits: list[int]) -> None:
    with pytest.raises(TensorArgumentError, match="row_splits must rise from 0 to the 3"):
        RaggedTensor(ints(1, 2, 3), ints(*splits))
    RaggedTensor(ints(1, 2, 3), ints(*splits), validate=False)


@pytest.mark.parametrize(
    ("values", "splits"),
    [
        (torch.tensor(1), ints(0, 1)),
        ([1], ints(0, 1)),
        (ints(1), torch.tensor([0, 1], dtype=torch.int32)),
        (ints(1), ints()),
        (ints(1), ints(0, 1)[None]),
        (ints(1), ints(0, 1).to("meta")),
    ],
)
def test_what_is_no_ragged_tensor_is_refused_even_unvalidated(values: Any, splits: Any) -> None:
    with pytest.raises(TensorArgumentError):
        RaggedTensor(values, splits, validate=False)


def test_lengths_may_be_given_in_place_of_splits() -> None:
    assert RaggedTensor.from_row_lengths(ints(1, 2, 3), ints(0, 1, 2)).to_list() == [[], [1], [2, 3]]
    with pytest.raises(TensorArgumentError):
        RaggedTensor.from_row_lengths(ints(1, 2, 3), ints(0, 1))
    with pytest.raises(TensorArgumentError, match="row_lengths"):
        RaggedTensor.from_row_lengths(ints(1), torch.ones(1))


def test_it_never_changes() -> None:
    ragged = RaggedTensor.from_list([[1]])
    for name in ("values", "_values", "anything"):
        with pytest.raises(AttributeError):
            setattr(ragged, name, 1)
    with pytest.raises(AttributeError):
        del ragged._values


def test_each_value_knows_its_row_computed_once() -> None:
    ragged = RaggedTensor.from_list([[], [1], [2, 3]])
    assert ragged.value_rowids.tolist() == [1, 2, 2]
    assert fused_value_rowids(ragged) is ragged.value_rowids
    with pytest.raises(ValueError, match=r"^rt must be RaggedTensor$"):
        fused_value_rowids(ragged.flat_values)  # type: ignore[arg-type]


@given(NUMBERS)
def test_each_value_knows_its_row(rows: list[list[int]]) -> None:
    ragged = RaggedTensor.from_list(rows, dtype=torch.int64)
    assert ragged.value_rowids.tolist() == [i for i, row in enumerate(rows) for _ in row]


def test_rows_may_be_given_other_values() -> None:
    ragged = RaggedTensor.from_list([[[1], []], [[2, 3]]])
    assert ragged.with_flat_values(ints(4, 5, 6)).to_list() == [[[4], []], [[5, 6]]]
    assert ragged.with_values(ints(7, 8, 9)).to_list() == [[7, 8], [9]]
    with pytest.raises(TensorArgumentError, match="3 values"):
        ragged.with_values(ints(1))


def test_moving_to_where_it_lives_is_no_copy() -> None:
    ragged = RaggedTensor.from_list([[1]])
    assert ragged.to("cpu") is ragged
    assert ragged.to("meta").device.type == "meta"


def test_copies_and_pickles_are_the_same_rows() -> None:
    ragged = RaggedTensor.from_list([[], [1, 2]])
    assert copy.deepcopy(ragged).to_list() == pickle.loads(pickle.dumps(ragged)).to_list() == [[], [1, 2]]


def test_padding_fills_short_rows_and_cuts_long_ones() -> None:
    ragged = RaggedTensor.from_list([[], [1], [2, 3, 4]])
    assert ragged.to_padded(2, padding=-1).tolist() == [[-1, -1], [1, -1], [2, 3]]
    assert ragged.to_padded().tolist() == [[0, 0, 0], [1, 0, 0], [2, 3, 4]]
    rows_of_vectors = RaggedTensor.from_list([[], [[1, 2]]], ragged_rank=1)
    assert rows_of_vectors.to_padded(2).tolist() == [[[0, 0], [0, 0]], [[1, 2], [0, 0]]]
    assert RaggedTensor.from_list([[], []]).to_padded(1).tolist() == [[0.0], [0.0]]
    with pytest.raises(TensorArgumentError, match="ragged rank 1"):
        RaggedTensor.from_list([[[1]]]).to_padded(1)


def test_padding_passes_gradients_of_what_it_kept() -> None:
    values = torch.arange(3.0, dtype=torch.float64, requires_grad=True)
    splits = ints(0, 0, 3)
    padded = lambda v: RaggedTensor(v, splits).to_padded(2, padding=9)  # noqa: E731
    assert torch.autograd.gradcheck(padded, (values,))


def test_torchs_jagged_tensors_are_the_same_rows() -> None:
    ragged = RaggedTensor.from_list([[1.0], [2.0, 3.0]])
    nested = ragged.to_nested()
    assert [row.tolist() for row in nested.unbind()] == [[1.0], [2.0, 3.0]]
    back = RaggedTensor.from_nested(nested)
    assert back.to_list() == ragged.to_list()
    assert back.flat_values.data_ptr() == ragged.flat_values.data_ptr()


def test_torchs_jagged_tensors_may_have_holes_but_not_another_ragged_dimension() -> None:
    holes = torch.nested.nested_tensor_from_jagged(
        torch.arange(5.0), offsets=ints(0, 3, 5), lengths=ints(1, 2)
    )
    assert RaggedTensor.from_nested(holes).to_list() == [[0.0], [3.0, 4.0]]
    wide = RaggedTensor.from_list([[[1.0, 2.0]]], ragged_rank=1).to_nested()
    with pytest.raises(TensorArgumentError, match="dimension 1"):
        RaggedTensor.from_nested(wide.transpose(1, 2))
    with pytest.raises(TensorArgumentError, match="jagged"):
        RaggedTensor.from_nested(torch.ones(2, 2))


def test_a_mask_is_one_where_a_row_has_values() -> None:
    splits = ints(0, 5, 5, 6)
    expected = [[1, 1, 1], [0, 0, 0], [1, 0, 0]]
    assert gen_seq_mask(splits, 3).tolist() == expected
    assert gen_seq_mask(RaggedTensor(torch.zeros(6), splits), 3).tolist() == expected
    assert gen_seq_mask(splits.int(), 3).dtype == torch.int32
    for bad in (torch.zeros(2), ints(), [0, 1]):
        with pytest.raises(TensorArgumentError, match="row_splits"):
            gen_seq_mask(bad, 3)  # type: ignore[arg-type]


def test_three_dimensions_become_two() -> None:
    flat = RaggedTensor.from_list([[1], [2, 3]])
    assert maybe_squeeze_3d_tensor(flat) is flat
    assert maybe_squeeze_3d_tensor(RaggedTensor.from_list([[[1]], [[2, 3]]])).to_list() == [[1], [2, 3]]
    uniform = RaggedTensor.from_list([[[1, 2]], [[3, 4]]], ragged_rank=1)
    assert maybe_squeeze_3d_tensor(uniform).to_list() == [[1, 2], [3, 4]]
    with pytest.raises(ValueError, match=r"^input must be RaggedTensor$"):
        maybe_squeeze_3d_tensor(torch.ones(2))  # type: ignore[arg-type]
    for bad in ([[[1], [2]]], [[[[1]]]]):
        with pytest.raises(TensorArgumentError):
            maybe_squeeze_3d_tensor(RaggedTensor.from_list(bad))


def test_merged_splits_become_the_splits_of_the_merged() -> None:
    assert normalize_merged_split(ints(0, 2, 5, 0, 0, 3), [3, 3]).tolist() == [0, 2, 5, 5, 8]
    assert normalize_merged_split(ints(0, 0), [1, 1]).tolist() == [0]
    assert normalize_merged_split(ints(), []).tolist() == [0]
    for sizes in ([2], [3, 0], [4, -1]):
        with pytest.raises(TensorArgumentError, match="row_split_size"):
            normalize_merged_split(ints(0, 1, 2), sizes)


@given(st.lists(NUMBERS, min_size=1, max_size=4))
def test_merging_splits_is_concatenating_rows(parts: list[list[list[int]]]) -> None:
    ragged = [RaggedTensor.from_list(part, dtype=torch.int64) for part in parts]
    merged = normalize_merged_split(
        torch.cat([part.row_splits for part in ragged]), [len(part.row_splits) for part in ragged]
    )
    values = torch.cat([part.flat_values for part in ragged])
    assert RaggedTensor(values, merged).to_list() == [row for part in parts for row in part]


def test_ranges_follow_each_other() -> None:
    assert ranges(ints(5, 0, 9), ints(2, 0, 3)).tolist() == [5, 6, 9, 10, 11]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_device_holds_the_same_rows() -> None:
    ragged = RaggedTensor.from_list([[], [1], [2, 3]])
    there = ragged.pin_memory().to("cuda", non_blocking=True)
    assert there.device.type == "cuda"
    assert there.to_list() == ragged.to_list()
    assert there.value_rowids.tolist() == [1, 2, 2]
    assert there.to_padded(2).tolist() == ragged.to_padded(2).tolist()
    assert RaggedTensor.from_nested(there.to_nested()).to_list() == ragged.to_list()
    assert gen_seq_mask(there, 2).tolist() == [[0, 0], [1, 0], [1, 1]]
    with pytest.raises(TensorArgumentError, match="rise"):
        RaggedTensor(there.values, there.row_splits + 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_unvalidated_rows_never_wait_for_the_device() -> None:
    values, splits = torch.arange(3, device="cuda"), torch.tensor([0, 0, 1, 3], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        ragged = RaggedTensor(values, splits, validate=False)
        assert ragged.value_rowids.shape == (3,)
        ragged.to_padded(2)
        gen_seq_mask(ragged, 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
