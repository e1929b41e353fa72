"""Every setting of features, tables and dense weights can be said by a config, and changes what is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import timedelta
from typing import Any, cast

import pytest
import torch

from monolith import table
from monolith.config import config_from_mapping, to_dict
from monolith.errors import ConfigError
from monolith.feature.slots import SlotConfig
from monolith.feature.spec.kinds import OF_ROWS, RowSettings
from monolith.model import UpdateConfig
from monolith.model.features import Feature
from monolith.model.ready import ReadyModel
from monolith.nn import GradClipType
from monolith.nn import optimizers as dense
from monolith.runtime.config import RunConfig
from monolith.runtime.config_task import ConfigTask
from monolith.table import AdmissionConfig, DelayCompensated, Sgd, StochasticRounding
from monolith.train.rate_schedule import ScheduleConfig
from monolith.train.task_loading import load_task

BASE = {
    "data": {"path": "clicks.csv"},
    "features": {"user": {"kind": "string"}, "item": {"kind": "int"}},
    "labels": {"click": {}},
    "model": {"type": "deepfm", "dim": 4, "hidden": [4]},
}


def built(**groups: Mapping[str, Any]) -> ConfigTask:
    """The task of a config: what `monolith train` makes of the file."""
    plain = {name: {**BASE.get(name, {}), **given} for name, given in {**BASE, **groups}.items()}
    run = config_from_mapping(RunConfig, plain, "the config")
    task = load_task("monolith.runtime.config_task:ConfigTask", dict(run.task), inputs=run.inputs)
    assert isinstance(task, ConfigTask)
    return task


def slots(task: ConfigTask) -> dict[str, SlotConfig]:
    columns = cast(ReadyModel, task.model()).embeddings._columns
    return {column.slot.name: column.slot.config for column in columns.values()}


DECAY = {
    "initial_learning_rate": 0.1,
    "decay_steps": 10,
    "end_learning_rate": 0.01,
}

ROWS: dict[str, tuple[Any, Callable[[SlotConfig], object], object]] = {
    "rows": ("people", lambda one: one.name, "people"),
    "optimizer": (
        {"type": "Sgd", "learning_rate": 0.3},
        lambda one: one.optimizer,
        table.Sgd(learning_rate=0.3),
    ),
    "bias_optimizer": (
        {"type": "MovingAverage", "momentum": 0.5},
        lambda one: one.bias_optimizer,
        table.MovingAverage(momentum=0.5),
    ),
    "initializer": ({"type": "Constant", "value": 0.5}, lambda one: one.initializer, table.Constant(0.5)),
    "bias_initializer": ({"type": "Ones"}, lambda one: one.bias_initializer, table.Ones()),
    "compressor": ({"type": "FixedR8", "range": 2.0}, lambda one: one.compressor, table.FixedR8(2.0)),
    "bias_compressor": ({"type": "Fp16"}, lambda one: one.bias_compressor, table.Fp16()),
    "learning_rate": (DECAY, lambda one: one.learning_rate(5), pytest.approx(0.055)),  # type: ignore[misc, operator]
    "bias_learning_rate": (0.7, lambda one: one.bias_learning_rate, 0.7),
    "occurrence_threshold": (3, lambda one: one.occurrence_threshold, 3),
    "admission": (
        {"kind": "probabilistic_filter", "equal": True},
        lambda one: one.admission,
        AdmissionConfig(kind="probabilistic_filter", equal=True),
    ),
    "expire_after": ("30d", lambda one: one.expire_after, timedelta(days=30)),
    "capacity_bytes": ("1MiB", lambda one: one.capacity_bytes, 1 << 20),
    "when_full": ("expire_oldest", lambda one: one.when_full, "expire_oldest"),
    "initial_rows": (1000, lambda one: one.initial_rows, 1000),
    "embedding_dtype": ("bfloat16", lambda one: one.embedding_dtype, "bfloat16"),
    "embedding_rounding": ("nearest", lambda one: one.embedding_rounding, "nearest"),
}
"""Key of `[features.user]` -> a value, where it ends up, and as what."""

ELSEWHERE = {"dim", "slot", "stochastic_rounding", "delay_compensation"}
"""Settings of rows that are not of a slot: the width of its vector, the high bits of its ids, and parts of
its optimizer."""


def test_every_setting_of_rows_is_tried() -> None:
    assert set(ROWS) | ELSEWHERE == set(OF_ROWS)
    python = {one.name for one in fields(Feature)} - {"name", "combiner", "shares"}
    renamed = {"slot": "rows", "slot_id": "slot"}
    missing = {renamed.get(name, name) for name in python} - {one.name for one in fields(RowSettings)}
    assert not missing, "a Feature in Python has what [features.NAME] of a file has not"


def test_an_optimizer_of_rows_may_round_and_compensate_delays() -> None:
    sgd = {"kind": "string", "optimizer": {"type": "Sgd", "learning_rate": 0.3}}
    more = {"stochastic_rounding": True, "delay_compensation": 0.5}
    [one] = [one for name, one in slots(built(features={"user": {**sgd, **more}})).items() if name == "user"]
    assert one.optimizer == StochasticRounding(DelayCompensated(Sgd(learning_rate=0.3), 0.5))
    with pytest.raises(ConfigError, match="set optimizer too"):
        built(features={"user": {"kind": "string", "stochastic_rounding": True}})


@pytest.mark.parametrize("key", ROWS)
def test_a_setting_of_rows_reaches_the_slot(key: str) -> None:
    value, found, wanted = ROWS[key]
    task = built(features={"user": {"kind": "string", key: value}})
    [plain] = [one for name, one in slots(built()).items() if name == "user"]
    [changed] = [one for name, one in slots(task).items() if name != "item"]
    assert found(changed) == wanted
    assert key == "learning_rate" or found(plain) != wanted
    again = config_from_mapping(type(task.features), task.features.to_dict(), "again")
    assert again == task.features  # as in a checkpoint


def test_a_feature_may_have_another_admission_than_all_others() -> None:
    task = built(
        features={"user": {"kind": "string", "admission": {"kind": "no_filter"}}},
        admission={"kind": "probabilistic_filter"},
    )
    assert {name: one.admission.kind for name, one in slots(task).items()} == {
        "user": "no_filter",
        "item": "probabilistic_filter",
    }


OPTIMIZERS: dict[str, tuple[dict[str, Any], type, dict[str, Any]]] = {
    "Adam": ({"betas": [0.8, 0.9]}, dense.EagerAdam, {"betas": (0.8, 0.9)}),
    "AdamW": ({"weight_decay": 0.2}, torch.optim.AdamW, {"weight_decay": 0.2}),
    "Sgd": ({"momentum": 0.5, "nesterov": True}, torch.optim.SGD, {"momentum": 0.5, "nesterov": True}),
    "Adagrad": ({"eps": 0.1}, torch.optim.Adagrad, {"eps": 0.1}),
    "RMSprop": ({"beta1": 0.5}, dense.RMSprop, {"beta1": 0.5}),
    "Adamom": ({"mom_decay": 0.5}, dense.Adamom, {"mom_decay": 0.5}),
    "Shampoo": ({"warmup": 7}, dense.Shampoo, {"warmup": 7}),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_optimizer_of_dense_weights(kind: str) -> None:
    settings, made, wanted = OPTIMIZERS[kind]
    task = built(task={"optimizer": {"type": f"Dense{kind}", **settings}, "dense_rate": 0.25})
    optimizer = task.dense_optimizer(task.model())
    assert type(optimizer) is made
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert {name: optimizer.param_groups[0][name] for name in wanted} == wanted


def test_adam_is_the_default_and_a_wrong_setting_is_named() -> None:
    task = built()
    optimizer = task.dense_optimizer(task.model())
    assert type(optimizer) is dense.EagerAdam
    assert optimizer.param_groups[0]["lr"] == 1e-3
    with pytest.raises(ConfigError, match="momentumm"):
        built(task={"optimizer": {"type": "DenseSgd", "momentumm": 0.5}})
    bad = built(task={"optimizer": {"type": "DenseSgd", "momentum": -1.0}})
    with pytest.raises(ConfigError, match=r"task\.optimizer: DenseSgd: Invalid momentum"):
        bad.dense_optimizer(bad.model())


def test_what_is_done_to_gradients_and_how_rates_move() -> None:
    gradients = {
        "clip_norm": 1.5,
        "clip_type": "ClipByNorm",
        "dense_weight_decay": 0.1,
        "min_norms": {"user": 0.5},
    }
    task = built(task={"gradients": gradients})
    assert task.updates() == UpdateConfig(
        clip_norm=1.5, clip_type=GradClipType.ClipByNorm, dense_weight_decay=0.1, min_norms={"user": 0.5}
    )
    assert built().updates() == UpdateConfig()
    schedule = {"kind": "cosine", "steps": 100, "warmup_steps": 5, "rows": True}
    expiry = {"max_fraction": 0.5}
    run = config_from_mapping(RunConfig, {"train": {"schedule": schedule, "expiry": expiry}}, "the config")
    assert run.train.schedule == ScheduleConfig(kind="cosine", steps=100, warmup_steps=5, rows=True)
    assert to_dict(run.train.expiry)["max_fraction"] == 0.5
