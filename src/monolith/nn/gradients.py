"""Gradients: clipping by value or norm, and backpropagation in stages.

Everything stays on the device of the gradients: a norm is a tensor, and no function here waits for a GPU or
changes its inputs. A norm that is not finite makes all clipped gradients NaN; scaled numbers would only hide
that the batch is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from enum import Enum
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from monolith.errors import GradientError, LayerArgumentError, LayerTypeError
from monolith.nn.optimizers.dense_optimizer import fusable_runs


def global_norm(tensors: list[Tensor]) -> Tensor | None:
    """Return the length of all tensors taken as one vector; None for an empty list.

    Of shape (), on the device of the first tensor, float32 at least: the range of
    float16 is too small for norms.
    """
    _check_list("global_norm", tensors)
    return _norm_of_all(tensors) if tensors else None


def clip_scale(norm: Tensor, clip_norm: float | Tensor) -> Tensor:
    """Return what to multiply by: `clip_norm / norm` where the norm is larger, NaN where it is not finite.

    For when multiplying is someone else's job, such as that of an all-reduce.
    """
    scale = torch.where(norm > clip_norm, clip_norm / norm, 1.0)
    return torch.where(norm.isfinite(), scale, torch.nan)


def clip_by_global_norm(
    tensors: list[Tensor], clip_norm: float | Tensor, use_norm: float | Tensor | None = None
) -> tuple[list[Tensor], Tensor]:
    """Scale all tensors by one factor, so that their common norm is at most `clip_norm`.

    Args:
        tensors: Floating-point, of any shapes, empty ones too.
        clip_norm: The norm not to exceed, at least 0.
        use_norm: A norm computed before, perhaps of more than these tensors.

    Returns:
        New tensors, and the norm before clipping, of shape (). An empty list comes
        back as it is, with a norm of 0.

    Raises:
        LayerTypeError: `tensors` is not a list.
        LayerArgumentError: `clip_norm` is negative or NaN.
    """
    _check_list("clip_by_global_norm", tensors)
    _check_limit("clip_norm", clip_norm)
    if not tensors:
        return tensors, torch.zeros(())
    if use_norm is None:
        use_norm = _norm_of_all(tensors)
    norm = use_norm if isinstance(use_norm, Tensor) else torch.full((), use_norm, device=tensors[0].device)
    scale = clip_scale(norm, clip_norm)
    clipped = list(tensors)
    for run in fusable_runs(tensors):
        scaled = torch._foreach_mul([tensors[i] for i in run], scale.to(tensors[run[0]].device))
        for i, tensor in zip(run, scaled, strict=True):
            clipped[i] = tensor
    return clipped, norm


class GradClipType(Enum):
    """What a limit on gradients applies to; names and numbers are upstream's."""

    ClipByNorm = 1
    """Each tensor's own norm."""
    ClipByGlobalNorm = 2
    """One norm of all dense and sparse gradients together."""
    ClipByValue = 3
    """Each element, on both sides of 0."""
    ClipByDenseAndSparse = 4
    """One norm of the dense gradients, another of the sparse ones."""
    NoClip = 5


class ClippedGradients(NamedTuple):
    """Gradients after clipping, and the norms before it; None where none was taken."""

    dense: list[Tensor]
    sparse: list[Tensor]
    dense_norm: Tensor | None = None
    sparse_norm: Tensor | None = None


