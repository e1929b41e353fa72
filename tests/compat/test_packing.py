from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from monolith.errors import TensorArgumentError
from monolith_compat import (
    aligned_flat_concat,
    aligned_flat_split,
    merge_dicts,
    pack_tensors,
    pack_typed_keyed_tensors,
    split_tensors_with_type,
    unpack_packed_tensors,
    unpack_tensors,
)


def test_tensors_are_packed_in_the_order_of_their_keys() -> None:
    packed, sizes = pack_tensors({"y": torch.tensor([[4, 5], [6, 7]]), "x": torch.tensor([1, 2])})
    assert (packed.tolist(), sizes.tolist()) == ([1, 2, 4, 5, 6, 7], [2, 4])


def test_unpacking_needs_shapes_of_which_one_size_may_be_unknown() -> None:
    packed = pack_tensors({"y": torch.tensor([[4, 5], [6, 7]]), "x": torch.tensor([1, 2])})
    unpacked = unpack_tensors({"y": (None, 2), "x": (2,)}, packed)
    assert {key: value.tolist() for key, value in unpacked.items()} == {"x": [1, 2], "y": [[4, 5], [6, 7]]}


def test_what_does_not_fit_is_refused() -> None:
    packed, sizes = pack_tensors({"x": torch.ones(2)})
    for shapes, pack in (
        ({"x": (3,)}, (packed, sizes)),
        ({"x": (2,), "y": (1,)}, (packed, sizes)),
        ({"x": (1,)}, (packed, sizes - 1)),
        ({"x": (2,)}, (packed, sizes.float())),
    ):
        with pytest.raises(TensorArgumentError):
            unpack_tensors(shapes, pack)  # type: ignore[arg-type]
    with pytest.raises(TensorArgumentError, match="split_tensors_with_type"):
        pack_tensors({"x": torch.ones(1), "y": torch.ones(1, dtype=torch.int64)})
    with pytest.raises(TensorArgumentError, match="no tensors"):
        pack_tensors({})


def test_tensors_are_split_by_dtype_and_merged_again() -> None:
    tensors = {"b": torch.ones(1), "i": torch.ones(1, dtype=torch.int64), "a": torch.zeros(1)}
    groups = split_tensors_with_type(tensors)
    assert [list(group) for group in groups] == [["a", "b"], ["i"]]
    assert merge_dicts(groups) == tensors
    with pytest.raises(TensorArgumentError, match=r"\['a'\]"):
        merge_dicts([groups[0], {"a": torch.ones(1)}])


def test_typed_groups_travel_with_their_layout() -> None:
    groups = [
        {"t1": torch.ones(2, 4), "t2": torch.zeros(4)},
        {"t4": torch.ones(2, 2, dtype=torch.int32), "t3": torch.zeros(2, dtype=torch.int32)},
        {"t5": torch.arange(7)},
    ]
    packed = pack_typed_keyed_tensors(groups)
    assert packed[-1].tolist() == [2, 2, 1, 8, 4, 2, 4, 7]
    shapes = [{key: tuple(value.shape) for key, value in group.items()} for group in groups]
    for group, unpacked in zip(groups, unpack_packed_tensors(shapes, packed), strict=True):
        assert group.keys() == unpacked.keys()
        assert all(torch.equal(group[key], unpacked[key]) for key in group)


def test_a_layout_that_does_not_fit_is_refused() -> None:
    packed = pack_typed_keyed_tensors([{"x": torch.ones(2)}])
    with pytest.raises(ValueError, match=r"^Wrong packed_list length$"):
        unpack_packed_tensors([], packed[:1])
    with pytest.raises(TensorArgumentError, match="groups"):
        unpack_packed_tensors([{"x": (2,)}, {}], packed)
    with pytest.raises(TensorArgumentError, match="layout"):
        unpack_packed_tensors([{"x": (2,)}], [packed[0], torch.tensor([2, 2])])


def test_aligned_tensors_begin_at_multiples() -> None:
    tensors = [torch.ones(3), torch.full((2, 2), 2.0), torch.ones(0), torch.full((1,), 3.0)]
    flat = aligned_flat_concat(tensors, scale=10)
    assert flat.tolist() == [10, 10, 10, 0, 20, 20, 20, 20, 30, 0, 0, 0]
    back = aligned_flat_split(flat, tensors, scale=0.1)
    assert all(torch.allclose(a, b) for a, b in zip(tensors, back, strict=True))
    assert aligned_flat_concat(tensors[:2], alignment_bytes=4).tolist() == [1, 1, 1, 2, 2, 2, 2]
    with pytest.raises(TensorArgumentError, match="12 elements"):
        aligned_flat_split(flat[1:], tensors)


def test_gradients_flow_through_packs() -> None:
    x = torch.rand(3, dtype=torch.float64, requires_grad=True)
    y = torch.rand(2, 2, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x, y: pack_tensors({"x": x, "y": y})[0], (x, y))
    assert gradcheck(lambda x, y: aligned_flat_concat([x, y], scale=2.0), (x, y))
    flat = torch.rand(8, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda flat: aligned_flat_split(flat, [x, y], scale=2.0), (flat,))
