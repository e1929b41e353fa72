"""Every layer there is, small, with inputs it takes; for tests that hold for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from monolith.nn.layers import (
    CAN,
    CIN,
    DCN,
    DIEN,
    DIN,
    DMRU2I,
    MLP,
    SNR,
    AddBias,
    AGRUCell,
    AllInt,
    AutoInt,
    AvgPooling,
    BatchNorm,
    CDot,
    Dense,
    GroupInt,
    GRUEncoder,
    HSTUEncoder,
    IRazor,
    LayerNorm,
    LHUCTower,
    LogitCorrection,
    MaxPooling,
    MMoELayer,
    MonitoredReLU,
    PReLU,
    SASRecEncoder,
    SeNet,
    SumPooling,
)


class LayerCase(NamedTuple):
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]


def several(count: int, *shape: int) -> list[Tensor]:
    return [torch.randn(*shape) for _ in range(count)]


MASK = torch.tensor([[True, True, False], [True, False, True], [False, False, False], [True, True, True]])

LAYERS: Mapping[str, LayerCase] = {
    "Dense": LayerCase(lambda: Dense(3, 2, activation="tanh"), lambda: (torch.randn(4, 3),)),
    "Dense, normalised": LayerCase(lambda: Dense(3, 2, kernel_norm=True), lambda: (torch.randn(4, 3),)),
    "AddBias": LayerCase(lambda: AddBias((2, 3)), lambda: (torch.randn(4, 2, 3),)),
    "MLP": LayerCase(lambda: MLP(3, (8, 2)), lambda: (torch.randn(4, 3),)),
    "MLP, batch norm": LayerCase(lambda: MLP(3, (8, 2), batch_norm=True), lambda: (torch.randn(4, 3),)),
    "GroupInt": LayerCase(lambda: GroupInt(3), lambda: (several(2, 4, 3), several(3, 4, 3))),
    "GroupInt, dot": LayerCase(
        lambda: GroupInt(3, interaction="dot"), lambda: (several(2, 4, 3), several(3, 4, 3))
    ),
    "GroupInt, attention": LayerCase(
        lambda: GroupInt(3, attention_units=(8, 1)), lambda: (several(2, 4, 3), several(3, 4, 3))
    ),
    "AllInt": LayerCase(lambda: AllInt(5, 2), lambda: (torch.randn(4, 5, 3),)),
    "CDot": LayerCase(lambda: CDot(5, 3, 2, (8,)), lambda: (torch.randn(4, 5, 3),)),
    "CAN": LayerCase(lambda: CAN(3), lambda: (torch.randn(4, 3), torch.randn(4, 24))),
    "CIN": LayerCase(lambda: CIN(5, (4, 2)), lambda: (torch.randn(4, 5, 3),)),
    "AutoInt": LayerCase(lambda: AutoInt(2), lambda: (torch.randn(4, 5, 3),)),
    "DCN, vector": LayerCase(lambda: DCN(3, 2, dcn_type="vector"), lambda: (torch.randn(4, 3),)),
    "DCN, matrix": LayerCase(lambda: DCN(3, 2, kernel_norm=True), lambda: (torch.randn(4, 3),)),
    "DCN, mixed": LayerCase(
        lambda: DCN(3, 2, dcn_type="mixed", num_experts=3, low_rank=2), lambda: (torch.randn(4, 3),)
    ),
    "DCN, dropout": LayerCase(
        lambda: DCN(3, 2, use_dropout=True, keep_prob=0.5), lambda: (torch.randn(4, 3),)
    ),
    "SeNet": LayerCase(lambda: SeNet(5, 8), lambda: (torch.randn(4, 5, 3),)),
    "IRazor": LayerCase(lambda: IRazor(5, (0, 1, 3)), lambda: (torch.randn(4, 5, 3),)),
    "DIN": LayerCase(lambda: DIN(3, (8, 1)), lambda: (torch.randn(4, 3), torch.randn(4, 3, 3), MASK)),
    "AGRUCell": LayerCase(
        lambda: AGRUCell(3, 2), lambda: (torch.randn(4, 3), torch.randn(4, 2), torch.rand(4))
    ),
    "DIEN, AGRU": LayerCase(lambda: DIEN(2, 3, 4), lambda: (torch.randn(4, 2), torch.randn(4, 3, 3), MASK)),
    "DIEN, AUGRU": LayerCase(
        lambda: DIEN(2, 3, 4, att_type="AUGRU"), lambda: (torch.randn(4, 2), torch.randn(4, 3, 3))
    ),
    "DMRU2I": LayerCase(lambda: DMRU2I(3, 2, 3, 8), lambda: (torch.randn(4, 2), torch.randn(4, 3, 3), MASK)),
    "HSTUEncoder": LayerCase(
        lambda: HSTUEncoder(4, 6, heads=2),
        lambda: (torch.randn(5, 4), torch.tensor([0, 3, 3, 5]), torch.tensor([0, 60, 3600, 0, 86400])),
    ),
    "SASRecEncoder": LayerCase(
        lambda: SASRecEncoder(4, 6, heads=2), lambda: (torch.randn(5, 4), torch.tensor([0, 3, 3, 5]))
    ),
    "GRUEncoder": LayerCase(
        lambda: GRUEncoder(4, 6), lambda: (torch.randn(5, 4), torch.tensor([0, 3, 3, 5]))
    ),
    "LHUCTower": LayerCase(
        lambda: LHUCTower(3, (8, 2), lhuc_features=5, lhuc_output_dims=(8,)),
        lambda: (torch.randn(4, 3), torch.randn(4, 5)),
    ),
    "MMoELayer": LayerCase(lambda: MMoELayer(3, 2, 3, (8, 2)), lambda: (torch.randn(4, 3),)),
    "MMoELayer, topk": LayerCase(
        lambda: MMoELayer(3, 2, 3, (8, 2), gate_type="topk", top_k=2, gate_init=nn.init.normal_),
        lambda: (torch.randn(4, 3),),
    ),
    "MMoELayer, noise_topk": LayerCase(
        lambda: MMoELayer(3, 2, 3, (8, 2), gate_type="noise_topk", top_k=2), lambda: (torch.randn(8, 3),)
    ),
    "SNR": LayerCase(lambda: SNR(3, 2, 2, 4), lambda: (several(3, 4, 2),)),
    "SNR, aver": LayerCase(lambda: SNR(3, 2, 2, 2, snr_type="aver"), lambda: (several(3, 4, 2),)),
    "BatchNorm": LayerCase(lambda: BatchNorm(3), lambda: (torch.randn(4, 3),)),
    "LayerNorm": LayerCase(lambda: LayerNorm(3, nn.init.ones_), lambda: (torch.randn(4, 3),)),
    "SumPooling": LayerCase(SumPooling, lambda: (several(3, 4, 2),)),
    "AvgPooling": LayerCase(AvgPooling, lambda: (several(3, 4, 2),)),
    "MaxPooling": LayerCase(MaxPooling, lambda: (several(3, 4, 2),)),
    "LogitCorrection": LayerCase(
        lambda: LogitCorrection(sample_bias=True), lambda: (torch.randn(4), torch.rand(4))
    ),
    "PReLU": LayerCase(lambda: PReLU(3), lambda: (torch.randn(4, 3),)),
    "MonitoredReLU": LayerCase(lambda: MonitoredReLU(3), lambda: (torch.randn(4, 3),)),
}


def tensors_in(answer: Any) -> Iterator[Tensor]:
    """Yield the tensors of an answer or of arguments, in order."""
    if isinstance(answer, Tensor):
        yield answer
    else:
        for part in answer:
            yield from tensors_in(part)


def moved(inputs: Any, **where: Any) -> Any:
    """Return inputs on another device or, the floats among them, of another dtype."""
    if isinstance(inputs, Tensor):
        if not inputs.is_floating_point():
            where = {name: value for name, value in where.items() if name != "dtype"}
        return inputs.to(**where)
    return type(inputs)(moved(part, **where) for part in inputs)


def as_leaves(inputs: Any) -> Any:
    """Return inputs whose floats collect gradients."""
    if isinstance(inputs, Tensor):
        return inputs.detach().requires_grad_() if inputs.is_floating_point() else inputs
    return type(inputs)(as_leaves(part) for part in inputs)
