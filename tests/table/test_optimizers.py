from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest

from monolith.errors import ConfigError
from monolith.table import (
    OPTIMIZERS,
    STATE_FIELDS,
    Adadelta,
    Adagrad,
    Adam,
    BatchSoftmax,
    DelayCompensated,
    DynamicWdAdagrad,
    Ftrl,
    GroupAdagrad,
    GroupFtrl,
    MovingAverage,
    Optimizer,
    Rmsprop,
    RowwiseAdagrad,
    Sgd,
    StochasticRounding,
    from_upstream,
)
from monolith.table.update_rules import state_views, take_step


def test_the_table_of_optimizers_is_complete_and_named_by_kind() -> None:
    assert {kind: cls.kind for kind, cls in OPTIMIZERS.items()} == {kind: kind for kind in OPTIMIZERS}
    assert OPTIMIZERS.keys() == STATE_FIELDS.keys()


@pytest.mark.parametrize(
    ("kind", "floats"),
    [
        ("sgd", 0),
        ("adagrad", 3),
        ("dynamic_wd_adagrad", 3 + 2),
        ("adadelta", 6),
        ("adam", 6 + 2),
        ("amsgrad", 9 + 2),
        ("batch_softmax", 2),
        ("ftrl", 6),
        ("group_ftrl", 6),
        ("group_adagrad", 1),
        ("momentum", 3),
        ("moving_average", 0),
        ("rmsprop", 3),
        ("rmspropv2", 3),
        ("rowwise_adagrad", 1),
    ],
)
def test_state_is_as_wide_as_documented(kind: str, floats: int) -> None:
    optimizer = OPTIMIZERS[kind]()
    assert optimizer.state_dim(3) == floats
    assert optimizer.initial_state(3).shape == (floats,)
    assert optimizer.initial_state(3).dtype == np.float32


def test_state_starts_where_the_settings_say() -> None:
    assert Adagrad(initial_accumulator_value=0.5).initial_state(2).tolist() == [0.5, 0.5]
    assert Adam(beta1=0.5, beta2=0.25).initial_state(1).tolist() == [0, 0, 0.5, 0.25]
    assert Ftrl(initial_accumulator_value=0.5).initial_state(1).tolist() == [0.5, 0]
    assert GroupAdagrad(initial_accumulator_value=2.0).initial_state(5).tolist() == [2.0]
    assert BatchSoftmax().initial_state(1).view(np.int64).tolist() == [0]


def test_defaults_are_upstreams_but_for_the_rate_of_adagrad() -> None:
    assert Adam() == Adam(learning_rate=0.01, beta1=0.9, beta2=0.99, epsilon=0.01)
    assert Adagrad() == Adagrad(learning_rate=0.05, initial_accumulator_value=0.1)
    assert DynamicWdAdagrad().learning_rate == Adagrad().learning_rate
    assert (Ftrl().beta, Ftrl().initial_accumulator_value) == (0.0, 0.1)
    assert (GroupFtrl().beta, GroupFtrl().initial_accumulator_value) == (1.0, 0.0)
    assert BatchSoftmax().learning_rate == 0.1
    assert Adadelta().rho == 0.9


def test_equal_settings_are_equal_and_print_the_same() -> None:
    assert Sgd() == Sgd(learning_rate=0.01)
    assert str(Sgd()) == "sgd(learning_rate=0.01, warmup_steps=0)"
    assert Sgd(learning_rate=0.02) != Sgd()
    assert str(DelayCompensated(Sgd(), 0.5)) == f"delay_compensated(base={Sgd()}, lambda_=0.5)"
    assert len({Sgd(), Sgd(), Adagrad()}) == 2


def test_an_optimizer_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Sgd().learning_rate = 1.0  # type: ignore[misc]
    assert replace(Sgd(), learning_rate=1.0).learning_rate == 1.0


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("sgd", {"learning_rate": -0.1}),
        ("sgd", {"learning_rate": float("nan")}),
        ("sgd", {"learning_rate": float("inf")}),
        ("sgd", {"warmup_steps": -1}),
        ("sgd", {"warmup_steps": 1.5}),
        ("adagrad", {"initial_accumulator_value": -1.0}),
        ("adagrad", {"weight_decay": -1.0}),
        ("adam", {"beta1": 1.0}),
        ("adam", {"beta2": -0.1}),
        ("adam", {"epsilon": -1.0}),
        ("adadelta", {"rho": 1.1}),
        ("momentum", {"momentum": 1.1}),
        ("ftrl", {"l1": -1.0}),
        ("group_ftrl", {"l2": -1.0}),
        ("group_adagrad", {"beta": -1.0}),
    ],
)
def test_settings_out_of_range_are_refused_by_name(kind: str, settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=f"{kind}: {name}"):
        OPTIMIZERS[kind](**settings)


