from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from monolith.errors import TensorArgumentError
from monolith.tensors import RaggedTensor
from monolith_compat import (
    fused_reorder_by_indices,
    ragged_split_by_indices,
    reorder_by_indices,
    shard_of_ids,
    split_by_indices,
)

INT64 = st.integers(-(2**63), 2**63 - 1)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@given(st.lists(INT64, max_size=10), st.integers(1, 2**40))
def test_the_shard_is_the_unsigned_id_modulo_the_shards(ids: list[int], n: int) -> None:
    assert shard_of_ids(ints(*ids), n).tolist() == [i % 2**64 % n for i in ids]


@given(st.lists(INT64, max_size=10), st.integers(1, 9))
def test_shard_zero_may_stay_empty_when_there_are_more_than_four(ids: list[int], n: int) -> None:
    expected = [i % 2**64 % (n - 1) + 1 if n > 4 else i % 2**64 % n for i in ids]
    assert shard_of_ids(ints(*ids), n, rank0_empty=True).tolist() == expected


def test_ids_keep_their_shape_and_must_be_int64() -> None:
    assert shard_of_ids(ints(1, 2)[None], 2).tolist() == [[1, 0]]
    with pytest.raises(TensorArgumentError, match="int64"):
        shard_of_ids(torch.ones(1), 2)
    with pytest.raises(TensorArgumentError, match="num_shards"):
        shard_of_ids(ints(1), 0)


def test_a_split_keeps_the_order_inside_each_part() -> None:
    parts = split_by_indices(ints(0, 1, 2, 2, 0), ints(0, 1, 2, 2, 3), 3)
    assert [part.tolist() for part in parts] == [[0, 3], [1], [2, 2]]
    assert [part.shape for part in split_by_indices(ints(), torch.zeros(0, 4), 2)] == [(0, 4), (0, 4)]


def test_a_splits_gradient_returns_to_where_it_came_from() -> None:
    x = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: split_by_indices(ints(0, 1, 2, 2, 0), x, 4), (x,))


@pytest.mark.parametrize("indices", [[0, 3], [-1, 0], [0]])
def test_a_split_needs_an_index_in_range_for_each_row(indices: list[int]) -> None:
    with pytest.raises(TensorArgumentError):
        split_by_indices(ints(*indices), torch.ones(2), 3)


def test_a_ragged_split_keeps_all_rows_and_tells_positions() -> None:
    ragged = RaggedTensor.from_list([[], [], [4, 3, 2], [1], []])
    parts, positions = ragged_split_by_indices(ints(0, 1, 0, 1), ragged, 3)
    assert [part.to_list() for part in parts] == [
        [[], [], [4, 2], [], []],
        [[], [], [3], [1], []],
        [[], [], [], [], []],
    ]
    assert [part.to_list() for part in positions][:2] == [[[], [], [0, 2], [], []], [[], [], [1], [3], []]]
    with pytest.raises(TensorArgumentError, match="shape"):
        ragged_split_by_indices(ints(0), ragged, 2)
    with pytest.raises(TensorArgumentError, match="RaggedTensor"):
        ragged_split_by_indices(ints(0), ints(0), 2)  # type: ignore[arg-type]


def test_reordering_drops_repeats_and_groups_by_shard() -> None:
    output, sizes = reorder_by_indices(ints(0, 1, 2, 2, 3, 5), ints(0, 1, 2, 2, 0, 2), 3)
    assert (output.tolist(), sizes.tolist()) == ([0, 3, 1, 2, 5], [2, 1, 2])
    output, sizes = reorder_by_indices(ints(), ints(), 2)
    assert (output.tolist(), sizes.tolist()) == ([], [0, 0])


def test_fused_reordering_tells_where_each_embedding_will_be() -> None:
    result = fused_reorder_by_indices([ints(0, 1, 0), ints(3, 2, 3), ints(5, 6, 7)], 2, [1, 2, 3])
    assert result.output.tolist() == [0, 2, 6, 1, 3, 5, 7]
    assert result.shard_sizes.tolist() == [3, 4]
    assert result.sharded_slot_sizes.tolist() == [1, 1, 1, 1, 1, 2]
    assert result.input_lengths.tolist() == [3, 3, 3]
    assert [offsets.tolist() for offsets in result.embedding_offsets] == [[0, 6, 0], [7, 1, 7], [9, 3, 12]]


@given(
    st.lists(
        st.lists(st.sampled_from([-(2**63), -3, -1, 0, 1, 2, 3, 10]), max_size=8), min_size=1, max_size=4
    ),
    st.integers(1, 6),
    st.booleans(),
)
def test_fused_reordering_does_what_a_loop_does(inputs: list[list[int]], n: int, rank0_empty: bool) -> None:
    dims = list(range(1, len(inputs) + 1))
    result = fused_reorder_by_indices([ints(*ids) for ids in inputs], n, dims, rank0_empty)
    shard = {i: int(shard_of_ids(ints(i), n, rank0_empty)) for ids in inputs for i in ids}
    output: list[int] = []
    sizes, offset_of, offset = [], {}, 0
    for s in range(n):
        for m, ids in enumerate(inputs):
            mine = [i for i in dict.fromkeys(ids) if shard[i] == s]
            output += mine
            sizes.append(len(mine))
            for i in mine:
                offset_of[m, i] = offset
                offset += dims[m]
    assert result.output.tolist() == output
    assert result.sharded_slot_sizes.tolist() == sizes
    assert result.shard_sizes.tolist() == [sum(sizes[s * len(dims) : (s + 1) * len(dims)]) for s in range(n)]
    assert [o.tolist() for o in result.embedding_offsets] == [
        [offset_of[m, i] for i in ids] for m, ids in enumerate(inputs)
    ]


@pytest.mark.parametrize(
    ("inputs", "dims"), [([], []), ([ints(1)], [1, 2]), ([ints(1)], [0]), ([torch.ones(1)], [1])]
)
def test_fused_reordering_refuses_what_makes_no_sense(inputs: Any, dims: Any) -> None:
    with pytest.raises(TensorArgumentError):
        fused_reorder_by_indices(inputs, 2, dims)
