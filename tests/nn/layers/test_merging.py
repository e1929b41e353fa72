from __future__ import annotations

import pytest
import torch
from torch import Tensor

from monolith.errors import LayerArgumentError
from monolith.nn.layers import merge_tensor_list

A, B = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])


def merged(*arguments: object, **options: object) -> Tensor:
    result = merge_tensor_list(*arguments, **options)  # type: ignore[arg-type]
    assert isinstance(result, Tensor)
    return result


def test_a_list_is_stacked_or_concatenated() -> None:
    assert merged([A, B], "stack").tolist() == [[[1.0, 2.0], [3.0, 4.0]]]
    assert merged([A, B], "concat").tolist() == [[1.0, 2.0, 3.0, 4.0]]
    assert merged([A, B], "concat", axis=0).tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_features_of_different_widths_only_concatenate() -> None:
    assert merged([A, torch.ones(1, 3)]).shape == (1, 5)
    with pytest.raises(LayerArgumentError, match="do not stack"):
        merge_tensor_list([A, torch.ones(1, 3)], "stack")


def test_stacked_features_count_one_by_one() -> None:
    stacked = torch.stack([A, B], 1)
    assert merged(stacked, "stack") is stacked
    assert torch.equal(merged(stacked, "concat"), merged([A, B], "concat"))
    unstacked = merge_tensor_list(stacked, None)
    assert [tensor.tolist() for tensor in unstacked] == [A.tolist(), B.tolist()]


def test_none_keeps_the_list_and_keep_list_makes_one() -> None:
    assert merge_tensor_list([A, B], None) == [A, B]
    kept = merge_tensor_list([A, B], "stack", keep_list=True)
    assert isinstance(kept, list)
    assert [tensor.shape for tensor in kept] == [(1, 2, 2)]


def test_what_cannot_be_merged_is_refused() -> None:
    with pytest.raises(LayerArgumentError, match="merge_type"):
        merge_tensor_list([A], "sum")
    with pytest.raises(LayerArgumentError, match="empty"):
        merge_tensor_list([])
    with pytest.raises(LayerArgumentError, match="batch, n, dim"):
        merge_tensor_list(A)
