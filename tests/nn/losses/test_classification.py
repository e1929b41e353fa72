from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from monolith.errors import LayerArgumentError
from monolith.nn.losses import sigmoid_loss_and_pred, softmax_loss_and_pred

LOGITS, LABEL = torch.tensor([2.0, -1.0, 0.5]), torch.tensor([1.0, 0.0, 1.0])


def cross_entropy(logit: float, label: float) -> float:
    p = 1 / (1 + math.exp(-logit))
    return -label * math.log(p) - (1 - label) * math.log(1 - p)


def loss_of(*arguments: Tensor, **options: object) -> float:
    loss = sigmoid_loss_and_pred(*arguments, **options).loss  # type: ignore[arg-type]
    assert loss is not None
    return loss.item()


# Sigmoid


def test_the_loss_is_the_mean_cross_entropy_and_the_prediction_a_probability() -> None:
    loss, pred = sigmoid_loss_and_pred(LOGITS, LABEL)
    assert loss is not None
    expected = sum(cross_entropy(x, y) for x, y in zip(LOGITS.tolist(), LABEL.tolist(), strict=True))
    assert loss.item() == pytest.approx(expected / 3)
    assert loss_of(LOGITS, LABEL, reduction="sum") == pytest.approx(expected)
    with pytest.raises(LayerArgumentError, match="reduction"):
        loss_of(LOGITS, LABEL, reduction="most")
    torch.testing.assert_close(pred, torch.sigmoid(LOGITS))


def test_the_loss_sees_corrected_logits_and_the_prediction_does_not() -> None:
    rate = torch.tensor([0.5, 0.1, 1.0])
    loss, pred = sigmoid_loss_and_pred(LOGITS, LABEL, sample_rate=rate)
    assert loss is not None
    assert loss.item() == pytest.approx(loss_of(LOGITS - rate.log(), LABEL))
    torch.testing.assert_close(pred, torch.sigmoid(LOGITS))
    corrected = sigmoid_loss_and_pred(LOGITS, LABEL, sample_rate=rate, predict_before_correction=False)
    torch.testing.assert_close(corrected.pred, torch.sigmoid(LOGITS - rate.log()))
    assert loss_of(LOGITS, LABEL, sample_bias=True) == pytest.approx(
        loss_of(torch.nn.functional.logsigmoid(LOGITS), LABEL)
    )


def test_rows_have_weights_and_may_be_masked() -> None:
    weight, mask = torch.tensor([1.0, 3.0, 5.0]), torch.tensor([True, True, False])
    expected = cross_entropy(2.0, 1.0) + 3 * cross_entropy(-1.0, 0.0)
    assert loss_of(LOGITS, LABEL, instance_weight=weight, mask=mask) == pytest.approx(expected / 3)


def test_a_masked_row_may_hold_anything() -> None:
    logits = torch.tensor([2.0, math.nan], requires_grad=True)
    loss, _ = sigmoid_loss_and_pred(logits, torch.tensor([1.0, math.nan]), mask=torch.tensor([True, False]))
    assert loss is not None
    loss.backward()
    assert loss.item() == pytest.approx(cross_entropy(2.0, 1.0) / 2)  # it counts as an example
    assert logits.grad is not None
    assert logits.grad[1].item() == 0.0


def test_corrected_logits_may_be_clipped_in_the_loss_alone() -> None:
    logits, label = torch.tensor([100.0]), torch.tensor([0.0])
    loss, pred = sigmoid_loss_and_pred(logits, label, logit_clip_threshold=0.01)
    assert loss is not None
    assert loss.item() == pytest.approx(-math.log(0.01), rel=1e-5)
    assert pred.item() == 1.0
    assert loss_of(logits, label) == 100.0


def test_predicting_needs_no_label() -> None:
    loss, pred = sigmoid_loss_and_pred(LOGITS, None)
    assert loss is None
    torch.testing.assert_close(pred, torch.sigmoid(LOGITS))


def test_columns_count_as_rows() -> None:
    assert loss_of(LOGITS[:, None], LABEL) == loss_of(LOGITS, LABEL[:, None]) == loss_of(LOGITS, LABEL)


def test_sigmoid_checks_its_arguments() -> None:
    for threshold in (0.0, 0.5, 1.0):
        with pytest.raises(LayerArgumentError, match="logit_clip_threshold"):
            loss_of(LOGITS, LABEL, logit_clip_threshold=threshold)
    with pytest.raises(LayerArgumentError, match=r"label must have shape \(3,\) or \(3, 1\), got \(2,\)"):
        loss_of(LOGITS, LABEL[:2])
    with pytest.raises(LayerArgumentError, match="mask must be bool"):
        loss_of(LOGITS, LABEL, mask=LABEL)
    with pytest.raises(LayerArgumentError, match="logits must have shape"):
        loss_of(torch.ones(3, 2), LABEL)


# Softmax


def test_each_row_has_its_loss_and_its_likeliest_class() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, 1000.0]])
    loss, pred = softmax_loss_and_pred(logits, torch.tensor([0, 2]))
    assert loss is not None
    expected = math.log(math.exp(1) + math.exp(3) + math.exp(2)) - 1
    assert loss.tolist() == pytest.approx([expected, 0.0])
    assert pred.tolist() == [1, 2]


def test_a_label_may_be_a_distribution() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    classes = [softmax_loss_and_pred(logits, torch.tensor([c])).loss for c in range(3)]
    loss = softmax_loss_and_pred(logits, torch.tensor([[0.5, 0.0, 0.5]])).loss
    assert loss is not None
    assert classes[0] is not None
    assert classes[2] is not None
    torch.testing.assert_close(loss, 0.5 * classes[0] + 0.5 * classes[2])


def test_softmax_predicts_without_label_and_checks_shapes() -> None:
    assert softmax_loss_and_pred(torch.eye(2), None).loss is None
    with pytest.raises(LayerArgumentError, match="label"):
        softmax_loss_and_pred(torch.eye(2), torch.ones(2, 3))
    with pytest.raises(LayerArgumentError, match="label"):
        softmax_loss_and_pred(torch.eye(2), torch.tensor([0]))
