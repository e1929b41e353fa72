"""Every layer and loss gives on a GPU what it gives on the CPU."""

from __future__ import annotations

import pytest
import torch
from contracts.layers import LAYERS, LayerCase, as_leaves, moved, tensors_in
from torch import Tensor

from monolith.nn.layers import feature_insight, ffm, fid_counter
from monolith.nn.losses import (
    RANKING_LOSSES,
    batch_softmax_loss,
    inbatch_auc_loss,
    sigmoid_loss_and_pred,
    softmax_loss_and_pred,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-3}
"""cuDNN may round to TF32 inside a GRU."""


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", LAYERS.values(), ids=list(LAYERS))
def test_a_layer_agrees(case: LayerCase, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, inputs = case.build().to(dtype).eval(), moved(case.inputs(), dtype=dtype)
    answers, gradients = [], []
    for device in ("cpu", "cuda"):
        layer = layer.to(device)
        if any(isinstance(part, torch.nn.RNNBase) for part in layer.modules()):
            layer.train()  # cuDNN has no backward for a GRU in eval mode
        layer.zero_grad()
        leaves = as_leaves(moved(inputs, device=device))
        outs = list(tensors_in(layer(*leaves)))
        torch.stack([out.square().sum() for out in outs]).sum().backward()
        answers.append(outs)
        reached = [*layer.parameters(), *tensors_in(leaves)]
        gradients.append([tensor.grad for tensor in reached if tensor.grad is not None])
    for found in (answers, gradients):
        for left, right in zip(*found, strict=True):
            assert right.is_cuda
            torch.testing.assert_close(
                right.cpu(), left.cpu(), atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype]
            )


def test_ops_agree() -> None:
    torch.manual_seed(0)
    left, right, weight = torch.randn(3, 6), torch.randn(3, 8), torch.randn(6, 2)
    counter = torch.tensor([1.0, 9.5, 10.0])

    def run(device: str) -> list[Tensor]:
        a, b, w, c = (
            tensor.to(device, copy=True).requires_grad_() for tensor in (left, right, weight, counter)
        )
        outs = [
            ffm(a, b, 2),
            ffm(a, b, 2, "dot"),
            feature_insight(a, w, [2, 4]),
            feature_insight(a, w, [3, 3], aggregate=True),
            fid_counter(c, 10),
        ]
        torch.cat([out.flatten() for out in outs]).square().sum().backward()
        return [*outs, *(tensor.grad for tensor in (a, b, w, c) if tensor.grad is not None)]

    for on_cpu, on_gpu in zip(run("cpu"), run("cuda"), strict=True):
        torch.testing.assert_close(on_gpu.cpu(), on_cpu)


def test_losses_agree() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 5), torch.tensor([[2.0, 0, 1, -1, 0]] * 4)

    def run(device: str) -> list[Tensor]:
        x, y = logits.to(device, copy=True).requires_grad_(), labels.to(device)
        outs = [loss(y, x) for loss in RANKING_LOSSES.values()]
        outs.append(batch_softmax_loss(x, y, torch.full((4,), 3.0, device=device), y[:, 0]))
        outs.append(inbatch_auc_loss(y.flatten(), x.flatten(), 0.5))
        for head in (sigmoid_loss_and_pred(x[:, 0], y[:, 2]), softmax_loss_and_pred(x, y.clamp(min=0))):
            assert head.loss is not None
            outs.append(head.loss.sum())
        torch.stack(outs).sum().backward()
        assert x.grad is not None
        return [*outs, x.grad]

    for on_cpu, on_gpu in zip(run("cpu"), run("cuda"), strict=True):
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, atol=1e-4, rtol=1e-4)
