from __future__ import annotations

import pytest
import torch

from monolith.errors import LayerArgumentError
from monolith.nn.layers import IRazor, SeNet


def test_se_net_weighs_features_by_their_means() -> None:
    torch.manual_seed(0)
    layer, x = SeNet(3, 8), torch.randn(2, 3, 4)
    weights = layer.excite(x.mean(2))
    assert ((weights > 0) & (weights < 1)).all()
    out = layer(x)
    for feature in range(3):
        torch.testing.assert_close(out[:, feature], x[:, feature] * weights[:, feature, None])


def test_se_net_takes_features_of_different_widths() -> None:
    torch.manual_seed(0)
    layer = SeNet(2, 8)
    features = [torch.randn(3, 4), torch.randn(3, 1)]
    weights = layer.excite(torch.stack([feature.mean(1) for feature in features], 1))
    out = layer(features)
    assert isinstance(out, list)
    for position, feature in enumerate(features):
        torch.testing.assert_close(out[position], feature * weights[:, position, None])


def test_se_net_wants_all_its_features() -> None:
    with pytest.raises(LayerArgumentError, match="2 tensors, got 1"):
        SeNet(2, 8)([torch.ones(3, 4)])
    with pytest.raises(LayerArgumentError, match="SeNet: features"):
        SeNet(2, 8)(torch.ones(3, 4, 5))


def test_a_float_is_scaled_by_the_chance_that_it_is_kept() -> None:
    layer = IRazor(1, (0, 1, 3), temperature=1.0)
    layer.logits.data = torch.log(torch.tensor([[0.5, 0.3, 0.2]]))
    # Width 0 with 0.5, 1 with 0.3, 3 with 0.2: the first float stays with 0.5, the others with 0.2.
    torch.testing.assert_close(layer(torch.ones(1, 1, 3)), torch.tensor([[[0.5, 0.2, 0.2]]]))


def test_a_low_temperature_makes_the_choice_sharp() -> None:
    layer = IRazor(2, (0, 2))
    layer.logits.data = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert layer.temperature == 0.05
    torch.testing.assert_close(layer.choice_weights(), torch.eye(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        layer(torch.ones(1, 2, 2)), torch.tensor([[[0.0, 0.0], [1.0, 1.0]]]), atol=1e-6, rtol=0
    )


def test_width_has_its_price() -> None:
    layer = IRazor(2, (0, 4), feature_weights=(1.0, 10.0))
    assert layer.auxiliary_loss().item() == pytest.approx(2 * 1.0 + 2 * 10.0)
    layer.auxiliary_loss().backward()
    assert layer.logits.grad is not None
    assert (layer.logits.grad[:, 1] > layer.logits.grad[:, 0]).all()
    assert IRazor(2, (0, 4), feature_weights=0.5).auxiliary_loss().item() == pytest.approx(2.0)
    assert IRazor(2, (0, 4)).auxiliary_loss().item() == 0.0


def test_irazor_checks_its_arguments() -> None:
    for wrong in ((4,), (2, 2), (3, 1), (-1, 2)):
        with pytest.raises(LayerArgumentError, match="nas_space"):
            IRazor(1, wrong)
    with pytest.raises(LayerArgumentError, match="temperature"):
        IRazor(1, (0, 2), temperature=0)
    with pytest.raises(LayerArgumentError, match="feature_weights must be one number or 2, got 3"):
        IRazor(2, (0, 2), feature_weights=(1.0, 2.0, 3.0))
    with pytest.raises(LayerArgumentError, match="IRazor: x"):
        IRazor(2, (0, 2))(torch.ones(1, 2, 3))
