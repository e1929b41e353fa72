from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.dense.restores import restore_dense
from torch import Tensor, nn
from torch.optim import lr_scheduler as lr

from monolith.checkpoint.dense.custom_restore import CustomRestore
from monolith.checkpoint.dense.state import capture_dense
from monolith.errors import RestoreError, SaveError
from monolith.feature import CONCAT, FeatureColumn, FeatureSlot, Layout, SlotConfig, Sum
from monolith.model import EmbeddingCollection, EmbeddingOptimizer
from monolith.nn import Adamom, RateSchedule, RMSprop, Shampoo
from monolith.table import PolynomialDecay

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "adam with a tensor for a rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
    "our adamom": lambda p: Adamom(p, lr=0.1),
    "our rmsprop": lambda p: RMSprop(p, lr=0.1),
    "our shampoo": lambda p: Shampoo(p, lr=0.1, warmup=2, tau_1=1, tau_2=1),
    "our adamom with a function for a rate": lambda p: Adamom(p, lr=lambda step: 0.1 / (step + 1)),
}


class Model(nn.Module):
    def __init__(self, *, seed: int = 0, swapped: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        parts = {"first": nn.Linear(3, 4), "second": nn.Linear(4, 4), "last": nn.Linear(4, 1)}
        for name in reversed(parts) if swapped else parts:
            self.add_module(name, parts[name])

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, skip: int = 0) -> None:
    draws = torch.Generator().manual_seed(9)
    for step in range(skip + steps):
        x = torch.rand(8, 3, generator=draws)
        if step >= skip:
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()


def weights(model: nn.Module) -> dict[str, list[Any]]:
    return {name: tensor.tolist() for name, tensor in sorted(model.state_dict().items())}


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return f"{tmp_path}/model.ckpt-5"


# Optimizers


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_run_resumes_as_if_it_had_never_stopped(prefix: str, make: Any) -> None:
    model = Model()
    optimizer = make(model.parameters())
    train(model, optimizer, 5)
    capture_dense(model, [optimizer]).write_files(prefix)
    train(model, optimizer, 5, skip=5)
    other = Model(seed=1)
    resumed = make(other.parameters())
    report = restore_dense(prefix, other, [resumed])
    train(other, resumed, 5, skip=5)
    assert weights(other) == weights(model)
    assert report.complete


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_state_finds_its_parameter_in_another_order(prefix: str, make: Any) -> None:
    model = Model()
    optimizer = make(model.parameters())
    train(model, optimizer, 5)
    capture_dense(model, [optimizer]).write_files(prefix)
    train(model, optimizer, 2, skip=5)
    other = Model(seed=1, swapped=True)
    assert list(other.state_dict()) != list(model.state_dict())
    resumed = make(other.parameters())
    restore_dense(prefix, other, [resumed])
    train(other, resumed, 2, skip=5)
    assert weights(other) == weights(model)


def test_lbfgs_whose_state_is_lists(prefix: str) -> None:
    def closure_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).square().sum()
            loss.backward()
            return loss

        return closure

    model, other = Model(), Model(seed=1)
    first, second = (torch.optim.LBFGS(m.parameters(), max_iter=3) for m in (model, other))
    first.step(closure_of(model, first))
    capture_dense(model, [first]).write_files(prefix)
    restore_dense(prefix, other, [second])
    for m, optimizer in ((model, first), (other, second)):
        optimizer.step(closure_of(m, optimizer))
    assert weights(other) == weights(model)