def clip_gradients(
    dense: list[Tensor],
    sparse: list[Tensor],
    clip_type: GradClipType,
    clip_norm: float | None,
    *,
    sparse_clip_norm: float | None = None,
    step: int | None = None,
    sparse_norm_warmup_steps: int | None = None,
    add_up: Callable[[Tensor], Tensor] | None = None,
) -> ClippedGradients:
    """Clip the gradients of one step.

    What else scales gradients, such as a division by the batch size, comes before:
    norms are taken of what is given.

    Args:
        dense: Gradients of dense weights.
        sparse: Gradients of embeddings.
        clip_type: What the limits apply to.
        clip_norm: The limit; None does not clip, except that `ClipByDenseAndSparse`
            still clips the sparse gradients.
        sparse_clip_norm: The limit of the sparse gradients, where it is another.
            `ClipByDenseAndSparse` clips them only where it is given.
        step: The global step; needed for a warm-up.
        sparse_norm_warmup_steps: Steps over which the sparse limit grows from 0.
        add_up: Where each of several ranks has a part of every sparse gradient: adds up their squared norms,
            one for each, over all of them.

    Returns:
        New lists. Under `ClipByGlobalNorm` both norms are the common one.

    Raises:
        LayerTypeError: `dense` or `sparse` is not a list.
        LayerArgumentError: A limit is negative, or a warm-up has no step.
    """
    _check_list("clip_gradients", dense)
    _check_list("clip_gradients", sparse)
    if clip_type is GradClipType.NoClip:
        return ClippedGradients(list(dense), list(sparse))
    sparse_limit = sparse_clip_norm
    if clip_norm is None or sparse_clip_norm is None:
        sparse_limit = sparse_clip_norm if clip_type is GradClipType.ClipByDenseAndSparse else clip_norm
    if sparse_limit is not None and sparse_norm_warmup_steps is not None:
        if step is None:
            raise LayerArgumentError("clip_gradients: a warm-up of the sparse limit needs the global step")
        sparse_limit = warmed_clip_norm(sparse_limit, step, sparse_norm_warmup_steps)
    if add_up is not None and clip_type is not GradClipType.ClipByValue:
        own = torch.stack(_norms(sparse, list(range(len(sparse))))) if sparse else torch.zeros(0)
        norms = add_up(own.square()).sqrt()
        return _clip_parts(dense, sparse, norms, clip_type, (clip_norm, sparse_limit))
    if clip_type is GradClipType.ClipByNorm:
        return ClippedGradients(_clip_each(dense, clip_norm), _clip_each(sparse, sparse_limit))
    if clip_type is GradClipType.ClipByValue:
        return ClippedGradients(_clip_values(dense, clip_norm), _clip_values(sparse, sparse_limit))
    common = None
    if clip_type is GradClipType.ClipByGlobalNorm and clip_norm is not None:
        common = global_norm([*dense, *sparse])
    clipped_dense, dense_norm = _clip_all(dense, clip_norm, common)
    clipped_sparse, sparse_norm = _clip_all(sparse, sparse_limit, common)
    return ClippedGradients(clipped_dense, clipped_sparse, dense_norm, sparse_norm)


def _clip_parts(
    dense: list[Tensor],
    sparse: list[Tensor],
    norms: Tensor,
    clip_type: GradClipType,
    limits: tuple[float | None, float | None],
) -> ClippedGradients:
    """Clip where `norms` are those of the whole sparse gradients, of which `sparse` are parts."""
    limit, sparse_limit = limits
    if clip_type is GradClipType.ClipByNorm:
        scales = norms.new_ones(len(sparse)) if sparse_limit is None else clip_scale(norms, sparse_limit)
        scaled = [tensor * scale for tensor, scale in zip(sparse, scales, strict=True)]
        return ClippedGradients(_clip_each(dense, limit), scaled)
    sparse_norm: Tensor = torch.linalg.vector_norm(norms)
    common = None
    if clip_type is GradClipType.ClipByGlobalNorm and limit is not None:
        dense_norm = _norm_of_all(dense) if dense else torch.zeros(())
        common = sparse_norm = torch.linalg.vector_norm(torch.stack([dense_norm.cpu(), sparse_norm]))
    clipped_dense, found = _clip_all(dense, limit, common)
    clipped_sparse, _ = _clip_all(sparse, sparse_limit, sparse_norm)
    return ClippedGradients(clipped_dense, clipped_sparse, found, sparse_norm)


def warmed_clip_norm(clip_norm: float, step: int, warmup_steps: int) -> float:
    """Return the limit at `step`: growing evenly from 0, and `clip_norm` from `warmup_steps` on."""
    if step < 0 or warmup_steps < 0:
        raise LayerArgumentError(
            f"warm-up of a limit: step and warmup_steps must be at least 0, got {step} and {warmup_steps}"
        )
    return clip_norm * step / warmup_steps if step < warmup_steps else clip_norm


def _clip_each(tensors: list[Tensor], limit: float | None) -> list[Tensor]:
    _check_limit("clip_norm", limit)
    clipped = list(tensors)
    if limit is not None:
        for run in fusable_runs(tensors):
            scales = clip_scale(torch.stack(_norms(tensors, run)), limit).unbind()
            for i, scale in zip(run, scales, strict=True):
                clipped[i] = tensors[i] * scale
    return clipped


