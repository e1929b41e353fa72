"""Every ready model names the inputs along its weights, so that a changed one finds its part of them."""

from __future__ import annotations

from typing import Any

import pytest

from monolith.feature import FeatureSpec, FloatFeature, IdFeature, SequenceFeature
from monolith.model import DLRM, DCNv2, DeepFM, DeepInterest, MMoE, TwoTower

FEATURES = {"user": IdFeature(), "item": IdFeature(), "price": FloatFeature(width=2)}
PLAIN = FeatureSpec(features=FEATURES)
SEQUENCE = FeatureSpec(features={**FEATURES, "seen": SequenceFeature(length=3, shares="item")})

MODELS: list[tuple[Any, FeatureSpec, dict[str, Any], str]] = [
    (DeepFM, PLAIN, {"kernel_norm": True}, "dense.mlp.0.kernel.weight"),
    (DCNv2, PLAIN, {"cross": "matrix", "kernel_norm": True}, "dense.cross.layers.1.kernel.weight"),
    (DCNv2, PLAIN, {"cross": "vector", "kernel_norm": True}, "dense.cross.layers.0.bias"),
    (DCNv2, PLAIN, {"cross": "mixed"}, "dense.cross.layers.0.up.weight"),
    (DLRM, PLAIN, {}, "dense.top.0.kernel.weight"),
    (MMoE, PLAIN, {}, "dense.mixture.gate"),
    (TwoTower, PLAIN, {"item": ["item"]}, "user_tower.0.kernel.weight"),
    (DeepInterest, SEQUENCE, {}, "dense.attention.0.attention.blocks.0.dense.kernel.weight"),
]


@pytest.mark.parametrize(("model", "spec", "settings", "one"), MODELS)
def test_the_inputs_along_an_axis_are_as_wide_as_the_axis(
    model: Any, spec: FeatureSpec, settings: dict[str, Any], one: str
) -> None:
    made = model(spec, dim=4, **settings)
    shapes = {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
    assert one in made.input_axes
    for name, axes in made.input_axes.items():
        for axis, inputs in axes.items():
            assert shapes[name][int(axis)] == sum(width for _, width in inputs), (name, axis)


@pytest.mark.parametrize(("model", "spec", "settings", "one"), MODELS)
def test_every_weight_that_an_added_feature_widens_is_named(
    model: Any, spec: FeatureSpec, settings: dict[str, Any], one: str
) -> None:
    before = model(spec, dim=4, **settings)
    after = model(FeatureSpec(features={**spec.features, "shop": IdFeature()}), dim=4, **settings)
    shapes = {name: tuple(tensor.shape) for name, tensor in before.state_dict().items()}
    for name, tensor in after.state_dict().items():
        wider = [str(axis) for axis, size in enumerate(tensor.shape) if size != shapes[name][axis]]
        assert set(wider) <= set(after.input_axes.get(name, {})), (name, one)
