"""Layers: plain `torch.nn.Module`s for models on embeddings.

Every layer is told its widths when built, keeps its kernels as (in, out), and returns what
it has to say: side losses are returned or asked for, never collected behind the scenes.
"""

from monolith.nn.layers.activations import ACTIVATIONS, Activation, MonitoredReLU, PReLU, make_activation
from monolith.nn.layers.cross_network import DCN, DCN_TYPES
from monolith.nn.layers.dense import MLP, AddBias, Dense
from monolith.nn.layers.frequency import ItemFrequency
from monolith.nn.layers.group_interactions import INTERACTIONS, GroupInt, ffm
from monolith.nn.layers.insight import feature_insight, fid_counter, watch_segments
from monolith.nn.layers.interactions import CAN, CIN, AllInt, AutoInt, CDot
from monolith.nn.layers.kernels import Kernel, WeightInit, glorot_uniform, normalize_columns
from monolith.nn.layers.logit_correction import LogitCorrection, correct_logits
from monolith.nn.layers.merging import MERGE_TYPES, merge_tensor_list
from monolith.nn.layers.multi_task import (
    GATE_TYPES,
    SNR,
    SNR_TYPES,
    GradNorm,
    GradNormOutput,
    LHUCTower,
    MMoELayer,
    MMoEOutput,
)
from monolith.nn.layers.normalization import BatchNorm, LayerNorm
from monolith.nn.layers.pooling import AvgPooling, MaxPooling, SumPooling
from monolith.nn.layers.selection import IRazor, SeNet
from monolith.nn.layers.sequences import ATTENTION_GRUS, DIEN, DIN, DIN_MODES, DMRU2I, AGRUCell

__all__ = [
    "ACTIVATIONS",
    "ATTENTION_GRUS",
    "CAN",
    "CIN",
    "DCN",
    "DCN_TYPES",
    "DIEN",
    "DIN",
    "DIN_MODES",
    "DMRU2I",
    "GATE_TYPES",
    "INTERACTIONS",
    "MERGE_TYPES",
    "MLP",
    "SNR",
    "SNR_TYPES",
    "AGRUCell",
    "Activation",
    "AddBias",
    "AllInt",
    "AutoInt",
    "AvgPooling",
    "BatchNorm",
    "CDot",
    "Dense",
    "GradNorm",
    "GradNormOutput",
    "GroupInt",
    "IRazor",
    "ItemFrequency",
    "Kernel",
    "LHUCTower",
    "LayerNorm",
    "LogitCorrection",
    "MMoELayer",
    "MMoEOutput",
    "MaxPooling",
    "MonitoredReLU",
    "PReLU",
    "SeNet",
    "SumPooling",
    "WeightInit",
    "correct_logits",
    "feature_insight",
    "ffm",
    "fid_counter",
    "glorot_uniform",
    "make_activation",
    "merge_tensor_list",
    "normalize_columns",
    "watch_segments",
]