def grouped(model: Model, order: str, **settings: Any) -> torch.optim.Optimizer:
    """Adam with one group per module, `f`irst, `s`econd, `l`ast; "fs,l" has the first two in one."""
    modules = {name[0]: module for name, module in model.named_children()}
    rates = {"f": 0.1, "s": 0.1, "l": 0.3}
    groups = [
        {"params": [p for key in keys for p in modules[key].parameters()], "lr": rates[keys[0]]}
        for keys in order.split(",")
    ]
    return torch.optim.Adam(groups, **settings)


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def test_settings_of_a_group_follow_its_parameters(prefix: str) -> None:
    model, other = Model(), Model(seed=1)
    optimizer = grouped(model, "f,s,l")
    optimizer.param_groups[2]["lr"] = 0.7
    train(model, optimizer, 2)
    capture_dense(model, [optimizer]).write_files(prefix)
    resumed = grouped(other, "l,sf")
    restore_dense(prefix, other, [resumed])
    assert rates(resumed) == [0.7, 0.1]
    train(model, optimizer, 2, skip=2)
    train(other, resumed, 2, skip=2)
    assert weights(other) == weights(model)


def test_groups_that_fall_together_must_have_had_the_same_settings(prefix: str) -> None:
    model, other = Model(), Model(seed=1)
    optimizer = grouped(model, "f,s,l")
    train(model, optimizer, 2)
    capture_dense(model, [optimizer]).write_files(prefix)
    resumed, before = grouped(other, "fl,s"), weights(other)
    with pytest.raises(RestoreError, match=r"group 0 has parameters of groups 0, 2 .* settings differ"):
        restore_dense(prefix, other, [resumed])
    assert weights(other) == before
    report = restore_dense(prefix, other, [resumed], strict=False)
    assert "settings differ" in report.reset["optimizer 0"]
    assert rates(resumed) == [0.1, 0.1]
    assert not resumed.state


def test_how_the_steps_are_computed_is_for_the_present_run_to_say(prefix: str) -> None:
    model, other = Model(), Model(seed=1)
    optimizer = torch.optim.Adam(model.named_parameters(), lr=0.3, foreach=True)
    train(model, optimizer, 2)
    capture_dense(model, [optimizer]).write_files(prefix)
    resumed = torch.optim.Adam(other.named_parameters(), lr=0.1, fused=True)
    names = resumed.param_groups[0]["param_names"]
    restore_dense(prefix, other, [resumed])
    (group,) = resumed.param_groups
    assert (group["lr"], group["foreach"], group["fused"], group["param_names"]) == (0.3, None, True, names)
    train(other, resumed, 1, skip=2)


def test_a_rate_that_is_a_function_stays_one(prefix: str) -> None:
    model, other = Model(), Model(seed=1)
    optimizer = Adamom(model.parameters(), lr=lambda step: 1.0 + step)
    train(model, optimizer, 3)
    capture_dense(model, [optimizer]).write_files(prefix)
    resumed = Adamom(other.parameters(), lr=lambda step: 0.5 + step)
    restore_dense(prefix, other, [resumed])
    (group,) = resumed.param_groups
    assert group["lr"](0) == 0.5
    assert group["step"] == 3


def test_several_optimizers_by_name(prefix: str) -> None:
    def make(model: Model) -> dict[str, torch.optim.Optimizer]:
        return {
            "tower": torch.optim.Adam(model.first.parameters()),
            "head": torch.optim.SGD([*model.second.parameters(), *model.last.parameters()], 0.1, 0.9),
        }

    model, other = Model(), Model(seed=1)
    optimizers, resumed = make(model), make(other)
    for optimizer in optimizers.values():
        train(model, optimizer, 2)
    capture_dense(model, optimizers).write_files(prefix)
    restore_dense(prefix, other, dict(reversed(resumed.items())))
    for name in optimizers:
        assert str(resumed[name].state_dict()) == str(optimizers[name].state_dict())


