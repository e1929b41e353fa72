from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from monolith.errors import LayerArgumentError, LayerTypeError
from monolith.nn.gradients import (
    GradClipType,
    clip_by_global_norm,
    clip_gradients,
    clip_scale,
    global_norm,
    warmed_clip_norm,
)

INF, NAN = math.inf, math.nan


def tensors(*values: Any) -> list[Tensor]:
    return [torch.tensor(value, dtype=torch.float32) for value in values]


def close(found: list[Tensor], *wanted: Any) -> bool:
    return len(found) == len(wanted) and all(
        torch.allclose(a, b, equal_nan=True) for a, b in zip(found, tensors(*wanted), strict=True)
    )


# By a common norm


def test_what_is_too_long_is_scaled_to_the_limit() -> None:
    clipped, norm = clip_by_global_norm(tensors([-3, 0, 0], [0, 0, 4, 0]), 4.0)
    assert close(clipped, [-2.4, 0, 0], [0, 0, 3.2, 0])
    assert norm.item() == 5.0
    assert norm.shape == ()


@pytest.mark.parametrize("value", [[1.0, 1.0], [0.0, 0.0], [4.0, 0.0]])
def test_what_is_short_enough_is_unchanged(value: list[float]) -> None:
    clipped, norm = clip_by_global_norm(tensors(value), 4.0)
    assert clipped[0].tolist() == value
    assert norm.item() == pytest.approx(math.hypot(*value))


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_a_norm_that_is_not_finite_makes_everything_nan(bad: float) -> None:
    clipped, norm = clip_by_global_norm(tensors([bad, 1.0], [[0.0]]), 4.0)
    assert close(clipped, [NAN, NAN], [[NAN]])
    assert not norm.isfinite()
    assert norm.isnan() == math.isnan(bad)


def test_inputs_are_never_changed() -> None:
    for clip_type in GradClipType:
        dense, sparse = tensors([3.0, 4.0]), tensors([6.0, 8.0])
        clip_gradients(dense, sparse, clip_type, 1.0, sparse_clip_norm=0.5)
        assert close(dense, [3.0, 4.0])
        assert close(sparse, [6.0, 8.0])


def test_a_given_norm_is_used_and_returned() -> None:
    clipped, norm = clip_by_global_norm(tensors([3.0, 4.0]), 1.0, use_norm=10.0)
    assert close(clipped, [0.3, 0.4])
    assert norm.item() == 10.0
    given_norm = torch.tensor(10.0)
    assert clip_by_global_norm(tensors([3.0, 4.0]), 1.0, given_norm)[1] is given_norm


def test_an_empty_list_comes_back_with_norm_zero() -> None:
    nothing: list[Tensor] = []
    clipped, norm = clip_by_global_norm(nothing, 1.0)
    assert clipped is nothing
    assert norm.item() == 0.0


def test_empty_tensors_are_kept_in_place() -> None:
    clipped, norm = clip_by_global_norm([torch.zeros(0, 3), torch.tensor([3.0, 4.0]), torch.zeros(0)], 1.0)
    assert [tensor.shape for tensor in clipped] == [(0, 3), (2,), (0,)]
    assert norm.item() == 5.0


def test_only_a_list_will_do() -> None:
    for call in (lambda t: clip_by_global_norm(t, 1.0), global_norm):
        with pytest.raises(LayerTypeError, match="tuple") as caught:
            call(tuple(tensors([1.0])))
        assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("limit", [-1.0, NAN])
def test_a_limit_that_cannot_be_is_refused(limit: float) -> None:
    with pytest.raises(LayerArgumentError, match="clip_norm"):
        clip_by_global_norm(tensors([1.0]), limit)
    for clip_type in set(GradClipType) - {GradClipType.NoClip}:
        with pytest.raises(LayerArgumentError, match="clip_norm"):
            clip_gradients(tensors([1.0]), [], clip_type, limit)


def test_half_precision_is_measured_in_full() -> None:
    gradient = torch.full((4,), 40000.0, dtype=torch.float16)
    clipped, norm = clip_by_global_norm([gradient, torch.zeros(2)], 8.0)
    assert norm.item() == 80000.0
    assert clipped[0].tolist() == [4.0] * 4
    assert [tensor.dtype for tensor in clipped] == [torch.float16, torch.float32]


