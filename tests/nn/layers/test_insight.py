from __future__ import annotations

import pytest
import torch
from torch import Tensor

from monolith.errors import LayerArgumentError
from monolith.nn.layers import MLP, Dense, feature_insight, fid_counter, watch_segments


def reference(inputs: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
    out = torch.zeros(len(inputs), len(sizes) * weight.shape[1], dtype=inputs.dtype)
    for row in range(len(inputs)):
        begin = 0
        for segment, size in enumerate(sizes):
            for k in range(weight.shape[1]):
                for e in range(begin, begin + size):
                    out[row, segment * weight.shape[1] + k] += inputs[row, e] * weight[e, k]
            begin += size
    return out


@pytest.mark.parametrize("sizes", [[3, 1, 2], [2, 2, 2], [6], [1] * 6], ids=str)
def test_insight_is_the_product_segment_by_segment(sizes: list[int]) -> None:
    torch.manual_seed(0)
    inputs, weight = torch.randn(4, 6), torch.randn(6, 3)
    parts = feature_insight(inputs, weight, sizes)
    torch.testing.assert_close(parts, reference(inputs, weight, sizes))
    torch.testing.assert_close(parts.view(4, len(sizes), 3).sum(1), inputs @ weight)
    aggregated = feature_insight(inputs, weight, sizes, aggregate=True)
    torch.testing.assert_close(aggregated, parts.view(4, len(sizes), 3).square().sum(2))


@pytest.mark.parametrize("sizes", [[3, 1], [2, 2]], ids=str)
@pytest.mark.parametrize("aggregate", [False, True])
def test_insight_has_right_gradients(sizes: list[int], aggregate: bool) -> None:
    inputs = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: feature_insight(x, w, sizes, aggregate), (inputs, weight))


def test_segments_must_cover_the_inputs() -> None:
    with pytest.raises(LayerArgumentError, match=r"sum to the width of the inputs, 4, got 3"):
        feature_insight(torch.ones(1, 4), torch.ones(4, 1), [1, 2])
    with pytest.raises(LayerArgumentError, match="weight must have shape"):
        feature_insight(torch.ones(1, 4), torch.ones(3, 1), [4])
    with pytest.raises(LayerArgumentError, match="segment_sizes"):
        feature_insight(torch.ones(1, 4), torch.ones(4, 1), [4, 0])


# Watching a layer


def test_a_watched_layer_reports_each_training_step() -> None:
    torch.manual_seed(0)
    mlp, seen = MLP(4, (3, 1)), list[Tensor]()
    handle = watch_segments(mlp.first, [1, 3], seen.append)
    x = torch.randn(2, 4)
    mlp(x)
    mlp.eval()(x)
    (report,) = seen
    torch.testing.assert_close(report, feature_insight(x, mlp.first.kernel(), [1, 3], aggregate=True))
    assert not report.requires_grad
    handle.remove()
    mlp.train()(x)
    assert len(seen) == 1


def test_a_watch_must_fit_the_layer() -> None:
    with pytest.raises(LayerArgumentError, match="in_features, 4, got 3"):
        watch_segments(Dense(4, 1), [1, 2], lambda _: None)


# Counting ids


def test_a_counter_counts_up_to_its_threshold() -> None:
    assert fid_counter(torch.tensor([0.0, 9.5, 10.0, 12.0]), 10).tolist() == [1.0, 10.0, 10.0, 10.0]


def test_its_gradient_is_minus_the_step_whatever_comes_in() -> None:
    counter = torch.tensor([1.0, 9.5, 10.0, 12.0], requires_grad=True)
    (fid_counter(counter, 10, step=0.5) * 1234).sum().backward()
    assert counter.grad is not None
    assert counter.grad.tolist() == [-0.5, -0.5, 0.0, 0.0]


def test_sgd_with_rate_one_counts() -> None:
    counter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([counter], lr=1.0)
    for _ in range(5):
        optimizer.zero_grad()
        fid_counter(counter, 3).sum().backward()
        optimizer.step()
    assert counter.item() == 3.0


def test_a_step_goes_up() -> None:
    for wrong in ({"step": 0.0}, {"counter_threshold": 0.0}):
        with pytest.raises(LayerArgumentError, match="must be above 0"):
            fid_counter(torch.ones(1), **{"counter_threshold": 10.0, **wrong})
