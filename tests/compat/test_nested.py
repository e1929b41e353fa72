from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from monolith.errors import TensorArgumentError
from monolith.tensors import RaggedTensor, map_leaves
from monolith_compat import NestedTensors


def zeroed(nested: Any) -> Any:
    flat = NestedTensors(nested)
    return flat.get_nested_result([torch.zeros_like(tensor) for tensor in flat.get_tensors()])


def test_tensors_are_replaced_in_their_places() -> None:
    t = torch.ones(())
    assert zeroed({"a": t, "b": (t, torch.ones(()))}) == {"a": 0, "b": (0, 0)}


def test_a_tensor_that_appears_twice_is_carried_once() -> None:
    t = torch.ones(2)
    flat = NestedTensors({"a": t, "b": [t, torch.zeros(1)]})
    assert len(flat.get_tensors()) == 2
    result = flat.get_nested_result(flat.get_tensors())
    assert result["a"] is result["b"][0] is t


def test_constants_stay_and_are_not_carried() -> None:
    weight = nn.Parameter(torch.ones(1))
    nested = {"flag": True, "n": 3, "rate": 0.5, "name": "x", "raw": b"x", "none": None, "weight": weight}
    flat = NestedTensors(nested)
    assert flat.get_tensors() == []
    assert flat.get_nested_result([]) == nested


def test_ragged_tensors_come_last_as_values_and_splits() -> None:
    ragged, dense = RaggedTensor.from_list([[], [1], [2, 3]]), torch.ones(1)
    flat = NestedTensors([ragged, dense])
    assert [tensor.tolist() for tensor in flat.get_tensors()] == [[1.0], [1, 2, 3], [0, 0, 1, 3]]
    back, _ = flat.get_nested_result(flat.get_tensors())
    assert back.to_list() == [[], [1], [2, 3]]


def test_the_callers_structure_is_never_written_to() -> None:
    t = torch.ones(1)
    nested = {"a": t, "b": {"c": [t]}}
    first, second = NestedTensors(nested), NestedTensors(nested)
    assert nested["a"] is t
    assert nested["b"]["c"][0] is t  # type: ignore[index]
    for flat in (first, second, first):
        assert flat.get_nested_result([torch.zeros(1)]) == {"a": 0, "b": {"c": [0]}}


def test_the_number_of_tensors_must_fit() -> None:
    flat = NestedTensors([torch.ones(1), RaggedTensor.from_list([[1]])])
    for count in (0, 2, 4):
        with pytest.raises(TensorArgumentError, match="holds 3 tensors"):
            flat.get_nested_result([torch.ones(1)] * count)


def test_other_leaves_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^Nested tensor doesn't support nested RaggedTensor\.$"):
        NestedTensors([RaggedTensor.from_list([[[1]]])])
    with pytest.raises(ValueError, match=r"^Tensor is not supported\. "):
        NestedTensors({"a": object()})


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.builds(torch.ones, st.just(2))
)
STRUCTURES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.tuples(inner, inner),
    ),
    max_leaves=10,
)


@given(STRUCTURES)
def test_any_structure_survives(nested: Any) -> None:
    flat = NestedTensors(nested)
    result = flat.get_nested_result(flat.get_tensors())
    shown = [map_leaves(lambda x: id(x) if isinstance(x, torch.Tensor) else x, s) for s in (nested, result)]
    assert shown[0] == shown[1]
