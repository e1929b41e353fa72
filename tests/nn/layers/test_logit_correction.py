from __future__ import annotations

import math

import pytest
import torch

from monolith.errors import LayerArgumentError
from monolith.nn.layers import LogitCorrection, correct_logits

LOGITS = torch.tensor([2.0, -1.0, 0.0])


def test_nothing_to_correct_leaves_the_logits() -> None:
    assert correct_logits(LOGITS) is LOGITS


def test_a_rate_adds_minus_its_log() -> None:
    torch.testing.assert_close(correct_logits(LOGITS, 0.5), LOGITS + math.log(2))
    torch.testing.assert_close(correct_logits(LOGITS, torch.full((3,), 0.5)), LOGITS + math.log(2))


def test_a_bias_is_the_log_of_the_prediction_for_any_logit() -> None:
    found = correct_logits(torch.tensor([0.0, -1000.0, 1000.0]), sample_bias=True)
    torch.testing.assert_close(found, torch.tensor([-math.log(2), -1000.0, 0.0]))


def test_as_a_layer_it_may_have_an_activation() -> None:
    layer = LogitCorrection(sample_bias=True, activation="exponential")
    torch.testing.assert_close(layer(LOGITS), torch.sigmoid(LOGITS))


def test_a_rate_is_above_zero() -> None:
    with pytest.raises(LayerArgumentError, match="sample_rate must be above 0"):
        correct_logits(LOGITS, 0.0)
