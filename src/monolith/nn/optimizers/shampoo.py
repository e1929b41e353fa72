"""Shampoo: a preconditioner per axis, learned from how gradients vary along it.

A step along the gradient suits weights that do not influence each other. For each
axis of a parameter, Shampoo sums the products of the gradient's slices; the
inverse root of that matrix undoes the correlations it finds. Roots are costly, so
matrix and root are renewed now and then only, and of the root's eigenvectors only
the outer ones are kept. docs/decisions/0005 says where this leaves upstream.
"""

from __future__ import annotations

from typing import NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from monolith.errors import LayerArgumentError
from monolith.nn.optimizers.dense_optimizer import DenseOptimizer, Group, Rate, State, rest_of

_SMALL_SQUARE, _SMALL_NORM = 1e-30, 1e-10


class InverseRoot(NamedTuple):
    """A root written as `vectors @ diag(values) @ vectors.T + offset * identity`."""

    vectors: Tensor
    """Of shape (n, kept)."""
    values: Tensor
    """Of shape (kept,)."""
    offset: Tensor
    """Of shape ()."""


def eigen_inverse_root(matrix: Tensor, p: int, head: int, tail: int, damping: float = 1e-3) -> InverseRoot:
    """Return about `matrix^(-1/p)`, kept to `head + tail` eigenvectors.

    Eigenvalues count as at least `damping`. Kept are the `tail` largest, and the
    `head` smallest of those above `damping`: what lies below is a direction that
    gradients do not take. The root of those between is replaced by its mean.

    Args:
        matrix: Symmetric, of shape (n, n). An n of `head + tail` or less keeps all.
        p: Which root; twice the rank of the parameter.
        head: How many of the smallest to keep.
        tail: How many of the largest to keep.
        damping: Above 0.
    """
    n = matrix.shape[0]
    wide = matrix if matrix.dtype in (torch.float32, torch.float64) else matrix.float()
    eigenvalues, eigenvectors = (part.to(matrix.dtype) for part in torch.linalg.eigh(wide))
    roots = eigenvalues.clamp(min=damping) ** (-1 / p)
    if head + tail >= n:
        return InverseRoot(eigenvectors.contiguous(), roots, roots.new_zeros(()))
    below = int((eigenvalues <= damping).sum())
    first = min(below % n, n - head - tail)  # all below is as good as none: then nothing stands out
    middle = roots[first + head : n - tail]
    offset = middle.mean() if len(middle) else roots.new_zeros(())
    kept = torch.arange(head + tail, device=matrix.device)
    kept = torch.where(kept < head, kept + first, kept + n - head - tail)
    return InverseRoot(eigenvectors[:, kept].contiguous(), roots[kept] - offset, offset)


def apply_inverse_root(tensor: Tensor, root: InverseRoot) -> Tensor:
    """Multiply axis 0 by `root` and move it last; once per axis, they are in order again."""
    inner = torch.tensordot(tensor, root.vectors, dims=([0], [0])) * root.values
    outer: Tensor = torch.tensordot(inner, root.vectors, dims=([-1], [1]))
    return outer + tensor.movedim(0, -1) * root.offset


class ShampooSettings(TypedDict, total=False):
    """The settings of `Shampoo`, for all parameters or for a group of them."""

    beta_1: float
    """How much of both momenta stays per step, by default 0.9."""
    beta_2: float
    """How much of a matrix stays when a gradient is added; 1, the default, is a plain sum."""
    warmup: int
    """Steps before the preconditioner is first computed, by default 5000."""
    tau_1: int
    """Roots are computed again when `t` is a multiple of it, after the warm-up; by default 200."""
    tau_2: int
    """Gradients are added to the matrices when `t` is a multiple of it; by default 20."""
    eigen_head: int
    """Eigenvectors kept of the smallest eigenvalues, by default 100."""
    eigen_tail: int
    """Eigenvectors kept of the largest eigenvalues, by default 100."""
    damping_epsilon: float
    """Lower bound of eigenvalues, by default 1e-3."""