def test_an_embedding_optimizer_is_a_global_step(prefix: str) -> None:
    def make(step: int) -> tuple[EmbeddingCollection, EmbeddingOptimizer]:
        slot = FeatureSlot(SlotConfig(name="item"))
        column = FeatureColumn(slot, "item", Sum())
        collection = EmbeddingCollection([Layout("v", CONCAT, [column.lookup(slot.add_slice(2))])])
        return collection, EmbeddingOptimizer(collection, global_step=step)

    (model, optimizer), (other, resumed) = make(41), make(0)
    capture_dense(model, {"rows": optimizer}).write_files(prefix)
    report = restore_dense(prefix, other, {"rows": resumed})
    assert resumed.global_step == 41
    assert report.loaded == {"optimizer rows": ""}
    resumed.global_step = 0
    report = restore_dense(prefix, other, {"rows": resumed}, optimizer_state="reset")
    assert resumed.global_step == 41, "a counter is no state of an optimizer"


def test_parameters_that_never_had_a_gradient_have_no_state(prefix: str) -> None:
    model, other = Model(), Model(seed=1)
    optimizer, resumed = (torch.optim.Adam(m.parameters()) for m in (model, other))
    model.first(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    capture_dense(model, [optimizer]).write_files(prefix)
    report = restore_dense(prefix, other, [resumed])
    assert set(resumed.state) == {other.first.weight, other.first.bias}
    assert report.loaded["optimizer 0"] == "state of 2 parameters loaded"


def test_another_optimizer_is_refused_unless_its_state_is_reset(prefix: str) -> None:
    model = Model()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.1)
    train(model, optimizer, 2)
    capture_dense(model, [optimizer]).write_files(prefix)
    other = Model(seed=1)
    before = weights(other)
    resumed = RMSprop(other.parameters(), lr=0.25)
    with pytest.raises(
        RestoreError,
        match=r"(?s)optimizer 0: it is a torch.RMSprop in the checkpoint, a monolith.RMSprop.*'reset'",
    ):
        restore_dense(prefix, other, [resumed])
    assert weights(other) == before
    for choice in ({"optimizer_state": "reset"}, {"optimizer_state": "auto"}, {"strict": False}):
        other = Model(seed=1)
        resumed = RMSprop(other.parameters(), lr=0.25)
        report = restore_dense(prefix, other, [resumed], **choice)
        assert weights(other) == weights(model)
        assert (rates(resumed), len(resumed.state)) == ([0.25], 0)
        assert "optimizer 0" in report.reset
    with pytest.raises(RestoreError, match="'keep', 'reset' or 'auto'"):
        restore_dense(prefix, other, [resumed], optimizer_state="drop")  # type: ignore[arg-type]


def test_an_optimizer_that_was_not_saved_is_missing(prefix: str) -> None:
    model = Model()
    capture_dense(model, {"a": torch.optim.Adam(model.parameters())}).write_files(prefix)
    optimizers = {"b": torch.optim.Adam(model.parameters())}
    with pytest.raises(RestoreError, match="optimizer b: not found in checkpoint"):
        restore_dense(prefix, model, optimizers)
    assert restore_dense(prefix, model, optimizers, strict=False).missing == ("optimizer b",)


def test_a_checkpoint_without_training_state(prefix: str) -> None:
    model = Model()
    assert len(capture_dense(model, random=False).write_files(prefix)) == 1
    optimizers = [torch.optim.Adam(model.parameters())]
    with pytest.raises(
        RestoreError, match=r"(?s)optimizer 0: not found in checkpoint.*optimizer_state='reset'"
    ):
        restore_dense(prefix, model, optimizers)
    report = restore_dense(prefix, model, optimizers, optimizer_state="reset")
    assert report.reset == {"optimizer 0": ""}


def test_a_parameter_that_is_not_in_the_model_is_refused(prefix: str) -> None:
    model = Model()
    stray = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(5))], lr=0.1)
    with pytest.raises(SaveError, match=r"optimizer 'o', in group 0, trains a tensor of shape \(5,\)"):
        capture_dense(model, {"o": stray})
    capture_dense(model, {"o": torch.optim.SGD(model.parameters(), lr=0.1)}).write_files(prefix)
    before = weights(model)
    with pytest.raises(RestoreError, match=r"optimizer 'o', in group 0, trains a tensor of shape \(5,\)"):
        restore_dense(prefix, model, {"o": stray})
    assert weights(model) == before


