from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from monolith.errors import LayerArgumentError
from monolith.nn.optimizers import Shampoo, eigen_inverse_root
from monolith.nn.optimizers.shampoo import InverseRoot

rng = np.random.default_rng


def symmetric(eigenvalues: Any, seed: int = 0) -> Tensor:
    basis, _ = np.linalg.qr(rng(seed).normal(size=(len(eigenvalues), len(eigenvalues))))
    return torch.from_numpy(basis @ np.diag(eigenvalues) @ basis.T)


def exact_root(matrix: Tensor, p: int, damping: float = 1e-3) -> Tensor:
    values, vectors = np.linalg.eigh(matrix.numpy())
    return torch.from_numpy(vectors @ np.diag(np.maximum(values, damping) ** (-1 / p)) @ vectors.T)


def whole(root: InverseRoot) -> Tensor:
    identity = torch.eye(len(root.vectors), dtype=root.vectors.dtype)
    return root.vectors @ root.values.diag() @ root.vectors.T + root.offset * identity


# The inverse root


@pytest.mark.parametrize("p", [2, 4, 6])
def test_a_matrix_that_fits_has_its_exact_root(p: int) -> None:
    matrix = symmetric([0.0, 0.5, 1.0, 9.0])
    for head, tail in ((2, 2), (100, 100), (4, 0), (0, 4)):
        root = eigen_inverse_root(matrix, p, head, tail)
        torch.testing.assert_close(whole(root), exact_root(matrix, p))
        assert root.offset == 0


def test_a_larger_one_keeps_both_ends_and_the_mean_of_what_is_between() -> None:
    matrix = symmetric([1.0, 16.0, 81.0, 256.0, 625.0])
    root = eigen_inverse_root(matrix, 4, 1, 2)
    assert root.offset.item() == pytest.approx((1 / 2 + 1 / 3) / 2)
    kept = (root.values + root.offset).tolist()
    assert kept == pytest.approx([1.0, 1 / 4, 1 / 5])
    assert root.vectors.shape == (5, 3)


def test_directions_that_gradients_do_not_take_are_left_out() -> None:
    matrix = symmetric([0.0, 0.0, 1.0, 16.0, 81.0, 256.0])
    root = eigen_inverse_root(matrix, 4, 1, 1)
    assert (root.values + root.offset).tolist() == pytest.approx([1.0, 1 / 4])
    assert root.offset.item() == pytest.approx((1 / 2 + 1 / 3) / 2)


def test_if_too_few_stand_out_the_largest_are_kept_and_nothing_is_between() -> None:
    root = eigen_inverse_root(symmetric([0.0, 0.0, 0.0, 0.0, 16.0]), 4, 2, 1)
    assert root.vectors.shape == (5, 3)
    assert root.offset == 0


def test_a_matrix_of_zeros_has_a_multiple_of_the_identity_as_its_root() -> None:
    root = eigen_inverse_root(torch.zeros(5, 5, dtype=torch.float64), 4, 1, 1, damping=1e-4)
    torch.testing.assert_close(whole(root), 10 * torch.eye(5, dtype=torch.float64))


@pytest.mark.parametrize("spread", [1.0, 3.0, 6.0])
@pytest.mark.parametrize("p", [2, 4, 6])
def test_the_mean_of_the_roots_comes_nearer_to_the_root_than_upstreams_mean_of_eigenvalues(
    spread: float, p: int
) -> None:
    n, head, tail = 40, 5, 5
    eigenvalues = np.sort(10 ** rng(int(spread)).uniform(-2, spread, n))
    matrix = symmetric(eigenvalues)
    ours = eigen_inverse_root(matrix, p, head, tail)
    raw = torch.tensor(eigenvalues[head : n - tail].mean())
    upstreams = InverseRoot(ours.vectors, ours.values + ours.offset - raw, raw)
    want = exact_root(matrix, p)
    error, upstreams_error = (torch.linalg.norm(whole(root) - want).item() for root in (ours, upstreams))
    assert error < upstreams_error
    # No other constant does better: the error is least at the mean of what it stands for.
    for other in (0.9, 1.1):
        offset = ours.offset * other
        shifted = InverseRoot(ours.vectors, ours.values + ours.offset - offset, offset)
        assert torch.linalg.norm(whole(shifted) - want).item() > error


# The steps


def reference(
    var: Any,
    grads: Any,
    *,
    lr: float = 0.03,
    beta_1: float = 0.9,
    beta_2: float = 1.0,
    warmup: int = 5000,
    tau_1: int = 200,
    tau_2: int = 20,
    damping_epsilon: float = 1e-3,
) -> list[Any]:
    """The rule for axes that fit into head and tail, written as upstream writes it.

    Upstream adds the last product to the statistics in every step, ours when it is
    new; with tau_2 = 1 that is the same.
    """
    rank = var.ndim
    statistics = [np.zeros((n, n)) for n in var.shape]
    roots: list[Any] = [np.zeros((n, n)) for n in var.shape]
    d, m, pm, result = np.zeros_like(var), np.zeros_like(var), np.zeros_like(var), []
    for t, grad in enumerate(grads):
        warmed = t > warmup or warmup == 0
        direction = grad
        for axis in range(rank):
            others = [other for other in range(rank) if other != axis]
            if t % tau_2 == 0:
                product = np.tensordot(grad, grad, (others, others))
                weight = 1 if beta_2 == 1 else 1 - beta_2
                statistics[axis] = beta_2 * statistics[axis] + weight * product
            if warmed and t % tau_1 == 0:
                roots[axis] = exact_root(
                    torch.from_numpy(statistics[axis]), 2 * rank, damping_epsilon
                ).numpy()
            direction = np.moveaxis(np.tensordot(roots[axis], direction, (1, axis)), 0, axis)
        d = d + grad**2
        m = beta_1 * m + (1 - beta_1) * grad / np.sqrt(d + 1e-30)
        pm = beta_1 * pm + (1 - beta_1) * direction
        share = min(max(t / warmup - 1, 0), 1) if warmup else 1
        second = np.linalg.norm(m) / (np.linalg.norm(pm) + 1e-10) * pm
        var = var - lr * ((1 - share) * m + share * second if warmed else m)
        result.append(var)
    return result


