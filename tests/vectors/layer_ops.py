"""Ops of layers and losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vectors.case import Case, floats

from monolith.nn import layers, losses


def _leaf(values: Any) -> Tensor:
    leaf: Tensor = floats(values).requires_grad_()
    return leaf


def _gradients(out: Tensor, upstream: Any, *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, leaves, floats(upstream))


# Layer ops


def ffm(case: Case) -> Any:
    out = layers.ffm(floats(case.inputs["left"]), floats(case.inputs["right"]), **case.params)
    return {"out": out}


def ffm_grad(case: Case) -> Any:
    left, right = _leaf(case.inputs["left"]), _leaf(case.inputs["right"])
    out = layers.ffm(left, right, **case.params)
    left_grad, right_grad = _gradients(out, case.inputs["grad"], left, right)
    return {"left_grad": left_grad, "right_grad": right_grad}


def ffm_shapes(case: Case) -> Any:
    left, right = torch.ones(case.inputs["left"]), torch.ones(case.inputs["right"])
    dim_size = case.params["dim_size"]
    return {kind: list(layers.ffm(left, right, dim_size, kind).shape) for kind in ("multiply", "dot")}


def feature_insight(case: Case) -> Any:
    inputs, weight = floats(case.inputs["input"]), floats(case.inputs["weight"])
    return {"out": layers.feature_insight(inputs, weight, **case.params)}


def feature_insight_grad(case: Case) -> Any:
    inputs, weight = _leaf(case.inputs["input"]), _leaf(case.inputs["weight"])
    out = layers.feature_insight(inputs, weight, **case.params)
    input_grad, weight_grad = _gradients(out, case.inputs["grad"], inputs, weight)
    return {"input_grad": input_grad, "weight_grad": weight_grad}


def fid_counter(case: Case) -> Any:
    """A step belongs to a call; each counter of the vector has its own."""
    outs, grads = [], []
    for count, step in zip(case.inputs["counter"], case.inputs["step"], strict=True):
        counter = _leaf([count])
        out = layers.fid_counter(counter, case.params["counter_threshold"], step)
        outs.append(out.item())
        grads.append(_gradients(out, [1.0], counter)[0].item())
    return {"out": outs, "grad": grads}


# Layers


def logit_correction(case: Case) -> Any:
    logits, rate = floats(case.inputs["logits"]), floats(case.inputs["sample_rate"])
    ways = {"sample_rate only": (rate, False), "sample_bias only": (None, True), "both": (rate, True)}
    return {
        name: layers.LogitCorrection(sample_bias=ways[name][1])(logits, ways[name][0])
        for name in case.params["cases"]
    }


def dense_kernel_norm(case: Case) -> Any:
    kernel, params = floats(case.inputs["kernel"]), case.params
    dense = layers.Dense(
        *kernel.shape,
        kernel_norm=params["allow_kernel_norm"],
        kernel_norm_trainable=params["kernel_norm_trainable"],
        kernel_init=lambda weight: weight.detach().copy_(kernel),
        bias_init=lambda bias: bias.detach().copy_(floats(case.inputs["bias"])),
    )
    assert dense.kernel.norm is not None
    assert dense.kernel.norm.tolist() == case.inputs["trainable_norm"]
    return {"out_at_init": dense(floats(case.inputs["x"]))}


def dcn(case: Case) -> Any:
    kernels, biases = iter(case.inputs["kernels"]), case.inputs["bias"]
    x = floats(case.inputs["x"])
    network = layers.DCN(
        x.shape[1],
        case.params["layer_num"],
        dcn_type=case.params["dcn_type"],
        kernel_init=lambda weight: weight.detach().copy_(floats(next(kernels))),
    )
    for layer, bias in zip(network.layers, biases, strict=True):
        layer.bias.data = floats(bias).reshape(-1)
    return {"out": network(x)}


def autoint(case: Case) -> Any:
    out = layers.AutoInt(case.params["layer_num"])(floats(case.inputs["x"]))
    return {"out": layers.merge_tensor_list(out, case.params["out_type"])}


# Losses


def batch_softmax_loss(case: Case) -> Any:
    names = ("query", "item", "item_step_interval", "r")
    loss = losses.batch_softmax_loss(
        *(floats(case.inputs[name]) for name in names), **case.params, reduction="sum"
    )
    return {"loss": loss}


def inbatch_auc_loss(case: Case) -> Any:
    """What the vector calls a loss is a log-likelihood; ours of that name is its negative."""
    logit = _leaf(case.inputs["logit"])
    value = losses.inbatch_auc_log_likelihood(floats(case.inputs["label"]), logit, **case.params)
    (gradient,) = _gradients(value, case.inputs["upstream_grad"], logit)
    return {"loss": value, "logit_grad": gradient}


def approx_ranks(case: Case) -> Any:
    return {"ranks": losses.approx_ranks(floats(case.inputs["logits"]), **case.params)}


def ltr_pairwise(case: Case) -> Any:
    labels, logits = floats(case.inputs["labels"]), floats(case.inputs["logits"])
    return {
        kind: losses.RANKING_LOSSES[f"pairwise_{kind}_loss"](labels, logits)
        for kind in ("hinge", "logistic", "soft_zero_one")
    }


OPS: dict[str, Callable[[Case], Any]] = {
    "approx_ranks": approx_ranks,
    "autoint": autoint,
    "batch_softmax_loss": batch_softmax_loss,
    "dcn": dcn,
    "dense_kernel_norm": dense_kernel_norm,
    "feature_insight": feature_insight,
    "feature_insight_grad": feature_insight_grad,
    "ffm": ffm,
    "ffm_grad": ffm_grad,
    "ffm_shapes": ffm_shapes,
    "fid_counter": fid_counter,
    "inbatch_auc_loss": inbatch_auc_loss,
    "logit_correction": logit_correction,
    "ltr_pairwise": ltr_pairwise,
}