def test_state_of_renamed_variables_comes_along(prefix: str) -> None:
    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bottom, self.second, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)

        forward = Model.forward

        @property
        def first(self) -> nn.Linear:
            return self.bottom

    model, other = Model(), Renamed()
    optimizer, resumed = (torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, other))
    train(model, optimizer, 3)
    capture_dense(model, [optimizer]).write_files(prefix)
    custom = CustomRestore(alias_map={f"bottom.{leaf}": f"first.{leaf}" for leaf in ("weight", "bias")})
    report = restore_dense(prefix, other, [resumed], custom=custom)
    assert report.renamed == {"bottom.weight": "first.weight", "bottom.bias": "first.bias"}
    train(model, optimizer, 2, skip=3)
    train(other, resumed, 2, skip=3)
    assert torch.equal(other.bottom.weight, model.first.weight)


def test_state_is_cut_and_shaped_as_its_variable_is(prefix: str) -> None:
    def trained(tensors: dict[str, Tensor]) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(tensors.values())
        for number, tensor in enumerate(tensors.values()):
            tensor.grad = torch.arange(float(tensor.numel())).reshape(tensor.shape) + number
        optimizer.step()
        return optimizer

    before = {"x": torch.zeros(4, 2, requires_grad=True)}
    optimizer = trained(before)
    momentum = optimizer.state[before["x"]]["exp_avg"]
    capture_dense(before, [optimizer]).write_files(prefix)
    parts = {f"x/part_{i}": torch.zeros(2, 2, requires_grad=True) for i in range(2)}
    resumed = torch.optim.Adam(parts.values())
    restore_dense(prefix, parts, [resumed])
    assert torch.equal(torch.cat([resumed.state[part]["exp_avg"] for part in parts.values()]), momentum)
    shaped = {"x": torch.zeros(8, requires_grad=True)}
    resumed = torch.optim.Adam(shaped.values())
    restore_dense(prefix, shaped, [resumed], reshape=True)
    assert torch.equal(resumed.state[shaped["x"]]["exp_avg"], momentum.reshape(8))
    assert resumed.state[shaped["x"]]["step"] == 1

    optimizer = trained(parts)
    capture_dense(parts, [optimizer]).write_files(prefix)
    again = {name: torch.zeros(2, 2, requires_grad=True) for name in parts}
    resumed = torch.optim.Adam(again.values())
    assert restore_dense(prefix, again, [resumed]).complete
    for name in parts:
        assert torch.equal(resumed.state[again[name]]["exp_avg"], optimizer.state[parts[name]]["exp_avg"])
    other = {
        "x/part_0": torch.zeros(3, 2, requires_grad=True),
        "x/part_1": torch.zeros(1, 2, requires_grad=True),
    }
    resumed = torch.optim.Adam(other.values())
    assert restore_dense(prefix, other, [resumed]).reset == {
        "optimizer 0": "state of x/part_0, x/part_1 reset"
    }


def test_state_that_cannot_be_shaped_is_reset_and_said(prefix: str) -> None:
    before, after = ({"x": torch.zeros(shape, requires_grad=True)} for shape in ((4, 2), (8,)))
    optimizer = Shampoo(before.values())
    before["x"].grad = torch.ones(4, 2)
    optimizer.step()
    capture_dense(before, [optimizer]).write_files(prefix)
    resumed = Shampoo(after.values())
    report = restore_dense(prefix, after, [resumed], reshape=True)
    assert report.reset == {"optimizer 0": "state of x reset"}
    assert not resumed.state