def run(var: Any, grads: Any, **settings: Any) -> list[Any]:
    param = nn.Parameter(torch.from_numpy(var.copy()))
    optimizer = Shampoo([param], **settings)
    result = []
    for grad in grads:
        param.grad = torch.from_numpy(grad)
        optimizer.step()
        result.append(param.detach().numpy().copy())
    return result


def test_before_the_warm_up_the_step_is_diagonal() -> None:
    var = np.array([[1.0, 2.0], [3.0, 4.0]])
    grads = np.array([[[0.5, -1.0], [0.25, 2.0]], [[-0.2, 0.3], [1.0, -0.5]]])
    first, second = run(var, grads)
    np.testing.assert_allclose(first, [[0.997, 2.003], [2.997, 3.997]])
    np.testing.assert_allclose(second, [[0.995414172, 2.00483796], [2.99138957, 3.99502761]])


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("shape", [(4,), (3, 5), (2, 3, 4)], ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        {"warmup": 4, "tau_1": 1, "tau_2": 1},
        {"warmup": 4, "tau_1": 3, "tau_2": 1, "beta_2": 0.9},
        {"warmup": 2, "tau_1": 4, "tau_2": 3, "beta_1": 0.5, "damping_epsilon": 0.1},
        {"warmup": 0, "tau_1": 5, "tau_2": 2},
    ],
    ids=str,
)
def test_any_gradients_give_the_numbers_of_the_formula(foreach: bool, shape: Any, settings: Any) -> None:
    var, grads = rng(1).normal(size=shape), rng(2).normal(size=(14, *shape))
    found, want = run(var, grads, foreach=foreach, **settings), reference(var, grads, **settings)
    for step, (ours, theirs) in enumerate(zip(found, want, strict=True)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-8, atol=1e-10, err_msg=f"step {step}")


def test_gradients_enter_the_statistics_once_on_steps_that_are_multiples_of_tau_2() -> None:
    param = nn.Parameter(torch.zeros(2))
    optimizer = Shampoo([param], tau_2=2)
    for grad in ([1.0, 0.0], [0.0, 5.0], [0.0, 2.0], [7.0, 0.0]):
        param.grad = torch.tensor(grad)
        optimizer.step()
    assert optimizer.state[param]["s0"].tolist() == [[1.0, 0.0], [0.0, 4.0]]


def test_without_warm_up_the_first_step_is_preconditioned() -> None:
    # The root of one outer product turns the gradient into its direction; the length is the diagonal step's.
    (after,) = run(np.zeros(2), np.array([[3.0, 4.0]]), lr=1.0, warmup=0)
    assert after.tolist() == pytest.approx([-0.6 * 0.1 * np.sqrt(2), -0.8 * 0.1 * np.sqrt(2)])


def test_steps_count_per_parameter_so_that_a_thawed_one_has_its_own_warm_up() -> None:
    early, late = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = Shampoo([early, late], warmup=1, tau_1=1, tau_2=1)
    for step in range(4):
        early.grad = torch.ones(2)
        late.grad = torch.ones(2) if step == 3 else None
        optimizer.step()
    assert (optimizer.state[early]["step"], optimizer.state[late]["step"]) == (4, 1)
    assert "pvec0" in optimizer.state[early]
    assert "pvec0" not in optimizer.state[late]


def test_along_a_narrow_valley_it_comes_further_down_than_the_diagonal_step() -> None:
    turn, _ = np.linalg.qr(rng(3).normal(size=(6, 6)))
    slope = torch.from_numpy(turn @ np.diag(10.0 ** -np.arange(6)) @ turn.T)
    start = torch.from_numpy(rng(4).normal(size=6))
    losses = []
    for warmup in (0, 10**6):
        param = nn.Parameter(start.clone())
        optimizer = Shampoo([param], lr=0.1, warmup=warmup, tau_1=1, tau_2=1, damping_epsilon=1e-10)
        for _ in range(300):
            optimizer.zero_grad()
            loss = param @ slope @ param
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] < losses[1] / 2


@pytest.mark.parametrize(
    "settings",
    [
        {"warmup": -1},
        {"tau_1": 0},
        {"tau_2": 0},
        {"eigen_head": -1},
        {"eigen_tail": 1.5},
        {"damping_epsilon": 0.0},
        {"beta_1": 2.0},
        {"beta_2": -1.0},
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(settings: Any) -> None:
    with pytest.raises(LayerArgumentError, match=next(iter(settings))):
        Shampoo([nn.Parameter(torch.zeros(1))], **settings)


def test_defaults_are_upstreams() -> None:
    group = Shampoo([nn.Parameter(torch.zeros(1))]).param_groups[0]
    names = (
        "lr",
        "beta_1",
        "beta_2",
        "warmup",
        "tau_1",
        "tau_2",
        "eigen_head",
        "eigen_tail",
        "damping_epsilon",
    )
    assert [group[name] for name in names] == [0.03, 0.9, 1.0, 5000, 200, 20, 100, 100, 1e-3]
