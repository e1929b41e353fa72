from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from monolith.errors import TensorArgumentError
from monolith_compat import (
    fused_gather_embeddings_by_input,
    fused_gather_embeddings_by_input_gradient,
    gather_embeddings_by_input,
    gather_embeddings_by_input_gradient,
    map_id_to_embedding,
)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def doubles(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, dtype=torch.float64, requires_grad=True)


def test_ids_are_looked_up_in_all_lists_and_the_first_wins() -> None:
    ids = [ints(5, 1), ints(2, 5)]
    embeddings = [torch.tensor([[5.0, 5], [1, 1]]), torch.tensor([[2.0, 2], [9, 9]])]
    output = map_id_to_embedding(ids, embeddings, ints(1, 2, 5, 5).reshape(2, 2))
    assert output.tolist() == [[[1, 1], [2, 2]], [[5, 5], [5, 5]]]
    assert map_id_to_embedding(ids, embeddings, ints()).shape == (0, 2)


def test_an_unknown_id_and_lists_that_do_not_match_are_refused() -> None:
    with pytest.raises(TensorArgumentError, match="the first is 3"):
        map_id_to_embedding([ints(1, 2)], [torch.ones(2, 1)], ints(1, 3))
    with pytest.raises(TensorArgumentError, match="no embedding"):
        map_id_to_embedding([ints()], [torch.ones(0, 1)], ints(1))
    with pytest.raises(ValueError, match="1 and 0"):
        map_id_to_embedding([ints(1)], [], ints(1))
    with pytest.raises(TensorArgumentError, match="width"):
        map_id_to_embedding([ints(1), ints(2)], [torch.ones(1, 1), torch.ones(1, 2)], ints(1))
    with pytest.raises(TensorArgumentError, match="embeddings"):
        gather_embeddings_by_input(ints(1), torch.ones(2, 1), ints(1))


def test_a_gather_tells_where_it_found_each_id() -> None:
    rows = torch.tensor([[1.0], [2.0], [3.0]])
    output, positions = gather_embeddings_by_input(ints(1, -2, 3), rows, ints(-2, 1, -2)[:, None])
    assert output.tolist() == [[[2.0]], [[1.0]], [[2.0]]]
    assert positions.tolist() == [[1], [0], [1]]


def test_the_gradient_of_a_gather_sums_per_id() -> None:
    ids, inputs = ints(2, 3, 1), ints(3, 2, 3, 1).reshape(2, 2)
    rows = doubles(3, 2)
    assert gradcheck(lambda rows: gather_embeddings_by_input(ids, rows, inputs)[0], (rows,))
    assert gradcheck(lambda a, b: map_id_to_embedding([ids, ints(7)], [a, b], inputs), (rows, doubles(1, 2)))


def test_the_gradient_by_hand_is_the_gradient() -> None:
    ids, inputs, rows = ints(2, 3, 1), ints(3, 2, 3, 1).reshape(2, 2), doubles(3, 2)
    output, positions = gather_embeddings_by_input(ids, rows, inputs)
    grads = torch.rand_like(output)
    (expected,) = torch.autograd.grad(output, rows, grads)
    assert torch.allclose(gather_embeddings_by_input_gradient(ids, grads, positions), expected)
    with pytest.raises(TensorArgumentError, match="index_mapping"):
        gather_embeddings_by_input_gradient(ids, grads, positions + 1)
    with pytest.raises(TensorArgumentError, match="grads"):
        gather_embeddings_by_input_gradient(ids, grads[:1], positions)


def test_embeddings_of_several_widths_are_gathered_at_once() -> None:
    first, second = fused_gather_embeddings_by_input(torch.arange(7.0), [ints(4, 0, 4), ints(3)], [3, 1])
    assert first.tolist() == [[4, 5, 6], [0, 1, 2], [4, 5, 6]]
    assert second.tolist() == [[3]]
    assert fused_gather_embeddings_by_input(torch.ones(1), [ints()], [2])[0].shape == (0, 2)


@pytest.mark.parametrize("offset", [-1, 5])
def test_an_embedding_that_sticks_out_is_refused(offset: int) -> None:
    with pytest.raises(TensorArgumentError, match="offsets"):
        fused_gather_embeddings_by_input(torch.arange(7.0), [ints(offset)], [3])
    with pytest.raises(TensorArgumentError, match="dims"):
        fused_gather_embeddings_by_input(torch.arange(7.0), [ints(0)], [])


def test_the_gradient_of_a_fused_gather_sums_and_scales() -> None:
    fused, offsets, dims = doubles(7), [ints(4, 0, 4), ints(3)], [3, 1]
    assert gradcheck(lambda fused: fused_gather_embeddings_by_input(fused, offsets, dims), (fused,))
    outputs = fused_gather_embeddings_by_input(fused, offsets, dims)
    grads = [torch.rand_like(output) for output in outputs]
    (expected,) = torch.autograd.grad(outputs, fused, grads)
    by_hand = fused_gather_embeddings_by_input_gradient(7, grads, offsets, dims, scale=0.5)
    assert torch.allclose(by_hand, expected * 0.5)
    with pytest.raises(TensorArgumentError, match="grads"):
        fused_gather_embeddings_by_input_gradient(7, grads[::-1], offsets, dims)