def test_state_of_tied_weights_is_found_by_any_of_their_names(prefix: str) -> None:
    class Tied(nn.Module):
        def __init__(self, *order: str) -> None:
            super().__init__()
            weight = nn.Parameter(torch.ones(2, 2))
            for name in order:
                self.add_module(name, nn.Linear(2, 2, bias=False))
                self.get_submodule(name).weight = weight

    model, other = Tied("a", "b"), Tied("b", "a")
    optimizer, resumed = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, other))
    model.a.weight.grad = torch.full((2, 2), 3.0)
    optimizer.step()
    capture_dense(model, [optimizer]).write_files(prefix)
    restore_dense(prefix, other, [resumed])
    assert resumed.state[other.b.weight]["momentum_buffer"][0, 0] == 3.0
    assert other.a.weight is other.b.weight


def test_live_variables_keep_their_state(prefix: str) -> None:
    model, other = Model(), Model(seed=1)
    optimizer, resumed = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, other))
    train(model, optimizer, 2)
    capture_dense(model, [optimizer]).write_files(prefix)
    train(other, resumed, 4)
    live = resumed.state[other.last.weight]["momentum_buffer"].clone()
    restore_dense(prefix, other, [resumed], only=lambda name: not name.startswith("last"))
    assert torch.equal(resumed.state[other.last.weight]["momentum_buffer"], live)
    saved = optimizer.state[model.first.weight]["momentum_buffer"]
    assert torch.equal(resumed.state[other.first.weight]["momentum_buffer"], saved)


class Stubborn(torch.optim.SGD):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["param_groups"][0]["lr"] != 0.5:
            raise KeyError("no")
        super().load_state_dict(state_dict)


def test_where_one_refuses_its_state_nothing_is_restored(prefix: str) -> None:
    def make(model: Model, rate: float) -> tuple[dict[str, torch.optim.Optimizer], lr.LRScheduler]:
        optimizers = {
            "a": torch.optim.SGD(model.first.parameters(), lr=rate, momentum=0.9),
            "b": Stubborn(model.second.parameters(), lr=rate),
        }
        return optimizers, lr.ExponentialLR(optimizers["a"], 0.5)

    model, other = Model(), Model(seed=1)
    optimizers, schedule = make(model, 0.1)
    train(model, optimizers["a"], 2)
    schedule.step()
    capture_dense(model, optimizers, [schedule]).write_files(prefix)
    resumed, other_schedule = make(other, 0.5)
    train(other, resumed["a"], 1)
    before, momentum = weights(other), resumed["a"].state[other.first.weight]["momentum_buffer"].clone()
    for order in (resumed, dict(reversed(resumed.items()))):
        with pytest.raises(RestoreError, match="optimizer b: Stubborn refused its state: 'no'"):
            restore_dense(prefix, other, order, [other_schedule])
        assert weights(other) == before
        assert torch.equal(resumed["a"].state[other.first.weight]["momentum_buffer"], momentum)
        assert rates(resumed["a"]) == [0.5]
        assert other_schedule.last_epoch == 0


# Schedulers


