"""What every dense optimizer does, whatever its rule."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from monolith.errors import LayerArgumentError, MonolithError, SparseGradientError
from monolith.nn.optimizers import Adamom, DenseOptimizer, RMSprop, Shampoo
from monolith.table import PolynomialDecay

MAKERS: dict[str, Callable[..., DenseOptimizer]] = {
    "adamom": lambda params, **o: Adamom(params, **{"lr": 0.01, "weight_decay": 0.1, **o}),
    "adamom_v2": lambda params, **o: Adamom(params, **{"lr": 0.01, "use_v2": True, **o}),
    "rmsprop": lambda params, **o: RMSprop(params, **{"lr": 0.01, "weight_decay": 0.1, **o}),
    "rmsprop_v2": lambda params, **o: RMSprop(params, **{"lr": 0.01, "use_v2": True, **o}),
    "shampoo_young": lambda params, **o: Shampoo(params, **{"lr": 0.01, **o}),
    "shampoo": lambda params, **o: Shampoo(
        params, **{"lr": 0.01, "warmup": 3, "tau_1": 2, "tau_2": 1, "eigen_head": 2, "eigen_tail": 2, **o}
    ),
}
SHAPES = [(), (3,), (4, 6), (2, 3, 4), (0, 2)]


@pytest.fixture(params=MAKERS.values(), ids=MAKERS.keys())
def make(request: pytest.FixtureRequest) -> Any:
    return request.param


def parameters(device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype).to(device)) for shape in SHAPES]


def set_gradients(params: list[Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype).to(param.device)


def train(optimizer: DenseOptimizer, params: list[Tensor], steps: range) -> None:
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


def values(params: list[Tensor]) -> list[Any]:
    return [param.tolist() for param in params]


def test_fused_and_plain_steps_give_the_same_numbers(make: Any) -> None:
    results = []
    for foreach in (False, True):
        params = parameters()
        train(make(params, foreach=foreach), params, range(12))
        results.append(params)
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-6, atol=1e-7)


def test_parameters_of_several_dtypes_in_one_group_do_not_disturb_each_other(make: Any) -> None:
    single, double, alone = parameters(), parameters(dtype=torch.float64), parameters()
    optimizer = make([p for pair in zip(single, double, strict=True) for p in pair], foreach=True)
    by_itself = make(alone, foreach=True)
    for step in range(6):
        for params in (single, double, alone):
            set_gradients(params, step)
        optimizer.step()
        by_itself.step()
    assert values(single) == values(alone)


def test_saved_state_resumes_bit_for_bit(make: Any) -> None:
    straight = parameters()
    train(make(straight), straight, range(10))

    params = parameters()
    first = make(params)
    train(first, params, range(5))
    saved = copy.deepcopy(first.state_dict())
    resumed = [nn.Parameter(param.detach().clone()) for param in params]
    second = make(resumed)
    second.load_state_dict(saved)
    train(second, resumed, range(5, 10))
    assert values(resumed) == values(straight)


def test_saved_state_is_plain_and_survives_a_file(make: Any, tmp_path: Any) -> None:
    params = parameters()
    optimizer = make(params, lr=PolynomialDecay(initial_learning_rate=1.0, decay_steps=4))
    train(optimizer, params, range(3))
    torch.save(optimizer.state_dict(), tmp_path / "state")
    other = make(parameters())
    other.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert other.param_groups[0]["step"] == 3
    assert other.param_groups[0]["lr"] == pytest.approx(0.25, rel=1e-3)


def test_a_rate_that_is_a_function_stays_one_when_state_is_loaded(make: Any) -> None:
    decay = PolynomialDecay(initial_learning_rate=1.0, decay_steps=4)
    params = parameters()
    optimizer = make(params, lr=decay)
    train(optimizer, params, range(2))
    saved = optimizer.state_dict()
    assert optimizer.param_groups[0]["lr"] is decay
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] is decay


def test_a_rate_may_be_a_number_a_tensor_or_a_function_of_the_step(make: Any) -> None:
    results = []
    for lr in (0.5, torch.tensor(0.5), lambda _: 0.5):
        params = parameters()
        train(make(params, lr=lr), params, range(6))
        results.append(values(params))
    assert results[0] == results[1] == results[2]


def test_a_function_is_asked_once_per_step_from_zero_on(make: Any) -> None:
    asked = []

    def rate(step: int) -> float:
        asked.append(step)
        return 0.1

    params = parameters()
    optimizer = make(params, lr=rate)
    train(optimizer, params, range(3))
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 0.1})
    train(optimizer, params, range(2))
    assert asked == [0, 1, 2, 3, 4]
    assert [group["step"] for group in optimizer.param_groups] == [5, 5]


def test_torchs_schedulers_move_the_rate(make: Any) -> None:
    scheduled, by_hand = parameters(), parameters()
    optimizer = make(scheduled, lr=0.5)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.1)
    other = make(by_hand, lr=0.5)
    for step in range(4):
        set_gradients(scheduled, step)
        set_gradients(by_hand, step)
        optimizer.step()
        scheduler.step()
        other.param_groups[0]["lr"] = 0.5 if step < 2 else 0.5 * 0.1
        other.step()
    assert values(scheduled) == values(by_hand)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005)


def test_a_tensor_rate_is_moved_by_schedulers_too(make: Any) -> None:
    params = parameters()
    optimizer = make(params, lr=torch.tensor(0.5))
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    train(optimizer, params, range(1))
    scheduler.step()
    assert float(optimizer.param_groups[0]["lr"]) == 0.25


def test_groups_have_settings_of_their_own(make: Any) -> None:
    still, moving = parameters(), parameters()
    optimizer = make([{"params": still, "lr": 0.0}, {"params": moving}])
    train(optimizer, [*still, *moving], range(1))
    assert values(still) == values(parameters())
    assert values(moving) != values(parameters())


def test_parameters_without_gradient_are_left_alone(make: Any) -> None:
    frozen, moving = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = make([frozen, moving])
    moving.grad = torch.ones(2)
    optimizer.step()
    assert frozen.tolist() == [1.0, 1.0]
    assert moving.tolist() != [1.0, 1.0]
    assert frozen not in optimizer.state


def test_no_gradient_at_all_is_a_step_like_any_other(make: Any) -> None:
    optimizer = make(parameters())
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1


def test_gradients_are_not_changed(make: Any) -> None:
    for foreach in (False, True):
        params = parameters()
        set_gradients(params, 1)
        before = [param.grad.tolist() for param in params if param.grad is not None]
        make(params, foreach=foreach).step()
        assert [param.grad.tolist() for param in params if param.grad is not None] == before


def test_a_closure_is_evaluated_with_gradients_and_its_loss_returned(make: Any) -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = make([param])

    def closure() -> float:
        optimizer.zero_grad()
        loss = (param * 3).sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 6.0
    assert param.grad is not None
    assert param.grad.tolist() == [3.0, 3.0]
    assert param.tolist() != [1.0, 1.0]
    assert optimizer.step() is None


def test_a_sparse_gradient_is_refused_before_anything_moves(make: Any) -> None:
    dense, sparse = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = make([{"params": [dense]}, {"params": [sparse]}])
    dense.grad = torch.ones(2)
    sparse.grad = torch.ones(2).to_sparse()
    with pytest.raises(SparseGradientError, match="sparse_coo") as caught:
        optimizer.step()
    assert isinstance(caught.value, NotImplementedError)
    assert isinstance(caught.value, MonolithError)
    assert dense.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
def test_parameters_that_are_no_real_floats_are_refused(make: Any, dtype: torch.dtype) -> None:
    with pytest.raises(LayerArgumentError, match=str(dtype).removeprefix("torch.")):
        make([torch.ones(2, dtype=dtype)])


@pytest.mark.parametrize("lr", [-1.0, float("nan"), float("inf"), torch.ones(2)])
def test_a_rate_that_cannot_be_is_refused(make: Any, lr: Any) -> None:
    with pytest.raises(LayerArgumentError):
        make(parameters(), lr=lr)


def test_a_refused_group_is_not_added(make: Any) -> None:
    optimizer = make(parameters())
    with pytest.raises(LayerArgumentError):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": -1.0})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_finite_where_gradients_are_zero(make: Any, dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.ones(3, 2, dtype=dtype))
    for foreach in (False, True):
        optimizer = (
            make([param], epsilon=1e-3, foreach=foreach) if make_takes_epsilon(make) else make([param])
        )
        for _ in range(6):
            param.grad = torch.tensor([[0.0, 0.5]] * 3, dtype=dtype)
            optimizer.step()
    assert param.isfinite().all()
    assert param.dtype is dtype


def make_takes_epsilon(make: Any) -> bool:
    return "epsilon" in make([nn.Parameter(torch.ones(1))]).defaults


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("foreach", [False, True, None])
def test_a_gpu_gives_the_cpus_numbers(make: Any, foreach: bool | None) -> None:
    on_cpu, on_gpu = parameters(dtype=torch.float64), parameters("cuda", dtype=torch.float64)
    train(make(on_cpu), on_cpu, range(12))
    optimizer = make(on_gpu, foreach=foreach)
    train(optimizer, on_gpu, range(12))
    for cpu, gpu in zip(on_cpu, on_gpu, strict=True):
        torch.testing.assert_close(gpu.cpu(), cpu, rtol=1e-9, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_gives_the_cpus_numbers_in_single_precision(make: Any) -> None:
    on_cpu, on_gpu = parameters(), parameters("cuda")
    train(make(on_cpu), on_cpu, range(12))
    train(make(on_gpu), on_gpu, range(12))
    for cpu, gpu in zip(on_cpu, on_gpu, strict=True):
        torch.testing.assert_close(gpu.cpu(), cpu, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_state_saved_on_a_cpu_resumes_on_a_gpu(make: Any) -> None:
    on_cpu = parameters(dtype=torch.float64)
    optimizer = make(on_cpu)
    train(optimizer, on_cpu, range(5))
    on_gpu = [nn.Parameter(param.detach().cuda()) for param in on_cpu]
    other = make(on_gpu)
    other.load_state_dict(optimizer.state_dict())
    train(optimizer, on_cpu, range(5, 10))
    train(other, on_gpu, range(5, 10))
    for cpu, gpu in zip(on_cpu, on_gpu, strict=True):
        torch.testing.assert_close(gpu.cpu(), cpu, rtol=1e-9, atol=1e-12)