def _clip_values(tensors: list[Tensor], limit: float | None) -> list[Tensor]:
    _check_limit("clip_norm", limit)
    return list(tensors) if limit is None else [tensor.clamp(-limit, limit) for tensor in tensors]


def _clip_all(
    tensors: list[Tensor], limit: float | None, norm: Tensor | None = None
) -> tuple[list[Tensor], Tensor | None]:
    if limit is None:
        return list(tensors), None
    clipped, own_norm = clip_by_global_norm(tensors, limit, norm)
    return clipped, own_norm if norm is None else norm  # an empty side has the common norm too


def _norm_of_all(tensors: list[Tensor]) -> Tensor:
    here = tensors[0].device
    norms = torch.cat([torch.stack(_norms(tensors, run)).to(here) for run in fusable_runs(tensors)])
    norm: Tensor = torch.linalg.vector_norm(norms)
    return norm


def _norms(tensors: list[Tensor], run: list[int]) -> list[Tensor]:
    some = [tensors[i] for i in run]
    dtype = some[0].dtype
    return list(torch._foreach_norm(some, 2, dtype=dtype if dtype.itemsize >= 4 else torch.float32))


def _check_list(call: str, tensors: object) -> None:
    if not isinstance(tensors, list):
        raise LayerTypeError(f"{call}: gradients must be in a list, got {type(tensors).__name__}")


def _check_limit(name: str, limit: float | Tensor | None) -> None:
    if isinstance(limit, int | float) and not limit >= 0:
        raise LayerArgumentError(f"clipping: {name} must be at least 0, got {limit!r}")


Key = TypeVar("Key", bound=Hashable)


def propagate_back_gradients(
    grads_and_vars: Iterable[tuple[Tensor | None, Tensor]],
    xs: Iterable[Tensor],
    valid_var_set: Iterable[Tensor] | None = None,
    *,
    retain_graph: bool = False,
) -> list[Tensor | None]:
    """Carry gradients of some variables back to `xs`.

    Args:
        grads_and_vars: A gradient of each variable's shape. None adds nothing.
        xs: What to differentiate by.
        valid_var_set: The variables that may appear; None or none at all allows any.
        retain_graph: Whether to keep the graph for another call.

    Returns:
        One gradient per x, summed over the variables; None for an x that none of
        them depends on.

    Raises:
        GradientError: A variable is not one of `valid_var_set`.
    """
    allowed = {id(var) for var in valid_var_set or ()}
    outputs, grads = [], []
    for grad, var in grads_and_vars:
        if allowed and id(var) not in allowed:
            raise GradientError(
                f"Invalid variables in the input: one of shape {tuple(var.shape)} is not among "
                f"the {len(allowed)} whose gradients may be propagated back"
            )
        if grad is not None and var.requires_grad:
            outputs.append(var)
            grads.append(grad)
    sources = list(xs)
    reachable = [i for i, x in enumerate(sources) if x.requires_grad]
    result: list[Tensor | None] = [None] * len(sources)
    if outputs and reachable:
        found = torch.autograd.grad(
            outputs,
            [sources[i] for i in reachable],
            grads,
            retain_graph=retain_graph,
            allow_unused=True,
        )
        for i, grad in zip(reachable, found, strict=True):
            result[i] = grad
    return result


def propagate_back_dict_gradients(
    grads_and_vars: Iterable[tuple[Tensor | None, Tensor]],
    x_to_key: Mapping[Tensor, Key],
    valid_var_set: Iterable[Tensor] | None = None,
    *,
    retain_graph: bool = False,
) -> dict[Key, list[tuple[Tensor | None, Tensor]]]:
    """Carry gradients back as `propagate_back_gradients` does; return `(gradient, x)` by key, in order."""
    dxs = propagate_back_gradients(grads_and_vars, x_to_key, valid_var_set, retain_graph=retain_graph)
    grouped: dict[Key, list[tuple[Tensor | None, Tensor]]] = {}
    for dx, (x, key) in zip(dxs, x_to_key.items(), strict=True):
        grouped.setdefault(key, []).append((dx, x))
    return grouped
