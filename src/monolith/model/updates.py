"""One training step's gradients, from the loss to dense weights and rows, in the right order.

A plain loop calls `loss.backward()` and two optimizers, and needs none of this. Here is
what production models ask for on top: one norm over dense and sparse gradients, weight
decay outside the optimizer, gradients averaged over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from monolith.errors import ConfigError, NonFiniteError
from monolith.model.optimizer import EmbeddingOptimizer
from monolith.nn import ClippedGradients, GradClipType, clip_gradients


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateConfig:
    """What is done to gradients before they are applied."""

    clip_type: GradClipType = GradClipType.ClipByGlobalNorm
    """What the limits apply to: all gradients together, each one, each number, or dense and sparse apart."""
    clip_norm: float | None = None
    """The norm to which gradients are clipped; None does not clip."""
    sparse_clip_norm: float | None = None
    """The norm to which gradients of rows are clipped, where it differs; see `clip_gradients`."""
    sparse_norm_warmup_steps: int | None = None
    """Steps over which the limit of the rows' gradients grows from 0."""
    dense_weight_decay: float = 0.0
    """The factor by which each dense weight is added to its gradient, after clipping."""
    divide_dense_by: int = 1
    """For losses that are sums over a batch: its size, with a multiply_rows_by of 1. Before clipping, so that
    norms are of the mean."""
    multiply_rows_by: float | None = None
    """The factor that gradients of rows are multiplied by. None is the size of the batch, since a loss is a
    mean over it: so how far a row goes does not depend on how many examples it came with. 1 is for losses
    that are sums."""
    min_norms: Mapping[str, float] = field(default_factory=dict)
    """Table to a norm: where the gradient of its rows is not longer, they are not updated in that step."""

    def __post_init__(self) -> None:
        if self.divide_dense_by < 1:
            raise ConfigError(f"divide_dense_by must be at least 1, got {self.divide_dense_by}")
        if self.multiply_rows_by is not None and not self.multiply_rows_by > 0:
            raise ConfigError(f"multiply_rows_by must be above 0, or None, got {self.multiply_rows_by}")
        for name in ("clip_norm", "sparse_clip_norm"):
            limit = getattr(self, name)
            if limit is not None and not limit > 0:
                raise ConfigError(f"{name} must be above 0, or None for no limit, got {limit}")
        if self.dense_weight_decay < 0:
            raise ConfigError(f"dense_weight_decay must not be negative, got {self.dense_weight_decay}")


class WeightOptimizer(Protocol):
    """What trains the dense weights: an optimizer of torch, or what stands for one that is elsewhere."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The weights, under "params" of each group."""

    def step(self) -> Any: ...
    def zero_grad(self) -> None: ...


class Together(Protocol):
    """The processes that take every step together, each with its own batch: one step with the mean of all."""

    @property
    def loss(self) -> Tensor:
        """The mean loss of all examples of the last step in which this process had none."""

    def begin(self, examples: int) -> None:
        """Learn of a step before its backward pass, and how many examples this process has of it."""

    def finish(self, loss: Tensor | None, trouble: str | None) -> str | None:
        """Give each weight the gradient over the examples of all processes; return why the step is skipped.

        Args:
            loss: The mean over the examples of this process; None if it has none.
            trouble: Why this process cannot.
        """

    def add_up(self, squares: Tensor) -> Tensor:
        """Return the sums over all processes of numbers that each has some of."""


def apply_gradients(
    loss: Tensor | None,
    sparse: EmbeddingOptimizer,
    dense: WeightOptimizer | None = None,
    config: UpdateConfig | None = None,
    *,
    together: Together | None = None,
    examples: int = 1,
    push: Callable[[Callable[[], None]], None] | None = None,
    count: Callable[[], int] | None = None,
) -> Tensor | None:
    """Differentiate `loss` and take one step of dense weights and rows; the global step advances last.

    Existing gradients are added, as in a plain loop, and cleared afterwards. If the loss or a gradient is not
    finite, nothing of the batch is applied. The order matters:

        backward ──► all gradients finite? (on every rank) ──► sum, clip ──► dense step ──► count ──► rows

    Everything that can refuse the batch comes before the first write, so that a refused batch changes
    nothing.

    Args:
        loss: None if this process has no examples in a step of all ranks: it only takes part.
        together: The ranks that take this step together. Then norms are those of the gradient over all
            examples, and all ranks skip a step in which the batch of one is not finite.
        examples: The number of examples in the mean of the loss, which is its weight among the ranks.
        push: Receives the function that updates the rows and calls it later; by default it is called here.
        count: Called between dense weights and rows; returns the global step, from 1, if other workers take
            steps, too. By default `sparse` counts.

    Returns:
        The common norm of all gradients before clipping, if it was needed; else None.

    Raises:
        NonFiniteError: The loss or a gradient is NaN or infinite. Nothing was changed, no step was counted,
            and all gradients were cleared: continue with the next batch, or stop.
    """
    config = UpdateConfig() if config is None else config
    if config.multiply_rows_by is not None:
        sparse.multiply_rows_by = config.multiply_rows_by
    if together is not None:
        together.begin(examples)
    every = [p for group in dense.param_groups for p in group["params"]] if dense is not None else []
    if loss is not None and (loss.requires_grad or every or sparse.has_rows):
        # A constant loss is a mistake, which autograd refuses, unless there is nothing that it could train.
        torch.autograd.backward(loss)
    weights = [weight for weight in every if weight.grad is not None]
    rows: Sequence[Tensor] = [p for group in sparse.param_groups for p in group["params"]]
    rows = [row for row in rows if row.grad is not None]
    with torch.no_grad():
        trouble = find_non_finite(loss, [w.grad for w in weights], [row.grad for row in rows])
        if together is not None:
            trouble = together.finish(loss, trouble)
            weights = [weight for weight in every if weight.grad is not None]
        if trouble is not None:
            _forget(sparse, dense)
            raise NonFiniteError(trouble)
        add_up = None
        if together is not None and (_limits_rows(config) or config.min_norms):
            # Limits on rows apply to the sum over all ranks, so gradients are first sent to the owners of
            # rows.
            rows, add_up = sparse.exchange(), together.add_up
        clipped = clip(sparse, weights, rows, config, add_up)
        if any(
            norm is not None and not norm.isfinite() for norm in (clipped.dense_norm, clipped.sparse_norm)
        ):
            _forget(sparse, dense)
            raise NonFiniteError("the gradients are so large that their norm is not finite")
        set_gradients(weights, rows, clipped, config)
    if dense is not None:
        dense.step()
        dense.zero_grad()
    update = sparse.take(None if count is None else count())
    if push is None:
        update()
    else:
        push(update)
    return clipped.dense_norm