def test_dynamic_weight_decay_has_no_rule_so_it_is_off_and_cannot_be_had() -> None:
    assert not DynamicWdAdagrad().enable_dynamic_wd
    with pytest.raises(ConfigError, match="no published rule"):
        DynamicWdAdagrad(enable_dynamic_wd=True)


def test_moving_average_has_no_rate_and_needs_none() -> None:
    assert (MovingAverage().learning_rate, MovingAverage().warmup_steps) == (0.0, 0)


def test_decorators_take_rate_and_state_from_their_base() -> None:
    base = Adagrad(learning_rate=0.5, warmup_steps=7)
    both = StochasticRounding(DelayCompensated(base, 0.25))
    assert both.rule is base
    assert (both.learning_rate, both.warmup_steps, both.state_dim(3)) == (0.5, 7, 3)
    assert (both.delay_compensation, both.stochastic_rounding) == (0.25, True)
    assert (base.delay_compensation, base.stochastic_rounding) == (None, False)


def test_a_decorator_is_not_applied_twice() -> None:
    with pytest.raises(ConfigError):
        StochasticRounding(DelayCompensated(StochasticRounding(Sgd()), 0.1))
    with pytest.raises(ConfigError):
        DelayCompensated(DelayCompensated(Sgd(), 0.1), 0.1)
    with pytest.raises(ConfigError):
        DelayCompensated(Sgd(), float("nan"))


# From upstream's messages


def test_upstream_names_are_understood() -> None:
    assert from_upstream("adagrad", {"weight_decay_factor": 0.5, "hessian_compression_times": 3}) == Adagrad(
        learning_rate=0.001, weight_decay=0.5
    )
    assert from_upstream(
        "ftrl", {"l1_regularization_strength": 1.0, "l2_regularization_strength": 2.0, "dim_size": 4}
    ) == Ftrl(l1=1.0, l2=2.0)
    assert from_upstream("adadelta", {"averaging_ratio": 0.5}) == Adadelta(rho=0.5)
    assert from_upstream("adam", {"use_beta1_warmup": True}) == Adam()


def test_what_a_message_leaves_out_has_its_proto_default() -> None:
    assert from_upstream("adagrad", {}) == Adagrad(learning_rate=0.001)
    assert from_upstream("dynamic_wd_adagrad", {}) == DynamicWdAdagrad(
        learning_rate=0.001, decouple_weight_decay=False
    )
    for kind in OPTIMIZERS.keys() - {"adagrad", "dynamic_wd_adagrad"}:
        assert from_upstream(kind, {}) == OPTIMIZERS[kind]()


def test_upstream_decorators_are_understood() -> None:
    assert from_upstream("dc", {"lambda_": 0.1, "base": "adadelta"}) == DelayCompensated(Adadelta(), 0.1)
    assert from_upstream("dc", {"base": {"sgd": {"learning_rate": 0.5}}}) == DelayCompensated(
        Sgd(learning_rate=0.5), 0.0
    )
    assert from_upstream("sgd", {"stochastic_rounding_float16": True}) == StochasticRounding(Sgd())


@pytest.mark.parametrize("name", ["weight_decay", "l1", "rho", "momentun", "use_beta1_warmup"])
def test_a_field_upstream_does_not_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        from_upstream("ftrl" if name != "weight_decay" else "adagrad", {name: 1.0})


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="adagard"):
        from_upstream("adagard", {})
    with pytest.raises(ConfigError, match="base"):
        from_upstream("dc", {"lambda_": 0.1})


# The rules where a formula alone would not do; the rest is in the vectors


def stepped(
    optimizer: Optimizer, w: list[float], *gradients: list[float], lr: float = 0.1
) -> tuple[list[float], dict[str, list[float]]]:
    values, state = np.float32(w), optimizer.initial_state(len(w))
    for number, gradient in enumerate(gradients):
        take_step(optimizer, values, state, np.float32(gradient), rate=lr, step=number)
    views = state_views(optimizer, state, len(w))
    return values.tolist(), {name: view.tolist() for name, view in views.items()}