SCHEDULERS = {
    "step": lambda o: lr.StepLR(o, 2),
    "milestones": lambda o: lr.MultiStepLR(o, [1, 4]),
    "function": lambda o: lr.LambdaLR(o, lambda step: 1 / (step + 1)),
    "one cycle": lambda o: lr.OneCycleLR(o, 0.3, total_steps=12),
    "cyclic": lambda o: lr.CyclicLR(o, 0.1, 0.3, step_size_up=3, cycle_momentum=False),
    "cosine": lambda o: lr.CosineAnnealingWarmRestarts(o, 3),
    "sequence": lambda o: lr.SequentialLR(o, [lr.ConstantLR(o), lr.LinearLR(o)], [2]),
    "chain": lambda o: lr.ChainedScheduler([lr.ConstantLR(o), lr.ExponentialLR(o, 0.5)]),
    "our own": lambda o: RateSchedule(o, PolynomialDecay(initial_learning_rate=0.5, decay_steps=10)),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_schedule_resumes_where_it_was(prefix: str, make: Any) -> None:
    def steps(optimizer: torch.optim.Optimizer, schedule: lr.LRScheduler, count: int) -> list[float]:
        found = []
        for _ in range(count):
            optimizer.step()
            schedule.step()
            found += rates(optimizer)
        return found

    model, other = Model(), Model(seed=1)
    optimizer, resumed = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    schedule = make(optimizer)
    steps(optimizer, schedule, 3)
    capture_dense(model, [optimizer], {"rate": schedule}).write_files(prefix)
    other_schedule = make(resumed)
    report = restore_dense(prefix, other, [resumed], {"rate": other_schedule})
    assert report.loaded["scheduler rate"] == ""
    assert steps(resumed, other_schedule, 5) == steps(optimizer, schedule, 5)


def test_a_plateau_remembers_its_best(prefix: str) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = lr.ReduceLROnPlateau(optimizer, patience=1)
    capture_dense(model, [optimizer], [schedule]).write_files(prefix)
    schedule.step(3.0)
    capture_dense(model, [optimizer], [schedule]).write_files(f"{prefix}0")
    restore_dense(prefix, model, [optimizer], [schedule])
    assert schedule.best == float("inf")
    restore_dense(f"{prefix}0", model, [optimizer], [schedule])
    assert schedule.best == 3.0


def test_another_schedule_is_refused(prefix: str) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    capture_dense(model, [optimizer], [lr.StepLR(optimizer, 2)]).write_files(prefix)
    with pytest.raises(RestoreError, match=r"scheduler 0: it is a torch.StepLR in the checkpoint"):
        restore_dense(prefix, model, [optimizer], [lr.ExponentialLR(optimizer, 0.5)])
    with pytest.raises(RestoreError, match="scheduler 1: not found"):
        restore_dense(prefix, model, [optimizer], [lr.StepLR(optimizer, 2), lr.StepLR(optimizer, 2)])


# Scaler and generators


def test_a_gradient_scaler_comes_back(prefix: str) -> None:
    model, scaler = Model(), torch.amp.GradScaler("cpu", init_scale=8.0)
    capture_dense(model, scaler=scaler).write_files(prefix)
    other = torch.amp.GradScaler("cpu")
    assert restore_dense(prefix, model, scaler=other).loaded["gradient scaler"] == ""
    assert other.get_scale() == 8.0


def test_a_scaler_that_is_new_or_turned_off_is_no_reason_to_fail(prefix: str) -> None:
    model, off = Model(), torch.amp.GradScaler("cpu", enabled=False)
    capture_dense(model, scaler=off).write_files(prefix)
    assert restore_dense(prefix, model, scaler=torch.amp.GradScaler("cpu")).reset == {"gradient scaler": ""}
    capture_dense(model, scaler=torch.amp.GradScaler("cpu")).write_files(prefix)
    assert "gradient scaler" not in restore_dense(prefix, model, scaler=off).loaded


def test_random_generators_are_set_if_asked(prefix: str) -> None:
    model = Model()
    capture_dense(model).write_files(prefix)
    first = torch.rand(3).tolist()
    restore_dense(prefix, model)
    assert torch.rand(3).tolist() != first
    assert restore_dense(prefix, model, random=True).loaded["random generators"] == ""
    assert torch.rand(3).tolist() == first


# Saved state that makes no sense


def test_unknown_keys_are_refused(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from monolith.checkpoint.dense import training_state

    encode = training_state._encode_optimizer
    monkeypatch.setattr(training_state, "_encode_optimizer", lambda *args: encode(*args) | {"tricks": 1})
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    capture_dense(model, [optimizer]).write_files(prefix)
    with pytest.raises(RestoreError, match=r"optimizer 0 has unknown keys: .*tricks"):
        restore_dense(prefix, model, [optimizer])
