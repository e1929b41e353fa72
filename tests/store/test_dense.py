"""Dense weights on servers: whose they are, one step for a share, and all of it as bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from monolith.errors import FeatureError, RestoreError, SaveError
from monolith.nn import Adamom, RMSprop, Shampoo
from monolith.store import DenseShard, partition_weights
from monolith.store.dense import dump_dense, load_dense_states, pack_tensors, read_dense, unpack_tensors

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "SGD with momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adamom": lambda params: Adamom(params, lr=lambda step: 0.1 / (1 + step)),
    "RMSprop": lambda params: RMSprop(params, lr=0.1),
    "Shampoo": lambda params: Shampoo(params, lr=0.1, warmup=0, tau_1=1, tau_2=1),
}


def weights_of(**sizes: int) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}


def small_module() -> dict[str, nn.Parameter]:
    return {
        "kernel": nn.Parameter(torch.ones(3, 2)),
        "bias": nn.Parameter(torch.ones(2)),
        "scale": nn.Parameter(torch.tensor(1.0)),
    }


def gradients(parameters: dict[str, nn.Parameter], seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(weight.shape, generator=draw) for name, weight in parameters.items()}


# Whose weights they are


def test_the_largest_weight_goes_first_to_the_server_that_has_least() -> None:
    found = partition_weights(weights_of(a=1, b=6, c=2, d=3), 2)
    assert found == {"a": 1, "b": 0, "c": 1, "d": 1}


def test_every_process_shares_alike_whatever_the_order_of_names() -> None:
    names = weights_of(x=4, y=4, z=4)
    again = {name: names[name] for name in ("z", "x", "y")}
    assert partition_weights(names, 2) == partition_weights(again, 2) == {"x": 0, "y": 1, "z": 0}


def test_there_must_be_a_server() -> None:
    with pytest.raises(FeatureError, match="among 0 servers"):
        partition_weights(weights_of(a=1), 0)


# A share


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_shares_train_as_one_optimizer_does(name: str) -> None:
    alone = small_module()
    optimizer = OPTIMIZERS[name](list(alone.values()))
    modules = [small_module(), small_module()]
    shares = [
        DenseShard(module, OPTIMIZERS[name](list(module.values())), (number, 2))
        for number, module in enumerate(modules)
    ]
    assert all(share.weights for share in shares)
    for seed in range(4):
        grads = gradients(alone, seed)
        for weight, gradient in zip(alone.values(), grads.values(), strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
        found: dict[str, Tensor] = {}
        for share in shares:
            found |= share.push({name: grads[name] for name in share.weights})
    assert_close(found, {name: weight.detach() for name, weight in alone.items()}, rtol=0, atol=0)


def test_a_push_answers_with_all_weights_and_leaves_no_gradient() -> None:
    weights = weights_of(a=1, b=1)
    share = DenseShard(weights, torch.optim.SGD(weights.values(), lr=1.0), (0, 1))
    assert share.push({"a": torch.ones(1)}) == {"a": torch.tensor([-1.0]), "b": torch.tensor([0.0])}
    share.push({})
    assert share.pull() == {"a": torch.tensor([-1.0]), "b": torch.tensor([0.0])}
    assert [weight.grad for weight in weights.values()] == [None, None]


def test_what_a_push_answers_does_not_change_later() -> None:
    weights = weights_of(a=1)
    share = DenseShard(weights, torch.optim.SGD(weights.values(), lr=1.0), (0, 1))
    first = share.push({"a": torch.ones(1)})
    share.push({"a": torch.ones(1)})
    assert first["a"].tolist() == [-1.0]


def test_a_step_that_is_raised_never_decreases() -> None:
    share = DenseShard({}, None, (0, 1))
    share.raise_step(5)
    share.raise_step(3)
    assert share.step == 5


def test_every_push_counts_one_step() -> None:
    share = DenseShard({}, None, (0, 1))
    share.step = 7
    share.push({})
    assert share.step == 8
    with pytest.raises(FeatureError, match="whole number"):
        share.step = -1


def test_gradients_that_do_not_fit_change_nothing() -> None:
    weights = weights_of(a=2, b=1)
    share = DenseShard(weights, torch.optim.SGD(weights.values(), lr=1.0), (0, 2))
    with pytest.raises(FeatureError, match="server 0 does not own the weight 'b'"):
        share.push({"a": torch.ones(2), "b": torch.ones(1)})
    with pytest.raises(FeatureError, match=r"the gradient of 'a' has shape \(1,\) and float32"):
        share.push({"a": torch.ones(1)})
    assert (share.step, weights["a"].tolist()) == (0, [0.0, 0.0])


def test_weights_need_an_optimizer_that_holds_them() -> None:
    with pytest.raises(FeatureError, match="need an optimizer"):
        DenseShard(weights_of(a=1), None, (0, 1))
    other = weights_of(b=1)
    with pytest.raises(FeatureError, match="does not hold 'a'"):
        DenseShard({**weights_of(a=1), **other}, torch.optim.SGD(other.values(), lr=1.0), (0, 1))


# As bytes


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_shard_resumes_where_its_dump_was_taken(name: str) -> None:
    first, second = small_module(), small_module()
    old = DenseShard(first, OPTIMIZERS[name](list(first.values())), (0, 1))
    new = DenseShard(second, OPTIMIZERS[name](list(second.values())), (0, 1))
    for seed in range(3):
        old.push(gradients(first, seed))
    new.push(gradients(second, 9))  # of which nothing may remain
    new.load(old.dump())
    assert new.step == 3
    for seed in range(3, 6):
        assert_close(new.push(gradients(second, seed)), old.push(gradients(first, seed)), rtol=0, atol=0)


def test_a_share_that_has_seen_no_gradient_takes_the_place_of_one_that_has() -> None:
    first, second = small_module(), small_module()
    old = DenseShard(first, torch.optim.Adam(first.values()), (0, 1))
    adam = torch.optim.Adam(second.values())
    new = DenseShard(second, adam, (0, 1))
    new.push(gradients(second, 0))
    new.load(old.dump())
    assert not adam.state
    assert_close(new.pull(), {name: weight.detach() for name, weight in first.items()})


def test_what_does_not_fit_is_refused_before_anything_changes() -> None:
    weights = small_module()
    share = DenseShard(weights, torch.optim.SGD(weights.values(), lr=1.0), (0, 1))
    renamed = {"other": weights["bias"], "kernel": weights["kernel"], "scale": weights["scale"]}
    wider = {**weights, "bias": nn.Parameter(torch.zeros(3))}
    with pytest.raises(RestoreError, match="the saved state has no weight 'bias'"):
        share.load(dump_dense(renamed, torch.optim.SGD(renamed.values(), lr=1.0)))
    with pytest.raises(RestoreError, match=r"'bias': the saved one has shape \(3,\) and float32"):
        share.load(dump_dense(wider, torch.optim.SGD(wider.values(), lr=1.0)))
    with pytest.raises(RestoreError, match="the state of Adam: the optimizer here is SGD"):
        share.load(dump_dense(small_module(), torch.optim.Adam(weights.values())))
    groups = [{"params": [weights["bias"]]}, {"params": [weights["kernel"], weights["scale"]]}]
    with pytest.raises(RestoreError, match="an optimizer of 2 parameter groups: there are 1 here"):
        share.load(dump_dense(small_module(), torch.optim.SGD(groups, lr=1.0)))
    assert_close(share.pull(), {name: weight.detach() for name, weight in small_module().items()})


@pytest.mark.parametrize("data", [b"", b"no safetensors", bytes(100)])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(RestoreError, match=f"these {len(data)} bytes hold no dense weights"):
        read_dense(data)


def test_a_byte_that_changed_on_the_way_is_found() -> None:
    weights = weights_of(a=1)
    data = bytearray(dump_dense(weights, torch.optim.SGD(weights.values(), lr=1.0)))
    data[-1] ^= 1
    with pytest.raises(RestoreError, match="checksum"):
        read_dense(bytes(data))


def test_foreign_safetensors_are_refused() -> None:
    from safetensors.torch import save

    with pytest.raises(RestoreError, match="hold no dense weights"):
        read_dense(save({"weight/a": torch.zeros(1)}))


def test_state_that_is_no_plain_value_cannot_be_saved() -> None:
    weights = weights_of(a=1)
    optimizer = torch.optim.SGD(weights.values(), lr=1.0)
    optimizer.state[weights["a"]]["history"] = [1, object()]
    with pytest.raises(SaveError, match=r"cannot save state/a/history/1: it is a builtins\.object"):
        dump_dense(weights, optimizer)


def test_states_of_several_servers_fill_one_module() -> None:
    trained, empty = small_module(), small_module()
    rate: Any = {"lr": lambda step: 1.0 / (1 + step)}
    optimizer, other = Adamom(trained.values(), **rate), Adamom(empty.values(), **rate)
    for weight, gradient in zip(trained.values(), gradients(trained, 0).values(), strict=True):
        weight.grad = gradient
    optimizer.step()
    halves = [{"kernel": trained["kernel"]}, {"bias": trained["bias"], "scale": trained["scale"]}]
    load_dense_states(empty, other, [read_dense(dump_dense(half, optimizer)) for half in halves])
    assert_close(dict(empty), dict(trained))
    assert other.param_groups[0]["step"] == 1
    assert_close(other.state[empty["bias"]]["m"], optimizer.state[trained["bias"]]["m"])


def test_tensors_of_any_type_are_packed_and_found_again() -> None:
    tensors = [
        torch.tensor(1.5),
        torch.arange(3, dtype=torch.bfloat16),
        torch.arange(6, dtype=torch.float64).view(2, 3).T,
        torch.empty(0),
    ]
    data = pack_tensors(tensors)
    assert_close(unpack_tensors(data, tensors), tensors)
    with pytest.raises(FeatureError, match="got 8"):
        unpack_tensors(data[:8], tensors)
