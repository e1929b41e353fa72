"""Targets: the loss, the prediction and the metrics of one label agree."""

from __future__ import annotations

import math

import pytest
import torch

from monolith.errors import ConfigError, FeatureError
from monolith.nn import Target


def test_a_class_is_trained_on_its_logit_and_predicted_as_a_probability():
    target, logit, label = Target(), torch.tensor([0.0, 2.0]), torch.tensor([1.0, 0.0])
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logit, label)
    assert torch.equal(target.loss_of(logit, label), expected)
    assert torch.equal(target.prediction(logit), torch.sigmoid(logit))
    assert target.is_probability


def test_a_number_is_predicted_as_it_is():
    target = Target(loss="mse")
    assert float(target.loss_of(torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0]))) == 2.0
    assert target.prediction(torch.tensor([7.0])).tolist() == [7.0]
    assert not target.is_probability


def test_errors_above_delta_count_linearly():
    output, label = torch.tensor([0.5, 10.0]), torch.zeros(2)
    assert float(Target(loss="huber", delta=2.0).loss_of(output, label)) == pytest.approx((0.125 + 18) / 2)


def test_a_long_tail_is_trained_on_logarithms_and_predicted_on_its_own_scale():
    target, seconds = Target(loss="log"), torch.tensor([0.0, 3600.0])
    output = torch.log1p(seconds)
    assert float(target.loss_of(output, seconds)) == 0
    torch.testing.assert_close(target.prediction(output), seconds)
    assert bool(target.prediction(torch.tensor([1e6])).isfinite().all())


def test_the_loss_is_multiplied_by_the_weight():
    output, label = torch.tensor([2.0]), torch.tensor([0.0])
    assert float(Target(loss="mse", weight=0.25).loss_of(output, label)) == 1.0


class TestOptional:
    def test_an_example_without_a_label_adds_nothing_to_loss_or_gradient(self):
        output = torch.tensor([2.0, 5.0], requires_grad=True)
        loss = Target(loss="mse", optional=True).loss_of(output, torch.tensor([0.0, math.nan]))
        loss.backward()
        assert float(loss.detach()) == 2.0  # 4 over two examples: an example counts the same in every batch
        assert output.grad is not None
        assert output.grad.tolist() == [2.0, 0.0]

    def test_a_batch_without_any_label_has_no_loss(self):
        loss = Target(optional=True).loss_of(torch.zeros(2), torch.full((2,), math.nan))
        assert math.isnan(float(loss))


class TestChecks:
    def test_seconds_are_no_classes_and_the_error_says_what_to_set(self):
        with pytest.raises(FeatureError, match=r"label 'watch' is 37\.5: .* labels\.watch\.loss .*at_least"):
            Target().check("watch", torch.tensor([0.0, 37.5]))

    def test_probabilities_may_be_labels(self):
        Target().check("click", torch.tensor([0.0, 0.3, 1.0]))

    def test_logarithms_need_numbers_of_0_or_more(self):
        with pytest.raises(FeatureError, match=r"is -1: .*0 or more"):
            Target(loss="log").check("seconds", torch.tensor([-1.0, 2.0]))

    def test_missing_labels_hide_no_wrong_one(self):
        with pytest.raises(FeatureError, match="is 2"):
            Target(optional=True).check("click", torch.tensor([math.nan, 2.0]))

    @pytest.mark.parametrize(
        "wrong", [{"loss": "mea"}, {"weight": -1.0}, {"weight": math.inf}, {"delta": 0.0}]
    )
    def test_settings_that_make_no_sense_are_refused(self, wrong):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Target(**wrong)
