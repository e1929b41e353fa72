"""What runs on the host gives the same answers on a CUDA device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import monolith_compat as compat
from monolith import tensors
from monolith.errors import TensorArgumentError
from monolith.tensors import RaggedTensor, map_leaves

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def answers(device: str) -> Any:
    """Run every op on small inputs; return all it gave, gradients included."""

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def grown(*shape: int) -> Tensor:
        return (
            (torch.arange(torch.Size(shape).numel(), device=device) * 0.5 + 1).reshape(shape).requires_grad_()
        )

    def ragged(rows: Any) -> RaggedTensor:
        return RaggedTensor.from_list(rows, dtype=torch.int64).to(device)

    rows, values, fused = ints(0, 0, 2), grown(3, 2), grown(9)
    key = ragged([[], [0, 1, 2, 1, 0], [0, 1, 0], []])
    dims = [1, 2, 3, 4]
    offset_map = compat.unique_key_with_value_and_offset(key, dims)
    value, pos = grown(12), ragged([[], [0, 1, 2], [3, 4], []])
    buffer = torch.zeros(offset_map.buffer_size, device=device)
    differentiable = {
        "split": compat.split_by_indices(ints(1, 0, 1), values, 3),
        "fill": compat.finalize_shared_tensor(
            [compat.fill_with_offset_map(pos, value, offset_map.value_offset, buffer, dims)]
        ),
        "map": compat.map_id_to_embedding([ints(1, -2, 3)], [values], ints(3, 1, 1)),
        "gather": compat.fused_gather_embeddings_by_input(fused, [ints(4, 0), ints(3)], [3, 1]),
        "sum": compat.reduce_sum(rows, values, 4),
        "mean": compat.reduce_mean(rows, values, 4),
        "sqrtn": compat.reduce_sqrtn(rows, values, 4),
        "columns": compat.fused_reduce_sum_and_split(rows, values, 4, [1, 1]),
        "segments": compat.fused_sorted_segment_sum([rows], [values], [(4, 2)]),
        "features": compat.fused_reduce_and_split([ints(0, 2, 2, 3)], [values], [[1, 1]]),
        "flat": compat.aligned_flat_concat([values, fused], scale=2.0),
        "packed": compat.pack_tensors({"a": values, "b": fused})[0],
    }
    loss = torch.stack([(part**2).sum() for part in tensors.leaves(differentiable)]).sum()
    return {
        **differentiable,
        "gradients": torch.autograd.grad(loss, [values, fused, value]),
        "offset_map": offset_map,
        "shards": compat.shard_of_ids(ints(-1, 5, -(2**63)), 7, rank0_empty=True),
        "ragged_split": compat.ragged_split_by_indices(ints(*[0, 1] * 4), key, 2),
        "reorder": compat.reorder_by_indices(ints(0, 1, 2, 2), ints(0, 1, 2, 2), 3),
        "fused_reorder": compat.fused_reorder_by_indices([ints(0, 1, 0), ints(-3, 2, -3)], 2, [1, 2]),
        "by_hand": compat.gather_embeddings_by_input_gradient(ints(1, 2), values.detach(), ints(0, 1, 0)),
        "fused_by_hand": compat.fused_gather_embeddings_by_input_gradient(
            9, [values.detach()], [ints(0, 3, 0)], [2], 0.5
        ),
        "merged": tensors.normalize_merged_split(ints(0, 2, 0, 1), [2, 2]),
    }


def shown(leaf: Any) -> Any:
    if isinstance(leaf, RaggedTensor):
        return leaf.to_list()
    return [round(x, 4) for x in leaf.flatten().tolist()] if isinstance(leaf, Tensor) else leaf


def test_every_op_gives_the_same_on_the_device() -> None:
    assert map_leaves(shown, answers("cuda")) == map_leaves(shown, answers("cpu"))


def test_a_bad_index_is_refused_before_it_breaks_the_device() -> None:
    values, bad = torch.ones(2, 1, device="cuda"), torch.tensor([0, 9], device="cuda")
    for call in (
        lambda: compat.reduce_sum(bad, values, 2),
        lambda: compat.split_by_indices(bad, values, 2),
        lambda: compat.fused_gather_embeddings_by_input(values[:, 0], [bad], [1]),
        lambda: compat.map_id_to_embedding([bad], [values], bad + 1),
    ):
        with pytest.raises(TensorArgumentError):
            call()
    assert values.sum().item() == 2


def test_pooling_and_gathering_never_wait_for_the_device_unvalidated() -> None:
    rows, values = torch.tensor([0, 0, 2], device="cuda"), torch.ones(3, 2, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for reduce in (compat.reduce_sum, compat.reduce_mean, compat.reduce_sqrtn):
            reduce(rows, values, 4, validate=False)
        compat.fused_gather_embeddings_by_input(values[:, 0], [rows], [1], validate=False)
        compat.fused_reduce_and_split([rows], [values[:2]], [[1, 1]])
    finally:
        torch.cuda.set_sync_debug_mode("default")