def test_an_empty_accumulator_and_no_gradient_leave_the_value_alone() -> None:
    for optimizer in (
        Adagrad(initial_accumulator_value=0.0),
        DynamicWdAdagrad(initial_accumulator_value=0.0),
        GroupAdagrad(initial_accumulator_value=0.0),
        RowwiseAdagrad(initial_accumulator_value=0.0),
    ):
        assert stepped(optimizer, [0.5, -2.0], [0.0, 0.0])[0] == [0.5, -2.0]


def test_a_group_without_norm_and_threshold_becomes_zero() -> None:
    assert stepped(GroupFtrl(), [0.5, -2.0], [0.0, 0.0])[0] == [0.0, 0.0]
    assert stepped(GroupAdagrad(beta=1.0, initial_accumulator_value=0.0), [0.0], [0.0])[0] == [0.0]


def test_a_group_ftrl_value_that_never_saw_a_gradient_stays_zero() -> None:
    values, _ = stepped(GroupFtrl(beta=0.0), [0.0, 0.0], [1.0, 0.0])
    assert values[0] != 0
    assert values[1] == 0


@pytest.mark.parametrize("optimizer", [Ftrl(), GroupFtrl()], ids=str)
def test_a_rule_whose_state_divides_by_the_rate_waits_at_rate_zero(optimizer: Optimizer) -> None:
    before = stepped(optimizer, [0.5, -2.0])
    assert stepped(optimizer, [0.5, -2.0], [1.0, 3.0], lr=0.0) == before


def test_group_adagrad_accumulates_at_rate_zero_and_keeps_its_values() -> None:
    values, state = stepped(GroupAdagrad(initial_accumulator_value=1.0), [0.5, -2.0], [1.0, 3.0], lr=0.0)
    assert (values, state) == ([0.5, -2.0], {"grad_square_sum": [10.0]})


def test_rowwise_adagrad_has_one_rate_for_the_mean_of_the_squares() -> None:
    values, state = stepped(RowwiseAdagrad(initial_accumulator_value=0.0), [0.0, 1.0], [1.0, 7.0])
    assert state == {"norm": [25.0]}
    assert values == pytest.approx([-0.1 / 5, 1 - 0.7 / 5])


def test_rowwise_adagrad_of_one_value_is_adagrad() -> None:
    steps = [0.5], [2.0], [-1.0]
    for settings in ({}, {"weight_decay": 0.25}):
        rowwise, each = RowwiseAdagrad(**settings), Adagrad(**settings)
        assert stepped(rowwise, [1.5], *steps) == stepped(each, [1.5], *steps)


def test_ftrl_shrinks_both_signs_alike() -> None:
    values, _ = stepped(Ftrl(l1=0.5), [0.0, 0.0], [2.0, -2.0])
    assert values[0] == -values[1] < 0


def test_weight_decay_is_in_the_step_of_every_value() -> None:
    values, state = stepped(Adagrad(initial_accumulator_value=1.0, weight_decay=0.5), [2.0] * 11, [0.0] * 11)
    assert state["norm"] == [2.0] * 11
    np.testing.assert_allclose(values, 2 - 0.1 / 2**0.5, rtol=1e-6)


def test_decoupled_weight_decay_stays_out_of_the_accumulator() -> None:
    optimizer = DynamicWdAdagrad(initial_accumulator_value=0.0, weight_decay=0.5)
    values, state = stepped(optimizer, [2.0], [2.0])
    assert state["norm"] == [4.0]
    np.testing.assert_allclose(values, [2 - (0.1 / 2 * 2 + 0.1 * 0.5 * 2)], rtol=1e-6)


def test_rmsprop_uses_the_rate_it_is_given() -> None:
    values, _ = stepped(Rmsprop(learning_rate=0.01), [0.0], [10.0], lr=0.02)
    np.testing.assert_allclose(values, [-2 * 0.024025], rtol=1e-4)


def test_counters_hold_any_step() -> None:
    values, state = np.float32([0]), BatchSoftmax().initial_state(1)
    take_step(BatchSoftmax(), values, state, np.float32([0]), rate=0.1, step=2**62 + 1)
    assert state.view(np.int64).tolist() == [2**62 + 1]