def clip(
    sparse: EmbeddingOptimizer,
    weights: Sequence[Tensor],
    rows: Sequence[Tensor],
    config: UpdateConfig,
    add_up: Callable[[Tensor], Tensor] | None = None,
) -> ClippedGradients:
    """Return the gradients of a step as `config` limits them; nothing is waited for.

    Args:
        weights, rows: Those with a gradient.
        add_up: See `Together`.
    """
    if _limits_rows(config) and not config.min_norms:
        sparse.sum_equal()
    sparse.zero_below(config.min_norms, add_up)
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    if config.divide_dense_by > 1:
        gradients = [gradient / config.divide_dense_by for gradient in gradients]
    return clip_gradients(
        gradients,
        [row.grad for row in rows if row.grad is not None],
        config.clip_type,
        config.clip_norm,
        sparse_clip_norm=config.sparse_clip_norm,
        step=sparse.global_step,
        sparse_norm_warmup_steps=config.sparse_norm_warmup_steps,
        add_up=add_up,
    )


def set_gradients(
    weights: Sequence[Tensor], rows: Sequence[Tensor], clipped: ClippedGradients, config: UpdateConfig
) -> None:
    """Have weights and rows trained by clipped gradients, after weight decay."""
    if config.dense_weight_decay:
        torch._foreach_add_(clipped.dense, list(weights), alpha=config.dense_weight_decay)
    for parameter, gradient in zip([*weights, *rows], [*clipped.dense, *clipped.sparse], strict=True):
        parameter.grad = gradient


def _limits_rows(config: UpdateConfig) -> bool:
    limits = (config.clip_norm, config.sparse_clip_norm)
    return config.clip_type is not GradClipType.NoClip and any(limit is not None for limit in limits)


def find_non_finite(
    loss: Tensor | None, dense: Sequence[Tensor | None], rows: Sequence[Tensor | None]
) -> str | None:
    """Return what of a batch is NaN or infinite, in words; None if all is finite.

    The one verdict on a batch: processes that train together must agree on it before applying anything.
    It adds everything up, which NaN and infinity survive, and looks closer only where the sum is not finite.
    Of what is on a device, that is one number to wait for.

    Args:
        dense: Gradients of dense weights.
        rows: Gradients of rows.
    """
    kinds = {
        "the loss": [] if loss is None else [loss.detach()],
        "a gradient of the dense weights": [gradient for gradient in dense if gradient is not None],
        "a gradient of the rows": [gradient for gradient in rows if gradient is not None],
    }
    if _sums_are_finite([tensor for tensors in kinds.values() for tensor in tensors]):
        return None
    for kind, tensors in kinds.items():
        for tensor in tensors:
            bad = tensor[~tensor.isfinite()]
            if bad.numel() and kind == "the loss":
                return f"{kind} is {bad.flatten()[0].item()}"
            if bad.numel():
                return f"{kind} has {bad.numel():,} of {tensor.numel():,} floats that are NaN or infinite"
    return None


def _sums_are_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether sums of all tensors are, one for each device."""
    sums: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        sums.setdefault(tensor.device, []).append(tensor.sum(dtype=torch.float32))
    return all(math.isfinite(torch.stack(several).sum()) for several in sums.values())


def _forget(sparse: EmbeddingOptimizer, dense: WeightOptimizer | None) -> None:
    sparse.zero_grad()
    if dense is not None:
        dense.zero_grad()