def test_the_norm_of_nothing_is_none_and_of_infinity_infinite() -> None:
    assert global_norm([]) is None
    norm = global_norm(tensors([3.0], [[4.0]]))
    assert norm is not None
    assert norm.item() == 5.0
    endless = global_norm(tensors([INF, 1.0]))
    assert endless is not None
    assert endless.item() == INF


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=5),
    clip_norm=st.floats(0, 100),
    seed=st.integers(0, 1000),
)
def test_any_list_gives_the_numbers_of_the_formula(shapes: Any, clip_norm: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrays = [(rng.normal(size=shape) * 10).astype(np.float32) for shape in shapes]
    want_norm = np.sqrt(sum(float((array.astype(np.float64) ** 2).sum()) for array in arrays))
    scale = clip_norm / want_norm if want_norm > clip_norm else 1.0
    clipped, norm = clip_by_global_norm(
        [torch.from_numpy(array) for array in map(np.asarray, arrays)], clip_norm
    )
    assert norm.item() == pytest.approx(want_norm, rel=1e-6)
    for found, array in zip(clipped, arrays, strict=True):
        np.testing.assert_allclose(found.numpy(), array * scale, rtol=2e-6, atol=1e-6)


def test_the_scale_alone_is_returned_for_callers_that_multiply_elsewhere() -> None:
    norms = torch.tensor([0.0, 1.0, 2.0, 4.0, INF, NAN])
    assert clip_scale(norms, 2.0).tolist() == pytest.approx([1.0, 1.0, 1.0, 0.5, NAN, NAN], nan_ok=True)


# By type


def test_names_and_numbers_of_the_types_are_upstreams() -> None:
    assert {kind.name: kind.value for kind in GradClipType} == {
        "ClipByNorm": 1,
        "ClipByGlobalNorm": 2,
        "ClipByValue": 3,
        "ClipByDenseAndSparse": 4,
        "NoClip": 5,
    }


def test_each_by_its_own_norm() -> None:
    result = clip_gradients(tensors([3.0, 4.0], [0.3]), tensors([0.0, 10.0]), GradClipType.ClipByNorm, 1.0)
    assert close(result.dense, [0.6, 0.8], [0.3])
    assert close(result.sparse, [0.0, 1.0])
    assert result.dense_norm is result.sparse_norm is None


def test_a_bad_tensor_spoils_only_itself_under_its_own_norm() -> None:
    result = clip_gradients(tensors([INF, 1.0], [3.0, 4.0]), [], GradClipType.ClipByNorm, 1.0)
    assert close(result.dense, [NAN, NAN], [0.6, 0.8])


def test_each_value_by_itself() -> None:
    result = clip_gradients(tensors([3.0, -0.5, NAN]), tensors([-9.0]), GradClipType.ClipByValue, 1.0)
    assert close(result.dense, [1.0, -0.5, NAN])
    assert close(result.sparse, [-1.0])


def test_one_norm_over_dense_and_sparse() -> None:
    result = clip_gradients(tensors([1.0]), tensors([1.0, 1.0, 1.0, 0.0]), GradClipType.ClipByGlobalNorm, 1.0)
    assert close(result.dense, [0.5])
    assert close(result.sparse, [0.5, 0.5, 0.5, 0.0])
    assert result.dense_norm is result.sparse_norm
    assert result.dense_norm is not None
    assert result.dense_norm.item() == 2.0


def test_under_one_norm_the_sparse_limit_may_be_another() -> None:
    result = clip_gradients(
        tensors([3.0]), tensors([4.0]), GradClipType.ClipByGlobalNorm, 5.0, sparse_clip_norm=2.5
    )
    assert close(result.dense, [3.0])
    assert close(result.sparse, [2.0])


@pytest.mark.parametrize(("dense", "sparse"), [([[3.0, 4.0]], []), ([], [[3.0, 4.0]]), ([], [])])
def test_either_side_may_be_empty(dense: Any, sparse: Any) -> None:
    result = clip_gradients(tensors(*dense), tensors(*sparse), GradClipType.ClipByGlobalNorm, 1.0)
    assert close([*result.dense, *result.sparse], *([[0.6, 0.8]] if dense or sparse else []))


def test_dense_and_sparse_each_by_a_norm_of_their_own() -> None:
    dense, sparse = tensors([3.0], [4.0]), tensors([6.0], [8.0])
    result = clip_gradients(dense, sparse, GradClipType.ClipByDenseAndSparse, 1.0, sparse_clip_norm=2.0)
    assert close(result.dense, [0.6], [0.8])
    assert close(result.sparse, [1.2], [1.6])
    assert result.dense_norm is not None
    assert result.sparse_norm is not None
    assert (result.dense_norm.item(), result.sparse_norm.item()) == (5.0, 10.0)


def test_apart_each_side_is_clipped_only_where_it_has_a_limit() -> None:
    dense, sparse, kind = tensors([3.0, 4.0]), tensors([6.0, 8.0]), GradClipType.ClipByDenseAndSparse
    only_dense = clip_gradients(dense, sparse, kind, 1.0)
    assert close(only_dense.dense, [0.6, 0.8])
    assert close(only_dense.sparse, [6.0, 8.0])
    only_sparse = clip_gradients(dense, sparse, kind, None, sparse_clip_norm=1.0)
    assert close(only_sparse.dense, [3.0, 4.0])
    assert close(only_sparse.sparse, [0.6, 0.8])


def test_no_limit_does_not_clip() -> None:
    for kind in GradClipType:
        result = clip_gradients(tensors([30.0]), tensors([40.0]), kind, None)
        assert close(result.dense, [30.0])
        assert close(result.sparse, [40.0])
    unclipped = clip_gradients(
        tensors([INF]), tensors([40.0]), GradClipType.NoClip, 1.0, sparse_clip_norm=1.0
    )
    assert close(unclipped.dense, [INF])
    assert close(unclipped.sparse, [40.0])


# Warm-up


def test_the_limit_grows_from_zero_and_stays() -> None:
    assert [warmed_clip_norm(2.0, step, 4) for step in (0, 1, 3, 4, 9)] == [0.0, 0.5, 1.5, 2.0, 2.0]
    assert warmed_clip_norm(2.0, 0, 0) == 2.0
    with pytest.raises(LayerArgumentError):
        warmed_clip_norm(2.0, -1, 4)


@pytest.mark.parametrize("kind", [GradClipType.ClipByGlobalNorm, GradClipType.ClipByDenseAndSparse])
def test_only_the_sparse_limit_warms_up(kind: GradClipType) -> None:
    result = clip_gradients(
        tensors([0.0]),
        tensors([3.0, 4.0]),
        kind,
        5.0,
        sparse_clip_norm=4.0,
        step=1,
        sparse_norm_warmup_steps=4,
    )
    assert close(result.dense, [0.0])
    assert close(result.sparse, [0.6, 0.8])


def test_a_warm_up_needs_the_step() -> None:
    with pytest.raises(LayerArgumentError, match="step"):
        clip_gradients([], [], GradClipType.ClipByGlobalNorm, 1.0, sparse_norm_warmup_steps=4)


# On a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", GradClipType, ids=lambda kind: kind.name)
def test_a_gpu_gives_the_cpus_numbers_without_waiting_for_it(kind: GradClipType) -> None:
    generator = torch.Generator().manual_seed(1)
    dense = [torch.randn(shape, generator=generator) for shape in ((1000, 700), (3,), (0, 2), ())]
    sparse = [torch.randn(shape, generator=generator) for shape in ((5000, 16), (7, 1))]
    want = clip_gradients(dense, sparse, kind, 2.0, sparse_clip_norm=1.0)
    there = [tensor.cuda() for tensor in dense], [tensor.cuda() for tensor in sparse]
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = clip_gradients(*there, kind, 2.0, sparse_clip_norm=1.0)
        clip_by_global_norm(there[0], 2.0, use_norm=5.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for ours, theirs in zip(
        [*found.dense, *found.sparse, found.dense_norm],
        [*want.dense, *want.sparse, want.dense_norm],
        strict=True,
    ):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("bad", [INF, NAN])
def test_a_bad_norm_is_nan_on_a_gpu_too(bad: float) -> None:
    clipped, _ = clip_by_global_norm([tensor.cuda() for tensor in tensors([bad, 1.0], [0.0])], 4.0)
    assert close([tensor.cpu() for tensor in clipped], [NAN, NAN], [NAN])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_tensors_of_several_devices_share_a_norm() -> None:
    clipped, norm = clip_by_global_norm([torch.tensor([3.0]).cuda(), torch.tensor([4.0])], 1.0)
    assert norm.item() == pytest.approx(5.0)
    assert [tensor.device.type for tensor in clipped] == ["cuda", "cpu"]
    assert close([tensor.cpu() for tensor in clipped], [0.6], [0.8])