class Shampoo(DenseOptimizer):
    """Moves from a diagonal step to a preconditioned step of the same length.

    With `t` the steps of a parameter, and `G` its preconditioned gradient:

        d += grad^2
        m  = beta_1 * m  + (1 - beta_1) * grad / sqrt(d)
        pm = beta_1 * pm + (1 - beta_1) * G
        param -= lr * ((1 - mix) * m + mix * pm * |m| / |pm|)

    `mix` is 0 until `t` exceeds `warmup`, and 1 from `2 * warmup` on. Without warm-up the preconditioner is
    computed and used in the first step. `t` counts steps in which the parameter had a gradient, so that a
    parameter that is unfrozen later has its own warm-up.

    Shapes: for a parameter of shape (a, b), `s0` is (a, a) and `s1` (b, b), and their roots keep up to
    `eigen_head + eigen_tail` eigenvectors: an axis of size n takes up to 2 n^2 floats.

    Example: `Shampoo([w], warmup=0, tau_1=1, tau_2=1)` computes `G = s0^(-1/4) @ grad @ s1^(-1/4)` for a
    matrix w in every step.

    Args:
        params: Parameters, or groups of them with settings of their own.
        lr: A number, a tensor of one element, or a function of the step.
        foreach: Whether to use fused operations, for all but the matrices; None uses them on a GPU.
        settings: See `ShampooSettings`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Rate = 0.03,
        *,
        foreach: bool | None = None,
        **settings: Unpack[ShampooSettings],
    ) -> None:
        defaults = ShampooSettings(
            beta_1=0.9,
            beta_2=1.0,
            warmup=5000,
            tau_1=200,
            tau_2=20,
            eigen_head=100,
            eigen_tail=100,
            damping_epsilon=1e-3,
        )
        super().__init__(params, lr, foreach, defaults, settings)

    def _check_settings(self, group: Group) -> None:
        self._check_range("beta_1", group["beta_1"], at_most=1)
        self._check_range("beta_2", group["beta_2"], at_most=1)
        self._check_range("damping_epsilon", group["damping_epsilon"])
        if group["damping_epsilon"] == 0:
            raise LayerArgumentError("Shampoo: damping_epsilon must be above 0: a zero has no inverse root")
        for name, least in (("warmup", 0), ("eigen_head", 0), ("eigen_tail", 0), ("tau_1", 1), ("tau_2", 1)):
            if not isinstance(group[name], int) or group[name] < least:
                raise LayerArgumentError(
                    f"Shampoo: {name} must be a whole number from {least} on, got {group[name]!r}"
                )

    def _new_state(self, param: Tensor) -> State:
        matrices = {f"s{axis}": param.new_zeros(n, n) for axis, n in enumerate(param.shape)}
        return {"step": 0, **{slot: torch.zeros_like(param) for slot in ("d", "m", "pm")}, **matrices}

    def _update(self, param: Tensor, grad: Tensor, state: State, group: Group, rate: float) -> None:
        d, m, pm, keep = state["d"], state["m"], state["pm"], group["beta_1"]
        rest = rest_of(keep, m.dtype)
        mix, direction = self._precondition(grad, state, group)
        d.addcmul_(grad, grad)
        m.mul_(keep).addcdiv_(grad, d.add(_at_least_tiny(_SMALL_SQUARE, d)).sqrt_(), value=rest)
        if direction is not None:
            pm.mul_(keep).add_(direction, alpha=rest)
        param.sub_(m * (rate * (1 - mix)))
        if mix:
            length = m.norm().div_(pm.norm().add_(_at_least_tiny(_SMALL_NORM, pm)))
            param.sub_(pm * length.mul_(rate * mix))

    def _update_together(
        self, params: list[Tensor], grads: list[Tensor], states: list[State], group: Group, rate: float
    ) -> None:
        d, m, pm = ([state[slot] for state in states] for slot in ("d", "m", "pm"))
        keep, rest = group["beta_1"], rest_of(group["beta_1"], m[0].dtype)
        preconditioned = [
            self._precondition(grad, state, group) for grad, state in zip(grads, states, strict=True)
        ]
        torch._foreach_addcmul_(d, grads, grads)
        denominators = torch._foreach_add(d, _at_least_tiny(_SMALL_SQUARE, d[0]))
        torch._foreach_sqrt_(denominators)
        torch._foreach_mul_(m, keep)
        torch._foreach_addcdiv_(m, grads, denominators, value=rest)
        found = [i for i, (_, direction) in enumerate(preconditioned) if direction is not None]
        if found:
            moved = [pm[i] for i in found]
            torch._foreach_mul_(moved, keep)
            directions = [direction for _, direction in preconditioned if direction is not None]
            torch._foreach_add_(moved, directions, alpha=rest)
        first = torch._foreach_mul(m, [rate * (1 - mix) for mix, _ in preconditioned])
        torch._foreach_sub_(params, first)
        warmed = [i for i, (mix, _) in enumerate(preconditioned) if mix]
        if warmed:
            lengths = torch._foreach_norm([m[i] for i in warmed])
            norms = torch._foreach_norm([pm[i] for i in warmed])
            torch._foreach_add_(norms, _at_least_tiny(_SMALL_NORM, norms[0]))
            torch._foreach_div_(lengths, norms)
            torch._foreach_mul_(lengths, [rate * preconditioned[i][0] for i in warmed])
            second = torch._foreach_mul([pm[i] for i in warmed], lengths)
            torch._foreach_sub_([params[i] for i in warmed], second)

    def _precondition(self, grad: Tensor, state: State, group: Group) -> tuple[float, Tensor | None]:
        """Renew what is due at this step; return the weight of the second step and its gradient, if any."""
        step, warmup = state["step"], group["warmup"]
        state["step"] = step + 1
        warmed = step > warmup or warmup == 0
        if step % group["tau_2"] == 0:
            self._add_to_matrices(grad, state, group["beta_2"])
        if warmed and step % group["tau_1"] == 0:
            self._renew_roots(grad.ndim, state, group)
        mix = 0.0
        if warmed:
            mix = min(max(step / warmup - 1, 0.0), 1.0) if warmup else 1.0
        direction = grad
        for axis in range(grad.ndim):
            if f"pvec{axis}" not in state:
                return mix, None
            root = InverseRoot(state[f"pvec{axis}"], state[f"pval{axis}"], state[f"o{axis}"])
            direction = apply_inverse_root(direction, root)
        return mix, direction

    def _add_to_matrices(self, grad: Tensor, state: State, keep: float) -> None:
        for axis, n in enumerate(grad.shape):
            slices = grad.movedim(axis, 0).reshape(n, grad.numel() // max(n, 1))
            weight = rest_of(keep, grad.dtype) if keep < 1 else 1.0
            state[f"s{axis}"].addmm_(slices, slices.T, beta=keep, alpha=weight)

    def _renew_roots(self, rank: int, state: State, group: Group) -> None:
        for axis in range(rank):
            matrix, head, tail = state[f"s{axis}"], group["eigen_head"], group["eigen_tail"]
            root = eigen_inverse_root(matrix, 2 * rank, head, tail, group["damping_epsilon"])
            state[f"pvec{axis}"], state[f"pval{axis}"], state[f"o{axis}"] = root


def _at_least_tiny(value: float, tensor: Tensor) -> float:
    # In float16 these would be 0, and 0 / 0 is not what a resting weight should become.
    return max(value, torch.finfo(tensor.dtype).tiny)
